//! One spelling for what users write, where a load asks for it: questions that differ in nothing but spaces are then one
//! question to every cache. It changes what is asked (the indentation of code goes), so the answer is that to the changed text.

use super::Engine;
use crate::error::Result;
use crate::openai::{Body, Prompt};
use crate::tokenizer::nfc;
use serde_json::Value;

impl Engine {
    /// The body with its users' messages in one spelling, if that is wanted. Raw prompts stay as they are.
    ///
    /// # Errors
    /// `invalid_request` where a text cannot be brought to NFC.
    pub(super) fn normalized(&self, mut body: Body) -> Result<Body> {
        if let (true, Prompt::Chat(chat)) = (self.normalize, &mut body.prompt) {
            let messages = chat.messages.as_array_mut().into_iter().flatten();
            for message in messages.filter(|message| message["role"] == "user") {
                if let Some(Value::String(text)) = message.get_mut("content") {
                    *text = normalize(text)?;
                }
            }
        }
        Ok(body)
    }
}

/// NFC, without white space at either end; a run of it is a line break where it has one, else a space.
fn normalize(text: &str) -> Result<String> {
    let text = nfc(text)?;
    let mut out = String::with_capacity(text.len());
    let (mut blank, mut line) = (false, false);
    for c in text.chars() {
        if c.is_whitespace() {
            blank = true;
            line |= matches!(c, '\n' | '\r');
        } else {
            if blank && !out.is_empty() {
                out.push(if line { '\n' } else { ' ' });
            }
            (blank, line) = (false, false);
            out.push(c);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_question_become_the_same() {
        for (text, want) in [
            ("  What is  2 + 2?\t\n", "What is 2 + 2?"),
            ("a\r\n\r\n  b", "a\nb"),
            ("cafe\u{301}\u{3000}au  lait", "caf\u{e9} au lait"),
            ("\u{a0}鸡兔\u{2003}同笼 ", "鸡兔 同笼"),
            (" \n ", ""),
            ("as it is", "as it is"),
        ] {
            let once = normalize(text).unwrap();
            assert_eq!((once.as_str(), normalize(&once).unwrap().as_str()), (want, want));
        }
    }
}
