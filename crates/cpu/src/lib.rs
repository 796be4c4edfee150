//! Attention on the CPU.

use fulgurite_core::{Bound, GradientOutputs, Outputs, Rescale, Saved};

/// An instruction set this crate has kernels for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// 512-bit vectors, x86-64.
    Avx512,
    /// 256-bit vectors with fused multiply-add, x86-64.
    Avx2,
    /// 128-bit vectors, AArch64.
    Neon,
    /// Plain Rust, any machine.
    Portable,
}

impl Isa {
    /// What this machine can run, fastest first. Never empty.
    pub fn available() -> Vec<Isa> {
        vec![Isa::Portable]
    }
    /// The lower-case name: `avx512`, `avx2`, `neon`, `portable`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }
}

/// How a call runs. Results do not depend on `threads`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// `None`: the fastest this machine has. One that it does not have falls back to the fastest it has.
    pub isa: Option<Isa>,
    /// `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// `None`: what measures fastest.
    pub rescale: Option<Rescale>,
}

/// What a forward call did, to show that rescales are rare.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Blocks of scores whose maximum could have raised a row's, counted once for each row.
    pub rescales_possible: u64,
    /// Of these, rescales that happened.
    pub rescales_done: u64,
    /// Blocks that an optimistic maximum made necessary to do again.
    pub blocks_redone: u64,
}

/// Forward: fills `outputs`.
pub fn forward(bound: &Bound<'_>, outputs: &mut Outputs<'_>, options: &Options) -> Counters {
    let _ = (bound, outputs, options);
    Counters::default()
}

/// Backward: fills `gradients`.
pub fn backward(bound: &Bound<'_>, saved: &Saved<'_>, gradients: &mut GradientOutputs<'_>, options: &Options) {
    let _ = (bound, saved, gradients, options);
}
