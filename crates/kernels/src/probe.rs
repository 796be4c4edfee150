//! One product of the tensor cores as it comes: D = C + A B with 64 rows, 64 columns and 16 terms, C and D in f32.
//!
//! Nothing is rounded afterwards, so D tells how the hardware adds.

use fulgurite_ptx::{BuildError, Half, Kernel, Major, Pair, Sum, Target, TileShape, Warpgroups, Word};

/// Rows of A and of D, rows of B as it is stored, and columns of D.
pub const SIZE: u32 = 64;
/// Products of a sum.
pub const TERMS: u32 = 16;

/// A is `[blocks][64][16]`, B `[blocks][64][16]`, C and D are `[blocks][64][64]`.
pub fn kernel<T: Half>(target: Target) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("probe", target, |k| {
        let shape = TileShape::new(T::NUMBER, SIZE, TERMS);
        let (a, b) = (k.tensor("a", shape, 2), k.tensor("b", shape, 2));
        let (c, d) = (k.pointer::<f32>("c"), k.pointer::<f32>("d"));
        let operands = k.pipe("operands", 1, &[shape, shape]);
        k.role("load", Warpgroups(1), |w| {
            w.one_thread(|t| {
                let at = [t.constant(0u32), t.block() * SIZE];
                operands.put(t, |t, stage| {
                    stage.load(t, stage.tile(0), &a, &at);
                    stage.load(t, stage.tile(1), &b, &at);
                });
            });
        });
        k.role("multiply", Warpgroups(1), |w| {
            let acc = w.accumulators(SIZE);
            let first = (w.block() * SIZE + w.first_row()).mul_add(SIZE, w.first_col());
            let place =
                |i: usize| first + (8 * fulgurite_ptx::Acc::row_of(i) as u32 * SIZE + fulgurite_ptx::Acc::col_of(i));
            for i in 0..acc.elements().count() {
                acc.set(i, c.load(w, place(i)));
            }
            let stage = operands.wait(w);
            w.multiply(&acc, stage[0].operand(Major::Inner), stage[1].operand(Major::Inner), Sum::Onto);
            w.wait_products(0);
            operands.done(w);
            for (i, x) in acc.elements().enumerate() {
                d.store(w, place(i), x);
            }
        });
    })
}
