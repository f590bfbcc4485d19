//! How 32 columns of one row are quantised, and the order in which each tier reads them.

use super::{Sums, BLOCK};

/// What lies below is zero to the kernels; 127 over a smaller number could be infinite.
const SMALLEST: f32 = 1e-30;

/// What relaxed SIMD reads of a block: for four columns each the four bytes. Quants that fill eight bits read another, the
/// wide array: for four columns each the magnitudes and the mask that turns `w + 128` into `w` (activation >= 0) or
/// `-w - 1` (below).
#[cfg(all(target_arch = "wasm32", target_feature = "simd128", target_feature = "relaxed-simd"))]
pub(crate) mod form {
    use super::BLOCK;
    pub(crate) type Element = u8;
    /// Elements of a block of one row in the wide array, where there is one.
    pub(crate) const WIDE: Option<usize> = Some(2 * BLOCK);

    /// Writes row `j` of `n` into a tile's block; the wide one may be empty.
    pub(crate) fn put(q: &[i8; BLOCK], plain: &mut [Element], wide: &mut [Element], j: usize, n: usize) {
        let (sizes, masks) = (q.map(|q| q.unsigned_abs()), q.map(|q| if q < 0 { 0x7f } else { 0x80 }));
        let q = q.map(|q| q as u8);
        for c in 0..BLOCK / 4 {
            let four = 4 * c..4 * c + 4;
            plain[4 * (c * n + j)..][..4].copy_from_slice(&q[four.clone()]);
            if !wide.is_empty() {
                let wide = &mut wide[8 * (c * n + j)..][..8];
                wide[..4].copy_from_slice(&sizes[four.clone()]);
                wide[4..].copy_from_slice(&masks[four]);
            }
        }
    }

    /// Column `i` of row `j` of `n`.
    pub(crate) fn get(tile: &[Element], j: usize, n: usize, i: usize) -> i16 {
        i16::from(tile[4 * (i / 4 * n + j) + i % 4] as i8)
    }
}

/// What plain SIMD reads of a block: 16-bit numbers, for four columns each the even two, then the odd two.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128", not(target_feature = "relaxed-simd")))]
pub(crate) mod form {
    use super::BLOCK;
    pub(crate) type Element = i16;
    /// There is no wide array.
    pub(crate) const WIDE: Option<usize> = None;

    /// Where column `i` of row `j` of `n` stands: (c, odd, j, which of the two).
    fn place(j: usize, n: usize, i: usize) -> usize {
        2 * ((i / 4 * 2 + i % 2) * n + j) + i % 4 / 2
    }

    /// Writes row `j` of `n` into a tile's block.
    pub(crate) fn put(q: &[i8; BLOCK], tile: &mut [Element], _wide: &mut [Element], j: usize, n: usize) {
        let q = q.map(i16::from);
        for c in 0..BLOCK / 4 {
            for odd in 0..2 {
                let i = 4 * c + odd;
                tile[place(j, n, i)..][..2].copy_from_slice(&[q[i], q[i + 2]]);
            }
        }
    }

    /// Column `i` of row `j` of `n`.
    pub(crate) fn get(tile: &[Element], j: usize, n: usize, i: usize) -> i16 {
        tile[place(j, n, i)]
    }
}

/// What the scalar reference reads of a block: 16-bit numbers in their order, a row's block after the other.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
pub(crate) mod form {
    use super::BLOCK;
    pub(crate) type Element = i16;
    /// There is no wide array.
    pub(crate) const WIDE: Option<usize> = None;

    /// Writes row `j` into a tile's block.
    #[inline]
    pub(crate) fn put(q: &[i8; BLOCK], tile: &mut [Element], _wide: &mut [Element], j: usize, _n: usize) {
        tile[j * BLOCK..][..BLOCK].copy_from_slice(&q.map(i16::from));
    }

    /// Column `i` of row `j`.
    #[inline]
    pub(crate) fn get(tile: &[Element], j: usize, _n: usize, i: usize) -> i16 {
        tile[j * BLOCK + i]
    }
}

impl Sums {
    #[inline(always)]
    fn of(q: &[i8; BLOCK]) -> Self {
        let q = q.map(i32::from);
        let low = -q[..16].iter().sum::<i32>();
        let high = -q[16..].iter().sum::<i32>();
        Self { low, high, all: low + high, negative: -q.iter().map(|q| (*q).min(0)).sum::<i32>() }
    }
}

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
pub(super) use quantize_into_reference as quantize_into;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(super) use simd::quantize_into;

/// Quantises `x` as row `j` of `n` of a tile's block; returns its scale and sums.
#[allow(dead_code)] // on wasm only tests use it
#[inline(always)]
pub(super) fn quantize_into_reference(
    x: &[f32; BLOCK],
    plain: &mut [form::Element],
    wide: &mut [form::Element],
    j: usize,
    n: usize,
) -> (f32, Sums) {
    let (quants, scale) = quantize(x);
    form::put(&quants, plain, wide, j, n);
    (scale, Sums::of(&quants))
}

