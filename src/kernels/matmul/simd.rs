//! The matrix kernels for wasm SIMD: four weight rows in the four lanes, so nothing is ever summed across lanes. With
//! relaxed SIMD a step is one dot product of bytes, without it two of 16-bit numbers; the packed weights are the same.

mod block;
mod floats;
mod gemm;
mod gemv;

pub(super) use floats::floats;
pub(super) use gemm::whole_tiles;
pub(super) use gemv::quants;

use super::Columns;
use crate::kernels::packed::format::ROWS;
use core::arch::wasm32::*;

/// Row groups that a single activation row takes at once. One stream of weights is fetched no further ahead than the
/// processor's prefetcher goes, which does not hide the memory's latency; GOP/s from memory with 1 / 4 / 8 streams:
/// Q4_K 20 / 26 / 28, Q6_K 11 / 18 / 20, with 2 / 4 / 8: Q5_0 15 / 20 / 18, Q8_0 11 / 15 / 15.
const STREAMS: usize = 4;

#[inline(always)]
fn store<const N: usize>(columns: &Columns, t0: usize, group: usize, y: [v128; N]) {
    for (j, y) in y.into_iter().enumerate() {
        let mut four = [0f32; ROWS];
        // SAFETY: four f32 are sixteen bytes.
        unsafe { v128_store(four.as_mut_ptr().cast(), y) };
        columns.store(t0 + j, group, four);
    }
}
