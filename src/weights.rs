//! A stream of file bytes becomes packed weights, tensor by tensor in file order, with flat memory: no whole file, no
//! whole tensor in its file form, no f32 copy of a matrix. A model is one GGUF file, all shards of one, or one or several
//! safetensors files. The headers are checked against what Qwen2 needs before the first weight byte is asked for.

mod assembly;
mod plan;

pub use plan::{dims, Plan, TOKEN_EMBD};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::gguf::{self, HeaderReader, Metadata};
use crate::kernels::{PackedMatrix, Packer, Quantizer};
use crate::model::{Embedding, Model};
use crate::safetensors;
use crate::table_mark::{TableMark, Watch};
use assembly::Assembly;
use plan::Placed;
use serde::Deserialize;
use std::collections::HashMap;

/// What float matrices become while they are loaded. Norms, biases, and matrices whose rows are no whole number of blocks of 32
/// stay as they are in the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum Quantize {
    /// Nothing: F32, F16 and BF16 stay.
    #[default]
    #[serde(rename = "none")]
    None,
    /// Q8_0, 8.5 bits a weight.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// Q4_0, 4.5 bits a weight; embedding and output head become Q8_0, as llama.cpp keeps them in a wider type too.
    #[serde(rename = "q4_0")]
    Q4_0,
}

/// A file may end in this many zero bytes, and in this part of its last tensor: rows of an embedding that stand for no token
/// are zero (271 of Qwen2.5's 151,936). More is a file that was cut and filled up, as a full disk or a broken download leaves it.
const MOST_ZEROS: u64 = 4096;
const MOST_ZEROS_OF: u64 = 128;

/// Takes the bytes of one file after another, each from its start, in order and in any split.
///
/// One GGUF file needs nothing but its bytes ([`Loader::new`]). For several files all headers are read first
/// ([`gguf::HeaderReader`], [`safetensors::HeaderReader`]); then each file is pushed whole, its header too, and
/// [`Loader::next_file`] stands between two.
pub struct Loader {
    state: State,
    position: u64,
}

enum State {
    Header(Box<HeaderReader>),
    Tensors(Box<Tensors>),
    Failed,
}

struct Tensors {
    plan: Plan,
    metadata: Metadata,
    /// Marks of the files whose headers were read before; empty for a file that is read once.
    marks: Vec<TableMark>,
    /// Index of the file that is read, and the position in it.
    file: usize,
    position: u64,
    watch: Option<Watch>,
    next: usize,
    /// Zero bytes in a row up to the position.
    zeros: u64,
    intake: Option<Intake>,
    packed: HashMap<String, PackedMatrix>,
}

/// A tensor on its way from file bytes into memory.
enum Intake {
    AsItIs(Packer),
    Quantized(Quantizer),
}

impl Loader {
    /// A loader of one GGUF file of `file_bytes`, where the length is known. A shard is refused once its header is read.
    pub fn new(file_bytes: Option<u64>) -> Self {
        Self { state: State::Header(Box::new(HeaderReader::new(file_bytes))), position: 0 }
    }

    /// A loader of a model in several GGUF files, given the headers of all in the order of `split.no` ([`gguf::shard_order`]).
    ///
    /// # Errors
    /// As [`gguf::check_shards`]; `bad_model` where a tensor is in two files; and all that a single file's header is refused for.
    pub fn from_headers(headers: Vec<gguf::Header>) -> Result<Self> {
        gguf::check_shards(&headers)?;
        let mut metadata = None;
        let (mut files, mut marks) = (Vec::new(), Vec::new());
        for header in headers {
            metadata.get_or_insert(header.metadata);
            files.push(header.tensors);
            marks.push(header.mark);
        }
        let metadata = metadata.unwrap_or_default();
        let plan = Plan::of_gguf(&metadata, files)?;
        Ok(Self::with_tensors(Tensors::new(plan, metadata, marks)))
    }

    /// A loader of a model in safetensors files, given the headers of all in the order in which they will be pushed (any order),
    /// and the hyper-parameters ([`crate::config::from_json`]).
    ///
    /// # Errors
    /// `bad_model` where a tensor is missing, in two files, or of a wrong shape; `unsupported_model` for a tensor without a
    /// place in Qwen2; `too_large`.
    pub fn from_safetensors(
        config: Config,
        headers: Vec<safetensors::Header>,
        quantize: Quantize,
    ) -> Result<Self> {
        let (files, marks) = headers.into_iter().map(|header| (header.tensors, header.mark)).unzip();
        let plan = Plan::of_safetensors(config, files, quantize)?;
        Ok(Self::with_tensors(Tensors::new(plan, Metadata::default(), marks)))
    }

