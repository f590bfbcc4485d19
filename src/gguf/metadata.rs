//! Metadata of a GGUF file: key → value in the file's own types, arrays held in their own width.
//!
//! The getters are lenient about number types, as writers are: a count is found whether it was written as u32, i64 or
//! f32. The tokenizer takes its big arrays out ([`Metadata::take`]) so that they are freed once it is built.

use std::collections::BTreeMap;

use super::strings::StringArray;
use crate::error::{Error, Result};

/// Makes the three enums over GGUF's value types from one table of `Variant type code` for the numbers.
macro_rules! value_types {
    ($($kind:ident $number:ident $code:literal),* $(,)?) => {
        /// A value type as the file states it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Kind {
            $($kind,)*
            Bool,
            String,
            Array,
        }

        impl Kind {
            /// The type of a code in the file.
            pub(super) fn from_code(code: u32) -> Option<Kind> {
                match code {
                    $($code => Some(Kind::$kind),)*
                    7 => Some(Kind::Bool),
                    8 => Some(Kind::String),
                    9 => Some(Kind::Array),
                    _ => None,
                }
            }

            /// Bytes of one value in the file; for strings and arrays the least (an empty one).
            pub(super) fn bytes(self) -> usize {
                match self {
                    $(Kind::$kind => size_of::<$number>(),)*
                    Kind::Bool => 1,
                    Kind::String => 8,
                    Kind::Array => 12,
                }
            }
        }

        /// One metadata value.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Value {
            $(
                #[doc = concat!("One `", stringify!($number), "`.")]
                $kind($number),
            )*
            /// A boolean.
            Bool(bool),
            /// A string; bytes that were not UTF-8 are U+FFFD.
            String(String),
            /// An array of numbers, booleans or strings.
            Array(Array),
            /// An array of this many arrays. It was read over, not kept: no Qwen2 file has one.
            Nested(u64),
        }

        /// A metadata array.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Array {
            $(
                #[doc = concat!("Numbers of type `", stringify!($number), "`.")]
                $kind(Vec<$number>),
            )*
            /// Booleans.
            Bool(Vec<bool>),
            /// Strings.
            Strings(StringArray),
        }

        impl Value {
            /// A number or boolean from its little-endian bytes (exactly `kind.bytes()` of them).
            pub(super) fn from_le(kind: Kind, bytes: &[u8]) -> Result<Value> {
                Ok(match kind {
                    $(Kind::$kind => Value::$kind($number::from_le_bytes(fixed(bytes)?)),)*
                    Kind::Bool => Value::Bool(boolean(u8::from_le_bytes(fixed(bytes)?))?),
                    Kind::String | Kind::Array => {
                        return Err(Error::bad_model(format!("a value of type {kind:?} where a number was expected")))
                    }
                })
            }
        }

        impl Value {
            /// The code of its type.
            pub(super) fn code(&self) -> u32 {
                match self {
                    $(Value::$kind(_) => $code,)*
                    Value::Bool(_) => 7,
                    Value::String(_) => 8,
                    Value::Array(_) | Value::Nested(_) => 9,
                }
            }

            /// Appends a number or boolean as the file has it; strings and arrays are the caller's.
            pub(super) fn put_le(&self, out: &mut Vec<u8>) {
                match self {
                    $(Value::$kind(number) => out.extend(number.to_le_bytes()),)*
                    Value::Bool(flag) => out.push((*flag).into()),
                    Value::String(_) | Value::Array(_) | Value::Nested(_) => {}
                }
            }
        }

        impl Array {
            /// The code of its elements' type.
            pub(super) fn code(&self) -> u32 {
                match self {
                    $(Array::$kind(_) => $code,)*
                    Array::Bool(_) => 7,
                    Array::Strings(_) => 8,
                }
            }

            /// Appends its numbers or booleans as the file has them; strings are the caller's.
            pub(super) fn put_le(&self, out: &mut Vec<u8>) {
                match self {
                    $(Array::$kind(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),)*
                    Array::Bool(items) => out.extend(items.iter().map(|flag| u8::from(*flag))),
                    Array::Strings(_) => {}
                }
            }

            /// An empty array of an element type; `None` for arrays of arrays.
            pub(super) fn new(kind: Kind) -> Option<Array> {
                match kind {
                    $(Kind::$kind => Some(Array::$kind(Vec::new())),)*
                    Kind::Bool => Some(Array::Bool(Vec::new())),
                    Kind::String => Some(Array::Strings(StringArray::default())),
                    Kind::Array => None,
                }
            }

            /// Number of elements.
            pub fn len(&self) -> usize {
                match self {
                    $(Array::$kind(items) => items.len(),)*
                    Array::Bool(items) => items.len(),
                    Array::Strings(strings) => strings.len(),
                }
            }

            /// Appends the little-endian elements in `bytes` (a whole number of them), or one string.
            pub(super) fn extend_le(&mut self, bytes: &[u8]) -> Result<()> {
                match self {
                    $(Array::$kind(items) => {
                        for element in bytes.chunks_exact(size_of::<$number>()) {
                            items.push($number::from_le_bytes(fixed(element)?));
                        }
                    })*
                    Array::Bool(items) => {
                        for &byte in bytes {
                            items.push(boolean(byte)?);
                        }
                    }
                    Array::Strings(strings) => strings.push_bytes(bytes)?,
                }
                Ok(())
            }

            /// Gives back what growing by doubling left over.
            pub(super) fn shrink_to_fit(&mut self) {
                match self {
                    $(Array::$kind(items) => items.shrink_to_fit(),)*
                    Array::Bool(items) => items.shrink_to_fit(),
                    Array::Strings(strings) => strings.shrink_to_fit(),
                }
            }
        }
    };
}

