//! Token ids back into text, one by one: only whole characters come out, and what comes out joined is what decoding all
//! ids at once gives, byte for byte.

use super::Tokenizer;

/// Incremental decoder of one answer. It owns its state, so it can be kept beside the tokenizer.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    keep_special: bool,
    /// The begin of a character whose other bytes have not come yet: at most 3 bytes between calls.
    pending: Vec<u8>,
    /// Text of the token that began this character, such as a space before an emoji: it waits for the rest.
    held: String,
}

impl StreamDecoder {
    /// `keep_special`: write control tokens out instead of dropping them. User-defined tokens are always kept.
    pub fn new(keep_special: bool) -> StreamDecoder {
        StreamDecoder { keep_special, ..StreamDecoder::default() }
    }

    /// The text that is certain once this id has come: empty, while a character is incomplete.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let mut text = String::new();
        self.push_into(tokenizer, id, &mut text);
        text
    }

    /// What is left at the end: what was held back, and one U+FFFD for a character that was cut off; or nothing.
    pub fn finish(&mut self) -> String {
        let mut rest = std::mem::take(&mut self.held);
        rest.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        rest
    }

    pub(super) fn push_into(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        if tokenizer.is_control(id) && !self.keep_special {
            return;
        }
        self.pending.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
        let mut new = String::new();
        let mut rest = self.pending.as_slice();
        // As String::from_utf8_lossy: one U+FFFD for each maximal part of a character that cannot go on.
        loop {
            match std::str::from_utf8(rest) {
                Ok(whole) => {
                    new.push_str(whole);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    new.push_str(std::str::from_utf8(good).expect("checked up to here just now"));
                    match error.error_len() {
                        Some(len) => {
                            new.push(char::REPLACEMENT_CHARACTER);
                            rest = &bad[len..];
                        }
                        None => {
                            rest = bad;
                            break;
                        }
                    }
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        if self.pending.is_empty() {
            text.push_str(&std::mem::take(&mut self.held));
            text.push_str(&new);
        } else if !new.is_empty() {
            text.push_str(&std::mem::replace(&mut self.held, new));
        }
    }
}
