//! Sessions: the tokens of a conversation with the KV cache that belongs to them. The longest common token prefix of
//! history and new prompt is kept, so edits, regenerations and forks are right by construction; where another session has a
//! longer one, its pages are shared. Bounded by count, age and bytes.

mod room;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::kv_cache::{KvCache, Page};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Bounds of what is kept in memory.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Limits {
    /// Named sessions at most; default 10.
    pub max_sessions: usize,
    /// Seconds after its last use that a session is dropped; default 300.
    pub session_ttl_seconds: f64,
    /// Bytes of all KV pages, shared ones counted once; a turn that alone needs more takes it. Default 512 MiB.
    pub kv_bytes: u64,
    /// Bytes of wasm memory in use, weights and all caches together; default: what the device has for it.
    pub memory_bytes: Option<u64>,
    /// Bytes of all sessions on disk; default 1 GiB, 0 writes none.
    pub disk_bytes: u64,
    /// Bytes of kept answers; default 16 MiB, 0 keeps none.
    pub response_bytes: usize,
    /// Most prompt tokens of one request; default: what the context holds.
    pub max_input_tokens: Option<usize>,
    /// Requests that are computed together at most, the others wait; default 8.
    pub max_batch_size: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_sessions: 10,
            session_ttl_seconds: 300.0,
            kv_bytes: 512 << 20,
            memory_bytes: None,
            disk_bytes: 1 << 30,
            response_bytes: 16 << 20,
            max_input_tokens: None,
            max_batch_size: 8,
        }
    }
}

/// One conversation's committed tokens and their keys and values, less those that a window has dropped.
#[derive(Debug, Clone)]
pub struct Session {
    /// Token ids in order.
    pub tokens: Vec<u32>,
    /// Their keys and values.
    pub cache: KvCache,
    /// Leading tokens that other sessions may take over; the rest was computed for a request that leaves nothing.
    pub offered: usize,
    /// ms since the epoch.
    pub created_at: f64,
    /// ms since the epoch.
    pub used_at: f64,
}

impl Session {
    /// A session without tokens.
    pub fn new(cache: KvCache, now: f64) -> Self {
        Self { tokens: Vec::new(), cache, offered: 0, created_at: now, used_at: now }
    }

    /// Cuts history and cache to what they share with `prompt`, leaving at least the prompt's last token to compute;
    /// returns how many tokens are kept.
    pub fn keep_common_prefix(&mut self, prompt: &[u32]) -> usize {
        let keep = self.common_prefix(prompt);
        self.truncate(keep);
        keep
    }

    /// Tokens that can be kept for `prompt`: all that are the same, but the prompt's last one, or fewer where a window has
    /// dropped what the next one would see.
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.cache.cut(common.min(prompt.len().saturating_sub(1)))
    }

    /// Replaces what this session holds by the first `len` tokens of `other`; their pages are shared until one side writes.
    pub fn adopt(&mut self, other: &Session, len: usize) {
        self.tokens = other.tokens[..len].to_vec();
        self.cache = other.cache.fork();
        self.cache.truncate(len);
        self.offered = len;
    }

    /// What of [`Session::common_prefix`] other sessions may take over.
    fn offer(&self, prompt: &[u32]) -> usize {
        self.cache.cut(self.common_prefix(prompt).min(self.offered))
    }

    /// Forgets everything from token `len` on, or from an earlier one ([`KvCache::cut`]).
    pub fn truncate(&mut self, len: usize) {
        let len = self.cache.cut(len);
        self.tokens.truncate(len);
        self.cache.truncate(len);
        self.offered = self.offered.min(len);
    }
}

/// What a caller may know of a session.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionInfo {
    /// The caller's name for it.
    pub id: String,
    /// Tokens held.
    pub tokens: usize,
    /// Bytes of its pages, those that it shares included.
    pub bytes: u64,
    /// Where it is.
    #[serde(rename = "where")]
    pub place: &'static str,
    /// ms since the epoch.
    pub created_at: f64,
    /// ms since the epoch.
    pub used_at: f64,
}