value_types! {
    U8 u8 0, I8 i8 1, U16 u16 2, I16 i16 3, U32 u32 4, I32 i32 5, F32 f32 6, U64 u64 10, I64 i64 11, F64 f64 12,
}

pub(super) fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N]> {
    bytes
        .try_into()
        .map_err(|_| Error::bad_model(format!("a number of {N} bytes is {} bytes long", bytes.len())))
}

/// GGUF: "0 is false, 1 is true", anything else is an invalid file.
fn boolean(byte: u8) -> Result<bool> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::bad_model(format!("a metadata boolean must be 0 or 1 and is {other}"))),
    }
}

impl Array {
    /// Whether the array has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All elements, when they are integers that i64 holds.
    pub fn integers(&self) -> Option<Vec<i64>> {
        match self {
            Array::U8(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Array::I8(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Array::U16(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Array::I16(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Array::U32(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Array::I32(items) => Some(items.iter().map(|&n| n.into()).collect()),
            Array::U64(items) => items.iter().map(|&n| i64::try_from(n).ok()).collect(),
            Array::I64(items) => Some(items.clone()),
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::Strings(_) => None,
        }
    }
}

impl Value {
    /// The value as an unsigned integer, from any number type that holds one exactly.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::U64(n) => Some(n),
            Value::I8(n) => u64::try_from(n).ok(),
            Value::I16(n) => u64::try_from(n).ok(),
            Value::I32(n) => u64::try_from(n).ok(),
            Value::I64(n) => u64::try_from(n).ok(),
            Value::F32(n) => whole(n.into()),
            Value::F64(n) => whole(n),
            Value::Bool(_) | Value::String(_) | Value::Array(_) | Value::Nested(_) => None,
        }
    }

    /// The value as a float, from any number type (64-bit integers are rounded to the nearest).
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::U8(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::U64(n) => Some(n as f64),
            Value::I8(n) => Some(n.into()),
            Value::I16(n) => Some(n.into()),
            Value::I32(n) => Some(n.into()),
            Value::I64(n) => Some(n as f64),
            Value::F32(n) => Some(n.into()),
            Value::F64(n) => Some(n),
            Value::Bool(_) | Value::String(_) | Value::Array(_) | Value::Nested(_) => None,
        }
    }
}

/// A float that is a whole number ≥ 0 and below 2^53, beyond which a float no longer tells neighbours apart.
fn whole(n: f64) -> Option<u64> {
    (n >= 0.0 && n < (1u64 << 53) as f64 && n.trunc() == n).then_some(n as u64)
}

/// All key–value pairs of one file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    values: BTreeMap<String, Value>,
}

impl Metadata {
    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A string; `None` when the key is absent or of another type, as in all getters below.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// An unsigned integer, written in any number type.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// A float, written in any number type.
    pub fn f64(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_f64()
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    /// An array of any element type but arrays.
    pub fn array(&self, key: &str) -> Option<&Array> {
        match self.get(key)? {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Option<&StringArray> {
        match self.array(key)? {
            Array::Strings(strings) => Some(strings),
            _ => None,
        }
    }

    /// An array of i32 (token types).
    pub fn i32s(&self, key: &str) -> Option<&[i32]> {
        match self.array(key)? {
            Array::I32(items) => Some(items),
            _ => None,
        }
    }

    /// An array of f32 (token scores).
    pub fn f32s(&self, key: &str) -> Option<&[f32]> {
        match self.array(key)? {
            Array::F32(items) => Some(items),
            _ => None,
        }
    }

    /// An array of integers of any width, copied (lists of ids).
    pub fn integers(&self, key: &str) -> Option<Vec<i64>> {
        self.array(key)?.integers()
    }

    /// Takes a value out, to own or to free it.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.values.remove(key)
    }

    /// Takes an array of strings out; a value of another type stays where it is.
    pub fn take_strings(&mut self, key: &str) -> Option<StringArray> {
        self.strings(key)?;
        match self.values.remove(key)? {
            Value::Array(Array::Strings(strings)) => Some(strings),
            _ => None,
        }
    }

    /// Sets a value and returns the one that stood there.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) -> Option<Value> {
        self.values.insert(key.into(), value)
    }

    /// All pairs, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> + '_ {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}
