//! A file on a server, by ranges: what each answer must look like, and what is tried again.

use super::browser::{describe, error_name, follow, sleep};
use super::manifest::{Manifest, CHUNK, MOST_BYTES};
use super::source::{fetch, Answer, Body};
use crate::error::{Error, Result};
use js_sys::{ArrayBuffer, Function, Math, Promise, Uint8Array};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::task::Poll;
use wasm_bindgen_futures::JsFuture;
use web_sys::{AbortController, AbortSignal, Response};

/// Waits before a request is sent again, ms; as many tries more.
const WAITS: [i32; 4] = [300, 1000, 3000, 8000];
/// Bytes of a request: a chunk is asked for in parts, by several requests at once, so that a download that ends anywhere
/// loses little more than one chunk.
const PART: u64 = CHUNK / 2;
/// Tries that fail without a byte in between, over all chunks, before the download does.
const BUDGET: u32 = 12;

/// What the first answer told about the file.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// The file's length, where the server lets it be read.
    pub bytes: Option<u64>,
    /// Its `ETag`.
    pub etag: Option<String>,
    /// Its `Last-Modified`.
    pub last_modified: Option<String>,
    /// SHA-256 of the file, where the host tells it.
    pub sha256: Option<String>,
    /// What the server takes it for.
    pub content_type: Option<String>,
}

impl Told {
    /// What a row says of the file at a URL. Each mirror has validators of its own.
    pub fn of(row: &Manifest, url: &str) -> Self {
        let same = row.url == url;
        Self {
            bytes: Some(row.bytes),
            etag: row.etag.clone().filter(|_| same),
            last_modified: row.last_modified.clone().filter(|_| same),
            sha256: row.told_sha256.clone(),
            ..Self::default()
        }
    }
}

/// How the first answer can be read.
pub enum First {
    /// The server sends ranges; this one ends there: the first chunk.
    Range(Body, u64),
    /// It sends only the whole file.
    Whole(Body),
}

/// Why a chunk did not come.
#[derive(Debug, Clone)]
pub enum Miss {
    /// The server has another file now.
    Changed,
    /// The server sends the whole file where a range was asked for.
    NoRanges,
    /// Tried often enough, or not worth another try.
    Failed(Error),
}

impl From<Miss> for Error {
    fn from(miss: Miss) -> Self {
        match miss {
            Miss::Changed => Error::network("the file changes while it is read"),
            Miss::NoRanges => Error::network("a range was asked for, and something else came"),
            Miss::Failed(error) => error,
        }
    }
}

impl From<Error> for Miss {
    fn from(error: Error) -> Self {
        Miss::Failed(error)
    }
}

/// A file on a server.
pub struct Remote {
    /// Where it is.
    pub url: String,
    abort: AbortController,
    told: RefCell<Option<Told>>,
    /// Bytes that came from the network.
    pub received: Cell<u64>,
    failures: Cell<u32>,
    /// Nothing more is wanted.
    ended: Cell<bool>,
    /// Requests that may be sent at once.
    slots: Slots,
}

impl Remote {
    /// The file at a URL, of which nothing is asked yet. `wanted` ends it, whatever is under way.
    ///
    /// # Errors
    /// `network` where the browser has no `AbortController`.
    pub fn new(url: &str, at_once: usize, wanted: &AbortSignal) -> Result<Self> {
        let abort = AbortController::new().map_err(|_| Error::network("AbortController is missing"))?;
        follow(wanted, &abort);
        Ok(Self {
            slots: Slots::new(at_once),
            url: url.to_string(),
            abort,
            told: RefCell::new(None),
            received: Cell::new(0),
            failures: Cell::new(0),
            ended: Cell::new(false),
        })
    }

    /// What is known of the file, once an answer came.
    pub fn told(&self) -> Told {
        self.told.borrow().clone().unwrap_or_default()
    }

    /// Asks for the first chunk.
    ///
    /// # Errors
    /// `network`, `http_status`, `aborted`.
    pub async fn first(&self) -> Result<First> {
        match self.again(|| self.try_first()).await {
            Ok(first) => Ok(first),
            // Some servers (and browsers, where an answer is encoded) have trouble with ranges alone.
            Err(Miss::Failed(error @ Error::Network(_))) => {
                self.whole().await.map(First::Whole).map_err(|_| error)
            }
            Err(miss) => Err(miss.into()),
        }
    }

