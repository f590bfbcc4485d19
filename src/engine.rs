//! A loaded model with its text side and its sessions: turns request bodies into jobs, steps them, and shapes replies.
//! Knows nothing of JavaScript; the caller steps all jobs that run, together.

mod ahead;
mod figures;
mod governor;
mod job;
mod logits;
mod normalize;
mod text_side;
mod truncation;
mod warm_up;

pub use governor::SCRATCH_BYTES;
pub use job::{Job, Outcome};
pub use logits::LogitsJob;
pub use text_side::TextSide;

use crate::config::kv_shape;
use crate::error::{Error, Result};
use crate::kv_cache::{window_pages, KvCache, KvKind};
use crate::metrics::Window;
use crate::model::Model;
use crate::response_cache::ResponseCache;
use crate::schedule::Schedule;
use crate::session::{Limits, Sessions};
use crate::template::pieces_to_text;
use crate::tokenizer::{Special, Tokenizer};
use crate::weights::Plan;
use serde::Deserialize;
use serde_json::{json, Map, Value};
use web_time::{SystemTime, UNIX_EPOCH};

/// Prompt and answer together where the caller names no length.
const DEFAULT_CONTEXT: usize = 4096;

/// Tokens of a window at most.
const MOST_WINDOW: usize = 1 << 20;

/// How long an answer is given again, ms.
const RESPONSE_TTL_MS: f64 = 3_600_000.0;

/// Phrases at most, and their bytes: what half of the tokenizer's cache holds.
const MOST_PHRASES: usize = 256;
const MOST_PHRASE_BYTES: usize = 256 << 10;

/// Options of a load that concern the engine.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Options {
    /// Prompt and answer together; default 4096, at most what the model was made for.
    pub context_length: Option<usize>,
    /// Tokens of the attention window, rounded up to whole pages; the first page is always seen too. With it prompt and answer
    /// may be as long as the model was made for, whatever `context_length` says. Default none.
    pub window: Option<usize>,
    /// What keys and values are kept as; default f16.
    pub kv: KvKind,
    /// Bounds of sessions.
    pub limits: Limits,
    /// Bytes of the device's memory, where that is known.
    #[serde(skip)]
    pub device_bytes: Option<u64>,
    /// Texts that are encoded beforehand.
    pub phrases: Vec<String>,
    /// Whether tokens are guessed from the text so far and verified together; default true. The answer is the same.
    pub speculation: Option<bool>,
    /// Whether what users write is brought to one spelling; default no.
    pub normalize: bool,
}

/// A model that is ready to answer.
pub struct Engine {
    model: Model,
    text: TextSide,
    plan: Plan,
    name: String,
    context_length: usize,
    sessions: Sessions,
    responses: ResponseCache,
    window: Window,
    requests: u64,
    schedule: Schedule,
    speculation: bool,
    phrases: Vec<String>,
    ahead: Option<ahead::Ahead>,
    /// Ids that all chats begin with, while they are not computed.
    beginning: Option<Vec<u32>>,
    governor: governor::Governor,
    normalize: bool,
    /// Records of finished requests that nobody has taken.
    latest: Vec<Value>,
}

