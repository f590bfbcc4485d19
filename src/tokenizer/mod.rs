//! Text ↔ token ids, from the vocabulary in a GGUF header or a `tokenizer.json`.
//!
//! It gives what Hugging Face's `tokenizers` gives for Qwen2 (NFC, the Qwen2 expression, byte-level BPE), whose NFC
//! it uses. Its BPE is not: natively, with Qwen2.5's vocabulary, it peaks at 33 MB and rests at 24 where this takes 7.5 and 4.5.
//! Added tokens are matched here and not by the crate, since who wrote a text decides whether they count ([`Special`]).

mod added;
mod bpe;
mod cache;
mod decoder;
mod files;
mod json;
mod kept;
mod split;
mod stored;
mod vocab;

use std::borrow::Cow;

use tokenizers::normalizers::unicode::NFC;
use tokenizers::{NormalizedString, Normalizer};
use unicode_normalization::{is_nfc_quick, IsNormalized};

pub use added::{AddedToken, AddedTokens, Segment};
pub use cache::{Bounds, TokenCache};
pub use decoder::StreamDecoder;
pub use files::TextFiles;
pub use kept::Changes;
pub use split::QWEN2_PATTERN;

use crate::error::{Error, Result};
use crate::gguf::Metadata;
use stored::{Reader, Writer};
use vocab::{Kind, Vocab};

/// Text is brought to NFC in parts of about this many bytes, so that the tables this needs stay small.
const NFC_PART_BYTES: usize = 4096;

/// Tokens by which an answer ends, whatever the header's own ids say, where they are control tokens.
const END_TOKENS: [&str; 3] = ["<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"];

/// Which added tokens a text may spell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Every added token, control and user-defined (`<think>`): text that the template or the model wrote.
    All,
    /// Only user-defined tokens: `encode_special_tokens = true` of `tokenizers`, `parse_special = false` of llama.cpp.
    UserDefined,
    /// None of any kind: text that a user wrote.
    None,
}

/// A part of a prompt and whether added tokens spelled in it count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// `true`: every added token in it counts; `false`: none does.
    pub trusted: bool,
}

/// The texts of the tokens that chat templates name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedTokens {
    /// `bos_token`
    pub bos: Option<String>,
    /// `eos_token`
    pub eos: Option<String>,
    /// `pad_token`
    pub pad: Option<String>,
}

/// What a model's files say of single tokens, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Roles {
    bos: Option<u64>,
    eos: Option<u64>,
    pad: Option<u64>,
    /// Further ids by which an answer ends.
    ends: Vec<u64>,
    /// Whether every text begins with `bos`.
    add_bos: bool,
}

/// The tokenizer of one model; immutable.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    splitter: split::Splitter,
    n_real: usize,
    bos: Option<u32>,
    end_tokens: Vec<u32>,
    named: NamedTokens,
}

impl Tokenizer {
    /// Builds the tokenizer of a GGUF header, and takes tokens, merges, scores and types out of the metadata on the way.
    /// `None` when the header has no `tokenizer.ggml.*`.
    ///
    /// # Errors
    /// `unsupported_model` for another kind of tokenizer than Qwen2's; `bad_model` when the header contradicts itself: counts
    /// that differ, unknown or repeated tokens, merges that name no token, ids beyond the vocabulary.
    pub fn from_gguf(metadata: &mut Metadata) -> Result<Option<Tokenizer>> {
        if metadata.get("tokenizer.ggml.model").is_none() && metadata.get("tokenizer.ggml.tokens").is_none() {
            return Ok(None);
        }
        match metadata.str("tokenizer.ggml.model") {
            Some("gpt2") => {}
            other => {
                let other = other.unwrap_or("missing");
                return Err(Error::unsupported_model(format!(
                    "tokenizer.ggml.model must be \"gpt2\" and is {other:?}"
                )));
            }
        }
        // Files of early 2024 have no such key; the architecture is Qwen2's all the same.
        match metadata.str("tokenizer.ggml.pre") {
            None | Some("qwen2" | "deepseek-r1-qwen") => {}
            Some(other) => {
                return Err(Error::unsupported_model(format!(
                    "tokenizer.ggml.pre must be \"qwen2\" or \"deepseek-r1-qwen\" and is {other:?}"
                )));
            }
        }
        let missing =
            |key: &str| Error::bad_model(format!("tokenizer.ggml.{key} is missing or of the wrong type"));
        metadata.take("tokenizer.ggml.scores");
        let tokens = metadata.take_strings("tokenizer.ggml.tokens").ok_or_else(|| missing("tokens"))?;
        let kinds = read_kinds(metadata)?.ok_or_else(|| missing("token_type"))?;
        let merges = metadata.take_strings("tokenizer.ggml.merges").ok_or_else(|| missing("merges"))?;
        let vocab = Vocab::new(tokens, kinds, merges)?;
        let id = |name: &str| metadata.u64(&format!("tokenizer.ggml.{name}_token_id"));
        let roles = Roles {
            bos: id("bos"),
            eos: id("eos"),
            pad: id("padding"),
            ends: [id("eot"), id("eom")].into_iter().flatten().collect(),
            add_bos: metadata.bool("tokenizer.ggml.add_bos_token") == Some(true),
        };
        Tokenizer::new(vocab, roles).map(Some)
    }

