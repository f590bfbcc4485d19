//! What will be loaded, known from headers alone: each tensor's place in the files and in the model, checked against what
//! Qwen2 needs by name, shape and type.

use super::Quantize;
use crate::config::{self, head_dim, Config};
use crate::error::{Error, Result};
use crate::gguf::{Metadata, TensorInfo};
use crate::kernels::{DType, PackedMatrix, Quantizer};
use std::collections::HashMap;

/// What a wasm32 memory can hold at most, less what the stack, tokenizer and activations need.
const MEMORY_LIMIT: u64 = (4096 - 192) << 20;

/// GGUF names, by which the model's fields find their tensors.
/// The embedding's name in a GGUF file.
pub const TOKEN_EMBD: &str = "token_embd.weight";
pub(super) const OUTPUT: &str = "output.weight";
pub(super) const OUTPUT_NORM: &str = "output_norm.weight";

/// What will be loaded, known from the headers alone.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Hyper-parameters.
    pub config: Config,
    /// Bytes of all tensors in the files.
    pub tensor_bytes: u64,
    /// Bytes of the packed weights in memory.
    pub packed_bytes: u64,
    /// Bytes to read: the position behind the last tensor, of several files the sum of these positions.
    pub end: u64,
    /// Of each file the position behind its last tensor.
    pub file_ends: Vec<u64>,
    /// The matrix type in memory that holds the most bytes, as in `Q4_K`.
    pub quantization: &'static str,
    /// By file and offset.
    pub(super) tensors: Vec<Placed>,
}

/// A tensor with its place in the model.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    /// Its GGUF name.
    pub(super) key: String,
    /// What its file says of it, under the file's own name.
    pub(super) info: TensorInfo,
    /// Index of the file.
    pub(super) file: usize,
    /// Its type in memory.
    pub(super) packed: DType,
}

impl Placed {
    /// Rows and columns; a vector is one row.
    pub(super) fn dims(&self) -> (usize, usize) {
        dims(&self.info)
    }

    fn is_matrix(&self) -> bool {
        self.info.shape.len() == 2
    }
}

/// How a format calls the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    Gguf,
    HuggingFace,
}

impl Names {
    /// The name of the tensor that GGUF calls `key`.
    fn name(self, key: &str) -> String {
        match (self, key) {
            (Names::Gguf, _) => key.to_string(),
            (_, TOKEN_EMBD) => "model.embed_tokens.weight".to_string(),
            (_, OUTPUT) => "lm_head.weight".to_string(),
            (_, OUTPUT_NORM) => "model.norm.weight".to_string(),
            _ => {
                let mut parts = key.splitn(3, '.').skip(1);
                let (layer, part) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
                let (part, kind) = part.split_once('.').unwrap_or((part, ""));
                let module = match part {
                    "attn_norm" => "input_layernorm",
                    "attn_q" => "self_attn.q_proj",
                    "attn_k" => "self_attn.k_proj",
                    "attn_v" => "self_attn.v_proj",
                    "attn_output" => "self_attn.o_proj",
                    "ffn_norm" => "post_attention_layernorm",
                    "ffn_gate" => "mlp.gate_proj",
                    "ffn_up" => "mlp.up_proj",
                    "ffn_down" => "mlp.down_proj",
                    other => other,
                };
                format!("model.layers.{layer}.{module}.{kind}")
            }
        }
    }

    /// Whether a tensor without a place in the model may be read over: tables that old checkpoints hold, and a head that is
    /// the embedding once more, as transformers and llama.cpp do.
    fn ignores(self, name: &str, config: &Config) -> bool {
        self == Names::HuggingFace
            && (name.ends_with(".rotary_emb.inv_freq")
                || name == "lm_head.weight" && config.tie_word_embeddings)
    }
}

