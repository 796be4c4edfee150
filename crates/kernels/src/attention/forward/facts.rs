//! The facts of a problem on which the forward kernels depend, computed once.

use crate::attention::forward::config::ForwardConfig;
use crate::attention::forward::features::Features;
use crate::attention::forward::tiling::Tiling;
use crate::configs::{ConfigTable, TileConfig};
use crate::no_kernel::NoKernel;
use crate::parts::block_lists::Blocks;
use crate::parts::block_table::covered;
use crate::parts::expression_blocks::ExpressionBlocks;
use crate::parts::mask::Spans;
use crate::parts::modifier::Modifiers;
use crate::parts::results::ResultType;
use crate::parts::schedule::Ragged;
use fulgurite_core::expr::AuxSpec;
use fulgurite_core::{BlockSpec, DType, Exp, Layout, Mask, Precision, Problem, Rescale};
use fulgurite_ptx::Number;

/// Largest row sum of p in a block that is safe in f16.
const F16_LIMIT: f32 = 16384.0;

/// The form in which a block mask reaches the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockForm {
    /// Lists: the kernel computes only listed blocks.
    Lists,
    /// A table in which each element looks up its block, if no tile size divides the blocks.
    /// [`ForwardPlan::block_table`](super::plan::ForwardPlan::block_table) makes it from the lists.
    Coverage,
    /// Lists that kernels make from the expression of the mask before each call: the problem has no lists.
    /// [`ForwardPlan::expression_launches`](super::plan::ForwardPlan::expression_launches) makes them.
    Expression,
}

/// A block mask, and the form in which it reaches the kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BlockPlan {
    pub spec: BlockSpec,
    pub form: BlockForm,
}

/// The facts of a problem.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Facts {
    pub number: Number,
    pub features: Features,
    pub layout: Layout,
    /// Query heads, key/value heads.
    pub heads: [u64; 2],
    /// Head dimensions of the tensors, not padded.
    pub dims: [usize; 2],
    /// Shapes of the auxiliary tensors; the table of blocks comes last.
    pub aux_shapes: Vec<Vec<usize>>,
    pub blocks: Option<BlockPlan>,
    /// The blocks that the mask's expression hides or shows, if lists are made from it.
    pub expression: Option<ExpressionBlocks>,
    pub scale: f32,
}

impl Facts {
    /// The facts of a problem, and its tile configuration from a table. The rescale policy comes from the configuration
    /// unless it is given. Sinks are f32 until a call says otherwise.
    pub fn of<C: ForwardTile>(
        problem: &Problem,
        rescale: Option<Rescale>,
        table: &ConfigTable<C>,
    ) -> Result<(Facts, C), NoKernel> {
        let number = supported(problem, rescale)?;
        let base = BaseTile::find(problem, table);
        let (blocks, expression) = base.block_plan(problem);
        let Masking { mask, modifiers, aux } = Masking::of(problem, blocks);
        let lists = blocks.filter(|blocks| blocks.form != BlockForm::Coverage).map(|blocks| blocks.spec);
        let layout = problem.layout();
        let features = Features {
            dims: base.dims,
            mask,
            modifiers,
            sinks: problem.has_sinks().then_some(DType::F32),
            ragged: Ragged {
                packed: matches!(layout, Layout::Packed(_)),
                used_q: problem.has_used_q(),
                used_k: problem.has_used_k(),
            },
            blocks: lists.map(|spec| Blocks { rows: spec.rows as u32, cols: spec.cols as u32 }),
            exp: problem.exp(),
            results: ResultType::Input,
            one_query: problem.max_q_len() <= 1,
        };
        let config = base.config(&features, lists);
        let config = config.with_rescale(policy(number, rescale.unwrap_or(config.rescale())));
        let facts = Facts {
            number,
            features,
            layout,
            heads: [problem.q_heads() as u64, problem.kv_heads() as u64],
            dims: [problem.head_dim(), problem.value_dim()],
            aux_shapes: aux.into_iter().map(|spec| spec.shape).collect(),
            blocks,
            expression,
            scale: problem.scale(),
        };
        Ok((facts, config))
    }

    /// These facts for tiles of this many queries and keys. Blocks that the expression of the mask gives follow them; those
    /// of a block mask belong to the problem.
    pub fn with_tiles(mut self, tile: [u32; 2]) -> Facts {
        if let Some(expression) = self.expression.take() {
            let expression = expression.divided_by(tile);
            let spec = expression.spec();
            self.blocks = Some(BlockPlan { spec, form: BlockForm::Expression });
            self.features.blocks = Some(Blocks { rows: spec.rows as u32, cols: spec.cols as u32 });
            self.expression = Some(expression);
        }
        self
    }

