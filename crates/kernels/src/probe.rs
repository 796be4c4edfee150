//! One product of the tensor cores: D = C + A B with 64 rows, 64 columns and 16 terms, C and D in f32.
//!
//! The kernel rounds nothing afterwards, so D shows how the hardware accumulates.

use crate::params::Program;
use fulgurite_ptx::device::{Span, TensorSpan};
use fulgurite_ptx::{Acc, BuildError, Half, Kernel, Major, Pair, Sum, Target, TileShape, Warpgroups, Word};

/// Rows of A, B and D, and columns of D.
pub const SIZE: u32 = 64;
/// Terms of each sum.
pub const TERMS: u32 = 16;

/// Operands and results in device memory, one product per CTA.
#[derive(Debug, Clone)]
pub struct ProbeCall {
    /// `[blocks][64][16]`.
    pub a: TensorSpan,
    /// `[blocks][64][16]`.
    pub b: TensorSpan,
    /// `[blocks][64][64]`.
    pub c: Span,
    /// `[blocks][64][64]`.
    pub d: Span,
}

/// D = C + A B, one product per CTA.
pub fn kernel<T: Half>(target: Target) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(program::<T>(target)?.into_kernel())
}

/// [`kernel`] with its launch arguments.
pub fn program<T: Half>(target: Target) -> Result<Program<ProbeCall>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("probe", target, |p| {
        let k = p.builder();
        let shape = TileShape::new(T::NUMBER, SIZE, TERMS);
        let a = p.tensor("a", shape, 2, |call: &ProbeCall| call.a.clone());
        let b = p.tensor("b", shape, 2, |call| call.b.clone());
        let c = p.pointer::<f32>("c", |call| call.c);
        let d = p.pointer::<f32>("d", |call| call.d);
        let operands = k.pipe("operands", 1, &[shape, shape]);
        k.role("load", Warpgroups(1), |w| {
            w.one_thread(|t| {
                let at = [t.constant(0u32), t.cta() * SIZE];
                operands.put(t, |t, stage| {
                    stage.load(t, stage.tile(0), &a, &at);
                    stage.load(t, stage.tile(1), &b, &at);
                });
            });
        });
        k.role("multiply", Warpgroups(1), |w| {
            let acc = w.accumulators(SIZE);
            let first = (w.cta() * SIZE + w.first_row()).mul_add(SIZE, w.first_col());
            let place = |i: usize| first + (8 * Acc::row_of(i) as u32 * SIZE + Acc::col_of(i));
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
