//! The types with blocks of 32 columns: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL (layouts of the file's blocks from
//! ggml's `block_q4_0` and its kin). Scales are widened to f32 when packed; minima are stored negated, so that
//! `value = scale * quant - minimum` holds as for the K-quants.

use super::format::*;
use super::lane::Lane;

/// IQ4_NL's sixteen values (`kvalues_iq4nl` of ggml), each plus 128.
const IQ4NL_PLUS_128: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// Quants whose low nibbles stand at `at` as in all four- and five-bit types of 32.
#[inline(always)]
fn file_nibbles(block: &[u8], at: usize) -> [u32; 8] {
    let mut w = [0; 8];
    for c in 0..4 {
        let q = word_at(block, at + 4 * c);
        w[c] = q & 0x0f0f_0f0f;
        w[c + 4] = q >> 4 & 0x0f0f_0f0f;
    }
    w
}

/// As [`file_nibbles`], with the fifth bits of the 32 columns in the word at `fifth`.
#[inline(always)]
fn file_five_bits(block: &[u8], at: usize, fifth: usize) -> [u32; 8] {
    let mut w = file_nibbles(block, at);
    let h = word_at(block, fifth);
    for (c, word) in w.iter_mut().enumerate() {
        let four = h >> (4 * c) & 0xf;
        // Bit i goes to bit 4 of byte i: the product puts a copy of the four at each multiple of 7.
        *word |= (four.wrapping_mul(0x0020_4081) & 0x0101_0101) << 4;
    }
    w
}

macro_rules! layout {
    ($name:ident, $file:literal, $bytes:literal, |$block:ident, $unit:ident, $row:ident| $pack:block) => {
        #[doc = concat!("`", stringify!($name), "`: ", $file, " bytes a block in the file.")]
        pub(crate) struct $name;
        impl Layout for $name {
            const COLS: usize = 32;
            const FILE_BYTES: usize = $file;
            const BYTES: usize = $bytes;
            #[inline(always)]
            fn pack($block: &[u8], $unit: &mut [u8], $row: usize) $pack
        }
    };
}

// nibbles 64, scales 16
layout!(Q4_0, 18, 80, |block, unit, row| {
    put_nibbles(unit, 0, row, &file_nibbles(block, 2));
    put(unit, 64, row, f16_at(block, 0).to_bits());
});

// nibbles 64, scales 16, minima 16
layout!(Q4_1, 20, 96, |block, unit, row| {
    put_nibbles(unit, 0, row, &file_nibbles(block, 4));
    put(unit, 64, row, f16_at(block, 0).to_bits());
    put(unit, 80, row, (-f16_at(block, 2)).to_bits());
});

// nibbles 64, fifth bits 16, scales 16
layout!(Q5_0, 22, 96, |block, unit, row| {
    let w = file_five_bits(block, 6, 2);
    put_nibbles(unit, 0, row, &w);
    put_bits(unit, 64, row, &w, 4);
    put(unit, 80, row, f16_at(block, 0).to_bits());
});

// nibbles 64, fifth bits 16, scales 16, minima 16
layout!(Q5_1, 24, 112, |block, unit, row| {
    let w = file_five_bits(block, 8, 4);
    put_nibbles(unit, 0, row, &w);
    put_bits(unit, 64, row, &w, 4);
    put(unit, 80, row, f16_at(block, 0).to_bits());
    put(unit, 96, row, (-f16_at(block, 2)).to_bits());
});

// quants plus 128 as bytes 128, scales 16
layout!(Q8_0, 34, 144, |block, unit, row| {
    for c in 0..8 {
        put(unit, 16 * c, row, word_at(block, 2 + 4 * c) ^ 0x8080_8080);
    }
    put(unit, 128, row, f16_at(block, 0).to_bits());
});

// nibbles 64, scales 16
layout!(Iq4Nl, 18, 80, |block, unit, row| { Q4_0::pack(block, unit, row) });

macro_rules! scales {
    ($at:literal $(, $minima:literal)?) => {
        #[inline(always)]
        unsafe fn scales<L: Lane>(unit: *const u8, scales: &mut [L::Float; 16], _minima: &mut [L::Float; 16]) {
            // SAFETY: inside the unit that the caller promises.
            unsafe {
                scales[0] = L::load_f32(unit.add($at));
                $(_minima[0] = L::load_f32(unit.add($minima));)?
            }
        }
    };
}

impl Quant for Q4_0 {
    const OFFSET_BITS: Option<u32> = Some(3);
    scales!(64);
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, _block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe { nibbles(unit) }
    }
}

impl Quant for Q4_1 {
    const OFFSET_BITS: Option<u32> = None;
    const MINIMA: bool = true;
    scales!(64, 80);
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, _block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe { nibbles(unit) }
    }
}

impl Quant for Q5_0 {
    const OFFSET_BITS: Option<u32> = Some(4);
    scales!(80);
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, _block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe {
            let mut q = nibbles(unit);
            or_bits(unit.add(64), &mut q, 4);
            q
        }
    }
}

impl Quant for Q5_1 {
    const OFFSET_BITS: Option<u32> = None;
    const MINIMA: bool = true;
    scales!(80, 96);
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, _block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe {
            let mut q = nibbles(unit);
            or_bits(unit.add(64), &mut q, 4);
            q
        }
    }
}

impl Quant for Q8_0 {
    const OFFSET_BITS: Option<u32> = Some(7);
    const WIDE: bool = true;
    scales!(128);
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, _block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        [0, 1, 2, 3, 4, 5, 6, 7].map(|c| unsafe { L::load(unit.add(16 * c)) })
    }
}

impl Quant for Iq4Nl {
    const OFFSET_BITS: Option<u32> = Some(7);
    const WIDE: bool = true;
    scales!(64);
    #[inline(always)]
    unsafe fn unpack<L: Lane>(unit: *const u8, _block: usize) -> [L; 8] {
        // SAFETY: inside the unit that the caller promises.
        unsafe { nibbles::<L>(unit) }.map(|q| q.lookup(&IQ4NL_PLUS_128))
    }
}