    /// Shape of the table of blocks, if each element looks up its block.
    pub fn coverage(&self) -> Option<&[usize]> {
        let looked_up = self.blocks.is_some_and(|blocks| blocks.form == BlockForm::Coverage);
        self.aux_shapes.last().filter(|_| looked_up).map(Vec::as_slice)
    }
}

/// Number of keys that a query sees on average: half of them under a causal mask, and in a window no more than it has. The
/// table is searched by this number.
pub(crate) fn keys_seen(problem: &Problem) -> u64 {
    let causal = Spans::of(&problem.mask().spans_only()).bounded_right();
    let average = problem.max_k_len() as u64 / if causal { 2 } else { 1 };
    let spans = problem.mask().spans();
    let sides = (spans.iter().filter_map(|span| span.left).min(), spans.iter().filter_map(|span| span.right).min());
    match sides {
        (Some(left), Some(right)) => average.min(left.saturating_add(right).saturating_add(1).max(1) as u64),
        _ => average,
    }
}

/// The element type of a problem, if the kernels support the problem.
fn supported(problem: &Problem, rescale: Option<Rescale>) -> Result<Number, NoKernel> {
    let missing = |feature: String| Err(NoKernel { feature });
    let number = match problem.dtype() {
        DType::Bf16 => Number::Bf16,
        DType::F16 => Number::F16,
        other => return missing(format!("dtype {other}")),
    };
    let precision = problem.precision();
    if precision != Precision::Native {
        return missing(format!("precision {precision}"));
    }
    let exp = problem.exp();
    if exp == Exp::SasOnline {
        return missing(format!("exp {exp}"));
    }
    if let (true, Some(rescale @ (Rescale::Lazy(_) | Rescale::Optimistic(_)))) = (scans(problem), rescale) {
        return missing(format!("exp {exp} with rescale {rescale}; leave rescale out, or use always"));
    }
    let (rows, packed) = match problem.layout() {
        Layout::Dense { .. } => (problem.max_q_len().max(problem.max_k_len()), false),
        Layout::Packed(p) => (p.total_q.max(p.total_k), true),
    };
    // Ragged tensors claim to have 2^30 rows, so sizes must stay below that.
    let most = if packed || problem.has_used_q() || problem.has_used_k() { 30 } else { 31 };
    for n in [problem.batch(), rows, problem.q_heads()] {
        if n >= 1 << most {
            return missing(format!("a size of {n} (it has sizes below 2^{most})"));
        }
    }
    Ok(number)
}

/// Whether all scores of a tile must be seen before its first p.
fn scans(problem: &Problem) -> bool {
    matches!(problem.exp(), Exp::Sas { .. })
}

/// The rescale policy, limited to the range of the element type.
fn policy(number: Number, rescale: Rescale) -> Rescale {
    match rescale {
        Rescale::Optimistic(most) if number == Number::F16 => Rescale::Optimistic(most.min(F16_LIMIT)),
        other => other,
    }
}

/// A tile configuration of a kernel of forward attention.
pub(crate) trait ForwardTile: TileConfig {
    /// The unit of which the columns of v must be a multiple. `wide`: a row is too wide for one warpgroup.
    fn value_unit(&self, wide: bool) -> u32;

    /// This configuration, adjusted so that the problem's features have enough registers.
    fn with_room(self, head_dim: u32, features: &Features) -> Self;

    /// This configuration with tiles that divide the blocks of a block mask; `None` if no such tiles exist.
    fn dividing(self, spec: &BlockSpec, wide: bool) -> Option<Self>;

    /// The rescale policy of the running maximum.
    fn rescale(&self) -> Rescale;

    /// This configuration with another rescale policy.
    fn with_rescale(self, rescale: Rescale) -> Self;
}

impl ForwardTile for ForwardConfig {
    fn value_unit(&self, wide: bool) -> u32 {
        Tiling::value_unit(wide, self)
    }

    fn with_room(self, head_dim: u32, features: &Features) -> Self {
        ForwardConfig::with_room(self, head_dim, features)
    }

