//! The plan of a forward call: the kernel that runs a problem, and its tile configuration.

use crate::attention::decode;
use crate::attention::decode::call::{DecodeCall, DecodeLaunch};
use crate::attention::decode::plan::DecodePlan;
use crate::attention::forward::call::{ForwardCall, ForwardLaunch};
pub use crate::attention::forward::config::{Added, End, ForwardConfig};
pub use crate::attention::forward::facts::BlockForm;
pub(crate) use crate::attention::forward::facts::row_major;
use crate::attention::forward::facts::{Facts, keys_seen};
pub use crate::attention::forward::mma_sync::config::SyncConfig;
use crate::attention::forward::tcgen05::config::LARGEST;
pub use crate::attention::forward::tcgen05::config::TensorConfig;
use crate::attention::forward::tiling::Tiling;
use crate::attention::forward::{self, Features, mma_sync, tcgen05};
use crate::configs;
pub use crate::configs::{ConfigError, TileConfig};
pub use crate::no_kernel::NoKernel;
use crate::params::Bindings;
pub use crate::parts::arguments::{COUNTERS, DeviceAux, DeviceBlockLists, DeviceTensor, Tensors};
use crate::parts::block_table;
pub use crate::parts::expression_blocks::BlockKernels;
use crate::parts::expression_blocks::{Form, Results};
pub use crate::parts::repack::{Copies, Copying};
use crate::parts::repack::{Direction, Named};
pub use crate::parts::results::ResultType;
use fulgurite_core::{DType, Exp, Layout, Problem, Rescale};
use fulgurite_ptx::device::{Launch, Plan, Span};
use fulgurite_ptx::{Arch, BuildError, Kernel, Number, Target, TensorUnit, bf16, f16};
use std::sync::Arc;

/// A table of tile configurations, by default of the forward kernel.
pub type ConfigTable<T = ForwardConfig> = configs::ConfigTable<T>;
/// A row of a table of tile configurations.
pub type ConfigRow<T = ForwardConfig> = configs::ConfigRow<T>;

/// The plan of a forward call: everything that determines its kernel, and its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct ForwardPlan {
    facts: Facts,
    family: Family,
}

/// The kernels for one kind of tensor unit, with their tile configurations.
#[derive(Debug, Clone, PartialEq)]
enum Family {
    Wgmma {
        config: ForwardConfig,
        /// The plan of the decode kernel, if it handles the call.
        decode: Option<Box<DecodePlan>>,
    },
    MmaSync(SyncConfig),
    Tcgen05(TensorConfig),
}

impl ForwardPlan {
    /// Plans a problem for `wgmma`. The rescale policy is the fastest one, unless it is given.
    pub fn new(problem: &Problem, rescale: Option<Rescale>) -> Result<ForwardPlan, NoKernel> {
        ForwardPlan::by_table(problem, rescale, &ConfigTable::default())
    }

    /// Number of keys that a query sees on average: half of them under a causal mask. The table is searched by this
    /// number.
    pub fn keys_seen(problem: &Problem) -> u64 {
        keys_seen(problem)
    }

    /// Plans a problem with tile configurations from a table.
    pub fn by_table(problem: &Problem, rescale: Option<Rescale>, table: &ConfigTable) -> Result<ForwardPlan, NoKernel> {
        let (facts, config) = Facts::of(problem, rescale, table)?;
        let decode = DecodePlan::new(&facts, config.rescale);
        Ok(ForwardPlan { facts, family: Family::Wgmma { config, decode: decode.map(Box::new) } })
    }

    /// Plans a problem for `mma.sync`, which every GPU since Ampere has.
    pub fn mma_sync(
        problem: &Problem,
        rescale: Option<Rescale>,
        table: &ConfigTable<SyncConfig>,
    ) -> Result<ForwardPlan, NoKernel> {
        let (facts, config) = Facts::of(problem, rescale, table)?;
        let missing = |what: String| Err(NoKernel { feature: format!("{what} by mma.sync") });
        if facts.features.wide() {
            let [d, dv] = facts.dims;
            return missing(format!("head dims {d} and {dv} (up to 256 are supported)"));
        }
        if let exp @ Exp::Sas { .. } = facts.features.exp {
            return missing(format!("exp {exp}"));
        }
        Ok(ForwardPlan { facts, family: Family::MmaSync(config) })
    }

