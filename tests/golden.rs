//! The decoder against independent references: tiny random models of every type, and the real models where
//! `./build.sh model` has fetched them. References come from float64 / transformers float32 passes (fixtures/README.md).

#![allow(clippy::unwrap_used)] // a test may end in a panic

use qandle::kv_cache::KvCache;
use qandle::model::{Model, Want};
use qandle::weights::{load_bytes, Loader};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::PathBuf;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
}

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect()
}

fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let top = logits.iter().cloned().fold(f32::MIN, f32::max) as f64;
    let sum: f64 = logits.iter().map(|x| (*x as f64 - top).exp()).sum();
    logits.iter().map(|x| *x as f64 - top - sum.ln()).collect()
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a))).unwrap()
}

/// How far the product may be from the reference: what 8-bit activations and an f16 KV cache cost, with llama.cpp's own
/// distance as yardstick (half of these bounds or less).
struct Bounds {
    max_abs: f64,
    kl: f64,
    margin: f64,
    least_equal: usize,
}

fn tiny_bounds(name: &str) -> Bounds {
    match name {
        n if n.starts_with("f32") || n.starts_with("f16") => {
            Bounds { max_abs: 0.05, kl: 1e-4, margin: 0.05, least_equal: 23 }
        }
        n if n.contains("_k_") || n.contains("km_") => {
            Bounds { max_abs: 0.8, kl: 0.03, margin: 0.4, least_equal: 20 }
        }
        _ => Bounds { max_abs: 0.5, kl: 0.012, margin: 0.3, least_equal: 21 },
    }
}

#[test]
fn tiny_models_of_every_type_stay_within_the_reference_tolerances() {
    let all = json("tiny_cases.json");
    for (name, case) in all["cases"].as_object().unwrap() {
        let (model, _, plan) =
            load_bytes(&fs::read(fixture(case["file"].as_str().unwrap())).unwrap()).unwrap();
        let bounds = tiny_bounds(name);
        for sequence in case["sequences"].as_array().unwrap() {
            let tokens = ids(&sequence["ids"]);
            let v = plan.config.vocab_size;
            let logits = model.forward(&tokens, &mut model.new_cache(), Want::All).unwrap();
            let (want, margin) = (ids(&sequence["argmax"]), floats(&sequence["margin"]));
            let mut equal = 0;
            for t in 0..tokens.len() {
                let row = &logits[t * v..][..v];
                let same = argmax(row) == want[t] as usize;
                equal += usize::from(same);
                assert!(
                    same || margin[t] < bounds.margin,
                    "{name}: position {t} lost a margin of {}",
                    margin[t]
                );
                let (top, values) = (ids(&sequence["top5"][t]), floats(&sequence["top5_logits"][t]));
                for (id, value) in top.iter().zip(values) {
                    let off = (row[*id as usize] as f64 - value).abs();
                    assert!(off <= bounds.max_abs, "{name}: position {t}, token {id} is off by {off}");
                }
            }
            assert!(equal >= bounds.least_equal, "{name}: {equal} of {} positions agree", tokens.len());
            let last = &logits[(tokens.len() - 1) * v..];
            let reference: Vec<f32> = floats(&sequence["last_logits"]).iter().map(|x| *x as f32).collect();
            let (p, q) = (log_softmax(&reference), log_softmax(last));
            let kl: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
            assert!(kl <= bounds.kl, "{name}: KL {kl}");
            check_greedy(name, &model, &tokens, sequence, bounds.margin);
        }
    }
}

/// Feeds the reference's own greedy tokens and compares each choice that has the margin.
fn check_greedy(name: &str, model: &Model, tokens: &[u32], case: &Value, margin: f64) {
    let (greedy, margins) = (ids(&case["greedy"]), floats(&case["greedy_margin"]));
    let mut cache = model.new_cache();
    let mut logits = model.forward(tokens, &mut cache, Want::Last).unwrap();
    for (i, want) in greedy.iter().enumerate() {
        let same = argmax(&logits) == *want as usize;
        assert!(same || margins[i] < margin, "{name}: greedy step {i} lost a margin of {}", margins[i]);
        logits = model.forward(&[*want], &mut cache, Want::Last).unwrap();
    }
}

fn real(name: &str) -> Option<Model> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models").join(name);
    let mut file = fs::File::open(&path).ok()?;
    let mut loader = Loader::new(Some(file.metadata().unwrap().len()));
    let mut piece = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut piece).unwrap();
        if n == 0 {
            return Some(loader.finish().unwrap().0);
        }
        loader.push(&piece[..n]).unwrap();
    }
}

