//! The kernels, generic over the instruction set and inlined into its entry points.

mod band;
mod delta;
mod elements;
mod exponential;
mod few_queries;
mod fold;
mod lanes;
mod product;
mod rounding;
mod scores;
mod softmax;

pub(crate) use band::{BAND, BAND_ROWS, BandOutput, BandWeights, PANEL, Seen as BandSeen};
pub(super) use band::{band_output, band_weights};
pub(super) use delta::stage;
pub(crate) use delta::{INVERT, Stage, Token};
pub(crate) use elements::SimdElement;
pub(super) use elements::{narrow_bf16, narrow_f16, widen};
#[cfg(target_arch = "x86_64")]
pub(super) use exponential::EXP2_NATIVE;
pub(super) use exponential::exp2_scalar;
pub(crate) use exponential::{ExpKind, LEAST};
pub(super) use few_queries::{RowSets, combine, dots, paired};
pub(crate) use fold::{AboveArgs, BestArgs, OtherArgs};
pub(super) use fold::{above, add_wide, best, distance, dot, frame, other};
pub(super) use lanes::{lane_dots, scale_lanes, stream, transpose};
pub(crate) use product::Ahead;
pub(super) use product::block;
pub(super) use rounding::{expand, round_rows, round_weights};
pub(crate) use scores::{Pass, Plane, Term, bits, capped, copy, hide, pass, turned};
pub(crate) use softmax::{GradArgs, LaneProbe, Policy, SoftmaxArgs, SoftmaxStats};
#[cfg(target_arch = "x86_64")]
pub(super) use softmax::{begin, end, settle};
pub(super) use softmax::{grad, softmax};
