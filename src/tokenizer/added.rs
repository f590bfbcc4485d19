//! Added tokens (control and user-defined): finding them in a text, the longest first at each position.

/// One added token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddedToken {
    /// Its spelling, never empty.
    pub text: String,
    /// Its id.
    pub id: u32,
    /// Whether it is a control token (type 3) and not a user-defined one (type 4).
    pub control: bool,
}

/// All added tokens of a vocabulary, sorted by their bytes.
#[derive(Debug, Clone, Default)]
pub struct AddedTokens {
    sorted: Vec<AddedToken>,
    /// Which bytes a token begins with.
    first: FirstBytes,
}

#[derive(Debug, Clone)]
struct FirstBytes([bool; 256]);

impl Default for FirstBytes {
    fn default() -> FirstBytes {
        FirstBytes([false; 256])
    }
}

impl AddedTokens {
    /// Sorts the tokens; those with an empty spelling are left out, of equal spellings the first one stays.
    pub fn new(tokens: impl IntoIterator<Item = AddedToken>) -> AddedTokens {
        let mut sorted: Vec<AddedToken> = tokens.into_iter().filter(|token| !token.text.is_empty()).collect();
        sorted.sort_by(|a, b| a.text.as_bytes().cmp(b.text.as_bytes()).then(a.id.cmp(&b.id)));
        sorted.dedup_by(|b, a| a.text == b.text);
        let mut first = FirstBytes::default();
        for token in &sorted {
            first.0[usize::from(token.text.as_bytes()[0])] = true;
        }
        AddedTokens { sorted, first }
    }

    /// All tokens, sorted by their bytes.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &AddedToken> + '_ {
        self.sorted.iter()
    }

    /// The token of a spelling.
    pub fn get(&self, text: &str) -> Option<&AddedToken> {
        let at = self.sorted.binary_search_by(|token| token.text.as_bytes().cmp(text.as_bytes())).ok()?;
        self.sorted.get(at)
    }

    /// The longest token that a text begins with, of those `wanted`.
    pub fn longest_at(&self, text: &[u8], wanted: impl Fn(&AddedToken) -> bool) -> Option<&AddedToken> {
        if !self.first.0[usize::from(*text.first()?)] {
            return None;
        }
        let mut found = None;
        let mut range = self.sorted.as_slice();
        for (depth, &byte) in text.iter().enumerate() {
            let at = |token: &AddedToken| token.text.as_bytes().get(depth).copied();
            let low = range.partition_point(|token| at(token) < Some(byte));
            let high = range.partition_point(|token| at(token) <= Some(byte));
            range = &range[low..high];
            // The shortest of a range sorts first.
            match range.first() {
                None => break,
                Some(token) if token.text.len() == depth + 1 && wanted(token) => found = Some(token),
                Some(_) => {}
            }
        }
        found
    }

    /// Cuts a text at the tokens `wanted`, leftmost and longest first; pieces without a token are never empty.
    pub fn split<'t, 's>(
        &'t self,
        text: &'s str,
        wanted: impl Fn(&AddedToken) -> bool,
    ) -> Vec<Segment<'t, 's>> {
        let mut segments = Vec::new();
        let (mut plain, mut at) = (0, 0);
        let bytes = text.as_bytes();
        while at < bytes.len() {
            // A token begins with the first byte of a character, so `at` is a character boundary where one matches.
            match self.longest_at(&bytes[at..], &wanted) {
                None => at += 1,
                Some(token) => {
                    if plain < at {
                        segments.push(Segment::Text(&text[plain..at]));
                    }
                    segments.push(Segment::Token(token));
                    at += token.text.len();
                    plain = at;
                }
            }
        }
        if plain < bytes.len() {
            segments.push(Segment::Text(&text[plain..]));
        }
        segments
    }
}

/// A part of a text that was cut at added tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment<'t, 's> {
    /// Text that holds none of the tokens looked for.
    Text(&'s str),
    /// An added token.
    Token(&'t AddedToken),
}
