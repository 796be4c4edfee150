//! The kernels, generic over the instruction set and inlined into its entry points.

mod exponential;
mod few;
mod lanes;
mod product;
mod rounding;
mod rows;
mod softmax;

pub(crate) use exponential::ExpKind;
pub(super) use exponential::exp2_scalar;
pub(super) use few::{combine, dots, paired};
pub(super) use lanes::{lane_dots, scale_lanes, stream, transpose};
pub(crate) use product::Ahead;
pub(super) use product::block;
pub(super) use rounding::round_weights;
pub(super) use rows::{Row, narrow_bf16, narrow_f16, widen};
pub(crate) use softmax::{GradArgs, Policy, SoftmaxArgs, SoftmaxStats};
pub(super) use softmax::{begin, end, grad, softmax};
