//! The vocabulary as it is needed at run time: the bytes of each token, its kind, and the merges; built from the strings
//! of a model file, which are consumed and freed on the way (resting 4.5 MB for Qwen2's 151,936 tokens).

use super::added::{AddedToken, AddedTokens};
use super::bpe::Merges;
use super::stored::{Reader, Sum, Writer};
use crate::error::{Error, Result};
use crate::gguf::StringArray;

/// An added token longer than this is refused, so that looking for added tokens stays linear in the text.
const MAX_ADDED_BYTES: usize = 1024;

/// Steps from its own slot that an entry of a hash table takes on average at most; a sound vocabulary needs one or two. More
/// were made to collide, and would take hours.
const MAX_STEPS: usize = 32;

/// What a token is (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Made of bytes by BPE; its string is in GPT-2's byte alphabet.
    Normal,
    /// A control token: matched in trusted text, dropped from answers.
    Control,
    /// A user-defined token: matched in trusted text, kept in answers.
    User,
    /// Fills the vocabulary up to the size of the embedding: never matched, decodes to nothing.
    Unused,
}

impl Kind {
    /// The kind with this number in memory.
    fn from_code(code: u8) -> Option<Kind> {
        [Kind::Normal, Kind::Control, Kind::User, Kind::Unused].into_iter().find(|kind| *kind as u8 == code)
    }

    /// The kind of a GGUF token type.
    pub(super) fn from_ggml(code: i64) -> Result<Kind> {
        match code {
            // 6 is a byte of a SentencePiece vocabulary; under a byte-level one it is a token like another.
            0 | 1 | 6 => Ok(Kind::Normal),
            3 => Ok(Kind::Control),
            4 => Ok(Kind::User),
            2 | 5 => Ok(Kind::Unused),
            _ => Err(Error::bad_model(format!("a token type must be 1 to 6 and is {code}"))),
        }
    }
}

/// Tokens and merges.
#[derive(Debug)]
pub(super) struct Vocab {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<Kind>,
    pub(super) merges: Merges,
    pub(super) added: AddedTokens,
}

impl Vocab {
    /// Checks and packs what a model file says. `bad_model` where it contradicts itself.
    pub(super) fn new(tokens: StringArray, kinds: Vec<Kind>, merges: StringArray) -> Result<Vocab> {
        if tokens.is_empty() {
            return Err(Error::bad_model("the vocabulary has no token"));
        }
        if kinds.len() != tokens.len() {
            return Err(Error::bad_model(format!("{} tokens but {} token types", tokens.len(), kinds.len())));
        }
        let alphabet = Alphabet::new();
        let text_bytes: usize = tokens.iter().map(str::len).sum();
        let mut bytes = Vec::with_capacity(text_bytes);
        let mut ends = Vec::with_capacity(tokens.len());
        let mut added = Vec::new();
        for (id, (text, kind)) in tokens.iter().zip(&kinds).enumerate() {
            match kind {
                Kind::Unused => {}
                Kind::Normal => {
                    let start = bytes.len();
                    if !alphabet.decode(text, &mut bytes) {
                        // Outside the byte alphabet: BPE cannot make it, but a model may still give it out.
                        bytes.truncate(start);
                        bytes.extend_from_slice(text.as_bytes());
                    }
                }
                Kind::Control | Kind::User => {
                    if text.len() > MAX_ADDED_BYTES {
                        return Err(Error::bad_model(format!(
                            "added token {id} is {} bytes long, at most {MAX_ADDED_BYTES} are served",
                            text.len()
                        )));
                    }
                    bytes.extend_from_slice(text.as_bytes());
                    let control = *kind == Kind::Control;
                    added.push(AddedToken { text: text.to_owned(), id: id as u32, control });
                }
            }
            ends.push(
                u32::try_from(bytes.len())
                    .map_err(|_| Error::bad_model("a vocabulary of more than 4 GiB"))?,
            );
        }
        drop(tokens);
        bytes.shrink_to_fit();
        let n_added = added.iter().filter(|token| !token.text.is_empty()).count();
        let added = AddedTokens::new(added);
        if added.iter().len() != n_added {
            return Err(Error::bad_model("two added tokens have the same text"));
        }
        let mut vocab = Vocab { bytes, ends, kinds, merges: Merges::with_capacity(0, [0; 256]), added };
        vocab.merges = vocab.read_merges(&alphabet, &merges)?;
        Ok(vocab)
    }

