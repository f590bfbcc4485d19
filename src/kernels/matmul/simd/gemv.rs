//! Quantised weights with few activation rows: each block is unpacked where it is used.

use super::block::{add_block, of, Block, Rows};
use super::{store, STREAMS};
use crate::kernels::activations::{Activations, Tile, BLOCK};
use crate::kernels::matmul::Columns;
use crate::kernels::packed::format::Quant;
use crate::kernels::packed::PackedMatrix;
use core::arch::wasm32::*;
use std::ops::Range;

/// Results of some row groups for one tile of activations, quantised weights.
pub(in super::super) fn quants<F: Quant>(
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

#[inline(never)] // as `whole_tiles`
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
    assert_eq!(xs.tile_scales(tile).len(), N * w.cols() / BLOCK);
    let x = Rows::of::<F>(xs, tile, 0, 4);
    let mut group = groups.start;
    if N == 1 || (N == 2 && F::HALVES) {
        // Each stream runs on through the memory from one call to the next.
        let apart = groups.len() / STREAMS;
        let data = &w.data()[group * group_bytes..][..STREAMS * apart * group_bytes];
        for i in 0..apart {
            // SAFETY: the slices hold whole groups of `units` units, STREAMS times `apart` of them (sliced above), and
            // the activations of N rows (asserted).
            let y = unsafe {
                let unit = data.as_ptr().add(i * group_bytes);
                product::<F, N, STREAMS>(unit, apart * group_bytes, units, x)
            };
            for (stream, y) in y.into_iter().enumerate() {
                store(columns, tile.t0, group + stream * apart + i, y);
            }
        }
        group += STREAMS * apart;
    } else if !F::HALVES {
        let apart = groups.len() / TOGETHER;
        let data = &w.data()[group * group_bytes..][..TOGETHER * apart * group_bytes];
        let x = Rows { half: std::hint::black_box(4), ..x };
        for i in 0..apart {
            // SAFETY: as above.
            let y = unsafe {
                let unit = data.as_ptr().add(i * group_bytes);
                product_together::<F, N, TOGETHER>(unit, apart * group_bytes, units, x)
            };
            for (stream, y) in y.into_iter().enumerate() {
                store(columns, tile.t0, group + stream * apart + i, y);
            }
        }
        group += TOGETHER * apart;
    }
    for group in group..groups.end {
        let data = &w.data()[group * group_bytes..][..group_bytes];
        // SAFETY: the slices hold a group of `units` units and the activations of N rows (asserted).
        let [y] = unsafe { product::<F, N, 1>(data.as_ptr(), 0, units, x) };
        store(columns, tile.t0, group, y);
    }
}

/// Row groups that several activation rows meet together, so that each activation is loaded once for all of them.
const TOGETHER: usize = 2;

/// As [`product`], with the sums of all groups in registers.
///
/// # Safety
/// As [`product`], and `x.half` is 4.
#[inline(always)]
unsafe fn product_together<F: Quant, const N: usize, const G: usize>(
    mut unit: *const u8,
    apart: usize,
    units: usize,
    mut x: Rows,
) -> [[v128; N]; G] {
    let zero = f32x4_splat(0.0);
    let mut y = [[zero; N]; G];
    let (mut ws, mut wm) = ([[zero; 16]; G], [[zero; 16]; G]);
    // SAFETY: all reads stay inside the units and the tile that the caller promises.
    unsafe {
        for _ in 0..units {
            for g in 0..G {
                F::scales::<v128>(unit.add(g * apart), &mut ws[g], &mut wm[g]);
            }
            for block in 0..F::COLS / BLOCK {
                let w: [[v128; 8]; G] =
                    std::array::from_fn(|g| F::unpack::<v128>(unit.add(g * apart), block));
                let of: [_; G] = std::array::from_fn(|g| of::<F>(&ws[g], &wm[g], block));
                let block = Block {
                    w: std::array::from_fn(|g| &w[g]),
                    scales: std::array::from_fn(|g| &of[g].0),
                    minima: std::array::from_fn(|g| &of[g].1),
                };
                add_block::<F, G, N>(&block, x, &mut y);
                x = x.next::<F>();
            }
            unit = unit.add(F::BYTES);
        }
    }
    y
}

/// G row groups, `apart` bytes from each other, times N activation rows. With several groups the loop over them is not
/// unrolled: the compiler would keep the activations of all of them in flight and spill (Q5_0 without relaxed SIMD:
/// -30 %).
///
/// # Safety
/// `unit` points to `units` units, as do the G − 1 pointers `apart` bytes on; `x` to the first block of a tile of N rows
/// with COLS / 32 blocks for each unit.
#[inline(always)]
unsafe fn product<F: Quant, const N: usize, const G: usize>(
    mut unit: *const u8,
    apart: usize,
    units: usize,
    mut x: Rows,
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
                    let (scales, minima) = of::<F>(&ws[g], &wm[g], block);
                    let block = Block { w: [&w], scales: [&scales], minima: [&minima] };
                    add_block::<F, 1, N>(&block, x, std::array::from_mut(&mut y[g]));
                }
                x = x.next::<F>();
            }
            unit = unit.add(F::BYTES);
        }
    }
    y
}
