//! Activations as the matrix kernels read them: T rows of K values, quantised once for all matrices that they meet.
//!
//! 32 columns share one f32 scale and are rounded to signed bytes. Rows stand in tiles of 8, 4, 2 and 1; a tile's rows
//! are interleaved so that a kernel reads it from front to back. The order inside a block is the tier's own.

use super::parallel::{for_ranges, SharedOut};

/// Rows of the largest tile.
pub(crate) const TILE: usize = 8;

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
    xs: &'a [f32],
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
        let blocks = if k.is_multiple_of(BLOCK) { k / BLOCK } else { 0 };
        let mut quants = vec![0; t * blocks * form::LEN];
        let mut scales = vec![0.0; t * blocks];
        let mut sums = vec![Sums::default(); t * blocks];
        let (q, d, s) = (SharedOut::new(&mut quants), SharedOut::new(&mut scales), SharedOut::new(&mut sums));
        let tiles: Vec<Tile> = Tile::all(t).collect();
        for_ranges(if blocks == 0 { 0 } else { tiles.len() }, (1 << 14) / (TILE * k.max(1)) + 1, |range| {
            for Tile { t0, n } in &tiles[range] {
                let at = t0 * blocks;
                // SAFETY: a tile's places are its own: (t0..t0 + n) * blocks.
                let (q, d, s) = unsafe {
                    (
                        q.slice(at * form::LEN, n * blocks * form::LEN),
                        d.slice(at, n * blocks),
                        s.slice(at, n * blocks),
                    )
                };
                for j in 0..*n {
                    let row = &xs[(t0 + j) * k..][..k];
                    for (b, x) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
                        let (quants, scale) = quantize(x);
                        d[b * n + j] = scale;
                        s[b * n + j] = Sums::of(&quants);
                        form::put(&quants, &mut q[b * n * form::LEN..][..n * form::LEN], j, *n);
                    }
                }
            }
        });
        Self { xs, t, k, blocks, quants, scales, sums }
    }

    /// Rows, `T`.
    pub fn rows(&self) -> usize {
        self.t
    }

    /// Columns, `K`.
    pub fn cols(&self) -> usize {
        self.k
    }

    /// The f32 values (T, K).
    pub fn values(&self) -> &'a [f32] {
        self.xs
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
    // 1.5 * 2^23: a sum with it has the rounded integer in its low bits.
    const MAGIC: f32 = 12_582_912.0;
    let q = x.map(|x| (x * inverse + MAGIC).to_bits() as i8);
    (q, amax / 127.0)
}
