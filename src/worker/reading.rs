//! Bytes on their way into weights: across into wasm in pieces, hashed where a hash was promised, and the tokenizer built as
//! soon as the header is whole.

use super::load::{Job, Loaded};
use crate::engine::TextSide;
use crate::error::{Error, Result};
use crate::store::manifest::hex;
use crate::weights::Loader;
use js_sys::Uint8Array;
use sha2::{Digest, Sha256};
use web_time::Instant;

/// Bytes that cross into wasm at a time.
const PIECE: usize = 256 << 10;
/// Bytes behind the last tensor of a body that are read all the same, so that the usual request ends by itself.
pub(super) const TAIL: u64 = 1 << 20;

/// Bytes on their way into weights.
pub(super) struct Reading<'a> {
    job: &'a Job<'a>,
    pub(super) loader: Loader,
    text: Option<TextSide>,
    hash: Option<Sha256>,
    piece: Vec<u8>,
}

impl<'a> Reading<'a> {
    /// Of one file, whose header is read on the way. `hash`: whether the file's SHA-256 is wanted.
    pub(super) fn of_file(job: &'a Job, bytes: Option<u64>, hash: bool) -> Self {
        let hash = hash.then(Sha256::new);
        Self { job, loader: Loader::new(bytes), text: None, hash, piece: vec![0; PIECE] }
    }

    /// Of several files, whose headers were read before.
    pub(super) fn of_files(job: &'a Job, loader: Loader, text: TextSide) -> Self {
        Self { job, loader, text: Some(text), hash: None, piece: vec![0; PIECE] }
    }

    /// Takes the next bytes of the file.
    pub(super) async fn take(&mut self, chunk: &Uint8Array) -> Result<()> {
        let Job { report, .. } = self.job;
        let (mut at, mut begun) = (0, Instant::now());
        while at < chunk.length() {
            let n = (chunk.length() - at).min(PIECE as u32);
            let piece = &mut self.piece[..n as usize];
            chunk.subarray(at, at + n).copy_to(piece);
            if let Some(hash) = &mut self.hash {
                hash.update(&*piece);
            }
            self.loader.push(piece)?;
            at += n;
            if self.text.is_none() {
                report.spent("pack", begun);
                begun = Instant::now();
                if let Some(plan) = self.loader.plan() {
                    self.job.check_plan(plan)?;
                }
                self.text = text_side(&mut self.loader)?;
                report.spent("tokenizer", begun);
                if let (Some(_), Some(plan)) = (&self.text, self.loader.plan()) {
                    report.set_total(plan.end);
                    self.job.warm_kernels(plan).await;
                }
                begun = Instant::now();
            }
        }
        report.spent("pack", begun);
        self.job.check_wanted()
    }

    /// Whether every tensor is there, and what follows is more than a file's usual end.
    pub(super) fn has_all(&self) -> bool {
        self.loader.is_complete()
            && self.loader.plan().is_some_and(|plan| self.loader.position() > plan.end + TAIL)
    }

    pub(super) fn sha256(&mut self) -> Option<String> {
        self.hash.take().map(|hash| hex(&hash.finalize()))
    }

    /// The model's own name.
    pub(super) fn name(&mut self) -> String {
        self.text.as_ref().and_then(TextSide::model_name).unwrap_or_default()
    }

    pub(super) fn end(self, bytes: Option<u64>) -> Result<Loaded> {
        let position = self.loader.position();
        if let Some(bytes) = bytes.filter(|bytes| position < *bytes && !self.loader.is_complete()) {
            return Err(Error::network(format!("the body ended after {position} of {bytes} bytes")));
        }
        match self.text {
            Some(text) => self.loader.finish().map(|(model, plan)| (model, plan, text)),
            // The header is not whole: finish says what is wrong.
            None => self.loader.finish().and_then(|_| Err(Error::bad_model("the file ends in its header"))),
        }
    }
}

/// Tokenizer and template, as soon as the header is whole: what building them needs is freed before the weights come.
pub(super) fn text_side(loader: &mut Loader) -> Result<Option<TextSide>> {
    let Some(plan) = loader.plan().cloned() else { return Ok(None) };
    match loader.metadata() {
        Some(metadata) => TextSide::from_gguf(metadata, &plan).map(Some),
        None => Ok(None),
    }
}
