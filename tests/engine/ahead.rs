//! Work ahead: after a turn with thoughts the next one finds its history computed, answers as a cold run does, and whatever
//! comes in between ends the work without a trace.

use super::{ask, begin, body, complete, engine, ids, prompt};
use qandle::engine::Engine;
use qandle::openai::Body;
use serde_json::{json, Map, Value};

fn chat(messages: &Value, session: &str) -> Value {
    json!({ "messages": messages, "temperature": 0, "max_tokens": 6, "session_id": session, "return_tokens": true, "cache": "refresh" })
}

/// As a chat that was answered so; the tiny model itself has nothing to say, so what it would have said is its prompt.
fn answered(engine: &mut Engine, messages: &Value, thoughts: &str, answer: &str) {
    let text = engine.apply_chat_template(messages, &Map::new()).unwrap();
    let said = format!("{text}<think>\n{thoughts}\n</think>\n\n{answer}<｜end▁of▁sentence｜>");
    let ids = engine.tokenize(&said, true).unwrap();
    let mut request = body(&ids, "a");
    request["cache"] = "refresh".into();
    complete(engine, request);
    let body = Body::chat(&chat(messages, "a"), engine.n_tokens()).unwrap();
    engine.foresee(&body, answer, Some("a")).unwrap();
}

fn prefilled(reply: &Value) -> u64 {
    let usage = &reply["usage"];
    usage["prompt_tokens"].as_u64().unwrap()
        - usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// A conversation of some turns, with what the idle engine does in between; the prefilled tokens of each turn.
fn talk(engine: &mut Engine, turns: usize, mut between: impl FnMut(&mut Engine)) -> Vec<u64> {
    let mut messages = vec![json!({ "role": "system", "content": "You are a calculator." })];
    let mut counts = Vec::new();
    for turn in 0..turns {
        messages.push(json!({ "role": "user", "content": format!("What is {turn} + 4?") }));
        let all = Value::from(messages.clone());
        let reply = ask(engine, &chat(&all, "a"));
        let want = ask(&mut super::engine(json!({})), &chat(&all, "cold"));
        assert_eq!(ids(&reply), ids(&want), "turn {turn}");
        counts.push(prefilled(&reply));
        let answer = format!(
            "It is {}, which is the sum of the two numbers that you gave me: first one, then the other. ",
            turn + 4
        )
        .repeat(3);
        answered(engine, &all, &"Let me count slowly, one by one. ".repeat(9), answer.trim());
        messages.push(json!({ "role": "assistant", "content": answer.trim() }));
        between(engine);
    }
    counts
}

#[test]
fn the_next_turn_finds_its_history_computed() {
    let idle = |engine: &mut Engine| {
        let before = engine.sessions().get("a", qandle::engine::now_ms()).unwrap();
        while engine.work_ahead().unwrap() {}
        let after = engine.sessions().get("a", qandle::engine::now_ms()).unwrap();
        assert_eq!(after.used_at, before.used_at, "it is no use");
    };
    let mut engine = engine(json!({}));
    let counts = talk(&mut engine, 4, idle);
    assert!(counts[1..].iter().all(|n| *n <= 32), "{counts:?}");
    let without = talk(&mut super::engine(json!({})), 4, |_| {});
    assert!(
        without[1..].iter().zip(&counts[1..]).all(|(more, less)| *more > 60 + less),
        "{without:?} {counts:?}"
    );
}

#[test]
fn what_comes_in_between_ends_it() {
    type Between = fn(&mut Engine);
    let cases: [Between; 5] = [
        // Some of it is computed.
        |engine| assert!(engine.work_ahead().is_ok()),
        |engine| {
            engine.work_ahead().unwrap();
            complete(engine, body(&prompt(90), "other"));
        },
        |engine| {
            engine.work_ahead().unwrap();
            engine.sessions().delete("a");
        },
        |engine| {
            engine.work_ahead().unwrap();
            drop(engine.sessions().fork("a", "fork", qandle::engine::now_ms()));
            complete(engine, body(&prompt(90), "a"));
            assert!(!engine.is_ahead());
        },
        |engine| {
            engine.work_ahead().unwrap();
            let mut job = begin(engine, body(&prompt(200), "a")).unwrap();
            engine.step(&mut job).unwrap();
            engine.abort(&mut job);
            engine.drop_job(job);
        },
    ];
    for between in cases {
        let mut engine = engine(json!({}));
        talk(&mut engine, 3, between);
        // Nothing is left to do for a session that is gone.
        engine.sessions().clear();
        while engine.work_ahead().unwrap() {}
        assert!(engine.sessions().is_empty());
    }
}

#[test]
fn a_request_on_its_own_is_not_computed_ahead() {
    let mut engine = engine(json!({}));
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    for session in [Value::Null, "a".into()] {
        let mut body = chat(&messages, "a");
        body["cache"] = "off".into();
        body["session_id"] = session;
        ask(&mut engine, &body);
        assert!(!engine.is_ahead());
    }
}
