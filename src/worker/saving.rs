//! Sessions between memory and disk: written when nobody asks anything, or when they leave memory; read when a request names
//! one that is not there. One at a time, so that none that is deleted is written after that.

use super::wire::{self, Request};
use super::Inner;
use crate::engine::{now_ms, Engine};
use crate::error::{Error, Result};
use crate::image::Identity;
use crate::session::{Session, SessionInfo};
use crate::snapshot::Row;
use crate::store::browser::{sleep, within};
use crate::store::Store;
use std::future::Future;
use std::rc::Rc;
use wasm_bindgen::JsValue;
use wasm_bindgen_futures::spawn_local;

/// Sessions are written so long after a request, ms, if nobody asks anything.
pub(super) const LATER_MS: i32 = 200;
/// Bytes of pages that are written at a time.
const BATCH: u64 = 8 << 20;
/// What takes longer is given up, ms, and with it all that is kept on this disk: some databases never answer.
const DISK_MS: i32 = 10_000;
/// How often a row is read again that another tab writes meanwhile, or room is made.
const TRIES: usize = 4;

impl Inner {
    /// Lets what changed be written as soon as nobody asks anything.
    pub(super) fn save_later(self: &Rc<Self>) {
        let unsaved = |inner: &Self| inner.with(|engine| Ok(engine.sessions().unsaved())).unwrap_or_default();
        if !self.keeps_sessions.get() || unsaved(self).is_empty() || self.saver.replace(true) {
            return;
        }
        let inner = self.clone();
        spawn_local(async move {
            sleep(LATER_MS, None).await;
            loop {
                if inner.busy.get() || inner.working_ahead.get() {
                    sleep(LATER_MS, None).await;
                    continue;
                }
                let Some(id) = unsaved(&inner).pop() else { break };
                // Before the disk is held: the first time it takes a while, in which somebody may ask something.
                if inner.identity_in_idle_time().await.is_err() || inner.save(&id).await.is_err() {
                    // It stays unsaved, and is tried again after the next request.
                    break;
                }
            }
            inner.saver.set(false);
        });
    }

    /// Writes sessions that left memory before they were written.
    pub(super) async fn save_leaving(&self) {
        let write_one = async || {
            // Not before it is this one's turn: until then memory gives it back.
            let leaving = self.with(|engine| Ok(engine.sessions().take_leaving()))?;
            match &leaving {
                Some((id, session)) => self.write(id, session).await,
                None => Ok(()),
            }
        };
        while self.with(|engine| Ok(engine.sessions().is_leaving())).unwrap_or_default() {
            // What cannot be kept is computed again.
            let written = self.on_disk(write_one()).await;
            if written.is_err() && !self.keeps_sessions.get() {
                let _ = self.with(|engine| {
                    engine.sessions().drop_leaving();
                    Ok(())
                });
            }
        }
    }

