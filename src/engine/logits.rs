//! A `logits` request: rows of logits, slice by slice and layer by layer, with a cache of its own.

use crate::error::{Error, Result};
use crate::kv_cache::KvCache;
use crate::model::{Advance, Model, Pass, Want};

/// Bytes that a `logits` request may give at most; a page can hold about twice that in one array.
const MAX_LOGITS_BYTES: u64 = 1 << 30;
/// Tokens of a `logits` slice: each row is V floats.
const LOGITS_SLICE: usize = 8;

/// A computation of logits under way.
pub struct LogitsJob {
    ids: Vec<u32>,
    all: bool,
    at: usize,
    cache: KvCache,
    pass: Option<(Pass, usize)>,
}

impl LogitsJob {
    /// As [`super::Engine::logits`].
    pub(super) fn new(
        model: &Model,
        cache: KvCache,
        ids: Vec<u32>,
        all: bool,
        context_length: usize,
    ) -> Result<Self> {
        if ids.is_empty() {
            return Err(Error::invalid_request("logits needs at least one token id"));
        }
        if ids.len() > context_length {
            let message = format!("{} token ids, the context holds {context_length}", ids.len());
            return Err(Error::context_overflow(message));
        }
        let vocab = model.config.vocab_size;
        let rows = if all { ids.len() } else { 1 };
        let bytes = rows as u64 * vocab as u64 * 4;
        if bytes > MAX_LOGITS_BYTES {
            return Err(Error::too_large(format!(
                "{rows} rows of {vocab} logits are {bytes} bytes, at most {MAX_LOGITS_BYTES} are given at once"
            )));
        }
        Ok(Self { ids, all, at: 0, cache, pass: None })
    }

    /// Positions whose logits come out.
    pub fn rows(&self) -> usize {
        if self.all {
            self.ids.len()
        } else {
            1
        }
    }

    /// Whether all positions are through.
    pub fn is_done(&self) -> bool {
        self.at == self.ids.len()
    }

    pub(super) fn step(&mut self, model: &Model) -> Result<Option<(usize, Vec<f32>)>> {
        let (mut pass, n) = match self.pass.take() {
            Some(under_way) => under_way,
            None => {
                let most = LOGITS_SLICE.min(self.cache.most_tokens());
                let slice = &self.ids[self.at..self.ids.len().min(self.at + most)];
                let last = self.at + slice.len() == self.ids.len();
                let want = match (self.all, last) {
                    (true, _) => Want::All,
                    (false, true) => Want::Last,
                    (false, false) => Want::Nothing,
                };
                (model.start(slice, &mut self.cache, want)?, slice.len())
            }
        };
        match model.advance(&mut pass, &mut self.cache)? {
            Advance::Layer => {
                self.pass = Some((pass, n));
                Ok(None)
            }
            Advance::Done(logits) => {
                let first = if self.all { self.at } else { 0 };
                self.at += n;
                Ok(logits.map(|rows| (first, rows)))
            }
        }
    }
}
