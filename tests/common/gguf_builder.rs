//! Writes GGUF files for tests, sound ones and, on request, wrong ones: nothing is checked here.
//! Include it with `#[path = "common/gguf_builder.rs"] mod gguf_builder;`.
#![allow(dead_code)] // Each test program uses its own part.

/// Codes of GGUF's value types.
pub mod kind {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// A file in the making.
#[derive(Clone)]
pub struct GgufBuilder {
    version: u32,
    alignment: u64,
    pairs: Vec<u8>,
    n_pairs: u64,
    infos: Vec<u8>,
    n_tensors: u64,
    data: Vec<u8>,
}

impl Default for GgufBuilder {
    fn default() -> Self {
        GgufBuilder {
            version: 3,
            alignment: 32,
            pairs: Vec::new(),
            n_pairs: 0,
            infos: Vec::new(),
            n_tensors: 0,
            data: Vec::new(),
        }
    }
}

impl GgufBuilder {
    /// An empty file of version 3.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the version.
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// A pair of any type, its value given as the file's bytes.
    pub fn raw(mut self, key: &[u8], kind: u32, value: &[u8]) -> Self {
        self.pairs.extend(string(key));
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend(value);
        self.n_pairs += 1;
        self
    }

    /// `general.alignment`, which the builder then follows itself as far as it is sensible.
    pub fn alignment(mut self, alignment: u32) -> Self {
        if alignment.is_power_of_two() && alignment <= 1 << 20 {
            self.alignment = alignment.into();
        }
        self.u32("general.alignment", alignment)
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key.as_bytes(), kind::U32, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key.as_bytes(), kind::F32, &value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key.as_bytes(), kind::BOOL, &[value.into()])
    }

    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key.as_bytes(), kind::STRING, &string(value.as_bytes()))
    }

    pub fn strings<S: AsRef<str>>(self, key: &str, values: impl IntoIterator<Item = S>) -> Self {
        let mut items = Vec::new();
        let mut len = 0;
        for value in values {
            items.extend(string(value.as_ref().as_bytes()));
            len += 1;
        }
        self.raw(key.as_bytes(), kind::ARRAY, &array(kind::STRING, len, &items))
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key.as_bytes(), kind::ARRAY, &array(kind::I32, values.len() as u64, &items))
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key.as_bytes(), kind::ARRAY, &array(kind::F32, values.len() as u64, &items))
    }

    /// An entry of the tensor table alone; `dims` as in the file (contiguous first), `offset` from the data section.
    pub fn info(mut self, name: &str, ggml_type: u32, dims: &[u64], offset: u64) -> Self {
        self.infos.extend(string(name.as_bytes()));
        self.infos.extend((dims.len() as u32).to_le_bytes());
        for dim in dims {
            self.infos.extend(dim.to_le_bytes());
        }
        self.infos.extend(ggml_type.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self.n_tensors += 1;
        self
    }

    /// A tensor with its data at the next aligned place. Set the alignment first.
    pub fn tensor(mut self, name: &str, ggml_type: u32, dims: &[u64], data: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment as usize), 0);
        let offset = self.data.len() as u64;
        self.data.extend(data);
        self.info(name, ggml_type, dims, offset)
    }

    /// A tensor of f32.
    pub fn tensor_f32(self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, 0, dims, &data)
    }

    /// Bytes after the last tensor, e.g. for entries made by [`GgufBuilder::info`].
    pub fn data(mut self, data: &[u8]) -> Self {
        self.data.extend(data);
        self
    }

    /// The header without padding and data.
    pub fn header(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.n_tensors.to_le_bytes());
        file.extend(self.n_pairs.to_le_bytes());
        file.extend(&self.pairs);
        file.extend(&self.infos);
        file
    }

    /// The whole file.
    pub fn build(&self) -> Vec<u8> {
        let mut file = self.header();
        file.resize(file.len().next_multiple_of(self.alignment as usize), 0);
        file.extend(&self.data);
        file
    }
}

/// A string as the file holds it.
pub fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// An array as the file holds it, whatever its length claims.
pub fn array(kind: u32, len: u64, items: &[u8]) -> Vec<u8> {
    [kind.to_le_bytes().as_slice(), &len.to_le_bytes(), items].concat()
}
