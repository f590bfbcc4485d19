//! The `load` request: bytes from the store, the network or a file, through the header and its plan, into packed weights.

use super::background::{self, Origin};
use super::files::Files;
use super::models;
use super::progress::Report;
use super::reading::Reading;
use super::wire::{self, Request};
use super::{Inner, State};
use crate::engine::{now_ms, Engine, Options, TextSide};
use crate::error::{Error, Result};
use crate::image;
use crate::kernels;
use crate::model::Model;
use crate::store::manifest;
use crate::store::opfs::{File, IMAGES};
use crate::store::reader::{Hooks, Reader, AT_ONCE};
use crate::store::remote::Miss;
use crate::store::source::{Body, Place, Source};
use crate::store::Store;
use crate::weights::Plan;
use serde_json::Value;
use std::rc::Rc;
use wasm_bindgen::JsValue;
use web_sys::AbortController;
use web_time::Instant;

/// Time given to the kernels of each type before the weights come, ms.
const WARM_UP_MS: f64 = 30.0;
/// As [`WARM_UP_MS`], on a visit that finds the model kept: the browser then keeps the compiled code of the one before too.
/// Without any warm-up a first prompt of 64 tokens took 604 ms then, with one of 280 ms 524.
const WARM_UP_AGAIN_MS: f64 = 4.0;
/// Bytes between two looks at the event loop.
const YIELD: u64 = 32 << 20;

impl Inner {
    pub(super) async fn load(self: &Rc<Self>, request: &Request, abort: &AbortController) -> Result<JsValue> {
        match &*self.state.borrow() {
            State::Empty => {}
            State::Ready(_) => return Err(Error::invalid_request("a model is loaded already")),
            State::Closed => return Err(Error::closed("the engine was closed")),
        }
        let source = Files::from_js(&request.param("source"))?;
        let all = request.json()?;
        let mut options: Options = match all.get("options") {
            None | Some(Value::Null) => Options::default(),
            Some(options) => serde_json::from_value(options.clone())
                .map_err(|e| Error::invalid_request(format!("options: {e}")))?,
        };
        options.device_bytes = wire::device_bytes();
        let report = Rc::new(Report::new(self.clone(), request.id, source.kind()));
        let warm_up = all["options"]["warmup"] != false;
        let wanted = all["source"]["sha256"].as_str().map(str::to_string);
        let image = all["options"]["fastImage"] != false;
        let job = Job { inner: self, options: &options, report: &report, abort, warm_up, image, wanted };
        let cache = all["options"]["cache"].as_str();
        let (model, plan, text) = match &source {
            Files::One(Source::Blob(blob)) => {
                report.send("plan", 0, None, 0.0);
                job.read_blob(Body::of_blob(blob)?).await?
            }
            Files::One(Source::Url(place)) => job.read_url(place, cache).await?,
            several => job.read_files(several, cache).await?,
        };
        report.send("load", plan.tensor_bytes, Some(plan.tensor_bytes), 0.98);
        let begun = Instant::now();
        let mut engine = Engine::new(model, plan, text, &source.stem(), options)?;
        if warm_up {
            report.send("warmup", 0, None, 0.99);
            self.events.turn().await;
            let choose = !all["options"]["threads"].is_u64();
            match engine.warm_up().and_then(|()| choose.then(|| engine.choose_threads()).transpose()) {
                Ok(Some(threads)) => self.threads.set(threads),
                // What an image left in its file is damaged: `read_on` sees to that.
                Ok(None) | Err(Error::Integrity(_)) => {}
                Err(error) => return Err(error),
            }
        }
        if abort.signal().aborted() {
            return Err(Error::aborted("the load was cancelled"));
        }
        report.spent("warmup", begun);
        report.send("warmup", 0, None, 1.0);
        let mut info = self.info(&engine);
        info["load"] = report.summary();
        let info = wire::to_js(&info);
        let state = &mut *self.state.borrow_mut();
        if matches!(state, State::Closed) {
            return Err(Error::closed("the engine was closed"));
        }
        *state = State::Ready(Box::new(engine));
        if let State::Ready(engine) = state {
            let kept = cache != Some("none") && engine.sessions().limits().disk_bytes > 0;
            self.keeps_sessions.set(kept);
            if kept {
                engine.sessions().write_leaving();
            }
        }
        wasm_bindgen_futures::spawn_local(self.clone().read_on());
        if warm_up {
            self.after_load(all["options"]["warmup"].as_str().map(str::to_string));
        }
        Ok(info)
    }
}

/// What the ways of reading share.
pub(super) struct Job<'a> {
    pub(super) inner: &'a Rc<Inner>,
    pub(super) options: &'a Options,
    pub(super) report: &'a Rc<Report>,
    pub(super) abort: &'a AbortController,
    pub(super) warm_up: bool,
    /// Whether an image of the packed weights is read and written.
    pub(super) image: bool,
    /// SHA-256 that the file must have.
    pub(super) wanted: Option<String>,
}

