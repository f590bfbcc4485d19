//! Tokenizer and template out of a Hugging Face repository: the same as out of the model's GGUF form.

use std::path::PathBuf;

use qandle::gguf::{HeaderReader, Metadata};
use qandle::template::Template;
use qandle::tokenizer::{Special, TextFiles, Tokenizer, QWEN2_PATTERN};
use serde_json::{json, Map, Value};

use super::support::{self, metadata};

const TEXTS: [&str; 9] = [
    "",
    "Hello, wörld!  It's 12345 o'clock\r\n\n  <|im_start|>user\nhi<|im_end|>",
    "<tool_call>{\"name\": \"f\"}</tool_call><|fim_prefix|>x<|endoftext|>",
    "鸡兔同笼，共35头94足，各几只？",
    "e\u{301}tude caf\u{e9} \u{1F469}\u{200D}\u{1F680} नमस्ते",
    "\t\tfn main() { println!(\"{}\", 1 << 3); }   \n\n\n",
    "<think>so</think><｜User｜>x<｜Assistant｜><｜begin▁of▁sentence｜>",
    "I'M we'Ve don't THEY'LL",
    "[PAD500] </s>",
];

fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    std::fs::read(path).unwrap()
}

/// The files of the tiny model, and the metadata of its GGUF form.
struct Tiny {
    files: [Vec<u8>; 4],
    metadata: Metadata,
}

impl Tiny {
    fn new() -> Tiny {
        let names = ["tokenizer.json", "config.json", "tokenizer_config.json", "generation_config.json"];
        let gguf = fixture("golden/tiny-f32_tied.gguf");
        Tiny {
            files: names.map(|name| fixture(&format!("safetensors/{name}"))),
            metadata: HeaderReader::new(None).push(&gguf).unwrap().unwrap().metadata,
        }
    }

    fn files(&self) -> TextFiles<'_> {
        let [tokenizer, config, tokenizer_config, generation_config] = &self.files;
        TextFiles {
            tokenizer,
            config,
            tokenizer_config: Some(tokenizer_config),
            generation_config: Some(generation_config),
            chat_template: None,
        }
    }

    fn json(&self, file: usize) -> Value {
        serde_json::from_slice(&self.files[file]).unwrap()
    }

    fn set(&mut self, file: usize, json: &Value) {
        self.files[file] = json.to_string().into_bytes();
    }

    fn tokenizer(&self) -> qandle::Result<Tokenizer> {
        Tokenizer::from_json(&self.files(), 512)
    }
}

#[track_caller]
fn same(json: &Tokenizer, gguf: &Tokenizer) {
    for text in TEXTS {
        for special in [Special::All, Special::UserDefined, Special::None] {
            assert_eq!(json.encode(text, special).unwrap(), gguf.encode(text, special).unwrap(), "{text}");
        }
    }
    assert_eq!(json.vocab_len(), gguf.vocab_len());
    assert_eq!((json.len(), json.bos()), (gguf.len(), gguf.bos()));
    assert_eq!(json.end_tokens(), gguf.end_tokens());
    assert_eq!(json.named_tokens(), gguf.named_tokens());
    assert!(json.added_tokens().iter().eq(gguf.added_tokens().iter()));
    assert!((0..json.vocab_len() as u32).all(|id| json.token_bytes(id) == gguf.token_bytes(id)));
    assert!((0..json.vocab_len() as u32).all(|id| json.is_control(id) == gguf.is_control(id)));
}

#[test]
fn the_tiny_repository_gives_the_tokenizer_and_the_prompts_of_its_gguf_form() {
    let mut tiny = Tiny::new();
    let source = tiny.metadata.str("tokenizer.chat_template").unwrap().to_owned();
    let gguf = Tokenizer::from_gguf(&mut tiny.metadata).unwrap().unwrap();
    let json = tiny.tokenizer().unwrap();
    same(&json, &gguf);
    let own = tiny.files().chat_template().unwrap().unwrap();
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "Hi <|im_end|>" },
        { "role": "assistant", "content": "Hello" },
        { "role": "user", "content": "鸡" },
    ]);
    let render = |source: &str, tokenizer: &Tokenizer| {
        let template = Template::for_tokenizer(source, tokenizer).unwrap();
        let pieces = template.render(&messages, None, Some(true), &Map::new()).unwrap();
        (pieces.clone(), tokenizer.encode_prompt(&pieces).unwrap())
    };
    assert_eq!(render(&own, &json), render(&source, &gguf));
}

