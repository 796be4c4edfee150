//! Expressions, and a few elementary functions, on rows of lanes.
//!
//! The code is plain Rust over slices, without branches inside the loops. It is compiled into the entry points of each
//! instruction set, and the compiler vectorises it for that set.

use fulgurite_core::TensorView;
use fulgurite_core::expr::{Binary, Program, Step, Type, Unary, Var};

/// e^x: range reduction with a split ln 2, then a polynomial (coefficients of Cephes). Error about 1 ulp.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-103.0, 89.0); // NaN stays
    let n = (clamped * std::f32::consts::LOG2_E + 0.5).floor();
    let r = clamped - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + c;
    }
    let y = p * r * r + r + 1.0;
    // Two factors, so that results near the ends of the range neither overflow nor underflow early.
    let half = (n * 0.5).floor();
    let power = |e: f32| f32::from_bits(((e as i32 + 127) << 23) as u32);
    let y = y * power(half) * power(n - half);
    let y = if x < -103.9 { 0.0 } else { y };
    if x > 88.8 { f32::INFINITY } else { y }
}

/// Natural logarithm (coefficients of Cephes); -inf at 0, NaN below. Error about 1 ulp.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    // Subnormal numbers are scaled into range first.
    let small = x < f32::MIN_POSITIVE;
    let scaled = if small { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits();
    let mut e = ((bits >> 23) & 0xff) as i32 - 126;
    let mut f = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000); // [0.5, 1)
    let low = f < std::f32::consts::FRAC_1_SQRT_2;
    f = if low { f + f - 1.0 } else { f - 1.0 };
    e -= i32::from(low) + if small { 23 } else { 0 };
    let mut p = 7.037_683_6e-2f32;
    for c in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        p = p * f + c;
    }
    let e = e as f32;
    let square = f * f;
    let y = p * f * square - 2.121_944_4e-4 * e - 0.5 * square + f + 0.693_359_4 * e;
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    let y = if x == f32::INFINITY { f32::INFINITY } else { y };
    if x < 0.0 || x.is_nan() { f32::NAN } else { y }
}

/// Hyperbolic tangent (polynomial of Cephes near 0). Error about 1 ulp.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut p = -5.704_988_7e-3f32;
    for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328_4e-1] {
        p = p * z + c;
    }
    let near = p * z * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// From running maximum and sum: 1 / sum (0 if there was no key) and the natural LSE. NaN stays NaN.
#[inline(always)]
pub(crate) fn finish(m: &[f32], l: &[f32], inverse: &mut [f32], lse: &mut [f32]) {
    for (((&m, &l), inverse), lse) in m.iter().zip(l).zip(inverse).zip(lse) {
        let empty = m == f32::NEG_INFINITY;
        *inverse = if empty { 0.0 } else { 1.0 / l };
        *lse = if empty { f32::NEG_INFINITY } else { m + ln(l) };
    }
}

/// The inputs of an expression: the lanes of one tile of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct LaneEnv<'a> {
    pub batch: usize,
    pub q_len: usize,
    pub k_len: usize,
    /// Query index and head of each lane.
    pub q: &'a [i32],
    pub head: &'a [i32],
    pub aux: &'a [TensorView<'a>],
}

/// A program with its intermediate values for one tile. Values that depend on neither key nor score are computed once.
pub(crate) struct Evaluator<'a> {
    program: &'a Program,
    env: LaneEnv<'a>,
    /// Whether each step changes from key to key.
    moving: Vec<bool>,
    /// Bits of each step's value in each lane: f32, i32, or 0 and 1.
    values: Vec<u32>,
    lanes: usize,
}

impl<'a> Evaluator<'a> {
    /// Computes the steps that are constant over all keys.
    pub fn new(program: &'a Program, env: LaneEnv<'a>) -> Self {
        let lanes = env.q.len();
        let steps = program.steps();
        let mut moving = vec![false; steps.len()];
        for (i, step) in steps.iter().enumerate() {
            moving[i] = match step {
                Step::Var(v) => matches!(v, Var::Score | Var::Key),
                Step::Float(_) | Step::Int(_) | Step::Bool(_) => false,
                Step::Unary(_, a) => moving[*a],
                Step::Binary(_, a, b) => moving[*a] || moving[*b],
                Step::Select(c, a, b) => moving[*c] || moving[*a] || moving[*b],
                Step::Load(_, at) => at.iter().any(|&x| moving[x]),
            };
        }
        let mut evaluator = Evaluator { program, env, moving, values: vec![0; steps.len() * lanes], lanes };
        for i in 0..steps.len() {
            if !evaluator.moving[i] {
                evaluator.step(i, 0, &[]);
            }
        }
        evaluator
    }

