//! Work without the GIL, which ends early when a Python signal handler raises: Ctrl-C does not wait for a long call.

use crate::array::refuse;
use fulgurite_core::stop::{self, Stopped};
use pyo3::exceptions::{PyImportError, PyKeyboardInterrupt};
use pyo3::ffi::{PyInterpreterState_Get, PyInterpreterState_GetID};
use pyo3::prelude::*;
use std::cell::Cell;

thread_local! {
    /// What a signal handler raised during the work of this thread.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// Runs signal handlers that are due; Python does so in the main thread only. True if one raised.
fn is_interrupted() -> bool {
    Python::attach(|py| py.check_signals()).is_err_and(|raised| {
        RAISED.set(Some(raised));
        true
    })
}

/// Runs `work` without the GIL. An exception of a signal handler ends it, and so does memory that is refused; outputs
/// hold arbitrary numbers then.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| stop::catch(Some(is_interrupted), work)).map_err(|stopped| match stopped {
        Stopped::Memory(refused) => refuse(refused.into()),
        _ => RAISED.take().unwrap_or_else(|| PyKeyboardInterrupt::new_err(())),
    })
}

/// Refuses to be imported in a sub-interpreter: what is kept between calls would mix up the objects of two interpreters.
pub fn only_in_the_main_interpreter() -> PyResult<()> {
    // SAFETY: a module is initialised by a thread that is attached to an interpreter, whose state these functions read.
    let number = unsafe { PyInterpreterState_GetID(PyInterpreterState_Get()) };
    if number == 0 {
        return Ok(());
    }
    Err(PyImportError::new_err(format!(
        "fulgurite was imported in sub-interpreter {number}, allowed: the main interpreter of a process; use threads, whose \
         calls run without the GIL, or processes"
    )))
}
