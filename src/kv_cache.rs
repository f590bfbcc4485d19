//! The paged key/value cache: pages of 64 positions for all layers, outside the model, as f16, f32 or 8-bit quants.
//!
//! Pages are shared by reference count, so a fork costs nothing until one side writes (copy on write). A cache grows
//! by whole pages as positions are really used. Rows are written layer by layer and become visible with [`KvCache::commit`],
//! so a pass that is given up half-way leaves the cache as it was.
//!
//! With a window of w pages a position of page P sees the first page (the attention sinks of Xiao et al. 2023) and the pages
//! P − w to P; what lies between is dropped as soon as a position of a later page is begun. What is visible depends on
//! the position's page alone, so keys and values are the same whatever slices they were computed in.

mod budget;
mod page;

pub use budget::Budget;
pub use page::{KvKind, KvShape, Page, Plane};

use crate::error::{Error, Result};
use std::sync::Arc;

/// Positions in a page.
pub const PAGE: usize = 64;

/// Positions at the beginning that a window never drops.
const SINKS: usize = PAGE;

/// One token sequence's keys and values.
#[derive(Debug, Clone)]
pub struct KvCache {
    shape: KvShape,
    /// Pages before its own that a position sees beside the first; `None`: all.
    window: Option<usize>,
    /// The first page, and all after those that were dropped.
    pages: Vec<Arc<Page>>,
    /// Committed positions that are held.
    len: usize,
    budget: Arc<Budget>,
    /// Pages behind the first that are not held any more.
    dropped: usize,
}

/// Pages of a window of so many tokens.
pub fn window_pages(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}

impl KvCache {
    /// An empty cache.
    pub fn new(shape: KvShape) -> Self {
        assert!(shape.head_dim.is_multiple_of(4), "a head's width is a multiple of 4");
        Self { shape, window: None, pages: Vec::new(), len: 0, dropped: 0, budget: Arc::default() }
    }

    /// From now on its pages are made within a budget.
    pub fn within(mut self, budget: Arc<Budget>) -> Self {
        self.budget = budget;
        self
    }

    /// The same, whose positions see a window of so many pages; at least one.
    pub fn with_window(self, window: Option<usize>) -> Self {
        Self { window: window.map(|pages| pages.max(1)), ..self }
    }

    /// A cache of pages that were filled earlier: the first one, and those behind `dropped` others up to `position`. Where
    /// nothing can be computed behind these, only the beginning that can be gone on with is kept.
    pub(crate) fn of_pages(
        shape: KvShape,
        window: Option<usize>,
        pages: Vec<Arc<Page>>,
        dropped: usize,
        position: usize,
    ) -> Self {
        let dropped = if pages.len() < 2 { 0 } else { dropped };
        let len = position.saturating_sub(dropped * PAGE).min(pages.len() * PAGE);
        let mut cache = Self { pages, len, dropped, ..Self::new(shape).with_window(window) };
        cache.truncate(cache.position());
        cache
    }

    /// Committed positions that are held: all, or those that the window has left.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Committed positions, the dropped ones counted: the place of the next token in its text.
    pub fn position(&self) -> usize {
        self.len + self.dropped * PAGE
    }

    /// Pages behind the first that the window has dropped.
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// The pages before its own that a position sees beside the first, where there is a window.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Most tokens of the next pass: what sees other pages needs a pass of its own.
    pub fn most_tokens(&self) -> usize {
        let Some(window) = self.window else { return usize::MAX };
        let page = (self.position() / PAGE).max(window + 1);
        (page + 1) * PAGE - self.position()
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

    /// Bytes of the pages that so many positions will hold.
    pub fn planned_bytes(&self, positions: usize) -> u64 {
        let most = self.window.map_or(usize::MAX, |window| (window + 2) * PAGE);
        self.shape.bytes(positions.min(most))
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

    /// The last place up to `position` where the cache can be cut and gone on with. Behind dropped pages that is only the
    /// page that is being filled, for each earlier one would see some of them; else the end of the first page.
    pub fn cut(&self, position: usize) -> usize {
        let position = position.min(self.position());
        match self.window {
            Some(window) if self.dropped > 0 && position / PAGE <= self.dropped + window => {
                position.min(SINKS)
            }
            _ => position,
        }
    }

    /// Forgets all positions from `position` on, or from the place before it that [`KvCache::cut`] names, and the pages that
    /// held only those.
    pub fn truncate(&mut self, position: usize) {
        let position = self.cut(position);
        if position <= SINKS {
            self.dropped = 0;
        }
        self.len = position - self.dropped * PAGE;
        self.pages.truncate(self.len.div_ceil(PAGE));
    }

    /// Makes room for `tokens` more positions: new pages, and own copies of those that are shared; pages that these
    /// positions do not see are dropped. Fails without change to the committed positions.
    ///
    /// # Errors
    /// `out_of_memory`; `invalid_request` for more than [`KvCache::most_tokens`].
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        if tokens == 0 {
            return Ok(());
        }
        if tokens > self.most_tokens() {
            return Err(Error::invalid_request(format!(
                "{tokens} tokens in one pass; the window ends after {}",
                self.most_tokens()
            )));
        }
        self.leave_window();
        // A pass that was given up may have left pages behind the last committed position.
        for page in self.pages.iter_mut().skip(self.len / PAGE) {
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(page.copy()?);
            }
        }
        while self.pages.len() < (self.len + tokens).div_ceil(PAGE) {
            self.pages.push(Arc::new(Page::new(self.shape, &self.budget)?));
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

    /// Drops the pages that the next position does not see.
    fn leave_window(&mut self) {
        let Some(window) = self.window else { return };
        let unseen = (self.position() / PAGE).saturating_sub(window + 1 + self.dropped);
        if unseen == 0 {
            return;
        }
        self.pages.drain(1..1 + unseen);
        self.len -= unseen * PAGE;
        self.dropped += unseen;
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
    fn a_window_keeps_the_first_page_and_its_own_and_is_cut_only_where_it_can_go_on() {
        let mut a = KvCache::new(SHAPE).with_window(Some(2));
        let mut from = 0;
        let mut grow = |a: &mut KvCache, to: usize| {
            while from < to {
                let tokens = a.most_tokens().min(to - from);
                append(a, from, tokens);
                from += tokens;
            }
        };
        grow(&mut a, 256);
        assert_eq!((a.most_tokens(), a.dropped(), a.bytes()), (64, 0, SHAPE.bytes(256)));
        grow(&mut a, 450);
        assert_eq!((a.position(), a.len(), a.dropped(), a.most_tokens()), (450, 194, 4, 62));
        assert_eq!(a.bytes(), SHAPE.bytes(4 * PAGE));
        assert_eq!((value(&a, 63), value(&a, 64), value(&a, 193)), (63.0, 320.0, 449.0));
        // For the page before the one that is being filled a page is missing.
        for (at, cut) in [(0, 0), (30, 30), (64, 64), (65, 64), (447, 64), (448, 448), (449, 449), (900, 450)]
        {
            assert_eq!(a.cut(at), cut, "{at}");
            let mut fork = a.fork();
            fork.truncate(at);
            assert_eq!((fork.position(), fork.len() + fork.dropped() * PAGE), (cut, cut));
        }
        let mut fork = a.fork();
        fork.truncate(300);
        append(&mut fork, 1000, 1);
        assert_eq!((fork.dropped(), fork.position(), value(&fork, 64)), (0, 65, 1000.0));
        assert_eq!(value(&a, 64), 320.0);
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
