//! What both ways of quantised weights do with a block of 32 columns.

use crate::kernels::activations::{form, Activations, Sums, Tile, BLOCK};
use crate::kernels::packed::format::Quant;
use core::arch::wasm32::*;
use std::ops::Range;

/// A block of 32 columns of G row groups, unpacked. Where its halves have scales of their own, those and their minima;
/// else `scales` has the block's scale and minimum.
pub(super) struct Block<'a, const G: usize> {
    pub(super) w: [&'a [v128; 8]; G],
    // Read after the products: held over their loop, they would push sums out of the registers.
    pub(super) scales: [&'a [v128; 2]; G],
    pub(super) minima: [&'a [v128; 2]; G],
}

/// Rows of a tile of `n` from the one numbered `first` on, at one of the tile's blocks.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) a: *const form::Element,
    pub(super) scales: *const f32,
    pub(super) sums: *const Sums,
    pub(super) n: usize,
    pub(super) first: usize,
    /// Weight vectors of half a block: four. Hidden from the compiler where the loop over them must stay a loop: it
    /// would else sum one output after the other, with the block's weights and activations all in flight.
    pub(super) half: usize,
}

impl Rows {
    /// The rows of a tile from a block on; `half` is 4.
    #[inline(always)]
    pub(super) fn of<F: Quant>(xs: &Activations, tile: Tile, block: usize, half: usize) -> Self {
        let quants = if reads_wide::<F>() { xs.tile_wide(tile) } else { xs.tile_quants(tile) };
        let at = block * tile.n;
        Self {
            a: quants[at * elements::<F>()..].as_ptr(),
            scales: xs.tile_scales(tile)[at..].as_ptr(),
            sums: xs.tile_sums(tile)[at..].as_ptr(),
            n: tile.n,
            first: 0,
            half,
        }
    }

    /// The same rows at the next block.
    ///
    /// # Safety
    /// There is one, or the result is not read from.
    #[inline(always)]
    pub(super) unsafe fn next<F: Quant>(self) -> Self {
        // SAFETY: as the caller promises; one past the end is allowed.
        unsafe {
            Self {
                a: self.a.add(self.n * elements::<F>()),
                scales: self.scales.add(self.n),
                sums: self.sums.add(self.n),
                ..self
            }
        }
    }
}

/// Whether a type reads the wide array.
pub(super) const fn reads_wide<F: Quant>() -> bool {
    F::WIDE && form::WIDE.is_some()
}

/// Elements that a block of a row has in the array that a type reads.
pub(super) const fn elements<F: Quant>() -> usize {
    match form::WIDE {
        Some(wide) if F::WIDE => wide,
        _ => BLOCK,
    }
}

/// Adds the products of a block with N activation rows to `y`.
///
/// # Safety
/// `x`'s pointers are those of a block of a tile of `n` rows, `first + N <= n`, and `half` is 4.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // half counts one of two dimensions
pub(super) unsafe fn add_block<F: Quant, const G: usize, const N: usize>(
    block: &Block<G>,
    x: Rows,
    y: &mut [[v128; N]; G],
) {
    let zero = i32x4_splat(0);
    let Block { w, scales, minima } = block;
    // SAFETY: all reads stay inside the block that the caller promises.
    unsafe {
        if F::HALVES {
            // One half after the other: the sums of both would not stay in registers together.
            let mut parts = [[zero; N]; G];
            for half in 0..2 {
                let mut acc = [[zero; N]; G];
                for j in 0..N {
                    let sums = x.sums.add(x.first + j);
                    let sum = if half == 0 { &raw const (*sums).low } else { &raw const (*sums).high };
                    let first = start::<F>(sum);
                    for acc in &mut acc {
                        acc[j] = first;
                    }
                }
                dots::<F, G, N>(w, half * x.half..(half + 1) * x.half, x, &mut acc);
                for g in 0..G {
                    for j in 0..N {
                        let part = f32x4_mul(f32x4_convert_i32x4(acc[g][j]), scales[g][half]);
                        parts[g][j] = if half == 0 { part } else { f32x4_add(parts[g][j], part) };
                    }
                }
            }
            for j in 0..N {
                let scale = v128_load32_splat(x.scales.add(x.first + j).cast());
                for g in 0..G {
                    let mut part = parts[g][j];
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
                let first = if reads_wide::<F>() {
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
                            f32x4_add(part, minimum(&raw const (*x.sums.add(x.first + j)).all, scales[g][1]));
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
                    let wide = a.add(8 * (c * n + first + j));
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

/// A block's scales and minima among its unit's, as [`Block`] has them.
#[inline(always)]
pub(super) fn of<F: Quant>(scales: &[v128; 16], minima: &[v128; 16], block: usize) -> ([v128; 2], [v128; 2]) {
    if F::HALVES {
        let two = |all: &[v128; 16]| [all[2 * block], all[2 * block + 1]];
        (two(scales), two(minima))
    } else {
        ([scales[block], minima[block]], [scales[block]; 2])
    }
}
