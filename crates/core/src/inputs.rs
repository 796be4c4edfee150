//! The tensors of a forward call, and the proof that they fit a problem.

use crate::block::{BlockMask, BlockSpec};
use crate::dtype::DType;
use crate::error::InputError;
use crate::expr::{Domain, Program};
use crate::fit::{asked, check_on, device_contiguous, integers, integers_fit, place_is, rows_fit, shape_is};
use crate::problem::{Layout, Problem, Side, check_offsets};
use crate::tensor::{DeviceId, Place, TensorView, ask_memory};
use std::ops::Range;

pub use crate::fit::check_like;

/// The tensors of a forward call.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Inputs<'a> {
    /// Queries.
    pub q: TensorView<'a>,
    /// Keys.
    pub k: TensorView<'a>,
    /// Values.
    pub v: TensorView<'a>,
    /// One logit per query head.
    pub sinks: Option<TensorView<'a>>,
    /// Cumulative offsets of the sequences in q: i32, `[batch + 1]`.
    pub cu_seqlens_q: Option<TensorView<'a>>,
    /// Cumulative offsets of the sequences in k and v: i32, `[batch + 1]`.
    pub cu_seqlens_k: Option<TensorView<'a>>,
    /// Number of queries in use per sequence: i32, `[batch]`.
    pub used_q: Option<TensorView<'a>>,
    /// Number of keys in use per sequence: i32, `[batch]`.
    pub used_k: Option<TensorView<'a>>,
    /// Auxiliary tensors by name.
    pub aux: Vec<(&'a str, TensorView<'a>)>,
    /// Block lists for tensors in host memory.
    pub block_mask: Option<&'a BlockMask>,
    /// Block lists for tensors on a device.
    pub block_lists: Option<Box<BlockLists<'a>>>,
}

/// The lists of a block mask on a device, i32 and contiguous; partial blocks first, full blocks second.
#[derive(Debug, Clone, Copy)]
pub struct BlockLists<'a> {
    /// Number of blocks in each list: `[batch | 1, heads | 1, query blocks]`.
    pub counts: [TensorView<'a>; 2],
    /// The blocks: the same axes, and one more with the length of the longest list.
    pub blocks: [TensorView<'a>; 2],
}

impl BlockLists<'_> {
    /// Names of the four tensors in messages: counts and blocks of partial lists, then of full ones.
    pub const NAMES: [&'static str; 4] = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"];
}

impl<'a> Inputs<'a> {
    /// The three tensors that every call has; the methods below set the others.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        Inputs {
            q,
            k,
            v,
            sinks: None,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            used_q: None,
            used_k: None,
            aux: Vec::new(),
            block_mask: None,
            block_lists: None,
        }
    }
    /// Sets the sinks.
    pub fn sinks(mut self, sinks: TensorView<'a>) -> Self {
        self.sinks = Some(sinks);
        self
    }
    /// Sets the offsets of packed sequences.
    pub fn cu_seqlens(mut self, q: TensorView<'a>, k: TensorView<'a>) -> Self {
        (self.cu_seqlens_q, self.cu_seqlens_k) = (Some(q), Some(k));
        self
    }
    /// Sets the used lengths.
    pub fn used_lengths(mut self, q: Option<TensorView<'a>>, k: Option<TensorView<'a>>) -> Self {
        (self.used_q, self.used_k) = (q, k);
        self
    }
    /// Adds an auxiliary tensor.
    pub fn aux(mut self, name: &'a str, view: TensorView<'a>) -> Self {
        self.aux.push((name, view));
        self
    }
    /// Sets the block lists of tensors on a device.
    pub fn block_lists(mut self, lists: BlockLists<'a>) -> Self {
        self.block_lists = Some(Box::new(lists));
        self
    }
    /// Sets the block lists.
    pub fn block_mask(mut self, mask: &'a BlockMask) -> Self {
        self.block_mask = Some(mask);
        self
    }

    /// Checks that these tensors fit `problem`.
    pub fn check(&self, problem: &Problem) -> Result<(), InputError> {
        self.bind(problem).map(|_| ())
    }

    /// Checks that these tensors are on this device and fit `problem`. The checks are those of [`bind`](Self::bind),
    /// except those that would read contents: kernels clamp lengths and indices.
    pub fn bind_on<'i>(&'i self, problem: &'i Problem, device: DeviceId) -> Result<DeviceBound<'i, 'a>, InputError> {
        fit(self, problem, Place::Device(device))?;
        Ok(DeviceBound { problem, inputs: self, device })
    }

    /// Checks that these tensors are in host memory and fit `problem`, and binds the two together.
    pub fn bind(&self, problem: &'a Problem) -> Result<Bound<'a>, InputError>
    where
        Self: 'a,
    {
        let bound = bind(self, problem)?;
        bound.quantisable()?;
        Ok(bound)
    }

    /// Like [`bind`](Self::bind), for engines that check the elements of quantised tensors while they read them. If one
    /// is not finite, the engine calls [`bind`](Self::bind) for the error.
    #[doc(hidden)]
    pub fn bind_without_content_check(&self, problem: &'a Problem) -> Result<Bound<'a>, InputError>
    where
        Self: 'a,
    {
        bind(self, problem)
    }
}

/// The position of one sequence of the batch. Lengths are those in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Index of the sequence.
    pub batch: usize,
    /// First row in a packed q; 0 in a dense one.
    pub q_start: usize,
    /// Queries in use.
    pub q_len: usize,
    /// First row in packed k and v; 0 in dense ones.
    pub k_start: usize,
    /// Keys in use.
    pub k_len: usize,
}

