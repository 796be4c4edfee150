//! Values: small copyable handles to registers and constants, typed by Rust types. Their operators build instructions.

use super::Builder;
use crate::inst::{Arg, Class, Inst, Reg};
use crate::table::{convert, float, integer, logic};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Rem, Shl, Shr, Sub};

/// A Rust type that a register can hold.
pub trait Word: Copy + 'static {
    /// Class of the register.
    const CLASS: Class;
    /// Name of the type in PTX.
    const NAME: &'static str;
    /// The bits of a constant.
    fn bits(self) -> u64;
}

macro_rules! words {
    ($($t:ty: $class:ident $name:literal $bits:expr;)*) => {
        $(impl Word for $t {
            const CLASS: Class = Class::$class;
            const NAME: &'static str = $name;
            fn bits(self) -> u64 {
                let f: fn($t) -> u64 = $bits;
                f(self)
            }
        })*
    };
}
words! {
    u32: B32 "u32" |x| u64::from(x);
    i32: B32 "s32" |x| u64::from(x as u32);
    u64: B64 "u64" |x| x;
    f32: F32 "f32" |x| u64::from(x.to_bits());
    bool: Pred "pred" |x| u64::from(x);
    f16: B16 "f16" |x| u64::from(x.to_bits());
    bf16: B16 "bf16" |x| u64::from(x.to_bits());
    F32x2: B64 "f32x2" |x| x.0;
    Pair<f16>: B32 "f16x2" |x| u64::from(x.0);
    Pair<bf16>: B32 "bf16x2" |x| u64::from(x.0);
}

/// Two f32 numbers in one register, the first in the low half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct F32x2(u64);

impl F32x2 {
    /// The pair of two numbers.
    pub fn new(numbers: [f32; 2]) -> Self {
        let [low, high] = numbers.map(|x| u64::from(x.to_bits()));
        F32x2(high << 32 | low)
    }
}

/// Two 16-bit floats in one register, the first in the low half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair<T>(u32, PhantomData<T>);

impl<T: Half> Pair<T> {
    /// The pair with these bits.
    pub fn from_bits(bits: u32) -> Self {
        Pair(bits, PhantomData)
    }
}

/// A 16-bit float.
pub trait Half: Word {
    /// Element type in tensor products and tensors.
    const NUMBER: crate::Number;
    /// The number 1.
    const ONE: Self;
}
impl Half for f16 {
    const NUMBER: crate::Number = crate::Number::F16;
    const ONE: f16 = f16::ONE;
}
impl Half for bf16 {
    const NUMBER: crate::Number = crate::Number::Bf16;
    const ONE: bf16 = bf16::ONE;
}

/// Makes a type invariant in the lifetime of its kernel. Otherwise the compiler would shorten the lifetimes of two
/// kernels to a common one, and accept a value of one kernel in the other, where its register means something else.
pub(crate) type Brand<'k> = PhantomData<fn(&'k ()) -> &'k ()>;

/// A register, or a constant that has needed no register so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Src {
    Reg(Reg),
    Imm(u64),
}

/// An immutable value of the kernel under construction. Operators build the instructions that compute new values, and
/// fold constants.
pub struct Val<'k, T> {
    pub(crate) k: &'k Builder,
    pub(crate) src: Src,
    word: PhantomData<T>,
    brand: Brand<'k>,
}

impl<T> Clone for Val<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Val<'_, T> {}

