//! What an engine is.

use crate::Error;
use fulgurite_core::{Forward, GradientOutputs, Gradients, Inputs, Outputs, Problem, Saved};
use fulgurite_cpu::Counters;
use fulgurite_ptx::device::Stream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use thiserror::Error;

/// Something that computes attention.
///
/// Every engine takes every [`Problem`] it does not refuse, checks the tensors against it before any work, and
/// gives what the f64 oracle gives up to rounding.
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

    /// One line: what this engine is on this machine.
    fn describe(&self) -> String;

    /// Whether this engine runs the problem.
    fn supports(&self, problem: &Problem) -> Result<(), Unsupported>;

    /// Attention, into tensors of the caller.
    fn forward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error>;

    /// The gradients of attention, into tensors of the caller.
    fn backward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error>;

    /// Attention, into new tensors.
    fn forward(&self, problem: &Problem, inputs: &Inputs<'_>, run: &Run<'_>) -> Result<Forward, Error> {
        // All that can be refused is refused before memory is asked for: offsets may name more rows than there are.
        self.supports(problem)?;
        inputs.bind_unlooked(problem)?;
        let mut forward = Forward::zeros(problem)?;
        self.forward_into(problem, inputs, &mut forward.outputs(), run)?;
        Ok(forward)
    }

    /// The gradients of attention, into new tensors.
    fn backward(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        run: &Run<'_>,
    ) -> Result<Gradients, Error> {
        self.supports(problem)?;
        inputs.bind_unlooked(problem)?;
        saved.check(problem)?;
        let mut gradients = Gradients::zeros(problem)?;
        self.backward_into(problem, inputs, saved, &mut gradients.outputs(), run)?;
        Ok(gradients)
    }
}

/// What one call carries besides the problem and its tensors.
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
    /// Where the call adds what it counted, if anywhere.
    pub tally: Option<&'a Tally>,
    /// What times the call's work, if anything.
    pub stopwatch: Option<&'a Stopwatch>,
    /// The stream for tensors that lie on a device: the call returns when its launches are on it.
    pub stream: Stream<'a>,
}

impl<'a> Run<'a> {
    /// Adds what the call counts to `tally`.
    pub fn tally(mut self, tally: &'a Tally) -> Self {
        self.tally = Some(tally);
        self
    }

    /// Puts the launches of tensors that lie on a device on this stream.
    pub fn stream(mut self, stream: Stream<'a>) -> Self {
        self.stream = stream;
        self
    }

    /// Has the work timed, again and again, where it is not all that the caller waits for.
    pub fn stopwatch(mut self, stopwatch: &'a Stopwatch) -> Self {
        self.stopwatch = Some(stopwatch);
        self
    }
}

/// Times the work of a call by itself. An engine whose calls also copy tensors to a device and back does the work
/// `rounds` times more and tells what each took by the device's clock; others leave it as it is.
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
    /// For so many rounds.
    pub fn rounds(rounds: usize) -> Stopwatch {
        Stopwatch { rounds, seconds: Mutex::default() }
    }

    /// What each round took; nothing if the engine did not time itself.
    pub fn seconds(&self) -> Vec<f64> {
        self.seconds.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Does some work as often as asked for; `time` does it so many times in a row, and tells the seconds if it can.
    pub(crate) fn run<E>(&self, mut time: impl FnMut(usize) -> Result<Option<f64>, E>) -> Result<(), E> {
        /// A round takes at least this long: clocks tick, and launches cost.
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
    /// Adds what one call counted.
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

/// A problem that an engine does not run.
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
    /// The engine that was asked.
    pub engine: String,
    /// What it does not have.
    pub feature: String,
    /// Which engine has it, or what to leave out.
    pub instead: String,
}
