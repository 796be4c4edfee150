//! The kernel language: GPU kernels are values that Rust code builds.
//!
//! [`Kernel::build`] runs a closure once. The closure's calls on values ([`Val`]), scopes ([`Scope`]), tiles ([`Tile`])
//! and rings ([`Pipe`]) append to one list of instructions. That list is printed as PTX for the driver
//! ([`Kernel::ptx`]), reported on by the assembler, and executed by a simulator, so the simulator runs the same
//! instructions as the GPU. Each instruction is a row of one [`table`], with its text, its requirements and its
//! meaning.
//!
//! This crate knows nothing about attention and nothing about the device that runs a kernel.

#![forbid(unsafe_code)]

mod accumulators;
mod arch;
pub mod assemble;
mod build;
pub mod device;
mod divisor;
mod error;
mod global_tensor;
pub mod inst;
pub mod kernel;
pub mod machine;
mod mma;
pub mod model;
mod print;
pub mod product;
mod row_acc;
mod row_view;
mod sync;
pub mod table;
pub mod tcgen05;
mod tensor_memory;
mod tensor_scales;
mod tile;
mod verify;
mod wgmma;

pub use accumulators::{Acc, Fragment, Sum};
pub use arch::{Arch, Target, TensorUnit};
pub use build::{
    Builder, Cta, F32x2, Group, GroupBarrier, Half, IntoVal, Leave, Pair, ParamNumber, Pointer, RoleBarrier, RoleSize,
    Scope, Shared, Thread, Turns, Val, Var, WarpRole, Warpgroups, Warps, Who, WholeWarps, Word,
};
pub use divisor::{Divisor, divisor_values};
pub use error::BuildError;
pub use global_tensor::{Slice, Tensor};
pub use half::{bf16, f16};
pub use kernel::Kernel;
pub use mma::{AccNumber, WarpAcc};
pub use product::{Major, Number, Swizzle, TileShape};
pub use row_acc::RowAcc;
pub use row_view::RowView;
pub use sync::{
    AccumulatorChannel, BulkReducer, Claims, ClusterBroadcast, CopyRing, CtaPair, DoubleTile, Filling, Gate,
    GlobalRows, Mailbox, Numbers, PeerTiles, Pipe, StagedSums, TensorRing, TokenRing, Which, Zeros,
};
pub use tensor_memory::{TensorOperand, TensorTile};
pub use tensor_scales::{TensorScales, scale_tile};
pub use tile::{Tile, TileOperand};
pub use verify::varying;