    /// Plans a problem for `tcgen05`, which data-centre Blackwell has.
    pub fn tcgen05(
        problem: &Problem,
        rescale: Option<Rescale>,
        table: &ConfigTable<TensorConfig>,
    ) -> Result<ForwardPlan, NoKernel> {
        let (facts, config) = Facts::of(problem, rescale, table)?;
        let missing = |what: String| Err(NoKernel { feature: format!("{what} by tcgen05") });
        if facts.features.dims.iter().zip(LARGEST).any(|(d, most)| *d > most) {
            let ([d, dv], [most, values]) = (facts.dims, LARGEST);
            return missing(format!(
                "head dims {d} and {dv} (up to {most} for q and k and {values} for v are supported)"
            ));
        }
        if let exp @ Exp::Sas { .. } = facts.features.exp {
            return missing(format!("exp {exp}"));
        }
        Ok(ForwardPlan { facts, family: Family::Tcgen05(config) })
    }

    /// This plan with a tile configuration whose accumulators leave registers for the rest on an architecture.
    pub fn fitting(mut self, arch: Arch) -> ForwardPlan {
        if let Family::MmaSync(config) = &mut self.family {
            *config = config.fitting(arch, &self.facts.features);
        }
        self
    }

    /// The plan of the decode kernel, if it handles the call.
    pub(crate) fn decode(&self) -> Option<&DecodePlan> {
        match &self.family {
            Family::Wgmma { decode, .. } => decode.as_deref(),
            Family::MmaSync(_) | Family::Tcgen05(_) => None,
        }
    }

    /// This plan for sinks of an element type, if the problem has sinks. They are f32 otherwise.
    pub fn with_sink_type(mut self, dtype: DType) -> ForwardPlan {
        let set = |sinks: &mut Option<DType>| *sinks = sinks.map(|_| dtype);
        set(&mut self.facts.features.sinks);
        if let Family::Wgmma { decode: Some(decode), .. } = &mut self.family {
            set(&mut decode.features.sinks);
        }
        self
    }

    /// This plan with results of another element type. The decode kernel cannot write f32 results, so the forward kernel takes
    /// its calls; `tcgen05` cannot either, and refuses. [`ResultType::Added`] merges o and the LSE with those that are given.
    pub fn with_results(mut self, results: ResultType) -> Result<ForwardPlan, NoKernel> {
        let missing = |what: &str| Err(NoKernel { feature: format!("f32 results of forward attention {what}") });
        if results.is_f32() && self.facts.features.wide() {
            return missing("with head dims above 256");
        }
        if results == ResultType::Added && self.facts.features.sinks.is_some() {
            return missing("with sinks that are merged with others");
        }
        match &mut self.family {
            Family::Wgmma { decode, .. } if results.is_f32() => *decode = None,
            Family::Tcgen05(_) if results.is_f32() => return missing("by tcgen05"),
            Family::Wgmma { .. } | Family::MmaSync(_) | Family::Tcgen05(_) => {}
        }
        self.facts.features.results = results;
        Ok(self)
    }

    /// This plan for a caller that does not read the LSE. The tensor cores may then sum the rounded p as one more
    /// column of p v: the division of o is as exact as before, but the LSE would lose bits. Only bf16 at head dim 64 gains: bf16
    /// has the range for it, and at larger head dims the tensor cores limit the speed, not the threads.
    pub fn without_lse(mut self) -> ForwardPlan {
        let Features { dims, modifiers, blocks, .. } = &self.facts.features;
        let Family::Wgmma { config, .. } = &mut self.family else { return self };
        let optimistic = matches!(config.rescale, Rescale::Optimistic(_));
        if self.facts.number == Number::Bf16
            && optimistic
            && *dims == [64; 2]
            && modifiers.is_empty()
            && blocks.is_none()
        {
            config.added = Added::ByColumn;
        }
        self
    }

