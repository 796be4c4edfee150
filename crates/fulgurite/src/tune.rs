//! The search for faster cuts of the forward kernel on the GPU that is present.
//!
//! From the built-in cut it goes to the best of those that differ in one number, as long as one is faster. A candidate
//! counts only if it is right: it is compared with the oracle before it is timed, and timed beside the built-in cut,
//! the two alternating, with and without a causal mask.

use crate::engine::{Engine, Run};
use crate::on_device::OnDevice;
use crate::profile::{Profile, ProfileError, Tried};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Inputs, Mask, Problem, Tensor, compare};
use fulgurite_kernels::attention::plan::{Forward, Placed, Row, Table, Tensors, Tuning};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Module, Span, Stream, Value};
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Tokens of all sequences together, and heads x head_dim: what the GPU is measured on.
const TOKENS: u64 = 16384;
const WIDTH: u64 = 2048;
/// How much faster a cut must be to be taken: below that two runs of the same one differ.
const MARGIN: f64 = 1.005;
/// Rounds of the two cuts in turn, and what a round takes at least.
const ROUNDS: usize = 7;
const SECONDS: f64 = 2e-3;

/// What is searched for: a head dimension and sequences of a length, and which problems the result is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The head dimension that is measured.
    pub head_dim: u32,
    /// The length that is measured.
    pub len: u64,
    /// Keys of the problems that it stands for.
    pub keys: Range<u64>,
}

impl Place {
    /// The usual ones for some head dimensions: short, medium and long sequences.
    pub fn usual(head_dims: &[u32]) -> Vec<Place> {
        let lengths = [(512, 0..1024), (1024, 1024..2048), (2048, 2048..4096), (8192, 4096..u64::MAX)];
        let of = |&head_dim| lengths.clone().map(|(len, keys)| Place { head_dim, len, keys });
        head_dims.iter().flat_map(of).collect()
    }

    /// Head dimensions that its result is for: those that are padded to as many columns.
    fn row(&self, tuning: Tuning) -> Row {
        let first = match self.head_dim {
            ..=64 => 0,
            65..=128 => 65,
            _ => 129,
        };
        Row { head_dims: first..=self.head_dim, keys: self.keys.clone(), tuning }
    }
}

/// Why a search ended.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum TuneError {
    /// The device refused, or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The profile cannot be read or written.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// There is nothing to time with.
    #[error("{device} has no clock; a search needs a GPU")]
    Clock {
        /// The device.
        device: String,
    },
    /// The built-in cut itself is wrong, or the place cannot be measured.
    #[error("head_dim {head_dim}, length {len}: {what}")]
    Place {
        /// The head dimension.
        head_dim: u32,
        /// The length.
        len: u64,
        /// What is wrong.
        what: String,
    },
}

/// Searches at each place, writes the profile after every measurement, and goes on where an earlier search stopped.
/// `report` is told what was tried, and may break off.
pub fn tune(
    device: Arc<dyn Device>,
    places: &[Place],
    path: &Path,
    report: &mut dyn FnMut(&Place, &Tried) -> ControlFlow<()>,
) -> Result<Profile, TuneError> {
    if device.timed(Stream::default(), &mut || Ok(()))?.is_none() {
        return Err(TuneError::Clock { device: device.name() });
    }
    let mut profile = Profile::load(path, &device.name())?;
    for place in places {
        let race = Race::new(device.clone(), place)?;
        let mut stopped = false;
        let mut measure = |tuning: &Tuning| -> Result<Option<f64>, TuneError> {
            let known = profile.tried.iter().find(|t| {
                (t.head_dim, t.len) == (place.head_dim, place.len) && t.tuning.to_string() == tuning.to_string()
            });
            if let Some(known) = known {
                return Ok(Some(known.gain));
            }
            if stopped {
                return Ok(None);
            }
            let gain = race.gain(tuning)?;
            let tried = Tried { head_dim: place.head_dim, len: place.len, tuning: *tuning, gain };
            profile.tried.push(tried.clone());
            profile.save(path)?;
            stopped = report(place, &tried).is_break();
            Ok(Some(gain))
        };
        let best = search(race.usual, place.head_dim, &mut measure)?;
        if stopped {
            return Ok(profile);
        }
        let row = place.row(best);
        profile.rows.retain(|old| (&old.head_dims, &old.keys) != (&row.head_dims, &row.keys));
        if best != race.usual {
            profile.rows.push(row);
        }
        profile.save(path)?;
    }
    Ok(profile)
}

