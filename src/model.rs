//! Qwen2 (and its relatives of the same architecture) on candle tensors: `Config → Attention → Mlp → Layer → Model`.
//!
//! The weights are immutable; keys and values live in the caller's [`KvCache`]. Every linear layer, norm and attention is a
//! candle custom op on our packed kernels. A forward [`Pass`] advances one layer at a time, so that its caller can
//! return to the event loop in between.

use crate::config::{head_dim, kv_shape, Config};
use crate::error::{Error, Result};
use crate::kernels::{activation, attention, matmul, norm, rope::Rope, Activations, Job, PackedMatrix};
use crate::kv_cache::KvCache;
use crate::metrics::{book_pass, ms_since, timed};
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor};
use std::cell::RefCell;
use std::sync::Arc;
use web_time::Instant;

/// One or more matrices that read the same input, with their biases; outputs lie side by side.
pub struct Linear {
    name: &'static str,
    parts: Vec<(Arc<PackedMatrix>, Option<Vec<f32>>)>,
    rows: usize,
    bytes: u64,
}

impl Linear {
    /// All parts must have the same number of columns.
    pub fn new(name: &'static str, parts: Vec<(Arc<PackedMatrix>, Option<Vec<f32>>)>) -> Self {
        let rows = parts.iter().map(|(w, _)| w.rows()).sum();
        let bytes = parts.iter().map(|(w, _)| w.bytes() as u64).sum();
        Self { name, parts, rows, bytes }
    }

    fn forward(&self, xs: &Tensor) -> candle_core::Result<Tensor> {
        xs.apply_op1_no_bwd(self) // (T, rows)
    }
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, k) = layout.shape().dims2()?;
        let xs = contiguous(storage, layout)?;
        let mut out = vec![0.0; t * self.rows];
        let ops = 2 * t as u64 * k as u64 * self.rows as u64;
        timed(self.name, self.bytes, ops, || {
            let mut at = 0;
            let jobs: Vec<Job> = self
                .parts
                .iter()
                .map(|(w, bias)| {
                    let job = Job { w, bias: bias.as_deref(), at };
                    at += w.rows();
                    job
                })
                .collect();
            matmul(&jobs, &Activations::new(xs, t, k), &mut out, self.rows);
        });
        Ok((CpuStorage::F32(out), (t, self.rows).into()))
    }
}

/// Root-mean-square normalisation with a learned gain.
pub struct RmsNorm {
    /// The gain, (C).
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

impl RmsNorm {
    fn forward(&self, xs: &Tensor) -> candle_core::Result<Tensor> {
        xs.apply_op1_no_bwd(self) // (T, C)
    }
}

impl CustomOp1 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = contiguous(storage, layout)?;
        let mut out = vec![0.0; xs.len()];
        timed("rms_norm", 0, 4 * xs.len() as u64, || norm::rms_norm(xs, &self.weight, self.eps, &mut out));
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

struct SwiGlu;

impl CustomOp1 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, both) = layout.shape().dims2()?;
        let xs = contiguous(storage, layout)?;
        let mut out = vec![0.0; xs.len() / 2];
        timed("swiglu", 0, 12 * out.len() as u64, || activation::swiglu(xs, both / 2, &mut out));
        Ok((CpuStorage::F32(out), (t, both / 2).into()))
    }
}

/// RoPE, the write of keys and values, and attention, for one layer and the T positions after the cache's end.
struct Attend<'a> {
    attention: &'a Attention,
    layer: usize,
    rope: &'a Rope,
    cache: RefCell<&'a mut KvCache>,
}

impl CustomOp1 for Attend<'_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, width) = layout.shape().dims2()?;
        let cache = &mut **self.cache.borrow_mut();
        let shape = cache.shape();
        let heads = self.attention.num_heads;
        let (q_width, kv_width) = (heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let start = cache.len();
        let mut qkv = contiguous(storage, layout)?.to_vec(); // (T, (H + 2·Hkv)·D)
        timed("rope_and_kv", 0, 6 * (t * (q_width + kv_width)) as u64, || {
            self.rope.apply(&mut qkv, width, heads + shape.kv_heads, start);
            for (i, row) in qkv.chunks_exact(width).enumerate() {
                let (k, v) = row[q_width..].split_at(kv_width);
                cache.write(self.layer, i, k, v)?;
            }
            Ok::<(), Error>(())
        })
        .map_err(candle_core::Error::wrap)?;
        let mut out = vec![0.0; t * q_width];
        let seen = start + t;
        let bytes = (seen * kv_width * 4) as u64;
        timed("attention", bytes, 4 * t as u64 * seen as u64 * q_width as u64, || {
            attention::Attention { heads, layer: self.layer, start }.run(&qkv, width, cache, &mut out)
        });
        Ok((CpuStorage::F32(out), (t, q_width).into()))
    }
}

fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    let (from, to) = layout
        .contiguous_offsets()
        .ok_or_else(|| candle_core::Error::Msg("expected a contiguous tensor".into()))?;
    Ok(&storage.as_slice::<f32>()?[from..to])
}

/// Grouped-query self-attention; q, k and v are one linear layer.
pub struct Attention {
    /// `attn_q`, `attn_k`, `attn_v` with biases: (T, C) → (T, (H + 2·Hkv)·D).
    pub qkv_proj: Linear,
    /// `attn_output`: (T, H·D) → (T, C).
    pub o_proj: Linear,
    /// Query heads, `H`.
    pub num_heads: usize,
}

impl Attention {
    fn forward(
        &self,
        xs: &Tensor,
        layer: usize,
        rope: &Rope,
        cache: &mut KvCache,
    ) -> candle_core::Result<Tensor> {
        let qkv = self.qkv_proj.forward(xs)?; // (T, (H + 2·Hkv)·D)
        let attend = Attend { attention: self, layer, rope, cache: RefCell::new(cache) };
        let ys = qkv.apply_op1_no_bwd(&attend)?; // (T, H·D)
        self.o_proj.forward(&ys)
    }
}

/// The gated MLP; gate and up are one linear layer.
pub struct Mlp {
    /// `ffn_gate`, `ffn_up`: (T, C) → (T, 2·I).
    pub gate_up_proj: Linear,
    /// `ffn_down`: (T, I) → (T, C).
    pub down_proj: Linear,
}

impl Mlp {
    fn forward(&self, xs: &Tensor) -> candle_core::Result<Tensor> {
        let gate_up = self.gate_up_proj.forward(xs)?; // (T, 2·I)
        self.down_proj.forward(&gate_up.apply_op1_no_bwd(&SwiGlu)?)
    }
}

/// One transformer block.
pub struct Layer {
    /// `attn_norm`.
    pub input_layernorm: RmsNorm,
    /// Self-attention.
    pub self_attn: Attention,
    /// `ffn_norm`.
    pub post_attention_layernorm: RmsNorm,
    /// Feed-forward part.
    pub mlp: Mlp,
}

impl Layer {
    fn forward(
        &self,
        xs: &Tensor,
        layer: usize,
        rope: &Rope,
        cache: &mut KvCache,
    ) -> candle_core::Result<Tensor> {
        let ys = self.self_attn.forward(&self.input_layernorm.forward(xs)?, layer, rope, cache)?;
        let xs = (xs + ys)?;
        let ys = self.mlp.forward(&self.post_attention_layernorm.forward(&xs)?)?;
        xs + ys
    }
}

/// Which logits a pass gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None: the pass only fills the cache.
    Nothing,
    /// The last position's, (1, V).
    Last,
    /// All positions', (T, V).
    All,
}

/// A forward pass under way.
pub struct Pass {
    xs: Tensor, // (T, C)
    tokens: usize,
    layer: usize,
    want: Want,
}

/// What [`Model::advance`] came to.
pub enum Advance {
    /// Layers are left.
    Layer,
    /// The cache is filled and committed; logits as wanted, row by row.
    Done(Option<Vec<f32>>),
}

/// A loaded Qwen2.
pub struct Model {
    /// Hyper-parameters.
    pub config: Config,
    /// `token_embd`, read row by row in its quantised form.
    pub embed_tokens: Arc<PackedMatrix>,
    /// The blocks.
    pub layers: Vec<Layer>,
    /// `output_norm`.
    pub norm: RmsNorm,
    /// `output`, or `token_embd` where the file ties them.
    pub lm_head: Linear,
    /// The rotary tables.
    pub rope: Rope,
}

impl Model {
    /// An empty cache of this model's shape.
    pub fn new_cache(&self) -> KvCache {
        KvCache::new(kv_shape(&self.config))
    }

