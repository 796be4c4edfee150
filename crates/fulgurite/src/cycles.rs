//! Predicts the time of a call from cycles: the simulator plays a few tiles of the problem's own kernel on one SM, and the
//! tiles of the whole problem are then handed out as the kernel's scheduler does.
//!
//! Runs of a few sizes give the cycles of a block, of the ends of a tile and of the start of a CTA. Nothing depends on the
//! shape but through them: another kernel, tile configuration or architecture gives other cycles. Decode is not predicted.

use crate::Error;
use crate::device::OnDevice;
use crate::engine::{Engine, Run};
use crate::profile::Tables;
use fulgurite_core::{DType, Inputs, Problem, ProblemBuilder, Saved, Tensor};
use fulgurite_ptx::{Arch, Kernel, Target};
use fulgurite_sim::{Architecture, Interleaving, Options, Sim};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Cycles of tiles on one SM.
#[derive(Debug, Clone, PartialEq)]
pub struct TileCycles {
    /// Cycles of each block of keys (backward: step of queries) of a tile.
    pub block: f64,
    /// Cycles of a tile beyond its blocks.
    pub tile: f64,
    /// Cycles of a CTA beyond its tiles.
    pub start: f64,
    /// Backward: cycles of each step of queries of a pair, beyond those of the steps of its tiles.
    pub row: f64,
    /// Share of these cycles in which each unit works, of a long tile; the busiest first.
    pub busy: Vec<(&'static str, f64)>,
    /// Floating-point operations of tensor products, for each block.
    pub tensor_flops: f64,
}

/// The predicted time of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Predicted {
    /// Cycles of tiles, as the simulator plays them.
    pub cycles: TileCycles,
    /// Cycles of the main kernel, from its first CTA to its last.
    pub kernel_cycles: f64,
    /// Share of these cycles in which each unit works.
    pub shares: Vec<(&'static str, f64)>,
    /// The clock that the power limit leaves.
    pub gigahertz: f64,
    /// Seconds of the call.
    pub seconds: f64,
    /// What bounds the time.
    pub bound: String,
}

/// Runs of forward attention on the simulator: tiles of a CTA, and blocks of each tile.
pub(crate) const FORWARD: [[usize; 2]; 4] = [[1, 4], [3, 4], [3, 10], [1, 10]];
/// Runs of backward: steps of queries and tiles of keys of one pair.
pub(crate) const BACKWARD: [[usize; 2]; 5] = [[4, 2], [4, 4], [10, 4], [10, 2], [10, 8]];

/// A kernel to play: where, and how often side by side on one SM.
pub(crate) struct Played<'a> {
    pub kernel: &'a str,
    pub target: Target,
    pub ctas_per_sm: usize,
    /// CTAs of a cluster, each on an SM of its own.
    pub cluster: u32,
}