    /// The form in which the problem's block mask reaches the kernel, if there is one.
    pub fn block_form(&self) -> Option<BlockForm> {
        self.facts.blocks.map(|blocks| blocks.form)
    }

    /// The unit that multiplies matrices.
    pub fn unit(&self) -> TensorUnit {
        match self.family {
            Family::Wgmma { .. } => TensorUnit::Wgmma,
            Family::MmaSync(_) => TensorUnit::MmaSync,
            Family::Tcgen05(_) => TensorUnit::Tcgen05,
        }
    }

    /// Refuses tiles that do not divide the blocks whose lists the kernel walks.
    pub fn check_tiles(&self) -> Result<(), NoKernel> {
        let Some(blocks) = self.facts.features.blocks.filter(|_| self.decode().is_none()) else { return Ok(()) };
        let cols = match &self.family {
            Family::Wgmma { config, .. } => config.cols,
            Family::MmaSync(config) => config.cols,
            Family::Tcgen05(config) => config.cols,
        };
        let rows = self.tile_rows();
        if blocks.rows.is_multiple_of(rows) && blocks.cols.is_multiple_of(cols) {
            return Ok(());
        }
        let feature = format!("blocks of {} x {} with tiles of {rows} x {cols}", blocks.rows, blocks.cols);
        Err(NoKernel { feature })
    }

    /// The tile configuration of the `wgmma` kernel; `None` if another unit runs the call. The decode kernel has its own.
    pub fn config(&self) -> Option<ForwardConfig> {
        match self.family {
            Family::Wgmma { config, .. } => Some(config),
            Family::MmaSync(_) | Family::Tcgen05(_) => None,
        }
    }

    /// The tile configuration of the `tcgen05` kernel, if that runs the call.
    pub fn tensor_config(&self) -> Option<TensorConfig> {
        match self.family {
            Family::Wgmma { .. } | Family::MmaSync(_) => None,
            Family::Tcgen05(config) => Some(config),
        }
    }

    /// The tile configuration of the `mma.sync` kernel, if that runs the call.
    pub fn sync_config(&self) -> Option<SyncConfig> {
        match self.family {
            Family::Wgmma { .. } | Family::Tcgen05(_) => None,
            Family::MmaSync(config) => Some(config),
        }
    }

    /// Queries per tile of the forward kernel.
    pub fn tile_rows(&self) -> u32 {
        match &self.family {
            Family::Wgmma { config, .. } => Tiling::new(&self.facts.features, config).rows,
            Family::MmaSync(config) => config.rows(),
            Family::Tcgen05(config) => config.rows(),
        }
    }

    /// The tile configuration of the decode kernel, if it handles the call.
    pub fn decode_config(&self) -> Option<decode::DecodeConfig> {
        self.decode().map(|decode| decode.config)
    }

    /// This plan with another tile configuration of the `wgmma` kernel. [`check_tiles`](Self::check_tiles) says whether its
    /// tiles divide the blocks of a block mask.
    pub fn with_config(mut self, change: impl FnOnce(ForwardConfig) -> ForwardConfig) -> ForwardPlan {
        if let Family::Wgmma { config, .. } = &mut self.family {
            *config = change(*config);
            let tile = [Tiling::new(&self.facts.features, config).rows, config.cols];
            self.facts = self.facts.with_tiles(tile);
        }
        self
    }

    /// This plan with another tile configuration of the `mma.sync` kernel, if that runs the call.
    /// [`check_tiles`](Self::check_tiles) says whether its tiles divide the blocks of a block mask.
    pub fn with_sync_config(mut self, change: impl FnOnce(SyncConfig) -> SyncConfig) -> ForwardPlan {
        if let Family::MmaSync(config) = &mut self.family {
            *config = change(*config);
            self.facts = self.facts.with_tiles([config.rows(), config.cols]);
        }
        self
    }

    /// This plan with another tile configuration of the decode kernel, if that handles the call.
    pub fn with_decode_config(
        mut self,
        change: impl FnOnce(decode::DecodeConfig) -> decode::DecodeConfig,
    ) -> ForwardPlan {
        if let Family::Wgmma { decode: Some(decode), .. } = &mut self.family {
            decode.config = change(decode.config);
        }
        self
    }