/// All sessions in memory. A request without a session id uses the one named `""`, which is not listed. Nor is one that a
/// turn has taken out; deleting it makes that what the turn gives back is dropped.
#[derive(Debug, Default)]
pub struct Sessions {
    all: HashMap<String, Session>,
    /// How many turns have each name's session; of those without a name there may be several.
    taken: HashMap<String, usize>,
    limits: Limits,
    /// Those that changed since they were written to disk.
    unsaved: HashSet<String>,
    /// Those that went before that, where somebody writes them.
    leaving: Option<Vec<(String, Session)>>,
    /// What a warm-up computed; it is offered like a session's.
    beginning: Option<Session>,
    /// A session that came back unasked, and when.
    brought_back: Option<(String, f64)>,
    on_disk: DiskCounts,
}

/// Sessions that requests named and memory had not.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct DiskCounts {
    /// Of these, those that came back from the disk.
    pub hits: u64,
    /// Those that did not.
    pub misses: u64,
}

impl Sessions {
    /// No sessions yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// The bounds in force.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes a session out for a turn, `None` where there is none or another turn has it; the turn's must be given back with
    /// [`Sessions::put`].
    pub fn take(&mut self, id: &str, now: f64) -> Option<Session> {
        self.expire(now);
        *self.taken.entry(id.to_string()).or_default() += 1;
        let leaving = |leaving: &mut Vec<(String, Session)>| {
            let at = leaving.iter().position(|(name, _)| name == id)?;
            Some(leaving.swap_remove(at).1)
        };
        self.all.remove(id).or_else(|| self.leaving.as_mut().and_then(leaving))
    }

    /// Replaces what `session` holds by the longest beginning of `prompt` that any session offers, where that is longer than
    /// its own; of equals the last used gives it. Pages are shared until one side writes; the other session stays as it is.
    pub fn share(&self, session: &mut Session, prompt: &[u32]) {
        let others = self.all.values().chain(&self.beginning);
        let offers = others.map(|other| (other.offer(prompt), other));
        let best = offers.max_by(|a, b| a.0.cmp(&b.0).then(a.1.used_at.total_cmp(&b.1.used_at)));
        if let Some((len, other)) = best.filter(|(len, _)| *len > session.common_prefix(prompt)) {
            session.adopt(other, len);
        }
    }

    /// Tokens of `prompt` that the next turn of `own` finds: those of that session, and where it `shares`, those that others
    /// offer.
    pub fn held(&mut self, prompt: &[u32], own: Option<&str>, shares: bool, now: f64) -> usize {
        self.expire(now);
        let own = own.and_then(|id| self.all.get(id)).map_or(0, |session| session.common_prefix(prompt));
        let others = self.all.values().chain(&self.beginning).filter(|_| shares);
        let others = others.map(|session| session.offer(prompt));
        others.max().unwrap_or(0).max(own)
    }

    /// Gives back what a turn took out, unless it was deleted or replaced meanwhile, or holds nothing.
    pub fn put(&mut self, id: &str, session: Session, now: f64) {
        let Some(turns) = self.taken.get_mut(id) else { return };
        *turns -= 1;
        if *turns == 0 {
            self.taken.remove(id);
        }
        if !session.tokens.is_empty() {
            self.insert(id, session, now);
        }
    }

    /// Sets a session and evicts others where a bound is passed.
    fn insert(&mut self, id: &str, mut session: Session, now: f64) {
        session.used_at = now;
        self.all.insert(id.to_string(), session);
        if !id.is_empty() {
            self.unsaved.insert(id.to_string());
        }
        self.make_room(id, now);
    }

    /// A second session with the same tokens; pages are shared until one side writes.
    ///
    /// # Errors
    /// `invalid_request` when `id` does not exist or is in a turn, or when `name` is empty.
    pub fn fork(&mut self, id: &str, name: &str, now: f64) -> Result<SessionInfo> {
        if name.is_empty() {
            return Err(Error::invalid_request("the fork needs a name"));
        }
        self.expire(now);
        if self.taken.contains_key(id) {
            return Err(Error::invalid_request(format!(
                "session \"{id}\" is in use by a request; fork it when that has ended"
            )));
        }
        let source = self
            .all
            .get(id)
            .ok_or_else(|| Error::invalid_request(format!("session \"{id}\" does not exist")))?;
        let fork = Session { created_at: now, ..source.clone() };
        self.taken.remove(name);
        self.insert(name, fork, now);
        self.get(name, now).ok_or_else(|| Error::invalid_request("no room for another session"))
    }

    /// What is known of one session.
    pub fn get(&mut self, id: &str, now: f64) -> Option<SessionInfo> {
        self.expire(now);
        self.all.get(id).map(|session| info(id, session))
    }

