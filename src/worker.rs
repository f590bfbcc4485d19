//! The worker's exports: messages in, messages out. Requests that touch the model wait in one queue; questions about state
//! are answered at once.
//!
//! `{type:"request", id, method, params}` gets `{type:"event", id, event}`s and then exactly one
//! `{type:"done", id, result}` or `{type:"error", id, error}`; `{type:"cancel", id}` ends it early.

mod after_load;
mod background;
mod beginning;
mod files;
mod load;
mod models;
mod progress;
mod queue;
mod reading;
mod saving;
mod tokens;
mod wire;

use crate::engine::{Engine, LogitsJob};
use crate::error::{Error, Result};
use crate::openai::token_ids;
use futures_util::lock::Mutex;
use js_sys::{Float32Array, Function, Reflect, Uint32Array};
use queue::{Queued, Running};
use serde_json::{json, Value};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use tokens::Keeping;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::spawn_local;
use web_sys::AbortController;
use wire::{EventLoop, Request};

// Exports `initThreadPool`, which the shell awaits before the first request.
#[cfg(feature = "threads")]
pub use wasm_bindgen_rayon::init_thread_pool;

/// Everything the worker's shell needs: pass each message to [`QandleWorker::handle`].
#[wasm_bindgen]
pub struct QandleWorker(Rc<Inner>);

struct Inner {
    post: Function,
    threads: Cell<usize>,
    state: RefCell<State>,
    queue: RefCell<VecDeque<Queued>>,
    running: RefCell<HashMap<u32, Running>>,
    busy: Cell<bool>,
    events: EventLoop,
    /// What ends the requests that run beside the queue.
    asides: RefCell<HashMap<u32, AbortController>>,
    /// Source and generation whose chunks were mended after it was loaded: the weights in memory are not to be trusted.
    stale: RefCell<Option<(String, String)>>,
    /// Whether these chunks must be verified before they are read.
    unverified: Cell<bool>,
    /// Source and generation of an image of which some is still in its file.
    imaged: RefCell<Option<(String, String)>>,
    /// Whether sessions are kept on disk, are being written, and were swept there, and whose turn it is to read or write.
    keeps_sessions: Cell<bool>,
    saver: Cell<bool>,
    swept: Cell<bool>,
    /// Whether the next turn's beginning is being computed.
    working_ahead: Cell<bool>,
    disk: Mutex<()>,
    /// Whether token ids are kept between visits.
    keeping: Cell<Keeping>,
    /// Numbers for the error that the load under way ends in.
    detail: RefCell<Option<Value>>,
}

enum State {
    Empty,
    Ready(Box<Engine>),
    Closed,
}

#[wasm_bindgen]
impl QandleWorker {
    /// `post(message, transfer)` sends to the page; `threads` is the size of the started pool; a panic on any thread is
    /// announced on the `BroadcastChannel` named `death_channel`, as the engine's own thread may be blocked by then.
    #[wasm_bindgen(constructor)]
    pub fn new(
        post: Function,
        threads: usize,
        death_channel: Option<String>,
    ) -> std::result::Result<QandleWorker, JsValue> {
        wire::announce_panics(death_channel);
        Ok(QandleWorker(Rc::new(Inner {
            post,
            threads: Cell::new(threads),
            state: RefCell::new(State::Empty),
            queue: RefCell::new(VecDeque::new()),
            running: RefCell::new(HashMap::new()),
            busy: Cell::new(false),
            events: EventLoop::new()?,
            asides: RefCell::new(HashMap::new()),
            stale: RefCell::new(None),
            unverified: Cell::new(false),
            imaged: RefCell::new(None),
            keeps_sessions: Cell::new(false),
            saver: Cell::new(false),
            swept: Cell::new(false),
            working_ahead: Cell::new(false),
            disk: Mutex::new(()),
            keeping: Cell::new(Keeping::Off),
            detail: RefCell::new(None),
        })))
    }

    /// Takes one message. Never throws; what it starts goes on by itself.
    pub fn handle(&self, message: JsValue) {
        let inner = &self.0;
        match wire::text(&message, "type").as_deref() {
            Some("cancel") => {
                if let Some(id) = wire::id(&message) {
                    inner.cancel(id);
                }
            }
            Some("request") => {
                if let Some(request) = Request::read(&message) {
                    inner.accept(request);
                }
            }
            _ => {}
        }
    }
}

impl Inner {
    fn accept(self: &Rc<Self>, request: Request) {
        match request.method.as_str() {
            "load" | "chat" | "completion" | "logits" => self.enqueue(request),
            method if method.starts_with("models.") => self.answer_about_models(request),
            method if method.starts_with("sessions.") => self.answer_about_sessions(request),
            _ => {
                let result = self.answer(&request);
                self.settle(request.id, result);
                self.keep_tokens();
            }
        }
    }

    /// Computes the next turn's beginning until somebody asks something.
    fn work_ahead(self: &Rc<Self>) {
        if self.with(|engine| Ok(engine.is_ahead())).unwrap_or(false) && !self.working_ahead.replace(true) {
            let inner = self.clone();
            spawn_local(async move {
                loop {
                    inner.events.turn().await;
                    // Where it fails, the turn will say why.
                    if inner.busy.get() || !inner.with(Engine::work_ahead).unwrap_or(false) {
                        break;
                    }
                }
                inner.working_ahead.set(false);
            });
        }
    }

