//! Quantising on load against gguf-py's blocks (`tests/fixtures/make_quantized.py`), which are ggml's bit for bit.

use super::fixtures::f32s;
use qandle::kernels::quantize::{quantize_q4_0, quantize_q8_0};
use qandle::kernels::{DType, PackedMatrix, Packer, Quantizer};

const VALUES: &[u8] = include_bytes!("../fixtures/kernels/quantize.values");
const Q8_0: &[u8] = include_bytes!("../fixtures/kernels/quantize.q8_0");
const Q4_0: &[u8] = include_bytes!("../fixtures/kernels/quantize.q4_0");

fn blocks() -> Vec<[f32; 32]> {
    f32s(VALUES).chunks_exact(32).map(|block| block.try_into().unwrap()).collect()
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn blocks_have_the_bits_of_the_reference() {
    for (i, values) in blocks().iter().enumerate() {
        let (mut q8_0, mut q4_0) = ([0; 34], [0; 18]);
        quantize_q8_0(values, &mut q8_0).unwrap();
        quantize_q4_0(values, &mut q4_0).unwrap();
        assert_eq!(q8_0, Q8_0[34 * i..][..34], "block {i}: {values:?}");
        assert_eq!(q4_0, Q4_0[18 * i..][..18], "block {i}: {values:?}");
    }
}

fn quantized(from: DType, to: DType, rows: usize, cols: usize, bytes: &[u8], piece: usize) -> PackedMatrix {
    let mut quantizer = Quantizer::new(from, to, rows, cols).unwrap();
    bytes.chunks(piece).for_each(|bytes| quantizer.push(bytes).unwrap());
    quantizer.finish().unwrap()
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn a_matrix_in_any_split_and_float_type_is_packed_as_its_blocks_are() {
    // 66 blocks: the last eight are four rows that F16 and four that BF16 holds exactly.
    let cases = [(DType::F32, 0..66), (DType::F16, 58..62), (DType::BF16, 62..66)];
    for (from, range) in cases {
        let values: Vec<f32> = f32s(&VALUES[128 * range.start..128 * range.end]);
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| match from {
                DType::F32 => value.to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f32(*value).to_le_bytes().to_vec(),
                _ => half::bf16::from_f32(*value).to_le_bytes().to_vec(),
            })
            .collect();
        let (rows, cols) = (range.len() / 2, 64);
        for (to, blocks) in [(DType::Q8_0, Q8_0), (DType::Q4_0, Q4_0)] {
            let size = to.block_bytes();
            let mut packer = Packer::new(to, rows, cols).unwrap();
            packer.push(&blocks[size * range.start..size * range.end]).unwrap();
            let want = packer.finish().unwrap();
            for piece in [1, 7, 128, 1000, usize::MAX] {
                let got = quantized(from, to, rows, cols, &bytes, piece);
                assert_eq!(got.data(), want.data(), "{} as {} by {piece}", from.name(), to.name());
            }
        }
    }
}

#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn too_few_or_too_many_bytes_and_other_types_are_refused() {
    let mut short = Quantizer::new(DType::F32, DType::Q8_0, 2, 32).unwrap();
    short.push(&[0; 255]).unwrap();
    assert_eq!(short.finish().map(|_| ()).unwrap_err().code(), "bad_model");
    let mut long = Quantizer::new(DType::F32, DType::Q8_0, 2, 32).unwrap();
    assert_eq!(long.push(&[0; 384]).unwrap_err().code(), "bad_model");
    for (from, to, cols) in
        [(DType::Q8_0, DType::Q4_0, 32), (DType::F32, DType::Q4K, 256), (DType::F32, DType::Q8_0, 33)]
    {
        let refused = Quantizer::new(from, to, 2, cols).map(|_| ());
        assert_eq!(refused.unwrap_err().code(), "unsupported_quantization");
    }
}
