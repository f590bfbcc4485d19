//! A model as it lies in memory, in one file: tokenizer built, weights packed. It is derived from a model file and read
//! instead of it where it is sound; any doubt about it, and the model file is read again.
//!
//! ```text
//! 0    "QANDLEI2", layout u32, bytes of header, vocabulary and sums u32 each, bytes of the file u64,
//!      [`Sum`] of the three parts u64
//! 64   a GGUF header less the tokenizer's arrays; the vocabulary; [`Sum`] of each [`BLOCK`] of each tensor, u64
//!      then each tensor in the header's order at the next multiple of 64: matrices packed, vectors as f32
//! ```
//!
//! An embedding that is not the head too is not read with the rest: its rows come when a prompt has their ids, and all of it
//! while the model answers or idles.

mod ahead;

use crate::engine::{Engine, TextSide};
use crate::error::{Error, Result};
use crate::gguf::{HeaderReader, TensorInfo};
use crate::kernels::{DType, PackedMatrix, Unfilled, LAYOUT};
use crate::model::{Blocks, Embedding, Linear, MaybeSend, Model};
use crate::sum::{hex, Sum};
use crate::weights::{assemble, dims, plan_of, Plan, TOKEN_EMBD};
use ahead::Ahead;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::Range;

const MAGIC: &[u8; 8] = b"QANDLEI2";
/// Tensors begin at multiples of this.
const ALIGN: u64 = 64;
/// Bytes that are read and summed at a time.
const BLOCK: usize = 512 << 10;
/// Bytes that are written at a time, whole blocks: some 20 ms, for which a question may have to wait.
const STEP: usize = 16 * BLOCK;
/// Header and vocabulary of a real model take some 5 MB; a length beyond this is damage.
const MAX_HEAD: usize = 256 << 20;

/// Where an image is written.
pub trait Sink {
    /// Writes all bytes at a position.
    ///
    /// # Errors
    /// `out_of_memory` where there is no room.
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()>;
}

/// Where an image is read.
pub trait Source {
    /// Fills `room` from a position, and gives it back as bytes.
    ///
    /// # Errors
    /// `integrity` where there are not as many.
    fn get<'a>(&mut self, at: u64, room: &'a mut [MaybeUninit<u8>]) -> Result<&'a [u8]>;
}

/// Writes an image in steps, while the model answers in between.
pub struct Writer {
    walk: Walk,
    places: Places,
    head: Vec<u8>,
}

/// A way through all tensors of a model, which sums their blocks.
struct Walk {
    tensors: Vec<TensorInfo>,
    sums: Vec<u64>,
    /// The next tensor, and how much of it was passed.
    next: usize,
    at: usize,
}

impl Walk {
    fn new(tensors: Vec<TensorInfo>) -> Self {
        Self { tensors, sums: Vec::new(), next: 0, at: 0 }
    }

    /// Gives the next piece of at most [`STEP`] bytes to `take`, with its tensor's number and its place there; `false`: there
    /// is none.
    fn step(
        &mut self,
        engine: &Engine,
        take: impl FnOnce(usize, usize, &[u8]) -> Result<()>,
    ) -> Result<bool> {
        let Some(info) = self.tensors.get(self.next) else { return Ok(false) };
        let bytes = tensor(engine.model(), &info.name)
            .filter(|bytes| stored_bytes(info).is_ok_and(|n| n == bytes.len()))
            .ok_or_else(|| Error::bad_model(format!("tensor {} is not the plan's", info.name)))?;
        let piece = &bytes[self.at..bytes.len().min(self.at + STEP)];
        take(self.next, self.at, piece)?;
        self.sums.extend(piece.chunks(BLOCK).map(Sum::of));
        self.at += piece.len();
        if self.at == bytes.len() {
            self.next += 1;
            self.at = 0;
        }
        Ok(true)
    }
}

/// Reads an image in steps.
pub struct Reader {
    plan: Plan,
    text: TextSide,
    tensors: Vec<TensorInfo>,
    places: Places,
    sums: Vec<u64>,
    /// The tensors that are read now, and how many of them are.
    now: Vec<usize>,
    next: usize,
    packed: HashMap<String, PackedMatrix>,
    /// Declared before the memory that it touches: it is dropped first.
    ahead: Option<Ahead>,
    /// Memory of the tensors that are not read yet, the last one's first.
    unfilled: Vec<Unfilled>,
    /// The tensor that is read later, and its memory.
    later: Option<(usize, Unfilled)>,
}