/// Where the rows of one sequence are in a tensor: row i of head h starts at offset + i * row + h * head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLayout {
    /// Offset of row 0 of head 0, in elements.
    pub offset: usize,
    /// Distance between rows, in elements.
    pub row: usize,
    /// Distance between heads, in elements.
    pub head: usize,
}

impl RowLayout {
    /// Offset of row `i` of head `h`.
    pub fn at(&self, i: usize, h: usize) -> usize {
        self.offset + i * self.row + h * self.head
    }
}

/// Device tensors that fit a problem. A value of this type proves that every check that needs no contents has passed.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBound<'i, 'a> {
    problem: &'i Problem,
    inputs: &'i Inputs<'a>,
    device: DeviceId,
}

impl<'i, 'a> DeviceBound<'i, 'a> {
    /// The problem.
    pub fn problem(&self) -> &'i Problem {
        self.problem
    }
    /// The tensors.
    pub fn inputs(&self) -> &'i Inputs<'a> {
        self.inputs
    }
    /// The device of the tensors.
    pub fn device(&self) -> DeviceId {
        self.device
    }
    /// Auxiliary tensors in the order of the problem.
    pub fn aux(&self) -> impl Iterator<Item = &'i TensorView<'a>> {
        let named = |name: &str| self.inputs.aux.iter().find(|(own, _)| **own == *name).map(|(_, view)| view);
        self.problem.aux().iter().filter_map(move |spec| named(&spec.name))
    }
}

/// Host tensors that fit a problem. A value of this type proves that every check has passed.
#[derive(Debug, Clone)]
pub struct Bound<'a> {
    problem: &'a Problem,
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    sinks: Option<TensorView<'a>>,
    aux: Vec<TensorView<'a>>,
    block_mask: Option<&'a BlockMask>,
    sequences: Vec<Sequence>,
}

impl<'a> Bound<'a> {
    /// The problem.
    pub fn problem(&self) -> &'a Problem {
        self.problem
    }
    /// Queries.
    pub fn q(&self) -> &TensorView<'a> {
        &self.q
    }
    /// Keys.
    pub fn k(&self) -> &TensorView<'a> {
        &self.k
    }
    /// Values.
    pub fn v(&self) -> &TensorView<'a> {
        &self.v
    }
    /// One logit per query head.
    pub fn sinks(&self) -> Option<&TensorView<'a>> {
        self.sinks.as_ref()
    }
    /// The sink of one head, if there are sinks.
    pub fn sink(&self, head: usize) -> Option<f64> {
        self.sinks.as_ref().map(|s| s.get(&[head]))
    }
    /// The sink of one head for its gradient: one of -inf is hidden, so no row has a term there, whatever the row holds.
    pub fn visible_sink(&self, head: usize) -> Option<f64> {
        self.sink(head).filter(|&sink| sink != f64::NEG_INFINITY)
    }
    /// Auxiliary tensors in the order of the problem.
    pub fn aux(&self) -> &[TensorView<'a>] {
        &self.aux
    }
    /// The block lists.
    pub fn block_mask(&self) -> Option<&'a BlockMask> {
        self.block_mask
    }
    /// The sequences of the batch.
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Whether every row of the outputs belongs to a query in use. Other rows are zero (LSE -inf).
    pub fn all_queries_used(&self) -> bool {
        self.rows_used(Side::Query)
    }
    /// Whether every row of k and v is a key in use. The gradients of other rows are zero.
    pub fn all_keys_used(&self) -> bool {
        self.rows_used(Side::Key)
    }

    fn rows_used(&self, side: Side) -> bool {
        let used: usize = self.sequences.iter().map(|s| if side == Side::Query { s.q_len } else { s.k_len }).sum();
        let rows = match (self.problem.layout(), side) {
            (Layout::Dense { batch, q_len, .. }, Side::Query) => batch * q_len,
            (Layout::Dense { batch, k_len, .. }, Side::Key) => batch * k_len,
            (Layout::Packed(p), Side::Query) => p.total_q,
            (Layout::Packed(p), Side::Key) => p.total_k,
        };
        used == rows
    }

    /// Positions of a sequence's rows in a tensor of the shape of q, o (queries) or k, v (keys).
    pub fn row_layout(&self, strides: &[usize], sequence: &Sequence, side: Side) -> RowLayout {
        let start = if side == Side::Query { sequence.q_start } else { sequence.k_start };
        match self.problem.layout() {
            Layout::Dense { .. } => {
                RowLayout { offset: sequence.batch * strides[0], row: strides[1], head: strides[2] }
            }
            Layout::Packed(_) => RowLayout { offset: start * strides[0], row: strides[0], head: strides[1] },
        }
    }

    /// Positions of a sequence's rows in a tensor of the shape of the LSE.
    pub fn lse_layout(&self, strides: &[usize], sequence: &Sequence) -> RowLayout {
        match self.problem.layout() {
            Layout::Dense { .. } => {
                RowLayout { offset: sequence.batch * strides[0], row: strides[2], head: strides[1] }
            }
            Layout::Packed(_) => RowLayout { offset: sequence.q_start * strides[1], row: strides[1], head: strides[0] },
        }
    }
}

