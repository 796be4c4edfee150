//! What can be wrong with a kernel or a launch.

use thiserror::Error;

/// Why a kernel was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Too much shared memory.
    #[error(
        "kernel `{kernel}` takes {used} bytes of shared memory, allowed: {allowed} on {target}; it is used by {uses}"
    )]
    SharedMemory {
        /// The kernel.
        kernel: String,
        /// Bytes taken.
        used: u32,
        /// Bytes there are.
        allowed: u32,
        /// What takes how much.
        uses: String,
        /// Name of the target.
        target: String,
    },
    /// Roles want more registers than there are.
    #[error(
        "kernel `{kernel}`: its roles take {used} registers, allowed: {allowed} (what {threads} threads have at entry); {uses}"
    )]
    Registers {
        /// The kernel.
        kernel: String,
        /// Registers of all threads.
        used: u32,
        /// Registers there are.
        allowed: u32,
        /// Threads of a block.
        threads: u32,
        /// Who takes how many.
        uses: String,
    },
    /// A register count that the hardware does not take.
    #[error("kernel `{kernel}`, role `{role}`: {got} registers a thread, allowed: multiples of 8 from 24 to 256")]
    RegisterCount {
        /// The kernel.
        kernel: String,
        /// The role.
        role: String,
        /// What was asked for.
        got: u32,
    },
    /// Too many named barriers.
    #[error("kernel `{kernel}` takes {used} named barriers, allowed: {allowed}; use an mbarrier for some")]
    Barriers {
        /// The kernel.
        kernel: String,
        /// Barriers taken.
        used: u32,
        /// Barriers there are.
        allowed: u32,
    },
    /// Too many threads, or none.
    #[error("kernel `{kernel}` has {got} threads a block, allowed: multiples of 32 from 32 to 1024")]
    Threads {
        /// The kernel.
        kernel: String,
        /// How many.
        got: u32,
    },
    /// An instruction that the target does not have.
    #[error("kernel `{kernel}`, {at}: `{inst}` needs {needs}, and this is printed for {target}")]
    Needs {
        /// The kernel.
        kernel: String,
        /// The Rust line.
        at: String,
        /// The instruction.
        inst: &'static str,
        /// What it needs.
        needs: String,
        /// What it is printed for.
        target: String,
    },
    /// An instruction that all threads of a warp must execute stands where only some come.
    #[error(
        "kernel `{kernel}`, {at}: `{inst}` is executed by whole warps together, and the branch at {branch} depends on the lane"
    )]
    Divergent {
        /// The kernel.
        kernel: String,
        /// The Rust line.
        at: String,
        /// The instruction.
        inst: &'static str,
        /// The Rust line of the branch.
        branch: String,
    },
    /// A shape that an instruction or the copy engine does not take.
    #[error("kernel `{kernel}`, {at}: {what}")]
    Shape {
        /// The kernel.
        kernel: String,
        /// The Rust line.
        at: String,
        /// What, and what is allowed.
        what: String,
    },
    /// A pipe that one side never uses.
    #[error("kernel `{kernel}`: pipe `{pipe}` is {missing}; a ring needs one role that fills and one that empties it")]
    Pipe {
        /// The kernel.
        kernel: String,
        /// The pipe.
        pipe: String,
        /// What nobody does.
        missing: &'static str,
    },
}
