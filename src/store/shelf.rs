//! The store: opening what the browser has, and the rows.

use super::browser::random_name;
use super::chunks::Chunks;
use super::db::{Db, Refusal, Table};
use super::keeper::Keeper;
use super::manifest::{chunk_range, Manifest, Place};
use super::opfs;
use super::source;
use js_sys::{Object, Uint8Array};
use std::cell::OnceCell;
use std::rc::Rc;
use wasm_bindgen::JsValue;

/// Beginning of the names of chunks by which a place is tried.
const PROBE: &str = "probe-";

/// The places for chunks, the best first.
const BEST: [Place; 3] = [Place::File, Place::Indexeddb, Place::CacheApi];

/// Everything that is kept.
#[derive(Debug, Clone)]
pub struct Store {
    db: Rc<Db>,
    /// Where new chunks must go; otherwise the best place that takes them.
    place: Option<Place>,
    /// The Cache API's bucket, once it was wanted.
    cache: Rc<OnceCell<Chunks>>,
}

impl Store {
    /// Opens it. New chunks go to `place`, by default to the first of [`BEST`] that takes them.
    ///
    /// # Errors
    /// Where nothing can be kept.
    pub async fn open(place: Option<Place>) -> Result<Self, Refusal> {
        Ok(Self { db: Rc::new(Db::open().await?), place, cache: Rc::default() })
    }

    pub(super) fn db(&self) -> &Db {
        &self.db
    }

    /// A row for a file of which nothing is there yet.
    ///
    /// # Errors
    /// Where no place takes chunks.
    pub async fn new_manifest(&self, place: &source::Place, bytes: u64) -> Result<Manifest, Refusal> {
        let places = match &self.place {
            Some(place) => std::slice::from_ref(place),
            None => &BEST,
        };
        let mut refused = None;
        for at in places {
            match self.try_out(*at).await {
                Ok(()) => return Ok(Manifest::new(&place.key, &place.url, *at, random_name(), bytes)),
                Err(refusal) => refused = refused.or(Some(refusal)),
            }
        }
        Err(refused.unwrap_or_else(|| JsValue::from("there is no place for chunks").into()))
    }

    /// Sends a small chunk through a place: some browsers open one and then refuse.
    async fn try_out(&self, place: Place) -> Result<(), Refusal> {
        let chunks = self.chunks(place).await?;
        // One that a closed tab leaves behind stays: three bytes, which no sweep may take from a tab that is just trying.
        let name = format!("{PROBE}{}", random_name());
        chunks.put(&name, 0, &Uint8Array::from(&[1u8, 2, 3][..])).await?;
        let back = chunks.get(&name, 0, 3).await?;
        chunks.delete(&name, 1).await?;
        match back {
            Some(bytes) if bytes.length() == 3 => Ok(()),
            _ => Err(JsValue::from("what was stored is not given back").into()),
        }
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

    /// A chunk, if it is there and as long as it must be; read by `keeper` where there is one.
    pub async fn chunk(
        &self,
        row: &Manifest,
        i: usize,
        keeper: Option<&Keeper>,
    ) -> Result<Option<Uint8Array>, Refusal> {
        let chunks = self.chunks(row.place).await?;
        let length = length(row, i);
        if let Some(keeper) = keeper.filter(|keeper| keeper.listens()) {
            let found = keeper.read(&chunks.place(&row.generation, i, length)).await;
            if let Some(bytes) = found.filter(|bytes| u64::from(bytes.length()) == length) {
                return Ok(Some(bytes));
            }
        }
        chunks.get(&row.generation, i, length).await
    }

    /// Where a chunk of a row is, for the worker that stores.
    ///
    /// # Errors
    /// Where its place is gone.
    pub async fn place(&self, row: &Manifest, i: usize) -> Result<Object, Refusal> {
        Ok(self.chunks(row.place).await?.place(&row.generation, i, length(row, i)))
    }

    /// Keeps a chunk; the row that names it is the caller's to write.
    pub async fn put_chunk(&self, row: &Manifest, i: usize, bytes: &Uint8Array) -> Result<(), Refusal> {
        self.chunks(row.place).await?.put(&row.generation, i, bytes).await
    }

    /// Forgets a file: first its row, so that a half deleted one is none.
    pub async fn delete(&self, row: &Manifest) -> Result<(), Refusal> {
        // Another tab may keep another file under the name by now.
        if self.manifest(&row.source).await?.is_none_or(|now| now.generation == row.generation) {
            self.db.delete(Table::Models, std::slice::from_ref(&row.source)).await?;
        }
        self.delete_chunks(row).await
    }

    /// Removes the image and the chunks of a row that is gone.
    pub async fn delete_chunks(&self, row: &Manifest) -> Result<(), Refusal> {
        opfs::remove(opfs::IMAGES, &row.generation).await;
        self.chunks(row.place).await?.delete(&row.generation, row.chunks.len()).await
    }

    /// Removes all images: they can be made again.
    pub async fn drop_images(&self) {
        let Ok(rows) = self.manifests().await else { return };
        for row in rows.into_iter().filter(|row| row.image.is_some()) {
            if self.modify(&row.source, &row.generation, |row| row.image = None).await.is_ok() {
                opfs::remove(opfs::IMAGES, &row.generation).await;
            }
        }
    }

    /// Removes what no row names: leavings of a tab that was closed while it deleted.
    pub async fn sweep(&self) {
        // What is there first: what comes to it while the rows are read is named by one.
        let names = opfs::names(opfs::IMAGES).await;
        let mut places = Vec::new();
        for place in BEST {
            if let Ok(chunks) = self.chunks(place).await {
                let names = chunks.all().await;
                places.push((chunks, names));
            }
        }
        let Ok(rows) = self.manifests().await else { return };
        let kept = |generation: &str| {
            generation.starts_with(PROBE) || rows.iter().any(|row| row.generation == generation)
        };
        // One that no row says is whole is being written, which keeps it from being removed, or was given up.
        let whole = |name: &str| rows.iter().any(|row| row.generation == name && row.image.is_some());
        for name in names.iter().filter(|name| !whole(name)) {
            opfs::remove_unused(opfs::IMAGES, name).await;
        }
        for (chunks, names) in places {
            for name in names.into_iter().filter(|name| !kept(&name.generation())) {
                chunks.remove(name).await;
            }
        }
    }

    async fn chunks(&self, place: Place) -> Result<Chunks, Refusal> {
        match place {
            Place::File => Ok(Chunks::File),
            Place::Indexeddb => Ok(Chunks::Db(self.db.clone())),
            Place::CacheApi => match self.cache.get() {
                Some(cache) => Ok(cache.clone()),
                None => {
                    let cache = Chunks::cache().await?;
                    Ok(self.cache.get_or_init(|| cache).clone())
                }
            },
        }
    }
}

fn length(row: &Manifest, i: usize) -> u64 {
    let range = chunk_range(i, row.bytes);
    range.end - range.start
}

fn read(row: &JsValue) -> Option<Manifest> {
    Manifest::read(&row.as_string()?)
}