/// The twin of [`quantize_into_reference`] for wasm.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd {
    use super::{form, Sums, BLOCK, MAGIC, SMALLEST};
    use core::arch::wasm32::*;

    #[inline(always)]
    pub(in super::super) fn quantize_into(
        x: &[f32; BLOCK],
        plain: &mut [form::Element],
        wide: &mut [form::Element],
        j: usize,
        n: usize,
    ) -> (f32, Sums) {
        assert!(plain.len() == n * BLOCK && j < n);
        assert!(wide.is_empty() || form::WIDE.is_some_and(|each| wide.len() == n * each));
        // SAFETY: 4 i + 4 <= 32.
        let x: [v128; 8] = std::array::from_fn(|i| unsafe { v128_load(x.as_ptr().add(4 * i).cast()) });
        let most =
            x.map(|x| v128_and(x, i32x4_splat(0x7fff_ffff))).into_iter().reduce(|a, b| i32x4_max(a, b));
        let most = most.unwrap_or(i32x4_splat(0));
        let most = i32x4_max(most, i32x4_shuffle::<2, 3, 0, 1>(most, most));
        let most = i32x4_max(most, i32x4_shuffle::<1, 0, 3, 2>(most, most));
        let amax = f32::from_bits(i32x4_extract_lane::<0>(most) as u32);
        let (inverse, scale) = if !amax.is_finite() {
            (f32x4_splat(0.0), f32::NAN)
        } else if amax < SMALLEST {
            (f32x4_splat(0.0), 0.0)
        } else {
            (f32x4_splat(127.0 / amax), amax / 127.0)
        };
        let magic = f32x4_splat(MAGIC);
        let q = x.map(|x| i32x4_sub(f32x4_add(f32x4_mul(x, inverse), magic), magic));
        let halves = [0, 2, 4, 6].map(|i| i16x8_narrow_i32x4(q[i], q[i + 1]));
        let mut bytes = [0, 2].map(|i| i8x16_narrow_i16x8(halves[i], halves[i + 1]));
        if !amax.is_finite() {
            // Zero times an infinity was no number.
            bytes = [i8x16_splat(0); 2];
        }
        // SAFETY: the tile's lengths are asserted above.
        unsafe { put(bytes, plain.as_mut_ptr(), j, n) };
        #[cfg(target_feature = "relaxed-simd")]
        if !wide.is_empty() {
            // SAFETY: as above.
            unsafe { put_wide(bytes, wide.as_mut_ptr(), j, n) };
        }
        let total = |q: v128| i32x4_extadd_pairwise_i16x8(i16x8_extadd_pairwise_i8x16(q));
        let below = |q: v128| total(i8x16_min(q, i8x16_splat(0)));
        let (low, high) = (total(bytes[0]), total(bytes[1]));
        let negative = i32x4_add(below(bytes[0]), below(bytes[1]));
        // Three sums across lanes at once.
        let pairs = i32x4_add(i32x4_shuffle::<0, 4, 1, 5>(low, high), i32x4_shuffle::<2, 6, 3, 7>(low, high));
        let pairs = i32x4_neg(i32x4_add(pairs, i32x4_shuffle::<2, 3, 0, 1>(pairs, pairs)));
        let negative = i32x4_add(negative, i32x4_shuffle::<2, 3, 0, 1>(negative, negative));
        let negative = -(i32x4_extract_lane::<0>(negative) + i32x4_extract_lane::<1>(negative));
        let (low, high) = (i32x4_extract_lane::<0>(pairs), i32x4_extract_lane::<1>(pairs));
        (scale, Sums { low, high, all: low + high, negative })
    }

    /// The plain part of `form::put`, of 32 bytes.
    ///
    /// # Safety
    /// `tile` is writable for `32 * n` elements, and `j < n`.
    #[cfg(target_feature = "relaxed-simd")]
    #[inline(always)]
    unsafe fn put(q: [v128; 2], tile: *mut u8, j: usize, n: usize) {
        for (half, q) in q.into_iter().enumerate() {
            // SAFETY: column group c < 8 and row j < n, inside the tile.
            unsafe {
                let plain = |c: usize| tile.add(4 * ((4 * half + c) * n + j));
                v128_store32_lane::<0>(q, plain(0).cast());
                v128_store32_lane::<1>(q, plain(1).cast());
                v128_store32_lane::<2>(q, plain(2).cast());
                v128_store32_lane::<3>(q, plain(3).cast());
            }
        }
    }

    /// The wide part of `form::put`, of 32 bytes.
    ///
    /// # Safety
    /// `tile` is writable for `n * form::WIDE` elements, and `j < n`.
    #[cfg(target_feature = "relaxed-simd")]
    #[inline(always)]
    unsafe fn put_wide(q: [v128; 2], tile: *mut u8, j: usize, n: usize) {
        for (half, q) in q.into_iter().enumerate() {
            let sizes = i8x16_abs(q);
            let masks = v128_xor(i8x16_shr(q, 7), i8x16_splat(-128));
            let wide = [i32x4_shuffle::<0, 4, 1, 5>(sizes, masks), i32x4_shuffle::<2, 6, 3, 7>(sizes, masks)];
            // SAFETY: column group c < 8 and row j < n, inside the tile.
            unsafe {
                let both = |c: usize| tile.add(8 * ((4 * half + c) * n + j));
                v128_store64_lane::<0>(wide[0], both(0).cast());
                v128_store64_lane::<1>(wide[0], both(1).cast());
                v128_store64_lane::<0>(wide[1], both(2).cast());
                v128_store64_lane::<1>(wide[1], both(3).cast());
            }
        }
    }

    /// `form::put`, of 32 bytes.
    ///
    /// # Safety
    /// `tile` is writable for `32 * n` elements, and `j < n`.
    #[cfg(not(target_feature = "relaxed-simd"))]
    #[inline(always)]
    unsafe fn put(q: [v128; 2], tile: *mut i16, j: usize, n: usize) {
        for (half, q) in q.into_iter().enumerate() {
            for (part, q) in [i16x8_extend_low_i8x16(q), i16x8_extend_high_i8x16(q)].into_iter().enumerate() {
                // Of four columns each the even two, then the odd two.
                let q = i16x8_shuffle::<0, 2, 1, 3, 4, 6, 5, 7>(q, q);
                // SAFETY: column group c < 8 and row j < n, inside the tile.
                unsafe {
                    let pair = |i: usize| tile.add(2 * ((8 * half + 4 * part + i) * n + j));
                    v128_store32_lane::<0>(q, pair(0).cast());
                    v128_store32_lane::<1>(q, pair(1).cast());
                    v128_store32_lane::<2>(q, pair(2).cast());
                    v128_store32_lane::<3>(q, pair(3).cast());
                }
            }
        }
    }
}

