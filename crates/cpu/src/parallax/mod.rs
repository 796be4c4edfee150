//! Parallax on the CPU: attention whose weights are corrected by a probe for each query.
//!
//! Letters as in forward, and R = probes, U = R K^T (unscaled), t = sum P U / l, W = P (1 + t - U).

mod backward;
mod forward;

use crate::decode::Probe;
use crate::memory::SharedRows;
use crate::tiles::Context;
use crate::{Options, decode, forward as plain};
use fulgurite_core::parallax::{ParallaxBound, ParallaxForward, ParallaxGradients, ParallaxOutputs};
use fulgurite_core::{Rescale, TensorView};

/// Computes Parallax into `outputs`, which must fit the problem. With r = 0 the result is bitwise that of attention.
pub fn parallax_forward(bound: &ParallaxBound<'_>, outputs: &mut ParallaxOutputs<'_>, options: &Options) {
    let cx = Context::new(bound.attention(), options.kernels());
    let rx = Context::new(bound.probe(), options.kernels());
    let own = &mut outputs.own;
    if !cx.bound.all_queries_used() {
        own.o.fill(0.0);
        own.lse.fill(f64::NEG_INFINITY);
        outputs.mean.fill(0.0);
    }
    let (o_strides, lse_strides, mean_strides) = (*own.o.strides(), *own.lse.strides(), *outputs.mean.strides());
    let out = plain::Out {
        o: SharedRows::new(&mut own.o),
        o_strides: &o_strides,
        lse: SharedRows::new(&mut own.lse),
        lse_strides: &lse_strides,
    };
    let probe = Probe { cx: &rx, mean: SharedRows::new(&mut outputs.mean), mean_strides: &mean_strides };
    let (few, many): (Vec<usize>, Vec<usize>) =
        (0..cx.bound.sequences().len()).partition(|&s| decode::suits(&cx, &cx.bound.sequences()[s]));
    let rescale = options.rescale.unwrap_or(Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT));
    let plan = plain::RunOptions { rescale, threads: options.threads() };
    cx.prepare_mask(plan.threads);
    if !few.is_empty() {
        decode::run(&cx, &few, &out, &plan, Some(&probe));
    }
    forward::run(&cx, &many, &out, &plan, &probe);
}

/// Computes the gradients of Parallax, from the results of forward and the gradient of o.
pub fn parallax_backward(
    bound: &ParallaxBound<'_>,
    forward: &ParallaxForward,
    d_o: &TensorView<'_>,
    gradients: &mut ParallaxGradients,
    options: &Options,
) {
    let cx = Context::new(bound.attention(), options.kernels());
    let rx = Context::new(bound.probe(), options.kernels());
    backward::run(&cx, &rx, forward, d_o, gradients, options.threads());
}
