//! The role that starts all products: one thread of one warp.
//!
//! For each warpgroup in turn: o += p v of a block, in the parts in which the warpgroup publishes p, then s = q k^T of the next block. Products run in the order in which
//! they start, so the scores of the next block overwrite p only after o += p v has read it.

use crate::attention::forward::tcgen05::construction::TensorKernel;
use crate::parts::schedule::Work;
use fulgurite_ptx::{Half, Major, Pair, Scope, Sum, Tile, Val, WarpRole, Which, Word};

/// Starts the products of all tiles of the CTA.
pub(super) fn run<'k, T: Half>(w: &Scope<'k, WarpRole>, kernel: &TensorKernel<'_, 'k, T>)
where
    Pair<T>: Word,
{
    let (rings, outputs) = (&kernel.rings, &kernel.outputs);
    let groups = || (0..kernel.config.groups).map(Which::Index);
    w.repeat(|w, leave| {
        let work = Work::read(&kernel.announced.take(w), kernel.work_shape);
        leave.when(work.blocks[1].eq(0));
        let queries = rings.queries.wait(w);
        let key = rings.keys.wait(w)[0];
        groups().zip(&queries).for_each(|(which, q)| scores(w, kernel, which, *q, key));
        rings.keys.done_with_products(w);
        // A warpgroup reads o of a tile before it writes p of the next one, so these waits are over when p is.
        groups().for_each(|which| _ = outputs.await_empty(w, which));
        let second = work.blocks[0] + 1;
        w.each(second, work.blocks[1], 1u32, |w, j| {
            let (value, key) = (rings.values.wait(w)[0], rings.keys.wait(w)[0]);
            for (which, q) in groups().zip(&queries) {
                output(w, kernel, which, value, j.ne(second));
                scores(w, kernel, which, *q, key);
            }
            rings.values.done_with_products(w);
            rings.keys.done_with_products(w);
        });
        rings.queries.done_with_products(w);
        let value = rings.values.wait(w)[0];
        // The last warpgroup's o is committed after everything else, so no arrival is pending when its threads exit.
        let last = kernel.config.groups - 1;
        for n in 0..kernel.config.groups {
            let which = Which::Index(n);
            output(w, kernel, which, value, work.blocks[1].ne(second));
            if n < last {
                outputs.filled(w, which);
            }
        }
        rings.values.done_with_products(w);
        outputs.filled(w, Which::Index(last));
    });
}

/// Starts s = q k^T of a warpgroup. Its previous p has been read.
fn scores<'k, T: Half>(
    w: &Scope<'k, WarpRole>,
    kernel: &TensorKernel<'_, 'k, T>,
    which: Which<'k>,
    q: Tile<'k>,
    key: Tile<'k>,
) where
    Pair<T>: Word,
{
    let s = kernel.scores.next(w, which);
    w.elected(|t| t.multiply_tensor(s, q.operand(Major::Inner), key.operand(Major::Inner), Sum::Fresh));
    kernel.scores.filled(w, which);
}

/// Starts o += p v of a warpgroup, each part when the warpgroup has published it.
fn output<'k, T: Half>(
    w: &Scope<'k, WarpRole>,
    kernel: &TensorKernel<'_, 'k, T>,
    which: Which<'k>,
    value: Tile<'k>,
    onto: Val<'k, bool>,
) where
    Pair<T>: Word,
{
    for (part, cols) in (0..).zip(kernel.config.parts()) {
        kernel.scores.await_part(w, which, part);
        let p = kernel.scores.next(w, which).overlay::<T>(kernel.config.cols).range(cols.clone());
        let o = kernel.outputs.next(w, which);
        let sum = if part == 0 { Sum::If(onto) } else { Sum::Onto };
        w.elected(|t| t.multiply_tensor(o, p, value.operand(Major::Outer).summed(cols), sum));
    }
}
