//! The memory's bounds on a model with the KV cache of a 0.5B (24 layers, 2 heads of 64) and little else: 200 sessions in the
//! space of sixteen, and a system that gives no more memory.

#![allow(clippy::unwrap_used)] // a test may end in a panic

#[path = "common/gguf_builder.rs"]
mod gguf_builder;

use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use flate2::Compression;
use gguf_builder::GgufBuilder;
use qandle::engine::{now_ms, Engine, Options, TextSide};
use qandle::kv_cache::PAGE;
use qandle::openai::Body;
use qandle::session::Session;
use qandle::snapshot::{Restoring, Row};
use qandle::weights::load_bytes;
use qandle::Error;
use serde_json::{json, Value};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashMap;
use std::io::{Read, Write};
use web_time::Instant;

/// Bytes of a page: keys and values of 64 positions, 24 layers, 2 heads of 64 halves.
const PAGE_BYTES: usize = 2 * 24 * 2 * 64 * 64 * 2;

/// As the system's, but on this thread it gives no page beyond so many.
struct Scarce;

#[global_allocator]
static SCARCE: Scarce = Scarce;

thread_local! {
    static PAGES_LEFT: Cell<i64> = const { Cell::new(i64::MAX) };
}

// SAFETY: every call goes to the system's allocator unchanged, or gives no memory, which an allocator may.
unsafe impl GlobalAlloc for Scarce {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() == PAGE_BYTES {
            if PAGES_LEFT.get() == 0 {
                return std::ptr::null_mut();
            }
            PAGES_LEFT.set(PAGES_LEFT.get() - 1);
        }
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if layout.size() == PAGE_BYTES {
            PAGES_LEFT.set(PAGES_LEFT.get().saturating_add(1));
        }
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn file() -> Vec<u8> {
    let (hidden, vocab, inner) = (128, 64, 32);
    let mut seed = 1u32;
    let mut values = |n: u64| -> Vec<f32> {
        let next = |_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(next).map(|x| x / 4.0).collect()
    };
    let mut file = GgufBuilder::new()
        .str("general.architecture", "qwen2")
        .u32("qwen2.block_count", 24)
        .u32("qwen2.context_length", 32768)
        .u32("qwen2.embedding_length", hidden as u32)
        .u32("qwen2.feed_forward_length", inner as u32)
        .u32("qwen2.attention.head_count", 2)
        .u32("qwen2.attention.head_count_kv", 2)
        .f32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
        .f32("qwen2.rope.freq_base", 1e6);
    let mut add = |name: String, dims: &[u64]| {
        let values = values(dims.iter().product());
        file = std::mem::take(&mut file).tensor_f32(&name, dims, &values);
    };
    add("token_embd.weight".into(), &[hidden, vocab]);
    add("output_norm.weight".into(), &[hidden]);
    for layer in 0..24 {
        for (name, dims) in [
            ("attn_norm.weight", &[hidden][..]),
            ("attn_q.weight", &[hidden, hidden]),
            ("attn_q.bias", &[hidden]),
            ("attn_k.weight", &[hidden, hidden]),
            ("attn_k.bias", &[hidden]),
            ("attn_v.weight", &[hidden, hidden]),
            ("attn_v.bias", &[hidden]),
            ("attn_output.weight", &[hidden, hidden]),
            ("ffn_norm.weight", &[hidden]),
            ("ffn_gate.weight", &[hidden, inner]),
            ("ffn_up.weight", &[hidden, inner]),
            ("ffn_down.weight", &[inner, hidden]),
        ] {
            add(format!("blk.{layer}.{name}"), dims);
        }
    }
    file.build()
}

fn engine(options: Value) -> Engine {
    let options: Options = serde_json::from_value(options).unwrap();
    let (model, mut metadata, plan) = load_bytes(&file()).unwrap();
    let text = TextSide::from_gguf(&mut metadata, &plan).unwrap();
    Engine::new(model, plan, text, "tiny", options).unwrap()
}

/// Sessions on a disk, as the worker keeps them; deflated, so that 200 of them fit into a test.
#[derive(Default)]
struct Disk {
    rows: HashMap<String, String>,
    pages: HashMap<String, Vec<u8>>,
}

impl Disk {
    fn write(&mut self, engine: &mut Engine) {
        while let Some((id, session)) = engine.sessions().take_leaving() {
            let before = self.rows.get(&id).and_then(|text| Row::read(text));
            let (row, pages) = Row::of(&id, "m", &session, before.as_ref(), 100);
            for (key, bytes) in pages {
                let mut deflated = DeflateEncoder::new(Vec::new(), Compression::fast());
                deflated.write_all(&bytes).unwrap();
                self.pages.insert(key, deflated.finish().unwrap());
            }
            self.rows.insert(id, row.text());
        }
    }

    fn restore(&mut self, engine: &mut Engine, id: &str) {
        let Some(row) = self.rows.get(id).map(|text| Row::read(text).unwrap()) else { return };
        if engine.sessions().has(id, now_ms()) {
            return;
        }
        while !engine.make_room_for(row.bytes).unwrap() {
            self.write(engine);
        }
        let mut restoring = Restoring::new(row).within(engine.page_budget());
        while let Some(key) = restoring.next() {
            let mut bytes = Vec::new();
            DeflateDecoder::new(&self.pages[&key][..]).read_to_end(&mut bytes).unwrap();
            assert!(restoring.push(&bytes).unwrap());
        }
        engine.sessions().restored(id, restoring.finish(), now_ms());
    }
}

/// A whole reply.
fn ask(engine: &mut Engine, body: &Value) -> Result<Value, Error> {
    let body = Body::completion(body, engine.n_tokens())?;
    let mut job = engine.begin(body, Instant::now(), 7)?;
    loop {
        match engine.step(&mut job).map(|outcome| outcome.done) {
            Ok(None) => {}
            Ok(Some(reply)) => {
                engine.drop_job(job);
                return Ok(reply);
            }
            Err(error) => {
                engine.drop_job(job);
                return Err(error);
            }
        }
    }
}

fn question(session: &str, prompt: &[u32]) -> Value {
    json!({ "prompt": prompt, "session_id": session, "temperature": 0, "max_tokens": 3, "return_tokens": true, "cache": "off" })
}

fn prompt(salt: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + i * i * salt + salt) % 64) as u32).collect()
}

