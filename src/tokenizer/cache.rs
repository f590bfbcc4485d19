//! Ids of texts that were encoded before. What is kept are the parts that added tokens leave of a text: each is encoded by
//! itself whatever stands beside it, so its ids are its own, and the options (which added tokens count, BOS) only decide
//! where a text is cut. A conversation that grew by a turn finds all its earlier parts.
//!
//! The first level knows whole texts; the second ([`Kept`]) digests, and goes from visit to visit by way of who owns it.

use super::bpe::Scratch;
use super::kept::{Changes, Kept};
use super::{Piece, Special, Tokenizer};
use crate::error::Result;
use crate::metrics::hit_rate;
use serde_json::{json, Value};
use std::collections::HashMap;

/// What a part costs beside its text and ids, bytes: the map's slot and two allocations.
const PART_BYTES: usize = 96;

/// How much a level holds; the least recently used goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Parts at most.
    pub parts: usize,
    /// Bytes of all parts at most; one that takes more than a quarter of them is not kept.
    pub bytes: usize,
}

impl Bounds {
    /// Of the first level. A quarter of it holds a text that fills a context of 65,536 tokens.
    pub const MEMORY: Bounds = Bounds { parts: 512, bytes: 2 << 20 };
    /// Of the second level: on the disk for all vocabularies together, in memory for the loaded one.
    pub const DISK: Bounds = Bounds { parts: 2048, bytes: 1 << 20 };

    pub(super) fn most_part_bytes(&self) -> usize {
        self.bytes / 4
    }
}

/// The two levels for one tokenizer.
#[derive(Debug)]
pub struct TokenCache {
    bounds: Bounds,
    parts: HashMap<Box<str>, Part>,
    bytes: usize,
    /// Counts uses: the smallest is the longest ago.
    uses: u64,
    counts: Counts,
    kept: Kept,
}

#[derive(Debug)]
struct Part {
    ids: Box<[u32]>,
    used: u64,
}

/// Look-ups since the load.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    hits: u64,
    misses: u64,
    /// Of the misses.
    kept_hits: u64,
    /// Ids that look-ups came to, and those of them that either level gave.
    tokens: u64,
    reused_tokens: u64,
}

impl TokenCache {
    /// An empty cache for the texts that `tokenizer` encodes, and for no other's.
    pub fn new(tokenizer: &Tokenizer, memory: Bounds, disk: Bounds) -> Self {
        Self {
            bounds: memory,
            parts: HashMap::new(),
            bytes: 0,
            uses: 0,
            counts: Counts::default(),
            kept: Kept::new(tokenizer.identity(), disk),
        }
    }

    /// Appends the ids of a part without added tokens.
    fn encode(
        &mut self,
        tokenizer: &Tokenizer,
        text: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        let from = ids.len();
        let known = self.look_up(tokenizer, text, scratch, ids)?;
        let tokens = (ids.len() - from) as u64;
        self.counts.tokens += tokens;
        self.counts.reused_tokens += if known { tokens } else { 0 };
        Ok(())
    }

