//! The attention window in the engine: sessions answer as cold runs do, memory stays bounded, and the text may be as long as
//! the model was made for.

use super::batch::together;
use super::{ask, complete, engine, ids, load, prompt};
use qandle::engine::{now_ms, Engine};
use qandle::kv_cache::PAGE;
use qandle::openai::Body;
use serde_json::{json, Value};

fn windowed(window: usize) -> Engine {
    engine(json!({ "window": window, "contextLength": 128 }))
}

fn question(prompt: &[u32], session: &str) -> Value {
    json!({ "prompt": prompt, "temperature": 1, "seed": 5, "max_tokens": 6, "session_id": session, "return_tokens": true, "cache": "refresh" })
}

fn changed(prompt: &[u32], at: usize) -> Vec<u32> {
    prompt[..at].iter().copied().chain(prompt[at..].iter().map(|id| (id + 77) % 5000)).collect()
}

#[test]
fn sessions_with_a_window_answer_as_cold_runs_do() {
    for window in [64, 65, 200] {
        let mut warm = windowed(window);
        let pages = window.div_ceil(PAGE);
        let mut ask = |prompt: &[u32], session: &str, what: &str| {
            let want = complete(&mut windowed(window), question(prompt, "cold"));
            let found = complete(&mut warm, question(prompt, session));
            assert_eq!(found["choices"], want["choices"], "{what}, window {window}");
            let info = warm.sessions().get(session, now_ms()).unwrap();
            let most = (pages + 2) as u64 * warm.model().new_cache().shape().page_bytes() as u64;
            assert!(info.bytes <= most, "{what}: {} bytes, at most {most}", info.bytes);
            found["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        let long = prompt(600);
        assert_eq!(ask(&long, "a", "the first"), 0);
        assert_eq!(ask(&long, "a", "regenerated"), 599);
        assert_eq!(ask(&prompt(720), "a", "gone on with"), 600);
        assert_eq!(ask(&changed(&long, 590), "a", "cut in an earlier page"), 64);
        assert_eq!(ask(&changed(&long, 590), "b", "shared"), 599);
        assert_eq!(ask(&long, "c", "shared up to a cut in the page that is being filled"), 590);
        assert_eq!(ask(&changed(&long, 30), "c", "cut in the sinks"), 30);
        assert_eq!(ask(&prompt(100), "d", "shorter than the window"), 64);
        assert_eq!(ask(&prompt(150), "d", "grown"), 100);
        assert_eq!(ask(&prompt(400), "d", "grown out of the window"), 150);
    }
}

#[test]
fn a_fork_and_idle_work_are_right_behind_a_window() {
    let mut warm = windowed(64);
    complete(&mut warm, question(&prompt(500), "a"));
    warm.sessions().fork("a", "b", now_ms()).unwrap();
    for session in ["b", "a", "b"] {
        let longer = changed(&prompt(620), 500 + session.len());
        let want = complete(&mut windowed(64), question(&longer, "cold"));
        assert_eq!(complete(&mut warm, question(&longer, session))["choices"], want["choices"]);
    }
    let mut messages = vec![];
    for turn in 0..4 {
        let text = "Count the words of this sentence, and then those of the next one. ".repeat(6);
        let question = format!("{turn}: {text}");
        messages.push(json!({ "role": "user", "content": question }));
        let chat = json!({ "messages": messages, "temperature": 0, "max_tokens": 6, "session_id": "chat", "return_tokens": true });
        let found = ask(&mut warm, &chat);
        assert_eq!(ids(&found), ids(&ask(&mut windowed(64), &chat)), "turn {turn}");
        assert_eq!(found["qandle"]["dropped_messages"], 0, "the context is no bound");
        let answer = "There are twelve words in the first one. ".repeat(8);
        let body = Body::chat(&chat, warm.n_tokens()).unwrap();
        warm.foresee(&body, answer.trim(), Some("chat")).unwrap();
        while warm.work_ahead().unwrap() {}
        messages.push(json!({ "role": "assistant", "content": answer.trim() }));
        let own = warm.tokenize(&question, false).unwrap().len() as u64;
        let cached = found["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let prefilled = found["usage"]["prompt_tokens"].as_u64().unwrap() - cached;
        assert!(prefilled <= own + 8, "turn {turn}: {prefilled} of {own}");
    }
}

#[test]
fn with_a_window_the_models_own_length_is_the_bound() {
    let mut engine = windowed(64);
    let most = engine.info()["model"]["contextLength"].as_u64().unwrap();
    assert_eq!(engine.info()["contextLength"], most);
    assert!(most > 1000, "{most}");
    let mut long = question(&prompt(1000), "a");
    long["max_tokens"] = 90.into();
    let usage = complete(&mut engine, long)["usage"].clone();
    assert!(usage["total_tokens"].as_u64().unwrap() > 1000);
    assert_eq!(engine.logits(prompt(700), true).unwrap().rows(), 700);
    let beyond = vec![5; most as usize];
    let error = super::begin(&mut engine, question(&beyond, "b")).err().unwrap();
    assert_eq!(error.code(), "context_overflow");
}

#[test]
fn the_answer_ends_where_the_model_ends() {
    let mut engine = windowed(64);
    let most = engine.info()["contextLength"].as_u64().unwrap() as u32;
    let mut body = question(&prompt(most - 3), "a");
    body["max_tokens"] = Value::Null;
    let reply = complete(&mut engine, body);
    let finish = reply["choices"][0]["finish_reason"].as_str().unwrap();
    assert!(finish == "stop" || finish == "length" && reply["usage"]["total_tokens"] == most, "{reply}");
}

#[test]
fn the_plan_counts_what_the_window_holds_and_an_empty_window_is_refused() {
    let bytes = |options: Value| {
        let engine = engine(options.clone());
        let options = serde_json::from_value(options).unwrap();
        Engine::planned_bytes(engine.plan(), &options).unwrap() - engine.plan().packed_bytes
    };
    let whole = engine(json!({}));
    let page = whole.model().new_cache().shape().page_bytes() as u64;
    let most = whole.info()["model"]["contextLength"].as_u64().unwrap();
    let rope = most * whole.model().head_dim() as u64 * 4;
    assert_eq!(bytes(json!({ "window": 100 })), 4 * page + rope);
    for window in [json!(0), json!(1 << 21)] {
        assert_eq!(load(json!({ "window": window })).err().unwrap().code(), "invalid_request");
    }
}

#[test]
fn guesses_and_requests_at_once_are_right_behind_a_window() {
    let repeats: Vec<u32> = (0..420).map(|i| 100 + i % 23 * 7).collect();
    let bodies: Vec<Value> = (0..3)
        .map(|i| {
            let mut body = question(&repeats[i * 5..], &format!("s{i}"));
            (body["temperature"], body["max_tokens"], body["cache"]) = (0.into(), 150.into(), "off".into());
            body
        })
        .collect();
    let want: Vec<Value> = bodies
        .iter()
        .map(|body| {
            let mut alone = engine(json!({ "window": 64, "speculation": false }));
            complete(&mut alone, body.clone())["choices"].clone()
        })
        .collect();
    let mut guesses = windowed(64);
    for (body, want) in bodies.iter().zip(&want) {
        assert_eq!(&complete(&mut guesses, body.clone())["choices"], want);
    }
    guesses.sessions().clear();
    for apart in [0, 3, 40] {
        for (found, want) in together(&mut guesses, &bodies, apart).iter().zip(&want) {
            assert_eq!(&found["choices"], want, "{apart} steps apart");
        }
    }
}
