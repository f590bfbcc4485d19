//! A stream of file bytes becomes packed weights, tensor by tensor in file order, with flat memory: no whole file, no
//! whole tensor in its file form, no f32 copy of a matrix. The header is checked against what Qwen2 needs, by tensor
//! name, shape and type, before the first weight byte is asked for.

use crate::config::{self, head_dim, Config};
use crate::error::{Error, Result};
use crate::gguf::{Header, HeaderReader, Metadata, TensorInfo};
use crate::kernels::{rope::Rope, DType, PackedMatrix, Packer};
use crate::kv_cache::KvKind;
use crate::model::{Attention, Layer, Linear, Mlp, Model, RmsNorm};
use std::collections::HashMap;
use std::sync::Arc;

/// What a wasm32 memory can hold at most, less what the stack, tokenizer and activations need.
const MEMORY_LIMIT: u64 = (4096 - 192) << 20;

/// What will be loaded, known from the header alone.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Hyper-parameters.
    pub config: Config,
    /// Bytes of all tensors in the file.
    pub tensor_bytes: u64,
    /// Bytes of the packed weights in memory.
    pub packed_bytes: u64,
    /// File position behind the last tensor.
    pub end: u64,
    /// The matrix type that holds the most bytes, as in `Q4_K`.
    pub quantization: &'static str,
    tensors: Vec<TensorInfo>, // by offset
}

impl Plan {
    /// The types of the matrices, each once, in file order.
    pub fn matrix_types(&self) -> Vec<DType> {
        let mut types = Vec::new();
        for info in self.tensors.iter().filter(|info| info.shape.len() == 2) {
            if !types.contains(&info.dtype) {
                types.push(info.dtype);
            }
        }
        types
    }
}

/// Takes the file's bytes in order and in any split.
pub struct Loader {
    state: State,
    position: u64,
}

enum State {
    Header(Box<HeaderReader>),
    Tensors(Box<Tensors>),
    Failed,
}

struct Tensors {
    plan: Plan,
    metadata: Metadata,
    next: usize,
    packer: Option<Packer>,
    packed: HashMap<String, PackedMatrix>,
}

impl Loader {
    /// A loader of a file of `file_bytes`, where the length is known.
    pub fn new(file_bytes: Option<u64>) -> Self {
        Self { state: State::Header(Box::new(HeaderReader::new(file_bytes))), position: 0 }
    }

    /// Takes the next bytes of the file.
    ///
    /// # Errors
    /// Whatever is wrong with header or tensors; the loader is useless afterwards.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let result = self.push_inner(bytes);
        if result.is_err() {
            self.state = State::Failed;
        }
        result
    }

    fn push_inner(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.state {
            State::Failed => Err(Error::bad_model("loading failed earlier")),
            State::Tensors(tensors) => {
                let from = self.position;
                self.position += bytes.len() as u64;
                tensors.push(bytes, from)
            }
            State::Header(reader) => {
                self.position += bytes.len() as u64;
                if let Some(header) = reader.push(bytes)? {
                    let (rest, from) = (reader.unused().to_vec(), reader.unused_offset());
                    let mut tensors = Box::new(Tensors::new(header)?);
                    tensors.push(&rest, from)?;
                    self.state = State::Tensors(tensors);
                }
                Ok(())
            }
        }
    }

    /// The plan, as soon as the header is whole.
    pub fn plan(&self) -> Option<&Plan> {
        match &self.state {
            State::Tensors(tensors) => Some(&tensors.plan),
            _ => None,
        }
    }

    /// The file's metadata, as soon as the header is whole. Large arrays may be taken out to free their memory.
    pub fn metadata(&mut self) -> Option<&mut Metadata> {
        match &mut self.state {
            State::Tensors(tensors) => Some(&mut tensors.metadata),
            _ => None,
        }
    }

    /// Bytes taken so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Whether every tensor is complete (what follows in the file is not needed).
    pub fn is_complete(&self) -> bool {
        matches!(&self.state, State::Tensors(t) if t.next == t.plan.tensors.len())
    }

    /// The model, when the file is at its end.
    ///
    /// # Errors
    /// `bad_model` where it ends too early.
    pub fn finish(self) -> Result<(Model, Plan)> {
        match self.state {
            State::Header(reader) => {
                reader.finish()?;
                Err(Error::bad_model(format!("the file ends in its header, after {} bytes", self.position)))
            }
            State::Failed => Err(Error::bad_model("loading failed earlier")),
            State::Tensors(tensors) => match tensors.plan.tensors.get(tensors.next) {
                Some(missing) => Err(Error::bad_model(format!(
                    "the file ends after {} bytes, but tensor {} needs bytes {} to {}",
                    self.position,
                    missing.name,
                    missing.offset,
                    missing.offset + missing.bytes
                ))),
                None => {
                    let Tensors { plan, packed, .. } = *tensors;
                    Ok((Assembly { packed, config: &plan.config }.model()?, plan))
                }
            },
        }
    }
}

