//! Explains how a problem runs on a GPU architecture, and estimates a bound on its time, without a GPU.
//!
//! The kernel runs on the simulator twice: for a few key blocks of one tile (backward: a few steps of queries for a few
//! key tiles), and for a few more. The difference is the cost of one block for each unit of an SM. The busiest unit
//! bounds the total time.

use crate::cycles::{self, Board, Played, Predicted, Sample, Whole};
use crate::device::OnDevice;
use crate::engine::{Engine, Run};
use crate::profile::Tables;
use crate::{Error, Unsupported};
use fulgurite_core::random::Rng;
use fulgurite_core::{Inputs, Problem, ProblemBuilder, Saved, Tensor};
use fulgurite_kernels::attention::backward::plan::BackwardPlan;
use fulgurite_kernels::attention::backward::{Adds, BackwardConfig, Share};
use fulgurite_kernels::attention::decode::ROWS;
use fulgurite_kernels::attention::forward::plan::{ConfigTable, ForwardPlan, NoKernel, TileConfig};
use fulgurite_kernels::operator::{Backward, BackwardOptions, Forward, ForwardOptions, Operator, Refusal};
use fulgurite_ptx::{BuildError, Kernel, Target, TensorUnit};
use fulgurite_sim::{Architecture, Options, Sim};
use std::sync::Arc;

