//! The tokenizer's cache gives the ids that a fresh encode gives, whatever it holds, was read from or has lost, and it is worth
//! its memory.

use std::collections::HashMap;
use std::time::Instant;

use qandle::template::Template;
use qandle::tokenizer::{Bounds, Piece, Special, TokenCache, Tokenizer};
use serde_json::{json, Map, Value};

use super::support::{json as fixture, qwen, r1, Random};

fn cache(tokenizer: &Tokenizer) -> TokenCache {
    TokenCache::new(tokenizer, Bounds::MEMORY, Bounds::DISK)
}

fn stat(cache: &TokenCache, path: &str) -> f64 {
    cache.stats().pointer(path).unwrap().as_f64().unwrap()
}

/// A text of anything that cutting, normalising or merging could go wrong with.
fn text(random: &mut Random, tokenizer: &Tokenizer, most: usize) -> String {
    const BITS: [&str; 22] = [
        " ",
        "\n",
        "  \n ",
        "'s",
        "'Re",
        "the",
        " question",
        "42",
        "é",
        "e\u{301}",
        "\u{301}",
        "鸡兔同笼",
        "，",
        "😀",
        "\u{1f468}\u{200d}\u{1f469}",
        "<|",
        "|>",
        "<th",
        "ink>",
        "\u{212b}",
        "가\u{1100}\u{1161}",
        "\t\t",
    ];
    let added: Vec<&str> = tokenizer.added_tokens().iter().map(|token| token.text.as_str()).collect();
    (0..random.below(most))
        .map(|_| match random.below(8) {
            0 => added[random.below(added.len())],
            _ => BITS[random.below(BITS.len())],
        })
        .collect()
}

fn pieces(random: &mut Random, text: &str) -> Vec<Piece> {
    let mut cuts: Vec<usize> = (0..random.below(6)).map(|_| random.below(text.len() + 1)).collect();
    cuts.retain(|&at| text.is_char_boundary(at));
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2)
        .map(|cut| Piece { text: text[cut[0]..cut[1]].into(), trusted: random.below(2) == 0 })
        .collect()
}

#[test]
fn ids_are_those_of_a_fresh_encode_for_any_text_any_split_and_any_state_of_the_cache() {
    for tokenizer in [qwen(), r1()] {
        let mut random = Random(88172645463325252);
        let small = Bounds { parts: 5, bytes: 2000 };
        // A roomy one, one that always forgets, one that only the second level serves, one that holds nothing.
        let bounds = [
            (Bounds::MEMORY, Bounds::DISK),
            (small, small),
            (Bounds { parts: 0, bytes: 0 }, Bounds::DISK),
            (Bounds { parts: 0, bytes: 0 }, Bounds { parts: 0, bytes: 0 }),
        ];
        let mut caches = bounds.map(|(memory, disk)| TokenCache::new(tokenizer, memory, disk));
        let (mut texts, mut record): (Vec<String>, Vec<u8>) = (Vec::new(), Vec::new());
        for round in 0..1500 {
            // Half of the texts came before, whole or grown.
            let new = text(&mut random, tokenizer, 30);
            let text = match random.below(4) {
                0 | 1 => new,
                more if !texts.is_empty() => {
                    let old = texts[random.below(texts.len())].clone();
                    if more == 2 {
                        old
                    } else {
                        old + &new
                    }
                }
                _ => new,
            };
            let split = pieces(&mut random, &text);
            let special = [Special::All, Special::UserDefined, Special::None][random.below(3)];
            let (whole, prompt) =
                (tokenizer.encode(&text, special).unwrap(), tokenizer.encode_prompt(&split).unwrap());
            for (i, cache) in caches.iter_mut().enumerate() {
                assert_eq!(tokenizer.encode_cached(&text, special, cache).unwrap(), whole, "{i} {text:?}");
                assert_eq!(tokenizer.encode_prompt_cached(&split, cache).unwrap(), prompt, "{i} {split:?}");
                assert!(stat(cache, "/entries") <= 512.0 && cache.bytes() < 4 << 20);
            }
            // A restart of the third, now and then.
            if round % 100 == 50 {
                record = caches[2].changes().merge(&record);
                caches[2] = TokenCache::new(tokenizer, bounds[2].0, bounds[2].1);
                caches[2].read(&record, tokenizer);
            }
            texts.push(text);
        }
        let (rate, kept) = (stat(&caches[0], "/hitRate"), stat(&caches[2], "/disk/hits"));
        assert!(rate > 0.2 && kept > 50.0, "{rate} {kept}");
        assert!(stat(&caches[1], "/entries") <= 5.0 && stat(&caches[1], "/bytes") <= 2000.0);
        assert_eq!((stat(&caches[3], "/hits"), caches[3].bytes()), (0.0, 0));
    }
}

