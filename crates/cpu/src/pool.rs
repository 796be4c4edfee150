//! A pool of threads for kernels.
//!
//! Spawning threads for each fork-join costs tens of microseconds. Here a caller wakes threads that spin for a short
//! while and then sleep. A shared counter hands out items one by one, and the caller takes items too, so a worker that
//! wakes late (or never, on a busy machine) delays nothing. The result of an item must not depend on the thread that
//! runs it.
//!
//! Several callers share the workers: a worker that has finished an item moves to a job with fewer workers.
//!
//! An item that unwinds ends its job: no further item is handed out, and items that wait for others call `stop::poll`,
//! which then unwinds too.

use fulgurite_core::stop;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a worker spins after a job before it sleeps: longer than the gap between the calls of a layer, and too
/// short for other processes to notice.
const SPIN: Duration = Duration::from_micros(200);

/// How long workers beyond the number of cores sleep before they exit.
const IDLE: Duration = Duration::from_secs(5);

/// How often a caller who waits for the last workers looks whether the job should end early.
const LOOK: Duration = Duration::from_millis(20);

/// A job as workers see it. The caller keeps it alive until the last worker has left.
struct Job {
    number: usize,
    work: *const (dyn Fn(usize) + Sync),
    next: *const AtomicUsize,
    items: usize,
    /// Set when an item has unwound.
    over: stop::Flag,
    /// Workers that may still join; `inside`: those that have.
    seats: usize,
    inside: usize,
    panic: Option<Box<dyn Any + Send>>,
}

// SAFETY: the pointers are used only while the job is in the list, and its caller waits in `run` until it removes it.
unsafe impl Send for Job {}

impl Job {
    /// Whether a worker could take an item.
    fn is_open(&self) -> bool {
        // SAFETY: the job is in the list, so the caller's counter is alive.
        self.seats > 0 && !self.is_over() && unsafe { &*self.next }.load(Ordering::Relaxed) < self.items
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Ends the job, and keeps the more important one of two causes.
    fn end(&mut self, cause: Box<dyn Any + Send>) {
        self.over.store(true, Ordering::Relaxed);
        if self.panic.as_ref().is_none_or(|known| stop::rank(&**known) < stop::rank(&*cause)) {
            self.panic = Some(cause);
        }
    }
}

struct State {
    jobs: Vec<Job>,
    /// Number of jobs so far.
    count: usize,
    workers: usize,
}

impl State {
    fn job(&mut self, number: usize) -> &mut Job {
        let found = self.jobs.iter_mut().find(|job| job.number == number);
        found.expect("bug in fulgurite: a job ended before its workers")
    }

