//! The paged key/value cache: pages of 64 positions for all layers, outside the model, as f16, f32 or 8-bit quants.
//!
//! Pages are shared by reference count, so a fork costs nothing until one side writes (copy on write). A cache grows
//! by whole pages as positions are really used. Rows are written layer by layer and become visible with [`KvCache::commit`],
//! so a pass that is given up half-way leaves the cache as it was.

use crate::error::{Error, Result};
use crate::kernels::math::F32x4;
use serde::Deserialize;
use std::ops::Range;
use std::sync::Arc;

/// Positions in a page.
pub const PAGE: usize = 64;

/// Columns of a head that share a scale in [`KvKind::Q8`].
const BLOCK: usize = 32;

/// What keys and values are kept as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

    /// Bytes that `positions` need, in whole pages.
    pub fn bytes(&self, positions: usize) -> u64 {
        positions.div_ceil(PAGE) as u64 * self.page_bytes() as u64
    }

    /// Number of a head's keys among all planes; its layer's values follow those of all heads' keys.
    fn keys(&self, layer: usize, head: usize) -> usize {
        2 * layer * self.kv_heads + head
    }
}

/// Keys as (layer, Hkv, D, 64) and values as (layer, Hkv, 64, D): keys lie so that a lane is a position, values so that a
/// lane is a column, and neither product needs a sum across lanes. Scales are (⌈D / 32⌉, 64), for both.
#[derive(Debug)]
pub struct Page {
    data: Data,
    shape: KvShape,
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
    fn new(shape: KvShape) -> Result<Self> {
        let len = shape.planes() * shape.head_len();
        let data = match shape.kind {
            KvKind::F16 => Data::F16(zeros(len)?),
            KvKind::F32 => Data::F32(zeros(len)?),
            KvKind::Q8 => {
                Data::Q8 { quants: zeros(len)?, scales: zeros(shape.planes() * shape.head_scales())? }
            }
        };
        Ok(Self { data, shape })
    }

    fn copy(&self) -> Result<Self> {
        let mut page = Self::new(self.shape)?;
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
    fn write(&mut self, plane: usize, is_key: bool, position: usize, x: &[f32]) -> bool {
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

/// One token sequence's keys and values.
#[derive(Debug, Clone)]
pub struct KvCache {
    shape: KvShape,
    pages: Vec<Arc<Page>>,
    len: usize,
}

impl KvCache {
    /// An empty cache.
    pub fn new(shape: KvShape) -> Self {
        assert!(shape.head_dim.is_multiple_of(4), "a head's width is a multiple of 4");
        Self { shape, pages: Vec::new(), len: 0 }
    }

    /// Committed positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The shape of a position.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Bytes of the pages held, shared ones counted in full.
    pub fn bytes(&self) -> u64 {
        self.pages.len() as u64 * self.shape.page_bytes() as u64
    }

    /// The pages in the order of positions.
    pub fn pages(&self) -> &[Arc<Page>] {
        &self.pages
    }

    /// Whether a page is held by another cache as well.
    pub fn is_shared(&self) -> bool {
        self.pages.iter().any(|page| Arc::strong_count(page) > 1)
    }

    /// A second cache with the same positions; pages are shared until one side writes.
    pub fn fork(&self) -> Self {
        self.clone()
    }

    /// Forgets all positions from `len` on, and the pages that held only those.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(PAGE));
    }

    /// Makes room for `tokens` more positions: new pages, and own copies of those that are shared. Fails without change
    /// to the committed positions.
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        if tokens == 0 {
            return Ok(());
        }
        // A pass that was given up may have left pages behind the last committed position.
        for page in self.pages.iter_mut().skip(self.len / PAGE) {
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(page.copy()?);
            }
        }
        while self.pages.len() < (self.len + tokens).div_ceil(PAGE) {
            self.pages.push(Arc::new(Page::new(self.shape)?));
        }
        Ok(())
    }

    /// Writes the rotated keys and the values of one layer at position `len + ahead`, each (Hkv, D), rounded to the cache's
    /// kind.
    ///
    /// # Errors
    /// `numeric` where one is infinite or NaN: what reads the pages relies on finite values. `out_of_memory` where the
    /// room was not made by [`KvCache::reserve`].
    pub fn write(&mut self, layer: usize, ahead: usize, keys: &[f32], values: &[f32]) -> Result<()> {
        let (position, shape) = (self.len + ahead, self.shape);
        let page = self.pages.get_mut(position / PAGE).and_then(Arc::get_mut).ok_or_else(|| {
            Error::out_of_memory(format!("position {position} was not reserved in the KV cache"))
        })?;
        let mut finite = true;
        for (xs, is_key) in [(keys, true), (values, false)] {
            for (head, x) in xs.chunks_exact(shape.head_dim).enumerate() {
                let plane = shape.keys(layer, head) + if is_key { 0 } else { shape.kv_heads };
                finite &= page.write(plane, is_key, position % PAGE, x);
            }
        }
        if finite {
            Ok(())
        } else {
            Err(Error::numeric(format!(
                "a key or a value of layer {layer} at position {position} is not a finite number"
            )))
        }
    }

    /// Makes `tokens` written positions visible.
    pub fn commit(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 4, kind: KvKind::F16 };