/// A run of the simulator: its cycles, and the work of each unit.
struct Play {
    cycles: f64,
    units: Vec<(&'static str, f64)>,
    tensor_flops: f64,
}

impl Played<'_> {
    /// Plays a call.
    fn play(
        &self,
        engine: impl FnOnce(Arc<Sim>) -> OnDevice<Sim>,
        problem: &Problem,
        backward: bool,
    ) -> Result<Play, Error> {
        // The problem has one SM for itself (for a cluster, one each); rates are those of the whole GPU.
        let mut rates = Architecture::of(&self.target.arch);
        rates.arch = Arch { sms: self.cluster, ..self.target.arch };
        let resident = self.ctas_per_sm as u32;
        let options =
            Options { order: Interleaving::Timed, checks: false, arithmetic: false, resident, ..Options::default() };
        let sim = Arc::new(Sim::with_rates(Target { arch: rates.arch, ..self.target }, rates, options));
        let engine = engine(sim.clone());
        let zeros = |shape: &[usize]| Tensor::zeros(problem.dtype(), shape);
        let (q, k, v) = (zeros(&problem.q_shape())?, zeros(&problem.k_shape())?, zeros(&problem.v_shape())?);
        let aux =
            problem.aux().iter().map(|aux| Tensor::zeros(aux.dtype, &aux.shape)).collect::<Result<Vec<_>, _>>()?;
        let mut inputs = Inputs::new(q.view(), k.view(), v.view());
        inputs.aux = problem.aux().iter().zip(&aux).map(|(spec, tensor)| (&spec.name[..], tensor.view())).collect();
        if backward {
            let (o, d_o) = (zeros(&problem.o_shape())?, zeros(&problem.o_shape())?);
            let lse = Tensor::zeros(DType::F32, &problem.lse_shape())?;
            let saved = Saved { o: o.view(), lse: lse.view(), d_o: d_o.view(), d_lse: None };
            engine.backward(problem, &inputs, &saved, &Run::default())?;
        } else {
            engine.forward(problem, &inputs, &Run::default())?;
        }
        let counts = sim.counts_of(self.kernel);
        let ctas = f64::from(self.cluster);
        let units = rates.cycles(&counts).into_iter().map(|(unit, cycles)| (unit, cycles / ctas)).collect();
        let tensor_flops = counts.tensor_flops.values().sum::<u64>() as f64 / ctas;
        Ok(Play { cycles: sim.cycles_of(self.kernel) as f64, units, tensor_flops })
    }

