//! The search for faster tile configurations of forward and backward attention on the installed GPU.
//!
//! The search starts at the built-in tile configuration. It moves to the fastest configuration that differs in one
//! number, as long as one is faster. Each candidate is compared with the oracle before it is timed. Candidate and
//! built-in configuration are timed alternately, with and without a causal mask.

use crate::Error;
use crate::device::{CheckedCall, OnDevice, Session, TensorsOf};
use crate::engine::{Engine, Run};
use crate::profile::{Pass, Profile, ProfileError, Tables, Tried};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Inputs, Mask, Problem, Tensor, compare, oracle};
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Tensors as GradientTensors};
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_kernels::attention::forward::plan::{
    ConfigRow, ConfigTable, DeviceTensor, ForwardConfig, ForwardPlan, NoKernel, Tensors,
};
use fulgurite_kernels::operator::{Backward, Forward, Operator};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Span, Stream};
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;

/// Minimum speed-up to accept a tile configuration: two runs of the same one differ by less.
const MARGIN: f64 = 1.005;

/// Sizes of the problems on which a device is measured.
#[derive(Debug, Clone, Copy)]
struct Scale {
    /// Tokens of all sequences together.
    tokens: u64,
    /// Heads x head_dim.
    width: u64,
    /// Rounds in which the two configurations alternate.
    rounds: usize,
    /// Minimum duration of a round, in seconds.
    seconds: f64,
    /// Queries and keys of the problems that are compared with the oracle: without a mask, and under a causal one.
    odd: [[usize; 2]; 2],
}

/// The sizes for a GPU.
const GPU: Scale = Scale { tokens: 16384, width: 2048, rounds: 7, seconds: 2e-3, odd: [[300, 333], [275, 401]] };

/// A point of the search: the head dimension and length to measure, and the problems that will use the result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchCell {
    /// Head dimension to measure.
    pub head_dim: u32,
    /// Length to measure without a mask. Forward is measured at twice this length under a causal mask, because its
    /// queries see half of the keys.
    pub len: u64,
    /// Numbers of keys of the problems that will use the result.
    pub keys: Range<u64>,
}

impl SearchCell {
    /// The usual points for some head dimensions: short, medium and long sequences.
    pub fn usual(head_dims: &[u32]) -> Vec<SearchCell> {
        let lengths = [(512, 0..1024), (1024, 1024..2048), (2048, 2048..4096), (8192, 4096..u64::MAX)];
        let of = |&head_dim| lengths.clone().map(|(len, keys)| SearchCell { head_dim, len, keys });
        head_dims.iter().flat_map(of).collect()
    }

    /// The table row of the result, for all head dimensions that are padded to this one.
    fn row<T>(&self, config: T) -> ConfigRow<T> {
        let first = match self.head_dim {
            ..=64 => 0,
            65..=128 => 65,
            _ => 129,
        };
        ConfigRow { head_dims: first..=self.head_dim, keys: self.keys.clone(), config }
    }
}

/// The reason why a search failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TuneError {
    /// The device rejected a call, or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The profile cannot be read or written.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The device has no clock.
    #[error("{device} has no clock; a search needs a GPU")]
    Clock {
        /// Name of the device.
        device: String,
    },
    /// The built-in tile configuration gives wrong results, or the point cannot be measured.
    #[error("head_dim {head_dim}, length {len}: {what}")]
    Cell {
        /// Head dimension of the point.
        head_dim: u32,
        /// Length of the point.
        len: u64,
        /// The fault, as text.
        what: String,
    },
}

/// Searches at each place, writes the profile after every measurement, and resumes an earlier search. `report` receives
/// each candidate and its gain, and may stop the search. `T` is the pass: [`ForwardConfig`] or [`BackwardConfig`].
pub fn tune<T: Raced>(
    device: Arc<dyn Device>,
    places: &[SearchCell],
    path: &Path,
    report: &mut dyn FnMut(&SearchCell, &Tried<T>) -> ControlFlow<()>,
) -> Result<Profile, TuneError> {
    tune_at(GPU, device, places, path, report)
}

