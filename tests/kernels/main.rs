//! The matrix kernels against independent definitions, and every tier, tile, split and thread count against each other.
//! The same tests run natively (the scalar reference) and on wasm with plain and with relaxed SIMD.

#![allow(clippy::unwrap_used)]

mod fixtures;
mod oracle;
mod quantize;
mod unfilled;

use fixtures::{f32s, fixture_inputs, fixtures, FIXTURE_ROWS, FIXTURE_T};
use qandle::kernels::matmul::matmul_reference;
use qandle::kernels::{matmul, Activations, DType, Job, Needs, PackedMatrix, Packer};

#[cfg(target_arch = "wasm32")]
wasm_bindgen_test::wasm_bindgen_test_configure!(run_in_browser);

/// f32 sums of some hundred terms against f64, relative to the sum of magnitudes.
const SUM_TOLERANCE: f64 = 2e-6;

/// Small deterministic random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }
    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    /// In -1..1.
    fn float(&mut self) -> f32 {
        self.next() as f32 / 2f32.powi(31) - 1.0
    }
    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
    /// Random blocks with sound scales.
    fn blocks(&mut self, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
        let n = rows * cols / dtype.block_len();
        let mut bytes = Vec::new();
        for _ in 0..n {
            let value = self.float() * 0.1;
            match dtype {
                DType::F32 => bytes.extend(value.to_le_bytes()),
                DType::BF16 => bytes.extend(&value.to_le_bytes()[2..]),
                DType::F16 => bytes.extend(self.f16()),
                _ => {
                    let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| self.next() as u8).collect();
                    for at in oracle::scale_offsets(dtype) {
                        block[*at..at + 2].copy_from_slice(&self.f16());
                    }
                    bytes.extend(block);
                }
            }
        }
        bytes
    }
    /// An f16 below 0.13, sometimes subnormal or zero, of either sign.
    fn f16(&mut self) -> [u8; 2] {
        let exponent = [0, 5, 8, 9, 10, 11][self.below(6)];
        ((self.next() & 0x83ff) as u16 | exponent << 10).to_le_bytes()
    }
}

fn pack(dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> PackedMatrix {
    let mut packer = Packer::new(dtype, rows, cols).unwrap();
    packer.push(bytes).unwrap();
    packer.finish().unwrap()
}

/// Columns to test a type with: one block, and more.
fn columns(dtype: DType) -> [usize; 2] {
    match dtype.block_len() {
        1 => [37, 96],
        n => [n, 3 * n],
    }
}

fn product(w: &PackedMatrix, bias: Option<&[f32]>, xs: &[f32], t: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; t * w.rows()];
    matmul(
        &[Job { w, bias, at: 0, add: false }],
        &Activations::new(xs, t, w.cols(), Needs::of([w.dtype()])),
        &mut out,
        w.rows(),
    );
    out
}

fn reference(w: &PackedMatrix, bias: Option<&[f32]>, xs: &[f32], t: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; t * w.rows()];
    matmul_reference(
        &[Job { w, bias, at: 0, add: false }],
        &Activations::new(xs, t, w.cols(), Needs::of([w.dtype()])),
        &mut out,
        w.rows(),
    );
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    // The sign and payload of a NaN are no one's business.
    values.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

macro_rules! tests {
    ($(fn $name:ident() $body:block)*) => {
        $(
            #[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
            #[cfg_attr(not(target_arch = "wasm32"), test)]
            fn $name() $body
        )*
    };
}