    /// Bytes of counters that a launch needs. [`Tensors`] documents their contents.
    pub fn counter_bytes(&self) -> u64 {
        self.decode().map_or(COUNTERS, DecodePlan::counter_bytes)
    }

    /// Bytes of workspace that a launch needs, with any content.
    pub fn scratch_bytes(&self) -> u64 {
        match (self.facts.coverage(), &self.facts.expression) {
            (Some(shape), _) => 4 * shape.iter().map(|&n| n as u64).product::<u64>(),
            (None, Some(expression)) => expression.list_bytes(),
            (None, None) => self.decode().map_or(0, DecodePlan::scratch_bytes),
        }
    }

    /// The kernel that makes the table of blocks, if each element looks up its block.
    pub fn block_table_kernel(&self, target: Target) -> Result<Option<Kernel>, BuildError> {
        self.facts.coverage().map(|_| block_table::kernel(target)).transpose()
    }

    /// The launch that makes the table from the lists, in the workspace. It must precede the launch of
    /// [`kernel`](Self::kernel).
    pub fn block_table(&self, kernel: &Arc<Kernel>, tensors: &Tensors) -> Option<Launch> {
        Some(block_table::launch(kernel, tensors.lists?, self.facts.coverage()?, tensors.scratch?))
    }

    /// The kernels that make block lists from the expression of the mask, if it can hide blocks and no lists are given.
    pub fn expression_kernels(&self, target: Target) -> Result<Option<BlockKernels>, BuildError> {
        self.facts.expression.as_ref().map(|blocks| blocks.kernels(target, Form::Lists)).transpose()
    }

    /// The launches that make these lists, in the workspace. They must precede the launch of [`kernel`](Self::kernel).
    pub fn expression_launches(&self, kernels: &BlockKernels, tensors: &Tensors) -> Result<Vec<Launch>, NoKernel> {
        let Some((blocks, memory)) = self.facts.expression.as_ref().zip(tensors.scratch) else { return Ok(Vec::new()) };
        let (lists, extremes) = blocks.lists(memory);
        let of = (self.facts.aux(tensors)?, tensors.used);
        Ok(blocks.launches(kernels, of, extremes, Results::Lists(lists)))
    }

    /// Queries and keys of a block of the lists that are made from the expression of the mask, if they are.
    pub fn expression_blocks(&self) -> Option<[usize; 2]> {
        self.facts.expression.as_ref().map(|blocks| [blocks.spec().rows, blocks.spec().cols])
    }