    /// As it is kept in an image.
    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.bytes(&self.bytes);
        out.words(&self.ends);
        out.bytes(&self.kinds.iter().map(|kind| *kind as u8).collect::<Vec<_>>());
        self.merges.write(&mut out);
        out.0
    }

    /// Adds what decides the ids of a text.
    pub(super) fn add_to(&self, sum: &mut Sum) {
        sum.bytes(&self.bytes);
        sum.words(&self.ends);
        sum.bytes(&self.kinds.iter().map(|kind| *kind as u8).collect::<Vec<_>>());
        self.merges.add_to(sum);
    }

    /// What [`Vocab::write`] wrote; `None` where it is none of its kind.
    pub(super) fn read(input: &mut Reader) -> Option<Vocab> {
        let (bytes, ends) = (input.bytes()?.to_vec(), input.words()?);
        let kinds: Vec<Kind> =
            input.bytes()?.iter().map(|code| Kind::from_code(*code)).collect::<Option<_>>()?;
        let rising = ends.windows(2).all(|pair| pair[0] <= pair[1]);
        if !rising || kinds.len() != ends.len() || ends.last().map(|end| *end as usize) != Some(bytes.len()) {
            return None;
        }
        let merges = Merges::read(input, ends.len())?;
        let mut vocab = Vocab { bytes, ends, kinds, merges, added: AddedTokens::default() };
        let special = |id: &u32| matches!(vocab.kind(*id), Some(Kind::Control | Kind::User));
        let added: Option<Vec<AddedToken>> = (0..vocab.len() as u32)
            .filter(special)
            .map(|id| {
                let text = std::str::from_utf8(vocab.bytes(id)?).ok()?.to_owned();
                Some(AddedToken { text, id, control: vocab.kind(id) == Some(Kind::Control) })
            })
            .collect();
        vocab.added = AddedTokens::new(added?);
        Some(vocab)
    }

    /// Ids up to the last one that stands for something.
    pub(super) fn n_real(&self) -> usize {
        self.kinds.iter().rposition(|kind| *kind != Kind::Unused).map_or(0, |id| id + 1)
    }

    fn read_merges(&self, alphabet: &Alphabet, merges: &StringArray) -> Result<Merges> {
        let index = Index::new(self)?;
        let mut raw = Vec::new();
        for token in self.added.iter() {
            raw.clear();
            if alphabet.decode(&token.text, &mut raw) && index.get(self, &raw).is_some() {
                return Err(Error::bad_model(format!(
                    "token {} {:?} is in the vocabulary twice",
                    token.id, token.text
                )));
            }
        }
        let mut byte_ids = [0; 256];
        for (byte, id) in (0..=u8::MAX).zip(&mut byte_ids) {
            *id = index.get(self, &[byte]).ok_or_else(|| {
                Error::bad_model(format!("the vocabulary has no token for byte {byte:#04x}"))
            })?;
        }
        let mut table = Merges::with_capacity(merges.len(), byte_ids);
        for (rank, merge) in merges.iter().enumerate() {
            let bad = |why: &str| Error::bad_model(format!("merge {rank} {merge:?} {why}"));
            let (left, right) =
                merge.split_once(' ').ok_or_else(|| bad("is not two tokens with a space between"))?;
            raw.clear();
            if !alphabet.decode(left, &mut raw) {
                return Err(bad("is not in the byte alphabet"));
            }
            let middle = raw.len();
            if !alphabet.decode(right, &mut raw) {
                return Err(bad("is not in the byte alphabet"));
            }
            let id = |bytes: &[u8]| {
                index.get(self, bytes).ok_or_else(|| bad("names a token that is not in the vocabulary"))
            };
            table.push(id(&raw[..middle])?, id(&raw[middle..])?, id(&raw)?);
            check_steps(table.steps(), merges.len())?;
        }
        Ok(table)
    }

    /// Number of ids, those of unused tokens too.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Kind of a token, `None` beyond the vocabulary.
    pub(super) fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(id as usize).copied()
    }

    /// Bytes a token stands for.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id - 1] as usize };
        self.bytes.get(start..end)
    }

    /// Bytes held on the heap.
    pub(super) fn memory_bytes(&self) -> usize {
        let added: usize = self.added.iter().map(|token| size_of::<AddedToken>() + token.text.len()).sum();
        self.bytes.capacity()
            + self.ends.capacity() * 4
            + self.kinds.capacity()
            + self.merges.memory_bytes()
            + added
    }
}

