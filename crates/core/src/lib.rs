//! The attention problem: its description, its exact meaning, and the tolerance for results.
//!
//! This crate contains no engine. A [`Problem`] describes a computation and cannot be built wrong; [`Inputs`] bound to
//! it carry the proof that they fit. Nothing here is optimised for speed.

#![forbid(unsafe_code)]

pub mod block;
mod block_coverage;
mod borders;
pub mod cases;
mod codes;
pub mod compare;
pub mod dtype;
pub mod error;
mod exact;
pub mod exp;
pub mod expr;
mod fit;
pub mod format;
pub mod gated_delta;
pub mod inputs;
pub mod lighthouse;
mod limits;
pub mod lru;
pub mod mask;
pub mod merge;
pub mod oracle;
pub mod outputs;
pub mod parallax;
pub mod plain;
pub mod precision;
pub mod problem;
mod quantisable;
pub mod random;
pub mod skip;
mod skip_clusters;
mod skip_means;
mod skip_text;
pub mod stop;
#[doc(hidden)]
pub mod sums;
pub mod tensor;
mod walk;

pub use block::{BlockError, BlockMask, BlockSpec};
pub use dtype::{DType, Element};
pub use error::{InputError, OffsetsError, ProblemError};
pub use exp::{Exp, ExpError, Rescale, RescaleError};
pub use expr::Expr;
pub use half::{bf16, f16};
pub use inputs::{BlockLists, Bound, DeviceBound, Inputs, RowLayout, Sequence};
pub use mask::{Mask, Span};
pub use outputs::{Forward, GradientOutputs, Gradients, Outputs, Saved};
pub use precision::{Delta, GroupAttention, Int8Attention, Precision, PrecisionError};
pub use problem::{AuxGradient, Layout, Packed, Problem, ProblemBuilder, Side};
pub use tensor::{
    Data, DataMut, DeviceId, DeviceMemory, Footprint, Place, Storable, Tensor, TensorError, TensorView, TensorViewMut,
};
