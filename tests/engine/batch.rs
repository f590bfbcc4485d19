//! Requests that are computed together, and tokens that are guessed: the answers are those of a request that is alone.

use super::{begin, complete, engine, ids, prompt};
use qandle::engine::{now_ms, Engine, Job};
use serde_json::{json, Value};

/// Drawn by a seed, so that a logit that is off by a little shows.
fn drawn(prompt: &[u32], seed: u32, most: u32) -> Value {
    json!({ "prompt": prompt, "temperature": 1, "seed": seed, "max_tokens": most, "return_tokens": true, "cache": "off" })
}

fn greedy(prompt: &[u32], most: u32) -> Value {
    json!({ "prompt": prompt, "temperature": 0, "max_tokens": most, "return_tokens": true, "cache": "off" })
}

/// Steps all jobs together until each has ended; a further one is begun after every `apart` steps.
pub(super) fn together(engine: &mut Engine, bodies: &[Value], apart: usize) -> Vec<Value> {
    let mut replies = vec![Value::Null; bodies.len()];
    let mut waiting = bodies.iter().enumerate();
    let mut jobs: Vec<(usize, Job)> = Vec::new();
    let mut steps = 0;
    loop {
        while steps >= apart * (bodies.len() - waiting.len()) {
            let Some((i, body)) = waiting.next() else { break };
            jobs.push((i, begin(engine, body.clone()).unwrap()));
        }
        if jobs.is_empty() && waiting.len() == 0 {
            return replies;
        }
        steps += 1;
        let mut all: Vec<&mut Job> = jobs.iter_mut().map(|(_, job)| job).collect();
        for (at, outcome) in engine.step_all(&mut all) {
            if let Some(reply) = outcome.unwrap().done {
                replies[jobs[at].0] = reply;
            }
        }
        let (ended, left) = jobs.into_iter().partition(|(i, _)| !replies[*i].is_null());
        jobs = left;
        ended.into_iter().for_each(|(_, job)| engine.drop_job(job));
    }
}

#[test]
fn requests_that_are_computed_together_get_the_answers_they_get_alone() {
    for kv in ["f16", "q8"] {
        let mut engine = engine(json!({ "kv": kv }));
        // Of all lengths: a stream of one token, prompts of several slices, one that is in the middle of another.
        let mut bodies: Vec<Value> = [1, 130, 7, 64, 300, 65, 20, 2]
            .iter()
            .zip(1..)
            .map(|(n, seed)| drawn(&prompt(*n), seed, 5 * seed))
            .collect();
        bodies.push(greedy(&prompt(90), 30));
        let alone: Vec<Value> = bodies.iter().map(|body| complete(&mut engine, body.clone())).collect();
        for apart in [0, 1, 3, 10] {
            engine.sessions().clear();
            for (found, want) in together(&mut engine, &bodies, apart).iter().zip(&alone) {
                assert_eq!(found["choices"], want["choices"], "{kv}, {apart}");
                assert_eq!(found["usage"]["total_tokens"], want["usage"]["total_tokens"]);
            }
        }
    }
}

#[test]
fn one_that_is_given_up_leaves_the_others_as_they_are() {
    let mut engine = engine(json!({}));
    let bodies = [drawn(&prompt(30), 1, 40), drawn(&prompt(200), 2, 40), drawn(&prompt(50), 3, 40)];
    let alone: Vec<Value> = bodies.iter().map(|body| complete(&mut engine, body.clone())).collect();
    for (given_up, after) in [(0, 5), (1, 1), (1, 8), (2, 12)] {
        let mut jobs: Vec<(usize, Job)> =
            bodies.iter().map(|body| begin(&mut engine, body.clone()).unwrap()).enumerate().collect();
        let mut replies = 0;
        for step in 0.. {
            if step == after {
                let at = jobs.iter().position(|(i, _)| *i == given_up).unwrap();
                let (_, mut job) = jobs.remove(at);
                engine.abort(&mut job);
                engine.drop_job(job);
            }
            let mut all: Vec<&mut Job> = jobs.iter_mut().map(|(_, job)| job).collect();
            let ended: Vec<(usize, Value)> = engine
                .step_all(&mut all)
                .into_iter()
                .filter_map(|(at, outcome)| Some((at, outcome.unwrap().done?)))
                .collect();
            for (at, reply) in ended.into_iter().rev() {
                let (i, job) = jobs.remove(at);
                assert_eq!(ids(&reply), ids(&alone[i]), "{i} without {given_up}");
                engine.drop_job(job);
                replies += 1;
            }
            if jobs.is_empty() {
                break;
            }
        }
        assert_eq!(replies, 2);
    }
}

