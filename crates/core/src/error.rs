//! Why a problem or its tensors were refused: the argument, its value, what is allowed, and a way out.

use crate::block::BlockError;
use crate::dtype::DType;
use crate::exp::ExpError;
use crate::expr::ExprError;
use crate::precision::PrecisionError;
use crate::problem::MAX_HEAD_DIM;
use crate::tensor::{Place, TensorError};
use thiserror::Error;

/// Why a problem was refused; the caller can repair the call from the message alone.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// Something that must be said was not.
    #[error("`{arg}` was not given; call ProblemBuilder::{arg}")]
    Missing {
        /// The builder's method.
        arg: &'static str,
    },
    /// A head dimension out of range.
    #[error("`{arg}` is {got}, allowed: 1 to {MAX_HEAD_DIM}; split wider heads")]
    HeadDim {
        /// `head_dim` or `value_dim`.
        arg: &'static str,
        /// The value given.
        got: usize,
    },
    /// Head counts that do not divide.
    #[error(
        "`heads`: {q} query heads over {kv} key/value heads, allowed: at least 1 each, query heads a multiple of key/value heads; repeat or drop heads of q"
    )]
    Heads {
        /// Query heads.
        q: usize,
        /// Key/value heads.
        kv: usize,
    },
    /// Value heads that do not divide.
    #[error(
        "`heads`: {value_heads} value heads over {heads} key heads, allowed: at least 1 each, value heads a multiple of key heads; repeat or drop heads of v"
    )]
    ValueHeads {
        /// Key heads.
        heads: usize,
        /// Value heads.
        value_heads: usize,
    },
    /// A dimension of a state out of range.
    #[error("`{arg}` is {got}, allowed: 1 to {max}; split wider heads")]
    StateDim {
        /// `key_dim` or `value_dim`.
        arg: &'static str,
        /// The value given.
        got: usize,
        /// The largest allowed.
        max: usize,
    },
    /// A scale that is no scale.
    #[error("`scale` is {got}, allowed: finite and above 0; leave it out for 1/sqrt(head_dim)")]
    Scale {
        /// The value given.
        got: f32,
    },
    /// A scale or a softcap so small or so large that products with it leave the range of f32.
    #[error("`{arg}` is {got:e}, allowed: 1e-30 to 1e30; beyond, products leave the range of f32")]
    Extreme {
        /// Which of the two.
        arg: &'static str,
        /// The value given.
        got: f32,
    },
    /// q, k and v of a type that is not floating point.
    #[error("`dtype` is {got}, allowed: f32, f16, bf16; convert q, k and v")]
    DType {
        /// The type given.
        got: DType,
    },
    /// A length beyond what indices can count.
    #[error("`{arg}` is {got}, allowed: below 2^30; split the sequence or the batch")]
    Length {
        /// Which length.
        arg: &'static str,
        /// Its value.
        got: usize,
    },
    /// Numbers of the products that do not fit.
    #[error(transparent)]
    Precision(#[from] PrecisionError),
    /// A tensor too large to exist.
    #[error("`{arg}` of shape {shape:?} overflows the address space; check the sizes")]
    Overflow {
        /// Which tensor.
        arg: &'static str,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A softcap that is no cap.
    #[error("`softcap` is {got}, allowed: finite and above 0; leave it out for none")]
    Softcap {
        /// The value given.
        got: f32,
    },
    /// The same tensor declared twice.
    #[error("`aux`: {name:?} is declared twice; give each auxiliary tensor its own name")]
    AuxTwice {
        /// The name.
        name: String,
    },
    /// A gradient that cannot be.
    #[error("`aux`: {name:?} is {got} and cannot have a gradient; allowed: f32, f16, bf16")]
    AuxGrad {
        /// The name.
        name: String,
        /// Its type.
        got: DType,
    },
    /// A bias axis that does not broadcast.
    #[error("`bias`: axis {axis} is {got}, allowed: 1 or {want}; bias is [batch, heads, q_len, k_len]")]
    BiasShape {
        /// The axis.
        axis: usize,
        /// Its size.
        got: usize,
        /// The size that does not broadcast.
        want: usize,
    },
    /// A number out of range.
    #[error("`{arg}` is {got}, allowed: {allowed}; {hint}")]
    Number {
        /// Which.
        arg: &'static str,
        /// Its value.
        got: usize,
        /// What is allowed.
        allowed: String,
        /// A way out.
        hint: &'static str,
    },
    /// A share out of range.
    #[error("`{arg}` is {got}, allowed: {low} to {high}")]
    Share {
        /// Which.
        arg: &'static str,
        /// Its value.
        got: f32,
        /// The least allowed.
        low: f32,
        /// The most allowed.
        high: f32,
    },
    /// Something that a system around attention does not have.
    #[error("{system} has no {what}; {hint}")]
    Around {
        /// The system.
        system: &'static str,
        /// What it does not have.
        what: &'static str,
        /// A way out.
        hint: &'static str,
    },
    /// Offsets of packed sequences that do not describe any.
    #[error(transparent)]
    Offsets(#[from] OffsetsError),
    /// A block mask of impossible structure.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// A bad modifier or mask.
    #[error(transparent)]
    Expr(#[from] ExprError),
    /// A bad exponential.
    #[error(transparent)]
    Exp(#[from] ExpError),
}

/// Why offsets of packed sequences were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OffsetsError {
    /// The list is empty or does not begin with 0.
    #[error("`{arg}` begins with {got:?}, allowed: 0; offsets are cumulative, batch + 1 of them")]
    Begin {
        /// The list.
        arg: &'static str,
        /// Its first element.
        got: Option<i32>,
    },
    /// A step backwards.
    #[error("`{arg}`[{at}] is {got} after {before}, allowed: not smaller; offsets are cumulative")]
    NotMonotonic {
        /// The list.
        arg: &'static str,
        /// The position.
        at: usize,
        /// The value there.
        got: i32,
        /// The value before it.
        before: i32,
    },
    /// Lists of different lengths.
    #[error("`cu_seqlens_q` has {q} offsets, `cu_seqlens_k` has {k}; allowed: batch + 1 each")]
    Batch {
        /// Offsets for q.
        q: usize,
        /// Offsets for k.
        k: usize,
    },
}

/// Why tensors do not fit a problem.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum InputError {
    /// A NaN or an infinity in a tensor that is quantised.
    #[error(
        "`{arg}`: element {at} is {value}, allowed: finite numbers with precision {precision}; use native, or look for an overflow"
    )]
    NotFinite {
        /// `q`, `k` or `v`.
        arg: &'static str,
        /// Its place in memory.
        at: usize,
        /// Its value.
        value: f64,
        /// The precision asked for.
        precision: String,
    },
    /// A tensor of the wrong shape.
    #[error("`{arg}` has shape {got:?}, allowed: {want:?}; check the sizes given to the problem")]
    Shape {
        /// The tensor.
        arg: String,
        /// Its shape.
        got: Vec<usize>,
        /// The shape the problem says.
        want: Vec<usize>,
    },
    /// A tensor of the wrong type.
    #[error("`{arg}` is {got}, allowed: {want}; convert it or change the problem")]
    DType {
        /// The tensor.
        arg: String,
        /// Its type.
        got: DType,
        /// What is allowed.
        want: &'static str,
    },
    /// A tensor that lies elsewhere than it must.
    #[error("`{arg}` is on {got}, allowed: {want}; move it there")]
    Place {
        /// The tensor.
        arg: String,
        /// Where it lies.
        got: Place,
        /// Where the call needs it.
        want: Place,
    },
    /// A device tensor with gaps that the kernels do not step over.
    #[error("`{arg}` has strides {got:?}, allowed: contiguous; make it contiguous")]
    Strides {
        /// The tensor.
        arg: String,
        /// Its strides.
        got: Vec<usize>,
    },
    /// A last axis with gaps.
    #[error("`{arg}` has stride {got} on its last axis, allowed: 1; make it contiguous there")]
    LastStride {
        /// The tensor.
        arg: &'static str,
        /// The stride.
        got: usize,
    },
    /// A tensor the problem speaks of that was not given.
    #[error("`{arg}` was not given, the problem needs it; {hint}")]
    Missing {
        /// The tensor.
        arg: String,
        /// How to give it.
        hint: &'static str,
    },
    /// A tensor the problem does not know.
    #[error("`{arg}` was given, the problem does not use it; {hint}")]
    Unused {
        /// The tensor.
        arg: String,
        /// How to declare it.
        hint: &'static str,
    },
    /// Offsets that are not cumulative.
    #[error(transparent)]
    Offsets(#[from] OffsetsError),
    /// Offsets that disagree with the problem.
    #[error("`{arg}`: {what} is {got}, allowed: {allowed}; rebuild the problem from these offsets")]
    Total {
        /// The list.
        arg: &'static str,
        /// Total or maximum.
        what: &'static str,
        /// Its value.
        got: usize,
        /// What the problem says.
        allowed: String,
    },
    /// A used length out of range.
    #[error("`{arg}`[{at}] is {got}, allowed: 0 to {max}")]
    Used {
        /// The list.
        arg: &'static str,
        /// The sequence.
        at: usize,
        /// The length given.
        got: i32,
        /// Room in that sequence.
        max: usize,
    },
    /// A modifier that reads outside an auxiliary tensor.
    #[error(
        "`{name}`: axis {axis} is read from {low} to {high}, allowed: 0 to {max}; clamp the index with min and max"
    )]
    AuxIndex {
        /// The tensor.
        name: String,
        /// The axis.
        axis: usize,
        /// Smallest index.
        low: i64,
        /// Largest index.
        high: i64,
        /// Largest index allowed.
        max: i64,
    },
    /// An element that may not be.
    #[error("`{arg}` holds {got} at element {at}, allowed: {allowed}; {hint}")]
    Value {
        /// The tensor.
        arg: &'static str,
        /// Its row-major index.
        at: usize,
        /// The element.
        got: f64,
        /// What is allowed.
        allowed: &'static str,
        /// A way out.
        hint: &'static str,
    },
    /// A block mask of another structure than the problem says.
    #[error("block mask has {got}, the problem says {want}")]
    Blocks {
        /// What it has.
        got: String,
        /// What is wanted.
        want: String,
    },
    /// An output tensor that cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