/// A value or a constant, wherever a value is expected.
pub trait IntoVal<'k, T> {
    /// Converts to a value of this kernel.
    fn into_val(self, k: &'k Builder) -> Val<'k, T>;
}
impl<'k, T: Word> IntoVal<'k, T> for Val<'k, T> {
    fn into_val(self, _: &'k Builder) -> Val<'k, T> {
        self
    }
}
impl<'k, T: Word> IntoVal<'k, T> for T {
    fn into_val(self, k: &'k Builder) -> Val<'k, T> {
        Val::new(k, Src::Imm(self.bits()))
    }
}

impl<'k, T: Word> Val<'k, T> {
    /// A constant in this value's kernel.
    pub fn literal(self, x: T) -> Val<'k, T> {
        x.into_val(self.k)
    }
    pub(crate) fn new(k: &'k Builder, src: Src) -> Self {
        Val { k, src, word: PhantomData, brand: PhantomData }
    }
    /// The value, if it is a constant of 32 bits.
    pub(crate) fn known(self) -> Option<u32> {
        match self.src {
            Src::Imm(bits) => u32::try_from(bits).ok(),
            _ => None,
        }
    }
    pub(crate) fn reg(k: &'k Builder, reg: Reg) -> Self {
        Val::new(k, Src::Reg(reg))
    }
    /// A fresh register for a result, and its value.
    pub(crate) fn fresh(k: &'k Builder) -> (Arg, Self) {
        let reg = k.register(T::CLASS);
        (Arg::Reg(reg), Val::reg(k, reg))
    }
    pub(crate) fn arg(self) -> Arg {
        match self.src {
            Src::Reg(reg) => Arg::Reg(reg),
            Src::Imm(bits) => Arg::Imm(bits),
        }
    }
    /// The constant, if it is one.
    pub(crate) fn constant(self) -> Option<u64> {
        match self.src {
            Src::Imm(bits) => Some(bits),
            Src::Reg(_) => None,
        }
    }
    /// A register that holds this value.
    #[track_caller]
    pub(crate) fn in_register(self) -> Reg {
        match self.src {
            Src::Reg(reg) => reg,
            Src::Imm(bits) => {
                let reg = self.k.register(T::CLASS);
                self.k.emit(move_row(T::CLASS), [Arg::Reg(reg), Arg::Imm(bits)]);
                reg
            }
        }
    }
    /// Reinterprets the bits as another type of the same class.
    pub(crate) fn recast<U: Word>(self) -> Val<'k, U> {
        debug_assert_eq!(T::CLASS, U::CLASS);
        Val::new(self.k, self.src)
    }
    /// Builds one instruction whose first operand is the result.
    #[track_caller]
    pub(crate) fn compute<U: Word>(self, inst: &'static Inst, rest: &[Arg]) -> Val<'k, U> {
        let (d, value) = Val::fresh(self.k);
        let all: Vec<Arg> = [d, self.arg()].into_iter().chain(rest.iter().cloned()).collect();
        self.k.emit(inst, all);
        value
    }
}

/// The move instruction of a register class.
pub(crate) fn move_row(class: Class) -> &'static Inst {
    match class {
        Class::Pred => &convert::MOV_PRED,
        Class::F32 => &convert::MOV_F32,
        Class::B64 => &convert::MOV_64,
        Class::B32 => &convert::MOV_32,
        Class::B16 => &convert::MOV_16,
    }
}

/// The folded result, if both operands are constants.
fn fold<T: Word>(a: Val<'_, T>, b: Val<'_, T>, f: impl Fn(u64, u64) -> u64) -> Option<u64> {
    Some(f(a.constant()?, b.constant()?))
}

/// Unsigned division and remainder by a constant power of two, as a shift and a mask. The assembler does not do this by
/// itself and takes twenty instructions.
fn by_power_of_two(row: &Inst, name: &'static str, divisor: Option<u64>) -> Option<(&'static Inst, [Arg; 2])> {
    let divisor = divisor.filter(|d| name == "u32" && d.is_power_of_two())?;
    if std::ptr::eq(row, &integer::DIV) {
        return Some((&logic::SHR, [Arg::Imm(divisor.trailing_zeros().into()), Arg::Word(name)]));
    }
    std::ptr::eq(row, &integer::REM).then(|| (&logic::BITS_32, [Arg::Imm(divisor - 1), Arg::Word("and")]))
}