    /// The tokenizer as [`Tokenizer::restore`] takes it.
    pub fn store(&self) -> Vec<u8> {
        let mut out = Writer(self.vocab.write());
        out.words(self.bos.as_slice());
        out.words(&self.end_tokens);
        let NamedTokens { bos, eos, pad } = &self.named;
        for name in [bos, eos, pad] {
            out.words(&[name.is_some().into()]);
            out.bytes(name.as_deref().unwrap_or_default().as_bytes());
        }
        out.0
    }

    /// A tokenizer out of what [`Tokenizer::store`] gave.
    ///
    /// # Errors
    /// `bad_model` where the bytes are something else.
    pub fn restore(bytes: &[u8]) -> Result<Tokenizer> {
        let damaged = || Error::bad_model("a stored tokenizer is damaged");
        let mut input = Reader(bytes);
        let vocab = Vocab::read(&mut input).ok_or_else(damaged)?;
        let (bos, end_tokens) = input.words().zip(input.words()).ok_or_else(damaged)?;
        if !bos.iter().chain(&end_tokens).all(|id| (*id as usize) < vocab.len()) {
            return Err(damaged());
        }
        let mut name = || {
            let (given, text) = input.words().zip(input.bytes())?;
            let text = std::str::from_utf8(text).ok()?.to_string();
            Some((given == [1]).then_some(text))
        };
        let (bos_name, eos, pad) = (name(), name(), name());
        let named = NamedTokens {
            bos: bos_name.ok_or_else(damaged)?,
            eos: eos.ok_or_else(damaged)?,
            pad: pad.ok_or_else(damaged)?,
        };
        Ok(Tokenizer {
            n_real: vocab.n_real(),
            splitter: split::Splitter::new()?,
            vocab,
            bos: bos.first().copied(),
            end_tokens,
            named,
        })
    }

    /// Builds the tokenizer of a Hugging Face repository, for an embedding of `vocab_size` rows: ids that no token has are unused.
    /// It is the one that the model's GGUF form has, after llama.cpp's `convert_hf_to_gguf.py` and gguf-py's `SpecialVocab`.
    ///
    /// # Errors
    /// As [`Tokenizer::from_gguf`]; `bad_model` also where a file is no JSON or has a token without a row.
    pub fn from_json(files: &TextFiles, vocab_size: usize) -> Result<Tokenizer> {
        let file = json::File::parse(files.tokenizer)?;
        let roles = files.roles(&file)?;
        Tokenizer::new(file.vocab(vocab_size)?, roles)
    }

    fn new(vocab: Vocab, roles: Roles) -> Result<Tokenizer> {
        let check = |name: &str, id: u64| match id < vocab.len() as u64 {
            true => Ok(id as u32),
            false => Err(Error::bad_model(format!("{name} token {id} of a vocabulary of {}", vocab.len()))),
        };
        let id = |name: &str, id: Option<u64>| id.map(|id| check(name, id)).transpose();
        let text = |id: Option<u32>| {
            id.map(|id| String::from_utf8_lossy(vocab.bytes(id).unwrap_or_default()).into_owned())
        };
        let (bos, eos, pad) = (id("bos", roles.bos)?, id("eos", roles.eos)?, id("padding", roles.pad)?);
        let named = NamedTokens { bos: text(bos), eos: text(eos), pad: text(pad) };
        let mut end_tokens: Vec<u32> =
            roles.ends.iter().map(|&id| check("end", id)).chain(eos.map(Ok)).collect::<Result<_>>()?;
        let by_text = END_TOKENS.iter().filter_map(|text| vocab.added.get(text));
        end_tokens.extend(by_text.filter(|token| token.control).map(|token| token.id));
        end_tokens.sort_unstable();
        end_tokens.dedup();
        Ok(Tokenizer {
            n_real: vocab.n_real(),
            splitter: split::Splitter::new()?,
            vocab,
            bos: bos.filter(|_| roles.add_bos),
            end_tokens,
            named,
        })
    }

