//! The prompt of a chat. One that does not fit loses whole oldest turns; of the ways to do that it takes the one whose
//! beginning a session already holds, so that turns leave seldom and what is left is not computed again.

use super::{now_ms, Engine};
use crate::error::{Error, Result};
use crate::openai::{check_messages, Body, Cache, Chat, Truncation};
use crate::template::pieces_to_text;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// What a search begins with; then it knows better.
const BYTES_PER_TOKEN: f64 = 4.0;
/// Guesses by bytes before a search halves what is left.
const GUESSES: usize = 4;
/// Bytes that are rendered at most to see what the sessions hold.
const MOST_COMPARED_BYTES: usize = 1 << 20;
/// How many of the prompts that look as if a session held them are looked at as a whole.
const MOST_COMPARED: usize = 3;

/// The ids of a rendered chat.
#[derive(Debug, Default)]
pub(super) struct ChatPrompt {
    pub(super) ids: Vec<u32>,
    /// Whether the answer starts inside `<think>`; `None`: the model has no thoughts.
    pub(super) reasoning: Option<bool>,
    /// Messages that are not in it.
    pub(super) left_out: usize,
}

/// How many tokens a prompt may have.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// More are refused.
    most: usize,
    /// With more, oldest turns leave, so that there is room for an answer.
    fits: usize,
    /// So many stay when turns leave, so that the next ones find room.
    goal: usize,
    /// So much before `fits` the time between two turns has made room for the next question already.
    early: usize,
}

/// Whose KV is looked at.
#[derive(Clone, Copy)]
struct Holder<'a> {
    session: Option<&'a str>,
    shares: bool,
}

impl Engine {
    /// The prompt of a chat request: whole oldest turns leave where it does not fit.
    ///
    /// # Errors
    /// `context_overflow` where even the last turn alone does not fit, and what the template says of the messages.
    pub(super) fn fitting_prompt(
        &mut self,
        chat: &Chat,
        body: &Body,
        session: Option<&str>,
    ) -> Result<ChatPrompt> {
        let holder = Holder { session, shares: body.cache != Cache::Off };
        let room = self.room(body);
        Search::new(self, chat, body.truncation, true)?.fit(room, holder)
    }

    /// The beginning that the next turn of a chat will have, with room for its question.
    ///
    /// # Errors
    /// As [`Engine::fitting_prompt`].
    pub(super) fn fitting_history(
        &mut self,
        chat: &Chat,
        body: &Body,
        session: Option<&str>,
    ) -> Result<Vec<u32>> {
        let holder = Holder { session, shares: true };
        let room = self.room(body);
        let room = Room { fits: room.fits.saturating_sub(room.early), early: 0, ..room };
        Ok(Search::new(self, chat, body.truncation, false)?.fit(room, holder)?.ids)
    }

    /// Tokens of messages as a chat would send them.
    pub(super) fn count_chat(&mut self, messages: &Value) -> Result<usize> {
        check_messages(messages)?;
        let chat = Chat { messages: messages.clone(), tools: None, kwargs: Map::new() };
        Ok(Search::new(self, &chat, Truncation::Disabled, true)?.prompt(0)?.ids.len())
    }

    fn room(&self, body: &Body) -> Room {
        let context = self.context_length;
        let input = self.sessions.limits().max_input_tokens.unwrap_or(context).min(context);
        let answer = body.params.max_tokens.unwrap_or(context).min(context / 4).max(1);
        Room {
            most: input.min(context - 1),
            fits: input.min(context - answer),
            goal: input / 2,
            early: input / 16,
        }
    }
}

/// A chat and its prompts without the first so many turns. A turn is a user message and what follows it; what comes before
/// the first one, but for the system's messages, is one as well.
struct Search<'a> {
    engine: &'a mut Engine,
    chat: &'a Chat,
    list: &'a [Value],
    /// Whether the prompts ask for an answer.
    generation: bool,
    /// Where turns begin; the messages before the first of them always stay.
    turns: Vec<usize>,
    /// Bytes of the prompts' texts.
    bytes: Vec<usize>,
    bytes_per_token: f64,
    known: BTreeMap<usize, ChatPrompt>,
}

impl<'a> Search<'a> {
    /// # Errors
    /// `context_overflow` for what cannot fit whatever its tokens are.
    fn new(engine: &'a mut Engine, chat: &'a Chat, truncation: Truncation, generation: bool) -> Result<Self> {
        let list = chat.messages.as_array().map(Vec::as_slice).unwrap_or_default();
        let role = |i: usize| list.get(i).and_then(|message| message["role"].as_str()).unwrap_or_default();
        let first =
            (0..list.len()).find(|i| !["system", "developer"].contains(&role(*i))).unwrap_or(list.len());
        let mut turns = vec![first];
        if truncation == Truncation::Auto {
            turns.extend((first + 1..list.len()).filter(|i| role(*i) == "user"));
        }
        let text = |messages: &[Value]| messages.iter().map(text_bytes).sum::<usize>();
        let stays = text(&list[..first]);
        let mut bytes = vec![stays; turns.len()];
        let mut behind = 0;
        let mut end = list.len();
        for (bytes, turn) in bytes.iter_mut().zip(&turns).rev() {
            behind += text(&list[*turn..end]);
            end = *turn;
            *bytes += behind;
        }
        engine.check_size(bytes[turns.len() - 1])?;
        let bytes_per_token = BYTES_PER_TOKEN;
        Ok(Self { engine, chat, list, generation, turns, bytes, bytes_per_token, known: BTreeMap::new() })
    }

