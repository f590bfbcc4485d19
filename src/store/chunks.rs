//! Where the bytes of chunks lie: the Cache API, or IndexedDB where that is missing or refuses.

use super::browser::{scope, within};
use super::db::{Db, Refusal, Table};
use js_sys::{Array, ArrayBuffer, Reflect, Uint8Array};
use std::rc::Rc;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{Blob, Cache, CacheStorage, Request, Response, ResponseInit};

pub(super) const BUCKET: &str = "qandle-weights-v1";
/// A cache that does not open by then is none.
const OPEN_MS: i32 = 5000;

/// A place for chunks.
#[derive(Debug, Clone)]
pub enum Chunks {
    /// The Cache API.
    Cache(Cache),
    /// IndexedDB.
    Db(Rc<Db>),
}

impl Chunks {
    /// The Cache API's bucket.
    ///
    /// # Errors
    /// Where there is none, as on insecure pages, or it refuses.
    pub async fn cache() -> Result<Self, Refusal> {
        let caches: CacheStorage = Reflect::get(&js_sys::global(), &"caches".into())?
            .dyn_into()
            .map_err(|_| JsValue::from("there is no Cache API"))?;
        let opening = JsFuture::from(caches.open(BUCKET));
        let cache = within(OPEN_MS, opening, "the Cache API does not open").await?;
        Ok(Chunks::Cache(cache.dyn_into().map_err(|_| JsValue::from("no cache was opened"))?))
    }

    /// A chunk of a generation; `None` where it is not there.
    pub async fn get(&self, generation: &str, i: usize) -> Result<Option<Uint8Array>, Refusal> {
        match self {
            Chunks::Cache(cache) => {
                let found = JsFuture::from(cache.match_with_str(&url(generation, i))).await?;
                let Ok(response) = found.dyn_into::<Response>() else { return Ok(None) };
                let buffer = JsFuture::from(response.array_buffer()?).await?;
                Ok(Some(Uint8Array::new(&buffer)))
            }
            Chunks::Db(db) => {
                let found = db.get(Table::Chunks, &key(generation, i)).await?;
                Ok(found.and_then(|bytes| bytes.dyn_into::<ArrayBuffer>().ok()).map(|b| Uint8Array::new(&b)))
            }
        }
    }

    /// Keeps a chunk; when this comes back, it is stored.
    pub async fn put(&self, generation: &str, i: usize, bytes: &Uint8Array) -> Result<(), Refusal> {
        match self {
            Chunks::Cache(cache) => {
                let init = ResponseInit::new();
                init.set_status(200);
                // By way of a blob it takes half the time that bytes do, and a third of it on this thread.
                let blob = Blob::new_with_buffer_source_sequence(&Array::of1(bytes))?;
                let response = Response::new_with_opt_blob_and_init(Some(&blob), &init)?;
                JsFuture::from(cache.put_with_str(&url(generation, i), &response)).await?;
                Ok(())
            }
            Chunks::Db(db) => db.put(Table::Chunks, &key(generation, i), &bytes.buffer()).await,
        }
    }

    /// Forgets all chunks of a generation.
    pub async fn delete(&self, generation: &str, count: usize) -> Result<(), Refusal> {
        match self {
            Chunks::Cache(cache) => {
                for i in 0..count {
                    JsFuture::from(cache.delete_with_str(&url(generation, i))).await?;
                }
                Ok(())
            }
            Chunks::Db(db) => {
                let keys: Vec<String> = (0..count).map(|i| key(generation, i)).collect();
                db.delete(Table::Chunks, &keys).await
            }
        }
    }
}

impl Chunks {
    /// The Cache API's entries.
    pub async fn all(&self) -> Vec<Request> {
        let Chunks::Cache(cache) = self else { return Vec::new() };
        let Ok(requests) = JsFuture::from(cache.keys()).await else { return Vec::new() };
        Array::from(&requests).iter().filter_map(|request| request.dyn_into().ok()).collect()
    }

    /// Removes those of generations that are not `kept`.
    pub async fn sweep(&self, all: Vec<Request>, kept: &impl Fn(&str) -> bool) {
        let Chunks::Cache(cache) = self else { return };
        for request in all {
            let url = request.url();
            if !kept(url.rsplit('/').nth(1).unwrap_or_default()) {
                // What cannot be deleted now goes another time.
                let _ = JsFuture::from(cache.delete_with_request(&request)).await;
            }
        }
    }
}

fn key(generation: &str, i: usize) -> String {
    format!("{generation}/{i}")
}

/// The Cache API's keys must be URLs; nothing is ever fetched from this one.
pub(super) fn url(generation: &str, i: usize) -> String {
    let origin = scope().location().origin();
    let base = if origin.starts_with("http") { origin.as_str() } else { "https://qandle.invalid" };
    format!("{base}/.qandle/weights/{generation}/{i}")
}
