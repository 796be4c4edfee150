//! Attention on the CPU: register-blocked SIMD kernels under one tile loop.
//!
//! Every function takes a [`Bound`]: tensors already proven to fit their problem. Results are bitwise reproducible, and
//! depend neither on the number of threads nor on other sequences in the batch.

mod backward;
mod band;
pub mod cache;
mod decode;
mod evaluate;
mod forward;
mod functions;
mod gated_delta;
mod groups;
mod int8;
mod lighthouse;
mod memory;
mod minifloat_unit;
mod modify;
mod nonfinite;
mod packed_qkv;
mod parallax;
#[doc(hidden)]
pub mod pool;
pub mod probe;
#[doc(hidden)]
pub mod scan;
mod simd;
mod skip;
mod step;
mod tall_products;
mod tiles;
mod unit;
mod way;
mod window;

pub use gated_delta::{DeltaCounters, DeltaForm, DeltaSegments, gated_delta_backward, gated_delta_forward};
pub use lighthouse::{
    LighthouseError, LighthouseForward, LighthouseGradients, lighthouse_backward, lighthouse_forward,
};
pub use packed_qkv::{PackedError, PackedQkv, packed_forward};
pub use parallax::{parallax_backward, parallax_forward};
pub use skip::{SkipOutcome, skip_forward};
pub use way::{MaskForm, Path, Way};

use fulgurite_core::{Bound, DType, GradientOutputs, InputError, Inputs, Outputs, Precision, Problem, Rescale, Saved};

/// An instruction set for which this crate has kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// 512-bit vectors with products on a matrix unit, x86-64.
    Amx,
    /// 512-bit vectors, x86-64.
    Avx512,
    /// 512-bit vectors with products of bf16 in pairs, x86-64. It ranks after [`Isa::Avx512`], because the measured
    /// machines multiply pairs at half the rate of f32; it runs only on request.
    Avx512Bf16,
    /// 256-bit vectors with fused multiply-add, x86-64.
    Avx2,
    /// 128-bit vectors, AArch64.
    Neon,
    /// Plain Rust, for any machine.
    Portable,
}

impl Isa {
    /// All instruction sets, fastest first.
    pub const ALL: [Isa; 6] = [Isa::Amx, Isa::Avx512, Isa::Avx512Bf16, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// The instruction sets of this machine, fastest first. Never empty.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|&isa| simd::kernels(isa).is_some()).collect()
    }

    /// The kind of products: `tiles` of a matrix unit, or `vectors`.
    pub fn products(self) -> &'static str {
        if self == Isa::Amx { "tiles" } else { "vectors" }
    }

    /// The unit that computes the products of a problem on this instruction set, as text.
    ///
    /// ```
    /// use fulgurite_core::Problem;
    /// use fulgurite_cpu::Isa;
    /// let problem = Problem::builder().dense(1, 64, 64).heads(1, 1).head_dim(64).build()?;
    /// assert_eq!(Isa::Portable.unit_of(&problem), "vectors, f32 by fused multiply-adds");
    /// # Ok::<(), fulgurite_core::ProblemError>(())
    /// ```
    pub fn unit_of(self, problem: &Problem) -> &'static str {
        match (self, problem.precision(), problem.dtype()) {
            (Isa::Amx, Precision::Int8(_), _) => "matrix tiles, INT8 summed in 32 bits",
            (Isa::Avx512 | Isa::Avx512Bf16, Precision::Int8(_), _) if simd::has_quads() => {
                "vectors of bytes (VNNI), INT8 summed in 32 bits"
            }
            (_, Precision::Int8(_), _) => "plain integers, INT8 summed in 32 bits",
            (Isa::Avx512Bf16, _, DType::Bf16) => "vectors of bf16 in pairs, summed in f32",
            (Isa::Amx, _, DType::Bf16) => "matrix tiles, bf16 summed in f32",
            (Isa::Amx, _, DType::F16) => {
                "matrix tiles, f16 in two parts of bf16, summed in f32; gradients but S on vectors"
            }
            (Isa::Amx, ..) => "matrix tiles, f32 in three parts of bf16, summed in f32; gradients but S on vectors",
            _ => "vectors, f32 by fused multiply-adds",
        }
    }

    /// The lower-case name: `amx`, `avx512`, `avx512bf16`, `avx2`, `neon`, `portable`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }
}

