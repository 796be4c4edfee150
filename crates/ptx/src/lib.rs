//! The kernel language: GPU kernels are values that Rust code builds.
//!
//! [`Kernel::build`] runs a closure once; what it does with values ([`Val`]), scopes ([`Scope`]), tiles ([`Tile`]) and
//! rings ([`Pipe`]) becomes one list of instructions. The list is printed as PTX for the driver
//! ([`Kernel::ptx`]), reported on by the assembler, and executed by a simulator: what is simulated is what
//! runs. Each instruction is a row of one [`table`], with its text, its needs and its meaning.
//!
//! This crate knows nothing of attention, and nothing of who runs a kernel.

#![forbid(unsafe_code)]

mod arch;
pub mod assemble;
mod build;
pub mod device;
mod divisor;
mod error;
pub mod inst;
pub mod kernel;
pub mod machine;
mod mma;
pub mod model;
mod print;
pub mod product;
mod row_view;
mod sync;
pub mod table;
mod tile;
mod verify;

pub use arch::{Arch, Target, TensorUnit};
pub use build::{
    Block, Builder, Group, GroupBarrier, Half, IntoVal, Leave, Number as ParamNumber, Pair, Pointer, RoleBarrier,
    RoleSize, Scope, Shared, Thread, Turns, Val, Var, WarpRole, Warpgroups, Warps, Who, WholeWarps, Word,
};
pub use divisor::{Divisor, divisor_values};
pub use error::BuildError;
pub use half::{bf16, f16};
pub use kernel::Kernel;
pub use mma::{AccNumber, WarpAcc};
pub use product::{Major, Number, Swizzle, TileShape};
pub use row_view::RowView;
pub use sync::{
    AccumulatorChannel, BulkReducer, ClusterBroadcast, CopyRing, DoubleTile, Filling, GlobalRows, Mailbox, Numbers,
    PeerTiles, Pipe, TokenRing, Zeros,
};
pub use tile::{Acc, Fragment, Operand, Slice, Sum, Tensor, Tile};
pub use verify::varying;
