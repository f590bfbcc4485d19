//! What every packed format defines, and the bit planes they share.
//!
//! Rows are interleaved by four. A *unit* holds one file block (32 or 256 columns) of each row of a group; in it,
//! every 16 bytes are four lanes of 4 bytes, lane r belonging to row r. The quants of 32 columns unpack to eight such
//! vectors of unsigned bytes: byte i of vector c is column 4c + i. A group's units follow each other in column order.

use super::lane::Lane;

/// Rows of a group.
pub(crate) const ROWS: usize = 4;

/// How a type's blocks are laid out, and how one is packed.
pub(crate) trait Layout {
    /// Columns of a unit: the file's block length.
    const COLS: usize;
    /// Bytes of a block in the file.
    const FILE_BYTES: usize;
    /// Bytes of a unit (four rows).
    const BYTES: usize;

    /// Writes a file block (`FILE_BYTES`) into row `row`'s lanes of a unit (`BYTES`, zeros in these lanes before).
    fn pack(block: &[u8], unit: &mut [u8], row: usize);
}

/// A type of integer quants: `value = scale * (quant - OFFSET) - minimum`.
pub(crate) trait Quant: Layout {
    /// log2 of the offset that is taken off the unsigned quants; `None`: nothing is taken off.
    const OFFSET_BITS: Option<u32>;
    /// Whether the sub-blocks have minima.
    const MINIMA: bool = false;
    /// Whether there is a scale for every 16 columns (else for every 32).
    const HALVES: bool = false;
    /// Whether the quants fill eight bits (else they are below 128). Only relaxed SIMD has to know.
    #[allow(dead_code)]
    const WIDE: bool = false;

    /// The scales of a unit's sub-blocks in column order, and the minima where the type has them.
    ///
    /// # Safety
    /// `unit` points to a unit (v128), or to row r's first lane in it (u32).
    unsafe fn scales<L: Lane>(unit: *const u8, scales: &mut [L::Float; 16], minima: &mut [L::Float; 16]);

    /// The quants of columns `32 * block ..` of the unit.
    ///
    /// # Safety
    /// As [`Quant::scales`]; and `block < COLS / 32`.
    unsafe fn unpack<L: Lane>(unit: *const u8, block: usize) -> [L; 8];
}

/// A type of float weights.
pub(crate) trait Float: Layout {
    /// The value of an element's bytes (`FILE_BYTES` of them).
    fn decode(bytes: &[u8]) -> f32;

    /// The four elements of a unit; without `SPECIALS` none may be infinite or NaN.
    ///
    /// # Safety
    /// `unit` points to a unit.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    unsafe fn load<const SPECIALS: bool>(unit: *const u8) -> core::arch::wasm32::v128;
}

