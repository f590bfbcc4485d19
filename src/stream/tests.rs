use super::*;
use crate::sampler::Rng;
#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| text.to_string()).collect()
}

/// All that a matcher releases for `pieces`, and the stop.
fn matched<'a>(stops: &[String], pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops);
    let mut text = String::new();
    for piece in pieces {
        text += &matcher.push(piece).text;
    }
    let last = matcher.finish();
    (text + &last.text, last.stop)
}

/// The rule, naively: earliest start, then shortest, then first given.
fn matched_naively(stops: &[String], text: &str) -> (String, Option<usize>) {
    let starts =
        stops.iter().enumerate().filter_map(|(i, stop)| Some((text.find(stop.as_str())?, stop.len(), i)));
    match starts.min() {
        Some((start, _, index)) => (text[..start].to_string(), Some(index)),
        None => (text.to_string(), None),
    }
}

fn random_pieces<'a>(text: &'a str, rng: &mut Rng) -> Vec<&'a str> {
    let boundaries: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut cuts: Vec<usize> =
        (0..rng.next_u64() % 8).map(|_| boundaries[rng.next_u64() as usize % boundaries.len()]).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

fn random_text(alphabet: &[&str], pieces: usize, rng: &mut Rng) -> String {
    (0..pieces).map(|_| alphabet[rng.next_u64() as usize % alphabet.len()]).collect()
}

#[test]
fn a_stop_over_several_tokens_is_cut_and_never_shown() {
    let mut matcher = StopMatcher::new(&strings(&["beta gamma"]));
    let released: Vec<Released> = ["alpha", " beta", " gamma", " delta"].map(|t| matcher.push(t)).to_vec();
    let texts: Vec<&str> = released.iter().map(|r| r.text.as_str()).collect();
    assert_eq!(texts, ["alpha", " ", "", ""]);
    assert_eq!(released.iter().map(|r| r.stop).collect::<Vec<_>>(), [None, None, Some(0), Some(0)]);
    assert_eq!(matcher.stopped(), Some(0));
    assert_eq!(matcher.finish(), Released { text: String::new(), stop: Some(0) });
}

#[test]
fn a_false_alarm_is_released() {
    let mut matcher = StopMatcher::new(&strings(&["\nUser:"]));
    assert_eq!(matcher.push("one\nUse").text, "one");
    assert_eq!(matcher.push("d\n").text, "\nUsed");
    assert_eq!(matcher.push("User").text, "");
    assert_eq!(matcher.finish(), Released { text: "\nUser".into(), stop: None });
}

#[test]
fn without_stops_everything_passes_at_once() {
    let mut matcher = StopMatcher::new(&strings(&[""]));
    assert_eq!(matcher.push("plain 🦙"), Released { text: "plain 🦙".into(), stop: None });
}

#[test]
fn the_earliest_start_wins_then_the_shortest() {
    let cases: &[(&[&str], &str, &str, Option<usize>)] = &[
        (&["abc", "ab"], "xabc", "x", Some(1)),
        (&["ab", "abc"], "xabc", "x", Some(0)),
        (&["bc", "abcd"], "xabcd", "x", Some(1)),
        (&["bc", "abcd"], "xabce", "xa", Some(0)),
        (&["bc", "abcd"], "xabc", "xa", Some(0)),
        (&["c", "bcd", "abcde"], "abcdx", "a", Some(1)),
        (&["c", "bcd", "abcde"], "abcde", "", Some(2)),
        (&["aab"], "aaab", "a", Some(0)),
        (&["🦙🦙"], "a🦙 🦙🦙🦙", "a🦙 ", Some(0)),
        (&["é"], "caf\u{e8}, café", "caf\u{e8}, caf", Some(0)),
        (&["x", "x"], "ax", "a", Some(0)),
    ];
    for &(stops, text, released, stop) in cases {
        let stops = strings(stops);
        assert_eq!(
            matched_naively(&stops, text),
            (released.to_string(), stop),
            "oracle: {stops:?} on {text:?}"
        );
        assert_eq!(matched(&stops, [text]), (released.to_string(), stop), "{stops:?} on {text:?}");
        let characters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        assert_eq!(
            matched(&stops, characters),
            (released.to_string(), stop),
            "{stops:?} on {text:?} by character"
        );
    }
}

#[test]
fn any_cutting_of_the_text_gives_what_the_naive_search_gives() {
    let mut rng = Rng::new(17);
    let alphabet = ["a", "b", "é", "🦙", "è"];
    let mut hits = 0;
    for round in 0..4000 {
        let stops: Vec<String> = (0..1 + round % 4)
            .map(|i| random_text(&alphabet[..2 + round % 4], 1 + (round / 7 + i) % 5, &mut rng))
            .collect();
        let text = random_text(&alphabet[..2 + round % 4], round % 20, &mut rng);
        let expected = matched_naively(&stops, &text);
        hits += usize::from(expected.1.is_some());
        let pieces = random_pieces(&text, &mut rng);
        let (released, stop) = matched(&stops, pieces.iter().copied());
        assert_eq!(released, expected.0, "{stops:?} on {pieces:?}");
        // Equal stops are one stop.
        assert_eq!(stop.map(|i| &stops[i]), expected.1.map(|i| &stops[i]), "{stops:?} on {pieces:?}");
    }
    assert!((1000..3500).contains(&hits), "{hits} hits leave one side untested");
}

