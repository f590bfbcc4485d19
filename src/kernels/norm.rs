//! Root-mean-square normalisation (Zhang & Sennrich 2019) over rows, as Qwen2 uses it.

use super::math::F32x4;

/// out[t][c] = x[t][c] / sqrt(mean_c(x[t]²) + eps) · weight[c] for rows of `weight.len()` columns.
///
/// `xs` and `out` are (T, C), contiguous. The sum of squares runs in four lanes over c, then across them.
pub fn rms_norm(xs: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let cols = weight.len();
    for (x, y) in xs.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
        let squares = sum_of_squares(x);
        // An overflow must show: an infinite sum would turn the row into zeros.
        let scale = if squares.is_finite() { 1.0 / (squares / cols as f32 + eps).sqrt() } else { f32::NAN };
        let wide = F32x4::splat(scale);
        let body = cols & !3;
        for ((x, w), y) in x.chunks_exact(4).zip(weight.chunks_exact(4)).zip(y.chunks_exact_mut(4)) {
            F32x4::load(x).mul(wide).mul(F32x4::load(w)).store(y);
        }
        for c in body..cols {
            y[c] = x[c] * scale * weight[c];
        }
    }
}

fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = F32x4::splat(0.0);
    let chunks = x.chunks_exact(4);
    let tail: f32 = chunks.remainder().iter().map(|v| v * v).sum();
    for c in chunks {
        let v = F32x4::load(c);
        lanes = lanes.add(v.mul(v));
    }
    lanes.sum() + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn rms_norm_matches_f64_at_odd_widths() {
        for cols in (1..=65).chain([896]) {
            let x: Vec<f32> = (0..2 * cols).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let w: Vec<f32> = (0..cols).map(|i| 0.5 + (i % 5) as f32).collect();
            let mut y = vec![0.0; x.len()];
            rms_norm(&x, &w, 1e-6, &mut y);
            for t in 0..2 {
                let row = &x[t * cols..][..cols];
                let mean = row.iter().map(|v| (*v as f64).powi(2)).sum::<f64>() / cols as f64;
                for c in 0..cols {
                    let want = row[c] as f64 / (mean + 1e-6).sqrt() * w[c] as f64;
                    assert!((y[t * cols + c] as f64 - want).abs() <= want.abs() * 1e-5 + 1e-7);
                }
            }
        }
    }
}
