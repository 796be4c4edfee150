//! Gradients of attention as launches: a problem and where its tensors lie in, kernels and their arguments out.

use super::{Features, Order, Tuning, finish, main, prepare, sinks};
use crate::attention::plan::{Missing, Placed};
use fulgurite_core::mask::Span as MaskSpan;
use fulgurite_core::{DType, Exp, Layout, Problem};
use fulgurite_ptx::device::{Launch, Plan, Span, Value};
use fulgurite_ptx::{BuildError, Half, Kernel, Number, Pair, Target, Word, bf16, divisor_values, f16};
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;

/// Elements that make 16 bytes: the copy engine's unit.
const UNIT: usize = 8;
/// The largest head dimension.
const MOST: usize = 256;
/// Pairs of head and sequence whose tiles run together where tiles differ in length.
const ORDER: u64 = 16;
/// Words before those that keep the order: a whole unit of 16 bytes.
const COUNTERS: u64 = 4;
/// Rows before the first of a tensor that nothing is read of: past all that there can be.
const OUTSIDE: u64 = 1 << 30;
/// Bytes to which the parts of the scratch memory are aligned.
const ALIGN: u64 = 256;

/// A backward call on Hopper: what its kernels' text depends on, and its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    number: Number,
    features: Features,
    tuning: Tuning,
    /// Elements of a row of q and k, and of v and o.
    dims: [u64; 2],
    /// Batch, queries, keys, query heads, key/value heads.
    sizes: [u64; 5],
    scale: f32,
    has_sinks: bool,
}

/// The kernels of a call, in the order in which they run.
#[derive(Clone)]
pub struct Kernels {
    /// Before.
    pub prepare: Arc<Kernel>,
    /// The gradients.
    pub main: Arc<Kernel>,
    /// After.
    pub finish: Arc<Kernel>,
    /// The gradients of sinks, where there are some.
    pub sinks: Option<Arc<Kernel>>,
}

impl Kernels {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Kernel>> {
        [&self.prepare, &self.main, &self.finish].into_iter().chain(&self.sinks)
    }
}

/// Where the tensors of a call lie. Those of f32 are `[batch, heads, queries]`, packed.
#[derive(Debug, Clone, Copy)]
pub struct Tensors {
    /// Inputs of forward.
    pub q: Placed,
    /// The same.
    pub k: Placed,
    /// The same.
    pub v: Placed,
    /// Output of forward.
    pub o: Placed,
    /// LSE of forward.
    pub lse: Span,
    /// Gradient of o.
    pub d_o: Placed,
    /// Gradient of the LSE, where there is one.
    pub d_lse: Option<Span>,
    /// Results.
    pub d_q: Placed,
    /// The same.
    pub d_k: Placed,
    /// The same.
    pub d_v: Placed,
    /// Sinks and their gradients, `[heads]`, f32, where the problem has them.
    pub sinks: Option<[Span; 2]>,
}

impl Backward {
    /// How a problem is run; `d_lse` tells whether its LSE has a gradient.
    pub fn new(problem: &Problem, d_lse: bool, order: Order) -> Result<Backward, Missing> {
        let missing = |feature: String| Err(Missing { feature });
        let number = match problem.dtype() {
            DType::Bf16 => Number::Bf16,
            DType::F16 => Number::F16,
            other => return missing(format!("dtype {other}")),
        };
        let Layout::Dense { .. } = problem.layout() else { return missing("backward of packed batches".into()) };
        let dims = [problem.head_dim(), problem.value_dim()];
        if let Some(d) = dims.into_iter().find(|d| !d.is_multiple_of(UNIT) || *d > MOST) {
            return missing(format!("backward of head_dim {d} (it has multiples of {UNIT} up to {MOST})"));
        }
        let others = [
            (problem.mask().rest().is_some(), "mask modifiers"),
            (problem.score_program().is_some(), "score modifiers"),
            (problem.has_used_q() || problem.has_used_k(), "used lengths"),
            (problem.blocks().is_some(), "block masks"),
        ];
        if let Some((_, name)) = others.into_iter().find(|(has, _)| *has) {
            return missing(format!("backward of {name}"));
        }
        let precision = problem.precision();
        if precision != fulgurite_core::Precision::Native {
            return missing(format!("backward of precision {precision}"));
        }
        let exp = problem.exp();
        if matches!(exp, Exp::Sas { .. }) {
            return missing(format!("backward of exp {exp}"));
        }
        let sizes = [problem.batch(), problem.max_q_len(), problem.max_k_len(), problem.q_heads(), problem.kv_heads()]
            .map(|n| n as u64);
        // What is missing of a row is read as zeros.
        let padded = dims.map(|d| d.next_multiple_of(if dims[0].max(dims[1]) > 128 { 64 } else { 16 }) as u32);
        let padded = match padded[0].max(padded[1]) {
            // The warpgroups share the columns of d_q: halves are whole chunks of a tile.
            65..=128 => [128, padded[1]],
            _ => padded,
        };
        let tuning = Tuning::hopper(padded[0].max(padded[1]));
        let features = Features { dims: padded, mask: problem.mask().clone(), exp, d_lse, order };
        let dims = dims.map(|d| d as u64);
        let plan =
            Backward { number, features, tuning, dims, sizes, scale: problem.scale(), has_sinks: problem.has_sinks() };
        // Rows and items of the preparation are counted in 32 bits.
        let most = plan.rows() * u64::from(prepare::lanes(&plan.features));
        if most.max(sizes[2]) >= OUTSIDE {
            return missing(format!("backward of {most} parts of rows or keys (it has less than 2^30)"));
        }
        Ok(plan)
    }

