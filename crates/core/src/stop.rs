//! Computations that end before they are done: someone asked for it, or memory for intermediate results is refused.
//!
//! There is no result then, so the computation unwinds without a message, to the caller who can say so: [`catch`] turns
//! it into an error. Outputs hold arbitrary numbers afterwards. Long loops call [`poll`]; without a [`catch`] above them
//! it does nothing.

use crate::tensor::{TensorError, ask_memory};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a caller is asked: asking may take a lock that other threads need.
const PERIOD: Duration = Duration::from_millis(20);

/// Why a computation ended early.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Stopped {
    /// The caller asked for it.
    Asked,
    /// Memory was refused.
    Memory(TensorError),
}

/// Set when a job that several threads share has no result any more.
pub type Flag = Arc<AtomicBool>;

thread_local! {
    static ASK: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
    static ASKED: Cell<Option<Instant>> = const { Cell::new(None) };
    static JOB: RefCell<Option<Flag>> = const { RefCell::new(None) };
    /// How many calls of [`catch`] this thread is in.
    static CATCHES: Cell<usize> = const { Cell::new(0) };
}

/// Puts a thread-local value back, also when the work unwinds.
struct Restore<F: FnMut()>(F);

impl<F: FnMut()> Drop for Restore<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Runs `work`; with `ask` it ends early once `ask` returns true, which this thread calls some fifty times a second.
///
/// ```
/// use fulgurite_core::stop::{Stopped, catch, poll};
/// let endless = || {
///     loop {
///         poll();
///     }
/// };
/// assert_eq!(catch(Some(|| true), endless), Err::<(), _>(Stopped::Asked));
/// ```
pub fn catch<T>(ask: Option<fn() -> bool>, work: impl FnOnce() -> T) -> Result<T, Stopped> {
    CATCHES.set(CATCHES.get() + 1);
    let caught = match ask {
        None => catch_unwind(AssertUnwindSafe(work)),
        Some(_) => {
            let (before, asked) = (ASK.replace(ask), ASKED.replace(None));
            let _restore = Restore(|| {
                ASK.set(before);
                ASKED.set(asked);
            });
            catch_unwind(AssertUnwindSafe(work))
        }
    };
    CATCHES.set(CATCHES.get() - 1);
    caught.map_err(|cause| match cause.downcast::<Stopped>() {
        Ok(stopped) => *stopped,
        Err(panic) => resume_unwind(panic),
    })
}

/// Like [`catch`], for memory alone: what the caller asked for ends more than `work`.
pub fn catch_memory<T>(work: impl FnOnce() -> T) -> Result<T, TensorError> {
    catch(None, work).map_err(|stopped| match stopped {
        Stopped::Memory(refused) => refused,
        Stopped::Asked => resume_unwind(Box::new(Stopped::Asked)),
    })
}

/// Unwinds further with what ended a job. Where nobody will turn refused memory into an error, it is a panic with a
/// message.
pub fn resume(cause: Box<dyn Any + Send>) -> ! {
    let is_caught = CATCHES.get() > 0 || JOB.with_borrow(Option::is_some);
    match cause.downcast_ref::<Stopped>() {
        Some(Stopped::Memory(refused)) if !is_caught => panic!("{refused}"),
        _ => resume_unwind(cause),
    }
}

/// Unwinds if this thread's caller wants an end, or if the job that this thread works on has no result any more.
#[inline]
pub fn poll() {
    if JOB.with_borrow(|job| job.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed))) {
        resume_unwind(Box::new(Stopped::Asked));
    }
    if let Some(ask) = ASK.get() {
        poll_caller(ask);
    }
}

#[cold]
fn poll_caller(ask: fn() -> bool) {
    let now = Instant::now();
    match ASKED.get() {
        Some(last) if now.duration_since(last) < PERIOD => {}
        None => ASKED.set(Some(now)),
        Some(_) => {
            ASKED.set(Some(now));
            if ask() {
                resume_unwind(Box::new(Stopped::Asked));
            }
        }
    }
}

/// Runs this thread's part of a job: [`poll`] also looks at `flag` meanwhile.
pub fn in_job<T>(flag: &Flag, work: impl FnOnce() -> T) -> T {
    let mut before = JOB.replace(Some(flag.clone()));
    let _restore = Restore(move || {
        JOB.replace(before.take());
    });
    work()
}

/// Which of two causes of unwinding to report: a panic before refused memory, and that before a wish.
pub fn rank(cause: &(dyn Any + Send)) -> u8 {
    match cause.downcast_ref::<Stopped>() {
        None => 2,
        Some(Stopped::Memory(_)) => 1,
        Some(Stopped::Asked) => 0,
    }
}

/// `n` zeros for intermediate results. Unwinds if the process cannot have the memory.
///
/// ```
/// use fulgurite_core::stop::{catch_memory, zeros};
/// assert_eq!(catch_memory(|| zeros::<f32>("sums", 3)).unwrap(), [0.0; 3]);
/// let refused = catch_memory(|| zeros::<f64>("sums", 1 << 56)).unwrap_err().to_string();
/// assert!(refused.starts_with("sums needs 576460752303423488 bytes"), "{refused}");
/// ```
pub fn zeros<T: Clone + Default>(what: impl Display, n: usize) -> Vec<T> {
    ask(what, n.saturating_mul(size_of::<T>()));
    vec![T::default(); n]
}

/// Unwinds if the process cannot have this much memory for intermediate results.
pub fn ask(what: impl Display, bytes: usize) {
    if let Err(refused) = ask_memory(what, bytes) {
        resume(Box::new(Stopped::Memory(refused)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_passes_a_catch_of_memory() {
        let inner = || catch_memory(|| resume_unwind(Box::new(Stopped::Asked)));
        assert_eq!(catch(None, inner), Err::<Result<(), _>, _>(Stopped::Asked));
    }

    #[test]
    fn refused_memory_without_a_catch_has_a_message() {
        let caught = catch_unwind(|| ask("sums", usize::MAX / 2)).unwrap_err();
        assert!(caught.downcast_ref::<String>().is_some_and(|text| text.starts_with("sums needs")));
    }

    #[test]
    fn panics_pass() {
        let caught = catch_unwind(|| catch(Some(|| true), || panic!("a panic")));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"a panic"));
        assert!(ASK.get().is_none());
    }

    #[test]
    fn without_a_caller_nothing_ends() {
        poll();
        let flag = Flag::default();
        in_job(&flag, poll);
        flag.store(true, Ordering::Relaxed);
        assert_eq!(catch(None, || in_job(&flag, poll)), Err(Stopped::Asked));
        poll();
    }
}
