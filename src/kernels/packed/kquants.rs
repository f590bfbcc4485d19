//! The types with blocks of 256 columns: Q2_K, Q3_K, Q4_K, Q5_K and Q6_K (layouts of the file's blocks from ggml's
//! `block_q2_K` and its kin). The quants are regrouped per 32 columns, the block's scale is widened to f32, and the
//! scales of the sub-blocks stay as small as they are, four sub-blocks in a lane. A unit begins with its scales, so that
//! it is read from front to back.

use super::format::*;
use super::lane::Lane;

macro_rules! layout {
    ($name:ident, $file:literal, $bytes:literal, |$block:ident, $unit:ident, $row:ident| $pack:block) => {
        #[doc = concat!("`", stringify!($name), "`: ", $file, " bytes a block in the file.")]
        pub(crate) struct $name;
        impl Layout for $name {
            const COLS: usize = 256;
            const FILE_BYTES: usize = $file;
            const BYTES: usize = $bytes;
            #[inline(always)]
            fn pack($block: &[u8], $unit: &mut [u8], $row: usize) $pack
        }
    };
}

/// Sixteen numbers of six bits in 48 bytes (12 a row).
#[inline(always)]
fn put_six_bits(unit: &mut [u8], at: usize, row: usize, numbers: &[u8; 16]) {
    let mut w = [0u32; 4];
    for (i, n) in numbers.iter().enumerate() {
        w[i / 4] |= u32::from(*n) << (8 * (i % 4));
    }
    put_sixes(unit, at, row, &w);
}

/// `numbers[i]` (unsigned bytes of the lanes) times `by`.
#[inline(always)]
fn spread<L: Lane>(word: L, by: L::Float, out: &mut [L::Float]) {
    for (i, o) in (0u32..).zip(out.iter_mut()) {
        *o = L::mul_f32(by, word.shr(8 * i).and(L::splat(0xff)).to_f32());
    }
}

/// The eight scales and eight minima (six bits each) of Q4_K and Q5_K, in the file's twelve bytes.
#[inline(always)]
fn file_scales_and_minima(s: &[u8]) -> [u8; 16] {
    let mut out = [0; 16];
    for j in 0..4 {
        out[j] = s[j] & 63;
        out[j + 8] = s[j + 4] & 63;
        out[j + 4] = s[j + 8] & 15 | s[j] >> 6 << 4;
        out[j + 12] = s[j + 8] >> 4 | s[j + 4] >> 6 << 4;
    }
    out
}

/// Nibbles of sub-block `s` of Q4_K and Q5_K: two sub-blocks share 32 bytes.
#[inline(always)]
fn file_nibbles(block: &[u8], at: usize, s: usize) -> [u32; 8] {
    words_at(block, at + s / 2 * 32, 4 * (s % 2), 0x0f0f_0f0f)
}

/// Low pairs of bits of sub-block `s` of Q2_K and Q3_K: four sub-blocks share 32 bytes.
#[inline(always)]
fn file_pairs(block: &[u8], at: usize, s: usize) -> [u32; 8] {
    words_at(block, at + s / 4 * 32, 2 * (s % 4), 0x0303_0303)
}

// scales and minima 64, block scales 16, block minima 16, 8 × (pairs 32)
layout!(Q2K, 84, 352, |block, unit, row| {
    for s in 0..8 {
        put_pairs(unit, 96 + 32 * s, row, &file_pairs(block, 16, s), 0);
    }
    for i in 0..4 {
        put(unit, 16 * i, row, word_at(block, 4 * i));
    }
    put(unit, 64, row, f16_at(block, 80).to_bits());
    put(unit, 80, row, f16_at(block, 82).to_bits());
});

