//! Plans the gradients of attention: from a problem and the memory of its tensors to kernels and their arguments.

mod bands;
mod calls;
mod deal;
mod facts;
mod heads;
#[cfg(test)]
mod properties;
mod schedule;
mod scratch;
mod steps;

use crate::attention::backward::d_q::exact;
use crate::attention::backward::state::Call;
use crate::attention::backward::step_ranges;
pub use crate::attention::backward::tensors::Tensors;
use crate::attention::backward::tensors::named;
use crate::attention::backward::{
    Adds, BackwardConfig, Features, ModifierGradients, Order, Share, Spread, finish, heads as add_heads, main,
    mma_sync, prepare, repair, sinks, tcgen05, zero,
};
use crate::attention::forward::plan::NoKernel;
use crate::configs::ConfigTable;
use crate::params::{Bindings, Program};
use crate::parts::block_table::{self, by_block, covered};
pub use crate::parts::expression_blocks::BlockKernels;
use crate::parts::expression_blocks::{ExpressionBlocks, Form};
use crate::parts::mask::Spans;
use crate::parts::repack::{Copies, Copying};
use crate::parts::results::{ResultType, check_f32};
use crate::parts::schedule::Ragged;
pub(crate) use deal::Deal;
use facts::Facts;
use fulgurite_core::mask::Span as MaskSpan;
use fulgurite_core::{BlockSpec, DType, Exp, Layout, Mask, Precision, Problem};
use fulgurite_ptx::device::{Plan, Span};
use fulgurite_ptx::{Arch, BuildError, Half, Kernel, Number, Pair, Target, TensorUnit, Word, bf16, f16};
use heads::has_f32_results;
use schedule::Schedule;
use std::ops::Range;
use std::sync::Arc;
use steps::{columns, tile_steps};

/// Elements that make 16 bytes: TMA's unit.
const UNIT: usize = 8;
/// The largest head dimension.
const MOST: usize = 256;
/// Up to this many queries, longer steps waste more at the edges of a mask than they save.
const SHORT: usize = 2048;
/// Blocks of a mask that are multiples of this in both directions consist of whole steps and whole tiles of a warpgroup.
const STEP: usize = 64;
/// The keys of a warpgroup's tile by `tcgen05`, of which blocks of a mask then consist.
const TENSOR_KEYS: usize = 128;
/// A row coordinate past every tensor: TMA reads zeros there.
const OUTSIDE: u64 = MAX_COUNT;
/// Kernels count keys, and chunks of 16 bytes in rows, in 32 bits with a sign; one bit is left for sums of two of them.
const MAX_COUNT: u64 = 1 << 30;

/// A backward call: facts of the problem, and the schedule that a configuration makes of them.
#[derive(Debug, Clone, PartialEq)]
pub struct BackwardPlan {
    facts: Facts,
    schedule: Schedule,
}

/// The kernels of a call. They run in this order: prepare, zero, block_table or expression, step ranges, sinks, main, heads,
/// finish, exact, repair.
#[derive(Clone)]
pub struct Kernels {
    /// Runs first: delta, the LSE in powers of two, and zeros.
    pub prepare: Arc<Kernel>,
    /// d_k, d_v and d_q.
    pub main: Arc<Kernel>,
    /// Converts d_q to 16 bits, unless the main kernel does.
    pub finish: Option<Arc<Kernel>>,
    /// Adds the parts of d_k and d_v, if the query heads of a key/value head are spread over CTAs.
    pub heads: Option<Arc<Kernel>>,
    /// The gradients of sinks, if the problem has sinks.
    pub sinks: Option<Arc<Kernel>>,
    /// Zeros in the gradients of auxiliary tensors, if some are wanted.
    pub zero: Option<Arc<Kernel>>,
    /// Rounds exact sums of these gradients, in a fixed order.
    pub exact: Option<Arc<Kernel>>,
    /// Writes the table of blocks, if the problem has a block mask.
    pub block_table: Option<Arc<Kernel>>,
    /// Write the table of blocks from the expression of the mask, if that can hide blocks and the problem has no block mask.
    pub expression: Option<BlockKernels>,
    /// Finds the steps of each key tile under a block mask, in any order of additions.
    pub step_ranges: Option<Arc<Kernel>>,
    /// Runs last: computes rows again that hidden rows made NaN.
    pub repair: Arc<Kernel>,
    /// The bindings of the launches' arguments.
    pub bindings: Arc<KernelBindings>,
}

