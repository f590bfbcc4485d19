//! The header reader on sound, bad, foreign and mutated files: a typed error at once, without an allocation that a file only
//! claims to need.

use super::counting_allocator::growth;
use super::safetensors_builder::file;
use super::{fixture, header, read, refused};

/// A bad file may cost this much memory at most.
const MAX_GROWTH: isize = 1 << 20;

#[test]
fn the_handed_bad_files_are_refused() {
    for name in ["s01_header_len_max", "s03_truncated_data"] {
        let bytes = fixture(&format!("safetensors/{name}.safetensors"));
        let (result, grown) = growth(|| header(&bytes).map(|_| ()));
        assert!(grown.peak < MAX_GROWTH, "{name}: {grown:?}");
        refused(result, "bad_model", &[]);
    }
    // Where the length of the file is not known, the end of the file tells.
    let bytes = fixture("safetensors/s03_truncated_data.safetensors");
    let header = read(&bytes, None, 7).unwrap();
    assert_eq!(header.file_bytes, 8 + 83 + 4096);
}

/// The JSON of one tensor "x" of two F32.
fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"x":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn bad_headers_are_refused_at_once_and_without_memory() {
    let sound = entry("\"F32\"", "[2]", "[0,8]");
    assert_eq!(header(&file(&sound, &[0; 8])).unwrap().tensors[0].bytes, 8);
    let two = |second: &str| sound.replace("}}", &format!("}},{second}}}"));
    let y = |offsets: &str| two(&format!(r#""y":{{"dtype":"F16","shape":[1,2],"data_offsets":{offsets}}}"#));
    assert_eq!(header(&file(&y("[8,12]"), &[0; 12])).unwrap().tensors.len(), 2);
    let (deep, long) = ("[".repeat(100_000), format!("{:?}", "x".repeat(100_000)));
    let max = u64::MAX;
    let cases: Vec<(String, &[u8], &str, &str)> = vec![
        (y("[4,8]"), &[0; 8], "bad_model", "an overlap"),
        (y("[0,4]"), &[0; 8], "bad_model", "expected"),
        (y("[9,13]"), &[0; 13], "bad_model", "a gap"),
        (y("[8,11]"), &[0; 12], "bad_model", "\"y\""),
        (y("[12,8]"), &[0; 12], "bad_model", "\"y\""),
        (y("[8,12]"), &[0; 11], "bad_model", "cut short"),
        (y("[8,12]"), &[0; 13], "bad_model", "13"),
        (
            two(r#""x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}"#),
            &[0; 16],
            "bad_model",
            "two tensors",
        ),
        (entry("\"F64\"", "[1]", "[0,8]"), &[0; 8], "unsupported_quantization", "F64"),
        (entry("\"F8_E4M3\"", "[8]", "[0,8]"), &[0; 8], "unsupported_quantization", "F8_E4M3"),
        (entry("\"Q4_0\"", "[2]", "[0,8]"), &[0; 8], "bad_model", "Q4_0"),
        (entry("1", "[2]", "[0,8]"), &[0; 8], "bad_model", "integer"),
        (sound.replace('x', &"x".repeat(1025)), &[0; 8], "bad_model", "1025 bytes"),
        (entry("\"F32\"", &format!("[{}2]", "1,".repeat(9)), "[0,8]"), &[0; 8], "bad_model", "10 dimensions"),
        (entry("\"F32\"", "[0]", "[0,0]"), &[], "bad_model", "zero"),
        (entry("\"F32\"", "[-2]", "[0,8]"), &[0; 8], "bad_model", "-2"),
        (entry("\"F32\"", "[2.0]", "[0,8]"), &[0; 8], "bad_model", "2.0"),
        (entry("\"F32\"", "[2]", "[0,8,9]"), &[0; 8], "bad_model", "cannot be read"),
        (entry("\"F32\"", "[4294967296,4294967296]", "[0,8]"), &[0; 8], "bad_model", "file can hold"),
        (entry("\"F32\"", &format!("[{max}]"), &format!("[0,{max}]")), &[0; 8], "bad_model", "file can hold"),
        (entry("\"F32\"", "[2]", &format!("[{},{}]", max - 7, max)), &[0; 8], "bad_model", "\"x\""),
        (entry("\"F32\"", "[2]", &format!("[{max},7]")), &[0; 8], "bad_model", "\"x\""),
        (entry("\"F32\"", "[4294967296]", "[0,17179869184]"), &[0; 8], "bad_model", "32 bits"),
        (sound.replace("\"x\"", "\"\""), &[0; 8], "bad_model", "0 bytes"),
        (sound.replace(r#""dtype":"F32","#, ""), &[0; 8], "bad_model", "dtype"),
        (sound.replace('x', "\u{0}"), &[0; 8], "bad_model", "cannot be read"),
        (sound.replace("}}", "}"), &[0; 8], "bad_model", "cannot be read"),
        (entry("\"F32\"", &long, "[0,8]"), &[0; 8], "bad_model", "cannot be read"),
        (format!(" {sound}"), &[0; 8], "bad_model", "must begin"),
        ("[]".into(), &[], "bad_model", "must begin"),
        (format!("{sound}x"), &[0; 8], "bad_model", "cannot be read"),
        (format!(r#"{{"__metadata__":{deep}"#), &[], "bad_model", "cannot be read"),
    ];
    for (json, data, code, word) in cases {
        let bytes = file(&json, data);
        let shown: String = json.chars().take(100).collect();
        let (result, grown) = growth(|| header(&bytes).map(|_| ()));
        assert!(grown.peak < MAX_GROWTH, "{shown}: {grown:?}");
        let error = result.err().unwrap_or_else(|| panic!("{shown} was accepted"));
        assert_eq!(error.code(), code, "{shown}: {error}");
        assert!(error.message().len() < 2000, "{shown}: a message of {} bytes", error.message().len());
        assert!(error.message().contains(word), "{shown}: {error} does not say {word:?}");
    }
    let mut bytes = file(&sound, &[0; 8]);
    bytes[11] = 0xff;
    refused(header(&bytes), "bad_model", &["cannot be read"]);
    // A length that the file, or the limit, does not allow.
    refused(header(&[&1000u64.to_le_bytes()[..], b"{}"].concat()), "bad_model", &["the file has 10 bytes"]);
    let (result, grown) = growth(|| read(&[&(1u64 << 30).to_le_bytes()[..], b"{}"].concat(), None, 3));
    assert!(grown.peak < MAX_GROWTH, "{grown:?}");
    refused(result, "bad_model", &["at most 16777216"]);
    refused(read(&bytes[..20], None, 5), "bad_model", &["ends after 20 bytes"]);
}

#[test]
fn another_kind_of_file_is_said_to_be_one() {
    for (bytes, word) in [
        (&b"<!DOCTYPE html><title>404</title>"[..], "an HTML page"),
        (b"version https://git-lfs\noid", "a Git LFS pointer"),
        (b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0", "a GGUF file"),
        (b"PK\x03\x04\x14\0\x08\0\x08\0", "a zip archive"),
        (b"{\"error\":\"not found\"}", "JSON"),
        (b"", "0 bytes"),
    ] {
        refused(header(bytes), "not_a_model", &[word]);
    }
}

#[test]
fn headers_read_in_any_split_are_the_same_and_damage_never_panics() {
    let whole = fixture("safetensors/model.safetensors");
    let want = header(&whole).unwrap();
    assert_eq!(want.tensors.len(), 38);
    for piece in [1, 3, 1000] {
        assert_eq!(read(&whole[..8192], None, piece).unwrap(), want);
    }
    let mut state = 7u64;
    let mut random = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let head = want.data_offset as usize;
    for _ in 0..3000 {
        let mut bytes = whole[..head].to_vec();
        for _ in 0..=random(3) {
            let at = random(head);
            bytes[at] = b"0123456789{}[]\",:xF\0\xff"[random(21)];
        }
        let (result, grown) =
            growth(|| read(&bytes, Some(whole.len() as u64), 500).map(|header| header.tensors.len()));
        assert!(grown.peak < MAX_GROWTH, "{grown:?}");
        if let Ok(n) = result {
            assert_eq!(n, 38);
        }
    }
}
