//! Fixtures and the tokenizers made from them.

use std::io::Read;
use std::path::PathBuf;
use std::sync::OnceLock;

use qandle::gguf::{HeaderReader, Metadata};
use qandle::tokenizer::Tokenizer;
use serde_json::Value;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text").join(name)
}

/// A JSON fixture.
pub fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// The metadata of a vocabulary fixture, read anew.
pub fn metadata(name: &str) -> Metadata {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path(&format!("{name}-vocab.gguf.gz"))).unwrap();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    HeaderReader::new(None).push(&bytes).unwrap().expect("the fixture is a whole header").metadata
}

/// The tokenizer of Qwen2.5.
pub fn qwen() -> &'static Tokenizer {
    static QWEN: OnceLock<Tokenizer> = OnceLock::new();
    QWEN.get_or_init(|| Tokenizer::from_gguf(&mut metadata("qwen2")).unwrap().unwrap())
}

/// The tokenizer of DeepSeek-R1-Distill-Qwen.
pub fn r1() -> &'static Tokenizer {
    static R1: OnceLock<Tokenizer> = OnceLock::new();
    R1.get_or_init(|| Tokenizer::from_gguf(&mut metadata("r1")).unwrap().unwrap())
}

/// Ids out of JSON.
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// xorshift64: the same numbers everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}
