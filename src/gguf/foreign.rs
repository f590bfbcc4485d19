//! What a file is that is no GGUF file: a server's error page, a Git LFS pointer, another format. People meet this
//! often, so the message says what was seen.

use crate::error::{Error, Result};

const MAGIC: &[u8] = b"GGUF";
/// Bytes of the file shown in a message.
const SHOWN: usize = 64;
/// Bytes looked at to tell what the file is.
const LOOKED_AT: usize = 256;

/// Fails as soon as the first bytes of a file (those kept, then those new) can no longer be the magic.
pub(super) fn check_magic(kept: &[u8], new: &[u8]) -> Result<()> {
    let start: Vec<u8> = kept.iter().chain(new).copied().take(LOOKED_AT).collect();
    let compared = start.len().min(MAGIC.len());
    if start[..compared] == MAGIC[..compared] {
        return Ok(());
    }
    Err(not_gguf(&start))
}

/// The error for a file that begins (or wholly consists of) `start`.
pub(super) fn not_gguf(start: &[u8]) -> Error {
    if start.is_empty() {
        return Error::not_a_model("the file is empty (0 bytes)");
    }
    let likely = match likely(start) {
        Some(what) => format!("; it looks like {what}"),
        None => String::new(),
    };
    Error::not_a_model(format!("expected a file that begins with \"GGUF\", found {}{likely}", shown(start)))
}

/// The first bytes, escaped and in quotes.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let more = if bytes.len() > SHOWN { "…" } else { "" };
    format!("\"{}\"{more}", bytes[..bytes.len().min(SHOWN)].escape_ascii())
}

/// What a file that begins with `start` looks like, where that can be told.
pub(crate) fn likely(start: &[u8]) -> Option<&'static str> {
    let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    Some(match start {
        [b'P', b'K', 3 | 5, _, ..] => "a zip archive",
        [0x1f, 0x8b, ..] => "a gzip archive",
        [b'F', b'U', b'G', b'G', ..] => "a GGUF file with its bytes swapped",
        [b'l', b'm' | b'j', b'g', b'g', ..] | [b't', b'j', b'g', b'g', ..] | [b'G', b'G', b'M', b'L', ..] => {
            "a GGML file, the format before GGUF"
        }
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => "a safetensors file",
        _ if text.starts_with(b"version https://git-lfs") => "a Git LFS pointer, not the file itself",
        _ if text.starts_with(b"<") => "an HTML page",
        _ if text.starts_with(b"{") => "JSON",
        _ => return None,
    })
}