/// A tensor that is read later, block by block.
struct Later<S> {
    source: S,
    name: String,
    start: u64,
    sums: Vec<u64>,
}

/// What a model is known by beside what is computed with it: header and all weights, whatever they were read from.
pub struct Identity(Walk);

impl Identity {
    /// Of an engine whose model came from no image.
    pub fn new(engine: &Engine) -> Self {
        Self(Walk::new(engine.plan().packed_tensors()))
    }

    /// Looks at the next [`STEP`] bytes at most; at last the identity.
    ///
    /// # Errors
    /// `bad_model` where the engine has another model by now.
    pub fn step(&mut self, engine: &Engine) -> Result<Option<String>> {
        let more = self.0.step(engine, |_, _, _| Ok(()))?;
        Ok((!more).then(|| identity(engine.text_side().stored_header(), &self.0.sums)))
    }
}

fn identity(header: &[u8], sums: &[u64]) -> String {
    let mut hash = Sha256::new();
    hash.update(header);
    sums.iter().for_each(|sum| hash.update(sum.to_le_bytes()));
    hex(&hash.finalize()[..16])
}

/// Where the tensors are, and which sums are theirs.
struct Places {
    starts: Vec<u64>,
    end: u64,
    sums: Vec<Range<usize>>,
}

impl Writer {
    /// Begins an image of an engine's model.
    ///
    /// # Errors
    /// As [`PackedMatrix::packed_bytes`].
    pub fn new(engine: &Engine) -> Result<Self> {
        let (plan, text) = (engine.plan(), engine.text_side());
        let (header, vocabulary) = (text.stored_header(), text.stored_tokenizer());
        let tensors = plan.packed_tensors();
        let sums = 8 * blocks_of(&tensors)?;
        let places = Places::new(&tensors, 64 + (header.len() + vocabulary.len() + sums) as u64)?;
        let mut head = MAGIC.to_vec();
        for n in [LAYOUT, header.len() as u32, vocabulary.len() as u32, sums as u32] {
            head.extend(n.to_le_bytes());
        }
        head.extend(places.end.to_le_bytes());
        head.resize(64, 0);
        head.extend(header);
        head.extend(vocabulary);
        Ok(Self { walk: Walk::new(tensors), places, head })
    }

    /// Bytes of the whole image.
    pub fn bytes(&self) -> u64 {
        self.places.end
    }

