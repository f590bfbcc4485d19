//! The table that turns token ids into vectors. A prompt needs few of its rows, so those of an image may stay in the file
//! until they are asked for.

use crate::error::Result;
use crate::kernels::{PackedMatrix, Unfilled};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What threads may hand on to each other; in a browser a file belongs to its worker, and the model with it.
#[cfg(not(target_arch = "wasm32"))]
pub use std::marker::Send as MaybeSend;

/// Anything: a file belongs to its worker, and the model with it.
#[cfg(target_arch = "wasm32")]
pub trait MaybeSend {}
#[cfg(target_arch = "wasm32")]
impl<T> MaybeSend for T {}

/// Where the blocks of a table come from.
pub trait Blocks: MaybeSend {
    /// Fills one block.
    ///
    /// # Errors
    /// `integrity` where it is damaged or cannot be read.
    fn fill(&mut self, table: &mut Unfilled, block: usize) -> Result<()>;
}

/// (V, C), read row by row in its quantised form.
pub struct Embedding(State);

enum State {
    Whole(Arc<PackedMatrix>),
    Coming(Mutex<Coming>),
}

struct Coming {
    table: Unfilled,
    blocks: Box<dyn Blocks>,
}

impl Embedding {
    /// A table that is there, and may be the head too.
    pub fn whole(matrix: Arc<PackedMatrix>) -> Self {
        Self(State::Whole(matrix))
    }

    /// A table of which a block is read when one of its rows is wanted, or by [`Embedding::read_on`].
    pub fn coming(table: Unfilled, blocks: Box<dyn Blocks>) -> Self {
        Self(State::Coming(Mutex::new(Coming { table, blocks })))
    }

    /// The vector of an id. Panics where there is no such row, or `out` has another length.
    ///
    /// # Errors
    /// As [`Blocks::fill`].
    pub fn row(&self, id: usize, out: &mut [f32]) -> Result<()> {
        match &self.0 {
            State::Whole(matrix) => matrix.dequantize_row(id, out),
            State::Coming(coming) => {
                let Coming { table, blocks } = &mut *locked(coming);
                for block in table.blocks_of(id) {
                    if !table.has(block) {
                        blocks.fill(table, block)?;
                    }
                }
                table.dequantize_row(id, out);
            }
        }
        Ok(())
    }

    /// Reads the next block that is not there yet, and gives up where they come from with the last; `false`: all are there.
    ///
    /// # Errors
    /// As [`Blocks::fill`].
    pub fn read_on(&mut self) -> Result<bool> {
        let State::Coming(coming) = &mut self.0 else { return Ok(false) };
        let Coming { table, blocks } = coming.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = table.missing() {
            blocks.fill(table, block)?;
        }
        if let Some(whole) = table.take() {
            self.0 = State::Whole(Arc::new(whole));
            return Ok(false);
        }
        Ok(true)
    }

    /// The table, where all of it is there.
    pub fn matrix(&self) -> Option<&PackedMatrix> {
        match &self.0 {
            State::Whole(matrix) => Some(matrix),
            State::Coming(_) => None,
        }
    }

    /// Rows (V) and columns (C).
    pub fn dims(&self) -> (usize, usize) {
        match &self.0 {
            State::Whole(matrix) => (matrix.rows(), matrix.cols()),
            State::Coming(coming) => locked(coming).table.dims(),
        }
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            State::Whole(matrix) => matrix.bytes(),
            State::Coming(coming) => locked(coming).table.bytes(),
        }
    }
}

/// A block is there or is not, whatever a panic left behind.
fn locked(coming: &Mutex<Coming>) -> MutexGuard<'_, Coming> {
    coming.lock().unwrap_or_else(PoisonError::into_inner)
}
