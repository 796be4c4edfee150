//! Two f32 numbers in one register, on which one instruction operates, on Blackwell.

use super::scope::{Scope, Who};
use super::value::{F32x2, Val};
use crate::inst::Arg;
use crate::table::{convert, float};
use std::ops::{Add, Mul};

impl<'k, W: Who> Scope<'k, W> {
    /// Number of f32 numbers that an instruction adds or multiplies: 2 on architectures with [`F32x2`], else 1.
    pub fn float_width(&self) -> usize {
        if self.k.target().arch.f32x2 { 2 } else { 1 }
    }
}

impl<'k> Val<'k, f32> {
    /// This number and another in one register.
    #[track_caller]
    pub fn beside(self, second: Val<'k, f32>) -> Val<'k, F32x2> {
        let (d, both) = Val::fresh(self.k);
        self.k.emit(&convert::JOIN_F32, [d, Arg::List([self.in_register(), second.in_register()].into())]);
        both
    }

    /// The largest of three; a NaN operand is ignored. The assembler also makes one instruction of two comparisons.
    #[track_caller]
    pub fn max3(self, b: Val<'k, f32>, c: Val<'k, f32>) -> Val<'k, f32> {
        self.compute(&float::MAX3, &[b.arg(), c.arg()])
    }
}

impl<'k> Val<'k, F32x2> {
    /// The two numbers.
    #[track_caller]
    pub fn numbers(self) -> [Val<'k, f32>; 2] {
        let [(_, low), (_, high)] = [Val::<f32>::fresh(self.k), Val::fresh(self.k)];
        let both = Arg::List([low.in_register(), high.in_register()].into());
        self.k.emit(&convert::SPLIT_F32, [both, Arg::Reg(self.in_register())]);
        [low, high]
    }

    /// self * b + c, each rounded once.
    #[track_caller]
    pub fn mul_add(self, b: Val<'k, F32x2>, c: Val<'k, F32x2>) -> Self {
        self.compute(&float::FMA_F32X2, &[Arg::Reg(b.in_register()), Arg::Reg(c.in_register())])
    }
}

impl<'k> Add for Val<'k, F32x2> {
    type Output = Self;
    #[track_caller]
    fn add(self, other: Self) -> Self {
        self.compute(&float::ADD_F32X2, &[Arg::Reg(other.in_register())])
    }
}

/// Do not add to the products, but use [`mul_add`](Val::mul_add): ptxas 13.0.88 fuses a product of two pairs with an
/// addition that alone uses it, and then rounds once.
impl<'k> Mul for Val<'k, F32x2> {
    type Output = Self;
    #[track_caller]
    fn mul(self, other: Self) -> Self {
        self.compute(&float::MUL_F32X2, &[Arg::Reg(other.in_register())])
    }
}
