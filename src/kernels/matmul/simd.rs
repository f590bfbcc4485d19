//! The matrix kernels for wasm SIMD: four weight rows in the four lanes, so nothing is ever summed across lanes. With
//! relaxed SIMD a step is one dot product of bytes, without it two of 16-bit numbers; the packed weights are the same.

use super::{Columns, CHAINS};
use crate::kernels::activations::{form, Activations, Sums, Tile, BLOCK, TILE};
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
    let x =
        Rows { a: quants.as_ptr(), scales: scales.as_ptr(), sums: sums.as_ptr(), n: N, first: 0, half: 4 };
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
                product::<F, N, STREAMS>(unit, apart * group_bytes, units, x)
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
        let [y] = unsafe { product::<F, N, 1>(data.as_ptr(), 0, units, x) };
        store(columns, tile.t0, group, y);
    }
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
                    let block =
                        Block { w: [&w], scales: [of::<F>(&ws[g], block)], minima: [of::<F>(&wm[g], block)] };
                    add_block::<F, 1, N>(&block, x, std::array::from_mut(&mut y[g]));
                }
                x = x.next();
            }
            unit = unit.add(F::BYTES);
        }
    }
    y
}

/// A block's scales among its unit's.
#[inline(always)]
fn of<F: Quant>(all: &[v128; 16], block: usize) -> [v128; 2] {
    if F::HALVES {
        [all[2 * block], all[2 * block + 1]]
    } else {
        [all[block]; 2]
    }
}

/// Row groups and activation rows whose sums stay in registers together: two loads of weights and four of activations
/// serve eight products, where one group and eight rows need nine.
const GROUPS_TOGETHER: usize = 2;
const ROWS_TOGETHER: usize = 4;

/// Bytes of unpacked weights that stay in the first-level cache beside a tile of activations.
const UNPACKED_BYTES: usize = 24 << 10;

/// Results of row groups for all whole tiles of eight activation rows, quantised weights, each unpacked once for all of
/// them. Returns the number of rows that are done.
pub(super) fn whole_tiles<F: Quant>(
    w: &PackedMatrix,
    groups: Range<usize>,
    xs: &Activations,
    columns: &Columns,
) -> usize {
    let tiles: Vec<Tile> = Tile::all(xs.rows()).take_while(|tile| tile.n == TILE).collect();
    if tiles.is_empty() {
        return 0;
    }
    let units = w.cols() / F::COLS;
    let blocks = w.cols() / BLOCK;
    let group_bytes = units * F::BYTES;
    let at_once =
        (UNPACKED_BYTES / (blocks * size_of::<[v128; 8]>())).max(1).next_multiple_of(GROUPS_TOGETHER);
    let four = std::hint::black_box(4);
    let zero = i32x4_splat(0);
    let mut quants = vec![[zero; 8]; at_once * blocks];
    let mut scales = vec![[zero; 2]; at_once * blocks];
    let mut minima = vec![[zero; 2]; if F::MINIMA { at_once * blocks } else { 0 }];
    for from in groups.clone().step_by(at_once) {
        let now = from..groups.end.min(from + at_once);
        let data = &w.data()[now.start * group_bytes..now.end * group_bytes];
        for (i, unit) in data.chunks_exact(F::BYTES).enumerate() {
            let (mut ws, mut wm) = ([zero; 16], [zero; 16]);
            // SAFETY: a whole unit, and block < COLS / 32.
            unsafe {
                F::scales::<v128>(unit.as_ptr(), &mut ws, &mut wm);
                for block in 0..F::COLS / BLOCK {
                    let at = i * (F::COLS / BLOCK) + block;
                    quants[at] = F::unpack::<v128>(unit.as_ptr(), block);
                    scales[at] = of::<F>(&ws, block);
                    if F::MINIMA {
                        minima[at] = of::<F>(&wm, block);
                    }
                }
            }
        }
        for tile in &tiles {
            let x = Rows {
                a: xs.tile_quants(*tile).as_ptr(),
                scales: xs.tile_scales(*tile).as_ptr(),
                sums: xs.tile_sums(*tile).as_ptr(),
                n: TILE,
                first: 0,
                half: four,
            };
            let mut g = 0;
            while g + GROUPS_TOGETHER <= now.len() {
                for first in (0..TILE).step_by(ROWS_TOGETHER) {
                    let unpacked = (
                        &quants[g * blocks..],
                        &scales[g * blocks..],
                        minima.get(g * blocks..).unwrap_or(&[]),
                    );
                    // SAFETY: the tile has `blocks` blocks of eight rows.
                    let y = unsafe {
                        unpacked_product::<F, GROUPS_TOGETHER, ROWS_TOGETHER>(
                            unpacked,
                            blocks,
                            Rows { first, ..x },
                        )
                    };
                    for (i, y) in y.into_iter().enumerate() {
                        store(columns, tile.t0 + first, now.start + g + i, y);
                    }
                }
                g += GROUPS_TOGETHER;
            }
            if g < now.len() {
                let unpacked =
                    (&quants[g * blocks..], &scales[g * blocks..], minima.get(g * blocks..).unwrap_or(&[]));
                // SAFETY: as above.
                let [y] = unsafe { unpacked_product::<F, 1, TILE>(unpacked, blocks, x) };
                store(columns, tile.t0, now.start + g, y);
            }
        }
    }
    tiles.len() * TILE
}

