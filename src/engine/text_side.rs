//! What a model file holds beside the weights: tokenizer, chat template, and what is derived of them once.

use crate::error::{Error, Result};
use crate::gguf::Metadata;
use crate::template::Template;
use crate::tokenizer::Tokenizer;
use crate::weights::Plan;
use std::ops::Range;

/// The parts that come out of a file beside the weights.
pub struct TextSide {
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) template: Option<Template>,
    pub(super) never: Vec<Range<u32>>,
    pub(super) longest_token: usize,
    pub(super) name: Option<String>,
    pub(super) file_type: Option<u64>,
}

impl TextSide {
    /// Builds tokenizer and template; the large arrays leave the metadata.
    pub fn from_gguf(metadata: &mut Metadata, plan: &Plan) -> Result<Self> {
        let name = metadata.str("general.name").filter(|n| !n.trim().is_empty()).map(str::to_string);
        let source = metadata.str("tokenizer.chat_template").map(str::to_string);
        let tokenizer = Tokenizer::from_gguf(metadata)?;
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
        Ok(Self {
            tokenizer,
            template,
            never,
            longest_token,
            name,
            file_type: metadata.u64("general.file_type"),
        })
    }
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
