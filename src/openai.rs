//! OpenAI's request and reply shapes for chat and text completion: strict parsing of bodies, building of replies and chunks.
//! A field that is unknown, or that this engine cannot honour, is refused rather than ignored.

use crate::error::{Error, Result};
use crate::generation::{Finish, Progress};
use crate::metrics::Timings;
use crate::sampler::SamplingParams;
use serde_json::{json, Map, Value};

const SAMPLING: [&str; 12] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "logit_bias",
    "max_tokens",
    "max_completion_tokens",
];
const COMMON: [&str; 7] = ["model", "stream", "stream_options", "session_id", "cache", "return_tokens", "n"];
const CHAT: [&str; 4] = ["messages", "tools", "chat_template_kwargs", "truncation"];
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// What is to be continued.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// What the chat template renders.
    Chat(Chat),
    /// A plain text; the beginning-of-text token is added where the model wants one.
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
}

/// Messages for the chat template, with tools and further template variables.
#[derive(Debug, Clone)]
pub struct Chat {
    /// An array of messages.
    pub messages: Value,
    /// An array of tools.
    pub tools: Option<Value>,
    /// Further template variables.
    pub kwargs: Map<String, Value>,
}

/// What a request wants of the caches beside its own session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Cache {
    /// An answer that was given before, or a new one that is kept; beginnings of other sessions.
    #[default]
    Auto,
    /// Nothing: no answer and no beginning is taken from elsewhere or left for others.
    Off,
    /// A new answer, which is kept; beginnings as with `Auto`.
    Refresh,
}

/// What becomes of a chat that is longer than the context, as OpenAI's Responses API names it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Truncation {
    /// Whole oldest turns are left out.
    #[default]
    Auto,
    /// It is refused.
    Disabled,
}

/// A parsed and validated request body.
#[derive(Debug, Clone)]
pub struct Body {
    /// What is to be continued.
    pub prompt: Prompt,
    /// Validated sampling parameters.
    pub params: SamplingParams,
    /// Whether chunks are wanted.
    pub stream: bool,
    /// Whether the stream ends with a chunk that carries `usage`.
    pub include_usage: bool,
    /// The conversation whose KV is kept.
    pub session_id: Option<String>,
    /// Whether replies carry `token_ids`.
    pub return_tokens: bool,
    /// What is wanted of the caches.
    pub cache: Cache,
    /// What becomes of a chat that is longer than the context.
    pub truncation: Truncation,
}

impl Body {
    /// Parses the body of a chat completion; `n_tokens` bounds the ids of `logit_bias`.
    pub fn chat(body: &Value, n_tokens: usize) -> Result<Self> {
        let map = object(body, "the request body")?;
        known(map, &[&SAMPLING[..], &COMMON, &CHAT])?;
        let messages = map.get("messages").ok_or_else(|| Error::invalid_request("messages is missing"))?;
        check_messages(messages)?;
        let tools = match present(map, "tools") {
            None => None,
            Some(Value::Array(tools)) if tools.is_empty() => None,
            Some(tools @ Value::Array(_)) => Some(tools.clone()),
            Some(_) => return Err(Error::invalid_request("tools must be an array")),
        };
        let kwargs = match present(map, "chat_template_kwargs") {
            None => Map::new(),
            Some(kwargs) => object(kwargs, "chat_template_kwargs")?.clone(),
        };
        Self::rest(map, Prompt::Chat(Chat { messages: messages.clone(), tools, kwargs }), n_tokens)
    }

    /// Parses the body of a text completion.
    pub fn completion(body: &Value, n_tokens: usize) -> Result<Self> {
        let map = object(body, "the request body")?;
        known(map, &[&SAMPLING[..], &COMMON, &["prompt"]])?;
        let prompt = match map.get("prompt") {
            Some(Value::String(text)) => Prompt::Text(text.clone()),
            Some(Value::Array(ids)) => Prompt::Tokens(token_ids(ids)?),
            _ => return Err(Error::invalid_request("prompt must be a string or an array of token ids")),
        };
        Self::rest(map, prompt, n_tokens)
    }