    /// Builds the kernel of the plan.
    pub fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        let Facts { features, number, .. } = &self.facts;
        match (&self.family, number) {
            (Family::Wgmma { decode: Some(decode), .. }, _) => decode.kernel(target),
            (Family::Wgmma { config, .. }, Number::Bf16) => forward::kernel::<bf16>(target, features, *config),
            (Family::Wgmma { config, .. }, _) => forward::kernel::<f16>(target, features, *config),
            (Family::MmaSync(config), Number::Bf16) => mma_sync::kernel::<bf16>(target, features, *config),
            (Family::MmaSync(config), _) => mma_sync::kernel::<f16>(target, features, *config),
            (Family::Tcgen05(config), Number::Bf16) => tcgen05::kernel::<bf16>(target, features, *config),
            (Family::Tcgen05(config), _) => tcgen05::kernel::<f16>(target, features, *config),
        }
    }

    /// Whether another plan has the same kernel.
    pub fn same_kernel(&self, other: &ForwardPlan) -> bool {
        if self.decode().is_some() || other.decode().is_some() {
            return self.decode().zip(other.decode()).is_some_and(|(one, other)| one.same_kernel(other));
        }
        let (one, other_facts) = (&self.facts, &other.facts);
        (one.number, &one.features, &self.family) == (other_facts.number, &other_facts.features, &other.family)
    }

    /// The copies of tensors that a call needs before and after its kernel, if any.
    pub fn copies(&self, rows: &[DeviceTensor; 4]) -> Option<Copies> {
        match rows[3].shape.contains(&0) {
            true => None,
            false => Copies::of(&named(rows)[..self.copied_rows()], self.facts.features.ragged.any()),
        }
    }

    /// Number of tensors among q, k, v and o that may be repacked. Threads store an f32 o by its strides.
    fn copied_rows(&self) -> usize {
        if self.facts.features.results.is_f32() { 3 } else { 4 }
    }

    /// The copies that a call needs even if its tensors are contiguous: those for head dimensions that are not
    /// multiples of 8.
    pub fn least_copies(&self) -> Option<Copies> {
        let nowhere = Span::new(0, 0);
        let ([d, dv], [heads, kv_heads]) = (self.facts.dims.map(|d| d as u64), self.facts.heads);
        let (batch, q_len, k_len) = match self.facts.layout {
            Layout::Dense { batch, q_len, k_len } => (batch, q_len, k_len),
            Layout::Packed(p) => (1, p.total_q, p.total_k),
        };
        let [batch, q_len, k_len] = [batch, q_len, k_len].map(|n| n as u64);
        let shapes = [[q_len, heads, d], [k_len, kv_heads, d], [k_len, kv_heads, dv], [q_len, heads, dv]];
        let rows = shapes.map(|[s, h, d]| DeviceTensor::packed(nowhere, [batch, s, h, d]));
        self.copies(&rows)
    }

    /// The plan with its kernel, ready for any number of launches. Construction takes tens of microseconds, so callers
    /// keep it.
    pub fn ready(self, kernel: Arc<Kernel>) -> Ready {
        let features = &self.facts.features;
        let bindings = match &self.family {
            Family::Wgmma { decode: Some(decode), .. } => {
                KernelBindings::Decode { plan: decode.clone(), bindings: decode.bindings() }
            }
            Family::Wgmma { config, .. } => KernelBindings::Persistent(forward::bindings(features, *config)),
            Family::MmaSync(config) => KernelBindings::CtaPerTile(mma_sync::bindings(features, *config)),
            Family::Tcgen05(config) => KernelBindings::Persistent(tcgen05::bindings(features, *config)),
        };
        Ready { bindings: Arc::new(bindings), plan: self, kernel }
    }

    /// A launch; `None` if there is nothing to compute. Callers that launch more than once keep a [`Ready`].
    pub fn launch(
        &self,
        kernel: Arc<Kernel>,
        tensors: &Tensors,
        multiprocessors: u32,
    ) -> Result<Option<Launch>, NoKernel> {
        self.clone().ready(kernel).launch(tensors, multiprocessors)
    }
}

/// The launch arguments of the plan's kernel.
enum KernelBindings {
    /// One CTA for each SM, and each of them takes tiles from a counter.
    Persistent(Bindings<ForwardCall>),
    CtaPerTile(Bindings<ForwardCall>),
    Decode {
        plan: Box<DecodePlan>,
        bindings: Bindings<DecodeCall>,
    },
}

/// A forward call with its kernel.
#[derive(Clone)]
pub struct Ready {
    plan: ForwardPlan,
    kernel: Arc<Kernel>,
    bindings: Arc<KernelBindings>,
}

impl Ready {
    /// The plan of the call.
    pub fn plan(&self) -> &ForwardPlan {
        &self.plan
    }

    /// A launch; `None` if there is nothing to compute.
    pub fn launch(&self, tensors: &Tensors, multiprocessors: u32) -> Result<Option<Launch>, NoKernel> {
        if tensors.rows[3].shape.contains(&0) {
            return Ok(None);
        }
        let (plan, kernel) = (&self.plan, self.kernel.clone());
        Ok(Some(match &*self.bindings {
            KernelBindings::Persistent(bindings) => {
                let ForwardLaunch { grid, call } =
                    plan.facts.forward_launch(tensors, plan.tile_rows(), multiprocessors)?;
                bindings.launch(kernel, grid, &call)
            }
            KernelBindings::CtaPerTile(bindings) => {
                let ForwardLaunch { grid, call } = plan.facts.forward_launch(tensors, plan.tile_rows(), u32::MAX)?;
                bindings.launch(kernel, grid, &call)
            }
            KernelBindings::Decode { plan: decode, bindings } => {
                let DecodeLaunch { grid, call } = decode.launch(&plan.facts, tensors, multiprocessors)?;
                bindings.launch(kernel, grid, &call)
            }
        }))
    }