    /// Evaluates one key; [`floats`](Self::floats), [`ints`](Self::ints) or [`bools`](Self::bools) give the result.
    #[inline(always)]
    pub fn row(&mut self, key: i32, scores: &[f32]) {
        for i in 0..self.moving.len() {
            if self.moving[i] {
                self.step(i, key, scores);
            }
        }
    }

    fn result(&self) -> &[u32] {
        &self.values[self.values.len() - self.lanes..]
    }
    pub fn floats(&self) -> impl Iterator<Item = f32> {
        self.result().iter().map(|&bits| f32::from_bits(bits))
    }
    pub fn ints(&self) -> impl Iterator<Item = i32> {
        self.result().iter().map(|&bits| bits as i32)
    }
    pub fn bools(&self) -> impl Iterator<Item = bool> {
        self.result().iter().map(|&bits| bits != 0)
    }

    #[inline(always)]
    fn step(&mut self, i: usize, key: i32, scores: &[f32]) {
        let lanes = self.lanes;
        let float = self.program.types()[i] == Type::Float;
        let (earlier, rest) = self.values.split_at_mut(i * lanes);
        let out = &mut rest[..lanes];
        let operand = |x: usize| &earlier[x * lanes..(x + 1) * lanes];
        match &self.program.steps()[i] {
            Step::Var(v) => match v {
                Var::Score => out.iter_mut().zip(scores).for_each(|(o, s)| *o = s.to_bits()),
                Var::Key => out.fill(key as u32),
                Var::Query => out.iter_mut().zip(self.env.q).for_each(|(o, &q)| *o = q as u32),
                Var::Head => out.iter_mut().zip(self.env.head).for_each(|(o, &h)| *o = h as u32),
                Var::Batch => out.fill(self.env.batch as u32),
                Var::QueryLen => out.fill(self.env.q_len as u32),
                Var::KeyLen => out.fill(self.env.k_len as u32),
            },
            Step::Float(bits) => out.fill(*bits),
            Step::Int(x) => out.fill(*x as u32),
            Step::Bool(x) => out.fill(u32::from(*x)),
            Step::Unary(op, a) => {
                let a = operand(*a);
                match op {
                    Unary::Neg if float => map_f(out, a, |x| -x),
                    Unary::Neg => map_i(out, a, i32::wrapping_neg),
                    Unary::Abs if float => map_f(out, a, f32::abs),
                    Unary::Abs => map_i(out, a, i32::wrapping_abs),
                    Unary::Exp => map_f(out, a, exp),
                    Unary::Log => map_f(out, a, ln),
                    Unary::Sqrt => map_f(out, a, f32::sqrt),
                    Unary::Tanh => map_f(out, a, tanh),
                    Unary::Not => map_i(out, a, |x| i32::from(x == 0)),
                    Unary::ToFloat => out.iter_mut().zip(a).for_each(|(o, &x)| *o = (x as i32 as f32).to_bits()),
                    Unary::Floor => {
                        out.iter_mut().zip(a).for_each(|(o, &x)| *o = f32::from_bits(x).floor() as i32 as u32)
                    }
                }
            }
            Step::Binary(op, a, b) => {
                let floats = self.program.types()[*a] == Type::Float;
                let (a, b) = (operand(*a), operand(*b));
                match (op, floats) {
                    (Binary::Add, true) => zip_f(out, a, b, |x, y| x + y),
                    (Binary::Add, false) => zip_i(out, a, b, i32::wrapping_add),
                    (Binary::Sub, true) => zip_f(out, a, b, |x, y| x - y),
                    (Binary::Sub, false) => zip_i(out, a, b, i32::wrapping_sub),
                    (Binary::Mul, true) => zip_f(out, a, b, |x, y| x * y),
                    (Binary::Mul, false) => zip_i(out, a, b, i32::wrapping_mul),
                    (Binary::Div, true) => zip_f(out, a, b, |x, y| x / y),
                    (Binary::Div, false) => zip_i(out, a, b, div_floor),
                    (Binary::Rem, _) => zip_i(out, a, b, rem_floor),
                    (Binary::Min, true) => zip_f(out, a, b, |x, y| if x.is_nan() || x <= y { x } else { y }),
                    (Binary::Min, false) => zip_i(out, a, b, i32::min),
                    (Binary::Max, true) => zip_f(out, a, b, |x, y| if x.is_nan() || x >= y { x } else { y }),
                    (Binary::Max, false) => zip_i(out, a, b, i32::max),
                    (Binary::Eq, true) => test_f(out, a, b, |x, y| x == y),
                    (Binary::Eq, false) => zip_i(out, a, b, |x, y| i32::from(x == y)),
                    (Binary::Lt, true) => test_f(out, a, b, |x, y| x < y),
                    (Binary::Lt, false) => zip_i(out, a, b, |x, y| i32::from(x < y)),
                    (Binary::Le, true) => test_f(out, a, b, |x, y| x <= y),
                    (Binary::Le, false) => zip_i(out, a, b, |x, y| i32::from(x <= y)),
                    (Binary::And, _) => zip_i(out, a, b, |x, y| x & y),
                    (Binary::Or, _) => zip_i(out, a, b, |x, y| x | y),
                }
            }
            Step::Select(c, a, b) => {
                let (c, a, b) = (operand(*c), operand(*a), operand(*b));
                for (((o, &c), &a), &b) in out.iter_mut().zip(c).zip(a).zip(b) {
                    *o = if c != 0 { a } else { b };
                }
            }
            Step::Load(tensor, at) => {
                let view = &self.env.aux[*tensor];
                for (lane, o) in out.iter_mut().enumerate() {
                    let mut offset = 0;
                    for (axis, &index) in at.iter().enumerate() {
                        let last = view.shape()[axis].saturating_sub(1);
                        let index = earlier[index * lanes + lane] as i32;
                        offset += (index.max(0) as usize).min(last) * view.strides()[axis];
                    }
                    let x = view.at(offset);
                    *o = if float { (x as f32).to_bits() } else { x as i32 as u32 };
                }
            }
        }
    }
}

