//! The bytes of all pages of an engine, whoever holds them, and how many there may be.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

/// Bytes that pages take. A page that would pass the bound is not made.
#[derive(Debug)]
pub struct Budget {
    used: AtomicU64,
    most: AtomicU64,
}

impl Default for Budget {
    /// Without a bound.
    fn default() -> Self {
        Self { used: AtomicU64::new(0), most: AtomicU64::new(u64::MAX) }
    }
}

impl Budget {
    /// Sets the bound; pages that are there stay.
    pub fn bound(&self, most: u64) {
        self.most.store(most, Relaxed);
    }

    /// Bytes of all pages that are there.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Bytes up to the bound.
    pub fn room(&self) -> u64 {
        self.most.load(Relaxed).saturating_sub(self.used())
    }

    /// Takes bytes until the share is dropped; `None`: they would pass the bound.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Share> {
        if self.room() < bytes {
            return None;
        }
        self.used.fetch_add(bytes, Relaxed);
        Some(Share { budget: self.clone(), bytes })
    }
}

/// A page's part of the budget.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Relaxed);
    }
}
