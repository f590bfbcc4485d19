//! Which turn computes what next. All turns that stream share one pass, so the weights are read once for all of them; a
//! prompt is computed a slice at a time between such passes, so that no prompt holds up a stream for long. Works a layer at
//! a time and returns after a bounded time, so that its caller can answer messages in between.

use crate::error::{Error, Result};
use crate::generation::{Step, Turn};
use crate::kernels::parallel::team;
use crate::kv_cache::KvCache;
use crate::metrics::ms_since;
use crate::model::{Advance, Model, Pass, Span, Want};
use crate::speculation::Costs;
use crate::tokenizer::Tokenizer;
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
/// Time that prompts have between two tokens of the streams, in passes of the streams.
const BETWEEN: f64 = 1.75;
/// One slice in so many goes to the prompt that waits longest; the others to the one with the fewest tokens left.
const ELDEST: u64 = 4;

/// The passes under way of an engine's turns.
pub struct Schedule {
    streams: Option<Under>,
    prompt: Option<Under>,
    slice: usize,
    costs: Costs,
    /// The last pass of the streams, ms.
    stream_ms: f64,
    /// What is left for prompts until the streams' next token, ms.
    prompt_ms: f64,
    /// The last layer of a prompt, ms; 0: none since the streams' last token.
    layer_ms: f64,
    /// Slices of prompts that were begun.
    slices: u64,
    /// Turns of a pass that failed: each computes alone until it is known whose fault that was.
    alone: Vec<u64>,
}

/// A pass under way.
struct Under {
    pass: Pass,
    /// The turns by their ids, each with its tokens.
    parts: Vec<(u64, Vec<u32>)>,
    ms: f64,
}

/// What became of one of the turns that were given to [`Schedule::step`].
pub type Stepped = (usize, Result<Vec<Step>>);

impl Schedule {
    /// For turns of `model`.
    pub fn new(model: &Model) -> Self {
        Self {
            streams: None,
            prompt: None,
            slice: first_slice(model),
            costs: Costs::default(),
            stream_ms: 0.0,
            prompt_ms: 0.0,
            layer_ms: 0.0,
            slices: 0,
            alone: Vec::new(),
        }
    }

    /// Sets the slice by a layer of `tokens` tokens that took `ms`.
    pub fn measured(&mut self, tokens: usize, ms: f64) {
        self.slice = slice_for(tokens, ms, LAYER_MS);
    }

    /// Works for about [`STEP_MS`] or until some turn has something to show. A turn that failed is to be taken away.
    pub fn step(
        &mut self,
        model: &Model,
        tokenizer: Option<&Tokenizer>,
        turns: &mut [&mut Turn],
    ) -> Vec<Stepped> {
        team(|| {
            let begun = Instant::now();
            loop {
                let stepped = self.advance(model, tokenizer, turns);
                if !stepped.is_empty() || turns.is_empty() || ms_since(begun) >= STEP_MS {
                    return stepped;
                }
            }
        })
    }

