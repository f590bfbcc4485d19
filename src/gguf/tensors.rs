//! The tensor table of a GGUF file: what each entry must be before anything may rely on it.
//!
//! One entry is checked as it arrives ([`tensor_info`]: shape, type, blocks, alignment), the table as a whole at the
//! end of the header ([`place`]: unique names, ranges that neither overlap nor leave the file).

use crate::error::{Error, Result};
use crate::kernels::dtype::DType;

/// Tensors have at most four dimensions (`GGML_MAX_DIMS`).
pub(super) const MAX_DIMS: u32 = 4;
/// Where data may end: positions cross to JavaScript as doubles, which count exactly up to here.
const MAX_POSITION: u64 = 1 << 53;

/// One tensor of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// How its elements are stored.
    pub dtype: DType,
    /// Row-major shape, `[rows, cols]` or `[len]`: the file's order reversed, and leading ones beyond two dimensions
    /// dropped. Only experts and vision models have three or four dimensions.
    pub shape: Vec<usize>,
    /// Position of the first byte in the file.
    pub offset: u64,
    /// Number of bytes in the file.
    pub bytes: u64,
}

/// Checks one entry. `dims` are the file's, contiguous dimension first; the offset stays relative to the data section.
pub(super) fn tensor_info(
    name: String,
    dims: &[u64],
    ggml_type: u32,
    offset: u64,
    alignment: u64,
) -> Result<TensorInfo> {
    let bad = |what: String| Error::bad_model(format!("tensor {name:?}: {what}"));
    if let Some(zero) = dims.iter().position(|&dim| dim == 0) {
        return Err(bad(format!("dimension {zero} of {dims:?} is zero")));
    }
    let elements = dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .ok_or_else(|| bad(format!("the element count of {dims:?} passes 64 bits")))?;
    let dtype = DType::from_ggml(ggml_type).ok_or_else(|| {
        Error::unsupported_quantization(format!(
            "tensor {name:?} is of type {}; served are {}",
            ggml_type_name(ggml_type),
            served()
        ))
    })?;
    let block = dtype.block_len() as u64;
    if !dims[0].is_multiple_of(block) {
        return Err(bad(format!(
            "rows of {} elements are no multiple of {}'s block of {block}",
            dims[0],
            dtype.name()
        )));
    }
    let bytes = (elements / block)
        .checked_mul(dtype.block_bytes() as u64)
        .filter(|&bytes| bytes < MAX_POSITION)
        .ok_or_else(|| {
            bad(format!("{dims:?} elements of {} are more bytes than a file can hold", dtype.name()))
        })?;
    if !offset.is_multiple_of(alignment) {
        return Err(bad(format!("offset {offset} is no multiple of the alignment {alignment}")));
    }
    let used = dims.iter().rposition(|&dim| dim != 1).map_or(1, |last| last + 1);
    let kept = used.max(dims.len().min(2));
    let shape = dims[..kept]
        .iter()
        .rev()
        .map(|&dim| u32::try_from(dim).map(|dim| dim as usize))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| bad(format!("a dimension of {dims:?} passes 32 bits")))?;
    Ok(TensorInfo { name, dtype, shape, offset, bytes })
}

/// Turns relative offsets into file positions, sorts by them, and checks the table as a whole.
pub(super) fn place(tensors: &mut [TensorInfo], data_offset: u64, file_bytes: Option<u64>) -> Result<()> {
    for tensor in tensors.iter_mut() {
        let start = data_offset.checked_add(tensor.offset);
        let end = start.and_then(|start| start.checked_add(tensor.bytes)).filter(|&end| end <= MAX_POSITION);
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Error::bad_model(format!(
                "tensor {:?}: offset {} lies beyond any file",
                tensor.name, tensor.offset
            )));
        };
        if let Some(file) = file_bytes.filter(|&file| end > file) {
            return Err(Error::bad_model(format!(
                "the file has {file} bytes, tensor {:?} needs {end}: it is cut short or its header is wrong",
                tensor.name
            )));
        }
        tensor.offset = start;
    }
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some(twins) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::bad_model(format!("two tensors are named {:?}", twins[0].name)));
    }
    tensors.sort_by_key(|tensor| tensor.offset);
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].offset + pair[0].bytes > pair[1].offset) {
        return Err(Error::bad_model(format!(
            "tensors {:?} and {:?} overlap: {} bytes from {} and {} bytes from {}",
            pair[0].name, pair[1].name, pair[0].bytes, pair[0].offset, pair[1].bytes, pair[1].offset
        )));
    }
    Ok(())
}

/// Names of the types this engine serves, for messages.
fn served() -> String {
    DType::ALL.map(DType::name).join(", ")
}

/// ggml's name of a type (`enum ggml_type` in ggml.h), for messages; types that were removed are named too.
fn ggml_type_name(code: u32) -> String {
    let name = match code {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        4 => "Q4_2",
        5 => "Q4_3",
        6 => "Q5_0",
        7 => "Q5_1",
        8 => "Q8_0",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        30 => "BF16",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        other => return format!("{other}, which ggml does not define"),
    };
    name.to_string()
}
