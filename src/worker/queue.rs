//! The queue of requests that touch the model. Chats and completions run together, in steps between which the event loop
//! turns; a load and a request for logits run alone. Of requests that name the same session, one runs at a time.

use super::tokens::Keeping;
use super::wire::{self, Request};
use super::Inner;
use crate::engine::{now_ms, Job, Outcome};
use crate::error::{Error, Result};
use crate::openai::Body;
use serde_json::{json, Value};
use std::cell::Cell;
use std::rc::Rc;
use wasm_bindgen::JsValue;
use wasm_bindgen_futures::spawn_local;
use web_sys::AbortController;
use web_time::Instant;

/// A request that waits.
pub(super) struct Queued {
    pub(super) request: Request,
    arrived: Instant,
    /// The body of a chat or a completion.
    body: Value,
    disk: Disk,
    /// Whether its session was deleted while it was looked for: then nothing stays of it.
    forgotten: bool,
}

/// Whether a request's session was looked for on disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disk {
    Unread,
    Reading,
    Read,
}

/// A request that is worked on; `cancelled` is looked at between steps.
pub(super) struct Running {
    cancelled: Rc<Cell<bool>>,
    pub(super) abort: AbortController,
}

/// A chat or a completion that is worked on.
struct Active {
    id: u32,
    session: Option<String>,
    job: Job,
    cancelled: Rc<Cell<bool>>,
}

impl Queued {
    fn runs_alone(&self) -> bool {
        matches!(self.request.method.as_str(), "load" | "logits")
    }

    fn session(&self) -> Option<&str> {
        self.body["session_id"].as_str().filter(|id| !id.is_empty())
    }
}

impl Inner {
    pub(super) fn enqueue(self: &Rc<Self>, request: Request) {
        let arrived = Instant::now();
        let mut body = Value::Null;
        if matches!(request.method.as_str(), "chat" | "completion") {
            match request.json() {
                Ok(mut params) => body = params["body"].take(),
                Err(error) => return self.settle(request.id, Err(error)),
            }
            if let (Some(ids), Some(body)) = (request.prompt_ids(), body.as_object_mut()) {
                body.insert("prompt".to_string(), ids.into());
            }
        }
        self.queue.borrow_mut().push_back(Queued {
            request,
            arrived,
            body,
            disk: Disk::Unread,
            forgotten: false,
        });
        self.go_on();
    }

    /// Works on the queue, if nobody does.
    pub(super) fn go_on(self: &Rc<Self>) {
        if !self.busy.replace(true) {
            spawn_local(self.clone().drive());
        }
    }

    pub(super) fn cancel(&self, id: u32) {
        if let Some(running) = self.running.borrow().get(&id) {
            running.cancelled.set(true);
            running.abort.abort();
            return;
        }
        if let Some(abort) = self.asides.borrow().get(&id) {
            abort.abort();
            return;
        }
        let waiting = self.queue.borrow().iter().position(|q| q.request.id == id);
        if let Some(at) = waiting {
            self.queue.borrow_mut().remove(at);
            self.settle(id, Err(Error::aborted("the request was cancelled while it waited")));
        }
    }

    async fn drive(self: Rc<Self>) {
        let mut active: Vec<Active> = Vec::new();
        loop {
            if active.is_empty() {
                let stale = self.stale.borrow_mut().take();
                if let Some((source, generation)) = stale {
                    self.reload(&source, &generation).await;
                }
            }
            while let Some(next) = self.next(&active) {
                if next.runs_alone() {
                    let result = self.run_alone(&next.request).await;
                    self.end(next.request.id, result);
                } else {
                    active.extend(self.begin(next));
                }
            }
            if active.is_empty() && self.queue.borrow().is_empty() {
                break;
            }
            self.events.turn().await;
            self.step(&mut active);
            // Their pages are room for those that are worked on.
            self.save_leaving().await;
        }
        self.busy.set(false);
        self.work_ahead();
        self.save_later();
        self.keep_tokens();
    }

    /// The next request that may run beside those that do. What another one holds up is passed over, but not by what runs
    /// alone.
    fn next(self: &Rc<Self>, active: &[Active]) -> Option<Queued> {
        let mut queue = self.queue.borrow_mut();
        let most = self.with(|engine| Ok(engine.sessions().limits().max_batch_size)).unwrap_or(1);
        let waits = !active.is_empty() && (self.stale.borrow().is_some() || active.len() >= most.max(1));
        let mut held: Vec<String> = active.iter().filter_map(|active| active.session.clone()).collect();
        for at in 0..queue.len() {
            let queued = &mut queue[at];
            if waits || (queued.runs_alone() && (at > 0 || !active.is_empty())) {
                return None;
            }
            let session = queued.session().map(str::to_string);
            if session.as_ref().is_some_and(|id| held.contains(id)) {
                continue;
            }
            if queued.disk == Disk::Unread && session.as_ref().is_some_and(|id| self.may_be_on_disk(id)) {
                queued.disk = Disk::Reading;
                spawn_local(
                    self.clone().look_on_disk(queued.request.id, session.clone().unwrap_or_default()),
                );
            }
            if queued.disk != Disk::Reading {
                return queue.remove(at);
            }
            held.extend(session);
        }
        None
    }

