//! Tokenizer and chat template against references made by independent programs: Hugging Face `tokenizers` and jinja2 in
//! transformers (`fixtures/text/`, see `fixtures/README.md`), and the `tokenizers` crate's own BPE.

// What cannot be unwrapped here is a failed test.
#![allow(clippy::unwrap_used)]

#[path = "text/support.rs"]
mod support;

#[path = "text/cache.rs"]
mod cache;
#[path = "text/files.rs"]
mod files;
#[path = "text/limits.rs"]
mod limits;
#[path = "text/oracle.rs"]
mod oracle;
#[path = "text/template.rs"]
mod template;
#[path = "text/tokenizer.rs"]
mod tokenizer;
#[path = "text/trust.rs"]
mod trust;