fn tune_at<T: Raced>(
    scale: Scale,
    device: Arc<dyn Device>,
    places: &[SearchCell],
    path: &Path,
    report: &mut dyn FnMut(&SearchCell, &Tried<T>) -> ControlFlow<()>,
) -> Result<Profile, TuneError> {
    if device.timed(Stream::default(), &mut || Ok(()))?.is_none() {
        return Err(TuneError::Clock { device: device.name() });
    }
    let mut profile = Profile::load(path, &device.name())?;
    for place in places {
        let race = Race::<T>::new(scale, device.clone(), place)?;
        let mut stopped = false;
        let mut measure = |config: &T| -> Result<Option<f64>, TuneError> {
            let known = T::of(&mut profile).tried.iter().find(|t| {
                (t.head_dim, t.len) == (place.head_dim, place.len) && t.config.to_string() == config.to_string()
            });
            if let Some(known) = known {
                return Ok(Some(known.gain));
            }
            if stopped {
                return Ok(None);
            }
            let gain = race.gain(config)?;
            let tried = Tried { head_dim: place.head_dim, len: place.len, config: *config, gain };
            T::of(&mut profile).tried.push(tried.clone());
            profile.save(path)?;
            stopped = report(place, &tried).is_break();
            Ok(Some(gain))
        };
        let best = search(race.usual, place.head_dim, &mut measure)?;
        if stopped {
            return Ok(profile);
        }
        let (row, rows) = (place.row(best), &mut T::of(&mut profile).rows);
        rows.retain(|old| (&old.head_dims, &old.keys) != (&row.head_dims, &row.keys));
        if best != race.usual {
            rows.push(row);
        }
        profile.save(path)?;
    }
    Ok(profile)
}

/// Finds the fastest tile configuration reachable by steps that each gain something. `measure` returns the speed of a
/// candidate relative to the usual configuration, or `None` to end the search.
fn search<T: Pass, E>(usual: T, head_dim: u32, measure: &mut dyn FnMut(&T) -> Result<Option<f64>, E>) -> Result<T, E> {
    let (mut best, mut gain) = (usual, 1.0);
    loop {
        let mut next = None;
        for candidate in best.neighbours(head_dim) {
            let Some(found) = measure(&candidate)? else { return Ok(best) };
            if found > gain * MARGIN && next.is_none_or(|(_, most)| found > most) {
                next = Some((candidate, found));
            }
        }
        match next {
            Some((candidate, found)) => (best, gain) = (candidate, found),
            None => return Ok(best),
        }
    }
}

/// A pass whose configurations can be timed against each other.
pub trait Raced: Pass {
    /// The operator that runs the pass.
    type Operator: Operator<Problem = Problem, Options: Default, Plan: Clone>;
    /// Number of q-sized tensors that the pass reads and writes.
    const ROWS: usize;
    /// Tables that contain this one.
    fn tables(table: ConfigTable<Self>) -> Tables;
    /// Number of keys of a causal problem that uses the tile configuration of a full one with `len` keys.
    fn causal_len(len: u64) -> u64;
    /// The built-in tile configuration for a problem.
    fn usual(problem: &Problem) -> Result<Self, NoKernel>;
    /// Runs the work that must precede the timing of a problem.
    fn lead_in(race: &Race<Self>, problem: &Problem) -> Result<(), TuneError>;
    /// The tensors of a problem.
    fn tensors(race: &Race<Self>, problem: &Problem) -> TensorsOf<Self::Operator>;
    /// Whether an engine's results agree with the oracle's.
    fn is_right(engine: &dyn Engine, problem: &Problem, inputs: &Inputs<'_>, d_o: &Tensor) -> bool;
}

impl Raced for ForwardConfig {
    type Operator = Forward;
    const ROWS: usize = 4;

    fn tables(forward: ConfigTable) -> Tables {
        Tables { forward, ..Tables::default() }
    }

    /// Forward tables are searched by the number of keys that a query sees: half of them on average.
    fn causal_len(len: u64) -> u64 {
        2 * len
    }

    fn usual(problem: &Problem) -> Result<ForwardConfig, NoKernel> {
        ForwardPlan::new(problem, None)
            .map(|plan| plan.config().expect("bug in fulgurite: a plan for wgmma has its configuration"))
    }

    fn lead_in(_: &Race<ForwardConfig>, _: &Problem) -> Result<(), TuneError> {
        Ok(())
    }

    fn tensors(race: &Race<ForwardConfig>, problem: &Problem) -> Tensors {
        race.forward_tensors(problem)
    }

    fn is_right(engine: &dyn Engine, problem: &Problem, inputs: &Inputs<'_>, _: &Tensor) -> bool {
        let Ok(got) = engine.forward(problem, inputs, &Run::default()) else { return false };
        let Ok(bound) = inputs.bind(problem) else { return false };
        compare::check_forward(&bound, &got, 1).iter().all(|(_, verdict)| verdict.ok())
    }
}

impl Raced for BackwardConfig {
    type Operator = Backward;
    const ROWS: usize = 8;

