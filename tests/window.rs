//! The attention window against a plain float64 decoder with a mask, and against itself in other slices.

#![allow(clippy::unwrap_used)] // a test may end in a panic

use qandle::gguf::HeaderReader;
use qandle::kv_cache::{KvKind, PAGE};
use qandle::model::{Model, Want};
use qandle::weights::load_bytes;
use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

const TOKENS: usize = 450;

fn bytes() -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden/tiny-f32_tied.gguf");
    fs::read(path).unwrap()
}

fn model(window: Option<usize>) -> Model {
    let (mut model, _, _) = load_bytes(&bytes()).unwrap();
    (model.kv, model.window) = (KvKind::F32, window);
    model
}

fn tokens(model: &Model) -> Vec<u32> {
    (0..TOKENS).map(|i| ((i * i * 31 + i * 7919 + 13) % model.config.vocab_size) as u32).collect()
}

/// Logits of all positions, in slices of at most so many tokens.
fn run(model: &Model, tokens: &[u32], slice: usize) -> Vec<f32> {
    let (mut cache, mut logits, mut from) = (model.new_cache(), Vec::new(), 0);
    while from < tokens.len() {
        let to = tokens.len().min(from + slice.min(cache.most_tokens()));
        logits.extend(model.forward(&tokens[from..to], &mut cache, Want::All).unwrap());
        from = to;
        assert_eq!(cache.position(), from);
        if let Some(window) = model.window {
            assert!(cache.pages().len() <= window + 2);
        }
    }
    logits
}

/// A Qwen2 of F32 tensors in float64, one position after another, each of which sees those that `sees` says.
struct Plain {
    weights: HashMap<String, Vec<f64>>,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    layers: usize,
    theta: f64,
    eps: f64,
}

