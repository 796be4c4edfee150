//! Kernels on NVIDIA GPUs, by the driver alone: no toolkit, no compiler beside the one in the driver.
//!
//! [`Cuda::open`] gives a [`Device`](fulgurite_ptx::device::Device) over a GPU. The driver is looked for at run time;
//! where there is none, `open` says so and how to get one, and nothing panics. It shares the GPU's primary context,
//! so its pointers and streams are those of any other library in the process, PyTorch's included.
//!
//! Kernels are compiled by the driver. The result is kept in a [folder](Options::cache) that any number of processes
//! may use at once, and what the compiler said of a kernel is kept with it ([`Cuda::log`]).
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
