//! The GGUF header reader on sound, odd, broken, cut and mutated files: the right header, or a typed error at once and
//! without an allocation that the file only claims to need.

#[path = "common/counting_allocator.rs"]
mod counting_allocator;
#[path = "common/gguf_builder.rs"]
mod gguf_builder;

use counting_allocator::growth;
use gguf_builder::{array, kind, string, GgufBuilder};
use qandle::gguf::{Array, Header, HeaderReader, Value, MAX_ARRAY_LEN, MAX_STRING_BYTES};
use qandle::kernels::dtype::DType;
use qandle::Result;

/// A bad file may cost this much memory at most.
const MAX_GROWTH: isize = 1 << 20;
/// A bad file must be refused within this time.
#[cfg(not(target_arch = "wasm32"))]
const MAX_TIME: std::time::Duration = std::time::Duration::from_millis(100);

const F32: u32 = 0;
const Q4_K: u32 = 12;

macro_rules! fixtures {
    ($($name:literal),* $(,)?) => {
        const FIXTURES: &[(&str, &[u8])] = &[$(($name, include_bytes!(concat!("fixtures/gguf/", $name)))),*];
    };
}

fixtures!(
    "h01_magic_only.gguf",
    "h02_empty.gguf",
    "h05_version0.gguf",
    "h06_version4.gguf",
    "h08_ntensors_max.gguf",
    "h09_nkv_max.gguf",
    "k01_keylen_max.gguf",
    "k02_strlen_1gib.gguf",
    "k03_arr_2p63.gguf",
    "k04_arr_strings_huge.gguf",
    "k05_nested_arrays_3000.gguf",
    "k06_bad_value_type.gguf",
    "m01_tiny_tied_ok.gguf",
    "m02_tiny_untied_ok.gguf",
    "m07_no_qbias.gguf",
    "t01_ndims_1e6.gguf",
    "t12_data_truncated.gguf",
    "t16_align64_ok.gguf",
    "t18_v2_ok.gguf",
);

fn fixture(name: &str) -> &'static [u8] {
    FIXTURES.iter().find(|(file, _)| *file == name).expect("the manifest names files of the table").1
}

/// Reads a file in pieces of `piece` bytes up to its header's end or its own.
fn read(file: &[u8], file_bytes: Option<u64>, piece: usize) -> Result<Header> {
    let mut reader = HeaderReader::new(file_bytes);
    for bytes in file.chunks(piece) {
        if let Some(header) = reader.push(bytes)? {
            return Ok(header);
        }
    }
    reader.finish()?;
    panic!("finish() accepted a header that is not whole");
}

/// Reads a file whose size is known, in one piece.
fn read_known(file: &[u8]) -> Result<Header> {
    read(file, Some(file.len() as u64), usize::MAX)
}

#[track_caller]
fn refused(file: &[u8], code: &str, words: &[&str]) {
    let error = read_known(file).expect_err("the file is bad");
    assert_eq!(error.code(), code, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error:?} does not say {word:?}");
    }
}

/// A small sound file with every kind of value and several tensors.
fn sound() -> GgufBuilder {
    let quants = [0u8; 144 * 2];
    GgufBuilder::new()
        .str("general.architecture", "qwen2")
        .alignment(64)
        .u32("qwen2.block_count", 2)
        .f32("qwen2.rope.freq_base", 1e6)
        .bool("tokenizer.ggml.add_bos_token", true)
        .strings("tokenizer.ggml.tokens", ["a", "", "Ġthe", "中文", "🦙"])
        .i32s("tokenizer.ggml.token_type", &[1, 1, 3, -4, i32::MAX])
        .f32s("tokenizer.ggml.scores", &[0.5, -1.25])
        .raw(b"a.u8", kind::U8, &[200])
        .raw(b"a.i8", kind::I8, &[0xff])
        .raw(b"a.u16", kind::U16, &[1, 2])
        .raw(b"a.i16", kind::I16, &[0xfe, 0xff])
        .raw(b"a.i32", kind::I32, &(-7i32).to_le_bytes())
        .raw(b"a.u64", kind::U64, &u64::MAX.to_le_bytes())
        .raw(b"a.i64", kind::I64, &40i64.to_le_bytes())
        .raw(b"a.f64", kind::F64, &3.0f64.to_le_bytes())
        .raw(b"a.bools", kind::ARRAY, &array(kind::BOOL, 3, &[1, 0, 1]))
        .raw(b"a.bytes", kind::ARRAY, &array(kind::U8, 2, &[9, 8]))
        .raw(b"a.none", kind::ARRAY, &array(kind::STRING, 0, &[]))
        .raw(b"a.nested", kind::ARRAY, &nested())
        .tensor_f32("norm", &[3], &[1.0, 2.0, 3.0])
        .tensor("weight", Q4_K, &[256, 2], &quants)
        .tensor_f32("deep", &[2, 3, 1, 1], &[0.0; 6])
}

