//! Products of packed matrices with activations: one parallel region for all matrices that meet the same activations.
//!
//! An output is summed by one task: for each block of 32 columns in order, the exact integer products, scaled in f32 by
//! the same operations in the same order on every tier. So neither tile, slice nor thread count changes a bit of it.
//! The sums stand in `matmul/scalar.rs` (the reference) and `matmul/simd.rs` (wasm), under the same names.

mod scalar;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd;

use super::activations::{Activations, Tile};
use super::packed::format::{Quant, ROWS};
use super::packed::{with_format, PackedMatrix};
use super::parallel::{for_ranges, SharedOut};
use std::ops::Range;

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
use scalar as kernel;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use simd as kernel;

/// Bytes of weights that stay in the second-level cache while all tiles of activations pass over them.
const CHUNK_BYTES: usize = 128 << 10;

/// Multiply-adds below which a task is not worth its start: some 10 µs.
const TASK_PRODUCTS: usize = 1 << 17;

/// Sums that a block of float weights is added up in, column i going to sum i % CHAINS.
const CHAINS: usize = 4;

/// One matrix of a [`matmul`].
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// The weights (R, K).
    pub w: &'a PackedMatrix,
    /// One value per weight row that is added to the product.
    pub bias: Option<&'a [f32]>,
    /// Column of the output where the R results begin.
    pub at: usize,
    /// Whether the results are added to what the output holds, as a residual connection is.
    pub add: bool,
}

/// `out[t * out_cols + at + r] = bias[r] + sum_k w[r][k] * x[t][k]` for all T rows of `xs` and every job, or `+=` where
/// the job says so.
///
/// Panics where shapes do not fit, or where two jobs write the same columns.
pub fn matmul(jobs: &[Job], xs: &Activations, out: &mut [f32], out_cols: usize) {
    run(jobs, xs, out, out_cols, |job, groups, xs, out| {
        let columns = Columns { out, out_cols, at: job.at, rows: job.w.rows(), bias: job.bias, add: job.add };
        with_format!(
            job.w.dtype(),
            F => {
                let done = kernel::whole_tiles::<F>(job.w, groups.clone(), xs, &columns);
                each_tile(job.w, groups, xs, done, |tile, groups| kernel::quants::<F>(job.w, groups, xs, tile, &columns))
            },
            each_tile(job.w, groups, xs, 0, |tile, groups| kernel::floats::<F>(job.w, groups, xs, tile, &columns))
        )
    });
}

/// [`matmul`] by the scalar reference, on every tier.
pub fn matmul_reference(jobs: &[Job], xs: &Activations, out: &mut [f32], out_cols: usize) {
    run(jobs, xs, out, out_cols, |job, groups, xs, out| {
        let columns = Columns { out, out_cols, at: job.at, rows: job.w.rows(), bias: job.bias, add: job.add };
        with_format!(
            job.w.dtype(),
            F => each_tile(job.w, groups, xs, 0, |tile, groups| scalar::quants::<F>(job.w, groups, xs, tile, &columns)),
            each_tile(job.w, groups, xs, 0, |tile, groups| scalar::floats::<F>(job.w, groups, xs, tile, &columns))
        )
    });
}

/// Splits the row groups of all jobs over the threads.
fn run(
    jobs: &[Job],
    xs: &Activations,
    out: &mut [f32],
    out_cols: usize,
    part: impl Fn(&Job, Range<usize>, &Activations, &SharedOut) + Send + Sync,
) {
    check(jobs, xs, out, out_cols);
    let starts: Vec<usize> = jobs
        .iter()
        .scan(0, |end, job| {
            *end += job.w.rows().div_ceil(ROWS);
            Some(*end - job.w.rows().div_ceil(ROWS))
        })
        .collect();
    let total: usize = jobs.iter().map(|job| job.w.rows().div_ceil(ROWS)).sum();
    let out = SharedOut::new(out);
    let products = ROWS * xs.cols().max(1) * xs.rows().max(1);
    for_ranges(total, TASK_PRODUCTS / products + 1, |range| {
        for (job, start) in jobs.iter().zip(&starts) {
            let end = start + job.w.rows().div_ceil(ROWS);
            let (from, to) = (range.start.max(*start), range.end.min(end));
            if from < to {
                part(job, from - start..to - start, xs, &out);
            }
        }
    });
}

/// Everything that the unchecked reads and writes of the kernels rely on.
fn check(jobs: &[Job], xs: &Activations, out: &[f32], out_cols: usize) {
    assert_eq!(Some(out.len()), xs.rows().checked_mul(out_cols), "{} rows of {out_cols} outputs", xs.rows());
    for (i, job) in jobs.iter().enumerate() {
        let rows = job.w.rows();
        assert_eq!(job.w.cols(), xs.cols(), "weights and activations have the same K");
        let there = with_format!(job.w.dtype(), F => xs.is_quantized(F::WIDE), xs.has_values());
        assert!(there, "the activations have the form the weights need");
        assert!(
            job.at <= out_cols && rows <= out_cols - job.at,
            "{rows} results at {} of {out_cols}",
            job.at
        );
        assert!(job.bias.is_none_or(|bias| bias.len() == rows), "one bias per weight row");
        for other in &jobs[..i] {
            let apart = job.at + rows <= other.at || other.at + other.w.rows() <= job.at;
            assert!(apart, "two jobs write the same outputs");
        }
    }
}

/// Calls `part` for every tile of activations from row `done` on, on chunks of row groups that fit into the cache.
fn each_tile(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    done: usize,
    part: impl Fn(Tile, Range<usize>),
) {
    let tiles: Vec<Tile> = Tile::all(xs.rows()).filter(|tile| tile.t0 >= done).collect();
    let group_bytes = w.data().len() / w.rows().div_ceil(ROWS);
    // A single tile reads each weight once: nothing is gained by chunks.
    let chunk = if tiles.len() < 2 { groups.len() } else { CHUNK_BYTES / group_bytes };
    for from in groups.clone().step_by(chunk.max(1)) {
        let groups = from..groups.end.min(from + chunk.max(1));
        for tile in &tiles {
            part(*tile, groups.clone());
        }
    }
}

/// Where the results of a job go.
struct Columns<'a> {
    out: &'a SharedOut<'a>,
    out_cols: usize,
    at: usize,
    rows: usize,
    bias: Option<&'a [f32]>,
    add: bool,
}

impl Columns<'_> {
    /// Stores the results of row `t` and the four rows of `group`, with the bias added.
    #[inline(always)]
    fn store(&self, t: usize, group: usize, mut y: [f32; ROWS]) {
        let first = group * ROWS;
        let n = ROWS.min(self.rows - first);
        // SAFETY: the jobs' columns do not overlap (`check`), and a task has its row groups for itself.
        let out = unsafe { self.out.slice(t * self.out_cols + self.at + first, n) };
        // A copy of a length that is not known takes wasm longer than the sums of a short row.
        if let [out] = out.as_chunks_mut::<ROWS>().0 {
            if let Some(bias) = self.bias {
                let bias = &bias[first..first + ROWS];
                y = std::array::from_fn(|r| y[r] + bias[r]);
            }
            *out = if self.add { std::array::from_fn(|r| out[r] + y[r]) } else { y };
            return;
        }
        for (r, out) in out.iter_mut().enumerate() {
            let y = y[r] + self.bias.map_or(0.0, |bias| bias[first + r]);
            *out = if self.add { *out + y } else { y };
        }
    }
}