    fn with_tensors(tensors: Tensors) -> Self {
        Self { state: State::Tensors(Box::new(tensors)), position: 0 }
    }

    /// Takes the next bytes of the present file.
    ///
    /// # Errors
    /// Whatever is wrong with header or tensors; the loader is useless afterwards.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let result = self.push_inner(bytes);
        if result.is_err() {
            self.state = State::Failed;
        }
        result
    }

    fn push_inner(&mut self, bytes: &[u8]) -> Result<()> {
        self.position += bytes.len() as u64;
        match &mut self.state {
            State::Failed => Err(Error::bad_model("loading failed earlier")),
            State::Tensors(tensors) => tensors.push(bytes),
            State::Header(reader) => {
                if let Some(header) = reader.push(bytes)? {
                    let (rest, from) = (reader.unused().to_vec(), reader.unused_offset());
                    gguf::shard_order(&[gguf::Split::of(&header.metadata)?])?;
                    let plan = Plan::of_gguf(&header.metadata, vec![header.tensors])?;
                    let mut tensors = Tensors::new(plan, header.metadata, Vec::new());
                    tensors.position = from;
                    tensors.push(&rest)?;
                    self.state = State::Tensors(Box::new(tensors));
                }
                Ok(())
            }
        }
    }

    /// Says that the present file is at its end and the next one follows. May be said after the last file too.
    ///
    /// # Errors
    /// `bad_model` where the file ended too early; the loader is useless afterwards.
    pub fn next_file(&mut self) -> Result<()> {
        let result = match &mut self.state {
            State::Failed => Err(Error::bad_model("loading failed earlier")),
            State::Tensors(tensors) => tensors.next_file(),
            State::Header(reader) => ended_in_header(reader, self.position),
        };
        if result.is_err() {
            self.state = State::Failed;
        }
        result
    }

    /// The plan, as soon as the headers are whole.
    pub fn plan(&self) -> Option<&Plan> {
        match &self.state {
            State::Tensors(tensors) => Some(&tensors.plan),
            _ => None,
        }
    }

    /// The metadata of a GGUF model, as soon as the header is whole (none of safetensors). Large arrays may be taken out to
    /// free their memory.
    pub fn metadata(&mut self) -> Option<&mut Metadata> {
        match &mut self.state {
            State::Tensors(tensors) => Some(&mut tensors.metadata),
            _ => None,
        }
    }

    /// Bytes taken so far, of all files.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Whether every tensor of the present file is complete (what follows in it is not needed).
    pub fn file_is_complete(&self) -> bool {
        matches!(&self.state, State::Tensors(tensors) if tensors.awaited().is_none())
    }

    /// Whether every tensor is complete.
    pub fn is_complete(&self) -> bool {
        matches!(&self.state, State::Tensors(tensors) if tensors.next == tensors.plan.tensors.len())
    }

    /// The model, when the last file is at its end.
    ///
    /// # Errors
    /// `bad_model` where it ends too early, or a file is missing.
    pub fn finish(self) -> Result<(Model, Plan)> {
        match self.state {
            State::Header(reader) => {
                ended_in_header(&reader, self.position)?;
                Err(Error::bad_model("the file ends in its header"))
            }
            State::Failed => Err(Error::bad_model("loading failed earlier")),
            State::Tensors(tensors) => match tensors.plan.tensors.get(tensors.next) {
                Some(missing) => Err(tensors.ended_before(missing)),
                None => {
                    let Tensors { plan, packed, .. } = *tensors;
                    Ok((assemble(&plan, packed, None)?, plan))
                }
            },
        }
    }
}

/// What is wrong with a file that ended after `bytes` bytes, before its header was whole.
fn ended_in_header(reader: &HeaderReader, bytes: u64) -> Result<()> {
    reader.finish()?;
    Err(Error::bad_model(format!("the file ends in its header, after {bytes} bytes")))
}

impl Tensors {
    fn new(plan: Plan, metadata: Metadata, marks: Vec<TableMark>) -> Self {
        let watch = marks.first().cloned().map(Watch::new);
        Self {
            plan,
            metadata,
            marks,
            file: 0,
            position: 0,
            watch,
            next: 0,
            zeros: 0,
            intake: None,
            packed: HashMap::new(),
        }
    }

    /// The tensor of the present file that is not complete.
    fn awaited(&self) -> Option<&Placed> {
        self.plan.tensors.get(self.next).filter(|tensor| tensor.file == self.file)
    }

