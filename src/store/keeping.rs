//! What a reader's tasks share: bringing a chunk from the store or the network, keeping what came from the network, and the
//! row that says what is kept.

use super::browser::{sha256, sleep, storage_estimate};
use super::db::Refusal;
use super::keeper::Keeper;
use super::manifest::{self, chunk_range, Manifest};
use super::opfs;
use super::remote::{Miss, Remote};
use super::source::Place;
use super::Store;
use crate::error::Error;
use js_sys::{ArrayBuffer, Promise, Uint8Array};
use serde_json::{json, Value};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use wasm_bindgen::JsValue;
use wasm_bindgen_futures::{future_to_promise, JsFuture};

/// Room that is left to the browser beside a model, bytes.
const SPARE: f64 = 16e6;

/// Memory of so many chunks is held to be used again.
const MOST_SPARE: usize = 4;

/// Takes a code, a sentence and numbers.
type OnNotice = Box<dyn Fn(&str, String, Value)>;

/// What a reader tells while it works.
pub struct Hooks {
    /// Bytes came: so many in all, from wherever.
    pub on_bytes: Box<dyn Fn(u64)>,
    /// Sends to the page, where a worker beside this one may be asked for.
    pub post: Option<js_sys::Function>,
    /// Something that the user should know: a code, a sentence, numbers.
    pub on_notice: OnNotice,
}

/// What the reader and its tasks share.
pub(super) struct Shared {
    pub(super) place: Place,
    /// Whether all of it was kept when it was opened.
    pub(super) was_complete: bool,
    /// Hashes, stores and reads in our stead, where there is one.
    pub(super) keeper: Option<Keeper>,
    /// The file of the chunks, where this thread alone writes and reads it.
    pub(super) own_file: RefCell<Option<Rc<opfs::File>>>,
    /// Somebody opens it just now.
    pub(super) opening: Cell<bool>,
    /// Memory of chunks that nobody needs any more: the browser frees it later than it is wanted again.
    pub(super) spare: RefCell<Vec<ArrayBuffer>>,
    pub(super) remote: Remote,
    pub(super) store: Option<Store>,
    pub(super) row: RefCell<Option<Manifest>>,
    /// Whether chunks may be kept: the header was sound, and there is room.
    pub(super) keeping: Cell<bool>,
    /// Why nothing is kept any more.
    pub(super) refusal: RefCell<Option<Refusal>>,
    /// Bytes that came from the store.
    pub(super) cached: Cell<u64>,
    pub(super) hooks: Hooks,
    /// The last write of the row that was begun or waits, and that which waits.
    pub(super) writing: RefCell<Option<Promise>>,
    pub(super) waiting: RefCell<Option<Promise>>,
}

/// A chunk on its way.
pub(super) struct Task {
    pub(super) i: usize,
    came: Promise,
    slot: Rc<RefCell<Option<Brought>>>,
}

/// What a task came to: the bytes, and whether they are new.
pub(super) type Brought = Result<(Uint8Array, bool), Miss>;

impl Task {
    pub(super) fn start(shared: Rc<Shared>, i: usize, bytes: u64) -> Self {
        let slot = Rc::new(RefCell::new(None));
        let mut done = None;
        let came = Promise::new(&mut |resolve, _| done = Some(resolve));
        let out = slot.clone();
        wasm_bindgen_futures::spawn_local(async move {
            let brought = shared.bring(i, bytes).await;
            *out.borrow_mut() = Some(brought);
            if let Some(done) = done {
                // A promise's resolver does not throw.
                let _ = done.call0(&JsValue::NULL);
            }
        });
        Self { i, came, slot }
    }

    /// What it came to, once.
    pub(super) async fn end(&self) -> Brought {
        // It always resolves; what it came to is in the slot.
        let _ = JsFuture::from(self.came.clone()).await;
        let brought = self.slot.borrow_mut().take();
        brought.unwrap_or_else(|| Err(Error::network("a chunk was lost").into()))
    }
}

impl Shared {
    pub(super) fn told_bytes(&self) {
        (self.hooks.on_bytes)(self.cached.get() + self.remote.received.get());
    }