    /// Reads or writes on the disk, one at a time, as long as it answers.
    pub(super) async fn on_disk<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        if !self.keeps_sessions.get() {
            return Err(Error::invalid_request("this engine keeps no sessions on disk"));
        }
        self.alone(work).await
    }

    async fn alone<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let one = async {
            let lock = self.disk.lock().await;
            let result = work.await;
            drop(lock);
            Ok(result)
        };
        within(DISK_MS, one, "").await.unwrap_or_else(|_| {
            self.keeps_sessions.set(false);
            Err(Error::out_of_memory("the browser's database does not answer: no session is kept any more"))
        })
    }

    /// Writes a session that is in memory; one that is not is on disk already, or nowhere.
    async fn save(&self, id: &str) -> Result<()> {
        self.on_disk(async {
            let Some(session) = self.with(|engine| Ok(engine.sessions().copy(id)))? else { return Ok(()) };
            self.write(id, &session).await?;
            self.with(|engine| {
                engine.sessions().saved(id, &session);
                Ok(())
            })
        })
        .await
    }

    async fn write(&self, id: &str, session: &Session) -> Result<()> {
        let (model, store) = (self.identity().await?, self.open_disk().await?);
        let most = (BATCH / session.cache.shape().page_bytes() as u64).max(1) as usize;
        let mut before = store.session(&model, id).await?;
        let mut tries = 0;
        loop {
            let (row, pages) = Row::of(id, &model, session, before.as_ref(), most);
            match store.put_session(&row, before.as_ref(), pages).await {
                Ok(true) if row.tokens.len() == session.tokens.len() => break,
                Ok(true) => before = Some(row),
                Ok(false) if tries < TRIES => {
                    // Another tab wrote it.
                    before = store.session(&model, id).await?;
                    tries += 1;
                }
                Err(refusal) if refusal.full && tries < TRIES => {
                    let rows = store.sessions().await?;
                    let Some(oldest) = rows.iter().rfind(|row| row.id != id || row.model != model) else {
                        return Err(refusal.into());
                    };
                    store.delete_session(&oldest.model, &oldest.id).await?;
                    tries += 1;
                }
                Ok(false) => return Err(Error::out_of_memory("other tabs write the same session")),
                Err(refusal) => return Err(refusal.into()),
            }
        }
        self.keep_within(&store, &model, id).await
    }

    /// Deletes the least recently used sessions where the disk has more than it may.
    async fn keep_within(&self, store: &Store, model: &str, id: &str) -> Result<()> {
        if !self.swept.replace(true) {
            store.sweep_sessions().await?;
        }
        let most = self.with(|engine| Ok(engine.sessions().limits().disk_bytes))?;
        let mut bytes = 0;
        for row in store.sessions().await? {
            bytes += row.bytes;
            if bytes > most && (row.id != id || row.model != model) {
                store.delete_session(&row.model, &row.id).await?;
            }
        }
        Ok(())
    }

    /// Brings back the session that a request names, where memory has it not. Whatever stands against it, the turn computes
    /// it anew.
    pub(super) async fn restore_session(&self, id: &str) {
        if self.may_be_on_disk(id) {
            while let Ok(false) = self.on_disk(self.restore(id)).await {
                self.save_leaving().await;
            }
        }
    }

    /// `false`: there is no room before those that leave are written.
    async fn restore(&self, id: &str) -> Result<bool> {
        let miss = || {
            self.with(|engine| {
                engine.sessions().missed();
                Ok(true)
            })
        };
        let store = self.open_disk().await?;
        if !store.has_session(id).await? {
            return miss();
        }
        let (model, cache) = (self.identity().await?, self.with(|engine| Ok(engine.model().new_cache()))?);
        let fits = |row: &Row| row.fits(&model, id, cache.shape(), cache.window());
        let row = store.session(&model, id).await?.filter(fits);
        let Some(row) = row else { return miss() };
        if !self.with(|engine| engine.make_room_for(row.bytes))? {
            return Ok(false);
        }
        let budget = self.with(|engine| Ok(engine.page_budget()))?;
        let session = store.restore_session(row.clone(), budget, || true).await?;
        if session.tokens.len() < row.tokens.len() {
            // A page is damaged: it goes, with what follows it, and is written anew by and by.
            match session.tokens.is_empty() {
                true => store.delete_session(&model, id).await?,
                false => {
                    let (cut, _) = Row::of(id, &model, &session, Some(&row), 0);
                    store.put_session(&cut, Some(&row), Vec::new()).await?;
                }
            }
        }
        self.with(|engine| {
            engine.sessions().restored(id, session, now_ms());
            Ok(true)
        })
    }

    /// The store. Where it does not open, it is not tried at every request again.
    pub(super) async fn open_disk(&self) -> Result<Store> {
        Store::open(None).await.map_err(|refusal| {
            self.keeps_sessions.set(false);
            refusal.into()
        })
    }

    /// What the loaded weights are known by.
    async fn identity(&self) -> Result<String> {
        self.identity_when(async || {}).await
    }

    /// As [`Inner::identity`], but stands back while somebody asks something.
    pub(super) async fn identity_in_idle_time(&self) -> Result<String> {
        let idle = async || {
            while self.busy.get() || self.working_ahead.get() {
                sleep(LATER_MS, None).await;
            }
        };
        self.identity_when(idle).await
    }

    /// Sums the weights in steps, each when `may` comes back, unless that was done.
    async fn identity_when(&self, may: impl AsyncFn()) -> Result<String> {
        let mut identity = None;
        loop {
            if let Some(known) = self.with(|engine| Ok(engine.text_side().identity().map(str::to_string)))? {
                return Ok(known);
            }
            self.with(|engine| {
                if let Some(known) = identity.get_or_insert_with(|| Identity::new(engine)).step(engine)? {
                    engine.text_side_mut().set_identity(known);
                }
                Ok(())
            })?;
            sleep(0, None).await;
            may().await;
        }
    }

    /// Answers the `sessions.*` requests.
    pub(super) fn answer_about_sessions(self: &Rc<Self>, request: Request) {
        let inner = self.clone();
        spawn_local(async move {
            let result = inner.about_sessions(&request).await;
            inner.settle(request.id, result);
            inner.save_later();
        });
    }

    async fn about_sessions(&self, request: &Request) -> Result<JsValue> {
        let params = request.json()?;
        let string = |key: &str| {
            let word = params[key].as_str().map(str::to_string);
            word.ok_or_else(|| Error::invalid_request(format!("{key} must be a string")))
        };
        match request.method.as_str() {
            "sessions.list" => Ok(wire::to_js(&self.all_sessions().await?)),
            "sessions.get" => {
                let id = string("id")?;
                let all = self.all_sessions().await?;
                Ok(wire::to_js(&all.into_iter().find(|info| info.id == id)))
            }
            "sessions.fork" => {
                let (id, name) = (string("id")?, string("as")?);
                self.restore_session(&id).await;
                Ok(wire::to_js(&self.with(|engine| engine.sessions().fork(&id, &name, now_ms()))?))
            }
            "sessions.save" => {
                let id = string("id")?;
                if !self.all_sessions().await?.iter().any(|info| info.id == id) {
                    return Err(Error::invalid_request(format!("session \"{id}\" does not exist")));
                }
                self.save(&id).await?;
                Ok(JsValue::NULL)
            }
            "sessions.delete" => {
                let id = string("id")?;
                self.forget_waiting(Some(&id));
                self.forget(|engine| engine.sessions().delete(&id), async {
                    let store = self.open_disk().await?;
                    if !store.has_session(&id).await? {
                        return Ok(());
                    }
                    store.delete_session(&self.identity().await?, &id).await.map_err(Error::from)
                })
                .await
            }
            "sessions.clear" => {
                self.forget_waiting(None);
                self.forget(|engine| engine.sessions().clear(), async {
                    let (store, model) = (self.open_disk().await?, self.identity().await?);
                    store.delete_sessions(&model).await.map_err(Error::from)
                })
                .await
            }
            other => Err(Error::invalid_request(format!("{other} is not available in this version"))),
        }
    }

    /// Forgets in memory at once, and again when nobody reads the disk: what was being read then comes to memory meanwhile.
    async fn forget(
        &self,
        memory: impl Fn(&mut Engine),
        disk: impl Future<Output = Result<()>>,
    ) -> Result<JsValue> {
        let in_memory = || {
            self.with(|engine| {
                memory(engine);
                Ok(())
            })
        };
        in_memory()?;
        let kept = self.keeps_sessions.get();
        let both = async {
            in_memory()?;
            disk.await
        };
        match self.alone(both).await {
            // Where none is kept, an earlier visit may have left some; if that cannot be known, there are none.
            Err(_) if !kept => Ok(JsValue::NULL),
            result => result.map(|()| JsValue::NULL),
        }
    }

    /// Sessions of memory and disk, the last used first.
    async fn all_sessions(&self) -> Result<Vec<SessionInfo>> {
        let mut rows = Vec::new();
        if self.keeps_sessions.get() {
            let read = async {
                let mut rows = self.open_disk().await?.sessions().await?;
                if !rows.is_empty() {
                    let model = self.identity().await?;
                    rows.retain(|row| row.model == model);
                }
                Ok(rows)
            };
            // Where the disk gives none, those in memory are all.
            rows = self.on_disk(read).await.unwrap_or_default();
        }
        let (mut all, unsaved) =
            self.with(|engine| Ok((engine.sessions().list(now_ms()), engine.sessions().unsaved())))?;
        for row in rows {
            match all.iter_mut().find(|info| info.id == row.id) {
                // What was written before the last turn is not this session.
                Some(_) if unsaved.contains(&row.id) => {}
                Some(info) => info.place = "both",
                None => all.push(SessionInfo {
                    id: row.id,
                    tokens: row.tokens.len(),
                    bytes: row.bytes,
                    place: "disk",
                    created_at: row.created_at,
                    used_at: row.used_at,
                }),
            }
        }
        all.sort_by(|a, b| b.used_at.total_cmp(&a.used_at).then_with(|| a.id.cmp(&b.id)));
        Ok(all)
    }
}
