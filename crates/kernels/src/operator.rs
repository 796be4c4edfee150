//! Operators that a session can run. An operator turns a problem into a plan, the plan into kernels, and the kernels
//! with tensors into launches.
//!
//! ```text
//! Operator::plan(problem, options, target, tables) -> Plan
//! Plan::build(target) -> Kernels        shared by every plan for which Plan::same_kernels holds
//! Plan::with_kernels(kernels) -> Executable
//! Executable::launches(tensors, memory, multiprocessors) -> launches, in order
//! ```
//!
//! Nothing here touches a device: a session compiles the kernels, provides the memory that [`Needs`] requests, and
//! launches.

use crate::attention::backward::plan::{BackwardPlan, Kernels as BackwardKernels, Tensors as BackwardTensors};
use crate::attention::backward::{BackwardConfig, Order};
use crate::attention::forward::plan::{
    BlockKernels, ConfigTable, Copies, Copying, ForwardConfig, ForwardPlan, NoKernel, Ready, ResultType, SyncConfig,
    Tensors as ForwardTensors,
};
use crate::gemm::plan::GemmError;
use crate::tensor_type::TensorRefusal;
use fulgurite_core::{DType, Problem, Rescale};
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{BuildError, Kernel, Target, TensorUnit};
use std::fmt::Debug;
use std::sync::Arc;
use thiserror::Error;

/// Tile configurations for every operator that has a table of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tables {
    /// Tile configurations of forward attention by `wgmma`.
    pub forward: ConfigTable,
    /// Tile configurations of forward attention by `mma.sync`.
    pub sync: ConfigTable<SyncConfig>,
    /// Tile configurations of the gradients of attention.
    pub backward: ConfigTable<BackwardConfig>,
}

/// The reason why an operator rejects a problem or its tensors.
#[derive(Debug, Clone, PartialEq, Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum Refusal {
    /// No kernel computes the problem.
    NoKernel(#[from] NoKernel),
    /// The matrices of a product do not fit each other or the kernel.
    Gemm(#[from] GemmError),
    /// The tensors do not fit the operator.
    Tensors(#[from] TensorRefusal),
}

/// An operation that runs on a GPU.
pub trait Operator: 'static {
    /// Everything that defines the result, except the tensors.
    type Problem: Debug + Clone + PartialEq + Send + Sync;
    /// Choices of the caller that affect how the result is computed.
    type Options: Debug + Clone + PartialEq + Send + Sync;
    /// The plan for a problem.
    type Plan: Plan;

    /// Plans a problem for a GPU of this target.
    fn plan(
        problem: &Self::Problem,
        options: &Self::Options,
        target: Target,
        tables: &Tables,
    ) -> Result<Self::Plan, Refusal>;
}

/// How to run a problem: its kernels and their tile configuration.
pub trait Plan: Debug + Send + Sync + 'static {
    /// The kernels that the plan builds.
    type Kernels: Clone + Send + Sync + 'static;
    /// The plan with its kernels.
    type Executable: Executable;

    /// Whether another plan has the same kernels. Plans of different lengths often share kernels; backward kernels
    /// also depend on choices that follow from sizes (`KernelShape`).
    fn same_kernels(&self, other: &Self) -> bool;
    /// Builds the kernels.
    fn build(&self, target: Target) -> Result<Self::Kernels, BuildError>;
    /// All kernels, for compilation.
    fn list(kernels: &Self::Kernels) -> Vec<Arc<Kernel>>;
    /// Combines the plan with kernels that this plan, or a plan with the same kernels, has built.
    fn with_kernels(self, kernels: Self::Kernels) -> Self::Executable;
}

/// A plan with its kernels.
pub trait Executable: Send + Sync + 'static {
    /// Addresses and shapes of a call's tensors.
    type Tensors: Clone + PartialEq + Send + Sync + 'static;

    /// The memory that a call needs besides its tensors.
    fn needs(&self, tensors: &Self::Tensors) -> Needs;
    /// The launches of a call, in order; empty if there is nothing to compute.
    fn launches(&self, tensors: &Self::Tensors, memory: &Memory, multiprocessors: u32) -> Result<Vec<Launch>, Refusal>;
}

