//! The caller of parallel regions and the pool's threads that help it: a counter of tasks that all of them take from, a
//! short watch between regions, then sleep. Owns no threads; they are borrowed from rayon for the time of a team.

use std::any::Any;
use std::cell::{Cell, RefCell, UnsafeCell};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Looks at the counter before a thread sleeps: some 50 µs, longer than what lies between two regions of a pass.
const SPINS: u32 = 50_000;

thread_local! {
    static TEAM: RefCell<Option<Arc<Team>>> = const { RefCell::new(None) };
    /// Whether this thread is inside a task; a region within a task is done by the task's own thread.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// What a region runs; `call(data, task)` for each of its tasks.
#[derive(Clone, Copy)]
struct Job {
    call: unsafe fn(*const (), usize),
    data: *const (),
}

/// One caller and its helpers. Only the caller's thread begins and ends regions.
struct Team {
    /// Number of the region in the upper half, tasks that nobody has taken in the lower.
    state: AtomicU64,
    /// The region's job. Written while no task is taken or left; read by whoever took a task, before it is done.
    job: UnsafeCell<Job>,
    /// Tasks of the region that are done.
    done: AtomicU32,
    closed: AtomicBool,
    sleepers: AtomicU32,
    bed: Mutex<()>,
    bell: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` alone is not Sync; `state` orders its accesses, as its field says: a task is taken by a
// compare-exchange on the value that was stored after `job`, and `job` changes only when all taken tasks are done.
// What `data` points to is Sync (`run`).
unsafe impl Sync for Team {}
// SAFETY: as above; the pointers in `job` are only followed under that protocol.
unsafe impl Send for Team {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that work together: on wasm the pool's and the caller, who is not one of them; natively the pool's number.
pub(super) fn threads() -> usize {
    if BUSY.get() {
        return 1;
    }
    let outside = cfg!(target_arch = "wasm32") && rayon::current_thread_index().is_none();
    rayon::current_num_threads() + usize::from(outside)
}

pub(super) fn team<R>(work: impl FnOnce() -> R) -> R {
    let helpers = super::threads() - 1;
    if helpers == 0 || TEAM.with_borrow(Option::is_some) {
        return work();
    }
    let team = Arc::new(Team {
        state: AtomicU64::new(0),
        job: UnsafeCell::new(Job { call: |_, _| {}, data: std::ptr::null() }),
        done: AtomicU32::new(0),
        closed: AtomicBool::new(false),
        sleepers: AtomicU32::new(0),
        bed: Mutex::new(()),
        bell: Condvar::new(),
        panic: Mutex::new(None),
    });
    for _ in 0..helpers {
        let team = team.clone();
        rayon::spawn(move || team.help());
    }
    /// Ends the team however `work` ends.
    struct Open;
    impl Drop for Open {
        fn drop(&mut self) {
            if let Some(team) = TEAM.take() {
                team.closed.store(true, SeqCst);
                team.wake();
            }
        }
    }
    TEAM.set(Some(team));
    let _open = Open;
    work()
}

/// Calls `task` for every number below `tasks`, each once.
pub(super) fn run<F: Fn(usize) + Sync>(tasks: usize, task: &F) {
    match TEAM.with_borrow(Clone::clone) {
        Some(team) => team.run(tasks, task),
        None => team(|| run(tasks, task)),
    }
}

impl Team {
    fn run<F: Fn(usize) + Sync>(&self, tasks: usize, task: &F) {
        /// # Safety
        /// `data` points to an `F`.
        unsafe fn call<F: Fn(usize)>(data: *const (), task: usize) {
            // SAFETY: as the caller promises.
            unsafe { (*data.cast::<F>())(task) }
        }
        let region = (self.state.load(Relaxed) >> 32).wrapping_add(1) as u32;
        self.done.store(0, Relaxed);
        // SAFETY: the last region is done, so nobody reads the job; the next line publishes it.
        unsafe { *self.job.get() = Job { call: call::<F>, data: (task as *const F).cast() } };
        self.state.store(u64::from(region) << 32 | tasks as u64, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            self.wake();
        }
        while self.step() {}
        let mut spins = 0;
        while self.done.load(Acquire) < tasks as u32 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(std::time::Duration::from_micros(20));
            }
        }
        if let Some(panic) = lock(&self.panic).take() {
            resume_unwind(panic);
        }
    }

    /// Takes a task and does it, if one is left.
    fn step(&self) -> bool {
        let state = self.state.load(Acquire);
        let left = state as u32;
        if left == 0 {
            return false;
        }
        if self.state.compare_exchange_weak(state, state - 1, AcqRel, Relaxed).is_ok() {
            // SAFETY: a task of this region is taken and not done, so the job is the region's and stays.
            let Job { call, data } = unsafe { *self.job.get() };
            BUSY.set(true);
            // SAFETY: `run` borrows what `data` points to until this task is done.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { call(data, left as usize - 1) }));
            BUSY.set(false);
            if let Err(panic) = outcome {
                *lock(&self.panic) = Some(panic);
            }
            self.done.fetch_add(1, Release);
        }
        true
    }

    /// A helper's life: tasks, and between them watching, then sleep.
    fn help(&self) {
        let mut spins = 0;
        while !self.closed.load(Acquire) {
            if self.step() {
                spins = 0;
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                let mut bed = lock(&self.bed);
                self.sleepers.fetch_add(1, SeqCst);
                while self.state.load(SeqCst) as u32 == 0 && !self.closed.load(SeqCst) {
                    bed = self.bell.wait(bed).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.fetch_sub(1, SeqCst);
                spins = 0;
            }
        }
    }

    fn wake(&self) {
        drop(lock(&self.bed));
        self.bell.notify_all();
    }
}
