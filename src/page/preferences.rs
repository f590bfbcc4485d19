//! The preferences of the chat page: one typed value, its defaults and its ranges. A value from the page is refused when it
//! is out of range; a stored one is replaced by its default, alone, so that one damaged field does not lose the others.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Layout of the stored object. Another one is not read.
const VERSION: u32 = 1;

const MAX_MODEL_CHARS: usize = 2048;
const MAX_PROMPT_CHARS: usize = 32_768;

const TIERS: &[&str] = &["auto", "simd128", "relaxed"];
const THEMES: &[&str] = &["auto", "light", "dark"];
const LANGUAGES: &[&str] = &["auto", "en", "zh"];

/// What the reader of the page chose. Serialized with camelCase names, as JavaScript sees it and as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Preferences {
    version: u32,
    /// Source of the model, at most 2048 characters; `None`: none chosen yet.
    pub model: Option<String>,
    /// "auto", "simd128" or "relaxed"; default "auto".
    pub tier: &'static str,
    /// Default "auto".
    pub threads: Threads,
    /// "auto", "light" or "dark"; default "auto", as the system is.
    pub theme: &'static str,
    /// "auto", "en" or "zh"; default "auto", as the browser is.
    pub language: &'static str,
    /// Tokens, 256 to 131,072; default 4096.
    pub context_length: u32,
    /// 0 to 2; default 0.6, which DeepSeek recommends for R1.
    pub temperature: f64,
    /// At most 32,768 characters; default empty.
    pub system_prompt: String,
}

/// Number of threads, 1 to 64, or "auto".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Threads {
    /// As many as the machine offers.
    Auto,
    /// This many.
    #[serde(untagged)]
    Count(u32),
}

impl Default for Preferences {
    fn default() -> Self {
        Preferences {
            version: VERSION,
            model: None,
            tier: "auto",
            threads: Threads::Auto,
            theme: "auto",
            language: "auto",
            context_length: 4096,
            temperature: 0.6,
            system_prompt: String::new(),
        }
    }
}

impl Preferences {
    /// Reads what was stored. Text that is no JSON object of this version gives the defaults; unknown fields are left out,
    /// and a field that [`set`](Self::set) would refuse keeps its default.
    pub fn from_stored(text: &str) -> Self {
        let mut preferences = Preferences::default();
        let stored: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
        if stored.get("version").and_then(Value::as_u64) == Some(u64::from(VERSION)) {
            for (key, value) in &stored {
                // What is refused has nothing sound to keep; its default stands.
                let _ = preferences.set(key, value);
            }
        }
        preferences
    }

