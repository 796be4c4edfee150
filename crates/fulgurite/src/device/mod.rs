//! Operators on a device: one session plans, compiles, provides memory and launches, on a GPU and on the simulator.
//!
//! ```text
//! session    prepare(problem, options) -> Prepared; checked_forward(prepared, tensors) -> CheckedCall; run_call
//! call       a call whose tensors were checked: it is repeated without checks
//! modules    compiled kernels, by the plans that share them
//! workspace  counters, scratch memory and copies for launches that follow each other
//! memory     device memory as core's tensors see it
//! aliasing   what a call writes shares no memory with anything else
//! tensors    tensors that fit a problem, as the kernels take them
//! transfer   tensors in host memory: copied to the device and back
//! tensor_operator  operators over whole tensors, which are called by name
//! ```

mod aliasing;
mod call;
mod memory;
mod modules;
mod session;
mod tensor_operator;
mod tensors;
mod transfer;
mod workspace;

pub(crate) use call::TensorsOf;
pub use call::{CheckedCall, Prepared};
pub use memory::DeviceSpan;
pub use session::Session;
pub(crate) use transfer::OnDevice;