/// How attention on a problem, or its gradients, runs on a GPU architecture.
#[derive(Debug, Clone)]
pub struct Explained {
    /// The kernel; for backward, the one that computes the gradients.
    pub kernel: Kernel,
    /// The tile configuration as text.
    pub tile_config: String,
    /// The reason for this kernel and this tile configuration.
    pub why: String,
    /// Forward: queries per tile and keys per block. Backward: keys per tile and queries per step.
    pub tile: [u32; 2],
    /// Number of key blocks (forward) or query steps (backward) of all tiles.
    pub blocks: u64,
    /// Cycles of each unit of an SM per block or step, the busiest unit first.
    pub units: Vec<(&'static str, f64)>,
    /// Seconds of memory time for the launches before and after the kernel.
    pub other_launches_seconds: f64,
    /// Seconds of the busiest unit for the whole problem, on all SMs of [`Arch::gpu`](fulgurite_ptx::Arch::gpu) at its
    /// full clock, plus `other_launches_seconds`.
    pub bound_seconds: f64,
}

/// Explains a problem, given by its builder and its sizes.
///
/// ```
/// use fulgurite::gpu::{Arch, Target, explain};
/// use fulgurite::{DType, Mask, Problem};
///
/// let builder = Problem::builder().heads(16, 16).head_dim(128).dtype(DType::Bf16).mask(Mask::causal());
/// let explained = explain(&builder, [1, 4096, 4096], Target::new(Arch::SM_90A), &Default::default())?;
/// assert_eq!(explained.kernel.name, "attention_forward");
/// assert_eq!(explained.units[0].0, "tensor");
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn explain(
    builder: &ProblemBuilder,
    sizes: [usize; 3],
    target: Target,
    tables: &Tables,
) -> Result<Explained, Error> {
    let [batch, q_len, k_len] = sizes;
    let problem = builder.clone().dense(batch, q_len, k_len).build()?;
    let plan = Forward::plan(&problem, &ForwardOptions::default(), target, tables).map_err(refused)?;
    let kernel = plan.kernel(target).map_err(unbuilt)?;
    let (rows, group) = (problem.max_q_len() * problem.group(), problem.group());
    let longest = problem.head_dim().max(problem.value_dim());
    let keys_seen = ForwardPlan::keys_seen(&problem);
    let by_keys = |from: &str| format!("head_dim {longest}, a query sees {keys_seen} keys: {from}");
    let chosen = (plan.decode_config(), plan.config(), plan.sync_config(), plan.tensor_config());
    let (tile, tile_config, why) = match chosen {
        (Some(config), ..) => (
            [ROWS, config.cols],
            format!("cols={} depth={} whole={}", config.cols, config.depth, config.whole),
            format!(
                "{rows} rows of queries ({q_len} x {group} heads of a group) fit one tile: decode. Keys are split over CTAs; \
                 the split depends on their number alone"
            ),
        ),
        (None, Some(config), ..) => (
            [plan.tile_rows(), config.cols],
            format!("{config} rescale={}", config.rescale),
            by_keys(origin(config, &tables.forward, longest, keys_seen)),
        ),
        (None, None, Some(config), _) => (
            [plan.tile_rows(), config.cols],
            format!("{config} rescale={}", config.rescale),
            by_keys(origin(config, &tables.sync, longest, keys_seen)),
        ),
        (None, None, None, Some(config)) => (
            [plan.tile_rows(), config.cols],
            format!("{config} rescale={}", config.rescale),
            // Profiles have no table for this unit.
            by_keys(origin(config, &ConfigTable::default(), longest, keys_seen)),
        ),
        (None, None, None, None) => unreachable!("bug in fulgurite: a forward plan without a tile configuration"),
    };
    let why = match plan.least_copies() {
        Some(copies) => format!(
            "{why}; {} are copied by launches before and after it, because a head_dim is not a multiple of 8",
            copies.names().join(", ")
        ),
        None => why,
    };
    let why = why + &skipped(plan.expression_blocks());
    let is_decode = plan.decode_config().is_some();
    let blocks = blocks(&problem, tile, is_decode);
    let units = units(builder, &problem, (tile, is_decode), Counted { kernel: &kernel.name, target, tables })?;
    let (other_launches_seconds, bound_seconds) = (0.0, bound(&units, blocks, target));
    Ok(Explained { kernel, tile_config, why, tile, blocks, units, other_launches_seconds, bound_seconds })
}

/// Explains the gradients of a problem, given by its builder and its sizes.
///
/// ```
/// use fulgurite::gpu::{Arch, Target, explain_backward};
/// use fulgurite::{DType, Problem};
///
/// let builder = Problem::builder().heads(16, 16).head_dim(128).dtype(DType::Bf16);
/// let explained = explain_backward(&builder, [1, 4096, 4096], Target::new(Arch::SM_90A), &Default::default())?;
/// assert_eq!(explained.kernel.name, "attention_backward");
/// assert_eq!(explained.tile, [128, 80]);
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn explain_backward(
    builder: &ProblemBuilder,
    sizes: [usize; 3],
    target: Target,
    tables: &Tables,
) -> Result<Explained, Error> {
    let [batch, q_len, k_len] = sizes;
    let problem = builder.clone().dense(batch, q_len, k_len).build()?;
    let plan = Backward::plan(&problem, &BackwardOptions::default(), target, tables).map_err(refused)?;
    let kernels = plan.kernels(target).map_err(unbuilt)?;
    let (config, longest) = (plan.config(), problem.head_dim().max(problem.value_dim()));
    let shares = match config.share {
        Share::Keys => "warpgroups share the keys of a tile and keep whole rows of d_k and d_v",
        Share::Columns => {
            "warpgroups share the columns of d_k, d_v and d_q, because whole rows need more registers than one \
                           warpgroup has"
        }
        Share::Tensor => "d_k, d_v and d_q are in tensor memory; warpgroups share the queries of a step",
        Share::Warps32 | Share::Warps16 => "eight warps share the keys of a tile and the columns of d_k, d_v and d_q",
        Share::Pairs => {
            "warpgroups share the columns of d_k and d_v, and a pair of CTAs those of d_q, over the keys of both, which \
                           halves the d_q traffic"
        }
    };
    let adds = match config.adds {
        Adds::Threads => "threads add d_q from registers",
        Adds::CopyEngine => "TMA adds d_q from shared memory",
    };
    let from = origin(config, &tables.backward, longest.next_multiple_of(8), k_len as u64);
    let units = step_units(builder, &problem, config, Counted { kernel: &kernels.main.name, target, tables })?;
    let blocks = plan.steps_of_tiles();
    let bytes = around_backward(&problem, &plan, [batch, q_len]);
    let gpu = Architecture::of(&target.arch);
    let other_launches_seconds = bytes / (gpu.global_bytes * f64::from(gpu.arch.sms) * gpu.gigahertz * 1e9);
    Ok(Explained {
        kernel: kernels.main.as_ref().clone(),
        tile_config: config.to_string(),
        why: format!(
            "head_dim {longest}, {k_len} keys: {from}; {shares}; {adds}{}{}",
            heads_of_tiles(&problem, &plan),
            skipped(plan.expression_blocks())
        ),
        tile: [config.keys(), config.rows],
        blocks,
        other_launches_seconds,
        bound_seconds: bound(&units, blocks, target) + other_launches_seconds,
        units,
    })
}

/// Predicts the time of forward attention on a problem, given by its builder and its sizes, for a caller that does not read
/// the LSE. `unit` is the one that multiplies matrices; `None` means the fastest.
pub fn predict(
    builder: &ProblemBuilder,
    sizes: [usize; 3],
    target: Target,
    tables: &Tables,
    unit: Option<TensorUnit>,
) -> Result<Predicted, Error> {
    let [batch, q_len, k_len] = sizes;
    let problem = builder.clone().dense(batch, q_len, k_len).build()?;
    let options = ForwardOptions { lse: false, unit, ..ForwardOptions::default() };
    let plan = Forward::plan(&problem, &options, target, tables).map_err(refused)?;
    let kernel = plan.kernel(target).map_err(unbuilt)?;
    let cols = plan.config().map(|config| config.cols);
    let cols = cols.or(plan.sync_config().map(|config| config.cols)).or(plan.tensor_config().map(|config| config.cols));
    let (Some(cols), None) = (cols, plan.decode_config()) else {
        return Err(refuse(NoKernel { feature: "a prediction for few queries".into() }).into());
    };
    let rows = plan.tile_rows();
    let ctas_per_sm = cycles::ctas_per_sm(&kernel);
    // The tile configuration of the whole problem, not that of a short sequence.
    let keys = ForwardPlan::keys_seen(&problem);
    let Tables { forward, sync, backward } = tables.clone();
    let tables = Tables { forward: forward.as_for(keys), sync: sync.as_for(keys), backward };
    let played = Played { kernel: &kernel.name, target, ctas_per_sm, cluster: kernel.cluster };
    let samples = cycles::FORWARD.map(|[tiles, blocks]| {
        let sizes = [tiles * ctas_per_sm, rows as usize, blocks * cols as usize];
        let problem = cycles::tiles_of(builder, sizes)?;
        Ok::<_, Error>(Sample {
            problem,
            backward: false,
            tiles: tiles as u64,
            blocks: (tiles * blocks) as u64,
            rows: 0,
        })
    });
    let samples = samples.into_iter().collect::<Result<Vec<Sample>, Error>>()?;
    let cycles = played.tiles(|sim| cycles::forward_engine(sim, tables.clone()).with_unit(unit), &samples)?;
    let elements = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let bytes = elements.iter().map(|shape| shape.iter().product::<usize>()).sum::<usize>() as f64;
    let whole = Whole {
        blocks: tile_blocks(&problem, [rows, cols]),
        pairs: problem.batch() * problem.q_heads(),
        rows: 0,
        bytes: bytes * problem.dtype().size_bytes() as f64,
        other_seconds: 0.0,
        launches: 1,
    };
    Ok(cycles::compose(&played, cycles, whole))
}

/// Predicts the time of the gradients of a problem, given by its builder and its sizes. `unit` is the one that multiplies
/// matrices; `None` means the fastest.
pub fn predict_backward(
    builder: &ProblemBuilder,
    sizes: [usize; 3],
    target: Target,
    tables: &Tables,
    unit: Option<TensorUnit>,
) -> Result<Predicted, Error> {
    let [batch, q_len, k_len] = sizes;
    let problem = builder.clone().dense(batch, q_len, k_len).build()?;
    let options = BackwardOptions { unit, ..BackwardOptions::default() };
    let plan = Backward::plan(&problem, &options, target, tables).map_err(refused)?;
    let kernels = plan.kernels(target).map_err(unbuilt)?;
    let (kernel, config) = (&kernels.main, plan.config());
    let ctas_per_sm = cycles::ctas_per_sm(kernel);
    let played = Played { kernel: &kernel.name, target, ctas_per_sm, cluster: kernel.cluster };
    let samples = cycles::BACKWARD.map(|[steps, tiles]| {
        let sizes = [1, steps * config.rows as usize, tiles * config.keys() as usize];
        let problem = cycles::tiles_of(builder, sizes)?;
        let blocks =
            Backward::plan(&problem, &options, target, tables).map_err(refused)?.with_config(config).steps_of_tiles();
        Ok::<_, Error>(Sample { problem, backward: true, tiles: tiles as u64, blocks, rows: steps as u64 })
    });
    let samples = samples.into_iter().collect::<Result<Vec<Sample>, Error>>()?;
    let cycles =
        played.tiles(|sim| OnDevice::new(sim, None, tables.clone()).forcing(config).with_unit(unit), &samples)?;
    let rates = Architecture::of(&target.arch);
    let elements = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let bytes = elements.iter().map(|shape| shape.iter().product::<usize>()).sum::<usize>() as f64;
    let bytes = bytes * problem.dtype().size_bytes() as f64;
    let around = around_backward(&problem, &plan, [batch, q_len]);
    let whole = Whole {
        blocks: plan.tile_steps(),
        pairs: problem.batch() * problem.q_heads(),
        rows: q_len.div_ceil(config.rows as usize) as u64,
        bytes: 2.0 * bytes,
        other_seconds: cycles::memory_seconds(&rates, &Board::of(&target.arch), around),
        launches: 3,
    };
    Ok(cycles::compose(&played, cycles, whole))
}

/// Bytes that the launches around the main kernel of backward read and write.
fn around_backward(problem: &Problem, plan: &BackwardPlan, [batch, q_len]: [usize; 2]) -> f64 {
    // o, d_o and d_q in 16 bits; the f32 sums of d_q are zeroed before the kernel and read after it.
    let row_bytes = 2 * (2 * problem.value_dim() + problem.head_dim()) + 2 * 4 * problem.head_dim();
    // Parts of d_k and d_v are written and read once.
    let rows = batch as f64 * problem.q_heads() as f64 * q_len as f64;
    rows * row_bytes as f64 + 2.0 * plan.head_part_bytes() as f64
}

/// Says that blocks are skipped because of the mask's expression, if they are.
fn skipped(blocks: Option<[usize; 2]>) -> String {
    blocks.map_or(String::new(), |[rows, cols]| {
        format!(
            "; launches before it bound the expression of the mask over blocks of {rows} queries and {cols} keys, and the \
             kernel skips the blocks that it hides (the bound counts them)"
        )
    })
}

/// Says how the query heads of a key/value head are spread over CTAs. Empty if every key/value head has one query head.
fn heads_of_tiles(problem: &Problem, plan: &BackwardPlan) -> String {
    let (group, parts) = (problem.group(), plan.head_splits());
    match (group, parts, plan.config().share.ctas()) {
        (..=1, ..) => String::new(),
        (_, 1, 1) => format!("; head_splits 1: a CTA walks over all {group} query heads of its keys"),
        (_, 1, _) => format!(
            "; head_splits 1: a pair of CTAs walks over all {group} query heads of its keys, and has no registers left \
             to share them with others"
        ),
        _ => format!(
            "; head_splits {parts}: {parts} CTAs share the {group} query heads of a tile of keys, at most {} each, and \
             another kernel adds their parts of d_k and d_v ({:.1} MB in f32) in a fixed order",
            plan.part_heads(),
            plan.head_part_bytes() as f64 / 1e6,
        ),
    }
}

fn refuse(missing: NoKernel) -> Unsupported {
    let NoKernel { feature } = missing;
    Unsupported { engine: "cuda".into(), feature, instead: "the engine `cpu` has it".into() }
}

fn refused(refusal: Refusal) -> Error {
    match refusal {
        Refusal::NoKernel(missing) => refuse(missing).into(),
        other => refuse(NoKernel { feature: other.to_string() }).into(),
    }
}

/// The error for a tile configuration of the tables that has no kernel.
fn unbuilt(e: BuildError) -> Unsupported {
    refuse(NoKernel { feature: format!("a kernel with the tile configuration of its table: {e}") })
}

/// The origin of a tile configuration, as text.
fn origin<T: TileConfig>(config: T, table: &ConfigTable<T>, head_dim: usize, keys: u64) -> &'static str {
    let head_dim = head_dim as u32;
    match config {
        _ if config == ConfigTable::default().find(head_dim, keys) => "the built-in tile configuration for them",
        _ if config == table.find(head_dim, keys) => "the tile configuration that the profile of this GPU has for them",
        _ => "the tile configuration for them, adapted to the mask, the exponential and what else is kept in registers",
    }
}

