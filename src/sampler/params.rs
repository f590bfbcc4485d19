//! Sampling parameters of a request, checked once. Names, defaults and ranges are OpenAI's where OpenAI has the field,
//! vLLM's for `top_k`, `min_p` and `repetition_penalty`. A value that is out of range or of the wrong type is refused
//! with the field's name, its range and what was found; nothing is clamped or guessed.

use serde::Serialize;
use serde_json::{Map, Value};

use super::GREEDY_BELOW;
use crate::error::{Error, Result};

const MAX_STOPS: usize = 16;

/// Characters of a wrong value that an error message shows.
const SHOWN_CHARS: usize = 40;

/// Largest integer up to which every integer is an exact JavaScript number.
const MAX_SAFE_INTEGER: f64 = 9_007_199_254_740_991.0;

/// How the next token is chosen and when the answer ends. Serializes to a stable form, which response caches use as key.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SamplingParams {
    /// 0 to 2, default 1; 0 (and anything below 1e-5) takes the best token.
    pub temperature: f64,
    /// 0 to 1, default 1 (off): the smallest set of best tokens with at least this probability; 0 keeps only the best.
    pub top_p: f64,
    /// Number of best tokens that are kept; default 0 (off).
    pub top_k: usize,
    /// 0 to 1, default 0 (off): tokens below this fraction of the best token's probability are dropped.
    pub min_p: f64,
    /// Above 0 and at most 10, default 1 (off): divides positive and multiplies negative logits of tokens seen before,
    /// in the prompt or in the answer.
    pub repetition_penalty: f64,
    /// -2 to 2, default 0: subtracted from the logit of each token that the answer already has.
    pub presence_penalty: f64,
    /// -2 to 2, default 0: subtracted once per occurrence in the answer.
    pub frequency_penalty: f64,
    /// Seed of the random sequence; a negative one counts as its two's complement. Default: the caller's random number.
    pub seed: Option<u64>,
    /// Up to 16 non-empty texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Token ids with what is added to their logits, -100 to 100, ascending by id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Most tokens that the answer may have, at least 1; default: what the context leaves.
    pub max_tokens: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            stop: Vec::new(),
            logit_bias: Vec::new(),
            max_tokens: None,
        }
    }
}

impl SamplingParams {
    /// Reads the sampling fields of a request body; other fields are not looked at, `null` counts as absent.
    /// `n_tokens` is the number of real tokens, which bounds the ids of `logit_bias`.
    ///
    /// # Errors
    /// `invalid_request` for the first field that is out of range or of the wrong type.
    pub fn from_json(body: &Map<String, Value>, n_tokens: usize) -> Result<Self> {
        let field =
            |name: &'static str| Field { name, value: body.get(name).filter(|value| !value.is_null()) };
        let defaults = SamplingParams::default();
        Ok(SamplingParams {
            temperature: field("temperature").number(0.0, 2.0)?.unwrap_or(defaults.temperature),
            top_p: field("top_p").number(0.0, 1.0)?.unwrap_or(defaults.top_p),
            top_k: field("top_k").count(0)?.unwrap_or(defaults.top_k),
            min_p: field("min_p").number(0.0, 1.0)?.unwrap_or(defaults.min_p),
            repetition_penalty: field("repetition_penalty")
                .number_where("a number above 0 and at most 10", |x| x > 0.0 && x <= 10.0)?
                .unwrap_or(defaults.repetition_penalty),
            presence_penalty: field("presence_penalty")
                .number(-2.0, 2.0)?
                .unwrap_or(defaults.presence_penalty),
            frequency_penalty: field("frequency_penalty")
                .number(-2.0, 2.0)?
                .unwrap_or(defaults.frequency_penalty),
            seed: field("seed").seed()?,
            stop: field("stop").stop()?,
            logit_bias: field("logit_bias").logit_bias(n_tokens)?,
            max_tokens: max_tokens(field("max_tokens"), field("max_completion_tokens"))?,
        })
    }

    /// Whether the best token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Whether the same request gives the same answer again: greedy, or a seed is given.
    pub fn is_repeatable(&self) -> bool {
        self.is_greedy() || self.seed.is_some()
    }
}

fn max_tokens(old: Field, new: Field) -> Result<Option<usize>> {
    match (old.count(1)?, new.count(1)?) {
        (Some(a), Some(b)) if a != b => Err(Error::invalid_request(format!(
            "max_tokens and max_completion_tokens mean the same and must be equal, found {a} and {b}"
        ))),
        (a, b) => Ok(b.or(a)),
    }
}

