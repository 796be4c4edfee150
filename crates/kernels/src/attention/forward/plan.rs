//! Forward attention as a launch: a problem and where its tensors lie in, a kernel and its arguments out.

use crate::attention::decode;
use crate::attention::decode::plan::DecodePlan;
pub use crate::attention::forward::config::{Added, End, ForwardConfig};
use crate::attention::forward::{self, Features};
pub use crate::configs::{ConfigError, ConfigRow, ConfigTable, TileConfig};
use crate::parts::arguments::{Arguments, Slots, rest};
pub use crate::parts::arguments::{COUNTERS, DeviceAux, DeviceBlockLists, DeviceTensor, Tensors};
use crate::parts::block_lists::{Blocks, NAMES};
use crate::parts::block_table::{self, covered};
use crate::parts::mask::Spans;
use crate::parts::modifier::Modifiers;
use crate::parts::nonfinite::{DIMS, STRIDES as ROW_STRIDES, TENSORS};
use crate::parts::repack;
pub use crate::parts::repack::{Copies, Copying};
use crate::parts::repack::{Direction, Named};
use crate::parts::schedule::{Ragged, STEPS};
use fulgurite_core::{BlockSpec, DType, Exp, Layout, Mask, Problem, Rescale};
use fulgurite_ptx::device::{Launch, Plan, Span, Value};
use fulgurite_ptx::{BuildError, Kernel, Number, Target, bf16, f16};
use std::f32::consts::LOG2_E;
use std::sync::Arc;
use thiserror::Error;

/// Elements that make 16 bytes: the copy engine's unit.
const UNIT: usize = repack::UNIT as usize;
/// Largest sum of a block that f16 probabilities leave room for.
const F16_LIMIT: f32 = 16384.0;
/// Bytes of keys and values of the (head, batch) pairs whose tiles run together: a part of the second-level cache.
const CACHE_BYTES: u64 = 32 << 20;

/// What the kernel does not have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{feature}")]
pub struct NoKernel {
    /// In words that follow "does not have".
    pub feature: String,
}

/// Grid and arguments of a launch.
type Call = ([u32; 3], Vec<Value>);

/// How a block mask reaches the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockForm {
    /// As lists: only listed blocks are computed.
    Lists,
    /// As a table that each element looks up, for blocks that no tile divides: [`Forward::cover`] makes it from the lists.
    Coverage,
}

/// Keys of equal sequences that some query sees. The others are left out of a launch: whatever they hold, times a
/// probability of 0, must not show.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Visible {
    pub first: u64,
    pub count: u64,
}

impl Visible {
    pub fn of(mask: &Mask, q_len: u64, k_len: u64) -> Visible {
        let [q_len, k_len] = [q_len, k_len].map(|n| n as usize);
        if q_len == 0 {
            return Visible { first: 0, count: 0 };
        }
        let (first, end) = (mask.keys(0, q_len, k_len).start, mask.keys(q_len - 1, q_len, k_len).end);
        Visible { first: first as u64, count: end.saturating_sub(first) as u64 }
    }

    /// Their rows of a tensor. Without keys every element is masked, and memory that `any` has does.
    pub fn part(&self, placed: &DeviceTensor, any: &DeviceTensor) -> DeviceTensor {
        match self.count == 0 || placed.shape.contains(&0) {
            true => DeviceTensor { shape: [1, 1, 1, any.shape[3]], ..*any },
            false => placed.rows(self.first, self.count),
        }
    }

    /// Arguments that tell how long sequences are, and which keys are left out.
    pub fn lengths(&self, args: &mut Arguments<'_>, q_len: u64, k_len: u64) {
        let first = self.first as i64;
        let signed = |n: i64| Value::U32(n as i32 as u32);
        args.add("bottom_right", signed(k_len as i64 - q_len as i64 - first));
        args.add("top_left", signed(-first));
        for (name, n) in [("q_len", q_len), ("k_len", self.count), ("first_key", self.first), ("all_keys", k_len)] {
            args.add_u32(name, n);
        }
    }
}

