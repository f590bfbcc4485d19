//! First touch of memory, beside the thread that will fill it: a system finds the pages of new memory when they are first
//! touched, which for the weights of a model takes as long as reading them. Owns no memory and no threads.

#![cfg_attr(all(target_arch = "wasm32", not(target_feature = "atomics")), allow(dead_code))] // without threads nobody touches

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::SeqCst};
use std::sync::Arc;

/// Systems with larger pages are touched more often than they need.
const PAGE: usize = 4096;
/// Bytes that are touched between two looks at whether more is wanted.
const PIECE: usize = 1 << 20;

/// One thread of the pool that touches places from the last to the first, while the caller fills them from the first on.
pub struct Ahead(Arc<State>);

struct State {
    places: Vec<Range<usize>>,
    /// The place that the caller fills: those from it on are not touched any more up to it.
    front: AtomicUsize,
    /// The place that is being touched.
    back: AtomicUsize,
    /// Whether the thread has begun, or may not begin any more: whoever sets it first decides.
    claimed: AtomicBool,
    /// Nothing is touched now, nor will be.
    over: AtomicBool,
    ended: AtomicBool,
}

impl Ahead {
    /// Begins with places of which none overlaps another. Where there is no thread for it, nothing is touched.
    ///
    /// # Safety
    /// The places must stay allocated until this is dropped, and only the one that was last given to [`Ahead::reach`], or
    /// one before it, may be read or written meanwhile.
    pub unsafe fn begin(places: Vec<Range<usize>>) -> Self {
        let back = AtomicUsize::new(places.len());
        let state = Arc::new(State {
            places,
            front: AtomicUsize::new(0),
            back,
            claimed: AtomicBool::new(false),
            over: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        #[cfg(any(not(target_arch = "wasm32"), target_feature = "atomics"))]
        if crate::kernels::parallel::threads() > 1 {
            let state = state.clone();
            rayon::spawn(move || state.touch());
        }
        Self(state)
    }

    /// The caller goes on to a place: comes back when nobody touches it.
    pub fn reach(&self, place: usize) {
        self.0.front.store(place, SeqCst);
        while self.0.back.load(SeqCst) <= place && !self.0.over.load(SeqCst) {
            std::hint::spin_loop();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.0.ended.store(true, SeqCst);
        if self.0.claimed.swap(true, SeqCst) {
            self.reach(usize::MAX);
        }
    }
}

impl State {
    fn touch(&self) {
        if self.claimed.swap(true, SeqCst) {
            return;
        }
        for (i, place) in self.places.iter().enumerate().rev() {
            // In this order: whoever reaches the place after this store sees it and waits; who did before is seen here.
            self.back.store(i, SeqCst);
            let wanted = || !self.ended.load(SeqCst) && self.front.load(SeqCst) < i;
            if !place.clone().step_by(PIECE).all(|from| wanted() && touch(from..place.end.min(from + PIECE)))
            {
                break;
            }
        }
        self.over.store(true, SeqCst);
    }
}

/// Touches each page of some memory that nobody else uses.
fn touch(place: Range<usize>) -> bool {
    for at in place.step_by(PAGE) {
        // SAFETY: allocated, and nobody else's (`begin`'s precondition, and `reach`). It stays unwritten for those who ask
        // for bytes: they fill it all. A plain store would do as well; a compiler may not leave out this one.
        unsafe { (*(at as *const AtomicU8)).store(0, SeqCst) };
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_are_reached_keep_what_is_put_there() {
        for round in 0..50 {
            let mut memory: Vec<Vec<u8>> = (0..40).map(|i| vec![1; 1 + i * 977 * (1 + round % 3)]).collect();
            let place = |m: &mut Vec<u8>| m.as_mut_ptr() as usize..m.as_mut_ptr() as usize + m.len();
            let places = memory.iter_mut().map(place).collect();
            // SAFETY: they are dropped after it, and used in order.
            let ahead = unsafe { Ahead::begin(places) };
            let last = 40 - round % 5;
            for (i, m) in memory.iter_mut().enumerate().take(last) {
                ahead.reach(i);
                m.fill(i as u8 + 2);
                assert!(m.iter().all(|b| *b == i as u8 + 2));
            }
            drop(ahead);
            assert!(memory.iter().enumerate().take(last).all(|(i, m)| m.iter().all(|b| *b == i as u8 + 2)));
        }
    }
}
