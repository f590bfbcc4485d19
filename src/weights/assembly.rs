//! Packed tensors, by name, become the model's fields.

use super::plan::{OUTPUT, OUTPUT_NORM, TOKEN_EMBD};
use crate::config::{head_dim, Config};
use crate::error::{Error, Result};
use crate::kernels::{rope::Rope, PackedMatrix};
use crate::kv_cache::KvKind;
use crate::model::{Attention, Embedding, Layer, Linear, Mlp, Model, RmsNorm};
use std::collections::HashMap;
use std::sync::Arc;

/// The packed tensors on their way into the model's fields.
pub(super) struct Assembly<'a> {
    /// By GGUF name.
    pub(super) packed: HashMap<String, PackedMatrix>,
    /// Hyper-parameters.
    pub(super) config: &'a Config,
}

impl Assembly<'_> {
    /// The model; `bad_model` where a tensor is missing. An embedding that is given is not among the tensors.
    pub(super) fn model(mut self, embedding: Option<Embedding>) -> Result<Model> {
        let config = self.config.clone();
        let (embed_tokens, tied) = match embedding {
            Some(embedding) => (embedding, None),
            None => {
                let matrix = Arc::new(self.matrix(TOKEN_EMBD)?);
                (Embedding::whole(matrix.clone()), config.tie_word_embeddings.then_some(matrix))
            }
        };
        let head = tied.map_or_else(|| self.matrix(OUTPUT).map(Arc::new), Ok)?;
        let layers = (0..config.num_hidden_layers).map(|i| self.layer(i)).collect::<Result<_>>()?;
        Ok(Model {
            norm: self.norm(OUTPUT_NORM)?,
            lm_head: Linear::new("lm_head", vec![(head, None)]),
            rope: Rope::new(head_dim(&config), config.rope_theta),
            kv: KvKind::default(),
            window: None,
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
