//! Recipes: short descriptions from which cases draw their tensors.

use super::{Case, Stored};
use crate::block::{BlockMask, BlockSpec};
use crate::dtype::DType;
use crate::expr::AuxSpec;
use crate::inputs::{Bound, Sequence};
use crate::mask::{DOCUMENTS_K, DOCUMENTS_Q, PREFIX_LENGTHS};
use crate::problem::{ALIBI_SLOPES, Problem, ProblemBuilder, Side};
use crate::random::Rng;
use crate::tensor::{Dims, Tensor};
use crate::walk;

/// The shape of the logits along the keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Logits {
    /// Normally distributed, with variance about 1.
    Normal,
    /// One key exceeds the others by 1000.
    Spike,
    /// Each key adds this much, so the maximum moves (or does not) with every block.
    Slope(f64),
}

/// The origin of block lists.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Blocks {
    /// From the problem's mask.
    FromMask(BlockSpec),
    /// Each block is full, partial or absent at random.
    Drawn(BlockSpec),
}

/// The elements that hold NaN and infinities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Poison {
    /// Keys and queries that belong to no sequence or are past its used length.
    Padding,
    /// Padding, and also keys that the mask hides from every query.
    Hidden,
    /// One or two rows of one tensor: keys (or values) that are hidden from some query, or queries (or rows of d_o)
    /// from which some key is hidden. Rows that do see them are not finite either; all others must not change.
    Denied(Operand),
    /// A few queries, whatever they see: exactly their rows become NaN.
    Rows,
}

/// The tensor to which [`Poison::Denied`] applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operand {
    Query,
    Key,
    Value,
    OutputGradient,
}

impl Operand {
    pub const ALL: [Operand; 4] = [Operand::Query, Operand::Key, Operand::Value, Operand::OutputGradient];

    pub fn name(self) -> &'static str {
        match self {
            Operand::Query => "q",
            Operand::Key => "k",
            Operand::Value => "v",
            Operand::OutputGradient => "d_o",
        }
    }
}

/// A case before its tensors are drawn.
pub(super) struct Recipe {
    pub name: String,
    pub features: Vec<&'static str>,
    pub builder: ProblemBuilder,
    pub logits: Logits,
    /// Standard deviation of q.
    pub q_sigma: f64,
    pub sinks: Option<Vec<f64>>,
    pub cu_seqlens: Option<[Vec<i32>; 2]>,
    pub used: [Option<Vec<i32>>; 2],
    pub blocks: Option<Blocks>,
    pub poison: Option<Poison>,
    /// Whether memory has the order `[batch, heads, sequence, dim]`.
    pub heads_outside: bool,
    /// Whether d_o is one number, broadcast.
    pub flat_d_o: bool,
    pub d_lse: bool,
}

