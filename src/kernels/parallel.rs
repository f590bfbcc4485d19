//! Splits index ranges over threads: a team of the caller and of threads borrowed from rayon's current pool (natively, and
//! on wasm built with atomics, where the pool is `wasm-bindgen-rayon`'s); elsewhere the work is done by a plain call.
//!
//! Rayon wakes a thread for every region, which costs as long as a small matrix takes. So a [`team`] borrows the threads
//! once for many regions: between two of them they watch a counter for some microseconds before they sleep. The caller
//! works too and never waits for a thread that has not come: only for tasks that one has taken. On wasm all threads of the
//! pool are the team's while it lasts, so nothing inside may wait for rayon itself.

#[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
mod team;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ranges given out per thread, so that a thread that was held up does not keep the others waiting.
const RANGES_PER_THREAD: usize = 4;

/// Threads that take part at most, where that is fewer than there are.
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Leaves all but `most` threads asleep from the next team on.
pub fn set_most_threads(most: usize) {
    MOST.store(most.max(1), Ordering::Relaxed);
}

/// Number of threads that [`for_ranges`] spreads work over, the caller's included.
pub fn threads() -> usize {
    #[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
    return team::threads().min(MOST.load(Ordering::Relaxed));
    #[cfg(not(any(not(target_arch = "wasm32"), target_feature = "atomics")))]
    1
}

/// Runs `work` while the threads of the pool stand by for its [`for_ranges`]. A team inside a team is the same team.
pub fn team<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
    return team::team(work);
    #[cfg(not(any(not(target_arch = "wasm32"), target_feature = "atomics")))]
    work()
}

/// Calls `work` on ranges that cover `0..n_items` once, in parallel, and returns when all are done.
///
/// No range but the last is shorter than `min_per_task`; the split depends on the thread count, so results must not.
/// A panic in `work` becomes the caller's once all that was begun is done.
pub fn for_ranges(n_items: usize, min_per_task: usize, work: impl Fn(Range<usize>) + Sync) {
    if n_items == 0 {
        return;
    }
    let threads = threads();
    let tasks = (n_items / min_per_task.max(1)).min(threads * RANGES_PER_THREAD);
    if threads == 1 || tasks < 2 {
        return work(0..n_items);
    }
    let step = n_items.div_ceil(tasks);
    let tasks = n_items.div_ceil(step);
    let task = |task: usize| work(task * step..n_items.min((task + 1) * step));
    #[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
    team::run(tasks, &task);
    #[cfg(not(any(not(target_arch = "wasm32"), target_feature = "atomics")))]
    (0..tasks).for_each(task);
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
    fn regions_of_a_team_cover_every_item_once_and_wait_for_all() {
        for threads in [1, 2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                assert_eq!(super::threads(), threads);
                team(|| {
                    for n in (0..2000).map(|i| i % 97) {
                        let mut hits = vec![0u8; n];
                        let out = SharedOut::new(&mut hits);
                        for_ranges(n, 1, |range| {
                            // A region inside a task must not wait for anyone.
                            for_ranges(2, 1, |_| ());
                            // SAFETY: the ranges do not overlap (what this test checks by the counts).
                            unsafe { out.slice(range.start, range.len()) }.iter_mut().for_each(|h| *h += 1);
                        });
                        assert!(hits.iter().all(|h| *h == 1), "{n} items on {threads} threads");
                    }
                    // Long enough for the helpers to fall asleep.
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    let sum = std::sync::atomic::AtomicUsize::new(0);
                    for_ranges(100, 1, |range| {
                        sum.fetch_add(range.sum::<usize>(), std::sync::atomic::Ordering::Relaxed);
                    });
                    assert_eq!(sum.into_inner(), 4950);
                });
            });
        }
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_next_region_works() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        pool.install(|| {
            team(|| {
                let fault = || for_ranges(12, 1, |range| assert!(!range.contains(&5), "task of 5"));
                let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(fault)).unwrap_err();
                assert_eq!(panic.downcast_ref::<&str>(), Some(&"task of 5"));
                for_ranges(12, 1, |_| ());
            });
        });
    }

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
