//! Bounds of an expression over a block of the score matrix.
//!
//! For any mask, interval arithmetic on the program decides whether a query block can see a key block, and whether it
//! sees all of it, without evaluating single elements. The answer is conservative: a block called empty has no visible
//! element, and a block called full has no hidden one. For conditions in which the query and the key appear once
//! (causal, windows, documents) it is exact.

use super::program::{div_floor, floor};
use super::{Binary, Program, Step, Type, Unary, Var};
use crate::tensor::TensorView;
use std::ops::Range;

/// How much of a block a mask keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coverage {
    /// No element is visible: the block can be skipped.
    Empty,
    /// Some may be visible: the mask must be evaluated.
    Partial,
    /// Every element is visible: the mask need not be evaluated.
    Full,
}

impl Coverage {
    /// The coverage of a block where both masks must keep an element.
    pub fn and(self, other: Coverage) -> Coverage {
        match (self, other) {
            (Coverage::Empty, _) | (_, Coverage::Empty) => Coverage::Empty,
            (Coverage::Full, Coverage::Full) => Coverage::Full,
            _ => Coverage::Partial,
        }
    }
}

/// A block of the score matrix of one sequence. Ranges are not empty.
#[derive(Debug, Clone)]
pub struct Domain<'a> {
    /// Sequences.
    pub batch: Range<usize>,
    /// Query heads.
    pub heads: Range<usize>,
    /// Query rows.
    pub q: Range<usize>,
    /// Keys.
    pub k: Range<usize>,
    /// Smallest and largest number of queries (equal for a single sequence).
    pub q_len: (usize, usize),
    /// Smallest and largest number of keys.
    pub k_len: (usize, usize),
    /// The auxiliary tensors, in the order of the problem.
    pub aux: &'a [TensorView<'a>],
}

/// The set of values that a step can take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Interval {
    /// Smallest and largest value; anything unknown (including NaN) widens to the whole line.
    Float(f64, f64),
    /// Smallest and largest value.
    Int(i64, i64),
    /// Whether it can be false, whether it can be true.
    Bool(bool, bool),
}

/// Any float, including NaN. Operations on it can give NaN again, so only a comparison narrows it.
const ALL: Interval = Interval::Float(f64::NEG_INFINITY, f64::INFINITY);

const INT_MIN: i64 = i32::MIN as i64;
const INT_MAX: i64 = i32::MAX as i64;

/// Integers from `low` to `high`; if that exceeds an i32, wrapping can give any value.
fn int(low: i64, high: i64) -> Interval {
    if low < INT_MIN || high > INT_MAX { Interval::Int(INT_MIN, INT_MAX) } else { Interval::Int(low, high) }
}

impl Interval {
    fn floats(self) -> (f64, f64) {
        match self {
            Interval::Float(a, b) => (a, b),
            Interval::Int(a, b) => (a as f64, b as f64),
            Interval::Bool(..) => (0.0, 1.0),
        }
    }
    fn ints(self) -> (i64, i64) {
        match self {
            Interval::Int(a, b) => (a, b),
            Interval::Float(a, b) => (floor(a), floor(b)),
            Interval::Bool(..) => (0, 1),
        }
    }
    fn bools(self) -> (bool, bool) {
        match self {
            Interval::Bool(f, t) => (f, t),
            _ => (true, true),
        }
    }
    fn join(self, other: Interval) -> Interval {
        match (self, other) {
            (Interval::Int(a, b), Interval::Int(c, d)) => Interval::Int(a.min(c), b.max(d)),
            (Interval::Bool(a, b), Interval::Bool(c, d)) => Interval::Bool(a || c, b || d),
            (a, b) => {
                let ((a, b), (c, d)) = (a.floats(), b.floats());
                Interval::Float(a.min(c), b.max(d))
            }
        }
    }
}

