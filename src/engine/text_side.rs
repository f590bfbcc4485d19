//! What a model file holds beside the weights: tokenizer, chat template, and what is derived of them once.

use crate::config;
use crate::error::{Error, Result};
use crate::gguf::{write_header, Metadata, Value};
use crate::template::Template;
use crate::tokenizer::{Bounds, Piece, Special, TextFiles, TokenCache, Tokenizer};
use crate::weights::Plan;
use serde_json::Value as Json;
use std::ops::Range;

const TEMPLATE: &str = "tokenizer.chat_template";

/// The parts that come out of a file beside the weights.
pub struct TextSide {
    pub(super) tokenizer: Option<Tokenizer>,
    /// Ids of texts that the tokenizer was given before.
    tokens: Option<TokenCache>,
    pub(super) template: Option<Template>,
    pub(super) never: Vec<Range<u32>>,
    pub(super) longest_token: usize,
    pub(super) name: Option<String>,
    /// The file's header less the tokenizer's arrays.
    pub(super) header: Vec<u8>,
    /// What header and weights are known by, once it was computed.
    identity: Option<String>,
}

impl TextSide {
    /// The model's own name.
    pub fn model_name(&self) -> Option<String> {
        self.name.clone()
    }

    /// What header and weights are known by ([`crate::image::Identity`]), once it was computed.
    pub fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }

    /// Sets it.
    pub fn set_identity(&mut self, identity: String) {
        self.identity = Some(identity);
    }

    /// `unsupported_model` where there is none.
    pub(super) fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(no_tokenizer)
    }

    /// `unsupported_model` where there is none.
    pub(super) fn template(&self) -> Result<&Template> {
        self.tokenizer()?;
        self.template.as_ref().ok_or_else(|| Error::unsupported_model("this file has no chat template"))
    }

    /// Tokenizer and cache; `unsupported_model` where there are none.
    fn cached(&mut self) -> Result<(&Tokenizer, &mut TokenCache)> {
        self.tokenizer.as_ref().zip(self.tokens.as_mut()).ok_or_else(no_tokenizer)
    }

    /// [`Tokenizer::encode`] by way of the cache.
    pub(super) fn encode(&mut self, text: &str, special: Special) -> Result<Vec<u32>> {
        let (tokenizer, tokens) = self.cached()?;
        tokenizer.encode_cached(text, special, tokens)
    }

    /// [`Tokenizer::encode_prompt`] by way of the cache.
    pub(super) fn encode_prompt(&mut self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let (tokenizer, tokens) = self.cached()?;
        tokenizer.encode_prompt_cached(pieces, tokens)
    }

    /// Encodes texts that are likely to come; nothing without a tokenizer.
    pub(super) fn preload(&mut self, phrases: &[String]) -> Result<()> {
        let Ok((tokenizer, tokens)) = self.cached() else { return Ok(()) };
        phrases.iter().try_for_each(|phrase| tokenizer.preload(phrase, tokens))
    }

    /// As [`TextSide::preload`], a rendered prompt.
    pub(super) fn preload_prompt(&mut self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let (tokenizer, tokens) = self.cached()?;
        tokenizer.preload_prompt(pieces, tokens)
    }

    /// The cache, where there is a tokenizer.
    pub fn tokens(&mut self) -> Option<&mut TokenCache> {
        self.tokens.as_mut()
    }

    /// Takes in what an earlier visit kept of the cache.
    pub fn read_tokens(&mut self, record: &[u8]) {
        if let Ok((tokenizer, tokens)) = self.cached() {
            tokens.read(record, tokenizer);
        }
    }

    /// Bytes of tokenizer and cache.
    pub(super) fn tokenizer_bytes(&self) -> usize {
        self.tokenizer.as_ref().map_or(0, Tokenizer::memory_bytes) + self.token_cache_bytes()
    }

    /// Bytes of the cache.
    pub(super) fn token_cache_bytes(&self) -> usize {
        self.tokens.as_ref().map_or(0, TokenCache::bytes)
    }

    /// Forgets what is cached; `false`: there was nothing.
    pub(super) fn drop_token_cache(&mut self) -> bool {
        self.tokens.as_mut().is_some_and(TokenCache::clear)
    }

    /// What the cache counted.
    pub(super) fn token_stats(&self) -> Option<Json> {
        self.tokens.as_ref().map(TokenCache::stats)
    }

    /// Builds tokenizer and template; the large arrays leave the metadata.
    pub fn from_gguf(metadata: &mut Metadata, plan: &Plan) -> Result<Self> {
        let tokenizer = Tokenizer::from_gguf(metadata)?;
        Self::new(metadata, plan, tokenizer)
    }

    /// As [`TextSide::from_gguf`], with a vocabulary that [`TextSide::stored_tokenizer`] gave earlier; an empty one is none.
    pub fn restore(metadata: &Metadata, plan: &Plan, vocabulary: &[u8]) -> Result<Self> {
        let tokenizer = if vocabulary.is_empty() { None } else { Some(Tokenizer::restore(vocabulary)?) };
        Self::new(metadata, plan, tokenizer)
    }

    /// The header for [`TextSide::restore`].
    pub fn stored_header(&self) -> &[u8] {
        &self.header
    }

    /// The vocabulary for [`TextSide::restore`].
    pub fn stored_tokenizer(&self) -> Vec<u8> {
        self.tokenizer.as_ref().map(Tokenizer::store).unwrap_or_default()
    }

    /// Builds tokenizer and template from the files of a Hugging Face repository, which name no model.
    ///
    /// # Errors
    /// As [`Tokenizer::from_json`] and [`Template::new`].
    pub fn from_files(files: &TextFiles, plan: &Plan) -> Result<Self> {
        let tokenizer = Tokenizer::from_json(files, plan.config.vocab_size)?;
        let mut metadata = config::to_gguf(&plan.config);
        if let Some(source) = files.chat_template()? {
            metadata.insert(TEMPLATE, Value::String(source));
        }
        Self::new(&metadata, plan, Some(tokenizer))
    }

    fn new(metadata: &Metadata, plan: &Plan, tokenizer: Option<Tokenizer>) -> Result<Self> {
        let name = metadata.str("general.name").filter(|n| !n.trim().is_empty()).map(str::to_string);
        let source = metadata.str(TEMPLATE).map(str::to_string);
        if let Some(tokenizer) = &tokenizer {
            if tokenizer.vocab_len() > plan.config.vocab_size {
                return Err(Error::bad_model(format!(
                    "the tokenizer has {} tokens, the embedding only {} rows",
                    tokenizer.vocab_len(),
                    plan.config.vocab_size
                )));
            }
        }
        let template = match (&tokenizer, source) {
            (Some(tokenizer), Some(source)) => Some(Template::for_tokenizer(&source, tokenizer)?),
            _ => None,
        };
        let never = tokenizer.as_ref().map(holes).unwrap_or_default();
        let longest_token = tokenizer.as_ref().map_or(0, longest_token);
        let tokens = tokenizer.as_ref().map(|t| TokenCache::new(t, Bounds::MEMORY, Bounds::DISK));
        Ok(Self {
            tokenizer,
            tokens,
            template,
            never,
            longest_token,
            name,
            header: write_header(metadata, &plan.packed_tensors()),
            identity: None,
        })
    }
}

fn no_tokenizer() -> Error {
    Error::unsupported_model("this file has no tokenizer: only token ids can be given to it")
}

/// Bytes of the longest token.
fn longest_token(tokenizer: &Tokenizer) -> usize {
    let lengths = (0..tokenizer.len() as u32).filter_map(|id| tokenizer.token_bytes(id).map(<[u8]>::len));
    lengths.max().unwrap_or(0)
}

/// Ids below the tokenizer's length that stand for nothing.
fn holes(tokenizer: &Tokenizer) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for id in (0..tokenizer.len() as u32).filter(|id| tokenizer.token_bytes(*id).is_none_or(<[u8]>::is_empty))
    {
        match ranges.last_mut().filter(|range| range.end == id) {
            Some(range) => range.end = id + 1,
            None => ranges.push(id..id + 1),
        }
    }
    ranges
}
