//! Softmax of each row of a matrix: a reduction inside a block, and the exponentials of `core`.
//!
//! y = 2^((x - m) log2 e) / l, m = largest of the row, l = sum of the numerators. A row of -inf gives zeros.

use crate::parts::exp::exp2;
use fulgurite_core::Exp;
use fulgurite_ptx::{Block, BuildError, Builder, Kernel, Scope, Shared, Target, Val};
use std::f32::consts::LOG2_E;

/// Threads of a block, which has one row.
pub const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;

/// Softmax of `cols` floats in each row, rows `stride` apart; one block a row.
pub fn kernel(target: Target, exp: Exp) -> Result<Kernel, BuildError> {
    Kernel::build("row_softmax", target, |k| build(k, exp))
}

fn build<'k>(k: &'k Builder, exp: Exp) {
    let (x, y) = (k.pointer::<f32>("x"), k.pointer::<f32>("y"));
    let (cols, stride) = (k.param::<u32>("cols"), k.param::<u32>("stride"));
    let partial = k.shared::<f32>("partial", 2 * WARPS);
    k.threads(THREADS, |w| {
        let start = w.block().mul_wide(stride);
        let (x, y) = (x.at_wide(start), y.at_wide(start));

        let m = w.var(f32::NEG_INFINITY);
        w.each(w.thread(), cols, THREADS, |w, j| m.set(m.get().max(x.load(w, j))));
        let m = of_block(w, partial, 0, m.get(), |a, b| a.max(b));
        // In a row of -inf subtract 0, not inf - inf.
        let shift = m.gt(f32::NEG_INFINITY).select::<f32>(m, 0.0);
        // The loop has one body for all elements: a share of polynomials means all of them here.
        let numerator = |w: &Scope<'k, Block>, j| exp2(exp, 0, (x.load(w, j) - shift) * LOG2_E);

        let l = w.var(0.0f32);
        w.each(w.thread(), cols, THREADS, |w, j| l.set(l.get() + numerator(w, j)));
        let l = of_block(w, partial, WARPS, l.get(), |a, b| a + b);
        let inverse = l.gt(0.0).select::<f32>(l.recip(), 0.0);
        w.each(w.thread(), cols, THREADS, |w, j| y.store(w, j, numerator(w, j) * inverse));
    });
}

/// `f` over all threads of the block: the lanes of each warp exchange, then each thread folds the warps' results.
fn of_block<'k>(
    w: &Scope<'k, Block>,
    partial: Shared<'k, f32>,
    at: u32,
    x: Val<'k, f32>,
    f: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>,
) -> Val<'k, f32> {
    let x = w.reduce(x, 32, &f);
    w.when(w.lane().eq(0), |w| partial.store(w, w.thread() / 32 + at, x));
    w.sync();
    (1..WARPS).fold(partial.load(w, at), |sum, i| f(sum, partial.load(w, at + i)))
}
