//! Activations as the matrix kernels read them: T rows of K values, quantised once for all matrices that they meet.
//!
//! 32 columns share one f32 scale and are rounded to signed bytes. Rows stand in tiles of 8, 4, 2 and 1; a tile's rows
//! are interleaved so that a kernel reads it from front to back. The order inside a block is the tier's own.

use super::parallel::{for_ranges, SharedOut};
use std::borrow::Cow;

/// Rows of the largest tile.
pub(crate) const TILE: usize = 8;

/// Values that a task quantises at least: some 10 µs.
const TASK_VALUES: usize = 1 << 14;

/// Columns that share a scale.
pub(crate) const BLOCK: usize = 32;

/// What lies below is zero to the kernels; 127 over a smaller number could be infinite.
const SMALLEST: f32 = 1e-30;

/// Sums over a block's quantised activations that the kernels need beside the products.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Sums {
    /// Minus the sum of columns 0..16.
    pub low: i32,
    /// Minus the sum of columns 16..32.
    pub high: i32,
    /// Minus the sum of all.
    pub all: i32,
    /// Minus the sum of the negative ones.
    pub negative: i32,
}

/// What relaxed SIMD reads of a block: for four columns each the four bytes; then, for quants that fill eight bits, for
/// four columns each the magnitudes and the mask that turns `w + 128` into `w` (activation >= 0) or `-w - 1` (below).
#[cfg(all(target_arch = "wasm32", target_feature = "simd128", target_feature = "relaxed-simd"))]
pub(crate) mod form {
    use super::BLOCK;
    pub(crate) type Element = u8;
    /// Elements of a block of one row.
    pub(crate) const LEN: usize = 3 * BLOCK;

