//! The next token out of a row of logits: a pure function of logits, parameters, history and a seeded generator.
//! Order: logit bias, repetition / frequency / presence penalty, (greedy at temperature 0), temperature, top-k, top-p,
//! min-p, draw. Every cut keeps a prefix of one order, best logit first and lowest id first among equals, so a cut is a
//! single floor and nothing is sorted. Weights are whole numbers, so their sums are exact in any order, and they come from
//! plain IEEE arithmetic and `libm`: the same seed gives the same tokens natively and on wasm.

mod nucleus;
mod params;
mod rng;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use params::SamplingParams;
pub use rng::Rng;

use crate::error::{Error, Result};
use nucleus::{collect_best, collect_nucleus, nucleus_end, Rank, Weigh, UNIT};

/// Below this temperature the choice is greedy: the scaled logits would leave what f32 can hold.
const GREEDY_BELOW: f64 = 1e-5;

/// Ids per partial sum of the draw: the token is found inside one block instead of a second pass over all logits.
const BLOCK: usize = 1024;

/// Logits looked at together where a loop is to become SIMD code.
const LANES: usize = 16;

/// High bit of a history count: the token stands in the prompt. The other bits count it among the generated tokens.
const IN_PROMPT: u32 = 1 << 31;

/// Draws tokens for one generation. Cloning it forks the random sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    n_tokens: usize,
    never: Vec<Range<u32>>,
    rng: Rng,
    pool: Vec<Rank>,
    block_sums: Vec<u64>,
    counts: Vec<u32>,
    touched: Vec<u32>,
}

