//! Gets the kernels compiled before they are needed: browsers first compile wasm without optimising it (SIMD then runs at
//! half its speed or less), and again, in the background, what turns out to be busy.

use super::matmul::{matmul, Job};
use super::packed::PackedMatrix;
use super::{Activations, DType, Needs};
use web_time::Instant;

/// Rows and columns of the matrix that stands for a model's: whole blocks of every type.
const SIDE: usize = 256;

/// Products with as many activation rows as a token, and as a slice with a tile of each size.
const ROWS: [usize; 2] = [1, 15];

/// Keeps the matrix kernels of a type busy for `ms` milliseconds.
pub fn warm_up(dtype: DType, ms: f64) {
    // Bytes that are a sound number in every format.
    let fill = |data: &mut [u8]| {
        data.fill(0x3c);
        Ok(())
    };
    // Nothing depends on it: without memory the first answer is what warms up.
    let Ok(w) = PackedMatrix::from_packed(dtype, SIDE, SIDE, fill) else { return };
    let begun = Instant::now();
    for t in ROWS.into_iter().cycle() {
        let xs: Vec<f32> = (0..t * SIDE).map(|i| (i % 17) as f32 - 8.0).collect();
        let mut out = vec![0.0; t * SIDE];
        for _ in 0..8 {
            matmul(
                &[Job { w: &w, bias: None, at: 0, add: false }],
                &Activations::new(&xs, t, SIDE, Needs::of([dtype])),
                &mut out,
                SIDE,
            );
        }
        if begun.elapsed().as_secs_f64() * 1e3 >= ms {
            break;
        }
    }
}