/// Operators of 32-bit integers, folded if both operands are constants or one is the identity.
macro_rules! integer_operator {
    ($trait:ident $method:ident $t:ty, $row:expr, $fold:expr, $identity:expr) => {
        impl<'k, R: IntoVal<'k, $t>> $trait<R> for Val<'k, $t> {
            type Output = Val<'k, $t>;
            #[track_caller]
            fn $method(self, other: R) -> Self::Output {
                let other = other.into_val(self.k);
                let f: fn($t, $t) -> $t = $fold;
                if let Some(bits) = fold(self, other, |a, b| f(a as $t, b as $t) as u32 as u64) {
                    return Val::new(self.k, Src::Imm(bits));
                }
                let identity: Option<$t> = $identity;
                if identity.is_some() && other.constant() == identity.map(Word::bits) {
                    return self;
                }
                if let Some((row, args)) = by_power_of_two($row, <$t as Word>::NAME, other.constant()) {
                    return self.compute(row, &args);
                }
                self.compute($row, &[other.arg(), Arg::Word(<$t as Word>::NAME)])
            }
        }
    };
}
macro_rules! integer_operators {
    ($($t:ty),*) => {
        $(
            integer_operator!(Add add $t, &integer::ADD, |a, b| a.wrapping_add(b), Some(0));
            integer_operator!(Sub sub $t, &integer::SUB, |a, b| a.wrapping_sub(b), Some(0));
            integer_operator!(Mul mul $t, &integer::MUL, |a, b| a.wrapping_mul(b), Some(1));
            integer_operator!(Div div $t, &integer::DIV, |a, b| if b == 0 { !0 } else { a.wrapping_div(b) }, Some(1));
            integer_operator!(Rem rem $t, &integer::REM, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }, None);
            integer_operator!(Shr shr $t, &logic::SHR, |a, b| a.checked_shr(b as u32).unwrap_or((a >> 16) >> 16), Some(0));

            impl<'k, R: IntoVal<'k, $t>> Shl<R> for Val<'k, $t> {
                type Output = Val<'k, $t>;
                #[track_caller]
                fn shl(self, other: R) -> Self::Output {
                    let other = other.into_val(self.k);
                    match fold(self, other, |a, b| u64::from((a as u32).checked_shl(b as u32).unwrap_or(0))) {
                        Some(bits) => Val::new(self.k, Src::Imm(bits)),
                        None if other.constant() == Some(0) => self,
                        None => self.compute(&logic::SHL, &[other.arg()]),
                    }
                }
            }

            impl<'k> Val<'k, $t> {
                /// The smaller of both.
                #[track_caller]
                pub fn min(self, other: impl IntoVal<'k, $t>) -> Self {
                    let other = other.into_val(self.k);
                    self.compute(&integer::MIN, &[other.arg(), Arg::Word(<$t as Word>::NAME)])
                }
                /// The larger of both.
                #[track_caller]
                pub fn max(self, other: impl IntoVal<'k, $t>) -> Self {
                    let other = other.into_val(self.k);
                    self.compute(&integer::MAX, &[other.arg(), Arg::Word(<$t as Word>::NAME)])
                }
                /// self * b + c.
                #[track_caller]
                pub fn mul_add(self, b: impl IntoVal<'k, $t>, c: impl IntoVal<'k, $t>) -> Self {
                    let (b, c) = (b.into_val(self.k), c.into_val(self.k));
                    if self.constant().is_some() || b.constant() == Some(1) || c.constant() == Some(0) {
                        return self * b + c;
                    }
                    self.compute(&integer::MAD, &[b.arg(), c.arg(), Arg::Word(<$t as Word>::NAME)])
                }
                /// Converts to the nearest float.
                #[track_caller]
                pub fn to_f32(self) -> Val<'k, f32> {
                    self.compute(&convert::CVT_F32_INT, &[Arg::Word(<$t as Word>::NAME)])
                }
                #[track_caller]
                fn compare(self, order: &'static str, other: impl IntoVal<'k, $t>) -> Val<'k, bool> {
                    let other = other.into_val(self.k);
                    // The first operand of a comparison must be a register.
                    let own = Val::<$t>::reg(self.k, self.in_register());
                    own.compute(&logic::SETP, &[other.arg(), Arg::Word(order), Arg::Word(<$t as Word>::NAME)])
                }
            }
        )*
    };
}
integer_operators!(u32, i32);

