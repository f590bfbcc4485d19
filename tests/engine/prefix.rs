//! Beginnings that sessions share: the answer is that of an engine that knows nothing, whatever was taken over from whom.

use super::{begin, body, complete, engine, ids, prompt};
use qandle::engine::{now_ms, Engine};
use serde_json::{json, Value};

/// A request that takes and leaves beginnings; the answer itself is computed. Drawn by a seed, so that a logit that is off
/// by a little shows.
fn shared(prompt: &[u32], session: Option<&str>) -> Value {
    json!({ "prompt": prompt, "temperature": 1, "seed": 5, "max_tokens": 6, "session_id": session, "return_tokens": true, "cache": "refresh" })
}

fn cached(reply: &Value) -> u64 {
    let tokens = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let ratio = reply["qandle"]["cached_ratio"].as_f64().unwrap();
    assert_eq!(ratio, tokens as f64 / reply["usage"]["prompt_tokens"].as_f64().unwrap());
    tokens
}

/// Asks an engine and one whose sessions are cleared before; says how many tokens were taken over.
fn same_as_cold(warm: &mut Engine, cold: &mut Engine, question: Value, what: &str) -> u64 {
    cold.sessions().clear();
    let want = complete(cold, question.clone());
    assert_eq!(cached(&want), 0, "{what}");
    let found = complete(warm, question);
    assert_eq!((ids(&found), &found["choices"]), (ids(&want), &want["choices"]), "{what}");
    cached(&found)
}

/// `prompt` with other tokens from `at` on.
fn changed(prompt: &[u32], at: usize, salt: u32) -> Vec<u32> {
    let tail = prompt[at..].iter().map(|id| (id + 1 + salt * 77) % 5000);
    prompt[..at].iter().copied().chain(tail).collect()
}

#[test]
fn beginnings_are_taken_from_any_session_and_the_answers_are_those_of_a_cold_run() {
    for kv in ["f16", "f32", "q8"] {
        let options = json!({ "kv": kv });
        let (mut warm, mut cold) = (engine(options.clone()), engine(options));
        let base = prompt(200);
        let mut ask = |prompt: &[u32], session: Option<&str>, taken: u64, what: &str| {
            let found = same_as_cold(&mut warm, &mut cold, shared(prompt, session), what);
            assert_eq!(found, taken, "{kv}: {what}");
        };
        ask(&base, Some("a"), 0, "the first");
        ask(&changed(&base, 130, 1), Some("b"), 130, "another session, cut inside a page");
        ask(&changed(&base, 128, 2), Some("c"), 128, "another session, cut between pages");
        ask(&base, Some("d"), 199, "the same prompt again");
        ask(&base, Some("a"), 199, "regenerated");
        ask(&changed(&base, 60, 3), Some("a"), 60, "an earlier message edited");
        ask(&base, Some("a"), 199, "the edit taken back, by what another session holds");
        ask(&changed(&base, 199, 4), None, 199, "without a session id");
        ask(&changed(&changed(&base, 150, 9), 199, 5), None, 150, "without a session id, changed");
        let mut reversed = base.clone();
        reversed[1..].reverse();
        ask(&reversed, Some("e"), 1, "the same tokens in another order");
        ask(&base[50..], Some("f"), 0, "the same tokens at other positions");
        ask(&changed(&base, 130, 1), Some("b"), 199, "the one that shares goes on");
    }
}

#[test]
fn random_conversations_answer_as_cold_runs_do() {
    let options = json!({ "limits": { "maxSessions": 3, "kvBytes": 12 * one_page() } });
    let (mut warm, mut cold) = (engine(options), engine(json!({})));
    let mut state = 1u32;
    let mut below = |n: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % n
    };
    let mut known = vec![prompt(150)];
    let mut taken = 0;
    for turn in 0..40 {
        let from = &known[below(known.len() as u32) as usize];
        let keep = below(from.len() as u32 + 1) as usize;
        let more = 1 + below(70);
        let next: Vec<u32> =
            from[..keep].iter().copied().chain((0..more).map(|_| 10 + below(5000))).take(400).collect();
        let name = ["a", "b", "c", "d", "e", ""][below(6) as usize];
        let question = shared(&next, Some(name).filter(|name| !name.is_empty()));
        if below(4) == 0 {
            let source = ["a", "b", "c", "d", "e"][below(5) as usize];
            let _ = warm.sessions().fork(source, "fork", now_ms());
        }
        taken += same_as_cold(&mut warm, &mut cold, question, &format!("turn {turn}"));
        known.push(next);
    }
    assert!(taken > 1000, "{taken} tokens were taken over");
}

fn one_page() -> u64 {
    let mut engine = engine(json!({}));
    complete(&mut engine, body(&prompt(20), "a"));
    engine.sessions().bytes()
}

#[test]
fn a_beginning_survives_the_session_that_computed_it_while_another_shares_it() {
    let (mut warm, mut cold) = (engine(json!({ "limits": { "maxSessions": 2 } })), engine(json!({})));
    let base = prompt(200);
    let other = |i: u32| (0..20).map(|j| 6000 + 100 * i + j).collect::<Vec<_>>();
    for (session, prompt, taken) in [
        ("a", base.clone(), 0),
        ("b", changed(&base, 140, 1), 140),
        // Evicts a, which computed what b holds.
        ("c", other(1), 0),
        ("d", changed(&base, 140, 2), 140),
        ("e", changed(&base, 100, 3), 100),
    ] {
        assert_eq!(same_as_cold(&mut warm, &mut cold, shared(&prompt, Some(session)), session), taken);
    }
    let ids: Vec<_> = warm.sessions().list(now_ms()).into_iter().map(|s| s.id).collect();
    assert_eq!(ids, ["e", "d"]);
    // What is deleted is not taken over any more.
    warm.sessions().delete("d");
    warm.sessions().delete("e");
    assert_eq!(same_as_cold(&mut warm, &mut cold, shared(&base, Some("f")), "deleted"), 0);
}

