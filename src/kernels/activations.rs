//! Activations as the matrix kernels read them: T rows of K values, quantised once for all matrices that they meet.
//!
//! 32 columns share one f32 scale and are rounded to signed bytes. Rows stand in tiles of 8, 4, 2 and 1; a tile's rows
//! are interleaved so that a kernel reads it from front to back. The order inside a block is the tier's own.

mod quantize;

pub(crate) use quantize::form;

use super::dtype::DType;
use super::packed::format::Quant;
use super::packed::with_format;
use super::parallel::{for_ranges, SharedOut};
use quantize::quantize_into;
use std::borrow::Cow;

/// Rows of the largest tile.
pub(crate) const TILE: usize = 8;

/// Values that a task quantises at least: some 10 µs.
const TASK_VALUES: usize = 1 << 14;

/// Columns that share a scale.
pub(crate) const BLOCK: usize = 32;

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

/// What some matrices read of the activations that they share.
#[derive(Clone, Copy, Default, Debug)]
pub struct Needs {
    floats: bool,
    wide: bool,
}

impl Needs {
    /// What matrices of these types read.
    pub fn of(dtypes: impl IntoIterator<Item = DType>) -> Self {
        dtypes.into_iter().fold(Self::default(), |mut needs, dtype| {
            with_format!(dtype, F => needs.wide |= F::WIDE, needs.floats = true);
            needs
        })
    }
}

/// T rows of K activations.
pub struct Activations<'a> {
    xs: Cow<'a, [f32]>,
    t: usize,
    k: usize,
    blocks: usize,
    quants: Vec<form::Element>,
    /// Elements of a block of one row in the wide array; 0: it is not there.
    wide: usize,
    wide_quants: Vec<form::Element>,
    scales: Vec<f32>,
    sums: Vec<Sums>,
}

impl<'a> Activations<'a> {
    /// Quantises `xs` (T, K), row after row, as `needs` says. Panics where the length is another.
    ///
    /// A block with a NaN or an infinity gets a NaN scale, so that every product with it is NaN. Where `k` is no
    /// multiple of 32, only float weights can be multiplied, and those read the f32 rows.
    pub fn new(xs: &'a [f32], t: usize, k: usize, needs: Needs) -> Self {
        assert_eq!(Some(xs.len()), t.checked_mul(k), "{t} rows of {k} activations");
        let mut new = Self::empty(t, k, needs);
        new.each_tile(|tile, mut rows| {
            for j in 0..tile.n {
                rows.quantize(j, &xs[(tile.t0 + j) * k..][..k]);
            }
        });
        new.xs = Cow::Borrowed(xs);
        new
    }

    /// As [`Activations::new`], of rows that `row(t, out)` makes, in the same parallel region. The f32 rows are kept only
    /// for float weights.
    pub fn made(t: usize, k: usize, needs: Needs, row: impl Fn(usize, &mut [f32]) + Sync) -> Self {
        let mut new = Self::empty(t, k, needs);
        let keep = needs.floats;
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

    fn empty(t: usize, k: usize, needs: Needs) -> Self {
        let blocks = if k.is_multiple_of(BLOCK) { k / BLOCK } else { 0 };
        let wide = form::WIDE.filter(|_| needs.wide).unwrap_or(0);
        Self {
            xs: Cow::Borrowed(&[]),
            t,
            k,
            blocks,
            quants: vec![0; t * blocks * BLOCK],
            wide,
            wide_quants: vec![0; t * blocks * wide],
            scales: vec![0.0; t * blocks],
            sums: vec![Sums::default(); t * blocks],
        }
    }

    /// Calls `work` for every tile, in parallel, with what its rows are quantised into.
    fn each_tile(&mut self, work: impl Fn(Tile, TileRows) + Sync) {
        let (blocks, wide) = (self.blocks, self.wide);
        let w = SharedOut::new(&mut self.wide_quants);
        let (q, d) = (SharedOut::new(&mut self.quants), SharedOut::new(&mut self.scales));
        let s = SharedOut::new(&mut self.sums);
        let tiles: Vec<Tile> = Tile::all(self.t).collect();
        for_ranges(tiles.len(), TASK_VALUES / (TILE * self.k.max(1)) + 1, |range| {
            for tile in &tiles[range] {
                let (at, len) = (tile.t0 * blocks, tile.n * blocks);
                // SAFETY: a tile's places are its own: (t0..t0 + n) * blocks.
                let rows = unsafe {
                    TileRows {
                        n: tile.n,
                        blocks,
                        wide,
                        quants: q.slice(at * BLOCK, len * BLOCK),
                        wide_quants: w.slice(at * wide, len * wide),
                        scales: d.slice(at, len),
                        sums: s.slice(at, len),
                    }
                };
                work(*tile, rows);
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

    /// Whether the quantised form is there, with the wide array where that is read.
    pub(crate) fn is_quantized(&self, wide: bool) -> bool {
        let wide = form::WIDE.filter(|_| wide).unwrap_or(0);
        (self.blocks > 0 || self.t == 0) && self.wide >= wide
    }

    /// Quants of a tile: per block `n * 32` elements.
    pub(crate) fn tile_quants(&self, tile: Tile) -> &[form::Element] {
        &self.quants[tile.t0 * self.blocks * BLOCK..][..tile.n * self.blocks * BLOCK]
    }

    /// The wide array of a tile: per block `n * form::WIDE` elements; empty where there is none.
    #[allow(dead_code)] // only relaxed SIMD reads it
    pub(crate) fn tile_wide(&self, tile: Tile) -> &[form::Element] {
        &self.wide_quants[tile.t0 * self.blocks * self.wide..][..tile.n * self.blocks * self.wide]
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
    wide: usize,
    quants: &'a mut [form::Element],
    wide_quants: &'a mut [form::Element],
    scales: &'a mut [f32],
    sums: &'a mut [Sums],
}

impl TileRows<'_> {
    /// Quantises row `j`, where there is a quantised form.
    fn quantize(&mut self, j: usize, row: &[f32]) {
        let n = self.n;
        for (b, x) in row.as_chunks::<BLOCK>().0.iter().take(self.blocks).enumerate() {
            let plain = &mut self.quants[b * n * BLOCK..][..n * BLOCK];
            let wide = &mut self.wide_quants[b * n * self.wide..][..n * self.wide];
            (self.scales[b * n + j], self.sums[b * n + j]) = quantize_into(x, plain, wide, j, n);
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
