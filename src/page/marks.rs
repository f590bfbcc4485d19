//! Marks by id in a key-value storage that other tabs share: small JSON values, each with the time at which it was set.
//! Bounded in size, number and age; what is damaged is dropped. What a mark means is its writer's.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::shelf::Storage;

/// What the keys begin with; the id follows.
const PREFIX: &str = "qandle.mark.";

/// Letters, digits and hyphens of an id.
const MAX_ID_CHARS: usize = 64;
/// Bytes of a value's JSON text.
const MAX_VALUE_BYTES: usize = 4096;
/// Marks in all; a new one takes the place of the oldest.
const MAX_MARKS: usize = 64;
/// Age at which a mark is dropped.
const MAX_AGE_MS: f64 = 7.0 * DAY_MS;
/// A time so far ahead was set by a clock that was wrong.
const MAX_AHEAD_MS: f64 = DAY_MS;
const DAY_MS: f64 = 24.0 * 3600.0 * 1000.0;

/// A mark as it is read.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mark {
    /// Its name.
    pub id: String,
    /// When it was set, in ms since 1970.
    pub at: f64,
    /// What was marked.
    pub value: Value,
}

/// A mark as it is stored, under a key that has its id.
#[derive(Serialize, Deserialize)]
struct Stored {
    at: f64,
    value: Value,
}

/// The marks of all tabs over a storage. Nothing is kept in memory: a mark that is not stored has no reader.
#[derive(Debug)]
pub struct Marks<S> {
    storage: S,
}

impl<S: Storage> Marks<S> {
    /// The marks in a storage.
    pub fn new(storage: S) -> Self {
        Marks { storage }
    }

    /// Sets the mark of this id; `now` in ms since 1970. `false` when it is not stored: the id is other than 1 to 64
    /// letters, digits and hyphens, the value is longer than 4096 bytes, or the storage refuses it.
    pub fn set(&self, id: &str, value: Value, now: f64) -> bool {
        if !is_id(id) || value.to_string().len() > MAX_VALUE_BYTES {
            return false;
        }
        let mut others = self.all(now);
        others.retain(|mark| mark.id != id);
        others.sort_by(|a, b| b.at.total_cmp(&a.at));
        for mark in others.iter().skip(MAX_MARKS - 1) {
            self.clear(&mark.id);
        }
        let text = serde_json::to_string(&Stored { at: now, value });
        self.storage.write(&key_of(id), &text.expect("plain data with text keys always serializes"))
    }

    /// All marks, in no order. Those that are damaged, a week old or set in the future are dropped from the storage.
    pub fn all(&self, now: f64) -> Vec<Mark> {
        let mut marks = Vec::new();
        for key in self.storage.keys() {
            let Some(id) = key.strip_prefix(PREFIX) else { continue };
            let stored = self.storage.read(&key).and_then(|text| serde_json::from_str::<Stored>(&text).ok());
            match stored.filter(|mark| (-MAX_AHEAD_MS..MAX_AGE_MS).contains(&(now - mark.at))) {
                Some(Stored { at, value }) if is_id(id) => marks.push(Mark { id: id.to_string(), at, value }),
                _ => {
                    self.storage.remove(&key);
                }
            }
        }
        marks
    }

    /// Takes a mark away, if it is there.
    pub fn clear(&self, id: &str) {
        if is_id(id) {
            self.storage.remove(&key_of(id));
        }
    }
}

fn key_of(id: &str) -> String {
    format!("{PREFIX}{id}")
}

fn is_id(text: &str) -> bool {
    (1..=MAX_ID_CHARS).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::super::shelf::fake::Fake;
    use super::*;
    use serde_json::json;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    const NOW: f64 = 1_700_000_000_000.0;

    fn ids(marks: &Marks<Fake>, now: f64) -> Vec<String> {
        let mut ids: Vec<_> = marks.all(now).into_iter().map(|mark| mark.id).collect();
        ids.sort();
        ids
    }

    #[test]
    fn a_mark_reaches_other_tabs_until_it_is_cleared() {
        let storage = Fake::default();
        let (tab, other) = (Marks::new(storage.clone()), Marks::new(storage.clone()));
        assert_eq!(tab.all(NOW), []);
        assert!(tab.set("a-1", json!({"phase": "start"}), NOW));
        assert!(tab.set("a-1", json!({"phase": "load"}), NOW + 5.0));
        assert!(other.set("b", json!(null), NOW));
        let load = Mark { id: "a-1".to_string(), at: NOW + 5.0, value: json!({"phase": "load"}) };
        assert!(other.all(NOW).contains(&load));
        assert_eq!(ids(&tab, NOW), ["a-1", "b"]);
        other.clear("a-1");
        other.clear("never");
        assert_eq!(ids(&tab, NOW), ["b"]);
    }

    #[test]
    fn what_is_damaged_old_or_of_the_future_is_swept_and_nothing_else() {
        let storage = Fake::default();
        let stored = [
            ("qandle.mark.text", "{\"at\":"),
            ("qandle.mark.null", "null"),
            ("qandle.mark.timeless", "{\"value\":1}"),
            ("qandle.mark.", "{\"at\":1700000000000,\"value\":1}"),
            ("qandle.mark.a b", "{\"at\":1700000000000,\"value\":1}"),
            ("qandle.mark.old", "{\"at\":1699395200000,\"value\":1}"),
            ("qandle.mark.ahead", "{\"at\":1700086400001,\"value\":1}"),
            ("qandle.mark.good", "{\"at\":1699395200001,\"value\":1}"),
            ("qandle.preferences", "{"),
            ("other", "x"),
        ];
        for (key, text) in stored {
            assert!(storage.write(key, text));
        }
        let marks = Marks::new(storage.clone());
        assert_eq!(ids(&marks, NOW), ["good"]);
        let mut left = storage.keys();
        left.sort();
        assert_eq!(left, ["other", "qandle.mark.good", "qandle.preferences"]);
        assert_eq!(ids(&marks, NOW + 2.0), [""; 0]);
    }

    #[test]
    fn a_new_mark_takes_the_place_of_the_oldest() {
        let marks = Marks::new(Fake::default());
        for i in 0..MAX_MARKS + 3 {
            assert!(marks.set(&format!("m-{i}"), json!(i), NOW + i as f64));
        }
        assert!(marks.set("m-3", json!("again"), NOW + 100.0));
        let kept = ids(&marks, NOW);
        assert_eq!(kept.len(), MAX_MARKS);
        assert!(!kept.contains(&"m-2".to_string()) && kept.contains(&"m-3".to_string()));
    }

    #[test]
    fn what_cannot_be_stored_says_so_and_leaves_the_rest() {
        let storage = Fake::default();
        let marks = Marks::new(storage.clone());
        assert!(marks.set("a", json!(1), NOW));
        for id in ["", "a b", "é", "a.b", &"x".repeat(65)] {
            assert!(!marks.set(id, json!(1), NOW), "{id}");
            marks.clear(id);
        }
        assert!(marks.set("long", json!("x".repeat(MAX_VALUE_BYTES - 2)), NOW));
        assert!(!marks.set("longer", json!("x".repeat(MAX_VALUE_BYTES - 1)), NOW));
        storage.full.set(true);
        assert!(!marks.set("b", json!(1), NOW));
        assert_eq!(ids(&marks, NOW), ["a", "long"]);
        storage.closed.set(true);
        assert!(!marks.set("b", json!(1), NOW));
        marks.clear("a");
        assert_eq!(marks.all(NOW), []);
    }
}