/// Integer division rounding down; 0 if the divisor is 0.
#[inline(always)]
fn div_floor(a: i32, b: i32) -> i32 {
    if b == 0 {
        return 0;
    }
    let quotient = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
}

/// The remainder of [`div_floor`]; 0 if the divisor is 0.
#[inline(always)]
fn rem_floor(a: i32, b: i32) -> i32 {
    if b == 0 { 0 } else { a.wrapping_sub(b.wrapping_mul(div_floor(a, b))) }
}

#[inline(always)]
fn map_f(out: &mut [u32], a: &[u32], f: impl Fn(f32) -> f32) {
    for (o, &a) in out.iter_mut().zip(a) {
        *o = f(f32::from_bits(a)).to_bits();
    }
}
#[inline(always)]
fn map_i(out: &mut [u32], a: &[u32], f: impl Fn(i32) -> i32) {
    for (o, &a) in out.iter_mut().zip(a) {
        *o = f(a as i32) as u32;
    }
}
#[inline(always)]
fn zip_f(out: &mut [u32], a: &[u32], b: &[u32], f: impl Fn(f32, f32) -> f32) {
    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *o = f(f32::from_bits(a), f32::from_bits(b)).to_bits();
    }
}
#[inline(always)]
fn zip_i(out: &mut [u32], a: &[u32], b: &[u32], f: impl Fn(i32, i32) -> i32) {
    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *o = f(a as i32, b as i32) as u32;
    }
}
#[inline(always)]
fn test_f(out: &mut [u32], a: &[u32], b: &[u32], f: impl Fn(f32, f32) -> bool) {
    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *o = u32::from(f(f32::from_bits(a), f32::from_bits(b)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integer_division_rounds_down_and_gives_0_over_0() {
        assert_eq!((div_floor(-7, 2), rem_floor(-7, 2)), (-4, 1));
        assert_eq!((div_floor(7, -2), rem_floor(7, -2)), (-4, -1));
        assert_eq!((div_floor(7, 0), rem_floor(7, 0)), (0, 0));
        assert_eq!((div_floor(i32::MIN, -1), rem_floor(i32::MIN, -1)), (i32::MIN, 0));
    }

    #[test]
    fn elementary_functions_are_within_two_ulps() {
        let close = |got: f32, want: f64| {
            let want32 = want as f32;
            got == want32 || (f64::from(got) - want).abs() <= 2.5 * f64::from(f32::EPSILON) * want.abs()
        };
        for i in -40_000i32..40_000 {
            let x = i as f32 * 0.002;
            assert!(close(exp(x), f64::from(x).exp()), "exp {x}: {}", exp(x));
            assert!(close(tanh(x), f64::from(x).tanh()), "tanh {x}: {}", tanh(x));
            let y = f32::from_bits(i.unsigned_abs() * 50_000);
            // Near 1 the logarithm vanishes, so compare absolute errors there.
            let error = (f64::from(ln(y)) - f64::from(y).ln()).abs();
            assert!(
                y == 0.0 || !y.is_finite() || error <= 2e-7 * f64::from(y).ln().abs().max(1.0),
                "ln {y}: {}",
                ln(y)
            );
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(200.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && ln(-1.0).is_nan());
        assert_eq!((ln(0.0), ln(f32::INFINITY)), (f32::NEG_INFINITY, f32::INFINITY));
        assert_eq!((tanh(f32::INFINITY), tanh(-100.0)), (1.0, -1.0));
    }
}
