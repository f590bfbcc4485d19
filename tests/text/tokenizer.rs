use qandle::gguf::{Array, Metadata, StringArray, Value as Meta};
use qandle::tokenizer::{Special, Tokenizer};
use serde_json::Value;

use super::support::{ids, json, metadata, qwen, r1, Random};

/// Ids of a case in one mode; run-length coded where the text is a repeated unit.
fn expected(case: &Value, name: &str) -> Option<Vec<u32>> {
    let suffix = name.strip_prefix("ids").unwrap_or_default();
    if let Some(plain) = case.get(name) {
        return Some(ids(plain));
    }
    let runs = case.get(format!("ids_rle{suffix}"))?;
    Some(unroll(runs))
}

fn unroll(runs: &Value) -> Vec<u32> {
    let mut all = Vec::new();
    for run in runs.as_array().unwrap() {
        let run = ids(run);
        all.extend(std::iter::repeat_n(run[0], run[1] as usize));
    }
    all
}

#[test]
fn golden_ids_in_all_three_modes_and_both_vocabularies() {
    let cases = json("tokenizer_cases.json");
    let mut compared = 0;
    for case in cases["cases"].as_array().unwrap() {
        let text = match case.get("text") {
            Some(text) => text.as_str().unwrap().to_owned(),
            None => case["repeat"][0].as_str().unwrap().repeat(case["repeat"][1].as_u64().unwrap() as usize),
        };
        let all = expected(case, "ids").unwrap();
        let no_special = expected(case, "ids_nospecial").unwrap_or_else(|| all.clone());
        let plain = expected(case, "ids_plain").unwrap_or_else(|| no_special.clone());
        let modes = [
            (Special::All, "special", all),
            (Special::UserDefined, "nospecial", no_special),
            (Special::None, "plain", plain),
        ];
        for (special, name, qwen_ids) in modes {
            assert_eq!(qwen().encode(&text, special).unwrap(), qwen_ids, "qwen {name} {}", case["id"]);
            let r1_ids = match case.get("r1").and_then(|r1| r1.get(name)) {
                Some(value) if value[0].is_array() => unroll(value),
                Some(value) => ids(value),
                None => qwen_ids.clone(),
            };
            assert_eq!(r1().encode(&text, special).unwrap(), r1_ids, "r1 {name} {}", case["id"]);
            compared += 1;
        }
        // The fixture says nothing about the decoded form of repeated texts.
        if case.get("text").is_some() {
            let all = expected(case, "ids").unwrap();
            let decoded = case.get("decoded").map_or(text.as_str(), |text| text.as_str().unwrap());
            assert_eq!(qwen().decode(&all, true), decoded, "decode {}", case["id"]);
            let skipped = case.get("decoded_skip").map_or(decoded, |text| text.as_str().unwrap());
            assert_eq!(qwen().decode(&all, false), skipped, "decode without control tokens {}", case["id"]);
        }
    }
    assert_eq!(compared, 3 * 174);
}

#[test]
fn words_are_cut_as_the_model_was_trained_and_not_as_gpt2() {
    let oracle = json("tokenizer_oracle.json");
    let mut compared = 0;
    for (name, tokenizer) in [("llama_cpp_oracle", qwen()), ("qwen", qwen()), ("r1_distill_qwen", r1())] {
        for case in oracle.get(name).and_then(Value::as_array).into_iter().flatten() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, Special::All).unwrap(), ids(&case["ids"]), "{name} {text:?}");
            compared += 1;
        }
    }
    assert!(compared >= 42);
    for (text, ids) in [("->", vec![405]), ("(x):\n", vec![2075, 982]), ("3333", vec![18; 4])] {
        assert_eq!(qwen().encode(text, Special::None).unwrap(), ids, "{text:?}");
    }
}

#[test]
fn stream_gives_whole_characters_as_soon_as_they_are_whole() {
    for case in json("stream.json").as_array().unwrap() {
        let all = ids(&case["ids"]);
        let mut decoder = qwen().decoder(false);
        let steps: Vec<String> = all.iter().map(|&id| decoder.push(qwen(), id)).collect();
        let wanted: Vec<&str> =
            case["steps"].as_array().unwrap().iter().map(|step| step.as_str().unwrap_or_default()).collect();
        assert_eq!(steps, wanted, "{}", case["name"]);
        assert_eq!(decoder.finish(), "");
        assert_eq!(steps.concat(), case["text"].as_str().unwrap());
    }
}

