//! The packer: packed matrices of the file's bytes as they come in. Nothing is staged but the group of rows, or the block,
//! that a split of the input cut through.

use super::format::{Blocks, Layout, ROWS};
use super::{with_format, PackedMatrix};
use crate::error::{Error, Result};
use crate::kernels::dtype::DType;
use std::mem::MaybeUninit;

/// The lanes of a whole group.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
type Lanes = core::arch::wasm32::v128;
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
type Lanes = u32;

/// Groups of more bytes are not staged whole, so that a packer stays small.
const MAX_STAGED: usize = 1 << 20;

/// Makes a [`PackedMatrix`] of the file's bytes, which come in any split.
pub struct Packer {
    /// Its vector is empty until all is packed.
    matrix: PackedMatrix,
    /// Bytes of a row in the file.
    row_bytes: usize,
    /// Where the next block belongs.
    row: usize,
    unit: usize,
    /// The beginning of a group, or of a block, that came in part.
    staged: Vec<u8>,
}

impl Packer {
    /// Allocates the packed form.
    ///
    /// # Errors
    /// As [`PackedMatrix::packed_bytes`], and `out_of_memory`.
    pub fn new(dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        let mut matrix = PackedMatrix::unwritten(dtype, rows, cols)?;
        let row_bytes = cols / dtype.block_len() * dtype.block_bytes();
        let whole = if row_bytes > MAX_STAGED / ROWS { 0 } else { rows / ROWS };
        let from = whole * matrix.group_bytes();
        let room = matrix.room();
        // Rows that are packed one by one write their own lanes only.
        room[from..].fill(MaybeUninit::new(0));
        if cfg!(debug_assertions) {
            room[..from].fill(MaybeUninit::new(0xa5));
        }
        Ok(Self { matrix, row_bytes, row: 0, unit: 0, staged: Vec::new() })
    }