    /// Warpgroups that share columns keep their number.
    fn dividing(self, spec: &BlockSpec, wide: bool) -> Option<Self> {
        ForwardConfig::dividing(self, spec).filter(|config| !wide || config.groups == self.groups)
    }

    fn rescale(&self) -> Rescale {
        self.rescale
    }

    fn with_rescale(self, rescale: Rescale) -> Self {
        ForwardConfig { rescale, ..self }
    }
}

/// Padded head dimensions, and the table's configuration for them.
struct BaseTile<C> {
    config: C,
    /// The larger head dimension, by which the table is searched.
    head_dim: u32,
    /// Padded head dimensions.
    dims: [u32; 2],
    /// Whether a row is too wide for one warpgroup.
    wide: bool,
}

impl<C: ForwardTile> BaseTile<C> {
    fn find(problem: &Problem, table: &ConfigTable<C>) -> BaseTile<C> {
        let mut dims = [problem.head_dim(), problem.value_dim()].map(|d| d.next_multiple_of(16) as u32);
        let head_dim = dims[0].max(dims[1]);
        let config = table.find(head_dim, keys_seen(problem));
        let wide = Features::plain(dims, Mask::none()).wide();
        dims[1] = dims[1].next_multiple_of(config.value_unit(wide));
        BaseTile { config, head_dim, dims, wide }
    }

    /// A configuration whose tiles divide the blocks, if one exists.
    fn dividing(&self, spec: &BlockSpec) -> Option<C> {
        self.config.dividing(spec, self.wide)
    }

    /// The form in which a problem's block mask reaches the kernel, and the blocks of a mask without lists.
    fn block_plan(&self, problem: &Problem) -> (Option<BlockPlan>, Option<ExpressionBlocks>) {
        if let Some(spec) = problem.blocks().filter(|_| has_keys(problem)) {
            let form = if self.dividing(&spec).is_some() { BlockForm::Lists } else { BlockForm::Coverage };
            return (Some(BlockPlan { spec, form }), None);
        }
        let expression =
            ExpressionBlocks::new(problem).filter(|blocks| !scans(problem) && self.dividing(&blocks.spec()).is_some());
        let plan = |blocks: &ExpressionBlocks| BlockPlan { spec: blocks.spec(), form: BlockForm::Expression };
        (expression.as_ref().map(plan), expression)
    }

    /// The configuration adjusted to the features, with tiles that divide the blocks of `lists`.
    fn config(&self, features: &Features, lists: Option<BlockSpec>) -> C {
        let mut config = self.config.with_room(self.head_dim, features);
        if let Some(spec) = lists {
            config = config.dividing(&spec, false).unwrap_or(config);
        }
        if let Exp::Sas { .. } = features.exp {
            config = config.with_rescale(Rescale::Always);
        }
        config
    }
}

/// Whether the problem has keys. Without keys it has neither scores to modify nor blocks, and its auxiliary tensors may
/// be empty, so no kernel may read them.
fn has_keys(problem: &Problem) -> bool {
    problem.max_k_len() > 0
}

/// The mask of a problem as kernels apply it.
struct Masking {
    /// The part that is one interval of keys per query.
    mask: Mask,
    modifiers: Modifiers,
    /// Auxiliary tensors of the modifiers.
    aux: Vec<AuxSpec>,
}

impl Masking {
    fn of(problem: &Problem, blocks: Option<BlockPlan>) -> Masking {
        let has_keys = has_keys(problem);
        let mut aux = if has_keys { problem.aux().to_vec() } else { Vec::new() };
        let (mask, rest) = match blocks {
            Some(BlockPlan { spec, form: BlockForm::Coverage }) => {
                (Mask::none(), Some(covered(problem, spec, &mut aux)))
            }
            _ => (problem.mask().clone(), problem.mask_rest().filter(|_| has_keys).cloned()),
        };
        let modifiers = match (problem.score_program().filter(|_| has_keys), &rest) {
            (None, None) => Modifiers::default(),
            (score, rest) => {
                let longest = problem.max_q_len().max(problem.max_k_len());
                Modifiers::new(score, rest.as_ref(), &aux, longest)
            }
        };
        Masking { mask: mask.spans_only(), modifiers, aux }
    }
}

/// Strides of a contiguous tensor, in elements.
pub(crate) fn row_major(shape: Option<&Vec<usize>>) -> Vec<u64> {
    let shape = shape.map_or(&[][..], |shape| shape);
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().map(|&n| n as u64).product()).collect()
}
