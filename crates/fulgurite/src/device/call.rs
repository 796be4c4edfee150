//! A call whose tensors were checked, with its launches.

use fulgurite_kernels::operator::{Executable, Needs, Operator, Plan};
use fulgurite_ptx::device::{Launch, Module, Span};
use std::sync::{Arc, Mutex};

pub(crate) type ExecutableOf<O> = <<O as Operator>::Plan as Plan>::Executable;
/// Addresses and shapes of the tensors of a call.
pub(crate) type TensorsOf<O> = <ExecutableOf<O> as Executable>::Tensors;

/// A problem that is planned and compiled for a device.
pub struct Prepared<O: Operator> {
    pub(super) problem: O::Problem,
    pub(super) options: O::Options,
    pub(super) executable: ExecutableOf<O>,
    pub(super) modules: Vec<Module>,
}

impl<O: Operator> Prepared<O> {
    /// The problem of the call.
    pub fn problem(&self) -> &O::Problem {
        &self.problem
    }

    /// The options of the call.
    pub fn options(&self) -> &O::Options {
        &self.options
    }

    /// The plan with its kernels.
    pub fn executable(&self) -> &ExecutableOf<O> {
        &self.executable
    }
}

/// A call whose tensors fit its problem, with its launches. [`Session::run_call`](super::Session::run_call) enqueues it
/// again without checking the tensors again.
pub struct CheckedCall<O: Operator> {
    pub(super) prepared: Arc<Prepared<O>>,
    pub(super) tensors: TensorsOf<O>,
    pub(super) needs: Needs,
    /// The launches of the last run; `None` before the first.
    pub(super) planned: Mutex<Option<PlannedLaunches>>,
}

impl<O: Operator> CheckedCall<O> {
    /// A call with tensors that fit the problem. [`Executable::launches`] checks what the kernels can address; shapes and
    /// types are the caller's duty, as in [`Session::checked_forward`](super::Session::checked_forward).
    pub(crate) fn trusted(prepared: Arc<Prepared<O>>, tensors: TensorsOf<O>) -> CheckedCall<O> {
        let needs = prepared.executable.needs(&tensors);
        CheckedCall { prepared, tensors, needs, planned: Mutex::default() }
    }
}

impl<O: Operator> CheckedCall<O> {
    /// The problem, planned and compiled.
    pub(crate) fn prepared(&self) -> &Prepared<O> {
        &self.prepared
    }

    /// Whether launches copy tensors that the kernels cannot address.
    pub(crate) fn copies(&self) -> bool {
        self.needs.copies.is_some()
    }
}

/// The launches of a call, for one workspace.
pub(super) struct PlannedLaunches {
    pub spans: Spans,
    /// SMs that persistent kernels use.
    pub sms: u32,
    pub launches: Vec<(Module, Launch)>,
}

/// Memory of a workspace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Spans {
    pub counters: Option<Span>,
    pub scratch: Option<Span>,
    pub copies: Option<Span>,
}