/// The best cut that can be reached in steps that each gain something; `measure` tells how many times as fast as the
/// usual one a cut is, or that the search is over.
fn search<E>(
    usual: Tuning,
    head_dim: u32,
    measure: &mut dyn FnMut(&Tuning) -> Result<Option<f64>, E>,
) -> Result<Tuning, E> {
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

/// Tensors of a place, and its usual cut.
struct Race {
    device: Arc<dyn Device>,
    head_dim: u32,
    usual: Tuning,
    problems: [Problem; 2],
    tensors: Tensors,
    _memory: Vec<Buffer>,
}

/// A kernel with its arguments.
struct Contender {
    module: Module,
    grid: [u32; 3],
    args: Vec<Value>,
}

impl Race {
    fn new(device: Arc<dyn Device>, place: &Place) -> Result<Race, TuneError> {
        let Place { head_dim, len, .. } = *place;
        let wrong = |what: String| TuneError::Place { head_dim, len, what };
        let [batch, heads] = [(TOKENS / len).max(1), (WIDTH / u64::from(head_dim)).max(1)];
        let shape = [batch, len, heads, u64::from(head_dim)];
        let problem = |mask| {
            let builder = Problem::builder().dense(batch as usize, len as usize, len as usize);
            let builder = builder.heads(heads as usize, heads as usize).head_dim(head_dim as usize);
            builder.dtype(DType::Bf16).mask(mask).build().map_err(|e| wrong(e.to_string()))
        };
        let problems = [problem(Mask::none())?, problem(Mask::causal())?];
        let mut memory = Vec::new();
        let mut room = |bytes: u64| -> Result<Span, DeviceError> {
            memory.push(device.allocate(bytes)?);
            Ok(memory[memory.len() - 1].span())
        };
        let bytes = 2 * shape.iter().product::<u64>();
        let rows = [room(bytes)?, room(bytes)?, room(bytes)?, room(bytes)?];
        let (lse, counters) = (room(4 * batch * heads * len)?, room(64)?);
        device.upload(counters, &[0; 64])?;
        let mut rng = Rng::new(1);
        for span in &rows[..3] {
            fill(device.as_ref(), *span, &mut rng)?;
        }
        let tensors = Tensors::new(rows.map(|span| Placed::packed(span, shape)), lse, counters);
        let usual = Forward::new(&problems[0], None).map_err(|missing| wrong(missing.feature))?.tuning();
        let race = Race { device, head_dim, usual, problems, tensors, _memory: memory };
        match race.is_right(&race.usual) {
            true => Ok(race),
            false => Err(wrong("the built-in cut does not agree with the oracle; `fulgurite check` says more".into())),
        }
    }

    fn table(&self, tuning: &Tuning) -> Table {
        Table::default().with([Row { head_dims: 0..=u32::MAX, keys: 0..u64::MAX, tuning: *tuning }])
    }

    /// How many times as fast as the usual cut this one is, over both masks; 0 if it has no kernel or is wrong. The best of
    /// many is lucky in part: what looks faster is timed again, and the lesser counts.
    fn gain(&self, tuning: &Tuning) -> Result<f64, TuneError> {
        if !self.is_right(tuning) {
            return Ok(0.0);
        }
        match self.race(tuning)? {
            gain if gain > MARGIN => Ok(gain.min(self.race(tuning)?)),
            gain => Ok(gain),
        }
    }

    fn race(&self, tuning: &Tuning) -> Result<f64, TuneError> {
        let mut gain = 1.0;
        for problem in &self.problems {
            let (Some(one), Some(other)) = (self.contender(problem, &self.usual), self.contender(problem, tuning))
            else {
                return Ok(0.0);
            };
            let mut times = [Vec::new(), Vec::new()];
            let count = (SECONDS / self.time(&one, 1)?).ceil() as usize;
            self.time(&other, 1)?;
            for _ in 0..ROUNDS {
                times[0].push(self.time(&one, count)?);
                times[1].push(self.time(&other, count)?);
            }
            let [usual, this] = times.map(median);
            gain *= usual / this;
        }
        Ok(gain.sqrt())
    }

    fn time(&self, contender: &Contender, count: usize) -> Result<f64, TuneError> {
        let Contender { module, grid, args } = contender;
        let mut work = || (0..count).try_for_each(|_| self.device.launch(module, *grid, args, Stream::default()));
        let seconds = self.device.timed(Stream::default(), &mut work)?;
        let seconds = seconds.ok_or_else(|| TuneError::Clock { device: self.device.name() })?;
        Ok(seconds / count as f64)
    }

    /// A cut's kernel and launch; `None` where there is no such kernel, or the assembler is not content with it.
    fn contender(&self, problem: &Problem, tuning: &Tuning) -> Option<Contender> {
        let plan = Forward::by_table(problem, None, &self.table(tuning)).ok()?;
        let kernel = plan.kernel(self.device.target()).ok()?;
        let module = self.device.load(Arc::new(kernel)).ok()?;
        let launch = plan.launch(module.shared_kernel(), &self.tensors, self.device.multiprocessors()).ok()??;
        Some(Contender { module, grid: launch.grid, args: launch.args })
    }

    /// Whether a cut has a kernel that agrees with the oracle, on odd lengths with and without a mask.
    fn is_right(&self, tuning: &Tuning) -> bool {
        let engine = OnDevice::new("tune", self.device.clone(), None, self.table(tuning));
        [(Mask::none(), 300, 333), (Mask::causal(), 275, 401)].into_iter().all(|(mask, q_len, k_len)| {
            let builder = Problem::builder().dense(1, q_len, k_len).heads(2, 1).head_dim(self.head_dim as usize);
            let Ok(problem) = builder.dtype(DType::Bf16).mask(mask).build() else { return false };
            let plan = Forward::by_table(&problem, None, &self.table(tuning));
            // The engine takes a cut that has no kernel for a bug.
            if !plan.is_ok_and(|plan| plan.kernel(self.device.target()).is_ok()) {
                return false;
            }
            let mut rng = Rng::new(7);
            let mut tensor = |len: usize, heads: usize| {
                let shape = [1, len, heads, self.head_dim as usize];
                Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), &shape)
            };
            let (Ok(q), Ok(k), Ok(v)) = (tensor(q_len, 2), tensor(k_len, 1), tensor(k_len, 1)) else { return false };
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let Ok(got) = engine.forward(&problem, &inputs, &Run::default()) else { return false };
            let Ok(bound) = inputs.bind(&problem) else { return false };
            compare::check_forward(&bound, &got, 1).iter().all(|(_, verdict)| verdict.ok())
        })
    }
}