    /// The open job with the fewest workers.
    fn neediest(&mut self) -> Option<&mut Job> {
        self.jobs.iter_mut().filter(|job| job.is_open()).min_by_key(|job| job.inside)
    }
}

struct Pool {
    /// The process that owns these threads: a child of `fork` has none of them.
    process: u32,
    state: Mutex<State>,
    wake: Condvar,
    left: Condvar,
    /// Incremented with every job, so that spinning workers need no lock.
    epoch: AtomicUsize,
    /// Number of jobs in the list: if there is one, workers need not look for another.
    open: AtomicUsize,
}

static POOL: AtomicPtr<Pool> = AtomicPtr::new(null_mut());

thread_local! {
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// The default number of threads of a call.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Runs `work(0)` to `work(items - 1)`, each once, on at most `threads` threads, and returns when all are done.
pub fn run(threads: usize, items: usize, work: &(dyn Fn(usize) + Sync)) {
    if threads.min(items) <= 1 || IN_JOB.get() {
        return (0..items).for_each(|item| {
            stop::poll();
            work(item);
        });
    }
    Pool::get().run(threads.min(items), items, work);
}

/// Runs `work(i, item)` for each item, on at most `threads` threads: for items that own the part of a result that they
/// write.
pub fn each<T: Send>(threads: usize, items: impl IntoIterator<Item = T>, work: impl Fn(usize, T) + Sync) {
    let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    run(threads, items.len(), &|i| {
        let item = items[i].lock().unwrap_or_else(|e| e.into_inner()).take();
        work(i, item.expect("bug in fulgurite: an item was handed out twice"));
    });
}

impl Pool {
    /// The pool of this process. A child of `fork` gets its own: the parent's threads are gone, and its locks may be
    /// held.
    fn get() -> &'static Pool {
        let process = std::process::id();
        let found = POOL.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or a pool that was leaked below.
        if let Some(pool) = unsafe { found.as_ref() }
            && pool.process == process
        {
            return pool;
        }
        let new = Box::into_raw(Box::new(Pool {
            process,
            state: Mutex::new(State { jobs: Vec::new(), count: 0, workers: 0 }),
            wake: Condvar::new(),
            left: Condvar::new(),
            epoch: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
        }));
        match POOL.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it was leaked just now, and is never freed.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: nothing else has seen it.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: another thread of this process leaked it, and it is never freed.
                unsafe { &*other }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while the lock is held, so a poisoned lock is still consistent.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn run(&'static self, threads: usize, items: usize, work: &(dyn Fn(usize) + Sync)) {
        let (next, over) = (AtomicUsize::new(0), stop::Flag::default());
        // SAFETY: only the lifetime changes; `run` returns after the last worker has left the job.
        let work_static: *const (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(work) };
        let number = {
            let mut state = self.lock();
            while state.workers < threads - 1 {
                let spawned = std::thread::Builder::new().name("fulgurite".into()).spawn(|| self.worker());
                if spawned.is_err() {
                    break; // fewer threads, same result
                }
                state.workers += 1;
            }
            state.count += 1;
            let number = state.count;
            let (seats, inside, panic, over) = (threads - 1, 0, None, over.clone());
            state.jobs.push(Job { number, work: work_static, next: &next, items, over, seats, inside, panic });
            self.open.store(state.jobs.len(), Ordering::Relaxed);
            self.epoch.fetch_add(1, Ordering::Release);
            number
        };
        self.wake.notify_all();
        let own = catch_unwind(AssertUnwindSafe(|| take_items(&next, items, work, &over, || false)));
        let mut state = self.lock();
        state.job(number).seats = 0; // nobody joins any more
        if let Err(cause) = own {
            state.job(number).end(cause);
        }
        let mut spins = 0;
        while state.job(number).inside > 0 {
            // A worker is usually only a fraction of an item away from the end.
            drop(state);
            if spins < 2000 {
                std::hint::spin_loop();
            } else if !over.load(Ordering::Relaxed)
                && let Err(cause) = catch_unwind(stop::poll)
            {
                self.lock().job(number).end(cause);
            }
            spins += 1;
            state = self.lock();
            if spins > 2000 && state.job(number).inside > 0 {
                (state, _) = self.left.wait_timeout(state, LOOK).unwrap_or_else(|e| e.into_inner());
            }
        }
        let panic = state.job(number).panic.take();
        state.jobs.retain(|job| job.number != number);
        self.open.store(state.jobs.len(), Ordering::Relaxed);
        drop(state);
        if let Some(cause) = panic {
            stop::resume(cause);
        }
    }

    /// Whether another job needs a worker of this job more.
    fn is_missed(&self, number: usize) -> bool {
        if self.open.load(Ordering::Relaxed) < 2 {
            return false;
        }
        let mut state = self.lock();
        let here = state.job(number).inside;
        // It would count as one more worker there.
        state.neediest().is_some_and(|job| job.number != number && job.inside + 1 < here)
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
            let (number, work, next, items, over) = loop {
                seen = self.epoch.load(Ordering::Acquire);
                if let Some(job) = state.neediest() {
                    job.seats -= 1;
                    job.inside += 1;
                    break (job.number, job.work, job.next, job.items, job.over.clone());
                }
                let (back, slept) = self.wake.wait_timeout(state, IDLE).unwrap_or_else(|e| e.into_inner());
                state = back;
                if slept.timed_out() && state.workers >= default_threads() {
                    state.workers -= 1;
                    return;
                }
            };
            drop(state);
            let done = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: `inside` was raised under the lock while the job was in the list, so the caller of `run`
                // waits for this worker to leave before `work` and `next` end.
                let (next, work) = unsafe { (&*next, &*work) };
                take_items(next, items, work, &over, || self.is_missed(number));
            }));
            let mut state = self.lock();
            let job = state.job(number);
            job.inside -= 1;
            if let Err(cause) = done {
                job.end(cause);
            }
            // Its seat is free again, unless the caller is about to leave.
            job.seats += usize::from(job.is_open());
            drop(state);
            self.left.notify_all();
        }
    }
}