/// The bindings of the arguments for a call's kernels.
pub struct KernelBindings {
    prepare: Bindings<prepare::PrepareCall>,
    main: Bindings<Call>,
    finish: Option<Bindings<finish::FinishCall>>,
    heads: Option<Bindings<add_heads::HeadsCall>>,
    sinks: Option<Bindings<sinks::SinksCall>>,
    zero: Option<Bindings<zero::ZeroCall>>,
    exact: Option<Bindings<exact::ExactCall>>,
    repair: Bindings<repair::RepairCall>,
}

impl Kernels {
    /// All kernels of the call.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Kernel>> {
        let Kernels { prepare, main, finish, heads, sinks, zero, exact, .. } = self;
        let Kernels { block_table, expression, step_ranges, repair, .. } = self;
        let some = [finish, heads, sinks, zero, exact, block_table, step_ranges];
        let of_expression = expression.iter().flat_map(BlockKernels::all);
        [prepare, main].into_iter().chain(some.into_iter().flatten()).chain(of_expression).chain([repair])
    }
}

impl BackwardPlan {
    /// The plan of a problem, with built-in configurations. `d_lse`: its LSE has a gradient.
    pub fn new(problem: &Problem, d_lse: bool, order: Order) -> Result<BackwardPlan, NoKernel> {
        BackwardPlan::by_table(problem, (d_lse, order), &ConfigTable::default(), Arch::SM_90A)
    }

    /// The plan of a problem, with configurations of the main kernel from a table. The table is for sequences of equal length
    /// and scores without modifiers. Other problems keep more in registers and have built-in configurations.
    pub fn by_table(
        problem: &Problem,
        (d_lse, order): (bool, Order),
        table: &ConfigTable<BackwardConfig>,
        arch: Arch,
    ) -> Result<BackwardPlan, NoKernel> {
        BackwardPlan::planned(problem, (d_lse, order), table, arch, Skipping::ByExpression)
    }

    /// As [`by_table`](Self::by_table), but a configuration may have any steps: without a block mask, no step is skipped
    /// because of the mask's expression.
    pub fn of_any_steps(
        problem: &Problem,
        pass: (bool, Order),
        table: &ConfigTable<BackwardConfig>,
        arch: Arch,
    ) -> Result<BackwardPlan, NoKernel> {
        BackwardPlan::planned(problem, pass, table, arch, Skipping::ByLists)
    }

    fn planned(
        problem: &Problem,
        pass: (bool, Order),
        table: &ConfigTable<BackwardConfig>,
        arch: Arch,
        skipping: Skipping,
    ) -> Result<BackwardPlan, NoKernel> {
        let facts = facts_of(problem, pass, arch, (skipping, [STEP; 2]))?;
        let config = facts.pairs_or_spread(config_of(problem, &facts.features, table)?);
        BackwardPlan::of(facts, config)
    }

    /// The plan of a problem for `mma.sync`, which every GPU since Ampere has.
    pub fn mma_sync(problem: &Problem, (d_lse, order): (bool, Order), arch: Arch) -> Result<BackwardPlan, NoKernel> {
        let missing = |what: String| Err(NoKernel { feature: format!("{what} by mma.sync") });
        if order == Order::Fixed {
            return missing("gradients in a fixed order".into());
        }
        let facts = facts_of(problem, (d_lse, order), arch, (Skipping::ByLists, [STEP; 2]))?;
        let dims = facts.features.dims;
        match BackwardConfig::sync(&facts.features, arch) {
            Some(config) => BackwardPlan::of(facts, config),
            None => missing(format!(
                "backward of head dims {} and {} in {} KB of shared memory",
                dims[0],
                dims[1],
                arch.shared_per_cta / 1024
            )),
        }
    }

    /// The plan of a problem for `tcgen05`, which data-centre Blackwell GPUs have.
    pub fn tcgen05(problem: &Problem, (d_lse, order): (bool, Order), arch: Arch) -> Result<BackwardPlan, NoKernel> {
        let missing = |what: String| Err(NoKernel { feature: format!("{what} by tcgen05") });
        if order == Order::Fixed {
            return missing("gradients in a fixed order".into());
        }
        let facts = facts_of(problem, (d_lse, order), arch, (Skipping::ByLists, [STEP, TENSOR_KEYS]))?;
        let dims = facts.features.dims;
        match BackwardConfig::tensor(&facts.features) {
            Some(config) => BackwardPlan::of(facts, config),
            None => missing(format!("backward of head dims {} and {} (up to 128 are supported)", dims[0], dims[1])),
        }
    }

