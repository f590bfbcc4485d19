//! An incremental reader of safetensors headers out of untrusted bytes: eight bytes of length, a JSON object, and the
//! tensors' bytes without a gap. Follows the format's description and the checks of the `safetensors` crate's `tensor.rs`.
//!
//! The length is checked before anything is allocated for it; memory grows only with bytes that were really pushed. The
//! tensors keep the file's names and types; what they mean is for [`crate::weights`] to say.

use crate::error::{Error, Result};
use crate::gguf::{foreign, TensorInfo};
use crate::kernels::DType;
use crate::table_mark::{TableHash, TableMark};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::Deserialize;
use std::fmt;

/// Bytes of the JSON: a Qwen2 of 80 layers needs 120 KB (the format itself allows 100 MB).
pub const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Tensors of one file.
pub const MAX_TENSORS: usize = 65_536;
/// Bytes of a tensor's name.
const MAX_NAME_BYTES: usize = 1024;
/// Dimensions of a tensor: a language model's have one or two.
const MAX_DIMS: usize = 8;
/// Where data may end: positions cross to JavaScript as doubles, which count exactly up to here.
const MAX_POSITION: u64 = 1 << 53;
/// Bytes of the length.
const LENGTH_BYTES: u64 = 8;
/// Types that the format knows and this engine does not serve as weights.
const OTHER_TYPES: [&str; 17] = [
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "I32",
    "U32", "C64", "F64", "I64", "U64",
];

/// Everything a file says before its tensors' bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// The tensors, sorted by offset: they fill the file without gap or overlap, and their names are unique.
    pub tensors: Vec<TensorInfo>,
    /// File position where tensor data begin.
    pub data_offset: u64,
    /// Bytes of the whole file.
    pub file_bytes: u64,
    /// Mark of the header.
    pub mark: TableMark,
}

/// Reads a header from bytes pushed in any split.
///
/// ```
/// # use qandle::safetensors::HeaderReader;
/// let json = br#"{"x":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}}"#;
/// let file = [&(json.len() as u64).to_le_bytes(), json.as_slice(), &[0; 12]].concat();
/// let mut reader = HeaderReader::new(Some(file.len() as u64));
/// let header = reader.push(&file)?.expect("the header is whole");
/// assert_eq!((header.tensors[0].shape.as_slice(), header.tensors[0].offset), ([2, 3].as_slice(), 65));
/// # Ok::<(), qandle::Error>(())
/// ```
#[derive(Debug)]
pub struct HeaderReader {
    file_bytes: Option<u64>,
    /// The length and the JSON, as far as they have come.
    bytes: Vec<u8>,
    done: bool,
    failed: Option<Error>,
}

impl HeaderReader {
    /// A reader at the start of a file of `file_bytes` bytes, when that is known.
    pub fn new(file_bytes: Option<u64>) -> Self {
        HeaderReader { file_bytes, bytes: Vec::new(), done: false, failed: None }
    }

    /// Takes the next bytes of the file; `Some` once, when the header is whole. What follows it is ignored.
    ///
    /// # Errors
    /// `not_a_model` for another kind of file, `bad_model` for a damaged one, `unsupported_quantization` for a tensor of a type
    /// that is not served; after an error every call gives it again.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Option<Header>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.advance(bytes);
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.bytes = Vec::new();
        }
        result
    }

    /// Says that the file has ended: fine after the header, else `not_a_model` (empty) or `bad_model`.
    pub fn finish(&self) -> Result<()> {
        match (&self.failed, self.done, self.bytes.len()) {
            (Some(error), ..) => Err(error.clone()),
            (None, true, _) => Ok(()),
            (None, false, 0) => Err(Error::not_a_model("the file is empty (0 bytes)")),
            (None, false, n) => {
                Err(Error::bad_model(format!("the file ends after {n} bytes, within its safetensors header")))
            }
        }
    }

    fn advance(&mut self, mut bytes: &[u8]) -> Result<Option<Header>> {
        if self.done {
            return Ok(None);
        }
        let missing = (LENGTH_BYTES as usize).saturating_sub(self.bytes.len()).min(bytes.len());
        self.bytes.extend_from_slice(&bytes[..missing]);
        bytes = &bytes[missing..];
        let Ok(length) = <[u8; 8]>::try_from(&self.bytes[..self.bytes.len().min(8)]) else { return Ok(None) };
        let length = u64::from_le_bytes(length);
        self.check_length(length, bytes)?;
        let end = (LENGTH_BYTES + length) as usize;
        let take = (end - self.bytes.len()).min(bytes.len());
        self.bytes.extend_from_slice(&bytes[..take]);
        if self.bytes.len() < end {
            return Ok(None);
        }
        let whole = std::mem::take(&mut self.bytes);
        let header = header(&whole, self.file_bytes)?;
        self.done = true;
        Ok(Some(header))
    }

    /// Whether a header of this length can be; `next` is what follows the length.
    fn check_length(&self, length: u64, next: &[u8]) -> Result<()> {
        let end = LENGTH_BYTES.saturating_add(length);
        let wrong = if length < 2 {
            Some("2 is the least".to_string())
        } else if length > MAX_HEADER_BYTES {
            Some(format!("at most {MAX_HEADER_BYTES} is accepted"))
        } else {
            self.file_bytes.filter(|&file| end > file).map(|file| format!("the file has {file} bytes"))
        };
        let Some(wrong) = wrong else { return Ok(()) };
        let start: Vec<u8> = self.bytes.iter().chain(next).copied().take(256).collect();
        Err(match foreign::likely(&start) {
            Some(what) if what != "a safetensors file" => Error::not_a_model(format!(
                "expected a safetensors file, found {}; it looks like {what}",
                foreign::shown(&start)
            )),
            _ if start.starts_with(b"GGUF") => {
                Error::not_a_model("expected a safetensors file, found a GGUF file")
            }
            _ => Error::bad_model(format!("the safetensors header's length is {length}, {wrong}")),
        })
    }
}