impl Plain {
    fn new(bytes: &[u8], model: &Model) -> Self {
        let header = HeaderReader::new(None).push(bytes).unwrap().unwrap();
        let weights = header.tensors.iter().map(|info| {
            let data = &bytes[info.offset as usize..][..info.bytes as usize];
            let values = data.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x)));
            (info.name.clone(), values.collect())
        });
        let c = &model.config;
        Self {
            weights: weights.collect(),
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            hidden: c.hidden_size,
            layers: c.num_hidden_layers,
            theta: c.rope_theta,
            eps: c.rms_norm_eps,
        }
    }

    fn linear(&self, xs: &[f64], name: &str) -> Vec<f64> {
        let weight = &self.weights[&format!("{name}.weight")];
        let bias = self.weights.get(&format!("{name}.bias"));
        let dot = |row: &[f64]| row.iter().zip(xs).map(|(w, x)| w * x).sum::<f64>();
        let rows = weight.chunks_exact(xs.len()).enumerate();
        rows.map(|(i, row)| dot(row) + bias.map_or(0.0, |bias| bias[i])).collect()
    }

    fn norm(&self, xs: &[f64], name: &str) -> Vec<f64> {
        let mean = xs.iter().map(|x| x * x).sum::<f64>() / xs.len() as f64;
        let scale = 1.0 / (mean + self.eps).sqrt();
        xs.iter().zip(&self.weights[&format!("{name}.weight")]).map(|(x, w)| x * scale * w).collect()
    }

    fn rope(&self, xs: &mut [f64], position: usize) {
        let d = self.hidden / self.heads;
        for head in xs.chunks_exact_mut(d) {
            for i in 0..d / 2 {
                let angle = position as f64 * self.theta.powf(-2.0 * i as f64 / d as f64);
                let (a, b) = (head[i], head[i + d / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + d / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    }

    fn logits(&self, tokens: &[u32], sees: impl Fn(usize, usize) -> bool) -> Vec<f64> {
        let (d, mut out) = (self.hidden / self.heads, Vec::new());
        let mut cache = vec![Vec::<(Vec<f64>, Vec<f64>)>::new(); self.layers];
        for (position, token) in tokens.iter().enumerate() {
            let mut xs =
                self.weights["token_embd.weight"][*token as usize * self.hidden..][..self.hidden].to_vec();
            for (i, cache) in cache.iter_mut().enumerate() {
                let h = self.norm(&xs, &format!("blk.{i}.attn_norm"));
                let part = |name: &str| self.linear(&h, &format!("blk.{i}.{name}"));
                let (mut q, mut k, v) = (part("attn_q"), part("attn_k"), part("attn_v"));
                self.rope(&mut q, position);
                self.rope(&mut k, position);
                cache.push((k, v));
                let mut ys = vec![0.0; self.hidden];
                for head in 0..self.heads {
                    let at = head / (self.heads / self.kv_heads) * d;
                    let seen: Vec<_> = (0..=position).filter(|p| sees(position, *p)).collect();
                    let score = |p: &usize| {
                        let key = &cache[*p].0[at..][..d];
                        let products = q[head * d..][..d].iter().zip(key).map(|(q, k)| q * k);
                        (products.sum::<f64>() / (d as f64).sqrt()).exp()
                    };
                    let scores: Vec<f64> = seen.iter().map(score).collect();
                    let sum: f64 = scores.iter().sum();
                    for (p, score) in seen.iter().zip(&scores) {
                        for c in 0..d {
                            ys[head * d + c] += score / sum * cache[*p].1[at + c];
                        }
                    }
                }
                let add =
                    |xs: &mut Vec<f64>, more: Vec<f64>| xs.iter_mut().zip(more).for_each(|(x, y)| *x += y);
                add(&mut xs, self.linear(&ys, &format!("blk.{i}.attn_output")));
                let h = self.norm(&xs, &format!("blk.{i}.ffn_norm"));
                let gate = self.linear(&h, &format!("blk.{i}.ffn_gate"));
                let up = self.linear(&h, &format!("blk.{i}.ffn_up"));
                let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                add(&mut xs, self.linear(&inner, &format!("blk.{i}.ffn_down")));
            }
            let h = self.norm(&xs, "output_norm");
            out.extend(self.linear(&h, "token_embd"));
        }
        out
    }
}

fn furthest(logits: &[f32], reference: &[f64]) -> f64 {
    logits.iter().zip(reference).map(|(x, y)| (f64::from(*x) - y).abs()).fold(0.0, f64::max)
}

/// As the golden tests allow an F32 model; another mask is off by many times as much.
const CLOSE: f64 = 0.05;

#[test]
fn a_position_sees_the_first_page_and_its_window_and_nothing_else() {
    let all = model(None);
    let (tokens, plain) = (tokens(&all), Plain::new(&bytes(), &all));
    let masked = |window: usize, sinks: bool| {
        plain.logits(&tokens, |from, to| to / PAGE + window >= from / PAGE || sinks && to < PAGE)
    };
    let whole = furthest(&run(&all, &tokens, 64), &masked(TOKENS, true));
    assert!(whole < CLOSE, "without a window {whole}");
    for window in [1, 2] {
        let logits = run(&model(Some(window)), &tokens, 64);
        let off = |reference: &[f64]| furthest(&logits, reference);
        let right = off(&masked(window, true));
        assert!(right < CLOSE, "{right} off with a window of {window}");
        for (what, other) in [
            ("none", masked(TOKENS, true)),
            ("a page less", masked(window - 1, true)),
            ("a page more", masked(window + 1, true)),
            ("no sinks", masked(window, false)),
        ] {
            let wrong = off(&other);
            assert!(wrong > 5.0 * CLOSE, "{what} is only {wrong} off with a window of {window}");
        }
    }
}

#[test]
fn slices_decoding_cuts_forks_and_threads_give_the_same_bits() {
    for window in [1, 2, 3] {
        let model = model(Some(window));
        let (tokens, v) = (tokens(&model), model.config.vocab_size);
        let whole = run(&model, &tokens, 64);
        for slice in [1, 7, 13, 1000] {
            assert!(run(&model, &tokens, slice) == whole, "window {window}, slices of {slice}");
        }
        let mut seed = 0x2545_f491_4f6c_dd1du64;
        let mut random = |n: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed % n as u64) as usize
        };
        for round in 0..4 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1 + round % 3).build().unwrap();
            pool.install(|| {
                let (mut cache, mut steps) = (model.new_cache(), 0);
                while cache.position() < tokens.len() {
                    let from = cache.position();
                    let to = (from + 1 + random(90).min(cache.most_tokens() - 1)).min(tokens.len());
                    let got = model.forward(&tokens[from..to], &mut cache, Want::All).unwrap();
                    assert!(got == whole[from * v..to * v], "window {window}: {from}..{to} differ");
                    steps += 1;
                    if steps % 3 == 0 && steps < 60 {
                        // Other tokens behind a cut, on a fork that leaves the rest as it is; then a cut that stays.
                        let mut fork = cache.fork();
                        fork.truncate(to - random(40));
                        for _ in 0..70 {
                            model.forward(&[3], &mut fork, Want::Nothing).unwrap();
                        }
                        let asked = to - random(70).min(to);
                        let cut = cache.cut(asked);
                        assert!(cut <= asked && (cut == asked || cut == PAGE), "{cut} of {asked}");
                        cache.truncate(asked);
                        assert_eq!(cache.position(), cut);
                    }
                }
            });
        }
    }
}

#[test]
fn a_window_that_holds_the_text_changes_nothing_and_a_slice_beyond_it_is_refused() {
    let all = model(None);
    let tokens = tokens(&all);
    assert!(run(&model(Some(TOKENS.div_ceil(PAGE))), &tokens, 128) == run(&all, &tokens, 128));
    let narrow = model(Some(1));
    let mut cache = narrow.new_cache();
    assert_eq!(cache.most_tokens(), 3 * PAGE);
    let error = narrow.forward(&tokens[..3 * PAGE + 1], &mut cache, Want::Nothing).err().unwrap();
    assert_eq!((error.code(), cache.position()), ("invalid_request", 0));
}
