//! The Qwen2 pre-tokenizer: cuts text into the words that BPE then works on, one by one.
//!
//! It gives exactly the matches of the expression in Qwen2's `tokenizer.json` ([`QWEN2_PATTERN`]), by a scan that looks
//! at each character about once. The regex engine of `tokenizers` on wasm backtracks: on a megabyte of spaces it takes
//! 37 MB, reaches its limit and gives up, which the crate turns into one unsplit word.

use regex_syntax::hir::{Class, HirKind};

use crate::error::{Error, Result};

/// The expression, as `Split(Regex, Isolated)` has it in Qwen2's and DeepSeek-R1-Distill-Qwen's `tokenizer.json`.
pub const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Number,
    Newline,
    Space,
    Other,
}

/// The character tables of the scan.
#[derive(Debug)]
pub(super) struct Splitter {
    letters: Vec<(char, char)>,
    numbers: Vec<(char, char)>,
}

impl Splitter {
    pub(super) fn new() -> Result<Splitter> {
        Ok(Splitter { letters: category(r"\p{L}")?, numbers: category(r"\p{N}")? })
    }

    /// The words of a text, in order and without gaps.
    pub(super) fn words<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        let mut rest = text;
        std::iter::from_fn(move || {
            let (word, tail) = rest.split_at(self.word_end(rest)?);
            rest = tail;
            Some(word)
        })
    }

    /// Length in bytes of the first word; `None` on an empty text.
    fn word_end(&self, text: &str) -> Option<usize> {
        let mut chars = text.chars();
        let first = chars.next()?;
        let kind = self.kind(first);
        let after_first = first.len_utf8();
        let rest = chars.as_str();
        // (?i:'s|'t|'re|'ve|'m|'ll|'d)
        if first == '\'' {
            if let Some(len) = contraction(rest) {
                return Some(after_first + len);
            }
        }
        let next = rest.chars().next().map(|c| self.kind(c));
        match (kind, next) {
            // [^\r\n\p{L}\p{N}]?\p{L}+
            (Kind::Letter, _) | (Kind::Space | Kind::Other, Some(Kind::Letter)) => {
                Some(after_first + self.run(rest, Kind::Letter))
            }
            // \p{N}
            (Kind::Number, _) => Some(after_first),
            //  ?[^\s\p{L}\p{N}]+[\r\n]*
            (Kind::Other, _) => Some(after_first + self.symbols(rest)),
            (Kind::Space, Some(Kind::Other)) if first == ' ' => Some(after_first + self.symbols(rest)),
            (Kind::Space | Kind::Newline, _) => Some(self.white_space(text)),
        }
    }

    /// `[^\s\p{L}\p{N}]*[\r\n]*`
    fn symbols(&self, text: &str) -> usize {
        let symbols = self.run(text, Kind::Other);
        symbols + self.run(&text[symbols..], Kind::Newline)
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+`: to the last newline; or else all, but for the last character where a word follows.
    fn white_space(&self, text: &str) -> usize {
        let (mut end, mut last_start, mut newline_end) = (0, 0, 0);
        for c in text.chars() {
            let kind = self.kind(c);
            if !matches!(kind, Kind::Space | Kind::Newline) {
                break;
            }
            last_start = end;
            end += c.len_utf8();
            if kind == Kind::Newline {
                newline_end = end;
            }
        }
        match () {
            _ if newline_end > 0 => newline_end,
            _ if end == text.len() || last_start == 0 => end,
            _ => last_start,
        }
    }

    /// Bytes of the characters of one kind that a text begins with.
    fn run(&self, text: &str, kind: Kind) -> usize {
        text.char_indices().find(|&(_, c)| self.kind(c) != kind).map_or(text.len(), |(at, _)| at)
    }

    fn kind(&self, c: char) -> Kind {
        match c {
            'a'..='z' | 'A'..='Z' => Kind::Letter,
            '0'..='9' => Kind::Number,
            '\r' | '\n' => Kind::Newline,
            _ if c.is_whitespace() => Kind::Space,
            _ if c.is_ascii() => Kind::Other,
            _ if contains(&self.letters, c) => Kind::Letter,
            _ if contains(&self.numbers, c) => Kind::Number,
            _ => Kind::Other,
        }
    }
}

/// Length of an English contraction after its apostrophe. Case is folded as Unicode does: `ſ` is an s.
fn contraction(text: &str) -> Option<usize> {
    let mut chars = text.chars();
    let first = chars.next()?;
    let second = chars.next().map(|c| c.to_ascii_lowercase());
    match (first.to_ascii_lowercase(), second) {
        ('s' | 't' | 'm' | 'd' | 'ſ', _) => Some(first.len_utf8()),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => Some(2),
        _ => None,
    }
}

fn contains(ranges: &[(char, char)], c: char) -> bool {
    let at = ranges.partition_point(|&(_, end)| end < c);
    ranges.get(at).is_some_and(|&(start, _)| start <= c)
}

/// Sorted ranges of a Unicode general category.
fn category(pattern: &str) -> Result<Vec<(char, char)>> {
    let parsed = regex_syntax::parse(pattern)
        .map_err(|e| Error::unsupported_model(format!("this build has no table for {pattern}: {e}")))?;
    match parsed.kind() {
        HirKind::Class(Class::Unicode(class)) => Ok(class.iter().map(|r| (r.start(), r.end())).collect()),
        _ => Err(Error::unsupported_model(format!("this build has no table for {pattern}"))),
    }
}
