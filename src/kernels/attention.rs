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
            widen_columns(page.keys(self.layer, kv_head), used, &mut work.keys);
            widen(&page.values(self.layer, kv_head)[..used * d], &mut work.values);
            for (i, t) in queries.clone().enumerate() {
                let visible = (self.start + t + 1).saturating_sub(base).min(PAGE);
                if visible == 0 {
                    continue;
                }
                for g in 0..group {
                    let row = &q[t * stride + (kv_head * group + g) * d..][..d];
                    work.page(i * group + g, row, scale, visible);
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
    weights: [f32; PAGE],
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
            weights: [0.0; PAGE],
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

    /// Adds the first `visible` positions of the page to one row.
    fn page(&mut self, r: usize, q: &[f32], scale: f32, visible: usize) {
        let d = self.d;
        let scale = F32x4::splat(scale);
        for block in (0..visible).step_by(16) {
            let mut s = [F32x4::splat(0.0); 4];
            for (c, x) in q.iter().enumerate() {
                let x = F32x4::splat(*x);
                let k = &self.keys[c * PAGE + block..][..16];
                for (j, lanes) in s.iter_mut().enumerate() {
                    *lanes = lanes.add(x.mul(F32x4::load(&k[4 * j..])));
                }
            }
            for (j, lanes) in s.into_iter().enumerate() {
                lanes.mul(scale).store(&mut self.weights[block + 4 * j..]);
            }
        }
        let weights = &mut self.weights[..visible];
        let mut top = self.max[r];
        for w in weights.iter() {
            // A NaN score becomes the maximum and spreads, so that the caller sees it.
            top = if *w > top || w.is_nan() { *w } else { top };
        }
        let correction = if self.sum[r] == 0.0 { 0.0 } else { exp(self.max[r] - top) };
        self.max[r] = top;
        let mut padded = visible.next_multiple_of(4);
        self.weights[visible..padded].fill(f32::NEG_INFINITY);
        let shift = F32x4::splat(top);
        let mut sum = F32x4::splat(0.0);
        for i in (0..padded).step_by(4) {
            let e = F32x4::load(&self.weights[i..]).sub(shift).exp();
            e.store(&mut self.weights[i..]);
            if i + 4 <= visible {
                sum = sum.add(e);
            }
        }
        let mut total = sum.sum();
        padded = visible & !3;
        for w in &self.weights[padded..visible] {
            total += *w;
        }
        self.sum[r] = self.sum[r] * correction + total;
        let acc = &mut self.acc[r * d..][..d];
        let correction = F32x4::splat(correction);
        // 16 columns stay in registers while the page's positions pass.
        for c in (0..d).step_by(16) {
            let n = (d - c).min(16) / 4;
            let mut lanes = [F32x4::splat(0.0); 4];
            for j in 0..n {
                lanes[j] = F32x4::load(&acc[c + 4 * j..]).mul(correction);
            }
            for (i, w) in self.weights[..visible].iter().enumerate() {
                let w = F32x4::splat(*w);
                let v = &self.values[i * d + c..];
                for j in 0..n {
                    lanes[j] = lanes[j].add(w.mul(F32x4::load(&v[4 * j..])));
                }
            }
            for j in 0..n {
                lanes[j].store(&mut acc[c + 4 * j..]);
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

fn widen(bits: &[u16], out: &mut [f32]) {
    for (b, o) in bits.chunks_exact(4).zip(out.chunks_exact_mut(4)) {
        F32x4::load_f16(b).store(o);
    }
}

/// Widens the first `used` positions (rounded up to 16) of keys laid as (D, 64).
fn widen_columns(bits: &[u16], used: usize, out: &mut [f32]) {
    let used = used.next_multiple_of(16);
    for (b, o) in bits.chunks_exact(PAGE).zip(out.chunks_exact_mut(PAGE)) {
        widen(&b[..used], &mut o[..used]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::KvShape;

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
        for (heads, kv_heads, d, positions) in
            [(6, 2, 8, 131), (4, 4, 12, 64), (14, 2, 64, 65), (2, 1, 20, 1)]
        {
            let shape = KvShape { layers: 1, kv_heads, head_dim: d };
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
        let read = |bits: u16| half::f16::from_bits(bits).to_f64();
        let scores: Vec<f64> = (0..=t)
            .map(|p| {
                let keys = cache.pages()[p / PAGE].keys(0, kv_head);
                (0..d).map(|c| q[c] as f64 * read(keys[c * PAGE + p % PAGE])).sum::<f64>() / (d as f64).sqrt()
            })
            .collect();
        let top = scores.iter().cloned().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        for (c, got) in got.iter().enumerate() {
            let want: f64 = (0..=t)
                .map(|p| {
                    (scores[p] - top).exp() / sum
                        * read(cache.pages()[p / PAGE].values(0, kv_head)[p % PAGE * d + c])
                })
                .sum();
            assert!((*got as f64 - want).abs() < 1e-5, "{got} is not {want}");
        }
    }

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn a_nan_query_gives_nan_and_not_a_number_that_looks_right() {
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 8 };
        let cache = filled(shape, 70, 3);
        let mut out = vec![0.0; 8];
        Attention { heads: 1, layer: 0, start: 69 }.run(&[f32::NAN; 8], 8, &cache, &mut out);
        assert!(out.iter().all(|x| x.is_nan()));
    }
}