    /// Ends what is under way.
    pub fn end(&self) {
        self.ended.set(true);
        self.abort.abort();
    }

    async fn try_first(&self) -> std::result::Result<First, Miss> {
        let mut answer = fetch(&self.url, Some(&format!("bytes=0-{}", CHUNK - 1)), &self.abort).await?;
        let response = Clone::clone(&answer.response);
        let told = told_by(&response);
        match response.status() {
            206 if content_range(&response).is_none_or(|(from, _)| from == 0) => {
                let length = content_length(&response);
                let bytes = told.bytes.or(length.filter(|length| *length < CHUNK));
                let end = bytes.map_or(CHUNK, |bytes| bytes.min(CHUNK));
                *self.told.borrow_mut() = Some(Told { bytes, ..told });
                Ok(First::Range(answer.body()?, end))
            }
            200..=299 => {
                let mut body = answer.body()?;
                body.total = content_length(&response).filter(|_| !hides_encoding(&response));
                *self.told.borrow_mut() = Some(Told { bytes: body.total, ..told });
                Ok(First::Whole(body))
            }
            _ => Err(self.refused(&response)),
        }
    }

    /// Bytes of the file, exactly those.
    pub async fn range(&self, range: Range<u64>) -> std::result::Result<Uint8Array, Miss> {
        self.range_telling(range, None, &|| {}).await
    }

    /// As [`Remote::range`]; `room` is memory for just as many, `tell` is called when bytes came.
    pub async fn range_telling(
        &self,
        range: Range<u64>,
        room: Option<ArrayBuffer>,
        tell: &dyn Fn(),
    ) -> std::result::Result<Uint8Array, Miss> {
        let out = match &room {
            Some(room) => Uint8Array::new(room),
            None => Uint8Array::new_with_length((range.end - range.start) as u32),
        };
        let starts = (range.start..range.end).step_by(PART as usize);
        let mut parts: Vec<_> = starts
            .map(|from| {
                let part = from..range.end.min(from + PART);
                let place = out.subarray((part.start - range.start) as u32, (part.end - range.start) as u32);
                Some(Box::pin(async move {
                    let _slot = self.slots.take().await;
                    self.again(|| self.try_range(part.clone(), &place, tell)).await
                }))
            })
            .collect();
        // All at once; the first that fails ends them all.
        std::future::poll_fn(|context| {
            for part in &mut parts {
                let Some(future) = part else { continue };
                match future.as_mut().poll(context) {
                    Poll::Ready(Ok(())) => *part = None,
                    Poll::Ready(Err(miss)) => return Poll::Ready(Err(miss)),
                    Poll::Pending => {}
                }
            }
            if parts.iter().all(Option::is_none) {
                Poll::Ready(Ok(()))
            } else {
                Poll::Pending
            }
        })
        .await?;
        Ok(out)
    }

    async fn try_range(
        &self,
        range: Range<u64>,
        place: &Uint8Array,
        tell: &dyn Fn(),
    ) -> std::result::Result<(), Miss> {
        let header = format!("bytes={}-{}", range.start, range.end - 1);
        let answer = fetch(&self.url, Some(&header), &self.abort).await?;
        let response = Clone::clone(&answer.response);
        let now = told_by(&response);
        match response.status() {
            206 => {
                let other = content_range(&response).is_some_and(|(from, _)| from != range.start);
                if other || !self.is_same(&now) {
                    return Err(Miss::Changed);
                }
                self.collect(answer, place, tell).await
            }
            416 => Err(Miss::Changed),
            200..=299 if !self.is_same(&now) => Err(Miss::Changed),
            200..=299 => Err(Miss::NoRanges),
            _ => Err(self.refused(&response)),
        }
    }