/// Comparisons of every number type.
macro_rules! comparisons {
    ($($t:ty),*) => {
        $(impl<'k> Val<'k, $t> {
            /// self == other.
            #[track_caller]
            pub fn eq(self, other: impl IntoVal<'k, $t>) -> Val<'k, bool> {
                self.compare("eq", other)
            }
            /// self != other.
            #[track_caller]
            pub fn ne(self, other: impl IntoVal<'k, $t>) -> Val<'k, bool> {
                self.compare("ne", other)
            }
            /// self < other.
            #[track_caller]
            pub fn lt(self, other: impl IntoVal<'k, $t>) -> Val<'k, bool> {
                self.compare("lt", other)
            }
            /// self <= other.
            #[track_caller]
            pub fn le(self, other: impl IntoVal<'k, $t>) -> Val<'k, bool> {
                self.compare("le", other)
            }
            /// self > other.
            #[track_caller]
            pub fn gt(self, other: impl IntoVal<'k, $t>) -> Val<'k, bool> {
                self.compare("gt", other)
            }
            /// self >= other.
            #[track_caller]
            pub fn ge(self, other: impl IntoVal<'k, $t>) -> Val<'k, bool> {
                self.compare("ge", other)
            }
        })*
    };
}
comparisons!(u32, i32, f32, u64);

/// Bitwise operators.
macro_rules! bitwise {
    ($($trait:ident $method:ident $word:literal $op:tt;)*) => {
        $(
            bitwise!(@one $trait $method $word $op, u32, &logic::BITS_32);
            bitwise!(@one $trait $method $word $op, i32, &logic::BITS_32);
            bitwise!(@one $trait $method $word $op, u64, &logic::BITS_64);
            bitwise!(@one $trait $method $word $op, bool, &logic::BITS_PRED);
        )*
    };
    (@one $trait:ident $method:ident $word:literal $op:tt, $t:ty, $row:expr) => {
        impl<'k, R: IntoVal<'k, $t>> $trait<R> for Val<'k, $t> {
            type Output = Val<'k, $t>;
            #[track_caller]
            fn $method(self, other: R) -> Self::Output {
                let other = other.into_val(self.k);
                match fold(self, other, |a, b| a $op b) {
                    Some(bits) => Val::new(self.k, Src::Imm(bits)),
                    None if $word != "and" && other.constant() == Some(0) => self,
                    None => self.compute($row, &[other.arg(), Arg::Word($word)]),
                }
            }
        }
    };
}
bitwise! {
    BitAnd bitand "and" &;
    BitOr bitor "or" |;
    BitXor bitxor "xor" ^;
}

impl<'k> Not for Val<'k, bool> {
    type Output = Val<'k, bool>;
    #[track_caller]
    fn not(self) -> Self::Output {
        match self.constant() {
            Some(bits) => Val::new(self.k, Src::Imm(bits ^ 1)),
            None => self.compute(&logic::NOT_PRED, &[]),
        }
    }
}

impl<'k> Val<'k, bool> {
    /// `a` where the predicate holds, else `b`.
    #[track_caller]
    pub fn select<T: Word>(self, a: impl IntoVal<'k, T>, b: impl IntoVal<'k, T>) -> Val<'k, T> {
        let (a, b) = (a.into_val(self.k), b.into_val(self.k));
        match self.constant() {
            Some(1) => a,
            Some(_) => b,
            None => {
                let row = match T::CLASS {
                    Class::F32 => &logic::SELP_F32,
                    Class::B64 => &logic::SELP_64,
                    Class::B16 => &logic::SELP_16,
                    _ => &logic::SELP_32,
                };
                a.compute(row, &[b.arg(), self.arg()])
            }
        }
    }
}

impl<'k> Val<'k, u32> {
    /// Reinterprets the bits as a signed number.
    pub fn to_i32(self) -> Val<'k, i32> {
        self.recast()
    }
    /// Zero-extends to 64 bits.
    #[track_caller]
    pub fn to_u64(self) -> Val<'k, u64> {
        match self.constant() {
            Some(bits) => Val::new(self.k, Src::Imm(bits)),
            None => self.compute(&convert::CVT_64, &[Arg::Word("u64"), Arg::Word("u32")]),
        }
    }
    /// The 64-bit product self * other.
    #[track_caller]
    pub fn mul_wide(self, other: impl IntoVal<'k, u32>) -> Val<'k, u64> {
        let other = other.into_val(self.k);
        match fold(self, other, |a, b| a * b) {
            Some(bits) => Val::new(self.k, Src::Imm(bits)),
            None => self.compute(&integer::MUL_WIDE, &[other.arg(), Arg::Word("u32")]),
        }
    }
    /// The high 32 bits of self * other.
    #[track_caller]
    pub fn mul_high(self, other: impl IntoVal<'k, u32>) -> Val<'k, u32> {
        let other = other.into_val(self.k);
        self.compute(&integer::MUL_HIGH, &[other.arg(), Arg::Word("u32")])
    }
    /// Reinterprets the bits as a float.
    #[track_caller]
    pub fn to_f32_bits(self) -> Val<'k, f32> {
        self.compute(&convert::F32_OF_BITS, &[])
    }
    /// Number of bits that are set.
    #[track_caller]
    pub fn count_ones(self) -> Self {
        self.compute(&integer::POPC, &[])
    }
    /// Any bitwise function of three numbers; `lut` is its truth table.
    #[track_caller]
    pub fn lop3(self, b: impl IntoVal<'k, u32>, c: impl IntoVal<'k, u32>, lut: u8) -> Self {
        let (b, c) = (b.into_val(self.k), c.into_val(self.k));
        self.compute(&logic::LOP3, &[b.arg(), c.arg(), Arg::Imm(lut.into())])
    }
    /// Bytes of self and `other`, selected by the nibbles of `selector`.
    #[track_caller]
    pub fn permute(self, other: impl IntoVal<'k, u32>, selector: u32) -> Self {
        let other = other.into_val(self.k);
        self.compute(&logic::PRMT, &[other.arg(), Arg::Imm(selector.into())])
    }
}

impl<'k> Val<'k, i32> {
    /// Reinterprets the bits as an unsigned number.
    pub fn to_u32(self) -> Val<'k, u32> {
        self.recast()
    }
}

impl<'k> Val<'k, u64> {
    #[track_caller]
    fn compare(self, order: &'static str, other: impl IntoVal<'k, u64>) -> Val<'k, bool> {
        let other = other.into_val(self.k);
        self.compute(&logic::SETP_64, &[other.arg(), Arg::Word(order)])
    }
    /// The low 32 bits.
    #[track_caller]
    pub fn to_u32(self) -> Val<'k, u32> {
        self.compute(&convert::CVT_32, &[])
    }
    /// The low 64 bits of self * other.
    #[track_caller]
    pub fn mul_wide_64(self, other: impl IntoVal<'k, u64>) -> Val<'k, u64> {
        let other = other.into_val(self.k);
        self.compute(&integer::MUL_64, &[other.arg(), Arg::Word("u64")])
    }
}

impl<'k, R: IntoVal<'k, u64>> Add<R> for Val<'k, u64> {
    type Output = Val<'k, u64>;
    #[track_caller]
    fn add(self, other: R) -> Self::Output {
        let other = other.into_val(self.k);
        match fold(self, other, u64::wrapping_add) {
            Some(bits) => Val::new(self.k, Src::Imm(bits)),
            None if other.constant() == Some(0) => self,
            None => self.compute(&integer::ADD_WIDE, &[other.arg(), Arg::Word("u64")]),
        }
    }
}