    /// One layer of one pass.
    fn advance(
        &mut self,
        model: &Model,
        tokenizer: Option<&Tokenizer>,
        turns: &mut [&mut Turn],
    ) -> Vec<Stepped> {
        let there = |under: &Under| under.parts.iter().all(|(id, _)| turns.iter().any(|turn| turn.id == *id));
        // Without one of its turns a pass cannot go on. What it computed was not committed.
        self.streams = self.streams.take().filter(there);
        self.prompt = self.prompt.take().filter(there);
        self.alone.retain(|id| turns.iter().any(|turn| turn.id == *id));

        let streams = turns.iter().any(|turn| turn.waiting().len() == 1);
        let prompts = turns.iter().any(|turn| turn.waiting().len() > 1);
        let for_prompt = prompts && (!streams || (self.streams.is_none() && self.prompt_ms > self.layer_ms));
        let under_way = if for_prompt { self.prompt.take() } else { self.streams.take() };
        let mut under = match under_way {
            Some(under) => under,
            None => {
                let mut parts = if for_prompt { self.next_slice(turns) } else { self.next_tokens(turns) };
                let mut started = start(model, turns, &parts);
                if matches!(started, Err(Error::OutOfMemory(_))) && without_guesses(turns, &mut parts) {
                    started = start(model, turns, &parts);
                }
                match started {
                    Ok(pass) => Under { pass, parts, ms: 0.0 },
                    Err(error) => return self.failed(turns, &parts, error),
                }
            }
        };
        let begun = Instant::now();
        let mut caches = caches_of(turns, &under.parts);
        let advanced = model.advance_all(&mut under.pass, &mut caches);
        let ms = ms_since(begun);
        under.ms += ms;
        if for_prompt {
            self.prompt_ms -= ms;
            self.layer_ms = ms;
        }
        match advanced {
            Err(error) => self.failed(turns, &under.parts, error),
            Ok(Advance::Layer) => {
                if for_prompt {
                    self.adapt(under.pass.rows(), ms, streams);
                }
                *(if for_prompt { &mut self.prompt } else { &mut self.streams }) = Some(under);
                Vec::new()
            }
            Ok(Advance::Done(logits)) => {
                if !for_prompt {
                    self.costs.book(under.pass.rows(), under.ms);
                    self.stream_ms = under.ms;
                    (self.prompt_ms, self.layer_ms) = (BETWEEN * under.ms, 0.0);
                }
                self.alone.retain(|id| under.parts.iter().all(|(part, _)| part != id));
                settle(turns, tokenizer, &under.parts, logits.unwrap_or_default())
            }
        }
    }

    /// The next slice of a prompt. What another turn has computed of it is taken over first.
    fn next_slice(&mut self, turns: &mut [&mut Turn]) -> Vec<(u64, Vec<u32>)> {
        self.slices += 1;
        let eldest = self.slices.is_multiple_of(ELDEST);
        let prompts = (0..turns.len()).filter(|at| turns[*at].waiting().len() > 1);
        // Turns stand in the order in which they came.
        let Some(at) = prompts.min_by_key(|at| if eldest { 0 } else { turns[*at].waiting().len() }) else {
            return Vec::new();
        };
        for other in 0..turns.len() {
            if let Ok([turn, other]) = turns.get_disjoint_mut([at, other]) {
                turn.take_over(other);
            }
        }
        let waiting = turns[at].waiting();
        vec![(turns[at].id, waiting[..waiting.len().min(self.slice).min(turns[at].most_tokens())].to_vec())]
    }

    /// The next token of every stream; a lone one's guesses too.
    fn next_tokens(&self, turns: &[&mut Turn]) -> Vec<(u64, Vec<u32>)> {
        let mut streams = turns.iter().filter(|turn| turn.waiting().len() == 1);
        let alone = turns.iter().find(|turn| turn.waiting().len() == 1 && self.alone.contains(&turn.id));
        if let Some(turn) = alone {
            return vec![(turn.id, turn.waiting().to_vec())];
        }
        if let (Some(turn), None) = (streams.next(), streams.next()) {
            let mut tokens = turn.waiting().to_vec();
            tokens.extend(turn.draft(&self.costs));
            return vec![(turn.id, tokens)];
        }
        let streams = turns.iter().filter(|turn| turn.waiting().len() == 1);
        streams.map(|turn| (turn.id, turn.waiting().to_vec())).collect()
    }

    /// A pass failed. Where it had several turns, each tries alone.
    fn failed(&mut self, turns: &mut [&mut Turn], parts: &[(u64, Vec<u32>)], error: Error) -> Vec<Stepped> {
        let [(id, _)] = parts else {
            self.alone = parts.iter().map(|(id, _)| *id).collect();
            return Vec::new();
        };
        let Some(at) = turns.iter().position(|turn| turn.id == *id) else { return Vec::new() };
        vec![(at, Err(spoilt(turns[at], error)))]
    }

    /// Moves the next slice's length towards [`LAYER_MS`] a layer, or towards what fits between two tokens of a stream.
    fn adapt(&mut self, tokens: usize, ms: f64, streams: bool) {
        if tokens >= SLICE.start && ms > 0.0 {
            let layer_ms = if streams { LAYER_MS.min(self.stream_ms) } else { LAYER_MS };
            self.slice = slice_for(tokens, ms, layer_ms).min(2 * tokens);
        }
    }
}

