//! Runs GPU kernels without a GPU, and reports their errors.
//!
//! [`Sim`] is a [`Device`](fulgurite_ptx::device::Device): it runs the same kernel values as a GPU. Warps take turns in
//! a random, seeded order. Copies and products finish at random, seeded moments, as early or late as the hardware may
//! finish them. A detector checks every access to memory, registers and barriers. It reports a [`Finding`] with the
//! Rust lines of both sides.
//!
//! ```
//! use fulgurite_ptx::device::{Device, Stream, Value};
//! use fulgurite_ptx::{Kernel, Target};
//! use fulgurite_sim::{Fault, Sim};
//! use std::sync::Arc;
//!
//! // Every thread doubles an element, and one too many.
//! let kernel = Kernel::build("double", Target::HOPPER, |k| {
//!     let (x, n) = (k.pointer::<f32>("x"), k.param::<u32>("n"));
//!     k.threads(32, |w| {
//!         let i = w.thread();
//!         w.when(i.le(n), |w| x.store(w, i, x.load(w, i) * 2.0));
//!     });
//! })?;
//! let sim = Sim::default();
//! let buffer = sim.allocate(40)?;
//! sim.upload(buffer.span(), &[0; 40])?;
//! let module = sim.load(Arc::new(kernel))?;
//! let args = [Value::Pointer(buffer.span()), Value::U32(10)];
//! assert!(sim.launch(&module, [1, 1, 1], &args, Stream::default()).is_err());
//! let finding = &sim.findings()[0];
//! assert_eq!((finding.fault, finding.here.lane), (Fault::OutOfBounds, Some(10)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

mod architecture;
mod claims;
mod clock;
mod copy;
mod counters;
mod deadlock;
mod exact_sums;
mod finding;
mod issue;
mod mbarrier;
mod meet;
mod memory;
mod multiply;
mod options;
mod program;
mod random;
mod reduce;
mod run;
mod shadow;
mod sim;
mod sums;
mod tensor_memory;
mod tensor_pair;
mod tensor_scales;
mod timeline;
mod view;
mod warpgroup;
mod well_formed;
mod world;

pub use architecture::Architecture;
pub use counters::Counts;
pub use finding::{Fault, Finding, Line, Party};
pub use options::{Interleaving, Options, TensorOrder};
pub use sim::{Report, Sim};
pub use timeline::{Period, Timeline, Track};
