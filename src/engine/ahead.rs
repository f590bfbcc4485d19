//! Work ahead: while nobody asks anything, an answer is computed as the next turn will bring it back. A template that leaves
//! the thoughts of earlier turns out would otherwise make that turn prefill the whole answer.

use super::{now_ms, Engine};
use crate::error::Result;
use crate::metrics::ms_since;
use crate::model::{Advance, Pass, Want};
use crate::openai::{Body, Chat, Prompt};
use crate::session::Session;
use serde_json::json;
use web_time::Instant;

/// Tokens of a slice: a request that comes meanwhile waits for one layer of it.
const SLICE: usize = 32;
/// As long as a step takes, ms.
const STEP_MS: f64 = 10.0;

/// A session's history as its next turn will begin.
pub(super) struct Ahead {
    name: String,
    ids: Vec<u32>,
    /// What is computed on, once that was begun, and the history that it was taken from.
    work: Option<(Session, Vec<u32>)>,
    pass: Option<(Pass, usize)>,
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
            self.ahead = Some(Ahead { name: name.to_string(), ids, work: None, pass: None });
        }
        Ok(())
    }

    /// Whether there is something to compute ahead.
    pub fn is_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Computes ahead for some ms; `false`: there is nothing left to do.
    ///
    /// # Errors
    /// As a turn's. The work is given up.
    pub fn work_ahead(&mut self) -> Result<bool> {
        let Some(mut ahead) = self.ahead.take() else { return Ok(false) };
        if ahead.work.is_none() {
            let Some(mut session) = self.sessions.copy(&ahead.name) else { return Ok(false) };
            let history = session.tokens.clone();
            session.truncate(session.common_prefix(&ahead.ids));
            ahead.work = Some((session, history));
        }
        let begun = Instant::now();
        let mut more = true;
        while more && ms_since(begun) < STEP_MS {
            more = ahead.advance(self)?;
        }
        self.ahead = Some(ahead);
        if !more {
            self.end_ahead();
        }
        Ok(more)
    }

    /// Ends the work: what is computed stays, where the session is still the one that it was begun on.
    pub fn end_ahead(&mut self) {
        let Some(Ahead { name, work: Some((mut session, history)), .. }) = self.ahead.take() else { return };
        let unchanged = self.sessions.copy(&name).is_some_and(|now| now.tokens == history);
        if unchanged && session.tokens != history {
            session.offered = session.tokens.len();
            self.sessions.replace(&name, session, now_ms());
        }
    }
}

impl Ahead {
    /// One layer; `false`: all is computed.
    fn advance(&mut self, engine: &Engine) -> Result<bool> {
        let Some((session, _)) = &mut self.work else { return Ok(false) };
        let (mut pass, to) = match self.pass.take() {
            Some(under_way) => under_way,
            None => {
                let from = session.tokens.len();
                let to = self.ids.len().min(from + SLICE.min(session.cache.most_tokens()));
                if from == to {
                    return Ok(false);
                }
                (engine.model.start(&self.ids[from..to], &mut session.cache, Want::Nothing)?, to)
            }
        };
        match engine.model.advance(&mut pass, &mut session.cache)? {
            Advance::Layer => self.pass = Some((pass, to)),
            Advance::Done(_) => session.tokens.extend_from_slice(&self.ids[session.tokens.len()..to]),
        }
        Ok(true)
    }
}
