//! A loaded model with its text side and its sessions: turns request bodies into jobs, steps them, and shapes replies.
//! Knows nothing of JavaScript; one job runs at a time and is stepped by the caller.

mod logits;
mod text_side;
mod warm_up;

pub use logits::LogitsJob;
pub use text_side::TextSide;

use crate::config::{head_dim, kv_shape};
use crate::error::{Error, Result};
use crate::generation::{first_slice, Finish, Progress, Step, Turn, TurnRequest};
use crate::kv_cache::KvKind;
use crate::metrics::{ms_since, RequestRecord, Timings, Window};
use crate::model::Model;
use crate::openai::{extra, Body, Frame, Prompt};
use crate::session::{Limits, Session, Sessions};
use crate::stream::Parts;
use crate::template::{pieces_to_text, Template};
use crate::tokenizer::{Special, Tokenizer};
use crate::weights::Plan;
use serde::Deserialize;
use serde_json::{json, Map, Value};
use web_time::{Instant, SystemTime, UNIX_EPOCH};

/// Prompt and answer together where the caller names no length.
const DEFAULT_CONTEXT: usize = 4096;

/// Options of a load that concern the engine.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Options {
    /// Prompt and answer together; default 4096, at most what the model was made for.
    pub context_length: Option<usize>,
    /// What keys and values are kept as; default f16.
    pub kv: KvKind,
    /// Bounds of sessions.
    pub limits: Limits,
}

/// A model that is ready to answer.
pub struct Engine {
    model: Model,
    text: TextSide,
    plan: Plan,
    name: String,
    context_length: usize,
    sessions: Sessions,
    window: Window,
    requests: u64,
    slice: usize,
}

/// A chat or completion under way.
pub struct Job {
    frame: Frame,
    body: Body,
    turn: Turn,
    session: String,
    begun: bool,
    text: Parts,
    ids: Vec<u32>,
    arrived: Instant,
    timings: Timings,
}

/// What a step of a job came to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Chunks to send, in order.
    pub chunks: Vec<Value>,
    /// The end: the whole reply, or null after a stream.
    pub done: Option<Value>,
}

impl Engine {
    /// An engine of `model`; `fallback_name` serves where the file has no name.
    pub fn new(
        mut model: Model,
        plan: Plan,
        text: TextSide,
        fallback_name: &str,
        options: Options,
    ) -> Result<Self> {
        model.kv = options.kv;
        let context_length = context_length(&plan, &options)?;
        let name = text.name.clone().unwrap_or_else(|| fallback_name.to_string());
        let sessions = Sessions::new(options.limits);
        let slice = first_slice(&model);
        let window = Window::default();
        Ok(Self { model, text, plan, name, context_length, sessions, window, requests: 0, slice })
    }

    /// The weights.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What was loaded.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Tokenizer and template.
    pub fn text_side(&self) -> &TextSide {
        &self.text
    }

    /// Gives most of the weights' memory back, before other ones are read.
    pub fn drop_weights(&mut self) {
        self.model.layers.clear();
        self.sessions.clear();
    }

    /// Goes on with the same model, read anew.
    pub fn replace_model(&mut self, mut model: Model) {
        model.kv = self.model.kv;
        self.model = model;
        self.sessions.clear();
    }

    /// Bytes of weights, and of the KV cache and the rotary table at the full context.
    ///
    /// # Errors
    /// `invalid_request` for a context that the model was not made for.
    pub fn planned_bytes(plan: &Plan, options: &Options) -> Result<u64> {
        let context = context_length(plan, options)?;
        let rope = context as u64 * head_dim(&plan.config) as u64 * 4;
        Ok(plan.packed_bytes + kv_shape(&plan.config, options.kv).bytes(context) + rope)
    }

    /// `EngineInfo` less what only the worker knows (`runtime`, `memory.wasmBytes`).
    pub fn info(&self) -> Value {
        let quantization = self.text.file_type_name().unwrap_or(self.plan.quantization);
        json!({
            "model": {
                "name": self.name,
                "architecture": "qwen2",
                "parameters": self.plan.parameters(),
                "quantization": quantization,
                "contextLength": self.plan.config.max_position_embeddings,
                "vocabSize": self.plan.config.vocab_size,
                "bytes": self.plan.tensor_bytes,
                "sha256": null,
                "hasTokenizer": self.text.tokenizer.is_some(),
                "hasChatTemplate": self.text.template.is_some(),
            },
            "contextLength": self.context_length,
        })
    }