/// [[1u8, 2], [], [["x"], []]] as types allow it: arrays of arrays of several depths.
fn nested() -> Vec<u8> {
    let strings = array(kind::STRING, 1, &string(b"x"));
    let inner = array(kind::ARRAY, 2, &[strings, array(kind::U16, 0, &[])].concat());
    array(kind::ARRAY, 3, &[array(kind::U8, 2, &[1, 2]), array(kind::ARRAY, 0, &[]), inner].concat())
}

struct XorShift(u64);

impl XorShift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn every_case_file_gives_what_the_manifest_says() {
    let manifest: serde_json::Value =
        serde_json::from_str(include_str!("fixtures/gguf/manifest.json")).expect("the manifest is JSON");
    let rows = manifest.as_array().expect("the manifest is a list");
    assert_eq!(rows.len(), FIXTURES.len());
    for row in rows {
        let name = row["file"].as_str().expect("a row has a file");
        let file = fixture(name);
        assert_eq!(row["bytes"], file.len(), "{name}");
        for (size, piece) in [(Some(file.len() as u64), usize::MAX), (Some(file.len() as u64), 1), (None, 7)]
        {
            #[cfg(not(target_arch = "wasm32"))]
            let start = std::time::Instant::now();
            let (result, grown) = growth(|| read(file, size, piece));
            #[cfg(not(target_arch = "wasm32"))]
            assert!(start.elapsed() < MAX_TIME, "{name} took {:?}", start.elapsed());
            assert!(grown.peak < MAX_GROWTH, "{name} grew by {grown:?}");
            match result {
                Ok(_) if name.starts_with("t12") => {
                    assert_eq!(size, None, "{name}: it is cut behind its header")
                }
                Ok(_) => assert_eq!(row["header"], "whole", "{name}"),
                Err(error) => assert_eq!(row["header"], error.code(), "{name}: {error}"),
            }
        }
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn odd_but_sound_files_hold_tensor_t() {
    for (name, version, alignment) in [("t16_align64_ok.gguf", 3, 64), ("t18_v2_ok.gguf", 2, 32)] {
        for piece in [1, 3, usize::MAX] {
            let file = fixture(name);
            let mut reader = HeaderReader::new(Some(file.len() as u64));
            let mut header = None;
            for bytes in file.chunks(piece) {
                header = reader.push(bytes).expect("the file is sound").or(header);
            }
            reader.finish().expect("the header is whole");
            let header = header.expect("the header is whole");
            assert_eq!((header.version, header.alignment), (version, alignment));
            let [t] = header.tensors.as_slice() else { panic!("{:?}", header.tensors) };
            assert_eq!((t.name.as_str(), t.dtype, t.bytes), ("t", DType::F32, 32));
            assert_eq!((t.shape.as_slice(), t.offset), ([8].as_slice(), header.data_offset));
            let unused = reader.unused();
            assert_eq!(reader.unused_offset() + unused.len() as u64, file.len() as u64);
            let data = &unused[(t.offset - reader.unused_offset()) as usize..];
            let values: Vec<f32> =
                data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
            assert_eq!(values, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "{name}");
        }
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn metadata_and_tensors_come_out_as_written() {
    let file = sound().build();
    let Header { metadata, tensors, data_offset, .. } = read_known(&file).expect("the file is sound");
    assert_eq!(metadata.len(), 20);
    assert_eq!(metadata.str("general.architecture"), Some("qwen2"));
    assert_eq!(metadata.bool("tokenizer.ggml.add_bos_token"), Some(true));
    let tokens = metadata.strings("tokenizer.ggml.tokens").expect("tokens are strings");
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["a", "", "Ġthe", "中文", "🦙"]);
    assert_eq!(
        (tokens.len(), tokens.get(0), tokens.get(1), tokens.get(3)),
        (5, Some("a"), Some(""), Some("中文"))
    );
    assert_eq!(tokens.get(5), None);
    assert_eq!(metadata.i32s("tokenizer.ggml.token_type"), Some([1, 1, 3, -4, i32::MAX].as_slice()));
    assert_eq!(metadata.f32s("tokenizer.ggml.scores"), Some([0.5, -1.25].as_slice()));
    assert_eq!(metadata.array("a.bools"), Some(&Array::Bool(vec![true, false, true])));
    assert_eq!(metadata.integers("a.bytes"), Some(vec![9, 8]));
    assert!(metadata.strings("a.none").is_some_and(|none| none.is_empty()));
    assert_eq!(metadata.get("a.nested"), Some(&Value::Nested(3)));

    // Numbers are found whatever type they were written in, but only whole ones ≥ 0 are counts.
    assert_eq!((metadata.u64("qwen2.block_count"), metadata.f64("qwen2.block_count")), (Some(2), Some(2.0)));
    assert_eq!((metadata.u64("qwen2.rope.freq_base"), metadata.f64("a.f64")), (Some(1_000_000), Some(3.0)));
    assert_eq!(
        (metadata.u64("a.u8"), metadata.u64("a.u16"), metadata.u64("a.i64")),
        (Some(200), Some(513), Some(40))
    );
    assert_eq!((metadata.u64("a.u64"), metadata.u64("a.f64")), (Some(u64::MAX), Some(3)));
    assert_eq!((metadata.u64("a.i8"), metadata.u64("a.i16"), metadata.u64("a.i32")), (None, None, None));
    assert_eq!(
        (metadata.f64("a.i8"), metadata.f64("a.i16"), metadata.f64("a.i32")),
        (Some(-1.0), Some(-2.0), Some(-7.0))
    );
    assert_eq!(
        (metadata.u64("general.architecture"), metadata.str("a.u8"), metadata.u64("absent")),
        (None, None, None)
    );

    let table: Vec<_> =
        tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice(), t.bytes)).collect();
    let expected: [(&str, DType, &[usize], u64); 3] = [
        ("norm", DType::F32, &[3], 12),
        ("weight", DType::Q4K, &[2, 256], 288),
        ("deep", DType::F32, &[3, 2], 24),
    ];
    assert_eq!(table, expected);
    let offsets: Vec<u64> = tensors.iter().map(|t| t.offset - data_offset).collect();
    assert_eq!((data_offset % 64, offsets), (0, vec![0, 64, 384]));
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn taken_arrays_leave_the_metadata() {
    let mut metadata = read_known(&sound().build()).expect("the file is sound").metadata;
    assert!(metadata.take_strings("tokenizer.ggml.scores").is_none());
    assert!(metadata.f32s("tokenizer.ggml.scores").is_some());
    assert_eq!(metadata.take_strings("tokenizer.ggml.tokens").map(|tokens| tokens.len()), Some(5));
    assert!(metadata.get("tokenizer.ggml.tokens").is_none());
    assert!(metadata.take("a.u8") == Some(Value::U8(200)) && metadata.take("a.u8").is_none());
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn any_split_gives_the_same_header_and_the_same_rest() {
    let file = sound().build();
    let whole = read_known(&file).expect("the file is sound");
    let mut random = XorShift(0x9e37_79b9_7f4a_7c15);
    for _ in 0..500 {
        let mut reader = HeaderReader::new((random.below(2) == 0).then_some(file.len() as u64));
        let longest = 1 + random.below(120);
        let (mut at, mut headers) = (0, Vec::new());
        while at < file.len() {
            let end = (at + random.below(longest + 1)).min(file.len());
            headers.extend(reader.push(&file[at..end]).expect("the file is sound"));
            at = end;
        }
        assert_eq!(headers, std::slice::from_ref(&whole));
        assert_eq!(reader.unused(), &file[reader.unused_offset() as usize..]);
        assert!(reader.finish().is_ok());
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn every_truncation_is_an_error() {
    let (file, header) = (sound().build(), sound().header());
    for end in 0..file.len() {
        let cut = &file[..end];
        for piece in [usize::MAX, 5] {
            let known = read(cut, Some(end as u64), piece).expect_err("the file is cut");
            assert_eq!(known.code(), if end < 4 { "not_a_model" } else { "bad_model" }, "{end}: {known}");
            let unknown = read(cut, None, piece);
            assert_eq!(unknown.is_ok(), end >= header.len(), "{end} of {}", header.len());
        }
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn mutated_files_neither_panic_nor_allocate_beyond_their_size() {
    // A file of 1.5 KB and its maps and tables; a claimed count would show as far more.
    const MAX_MUTANT_GROWTH: isize = 64 << 10;
    let rounds = if cfg!(target_arch = "wasm32") { 20_000 } else { 200_000 };
    let (file, header_bytes) = (sound().build(), sound().header().len());
    let mut mutant = file.clone();
    let mut random = XorShift(0x2545_f491_4f6c_dd1d);
    let mut refusals = 0;
    for _ in 0..rounds {
        let at = random.below(header_bytes);
        mutant[at] = match random.below(4) {
            0 => file[at] ^ (1 << random.below(8)),
            1 => [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            _ => random.next() as u8,
        };
        let size = (random.below(2) == 0).then_some(file.len() as u64);
        let piece = [usize::MAX, 64, 9][random.below(3)];
        let (result, grown) = growth(|| read(&mutant, size, piece));
        assert!(grown.peak < MAX_MUTANT_GROWTH, "byte {at} = {}: {grown:?}", mutant[at]);
        refusals += usize::from(result.is_err());
        mutant[at] = file[at];
    }
    assert!(refusals > rounds / 10, "only {refusals} of {rounds} mutants were refused");
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn foreign_files_are_told_by_what_they_are() {
    refused(b"", "not_a_model", &["empty"]);
    refused(b"GGU", "not_a_model", &["GGU"]);
    refused(b"<!DOCTYPE html><html>", "not_a_model", &["<!DOCTYPE html>", "HTML"]);
    refused(b"\xef\xbb\xbf\r\n  <html lang=\"en\">", "not_a_model", &["HTML", "\\xef\\xbb\\xbf\\r\\n"]);
    refused(b"{\"error\":\"not found\"}", "not_a_model", &["JSON"]);
    refused(b"PK\x03\x04\x14\0\0\0", "not_a_model", &["zip", "PK\\x03\\x04"]);
    refused(b"version https://git-lfs.github.com/spec/v1\n", "not_a_model", &["Git LFS"]);
    refused(b"\x40\0\0\0\0\0\0\0{\"__metadata__\"", "not_a_model", &["safetensors"]);
    refused(b"GGML\x01\0\0\0", "not_a_model", &["GGML"]);
    refused(b"lmgg\x01\0\0\0", "not_a_model", &["GGML"]);
    refused(&[0; 64], "not_a_model", &["\\x00"]);
    // The first wrong byte is enough, even with an unknown size and one byte at a time.
    let mut reader = HeaderReader::new(None);
    assert!(reader.push(b"G").is_ok());
    let error = reader.push(b"I").expect_err("no magic begins so");
    assert_eq!((error.code(), error.message().contains("GI")), ("not_a_model", true));
    assert_eq!(reader.push(b"GGUF"), Err(error.clone()));
    assert_eq!(reader.finish(), Err(error));
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn other_versions_and_byte_orders_are_named() {
    let version = |version: u32| sound().version(version).build();
    refused(&version(3u32.swap_bytes()), "unsupported_model", &["big-endian", "version 3"]);
    refused(&version(2u32.swap_bytes()), "unsupported_model", &["big-endian"]);
    refused(&version(1), "unsupported_model", &["version 1"]);
    for bad in [0, 4, 77, u32::MAX] {
        refused(&version(bad), "bad_model", &[&bad.to_string()]);
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn bad_counts_fail_before_more_bytes_come() {
    let start = |tensors: u64, pairs: u64| {
        [b"GGUF".as_slice(), &3u32.to_le_bytes(), &tensors.to_le_bytes(), &pairs.to_le_bytes()].concat()
    };
    let pair = |kind: u32, value: &[u8]| {
        let key = string(b"k");
        [start(0, 1).as_slice(), &key, &kind.to_le_bytes(), value].concat()
    };
    let tensor =
        |name_bytes: u64, rest: &[u8]| [start(1, 0).as_slice(), &name_bytes.to_le_bytes(), rest].concat();
    let long = (MAX_STRING_BYTES + 1).to_le_bytes();
    let prefixes = [
        start(u64::MAX, 0)[..16].to_vec(),
        start(65_537, 0)[..16].to_vec(),
        start(0, 1 << 32),
        [start(0, 1).as_slice(), &65_536u64.to_le_bytes()].concat(),
        pair(13, &[]),
        pair(kind::STRING, &long),
        pair(kind::ARRAY, &array(99, 1, &[])),
        pair(kind::ARRAY, &array(kind::U8, MAX_ARRAY_LEN + 1, &[])),
        pair(kind::ARRAY, &array(kind::F64, u64::MAX, &[])),
        pair(kind::ARRAY, &array(kind::STRING, 1, &long)),
        pair(kind::ARRAY, &array(kind::ARRAY, 1 << 40, &[])),
        tensor(1025, &[]),
        tensor(1, &[b't', 0, 0, 0, 0]),
        tensor(1, &[b't', 5, 0, 0, 0]),
    ];
    for (i, prefix) in prefixes.iter().enumerate() {
        for size in [None, Some(1 << 40)] {
            let mut reader = HeaderReader::new(size);
            let (last, before) = prefix.split_last().expect("a prefix has bytes");
            let (result, grown) = growth(|| reader.push(before));
            assert!(matches!(result, Ok(None)), "prefix {i} fails too early: {result:?}");
            let error = reader.push(&[*last]).expect_err("the count is whole and bad");
            assert_eq!(error.code(), "bad_model", "prefix {i}: {error}");
            assert!(grown.peak < MAX_GROWTH);
        }
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn counts_that_pass_the_limits_are_still_held_against_the_file_size() {
    let tokens = |len: u64| {
        GgufBuilder::new()
            .raw(b"tokenizer.ggml.tokens", kind::ARRAY, &array(kind::STRING, len, &[0; 64]))
            .build()
    };
    refused(&tokens(100_000), "bad_model", &["cut short", "800"]);
    refused(
        &GgufBuilder::new().raw(b"k", kind::STRING, &(1u64 << 20).to_le_bytes()).build(),
        "bad_model",
        &["1048"],
    );
    let mut many = GgufBuilder::new().build();
    many[8..16].copy_from_slice(&60_000u64.to_le_bytes());
    refused(&many, "bad_model", &["the file has 32 bytes"]);
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn bad_metadata_is_refused_by_key() {
    let new = GgufBuilder::new;
    refused(&new().u32("k.one", 1).u32("k.two", 2).u32("k.one", 1).build(), "bad_model", &["k.one", "twice"]);
    refused(&new().raw(b"\xff\xfe", kind::U8, &[1]).build(), "bad_model", &["UTF-8", "\\xff\\xfe"]);
    refused(&new().raw(b"", kind::U8, &[1]).build(), "bad_model", &["empty"]);
    refused(&new().raw(b"flag", kind::BOOL, &[2]).build(), "bad_model", &["0 or 1"]);
    refused(&new().raw(b"flags", kind::ARRAY, &array(kind::BOOL, 2, &[0, 9])).build(), "bad_model", &["9"]);
    for alignment in [0, 3, 4, 48, 1 << 21, 1 << 31, u32::MAX] {
        refused(&new().alignment(alignment).build(), "bad_model", &["alignment", &alignment.to_string()]);
    }
    refused(&new().str("general.alignment", "32").build(), "bad_model", &["general.alignment"]);
    // Values, unlike keys, may hold bytes that are not UTF-8.
    let odd = new().raw(b"general.name", kind::STRING, &string(b"caf\xe9")).build();
    assert_eq!(
        read_known(&odd).expect("the file is sound").metadata.str("general.name"),
        Some("caf\u{fffd}")
    );
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn bad_tensor_tables_are_refused_by_name() {
    let new = GgufBuilder::new;
    let one = |ggml_type, dims: &[u64], offset| {
        new().info("blk.0.odd", ggml_type, dims, offset).data(&[0; 4096]).build()
    };
    refused(&one(F32, &[8, 0], 0), "bad_model", &["blk.0.odd", "zero"]);
    refused(&one(F32, &[1 << 32, 1 << 32], 0), "bad_model", &["blk.0.odd", "64 bits"]);
    refused(&one(F32, &[1 << 62, 1], 0), "bad_model", &["blk.0.odd", "bytes"]);
    refused(&one(F32, &[1 << 16, 1 << 16, 1 << 16, 1 << 15], 0), "bad_model", &["blk.0.odd"]);
    refused(&one(F32, &[8], u64::MAX - 31), "bad_model", &["blk.0.odd"]);
    refused(&one(F32, &[8], 8), "bad_model", &["blk.0.odd", "alignment 32"]);
    refused(&one(F32, &[2000], 0), "bad_model", &["blk.0.odd", "cut short", "8096"]);
    refused(&one(F32, &[8], 1 << 20), "bad_model", &["blk.0.odd", "cut short"]);
    refused(&one(Q4_K, &[128, 2], 0), "bad_model", &["blk.0.odd", "128", "Q4_K", "256"]);
    for (ggml_type, name) in
        [(17, "IQ2_XS"), (15, "Q8_K"), (26, "I32"), (31, "Q4_0_4_4"), (39, "MXFP4"), (4242, "4242")]
    {
        refused(&one(ggml_type, &[256], 0), "unsupported_quantization", &["blk.0.odd", name, "Q4_K"]);
    }
    let twins = new().tensor_f32("twin", &[1], &[1.0]).tensor_f32("other", &[1], &[1.0]).tensor_f32(
        "twin",
        &[1],
        &[1.0],
    );
    refused(&twins.build(), "bad_model", &["twin", "two tensors"]);
    let overlap = new().info("second", F32, &[4], 32).info("first", F32, &[9], 0).data(&[0; 64]);
    refused(&overlap.build(), "bad_model", &["first", "second", "overlap"]);
    let same = new().info("a", F32, &[4], 0).info("b", F32, &[4], 0).data(&[0; 64]);
    refused(&same.build(), "bad_model", &["overlap"]);
    refused(&new().info("", F32, &[4], 0).data(&[0; 64]).build(), "bad_model", &["tensor name is empty"]);
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn tensors_are_sorted_by_offset_and_gaps_are_fine() {
    let file = GgufBuilder::new()
        .info("late", F32, &[4, 2, 3], 256)
        .info("row", F32, &[4, 1], 64)
        .info("early", F32, &[1], 0)
        .data(&[0; 512]);
    let header = read_known(&file.build()).expect("the file is sound");
    let table: Vec<_> = header.tensors.iter().map(|t| (t.name.as_str(), t.shape.clone())).collect();
    assert_eq!(table, [("early", vec![1]), ("row", vec![1, 4]), ("late", vec![3, 2, 4])]);
    // A file of metadata alone may end without padding.
    let bare = GgufBuilder::new().u32("k", 1).header();
    assert_eq!(read_known(&bare).map(|header| (header.tensors.len(), header.data_offset)), Ok((0, 64)));
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn a_real_vocabulary_costs_about_its_bytes() {
    let file = GgufBuilder::new()
        .strings("tokenizer.ggml.tokens", (0..151_936).map(|i| format!("Ġtok{i}")))
        .i32s("tokenizer.ggml.token_type", &vec![1; 151_936])
        .strings("tokenizer.ggml.merges", (0..151_387).map(|i| format!("Ġme {i}rge")))
        .build();
    let (header, grown) =
        growth(|| read(&file, Some(file.len() as u64), 64 << 10).expect("the file is sound"));
    // Kept: the text, 4 bytes a string where the file has 8. While growing: one array doubling.
    assert!(grown.held < file.len() as isize, "{grown:?} for {} bytes", file.len());
    assert!(grown.peak < 2 * file.len() as isize, "{grown:?} for {} bytes", file.len());
    let merges = header.metadata.strings("tokenizer.ggml.merges").expect("merges are strings");
    assert_eq!((merges.len(), merges.get(151_386)), (151_387, Some("Ġme 151386rge")));
}