    /// The whole file from its beginning, for servers that send no ranges.
    ///
    /// # Errors
    /// As all requests; `Changed` where an earlier answer was about another file.
    pub async fn whole(&self) -> std::result::Result<Body, Miss> {
        let mut answer = fetch(&self.url, None, &self.abort).await?;
        let response = Clone::clone(&answer.response);
        if !response.ok() {
            return Err(self.refused(&response));
        }
        let mut body = answer.body()?;
        body.total = content_length(&response).filter(|_| !hides_encoding(&response));
        let now = Told { bytes: body.total, ..told_by(&response) };
        if !self.is_same(&now) {
            return Err(Miss::Changed);
        }
        *self.told.borrow_mut() = Some(now);
        Ok(body)
    }

    /// Holds what a stored row or an earlier answer said against this answer; the first one is kept.
    fn is_same(&self, now: &Told) -> bool {
        let mut told = self.told.borrow_mut();
        let Some(then) = &*told else {
            *told = Some(now.clone());
            return true;
        };
        let differ = |a: &Option<String>, b: &Option<String>| a.is_some() && b.is_some() && a != b;
        let tags = then.etag.is_some() && now.etag.is_some();
        let bytes = then.bytes.is_some() && now.bytes.is_some() && then.bytes != now.bytes;
        !(bytes
            || differ(&then.etag, &now.etag)
            || (!tags && differ(&then.last_modified, &now.last_modified)))
    }

    /// What a stored row says of the file, to hold the answers against.
    pub fn expect(&self, told: Told) {
        *self.told.borrow_mut() = Some(told);
    }

    /// Reads a body into its place.
    async fn collect(
        &self,
        mut answer: Answer,
        place: &Uint8Array,
        tell: &dyn Fn(),
    ) -> std::result::Result<(), Miss> {
        let mut body = answer.body()?;
        let (wanted, mut at) = (place.length(), 0);
        while let Some(piece) = body.next().await? {
            let n = piece.length();
            if n > wanted - at {
                body.cancel();
                return Err(Miss::NoRanges);
            }
            place.set(&piece, at);
            body.used(&piece);
            at += n;
            self.count(u64::from(n), true);
            tell();
        }
        if at < wanted {
            let message = format!("{} ended after {at} of {wanted} bytes", self.url);
            return Err(Miss::Failed(Error::network(message)));
        }
        Ok(())
    }

    /// Bytes came. New ones: the network works.
    pub fn count(&self, bytes: u64, new: bool) {
        self.received.set(self.received.get() + bytes);
        if new {
            self.failures.set(0);
        }
    }

    /// A body broke: waits before the next try.
    ///
    /// # Errors
    /// The error itself, where that was tried often enough.
    pub async fn failed(&self, error: Error) -> std::result::Result<(), Miss> {
        let failures = self.failures.get();
        self.failures.set(failures + 1);
        match WAITS.get(failures as usize) {
            Some(wait) if matches!(error, Error::Network(_)) => {
                sleep(*wait, Some(&self.abort.signal())).await;
                Ok(())
            }
            _ => Err(Miss::Failed(error)),
        }
    }

    fn refused(&self, response: &Response) -> Miss {
        Miss::Failed(Error::http_status(status_message(response, &self.url)))
    }

    /// Tries again, later and later, while it is the network or a busy server that fails.
    async fn again<T, F: std::future::Future<Output = std::result::Result<T, Miss>>>(
        &self,
        work: impl Fn() -> F,
    ) -> std::result::Result<T, Miss> {
        let mut waits = WAITS.iter();
        loop {
            let error = match work().await {
                Err(Miss::Failed(error)) => error,
                other => return other,
            };
            let worth = match &error {
                _ if self.ended.get() => false,
                Error::Network(_) => true,
                Error::HttpStatus(message) if is_busy(message) => {
                    // Some servers answer only so many at a time: fewer are asked for from now on.
                    self.slots.shrink();
                    true
                }
                _ => false,
            };
            self.failures.set(self.failures.get() + 1);
            // A first answer that never comes is told soon: another mirror may do.
            let tries = if self.told.borrow().is_none() { 1 } else { WAITS.len() };
            let Some(wait) = waits.next().filter(|_| worth && self.failures.get() < BUDGET) else {
                return Err(Miss::Failed(error));
            };
            if WAITS.len() - waits.len() > tries {
                return Err(Miss::Failed(error));
            }
            sleep(*wait + (Math::random() * f64::from(*wait) / 4.0) as i32, Some(&self.abort.signal())).await;
            if self.abort.signal().aborted() {
                return Err(Miss::Failed(Error::aborted("the load was cancelled")));
            }
        }
    }
}

