//! Sessions as they are written to a disk: what comes back answers as if it had never left, and what is damaged or another
//! model's does not come back.

#![allow(clippy::unwrap_used)] // a test may end in a panic

use qandle::kv_cache::{KvCache, KvKind, KvShape, PAGE};
use qandle::session::Session;
use qandle::snapshot::{pages_of, row_of, Restoring, Row};
use std::collections::HashMap;

const KINDS: [KvKind; 3] = [KvKind::F16, KvKind::F32, KvKind::Q8];

fn shape(kind: KvKind) -> KvShape {
    KvShape { layers: 2, kv_heads: 3, head_dim: 40, kind }
}

/// Appends tokens whose keys and values are made of them and of their places.
fn append(session: &mut Session, mut tokens: &[u32]) {
    while tokens.len() > session.cache.most_tokens() {
        let (slice, rest) = tokens.split_at(session.cache.most_tokens());
        append(session, slice);
        tokens = rest;
    }
    session.cache.reserve(tokens.len()).unwrap();
    for (i, token) in tokens.iter().enumerate() {
        let place = session.tokens.len() + i;
        let row = |salt: usize| -> Vec<f32> {
            (0..120)
                .map(|c| ((*token as usize * 7 + place * 31 + c * 13 + salt) % 97) as f32 / 8.0 - 6.0)
                .collect()
        };
        for layer in 0..2 {
            session.cache.write(layer, i, &row(layer), &row(layer + 50)).unwrap();
        }
    }
    session.cache.commit(tokens.len());
    session.tokens.extend(tokens);
}

fn session(kind: KvKind, tokens: &[u32]) -> Session {
    let mut session = Session::new(KvCache::new(shape(kind)), 1000.0);
    append(&mut session, tokens);
    session
}

/// As [`session`], whose positions see the first page and so many before their own.
fn windowed(window: usize, tokens: &[u32]) -> Session {
    let cache = KvCache::new(shape(KvKind::F16)).with_window(Some(window));
    let mut session = Session::new(cache, 1000.0);
    append(&mut session, tokens);
    session
}

/// All keys and values, widened.
fn values(session: &Session) -> Vec<u32> {
    let mut all = Vec::new();
    for (i, page) in session.cache.pages().iter().enumerate() {
        let used = (session.cache.len() - i * PAGE).min(PAGE);
        for (layer, head) in (0..2).flat_map(|layer| [0, 1, 2].map(|head| (layer, head))) {
            let (mut keys, mut values) = (vec![0.0; 40 * PAGE], vec![0.0; 40 * PAGE]);
            page.keys(layer, head).widen_keys(PAGE, &mut keys);
            page.values(layer, head).widen_values(PAGE, 40, &mut values);
            all.extend((0..40 * PAGE).filter(|at| at % PAGE < used).map(|at| keys[at].to_bits()));
            all.extend(values[..40 * used].iter().map(|x| x.to_bits()));
        }
    }
    all
}

#[derive(Default)]
struct Disk {
    rows: HashMap<String, String>,
    pages: HashMap<String, Vec<u8>>,
}

impl Disk {
    /// Writes a session, at most so many new pages at a time; says how many were new in all.
    fn write(&mut self, session: &Session, most: usize) -> usize {
        let mut new = 0;
        loop {
            let before = self.rows.get("a").and_then(|text| Row::read(text));
            let (row, pages) = Row::of("a", "model", session, before.as_ref(), most);
            new += pages.len();
            assert!(pages.iter().all(|(key, _)| key.starts_with(&pages_of(&row_of("model", "a")))));
            self.pages.extend(pages);
            let keys = row.keys();
            self.pages.retain(|key, _| keys.contains(key));
            assert_eq!(self.pages.len(), keys.len());
            self.rows.insert("a".into(), row.text());
            if row.tokens.len() == session.tokens.len() {
                assert_eq!(row.bytes as usize, self.pages.values().map(Vec::len).sum::<usize>());
                return new;
            }
            assert_eq!(row.tokens.len() % PAGE, 0);
        }
    }

    fn read(&self) -> Option<Session> {
        let mut restoring = Restoring::new(Row::read(self.rows.get("a")?)?);
        while let Some(key) = restoring.next() {
            let Some(bytes) = self.pages.get(&key) else { break };
            if !restoring.push(bytes).unwrap() {
                break;
            }
        }
        Some(restoring.finish())
    }
}

