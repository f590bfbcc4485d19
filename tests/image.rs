//! Images of packed models: what is read back is the model that was written, and damage anywhere is noticed.

#![allow(clippy::unwrap_used)] // a test may end in a panic

use flate2::read::GzDecoder;
use qandle::engine::{Engine, Options, TextSide};
use qandle::error::{Error, Result};
use qandle::image::{Reader, Sink, Source, Writer};
use qandle::model::Want;
use qandle::weights::Loader;
use std::io::Read;
use std::mem::MaybeUninit;
use std::path::PathBuf;

struct Memory(Vec<u8>);

impl Sink for Memory {
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let (at, end) = (at as usize, at as usize + bytes.len());
        self.0.resize(self.0.len().max(end), 0);
        self.0[at..end].copy_from_slice(bytes);
        Ok(())
    }
}

impl Source for Memory {
    fn get<'a>(&mut self, at: u64, room: &'a mut [MaybeUninit<u8>]) -> Result<&'a [u8]> {
        let from = self.0.get(at as usize..).and_then(|rest| rest.get(..room.len()));
        let from = from.ok_or_else(|| Error::integrity("too short"))?;
        room.iter_mut().zip(from).for_each(|(to, from)| {
            to.write(*from);
        });
        let (start, len) = (room.as_ptr().cast(), room.len());
        // SAFETY: all of it was just written.
        Ok(unsafe { std::slice::from_raw_parts(start, len) })
    }
}

fn load(name: &str) -> Engine {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let mut bytes = std::fs::read(&path).unwrap();
    if name.ends_with(".gz") {
        let packed = std::mem::take(&mut bytes);
        GzDecoder::new(&packed[..]).read_to_end(&mut bytes).unwrap();
    }
    let mut loader = Loader::new(Some(bytes.len() as u64));
    loader.push(&bytes).unwrap();
    let plan = loader.plan().unwrap().clone();
    let text = TextSide::from_gguf(loader.metadata().unwrap(), &plan).unwrap();
    let (model, plan) = loader.finish().unwrap();
    Engine::new(model, plan, text, "tiny", Options::default()).unwrap()
}

fn written(engine: &Engine) -> Memory {
    let mut memory = Memory(Vec::new());
    let mut writer = Writer::new(engine).unwrap();
    while !writer.step(engine, &mut memory).unwrap() {}
    assert_eq!(memory.0.len() as u64, writer.bytes());
    memory
}

fn read_some(mut image: Memory) -> Result<Engine> {
    let mut reader = Reader::open(&mut image)?;
    while reader.step(&mut image)? {}
    let (model, plan, text) = reader.finish(image)?;
    Engine::new(model, plan, text, "tiny", Options::default())
}

fn read(image: Memory) -> Result<Engine> {
    let mut engine = read_some(image)?;
    while engine.read_on()? {}
    Ok(engine)
}

fn logits(engine: &Engine) -> Result<Vec<f32>> {
    let model = engine.model();
    model.forward(&[1, 5, 9, 80], &mut model.new_cache(), Want::All)
}

#[test]
fn an_image_gives_back_the_same_model_and_tokenizer() {
    let fixtures = [
        "golden/r1-tiny.gguf.gz",
        "golden/tiny-f16_tied.gguf",
        "golden/tiny-q4km_h256_untied.gguf",
        "golden/tiny-q8_0_untied.gguf",
        "tiny/tiny-bf16_tied.gguf",
        "tiny/tiny-iq4_nl_tied.gguf",
        "tiny/tiny-q3_k_untied.gguf",
    ];
    for name in fixtures {
        let mut engine = load(name);
        let mut again = read_some(written(&engine)).unwrap();
        // An embedding of its own is still in the file.
        assert_eq!(again.model().embed_tokens.matrix().is_none(), name.contains("untied"), "{name}");
        assert_eq!(logits(&again), logits(&engine), "{name}");
        while again.read_on().unwrap() {}
        assert_eq!(logits(&again), logits(&engine), "{name}");
        assert_eq!(again.info(), engine.info(), "{name}");
        if name.contains("r1") {
            let text = "Straße 你好 <think>\n<｜User｜> don't  12345\t👍🏽";
            for special in [false, true] {
                assert_eq!(again.tokenize(text, special), engine.tokenize(text, special));
            }
            let messages = serde_json::json!([{ "role": "user", "content": text }]);
            assert_eq!(again.count_tokens(&messages), engine.count_tokens(&messages));
            let ids: Vec<u32> = (0..engine.n_tokens() as u32).collect();
            assert_eq!(again.detokenize(&ids, true), engine.detokenize(&ids, true));
        }
        // An image of an image is the same.
        assert!(written(&again).0 == written(&engine).0, "{name}");
    }
}

#[test]
fn damage_in_what_is_read_later_is_an_error_of_each_use() {
    let engine = load("golden/tiny-q4km_h256_untied.gguf");
    let mut image = written(&engine);
    let table = engine.model().embed_tokens.matrix().unwrap().data();
    let at = image.0.windows(table.len()).position(|bytes| bytes == table).unwrap();
    image.0[at + table.len() / 2] ^= 1;
    let mut again = read_some(image).unwrap();
    for _ in 0..2 {
        assert_eq!(logits(&again).unwrap_err().code(), "integrity");
        assert_eq!(again.read_on().unwrap_err().code(), "integrity");
    }
}

#[test]
fn a_changed_or_missing_byte_is_noticed() {
    let engine = load("golden/tiny-q4km_h256_untied.gguf");
    let image = written(&engine).0;
    let used = |at: usize| {
        // Padding between tensors is not looked at, nor is what follows the first 40 bytes of the head.
        let mut other = image.clone();
        other[at] ^= 0x10;
        (read(Memory(other)), at)
    };
    let mut noticed = 0;
    for at in (0..image.len()).step_by(997).chain(0..64) {
        match used(at) {
            (Ok(_), at) => assert!(image[at] == 0, "byte {at} was changed unnoticed"),
            (Err(error), at) => {
                assert_eq!(error.code(), "integrity", "byte {at}: {error}");
                noticed += 1;
            }
        }
    }
    assert!(noticed > image.len() / 1200, "{noticed}");
    for cut in [1, 1000, image.len() - 63, image.len()] {
        let error = read(Memory(image[..image.len() - cut].to_vec())).map(drop).unwrap_err();
        assert_eq!(error.code(), "integrity");
    }
}
