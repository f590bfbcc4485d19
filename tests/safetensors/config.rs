//! `config.json`: what the GGUF header gives, and what cannot be served.

use super::{config, config_of, fixture, refused};
use qandle::config::{from_json, Config};
use serde_json::{json, Value};

#[test]
fn config_json_gives_what_the_gguf_header_gives() {
    let gguf = config_of(&fixture("golden/tiny-f32_tied.gguf"));
    let same = |json: &Config| {
        // GGUF holds epsilon as f32.
        let json = Config { rms_norm_eps: f64::from(json.rms_norm_eps as f32), ..json.clone() };
        assert_eq!(json, gguf);
    };
    same(&config());
    // As transformers 5 writes it.
    let mut json: Value = serde_json::from_slice(&fixture("safetensors/config.json")).unwrap();
    json.as_object_mut().unwrap().remove("rope_theta");
    json["rope_parameters"] = json!({ "rope_theta": 1e6, "rope_type": "default" });
    json["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]);
    json["head_dim"] = json!(16);
    same(&from_json(json.to_string().as_bytes()).unwrap());
}

#[test]
fn a_config_json_that_cannot_be_served_is_refused() {
    let cases: [(&str, Value, &str); 27] = [
        ("model_type", json!("llama"), "unsupported_model"),
        ("model_type", Value::Null, "bad_model"),
        ("architectures", json!(["Qwen2VLForConditionalGeneration"]), "unsupported_model"),
        ("rope_scaling", json!({ "type": "yarn", "factor": 4.0 }), "unsupported_model"),
        ("rope_scaling", json!({ "rope_type": "linear", "factor": 4.0 }), "unsupported_model"),
        ("rope_scaling", json!(4), "unsupported_model"),
        ("rope_parameters", json!({ "rope_type": "yarn", "rope_theta": 1e6 }), "unsupported_model"),
        ("quantization_config", json!({ "quant_method": "gptq", "bits": 4 }), "unsupported_quantization"),
        ("hidden_act", json!("gelu"), "unsupported_model"),
        ("head_dim", json!(32), "unsupported_model"),
        ("hidden_size", json!(63), "bad_model"),
        ("hidden_size", json!(40), "unsupported_model"),
        ("hidden_size", json!(-64), "bad_model"),
        ("hidden_size", json!(64.5), "bad_model"),
        ("hidden_size", json!("64"), "bad_model"),
        ("hidden_size", Value::Null, "bad_model"),
        ("num_attention_heads", json!(0), "bad_model"),
        ("num_key_value_heads", json!(3), "bad_model"),
        ("num_hidden_layers", json!(1_000_000), "bad_model"),
        ("vocab_size", json!(u64::MAX), "bad_model"),
        ("max_position_embeddings", json!(0), "bad_model"),
        ("rope_theta", json!(0), "bad_model"),
        ("rope_theta", json!("1e6"), "bad_model"),
        ("rms_norm_eps", json!(-1e-6), "bad_model"),
        ("tie_word_embeddings", json!("yes"), "bad_model"),
        ("layer_types", json!(["sliding_attention"]), "ok"),
        ("use_sliding_window", json!(true), "ok"),
    ];
    let sound: Value = serde_json::from_slice(&fixture("safetensors/config.json")).unwrap();
    for (key, value, code) in cases {
        let mut json = sound.clone();
        json[key] = value.clone();
        let found = from_json(json.to_string().as_bytes()).map_or_else(|e| e.code(), |_| "ok");
        assert_eq!(found, code, "{key} {value}");
    }
    // Windows count where they are shorter than the context.
    for (key, value) in [("use_sliding_window", json!(true)), ("layer_types", json!(["sliding_attention"]))] {
        let mut json = sound.clone();
        json["sliding_window"] = json!(256);
        json[key] = value;
        refused(from_json(json.to_string().as_bytes()), "unsupported_model", &["sliding window"]);
        json["sliding_window"] = json!(512);
        assert!(from_json(json.to_string().as_bytes()).is_ok());
    }
    refused(from_json(b"<html>"), "bad_model", &["config.json cannot be read"]);
    refused(from_json(b"[]"), "bad_model", &["no JSON object"]);
}