#[test]
fn a_session_comes_back_as_it_was_and_only_what_changed_is_written() {
    for kind in KINDS {
        for most in [1, 2, 100] {
            let mut disk = Disk::default();
            let mut a = session(kind, &(0..150).collect::<Vec<_>>());
            assert_eq!(disk.write(&a, most), 3);
            let same = |disk: &Disk, a: &Session| {
                let b = disk.read().unwrap();
                assert_eq!(
                    (&b.tokens, b.created_at, b.cache.len()),
                    (&a.tokens, a.created_at, a.tokens.len())
                );
                assert!(values(&b) == values(a), "{kind:?}");
                b
            };
            let mut b = same(&disk, &a);
            // What came back can be written on, like what stayed.
            append(&mut a, &[7; 60]);
            append(&mut b, &[7; 60]);
            assert!(values(&b) == values(&a));
            assert_eq!(disk.write(&a, most), 2, "the third page, and a fourth");
            assert_eq!(disk.write(&b, most), 0);
            same(&disk, &a);
            a.truncate(70);
            append(&mut a, &[9; 3]);
            assert_eq!(disk.write(&a, most), 1);
            same(&disk, &a);
        }
    }
}

#[test]
fn a_row_is_read_whatever_the_time_was() {
    let mut a = session(KvKind::F16, &[1; 10]);
    for i in 0..1000 {
        let time = 1_796_090_400_123.0 + f64::from(i) * 1234.567;
        (a.created_at, a.used_at) = (time, time + 0.1);
        let (row, _) = Row::of("a", "model", &a, None, 9);
        let read = Row::read(&row.text());
        assert!(read.is_some_and(|read| read == row && (read.used_at - a.used_at).abs() < 1.0), "{time}");
    }
}

#[test]
fn damage_ends_the_session_before_it() {
    for kind in KINDS {
        let mut disk = Disk::default();
        let a = session(kind, &(0..250).collect::<Vec<_>>());
        disk.write(&a, 100);
        let keys = Row::read(&disk.rows["a"]).unwrap().keys();
        for (page, key) in keys.iter().enumerate() {
            let whole = disk.pages[key].clone();
            let mut changed = whole.clone();
            changed[whole.len() / 3] ^= 0x10;
            for bytes in [Some(changed), Some(whole[1..].to_vec()), Some(Vec::new()), None] {
                disk.pages.remove(key);
                disk.pages.extend(bytes.map(|bytes| (key.clone(), bytes)));
                let b = disk.read().unwrap();
                assert_eq!((&b.tokens[..], b.cache.len()), (&a.tokens[..page * PAGE], page * PAGE));
                assert!(values(&b) == values(&a)[..values(&b).len()]);
            }
            disk.pages.insert(key.clone(), whole);
        }
        // A row with any byte changed is none, or the same.
        let text = disk.rows["a"].clone();
        let row = Row::read(&text);
        for at in 0..text.len() {
            for bit in [1, 4] {
                let mut bytes = text.clone().into_bytes();
                bytes[at] ^= bit;
                if let Some(other) = String::from_utf8(bytes).ok().and_then(|text| Row::read(&text)) {
                    assert_eq!(Some(other), row, "byte {at}");
                }
            }
        }
        for cut in [0, 1, text.len() / 2, text.len() - 1] {
            assert!(Row::read(&text[..cut]).is_none());
        }
    }
}