#[test]
fn joined_deltas_equal_the_whole_decode_for_any_ids_and_any_cut() {
    let mut random = Random(7);
    for tokenizer in [qwen(), r1()] {
        for round in 0..400 {
            let n = random.below(24);
            let id = |random: &mut Random| match round % 3 {
                // Single bytes and other small tokens: mostly no UTF-8.
                0 => random.below(256) as u32,
                1 => random.below(tokenizer.vocab_len() + 50) as u32,
                _ => (151_640 + random.below(40)) as u32,
            };
            let all: Vec<u32> = (0..n).map(|_| id(&mut random)).collect();
            for keep in [false, true] {
                let kept = all.iter().filter(|&&id| keep || !tokenizer.is_control(id));
                let bytes: Vec<u8> =
                    kept.flat_map(|&id| tokenizer.token_bytes(id).unwrap_or_default()).copied().collect();
                let mut decoder = tokenizer.decoder(keep);
                let mut joined: String = all.iter().map(|&id| decoder.push(tokenizer, id)).collect();
                joined.push_str(&decoder.finish());
                assert_eq!(joined, String::from_utf8_lossy(&bytes), "{all:?}");
                assert_eq!(tokenizer.decode(&all, keep), joined, "{all:?}");
            }
        }
    }
}

#[test]
fn a_character_cut_off_by_the_end_is_one_replacement_in_stream_and_whole() {
    let cut = [419, 374, 11162, 99];
    let mut decoder = qwen().decoder(false);
    let mut text: String = cut.iter().map(|&id| decoder.push(qwen(), id)).collect();
    text.push_str(&decoder.finish());
    assert_eq!(text, " this is \u{FFFD}");
    assert_eq!(text, qwen().decode(&cut, false));
}

#[test]
fn control_tokens_vanish_from_answers_and_user_defined_ones_stay() {
    let think = r1().token_id("<think>").unwrap();
    let eos = r1().token_id("<｜end▁of▁sentence｜>").unwrap();
    assert!(!r1().is_control(think) && r1().is_control(eos));
    assert_eq!(r1().decode(&[think, eos], false), "<think>");
    assert_eq!(r1().decode(&[think, eos], true), "<think><｜end▁of▁sentence｜>");
    // Ids that only fill up the embedding, and ids beyond it.
    assert_eq!(qwen().decode(&[151_900, u32::MAX, 9707], true), "Hello");
    assert_eq!((qwen().len(), qwen().vocab_len(), r1().vocab_len()), (151_665, 151_936, 152_064));
}

#[test]
fn an_answer_ends_at_the_union_of_what_the_header_and_the_texts_say() {
    assert_eq!(qwen().end_tokens(), [151_643, 151_645]);
    assert_eq!(r1().end_tokens(), [151_643]);
    let mut only_eos = metadata("qwen2");
    only_eos.insert("tokenizer.ggml.eos_token_id", Meta::U32(151_643));
    let tokenizer = Tokenizer::from_gguf(&mut only_eos).unwrap().unwrap();
    assert_eq!(tokenizer.end_tokens(), [151_643, 151_645]);
    assert_eq!(tokenizer.decode(&[9707, 151_643, 151_645], false), "Hello");
}

#[test]
fn bos_is_given_only_where_the_model_wants_one() {
    assert_eq!((qwen().bos(), qwen().add_bos()), (None, false));
    assert_eq!((r1().bos(), r1().add_bos()), (Some(151_646), true));
    assert_eq!(qwen().with_bos(vec![14990]), [14990]);
    assert_eq!(r1().with_bos(vec![14990]), [151_646, 14990]);
    assert_eq!(r1().with_bos(vec![151_646, 14990]), [151_646, 14990]);
    let mut off = metadata("r1");
    off.insert("tokenizer.ggml.add_bos_token", Meta::Bool(false));
    let tokenizer = Tokenizer::from_gguf(&mut off).unwrap().unwrap();
    assert_eq!(tokenizer.with_bos(vec![14990]), [14990]);
    let mut none = metadata("qwen2");
    none.take("tokenizer.ggml.bos_token_id");
    assert_eq!(Tokenizer::from_gguf(&mut none).unwrap().unwrap().with_bos(vec![14990]), [14990]);
}

