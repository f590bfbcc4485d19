//! What a load leaves for later, while nobody asks anything: what is kept is verified and mended, and the packed weights are
//! written beside it for the next visit.

use super::load::Loaded;
use super::models::{verify, Verified};
use super::reading::text_side;
use super::{Inner, State};
use crate::error::{Error, Result};
use crate::image;
use crate::store::browser::{each_piece, sleep, storage_estimate};
use crate::store::manifest::{Image, Manifest};
use crate::store::opfs::{self, File, IMAGES};
use crate::store::Store;
use crate::weights::Loader;
use serde_json::json;
use std::rc::Rc;
use web_sys::AbortController;

/// The work begins so long after the load, ms: the first question comes first.
const LATER_MS: i32 = 3000;
/// Whether the engine is idle is looked at so often, ms.
const LOOK_MS: i32 = 250;
/// Blocks of an image that are read between two looks at the event loop.
const READ_ON: usize = 4;
/// An image is written where the origin may store as many times its size more.
const ROOM: f64 = 4.0;

/// Where a loaded model came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The network: hashed on the way.
    Network,
    /// Chunks of the store, all or some, which nobody hashed.
    Chunks,
    /// The image, whose sums were right.
    Image,
}

/// The version that images are written by and read with.
pub(super) fn version() -> String {
    format!("{}/{}", env!("CARGO_PKG_VERSION"), crate::kernels::LAYOUT)
}

impl Inner {
    /// Begins what is left to do for a model that is kept whole. `image`: whether one is wanted.
    /// `row`: as it was before the first byte was read.
    pub(super) fn later(self: &Rc<Self>, row: &Manifest, origin: Origin, image: bool) {
        let (inner, row) = (self.clone(), row.clone());
        wasm_bindgen_futures::spawn_local(async move {
            let Ok(abort) = AbortController::new() else { return };
            inner.asides.borrow_mut().insert(0, abort.clone());
            inner.work_later(&row, origin, image, &abort).await;
            inner.asides.borrow_mut().remove(&0);
        });
    }

    async fn work_later(
        self: &Rc<Self>,
        read: &Manifest,
        origin: Origin,
        image: bool,
        abort: &AbortController,
    ) {
        sleep(LATER_MS, Some(&abort.signal())).await;
        self.idle(abort).await;
        let Ok(store) = Store::open(None).await else { return };
        let same = |row: &Manifest| row.generation == read.generation;
        let Some(mut row) = store.manifest(&read.source).await.ok().flatten().filter(same) else {
            // Deleted or replaced: what is left of it goes now.
            return store.sweep().await;
        };
        if origin != Origin::Network {
            let Ok(found) = verify(&store, &row, abort, || self.idle(abort)).await else { return };
            let Ok(Some(now)) = store.manifest(&read.source).await else { return };
            row = now;
            // A chunk that was bad when it was read may have been repaired by others since.
            let stale =
                origin == Origin::Chunks && found.bad == found.repaired && row.repairs != read.repairs;
            if stale {
                *self.stale.borrow_mut() = Some((read.source.clone(), row.generation.clone()));
            }
            if found.bad > 0 {
                // Whoever asks when this is told gets the answer of the new weights.
                self.tell_repaired(&found);
            }
            if stale {
                return self.go_on();
            }
            if found.bad > found.repaired {
                // The weights in memory are not to be trusted, so no image is made of them.
                return;
            }
        }
        store.sweep().await;
        if image && row.image.as_ref().is_none_or(|image| image.version != version()) {
            // It is derived and never needed: whatever stands against it, there is none.
            let _ = self.write_image(&store, row, abort).await;
        }
    }

    fn tell_repaired(&self, found: &Verified) {
        let Verified { bad, repaired, .. } = found;
        let notice = json!({
            "code": "repaired",
            "message": format!("{bad} of the model's stored chunks were damaged, {repaired} were fetched again"),
            "detail": { "bad": bad, "repaired": repaired },
        });
        self.event(0, &json!({ "type": "notice", "notice": notice }));
    }

    /// Waits until nobody asks anything.
    async fn idle(&self, abort: &AbortController) {
        while self.busy.get() && !abort.signal().aborted() {
            sleep(LOOK_MS, Some(&abort.signal())).await;
        }
    }

