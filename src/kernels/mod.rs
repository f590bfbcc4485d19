//! The kernels: packed weight layouts, quantised matrix products, attention, norm and rope.
//!
//! Each has a scalar reference and, for wasm, `simd128` and `relaxed-simd` twins of the same name that are equal to it
//! bit for bit: integer dot products are exact and every float sum runs in one fixed order.

pub mod activation;
pub mod activations;
pub mod attention;
pub mod dtype;
pub mod math;
pub mod matmul;
pub mod norm;
pub mod packed;
pub mod parallel;
pub mod quantize;
pub mod rope;
mod warm_up;

pub use activations::{Activations, Needs};
pub use dtype::DType;
pub use matmul::{matmul, Job};
pub use packed::{PackedMatrix, Packer, Unfilled, LAYOUT};
pub use quantize::Quantizer;
pub use warm_up::warm_up;
