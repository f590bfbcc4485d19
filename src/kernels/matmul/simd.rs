//! The matrix kernels for wasm SIMD: four weight rows in the four lanes, so nothing is ever summed across lanes. With
//! relaxed SIMD a step is one dot product of bytes, without it two of 16-bit numbers; the packed weights are the same.

use super::{Columns, CHAINS};
use crate::kernels::activations::{form, Activations, Sums, Tile, BLOCK};
use crate::kernels::packed::format::{Float, Quant, ROWS};
use crate::kernels::packed::PackedMatrix;
use core::arch::wasm32::*;
use std::ops::Range;

/// Row groups that a single activation row takes at once. One stream of weights is fetched no further ahead than the
/// processor's prefetcher goes, which does not hide the memory's latency; GOP/s from memory with 1 / 4 / 8 streams:
/// Q4_K 20 / 26 / 28, Q6_K 11 / 18 / 20, with 2 / 4 / 8: Q5_0 15 / 20 / 18, Q8_0 11 / 15 / 15.
const STREAMS: usize = 4;

/// Results of some row groups for one tile of activations, quantised weights.
pub(super) fn quants<F: Quant>(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    tile: Tile,
    columns: &Columns,
) {
    match tile.n {
        8 => quants_n::<F, 8>(w, groups, xs, tile, columns),
        4 => quants_n::<F, 4>(w, groups, xs, tile, columns),
        2 => quants_n::<F, 2>(w, groups, xs, tile, columns),
        _ => quants_n::<F, 1>(w, groups, xs, tile, columns),
    }
}

fn quants_n<F: Quant, const N: usize>(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    tile: Tile,
    columns: &Columns,
) {
    let units = w.cols() / F::COLS;
    let group_bytes = units * F::BYTES;
    assert_eq!(tile.n, N);
    let (quants, scales, sums) = (xs.tile_quants(tile), xs.tile_scales(tile), xs.tile_sums(tile));
    assert_eq!(scales.len(), N * w.cols() / BLOCK);
    let (a, scales, sums) = (quants.as_ptr(), scales.as_ptr(), sums.as_ptr());
    let mut group = groups.start;
    if N == 1 {
        // Each stream runs on through the memory from one call to the next.
        let apart = groups.len() / STREAMS;
        let data = &w.data()[group * group_bytes..][..STREAMS * apart * group_bytes];
        for i in 0..apart {
            // SAFETY: the slices hold whole groups of `units` units, STREAMS times `apart` of them (sliced above), and
            // the activations of N rows (asserted).
            let y = unsafe {
                let unit = data.as_ptr().add(i * group_bytes);
                product::<F, N, STREAMS>(unit, apart * group_bytes, units, a, scales, sums)
            };
            for (stream, y) in y.into_iter().enumerate() {
                store(columns, tile.t0, group + stream * apart + i, y);
            }
        }
        group += STREAMS * apart;
    }
    for group in group..groups.end {
        let data = &w.data()[group * group_bytes..][..group_bytes];
        // SAFETY: the slices hold a group of `units` units and the activations of N rows (asserted).
        let [y] = unsafe { product::<F, N, 1>(data.as_ptr(), 0, units, a, scales, sums) };
        store(columns, tile.t0, group, y);
    }
}

/// G row groups, `apart` bytes from each other, times N activation rows. With several groups the loop over them is not
/// unrolled: the compiler would keep the activations of all of them in flight and spill (Q5_0 without relaxed SIMD:
/// -30 %).
///
/// # Safety
/// `unit` points to `units` units, as do the G − 1 pointers `apart` bytes on; `a`, `scales` and `sums` to a tile of N rows
/// with COLS / 32 blocks for each unit.
#[inline(always)]
unsafe fn product<F: Quant, const N: usize, const G: usize>(
    mut unit: *const u8,
    apart: usize,
    units: usize,
    mut a: *const form::Element,
    mut scales: *const f32,
    mut sums: *const Sums,
) -> [[v128; N]; G] {
    let zero = f32x4_splat(0.0);
    let mut y = [[zero; N]; G];
    let streams = if G == 1 { 1 } else { std::hint::black_box(G) };
    let (mut ws, mut wm) = ([[zero; 16]; G], [[zero; 16]; G]);
    // SAFETY: all reads stay inside the units and the tile that the caller promises.
    unsafe {
        for _ in 0..units {
            for g in 0..streams.min(G) {
                F::scales::<v128>(unit.add(g * apart), &mut ws[g], &mut wm[g]);
            }
            for block in 0..F::COLS / BLOCK {
                for g in 0..streams.min(G) {
                    let w = F::unpack::<v128>(unit.add(g * apart), block);
                    add_block::<F, N>(&w, block, &ws[g], &wm[g], a, scales, sums, &mut y[g]);
                }
                a = a.add(N * form::LEN);
                scales = scales.add(N);
                sums = sums.add(N);
            }
            unit = unit.add(F::BYTES);
        }
    }
    y
}