    /// Writes row `j` of `n` into a tile's block.
    pub(crate) fn put(q: &[i8; BLOCK], tile: &mut [Element], j: usize, n: usize) {
        let (plain, wide) = tile.split_at_mut(n * BLOCK);
        let (sizes, masks) = (q.map(|q| q.unsigned_abs()), q.map(|q| if q < 0 { 0x7f } else { 0x80 }));
        let q = q.map(|q| q as u8);
        for c in 0..BLOCK / 4 {
            let four = 4 * c..4 * c + 4;
            plain[4 * (c * n + j)..][..4].copy_from_slice(&q[four.clone()]);
            let wide = &mut wide[8 * (c * n + j)..][..8];
            wide[..4].copy_from_slice(&sizes[four.clone()]);
            wide[4..].copy_from_slice(&masks[four]);
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
    /// Elements of a block of one row.
    pub(crate) const LEN: usize = BLOCK;

    /// Where column `i` of row `j` of `n` stands: (c, odd, j, which of the two).
    fn place(j: usize, n: usize, i: usize) -> usize {
        2 * ((i / 4 * 2 + i % 2) * n + j) + i % 4 / 2
    }

    /// Writes row `j` of `n` into a tile's block.
    pub(crate) fn put(q: &[i8; BLOCK], tile: &mut [Element], j: usize, n: usize) {
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
    /// Elements of a block of one row.
    pub(crate) const LEN: usize = BLOCK;

    /// Writes row `j` into a tile's block.
    #[inline]
    pub(crate) fn put(q: &[i8; BLOCK], tile: &mut [Element], j: usize, _n: usize) {
        tile[j * BLOCK..][..BLOCK].copy_from_slice(&q.map(i16::from));
    }

    /// Column `i` of row `j`.
    #[inline]
    pub(crate) fn get(tile: &[Element], j: usize, _n: usize, i: usize) -> i16 {
        tile[j * BLOCK + i]
    }
}

/// T rows of K activations.
pub struct Activations<'a> {
    xs: Cow<'a, [f32]>,
    t: usize,
    k: usize,
    blocks: usize,
    quants: Vec<form::Element>,
    scales: Vec<f32>,
    sums: Vec<Sums>,
}

impl<'a> Activations<'a> {
    /// Quantises `xs` (T, K), row after row. Panics where the length is another.
    ///
    /// A block with a NaN or an infinity gets a NaN scale, so that every product with it is NaN. Where `k` is no
    /// multiple of 32, only float weights can be multiplied, and those read the f32 rows.
    pub fn new(xs: &'a [f32], t: usize, k: usize) -> Self {
        assert_eq!(Some(xs.len()), t.checked_mul(k), "{t} rows of {k} activations");
        let mut new = Self::empty(t, k);
        new.each_tile(|tile, mut rows| {
            for j in 0..tile.n {
                rows.quantize(j, &xs[(tile.t0 + j) * k..][..k]);
            }
        });
        new.xs = Cow::Borrowed(xs);
        new
    }

    /// As [`Activations::new`], of rows that `row(t, out)` makes, in the same parallel region. The f32 rows are kept only
    /// where `keep` asks for them: float weights and a `k` that is no multiple of 32 need them.
    pub fn made(t: usize, k: usize, keep: bool, row: impl Fn(usize, &mut [f32]) + Sync) -> Self {
        let mut new = Self::empty(t, k);
        let keep = keep || new.blocks == 0;
        let mut values = vec![0.0; if keep { t * k } else { 0 }];
        let xs = SharedOut::new(&mut values);
        new.each_tile(|tile, mut rows| {
            let mut scratch = vec![0.0; if keep { 0 } else { k }];
            for j in 0..tile.n {
                let x = if keep {
                    // SAFETY: a row belongs to one tile, and a tile to one task.
                    unsafe { xs.slice((tile.t0 + j) * k, k) }
                } else {
                    &mut scratch
                };
                row(tile.t0 + j, x);
                rows.quantize(j, x);
            }
        });
        new.xs = Cow::Owned(values);
        new
    }

    fn empty(t: usize, k: usize) -> Self {
        let blocks = if k.is_multiple_of(BLOCK) { k / BLOCK } else { 0 };
        Self {
            xs: Cow::Borrowed(&[]),
            t,
            k,
            blocks,
            quants: vec![0; t * blocks * form::LEN],
            scales: vec![0.0; t * blocks],
            sums: vec![Sums::default(); t * blocks],
        }
    }

    /// Calls `work` for every tile, in parallel, with what its rows are quantised into.
    fn each_tile(&mut self, work: impl Fn(Tile, TileRows) + Sync) {
        let blocks = self.blocks;
        let (q, d) = (SharedOut::new(&mut self.quants), SharedOut::new(&mut self.scales));
        let s = SharedOut::new(&mut self.sums);
        let tiles: Vec<Tile> = Tile::all(self.t).collect();
        for_ranges(tiles.len(), TASK_VALUES / (TILE * self.k.max(1)) + 1, |range| {
            for tile in &tiles[range] {
                let (at, len) = (tile.t0 * blocks, tile.n * blocks);
                // SAFETY: a tile's places are its own: (t0..t0 + n) * blocks.
                let (quants, scales, sums) =
                    unsafe { (q.slice(at * form::LEN, len * form::LEN), d.slice(at, len), s.slice(at, len)) };
                work(*tile, TileRows { n: tile.n, blocks, quants, scales, sums });
            }
        });
    }

    /// Rows, `T`.
    pub fn rows(&self) -> usize {
        self.t
    }

    /// Columns, `K`.
    pub fn cols(&self) -> usize {
        self.k
    }

    /// The f32 values (T, K); empty where they were not kept.
    pub fn values(&self) -> &[f32] {
        &self.xs
    }

    /// Whether the f32 values are there.
    pub(crate) fn has_values(&self) -> bool {
        self.xs.len() == self.t * self.k
    }

    /// Whether the quantised form is there.
    pub(crate) fn is_quantized(&self) -> bool {
        self.blocks > 0 || self.t == 0
    }

    /// Quants of a tile: per block `n * form::LEN` elements.
    pub(crate) fn tile_quants(&self, tile: Tile) -> &[form::Element] {
        &self.quants[tile.t0 * self.blocks * form::LEN..][..tile.n * self.blocks * form::LEN]
    }

    /// Scales of a tile: per block one of each row.
    pub(crate) fn tile_scales(&self, tile: Tile) -> &[f32] {
        &self.scales[tile.t0 * self.blocks..][..tile.n * self.blocks]
    }

    /// Sums of a tile: per block those of each row.
    pub(crate) fn tile_sums(&self, tile: Tile) -> &[Sums] {
        &self.sums[tile.t0 * self.blocks..][..tile.n * self.blocks]
    }
}

/// The quantised form of a tile's rows.
struct TileRows<'a> {
    n: usize,
    blocks: usize,
    quants: &'a mut [form::Element],
    scales: &'a mut [f32],
    sums: &'a mut [Sums],
}

impl TileRows<'_> {
    /// Quantises row `j`, where there is a quantised form.
    fn quantize(&mut self, j: usize, row: &[f32]) {
        let n = self.n;
        for (b, x) in row.as_chunks::<BLOCK>().0.iter().take(self.blocks).enumerate() {
            let tile = &mut self.quants[b * n * form::LEN..][..n * form::LEN];
            (self.scales[b * n + j], self.sums[b * n + j]) = quantize_into(x, tile, j, n);
        }
    }
}