    /// The plan of a problem with a configuration that has a kernel for it.
    fn of(facts: Facts, config: BackwardConfig) -> Result<BackwardPlan, NoKernel> {
        BackwardPlan { schedule: Schedule::new(&facts, config), facts }.checked()
    }

    /// This plan, unless its kernels cannot count what the problem has. The count depends on the configuration.
    pub fn checked(self) -> Result<BackwardPlan, NoKernel> {
        let missing = |feature: String| Err(NoKernel { feature });
        let chunks = u64::from(self.schedule.shape.dims.into_iter().max().unwrap_or(0)) / UNIT as u64;
        if let Some((n, what)) =
            [(self.schedule.rows * chunks, "row chunks of 16 bytes"), (self.facts.lengths()[1], "keys")]
                .into_iter()
                .find(|(n, _)| *n >= MAX_COUNT)
        {
            return missing(format!("backward of {n} {what} (fewer than 2^30 are supported)"));
        }
        let aux = 0..self.facts.aux_shapes.len();
        if let Some(n) = aux.map(|aux| self.facts.exact_words(aux)).find(|n| *n >= 1 << 31) {
            return missing(format!(
                "gradients of auxiliary tensors in a fixed order in {n} words (fewer than 2^31 are supported)"
            ));
        }
        Ok(self)
    }

    /// Refuses a configuration of another tensor unit.
    pub fn check_unit(&self, config: &BackwardConfig) -> Result<(), NoKernel> {
        let [asked, own] = [config.share.unit(), self.config().share.unit()];
        match asked == own {
            true => Ok(()),
            false => Err(NoKernel { feature: format!("a tile configuration of {asked} for {own}") }),
        }
    }

    /// Refuses a configuration whose steps are not in one block each, if the kernel looks up blocks by steps.
    pub fn check_steps(&self, config: &BackwardConfig) -> Result<(), NoKernel> {
        let by_steps = self.facts.features.modifiers.modifiers.block_kind.is_some();
        match self.facts.blocks.filter(|_| by_steps) {
            Some(BlockSpec { rows, .. }) if !rows.is_multiple_of(config.rows as usize) => {
                Err(NoKernel { feature: format!("blocks of {rows} queries with tile configuration `{config}`") })
            }
            _ => Ok(()),
        }
    }

    /// This plan with another configuration, which must fit the problem's head dims. [`config`](Self::config) is the
    /// configuration as the kernels use it: if the main kernel rounds d_q, and also splits tiles or adds in a fixed order,
    /// `key_depth` becomes 1.
    pub fn with_config(self, config: BackwardConfig) -> BackwardPlan {
        BackwardPlan { schedule: Schedule::new(&self.facts, config), ..self }
    }

    /// This plan with gradients of q, k and v of another element type. f32 ones of q come from the kernel that converts d_q,
    /// those of k and v from the kernel that adds parts, or from the threads of the main kernel. So the main kernel is one
    /// that can leave parts.
    pub fn with_results(
        self,
        problem: &Problem,
        table: &ConfigTable<BackwardConfig>,
        results: ResultType,
    ) -> Result<BackwardPlan, NoKernel> {
        if !results.is_f32() {
            return Ok(self);
        }
        let facts = Facts { results, ..self.facts };
        let config = match config_of(problem, &facts.features, table)? {
            config if has_f32_results(&config) => config,
            _ => BackwardConfig::columns(),
        };
        BackwardPlan { schedule: Schedule::new(&facts, config), facts }.checked()
    }

    /// Refuses gradients that the kernels cannot address, and a configuration that has no kernel for f32 ones.
    fn check_results(&self, tensors: &Tensors) -> Result<(), NoKernel> {
        if !self.facts.results.is_f32() {
            return Ok(());
        }
        if !has_f32_results(&self.config()) {
            return Err(NoKernel { feature: format!("f32 gradients with tile configuration `{}`", self.config()) });
        }
        for (name, tensor) in [("d_q", &tensors.d_q), ("d_k", &tensors.d_k), ("d_v", &tensors.d_v)] {
            check_f32(name, tensor, 4)?;
        }
        Ok(())
    }

