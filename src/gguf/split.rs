//! Models in several GGUF files, as llama.cpp's gguf-split writes them: every file has a header of its own, only the first
//! one the model's metadata, and `split.no`, `split.count` and `split.tensors.count` tell which part a file is.

use super::{Header, Metadata};
use crate::error::{Error, Result};

/// Files of one model: gguf-split's largest model has some hundreds.
pub const MAX_SHARDS: u64 = 1024;

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// Missing shards that a message names.
const SHOWN: usize = 8;

/// Which part of a model a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// `split.no`: 0 for the first file. Messages and file names count from 1.
    pub no: usize,
    /// `split.count`: files of the model, 2 or more.
    pub count: usize,
    /// `split.tensors.count`: tensors in all files together.
    pub tensors: Option<u64>,
}

impl Split {
    /// What a header says of its file; `None` for a file that is a whole model, also where it says `split.count` 1.
    ///
    /// # Errors
    /// `bad_model` where the keys contradict each other or are out of range.
    pub fn of(metadata: &Metadata) -> Result<Option<Split>> {
        if metadata.get(COUNT).is_none() {
            return Ok(None);
        }
        let number = |key: &str| {
            metadata.u64(key).ok_or_else(|| Error::bad_model(format!("{key} is missing or no whole number")))
        };
        let count = number(COUNT)?;
        if count <= 1 {
            return Ok(None);
        }
        if count > MAX_SHARDS {
            return Err(Error::bad_model(format!("{COUNT} is {count}, at most {MAX_SHARDS} is accepted")));
        }
        let no = number(NO)?;
        if no >= count {
            return Err(Error::bad_model(format!("{NO} is {no}, but {COUNT} only {count}")));
        }
        let tensors = metadata.get(TENSORS).map(|_| number(TENSORS)).transpose()?;
        Ok(Some(Split { no: no as usize, count: count as usize, tensors }))
    }
}

/// The order in which files are to be read: `shard_order(..)[k]` is the index of the file that is shard k. `shards` says of each file
/// what [`Split::of`] found in its header.
///
/// # Errors
/// `bad_model`, by number, where a shard is missing or given twice, where the files are parts of different models, or where
/// a whole model stands among several files.
pub fn shard_order(shards: &[Option<Split>]) -> Result<Vec<usize>> {
    let first = match shards {
        [] => return Err(Error::bad_model("no file was given")),
        [None] => return Ok(vec![0]),
        [Some(only)] => {
            return Err(Error::bad_model(format!(
                "shard {} of {}: give all {}",
                only.no + 1,
                only.count,
                only.count
            )))
        }
        [first, ..] => first,
    };
    let mut places: Vec<Option<usize>> = Vec::new();
    for (file, shard) in shards.iter().enumerate() {
        let (Some(shard), Some(first)) = (shard, first) else {
            let whole = if first.is_none() { 0 } else { file };
            return Err(Error::bad_model(format!(
                "file {} of {} is a whole model (its split.count is not above 1), no shard of one",
                whole + 1,
                shards.len()
            )));
        };
        if (shard.count, shard.tensors) != (first.count, first.tensors) {
            return Err(Error::bad_model(format!(
                "the files are shards of different models: file 1 is of {}, file {} of {}",
                described(first),
                file + 1,
                described(shard)
            )));
        }
        places.resize(shard.count, None);
        if let Some(other) = places[shard.no].replace(file) {
            return Err(Error::bad_model(format!(
                "shard {} of {} is given twice, as files {} and {}",
                shard.no + 1,
                shard.count,
                other + 1,
                file + 1
            )));
        }
    }
    let missing: Vec<usize> = (0..places.len()).filter(|&no| places[no].is_none()).collect();
    if missing.is_empty() {
        return Ok(places.into_iter().flatten().collect());
    }
    let shown: Vec<String> = missing.iter().take(SHOWN).map(|no| (no + 1).to_string()).collect();
    let more = if missing.len() > SHOWN { " and others" } else { "" };
    let (s, are) = if missing.len() == 1 { ("", "is") } else { ("s", "are") };
    Err(Error::bad_model(format!("shard{s} {}{more} of {} {are} missing", shown.join(", "), places.len())))
}

/// Checks that headers are those of all files of one model, in order. One file that is a whole model is fine.
///
/// # Errors
/// `bad_model`: as [`shard_order`]; and where the order is another, where there are more or fewer tensors than
/// `split.tensors.count` says, or where a later shard's metadata contradict the first one's.
pub fn check_shards(headers: &[Header]) -> Result<()> {
    let shards = headers.iter().map(|header| Split::of(&header.metadata)).collect::<Result<Vec<_>>>()?;
    if let Some((at, file)) = shard_order(&shards)?.into_iter().enumerate().find(|(at, file)| at != file) {
        return Err(Error::bad_model(format!(
            "shards go in the order of {NO}: file {} is shard {} and stands in place {}",
            file + 1,
            at + 1,
            file + 1
        )));
    }
    let found: usize = headers.iter().map(|header| header.tensors.len()).sum();
    match shards[0].and_then(|first| first.tensors) {
        Some(wanted) if wanted != found as u64 => {
            return Err(Error::bad_model(format!(
                "the {} shards hold {found} tensors, {TENSORS} says {wanted}",
                headers.len()
            )))
        }
        _ => {}
    }
    for (at, header) in headers.iter().enumerate().skip(1) {
        let own = |key: &str| key.starts_with("split.") || key == "general.alignment";
        let differs = |(key, value): &(&str, _)| {
            !own(key) && headers[0].metadata.get(key).is_some_and(|other| other != *value)
        };
        if let Some((key, _)) = header.metadata.iter().find(differs) {
            return Err(Error::bad_model(format!(
                "the files are shards of different models: {key} differs between shards 1 and {}",
                at + 1
            )));
        }
    }
    Ok(())
}

fn described(split: &Split) -> String {
    match split.tensors {
        Some(tensors) => format!("{} shards with {tensors} tensors", split.count),
        None => format!("{} shards", split.count),
    }
}
