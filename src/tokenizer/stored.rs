//! A vocabulary as it is kept between visits, so that it need not be built again: flat arrays, each with its length before
//! it. Read back, every index is checked; that the bytes are those that were written is the image's to know.

/// Appends arrays.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend((bytes.len() as u64).to_le_bytes());
        self.0.extend(bytes);
    }

    pub(super) fn words(&mut self, words: &[u32]) {
        self.0.extend((4 * words.len() as u64).to_le_bytes());
        self.0.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }
}

/// Takes them off again.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let (len, rest) = self.0.split_first_chunk()?;
        let (bytes, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(super) fn words(&mut self) -> Option<Vec<u32>> {
        let (words, []) = self.bytes()?.as_chunks() else { return None };
        Some(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

/// A sum of 64 bits that notices damage and tells vocabularies apart, at some GB a second; it withstands no malice.
#[derive(Debug)]
pub(super) struct Sum(u64);

impl Sum {
    /// A sum that begins with what it is of.
    pub(super) fn new(seed: &[u8]) -> Self {
        let mut sum = Self(0);
        sum.bytes(seed);
        sum
    }

    /// The sum of bytes.
    pub(super) fn of(bytes: &[u8]) -> u64 {
        Self::new(bytes).0
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.add(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|word| self.add(u64::from_le_bytes(*word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.add(u64::from_le_bytes(last));
    }

    pub(super) fn words(&mut self, words: &[u32]) {
        self.add(words.len() as u64);
        let (pairs, rest) = words.as_chunks();
        pairs.iter().for_each(|[a, b]| self.add(u64::from(*a) << 32 | u64::from(*b)));
        rest.iter().for_each(|word| self.add(u64::from(*word)));
    }

    pub(super) fn finish(self) -> u64 {
        self.0
    }

    /// One to one in the word and in the sum so far: a single changed word always shows.
    fn add(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}
