//! The interface of engines.

use crate::Error;
use fulgurite_core::{Forward, GradientOutputs, Gradients, Inputs, Outputs, Problem, Saved};
use fulgurite_cpu::Counters;
use fulgurite_ptx::device::Stream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use thiserror::Error;

/// An engine that computes attention.
///
/// Every engine accepts each [`Problem`] that it supports, checks the tensors against it before any work, and agrees
/// with the f64 oracle up to rounding.
///
/// ```
/// use fulgurite::{Choice, Inputs, Problem, Run, Tensor, engine};
///
/// let problem = Problem::builder().dense(1, 2, 2).heads(1, 1).head_dim(4).build()?;
/// let x = Tensor::new(vec![0.5f32; 8], &[1, 2, 1, 4])?;
/// let inputs = Inputs::new(x.view(), x.view(), x.view());
///
/// let engine = engine(Choice::Best)?;
/// engine.supports(&problem)?;
/// let forward = engine.forward(&problem, &inputs, &Run::default())?;
/// let gradients = engine.backward(&problem, &inputs, &forward.saved(x.view()), &Run::default())?;
/// assert_eq!(gradients.d_q.shape(), x.shape());
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub trait Engine: Send + Sync {
    /// The name that chooses this engine, such as `cpu:avx2`.
    fn name(&self) -> &str;

    /// Describes this engine on this machine in one line.
    fn describe(&self) -> String;

    /// Whether this engine supports the problem.
    fn supports(&self, problem: &Problem) -> Result<(), Unsupported>;

    /// Computes attention into the caller's tensors.
    fn forward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error>;

    /// Computes the gradients of attention into the caller's tensors.
    fn backward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error>;

    /// Computes attention into new tensors.
    fn forward(&self, problem: &Problem, inputs: &Inputs<'_>, run: &Run<'_>) -> Result<Forward, Error> {
        // Check everything before allocating: invalid offsets may name more rows than exist.
        self.supports(problem)?;
        inputs.bind_without_content_check(problem)?;
        let mut forward = Forward::zeros(problem)?;
        self.forward_into(problem, inputs, &mut forward.outputs(), run)?;
        Ok(forward)
    }

    /// Computes the gradients of attention into new tensors.
    fn backward(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        run: &Run<'_>,
    ) -> Result<Gradients, Error> {
        self.supports(problem)?;
        inputs.bind_without_content_check(problem)?;
        saved.check(problem)?;
        let mut gradients = Gradients::zeros(problem)?;
        self.backward_into(problem, inputs, saved, &mut gradients.outputs(), run)?;
        Ok(gradients)
    }
}

/// Per-call options besides the problem and its tensors.
///
/// ```
/// use fulgurite::{Run, Tally};
/// let tally = Tally::default();
/// let run = Run::default().tally(&tally);
/// # let _ = run;
/// ```
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Run<'a> {
    /// Receives the counters of the call, if given.
    pub tally: Option<&'a Tally>,
    /// Times the call's work, if given.
    pub stopwatch: Option<&'a Stopwatch>,
    /// The stream for tensors on a device. The call returns when its launches are enqueued.
    pub stream: Stream<'a>,
}

impl<'a> Run<'a> {
    /// Adds the call's counters to `tally`.
    pub fn tally(mut self, tally: &'a Tally) -> Self {
        self.tally = Some(tally);
        self
    }

    /// Enqueues launches on this stream, for tensors on a device.
    pub fn stream(mut self, stream: Stream<'a>) -> Self {
        self.stream = stream;
        self
    }

    /// Times the work separately, in repeated runs, if the call also does other work such as copies.
    pub fn stopwatch(mut self, stopwatch: &'a Stopwatch) -> Self {
        self.stopwatch = Some(stopwatch);
        self
    }
}

/// Times the work of a call separately. An engine whose calls also copy tensors to a device and back repeats the work
/// for `rounds` rounds and reports their times by the device's clock. Other engines report nothing.
///
/// ```
/// use fulgurite::Stopwatch;
/// let watch = Stopwatch::rounds(3);
/// assert!(watch.seconds().is_empty());
/// ```
#[derive(Debug)]
pub struct Stopwatch {
    rounds: usize,
    seconds: Mutex<Vec<f64>>,
}

impl Stopwatch {
    /// A stopwatch for this many rounds.
    pub fn rounds(rounds: usize) -> Stopwatch {
        Stopwatch { rounds, seconds: Mutex::default() }
    }

    /// Seconds of each round; empty if the engine did not time itself.
    pub fn seconds(&self) -> Vec<f64> {
        self.seconds.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Times some work for the requested rounds. `time(n)` runs it n times in a row, and returns the seconds if the
    /// device has a clock.
    pub(crate) fn run<E>(&self, mut time: impl FnMut(usize) -> Result<Option<f64>, E>) -> Result<(), E> {
        /// Minimum duration of a round: clocks have a resolution, and launches have overhead.
        const SECONDS: f64 = 2e-3;
        let Some(once) = time(1)? else { return Ok(()) };
        let count = (SECONDS / once.max(1e-6)).ceil() as usize;
        for _ in 0..self.rounds {
            let Some(all) = time(count)? else { return Ok(()) };
            self.seconds.lock().unwrap_or_else(PoisonError::into_inner).push(all / count as f64);
        }
        Ok(())
    }
}

/// Sums the counters of any number of calls, from any number of threads.
///
/// ```
/// use fulgurite::{Counters, Tally};
/// let tally = Tally::default();
/// tally.add(Counters { rescales_possible: 10, rescales_done: 1, blocks_redone: 0 });
/// tally.add(Counters { rescales_possible: 5, rescales_done: 0, blocks_redone: 0 });
/// assert_eq!(tally.counters().rescales_possible, 15);
/// assert_eq!(tally.counters().rescales_done, 1);
/// ```
#[derive(Debug, Default)]
pub struct Tally {
    possible: AtomicU64,
    done: AtomicU64,
    redone: AtomicU64,
}

impl Tally {
    /// Adds the counters of one call.
    pub fn add(&self, counters: Counters) {
        self.possible.fetch_add(counters.rescales_possible, Ordering::Relaxed);
        self.done.fetch_add(counters.rescales_done, Ordering::Relaxed);
        self.redone.fetch_add(counters.blocks_redone, Ordering::Relaxed);
    }

    /// The sums so far.
    pub fn counters(&self) -> Counters {
        Counters {
            rescales_possible: self.possible.load(Ordering::Relaxed),
            rescales_done: self.done.load(Ordering::Relaxed),
            blocks_redone: self.redone.load(Ordering::Relaxed),
        }
    }
}

/// A problem that an engine does not support.
///
/// ```
/// use fulgurite::{Choice, Engine, Exp, Problem, Rescale, Settings, engine_with};
///
/// let lazy = engine_with(Choice::Cpu, &Settings::default().rescale(Rescale::Lazy(8.0)))?;
/// let sas = Problem::builder().dense(1, 1, 1).heads(1, 1).head_dim(4).exp(Exp::Sas { threshold: -10.0 }).build()?;
/// let refused = lazy.supports(&sas).unwrap_err();
/// assert_eq!(refused.feature, "exp sas:-10 with rescale lazy:8");
/// # Ok::<(), fulgurite::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("engine {engine} does not have {feature}; {instead}")]
#[non_exhaustive]
pub struct Unsupported {
    /// Name of the engine.
    pub engine: String,
    /// The feature that it lacks.
    pub feature: String,
    /// An engine that has the feature, or an option to leave out.
    pub instead: String,
}