/// Options of a call. Results do not depend on `threads`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Instruction set; `None` means the fastest. An unavailable one falls back to the fastest.
    pub isa: Option<Isa>,
    /// Number of threads; `None` means one per core.
    pub threads: Option<usize>,
    /// Rescale policy; `None` means the fastest one measured.
    pub rescale: Option<Rescale>,
}

impl Options {
    /// Largest number of threads that is ever used.
    pub const MAX_THREADS: usize = 4096;

    fn kernels(&self) -> &'static simd::Kernels {
        let chosen = self.isa.and_then(simd::kernels);
        let best = || Isa::ALL.into_iter().find_map(simd::kernels);
        chosen.or_else(best).expect("bug in fulgurite: portable kernels exist everywhere")
    }
    fn rescale(&self) -> Rescale {
        self.rescale.unwrap_or(Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT))
    }
    fn threads(&self) -> usize {
        self.threads.unwrap_or_else(pool::default_threads).clamp(1, Self::MAX_THREADS)
    }
}

/// Counters of a forward call, which show that rescales are rare. Each row and block of keys counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Blocks whose maximum exceeded that of the row so far.
    pub rescales_possible: u64,
    /// Rescales that happened among these.
    pub rescales_done: u64,
    /// Blocks of a tile that were recomputed because an optimistic maximum was too low.
    pub blocks_redone: u64,
}

impl Counters {
    fn add(&mut self, other: &Counters) {
        self.rescales_possible += other.rescales_possible;
        self.rescales_done += other.rescales_done;
        self.blocks_redone += other.blocks_redone;
    }
}

/// Computes forward attention into `outputs`, which must fit the problem ([`Outputs::check`]).
pub fn forward(bound: &Bound<'_>, outputs: &mut Outputs<'_>, options: &Options) -> Counters {
    let (kernels, threads) = (options.kernels(), options.threads());
    let plan = forward::RunOptions { rescale: options.rescale(), threads };
    match bound.problem().precision() {
        Precision::Int8(spec) => {
            let unit = int8::Int8Unit::new(bound, &spec, kernels, threads);
            forward::run(&tiles::Context::with(bound, kernels, &unit), outputs, &plan)
        }
        Precision::Groups(spec) => groups::forward(bound, &spec, outputs, options),
        _ => forward::run(&tiles::Context::new(bound, kernels), outputs, &plan),
    }
}

/// Binds the tensors and runs forward in one call. Elements of quantised tensors are checked while they are read, which
/// is cheaper than checking all of them before.
pub fn forward_inputs(
    problem: &Problem,
    inputs: &Inputs<'_>,
    outputs: &mut Outputs<'_>,
    options: &Options,
) -> Result<Counters, InputError> {
    let Precision::Int8(spec) = problem.precision() else {
        return Ok(forward(&inputs.bind(problem)?, outputs, options));
    };
    let (kernels, threads) = (options.kernels(), options.threads());
    let bound = inputs.bind_without_content_check(problem)?;
    let unit = int8::Int8Unit::new(&bound, &spec, kernels, threads);
    if unit.suspicious() {
        inputs.bind(problem)?;
    }
    let plan = forward::RunOptions { rescale: options.rescale(), threads };
    Ok(forward::run(&tiles::Context::with(&bound, kernels, &unit), outputs, &plan))
}

/// Computes gradients into `gradients`. `saved` and `gradients` must fit the problem ([`Saved::check`],
/// [`GradientOutputs::check`]).
///
/// # Panics
/// With INT8 products, which have no gradient.
pub fn backward(bound: &Bound<'_>, saved: &Saved<'_>, gradients: &mut GradientOutputs<'_>, options: &Options) {
    match bound.problem().precision() {
        Precision::Groups(spec) => return groups::backward(bound, &spec, saved, gradients, options),
        Precision::Int8(_) => panic!("bug in fulgurite: INT8 products have no gradient, and engines say so"),
        _ => {}
    }
    let cx = tiles::Context::new(bound, options.kernels());
    backward::run(&cx, saved, gradients, options.threads());
}
