//! Zeros where gradients of auxiliary tensors will be summed.

use fulgurite_ptx::{BuildError, Kernel, Target};

/// Threads of a block, which has as many elements.
pub const THREADS: u32 = 256;

/// Writes `count` zeros.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Kernel::build("attention_backward_zero", target, |k| {
        let (to, count) = (k.array::<f32>("to"), k.param::<u32>("count"));
        k.threads(THREADS, |w| {
            let i = w.block().mul_add(THREADS, w.thread());
            w.when(i.lt(count), |w| to.store(w, i, 0.0f32));
        });
    })
}