    /// Bytes by purpose; `wasm_bytes` comes from the worker.
    pub fn memory(&self, wasm_bytes: u64) -> Value {
        json!({
            "wasmBytes": wasm_bytes,
            "weightsBytes": self.model.weight_bytes(),
            "kvBytes": self.sessions.bytes(),
            "responseBytes": 0,
            "tokenizerBytes": self.text.tokenizer.as_ref().map_or(0, Tokenizer::memory_bytes),
        })
    }

    /// The rolling window as `Metrics` (less `memory`).
    pub fn metrics(&self) -> Value {
        let w = &self.window;
        let series = |f: fn(&RequestRecord) -> f64| w.series(f);
        let none = json!({ "hits": 0, "misses": 0, "entries": 0, "bytes": 0 });
        json!({
            "requests": w.total,
            "ttftMs": series(|r| r.timings.ttft_ms),
            "totalMs": series(|r| r.timings.total_ms),
            "prefillTokensPerSecond": series(|r| r.timings.prefill_tokens_per_second),
            "decodeTokensPerSecond": series(|r| r.timings.decode_tokens_per_second),
            "phasesMs": {
                "queue": series(|r| r.timings.queue_ms),
                "tokenize": series(|r| r.timings.tokenize_ms),
                "prefill": series(|r| r.timings.prefill_ms),
                "decode": series(|r| r.timings.decode_ms),
                "detokenize": series(|r| r.detokenize_ms),
            },
            "caches": {
                "session": {
                    "hits": w.sum(|r| usize::from(r.reused_tokens > 0)),
                    "misses": w.sum(|r| usize::from(r.reused_tokens == 0)),
                    "entries": self.sessions.len(),
                    "bytes": self.sessions.bytes(),
                    "reusedTokens": w.sum(|r| r.reused_tokens),
                    "promptTokens": w.sum(|r| r.prompt_tokens),
                },
                "response": none,
                "tokenizer": none,
            },
        })
    }

    /// The sessions in memory.
    pub fn sessions(&mut self) -> &mut Sessions {
        &mut self.sessions
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        self.text.tokenizer.as_ref().ok_or_else(|| {
            Error::unsupported_model("this file has no tokenizer: only token ids can be given to it")
        })
    }

    fn template(&self) -> Result<&Template> {
        self.tokenizer()?;
        self.text.template.as_ref().ok_or_else(|| Error::unsupported_model("this file has no chat template"))
    }

    /// Token ids of a text, without BOS; `special` matches added tokens in it.
    pub fn tokenize(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        self.tokenizer()?.encode(text, if special { Special::All } else { Special::None })
    }

    /// The text of token ids; `special` keeps control tokens.
    pub fn detokenize(&self, ids: &[u32], special: bool) -> Result<String> {
        Ok(self.tokenizer()?.decode(ids, special))
    }

    /// Tokens of a text, or of messages as a chat would send them.
    pub fn count_tokens(&self, input: &Value) -> Result<usize> {
        match input {
            Value::String(text) => Ok(self.tokenize(text, false)?.len()),
            messages => Ok(self.chat_prompt(messages, None, true, &Map::new())?.0.len()),
        }
    }