/// Consecutive rows that a kernel takes at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tile {
    /// First row.
    pub t0: usize,
    /// Rows: 8, 4, 2 or 1.
    pub n: usize,
}

impl Tile {
    /// The tiles of `t` rows.
    pub fn all(t: usize) -> impl Iterator<Item = Tile> {
        let mut t0 = 0;
        std::iter::from_fn(move || {
            let n = [TILE, 4, 2, 1].into_iter().find(|n| *n <= t - t0)?;
            t0 += n;
            Some(Tile { t0: t0 - n, n })
        })
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
use quantize_into_reference as quantize_into;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use simd::quantize_into;

/// Quantises `x` as row `j` of `n` of a tile's block; returns its scale and sums.
#[allow(dead_code)] // on wasm only tests use it
#[inline(always)]
fn quantize_into_reference(x: &[f32; BLOCK], tile: &mut [form::Element], j: usize, n: usize) -> (f32, Sums) {
    let (quants, scale) = quantize(x);
    form::put(&quants, tile, j, n);
    (scale, Sums::of(&quants))
}

/// The twin of [`quantize_into_reference`] for wasm.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd {
    use super::{form, Sums, BLOCK, MAGIC, SMALLEST};
    use core::arch::wasm32::*;

    #[inline(always)]
    pub(super) fn quantize_into(
        x: &[f32; BLOCK],
        tile: &mut [form::Element],
        j: usize,
        n: usize,
    ) -> (f32, Sums) {
        assert!(tile.len() == n * form::LEN && j < n);
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
        // SAFETY: the tile's length is asserted above.
        unsafe { put(bytes, tile.as_mut_ptr(), j, n) };
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

    /// `form::put` of 32 bytes.
    ///
    /// # Safety
    /// `tile` is writable for `n * form::LEN` elements, and `j < n`.
    #[cfg(target_feature = "relaxed-simd")]
    #[inline(always)]
    unsafe fn put(q: [v128; 2], tile: *mut u8, j: usize, n: usize) {
        for (half, q) in q.into_iter().enumerate() {
            let sizes = i8x16_abs(q);
            let masks = v128_xor(i8x16_shr(q, 7), i8x16_splat(-128));
            let wide = [i32x4_shuffle::<0, 4, 1, 5>(sizes, masks), i32x4_shuffle::<2, 6, 3, 7>(sizes, masks)];
            // SAFETY: column group c < 8 and row j < n, inside the tile.
            unsafe {
                let plain = |c: usize| tile.add(4 * ((4 * half + c) * n + j));
                v128_store32_lane::<0>(q, plain(0).cast());
                v128_store32_lane::<1>(q, plain(1).cast());
                v128_store32_lane::<2>(q, plain(2).cast());
                v128_store32_lane::<3>(q, plain(3).cast());
                let both = |c: usize| tile.add(n * BLOCK + 8 * ((4 * half + c) * n + j));
                v128_store64_lane::<0>(wide[0], both(0).cast());
                v128_store64_lane::<1>(wide[0], both(1).cast());
                v128_store64_lane::<0>(wide[1], both(2).cast());
                v128_store64_lane::<1>(wide[1], both(3).cast());
            }
        }
    }

    /// `form::put` of 32 bytes.
    ///
    /// # Safety
    /// `tile` is writable for `n * form::LEN` elements, and `j < n`.
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
                let (mut got, mut want) = (vec![7; n * form::LEN], vec![7; n * form::LEN]);
                let (scale, sums) = quantize_into(x, &mut got, j, n);
                let (want_scale, want_sums) = quantize_into_reference(x, &mut want, j, n);
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
