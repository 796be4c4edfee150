//! The traversal of sequences, heads and rows that the oracle and the plain implementation share.
//!
//! This module determines, once, which keys a row sees, what its modifiers give, and where results go. An
//! [`Arithmetic`] computes the row itself.

use crate::expr::{Coverage, Env};
use crate::format::Granularity;
use crate::inputs::{Bound, RowLayout, Sequence};
use crate::precision::{GroupAttention, Int8Attention, Precision};
use crate::problem::{Problem, Side};
use crate::stop;
use crate::tensor::{Dims, TensorView};
use std::collections::BTreeMap;

/// One row of a head: a query or a key, depending on the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct At {
    /// Index of the sequence.
    pub batch: usize,
    /// Query head for queries, key/value head for keys.
    pub head: usize,
    /// Index inside the sequence.
    pub row: usize,
}

/// Forward results of one row, including the inputs of its backward.
pub(crate) struct RowForward {
    /// The visible keys, ascending, without keys whose modified score is -inf.
    pub keys: Vec<usize>,
    /// The score of each visible key before the modifiers.
    pub scaled: Vec<f64>,
    /// The softmax weight of each visible key.
    pub p: Vec<f64>,
    pub o: Vec<f64>,
    pub lse: f64,
    /// The weights for dS and the output for D, if they differ from `p` and `o`.
    pub exact: Option<(Vec<f64>, Vec<f64>)>,
}

/// Backward results of one row, besides its contribution to sums over rows.
pub(crate) struct RowGradient {
    pub d_q: Vec<f64>,
    /// The gradient of the modified score of each visible key.
    pub d_modified: Vec<f64>,
    /// The gradient of each visible key's score before the modifiers.
    pub d_scaled: Vec<f64>,
    /// This row's contribution to the sink's gradient.
    pub d_sink: f64,
}

/// The gradients of one row's outputs.
pub(crate) struct Cotangent {
    pub d_o: Vec<f64>,
    pub d_lse: f64,
}

/// The arithmetic of a row: exact, or as in straightforward code of some precision.
pub(crate) trait Arithmetic {
    /// The number type of a row's products.
    type Number: Copy;
    /// Number of keys after which the running maximum of INT8 restarts.
    const PART: usize = usize::MAX;
    /// Converts an element of k.
    fn key(problem: &Problem, x: f64) -> Self::Number;
    /// Converts an element of v.
    fn value(x: f64) -> Self::Number;
    /// Quantises the keys and values of a head if the problem says so. Returns the mean that was subtracted from the
    /// keys.
    fn quantise(_: &Problem, _: &mut [Self::Number], _: &mut [Self::Number]) -> Option<Vec<f32>> {
        None
    }
    fn row_forward(head: &Head<'_, Self::Number>, q: usize) -> RowForward;
    fn row_gradient(head: &Head<'_, Self::Number>, q: usize, row: &RowForward, given: &Cotangent) -> RowGradient;
    /// sum + x * y, rounded as in sums over rows.
    fn add(sum: f64, x: f64, y: f64) -> f64;
    /// The value that a tensor of the problem's type stores.
    fn store(problem: &Problem, x: f64) -> f64;
}

/// One query head of one sequence.
pub(crate) struct Head<'a, T> {
    pub bound: &'a Bound<'a>,
    pub sequence: Sequence,
    pub head: usize,
    k: Vec<T>,
    v: Vec<T>,
    mean: Option<Vec<f32>>,
    /// Keys per part.
    pub part: usize,
}

/// `n` elements of a row that starts at `offset`.
fn read<'a>(view: &'a TensorView<'_>, offset: usize, n: usize) -> impl Iterator<Item = f64> + 'a {
    // The last axis of d_o may be a broadcast, that of a single element may have any stride.
    let step = view.strides()[view.strides().len() - 1];
    (0..n).map(move |i| view.at(offset + i * step))
}

impl<'a, T: Copy> Head<'a, T> {
    fn new<A: Arithmetic<Number = T>>(bound: &'a Bound<'a>, sequence: Sequence, head: usize) -> Head<'a, T> {
        let problem = bound.problem();
        let kv_head = head / problem.group();
        let (k_rows, v_rows) = (
            bound.row_layout(bound.k().strides(), &sequence, Side::Key),
            bound.row_layout(bound.v().strides(), &sequence, Side::Key),
        );
        let elems = |dim: usize| sequence.k_len.saturating_mul(dim).saturating_mul(size_of::<T>());
        stop::poll();
        stop::ask("keys of a head in f64", elems(problem.head_dim() + problem.value_dim()));
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for j in 0..sequence.k_len {
            let key = read(bound.k(), k_rows.at(j, kv_head), problem.head_dim());
            k.extend(key.map(|x| A::key(problem, x)));
            v.extend(read(bound.v(), v_rows.at(j, kv_head), problem.value_dim()).map(A::value));
        }
        let mean = A::quantise(problem, &mut k, &mut v);
        Head { bound, sequence, head, k, v, mean, part: A::PART }
    }