// scales 48, block scales 16, 8 × (pairs 32, third bits 16)
layout!(Q3K, 110, 448, |block, unit, row| {
    for s in 0..8 {
        put_pairs(unit, 64 + 48 * s, row, &file_pairs(block, 32, s), 0);
        put_bits(unit, 96 + 48 * s, row, &words_at(block, 0, s, 0x0101_0101), 0);
    }
    let mut scales = [0; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        let low = block[96 + i % 8] >> (i / 8 * 4) & 15;
        *scale = low | (block[104 + i % 4] >> (i / 4 * 2) & 3) << 4;
    }
    put_six_bits(unit, 0, row, &scales);
    put(unit, 48, row, f16_at(block, 108).to_bits());
});

// scales and minima 48, block scales 16, block minima 16, 8 × (nibbles 64)
layout!(Q4K, 144, 592, |block, unit, row| {
    for s in 0..8 {
        put_nibbles(unit, 80 + 64 * s, row, &file_nibbles(block, 16, s));
    }
    put_six_bits(unit, 0, row, &file_scales_and_minima(&block[4..16]));
    put(unit, 48, row, f16_at(block, 0).to_bits());
    put(unit, 64, row, f16_at(block, 2).to_bits());
});

// scales and minima 48, block scales 16, block minima 16, 8 × (nibbles 64, fifth bits 16)
layout!(Q5K, 176, 720, |block, unit, row| {
    for s in 0..8 {
        put_nibbles(unit, 80 + 80 * s, row, &file_nibbles(block, 48, s));
        put_bits(unit, 144 + 80 * s, row, &words_at(block, 16, s, 0x0101_0101), 0);
    }
    put_six_bits(unit, 0, row, &file_scales_and_minima(&block[4..16]));
    put(unit, 48, row, f16_at(block, 0).to_bits());
    put(unit, 64, row, f16_at(block, 2).to_bits());
});

// scales 64, block scales 16, 8 × (six bits 96)
layout!(Q6K, 210, 848, |block, unit, row| {
    for s in 0..8 {
        // Each half of the block: 64 bytes of nibbles (sub-blocks 0 and 1 low, 2 and 3 high), 32 bytes of pairs.
        let (half, quarter) = (s / 4, s % 4);
        let low = words_at(block, 64 * half + 32 * (quarter % 2), 4 * (quarter / 2), 0x0f0f_0f0f);
        let high = words_at(block, 128 + 32 * half, 2 * quarter, 0x0303_0303);
        let w: [u32; 8] = std::array::from_fn(|c| low[c] | high[c] << 4);
        for (at, w) in [80 + 96 * s, 128 + 96 * s].into_iter().zip(w.as_chunks::<4>().0) {
            put_sixes(unit, at, row, w);
        }
    }
    for i in 0..4 {
        put(unit, 16 * i, row, word_at(block, 192 + 4 * i));
    }
    put(unit, 64, row, f16_at(block, 208).to_bits());
});

impl Quant for Q2K {
    const OFFSET_BITS: Option<u32> = None;
    const MINIMA: bool = true;
    const HALVES: bool = true;
    #[inline(always)]
    unsafe fn scales<L: Lane>(unit: *const u8, scales: &mut [L::Float; 16], minima: &mut [L::Float; 16]) {
        // SAFETY: inside the unit that the caller promises.
        unsafe {
            let (d, dmin) = (L::load_f32(unit.add(64)), L::load_f32(unit.add(80)));
            let low = L::splat(0x0f0f_0f0f);
            for i in 0..4 {
                let both = L::load(unit.add(16 * i));
                spread(both.and(low), d, &mut scales[4 * i..4 * i + 4]);
                spread(both.shr(4).and(low), dmin, &mut minima[4 * i..4 * i + 4]);
            }
        }
    }
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, block: usize) -> [L; 8] {
        let mut q = [L::splat(0); 8];
        // SAFETY: inside the unit that the caller promises.
        unsafe { or_pairs(unit.add(96 + 32 * block), &mut q, 0) };
        q
    }
}

