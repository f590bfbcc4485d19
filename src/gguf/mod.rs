//! An incremental reader of GGUF headers (versions 2 and 3, little-endian) out of untrusted bytes.
//!
//! Bytes are pushed as they come, in any split; each is looked at about once. Every count and length is checked against
//! the limits below, and against the file size where it is known, as soon as it has arrived and before anything is
//! allocated for it; memory grows only with bytes that were really pushed. Follows docs/gguf.md of ggml.

pub(crate) mod foreign;
mod metadata;
mod reader;
mod split;
mod strings;
mod tensors;
mod writer;

pub use metadata::{Array, Metadata, Value};
pub use reader::HeaderReader;
pub use split::{check_shards, shard_order, Split, MAX_SHARDS};
pub use strings::StringArray;
pub use tensors::TensorInfo;
pub use writer::header as write_header;

use crate::table_mark::TableMark;

/// Tensors of one file: a Qwen2 of 80 layers has 963.
pub const MAX_TENSORS: u64 = 65_536;
/// Metadata pairs of one file: real ones have 20 to 60.
pub const MAX_PAIRS: u64 = 65_536;
/// Bytes of a key, by the specification.
pub const MAX_KEY_BYTES: u64 = 65_535;
/// Bytes of a tensor name: the specification says 64, and some writers exceed it.
pub const MAX_NAME_BYTES: u64 = 1024;
/// Bytes of one string: the longest in real files are chat templates of some 20 KB.
pub const MAX_STRING_BYTES: u64 = 16 << 20;
/// Elements of one array: the largest vocabularies have 262,144 tokens and 514,906 merges.
pub const MAX_ARRAY_LEN: u64 = 4 << 20;
/// How deep arrays may hold arrays; real files have none, and what is nested is read over.
pub const MAX_ARRAY_DEPTH: usize = 4;
/// Bytes of a whole header: real ones have 6 to 20 MB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Largest `general.alignment`: real files have 32 or 64, and padding is read, not skipped.
pub const MAX_ALIGNMENT: u64 = 1 << 20;

/// Everything a GGUF file says before its tensor data.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// GGUF version, 2 or 3.
    pub version: u32,
    /// The key–value pairs.
    pub metadata: Metadata,
    /// The tensors, sorted by offset; their names are unique and their ranges do not overlap.
    pub tensors: Vec<TensorInfo>,
    /// Every tensor begins at a multiple of this after `data_offset`.
    pub alignment: u64,
    /// File position where tensor data begin.
    pub data_offset: u64,
    /// Mark of the tensor table.
    pub mark: TableMark,
}