    /// The element type of the gradients of q, k and v, and whether they are added to given ones.
    pub fn result_type(&self) -> ResultType {
        self.facts.results
    }

    /// The configuration of the main kernel.
    pub fn config(&self) -> BackwardConfig {
        self.schedule.shape.config
    }

    /// Queries and keys of a block, if the expression of the mask alone decides which blocks are computed.
    pub fn expression_blocks(&self) -> Option<[usize; 2]> {
        self.facts.expression.as_ref().map(|blocks| [blocks.spec().rows, blocks.spec().cols])
    }

    /// Whether the last tiles are split, on the GPUs that configurations were measured on.
    pub fn cuts_tiles(&self) -> bool {
        self.schedule.shape.splits
    }

    /// Into how many parts the query heads of a key/value head are divided; each part has CTAs of its own.
    pub fn head_splits(&self) -> u64 {
        self.schedule.spread.parts
    }

    /// Whether the configuration has kernels for several parts.
    pub fn can_split_heads(&self) -> bool {
        heads::can_spread(&self.config())
    }

    /// Query heads of the longest part.
    pub fn part_heads(&self) -> u64 {
        self.schedule.spread.most()
    }

    /// Bytes of the parts of d_k and d_v.
    pub fn head_part_bytes(&self) -> u64 {
        self.schedule.scratch(&self.facts).head_parts
    }

    /// The kernels of the call.
    pub fn kernels(&self, target: Target) -> Result<Kernels, BuildError> {
        match self.facts.number {
            Number::Bf16 => self.built::<bf16>(target),
            _ => self.built::<f16>(target),
        }
    }

    fn built<T: Half>(&self, target: Target) -> Result<Kernels, BuildError>
    where
        Pair<T>: Word,
    {
        let (features, shape) = (&self.facts.features, &self.schedule.shape);
        let has_aux = !features.modifiers.aux.is_empty();
        let is_exact = features.modifiers.exact.contains(&true);
        let (prepare, of_prepare) = prepare::program::<T>(target, features, shape)?.split();
        let main = match shape.config.share.unit() {
            TensorUnit::Wgmma => main::program::<T>,
            TensorUnit::MmaSync => mma_sync::program::<T>,
            TensorUnit::Tcgen05 => tcgen05::program::<T>,
        };
        let (main, of_main) = main(target, features, shape)?.split();
        let (finish, of_finish) = parts((!shape.rounds).then(|| finish::program::<T>(target, features, shape)))?;
        let (heads, of_heads) =
            parts((shape.spread != Spread::No).then(|| add_heads::program::<T>(target, features, shape)))?;
        let (sinks, of_sinks) = parts(self.facts.has_sinks.then(|| sinks::program(target)))?;
        let (zero, of_zero) = parts(has_aux.then(|| zero::program(target)))?;
        let (exact, of_exact) = parts(is_exact.then(|| exact::program(target)))?;
        let (repair, of_repair) = repair::program::<T>(target, features, shape)?.split();
        let (blocks, expression) = (self.facts.blocks, &self.facts.expression);
        let lists = blocks.filter(|_| expression.is_none());
        let block_table = lists.map(|_| block_table::kernel(target)).transpose()?.map(Arc::new);
        let expression = expression.as_ref().map(|blocks| blocks.kernels(target, Form::Table)).transpose()?;
        let step_ranges = shape.step_ranges.then(|| step_ranges::kernel(target)).transpose()?.map(Arc::new);
        let bindings = KernelBindings {
            prepare: of_prepare,
            main: of_main,
            finish: of_finish,
            heads: of_heads,
            sinks: of_sinks,
            zero: of_zero,
            exact: of_exact,
            repair: of_repair,
        };
        Ok(Kernels {
            prepare,
            main,
            finish,
            heads,
            sinks,
            zero,
            exact,
            block_table,
            expression,
            step_ranges,
            repair,
            bindings: Arc::new(bindings),
        })
    }

    /// Whether gradients of auxiliary tensors are summed exactly.
    #[cfg(test)]
    pub(crate) fn has_exact_sums(&self) -> bool {
        self.facts.features.modifiers.exact.contains(&true)
    }

    /// Facts that shape the kernels' texts.
    #[cfg(test)]
    pub(crate) fn features(&self) -> &Features {
        &self.facts.features
    }

    /// The shape that follows from the configuration.
    #[cfg(test)]
    pub(crate) fn shape(&self) -> &crate::attention::backward::KernelShape {
        &self.schedule.shape
    }

