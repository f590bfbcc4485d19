//! Ids of texts under the digest of the text and the identity of its vocabulary, as they go from visit to visit in one
//! record. Each entry has a sum of its own, ids must be the vocabulary's, and whoever takes them out holds them against the
//! text: an entry that was damaged, or is another's, is none.
//!
//! ```text
//! "QTOK", layout u32, then from the longest unused to the last used:
//! vocabulary u64, key 16 bytes, number of ids u32, ids u32 each, sum of all these u64
//! ```

use super::cache::Bounds;
use super::stored::Sum;
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};

const MAGIC: &[u8; 4] = b"QTOK";
/// Version of the record.
const LAYOUT: u32 = 1;
/// Bytes of an entry on the disk beside its ids.
const ENTRY_BYTES: usize = 36;
/// What an entry costs in memory beside its ids.
const HELD_BYTES: usize = 80;
/// Entries that are read are older than all that this visit uses.
const FIRST_USE: u64 = 1 << 32;

/// Digest of a vocabulary's identity and a text.
pub(super) type Key = [u8; 16];

/// The entries of one vocabulary.
#[derive(Debug)]
pub(super) struct Kept {
    vocabulary: u64,
    bounds: Bounds,
    entries: HashMap<Key, Entry>,
    /// Bytes of ids.
    id_bytes: usize,
    uses: u64,
    /// The last use that the record knows of.
    written: u64,
    is_read: bool,
}

#[derive(Debug)]
struct Entry {
    ids: Box<[u32]>,
    used: u64,
}

/// Entries to be written, in the order of their use.
#[derive(Debug, Clone)]
pub struct Changes {
    vocabulary: u64,
    bounds: Bounds,
    entries: Vec<(Key, Box<[u32]>)>,
    upto: u64,
}

impl Kept {
    pub(super) fn new(vocabulary: u64, bounds: Bounds) -> Self {
        let entries = HashMap::new();
        Self { vocabulary, bounds, entries, id_bytes: 0, uses: FIRST_USE, written: FIRST_USE, is_read: false }
    }

    pub(super) fn key(&self, text: &str) -> Key {
        let hash = Sha256::new().chain_update(self.vocabulary.to_le_bytes()).chain_update(text).finalize();
        std::array::from_fn(|i| hash[i])
    }

    /// The ids under a key, if they are `right` for its text; wrong ones go.
    pub(super) fn get(&mut self, key: &Key, right: impl Fn(&[u32]) -> bool) -> Option<&[u32]> {
        if !right(&self.entries.get(key)?.ids) {
            self.remove(key);
            return None;
        }
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.uses;
        Some(&entry.ids)
    }

    pub(super) fn put(&mut self, key: Key, ids: &[u32]) {
        if entry_bytes(ids.len()) <= self.bounds.most_part_bytes() {
            self.uses += 1;
            self.insert(key, ids.into(), self.uses);
        }
    }