    pub(super) fn may_be_on_disk(&self, id: &str) -> bool {
        let missing = self.with(|engine| Ok(!engine.sessions().has(id, now_ms()))).unwrap_or_default();
        self.keeps_sessions.get() && missing
    }

    async fn look_on_disk(self: Rc<Self>, request: u32, session: String) {
        self.restore_session(&session).await;
        if let Some(queued) = self.queue.borrow_mut().iter_mut().find(|q| q.request.id == request) {
            queued.disk = Disk::Read;
        }
    }

    /// What is being looked for on disk was deleted: one session, or all.
    pub(super) fn forget_waiting(&self, id: Option<&str>) {
        let mut queue = self.queue.borrow_mut();
        for queued in queue.iter_mut().filter(|queued| queued.disk != Disk::Unread) {
            queued.forgotten |= id.is_none_or(|id| queued.session() == Some(id));
        }
    }

    async fn run_alone(self: &Rc<Self>, request: &Request) -> Result<JsValue> {
        let (cancelled, abort) = self.running(request.id)?;
        if request.method == "logits" {
            return self.logits(request, &cancelled).await;
        }
        let loaded = self.load(request, &abort).await?;
        let keeps = request.json()?["options"]["cache"] != "none";
        self.keeping.set(if keeps { Keeping::Ready } else { Keeping::Off });
        Ok(loaded)
    }

    fn running(&self, id: u32) -> Result<(Rc<Cell<bool>>, AbortController)> {
        let cancelled = Rc::new(Cell::new(false));
        let abort = AbortController::new().map_err(|_| Error::network("AbortController is missing"))?;
        let running = Running { cancelled: cancelled.clone(), abort: abort.clone() };
        self.running.borrow_mut().insert(id, running);
        Ok((cancelled, abort))
    }

    fn begin(self: &Rc<Self>, next: Queued) -> Option<Active> {
        let id = next.request.id;
        let session = next.session().map(str::to_string);
        let begun = self.running(id).and_then(|(cancelled, _)| {
            let job = self.with(|engine| {
                let parse = if next.request.method == "chat" { Body::chat } else { Body::completion };
                let body = parse(&next.body, engine.n_tokens())?;
                let job = engine.begin(body, next.arrived, wire::random_u64())?;
                if let Some(id) = session.as_ref().filter(|_| next.forgotten) {
                    engine.sessions().delete(id);
                }
                Ok(job)
            })?;
            Ok(Active { id, session, job, cancelled })
        });
        begun.map_err(|error| self.end(id, Err(error))).ok()
    }

    /// One step of all that is worked on; what has ended is answered and taken away.
    fn step(self: &Rc<Self>, active: &mut Vec<Active>) {
        let mut outcomes = Vec::new();
        for (at, Active { job, cancelled, .. }) in active.iter_mut().enumerate() {
            if cancelled.get() {
                outcomes.push((
                    at,
                    match job.is_stream() && job.has_begun() {
                        true => self.with(|engine| Ok(engine.abort(job))),
                        false => Err(Error::aborted("the request was cancelled")),
                    },
                ));
            }
        }
        if outcomes.is_empty() && !active.is_empty() {
            let mut jobs: Vec<&mut Job> = active.iter_mut().map(|active| &mut active.job).collect();
            match self.with(|engine| Ok(engine.step_all(&mut jobs))) {
                Ok(stepped) => outcomes = stepped,
                // The engine was closed: so all end.
                Err(_) => {
                    outcomes.extend((0..active.len()).map(|at| (at, self.with(|_| Ok(Outcome::default())))))
                }
            }
        }
        let mut ended = Vec::new();
        for (at, outcome) in outcomes {
            let result = match outcome {
                Ok(Outcome { chunks, done }) => {
                    // As text: the page reads it sooner than its objects could be made from here, one by one.
                    if !chunks.is_empty() {
                        let chunks = Value::Array(chunks).to_string();
                        self.event(active[at].id, &json!({ "type": "chunks", "chunks": chunks }));
                    }
                    done.map(|reply| Ok(wire::to_js(&reply)))
                }
                Err(error) => Some(Err(error)),
            };
            ended.extend(result.map(|result| (at, result)));
        }
        ended.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        for (at, result) in ended {
            let Active { id, job, .. } = active.remove(at);
            // A closed engine has no place for the session any more.
            let _ = self.with(|engine| {
                engine.drop_job(job);
                Ok(())
            });
            self.end(id, result);
        }
    }

    fn end(self: &Rc<Self>, id: u32, result: Result<JsValue>) {
        self.running.borrow_mut().remove(&id);
        if matches!(result, Err(Error::Integrity(_))) {
            self.give_up_image();
        }
        self.settle(id, result);
        self.tell_metrics();
    }
}