    fn tables(backward: ConfigTable<BackwardConfig>) -> Tables {
        Tables { backward, ..Tables::default() }
    }

    fn causal_len(len: u64) -> u64 {
        len
    }

    fn usual(problem: &Problem) -> Result<BackwardConfig, NoKernel> {
        // Take the configuration from the table: a mask changes every candidate in the same way.
        BackwardPlan::new(problem, false, Order::Any).map(|plan| plan.config())
    }

    /// Computes o and the LSE for this mask.
    fn lead_in(race: &Race<BackwardConfig>, problem: &Problem) -> Result<(), TuneError> {
        let forward = race.contender::<Forward>(problem, Tables::default(), race.forward_tensors(problem));
        race.time(&forward.ok_or_else(|| race.wrong("forward does not run"))?, 1).map(|_| ())
    }

    fn tensors(race: &Race<BackwardConfig>, problem: &Problem) -> GradientTensors {
        let [q, k, v, o, d_o, d_q, d_k, d_v] = race.rows(problem);
        GradientTensors::new([q, k, v, o], race.lse, d_o, [d_q, d_k, d_v])
    }

    fn is_right(engine: &dyn Engine, problem: &Problem, inputs: &Inputs<'_>, d_o: &Tensor) -> bool {
        let Ok(bound) = inputs.bind(problem) else { return false };
        let Ok(forward) = oracle::forward(&bound).to_forward(problem) else { return false };
        let saved = forward.saved(d_o.view());
        let Ok(got) = engine.backward(problem, inputs, &saved, &Run::default()) else { return false };
        compare::check_backward(&bound, &saved, &got, 1).iter().all(|(_, verdict)| verdict.ok())
    }
}

/// The tensors of a point, and its usual tile configuration.
pub struct Race<T: Raced> {
    scale: Scale,
    device: Arc<dyn Device>,
    place: SearchCell,
    usual: T,
    problems: [Problem; 2],
    /// The usual tile configuration on both problems, once it is known to be correct.
    standing: Vec<Contender<T::Operator>>,
    /// Memory of tensors of rows.
    spans: Vec<Span>,
    lse: Span,
    _memory: Vec<Buffer>,
}

/// A problem prepared with one tile configuration, and its tensors.
struct Contender<O: Operator> {
    session: Session<dyn Device>,
    call: CheckedCall<O>,
}

impl<T: Raced> Race<T> {
    fn new(scale: Scale, device: Arc<dyn Device>, place: &SearchCell) -> Result<Race<T>, TuneError> {
        let SearchCell { head_dim, len, .. } = *place;
        let wrong = |what: String| TuneError::Cell { head_dim, len, what };
        let heads = (scale.width / u64::from(head_dim)).max(1) as usize;
        let problem = |mask, len: u64| {
            let batch = (scale.tokens / len).max(1);
            let builder = Problem::builder().dense(batch as usize, len as usize, len as usize);
            let builder = builder.heads(heads, heads).head_dim(head_dim as usize);
            builder.dtype(DType::Bf16).mask(mask).build().map_err(|e| wrong(e.to_string()))
        };
        let problems = [problem(Mask::none(), len)?, problem(Mask::causal(), T::causal_len(len))?];
        let mut memory = Vec::new();
        let mut room = |bytes: u64| -> Result<Span, DeviceError> {
            memory.push(device.allocate(bytes)?);
            Ok(memory[memory.len() - 1].span())
        };
        let most = |shape: fn(&Problem) -> Vec<usize>| {
            problems.iter().map(|problem| shape(problem).iter().product::<usize>() as u64).max().unwrap_or(0)
        };
        let bytes = 2 * most(Problem::q_shape);
        let spans = (0..T::ROWS).map(|_| room(bytes)).collect::<Result<Vec<_>, _>>()?;
        let lse = room(4 * most(Problem::lse_shape))?;
        let mut rng = Rng::new(1);
        for span in &spans {
            fill(device.as_ref(), *span, &mut rng)?;
        }
        let usual = T::usual(&problems[0]).map_err(|missing| wrong(missing.feature))?;
        let place = place.clone();
        let standing = Vec::new();
        let mut race = Race { scale, device, place, usual, problems, standing, spans, lse, _memory: memory };
        if !race.is_right(&race.usual) {
            return Err(race
                .wrong("the built-in tile configuration does not agree with the oracle; `fulgurite check` says more"));
        }
        race.standing = race.contenders(usual).into_iter().flatten().collect();
        match race.standing.len() {
            2 => Ok(race),
            _ => {
                Err(race
                    .wrong("the built-in tile configuration cannot be loaded; `fulgurite kernel assemble` says more"))
            }
        }
    }