    /// Cycles of the tiles of some problems.
    pub fn tiles(&self, engine: impl Fn(Arc<Sim>) -> OnDevice<Sim>, samples: &[Sample]) -> Result<TileCycles, Error> {
        let plays = samples.iter().map(|sample| self.play(&engine, &sample.problem, sample.backward));
        let plays = plays.collect::<Result<Vec<Play>, Error>>()?;
        let of: Vec<[f64; UNKNOWNS]> = samples.iter().map(Sample::counts).collect();
        let fit = |y: &dyn Fn(&Play) -> f64| least_squares(&of, &plays.iter().map(y).collect::<Vec<f64>>());
        let [start, tile, block, row] = fit(&|play| play.cycles);
        let names: Vec<&'static str> =
            plays.first().map_or(Vec::new(), |play| play.units.iter().map(|u| u.0).collect());
        let of_unit = |(i, name): (usize, &&'static str)| (*name, fit(&|play| play.units[i].1)[2] / block);
        let mut busy: Vec<_> =
            names.iter().enumerate().map(of_unit).filter(|(name, _)| *name != "global memory").collect();
        busy.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(TileCycles { block, tile, start, row, busy, tensor_flops: fit(&|play| play.tensor_flops)[2] })
    }
}

/// Unknown cycles of a kernel: of a CTA, of a tile, of a block, of a row block of d_q.
const UNKNOWNS: usize = 4;

/// A problem to play.
pub(crate) struct Sample {
    pub problem: Problem,
    pub backward: bool,
    /// Tiles of a CTA, blocks of all of them, and blocks of queries of the pairs (backward).
    pub tiles: u64,
    pub blocks: u64,
    pub rows: u64,
}

impl Sample {
    fn counts(&self) -> [f64; UNKNOWNS] {
        [1.0, self.tiles as f64, self.blocks as f64, self.rows as f64]
    }
}

/// The factors whose sums of `of` are nearest to `y`. A column of zeros gets the factor 0.
fn least_squares(of: &[[f64; UNKNOWNS]], y: &[f64]) -> [f64; UNKNOWNS] {
    // Normal equations, by Gauss and Jordan: few unknowns, and columns of about one size.
    let mut rows = [[0.0; UNKNOWNS + 1]; UNKNOWNS];
    for (i, row) in rows.iter_mut().enumerate() {
        for (x, &y) in of.iter().zip(y) {
            (0..UNKNOWNS).for_each(|j| row[j] += x[i] * x[j]);
            row[UNKNOWNS] += x[i] * y;
        }
    }
    for i in 0..UNKNOWNS {
        let pivot = (i..UNKNOWNS).max_by(|&a, &b| rows[a][i].abs().total_cmp(&rows[b][i].abs())).unwrap_or(i);
        rows.swap(i, pivot);
        let pivot = rows[i];
        if pivot[i].abs() < 1e-9 {
            continue;
        }
        for (_, row) in rows.iter_mut().enumerate().filter(|(other, _)| *other != i) {
            let factor = row[i] / pivot[i];
            row.iter_mut().zip(&pivot).for_each(|(x, p)| *x -= factor * p);
        }
    }
    std::array::from_fn(|i| if rows[i][i].abs() < 1e-9 { 0.0 } else { rows[i][UNKNOWNS] / rows[i][i] })
}

/// CTAs of a kernel that fit on an SM, by registers and shared memory. Each CTA takes 1 KB of shared memory more than it
/// requests.
pub(crate) fn ctas_per_sm(kernel: &Kernel) -> usize {
    let arch = &kernel.target.arch;
    let registers = Kernel::entry_registers(kernel.target, kernel.threads) * kernel.threads;
    (arch.registers / registers.max(1)).min(arch.shared_per_sm / (kernel.shared_bytes + 1024)).max(1) as usize
}

/// Cycles until all tiles are done. Each of `workers` takes the next tile when it has finished one, the longest first.
pub(crate) fn makespan(mut blocks: Vec<u64>, times: usize, workers: usize, cycles: &TileCycles) -> f64 {
    blocks.sort_unstable_by_key(|&n| Reverse(n));
    // Whole cycles order exactly.
    let mut free: BinaryHeap<Reverse<u64>> = (0..workers).map(|_| Reverse(0)).collect();
    let mut last = 0;
    for n in blocks {
        let took = (cycles.block * n as f64 + cycles.tile).round() as u64;
        for _ in 0..times {
            let Some(Reverse(start)) = free.pop() else { return 0.0 };
            last = last.max(start + took);
            free.push(Reverse(start + took));
        }
    }
    last as f64 + cycles.start
}

/// The clock and the memory of a GPU, beyond the rates of its SMs.
///
/// ```
/// use fulgurite::gpu::Board;
///
/// // Under the power limit, a kernel that leaves the tensor cores idle for a third of the time runs at a higher clock.
/// assert!(Board::H200.gigahertz(0.66) > 1.1 * Board::H200.gigahertz(0.97));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Board {
    /// The highest clock, in GHz.
    pub most_gigahertz: f64,
    /// The clock, in GHz, that the power limit would leave if the tensor cores had no idle cycle.
    pub busy_gigahertz: f64,
    /// The clock grows with this power of the share of cycles in which the tensor cores work, downwards.
    pub exponent: f64,
    /// Share of the memory's bandwidth that a kernel reaches.
    pub memory_share: f64,
    /// How much of the memory's time and of the SMs' time overlaps: both add up as powers of this number.
    pub overlap: f64,
    /// Seconds from the end of a launch to the start of the next.
    pub launch_seconds: f64,
}

impl Board {
    /// H200. The highest clock is NVIDIA's. `busy_gigahertz`, `exponent` and `overlap` are set by hand to a part of the measured
    /// forward cells (docs/lab/016-cycle-model.md), the others are assumed.
    pub const H200: Board = Board {
        most_gigahertz: 1.98,
        busy_gigahertz: 1.53,
        exponent: 0.44,
        memory_share: 0.92,
        overlap: 2.5,
        launch_seconds: 2e-6,
    };

    /// The board of an architecture's GPU.
    pub fn of(arch: &Arch) -> Board {
        let free = |gigahertz: f64| Board { most_gigahertz: gigahertz, busy_gigahertz: gigahertz, ..Board::H200 };
        match arch.sm {
            ..=85 => free(1.41),
            86..=88 => free(1.80),
            89 => free(2.52),
            90..=99 => Board::H200,
            100..=119 => free(1.856),
            120 => free(2.407),
            _ => free(2.5),
        }
    }