/// Adds the products of an unpacked block with N activation rows to `y`.
///
/// # Safety
/// `a`, `scales` and `sums` point to a block of a tile of N rows.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn add_block<F: Quant, const N: usize>(
    w: &[v128; 8],
    block: usize,
    ws: &[v128; 16],
    wm: &[v128; 16],
    a: *const form::Element,
    scales: *const f32,
    sums: *const Sums,
    y: &mut [v128; N],
) {
    let zero = i32x4_splat(0);
    // SAFETY: all reads stay inside the block that the caller promises.
    unsafe {
        if F::HALVES {
            let (mut low, mut high) = ([zero; N], [zero; N]);
            for j in 0..N {
                low[j] = start::<F>(&raw const (*sums.add(j)).low);
                high[j] = start::<F>(&raw const (*sums.add(j)).high);
            }
            dots::<F, N>(w, 0..4, a, &mut low);
            dots::<F, N>(w, 4..8, a, &mut high);
            let (s0, s1) = (ws[2 * block], ws[2 * block + 1]);
            for j in 0..N {
                let p0 = f32x4_mul(f32x4_convert_i32x4(low[j]), s0);
                let p1 = f32x4_mul(f32x4_convert_i32x4(high[j]), s1);
                let mut part = f32x4_add(p0, p1);
                if F::MINIMA {
                    let m0 = minimum(&raw const (*sums.add(j)).low, wm[2 * block]);
                    let m1 = minimum(&raw const (*sums.add(j)).high, wm[2 * block + 1]);
                    part = f32x4_add(part, f32x4_add(m0, m1));
                }
                y[j] = f32x4_add(y[j], f32x4_mul(part, v128_load32_splat(scales.add(j).cast())));
            }
        } else {
            let mut acc = [zero; N];
            for (j, acc) in acc.iter_mut().enumerate() {
                *acc = if F::WIDE && cfg!(target_feature = "relaxed-simd") {
                    v128_load32_splat((&raw const (*sums.add(j)).negative).cast())
                } else {
                    start::<F>(&raw const (*sums.add(j)).all)
                };
            }
            dots::<F, N>(w, 0..8, a, &mut acc);
            for j in 0..N {
                let mut part = f32x4_mul(f32x4_convert_i32x4(acc[j]), ws[block]);
                if F::MINIMA {
                    part = f32x4_add(part, minimum(&raw const (*sums.add(j)).all, wm[block]));
                }
                y[j] = f32x4_add(y[j], f32x4_mul(part, v128_load32_splat(scales.add(j).cast())));
            }
        }
    }
}

/// Where the integer sum starts, so that it ends at what the quants without their offset would give.
///
/// # Safety
/// `sum` must be readable.
#[inline(always)]
unsafe fn start<F: Quant>(sum: *const i32) -> v128 {
    match F::OFFSET_BITS {
        // SAFETY: as the caller promises.
        Some(bits) => i32x4_shl(unsafe { v128_load32_splat(sum.cast()) }, bits),
        None => i32x4_splat(0),
    }
}

/// What a sub-block's minimum takes off (the stored sums are negative).
///
/// # Safety
/// `sum` must be readable.
#[inline(always)]
unsafe fn minimum(sum: *const i32, minimum: v128) -> v128 {
    // SAFETY: as the caller promises.
    f32x4_mul(f32x4_convert_i32x4(unsafe { v128_load32_splat(sum.cast()) }), minimum)
}