#[test]
fn both_forms_of_merges_are_read() {
    let mut tiny = Tiny::new();
    let want = tiny.tokenizer().unwrap();
    let mut json = tiny.json(0);
    let merges = json["model"]["merges"].as_array().unwrap();
    assert!(merges[0].is_array());
    let texts =
        merges.iter().map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
    json["model"]["merges"] = texts.collect();
    tiny.set(0, &json);
    same(&tiny.tokenizer().unwrap(), &want);
}

/// What a repository with this GGUF header's vocabulary would have as `tokenizer.json` and `tokenizer_config.json`.
fn repository(metadata: &Metadata) -> (Value, Value) {
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap();
    let kinds = metadata.integers("tokenizer.ggml.token_type").unwrap();
    let (mut vocab, mut added) = (Map::new(), Vec::new());
    for (id, (text, kind)) in tokens.iter().zip(&kinds).enumerate() {
        match kind {
            3 | 4 => added.push(json!({
                "id": id, "content": text, "special": *kind == 3, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })),
            5 => {}
            _ => drop(vocab.insert(text.into(), json!(id))),
        }
    }
    let merges: Vec<&str> = metadata.strings("tokenizer.ggml.merges").unwrap().iter().collect();
    let name = |key: &str| {
        metadata.u64(&format!("tokenizer.ggml.{key}_token_id")).and_then(|id| tokens.get(id as usize))
    };
    let config = json!({
        "bos_token": name("bos"),
        "eos_token": { "content": name("eos"), "lstrip": false },
        "pad_token": name("padding"),
        "add_bos_token": metadata.bool("tokenizer.ggml.add_bos_token"),
    });
    let split = json!({ "type": "Split", "pattern": { "Regex": QWEN2_PATTERN }, "behavior": "Isolated", "invert": false });
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let tokenizer = json!({
        "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": [{ "type": "NFC" }] },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [split, bytes] },
        "model": { "type": "BPE", "vocab": vocab, "merges": merges },
    });
    (tokenizer, config)
}

#[test]
fn the_real_vocabularies_come_out_the_same() {
    for (name, gguf) in [("qwen2", support::qwen()), ("r1", support::r1())] {
        let (tokenizer, config) = repository(&metadata(name));
        let (tokenizer, config) = (tokenizer.to_string(), config.to_string());
        let files = TextFiles {
            tokenizer: tokenizer.as_bytes(),
            config: b"{}",
            tokenizer_config: Some(config.as_bytes()),
            ..TextFiles::default()
        };
        same(&Tokenizer::from_json(&files, gguf.vocab_len()).unwrap(), gguf);
        // A row less than there are tokens.
        let error = Tokenizer::from_json(&files, gguf.len() - 1).unwrap_err();
        assert_eq!(error.code(), "bad_model");
        assert!(error.message().contains("has no row"), "{error}");
    }
}

