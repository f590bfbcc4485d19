//! Weight matrices in the layout that the kernels read. Packing is lossless: every weight keeps the exact real number that
//! the file gives it. Rows are interleaved by four (`packed/format.rs`), the last group padded with zeros.

pub(crate) mod float;
pub(crate) mod format;
pub(crate) mod kquants;
pub(crate) mod lane;
pub(crate) mod legacy;
mod packer;

use super::dtype::DType;
use crate::error::{Error, Result};
use format::{Float, Layout, Quant, ROWS};
pub use packer::Packer;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Version of the packed layouts of all types, for bytes that are kept: another number whenever one of them changes.
pub const LAYOUT: u32 = 1;

/// Evaluates `$quant` or `$float` with `$F` standing for the format of `$dtype`.
macro_rules! with_format {
    ($dtype:expr, $F:ident => $quant:expr, $float:expr) => {{
        use $crate::kernels::dtype::DType;
        use $crate::kernels::packed::{float, kquants, legacy};
        macro_rules! quant {
            ($format:path) => {{
                type $F = $format;
                $quant
            }};
        }
        macro_rules! float {
            ($format:path) => {{
                #[allow(dead_code)]
                type $F = $format;
                $float
            }};
        }
        match $dtype {
            DType::F32 => float!(float::F32),
            DType::F16 => float!(float::F16),
            DType::BF16 => float!(float::Bf16),
            DType::Q4_0 => quant!(legacy::Q4_0),
            DType::Q4_1 => quant!(legacy::Q4_1),
            DType::Q5_0 => quant!(legacy::Q5_0),
            DType::Q5_1 => quant!(legacy::Q5_1),
            DType::Q8_0 => quant!(legacy::Q8_0),
            DType::Q2K => quant!(kquants::Q2K),
            DType::Q3K => quant!(kquants::Q3K),
            DType::Q4K => quant!(kquants::Q4K),
            DType::Q5K => quant!(kquants::Q5K),
            DType::Q6K => quant!(kquants::Q6K),
            DType::IQ4NL => quant!(legacy::Iq4Nl),
        }
    }};
}
pub(crate) use with_format;

/// Sixteen aligned bytes, so that a vector of them is aligned.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Chunk([u8; 16]);

/// A matrix (rows, cols) of one type in the kernels' layout. Immutable.
pub struct PackedMatrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: usize,
    chunks: Vec<Chunk>,
    specials: bool,
}

/// A matrix with memory of its own that is written block by block, in any order. Rows can be read as soon as they are there.
pub struct Unfilled {
    /// Its vector is empty until the last block was written.
    matrix: PackedMatrix,
    block: usize,
    written: Vec<bool>,
}

impl Unfilled {
    /// Takes the memory, to be written in blocks of so many bytes; the last one may be shorter.
    ///
    /// # Errors
    /// As [`Packer::new`].
    pub fn new(dtype: DType, rows: usize, cols: usize, block: usize) -> Result<Self> {
        let matrix = PackedMatrix::unwritten(dtype, rows, cols)?;
        let written = vec![false; matrix.bytes.div_ceil(block)];
        Ok(Self { matrix, block, written })
    }

    /// The addresses of the memory.
    pub fn addresses(&mut self) -> Range<usize> {
        let room = self.matrix.room().as_ptr_range();
        room.start as usize..room.end as usize
    }

    /// Rows and columns.
    pub fn dims(&self) -> (usize, usize) {
        (self.matrix.rows, self.matrix.cols)
    }

    /// Bytes of memory it holds.
    pub fn bytes(&self) -> usize {
        16 * self.matrix.bytes.div_ceil(16)
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.written.len()
    }

    /// Whether a block was written.
    pub fn has(&self, block: usize) -> bool {
        self.written[block]
    }

    /// The first block that was not.
    pub fn missing(&self) -> Option<usize> {
        self.written.iter().position(|written| !written)
    }

    /// The blocks that a row lies in.
    pub fn blocks_of(&self, row: usize) -> Range<usize> {
        let bytes = self.matrix.group(row);
        bytes.start / self.block..bytes.end.div_ceil(self.block)
    }