    /// `bad_model` unless the embedding has as many rows as the vocabulary has ids.
    pub fn check_rows(&self, embedding_rows: usize) -> Result<()> {
        if embedding_rows == self.vocab.len() {
            return Ok(());
        }
        let tokens = self.vocab.len();
        Err(Error::bad_model(format!(
            "the vocabulary has {tokens} tokens, the embedding {embedding_rows} rows"
        )))
    }

    /// Ids of a text; no BOS is added.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        let (mut ids, mut scratch) = (Vec::with_capacity(text.len() / 3), bpe::Scratch::default());
        self.encode_into(text, special, &mut ids, |part, ids| self.encode_plain(part, &mut scratch, ids))?;
        Ok(ids)
    }

    /// Ids of a prompt that was rendered from parts; no BOS is added. Neighbouring untrusted pieces are tokenised as one text.
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let mut scratch = bpe::Scratch::default();
        self.encode_runs(pieces, |part, ids| self.encode_plain(part, &mut scratch, ids))
    }

    /// Hands what stands between added tokens to `plain`, which appends its ids.
    fn encode_runs(
        &self,
        pieces: &[Piece],
        mut plain: impl FnMut(&str, &mut Vec<u32>) -> Result<()>,
    ) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for run in pieces.chunk_by(|a, b| !a.trusted && !b.trusted) {
            let text = match run {
                [piece] => Cow::Borrowed(piece.text.as_str()),
                run => Cow::Owned(run.iter().map(|piece| piece.text.as_str()).collect()),
            };
            let special = if run[0].trusted { Special::All } else { Special::None };
            self.encode_into(&text, special, &mut ids, &mut plain)?;
        }
        Ok(ids)
    }

    /// [`Tokenizer::encode_pieces`] with exactly one BOS in front where the model wants one: none is added to a prompt whose
    /// template wrote it already.
    pub fn encode_prompt(&self, pieces: &[Piece]) -> Result<Vec<u32>> {
        Ok(self.with_bos(self.encode_pieces(pieces)?))
    }

    /// Puts the model's BOS in front, where it wants one and it does not stand there.
    pub fn with_bos(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if let Some(bos) = self.bos {
            if ids.first() != Some(&bos) {
                ids.insert(0, bos);
            }
        }
        ids
    }

    /// Text of ids. Control tokens are dropped unless `keep_special`; user-defined ones are always kept; unused ids and ids
    /// beyond the vocabulary give nothing; bytes that are no UTF-8 give U+FFFD as [`String::from_utf8_lossy`] does.
    pub fn decode(&self, ids: &[u32], keep_special: bool) -> String {
        let mut decoder = self.decoder(keep_special);
        let mut text = String::with_capacity(ids.len() * 4);
        for &id in ids {
            decoder.push_into(self, id, &mut text);
        }
        text.push_str(&decoder.finish());
        text
    }

    /// A decoder that is fed id by id.
    pub fn decoder(&self, keep_special: bool) -> StreamDecoder {
        StreamDecoder::new(keep_special)
    }

    /// Bytes a token stands for: part of a character, at times. Empty for unused ids, `None` beyond the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocab.bytes(id)
    }

    /// Number of real tokens: ids from here to [`Tokenizer::vocab_len`] only fill up the embedding.
    pub fn len(&self) -> usize {
        self.n_real
    }

    /// Whether there is no real token.
    pub fn is_empty(&self) -> bool {
        self.n_real == 0
    }

    /// Number of ids, unused ones too: rows of the embedding.
    pub fn vocab_len(&self) -> usize {
        self.vocab.len()
    }

    /// Whether an id is a control token (type 3).
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.kind(id) == Some(Kind::Control)
    }

    /// The token every text begins with, where the model wants one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether the model wants a BOS.
    pub fn add_bos(&self) -> bool {
        self.bos.is_some()
    }

    /// All tokens that end an answer, sorted: those the header names and those known by their text.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// The texts of the header's bos, eos and padding tokens, for templates.
    pub fn named_tokens(&self) -> &NamedTokens {
        &self.named
    }

    /// The added tokens.
    pub fn added_tokens(&self) -> &AddedTokens {
        &self.vocab.added
    }

    /// Id of a token by its text: added tokens first, then (slowly, by going through all) others.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        if let Some(token) = self.vocab.added.get(text) {
            return Some(token.id);
        }
        let same = |&id: &u32| {
            self.vocab.bytes(id) == Some(text.as_bytes()) && self.vocab.kind(id) == Some(Kind::Normal)
        };
        (0..self.vocab.len() as u32).find(same)
    }

    /// Bytes held on the heap.
    pub fn memory_bytes(&self) -> usize {
        self.vocab.memory_bytes()
    }

    /// What decides the ids of texts, in one number: equal ones come of equal vocabularies and the same version of this crate.
    pub fn identity(&self) -> u64 {
        let mut sum = stored::Sum::new(env!("CARGO_PKG_VERSION").as_bytes());
        self.vocab.add_to(&mut sum);
        sum.finish()
    }

    /// As [`Tokenizer::encode_runs`], for one text. Only there is a text cut, so each part's ids are its own.
    fn encode_into(
        &self,
        text: &str,
        special: Special,
        ids: &mut Vec<u32>,
        mut plain: impl FnMut(&str, &mut Vec<u32>) -> Result<()>,
    ) -> Result<()> {
        if special == Special::None {
            return if text.is_empty() { Ok(()) } else { plain(text, ids) };
        }
        for segment in self.vocab.added.split(text, |token| special == Special::All || !token.control) {
            match segment {
                Segment::Token(token) => ids.push(token.id),
                Segment::Text(text) => plain(text, ids)?,
            }
        }
        Ok(())
    }

    /// Whether ids are BPE's own tokens and stand for exactly this text in NFC.
    fn spells(&self, ids: &[u32], text: &str) -> bool {
        let Ok(text) = nfc(text) else { return false };
        let rest = ids.iter().try_fold(text.as_bytes(), |rest, &id| {
            rest.strip_prefix(self.vocab.bytes(id)?).filter(|_| self.vocab.kind(id) == Some(Kind::Normal))
        });
        rest.is_some_and(<[u8]>::is_empty)
    }

    /// NFC, words, merges.
    fn encode_plain(&self, text: &str, scratch: &mut bpe::Scratch, ids: &mut Vec<u32>) -> Result<()> {
        for word in self.splitter.words(&nfc(text)?) {
            self.vocab.merges.encode(word.as_bytes(), scratch, ids);
        }
        Ok(())
    }
}

