//! Work ahead: while nobody asks anything, an answer is computed as the next turn will bring it back. A template that leaves
//! the thoughts of earlier turns out would otherwise make that turn prefill the whole answer. So is the beginning that a
//! warm-up was given, which all chats with that system prompt then share.

use super::{now_ms, Engine};
use crate::error::{Error, Result};
use crate::metrics::ms_since;
use crate::model::{Advance, Pass, Want};
use crate::openai::{Body, Chat, Prompt};
use crate::schedule::slice_for;
use crate::session::Session;
use serde_json::{json, Map};
use web_time::Instant;

/// Most tokens of a slice: a request that comes meanwhile waits for one layer of it.
const SLICE: usize = 32;
/// One layer should not take longer than this, ms; the slice adapts to it.
const LAYER_MS: f64 = 8.0;

/// Users whose questions have no beginning in common: what their chats have is the system prompt's.
const USERS: [&str; 2] = ["A", "7"];

/// A session's history as its next turn will begin, or the beginning of all chats.
pub(super) struct Ahead {
    /// Whose; `None`: the beginning of all.
    name: Option<String>,
    ids: Vec<u32>,
    /// What is computed on, once that was begun, and the history that it was taken from.
    work: Option<(Session, Vec<u32>)>,
    pass: Option<(Pass, usize)>,
    /// Tokens of the next slice.
    slice: usize,
}

impl Engine {
    /// Encodes a chat with its answer as the next turn will bring it back, less the turns that it will leave out, and where
    /// `session` holds it, leaves its ids to be computed.
    ///
    /// # Errors
    /// What the template says of the messages; `context_overflow` where the next turn will not fit.
    pub fn foresee(&mut self, body: &Body, answer: &str, session: Option<&str>) -> Result<()> {
        let Prompt::Chat(chat) = &body.prompt else { return Ok(()) };
        let mut chat: Chat = chat.clone();
        let Some(list) = chat.messages.as_array_mut().filter(|_| !answer.is_empty()) else { return Ok(()) };
        list.push(json!({ "role": "assistant", "content": answer }));
        let ids = self.fitting_history(&chat, body, session)?;
        if let Some(name) = session.filter(|_| ids.len() < self.context_length) {
            self.ahead = Some(Ahead::new(Some(name.to_string()), ids));
        }
        Ok(())
    }

    /// Leaves the beginning that all chats with this system prompt have in common to be computed, after what is being
    /// computed. A request ends that; what is left of it goes on afterwards.
    ///
    /// # Errors
    /// What the template says of a system prompt; `unsupported_model` where there is none.
    pub fn foresee_chats(&mut self, system: &str) -> Result<()> {
        let mut prompt = |user: &str| {
            let messages =
                json!([{ "role": "system", "content": system }, { "role": "user", "content": user }]);
            let rendered = self.text.template()?.render(&messages, None, Some(true), &Map::new())?;
            self.text.preload_prompt(&rendered)
        };
        let [first, second] = [prompt(USERS[0])?, prompt(USERS[1])?];
        let common = first.iter().zip(&second).take_while(|(a, b)| a == b);
        let ids: Vec<u32> = common.map(|(id, _)| *id).collect();
        self.beginning = Some(ids).filter(|ids| !ids.is_empty() && ids.len() < self.context_length);
        Ok(())
    }

    /// Whether there is something to compute ahead.
    pub fn is_ahead(&self) -> bool {
        self.ahead.is_some() || self.beginning.is_some()
    }

    /// Computes a layer ahead; `false`: there is nothing left to do.
    ///
    /// # Errors
    /// As a turn's. The work is given up.
    pub fn work_ahead(&mut self) -> Result<bool> {
        let next = self.ahead.take().or_else(|| Some(Ahead::new(None, self.beginning.clone()?)));
        let Some(mut ahead) = next else { return Ok(false) };
        if ahead.work.is_none() {
            let Some((mut session, history)) = self.begun_on(&ahead) else { return Ok(self.is_ahead()) };
            session.truncate(session.common_prefix(&ahead.ids));
            ahead.work = Some((session, history));
        }
        let more = match ahead.advance(self) {
            // Only what the disk has makes way for a guess.
            Err(Error::OutOfMemory(_)) if self.sessions.evict_saved(ahead.name.as_deref()) => true,
            Err(error) => {
                self.beginning = self.beginning.take().filter(|_| ahead.name.is_some());
                return Err(error);
            }
            advanced => advanced?,
        };
        if !more && ahead.name.is_none() {
            self.beginning = None;
        }
        self.ahead = Some(ahead);
        if !more {
            self.end_ahead();
        }
        Ok(more || self.is_ahead())
    }

    /// What the work begins with, and its history.
    fn begun_on(&self, ahead: &Ahead) -> Option<(Session, Vec<u32>)> {
        let session = match &ahead.name {
            Some(name) => self.sessions.copy(name)?,
            None => {
                let mut session = Session::new(self.new_cache(), now_ms());
                self.sessions.share(&mut session, &ahead.ids);
                session
            }
        };
        let history = session.tokens.clone();
        Some((session, history))
    }

    /// Ends the work: what is computed stays, where the session is still the one that it was begun on.
    pub fn end_ahead(&mut self) {
        let Some(Ahead { name, work: Some((mut session, history)), .. }) = self.ahead.take() else { return };
        let Some(name) = name else {
            session.offered = session.tokens.len();
            return self.sessions.set_beginning(session);
        };
        let unchanged = self.sessions.copy(&name).is_some_and(|now| now.tokens == history);
        if unchanged && session.tokens != history {
            session.offered = session.tokens.len();
            self.sessions.replace(&name, session, now_ms());
        }
    }
}

impl Ahead {
    fn new(name: Option<String>, ids: Vec<u32>) -> Self {
        Self { name, ids, work: None, pass: None, slice: slice_for(1, f64::MAX, LAYER_MS) }
    }

    /// One layer; `false`: all is computed.
    fn advance(&mut self, engine: &Engine) -> Result<bool> {
        let Some((session, _)) = &mut self.work else { return Ok(false) };
        let (mut pass, to) = match self.pass.take() {
            Some(under_way) => under_way,
            None => {
                let from = session.tokens.len();
                let to = self.ids.len().min(from + self.slice.min(SLICE).min(session.cache.most_tokens()));
                if from == to {
                    return Ok(false);
                }
                (engine.model.start(&self.ids[from..to], &mut session.cache, Want::Nothing)?, to)
            }
        };
        let (tokens, begun) = (to - session.tokens.len(), Instant::now());
        let advanced = engine.model.advance(&mut pass, &mut session.cache)?;
        self.slice = slice_for(tokens, ms_since(begun), LAYER_MS);
        match advanced {
            Advance::Layer => self.pass = Some((pass, to)),
            Advance::Done(_) => session.tokens.extend_from_slice(&self.ids[session.tokens.len()..to]),
        }
        Ok(true)
    }
}
