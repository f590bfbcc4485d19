//! Bounds for templates, which come with a model file and so from anywhere: what they may compile, how many steps they may
//! take and how many bytes they may make. Within them a template cannot hang the worker or use up its memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use minijinja::machinery::{tokenize, Instruction, Instructions, Token, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::python::{invalid, MAX_DEPTH};

/// A template longer than this is refused; the longest in the wild have some 10 KB.
pub(super) const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Macros and loops that call themselves, and includes.
pub(super) const MAX_RECURSION: usize = 64;
/// Bytes that constants in the source may multiply to while it is compiled.
const MAX_CONSTANT_BYTES: u64 = 1 << 20;
/// Bytes that all values made by one rendering may have, beside a multiple of its input.
const VALUE_BYTES: usize = 32 << 20;
/// Instructions of one rendering, beside a multiple of its input.
const STEPS: u64 = 400_000;
/// Nodes in a list or map that a template builds.
const MAX_NODES: usize = 100_000;
/// Raw text longer than this costs more than one step each time.
const RAW_BYTES_PER_STEP: usize = 512;

/// How templates are cut into text and code, as transformers sets jinja2.
pub(super) fn white_space() -> WhitespaceConfig {
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true }
}

/// What is left of the bytes that a rendering may make. Freed bytes do not come back.
#[derive(Debug, Clone)]
pub(super) struct Budget(Arc<AtomicUsize>);

impl Budget {
    pub(super) fn new(input_bytes: usize) -> Budget {
        Budget(Arc::new(AtomicUsize::new(VALUE_BYTES.saturating_add(input_bytes.saturating_mul(64)))))
    }

    pub(super) fn left(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes bytes off the budget, before they are made where that can be known.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Error> {
        match self.left().checked_sub(bytes) {
            Some(left) => {
                self.0.store(left, Ordering::Relaxed);
                Ok(())
            }
            None => Err(invalid("the template makes more text than it may")),
        }
    }

    /// Takes the size of a value that a function gave back.
    pub(super) fn take_value(&self, value: Value) -> Result<Value, Error> {
        let bytes = match value.as_str() {
            Some(text) => text.len(),
            None if value.kind() == ValueKind::Number => 0,
            None => value.len().unwrap_or(0).saturating_mul(size_of::<Value>()),
        };
        self.take(bytes)?;
        Ok(value)
    }

    /// Takes the nodes of a list or map that a template builds, and refuses deep and huge ones: lists in lists double at each step.
    pub(super) fn take_nodes(&self, items: &[Value]) -> Result<(), Error> {
        let mut nodes = 0;
        for item in items {
            count(item, 0, &mut nodes)?;
        }
        self.take(nodes * size_of::<Value>())
    }
}

fn count(value: &Value, depth: usize, nodes: &mut usize) -> Result<(), Error> {
    *nodes += 1;
    if *nodes > MAX_NODES || depth > MAX_DEPTH {
        return Err(invalid(format!(
            "a list of more than {MAX_NODES} values or nested more than {MAX_DEPTH} deep"
        )));
    }
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        let map = value.kind() == ValueKind::Map;
        for item in value.try_iter()? {
            count(&if map { value.get_item(&item)? } else { item }, depth + 1, nodes)?;
        }
    }
    Ok(())
}

/// Checks a source before it is compiled, and gives the steps that rendering it may take on top of `input_nodes`.
pub(super) fn steps(source: &str, input_nodes: usize) -> Result<u64, Error> {
    if source.len() > MAX_SOURCE_BYTES {
        let bytes = source.len();
        return Err(invalid(format!(
            "the template has {bytes} bytes, at most {MAX_SOURCE_BYTES} are served"
        )));
    }
    let mut longest_raw = 0;
    let mut constants = 0;
    let mut tag = Tag::default();
    for token in tokenize(source, false, SyntaxConfig, white_space()) {
        match token?.0 {
            Token::TemplateData(text) => longest_raw = longest_raw.max(text.len()),
            Token::VariableStart | Token::BlockStart => tag = Tag::default(),
            Token::VariableEnd | Token::BlockEnd => constants += tag.folded_bytes(),
            Token::Str(text) => tag.text += text.len() as u64,
            Token::String(text) => tag.text += text.len() as u64,
            Token::Int(n) => tag.numbers = tag.numbers.saturating_add(n),
            Token::Int128(_) => tag.numbers = u64::MAX,
            Token::Float(_) => tag.numbers = tag.numbers.saturating_add(1),
            Token::Mul => tag.products += 1,
            Token::Pow => tag.products += 64,
            _ => {}
        }
        if constants > MAX_CONSTANT_BYTES {
            return Err(invalid(format!(
                "constants of the template multiply to more than {MAX_CONSTANT_BYTES} bytes"
            )));
        }
    }
    let steps = STEPS.saturating_add(2_000u64.saturating_mul(input_nodes as u64));
    Ok(steps / (1 + (longest_raw / RAW_BYTES_PER_STEP) as u64))
}

/// What the compiler may fold in one tag: it evaluates operators between constants, so `"a" * 99999999` costs 100 MB.
#[derive(Debug, Default)]
struct Tag {
    text: u64,
    numbers: u64,
    products: u32,
}

impl Tag {
    /// An upper bound: each product may be by the sum of all numbers in the tag.
    fn folded_bytes(&self) -> u64 {
        match self.products {
            0 => 0,
            n => self.text.saturating_mul(self.numbers.max(1).saturating_pow(n)),
        }
    }
}

/// Puts our own functions in the place of the operators that can make big values; they take the same operands.
pub(super) fn guard(code: &mut Instructions) {
    for at in 0..code.len() as u32 {
        let Some(instruction) = code.get_mut(at) else { continue };
        let (name, operands) = match instruction {
            Instruction::Add => ("+", 2),
            Instruction::Mul => ("*", 2),
            Instruction::StringConcat => ("~", 2),
            Instruction::Slice => ("[:]", 4),
            Instruction::BuildList(Some(n)) => ("[]", *n),
            Instruction::BuildMap(n) => ("{}", *n * 2),
            _ => continue,
        };
        if let Ok(operands) = u16::try_from(operands) {
            *instruction = Instruction::CallFunction(name, Some(operands));
        }
    }
}