    /// Writes the next piece of at most [`STEP`] bytes, at last the head, without which it is no image. `true`: that was all.
    ///
    /// # Errors
    /// What the sink gives; `bad_model` where the engine has another model by now.
    pub fn step(&mut self, engine: &Engine, sink: &mut impl Sink) -> Result<bool> {
        let starts = &self.places.starts;
        if self.walk.step(engine, |i, at, piece| sink.put(starts[i] + at as u64, piece))? {
            return Ok(false);
        }
        self.head.extend(self.walk.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        let sum = Sum::of(&self.head[64..]);
        self.head[32..40].copy_from_slice(&sum.to_le_bytes());
        sink.put(0, &self.head)?;
        Ok(true)
    }
}

impl Reader {
    /// Reads the head.
    ///
    /// # Errors
    /// `integrity` for what is no image of this layout, or a damaged one.
    pub fn open(source: &mut impl Source) -> Result<Self> {
        let other = |what: &str| Error::integrity(format!("the image {what}"));
        let mut first = [MaybeUninit::uninit(); 64];
        let first = source.get(0, &mut first)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| first[at + i]));
        let long = |at: usize| u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| first[at + i]));
        if !first.starts_with(MAGIC) || word(8) != LAYOUT {
            return Err(other("is none, or of another version"));
        }
        let [header, vocabulary, sums] = [12, 16, 20].map(|at| word(at) as usize);
        let parts = header.saturating_add(vocabulary).saturating_add(sums);
        if parts > MAX_HEAD {
            return Err(other("has a damaged head"));
        }
        let mut head = Vec::new();
        head.try_reserve_exact(parts)
            .map_err(|_| Error::out_of_memory(format!("{parts} bytes for the head")))?;
        head.resize(parts, MaybeUninit::uninit());
        let head = source.get(64, &mut head)?;
        if Sum::of(head) != long(32) {
            return Err(other("has a damaged head"));
        }
        let (header, rest) = head.split_at(header);
        let (vocabulary, sums) = rest.split_at(vocabulary);
        let mut reader = HeaderReader::new(None);
        // What follows the header is padding, up to which the reader waits.
        let whole = match reader.push(header)? {
            Some(whole) => Some(whole),
            None => reader.push(&[0; 1 << 10])?,
        };
        let (plan, metadata) = plan_of(whole.ok_or_else(|| other("has a damaged header"))?)?;
        let mut text = TextSide::restore(&metadata, &plan, vocabulary)?;
        let tensors = plan.packed_tensors();
        let places = Places::new(&tensors, 64 + parts as u64)?;
        let (sums, rest) = sums.as_chunks();
        if sums.len() != blocks_of(&tensors)? || !rest.is_empty() || places.end != long(24) {
            return Err(other("has a damaged head"));
        }
        let sums: Vec<u64> = sums.iter().map(|sum| u64::from_le_bytes(*sum)).collect();
        text.set_identity(identity(text.stored_header(), &sums));
        let waits = |i: &usize| tensors[*i].name == TOKEN_EMBD && !plan.config.tie_word_embeddings;
        let now = (0..tensors.len()).filter(|i| !waits(i)).collect();
        Ok(Self {
            plan,
            text,
            tensors,
            places,
            sums,
            now,
            next: 0,
            packed: HashMap::new(),
            ahead: None,
            unfilled: Vec::new(),
            later: None,
        })
    }

    /// What is being read.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of the whole image, and how far it is read.
    pub fn progress(&self) -> (u64, u64) {
        let at = self.now.get(self.next).map_or(self.places.end, |i| self.places.starts[*i]);
        (at, self.places.end)
    }

    /// Reads the next tensor of those that are read at once. `false`: there is none.
    ///
    /// # Errors
    /// `integrity` where it is damaged, `out_of_memory`.
    pub fn step(&mut self, source: &mut impl Source) -> Result<bool> {
        if self.ahead.is_none() {
            self.begin()?;
        }
        let Some(&i) = self.now.get(self.next) else { return Ok(false) };
        let (Some(ahead), Some(mut unfilled)) = (&self.ahead, self.unfilled.pop()) else {
            return Err(Error::integrity("the image was given up"));
        };
        ahead.reach(self.next);
        let (name, start) = (&self.tensors[i].name, self.places.starts[i]);
        for (block, sum) in self.sums[self.places.sums[i].clone()].iter().enumerate() {
            read_block(source, start, *sum, &mut unfilled, block, name)?;
        }
        let matrix = unfilled.take().ok_or_else(|| damaged(name))?;
        self.packed.insert(name.clone(), matrix);
        self.next += 1;
        Ok(true)
    }

    /// Takes the memory of all tensors, and lets it be touched.
    fn begin(&mut self) -> Result<()> {
        let memory = |i: usize| {
            let (rows, cols) = dims(&self.tensors[i]);
            Unfilled::new(stored_type(&self.tensors[i]), rows, cols, BLOCK)
        };
        self.unfilled = self.now.iter().rev().map(|i| memory(*i)).collect::<Result<_>>()?;
        let later = (0..self.tensors.len()).find(|i| !self.now.contains(i));
        self.later = later.map(|i| memory(i).map(|memory| (i, memory))).transpose()?;
        let places = self.unfilled.iter_mut().rev().map(Unfilled::addresses).collect();
        // SAFETY: they are allocated as long as `unfilled` has them, which is dropped after `ahead`, and after that by the
        // matrices, which are given out when `ahead` is gone (`finish`) or dropped after it; each is filled after `reach`.
        self.ahead = Some(unsafe { Ahead::begin(places) });
        Ok(())
    }

    /// The model, when all is read that is read at once; the rest comes from `source` later.
    ///
    /// # Errors
    /// `bad_model` before that.
    pub fn finish(mut self, source: impl Source + MaybeSend + 'static) -> Result<(Model, Plan, TextSide)> {
        self.ahead = None;
        let embedding = self.later.map(|(i, table)| {
            let sums = self.sums[self.places.sums[i].clone()].to_vec();
            let (name, start) = (self.tensors[i].name.clone(), self.places.starts[i]);
            Embedding::coming(table, Box::new(Later { source, name, start, sums }))
        });
        Ok((assemble(&self.plan, self.packed, embedding)?, self.plan, self.text))
    }
}

