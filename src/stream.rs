//! What stands between decoded text and the reader: stop strings are cut off, and reasoning is told from content.
//! Both take text in any pieces and release what can no longer change; the pieces that come out, joined, are the same
//! for every way of cutting the input. Time is linear in the text, whatever the stops are. Neither knows about tokens.

#[cfg(test)]
mod tests;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Node of the stop automaton that stands for the empty prefix.
const ROOT: u32 = 0;

/// No node: the end of a list of siblings.
const NONE: u32 = u32::MAX;

/// Finds stop strings in a stream of text.
///
/// The match that starts first wins; of several with the same start the shortest, which is complete first. Text is held
/// back only while it may still belong to a match; no part of a stop is ever released. To know that no match starts
/// earlier, a match inside the beginning of a longer stop is settled only when the longer one fails or completes.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    nodes: Vec<Node>,
    /// The node of the longest end of the text that begins a stop.
    node: u32,
    /// Released and held text; what is held starts at `released`.
    text: String,
    released: usize,
    /// Earliest match so far, as start in `text` and index of the stop, while an earlier start is still open.
    candidate: Option<(usize, usize)>,
    stopped: Option<usize>,
}

/// What a [`StopMatcher`] lets through.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released {
    /// Text that can go to the reader.
    pub text: String,
    /// Index of the stop that was hit, in the order given to [`StopMatcher::new`]; nothing comes after it.
    pub stop: Option<usize>,
}

/// A prefix of a stop, in the automaton of Aho and Corasick (1975) over bytes.
#[derive(Debug, Clone)]
struct Node {
    byte: u8,
    first_child: u32,
    next_sibling: u32,
    /// The longest proper end of this prefix that is a prefix too.
    fail: u32,
    /// Bytes of this prefix.
    depth: u32,
    /// Longest stop that ends here, as bytes and index.
    longest: Option<(u32, u32)>,
}

impl StopMatcher {
    /// A matcher for `stops`; empty ones never match. Without stops all text passes at once.
    pub fn new(stops: &[String]) -> Self {
        let mut nodes = vec![Node::new(0, 0)];
        for (index, stop) in stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty()) {
            let mut node = ROOT;
            for &byte in stop.as_bytes() {
                node = child_or_insert(&mut nodes, node, byte);
            }
            nodes[node as usize].longest.get_or_insert((stop.len() as u32, index as u32));
        }
        link(&mut nodes);
        StopMatcher { nodes, node: ROOT, text: String::new(), released: 0, candidate: None, stopped: None }
    }

    /// Takes the next piece of text. After a stop was hit nothing more is released.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.stopped.is_some() {
            return self.release(self.text.len());
        }
        let start = self.text.len();
        self.text.push_str(piece);
        for (position, &byte) in (start + 1..).zip(piece.as_bytes()) {
            self.node = step(&self.nodes, self.node, byte);
            let node = &self.nodes[self.node as usize];
            if let Some((bytes, index)) = node.longest {
                let begin = position - bytes as usize;
                if self.candidate.is_none_or(|(earliest, _)| begin < earliest) {
                    self.candidate = Some((begin, index as usize));
                }
            }
            let open = position - node.depth as usize;
            if self.candidate.is_some_and(|(earliest, _)| open >= earliest) {
                return self.settle();
            }
        }
        // A stop's first byte begins a character, so this is a boundary.
        self.release(self.text.len() - self.nodes[self.node as usize].depth as usize)
    }

    /// Ends the text: releases what was held back, or settles a match for which an earlier start was still open.
    pub fn finish(&mut self) -> Released {
        if self.candidate.is_some() {
            return self.settle();
        }
        self.node = ROOT;
        self.release(self.text.len())
    }

    /// Index of the stop that was hit.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    fn settle(&mut self) -> Released {
        let Some((begin, index)) = self.candidate.take() else { return Released::default() };
        self.text.truncate(begin);
        self.stopped = Some(index);
        self.release(begin)
    }

    fn release(&mut self, end: usize) -> Released {
        let text = self.text[self.released..end].to_string();
        self.released = end;
        // Moving the held rest only when it is the smaller part keeps the whole linear.
        if self.released > self.text.len() / 2 {
            self.text.drain(..self.released);
            if let Some((begin, _)) = &mut self.candidate {
                *begin -= self.released;
            }
            self.released = 0;
        }
        Released { text, stop: self.stopped }
    }
}

impl Node {
    fn new(byte: u8, depth: u32) -> Self {
        Node { byte, first_child: NONE, next_sibling: NONE, fail: ROOT, depth, longest: None }
    }
}

fn child(nodes: &[Node], node: u32, byte: u8) -> Option<u32> {
    let mut next = nodes[node as usize].first_child;
    while next != NONE {
        if nodes[next as usize].byte == byte {
            return Some(next);
        }
        next = nodes[next as usize].next_sibling;
    }
    None
}

fn child_or_insert(nodes: &mut Vec<Node>, node: u32, byte: u8) -> u32 {
    if let Some(found) = child(nodes, node, byte) {
        return found;
    }
    let made = nodes.len() as u32;
    let mut new = Node::new(byte, nodes[node as usize].depth + 1);
    new.next_sibling = std::mem::replace(&mut nodes[node as usize].first_child, made);
    nodes.push(new);
    made
}

