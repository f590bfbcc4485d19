//! What `tests/fixtures/make_kernels.py` wrote with the gguf package and numpy.

use qandle::kernels::DType;

pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

macro_rules! fixture {
    ($dtype:expr, $name:literal) => {
        (
            $dtype,
            include_bytes!(concat!("../fixtures/kernels/", $name, ".blocks")) as &[u8],
            include_bytes!(concat!("../fixtures/kernels/", $name, ".values")) as &[u8],
            include_bytes!(concat!("../fixtures/kernels/", $name, ".outputs")) as &[u8],
        )
    };
}

/// Type, blocks, values and outputs, from `tests/fixtures/make_kernels.py`.
pub type Fixture = (DType, &'static [u8], &'static [u8], &'static [u8]);

pub fn fixtures() -> [Fixture; 14] {
    [
        fixture!(DType::F32, "f32"),
        fixture!(DType::F16, "f16"),
        fixture!(DType::BF16, "bf16"),
        fixture!(DType::Q4_0, "q4_0"),
        fixture!(DType::Q4_1, "q4_1"),
        fixture!(DType::Q5_0, "q5_0"),
        fixture!(DType::Q5_1, "q5_1"),
        fixture!(DType::Q8_0, "q8_0"),
        fixture!(DType::Q2K, "q2_k"),
        fixture!(DType::Q3K, "q3_k"),
        fixture!(DType::Q4K, "q4_k"),
        fixture!(DType::Q5K, "q5_k"),
        fixture!(DType::Q6K, "q6_k"),
        fixture!(DType::IQ4NL, "iq4_nl"),
    ]
}

pub const FIXTURE_ROWS: usize = 5;
pub const FIXTURE_T: usize = 3;

pub fn fixture_inputs(cols: usize) -> Vec<f32> {
    f32s(match cols {
        37 => include_bytes!("../fixtures/kernels/37.inputs") as &[u8],
        96 => include_bytes!("../fixtures/kernels/96.inputs"),
        _ => include_bytes!("../fixtures/kernels/512.inputs"),
    })
}
