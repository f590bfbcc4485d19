//! Timings: where a token's time goes ([`Profile`]), and the window of the last requests ([`Window`]).
//! Leaf module; the profile is kept per thread, and only the engine's thread reads and writes it.

use serde::Serialize;
use std::cell::RefCell;
use std::collections::VecDeque;
use web_time::Instant;

/// Requests that the rolling window holds.
const WINDOW: usize = 100;

/// One kernel's share of the time.
#[derive(Debug, Clone, Default, Serialize)]
pub struct KernelTime {
    /// What ran, after the part of the model it serves (`qkv_proj`, `attention`, …).
    pub name: &'static str,
    /// Calls.
    pub calls: u64,
    /// Wall time, ms.
    pub ms: f64,
    /// Weight or cache bytes read.
    pub bytes: u64,
    /// Multiplications and additions (2·m·k·n).
    pub ops: u64,
}

/// Time by kernel since the engine was loaded.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    /// Tokens that passed through the model.
    pub tokens: u64,
    /// Time inside the model's passes, ms.
    pub wall_ms: f64,
    /// The part of `wall_ms` that no kernel accounts for.
    pub outside_kernels_ms: f64,
    /// One row a kernel.
    pub kernels: Vec<KernelTime>,
}

thread_local! {
    static PROFILE: RefCell<Profile> = RefCell::new(Profile::default());
}

/// Runs `f` and books its time under `name`.
pub fn timed<R>(name: &'static str, bytes: u64, ops: u64, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    let ms = ms_since(start);
    PROFILE.with_borrow_mut(|profile| {
        let at = match profile.kernels.iter().position(|k| k.name == name) {
            Some(at) => at,
            None => {
                profile.kernels.push(KernelTime { name, ..Default::default() });
                profile.kernels.len() - 1
            }
        };
        let row = &mut profile.kernels[at];
        row.calls += 1;
        row.ms += ms;
        row.bytes += bytes;
        row.ops += ops;
    });
    result
}

/// Books a pass (or a part of one) of `tokens` tokens and `ms` wall time.
pub fn book_pass(tokens: usize, ms: f64) {
    PROFILE.with_borrow_mut(|profile| {
        profile.tokens += tokens as u64;
        profile.wall_ms += ms;
    });
}

/// The profile so far.
pub fn profile() -> Profile {
    let mut profile = PROFILE.with_borrow(Clone::clone);
    let inside: f64 = profile.kernels.iter().map(|k| k.ms).sum();
    profile.outside_kernels_ms = (profile.wall_ms - inside).max(0.0);
    profile
}

/// Hits by look-ups, 0 before the first.
pub fn hit_rate(hits: u64, misses: u64) -> f64 {
    hits as f64 / (hits + misses).max(1) as f64
}

/// Milliseconds since `start`.
pub fn ms_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// One request's timings, ms and tokens.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Timings {
    /// Waiting for earlier requests.
    pub queue_ms: f64,
    /// Rendering and tokenising.
    pub tokenize_ms: f64,
    /// From the first slice to the first logits.
    pub prefill_ms: f64,
    /// From the arrival of the request to its first token.
    pub ttft_ms: f64,
    /// From the first token to the last.
    pub decode_ms: f64,
    /// From arrival to the end.
    pub total_ms: f64,
    /// Prompt tokens really computed, per second of prefill.
    pub prefill_tokens_per_second: f64,
    /// Tokens after the first, per second of decode.
    pub decode_tokens_per_second: f64,
}

/// One finished request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestRecord {
    /// Its timings.
    pub timings: Timings,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens whose KV was there already.
    pub reused_tokens: usize,
    /// Time spent turning ids into text, ms.
    pub detokenize_ms: f64,
    /// Whether the answer was a kept one.
    pub cached: bool,
}

/// Count, mean and percentiles of one figure.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Series {
    /// Values.
    pub count: usize,
    /// Mean.
    pub avg: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
    /// Median (nearest rank).
    pub p50: f64,
    /// 95th percentile (nearest rank).
    pub p95: f64,
}

impl Series {
    /// The series of `values`; all zero when there are none.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.retain(|v| v.is_finite());
        values.sort_by(f64::total_cmp);
        let count = values.len();
        if count == 0 {
            return Self::default();
        }
        let rank = |p: f64| values[((p * count as f64).ceil() as usize).clamp(1, count) - 1];
        Self {
            count,
            avg: values.iter().sum::<f64>() / count as f64,
            min: values[0],
            max: values[count - 1],
            p50: rank(0.5),
            p95: rank(0.95),
        }
    }
}

/// The last 100 requests.
#[derive(Debug, Default)]
pub struct Window {
    records: VecDeque<RequestRecord>,
    /// Requests finished since the engine was loaded.
    pub total: u64,
}

impl Window {
    /// Adds a finished request.
    pub fn push(&mut self, record: RequestRecord) {
        if self.records.len() == WINDOW {
            self.records.pop_front();
        }
        self.records.push_back(record);
        self.total += 1;
    }

    /// The series of one figure.
    pub fn series(&self, figure: impl Fn(&RequestRecord) -> f64) -> Series {
        Series::of(self.records.iter().map(figure).collect())
    }

    /// The sum of one count.
    pub fn sum(&self, count: impl Fn(&RequestRecord) -> usize) -> usize {
        self.records.iter().map(count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let s = Series::of((1..=100).rev().map(f64::from).collect());
        assert_eq!((s.count, s.min, s.max, s.p50, s.p95, s.avg), (100, 1.0, 100.0, 50.0, 95.0, 50.5));
        assert_eq!(Series::of(vec![]).count, 0);
        assert_eq!(Series::of(vec![f64::NAN, 3.0]).p95, 3.0);
    }

    #[test]
    fn the_window_keeps_the_last_hundred() {
        let mut w = Window::default();
        for i in 0..150 {
            w.push(RequestRecord { prompt_tokens: i, ..Default::default() });
        }
        assert_eq!((w.total, w.series(|r| r.prompt_tokens as f64).min), (150, 50.0));
    }
}