    /// Answers what needs no model pass.
    fn answer(&self, request: &Request) -> Result<JsValue> {
        if request.method == "close" {
            *self.state.borrow_mut() = State::Closed;
            self.running.borrow().values().for_each(|running| running.abort.abort());
            self.asides.borrow().values().for_each(AbortController::abort);
            return Ok(JsValue::NULL);
        }
        let params = request.json()?;
        let word = |key: &str| params[key].as_str().map(str::to_string);
        let string =
            |key: &str| word(key).ok_or_else(|| Error::invalid_request(format!("{key} must be a string")));
        self.with(|engine| match request.method.as_str() {
            "tokenize" => {
                let ids = engine.tokenize(&string("text")?, params["special"] == true)?;
                Ok(Uint32Array::from(&ids[..]).into())
            }
            "detokenize" => {
                let text = engine.detokenize(&request.ids("ids")?, params["special"] == true)?;
                Ok(text.into())
            }
            "countTokens" => Ok((engine.count_tokens(&params["input"])? as f64).into()),
            "applyChatTemplate" => {
                let options = params["options"].as_object().cloned().unwrap_or_default();
                Ok(engine.apply_chat_template(&params["messages"], &options)?.into())
            }
            "info" => Ok(wire::to_js(&self.info(engine))),
            "metrics" => {
                let mut metrics = engine.metrics();
                metrics["memory"] = engine.memory(wire::wasm_bytes());
                Ok(wire::to_js(&metrics))
            }
            "profile" => Ok(wire::to_js(&crate::metrics::profile())),
            "responses.stats" => Ok(wire::to_js(&engine.responses().stats())),
            "responses.clear" => {
                engine.responses().clear();
                Ok(JsValue::NULL)
            }
            other => Err(Error::invalid_request(format!("{other} is not available in this version"))),
        })
    }

    async fn logits(&self, request: &Request, cancelled: &Cell<bool>) -> Result<JsValue> {
        let all = request.json()?["all"] == true;
        let ids = request.ids("ids")?;
        let (mut job, vocab): (LogitsJob, usize) =
            self.with(|engine| Ok((engine.logits(ids, all)?, engine.vocab_size())))?;
        let len = u32::try_from(job.rows() * vocab).map_err(|_| Error::too_large("that many logits"))?;
        let out = Float32Array::new_with_length(len);
        while !job.is_done() {
            self.events.turn().await;
            if cancelled.get() {
                return Err(Error::aborted("the request was cancelled"));
            }
            self.save_leaving().await;
            if let Some((first, rows)) = self.with(|engine| engine.step_logits(&mut job))? {
                // SAFETY: the view is used at once, before anything can grow the memory under it.
                let view = unsafe { Float32Array::view(&rows) };
                out.set(&view, (first * vocab) as u32);
            }
        }
        Ok(out.into())
    }

    /// Runs `f` on the loaded engine.
    fn with<R>(&self, f: impl FnOnce(&mut Engine) -> Result<R>) -> Result<R> {
        match &mut *self.state.borrow_mut() {
            State::Ready(engine) => f(engine),
            State::Empty => Err(Error::invalid_request("no model is loaded")),
            State::Closed => Err(Error::closed("the engine was closed")),
        }
    }

    fn info(&self, engine: &Engine) -> Value {
        let mut info = engine.info();
        let tier = if cfg!(target_feature = "relaxed-simd") { "relaxed" } else { "simd128" };
        info["runtime"] = json!({ "tier": tier, "threads": self.threads.get(), "isolated": false, "version": env!("CARGO_PKG_VERSION") });
        info["memory"] = engine.memory(wire::wasm_bytes());
        info
    }

    /// What the requests that have ended came to, for who watches.
    fn tell_metrics(&self) {
        let records = self.with(|engine| Ok(engine.take_records(wire::wasm_bytes()))).unwrap_or_default();
        for metrics in records {
            self.event(0, &json!({ "type": "metrics", "metrics": metrics }));
        }
    }

    fn event(&self, id: u32, event: &Value) {
        self.send(json!({ "type": "event", "id": id }), "event", wire::to_js(event));
    }

    /// The one answer that ends a request.
    fn settle(&self, id: u32, result: Result<JsValue>) {
        let memory = match &*self.state.borrow() {
            State::Ready(engine) => engine.memory(wire::wasm_bytes()),
            _ => {
                json!({ "wasmBytes": wire::wasm_bytes(), "weightsBytes": 0, "kvBytes": 0, "responseBytes": 0, "tokenizerBytes": 0 })
            }
        };
        match result {
            Ok(value) => self.send(json!({ "type": "done", "id": id, "memory": memory }), "result", value),
            Err(error) => {
                let mut error = json!({ "code": error.code(), "message": error.message() });
                if let Some(detail) = self.detail.borrow_mut().take().filter(|_| error["code"] == "too_large")
                {
                    error["detail"] = detail;
                }
                self.send(
                    json!({ "type": "error", "id": id, "memory": memory }),
                    "error",
                    wire::to_js(&error),
                );
            }
        }
    }

    fn send(&self, envelope: Value, key: &str, value: JsValue) {
        let message = wire::to_js(&envelope);
        // Setting a member of a plain object that was just made cannot fail.
        let _ = Reflect::set(&message, &key.into(), &value);
        if let Err(error) = self.post.call1(&JsValue::NULL, &message) {
            web_sys::console::error_2(&"qandle: a message could not be sent".into(), &error);
        }
    }
}

/// Ids out of a JSON array or any array-like of numbers.
fn ids_of(value: &Value) -> Result<Vec<u32>> {
    value
        .as_array()
        .map(|ids| token_ids(ids))
        .unwrap_or_else(|| Err(Error::invalid_request("ids must be an array")))
}