impl<S: Source + MaybeSend> Blocks for Later<S> {
    fn fill(&mut self, table: &mut Unfilled, block: usize) -> Result<()> {
        read_block(&mut self.source, self.start, self.sums[block], table, block, &self.name)
    }
}

/// Reads a block of a tensor that begins at `start`, and holds it against its sum.
fn read_block(
    source: &mut impl Source,
    start: u64,
    sum: u64,
    tensor: &mut Unfilled,
    block: usize,
    name: &str,
) -> Result<()> {
    tensor.fill(block, |at, room| {
        let bytes = source.get(start + at as u64, room)?;
        if Sum::of(bytes) != sum {
            return Err(damaged(name));
        }
        Ok(bytes)
    })
}

fn damaged(name: &str) -> Error {
    Error::integrity(format!("the image of tensor {name} is damaged"))
}

impl Places {
    fn new(tensors: &[TensorInfo], head: u64) -> Result<Self> {
        let (mut starts, mut end, mut sums) = (Vec::new(), head, Vec::new());
        for info in tensors {
            let start = end.next_multiple_of(ALIGN);
            let (bytes, first) = (stored_bytes(info)?, sums.last().map_or(0, |sums: &Range<usize>| sums.end));
            starts.push(start);
            sums.push(first..first + bytes.div_ceil(BLOCK));
            end = start + bytes as u64;
        }
        Ok(Self { starts, end, sums })
    }
}

/// Number of the blocks of all tensors.
fn blocks_of(tensors: &[TensorInfo]) -> Result<usize> {
    tensors.iter().map(|info| Ok(stored_bytes(info)?.div_ceil(BLOCK))).sum()
}

/// Vectors are f32 in a model, whatever the file has.
fn stored_type(info: &TensorInfo) -> DType {
    if info.shape.len() == 1 {
        DType::F32
    } else {
        info.dtype
    }
}

fn stored_bytes(info: &TensorInfo) -> Result<usize> {
    let (rows, cols) = dims(info);
    PackedMatrix::packed_bytes(stored_type(info), rows, cols)
}

/// The bytes of a tensor by its name in a GGUF file.
fn tensor<'a>(model: &'a Model, name: &str) -> Option<Cow<'a, [u8]>> {
    let matrix = |linear: &'a Linear, i: usize| Some(Cow::Borrowed(linear.parts().get(i)?.0.data()));
    let bias = |linear: &'a Linear, i: usize| vector(linear.parts().get(i)?.1.as_deref()?);
    match name {
        TOKEN_EMBD => return Some(Cow::Borrowed(model.embed_tokens.matrix()?.data())),
        "output.weight" => return matrix(&model.lm_head, 0),
        "output_norm.weight" => return vector(&model.norm.weight),
        _ => {}
    }
    let (i, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer = model.layers.get(i.parse::<usize>().ok()?)?;
    let (attention, mlp) = (&layer.self_attn, &layer.mlp);
    match part {
        "attn_norm.weight" => vector(&layer.input_layernorm.weight),
        "attn_q.weight" => matrix(&attention.qkv_proj, 0),
        "attn_q.bias" => bias(&attention.qkv_proj, 0),
        "attn_k.weight" => matrix(&attention.qkv_proj, 1),
        "attn_k.bias" => bias(&attention.qkv_proj, 1),
        "attn_v.weight" => matrix(&attention.qkv_proj, 2),
        "attn_v.bias" => bias(&attention.qkv_proj, 2),
        "attn_output.weight" => matrix(&attention.o_proj, 0),
        "ffn_norm.weight" => vector(&layer.post_attention_layernorm.weight),
        "ffn_gate.weight" => matrix(&mlp.gate_up_proj, 0),
        "ffn_up.weight" => matrix(&mlp.gate_up_proj, 1),
        "ffn_down.weight" => matrix(&mlp.down_proj, 0),
        _ => None,
    }
}

/// A vector as a packed f32 matrix of one row.
fn vector(values: &[f32]) -> Option<Cow<'static, [u8]>> {
    let mut packer = crate::kernels::Packer::new(DType::F32, 1, values.len()).ok()?;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    packer.push(&bytes).ok()?;
    Some(Cow::Owned(packer.finish().ok()?.data().to_vec()))
}