fn sequences(inputs: &Inputs<'_>, problem: &Problem) -> Result<Vec<Sequence>, InputError> {
    let batch = problem.batch();
    // There may be any number of them where they are empty: their tensors have no element.
    ask_memory("the list of sequences", batch.saturating_mul(size_of::<Sequence>()))?;
    let mut all = Vec::with_capacity(batch);
    match (problem.layout(), inputs.cu_seqlens_q, inputs.cu_seqlens_k) {
        (Layout::Packed(p), Some(cu_q), Some(cu_k)) => {
            let lists = [
                ("cu_seqlens_q", integers("cu_seqlens_q", &cu_q, batch + 1)?, p.total_q, p.max_q),
                ("cu_seqlens_k", integers("cu_seqlens_k", &cu_k, batch + 1)?, p.total_k, p.max_k),
            ];
            for (arg, offsets, total, max) in &lists {
                let (sum, longest) = check_offsets(arg, offsets)?;
                if sum > *total {
                    let allowed = format!("at most {total}, the rows of the tensor");
                    return Err(InputError::Total { arg, what: "the last offset", got: sum, allowed });
                }
                if longest > *max {
                    let allowed = format!("at most {max}, the problem's maximum");
                    return Err(InputError::Total { arg, what: "the longest sequence", got: longest, allowed });
                }
            }
            let [(_, q, ..), (_, k, ..)] = &lists;
            for b in 0..batch {
                let (q_start, k_start) = (q[b] as usize, k[b] as usize);
                let (q_len, k_len) = (q[b + 1] as usize - q_start, k[b + 1] as usize - k_start);
                all.push(Sequence { batch: b, q_start, q_len, k_start, k_len });
            }
        }
        _ => {
            let (q_len, k_len) = (problem.max_q_len(), problem.max_k_len());
            all.extend((0..batch).map(|b| Sequence { batch: b, q_start: 0, q_len, k_start: 0, k_len }));
        }
    }
    if let Some(view) = inputs.used_q {
        for (s, got) in all.iter_mut().zip(integers("used_q", &view, batch)?) {
            s.q_len = used("used_q", s.batch, got, s.q_len)?;
        }
    }
    if let Some(view) = inputs.used_k {
        for (s, got) in all.iter_mut().zip(integers("used_k", &view, batch)?) {
            s.k_len = used("used_k", s.batch, got, s.k_len)?;
        }
    }
    Ok(all)
}

fn used(arg: &'static str, at: usize, got: i32, max: usize) -> Result<usize, InputError> {
    usize::try_from(got).ok().filter(|&n| n <= max).ok_or(InputError::Used { arg, at, got, max })
}