    /// With another tuning, which must fit the head dimensions.
    pub fn tuned(self, tuning: Tuning) -> Backward {
        Backward { tuning, ..self }
    }
    /// How the main kernel is cut.
    pub fn tuning(&self) -> Tuning {
        self.tuning
    }

    /// Its kernels.
    pub fn kernels(&self, target: Target) -> Result<Kernels, BuildError> {
        match self.number {
            Number::Bf16 => self.built::<bf16>(target),
            _ => self.built::<f16>(target),
        }
    }

    fn built<T: Half>(&self, target: Target) -> Result<Kernels, BuildError>
    where
        Pair<T>: Word,
    {
        Ok(Kernels {
            prepare: Arc::new(prepare::kernel::<T>(target, &self.features)?),
            main: Arc::new(main::kernel::<T>(target, &self.features, self.tuning)?),
            finish: Arc::new(finish::kernel::<T>(target, &self.features, self.tuning)?),
            sinks: self.has_sinks.then(|| sinks::kernel(target)).transpose()?.map(Arc::new),
        })
    }

    /// Whether another call has the same kernels.
    pub fn same_kernels(&self, other: &Backward) -> bool {
        (self.number, &self.features, self.tuning, self.has_sinks)
            == (other.number, &other.features, other.tuning, other.has_sinks)
    }

    /// Steps of queries of a head; keys without queries have one, which sees nothing.
    fn steps(&self) -> u64 {
        self.sizes[1].div_ceil(u64::from(self.tuning.rows)).max(1)
    }
    /// Rows of all heads, each head's padded to whole steps.
    fn rows(&self) -> u64 {
        let [batch, _, _, heads, _] = self.sizes;
        batch * heads * self.steps() * u64::from(self.tuning.rows)
    }

    /// Where the parts of the scratch memory begin, and where it ends: sums of d_q, shifts, delta, counters.
    fn parts(&self) -> [u64; 5] {
        let rows = self.rows();
        let mut end = 0;
        let sizes = [rows * u64::from(self.features.dims[0]) * 4, rows * 4, rows * 4, self.counters() * 4];
        let starts = sizes.map(|bytes| {
            let start = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            start
        });
        [starts[0], starts[1], starts[2], starts[3], end]
    }

    /// Words that are zero at the beginning: the tiles handed out, and in a fixed order for each step of each head and each
    /// warpgroup the tile whose turn it is.
    fn counters(&self) -> u64 {
        match self.features.order {
            Order::Any => COUNTERS,
            Order::Fixed => COUNTERS + 2 * self.rows() / u64::from(self.tuning.rows),
        }
    }

    /// Bytes of scratch memory that a run needs; what they hold does not matter.
    pub fn scratch_bytes(&self) -> u64 {
        self.parts()[4]
    }

    /// Its launches; none where there is nothing to compute.
    pub fn plan(&self, kernels: &Kernels, tensors: &Tensors, scratch: Span, multiprocessors: u32) -> Plan {
        let [batch, q_len, k_len, heads, kv_heads] = self.sizes;
        let key_tiles = k_len.div_ceil(u64::from(self.tuning.keys()));
        let pairs = batch * kv_heads;
        let tiles = key_tiles * pairs;
        if batch * heads == 0 || q_len + k_len == 0 {
            return Plan::default();
        }
        let [sums, shift, delta, counters, _] = self.parts().map(|at| scratch.from(at));
        let mut launches = vec![self.prepare(kernels, tensors, [sums, shift, delta, counters])];
        if let (Some(kernel), Some([sinks, d_sinks])) = (&kernels.sinks, tensors.sinks) {
            let mut args: Vec<Value> = [shift, delta, sinks, d_sinks].map(Value::Pointer).into();
            let rows = self.steps() * u64::from(self.tuning.rows);
            args.extend([batch, heads, rows].map(|n| Value::U32(n as u32)));
            launches.push(Launch { kernel: kernel.clone(), grid: [heads as u32, 1, 1], args });
        }
        if tiles > 0 {
            let scratch = [shift, delta, sums, counters];
            launches.push(self.main(kernels, tensors, scratch, [key_tiles, pairs, tiles], multiprocessors));
        }
        if q_len > 0 {
            let number = |n: u64| Value::U32(n as u32);
            let mut args =
                vec![Value::Pointer(sums), Value::Pointer(tensors.d_q.span), number(q_len), number(self.dims[0])];
            args.extend([self.steps(), heads].into_iter().flat_map(|d| divisor_values(d as u32)));
            args.extend(pair_strides(&tensors.d_q));
            args.push(Value::F32(self.scale));
            let blocks = batch * heads * self.steps();
            launches.push(Launch { kernel: kernels.finish.clone(), grid: [blocks as u32, 1, 1], args });
        }
        Plan { launches }
    }