/// Adds the products of the columns 4c.. of `vectors` with those of N activation rows.
///
/// # Safety
/// `a` points to a block of a tile of N rows.
#[cfg(target_feature = "relaxed-simd")]
#[inline(always)]
unsafe fn dots<F: Quant, const N: usize>(
    w: &[v128; 8],
    vectors: Range<usize>,
    a: *const form::Element,
    acc: &mut [v128; N],
) {
    for c in vectors {
        for (j, acc) in acc.iter_mut().enumerate() {
            // SAFETY: inside the block that the caller promises.
            unsafe {
                // The second operand must be 0..127: the weights where they are, else the activations' magnitudes.
                *acc = if F::WIDE {
                    let wide = a.add(N * BLOCK + 8 * (c * N + j));
                    let signed = v128_xor(w[c], v128_load32_splat(wide.add(4).cast()));
                    i32x4_relaxed_dot_i8x16_i7x16_add(signed, v128_load32_splat(wide.cast()), *acc)
                } else {
                    let a = v128_load32_splat(a.add(4 * (c * N + j)).cast());
                    i32x4_relaxed_dot_i8x16_i7x16_add(a, w[c], *acc)
                };
            }
        }
    }
}

/// Adds the products of the columns 4c.. of `vectors` with those of N activation rows.
///
/// # Safety
/// `a` points to a block of a tile of N rows.
#[cfg(not(target_feature = "relaxed-simd"))]
#[inline(always)]
unsafe fn dots<F: Quant, const N: usize>(
    w: &[v128; 8],
    vectors: Range<usize>,
    a: *const form::Element,
    acc: &mut [v128; N],
) {
    for c in vectors {
        let even = v128_and(w[c], u16x8_splat(0x00ff));
        let odd = u16x8_shr(w[c], 8);
        for (j, acc) in acc.iter_mut().enumerate() {
            // SAFETY: inside the block that the caller promises.
            unsafe {
                let a0 = v128_load32_splat(a.add(2 * (2 * c * N + j)).cast());
                let a1 = v128_load32_splat(a.add(2 * ((2 * c + 1) * N + j)).cast());
                *acc = i32x4_add(*acc, i32x4_dot_i16x8(even, a0));
                *acc = i32x4_add(*acc, i32x4_dot_i16x8(odd, a1));
            }
        }
    }
}

/// Results of some row groups for one tile of activations, float weights. Of each 32 columns every fourth is summed on
/// its own, so that additions need not wait for each other.
pub(super) fn floats<F: Float>(
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
    while group < groups.end {
        let data = &w.data()[group * group_bytes..];
        if N == 1 && group + STREAMS <= groups.end {
            assert!(data.len() >= STREAMS * group_bytes);
            // SAFETY: the slices hold the groups of k units and N rows of k values (asserted).
            let y = unsafe { float_product::<F, N, STREAMS, SPECIALS>(data.as_ptr(), rows.as_ptr(), k) };
            for y in y {
                store(columns, tile.t0, group, y);
                group += 1;
            }
        } else {
            assert!(data.len() >= group_bytes);
            // SAFETY: the slices hold a group of k units and N rows of k values (asserted).
            let [y] = unsafe { float_product::<F, N, 1, SPECIALS>(data.as_ptr(), rows.as_ptr(), k) };
            store(columns, tile.t0, group, y);
            group += 1;
        }
    }
}

/// G row groups times N activation rows, float weights.
///
/// # Safety
/// `unit` points to `G * k` units, `x` to N rows of `k` values.
#[inline(always)]
unsafe fn float_product<F: Float, const N: usize, const G: usize, const SPECIALS: bool>(
    unit: *const u8,
    x: *const f32,
    k: usize,
) -> [[v128; N]; G] {
    let mut y = [[f32x4_splat(0.0); N]; G];
    for from in (0..k).step_by(BLOCK) {
        let n = BLOCK.min(k - from);
        for (g, y) in y.iter_mut().enumerate() {
            // SAFETY: from + n <= k, inside what the caller promises.
            unsafe {
                let (unit, x) = (unit.add((g * k + from) * F::BYTES), x.add(from));
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

fn store<const N: usize>(columns: &Columns, t0: usize, group: usize, y: [v128; N]) {
    for (j, y) in y.into_iter().enumerate() {
        let mut four = [0f32; ROWS];
        // SAFETY: four f32 are sixteen bytes.
        unsafe { v128_store(four.as_mut_ptr().cast(), y) };
        columns.store(t0 + j, group, four);
    }
}