impl Tensors {
    fn new(header: Header) -> Result<Self> {
        let Header { metadata, tensors, .. } = header;
        let plan = plan(&metadata, tensors)?;
        Ok(Self { plan, metadata, next: 0, packer: None, packed: HashMap::new() })
    }

    /// `bytes` stand at file position `from`.
    fn push(&mut self, mut bytes: &[u8], mut from: u64) -> Result<()> {
        while let Some(info) = self.plan.tensors.get(self.next) {
            if from < info.offset {
                let skip = (info.offset - from).min(bytes.len() as u64);
                bytes = &bytes[skip as usize..];
                from += skip;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let packer = match &mut self.packer {
                Some(packer) => packer,
                None => {
                    let (rows, cols) = dims(info);
                    self.packer.insert(Packer::new(info.dtype, rows, cols)?)
                }
            };
            let take = (info.offset + info.bytes - from).min(bytes.len() as u64);
            packer.push(&bytes[..take as usize])?;
            bytes = &bytes[take as usize..];
            from += take;
            if from == info.offset + info.bytes {
                if let Some(packer) = self.packer.take() {
                    self.packed.insert(info.name.clone(), packer.finish()?);
                }
                self.next += 1;
            }
        }
        Ok(())
    }
}

fn dims(info: &TensorInfo) -> (usize, usize) {
    match info.shape[..] {
        [rows, cols] => (rows, cols),
        [cols] => (1, cols),
        _ => (0, 0),
    }
}

fn plan(metadata: &Metadata, tensors: Vec<TensorInfo>) -> Result<Plan> {
    config::check_architecture(metadata)?;
    let by_name: HashMap<&str, &TensorInfo> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    let embedding =
        by_name.get(TOKEN_EMBD).ok_or_else(|| Error::bad_model(format!("tensor {TOKEN_EMBD} is missing")))?;
    let tied = !by_name.contains_key(OUTPUT);
    let config = config::from_gguf(metadata, dims(embedding).0, tied)?;
    let expected = expected(&config);
    for (name, shape) in &expected {
        let info = by_name.get(name.as_str()).ok_or_else(|| {
            Error::bad_model(format!("tensor {name} is missing (expected shape {shape:?})"))
        })?;
        if info.shape != *shape {
            return Err(Error::bad_model(format!(
                "tensor {name} has shape {:?}, expected {shape:?}",
                info.shape
            )));
        }
    }
    if by_name.len() != expected.len() {
        let known: std::collections::HashSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        if let Some(extra) = tensors.iter().find(|t| !known.contains(t.name.as_str())) {
            return Err(Error::unsupported_model(format!(
                "tensor {} ({}) has no place in the qwen2 architecture",
                extra.name,
                extra.dtype.name()
            )));
        }
    }
    let mut packed_bytes = 0;
    let mut by_type: HashMap<&'static str, u64> = HashMap::new();
    for info in &tensors {
        let (rows, cols) = dims(info);
        packed_bytes += PackedMatrix::packed_bytes(info.dtype, rows, cols)? as u64;
        if info.shape.len() == 2 && info.name != TOKEN_EMBD && info.name != OUTPUT {
            *by_type.entry(info.dtype.name()).or_default() += info.bytes;
        }
    }
    if packed_bytes > MEMORY_LIMIT {
        return Err(Error::too_large(format!(
            "the weights need {packed_bytes} bytes of memory, at most {MEMORY_LIMIT} can be had; take a smaller model or quantization"
        )));
    }
    let quantization =
        by_type.into_iter().max_by_key(|(name, bytes)| (*bytes, *name)).map_or("F32", |(n, _)| n);
    Ok(Plan {
        tensor_bytes: tensors.iter().map(|t| t.bytes).sum(),
        end: tensors.iter().map(|t| t.offset + t.bytes).max().unwrap_or(0),
        config,
        packed_bytes,
        quantization,
        tensors,
    })
}

const TOKEN_EMBD: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";
const OUTPUT_NORM: &str = "output_norm.weight";

/// Every tensor of the architecture with its shape, matrices as [rows, columns].
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

/// The packed tensors on their way into the model's fields.
struct Assembly<'a> {
    packed: HashMap<String, PackedMatrix>,
    config: &'a Config,
}