/// So many may go on at once; the others wait in order.
struct Slots {
    free: Cell<usize>,
    /// How many there are, and how many of those that are taken do not come back.
    all: Cell<usize>,
    surplus: Cell<usize>,
    waiting: RefCell<VecDeque<Function>>,
}

struct Slot<'a>(&'a Slots);

impl Slots {
    fn new(free: usize) -> Self {
        let all = free.max(1);
        let (free, surplus) = (Cell::new(all), Cell::new(0));
        Self { free, all: Cell::new(all), surplus, waiting: RefCell::new(VecDeque::new()) }
    }

    /// One less from now on, as long as there is another.
    fn shrink(&self) {
        if self.all.get() > 1 {
            self.all.set(self.all.get() - 1);
            self.surplus.set(self.surplus.get() + 1);
        }
    }

    async fn take(&self) -> Slot<'_> {
        while self.free.get() == 0 {
            let turn = Promise::new(&mut |resolve, _| self.waiting.borrow_mut().push_back(resolve));
            // It is never rejected.
            let _ = JsFuture::from(turn).await;
        }
        self.free.set(self.free.get() - 1);
        Slot(self)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        match self.0.surplus.get() {
            0 => self.0.free.set(self.0.free.get() + 1),
            surplus => self.0.surplus.set(surplus - 1),
        }
        // All of them: who waited longest may have been given up.
        let waiting = std::mem::take(&mut *self.0.waiting.borrow_mut());
        for next in waiting {
            // A promise's resolver does not throw.
            let _ = next.call0(&wasm_bindgen::JsValue::NULL);
        }
    }
}

fn is_busy(message: &str) -> bool {
    ["408 ", "425 ", "429 ", "500 ", "502 ", "503 ", "504 "].iter().any(|status| message.starts_with(status))
}

fn status_message(response: &Response, url: &str) -> String {
    format!("{} {} for {url}", response.status(), response.status_text())
}

fn header(response: &Response, name: &str) -> Option<String> {
    response.headers().get(name).ok().flatten()
}

fn told_by(response: &Response) -> Told {
    let quoted = header(response, "x-linked-etag").map(|tag| tag.trim_matches('"').to_string());
    Told {
        bytes: content_range(response).and_then(|(_, bytes)| bytes),
        etag: header(response, "etag"),
        last_modified: header(response, "last-modified"),
        sha256: quoted.filter(|tag| super::manifest::is_sha256(tag)),
        content_type: header(response, "content-type"),
    }
}

/// First byte and file length of a `Content-Range`.
fn content_range(response: &Response) -> Option<(u64, Option<u64>)> {
    let text = header(response, "content-range")?;
    let (range, bytes) = text.strip_prefix("bytes ")?.split_once('/')?;
    let bytes = bytes.trim().parse().ok().filter(|bytes| *bytes <= MOST_BYTES);
    Some((range.split_once('-')?.0.trim().parse().ok()?, bytes))
}

/// The body's length, unless a content encoding makes the header speak of other bytes.
fn content_length(response: &Response) -> Option<u64> {
    match header(response, "content-encoding") {
        Some(encoding) if encoding != "identity" => None,
        _ => header(response, "content-length")?.parse().ok().filter(|bytes| *bytes <= MOST_BYTES),
    }
}

/// A content encoding is not shown across origins, so the length may be that of the encoded bytes.
fn hides_encoding(response: &Response) -> bool {
    response.type_() == web_sys::ResponseType::Cors
}

/// What an error of a fetch or of a body means.
pub fn failure(error: &wasm_bindgen::JsValue, what: &str) -> Error {
    match error_name(error).as_str() {
        "AbortError" => Error::aborted("the load was cancelled"),
        "NotReadableError" | "NotFoundError" => {
            Error::network(format!("the file can no longer be read: {}", describe(error)))
        }
        _ => Error::network(format!("{what}: {}", describe(error))),
    }
}
