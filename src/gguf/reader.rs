//! The state machine that turns pushed bytes into a [`Header`]: one state per item of the format, one step per item,
//! array elements in bulk. An item that is cut by the end of a push waits in `carry`; nothing is read twice.

use super::metadata::{fixed, Array, Kind, Metadata, Value};
use super::tensors::{self, TensorInfo};
use super::{
    foreign, Header, MAX_ALIGNMENT, MAX_ARRAY_DEPTH, MAX_ARRAY_LEN, MAX_HEADER_BYTES, MAX_KEY_BYTES,
    MAX_NAME_BYTES, MAX_PAIRS, MAX_STRING_BYTES, MAX_TENSORS,
};
use crate::error::{Error, Result};
use crate::table_mark::{TableHash, TableMark};

const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Least bytes of a metadata pair: key length, type, value.
const LEAST_PAIR_BYTES: u64 = 8 + 4 + 1;
/// Least bytes of a tensor entry: name length, dimension count, one dimension, type, offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// What comes next in the stream; each state waits for [`HeaderReader::need`] bytes.
#[derive(Debug, Clone, Copy)]
enum State {
    Magic,
    Version,
    TensorCount,
    PairCount,
    KeyLength,
    Key(usize),
    ValueKind,
    Scalar(Kind),
    StringLength,
    String(usize),
    ArrayHead,
    Elements(Kind),
    ElementLength,
    Element(usize),
    NameLength,
    Name(usize),
    DimCount,
    Entry(usize),
    End,
}

/// Reads a header from bytes pushed in any split.
///
/// ```
/// # use qandle::gguf::HeaderReader;
/// let mut reader = HeaderReader::new(None);
/// let file = [b"GGUF".as_slice(), &[3, 0, 0, 0], &[0; 16]].concat();
/// let header = file.chunks(5).find_map(|chunk| reader.push(chunk).transpose());
/// assert_eq!(header.expect("the header is whole")?.data_offset, 32);
/// # Ok::<(), qandle::Error>(())
/// ```
#[derive(Debug)]
pub struct HeaderReader {
    file_bytes: Option<u64>,
    state: State,
    /// Bytes of an item that is not whole yet; after the end, the bytes beyond the header.
    carry: Vec<u8>,
    /// File position of the first byte that is not in a finished item.
    position: u64,
    failed: Option<Error>,
    version: u32,
    alignment: u64,
    metadata: Metadata,
    pairs_left: u64,
    key: String,
    array: Option<Array>,
    elements_left: u64,
    /// Elements left in each array of arrays that is open, outermost first.
    outer_left: Vec<u64>,
    /// Length of the outermost array of arrays.
    outer_len: Option<u64>,
    tensors: Vec<TensorInfo>,
    tensors_left: u64,
    name: String,
    table_bytes: u64,
    table_hash: TableHash,
}

impl HeaderReader {
    /// A reader at the start of a file of `file_bytes` bytes, when that is known.
    pub fn new(file_bytes: Option<u64>) -> Self {
        HeaderReader {
            file_bytes,
            state: State::Magic,
            carry: Vec::new(),
            position: 0,
            failed: None,
            version: 0,
            alignment: DEFAULT_ALIGNMENT,
            metadata: Metadata::default(),
            pairs_left: 0,
            key: String::new(),
            array: None,
            elements_left: 0,
            outer_left: Vec::new(),
            outer_len: None,
            tensors: Vec::new(),
            tensors_left: 0,
            name: String::new(),
            table_bytes: 0,
            table_hash: TableHash::default(),
        }
    }

