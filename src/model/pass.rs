//! Forward passes: one sequence's tokens, or several sequences' at different positions, a layer at a time.

use super::{contiguous, Input, Model, Sequences};
use crate::error::{Error, Result};
use crate::kernels::parallel::team;
use crate::kv_cache::KvCache;
use crate::metrics::{book_pass, ms_since, timed};
use candle_core::{Device, Tensor};
use web_time::Instant;

/// One sequence's part of a pass: the tokens that follow what its cache holds.
pub struct Span<'a> {
    /// Token ids in order.
    pub tokens: &'a [u32],
    /// Keys and values of what precedes them.
    pub cache: &'a mut KvCache,
    /// Whose logits are wanted.
    pub want: Want,
}

/// Which logits a sequence's part of a pass gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None: the pass only fills the cache.
    Nothing,
    /// The last position's, (1, V).
    Last,
    /// All positions', (T, V).
    All,
}

/// A forward pass under way, over one sequence or several at different positions: the weights are read once for all.
pub struct Pass {
    xs: Tensor, // (T, C)
    /// Each sequence's number of tokens.
    spans: Vec<(usize, Want)>,
    layer: usize,
}

impl Pass {
    /// Rows of all sequences, `T`.
    pub fn rows(&self) -> usize {
        self.spans.iter().map(|(tokens, _)| tokens).sum()
    }
}

/// What [`Model::advance`] came to.
pub enum Advance {
    /// Layers are left.
    Layer,
    /// The caches are filled and committed; logits as wanted, row by row, one sequence after another.
    Done(Option<Vec<f32>>),
}

impl Model {
    /// Starts a pass of `tokens` at the end of `cache` and makes room for them.
    ///
    /// # Errors
    /// As [`Model::start_all`].
    pub fn start(&self, tokens: &[u32], cache: &mut KvCache, want: Want) -> Result<Pass> {
        self.start_all(&mut [Span { tokens, cache, want }])
    }

    /// Starts a pass of several sequences and makes room for each in its cache.
    ///
    /// # Errors
    /// `invalid_request` where a sequence has no tokens or an id is not below `vocab_size`; `out_of_memory`; `integrity` where
    /// rows of the embedding are still in a file and damaged there.
    pub fn start_all(&self, spans: &mut [Span]) -> Result<Pass> {
        let (vocab, width) = (self.config.vocab_size, self.config.hidden_size);
        if spans.is_empty() || spans.iter().any(|span| span.tokens.is_empty()) {
            return Err(Error::invalid_request("no tokens; at least one is needed"));
        }
        let ids = || spans.iter().flat_map(|span| span.tokens);
        if let Some(id) = ids().find(|id| **id as usize >= vocab) {
            return Err(Error::invalid_request(format!(
                "token id {id} is not below the vocabulary size {vocab}"
            )));
        }
        let rows = ids().count();
        let mut xs = vec![0.0; rows * width];
        timed("embedding", 0, 0, || {
            let rows = xs.chunks_exact_mut(width);
            ids().zip(rows).try_for_each(|(id, row)| self.embed_tokens.row(*id as usize, row))
        })?;
        let xs = Tensor::from_vec(xs, (rows, width), &Device::Cpu)?; // (T, C)
        spans.iter_mut().try_for_each(|span| span.cache.reserve(span.tokens.len()))?;
        let spans = spans.iter().map(|span| (span.tokens.len(), span.want)).collect();
        Ok(Pass { xs, spans, layer: 0 })
    }

    /// Runs the next layer; after the last one the head too, and commits the cache.
    pub fn advance(&self, pass: &mut Pass, cache: &mut KvCache) -> Result<Advance> {
        self.advance_all(pass, &mut [cache])
    }

    /// As [`Model::advance`], with the caches of all sequences in the order in which the pass was started.
    pub fn advance_all(&self, pass: &mut Pass, caches: &mut [&mut KvCache]) -> Result<Advance> {
        assert_eq!(pass.spans.len(), caches.len(), "a cache for each sequence");
        team(|| self.advance_by_team(pass, caches))
    }

    fn advance_by_team(&self, pass: &mut Pass, caches: &mut [&mut KvCache]) -> Result<Advance> {
        let begun = Instant::now();
        if let Some(layer) = self.layers.get(pass.layer) {
            let sequences = Sequences { spans: &pass.spans, caches: &mut *caches };
            pass.xs = layer.forward(&pass.xs, pass.layer, &self.rope, sequences)?; // (T, C)
            pass.layer += 1;
        }
        let done = pass.layer >= self.layers.len();
        let logits = if done { self.wanted_logits(pass)? } else { None };
        if done {
            for ((tokens, _), cache) in pass.spans.iter().zip(caches.iter_mut()) {
                cache.commit(*tokens);
            }
        }
        book_pass(if done { pass.rows() } else { 0 }, ms_since(begun));
        Ok(if done { Advance::Done(logits) } else { Advance::Layer })
    }

    /// The head's rows for what the sequences want, (R, V); `None` where that is nothing.
    fn wanted_logits(&self, pass: &Pass) -> Result<Option<Vec<f32>>> {
        let mut end = 0;
        let mut wanted = Vec::new();
        for (tokens, want) in &pass.spans {
            end += tokens;
            match want {
                Want::Nothing => {}
                Want::Last => wanted.push(pass.xs.narrow(0, end - 1, 1)?),
                Want::All => wanted.push(pass.xs.narrow(0, end - tokens, *tokens)?),
            }
        }
        match &wanted[..] {
            [] => Ok(None),
            [one] => self.head(one).map(Some),
            _ => self.head(&Tensor::cat(&wanted, 0)?).map(Some),
        }
    }

    /// A whole pass at once: the wanted logits of `tokens` after what `cache` holds.
    pub fn forward(&self, tokens: &[u32], cache: &mut KvCache, want: Want) -> Result<Vec<f32>> {
        let mut pass = self.start(tokens, cache, want)?;
        loop {
            if let Advance::Done(logits) = self.advance(&mut pass, cache)? {
                return Ok(logits.unwrap_or_default());
            }
        }
    }

    fn head(&self, xs: &Tensor) -> Result<Vec<f32>> {
        let logits = self.lm_head.forward(xs, Input::Normed(&self.norm))?; // (T, V)
        let (storage, layout) = logits.storage_and_layout();
        match &*storage {
            candle_core::Storage::Cpu(cpu) => Ok(contiguous(cpu, layout)?.to_vec()),
            _ => Err(Error::numeric("logits are not in CPU memory")),
        }
    }
}
