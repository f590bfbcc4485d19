//! Qwen2 (and its relatives of the same architecture) on candle tensors: `Config → Attention → Mlp → Layer → Model`.
//!
//! The weights are immutable; keys and values live in the caller's [`KvCache`]. Every linear layer, norm and attention is a
//! candle custom op on our packed kernels. A forward [`Pass`] advances one layer at a time, so that its caller can
//! return to the event loop in between.

mod embedding;
mod pass;

pub use embedding::{Blocks, Embedding, MaybeSend};
pub use pass::{Advance, Pass, Span, Want};

use crate::config::{head_dim, kv_shape, Config};
use crate::error::{Error, Result};
use crate::kernels::{
    activation, attention, matmul, norm, rope::Rope, Activations, Job, Needs, PackedMatrix,
};
use crate::kv_cache::{KvCache, KvKind, PAGE};
use crate::metrics::timed;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Shape, Tensor};
use std::cell::RefCell;
use std::sync::Arc;

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

    /// Its matrices with their biases, in the order of their outputs.
    pub fn parts(&self) -> &[(Arc<PackedMatrix>, Option<Vec<f32>>)] {
        &self.parts
    }

    /// W · input(xs) + bias: (T, K) → (T, rows).
    fn forward(&self, xs: &Tensor, input: Input) -> candle_core::Result<Tensor> {
        xs.apply_op1_no_bwd(&Project { linear: self, input })
    }

    /// residual + W · input(xs) + bias.
    fn forward_add(&self, xs: &Tensor, input: Input, residual: &Tensor) -> candle_core::Result<Tensor> {
        xs.apply_op2_no_bwd(residual, &Project { linear: self, input })
    }
}

/// What a linear layer reads of its input; made row by row where the activations are quantised.
#[derive(Clone, Copy)]
enum Input<'a> {
    /// The rows as they are.
    Plain,
    /// The rows, normalised.
    Normed(&'a RmsNorm),
    /// Of rows of gates and ups, silu(gate) · up.
    SwiGlu,
}

/// Root-mean-square normalisation with a learned gain.
pub struct RmsNorm {
    /// The gain, (C).
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// A linear layer at work.
struct Project<'a> {
    linear: &'a Linear,
    input: Input<'a>,
}

impl Project<'_> {
    /// Adds to `out` (T, rows) where it holds a residual; an empty one is made.
    fn run(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        mut out: Vec<f32>,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, width) = layout.shape().dims2()?;
        let xs = contiguous(storage, layout)?;
        let Linear { name, parts, rows, bytes } = self.linear;
        let k = if matches!(self.input, Input::SwiGlu) { width / 2 } else { width };
        let ops = 2 * t as u64 * k as u64 * *rows as u64;
        timed(name, *bytes, ops, || {
            let add = !out.is_empty();
            out.resize(t * rows, 0.0);
            let mut at = 0;
            let jobs: Vec<Job> = parts
                .iter()
                .map(|(w, bias)| {
                    let job = Job { w, bias: bias.as_deref(), at, add };
                    at += w.rows();
                    job
                })
                .collect();
            let needs = Needs::of(parts.iter().map(|(w, _)| w.dtype()));
            let activations = match self.input {
                Input::Plain => Activations::new(xs, t, k, needs),
                Input::Normed(RmsNorm { weight, eps }) => Activations::made(t, k, needs, |t, out| {
                    norm::rms_norm(&xs[t * k..][..k], weight, *eps, out);
                }),
                Input::SwiGlu => Activations::made(t, k, needs, |t, out| {
                    activation::swiglu(&xs[t * width..][..width], k, out);
                }),
            };
            matmul(&jobs, &activations, &mut out, *rows);
        });
        Ok((CpuStorage::F32(out), (t, *rows).into()))
    }
}

impl CustomOp1 for Project<'_> {
    fn name(&self) -> &'static str {
        self.linear.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.run(storage, layout, Vec::new())
    }
}

impl CustomOp2 for Project<'_> {
    fn name(&self) -> &'static str {
        self.linear.name
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        residual: &CpuStorage,
        residual_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.run(storage, layout, contiguous(residual, residual_layout)?.to_vec())
    }
}

/// RoPE, the write of keys and values, and attention, for one layer and the positions after each cache's end.
struct Attend<'a, 'c> {
    attention: &'a Attention,
    layer: usize,
    rope: &'a Rope,
    sequences: RefCell<Sequences<'a, 'c>>,
}

/// The sequences of a pass: their rows stand one after another.
struct Sequences<'a, 'c> {
    spans: &'a [(usize, Want)],
    caches: &'a mut [&'c mut KvCache],
}