    /// Tensors of a problem's rows.
    fn rows<const N: usize>(&self, problem: &Problem) -> [DeviceTensor; N] {
        let shape: Vec<u64> = problem.q_shape().iter().map(|&n| n as u64).collect();
        std::array::from_fn(|i| DeviceTensor::packed(self.spans[i], std::array::from_fn(|axis| shape[axis])))
    }

    fn forward_tensors(&self, problem: &Problem) -> Tensors {
        Tensors::new(self.rows(problem), self.lse, Span::new(0, 0))
    }

    fn wrong(&self, what: &str) -> TuneError {
        TuneError::Cell { head_dim: self.place.head_dim, len: self.place.len, what: what.into() }
    }

    /// Speed of a configuration relative to the usual one, over both masks; 0 if it has no kernel or is wrong. The
    /// fastest of many candidates is partly lucky, so a configuration that looks faster is timed again, and the smaller
    /// gain counts.
    fn gain(&self, config: &T) -> Result<f64, TuneError> {
        if !self.is_right(config) {
            return Ok(0.0);
        }
        let [Some(full), Some(causal)] = self.contenders(*config) else { return Ok(0.0) };
        let others = [full, causal];
        match self.race(&others)? {
            gain if gain > MARGIN => Ok(gain.min(self.race(&others)?)),
            gain => Ok(gain),
        }
    }

    /// A tile configuration on both problems; `None` if it has no kernel or the assembler rejects it.
    fn contenders(&self, config: T) -> [Option<Contender<T::Operator>>; 2] {
        self.problems.each_ref().map(|problem| {
            let tables = T::tables(ConfigTable::of(config));
            self.contender::<T::Operator>(problem, tables, T::tensors(self, problem))
        })
    }

    fn contender<O>(&self, problem: &Problem, tables: Tables, tensors: TensorsOf<O>) -> Option<Contender<O>>
    where
        O: Operator<Problem = Problem, Options: Default, Plan: Clone>,
    {
        let session = Session::new(self.device.clone(), tables);
        let prepared = session.prepare::<O>(problem, &O::Options::default()).ok()?;
        Some(Contender { session, call: CheckedCall::trusted(prepared, tensors) })
    }

    fn race(&self, others: &[Contender<T::Operator>; 2]) -> Result<f64, TuneError> {
        let mut gain = 1.0;
        for ((problem, one), other) in self.problems.iter().zip(&self.standing).zip(others) {
            T::lead_in(self, problem)?;
            let mut times = [Vec::new(), Vec::new()];
            let count = (self.scale.seconds / self.time(one, 1)?).ceil().max(1.0) as usize;
            self.time(other, 1)?;
            for _ in 0..self.scale.rounds {
                times[0].push(self.time(one, count)?);
                times[1].push(self.time(other, count)?);
            }
            let [usual, this] = times.map(median);
            gain *= usual / this;
        }
        Ok(gain.sqrt())
    }

    /// Seconds of one call, over `count` calls in a row.
    fn time<O: Operator>(&self, contender: &Contender<O>, count: usize) -> Result<f64, TuneError> {
        let Contender { session, call } = contender;
        let mut work = || {
            (0..count).try_for_each(|_| {
                session.run_call(call, Stream::default()).map_err(|e| match e {
                    Error::Device(e) => e,
                    other => DeviceError::Failed { call: "tune", what: other.to_string() },
                })
            })
        };
        let seconds = self.device.timed(Stream::default(), &mut work)?;
        let seconds = seconds.ok_or_else(|| TuneError::Clock { device: self.device.name() })?;
        Ok(seconds / count as f64)
    }

