//! The small files beside `tokenizer.json`: which tokens begin and end a text, and the chat template. Where they contradict each
//! other, `tokenizer_config.json` goes before `config.json`, as in gguf-py's `SpecialVocab`.

use super::json::File;
use super::Roles;
use crate::error::{Error, Result};
use serde_json::Value;

/// The files of a Hugging Face repository that tokenizer and template are made of, each as its bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct TextFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// `config.json`.
    pub config: &'a [u8],
    /// `tokenizer_config.json`: the texts of special tokens, whether a text begins with BOS, the chat template.
    pub tokenizer_config: Option<&'a [u8]>,
    /// `generation_config.json`: all tokens that end an answer.
    pub generation_config: Option<&'a [u8]>,
    /// `chat_template.jinja`, which newer repositories have; it counts where `tokenizer_config.json` has no template.
    pub chat_template: Option<&'a [u8]>,
}

impl TextFiles<'_> {
    /// The chat template's source; of several the one named `default`.
    ///
    /// # Errors
    /// `bad_model` where a file is no JSON or no UTF-8.
    pub fn chat_template(&self) -> Result<Option<String>> {
        let config = parse("tokenizer_config.json", self.tokenizer_config)?;
        let default = |list: &[Value]| {
            list.iter()
                .find(|item| item["name"] == "default")
                .and_then(|item| item["template"].as_str().map(str::to_owned))
        };
        let own = match &config["chat_template"] {
            Value::String(source) => Some(source.clone()),
            Value::Array(list) => default(list),
            _ => None,
        };
        match (own, self.chat_template) {
            (None, Some(bytes)) => String::from_utf8(bytes.to_vec())
                .map(Some)
                .map_err(|e| Error::bad_model(format!("chat_template.jinja is not UTF-8: {e}"))),
            (own, _) => Ok(own),
        }
    }

    /// What the files say of single tokens.
    pub(super) fn roles(&self, file: &File) -> Result<Roles> {
        let texts = parse("tokenizer_config.json", self.tokenizer_config)?;
        let config = parse("config.json", Some(self.config))?;
        let generation = parse("generation_config.json", self.generation_config)?;
        let id = |role: &str| {
            let entry = &texts[format!("{role}_token")];
            let text = entry.as_str().or_else(|| entry["content"].as_str());
            let by_text = text.and_then(|text| file.added(text)).map(u64::from);
            let key = format!("{role}_token_id");
            by_text
                .or_else(|| ids(&config[&key]).first().copied())
                .or_else(|| ids(&generation[&key]).first().copied())
        };
        let (bos, eos, pad) = (id("bos"), id("eos"), id("pad"));
        let ends = match &generation["eos_token_id"] {
            Value::Null => ids(&config["eos_token_id"]),
            named => ids(named),
        };
        let first = file.first_special();
        let begins = match &texts["bos_token"] {
            Value::Null if self.tokenizer_config.is_some() => false,
            _ => bos.is_some() && first.and_then(|text| file.added(text)).map(u64::from) == bos,
        };
        Ok(Roles { bos, eos, pad, ends, add_bos: texts["add_bos_token"].as_bool().unwrap_or(begins) })
    }
}

/// A file as JSON; null where there is none.
fn parse(name: &str, bytes: Option<&[u8]>) -> Result<Value> {
    let Some(bytes) = bytes else { return Ok(Value::Null) };
    serde_json::from_slice(bytes).map_err(|e| Error::bad_json(name, &e))
}

/// One id or a list of them.
fn ids(value: &Value) -> Vec<u64> {
    match value {
        Value::Array(list) => list.iter().filter_map(Value::as_u64).collect(),
        one => one.as_u64().into_iter().collect(),
    }
}
