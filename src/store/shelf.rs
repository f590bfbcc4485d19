//! The store: opening what the browser has, and the rows.

use super::browser::random_name;
use super::chunks::Chunks;
use super::db::{Db, Refusal, Table};
use super::manifest::{Manifest, Place};
use super::source;
use js_sys::Uint8Array;
use std::rc::Rc;
use wasm_bindgen::JsValue;

/// Beginning of the names of chunks by which the Cache API is tried.
const PROBE: &str = "probe-";

/// Everything that is kept.
#[derive(Debug, Clone)]
pub struct Store {
    db: Rc<Db>,
    cache: Option<Chunks>,
    place: Place,
}

impl Store {
    /// Opens it. New chunks go to `place`, by default to the Cache API where that works.
    ///
    /// # Errors
    /// Where nothing can be kept.
    pub async fn open(place: Option<Place>) -> Result<Self, Refusal> {
        let db = Rc::new(Db::open().await?);
        // What is kept in the Cache API is read and deleted there even where it takes nothing more.
        let opened = Chunks::cache().await;
        let works = match &opened {
            Ok(cache) => try_out(cache).await,
            Err(refusal) => Err(refusal.clone()),
        };
        if let (Err(refusal), Some(Place::CacheApi)) = (&works, place) {
            return Err(refusal.clone());
        }
        let best = if works.is_ok() { Place::CacheApi } else { Place::Indexeddb };
        let cache = opened.ok();
        Ok(Self { db, cache, place: place.unwrap_or(best) })
    }

    /// A row for a file of which nothing is there yet.
    pub fn new_manifest(&self, place: &source::Place, bytes: u64) -> Manifest {
        Manifest::new(&place.key, &place.url, self.place, random_name(), bytes)
    }

    /// The row of a source.
    pub async fn manifest(&self, source: &str) -> Result<Option<Manifest>, Refusal> {
        Ok(self.db.get(Table::Models, source).await?.and_then(|row| read(&row)))
    }

    /// All rows.
    pub async fn manifests(&self) -> Result<Vec<Manifest>, Refusal> {
        Ok(self.db.all(Table::Models).await?.iter().filter_map(read).collect())
    }

    /// Changes the row of a source, if that is still of this generation: another tab may have deleted or replaced it. Says
    /// whether it was.
    pub async fn modify(
        &self,
        source: &str,
        generation: &str,
        change: impl FnOnce(&mut Manifest) + 'static,
    ) -> Result<bool, Refusal> {
        let generation = generation.to_string();
        let change = move |text: Option<JsValue>| {
            let mut row = read(&text?).filter(|row| row.generation == generation)?;
            change(&mut row);
            Some(row.text().into())
        };
        self.db.update(Table::Models, source, change).await
    }

    /// Writes a new row.
    pub async fn put_manifest(&self, row: &Manifest) -> Result<(), Refusal> {
        self.db.put(Table::Models, &row.source, &row.text().into()).await
    }

    /// A chunk, if it is there and as long as it must be.
    pub async fn chunk(&self, row: &Manifest, i: usize) -> Result<Option<Uint8Array>, Refusal> {
        let range = super::manifest::chunk_range(i, row.bytes);
        let found = self.chunks(row.place)?.get(&row.generation, i).await?;
        Ok(found.filter(|bytes| u64::from(bytes.length()) == range.end - range.start))
    }

    /// Keeps a chunk; the row that names it is the caller's to write.
    pub async fn put_chunk(&self, row: &Manifest, i: usize, bytes: &Uint8Array) -> Result<(), Refusal> {
        self.chunks(row.place)?.put(&row.generation, i, bytes).await
    }

    /// Forgets a file: first its row, so that a half deleted one is none.
    pub async fn delete(&self, row: &Manifest) -> Result<(), Refusal> {
        // Another tab may keep another file under the name by now.
        if self.manifest(&row.source).await?.is_none_or(|now| now.generation == row.generation) {
            self.db.delete(Table::Models, std::slice::from_ref(&row.source)).await?;
        }
        super::opfs::remove(&row.generation).await;
        self.chunks(row.place)?.delete(&row.generation, row.chunks.len()).await
    }

    /// Removes all images: they can be made again. Says whether there were any.
    pub async fn drop_images(&self) -> bool {
        let Ok(rows) = self.manifests().await else { return false };
        let mut any = false;
        for row in rows.into_iter().filter(|row| row.image.is_some()) {
            any = true;
            if self.modify(&row.source, &row.generation, |row| row.image = None).await.is_ok() {
                super::opfs::remove(&row.generation).await;
            }
        }
        any
    }

    /// Removes what no row names: leavings of a tab that was closed while it deleted.
    pub async fn sweep(&self) {
        // What is there first: what comes to it while the rows are read is named by one.
        let names = super::opfs::names().await;
        let chunks = match &self.cache {
            Some(cache) => cache.all().await,
            None => Vec::new(),
        };
        let Ok(rows) = self.manifests().await else { return };
        let kept = |generation: &str| {
            generation.starts_with(PROBE) || rows.iter().any(|row| row.generation == generation)
        };
        for name in names {
            if !kept(&name) {
                super::opfs::remove(&name).await;
            }
        }
        if let Some(cache) = &self.cache {
            cache.sweep(chunks, &kept).await;
        }
    }

    fn chunks(&self, place: Place) -> Result<Chunks, Refusal> {
        match place {
            Place::Indexeddb => Ok(Chunks::Db(self.db.clone())),
            Place::CacheApi => {
                self.cache.clone().ok_or_else(|| JsValue::from("there is no Cache API").into())
            }
        }
    }
}

fn read(row: &JsValue) -> Option<Manifest> {
    Manifest::read(&row.as_string()?)
}

/// Sends a small chunk through it: some browsers open the Cache API and then refuse.
async fn try_out(cache: &Chunks) -> Result<(), Refusal> {
    // One that a closed tab leaves behind stays: three bytes, which no sweep may take from a tab that is just trying.
    let name = format!("{PROBE}{}", random_name());
    cache.put(&name, 0, &Uint8Array::from(&[1u8, 2, 3][..])).await?;
    let back = cache.get(&name, 0).await?;
    cache.delete(&name, 1).await?;
    match back {
        Some(bytes) if bytes.length() == 3 => Ok(()),
        _ => Err(JsValue::from("the Cache API does not give back what it took").into()),
    }
}
