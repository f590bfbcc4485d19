//! The paged key/value cache: pages of 64 positions for all layers, f16, outside the model.
//!
//! Pages are shared by reference count, so a fork costs nothing until one side writes (copy on write). A cache grows
//! by whole pages as positions are really used. Rows are written layer by layer and become visible with [`KvCache::commit`],
//! so a pass that is given up half-way leaves the cache as it was.

use crate::error::{Error, Result};
use crate::kernels::math::F32x4;
use std::sync::Arc;

/// Positions in a page.
pub const PAGE: usize = 64;

/// The shape of one position's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers.
    pub layers: usize,
    /// Key/value heads, `Hkv`.
    pub kv_heads: usize,
    /// Width of a head, `D`.
    pub head_dim: usize,
}

impl KvShape {
    /// f16 values of one layer's keys (or values) in a page.
    fn half_len(&self) -> usize {
        self.kv_heads * self.head_dim * PAGE
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        self.layers * 2 * self.half_len() * 2
    }

    /// Bytes that `positions` need, in whole pages.
    pub fn bytes(&self, positions: usize) -> u64 {
        positions.div_ceil(PAGE) as u64 * self.page_bytes() as u64
    }
}

/// Keys as (layer, Hkv, D, 64) and values as (layer, Hkv, 64, D), f16 bits: keys lie so that a lane is a position,
/// values so that a lane is a column, and neither product needs a sum across lanes.
#[derive(Debug)]
pub struct Page {
    data: Vec<u16>,
    shape: KvShape,
}

impl Page {
    fn new(shape: KvShape) -> Result<Self> {
        let len = shape.page_bytes() / 2;
        let mut data = Vec::new();
        data.try_reserve_exact(len)
            .map_err(|_| Error::out_of_memory(format!("{} bytes for a page of the KV cache", len * 2)))?;
        data.resize(len, 0);
        Ok(Self { data, shape })
    }

    fn copy(&self) -> Result<Self> {
        let mut page = Self::new(self.shape)?;
        page.data.copy_from_slice(&self.data);
        Ok(page)
    }

    /// One head's keys, (D, 64).
    pub fn keys(&self, layer: usize, head: usize) -> &[u16] {
        let len = self.shape.head_dim * PAGE;
        &self.data[2 * layer * self.shape.half_len() + head * len..][..len]
    }

    /// One head's values, (64, D).
    pub fn values(&self, layer: usize, head: usize) -> &[u16] {
        let len = self.shape.head_dim * PAGE;
        &self.data[(2 * layer + 1) * self.shape.half_len() + head * len..][..len]
    }
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

    /// Writes the rotated keys and the values of one layer at position `len + ahead`, each (Hkv, D), as the nearest f16.
    ///
    /// # Errors
    /// `numeric` where one is infinite or NaN: what reads the pages relies on finite halves. `out_of_memory` where the
    /// room was not made by [`KvCache::reserve`].
    pub fn write(&mut self, layer: usize, ahead: usize, keys: &[f32], values: &[f32]) -> Result<()> {
        let (position, shape) = (self.len + ahead, self.shape);
        let page = self.pages.get_mut(position / PAGE).and_then(Arc::get_mut).ok_or_else(|| {
            Error::out_of_memory(format!("position {position} was not reserved in the KV cache"))
        })?;
        let at = position % PAGE;
        let half = shape.half_len();
        let (k, v) = page.data[2 * layer * half..][..2 * half].split_at_mut(half);
        let mut finite = true;
        let mut halves = |xs: &[f32; 4]| {
            let four = F32x4::load(xs);
            finite &= four.is_finite();
            four.to_f16()
        };
        for (xs, out) in keys.as_chunks().0.iter().zip(k.as_chunks_mut::<{ 4 * PAGE }>().0) {
            let four = halves(xs);
            for (c, x) in four.into_iter().enumerate() {
                out[c * PAGE + at] = x; // (Hkv, D, 64)
            }
        }
        for (head, row) in values.chunks_exact(shape.head_dim).enumerate() {
            let out = &mut v[(head * PAGE + at) * shape.head_dim..][..shape.head_dim]; // (Hkv, 64, D)
            for (xs, out) in row.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
                *out = halves(xs);
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

    const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 4 };

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
        half::f16::from_bits(cache.pages[position / PAGE].values(0, 0)[position % PAGE * 4]).to_f32()
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