/// Takes items until none are left, the job is over, or `leave` returns true.
fn take_items(
    next: &AtomicUsize,
    items: usize,
    work: &(dyn Fn(usize) + Sync),
    over: &stop::Flag,
    leave: impl Fn() -> bool,
) {
    let nested = IN_JOB.replace(true);
    // Restored even if `work` panics, so that the thread can serve later jobs.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_JOB.set(self.0);
        }
    }
    let _restore = Restore(nested);
    stop::in_job(over, || {
        loop {
            stop::poll();
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            work(item);
            if leave() {
                return;
            }
        }
    });
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
        // The pool must not only finish, but use as many threads as before.
        for _ in 0..3 {
            assert_eq!(threads_of(2, 1), 2);
        }
    }

    /// An item that waits for another one must not wait for ever when that one has panicked.
    #[test]
    fn a_panic_ends_items_that_wait() {
        let caught = catch_unwind(|| {
            run(2, 2, &|i| {
                assert!(i == 0, "item 1");
                loop {
                    stop::poll();
                }
            })
        });
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"item 1"));
    }

    #[test]
    fn a_wish_ends_all_items() {
        for threads in [1, 2, 3] {
            let done = AtomicU64::new(0);
            let work = |_| {
                done.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            };
            let ended = stop::catch(Some(|| true), || run(threads, 1 << 20, &work));
            assert_eq!(ended, Err(stop::Stopped::Asked));
            assert!(done.into_inner() < 10_000);
        }
        assert_eq!(threads_of(2, 1), 2);
    }

    /// The number of threads that take part in a job whose items wait for each other; `callers` run one such job each
    /// at a time.
    fn threads_of(threads: usize, callers: usize) -> usize {
        let one = || {
            let ids = Mutex::new(std::collections::HashSet::new());
            let started = Instant::now();
            run(threads, threads * 64, &|_| {
                ids.lock().unwrap().insert(std::thread::current().id());
                // Wait until all threads are there, or long enough that they could be.
                while ids.lock().unwrap().len() < threads && started.elapsed() < Duration::from_secs(2) {
                    std::thread::yield_now();
                }
            });
            ids.into_inner().unwrap().len()
        };
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..callers).map(|_| scope.spawn(one)).collect();
            all.into_iter().map(|caller| caller.join().unwrap()).min().unwrap()
        })
    }

    #[test]
    fn several_callers_share_the_workers() {
        // A long job has both workers, then another caller arrives, and one worker moves to it.
        let (entered, over) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                run(3, 1 << 20, &|_| {
                    entered.fetch_add(1, Ordering::Relaxed);
                    if over.load(Ordering::Relaxed) == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                })
            });
            while entered.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
            let ids = Mutex::new(std::collections::HashSet::new());
            let started = Instant::now();
            run(3, 4000, &|_| {
                ids.lock().unwrap().insert(std::thread::current().id());
                if ids.lock().unwrap().len() < 2 && started.elapsed() < Duration::from_secs(20) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            over.store(1, Ordering::Relaxed);
            assert!(ids.into_inner().unwrap().len() >= 2, "the second caller worked alone");
        });
    }
}
