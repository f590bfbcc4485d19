//! The engine natively, on a tiny random model with R1's tokenizer and template: what a turn leaves behind when it is given
//! up, and the edges of the context.

#![allow(clippy::unwrap_used)] // a test may end in a panic

use flate2::read::GzDecoder;
use qandle::engine::{now_ms, Engine, Job, Options, TextSide};
use qandle::openai::Body;
use qandle::weights::Loader;
use qandle::Error;
use serde_json::{json, Value};
use std::io::Read;
use std::path::PathBuf;
use web_time::Instant;

#[path = "engine/ahead.rs"]
mod ahead;
#[path = "engine/batch.rs"]
mod batch;
#[path = "engine/governor.rs"]
mod governor;
#[path = "engine/prefix.rs"]
mod prefix;
#[path = "engine/truncation.rs"]
mod truncation;
#[path = "engine/window.rs"]
mod window;

fn load(options: Value) -> Result<Engine, Error> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden/r1-tiny.gguf.gz");
    let mut bytes = Vec::new();
    GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    let mut loader = Loader::new(Some(bytes.len() as u64));
    loader.push(&bytes).unwrap();
    let plan = loader.plan().unwrap().clone();
    let options: Options = serde_json::from_value(options).unwrap();
    // What the worker looks at before the weights are fetched.
    Engine::planned_bytes(&plan, &options)?;
    let text = TextSide::from_gguf(loader.metadata().unwrap(), &plan).unwrap();
    let (model, plan) = loader.finish().unwrap();
    Ok(Engine::new(model, plan, text, "tiny", options).unwrap())
}

fn engine(options: Value) -> Engine {
    load(options).unwrap()
}

fn begin(engine: &mut Engine, body: Value) -> Result<Job, Error> {
    let body = Body::completion(&body, engine.n_tokens())?;
    engine.begin(body, Instant::now(), 7)
}

/// The whole reply.
fn complete(engine: &mut Engine, body: Value) -> Value {
    let mut job = begin(engine, body).unwrap();
    loop {
        if let Some(reply) = engine.step(&mut job).unwrap().done {
            engine.drop_job(job);
            return reply;
        }
    }
}

fn begin_chat(engine: &mut Engine, body: &Value) -> Result<Job, Error> {
    let body = Body::chat(body, engine.n_tokens())?;
    engine.begin(body, Instant::now(), 7)
}

/// The whole reply to a chat.
fn ask(engine: &mut Engine, body: &Value) -> Value {
    let mut job = begin_chat(engine, body).unwrap();
    loop {
        if let Some(reply) = engine.step(&mut job).unwrap().done {
            engine.drop_job(job);
            return reply;
        }
    }
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| 100 + i * 37 % 5000).collect()
}

fn body(prompt: &[u32], session: &str) -> Value {
    json!({ "prompt": prompt, "temperature": 0, "max_tokens": 4, "session_id": session, "return_tokens": true, "cache": "off" })
}

fn ids(reply: &Value) -> &Value {
    &reply["choices"][0]["token_ids"]
}

#[test]
fn a_turn_given_up_anywhere_leaves_a_session_that_goes_on_and_forks() {
    let mut engine = engine(json!({}));
    let long = prompt(200);
    let want = complete(&mut engine, body(&long, "fresh"));
    for steps in [0, 1, 2, 4] {
        let name = format!("after {steps}");
        complete(&mut engine, body(&long[..60], &name));
        let mut job = begin(&mut engine, body(&long, &name)).unwrap();
        for _ in 0..steps {
            if engine.step(&mut job).unwrap().done.is_some() {
                break;
            }
        }
        engine.abort(&mut job);
        engine.drop_job(job);
        let fork = format!("fork of {steps}");
        engine.sessions().fork(&name, &fork, now_ms()).unwrap_or_else(|e| panic!("{name}: {e}"));
        for session in [&fork, &name] {
            assert_eq!(ids(&complete(&mut engine, body(&long, session))), ids(&want), "{session}");
        }
    }
}

#[test]
fn a_session_deleted_during_its_turn_stays_deleted() {
    let mut engine = engine(json!({}));
    for clear in [false, true] {
        complete(&mut engine, body(&prompt(20), "a"));
        let mut job = begin(&mut engine, body(&prompt(40), "a")).unwrap();
        engine.step(&mut job).unwrap();
        match clear {
            true => engine.sessions().clear(),
            false => engine.sessions().delete("a"),
        }
        engine.drop_job(job);
        assert!(engine.sessions().get("a", now_ms()).is_none() && engine.sessions().bytes() == 0);
        assert_eq!(engine.metrics()["caches"]["session"]["entries"], 0);
    }
}