#[test]
fn prompts_that_come_together_are_computed_once_where_they_begin_alike() {
    let mut engine = engine(json!({}));
    let base = prompt(300);
    let bodies: Vec<Value> = (0..4)
        .map(|i| {
            let prompt: Vec<u32> = base.iter().copied().chain([40 + i, 41, 42]).collect();
            json!({ "prompt": prompt, "temperature": 0, "max_tokens": 3, "return_tokens": true, "session_id": i.to_string() })
        })
        .collect();
    let alone: Vec<Value> =
        bodies.iter().map(|body| complete(&mut super::engine(json!({})), body.clone())).collect();
    let found = together(&mut engine, &bodies, 0);
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(
        found.iter().map(cached).sum::<u64>() >= 3 * 256,
        "{:?}",
        found.iter().map(cached).collect::<Vec<_>>()
    );
    for (found, want) in found.iter().zip(&alone) {
        assert_eq!(ids(found), ids(want));
    }
    // Each session goes on from what it holds.
    for (i, body) in bodies.iter().enumerate() {
        let held = engine.sessions().get(&i.to_string(), now_ms()).unwrap();
        let prompt = body["prompt"].as_array().unwrap().len();
        assert!((prompt..prompt + 3).contains(&held.tokens), "{held:?}");
    }
}

/// Guesses that came true, and those that did not.
fn guesses(reply: &Value) -> [u64; 2] {
    ["accepted_prediction_tokens", "rejected_prediction_tokens"]
        .map(|key| reply["usage"]["completion_tokens_details"][key].as_u64().unwrap())
}

#[test]
fn guessed_tokens_change_nothing_but_the_number_of_passes() {
    let (mut with, mut without) = (engine(json!({})), engine(json!({ "speculation": false })));
    // A tiny model with nothing to say repeats itself, which is what is guessed.
    let mut accepted = 0;
    for n in [1, 2, 3, 30, 200] {
        for body in [greedy(&prompt(n), 150), drawn(&prompt(n), n, 60)] {
            let (found, want) = (complete(&mut with, body.clone()), complete(&mut without, body.clone()));
            assert_eq!(found["choices"], want["choices"], "{n} tokens");
            assert_eq!(found["usage"]["total_tokens"], want["usage"]["total_tokens"]);
            assert_eq!(guesses(&want), [0, 0]);
            accepted += guesses(&found)[0];
        }
    }
    assert!(accepted > 100, "{accepted} guesses came true");
}

#[test]
fn guesses_end_where_the_answer_does() {
    let mut engine = engine(json!({ "contextLength": 120 }));
    for (n, most) in [(30, 1), (30, 2), (30, 3), (30, 90), (100, 90), (118, 5), (119, 5)] {
        let reply = complete(&mut engine, greedy(&prompt(n), most));
        let generated = ids(&reply).as_array().unwrap().len() as u32;
        assert_eq!(generated, most.min(120 - n), "{n} and {most}");
        let held = reply["usage"]["total_tokens"].as_u64().unwrap();
        assert_eq!(held, u64::from(n + generated));
    }
    // The session goes on after guesses that were wrong.
    let mut cold = super::engine(json!({ "speculation": false }));
    let mut text = prompt(20);
    for round in 0..4 {
        let mut body = greedy(&text, 30);
        body["session_id"] = json!("a");
        body["cache"] = json!("refresh");
        let warm = complete(&mut engine, body.clone());
        assert_eq!(ids(&warm), ids(&complete(&mut cold, body)), "round {round}");
        let answer: Vec<u32> = serde_json::from_value(ids(&warm).clone()).unwrap();
        text = text.iter().copied().chain(answer[..answer.len().min(20)].iter().copied()).collect();
    }
}
