//! A page: 64 positions of all layers, as f16, f32 or 8-bit quants, written a head at a time and widened to f32.

use super::budget::{Budget, Share};
use super::PAGE;
use crate::error::{Error, Result};
use crate::kernels::math::F32x4;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Columns of a head that share a scale in [`KvKind::Q8`].
const BLOCK: usize = 32;

/// What keys and values are kept as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvKind {
    /// 2 bytes a value.
    #[default]
    F16,
    /// 4 bytes a value.
    F32,
    /// 1 byte a value and an f32 scale for every 32 of a head.
    Q8,
}

/// The shape of one position's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KvShape {
    /// Number of layers.
    pub layers: usize,
    /// Key/value heads, `Hkv`.
    pub kv_heads: usize,
    /// Width of a head, `D`.
    pub head_dim: usize,
    /// What the values are kept as.
    pub kind: KvKind,
}

impl KvShape {
    /// Values of one head's keys (or values) in a page.
    fn head_len(&self) -> usize {
        self.head_dim * PAGE
    }

    /// Scales of one head's keys (or values) in a page of quants.
    fn head_scales(&self) -> usize {
        self.head_dim.div_ceil(BLOCK) * PAGE
    }

    /// Keys and values of all heads and layers.
    fn planes(&self) -> usize {
        2 * self.layers * self.kv_heads
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        self.planes()
            * match self.kind {
                KvKind::F16 => 2 * self.head_len(),
                KvKind::F32 => 4 * self.head_len(),
                KvKind::Q8 => self.head_len() + 4 * self.head_scales(),
            }
    }

    /// As [`KvShape::page_bytes`], of a shape that may be absurd.
    pub(crate) fn checked_page_bytes(&self) -> Option<u64> {
        let sane = [self.layers, self.kv_heads, self.head_dim].iter().all(|n| (1..1 << 14).contains(n));
        // So that a page's bytes fit 32 bits.
        let values = 2 * self.layers as u64 * self.kv_heads as u64 * self.head_dim as u64;
        (sane && values < 1 << 22).then(|| self.page_bytes() as u64)
    }

    /// Bytes that `positions` need, in whole pages.
    pub fn bytes(&self, positions: usize) -> u64 {
        positions.div_ceil(PAGE) as u64 * self.page_bytes() as u64
    }

    /// Number of a head's keys among all planes; its layer's values follow those of all heads' keys.
    pub(super) fn keys(&self, layer: usize, head: usize) -> usize {
        2 * layer * self.kv_heads + head
    }
}

/// Keys as (layer, Hkv, D, 64) and values as (layer, Hkv, 64, D): keys lie so that a lane is a position, values so that a
/// lane is a column, and neither product needs a sum across lanes. Scales are (⌈D / 32⌉, 64), for both.
#[derive(Debug)]
pub struct Page {
    data: Data,
    shape: KvShape,
    share: Share,
}

#[derive(Debug, Clone)]
enum Data {
    F16(Vec<u16>),
    F32(Vec<f32>),
    Q8 { quants: Vec<i8>, scales: Vec<f32> },
}