/// One entry as the JSON has it.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// All entries in the JSON's order, doubled names too.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<Entries, M::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if entries.len() == MAX_TENSORS {
                        return Err(serde::de::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                    entries.push((name, map.next_value()?));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Reads the length and the JSON.
fn header(bytes: &[u8], file_bytes: Option<u64>) -> Result<Header> {
    let json = &bytes[LENGTH_BYTES as usize..];
    if json[0] != b'{' {
        let shown = foreign::shown(&json[..json.len().min(64)]);
        return Err(Error::bad_model(format!(
            "the safetensors header must begin with \"{{\" and is {shown}"
        )));
    }
    let Entries(entries) =
        serde_json::from_slice(json).map_err(|e| Error::bad_json("the safetensors header", &e))?;
    let data_offset = bytes.len() as u64;
    let mut tensors =
        entries.into_iter().map(|(name, entry)| tensor_info(name, entry)).collect::<Result<Vec<_>>>()?;
    let end = place(&mut tensors, data_offset)?;
    if let Some(file) = file_bytes.filter(|&file| file != end) {
        return Err(Error::bad_model(format!(
            "the file has {file} bytes, its header tells of {end}: it is cut short or damaged"
        )));
    }
    let mut hash = TableHash::default();
    hash.update(bytes);
    Ok(Header { tensors, data_offset, file_bytes: end, mark: TableMark { range: 0..data_offset, hash } })
}

/// Checks one entry; the offset stays relative to the data.
fn tensor_info(name: String, entry: Entry) -> Result<TensorInfo> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(Error::bad_model(format!(
            "a tensor's name has {} bytes, expected 1 to {MAX_NAME_BYTES}",
            name.len()
        )));
    }
    let bad = |what: String| Error::bad_model(format!("tensor {name:?}: {what}"));
    let Entry { dtype, shape, data_offsets: (start, end) } = entry;
    if shape.len() > MAX_DIMS {
        return Err(bad(format!("{} dimensions, at most {MAX_DIMS} are accepted", shape.len())));
    }
    let dtype = match dtype.as_str() {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        other if OTHER_TYPES.contains(&other) => {
            return Err(Error::unsupported_quantization(format!(
                "tensor {name:?} is of type {other}; served are F32, F16 and BF16"
            )))
        }
        other => return Err(bad(format!("type {} is not known", foreign::shown(other.as_bytes())))),
    };
    if shape.contains(&0) {
        return Err(bad(format!("a dimension of {shape:?} is zero")));
    }
    let bytes = shape
        .iter()
        .try_fold(dtype.block_bytes() as u64, |product, &dim| product.checked_mul(dim))
        .filter(|&bytes| bytes < MAX_POSITION)
        .ok_or_else(|| bad(format!("{shape:?} elements are more bytes than a file can hold")))?;
    if start.checked_add(bytes) != Some(end) {
        return Err(bad(format!(
            "{shape:?} elements of {} are {bytes} bytes, its offsets are {start} and {end}",
            dtype.name()
        )));
    }
    let shape = shape
        .iter()
        .map(|&dim| u32::try_from(dim).map(|dim| dim as usize))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| bad(format!("a dimension of {shape:?} passes 32 bits")))?;
    Ok(TensorInfo { name, dtype, shape, offset: start, bytes })
}

/// Sorts by offset, checks names and coverage, makes offsets file positions; gives the position behind the last byte.
fn place(tensors: &mut [TensorInfo], data_offset: u64) -> Result<u64> {
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some(twins) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::bad_model(format!("two tensors are named {:?}", twins[0].name)));
    }
    tensors.sort_by_key(|tensor| tensor.offset);
    let mut end = 0;
    for tensor in tensors {
        if tensor.offset != end {
            let what = if tensor.offset > end { "a gap before it" } else { "an overlap with the one before" };
            return Err(Error::bad_model(format!(
                "tensor {:?} begins at byte {} of the data, expected {end}: {what}",
                tensor.name, tensor.offset
            )));
        }
        end += tensor.bytes;
        if end > MAX_POSITION - data_offset {
            return Err(Error::bad_model(format!("tensor {:?} lies beyond any file", tensor.name)));
        }
        tensor.offset += data_offset;
    }
    Ok(data_offset + end)
}