    /// A chunk, and whether it came from the network.
    pub(super) async fn bring(&self, i: usize, bytes: u64) -> Brought {
        let row = self.row.borrow().clone();
        if let (Some(row), Some(store)) =
            (row.filter(|row| row.chunks.get(i).is_some_and(Option::is_some)), &self.store)
        {
            if let Some(keeper) = &self.keeper {
                // A file that it writes is read by nobody else.
                keeper.start().await;
            }
            if let Ok(Some(found)) = self.stored(store, &row, i).await {
                self.cached.set(self.cached.get() + u64::from(found.length()));
                self.told_bytes();
                return Ok((found, false));
            }
        }
        let range = chunk_range(i, bytes);
        let length = (range.end - range.start) as u32;
        let room = self.keeper.as_ref().and_then(|keeper| keeper.spare(length));
        let room = room.or_else(|| {
            let mut spare = self.spare.borrow_mut();
            let at = spare.iter().position(|memory| memory.byte_length() == length)?;
            Some(spare.swap_remove(at))
        });
        Ok((self.remote.range_telling(range, room, &|| self.told_bytes()).await?, true))
    }

    /// A chunk that is there.
    pub(super) async fn stored(
        &self,
        store: &Store,
        row: &Manifest,
        i: usize,
    ) -> Result<Option<Uint8Array>, Refusal> {
        let Some(file) = self.own_file(row).await else {
            return store.chunk(row, i, self.keeper.as_ref()).await;
        };
        let range = chunk_range(i, row.bytes);
        let bytes = Uint8Array::new_with_length((range.end - range.start) as u32);
        Ok(file.get_bytes(range.start, &bytes)?.then_some(bytes))
    }

    /// The file of the chunks, where there is one and no other worker that has it; it stays open.
    async fn own_file(&self, row: &Manifest) -> Option<Rc<opfs::File>> {
        let helped = self.own_file.borrow().is_none() && self.keeper.as_ref().is_some_and(Keeper::listens);
        if helped || self.was_complete || row.place != manifest::Place::File {
            return None;
        }
        // It can be opened once: several tasks come here at a time.
        while self.opening.replace(true) {
            sleep(1, None).await;
        }
        let mut file = self.own_file.borrow().clone();
        if file.is_none() {
            file = opfs::File::update(opfs::WEIGHTS, &row.generation).await.ok().map(Rc::new);
            self.own_file.borrow_mut().clone_from(&file);
        }
        self.opening.set(false);
        file
    }

    /// Closes the file of the chunks, whoever has it open: it cannot be read or removed by others before.
    async fn close_file(&self) {
        self.own_file.borrow_mut().take();
        if let Some(keeper) = &self.keeper {
            keeper.close_files().await;
        }
    }

    /// Keeps a chunk, and says so in the row. Its bytes are gone then, or overwritten soon.
    pub(super) async fn keep(self: &Rc<Self>, i: usize, bytes: &Uint8Array) {
        self.keep_bytes(i, bytes).await;
        // Memory that was sent away has no bytes.
        if bytes.length() > 0 && self.spare.borrow().len() < MOST_SPARE {
            self.spare.borrow_mut().push(bytes.buffer());
        }
    }

    async fn keep_bytes(self: &Rc<Self>, i: usize, bytes: &Uint8Array) {
        let Some(store) = self.store.as_ref().filter(|_| self.keeping.get()) else { return };
        let Some(row) = self.row.borrow().clone() else { return };
        let wanted = chunk_range(i, row.bytes);
        if i >= row.chunks.len() || u64::from(bytes.length()) != wanted.end - wanted.start {
            return;
        }
        if let Some(keeper) = &self.keeper {
            keeper.start().await;
        }
        let hash = match &self.keeper {
            Some(keeper) if keeper.listens() && self.own_file.borrow().is_none() => {
                match store.place(&row, i).await {
                    Ok(place) => match keeper.keep(&place, bytes).await {
                        // It does not answer: this chunk is lost, and fetched when the file is read next time.
                        Err(_) if !keeper.listens() => return,
                        kept => kept,
                    },
                    Err(refusal) => Err(refusal),
                }
            }
            _ => {
                let hash = sha256(bytes).await;
                if !self.keeping.get() {
                    return;
                }
                let stored = match self.own_file(&row).await {
                    Some(file) => file.put_bytes(wanted.start, bytes),
                    None => store.put_chunk(&row, i, bytes).await,
                };
                stored.map(|()| hash)
            }
        };
        let hash = match hash {
            Ok(hash) => hash,
            Err(refusal) => return self.refused(refusal).await,
        };
        if let Some(row) = &mut *self.row.borrow_mut() {
            row.chunks[i] = Some(hash);
        }
        self.write_row().await;
    }

