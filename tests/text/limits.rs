//! Templates and vocabularies come with model files: none may hang the worker or use up its memory.

use std::time::{Duration, Instant};

use qandle::gguf::{Array, Metadata, Value as Meta};
use qandle::template::{pieces_to_text, Template};
use qandle::tokenizer::Tokenizer;
use serde_json::{json, Map, Value};

use super::support::qwen;

/// Above what the slowest of these takes in an unoptimised build on a loaded machine.
const TIME: Duration = Duration::from_secs(60);

#[test]
fn hostile_templates_end_in_an_error() {
    let unrolled = format!("{{% set s = 'aaaaaaaa' %}}{}{{{{ s }}}}", "{% set s = s ~ s %}".repeat(60));
    let nested = format!("{}1{}", "{{ ".to_owned() + &"(".repeat(5000), ")".repeat(5000) + " }}");
    let lists = format!("{{% set s = [1] %}}{}{{{{ s }}}}", "{% set s = [s, s] %}".repeat(60));
    let sources = [
        "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | length }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s | tojson }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(10000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ [ns] | tojson }}",
        "{{ 'a' * 99999999 }}",
        "{{ ('a' * 99999999) ~ ('a' * 99999999) }}",
        "{{ 'a' * (99999 * 999) }}",
        "{{ 'a' * 9 ** 9 }}",
        "{% set n = 99999999 %}{{ 'a' * n }}",
        "{% set n = 999999999999 %}{{ [1] * n }}",
        "{{ range(99999999) }}",
        "{{ 'a' | indent(9999999999) }}",
        "{{ [1] | tojson(indent=999999999) }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
        "{{ 'a'.center(9999999999) }}",
        "{{ '%9999999999d'.format(1) }}{{ '{:>9999999999}'.format(1) }}",
        "{% set x = 'a' %}{% for i in range(9999) %}{% for j in range(9999) %}{{ x }}{% endfor %}{% endfor %}",
        unrolled.as_str(),
        nested.as_str(),
        lists.as_str(),
    ];
    for source in sources {
        let name = &source[..source.len().min(120)];
        let started = Instant::now();
        let rendered = Template::for_tokenizer(source, qwen())
            .and_then(|template| template.render(&json!([]), None, None, &Map::new()));
        let error = rendered.map(|pieces| pieces_to_text(&pieces).len()).expect_err(name);
        assert_eq!(error.code(), "template_error", "{name}: {error}");
        assert!(started.elapsed() < TIME, "{name}: {:?}", started.elapsed());
    }
}

#[test]
fn long_conversations_stay_within_the_limits() {
    let source = "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endif %}{% endfor %}";
    let template = Template::for_tokenizer(source, qwen()).unwrap();
    let message = |i: usize| json!({"role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": "words and words ".repeat(20)});
    let messages: Value = (0..2000).map(message).collect();
    let pieces = template.render(&messages, None, Some(true), &Map::new()).unwrap();
    assert_eq!(pieces.iter().filter(|piece| piece.trusted).count(), 4000);
    // Text gathered in one variable, as some templates do it.
    let gather = "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s ~ m.content %}{% endfor %}{{ ns.s }}";
    let template = Template::for_tokenizer(gather, qwen()).unwrap();
    let messages: Value = (0..100).map(message).collect();
    let pieces = template.render(&messages, None, Some(true), &Map::new()).unwrap();
    assert_eq!(pieces_to_text(&pieces).len(), 100 * 320);
}

#[test]
fn deep_json_of_a_request_is_an_error_and_no_crash() {
    let template = Template::for_tokenizer("{{ messages | tojson }}", qwen()).unwrap();
    let deep = (0..1000).fold(json!(1), |inner, _| json!([inner]));
    let error = template.render(&deep, None, None, &Map::new()).expect_err("too deep");
    assert_eq!(error.code(), "template_error");
}

