//! Runs kernels on NVIDIA GPUs with the driver alone: no toolkit, and no compiler other than the driver's.
//!
//! [`Cuda::open`] gives a [`Device`](fulgurite_ptx::device::Device) for a GPU. The driver is loaded at run time; if
//! there is none, `open` returns an error that says how to get one, and nothing panics. It shares the GPU's primary
//! context, so its pointers and streams work with any other library in the process, such as PyTorch.
//!
//! The driver compiles kernels. A [folder](Options::cache) that any number of processes may share caches the result
//! together with the compiler's log ([`Cuda::log`]).
//!
//! ```
//! use fulgurite_cuda::{Cuda, Options};
//! use fulgurite_ptx::device::{Device, DeviceError};
//!
//! match Cuda::open(0, Options::default()) {
//!     Ok(gpu) => println!("{}: {} multiprocessors", gpu.name(), gpu.multiprocessors()),
//!     Err(DeviceError::Absent(why)) => println!("no GPU here: {why}"),
//!     Err(other) => println!("the GPU is there and does not answer: {other}"),
//! }
//! ```

#![deny(unsafe_op_in_unsafe_fn)]
#![deny(unsafe_code)]

mod cache;
mod cuda;
#[allow(unsafe_code)]
mod driver;
mod error;
mod log;
mod map;

pub use cache::default_cache_dir;
pub use cuda::{Cuda, Losses, Options};
#[cfg(any(test, feature = "fake"))]
pub use driver::fake;
pub use driver::{Graph, OwnStream};
pub use error::Unusable;
pub use log::Log;