#[test]
fn no_more_is_held_than_may_begin_a_stop() {
    let stops = strings(&["abcab", "🦙b"]);
    let mut rng = Rng::new(5);
    for _ in 0..500 {
        let text = random_text(&["a", "b", "c", "🦙"], 12, &mut rng);
        let mut matcher = StopMatcher::new(&stops);
        let (mut taken, mut released) = (String::new(), String::new());
        for piece in random_pieces(&text, &mut rng) {
            taken += piece;
            let step = matcher.push(piece);
            released += &step.text;
            if step.stop.is_some() {
                break;
            }
            let held = &taken[released.len()..];
            assert!(
                held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)),
                "held {held:?} of {taken:?}"
            );
        }
    }
}

#[test]
fn a_long_repetitive_stop_costs_linear_time() {
    // Quadratic work would be 10^4 * 10^6 steps and not end within the test's time.
    let almost = "a".repeat(10_000);
    let stops = vec![format!("{almost}b"), format!("{almost}c"), format!("b{almost}")];
    let mut matcher = StopMatcher::new(&stops);
    let mut released = 0;
    for _ in 0..1_000_000 {
        released += matcher.push("a").text.len();
    }
    assert_eq!(released, 1_000_000 - 10_000);
    assert!(matcher.text.capacity() < 100_000, "released text is let go");
    let last = matcher.push("c");
    assert_eq!((last.text.len(), last.stop), (0, Some(1)));
}

fn parts(reasoning: &str, content: &str) -> Parts {
    Parts { reasoning: reasoning.into(), content: content.into() }
}

#[test]
fn reasoning_is_told_from_content() {
    let cases: &[(bool, &str, &str, &str)] = &[
        (false, "<think>\nwhy\n</think>\n\nbecause", "why\n", "because"),
        (false, " \n<think>why</think>because", "why", "because"),
        (false, "<think>\n\n</think>\n\nHi", "", "Hi"),
        (false, "<think>endless", "endless", ""),
        (false, "<think>\n", "", ""),
        (false, "plain <think>no</think>", "", "plain <think>no</think>"),
        (false, "\n plain", "", "\n plain"),
        (false, "  <thi", "", "  <thi"),
        (false, "<thinker>", "", "<thinker>"),
        (false, "<think>a<think>b</think>c</think>d<think>e", "a<think>b", "c</think>d<think>e"),
        (false, "<think>a </thin k></think>b", "a </thin k>", "b"),
        (false, "<think>a</thi", "a</thi", ""),
        (false, "<think>a</</think>b", "a</", "b"),
        (false, "<think>a</think>\r\n\n b\n", "a", " b\n"),
        (false, "", "", ""),
        (true, "\nwhy</think>\nbecause", "why", "because"),
        (true, "</think>\n\nquick", "", "quick"),
        (true, "<think>\nwhy</think>because", "why", "because"),
        (true, "  why", "  why", ""),
        (true, "\n<thi", "<thi", ""),
        (true, "why</think>a<think>b</think>", "why", "a<think>b</think>"),
        (true, "🦙</think>🦙", "🦙", "🦙"),
    ];
    for &(inside, text, reasoning, content) in cases {
        assert_eq!(ReasoningSplitter::split(text, inside), parts(reasoning, content), "{inside} {text:?}");
    }
}

#[test]
fn any_cutting_of_an_answer_gives_the_parts_of_the_whole() {
    let mut rng = Rng::new(23);
    let alphabet = ["<think>", "</think>", "<", "/", "think", ">", "\n", " ", "a", "🦙", "\r\n"];
    for round in 0..8000 {
        let (inside, length) = (round % 2 == 0, round % 13);
        let text = random_text(&alphabet, length, &mut rng);
        let mut splitter = ReasoningSplitter::new(inside);
        let mut joined = Parts::default();
        let pieces = random_pieces(&text, &mut rng);
        let mut steps: Vec<Parts> = pieces.iter().map(|piece| splitter.push(piece)).collect();
        steps.push(splitter.finish());
        for step in steps {
            assert!(
                joined.content.is_empty() || step.reasoning.is_empty(),
                "reasoning after content: {pieces:?}"
            );
            joined.reasoning += &step.reasoning;
            joined.content += &step.content;
        }
        assert_eq!(joined, ReasoningSplitter::split(&text, inside), "{inside} {pieces:?}");
    }
}

#[test]
fn reasoning_and_content_are_released_as_they_come() {
    let mut splitter = ReasoningSplitter::new(false);
    assert_eq!(splitter.push("<th"), parts("", ""));
    assert!(!splitter.is_inside());
    assert_eq!(splitter.push("ink>\n"), parts("", ""));
    assert!(splitter.is_inside());
    assert_eq!(splitter.push("\nso"), parts("so", ""));
    assert_eq!(splitter.push(" a < b</"), parts(" a < b", ""));
    assert_eq!(splitter.push("think>\n\nyes"), parts("", "yes"));
    assert!(!splitter.is_inside());
    assert_eq!(splitter.push("</think>"), parts("", "</think>"));
}

#[test]
fn a_long_blank_start_costs_linear_time() {
    let mut splitter = ReasoningSplitter::new(false);
    for _ in 0..1_000_000 {
        assert_eq!(splitter.push(" "), Parts::default());
    }
    assert_eq!(splitter.push("<think>a"), parts("a", ""));
}
