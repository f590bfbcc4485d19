//! Causal grouped-query attention over the paged KV cache, one page after another (online softmax, Milakov &
//! Gimelshein 2018). The score matrix is never made, and a page is widened once for all query heads of its group.
//!
//! A query's sums depend only on its own row, its position and the pages, so the result is the same bits whatever the
//! slice, the batch or the thread count.

use super::math::{exp, F32x4};
use super::parallel::{for_ranges, threads, SharedOut};
use crate::kv_cache::{KvCache, PAGE};

/// Query positions that share one widened page.
const TILE: usize = 16;

/// Rows whose sums are made together, so that each part of a page is loaded once for all of them.
const TOGETHER: usize = 2;

/// What one call attends with.
#[derive(Clone, Copy)]
pub struct Attention {
    /// Query heads, `H`.
    pub heads: usize,
    /// Layer of the cache.
    pub layer: usize,
    /// Position of the first query; the cache holds the keys of all T queries already.
    pub start: usize,
}

impl Attention {
    /// out (T, H·D) = softmax(q·kᵀ / √D) · v for T query rows; row t begins at `q[t * stride]`, already rotated.
    ///
    /// `D` must be a multiple of 4.
    pub fn run(&self, q: &[f32], stride: usize, cache: &KvCache, out: &mut [f32]) {
        let shape = cache.shape();
        let width = self.heads * shape.head_dim;
        let t = out.len() / width;
        // Small slices on several threads are cut finer, so that each thread has a share.
        let tile = if t >= TILE * threads() { TILE } else { t.div_ceil(threads()).clamp(1, TILE) };
        let tiles = t.div_ceil(tile);
        let out = SharedOut::new(out);
        for_ranges(shape.kv_heads * tiles, 1, |units| {
            let mut work = Work::new(self.heads / shape.kv_heads * tile, shape.head_dim);
            for unit in units {
                let (head, from) = (unit / tiles, unit % tiles * tile);
                self.tile(q, stride, cache, head, from..t.min(from + tile), &mut work, &out);
            }
        });
    }

    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        q: &[f32],
        stride: usize,
        cache: &KvCache,
        kv_head: usize,
        queries: std::ops::Range<usize>,
        work: &mut Work,
        out: &SharedOut,
    ) {
        let d = cache.shape().head_dim;
        let group = self.heads / cache.shape().kv_heads;
        let scale = 1.0 / (d as f32).sqrt();
        work.reset();
        let last = self.start + queries.end; // positions that the last query sees
        for (p, page) in cache.pages().iter().enumerate().take(last.div_ceil(PAGE)) {
            let base = p * PAGE;
            let used = PAGE.min(last - base);
            page.keys(self.layer, kv_head).widen_keys(used, &mut work.keys);
            page.values(self.layer, kv_head).widen_values(used, d, &mut work.values);
            for (i, t) in queries.clone().enumerate() {
                let visible = (self.start + t + 1).saturating_sub(base).min(PAGE);
                if visible == 0 {
                    continue;
                }
                let row = |g: usize| &q[t * stride + (kv_head * group + g) * d..][..d];
                let mut g = 0;
                while g + TOGETHER <= group {
                    work.page(i * group + g, [row(g), row(g + 1)], scale, visible);
                    g += TOGETHER;
                }
                if g < group {
                    work.page(i * group + g, [row(g)], scale, visible);
                }
            }
        }
        for (i, t) in queries.enumerate() {
            for g in 0..group {
                let at = t * self.heads * d + (kv_head * group + g) * d;
                // SAFETY: each (query, head) belongs to exactly one unit, so no two tasks write the same range.
                work.write(i * group + g, unsafe { out.slice(at, d) });
            }
        }
    }
}

/// Scratch of one task: the widened page and each row's running maximum, sum and weighted values.
struct Work {
    d: usize,
    keys: Vec<f32>,   // (D, 64)
    values: Vec<f32>, // (64, D)
    weights: [[f32; PAGE]; TOGETHER],
    max: Vec<f32>, // (rows)
    sum: Vec<f32>, // (rows)
    acc: Vec<f32>, // (rows, D)
}

impl Work {
    fn new(rows: usize, d: usize) -> Self {
        Self {
            d,
            keys: vec![0.0; d * PAGE],
            values: vec![0.0; PAGE * d],
            weights: [[0.0; PAGE]; TOGETHER],
            max: vec![0.0; rows],
            sum: vec![0.0; rows],
            acc: vec![0.0; rows * d],
        }
    }

    fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Adds the first `visible` positions of the page to rows `first..first + R`, whose queries are `q`. The rows' sums
    /// are independent; together they read the page once.
    fn page<const R: usize>(&mut self, first: usize, q: [&[f32]; R], scale: f32, visible: usize) {
        self.scores(q, scale, visible);
        let mut correction = [F32x4::splat(0.0); R];
        for (r, correction) in correction.iter_mut().enumerate() {
            *correction = F32x4::splat(self.softmax(first + r, r, visible));
        }
        let mut c = 0;
        while c + 16 <= self.d {
            self.columns::<R, 4>(first, c, &correction, visible);
            c += 16;
        }
        while c < self.d {
            self.columns::<R, 1>(first, c, &correction, visible);
            c += 4;
        }
    }

    /// weights[r][p] = q[r] · key[p] · scale for the positions below `visible`, and what follows up to a multiple of 16.
    #[inline(always)]
    fn scores<const R: usize>(&mut self, q: [&[f32]; R], scale: f32, visible: usize) {
        let d = self.d;
        assert!(visible <= PAGE && self.keys.len() == d * PAGE && R <= TOGETHER);
        assert!(q.iter().all(|q| q.len() == d));
        let scale = F32x4::splat(scale);
        for block in (0..visible).step_by(16) {
            let mut s = [[F32x4::splat(0.0); 4]; R];
            for c in 0..d {
                // SAFETY: c < d and block + 16 <= PAGE, inside the keys (asserted).
                let k = unsafe {
                    let k = self.keys.as_ptr().add(c * PAGE + block);
                    [0, 4, 8, 12].map(|j| F32x4::read(k.add(j)))
                };
                for (s, q) in s.iter_mut().zip(&q) {
                    // SAFETY: c < d, the length of q (asserted).
                    let x = F32x4::splat(unsafe { *q.get_unchecked(c) });
                    for (s, k) in s.iter_mut().zip(k) {
                        *s = s.add(x.mul(k));
                    }
                }
            }
            for (s, weights) in s.iter().zip(&mut self.weights) {
                for (s, weights) in s.iter().zip(weights[block..block + 16].chunks_exact_mut(4)) {
                    s.mul(scale).store(weights);
                }
            }
        }
    }

    /// Turns row `r`'s scores in `weights[at]` into e^(score − maximum); returns what its sums so far are worth now.
    #[inline(always)]
    fn softmax(&mut self, r: usize, at: usize, visible: usize) -> f32 {
        let weights = &mut self.weights[at];
        let padded = visible.next_multiple_of(4);
        let pad = |weights: &mut [f32; PAGE], with: f32| {
            // One by one: a fill of a length that is not known takes wasm long.
            (visible..padded).for_each(|p| weights[std::hint::black_box(p)] = with);
        };
        pad(weights, f32::NEG_INFINITY);
        let mut top = F32x4::splat(self.max[r]);
        for w in weights[..padded].chunks_exact(4) {
            top = top.max(F32x4::load(w));
        }
        let top = top.to_array().into_iter().fold(f32::NEG_INFINITY, |a, b| if a < b { b } else { a });
        let correction = if self.sum[r] == 0.0 { 0.0 } else { exp(self.max[r] - top) };
        self.max[r] = top;
        let shift = F32x4::splat(top);
        // A NaN score, whatever the maximum made of it, gives a NaN here.
        for w in weights[..padded].chunks_exact_mut(4) {
            F32x4::load(w).sub(shift).exp().store(w);
        }
        pad(weights, 0.0);
        let mut sum = F32x4::splat(0.0);
        for w in weights[..padded].chunks_exact(4) {
            sum = sum.add(F32x4::load(w));
        }
        self.sum[r] = self.sum[r] * correction + sum.sum();
        correction
    }

    /// acc[r][c..c + 4·N] = acc · correction[r] + Σ weights[r][p] · value[p], position after position.
    #[inline(always)]
    fn columns<const R: usize, const N: usize>(
        &mut self,
        first: usize,
        c: usize,
        correction: &[F32x4; R],
        visible: usize,
    ) {
        let d = self.d;
        assert!(visible <= PAGE && c + 4 * N <= d && self.values.len() == PAGE * d && R <= TOGETHER);
        let rows = &mut self.acc[first * d..][..R * d];
        let mut lanes = [[F32x4::splat(0.0); N]; R];
        for r in 0..R {
            for n in 0..N {
                lanes[r][n] = F32x4::load(&rows[r * d + c + 4 * n..]).mul(correction[r]);
            }
        }
        for p in 0..visible {
            // SAFETY: p < PAGE and c + 4·N <= d, inside the values (asserted).
            let v = unsafe {
                let v = self.values.as_ptr().add(p * d + c);
                std::array::from_fn::<_, N, _>(|n| F32x4::read(v.add(4 * n)))
            };
            for (lanes, weights) in lanes.iter_mut().zip(&self.weights) {
                // SAFETY: p < PAGE (asserted).
                let w = F32x4::splat(unsafe { *weights.get_unchecked(p) });
                for (lane, v) in lanes.iter_mut().zip(v) {
                    *lane = lane.add(w.mul(v));
                }
            }
        }
        for r in 0..R {
            for n in 0..N {
                lanes[r][n].store(&mut rows[r * d + c + 4 * n..]);
            }
        }
    }