/// One head's keys or values in a page.
#[derive(Debug, Clone, Copy)]
pub enum Plane<'a> {
    /// Finite halves.
    F16(&'a [u16]),
    /// Finite values.
    F32(&'a [f32]),
    /// Quants and finite scales.
    Q8(&'a [i8], &'a [f32]),
}

impl Page {
    pub(super) fn new(shape: KvShape, budget: &Arc<Budget>) -> Result<Self> {
        let bytes = shape.page_bytes() as u64;
        let share = budget.take(bytes).ok_or_else(|| {
            Error::out_of_memory(format!(
                "{bytes} bytes for a page of the KV cache, of which {} are left",
                budget.room()
            ))
        })?;
        let len = shape.planes() * shape.head_len();
        let data = match shape.kind {
            KvKind::F16 => Data::F16(zeros(len)?),
            KvKind::F32 => Data::F32(zeros(len)?),
            KvKind::Q8 => {
                Data::Q8 { quants: zeros(len)?, scales: zeros(shape.planes() * shape.head_scales())? }
            }
        };
        Ok(Self { data, shape, share })
    }

    /// All its bytes, [`KvShape::page_bytes`] of them, little-endian.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.shape.page_bytes());
        match &self.data {
            Data::F16(halves) => bytes.extend(halves.iter().flat_map(|x| x.to_le_bytes())),
            Data::F32(floats) => bytes.extend(floats.iter().flat_map(|x| x.to_le_bytes())),
            Data::Q8 { quants, scales } => {
                bytes.extend(quants.iter().map(|q| q.cast_unsigned()));
                bytes.extend(scales.iter().flat_map(|x| x.to_le_bytes()));
            }
        }
        bytes
    }

    /// A page of what [`Page::to_bytes`] gave; `None` where there are not as many, or some stand for no finite number.
    ///
    /// # Errors
    /// `out_of_memory`.
    pub(crate) fn from_bytes(shape: KvShape, bytes: &[u8], budget: &Arc<Budget>) -> Result<Option<Self>> {
        if bytes.len() != shape.page_bytes() {
            return Ok(None);
        }
        let mut page = Self::new(shape, budget)?;
        let floats = |to: &mut [f32], from: &[u8]| {
            to.iter_mut().zip(from.as_chunks().0).fold(true, |finite, (x, bytes)| {
                *x = f32::from_le_bytes(*bytes);
                finite & x.is_finite()
            })
        };
        let finite = match &mut page.data {
            Data::F16(halves) => {
                halves.iter_mut().zip(bytes.as_chunks().0).fold(true, |finite, (x, bytes)| {
                    *x = u16::from_le_bytes(*bytes);
                    finite & (*x & 0x7c00 != 0x7c00)
                })
            }
            Data::F32(all) => floats(all, bytes),
            Data::Q8 { quants, scales } => {
                let (first, rest) = bytes.split_at(quants.len());
                quants.iter_mut().zip(first).for_each(|(q, byte)| *q = byte.cast_signed());
                floats(scales, rest)
            }
        };
        Ok(finite.then_some(page))
    }

    pub(super) fn copy(&self) -> Result<Self> {
        let mut page = Self::new(self.shape, &self.share.budget)?;
        match (&mut page.data, &self.data) {
            (Data::F16(to), Data::F16(from)) => to.copy_from_slice(from),
            (Data::F32(to), Data::F32(from)) => to.copy_from_slice(from),
            (Data::Q8 { quants, scales }, Data::Q8 { quants: q, scales: s }) => {
                quants.copy_from_slice(q);
                scales.copy_from_slice(s);
            }
            _ => unreachable!("a page of the same shape"),
        }
        Ok(page)
    }

    /// One head's keys, (D, 64).
    pub fn keys(&self, layer: usize, head: usize) -> Plane<'_> {
        self.plane(self.shape.keys(layer, head))
    }

    /// One head's values, (64, D).
    pub fn values(&self, layer: usize, head: usize) -> Plane<'_> {
        self.plane(self.shape.keys(layer, head) + self.shape.kv_heads)
    }

    fn plane(&self, at: usize) -> Plane<'_> {
        let (len, n_scales) = (self.shape.head_len(), self.shape.head_scales());
        match &self.data {
            Data::F16(halves) => Plane::F16(&halves[at * len..][..len]),
            Data::F32(floats) => Plane::F32(&floats[at * len..][..len]),
            Data::Q8 { quants, scales } => {
                Plane::Q8(&quants[at * len..][..len], &scales[at * n_scales..][..n_scales])
            }
        }
    }

    /// Writes one head's vector at a position; false where a value is not finite.
    pub(super) fn write(&mut self, plane: usize, is_key: bool, position: usize, x: &[f32]) -> bool {
        let (len, n_scales) = (self.shape.head_len(), self.shape.head_scales());
        let mut finite = true;
        match &mut self.data {
            Data::F16(halves) => {
                let out = &mut halves[plane * len..][..len];
                for (c, four) in (0..).step_by(4).zip(x.as_chunks::<4>().0) {
                    let four = F32x4::load(four);
                    finite &= four.is_finite();
                    put(out, is_key, position, x.len(), c, four.to_f16());
                }
            }
            Data::F32(floats) => {
                let out = &mut floats[plane * len..][..len];
                for (c, four) in (0..).step_by(4).zip(x.as_chunks::<4>().0) {
                    finite &= F32x4::load(four).is_finite();
                    put(out, is_key, position, x.len(), c, *four);
                }
            }
            Data::Q8 { quants, scales } => {
                let out = &mut quants[plane * len..][..len];
                let scales = &mut scales[plane * n_scales..][..n_scales];
                for (b, block) in x.chunks(BLOCK).enumerate() {
                    let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
                    finite &= block.iter().all(|x| x.is_finite());
                    let scale = most / 127.0;
                    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                    scales[b * PAGE + position] = scale;
                    for (c, four) in (b * BLOCK..).step_by(4).zip(block.as_chunks::<4>().0) {
                        let quants = four.map(|x| (x * inverse).round_ties_even() as i8);
                        put(out, is_key, position, x.len(), c, quants);
                    }
                }
            }
        }
        finite
    }
}