/// 1.5 * 2^23: a sum with it has the rounded integer in its low bits.
const MAGIC: f32 = 12_582_912.0;

/// 32 values as signed bytes and their scale: the largest magnitude over 127, rounded half to even.
#[inline(always)]
fn quantize(x: &[f32; BLOCK]) -> ([i8; BLOCK], f32) {
    // Without the sign bit, floats are ordered as integers are, with the infinities and then NaN on top.
    let amax = f32::from_bits(x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff)));
    if !amax.is_finite() {
        return ([0; BLOCK], f32::NAN);
    }
    if amax < SMALLEST {
        return ([0; BLOCK], 0.0);
    }
    let inverse = 127.0 / amax;
    let q = x.map(|x| (x * inverse + MAGIC).to_bits() as i8);
    (q, amax / 127.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn a_block_is_quantised_as_by_the_reference() {
        let block = |seed: usize, scale: f32| -> [f32; BLOCK] {
            std::array::from_fn(|i| ((i * 37 + seed * 61) % 255) as f32 / 127.0 * scale - scale)
        };
        let mut blocks: Vec<[f32; BLOCK]> =
            (0..64).map(|i| block(i, 10f32.powi(i as i32 % 40 - 20))).collect();
        blocks.extend([
            [0.0; BLOCK],
            [-0.0; BLOCK],
            [1e-31; BLOCK],
            [f32::MAX; BLOCK],
            [f32::MIN_POSITIVE; BLOCK],
        ]);
        for odd in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.5, -1e30] {
            for at in [0, 13, 31] {
                let mut x = block(at, 1.0);
                x[at] = std::hint::black_box(odd);
                blocks.push(x);
            }
        }
        for n in [1, 2, 4, 8] {
            for (i, x) in blocks.iter().enumerate() {
                let j = i % n;
                let (mut got, mut want) = (vec![7; n * BLOCK], vec![7; n * BLOCK]);
                let wide = if i % 3 == 0 { 0 } else { n * form::WIDE.unwrap_or(0) };
                let (mut got_wide, mut want_wide) = (vec![7; wide], vec![7; wide]);
                let (scale, sums) = quantize_into(x, &mut got, &mut got_wide, j, n);
                let (want_scale, want_sums) = quantize_into_reference(x, &mut want, &mut want_wide, j, n);
                assert_eq!(got_wide, want_wide, "row {j} of {n}: {x:?}");
                assert!(
                    scale == want_scale || (scale.is_nan() && want_scale.is_nan()),
                    "{scale} {want_scale}"
                );
                assert_eq!(sums, want_sums);
                assert_eq!(got, want, "row {j} of {n}: {x:?}");
                let bytes = x.map(|x| if want_scale > 0.0 { x / want_scale } else { 0.0 });
                for (c, q) in bytes.into_iter().enumerate() {
                    assert!(!q.is_finite() || (f32::from(form::get(&got, j, n, c)) - q).abs() <= 0.501);
                }
            }
        }
    }
}