impl Recipe {
    pub fn new(name: impl Into<String>, features: &[&'static str], builder: ProblemBuilder) -> Recipe {
        Recipe {
            name: name.into(),
            features: features.to_vec(),
            builder,
            logits: Logits::Normal,
            q_sigma: 1.0,
            sinks: None,
            cu_seqlens: None,
            used: [None, None],
            blocks: None,
            poison: None,
            heads_outside: false,
            flat_d_o: false,
            d_lse: false,
        }
    }
    pub fn logits(mut self, logits: Logits) -> Recipe {
        self.logits = logits;
        self
    }
    pub fn q_sigma(mut self, sigma: f64) -> Recipe {
        self.q_sigma = sigma;
        self
    }
    pub fn sinks(mut self, sinks: &[f64]) -> Recipe {
        self.builder = self.builder.sinks();
        self.sinks = Some(sinks.to_vec());
        self
    }
    pub fn packed(mut self, q_lens: &[usize], k_lens: &[usize]) -> Recipe {
        let offsets = |lens: &[usize]| {
            let mut sum = 0;
            std::iter::once(0)
                .chain(lens.iter().map(|&n| {
                    sum += n as i32;
                    sum
                }))
                .collect::<Vec<i32>>()
        };
        let (q, k) = (offsets(q_lens), offsets(k_lens));
        self.builder = self.builder.packed(&q, &k);
        self.cu_seqlens = Some([q, k]);
        self
    }
    pub fn used(mut self, q: Option<&[i32]>, k: Option<&[i32]>) -> Recipe {
        self.builder = self.builder.used_lengths(q.is_some(), k.is_some());
        self.used = [q.map(<[i32]>::to_vec), k.map(<[i32]>::to_vec)];
        self
    }
    pub fn blocks(mut self, blocks: Blocks) -> Recipe {
        self.blocks = Some(blocks);
        self
    }
    pub fn poison(mut self, poison: Poison) -> Recipe {
        self.poison = Some(poison);
        self
    }
    pub fn heads_outside(mut self) -> Recipe {
        self.heads_outside = true;
        self
    }
    pub fn flat_d_o(mut self) -> Recipe {
        self.flat_d_o = true;
        self
    }
    pub fn d_lse(mut self) -> Recipe {
        self.d_lse = true;
        self
    }

    /// Draws the tensors. Panics if the recipe contradicts itself, which is a bug of the table.
    pub fn build(self, rng: &mut Rng) -> Case {
        let problem = self.builder.clone().build().unwrap_or_else(|e| panic!("case {}: {e}", self.name));
        let dtype = problem.dtype();
        let integers = |x: &Vec<i32>| Tensor::new(x.clone(), &[x.len()]).expect("rank 1");
        let normal = |rng: &mut Rng, shape: Vec<usize>, sigma: f64| {
            let values = rng.normals(shape.iter().product(), sigma);
            (values, shape)
        };
        let (mut q, q_shape) = normal(rng, problem.q_shape(), self.q_sigma);
        let (mut k, k_shape) = normal(rng, problem.k_shape(), 1.0);
        let (v, v_shape) = normal(rng, problem.v_shape(), 1.0);
        let (d_o, o_shape) = normal(rng, problem.o_shape(), 1.0);
        self.slope_logits(&problem, &mut q, &mut k);
        let store = |values: &[f64], shape: &[usize]| store(dtype, values, shape, self.heads_outside);
        let d_o = if self.flat_d_o {
            let one = Tensor::from_f64(dtype, &[0.5], &[1]).expect("one element");
            Stored { tensor: one, strides: vec![0; o_shape.len()], shape: o_shape }
        } else {
            store(&d_o, &o_shape)
        };
        let float = |values: &[f64], shape: &[usize]| Tensor::from_f64(DType::F32, values, shape).expect("fits");
        let mut case = Case {
            q: store(&q, &q_shape),
            k: store(&k, &k_shape),
            v: store(&v, &v_shape),
            d_o,
            d_lse: self.d_lse.then(|| {
                let shape = problem.lse_shape();
                float(&rng.normals(shape.iter().product(), 1.0), &shape)
            }),
            sinks: self.sinks.as_ref().map(|s| float(s, &[s.len()])),
            cu_seqlens: self.cu_seqlens.as_ref().map(|lists| lists.each_ref().map(integers)),
            used_q: self.used[0].as_ref().map(integers),
            used_k: self.used[1].as_ref().map(integers),
            aux: problem.aux().iter().map(|spec| auxiliary(spec, &problem, rng)).collect(),
            block_mask: None,
            name: self.name,
            features: self.features,
            problem,
        };
        if let Some(blocks) = self.blocks {
            case = with_blocks(case, blocks, self.builder, rng);
        }
        match self.poison {
            None => {}
            Some(poison @ (Poison::Padding | Poison::Hidden)) => {
                let [queries, keys] = unseen(&case.bound(), poison);
                for (stored, rows) in [(&mut case.q, &queries), (&mut case.d_o, &queries)] {
                    spoil(stored, rows, f64::NAN);
                }
                spoil(&mut case.k, &keys, f64::NAN);
                spoil(&mut case.v, &keys, f64::INFINITY);
            }
            Some(Poison::Denied(operand)) => {
                let [queries, keys] = denied(&case.bound());
                let (stored, rows) = match operand {
                    Operand::Query => (&mut case.q, queries),
                    Operand::Key => (&mut case.k, keys),
                    Operand::Value => (&mut case.v, keys),
                    Operand::OutputGradient => (&mut case.d_o, queries),
                };
                let numbers = if matches!(operand, Operand::Query | Operand::Key) { &NAN[..] } else { &NONFINITE };
                spoil_some(stored, &rows, numbers, rng);
            }
            Some(Poison::Rows) => {
                let rows = vec![true; case.q.shape[..case.q.shape.len() - 1].iter().product()];
                spoil_some(&mut case.q, &rows, &NAN, rng);
            }
        }
        case
    }

    /// Gives one of the last coordinates of q and k the requested trend along the keys. It is one of the last, because
    /// a sum that is large from its first term on would lose the digits of all others, and the LSE could not keep its
    /// tolerance. It is not the very last: straightforward code would then round once at the full size, and an engine
    /// that sums in another order (matrix units add two chains of sixteen) could not stay within twice that.
    fn slope_logits(&self, problem: &Problem, q: &mut [f64], k: &mut [f64]) {
        if self.logits == Logits::Normal {
            return;
        }
        let dim = problem.head_dim();
        let place = dim.saturating_sub(16);
        let lever = 4.0; // keeps k within f16 for a logit of 1000
        q.iter_mut().skip(place).step_by(dim).for_each(|x| *x = lever);
        let (heads, k_len) = (problem.kv_heads(), problem.max_k_len());
        for (row, x) in k.iter_mut().skip(place).step_by(dim).enumerate() {
            let j = (row / heads) % k_len;
            let logit = match self.logits {
                Logits::Normal => 0.0,
                Logits::Spike => {
                    if j == k_len / 3 {
                        1000.0
                    } else {
                        0.0
                    }
                }
                Logits::Slope(step) => step * j as f64,
            };
            *x = logit / (lever * f64::from(problem.scale()));
        }
    }
}

/// A tensor that reads as `shape`; in memory it is row-major, or has the heads axis outside the sequence axis.
fn store(dtype: DType, values: &[f64], shape: &[usize], heads_outside: bool) -> Stored {
    let dims = Dims::new(shape).expect("rank");
    let mut strides = dims.contiguous_strides().expect("small").to_vec();
    if heads_outside {
        // From [.., sequence, heads, dim] to [.., heads, sequence, dim].
        let n = shape.len();
        let (sequence, dim) = (shape[n - 3], shape[n - 1]);
        (strides[n - 3], strides[n - 2]) = (dim, sequence * dim);
    }
    let mut tensor = Tensor::zeros(dtype, &[values.len()]).expect("small");
    let mut view = tensor.view_mut();
    let contiguous = dims.contiguous_strides().expect("small");
    for (i, &x) in values.iter().enumerate() {
        let offset = contiguous.iter().zip(shape).zip(&strides).map(|((&c, &n), &s)| (i / c) % n * s).sum();
        view.set_at(offset, x);
    }
    Stored { tensor, shape: shape.to_vec(), strides }
}

/// Contents of an auxiliary tensor: those that its name implies, else normal numbers or small integers.
fn auxiliary(spec: &AuxSpec, problem: &Problem, rng: &mut Rng) -> Tensor {
    let n: usize = spec.shape.iter().product();
    let values: Vec<f64> = match &*spec.name {
        ALIBI_SLOPES => (0..n).map(|h| (-8.0 * (h + 1) as f64 / n as f64).exp2()).collect(),
        PREFIX_LENGTHS => (0..n).map(|_| rng.range(0..problem.max_k_len() + 1) as f64).collect(),
        // Three documents of equal length, numbered equally for queries and keys.
        DOCUMENTS_Q | DOCUMENTS_K => (0..n).map(|i| (i % spec.shape[1] * 3 / spec.shape[1]) as f64).collect(),
        _ if spec.dtype.is_float() => rng.normals(n, 1.0),
        _ => (0..n).map(|_| rng.range(0..4) as f64).collect(),
    };
    Tensor::from_f64(spec.dtype, &values, &spec.shape).expect("fits")
}

fn with_blocks(case: Case, blocks: Blocks, builder: ProblemBuilder, rng: &mut Rng) -> Case {
    let (spec, mask) = match blocks {
        Blocks::FromMask(spec) => (spec, BlockMask::from_mask(&case.bound(), spec)),
        Blocks::Drawn(spec) => {
            let sizes = spec.blocks(case.problem.max_q_len(), case.problem.max_k_len());
            let rows = spec.batch * spec.heads * sizes[0];
            let (mut partial, mut full) = (vec![Vec::new(); rows], vec![Vec::new(); rows]);
            for (partial, full) in partial.iter_mut().zip(&mut full) {
                for block in 0..sizes[1] as i32 {
                    match rng.range(0..3) {
                        0 => partial.push(block),
                        1 => full.push(block),
                        _ => {}
                    }
                }
            }
            (spec, BlockMask::new(spec, sizes, partial, full))
        }
    };
    let problem = builder.block_mask(spec).build().unwrap_or_else(|e| panic!("case {}: {e}", case.name));
    Case { problem, block_mask: Some(mask.unwrap_or_else(|e| panic!("case {}: {e}", case.name))), ..case }
}

/// One query of one head, and where it lies among the rows of q and k.
struct Query<'a> {
    sequence: &'a Sequence,
    head: usize,
    number: usize,
    /// Index among the rows and heads of q.
    row: usize,
    /// Indices of the sequence's keys among the rows and heads of k.
    key_rows: Vec<usize>,
}

