//! The float types F32, F16 and BF16. They stay as wide as they are in the file; a unit is one column of four rows.

use super::format::{Blocks, Float, Layout};
use super::lane::Lane;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use core::arch::wasm32::*;

macro_rules! layout {
    ($name:ident, $file:literal) => {
        #[doc = concat!("`", stringify!($name), "`: ", $file, " bytes an element.")]
        pub(crate) struct $name;
        impl Layout for $name {
            const COLS: usize = 1;
            const FILE_BYTES: usize = $file;
            const BYTES: usize = 4 * $file;
            const LANE: usize = $file;
            #[inline(always)]
            unsafe fn pack<L: Lane>(blocks: Blocks, unit: *mut u8) {
                let rows = size_of::<L>() / 4;
                for row in 0..rows {
                    // SAFETY: one element of a row of the blocks and of the unit that the caller promises.
                    unsafe {
                        let from = blocks.at.add(row * blocks.stride);
                        std::ptr::copy_nonoverlapping(from, unit.add($file * row), $file);
                    }
                }
            }
        }
    };
}

layout!(F32, 4);
layout!(F16, 2);
layout!(Bf16, 2);

impl Float for F32 {
    #[inline(always)]
    fn decode(b: &[u8]) -> f32 {
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    #[inline(always)]
    unsafe fn load<const SPECIALS: bool>(unit: *const u8) -> v128 {
        // SAFETY: the caller promises a unit of 16 bytes.
        unsafe { v128_load(unit.cast()) }
    }
}

impl Float for F16 {
    #[inline(always)]
    fn decode(b: &[u8]) -> f32 {
        half::f16::from_le_bytes([b[0], b[1]]).to_f32()
    }
    /// Exact for every f16: the bits are shifted to f32's places and the exponent's bias is mended by a product with
    /// 2^112, which also makes subnormals normal; infinities and NaN get their all-ones exponent by hand.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    #[inline(always)]
    unsafe fn load<const SPECIALS: bool>(unit: *const u8) -> v128 {
        // SAFETY: the caller promises a unit of 8 bytes.
        let h = unsafe { i32x4_load_extend_i16x4(unit.cast()) };
        let moved = v128_and(i32x4_shl(h, 13), u32x4_splat(0x8fff_e000));
        let value = f32x4_mul(moved, f32x4_splat(f32::from_bits((127 + 112) << 23)));
        if !SPECIALS {
            return value;
        }
        let exponent = u32x4_splat(0x7c00);
        let special = v128_and(i32x4_eq(v128_and(h, exponent), exponent), u32x4_splat(0x7f80_0000));
        v128_or(value, special)
    }
}

impl Float for Bf16 {
    #[inline(always)]
    fn decode(b: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)
    }
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    #[inline(always)]
    unsafe fn load<const SPECIALS: bool>(unit: *const u8) -> v128 {
        // SAFETY: the caller promises a unit of 8 bytes.
        i32x4_shl(unsafe { u32x4_load_extend_u16x4(unit.cast()) }, 16)
    }
}