/// Takes the token types out of the metadata.
fn read_kinds(metadata: &mut Metadata) -> Result<Option<Vec<Kind>>> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let kinds = match metadata.i32s(KEY) {
        Some(codes) => Some(codes.iter().map(|&code| Kind::from_ggml(code.into())).collect::<Result<_>>()?),
        None => match metadata.integers(KEY) {
            Some(codes) => Some(codes.into_iter().map(Kind::from_ggml).collect::<Result<_>>()?),
            None => None,
        },
    };
    metadata.take(KEY);
    Ok(kinds)
}

/// Unicode normal form C, with the tables of `tokenizers`; what is in it already is not copied.
pub(crate) fn nfc(text: &str) -> Result<Cow<'_, str>> {
    if is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return Ok(Cow::Borrowed(text));
    }
    let mut whole = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        // Nothing composes across the left side of an ASCII character, so a text may be cut there.
        let from = NFC_PART_BYTES.min(rest.len());
        let cut = rest.as_bytes()[from..].iter().position(u8::is_ascii).map_or(rest.len(), |at| from + at);
        let (part, tail) = rest.split_at(cut);
        if is_nfc_quick(part.chars()) == IsNormalized::Yes {
            whole.push_str(part);
        } else {
            let mut normalized = NormalizedString::from(part);
            NFC.normalize(&mut normalized)
                .map_err(|e| Error::invalid_request(format!("text cannot be normalised: {e}")))?;
            whole.push_str(normalized.get());
        }
        rest = tail;
    }
    Ok(Cow::Owned(whole))
}