/// A forward call on Hopper: what its kernel's text depends on, and its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct ForwardPlan {
    number: Number,
    features: Features,
    config: ForwardConfig,
    layout: Layout,
    /// Query heads, key/value heads.
    heads: [u64; 2],
    /// Of the tensors, as they are.
    dims: [usize; 2],
    aux_shapes: Vec<Vec<usize>>,
    blocks: Option<(BlockSpec, BlockForm)>,
    scale: f32,
    /// The kernel for few queries, where it takes the call.
    pub(crate) decode: Option<DecodePlan>,
}

impl ForwardPlan {
    /// How a problem is run; the rescale policy is the fastest one unless given.
    pub fn new(problem: &Problem, rescale: Option<Rescale>) -> Result<ForwardPlan, NoKernel> {
        ForwardPlan::by_table(problem, rescale, &ConfigTable::default())
    }

    /// Keys that a query sees, by which a cut is found: half of them on average under a causal mask.
    pub fn keys_seen(problem: &Problem) -> u64 {
        let causal = Spans::of(&problem.mask().spans_only()).bounded_right();
        problem.max_k_len() as u64 / if causal { 2 } else { 1 }
    }

    /// The same with cuts of the kernel from a table.
    pub fn by_table(problem: &Problem, rescale: Option<Rescale>, table: &ConfigTable) -> Result<ForwardPlan, NoKernel> {
        let missing = |feature: String| Err(NoKernel { feature });
        let number = match problem.dtype() {
            DType::Bf16 => Number::Bf16,
            DType::F16 => Number::F16,
            other => return missing(format!("dtype {other}")),
        };
        let dims = [problem.head_dim(), problem.value_dim()];
        let precision = problem.precision();
        if precision != fulgurite_core::Precision::Native {
            return missing(format!("precision {precision}"));
        }
        let exp = problem.exp();
        let scans = matches!(exp, Exp::Sas { .. });
        if let (true, Some(rescale @ (Rescale::Lazy(_) | Rescale::Optimistic(_)))) = (scans, rescale) {
            return missing(format!("exp {exp} with rescale {rescale}; leave rescale out, or use always"));
        }
        let layout = problem.layout();
        let longest = problem.max_q_len().max(problem.max_k_len());
        let rows = match layout {
            Layout::Dense { .. } => longest,
            Layout::Packed(p) => p.total_q.max(p.total_k),
        };
        let most =
            if matches!(layout, Layout::Packed(_)) || problem.has_used_q() || problem.has_used_k() { 30 } else { 31 };
        for n in [problem.batch(), rows, problem.q_heads()] {
            if n >= 1 << most {
                return missing(format!("a size of {n} (it has sizes below 2^{most})"));
            }
        }
        let ragged = Ragged {
            packed: matches!(layout, Layout::Packed(_)),
            used_q: problem.has_used_q(),
            used_k: problem.has_used_k(),
        };
        let mut padded = dims.map(|d| d.next_multiple_of(16) as u32);
        let head_dim = padded[0].max(padded[1]);
        let base = table.find(head_dim, ForwardPlan::keys_seen(problem));
        let wide = Features::plain(padded, Mask::none()).wide();
        padded[1] = padded[1].next_multiple_of(Features::plain(padded, Mask::none()).value_unit(&base));
        // Where warpgroups share columns there must be as many of them.
        let divides = |config: &ForwardConfig| !wide || config.groups == base.groups;
        // Without keys there is no score to modify and no block, and auxiliary tensors may be empty: none is read.
        let has_keys = problem.max_k_len() > 0;
        let divided = problem.blocks().filter(|_| has_keys).map(|spec| (spec, base.dividing(&spec).filter(divides)));
        let (mut mask, mut rest) = (problem.mask().clone(), problem.mask_rest().filter(|_| has_keys).cloned());
        let mut aux = if has_keys { problem.aux().to_vec() } else { Vec::new() };
        if let Some((spec, None)) = divided {
            (mask, rest) = (Mask::none(), Some(covered(problem, spec, &mut aux)));
        }
        let modifiers = match (problem.score_program().filter(|_| has_keys), &rest) {
            (None, None) => Modifiers::default(),
            (score, rest) => Modifiers::new(score, rest.as_ref(), &aux, longest),
        };
        let features = Features {
            dims: padded,
            mask: mask.spans_only(),
            modifiers,
            sinks: None,
            ragged,
            blocks: divided
                .and_then(|(spec, config)| config.map(|_| Blocks { rows: spec.rows as u32, cols: spec.cols as u32 })),
            exp,
        };
        let mut config = base.with_room(head_dim, &features);
        if let Some((spec, Some(_))) = divided {
            config = config.dividing(&spec).unwrap_or(config);
        }
        if scans {
            config.rescale = Rescale::Always;
        }
        let limit = |limit: f32| if number == Number::F16 { limit.min(F16_LIMIT) } else { limit };
        config.rescale = match rescale.unwrap_or(config.rescale) {
            Rescale::Optimistic(most) => Rescale::Optimistic(limit(most)),
            other => other,
        };
        let blocks =
            divided.map(|(spec, config)| (spec, if config.is_some() { BlockForm::Lists } else { BlockForm::Coverage }));
        let heads = [problem.q_heads() as u64, problem.kv_heads() as u64];
        let decode_plan = match divided {
            Some(_) => None,
            None if wide || scans => None,
            None => {
                let dims = dims.map(|d| d.next_multiple_of(UNIT));
                DecodePlan::new(number, &features, dims, layout, heads, config.rescale)
            }
        };
        Ok(ForwardPlan {
            number,
            features,
            config,
            layout,
            heads,
            dims,
            aux_shapes: aux.into_iter().map(|spec| spec.shape).collect(),
            blocks,
            scale: problem.scale(),
            decode: decode_plan,
        })
    }