/// Random numbers over a whole span: a piece of them, again and again.
fn fill(device: &dyn Device, span: Span, rng: &mut Rng) -> Result<(), DeviceError> {
    let piece: Vec<u8> = (0..1 << 20).flat_map(|_| half::bf16::from_f64(rng.normal()).to_le_bytes()).collect();
    for at in (0..span.bytes).step_by(piece.len()) {
        let part = piece.len().min((span.bytes - at) as usize);
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
    use fulgurite_sim::Sim;

    /// A made-up GPU on which this many keys of a block are best.
    fn speed(tuning: &Tuning, best_cols: u32) -> f64 {
        1.2 - f64::from(tuning.cols.abs_diff(best_cols)) / 160.0
    }

    #[test]
    fn the_search_climbs_and_never_takes_a_slower_cut() {
        let usual = Tuning::hopper(128, 8192);
        let of_usual = |best| move |tuning: &Tuning| speed(tuning, best) / speed(&usual, best);
        let run = |best: u32| search::<()>(usual, 128, &mut |tuning| Ok(Some(of_usual(best)(tuning)))).unwrap();
        assert_eq!(run(64).cols, 64);
        assert_eq!(run(192).cols, 192);
        // Nothing is faster: it stays where it is, bit by bit.
        assert_eq!(run(128), usual);
        // Less faster than two runs of the same differ by.
        assert_eq!(search::<()>(usual, 128, &mut |_| Ok(Some(1.004))).unwrap(), usual);
        // Wrong candidates are not taken.
        assert_eq!(search::<()>(usual, 128, &mut |_| Ok(Some(0.0))).unwrap(), usual);
        // Broken off.
        assert_eq!(search::<()>(usual, 128, &mut |_| Ok(None)).unwrap(), usual);
    }

    /// The simulator has no clock.
    #[test]
    fn a_device_without_a_clock_is_refused() {
        let path = std::env::temp_dir().join(format!("fulgurite-tune-{}.profile", std::process::id()));
        let place = Place { head_dim: 64, len: 64, keys: 0..128 };
        let refused = tune(Arc::new(Sim::default()), &[place], &path, &mut |_, _| ControlFlow::Continue(()));
        assert!(matches!(refused, Err(TuneError::Clock { .. })), "{refused:?}");
        assert!(!path.exists());
    }
}
