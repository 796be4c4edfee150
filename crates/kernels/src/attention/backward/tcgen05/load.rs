//! The load role: one thread that starts the copies of a tile and of all its steps.

use crate::attention::backward::cursor::Cursor;
use crate::attention::backward::tcgen05::config::ROWS;
use crate::attention::backward::tcgen05::construction::TensorBackward;
use crate::attention::backward::tiles::{Of, Work};
use fulgurite_ptx::{Half, Pair, Scope, Thread, Word};

/// Loads the CTA's tile and its steps.
pub(super) fn run<'k, T: Half>(t: &Scope<'k, Thread>, kernel: &TensorBackward<'k, T>, work: &Work<'k>)
where
    Pair<T>: Word,
{
    let (params, stages, zero) = (&kernel.params, &kernel.stages, t.constant(0u32));
    let map = &params.map;
    let here = Cursor::new(t, map, work);
    let keys = |of| map.at(of, work, [zero, work.tile * ROWS, map.kv_head(work.head)]);
    stages.keys.put(t, |t, stage| stage.load(t, stage.tile(0), &params.k, &keys(Of::K)));
    t.repeat(|t, leave| {
        let (head, step) = (here.head.get(), here.step.get());
        let queries = |of| map.at(of, work, [zero, step * ROWS, head]);
        let number = (map.steps_before_head(work, head) + step).mul_wide(ROWS);
        stages.queries.put(t, |t, stage| stage.load(t, stage.tile(0), &params.q, &queries(Of::Q)));
        stages.shift.put(t, |t, stage| stage.load_numbers(t, params.shift.at_wide(number)));
        // After the first queries: s is multiplied before d_p.
        let first = here.head.get().eq(map.first_head(work.head)) & step.eq(work.steps[0]);
        t.when(first, |t| {
            stages.values.put(t, |t, stage| stage.load(t, stage.tile(0), &params.v, &keys(Of::V)));
        });
        stages.outputs.put(t, |t, stage| stage.load(t, stage.tile(0), &params.d_o, &queries(Of::DO)));
        stages.delta.put(t, |t, stage| stage.load_numbers(t, params.delta.at_wide(number)));
        leave.when(here.left.get().eq(1));
        here.forward(t, |_| {});
    });
}