fn strings(metadata: &Metadata, key: &str) -> Vec<String> {
    metadata.strings(key).unwrap().iter().map(str::to_owned).collect()
}

fn array(strings: Vec<String>) -> Meta {
    Meta::Array(Array::Strings(StringArray::from_iter(strings)))
}

#[test]
fn damaged_vocabularies_are_refused_with_a_reason() {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const MERGES: &str = "tokenizer.ggml.merges";
    type Damage = fn(&mut Metadata);
    let damages: [(&str, &str, &str, Damage); 13] = [
        ("model", "unsupported_model", "llama", |m| {
            m.insert("tokenizer.ggml.model", Meta::String("llama".into()));
        }),
        ("pre", "unsupported_model", "llama-bpe", |m| {
            m.insert("tokenizer.ggml.pre", Meta::String("llama-bpe".into()));
        }),
        ("tokens missing", "bad_model", "tokens", |m| {
            m.take(TOKENS);
        }),
        ("merges missing", "bad_model", "merges", |m| {
            m.take(MERGES);
        }),
        ("types missing", "bad_model", "token_type", |m| {
            m.take("tokenizer.ggml.token_type");
        }),
        ("types short", "bad_model", "3 token types", |m| {
            m.insert("tokenizer.ggml.token_type", Meta::Array(Array::I32(vec![1; 3])));
        }),
        ("type unknown", "bad_model", "token type", |m| {
            m.insert("tokenizer.ggml.token_type", Meta::Array(Array::I32(vec![77; 151_936])));
        }),
        ("eos beyond", "bad_model", "eos token 151936", |m| {
            m.insert("tokenizer.ggml.eos_token_id", Meta::U32(151_936));
        }),
        ("twice", "bad_model", "the same", |m| {
            let mut tokens = strings(m, TOKENS);
            tokens[5000] = tokens[6000].clone();
            m.insert(TOKENS, array(tokens));
        }),
        ("no byte", "bad_model", "byte", |m| {
            let mut tokens = strings(m, TOKENS);
            tokens[0] = "!!!unheard!!!".into();
            m.insert(TOKENS, array(tokens));
        }),
        ("merge of one", "bad_model", "merge 3", |m| {
            let mut merges = strings(m, MERGES);
            merges[3] = "Ġ".into();
            m.insert(MERGES, array(merges));
        }),
        ("merge unknown", "bad_model", "not in the vocabulary", |m| {
            let mut merges = strings(m, MERGES);
            merges[7] = "ĠqzqzqzqĠ x".into();
            m.insert(MERGES, array(merges));
        }),
        ("merge of no bytes", "bad_model", "byte alphabet", |m| {
            let mut merges = strings(m, MERGES);
            merges[7] = "a 中".into();
            m.insert(MERGES, array(merges));
        }),
    ];
    for (name, code, word, damage) in damages {
        let mut metadata = metadata("qwen2");
        damage(&mut metadata);
        let error = Tokenizer::from_gguf(&mut metadata).expect_err(name);
        assert_eq!(error.code(), code, "{name}: {error}");
        assert!(error.to_string().contains(word), "{name}: {error}");
    }
    assert!(Tokenizer::from_gguf(&mut Metadata::default()).unwrap().is_none());
    assert_eq!(qwen().check_rows(151_935).unwrap_err().code(), "bad_model");
    assert!(qwen().check_rows(151_936).is_ok());
}

#[test]
fn building_takes_the_big_arrays_out_of_the_metadata() {
    let mut metadata = metadata("qwen2");
    let tokenizer = Tokenizer::from_gguf(&mut metadata).unwrap().unwrap();
    for key in ["tokens", "merges", "token_type", "scores"] {
        assert!(metadata.get(&format!("tokenizer.ggml.{key}")).is_none(), "{key}");
    }
    // 4.5 MB when written; the bound is the budget for the tokenizer.
    assert!(tokenizer.memory_bytes() < 8 << 20, "{}", tokenizer.memory_bytes());
}
