//! `config.json` of a Hugging Face repository, as transformers 4 and 5 write it.

use super::{
    above_zero, check, head_dim, in_range, Config, DEFAULT_EPS, DEFAULT_ROPE_THETA, MAX_CONTEXT, MAX_HEADS,
    MAX_LAYERS, MAX_ROPE_THETA, MAX_VOCAB, MAX_WIDTH,
};
use crate::error::{Error, Result};
use serde_json::{json, Map, Value};

/// Reads a `config.json`. Where it leaves them out, there are as many key/value heads as heads, and `rope_theta`, `rms_norm_eps`,
/// `hidden_act` and `tie_word_embeddings` have the defaults of transformers' `Qwen2Config`.
///
/// # Errors
/// `bad_model` when it is no JSON object, a number is missing or senseless; `unsupported_model` for another architecture, scaled
/// RoPE, sliding windows or another activation; `unsupported_quantization` for weights that are quantised already.
pub fn from_json(json: &[u8]) -> Result<Config> {
    let json: Value = serde_json::from_slice(json).map_err(|e| Error::bad_json("config.json", &e))?;
    let Value::Object(mut json) = json else {
        return Err(Error::bad_model("config.json is no JSON object"));
    };
    json.retain(|_, value| !value.is_null());
    check_architecture(&json)?;
    check_served(&json)?;
    let theta =
        match (json.get("rope_theta"), json.get("rope_parameters").and_then(|rope| rope.get("rope_theta"))) {
            (Some(theta), _) | (None, Some(theta)) => theta.clone(),
            (None, None) => json!(DEFAULT_ROPE_THETA),
        };
    let heads = json.get("num_attention_heads").cloned().unwrap_or_default();
    let defaults = [
        ("num_key_value_heads", heads),
        ("rope_theta", theta),
        ("rms_norm_eps", json!(DEFAULT_EPS)),
        ("hidden_act", json!("silu")),
        ("tie_word_embeddings", json!(false)),
    ];
    for (key, value) in defaults {
        json.entry(key).or_insert(value);
    }
    let counts = [
        ("vocab_size", MAX_VOCAB as u64),
        ("hidden_size", MAX_WIDTH),
        ("intermediate_size", MAX_WIDTH),
        ("num_hidden_layers", MAX_LAYERS),
        ("num_attention_heads", MAX_HEADS),
        ("num_key_value_heads", MAX_HEADS),
        ("max_position_embeddings", MAX_CONTEXT),
    ];
    for (key, most) in counts {
        let value = json.get(key).ok_or_else(|| Error::bad_model(format!("config.json lacks {key}")))?;
        let value = value
            .as_u64()
            .ok_or_else(|| Error::bad_model(format!("{key} is {}, no whole number", shown(value))))?;
        in_range(key, value, most)?;
    }
    for (key, most) in [("rope_theta", MAX_ROPE_THETA), ("rms_norm_eps", 1.0)] {
        let value = json[key]
            .as_f64()
            .ok_or_else(|| Error::bad_model(format!("{key} is {}, no number", shown(&json[key]))))?;
        above_zero(key, value, most)?;
    }
    // Windows were refused; the numbers they are described by are often null.
    json.insert("sliding_window".into(), json!(0));
    json.insert("max_window_layers".into(), json!(0));
    json.insert("use_sliding_window".into(), json!(false));
    let named = json.get("head_dim").cloned();
    let config: Config =
        serde_json::from_value(Value::Object(json)).map_err(|e| Error::bad_json("config.json", &e))?;
    check(&config)?;
    match named {
        Some(named) if named.as_u64() != Some(head_dim(&config) as u64) => Err(Error::unsupported_model(
            format!("head_dim {} differs from the head width {}", shown(&named), head_dim(&config)),
        )),
        _ => Ok(config),
    }
}

/// Refuses any architecture but Qwen2's language model.
fn check_architecture(json: &Map<String, Value>) -> Result<()> {
    match json.get("model_type") {
        Some(kind) if kind == "qwen2" => {}
        Some(other) => {
            return Err(Error::unsupported_model(format!(
                "model_type {} is not served, only \"qwen2\"",
                shown(other)
            )))
        }
        None => return Err(Error::bad_model("config.json names no model_type (expected \"qwen2\")")),
    }
    match json.get("architectures") {
        None => Ok(()),
        Some(Value::Array(names)) if names.iter().any(|name| name == "Qwen2ForCausalLM") => Ok(()),
        Some(other) => Err(Error::unsupported_model(format!(
            "architectures {} are not served, only \"Qwen2ForCausalLM\"",
            shown(other)
        ))),
    }
}

/// Refuses what would change the computation.
fn check_served(json: &Map<String, Value>) -> Result<()> {
    if let Some(quantization) = json.get("quantization_config") {
        let method = quantization.get("quant_method").unwrap_or(quantization);
        return Err(Error::unsupported_quantization(format!(
            "the weights are quantised by {}; served are F32, F16 and BF16, and GGUF files",
            shown(method)
        )));
    }
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(rope) = json.get(key) else { continue };
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        let plain = kind.is_some_and(|kind| kind == "default") || kind.is_none() && key == "rope_parameters";
        if !plain {
            return Err(Error::unsupported_model(format!(
                "{key} {} is not served, only unscaled RoPE",
                shown(kind.unwrap_or(rope))
            )));
        }
    }
    match json.get("hidden_act") {
        None => {}
        Some(act) if act == "silu" => {}
        Some(other) => {
            return Err(Error::unsupported_model(format!(
                "hidden_act {} is not served, only \"silu\"",
                shown(other)
            )))
        }
    }
    let number = |key: &str| json.get(key).and_then(Value::as_u64);
    let reaches = match (number("sliding_window"), number("max_position_embeddings")) {
        (Some(window), Some(context)) => window < context,
        (window, _) => window.is_some(),
    };
    let windowed = match json.get("layer_types") {
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind != "full_attention"),
        _ => false,
    };
    let used = json.get("use_sliding_window").is_some_and(|used| used != false);
    if (used || windowed) && reaches {
        return Err(Error::unsupported_model("attention with a sliding window is not served"));
    }
    Ok(())
}

/// The beginning of a value, for messages.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(64).collect()
}
