//! Answers that were given before, by everything that decides them: the same question is answered at once, delta by delta.
//! Knows tokens and texts, not requests; whether an answer may be kept is decided by who puts it.

use crate::generation::Finish;
use crate::metrics::hit_rate;
use crate::sampler::SamplingParams;
use crate::stream::Parts;
use serde_json::{json, Value};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::rc::Rc;

/// What an entry costs beside its texts and ids, bytes: the key, the maps, the allocations.
const ENTRY_BYTES: usize = 256;
/// What a delta costs beside its texts and ids, bytes.
const DELTA_BYTES: usize = 96;

/// Everything that decides an answer, hashed; the model is the cache owner's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of a prompt of token ids; `None` where the answer is drawn by chance. `reasoning` is how its text is split.
    pub fn of(prompt: &[u32], params: &SamplingParams, reasoning: Option<bool>) -> Option<Self> {
        if !params.is_repeatable() {
            return None;
        }
        let mut hash = Sha256::new();
        hash.update((prompt.len() as u64).to_le_bytes());
        prompt.iter().for_each(|id| hash.update(id.to_le_bytes()));
        hash.update([reasoning.map_or(2, u8::from)]);
        // A struct of numbers and texts always serialises.
        hash.update(serde_json::to_vec(params).ok()?);
        Some(Self(hash.finalize().into()))
    }
}

/// A finished answer as it was streamed.
#[derive(Debug, Default)]
pub struct Answer {
    /// Texts and ids of each step that had any.
    pub deltas: Vec<(Parts, Vec<u32>)>,
    /// Tokens sampled, the end token included.
    pub completion_tokens: usize,
    /// Why it ended.
    pub finish: Option<Finish>,
}

impl Answer {
    fn bytes(&self) -> usize {
        let delta = |(parts, ids): &(Parts, Vec<u32>)| {
            DELTA_BYTES + parts.content.len() + parts.reasoning.len() + 4 * ids.len()
        };
        ENTRY_BYTES + self.deltas.iter().map(delta).sum::<usize>()
    }
}

/// Answers within a budget of bytes and a time to live; the least recently used goes first.
#[derive(Debug)]
pub struct ResponseCache {
    most_bytes: usize,
    ttl_ms: f64,
    entries: HashMap<Key, Entry>,
    bytes: usize,
    hits: u64,
    misses: u64,
    /// Counts uses: the smallest is the longest ago.
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    answer: Rc<Answer>,
    bytes: usize,
    kept_at: f64,
    used: u64,
}

impl ResponseCache {
    /// An empty cache. With no bytes nothing is kept.
    pub fn new(most_bytes: usize, ttl_ms: f64) -> Self {
        Self { most_bytes, ttl_ms, entries: HashMap::new(), bytes: 0, hits: 0, misses: 0, uses: 0 }
    }

    /// The answer under a key, if it is there and fresh; counted as a hit or a miss.
    pub fn get(&mut self, key: &Key, now: f64) -> Option<Rc<Answer>> {
        let fresh =
            self.entries.get(key).is_some_and(|entry| (0.0..=self.ttl_ms).contains(&(now - entry.kept_at)));
        if !fresh {
            self.remove(key);
            self.misses += 1;
            return None;
        }
        self.hits += 1;
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.uses;
        Some(entry.answer.clone())
    }

    /// Keeps an answer, unless it alone is beyond the budget.
    pub fn put(&mut self, key: Key, answer: Answer, now: f64) {
        self.remove(&key);
        let bytes = answer.bytes();
        if bytes > self.most_bytes {
            return;
        }
        while self.bytes + bytes > self.most_bytes && self.evict() {}
        self.uses += 1;
        self.bytes += bytes;
        self.entries.insert(key, Entry { answer: Rc::new(answer), bytes, kept_at: now, used: self.uses });
    }