/// For each row and head of q and of k whether `mark` marks it; flat, with heads innermost. `mark` gets the marks of q and k.
fn marked(
    bound: &Bound<'_>,
    start: bool,
    mut mark: impl FnMut(&Query<'_>, &mut [bool], &mut [bool]),
) -> [Vec<bool>; 2] {
    let problem = bound.problem();
    let rows = |shape: Vec<usize>| vec![start; shape[..shape.len() - 1].iter().product()];
    let (mut queries, mut keys) = (rows(problem.q_shape()), rows(problem.k_shape()));
    // A tensor with one element per row and head gives the position of each row.
    let places = |shape: Vec<usize>, sequence, side| {
        let shape = [&shape[..shape.len() - 1], &[1]].concat();
        walk::packed_layout(bound, &shape, sequence, side)
    };
    for sequence in bound.sequences() {
        let q_rows = places(problem.q_shape(), sequence, Side::Query);
        let k_rows = places(problem.k_shape(), sequence, Side::Key);
        for head in 0..problem.q_heads() {
            for number in 0..sequence.q_len {
                let key_rows = (0..sequence.k_len).map(|k| k_rows.at(k, head / problem.group())).collect();
                let query = Query { sequence, head, number, row: q_rows.at(number, head), key_rows };
                mark(&query, &mut queries, &mut keys);
            }
        }
    }
    [queries, keys]
}

/// For each row of q, and for each row and head of k, whether nothing may read it.
fn unseen(bound: &Bound<'_>, poison: Poison) -> [Vec<bool>; 2] {
    marked(bound, true, |query, queries, keys| {
        queries[query.row] = false;
        match poison {
            Poison::Hidden => {
                for k in walk::visible(bound, query.sequence, query.head, query.number) {
                    keys[query.key_rows[k]] = false;
                }
            }
            _ => query.key_rows.iter().for_each(|&row| keys[row] = false),
        }
    })
}

/// For each row of q, whether some key of its sequence is hidden from it; for each row and head of k, whether it is
/// hidden from some query.
fn denied(bound: &Bound<'_>) -> [Vec<bool>; 2] {
    marked(bound, false, |query, queries, keys| {
        let seen = walk::visible(bound, query.sequence, query.head, query.number);
        queries[query.row] |= seen.len() < query.sequence.k_len;
        for k in (0..query.sequence.k_len).filter(|k| seen.binary_search(k).is_err()) {
            keys[query.key_rows[k]] = true;
        }
    })
}

/// An infinity in q or k makes a score NaN or infinite depending on how a product is formed (in parts or not). Only NaN
/// gives NaN everywhere.
const NAN: [f64; 1] = [f64::NAN];
const NONFINITE: [f64; 4] = [f64::NAN, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Writes some of `numbers` over one or two of the rows: over a whole row, or over one element.
fn spoil_some(stored: &mut Stored, rows: &[bool], numbers: &[f64], rng: &mut Rng) {
    let candidates: Vec<usize> = (0..rows.len()).filter(|&row| rows[row]).collect();
    if candidates.is_empty() {
        return;
    }
    for _ in 0..rng.range(1..3) {
        let (row, x) = (rng.pick(&candidates), rng.pick(numbers));
        let dim = stored.shape[stored.shape.len() - 1];
        let columns = if rng.chance(0.5) { 0..dim } else { rng.range(0..dim)..dim };
        let columns = if columns.start == 0 { columns } else { columns.start..columns.start + 1 };
        spoil_row(stored, row, columns, x);
    }
}

/// Writes `x` over some columns of one row, if the row has its own memory.
fn spoil_row(stored: &mut Stored, row: usize, columns: std::ops::Range<usize>, x: f64) {
    let rank = stored.shape.len();
    if stored.strides[rank - 1] == 0 {
        return; // a broadcast has no row of its own
    }
    let contiguous = Dims::new(&stored.shape[..rank - 1]).and_then(|d| d.contiguous_strides()).expect("small");
    let axes = contiguous.iter().zip(&stored.shape).zip(&stored.strides);
    let offset: usize = axes.map(|((&c, &n), &s)| (row / c) % n * s).sum();
    let mut view = stored.tensor.view_mut();
    columns.for_each(|i| view.set_at(offset + i, x));
}

/// Writes `x` over the rows that nothing may read.
fn spoil(stored: &mut Stored, rows: &[bool], x: f64) {
    let dim = stored.shape[stored.shape.len() - 1];
    for row in (0..rows.len()).filter(|&row| rows[row]) {
        spoil_row(stored, row, 0..dim, x);
    }
}