#[test]
fn templates_that_look_at_much_for_hours_end_in_an_error() {
    let long = "{% set n = 8000000 %}{% set s = 'a' * n %}{% set t = 'a' * n %}{% set l = [s] * 1000 %}";
    let looked = [
        "s == t",
        "s <= t",
        "'b' in s",
        "s ~ 'b' in l",
        "s is eq t",
        "s is in l",
        "s | length",
        "s.count('b')",
        "s.find('b')",
        "s.isalpha()",
        "s.startswith(t)",
        "l | unique | length",
        "l | sort | length",
        "l | max | length",
        "l.count(t)",
        "s | int(0)",
        "[t] | select('eq', s) | list | length",
        "[t] | select('in', [s]) | list | length",
    ];
    for expression in looked {
        let source =
            format!("{long}{{% for i in range(9999) %}}{{% if {expression} %}}{{% endif %}}{{% endfor %}}");
        let started = Instant::now();
        let rendered = Template::for_tokenizer(&source, qwen())
            .and_then(|template| template.render(&json!([]), None, None, &Map::new()));
        assert_eq!(rendered.expect_err(expression).code(), "template_error", "{expression}");
        assert!(started.elapsed() < TIME, "{expression}: {:?}", started.elapsed());
    }
}

#[test]
fn namespaces_in_each_other_do_not_overflow_the_stack() {
    let ring = "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}{% set b.x = a %}";
    let used = [
        "a == b",
        "a < b",
        "a in [b]",
        "a in {'x': 1}",
        "{'x': 1}[a]",
        "{'x': 1}.get(a)",
        "[a, b] | sort",
        "[a, b] | unique | list",
        "[a] | min",
        "a ~ ''",
        "a | string",
        "a | tojson",
        "a is eq b",
        "a is in [b]",
        "[a, b] | groupby('x')",
        "[b].count(a)",
        "'x'.find(a)",
        "dict(a)",
        "namespace(a)",
        "namespace(x=a)",
        "{a: 1}",
        "[a]",
        "'a' in a.x.x.x or a == b",
        "a == b == a",
    ];
    for expression in used {
        let error = render_on_small_stack(format!("{ring}{{{{ {expression} }}}}")).err();
        assert!(error.is_none_or(|e| e.code() == "template_error"), "{expression}");
    }
    // Chains, which are freed link by link.
    let inner = "{% set n = namespace() %}{% set n.x = top.x %}{% set top.x = n %}";
    for count in [900, 9000] {
        let source =
            format!("{{% set top = namespace() %}}{{% for i in range({count}) %}}{inner}{{% endfor %}}");
        let rendered = render_on_small_stack(source);
        assert_eq!(rendered.is_ok(), count < 1000, "{rendered:?}");
    }
}

/// Half of what a worker's thread has in the browsers.
const STACK_BYTES: usize = 512 << 10;

/// Renders on a thread with little stack.
fn render_on_small_stack(source: String) -> Result<String, qandle::Error> {
    let render = move || {
        let template = Template::for_tokenizer(&source, qwen())?;
        Ok(pieces_to_text(&template.render(&json!([]), None, None, &Map::new())?))
    };
    std::thread::Builder::new().stack_size(STACK_BYTES).spawn(render).unwrap().join().unwrap()
}

/// Everything that makes a tree deeper without a bracket that minijinja counts: `(before, repeated, after)`.
const DEEPER: [(&str, &str, &str); 22] = [
    ("{{ a", " + a", " }}"),
    ("{{ a", " - a", " }}"),
    ("{{ a", " * a", " }}"),
    ("{{ a", " / a", " }}"),
    ("{{ a", " // a", " }}"),
    ("{{ a", " % a", " }}"),
    ("{{ a", " ** a", " }}"),
    ("{{ a", " ~ a", " }}"),
    ("{{ a", " and a", " }}"),
    ("{{ a", " or a", " }}"),
    ("{{ a", " == a", " }}"),
    ("{{ a", " in a", " }}"),
    ("{{ a", " if a else a", " }}"),
    ("{{ a", " is string", " }}"),
    ("{{ a", " | trim", " }}"),
    ("{{ a", ".a", " }}"),
    ("{{ a", "[0]", " }}"),
    ("{{ a", "()", " }}"),
    ("{{ ", "not ", "a }}"),
    ("{{ ", "- ", "a }}"),
    ("{% set ", "(", "a"),
    ("{% if a %}", "{% elif a %}", "{% endif %}"),
];