fn ids(reply: &Value) -> Vec<u32> {
    serde_json::from_value(reply["choices"][0]["token_ids"].clone()).unwrap()
}

/// What a layer's keys and values are made of here; exact as halves.
fn value(token: u32, place: usize, layer: usize) -> f32 {
    ((token as usize * 7 + place * 31 + layer * 13) % 97) as f32 / 8.0
}

/// As a turn of these tokens: pages are made within the budget, others make way.
fn append(engine: &mut Engine, disk: &mut Disk, session: &mut Session, tokens: &[u32]) {
    while session.cache.reserve(tokens.len()).is_err() {
        engine.make_room_for(PAGE_BYTES as u64).unwrap();
        disk.write(engine);
    }
    for (i, token) in tokens.iter().enumerate() {
        for layer in 0..24 {
            let row = [value(*token, session.tokens.len() + i, layer); 128];
            session.cache.write(layer, i, &row, &row).unwrap();
        }
    }
    session.cache.commit(tokens.len());
    session.tokens.extend(tokens);
}

/// Whether the pages are those of the tokens.
fn is_right(session: &Session) -> bool {
    let (mut keys, mut values) = ([0.0; 64 * PAGE], [0.0; 64 * PAGE]);
    session.tokens.chunks(PAGE).zip(session.cache.pages()).enumerate().all(|(i, (tokens, page))| {
        (0..24).flat_map(|layer| [(layer, 0), (layer, 1)]).all(|(layer, head)| {
            page.keys(layer, head).widen_keys(PAGE, &mut keys);
            page.values(layer, head).widen_values(PAGE, 64, &mut values);
            tokens.iter().enumerate().all(|(at, token)| {
                let want = value(*token, i * PAGE + at, layer);
                keys[5 * PAGE + at] == want && values[at * 64 + 63] == want
            })
        })
    })
}

#[test]
fn two_hundred_sessions_go_through_64_mib_and_come_back() {
    let most = 64 << 20;
    let mut engine = engine(json!({ "limits": { "maxSessions": 1000, "kvBytes": most } }));
    assert_eq!(engine.model().new_cache().shape().page_bytes(), PAGE_BYTES);
    engine.sessions().write_leaving();
    let mut disk = Disk::default();
    // A bound that no page has met yet is none: a request sets it.
    assert!(engine.make_room_for(0).unwrap());
    for round in 0..2 {
        for i in 0..200 {
            let name = format!("s{i}");
            disk.restore(&mut engine, &name);
            let session = engine.sessions().take(&name, now_ms());
            assert_eq!(session.is_some(), round > 0, "session {i}");
            let new = || Session::new(engine.model().new_cache().within(engine.page_budget()), now_ms());
            let mut session = session.unwrap_or_else(new);
            assert_eq!(session.tokens, prompt(i, 300 * round));
            assert!(is_right(&session), "session {i} of round {round}");
            let more = &prompt(i, 300 + 5 * round)[session.tokens.len()..];
            append(&mut engine, &mut disk, &mut session, more);
            engine.sessions().put(&name, session, now_ms() + f64::from(i as u32));
            disk.write(&mut engine);
            assert!(engine.page_budget().used() <= most, "{} bytes", engine.page_budget().used());
        }
    }
    let counts = engine.sessions().disk_counts();
    assert_eq!((counts.hits, counts.misses), (200, 0));
    assert_eq!(engine.sessions().len(), (64 << 20) / (5 * PAGE_BYTES), "as many as there is room for");
}

#[test]
fn where_the_system_gives_no_more_others_make_way_and_the_request_ends_alone_only_if_none_are_left() {
    let mut warm = engine(json!({ "contextLength": 2048 }));
    let mut cold = engine(json!({}));
    let (a, b) = (prompt(1, 70), prompt(2, 140));
    let mut want = |prompt: &[u32]| {
        cold.sessions().clear();
        ids(&ask(&mut cold, &question("cold", prompt)).unwrap())
    };
    let (want_a, want_b) = (want(&a), want(&b));
    // Two of its pages for `a`, three for `b`.
    PAGES_LEFT.set(4);
    for _ in 0..2 {
        assert_eq!(ids(&ask(&mut warm, &question("a", &a)).unwrap()), want_a);
        assert_eq!(ids(&ask(&mut warm, &question("b", &b)).unwrap()), want_b);
        assert!(warm.sessions().get("a", now_ms()).is_none(), "it made way");
    }
    let error = ask(&mut warm, &question("c", &prompt(3, 300))).unwrap_err();
    assert_eq!(error.code(), "out_of_memory");
    // The engine goes on, and later has what it is given.
    assert_eq!(ids(&ask(&mut warm, &question("b", &b)).unwrap()), want_b);
    PAGES_LEFT.set(i64::MAX);
    let c = prompt(3, 300);
    cold.sessions().clear();
    let want_c = ids(&ask(&mut cold, &question("cold", &c)).unwrap());
    assert_eq!(ids(&ask(&mut warm, &question("c", &c)).unwrap()), want_c);
}
