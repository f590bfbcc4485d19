//! An array of strings at the cost of about its bytes. A Qwen2 vocabulary is 303,000 of them (tokens and merges): as
//! `Vec<String>` they would cost three to four times their text on wasm32, and as many allocations.

use crate::error::{Error, Result};

/// An array of strings: one blob of UTF-8 and the end of each string in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StringArray {
    text: String,
    ends: Vec<u32>,
}

impl StringArray {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no string at all.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `i`, or `None` beyond the end.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        self.text.get(start..end)
    }

    /// All strings in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + '_ {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let string = &self.text[start..end as usize];
            start = end as usize;
            string
        })
    }

    /// Bytes held on the heap.
    pub fn memory_bytes(&self) -> usize {
        self.text.capacity() + self.ends.capacity() * size_of::<u32>()
    }

    /// Adds one string; bytes that are not UTF-8 become U+FFFD. `bad_model` when the blob would pass 4 GiB.
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.text.push_str(text),
            Err(_) => self.text.push_str(&String::from_utf8_lossy(bytes)),
        }
        let end = u32::try_from(self.text.len())
            .map_err(|_| Error::bad_model("the strings of one metadata array hold more than 4 GiB"))?;
        self.ends.push(end);
        Ok(())
    }

    /// Adds one string. `bad_model` when the blob would pass 4 GiB.
    pub(crate) fn push_str(&mut self, text: &str) -> Result<()> {
        self.push_bytes(text.as_bytes())
    }

    /// Gives back what growing by doubling left over.
    pub(super) fn shrink_to_fit(&mut self) {
        self.text.shrink_to_fit();
        self.ends.shrink_to_fit();
    }
}

impl<S: AsRef<str>> FromIterator<S> for StringArray {
    /// Collects strings of less than 4 GiB in all.
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut array = StringArray::default();
        for string in strings {
            array.text.push_str(string.as_ref());
            array
                .ends
                .push(u32::try_from(array.text.len()).expect("a caller's own strings stay under 4 GiB"));
        }
        array
    }
}
