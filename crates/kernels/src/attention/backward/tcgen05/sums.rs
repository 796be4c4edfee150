//! The role that moves d_q of each step from tensor memory to its f32 sums in global memory.

use crate::attention::backward::cursor::Cursor;
use crate::attention::backward::tcgen05::config::ROWS;
use crate::attention::backward::tcgen05::construction::{TensorBackward, only};
use crate::attention::backward::tiles::Work;
use fulgurite_ptx::{Group, Half, Pair, Scope, Word};

/// Adds d_q of all steps of the CTA's tile.
pub(super) fn run<'k, T: Half>(w: &Scope<'k, Group>, kernel: &TensorBackward<'k, T>, work: &Work<'k>)
where
    Pair<T>: Word,
{
    let (map, barrier) = (&kernel.params.map, w.group_barrier());
    let (here, d_q) = (Cursor::new(w, map, work), w.row_accumulators(kernel.dims[0]));
    w.repeat(|w, leave| {
        // All columns at once: the next d_p may wait for them.
        w.load_tensor(&d_q, kernel.sums.await_full(w, only()));
        kernel.sums.give_back(w, only());
        let number = map.steps_before_head(work, here.head.get()) + here.step.get();
        let to = kernel.params.sums.at_wide(number.mul_wide(ROWS * kernel.dims[0]));
        kernel.staging.add(w, &barrier, &d_q, to);
        leave.when(here.left.get().eq(1));
        here.forward(w, |_| {});
    });
    kernel.staging.end(w);
}
