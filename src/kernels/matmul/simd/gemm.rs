//! Quantised weights with whole tiles of activation rows: blocks are unpacked once for all of them.

use super::block::{add_block, of, Block, Rows};
use super::store;
use crate::kernels::activations::{Activations, Tile, BLOCK, TILE};
use crate::kernels::matmul::Columns;
use crate::kernels::packed::format::Quant;
use crate::kernels::packed::PackedMatrix;
use core::arch::wasm32::*;
use std::ops::Range;

/// Row groups and activation rows whose sums stay in registers together: two loads of weights and four of activations
/// serve eight products, where one group and eight rows need nine.
const GROUPS_TOGETHER: usize = 2;
const ROWS_TOGETHER: usize = 4;

/// Bytes of unpacked weights that stay in the first-level cache beside a tile of activations.
const UNPACKED_BYTES: usize = 24 << 10;

/// Blocks of 32 columns of a tile that stay in the first-level cache: some 400 bytes each.
const BLOCKS_TOGETHER: usize = 32;

/// Results of row groups for all whole tiles of eight activation rows, quantised weights, each unpacked once for all of
/// them. Returns the number of rows that are done.
#[inline(never)] // a browser optimises one function of all types worse
pub(in super::super) fn whole_tiles<F: Quant>(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    columns: &Columns,
) -> usize {
    let tiles: Vec<Tile> = Tile::all(xs.rows()).take_while(|tile| tile.n == TILE).collect();
    if tiles.is_empty() {
        return 0;
    }
    let per_unit = F::COLS / BLOCK;
    let units = w.cols() / F::COLS;
    let group_bytes = units * F::BYTES;
    let spans = (units * per_unit).div_ceil(BLOCKS_TOGETHER).max(1);
    let span = units.div_ceil(spans).max(1);
    let at_once = (UNPACKED_BYTES / (span * per_unit * size_of::<[v128; 8]>()))
        .max(1)
        .next_multiple_of(GROUPS_TOGETHER);
    let four = std::hint::black_box(4);
    let zero = i32x4_splat(0);
    let mut quants = vec![[zero; 8]; at_once * span * per_unit];
    let mut scales = vec![[zero; 2]; at_once * span * per_unit];
    let mut minima = vec![[zero; 2]; if F::HALVES && F::MINIMA { at_once * span * per_unit } else { 0 }];
    // By tile and group, what the columns so far come to.
    let mut sums = vec![[zero; TILE]; tiles.len() * at_once];
    for from in groups.clone().step_by(at_once) {
        let now = from..groups.end.min(from + at_once);
        sums.fill([zero; TILE]);
        for first_unit in (0..units).step_by(span) {
            let span = span.min(units - first_unit);
            let blocks = span * per_unit;
            for (g, group) in now.clone().enumerate() {
                let data = &w.data()[group * group_bytes + first_unit * F::BYTES..][..span * F::BYTES];
                for (i, unit) in data.chunks_exact(F::BYTES).enumerate() {
                    let (mut ws, mut wm) = ([zero; 16], [zero; 16]);
                    // SAFETY: a whole unit, and block < COLS / 32.
                    unsafe {
                        F::scales::<v128>(unit.as_ptr(), &mut ws, &mut wm);
                        for block in 0..per_unit {
                            let at = g * blocks + i * per_unit + block;
                            quants[at] = F::unpack::<v128>(unit.as_ptr(), block);
                            let (own_scales, own_minima) = of::<F>(&ws, &wm, block);
                            scales[at] = own_scales;
                            if F::HALVES && F::MINIMA {
                                minima[at] = own_minima;
                            }
                        }
                    }
                }
            }
            for (tile, sums) in tiles.iter().zip(sums.chunks_exact_mut(at_once)) {
                let x = Rows::of::<F>(xs, *tile, first_unit * per_unit, four);
                let mut g = 0;
                while g < now.len() {
                    let unpacked = (
                        &quants[g * blocks..],
                        &scales[g * blocks..],
                        minima.get(g * blocks..).unwrap_or(&[]),
                    );
                    if g + GROUPS_TOGETHER <= now.len() {
                        for first in (0..TILE).step_by(ROWS_TOGETHER) {
                            let mut y: [[v128; ROWS_TOGETHER]; GROUPS_TOGETHER] =
                                std::array::from_fn(|i| std::array::from_fn(|j| sums[g + i][first + j]));
                            // SAFETY: from its block `first_unit * per_unit` on the tile has `blocks` blocks of 8 rows.
                            unsafe {
                                unpacked_product::<F, _, _>(unpacked, blocks, Rows { first, ..x }, &mut y)
                            };
                            for (i, y) in y.into_iter().enumerate() {
                                sums[g + i][first..first + ROWS_TOGETHER].copy_from_slice(&y);
                            }
                        }
                        g += GROUPS_TOGETHER;
                    } else {
                        // SAFETY: as above.
                        unsafe {
                            unpacked_product::<F, 1, TILE>(
                                unpacked,
                                blocks,
                                x,
                                std::array::from_mut(&mut sums[g]),
                            );
                        }
                        g += 1;
                    }
                }
            }
        }
        // A row's results lie together, and rows far apart.
        for (tile, sums) in tiles.iter().zip(sums.chunks_exact(at_once)) {
            for j in 0..TILE {
                for (group, y) in now.clone().zip(sums) {
                    store(columns, tile.t0 + j, group, [y[j]]);
                }
            }
        }
    }
    tiles.len() * TILE
}

/// Unpacked blocks: quants, scales, and minima where halves have them.
type Unpacked<'a> = (&'a [[v128; 8]], &'a [[v128; 2]], &'a [[v128; 2]]);

/// Adds the products of G row groups of `blocks` blocks, one after the other, with N activation rows to `y`.
///
/// # Safety
/// `x` points to the first block of a tile with `blocks` of them; `first + N` is at most its number of rows.
#[inline(always)]
unsafe fn unpacked_product<F: Quant, const G: usize, const N: usize>(
    (quants, scales, minima): Unpacked,
    blocks: usize,
    mut x: Rows,
    y: &mut [[v128; N]; G],
) {
    assert!(quants.len() >= G * blocks && scales.len() >= G * blocks);
    assert!(!(F::HALVES && F::MINIMA) || minima.len() >= G * blocks);
    let none = [f32x4_splat(0.0); 2];
    for b in 0..blocks {
        // SAFETY: g * blocks + b < G * blocks (asserted); `x` is at block b of the tile.
        unsafe {
            let block = Block::<G> {
                w: std::array::from_fn(|g| quants.get_unchecked(g * blocks + b)),
                scales: std::array::from_fn(|g| scales.get_unchecked(g * blocks + b)),
                minima: std::array::from_fn(|g| {
                    if F::HALVES && F::MINIMA {
                        minima.get_unchecked(g * blocks + b)
                    } else {
                        &none
                    }
                }),
            };
            add_block::<F, G, N>(&block, x, y);
            x = x.next::<F>();
        }
    }
}
