//! A global allocator that counts what the present thread holds, so that a test can bound an allocation.
//! Include it with `#[path = "common/counting_allocator.rs"] mod counting_allocator;` in one test program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let held = HELD.get() + bytes;
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `work` and tells by how many bytes the heap grew at most meanwhile, and what of it is still held.
pub fn growth<T>(work: impl FnOnce() -> T) -> (T, Growth) {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    let growth = Growth { peak: PEAK.get() - before, held: HELD.get() - before };
    (result, growth)
}

/// Bytes by which the heap of this thread grew.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code)] // Each test program uses its own part.
pub struct Growth {
    pub peak: isize,
    pub held: isize,
}