/// Writes columns `c..c + 4` of `d` at a position of a plane.
#[inline(always)]
fn put<T: Copy>(plane: &mut [T], is_key: bool, position: usize, d: usize, c: usize, four: [T; 4]) {
    if is_key {
        let columns = &mut plane[c * PAGE..][..4 * PAGE];
        for (i, x) in four.into_iter().enumerate() {
            columns[i * PAGE + position] = x;
        }
    } else {
        plane[position * d + c..][..4].copy_from_slice(&four);
    }
}

fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>> {
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| {
        Error::out_of_memory(format!("{} bytes for a page of the KV cache", len * size_of::<T>()))
    })?;
    data.resize(len, T::default());
    Ok(data)
}

impl Plane<'_> {
    /// Widens the first `used` positions (rounded up to 16) of keys to (D, 64).
    pub fn widen_keys(&self, used: usize, out: &mut [f32]) {
        let used = used.next_multiple_of(16);
        for (c, out) in out.chunks_exact_mut(PAGE).enumerate() {
            let scales = c / BLOCK * PAGE..c / BLOCK * PAGE + used;
            self.widen(c * PAGE..c * PAGE + used, Scales::Each(scales), &mut out[..used]);
        }
    }

    /// Widens the first `used` positions of values to (64, D).
    pub fn widen_values(&self, used: usize, d: usize, out: &mut [f32]) {
        match self {
            Plane::Q8(..) => {
                for (p, out) in out.chunks_exact_mut(d).take(used).enumerate() {
                    for (b, out) in out.chunks_mut(BLOCK).enumerate() {
                        let from = p * d + b * BLOCK;
                        self.widen(from..from + out.len(), Scales::One(b * PAGE + p), out);
                    }
                }
            }
            _ => self.widen(0..used * d, Scales::One(0), &mut out[..used * d]),
        }
    }

    /// Widens the values at `at`, a multiple of four.
    #[inline(always)]
    fn widen(&self, at: Range<usize>, scales: Scales, out: &mut [f32]) {
        let out = out.as_chunks_mut::<4>().0;
        match self {
            Plane::F16(halves) => {
                for (x, out) in halves[at].as_chunks::<4>().0.iter().zip(out) {
                    F32x4::load_finite_f16(x).store(out);
                }
            }
            Plane::F32(floats) => {
                for (x, out) in floats[at].as_chunks::<4>().0.iter().zip(out) {
                    *out = *x;
                }
            }
            Plane::Q8(quants, all) => {
                let quants = quants[at].as_chunks::<4>().0;
                match scales {
                    Scales::One(i) => {
                        let scale = F32x4::splat(all[i]);
                        for (q, out) in quants.iter().zip(out) {
                            F32x4::from_i8(*q).mul(scale).store(out);
                        }
                    }
                    Scales::Each(range) => {
                        let scales = all[range].as_chunks::<4>().0;
                        for ((q, scale), out) in quants.iter().zip(scales).zip(out) {
                            F32x4::from_i8(*q).mul(F32x4::load(scale)).store(out);
                        }
                    }
                }
            }
        }
    }
}

/// Where the scales of quants stand: one for all, or one for each.
enum Scales {
    One(usize),
    Each(Range<usize>),
}