/// Operators of floats.
macro_rules! float_operators {
    ($($trait:ident $method:ident $row:expr;)*) => {
        $(impl<'k, R: IntoVal<'k, f32>> $trait<R> for Val<'k, f32> {
            type Output = Val<'k, f32>;
            #[track_caller]
            fn $method(self, other: R) -> Self::Output {
                let other = other.into_val(self.k);
                self.compute($row, &[other.arg()])
            }
        })*
    };
}
float_operators! {
    Add add &float::ADD;
    Sub sub &float::SUB;
    Mul mul &float::MUL;
    Div div &float::DIV;
}

impl<'k> Neg for Val<'k, f32> {
    type Output = Val<'k, f32>;
    #[track_caller]
    fn neg(self) -> Self::Output {
        self.compute(&float::NEG, &[])
    }
}

/// Functions of one float.
macro_rules! float_functions {
    ($($(#[$doc:meta])* $name:ident $row:expr;)*) => {
        impl<'k> Val<'k, f32> {
            $($(#[$doc])* #[track_caller] pub fn $name(self) -> Self { self.compute($row, &[]) })*
        }
    };
}
float_functions! {
    /// 2^self, within two units in the last place.
    exp2 &float::EX2;
    /// log2(self).
    log2 &float::LG2;
    /// 1 / self.
    recip &float::RCP;
    /// 1 / sqrt(self).
    rsqrt &float::RSQRT;
    /// sqrt(self).
    sqrt &float::SQRT;
    /// tanh(self), with a relative error of 2^-11.
    tanh &float::TANH;
    /// |self|.
    abs &float::ABS;
    /// Rounds down to an integer.
    floor &convert::FLOOR;
}

impl<'k> Val<'k, f32> {
    #[track_caller]
    fn compare(self, order: &'static str, other: impl IntoVal<'k, f32>) -> Val<'k, bool> {
        let other = other.into_val(self.k);
        self.compute(&logic::SETP_F32, &[other.arg(), Arg::Word(order)])
    }
    /// self * b + c, rounded once.
    #[track_caller]
    pub fn mul_add(self, b: impl IntoVal<'k, f32>, c: impl IntoVal<'k, f32>) -> Self {
        let (b, c) = (b.into_val(self.k), c.into_val(self.k));
        self.compute(&float::FMA, &[b.arg(), c.arg()])
    }
    /// self + other, rounded down.
    #[track_caller]
    pub fn add_down(self, other: impl IntoVal<'k, f32>) -> Self {
        let other = other.into_val(self.k);
        self.compute(&float::ADD_DOWN, &[other.arg()])
    }
    /// The larger of both; a NaN operand is ignored.
    #[track_caller]
    pub fn max(self, other: impl IntoVal<'k, f32>) -> Self {
        let other = other.into_val(self.k);
        self.compute(&float::MAX, &[other.arg()])
    }
    /// The smaller of both; a NaN operand is ignored.
    #[track_caller]
    pub fn min(self, other: impl IntoVal<'k, f32>) -> Self {
        let other = other.into_val(self.k);
        self.compute(&float::MIN, &[other.arg()])
    }
    /// Reinterprets the bits as an integer.
    #[track_caller]
    pub fn to_bits(self) -> Val<'k, u32> {
        self.compute(&convert::BITS_OF_F32, &[])
    }
    /// Truncates to an integer.
    #[track_caller]
    pub fn to_i32(self) -> Val<'k, i32> {
        self.compute(&convert::CVT_S32_F32, &[])
    }
    /// Rounds to a 16-bit float.
    #[track_caller]
    pub fn to_half<T: Half>(self) -> Val<'k, T> {
        self.compute(&convert::CVT_HALF, &[Arg::Word(T::NAME)])
    }
    /// A pair of self (low half) and `high`, each rounded to 16 bits.
    #[track_caller]
    pub fn pair_with<T: Half>(self, high: impl IntoVal<'k, f32>) -> Val<'k, Pair<T>>
    where
        Pair<T>: Word,
    {
        let high = high.into_val(self.k);
        high.compute(&convert::CVT_PAIR, &[self.arg(), Arg::Word(<Pair<T> as Word>::NAME)])
    }
}

impl<'k, T: Half> Val<'k, T> {
    /// Converts to f32, exactly.
    #[track_caller]
    pub fn widen(self) -> Val<'k, f32> {
        // No instruction takes a 16-bit constant, so it needs a register.
        let own = Val::<T>::reg(self.k, self.in_register());
        own.compute(&convert::CVT_WIDEN, &[Arg::Word(T::NAME)])
    }

    /// A pair with self in the low half.
    #[track_caller]
    pub fn join(self, high: Val<'k, T>) -> Val<'k, Pair<T>>
    where
        Pair<T>: Word,
    {
        let (d, pair) = Val::fresh(self.k);
        self.k.emit(&convert::JOIN_32, [d, Arg::List([self.in_register(), high.in_register()].into())]);
        pair
    }
}

impl<'k, T: Half> Val<'k, Pair<T>>
where
    Pair<T>: Word,
{
    /// Both elements, low half first.
    #[track_caller]
    pub fn split(self) -> [Val<'k, T>; 2] {
        let halves = [self.k.register(Class::B16), self.k.register(Class::B16)];
        self.k.emit(&convert::SPLIT_32, [Arg::List(halves.into()), self.arg()]);
        halves.map(|reg| Val::reg(self.k, reg))
    }
}

/// A mutable register, for values that a loop carries.
pub struct Var<'k, T> {
    k: &'k Builder,
    reg: Reg,
    word: PhantomData<T>,
    brand: Brand<'k>,
}

impl<T> Clone for Var<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Var<'_, T> {}

impl<'k, T: Word> Var<'k, T> {
    #[track_caller]
    pub(crate) fn new(k: &'k Builder, start: impl IntoVal<'k, T>) -> Self {
        let var = Var::of(k, k.register(T::CLASS));
        var.set(start);
        var
    }
    pub(crate) fn of(k: &'k Builder, reg: Reg) -> Self {
        Var { k, reg, word: PhantomData, brand: PhantomData }
    }
    /// The current value; later writes do not change it.
    #[track_caller]
    pub fn get(self) -> Val<'k, T> {
        self.now().compute(move_row(T::CLASS), &[])
    }
    /// The register itself, for an instruction that reads it before the next write.
    pub(crate) fn now(self) -> Val<'k, T> {
        Val::reg(self.k, self.reg)
    }
    /// Overwrites the value.
    #[track_caller]
    pub fn set(self, value: impl IntoVal<'k, T>) {
        let value = value.into_val(self.k);
        self.k.emit(move_row(T::CLASS), [Arg::Reg(self.reg), value.arg()]);
    }
}
