//! Splits index ranges over the threads of rayon's current pool (natively, and on wasm built with atomics); elsewhere
//! the work is done by a plain call. It owns no threads: on wasm the pool is `wasm-bindgen-rayon`'s.

use std::marker::PhantomData;
use std::ops::Range;

/// Ranges given out per thread, so that a thread that was held up does not keep the others waiting.
#[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
const RANGES_PER_THREAD: usize = 4;

/// Number of threads that [`for_ranges`] spreads work over.
pub fn threads() -> usize {
    #[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
    return rayon::current_num_threads();
    #[cfg(not(any(not(target_arch = "wasm32"), target_feature = "atomics")))]
    1
}

/// Calls `work` on ranges that cover `0..n_items` once, in parallel, and returns when all are done.
///
/// No range but the last is shorter than `min_per_task`; the split depends on the thread count, so results must not.
pub fn for_ranges(n_items: usize, min_per_task: usize, work: impl Fn(Range<usize>) + Send + Sync) {
    if n_items == 0 {
        return;
    }
    #[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
    {
        use rayon::prelude::*;
        let threads = threads();
        let tasks = (n_items / min_per_task.max(1)).min(threads * RANGES_PER_THREAD);
        if threads > 1 && tasks > 1 {
            let step = n_items.div_ceil(tasks);
            (0..n_items.div_ceil(step)).into_par_iter().with_max_len(1).for_each(|task| {
                let from = task * step;
                work(from..n_items.min(from + step));
            });
            return;
        }
    }
    let _ = min_per_task;
    work(0..n_items);
}

/// A slice that several tasks write at places of their own.
pub struct SharedOut<'a, T = f32> {
    start: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out places of a slice of `T: Send`; that they do not overlap is `slice`'s precondition.
unsafe impl<T: Send> Send for SharedOut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    /// Takes the slice for the time of a parallel region.
    pub fn new(out: &'a mut [T]) -> Self {
        Self { start: out.as_mut_ptr(), len: out.len(), _borrow: PhantomData }
    }

    /// The `len` elements from `at` on. Panics where they lie outside.
    ///
    /// # Safety
    /// No two slices that are alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at <= self.len && len <= self.len - at, "{len} elements at {at} of {}", self.len);
        // SAFETY: inside the slice that was taken (asserted), and not aliased (this function's precondition).
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_every_item_once() {
        for n in [0, 1, 7, 64, 1000] {
            for min in [0, 1, 3, 64, 5000] {
                let mut hits = vec![0u8; n];
                let out = SharedOut::new(&mut hits);
                for_ranges(n, min, |range| {
                    // SAFETY: the ranges do not overlap (what this test checks by the counts).
                    unsafe { out.slice(range.start, range.len()) }.iter_mut().for_each(|h| *h += 1);
                });
                assert!(hits.iter().all(|h| *h == 1), "{n} items, at least {min} a task");
            }
        }
    }
}