/// The little-endian word at `at`.
#[inline(always)]
pub(crate) fn word_at(block: &[u8], at: usize) -> u32 {
    let b = &block[at..at + 4];
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// The eight words at `at`, each shifted right and masked: bits of 32 columns.
#[inline(always)]
pub(crate) fn words_at(block: &[u8], at: usize, shift: usize, mask: u32) -> [u32; 8] {
    let bytes = &block[at..at + 32];
    [0, 4, 8, 12, 16, 20, 24, 28].map(|i| word_at(bytes, i) >> shift & mask)
}

/// Writes row `row`'s lane of the 16 bytes at `at`.
#[inline(always)]
pub(crate) fn put(unit: &mut [u8], at: usize, row: usize, word: u32) {
    unit[at + 4 * row..][..4].copy_from_slice(&word.to_le_bytes());
}

/// The low four bits of 32 columns in 64 bytes: vector c has columns 4c.. in its low and 16 + 4c.. in its high nibbles.
#[inline(always)]
pub(crate) fn put_nibbles(unit: &mut [u8], at: usize, row: usize, w: &[u32; 8]) {
    for c in 0..4 {
        put(unit, at + 16 * c, row, w[c] & 0x0f0f_0f0f | (w[c + 4] & 0x0f0f_0f0f) << 4);
    }
}

/// Bits `shift..shift + 2` of 32 columns in 32 bytes: vector p has columns 16p + 4c.. in its bits 2c and 2c + 1.
#[inline(always)]
pub(crate) fn put_pairs(unit: &mut [u8], at: usize, row: usize, w: &[u32; 8], shift: u32) {
    for p in 0..2 {
        let word = (0..4).fold(0, |acc, c| acc | (w[4 * p + c] >> shift & 0x0303_0303) << (2 * c));
        put(unit, at + 16 * p, row, word);
    }
}

/// Bit `shift` of 32 columns in 16 bytes: columns 4c.. in bit c.
#[inline(always)]
pub(crate) fn put_bits(unit: &mut [u8], at: usize, row: usize, w: &[u32; 8], shift: u32) {
    put(unit, at, row, (0..8).fold(0, |acc, c| acc | (w[c] >> shift & 0x0101_0101) << c));
}

/// Four words of six-bit bytes in 48 bytes (12 a row): three as they are, the fourth in the upper bits of the three.
#[inline(always)]
pub(crate) fn put_sixes(unit: &mut [u8], at: usize, row: usize, w: &[u32; 4]) {
    for i in 0..3 {
        put(unit, at + 16 * i, row, w[i] | (w[3] >> (2 * i) & 0x0303_0303) << 6);
    }
}

/// What [`put_sixes`] wrote.
///
/// # Safety
/// 48 bytes at `at` must be readable (36 for u32).
#[inline(always)]
pub(crate) unsafe fn sixes<L: Lane>(at: *const u8) -> [L; 4] {
    // SAFETY: inside the bytes that the caller promises.
    let [a, b, c] = [0, 16, 32].map(|i| unsafe { L::load(at.add(i)) });
    let d = a.shr(6).and(L::splat(0x0303_0303));
    let d = d.or(b.shr(4).and(L::splat(0x0c0c_0c0c)));
    let d = d.or(c.shr(2).and(L::splat(0x3030_3030)));
    let mask = L::splat(0x3f3f_3f3f);
    [a.and(mask), b.and(mask), c.and(mask), d]
}

/// What [`put_nibbles`] wrote.
///
/// # Safety
/// 64 bytes at `at` must be readable (52 for u32).
#[inline(always)]
pub(crate) unsafe fn nibbles<L: Lane>(at: *const u8) -> [L; 8] {
    let low = L::splat(0x0f0f_0f0f);
    let mut out = [low; 8];
    for c in 0..4 {
        // SAFETY: inside the bytes that the caller promises.
        let q = unsafe { L::load(at.add(16 * c)) };
        out[c] = q.and(low);
        out[c + 4] = q.shr(4).and(low);
    }
    out
}

/// Adds what [`put_pairs`] wrote to `out`, at bits 2 c' = `shift`.. of each byte.
///
/// # Safety
/// 32 bytes at `at` must be readable (20 for u32).
#[inline(always)]
pub(crate) unsafe fn or_pairs<L: Lane>(at: *const u8, out: &mut [L; 8], shift: u32) {
    let mask = L::splat(0x0303_0303 << shift);
    for p in 0..2 {
        // SAFETY: inside the bytes that the caller promises.
        let q = unsafe { L::load(at.add(16 * p)) };
        for c in 0..4u32 {
            let moved = if 2 * c <= shift { q.shl(shift - 2 * c) } else { q.shr(2 * c - shift) };
            let o = &mut out[4 * p + c as usize];
            *o = o.or(moved.and(mask));
        }
    }
}

/// Adds what [`put_bits`] wrote to `out`, at bit `shift` of each byte.
///
/// # Safety
/// 16 bytes at `at` must be readable (4 for u32).
#[inline(always)]
pub(crate) unsafe fn or_bits<L: Lane>(at: *const u8, out: &mut [L; 8], shift: u32) {
    let mask = L::splat(0x0101_0101 << shift);
    // SAFETY: inside the bytes that the caller promises.
    let q = unsafe { L::load(at) };
    for (c, o) in (0u32..).zip(out) {
        let moved = if c <= shift { q.shl(shift - c) } else { q.shr(c - shift) };
        *o = o.or(moved.and(mask));
    }
}

/// The f16 at `at` of a block, as f32 bits.
#[inline(always)]
pub(crate) fn f16_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