/// What made the logits senseless may stand in the cache as well.
fn spoilt(turn: &mut Turn, error: Error) -> Error {
    if matches!(error, Error::Numeric(_)) {
        turn.session_mut().truncate(0);
    }
    error
}

fn start(model: &Model, turns: &mut [&mut Turn], parts: &[(u64, Vec<u32>)]) -> Result<Pass> {
    let wants: Vec<Want> = parts.iter().map(|(id, tokens)| want(turns, *id, tokens.len())).collect();
    let caches = caches_of(turns, parts);
    let spans = parts.iter().zip(caches).zip(wants);
    let mut spans: Vec<Span> =
        spans.map(|(((_, tokens), cache), want)| Span { tokens, cache, want }).collect();
    model.start_all(&mut spans)
}

/// Takes the guesses away; `false`: there are none.
fn without_guesses(turns: &[&mut Turn], parts: &mut [(u64, Vec<u32>)]) -> bool {
    let mut any = false;
    for (id, tokens) in parts {
        let waiting = turns.iter().find(|turn| turn.id == *id).map_or(0, |turn| turn.waiting().len());
        any |= tokens.len() > waiting;
        tokens.truncate(waiting);
    }
    any
}

/// Logits are wanted where the last token that waits is computed, and of every guess after it.
fn want(turns: &[&mut Turn], id: u64, tokens: usize) -> Want {
    let waiting = turns.iter().find(|turn| turn.id == id).map_or(0, |turn| turn.waiting().len());
    match tokens.cmp(&waiting) {
        std::cmp::Ordering::Less => Want::Nothing,
        std::cmp::Ordering::Equal => Want::Last,
        std::cmp::Ordering::Greater => Want::All,
    }
}

/// The caches of a pass's turns, in its order, which is that of the turns.
fn caches_of<'t>(turns: &'t mut [&mut Turn], parts: &[(u64, Vec<u32>)]) -> Vec<&'t mut KvCache> {
    let wanted = |turn: &Turn| parts.iter().any(|(id, _)| *id == turn.id);
    turns.iter_mut().filter(|turn| wanted(turn)).map(|turn| &mut turn.session_mut().cache).collect()
}

/// Gives each turn of a finished pass its rows of logits.
fn settle(
    turns: &mut [&mut Turn],
    tokenizer: Option<&Tokenizer>,
    parts: &[(u64, Vec<u32>)],
    mut logits: Vec<f32>,
) -> Vec<Stepped> {
    let rows_of = |turns: &[&mut Turn], (id, tokens): &(u64, Vec<u32>)| match want(turns, *id, tokens.len()) {
        Want::Nothing => 0,
        Want::Last => 1,
        Want::All => tokens.len(),
    };
    let rows: Vec<usize> = parts.iter().map(|part| rows_of(turns, part)).collect();
    let vocab = logits.len() / rows.iter().sum::<usize>().max(1);
    let mut rest = &mut logits[..];
    let mut stepped = Vec::new();
    for ((id, tokens), rows) in parts.iter().zip(rows) {
        let (own, others) = rest.split_at_mut(rows * vocab);
        rest = others;
        let Some(at) = turns.iter().position(|turn| turn.id == *id) else { continue };
        match turns[at].computed(tokens, own, tokenizer) {
            Ok(steps) if steps.is_empty() => {}
            Ok(steps) => stepped.push((at, Ok(steps))),
            Err(error) => stepped.push((at, Err(spoilt(turns[at], error)))),
        }
    }
    stepped
}

/// The slice for `layer_ms` a layer where one of `tokens` tokens takes `ms`.
pub(crate) fn slice_for(tokens: usize, ms: f64, layer_ms: f64) -> usize {
    let fits = (tokens as f64 * layer_ms / ms.max(1e-3)) as usize / SLICE.start * SLICE.start;
    fits.clamp(SLICE.start, SLICE.end)
}

/// A first slice that no machine of the last ten years works on for long.
fn first_slice(model: &Model) -> usize {
    let a_token = 2 * model.parameters() / model.config.num_hidden_layers.max(1) as u64;
    let fits = FIRST_LAYER_OPS / a_token.max(1);
    (fits as usize / SLICE.start * SLICE.start).clamp(SLICE.start, SLICE.end)
}
