//! Sums of bytes that are kept, by which damage is noticed, and how they are written.

/// A sum that notices damage, not malice: Fletcher's, over sixteen interleaved sequences of words, at the speed of the memory
/// (a hash for the purpose, XXH3, took 150 ms for the 525 MB of a 0.5B model, as long as reading them).
#[derive(Debug, Default)]
pub struct Sum {
    words: [u32; LANES],
    sums: [u32; LANES],
}

const LANES: usize = 16;

impl Sum {
    /// The sum of some bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut sum = Self::default();
        let (rows, rest) = bytes.as_chunks::<{ 4 * LANES }>();
        rows.iter().for_each(|row| sum.add(row));
        if !rest.is_empty() {
            let mut row = [0; 4 * LANES];
            row[..rest.len()].copy_from_slice(rest);
            sum.add(&row);
        }
        sum.digest(bytes.len() as u64)
    }

    #[inline(always)]
    fn add(&mut self, row: &[u8; 4 * LANES]) {
        for (i, word) in row.as_chunks::<4>().0.iter().enumerate() {
            self.words[i] = self.words[i].wrapping_add(u32::from_le_bytes(*word));
            self.sums[i] = self.sums[i].wrapping_add(self.words[i]);
        }
    }

    fn digest(&self, bytes: u64) -> u64 {
        let mix =
            |h: u64, word: &u32| (h ^ u64::from(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        self.words.iter().chain(&self.sums).fold(bytes, mix)
    }
}

/// Bytes in lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