#[test]
fn the_context_is_filled_to_its_last_position_and_not_beyond() {
    for (context, tokens) in [(2, 1), (9, 8), (64, 63), (65, 64), (65, 60)] {
        let mut engine = engine(json!({ "contextLength": context }));
        engine.warm_up().unwrap();
        let mut body = body(&prompt(tokens), "a");
        body["max_tokens"] = Value::Null;
        let reply = complete(&mut engine, body);
        let usage = &reply["usage"];
        let generated = usage["completion_tokens"].as_u64().unwrap();
        assert_eq!(usage["total_tokens"], u64::from(tokens) + generated);
        match reply["choices"][0]["finish_reason"].as_str().unwrap() {
            "length" => assert_eq!(u64::from(tokens) + generated, context, "context {context}"),
            reason => assert_eq!(reason, "stop"),
        }
        assert_eq!(ids(&reply).as_array().unwrap().len() as u64, generated);
    }
}

#[test]
fn prompts_that_leave_no_room_are_refused_and_harm_nothing() {
    let mut engine = engine(json!({ "contextLength": 1 }));
    engine.warm_up().unwrap();
    for n in [1, 2, 5] {
        let error = begin(&mut engine, body(&prompt(n), "a")).err().unwrap();
        assert_eq!(error.code(), "context_overflow");
    }
    assert_eq!(begin(&mut engine, body(&[], "a")).err().unwrap().code(), "invalid_request");
    assert_eq!(begin(&mut engine, body(&[u32::MAX], "a")).err().unwrap().code(), "invalid_request");
}

#[test]
fn more_logits_than_an_array_should_hold_are_refused() {
    let engine = engine(json!({ "contextLength": 4096 }));
    let rows = (1 << 28) / engine.vocab_size();
    assert!(engine.logits(vec![0; rows], true).is_ok());
    assert_eq!(engine.logits(vec![0; rows + 1], true).err().unwrap().code(), "too_large");
    assert!(engine.logits(vec![0; rows + 1], false).is_ok());
}

#[test]
fn a_context_the_model_was_not_made_for_is_refused_before_the_weights() {
    for length in [0, 1 << 25] {
        assert_eq!(load(json!({ "contextLength": length })).err().unwrap().code(), "invalid_request");
    }
}

#[test]
fn keys_and_values_are_kept_as_asked_and_every_kind_answers() {
    let question = body(&prompt(90), "kinds");
    let run = |kv: &str| {
        let mut engine = engine(json!({ "contextLength": 256, "kv": kv }));
        let reply = complete(&mut engine, question.clone());
        (ids(&reply).clone(), engine.memory(0)["kvBytes"].as_u64().unwrap())
    };
    let (f16, bytes) = run("f16");
    for (kv, ratio) in [("f32", 2.0), ("q8", 0.5)] {
        let (answer, found) = run(kv);
        assert_eq!(answer.as_array().unwrap().len(), f16.as_array().unwrap().len());
        let ratio = found as f64 / bytes as f64 / ratio;
        assert!((1.0..=1.5).contains(&ratio), "{kv} takes {found} bytes, f16 {bytes}");
    }
    assert!(serde_json::from_value::<Options>(json!({ "kv": "q4" })).is_err());
}

#[test]
fn the_number_of_threads_is_chosen_and_changes_no_answer() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let question = body(&prompt(70), "threads");
    let alone = complete(&mut engine(json!({})), question.clone());
    pool.install(|| {
        let mut engine = engine(json!({}));
        let chosen = engine.choose_threads().unwrap();
        assert!((1..=3).contains(&chosen));
        assert_eq!(ids(&complete(&mut engine, question)), ids(&alone));
    });
}

/// The chunks of a streamed completion less what differs between two requests, and the last one's `qandle`.
fn stream(engine: &mut Engine, body: &Value) -> (Vec<Value>, Value) {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let (mut job, mut chunks) = (begin(engine, body).unwrap(), Vec::new());
    loop {
        let outcome = engine.step(&mut job).unwrap();
        chunks.extend(outcome.chunks);
        if outcome.done.is_some() {
            break;
        }
    }
    engine.drop_job(job);
    let extra = chunks.last().unwrap()["qandle"].clone();
    (chunks.into_iter().map(|chunk| chunk["choices"].clone()).collect(), extra)
}

#[test]
fn a_repeated_question_is_answered_from_the_cache_with_the_same_deltas() {
    let mut engine = engine(json!({}));
    let mut question = body(&prompt(40), "a");
    question["cache"] = json!("auto");
    let (first, extra) = stream(&mut engine, &question);
    assert_eq!(extra["cached"], false);
    let (again, extra) = stream(&mut engine, &question);
    assert_eq!((again, &extra["cached"], &extra["cached_ratio"]), (first, &json!(true), &json!(1.0)));
    // Not streamed, and without ids, and in another session: the same answer.
    question["session_id"] = json!("b");
    let reply = complete(&mut engine, question.clone());
    assert_eq!(
        (&reply["qandle"]["cached"], &reply["usage"]["prompt_tokens_details"]["cached_tokens"]),
        (&json!(true), &json!(40))
    );
    assert!(engine.sessions().get("b", now_ms()).is_none(), "a session that nothing was computed in");
    question["return_tokens"] = json!(false);
    assert_eq!(complete(&mut engine, question.clone())["choices"][0]["text"], reply["choices"][0]["text"]);
    // The session goes on as if nothing had been asked in between.
    let longer = prompt(60);
    let next = complete(&mut engine, body(&longer, "a"));
    assert_eq!(next["usage"]["prompt_tokens_details"]["cached_tokens"], 40);
    assert_eq!(ids(&next), ids(&complete(&mut engine, body(&longer, "fresh"))));
    let metrics = engine.metrics();
    assert_eq!(metrics["caches"]["response"]["hits"], 3);
    assert_eq!(metrics["caches"]["response"]["misses"], 1);
    assert_eq!(
        (&metrics["requests"], &metrics["ttftMs"]["count"], &metrics["phasesMs"]["prefill"]["count"]),
        (&json!(6), &json!(6), &json!(3))
    );
    assert_eq!(engine.memory(0)["responseBytes"], metrics["caches"]["response"]["bytes"]);
    engine.responses().clear();
    assert_eq!(complete(&mut engine, question)["qandle"]["cached"], false);
}