impl CustomOp1 for Attend<'_, '_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, width) = layout.shape().dims2()?;
        let Sequences { spans, caches } = &mut *self.sequences.borrow_mut();
        let mut qkv = contiguous(storage, layout)?.to_vec(); // (T, (H + 2·Hkv)·D)
        let q_width = self.attention.num_heads * caches[0].shape().head_dim;
        let mut out = vec![0.0; t * q_width];
        let mut at = 0;
        for ((tokens, _), cache) in spans.iter().zip(caches.iter_mut()) {
            let rows = at..at + tokens;
            at += tokens;
            self.sequence(
                &mut qkv[rows.start * width..rows.end * width],
                width,
                cache,
                &mut out[rows.start * q_width..rows.end * q_width],
            )?;
        }
        Ok((CpuStorage::F32(out), (t, q_width).into()))
    }
}

impl Attend<'_, '_> {
    /// One sequence's rows `qkv` (T, (H + 2·Hkv)·D); `out` is (T, H·D).
    fn sequence(&self, qkv: &mut [f32], width: usize, cache: &mut KvCache, out: &mut [f32]) -> Result<()> {
        let shape = cache.shape();
        let heads = self.attention.num_heads;
        let (q_width, kv_width) = (heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (start, position, t) = (cache.len(), cache.position(), qkv.len() / width);
        timed("rope_and_kv", 0, 6 * (t * (q_width + kv_width)) as u64, || {
            self.rope.apply(qkv, width, heads + shape.kv_heads, position);
            for (i, row) in qkv.chunks_exact(width).enumerate() {
                let (k, v) = row[q_width..].split_at(kv_width);
                cache.write(self.layer, i, k, v)?;
            }
            Ok::<(), Error>(())
        })?;
        let bytes = ((start + t) * shape.page_bytes() / (PAGE * shape.layers)) as u64;
        let seen: u64 = (start + 1..=start + t).map(|positions| positions as u64).sum();
        timed("attention", bytes, 4 * seen * q_width as u64, || {
            attention::Attention { heads, layer: self.layer, start }.run(qkv, width, cache, out)
        });
        Ok(())
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
    /// xs + attention(norm(xs)).
    fn forward(
        &self,
        xs: &Tensor,
        norm: &RmsNorm,
        layer: usize,
        rope: &Rope,
        sequences: Sequences,
    ) -> candle_core::Result<Tensor> {
        let qkv = self.qkv_proj.forward(xs, Input::Normed(norm))?; // (T, (H + 2·Hkv)·D)
        let attend = Attend { attention: self, layer, rope, sequences: RefCell::new(sequences) };
        let ys = qkv.apply_op1_no_bwd(&attend)?; // (T, H·D)
        self.o_proj.forward_add(&ys, Input::Plain, xs)
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
    /// xs + mlp(norm(xs)).
    fn forward(&self, xs: &Tensor, norm: &RmsNorm) -> candle_core::Result<Tensor> {
        let gate_up = self.gate_up_proj.forward(xs, Input::Normed(norm))?; // (T, 2·I)
        self.down_proj.forward_add(&gate_up, Input::SwiGlu, xs)
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
        sequences: Sequences,
    ) -> candle_core::Result<Tensor> {
        let xs = self.self_attn.forward(xs, &self.input_layernorm, layer, rope, sequences)?;
        self.mlp.forward(&xs, &self.post_attention_layernorm)
    }
}

/// A loaded Qwen2.
pub struct Model {
    /// Hyper-parameters.
    pub config: Config,
    /// `token_embd`.
    pub embed_tokens: Embedding,
    /// The blocks.
    pub layers: Vec<Layer>,
    /// `output_norm`.
    pub norm: RmsNorm,
    /// `output`, or `token_embd` where the file ties them.
    pub lm_head: Linear,
    /// The rotary tables.
    pub rope: Rope,
    /// What keys and values are kept as.
    pub kv: KvKind,
    /// Pages of the attention window; `None`: each position sees all before it.
    pub window: Option<usize>,
}

impl Model {
    /// An empty cache of this model's shape.
    pub fn new_cache(&self) -> KvCache {
        KvCache::new(kv_shape(&self.config, self.kv)).with_window(self.window)
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
        let (rows, cols) = self.embed_tokens.dims();
        layers + head + rows as u64 * cols as u64
    }

    /// Checked once after loading: RoPE needs whole halves.
    pub fn head_dim(&self) -> usize {
        head_dim(&self.config)
    }
}