    fn prepare(&self, kernels: &Kernels, tensors: &Tensors, [sums, shift, delta, counters]: [Span; 4]) -> Launch {
        let [_, q_len, _, heads, _] = self.sizes;
        let items = self.rows() * u64::from(prepare::lanes(&self.features));
        let spans = [tensors.o.span, tensors.d_o.span, tensors.lse].into_iter().chain(tensors.d_lse);
        let mut args: Vec<Value> = spans.chain([shift, delta, sums, counters]).map(Value::Pointer).collect();
        args.extend([items, q_len, self.dims[1], self.counters()].map(|n| Value::U32(n as u32)));
        let rows = self.steps() * u64::from(self.tuning.rows);
        args.extend([heads, rows].into_iter().flat_map(|d| divisor_values(d as u32)));
        args.extend([&tensors.o, &tensors.d_o].into_iter().flat_map(pair_strides));
        let blocks = items.div_ceil(u64::from(prepare::THREADS)).max(1);
        Launch { kernel: kernels.prepare.clone(), grid: [blocks as u32, 1, 1], args }
    }

    fn main(
        &self,
        kernels: &Kernels,
        tensors: &Tensors,
        scratch: [Span; 4],
        [key_tiles, pairs, tiles]: [u64; 3],
        multiprocessors: u32,
    ) -> Launch {
        let [_, q_len, k_len, heads, kv_heads] = self.sizes;
        // Keys that no query sees, and queries that see no key, are read as zeros: whatever they hold, times a
        // probability of 0, must not show.
        let spans = self.features.mask.spans();
        let seen_keys = seen(spans, [q_len, k_len].map(|n| n as usize));
        let transposed: Vec<MaskSpan> = spans.iter().map(MaskSpan::transposed).collect();
        let seen_queries = seen(&transposed, [k_len, q_len].map(|n| n as usize));
        // Without any, every coordinate lies outside: any memory does.
        let some = |placed: &Placed, seen: &Range<usize>| match seen.is_empty() {
            true => Placed { shape: [1, 1, 1, UNIT as u64], ..tensors.k },
            false => placed.rows(seen.start as u64, seen.len() as u64),
        };
        let Tensors { q, k, v, d_o, d_k, d_v, .. } = tensors;
        let parts =
            [some(q, &seen_queries), some(d_o, &seen_queries), some(k, &seen_keys), some(v, &seen_keys), *d_k, *d_v];
        let mut args: Vec<Value> = parts.iter().map(|placed| Value::Tensor(placed.tensor(self.number))).collect();
        args.extend(scratch.map(Value::Pointer));
        if self.features.order == Order::Fixed {
            args.push(Value::Pointer(scratch[3].from(COUNTERS * 4)));
        }
        let order = if spans.is_empty() { 1 } else { ORDER.min(pairs) };
        let rest = match pairs % order {
            0 => 1, // never used
            rest => rest,
        };
        let first = |seen: &Range<usize>| if seen.is_empty() { OUTSIDE } else { seen.start as u64 };
        let group = heads / kv_heads;
        let numbers = [self.steps(), k_len, tiles, pairs, first(&seen_keys), first(&seen_queries), group];
        args.extend(numbers.map(|n| Value::U32(n as u32)));
        args.extend([kv_heads, order * key_tiles, order, rest].into_iter().flat_map(|d| divisor_values(d as u32)));
        args.extend([Value::F32(self.scale * LOG2_E), Value::F32(self.scale)]);
        args.extend([k_len as i64 - q_len as i64, 0].map(|n| Value::U32(n as i32 as u32)));
        let blocks = tiles.min(u64::from(multiprocessors)) as u32;
        Launch { kernel: kernels.main.clone(), grid: [blocks, 1, 1], args }
    }
}

/// The columns that some row of a mask sees. Intervals only move right with the row.
fn seen(spans: &[MaskSpan], [rows, cols]: [usize; 2]) -> Range<usize> {
    if rows == 0 {
        return 0..0;
    }
    let all = |row: usize| {
        spans.iter().map(|span| span.keys(row, rows, cols)).fold(0..cols, |a, b| a.start.max(b.start)..a.end.min(b.end))
    };
    all(0).start..all(rows - 1).end
}

/// Strides of batch, row and head in pairs of elements.
fn pair_strides(placed: &Placed) -> [Value; 3] {
    placed.strides.map(|stride| Value::U32((stride / 2) as u32))
}
