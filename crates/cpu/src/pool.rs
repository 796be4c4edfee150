//! Standing threads for kernels.
//!
//! A fork-join through freshly spawned threads costs tens of microseconds; here a caller wakes threads that
//! spin for a short while and then sleep. Items are handed out one by one from a shared counter and the
//! caller takes items too, so a worker that wakes late (or never, on a busy machine) delays nothing. Which
//! thread runs an item must not matter to its result.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// How long a worker spins after a job before it sleeps: longer than the gap between the calls of a layer,
/// shorter than what another process would miss.
const SPIN: Duration = Duration::from_micros(200);

/// A job as workers see it: the caller keeps it alive until the last worker has left.
#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    next: *const AtomicUsize,
    items: usize,
    /// Workers that may still join.
    seats: usize,
}

// SAFETY: the pointers are used only between joining and leaving, while the caller waits in `run`.
unsafe impl Send for Job {}

struct State {
    job: Option<Job>,
    /// Workers inside the current job.
    inside: usize,
    panic: Option<Box<dyn std::any::Any + Send>>,
    workers: usize,
}

struct Pool {
    state: Mutex<State>,
    wake: Condvar,
    left: Condvar,
    /// Raised with every job, so that spinning workers need no lock.
    epoch: AtomicUsize,
    /// One job at a time; a second caller works alone.
    busy: Mutex<()>,
}

static POOL: OnceLock<Pool> = OnceLock::new();

thread_local! {
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// The number of threads a call uses where nobody said.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Runs `work(0)` to `work(items - 1)`, each once, on at most `threads` threads, and returns when all are done.
pub fn run(threads: usize, items: usize, work: &(dyn Fn(usize) + Sync)) {
    let alone = || (0..items).for_each(work);
    if threads.min(items) <= 1 || IN_JOB.get() {
        return alone();
    }
    let pool = POOL.get_or_init(|| Pool {
        state: Mutex::new(State { job: None, inside: 0, panic: None, workers: 0 }),
        wake: Condvar::new(),
        left: Condvar::new(),
        epoch: AtomicUsize::new(0),
        busy: Mutex::new(()),
    });
    let Ok(_turn) = pool.busy.try_lock() else { return alone() };
    pool.run(threads.min(items), items, work);
}

/// Runs `work(i, item)` for each item, on at most `threads` threads: for items that own the part of a result they write.
pub fn each<T: Send>(threads: usize, items: impl IntoIterator<Item = T>, work: impl Fn(usize, T) + Sync) {
    let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    run(threads, items.len(), &|i| {
        let item = items[i].lock().unwrap_or_else(|e| e.into_inner()).take();
        work(i, item.expect("bug in fulgurite: an item was handed out twice"));
    });
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while the lock is held; a poisoned lock is still consistent.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn run(&'static self, threads: usize, items: usize, work: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        // SAFETY: only the lifetime changes; `run` returns after the last worker has left the job.
        let work_static: *const (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(work) };
        {
            let mut state = self.lock();
            while state.workers < threads - 1 {
                let spawned = std::thread::Builder::new().name("fulgurite".into()).spawn(|| self.worker());
                if spawned.is_err() {
                    break; // fewer threads, same result
                }
                state.workers += 1;
            }
            state.job = Some(Job { work: work_static, next: &next, items, seats: threads - 1 });
            self.epoch.fetch_add(1, Ordering::Release);
        }
        self.wake.notify_all();
        let own = catch_unwind(AssertUnwindSafe(|| take_items(&next, items, work)));
        let mut state = self.lock();
        state.job = None; // nobody joins any more
        let mut spins = 0;
        while state.inside > 0 {
            // A worker is usually a fraction of an item away from done.
            drop(state);
            std::hint::spin_loop();
            spins += 1;
            state = self.lock();
            if spins > 2000 && state.inside > 0 {
                state = self.left.wait(state).unwrap_or_else(|e| e.into_inner());
            }
        }
        let panic = state.panic.take();
        drop(state);
        if let Err(cause) = own {
            resume_unwind(cause);
        }
        if let Some(cause) = panic {
            resume_unwind(cause);
        }
    }

    fn worker(&'static self) {
        IN_JOB.set(true);
        let mut seen = 0;
        loop {
            let started = Instant::now();
            while self.epoch.load(Ordering::Acquire) == seen && started.elapsed() < SPIN {
                for _ in 0..32 {
                    std::hint::spin_loop();
                }
            }
            let mut state = self.lock();
            let job = loop {
                let epoch = self.epoch.load(Ordering::Acquire);
                if epoch != seen {
                    seen = epoch;
                    if let Some(job) = &mut state.job
                        && job.seats > 0
                    {
                        job.seats -= 1;
                        break *job;
                    }
                }
                state = self.wake.wait(state).unwrap_or_else(|e| e.into_inner());
            };
            state.inside += 1;
            drop(state);
            let done = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: `inside` was raised under the lock while the job was open, so the caller of `run`
                // waits for this worker to leave before `work` and `next` end.
                let (next, work) = unsafe { (&*job.next, &*job.work) };
                take_items(next, job.items, work);
            }));
            let mut state = self.lock();
            state.inside -= 1;
            if let Err(cause) = done {
                state.panic.get_or_insert(cause);
            }
            drop(state);
            self.left.notify_all();
        }
    }
}

fn take_items(next: &AtomicUsize, items: usize, work: &(dyn Fn(usize) + Sync)) {
    let nested = IN_JOB.replace(true);
    // Also restored when `work` panics, so that the thread can serve later jobs.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_JOB.set(self.0);
        }
    }
    let _restore = Restore(nested);
    loop {
        let item = next.fetch_add(1, Ordering::Relaxed);
        if item >= items {
            return;
        }
        work(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_item_runs_once() {
        for threads in [1, 2, 3, 8] {
            for items in [0, 1, 2, 100] {
                let counts: Vec<AtomicU64> = (0..items).map(|_| AtomicU64::new(0)).collect();
                run(threads, items, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn nested_and_concurrent_jobs_finish() {
        let total = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        run(3, 5, &|_| run(3, 2, &|_| _ = total.fetch_add(1, Ordering::Relaxed)));
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 5 * 2);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let caught = catch_unwind(|| run(2, 64, &|i| assert!(i != 40, "item 40")));
        assert!(caught.is_err());
        run(2, 8, &|_| {});
    }
}