    /// Takes the next bytes of the file; `Some` once, when the header is whole. Bytes pushed from then on are kept for
    /// [`HeaderReader::unused`]. Errors: `not_a_model`, `bad_model`, `unsupported_model` (big-endian, version 1),
    /// `unsupported_quantization`; after an error every call gives it again.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Option<Header>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.advance(bytes);
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.carry = Vec::new();
        }
        result
    }

    /// Says that the file has ended: fine after the header, else `not_a_model` (empty, no magic) or `bad_model`.
    pub fn finish(&self) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        match self.state {
            State::End => Ok(()),
            State::Magic => Err(foreign::not_gguf(&self.carry)),
            _ => {
                let bytes = self.position + self.carry.len() as u64;
                Err(Error::bad_model(format!("the file ends after {bytes} bytes, within its header")))
            }
        }
    }

    /// Pushed bytes that lie beyond the header: padding up to `data_offset`, then tensor data. Empty before its end.
    pub fn unused(&self) -> &[u8] {
        match self.state {
            State::End => &self.carry,
            _ => &[],
        }
    }

    /// File position of the first byte of [`HeaderReader::unused`].
    pub fn unused_offset(&self) -> u64 {
        self.position
    }

    fn advance(&mut self, mut bytes: &[u8]) -> Result<Option<Header>> {
        if matches!(self.state, State::End) {
            self.carry.extend_from_slice(bytes);
            return Ok(None);
        }
        if matches!(self.state, State::Magic) {
            foreign::check_magic(&self.carry, bytes)?;
        }
        while !matches!(self.state, State::End) {
            let need = self.need();
            if self.carry.len() + bytes.len() < need {
                self.check_room(need as u64)?;
                self.carry.extend_from_slice(bytes);
                return Ok(None);
            }
            if self.carry.is_empty() {
                let (item, rest) = bytes.split_at(self.batch(need, bytes.len()));
                self.step(item)?;
                bytes = rest;
            } else {
                let (end_of_item, rest) = bytes.split_at(need - self.carry.len());
                self.carry.extend_from_slice(end_of_item);
                let item = std::mem::take(&mut self.carry);
                self.step(&item)?;
                bytes = rest;
            }
        }
        let header = self.header()?;
        self.carry = bytes.to_vec();
        Ok(Some(header))
    }

    /// Bytes of the next item.
    fn need(&self) -> usize {
        match self.state {
            State::Magic | State::Version | State::ValueKind | State::DimCount => 4,
            State::TensorCount | State::PairCount => 8,
            State::KeyLength | State::StringLength | State::ElementLength | State::NameLength => 8,
            State::Key(bytes) | State::String(bytes) | State::Element(bytes) | State::Name(bytes) => bytes,
            State::Scalar(kind) | State::Elements(kind) => kind.bytes(),
            State::ArrayHead => 12,
            State::Entry(dims) => dims * 8 + 12,
            State::End => 0,
        }
    }

    /// Bytes to take at once of `available` ≥ `need`: array elements go in bulk.
    fn batch(&self, need: usize, available: usize) -> usize {
        match self.state {
            State::Elements(_) => {
                let most = usize::try_from(self.elements_left).unwrap_or(usize::MAX);
                need * (available / need).min(most)
            }
            _ => need,
        }
    }

    /// Consumes one whole item. The position is then that of the byte after it.
    fn step(&mut self, item: &[u8]) -> Result<()> {
        self.position += item.len() as u64;
        if matches!(self.state, State::NameLength | State::Name(_) | State::DimCount | State::Entry(_)) {
            self.table_bytes += item.len() as u64;
            self.table_hash.update(item);
        }
        self.state = match self.state {
            State::Magic => State::Version,
            State::Version => {
                self.version = version(u32_at(item, 0)?)?;
                State::TensorCount
            }
            State::TensorCount => {
                self.tensors_left =
                    self.claim("tensor count", u64_at(item, 0)?, LEAST_TENSOR_BYTES, MAX_TENSORS)?;
                State::PairCount
            }
            State::PairCount => {
                self.pairs_left =
                    self.claim("metadata count", u64_at(item, 0)?, LEAST_PAIR_BYTES, MAX_PAIRS)?;
                self.next_pair()
            }
            State::KeyLength => State::Key(self.claim_text("key length", item, MAX_KEY_BYTES)?),
            State::Key(_) => {
                self.key = text("metadata key", item)?;
                if self.metadata.get(&self.key).is_some() {
                    return Err(Error::bad_model(format!("metadata key {} occurs twice", self.shown_key())));
                }
                State::ValueKind
            }
            State::ValueKind => match self.kind(item)? {
                Kind::String => State::StringLength,
                Kind::Array => State::ArrayHead,
                kind => State::Scalar(kind),
            },
            State::Scalar(kind) => {
                let value = Value::from_le(kind, item)?;
                self.end_pair(value)?
            }
            State::StringLength => State::String(self.claim_text("string length", item, MAX_STRING_BYTES)?),
            State::String(_) => self.end_pair(Value::String(String::from_utf8_lossy(item).into_owned()))?,
            State::ArrayHead => self.begin_array(item)?,
            State::Elements(kind) => {
                self.extend_array(item)?;
                self.elements_left -= (item.len() / kind.bytes()) as u64;
                match self.elements_left {
                    0 => self.end_array()?,
                    _ => State::Elements(kind),
                }
            }
            State::ElementLength => {
                State::Element(self.claim_text("string length", item, MAX_STRING_BYTES)?)
            }
            State::Element(_) => {
                self.extend_array(item)?;
                self.elements_left -= 1;
                match self.elements_left {
                    0 => self.end_array()?,
                    _ => State::ElementLength,
                }
            }
            State::NameLength => State::Name(self.claim_text("tensor name length", item, MAX_NAME_BYTES)?),
            State::Name(_) => {
                self.name = text("tensor name", item)?;
                State::DimCount
            }
            State::DimCount => match u32_at(item, 0)? {
                dims @ 1..=tensors::MAX_DIMS => State::Entry(dims as usize),
                dims => {
                    return Err(Error::bad_model(format!(
                        "tensor {:?} has {dims} dimensions, 1 to {} are possible",
                        self.name,
                        tensors::MAX_DIMS
                    )))
                }
            },
            State::Entry(dims) => {
                let sizes: Vec<u64> = (0..dims).map(|i| u64_at(item, i * 8)).collect::<Result<_>>()?;
                let (ggml_type, offset) = (u32_at(item, dims * 8)?, u64_at(item, dims * 8 + 4)?);
                let name = std::mem::take(&mut self.name);
                self.tensors.push(tensors::tensor_info(name, &sizes, ggml_type, offset, self.alignment)?);
                self.tensors_left -= 1;
                self.next_tensor()
            }
            State::End => State::End,
        };
        Ok(())
    }

    fn next_pair(&self) -> State {
        match self.pairs_left {
            0 => self.next_tensor(),
            _ => State::KeyLength,
        }
    }

    fn next_tensor(&self) -> State {
        match self.tensors_left {
            0 => State::End,
            _ => State::NameLength,
        }
    }

    fn kind(&self, item: &[u8]) -> Result<Kind> {
        let code = u32_at(item, 0)?;
        Kind::from_code(code).ok_or_else(|| {
            let key = self.shown_key();
            Error::bad_model(format!("metadata {key} has value type {code}, 0 to 12 are defined"))
        })
    }

    fn end_pair(&mut self, value: Value) -> Result<State> {
        let key = std::mem::take(&mut self.key);
        if key == ALIGNMENT_KEY {
            self.alignment = alignment(&value)?;
        }
        self.metadata.insert(key, value);
        self.pairs_left -= 1;
        Ok(self.next_pair())
    }

    fn begin_array(&mut self, item: &[u8]) -> Result<State> {
        let kind = self.kind(item)?;
        let len = self.claim("array length", u64_at(item, 4)?, kind.bytes() as u64, MAX_ARRAY_LEN)?;
        if kind == Kind::Array {
            if self.outer_left.len() + 1 >= MAX_ARRAY_DEPTH {
                return Err(Error::bad_model(format!(
                    "metadata {} holds arrays deeper than {MAX_ARRAY_DEPTH}",
                    self.shown_key()
                )));
            }
            self.outer_len.get_or_insert(len);
        }
        self.array = Array::new(kind);
        self.elements_left = len;
        if len == 0 {
            return self.end_array();
        }
        Ok(match kind {
            Kind::Array => {
                self.outer_left.push(len);
                State::ArrayHead
            }
            Kind::String => State::ElementLength,
            kind => State::Elements(kind),
        })
    }

    fn extend_array(&mut self, item: &[u8]) -> Result<()> {
        match &mut self.array {
            Some(array) => array.extend_le(item),
            None => Ok(()),
        }
    }

    /// Closes the innermost array and every array around it that is thereby full.
    fn end_array(&mut self) -> Result<State> {
        while let Some(left) = self.outer_left.last_mut() {
            *left -= 1;
            if *left > 0 {
                return Ok(State::ArrayHead);
            }
            self.outer_left.pop();
        }
        let array = self.array.take();
        let value = match (self.outer_len.take(), array) {
            (None, Some(mut array)) => {
                array.shrink_to_fit();
                Value::Array(array)
            }
            (len, _) => Value::Nested(len.unwrap_or(0)),
        };
        self.end_pair(value)
    }

    /// Lets a count from the file pass when it is within its limit and `each` bytes apiece fit into header and file.
    fn claim(&self, what: &str, count: u64, each: u64, limit: u64) -> Result<u64> {
        if count > limit {
            let near = match self.key.as_str() {
                "" => String::new(),
                _ => format!(" (metadata {})", self.shown_key()),
            };
            return Err(Error::bad_model(format!("{what} is {count}{near}, at most {limit} is accepted")));
        }
        self.check_room(count * each)?;
        Ok(count)
    }

    /// [`HeaderReader::claim`] for the length of a text, which fits `usize` as all limits do.
    fn claim_text(&self, what: &str, item: &[u8], limit: u64) -> Result<usize> {
        let bytes = self.claim(what, u64_at(item, 0)?, 1, limit)?;
        usize::try_from(bytes).map_err(|_| Error::bad_model(format!("{what} is {bytes}")))
    }

    /// Whether `bytes` more can follow the present position.
    fn check_room(&self, bytes: u64) -> Result<()> {
        let end = self.position + bytes;
        if end > MAX_HEADER_BYTES {
            return Err(Error::bad_model(format!(
                "the header needs at least {end} bytes, at most {MAX_HEADER_BYTES} are accepted"
            )));
        }
        match self.file_bytes {
            Some(file) if end > file && !matches!(self.state, State::Magic) => {
                Err(Error::bad_model(format!(
                    "the file has {file} bytes, its header needs at least {end}: it is cut short or damaged"
                )))
            }
            _ => Ok(()),
        }
    }

    fn shown_key(&self) -> String {
        foreign::shown(self.key.as_bytes())
    }

    fn header(&mut self) -> Result<Header> {
        let data_offset = self.position.next_multiple_of(self.alignment);
        let mut tensors = std::mem::take(&mut self.tensors);
        tensors::place(&mut tensors, data_offset, self.file_bytes)?;
        let metadata = std::mem::take(&mut self.metadata);
        let range = self.position - self.table_bytes..self.position;
        let mark = TableMark { range, hash: self.table_hash };
        Ok(Header { version: self.version, metadata, tensors, alignment: self.alignment, data_offset, mark })
    }
}

