//! The `tokenizers` crate's own pipeline, built from the same strings, as a second opinion on random text.

use std::time::{Duration, Instant};

use qandle::tokenizer::{Special, QWEN2_PATTERN};
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

use super::support::{metadata, qwen, Random};

/// A text of this many bytes without any place to cut it must be encoded within this time: far above what a linear or
/// n log n scan takes in an unoptimised build, far below what a quadratic one takes anywhere.
const LONG_BYTES: usize = 1_000_000;
const LONG_TIME: Duration = Duration::from_secs(30);

fn oracle() -> Tokenizer {
    let mut metadata = metadata("qwen2");
    let tokens = metadata.take_strings("tokenizer.ggml.tokens").unwrap();
    let vocab: ahash::AHashMap<String, u32> =
        tokens.iter().enumerate().map(|(id, token)| (token.to_owned(), id as u32)).collect();
    let merges = metadata.take_strings("tokenizer.ggml.merges").unwrap();
    let merges = merges.iter().map(|merge| merge.split_once(' ').unwrap());
    let merges = merges.map(|(left, right)| (left.to_owned(), right.to_owned())).collect();
    let mut tokenizer = Tokenizer::new(BPE::builder().vocab_and_merges(vocab, merges).build().unwrap());
    let pattern = SplitPattern::Regex(QWEN2_PATTERN.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
    let bytes = ByteLevel::new(false, true, false);
    tokenizer.with_normalizer(Some(NFC)).unwrap();
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])));
    tokenizer
}

#[test]
fn ids_equal_those_of_the_tokenizers_crate_on_random_text() {
    const PARTS: &[&str] = &[
        " ",
        "  ",
        "\n",
        "\r",
        "\r\n",
        "\t",
        "\u{3000}",
        "\u{a0}",
        "\u{85}",
        "\u{2028}",
        "\u{1c}",
        "\u{200b}",
        "\u{feff}",
        "a",
        "Z",
        "the",
        "ing",
        "er",
        "'s",
        "'S",
        "'ſ",
        "'t",
        "'re",
        "'RE",
        "'rE",
        "'ve",
        "'m",
        "'ll",
        "'lL",
        "'d",
        "'",
        "’s",
        "é",
        "e\u{301}",
        "\u{301}",
        "ß",
        "ſ",
        "ǅ",
        "ʰ",
        "中",
        "文字",
        "한",
        "\u{1112}\u{1161}\u{11ab}",
        "ア",
        "ｱ",
        "ﾞ",
        "ก",
        "็",
        "ا",
        "ً",
        "א",
        "नि",
        "0",
        "12",
        "½",
        "Ⅷ",
        "٣",
        "〇",
        "①",
        "🦙",
        "👩\u{200d}💻",
        "\u{1f3fb}",
        "\u{fe0f}",
        "!",
        "?!",
        "->",
        "();",
        "_",
        "__",
        "=",
        "$",
        "€",
        "…",
        "—",
        "<|",
        "|>",
        "\0",
        "\u{7f}",
        "\u{ad}",
        "\u{e000}",
        "\u{10ffff}",
        "\u{fffd}",
        "K",
    ];
    let oracle = oracle();
    let mut random = Random(20_241_105);
    for _ in 0..6000 {
        let text: String = (0..1 + random.below(20)).map(|_| PARTS[random.below(PARTS.len())]).collect();
        let wanted = oracle.encode(text.as_str(), false).unwrap();
        assert_eq!(qwen().encode(&text, Special::None).unwrap(), wanted.get_ids(), "{text:?}");
    }
    for _ in 0..3000 {
        // Any character at all.
        let any = |random: &mut Random| char::from_u32(random.below(0x2_0000) as u32).unwrap_or('\u{fffd}');
        let text: String = (0..1 + random.below(8)).map(|_| any(&mut random)).collect();
        let wanted = oracle.encode(text.as_str(), false).unwrap();
        assert_eq!(qwen().encode(&text, Special::None).unwrap(), wanted.get_ids(), "{text:?}");
    }
}

#[test]
fn a_megabyte_without_a_break_is_encoded_in_bounded_time() {
    for (unit, tail) in [
        (" ", ""),
        (" ", "x"),
        ("\n ", ""),
        ("a", ""),
        ("ab", ""),
        (".", ""),
        ("<", ""),
        ("<|im_", ""),
        ("\u{301}", ""),
    ] {
        let text = unit.repeat(LONG_BYTES / unit.len()) + tail;
        let started = Instant::now();
        let ids = qwen().encode(&text, Special::All).unwrap();
        assert!(started.elapsed() < LONG_TIME, "{unit:?}: {:?}", started.elapsed());
        assert_eq!(qwen().decode(&ids, true), text, "{unit:?}");
    }
}

#[test]
fn two_thousand_words_take_milliseconds() {
    let text = "The quick brown fox jumps over the lazy dog and doesn't look back 12 times. ".repeat(125);
    let started = Instant::now();
    let ids = qwen().encode(&text, Special::None).unwrap();
    // 0.3 ms in a release build; the bound leaves room for a loaded machine and an unoptimised one.
    assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());
    assert_eq!(qwen().decode(&ids, false), text);
}
