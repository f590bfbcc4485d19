//! The scalar reference of the matrix kernels, and what runs natively. It unpacks a block once for all rows of a tile
//! and is written so that compilers make vector code of it.

use super::{Columns, CHAINS};
use crate::kernels::activations::{form, Activations, Tile, BLOCK, TILE};
use crate::kernels::packed::format::{Float, Quant, ROWS};
use crate::kernels::packed::PackedMatrix;
use std::ops::Range;

/// Results of some row groups for one tile of activations, quantised weights.
pub(super) fn quants<F: Quant>(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    tile: Tile,
    columns: &Columns,
) {
    let group_bytes = w.cols() / F::COLS * F::BYTES;
    let (quants, scales, sums) = (xs.tile_quants(tile), xs.tile_scales(tile), xs.tile_sums(tile));
    let offset = F::OFFSET_BITS.map_or(0, |bits| 1 << bits);
    for group in groups {
        let mut y = [[0f32; ROWS]; TILE];
        let mut b = 0;
        for unit in w.data()[group * group_bytes..][..group_bytes].chunks_exact(F::BYTES) {
            let (mut ws, mut wm) = ([[0f32; 16]; ROWS], [[0f32; 16]; ROWS]);
            for r in 0..ROWS {
                // SAFETY: the pointer is row r's first lane in a whole unit.
                unsafe { F::scales::<u32>(unit[4 * r..].as_ptr(), &mut ws[r], &mut wm[r]) };
            }
            for block in 0..F::COLS / BLOCK {
                let mut wq = [[0i16; BLOCK]; ROWS];
                for (r, wq) in wq.iter_mut().enumerate() {
                    // SAFETY: as above; a unit has COLS / 32 blocks.
                    let words = unsafe { F::unpack::<u32>(unit[4 * r..].as_ptr(), block) };
                    for (four, word) in wq.chunks_exact_mut(4).zip(words) {
                        for (o, byte) in four.iter_mut().zip(word.to_le_bytes()) {
                            *o = i16::from(byte) - offset;
                        }
                    }
                }
                let quants = &quants[b * tile.n * BLOCK..][..tile.n * BLOCK];
                for (j, y) in y[..tile.n].iter_mut().enumerate() {
                    let mut a = [0i16; BLOCK];
                    for (i, a) in a.iter_mut().enumerate() {
                        *a = form::get(quants, j, tile.n, i);
                    }
                    let (scale, sums) = (scales[b * tile.n + j], sums[b * tile.n + j]);
                    for r in 0..ROWS {
                        let low = dot(&wq[r], &a, 0);
                        let high = dot(&wq[r], &a, 16);
                        let part = if F::HALVES {
                            let (s0, s1) = (ws[r][2 * block], ws[r][2 * block + 1]);
                            let part = low as f32 * s0 + high as f32 * s1;
                            if F::MINIMA {
                                let (m0, m1) = (wm[r][2 * block], wm[r][2 * block + 1]);
                                part + (sums.low as f32 * m0 + sums.high as f32 * m1)
                            } else {
                                part
                            }
                        } else {
                            let part = (low + high) as f32 * ws[r][block];
                            if F::MINIMA {
                                part + sums.all as f32 * wm[r][block]
                            } else {
                                part
                            }
                        };
                        y[r] += part * scale;
                    }
                }
                b += 1;
            }
        }
        for (j, y) in y[..tile.n].iter().enumerate() {
            columns.store(tile.t0 + j, group, *y);
        }
    }
}

/// The products of 16 columns from `at` on. Below 16 * 255 * 127, so exact.
#[inline(always)]
fn dot(w: &[i16; BLOCK], a: &[i16; BLOCK], at: usize) -> i32 {
    (at..at + 16).map(|i| i32::from(w[i]) * i32::from(a[i])).sum()
}

/// The reference has no other way for many rows.
#[allow(dead_code)] // on wasm only SIMD's is called
pub(super) fn whole_tiles<F: Quant>(
    _: &PackedMatrix,
    _: Range<usize>,
    _: &Activations,
    _: &Columns,
) -> usize {
    0
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
    let k = w.cols();
    let group_bytes = k * F::BYTES;
    let rows = &xs.values()[tile.t0 * k..][..tile.n * k];
    for group in groups {
        let data = &w.data()[group * group_bytes..][..group_bytes];
        let mut y = [[0f32; ROWS]; TILE];
        for (b, units) in data.chunks(BLOCK * F::BYTES).enumerate() {
            let mut values = [[0f32; ROWS]; BLOCK];
            let n = units.len() / F::BYTES;
            for (value, unit) in values.iter_mut().zip(units.chunks_exact(F::BYTES)) {
                for (v, bytes) in value.iter_mut().zip(unit.chunks_exact(F::FILE_BYTES)) {
                    *v = F::decode(bytes);
                }
            }
            for (row, y) in rows.chunks_exact(k).zip(&mut y) {
                let mut sums = [[0f32; ROWS]; CHAINS];
                for (values, xs) in values[..n].chunks(CHAINS).zip(row[b * BLOCK..][..n].chunks(CHAINS)) {
                    for ((sum, value), x) in sums.iter_mut().zip(values).zip(xs) {
                        for (s, v) in sum.iter_mut().zip(value) {
                            *s += v * x;
                        }
                    }
                }
                for (r, y) in y.iter_mut().enumerate() {
                    *y += (sums[0][r] + sums[1][r]) + (sums[2][r] + sums[3][r]);
                }
            }
        }
        for (j, y) in y[..tile.n].iter().enumerate() {
            columns.store(tile.t0 + j, group, *y);
        }
    }
}