    /// The prompt text that the chat template makes of `messages`.
    pub fn apply_chat_template(&self, messages: &Value, options: &Map<String, Value>) -> Result<String> {
        let mut kwargs = options.clone();
        let tools = kwargs.remove("tools").filter(|tools| !tools.is_null());
        let generation = match kwargs.remove("addGenerationPrompt") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(b)) => b,
            Some(other) => {
                return Err(Error::invalid_request(format!(
                    "addGenerationPrompt must be a boolean, found {other}"
                )))
            }
        };
        crate::openai::check_messages(messages)?;
        Ok(pieces_to_text(&self.template()?.render(messages, tools.as_ref(), Some(generation), &kwargs)?))
    }

    /// Refuses a text that cannot fit whatever its tokens are, before time is spent on it.
    fn check_size(&self, bytes: usize) -> Result<()> {
        let most = self.context_length.saturating_mul(self.text.longest_token.max(1));
        if bytes > most {
            return Err(Error::context_overflow(format!(
                "a text of {bytes} bytes; the context of {} tokens holds {most} bytes at the very most",
                self.context_length
            )));
        }
        Ok(())
    }

    /// Ids of a rendered chat, and whether its answer starts inside `<think>` (`None`: the model has no thoughts).
    fn chat_prompt(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        generation: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<(Vec<u32>, Option<bool>)> {
        crate::openai::check_messages(messages)?;
        self.check_size(text_bytes(messages))?;
        let rendered = self.template()?.render(messages, tools, Some(generation), kwargs)?;
        let tokenizer = self.tokenizer()?;
        let ids = tokenizer.encode_prompt(&rendered)?;
        let inside = pieces_to_text(&rendered).trim_end().ends_with("<think>");
        let thinks = inside || tokenizer.added_tokens().get("<think>").is_some();
        Ok((ids, thinks.then_some(inside)))
    }

    /// Ids of a completion's prompt. Special tokens in it count: completing raw text is how a caller writes a prompt itself.
    fn text_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer()?;
        self.check_size(text.len())?;
        Ok(tokenizer.with_bos(tokenizer.encode(text, Special::All)?))
    }

    /// Starts a request whose body was parsed; `arrived` is when it came, `random_seed` serves where it has no seed.
    pub fn begin(&mut self, body: Body, arrived: Instant, random_seed: u64) -> Result<Job> {
        let queue_ms = ms_since(arrived);
        let begun = Instant::now();
        let (prompt, reasoning) = match &body.prompt {
            Prompt::Chat { messages, tools, kwargs } => {
                self.chat_prompt(messages, tools.as_ref(), true, kwargs)?
            }
            Prompt::Text(text) => (self.text_prompt(text)?, None),
            Prompt::Tokens(ids) => (ids.clone(), None),
        };
        if let Some(most) = self.sessions.limits().max_input_tokens.filter(|most| prompt.len() > *most) {
            return Err(Error::context_overflow(format!(
                "the prompt has {} tokens, maxInputTokens is {most}",
                prompt.len()
            )));
        }
        let tokenize_ms = ms_since(begun);
        let (name, now) = (body.session_id.clone().unwrap_or_default(), now_ms());
        let session =
            self.sessions.take(&name, now).unwrap_or_else(|| Session::new(self.model.new_cache(), now));
        let request = TurnRequest {
            prompt,
            reasoning,
            params: body.params.clone(),
            context_length: self.context_length,
            random_seed,
            never: self.text.never.clone(),
            slice: self.slice,
        };
        let turn = match Turn::new(&self.model, self.text.tokenizer.as_ref(), session, request) {
            Ok(turn) => turn,
            Err(given_back) => {
                let (error, session) = *given_back;
                self.sessions.put(&name, session, now);
                return Err(error);
            }
        };
        self.requests += 1;
        let chat = matches!(body.prompt, Prompt::Chat { .. });
        let frame = Frame {
            id: format!("{}-{:x}-{}", if chat { "chatcmpl" } else { "cmpl" }, now as u64, self.requests),
            created: (now / 1e3) as u64,
            model: self.name.clone(),
            chat,
        };
        Ok(Job {
            frame,
            body,
            turn,
            session: name,
            begun: false,
            text: Parts::default(),
            ids: Vec::new(),
            arrived,
            timings: Timings { queue_ms, tokenize_ms, ..Default::default() },
        })
    }

    /// Works on a job for a bounded time. After an error the job must be given to [`Engine::drop_job`].
    pub fn step(&mut self, job: &mut Job) -> Result<Outcome> {
        match job.turn.step(&self.model, self.text.tokenizer.as_ref())? {
            Step::Busy => Ok(Outcome::default()),
            Step::Delta(parts, ids) => Ok(Outcome { chunks: job.take(parts, ids, None), done: None }),
            Step::Finished(parts, ids, finish) => Ok(self.end(job, parts, ids, finish)),
        }
    }

    /// Ends a job early; what was said so far stands.
    pub fn abort(&mut self, job: &mut Job) -> Outcome {
        let parts = job.turn.abort();
        self.end(job, parts, Vec::new(), Finish::Abort)
    }

    /// Takes a job's session back, whatever became of it.
    pub fn drop_job(&mut self, job: Job) {
        self.slice = job.turn.slice();
        self.sessions.put(&job.session, job.turn.into_session(), now_ms());
    }

    fn end(&mut self, job: &mut Job, parts: Parts, ids: Vec<u32>, finish: Finish) -> Outcome {
        let mut chunks = job.take(parts, ids, Some(finish));
        let progress = job.turn.progress();
        job.book(&progress);
        self.window.push(RequestRecord {
            timings: job.timings,
            prompt_tokens: progress.prompt_tokens,
            reused_tokens: progress.reused_tokens,
            detokenize_ms: progress.detokenize_ms,
        });
        let extra = extra(job.body.session_id.as_deref(), &progress, &job.timings);
        let ids = job.body.return_tokens.then_some(&job.ids[..]);
        let done = if job.body.stream {
            if job.body.include_usage {
                chunks.push(job.frame.usage_chunk(&progress));
            }
            if let Some(last) = chunks.last_mut() {
                last["qandle"] = extra;
            }
            Value::Null
        } else {
            let mut reply = job.frame.reply(&job.text.content, &job.text.reasoning, ids, finish, &progress);
            reply["qandle"] = extra;
            reply
        };
        Outcome { chunks, done: Some(done) }
    }

    /// Starts a computation of logits: of the last position, or of all.
    ///
    /// # Errors
    /// `invalid_request` without ids, `context_overflow`, `too_large` where the rows would pass 1 GiB.
    pub fn logits(&self, ids: Vec<u32>, all: bool) -> Result<LogitsJob> {
        LogitsJob::new(&self.model, ids, all, self.context_length)
    }

    /// Rows of logits of a job: `(first position, values)` as they come, (n, V).
    pub fn step_logits(&self, job: &mut LogitsJob) -> Result<Option<(usize, Vec<f32>)>> {
        job.step(&self.model)
    }

    /// Size of the vocabulary, `V`.
    pub fn vocab_size(&self) -> usize {
        self.plan.config.vocab_size
    }

    /// Ids that `logit_bias` may name: the tokenizer's, or all rows of the head.
    pub fn n_tokens(&self) -> usize {
        self.text.tokenizer.as_ref().map_or(self.plan.config.vocab_size, Tokenizer::len)
    }
}