    fn write(&self, r: usize, out: &mut [f32]) {
        let inverse = 1.0 / self.sum[r];
        for (o, a) in out.iter_mut().zip(&self.acc[r * self.d..]) {
            *o = *a * inverse;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::{KvKind, KvShape};

    const KINDS: [KvKind; 3] = [KvKind::F16, KvKind::F32, KvKind::Q8];

    fn filled(shape: KvShape, positions: usize, seed: usize) -> KvCache {
        let mut cache = KvCache::new(shape);
        cache.reserve(positions).unwrap();
        let width = shape.kv_heads * shape.head_dim;
        let value = |t: usize, i: usize| ((t * 131 + i * 71 + seed * 17) % 257) as f32 / 64.0 - 2.0;
        for t in 0..positions {
            let k: Vec<f32> = (0..width).map(|i| value(t, i)).collect();
            let v: Vec<f32> = (0..width).map(|i| value(t + 7, i * 3)).collect();
            cache.write(0, t, &k, &v).unwrap();
        }
        cache.commit(positions);
        cache
    }

    fn queries(t: usize, width: usize) -> Vec<f32> {
        (0..t * width).map(|i| ((i * 53 % 211) as f32 - 105.0) / 90.0).collect()
    }

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn matches_a_naive_softmax_and_is_the_same_bits_query_by_query() {
        let shapes = [(6, 2, 8, 131), (4, 4, 12, 64), (14, 2, 64, 65), (2, 1, 20, 1), (2, 1, 40, 33)];
        for ((heads, kv_heads, d, positions), kind) in
            shapes.into_iter().flat_map(|shape| KINDS.map(|kind| (shape, kind)))
        {
            let shape = KvShape { layers: 1, kv_heads, head_dim: d, kind };
            let cache = filled(shape, positions, d);
            let width = heads * d;
            let q = queries(positions, width);
            let mut out = vec![0.0; positions * width];
            Attention { heads, layer: 0, start: 0 }.run(&q, width, &cache, &mut out);
            for t in 0..positions {
                let mut one = vec![0.0; width];
                Attention { heads, layer: 0, start: t }.run(
                    &q[t * width..][..width],
                    width,
                    &cache,
                    &mut one,
                );
                assert_eq!(one, &out[t * width..][..width], "position {t} alone differs from the whole");
                for h in 0..heads {
                    check_naive(
                        &cache,
                        &q[t * width + h * d..][..d],
                        h / (heads / kv_heads),
                        t,
                        &one[h * d..][..d],
                    );
                }
            }
        }
    }

    fn check_naive(cache: &KvCache, q: &[f32], kv_head: usize, t: usize, got: &[f32]) {
        let d = q.len();
        let widened: Vec<_> = cache
            .pages()
            .iter()
            .map(|page| {
                let (mut keys, mut values) = (vec![0.0; d * PAGE], vec![0.0; d * PAGE]);
                page.keys(0, kv_head).widen_keys(PAGE, &mut keys);
                page.values(0, kv_head).widen_values(PAGE, d, &mut values);
                (keys, values)
            })
            .collect();
        let scores: Vec<f64> = (0..=t)
            .map(|p| {
                let keys = &widened[p / PAGE].0;
                let products = (0..d).map(|c| q[c] as f64 * keys[c * PAGE + p % PAGE] as f64);
                products.sum::<f64>() / (d as f64).sqrt()
            })
            .collect();
        let top = scores.iter().cloned().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        for (c, got) in got.iter().enumerate() {
            let value = |p: usize| widened[p / PAGE].1[p % PAGE * d + c] as f64;
            let want: f64 = (0..=t).map(|p| (scores[p] - top).exp() / sum * value(p)).sum();
            assert!((*got as f64 - want).abs() < 1e-5, "{got} is not {want}");
        }
    }

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn a_nan_query_gives_nan_and_not_a_number_that_looks_right() {
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 8, kind: KvKind::F16 };
        let cache = filled(shape, 70, 3);
        let mut out = vec![0.0; 8];
        Attention { heads: 1, layer: 0, start: 69 }.run(&[f32::NAN; 8], 8, &cache, &mut out);
        assert!(out.iter().all(|x| x.is_nan()));
    }
}