#[test]
fn deep_templates_are_refused_before_they_overflow_the_stack() {
    for (before, repeated, after) in DEEPER {
        let source = format!("{before}{}{after}", repeated.repeat(200_000 / repeated.len()));
        let error = render_on_small_stack(source).expect_err(repeated);
        assert_eq!(error.code(), "template_error", "{repeated}: {error}");
    }
}

#[test]
fn templates_as_deep_as_any_in_use_are_rendered() {
    for (before, repeated, after) in [
        ("{% set a = '.' %}{{ a", " ~ a", " }}"),
        ("{% set a = '.' %}{{ a", " | trim", " }}"),
        ("{% set a = '.' %}{{ '.' if ", "not ", "a else a }}"),
        ("{{ '.'", " if a else '.'", " }}"),
        ("{% if a %}", "{% elif a %}", "{% else %}.{% endif %}"),
    ] {
        let rendered = render_on_small_stack(format!("{before}{}{after}", repeated.repeat(100)));
        assert!(rendered.as_ref().is_ok_and(|text| text.starts_with('.')), "{repeated}: {rendered:?}");
    }
}

/// The code of what a vocabulary of the 256 bytes, these tokens and these merges comes to.
fn vocabulary(more: Vec<String>, merges: Vec<String>) -> &'static str {
    let tokens: Vec<String> = alphabet().into_iter().map(String::from).chain(more).collect();
    let mut metadata = Metadata::default();
    metadata.insert("tokenizer.ggml.model", Meta::String("gpt2".into()));
    metadata.insert("tokenizer.ggml.token_type", Meta::Array(Array::I32(vec![1; tokens.len()])));
    for (key, list) in [("tokens", tokens), ("merges", merges)] {
        let list = Array::Strings(list.into_iter().collect());
        metadata.insert(format!("tokenizer.ggml.{key}"), Meta::Array(list));
    }
    Tokenizer::from_gguf(&mut metadata).map_or_else(|e| e.code(), |_| "ok")
}

/// GPT-2's character for each byte.
fn alphabet() -> Vec<char> {
    let mut next = 0x100;
    let mut of = |byte: u32| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte,
        _ => {
            next += 1;
            next - 1
        }
    };
    (0..256).map(|byte| char::from_u32(of(byte)).unwrap()).collect()
}

#[test]
fn vocabularies_made_to_collide_are_refused() {
    // The hashes of `vocab.rs` and `bpe.rs`.
    let of_text = |text: &str| {
        let fnv = |h: u64, b: &u8| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01B3);
        let hash = text.as_bytes().iter().fold(0xCBF2_9CE4_8422_2325, fnv);
        (hash ^ (hash >> 32)) & 0x7fff
    };
    let text = |i: u64| format!("t{i}");
    assert_eq!(vocabulary((0..20_000).map(text).collect(), vec![]), "ok");
    let near = (0..).map(text).filter(|text| of_text(text) < 256).take(20_000).collect();
    assert_eq!(vocabulary(near, vec![]), "bad_model");

    let alphabet = alphabet();
    let mut pairs: Vec<(u64, u64)> = (0..256).flat_map(|l| (0..256).map(move |r| (l, r))).collect();
    let spelled = |pairs: &[(u64, u64)], between: &str| -> Vec<String> {
        pairs
            .iter()
            .map(|(l, r)| format!("{}{between}{}", alphabet[*l as usize], alphabet[*r as usize]))
            .collect()
    };
    let tokens = spelled(&pairs, "");
    assert_eq!(vocabulary(tokens.clone(), spelled(&pairs[..8192], " ")), "ok");
    pairs.sort_by_key(|(l, r)| (l << 32 | r).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & 0x3fff);
    assert_eq!(vocabulary(tokens, spelled(&pairs[..8192], " ")), "bad_model");
}
