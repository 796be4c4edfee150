//! Why a problem runs on Hopper as it does, and how fast it could: nothing of it needs a GPU.
//!
//! The kernel runs on the simulator for a few blocks of keys of one tile; what two such runs differ by is what a block
//! costs each unit of a multiprocessor. The busiest one bounds the whole.

use crate::engine::{Engine, Run};
use crate::on_device::OnDevice;
use crate::{Error, Unsupported};
use fulgurite_core::random::Rng;
use fulgurite_core::{Inputs, Problem, ProblemBuilder, Tensor};
use fulgurite_kernels::attention::few::ROWS;
use fulgurite_kernels::attention::plan::{Forward, Table};
use fulgurite_ptx::{Kernel, Target};
use fulgurite_sim::{Architecture, Sim};
use std::sync::Arc;

/// How forward attention on a problem runs on Hopper.
#[derive(Debug, Clone)]
pub struct Explained {
    /// The kernel.
    pub kernel: Kernel,
    /// How it is cut.
    pub cut: String,
    /// Why it is this kernel and this cut.
    pub why: String,
    /// Rows of queries of a tile, and keys of a block.
    pub tile: [u32; 2],
    /// Blocks of keys of all tiles.
    pub blocks: u64,
    /// Cycles of a multiprocessor's units for one block of keys of one tile, the busiest first.
    pub units: Vec<(&'static str, f64)>,
    /// Seconds that the busiest unit needs for everything, on all multiprocessors of an H200 at its full clock.
    pub bound_seconds: f64,
}

/// Explains a problem whose description is `builder` without its sizes.
///
/// ```
/// use fulgurite::gpu::explain;
/// use fulgurite::{DType, Mask, Problem};
///
/// let builder = Problem::builder().heads(16, 16).head_dim(128).dtype(DType::Bf16).mask(Mask::causal());
/// let explained = explain(&builder, [1, 4096, 4096], &Default::default())?;
/// assert_eq!(explained.kernel.name, "attention_forward");
/// assert_eq!(explained.units[0].0, "tensor");
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn explain(builder: &ProblemBuilder, sizes: [usize; 3], table: &Table) -> Result<Explained, Error> {
    let refuse =
        |feature: String| Unsupported { engine: "cuda".into(), feature, instead: "the engine `cpu` has it".into() };
    let [batch, q_len, k_len] = sizes;
    let problem = builder.clone().dense(batch, q_len, k_len).build()?;
    let plan = Forward::by_table(&problem, None, table).map_err(|missing| refuse(missing.feature))?;
    let kernel = plan.kernel(Target::HOPPER).unwrap_or_else(|e| panic!("bug in fulgurite: {e}\n{plan:?}"));
    let (rows, group) = (problem.max_q_len() * problem.group(), problem.group());
    let longest = problem.head_dim().max(problem.value_dim());
    let (tile, cut, why) = match plan.few_tuning() {
        Some(tuning) => (
            [ROWS, tuning.cols],
            format!("cols={} depth={} whole={}", tuning.cols, tuning.depth, tuning.whole),
            format!(
                "{rows} rows of queries ({q_len} x {group} heads of a group) fit one tile: few queries, whose keys are split \
                 over blocks by a rule of their number alone"
            ),
        ),
        None => {
            let tuning = plan.tuning();
            let from = if tuning == Table::default().find(longest as u32, Forward::keys_seen(&problem)) {
                "built-in"
            } else {
                "adapted"
            };
            (
                [plan.tile_rows(), tuning.cols],
                format!("{tuning} rescale={}", tuning.rescale),
                format!("head_dim {longest}, {k_len} keys: the {from} cut for them"),
            )
        }
    };
    let why = match plan.least_copies() {
        Some(copies) => format!(
            "{why}; {} are copied by launches before and after it, for a head_dim is no multiple of 8",
            copies.names().join(", ")
        ),
        None => why,
    };
    let is_few = plan.few_tuning().is_some();
    let blocks = blocks(&problem, tile, is_few);
    let units = units(builder, &problem, (tile, is_few), table)?;
    let busiest = units.first().map_or(0.0, |(_, cycles)| *cycles);
    let h200 = Architecture::H200;
    let bound_seconds = busiest * blocks as f64 / f64::from(h200.multiprocessors) / (h200.gigahertz * 1e9);
    Ok(Explained { kernel, cut, why, tile, blocks, units, bound_seconds })
}

/// Blocks of keys that some row of a tile sees, over all tiles.
fn blocks(problem: &Problem, [rows, cols]: [u32; 2], few: bool) -> u64 {
    let (q_len, k_len) = (problem.max_q_len(), problem.max_k_len());
    let of_rows = |first: usize, last: usize| {
        let (start, end) =
            (problem.mask().keys(first, q_len, k_len).start, problem.mask().keys(last, q_len, k_len).end);
        (end.max(start).div_ceil(cols as usize) - start / cols as usize).max(1) as u64
    };
    if q_len == 0 {
        return 0;
    }
    let batch = problem.batch() as u64;
    match few {
        true => of_rows(0, q_len - 1) * batch * problem.kv_heads() as u64,
        false => {
            let tiles = (0..q_len).step_by(rows as usize);
            let a_head: u64 = tiles.map(|first| of_rows(first, (first + rows as usize).min(q_len) - 1)).sum();
            a_head * batch * problem.q_heads() as u64
        }
    }
}

/// What a block of keys costs each unit: the difference of two runs on the simulator.
fn units(
    builder: &ProblemBuilder,
    problem: &Problem,
    ([rows, cols], is_few): ([u32; 2], bool),
    table: &Table,
) -> Result<Vec<(&'static str, f64)>, Error> {
    /// Blocks of keys of the two runs.
    const RUNS: [usize; 2] = [4, 8];
    let group = problem.group();
    let q_len = (rows as usize).min(problem.max_q_len()).max(1);
    let cycles = |blocks: usize| -> Result<Vec<(&'static str, f64)>, Error> {
        // Beside those that a mask may cut.
        let k_len = blocks * cols as usize + if is_few { 0 } else { q_len };
        let small = builder.clone().heads(group, 1).dense(1, q_len, k_len).build()?;
        let sim = Arc::new(Sim::default());
        // The cut of the whole problem, not the one of a short sequence.
        let keys = Forward::keys_seen(problem);
        let engine = OnDevice::new("sim", sim.clone(), None, table.clone().as_for(keys));
        let mut rng = Rng::new(1);
        let mut tensor =
            |shape: &[usize]| Tensor::from_f64(small.dtype(), &rng.normals(shape.iter().product(), 1.0), shape);
        let (q, k, v) = (tensor(&small.q_shape())?, tensor(&small.k_shape())?, tensor(&small.v_shape())?);
        // Whatever auxiliary tensors hold, the work is the same.
        let aux = small.aux().iter().map(|aux| Tensor::zeros(aux.dtype, &aux.shape)).collect::<Result<Vec<_>, _>>()?;
        let mut inputs = Inputs::new(q.view(), k.view(), v.view());
        inputs.aux = small.aux().iter().zip(&aux).map(|(spec, tensor)| (&spec.name[..], tensor.view())).collect();
        engine.forward(&small, &inputs, &Run::default())?;
        Ok(Architecture::H200.cycles(&sim.report().total()))
    };
    let [few, many] = [cycles(RUNS[0])?, cycles(RUNS[1])?];
    // Each head of the group has a tile of its own, unless queries are few.
    let each = ((RUNS[1] - RUNS[0]) * if is_few { 1 } else { group }) as f64;
    let both = few.iter().zip(&many).map(|(few, many)| (few.0, (many.1 - few.1) / each));
    // Keys of one head that many tiles read come from the second-level cache: only few queries wait for memory.
    let mut units: Vec<_> = both.filter(|(unit, _)| is_few || *unit != "global memory").collect();
    units.sort_by(|a, b| b.1.total_cmp(&a.1));
    Ok(units)
}