    fn rest(map: &Map<String, Value>, prompt: Prompt, n_tokens: usize) -> Result<Self> {
        if let Some(n) = present(map, "n") {
            if n.as_f64() != Some(1.0) {
                return Err(Error::invalid_request(format!("n must be 1, found {n}")));
            }
        }
        let cache = match present(map, "cache").map(|cache| (cache, cache.as_str())) {
            None | Some((_, Some("auto"))) => Cache::Auto,
            Some((_, Some("off"))) => Cache::Off,
            Some((_, Some("refresh"))) => Cache::Refresh,
            Some((found, _)) => {
                return Err(Error::invalid_request(format!(
                    "cache must be auto, off or refresh, found {found}"
                )))
            }
        };
        let truncation = match present(map, "truncation").map(|truncation| (truncation, truncation.as_str()))
        {
            None | Some((_, Some("auto"))) => Truncation::Auto,
            Some((_, Some("disabled"))) => Truncation::Disabled,
            Some((found, _)) => {
                return Err(Error::invalid_request(format!(
                    "truncation must be auto or disabled, found {found}"
                )))
            }
        };
        text(map, "model")?;
        let include_usage = match present(map, "stream_options") {
            None => false,
            Some(options) => {
                let options = object(options, "stream_options")?;
                known(options, &[&["include_usage"]])?;
                flag(options, "include_usage")?
            }
        };
        let session_id = text(map, "session_id")?;
        if session_id.as_deref() == Some("") {
            return Err(Error::invalid_request("session_id must not be empty"));
        }
        Ok(Self {
            prompt,
            params: SamplingParams::from_json(map, n_tokens)?,
            stream: flag(map, "stream")?,
            include_usage,
            session_id,
            return_tokens: flag(map, "return_tokens")?,
            cache,
            truncation,
        })
    }
}

/// Checks that `messages` is a non-empty array of OpenAI messages with text contents.
pub fn check_messages(messages: &Value) -> Result<()> {
    let list = messages.as_array().ok_or_else(|| Error::invalid_request("messages must be an array"))?;
    if list.is_empty() {
        return Err(Error::invalid_request("messages is empty; at least one message is needed"));
    }
    for (i, message) in list.iter().enumerate() {
        let map = object(message, &format!("messages[{i}]"))?;
        let fields = ["role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"];
        known(map, &[&fields])
            .map_err(|e| Error::invalid_request(format!("messages[{i}]: {}", e.message())))?;
        match map.get("role").and_then(Value::as_str) {
            Some(role) if ROLES.contains(&role) => {}
            _ => return Err(Error::invalid_request(format!("messages[{i}].role must be one of {ROLES:?}"))),
        }
        match map.get("content") {
            Some(Value::String(_) | Value::Null) => {}
            None if map.contains_key("tool_calls") => {}
            _ => {
                return Err(Error::invalid_request(format!("messages[{i}].content must be a string or null")))
            }
        }
        for field in ["reasoning_content", "tool_call_id", "name"] {
            text(map, field)
                .map_err(|e| Error::invalid_request(format!("messages[{i}]: {}", e.message())))?;
        }
        if present(map, "tool_calls").is_some_and(|calls| !calls.is_array()) {
            return Err(Error::invalid_request(format!("messages[{i}].tool_calls must be an array")));
        }
    }
    Ok(())
}

/// Token ids out of JSON numbers.
pub fn token_ids(ids: &[Value]) -> Result<Vec<u32>> {
    ids.iter()
        .map(|id| match id.as_f64() {
            Some(x) if x >= 0.0 && x.fract() == 0.0 && x <= u32::MAX as f64 => Ok(x as u32),
            _ => Err(Error::invalid_request(format!("{id} is no token id"))),
        })
        .collect()
}

fn object<'a>(value: &'a Value, what: &str) -> Result<&'a Map<String, Value>> {
    value.as_object().ok_or_else(|| Error::invalid_request(format!("{what} must be an object")))
}

fn known(map: &Map<String, Value>, lists: &[&[&str]]) -> Result<()> {
    match map.iter().find(|(key, value)| !value.is_null() && !lists.iter().any(|l| l.contains(&key.as_str())))
    {
        Some((key, _)) => Err(Error::invalid_request(format!(
            "field {} is unknown or not available in this version",
            key.escape_debug().take(64).collect::<String>()
        ))),
        None => Ok(()),
    }
}

fn present<'a>(map: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    map.get(key).filter(|value| !value.is_null())
}

fn flag(map: &Map<String, Value>, key: &str) -> Result<bool> {
    match present(map, key) {
        None => Ok(false),
        Some(Value::Bool(b)) => Ok(*b),
        Some(_) => Err(Error::invalid_request(format!("{key} must be true or false"))),
    }
}

fn text(map: &Map<String, Value>, key: &str) -> Result<Option<String>> {
    match present(map, key) {
        None => Ok(None),
        Some(Value::String(s)) => Ok(Some(s.clone())),
        Some(_) => Err(Error::invalid_request(format!("{key} must be a string"))),
    }
}

/// What all chunks and the reply of one request share.
#[derive(Debug, Clone)]
pub struct Frame {
    /// `chatcmpl-…` or `cmpl-…`.
    pub id: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Chat or text completion.
    pub chat: bool,
}