    /// Writes a block: `get` fills its memory, which begins at that byte of the matrix, and gives it back as bytes.
    ///
    /// # Errors
    /// What `get` returns: the block is not there then. Panics where `get` gives back other memory.
    pub fn fill(
        &mut self,
        block: usize,
        get: impl for<'a> FnOnce(usize, &'a mut [MaybeUninit<u8>]) -> Result<&'a [u8]>,
    ) -> Result<()> {
        let (bytes, at) = (self.matrix.bytes, block * self.block);
        let end = bytes.min(at + self.block);
        let (wanted, padding) = self.matrix.room().split_at_mut(bytes);
        let part = &mut wanted[at..end];
        let (start, len) = (part.as_ptr().cast::<u8>(), part.len());
        let filled = get(at, part)?;
        assert!(filled.as_ptr() == start && filled.len() == len, "other memory was filled");
        padding.fill(MaybeUninit::new(0));
        self.written[block] = true;
        Ok(())
    }

    /// As [`PackedMatrix::dequantize_row`]. Panics where a block of the row was not written.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(self.blocks_of(row).all(|block| self.has(block)), "row {row} is not there");
        let bytes = self.matrix.group(row);
        let start = self.matrix.chunks.as_ptr().cast::<u8>();
        // SAFETY: the bytes lie in the vector's memory, and in blocks that `fill` saw written.
        let group = unsafe { std::slice::from_raw_parts(start.add(bytes.start), bytes.len()) };
        self.matrix.dequantize_row_of(group, row, out);
    }

    /// The matrix, once every block was written; what stays has no memory and no rows.
    pub fn take(&mut self) -> Option<PackedMatrix> {
        if self.missing().is_some() {
            return None;
        }
        let none = PackedMatrix {
            dtype: self.matrix.dtype,
            rows: 0,
            cols: 0,
            bytes: 0,
            chunks: Vec::new(),
            specials: false,
        };
        let mut matrix = std::mem::replace(&mut self.matrix, none);
        // SAFETY: every byte was written: `fill` saw all blocks given back as bytes, and the padding is zero.
        unsafe { matrix.chunks.set_len(matrix.bytes.div_ceil(16)) };
        Some(matrix.sealed())
    }
}

impl PackedMatrix {
    /// Bytes of the packed form of a matrix.
    ///
    /// # Errors
    /// `bad_model` where a side is zero or `cols` is no whole number of blocks, `too_large` where one allocation
    /// cannot hold it.
    pub fn packed_bytes(dtype: DType, rows: usize, cols: usize) -> Result<usize> {
        if rows == 0 || cols == 0 || !cols.is_multiple_of(dtype.block_len()) {
            return Err(Error::bad_model(format!(
                "a {} matrix needs rows and a multiple of {} columns, found {rows} x {cols}",
                dtype.name(),
                dtype.block_len()
            )));
        }
        let groups = rows.div_ceil(ROWS) as u64;
        let units = (cols / dtype.block_len()) as u64;
        let unit = with_format!(dtype, F => F::BYTES, F::BYTES) as u64;
        groups
            .checked_mul(units)
            .and_then(|n| n.checked_mul(unit))
            .filter(|n| *n <= isize::MAX as u64 - 15)
            .map(|n| n as usize)
            .ok_or_else(|| {
                Error::too_large(format!(
                    "a {} matrix of {rows} x {cols} is too large to allocate",
                    dtype.name()
                ))
            })
    }

