//! SwiGLU (Shazeer 2020): the gated activation of Qwen2's MLP.

use super::math::{exp, F32x4};

/// out[t][i] = silu(gate[t][i]) · up[t][i], where a row of `gate_up` is the I gates followed by the I ups.
///
/// `gate_up` is (T, 2·I), `out` (T, I), both contiguous; silu(x) = x / (1 + e^−x).
pub fn swiglu(gate_up: &[f32], cols: usize, out: &mut [f32]) {
    let one = F32x4::splat(1.0);
    let zero = F32x4::splat(0.0);
    for (row, y) in gate_up.chunks_exact(2 * cols).zip(out.chunks_exact_mut(cols)) {
        let (gate, up) = row.split_at(cols);
        let body = cols & !3;
        for ((g, up), y) in gate.chunks_exact(4).zip(up.chunks_exact(4)).zip(y.chunks_exact_mut(4)) {
            let g = F32x4::load(g);
            let silu = g.div(one.add(zero.sub(g).exp()));
            silu.mul(F32x4::load(up)).store(y);
        }
        for i in body..cols {
            y[i] = gate[i] / (1.0 + exp(0.0 - gate[i])) * up[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn swiglu_matches_f64_at_odd_widths() {
        for cols in 1..=65 {
            let row: Vec<f32> = (0..2 * cols).map(|i| ((i * 29 % 97) as f32 - 48.0) / 3.0).collect();
            let mut y = vec![0.0; cols];
            swiglu(&row, cols, &mut y);
            for i in 0..cols {
                let g = row[i] as f64;
                let want = g / (1.0 + (-g).exp()) * row[cols + i] as f64;
                assert!((y[i] as f64 - want).abs() <= want.abs() * 1e-6 + 1e-9, "{} is not {want}", y[i]);
            }
        }
    }
}
