use super::*;
use serde_json::{json, Value};
#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

fn params(fields: Value) -> Result<SamplingParams> {
    SamplingParams::from_json(fields.as_object().expect("a test passes an object"), 100)
}

fn sampler(fields: Value, n_tokens: usize) -> Sampler {
    Sampler::new(params(fields).expect("valid"), n_tokens, &[], 1)
}

fn uniform(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Logits with many exact ties and some masked ones, like those of a real model in range.
fn random_logits(n: usize, rng: &mut Rng) -> Vec<f32> {
    let mut logit = || match rng.next_u64() % 16 {
        0 => f32::NEG_INFINITY,
        1..=4 => (rng.next_u64() % 8) as f32,
        _ => (uniform(rng) * 24.0 - 12.0) as f32,
    };
    let mut logits: Vec<f32> = (0..n).map(|_| logit()).collect();
    logits[0] = 1.0; // never all masked
    logits
}

/// Textbook sampling by a full sort in f64: the kept ids with their probabilities, best first.
fn distribution(logits: &[f32], p: &SamplingParams) -> Vec<(u32, f64)> {
    let mut order: Vec<u32> =
        (0..logits.len() as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    if p.top_k > 0 {
        order.truncate(p.top_k);
    }
    let best = f64::from(logits[order[0] as usize]);
    let weight = |id: u32| ((f64::from(logits[id as usize]) - best) / p.temperature).exp();
    if p.top_p < 1.0 {
        let total: f64 = order.iter().map(|&id| weight(id)).sum();
        let mut sum = 0.0;
        let kept = order.iter().position(|&id| {
            sum += weight(id);
            sum >= p.top_p * total * (1.0 - 1e-12)
        });
        order.truncate(kept.map_or(order.len(), |last| last + 1));
    }
    order.retain(|&id| weight(id) >= p.min_p * (1.0 - 1e-12));
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    order.iter().map(|&id| (id, weight(id) / total)).collect()
}

/// The tokens that a sampler can draw: those that some ticket leads to.
fn support(s: &mut Sampler, logits: &[f32]) -> Vec<u32> {
    let best = checked_max(logits, 0).expect("sound");
    let weigh = Weigh::new(best, s.params.temperature);
    let floor = s.floor(logits, weigh);
    let mut ids = Vec::new();
    let mut masked = logits.to_vec();
    // Draw the first of the rest until nothing is left; the floor and the best stay those of the whole.
    while let Some(id) = s.draw(&masked, weigh, floor, 0) {
        ids.push(id);
        s.pool.retain(|rank| rank.id() != id);
        masked[id as usize] = f32::NEG_INFINITY;
    }
    ids
}

#[test]
fn cuts_keep_exactly_what_a_full_sort_keeps() {
    let mut rng = Rng::new(3);
    let mut compared = 0;
    for round in 0..600 {
        let n = [1, 2, 7, 65, 300, 3000][round % 6];
        let mut pick = |choices: &[f64]| choices[rng.next_u64() as usize % choices.len()];
        let fields = json!({
            "temperature": pick(&[0.3, 1.0, 1.7]),
            "top_k": pick(&[0.0, 0.0, 1.0, 5.0, 40.0, 1000.0]),
            "top_p": pick(&[0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
            "min_p": pick(&[0.0, 0.0, 0.05, 1.0]),
        });
        let logits = random_logits(n, &mut rng);
        let mut sampler = sampler(fields.clone(), n);
        // Leave out what is near the weight that rounds to nothing.
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let above_nothing =
            |id: u32| f64::from(logits[id as usize] - best) / sampler.params.temperature + 21.4876;
        if (0..n as u32).any(|id| above_nothing(id).abs() < 0.01) {
            continue;
        }
        compared += 1;
        let heavy = |id: &u32| above_nothing(*id) > 0.0;
        let mut expected: Vec<u32> =
            distribution(&logits, &sampler.params).iter().map(|&(id, _)| id).collect();
        expected.retain(heavy);
        expected.sort_unstable();
        let found = support(&mut sampler, &logits);
        let missing: Vec<_> = expected.iter().filter(|id| !found.contains(id)).collect();
        let extra: Vec<_> = found.iter().filter(|id| !expected.contains(id)).collect();
        let same = missing.is_empty() && extra.is_empty();
        assert!(same, "round {round}, {n} tokens, {fields}: missing {missing:?}, extra {extra:?}");
    }
    assert!(compared > 400, "{compared}");
}

#[test]
fn equal_tokens_are_cut_by_lowest_id() {
    let logits = [1.0f32; 10];
    for (fields, kept) in [
        (json!({"top_k": 3}), 3),
        (json!({"top_p": 0.9}), 9),
        (json!({"top_p": 0.7}), 7),
        (json!({"top_p": 0.0}), 1),
        (json!({"top_k": 4, "top_p": 0.5}), 2),
        (json!({"min_p": 1.0}), 10),
    ] {
        let expected: Vec<u32> = (0..kept).collect();
        assert_eq!(support(&mut sampler(fields.clone(), 10), &logits), expected, "{fields}");
    }
}

#[test]
fn frequencies_match_the_probabilities() {
    const DRAWS: usize = 20_000;
    let mut rng = Rng::new(9);
    for (round, fields) in [
        json!({}),
        json!({"temperature": 0.6, "top_p": 0.95}),
        json!({"temperature": 1.5, "top_k": 20}),
        json!({"temperature": 2.0, "min_p": 0.02}),
        json!({"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}),
    ]
    .into_iter()
    .enumerate()
    {
        let logits: Vec<f32> = (0..300).map(|_| (uniform(&mut rng) * 9.0) as f32).collect();
        let mut sampler = sampler(fields.clone(), logits.len());
        sampler.rng = Rng::new(round as u64);
        let mut counts = vec![0u32; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample(&mut logits.clone(), &[], 0).expect("draws") as usize] += 1;
        }
        // Rare tokens together form one class, so that every class expects enough draws.
        let expected = distribution(&logits, &sampler.params);
        let (mut chi_square, mut classes, mut rare) = (0.0, 0.0, (0.0, 0.0));
        let mut class = |found: f64, probability: f64| {
            let expected = probability * DRAWS as f64;
            chi_square += (found - expected).powi(2) / expected;
            classes += 1.0;
        };
        for &(id, probability) in &expected {
            let found = f64::from(std::mem::take(&mut counts[id as usize]));
            if probability * DRAWS as f64 >= 20.0 {
                class(found, probability);
            } else {
                rare = (rare.0 + found, rare.1 + probability);
            }
        }
        if rare.1 > 0.0 {
            class(rare.0, rare.1);
        }
        assert_eq!(counts.iter().sum::<u32>(), 0, "a token that was cut is never drawn: {fields}");
        // Mean is classes - 1, variance twice that; five deviations leave one false alarm in a million.
        let freedom: f64 = classes - 1.0;
        assert!(freedom > 5.0, "{fields} tests nothing");
        assert!(
            (chi_square - freedom).abs() < 5.0 * (2.0 * freedom).sqrt(),
            "{fields}: {chi_square} for {freedom}"
        );
    }
}

#[test]
fn penalties_follow_their_formulas() {
    let mut rng = Rng::new(4);
    for _ in 0..200 {
        let logits = random_logits(50, &mut rng);
        let tokens: Vec<u32> = (0..30).map(|_| (rng.next_u64() % 55) as u32).collect();
        let prompt_len = rng.next_u64() as usize % 31;
        let fields = json!({
            "temperature": 0,
            "repetition_penalty": 0.5 + uniform(&mut rng),
            "presence_penalty": 2.0 * uniform(&mut rng) - 1.0,
            "frequency_penalty": 2.0 * uniform(&mut rng) - 1.0,
            "logit_bias": {"3": 20.0 * uniform(&mut rng) - 10.0, "7": -100},
        });
        let mut sampler = sampler(fields, 50);
        let p = sampler.params.clone();
        let expected: Vec<f32> = (0u32..50)
            .map(|id| {
                let bias: f32 =
                    p.logit_bias.iter().filter(|(biased, _)| *biased == id).map(|(_, bias)| bias).sum();
                let mut x = f64::from(logits[id as usize] + bias);
                if tokens.contains(&id) {
                    x = if x > 0.0 { x / p.repetition_penalty } else { x * p.repetition_penalty };
                }
                let count = tokens[prompt_len..].iter().filter(|&&token| token == id).count();
                let present = if count > 0 { p.presence_penalty } else { 0.0 };
                (x - p.frequency_penalty * count as f64 - present) as f32
            })
            .collect();
        for _ in 0..2 {
            let mut penalised = logits.clone();
            let token = sampler.sample(&mut penalised, &tokens, prompt_len).expect("draws");
            for (id, (found, expected)) in penalised.iter().zip(&expected).enumerate() {
                let close = found == expected || (found - expected).abs() <= 1e-6 * expected.abs().max(1.0);
                assert!(close, "token {id}: {found}, expected {expected}");
            }
            assert_eq!(token, first_of(&penalised, checked_max(&penalised, 0).expect("sound")));
        }
    }
}

#[test]
fn greedy_takes_the_best_after_bias_and_penalties() {
    let logits = [1.0, 5.0, 5.0, 4.0];
    let pick = |fields: Value, tokens: &[u32]| {
        sampler(fields, 4).sample(&mut logits.clone(), tokens, tokens.len()).expect("draws")
    };
    assert_eq!(pick(json!({"temperature": 0}), &[]), 1);
    assert_eq!(pick(json!({"temperature": 1e-9, "top_p": 0.5}), &[]), 1);
    assert_eq!(pick(json!({"temperature": 0, "logit_bias": {"0": 4.5}}), &[]), 0);
    assert_eq!(pick(json!({"temperature": 0, "repetition_penalty": 1.5}), &[1, 2]), 3);
    assert_eq!(
        pick(json!({"temperature": 0, "frequency_penalty": 2}), &[1]),
        1,
        "the prompt is not penalised"
    );
}

#[test]
fn padding_and_unused_tokens_are_never_drawn() {
    for fields in [json!({"temperature": 0}), json!({}), json!({"top_p": 0.99}), json!({"top_k": 8})] {
        let mut sampler = Sampler::new(params(fields).expect("valid"), 6, &[1..3, 5..9], 2);
        for _ in 0..200 {
            let mut logits = vec![0.0, 50.0, 50.0, 0.0, 0.0, 50.0, 99.0, f32::NAN];
            let token = sampler.sample(&mut logits, &[], 0).expect("draws");
            assert!([0, 3, 4].contains(&token), "{token}");
        }
    }
}

#[test]
fn unsound_logits_are_numeric_errors() {
    for fields in [json!({"temperature": 0}), json!({}), json!({"top_k": 2, "repetition_penalty": 2})] {
        let mut sampler = sampler(fields, 4);
        for bad in [f32::NAN, f32::INFINITY] {
            let error = sampler.sample(&mut [0.0, 1.0, bad, 0.0], &[0, 2, 2], 1).expect_err("unsound");
            assert_eq!(error.code(), "numeric");
            assert!(error.message().contains("position 3") && error.message().contains("token 2"), "{error}");
        }
        let error = sampler.sample(&mut [f32::NEG_INFINITY; 4], &[], 0).expect_err("all masked");
        assert_eq!(error.code(), "numeric");
        assert_eq!(sampler.sample(&mut [], &[], 0).expect_err("empty").code(), "numeric");
        let mut masked = [f32::NEG_INFINITY; 4];
        masked[2] = -1e30;
        assert_eq!(sampler.sample(&mut masked, &[2], 0), Ok(2));
    }
}

#[test]
fn extreme_logits_and_settings_stay_sound() {
    let fields = json!({"temperature": 2e-5, "repetition_penalty": 1e-300, "top_p": 0.9999999999999999});
    let mut sampler = sampler(fields, 3);
    for logits in [[f32::MAX, f32::MIN, 1.0], [f32::MAX, f32::MAX, f32::MAX], [-0.0, 0.0, f32::MIN_POSITIVE]]
    {
        let token = sampler.sample(&mut logits.clone(), &[0, 1, 2], 0);
        assert!(token.is_ok(), "{token:?} of {logits:?}");
    }
}

#[test]
fn a_seed_gives_one_sequence_on_every_platform() {
    // First words of `rand_xoshiro` 0.6, `Xoshiro256PlusPlus::seed_from_u64(0)`.
    let mut rng = Rng::new(0);
    let words: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
    assert_eq!(words, [0x53175d61490b23df, 0x61da6f3dc380d507, 0x5c0fdf91ec9a7bfc]);

    let draw = |seed: i64, random_seed: u64| -> Vec<u32> {
        let params = params(json!({"seed": seed, "temperature": 1.3, "top_p": 0.97})).expect("valid");
        let mut sampler = Sampler::new(params, 3000, &[], random_seed);
        let mut rng = Rng::new(8);
        (0..64).map(|_| sampler.sample(&mut random_logits(3000, &mut rng), &[], 0).expect("draws")).collect()
    };
    let tokens = draw(42, 1);
    assert_eq!(tokens, draw(42, 2), "a given seed hides the random one");
    assert_ne!(tokens, draw(43, 1));
    let digest = tokens.iter().fold(0u64, |digest, &id| digest.wrapping_mul(31).wrapping_add(u64::from(id)));
    assert_eq!(digest, DIGEST, "the same here as on x86_64 where this number was made");
}

/// Of the 64 tokens drawn in `a_seed_gives_one_sequence_on_every_platform`.
const DIGEST: u64 = 15_480_696_338_805_677_128;

#[test]
fn logprobs_match_the_softmax() {
    let mut rng = Rng::new(6);
    let logits = random_logits(500, &mut rng);
    let unlimited = SamplingParams::default();
    let expected = distribution(&logits, &unlimited);
    for n in [0, 1, 20, 500] {
        let top = top_logprobs(&logits, n);
        assert_eq!(top.len(), n.min(expected.len()));
        for (&(id, logprob), &(expected_id, probability)) in top.iter().zip(&expected) {
            assert_eq!(id, expected_id);
            assert!((f64::from(logprob) - probability.ln()).abs() < 1e-5);
            assert_eq!(logprob, log_softmax_at(&logits, id));
        }
    }
    assert_eq!(log_softmax_at(&[0.0, f32::NEG_INFINITY], 1), f32::NEG_INFINITY);
    assert_eq!(log_softmax_at(&[0.0], 7), f32::NEG_INFINITY);
}

#[test]
fn absent_and_null_fields_take_the_defaults() {
    let nulls = json!({
        "temperature": null, "top_p": null, "top_k": null, "min_p": null, "repetition_penalty": null, "presence_penalty": null,
        "frequency_penalty": null, "seed": null, "stop": null, "logit_bias": null, "max_tokens": null, "messages": [],
    });
    assert_eq!(params(nulls), Ok(SamplingParams::default()));
    assert_eq!(params(json!({})), Ok(SamplingParams::default()));
}

#[test]
fn valid_fields_are_read() {
    let read = params(json!({
        "temperature": 2, "top_p": 0, "top_k": 40.0, "min_p": 1, "repetition_penalty": 1.1, "presence_penalty": -2,
        "frequency_penalty": 2, "seed": -1, "stop": ["a", "b"], "logit_bias": {"99": -100, "0": 0.5}, "max_tokens": 7,
        "max_completion_tokens": 7.0,
    }));
    let expected = SamplingParams {
        temperature: 2.0,
        top_p: 0.0,
        top_k: 40,
        min_p: 1.0,
        repetition_penalty: 1.1,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        seed: Some(u64::MAX),
        stop: vec!["a".into(), "b".into()],
        logit_bias: vec![(0, 0.5), (99, -100.0)],
        max_tokens: Some(7),
    };
    assert_eq!(read, Ok(expected));
    assert_eq!(params(json!({"stop": "x"})).map(|p| p.stop), Ok(vec!["x".to_string()]));
    assert_eq!(params(json!({"max_completion_tokens": 3})).map(|p| p.max_tokens), Ok(Some(3)));
    for (seed, expected) in [
        (json!(i64::MIN), 1 << 63),
        (json!(u64::MAX), u64::MAX),
        (json!(9007199254740991.0), (1 << 53) - 1),
        (json!(-0.0), 0),
    ] {
        assert_eq!(params(json!({"seed": seed})).map(|p| p.seed), Ok(Some(expected)), "{seed}");
    }
}

#[test]
fn wrong_fields_are_refused_by_name_range_and_value() {
    let many: Vec<String> = (0..17).map(|i| i.to_string()).collect();
    let cases = [
        ("temperature", json!(2.5), "a number from 0 to 2", "2.5"),
        ("temperature", json!("0.5"), "a number", "the string \"0.5\""),
        ("temperature", json!(-0.1), "from 0 to 2", "-0.1"),
        ("top_p", json!(1.01), "from 0 to 1", "1.01"),
        ("top_p", json!([1]), "from 0 to 1", "an array of 1"),
        ("top_k", json!(-1), "an integer of at least 0", "-1"),
        ("top_k", json!(40.5), "an integer", "40.5"),
        ("top_k", json!(true), "an integer", "true"),
        ("min_p", json!(-0.5), "from 0 to 1", "-0.5"),
        ("repetition_penalty", json!(0), "above 0 and at most 10", "0"),
        ("repetition_penalty", json!(11), "above 0 and at most 10", "11"),
        ("presence_penalty", json!(2.1), "from -2 to 2", "2.1"),
        ("frequency_penalty", json!({}), "from -2 to 2", "an object"),
        ("seed", json!(1.5), "an integer", "1.5"),
        ("seed", json!(9007199254740994.0), "exact", "9007199254740994.0"),
        ("stop", json!(""), "non-empty", "the string \"\""),
        ("stop", json!(["a", null]), "non-empty strings", "null"),
        ("stop", json!(many), "at most 16", "an array of 17"),
        ("stop", json!(5), "string", "5"),
        ("logit_bias", json!([]), "object", "an array of 0"),
        ("logit_bias", json!({"100": 1}), "token ids below 100", "the key \"100\""),
        ("logit_bias", json!({"-1": 1}), "token ids", "\"-1\""),
        ("logit_bias", json!({"01": 1}), "token ids", "\"01\""),
        ("logit_bias", json!({"1": 101}), "from -100 to 100", "101 for token 1"),
        ("logit_bias", json!({"1": null}), "from -100 to 100", "null"),
        ("max_tokens", json!(0), "an integer of at least 1", "0"),
        ("max_completion_tokens", json!("9"), "at least 1", "the string \"9\""),
    ];
    for (name, value, expected, found) in cases {
        let error = params(json!({ name: value })).expect_err(name);
        assert_eq!(error.code(), "invalid_request");
        let message = error.message();
        assert!(message.starts_with(&format!("{name} must be ")), "{message}");
        assert!(message.contains(expected), "{message} should say {expected}");
        assert!(message.ends_with(&format!("found {found}")) || message.contains(found), "{message}");
    }
    let message = params(json!({"max_tokens": 5, "max_completion_tokens": 6})).expect_err("differ").message();
    assert!(message.contains("found 5 and 6"), "{message}");
    let long = params(json!({"top_k": "é".repeat(100)})).expect_err("a string").message();
    assert!(long.ends_with("…") && long.chars().count() < 120, "{long}");
}

#[test]
fn greedy_or_seeded_answers_are_repeatable() {
    let repeatable = |fields| params(fields).map(|p| p.is_repeatable());
    assert_eq!(repeatable(json!({})), Ok(false));
    assert_eq!(repeatable(json!({"seed": 3})), Ok(true));
    assert_eq!(repeatable(json!({"temperature": 0})), Ok(true));
}
