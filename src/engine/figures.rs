//! What an engine tells of itself: the window of its last requests, a record of each, and its memory.

use super::Engine;
use crate::metrics::{hit_rate, RequestRecord};
use serde_json::{json, Value};

/// Records that wait at most for who takes them.
const MOST_RECORDS: usize = 100;

impl Engine {
    /// Bytes by purpose; `wasm_bytes` comes from the worker.
    pub fn memory(&self, wasm_bytes: u64) -> Value {
        json!({
            "wasmBytes": wasm_bytes,
            "weightsBytes": self.model.weight_bytes(),
            "kvBytes": self.page_budget().used(),
            "responseBytes": self.responses.bytes(),
            "tokenizerBytes": self.text.tokenizer_bytes(),
        })
    }

    /// The rolling window as `Metrics` (less `memory`).
    pub fn metrics(&self) -> Value {
        let w = &self.window;
        let series = |f: fn(&RequestRecord) -> f64| w.series(f);
        // What was answered from the cache was neither prefilled nor decoded.
        let computed = |f: fn(&RequestRecord) -> f64| w.series(|r| if r.cached { f64::NAN } else { f(r) });
        json!({
            "requests": w.total,
            "ttftMs": series(|r| r.timings.ttft_ms),
            "totalMs": series(|r| r.timings.total_ms),
            "prefillTokensPerSecond": computed(|r| r.timings.prefill_tokens_per_second),
            "decodeTokensPerSecond": computed(|r| r.timings.decode_tokens_per_second),
            "phasesMs": {
                "queue": series(|r| r.timings.queue_ms),
                "tokenize": series(|r| r.timings.tokenize_ms),
                "prefill": computed(|r| r.timings.prefill_ms),
                "decode": computed(|r| r.timings.decode_ms),
                "detokenize": computed(|r| r.detokenize_ms),
            },
            "caches": {
                "session": self.session_figures(),
                "response": self.responses.stats(),
                "tokenizer": self.text.token_stats().unwrap_or_else(no_token_stats),
            },
        })
    }

    fn session_figures(&self) -> Value {
        let count = |f: fn(&RequestRecord) -> usize| self.window.sum(|r| if r.cached { 0 } else { f(r) });
        let (hits, misses) =
            (count(|r| usize::from(r.reused_tokens > 0)), count(|r| usize::from(r.reused_tokens == 0)));
        let disk = self.sessions.disk_counts();
        json!({
            "hits": hits,
            "misses": misses,
            "hitRate": hit_rate(hits as u64, misses as u64),
            "entries": self.sessions.len(),
            "bytes": self.sessions.bytes(),
            "reusedTokens": count(|r| r.reused_tokens),
            "promptTokens": count(|r| r.prompt_tokens),
            "disk": { "hits": disk.hits, "misses": disk.misses, "hitRate": hit_rate(disk.hits, disk.misses) },
        })
    }

    /// Adds a finished request to the window, and to the records that [`Engine::take_records`] gives.
    pub(super) fn record(&mut self, record: RequestRecord, session: Option<&str>, completion_tokens: usize) {
        let figures = self.metrics_record(&record, session, completion_tokens);
        self.window.push(record);
        if self.latest.len() < MOST_RECORDS {
            self.latest.push(figures);
        }
    }

    fn metrics_record(
        &self,
        record: &RequestRecord,
        session: Option<&str>,
        completion_tokens: usize,
    ) -> Value {
        let timings = record.timings;
        json!({
            "sessionId": session,
            "cached": record.cached,
            "promptTokens": record.prompt_tokens,
            "reusedTokens": record.reused_tokens,
            "completionTokens": completion_tokens,
            "ttftMs": timings.ttft_ms,
            "totalMs": timings.total_ms,
            "prefillTokensPerSecond": timings.prefill_tokens_per_second,
            "decodeTokensPerSecond": timings.decode_tokens_per_second,
            "phasesMs": {
                "queue": timings.queue_ms,
                "tokenize": timings.tokenize_ms,
                "prefill": timings.prefill_ms,
                "decode": timings.decode_ms,
                "detokenize": record.detokenize_ms,
            },
        })
    }

    /// Records of the requests that have ended since the last call, in that order, with the hit rates and the memory of now
    /// (`wasm_bytes` comes from the worker).
    pub fn take_records(&mut self, wasm_bytes: u64) -> Vec<Value> {
        let mut records = std::mem::take(&mut self.latest);
        if records.is_empty() {
            return records;
        }
        let (sessions, responses) = (self.session_figures(), self.responses.stats());
        let tokens = self.text.token_stats().unwrap_or_else(no_token_stats);
        for record in &mut records {
            record["hitRates"] = json!({
                "session": sessions["hitRate"],
                "sessionDisk": sessions["disk"]["hitRate"],
                "response": responses["hitRate"],
                "tokenizer": tokens["hitRate"],
                "tokenizerDisk": tokens["disk"]["hitRate"],
            });
            record["memory"] = self.memory(wasm_bytes);
        }
        records
    }
}

/// The counts of a cache without a tokenizer.
fn no_token_stats() -> Value {
    json!({
        "hits": 0, "misses": 0, "entries": 0, "bytes": 0, "hitRate": 0, "combinedHitRate": 0, "tokens": 0, "reusedTokens": 0,
        "disk": { "hits": 0, "misses": 0, "entries": 0, "bytes": 0, "hitRate": 0 },
    })
}