    fn append(cache: &mut KvCache, from: usize, tokens: usize) {
        cache.reserve(tokens).unwrap();
        for layer in 0..2 {
            for t in 0..tokens {
                let row: Vec<f32> =
                    (0..8).map(|i| (from + t) as f32 + layer as f32 * 0.5 + i as f32 * 64.0).collect();
                cache.write(layer, t, &row, &row).unwrap();
            }
        }
        cache.commit(tokens);
    }

    fn value(cache: &KvCache, position: usize) -> f32 {
        let mut values = [0.0; 4 * PAGE];
        cache.pages[position / PAGE].values(0, 0).widen_values(PAGE, 4, &mut values);
        values[position % PAGE * 4]
    }

    #[test]
    fn a_fork_never_sees_what_the_other_side_writes() {
        let mut a = KvCache::new(SHAPE);
        append(&mut a, 0, 100);
        let mut b = a.fork();
        assert!(a.is_shared());
        append(&mut a, 500, 20);
        append(&mut b, 1000, 20);
        assert_eq!((value(&a, 99), value(&b, 99)), (99.0, 99.0));
        assert_eq!((value(&a, 100), value(&b, 100)), (500.0, 1000.0));
        assert_eq!(Arc::strong_count(&a.pages[0]), 2);
        assert_eq!(Arc::strong_count(&a.pages[1]), 1);
    }

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn what_is_read_is_what_was_written_within_its_kinds_rounding() {
        for (kind, bytes) in [(KvKind::F16, 2.0), (KvKind::F32, 4.0), (KvKind::Q8, 1.0 + 4.0 / 20.0)] {
            let shape = KvShape { layers: 2, kv_heads: 3, head_dim: 40, kind };
            let width = 3 * 40;
            assert_eq!(shape.page_bytes() as f64, bytes * (2 * 2 * width * PAGE) as f64);
            let row = |p: usize, layer: usize, salt: usize| -> Vec<f32> {
                (0..width)
                    .map(|i| ((p * 97 + i * 31 + layer * 13 + salt) % 211) as f32 / 9.0 - 11.0)
                    .collect()
            };
            let mut cache = KvCache::new(shape);
            cache.reserve(70).unwrap();
            for (p, layer) in (0..70).flat_map(|p| [(p, 0), (p, 1)]) {
                cache.write(layer, p, &row(p, layer, 5), &row(p, layer, 77)).unwrap();
            }
            cache.commit(70);
            let copy = cache.pages[1].copy().unwrap();
            for (layer, head) in (0..2).flat_map(|layer| [0, 1, 2].map(|head| (layer, head))) {
                let (mut keys, mut values) = (vec![0.0; 40 * PAGE], vec![0.0; 40 * PAGE]);
                for p in 0..70 {
                    let page = if p < PAGE { &cache.pages[0] } else { &copy };
                    page.keys(layer, head).widen_keys(PAGE, &mut keys);
                    page.values(layer, head).widen_values(PAGE, 40, &mut values);
                    let (k, v) = (row(p, layer, 5), row(p, layer, 77));
                    for c in 0..40 {
                        let within = |x: f32, got: f32| match kind {
                            KvKind::F16 => (x - got).abs() <= x.abs() / 2048.0 + 1e-7,
                            KvKind::F32 => x == got,
                            KvKind::Q8 => (x - got).abs() <= 12.5 / 254.0,
                        };
                        assert!(within(k[head * 40 + c], keys[c * PAGE + p % PAGE]), "{kind:?} key {p} {c}");
                        assert!(
                            within(v[head * 40 + c], values[p % PAGE * 40 + c]),
                            "{kind:?} value {p} {c}"
                        );
                    }
                }
            }
            let mut bad = vec![0.0; width];
            bad[33] = f32::NAN;
            cache.reserve(1).unwrap();
            assert!(matches!(cache.write(0, 0, &bad, &row(0, 0, 0)), Err(Error::Numeric(_))));
        }
    }

    #[test]
    fn truncate_frees_whole_pages_and_keeps_the_rest() {
        let mut a = KvCache::new(SHAPE);
        append(&mut a, 0, 130);
        assert_eq!(a.bytes(), 3 * SHAPE.page_bytes() as u64);
        a.truncate(64);
        assert_eq!((a.len(), a.pages.len()), (64, 1));
        a.truncate(70);
        assert_eq!(a.len(), 64);
        append(&mut a, 64, 1);
        assert_eq!(value(&a, 64), 64.0);
        a.truncate(0);
        assert!(a.is_empty() && a.bytes() == 0);
    }

    #[test]
    fn uncommitted_rows_leave_no_trace() {
        let mut a = KvCache::new(SHAPE);
        append(&mut a, 0, 10);
        a.reserve(5).unwrap();
        a.write(0, 0, &[9.0; 8], &[9.0; 8]).unwrap();
        assert_eq!(a.len(), 10);
        append(&mut a, 10, 1);
        assert_eq!(value(&a, 10), 10.0);
        assert!(a.write(0, 500, &[0.0; 8], &[0.0; 8]).is_err());
    }

    #[test]
    fn a_fork_after_a_pass_that_was_given_up_leaves_both_sides_writable() {
        let mut a = KvCache::new(SHAPE);
        append(&mut a, 0, 60);
        a.reserve(130).unwrap();
        let mut b = a.fork();
        append(&mut a, 500, 130);
        append(&mut b, 1000, 130);
        for position in [60, 100, 189] {
            assert_eq!(value(&b, position) - value(&a, position), 500.0);
        }
    }
}
