//! z = x + y: the smallest kernel there is.

use fulgurite_ptx::{BuildError, Kernel, Target};

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Adds two arrays of `n` floats, one element a thread.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Kernel::build("vector_add", target, |k| {
        let [x, y, z] = ["x", "y", "z"].map(|name| k.pointer::<f32>(name));
        let n = k.param::<u32>("n");
        k.threads(THREADS, |w| {
            let i = w.block().mul_add(THREADS, w.thread());
            w.when(i.lt(n), |w| z.store(w, i, x.load(w, i) + y.load(w, i)));
        });
    })
}
