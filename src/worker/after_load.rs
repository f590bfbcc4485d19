//! What a load leaves for the time in which nobody asks anything: the session that was used last comes back to memory, and
//! the beginning of all chats with a system prompt is computed. A request ends both.

use super::saving::LATER_MS;
use super::Inner;
use crate::engine::now_ms;
use crate::error::Result;
use crate::snapshot::Row;
use crate::store::browser::sleep;
use std::rc::Rc;
use wasm_bindgen_futures::spawn_local;

impl Inner {
    /// Begins it; `system` is the system prompt, if one was given.
    pub(super) fn after_load(self: &Rc<Self>, system: Option<String>) {
        let inner = self.clone();
        spawn_local(async move {
            while inner.busy.get() {
                sleep(LATER_MS, None).await;
            }
            // Whatever stands against it, the request that names the session looks again.
            let _ = inner.restore_last().await;
            if let Some(system) = system {
                // A template that refuses it will say so to who sends it.
                let _ = inner.with(|engine| engine.foresee_chats(&system));
                if !inner.busy.get() {
                    inner.work_ahead();
                }
            }
        });
    }

    /// Brings back the session that was used last, as far as there is room for it.
    async fn restore_last(&self) -> Result<()> {
        let rows = async || Ok(self.open_disk().await?.sessions().await?);
        if self.on_disk(rows()).await?.is_empty() {
            return Ok(());
        }
        // The disk is not held meanwhile: a request that came would wait for it.
        let model = self.identity_in_idle_time().await?;
        let cache = self.with(|engine| Ok(engine.model().new_cache()))?;
        let fits = |row: &Row| row.fits(&model, &row.id, cache.shape(), cache.window());
        let last = |rows: Vec<Row>| rows.into_iter().find(fits);
        self.on_disk(async {
            let Some(row) = last(rows().await?) else { return Ok(()) };
            let (id, tokens) = (row.id.clone(), row.tokens.len());
            let budget = self.with(|engine| Ok(engine.page_budget()))?;
            let first = self.with(|engine| Ok(engine.sessions().is_empty()))?;
            if budget.room() < row.bytes || !first {
                return Ok(());
            }
            let session = self.open_disk().await?.restore_session(row, budget, || !self.busy.get()).await?;
            // What is not whole is left to the request that names it.
            if session.tokens.len() == tokens {
                self.with(|engine| {
                    engine.sessions().bring_back(&id, session, now_ms());
                    Ok(())
                })?;
            }
            Ok(())
        })
        .await
    }
}
