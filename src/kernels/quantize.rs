//! Float weights become Q8_0 or Q4_0 while they are loaded, block by block, with the bits of ggml's reference
//! (`quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` of ggml-quants.c).

use super::dtype::DType;
use super::packed::float::{Bf16, F16, F32};
use super::packed::format::{Float, Layout};
use super::packed::{PackedMatrix, Packer};
use crate::error::{Error, Result};
use half::f16;

/// Values of a block, of both types.
const BLOCK: usize = 32;
/// Blocks that are made before the packer takes them.
const BATCH: usize = 16;
/// Bytes of the larger kind of block.
const MOST_BYTES: usize = 34;

/// Makes a [`PackedMatrix`] of `to` out of float bytes, which come in any split.
pub struct Quantizer {
    packer: Packer,
    from: DType,
    to: DType,
    staged: [u8; 4 * BLOCK],
    staged_len: usize,
}

impl Quantizer {
    /// Whether a matrix of this type and width can be quantised.
    pub fn serves(from: DType, cols: usize) -> bool {
        matches!(from, DType::F32 | DType::F16 | DType::BF16) && cols.is_multiple_of(BLOCK)
    }

    /// Allocates the packed form of a matrix that comes as `from` and is kept as `to`.
    ///
    /// # Errors
    /// As [`Packer::new`]; `unsupported_quantization` for other types than floats into Q8_0 or Q4_0.
    pub fn new(from: DType, to: DType, rows: usize, cols: usize) -> Result<Self> {
        if !Self::serves(from, cols) || !matches!(to, DType::Q8_0 | DType::Q4_0) {
            return Err(Error::unsupported_quantization(format!(
                "{} of {cols} columns cannot be made {}",
                from.name(),
                to.name()
            )));
        }
        let packer = Packer::new(to, rows, cols)?;
        Ok(Self { packer, from, to, staged: [0; 4 * BLOCK], staged_len: 0 })
    }

    /// Takes the next bytes of the tensor.
    ///
    /// # Errors
    /// `bad_model` where there are more bytes than the shape has, or a value is not finite or too large for an f16 scale.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<()> {
        let need = BLOCK * self.from.block_bytes();
        if self.staged_len > 0 {
            let take = bytes.len().min(need - self.staged_len);
            self.staged[self.staged_len..][..take].copy_from_slice(&bytes[..take]);
            self.staged_len += take;
            bytes = &bytes[take..];
            if self.staged_len < need {
                return Ok(());
            }
            self.staged_len = 0;
            let staged = self.staged;
            self.quantize(&staged[..need])?;
        }
        let (whole, rest) = bytes.split_at(bytes.len() / need * need);
        self.quantize(whole)?;
        self.staged[..rest.len()].copy_from_slice(rest);
        self.staged_len = rest.len();
        Ok(())
    }

    /// The matrix, once all its bytes are there.
    ///
    /// # Errors
    /// `bad_model` where bytes are missing.
    pub fn finish(self) -> Result<PackedMatrix> {
        self.packer.finish()
    }

    /// Takes whole blocks.
    fn quantize(&mut self, bytes: &[u8]) -> Result<()> {
        match self.from {
            DType::F16 => self.quantize_as::<F16>(bytes),
            DType::BF16 => self.quantize_as::<Bf16>(bytes),
            _ => self.quantize_as::<F32>(bytes),
        }
    }

    fn quantize_as<F: Float + Layout>(&mut self, bytes: &[u8]) -> Result<()> {
        let block_bytes = self.to.block_bytes();
        let mut made = [0; BATCH * MOST_BYTES];
        for batch in bytes.chunks(BATCH * BLOCK * F::FILE_BYTES) {
            let mut made_bytes = 0;
            for block in batch.chunks_exact(BLOCK * F::FILE_BYTES) {
                let mut values = [0.0; BLOCK];
                for (value, bytes) in values.iter_mut().zip(block.chunks_exact(F::FILE_BYTES)) {
                    *value = F::decode(bytes);
                }
                let out = &mut made[made_bytes..][..block_bytes];
                match self.to {
                    DType::Q4_0 => quantize_q4_0(&values, out)?,
                    _ => quantize_q8_0(&values, out)?,
                }
                made_bytes += block_bytes;
            }
            self.packer.push(&made[..made_bytes])?;
        }
        Ok(())
    }
}

/// A block of Q8_0 (34 bytes): `d` as f16, 32 signed bytes `round(x / d)`, with d = max |x| / 127.
///
/// # Errors
/// `bad_model` where a value is not finite or the scale passes f16.
pub fn quantize_q8_0(values: &[f32; 32], block: &mut [u8]) -> Result<()> {
    let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let d = most / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    put_scale(d, values, block)?;
    for (quant, value) in block[2..34].iter_mut().zip(values) {
        *quant = round(value * inverse) as i8 as u8;
    }
    Ok(())
}

/// A block of Q4_0 (18 bytes): `d` as f16, then 32 nibbles `x / d + 8` (the first sixteen columns low), with d the
/// value of largest magnitude divided by −8.
///
/// # Errors
/// As [`quantize_q8_0`].
pub fn quantize_q4_0(values: &[f32; 32], block: &mut [u8]) -> Result<()> {
    let (mut most, mut extreme) = (0.0f32, 0.0f32);
    for &value in values {
        if most < value.abs() {
            (most, extreme) = (value.abs(), value);
        }
    }
    let d = extreme / -8.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    put_scale(d, values, block)?;
    let quant = |value: f32| ((value * inverse + 8.5) as i8).min(15) as u8;
    for (byte, (&low, &high)) in block[2..18].iter_mut().zip(values[..16].iter().zip(&values[16..])) {
        *byte = quant(low) | quant(high) << 4;
    }
    Ok(())
}

fn put_scale(d: f32, values: &[f32; 32], block: &mut [u8]) -> Result<()> {
    let scale = f16::from_f32(d);
    if !scale.is_finite() || values.iter().any(|value| value.is_nan()) {
        return Err(Error::bad_model("a weight is not finite, or too large to be quantised"));
    }
    block[..2].copy_from_slice(&scale.to_le_bytes());
    Ok(())
}

/// Rounds half away from zero, as C's `roundf`; exact, and without a call on wasm, which has no such instruction.
fn round(x: f32) -> f32 {
    let whole = x.trunc();
    whole + ((x - whole) * 2.0).trunc()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_round() {
        for i in -2600..=2600 {
            let x = i as f32 / 20.0;
            for x in [x, f32::from_bits(x.to_bits() + 1), f32::from_bits(x.to_bits().saturating_sub(1))] {
                assert_eq!(round(x), x.round(), "{x}");
            }
        }
    }

    #[test]
    fn what_cannot_be_quantised_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e9] {
            let mut values = [1.0; 32];
            values[7] = bad;
            assert_eq!(quantize_q8_0(&values, &mut [0; 34]).map_err(|e| e.code()), Err("bad_model"), "{bad}");
            assert_eq!(quantize_q4_0(&values, &mut [0; 18]).map_err(|e| e.code()), Err("bad_model"), "{bad}");
        }
    }
}
