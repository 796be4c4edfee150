//! A session: a device with its compiled kernels, prepared calls and workspaces.
//!
//! It has two caches: problem -> prepared call (here), and plan -> compiled kernels (`modules`). A [`CheckedCall`] stores its
//! launches, so a program that repeats a call should keep the `CheckedCall`.

use super::aliasing;
use super::call::{CheckedCall, PlannedLaunches, Prepared, Spans};
use super::modules::{Modules, is_of};
use super::tensors::{self, Misfit};
use super::workspace::{WorkspaceGuard, Workspaces};
use crate::{Error, Unsupported};
use fulgurite_core::lru::Lru;
use fulgurite_core::outputs::{check_o_of, lse_fits};
use fulgurite_core::{DType, DeviceId, GradientOutputs, Inputs, Place, Problem, Saved, TensorViewMut};
use fulgurite_kernels::gemm::plan::{Gemm, Matrix};
use fulgurite_kernels::gemm::product::{Product, ProductOptions};
use fulgurite_kernels::operator::{Backward, Executable, Forward, Memory, Needs, Operator, Plan, Refusal, Tables};
use fulgurite_kernels::parts::results::ResultType;
use fulgurite_ptx::BuildError;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Launch, Module, Span, Stream, Value, check_launch};
use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

/// Number of prepared calls that are kept.
const MAX_PREPARED: usize = 512;

/// A device, the kernels compiled for it, and the memory that its launches need.
///
/// ```
/// use fulgurite::gpu::{DeviceSpan, Forward, ForwardOptions, Session, Stream, Tables};
/// use fulgurite::sim::{Device, Sim};
/// use fulgurite::{DType, Inputs, Problem, TensorView, TensorViewMut};
/// use std::sync::Arc;
///
/// let sim = Arc::new(Sim::default());
/// let session = Session::new(sim.clone(), Tables::default());
/// let problem = Problem::builder().dense(1, 16, 16).heads(1, 1).head_dim(64).dtype(DType::Bf16).build()?;
/// let prepared = session.prepare::<Forward>(&problem, &ForwardOptions::default())?;
///
/// let buffers = [sim.zeroed(2048)?, sim.zeroed(2048)?, sim.zeroed(2048)?, sim.allocate(2048)?];
/// let [q, k, v, o] = buffers.each_ref().map(|buffer| DeviceSpan::of(&*sim, buffer));
/// let view = |memory| TensorView::on_device(memory, DType::Bf16, &[1, 16, 1, 64], None);
/// let inputs = Inputs::new(view(&q)?, view(&k)?, view(&v)?);
/// let mut o = TensorViewMut::on_device(&o, DType::Bf16, &[1, 16, 1, 64], None)?;
/// session.forward(&prepared, &inputs, &mut o, None, Stream::default())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Session<D: Device + ?Sized> {
    tables: Tables,
    modules: Modules,
    workspaces: Workspaces,
    /// Prepared calls of all operators together: `Arc<Prepared<O>>` without its type.
    prepared: Mutex<Lru<Box<dyn Any + Send + Sync>>>,
    /// Memory for LSEs that the caller does not read. Old buffers live as long as the session, because captured launches write
    /// to them.
    unread: Mutex<Vec<Buffer>>,
    /// SMs that persistent kernels leave to others, such as to communication.
    sm_margin: AtomicU32,
    device: Arc<D>,
}

impl<D: Device + ?Sized> Session<D> {
    /// A session on a device, with these tile configurations.
    pub fn new(device: Arc<D>, tables: Tables) -> Session<D> {
        let (modules, workspaces, unread, sm_margin) = Default::default();
        let prepared = Mutex::new(Lru::new(MAX_PREPARED));
        Session { tables, modules, workspaces, prepared, unread, sm_margin, device }
    }

    /// The device of the session.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// The tile configurations of the session.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The device as tensors identify it.
    pub fn id(&self) -> DeviceId {
        let (kind, number) = self.device.place();
        DeviceId { kind, number }
    }