/// Unpacked blocks: quants, scales, and minima where the type has them.
type Unpacked<'a> = (&'a [[v128; 8]], &'a [[v128; 2]], &'a [[v128; 2]]);

/// G row groups of `blocks` blocks, one after the other, times N activation rows.
///
/// # Safety
/// `x` points to the first block of a tile with `blocks` of them; `first + N` is at most its number of rows.
#[inline(always)]
unsafe fn unpacked_product<F: Quant, const G: usize, const N: usize>(
    (quants, scales, minima): Unpacked,
    blocks: usize,
    mut x: Rows,
) -> [[v128; N]; G] {
    assert!(quants.len() >= G * blocks && scales.len() >= G * blocks);
    assert!(!F::MINIMA || minima.len() >= G * blocks);
    let zero = f32x4_splat(0.0);
    let mut y = [[zero; N]; G];
    for b in 0..blocks {
        // SAFETY: g * blocks + b < G * blocks (asserted); `x` is at block b of the tile.
        unsafe {
            let block = Block::<G> {
                w: std::array::from_fn(|g| quants.get_unchecked(g * blocks + b)),
                scales: std::array::from_fn(|g| *scales.get_unchecked(g * blocks + b)),
                minima: std::array::from_fn(|g| {
                    if F::MINIMA {
                        *minima.get_unchecked(g * blocks + b)
                    } else {
                        [zero; 2]
                    }
                }),
            };
            add_block::<F, G, N>(&block, x, &mut y);
            x = x.next();
        }
    }
    y
}

/// A block of 32 columns of G row groups, unpacked, with the scales (and minima) of its halves; a block of one scale has
/// it first.
struct Block<'a, const G: usize> {
    w: [&'a [v128; 8]; G],
    scales: [[v128; 2]; G],
    minima: [[v128; 2]; G],
}

/// Rows of a tile of `n` from the one numbered `first` on, at one of the tile's blocks.
#[derive(Clone, Copy)]
struct Rows {
    a: *const form::Element,
    scales: *const f32,
    sums: *const Sums,
    n: usize,
    first: usize,
    /// Weight vectors of half a block: four. Hidden from the compiler where the loop over them must stay a loop: it
    /// would else sum one output after the other, with the block's weights and activations all in flight.
    half: usize,
}

impl Rows {
    /// The same rows at the next block.
    ///
    /// # Safety
    /// There is one, or the result is not read from.
    #[inline(always)]
    unsafe fn next(self) -> Self {
        // SAFETY: as the caller promises; one past the end is allowed.
        unsafe {
            Self {
                a: self.a.add(self.n * form::LEN),
                scales: self.scales.add(self.n),
                sums: self.sums.add(self.n),
                ..self
            }
        }
    }
}

