//! z = x + y: the smallest kernel.

use crate::params::Program;
use crate::tensor_operator::{Call, TensorOperator};
use crate::tensor_type::{TensorRefusal, TensorType};
use fulgurite_core::DType;
use fulgurite_ptx::{BuildError, Kernel, Target};

/// Threads of a CTA.
pub const THREADS: u32 = 256;

/// The sum of two vectors.
pub const VECTOR_ADD: TensorOperator = TensorOperator {
    name: "vector_add",
    summary: "z = x + y, f32",
    inputs: &["x", "y"],
    output,
    program,
    grid: |call| [call.output.size(0).div_ceil(THREADS), 1, 1],
    reference: |_, inputs, round| inputs[0].iter().zip(&inputs[1]).map(|(x, y)| round(x + y)).collect(),
    example: |_, cols| vec![TensorType::f32(&[cols]); 2],
};

/// A vector as long as x; y must be as long.
fn output(inputs: &[TensorType]) -> Result<TensorType, TensorRefusal> {
    let refuse = |arg, got: &TensorType, allowed: String| {
        Err(TensorRefusal::Type { arg, got: got.clone(), allowed, hint: "convert or flatten it" })
    };
    let [x, y] = [&inputs[0], &inputs[1]];
    match (x.dtype, &x.shape[..]) {
        (DType::F32, [_]) if x == y => Ok(x.clone()),
        (DType::F32, [n]) => refuse("y", y, format!("f32 [{n}], as x")),
        _ => refuse("x", x, "f32 [n]".into()),
    }
}

/// Adds two arrays, one element per thread.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    VECTOR_ADD.kernel(target)
}

fn program(target: Target) -> Result<Program<Call>, BuildError> {
    Program::build(VECTOR_ADD.name, target, |p| {
        let x = p.pointer::<f32>("x", |call: &Call| call.inputs[0].span);
        let y = p.pointer::<f32>("y", |call| call.inputs[1].span);
        let z = p.pointer::<f32>("z", |call| call.output.span);
        let n = p.u32("n", |call| call.output.size(0));
        p.builder().threads(THREADS, |w| {
            let i = w.cta().mul_add(THREADS, w.thread());
            w.when(i.lt(n), |w| z.store(w, i, x.load(w, i) + y.load(w, i)));
        });
    })
}