    /// Sets how many SMs persistent kernels leave free from now on, so that kernels of communication run beside them. At
    /// least one SM computes. Results do not change.
    pub fn set_sm_margin(&self, count: u32) {
        self.sm_margin.store(count, Ordering::Relaxed);
    }

    /// SMs on which persistent kernels run.
    fn sms(&self) -> u32 {
        self.device.multiprocessors().saturating_sub(self.sm_margin.load(Ordering::Relaxed)).max(1)
    }

    /// Plans a problem without compiling anything.
    pub fn plan<O: Operator>(&self, problem: &O::Problem, options: &O::Options) -> Result<O::Plan, Error> {
        O::plan(problem, options, self.device.target(), &self.tables).map_err(|e| self.refuse(e))
    }

    /// Plans and compiles a problem. The last 512 are cached.
    pub fn prepare<O: Operator>(&self, problem: &O::Problem, options: &O::Options) -> Result<Arc<Prepared<O>>, Error>
    where
        O::Plan: Clone,
    {
        let all = || self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let as_ours = |entry: &Box<dyn Any + Send + Sync>| entry.downcast_ref::<Arc<Prepared<O>>>().cloned();
        let same = |entry: &Box<dyn Any + Send + Sync>| {
            entry
                .downcast_ref::<Arc<Prepared<O>>>()
                .is_some_and(|known| known.problem() == problem && known.options() == options)
        };
        if let Some(known) = all().find(same).and_then(as_ours) {
            return Ok(known);
        }
        let plan = self.plan::<O>(problem, options)?;
        let (kernels, modules) = self.modules.get(&*self.device, &plan, |e| self.unbuilt(e))?;
        let (problem, options) = (problem.clone(), options.clone());
        let prepared = Arc::new(Prepared { problem, options, executable: plan.with_kernels(kernels), modules });
        all().insert(Box::new(prepared.clone()));
        Ok(prepared)
    }

