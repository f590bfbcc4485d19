//! A model file as a stream of byte chunks: from the network by `fetch`, or from a `Blob` the user chose.

use crate::error::{Error, Result};
use js_sys::{Reflect, Uint8Array};
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::{
    AbortController, Blob, ReadableStream, ReadableStreamDefaultReader, Request, RequestCache, RequestInit,
    Response, ResponseType, WorkerGlobalScope,
};

/// Where a file is read from.
#[derive(Debug, Clone)]
pub enum Source {
    /// An absolute URL.
    Url(String),
    /// A file or blob of the page.
    Blob(Blob),
}

/// An open file: chunks come by [`Body::next`] in order.
pub struct Body {
    reader: ReadableStreamDefaultReader,
    /// The file's length, where it is sure.
    pub total: Option<u64>,
    /// The length that was announced: a body that ends before it was cut.
    pub announced: Option<u64>,
}

impl Source {
    /// Reads `{ url }` or `{ blob }`.
    pub fn from_js(value: &JsValue) -> Result<Self> {
        if let Ok(blob) = Reflect::get(value, &"blob".into()).and_then(|b| b.dyn_into::<Blob>()) {
            return Ok(Source::Blob(blob));
        }
        match Reflect::get(value, &"url".into()).ok().and_then(|u| u.as_string()) {
            Some(url) => Ok(Source::Url(url)),
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

    /// The file's name without its ending.
    pub fn stem(&self) -> String {
        let whole = match self {
            Source::Url(url) => url.split(['?', '#']).next().unwrap_or_default().to_string(),
            Source::Blob(blob) => {
                Reflect::get(blob, &"name".into()).ok().and_then(|n| n.as_string()).unwrap_or_default()
            }
        };
        let name = whole.rsplit('/').next().unwrap_or_default();
        name.strip_suffix(".gguf").unwrap_or(name).to_string()
    }

    /// Opens the file; `abort` ends the request at any time.
    ///
    /// # Errors
    /// `network`, `http_status`, `aborted`.
    pub async fn open(&self, abort: &AbortController) -> Result<Body> {
        match self {
            Source::Blob(blob) => Body::new(blob.stream(), Some(blob.size() as u64)),
            Source::Url(url) => {
                let response = fetch(url, abort).await?;
                if !response.ok() {
                    let message = format!("{} {} for {url}", response.status(), response.status_text());
                    return Err(Error::http_status(message));
                }
                let announced = content_length(&response);
                let stream = response.body().ok_or_else(|| Error::network(format!("{url} has no body")))?;
                let mut body = Body::new(stream, announced)?;
                if response.type_() == ResponseType::Cors {
                    // A content encoding is not shown across origins, so the length may be that of the encoded bytes.
                    body.total = None;
                }
                Ok(body)
            }
        }
    }
}

async fn fetch(url: &str, abort: &AbortController) -> Result<Response> {
    let init = RequestInit::new();
    // The browser's HTTP cache would only hold a second copy, and Firefox aborts large bodies in it.
    init.set_cache(RequestCache::NoStore);
    init.set_signal(Some(&abort.signal()));
    let request = Request::new_with_str_and_init(url, &init).map_err(|e| {
        Error::invalid_request(format!("{url} is no URL that can be fetched: {}", describe(&e)))
    })?;
    let scope: WorkerGlobalScope = js_sys::global().unchecked_into();
    let response = JsFuture::from(scope.fetch_with_request(&request)).await.map_err(|e| failure(&e, url))?;
    response.dyn_into().map_err(|_| Error::network(format!("{url}: fetch gave no response")))
}

/// The body's length, unless a content encoding makes the header speak of other bytes.
fn content_length(response: &Response) -> Option<u64> {
    let headers = response.headers();
    match headers.get("content-encoding").ok().flatten() {
        Some(encoding) if encoding != "identity" => None,
        _ => headers.get("content-length").ok().flatten()?.parse().ok(),
    }
}

impl Body {
    fn new(stream: ReadableStream, total: Option<u64>) -> Result<Self> {
        let reader =
            stream.get_reader().dyn_into().map_err(|_| Error::network("the body's stream cannot be read"))?;
        Ok(Self { reader, total, announced: total })
    }

    /// The next chunk, or `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Uint8Array>> {
        let result = JsFuture::from(self.reader.read()).await.map_err(|e| failure(&e, "the body"))?;
        if Reflect::get(&result, &"done".into()).is_ok_and(|done| done.is_truthy()) {
            return Ok(None);
        }
        let chunk = Reflect::get(&result, &"value".into()).map_err(|e| failure(&e, "the body"))?;
        chunk.dyn_into().map(Some).map_err(|_| Error::network("the body gave something else than bytes"))
    }

    /// Gives up the rest of the body.
    pub fn cancel(&self) {
        let closed = JsFuture::from(self.reader.cancel());
        wasm_bindgen_futures::spawn_local(async move {
            // It is rejected where the stream had failed before; unheard, that would count as a fault of the worker.
            let _ = closed.await;
        });
    }
}

fn failure(error: &JsValue, what: &str) -> Error {
    let name = Reflect::get(error, &"name".into()).ok().and_then(|n| n.as_string()).unwrap_or_default();
    match name.as_str() {
        "AbortError" => Error::aborted("the load was cancelled"),
        "NotReadableError" | "NotFoundError" => {
            Error::network(format!("the file can no longer be read: {}", describe(error)))
        }
        _ => Error::network(format!("{what}: {}", describe(error))),
    }
}

/// A JavaScript error's own words.
pub fn describe(error: &JsValue) -> String {
    match error.dyn_ref::<js_sys::Error>() {
        Some(error) => String::from(error.message()),
        None => error.as_string().unwrap_or_else(|| format!("{error:?}")),
    }
}
