//! The gradients of sinks: d_sink = - sum over the rows of a head of e^(sink - LSE) delta.
//!
//! One block a head, which adds in one order: the same bits every run.

use fulgurite_ptx::{BuildError, Kernel, Target};
use std::f32::consts::LOG2_E;

/// Threads of a block.
pub const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;

/// From what [`prepare`](crate::attention::backward::prepare) made: padding has a probability of 0 and a delta of 0.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Kernel::build("attention_backward_sinks", target, |k| {
        let [shift, delta, sinks, d_sinks] = ["shift", "delta", "sinks", "d_sinks"].map(|name| k.pointer::<f32>(name));
        let [batch, heads, rows] = ["batch", "heads", "rows"].map(|name| k.param::<u32>(name));
        let partial = k.shared::<f32>("partial", WARPS);
        k.threads(THREADS, |w| {
            let head = w.block();
            let sink = sinks.load(w, head) * LOG2_E;
            let sum = w.var(0.0f32);
            w.each(0, batch, 1, |w, b| {
                let start = (b * heads + head).mul_wide(rows);
                w.each(w.thread(), rows, THREADS, |w, row| {
                    let p = (sink + shift.at_wide(start).load(w, row)).exp2();
                    sum.set(p.mul_add(delta.at_wide(start).load(w, row), sum.get()));
                });
            });
            let of_warp = w.reduce(sum.get(), 32, |a, b| a + b);
            w.when(w.lane().eq(0), |w| partial.store(w, w.thread() / 32, of_warp));
            w.sync();
            w.when(w.thread().eq(0), |w| {
                let total = (1..WARPS).fold(partial.load(w, 0), |sum, i| sum + partial.load(w, i));
                d_sinks.store(w, head, -total);
            });
        });
    })
}
