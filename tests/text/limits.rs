//! Templates come with model files: none may hang the worker or use up its memory.

use std::time::{Duration, Instant};

use qandle::template::{pieces_to_text, Template};
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