#[test]
fn which_tokens_count_decides_where_a_text_is_cut_and_nothing_else() {
    let tokenizer = r1();
    let mut cache = cache(tokenizer);
    let text = "a <think>b<｜User｜>c";
    for special in [Special::None, Special::All, Special::UserDefined, Special::None, Special::All] {
        assert_eq!(
            tokenizer.encode_cached(text, special, &mut cache).unwrap(),
            tokenizer.encode(text, special).unwrap()
        );
    }
}

#[test]
fn a_conversation_that_grew_by_a_turn_encodes_the_new_turn_alone() {
    for tokenizer in [qwen(), r1()] {
        let template = template(tokenizer);
        let mut cache = cache(tokenizer);
        let mut messages = vec![json!({ "role": "system", "content": "Answer briefly." })];
        for turn in 0..6 {
            messages.push(json!({ "role": "user", "content": format!("question {turn}, and why?") }));
            let before = stat(&cache, "/misses");
            encode(tokenizer, &template, &messages, &mut cache);
            messages.push(json!({ "role": "assistant", "content": format!("answer {turn}, because.") }));
            // The question, the answer before it, and what stands around them the first time.
            let new = stat(&cache, "/misses") - before;
            assert!(turn < 2 || new <= 2.0, "turn {turn}: {new} parts are new");
        }
    }
}

#[test]
fn a_record_that_is_damaged_anywhere_or_another_vocabulary_s_gives_no_wrong_id() {
    let texts: Vec<String> = (0..6).map(|i| format!("text number {i} that is kept")).collect();
    let encode = |tokenizer: &Tokenizer, cache: &mut TokenCache| {
        for text in &texts {
            let ids = tokenizer.encode_cached(text, Special::None, cache).unwrap();
            assert_eq!(ids, tokenizer.encode(text, Special::None).unwrap());
        }
        stat(cache, "/disk/hits")
    };
    let mut first = cache(qwen());
    encode(qwen(), &mut first);
    let record = first.changes().merge(&[]);
    let read = |tokenizer: &'static Tokenizer, record: &[u8]| {
        let mut cache = cache(tokenizer);
        cache.read(record, tokenizer);
        encode(tokenizer, &mut cache)
    };
    assert_eq!(read(qwen(), &record), 6.0);
    for at in 0..record.len() {
        for flip in [1, 0x80] {
            let mut damaged = record.clone();
            damaged[at] ^= flip;
            let hits = read(qwen(), &damaged);
            assert!(hits < 6.0, "byte {at}");
            // Beyond the head only the entry goes, or what follows a length that leads nowhere.
            assert!(at < 8 || hits == 5.0 || hits >= ((at - 8) / 50) as f64 - 4.0, "byte {at}: {hits}");
        }
        read(qwen(), &record[..at]);
    }
    assert_eq!(read(r1(), &record), 0.0);
    // Noise, and lengths that promise what is not there.
    let mut random = Random(7);
    for len in 0..300 {
        let noise: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
        read(qwen(), &noise);
        read(qwen(), &[&record[..8], &noise].concat());
        read(qwen(), &[&record[..8 + 24], &[0xFF; 4], &noise[..]].concat());
    }
    // Both vocabularies in one record.
    let mut other = cache(r1());
    encode(r1(), &mut other);
    let both = other.changes().merge(&record);
    assert_eq!((read(qwen(), &both), read(r1(), &both)), (6.0, 6.0));
}

