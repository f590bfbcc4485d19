//! What leaves memory where a bound is passed, in which order, and what comes to it unasked.

use super::{Session, Sessions};

impl Sessions {
    /// What is to be offered to all sessions beside theirs: the beginning that a warm-up computed.
    pub fn set_beginning(&mut self, beginning: Session) {
        self.beginning = Some(beginning).filter(|session| !session.tokens.is_empty());
    }

    /// Takes in a session from disk that nobody asked for, unless some session is there by now: none makes way for it. It
    /// keeps the time of its last use, by which it leaves again, but is not dropped for its age before it was here for a time
    /// to live.
    pub fn bring_back(&mut self, id: &str, session: Session, now: f64) {
        self.expire(now);
        if !session.tokens.is_empty() && self.all.is_empty() && self.taken.is_empty() {
            self.all.insert(id.to_string(), session);
            self.brought_back = Some((id.to_string(), now));
        }
    }

    /// Drops what is missed least, but `spare`: the nameless session, the warmed-up beginning, then of the others those
    /// that are on disk before those that are not, each the least recently used first. `false`: nothing is left.
    pub fn evict(&mut self, spare: Option<&str>) -> bool {
        if spare != Some("") && self.all.remove("").is_some() || self.beginning.take().is_some() {
            return true;
        }
        self.evict_saved(spare) || self.evict_where(|id| Some(id) != spare)
    }

    /// Drops the least recently used session that is on disk as it is, but `spare`. `false`: there is none.
    pub fn evict_saved(&mut self, spare: Option<&str>) -> bool {
        let saved = |sessions: &Self, id: &str| sessions.leaving.is_some() && !sessions.unsaved.contains(id);
        let ids: Vec<String> =
            self.all.keys().filter(|id| !id.is_empty() && saved(self, id)).cloned().collect();
        self.evict_where(|id| Some(id) != spare && ids.iter().any(|saved| saved == id))
    }

    fn evict_where(&mut self, may: impl Fn(&str) -> bool) -> bool {
        let named = self.all.iter().filter(|(id, _)| may(id));
        let oldest = named.min_by(|a, b| a.1.used_at.total_cmp(&b.1.used_at)).map(|(id, _)| id.clone());
        oldest.inspect(|id| self.leave(id)).is_some()
    }

    /// Evicts others than `id` where a bound is passed.
    pub(super) fn make_room(&mut self, id: &str, now: f64) {
        self.expire(now);
        while self.named() > self.limits.max_sessions
            && self.evict_where(|name| name != id && !name.is_empty())
        {}
        while self.bytes() > self.limits.kv_bytes && self.evict(Some(id)) {}
    }

    /// Whether there are sessions that left memory and wait to be written: their pages are still there.
    pub fn is_leaving(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| !leaving.is_empty())
    }

    /// Gives those up.
    pub fn drop_leaving(&mut self) {
        self.leaving.iter_mut().for_each(Vec::clear);
    }

    pub(super) fn leave(&mut self, id: &str) {
        let (session, unsaved) = (self.all.remove(id), self.unsaved.remove(id));
        if let (Some(session), Some(leaving), true) = (session, &mut self.leaving, unsaved) {
            leaving.push((id.to_string(), session));
        }
    }

    pub(super) fn expire(&mut self, now: f64) {
        let ttl = self.limits.session_ttl_seconds * 1e3;
        let since = |id: &String, session: &Session| match &self.brought_back {
            Some((name, at)) if name == id => session.used_at.max(*at),
            _ => session.used_at,
        };
        let old = self.all.iter().filter(|(id, session)| now - since(id, session) > ttl);
        for id in old.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            self.leave(&id);
        }
    }
}