/// Checks everything that needs no contents: the call has exactly the problem's tensors, all in `place`, with the right
/// shapes, types and strides.
fn fit(inputs: &Inputs<'_>, problem: &Problem, place: Place) -> Result<(), InputError> {
    let [q, k, v, _] = problem.row_dims();
    for (arg, view, want) in [("q", &inputs.q, q), ("k", &inputs.k, k), ("v", &inputs.v, v)] {
        rows_fit(arg, view, &want, problem, place)?;
    }
    let hint = ["call Inputs::sinks", "say so with ProblemBuilder::sinks"];
    if let Some(sinks) = asked("sinks", problem.has_sinks(), inputs.sinks.as_ref(), hint)? {
        place_is("sinks", sinks, place)?;
        shape_is("sinks", sinks.shape(), &[problem.q_heads()])?;
        if !sinks.dtype().is_float() {
            return Err(InputError::DType { arg: "sinks".into(), got: sinks.dtype(), want: "f32, f16 or bf16" });
        }
        device_contiguous("sinks", sinks)?;
    }
    for spec in problem.aux() {
        let (_, view) = inputs.aux.iter().find(|(name, _)| **name == *spec.name).ok_or_else(|| {
            InputError::Missing { arg: spec.name.to_string(), hint: "call Inputs::aux with that name" }
        })?;
        check_on(&spec.name, view, &spec.shape, spec.dtype, place)?;
    }
    if let Some((name, _)) = inputs.aux.iter().find(|(name, _)| !problem.aux().iter().any(|spec| *spec.name == **name))
    {
        return Err(InputError::Unused { arg: name.to_string(), hint: "declare it with ProblemBuilder::aux" });
    }
    let (batch, packed) = (problem.batch(), matches!(problem.layout(), Layout::Packed(_)));
    let offsets = ["call Inputs::cu_seqlens", "build the problem with ProblemBuilder::packed"];
    let used = ["call Inputs::used_lengths", "say so with ProblemBuilder::used_lengths"];
    for (arg, wanted, view, len, hint) in [
        ("cu_seqlens_q", packed, &inputs.cu_seqlens_q, batch + 1, offsets),
        ("cu_seqlens_k", packed, &inputs.cu_seqlens_k, batch + 1, offsets),
        ("used_q", problem.has_used_q(), &inputs.used_q, batch, used),
        ("used_k", problem.has_used_k(), &inputs.used_k, batch, used),
    ] {
        if let Some(view) = asked(arg, wanted, view.as_ref(), hint)? {
            integers_fit(arg, view, len, place)?;
        }
    }
    match place {
        Place::Host => block_mask_fits(inputs, problem),
        Place::Device(_) => block_lists_fit(inputs, problem, place),
    }
}

/// Checks the block mask of tensors in host memory.
fn block_mask_fits(inputs: &Inputs<'_>, problem: &Problem) -> Result<(), InputError> {
    let unused = |arg: &str, hint| Err(InputError::Unused { arg: arg.into(), hint });
    if inputs.block_lists.is_some() {
        return unused("block_lists", "they belong to tensors on a device; call Inputs::block_mask");
    }
    match (problem.blocks(), inputs.block_mask) {
        (None, None) => Ok(()),
        (Some(_), None) => Err(InputError::Missing { arg: "block_mask".into(), hint: "call Inputs::block_mask" }),
        (None, Some(_)) => unused("block_mask", "say so with ProblemBuilder::block_mask"),
        (Some(spec), Some(mask)) => {
            let blocks = spec.blocks(problem.max_q_len(), problem.max_k_len());
            if spec != mask.spec() || blocks != mask.blocks() {
                let say = |spec, [q, k]: [usize; 2]| format!("{spec:?} with {q} x {k} blocks");
                return Err(InputError::Blocks { got: say(mask.spec(), mask.blocks()), want: say(spec, blocks) });
            }
            block_axes_fit(spec, problem)
        }
    }
}

/// Checks the block lists of tensors on a device.
fn block_lists_fit(inputs: &Inputs<'_>, problem: &Problem, place: Place) -> Result<(), InputError> {
    let unused = |arg: &str, hint| Err(InputError::Unused { arg: arg.into(), hint });
    if inputs.block_mask.is_some() {
        return unused("block_mask", "it belongs to tensors in host memory; call Inputs::block_lists");
    }
    match (problem.blocks(), inputs.block_lists.as_deref()) {
        (None, None) => Ok(()),
        (Some(_), None) => Err(InputError::Missing { arg: "block_lists".into(), hint: "call Inputs::block_lists" }),
        (None, Some(_)) => unused("block_lists", "say so with ProblemBuilder::block_mask"),
        (Some(spec), Some(BlockLists { counts, blocks })) => {
            block_axes_fit(spec, problem)?;
            let [q_blocks, k_blocks] = spec.blocks(problem.max_q_len(), problem.max_k_len());
            let [count_0, blocks_0, count_1, blocks_1] = BlockLists::NAMES;
            let names = [(count_0, blocks_0), (count_1, blocks_1)];
            for ((arg, name), (counts, blocks)) in names.into_iter().zip(counts.iter().zip(blocks)) {
                let shape = [spec.batch, spec.heads, q_blocks];
                check_on(arg, counts, &shape, DType::I32, place)?;
                // Lists may be shorter than the number of blocks: the longest list decides.
                let width = blocks.shape().last().map_or(0, |&width| width.clamp(1, k_blocks.max(1)));
                check_on(name, blocks, &[spec.batch, spec.heads, q_blocks, width], DType::I32, place)?;
                device_contiguous(arg, counts)?;
                device_contiguous(name, blocks)?;
            }
            Ok(())
        }
    }
}

