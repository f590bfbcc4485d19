//! Models in several GGUF files: they load as one file does, with flat memory, and what does not fit together is named before
//! any weight is asked for. The shards are those of `fixtures/golden/tiny-f32_tied.gguf`.

#![allow(clippy::unwrap_used)] // a test may end in a panic

#[path = "common/counting_allocator.rs"]
mod counting_allocator;
#[path = "common/gguf_builder.rs"]
mod gguf_builder;

use counting_allocator::growth;
use gguf_builder::{string, GgufBuilder};
use qandle::gguf::{shard_order, Header, HeaderReader, Metadata, Split, Value};
use qandle::model::{Model, Want};
use qandle::weights::{load_bytes, Loader};
use qandle::Error;
use std::fs;
use std::path::PathBuf;

const TOKENS: [u32; 5] = [1, 5, 9, 200, 3];

fn fixture(name: &str) -> Vec<u8> {
    fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn shards() -> Vec<Vec<u8>> {
    (1..=3).map(|no| fixture(&format!("shards/tiny-f32_tied-{no:05}-of-00003.gguf"))).collect()
}

fn header(file: &[u8]) -> Header {
    HeaderReader::new(Some(file.len() as u64)).push(file).unwrap().unwrap()
}

fn headers(files: &[Vec<u8>]) -> Vec<Header> {
    files.iter().map(|file| header(file)).collect()
}

fn splits(files: &[&[u8]]) -> Vec<Option<Split>> {
    files.iter().map(|file| Split::of(&header(file).metadata).unwrap()).collect()
}

fn logits(model: &Model) -> Vec<f32> {
    model.forward(&TOKENS, &mut model.new_cache(), Want::All).unwrap()
}

fn load(mut loader: Loader, files: &[Vec<u8>], piece: usize) -> Result<Model, Error> {
    for file in files {
        for bytes in file.chunks(piece) {
            loader.push(bytes)?;
        }
        loader.next_file()?;
    }
    loader.finish().map(|(model, _)| model)
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, words: &[&str]) {
    let error = result.err().unwrap();
    assert_eq!(error.code(), "bad_model", "{error}");
    for word in words {
        assert!(error.message().contains(word), "{error} does not say {word:?}");
    }
}

#[test]
fn shards_give_the_same_bits_as_one_file_in_any_split() {
    let (whole, mut metadata, plan) = load_bytes(&fixture("golden/tiny-f32_tied.gguf")).unwrap();
    let files = shards();
    for piece in [61, 4096, usize::MAX] {
        let mut loader = Loader::from_headers(headers(&files)).unwrap();
        let own = loader.plan().unwrap();
        assert_eq!((&own.config, own.tensor_bytes), (&plan.config, plan.tensor_bytes));
        assert_eq!((own.parameters(), own.packed_bytes), (plan.parameters(), plan.packed_bytes));
        assert_eq!(own.end, own.file_ends.iter().sum::<u64>());
        let tokens = loader.metadata().unwrap().take_strings("tokenizer.ggml.tokens");
        assert_eq!(tokens, metadata.take_strings("tokenizer.ggml.tokens").or(tokens.clone()));
        assert_eq!(logits(&load(loader, &files, piece).unwrap()), logits(&whole));
    }
}

#[test]
fn the_caller_learns_when_a_file_and_the_model_are_complete() {
    let files = shards();
    let mut loader = Loader::from_headers(headers(&files)).unwrap();
    let mut pushed = 0;
    for (file, bytes) in files.iter().enumerate() {
        let end = loader.plan().unwrap().file_ends[file] as usize;
        assert!(!loader.file_is_complete());
        loader.push(&bytes[..end - 1]).unwrap();
        assert!(!loader.file_is_complete());
        loader.push(&bytes[end - 1..end]).unwrap();
        assert!(loader.file_is_complete());
        assert_eq!(loader.is_complete(), file == 2);
        pushed += end as u64;
        assert_eq!(loader.position(), pushed);
        loader.next_file().unwrap();
    }
    loader.finish().unwrap();
}

#[test]
fn memory_stays_flat() {
    let files = shards();
    let loader = Loader::from_headers(headers(&files)).unwrap();
    let packed = loader.plan().unwrap().packed_bytes as isize;
    let (model, grown) = growth(|| load(loader, &files, 4096).unwrap());
    assert!(grown.peak < packed + (48 << 10), "{grown:?} for {packed} bytes of weights");
    drop(model);
}

#[test]
fn files_are_put_in_order_and_what_is_missing_or_doubled_is_named() {
    let files = shards();
    let [a, b, c] = [&files[0][..], &files[1], &files[2]];
    let whole = fixture("golden/tiny-f32_tied.gguf");
    assert_eq!(splits(&[b]), [Some(Split { no: 1, count: 3, tensors: Some(38) })]);
    assert_eq!(shard_order(&splits(&[c, a, b])).unwrap(), [1, 2, 0]);
    assert_eq!(shard_order(&splits(&[&whole])).unwrap(), [0]);
    refused(shard_order(&splits(&[a, c])), &["shard 2 of 3 is missing"]);
    refused(shard_order(&splits(&[b, b])), &["shard 2 of 3 is given twice", "files 1 and 2"]);
    refused(shard_order(&splits(&[a, b, c, b])), &["shard 2 of 3 is given twice"]);
    refused(shard_order(&splits(&[c])), &["shard 3 of 3: give all 3"]);
    refused(shard_order(&splits(&[a, &whole, c])), &["file 2 of 3 is a whole model"]);
    refused(shard_order(&splits(&[&whole, &whole])), &["file 1 of 2 is a whole model"]);
    refused(shard_order(&[]), &["no file"]);
    let split = |no, count, tensors| Some(Split { no, count, tensors: Some(tensors) });
    refused(
        shard_order(&[split(0, 9, 90), split(8, 9, 90)]),
        &["shards 2, 3, 4, 5, 6, 7, 8 of 9 are missing"],
    );
    refused(shard_order(&[split(0, 999, 9), split(8, 999, 9)]), &["and others of 999 are missing"]);
    refused(shard_order(&[split(0, 2, 90), split(1, 3, 90)]), &["different models", "2 shards", "3 shards"]);
    refused(
        shard_order(&[split(0, 2, 90), split(1, 2, 91)]),
        &["different models", "90 tensors", "91 tensors"],
    );
}

#[test]
fn a_shard_alone_is_refused_once_its_header_is_read() {
    for (no, file) in (1..).zip(shards()) {
        let data = header(&file).data_offset as usize;
        let mut loader = Loader::new(None);
        refused(loader.push(&file[..data]), &[&format!("shard {no} of 3: give all 3")]);
    }
}

#[test]
fn headers_that_do_not_fit_together_are_refused() {
    let sound = || headers(&shards());
    type Damage = fn(&mut Vec<Header>);
    let damages: [(&[&str], Damage); 9] = [
        (&["blk.0.attn_norm.weight", "two files, 1 and 2"], |h| {
            h[1].tensors[3] = h[0].tensors[1].clone();
        }),
        (&["37 tensors", "split.tensors.count says 38"], |h| drop(h[1].tensors.pop())),
        (&["blk.1.attn_norm.weight is missing"], |h| h[1].tensors[0].name = "blk.9.attn_norm.weight".into()),
        (&["different models", "general.name", "1 and 3"], |h| {
            drop(h[2].metadata.insert("general.name", Value::String("another".into())))
        }),
        (&["order of split.no"], |h| h.swap(0, 1)),
        (&["shard 3 of 3 is missing"], |h| drop(h.pop())),
        (&["split.no is 3, but split.count only 3"], |h| {
            drop(h[1].metadata.insert("split.no", Value::U16(3)))
        }),
        (&["split.no is missing"], |h| drop(h[1].metadata.take("split.no"))),
        (&["split.count is 4294967295"], |h| {
            h.iter_mut().for_each(|h| drop(h.metadata.insert("split.count", Value::U32(u32::MAX))))
        }),
    ];
    assert!(Loader::from_headers(sound()).is_ok());
    for (words, damage) in damages {
        let mut headers = sound();
        damage(&mut headers);
        refused(Loader::from_headers(headers), words);
    }
}

#[test]
fn files_that_are_mixed_up_or_cut_are_noticed() {
    let files = shards();
    let loader = || Loader::from_headers(headers(&files)).unwrap();
    let [a, b, c] = [&files[0], &files[1], &files[2]].map(Clone::clone);
    let mixed = [a.clone(), c.clone(), b.clone()];
    refused(load(loader(), &mixed, 100), &["file 2 of 3 is another one"]);
    let mut other = b.clone();
    let table = header(&b).mark.range.start as usize;
    other[table + 12] ^= 1;
    refused(load(loader(), &[a.clone(), other, c.clone()], 100), &["file 2 of 3 is another one"]);
    let cut = [a.clone(), b[..b.len() - 1].to_vec(), c.clone()];
    refused(load(loader(), &cut, 100), &["file 2 of 3 ends after 149599 bytes", "blk.2.attn_norm.weight"]);
    refused(load(loader(), &[a.clone(), b.clone()], 4096), &["file 3 of 3 did not come"]);
    refused(load(loader(), &[a.clone(), b, c.clone(), c], 4096), &["4 files were pushed"]);
    let mut failed = loader();
    assert!(failed.next_file().is_err());
    refused(failed.push(&a), &["failed earlier"]);
}

/// A sound file with further pairs; the data keep their alignment.
fn with_pairs(file: &[u8], pairs: &[(&str, u32)]) -> Vec<u8> {
    let with = |filler: usize| {
        let builder = GgufBuilder::new().str("filler", &"x".repeat(filler));
        let builder = pairs.iter().fold(builder, |builder, (key, value)| builder.u32(key, *value));
        builder.header()[24..].to_vec()
    };
    let inserted = (0..32).map(with).find(|bytes| bytes.len().is_multiple_of(32)).unwrap();
    let count = u64::from_le_bytes(file[16..24].try_into().unwrap()) + 1 + pairs.len() as u64;
    [&file[..16], &count.to_le_bytes(), &inserted, &file[24..]].concat()
}

#[test]
fn a_file_that_is_the_only_shard_is_an_ordinary_file() {
    let whole = fixture("golden/tiny-f32_tied.gguf");
    let want = logits(&load_bytes(&whole).unwrap().0);
    for count in [0, 1] {
        let only =
            with_pairs(&whole, &[("split.no", 0), ("split.count", count), ("split.tensors.count", 38)]);
        assert_eq!(logits(&load_bytes(&only).unwrap().0), want);
        let files = [only];
        let loader = Loader::from_headers(headers(&files)).unwrap();
        assert_eq!(logits(&load(loader, &files, 4096).unwrap()), want);
    }
    let shard = with_pairs(&whole, &[("split.no", 1), ("split.count", 2)]);
    refused(load_bytes(&shard), &["shard 2 of 2: give all 2"]);
    assert_eq!(string(b"x").len(), 9);
    assert_eq!(Split::of(&Metadata::default()).unwrap(), None);
}