#[test]
fn ends_and_beginnings_come_from_the_files_that_name_them() {
    let ends = |tiny: &Tiny| tiny.tokenizer().unwrap().end_tokens().to_vec();
    let mut tiny = Tiny::new();
    assert_eq!(ends(&tiny), [476, 478]);
    let generation = json!({ "eos_token_id": [490, 3] });
    tiny.set(3, &generation);
    assert_eq!(ends(&tiny), [3, 476, 478, 490], "the named ones and those known by their texts");
    tiny.set(3, &json!({ "eos_token_id": 512 }));
    assert_eq!(tiny.tokenizer().unwrap_err().code(), "bad_model");
    tiny.set(3, &json!({}));
    let mut config = tiny.json(1);
    config["eos_token_id"] = json!([7, 8]);
    tiny.set(1, &config);
    assert_eq!(ends(&tiny), [7, 8, 476, 478]);
    // Without tokenizer_config.json config.json names the tokens, and the post-processor tells of BOS.
    let alone = |tiny: &Tiny| {
        Tokenizer::from_json(&TextFiles { tokenizer_config: None, ..tiny.files() }, 512).unwrap()
    };
    assert_eq!(alone(&tiny).named_tokens().bos.as_deref(), Some("<|endoftext|>"));
    assert_eq!(alone(&tiny).bos(), None);
    let mut json = tiny.json(0);
    json["post_processor"] = json!({ "type": "Sequence", "processors": [
        { "type": "ByteLevel" },
        { "type": "TemplateProcessing", "single": [
            { "SpecialToken": { "id": "<|endoftext|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
        ] },
    ] });
    tiny.set(0, &json);
    assert_eq!(alone(&tiny).bos(), Some(476));
    assert_eq!(tiny.tokenizer().unwrap().bos(), None, "tokenizer_config.json says that there is none");
    let mut texts = tiny.json(2);
    texts["add_bos_token"] = json!(true);
    tiny.set(2, &texts);
    assert_eq!(tiny.tokenizer().unwrap().bos(), Some(476));
}

#[test]
fn the_template_is_found_in_all_its_places() {
    let mut tiny = Tiny::new();
    let mut texts = tiny.json(2);
    let jinja = TextFiles { chat_template: Some(b"from jinja"), ..tiny.files() };
    assert_ne!(jinja.chat_template().unwrap().unwrap(), "from jinja");
    texts["chat_template"] =
        json!([{ "name": "tool_use", "template": "no" }, { "name": "default", "template": "yes" }]);
    tiny.set(2, &texts);
    assert_eq!(tiny.files().chat_template().unwrap().as_deref(), Some("yes"));
    texts.as_object_mut().unwrap().remove("chat_template");
    tiny.set(2, &texts);
    assert_eq!(tiny.files().chat_template().unwrap(), None);
    let jinja = TextFiles { chat_template: Some(b"from jinja"), ..tiny.files() };
    assert_eq!(jinja.chat_template().unwrap().as_deref(), Some("from jinja"));
    let broken = TextFiles { chat_template: Some(b"\xff"), ..tiny.files() };
    assert_eq!(broken.chat_template().unwrap_err().code(), "bad_model");
}

#[test]
fn a_tokenizer_json_that_is_broken_or_another_kind_is_refused() {
    type Damage = fn(&mut Value);
    let damages: [(&str, &str, Damage); 19] = [
        ("unsupported_model", "no BPE", |j| j["model"]["type"] = json!("Unigram")),
        ("unsupported_model", "not NFC", |j| j["normalizer"] = Value::Null),
        ("unsupported_model", "not NFC", |j| j["normalizer"] = json!({ "type": "NFKC" })),
        ("unsupported_model", "pre_tokenizer", |j| j["pre_tokenizer"] = json!({ "type": "Whitespace" })),
        ("unsupported_model", "pre_tokenizer", |j| {
            j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("\\p{N}{1,3}")
        }),
        ("unsupported_model", "pre_tokenizer", |j| {
            j["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = json!(true)
        }),
        ("unsupported_model", "byte_fallback", |j| j["model"]["byte_fallback"] = json!(true)),
        ("unsupported_model", "ignore_merges", |j| j["model"]["ignore_merges"] = json!(true)),
        ("unsupported_model", "parts of words", |j| j["model"]["end_of_word_suffix"] = json!("</w>")),
        ("unsupported_model", "white space", |j| j["added_tokens"][0]["lstrip"] = json!(true)),
        ("bad_model", "cannot be read", |j| drop(j["model"].as_object_mut().unwrap().remove("vocab"))),
        ("bad_model", "cannot be read", |j| j["model"]["vocab"]["!"] = json!(-1)),
        ("bad_model", "have id 1", |j| j["model"]["vocab"]["!"] = json!(1)),
        ("bad_model", "has no row", |j| j["model"]["vocab"]["!"] = json!(4_000_000_000u32)),
        ("bad_model", "no token for byte 0x21", |j| {
            drop(j["model"]["vocab"].as_object_mut().unwrap().remove("!"))
        }),
        ("bad_model", "added tokens have id 477", |j| j["added_tokens"][0]["id"] = json!(477)),
        ("bad_model", "not in the vocabulary", |j| j["model"]["merges"][3] = json!(["Ġzq", "qz"])),
        ("bad_model", "two tokens", |j| j["model"]["merges"][3] = json!(["a"])),
        ("bad_model", "length 3", |j| j["model"]["merges"][3] = json!(["a", "b", "c"])),
    ];
    for (code, word, damage) in damages {
        let mut tiny = Tiny::new();
        let mut json = tiny.json(0);
        damage(&mut json);
        tiny.set(0, &json);
        let error = tiny.tokenizer().expect_err(word);
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(word), "{error} does not say {word:?}");
    }
    for bytes in [&b""[..], b"<html>", b"[]", b"{\"model\":{\"vocab\":{}}}"] {
        let files = TextFiles { tokenizer: bytes, config: b"{}", ..TextFiles::default() };
        assert_eq!(Tokenizer::from_json(&files, 512).unwrap_err().code(), "bad_model");
    }
}