    /// The clock, in GHz, if the tensor cores work in this share of the cycles.
    pub fn gigahertz(&self, tensor_share: f64) -> f64 {
        (self.busy_gigahertz * tensor_share.max(1e-3).powf(-self.exponent)).min(self.most_gigahertz)
    }
}

/// What the whole problem adds to the tiles.
pub(crate) struct Whole {
    /// Blocks of each tile of a pair, and the number of pairs.
    pub blocks: Vec<u64>,
    pub pairs: usize,
    /// Backward: steps of queries of a pair.
    pub rows: u64,
    /// Bytes that the main kernel reads and writes at least.
    pub bytes: f64,
    /// Seconds of the launches around the main kernel.
    pub other_seconds: f64,
    pub launches: usize,
}

/// Puts tiles together.
pub(crate) fn compose(played: &Played<'_>, cycles: TileCycles, whole: Whole) -> Predicted {
    let (rates, board) = (Architecture::of(&played.target.arch), Board::of(&played.target.arch));
    let sms = (rates.arch.sms / played.cluster) as usize;
    let blocks: u64 = whole.blocks.iter().sum::<u64>() * whole.pairs as u64;
    let workers = sms * played.ctas_per_sm;
    let rows = whole.rows as f64 * whole.pairs as f64 / workers as f64;
    let kernel_cycles = makespan(whole.blocks, whole.pairs, workers, &cycles) + rows * cycles.row;
    let products = blocks as f64 * cycles.tensor_flops / rates.tensor_flops / sms as f64;
    let share = (products / kernel_cycles.max(1.0)).min(1.0);
    let worked = blocks as f64 * cycles.block / workers as f64 / kernel_cycles.max(1.0);
    let shares = cycles.busy.iter().map(|&(unit, busy)| (unit, busy * worked)).collect();
    let gigahertz = board.gigahertz(share);
    let of_sms = kernel_cycles / gigahertz / 1e9;
    let of_memory = memory_seconds(&rates, &board, whole.bytes);
    let p = board.overlap;
    let seconds = (of_sms.powf(p) + of_memory.powf(p)).powf(1.0 / p)
        + whole.other_seconds
        + board.launch_seconds * whole.launches as f64;
    let (busiest, busy) = cycles.busy.first().map_or(("nothing", 0.0), |&(unit, busy)| (unit, busy.min(1.0)));
    let bound = if of_memory > of_sms {
        "global memory".to_owned()
    } else if busy > 0.9 {
        format!("{busiest}, {:.0} % of a block's cycles", busy * 100.0)
    } else {
        format!("latencies between the roles: {busiest} works in {:.0} % of a block's cycles", busy * 100.0)
    };
    Predicted { cycles, kernel_cycles, shares, gigahertz, seconds, bound }
}

/// Seconds to move bytes through global memory.
pub(crate) fn memory_seconds(rates: &Architecture, board: &Board, bytes: f64) -> f64 {
    bytes / (rates.global_bytes * f64::from(rates.arch.sms) * rates.gigahertz * 1e9 * board.memory_share)
}

/// The engine that plays forward attention for a caller that does not read the LSE.
pub(crate) fn forward_engine(sim: Arc<Sim>, tables: Tables) -> OnDevice<Sim> {
    OnDevice::new(sim, None, tables).without_lse()
}

/// The builder of a few tiles: one head, windows that reach all keys.
pub(crate) fn tiles_of(builder: &ProblemBuilder, [batch, q_len, k_len]: [usize; 3]) -> Result<Problem, Error> {
    let reach = q_len.max(k_len) as i64;
    Ok(builder.clone().windows_reaching(reach).heads(1, 1).dense(batch, q_len, k_len).build()?)
}