/// A field of the body; `value` is `None` when it is absent or null.
#[derive(Clone, Copy)]
struct Field<'a> {
    name: &'static str,
    value: Option<&'a Value>,
}

impl Field<'_> {
    fn number(self, from: f64, to: f64) -> Result<Option<f64>> {
        self.number_where(&format!("a number from {from} to {to}"), |x| (from..=to).contains(&x))
    }

    fn number_where(self, expected: &str, fits: impl Fn(f64) -> bool) -> Result<Option<f64>> {
        let Some(value) = self.value else { return Ok(None) };
        match value.as_f64() {
            Some(x) if fits(x) => Ok(Some(x)),
            _ => Err(self.refused(expected, &shown(value))),
        }
    }

    /// An integer from `from`; one that does not fit into usize means "no limit" and becomes the largest usize.
    fn count(self, from: usize) -> Result<Option<usize>> {
        let Some(value) = self.value else { return Ok(None) };
        match integer(value) {
            Some(n) if n >= from as i128 => Ok(Some(usize::try_from(n).unwrap_or(usize::MAX))),
            _ => Err(self.refused(&format!("an integer of at least {from}"), &shown(value))),
        }
    }

    fn seed(self) -> Result<Option<u64>> {
        let Some(value) = self.value else { return Ok(None) };
        match integer(value) {
            // Within i64 or u64 by construction, so the cast keeps all bits.
            Some(n) => Ok(Some(n as u64)),
            None => Err(self.refused("an integer that is exact as a JavaScript number", &shown(value))),
        }
    }

    fn stop(self) -> Result<Vec<String>> {
        let expected = format!("a non-empty string or an array of at most {MAX_STOPS} non-empty strings");
        let stops = match self.value {
            None => return Ok(Vec::new()),
            Some(Value::Array(stops)) if stops.len() <= MAX_STOPS => stops.as_slice(),
            Some(one @ Value::String(_)) => std::slice::from_ref(one),
            Some(other) => return Err(self.refused(&expected, &shown(other))),
        };
        let text = |stop: &Value| match stop {
            Value::String(text) if !text.is_empty() => Ok(text.clone()),
            other => Err(self.refused(&expected, &shown(other))),
        };
        stops.iter().map(text).collect()
    }

    fn logit_bias(self, n_tokens: usize) -> Result<Vec<(u32, f32)>> {
        let map = match self.value {
            None => return Ok(Vec::new()),
            Some(Value::Object(map)) => map,
            Some(other) => return Err(self.refused("an object from token ids to numbers", &shown(other))),
        };
        let entry = |(key, value): (&String, &Value)| {
            // Only the plain decimal form: two spellings of one id would be two biases.
            let id = key.parse::<u32>().ok().filter(|id| id.to_string() == *key && (*id as usize) < n_tokens);
            let Some(id) = id else {
                let expected = format!("an object whose keys are token ids below {n_tokens}");
                return Err(self.refused(&expected, &format!("the key {}", quoted(key))));
            };
            match value.as_f64() {
                Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((id, bias as f32)),
                _ => Err(self.refused(
                    "an object whose values are numbers from -100 to 100",
                    &format!("{} for token {id}", shown(value)),
                )),
            }
        };
        let mut biases = map.iter().map(entry).collect::<Result<Vec<_>>>()?;
        biases.sort_unstable_by_key(|&(id, _)| id);
        Ok(biases)
    }

    fn refused(self, expected: &str, found: &str) -> Error {
        Error::invalid_request(format!("{} must be {expected}, found {found}", self.name))
    }
}

/// The integer that `value` is: of any JSON integer, and of a float (JavaScript has no other number) that is exact.
fn integer(value: &Value) -> Option<i128> {
    if let Some(n) = value.as_i64() {
        return Some(n.into());
    }
    if let Some(n) = value.as_u64() {
        return Some(n.into());
    }
    let x = value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() <= MAX_SAFE_INTEGER)?;
    Some(x as i128)
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".to_string(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) => format!("the string {}", quoted(text)),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".to_string(),
    }
}

fn quoted(text: &str) -> String {
    let head: String = text.chars().take(SHOWN_CHARS).collect();
    let dots = if head.len() < text.len() { "…" } else { "" };
    format!("{head:?}{dots}")
}
