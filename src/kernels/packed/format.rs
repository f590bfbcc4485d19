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
    /// Bytes of a row's lane.
    const LANE: usize = 4;

    /// Writes the blocks of one row (u32) or of the four rows (v128) into a unit: every byte of their lanes.
    ///
    /// # Safety
    /// `blocks` are readable; `unit` points to a unit (v128), or to row r's first lane in it (u32), that is writable.
    unsafe fn pack<L: Lane>(blocks: Blocks, unit: *mut u8);
}

/// File blocks (`FILE_BYTES`) of one row, or of the four rows of a group.
#[derive(Clone, Copy)]
pub(crate) struct Blocks {
    /// The first row's.
    pub at: *const u8,
    /// Bytes from one row's to the next one's.
    pub stride: usize,
}

impl Blocks {
    /// The words at `at`.
    ///
    /// # Safety
    /// As [`Lane::gather`].
    #[inline(always)]
    pub unsafe fn word<L: Lane>(self, at: usize) -> L {
        // SAFETY: as the caller promises.
        unsafe { L::gather(self.at.add(at), self.stride) }
    }

    /// The four words from `at` on.
    ///
    /// # Safety
    /// As [`Lane::gather_four`].
    #[inline(always)]
    pub unsafe fn four<L: Lane>(self, at: usize) -> [L; 4] {
        // SAFETY: as the caller promises.
        unsafe { L::gather_four(self.at.add(at), self.stride) }
    }

    /// The eight words from `at` on.
    ///
    /// # Safety
    /// As [`Lane::gather_four`], for 32 bytes.
    #[inline(always)]
    pub unsafe fn eight<L: Lane>(self, at: usize) -> [L; 8] {
        // SAFETY: as the caller promises.
        let ([a, b, c, d], [e, f, g, h]) = unsafe { (self.four(at), self.four(at + 16)) };
        [a, b, c, d, e, f, g, h]
    }
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

/// Bits of each byte: `words` shifted right and masked.
#[inline(always)]
pub(crate) fn bits_of<L: Lane, const N: usize>(words: [L; N], shift: u32, mask: u32) -> [L; N] {
    words.map(|w| w.shr(shift).and(L::splat(mask)))
}

/// The two halves in each word as f32 bits.
#[inline(always)]
pub(crate) fn halves<L: Lane>(word: L) -> [L; 2] {
    [word.and(L::splat(0xffff)), word.shr(16)].map(L::widen_half)
}

/// Writes vectors of lanes one after another, from the one at `at`.
///
/// # Safety
/// The lanes must be writable.
#[inline(always)]
pub(crate) unsafe fn put<L: Lane, const N: usize>(unit: *mut u8, at: usize, words: [L; N]) {
    for (i, w) in words.into_iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe { w.store(unit.add(at + 16 * i)) };
    }
}

/// Four bits (no others set) of 32 columns in 64 bytes: vector c has columns 4c.. in its low and 16 + 4c.. in its high nibbles.
///
/// # Safety
/// As [`put`].
#[inline(always)]
pub(crate) unsafe fn put_nibbles<L: Lane>(unit: *mut u8, at: usize, w: [L; 8]) {
    // SAFETY: as the caller promises.
    unsafe { put(unit, at, [0, 1, 2, 3].map(|c| w[c].or(w[c + 4].shl(4)))) };
}

/// Two bits (no others set) of 32 columns in 32 bytes: vector p has columns 16p + 4c.. in its bits 2c and 2c + 1.
///
/// # Safety
/// As [`put`].
#[inline(always)]
pub(crate) unsafe fn put_pairs<L: Lane>(unit: *mut u8, at: usize, w: [L; 8]) {
    let joined = [0, 4].map(|p| w[p].or(w[p + 1].shl(2)).or(w[p + 2].shl(4)).or(w[p + 3].shl(6)));
    // SAFETY: as the caller promises.
    unsafe { put(unit, at, joined) };
}

/// One bit (no others set) of 32 columns in 16 bytes: columns 4c.. in bit c.
///
/// # Safety
/// As [`put`].
#[inline(always)]
pub(crate) unsafe fn put_bits<L: Lane>(unit: *mut u8, at: usize, w: [L; 8]) {
    let joined = (1..8).fold(w[0], |all, c| all.or(w[c as usize].shl(c)));
    // SAFETY: as the caller promises.
    unsafe { put(unit, at, [joined]) };
}

/// Four words of six-bit bytes in 48 bytes (12 a row): three as they are, the fourth in the upper bits of the three.
///
/// # Safety
/// As [`put`].
#[inline(always)]
pub(crate) unsafe fn put_sixes<L: Lane>(unit: *mut u8, at: usize, w: [L; 4]) {
    let [a, b, c, d] = w;
    let [low, middle, high] = [0, 2, 4].map(|shift| d.shr(shift).and(L::splat(0x0303_0303)).shl(6));
    // SAFETY: as the caller promises.
    unsafe { put(unit, at, [a.or(low), b.or(middle), c.or(high)]) };
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