#[test]
fn two_tabs_do_not_lose_each_other_s_and_the_longest_unused_go_where_there_is_no_room() {
    let bounds = Bounds { parts: 6, bytes: 4096 };
    let new = || TokenCache::new(qwen(), Bounds::MEMORY, bounds);
    let use_text = |cache: &mut TokenCache, i: usize| {
        qwen().encode_cached(&format!("the text {i}"), Special::None, cache).unwrap();
    };
    let known = |record: &[u8]| {
        let found = |i: &usize| {
            let mut cache = new();
            cache.read(record, qwen());
            use_text(&mut cache, *i);
            stat(&cache, "/disk/hits") == 1.0
        };
        (0..10).filter(found).collect::<Vec<_>>()
    };
    let (mut a, mut b) = (new(), new());
    (0..3).for_each(|i| use_text(&mut a, i));
    (3..6).for_each(|i| use_text(&mut b, i));
    assert!(a.is_changed());
    let changes = a.changes();
    let record = b.changes().merge(&changes.merge(&[]));
    a.written(&changes);
    assert!(!a.is_changed());
    assert_eq!(known(&record), [0, 1, 2, 3, 4, 5]);
    // The next visit uses the oldest, and two new ones come.
    let mut next = new();
    next.read(&record, qwen());
    assert!(next.is_read() && !next.is_changed());
    [0, 6, 7].into_iter().for_each(|i| use_text(&mut next, i));
    let record = next.changes().merge(&record);
    assert_eq!(known(&record), [0, 3, 4, 5, 6, 7]);
    assert!(record.len() <= 4096 + 8);
}

#[test]
fn a_huge_text_is_encoded_and_leaves_the_rest_in_its_place() {
    let mut cache = cache(qwen());
    qwen().encode_cached("short", Special::None, &mut cache).unwrap();
    for n in [600_000, 3_000_000] {
        let huge: String = "word, and another. ".chars().cycle().take(n).collect();
        let ids = qwen().encode_cached(&huge, Special::None, &mut cache).unwrap();
        assert_eq!(ids, qwen().encode(&huge, Special::None).unwrap());
        assert_eq!((stat(&cache, "/entries"), stat(&cache, "/disk/entries")), (1.0, 1.0));
    }
    // Many large ones stay within the bound.
    for i in 0..60 {
        qwen().encode_cached(&format!("{i} {}", "word ".repeat(20_000)), Special::None, &mut cache).unwrap();
        assert!(stat(&cache, "/bytes") <= (2 << 20) as f64 && cache.bytes() < 3_500_000);
    }
}

#[test]
fn preloaded_phrases_are_hits_at_once_and_count_as_nothing_before() {
    let mut cache = cache(r1());
    r1().preload("You are <think>a helper", &mut cache).unwrap();
    assert_eq!((stat(&cache, "/hits"), stat(&cache, "/misses")), (0.0, 0.0));
    for special in [Special::None, Special::All] {
        r1().encode_cached("You are <think>a helper", special, &mut cache).unwrap();
    }
    assert_eq!(stat(&cache, "/misses"), 0.0);
}

#[test]
fn vocabularies_are_told_apart_and_one_that_was_stored_is_the_same() {
    assert_ne!(qwen().identity(), r1().identity());
    assert_eq!(Tokenizer::restore(&qwen().store()).unwrap().identity(), qwen().identity());
    let begun = Instant::now();
    let identity = r1().identity();
    println!("identity {identity:016x} in {:?}", begun.elapsed());
}

fn template(tokenizer: &Tokenizer) -> Template {
    let templates = &fixture("chat_cases.json")["templates"];
    let name = if std::ptr::eq(tokenizer, qwen()) { "coder05" } else { "r1" };
    Template::for_tokenizer(templates[name].as_str().unwrap(), tokenizer).unwrap()
}

fn encode(tokenizer: &Tokenizer, template: &Template, messages: &[Value], cache: &mut TokenCache) -> usize {
    let prompt = template.render(&messages.into(), None, Some(true), &Map::new()).unwrap();
    let ids = tokenizer.encode_prompt_cached(&prompt, cache).unwrap();
    assert_eq!(ids, tokenizer.encode_prompt(&prompt).unwrap());
    ids.len()
}

