//! Where the bytes of chunks lie: in a file of the origin private file system, or where there is none in IndexedDB, as
//! `Blob`s, or where that takes none in the Cache API. That is the order of their
//! speed; the file system also writes to the disk later, and the others at once.

use super::browser::{scope, within};
use super::db::{Db, Refusal, Table, NAME};
use super::keeper::object;
use super::manifest::CHUNK;
use super::opfs::{self, WEIGHTS};
use js_sys::{Array, Object, Reflect, Uint8Array};
use std::rc::Rc;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{Blob, Cache, CacheStorage, Request, Response, ResponseInit};

const BUCKET: &str = "qandle-weights-v1";
/// A cache that does not open by then is none.
const OPEN_MS: i32 = 5000;

/// A place for chunks.
#[derive(Debug, Clone)]
pub enum Chunks {
    /// A file for each generation.
    File,
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

    /// Where a chunk is, for the worker that stores and reads.
    pub fn place(&self, generation: &str, i: usize, length: u64) -> Object {
        match self {
            Chunks::Cache(_) => object(&[("bucket", &BUCKET.into()), ("url", &url(generation, i).into())]),
            Chunks::File => object(&[
                ("folder", &WEIGHTS.into()),
                ("file", &generation.into()),
                ("at", &(start(i) as f64).into()),
                ("length", &(length as f64).into()),
            ]),
            Chunks::Db(_) => object(&[
                ("database", &NAME.into()),
                ("table", &Table::Chunks.name().into()),
                ("key", &key(generation, i).into()),
            ]),
        }
    }

    /// A chunk of a generation, of so many bytes; `None` where it is not there.
    pub async fn get(&self, generation: &str, i: usize, length: u64) -> Result<Option<Uint8Array>, Refusal> {
        let reading = match self {
            Chunks::File => return opfs::bytes(WEIGHTS, generation, start(i)..start(i) + length).await,
            Chunks::Cache(cache) => {
                let found = JsFuture::from(cache.match_with_str(&url(generation, i))).await?;
                let Ok(response) = found.dyn_into::<Response>() else { return Ok(None) };
                response.array_buffer()?
            }
            Chunks::Db(db) => {
                let found = db.get(Table::Chunks, &key(generation, i)).await?;
                let Some(Ok(blob)) = found.map(JsCast::dyn_into::<Blob>) else { return Ok(None) };
                blob.array_buffer()
            }
        };
        let bytes = Uint8Array::new(&JsFuture::from(reading).await?);
        Ok(Some(bytes).filter(|bytes| u64::from(bytes.length()) == length))
    }

    /// Keeps a chunk; when this comes back, it is stored.
    pub async fn put(&self, generation: &str, i: usize, bytes: &Uint8Array) -> Result<(), Refusal> {
        // A blob takes half the time that bytes do, and a third of it on this thread.
        let blob = || Blob::new_with_buffer_source_sequence(&Array::of1(bytes));
        match self {
            Chunks::File => opfs::File::update(WEIGHTS, generation).await?.put_bytes(start(i), bytes),
            Chunks::Cache(cache) => {
                let init = ResponseInit::new();
                init.set_status(200);
                let response = Response::new_with_opt_blob_and_init(Some(&blob()?), &init)?;
                JsFuture::from(cache.put_with_str(&url(generation, i), &response)).await?;
                Ok(())
            }
            Chunks::Db(db) => db.put(Table::Chunks, &key(generation, i), &blob()?.into()).await,
        }
    }

    /// Forgets all chunks of a generation.
    pub async fn delete(&self, generation: &str, count: usize) -> Result<(), Refusal> {
        match self {
            Chunks::File => {
                opfs::remove(WEIGHTS, generation).await;
                Ok(())
            }
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

    /// The names of all chunks.
    pub async fn all(&self) -> Vec<Name> {
        match self {
            Chunks::File => opfs::names(WEIGHTS).await.into_iter().map(Name::File).collect(),
            Chunks::Cache(cache) => {
                let Ok(requests) = JsFuture::from(cache.keys()).await else { return Vec::new() };
                Array::from(&requests)
                    .iter()
                    .filter_map(|name| Some(Name::Cache(name.dyn_into().ok()?)))
                    .collect()
            }
            Chunks::Db(db) => {
                let keys = db.keys(Table::Chunks).await.unwrap_or_default();
                keys.into_iter().map(Name::Db).collect()
            }
        }
    }

    /// Removes a chunk; what cannot be deleted now goes another time.
    pub async fn remove(&self, name: Name) {
        match (self, name) {
            (Chunks::File, Name::File(name)) => opfs::remove_unused(WEIGHTS, &name).await,
            (Chunks::Cache(cache), Name::Cache(request)) => {
                let _ = JsFuture::from(cache.delete_with_request(&request)).await;
            }
            (Chunks::Db(db), Name::Db(key)) => {
                let _ = db.delete(Table::Chunks, &[key]).await;
            }
            _ => {}
        }
    }
}

/// The name of a chunk in its place.
#[derive(Debug)]
pub enum Name {
    /// The file of all chunks of a generation.
    File(String),
    /// In the Cache API.
    Cache(Request),
    /// In IndexedDB.
    Db(String),
}

impl Name {
    /// The generation that the chunk is of.
    pub fn generation(&self) -> String {
        let text = match self {
            Name::File(name) => return name.clone(),
            Name::Cache(request) => request.url(),
            Name::Db(key) => key.clone(),
        };
        text.rsplit('/').nth(1).unwrap_or_default().to_string()
    }
}

/// Where a chunk begins.
fn start(i: usize) -> u64 {
    i as u64 * CHUNK
}

fn key(generation: &str, i: usize) -> String {
    format!("{generation}/{i}")
}

/// The Cache API's keys must be URLs; nothing is ever fetched from this one.
fn url(generation: &str, i: usize) -> String {
    let origin = scope().location().origin();
    let base = if origin.starts_with("http") { origin.as_str() } else { "https://qandle.invalid" };
    format!("{base}/.qandle/weights/{generation}/{i}")
}