/// The hull of the given candidates; the whole line if one of them is NaN.
fn hull(candidates: [f64; 4]) -> Interval {
    if candidates.iter().any(|x| x.is_nan()) {
        return ALL;
    }
    let low = candidates.iter().copied().fold(f64::INFINITY, f64::min);
    let high = candidates.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Interval::Float(low, high)
}

impl Program {
    /// Bounds of the result over `domain`.
    pub fn bounds(&self, domain: &Domain<'_>) -> Interval {
        let all = self.all_bounds(domain, true);
        all[all.len() - 1]
    }

    /// How much of `domain` a condition keeps.
    pub fn coverage(&self, domain: &Domain<'_>) -> Coverage {
        match self.bounds(domain) {
            Interval::Bool(true, false) => Coverage::Empty,
            Interval::Bool(false, true) => Coverage::Full,
            _ => Coverage::Partial,
        }
    }

    /// The first load whose index may leave its tensor somewhere in `domain`: (tensor, axis, low, high).
    pub(crate) fn loads_outside(&self, domain: &Domain<'_>) -> Option<(usize, usize, i64, i64)> {
        // The contents of tensors matter only if a load feeds another load's index.
        let loaded = self.depends_on_load();
        let feeds_an_index = self.steps().iter().any(|step| match step {
            Step::Load(_, at) => at.iter().any(|&i| loaded[i]),
            _ => false,
        });
        let all = self.all_bounds(domain, feeds_an_index);
        for step in self.steps() {
            let Step::Load(tensor, at) = step else { continue };
            for (axis, &index) in at.iter().enumerate() {
                let (low, high) = all[index].ints();
                if low < 0 || high >= domain.aux[*tensor].shape()[axis] as i64 {
                    return Some((*tensor, axis, low, high));
                }
            }
        }
        None
    }

    /// The first integer operation whose exact result may leave 32 bits somewhere in `domain`, as text, and the bounds of
    /// that result. Without `contents` the elements of tensors are unknown, and what depends on them is left out. So is what
    /// depends on the integer part of a float without known bounds, such as a rounded score, which saturates.
    pub(crate) fn past_32_bits(&self, domain: &Domain<'_>, contents: bool) -> Option<(String, i64, i64)> {
        let all = self.all_bounds(domain, contents && self.computes_with_loads());
        let loaded = self.depends_on_load();
        let is_whole = |i: usize| all[i].ints().0 <= INT_MIN || all[i].ints().1 >= INT_MAX;
        let saturates = self.depends(|i, step| matches!(step, Step::Unary(Unary::Floor, _)) && is_whole(i));
        self.steps().iter().enumerate().find_map(|(i, step)| {
            if self.types()[i] != Type::Int || (!contents && loaded[i]) || saturates[i] {
                return None;
            }
            let (low, high) = match *step {
                Step::Unary(Unary::Neg, a) => (-all[a].ints().1, -all[a].ints().0),
                Step::Unary(Unary::Abs, a) => (0, all[a].ints().0.abs().max(all[a].ints().1.abs())),
                Step::Binary(op, a, b) => exact(op, all[a].ints(), all[b].ints())?,
                _ => return None,
            };
            (low < INT_MIN || high > INT_MAX).then(|| (self.text(i), low, high))
        })
    }

    /// Whether an integer operation takes an element of a tensor.
    pub(crate) fn computes_with_loads(&self) -> bool {
        let loaded = self.depends_on_load();
        self.steps().iter().zip(self.types()).enumerate().any(|(i, (step, ty))| {
            let operation = matches!(step, Step::Unary(Unary::Neg | Unary::Abs, _))
                || matches!(step, Step::Binary(Binary::Add | Binary::Sub | Binary::Mul, ..));
            operation && *ty == Type::Int && loaded[i]
        })
    }

