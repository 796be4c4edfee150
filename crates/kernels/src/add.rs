//! z = x + y: the smallest kernel.

use crate::params::Program;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{BuildError, Kernel, Target};

/// Threads of a CTA.
pub const THREADS: u32 = 256;

/// Arrays of `n` floats in device memory.
#[derive(Debug, Clone, Copy)]
pub struct AddCall {
    /// First summand.
    pub x: Span,
    /// Second summand.
    pub y: Span,
    /// Their sum.
    pub z: Span,
    /// Elements of each array.
    pub n: u32,
}

/// Adds two arrays, one element per thread.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Ok(program(target)?.into_kernel())
}

/// [`kernel`] with its launch arguments. A launch needs `n / THREADS` CTAs, rounded up.
pub fn program(target: Target) -> Result<Program<AddCall>, BuildError> {
    Program::build("vector_add", target, |p| {
        let x = p.pointer::<f32>("x", |call: &AddCall| call.x);
        let y = p.pointer::<f32>("y", |call| call.y);
        let z = p.pointer::<f32>("z", |call| call.z);
        let n = p.u32("n", |call| call.n);
        p.builder().threads(THREADS, |w| {
            let i = w.block().mul_add(THREADS, w.thread());
            w.when(i.lt(n), |w| z.store(w, i, x.load(w, i) + y.load(w, i)));
        });
    })
}