/// Memory that a call needs besides its tensors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Needs {
    /// Bytes of counters: zero before the first launch, and left ready for the next one.
    pub counter_bytes: u64,
    /// Bytes of workspace; its initial contents do not matter.
    pub scratch_bytes: u64,
    /// Copies of tensors whose strides the kernels cannot address.
    pub copies: Option<Copies>,
}

/// The memory of a call, as requested by [`Needs`].
#[derive(Clone)]
pub struct Memory {
    /// Counters, `counter_bytes` long.
    pub counters: Span,
    /// Workspace, `scratch_bytes` long.
    pub scratch: Option<Span>,
    /// Memory for packed copies, with the kernels that make them.
    pub copies: Option<(Copying, Span)>,
}

impl Memory {
    /// Workspace of the size that a plan asked for; `None` if it asked for none.
    fn checked_scratch(&self, needs: &Needs) -> Result<Option<Span>, NoKernel> {
        let have = self.scratch.map_or(0, |span| span.bytes());
        match needs.scratch_bytes {
            0 => Ok(None),
            bytes if bytes <= have => Ok(self.scratch),
            bytes => Err(NoKernel { feature: format!("a call with {have} bytes of workspace (it needs {bytes})") }),
        }
    }
}

/// The tensor unit that runs an operator's products: the target's own, unless the caller asks for another one. Every
/// target since Ampere also has `mma.sync`.
pub fn choose_unit(target: Target, asked: Option<TensorUnit>) -> Result<TensorUnit, NoKernel> {
    let own = target.arch.tensor;
    match asked.unwrap_or(own) {
        TensorUnit::MmaSync => Ok(TensorUnit::MmaSync),
        unit if unit == own => Ok(unit),
        unit => Err(NoKernel { feature: format!("{unit} on {} (it has {own})", target.name()) }),
    }
}

/// Forward attention.
#[derive(Debug, Clone, Copy)]
pub struct Forward;

/// Per-call options of forward attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardOptions {
    /// Element type of the sinks, if the problem has sinks; `None` means f32.
    pub sinks: Option<DType>,
    /// Rescale policy; `None` means the fastest one.
    pub rescale: Option<Rescale>,
    /// Tile configuration of the `wgmma` kernel; `None` means the one from the tables.
    pub config: Option<ForwardConfig>,
    /// Tile configuration of the `mma.sync` kernel; `None` means the one from the tables.
    pub sync_config: Option<SyncConfig>,
    /// Whether the caller reads the LSE. The kernel always writes it. With `false`, it may sum the rounded p, which makes
    /// the LSE less accurate.
    pub lse: bool,
    /// The unit that multiplies matrices; `None` means the fastest one of the GPU for which there are kernels.
    pub unit: Option<TensorUnit>,
    /// The element type of o, and whether o and the LSE are merged with given ones.
    pub results: ResultType,
}

impl Default for ForwardOptions {
    fn default() -> Self {
        let results = ResultType::Input;
        ForwardOptions { sinks: None, rescale: None, config: None, sync_config: None, lse: true, unit: None, results }
    }
}

impl Operator for Forward {
    type Problem = Problem;
    type Options = ForwardOptions;
    type Plan = ForwardPlan;

    fn plan(
        problem: &Problem,
        options: &ForwardOptions,
        target: Target,
        tables: &Tables,
    ) -> Result<ForwardPlan, Refusal> {
        let ForwardOptions { sinks, rescale, config, sync_config, lse, unit, results } = *options;
        let mut plan = match choose_unit(target, unit)? {
            TensorUnit::MmaSync => ForwardPlan::mma_sync(problem, rescale, &tables.sync)?.fitting(target.arch),
            TensorUnit::Tcgen05 => {
                let own = match results {
                    ResultType::Input => ForwardPlan::tcgen05(problem, rescale, &ConfigTable::default()),
                    _ => Err(NoKernel { feature: "f32 results by tcgen05".into() }),
                };
                match own {
                    // What this unit has no kernel for runs on the unit that every GPU has, unless the caller named one.
                    Err(_) if unit.is_none() => {
                        ForwardPlan::mma_sync(problem, rescale, &tables.sync)?.fitting(target.arch)
                    }
                    plan => plan?,
                }
            }
            TensorUnit::Wgmma => ForwardPlan::by_table(problem, rescale, &tables.forward)?,
        };
        if !lse && results == ResultType::Input {
            plan = plan.without_lse();
        }
        let other_unit = |given: TensorUnit, unit: TensorUnit| {
            Err(NoKernel { feature: format!("a tile configuration of {given} for {unit}") }.into())
        };
        if let Some(config) = config {
            if plan.config().is_none() {
                return other_unit(TensorUnit::Wgmma, plan.unit());
            }
            plan = plan.with_config(|usual| ForwardConfig { rescale: usual.rescale, ..config });
        }
        if let Some(config) = sync_config {
            if plan.sync_config().is_none() {
                return other_unit(TensorUnit::MmaSync, plan.unit());
            }
            plan = plan.with_sync_config(|usual| SyncConfig { rescale: usual.rescale, ..config });
        }
        if config.is_some() || sync_config.is_some() {
            plan.check_tiles()?;
        }
        Ok(plan.with_sink_type(sinks.unwrap_or(DType::F32)).with_results(results)?)
    }
}