impl Quant for Q3K {
    const OFFSET_BITS: Option<u32> = Some(2);
    const HALVES: bool = true;
    #[inline(always)]
    unsafe fn scales<L: Lane>(unit: *const u8, scales: &mut [L::Float; 16], _minima: &mut [L::Float; 16]) {
        // SAFETY: inside the unit that the caller promises.
        let (d, words) = unsafe { (L::load_f32(unit.add(48)), sixes::<L>(unit)) };
        for (i, scale) in scales.iter_mut().enumerate() {
            let six = words[i / 4].shr(8 * (i % 4) as u32).and(L::splat(0xff));
            *scale = L::mul_f32(d, six.sub(L::splat(32)).to_f32());
        }
    }
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, block: usize) -> [L; 8] {
        let mut q = [L::splat(0); 8];
        // SAFETY: inside the unit that the caller promises.
        unsafe {
            or_pairs(unit.add(64 + 48 * block), &mut q, 0);
            or_bits(unit.add(96 + 48 * block), &mut q, 2);
        }
        q
    }
}

impl Quant for Q4K {
    const OFFSET_BITS: Option<u32> = None;
    const MINIMA: bool = true;
    #[inline(always)]
    unsafe fn scales<L: Lane>(unit: *const u8, scales: &mut [L::Float; 16], minima: &mut [L::Float; 16]) {
        // SAFETY: inside the unit that the caller promises.
        unsafe { scales_and_minima::<L>(unit, scales, minima) }
    }
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe { nibbles(unit.add(80 + 64 * block)) }
    }
}

impl Quant for Q5K {
    const OFFSET_BITS: Option<u32> = None;
    const MINIMA: bool = true;
    #[inline(always)]
    unsafe fn scales<L: Lane>(unit: *const u8, scales: &mut [L::Float; 16], minima: &mut [L::Float; 16]) {
        // SAFETY: inside the unit that the caller promises.
        unsafe { scales_and_minima::<L>(unit, scales, minima) }
    }
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe {
            let mut q = nibbles(unit.add(80 + 80 * block));
            or_bits(unit.add(144 + 80 * block), &mut q, 4);
            q
        }
    }
}

impl Quant for Q6K {
    const OFFSET_BITS: Option<u32> = Some(5);
    const HALVES: bool = true;
    #[inline(always)]
    unsafe fn scales<L: Lane>(unit: *const u8, scales: &mut [L::Float; 16], _minima: &mut [L::Float; 16]) {
        // SAFETY: inside the unit that the caller promises.
        unsafe {
            let d = L::load_f32(unit.add(64));
            for (i, four) in scales.chunks_exact_mut(4).enumerate() {
                let word = L::load(unit.add(16 * i));
                for (scale, left) in four.iter_mut().zip([24, 16, 8, 0]) {
                    *scale = L::mul_f32(d, word.shl(left).shr_signed(24).to_f32());
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe {
            let [a, b, c, d] = sixes(unit.add(80 + 96 * block));
            let [e, f, g, h] = sixes(unit.add(128 + 96 * block));
            [a, b, c, d, e, f, g, h]
        }
    }
}

/// Scales of Q4_K and Q5_K: 48 bytes of six-bit numbers, block scales and block minima at `at`.
///
/// # Safety
/// 80 bytes at `at` must be readable (68 for u32).
#[inline(always)]
unsafe fn scales_and_minima<L: Lane>(
    at: *const u8,
    scales: &mut [L::Float; 16],
    minima: &mut [L::Float; 16],
) {
    // SAFETY: inside the bytes that the caller promises.
    let (d, dmin, [a, b, c, e]) =
        unsafe { (L::load_f32(at.add(48)), L::load_f32(at.add(64)), sixes::<L>(at)) };
    spread(a, d, &mut scales[..4]);
    spread(b, d, &mut scales[4..8]);
    spread(c, dmin, &mut minima[..4]);
    spread(e, dmin, &mut minima[4..8]);
}
