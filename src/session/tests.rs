use super::*;
use crate::kv_cache::{KvKind, KvShape};

fn session(tokens: &[u32], now: f64) -> Session {
    let mut cache = KvCache::new(KvShape { layers: 1, kv_heads: 1, head_dim: 4, kind: KvKind::F16 });
    cache.reserve(tokens.len()).unwrap();
    cache.commit(tokens.len());
    Session { tokens: tokens.to_vec(), offered: tokens.len(), ..Session::new(cache, now) }
}

#[test]
fn the_longest_common_prefix_is_kept_and_the_last_token_is_always_computed() {
    for (prompt, kept) in [(&[1, 2, 3, 4][..], 3), (&[1, 2][..], 1), (&[1, 9, 3][..], 1), (&[7][..], 0)] {
        let mut s = session(&[1, 2, 3], 0.0);
        assert_eq!(s.keep_common_prefix(prompt), kept);
        assert_eq!((s.tokens.len(), s.cache.len()), (kept, kept));
    }
}

#[test]
fn the_least_recently_used_goes_when_a_bound_is_passed() {
    let mut all = Sessions::new(Limits { max_sessions: 2, ..Default::default() });
    all.insert("", session(&[1], 0.0), 0.0);
    for (i, id) in ["a", "b", "c"].into_iter().enumerate() {
        all.insert(id, session(&[1, 2], 0.0), 1.0 + i as f64);
    }
    let ids: Vec<_> = all.list(4.0).into_iter().map(|s| s.id).collect();
    assert_eq!(ids, ["c", "b"]);
    assert!(all.list(302_500.0).iter().all(|s| s.id == "c"));
    assert!(all.list(400_000.0).is_empty());
}

#[test]
fn the_longest_beginning_is_shared_and_the_session_that_has_it_stays_as_it_is() {
    let mut all = Sessions::new(Limits::default());
    all.insert("near", session(&[1, 2, 9], 0.0), 0.0);
    all.insert("far", session(&[1, 2, 3, 4, 5], 0.0), 0.0);
    let offers_less = Session { offered: 2, ..session(&[1, 2, 3, 4, 5, 6, 7], 0.0) };
    all.insert("alone", offers_less, 0.0);
    for (own, prompt, shared) in [
        (&[][..], &[1, 2, 3, 4, 8][..], 4),
        (&[], &[1, 2, 3, 4, 5, 6, 7, 8], 5),
        // The last token is always computed.
        (&[], &[1, 2, 3, 4], 3),
        (&[], &[1], 0),
        (&[], &[7, 7], 0),
        (&[1, 2], &[1, 2, 9, 9], 3),
    ] {
        let mut own = session(own, 0.0);
        all.share(&mut own, prompt);
        assert_eq!((&own.tokens[..], own.cache.len(), own.offered), (&prompt[..shared], shared, shared));
        assert_eq!(own.keep_common_prefix(prompt), shared);
    }
    // What the session has itself is not given up for as much of another's.
    let mut own = session(&[1, 2, 3, 4, 5, 0], 0.0);
    all.share(&mut own, &[1, 2, 3, 4, 5, 6]);
    assert_eq!(own.tokens.len(), 6);
    assert_eq!(all.get("far", 1.0).map(|s| s.tokens), Some(5));
}

#[test]
fn shared_pages_count_once_and_outlive_the_session_that_computed_them() {
    let (prompt, page) = ([1; 200], session(&[1], 0.0).cache.bytes());
    let limits = Limits { kv_bytes: 5 * page, max_sessions: 3, ..Default::default() };
    let mut all = Sessions::new(limits);
    all.insert("first", session(&prompt[..130], 0.0), 0.0);
    for (i, id) in ["second", "third"].into_iter().enumerate() {
        let mut new = session(&[], 1.0);
        all.share(&mut new, &prompt);
        // Copy on write: the third page is no longer shared.
        new.cache.reserve(1).unwrap();
        new.cache.commit(1);
        new.tokens.push(1);
        all.insert(id, new, 1.0 + i as f64);
    }
    // Two pages shared by three and one of each; counted for each holder they would be nine.
    assert_eq!((all.bytes(), all.len()), (5 * page, 3));
    assert_eq!(all.get("third", 2.0).unwrap().bytes, 3 * page);
    all.insert("other", session(&[5], 3.0), 3.0);
    assert!(all.get("first", 3.0).is_none(), "the least recently used goes");
    assert_eq!(all.bytes(), 5 * page);
    let mut new = session(&[], 4.0);
    all.share(&mut new, &prompt);
    assert_eq!(new.tokens.len(), 130);
}

#[test]
fn a_fork_needs_a_source_and_a_name() {
    let mut all = Sessions::new(Limits::default());
    all.insert("a", session(&[1, 2], 0.0), 0.0);
    assert_eq!(all.fork("a", "b", 1.0).unwrap().tokens, 2);
    assert_eq!(all.fork("x", "y", 1.0).unwrap_err().code(), "invalid_request");
    assert_eq!(all.fork("a", "", 1.0).unwrap_err().code(), "invalid_request");
}

#[test]
fn what_was_deleted_or_replaced_during_a_turn_does_not_come_back() {
    type Meanwhile = fn(&mut Sessions);
    let cases: [(Meanwhile, Option<usize>); 4] = [
        (|_| {}, Some(3)),
        (|all| all.delete("a"), None),
        (|all| all.clear(), None),
        (|all| drop(all.fork("b", "a", 1.0).unwrap()), Some(1)),
    ];
    for (meanwhile, tokens) in cases {
        let mut all = Sessions::new(Limits::default());
        all.insert("a", session(&[1, 2], 0.0), 0.0);
        all.insert("b", session(&[1], 0.0), 0.0);
        assert!(all.take("a", 0.5).is_some() && all.get("a", 0.5).is_none());
        assert_eq!(all.fork("a", "c", 0.5).unwrap_err().code(), "invalid_request");
        meanwhile(&mut all);
        all.put("a", session(&[1, 2, 3], 0.0), 2.0);
        assert_eq!(all.get("a", 3.0).map(|s| s.tokens), tokens);
        // The next turn of that name is a new one.
        let next = all.take("a", 4.0).unwrap_or_else(|| session(&[7], 4.0));
        all.put("a", next, 5.0);
        assert!(all.get("a", 6.0).is_some());
        // A turn that came to nothing leaves none behind.
        assert!(all.take("new", 7.0).is_none());
        all.put("new", session(&[], 7.0), 8.0);
        assert!(all.get("new", 9.0).is_none());
    }
}