#[test]
fn a_session_with_a_window_comes_back_whole_or_as_its_first_page() {
    for (window, most) in [(1, 1), (2, 1), (2, 2), (3, 100)] {
        let mut disk = Disk::default();
        let tokens: Vec<u32> = (0..700).collect();
        let mut a = windowed(window, &tokens);
        assert_eq!(disk.write(&a, most), window + 2);
        let mut b = disk.read().unwrap();
        assert_eq!((&b.tokens, b.cache.position(), b.cache.dropped()), (&a.tokens, 700, 9 - window));
        assert!(values(&b) == values(&a));
        append(&mut a, &[7; 90]);
        append(&mut b, &[7; 90]);
        assert!(values(&b) == values(&a));
        // The page that was being filled, and two more; what has left the window is no longer there.
        assert_eq!(disk.write(&a, most), 3.min(window + 1));
        assert_eq!((disk.write(&b, most), disk.pages.len()), (0, window + 2));
        let (row, keys) = (disk.rows["a"].clone(), Row::read(&disk.rows["a"]).unwrap().keys());
        for (page, key) in keys.iter().enumerate() {
            let whole = disk.pages.remove(key).unwrap();
            let b = disk.read().unwrap();
            // The last page alone may be missing: what the others hold is what its positions see.
            let left = match page {
                0 => 0,
                _ if page == window + 1 => 12 * PAGE,
                _ => PAGE,
            };
            assert_eq!((&b.tokens[..], b.cache.position()), (&a.tokens[..left], left));
            assert!(values(&b) == values(&a)[..values(&b).len()]);
            // What is left of it is written as the session that it is.
            disk.rows.insert("a".into(), Row::of("a", "model", &b, Row::read(&row).as_ref(), 0).0.text());
            assert_eq!(disk.read().unwrap().tokens, b.tokens);
            disk.rows.insert("a".into(), row.clone());
            disk.pages.insert(key.clone(), whole);
        }
        let row = Row::read(&row).unwrap();
        assert!(row.fits("model", "a", shape(KvKind::F16), Some(window)));
        for other in [None, Some(window + 1)] {
            assert!(!row.fits("model", "a", shape(KvKind::F16), other));
        }
        // Nor is anything taken over from another window's row, though the tokens are the same.
        assert_eq!(Row::of("a", "model", &windowed(window + 1, &tokens), Some(&row), 99).1.len(), window + 3);
    }
}

#[test]
fn a_row_with_a_gap_that_cannot_be_is_none_or_gives_no_more_than_its_beginning() {
    let mut disk = Disk::default();
    disk.write(&windowed(2, &(0..700).collect::<Vec<_>>()), 100);
    for (dropped, window, tokens) in [
        (0, Some(2), 700),
        (9, Some(2), 700),
        (7, None, 700),
        (7, Some(2), 600),
        (usize::MAX, Some(2), 700),
        (7, Some(9), 700),
    ] {
        let mut row: serde_json::Value = serde_json::from_str(&disk.rows["a"]).unwrap();
        (row["dropped"], row["window"]) = (dropped.into(), window.into());
        row["tokens"] = (0..tokens).collect::<Vec<u32>>().into();
        row["sum"] = 0.into();
        row["sum"] = qandle::sum::Sum::of(row.to_string().as_bytes()).into();
        let Some(row) = Row::read(&row.to_string()) else { continue };
        assert_eq!((dropped, window), (7, Some(9)), "the others are none");
        let mut restoring = Restoring::new(row);
        while let Some(bytes) = restoring.next().and_then(|key| disk.pages.get(&key)) {
            assert!(restoring.push(bytes).unwrap());
        }
        assert_eq!(restoring.finish().tokens.len(), PAGE);
    }
}

#[test]
fn values_that_are_no_numbers_do_not_come_back() {
    let a = session(KvKind::F16, &[1; 10]);
    let (row, pages) = Row::of("a", "model", &a, None, 9);
    // Whoever writes such a page writes its sum too.
    let (_, mut bytes) = pages.into_iter().next().unwrap();
    bytes[..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let sum = |bytes: &[u8]| qandle::sum::Sum::of(bytes);
    let mut json: serde_json::Value = serde_json::from_str(&row.text()).unwrap();
    json["pages"][0]["sum"] = sum(&bytes).into();
    json["sum"] = 0.into();
    json["sum"] = sum(json.to_string().as_bytes()).into();
    let forged = Row::read(&json.to_string()).expect("the row is sound");
    let mut restoring = Restoring::new(forged);
    assert!(!restoring.push(&bytes).unwrap());
    assert!(restoring.finish().tokens.is_empty());
}

#[test]
fn each_model_shape_and_session_has_its_own() {
    let a = session(KvKind::F16, &[1; 10]);
    let (row, _) = Row::of("a", "model", &a, None, 9);
    assert!(row.fits("model", "a", shape(KvKind::F16), None));
    assert!(!row.fits("other", "a", shape(KvKind::F16), None));
    assert!(!row.fits("model", "b", shape(KvKind::F16), None));
    assert!(!row.fits("model", "a", shape(KvKind::Q8), None));
    // Nothing is taken over from another kind's row.
    let q8 = session(KvKind::Q8, &[1; 10]);
    assert_eq!(Row::of("a", "model", &q8, Some(&row), 9).1.len(), 1);
    assert_eq!(Row::of("a", "model", &a, Some(&row), 9).1.len(), 0);
    assert_ne!(pages_of(&row_of("model", "a")), pages_of(&row_of("model", "b")));
}