fn step(nodes: &[Node], mut node: u32, byte: u8) -> u32 {
    loop {
        match child(nodes, node, byte) {
            Some(next) => return next,
            None if node == ROOT => return ROOT,
            None => node = nodes[node as usize].fail,
        }
    }
}

/// Sets the fail links and hands down the stops that end inside of longer prefixes, breadth first.
fn link(nodes: &mut [Node]) {
    let mut queue = vec![ROOT];
    let mut at = 0;
    while let Some(&parent) = queue.get(at) {
        at += 1;
        let mut next = nodes[parent as usize].first_child;
        while next != NONE {
            let byte = nodes[next as usize].byte;
            let fail = if parent == ROOT { ROOT } else { step(nodes, nodes[parent as usize].fail, byte) };
            let inherited = nodes[fail as usize].longest;
            let node = &mut nodes[next as usize];
            node.fail = fail;
            node.longest = node.longest.or(inherited);
            queue.push(next);
            next = node.next_sibling;
        }
    }
}

/// Tells the reasoning of a DeepSeek-R1 style answer (`<think>…</think>` at its very start) from the content after it.
///
/// - Outside at first: white space and `<think>` open the reasoning and are dropped; anything else is content, all of it,
///   as are later tags.
/// - Inside at first (the prompt ended in `<think>`): a repeated opening tag is dropped in the same way.
/// - Newlines right after `<think>` and right after `</think>` are dropped. Without `</think>` all is reasoning.
///
/// Joined, the parts of all [`push`](Self::push) and [`finish`](Self::finish) calls equal [`split`](Self::split) of the
/// whole text.
#[derive(Debug, Clone)]
pub struct ReasoningSplitter {
    state: State,
    held: String,
    /// Bytes at the start of `held` that are known to be white space.
    blank: usize,
}

/// The two texts of an answer, or of a piece of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    /// What stood inside `<think>`: OpenAI-style `reasoning_content`.
    pub reasoning: String,
    /// The answer proper.
    pub content: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space and perhaps part of `<think>` so far.
    Start {
        inside: bool,
    },
    /// After `<think>`, before anything that is no newline.
    Opening,
    Reasoning,
    /// After `</think>`, before anything that is no newline.
    Closing,
    Content,
}

impl ReasoningSplitter {
    /// A splitter for an answer that starts inside the reasoning when the prompt itself ended in an open `<think>`.
    pub fn new(starts_inside: bool) -> Self {
        ReasoningSplitter { state: State::Start { inside: starts_inside }, held: String::new(), blank: 0 }
    }

    /// The parts of a whole text.
    pub fn split(text: &str, starts_inside: bool) -> Parts {
        let mut splitter = ReasoningSplitter::new(starts_inside);
        let mut parts = splitter.push(text);
        let rest = splitter.finish();
        parts.reasoning.push_str(&rest.reasoning);
        parts.content.push_str(&rest.content);
        parts
    }

    /// Takes the next piece of text and returns what is settled.
    pub fn push(&mut self, piece: &str) -> Parts {
        let mut parts = Parts::default();
        self.held.push_str(piece);
        while self.advance(&mut parts) {}
        parts
    }

    /// Ends the text: an unfinished tag was plain text.
    pub fn finish(&mut self) -> Parts {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Start { inside: false } | State::Closing | State::Content => {
                Parts { content: held, ..Parts::default() }
            }
            State::Start { inside: true } => {
                Parts { reasoning: held.trim_start_matches(is_newline).to_string(), ..Parts::default() }
            }
            State::Opening | State::Reasoning => Parts { reasoning: held, ..Parts::default() },
        }
    }

    /// Whether what comes next belongs to the reasoning, as far as is known.
    pub fn is_inside(&self) -> bool {
        matches!(self.state, State::Start { inside: true } | State::Opening | State::Reasoning)
    }

    /// One step on the held text; `false` when more text is needed.
    fn advance(&mut self, parts: &mut Parts) -> bool {
        match self.state {
            State::Start { inside } => {
                let unknown = &self.held[self.blank..];
                self.blank += unknown.len() - unknown.trim_start().len();
                let rest = &self.held[self.blank..];
                if rest.starts_with(OPEN) {
                    self.held.drain(..self.blank + OPEN.len());
                    self.state = State::Opening;
                } else if OPEN.starts_with(rest) {
                    return false;
                } else {
                    self.state = if inside { State::Opening } else { State::Content };
                }
                true
            }
            State::Opening => self.skip_newlines(State::Reasoning),
            State::Reasoning => {
                if let Some(end) = self.held.find(CLOSE) {
                    parts.reasoning.push_str(&self.held[..end]);
                    self.held.drain(..end + CLOSE.len());
                    self.state = State::Closing;
                    return true;
                }
                let kept = (1..CLOSE.len()).rev().find(|&n| self.held.ends_with(&CLOSE[..n])).unwrap_or(0);
                parts.reasoning.extend(self.held.drain(..self.held.len() - kept));
                false
            }
            State::Closing => self.skip_newlines(State::Content),
            State::Content => {
                parts.content.push_str(&self.held);
                self.held.clear();
                false
            }
        }
    }

    fn skip_newlines(&mut self, next: State) -> bool {
        let skipped = self.held.len() - self.held.trim_start_matches(is_newline).len();
        self.held.drain(..skipped);
        if self.held.is_empty() {
            return false;
        }
        self.state = next;
        true
    }
}

fn is_newline(c: char) -> bool {
    c == '\n' || c == '\r'
}
