//! The model's hyper-parameters under their Hugging Face names, read from GGUF metadata or `config.json` and validated.
//! Whatever would make a later step divide by zero, overflow or read beyond a tensor is refused here.

mod json;

pub use json::from_json;

use crate::error::{Error, Result};
use crate::gguf::{Metadata, Value};
use crate::kv_cache::{KvKind, KvShape};
use candle_nn::Activation;
pub use candle_transformers::models::qwen2::Config;

/// No published Qwen2 comes near these; a header that claims more is damaged.
const MAX_LAYERS: u64 = 512;
const MAX_WIDTH: u64 = 1 << 18;
const MAX_HEADS: u64 = 4096;
const MAX_CONTEXT: u64 = 1 << 24;
/// Rows of the embedding; a slice's logits are so many floats for each of its tokens.
const MAX_VOCAB: usize = 1 << 22;

/// `rope_theta` where the file names none, as in Hugging Face's `Qwen2Config` and llama.cpp.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;
const MAX_ROPE_THETA: f64 = 1e12;
/// `rms_norm_eps` where the file names none.
const DEFAULT_EPS: f64 = 1e-6;

/// Reads `qwen2.*`; `vocab_size` and `tie_word_embeddings` come from the tensor table.
///
/// # Errors
/// `bad_model` when a key is missing or senseless, `unsupported_model` for another architecture or scaled RoPE.
pub fn from_gguf(metadata: &Metadata, vocab_size: usize, tie_word_embeddings: bool) -> Result<Config> {
    let config = Config {
        vocab_size,
        tie_word_embeddings,
        hidden_size: required(metadata, "qwen2.embedding_length", MAX_WIDTH)?,
        intermediate_size: required(metadata, "qwen2.feed_forward_length", MAX_WIDTH)?,
        num_hidden_layers: required(metadata, "qwen2.block_count", MAX_LAYERS)?,
        num_attention_heads: required(metadata, "qwen2.attention.head_count", MAX_HEADS)?,
        num_key_value_heads: match metadata.get("qwen2.attention.head_count_kv") {
            Some(_) => required(metadata, "qwen2.attention.head_count_kv", MAX_HEADS)?,
            None => required(metadata, "qwen2.attention.head_count", MAX_HEADS)?,
        },
        max_position_embeddings: required(metadata, "qwen2.context_length", MAX_CONTEXT)?,
        rope_theta: positive(metadata, "qwen2.rope.freq_base", DEFAULT_ROPE_THETA, MAX_ROPE_THETA)?,
        rms_norm_eps: positive(metadata, "qwen2.attention.layer_norm_rms_epsilon", DEFAULT_EPS, 1.0)?,
        sliding_window: 0,
        max_window_layers: 0,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    };
    check(&config)?;
    check_keys(metadata, &config)?;
    Ok(config)
}

/// The metadata that [`from_gguf`] reads the same hyper-parameters from.
pub fn to_gguf(config: &Config) -> Metadata {
    let mut metadata = Metadata::default();
    metadata.insert("general.architecture", Value::String("qwen2".into()));
    for (key, n) in [
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("block_count", config.num_hidden_layers),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("context_length", config.max_position_embeddings),
    ] {
        metadata.insert(format!("qwen2.{key}"), Value::U64(n as u64));
    }
    metadata.insert("qwen2.rope.freq_base", Value::F64(config.rope_theta));
    metadata.insert("qwen2.attention.layer_norm_rms_epsilon", Value::F64(config.rms_norm_eps));
    metadata
}

/// Refuses any architecture but `qwen2`.
pub fn check_architecture(metadata: &Metadata) -> Result<()> {
    match metadata.str("general.architecture") {
        Some("qwen2") => Ok(()),
        Some(other) => Err(Error::unsupported_model(format!(
            "architecture \"{}\" is not served, only \"qwen2\"",
            other.escape_debug().take(64).collect::<String>()
        ))),
        None => Err(Error::bad_model("the metadata name no general.architecture (expected \"qwen2\")")),
    }
}

/// What a GGUF file says and `config.json` does not.
fn check_keys(metadata: &Metadata, c: &Config) -> Result<()> {
    let head_dim = head_dim(c);
    for key in ["qwen2.attention.key_length", "qwen2.attention.value_length", "qwen2.rope.dimension_count"] {
        if metadata.get(key).is_some() && metadata.u64(key) != Some(head_dim as u64) {
            return Err(Error::unsupported_model(format!("{key} differs from the head width {head_dim}")));
        }
    }
    match metadata.str("qwen2.rope.scaling.type") {
        None | Some("none") => Ok(()),
        Some(other) => Err(Error::unsupported_model(format!(
            "qwen2.rope.scaling.type \"{}\" is not served, only unscaled RoPE",
            other.escape_debug().take(64).collect::<String>()
        ))),
    }
}

/// Whether the numbers, each within its range, fit together.
fn check(c: &Config) -> Result<()> {
    let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
    if !c.hidden_size.is_multiple_of(heads) || !heads.is_multiple_of(kv_heads) {
        return Err(Error::bad_model(format!(
            "{heads} attention heads must divide the width {} and be a multiple of {kv_heads} key/value heads",
            c.hidden_size
        )));
    }
    if c.vocab_size > MAX_VOCAB {
        return Err(Error::bad_model(format!(
            "the embedding has {} rows, at most {MAX_VOCAB} are served",
            c.vocab_size
        )));
    }
    let head_dim = head_dim(c);
    if !head_dim.is_multiple_of(4) {
        return Err(Error::unsupported_model(format!(
            "heads of {head_dim} values; a multiple of 4 is needed"
        )));
    }
    Ok(())
}

fn required(metadata: &Metadata, key: &str, most: u64) -> Result<usize> {
    let value = metadata.u64(key).ok_or_else(|| match metadata.get(key) {
        None => Error::bad_model(format!("the metadata lack {key}")),
        Some(_) => Error::bad_model(format!("{key} is no whole number")),
    })?;
    in_range(key, value, most)
}

fn in_range(key: &str, value: u64, most: u64) -> Result<usize> {
    if value == 0 || value > most {
        return Err(Error::bad_model(format!("{key} is {value}, expected 1 to {most}")));
    }
    Ok(value as usize)
}

fn positive(metadata: &Metadata, key: &str, default: f64, most: f64) -> Result<f64> {
    let value = match metadata.get(key) {
        None => return Ok(default),
        Some(_) => metadata.f64(key).ok_or_else(|| Error::bad_model(format!("{key} is no number")))?,
    };
    above_zero(key, value, most)
}

fn above_zero(key: &str, value: f64, most: f64) -> Result<f64> {
    if !(value > 0.0 && value <= most) {
        return Err(Error::bad_model(format!("{key} is {value}, expected above 0 and at most {most}")));
    }
    Ok(value)
}

/// Width of one head, `D`.
pub fn head_dim(config: &Config) -> usize {
    config.hidden_size / config.num_attention_heads
}

/// The shape of one position in the KV cache.
pub fn kv_shape(config: &Config, kind: KvKind) -> KvShape {
    KvShape {
        layers: config.num_hidden_layers,
        kv_heads: config.num_key_value_heads,
        head_dim: head_dim(config),
        kind,
    }
}