#[test]
fn a_fork_is_written_without_touching_what_it_shares() {
    let (mut warm, mut cold) = (engine(json!({})), engine(json!({})));
    let base = prompt(100);
    same_as_cold(&mut warm, &mut cold, shared(&base, Some("a")), "the first");
    warm.sessions().fork("a", "b", now_ms()).unwrap();
    let unshared = warm.sessions().bytes();
    for (session, salt) in [("b", 1), ("a", 2), ("b", 3)] {
        let question = shared(&changed(&base, 90, salt), Some(session));
        assert_eq!(same_as_cold(&mut warm, &mut cold, question, session), 90);
    }
    // One page of each two is the same still.
    assert_eq!(warm.sessions().bytes(), unshared / 2 * 3);
    let info = warm.sessions().get("a", now_ms()).unwrap();
    assert_eq!((info.bytes, warm.memory(0)["kvBytes"].as_u64()), (unshared, Some(unshared / 2 * 3)));
}

#[test]
fn a_request_with_its_cache_off_takes_nothing_from_others_and_leaves_nothing() {
    let mut engine = engine(json!({}));
    let base = prompt(100);
    let off = |session: Option<&str>| {
        let mut question = shared(&base, session);
        question["cache"] = json!("off");
        question
    };
    let mut ask = |question: Value| cached(&complete(&mut engine, question));
    assert_eq!(ask(off(None)), 0);
    assert_eq!(ask(off(None)), 0, "nothing was left by the first");
    assert_eq!(ask(off(Some("private"))), 0);
    assert_eq!(ask(shared(&base, None)), 0, "nor by a session of its own");
    assert_eq!(ask(off(Some("second"))), 0, "nothing is taken from the nameless session");
    assert_eq!(ask(off(Some("private"))), 99, "a session goes on with what is its own");
    // A conversation that went on with the cache off offers what it had before.
    assert_eq!(ask(shared(&base[..50], Some("mixed"))), 49);
    let mut more = off(Some("mixed"));
    more["prompt"] = json!(changed(&base, 50, 4));
    assert_eq!(ask(more.clone()), 50);
    more["cache"] = json!("refresh");
    more["session_id"] = json!("new");
    assert_eq!(ask(more), 50);
    let private = engine.sessions().list(now_ms()).into_iter().filter(|s| s.id == "private").count();
    assert_eq!((private, engine.metrics()["caches"]["session"]["hits"].as_u64()), (1, Some(4)));
}

#[test]
fn a_refused_prompt_and_one_given_up_change_no_session() {
    let (mut warm, mut cold) =
        (engine(json!({ "contextLength": 256 })), engine(json!({ "contextLength": 256 })));
    let base = prompt(200);
    same_as_cold(&mut warm, &mut cold, shared(&base, Some("a")), "the first");
    same_as_cold(&mut warm, &mut cold, shared(&changed(&base, 20, 1), Some("b")), "the second");
    let tokens = |engine: &mut Engine, id| engine.sessions().get(id, now_ms()).map(|s| s.tokens);
    let before = (tokens(&mut warm, "a"), tokens(&mut warm, "b"));
    for (bad, code) in [(prompt(256), "context_overflow"), (vec![100, 137, u32::MAX], "invalid_request")] {
        assert_eq!(begin(&mut warm, shared(&bad, Some("b"))).err().unwrap().code(), code);
        assert_eq!((tokens(&mut warm, "a"), tokens(&mut warm, "b")), before);
    }
    // Given up in the prefill of what it did not take over; the one it took from is whole.
    let mut job = begin(&mut warm, shared(&changed(&base, 150, 2), Some("c"))).unwrap();
    warm.step(&mut job).unwrap();
    warm.abort(&mut job);
    warm.drop_job(job);
    assert_eq!(tokens(&mut warm, "a"), before.0);
    for session in ["c", "a", "b"] {
        same_as_cold(&mut warm, &mut cold, shared(&changed(&base, 150, 3), Some(session)), session);
    }
}

#[test]
fn new_conversations_share_the_system_prompt() {
    let mut engine = engine(json!({}));
    let mut ask = |user: &str, session: Option<&str>| {
        let system =
            "You are a careful assistant for students. Answer in the language of the question. ".repeat(5);
        let messages = json!([{ "role": "system", "content": system }, { "role": "user", "content": user }]);
        let body = json!({ "messages": messages, "temperature": 0, "max_tokens": 3, "session_id": session, "return_tokens": true });
        super::ask(&mut engine, &body)
    };
    let first = ask("What is 2 + 2?", Some("a"));
    assert_eq!(cached(&first), 0);
    for (session, user) in [(Some("b"), "鸡兔同笼，共35头94足，各几只？"), (None, "Say hello.")]
    {
        let next = ask(user, session);
        let own = next["usage"]["prompt_tokens"].as_u64().unwrap() - cached(&next);
        assert!(cached(&next) >= 60 && own < 40, "{} tokens were taken over, {own} not", cached(&next));
    }
}
