//! The kernels' speed by type and by shape, measured inside a browser by `kernels.mjs`. Exports functions that run one
//! kernel for a while and return its rate; the figures are GOP/s (2·m·k·n) and GB/s of packed weights.

#![allow(missing_docs)]

#[cfg(target_arch = "wasm32")]
mod measure {
    use qandle::kernels::{attention::Attention, matmul, Activations, DType, Job, Needs, PackedMatrix};
    use qandle::kv_cache::{KvCache, KvKind, KvShape};
    use wasm_bindgen::prelude::*;
    use web_time::Instant;

    /// Calls `work` until `ms` have passed, at least twice, and returns ms a call of the fastest third.
    fn ms_of(ms: f64, mut work: impl FnMut()) -> f64 {
        work();
        let begun = Instant::now();
        let mut times = Vec::new();
        while begun.elapsed().as_secs_f64() * 1e3 < ms || times.len() < 3 {
            let start = Instant::now();
            work();
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        let best = &times[..times.len().div_ceil(3)];
        best.iter().sum::<f64>() / best.len() as f64
    }

    #[wasm_bindgen]
    pub fn types() -> Vec<String> {
        DType::ALL.iter().map(|dtype| dtype.name().to_owned()).collect()
    }

    /// [GOP/s, GB/s of packed weights, bytes a weight] of a product with `t` activation rows of `k` values and `mb` MB of
    /// weights.
    #[wasm_bindgen]
    pub fn product(dtype: &str, t: usize, k: usize, mb: f64, ms: f64) -> Vec<f64> {
        let Some(dtype) = DType::ALL.into_iter().find(|each| each.name() == dtype) else {
            wasm_bindgen::throw_str(&format!("no type {dtype}"))
        };
        let row = PackedMatrix::packed_bytes(dtype, 4, k).unwrap_throw() / 4;
        let rows = ((mb * 1e6) as usize / row).next_multiple_of(4);
        // Bytes that are a sound number in every format.
        let fill = |data: &mut [u8]| {
            data.fill(0x3c);
            Ok(())
        };
        let w = PackedMatrix::from_packed(dtype, rows, k, fill).unwrap_throw();
        let xs: Vec<f32> = (0..t * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
        let mut out = vec![0.0; t * rows];
        let each = ms_of(ms, || {
            matmul(
                &[Job { w: &w, bias: None, at: 0, add: false }],
                &Activations::new(&xs, t, k, Needs::of([dtype])),
                &mut out,
                rows,
            );
        });
        let (ops, bytes) = (2.0 * t as f64 * rows as f64 * k as f64, w.bytes() as f64);
        vec![ops / each / 1e6, bytes / each / 1e6, bytes / (rows * k) as f64]
    }

    /// Milliseconds to quantise `t` rows of `k` activations.
    #[wasm_bindgen]
    pub fn quantise(t: usize, k: usize, ms: f64) -> f64 {
        let xs: Vec<f32> = (0..t * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
        ms_of(ms, || drop(std::hint::black_box(Activations::new(&xs, t, k, Needs::default()))))
    }

    /// [ms, GFLOP/s] of one layer's attention for `t` queries at the end of `context` positions. A query counts what it
    /// sees: 4·D operations a head and position.
    #[wasm_bindgen]
    pub fn attention(t: usize, context: usize, heads: usize, kv_heads: usize, d: usize, ms: f64) -> Vec<f64> {
        let mut cache = KvCache::new(KvShape { layers: 1, kv_heads, head_dim: d, kind: KvKind::F16 });
        cache.reserve(context).unwrap_throw();
        for p in 0..context {
            let row: Vec<f32> =
                (0..kv_heads * d).map(|i| ((p * 7 + i * 13) % 64) as f32 / 32.0 - 1.0).collect();
            cache.write(0, p, &row, &row).unwrap_throw();
        }
        cache.commit(context);
        let width = heads * d;
        let q: Vec<f32> = (0..t * width).map(|i| ((i * 53 % 211) as f32 - 105.0) / 90.0).collect();
        let mut out = vec![0.0; t * width];
        let start = context - t;
        let each = ms_of(ms, || Attention { heads, layer: 0, start }.run(&q, width, &cache, &mut out));
        let seen: f64 = (start + 1..=context).map(|positions| positions as f64).sum();
        vec![each, 4.0 * seen * width as f64 / each / 1e6]
    }
}

fn main() {}
