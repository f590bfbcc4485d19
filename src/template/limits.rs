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
/// Bytes that comparisons and searches of one rendering may look at, beside a multiple of its input.
const READ_BYTES: usize = 1 << 30;
/// Namespaces of one rendering. They alone can be put into each other without bound, and freeing such a chain takes stack.
const MAX_NAMESPACES: usize = 1000;
/// Instructions of one rendering, beside a multiple of its input.
const STEPS: u64 = 400_000;
/// Operators, brackets and keywords in one tag: the parser and the compiler go one call deeper for most of them, and a stack
/// that overflows is no error that could be caught. Real templates have a few dozen.
const MAX_OPERATORS: usize = 256;
/// `elif` in one template, of which each may be nested in the one before it, for the same reason.
const MAX_ELIFS: usize = 256;
/// Nodes in a list or map that a template builds.
const MAX_NODES: usize = 100_000;
/// Raw text longer than this costs more than one step each time.
const RAW_BYTES_PER_STEP: usize = 512;

/// How templates are cut into text and code, as transformers sets jinja2.
pub(super) fn white_space() -> WhitespaceConfig {
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true }
}

/// What is left of the bytes that a rendering may make (freed ones do not come back), of those it may look at, and of its
/// namespaces.
#[derive(Debug, Clone)]
pub(super) struct Budget(Arc<Left>);

#[derive(Debug)]
struct Left {
    made: AtomicUsize,
    read: AtomicUsize,
    namespaces: AtomicUsize,
}

impl Budget {
    pub(super) fn new(input_bytes: usize) -> Budget {
        Budget(Arc::new(Left {
            made: AtomicUsize::new(VALUE_BYTES.saturating_add(input_bytes.saturating_mul(64))),
            read: AtomicUsize::new(READ_BYTES.saturating_add(input_bytes.saturating_mul(1024))),
            namespaces: AtomicUsize::new(MAX_NAMESPACES),
        }))
    }

    pub(super) fn left(&self) -> usize {
        self.0.made.load(Ordering::Relaxed)
    }

    /// Takes bytes off the budget, before they are made where that can be known.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Error> {
        spend(&self.0.made, bytes, "the template makes more text than it may")
    }

    /// Takes a namespace and what it begins with.
    pub(super) fn take_namespace(&self, values: &[Value]) -> Result<(), Error> {
        spend(&self.0.namespaces, 1, "the template makes more namespaces than it may")?;
        self.take_nodes(values)
    }

    /// Takes what looking at all of a value costs, and refuses one that contains itself.
    pub(super) fn read(&self, value: &Value) -> Result<(), Error> {
        let mut size = Size::default();
        size.add(value, 0)?;
        let bytes = size.text.saturating_add(size.nodes * size_of::<Value>());
        spend(&self.0.read, bytes, "the template compares and searches more than it may")
    }

    /// As [`Budget::read`], for text alone: other values are looked at from outside.
    pub(super) fn read_text(&self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(_) => self.read(value),
            None => Ok(()),
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
        let mut size = Size::default();
        for item in items {
            size.add(item, 0)?;
        }
        self.take(size.nodes * size_of::<Value>())
    }
}

fn spend(left: &AtomicUsize, amount: usize, why: &str) -> Result<(), Error> {
    let now = left.load(Ordering::Relaxed).checked_sub(amount).ok_or_else(|| invalid(why))?;
    left.store(now, Ordering::Relaxed);
    Ok(())
}

/// The values in a value, itself counted, and the bytes of the texts among them.
#[derive(Default)]
struct Size {
    nodes: usize,
    text: usize,
}

impl Size {
    fn add(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.nodes += 1;
        if self.nodes > MAX_NODES || depth > MAX_DEPTH {
            return Err(invalid(format!(
                "a list of more than {MAX_NODES} values or nested more than {MAX_DEPTH} deep"
            )));
        }
        self.text = self.text.saturating_add(value.as_str().map_or(0, str::len));
        if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            let map = value.kind() == ValueKind::Map;
            for item in value.try_iter()? {
                self.add(&if map { value.get_item(&item)? } else { item }, depth + 1)?;
            }
        }
        Ok(())
    }
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
    let mut elifs = 0;
    let mut tag = Tag::default();
    for token in tokenize(source, false, SyntaxConfig, white_space()) {
        let token = token?.0;
        tag.operators += usize::from(deepens(&token));
        elifs += usize::from(matches!(token, Token::Ident("elif")));
        match token {
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
        if tag.operators > MAX_OPERATORS || elifs > MAX_ELIFS {
            return Err(invalid(format!(
                "a tag of more than {MAX_OPERATORS} operators or more than {MAX_ELIFS} elif in the template"
            )));
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

/// Whether a token can make an expression one level deeper.
fn deepens(token: &Token) -> bool {
    match token {
        Token::Ident(word) => matches!(*word, "and" | "or" | "not" | "if" | "else" | "is" | "in"),
        Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => false,
        Token::Comma | Token::Colon | Token::Assign | Token::TemplateData(_) => false,
        Token::BracketClose | Token::ParenClose | Token::BraceClose => false,
        _ => true,
    }
}

/// What the compiler may do in one tag: it evaluates operators between constants, so `"a" * 99999999` costs 100 MB.
#[derive(Debug, Default)]
struct Tag {
    operators: usize,
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

/// Refuses chained comparisons (`a < b < c`), which cannot be exchanged, in a template whose namespaces could contain each
/// other: comparing those overflows the stack.
pub(super) fn check_chains<'a>(code: impl Iterator<Item = &'a Instructions<'a>>) -> Result<(), Error> {
    let (mut chained, mut assigned) = (false, false);
    for code in code {
        for instruction in (0..code.len() as u32).filter_map(|at| code.get(at)) {
            chained |= matches!(instruction, Instruction::CompareAndPreserve(_));
            assigned |= matches!(instruction, Instruction::SetAttr(_));
        }
    }
    match chained && assigned {
        true => Err(invalid("chained comparisons beside namespaces are not served: write a < b and b < c")),
        false => Ok(()),
    }
}

/// Puts our own functions in the place of the operators that can make big values or look at much; they take the same operands.
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
            Instruction::GetItem => ("[.]", 2),
            Instruction::In => ("in", 2),
            Instruction::Eq => ("==", 2),
            Instruction::Ne => ("!=", 2),
            Instruction::Lt => ("<", 2),
            Instruction::Lte => ("<=", 2),
            Instruction::Gt => (">", 2),
            Instruction::Gte => (">=", 2),
            _ => continue,
        };
        if let Ok(operands) = u16::try_from(operands) {
            *instruction = Instruction::CallFunction(name, Some(operands));
        }
    }
}