    /// Sets the preference of the (camelCase) name `key`.
    ///
    /// # Errors
    /// `invalid_request` for an unknown name, a wrong type or a value out of range; nothing is changed then.
    pub fn set(&mut self, key: &str, value: &Value) -> Result<()> {
        let refused = |expected: &str| {
            let found: String = value.to_string().chars().take(60).collect();
            Error::invalid_request(format!("{key} must be {expected}, found {found}"))
        };
        let one_of = |choices: &[&'static str]| {
            let chosen = choices.iter().find(|choice| value.as_str() == Some(choice));
            chosen.copied().ok_or_else(|| refused(&format!("one of \"{}\"", choices.join("\", \""))))
        };
        let text = |most: usize, expected: &str| match value.as_str() {
            Some(text) if text.chars().count() <= most => Ok(text.to_string()),
            _ => Err(refused(&format!("{expected} of at most {most} characters"))),
        };
        let integer = |from: u32, to: u32, expected: &str| match value.as_f64() {
            Some(x) if x.fract() == 0.0 && (f64::from(from)..=f64::from(to)).contains(&x) => Ok(x as u32),
            _ => Err(refused(&format!("{expected} from {from} to {to}"))),
        };
        match key {
            "model" if value.is_null() => self.model = None,
            "model" => self.model = Some(text(MAX_MODEL_CHARS, "null or a string")?),
            "tier" => self.tier = one_of(TIERS)?,
            "threads" if value == "auto" => self.threads = Threads::Auto,
            "threads" => self.threads = Threads::Count(integer(1, 64, "\"auto\" or an integer")?),
            "theme" => self.theme = one_of(THEMES)?,
            "language" => self.language = one_of(LANGUAGES)?,
            "contextLength" => self.context_length = integer(256, 131_072, "an integer")?,
            "temperature" => match value.as_f64() {
                Some(x) if (0.0..=2.0).contains(&x) => self.temperature = x,
                _ => return Err(refused("a number from 0 to 2")),
            },
            "systemPrompt" => self.system_prompt = text(MAX_PROMPT_CHARS, "a string")?,
            _ => return Err(Error::invalid_request(format!("there is no preference named {key:?}"))),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn stored(preferences: &Preferences) -> String {
        serde_json::to_string(preferences).expect("plain data")
    }

    #[test]
    fn the_defaults_are_what_the_page_expects() {
        let defaults = json!({
            "version": 1, "model": null, "tier": "auto", "threads": "auto", "theme": "auto", "language": "auto",
            "contextLength": 4096, "temperature": 0.6, "systemPrompt": "",
        });
        assert_eq!(serde_json::to_value(Preferences::default()).expect("plain data"), defaults);
    }

    #[test]
    fn every_preference_comes_back_from_the_storage() {
        let mut preferences = Preferences::default();
        for (key, value) in [
            ("model", json!("hf:owner/repo/file.gguf")),
            ("tier", json!("relaxed")),
            ("threads", json!(8.0)),
            ("theme", json!("dark")),
            ("language", json!("zh")),
            ("contextLength", json!(8192)),
            ("temperature", json!(0)),
            ("systemPrompt", json!("你好\n\"🦙\"")),
        ] {
            let before = stored(&preferences);
            assert_eq!(preferences.set(key, &value), Ok(()), "{key}");
            assert_ne!(before, stored(&preferences), "{key} changes something");
        }
        assert_eq!(preferences.threads, Threads::Count(8));
        assert_eq!(Preferences::from_stored(&stored(&preferences)), preferences);
        for (key, value) in [("model", json!(null)), ("threads", json!("auto"))] {
            assert_eq!(preferences.set(key, &value), Ok(()));
        }
        assert_eq!((preferences.model, preferences.threads), (None, Threads::Auto));
    }

    #[test]
    fn wrong_values_are_refused_and_change_nothing() {
        for (key, value, expected) in [
            ("colour", json!("red"), "no preference named \"colour\""),
            ("version", json!(2), "no preference"),
            ("context_length", json!(512), "no preference"),
            ("model", json!(5), "null or a string"),
            ("model", json!("x".repeat(2049)), "2048"),
            ("tier", json!("avx"), "one of \"auto\", \"simd128\", \"relaxed\", found \"avx\""),
            ("tier", json!(null), "one of"),
            ("threads", json!(0), "from 1 to 64, found 0"),
            ("threads", json!(2.5), "found 2.5"),
            ("threads", json!("4"), "found \"4\""),
            ("theme", json!(["dark"]), "one of"),
            ("language", json!("EN"), "\"en\""),
            ("contextLength", json!(255), "from 256 to 131072"),
            ("contextLength", json!(1e9), "from 256 to 131072"),
            ("temperature", json!(2.1), "from 0 to 2, found 2.1"),
            ("temperature", json!("1"), "a number"),
            ("systemPrompt", json!("é".repeat(32_769)), "32768"),
        ] {
            let mut preferences = Preferences::default();
            let error = preferences.set(key, &value).expect_err(key);
            assert!(error.message().contains(expected), "{error} should say {expected}");
            assert!(error.message().len() < 250, "{error}");
            assert_eq!(preferences, Preferences::default());
        }
    }

    #[test]
    fn damaged_or_foreign_text_gives_defaults_and_sound_fields_survive() {
        for text in [
            "",
            "{",
            "null",
            "[1]",
            "5",
            "{}",
            "{\"theme\":\"dark\"}",
            "{\"version\":2,\"theme\":\"dark\"}",
            "\u{0}",
        ] {
            assert_eq!(Preferences::from_stored(text), Preferences::default(), "{text}");
        }
        let half = json!({"version": 1, "theme": "dark", "threads": -1, "temperature": null, "more": {}, "model": "m"});
        let read = Preferences::from_stored(&half.to_string());
        assert_eq!(
            read,
            Preferences { theme: "dark", model: Some("m".to_string()), ..Preferences::default() }
        );
    }
}