/// Adds the products of a block with N activation rows to `y`.
///
/// # Safety
/// `x`'s pointers are those of a block of a tile of `n` rows, `first + N <= n`, and `half` is 4.
#[inline(always)]
unsafe fn add_block<F: Quant, const G: usize, const N: usize>(
    block: &Block<G>,
    x: Rows,
    y: &mut [[v128; N]; G],
) {
    let zero = i32x4_splat(0);
    let Block { w, scales, minima } = block;
    // SAFETY: all reads stay inside the block that the caller promises.
    unsafe {
        if F::HALVES {
            let (mut low, mut high) = ([[zero; N]; G], [[zero; N]; G]);
            for j in 0..N {
                let sums = x.sums.add(x.first + j);
                let (l, h) = (start::<F>(&raw const (*sums).low), start::<F>(&raw const (*sums).high));
                for g in 0..G {
                    (low[g][j], high[g][j]) = (l, h);
                }
            }
            dots::<F, G, N>(w, 0..x.half, x, &mut low);
            dots::<F, G, N>(w, x.half..2 * x.half, x, &mut high);
            for j in 0..N {
                let scale = v128_load32_splat(x.scales.add(x.first + j).cast());
                for g in 0..G {
                    let p0 = f32x4_mul(f32x4_convert_i32x4(low[g][j]), scales[g][0]);
                    let p1 = f32x4_mul(f32x4_convert_i32x4(high[g][j]), scales[g][1]);
                    let mut part = f32x4_add(p0, p1);
                    if F::MINIMA {
                        let m0 = minimum(&raw const (*x.sums.add(x.first + j)).low, minima[g][0]);
                        let m1 = minimum(&raw const (*x.sums.add(x.first + j)).high, minima[g][1]);
                        part = f32x4_add(part, f32x4_add(m0, m1));
                    }
                    y[g][j] = f32x4_add(y[g][j], f32x4_mul(part, scale));
                }
            }
        } else {
            let mut acc = [[zero; N]; G];
            for j in 0..N {
                let sums = x.sums.add(x.first + j);
                let first = if F::WIDE && cfg!(target_feature = "relaxed-simd") {
                    v128_load32_splat((&raw const (*sums).negative).cast())
                } else {
                    start::<F>(&raw const (*sums).all)
                };
                for acc in &mut acc {
                    acc[j] = first;
                }
            }
            dots::<F, G, N>(w, 0..2 * x.half, x, &mut acc);
            for j in 0..N {
                let scale = v128_load32_splat(x.scales.add(x.first + j).cast());
                for g in 0..G {
                    let mut part = f32x4_mul(f32x4_convert_i32x4(acc[g][j]), scales[g][0]);
                    if F::MINIMA {
                        part =
                            f32x4_add(part, minimum(&raw const (*x.sums.add(x.first + j)).all, minima[g][0]));
                    }
                    y[g][j] = f32x4_add(y[g][j], f32x4_mul(part, scale));
                }
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
/// As [`add_block`].
#[cfg(target_feature = "relaxed-simd")]
#[inline(always)]
#[allow(clippy::needless_range_loop)] // j counts the second dimension
unsafe fn dots<F: Quant, const G: usize, const N: usize>(
    w: &[&[v128; 8]; G],
    vectors: Range<usize>,
    Rows { a, n, first, .. }: Rows,
    acc: &mut [[v128; N]; G],
) {
    let mut c = vectors.start;
    while c < vectors.end {
        for j in 0..N {
            // SAFETY: inside the block that the caller promises.
            unsafe {
                // The second operand must be 0..127: the weights where they are, else the activations' magnitudes.
                if F::WIDE {
                    let wide = a.add(n * BLOCK + 8 * (c * n + first + j));
                    let (size, mask) =
                        (v128_load32_splat(wide.cast()), v128_load32_splat(wide.add(4).cast()));
                    for g in 0..G {
                        acc[g][j] = i32x4_relaxed_dot_i8x16_i7x16_add(
                            v128_xor(*w[g].get_unchecked(c), mask),
                            size,
                            acc[g][j],
                        );
                    }
                } else {
                    let a = v128_load32_splat(a.add(4 * (c * n + first + j)).cast());
                    for g in 0..G {
                        acc[g][j] = i32x4_relaxed_dot_i8x16_i7x16_add(a, *w[g].get_unchecked(c), acc[g][j]);
                    }
                }
            }
        }
        c += 1;
    }
}

/// Adds the products of the columns 4c.. of `vectors` with those of N activation rows.
///
/// # Safety
/// As [`add_block`].
#[cfg(not(target_feature = "relaxed-simd"))]
#[inline(always)]
#[allow(clippy::needless_range_loop)] // j counts the second dimension
unsafe fn dots<F: Quant, const G: usize, const N: usize>(
    w: &[&[v128; 8]; G],
    vectors: Range<usize>,
    Rows { a, n, first, .. }: Rows,
    acc: &mut [[v128; N]; G],
) {
    let mut c = vectors.start;
    while c < vectors.end {
        // SAFETY: c < 8, as half a block has four vectors.
        let w = w.map(|w| unsafe { *w.get_unchecked(c) });
        let even = w.map(|w| v128_and(w, u16x8_splat(0x00ff)));
        let odd = w.map(|w| u16x8_shr(w, 8));
        for j in 0..N {
            // SAFETY: inside the block that the caller promises.
            unsafe {
                let a0 = v128_load32_splat(a.add(2 * (2 * c * n + first + j)).cast());
                let a1 = v128_load32_splat(a.add(2 * ((2 * c + 1) * n + first + j)).cast());
                for g in 0..G {
                    acc[g][j] = i32x4_add(acc[g][j], i32x4_dot_i16x8(even[g], a0));
                    acc[g][j] = i32x4_add(acc[g][j], i32x4_dot_i16x8(odd[g], a1));
                }
            }
        }
        c += 1;
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