#[test]
fn only_whole_answers_that_would_come_again_are_kept() {
    let mut engine = engine(json!({}));
    let cached = |engine: &mut Engine, extra: Value| {
        let mut question = body(&prompt(30), "a");
        question["cache"] = Value::Null;
        extra.as_object().unwrap().iter().for_each(|(key, value)| question[key] = value.clone());
        complete(engine, question)["qandle"]["cached"].clone()
    };
    for (what, extra, first, second) in [
        ("off", json!({ "cache": "off" }), false, false),
        ("chance", json!({ "temperature": 1 }), false, false),
        ("a seed", json!({ "temperature": 1, "seed": 5 }), false, true),
        ("refreshed", json!({ "temperature": 1, "seed": 6, "cache": "refresh" }), false, false),
        ("kept by the refresh", json!({ "temperature": 1, "seed": 6 }), true, true),
        ("a shorter one", json!({ "max_tokens": 2 }), false, true),
        ("another stop", json!({ "stop": ["zzz"] }), false, true),
    ] {
        assert_eq!(
            (cached(&mut engine, extra.clone()), cached(&mut engine, extra)),
            (json!(first), json!(second)),
            "{what}"
        );
    }
    // One that was given up is none.
    let mut question = body(&prompt(35), "a");
    question["cache"] = json!("auto");
    let mut job = begin(&mut engine, question.clone()).unwrap();
    engine.step(&mut job).unwrap();
    engine.abort(&mut job);
    engine.drop_job(job);
    assert_eq!(complete(&mut engine, question.clone())["qandle"]["cached"], false);
    assert_eq!(complete(&mut engine, question)["qandle"]["cached"], true);
    // Nor is anything kept where there is no room for it.
    let mut none = self::engine(json!({ "limits": { "responseBytes": 0 } }));
    let mut question = body(&prompt(30), "a");
    question["cache"] = json!("auto");
    for _ in 0..2 {
        assert_eq!(complete(&mut none, question.clone())["qandle"]["cached"], false);
    }
}

#[test]
fn texts_are_tokenised_once_and_what_an_earlier_visit_kept_is_taken_in() {
    let mut first = engine(json!({ "phrases": ["Answer briefly."] }));
    let bytes = |engine: &Engine| engine.memory(0)["tokenizerBytes"].as_u64().unwrap();
    let count = |engine: &Engine, path: &str| {
        let metrics = engine.metrics();
        metrics["caches"]["tokenizer"].pointer(path).unwrap().as_f64().unwrap()
    };
    let messages = json!([
        { "role": "system", "content": "Answer briefly." },
        { "role": "user", "content": "What is <think> for?" },
    ]);
    assert_eq!(
        first.tokenize("Answer briefly.", false).unwrap(),
        first.tokenize("Answer briefly.", true).unwrap()
    );
    assert_eq!((count(&first, "/hits"), count(&first, "/misses")), (2.0, 0.0));
    let before = bytes(&first);
    let tokens = first.count_tokens(&messages).unwrap();
    assert!(bytes(&first) > before);
    let misses = count(&first, "/misses");
    assert!(misses > 0.0);
    assert_eq!(first.count_tokens(&messages).unwrap(), tokens);
    let reply = complete(&mut first, json!({ "prompt": "a <think> b", "max_tokens": 1 }));
    assert_eq!(
        reply["usage"]["prompt_tokens"],
        first.tokenize("a <think> b", true).unwrap().len() + 1,
        "BOS"
    );
    assert!(count(&first, "/combinedHitRate") > 0.5);

    let record = first.text_side_mut().tokens().unwrap().changes().merge(&[]);
    let mut second = engine(json!({}));
    second.text_side_mut().read_tokens(&record);
    assert_eq!(second.count_tokens(&messages).unwrap(), tokens);
    let (hits, asked) = (count(&second, "/disk/hits"), count(&second, "/misses"));
    assert!(hits == asked && hits > 0.0, "{hits} of {asked}");
    assert_eq!(second.tokenize("What is <think> for?", false), first.tokenize("What is <think> for?", false));
}

#[test]
fn too_many_phrases_are_refused_before_the_weights() {
    for phrases in [vec!["a".to_string(); 257], vec!["é".repeat(140_000)]] {
        assert_eq!(load(json!({ "phrases": phrases })).err().map(|e| e.code()), Some("invalid_request"));
    }
}