    /// For each step: whether it is a step of that kind, or depends on one. One pass, because steps share operands.
    fn depends(&self, on: impl Fn(usize, &Step) -> bool) -> Vec<bool> {
        let mut all: Vec<bool> = Vec::with_capacity(self.steps().len());
        for (i, step) in self.steps().iter().enumerate() {
            let inherited = match step {
                Step::Unary(_, a) => all[*a],
                Step::Binary(_, a, b) => all[*a] || all[*b],
                Step::Select(c, a, b) => all[*c] || all[*a] || all[*b],
                Step::Load(..) | Step::Var(_) | Step::Float(_) | Step::Int(_) | Step::Bool(_) => false,
            };
            all.push(inherited || on(i, step));
        }
        all
    }

    /// For each step: whether it depends on an element of a tensor.
    fn depends_on_load(&self) -> Vec<bool> {
        self.depends(|_, step| matches!(step, Step::Load(..)))
    }

    fn all_bounds(&self, domain: &Domain<'_>, read_contents: bool) -> Vec<Interval> {
        let range = |r: &Range<usize>| Interval::Int(r.start as i64, r.end as i64 - 1);
        let mut all: Vec<Interval> = Vec::with_capacity(self.steps().len());
        for (step, ty) in self.steps().iter().zip(self.types()) {
            let bounds = match step {
                Step::Var(v) => match v {
                    Var::Score => ALL,
                    Var::Batch => range(&domain.batch),
                    Var::Head => range(&domain.heads),
                    Var::Query => range(&domain.q),
                    Var::Key => range(&domain.k),
                    Var::QueryLen => Interval::Int(domain.q_len.0 as i64, domain.q_len.1 as i64),
                    Var::KeyLen => Interval::Int(domain.k_len.0 as i64, domain.k_len.1 as i64),
                },
                Step::Float(bits) => {
                    let x = f64::from(f32::from_bits(*bits));
                    if x.is_nan() { ALL } else { Interval::Float(x, x) }
                }
                Step::Int(x) => Interval::Int(i64::from(*x), i64::from(*x)),
                Step::Bool(x) => Interval::Bool(!x, *x),
                Step::Unary(op, a) => unary(*op, all[*a]),
                Step::Binary(op, a, b) => binary(*op, all[*a], all[*b]),
                Step::Select(c, a, b) => match all[*c].bools() {
                    (false, true) => all[*a],
                    (true, false) => all[*b],
                    _ => all[*a].join(all[*b]),
                },
                Step::Load(tensor, at) if read_contents && !domain.aux[*tensor].shape().contains(&0) => {
                    let view = &domain.aux[*tensor];
                    let index: Vec<(usize, usize)> = at
                        .iter()
                        .zip(view.shape().iter())
                        .map(|(&i, &n)| {
                            let last = n.saturating_sub(1) as i64;
                            let (low, high) = all[i].ints();
                            (low.clamp(0, last) as usize, high.clamp(0, last) as usize)
                        })
                        .collect();
                    contents(view, &index, *ty)
                }
                Step::Load(..) if *ty == Type::Int => Interval::Int(INT_MIN, INT_MAX),
                Step::Load(..) => ALL,
            };
            all.push(bounds);
        }
        all
    }
}

/// Bounds of an exact sum, difference or product of integers; `None` for other operations, which cannot leave the range.
fn exact(op: Binary, (i, j): (i64, i64), (m, n): (i64, i64)) -> Option<(i64, i64)> {
    match op {
        Binary::Add => Some((i + m, j + n)),
        Binary::Sub => Some((i - n, j - m)),
        Binary::Mul => {
            let all = [i * m, i * n, j * m, j * n];
            Some((all.into_iter().min()?, all.into_iter().max()?))
        }
        _ => None,
    }
}

