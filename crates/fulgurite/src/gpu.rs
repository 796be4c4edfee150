//! The GPU kernels as values: listed, printed, and reported on by NVIDIA's assembler.
//!
//! Nothing here runs on a GPU or needs one.
//!
//! ```
//! use fulgurite::gpu::{Target, kernels};
//!
//! let entry = kernels().iter().find(|entry| entry.name == "vector_add").unwrap();
//! let kernel = (entry.build)(Target::HOPPER)?;
//! assert!(kernel.ptx().contains("add.rn.f32"));
//! # Ok::<(), fulgurite::gpu::BuildError>(())
//! ```

pub use fulgurite_kernels::registry::{Entry, all as kernels};
pub use fulgurite_ptx::assemble::{AssembleError, Assembler, Fault, Hints, Message, Report, RustLine, Severity};
pub use fulgurite_ptx::{BuildError, Kernel, Target};
