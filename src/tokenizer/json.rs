//! `tokenizer.json` of Hugging Face's `tokenizers`: vocabulary, merges and added tokens, and whether the rest of it says what
//! this tokenizer does. The large lists are read straight into compact arrays.

use super::vocab::{Kind, Vocab};
use super::QWEN2_PATTERN;
use crate::error::{Error, Result};
use crate::gguf::StringArray;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::Deserialize;
use serde_json::Value;
use std::fmt;

/// Bytes of the file: Qwen2.5's has 7 MB, 11 with merges as pairs.
const MAX_BYTES: usize = 64 << 20;

/// What is needed of the file.
#[derive(Deserialize)]
pub(super) struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    continuing_subword_prefix: Value,
    #[serde(default)]
    end_of_word_suffix: Value,
    #[serde(default)]
    byte_fallback: Value,
    #[serde(default)]
    ignore_merges: Value,
    vocab: Words,
    merges: Merges,
}

impl File {
    /// Reads the file and checks that it is a tokenizer like Qwen2's.
    pub(super) fn parse(bytes: &[u8]) -> Result<File> {
        if bytes.len() > MAX_BYTES {
            return Err(Error::bad_model(format!(
                "tokenizer.json has {} bytes, at most {MAX_BYTES} are accepted",
                bytes.len()
            )));
        }
        let file: File = serde_json::from_slice(bytes).map_err(|e| Error::bad_json("tokenizer.json", &e))?;
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<()> {
        let model = &self.model;
        let off = |value: &Value| matches!(value, Value::Null | Value::Bool(false)) || value == "";
        let wrong = if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            "its model is no BPE"
        } else if !is_nfc(&self.normalizer) {
            "its normalizer is not NFC"
        } else if !is_qwen2(&self.pre_tokenizer) {
            "its pre_tokenizer does not cut words as Qwen2's does"
        } else if !off(&model.dropout) || !off(&model.byte_fallback) || !off(&model.ignore_merges) {
            "its BPE has dropout, byte_fallback or ignore_merges"
        } else if !off(&model.continuing_subword_prefix) || !off(&model.end_of_word_suffix) {
            "its BPE marks the parts of words"
        } else if self.added_tokens.iter().any(|token| token.single_word || token.lstrip || token.rstrip) {
            "an added token takes white space with it, or stands for whole words only"
        } else {
            return Ok(());
        };
        Err(Error::unsupported_model(format!("tokenizer.json: {wrong}")))
    }

    /// The id of an added token.
    pub(super) fn added(&self, text: &str) -> Option<u32> {
        self.added_tokens.iter().find(|token| token.content == text).map(|token| token.id)
    }

    /// The special token that the post-processor puts before a text.
    pub(super) fn first_special(&self) -> Option<&str> {
        let processors = match &self.post_processor["processors"] {
            Value::Array(list) => list.as_slice(),
            _ => std::slice::from_ref(&self.post_processor),
        };
        let template = processors.iter().find(|processor| processor["type"] == "TemplateProcessing")?;
        template["single"][0]["SpecialToken"]["id"].as_str()
    }

