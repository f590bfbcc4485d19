//! One turn: prefill in slices, then token after token, as a state machine that its caller steps. A step returns after
//! a bounded time (a layer at a time if need be), so the worker can answer messages in between.

use crate::error::{Error, Result};
use crate::kernels::parallel::team;
use crate::metrics::ms_since;
use crate::model::{Advance, Model, Pass, Want};
use crate::sampler::{Sampler, SamplingParams};
use crate::session::Session;
use crate::stream::{Parts, ReasoningSplitter, StopMatcher};
use crate::tokenizer::{StreamDecoder, Tokenizer};
use std::ops::Range;
use web_time::Instant;

/// A step gives control back after this long, ms.
const STEP_MS: f64 = 40.0;
/// One layer of a slice should not take longer than this, ms; the slice adapts to it. A slow machine stays below 100.
const LAYER_MS: f64 = 80.0;
/// Tokens that a slice has at least and at most: whole tiles of the matrix kernels.
const SLICE: Range<usize> = 8..128;
/// Operations of a layer in an engine's first slice, before its speed is known: 100 ms at a speed of 16 GOP/s.
const FIRST_LAYER_OPS: u64 = 1_600_000_000;

/// What a turn is to do.
#[derive(Debug, Clone)]
pub struct TurnRequest {
    /// The whole prompt as token ids.
    pub prompt: Vec<u32>,
    /// Validated sampling parameters.
    pub params: SamplingParams,
    /// Splits `<think>` from the answer: `Some(starts_inside)`; `None` leaves the text whole.
    pub reasoning: Option<bool>,
    /// Prompt and answer together, at most.
    pub context_length: usize,
    /// Seed where the parameters have none.
    pub random_seed: u64,
    /// Ids that are never sampled: holes of the vocabulary.
    pub never: Vec<Range<u32>>,
    /// Tokens of the first slice: what an earlier turn came to ([`Turn::slice`]), or [`first_slice`].
    pub slice: usize,
}

impl TurnRequest {
    /// Refuses a prompt that cannot be computed, before a session is touched.
    ///
    /// # Errors
    /// `invalid_request` for no tokens or one beyond the vocabulary, `context_overflow` where no room is left for an answer.
    pub fn check(&self, model: &Model) -> Result<()> {
        let n = self.prompt.len();
        if n == 0 {
            return Err(Error::invalid_request("the prompt has no tokens"));
        }
        let vocab = model.config.vocab_size;
        if let Some(id) = self.prompt.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::invalid_request(format!(
                "token id {id} is not below the vocabulary size {vocab}"
            )));
        }
        if n >= self.context_length {
            return Err(Error::context_overflow(format!(
                "the prompt has {n} tokens, the context holds {}",
                self.context_length
            )));
        }
        Ok(())
    }
}

/// The slice for [`LAYER_MS`] a layer where one of `tokens` tokens takes `ms`.
pub fn slice_for(tokens: usize, ms: f64) -> usize {
    let fits = (tokens as f64 * LAYER_MS / ms.max(1e-3)) as usize / SLICE.start * SLICE.start;
    fits.clamp(SLICE.start, SLICE.end)
}

/// A first slice that no machine of the last ten years works on for long.
pub fn first_slice(model: &Model) -> usize {
    let a_token = 2 * model.parameters() / model.config.num_hidden_layers.max(1) as u64;
    let fits = FIRST_LAYER_OPS / a_token.max(1);
    (fits as usize / SLICE.start * SLICE.start).clamp(SLICE.start, SLICE.end)
}

/// Why a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end token or a stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    /// Cancelled by the caller.
    Abort,
}

impl Finish {
    /// The wire's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Abort => "abort",
        }
    }
}

/// What a step came to.
#[derive(Debug)]
pub enum Step {
    /// Nothing to show yet.
    Busy,
    /// New text (either part may be empty) and the tokens since the last delta.
    Delta(Parts, Vec<u32>),
    /// The end, with the last text.
    Finished(Parts, Vec<u32>, Finish),
}

/// Counts and times of a turn so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens whose KV was there already.
    pub reused_tokens: usize,
    /// Tokens sampled, the end token included.
    pub completion_tokens: usize,
    /// First slice to first logits, ms.
    pub prefill_ms: f64,
    /// First token to last, ms.
    pub decode_ms: f64,
    /// Time in the text decoder, ms.
    pub detokenize_ms: f64,
}

/// A turn under way. It owns its session until [`Turn::into_session`].
pub struct Turn {
    request: TurnRequest,
    session: Session,
    sampler: Sampler,
    text: TextOut,
    pass: Option<(Pass, Vec<u32>)>,
    slice: usize,
    history: Vec<u32>,
    progress: Progress,
    begun: Instant,
    first_token: Option<Instant>,
}

/// Ids to text: bytes, stop strings, reasoning.
struct TextOut {
    decoder: Option<StreamDecoder>,
    stops: StopMatcher,
    splitter: Option<ReasoningSplitter>,
}

impl TextOut {
    fn split(&mut self, text: &str) -> Parts {
        match &mut self.splitter {
            Some(splitter) => splitter.push(text),
            None => Parts { reasoning: String::new(), content: text.to_string() },
        }
    }

    /// The text that `id` settles, and whether a stop string was hit.
    fn push(&mut self, tokenizer: Option<&Tokenizer>, id: u32) -> (Parts, bool) {
        let piece = match (&mut self.decoder, tokenizer) {
            (Some(decoder), Some(tokenizer)) => decoder.push(tokenizer, id),
            _ => String::new(),
        };
        let released = self.stops.push(&piece);
        (self.split(&released.text), released.stop.is_some())
    }