    fn insert(&mut self, key: Key, ids: Box<[u32]>, used: u64) {
        let bytes = entry_bytes(ids.len());
        self.remove(&key);
        let stored = |kept: &Self| kept.id_bytes + ENTRY_BYTES * kept.entries.len();
        while self.entries.len() >= self.bounds.parts || stored(self) + bytes > self.bounds.bytes {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key);
            let Some(oldest) = oldest else { return };
            self.remove(&oldest);
        }
        self.id_bytes += 4 * ids.len();
        self.entries.insert(key, Entry { ids, used });
    }

    fn remove(&mut self, key: &Key) {
        if let Some(gone) = self.entries.remove(key) {
            self.id_bytes -= 4 * gone.ids.len();
        }
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.id_bytes = 0;
        self.written = self.uses;
    }

    /// Takes in this vocabulary's entries of a record, all of whose ids are below `n_ids`.
    pub(super) fn read(&mut self, record: &[u8], n_ids: usize) {
        self.is_read = true;
        let mine = entries(record).filter(|entry| entry.vocabulary == self.vocabulary);
        for (age, entry) in mine.collect::<Vec<_>>().into_iter().enumerate() {
            let ids: Box<[u32]> = entry.ids().collect();
            let right = ids.iter().all(|id| (*id as usize) < n_ids)
                && entry.bytes.len() <= self.bounds.most_part_bytes();
            // What this visit has encoded already is newer.
            if right && !self.entries.contains_key(&entry.key) {
                self.insert(entry.key, ids, age as u64);
            }
        }
    }

    pub(super) fn is_read(&self) -> bool {
        self.is_read
    }

    /// Whether there are [`Kept::changes`].
    pub(super) fn is_changed(&self) -> bool {
        self.uses > self.written
    }

    pub(super) fn changes(&self) -> Changes {
        let mut used: Vec<_> = self.entries.iter().filter(|(_, entry)| entry.used > self.written).collect();
        used.sort_unstable_by_key(|(_, entry)| entry.used);
        let entries = used.into_iter().map(|(key, entry)| (*key, entry.ids.clone())).collect();
        Changes { vocabulary: self.vocabulary, bounds: self.bounds, entries, upto: self.uses }
    }

    pub(super) fn written(&mut self, changes: &Changes) {
        if changes.vocabulary == self.vocabulary {
            self.written = changes.upto;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of the largest entry that is kept.
    pub(super) fn most_entry_bytes(&self) -> usize {
        self.bounds.most_part_bytes()
    }

    /// Bytes held in memory.
    pub(super) fn bytes(&self) -> usize {
        self.id_bytes + HELD_BYTES * self.entries.len()
    }
}

impl Changes {
    /// The record with these entries as the last used. The longest unused of all go where there is no room.
    pub fn merge(&self, record: &[u8]) -> Vec<u8> {
        let mine: HashSet<&Key> = self.entries.iter().map(|(key, _)| key).collect();
        let replaced = |entry: &Stored| entry.vocabulary == self.vocabulary && mine.contains(&entry.key);
        let others: Vec<&[u8]> =
            entries(record).filter(|entry| !replaced(entry)).map(|entry| entry.bytes).collect();
        let own = self.entries.iter().map(|(key, ids)| write(self.vocabulary, key, ids));
        let own: Vec<Vec<u8>> = own.collect();
        let all = others.into_iter().chain(own.iter().map(Vec::as_slice));
        let all: Vec<&[u8]> = all.collect();
        let mut bytes = 0;
        let fit = all.iter().rev().take(self.bounds.parts).take_while(|entry| {
            bytes += entry.len();
            bytes <= self.bounds.bytes
        });
        let first = all.len() - fit.count();
        let mut out = [&MAGIC[..], &LAYOUT.to_le_bytes()].concat();
        all[first..].iter().for_each(|entry| out.extend_from_slice(entry));
        out
    }

    /// No record is larger, bytes: a value beyond this is somebody else's.
    pub fn most_bytes() -> usize {
        Bounds::DISK.bytes + MAGIC.len() + size_of_val(&LAYOUT)
    }
}

/// An entry of a record, its sum checked.
struct Stored<'a> {
    vocabulary: u64,
    key: Key,
    bytes: &'a [u8],
}

impl Stored<'_> {
    fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        let ids = &self.bytes[28..self.bytes.len() - 8];
        ids.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id))
    }
}

fn entry_bytes(ids: usize) -> usize {
    ENTRY_BYTES + 4 * ids
}

fn write(vocabulary: u64, key: &Key, ids: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(entry_bytes(ids.len()));
    out.extend(vocabulary.to_le_bytes());
    out.extend(key);
    out.extend((ids.len() as u32).to_le_bytes());
    out.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    let sum = Sum::of(&out);
    out.extend(sum.to_le_bytes());
    out
}

/// The sound entries of a record; it ends where a length leads out of it.
fn entries(record: &[u8]) -> impl Iterator<Item = Stored<'_>> {
    let head = [&MAGIC[..], &LAYOUT.to_le_bytes()].concat();
    let mut rest = record.strip_prefix(&head[..]).unwrap_or_default();
    std::iter::from_fn(move || {
        let ids = u32::from_le_bytes(*rest.get(24..28)?.first_chunk()?) as usize;
        let (bytes, after) = rest.split_at_checked(ids.checked_mul(4)?.checked_add(ENTRY_BYTES)?)?;
        rest = after;
        Some(bytes)
    })
    .filter_map(|bytes| {
        let (content, sum) = bytes.split_last_chunk()?;
        let (vocabulary, rest) = content.split_first_chunk()?;
        let (vocabulary, key) = (u64::from_le_bytes(*vocabulary), *rest.first_chunk()?);
        (Sum::of(content) == u64::from_le_bytes(*sum)).then_some(Stored { vocabulary, key, bytes })
    })
}