    /// Writes the row as it is when the write before it is done. Who comes while one waits for that waits with it.
    pub(super) async fn write_row(self: &Rc<Self>) {
        let waiting = self.waiting.borrow().clone();
        let write = waiting.unwrap_or_else(|| {
            let (shared, before) = (self.clone(), self.writing.borrow().clone());
            let write = future_to_promise(async move {
                if let Some(before) = before {
                    // It is never rejected.
                    let _ = JsFuture::from(before).await;
                }
                shared.waiting.borrow_mut().take();
                let (Some(store), Some(row)) = (&shared.store, shared.row.borrow().clone()) else {
                    return Ok(JsValue::UNDEFINED);
                };
                let (source, generation) = (row.source.clone(), row.generation.clone());
                let written = store.modify(&source, &generation, move |stored| {
                    // Another engine may have written an image or repaired a chunk meanwhile.
                    let (image, repairs) = (stored.image.take(), stored.repairs);
                    *stored = row;
                    (stored.image, stored.repairs) = (image, stored.repairs.max(repairs));
                });
                match written.await {
                    Ok(true) => {}
                    // Deleted or replaced by another tab: that stands.
                    Ok(false) => {
                        shared.keeping.set(false);
                        let gone = shared.row.borrow_mut().take();
                        shared.close_file().await;
                        if let Some(gone) = gone {
                            // What cannot be deleted goes with the next sweep.
                            let _ = store.delete_chunks(&gone).await;
                        }
                    }
                    Err(refusal) => shared.refused(refusal).await,
                }
                Ok(JsValue::UNDEFINED)
            });
            *self.waiting.borrow_mut() = Some(write.clone());
            *self.writing.borrow_mut() = Some(write.clone());
            write
        });
        // It is never rejected.
        let _ = JsFuture::from(write).await;
    }

    /// Nothing is kept from now on; it is told once.
    pub(super) async fn refused(&self, refusal: Refusal) {
        if !self.keeping.replace(false) {
            return;
        }
        let bytes = self.row.borrow().as_ref().map_or(0, |row| row.bytes);
        if refusal.full {
            self.tell_full(bytes, storage_estimate().await);
        } else {
            let message = format!(
                "the model's {bytes} bytes could not be kept ({}), so it runs from memory and is downloaded again next time",
                refusal.message
            );
            (self.hooks.on_notice)("no_storage", message, json!({ "neededBytes": bytes }));
        }
        *self.refusal.borrow_mut() = Some(refusal);
    }

    /// Whether so many bytes fit, perhaps after images, which can be made again, have gone; if not, it is told.
    pub(super) async fn has_room(&self, bytes: u64) -> bool {
        for image_gone in [false, true] {
            let Some((used, quota)) = storage_estimate().await else { return true };
            if quota - used >= bytes as f64 + SPARE {
                return true;
            }
            match &self.store {
                Some(store) if !image_gone => {
                    store.sweep().await;
                    store.drop_images().await;
                }
                _ => self.tell_full(bytes, Some((used, quota))),
            }
        }
        false
    }

    pub(super) fn tell_full(&self, bytes: u64, estimate: Option<(f64, f64)>) {
        let (used, quota) = estimate.unwrap_or_default();
        let free = (quota - used).max(0.0);
        (self.hooks.on_notice)(
            "quota",
            format!(
                "the model has {bytes} bytes, but of the {quota} that this site may use only {free} are free, or the disk is full: it runs from memory and is downloaded again next time"
            ),
            json!({ "neededBytes": bytes, "freeBytes": free, "quotaBytes": quota }),
        );
    }

    /// The end of a load: the row says when it was used, or is gone where it could not be kept whole.
    pub(super) async fn settle(self: &Rc<Self>, sha256: Option<String>, now: f64) -> bool {
        self.close_file().await;
        if self.refusal.borrow().is_some() && !self.was_complete {
            self.forget().await;
            return false;
        }
        if let Some(row) = &mut *self.row.borrow_mut() {
            row.used_at = now;
            row.sha256 = sha256.or(row.sha256.take());
        }
        self.write_row().await;
        self.row.borrow().as_ref().is_some_and(Manifest::is_complete)
    }

    pub(super) async fn forget(&self) {
        self.keeping.set(false);
        self.close_file().await;
        let row = self.row.borrow_mut().take();
        if let (Some(row), Some(store)) = (row, &self.store) {
            // What cannot be deleted has no row any more, and goes with the next sweep.
            let _ = store.delete(&row).await;
        }
    }
}
