use qandle::template::{pieces_to_text, Template};
use qandle::tokenizer::{NamedTokens, Special, Tokenizer};
use serde_json::{json, Map, Value};

use super::support::{self, ids, qwen, r1};

fn names(value: &Value) -> NamedTokens {
    let text = |key: &str| value[key].as_str().map(str::to_owned);
    NamedTokens { bos: text("bos_token"), eos: text("eos_token"), pad: text("pad_token") }
}

fn tokenizer(template: &str) -> &'static Tokenizer {
    if template.starts_with("r1") {
        r1()
    } else {
        qwen()
    }
}

/// Renders a template of the test's own for Qwen's vocabulary.
fn render(source: &str, variables: Value) -> Result<String, String> {
    let template = Template::for_tokenizer(source, qwen()).map_err(|e| e.to_string())?;
    let Value::Object(variables) = variables else { panic!("variables are an object") };
    let pieces = template.render(&json!([]), None, None, &variables).map_err(|e| {
        assert_eq!(e.code(), "template_error");
        e.message()
    })?;
    Ok(pieces_to_text(&pieces))
}

#[test]
fn golden_chats_are_byte_equal_and_their_errors_are_errors() {
    let golden = support::json("chat_cases.json");
    let (mut texts, mut errors, mut plain) = (0, 0, 0);
    for (name, source) in golden["templates"].as_object().unwrap() {
        let named = names(&golden["special"][name]);
        let tokenizer = tokenizer(name);
        let template =
            Template::new(source.as_str().unwrap(), named, tokenizer.added_tokens().clone()).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let what = format!("{name} {} {}", case["id"], case["kind"]);
            let context = case["context"].as_object().unwrap();
            let mut kwargs: Map<String, Value> = context.clone();
            for key in ["messages", "tools", "add_generation_prompt"] {
                kwargs.remove(key);
            }
            let mut wanted = &case["expected"][name];
            while let Some(other) = wanted.as_str() {
                wanted = &case["expected"][other.strip_prefix("same as ").unwrap()];
            }
            let add = context.get("add_generation_prompt").and_then(Value::as_bool);
            let rendered = template.render(&context["messages"], context.get("tools"), add, &kwargs);
            if wanted.get("error").is_some() {
                assert_eq!(rendered.expect_err(&what).code(), "template_error", "{what}");
                errors += 1;
                continue;
            }
            let pieces = rendered.unwrap_or_else(|e| panic!("{what}: {e}"));
            let text = pieces_to_text(&pieces);
            assert_eq!(text, wanted["text"].as_str().unwrap(), "{what}");
            assert_eq!(tokenizer.encode(&text, Special::All).unwrap(), ids(&wanted["ids"]), "{what}");
            let safe = wanted.get("ids_content_plain").unwrap_or(&wanted["ids"]);
            assert_eq!(tokenizer.encode_prompt(&pieces).unwrap(), ids(safe), "{what}: content as plain text");
            texts += 1;
            plain += usize::from(wanted.get("ids_content_plain").is_some());
        }
    }
    assert_eq!((texts + errors, plain > 0), (180, true));
}