    /// The vocabulary, filled up with unused ids to `vocab_size`.
    pub(super) fn vocab(self, vocab_size: usize) -> Result<Vocab> {
        let Model { vocab: Words { texts, ids }, merges: Merges(merges), .. } = self.model;
        let row = |id: u32, text: &str| match (id as usize) < vocab_size {
            true => Ok(id as usize),
            false => Err(Error::bad_model(format!(
                "token {id} {:?} has no row, the embedding has {vocab_size}",
                text.chars().take(64).collect::<String>()
            ))),
        };
        let mut kinds = vec![Kind::Unused; vocab_size];
        let mut places = vec![u32::MAX; vocab_size];
        for (place, (text, &id)) in (0..).zip(texts.iter().zip(&ids)) {
            let row = row(id, text)?;
            if places[row] != u32::MAX {
                return Err(Error::bad_model(format!("two tokens of the vocabulary have id {id}")));
            }
            (places[row], kinds[row]) = (place, Kind::Normal);
        }
        let mut by_id: Vec<&Added> = self.added_tokens.iter().collect();
        by_id.sort_by_key(|token| token.id);
        if let Some(twins) = by_id.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(Error::bad_model(format!("two added tokens have id {}", twins[0].id)));
        }
        for token in &by_id {
            let control = token.special || looks_special(&token.content);
            kinds[row(token.id, &token.content)?] = if control { Kind::Control } else { Kind::User };
        }
        let mut tokens = StringArray::default();
        let mut next = by_id.into_iter().peekable();
        for (id, &place) in (0u32..).zip(&places) {
            let text = match next.next_if(|token| token.id == id) {
                Some(token) => &token.content,
                None => texts.get(place as usize).unwrap_or_default(),
            };
            tokens.push_str(text)?;
        }
        drop((texts, ids, places));
        Vocab::new(tokens, kinds, merges)
    }
}

/// Added tokens that some repositories do not mark as special, though they are (`does_token_look_special` of
/// `convert_hf_to_gguf.py`, as far as its spellings are general).
fn looks_special(text: &str) -> bool {
    let between = |open: &str, close: &str| text.starts_with(open) && text.ends_with(close);
    matches!(text, "<pad>" | "<mask>") || between("<|", "|>") || between("<｜", "｜>")
}

/// NFC, alone or as the only kind in a sequence.
fn is_nfc(normalizer: &Value) -> bool {
    match &normalizer["normalizers"] {
        Value::Array(list) => normalizer["type"] == "Sequence" && !list.is_empty() && list.iter().all(is_nfc),
        _ => normalizer["type"] == "NFC",
    }
}

/// `Split` by Qwen2's expression, then `ByteLevel` without one.
fn is_qwen2(pre_tokenizer: &Value) -> bool {
    let [split, bytes] = match &pre_tokenizer["pretokenizers"] {
        Value::Array(list) if list.len() == 2 => [&list[0], &list[1]],
        _ => return false,
    };
    split["type"] == "Split"
        && split["pattern"]["Regex"] == QWEN2_PATTERN
        && split["behavior"] == "Isolated"
        && split["invert"] != true
        && bytes["type"] == "ByteLevel"
        && bytes["add_prefix_space"] == false
        && bytes["use_regex"] == false
}

/// The vocabulary in the file's order.
struct Words {
    texts: StringArray,
    ids: Vec<u32>,
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Words;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tokens and their ids")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<Words, M::Error> {
                let mut words = Words { texts: StringArray::default(), ids: Vec::new() };
                while let Some((text, id)) = map.next_entry::<String, u32>()? {
                    words.texts.push_str(&text).map_err(M::Error::custom)?;
                    words.ids.push(id);
                }
                Ok(words)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// The merges as `"left right"`, whichever of its two forms the file has.
struct Merges(StringArray);

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Merges;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list of merges")
            }

            fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> std::result::Result<Merges, S::Error> {
                let mut merges = StringArray::default();
                while list.next_element_seed(Merge(&mut merges))?.is_some() {}
                Ok(Merges(merges))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// One merge: `"left right"` or `["left", "right"]`.
struct Merge<'a>(&'a mut StringArray);

impl<'de> DeserializeSeed<'de> for Merge<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Merge<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a merge, two tokens in one text or in a list")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<(), E> {
        self.0.push_str(text).map_err(E::custom)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut pair: S) -> std::result::Result<(), S::Error> {
        let mut part = |at: usize| {
            pair.next_element::<String>()?.ok_or_else(|| S::Error::invalid_length(at, &"two tokens"))
        };
        let (left, right) = (part(0)?, part(1)?);
        if pair.next_element::<String>()?.is_some() {
            return Err(S::Error::invalid_length(3, &"two tokens"));
        }
        self.0.push_str(&format!("{left} {right}")).map_err(S::Error::custom)
    }
}