    /// The same for sinks of this type.
    pub fn with_sinks(mut self, dtype: DType) -> ForwardPlan {
        self.features.sinks = Some(dtype);
        self.decode.iter_mut().for_each(|decode| decode.features.sinks = Some(dtype));
        self
    }

    /// The same where nobody reads the LSE: then rows of p may be added up as they are rounded, which o wants anyway and the
    /// LSE is too exact for. For bf16, which has the exponents, and head dimensions of 64, which have the registers and wait for
    /// threads; larger ones wait for products.
    pub fn without_lse(mut self) -> ForwardPlan {
        let Features { dims, modifiers, blocks, .. } = &self.features;
        let optimistic = matches!(self.config.rescale, Rescale::Optimistic(_));
        if self.number == Number::Bf16 && optimistic && *dims == [64; 2] && modifiers.is_empty() && blocks.is_none() {
            self.config.added = Added::ByColumn;
        }
        self
    }

    /// How the problem's block mask reaches the kernel, if there is one.
    pub fn block_form(&self) -> Option<BlockForm> {
        self.blocks.map(|(_, form)| form)
    }

    /// The cut of its kernel; of no use for few queries.
    pub fn config(&self) -> ForwardConfig {
        self.config
    }

    /// Rows of queries of a tile, where queries are not few.
    pub fn tile_rows(&self) -> u32 {
        self.features.tile_rows(&self.config)
    }

    /// The cut of the kernel for few queries, where that takes the call.
    pub fn decode_config(&self) -> Option<decode::DecodeConfig> {
        self.decode.as_ref().map(|decode| decode.config)
    }

    /// The same call with another cut of the kernel; blocks of a block mask must be multiples of it.
    pub fn with_config(mut self, change: impl FnOnce(ForwardConfig) -> ForwardConfig) -> ForwardPlan {
        self.config = change(self.config);
        self
    }

    /// The same call with another cut of the kernel for few queries, where that takes it.
    pub fn with_decode_config(
        mut self,
        change: impl FnOnce(decode::DecodeConfig) -> decode::DecodeConfig,
    ) -> ForwardPlan {
        if let Some(decode) = &mut self.decode {
            decode.config = change(decode.config);
        }
        self
    }

    /// Bytes of counters that a launch needs: 0 before the first launch, and left as [`Tensors`] says.
    pub fn counter_bytes(&self) -> u64 {
        self.decode.as_ref().map_or(COUNTERS, DecodePlan::counter_bytes)
    }