impl Plan {
    /// The plan of one GGUF file, or of all shards in order.
    pub(super) fn of_gguf(metadata: &Metadata, files: Vec<Vec<TensorInfo>>) -> Result<Plan> {
        config::check_architecture(metadata)?;
        let find = |name: &str| files.iter().flatten().find(|info| info.name == name);
        let embedding =
            find(TOKEN_EMBD).ok_or_else(|| Error::bad_model(format!("tensor {TOKEN_EMBD} is missing")))?;
        let config = config::from_gguf(metadata, dims(embedding).0, find(OUTPUT).is_none())?;
        let plan = Plan::new(config, files, Names::Gguf, Quantize::None)?;
        let told = metadata.u64("general.file_type").and_then(file_type_name);
        Ok(Plan { quantization: told.unwrap_or(plan.quantization), ..plan })
    }

    /// The plan of one or several safetensors files.
    pub(super) fn of_safetensors(
        config: Config,
        files: Vec<Vec<TensorInfo>>,
        quantize: Quantize,
    ) -> Result<Plan> {
        Plan::new(config, files, Names::HuggingFace, quantize)
    }

    fn new(config: Config, files: Vec<Vec<TensorInfo>>, names: Names, quantize: Quantize) -> Result<Plan> {
        let count = files.len();
        let mut left = by_name(files)?;
        let mut tensors = Vec::new();
        for (key, shape) in expected(&config) {
            let name = names.name(&key);
            let (file, info) = left.remove(&name).ok_or_else(|| {
                Error::bad_model(format!("tensor {name} is missing (expected shape {shape:?})"))
            })?;
            if info.shape != shape {
                return Err(Error::bad_model(format!(
                    "tensor {name} has shape {:?}, expected {shape:?}",
                    info.shape
                )));
            }
            let packed = quantize.kept_as(&key, &info);
            tensors.push(Placed { key, info, file, packed });
        }
        left.retain(|name, _| !names.ignores(name, &config));
        if let Some((_, extra)) = left.values().min_by_key(|(file, info)| (*file, info.offset)) {
            return Err(Error::unsupported_model(format!(
                "tensor {} ({}) has no place in the qwen2 architecture",
                extra.name,
                extra.dtype.name()
            )));
        }
        tensors.sort_by_key(|tensor| (tensor.file, tensor.info.offset));
        let mut file_ends = vec![0; count];
        for Placed { file, info, .. } in &tensors {
            file_ends[*file] = info.offset + info.bytes;
        }
        Ok(Plan {
            config,
            tensor_bytes: tensors.iter().map(|tensor| tensor.info.bytes).sum(),
            packed_bytes: packed_bytes(&tensors)?,
            end: file_ends.iter().sum(),
            file_ends,
            quantization: quantization(&tensors),
            tensors,
        })
    }

    /// The tensors as they are in memory, under their GGUF names, as if they lay in one file.
    pub fn packed_tensors(&self) -> Vec<TensorInfo> {
        let mut offset = 0;
        let tensor = |Placed { key, info, packed, .. }: &Placed| {
            let numbers = info.shape.iter().map(|n| *n as u64).product::<u64>();
            let bytes = numbers / packed.block_len() as u64 * packed.block_bytes() as u64;
            let place = offset;
            offset = (offset + bytes).next_multiple_of(32);
            TensorInfo { name: key.clone(), dtype: *packed, shape: info.shape.clone(), offset: place, bytes }
        };
        self.tensors.iter().map(tensor).collect()
    }

    /// Numbers in all tensors.
    pub fn parameters(&self) -> u64 {
        let numbers = |tensor: &Placed| tensor.info.shape.iter().map(|n| *n as u64).product::<u64>();
        self.tensors.iter().map(numbers).sum()
    }

    /// The types of the matrices in memory, each once, in file order.
    pub fn matrix_types(&self) -> Vec<DType> {
        let mut types = Vec::new();
        for tensor in self.tensors.iter().filter(|tensor| tensor.is_matrix()) {
            if !types.contains(&tensor.packed) {
                types.push(tensor.packed);
            }
        }
        types
    }
}