impl Assembly<'_> {
    fn model(mut self) -> Result<Model> {
        let config = self.config.clone();
        let embed_tokens = Arc::new(self.matrix(TOKEN_EMBD)?);
        let head =
            if config.tie_word_embeddings { embed_tokens.clone() } else { Arc::new(self.matrix(OUTPUT)?) };
        let layers = (0..config.num_hidden_layers).map(|i| self.layer(i)).collect::<Result<_>>()?;
        Ok(Model {
            norm: self.norm(OUTPUT_NORM)?,
            lm_head: Linear::new("lm_head", vec![(head, None)]),
            rope: Rope::new(head_dim(&config), config.rope_theta),
            kv: KvKind::default(),
            embed_tokens,
            layers,
            config,
        })
    }

    fn layer(&mut self, i: usize) -> Result<Layer> {
        let name = |part: &str| format!("blk.{i}.{part}");
        Ok(Layer {
            input_layernorm: self.norm(&name("attn_norm.weight"))?,
            self_attn: Attention {
                qkv_proj: Linear::new(
                    "qkv_proj",
                    vec![
                        self.biased(&name("attn_q"))?,
                        self.biased(&name("attn_k"))?,
                        self.biased(&name("attn_v"))?,
                    ],
                ),
                o_proj: Linear::new("o_proj", vec![self.plain(&name("attn_output.weight"))?]),
                num_heads: self.config.num_attention_heads,
            },
            post_attention_layernorm: self.norm(&name("ffn_norm.weight"))?,
            mlp: Mlp {
                gate_up_proj: Linear::new(
                    "gate_up_proj",
                    vec![self.plain(&name("ffn_gate.weight"))?, self.plain(&name("ffn_up.weight"))?],
                ),
                down_proj: Linear::new("down_proj", vec![self.plain(&name("ffn_down.weight"))?]),
            },
        })
    }

    fn plain(&mut self, name: &str) -> Result<(Arc<PackedMatrix>, Option<Vec<f32>>)> {
        Ok((Arc::new(self.matrix(name)?), None))
    }

    fn biased(&mut self, stem: &str) -> Result<(Arc<PackedMatrix>, Option<Vec<f32>>)> {
        let weight = Arc::new(self.matrix(&format!("{stem}.weight"))?);
        Ok((weight, Some(self.vector(&format!("{stem}.bias"))?)))
    }

    fn norm(&mut self, name: &str) -> Result<RmsNorm> {
        Ok(RmsNorm { weight: self.vector(name)?, eps: self.config.rms_norm_eps as f32 })
    }

    fn matrix(&mut self, name: &str) -> Result<PackedMatrix> {
        self.packed.remove(name).ok_or_else(|| Error::bad_model(format!("tensor {name} is missing")))
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>> {
        let packed = self.matrix(name)?;
        let mut values = vec![0.0; packed.cols()];
        packed.dequantize_row(0, &mut values);
        Ok(values)
    }
}

/// Loads a whole file that is in memory already (tests and small models).
pub fn load_bytes(bytes: &[u8]) -> Result<(Model, Metadata, Plan)> {
    let mut loader = Loader::new(Some(bytes.len() as u64));
    loader.push(bytes)?;
    let metadata = loader.metadata().map(std::mem::take).unwrap_or_default();
    let (model, plan) = loader.finish()?;
    Ok((model, metadata, plan))
}
