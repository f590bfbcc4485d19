//! Writes safetensors files for tests, sound ones and, on request, wrong ones: nothing is checked here.
//! Include it with `#[path = "common/safetensors_builder.rs"] mod safetensors_builder;`.

use qandle::gguf::HeaderReader;

/// A tensor: name, type as the file says it, shape, bytes.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A file with this JSON and these data.
pub fn file(json: &str, data: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes(), data].concat()
}

/// A sound file of tensors, in their order, padded as the `safetensors` crate does.
pub fn build(tensors: &[Tensor]) -> Vec<u8> {
    let (mut entries, mut data) = (vec![r#""__metadata__":{"format":"pt"}"#.to_string()], Vec::new());
    for tensor in tensors {
        let from = data.len();
        data.extend(&tensor.bytes);
        entries.push(format!(
            r#"{:?}:{{"dtype":{:?},"shape":{:?},"data_offsets":[{from},{}]}}"#,
            tensor.name,
            tensor.dtype,
            tensor.shape,
            data.len()
        ));
    }
    let mut json = format!("{{{}}}", entries.join(","));
    json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
    file(&json, &data)
}

/// Hugging Face's name of a GGUF tensor.
pub fn hf_name(gguf: &str) -> String {
    let pairs = [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("ffn_", "mlp."),
        ("gate", "gate_proj"),
        ("up", "up_proj"),
        ("down", "down_proj"),
        ("blk.", "model.layers."),
    ];
    if gguf == "output.weight" {
        return "lm_head.weight".into();
    }
    pairs.iter().fold(gguf.to_string(), |name, (from, to)| name.replace(from, to))
}

/// The tensors of a GGUF file of floats, under Hugging Face's names.
pub fn of_gguf(bytes: &[u8]) -> Vec<Tensor> {
    let header = HeaderReader::new(None).push(bytes).unwrap().unwrap();
    let tensor = |info: qandle::gguf::TensorInfo| Tensor {
        name: hf_name(&info.name),
        dtype: info.dtype.name().into(),
        shape: info.shape,
        bytes: bytes[info.offset as usize..][..info.bytes as usize].to_vec(),
    };
    header.tensors.into_iter().map(tensor).collect()
}

/// The tensors with all values as f32.
pub fn widened(tensors: &[Tensor]) -> Vec<Tensor> {
    let wide = |tensor: &Tensor| {
        let values: Vec<f32> = match tensor.dtype.as_str() {
            "F16" => {
                tensor.bytes.chunks(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            "BF16" => {
                tensor.bytes.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            _ => return tensor.clone(),
        };
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor { dtype: "F32".into(), bytes, ..tensor.clone() }
    };
    tensors.iter().map(wide).collect()
}
