//! Float weights with any number of activation rows.

use super::{store, STREAMS};
use crate::kernels::activations::{Activations, Tile, BLOCK};
use crate::kernels::matmul::{Columns, CHAINS};
use crate::kernels::packed::format::Float;
use crate::kernels::packed::PackedMatrix;
use core::arch::wasm32::*;
use std::ops::Range;

/// Results of some row groups for one tile of activations, float weights. Of each 32 columns every fourth is summed on
/// its own, so that additions need not wait for each other.
pub(in super::super) fn floats<F: Float>(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    tile: Tile,
    columns: &Columns,
) {
    if w.has_specials() {
        for t0 in tile.t0..tile.t0 + tile.n {
            floats_n::<F, 1, true>(w, groups.clone(), xs, Tile { t0, n: 1 }, columns);
        }
        return;
    }
    match tile.n {
        8 => floats_n::<F, 8, false>(w, groups, xs, tile, columns),
        4 => floats_n::<F, 4, false>(w, groups, xs, tile, columns),
        2 => floats_n::<F, 2, false>(w, groups, xs, tile, columns),
        _ => floats_n::<F, 1, false>(w, groups, xs, tile, columns),
    }
}

#[inline(never)] // as `whole_tiles`
fn floats_n<F: Float, const N: usize, const SPECIALS: bool>(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    tile: Tile,
    columns: &Columns,
) {
    let k = w.cols();
    let group_bytes = k * F::BYTES;
    assert_eq!(tile.n, N);
    let rows = &xs.values()[tile.t0 * k..][..N * k];
    let mut group = groups.start;
    if N == 1 {
        // Each stream runs on through the memory from one call to the next.
        let apart = groups.len() / STREAMS;
        let data = &w.data()[group * group_bytes..][..STREAMS * apart * group_bytes];
        for i in 0..apart {
            // SAFETY: the slices hold STREAMS times `apart` groups of k units (sliced above), and a row of k values.
            let y = unsafe {
                let unit = data.as_ptr().add(i * group_bytes);
                float_product::<F, N, STREAMS, SPECIALS>(unit, apart * group_bytes, rows.as_ptr(), k)
            };
            for (stream, y) in y.into_iter().enumerate() {
                store(columns, tile.t0, group + stream * apart + i, y);
            }
        }
        group += STREAMS * apart;
    }
    for group in group..groups.end {
        let data = &w.data()[group * group_bytes..][..group_bytes];
        // SAFETY: the slices hold a group of k units and N rows of k values.
        let [y] = unsafe { float_product::<F, N, 1, SPECIALS>(data.as_ptr(), 0, rows.as_ptr(), k) };
        store(columns, tile.t0, group, y);
    }
}

/// G row groups, `apart` bytes from each other, times N activation rows, float weights.
///
/// # Safety
/// `unit` and the G − 1 pointers `apart` bytes on point to `k` units, `x` to N rows of `k` values.
#[inline(always)]
unsafe fn float_product<F: Float, const N: usize, const G: usize, const SPECIALS: bool>(
    unit: *const u8,
    apart: usize,
    x: *const f32,
    k: usize,
) -> [[v128; N]; G] {
    let mut y = [[f32x4_splat(0.0); N]; G];
    for from in (0..k).step_by(BLOCK) {
        let n = BLOCK.min(k - from);
        for (g, y) in y.iter_mut().enumerate() {
            // SAFETY: from + n <= k, inside what the caller promises.
            unsafe {
                let (unit, x) = (unit.add(g * apart + from * F::BYTES), x.add(from));
                // A constant length is worth a copy of the code.
                if n == BLOCK {
                    float_block::<F, N, SPECIALS>(unit, x, k, BLOCK, y);
                } else {
                    float_block::<F, N, SPECIALS>(unit, x, k, n, y);
                }
            }
        }
    }
    y
}

/// Adds the products of `n` columns to N results. With many rows the sums of a column class are made one after the
/// other, so that they stay in registers.
///
/// # Safety
/// `unit` points to `n` units, `x` to `n` values of the first of N rows that are `stride` apart.
#[inline(always)]
unsafe fn float_block<F: Float, const N: usize, const SPECIALS: bool>(
    unit: *const u8,
    x: *const f32,
    stride: usize,
    n: usize,
    y: &mut [v128; N],
) {
    let at_once = (8 / N).clamp(1, CHAINS);
    let mut sums = [[f32x4_splat(0.0); N]; CHAINS];
    for first in (0..CHAINS).step_by(at_once) {
        for from in (0..n).step_by(CHAINS) {
            for (i, sums) in (from + first..n).zip(&mut sums[first..first + at_once]) {
                // SAFETY: i < n, inside what the caller promises.
                unsafe {
                    let value = F::load::<SPECIALS>(unit.add(i * F::BYTES));
                    for (j, sum) in sums.iter_mut().enumerate() {
                        let x = v128_load32_splat(x.add(j * stride + i).cast());
                        *sum = f32x4_add(*sum, f32x4_mul(value, x));
                    }
                }
            }
        }
    }
    for (j, y) in y.iter_mut().enumerate() {
        let (a, b) = (f32x4_add(sums[0][j], sums[1][j]), f32x4_add(sums[2][j], sums[3][j]));
        *y = f32x4_add(*y, f32x4_add(a, b));
    }
}