    /// Takes the bytes at the present position.
    fn push(&mut self, mut bytes: &[u8]) -> Result<()> {
        let files = self.plan.file_ends.len();
        if self.file == files && !bytes.is_empty() {
            return Err(Error::bad_model(format!(
                "{} files were pushed, the headers of {files} given",
                files + 1
            )));
        }
        let mut from = self.position;
        self.position += bytes.len() as u64;
        if self.watch.as_mut().is_some_and(|watch| !watch.push(bytes, from)) {
            return Err(Error::bad_model(format!(
                "file {} of {files} is another one than its header was read from: they were mixed up, or it was replaced meanwhile",
                self.file + 1
            )));
        }
        while let Some(tensor) = self.plan.tensors.get(self.next).filter(|tensor| tensor.file == self.file) {
            let info = &tensor.info;
            if from < info.offset {
                let skip = (info.offset - from).min(bytes.len() as u64);
                bytes = &bytes[skip as usize..];
                from += skip;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let intake = match &mut self.intake {
                Some(intake) => intake,
                None => self.intake.insert(Intake::of(tensor)?),
            };
            let take = (info.offset + info.bytes - from).min(bytes.len() as u64);
            intake
                .push(&bytes[..take as usize])
                .map_err(|e| e.map_message(|message| format!("tensor {}: {message}", info.name)))?;
            let zeros = bytes[..take as usize].iter().rev().take_while(|byte| **byte == 0).count() as u64;
            self.zeros = if zeros == take { self.zeros + zeros } else { zeros };
            bytes = &bytes[take as usize..];
            from += take;
            if from == info.offset + info.bytes {
                let last = from == self.plan.file_ends[self.file];
                if last && self.zeros >= MOST_ZEROS.max(info.bytes / MOST_ZEROS_OF) {
                    return Err(Error::integrity(format!(
                        "the last {} bytes of the tensors are zeros: the file was not written or sent whole",
                        self.zeros
                    )));
                }
                if let Some(intake) = self.intake.take() {
                    self.packed.insert(tensor.key.clone(), intake.finish()?);
                }
                self.next += 1;
            }
        }
        Ok(())
    }

    fn next_file(&mut self) -> Result<()> {
        if let Some(missing) = self.awaited() {
            return Err(self.ended_before(missing));
        }
        self.file = (self.file + 1).min(self.plan.file_ends.len());
        self.position = 0;
        self.watch = self.marks.get(self.file).cloned().map(Watch::new);
        Ok(())
    }

    fn ended_before(&self, missing: &Placed) -> Error {
        let files = self.plan.file_ends.len();
        let Placed { info, .. } = missing;
        if files > 1 && (missing.file != self.file || self.position == 0) {
            let no = missing.file + 1;
            return Error::bad_model(format!(
                "file {no} of {files} did not come, which has tensor {}",
                info.name
            ));
        }
        let file = match files {
            1 => "the file".to_string(),
            _ => format!("file {} of {files}", self.file + 1),
        };
        Error::bad_model(format!(
            "{file} ends after {} bytes, but tensor {} needs bytes {} to {}",
            self.position,
            info.name,
            info.offset,
            info.offset + info.bytes
        ))
    }
}

/// What the header of one file alone tells.
///
/// # Errors
/// As [`Loader::push`].
pub fn plan_of(header: gguf::Header) -> Result<(Plan, Metadata)> {
    Ok((Plan::of_gguf(&header.metadata, vec![header.tensors])?, header.metadata))
}

/// A model of matrices that are packed already, under their GGUF names, and of an embedding where that is not among them.
///
/// # Errors
/// `bad_model` where one is missing.
pub fn assemble(
    plan: &Plan,
    packed: HashMap<String, PackedMatrix>,
    embedding: Option<Embedding>,
) -> Result<Model> {
    Assembly { packed, config: &plan.config }.model(embedding)
}

impl Intake {
    fn of(tensor: &Placed) -> Result<Self> {
        let ((rows, cols), from) = (tensor.dims(), tensor.info.dtype);
        Ok(match tensor.packed == from {
            true => Intake::AsItIs(Packer::new(from, rows, cols)?),
            false => Intake::Quantized(Quantizer::new(from, tensor.packed, rows, cols)?),
        })
    }

    fn push(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Intake::AsItIs(packer) => packer.push(bytes),
            Intake::Quantized(quantizer) => quantizer.push(bytes),
        }
    }

    fn finish(self) -> Result<PackedMatrix> {
        match self {
            Intake::AsItIs(packer) => packer.finish(),
            Intake::Quantized(quantizer) => quantizer.finish(),
        }
    }
}

/// Loads a whole GGUF file that is in memory already (tests and small models).
pub fn load_bytes(bytes: &[u8]) -> Result<(Model, Metadata, Plan)> {
    let mut loader = Loader::new(Some(bytes.len() as u64));
    loader.push(bytes)?;
    let metadata = loader.metadata().map(std::mem::take).unwrap_or_default();
    let (model, plan) = loader.finish()?;
    Ok((model, metadata, plan))
}
