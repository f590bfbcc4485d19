//! Models as Hugging Face repositories: they load as their GGUF form does, bit for bit, quantised or not, with flat memory;
//! and bad files get a typed error at once.

#![allow(clippy::unwrap_used)] // a test may end in a panic

#[path = "common/counting_allocator.rs"]
mod counting_allocator;
#[path = "common/safetensors_builder.rs"]
mod safetensors_builder;

#[path = "safetensors/config.rs"]
mod config_json;
#[path = "safetensors/header.rs"]
mod headers;

use counting_allocator::growth;
use qandle::config::{self, Config};
use qandle::engine::{Engine, Options, TextSide};
use qandle::kernels::DType;
use qandle::model::{Model, Want};
use qandle::openai::Body;
use qandle::safetensors::{Header, HeaderReader};
use qandle::tokenizer::TextFiles;
use qandle::weights::{load_bytes, Loader, Plan, Quantize};
use qandle::Error;
use safetensors_builder::{build, of_gguf, widened, Tensor};
use serde_json::{json, Value};
use std::fs;
use std::path::PathBuf;
use web_time::Instant;

const TOKENS: [u32; 5] = [1, 5, 9, 90, 3];

fn fixture(name: &str) -> Vec<u8> {
    fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn config() -> Config {
    config::from_json(&fixture("safetensors/config.json")).unwrap()
}

fn read(file: &[u8], file_bytes: Option<u64>, piece: usize) -> Result<Header, Error> {
    let mut reader = HeaderReader::new(file_bytes);
    for bytes in file.chunks(piece) {
        if let Some(header) = reader.push(bytes)? {
            return Ok(header);
        }
    }
    reader.finish()?;
    panic!("finish() accepted a header that is not whole");
}

fn header(file: &[u8]) -> Result<Header, Error> {
    read(file, Some(file.len() as u64), usize::MAX)
}

fn loader(config: Config, files: &[Vec<u8>], quantize: Quantize) -> Result<Loader, Error> {
    let headers = files.iter().map(|file| header(file)).collect::<Result<_, _>>()?;
    Loader::from_safetensors(config, headers, quantize)
}

fn push(mut loader: Loader, files: &[Vec<u8>], piece: usize) -> Result<(Model, Plan), Error> {
    for file in files {
        for bytes in file.chunks(piece) {
            loader.push(bytes)?;
        }
        loader.next_file()?;
    }
    loader.finish()
}

fn load(config: Config, files: &[Vec<u8>], quantize: Quantize) -> Result<(Model, Plan), Error> {
    push(loader(config, files, quantize)?, files, 4096)
}

fn logits(model: &Model) -> Vec<f32> {
    model.forward(&TOKENS, &mut model.new_cache(), Want::All).unwrap()
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, code: &str, words: &[&str]) {
    let error = result.err().unwrap();
    assert_eq!(error.code(), code, "{error}");
    for word in words {
        assert!(error.message().contains(word), "{error} does not say {word:?}");
    }
}

#[test]
fn a_model_gives_the_same_bits_as_its_gguf_form() {
    let (gguf, _, plan) = load_bytes(&fixture("golden/tiny-f32_tied.gguf")).unwrap();
    let files = [fixture("safetensors/model.safetensors")];
    let end = files[0].len() as u64;
    for piece in [61, 4096, usize::MAX] {
        let loader = loader(config(), &files, Quantize::None).unwrap();
        let own = loader.plan().unwrap();
        assert_eq!((own.tensor_bytes, own.parameters()), (plan.tensor_bytes, plan.parameters()));
        assert_eq!((own.end, own.file_ends.as_slice(), own.quantization), (end, [end].as_slice(), "F32"));
        assert_eq!(logits(&push(loader, &files, piece).unwrap().0), logits(&gguf));
    }
}

/// The reply to a conversation.
fn chat(mut engine: Engine) -> Value {
    let body = json!({
        "messages": [{ "role": "user", "content": "Hello, 鸡!" }],
        "temperature": 0, "max_tokens": 12, "return_tokens": true,
    });
    let body = Body::chat(&body, engine.n_tokens()).unwrap();
    let mut job = engine.begin(body, Instant::now(), 7).unwrap();
    loop {
        if let Some(reply) = engine.step(&mut job).unwrap().done {
            return json!([reply["choices"], reply["usage"]]);
        }
    }
}

#[test]
fn a_chat_with_the_repository_is_that_with_its_gguf_form() {
    let gguf = fixture("golden/tiny-f32_tied.gguf");
    let (model, mut metadata, plan) = load_bytes(&gguf).unwrap();
    let text = TextSide::from_gguf(&mut metadata, &plan).unwrap();
    let want = chat(Engine::new(model, plan, text, "tiny", Options::default()).unwrap());
    let (model, plan) = load(config(), &[fixture("safetensors/model.safetensors")], Quantize::None).unwrap();
    let names = ["tokenizer.json", "config.json", "tokenizer_config.json", "generation_config.json"];
    let [tokenizer, config, texts, generation] = names.map(|name| fixture(&format!("safetensors/{name}")));
    let files = TextFiles {
        tokenizer: &tokenizer,
        config: &config,
        tokenizer_config: Some(&texts),
        generation_config: Some(&generation),
        chat_template: None,
    };
    let text = TextSide::from_files(&files, &plan).unwrap();
    assert_eq!(text.model_name(), None);
    let engine = Engine::new(model, plan, text, "tiny", Options::default()).unwrap();
    assert_eq!(engine.info()["model"]["quantization"], "F32");
    assert_eq!(chat(engine), want);
}

#[test]
fn quantised_on_load_it_gives_the_same_bits_as_a_file_that_was_quantised_before() {
    let files = [fixture("safetensors/model.safetensors")];
    for (quantize, name) in [(Quantize::Q8_0, "q8_0"), (Quantize::Q4_0, "q4_0")] {
        assert_eq!(serde_json::from_value::<Quantize>(json!(name)).unwrap(), quantize);
        let (gguf, _, plan) =
            load_bytes(&fixture(&format!("safetensors/tiny-f32_tied-{name}.gguf"))).unwrap();
        for piece in [61, 4096, usize::MAX] {
            let loader = loader(config(), &files, quantize).unwrap();
            let (model, own) = push(loader, &files, piece).unwrap();
            assert_eq!((own.packed_bytes, own.quantization), (plan.packed_bytes, plan.quantization));
            assert_eq!(own.matrix_types(), plan.matrix_types());
            assert_eq!(logits(&model), logits(&gguf), "{name}");
        }
    }
}

#[test]
fn memory_stays_flat() {
    let files = [fixture("safetensors/model.safetensors")];
    for quantize in [Quantize::None, Quantize::Q8_0, Quantize::Q4_0] {
        let loader = loader(config(), &files, quantize).unwrap();
        let packed = loader.plan().unwrap().packed_bytes as isize;
        let (model, grown) = growth(|| push(loader, &files, 4096).unwrap());
        assert!(grown.peak < packed + (48 << 10), "{quantize:?}: {grown:?} for {packed} bytes of weights");
        drop(model);
    }
}

/// The configuration of a model that exists as GGUF alone.
fn config_of(gguf: &[u8]) -> Config {
    load_bytes(gguf).unwrap().2.config
}

#[test]
fn half_floats_and_several_files_in_any_order_give_the_same_bits() {
    for name in ["golden/tiny-f16_tied.gguf", "golden/tiny-f16_r1_untied.gguf", "tiny/tiny-bf16_tied.gguf"] {
        let gguf = fixture(name);
        let want = logits(&load_bytes(&gguf).unwrap().0);
        let tensors = of_gguf(&gguf);
        let mut files: Vec<Vec<u8>> = tensors.chunks(10).map(build).collect();
        assert_eq!(files.len(), 3);
        for _ in 0..2 {
            let (model, plan) = load(config_of(&gguf), &files, Quantize::None).unwrap();
            assert_eq!(logits(&model), want, "{name}");
            assert_eq!(plan.end, files.iter().map(|file| file.len() as u64).sum::<u64>());
            files.reverse();
        }
        // Widening is exact, so what is quantised does not depend on the type that held it.
        for quantize in [Quantize::Q8_0, Quantize::Q4_0] {
            let (narrow, _) = load(config_of(&gguf), &files, quantize).unwrap();
            let (wide, _) = load(config_of(&gguf), &[build(&widened(&tensors))], quantize).unwrap();
            assert_eq!(logits(&narrow), logits(&wide), "{name}");
        }
    }
}

#[test]
fn files_that_are_mixed_up_or_cut_are_noticed() {
    let gguf = fixture("golden/tiny-f16_tied.gguf");
    let files: Vec<Vec<u8>> = of_gguf(&gguf).chunks(10).map(build).collect();
    let loader = || loader(config_of(&gguf), &files, Quantize::None).unwrap();
    let [a, b, c] = [&files[0], &files[1], &files[2]].map(Clone::clone);
    refused(
        push(loader(), &[b.clone(), a.clone(), c.clone()], 999),
        "bad_model",
        &["file 1 of 3 is another one"],
    );
    let cut = [a.clone(), b[..b.len() - 1].to_vec(), c.clone()];
    refused(push(loader(), &cut, 999), "bad_model", &["file 2 of 3 ends after"]);
    refused(push(loader(), &[a, b], 999), "bad_model", &["file 3 of 3 did not come"]);
}

/// A random model whose width is no multiple of 32, with the values of its tensors.
fn narrow() -> (Config, Vec<Tensor>) {
    let mut config = config();
    (config.hidden_size, config.intermediate_size, config.num_hidden_layers) = (48, 64, 1);
    config.vocab_size = 96;
    let mut state = 1u32;
    let mut tensor = |name: &str, shape: &[usize]| {
        let bytes = (0..shape.iter().product()).flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state as i32 as f32 / i32::MAX as f32 / 5.0).to_le_bytes()
        });
        let bytes = bytes.collect();
        Tensor { name: name.into(), dtype: "F32".into(), shape: shape.into(), bytes }
    };
    let mut tensors =
        vec![tensor("model.embed_tokens.weight", &[96, 48]), tensor("model.norm.weight", &[48])];
    let layer: [(&str, &[usize]); 12] = [
        ("input_layernorm.weight", &[48]),
        ("self_attn.q_proj.weight", &[48, 48]),
        ("self_attn.q_proj.bias", &[48]),
        ("self_attn.k_proj.weight", &[24, 48]),
        ("self_attn.k_proj.bias", &[24]),
        ("self_attn.v_proj.weight", &[24, 48]),
        ("self_attn.v_proj.bias", &[24]),
        ("self_attn.o_proj.weight", &[48, 48]),
        ("post_attention_layernorm.weight", &[48]),
        ("mlp.gate_proj.weight", &[64, 48]),
        ("mlp.up_proj.weight", &[64, 48]),
        ("mlp.down_proj.weight", &[48, 64]),
    ];
    tensors.extend(layer.iter().map(|(name, shape)| tensor(&format!("model.layers.0.{name}"), shape)));
    (config, tensors)
}