    /// The prompt that is taken.
    fn fit(mut self, room: Room, holder: Holder) -> Result<ChatPrompt> {
        let last = self.turns.len() - 1;
        let fewest = self.fewest(room.fits, 0)?;
        let tokens = self.prompt(fewest)?.ids.len();
        if fewest == last {
            // A single turn is refused by who knows the bound that it passes.
            if last > 0 && tokens > room.most {
                return Err(Error::context_overflow(format!(
                    "the last turn alone has {tokens} tokens with what always stays, {} are the most",
                    room.most
                )));
            }
            return self.take(last);
        }
        if fewest == 0 && tokens + room.early <= room.fits {
            return self.take(0);
        }
        let most = self.fewest(room.goal, fewest)?;
        let otherwise = if fewest == 0 { 0 } else { most };
        let held = self.held(fewest, most, holder)?;
        self.take(held.unwrap_or(otherwise))
    }

    /// The one of the prompts of which the sessions hold the longest beginning, where that is half of what they do not have
    /// in common.
    fn held(&mut self, fewest: usize, most: usize, holder: Holder) -> Result<Option<usize>> {
        let stays: usize = self.list[..self.turns[0]].iter().map(text_bytes).sum();
        let mut compared = 0;
        let mut likely = Vec::new();
        for without in fewest..=most {
            let end = self.turns.get(without + 1).copied().unwrap_or(self.list.len());
            let begin = self.turns[without];
            compared += stays + self.list[begin..end].iter().map(text_bytes).sum::<usize>();
            if compared > MOST_COMPARED_BYTES {
                break;
            }
            // A template that refuses a single turn only makes that nothing is known of it.
            let beginning = self.render(begin, end, false).map(|prompt| prompt.ids).unwrap_or_default();
            likely.push((self.tokens_held(&beginning, holder), without));
        }
        let common = likely.iter().map(|(tokens, _)| *tokens).min().unwrap_or(0);
        likely.sort_by(|a, b| b.cmp(a));
        let mut best = None;
        for (_, without) in likely.into_iter().take(MOST_COMPARED) {
            let ids = std::mem::take(&mut self.prompt(without)?.ids);
            let tokens = self.tokens_held(&ids, holder);
            let enough = 2 * tokens.saturating_sub(common) >= ids.len() - common.min(ids.len());
            self.prompt(without)?.ids = ids;
            best = best.max(Some((tokens, without)).filter(|_| enough));
        }
        Ok(best.map(|(_, without)| without))
    }

    fn tokens_held(&mut self, ids: &[u32], holder: Holder) -> usize {
        self.engine.sessions.held(ids, holder.session, holder.shares, now_ms())
    }

    /// The fewest turns, `low` at least, without which the prompt has at most `bound` tokens; all but the last where it has
    /// more even so. Prompts are guessed by their bytes, and none is rendered that is much longer than `bound`.
    fn fewest(&mut self, bound: usize, low: usize) -> Result<usize> {
        let most_bytes = bound.saturating_mul(self.engine.text.longest_token.max(1));
        let mut high = self.turns.len() - 1;
        let mut low = low.max(self.within(most_bytes)).min(high);
        for (without, prompt) in &self.known {
            match prompt.ids.len() <= bound {
                true => high = high.min(*without),
                false => low = low.max(without + 1),
            }
        }
        let mut guesses = 0;
        while low < high {
            let guess = match guesses < GUESSES {
                true => self.within((bound as f64 * self.bytes_per_token) as usize),
                false => usize::midpoint(low, high).max(self.within(2 * self.bytes[high])),
            };
            guesses += 1;
            let without = guess.clamp(low, high - 1);
            let tokens = self.prompt(without)?.ids.len();
            self.bytes_per_token = self.bytes[without] as f64 / tokens.max(1) as f64;
            match tokens <= bound {
                true => high = without,
                false => low = without + 1,
            }
        }
        Ok(high)
    }

    /// The fewest turns without which the prompt has at most so many bytes.
    fn within(&self, bytes: usize) -> usize {
        self.bytes.partition_point(|found| *found > bytes)
    }

    /// The prompt without the first turns.
    fn prompt(&mut self, without: usize) -> Result<&mut ChatPrompt> {
        if !self.known.contains_key(&without) {
            let prompt = self.render(self.turns[without], self.list.len(), self.generation)?;
            self.known.insert(without, prompt);
        }
        Ok(self.known.entry(without).or_default())
    }

    fn take(mut self, without: usize) -> Result<ChatPrompt> {
        self.prompt(without).map(std::mem::take)
    }

    /// Renders what always stays and the messages from `begin` to `end`.
    fn render(&mut self, begin: usize, end: usize, generation: bool) -> Result<ChatPrompt> {
        let first = self.turns[0];
        let messages = if begin == first && end == self.list.len() {
            self.chat.messages.clone()
        } else {
            self.list[..first].iter().chain(&self.list[begin..end]).cloned().collect()
        };
        let Chat { tools, kwargs, .. } = self.chat;
        let text = &mut self.engine.text;
        let rendered = text.template()?.render(&messages, tools.as_ref(), Some(generation), kwargs)?;
        // What no request asks for is no look-up.
        let ids = if generation { text.encode_prompt(&rendered)? } else { text.preload_prompt(&rendered)? };
        let inside = generation && pieces_to_text(&rendered).trim_end().ends_with("<think>");
        let thinks = inside || text.tokenizer()?.added_tokens().get("<think>").is_some();
        Ok(ChatPrompt { ids, reasoning: thinks.then_some(inside), left_out: begin - first })
    }
}

/// Bytes of all texts in a JSON value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(text_bytes).sum(),
        Value::Object(map) => map.values().map(text_bytes).sum(),
        _ => 0,
    }
}