    /// Enqueues the launches of a checked call on a stream, without waiting. The first run plans and checks all launches before it
    /// enqueues one; later runs in the same workspace enqueue the same launches.
    pub fn run_call<O: Operator>(&self, call: &CheckedCall<O>, stream: Stream<'_>) -> Result<(), Error> {
        let workspace = self.workspaces.of(&*self.device, stream)?;
        let mut guard = workspace.lock();
        let spans = self.spans(&mut guard, &call.needs)?;
        // If another thread runs the same call, this one plans its launches separately.
        let kept = match call.planned.try_lock() {
            Ok(kept) => Some(kept),
            Err(TryLockError::Poisoned(kept)) => Some(kept.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let (mut kept, mut own) = (kept, None);
        let planned = kept.as_deref_mut().unwrap_or(&mut own);
        let sms = self.sms();
        if planned.as_ref().is_none_or(|planned| planned.spans != spans || planned.sms != sms) {
            *planned = Some(PlannedLaunches { spans, sms, launches: self.launches(call, &spans, sms)? });
        }
        let launches = || planned.iter().flat_map(|planned| &planned.launches);
        guard.hold(launches().map(|(module, _)| module));
        for (module, launch) in launches() {
            self.device.launch(module, launch.grid, &launch.args, stream)?;
        }
        Ok(())
    }

    /// The launches of a call on the default stream, in order, for a caller that runs them one by one. Their memory belongs
    /// to the session.
    pub(crate) fn planned<O: Operator>(&self, call: &CheckedCall<O>) -> Result<Vec<(Module, Launch)>, Error> {
        let workspace = self.workspaces.of(&*self.device, Stream::default())?;
        let spans = self.spans(&mut workspace.lock(), &call.needs)?;
        self.launches(call, &spans, self.sms())
    }

    /// The workspace memory that a call needs.
    fn spans(&self, guard: &mut WorkspaceGuard<'_>, needs: &Needs) -> Result<Spans, DeviceError> {
        let device = &*self.device;
        let wanted = |bytes: u64| (bytes > 0).then_some(bytes);
        Ok(Spans {
            counters: wanted(needs.counter_bytes).map(|bytes| guard.counters(device, bytes)).transpose()?,
            scratch: wanted(needs.scratch_bytes).map(|bytes| guard.scratch(device, bytes)).transpose()?,
            copies: needs.copies.as_ref().map(|copies| guard.copies(device, copies.bytes())).transpose()?,
        })
    }

    /// The launches of a call, each checked and paired with its module.
    fn launches<O: Operator>(
        &self,
        call: &CheckedCall<O>,
        spans: &Spans,
        sms: u32,
    ) -> Result<Vec<(Module, Launch)>, Error> {
        let prepared = &call.prepared;
        let copying = match spans.copies {
            Some(_) => Some(self.modules.copying(&*self.device, |e| self.unbuilt(e))?),
            None => None,
        };
        let memory = Memory {
            counters: spans.counters.unwrap_or(Span::new(0, 0)),
            scratch: spans.scratch,
            copies: copying.as_ref().map(|(kernels, _)| kernels.clone()).zip(spans.copies),
        };
        let launches = prepared.executable.launches(&call.tensors, &memory, sms);
        let launches = launches.map_err(|e| self.refuse(e))?;
        let loaded = || prepared.modules.iter().chain(copying.iter().flat_map(|(_, modules)| modules));
        let with_module = |launch: Launch| {
            let module = loaded().find(|module| is_of(module, &launch.kernel));
            let module = module.ok_or_else(|| DeviceError::Failed {
                call: "launch",
                what: format!("bug in fulgurite: kernel `{}` was not compiled", launch.kernel.name),
            })?;
            check_launch(&launch.kernel, launch.grid, &launch.args).map_err(DeviceError::from)?;
            launch.args.iter().filter_map(span_of_value).try_for_each(|span| self.device.check_memory(span))?;
            Ok((module.clone(), launch))
        };
        Ok(launches.into_iter().map(with_module).collect::<Result<_, DeviceError>>()?)
    }

    /// Enqueues forward attention on a stream, without waiting. Writes o, and the LSE if it is given.
    pub fn forward(
        &self,
        prepared: &Arc<Prepared<Forward>>,
        inputs: &Inputs<'_>,
        o: &mut TensorViewMut<'_>,
        lse: Option<&mut TensorViewMut<'_>>,
        stream: Stream<'_>,
    ) -> Result<(), Error> {
        self.run_call(&self.checked_forward(prepared, inputs, o, lse)?, stream)
    }

    /// Checks the tensors of forward attention, and enqueues nothing.
    pub fn checked_forward(
        &self,
        prepared: &Arc<Prepared<Forward>>,
        inputs: &Inputs<'_>,
        o: &mut TensorViewMut<'_>,
        lse: Option<&mut TensorViewMut<'_>>,
    ) -> Result<CheckedCall<Forward>, Error> {
        let (problem, id) = (prepared.problem(), self.id());
        let bound = inputs.bind_on(problem, id)?;
        check_o_of(o, problem, result_dtype(problem, prepared.options().results), Place::Device(id))?;
        let lse = lse.map(|lse| lse.as_view());
        aliasing::check_forward(inputs, o, lse.as_ref())?;
        let lse = match lse {
            Some(view) => {
                lse_fits("lse", &view, problem, Place::Device(id))?;
                super::memory::span_of("lse", &view)?
            }
            None => self.unread(4 * problem.lse_dims().count() as u64)?,
        };
        let tensors = tensors::forward(&bound, o, lse, prepared.options().sinks).map_err(|e| self.misfit(e))?;
        Ok(CheckedCall::trusted(prepared.clone(), tensors))
    }

    /// Enqueues the gradients of attention on a stream, without waiting.
    pub fn backward(
        &self,
        prepared: &Arc<Prepared<Backward>>,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        stream: Stream<'_>,
    ) -> Result<(), Error> {
        self.run_call(&self.checked_backward(prepared, inputs, saved, gradients)?, stream)
    }

    /// Checks the tensors of the gradients of attention, and enqueues nothing.
    pub fn checked_backward(
        &self,
        prepared: &Arc<Prepared<Backward>>,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
    ) -> Result<CheckedCall<Backward>, Error> {
        let (problem, id) = (prepared.problem(), self.id());
        let bound = inputs.bind_on(problem, id)?;
        saved.check_on(problem, Place::Device(id))?;
        gradients.check_of(problem, result_dtype(problem, prepared.options().results), Place::Device(id))?;
        aliasing::check_backward(inputs, saved, gradients)?;
        let tensors = tensors::backward(&bound, saved, gradients).map_err(|e| self.misfit(e))?;
        Ok(CheckedCall::trusted(prepared.clone(), tensors))
    }

    /// Enqueues C = A B on a stream, without waiting.
    pub fn product(&self, gemm: &Gemm, matrices: [Matrix; 3], stream: Stream<'_>) -> Result<(), Error> {
        self.run_call(
            &CheckedCall::trusted(self.prepare::<Product>(gemm, &ProductOptions::default())?, matrices),
            stream,
        )
    }

    /// Memory for an LSE that the caller does not read; several launches may write it concurrently.
    fn unread(&self, bytes: u64) -> Result<Span, DeviceError> {
        let mut unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner);
        match unread.last().map(Buffer::span) {
            Some(span) if span.bytes() >= bytes => Ok(span),
            _ => {
                // At least double the size, so that all older buffers together are smaller than the newest.
                let fresh = self.device.allocate(bytes.next_power_of_two().max(1 << 16))?;
                let span = fresh.span();
                unread.push(fresh);
                Ok(span)
            }
        }
    }

    /// Number of blocks that forward attention has recomputed, over all launches with the stream's current counters. A call that
    /// needs more counters starts anew.
    pub(super) fn blocks_redone(&self, prepared: &Prepared<Forward>, stream: Stream<'_>) -> Result<u32, DeviceError> {
        let (device, bytes) = (&*self.device, prepared.executable().plan().counter_bytes());
        let counters = self.workspaces.of(device, stream)?.lock().counters(device, bytes)?;
        let mut word = [0; 4];
        device.download(counters.from(4).first(4), &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn refuse(&self, refusal: Refusal) -> Error {
        match refusal {
            Refusal::NoKernel(missing) => self.unsupported(missing.feature, "the engine `cpu` has it"),
            Refusal::Gemm(e) => e.into(),
            Refusal::Tensors(e) => e.into(),
            other => self.unsupported(other.to_string(), "the engine `cpu` has it"),
        }
    }

    fn misfit(&self, misfit: Misfit) -> Error {
        match misfit {
            Misfit::Input(e) => e,
            Misfit::Refused(e) => self.refuse(e),
        }
    }

    fn unsupported(&self, feature: String, instead: &str) -> Error {
        let engine = self.id().kind.into();
        Unsupported { engine, feature, instead: instead.into() }.into()
    }

    /// The error for a tile configuration that has no kernel, from the tables or from the caller.
    fn unbuilt(&self, e: BuildError) -> Error {
        let whose = match self.tables == Tables::default() {
            true => "this tile configuration".into(),
            false => format!("the tile configuration that the profile of {} has", self.device.name()),
        };
        self.unsupported(format!("a kernel with {whose}: {e}"), "choose another tile configuration")
    }
}

/// The element type of results.
fn result_dtype(problem: &Problem, results: ResultType) -> DType {
    if results.is_f32() { DType::F32 } else { problem.dtype() }
}

/// The memory to which a launch argument points.
fn span_of_value(value: &Value) -> Option<Span> {
    match value {
        Value::Pointer(span) => Some(*span),
        Value::Tensor(tensor) => Some(tensor.span),
        _ => None,
    }
}