/// Lets versions 2 and 3 pass.
fn version(found: u32) -> Result<u32> {
    match found {
        2 | 3 => Ok(found),
        1 => Err(Error::unsupported_model("GGUF version 1 (of August 2023); convert it to version 3")),
        // The same rule as llama.cpp's: no version fills the upper half.
        _ if found != 0 && found & 0xffff == 0 => Err(Error::unsupported_model(format!(
            "a big-endian GGUF file (version {}); only little-endian files are served",
            found.swap_bytes()
        ))),
        _ => Err(Error::bad_model(format!("GGUF version {found}; versions 2 and 3 are served"))),
    }
}

/// The alignment a file asks for.
fn alignment(value: &Value) -> Result<u64> {
    match value.as_u64() {
        Some(n) if n.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&n) => Ok(n),
        found => {
            let found = found.map_or("no integer".to_string(), |n| n.to_string());
            Err(Error::bad_model(format!(
                "{ALIGNMENT_KEY} must be a power of two from 8 to {MAX_ALIGNMENT} and is {found}"
            )))
        }
    }
}

fn text(what: &str, item: &[u8]) -> Result<String> {
    match std::str::from_utf8(item) {
        Ok("") => Err(Error::bad_model(format!("a {what} is empty"))),
        Ok(text) => Ok(text.to_string()),
        Err(_) => Err(Error::bad_model(format!("a {what} is not UTF-8: {}", foreign::shown(item)))),
    }
}

fn u32_at(item: &[u8], at: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(fixed(&item[at..at + 4])?))
}

fn u64_at(item: &[u8], at: usize) -> Result<u64> {
    Ok(u64::from_le_bytes(fixed(&item[at..at + 8])?))
}