/// Seconds of the busiest unit for this many blocks.
fn bound(units: &[(&'static str, f64)], blocks: u64, target: Target) -> f64 {
    let (busiest, gpu) = (units.first().map_or(0.0, |(_, cycles)| *cycles), Architecture::of(&target.arch));
    busiest * blocks as f64 / f64::from(gpu.arch.sms) / (gpu.gigahertz * 1e9)
}

/// Number of key blocks that some row from `first` to `last` sees.
fn blocks_of(problem: &Problem, first: usize, last: usize, cols: u32) -> u64 {
    let (q_len, k_len) = (problem.max_q_len(), problem.max_k_len());
    let (start, end) = (problem.mask().keys(first, q_len, k_len).start, problem.mask().keys(last, q_len, k_len).end);
    (end.max(start).div_ceil(cols as usize) - start / cols as usize).max(1) as u64
}

/// Key blocks of each tile of a head.
fn tile_blocks(problem: &Problem, [rows, cols]: [u32; 2]) -> Vec<u64> {
    let (q_len, rows) = (problem.max_q_len(), rows as usize);
    (0..q_len).step_by(rows).map(|first| blocks_of(problem, first, (first + rows).min(q_len) - 1, cols)).collect()
}

/// Number of key blocks that some row of a tile sees, over all tiles.
fn blocks(problem: &Problem, [rows, cols]: [u32; 2], decode: bool) -> u64 {
    let q_len = problem.max_q_len();
    if q_len == 0 {
        return 0;
    }
    let batch = problem.batch() as u64;
    match decode {
        true => blocks_of(problem, 0, q_len - 1, cols).saturating_mul(batch).saturating_mul(problem.kv_heads() as u64),
        false => {
            let a_head: u64 = tile_blocks(problem, [rows, cols]).iter().sum();
            a_head.saturating_mul(batch).saturating_mul(problem.q_heads() as u64)
        }
    }
}

/// Query heads of a group that are simulated. All of them cost the same, and each one takes time and memory; auxiliary
/// tensors may have an entry for each.
fn simulated_heads(problem: &Problem) -> usize {
    problem.group().min(if problem.aux().is_empty() { 16 } else { 128 })
}

/// A kernel to count on the simulator: its name, the GPU, and the tile configurations.
#[derive(Clone, Copy)]
struct Counted<'a> {
    kernel: &'a str,
    target: Target,
    tables: &'a Tables,
}

/// Cycles of each unit per key block: the difference of two runs on the simulator.
fn units(
    builder: &ProblemBuilder,
    problem: &Problem,
    ([rows, cols], is_decode): ([u32; 2], bool),
    counted: Counted<'_>,
) -> Result<Vec<(&'static str, f64)>, Error> {
    /// Key blocks of the two runs.
    const RUNS: [usize; 2] = [4, 8];
    let group = simulated_heads(problem);
    let q_len = (rows as usize).min(problem.max_q_len()).max(1);
    let cycles = |blocks: usize| {
        // Add `q_len` keys, because a causal mask may hide that many.
        let k_len = blocks * cols as usize + if is_decode { 0 } else { q_len };
        // A window narrower than the runs would make them equal: let it reach all keys, and keep its mask code.
        let small = builder.clone().windows_reaching(k_len as i64).heads(group, 1).dense(1, q_len, k_len).build()?;
        // Use the tile configuration of the whole problem, not that of a short sequence.
        let (Tables { forward, sync, backward }, keys) = (counted.tables.clone(), ForwardPlan::keys_seen(problem));
        let tables = Tables { forward: forward.as_for(keys), sync: sync.as_for(keys), backward };
        simulated(
            counted,
            &small,
            |sim| OnDevice::new(sim, None, tables),
            |engine, inputs| engine.forward(&small, inputs, &Run::default()).map(|_| ()),
        )
    };
    let [few, many] = [cycles(RUNS[0])?, cycles(RUNS[1])?];
    // Each head of the group has its own tile, except in decode.
    let each = ((RUNS[1] - RUNS[0]) * if is_decode { 1 } else { group }) as f64;
    // In forward attention, many tiles read the keys of a head, so they come from L2. Only decode is bound by memory.
    Ok(apart(few, many, each, |unit| is_decode || unit != "global memory"))
}

/// Cycles of each unit per step of queries, for backward. Both runs have the same key tiles but different numbers of
/// queries.
fn step_units(
    builder: &ProblemBuilder,
    problem: &Problem,
    config: BackwardConfig,
    counted: Counted<'_>,
) -> Result<Vec<(&'static str, f64)>, Error> {
    const TILES: usize = 2;
    let group = simulated_heads(problem);
    let k_len = TILES * config.keys() as usize;
    let cycles = |q_len: usize| {
        let small = builder.clone().heads(group, 1).dense(1, q_len, k_len).build()?;
        let plan = Backward::plan(&small, &BackwardOptions::default(), counted.target, counted.tables);
        let plan = plan.map_err(refused)?;
        let steps = plan.with_config(config).steps_of_tiles();
        // Zeros instead of forward's LSE make the sums of p wrong, but the work is the same.
        let [o, d_o] =
            [Tensor::zeros(small.dtype(), &small.o_shape())?, Tensor::zeros(small.dtype(), &small.o_shape())?];
        let lse = Tensor::zeros(fulgurite_core::DType::F32, &small.lse_shape())?;
        let saved = Saved { o: o.view(), lse: lse.view(), d_o: d_o.view(), d_lse: None };
        let engine = |sim| OnDevice::new(sim, None, counted.tables.clone()).forcing(config);
        let backward = |engine: &OnDevice<Sim>, inputs: &Inputs<'_>| {
            engine.backward(&small, inputs, &saved, &Run::default()).map(|_| ())
        };
        Ok::<_, Error>((simulated(counted, &small, engine, backward)?, steps))
    };
    let (few, few_steps) = cycles(config.rows as usize)?;
    let (many, many_steps) = cycles(4 * config.rows as usize)?;
    Ok(apart(few, many, (many_steps - few_steps) as f64, |unit| unit != "global memory"))
}