impl Engine {
    /// An engine of `model`; `fallback_name` serves where the file has no name.
    pub fn new(
        mut model: Model,
        plan: Plan,
        mut text: TextSide,
        fallback_name: &str,
        options: Options,
    ) -> Result<Self> {
        let phrases = options.phrases.clone();
        let speculation = options.speculation.unwrap_or(true);
        check_phrases(&phrases)?;
        text.preload(&phrases)?;
        model.kv = options.kv;
        model.window = options.window.map(window_pages);
        let context_length = context_length(&plan, &options)?;
        let governor = governor::Governor::new(&plan, &options)?;
        let name = text.name.clone().unwrap_or_else(|| fallback_name.to_string());
        let responses = ResponseCache::new(options.limits.response_bytes, RESPONSE_TTL_MS);
        let normalize = options.normalize;
        let sessions = Sessions::new(options.limits);
        let schedule = Schedule::new(&model);
        let window = Window::default();
        let requests = 0;
        Ok(Self {
            model,
            text,
            plan,
            name,
            context_length,
            sessions,
            responses,
            window,
            requests,
            schedule,
            speculation,
            phrases,
            ahead: None,
            beginning: None,
            normalize,
            latest: Vec::new(),
            governor,
        })
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

    /// Reads some more of what an image left in its file; `false`: all is there.
    ///
    /// # Errors
    /// `integrity` where it is damaged: the model must be read anew.
    pub fn read_on(&mut self) -> Result<bool> {
        self.model.embed_tokens.read_on()
    }

    /// As [`Engine::text_side`], for the tokenizer's cache and what is computed later.
    pub fn text_side_mut(&mut self) -> &mut TextSide {
        &mut self.text
    }

    /// Gives most of the weights' memory back, before other ones are read.
    pub fn drop_weights(&mut self) {
        self.model.layers.clear();
        (self.ahead, self.beginning) = (None, None);
        self.sessions.clear();
        self.responses.clear();
    }

    /// Goes on with the same model, read anew.
    pub fn replace_model(&mut self, mut model: Model, plan: Plan, text: TextSide) {
        (model.kv, model.window) = (self.model.kv, self.model.window);
        (self.model, self.plan, self.text) = (model, plan, text);
        // They are only there to save time.
        let _ = self.text.preload(&self.phrases);
        self.sessions.clear();
        self.responses.clear();
    }

    /// Bytes of weights, and of the KV cache and the rotary table at the full context, of which a window holds its part.
    ///
    /// # Errors
    /// `invalid_request` for a context that the model was not made for, for an empty window, and for too many phrases.
    pub fn planned_bytes(plan: &Plan, options: &Options) -> Result<u64> {
        check_phrases(&options.phrases)?;
        let context = context_length(plan, options)?;
        Ok(governor::fixed_bytes(plan, context) + held_bytes(plan, options, context))
    }

    /// `EngineInfo` less what only the worker knows (`runtime`, `memory.wasmBytes`).
    pub fn info(&self) -> Value {
        json!({
            "model": {
                "name": self.name,
                "architecture": "qwen2",
                "parameters": self.plan.parameters(),
                "quantization": self.plan.quantization,
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

    /// The sessions in memory.
    pub fn sessions(&mut self) -> &mut Sessions {
        &mut self.sessions
    }

    /// The answers that are kept.
    pub fn responses(&mut self) -> &mut ResponseCache {
        &mut self.responses
    }

    /// Token ids of a text, without BOS; `special` matches added tokens in it.
    pub fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<u32>> {
        self.text.encode(text, if special { Special::All } else { Special::None })
    }

    /// The text of token ids; `special` keeps control tokens.
    pub fn detokenize(&self, ids: &[u32], special: bool) -> Result<String> {
        Ok(self.text.tokenizer()?.decode(ids, special))
    }

    /// Tokens of a text, or of messages as a chat would send them.
    pub fn count_tokens(&mut self, input: &Value) -> Result<usize> {
        match input {
            Value::String(text) => Ok(self.tokenize(text, false)?.len()),
            messages => self.count_chat(messages),
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
        Ok(pieces_to_text(&self.text.template()?.render(
            messages,
            tools.as_ref(),
            Some(generation),
            &kwargs,
        )?))
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

    /// Ids of a completion's prompt. Special tokens in it count: completing raw text is how a caller writes a prompt itself.
    fn text_prompt(&mut self, text: &str) -> Result<Vec<u32>> {
        self.text.tokenizer()?;
        self.check_size(text.len())?;
        let ids = self.text.encode(text, Special::All)?;
        Ok(self.text.tokenizer()?.with_bos(ids))
    }

    /// Starts a computation of logits: of the last position, or of all.
    ///
    /// # Errors
    /// `invalid_request` without ids, `context_overflow`, `too_large` where the rows would pass 1 GiB.
    pub fn logits(&self, ids: Vec<u32>, all: bool) -> Result<LogitsJob> {
        LogitsJob::new(&self.model, self.new_cache(), ids, all, self.context_length)
    }

    /// Rows of logits of a job: `(first position, values)` as they come, (n, V).
    pub fn step_logits(&mut self, job: &mut LogitsJob) -> Result<Option<(usize, Vec<f32>)>> {
        match job.step(&self.model) {
            Err(Error::OutOfMemory(why)) => self.make_room(why).map(|()| None),
            stepped => stepped,
        }
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

/// The length asked for, or the default; with a window as much as the model was made for.
fn context_length(plan: &Plan, options: &Options) -> Result<usize> {
    let most = plan.config.max_position_embeddings;
    let window = options.window;
    if window.is_some_and(|tokens| !(1..=MOST_WINDOW).contains(&tokens)) {
        return Err(Error::invalid_request(format!("window is {window:?}, expected 1 to {MOST_WINDOW}")));
    }
    match options.context_length {
        None if window.is_some() => Ok(most),
        Some(n) if window.is_some() && (1..=most).contains(&n) => Ok(most),
        None => Ok(DEFAULT_CONTEXT.min(most)),
        Some(n) if (1..=most).contains(&n) => Ok(n),
        Some(n) => Err(Error::invalid_request(format!("contextLength is {n}, expected 1 to {most}"))),
    }
}

/// `invalid_request` for more phrases than the cache would hold.
fn check_phrases(phrases: &[String]) -> Result<()> {
    let (count, bytes) = (phrases.len(), phrases.iter().map(String::len).sum::<usize>());
    if count > MOST_PHRASES || bytes > MOST_PHRASE_BYTES {
        return Err(Error::invalid_request(format!(
            "phrases: {count} texts of {bytes} bytes in all, at most {MOST_PHRASES} of {MOST_PHRASE_BYTES} bytes are taken"
        )));
    }
    Ok(())
}

/// Bytes of the KV pages of a full context: with a window the first page, the window's, and the one that is being filled.
fn held_bytes(plan: &Plan, options: &Options, context: usize) -> u64 {
    let cache = KvCache::new(kv_shape(&plan.config, options.kv));
    cache.with_window(options.window.map(window_pages)).planned_bytes(context)
}

/// ms since the epoch.
pub fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64() * 1e3)
}
