//! `z[i] = sum over j of x[i][j] y[i][j]`: the row-wise dot product of two matrices.
//!
//! This file is the template for a new operator (docs/guide/new-operator.md): the value [`ROW_DOT`] is everything that the
//! registry, the simulator, the assembler, the command line and Python need.

use crate::params::{Params, Program};
use crate::tensor_operator::{Call, Round, TensorOperator};
use crate::tensor_type::{TensorRefusal, TensorType, f32_matrix};
use fulgurite_ptx::{BuildError, Target};

/// Threads of a CTA: four warps, one row each.
const THREADS: u32 = 128;
/// Rows of a CTA.
const ROWS: u32 = THREADS / 32;

/// The row-wise dot product.
pub const ROW_DOT: TensorOperator = TensorOperator {
    name: "row_dot",
    summary: "z = row-wise dot product of x and y, f32",
    inputs: &["x", "y"],
    output,
    program,
    grid: |call| [call.output.size(0).div_ceil(ROWS), 1, 1],
    reference,
    example: |rows, cols| vec![TensorType::f32(&[rows, cols]); 2],
};

/// One number for each row of x; y must have the shape of x.
fn output(inputs: &[TensorType]) -> Result<TensorType, TensorRefusal> {
    let [rows, cols] = f32_matrix("x", &inputs[0])?;
    if inputs[1] != inputs[0] {
        let (got, allowed) = (inputs[1].clone(), format!("f32 [{rows}, {cols}], as x"));
        return Err(TensorRefusal::Type { arg: "y", got, allowed, hint: "both have the same rows and columns" });
    }
    Ok(TensorType::f32(&[rows]))
}

fn program(target: Target) -> Result<Program<Call>, BuildError> {
    Program::build(ROW_DOT.name, target, build)
}

/// A warp walks one row, 32 columns at a time, and adds the products of its lanes at the end.
fn build(p: &Params<'_, Call>) {
    let x = p.array::<f32>("x", |call: &Call| call.inputs[0].span);
    let y = p.array::<f32>("y", |call| call.inputs[1].span);
    let z = p.array::<f32>("z", |call| call.output.span);
    let rows = p.u32("rows", |call| call.inputs[0].size(0));
    let cols = p.u32("cols", |call| call.inputs[0].size(1));
    p.builder().threads(THREADS, |w| {
        let row = w.cta().mul_add(ROWS, w.thread() / 32);
        // A warp without a row adds nothing: shuffles need all lanes, so it may not skip the reduction.
        let end = row.lt(rows).select(cols, 0);
        let start = row.mul_wide(cols);
        let (x, y, sum) = (x.at_wide(start), y.at_wide(start), w.var(0.0f32));
        w.each(w.lane(), end, 32, |w, j| sum.set(x.load(w, j).mul_add(y.load(w, j), sum.get())));
        let sum = w.reduce(sum.get(), 32, |a, b| a + b);
        w.when(w.lane().eq(0) & row.lt(rows), |w| z.store(w, row, sum));
    });
}

/// The formula, term by term.
fn reference(types: &[TensorType], inputs: &[Vec<f64>], round: Round) -> Vec<f64> {
    let [rows, cols] = [types[0].shape[0], types[0].shape[1]];
    let term = |sum: f64, at: usize| round(sum + round(inputs[0][at] * inputs[1][at]));
    (0..rows).map(|row| (row * cols..(row + 1) * cols).fold(0.0, term)).collect()
}
