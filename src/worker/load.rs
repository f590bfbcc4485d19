//! The `load` request: bytes from the network or a file, through the header and its plan, into packed weights.

use super::wire::{self, Request};
use super::{Inner, State};
use crate::engine::{Engine, Options, TextSide};
use crate::error::{Error, Result};
use crate::kernels;
use crate::store::source::{Body, Source};
use crate::weights::{Loader, Plan};
use js_sys::Uint8Array;
use serde_json::{json, Value};
use wasm_bindgen::JsValue;
use web_sys::AbortController;
use web_time::Instant;

/// Bytes that cross into wasm at a time.
const PIECE: usize = 256 << 10;
/// Progress is told this often at most, ms.
const REPORT_MS: f64 = 100.0;
/// Time given to the kernels of each type before the weights come, ms.
const WARM_UP_MS: f64 = 30.0;
/// Bytes behind the last tensor that are read all the same, so that the usual request ends by itself.
const TAIL: u64 = 1 << 20;
/// Share of the whole bar that reading the weights has; the rest is set-up.
const READ_SHARE: f64 = 0.97;

impl Inner {
    pub(super) async fn load(&self, request: &Request, abort: &AbortController) -> Result<JsValue> {
        match &*self.state.borrow() {
            State::Empty => {}
            State::Ready(_) => return Err(Error::invalid_request("a model is loaded already")),
            State::Closed => return Err(Error::closed("the engine was closed")),
        }
        let source = Source::from_js(&request.param("source"))?;
        let all = request.json()?;
        let options = match all.get("options") {
            None | Some(Value::Null) => Options::default(),
            Some(options) => serde_json::from_value(options.clone())
                .map_err(|e| Error::invalid_request(format!("options: {e}")))?,
        };
        refuse_unavailable(&all)?;
        let mut report = Report::new(self, request.id, source.kind());
        report.send("plan", 0, None, 0.0);
        let mut body = source.open(abort).await?;
        let warm_up = all["options"]["warmup"] != false;
        let result = self.read(&mut body, &options, &mut report, abort, warm_up).await;
        if result.is_err() {
            body.cancel();
        }
        let (loader, text) = result?;
        let (model, plan) = loader.finish()?;
        report.send("load", plan.tensor_bytes, Some(plan.tensor_bytes), 0.98);
        let mut engine = Engine::new(model, plan, text, &source.stem(), options)?;
        if warm_up {
            report.send("warmup", 0, None, 0.99);
            self.events.turn().await;
            engine.warm_up()?;
            if !all["options"]["threads"].is_u64() {
                self.threads.set(engine.choose_threads()?);
            }
        }
        if abort.signal().aborted() {
            return Err(Error::aborted("the load was cancelled"));
        }
        report.send("warmup", 0, None, 1.0);
        let info = wire::to_js(&self.info(&engine));
        let state = &mut *self.state.borrow_mut();
        if matches!(state, State::Closed) {
            return Err(Error::closed("the engine was closed"));
        }
        *state = State::Ready(Box::new(engine));
        Ok(info)
    }

    async fn read(
        &self,
        body: &mut Body,
        options: &Options,
        report: &mut Report<'_>,
        abort: &AbortController,
        warm_up: bool,
    ) -> Result<(Loader, TextSide)> {
        let mut loader = Loader::new(body.total);
        let mut text = None;
        let mut piece = vec![0; PIECE];
        while let Some(chunk) = body.next().await? {
            let mut at = 0;
            while at < chunk.length() {
                let n = (chunk.length() - at).min(PIECE as u32);
                Uint8Array::subarray(&chunk, at, at + n).copy_to(&mut piece[..n as usize]);
                loader.push(&piece[..n as usize])?;
                at += n;
                if text.is_none() {
                    text = text_side(&mut loader, options)?;
                    if warm_up && text.is_some() {
                        self.warm_kernels(&loader).await;
                    }
                }
            }
            if let Some(plan) = loader.plan() {
                report.reading(loader.position().min(plan.end), plan);
                if loader.is_complete() && loader.position() > plan.end + TAIL {
                    body.cancel();
                    break;
                }
            }
            if abort.signal().aborted() {
                return Err(Error::aborted("the load was cancelled"));
            }
            if matches!(&*self.state.borrow(), State::Closed) {
                return Err(Error::closed("the engine was closed"));
            }
        }
        if let Some(total) =
            body.announced.filter(|total| loader.position() < *total && !loader.is_complete())
        {
            return Err(Error::network(format!(
                "the body ended after {} of {total} bytes",
                loader.position()
            )));
        }
        match text {
            Some(text) => Ok((loader, text)),
            // The header is not whole: finish says what is wrong.
            None => loader.finish().and_then(|_| Err(Error::bad_model("the file ends in its header"))),
        }
    }
}