/// The messages of `workload.json`'s requests in order, each with its answer last; answers are made up, the same one to the same
/// question.
fn conversations() -> Vec<Vec<Value>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/text/workload.json");
    let workload: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let (mut sessions, mut firsts) = (HashMap::new(), HashMap::new());
    let requests = workload["requests"].as_array().unwrap().iter().map(|request| {
        if let Some(first) = request["repeat_of_first_turn"].as_str() {
            let first: &Vec<Value> = &firsts[first];
            return first.clone();
        }
        let name = request["session"].as_str().unwrap().to_string();
        let start = || vec![json!({ "role": "system", "content": workload["system"] })];
        let messages: &mut Vec<Value> = sessions.entry(name.clone()).or_insert_with(start);
        messages.push(json!({ "role": "user", "content": request["user"] }));
        let turn = messages.len();
        let answer = format!("{name}, {turn}: {}", "the equation, its solution and the check. ".repeat(4));
        messages.push(json!({ "role": "assistant", "content": answer }));
        firsts.entry(name).or_insert_with(|| messages.clone());
        messages.clone()
    });
    requests.collect()
}

/// Runs requests through a cache as the engine does: shares of look-ups that the first level and that either answered, and of
/// tokens that either gave.
fn run(tokenizer: &Tokenizer, requests: &[Vec<Value>], cache: &mut TokenCache) -> [f64; 3] {
    let template = template(tokenizer);
    for messages in requests {
        encode(tokenizer, &template, &messages[..messages.len() - 1], cache);
        let answered = template.render(&messages.clone().into(), None, Some(false), &Map::new()).unwrap();
        tokenizer.preload_prompt(&answered, cache).unwrap();
    }
    let tokens = stat(cache, "/reusedTokens") / stat(cache, "/tokens");
    [stat(cache, "/hitRate"), stat(cache, "/combinedHitRate"), tokens]
}

/// Published figures on such a workload: 89 % with 512 entries, 99.2 % with a second level on the disk. R1's template leaves no
/// text but the messages', of which each question is new once: that bounds what share of so few look-ups can be answered.
#[test]
fn the_workload_hits_more_often_than_published_figures() {
    let requests = conversations();
    for (name, tokenizer, least) in [("ChatML", qwen(), 0.89), ("R1", r1(), 0.8)] {
        let mut first = cache(tokenizer);
        let cold = run(tokenizer, &requests, &mut first);
        let after = |record: &[u8], requests: &[Vec<Value>]| {
            let mut cache = cache(tokenizer);
            cache.read(record, tokenizer);
            run(tokenizer, requests, &mut cache)
        };
        let second = after(&first.changes().merge(&[]), &requests);
        // A restart in the middle of the first run.
        let (early, late) = requests.split_at(requests.len() / 2);
        let mut half = cache(tokenizer);
        run(tokenizer, early, &mut half);
        let half = after(&half.changes().merge(&[]), late);
        let visits = [("first visit", cold), ("second visit", second), ("second half after a restart", half)];
        for (when, rates) in visits {
            let [memory, both, tokens] = rates.map(|rate| rate * 100.0);
            println!(
                "{name}, {when}: {memory:.1} % in memory, {both:.1} % with the disk, {tokens:.1} % of tokens"
            );
        }
        assert!(cold[0] > least && cold[2] > 0.89, "{cold:?}");
        assert!(second[1] > 0.992 && second[2] > 0.992, "{second:?}");
    }
}

/// A hit may cost this share of a miss.
const MOST_OF_A_MISS: f64 = 0.05;

#[test]
fn a_hit_on_a_long_prompt_costs_a_twentieth_of_a_miss_at_most() {
    const WORDS: [&str; 8] =
        ["If", " the farmer", " counts", " 35 heads,", " then", " how many", " legs?", "\n"];
    let mut random = Random(99);
    let prompts: Vec<String> = (0..60)
        .map(|i| {
            let words = std::iter::repeat_with(|| WORDS[random.below(WORDS.len())]);
            format!("{i} {}", words.take(400).collect::<String>()).chars().take(2000).collect()
        })
        .collect();
    let mut cache = cache(r1());
    let mut time = |special| {
        let mut ns: Vec<u128> = prompts
            .iter()
            .map(|prompt| {
                let begun = Instant::now();
                let ids = r1().encode_cached(prompt, special, &mut cache).unwrap();
                let ns = begun.elapsed().as_nanos();
                assert!(!ids.is_empty());
                ns
            })
            .collect();
        ns.sort_unstable();
        ns[ns.len() / 2]
    };
    let miss = time(Special::All);
    let hit = time(Special::All).min(time(Special::All));
    let ratio = hit as f64 / miss as f64;
    println!("2000 characters: a miss {miss} ns, a hit {hit} ns, {:.2} %", ratio * 100.0);
    assert!(ratio <= MOST_OF_A_MISS);
}