impl Job {
    /// Whether chunks are wanted.
    pub fn is_stream(&self) -> bool {
        self.body.stream
    }

    /// Whether anything was given out yet.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Adds new text and makes its chunk, if one is wanted.
    fn take(&mut self, parts: Parts, ids: Vec<u32>, finish: Option<Finish>) -> Vec<Value> {
        if self.timings.ttft_ms == 0.0 {
            self.timings.ttft_ms = ms_since(self.arrived);
        }
        let mut chunks = Vec::new();
        if self.body.stream {
            if !self.begun && self.frame.chat {
                chunks.push(self.frame.opening());
            }
            let shown = self.body.return_tokens.then_some(&ids[..]);
            if finish.is_some() || shown.is_some() || !parts.content.is_empty() || !parts.reasoning.is_empty()
            {
                chunks.push(self.frame.chunk(&parts.content, &parts.reasoning, shown, finish));
            }
        }
        self.begun = true;
        self.text.content.push_str(&parts.content);
        self.text.reasoning.push_str(&parts.reasoning);
        self.ids.extend(ids);
        chunks
    }

    fn book(&mut self, p: &Progress) {
        let per_second = |tokens: usize, ms: f64| if ms > 0.0 { tokens as f64 * 1e3 / ms } else { 0.0 };
        self.timings.prefill_ms = p.prefill_ms;
        self.timings.decode_ms = p.decode_ms;
        self.timings.total_ms = ms_since(self.arrived);
        self.timings.prefill_tokens_per_second = per_second(p.prompt_tokens - p.reused_tokens, p.prefill_ms);
        self.timings.decode_tokens_per_second =
            per_second(p.completion_tokens.saturating_sub(1), p.decode_ms);
    }
}

/// The length asked for, or the default.
fn context_length(plan: &Plan, options: &Options) -> Result<usize> {
    let most = plan.config.max_position_embeddings;
    match options.context_length {
        None => Ok(DEFAULT_CONTEXT.min(most)),
        Some(n) if (1..=most).contains(&n) => Ok(n),
        Some(n) => Err(Error::invalid_request(format!("contextLength is {n}, expected 1 to {most}"))),
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

/// ms since the epoch.
pub fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64() * 1e3)
}