/// Smallest and largest element of a box of a tensor.
fn contents(view: &TensorView<'_>, index: &[(usize, usize)], ty: Type) -> Interval {
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    let mut at: Vec<usize> = index.iter().map(|r| r.0).collect();
    loop {
        let offset = at.iter().zip(view.strides().iter()).map(|(i, s)| i * s).sum();
        let x = view.at(offset);
        if x.is_nan() {
            return ALL;
        }
        (low, high) = (low.min(x), high.max(x));
        let Some(axis) = (0..at.len()).rev().find(|&a| at[a] < index[a].1) else { break };
        at[axis] += 1;
        for a in axis + 1..at.len() {
            at[a] = index[a].0;
        }
    }
    if ty == Type::Int { Interval::Int(low as i64, high as i64) } else { Interval::Float(low, high) }
}

fn unary(op: Unary, a: Interval) -> Interval {
    let monotone = |f: fn(f64) -> f64| {
        let (low, high) = a.floats();
        hull([f(low), f(high), f(low), f(high)])
    };
    match op {
        Unary::Neg | Unary::Abs | Unary::Exp | Unary::Log | Unary::Sqrt | Unary::Tanh if a == ALL => ALL,
        Unary::Neg => match a {
            Interval::Int(x, y) => int(-y, -x),
            _ => monotone(|x| -x),
        },
        Unary::Abs => match a {
            Interval::Int(x, y) => {
                let low = if x <= 0 && y >= 0 { 0 } else { x.abs().min(y.abs()) };
                int(low, x.abs().max(y.abs()))
            }
            _ => {
                let (x, y) = a.floats();
                let low = if x <= 0.0 && y >= 0.0 { 0.0 } else { x.abs().min(y.abs()) };
                Interval::Float(low, x.abs().max(y.abs()))
            }
        },
        Unary::Exp => monotone(f64::exp),
        Unary::Log => monotone(f64::ln),
        Unary::Sqrt => monotone(f64::sqrt),
        Unary::Tanh => monotone(f64::tanh),
        Unary::Not => {
            let (f, t) = a.bools();
            Interval::Bool(t, f)
        }
        Unary::ToFloat => {
            let (x, y) = a.floats();
            Interval::Float(x, y)
        }
        Unary::Floor => {
            let (x, y) = a.ints();
            Interval::Int(x, y)
        }
    }
}

