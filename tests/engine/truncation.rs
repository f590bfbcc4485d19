//! Chats that are longer than the context: whole oldest turns leave, the answer is that of a cold run of what is left, and
//! what is left is not computed again from turn to turn.

use super::{ask, begin_chat, engine, ids};
use qandle::engine::Engine;
use qandle::openai::Body;
use serde_json::{json, Value};

const CONTEXT: u64 = 512;

fn chat(messages: &[Value]) -> Value {
    json!({ "messages": messages, "temperature": 0, "max_tokens": 6, "session_id": "a", "return_tokens": true, "cache": "refresh" })
}

fn small() -> Engine {
    engine(json!({ "contextLength": CONTEXT }))
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

fn number(reply: &Value, path: &str) -> u64 {
    reply.pointer(path).unwrap().as_u64().unwrap()
}

fn dropped(reply: &Value) -> usize {
    number(reply, "/qandle/dropped_messages") as usize
}

fn prefilled(reply: &Value) -> u64 {
    number(reply, "/usage/prompt_tokens") - number(reply, "/usage/prompt_tokens_details/cached_tokens")
}

/// The reply to a chat, which must be that of an engine that is sent only what is left of it.
fn same_as_cold(engine: &mut Engine, messages: &[Value], what: &str) -> Value {
    let reply = ask(engine, &chat(messages));
    let left_out = dropped(&reply);
    let stay = messages.iter().take_while(|message| message["role"] == "system").count();
    let visible: Vec<Value> = messages[..stay].iter().chain(&messages[stay + left_out..]).cloned().collect();
    assert!(left_out == 0 || visible[stay]["role"] == "user", "{what}");
    let mut alone = chat(&visible);
    alone["truncation"] = "disabled".into();
    let want = ask(&mut small(), &alone);
    assert_eq!(ids(&reply), ids(&want), "{what}");
    assert_eq!(reply["usage"]["prompt_tokens"], want["usage"]["prompt_tokens"], "{what}");
    assert!(number(&reply, "/usage/prompt_tokens") <= CONTEXT - 6, "{what}");
    reply
}

/// Answers a question and does what there is to do before the next one.
fn answer(engine: &mut Engine, messages: &mut Vec<Value>, text: &str, idle: bool) {
    let body = Body::chat(&chat(messages), engine.n_tokens()).unwrap();
    engine.foresee(&body, text, Some("a")).unwrap();
    while idle && engine.work_ahead().unwrap() {}
    messages.push(message("assistant", text));
}

const ANSWER: &str = "It is that sum, of course, as everybody who counts on both hands can see at once.";

/// A conversation of many turns; of each the tokens that were prefilled and the messages that had left.
fn talk(engine: &mut Engine, questions: impl Fn(usize) -> String, idle: bool) -> Vec<(u64, usize)> {
    let mut messages = vec![message("system", "You are a calculator who explains.")];
    let mut turns = Vec::new();
    for turn in 0..40 {
        messages.push(message("user", &questions(turn)));
        let reply = same_as_cold(engine, &messages, &format!("turn {turn}"));
        turns.push((prefilled(&reply), dropped(&reply)));
        answer(engine, &mut messages, ANSWER, idle);
    }
    turns
}

#[test]
fn turns_leave_seldom_and_their_cost_falls_into_idle_time() {
    let short = |turn: usize| format!("What is {turn} + 4?");
    let mixed = |turn: usize| match turn % 3 {
        0 => "And now?".to_string(),
        _ => format!("What is {turn} + 4? {}", "Explain. ".repeat(turn % 7)),
    };
    for turns in [talk(&mut small(), short, true), talk(&mut small(), mixed, true)] {
        assert_eq!(turns[0].1, 0);
        let left: Vec<usize> = turns.iter().map(|turn| turn.1).collect();
        assert!(left.is_sorted() && left[39] > 40, "{left:?}");
        let cuts = left.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((3..=12).contains(&cuts), "{left:?}");
        assert!(turns[1..].iter().all(|turn| turn.0 <= 40), "{turns:?}");
    }
    // Without idle time only the turns at which others leave pay.
    let turns = talk(&mut small(), short, false);
    let dear: Vec<usize> = (1..40).filter(|i| turns[*i].0 > 80).collect();
    let cuts: Vec<usize> = (1..40).filter(|i| turns[*i].1 > turns[i - 1].1).collect();
    assert!(!cuts.is_empty() && dear.iter().all(|turn| cuts.contains(turn)), "{dear:?} {cuts:?} {turns:?}");
}

/// A conversation whose next question makes turns leave, and that question.
fn long_chat(engine: &mut Engine, idle: bool) -> Vec<Value> {
    let mut messages = vec![message("system", "You are a calculator.")];
    for turn in 0.. {
        messages.push(message("user", &format!("What is {turn} + 4?")));
        if dropped(&same_as_cold(engine, &messages, "so far")) > 0 {
            return messages;
        }
        answer(engine, &mut messages, ANSWER, idle);
    }
    messages
}

#[test]
fn regenerating_editing_and_other_lengths_of_question_keep_what_is_there() {
    let mut engine = small();
    let mut messages = long_chat(&mut engine, true);
    let first = dropped(&ask(&mut engine, &chat(&messages)));
    let again = same_as_cold(&mut engine, &messages, "regenerated");
    assert_eq!((dropped(&again), prefilled(&again)), (first, 1));
    for question in ["Why?", "Please tell me why, and tell me slowly.", &"Because? ".repeat(20)] {
        *messages.last_mut().unwrap() = message("user", question);
        let reply = same_as_cold(&mut engine, &messages, question);
        assert_eq!(dropped(&reply), first, "{question}");
        let own = engine.tokenize(question, false).unwrap().len() as u64;
        assert!(prefilled(&reply) <= own + 8, "{question}: {}", prefilled(&reply));
    }
    let last = messages.len() - 3;
    messages[last]["content"] = "What is 1000 + 4?".into();
    same_as_cold(&mut engine, &messages, "edited");
}

#[test]
fn a_chat_that_fits_with_room_to_spare_loses_nothing() {
    let mut engine = small();
    let mut messages = long_chat(&mut engine, true);
    messages.truncate(12);
    messages.pop();
    let reply = same_as_cold(&mut engine, &messages, "shortened");
    assert_eq!(dropped(&reply), 0);
    // An answer as long as was asked for finds room.
    let long = long_chat(&mut small(), false);
    let mut body = chat(&long);
    body["max_tokens"] = Value::Null;
    let reply = ask(&mut engine, &body);
    assert!(number(&reply, "/usage/prompt_tokens") <= CONTEXT * 3 / 4);
}

#[test]
fn what_cannot_leave_is_refused_with_numbers() {
    let mut engine = small();
    let long = "one two three four ".repeat(200);
    let history = [message("user", "Hello"), message("assistant", "Hello!")];
    let refused = |engine: &mut Engine, messages: &[Value], truncation: &str| {
        let mut body = chat(messages);
        body["truncation"] = truncation.into();
        let error = begin_chat(engine, &body).err().unwrap();
        assert_eq!(error.code(), "context_overflow");
        error.message()
    };
    let with = |more: Vec<Value>| history.iter().cloned().chain(more).collect::<Vec<_>>();
    let message_of_last = refused(&mut engine, &with(vec![message("user", &long)]), "auto");
    assert!(
        message_of_last.contains("last turn alone") && message_of_last.contains("511"),
        "{message_of_last}"
    );
    assert!(refused(&mut engine, &[message("user", &long)], "auto").contains("512"));
    let system = [message("system", &long), message("user", "Hello")];
    refused(&mut engine, &system, "auto");
    let old = [message("user", &long), message("assistant", "Yes."), message("user", "Hello")];
    refused(&mut engine, &old, "disabled");
    assert_eq!(dropped(&same_as_cold(&mut engine, &old, "a long old turn")), 2);
    let huge = "x".repeat(100 << 20);
    refused(&mut engine, &with(vec![message("user", &huge)]), "auto");
    refused(&mut engine, &[message("user", &huge), message("user", "Hello")], "disabled");
    let mut old = chat(&[message("user", &huge), message("user", "Hello")]);
    assert_eq!(dropped(&ask(&mut engine, &old)), 1);
    old["truncation"] = "middle".into();
    assert_eq!(begin_chat(&mut engine, &old).err().unwrap().code(), "invalid_request");
}

#[test]
fn the_input_limit_makes_turns_leave_too() {
    let mut engine = engine(json!({ "contextLength": CONTEXT, "limits": { "maxInputTokens": 60 } }));
    let turn = |i: usize| [message("user", &format!("What is {i} + 1?")), message("assistant", ANSWER)];
    let mut messages: Vec<Value> = (0..4).flat_map(turn).collect();
    messages.push(message("user", "And now?"));
    let reply = ask(&mut engine, &chat(&messages));
    assert!(dropped(&reply) >= 4 && number(&reply, "/usage/prompt_tokens") <= 60);
    let mut body = chat(&messages);
    body["truncation"] = "disabled".into();
    assert_eq!(begin_chat(&mut engine, &body).err().unwrap().code(), "context_overflow");
    messages = vec![message("user", "Hello"), message("user", &"Why not? ".repeat(40))];
    let error = begin_chat(&mut engine, &chat(&messages)).err().unwrap();
    assert!(error.code() == "context_overflow" && error.message().contains("60"), "{}", error.message());
}

#[test]
fn a_turn_leaves_with_its_tools_and_the_last_one_stays_with_them() {
    let mut engine = small();
    let call = |name: &str| json!({ "role": "assistant", "content": null, "tool_calls": [{ "type": "function", "function": { "name": name, "arguments": "{}" } }] });
    let turn = |i: usize| {
        [
            message("user", &format!("How warm is it in city {i}?")),
            call("weather"),
            message("tool", &"It is sunny and 20 degrees. ".repeat(4)),
            message("assistant", ANSWER),
        ]
    };
    let mut messages = vec![message("assistant", "Welcome! Ask me anything.")];
    messages.extend((0..9).flat_map(turn));
    messages.truncate(messages.len() - 1);
    let reply = same_as_cold(&mut engine, &messages, "tools");
    assert!(dropped(&reply) % 4 == 1, "the greeting and whole turns: {}", dropped(&reply));
    let without_questions = [message("system", "Hello"), message("assistant", "Hello")];
    assert_eq!(dropped(&ask(&mut engine, &chat(&without_questions))), 0);
    assert_eq!(dropped(&ask(&mut engine, &chat(&without_questions[..1]))), 0);
}

#[test]
fn a_very_long_chat_is_looked_at_from_its_end() {
    let mut engine = small();
    let looked_up = |engine: &Engine| number(&engine.metrics(), "/caches/tokenizer/tokens");
    let mut messages = vec![message("system", "You are a calculator.")];
    for i in 0..1000 {
        messages.push(message("user", &format!("What is {i} + 4?")));
        messages.push(message("assistant", ANSWER));
    }
    messages.push(message("user", "And now?"));
    for turn in 0..3 {
        let before = looked_up(&engine);
        let reply = same_as_cold(&mut engine, &messages, "long");
        let spent = looked_up(&engine) - before;
        assert!(spent < 12 * CONTEXT, "{spent} tokens were looked up");
        assert!(dropped(&reply) > 1900);
        if turn > 0 {
            assert!(prefilled(&reply) < 40, "{}", prefilled(&reply));
        }
        answer(&mut engine, &mut messages, ANSWER, true);
        messages.push(message("user", "And now?"));
    }
}

#[test]
fn raw_prompts_do_not_shrink() {
    let mut engine = small();
    let body = json!({ "prompt": "one two three ".repeat(400) });
    let error =
        engine.begin(Body::completion(&body, engine.n_tokens()).unwrap(), web_time::Instant::now(), 7);
    assert_eq!(error.err().unwrap().code(), "context_overflow");
    assert!(Body::completion(&json!({ "prompt": "a", "truncation": "auto" }), 100).is_err());
}