fn check_real(file: &str, cases: &str, margin: f64, share: f64, longest: usize) {
    let Some(model) = real(file) else {
        println!("skipped: models/{file} is not there (./build.sh model)");
        return;
    };
    let v = model.config.vocab_size;
    for case in json(cases)["cases"].as_array().unwrap() {
        let (name, tokens) = (case["id"].as_str().unwrap(), ids(&case["ids"]));
        if tokens.len() > longest {
            continue;
        }
        let mut cache = model.new_cache();
        let logits = model.forward(&tokens, &mut cache, Want::All).unwrap();
        let (want, margins) = (ids(&case["argmax"]), floats(&case["margin"]));
        let next = floats(&case["next_logprob"]);
        let (mut equal, mut nll, mut reference_nll) = (0, 0.0, 0.0);
        // Position 0 is left out: one activation there is in the thousands, and 8 bits cannot hold its block.
        for t in 1..tokens.len() {
            let row = &logits[t * v..][..v];
            let same = argmax(row) == want[t] as usize;
            equal += usize::from(same);
            assert!(same || margins[t] < margin, "{name}: position {t} lost a margin of {}", margins[t]);
            if t + 1 < tokens.len() {
                nll -= log_softmax(row)[tokens[t + 1] as usize];
                reference_nll -= next[t];
            }
        }
        let positions = tokens.len() - 1;
        assert!(equal as f64 >= share * positions as f64, "{name}: {equal} of {positions} positions agree");
        let off = (nll - reference_nll).abs() / (positions - 1) as f64;
        assert!(off <= 0.05, "{name}: mean NLL is off by {off}");
        let last = &logits[(tokens.len() - 1) * v..];
        let logp = log_softmax(last);
        let (top, values) = (ids(&case["top20"]), floats(&case["top20_logits"]));
        let lse = case["logsumexp_last"].as_f64().unwrap();
        assert_eq!(argmax(last), top[0] as usize, "{name}: another best token");
        let mut worst = 0.0f64;
        for (i, (id, value)) in top.iter().zip(&values).enumerate() {
            let off = (last[*id as usize] as f64 - value).abs();
            worst = worst.max(off);
            assert!(off <= 0.4, "{name}: top-20 logit {i} is off by {off}");
            if i < 5 {
                let off = (logp[*id as usize] - (value - lse)).abs();
                assert!(off <= 0.35, "{name}: log-probability of top token {i} is off by {off}");
            }
        }
        println!("{name}: {equal} of {positions} positions agree, top-20 logits within {worst:.3}");
        cache.truncate(0);
        check_greedy(name, &model, &tokens, case, margin);
    }
}

#[test]
fn the_real_half_billion_agrees_with_transformers() {
    check_real("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "logits_05b.json", 0.5, 0.95, 100);
}

#[test]
#[ignore = "long: part of ./build.sh test --full"]
fn the_real_half_billion_agrees_on_the_long_prompt() {
    check_real("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "logits_05b.json", 0.5, 0.95, 1000);
}

#[test]
#[ignore = "long: part of ./build.sh test --full"]
fn the_real_one_and_a_half_billion_agrees_with_transformers() {
    check_real("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "logits_15b.json", 0.7, 0.93, 1000);
}

/// Prefill in random slices, with cuts and refills, forks, on one thread and on two: the same bits.
fn check_invariance(model: &Model, tokens: &[u32], rounds: u32) {
    let v = model.config.vocab_size;
    let whole = model.forward(tokens, &mut model.new_cache(), Want::All).unwrap();
    let mut seed = 0x2545f4914f6cdd1du64;
    let mut random = |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % n as u64) as usize
    };
    for round in 0..rounds {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1 + round as usize % 3).build().unwrap();
        pool.install(|| {
            let mut cache: KvCache = model.new_cache();
            let mut parent = None;
            let mut steps = 0;
            while cache.len() < tokens.len() {
                let from = cache.len();
                let to = (from + 1 + random(17)).min(tokens.len());
                let got = model.forward(&tokens[from..to], &mut cache, Want::All).unwrap();
                assert!(got == whole[from * v..to * v], "round {round}: positions {from}..{to} differ");
                steps += 1;
                if steps % 4 == 1 && steps < 40 {
                    // Cut somewhere and write other tokens over it before going on.
                    let cut = random(cache.len() + 1);
                    parent = Some((cache.fork(), cache.len()));
                    cache.truncate(cut);
                    model.forward(&[1, 2, 3], &mut cache, Want::Nothing).unwrap();
                    cache.truncate(cut);
                }
                if steps % 7 == 3 {
                    if let Some((fork, len)) = parent.take() {
                        assert_eq!(fork.len(), len);
                        cache = fork;
                    }
                }
            }
        });
    }
}

#[test]
fn slices_cuts_forks_and_threads_give_the_same_bits_on_tiny_models() {
    for file in
        ["tiny-f32_tied.gguf", "tiny-q4km_h256_untied.gguf", "tiny-q5_0_untied.gguf", "tiny-q2_k_tied.gguf"]
    {
        let (model, _, plan) = load_bytes(&fs::read(fixture(file)).unwrap()).unwrap();
        let tokens: Vec<u32> = (0..150).map(|i| (i * 7919 + 13) % plan.config.vocab_size as u32).collect();
        check_invariance(&model, &tokens, 6);
    }
}

#[test]
fn slices_cuts_forks_and_threads_give_the_same_bits_on_the_half_billion() {
    let Some(model) = real("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf") else {
        println!("skipped: the model is not there (./build.sh model)");
        return;
    };
    let case = &json("logits_05b.json")["cases"][0];
    check_invariance(&model, &ids(&case["ids"])[..40], 2);
}