    /// Takes the next bytes of the tensor.
    ///
    /// # Errors
    /// `bad_model` where there are more bytes than the shape has.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let groups = self.groups();
            let (piece, pieces) = match groups {
                0 => (self.matrix.dtype.block_bytes(), self.blocks()),
                _ => (ROWS * self.row_bytes, groups),
            };
            if pieces == 0 {
                return Err(self.too_many());
            }
            let whole = (bytes.len() / piece).min(pieces);
            let at_once = self.staged.is_empty() && whole > 0;
            let take = if at_once { whole * piece } else { bytes.len().min(piece - self.staged.len()) };
            let (now, later) = bytes.split_at(take);
            bytes = later;
            if at_once {
                self.pack(now, groups > 0);
                continue;
            }
            self.staged.extend_from_slice(now);
            if self.staged.len() == piece {
                let mut staged = std::mem::take(&mut self.staged);
                self.pack(&staged, groups > 0);
                staged.clear();
                self.staged = staged;
            }
        }
        Ok(())
    }

    /// The matrix, once all its bytes are there.
    ///
    /// # Errors
    /// `bad_model` where bytes are missing.
    pub fn finish(mut self) -> Result<PackedMatrix> {
        if self.row < self.matrix.rows {
            let PackedMatrix { dtype, rows, cols, .. } = self.matrix;
            return Err(Error::bad_model(format!(
                "the bytes of a {} matrix of {rows} x {cols} end in row {}",
                dtype.name(),
                self.row
            )));
        }
        // SAFETY: whole groups write every byte of their units (`Layout::pack`), what lies behind them was zero from the start.
        unsafe { self.matrix.chunks.set_len(self.matrix.bytes.div_ceil(16)) };
        Ok(self.matrix.sealed())
    }

    /// Whole groups of rows that are still to come and are packed as such.
    fn groups(&self) -> usize {
        match self.row_bytes > MAX_STAGED / ROWS || self.unit > 0 || !self.row.is_multiple_of(ROWS) {
            true => 0,
            false => (self.matrix.rows - self.row) / ROWS,
        }
    }

    /// Blocks that are still to come.
    fn blocks(&self) -> usize {
        let units = self.matrix.cols / self.matrix.dtype.block_len();
        (self.matrix.rows - self.row) * units - self.unit
    }

    /// Packs whole groups, or blocks, of which not more come than the matrix has.
    fn pack(&mut self, pieces: &[u8], groups: bool) {
        match groups {
            true => {
                with_format!(self.matrix.dtype, F => self.pack_groups::<F>(pieces), self.pack_groups::<F>(pieces))
            }
            false => {
                with_format!(self.matrix.dtype, F => self.pack_blocks::<F>(pieces), self.pack_blocks::<F>(pieces))
            }
        }
    }

    fn pack_groups<F: Layout>(&mut self, groups: &[u8]) {
        let stride = self.row_bytes;
        let (first, bytes) = (self.row / ROWS, self.matrix.group_bytes());
        let places = self.matrix.room()[first * bytes..].chunks_exact_mut(bytes);
        for (group, place) in groups.chunks_exact(ROWS * stride).zip(places) {
            for (unit, at) in place.chunks_exact_mut(F::BYTES).zip((0..stride).step_by(F::FILE_BYTES)) {
                for row in (0..ROWS).step_by(size_of::<Lanes>() / 4) {
                    let blocks = &group[row * stride + at..];
                    let lanes = unit[F::LANE * row..].as_mut_ptr().cast();
                    // SAFETY: of each of the group's rows, `stride` bytes apart, there is a whole block; and the unit is whole.
                    unsafe { F::pack::<Lanes>(Blocks { at: blocks.as_ptr(), stride }, lanes) };
                }
            }
        }
        self.row += groups.len() / (ROWS * stride) * ROWS;
    }

    fn pack_blocks<F: Layout>(&mut self, blocks: &[u8]) {
        let (units, group_bytes) = (self.matrix.cols / F::COLS, self.matrix.group_bytes());
        let mut rest = blocks;
        while !rest.is_empty() && self.row < self.matrix.rows {
            let take = (rest.len() / F::FILE_BYTES).min(units - self.unit);
            let (now, later) = rest.split_at(take * F::FILE_BYTES);
            let (group, lane) = (self.row / ROWS, self.row % ROWS);
            let places = &mut self.matrix.room()[group * group_bytes + self.unit * F::BYTES..];
            for (block, unit) in now.chunks_exact(F::FILE_BYTES).zip(places.chunks_exact_mut(F::BYTES)) {
                let lanes = unit[F::LANE * lane..].as_mut_ptr().cast();
                // SAFETY: a whole block, and the row's lanes in a whole unit.
                unsafe { F::pack::<u32>(Blocks { at: block.as_ptr(), stride: 0 }, lanes) };
            }
            rest = later;
            self.unit += take;
            if self.unit == units {
                self.unit = 0;
                self.row += 1;
            }
        }
    }

    fn too_many(&self) -> Error {
        let PackedMatrix { dtype, rows, cols, .. } = self.matrix;
        Error::bad_model(format!("more bytes than a {} matrix of {rows} x {cols} has", dtype.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the bytes are: what four rows at a time write is what each row alone writes.
    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn groups_are_packed_as_their_rows_are() {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 56) as u8
        };
        for dtype in DType::ALL {
            let (rows, cols) = (ROWS * 40, 3 * dtype.block_len());
            let bytes: Vec<u8> = (0..rows * 3 * dtype.block_bytes()).map(|_| random()).collect();
            let mut packer = Packer::new(dtype, rows, cols).unwrap();
            assert_eq!(packer.groups(), 40);
            packer.push(&bytes).unwrap();
            let mut by_rows = Packer::new(dtype, rows, cols).unwrap();
            by_rows.room_of_zeros();
            by_rows.pack(&bytes, false);
            assert!(packer.finish().unwrap().data() == by_rows.finish().unwrap().data(), "{}", dtype.name());
        }
    }

    impl Packer {
        fn room_of_zeros(&mut self) {
            self.matrix.room().fill(MaybeUninit::new(0));
        }
    }
}
