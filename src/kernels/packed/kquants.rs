//! The types with blocks of 256 columns: Q2_K, Q3_K, Q4_K, Q5_K and Q6_K (layouts of the file's blocks from ggml's
//! `block_q2_K` and its kin). The quants are regrouped per 32 columns, the block's scale is widened to f32, and the
//! scales of the sub-blocks stay as small as they are, four sub-blocks in a lane. A unit begins with its scales, so that
//! it is read from front to back.

use super::format::*;
use super::lane::Lane;

macro_rules! layout {
    ($name:ident, $file:literal, $bytes:literal, |$blocks:ident, $unit:ident| $pack:block) => {
        #[doc = concat!("`", stringify!($name), "`: ", $file, " bytes a block in the file.")]
        pub(crate) struct $name;
        impl Layout for $name {
            const COLS: usize = 256;
            const FILE_BYTES: usize = $file;
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn pack<L: Lane>($blocks: Blocks, $unit: *mut u8) {
                // SAFETY: inside the blocks and the unit that the caller promises.
                unsafe { $pack }
            }
        }
    };
}

/// `numbers[i]` (unsigned bytes of the lanes) times `by`.
#[inline(always)]
fn spread<L: Lane>(word: L, by: L::Float, out: &mut [L::Float]) {
    for (i, o) in (0u32..).zip(out.iter_mut()) {
        *o = L::mul_f32(by, word.shr(8 * i).and(L::splat(0xff)).to_f32());
    }
}

/// `low` with the pairs of bits at `shift` of `high` above its nibbles.
#[inline(always)]
fn with_pairs<L: Lane>(low: L, high: L, shift: u32) -> L {
    low.or(high.shr(shift).and(L::splat(0x0303_0303)).shl(4))
}

/// What Q4_K and Q5_K begin with, 80 bytes of a unit: eight scales and eight minima of six bits, the block's scale and minimum.
///
/// # Safety
/// 16 bytes of the blocks and 80 of the unit (68 for u32) are there.
#[inline(always)]
unsafe fn put_scales_and_minima<L: Lane>(blocks: Blocks, unit: *mut u8) {
    // SAFETY: as the caller promises.
    unsafe {
        let [both, scales, minima, upper] = blocks.four::<L>(0);
        let [first, third] = bits_of([scales, minima], 0, 0x3f3f_3f3f);
        let [second] = bits_of([upper], 0, 0x0f0f_0f0f).map(|low| with_pairs(low, scales, 6));
        let [fourth] = bits_of([upper], 4, 0x0f0f_0f0f).map(|low| with_pairs(low, minima, 6));
        put_sixes(unit, 0, [first, second, third, fourth]);
        put(unit, 48, halves(both));
    }
}

// scales and minima 64, block scales 16, block minima 16, 8 × (pairs 32)
layout!(Q2K, 84, 352, |blocks, unit| {
    put(unit, 0, blocks.four::<L>(0));
    put(unit, 64, halves(blocks.word::<L>(80)));
    for half in 0..2 {
        let pairs: [L; 8] = blocks.eight(16 + 32 * half);
        for s in 0..4 {
            put_pairs(unit, 96 + 32 * (4 * half + s), bits_of(pairs, 2 * s as u32, 0x0303_0303));
        }
    }
});

// scales 48, block scales 16, 8 × (pairs 32, third bits 16)
layout!(Q3K, 110, 448, |blocks, unit| {
    let thirds: [L; 8] = blocks.eight(0);
    for half in 0..2 {
        let pairs: [L; 8] = blocks.eight(32 + 32 * half);
        for s in 0..4 {
            let sub = 4 * half + s;
            put_pairs(unit, 64 + 48 * sub, bits_of(pairs, 2 * s as u32, 0x0303_0303));
            put_bits(unit, 96 + 48 * sub, bits_of(thirds, sub as u32, 0x0101_0101));
        }
    }
    let [low, middle, upper]: [L; 3] = [blocks.word(96), blocks.word(100), blocks.word(104)];
    let ([a, b], [c, d]) = (bits_of([low, middle], 0, 0x0f0f_0f0f), bits_of([low, middle], 4, 0x0f0f_0f0f));
    let scales = [(a, 0), (b, 2), (c, 4), (d, 6)].map(|(low, shift)| with_pairs(low, upper, shift));
    put_sixes(unit, 0, scales);
    put(unit, 48, [halves(blocks.word::<L>(106))[1]]);
});

// scales and minima 48, block scales 16, block minima 16, 8 × (nibbles 64)
layout!(Q4K, 144, 592, |blocks, unit| {
    put_scales_and_minima::<L>(blocks, unit);
    // Two sub-blocks share 32 bytes.
    for s in 0..4 {
        let both: [L; 8] = blocks.eight(16 + 32 * s);
        put_nibbles(unit, 80 + 128 * s, bits_of(both, 0, 0x0f0f_0f0f));
        put_nibbles(unit, 144 + 128 * s, bits_of(both, 4, 0x0f0f_0f0f));
    }
});

// scales and minima 48, block scales 16, block minima 16, 8 × (nibbles 64, fifth bits 16)
layout!(Q5K, 176, 720, |blocks, unit| {
    put_scales_and_minima::<L>(blocks, unit);
    let fifths: [L; 8] = blocks.eight(16);
    for s in 0..4 {
        let both: [L; 8] = blocks.eight(48 + 32 * s);
        for (sub, shift) in [(2 * s, 0), (2 * s + 1, 4)] {
            put_nibbles(unit, 80 + 80 * sub, bits_of(both, shift, 0x0f0f_0f0f));
            put_bits(unit, 144 + 80 * sub, bits_of(fifths, sub as u32, 0x0101_0101));
        }
    }
});

// scales 64, block scales 16, 8 × (six bits 96)
layout!(Q6K, 210, 848, |blocks, unit| {
    // Each half of the block: 64 bytes of nibbles (sub-blocks 0 and 1 low, 2 and 3 high), 32 bytes of pairs.
    for half in 0..2 {
        let low: [[L; 8]; 2] = [blocks.eight(64 * half), blocks.eight(64 * half + 32)];
        let high: [L; 8] = blocks.eight(128 + 32 * half);
        for quarter in 0..4 {
            let mut w = bits_of(low[quarter % 2], 4 * (quarter as u32 / 2), 0x0f0f_0f0f);
            for (w, high) in w.iter_mut().zip(high) {
                *w = with_pairs(*w, high, 2 * quarter as u32);
            }
            let ([a, b, c, d, e, f, g, h], at) = (w, 80 + 96 * (4 * half + quarter));
            put_sixes(unit, at, [a, b, c, d]);
            put_sixes(unit, at + 48, [e, f, g, h]);
        }
    }
    put(unit, 0, blocks.four::<L>(192));
    put(unit, 64, [halves(blocks.word::<L>(206))[1]]);
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