/// Checks that a block mask has one set of lists per sequence and head, or one for all.
fn block_axes_fit(spec: BlockSpec, problem: &Problem) -> Result<(), InputError> {
    for (what, got, full) in [("batch", spec.batch, problem.batch()), ("heads", spec.heads, problem.q_heads())] {
        if got != 1 && got != full {
            return Err(InputError::Blocks { got: format!("{what} {got}"), want: format!("1 or {full}") });
        }
    }
    Ok(())
}

fn bind<'a>(inputs: &Inputs<'a>, problem: &'a Problem) -> Result<Bound<'a>, InputError> {
    fit(inputs, problem, Place::Host)?;
    let aux = |name: &str| inputs.aux.iter().find(|(own, _)| **own == *name).map(|(_, view)| *view);
    let bound = Bound {
        problem,
        q: inputs.q,
        k: inputs.k,
        v: inputs.v,
        sinks: inputs.sinks,
        aux: problem.aux().iter().filter_map(|spec| aux(&spec.name)).collect(),
        block_mask: inputs.block_mask,
        sequences: sequences(inputs, problem)?,
    };
    bound.loads_inside()?;
    Ok(bound)
}

impl<'a> Bound<'a> {
    /// This call with other tensors in place of q, k and v.
    pub fn with_tensors(
        &self,
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
    ) -> Result<Bound<'a>, InputError> {
        let shapes = [self.problem.q_shape(), self.problem.k_shape(), self.problem.v_shape()];
        for ((arg, view), want) in [("q", &q), ("k", &k), ("v", &v)].into_iter().zip(shapes) {
            rows_fit(arg, view, &want, self.problem, Place::Host)?;
        }
        Ok(Bound { q, k, v, ..self.clone() })
    }
}

impl Bound<'_> {
    /// Proves by interval arithmetic that no modifier reads outside an auxiliary tensor.
    fn loads_inside(&self) -> Result<(), InputError> {
        // If no query meets a key, nothing is read.
        let Some(domain) = self.domain() else { return Ok(()) };
        let programs = [self.problem.score_program(), self.problem.mask_program()];
        for program in programs.into_iter().flatten() {
            if let Some((tensor, axis, low, high)) = Program::loads_outside(program, &domain) {
                let spec = &self.problem.aux()[tensor];
                let max = spec.shape[axis] as i64 - 1;
                return Err(InputError::AuxIndex { name: spec.name.to_string(), axis, low, high, max });
            }
        }
        Ok(())
    }

    /// The first integer operation of a modifier or mask whose exact result may leave 32 bits, as text, and the bounds of
    /// that result; contents of tensors are read where an operation takes them.
    ///
    /// Integers of expressions wrap. Callers whose users expect more bits ask here.
    pub fn past_32_bits(&self) -> Option<(String, i64, i64)> {
        let domain = self.domain()?;
        let programs = [self.problem.score_program(), self.problem.mask_program()];
        programs.into_iter().flatten().find_map(|program| program.past_32_bits(&domain, true))
    }

    /// All scores of all sequences; `None` if there are none.
    fn domain(&self) -> Option<Domain<'_>> {
        let range = |f: fn(&Sequence) -> usize| {
            let lengths = || self.sequences.iter().filter(|s| s.q_len > 0 && s.k_len > 0).map(f);
            Some((lengths().min()?, lengths().max()?))
        };
        let (q_len, k_len) = (range(|s| s.q_len)?, range(|s| s.k_len)?);
        Some(Domain {
            batch: 0..self.problem.batch(),
            heads: 0..self.problem.q_heads(),
            q: 0..q_len.1,
            k: 0..k_len.1,
            q_len,
            k_len,
            aux: &self.aux,
        })
    }

    /// A range of keys, clipped to the keys in use.
    pub fn clip_keys(&self, sequence: &Sequence, keys: Range<usize>) -> Range<usize> {
        let end = keys.end.min(sequence.k_len);
        keys.start.min(end)..end
    }
}
