//! Attention on minifloats in groups: operands are rounded as they are read (for backward, before), then the ordinary
//! path runs with rounded weights.

use crate::forward::{RunOptions, run};
use crate::minifloat_unit::{Expanded, Operand};
use crate::tiles::Context;
use crate::{Counters, Options};
use fulgurite_core::{
    Bound, Delta, Forward, GradientOutputs, GroupAttention, Outputs, Saved, Sequence, Side, Tensor, TensorView, stop,
};

/// q, k and v with every element rounded to its format.
struct Rounded {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Rounded {
    fn new(bound: &Bound<'_>, spec: &GroupAttention) -> Rounded {
        let problem = bound.problem();
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape()];
        let elems = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum::<usize>();
        // A copy of each, and one of them in f64 on the way.
        stop::ask("rounded q, k and v", elems.saturating_mul(size_of::<f64>()));
        let along = |view: &TensorView<'_>, dim: usize| {
            let Some(format) = spec.qk else { return view.to_tensor() };
            let mut values: Vec<f32> = view.to_f64().into_iter().map(|x| x as f32).collect();
            format.fake_rows(&mut values, dim);
            tensor(view, &values)
        };
        let (q, k) = (along(bound.q(), problem.head_dim()), along(bound.k(), problem.head_dim()));
        let Some(format) = spec.pv else { return Rounded { q, k, v: bound.v().to_tensor() } };
        // Groups of V run along the keys of a sequence.
        let dense = bound.v().to_tensor();
        let mut values: Vec<f32> = dense.view().to_f64().into_iter().map(|x| x as f32).collect();
        let (dim, strides) = (problem.value_dim(), *dense.view().strides());
        for s in bound.sequences() {
            for head in 0..problem.kv_heads() {
                let rows = |s: &Sequence| bound.row_layout(&strides, s, Side::Key);
                let mut columns: Vec<f32> =
                    (0..s.k_len).flat_map(|j| values[rows(s).at(j, head)..][..dim].to_vec()).collect();
                format.fake_columns(&mut columns, dim);
                for (j, row) in columns.chunks_exact(dim).enumerate() {
                    values[rows(s).at(j, head)..][..dim].copy_from_slice(row);
                }
            }
        }
        Rounded { q, k, v: tensor(bound.v(), &values) }
    }

    fn bound<'a>(&'a self, bound: &Bound<'a>) -> Bound<'a> {
        let same = bound.with_tensors(self.q.view(), self.k.view(), self.v.view());
        same.expect("bug in fulgurite: tensors of the same shapes")
    }
}

fn tensor(like: &TensorView<'_>, values: &[f32]) -> Tensor {
    let wide: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
    Tensor::from_f64(like.dtype(), &wide, like.shape()).expect("bug in fulgurite: a tensor of the same shape")
}

pub(crate) fn forward(
    bound: &Bound<'_>,
    spec: &GroupAttention,
    outputs: &mut Outputs<'_>,
    options: &Options,
) -> Counters {
    let [qk, pv] = [spec.qk, spec.pv].map(|format| format.map_or(Operand::Tensor, Operand::Rounded));
    over(bound, spec, [qk, qk, pv], outputs, options)
}

/// Forward over operands from any source.
pub(crate) fn over(
    bound: &Bound<'_>,
    spec: &GroupAttention,
    [q, k, v]: [Operand<'_>; 3],
    outputs: &mut Outputs<'_>,
    options: &Options,
) -> Counters {
    let kernels = options.kernels();
    let unit = Expanded { inner: kernels.packer(bound.problem().dtype()), q, k, v };
    let cx = Context { rounding: spec.pv, ..Context::with(bound, kernels, &unit) };
    run(&cx, outputs, &plan(options))
}

/// The straight-through rule: the gradients of the rounded tensors are used as those of the tensors.
pub(crate) fn backward(
    bound: &Bound<'_>,
    spec: &GroupAttention,
    saved: &Saved<'_>,
    gradients: &mut GradientOutputs<'_>,
    options: &Options,
) {
    let rounded = Rounded::new(bound, spec);
    let bound = rounded.bound(bound);
    let exact: Forward;
    let mut saved = *saved;
    if spec.delta == Delta::Exact && spec.pv.is_some() {
        // The second output of the method, recomputed instead of saved: exact weights on rounded values.
        let mut own = Forward::zeros(bound.problem()).expect("bug in fulgurite: a problem whose output exists");
        run(&Context::new(&bound, options.kernels()), &mut own.outputs(), &plan(options));
        exact = own;
        saved.o = exact.o.view();
    }
    let cx = Context { rounding: spec.pv, ..Context::new(&bound, options.kernels()) };
    crate::backward::run(&cx, &saved, gradients, options.threads());
}

fn plan(options: &Options) -> RunOptions {
    RunOptions { rescale: options.rescale(), threads: options.threads() }
}