    pub fn problem(&self) -> &'a Problem {
        self.bound.problem()
    }

    /// A query as the products use it (rounded or quantised).
    pub fn query(&self, q: usize) -> Vec<f64> {
        let narrow = |r: usize| self.given_query(r).into_iter().map(|x| x as f32);
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect();
        match self.problem().precision() {
            Precision::Int8(spec) => {
                let alike: Vec<usize> =
                    (0..self.sequence.q_len).filter(|&r| spec.q.scale_of(r) == spec.q.scale_of(q)).collect();
                let rows: Vec<f32> = alike.iter().flat_map(|&r| narrow(r)).collect();
                let one = Int8Attention { q: Granularity::Block(rows.len()), ..spec };
                let (codes, dim) = (one.queries(&rows, self.problem().head_dim()), self.problem().head_dim());
                let own = alike.iter().position(|&r| r == q).unwrap_or(0);
                let scale = f64::from(codes.scales()[0]);
                codes.codes()[own * dim..(own + 1) * dim].iter().map(|&code| f64::from(code) * scale).collect()
            }
            Precision::Groups(GroupAttention { qk: Some(format), .. }) => {
                let mut row: Vec<f32> = narrow(q).collect();
                let cols = row.len();
                format.fake_rows(&mut row, cols);
                wide(&row)
            }
            _ => self.given_query(q),
        }
    }

    /// A query as the caller gave it.
    pub fn given_query(&self, q: usize) -> Vec<f64> {
        let rows = self.bound.row_layout(self.bound.q().strides(), &self.sequence, Side::Query);
        read(self.bound.q(), rows.at(q, self.head), self.problem().head_dim()).collect()
    }

    /// The term that was subtracted from all scores of a row, before the scale.
    pub fn taken_out(&self, q: usize) -> f64 {
        let Some(mean) = &self.mean else { return 0.0 };
        self.given_query(q).iter().zip(mean).map(|(&x, &m)| x * f64::from(m)).sum()
    }

    pub fn key(&self, k: usize) -> &[T] {
        let dim = self.problem().head_dim();
        &self.k[k * dim..(k + 1) * dim]
    }

    pub fn value(&self, k: usize) -> &[T] {
        let dim = self.problem().value_dim();
        &self.v[k * dim..(k + 1) * dim]
    }

    fn env(&self, score: f64, q: usize, k: usize) -> Env<'_> {
        let Sequence { batch, q_len, k_len, .. } = self.sequence;
        Env { score, batch, head: self.head, q, k, q_len, k_len, aux: self.bound.aux() }
    }

    /// The modified score, which softmax uses.
    pub fn modified(&self, scaled: f64, q: usize, k: usize) -> f64 {
        self.problem().score_program().map_or(scaled, |program| program.eval(&self.env(scaled, q, k)).float())
    }

    /// Derivative of the modified score with respect to the scaled score.
    pub fn derivative(&self, scaled: f64, q: usize, k: usize) -> f64 {
        self.problem().score_derivative().map_or(1.0, |program| program.eval(&self.env(scaled, q, k)).float())
    }

    /// The keys that block lists and mask let query `q` see, ascending.
    pub fn visible(&self, q: usize) -> Vec<usize> {
        visible(self.bound, &self.sequence, self.head, q)
    }

    fn cotangent(&self, q: usize, d_o: &TensorView<'_>, d_lse: Option<&TensorView<'_>>) -> Cotangent {
        let rows = self.bound.row_layout(d_o.strides(), &self.sequence, Side::Query);
        let d_lse = d_lse.map_or(0.0, |d| {
            let rows = self.bound.lse_layout(d.strides(), &self.sequence);
            d.at(rows.at(q, self.head))
        });
        Cotangent { d_o: read(d_o, rows.at(q, self.head), self.problem().value_dim()).collect(), d_lse }
    }
}

