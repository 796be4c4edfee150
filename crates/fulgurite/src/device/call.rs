//! A call whose tensors were checked, with its launches.

use fulgurite_kernels::operator::{Executable, Needs, Operator, Plan};
use fulgurite_ptx::device::{Launch, Module, Span};
use std::sync::{Arc, Mutex};

pub(super) type ExecutableOf<O> = <<O as Operator>::Plan as Plan>::Executable;
pub(super) type TensorsOf<O> = <ExecutableOf<O> as Executable>::Tensors;

/// A problem with its plan and its compiled kernels.
pub(super) struct Compiled<O: Operator> {
    pub problem: O::Problem,
    pub options: O::Options,
    pub executable: ExecutableOf<O>,
    pub modules: Vec<Module>,
}

/// A call whose tensors fit its problem, with its launches. [`Session::run_call`](super::Session::run_call) enqueues it
/// again without checking the tensors again.
pub struct CheckedCall<O: Operator> {
    pub(super) compiled: Arc<Compiled<O>>,
    pub(super) tensors: TensorsOf<O>,
    pub(super) needs: Needs,
    /// The launches of the last run; `None` before the first.
    pub(super) planned: Mutex<Option<PlannedLaunches>>,
}

impl<O: Operator> CheckedCall<O> {
    pub(super) fn new(compiled: Arc<Compiled<O>>, tensors: TensorsOf<O>) -> CheckedCall<O> {
        let needs = compiled.executable.needs(&tensors);
        CheckedCall { compiled, tensors, needs, planned: Mutex::default() }
    }
}

/// The launches of a call, for one workspace.
pub(super) struct PlannedLaunches {
    pub spans: Spans,
    pub launches: Vec<(Module, Launch)>,
}

/// Memory of a workspace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Spans {
    pub counters: Option<Span>,
    pub scratch: Option<Span>,
    pub copies: Option<Span>,
}