#[test]
fn a_missing_system_message_is_the_template_s_own_and_an_empty_one_stays_empty() {
    let source = support::json("chat_cases.json")["templates"]["coder05"].as_str().unwrap().to_owned();
    let template = Template::for_tokenizer(&source, qwen()).unwrap();
    let text = |messages| pieces_to_text(&template.render(&messages, None, Some(true), &Map::new()).unwrap());
    assert_eq!(
        text(json!([{"role": "user", "content": "Hi"}])),
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        text(json!([{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}])),
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn a_prompt_has_exactly_one_bos_whoever_writes_it() {
    let source = support::json("chat_cases.json")["templates"]["r1"].as_str().unwrap().to_owned();
    let template = Template::for_tokenizer(&source, r1()).unwrap();
    let messages = json!([{"role": "user", "content": "hello"}]);
    let pieces = template.render(&messages, None, Some(true), &Map::new()).unwrap();
    assert_eq!(r1().encode_prompt(&pieces).unwrap(), [151_646, 151_644, 14_990, 151_645]);
    let without = Template::for_tokenizer(&source.replace("{{bos_token}}", ""), r1()).unwrap();
    let pieces = without.render(&messages, None, Some(true), &Map::new()).unwrap();
    assert_eq!(r1().encode_prompt(&pieces).unwrap(), [151_646, 151_644, 14_990, 151_645]);
    assert_eq!(r1().encode_pieces(&pieces).unwrap(), [151_644, 14_990, 151_645]);
}

#[test]
fn values_print_as_python_prints_them() {
    let variables = json!({
        "f": [1.0, 0.1, 1e16, 1e-5, 123456789012345680.0, -0.0001, 1e22, 5e-324, 12345.678], "t": true, "n": null,
        "d": {"b": 1, "a": "it's", "q": "\"'"}, "s": "a\nb\u{7f}é"
    });
    let cases = [
        ("{{ f }}", "[1.0, 0.1, 1e+16, 1e-05, 1.2345678901234568e+17, -0.0001, 1e+22, 5e-324, 12345.678]"),
        ("{{ t }} {{ n }} {{ t ~ n }} {{ missing }}|", "True None TrueNone |"),
        ("{{ d }}", r#"{'b': 1, 'a': "it's", 'q': '"\''}"#),
        ("{{ [s] }}", "['a\\nb\\x7fé']"),
        ("{{ d | tojson }}", r#"{"b": 1, "a": "it's", "q": "\"'"}"#),
        ("{{ d | tojson(sort_keys=true, separators=(',', ':')) }}", r#"{"a":"it's","b":1,"q":"\"'"}"#),
        (
            "{{ {'x': [1, {}], 'y': []} | tojson(indent=2) }}",
            "{\n  \"x\": [\n    1,\n    {}\n  ],\n  \"y\": []\n}",
        ),
        ("{{ '<a href=\"é\">&' | tojson }}", r#""<a href=\"é\">&""#),
        ("{{ 'é😀' | tojson(ensure_ascii=True) }}", r#""\u00e9\ud83d\ude00""#),
        ("{{ '\\x01\\t\u{7f}' | tojson }}", "\"\\u0001\\t\u{7f}\""),
        ("{{ f[0] | string ~ 1 }}", "1.01"),
        ("{{ ['a', 1.5, none] | join('-') }}", "a-1.5-None"),
    ];
    for (source, wanted) in cases {
        assert_eq!(render(source, variables.clone()).as_deref(), Ok(wanted), "{source}");
    }
}

#[test]
fn strings_behave_as_python_s() {
    let cases = [
        ("{{ ' a b  c '.split() }}", "['a', 'b', 'c']"),
        ("{{ ' a b  c '.split(none, 1) }}", "['a', 'b  c ']"),
        ("{{ ' a b  c '.rsplit(none, 1) }}", "[' a b', 'c']"),
        ("{{ 'a,b,c'.split(',', 1) }}", "['a', 'b,c']"),
        ("{{ 'a,b,c'.rsplit(',', maxsplit=1) }}", "['a,b', 'c']"),
        ("{{ 'x</think>y</think>z'.split('</think>')[-1] }}", "z"),
        ("{{ ','.split(',') }}", "['', '']"),
        ("{{ '\\n a \\n'.strip() }}|{{ ' a '.lstrip() }}|{{ ' a '.rstrip() }}|", "a|a | a|"),
        ("{{ 'xxaxx'.strip('x') }}{{ 'abc'.rstrip('cb') }}", "aa"),
        ("{{ 'aXb'.lower() }}{{ 'é'.upper() }}{{ 'ab cd'.title() }}{{ 'aBC'.capitalize() }}", "axbÉAb CdAbc"),
        ("{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'c')) }}", "TrueTrue"),
        ("{{ 'aaa'.replace('a', 'b', 2) }}{{ 'ab'.replace('', '-') }}", "bba-a-b-"),
        ("{{ 'éa'.find('a') }}{{ 'a'.find('b') }}{{ 'abab'.rfind('b') }}{{ 'a'.count('') }}", "1-132"),
        ("{{ 'héllo'[1:3] }}{{ 'abc'[::-1] }}{{ 'abc'[-2:] }}{{ 'abc'[:-1] }}{{ 'abc'[5:] }}", "élcbabcab"),
        ("{{ [1,2,3][1:] }}{{ [1,2,3][::-1] }}{{ [1,2,3][-1] }}", "[2, 3][3, 2, 1]3"),
        ("{{ 'a\\nb\\r\\nc'.splitlines() }}", "['a', 'b', 'c']"),
        ("{{ ''.isdigit() }}{{ '12'.isdigit() }}{{ 'ab'.isalpha() }}", "FalseTrueTrue"),
        ("{{ '-' * 3 }}{{ 2 * 3 }}{{ [0] * 2 }}{{ 1 + 2.5 }}", "---6[0, 0]3.5"),
        ("{{ ', '.join(['a', 'b']) }}{{ 'abc'.removeprefix('a').removesuffix('c') }}", "a, bb"),
        (
            "{{ {'a': 1}.items() | list }}{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.keys() | list }}",
            "[['a', 1]]2['a']",
        ),
        ("{{ 'a\\nb\\n\\nc' | indent(2) }}", "a\n  b\n\n  c"),
    ];
    for (source, wanted) in cases {
        // Python prints the pairs of `items` as tuples; minijinja has no tuple.
        assert_eq!(render(source, json!({})).as_deref(), Ok(wanted), "{source}");
    }
}

#[test]
fn statements_behave_as_jinja_s() {
    let variables = json!({"xs": [1, 2, 3, 4], "m": {"role": "user", "content": null}});
    let cases = [
        ("{% for x in xs %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in xs %}{{ loop.index0 }}{{ ',' if not loop.last }}{% endfor %}", "0,1,2,3"),
        ("{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "10"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("a {%- if true %} b {%- endif -%} \n c", "a bc"),
        ("{% if m.content is none %}n{% endif %}{% if m.x is defined %}d{% endif %}{% if y is not defined %}u{% endif %}", "nu"),
        ("{% if 'a' in m.missing %}y{% else %}n{% endif %}{% for x in missing %}{{ x }}{% endfor %}", "n"),
        ("{% macro f(a, b='z') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('1') }}{{ f('1', b='2') }}", "<1z><12>"),
        ("{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration -%}", "ab"),
        ("{{ xs | map('string') | join }}{{ xs | select('odd') | list }}{{ xs | length }}", "1234[1, 3]4"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x ~ x }}", "a1a1"),
        ("{{ m.role is string and m is mapping and xs is iterable }}{{ 'x' if m.role == 'user' else 'y' }}", "Truex"),
    ];
    for (source, wanted) in cases {
        assert_eq!(render(source, variables.clone()).as_deref(), Ok(wanted), "{source}");
    }
}

#[test]
fn what_jinja_refuses_is_refused() {
    let variables = json!({"m": {}, "n": null, "xs": []});
    let cases = [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ m.a.b }}", ""),
        ("{{ xs[0].role }}", ""),
        ("{{ 'a' + n }}", "concatenate"),
        ("{{ 'a' + m.content }}", "concatenate"),
        ("{{ 'a' + 5 }}", "concatenate"),
        ("{{ m.arguments | tojson }}", "not JSON serializable"),
        ("{{ unheard('of') }}", "unheard"),
        ("{{ m | unheard }}", "unheard"),
        ("{% if %}", ""),
        ("{{ xs.append(1) }}", ""),
        ("{% include 'x' %}", ""),
    ];
    for (source, word) in cases {
        let error = render(source, variables.clone()).expect_err(source);
        assert!(error.contains(word), "{source}: {error}");
    }
}

#[test]
fn the_clock_is_written_as_strftime_writes_it() {
    let mut template =
        Template::for_tokenizer("{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %Y %A %-d %j %I%p %%') }}", qwen())
            .unwrap();
    for (seconds, wanted) in [
        (1_709_210_096i64, "2024-02-29 12:34:56 29 Feb 2024 Thursday 29 060 12PM %"),
        (0, "1970-01-01 00:00:00 01 Jan 1970 Thursday 1 001 12AM %"),
        (4_102_444_799, "2099-12-31 23:59:59 31 Dec 2099 Thursday 31 365 11PM %"),
    ] {
        template.set_clock(match seconds {
            0 => || 0,
            1_709_210_096 => || 1_709_210_096,
            _ => || 4_102_444_799,
        });
        let pieces = template.render(&json!([]), None, None, &Map::new()).unwrap();
        assert_eq!(pieces_to_text(&pieces), wanted);
    }
}