    /// Bytes that a launch needs beside everything else, whatever they hold.
    pub fn scratch_bytes(&self) -> u64 {
        match self.coverage() {
            Some(shape) => 4 * shape.iter().map(|&n| n as u64).product::<u64>(),
            None => self.decode.as_ref().map_or(0, DecodePlan::scratch_bytes),
        }
    }

    /// The shape of the table of blocks, where each element looks its block up.
    fn coverage(&self) -> Option<&[usize]> {
        let looked_up = self.block_form() == Some(BlockForm::Coverage);
        self.aux_shapes.last().filter(|_| looked_up).map(Vec::as_slice)
    }

    /// The kernel that makes the table of blocks, where each element looks its block up.
    pub fn cover_kernel(&self, target: Target) -> Result<Option<Kernel>, BuildError> {
        self.coverage().map(|_| block_table::kernel(target)).transpose()
    }

    /// Its launch, which goes before that of [`kernel`](Self::kernel): from the lists into the scratch memory.
    pub fn cover(&self, kernel: &Arc<Kernel>, tensors: &Tensors) -> Option<Launch> {
        Some(block_table::launch(kernel, tensors.lists?, self.coverage()?, tensors.scratch?))
    }

    /// Its kernel.
    pub fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        if let Some(decode) = &self.decode {
            return decode.kernel(target);
        }
        match self.number {
            Number::Bf16 => forward::kernel::<bf16>(target, &self.features, self.config),
            _ => forward::kernel::<f16>(target, &self.features, self.config),
        }
    }

    /// Whether another call has the same kernel.
    pub fn same_kernel(&self, other: &ForwardPlan) -> bool {
        if self.decode.is_some() || other.decode.is_some() {
            return self.decode.as_ref().zip(other.decode.as_ref()).is_some_and(|(one, other)| one.same_kernel(other));
        }
        (self.number, &self.features, self.config) == (other.number, &other.features, other.config)
    }

    /// The copies of tensors that a call needs before and after its kernel, if any.
    pub fn copies(&self, rows: &[DeviceTensor; 4]) -> Option<Copies> {
        match rows[3].shape.contains(&0) {
            true => None,
            false => Copies::of(&named(rows), self.features.ragged.any()),
        }
    }

    /// The copies that a call needs however its tensors lie: those of head dimensions that are no multiple of 8.
    pub fn least_copies(&self) -> Option<Copies> {
        let nowhere = Span::new(0, 0);
        let ([d, dv], [heads, kv_heads]) = (self.dims.map(|d| d as u64), self.heads);
        let (batch, q_len, k_len) = match self.layout {
            Layout::Dense { batch, q_len, k_len } => (batch, q_len, k_len),
            Layout::Packed(p) => (1, p.total_q, p.total_k),
        };
        let [batch, q_len, k_len] = [batch, q_len, k_len].map(|n| n as u64);
        let shapes = [[q_len, heads, d], [k_len, kv_heads, d], [k_len, kv_heads, dv], [q_len, heads, dv]];
        let rows = shapes.map(|[s, h, d]| DeviceTensor::packed(nowhere, [batch, s, h, d]));
        self.copies(&rows)
    }

    /// With its kernel, ready to be launched again and again.
    pub fn ready(self, kernel: Arc<Kernel>) -> Ready {
        Ready { slots: Slots::of(&kernel), plan: self, kernel }
    }

    /// Its launch, `None` where there is nothing to compute. Who launches more than once keeps a [`Ready`].
    pub fn launch(
        &self,
        kernel: Arc<Kernel>,
        tensors: &Tensors,
        multiprocessors: u32,
    ) -> Result<Option<Launch>, NoKernel> {
        self.clone().ready(kernel).launch(tensors, multiprocessors)
    }

    /// Grid and arguments.
    fn arguments(&self, slots: &Slots, tensors: &Tensors, multiprocessors: u32) -> Result<Option<Call>, NoKernel> {
        let [heads, kv_heads] = self.heads;
        if tensors.rows[3].shape.contains(&0) {
            return Ok(None);
        }
        let mut args = Arguments::new(slots);
        args.add("lse", Value::Pointer(tensors.lse));
        args.add("counters", Value::Pointer(tensors.counters));
        args.divisor(["heads", "heads_magic", "heads_shift"], heads);
        args.divisor(["group", "group_magic", "group_shift"], heads / kv_heads);
        let [input, _] = self.features.modifiers.factors();
        let scale = match self.features.modifiers.score {
            Some(_) => self.scale * input,
            None => self.scale * LOG2_E,
        };
        args.add("scale", Value::F32(scale));
        self.more(&mut args, tensors);
        let (tiles, lse_rows) = match (self.layout, self.features.ragged.any()) {
            (Layout::Dense { batch, q_len, k_len }, false) => {
                let sizes = [batch, q_len, k_len].map(|n| n as u64);
                (self.equal(&mut args, &tensors.rows, sizes), q_len as u64)
            }
            (layout, _) => self.unequal(&mut args, tensors, layout)?,
        };
        args.add_u32("lse_rows", lse_rows);
        let grid = match &self.decode {
            Some(decode) => decode.arguments(&mut args, tensors, multiprocessors)?,
            None => [tiles.min(u64::from(multiprocessors)) as u32, 1, 1],
        };
        Ok(Some((grid, args.finish())))
    }

    /// Arguments of equal sequences; the number of tiles.
    fn equal(
        &self,
        args: &mut Arguments<'_>,
        [q, k, v, o]: &[DeviceTensor; 4],
        [batch, q_len, k_len]: [u64; 3],
    ) -> u64 {
        let rows = u64::from(self.tile_rows());
        let (m_tiles, pairs) = (q_len.div_ceil(rows), self.heads[0] * batch);
        let tiles = m_tiles * pairs;
        // Lists say for themselves what is seen.
        let visible = match self.features.blocks {
            Some(_) => Visible { first: 0, count: k_len },
            None => Visible::of(&self.features.mask, q_len, k_len),
        };
        for (name, placed) in ["q", "k", "v", "o"].into_iter().zip([*q, visible.part(k, q), visible.part(v, q), *o]) {
            args.add(name, Value::Tensor(placed.tensor(self.number)));
        }
        // Enough pairs to balance rows of different lengths, few enough for the second-level cache.
        let pair_bytes = (k_len * u64::from(self.features.dims[0] + self.features.dims[1]) * 2).max(1);
        let order = match self.features.mask.spans().is_empty() {
            true => 1,
            false => (CACHE_BYTES / pair_bytes).clamp(16, 32),
        };
        let order = order.min(pairs);
        visible.lengths(args, q_len, k_len);
        args.bands([m_tiles, pairs], [order, rest(pairs, order)]);
        tiles
    }

    /// Arguments of sequences with lengths of their own; the most tiles there can be, and rows of the LSE of a head.
    fn unequal(&self, args: &mut Arguments<'_>, tensors: &Tensors, layout: Layout) -> Result<(u64, u64), NoKernel> {
        let tile = u64::from(self.tile_rows());
        for (name, placed) in ["q", "k", "v", "o"].into_iter().zip(&tensors.rows) {
            let tensor = placed.or(&tensors.rows[0]).ragged(self.number).ok_or_else(|| NoKernel {
                feature: format!("`{name}` whose sequences do not begin at whole rows, where lengths differ"),
            })?;
            args.add(name, Value::Tensor(tensor));
        }
        args.sequences(layout, tensors.cu_seqlens, tensors.used);
        let (tiles, lse_rows) = match layout {
            Layout::Dense { batch, q_len, .. } => {
                for (name, placed) in STEPS.into_iter().zip(&tensors.rows) {
                    args.add_u32(name, placed.step().unwrap_or(0));
                }
                (batch as u64 * (q_len as u64).div_ceil(tile), q_len)
            }
            Layout::Packed(p) => (p.total_q as u64 / tile + p.batch as u64 + 1, p.total_q),
        };
        Ok((tiles * self.heads[0], lse_rows as u64))
    }

    /// Arguments of the other features.
    fn more(&self, args: &mut Arguments<'_>, tensors: &Tensors) {
        if self.features.hides_elements() {
            self.plain(args, &tensors.rows);
        }
        if let Some(span) = tensors.sinks {
            args.add("sinks", Value::Pointer(span));
        }
        let table = self.coverage().and(tensors.scratch);
        let table = table.map(|span| DeviceAux { span, strides: row_major(self.aux_shapes.last()) });
        args.aux(tensors.aux.iter().chain(&table), &self.aux_shapes);
        if let (Some(lists), Some((spec, BlockForm::Lists))) = (&tensors.lists, self.blocks) {
            for (i, name) in NAMES.into_iter().enumerate() {
                args.add(&format!("{name}_counts"), Value::Pointer(lists.counts[i]));
                args.add(&format!("{name}_blocks"), Value::Pointer(lists.blocks[i]));
                args.add_u32(&format!("{name}_width"), lists.widths[i].into());
            }
            let q_len = match self.layout {
                Layout::Dense { q_len, .. } => q_len,
                Layout::Packed(p) => p.max_q,
            };
            let q_blocks = q_len.div_ceil(spec.rows) as u64;
            let head = if spec.heads == 1 { 0 } else { q_blocks };
            let batch = if spec.batch == 1 { 0 } else { spec.heads as u64 * q_blocks };
            args.add_u32("list_batch", batch);
            args.add_u32("list_head", head);
        }
    }
}