#[test]
fn rows_of_no_whole_number_of_blocks_stay_as_they_are() {
    let (config, tensors) = narrow();
    let (model, plan) = load(config, &[build(&tensors)], Quantize::Q4_0).unwrap();
    assert_eq!(plan.matrix_types(), [DType::F32, DType::Q4_0]);
    assert!(logits(&model).iter().all(|x| x.is_finite()));
}

#[test]
fn what_does_not_fit_the_model_is_named_as_the_file_calls_it() {
    let (config, tensors) = narrow();
    let loads = |tensors: &[Tensor], quantize| load(config.clone(), &[build(tensors)], quantize);
    let at = |name: &str| tensors.iter().position(|tensor| tensor.name.contains(name)).unwrap();
    assert!(loads(&tensors, Quantize::None).is_ok());

    let mut missing = tensors.clone();
    missing.remove(at("q_proj.bias"));
    refused(
        loads(&missing, Quantize::None),
        "bad_model",
        &["model.layers.0.self_attn.q_proj.bias is missing", "[48]"],
    );
    let mut turned = tensors.clone();
    turned[at("down_proj")].shape.reverse();
    refused(
        loads(&turned, Quantize::None),
        "bad_model",
        &["mlp.down_proj.weight has shape [64, 48]", "[48, 64]"],
    );
    let mut extra = tensors.clone();
    extra.push(Tensor { name: "visual.patch_embed".into(), ..tensors[1].clone() });
    refused(loads(&extra, Quantize::None), "unsupported_model", &["visual.patch_embed (F32) has no place"]);
    // The head of a tied model is the embedding; rotary tables are made anew.
    let mut ignored = tensors.clone();
    ignored.push(Tensor { name: "lm_head.weight".into(), ..tensors[0].clone() });
    ignored
        .push(Tensor { name: "model.layers.0.self_attn.rotary_emb.inv_freq".into(), ..tensors[1].clone() });
    let (model, plan) = loads(&ignored, Quantize::None).unwrap();
    assert_eq!(plan.parameters(), loads(&tensors, Quantize::None).unwrap().1.parameters());
    assert_eq!(logits(&model), logits(&loads(&tensors, Quantize::None).unwrap().0));
    let mut untied = config.clone();
    untied.tie_word_embeddings = false;
    refused(load(untied, &[build(&tensors)], Quantize::None), "bad_model", &["lm_head.weight is missing"]);
    let twice = [build(&tensors), build(&tensors[3..4])];
    refused(
        load(config.clone(), &twice, Quantize::None),
        "bad_model",
        &["self_attn.q_proj.weight is in two files, 1 and 2"],
    );
    let mut spoilt = tensors.clone();
    spoilt[at("down_proj")].bytes[400..404].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(loads(&spoilt, Quantize::Q8_0), "bad_model", &["mlp.down_proj.weight: a weight is not finite"]);
    refused(
        load(config.clone(), &[], Quantize::None),
        "bad_model",
        &["model.embed_tokens.weight is missing"],
    );
}