    /// The launches of a call whose tensors must be copied, in order. `room` is memory for the copies.
    pub fn with_copies(
        &self,
        copies: &Copies,
        copying: &Copying,
        tensors: &Tensors,
        room: Span,
        multiprocessors: u32,
    ) -> Result<Plan, NoKernel> {
        let (rows, [before, after]) = copies.launches(copying, &named(&tensors.rows), room)?;
        let launch = self.launch(&Tensors { rows, ..tensors.clone() }, multiprocessors)?;
        Ok(Plan { launches: before.into_iter().chain(launch).chain(after).collect() })
    }
}

/// The tensors of a forward call with the directions of their copies.
fn named(&[q, k, v, o]: &[DeviceTensor; 4]) -> [Named; 4] {
    let input = |name, placed| (name, placed, Direction::Pack);
    [input("q", q), input("k", k), input("v", v), ("o", o, Direction::Unpack)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::{BlockSpec, Mask};

    fn problem(d: usize, dv: usize, dtype: DType) -> fulgurite_core::ProblemBuilder {
        Problem::builder().dense(2, 300, 500).heads(4, 2).head_dims(d, dv).dtype(dtype)
    }

    #[test]
    fn every_pair_of_head_dims_has_a_kernel() {
        let wide = [(264, 264), (512, 512), (512, 8), (8, 512), (320, 136), (400, 456)];
        let pairs = (8..=256).step_by(8).flat_map(|d| [8, 64, 72, 128, 136, 256].map(|dv| (d, dv)));
        for (d, dv) in pairs.chain(wide) {
            for (k_len, mask) in [(500, Mask::none()), (2100, Mask::none()), (5000, Mask::causal())] {
                let problem =
                    Problem::builder().dense(1, 64, k_len).heads(2, 1).head_dims(d, dv).dtype(DType::Bf16).mask(mask);
                let plan = ForwardPlan::new(&problem.build().unwrap(), None).unwrap();
                plan.kernel(Target::HOPPER).unwrap_or_else(|e| panic!("{d}, {dv}, {k_len}: {e}"));
            }
        }
    }

    #[test]
    fn a_configuration_that_does_not_fit_wide_rows_is_refused() {
        let plan = ForwardPlan::new(&problem(512, 512, DType::Bf16).build().unwrap(), None).unwrap();
        for groups in [1, 3, 4] {
            let other = plan.clone().with_config(|config| ForwardConfig { groups, ..config });
            assert!(other.kernel(Target::HOPPER).is_err(), "{groups}");
        }
        assert!(plan.kernel(Target::HOPPER).is_ok());
    }

    #[test]
    fn launches_pass_the_devices_check() {
        let plan = ForwardPlan::new(&problem(64, 128, DType::F16).mask(Mask::causal()).build().unwrap(), None).unwrap();
        let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
        let at = |b, s, h, d| DeviceTensor::packed(Span::new(4096, b * s * h * d * 2), [b, s, h, d]);
        let tensors = [at(2, 300, 4, 64), at(2, 500, 2, 64), at(2, 500, 2, 128), at(2, 300, 4, 128)];
        let memory = Span::new(4096, 1 << 20);
        let launch = plan.launch(kernel.clone(), &Tensors::new(tensors, memory, memory), 132).unwrap().unwrap();
        fulgurite_ptx::device::check_launch(&kernel, launch.grid, &launch.args).unwrap();
        assert_eq!(launch.grid, [3 * 4 * 2, 1, 1]); // three tiles of 128 rows for 8 pairs
    }

    #[test]
    fn a_feature_that_is_not_used_leaves_no_trace() {
        let plan = ForwardPlan::new(&problem(64, 64, DType::Bf16).mask(Mask::causal()).build().unwrap(), None).unwrap();
        let kernel = plan.kernel(Target::HOPPER).unwrap();
        let names: Vec<&str> = kernel.params.iter().map(|p| p.name.as_str()).collect();
        for name in ["sinks", "aux0", "used_k", "cu_seqlens_q", "full_counts", "first_key"] {
            assert!(!names.contains(&name), "{name} in {names:?}");
        }
    }

    #[test]
    fn blocks_that_no_tile_divides_are_looked_up() {
        let form = |rows, cols| {
            let spec = BlockSpec { rows, cols, ..BlockSpec::default() };
            let problem = problem(64, 64, DType::Bf16).block_mask(spec).build().unwrap();
            ForwardPlan::new(&problem, None).unwrap().block_form()
        };
        assert_eq!(form(128, 128), Some(BlockForm::Lists));
        assert_eq!(form(64, 48), Some(BlockForm::Lists));
        assert_eq!(form(32, 128), Some(BlockForm::Coverage));
        assert_eq!(form(128, 40), Some(BlockForm::Coverage));
    }

    #[test]
    fn what_is_missing_is_named() {
        let refused = |problem: fulgurite_core::ProblemBuilder| {
            ForwardPlan::new(&problem.build().unwrap(), None).unwrap_err().to_string()
        };
        assert_eq!(refused(problem(64, 64, DType::F32)), "dtype f32");
        let sas = problem(64, 64, DType::Bf16).exp(Exp::Sas { threshold: -10.0 }).build().unwrap();
        let lazy = ForwardPlan::new(&sas, Some(Rescale::Lazy(8.0))).unwrap_err().feature;
        assert_eq!(lazy, "exp sas:-10 with rescale lazy:8; leave rescale out, or use always");
        assert!(ForwardPlan::new(&sas, Some(Rescale::Always)).is_ok());
        assert_eq!(refused(problem(64, 64, DType::Bf16).exp(Exp::SasOnline)), "exp sas:online");
    }

    #[test]
    fn sequences_that_do_not_begin_at_whole_rows_are_refused_where_lengths_differ() {
        let problem = problem(64, 64, DType::Bf16).used_lengths(false, true).build().unwrap();
        let plan = ForwardPlan::new(&problem, None).unwrap();
        let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
        let at = |s, h, batch| DeviceTensor {
            span: Span::new(4096, 1 << 30),
            shape: [2, s, h, 64],
            strides: [batch, h * 64, 64],
        };
        let memory = Span::new(4096, 1 << 20);
        let mut tensors = [at(300, 4, 76800), at(500, 2, 64000 + 8), at(500, 2, 64000), at(300, 4, 76800)];
        let all = |rows| Tensors { used: [None, Some(memory)], ..Tensors::new(rows, memory, memory) };
        let refused = plan.launch(kernel.clone(), &all(tensors), 132).err().unwrap();
        assert!(refused.to_string().starts_with("`k` whose sequences"), "{refused}");
        tensors[1].strides[0] = 64000 + 128;
        assert!(plan.launch(kernel, &all(tensors), 132).unwrap().is_some());
    }

    /// A tensor that the problem requires and the caller does not give is reported by name.
    #[test]
    fn missing_tensors_are_refused() {
        let base = || problem(64, 64, DType::Bf16);
        let spec = BlockSpec { rows: 128, cols: 128, ..BlockSpec::default() };
        let table = BlockSpec { rows: 32, cols: 128, ..BlockSpec::default() };
        let cases = [
            (base().sinks(), "sinks without their logits"),
            (base().used_lengths(false, true), "ragged sequences without their lengths"),
            (base().alibi(), "auxiliary tensors of other shapes than the problem's"),
            (base().block_mask(spec), "a block mask without its lists"),
            (base().block_mask(table), "auxiliary tensors of other shapes than the problem's"),
        ];
        for (problem, want) in cases {
            let problem = problem.build().unwrap();
            let plan = ForwardPlan::new(&problem, None).unwrap();
            let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
            let at = |s, h| DeviceTensor::packed(Span::new(4096, 1 << 30), [2, s, h, 64]);
            let memory = Span::new(4096, 1 << 20);
            let tensors = Tensors::new([at(300, 4), at(500, 2), at(500, 2), at(300, 4)], memory, memory);
            let refused = plan.launch(kernel, &tensors, 132).err().map(|e| e.to_string());
            assert_eq!(refused.as_deref(), Some(want));
        }
    }
}