impl Quantize {
    /// The type in memory of a tensor: matrices with rows of whole blocks change, all others stay as they are.
    fn kept_as(self, key: &str, info: &TensorInfo) -> DType {
        if info.shape.len() != 2 || !Quantizer::serves(info.dtype, info.shape[1]) {
            return info.dtype;
        }
        match self {
            Quantize::None => info.dtype,
            Quantize::Q8_0 => DType::Q8_0,
            Quantize::Q4_0 if key == TOKEN_EMBD || key == OUTPUT => DType::Q8_0,
            Quantize::Q4_0 => DType::Q4_0,
        }
    }
}

/// All tensors by name, with the index of their file.
fn by_name(files: Vec<Vec<TensorInfo>>) -> Result<HashMap<String, (usize, TensorInfo)>> {
    let mut all: HashMap<String, (usize, TensorInfo)> = HashMap::new();
    for (file, infos) in files.into_iter().enumerate() {
        for info in infos {
            if let Some((other, info)) = all.insert(info.name.clone(), (file, info)) {
                return Err(Error::bad_model(format!(
                    "tensor {} is in two files, {} and {}",
                    info.name,
                    other + 1,
                    file + 1
                )));
            }
        }
    }
    Ok(all)
}

fn packed_bytes(tensors: &[Placed]) -> Result<u64> {
    let mut bytes = 0;
    for tensor in tensors {
        let (rows, cols) = tensor.dims();
        bytes += PackedMatrix::packed_bytes(tensor.packed, rows, cols)? as u64;
    }
    if bytes > MEMORY_LIMIT {
        return Err(Error::too_large(format!(
            "the weights need {bytes} bytes of memory, at most {MEMORY_LIMIT} can be had; take a smaller model or quantization"
        )));
    }
    Ok(bytes)
}

/// The usual name of GGUF's `general.file_type`.
fn file_type_name(file_type: u64) -> Option<&'static str> {
    Some(match file_type {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        25 => "IQ4_NL",
        32 => "BF16",
        _ => return None,
    })
}

/// Name of the type that most bytes of the layers' matrices have.
fn quantization(tensors: &[Placed]) -> &'static str {
    let mut by_type: HashMap<&'static str, u64> = HashMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.is_matrix()) {
        if tensor.key != TOKEN_EMBD && tensor.key != OUTPUT {
            *by_type.entry(tensor.packed.name()).or_default() += tensor.info.bytes;
        }
    }
    by_type.into_iter().max_by_key(|(name, bytes)| (*bytes, *name)).map_or("F32", |(name, _)| name)
}

/// Rows and columns; a vector is one row.
pub fn dims(info: &TensorInfo) -> (usize, usize) {
    match info.shape[..] {
        [rows, cols] => (rows, cols),
        [cols] => (1, cols),
        _ => (0, 0),
    }
}

/// Every tensor of the architecture under its GGUF name with its shape, matrices as [rows, columns].
fn expected(c: &Config) -> Vec<(String, Vec<usize>)> {
    let (width, inner) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (c.num_attention_heads * head_dim(c), c.num_key_value_heads * head_dim(c));
    let mut list =
        vec![(TOKEN_EMBD.to_string(), vec![c.vocab_size, width]), (OUTPUT_NORM.to_string(), vec![width])];
    if !c.tie_word_embeddings {
        list.push((OUTPUT.to_string(), vec![c.vocab_size, width]));
    }
    for i in 0..c.num_hidden_layers {
        let shapes: [(&str, Vec<usize>); 12] = [
            ("attn_norm.weight", vec![width]),
            ("attn_q.weight", vec![q, width]),
            ("attn_q.bias", vec![q]),
            ("attn_k.weight", vec![kv, width]),
            ("attn_k.bias", vec![kv]),
            ("attn_v.weight", vec![kv, width]),
            ("attn_v.bias", vec![kv]),
            ("attn_output.weight", vec![width, q]),
            ("ffn_norm.weight", vec![width]),
            ("ffn_gate.weight", vec![inner, width]),
            ("ffn_up.weight", vec![inner, width]),
            ("ffn_down.weight", vec![width, inner]),
        ];
        list.extend(shapes.map(|(name, shape)| (format!("blk.{i}.{name}"), shape)));
    }
    list
}