    /// Whether another call has the same kernels.
    pub fn same_kernels(&self, other: &BackwardPlan) -> bool {
        let (a, b) = (&self.facts, &other.facts);
        (a.number, &a.features, self.schedule.shape, a.has_sinks, a.blocks.is_some(), a.expression.is_some())
            == (b.number, &b.features, other.schedule.shape, b.has_sinks, b.blocks.is_some(), b.expression.is_some())
    }

    /// Steps of queries over all key tiles of equal sequences: those in which some query sees a key of the tile.
    pub fn steps_of_tiles(&self) -> u64 {
        let Layout::Dense { batch, q_len, k_len } = self.facts.layout else { return 0 };
        let steps = tile_steps(&self.facts.features.mask, [q_len, k_len], self.config());
        steps.sum::<u64>().saturating_mul(batch as u64).saturating_mul(self.facts.heads[0])
    }

    /// Steps of queries of each tile of keys of a (head, sequence) pair, in a batch of equal sequences.
    pub fn tile_steps(&self) -> Vec<u64> {
        let Layout::Dense { q_len, k_len, .. } = self.facts.layout else { return Vec::new() };
        tile_steps(&self.facts.features.mask, [q_len, k_len], self.config()).collect()
    }

    /// The copies of tensors that a call needs before and after its kernels, if any.
    pub fn copies(&self, tensors: &Tensors) -> Option<Copies> {
        Copies::of(&named(tensors)[..self.copied_rows()], self.facts.features.ragged.any())
    }

    /// Number of row tensors that may be repacked. Kernels store f32 gradients, the last three, by their strides.
    fn copied_rows(&self) -> usize {
        if self.facts.results.is_f32() { 5 } else { 8 }
    }

    /// The launches of a call whose tensors must be copied, in order; `room` is memory for the copies.
    pub fn with_copies(
        &self,
        (copies, copying, room): (&Copies, &Copying, Span),
        kernels: &Kernels,
        tensors: &Tensors,
        scratch: Span,
        multiprocessors: u32,
    ) -> Result<Plan, NoKernel> {
        let (rows, [mut launches, after]) = copies.launches(copying, &named(tensors), room)?;
        let [q, k, v, o, d_o, d_q, d_k, d_v] = rows;
        let copied = Tensors { q, k, v, o, d_o, d_q, d_k, d_v, ..tensors.clone() };
        launches.extend(self.plan(kernels, &copied, scratch, multiprocessors)?.launches);
        launches.extend(after);
        Ok(Plan { launches })
    }

    /// Bytes of scratch memory that a run needs. They may hold anything.
    pub fn scratch_bytes(&self) -> u64 {
        self.schedule.scratch(&self.facts).bytes()
    }
}

/// The kernel and the bindings of a program that a call may not have.
type OptionalKernel<C> = (Option<Arc<Kernel>>, Option<Bindings<C>>);

fn parts<C: 'static>(program: Option<Result<Program<C>, BuildError>>) -> Result<OptionalKernel<C>, BuildError> {
    Ok(program.transpose()?.map(Program::split).unzip())
}

/// What may skip steps besides the spans of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Skipping {
    /// The lists of a block mask.
    ByLists,
    /// These, or the expression of the mask.
    ByExpression,
}