/// What every way of reading comes to.
pub(super) type Loaded = (Model, Plan, TextSide);

impl Job<'_> {
    async fn read_blob(&self, mut body: Body) -> Result<Loaded> {
        let mut reading = Reading::of_file(self, body.total, self.wanted.is_some());
        while let Some(chunk) = body.next().await? {
            let taken = reading.take(&chunk).await;
            self.report.bytes(reading.loader.position());
            if taken.is_err() || reading.has_all() {
                body.cancel();
            }
            taken?;
            if reading.has_all() {
                break;
            }
        }
        check_sha256(reading.sha256().as_deref(), self.wanted.as_deref())?;
        reading.end(body.total)
    }

    /// Reads a URL, from the store as far as that has it. A file that changed on the server, or in the store, is read again.
    async fn read_url(&self, place: &Place, cache: Option<&str>) -> Result<Loaded> {
        let (url, key) = (&place.url, &place.key);
        let begun = Instant::now();
        let store = self.open_store(cache).await;
        self.report.spent("store", begun);
        if let Some(loaded) = self.read_image(key, store.as_ref()).await? {
            return Ok(loaded);
        }
        for again in [false, true] {
            let mut reader = Reader::open(place, store.clone(), AT_ONCE, self.abort, self.hooks())
                .await
                .map_err(|e| at(url, e))?;
            let (cached, before) = (reader.is_cached(), reader.row());
            self.report.set_source(if cached { "cache" } else { "network" });
            self.report.send("plan", 0, None, 0.0);
            let error: Error = match self.read_with(&mut reader).await {
                Ok((loaded, sha256)) => {
                    let kept = reader.finish(sha256, now_ms()).await;
                    if let Some(row) = before.or(reader.row()) {
                        // One that was deleted meanwhile leaves something to sweep.
                        let chunks = kept && reader.was_partly_stored();
                        let origin = if chunks { Origin::Chunks } else { Origin::Network };
                        self.inner.later(&row, origin, kept && self.image);
                    }
                    return Ok(loaded);
                }
                Err(miss @ Miss::Changed) => {
                    reader.forget().await;
                    if !again {
                        continue;
                    }
                    miss.into()
                }
                Err(miss) => miss.into(),
            };
            reader.cancel();
            let of_bytes = error.is_of_bytes();
            if of_bytes {
                // What the store gave may have been damaged there: then those chunks alone are asked for again.
                if reader.mend().await > 0 && !again {
                    continue;
                }
                reader.forget().await;
            } else {
                reader.finish(None, now_ms()).await;
            }
            let told = reader.told();
            return Err(match (of_bytes, told.content_type) {
                (true, Some(kind)) => at(&format!("{url}, sent as {kind}"), error),
                _ => at(url, error),
            });
        }
        Err(Error::network(format!("{url} could not be read")))
    }

    async fn read_with(&self, reader: &mut Reader) -> std::result::Result<(Loaded, Option<String>), Miss> {
        let wanted = self.wanted.clone().or(reader.told().sha256);
        let known = reader.row().and_then(|row| row.sha256);
        let hash = wanted.is_some() && known != wanted;
        let mut reading = Reading::of_file(self, reader.told().bytes, hash);
        let (mut planned, mut unturned) = (false, 0);
        loop {
            let begun = Instant::now();
            let Some(chunk) = reader.next().await? else { break };
            self.report.spent("wait", begun);
            reading.take(&chunk).await?;
            unturned += u64::from(chunk.length());
            if unturned > YIELD {
                // What lies as one file is read without waiting for anything.
                unturned = 0;
                self.inner.events.turn().await;
            }
            if let (false, Some(plan)) = (planned, reading.loader.plan().cloned()) {
                planned = true;
                self.report.set_total(plan.end);
                reader.planned(plan.end, plan.packed_bytes, &reading.name()).await;
            }
            if reading.has_all() && !hash {
                break;
            }
        }
        let sha256 = reading.sha256();
        check_sha256(sha256.as_deref(), wanted.as_deref())?;
        Ok((reading.end(reader.told().bytes)?, sha256))
    }

    /// The model out of its image, where there is a sound one.
    async fn read_image(&self, key: &str, store: Option<&Store>) -> Result<Option<Loaded>> {
        let (Some(store), true) = (store, self.image) else { return Ok(None) };
        let Ok(Some(row)) = store.manifest(key).await else { return Ok(None) };
        let version = row.image.as_ref().map(|image| image.version.as_str());
        let promised = self.wanted.is_none() || self.wanted == row.sha256;
        if !row.is_complete() || !promised || version != Some(&background::version()) {
            return Ok(None);
        }
        let begun = Instant::now();
        let file = match File::read(IMAGES, &row.generation).await {
            // Another tab reads it, where only one can: that does not make it a bad one.
            Err(refusal) if refusal.locked => return Ok(None),
            file => file,
        };
        self.report.spent("open", begun);
        self.report.set_source("image");
        let loaded = match file {
            Ok(file) => self.read_image_of(file).await,
            Err(refusal) => Err(refusal.into()),
        };
        let loaded = match loaded {
            Ok(loaded) => loaded,
            // These are the model's, whatever it is read from.
            Err(
                error
                @ (Error::Aborted(_) | Error::Closed(_) | Error::TooLarge(_) | Error::InvalidRequest(_)),
            ) => return Err(error),
            Err(_) => {
                // Whether or not that is kept: it is read from the chunks, and written anew.
                let _ = store.modify(key, &row.generation, |row| row.image = None).await;
                return Ok(None);
            }
        };
        *self.inner.imaged.borrow_mut() = Some((row.source.clone(), row.generation.clone()));
        self.inner.later(&row, Origin::Image, false);
        let (store, key) = (store.clone(), key.to_string());
        wasm_bindgen_futures::spawn_local(async move {
            // Nothing waits for it or depends on it.
            let _ = store.modify(&key, &row.generation, |row| row.used_at = now_ms()).await;
        });
        Ok(Some(loaded))
    }

    async fn read_image_of(&self, mut file: File) -> Result<Loaded> {
        let begun = Instant::now();
        let mut reader = image::Reader::open(&mut file)?;
        self.check_plan(reader.plan())?;
        self.report.spent("tokenizer", begun);
        self.warm_kernels(reader.plan()).await;
        let begun = Instant::now();
        let (mut told, (_, total)) = (0, reader.progress());
        self.report.set_total(total);
        while reader.step(&mut file)? {
            let (at, _) = reader.progress();
            if at - told > YIELD {
                told = at;
                self.report.bytes(at);
                self.inner.events.turn().await;
                self.check_wanted()?;
            }
        }
        let loaded = reader.finish(file);
        self.report.spent("read", begun);
        loaded
    }

    /// While the first weights are on their way: the browser optimises what is busy, beside the rest of the load.
    pub(super) async fn warm_kernels(&self, plan: &Plan) {
        if !self.warm_up {
            return;
        }
        let begun = Instant::now();
        let ms = if self.report.is_again() { WARM_UP_AGAIN_MS } else { WARM_UP_MS };
        for dtype in plan.matrix_types() {
            kernels::warm_up(dtype, ms);
            self.inner.events.turn().await;
        }
        self.report.spent("kernels", begun);
    }

    /// Refuses what does not fit, with the numbers and what would.
    pub(super) fn check_plan(&self, plan: &Plan) -> Result<()> {
        if models::fits(plan, self.options)? {
            return Ok(());
        }
        let (error, detail) = models::too_large(plan, self.options)?;
        *self.inner.detail.borrow_mut() = Some(detail);
        Err(error)
    }

    /// Whether anybody still waits for the load.
    pub(super) fn check_wanted(&self) -> Result<()> {
        if self.abort.signal().aborted() {
            return Err(Error::aborted("the load was cancelled"));
        }
        if matches!(&*self.inner.state.borrow(), State::Closed) {
            return Err(Error::closed("the engine was closed"));
        }
        Ok(())
    }

    /// The store that the caller wants, or none and a notice.
    pub(super) async fn open_store(&self, cache: Option<&str>) -> Option<Store> {
        let place = match cache {
            Some("none") => return None,
            Some("cache-api") => Some(manifest::Place::CacheApi),
            Some("indexeddb") => Some(manifest::Place::Indexeddb),
            _ => None,
        };
        match Store::open(place).await {
            Ok(store) => Some(store),
            Err(refusal) => {
                let message = format!(
                    "nothing can be kept in this browser ({}), so the model is downloaded again at every visit",
                    refusal.message
                );
                self.report.notice("no_storage", message, Value::Null);
                None
            }
        }
    }

    pub(super) fn hooks(&self) -> Hooks {
        let (bytes, notices) = (self.report.clone(), self.report.clone());
        Hooks {
            post: Some(self.inner.post.clone()),
            on_bytes: Box::new(move |seen| bytes.bytes(seen)),
            on_notice: Box::new(move |code, message, detail| notices.notice(code, message, detail)),
        }
    }
}

/// Holds what a file's bytes came to against what was promised, where both are known.
fn check_sha256(found: Option<&str>, wanted: Option<&str>) -> Result<()> {
    match (found, wanted) {
        (Some(found), Some(wanted)) if found != wanted => {
            Err(Error::integrity(format!("the file's SHA-256 is {found}, but {wanted} was promised")))
        }
        _ => Ok(()),
    }
}

/// Hooks that tell nothing.
pub(super) fn silent() -> Hooks {
    Hooks { post: None, on_bytes: Box::new(|_| {}), on_notice: Box::new(|_, _, _| {}) }
}

/// The error with the place where it was met.
pub(super) fn at(place: &str, error: Error) -> Error {
    if error.message().contains(place) || matches!(error, Error::Aborted(_) | Error::Closed(_)) {
        return error;
    }
    error.map_message(|message| format!("{message} ({place})"))
}