tests! {
    fn rows_equal_what_the_gguf_package_makes_of_the_blocks() {
        for (dtype, blocks, values, _) in fixtures() {
            let values = f32s(values);
            let cols = values.len() / FIXTURE_ROWS;
            let w = pack(dtype, FIXTURE_ROWS, cols, blocks);
            for (row, expected) in values.chunks_exact(cols).enumerate() {
                let mut found = vec![0.0; cols];
                w.dequantize_row(row, &mut found);
                // 0 and -0 are one real number.
                assert!(found.iter().zip(expected).all(|(a, b)| a == b), "{} row {row}", dtype.name());
            }
        }
    }

    fn products_equal_what_the_gguf_package_and_numpy_make() {
        for (dtype, blocks, values, outputs) in fixtures() {
            let values = f32s(values);
            let cols = values.len() / FIXTURE_ROWS;
            let w = pack(dtype, FIXTURE_ROWS, cols, blocks);
            let xs = fixture_inputs(cols);
            let found = product(&w, None, &xs, FIXTURE_T);
            for (i, (found, expected)) in found.iter().zip(outputs.chunks_exact(8)).enumerate() {
                let expected = f64::from_le_bytes(expected.try_into().unwrap());
                let (x, v) = (&xs[i / FIXTURE_ROWS * cols..], &values[i % FIXTURE_ROWS * cols..]);
                let magnitude: f64 = x.iter().zip(v).take(cols).map(|(x, v)| f64::from((x * v).abs())).sum();
                let off = (f64::from(*found) - expected).abs();
                assert!(off <= SUM_TOLERANCE * magnitude, "{} output {i}: {found} {expected}", dtype.name());
            }
        }
    }

    fn products_equal_the_sums_of_what_is_multiplied() {
        let mut random = Random(12);
        for dtype in DType::ALL {
            let (rows, cols, t) = (9, 19 * 256, 11);
            let bytes = random.blocks(dtype, rows, cols);
            let (w, values) = (pack(dtype, rows, cols, &bytes), oracle::dequantize(dtype, &bytes));
            // A few columns a hundred times as large as the others, as a decoder has them.
            let mut xs = random.floats(t * cols);
            xs.iter_mut().skip(37).step_by(1009).for_each(|x| *x *= 100.0);
            let rounded: Vec<f64> = match dtype.block_len() {
                1 => xs.iter().map(|x| f64::from(*x)).collect(),
                _ => xs.chunks_exact(32).flat_map(oracle::rounded).collect(),
            };
            let found = product(&w, None, &xs, t);
            for (i, found) in found.iter().enumerate() {
                let (x, v) = (&rounded[i / rows * cols..][..cols], &values[i % rows * cols..][..cols]);
                let terms = || x.iter().zip(v).map(|(x, v)| x * f64::from(*v));
                let (sum, magnitude) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                let off = (f64::from(*found) - sum).abs();
                assert!(off <= SUM_TOLERANCE * magnitude, "{} output {i}: {found} {sum}", dtype.name());
            }
        }
    }

    fn packing_keeps_every_value() {
        let mut random = Random(1);
        for dtype in DType::ALL {
            for cols in columns(dtype) {
                for rows in [1, 2, 3, 4, 5, 9] {
                    let bytes = random.blocks(dtype, rows, cols);
                    let expected = oracle::dequantize(dtype, &bytes);
                    let w = pack(dtype, rows, cols, &bytes);
                    assert_eq!((w.rows(), w.cols(), w.dtype()), (rows, cols, dtype));
                    assert_eq!(w.data().as_ptr() as usize % 16, 0);
                    for (row, expected) in expected.chunks_exact(cols).enumerate() {
                        let mut found = vec![0.0; cols];
                        w.dequantize_row(row, &mut found);
                        assert!(found.iter().zip(expected).all(|(a, b)| a == b), "{} {rows}x{cols}", dtype.name());
                    }
                }
            }
        }
    }

    fn packing_takes_any_split() {
        let mut random = Random(2);
        for dtype in DType::ALL {
            let (rows, cols) = (7, columns(dtype)[1]);
            let bytes = random.blocks(dtype, rows, cols);
            let whole = pack(dtype, rows, cols, &bytes);
            for longest in [1, 3, 50, 700] {
                let mut packer = Packer::new(dtype, rows, cols).unwrap();
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let (now, later) = rest.split_at((random.below(longest + 1)).min(rest.len()));
                    packer.push(now).unwrap();
                    rest = later;
                }
                assert!(packer.finish().unwrap().data() == whole.data(), "{} by {longest}", dtype.name());
            }
            let again = PackedMatrix::from_packed(dtype, rows, cols, |data| {
                data.copy_from_slice(whole.data());
                Ok(())
            });
            assert!(again.unwrap().data() == whole.data());
        }
    }

    fn packing_refuses_what_does_not_fit() {
        for dtype in DType::ALL {
            let (rows, cols) = (3, columns(dtype)[0]);
            let bytes = Random(3).blocks(dtype, rows, cols);
            for missing in [1, bytes.len() / 2, bytes.len()] {
                let mut packer = Packer::new(dtype, rows, cols).unwrap();
                packer.push(&bytes[..bytes.len() - missing]).unwrap();
                assert_eq!(packer.finish().err().map(|e| e.code()), Some("bad_model"), "{}", dtype.name());
            }
            for extra in [1, 300] {
                let mut packer = Packer::new(dtype, rows, cols).unwrap();
                packer.push(&bytes).unwrap();
                assert_eq!(packer.push(&vec![0; extra]).err().map(|e| e.code()), Some("bad_model"));
            }
            let code = |rows, cols| PackedMatrix::packed_bytes(dtype, rows, cols).err().map(|e| e.code());
            assert_eq!(code(0, cols), Some("bad_model"));
            assert_eq!(code(rows, 0), Some("bad_model"));
            assert_eq!(code(usize::MAX, usize::MAX / 256 * 256), Some("too_large"));
            let huge = Packer::new(dtype, 1 << 26, 1 << 22).err().map(|e| e.code());
            assert!(matches!(huge, Some("too_large" | "out_of_memory")), "{huge:?}");
            if dtype.block_len() > 1 {
                assert_eq!(code(rows, cols + 1), Some("bad_model"));
            }
        }
    }

    fn packing_costs_little_memory() {
        for dtype in DType::ALL {
            let file = 4 * 1024 / dtype.block_len() * dtype.block_bytes();
            let packed = PackedMatrix::packed_bytes(dtype, 4, 1024).unwrap();
            let most = match dtype {
                DType::Q4_1 => 1.2,
                DType::Q5_1 => 1.17,
                DType::Q4_0 | DType::IQ4NL => 1.12,
                DType::Q5_0 | DType::Q8_0 => 1.1,
                _ => 1.05,
            };
            assert!(packed as f64 <= most * file as f64, "{}: {packed} for {file}", dtype.name());
        }
    }

    fn twins_agree_bit_for_bit_at_every_row_count() {
        let mut random = Random(4);
        for dtype in DType::ALL {
            let cols = columns(dtype)[1];
            let bytes = random.blocks(dtype, 65, cols);
            let xs = random.floats(19 * cols);
            let bias = random.floats(65);
            for rows in 1..=65 {
                let w = pack(dtype, rows, cols, &bytes[..bytes.len() / 65 * rows]);
                let t = 1 + rows % 19;
                let (xs, bias) = (&xs[..t * cols], &bias[..rows]);
                let (found, expected) = (product(&w, Some(bias), xs, t), reference(&w, Some(bias), xs, t));
                assert_eq!(bits(&found), bits(&expected), "{} {rows} rows, {t} activations", dtype.name());
            }
        }
    }

    fn twins_agree_on_a_large_matrix() {
        let mut random = Random(5);
        for dtype in DType::ALL {
            let (rows, cols, t) = (130, 2048, 23);
            let w = pack(dtype, rows, cols, &random.blocks(dtype, rows, cols));
            let xs = random.floats(t * cols);
            assert_eq!(bits(&product(&w, None, &xs, t)), bits(&reference(&w, None, &xs, t)), "{}", dtype.name());
        }
    }

    fn a_row_alone_equals_the_row_in_any_tile() {
        let mut random = Random(6);
        for dtype in DType::ALL {
            let (rows, cols) = (9, columns(dtype)[1]);
            let w = pack(dtype, rows, cols, &random.blocks(dtype, rows, cols));
            let xs = random.floats(17 * cols);
            let alone: Vec<f32> = xs.chunks_exact(cols).flat_map(|x| product(&w, None, x, 1)).collect();
            for t in 1..=17 {
                let found = product(&w, None, &xs[..t * cols], t);
                assert_eq!(bits(&found), bits(&alone[..t * rows]), "{} {t} rows", dtype.name());
            }
        }
    }

    fn matrices_wider_than_what_is_unpacked_at_once_are_summed_in_the_same_order() {
        let mut random = Random(11);
        for dtype in DType::ALL {
            // Eleven units of 256 columns, so spans of unequal length; five whole groups and a row.
            let (rows, cols, t) = (21, 11 * 256, 17);
            let w = pack(dtype, rows, cols, &random.blocks(dtype, rows, cols));
            let xs = random.floats(t * cols);
            let wanted: Vec<f32> = xs.chunks_exact(cols).flat_map(|x| reference(&w, None, x, 1)).collect();
            assert_eq!(bits(&product(&w, None, &xs, t)), bits(&wanted), "{}", dtype.name());
        }
    }

    fn several_matrices_at_once_equal_each_alone() {
        let mut random = Random(7);
        let (cols, t, out_cols) = (256, 5, 40);
        let types = [(DType::Q4K, 10, 1), (DType::Q6K, 5, 11), (DType::F16, 7, 17), (DType::Q8_0, 3, 30)];
        let weights: Vec<_> =
            types.iter().map(|(dtype, rows, _)| pack(*dtype, *rows, cols, &random.blocks(*dtype, *rows, cols))).collect();
        let bias = random.floats(7);
        let jobs: Vec<_> = weights
            .iter()
            .zip(types)
            .map(|(w, (dtype, _, at))| Job { w, bias: (dtype == DType::F16).then_some(&bias[..]), at, add: false })
            .collect();
        let xs = random.floats(t * cols);
        let mut out = vec![7.0; t * out_cols];
        matmul(&jobs, &Activations::new(&xs, t, cols, Needs::of(types.map(|(dtype, ..)| dtype))), &mut out, out_cols);
        let mut expected = vec![7.0; t * out_cols];
        for Job { w, bias, at, .. } in jobs {
            let y = product(w, bias, &xs, t);
            for (row, y) in expected.chunks_exact_mut(out_cols).zip(y.chunks_exact(w.rows())) {
                row[at..at + w.rows()].copy_from_slice(y);
            }
        }
        assert_eq!(bits(&out), bits(&expected));
    }

    fn extreme_blocks_and_activations_are_exact() {
        // Largest quants of every kind with largest activations: no integer sum may wrap or saturate.
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_len() > 1) {
            let (rows, cols) = (5, columns(dtype)[1]);
            for fill in [0x00, 0xff, 0x80, 0x7f, 0x0f, 0xf0, 0x01] {
                for scale in [0x3c00u16, 0x0001, 0x83ff, 0x0000, 0x7bff] {
                    let mut bytes = vec![fill; rows * cols / dtype.block_len() * dtype.block_bytes()];
                    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                        for at in oracle::scale_offsets(dtype) {
                            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
                        }
                    }
                    let w = pack(dtype, rows, cols, &bytes);
                    let values = oracle::dequantize(dtype, &bytes);
                    for signs in [1.0, -1.0] {
                        // All of full size, so that rounding them to bytes loses nothing.
                        let xs: Vec<f32> = (0..3 * cols)
                            .map(|i| if i / cols == 2 && i % 2 == 1 { -127.0 * signs } else { 127.0 * signs })
                            .collect();
                        let found = product(&w, None, &xs, 3);
                        assert_eq!(bits(&found), bits(&reference(&w, None, &xs, 3)), "{}", dtype.name());
                        for (i, found) in found.iter().enumerate() {
                            let (x, v) = (&xs[i / rows * cols..], &values[i % rows * cols..]);
                            let terms = || x.iter().zip(v).take(cols).map(|(x, v)| f64::from(*x) * f64::from(*v));
                            let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                            let off = (f64::from(*found) - sum).abs();
                            assert!(off <= SUM_TOLERANCE * size, "{} {fill:x} {scale:x}", dtype.name());
                        }
                    }
                }
            }
        }
    }

    fn odd_numbers_in_weights_do_not_trap() {
        let mut random = Random(8);
        for dtype in DType::ALL {
            let (rows, cols, t) = (5, columns(dtype)[1], 9);
            let mut bytes = random.blocks(dtype, rows, cols);
            for special in [0x7c00u16, 0xfc00, 0x7e01, 0xffff, 0x7bff] {
                let block = random.below(bytes.len() / dtype.block_bytes()) * dtype.block_bytes();
                let at = block + oracle::scale_offsets(dtype).first().copied().unwrap_or(0);
                bytes[at..at + 2].copy_from_slice(&special.to_le_bytes());
                let w = pack(dtype, rows, cols, &bytes);
                let xs = random.floats(t * cols);
                assert_eq!(bits(&product(&w, None, &xs, t)), bits(&reference(&w, None, &xs, t)), "{}", dtype.name());
                let values = oracle::dequantize(dtype, &bytes);
                let mut row = vec![0.0; cols];
                w.dequantize_row(0, &mut row);
                assert_eq!(bits(&row), bits(&values[..cols]), "{}", dtype.name());
            }
        }
    }

    fn every_f16_and_bf16_is_widened_exactly() {
        for dtype in [DType::F16, DType::BF16] {
            let bytes: Vec<u8> = (0..=u16::MAX).flat_map(|h| h.to_le_bytes()).collect();
            let w = pack(dtype, 65536, 1, &bytes);
            let expected: Vec<f32> = oracle::dequantize(dtype, &bytes).iter().map(|v| v + 0.0).collect();
            assert!(bits(&product(&w, None, &[1.0], 1)) == bits(&expected), "{}", dtype.name());
        }
    }

    fn bad_activations_give_nan_in_their_row_alone() {
        let mut random = Random(9);
        for dtype in DType::ALL {
            let (rows, cols) = (6, columns(dtype)[1]);
            let w = pack(dtype, rows, cols, &random.blocks(dtype, rows, cols));
            let clean = random.floats(11 * cols);
            let expected = product(&w, None, &clean, 11);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut xs = clean.clone();
                xs[3 * cols + 5] = bad;
                let found = product(&w, None, &xs, 11);
                for (t, row) in found.chunks_exact(rows).enumerate() {
                    let same = bits(row) == bits(&expected[t * rows..][..rows]);
                    let finite = row.iter().any(|y| y.is_finite());
                    assert!(if t == 3 { !finite } else { same }, "{} row {t} with {bad}", dtype.name());
                }
            }
        }
    }

    fn tiny_and_huge_activations_are_served() {
        for size in [0.0, 1e-45, 1e-38, 1e-31, 1e-20, 1e20, 1e30] {
            let w = pack(DType::Q8_0, 1, 32, &[&[0x00, 0x3c][..], &[1; 32]].concat());
            let xs: Vec<f32> = (0..32).map(|i| if i % 2 == 0 { size } else { size / 2.0 }).collect();
            let (found, expected) = (product(&w, None, &xs, 1)[0], 24.0 * size);
            let tolerance = if size < 1e-30 { 1e-29 } else { size * 0.1 };
            assert!((found - expected).abs() <= tolerance, "{size}: {found} {expected}");
        }
    }

    fn activations_round_halves_to_even() {
        let w = pack(DType::F32, 1, 1, &1f32.to_le_bytes());
        assert_eq!(product(&w, None, &[0.3], 1), [0.3]);
        // Scale 1: 127 is the largest. One weight of 1 in a Q8_0 block picks the rounded value.
        for (x, rounded) in [(0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (-0.5, 0.0), (-1.5, -2.0), (-2.5, -2.0), (126.5, 126.0)] {
            let mut block = [0u8; 34];
            block[1] = 0x3c;
            block[2] = 1;
            let w = pack(DType::Q8_0, 1, 32, &block);
            let mut xs = [0.0; 32];
            (xs[0], xs[31]) = (x, 127.0);
            assert_eq!(product(&w, None, &xs, 1), [rounded], "{x}");
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
#[test]
fn thread_count_does_not_change_a_bit() {
    let mut random = Random(10);
    for dtype in DType::ALL {
        let (rows, cols, t) = (333, 1024, 12);
        let w = pack(dtype, rows, cols, &random.blocks(dtype, rows, cols));
        let xs = random.floats(t * cols);
        let expected = bits(&reference(&w, None, &xs, t));
        for threads in [1, 2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| product(&w, None, &xs, t));
            assert!(bits(&found) == expected, "{} on {threads} threads", dtype.name());
        }
    }
}

/// Packed bytes are kept between visits: whoever changes a layout sees this fail, and gives `LAYOUT` another number.
#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
#[cfg_attr(not(target_arch = "wasm32"), test)]
fn the_packed_layout_is_the_one_of_its_number() {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for (dtype, blocks, ..) in fixtures() {
        let cols = match dtype.block_len() {
            1 => 37,
            32 => 96,
            _ => 512,
        };
        let mut packer = Packer::new(dtype, FIXTURE_ROWS, cols).unwrap();
        packer.push(blocks).unwrap();
        for byte in packer.finish().unwrap().data() {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    assert_eq!((qandle::kernels::LAYOUT, hash), (1, 9_718_976_921_980_040_473));
}