    /// A matrix whose packed bytes (as [`PackedMatrix::data`] gave them earlier) `fill` writes in place.
    ///
    /// # Errors
    /// As [`Packer::new`], and what `fill` returns.
    pub fn from_packed(
        dtype: DType,
        rows: usize,
        cols: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Self> {
        let mut matrix = Self::zeros(dtype, rows, cols)?;
        fill(matrix.data_mut())?;
        Ok(matrix.sealed())
    }

    /// Looks for half floats that are infinite or NaN: the kernels are faster where there are none.
    fn sealed(mut self) -> Self {
        let special = |h: &[u8]| h[1] & 0x7c == 0x7c;
        self.specials = self.dtype == DType::F16 && self.data().chunks_exact(2).any(special);
        self
    }

    /// Whether half floats among the weights are infinite or NaN.
    #[allow(dead_code)] // only SIMD has to know
    pub(crate) fn has_specials(&self) -> bool {
        self.specials
    }

    fn zeros(dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        let mut matrix = Self::unwritten(dtype, rows, cols)?;
        matrix.chunks.resize(matrix.bytes.div_ceil(16), Chunk([0; 16]));
        Ok(matrix)
    }

    /// Allocated, with no bytes in it yet.
    fn unwritten(dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        let bytes = Self::packed_bytes(dtype, rows, cols)?;
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(bytes.div_ceil(16)).map_err(|_| {
            Error::out_of_memory(format!("{bytes} bytes for a {} matrix of {rows} x {cols}", dtype.name()))
        })?;
        Ok(Self { dtype, rows, cols, bytes, chunks, specials: false })
    }

    /// The memory of one that is not written yet, whole sixteen bytes.
    fn room(&mut self) -> &mut [MaybeUninit<u8>] {
        let bytes = 16 * self.bytes.div_ceil(16);
        let room = self.chunks.spare_capacity_mut();
        debug_assert!(bytes <= 16 * room.len());
        // SAFETY: a `Chunk` is sixteen bytes that may hold anything, and there is room for as many of them as `bytes` need.
        unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), bytes) }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows (output features).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (input features).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of memory it holds.
    pub fn bytes(&self) -> usize {
        16 * self.chunks.len()
    }

    /// The packed bytes.
    pub fn data(&self) -> &[u8] {
        debug_assert!(self.bytes <= 16 * self.chunks.len());
        // SAFETY: `Chunk` is sixteen plain bytes, and the vector has at least `bytes` of them.
        unsafe { std::slice::from_raw_parts(self.chunks.as_ptr().cast(), self.bytes) }
    }

    fn data_mut(&mut self) -> &mut [u8] {
        debug_assert!(self.bytes <= 16 * self.chunks.len());
        // SAFETY: as in `data`; every byte pattern is a valid `Chunk`.
        unsafe { std::slice::from_raw_parts_mut(self.chunks.as_mut_ptr().cast(), self.bytes) }
    }

    /// The values of one row, as an embedding needs them. Panics where `row` or `out`'s length does not fit.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        self.dequantize_row_of(&self.data()[self.group(row)], row, out);
    }

    /// The bytes of the group of rows that a row is in.
    fn group(&self, row: usize) -> Range<usize> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let bytes = self.group_bytes();
        let at = row / ROWS * bytes;
        at..at + bytes
    }

    fn group_bytes(&self) -> usize {
        self.bytes / self.rows.div_ceil(ROWS)
    }

    /// As [`PackedMatrix::dequantize_row`], of the bytes of its group.
    fn dequantize_row_of(&self, group: &[u8], row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a row has {} values", self.cols);
        let lane = row % ROWS;
        with_format!(self.dtype, F => dequantize_quants::<F>(group, lane, out), dequantize_floats::<F>(group, lane, out));
    }
}

fn dequantize_floats<F: Float>(group: &[u8], lane: usize, out: &mut [f32]) {
    for (unit, o) in group.chunks_exact(F::BYTES).zip(out) {
        *o = F::decode(&unit[lane * F::FILE_BYTES..][..F::FILE_BYTES]);
    }
}

fn dequantize_quants<F: Quant>(group: &[u8], lane: usize, out: &mut [f32]) {
    let offset = F::OFFSET_BITS.map_or(0, |bits| 1 << bits);
    for (unit, out) in group.chunks_exact(F::BYTES).zip(out.chunks_exact_mut(F::COLS)) {
        let first = unit[4 * lane..].as_ptr();
        let (mut scales, mut minima) = ([0.0; 16], [0.0; 16]);
        // SAFETY: `first` is the lane's first word in a whole unit.
        unsafe { F::scales::<u32>(first, &mut scales, &mut minima) };
        for (block, out) in out.chunks_exact_mut(32).enumerate() {
            // SAFETY: as above; a unit has COLS / 32 blocks.
            let words = unsafe { F::unpack::<u32>(first, block) };
            let quants = words.iter().flat_map(|w| w.to_le_bytes());
            for (i, (o, q)) in out.iter_mut().zip(quants).enumerate() {
                let sub = if F::HALVES { 2 * block + i / 16 } else { block };
                let value = scales[sub] * (i32::from(q) - offset) as f32;
                *o = if F::MINIMA { value - minima[sub] } else { value };
            }
        }
    }
}
