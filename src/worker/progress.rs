//! What a load tells while it works: one fraction that only rises, an honest rate, and notices.

use super::Inner;
use crate::metrics::ms_since;
use serde_json::{json, Map, Value};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use web_time::Instant;

/// Progress is told this often at most, ms.
const REPORT_MS: f64 = 100.0;
/// The rate is that of so many ms.
const RATE_MS: f64 = 5000.0;
/// Share of the whole bar that reading the weights has; the rest is set-up.
const READ_SHARE: f64 = 0.97;

/// The progress of one request.
pub(super) struct Report {
    inner: Rc<Inner>,
    id: u32,
    source: Cell<&'static str>,
    begun: Instant,
    last: Cell<f64>,
    fraction: Cell<f64>,
    total: Cell<Option<u64>>,
    /// Bytes of the files that were read before this one.
    before: Cell<u64>,
    /// Times and bytes, oldest first.
    seen: RefCell<VecDeque<(f64, u64)>>,
    /// Where the time went, ms.
    spent: RefCell<Vec<(&'static str, f64)>>,
}

impl Report {
    pub(super) fn new(inner: Rc<Inner>, id: u32, source: &'static str) -> Self {
        Self {
            inner,
            id,
            source: Cell::new(source),
            begun: Instant::now(),
            last: Cell::new(f64::NEG_INFINITY),
            fraction: Cell::new(0.0),
            total: Cell::new(None),
            before: Cell::new(0),
            seen: RefCell::new(VecDeque::new()),
            spent: RefCell::new(Vec::new()),
        }
    }

    /// Whether the model was kept, so that this is not its first visit.
    pub(super) fn is_again(&self) -> bool {
        matches!(self.source.get(), "image" | "cache")
    }

    pub(super) fn set_source(&self, source: &'static str) {
        self.source.set(source);
    }

    /// Books the time since `begun` under a name.
    pub(super) fn spent(&self, name: &'static str, begun: Instant) {
        let (ms, mut spent) = (ms_since(begun), self.spent.borrow_mut());
        match spent.iter_mut().find(|(other, _)| *other == name) {
            Some((_, sum)) => *sum += ms,
            None => spent.push((name, ms)),
        }
    }

    /// What the load came from and where its time went, as `EngineInfo` tells it.
    pub(super) fn summary(&self) -> Value {
        let mut ms: Map<String, Value> =
            self.spent.borrow().iter().map(|(name, ms)| ((*name).to_string(), (*ms).into())).collect();
        ms.insert("total".to_string(), ms_since(self.begun).into());
        json!({ "source": self.source.get(), "ms": ms })
    }

    /// Another file begins, after so many bytes of others.
    pub(super) fn set_before(&self, bytes: u64) {
        self.before.set(bytes);
    }

    /// The bytes that will be read are known.
    pub(super) fn set_total(&self, total: u64) {
        self.total.set(Some(total));
    }

    /// So many bytes were read by now.
    pub(super) fn bytes(&self, bytes: u64) {
        let Some(total) = self.total.get() else { return };
        let (now, bytes) = (ms_since(self.begun), (self.before.get() + bytes).min(total));
        if now - self.last.get() < REPORT_MS && bytes < total {
            return;
        }
        self.last.set(now);
        let mut seen = self.seen.borrow_mut();
        seen.push_back((now, bytes));
        while seen.len() > 2 && seen.front().is_some_and(|(then, _)| now - then > RATE_MS) {
            seen.pop_front();
        }
        drop(seen);
        let phase = if self.source.get() == "network" { "download" } else { "load" };
        self.send(phase, bytes, Some(total), READ_SHARE * bytes as f64 / total.max(1) as f64);
    }

    pub(super) fn send(&self, phase: &str, loaded: u64, total: Option<u64>, fraction: f64) {
        self.fraction.set(self.fraction.get().max(fraction));
        let rate = self.rate();
        let eta = rate.and_then(|rate| total.map(|total| total.saturating_sub(loaded) as f64 / rate));
        self.inner.event(
            self.id,
            &json!({ "type": "progress", "progress": {
                "phase": phase,
                "loaded": loaded,
                "total": total,
                "fraction": self.fraction.get(),
                "source": self.source.get(),
                "bytesPerSecond": rate,
                "etaSeconds": eta,
            } }),
        );
    }

    pub(super) fn notice(&self, code: &str, message: String, detail: Value) {
        let mut notice = json!({ "code": code, "message": message });
        if !detail.is_null() {
            notice["detail"] = detail;
        }
        self.inner.event(self.id, &json!({ "type": "notice", "notice": notice }));
    }

    /// Bytes a second, lately.
    fn rate(&self) -> Option<f64> {
        let seen = self.seen.borrow();
        let ((then, before), (now, bytes)) = (*seen.front()?, *seen.back()?);
        (now - then > 200.0 && bytes > before).then(|| (bytes - before) as f64 / ((now - then) / 1e3))
    }
}