    async fn write_image(&self, store: &Store, row: Manifest, abort: &AbortController) -> Result<()> {
        let mut writer = self.with(|engine| image::Writer::new(engine))?;
        let room = storage_estimate().await.map_or(0.0, |(used, quota)| quota - used);
        if room < ROOM * writer.bytes() as f64 {
            return Ok(());
        }
        let written = self.write_image_to(&mut writer, &row.generation, abort).await;
        if written.is_err() {
            opfs::remove(IMAGES, &row.generation).await;
            return written;
        }
        let image = Image { bytes: writer.bytes(), version: version() };
        if !store.modify(&row.source, &row.generation, move |row| row.image = Some(image)).await? {
            // Deleted or replaced meanwhile.
            opfs::remove(IMAGES, &row.generation).await;
        }
        Ok(())
    }

    async fn write_image_to(
        &self,
        writer: &mut image::Writer,
        name: &str,
        abort: &AbortController,
    ) -> Result<()> {
        let mut file = File::write(IMAGES, name).await?;
        loop {
            self.idle(abort).await;
            if abort.signal().aborted() {
                return Err(Error::aborted("the engine was closed"));
            }
            if self.with(|engine| writer.step(engine, &mut file))? {
                return Ok(());
            }
            sleep(0, None).await;
        }
    }

    /// Reads what an image left in its file, beside whatever is asked meanwhile.
    pub(super) async fn read_on(self: Rc<Self>) {
        loop {
            let more = self.with(|engine| {
                let steps = (0..READ_ON).map(|_| engine.read_on());
                steps.reduce(|all, more| Ok(all? && more?)).unwrap_or(Ok(false))
            });
            match more {
                Ok(true) => sleep(0, None).await,
                Err(Error::Integrity(_)) => return self.give_up_image(),
                // All is there, or the engine is not any more.
                _ => break,
            }
        }
        self.imaged.borrow_mut().take();
    }

    /// What is still in the image's file is damaged: before the next request the model is read anew from its chunks.
    pub(super) fn give_up_image(self: &Rc<Self>) {
        let Some((source, generation)) = self.imaged.borrow_mut().take() else { return };
        *self.stale.borrow_mut() = Some((source.clone(), generation.clone()));
        self.unverified.set(true);
        self.go_on();
        wasm_bindgen_futures::spawn_local(async move {
            let Ok(store) = Store::open(None).await else { return };
            // Where that is not kept, the next load finds the damage again.
            let _ = store.modify(&source, &generation, |row| row.image = None).await;
        });
    }

    /// Reads the weights of the loaded model again from the store. What sessions hold came of the damaged ones.
    pub(super) async fn reload(&self, source: &str, generation: &str) {
        let Ok(store) = Store::open(None).await else { return };
        let whole = |row: &Manifest| row.generation == generation && row.is_complete();
        let find = async || store.manifest(source).await.ok().flatten().filter(whole);
        // Where another tab has deleted or replaced the file, the engine goes on as it is, if it can.
        let Some(mut row) = find().await else { return self.unload_partial() };
        if self.unverified.take() {
            // What damaged the image may have damaged the chunks, which nobody looked at yet.
            let Ok(abort) = AbortController::new() else { return };
            if let Ok(found) = verify(&store, &row, &abort, || std::future::ready(())).await {
                if found.bad > 0 {
                    self.tell_repaired(&found);
                }
            }
            match find().await {
                Some(now) => row = now,
                None => return self.unload_partial(),
            }
        }
        let dropped = self.with(|engine| {
            engine.drop_weights();
            Ok(())
        });
        if dropped.is_err() {
            return;
        }
        let result = self.stored_model(&store, &row).await;
        let replaced = result.and_then(|(model, plan, text)| {
            self.with(|engine| {
                engine.replace_model(model, plan, text);
                Ok(())
            })
        });
        if replaced.is_err() && matches!(&*self.state.borrow(), State::Ready(_)) {
            *self.state.borrow_mut() = State::Empty;
        }
    }

    /// A model of which some is in a damaged image cannot answer.
    fn unload_partial(&self) {
        if self.with(|engine| Ok(engine.model().embed_tokens.matrix().is_none())).unwrap_or(false) {
            *self.state.borrow_mut() = State::Empty;
        }
    }

    async fn stored_model(&self, store: &Store, row: &Manifest) -> Result<Loaded> {
        let (mut loader, mut text) = (Loader::new(Some(row.bytes)), None);
        for i in 0..row.chunks.len() {
            let chunk = store.chunk(row, i, None).await?;
            let chunk = chunk.ok_or_else(|| Error::integrity("a chunk is not kept any more"))?;
            let mut result = Ok(());
            each_piece(&chunk, |piece| {
                if result.is_ok() {
                    result = loader.push(piece);
                }
            });
            result?;
            if text.is_none() {
                text = text_side(&mut loader)?;
            }
        }
        let (model, plan) = loader.finish()?;
        let text = text.ok_or_else(|| Error::bad_model("the file ends in its header"))?;
        Ok((model, plan, text))
    }
}
