//! A body read from a file's beginning: its bytes go on as they come, and whole chunks are gathered of them on the way.

use super::manifest::CHUNK;
use super::source::Body;
use js_sys::Uint8Array;

/// A body read from the file's beginning.
pub(super) struct Stream {
    pub(super) body: Body,
    /// Position in the file.
    pub(super) at: u64,
    /// What lies before was read earlier.
    pub(super) skip: u64,
    /// The end of the body, where it is one range.
    pub(super) end: Option<u64>,
    /// The chunk that is being gathered.
    pub(super) gathered: Uint8Array,
}

impl Stream {
    pub(super) fn new(body: Body, end: Option<u64>) -> Self {
        let gathered = Uint8Array::new_with_length(0);
        Self { body, at: 0, skip: 0, end, gathered }
    }

    /// Takes bytes at the position; gives the chunks of a file of `bytes` that are whole by them.
    pub(super) fn gather(&mut self, piece: &Uint8Array, bytes: Option<u64>) -> Vec<(usize, Uint8Array)> {
        let (mut from, mut whole) = (0, Vec::new());
        while from < piece.length() {
            let within = (self.at % CHUNK) as u32;
            if within == 0 {
                self.gathered = Uint8Array::new_with_length(CHUNK as u32);
            }
            let n = (piece.length() - from).min(CHUNK as u32 - within);
            // A stream that is taken up inside a chunk gives that one not whole.
            if self.gathered.length() > 0 {
                self.gathered.set(&piece.subarray(from, from + n), within);
            }
            let before = self.at;
            self.at += u64::from(n);
            from += n;
            let ends = bytes.filter(|bytes| before < *bytes && *bytes <= self.at);
            if let Some(end) = ends {
                whole.extend(self.chunk_to(end));
            } else if self.at.is_multiple_of(CHUNK) {
                whole.extend(self.chunk_to(self.at));
            }
        }
        whole
    }

    /// The chunk that ends there, if it was gathered from its beginning.
    pub(super) fn chunk_to(&mut self, end: u64) -> Option<(usize, Uint8Array)> {
        let i = (end - 1) / CHUNK;
        let gathered = std::mem::replace(&mut self.gathered, Uint8Array::new_with_length(0));
        let length = (end - i * CHUNK) as u32;
        (gathered.length() > 0).then(|| {
            let whole = if length == gathered.length() { gathered } else { gathered.slice(0, length) };
            (i as usize, whole)
        })
    }
}
