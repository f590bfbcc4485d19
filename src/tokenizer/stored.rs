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
