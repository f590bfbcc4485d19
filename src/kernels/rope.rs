//! Rotary position embedding (Su et al. 2021) in the half-split ("NEOX") form that Qwen2 uses.
//! The tables grow with the positions that are really reached, never to the model's full context.

use super::math::F32x4;
use super::parallel::{for_ranges, SharedOut};
use std::sync::RwLock;

/// Values that a task rotates at least: some 10 µs.
const TASK_VALUES: usize = 1 << 14;

/// How many positions are added at a time.
const STEP: usize = 256;

/// cos and sin of position · theta^(−2i/D), i < D/2.
pub struct Rope {
    half: usize,
    inverse_frequencies: Vec<f64>,
    table: RwLock<Vec<f32>>, // (positions, 2, D/2): cosines, then sines
}

impl Rope {
    /// Tables for heads of `head_dim` (even) and the base `theta`.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let inverse_frequencies =
            (0..half).map(|i| libm::pow(theta, -2.0 * i as f64 / head_dim as f64)).collect();
        Self { half, inverse_frequencies, table: RwLock::new(Vec::new()) }
    }

    /// Rotates T rows of `heads` heads in place; row t stands at `start + t` and begins at `xs[t * stride]`.
    pub fn apply(&self, xs: &mut [f32], stride: usize, heads: usize, start: usize) {
        let t = xs.len().div_ceil(stride);
        self.grow(start + t);
        let table = self.table.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let half = self.half;
        let width = heads * 2 * half;
        let len = xs.len();
        let xs = SharedOut::new(xs);
        for_ranges(t, TASK_VALUES / width.max(1) + 1, |rows| {
            for i in rows {
                let (cos, sin) = table[(start + i) * 2 * half..][..2 * half].split_at(half);
                // SAFETY: a row belongs to one task.
                let row = unsafe { xs.slice(i * stride, width.min(len - i * stride)) };
                for head in row.chunks_exact_mut(2 * half) {
                    rotate(head, cos, sin);
                }
            }
        });
    }

    fn grow(&self, positions: usize) {
        let row = 2 * self.half;
        if self.table.read().unwrap_or_else(|poisoned| poisoned.into_inner()).len() >= positions * row {
            return;
        }
        let mut table = self.table.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        let from = table.len() / row;
        let to = positions.next_multiple_of(STEP);
        table.reserve_exact((to - from) * row);
        for p in from..to {
            table.extend(self.inverse_frequencies.iter().map(|f| libm::cos(p as f64 * f) as f32));
            table.extend(self.inverse_frequencies.iter().map(|f| libm::sin(p as f64 * f) as f32));
        }
    }
}

/// (a, b) → (a·cos − b·sin, b·cos + a·sin) for the two halves of one head.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (a, b) = head.split_at_mut(half);
    let body = half & !3;
    for i in (0..body).step_by(4) {
        let (x, y) = (F32x4::load(&a[i..]), F32x4::load(&b[i..]));
        let (c, s) = (F32x4::load(&cos[i..]), F32x4::load(&sin[i..]));
        x.mul(c).sub(y.mul(s)).store(&mut a[i..]);
        y.mul(c).add(x.mul(s)).store(&mut b[i..]);
    }
    for i in body..half {
        let (x, y) = (a[i], b[i]);
        a[i] = x * cos[i] - y * sin[i];
        b[i] = y * cos[i] + x * sin[i];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
    #[cfg_attr(not(target_arch = "wasm32"), test)]
    fn rotation_keeps_lengths_and_depends_on_position_alone() {
        for head_dim in [2, 6, 10, 64] {
            let rope = Rope::new(head_dim, 1e6);
            let heads = 3;
            let x: Vec<f32> = (0..2 * heads * head_dim).map(|i| (i % 13) as f32 - 6.0).collect();
            let mut both = x.clone();
            rope.apply(&mut both, heads * head_dim, heads, 700);
            let mut second = x[heads * head_dim..].to_vec();
            rope.apply(&mut second, heads * head_dim, heads, 701);
            assert_eq!(&both[heads * head_dim..], &second[..]);
            let norm = |v: &[f32]| v.iter().map(|x| (*x as f64).powi(2)).sum::<f64>();
            assert!((norm(&x) - norm(&both)).abs() < 1e-3 * norm(&x));
            let mut origin = x.clone();
            rope.apply(&mut origin[..heads * head_dim], heads * head_dim, heads, 0);
            assert_eq!(origin, x);
        }
    }
}
