//! Zeroes the gradients of auxiliary tensors, and their exact sums.

use crate::params::Program;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{BuildError, Target};

/// Threads of a CTA. Each writes one element.
pub const THREADS: u32 = 256;

/// A launch.
pub(crate) struct ZeroCall {
    pub to: Span,
    /// Zeros to write, of 32 bits each.
    pub count: u32,
}

/// Builds the kernel.
pub(crate) fn program(target: Target) -> Result<Program<ZeroCall>, BuildError> {
    Program::build("attention_backward_zero", target, |p| {
        let to = p.array::<f32>("to", |call: &ZeroCall| call.to);
        let count = p.u32("count", |call| call.count);
        p.builder().threads(THREADS, |w| {
            let i = w.cta().mul_add(THREADS, w.thread());
            w.when(i.lt(count), |w| to.store(w, i, 0.0f32));
        });
    })
}