impl ForwardPlan {
    /// Arguments of rows that threads read, in pairs of elements.
    fn plain(&self, args: &mut Arguments<'_>, [q, k, v, _]: &[DeviceTensor; 4]) {
        // As the copy engine has them: from the first key that some query sees.
        let first = match (self.layout, self.features.ragged.any(), self.features.blocks) {
            (Layout::Dense { q_len, k_len, .. }, false, None) => self.features.mask.keys(0, q_len, k_len).start as u64,
            _ => 0,
        };
        let tensors = [*q, k.rows(first, k.shape[1]), v.rows(first, v.shape[1])];
        for (name, placed) in TENSORS.into_iter().zip(tensors) {
            args.add(name, Value::Pointer(placed.span));
            let [batch, row, head] = placed.strides;
            for (end, stride) in ROW_STRIDES.into_iter().zip([row, head, batch]) {
                args.add(&format!("{name}{end}"), Value::U64(stride / 2));
            }
        }
        args.add_u32(DIMS[0], q.shape[3] / UNIT as u64);
        args.add_u32(DIMS[1], v.shape[3]);
    }
}

/// A forward call with its kernel.
#[derive(Clone)]
pub struct Ready {
    plan: ForwardPlan,
    kernel: Arc<Kernel>,
    slots: Slots,
}

impl Ready {
    /// How it is run.
    pub fn plan(&self) -> &ForwardPlan {
        &self.plan
    }

    /// Its launch, `None` where there is nothing to compute.
    pub fn launch(&self, tensors: &Tensors, multiprocessors: u32) -> Result<Option<Launch>, NoKernel> {
        let launch = self.plan.arguments(&self.slots, tensors, multiprocessors)?;
        Ok(launch.map(|(grid, args)| Launch { kernel: self.kernel.clone(), grid, args }))
    }

    /// The launches of a call whose tensors must be copied, in order; `room` is memory for the copies.
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

/// The rows of a forward call, as they would be copied.
fn named(&[q, k, v, o]: &[DeviceTensor; 4]) -> [Named; 4] {
    let input = |name, placed| (name, placed, Direction::Pack);
    [input("q", q), input("k", k), input("v", v), ("o", o, Direction::Unpack)]
}

/// Elements from one to the next along each axis of a contiguous tensor.
pub(crate) fn row_major(shape: Option<&Vec<usize>>) -> Vec<u64> {
    let shape = shape.map_or(&[][..], |shape| shape);
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().map(|&n| n as u64).product()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::Exp;

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
    fn a_cut_that_does_not_fit_wide_rows_is_refused() {
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
}