impl Inner {
    /// While the first weights are on their way: the browser optimises what is busy, beside the rest of the load.
    async fn warm_kernels(&self, loader: &Loader) {
        for dtype in loader.plan().map(Plan::matrix_types).unwrap_or_default() {
            kernels::warm_up(dtype, WARM_UP_MS);
            self.events.turn().await;
        }
    }
}

/// Tokenizer and template, as soon as the header is whole: what building them needs is freed before the weights come.
fn text_side(loader: &mut Loader, options: &Options) -> Result<Option<TextSide>> {
    let Some(plan) = loader.plan().cloned() else { return Ok(None) };
    let planned = Engine::planned_bytes(&plan, options)?;
    let most = 4096u64 << 20;
    if planned + (64 << 20) > most {
        return Err(Error::too_large(format!(
            "weights and the KV cache of the whole context need {planned} bytes, wasm memory holds {most}; ask for a smaller contextLength"
        )));
    }
    match loader.metadata() {
        Some(metadata) => TextSide::from_gguf(metadata, &plan).map(Some),
        None => Ok(None),
    }
}

/// Options of the public contract that this version cannot honour are refused, not ignored.
fn refuse_unavailable(params: &Value) -> Result<()> {
    let options = &params["options"];
    let asked = [
        (
            "cache",
            matches!(options["cache"].as_str(), Some("cache-api" | "indexeddb")),
            "weights are not kept between visits",
        ),
        ("fastImage", options["fastImage"] == true, "weights are not kept between visits"),
        ("sha256", params["source"]["sha256"].is_string(), "weights are not verified by hash"),
    ];
    match asked.into_iter().find(|(_, asked, _)| *asked) {
        Some((name, _, why)) => {
            Err(Error::invalid_request(format!("{name} is not available in this version: {why}")))
        }
        None => Ok(()),
    }
}

/// Tells progress: one fraction that only rises.
struct Report<'a> {
    inner: &'a Inner,
    id: u32,
    source: &'static str,
    begun: Instant,
    last: f64,
    fraction: f64,
}

impl<'a> Report<'a> {
    fn new(inner: &'a Inner, id: u32, source: &'static str) -> Self {
        Self { inner, id, source, begun: Instant::now(), last: f64::NEG_INFINITY, fraction: 0.0 }
    }

    fn reading(&mut self, loaded: u64, plan: &Plan) {
        let ms = crate::metrics::ms_since(self.begun);
        if ms - self.last < REPORT_MS && loaded < plan.end {
            return;
        }
        self.last = ms;
        let phase = if self.source == "network" { "download" } else { "load" };
        self.send(phase, loaded, Some(plan.end), READ_SHARE * loaded as f64 / plan.end.max(1) as f64);
    }

    fn send(&mut self, phase: &str, loaded: u64, total: Option<u64>, fraction: f64) {
        self.fraction = self.fraction.max(fraction);
        let seconds = crate::metrics::ms_since(self.begun) / 1e3;
        let rate = (loaded > 0 && seconds > 0.2).then(|| loaded as f64 / seconds);
        let eta = rate.and_then(|rate| total.map(|total| total.saturating_sub(loaded) as f64 / rate));
        self.inner.event(
            self.id,
            &json!({ "type": "progress", "progress": {
                "phase": phase,
                "loaded": loaded,
                "total": total,
                "fraction": self.fraction,
                "source": self.source,
                "bytesPerSecond": rate,
                "etaSeconds": eta,
            } }),
        );
    }
}