/// The kernel of forward attention, and the kernels that write its table of blocks or its block lists if it uses them.
#[derive(Clone)]
pub struct ForwardKernels {
    /// The attention kernel.
    pub main: Arc<Kernel>,
    /// The kernel that writes the table of blocks.
    pub block_table: Option<Arc<Kernel>>,
    /// The kernels that make block lists from the expression of the mask.
    pub expression: Option<BlockKernels>,
}

impl Plan for ForwardPlan {
    type Kernels = ForwardKernels;
    type Executable = ForwardExecutable;

    fn same_kernels(&self, other: &Self) -> bool {
        self.same_kernel(other) && self.block_form() == other.block_form()
    }

    fn build(&self, target: Target) -> Result<ForwardKernels, BuildError> {
        Ok(ForwardKernels {
            main: Arc::new(self.kernel(target)?),
            block_table: self.block_table_kernel(target)?.map(Arc::new),
            expression: self.expression_kernels(target)?,
        })
    }

    fn list(kernels: &ForwardKernels) -> Vec<Arc<Kernel>> {
        let of_expression = kernels.expression.iter().flat_map(BlockKernels::all);
        [&kernels.main].into_iter().chain(&kernels.block_table).chain(of_expression).cloned().collect()
    }

    fn with_kernels(self, kernels: ForwardKernels) -> ForwardExecutable {
        let ForwardKernels { main, block_table, expression } = kernels;
        ForwardExecutable { ready: self.ready(main), block_table, expression }
    }
}

/// Forward attention with its kernels.
pub struct ForwardExecutable {
    ready: Ready,
    block_table: Option<Arc<Kernel>>,
    expression: Option<BlockKernels>,
}

impl ForwardExecutable {
    /// The plan of this call.
    pub fn plan(&self) -> &ForwardPlan {
        self.ready.plan()
    }
}

impl Executable for ForwardExecutable {
    /// Counters and workspace in the tensors are ignored: they are set from the call's memory.
    type Tensors = ForwardTensors;

    fn needs(&self, tensors: &ForwardTensors) -> Needs {
        let plan = self.ready.plan();
        let copies = plan.copies(&tensors.rows);
        Needs { counter_bytes: plan.counter_bytes(), scratch_bytes: plan.scratch_bytes(), copies }
    }

    fn launches(
        &self,
        tensors: &ForwardTensors,
        memory: &Memory,
        multiprocessors: u32,
    ) -> Result<Vec<Launch>, Refusal> {
        let plan = self.ready.plan();
        let scratch = memory.checked_scratch(&self.needs(tensors))?;
        let tensors = ForwardTensors { counters: memory.counters, scratch, ..tensors.clone() };
        let mut launches: Vec<Launch> = match (&memory.copies, plan.copies(&tensors.rows)) {
            (Some((copying, room)), Some(copies)) => {
                self.ready.with_copies(&copies, copying, &tensors, *room, multiprocessors)?.launches
            }
            _ => self.ready.launch(&tensors, multiprocessors)?.into_iter().collect(),
        };
        if !launches.is_empty() {
            launches.splice(0..0, self.block_table.as_ref().and_then(|kernel| plan.block_table(kernel, &tensors)));
            if let Some(kernels) = &self.expression {
                launches.splice(0..0, plan.expression_launches(kernels, &tensors)?);
            }
        }
        Ok(launches)
    }
}

/// The gradients of attention.
#[derive(Debug, Clone, Copy)]
pub struct Backward;