/// The keys that block lists and mask let query `q` of `head` see, ascending.
pub(crate) fn visible(bound: &Bound<'_>, sequence: &Sequence, head: usize, q: usize) -> Vec<usize> {
    let problem = bound.problem();
    let Sequence { batch, q_len, k_len, .. } = *sequence;
    let span = problem.mask().keys(q, q_len, k_len);
    let by_mask = |k: usize| {
        span.contains(&k)
            && problem.mask_rest().is_none_or(|program| {
                program.eval(&Env { score: 0.0, batch, head, q, k, q_len, k_len, aux: bound.aux() }).bool()
            })
    };
    let sees = |k: usize| match bound.block_mask().map(|blocks| blocks.coverage(batch, head, q, k)) {
        Some(Coverage::Empty) => false,
        Some(Coverage::Full) => true,
        Some(Coverage::Partial) | None => by_mask(k),
    };
    (0..k_len).filter(|&k| sees(k)).collect()
}

/// The rows of a sequence in a row-major tensor of the given shape.
pub(crate) fn packed_layout(bound: &Bound<'_>, shape: &[usize], sequence: &Sequence, side: Side) -> RowLayout {
    bound.row_layout(&strides(shape), sequence, side)
}

/// The rows of a sequence in a row-major tensor of the shape of the LSE.
pub(crate) fn packed_lse_layout(bound: &Bound<'_>, sequence: &Sequence) -> RowLayout {
    bound.lse_layout(&strides(&bound.problem().lse_shape()), sequence)
}

fn strides(shape: &[usize]) -> Dims {
    Dims::new(shape).and_then(|dims| dims.contiguous_strides()).expect("a shape of the problem")
}

/// Computes (o, lse) of all rows, row-major.
pub(crate) fn forward<A: Arithmetic>(bound: &Bound<'_>) -> (Vec<f64>, Vec<f64>) {
    let problem = bound.problem();
    let shape = problem.o_shape();
    let mut o: Vec<f64> = stop::zeros("o in f64", shape.iter().product());
    let mut lse: Vec<f64> = stop::zeros("the LSE in f64", problem.lse_shape().iter().product());
    lse.fill(f64::NEG_INFINITY);
    for sequence in bound.sequences() {
        let (o_rows, lse_rows) =
            (packed_layout(bound, &shape, sequence, Side::Query), packed_lse_layout(bound, sequence));
        for h in 0..problem.q_heads() {
            let head = Head::new::<A>(bound, *sequence, h);
            for q in 0..sequence.q_len {
                stop::poll();
                let row = A::row_forward(&head, q);
                for (i, x) in row.o.into_iter().enumerate() {
                    o[o_rows.at(q, h) + i] = A::store(problem, x);
                }
                lse[lse_rows.at(q, h)] = row.lse;
            }
        }
    }
    (o, lse)
}

