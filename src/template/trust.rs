//! Keeps text that a user wrote from becoming a control token, whatever the template does with it.
//!
//! Before rendering, each character of untrusted text with which an added token begins or ends is exchanged for a mark: a
//! private-use character that occurs nowhere else in this rendering. So no cut, join, strip or neighbour can spell an added
//! token with untrusted text in it. After rendering, added tokens are found, and only then the marks go back.

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::tokenizer::{AddedTokens, Piece, Segment};

/// First and last of the two supplementary private-use planes, without their noncharacters.
const MARKS: [std::ops::RangeInclusive<char>; 2] = ['\u{F0000}'..='\u{FFFFD}', '\u{100000}'..='\u{10FFFD}'];

/// Where added tokens begin and end; made once for a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Edges {
    added: AddedTokens,
    /// First and last characters of added tokens that are neither letters, digits nor white space.
    chars: Vec<char>,
    /// Tokens with a letter, a digit or white space at both ends: looked for as a whole.
    words: Vec<String>,
}

impl Edges {
    pub(super) fn new(added: AddedTokens) -> Edges {
        let mut chars = BTreeSet::new();
        let mut words = Vec::new();
        for token in added.iter() {
            let ends = [token.text.chars().next(), token.text.chars().next_back()];
            let marked: Vec<char> = ends.into_iter().flatten().filter(|&c| is_edge(c)).collect();
            if marked.is_empty() {
                words.push(token.text.clone());
            }
            chars.extend(marked);
        }
        Edges { added, chars: chars.into_iter().collect(), words }
    }

    /// Chooses marks that are not among `taken`.
    ///
    /// # Errors
    /// `invalid_request` when the texts of one request use up all 131,068 supplementary private-use characters.
    pub(super) fn marks(&self, taken: &BTreeSet<char>) -> Result<Marks<'_>> {
        let mut free = MARKS.into_iter().flatten().filter(|c| !taken.contains(c));
        let mut next = || {
            free.next().ok_or_else(|| {
                Error::invalid_request("the messages use every private-use character of Unicode")
            })
        };
        let pairs = self.chars.iter().map(|&c| Ok((c, next()?))).collect::<Result<_>>()?;
        Ok(Marks { edges: self, table: Table { pairs, word: next()? } })
    }
}

fn is_edge(c: char) -> bool {
    !c.is_alphanumeric() && !c.is_whitespace() && c != '_'
}

/// Adds the characters of a text that could be taken for marks.
pub(super) fn collect_taken(text: &str, taken: &mut BTreeSet<char>) {
    taken.extend(text.chars().filter(|&c| c >= '\u{F0000}'));
}

/// Marks and what they stand for.
#[derive(Debug, Clone)]
pub(super) struct Table {
    /// Character and its mark.
    pairs: Vec<(char, char)>,
    /// Put before a character where none of `pairs` breaks a token.
    word: char,
}

impl Table {
    /// The character a mark stands for, another character itself; `None` for the mark that only separates.
    pub(super) fn original(&self, c: char) -> Option<char> {
        if c < '\u{F0000}' {
            return Some(c);
        }
        if c == self.word {
            return None;
        }
        Some(self.pairs.iter().find(|pair| pair.1 == c).map_or(c, |pair| pair.0))
    }

    /// Takes the marks out.
    fn unmark(&self, text: &str) -> String {
        text.chars().filter_map(|c| self.original(c)).collect()
    }
}

/// The marks of one rendering.
#[derive(Debug)]
pub(super) struct Marks<'e> {
    edges: &'e Edges,
    table: Table,
}

impl Marks<'_> {
    /// Untrusted text with marks in it.
    pub(super) fn mark(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            match self.table.pairs.iter().find(|pair| pair.0 == c) {
                Some(&(_, mark)) => out.push(mark),
                None => {
                    if self.edges.words.iter().any(|word| text[at..].starts_with(word.as_str())) {
                        out.push(self.table.word);
                    }
                    out.push(c);
                }
            }
        }
        out
    }

    /// As [`Marks::mark`], for a field that a template may put in the middle of a token it spells (`'<|' + role + '|>'`).
    pub(super) fn mark_name(&self, text: &str) -> String {
        let inside = !text.is_empty() && self.edges.added.iter().any(|token| token.text.contains(text));
        let marked = self.mark(text);
        if inside && marked == text {
            return format!("{}{text}", self.table.word);
        }
        marked
    }

    /// The table alone.
    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// Cuts rendered text at the added tokens that the template wrote, and takes the marks out of the rest.
    pub(super) fn pieces(&self, rendered: &str) -> Vec<Piece> {
        let segments = self.edges.added.split(rendered, |_| true);
        let piece = |segment| match segment {
            Segment::Token(token) => Piece { text: token.text.clone(), trusted: true },
            Segment::Text(text) => Piece { text: self.table.unmark(text), trusted: false },
        };
        segments.into_iter().map(piece).collect()
    }
}
