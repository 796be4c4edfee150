//! Products of a warpgroup (`wgmma`).

use crate::accumulators::{Acc, Fragment, Sum};
use crate::build::{Group, Half, Pair, Scope, Word};
use crate::inst::{Arg, Inst};
use crate::mma::{AccNumber, accumulates};
use crate::product::{Major, Number};
use crate::table::{sync, tensor};
use crate::tile::TileOperand;

impl<'k> Scope<'k, Group> {
    /// Starts acc (+)= a b as one group, with `a` in registers. `between` is called before each step of the product,
    /// with the number of remaining steps.
    #[track_caller]
    pub fn multiply_fragment<T: Half>(
        &self,
        acc: &Acc<'k>,
        a: &Fragment<'k, T>,
        b: TileOperand<'k>,
        sum: Sum<'k>,
        between: impl Fn(u32),
    ) where
        Pair<T>: Word,
    {
        let (k, number) = (self.k, T::NUMBER);
        if (a.cols(), acc.cols) != (b.inner(), b.outer()) || b.tile().shape().number != number {
            let what = format!(
                "{} 64x{} times {:?} {}x{} into 64x{}",
                T::NAME,
                a.cols(),
                b.tile().shape().number,
                b.inner(),
                b.outer(),
                acc.cols
            );
            k.refuse(format!("a product of {what}, allowed: equal inner sizes and types, matching columns"));
            return;
        }
        let steps = b.descriptors();
        self.plain(&sync::WGMMA_FENCE);
        let count = steps.len() as u32;
        for (j, b_step) in steps.into_iter().enumerate() {
            between(count - j as u32);
            let args = [
                Arg::List(acc.regs.as_slice().into()),
                Arg::List(a.regs()[4 * j..4 * j + 4].into()),
                Arg::Reg(b_step),
                sum.at(j),
                Arg::Imm(acc.cols.into()),
                Arg::Word(number.name()),
                b.transposed(),
            ];
            k.emit(&tensor::WGMMA_RS, args);
        }
        self.plain(&sync::WGMMA_COMMIT);
    }

    /// Starts acc (+)= a b as one group: 64 rows of `a` and all columns of `b`. Elements are f16, bf16, tf32, e4m3 or
    /// e5m2 with f32 accumulators, or s8 or u8 with i32. Only 16-bit elements may have the summed dimension across the
    /// rows of a tile.
    #[track_caller]
    pub fn multiply<N: AccNumber>(&self, acc: &Acc<'k, N>, a: TileOperand<'k>, b: TileOperand<'k>, sum: Sum<'k>) {
        let (k, number) = (self.k, a.tile().shape().number);
        let floats = [Number::E4m3, Number::E5m2];
        let pairs =
            number == b.tile().shape().number || [number, b.tile().shape().number].iter().all(|n| floats.contains(n));
        if (a.outer(), a.inner(), b.outer()) != (64, b.inner(), acc.cols) || !pairs {
            let what = format!(
                "{number:?} {}x{} times {:?} {}x{} into 64x{}",
                a.outer(),
                a.inner(),
                b.tile().shape().number,
                b.inner(),
                b.outer(),
                acc.cols
            );
            k.refuse(format!("a product of {what}, allowed: 64 rows, equal inner sizes and types, matching columns"));
            return;
        }
        if matches!(number, Number::F32 | Number::S32) || accumulates(number) != N::NUMBER {
            k.refuse(format!(
                "a product of {number:?} into {:?}, allowed: F16, Bf16, Tf32, E4m3 and E5m2 into F32, S8 and U8 into S32",
                N::NUMBER
            ));
            return;
        }
        let inner = [a, b].iter().all(|operand| operand.major() == Major::Inner);
        if number.bytes() != 2 && !inner {
            k.refuse(format!(
                "a product of {number:?} summed over rows of a tile, allowed: along them ([k] contiguous)"
            ));
            return;
        }
        let (inst, end): (&'static Inst, Vec<Arg>) = match number {
            Number::Tf32 => (&tensor::WGMMA_TF32, vec![]),
            Number::E4m3 | Number::E5m2 => {
                (&tensor::WGMMA_FP8, [a, b].map(|operand| Arg::Word(operand.tile().shape().number.name())).to_vec())
            }
            Number::S8 | Number::U8 => (&tensor::WGMMA_INT8, vec![Arg::Word(number.name()), Arg::Word("")]),
            _ => (&tensor::WGMMA_SS, vec![Arg::Word(number.name()), a.transposed(), b.transposed()]),
        };
        let steps = a.descriptors().into_iter().zip(b.descriptors());
        self.plain(&sync::WGMMA_FENCE);
        for (j, (a_step, b_step)) in steps.enumerate() {
            let (a_step, b_step) = (Arg::Reg(a_step), Arg::Reg(b_step));
            let all = [Arg::List(acc.regs.as_slice().into()), a_step, b_step, sum.at(j), Arg::Imm(acc.cols.into())];
            k.emit(inst, all.into_iter().chain(end.iter().cloned()).collect::<Vec<Arg>>());
        }
        self.plain(&sync::WGMMA_COMMIT);
    }
}
