//! One turn: what is left of its prompt to compute, then token after token. It computes nothing by itself: the
//! schedule takes tokens from it and brings logits.

use crate::error::{Error, Result};
use crate::metrics::ms_since;
use crate::model::Model;
use crate::sampler::{Sampler, SamplingParams};
use crate::session::Session;
use crate::speculation::{Costs, Drafter};
use crate::stream::{Parts, ReasoningSplitter, StopMatcher};
use crate::tokenizer::{StreamDecoder, Tokenizer};
use std::ops::Range;
use web_time::Instant;

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
    /// Whether the turn may take over what other turns have computed, and they what it has.
    pub shares: bool,
    /// Whether the next tokens may be guessed and verified together.
    pub speculates: bool,
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

/// What a token came to.
#[derive(Debug)]
pub enum Step {
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
    /// Tokens that were guessed.
    pub drafted_tokens: usize,
    /// Guesses that were right.
    pub accepted_tokens: usize,
}

/// A turn under way. It owns its session until [`Turn::into_session`].
pub struct Turn {
    /// What other turns may know it by.
    pub(crate) id: u64,
    request: TurnRequest,
    session: Session,
    sampler: Sampler,
    text: TextOut,
    /// The prompt and the tokens sampled so far; all but the last few of them are in the session.
    history: Vec<u32>,
    drafter: Option<Drafter>,
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
        id: u64,
        model: &Model,
        tokenizer: Option<&Tokenizer>,
        mut session: Session,
        request: TurnRequest,
    ) -> Self {
        debug_assert!(request.check(model).is_ok(), "the request was checked");
        let reused_tokens = session.keep_common_prefix(&request.prompt);
        let n_tokens = tokenizer.map_or(model.config.vocab_size, Tokenizer::len);
        Self {
            id,
            sampler: Sampler::new(request.params.clone(), n_tokens, &request.never, request.random_seed),
            text: TextOut {
                decoder: tokenizer.map(|t| t.decoder(false)),
                stops: StopMatcher::new(&request.params.stop),
                splitter: request.reasoning.map(ReasoningSplitter::new),
            },
            history: request.prompt.clone(),
            drafter: request.speculates.then(|| Drafter::new(&request.prompt)),
            progress: Progress { prompt_tokens: request.prompt.len(), reused_tokens, ..Default::default() },
            session,
            request,
            begun: Instant::now(),
            first_token: None,
        }
    }

    /// Counts and times so far.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Its tokens are those whose KV is committed.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// As [`Turn::session`], for the passes that fill its cache.
    pub(crate) fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Gives the session back; its tokens are those whose KV is committed.
    pub fn into_session(self) -> Session {
        self.session
    }

    /// Tokens whose KV is not there yet, in order: the rest of the prompt, or the token that was sampled last.
    pub(crate) fn waiting(&self) -> &[u32] {
        &self.history[self.session.tokens.len()..]
    }

    /// Most tokens of this turn's next pass.
    pub(crate) fn most_tokens(&self) -> usize {
        self.session.cache.most_tokens()
    }

    /// What may follow the history, and what a guess of each length costs and brings is weighed by `costs`.
    pub(crate) fn draft(&self, costs: &Costs) -> Vec<u32> {
        let left = self.request.params.max_tokens.unwrap_or(usize::MAX) - self.progress.completion_tokens;
        let room = self.request.context_length - self.history.len();
        let most = left.min(room).min(self.most_tokens()).saturating_sub(1);
        self.drafter.as_ref().map_or(Vec::new(), |drafter| drafter.draft(&self.history, most, costs))
    }

    /// Takes over the beginning that `other` has computed of this turn's prompt, where that is more than its own.
    pub(crate) fn take_over(&mut self, other: &Turn) {
        if !(self.request.shares && other.request.shares) {
            return;
        }
        let had = self.session.tokens.len();
        let len = other.session.common_prefix(&self.request.prompt);
        if len > had {
            self.session.adopt(&other.session, len);
            self.progress.reused_tokens += len - had;
        }
    }

    /// Takes the logits that came of a pass over `tokens`, rows of V: those that wait, and what was guessed to follow them.
    /// Every guess that was right settles a token more.
    ///
    /// # Errors
    /// `numeric`; nothing of the session is to be trusted then.
    pub(crate) fn computed(
        &mut self,
        tokens: &[u32],
        logits: &mut [f32],
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Vec<Step>> {
        let (known, guesses) = tokens.split_at(self.waiting().len().min(tokens.len()));
        self.session.tokens.extend_from_slice(known);
        let mut steps = Vec::new();
        if !logits.is_empty() {
            let vocab = logits.len() / (guesses.len() + 1);
            let followed_by = guesses.iter().map(Some).chain([None]);
            for (row, guess) in logits.chunks_exact_mut(vocab).zip(followed_by) {
                let step = self.token(tokenizer, row)?;
                let ended = matches!(step, Step::Finished(..));
                steps.push(step);
                match guess {
                    Some(guess) if !ended && self.history.last() == Some(guess) => {
                        self.session.tokens.push(*guess)
                    }
                    _ => break,
                }
            }
            self.book_guesses(guesses, steps.len() - 1);
        }
        self.session.cache.truncate(self.session.tokens.len());
        Ok(steps)
    }

    fn book_guesses(&mut self, guesses: &[u32], right: usize) {
        self.progress.drafted_tokens += guesses.len();
        self.progress.accepted_tokens += right;
        if let Some(drafter) = &mut self.drafter {
            drafter.learn(&self.history, guesses, right);
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
        self.text.finish()
    }
}