/// Cycles of each unit for one kernel of a call on the simulator.
fn simulated(
    counted: Counted<'_>,
    problem: &Problem,
    engine: impl FnOnce(Arc<Sim>) -> OnDevice<Sim>,
    call: impl FnOnce(&OnDevice<Sim>, &Inputs<'_>) -> Result<(), Error>,
) -> Result<Vec<(&'static str, f64)>, Error> {
    let sim = Arc::new(Sim::on(counted.target, Options::default()));
    let engine = engine(sim.clone());
    let mut rng = Rng::new(1);
    let mut tensor =
        |shape: &[usize]| Tensor::from_f64(problem.dtype(), &rng.normals(shape.iter().product(), 1.0), shape);
    let (q, k, v) = (tensor(&problem.q_shape())?, tensor(&problem.k_shape())?, tensor(&problem.v_shape())?);
    // The contents of auxiliary tensors do not change the amount of work.
    let aux = problem.aux().iter().map(|aux| Tensor::zeros(aux.dtype, &aux.shape)).collect::<Result<Vec<_>, _>>()?;
    let mut inputs = Inputs::new(q.view(), k.view(), v.view());
    inputs.aux = problem.aux().iter().zip(&aux).map(|(spec, tensor)| (&spec.name[..], tensor.view())).collect();
    call(&engine, &inputs)?;
    Ok(sim.architecture().cycles(&sim.counts_of(counted.kernel)))
}

/// The cost of one more block for each unit, the busiest unit first.
fn apart(
    few: Vec<(&'static str, f64)>,
    many: Vec<(&'static str, f64)>,
    blocks: f64,
    counts: impl Fn(&str) -> bool,
) -> Vec<(&'static str, f64)> {
    let both = few.iter().zip(&many).map(|(few, many)| (few.0, (many.1 - few.1) / blocks));
    let mut units: Vec<_> = both.filter(|(unit, _)| counts(unit)).collect();
    units.sort_by(|a, b| b.1.total_cmp(&a.1));
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::{DType, Mask};
    use fulgurite_kernels::attention::backward::Order;

    /// A block of keys costs as much under a narrow window as under a wide one.
    #[test]
    fn windows_of_any_width_have_a_bound() {
        let bound = |mask: Mask| {
            let builder = Problem::builder().heads(2, 2).head_dim(128).dtype(DType::Bf16).mask(mask);
            explain(&builder, [1, 2048, 2048], Target::HOPPER, &Tables::default()).unwrap()
        };
        let wide = bound(Mask::window(1024, 0));
        for mask in [Mask::window(128, 0), Mask::causal().and(Mask::window(128, 0)), Mask::window(300, 300)] {
            let narrow = bound(mask.clone());
            let [a, b] = [&narrow, &wide].map(|explained| explained.units[0].1);
            assert!(a > 0.5 * b && a < 2.0 * b, "{mask:?}: {a} and {b} cycles");
            assert!(narrow.bound_seconds > 0.0);
        }
    }

    /// An architecture without `wgmma` has another kernel and other rates.
    #[test]
    fn each_architecture_has_its_own_plan() {
        let builder = Problem::builder().heads(2, 2).head_dim(64).dtype(DType::Bf16);
        let on = |name: &str| {
            let target = Target::named(name).unwrap();
            explain(&builder, [1, 2048, 2048], target, &Tables::default()).unwrap()
        };
        let [ada, hopper] = [on("sm_89"), on("sm_90a")];
        assert_eq!(ada.tile, [128, 80]);
        assert!(ada.tile_config.starts_with("blocks=2 cols=80 depth=2 rescale="), "{}", ada.tile_config);
        assert!(ada.why.ends_with("the built-in tile configuration for them"), "{}", ada.why);
        assert!(ada.bound_seconds > hopper.bound_seconds && ada.kernel.target == Target::named("sm_89").unwrap());
    }

    /// The text about heads that share keys.
    #[test]
    fn heads_that_share_keys_are_explained() {
        let said = |heads: [usize; 2], head_dim: usize, text: &str| {
            let builder = Problem::builder().heads(heads[0], heads[1]).head_dim(head_dim).dtype(DType::Bf16);
            let problem = builder.mask(Mask::causal()).dense(4, 2048, 2048).build().unwrap();
            let table = ConfigTable::of(BackwardConfig::hopper(head_dim as u32).changed(text).unwrap());
            let plan = BackwardPlan::by_table(&problem, (false, Order::Any), &table, Target::HOPPER.arch).unwrap();
            heads_of_tiles(&problem, &plan)
        };
        assert_eq!(said([8, 8], 64, ""), "");
        assert!(
            said([71, 1], 64, "head_splits=8").contains("8 CTAs share the 71 query heads of a tile of keys, at most 9")
        );
        assert!(said([71, 1], 64, "head_splits=1").contains("head_splits 1: a CTA walks over all 71"));
        assert!(said([8, 1], 256, "head_splits=4").contains("head_splits 1: a pair of CTAs"));
        // By the rule: one key/value head does not fill the GPU.
        assert!(said([71, 1], 64, "").contains("CTAs share"), "{}", said([71, 1], 64, ""));
    }
}
