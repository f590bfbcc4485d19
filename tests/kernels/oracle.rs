//! What blocks of each type mean, element by element as the GGUF and ggml definitions say it, in the plainest form:
//! no packing, no SIMD, nothing shared with the engine.

use qandle::kernels::DType;

fn f16(b: &[u8], at: usize) -> f32 {
    let h = u16::from_le_bytes([b[at], b[at + 1]]);
    let (sign, e, m) = (if h >> 15 == 1 { -1.0 } else { 1.0 }, i32::from(h >> 10 & 31), f32::from(h & 1023));
    match e {
        0 => sign * m * 2f32.powi(-24),
        31 if m == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1024.0 + m) * 2f32.powi(e - 25),
    }
}

/// The six-bit scale and minimum of sub-block `j` of Q4_K and Q5_K.
fn six_bits(s: &[u8], j: usize) -> (f32, f32) {
    if j < 4 {
        (f32::from(s[j] & 63), f32::from(s[j + 4] & 63))
    } else {
        (f32::from((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4)), f32::from((s[j + 4] >> 4) | ((s[j] >> 6) << 4)))
    }
}

/// Element `i` of block `b`.
fn element(dtype: DType, b: &[u8], i: usize) -> f32 {
    let half = i / 16; // of a block of 32
    let nibble = |at: usize| f32::from(b[at + i % 16] >> (4 * half) & 15);
    let fifth = |at: usize| f32::from(b[at + i / 8] >> (i % 8) & 1) * 16.0;
    // K-quants: 64 columns share 32 bytes of nibbles; 128 share 32 bytes of pairs.
    let k_nibble = |at: usize| f32::from(b[at + i / 64 * 32 + i % 32] >> (4 * (i / 32 % 2)) & 15);
    let k_pair = |at: usize| f32::from(b[at + i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3);
    match dtype {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => f16(b, 0),
        DType::BF16 => f32::from_bits(u32::from(b[0]) << 16 | u32::from(b[1]) << 24),
        DType::Q4_0 => f16(b, 0) * (nibble(2) - 8.0),
        DType::Q4_1 => f16(b, 0) * nibble(4) + f16(b, 2),
        DType::Q5_0 => f16(b, 0) * (nibble(6) + fifth(2) - 16.0),
        DType::Q5_1 => f16(b, 0) * (nibble(8) + fifth(4)) + f16(b, 2),
        DType::Q8_0 => f16(b, 0) * f32::from(b[2 + i] as i8),
        DType::IQ4NL => {
            let table = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
            f16(b, 0) * table[nibble(2) as usize] as f32
        }
        DType::Q2K => {
            let s = b[i / 16];
            f16(b, 80) * f32::from(s & 15) * k_pair(16) - f16(b, 82) * f32::from(s >> 4)
        }
        DType::Q3K => {
            let j = i / 16;
            let low = if j < 8 { b[96 + j] & 15 } else { b[96 + j - 8] >> 4 };
            let scale = i32::from(low | (b[104 + j % 4] >> (2 * (j / 4)) & 3) << 4) - 32;
            let high = if b[i % 32] >> (i / 32) & 1 == 1 { 0.0 } else { 4.0 };
            f16(b, 108) * scale as f32 * (k_pair(32) - high)
        }
        DType::Q4K => {
            let (s, m) = six_bits(&b[4..], i / 32);
            f16(b, 0) * s * k_nibble(16) - f16(b, 2) * m
        }
        DType::Q5K => {
            let (s, m) = six_bits(&b[4..], i / 32);
            let fifth = f32::from(b[16 + i % 32] >> (i / 32) & 1) * 16.0;
            f16(b, 0) * s * (k_nibble(48) + fifth) - f16(b, 2) * m
        }
        DType::Q6K => {
            let (n, l, quarter) = (i / 128, i % 32, i / 32 % 4);
            let low = b[64 * n + 32 * (quarter % 2) + l] >> (4 * (quarter / 2)) & 15;
            let high = b[128 + 32 * n + l] >> (2 * quarter) & 3;
            f16(b, 208) * f32::from(b[192 + i / 16] as i8) * (f32::from(low | high << 4) - 32.0)
        }
    }
}

/// Activations that share a scale, rounded to signed bytes: the largest magnitude over 127, halves to even.
pub fn rounded(x: &[f32]) -> Vec<f64> {
    let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let (inverse, scale) = (127.0 / largest, largest / 127.0);
    x.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale)).collect()
}

/// All values of a tensor's file bytes.
pub fn dequantize(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    blocks.flat_map(|b| (0..dtype.block_len()).map(|i| element(dtype, b, i))).collect()
}

/// The file offsets of a block's f16 scales.
pub fn scale_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => &[],
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4NL => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
    }
}
