//! Softmax of each row of a matrix: a reduction inside a CTA, and the exponentials of `core`.
//!
//! y = 2^((x - m) log2 e) / l, m = row maximum, l = sum of the numerators. A row of -inf gives zeros.

use crate::params::{Params, Program};
use crate::parts::exp::{Element, exp2};
use crate::tensor_operator::{Call, Round, TensorOperator};
use crate::tensor_type::{TensorType, f32_matrix};
use fulgurite_core::Exp;
use fulgurite_ptx::{BuildError, Cta, Scope, Shared, Target, Val};
use std::f32::consts::LOG2_E;

/// Threads of a CTA, which computes one row.
pub const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;

/// Softmax of each row of a matrix.
pub const ROW_SOFTMAX: TensorOperator = TensorOperator {
    name: "row_softmax",
    summary: "softmax of each row, f32",
    inputs: &["x"],
    output: |inputs| f32_matrix("x", &inputs[0]).map(|shape| TensorType::f32(&shape)),
    program: |target| program(target, Exp::Auto),
    grid: |call| [call.output.size(0), 1, 1],
    reference,
    example: |rows, cols| vec![TensorType::f32(&[rows, cols])],
};

/// The formula of the module, row by row.
fn reference(types: &[TensorType], inputs: &[Vec<f64>], round: Round) -> Vec<f64> {
    let row = |row: &[f64]| {
        let m = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let shift = if m > f64::NEG_INFINITY { m } else { 0.0 };
        let numerators: Vec<f64> = row.iter().map(|x| round(round(x - shift).exp())).collect();
        let l = numerators.iter().fold(0.0, |sum, x| round(sum + x));
        numerators.into_iter().map(move |x| if l > 0.0 { round(x / l) } else { 0.0 }).collect::<Vec<_>>()
    };
    inputs[0].chunks(types[0].shape[1].max(1)).flat_map(row).collect()
}

/// The kernel with a choice of exponentials.
pub fn program(target: Target, exp: Exp) -> Result<Program<Call>, BuildError> {
    Program::build(ROW_SOFTMAX.name, target, |p| build(p, exp))
}

fn build<'k>(p: &Params<'k, Call>, exp: Exp) {
    let k = p.builder();
    let x = p.pointer::<f32>("x", |call: &Call| call.inputs[0].span);
    let y = p.pointer::<f32>("y", |call| call.output.span);
    let cols = p.u32("cols", |call| call.output.size(1));
    let stride = p.u32("stride", |call| call.output.size(1));
    let partial = k.shared::<f32>("partial", 2 * WARPS);
    k.threads(THREADS, |w| {
        let start = w.cta().mul_wide(stride);
        let (x, y) = (x.at_wide(start), y.at_wide(start));

        let m = w.var(f32::NEG_INFINITY);
        w.each(w.thread(), cols, THREADS, |w, j| m.set(m.get().max(x.load(w, j))));
        let m = of_block(w, partial, 0, m.get(), |a, b| a.max(b));
        // In a row of -inf, subtract 0: inf - inf would be NaN.
        let shift = m.gt(f32::NEG_INFINITY).select::<f32>(m, 0.0);
        // The loop has one body for all elements, so an `Exp` that mixes polynomials and `ex2` uses the one with the larger share.
        let numerator = |w: &Scope<'k, Cta>, j| exp2(exp, Element::ALONE, (x.load(w, j) - shift) * LOG2_E);

        let l = w.var(0.0f32);
        w.each(w.thread(), cols, THREADS, |w, j| l.set(l.get() + numerator(w, j)));
        let l = of_block(w, partial, WARPS, l.get(), |a, b| a + b);
        let inverse = l.gt(0.0).select::<f32>(l.recip(), 0.0);
        w.each(w.thread(), cols, THREADS, |w, j| y.store(w, j, numerator(w, j) * inverse));
    });
}

/// Reduces `x` over all threads of the CTA: first over the lanes of each warp, then over the warps' results.
fn of_block<'k>(
    w: &Scope<'k, Cta>,
    partial: Shared<'k, f32>,
    at: u32,
    x: Val<'k, f32>,
    f: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>,
) -> Val<'k, f32> {
    let x = w.reduce(x, 32, &f);
    w.when(w.lane().eq(0), |w| partial.store(w, w.thread() / 32 + at, x));
    w.sync();
    (1..WARPS).fold(partial.load(w, at), |sum, i| f(sum, partial.load(w, at + i)))
}