fn binary(op: Binary, a: Interval, b: Interval) -> Interval {
    let floats = matches!(a, Interval::Float(..));
    let ((x, y), (u, v)) = (a.floats(), b.floats());
    let ((i, j), (m, n)) = (a.ints(), b.ints());
    let ints = |candidates: [i64; 4]| {
        let low = candidates.iter().copied().min().unwrap_or(0);
        let high = candidates.iter().copied().max().unwrap_or(0);
        int(low, high)
    };
    if a == ALL || b == ALL {
        return match op {
            Binary::Eq | Binary::Lt | Binary::Le => Interval::Bool(true, true),
            _ => ALL,
        };
    }
    match op {
        Binary::Add if floats => hull([x + u, y + v, x + u, y + v]),
        Binary::Add => int(i + m, j + n),
        Binary::Sub if floats => hull([x - v, y - u, x - v, y - u]),
        Binary::Sub => int(i - n, j - m),
        Binary::Mul if floats => hull([x * u, x * v, y * u, y * v]),
        Binary::Mul => ints([i * m, i * n, j * m, j * n]),
        Binary::Div if floats => {
            if u <= 0.0 && v >= 0.0 {
                ALL
            } else {
                hull([x / u, x / v, y / u, y / v])
            }
        }
        // A divisor range that contains 0 also contains +1 or -1, or is just 0, so |quotient| <= |dividend|.
        Binary::Div if m <= 0 && n >= 0 => {
            let most = i.abs().max(j.abs());
            int(-most, most)
        }
        Binary::Div => ints([div_floor(i, m), div_floor(i, n), div_floor(j, m), div_floor(j, n)]),
        Binary::Rem => {
            if m == n && m > 0 && div_floor(i, m) == div_floor(j, m) {
                let base = m * div_floor(i, m);
                Interval::Int(i - base, j - base)
            } else {
                Interval::Int((m + 1).min(0), (n - 1).max(0))
            }
        }
        Binary::Min if floats => Interval::Float(x.min(u), y.min(v)),
        Binary::Min => Interval::Int(i.min(m), j.min(n)),
        Binary::Max if floats => Interval::Float(x.max(u), y.max(v)),
        Binary::Max => Interval::Int(i.max(m), j.max(n)),
        Binary::Eq => {
            let disjoint = if floats { y < u || v < x } else { j < m || n < i };
            let same = if floats { x == y && u == v && x == u } else { i == j && m == n && i == m };
            Interval::Bool(!same, !disjoint)
        }
        Binary::Lt if floats => Interval::Bool(y >= u, x < v),
        Binary::Lt => Interval::Bool(j >= m, i < n),
        Binary::Le if floats => Interval::Bool(y > u, x <= v),
        Binary::Le => Interval::Bool(j > m, i <= n),
        Binary::And => {
            let ((af, at), (bf, bt)) = (a.bools(), b.bools());
            Interval::Bool(af || bf, at && bt)
        }
        Binary::Or => {
            let ((af, at), (bf, bt)) = (a.bools(), b.bools());
            Interval::Bool(af && bf, at || bt)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AuxSpec, Env, Expr, k, load, q};
    use super::*;
    use crate::{DType, Inputs, Mask, Problem, Tensor};

    /// The value at q 2, k 3 and the bounds over a block around it, with one auxiliary tensor `w`.
    fn both(e: &Expr, want: Type, w: &Tensor) -> (super::super::Value, Interval) {
        let aux = [AuxSpec { name: "w".into(), dtype: w.dtype(), shape: w.shape().to_vec(), grad: false }];
        let (program, views) = (Program::compile(e, &aux, want).unwrap(), [w.view()]);
        let env = Env { score: 0.0, batch: 0, head: 0, q: 2, k: 3, q_len: 4, k_len: 5, aux: &views };
        let domain = Domain { batch: 0..1, heads: 0..1, q: 0..4, k: 0..5, q_len: (4, 4), k_len: (5, 5), aux: &views };
        (program.eval(&env), program.bounds(&domain))
    }

    #[test]
    fn integers_wrap_like_an_i32() {
        let w = Tensor::new(vec![i32::MIN, i32::MAX], &[2]).unwrap();
        let (min, max) = (|| Expr::from(i32::MIN), || Expr::from(i32::MAX));
        let cases = [
            (max() + k(), i32::MAX.wrapping_add(3)),
            (min() - k(), i32::MIN.wrapping_sub(3)),
            (max() * max(), i32::MAX.wrapping_mul(i32::MAX)),
            (max() * max() * max() * max() * max() - k(), i32::MAX.wrapping_sub(3)),
            (-min(), i32::MIN),
            (min().abs(), i32::MIN),
            (min() / -1, i32::MIN),
            (min() % Expr::from(-1), 0),
            (k() % 0, 0),
            (k() / 0, 0),
            (load("w", [k() - 3]) - q(), i32::MAX - 1),
            ((q().to_float() * 1e30).floor(), i32::MAX),
            ((q().to_float() * -1e30).floor(), i32::MIN),
            ((k().to_float() - f32::NAN).floor(), 0),
        ];
        for (e, want) in &cases {
            let (value, bounds) = both(e, Type::Int, &w);
            assert_eq!(value.int(), i64::from(*want), "{e}");
            let Interval::Int(low, high) = bounds else { panic!("{e} gives {bounds:?}") };
            assert!((low..=high).contains(&value.int()), "{e}: {bounds:?}");
        }
    }

    #[test]
    fn integers_past_32_bits_are_found_where_they_arise() {
        let w = Tensor::new(vec![3, 1 << 30], &[2]).unwrap();
        let aux = [AuxSpec { name: "w".into(), dtype: w.dtype(), shape: w.shape().to_vec(), grad: false }];
        let views = [w.view()];
        let found = |e: &Expr, keys: usize, contents: bool| {
            let program = Program::compile(e, &aux, Type::Bool).unwrap();
            let (q_len, k_len) = ((4, 4), (keys, keys));
            let domain = Domain { batch: 0..1, heads: 0..1, q: 0..4, k: 0..keys, q_len, k_len, aux: &views };
            program.past_32_bits(&domain, contents)
        };
        let hash = (k() * 1_000_003 % 11).equals(3);
        assert_eq!(found(&hash, 2148, true), None);
        let text = "(k * 1000003)".to_string();
        assert_eq!(found(&hash, 2149, true), Some((text, 0, 2_148_006_444)));
        // What is loaded is known only with contents; an id that is compared needs no room.
        let loaded = || load("w", [k().min(1)]);
        let (sum, id) = ((loaded() + loaded()).less(7), loaded().equals(3));
        assert_eq!(found(&sum, 1, true), None);
        let text = "(tensor 0[min(k, 1)] + tensor 0[min(k, 1)])".to_string();
        assert_eq!(found(&sum, 2, true), Some((text, 6, 1 << 31)));
        assert_eq!(found(&sum, 2, false), None);
        assert_eq!(found(&id, 2, true), None);
        // Integer parts of floats without bounds saturate; those of small floats may overflow later.
        let part = |e: Expr| (e.floor() * 3).less(0);
        assert_eq!(found(&part(k().to_float().exp()), 4000, true), None);
        assert_eq!(found(&part(k().to_float() * 1e6), 1000, true).map(|x| x.2), Some(2_997_000_000));
        // Steps share operands.
        let shared = (0..8).fold(k(), |e, _| (e.clone() + e).min(7));
        assert_eq!(found(&shared.less(3), 9, false), None);
        let low = Expr::from(i32::MIN);
        assert_eq!(found(&(-low.clone()).less(0), 1, false), Some(("-(-2147483648)".into(), 1 << 31, 1 << 31)));
        assert_eq!(found(&low.abs().less(0), 1, false).map(|x| x.2), Some(1 << 31));
    }

    #[test]
    fn a_comparison_with_nan_is_never_decided() {
        let w = Tensor::new(vec![f32::NAN, 1.0], &[2]).unwrap();
        let x = || load("w", [(k() - 3).abs().min(1)]);
        let cases = [
            x().tanh().less(2.0),
            x().abs().at_least(-1.0),
            x().exp().at_least(0.0),
            x().min(0.0).at_most(0.0),
            x().max(0.0).more(-1.0),
            (x() - x()).at_most(f32::INFINITY),
        ];
        for e in &cases {
            let (value, bounds) = both(e, Type::Bool, &w);
            assert!(!value.bool(), "{e}");
            assert_eq!(bounds, Interval::Bool(true, true), "{e}");
        }
    }

    #[test]
    fn an_index_from_an_empty_tensor_is_refused() {
        let mask = Mask::custom(load("a", [load("none", [k()])]).less(1));
        let problem = Problem::builder().dense(1, 2, 2).heads(1, 1).head_dim(1).mask(mask);
        let problem = problem.aux("a", DType::I32, &[2]).aux("none", DType::I32, &[0]).build().unwrap();
        let x = Tensor::new(vec![0.0f32; 2], &[1, 2, 1, 1]).unwrap();
        let (a, none) = (Tensor::new(vec![0, 1], &[2]).unwrap(), Tensor::new(Vec::<i32>::new(), &[0]).unwrap());
        let inputs = Inputs::new(x.view(), x.view(), x.view()).aux("a", a.view()).aux("none", none.view());
        assert_eq!(
            inputs.check(&problem).unwrap_err().to_string(),
            "`none`: axis 0 is read from 0 to 1, allowed: 0 to -1; clamp the index with min and max"
        );
    }
}