impl Frame {
    /// A chunk of a stream. `text` is the new content, `reasoning` the new thoughts.
    pub fn chunk(&self, text: &str, reasoning: &str, ids: Option<&[u32]>, finish: Option<Finish>) -> Value {
        let mut choice = if self.chat {
            let mut delta = Map::new();
            if !reasoning.is_empty() {
                delta.insert("reasoning_content".into(), reasoning.into());
            }
            if !text.is_empty() {
                delta.insert("content".into(), text.into());
            }
            json!({ "index": 0, "delta": delta })
        } else {
            json!({ "index": 0, "text": text })
        };
        choice["finish_reason"] = finish.map_or(Value::Null, |f| f.as_str().into());
        if let Some(ids) = ids {
            choice["token_ids"] = ids.into();
        }
        self.wrap(".chunk", json!([choice]))
    }

    /// The first chunk of a chat, which names the role.
    pub fn opening(&self) -> Value {
        let choice =
            json!({ "index": 0, "delta": { "role": "assistant", "content": "" }, "finish_reason": null });
        self.wrap(".chunk", json!([choice]))
    }

    /// The chunk without choices that carries `usage`.
    pub fn usage_chunk(&self, progress: &Progress) -> Value {
        let mut chunk = self.wrap(".chunk", json!([]));
        chunk["usage"] = usage(progress);
        chunk
    }

    /// The whole reply.
    pub fn reply(
        &self,
        text: &str,
        reasoning: &str,
        ids: Option<&[u32]>,
        finish: Finish,
        p: &Progress,
    ) -> Value {
        let mut choice = if self.chat {
            let mut message = json!({ "role": "assistant", "content": text });
            if !reasoning.is_empty() {
                message["reasoning_content"] = reasoning.into();
            }
            json!({ "index": 0, "message": message })
        } else {
            json!({ "index": 0, "text": text })
        };
        choice["finish_reason"] = finish.as_str().into();
        if let Some(ids) = ids {
            choice["token_ids"] = ids.into();
        }
        let mut reply = self.wrap("", json!([choice]));
        reply["usage"] = usage(p);
        reply
    }

    fn wrap(&self, suffix: &str, choices: Value) -> Value {
        let object = match (self.chat, suffix) {
            (true, suffix) => format!("chat.completion{suffix}"),
            (false, _) => "text_completion".to_string(),
        };
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices })
    }
}

/// OpenAI's `usage`.
pub fn usage(p: &Progress) -> Value {
    json!({
        "prompt_tokens": p.prompt_tokens,
        "completion_tokens": p.completion_tokens,
        "total_tokens": p.prompt_tokens + p.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": p.reused_tokens },
        "completion_tokens_details": {
            "accepted_prediction_tokens": p.accepted_tokens,
            "rejected_prediction_tokens": p.drafted_tokens - p.accepted_tokens,
        },
    })
}

/// The `qandle` member of a reply or last chunk; `left_out` messages are not in the prompt.
pub fn extra(
    session_id: Option<&str>,
    p: &Progress,
    timings: &Timings,
    cached: bool,
    left_out: usize,
) -> Value {
    json!({
        "session_id": session_id,
        "cached": cached,
        "cached_ratio": p.reused_tokens as f64 / p.prompt_tokens.max(1) as f64,
        "dropped_messages": left_out,
        "timings": timings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(body: Value) -> &'static str {
        Body::chat(&body, 100).map_or_else(|e| e.code(), |_| "ok")
    }

    #[test]
    fn unknown_and_senseless_fields_are_refused() {
        let messages = json!([{ "role": "user", "content": "hi" }]);
        assert_eq!(code(json!({ "messages": messages, "temperature": 0, "user": null })), "ok");
        for extra in [
            json!({ "best_of": 3 }),
            json!({ "n": 2 }),
            json!({ "stream": "yes" }),
            json!({ "temperature": 9 }),
            json!({ "cache": "always" }),
            json!({ "truncation": "middle" }),
            json!({ "session_id": "" }),
            json!({ "messages": [] }),
            json!({ "messages": "hi" }),
            json!({ "messages": [{ "role": "boss", "content": "hi" }] }),
            json!({ "messages": [{ "role": "user", "content": 5 }] }),
            json!({ "messages": [{ "role": "user" }] }),
            json!({ "stream_options": { "speed": 1 } }),
        ] {
            let mut body = json!({ "messages": messages });
            for (k, v) in extra.as_object().into_iter().flatten() {
                body[k] = v.clone();
            }
            assert_eq!(code(body), "invalid_request", "{extra}");
        }
    }

    #[test]
    fn token_ids_are_whole_numbers() {
        assert_eq!(token_ids(&[json!(3.0), json!(7)]).unwrap(), [3, 7]);
        for bad in [json!(1.5), json!(-1), json!("3"), json!(5e9)] {
            assert_eq!(token_ids(&[bad]).unwrap_err().code(), "invalid_request");
        }
    }
}
