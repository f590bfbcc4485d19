//! Loading whole files: the verdict on every bad one, any split of the bytes, damage by tensor, and the tiny models of the types
//! for which only our own reference exists.

#![allow(clippy::unwrap_used)] // a test may end in a panic

use qandle::model::Want;
use qandle::weights::{load_bytes, Loader};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
}

fn verdict(bytes: &[u8]) -> (String, String) {
    match load_bytes(bytes) {
        Ok(_) => ("ok".into(), String::new()),
        Err(e) => (e.code().into(), e.message()),
    }
}

#[test]
fn every_bad_file_gets_the_code_of_its_row() {
    for row in json("gguf/manifest.json").as_array().unwrap() {
        let file = row["file"].as_str().unwrap();
        let (code, message) = verdict(&fs::read(fixture("gguf").join(file)).unwrap());
        assert_eq!(code, row["load"].as_str().unwrap(), "{file}: {message}");
    }
    let (_, message) = verdict(&fs::read(fixture("gguf/m07_no_qbias.gguf")).unwrap());
    assert!(message.contains("blk.0.attn_q.bias"), "{message}");
}

#[test]
fn any_split_of_the_bytes_gives_the_same_model() {
    let bytes = fs::read(fixture("golden/tiny-q4km_h96_untied.gguf")).unwrap();
    let tokens = [1, 5, 9, 200];
    let whole = load_bytes(&bytes).unwrap().0;
    let want = whole.forward(&tokens, &mut whole.new_cache(), Want::All).unwrap();
    for piece in [1, 7, 1000, 65_536] {
        let mut loader = Loader::new(None);
        bytes.chunks(piece).for_each(|chunk| loader.push(chunk).unwrap());
        assert!(loader.is_complete());
        let (model, plan) = loader.finish().unwrap();
        assert_eq!(plan.quantization, whole_quantization(&bytes));
        assert_eq!(model.forward(&tokens, &mut model.new_cache(), Want::All).unwrap(), want);
    }
}

fn whole_quantization(bytes: &[u8]) -> &'static str {
    load_bytes(bytes).unwrap().2.quantization
}

#[test]
fn a_file_that_ends_early_names_the_tensor_that_is_not_whole() {
    let bytes = fs::read(fixture("golden/tiny-q8_0_tied.gguf")).unwrap();
    let plan = load_bytes(&bytes).unwrap().2;
    for cut in [1, 100, 10_000] {
        let short = &bytes[..plan.end as usize - cut];
        // The length is known: refused from the header. It is not: refused at the end.
        assert_eq!(verdict(short).0, "bad_model");
        let mut loader = Loader::new(None);
        loader.push(short).unwrap();
        let error = loader.finish().map(|_| ()).unwrap_err();
        assert_eq!(error.code(), "bad_model");
        assert!(error.message().contains("tensor"), "{error}");
    }
}

/// Replaces a whole name (its length stands before it) by another of the same length.
fn renamed(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let whole = [&(from.len() as u64).to_le_bytes(), from.as_bytes()].concat();
    let at = bytes.windows(whole.len()).position(|w| w == whole).unwrap() + 8;
    let mut out = bytes.to_vec();
    out[at..at + to.len()].copy_from_slice(to.as_bytes());
    out
}

#[test]
fn what_cannot_be_served_is_named() {
    let bytes = fs::read(fixture("golden/tiny-q8_0_untied.gguf")).unwrap();
    for (from, to, code) in [
        ("qwen2.block_count", "qwen9.block_count", "bad_model"),
        ("blk.1.ffn_up.weight", "blk.1.ffn_xx.weight", "bad_model"),
        ("output.weight", "outpux.weight", "unsupported_model"),
        ("token_embd.weight", "token_embx.weight", "bad_model"),
    ] {
        let (found, message) = verdict(&renamed(&bytes, from, to));
        assert_eq!(found, code, "{from} as {to}: {message}");
        assert!(message.contains(from) || message.contains(to), "{from} as {to}: {message}");
    }
}

#[test]
fn bf16_q3_k_and_iq4_nl_agree_with_our_float64_reference() {
    let all = json("tiny/cases.json");
    for case in all["cases"].as_array().unwrap() {
        let file = case["file"].as_str().unwrap();
        let bound = if file.contains("bf16") {
            0.05
        } else if file.contains("q3_k") {
            0.8
        } else {
            0.5
        };
        let (model, _, plan) = load_bytes(&fs::read(fixture("tiny").join(file)).unwrap()).unwrap();
        let ids: Vec<u32> =
            case["ids"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect();
        let got = model.forward(&ids, &mut model.new_cache(), Want::All).unwrap();
        let rows = case["logits"].as_array().unwrap();
        assert_eq!(got.len(), rows.len() * plan.config.vocab_size);
        for (t, row) in rows.iter().enumerate() {
            for (v, want) in row.as_array().unwrap().iter().enumerate() {
                let off = (got[t * plan.config.vocab_size + v] as f64 - want.as_f64().unwrap()).abs();
                assert!(off <= bound, "{file}: position {t}, token {v} is off by {off}");
            }
        }
    }
}

#[test]
fn a_file_that_was_filled_up_with_zeros_is_refused() {
    let bytes = fs::read(fixture("golden/tiny-q4km_h256_untied.gguf")).unwrap();
    let end = load_bytes(&bytes).unwrap().2.end as usize;
    for (zeros, code) in [(100, "ok"), (100_000, "integrity"), (400_000, "integrity")] {
        let mut bytes = bytes.clone();
        bytes[end - zeros..].fill(0);
        let (found, message) = verdict(&bytes);
        assert_eq!(found, code, "{zeros}: {message}");
    }
}
