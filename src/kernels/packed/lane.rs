//! What the formats are unpacked with: 32-bit lanes, one (`u32`: one row, the scalar reference) or four (`v128`: the
//! four rows of a group). The unpacking of each format is written once over [`Lane`]; only the sums differ by tier.

/// One or four lanes of 32 bits; the operations are lane-wise or byte-wise.
pub(crate) trait Lane: Copy {
    /// The same number of f32 lanes.
    type Float: Copy;

    /// Reads one lane (`u32`) or four (`v128`), little-endian.
    ///
    /// # Safety
    /// 4 (16) bytes at `at` must be readable; no alignment is needed.
    unsafe fn load(at: *const u8) -> Self;
    /// Reads one or four f32.
    ///
    /// # Safety
    /// As [`Lane::load`].
    unsafe fn load_f32(at: *const u8) -> Self::Float;
    /// `x` in all lanes.
    fn splat(x: u32) -> Self;
    /// Bitwise and.
    fn and(self, other: Self) -> Self;
    /// Bitwise or.
    fn or(self, other: Self) -> Self;
    /// Lanes shifted left.
    fn shl(self, bits: u32) -> Self;
    /// Lanes shifted right, zeros coming in.
    fn shr(self, bits: u32) -> Self;
    /// Lanes shifted right, the sign coming in.
    fn shr_signed(self, bits: u32) -> Self;
    /// Lane-wise difference of integers.
    fn sub(self, other: Self) -> Self;
    /// Each byte (0..16) replaced by that entry of `table`.
    fn lookup(self, table: &[u8; 16]) -> Self;
    /// Signed integers to the nearest f32.
    fn to_f32(self) -> Self::Float;
    /// Product of f32 lanes.
    fn mul_f32(a: Self::Float, b: Self::Float) -> Self::Float;
}

impl Lane for u32 {
    type Float = f32;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: the caller promises 4 readable bytes.
        u32::from_le(unsafe { at.cast::<u32>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f32(at: *const u8) -> f32 {
        // SAFETY: as the caller promises.
        f32::from_bits(unsafe { Self::load(at) })
    }
    #[inline(always)]
    fn splat(x: u32) -> Self {
        x
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        self & other
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self | other
    }
    #[inline(always)]
    fn shl(self, bits: u32) -> Self {
        self << bits
    }
    #[inline(always)]
    fn shr(self, bits: u32) -> Self {
        self >> bits
    }
    #[inline(always)]
    fn shr_signed(self, bits: u32) -> Self {
        (self as i32 >> bits) as u32
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.wrapping_sub(other)
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16]) -> Self {
        u32::from_le_bytes(self.to_le_bytes().map(|b| table[usize::from(b & 15)]))
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as i32 as f32
    }
    #[inline(always)]
    fn mul_f32(a: f32, b: f32) -> f32 {
        a * b
    }
}

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd {
    use super::Lane;
    use core::arch::wasm32::*;

    impl Lane for v128 {
        type Float = v128;

        #[inline(always)]
        unsafe fn load(at: *const u8) -> Self {
            // SAFETY: the caller promises 16 readable bytes.
            unsafe { v128_load(at.cast()) }
        }
        #[inline(always)]
        unsafe fn load_f32(at: *const u8) -> v128 {
            // SAFETY: as the caller promises.
            unsafe { v128_load(at.cast()) }
        }
        #[inline(always)]
        fn splat(x: u32) -> Self {
            u32x4_splat(x)
        }
        #[inline(always)]
        fn and(self, other: Self) -> Self {
            v128_and(self, other)
        }
        #[inline(always)]
        fn or(self, other: Self) -> Self {
            v128_or(self, other)
        }
        #[inline(always)]
        fn shl(self, bits: u32) -> Self {
            i32x4_shl(self, bits)
        }
        #[inline(always)]
        fn shr(self, bits: u32) -> Self {
            u32x4_shr(self, bits)
        }
        #[inline(always)]
        fn shr_signed(self, bits: u32) -> Self {
            i32x4_shr(self, bits)
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            i32x4_sub(self, other)
        }
        #[inline(always)]
        fn lookup(self, table: &[u8; 16]) -> Self {
            // SAFETY: the table is 16 bytes long.
            i8x16_swizzle(unsafe { v128_load(table.as_ptr().cast()) }, self)
        }
        #[inline(always)]
        fn to_f32(self) -> v128 {
            f32x4_convert_i32x4(self)
        }
        #[inline(always)]
        fn mul_f32(a: v128, b: v128) -> v128 {
            f32x4_mul(a, b)
        }
    }
}
