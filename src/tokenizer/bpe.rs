//! Byte-pair merges over token ids, as GPT-2 defined them: of all adjacent pairs the one with the lowest rank is merged,
//! the leftmost of equals first, until none is left.
//!
//! The table costs 12 bytes a merge and a 4-byte slot (2.9 MB for Qwen2) where a map of strings costs ten times that. A
//! heap keeps a word of n bytes at O(n log n): a megabyte of one letter is one word.

use super::stored::{Reader, Sum, Writer};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const NONE: u32 = u32::MAX;

/// All merges of a vocabulary.
#[derive(Debug)]
pub(super) struct Merges {
    /// `[left, right, merged]` token ids by rank.
    pairs: Vec<[u32; 3]>,
    /// Open addressing over `pairs`: rank, or `NONE`.
    slots: Vec<u32>,
    /// Steps that all pairs stand from their own slots.
    steps: usize,
    /// Token id of each single byte.
    bytes: [u32; 256],
}

impl Merges {
    /// An empty table with room for `merges` pairs; `bytes` are the ids of the 256 single-byte tokens.
    pub(super) fn with_capacity(merges: usize, bytes: [u32; 256]) -> Merges {
        let slots = vec![NONE; (merges * 3 / 2).next_power_of_two().max(8)];
        Merges { pairs: Vec::with_capacity(merges), slots, steps: 0, bytes }
    }

    /// Adds the merge of the next rank. A pair that is there already keeps its rank and gives `false`.
    pub(super) fn push(&mut self, left: u32, right: u32, merged: u32) -> bool {
        if self.pairs.len() + 1 >= self.slots.len() {
            return false;
        }
        let mut slot = self.home(left, right);
        while self.slots[slot] != NONE {
            let [l, r, _] = self.pairs[self.slots[slot] as usize];
            if (l, r) == (left, right) {
                return false;
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        self.steps += slot.wrapping_sub(self.home(left, right)) & (self.slots.len() - 1);
        self.slots[slot] = self.pairs.len() as u32;
        self.pairs.push([left, right, merged]);
        true
    }

    /// Steps that all pairs stand from their own slots: what finding each of them once takes.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// As it is kept in an image.
    pub(super) fn write(&self, out: &mut Writer) {
        out.words(self.pairs.as_flattened());
        out.words(&self.slots);
        out.words(&self.bytes);
    }

    /// Adds what decides the merges of a word.
    pub(super) fn add_to(&self, sum: &mut Sum) {
        sum.words(self.pairs.as_flattened());
        sum.words(&self.bytes);
    }

    /// What [`Merges::write`] wrote, for a vocabulary of `n` tokens; `None` where it is none of its kind.
    pub(super) fn read(input: &mut Reader, n: usize) -> Option<Merges> {
        let (words, slots, bytes) = (input.words()?, input.words()?, input.words()?);
        let known = |id: &u32| (*id as usize) < n;
        if words.len() % 3 != 0 || !words.iter().all(known) || !bytes.iter().all(known) {
            return None;
        }
        let pairs: Vec<[u32; 3]> = words.chunks_exact(3).map(|p| [p[0], p[1], p[2]]).collect();
        let taken = slots.iter().filter(|slot| **slot != NONE);
        // A free slot ends every search.
        let sound = slots.len().is_power_of_two()
            && taken.clone().count() == pairs.len()
            && pairs.len() < slots.len()
            && taken.clone().all(|slot| (*slot as usize) < pairs.len());
        sound.then_some(Merges { pairs, slots, steps: 0, bytes: bytes.try_into().ok()? })
    }

    /// Bytes held on the heap.
    pub(super) fn memory_bytes(&self) -> usize {
        self.pairs.capacity() * size_of::<[u32; 3]>() + self.slots.capacity() * size_of::<u32>()
    }

    fn home(&self, left: u32, right: u32) -> usize {
        let key = (u64::from(left) << 32 | u64::from(right)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (key >> 32) as usize & (self.slots.len() - 1)
    }

    /// `(rank, merged)` of a pair.
    fn get(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let mut slot = self.home(left, right);
        loop {
            let rank = self.slots[slot];
            let &[l, r, merged] = self.pairs.get(rank as usize)?;
            if (l, r) == (left, right) {
                return Some((rank, merged));
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
    }

    /// Appends the ids of one word.
    pub(super) fn encode(&self, word: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if let [byte] = word {
            ids.push(self.bytes[usize::from(*byte)]);
            return;
        }
        let Scratch { symbols, queue } = scratch;
        symbols.clear();
        queue.clear();
        symbols.extend(word.iter().enumerate().map(|(i, &byte)| Symbol {
            id: self.bytes[usize::from(byte)],
            prev: if i == 0 { NONE } else { i as u32 - 1 },
            next: if i + 1 == word.len() { NONE } else { i as u32 + 1 },
        }));
        for at in 1..symbols.len() {
            self.offer(symbols, queue, at as u32 - 1);
        }
        while let Some(Reverse((rank, at))) = queue.pop() {
            let Symbol { id, prev, next } = symbols[at as usize];
            // An entry is stale when its pair was eaten by another merge since.
            let Some(&[left, right, merged]) = self.pairs.get(rank as usize) else { continue };
            if id != left || next == NONE || symbols[next as usize].id != right {
                continue;
            }
            let after = symbols[next as usize].next;
            symbols[next as usize].id = NONE;
            symbols[at as usize] = Symbol { id: merged, prev, next: after };
            if after != NONE {
                symbols[after as usize].prev = at;
                self.offer(symbols, queue, at);
            }
            if prev != NONE {
                self.offer(symbols, queue, prev);
            }
        }
        ids.extend(symbols.iter().map(|symbol| symbol.id).filter(|&id| id != NONE));
    }

    /// Queues the pair that begins at a symbol, when there is a merge for it.
    fn offer(&self, symbols: &[Symbol], queue: &mut BinaryHeap<Reverse<(u32, u32)>>, at: u32) {
        let Symbol { id, next, .. } = symbols[at as usize];
        if next != NONE {
            if let Some((rank, _)) = self.get(id, symbols[next as usize].id) {
                queue.push(Reverse((rank, at)));
            }
        }
    }
}

/// A token of a word while it is being merged; linked to its neighbours. `id` is `NONE` once it is part of another.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    id: u32,
    prev: u32,
    next: u32,
}

/// Buffers of [`Merges::encode`], kept from word to word.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<(u32, u32)>>,
}