    /// All named sessions, the last used first.
    pub fn list(&mut self, now: f64) -> Vec<SessionInfo> {
        self.expire(now);
        let named = self.all.iter().filter(|(id, _)| !id.is_empty());
        let mut list: Vec<_> = named.map(|(id, session)| info(id, session)).collect();
        list.sort_by(|a, b| b.used_at.total_cmp(&a.used_at).then_with(|| a.id.cmp(&b.id)));
        list
    }

    /// Drops one session; unknown ids are fine.
    pub fn delete(&mut self, id: &str) {
        self.taken.remove(id);
        self.all.remove(id);
        self.unsaved.remove(id);
        self.leaving.iter_mut().for_each(|leaving| leaving.retain(|(name, _)| name != id));
    }

    /// From now on, what leaves memory before it was written waits for [`Sessions::take_leaving`].
    pub fn write_leaving(&mut self) {
        self.leaving.get_or_insert_default();
    }

    /// Whether memory has a session, though it be about to leave, or a turn has it.
    pub fn has(&mut self, id: &str, now: f64) -> bool {
        self.expire(now);
        let leaving = self.leaving.iter().flatten().any(|(name, _)| name == id);
        leaving || self.taken.contains_key(id) || self.all.contains_key(id)
    }

    /// Names of the sessions in memory that changed since they were written.
    pub fn unsaved(&self) -> Vec<String> {
        self.unsaved.iter().filter(|id| self.all.contains_key(*id)).cloned().collect()
    }

    /// A copy to write, which shares its pages.
    pub fn copy(&self, id: &str) -> Option<Session> {
        self.all.get(id).cloned()
    }

    /// Puts another history in the place of a session that is there; it is not used by that.
    pub fn replace(&mut self, id: &str, mut session: Session, now: f64) {
        if let Some(old) = self.all.get(id).filter(|_| !session.tokens.is_empty()) {
            session.used_at = old.used_at;
            self.all.insert(id.to_string(), session);
            if !id.is_empty() {
                self.unsaved.insert(id.to_string());
            }
            self.make_room(id, now);
        }
    }

    /// A copy was written; the session may have changed since.
    pub fn saved(&mut self, id: &str, copy: &Session) {
        if self.all.get(id).is_some_and(|session| session.tokens == copy.tokens) {
            self.unsaved.remove(id);
        }
    }

    /// The next session that left before it was written.
    pub fn take_leaving(&mut self) -> Option<(String, Session)> {
        self.leaving.as_mut()?.pop()
    }

    /// Takes a session in that was on disk, unless there is one by now or it holds nothing.
    pub fn restored(&mut self, id: &str, mut session: Session, now: f64) {
        self.on_disk.hits += u64::from(!session.tokens.is_empty());
        self.on_disk.misses += u64::from(session.tokens.is_empty());
        if !session.tokens.is_empty() && !self.has(id, now) {
            session.used_at = now;
            self.all.insert(id.to_string(), session);
            self.make_room(id, now);
        }
    }

    /// Drops all sessions.
    pub fn clear(&mut self) {
        self.taken.clear();
        self.all.clear();
        self.unsaved.clear();
        self.drop_leaving();
        self.beginning = None;
    }

    /// A request named a session that is nowhere.
    pub fn missed(&mut self) {
        self.on_disk.misses += 1;
    }

    /// How often sessions were looked for on disk.
    pub fn disk_counts(&self) -> DiskCounts {
        self.on_disk
    }

    /// Number of sessions, the nameless one counted.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Bytes of all pages; a page that several sessions hold counts once.
    pub fn bytes(&self) -> u64 {
        let all = || self.all.values().chain(&self.beginning);
        let pages = all().flat_map(|session| session.cache.pages());
        let each: HashSet<*const Page> = pages.map(Arc::as_ptr).collect();
        let page_bytes = all().next().map_or(0, |session| session.cache.shape().page_bytes());
        each.len() as u64 * page_bytes as u64
    }

    fn named(&self) -> usize {
        self.all.keys().filter(|id| !id.is_empty()).count()
    }
}

fn info(id: &str, session: &Session) -> SessionInfo {
    SessionInfo {
        id: id.to_string(),
        tokens: session.tokens.len(),
        bytes: session.cache.bytes(),
        place: "memory",
        created_at: session.created_at,
        used_at: session.used_at,
    }
}
