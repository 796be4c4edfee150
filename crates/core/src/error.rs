//! Errors of problems and their tensors: the argument, its value, the allowed values, and a remedy.

use crate::block::BlockError;
use crate::dtype::DType;
use crate::exp::ExpError;
use crate::expr::ExprError;
use crate::limits::MAX_HEAD_DIM;
use crate::precision::PrecisionError;
use crate::tensor::{Place, TensorError};
use thiserror::Error;

/// The reason why a problem was rejected. The message alone tells the caller how to fix the call.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// A required argument is missing.
    #[error("`{arg}` was not given; call ProblemBuilder::{arg}")]
    Missing {
        /// Name of the builder's method.
        arg: &'static str,
    },
    /// A head dimension is out of range.
    #[error("`{arg}` is {got}, allowed: 1 to {MAX_HEAD_DIM}; split wider heads")]
    HeadDim {
        /// `head_dim` or `value_dim`.
        arg: &'static str,
        /// Value that was given.
        got: usize,
    },
    /// Query heads are not a multiple of key/value heads.
    #[error(
        "`heads`: {q} query heads over {kv} key/value heads, allowed: at least 1 each, query heads a multiple of key/value heads; repeat or drop heads of q"
    )]
    Heads {
        /// Query heads.
        q: usize,
        /// Key/value heads.
        kv: usize,
    },
    /// Value heads are not a multiple of key heads.
    #[error(
        "`heads`: {value_heads} value heads over {heads} key heads, allowed: at least 1 each, value heads a multiple of key heads; repeat or drop heads of v"
    )]
    ValueHeads {
        /// Key heads.
        heads: usize,
        /// Value heads.
        value_heads: usize,
    },
    /// A dimension of a state is out of range.
    #[error("`{arg}` is {got}, allowed: 1 to {max}; split wider heads")]
    StateDim {
        /// `key_dim` or `value_dim`.
        arg: &'static str,
        /// Value that was given.
        got: usize,
        /// Largest allowed value.
        max: usize,
    },
    /// The scale is not finite and positive.
    #[error("`scale` is {got}, allowed: finite and above 0; leave it out for 1/sqrt(head_dim)")]
    Scale {
        /// Value that was given.
        got: f32,
    },
    /// A scale or a softcap is so small or so large that products with it leave the range of f32.
    #[error("`{arg}` is {got:e}, allowed: 1e-30 to 1e30; beyond, products leave the range of f32")]
    Extreme {
        /// `scale` or `softcap`.
        arg: &'static str,
        /// Value that was given.
        got: f32,
    },
    /// The type of q, k and v is not floating point.
    #[error("`dtype` is {got}, allowed: f32, f16, bf16; convert q, k and v")]
    DType {
        /// The type given.
        got: DType,
    },
    /// A length is too large for the indices.
    #[error("`{arg}` is {got}, allowed: below 2^30; split the sequence or the batch")]
    Length {
        /// Name of the length.
        arg: &'static str,
        /// Value of the argument.
        got: usize,
    },
    /// The precision of the products does not fit the problem.
    #[error(transparent)]
    Precision(#[from] PrecisionError),
    /// A tensor is too large for the address space.
    #[error("`{arg}` of shape {shape:?} overflows the address space; check the sizes")]
    Overflow {
        /// Name of the tensor.
        arg: &'static str,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// The softcap is not finite and positive.
    #[error("`softcap` is {got}, allowed: finite and above 0; leave it out for none")]
    Softcap {
        /// Value that was given.
        got: f32,
    },
    /// Two auxiliary tensors have the same name.
    #[error("`aux`: {name:?} is declared twice; give each auxiliary tensor its own name")]
    AuxTwice {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor of this type cannot have a gradient.
    #[error("`aux`: {name:?} is {got} and cannot have a gradient; allowed: f32, f16, bf16")]
    AuxGrad {
        /// Name of the tensor.
        name: String,
        /// Type of the tensor.
        got: DType,
    },
    /// A bias axis does not broadcast.
    #[error("`bias`: axis {axis} is {got}, allowed: 1 or {want}; bias is [batch, heads, q_len, k_len]")]
    BiasShape {
        /// Index of the axis.
        axis: usize,
        /// Its size.
        got: usize,
        /// Size to which it should broadcast.
        want: usize,
    },
    /// A number is out of range.
    #[error("`{arg}` is {got}, allowed: {allowed}; {hint}")]
    Number {
        /// Name of the argument.
        arg: &'static str,
        /// Value of the argument.
        got: usize,
        /// Allowed values.
        allowed: String,
        /// A remedy.
        hint: &'static str,
    },
    /// A fraction is out of range.
    #[error("`{arg}` is {got}, allowed: {low} to {high}")]
    Share {
        /// Name of the argument.
        arg: &'static str,
        /// Value of the argument.
        got: f32,
        /// Smallest allowed value.
        low: f32,
        /// Largest allowed value.
        high: f32,
    },
    /// A variant of attention does not support a feature.
    #[error("{system} has no {what}; {hint}")]
    Around {
        /// Name of the variant.
        system: &'static str,
        /// The feature that it lacks.
        what: &'static str,
        /// A remedy.
        hint: &'static str,
    },
    /// Offsets of packed sequences are invalid.
    #[error(transparent)]
    Offsets(#[from] OffsetsError),
    /// The structure of a block mask is invalid.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// A modifier or mask is invalid.
    #[error(transparent)]
    Expr(#[from] ExprError),
    /// The exponential is invalid.
    #[error(transparent)]
    Exp(#[from] ExpError),
}

/// The reason why offsets of packed sequences were rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OffsetsError {
    /// The list is empty or does not start with 0.
    #[error("`{arg}` begins with {got:?}, allowed: 0; offsets are cumulative, batch + 1 of them")]
    Begin {
        /// Name of the list.
        arg: &'static str,
        /// Its first element.
        got: Option<i32>,
    },
    /// An offset is smaller than the one before.
    #[error("`{arg}`[{at}] is {got} after {before}, allowed: not smaller; offsets are cumulative")]
    NotMonotonic {
        /// Name of the list.
        arg: &'static str,
        /// Index of the offset.
        at: usize,
        /// The value there.
        got: i32,
        /// The value before it.
        before: i32,
    },
    /// The lists have different lengths.
    #[error("`cu_seqlens_q` has {q} offsets, `cu_seqlens_k` has {k}; allowed: batch + 1 each")]
    Batch {
        /// Number of offsets for q.
        q: usize,
        /// Number of offsets for k.
        k: usize,
    },
}

/// The reason why tensors do not fit a problem.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum InputError {
    /// A tensor that is quantised has a NaN or an infinity.
    #[error(
        "`{arg}`: element {at} is {value}, allowed: finite numbers with precision {precision}; use native, or look for an overflow"
    )]
    NotFinite {
        /// `q`, `k` or `v`.
        arg: &'static str,
        /// Index of the element in memory.
        at: usize,
        /// Value of the argument.
        value: f64,
        /// Name of the requested precision.
        precision: String,
    },
    /// A tensor has the wrong shape.
    #[error("`{arg}` has shape {got:?}, allowed: {want:?}; check the sizes given to the problem")]
    Shape {
        /// Name of the tensor.
        arg: String,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// Shape that the problem requires.
        want: Vec<usize>,
    },
    /// A tensor has the wrong type.
    #[error("`{arg}` is {got}, allowed: {want}; convert it or change the problem")]
    DType {
        /// Name of the tensor.
        arg: String,
        /// Type of the tensor.
        got: DType,
        /// Allowed values.
        want: &'static str,
    },
    /// A tensor is on the wrong device.
    #[error("`{arg}` is on {got}, allowed: {want}; move it there")]
    Place {
        /// Name of the tensor.
        arg: String,
        /// Device of the tensor.
        got: Place,
        /// Device that the call needs.
        want: Place,
    },
    /// A device tensor is not contiguous, which the kernels require.
    #[error("`{arg}` has strides {got:?}, allowed: contiguous; make it contiguous")]
    Strides {
        /// Name of the tensor.
        arg: String,
        /// Its strides.
        got: Vec<usize>,
    },
    /// The last axis of a tensor is not contiguous.
    #[error("`{arg}` has stride {got} on its last axis, allowed: 1; make it contiguous there")]
    LastStride {
        /// Name of the tensor.
        arg: &'static str,
        /// Stride of the last axis.
        got: usize,
    },
    /// A tensor that is written shares memory with another one.
    #[error("`{arg}` shares memory with `{other}`; write into a tensor of its own")]
    Shared {
        /// Name of the tensor that is written.
        arg: String,
        /// Name of the other tensor.
        other: String,
    },
    /// A tensor that the problem needs is missing.
    #[error("`{arg}` was not given, the problem needs it; {hint}")]
    Missing {
        /// Name of the tensor.
        arg: String,
        /// How to give it.
        hint: &'static str,
    },
    /// A tensor was given that the problem does not use.
    #[error("`{arg}` was given, the problem does not use it; {hint}")]
    Unused {
        /// Name of the tensor.
        arg: String,
        /// How to declare it.
        hint: &'static str,
    },
    /// Offsets are not cumulative.
    #[error(transparent)]
    Offsets(#[from] OffsetsError),
    /// Offsets disagree with the problem.
    #[error("`{arg}`: {what} is {got}, allowed: {allowed}; rebuild the problem from these offsets")]
    Total {
        /// Name of the list.
        arg: &'static str,
        /// The disagreeing size: the total or the maximum.
        what: &'static str,
        /// Value of the argument.
        got: usize,
        /// Value that the problem requires.
        allowed: String,
    },
    /// A used length is out of range.
    #[error("`{arg}`[{at}] is {got}, allowed: 0 to {max}")]
    Used {
        /// Name of the list.
        arg: &'static str,
        /// Index of the sequence.
        at: usize,
        /// Length that was given.
        got: i32,
        /// Number of rows of that sequence.
        max: usize,
    },
    /// A modifier reads outside an auxiliary tensor.
    #[error(
        "`{name}`: axis {axis} is read from {low} to {high}, allowed: 0 to {max}; clamp the index with min and max"
    )]
    AuxIndex {
        /// Name of the tensor.
        name: String,
        /// Index of the axis.
        axis: usize,
        /// Smallest index.
        low: i64,
        /// Largest index.
        high: i64,
        /// Largest index allowed.
        max: i64,
    },
    /// A tensor has a forbidden element.
    #[error("`{arg}` holds {got} at element {at}, allowed: {allowed}; {hint}")]
    Value {
        /// Name of the tensor.
        arg: &'static str,
        /// Row-major index of the element.
        at: usize,
        /// Value of the element.
        got: f64,
        /// Allowed values.
        allowed: &'static str,
        /// A remedy.
        hint: &'static str,
    },
    /// A block mask has another structure than the problem requires.
    #[error("block mask has {got}, the problem says {want}")]
    Blocks {
        /// Its structure, as text.
        got: String,
        /// Required structure, as text.
        want: String,
    },
    /// An output tensor cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
