//! The types with blocks of 32 columns: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL (layouts of the file's blocks from
//! ggml's `block_q4_0` and its kin). Scales are widened to f32 when packed; minima are stored negated, so that
//! `value = scale * quant - minimum` holds as for the K-quants.

use super::format::*;
use super::lane::Lane;

/// IQ4_NL's sixteen values (`kvalues_iq4nl` of ggml), each plus 128.
const IQ4NL_PLUS_128: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// The fifth bits of 32 columns, as a word of the file has them, with those of columns 4c.. in bit c of the bytes.
#[inline(always)]
fn fifth_bits<L: Lane>(word: L) -> L {
    // Bit 4c + b goes to bit 8b + c. The number of a bit has five binary digits, which thus move by two places; each step
    // exchanges two of them, which is to exchange bits that lie `by` apart.
    let exchange = |w: L, by: u32, mask: u32| {
        let differ = w.xor(w.shr(by)).and(L::splat(mask));
        w.xor(differ).xor(differ.shl(by))
    };
    let w = exchange(word, 3, 0x0a0a_0a0a);
    let w = exchange(w, 6, 0x00cc_00cc);
    let w = exchange(w, 12, 0x0000_f0f0);
    exchange(w, 8, 0x0000_ff00)
}

/// f32 bits of the number with the other sign.
#[inline(always)]
fn negative<L: Lane>(bits: L) -> L {
    bits.xor(L::splat(1 << 31))
}

macro_rules! layout {
    ($name:ident, $file:literal, $bytes:literal, |$blocks:ident, $unit:ident| $pack:block) => {
        #[doc = concat!("`", stringify!($name), "`: ", $file, " bytes a block in the file.")]
        pub(crate) struct $name;
        impl Layout for $name {
            const COLS: usize = 32;
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

// The nibbles of the file lie as a unit has them: the first half of the columns low, the second half high.

// nibbles 64, scales 16
layout!(Q4_0, 18, 80, |blocks, unit| {
    put(unit, 0, blocks.four::<L>(2));
    put(unit, 64, [halves(blocks.word::<L>(0))[0]]);
});

// nibbles 64, scales 16, minima 16
layout!(Q4_1, 20, 96, |blocks, unit| {
    put(unit, 0, blocks.four::<L>(4));
    let [scale, minimum] = halves(blocks.word::<L>(0));
    put(unit, 64, [scale, negative(minimum)]);
});

// nibbles 64, fifth bits 16, scales 16
layout!(Q5_0, 22, 96, |blocks, unit| {
    put(unit, 0, blocks.four::<L>(6));
    put(unit, 64, [fifth_bits(blocks.word::<L>(2)), halves(blocks.word::<L>(0))[0]]);
});

// nibbles 64, fifth bits 16, scales 16, minima 16
layout!(Q5_1, 24, 112, |blocks, unit| {
    put(unit, 0, blocks.four::<L>(8));
    let [scale, minimum] = halves(blocks.word::<L>(0));
    put(unit, 64, [fifth_bits(blocks.word::<L>(4)), scale, negative(minimum)]);
});

// quants plus 128 as bytes 128, scales 16
layout!(Q8_0, 34, 144, |blocks, unit| {
    put(unit, 0, blocks.eight::<L>(2).map(|w| w.xor(L::splat(0x8080_8080))));
    put(unit, 128, [halves(blocks.word::<L>(0))[0]]);
});

// nibbles 64, scales 16
layout!(Iq4Nl, 18, 80, |blocks, unit| { Q4_0::pack::<L>(blocks, unit) });

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