/// Calls `visit` for each chosen row with its head; rows past the used length get `None`.
fn chosen<A: Arithmetic, R>(
    bound: &Bound<'_>,
    rows: &[At],
    mut visit: impl FnMut(Option<(&Head<'_, A::Number>, usize)>) -> R,
) -> Vec<R> {
    let mut last: Option<Head<'_, A::Number>> = None;
    let mut results = Vec::with_capacity(rows.len());
    for at in rows {
        stop::poll();
        let sequence = bound.sequences()[at.batch];
        if at.row >= sequence.q_len {
            results.push(visit(None));
            continue;
        }
        let head = match last.take() {
            Some(head) if (head.sequence.batch, head.head) == (at.batch, at.head) => head,
            _ => Head::new::<A>(bound, sequence, at.head),
        };
        results.push(visit(Some((&head, at.row))));
        last = Some(head);
    }
    results
}

/// Computes (o, lse) of chosen rows.
pub(crate) fn forward_rows<A: Arithmetic>(bound: &Bound<'_>, rows: &[At]) -> Vec<(Vec<f64>, f64)> {
    let problem = bound.problem();
    chosen::<A, _>(bound, rows, |found| match found {
        None => (vec![0.0; problem.value_dim()], f64::NEG_INFINITY),
        Some((head, q)) => {
            let row = A::row_forward(head, q);
            (row.o.into_iter().map(|x| A::store(problem, x)).collect(), row.lse)
        }
    })
}

/// All gradients, row-major in the shapes of the problem.
pub(crate) struct GradientSums {
    pub d_q: Vec<f64>,
    pub d_k: Vec<f64>,
    pub d_v: Vec<f64>,
    pub d_sinks: Vec<f64>,
    pub d_aux: Vec<Option<Vec<f64>>>,
}

impl GradientSums {
    fn zeros(problem: &Problem) -> GradientSums {
        let zeros = |shape: &[usize]| stop::zeros("a gradient in f64", shape.iter().product());
        GradientSums {
            d_q: zeros(&problem.q_shape()),
            d_k: zeros(&problem.k_shape()),
            d_v: zeros(&problem.v_shape()),
            d_sinks: zeros(&[problem.q_heads()]),
            d_aux: problem.aux().iter().map(|spec| spec.grad.then(|| zeros(&spec.shape))).collect(),
        }
    }
}

/// d_k (before the scale) and d_v of one key/value head, `[k_len, dim]` each.
struct KeySums {
    d_k: Vec<f64>,
    d_v: Vec<f64>,
}

impl KeySums {
    fn zeros(problem: &Problem, k_len: usize) -> KeySums {
        let zeros = |dim: usize| stop::zeros("gradients of keys in f64", k_len * dim);
        KeySums { d_k: zeros(problem.head_dim()), d_v: zeros(problem.value_dim()) }
    }

    fn add<A: Arithmetic>(&mut self, q: &[f64], row: &RowForward, gradient: &RowGradient, given: &Cotangent) {
        for (j, &k) in row.keys.iter().enumerate() {
            for (sum, x) in self.d_k[k * q.len()..].iter_mut().zip(q) {
                *sum = A::add(*sum, gradient.d_scaled[j], *x);
            }
            for (sum, x) in self.d_v[k * given.d_o.len()..].iter_mut().zip(&given.d_o) {
                *sum = A::add(*sum, row.p[j], *x);
            }
        }
    }

    /// The final gradients of key `k`.
    fn key<A: Arithmetic>(&self, problem: &Problem, k: usize) -> (Vec<f64>, Vec<f64>) {
        let scale = f64::from(problem.scale());
        let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
        let d_k = self.d_k[k * dim..(k + 1) * dim].iter().map(|&x| A::store(problem, A::add(0.0, x, scale)));
        let d_v = self.d_v[k * value_dim..(k + 1) * value_dim].iter().map(|&x| A::store(problem, x));
        (d_k.collect(), d_v.collect())
    }
}

/// Calls `visit` with each term of a row in the gradients of auxiliary tensors: tensor, position, and the two factors.
fn aux_terms<T: Copy>(
    head: &Head<'_, T>,
    q: usize,
    row: &RowForward,
    gradient: &RowGradient,
    mut visit: impl FnMut(usize, usize, f64, f64),
) {
    for load in head.problem().aux_gradients() {
        let spec = &head.problem().aux()[load.aux];
        if !spec.grad {
            continue;
        }
        for (j, &k) in row.keys.iter().enumerate() {
            let env = head.env(row.scaled[j], q, k);
            let position =
                load.at.iter().zip(&spec.shape).fold(0, |position, (index, &n)| {
                    position * n + index.eval(&env).int().clamp(0, n as i64 - 1) as usize
                });
            visit(load.aux, position, gradient.d_modified[j], load.derivative.eval(&env).float());
        }
    }
}

/// Adds a row's contribution to the gradients of auxiliary tensors.
fn add_aux<A: Arithmetic>(
    head: &Head<'_, A::Number>,
    q: usize,
    row: &RowForward,
    gradient: &RowGradient,
    d_aux: &mut [Option<Vec<f64>>],
) {
    aux_terms(head, q, row, gradient, |aux, position, x, y| {
        if let Some(sums) = &mut d_aux[aux] {
            sums[position] = A::add(sums[position], x, y);
        }
    });
}

/// The expected rounding error of `B` in the gradients of sinks (if there are any) and of each auxiliary tensor. Rows
/// round independently, so the error of their sum is a random walk whose steps are the errors of the rows'
/// contributions. Its standard deviation is the root of the sum of their squares.
pub(crate) fn noise<A: Arithmetic, B: Arithmetic>(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
) -> Vec<Vec<f64>> {
    let problem = bound.problem();
    let GradientSums { mut d_sinks, mut d_aux, .. } = GradientSums::zeros(problem);
    for sequence in bound.sequences() {
        for (h, d_sink) in d_sinks.iter_mut().enumerate() {
            let (exact, rounded) = (Head::new::<A>(bound, *sequence, h), Head::new::<B>(bound, *sequence, h));
            for q in 0..sequence.q_len {
                stop::poll();
                let given = exact.cotangent(q, d_o, d_lse);
                let (row_a, row_b) = (A::row_forward(&exact, q), B::row_forward(&rounded, q));
                let a = A::row_gradient(&exact, q, &row_a, &given);
                let b = B::row_gradient(&rounded, q, &row_b, &given);
                *d_sink += (a.d_sink - b.d_sink).powi(2);
                // Several scores of a row may add to one element, and they share the rounding of its D.
                let mut steps = BTreeMap::new();
                aux_terms(&exact, q, &row_a, &a, |aux, at, x, y| *steps.entry((aux, at)).or_insert(0.0) += x * y);
                aux_terms(&rounded, q, &row_b, &b, |aux, at, x, y| *steps.entry((aux, at)).or_insert(0.0) -= x * y);
                for ((aux, at), step) in steps {
                    if let Some(squares) = &mut d_aux[aux] {
                        squares[at] += step * step;
                    }
                }
            }
        }
    }
    let sinks = problem.has_sinks().then_some(d_sinks);
    let squares = sinks.into_iter().chain(d_aux.into_iter().flatten());
    squares.map(|squares| squares.into_iter().map(f64::sqrt).collect()).collect()
}

/// Computes all gradients.
pub(crate) fn backward<A: Arithmetic>(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
) -> GradientSums {
    let problem = bound.problem();
    let mut sums = GradientSums::zeros(problem);
    for sequence in bound.sequences() {
        let rows = |shape: &[usize], side| packed_layout(bound, shape, sequence, side);
        let q_rows = rows(&problem.q_shape(), Side::Query);
        let (k_rows, v_rows) = (rows(&problem.k_shape(), Side::Key), rows(&problem.v_shape(), Side::Key));
        for kv_head in 0..problem.kv_heads() {
            let mut keys = KeySums::zeros(problem, sequence.k_len);
            for h in kv_head * problem.group()..(kv_head + 1) * problem.group() {
                let head = Head::new::<A>(bound, *sequence, h);
                for q in 0..sequence.q_len {
                    stop::poll();
                    let (row, given) = (A::row_forward(&head, q), head.cotangent(q, d_o, d_lse));
                    let gradient = A::row_gradient(&head, q, &row, &given);
                    keys.add::<A>(&head.query(q), &row, &gradient, &given);
                    add_aux::<A>(&head, q, &row, &gradient, &mut sums.d_aux);
                    sums.d_sinks[h] = A::add(sums.d_sinks[h], gradient.d_sink, 1.0);
                    for (i, &x) in gradient.d_q.iter().enumerate() {
                        sums.d_q[q_rows.at(q, h) + i] = A::store(problem, x);
                    }
                }
            }
            for k in 0..sequence.k_len {
                let (d_k, d_v) = keys.key::<A>(problem, k);
                sums.d_k[k_rows.at(k, kv_head)..][..d_k.len()].copy_from_slice(&d_k);
                sums.d_v[v_rows.at(k, kv_head)..][..d_v.len()].copy_from_slice(&d_v);
            }
        }
    }
    sums
}

/// Computes d_q of chosen rows.
pub(crate) fn backward_rows<A: Arithmetic>(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    rows: &[At],
) -> Vec<Vec<f64>> {
    let problem = bound.problem();
    chosen::<A, _>(bound, rows, |found| match found {
        None => vec![0.0; problem.head_dim()],
        Some((head, q)) => {
            let (row, given) = (A::row_forward(head, q), head.cotangent(q, d_o, d_lse));
            let d_q = A::row_gradient(head, q, &row, &given).d_q;
            d_q.into_iter().map(|x| A::store(problem, x)).collect()
        }
    })
}

/// Computes (d_k, d_v) of chosen keys. Every row of a head that shares the key is computed once.
pub(crate) fn backward_keys<A: Arithmetic>(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    keys: &[At],
) -> Vec<(Vec<f64>, Vec<f64>)> {
    let problem = bound.problem();
    let mut results = vec![(vec![0.0; problem.head_dim()], vec![0.0; problem.value_dim()]); keys.len()];
    let mut heads: Vec<(usize, usize)> = keys.iter().map(|at| (at.batch, at.head)).collect();
    heads.sort_unstable();
    heads.dedup();
    for (batch, kv_head) in heads {
        let sequence = bound.sequences()[batch];
        let mut sums = KeySums::zeros(problem, sequence.k_len);
        for h in kv_head * problem.group()..(kv_head + 1) * problem.group() {
            let head = Head::new::<A>(bound, sequence, h);
            for q in 0..sequence.q_len {
                stop::poll();
                let (row, given) = (A::row_forward(&head, q), head.cotangent(q, d_o, d_lse));
                let gradient = A::row_gradient(&head, q, &row, &given);
                sums.add::<A>(&head.query(q), &row, &gradient, &given);
            }
        }
        for (at, result) in keys.iter().zip(&mut results) {
            if (at.batch, at.head) == (batch, kv_head) && at.row < sequence.k_len {
                *result = sums.key::<A>(problem, at.row);
            }
        }
    }
    results
}
