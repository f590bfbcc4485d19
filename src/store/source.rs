//! Where a model file is, and its bytes as the browser hands them out: bodies of answers, and of files of the page.

use super::browser::{describe, follow, scope, sleep, within};
use super::remote::failure;
use crate::engine::now_ms;
use crate::error::{Error, Result};
use js_sys::{ArrayBuffer, Function, Promise, Reflect, Uint8Array};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::{
    AbortController, Blob, Headers, ReadableStream, ReadableStreamByobReader, ReadableStreamDefaultReader,
    ReadableStreamGetReaderOptions, ReadableStreamReaderMode, Request, RequestCache, RequestInit, Response,
};

/// Bytes of the buffer that a stream is read into.
const BUFFER: u32 = 1 << 20;

/// A body that gives nothing for so long is given up, ms.
const STALL_MS: i32 = 30_000;

/// Where a file is read from.
#[derive(Debug, Clone)]
pub enum Source {
    /// A file on a server.
    Url(Place),
    /// A file or blob of the page.
    Blob(Blob),
}

/// What a server answered. A body that nobody takes is cancelled with it: left unread, it would keep its connection, and a
/// browser has six of them for a host.
pub struct Answer {
    /// Status and headers.
    pub response: Response,
    body: Option<Body>,
}

/// A file on a server, and what it is kept under.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// An absolute URL.
    pub url: String,
    /// The same for every mirror of a hub, else the URL.
    pub key: String,
}

/// Bytes that come in order by [`Body::next`].
pub struct Body {
    reader: Option<Rc<Reader>>,
    wait: Rc<Wait>,
    ready: Option<Uint8Array>,
    /// How many there are, where it is sure.
    pub total: Option<u64>,
}

/// How a stream is read. Into the same buffer again and again where the browser can: it need not find memory for each piece,
/// which is a quarter of the time that a fast network takes.
enum Reader {
    Plain(ReadableStreamDefaultReader),
    /// The buffer is away while it is read into.
    IntoBuffer(ReadableStreamByobReader, RefCell<Option<ArrayBuffer>>),
}

impl Reader {
    fn of(stream: &ReadableStream) -> Result<Self> {
        let options = ReadableStreamGetReaderOptions::new();
        options.set_mode(ReadableStreamReaderMode::Byob);
        let get =
            Reflect::get(stream, &"getReader".into()).ok().and_then(|get| get.dyn_into::<Function>().ok());
        // A stream that is none of bytes throws.
        let byob = get.and_then(|get| get.call1(stream, &options).ok());
        if let Some(reader) = byob.and_then(|reader| reader.dyn_into().ok()) {
            return Ok(Reader::IntoBuffer(reader, RefCell::new(None)));
        }
        let reader = stream.get_reader().dyn_into();
        reader.map(Reader::Plain).map_err(|_| Error::network("the body's stream cannot be read"))
    }

    fn read(&self) -> Promise {
        match self {
            Reader::Plain(reader) => reader.read(),
            Reader::IntoBuffer(reader, buffer) => {
                let buffer = buffer.take().unwrap_or_else(|| ArrayBuffer::new(BUFFER));
                reader.read_with_array_buffer_view(&Uint8Array::new(&buffer))
            }
        }
    }

    /// Gives a piece's memory back, once nobody needs it.
    fn give_back(&self, piece: &Uint8Array) {
        if let Reader::IntoBuffer(_, buffer) = self {
            *buffer.borrow_mut() = Some(piece.buffer());
        }
    }

    fn cancel(&self) -> Promise {
        match self {
            Reader::Plain(reader) => reader.cancel(),
            Reader::IntoBuffer(reader, _) => reader.cancel(),
        }
    }
}

/// Since when a body is waited for.
struct Wait {
    /// ms since 1970; infinite while nobody waits.
    since: Cell<f64>,
    stalled: Cell<bool>,
}

impl Source {
    /// Reads `{ url }` or `{ blob }`.
    pub fn from_js(value: &JsValue) -> Result<Self> {
        if let Ok(blob) = Reflect::get(value, &"blob".into()).and_then(|b| b.dyn_into::<Blob>()) {
            return Ok(Source::Blob(blob));
        }
        let text = |key: &str| Reflect::get(value, &key.into()).ok().and_then(|text| text.as_string());
        match text("url") {
            Some(url) => Ok(Source::Url(Place { key: text("key").unwrap_or_else(|| url.clone()), url })),
            None => Err(Error::invalid_request("the source needs a url or a blob")),
        }
    }

    /// `network` or `file`, as progress reports it.
    pub fn kind(&self) -> &'static str {
        match self {
            Source::Url(_) => "network",
            Source::Blob(_) => "file",
        }
    }

    /// What to call it in messages: the URL, or the file's name.
    pub fn name(&self) -> String {
        match self {
            Source::Url(place) => place.url.clone(),
            Source::Blob(blob) => {
                let name = Reflect::get(blob, &"name".into()).ok().and_then(|name| name.as_string());
                name.unwrap_or_else(|| "a file of the page".to_string())
            }
        }
    }

    /// The file's name without its ending.
    pub fn stem(&self) -> String {
        let whole = match self {
            Source::Url(place) => place.url.split(['?', '#']).next().unwrap_or_default().to_string(),
            Source::Blob(blob) => {
                Reflect::get(blob, &"name".into()).ok().and_then(|n| n.as_string()).unwrap_or_default()
            }
        };
        let name = whole.rsplit('/').next().unwrap_or_default();
        let known = [".gguf", ".safetensors"].iter().find_map(|ending| name.strip_suffix(ending));
        known.unwrap_or(name).to_string()
    }
}

