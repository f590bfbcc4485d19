//! The budget of memory: who needs room gets it, the others leave in the stated order and come back right, and what cannot fit
//! ends its own request alone.

use super::{ask, begin, body, complete, engine, ids, prompt};
use qandle::engine::{now_ms, Engine};
use qandle::openai::Body;
use serde_json::{json, Value};
use std::sync::OnceLock;

/// Bytes that the engine needs itself, and of a page.
fn sizes() -> (u64, u64) {
    static SIZES: OnceLock<(u64, u64)> = OnceLock::new();
    *SIZES.get_or_init(|| {
        let engine = engine(json!({}));
        (engine.fixed_bytes(), engine.model().new_cache().shape().page_bytes() as u64)
    })
}

fn page() -> u64 {
    sizes().1
}

/// An engine whose memory holds so many bytes beside what it needs itself.
fn with_room(bytes: u64, more: Value) -> Engine {
    let mut options = json!({ "limits": { "memoryBytes": sizes().0 + bytes } });
    more.as_object().unwrap().iter().for_each(|(key, value)| options["limits"][key] = value.clone());
    engine(options)
}

fn salted(n: u32, salt: u32) -> Vec<u32> {
    prompt(n).iter().map(|id| (id + salt * 611) % 5000).collect()
}

fn cached(reply: &Value) -> u64 {
    reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// What is in memory, in the order in which it goes.
fn there(engine: &mut Engine) -> String {
    let metrics = engine.metrics();
    let entries = |cache: &str| metrics["caches"][cache]["entries"].as_u64().unwrap() > 0;
    let mut all = vec![engine.is_ahead().then_some("ahead"), entries("response").then_some("responses")];
    all.push(entries("tokenizer").then_some("tokens"));
    all.push(engine.sessions().copy("").map(|_| "nameless"));
    let names: Vec<String> = engine.sessions().list(now_ms()).into_iter().rev().map(|info| info.id).collect();
    let named = names.iter().map(String::as_str);
    all.into_iter().flatten().chain(named).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_is_missed_least_goes_first() {
    let page = page();
    let mut engine = with_room(20 * page, json!({}));
    engine.sessions().write_leaving();
    let mut kept = body(&salted(40, 1), "unsaved");
    kept["cache"] = "auto".into();
    complete(&mut engine, kept);
    for (i, name) in ["old", "new"].into_iter().enumerate() {
        complete(&mut engine, body(&salted(40, 2 + i as u32), name));
        let copy = engine.sessions().copy(name).unwrap();
        engine.sessions().saved(name, &copy);
    }
    let mut nameless = body(&salted(40, 4), "");
    nameless["cache"] = "refresh".into();
    nameless.as_object_mut().unwrap().remove("session_id");
    complete(&mut engine, nameless);
    engine.foresee_chats("Answer briefly.").unwrap();
    while engine.work_ahead().unwrap() {}
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let chat = Body::chat(&json!({ "messages": messages }), engine.n_tokens()).unwrap();
    engine.foresee(&chat, "Hello.", Some("new")).unwrap();

    let all = "ahead responses tokens nameless unsaved old new";
    assert_eq!(there(&mut engine), all);
    let mut seen = vec![all.to_string()];
    let before = engine.page_budget().used();
    loop {
        assert!(engine.make_room_for(0).unwrap(), "that brings the bound up to date");
        let beyond = engine.page_budget().room() + 1;
        match engine.make_room_for(beyond) {
            Ok(true) => {}
            // What left is written meanwhile.
            Ok(false) => {
                assert_eq!(engine.sessions().take_leaving().map(|(id, _)| id).as_deref(), Some("unsaved"))
            }
            Err(error) => {
                assert_eq!(error.code(), "out_of_memory");
                break;
            }
        }
        let now = there(&mut engine);
        if seen.last() != Some(&now) {
            seen.push(now);
        }
    }
    let order = [
        all,
        "responses tokens nameless unsaved old new",
        "tokens nameless unsaved old new",
        "nameless unsaved old new",
        "unsaved old new",
        "unsaved new",
        "unsaved",
        "",
    ];
    assert_eq!(seen, order);
    assert!(before > 0 && engine.page_budget().used() == 0, "the warmed-up beginning went too");
}

#[test]
fn turns_get_the_room_they_need_within_the_budget_and_answers_are_those_of_a_cold_run() {
    let page = page();
    // The answers and token ids that are kept take some of it.
    let most = 12 * page + (64 << 10);
    let (mut warm, mut cold) = (with_room(most, json!({ "maxSessions": 100 })), engine(json!({})));
    let mut reused = 0;
    for turn in 0..4 {
        for session in 0..6 {
            let mut question = body(&salted(70 + 60 * turn, session), &format!("s{session}"));
            question["cache"] = "auto".into();
            cold.sessions().clear();
            cold.responses().clear();
            let want = complete(&mut cold, question.clone());
            let mut job = begin(&mut warm, question).unwrap();
            let found = loop {
                let done = warm.step(&mut job).unwrap().done;
                let memory = warm.memory(0);
                let used = memory["kvBytes"].as_u64().unwrap() + memory["responseBytes"].as_u64().unwrap();
                assert!(used <= most, "{used} of {most} bytes");
                if let Some(reply) = done {
                    warm.drop_job(job);
                    break reply;
                }
            };
            assert_eq!(ids(&found), ids(&want), "turn {turn} of session {session}");
            reused += cached(&found);
        }
    }
    assert!(reused > 0 && warm.sessions().len() < 6, "some were there, not all");
}

#[test]
fn a_turn_that_outgrows_the_memory_ends_alone() {
    let page = page();
    let mut engine = with_room(4 * page, json!({}));
    let small = body(&salted(60, 1), "small");
    let want = complete(&mut engine, small.clone());
    // It cannot fit: nothing makes way for it.
    let error = begin(&mut engine, body(&prompt(300), "large")).err().unwrap();
    assert_eq!(error.code(), "out_of_memory");
    assert!(engine.sessions().get("small", now_ms()).is_some());
    // It may fit, until its answer is too long.
    let mut grows = body(&prompt(230), "grows");
    grows["max_tokens"] = 200.into();
    grows["logit_bias"] = json!({ "1": -100, "151643": -100, "0": -100 });
    let mut job = begin(&mut engine, grows).unwrap();
    let mut ended = None;
    for _ in 0..10_000 {
        match engine.step(&mut job) {
            Err(error) => {
                ended = Some(error.code());
                break;
            }
            Ok(outcome) if outcome.done.is_some() => break,
            Ok(_) => assert!(engine.page_budget().used() <= 4 * page),
        }
    }
    engine.drop_job(job);
    assert_eq!(ended, Some("out_of_memory"));
    assert!(engine.sessions().get("small", now_ms()).is_none(), "it made way");
    // What it had computed is there, and the next one gets room.
    assert_eq!(engine.sessions().get("grows", now_ms()).unwrap().tokens, 256);
    assert_eq!(ids(&complete(&mut engine, small)), ids(&want));
}

#[test]
fn a_turn_may_pass_the_bound_of_kept_pages_but_nothing_else_stays_then() {
    let page = page();
    let limits = json!({ "limits": { "kvBytes": 3 * page } });
    let (mut warm, mut cold) = (engine(limits), engine(json!({})));
    for (n, left) in [(60, vec!["s60"]), (100, vec!["s60", "s100"]), (400, vec!["s400"]), (50, vec!["s50"])] {
        let question = body(&salted(n, n), &format!("s{n}"));
        assert_eq!(ids(&complete(&mut warm, question.clone())), ids(&complete(&mut cold, question)));
        let mut names: Vec<_> = warm.sessions().list(now_ms()).into_iter().map(|info| info.id).collect();
        names.reverse();
        assert_eq!(names, left);
    }
}

#[test]
fn logits_get_room_too() {
    let page = page();
    let (mut warm, mut cold) = (with_room(4 * page, json!({})), engine(json!({})));
    complete(&mut warm, body(&salted(150, 1), "a"));
    let run = |engine: &mut Engine| {
        let mut job = engine.logits(prompt(200), false).unwrap();
        let mut rows = Vec::new();
        while !job.is_done() {
            rows.extend(engine.step_logits(&mut job).unwrap());
        }
        rows
    };
    assert_eq!(run(&mut warm), run(&mut cold));
    assert!(warm.sessions().is_empty());
}

#[test]
fn sessions_that_are_not_on_disk_are_given_the_time_to_be_written() {
    let page = page();
    let mut engine = with_room(5 * page, json!({}));
    engine.sessions().write_leaving();
    let question = body(&salted(120, 1), "first");
    complete(&mut engine, question);
    let first = engine.sessions().copy("first").unwrap().tokens;
    let mut written = Vec::new();
    let mut job = begin(&mut engine, body(&salted(250, 2), "second")).unwrap();
    while engine.step(&mut job).unwrap().done.is_none() {
        written.extend(engine.sessions().take_leaving().map(|(id, session)| (id, session.tokens)));
    }
    engine.drop_job(job);
    assert_eq!(written.len(), 1);
    assert_eq!((written[0].0.as_str(), &written[0].1), ("first", &first));
    // Where nobody writes them, the turn has its room all the same.
    complete(&mut engine, body(&salted(250, 3), "third"));
    assert!(engine.sessions().get("second", now_ms()).is_none());
}

#[test]
fn a_chat_with_the_system_prompt_of_the_warm_up_finds_it_computed() {
    let system = "You are a patient teacher of arithmetic. Explain each step in one short sentence.";
    let chat = |user: &str, session: Option<&str>| {
        json!({
            "messages": [{ "role": "system", "content": system }, { "role": "user", "content": user }],
            "temperature": 0, "max_tokens": 6, "session_id": session, "return_tokens": true, "cache": "refresh",
        })
    };
    for steps in [usize::MAX, 0, 1] {
        for session in [None, Some("a")] {
            let (mut warm, mut cold) = (engine(json!({})), engine(json!({})));
            warm.foresee_chats(system).unwrap();
            let tokens = warm.tokenize(system, false).unwrap().len() as u64;
            for _ in 0..steps {
                if !warm.work_ahead().unwrap() {
                    break;
                }
            }
            assert!(warm.sessions().list(now_ms()).is_empty() && warm.sessions().is_empty());
            for (i, user) in ["What is 2 + 2?", "\nWhy?"].into_iter().enumerate() {
                let (found, want) =
                    (ask(&mut warm, &chat(user, session)), ask(&mut cold, &chat(user, session)));
                assert_eq!(ids(&found), ids(&want));
                if steps > 1 || i > 0 {
                    assert!(cached(&found) >= tokens, "{} of {tokens} tokens", cached(&found));
                }
                // A request that came in between does not end the warm-up for good.
                complete(&mut warm, body(&prompt(30), "other"));
                while warm.work_ahead().unwrap() {}
                warm.sessions().delete("");
                warm.sessions().delete("a");
            }
        }
    }
    // One that fills the context is of no use, and one that the template refuses is no fault of the load.
    let mut engine = engine(json!({ "contextLength": 16 }));
    engine.foresee_chats(&system.repeat(20)).unwrap();
    assert!(!engine.is_ahead());
}

#[test]
fn a_session_that_comes_back_unasked_is_not_used_by_that() {
    let mut engine = engine(json!({ "limits": { "maxSessions": 2 } }));
    complete(&mut engine, body(&prompt(40), "last"));
    let mut last = engine.sessions().copy("last").unwrap();
    engine.sessions().clear();
    let (now, day) = (now_ms(), 86_400_000.0);
    last.used_at = now - day;
    engine.sessions().bring_back("last", last.clone(), now);
    assert_eq!(engine.sessions().get("last", now + 299_000.0).unwrap().used_at, now - day);
    assert!(engine.sessions().unsaved().is_empty());
    let reply = complete(&mut engine, body(&prompt(50), "last"));
    assert_eq!(cached(&reply), 40);
    // Others were asked for meanwhile: they stay, whatever the bound.
    engine.sessions().clear();
    complete(&mut engine, body(&prompt(20), "a"));
    engine.sessions().bring_back("last", last.clone(), now);
    assert!(engine.sessions().get("last", now).is_none());
    complete(&mut engine, body(&prompt(50), "last"));
    // So does itself.
    engine.sessions().bring_back("last", last.clone(), now);
    assert!(engine.sessions().get("last", now).unwrap().used_at >= now - 1.0);
    // Not asked for: it goes first, and after its time.
    engine.sessions().clear();
    engine.sessions().bring_back("last", last.clone(), now);
    complete(&mut engine, body(&prompt(20), "a"));
    complete(&mut engine, body(&prompt(30), "b"));
    assert!(engine.sessions().get("last", now).is_none());
    engine.sessions().clear();
    engine.sessions().bring_back("last", last, now);
    assert!(engine.sessions().get("last", now + 301_000.0).is_none());
}

#[test]
fn questions_of_one_spelling_are_one_question_where_that_is_asked_for() {
    let chat = |user: &str| {
        json!({
            "messages": [{ "role": "system", "content": "Two  spaces." }, { "role": "user", "content": user }],
            "temperature": 0, "max_tokens": 4, "return_tokens": true,
        })
    };
    let (plain, spaced) = (chat("What is a caf\u{e9}?"), chat("  What is\ta   cafe\u{301}? \n"));
    for normalize in [false, true] {
        let mut engine = engine(json!({ "normalize": normalize }));
        let first = ask(&mut engine, &plain);
        let second = ask(&mut engine, &spaced);
        assert_eq!(second["qandle"]["cached"], normalize);
        assert_eq!(
            ids(&first) == ids(&second)
                && first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"],
            normalize
        );
    }
    // The answer is that to the changed question, and nothing else of the prompt is changed.
    let (mut on, mut off) = (engine(json!({ "normalize": true })), engine(json!({})));
    assert_eq!(ids(&ask(&mut on, &spaced)), ids(&ask(&mut off, &plain)));
    let raw = json!({ "prompt": "a  b ", "max_tokens": 1, "temperature": 0 });
    assert_eq!(
        complete(&mut on, raw.clone())["usage"]["prompt_tokens"],
        complete(&mut off, raw)["usage"]["prompt_tokens"]
    );
}

#[test]
fn each_request_leaves_one_record() {
    let mut engine = engine(json!({}));
    let mut question = body(&prompt(40), "a");
    question["cache"] = "auto".into();
    let replies = [complete(&mut engine, question.clone()), complete(&mut engine, question)];
    let mut job = begin(&mut engine, body(&prompt(90), "a")).unwrap();
    engine.step(&mut job).unwrap();
    engine.abort(&mut job);
    engine.drop_job(job);
    engine.sessions().missed();
    let records = engine.take_records(5);
    assert!(engine.take_records(5).is_empty());
    let of = |key: &str| records.iter().map(|record| record[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("cached"), [false, true, false]);
    assert_eq!(of("promptTokens"), [40, 40, 90]);
    assert_eq!(of("reusedTokens"), [0, 40, 40]);
    assert_eq!(of("sessionId"), ["a", "a", "a"]);
    for (record, reply) in records.iter().zip(&replies) {
        let timings = &reply["qandle"]["timings"];
        for (key, name) in [
            ("ttftMs", "ttft_ms"),
            ("totalMs", "total_ms"),
            ("decodeTokensPerSecond", "decode_tokens_per_second"),
        ] {
            assert_eq!(record[key], timings[name], "{key}");
        }
        assert_eq!(record["phasesMs"]["prefill"], timings["prefill_ms"]);
        assert_eq!(record["completionTokens"], reply["usage"]["completion_tokens"]);
    }
    let rates = &records[2]["hitRates"];
    assert_eq!(
        (&rates["response"], &rates["session"], &rates["sessionDisk"]),
        (&json!(0.5), &json!(0.5), &json!(0.0))
    );
    assert_eq!(records[2]["memory"], engine.memory(5));
    let metrics = engine.metrics();
    assert_eq!(metrics["caches"]["session"]["disk"], json!({ "hits": 0, "misses": 1, "hitRate": 0.0 }));
    for series in ["ttftMs", "totalMs", "decodeTokensPerSecond", "prefillTokensPerSecond"] {
        for key in ["count", "avg", "min", "max", "p50", "p95"] {
            assert!(metrics[series][key].is_number(), "{series}.{key}");
        }
    }
    for phase in ["queue", "tokenize", "prefill", "decode", "detokenize"] {
        assert!(metrics["phasesMs"][phase]["p95"].is_number(), "{phase}");
    }
}
