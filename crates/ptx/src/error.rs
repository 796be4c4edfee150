//! Errors of building a kernel.

use thiserror::Error;

/// The reason why a kernel was rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The kernel needs more shared memory than its target has.
    #[error(
        "kernel `{kernel}` takes {used} bytes of shared memory, allowed: {allowed} on {target}; it is used by {uses}"
    )]
    SharedMemory {
        /// Name of the kernel.
        kernel: String,
        /// Bytes that the kernel needs.
        used: u32,
        /// Bytes that the target has.
        allowed: u32,
        /// Bytes of each region, as text.
        uses: String,
        /// Name of the target.
        target: String,
    },
    /// The roles need more registers than the CTA has at entry.
    #[error(
        "kernel `{kernel}`: its roles take {used} registers, allowed: {allowed} (what {threads} threads have at entry); {uses}"
    )]
    Registers {
        /// Name of the kernel.
        kernel: String,
        /// Registers of all threads together.
        used: u32,
        /// Registers that the CTA has at entry.
        allowed: u32,
        /// Threads per CTA.
        threads: u32,
        /// Registers of each role, as text.
        uses: String,
    },
    /// A register count that `setmaxnreg` does not accept.
    #[error("kernel `{kernel}`, role `{role}`: {got} registers a thread, allowed: multiples of 8 from 24 to 256")]
    RegisterCount {
        /// Name of the kernel.
        kernel: String,
        /// Name of the role.
        role: String,
        /// Requested registers per thread.
        got: u32,
    },
    /// The kernel uses more named barriers than a CTA has.
    #[error("kernel `{kernel}` takes {used} named barriers, allowed: {allowed}; use an mbarrier for some")]
    Barriers {
        /// Name of the kernel.
        kernel: String,
        /// Barriers that the kernel uses.
        used: u32,
        /// Barriers that a CTA has.
        allowed: u32,
    },
    /// The CTA has no threads, too many, or not whole warps.
    #[error("kernel `{kernel}` has {got} threads a block, allowed: multiples of 32 from 32 to 1024")]
    Threads {
        /// Name of the kernel.
        kernel: String,
        /// Requested threads per CTA.
        got: u32,
    },
    /// The target lacks an instruction.
    #[error("kernel `{kernel}`, {at}: `{inst}` needs {needs}, and this is printed for {target}")]
    Needs {
        /// Name of the kernel.
        kernel: String,
        /// Rust source line of the instruction.
        at: String,
        /// Name of the instruction.
        inst: &'static str,
        /// PTX version and architectures that have the instruction.
        needs: String,
        /// Name of the target.
        target: String,
    },
    /// An instruction that a whole warp must execute together stands under a branch that depends on the lane.
    #[error(
        "kernel `{kernel}`, {at}: `{inst}` is executed by whole warps together, and the branch at {branch} depends on the lane"
    )]
    Divergent {
        /// Name of the kernel.
        kernel: String,
        /// Rust source line of the instruction.
        at: String,
        /// Name of the instruction.
        inst: &'static str,
        /// Rust source line of the branch.
        branch: String,
    },
    /// A shape that an instruction or TMA does not accept.
    #[error("kernel `{kernel}`, {at}: {what}")]
    Shape {
        /// Name of the kernel.
        kernel: String,
        /// Rust source line of the instruction.
        at: String,
        /// The rejected shape and the allowed ones.
        what: String,
    },
    /// One side of a pipe is never used.
    #[error("kernel `{kernel}`: pipe `{pipe}` is {missing}; a ring needs one role that fills and one that empties it")]
    Pipe {
        /// Name of the kernel.
        kernel: String,
        /// Name of the pipe.
        pipe: String,
        /// The side that is missing, as it appears in the message.
        missing: &'static str,
    },
}