/// The facts of a problem, or why there is no kernel for it. The kernel looks up blocks of a mask by `unit` queries and keys.
fn facts_of(
    problem: &Problem,
    (d_lse, order): (bool, Order),
    arch: Arch,
    (skipping, unit): (Skipping, [usize; 2]),
) -> Result<Facts, NoKernel> {
    let missing = |feature: String| Err(NoKernel { feature });
    let number = match problem.dtype() {
        DType::Bf16 => Number::Bf16,
        DType::F16 => Number::F16,
        other => return missing(format!("dtype {other}")),
    };
    let dims = [problem.head_dim(), problem.value_dim()];
    if let Some(d) = dims.into_iter().find(|d| *d > MOST) {
        return missing(format!("backward of head_dim {d} (up to {MOST} are supported)"));
    }
    // Tensors whose rows are not a multiple of this are copied to memory with padded rows.
    let dims = dims.map(|d| d.next_multiple_of(UNIT) as u32);
    let precision = problem.precision();
    if precision != Precision::Native {
        return missing(format!("backward of precision {precision}"));
    }
    let exp = problem.exp();
    if exp.is_sas() {
        return missing(format!("backward of exp {exp}"));
    }
    let layout = problem.layout();
    let ragged = Ragged {
        packed: matches!(layout, Layout::Packed(_)),
        used_q: problem.has_used_q(),
        used_k: problem.has_used_k(),
    };
    let (mut mask, mut rest, mut aux) =
        (problem.mask().spans_only(), problem.mask_rest().cloned(), problem.aux().to_vec());
    // Without scores there is nothing to modify or to mask. Auxiliary tensors may be empty then; none is read.
    let has_scores = problem.batch() > 0 && problem.max_q_len() > 0 && problem.max_k_len() > 0;
    // A table of blocks takes the place of the spans, and in a fixed order it skips no step. The spans do skip steps, so a fixed
    // order keeps them and applies the rest of the mask to each element.
    let may_skip = has_scores && order == Order::Any && skipping == Skipping::ByExpression;
    let expression = ExpressionBlocks::new(problem).filter(|_| may_skip);
    let of_expression = expression.as_ref().map(ExpressionBlocks::spec);
    let blocks = problem.blocks().filter(|_| has_scores).or(of_expression);
    let mut block_kind = None;
    if let Some(spec) = blocks {
        mask = Mask::none();
        (block_kind, rest) = match spec.rows.is_multiple_of(unit[0]) && spec.cols.is_multiple_of(unit[1]) {
            true => {
                let (kind, mask) = by_block(problem, spec, &mut aux);
                (Some(kind), mask)
            }
            false => (None, Some(covered(problem, spec, &mut aux))),
        };
    }
    let modifiers = match has_scores {
        true => ModifierGradients::of(problem, (rest.as_ref(), block_kind), &aux, order)?,
        false => ModifierGradients::zeros(problem),
    };
    Ok(Facts {
        number,
        features: Features { dims, mask, exp, d_lse, order, ragged, modifiers },
        layout,
        heads: [problem.q_heads() as u64, problem.kv_heads() as u64],
        scale: problem.scale(),
        arch,
        has_sinks: problem.has_sinks(),
        results: ResultType::Input,
        blocks,
        expression,
        aux_shapes: aux.into_iter().map(|spec| spec.shape).collect(),
    })
}

/// The configuration of a problem's main kernel: from the table if it is plain, else one that has the registers for it.
fn config_of(
    problem: &Problem,
    features: &Features,
    table: &ConfigTable<BackwardConfig>,
) -> Result<BackwardConfig, NoKernel> {
    let largest = features.dims[0].max(features.dims[1]);
    let (ragged, modifiers) = (features.ragged.any(), &features.modifiers);
    let config = match !ragged && modifiers.is_empty() {
        true => table.find(largest, problem.max_k_len() as u64),
        false => BackwardConfig::with_room(largest, ragged, modifiers.register_pressure()),
    };
    if config.share.unit() != TensorUnit::Wgmma {
        return Err(NoKernel { feature: format!("backward by wgmma with tile configuration `{config}`") });
    }
    if !config.has_kernel(largest) {
        return Err(NoKernel { feature: format!("backward of head_dim {largest} with tile configuration `{config}`") });
    }
    // Longer steps, copy-engine reduction at head dims up to 64, and CTA pairs fit the registers only without a window, and with
    // exponentials of the special function unit. In the transposed mask, causal bounds queries on the left, and a window's
    // left side bounds them on the right.
    let spans = Spans::of(&features.mask).transposed();
    let fits = matches!(features.exp, Exp::Auto | Exp::Native) && !spans.bounded_right();
    let short = spans.bounded_left() && problem.max_q_len() <= SHORT;
    Ok(match (config.adds, config.share) {
        (Adds::CopyEngine, _) if largest <= 64 && !fits => config.of_threads(largest),
        (Adds::CopyEngine, _) if largest > 64 && (!fits || short) => {
            BackwardConfig { rows: config.rows.min(64), ..config }
        }
        (Adds::Threads, Share::Pairs) if !fits => BackwardConfig::columns(),
        _ => config,
    })
}

/// The columns that some row of a mask sees. Intervals move right with the row.
fn seen(spans: &[MaskSpan], [rows, cols]: [usize; 2]) -> Range<usize> {
    if rows == 0 {
        return 0..0;
    }
    columns(spans, 0, [rows, cols]).start..columns(spans, rows - 1, [rows, cols]).end
}
