//! Writes a header: what a reader found, less arrays that it does not need again.

use super::metadata::{Array, Metadata, Value};
use super::tensors::TensorInfo;

/// A GGUF header (version 3) of these pairs and of tensors that are sorted by offset, the first of which follows the
/// header. Arrays of arrays, which were not kept, are left out.
pub fn header(metadata: &Metadata, tensors: &[TensorInfo]) -> Vec<u8> {
    let pairs: Vec<(&str, &Value)> =
        metadata.iter().filter(|(_, value)| !matches!(value, Value::Nested(_))).collect();
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((pairs.len() as u64).to_le_bytes());
    for (key, value) in pairs {
        string(&mut out, key);
        out.extend(value.code().to_le_bytes());
        match value {
            Value::String(text) => string(&mut out, text),
            Value::Array(array) => {
                out.extend(array.code().to_le_bytes());
                out.extend((array.len() as u64).to_le_bytes());
                match array {
                    Array::Strings(strings) => strings.iter().for_each(|text| string(&mut out, text)),
                    numbers => numbers.put_le(&mut out),
                }
            }
            number => number.put_le(&mut out),
        }
    }
    let first = tensors.first().map_or(0, |info| info.offset);
    for info in tensors {
        string(&mut out, &info.name);
        out.extend((info.shape.len() as u32).to_le_bytes());
        for n in info.shape.iter().rev() {
            out.extend((*n as u64).to_le_bytes());
        }
        out.extend(info.dtype.ggml().to_le_bytes());
        out.extend((info.offset - first).to_le_bytes());
    }
    out
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::HeaderReader;
    use crate::kernels::DType;

    #[test]
    fn what_is_written_reads_back_the_same() {
        let mut metadata = Metadata::default();
        metadata.insert("a.text", Value::String("ö\n".into()));
        metadata.insert("b.flag", Value::Bool(true));
        metadata.insert("c.small", Value::I8(-3));
        metadata.insert("d.wide", Value::F64(0.25));
        metadata.insert("e.bytes", Value::Array(Array::U16(vec![1, 700])));
        metadata.insert("f.flags", Value::Array(Array::Bool(vec![true, false])));
        metadata.insert("g.texts", Value::Array(Array::Strings(["x", "", "yz"].into_iter().collect())));
        let info = |name: &str, dtype, shape: &[usize], offset, bytes| TensorInfo {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            offset,
            bytes,
        };
        let tensors = [info("t", DType::Q8_0, &[2, 32], 96, 68), info("u", DType::F32, &[3], 96 + 96, 12)];
        let bytes = header(&metadata, &tensors);
        let mut reader = HeaderReader::new(None);
        let padding = [0; 64];
        let read = [&bytes[..], &padding].iter().find_map(|part| reader.push(part).expect("it is sound"));
        let read = read.expect("it is whole");
        assert_eq!(read.metadata, metadata);
        let moved = tensors.map(|info| TensorInfo { offset: info.offset - 96 + read.data_offset, ..info });
        assert_eq!(read.tensors, moved);
    }
}
