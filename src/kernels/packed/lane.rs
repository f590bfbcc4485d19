//! What the formats are packed and unpacked with: 32-bit lanes, one (`u32`: one row, the scalar reference) or four (`v128`:
//! the four rows of a group). Both are written once over [`Lane`]; only the sums differ by tier.

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
    /// Writes one lane or four, little-endian.
    ///
    /// # Safety
    /// 4 (16) bytes at `at` must be writable; no alignment is needed.
    unsafe fn store(self, at: *mut u8);
    /// The word at `at` of each row; rows are `stride` bytes apart.
    ///
    /// # Safety
    /// 4 bytes there must be readable, in each of one (four) rows.
    unsafe fn gather(at: *const u8, stride: usize) -> Self;
    /// As [`Lane::gather`], the four words from `at` on.
    ///
    /// # Safety
    /// 16 bytes there must be readable, in each of one (four) rows.
    unsafe fn gather_four(at: *const u8, stride: usize) -> [Self; 4];
    /// `x` in all lanes.
    fn splat(x: u32) -> Self;
    /// Bitwise and.
    fn and(self, other: Self) -> Self;
    /// Bitwise or.
    fn or(self, other: Self) -> Self;
    /// Bitwise exclusive or.
    fn xor(self, other: Self) -> Self;
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
    /// The f16 in the low half of each lane (zeros above it) as f32 bits.
    fn widen_half(self) -> Self;
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
    unsafe fn store(self, at: *mut u8) {
        // SAFETY: the caller promises 4 writable bytes.
        unsafe { at.cast::<u32>().write_unaligned(self.to_le()) };
    }
    #[inline(always)]
    unsafe fn gather(at: *const u8, _stride: usize) -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self::load(at) }
    }
    #[inline(always)]
    unsafe fn gather_four(at: *const u8, _stride: usize) -> [Self; 4] {
        // SAFETY: as the caller promises.
        [0, 4, 8, 12].map(|i| unsafe { Self::load(at.add(i)) })
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
    fn xor(self, other: Self) -> Self {
        self ^ other
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
    fn widen_half(self) -> Self {
        half::f16::from_bits(self as u16).to_f32().to_bits()
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
        unsafe fn store(self, at: *mut u8) {
            // SAFETY: the caller promises 16 writable bytes.
            unsafe { v128_store(at.cast(), self) };
        }
        #[inline(always)]
        unsafe fn gather(at: *const u8, stride: usize) -> Self {
            // SAFETY: the caller promises 4 readable bytes in each of four rows.
            unsafe {
                let words = v128_load32_splat(at.cast());
                let words = v128_load32_lane::<1>(words, at.add(stride).cast());
                let words = v128_load32_lane::<2>(words, at.add(2 * stride).cast());
                v128_load32_lane::<3>(words, at.add(3 * stride).cast())
            }
        }
        #[inline(always)]
        unsafe fn gather_four(at: *const u8, stride: usize) -> [Self; 4] {
            // SAFETY: the caller promises 16 readable bytes in each of four rows.
            let [a, b, c, d] = [0, 1, 2, 3].map(|row| unsafe { v128_load(at.add(row * stride).cast()) });
            let (ab, ab_high) = (i32x4_shuffle::<0, 4, 1, 5>(a, b), i32x4_shuffle::<2, 6, 3, 7>(a, b));
            let (cd, cd_high) = (i32x4_shuffle::<0, 4, 1, 5>(c, d), i32x4_shuffle::<2, 6, 3, 7>(c, d));
            [
                i64x2_shuffle::<0, 2>(ab, cd),
                i64x2_shuffle::<1, 3>(ab, cd),
                i64x2_shuffle::<0, 2>(ab_high, cd_high),
                i64x2_shuffle::<1, 3>(ab_high, cd_high),
            ]
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
        fn xor(self, other: Self) -> Self {
            v128_xor(self, other)
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
        fn widen_half(self) -> Self {
            // As in `float.rs`; a NaN becomes a quiet one, as the scalar twin's does.
            let signed = i32x4_shr(i32x4_shl(self, 16), 16);
            let moved = v128_and(i32x4_shl(signed, 13), u32x4_splat(0x8fff_e000));
            let value = f32x4_mul(moved, f32x4_splat(f32::from_bits((127 + 112) << 23)));
            let magnitude = v128_and(self, u32x4_splat(0x7fff));
            let special = v128_and(i32x4_gt(magnitude, u32x4_splat(0x7bff)), u32x4_splat(0x7f80_0000));
            let nan = v128_and(i32x4_gt(magnitude, u32x4_splat(0x7c00)), u32x4_splat(0x0040_0000));
            v128_or(value, v128_or(special, nan))
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
