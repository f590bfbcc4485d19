//! What the tokenizer's cache keeps between visits: read once after a load, written when nobody asks anything. Where there
//! is no IndexedDB, or it refuses, the cache is in memory alone and nobody is told.

use super::Inner;
use crate::store::browser::sleep;
use crate::store::{tokens, Refusal};
use crate::tokenizer::{Changes, TokenCache};
use std::rc::Rc;

/// So long after new texts came they are written, ms, with what comes meanwhile.
const WRITE_MS: i32 = 1000;

/// Whether token ids are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keeping {
    /// Not in this browser, or not wanted.
    Off,
    /// Nothing is under way.
    Ready,
    /// They are being read or written.
    Busy,
}

impl Inner {
    /// Reads what is kept, if that was not done, or writes what is new. It goes on by itself.
    pub(super) fn keep_tokens(self: &Rc<Self>) {
        let due = |cache: &mut TokenCache| !cache.is_read() || cache.is_changed();
        if self.keeping.get() != Keeping::Ready || self.with_tokens(due) != Some(true) {
            return;
        }
        self.keeping.set(Keeping::Busy);
        let inner = self.clone();
        wasm_bindgen_futures::spawn_local(async move {
            let result = inner.bring_tokens().await;
            inner.keeping.set(if result.is_ok() { Keeping::Ready } else { Keeping::Off });
            inner.keep_tokens();
        });
    }

    async fn bring_tokens(&self) -> Result<(), Refusal> {
        let most = Changes::most_bytes();
        if self.with_tokens(|cache| cache.is_read()) == Some(false) {
            let record = tokens::read(most).await?;
            // A closed engine needs none.
            let _ = self.with(|engine| {
                engine.text_side_mut().read_tokens(&record);
                Ok(())
            });
            return Ok(());
        }
        loop {
            sleep(WRITE_MS, None).await;
            if !self.busy.get() {
                break;
            }
        }
        let Some(changes) = self.with_tokens(|cache| cache.changes()) else { return Ok(()) };
        let merged = changes.clone();
        tokens::update(most, move |record| merged.merge(record)).await?;
        self.with_tokens(|cache| cache.written(&changes));
        Ok(())
    }

    fn with_tokens<R>(&self, f: impl FnOnce(&mut TokenCache) -> R) -> Option<R> {
        self.with(|engine| Ok(engine.text_side_mut().tokens().map(f))).ok().flatten()
    }
}