    /// Bytes of all packed matrices; a tied head counts once.
    pub fn weight_bytes(&self) -> u64 {
        let linears = self.layers.iter().flat_map(|l| {
            [&l.self_attn.qkv_proj, &l.self_attn.o_proj, &l.mlp.gate_up_proj, &l.mlp.down_proj]
        });
        let head = if self.config.tie_word_embeddings { 0 } else { self.lm_head.bytes };
        linears.map(|l| l.bytes).sum::<u64>() + self.embed_tokens.bytes() as u64 + head
    }

    /// Number of weights, embeddings and head included.
    pub fn parameters(&self) -> u64 {
        let weights = |w: &PackedMatrix| w.rows() as u64 * w.cols() as u64;
        let size = |l: &Linear| l.parts.iter().map(|(w, _)| weights(w)).sum::<u64>();
        let layers: u64 = self
            .layers
            .iter()
            .flat_map(|l| [&l.self_attn.qkv_proj, &l.self_attn.o_proj, &l.mlp.gate_up_proj, &l.mlp.down_proj])
            .map(size)
            .sum();
        let head = if self.config.tie_word_embeddings { 0 } else { size(&self.lm_head) };
        layers + head + weights(&self.embed_tokens)
    }

    /// Starts a pass of `tokens` at the end of `cache` and makes room for them.
    ///
    /// # Errors
    /// `invalid_request` when `tokens` is empty or an id is not below `vocab_size`; `out_of_memory`.
    pub fn start(&self, tokens: &[u32], cache: &mut KvCache, want: Want) -> Result<Pass> {
        let (vocab, width) = (self.config.vocab_size, self.config.hidden_size);
        if tokens.is_empty() {
            return Err(Error::invalid_request("no tokens; at least one is needed"));
        }
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::invalid_request(format!(
                "token id {id} is not below the vocabulary size {vocab}"
            )));
        }
        cache.reserve(tokens.len())?;
        let mut xs = vec![0.0; tokens.len() * width];
        timed("embedding", 0, 0, || {
            for (id, row) in tokens.iter().zip(xs.chunks_exact_mut(width)) {
                self.embed_tokens.dequantize_row(*id as usize, row);
            }
        });
        let xs = Tensor::from_vec(xs, (tokens.len(), width), &Device::Cpu)?; // (T, C)
        Ok(Pass { xs, tokens: tokens.len(), layer: 0, want })
    }

    /// Runs the next layer; after the last one the head too, and commits the cache.
    pub fn advance(&self, pass: &mut Pass, cache: &mut KvCache) -> Result<Advance> {
        let begun = Instant::now();
        if let Some(layer) = self.layers.get(pass.layer) {
            pass.xs = layer.forward(&pass.xs, pass.layer, &self.rope, cache)?; // (T, C)
            pass.layer += 1;
        }
        let done = pass.layer >= self.layers.len();
        let logits = match (done, pass.want) {
            (false, _) | (true, Want::Nothing) => None,
            (true, Want::Last) => Some(self.head(&pass.xs.narrow(0, pass.tokens - 1, 1)?)?),
            (true, Want::All) => Some(self.head(&pass.xs)?),
        };
        if done {
            cache.commit(pass.tokens);
        }
        book_pass(if done { pass.tokens } else { 0 }, ms_since(begun));
        Ok(if done { Advance::Done(logits) } else { Advance::Layer })
    }

    /// A whole pass at once: the wanted logits of `tokens` after what `cache` holds.
    pub fn forward(&self, tokens: &[u32], cache: &mut KvCache, want: Want) -> Result<Vec<f32>> {
        let mut pass = self.start(tokens, cache, want)?;
        loop {
            if let Advance::Done(logits) = self.advance(&mut pass, cache)? {
                return Ok(logits.unwrap_or_default());
            }
        }
    }

    fn head(&self, xs: &Tensor) -> Result<Vec<f32>> {
        let logits = self.lm_head.forward(&self.norm.forward(xs)?)?; // (T, V)
        let (storage, layout) = logits.storage_and_layout();
        match &*storage {
            candle_core::Storage::Cpu(cpu) => Ok(contiguous(cpu, layout)?.to_vec()),
            _ => Err(Error::numeric("logits are not in CPU memory")),
        }
    }

    /// Checked once after loading: RoPE needs whole halves.
    pub fn head_dim(&self) -> usize {
        head_dim(&self.config)
    }
}