    /// Whether a tile configuration has a kernel that agrees with the oracle, on odd lengths with and without a mask.
    fn is_right(&self, config: &T) -> bool {
        let engine = OnDevice::new(self.device.clone(), None, T::tables(ConfigTable::of(*config)));
        let head_dim = self.place.head_dim as usize;
        let lengths = self.scale.odd;
        [Mask::none(), Mask::causal()].into_iter().zip(lengths).all(|(mask, [q_len, k_len])| {
            let builder = Problem::builder().dense(1, q_len, k_len).heads(2, 1).head_dim(head_dim);
            let Ok(problem) = builder.dtype(DType::Bf16).mask(mask).build() else { return false };
            let mut rng = Rng::new(7);
            let mut tensor = |len: usize, heads: usize| {
                let shape = [1, len, heads, head_dim];
                Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), &shape)
            };
            let (Ok(q), Ok(k), Ok(v)) = (tensor(q_len, 2), tensor(k_len, 1), tensor(k_len, 1)) else { return false };
            let Ok(d_o) = tensor(q_len, 2) else { return false };
            T::is_right(&engine, &problem, &Inputs::new(q.view(), k.view(), v.view()), &d_o)
        })
    }
}

/// Fills a span with random numbers by repeating a shorter block of them.
fn fill(device: &dyn Device, span: Span, rng: &mut Rng) -> Result<(), DeviceError> {
    let count = (1 << 20).min(span.bytes() / 2);
    let piece: Vec<u8> = (0..count).flat_map(|_| half::bf16::from_f64(rng.normal()).to_le_bytes()).collect();
    for at in (0..span.bytes()).step_by(piece.len()) {
        let part = piece.len().min((span.bytes() - at) as usize);
        device.upload(span.from(at), &piece[..part])?;
    }
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Measured;
    use fulgurite_kernels::attention::forward::plan::TileConfig;
    use fulgurite_ptx::Target;
    use fulgurite_ptx::device::{Module, Value};
    use fulgurite_sim::{Architecture, Sim};

    /// A made-up GPU on which key blocks of `best_cols` keys are fastest.
    fn speed(config: &ForwardConfig, best_cols: u32) -> f64 {
        1.2 - f64::from(config.cols.abs_diff(best_cols)) / 160.0
    }

    #[test]
    fn the_search_climbs_and_never_takes_a_slower_cut() {
        let usual = ForwardConfig::hopper(128, 8192);
        let of_usual = |best| move |config: &ForwardConfig| speed(config, best) / speed(&usual, best);
        let run = |best: u32| search::<_, ()>(usual, 128, &mut |config| Ok(Some(of_usual(best)(config)))).unwrap();
        assert_eq!(run(64).cols, 64);
        assert_eq!(run(192).cols, 192);
        // No candidate is faster, so the configuration stays exactly the same.
        assert_eq!(run(128), usual);
        // The gain is smaller than the difference between two runs of the same configuration.
        assert_eq!(search::<_, ()>(usual, 128, &mut |_| Ok(Some(1.004))).unwrap(), usual);
        // Wrong candidates are not taken.
        assert_eq!(search::<_, ()>(usual, 128, &mut |_| Ok(Some(0.0))).unwrap(), usual);
        // The search is interrupted.
        assert_eq!(search::<_, ()>(usual, 128, &mut |_| Ok(None)).unwrap(), usual);
    }

    /// The simulator has no clock.
    #[test]
    fn a_device_without_a_clock_is_refused() {
        let path = std::env::temp_dir().join(format!("fulgurite-tune-{}.profile", std::process::id()));
        let place = SearchCell { head_dim: 64, len: 64, keys: 0..128 };
        let refused =
            tune::<ForwardConfig>(Arc::new(Sim::default()), &[place], &path, &mut |_, _| ControlFlow::Continue(()));
        assert!(matches!(refused, Err(TuneError::Clock { .. })), "{refused:?}");
        assert!(!path.exists());
    }

    /// A simulator with a clock: the time of a launch is that of its busiest unit.
    #[derive(Default)]
    struct Clocked {
        sim: Sim,
        cycles: std::sync::Mutex<f64>,
    }

    impl Device for Clocked {
        fn name(&self) -> String {
            "a simulator with a clock".into()
        }
        fn target(&self) -> Target {
            self.sim.target()
        }
        fn multiprocessors(&self) -> u32 {
            self.sim.multiprocessors()
        }
        fn allocate(&self, bytes: u64) -> Result<Buffer, DeviceError> {
            self.sim.allocate(bytes)
        }
        fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), DeviceError> {
            self.sim.upload(to, bytes)
        }
        fn download(&self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError> {
            self.sim.download(from, bytes)
        }
        fn load(&self, kernel: Arc<fulgurite_ptx::Kernel>) -> Result<Module, DeviceError> {
            self.sim.load(kernel)
        }
        fn launch(
            &self,
            module: &Module,
            grid: [u32; 3],
            args: &[Value],
            stream: Stream<'_>,
        ) -> Result<(), DeviceError> {
            self.sim.launch(module, grid, args, stream)?;
            let units = Architecture::H200.cycles(&self.sim.report().total());
            *self.cycles.lock().unwrap() += units.into_iter().map(|(_, cycles)| cycles).fold(0.0, f64::max);
            Ok(())
        }
        fn synchronize(&self, stream: Stream<'_>) -> Result<(), DeviceError> {
            self.sim.synchronize(stream)
        }
        fn timed(
            &self,
            _: Stream<'_>,
            work: &mut dyn FnMut() -> Result<(), DeviceError>,
        ) -> Result<Option<f64>, DeviceError> {
            *self.cycles.lock().unwrap() = 0.0;
            work()?;
            Ok(Some(self.cycles.lock().unwrap().max(1.0)))
        }
    }

    /// An interrupted search resumes where it stopped, measures nothing twice, and accepts only faster, correct
    /// candidates.
    #[test]
    fn backward_is_searched_on_a_simulator_with_a_clock() {
        let scale = Scale { tokens: 64, width: 128, rounds: 1, seconds: 0.0, odd: [[9, 20], [17, 12]] };
        let device: Arc<dyn Device> = Arc::new(Clocked::default());
        let path = std::env::temp_dir().join(format!("fulgurite-tune-backward-{}.profile", std::process::id()));
        let places = [SearchCell { head_dim: 128, len: 64, keys: 0..128 }];
        let run = |most: usize| {
            let mut tried = Vec::new();
            let mut report = |_: &SearchCell, one: &Tried<BackwardConfig>| {
                tried.push(one.config.to_string());
                if tried.len() == most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let profile = tune_at(scale, device.clone(), &places, &path, &mut report).unwrap();
            (tried, profile)
        };
        // An earlier search has measured most candidates.
        let usual = BackwardConfig::hopper(128);
        let near = BackwardConfig { rows: 64, ..usual };
        let known = usual.neighbours(128).into_iter().chain(near.neighbours(128));
        let unknown = |config: &BackwardConfig| config.share == usual.share && config.registers != usual.registers;
        let known = known.filter(|config| *config != near && !unknown(config));
        let tried = known.map(|config| Tried { head_dim: 128, len: 64, config, gain: 0.5 }).collect();
        let earlier =
            Profile { gpu: device.name(), backward: Measured { tried, rows: Vec::new() }, ..Profile::default() };
        earlier.save(&path).unwrap();

        let (first, stopped) = run(1);
        assert_eq!((first.len(), stopped.backward.rows.len()), (1, 0));
        let (second, profile) = run(usize::MAX);
        assert_eq!(second.len(), 2, "{second:?}");
        assert!(second.iter().all(|config| !first.contains(config)), "{second:?}");
        assert!(run(usize::MAX).0.is_empty(), "a search that is done measures nothing");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), profile.to_string());
        std::fs::remove_file(&path).unwrap();
        // With 64 queries, a fifth of an 80-query step is wasted.
        let [used] = &profile.backward.rows[..] else { panic!("{profile}") };
        assert_eq!((used.config.rows, &used.keys), (64, &(0..128)), "{profile}");
        let gain = |config: &BackwardConfig| profile.backward.tried.iter().find(|t| t.config == *config).unwrap().gain;
        let most = profile.backward.tried.iter().map(|tried| tried.gain).fold(0.0, f64::max);
        assert!(gain(&used.config) > MARGIN && gain(&used.config) * MARGIN >= most, "{profile}");
        assert!(profile.forward.tried.is_empty());
    }

    #[test]
    fn a_cut_without_a_kernel_gains_nothing() {
        let scale = Scale { tokens: 64, width: 64, rounds: 1, seconds: 0.0, odd: [[5, 9], [9, 5]] };
        let place = SearchCell { head_dim: 64, len: 64, keys: 0..128 };
        let race = Race::<BackwardConfig>::new(scale, Arc::new(Clocked::default()), &place).unwrap();
        let pairs = BackwardConfig { share: fulgurite_kernels::attention::backward::Share::Pairs, ..race.usual };
        assert_eq!(race.gain(&pairs), Ok(0.0));
        assert_eq!(race.gain(&BackwardConfig { registers: [248, 248], ..race.usual }), Ok(0.0));
    }
}