fn check_steps(steps: usize, entries: usize) -> Result<()> {
    if steps > MAX_STEPS * entries.max(1024) {
        return Err(Error::bad_model("the vocabulary's strings collide as no sound vocabulary's do"));
    }
    Ok(())
}

/// Token ids by bytes, while a vocabulary is built: a megabyte of open addressing over the vocabulary's own bytes.
struct Index {
    slots: Vec<u32>,
}

impl Index {
    /// Of all normal tokens; `bad_model` when two are the same.
    fn new(vocab: &Vocab) -> Result<Index> {
        let mut index = Index { slots: vec![u32::MAX; (vocab.len() * 3 / 2).next_power_of_two().max(8)] };
        let mut steps = 0;
        for id in 0..vocab.len() as u32 {
            let bytes = vocab.bytes(id).unwrap_or_default();
            if vocab.kind(id) != Some(Kind::Normal) || bytes.is_empty() {
                continue;
            }
            let slot = index.find(vocab, bytes);
            if index.slots[slot] != u32::MAX {
                return Err(Error::bad_model(format!("tokens {} and {id} are the same", index.slots[slot])));
            }
            index.slots[slot] = id;
            steps += slot.wrapping_sub(index.home(bytes)) & (index.slots.len() - 1);
            check_steps(steps, vocab.len())?;
        }
        Ok(index)
    }

    fn get(&self, vocab: &Vocab, bytes: &[u8]) -> Option<u32> {
        Some(self.slots[self.find(vocab, bytes)]).filter(|&id| id != u32::MAX)
    }

    /// The slot of these bytes, or the free one they would go to. At most two thirds of the slots are taken.
    fn find(&self, vocab: &Vocab, bytes: &[u8]) -> usize {
        let mut slot = self.home(bytes);
        while self.slots[slot] != u32::MAX && vocab.bytes(self.slots[slot]) != Some(bytes) {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        slot
    }

    /// The slot to look at first: FNV-1a, folded.
    fn home(&self, bytes: &[u8]) -> usize {
        let hash = bytes
            .iter()
            .fold(0xCBF2_9CE4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3));
        (hash ^ (hash >> 32)) as usize & (self.slots.len() - 1)
    }
}

/// GPT-2's byte alphabet (`bytes_to_unicode` of openai/gpt-2 `encoder.py`): printable Latin-1 stands for itself, each
/// other byte for the next character from U+0100 on.
struct Alphabet {
    bytes: [Option<u8>; 0x144],
}

impl Alphabet {
    fn new() -> Alphabet {
        let mut bytes = [None; 0x144];
        let mut next = 0x100;
        for byte in 0..=u8::MAX {
            let itself = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
            bytes[if itself { usize::from(byte) } else { next }] = Some(byte);
            next += usize::from(!itself);
        }
        Alphabet { bytes }
    }

    /// Appends the bytes of a token's string; `false` when a character of it is not in the alphabet.
    fn decode(&self, text: &str, bytes: &mut Vec<u8>) -> bool {
        text.chars().all(|c| match self.bytes.get(c as usize) {
            Some(&Some(byte)) => {
                bytes.push(byte);
                true
            }
            _ => false,
        })
    }
}
