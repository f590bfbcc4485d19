//! A mark of a file's tensor table, to notice that the file whose weights come is another one than the file whose header was
//! read: shards pushed in a wrong order, or a file that was replaced in between. It is no protection against forgery.

use std::ops::Range;

/// Where the table stands in the file, and a hash of its bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableMark {
    /// Bytes of the file that were hashed.
    pub range: Range<u64>,
    /// Their FNV-1a hash of 64 bits.
    pub hash: TableHash,
}

/// FNV-1a over bytes that come in any split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableHash(u64);

impl Default for TableHash {
    fn default() -> Self {
        TableHash(0xCBF2_9CE4_8422_2325)
    }
}

impl TableHash {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        self.0 = bytes.iter().fold(self.0, step);
    }
}

/// Compares a file that is read again with its mark.
#[derive(Debug)]
pub struct Watch {
    mark: TableMark,
    hash: TableHash,
}

impl Watch {
    /// A watch at the start of a file.
    pub fn new(mark: TableMark) -> Self {
        Watch { mark, hash: TableHash::default() }
    }

    /// Takes the next bytes, which stand at `from`; `false` as soon as the table is through and differs.
    pub fn push(&mut self, bytes: &[u8], from: u64) -> bool {
        let Range { start, end } = self.mark.range;
        let to = from + bytes.len() as u64;
        let (first, last) = (start.clamp(from, to), end.clamp(from, to));
        self.hash.update(&bytes[(first - from) as usize..(last - from) as usize]);
        to < end || self.hash == self.mark.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_sees_the_same_table_in_any_split_and_no_other() {
        let file: Vec<u8> = (0..100).collect();
        let mut hash = TableHash::default();
        hash.update(&file[30..70]);
        let mark = TableMark { range: 30..70, hash };
        let same = |file: &[u8], piece: usize| {
            let mut watch = Watch::new(mark.clone());
            file.chunks(piece).enumerate().all(|(i, bytes)| watch.push(bytes, (i * piece) as u64))
        };
        for piece in [1, 7, 30, 100] {
            assert!(same(&file, piece));
            let mut other = file.clone();
            other[29] ^= 1;
            other[70] ^= 1;
            assert!(same(&other, piece), "what stands beside the table does not count");
            other[69] ^= 1;
            assert!(!same(&other, piece));
        }
    }
}
