//! What is known of a model file that is kept in pieces: the row that says which pieces are whole.

pub use crate::sum::hex;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Bytes of every chunk but the last.
pub const CHUNK: u64 = 8 << 20;

/// No file is larger: a length beyond this is damage, or a lie.
pub const MOST_BYTES: u64 = 1 << 40;

/// Version of the row and of the chunks' layout; rows of another are as good as absent.
const VERSION: u32 = 1;

/// Where chunks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// In a file of the origin private file system, each at its place.
    File,
    /// In the Cache API.
    CacheApi,
    /// In IndexedDB.
    Indexeddb,
}

/// A file in the store. It is written after each chunk that it names, so what it says is there, or was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    version: u32,
    /// What the file was asked for by: its URL, or its name in a hub.
    pub source: String,
    /// The URL that it came from.
    pub url: String,
    /// Where its chunks lie.
    pub place: Place,
    /// Drawn when the first chunk was kept: part of the chunks' names, so that two tries never mix.
    pub generation: String,
    /// The model's own name, else the file's.
    pub name: String,
    /// Bytes of the file, or up to the end of its last tensor where the server does not tell.
    pub bytes: u64,
    /// Memory that the weights take.
    pub packed_bytes: u64,
    /// `ETag` and `Last-Modified` where the server lets them be read.
    pub etag: Option<String>,
    /// As [`Manifest::etag`].
    pub last_modified: Option<String>,
    /// SHA-256 that the host tells of the whole file.
    #[serde(default)]
    pub told_sha256: Option<String>,
    /// SHA-256 of each chunk that is there, in hex.
    pub chunks: Vec<Option<String>>,
    /// SHA-256 of the whole file, once it was computed.
    pub sha256: Option<String>,
    /// When it was last loaded, ms since 1970.
    pub used_at: f64,
    /// How often a chunk was replaced: weights that were read before the last time may have come of a bad one.
    #[serde(default)]
    pub repairs: u32,
    /// The packed weights beside the chunks, under the generation's name.
    #[serde(default)]
    pub image: Option<Image>,
}

/// An image that was written whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    /// Its bytes.
    pub bytes: u64,
    /// Who wrote it: another version of the engine writes its own.
    pub version: String,
}

impl Manifest {
    /// Of a file with no chunk yet.
    pub fn new(source: &str, url: &str, place: Place, generation: String, bytes: u64) -> Self {
        Self {
            version: VERSION,
            source: source.to_string(),
            url: url.to_string(),
            place,
            generation,
            name: String::new(),
            bytes,
            packed_bytes: 0,
            etag: None,
            last_modified: None,
            told_sha256: None,
            chunks: vec![None; chunk_count(bytes)],
            sha256: None,
            used_at: 0.0,
            repairs: 0,
            image: None,
        }
    }

    /// Reads a stored row; `None` for one of another version, or one that contradicts itself.
    pub fn read(text: &str) -> Option<Self> {
        let row: Self = serde_json::from_str(text).ok()?;
        let sound = row.version == VERSION
            && (1..=MOST_BYTES).contains(&row.bytes)
            && row.chunks.len() == chunk_count(row.bytes)
            && row.chunks.iter().flatten().all(|hash| is_sha256(hash));
        sound.then_some(row)
    }

    /// As it is stored.
    pub fn text(&self) -> String {
        // A struct of texts and numbers always serialises.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Whether every chunk is there.
    pub fn is_complete(&self) -> bool {
        self.chunks.iter().all(Option::is_some)
    }

    /// Bytes of the chunks that are there.
    pub fn stored_bytes(&self) -> u64 {
        let there = self.chunks.iter().enumerate().filter(|(_, hash)| hash.is_some());
        there.map(|(i, _)| chunk_range(i, self.bytes)).map(|range| range.end - range.start).sum()
    }

    /// Whether the server still has the same file, as far as both answers tell.
    pub fn is_same_file(&self, etag: Option<&str>, last_modified: Option<&str>, bytes: Option<u64>) -> bool {
        let same = |kept: &Option<String>, now: Option<&str>| match (kept, now) {
            (Some(kept), Some(now)) => kept == now,
            _ => true,
        };
        // A date has whole seconds, and mirrors touch their files: where both have a tag, the tag decides.
        let tags = self.etag.is_some() && etag.is_some();
        same(&self.etag, etag)
            && (tags || same(&self.last_modified, last_modified))
            && bytes.is_none_or(|bytes| bytes == self.bytes)
    }
}

/// Chunks of a file of `bytes`.
pub fn chunk_count(bytes: u64) -> usize {
    bytes.div_ceil(CHUNK) as usize
}

/// The bytes of chunk `i` of a file of `bytes`.
pub fn chunk_range(i: usize, bytes: u64) -> Range<u64> {
    let start = i as u64 * CHUNK;
    start..bytes.min(start + CHUNK).max(start)
}

/// Whether it is a SHA-256 in lower-case hex.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_file_once() {
        for bytes in [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7] {
            let ranges: Vec<_> = (0..chunk_count(bytes)).map(|i| chunk_range(i, bytes)).collect();
            assert_eq!(ranges.first().map(|r| r.start), Some(0));
            assert_eq!(ranges.last().map(|r| r.end), Some(bytes));
            assert!(ranges.windows(2).all(|w| w[0].end == w[1].start));
            assert!(ranges.iter().all(|r| r.start < r.end && r.end - r.start <= CHUNK));
        }
    }

    #[test]
    fn a_row_comes_back_as_it_was_and_a_damaged_one_not_at_all() {
        let mut row =
            Manifest::new("hf:a/b.gguf@main", "http://a/b.gguf", Place::CacheApi, "g".into(), 2 * CHUNK + 5);
        row.chunks[1] = Some("0".repeat(64));
        assert_eq!(Manifest::read(&row.text()).as_ref(), Some(&row));
        assert!(!row.is_complete());
        assert_eq!(row.stored_bytes(), CHUNK);
        for (was, is) in [("\"version\":1", "\"version\":2"), ("null,\"", "\""), ("000", "00G"), ("{", "[")] {
            assert_eq!(Manifest::read(&row.text().replacen(was, is, 1)), None, "{was} -> {is}");
        }
        row.chunks.pop();
        assert_eq!(Manifest::read(&row.text()), None);
    }

    #[test]
    fn the_tag_decides_where_both_have_one() {
        let mut row = Manifest::new("u", "u", Place::Indexeddb, "g".into(), 10);
        assert!(row.is_same_file(Some("a"), Some("today"), None));
        (row.etag, row.last_modified) = (Some("a".into()), Some("today".into()));
        assert!(row.is_same_file(Some("a"), Some("yesterday"), Some(10)));
        assert!(!row.is_same_file(Some("b"), Some("today"), None));
        assert!(!row.is_same_file(None, Some("yesterday"), None));
        assert!(row.is_same_file(None, None, None));
        assert!(!row.is_same_file(None, None, Some(11)));
    }
}