    fn finish(&mut self) -> Parts {
        let mut parts = Parts::default();
        if self.stops.stopped().is_none() {
            let tail = self.decoder.as_mut().map(StreamDecoder::finish).unwrap_or_default();
            let released = self.stops.push(&tail);
            join(&mut parts, self.split(&released.text));
            let released = self.stops.finish();
            join(&mut parts, self.split(&released.text));
        }
        if let Some(splitter) = &mut self.splitter {
            join(&mut parts, splitter.finish());
        }
        parts
    }
}

fn join(all: &mut Parts, more: Parts) {
    all.reasoning.push_str(&more.reasoning);
    all.content.push_str(&more.content);
}

impl Turn {
    /// Starts a turn on a request that passed [`TurnRequest::check`]: cuts the session to what it shares with the prompt.
    pub fn new(
        model: &Model,
        tokenizer: Option<&Tokenizer>,
        mut session: Session,
        request: TurnRequest,
    ) -> Self {
        debug_assert!(request.check(model).is_ok(), "the request was checked");
        let reused_tokens = session.keep_common_prefix(&request.prompt);
        let n_tokens = tokenizer.map_or(model.config.vocab_size, Tokenizer::len);
        Self {
            sampler: Sampler::new(request.params.clone(), n_tokens, &request.never, request.random_seed),
            text: TextOut {
                decoder: tokenizer.map(|t| t.decoder(false)),
                stops: StopMatcher::new(&request.params.stop),
                splitter: request.reasoning.map(ReasoningSplitter::new),
            },
            history: request.prompt.clone(),
            progress: Progress { prompt_tokens: request.prompt.len(), reused_tokens, ..Default::default() },
            session,
            slice: request.slice,
            request,
            pass: None,
            begun: Instant::now(),
            first_token: None,
        }
    }

    /// Tokens of a slice that suit this machine, as far as is known.
    pub fn slice(&self) -> usize {
        self.slice
    }

    /// Counts and times so far.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Gives the session back; its tokens are those whose KV is committed.
    pub fn into_session(self) -> Session {
        self.session
    }

    /// Works for about [`STEP_MS`] or until there is something to show.
    pub fn step(&mut self, model: &Model, tokenizer: Option<&Tokenizer>) -> Result<Step> {
        let result = team(|| self.step_inner(model, tokenizer));
        if matches!(result, Err(Error::Numeric(_))) {
            // What made the logits senseless may stand in the cache as well.
            self.session.truncate(0);
        }
        result
    }

    fn step_inner(&mut self, model: &Model, tokenizer: Option<&Tokenizer>) -> Result<Step> {
        let begun = Instant::now();
        loop {
            if let Some(mut logits) = self.advance(model)? {
                return self.token(tokenizer, &mut logits);
            }
            if ms_since(begun) >= STEP_MS {
                return Ok(Step::Busy);
            }
        }
    }

    /// One layer; the logits when the last position of the prompt, or a sampled token, is through.
    fn advance(&mut self, model: &Model) -> Result<Option<Vec<f32>>> {
        let (mut pass, slice) = match self.pass.take() {
            Some(under_way) => under_way,
            None => {
                let from = self.session.tokens.len();
                let to = self.history.len().min(from + self.slice.min(self.session.cache.most_tokens()));
                let slice = self.history[from..to].to_vec();
                let want = if to == self.history.len() { Want::Last } else { Want::Nothing };
                (model.start(&slice, &mut self.session.cache, want)?, slice)
            }
        };
        let begun = Instant::now();
        match model.advance(&mut pass, &mut self.session.cache)? {
            Advance::Layer => {
                self.adapt(slice.len(), ms_since(begun));
                self.pass = Some((pass, slice));
                Ok(None)
            }
            Advance::Done(logits) => {
                self.session.tokens.extend_from_slice(&slice);
                Ok(logits)
            }
        }
    }

    /// Moves the next slice's length towards [`LAYER_MS`] a layer.
    fn adapt(&mut self, tokens: usize, ms: f64) {
        if tokens >= SLICE.start && ms > 0.0 {
            self.slice = slice_for(tokens, ms).min(2 * tokens);
        }
    }

    fn token(&mut self, tokenizer: Option<&Tokenizer>, logits: &mut [f32]) -> Result<Step> {
        let id = self.sampler.sample(logits, &self.history, self.request.prompt.len())?;
        let first = *self.first_token.get_or_insert_with(Instant::now);
        if self.progress.completion_tokens == 0 {
            self.progress.prefill_ms = ms_since(self.begun);
        }
        self.progress.completion_tokens += 1;
        self.progress.decode_ms = ms_since(first);
        if tokenizer.is_some_and(|t| t.end_tokens().contains(&id)) {
            return Ok(Step::Finished(self.text.finish(), vec![id], Finish::Stop));
        }
        let begun = Instant::now();
        let (mut parts, stopped) = self.text.push(tokenizer, id);
        self.progress.detokenize_ms += ms_since(begun);
        self.history.push(id);
        let full = self.request.params.max_tokens.is_some_and(|most| self.progress.completion_tokens >= most)
            || self.history.len() >= self.request.context_length;
        if stopped || full {
            join(&mut parts, self.text.finish());
            // A stop that lies inside the beginning of a longer one is settled by the end only.
            let stopped = self.text.stops.stopped().is_some();
            return Ok(Step::Finished(parts, vec![id], if stopped { Finish::Stop } else { Finish::Length }));
        }
        Ok(Step::Delta(parts, vec![id]))
    }

    /// Ends the turn early: the text that was held back.
    pub fn abort(&mut self) -> Parts {
        self.pass = None;
        self.text.finish()
    }
}