    /// Forgets the least recently used answer; `false`: there is none.
    pub fn evict(&mut self) -> bool {
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key);
        oldest.inspect(|key| self.remove(key)).is_some()
    }

    fn remove(&mut self, key: &Key) {
        if let Some(gone) = self.entries.remove(key) {
            self.bytes -= gone.bytes;
        }
    }

    /// Forgets all answers; the counts stay.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    /// Bytes of all entries.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `CacheStats`.
    pub fn stats(&self) -> Value {
        json!({
            "hits": self.hits,
            "misses": self.misses,
            "hitRate": hit_rate(self.hits, self.misses),
            "entries": self.entries.len(),
            "bytes": self.bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(body: Value) -> SamplingParams {
        SamplingParams::from_json(body.as_object().unwrap(), 100).unwrap()
    }

    fn answer(text: &str) -> Answer {
        let parts = Parts { content: text.into(), ..Default::default() };
        Answer { deltas: vec![(parts, vec![1, 2])], completion_tokens: 2, finish: Some(Finish::Stop) }
    }

    fn text(cache: &mut ResponseCache, key: &Key, now: f64) -> Option<String> {
        cache.get(key, now).map(|answer| answer.deltas[0].0.content.clone())
    }

    #[test]
    fn whatever_can_change_the_answer_changes_the_key() {
        let greedy = json!({ "temperature": 0 });
        let key = |prompt: &[u32], body: &Value, reasoning| Key::of(prompt, &params(body.clone()), reasoning);
        let first = key(&[1, 2], &greedy, None).unwrap();
        assert_eq!(key(&[1, 2], &greedy, None), Some(first));
        let mut keys = vec![first];
        for (prompt, reasoning) in [
            (&[1][..], None),
            (&[1, 2, 0], None),
            (&[2, 1], None),
            (&[1, 2], Some(true)),
            (&[1, 2], Some(false)),
        ] {
            keys.push(key(prompt, &greedy, reasoning).unwrap());
        }
        for (name, value) in [
            ("max_tokens", json!(5)),
            ("seed", json!(1)),
            ("stop", json!("x")),
            ("logit_bias", json!({ "5": 1 })),
            ("top_k", json!(3)),
            ("top_p", json!(0.5)),
            ("min_p", json!(0.5)),
            ("repetition_penalty", json!(1.5)),
            ("presence_penalty", json!(1)),
            ("frequency_penalty", json!(1)),
            ("temperature", json!(0.5)),
        ] {
            let mut body = json!({ "temperature": 0, "seed": 2 });
            body[name] = value;
            keys.push(key(&[1, 2], &body, None).unwrap());
        }
        let all: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(all.len(), keys.len());
    }

    #[test]
    fn what_is_drawn_by_chance_has_no_key() {
        assert_eq!(Key::of(&[1], &params(json!({})), None), None);
        assert_eq!(Key::of(&[1], &params(json!({ "temperature": 0.7 })), None), None);
        assert!(Key::of(&[1], &params(json!({ "temperature": 0.7, "seed": 3 })), None).is_some());
        assert!(Key::of(&[1], &params(json!({ "temperature": 1e-6 })), None).is_some());
    }

    #[test]
    fn the_least_recently_used_goes_first_and_the_budget_holds() {
        let keys: Vec<_> =
            (0..4).map(|i| Key::of(&[i], &params(json!({ "temperature": 0 })), None).unwrap()).collect();
        let one = answer("a").bytes();
        let mut cache = ResponseCache::new(3 * one, 1e9);
        for (i, key) in keys.iter().take(3).enumerate() {
            cache.put(*key, answer(["a", "b", "c"][i]), 0.0);
        }
        assert_eq!(text(&mut cache, &keys[0], 1.0).as_deref(), Some("a"));
        cache.put(keys[3], answer("d"), 2.0);
        assert_eq!(text(&mut cache, &keys[1], 3.0), None, "the oldest use");
        assert_eq!(text(&mut cache, &keys[0], 3.0).as_deref(), Some("a"));
        assert_eq!(cache.bytes(), 3 * one);
        cache.put(keys[1], answer(&"x".repeat(4 * one)), 4.0);
        assert_eq!(
            (cache.bytes(), text(&mut cache, &keys[1], 4.0)),
            (3 * one, None),
            "larger than the budget"
        );
        cache.put(keys[3], answer("e"), 5.0);
        assert_eq!(
            (cache.bytes(), text(&mut cache, &keys[3], 5.0).as_deref()),
            (3 * one, Some("e")),
            "replaced"
        );
        assert_eq!(
            cache.stats(),
            json!({ "hits": 3, "misses": 2, "hitRate": 0.6, "entries": 3, "bytes": 3 * one })
        );
        cache.clear();
        assert_eq!((cache.bytes(), text(&mut cache, &keys[0], 5.0)), (0, None));
    }

    #[test]
    fn an_answer_lives_for_its_time_and_not_before_it() {
        let key = Key::of(&[1], &params(json!({ "temperature": 0 })), None).unwrap();
        let mut cache = ResponseCache::new(1 << 20, 1000.0);
        cache.put(key, answer("a"), 5000.0);
        assert!(cache.get(&key, 6000.0).is_some());
        assert!(cache.get(&key, 6001.0).is_none());
        cache.put(key, answer("a"), 5000.0);
        assert!(cache.get(&key, 4000.0).is_none(), "a clock that was set back");
        assert_eq!(cache.bytes(), 0);
    }
}