    /// Says whether the ids were known.
    fn look_up(
        &mut self,
        tokenizer: &Tokenizer,
        text: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<bool> {
        self.uses += 1;
        if let Some(part) = self.parts.get_mut(text) {
            self.counts.hits += 1;
            part.used = self.uses;
            ids.extend_from_slice(&part.ids);
            return Ok(true);
        }
        self.counts.misses += 1;
        if text.len() > self.bounds.most_part_bytes().max(self.kept.most_entry_bytes()) {
            tokenizer.encode_plain(text, scratch, ids)?;
            return Ok(false);
        }
        let (key, from) = (self.kept.key(text), ids.len());
        let known = match self.kept.get(&key, |ids| tokenizer.spells(ids, text)) {
            Some(kept) => {
                self.counts.kept_hits += 1;
                ids.extend_from_slice(kept);
                true
            }
            None => {
                tokenizer.encode_plain(text, scratch, ids)?;
                self.kept.put(key, &ids[from..]);
                false
            }
        };
        self.put(text, &ids[from..]);
        Ok(known)
    }

    fn put(&mut self, text: &str, ids: &[u32]) {
        let bytes = part_bytes(text, ids);
        if bytes > self.bounds.most_part_bytes() {
            return;
        }
        while self.parts.len() >= self.bounds.parts || self.bytes + bytes > self.bounds.bytes {
            let oldest = self.parts.iter().min_by_key(|(_, part)| part.used).map(|(text, _)| text.clone());
            let Some((text, part)) = oldest.and_then(|oldest| self.parts.remove_entry(&oldest)) else {
                return;
            };
            self.bytes -= part_bytes(&text, &part.ids);
        }
        self.bytes += bytes;
        self.parts.insert(text.into(), Part { ids: ids.into(), used: self.uses });
    }

    /// Takes in a record that [`Changes::merge`] made on an earlier visit. What in it is damaged or another vocabulary's is
    /// passed over.
    pub fn read(&mut self, record: &[u8], tokenizer: &Tokenizer) {
        self.kept.read(record, tokenizer.vocab_len());
    }

    /// Whether [`TokenCache::read`] was called.
    pub fn is_read(&self) -> bool {
        self.kept.is_read()
    }

    /// Whether there is something that the record lacks, or does not know to be in use.
    pub fn is_changed(&self) -> bool {
        self.kept.is_changed()
    }

    /// What that is.
    pub fn changes(&self) -> Changes {
        self.kept.changes()
    }

    /// The record has these now.
    pub fn written(&mut self, changes: &Changes) {
        self.kept.written(changes);
    }

    /// Forgets both levels; the counts stay, and what is on the disk. `false`: there was nothing.
    pub fn clear(&mut self) -> bool {
        let any = self.bytes() > 0;
        self.parts.clear();
        self.bytes = 0;
        self.kept.clear();
        any
    }

    /// Bytes of both levels.
    pub fn bytes(&self) -> usize {
        self.bytes + self.kept.bytes()
    }

    /// `CacheStats` of the first level, with those of the second as `disk`, whose look-ups are the first one's misses.
    pub fn stats(&self) -> Value {
        let Counts { hits, misses, kept_hits, tokens, reused_tokens } = self.counts;
        json!({
            "hits": hits,
            "misses": misses,
            "entries": self.parts.len(),
            "bytes": self.bytes,
            "hitRate": hit_rate(hits, misses),
            "combinedHitRate": hit_rate(hits + kept_hits, misses - kept_hits),
            "tokens": tokens,
            "reusedTokens": reused_tokens,
            "disk": {
                "hits": kept_hits,
                "misses": misses - kept_hits,
                "entries": self.kept.len(),
                "bytes": self.kept.bytes(),
                "hitRate": hit_rate(kept_hits, misses - kept_hits),
            },
        })
    }
}

fn part_bytes(text: &str, ids: &[u32]) -> usize {
    PART_BYTES + text.len() + 4 * ids.len()
}

impl Tokenizer {
    /// [`Tokenizer::encode`] by way of a cache, which must be this tokenizer's own.
    pub fn encode_cached(&self, text: &str, special: Special, cache: &mut TokenCache) -> Result<Vec<u32>> {
        let (mut ids, mut scratch) = (Vec::with_capacity(text.len() / 3), Scratch::default());
        self.encode_into(text, special, &mut ids, |part, ids| cache.encode(self, part, &mut scratch, ids))?;
        Ok(ids)
    }

    /// [`Tokenizer::encode_prompt`] by way of a cache, which must be this tokenizer's own.
    pub fn encode_prompt_cached(&self, pieces: &[Piece], cache: &mut TokenCache) -> Result<Vec<u32>> {
        let mut scratch = Scratch::default();
        let ids = self.encode_runs(pieces, |part, ids| cache.encode(self, part, &mut scratch, ids))?;
        Ok(self.with_bos(ids))
    }

    /// Encodes a prompt that is likely to come. It counts as no look-up.
    pub fn preload_prompt(&self, pieces: &[Piece], cache: &mut TokenCache) -> Result<Vec<u32>> {
        let counts = cache.counts;
        let ids = self.encode_prompt_cached(pieces, cache);
        cache.counts = counts;
        ids
    }

    /// As [`Tokenizer::preload_prompt`], a text as a part of a prompt and as one of its own.
    pub fn preload(&self, text: &str, cache: &mut TokenCache) -> Result<()> {
        let counts = cache.counts;
        let done = [Special::None, Special::UserDefined, Special::All]
            .into_iter()
            .try_for_each(|special| self.encode_cached(text, special, cache).map(drop));
        cache.counts = counts;
        done
    }
}