impl Sampler {
    /// A sampler over ids `0..n_tokens` without those in `never` (tokens the vocabulary lists as unused); the rows of a
    /// padded output head beyond `n_tokens` are never drawn. `random_seed` is used when the parameters carry no seed.
    pub fn new(params: SamplingParams, n_tokens: usize, never: &[Range<u32>], random_seed: u64) -> Self {
        let rng = Rng::new(params.seed.unwrap_or(random_seed));
        Sampler {
            params,
            n_tokens,
            never: never.to_vec(),
            rng,
            pool: Vec::new(),
            block_sums: Vec::new(),
            counts: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// The parameters this sampler was made with.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The next token for `logits` (V), after `tokens`, of which the first `prompt_len` are the prompt and the others
    /// generated. Masks, bias and penalties are left written into `logits`; a caller that reports log-probabilities of
    /// the model itself takes them before. A `-inf` logit (a grammar's mask) is never drawn.
    ///
    /// Takes exactly one step of the generator per call, none when greedy.
    ///
    /// # Errors
    /// `numeric` when a logit is NaN or +inf, or when no token is left to draw.
    pub fn sample(&mut self, logits: &mut [f32], tokens: &[u32], prompt_len: usize) -> Result<u32> {
        let known = self.n_tokens.min(logits.len());
        let logits = &mut logits[..known];
        self.apply_bias(logits);
        self.apply_penalties(logits, tokens, prompt_len);
        for range in &self.never {
            let end = (range.end as usize).min(known);
            logits[(range.start as usize).min(end)..end].fill(f32::NEG_INFINITY);
        }
        let best = checked_max(logits, tokens.len())?;
        if self.is_greedy() {
            return Ok(first_of(logits, best));
        }
        let weigh = Weigh::new(best, self.params.temperature);
        let floor = self.floor(logits, weigh);
        let ticket = self.rng.next_u64();
        Ok(self.draw(logits, weigh, floor, ticket).unwrap_or_else(|| first_of(logits, best)))
    }

    /// Whether the best token is taken without drawing.
    pub fn is_greedy(&self) -> bool {
        self.params.is_greedy()
    }

    fn apply_bias(&self, logits: &mut [f32]) {
        for &(id, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
    }

    /// Repetition penalty (Keskar et al. 2019, CTRL) over prompt and generated tokens, then OpenAI's frequency and
    /// presence penalties over the generated ones. A token is penalised once, however often it occurs.
    fn apply_penalties(&mut self, logits: &mut [f32], tokens: &[u32], prompt_len: usize) {
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.params;
        let repeats = repetition_penalty != 1.0;
        if !repeats && presence_penalty == 0.0 && frequency_penalty == 0.0 {
            return;
        }
        self.counts.resize(self.n_tokens, 0);
        let prompt_len = prompt_len.min(tokens.len());
        let skipped = if repeats { 0 } else { prompt_len };
        for (position, &id) in tokens.iter().enumerate().skip(skipped) {
            let Some(count) = self.counts.get_mut(id as usize) else { continue };
            if *count == 0 {
                self.touched.push(id);
            }
            *count = if position < prompt_len { *count | IN_PROMPT } else { *count + 1 };
        }
        for id in self.touched.drain(..) {
            let count = std::mem::take(&mut self.counts[id as usize]) & !IN_PROMPT;
            let Some(logit) = logits.get_mut(id as usize).filter(|logit| logit.is_finite()) else { continue };
            let mut x = f64::from(*logit);
            x = if x > 0.0 { x / repetition_penalty } else { x * repetition_penalty };
            if count > 0 {
                x -= frequency_penalty * f64::from(count) + presence_penalty;
            }
            *logit = x.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
        }
    }

    /// The last token that top-k and top-p keep. Min-p is a bound on the weight and is left to the draw.
    fn floor(&mut self, logits: &[f32], weigh: Weigh) -> Rank {
        let SamplingParams { top_k, top_p, .. } = self.params;
        let by_k = top_k > 0 && top_k < logits.len();
        if by_k {
            collect_best(logits, top_k, &mut self.pool);
        }
        if top_p >= 1.0 {
            return if by_k { self.pool.iter().copied().max().unwrap_or(Rank::LAST) } else { Rank::LAST };
        }
        let total: u64 = if by_k {
            self.pool.iter().map(|rank| u64::from(weigh.weight(rank.logit()))).sum()
        } else {
            logits.iter().map(|&logit| u64::from(weigh.weight(logit))).sum()
        };
        let needed = ((top_p * total as f64).ceil() as u64).clamp(1, total);
        if !by_k {
            collect_nucleus(logits, weigh, total - needed, &mut self.pool);
        }
        nucleus_end(&mut self.pool, weigh, needed)
    }

    /// The token under `ticket` (uniform over all u64) among those up to `floor` and within min-p, in the order of ids.
    fn draw(&mut self, logits: &[f32], weigh: Weigh, floor: Rank, ticket: u64) -> Option<u32> {
        let min_weight = ((self.params.min_p * f64::from(UNIT)).ceil() as u32).max(1);
        let (lowest, last) = (floor.logit(), floor.id());
        // Without branches, so that it becomes SIMD code.
        let weight_of = |logit: f32, id: u32| {
            let weight = weigh.weight(logit);
            let kept = ((logit > lowest) | ((logit == lowest) & (id <= last))) & (weight >= min_weight);
            u64::from(if kept { weight } else { 0 })
        };
        // The high half of the product is uniform below total.
        let pick = |total: u64| ((u128::from(ticket) * u128::from(total)) >> 64) as u64;
        if floor != Rank::LAST {
            self.pool.retain(|rank| *rank <= floor);
            if self.pool.len() <= BLOCK {
                self.pool.sort_unstable_by_key(|rank| rank.id());
                let weights = || self.pool.iter().map(|rank| (rank.id(), weight_of(rank.logit(), rank.id())));
                return find_share(weights(), &mut pick(weights().map(|(_, weight)| weight).sum()));
            }
        }
        let blocks = (0u32..).step_by(BLOCK).zip(logits.chunks(BLOCK));
        let weights = |first: u32, block| {
            (first..).zip(block).map(|(id, &logit): (u32, &f32)| (id, weight_of(logit, id)))
        };
        self.block_sums.clear();
        self.block_sums.extend(
            blocks.map(|(first, block)| weights(first, block).map(|(_, weight)| weight).sum::<u64>()),
        );
        let mut share = pick(self.block_sums.iter().sum());
        let block = find_share((0usize..).zip(self.block_sums.iter().copied()), &mut share)?;
        let first = block * BLOCK;
        find_share(weights(first as u32, &logits[first..]), &mut share)
    }
}

/// The item whose weight covers `share`, from which the weights before it are taken away.
fn find_share<T>(items: impl IntoIterator<Item = (T, u64)>, share: &mut u64) -> Option<T> {
    for (item, weight) in items {
        if *share < weight {
            return Some(item);
        }
        *share -= weight;
    }
    None
}

/// Log-probability (natural logarithm) of `id` under the softmax of `logits`, without temperature.
/// `-inf` for an id outside of `logits` or masked.
pub fn log_softmax_at(logits: &[f32], id: u32) -> f32 {
    match logits.get(id as usize) {
        Some(&logit) if logit > f32::NEG_INFINITY => (f64::from(logit) - log_sum_exp(logits)) as f32,
        _ => f32::NEG_INFINITY,
    }
}

/// The `n` likeliest ids of `logits` with their log-probabilities, best first, lowest id first among equals. Masked
/// (`-inf`) logits are left out.
pub fn top_logprobs(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut pool = Vec::new();
    collect_best(logits, n, &mut pool);
    pool.sort_unstable();
    let normalizer = log_sum_exp(logits);
    pool.iter().map(|rank| (rank.id(), (f64::from(rank.logit()) - normalizer) as f32)).collect()
}

/// The largest logit.
fn checked_max(logits: &[f32], position: usize) -> Result<f32> {
    let mut best = [f32::NEG_INFINITY; LANES];
    let mut unsound = [false; LANES];
    let (chunks, tail) = logits.as_chunks::<LANES>();
    let last: [f32; LANES] = std::array::from_fn(|lane| tail.get(lane).copied().unwrap_or(f32::NEG_INFINITY));
    for chunk in chunks.iter().chain([&last]) {
        for lane in 0..LANES {
            let logit = chunk[lane];
            unsound[lane] |= logit.is_nan() | (logit == f32::INFINITY);
            best[lane] = if logit > best[lane] { logit } else { best[lane] };
        }
    }
    let best = best.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if unsound.contains(&true) {
        let id =
            logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY).unwrap_or_default();
        return Err(Error::numeric(format!(
            "expected finite logits at position {position}, found {} for token {id}",
            logits[id]
        )));
    }
    if best == f32::NEG_INFINITY {
        return Err(Error::numeric(format!(
            "no token can be drawn at position {position}: all {} logits are -inf",
            logits.len()
        )));
    }
    Ok(best)
}

fn first_of(logits: &[f32], best: f32) -> u32 {
    logits.iter().position(|&logit| logit == best).unwrap_or_default() as u32
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(libm::expf(logit - best))).sum();
    f64::from(best) + libm::log(sum)
}