/// Per-call options of the gradients of attention.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BackwardOptions {
    /// Whether the LSE has a gradient.
    pub d_lse: bool,
    /// Order in which d_q is accumulated.
    pub order: Order,
    /// Tile configuration; `None` means the one from the tables.
    pub config: Option<BackwardConfig>,
    /// The unit that multiplies matrices; `None` means the fastest one of the GPU for which there are kernels.
    pub unit: Option<TensorUnit>,
    /// The element type of the gradients of q, k and v, and whether they are added to given ones.
    pub results: ResultType,
}

impl Operator for Backward {
    type Problem = Problem;
    type Options = BackwardOptions;
    type Plan = BackwardPlan;

    fn plan(
        problem: &Problem,
        options: &BackwardOptions,
        target: Target,
        tables: &Tables,
    ) -> Result<BackwardPlan, Refusal> {
        let pass = (options.d_lse, options.order);
        let plan =
            match choose_unit(target, options.unit)? {
                TensorUnit::Wgmma => BackwardPlan::by_table(problem, pass, &tables.backward, target.arch)?
                    .with_results(problem, &tables.backward, options.results)?,
                unit if options.results != ResultType::Input => {
                    let unit = if options.unit.is_some() { unit } else { TensorUnit::MmaSync };
                    return Err(NoKernel { feature: format!("f32 gradients by {unit}") }.into());
                }
                TensorUnit::Tcgen05 => match BackwardPlan::tcgen05(problem, pass, target.arch) {
                    Err(_) if options.unit.is_none() => BackwardPlan::mma_sync(problem, pass, target.arch)?,
                    plan => plan?,
                },
                TensorUnit::MmaSync => BackwardPlan::mma_sync(problem, pass, target.arch)?,
            };
        let Some(config) = options.config else { return Ok(plan) };
        plan.check_unit(&config)?;
        let optional = plan.expression_blocks().is_some() && config.share.unit() == TensorUnit::Wgmma;
        if plan.check_steps(&config).is_err() && optional {
            // Blocks that only an expression decides are optional: without them any steps will do.
            let plan = BackwardPlan::of_any_steps(problem, pass, &tables.backward, target.arch)?
                .with_results(problem, &tables.backward, options.results)?
                .with_config(config);
            return Ok(plan.checked()?);
        }
        plan.check_steps(&config)?;
        Ok(plan.with_config(config).checked()?)
    }
}

impl Plan for BackwardPlan {
    type Kernels = BackwardKernels;
    type Executable = BackwardExecutable;

    fn same_kernels(&self, other: &Self) -> bool {
        BackwardPlan::same_kernels(self, other)
    }

    fn build(&self, target: Target) -> Result<BackwardKernels, BuildError> {
        self.kernels(target)
    }

    fn list(kernels: &BackwardKernels) -> Vec<Arc<Kernel>> {
        kernels.all().cloned().collect()
    }

    fn with_kernels(self, kernels: BackwardKernels) -> BackwardExecutable {
        BackwardExecutable { plan: self, kernels }
    }
}

/// The gradients of attention with their kernels.
pub struct BackwardExecutable {
    plan: BackwardPlan,
    kernels: BackwardKernels,
}

impl BackwardExecutable {
    /// The kernels of the call.
    pub fn kernels(&self) -> &BackwardKernels {
        &self.kernels
    }
}

impl Executable for BackwardExecutable {
    type Tensors = BackwardTensors;

    fn needs(&self, tensors: &BackwardTensors) -> Needs {
        let (plan, copies) = (&self.plan, self.plan.copies(tensors));
        Needs { counter_bytes: 0, scratch_bytes: plan.scratch_bytes().max(16), copies }
    }

    fn launches(
        &self,
        tensors: &BackwardTensors,
        memory: &Memory,
        multiprocessors: u32,
    ) -> Result<Vec<Launch>, Refusal> {
        let scratch =
            memory.checked_scratch(&self.needs(tensors))?.expect("bug in fulgurite: gradients need workspace");
        let plan = match (&memory.copies, self.plan.copies(tensors)) {
            (Some((copying, room)), Some(copies)) => {
                let copies = (&copies, copying, *room);
                self.plan.with_copies(copies, &self.kernels, tensors, scratch, multiprocessors)?
            }
            _ => self.plan.plan(&self.kernels, tensors, scratch, multiprocessors)?,
        };
        Ok(plan.launches)
    }
}
