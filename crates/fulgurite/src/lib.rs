//! Attention with gradients on CPUs and NVIDIA GPUs, from one description of the problem.
//!
//! [`attention`] runs on the CPU unless you ask: `.engine(Choice::Cuda)` copies host tensors to the GPU and back.
//!
//! Four entry points, from the most convenient to the most flexible:
//!
//! 1. [`attention`]: tensors in, tensors out. The shapes define the problem.
//! 2. [`engine`]: a [`Problem`] built once, run many times on an [`Engine`] that was chosen once.
//! 3. [`Engine::forward_into`]: runs without allocation; the caller owns the outputs.
//! 4. [`gpu::Session`]: tensors in device memory, on a stream of the caller, without copies.
//!
//! ```
//! use fulgurite::{Tensor, attention};
//!
//! let [batch, sequence, heads, head_dim] = [1, 4, 2, 8];
//! let x = |seed: u32| {
//!     let n = batch * sequence * heads * head_dim;
//!     let data: Vec<f32> = (0..n as u32).map(|i| ((i * 7 + seed) % 13) as f32 / 13.0).collect();
//!     Tensor::new(data, &[batch, sequence, heads, head_dim])
//! };
//! let (q, k, v) = (x(1)?, x(2)?, x(3)?);
//! let result = attention(&q, &k, &v).causal().forward()?;
//! assert_eq!(result.o.shape()[..], [1, 4, 2, 8]);
//! assert_eq!(result.lse.shape()[..], [1, 2, 4]);
//! # Ok::<(), fulgurite::Error>(())
//! ```
//!
//! `fulgurite-core` and its f64 oracle define the results; this crate contains no mathematics. It chooses the engine,
//! and explains the choice ([`explain`]).
//!
//! Two features are off by default: `ndarray` accepts `ndarray` arrays wherever a tensor is read, and `candle` gives
//! attention with gradients to `candle-core`.

#![forbid(unsafe_code)]

mod adder;
mod attention;
#[cfg(feature = "candle")]
pub mod candle;
mod choice;
mod cpu;
mod cycles;
mod device;
mod engine;
mod error;
mod explained;
pub mod gpu;
mod oracle;
mod profile;
mod ranks;
mod select;
pub mod sim;
mod tune;
pub mod variants;
mod view;

pub use attention::{Attention, attention};
pub use choice::{Choice, ChoiceError, Settings};
pub use cpu::{Cpu, matrix_product_gflops};
pub use engine::{Engine, Run, Stopwatch, Tally, Unsupported};
pub use error::Error;
pub use oracle::Oracle;
pub use select::{engine, engine_with, engines, explain};
pub use view::{AsView, ViewError};

pub use fulgurite_core::{
    BlockError, BlockLists, BlockMask, BlockSpec, DType, Delta, DeviceId, DeviceMemory, Exp, Expr, Forward,
    GradientOutputs, Gradients, GroupAttention, InputError, Inputs, Int8Attention, Mask, Outputs, Place, Precision,
    PrecisionError, Problem, ProblemBuilder, ProblemError, Rescale, Saved, Tensor, TensorError, TensorView,
    TensorViewMut, bf16, f16,
};
pub use fulgurite_core::{expr, format};
pub use fulgurite_cpu::{Counters, Isa, PackedError, PackedQkv, cache, packed_forward};

/// k-means, nearest neighbours, HDBSCAN, DBSCAN, PCA and truncated SVD: the tile loop with other folds.
pub use fulgurite_neighbors as neighbors;