impl Drop for Body {
    /// What is given up unread must not keep its connection.
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Asks for a URL, or for a range of it.
///
/// # Errors
/// `network`, `aborted`, `invalid_request`.
pub async fn fetch(url: &str, range: Option<&str>, abort: &AbortController) -> Result<Answer> {
    let init = RequestInit::new();
    // The browser's HTTP cache would only hold a second copy, and Firefox aborts large bodies in it.
    init.set_cache(RequestCache::NoStore);
    // Of its own, so that an answer that never begins can be given up alone.
    let own = AbortController::new().map_err(|e| failure(&e, url))?;
    follow(&abort.signal(), &own);
    init.set_signal(Some(&own.signal()));
    if let Some(range) = range {
        let headers = Headers::new().map_err(|e| failure(&e, url))?;
        headers.set("range", range).map_err(|e| failure(&e, url))?;
        init.set_headers(&headers);
    }
    let request = Request::new_with_str_and_init(url, &init).map_err(|e| {
        Error::invalid_request(format!("{url} is no URL that can be fetched: {}", describe(&e)))
    })?;
    let silent = format!("no answer began within {} s", STALL_MS / 1000);
    let asked = JsFuture::from(scope().fetch_with_request(&request));
    let response: Response = within(STALL_MS, asked, &silent)
        .await
        .inspect_err(|_| own.abort())
        .map_err(|e| failure(&e, url))?
        .dyn_into()
        .map_err(|_| Error::network(format!("{url}: fetch gave no response")))?;
    let body = response.body().map(|stream| Body::new(stream, None)).transpose()?;
    Ok(Answer { response, body })
}

impl Answer {
    /// The body, once.
    ///
    /// # Errors
    /// `network` where there is none.
    pub fn body(&mut self) -> Result<Body> {
        self.body.take().ok_or_else(|| Error::network(format!("{} has no body", self.response.url())))
    }
}

impl Body {
    fn new(stream: ReadableStream, total: Option<u64>) -> Result<Self> {
        let reader = Rc::new(Reader::of(&stream)?);
        let wait = Rc::new(Wait { since: Cell::new(f64::INFINITY), stalled: Cell::new(false) });
        watch(Rc::downgrade(&wait), Rc::downgrade(&reader));
        Ok(Self { reader: Some(reader), wait, ready: None, total })
    }

    /// The body of a file of the page.
    ///
    /// # Errors
    /// `network` where it cannot be read.
    pub fn of_blob(blob: &Blob) -> Result<Self> {
        Self::new(blob.stream(), Some(blob.size() as u64))
    }

    /// Bytes that are there already.
    pub fn of_bytes(bytes: Uint8Array) -> Self {
        let wait = Rc::new(Wait { since: Cell::new(f64::INFINITY), stalled: Cell::new(false) });
        Self { reader: None, wait, total: Some(u64::from(bytes.length())), ready: Some(bytes) }
    }

    /// The next bytes, or `None` at the end. A body that gives nothing for half a minute has failed.
    ///
    /// # Errors
    /// `network`, `aborted`.
    pub async fn next(&mut self) -> Result<Option<Uint8Array>> {
        let Some(reader) = &self.reader else { return Ok(self.ready.take()) };
        self.wait.since.set(now_ms());
        let result = JsFuture::from(reader.read()).await;
        self.wait.since.set(f64::INFINITY);
        if self.wait.stalled.get() {
            return Err(Error::network(format!("nothing came for {} s", STALL_MS / 1000)));
        }
        chunk_of(&result.map_err(|e| failure(&e, "the body"))?)
    }

    /// Says that a piece is used: the next one may come to its memory.
    pub fn used(&self, piece: &Uint8Array) {
        if let Some(reader) = &self.reader {
            reader.give_back(piece);
        }
    }

    /// Gives up the rest of the body.
    pub fn cancel(&self) {
        let Some(reader) = &self.reader else { return };
        let closed = JsFuture::from(reader.cancel());
        wasm_bindgen_futures::spawn_local(async move {
            // It is rejected where the stream had failed before; unheard, that would count as a fault of the worker.
            let _ = closed.await;
        });
    }
}

/// Ends a body that is waited for too long: one timer for a body, as one for each read costs more than the reads.
fn watch(wait: Weak<Wait>, reader: Weak<Reader>) {
    wasm_bindgen_futures::spawn_local(async move {
        loop {
            sleep(STALL_MS / 6, None).await;
            let (Some(wait), Some(reader)) = (wait.upgrade(), reader.upgrade()) else { break };
            if now_ms() - wait.since.get() > f64::from(STALL_MS) {
                wait.stalled.set(true);
                // The read that waits comes back, whatever this says.
                let _ = JsFuture::from(reader.cancel()).await;
                break;
            }
        }
    });
}

/// Bytes of a file of the page.
///
/// # Errors
/// `network` where it can no longer be read.
pub async fn slice(blob: &Blob, range: Range<u64>) -> Result<Uint8Array> {
    let part = blob.slice_with_f64_and_f64(range.start as f64, range.end as f64);
    let part = part.map_err(|e| failure(&e, "the file"))?;
    let buffer = JsFuture::from(part.array_buffer()).await.map_err(|e| failure(&e, "the file"))?;
    Ok(Uint8Array::new(&buffer))
}

fn chunk_of(result: &JsValue) -> Result<Option<Uint8Array>> {
    if Reflect::get(result, &"done".into()).is_ok_and(|done| done.is_truthy()) {
        return Ok(None);
    }
    let chunk = Reflect::get(result, &"value".into()).map_err(|e| failure(&e, "the body"))?;
    chunk.dyn_into().map(Some).map_err(|_| Error::network("the body gave something else than bytes"))
}
