//! The gradients of sinks: d_sink = - sum over the rows of a head of e^(sink - LSE) delta. That of a sink of -inf is 0.
//!
//! One CTA has a head and adds in a fixed order, so every run gives the same bits.

use crate::params::Program;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{BuildError, Target};
use std::f32::consts::LOG2_E;

/// Threads of a CTA.
pub const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;

/// A launch: one CTA for each head.
pub(crate) struct SinksCall {
    /// -LSE in powers of two, and delta, of padded rows ([`prepare`](crate::attention::backward::prepare)).
    pub shift: Span,
    pub delta: Span,
    pub sinks: Span,
    pub d_sinks: Span,
    /// Number of sequences whose rows are stored separately.
    pub batch: u32,
    pub heads: u32,
    /// Padded rows of a head. Padding has a probability of 0 and a delta of 0.
    pub rows: u32,
}

/// Builds the kernel.
pub(crate) fn program(target: Target) -> Result<Program<SinksCall>, BuildError> {
    Program::build("attention_backward_sinks", target, |p| {
        let shift = p.pointer::<f32>("shift", |call: &SinksCall| call.shift);
        let delta = p.pointer::<f32>("delta", |call| call.delta);
        let sinks = p.pointer::<f32>("sinks", |call| call.sinks);
        let d_sinks = p.pointer::<f32>("d_sinks", |call| call.d_sinks);
        let batch = p.u32("batch", |call| call.batch);
        let heads = p.u32("heads", |call| call.heads);
        let rows = p.u32("rows", |call| call.rows);
        let k = p.builder();
        let partial = k.shared::<f32>("partial", WARPS);
        k.threads(THREADS, |w| {
            let head = w.cta();
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
                // A sink of -inf is hidden: rows of NaN have no term in its gradient.
                d_sinks.store(w, head, sink.eq(f32::NEG_INFINITY).select::<f32>(0.0, -total));
            });
        });
    })
}
