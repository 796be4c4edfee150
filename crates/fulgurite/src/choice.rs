//! Names and settings of engines.

use crate::profile::ProfileSource;
use fulgurite_core::{Rescale, RescaleError};
use fulgurite_cpu::Isa;
use fulgurite_kernels::attention::backward::Order;
use fulgurite_ptx::{Arch, TensorUnit};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The engine to use.
///
/// ```
/// use fulgurite::gpu::{Arch, TensorUnit};
/// use fulgurite::{Choice, Isa};
/// assert_eq!("best".parse(), Ok(Choice::Best));
/// assert_eq!("cpu:avx2".parse(), Ok(Choice::CpuIsa(Isa::Avx2)));
/// assert_eq!("cuda:mma.sync".parse(), Ok(Choice::CudaUnit(TensorUnit::MmaSync)));
/// assert_eq!("cuda:tcgen05".parse(), Ok(Choice::CudaUnit(TensorUnit::Tcgen05)));
/// assert_eq!("sim:sm_80".parse(), Ok(Choice::SimArch(Arch::SM_80)));
/// assert_eq!(Choice::Oracle.to_string(), "oracle");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Choice {
    /// The fastest engine that needs no copies: the CPU with its fastest instruction set.
    #[default]
    Best,
    /// The CPU with its fastest instruction set.
    Cpu,
    /// The CPU with this instruction set.
    CpuIsa(Isa),
    /// The first NVIDIA GPU. Host tensors are copied there and back, so it is used only on request.
    Cuda,
    /// The first NVIDIA GPU, with this instruction for the products of attention and its gradients; [`Cuda`](Self::Cuda) uses the
    /// GPU's fastest one.
    CudaUnit(TensorUnit),
    /// The GPU kernels on a simulator that checks every access. Slow, so it is used only on request.
    Sim,
    /// The GPU kernels of an architecture on the simulator; [`Sim`](Self::Sim) simulates an H200.
    SimArch(Arch),
    /// The f64 definition: exact and slow. Used only on request.
    Oracle,
}

/// The reason why an engine cannot be made.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ChoiceError {
    /// An unknown name.
    #[error(
        "`engine` is {got:?}, allowed: best, cpu, cpu:amx, cpu:avx512, cpu:avx512bf16, cpu:avx2, cpu:neon, cpu:portable, cuda, cuda:wgmma, cuda:mma.sync, cuda:tcgen05, sim, sim:ARCH with one of {archs}, oracle",
        archs = Arch::names()
    )]
    Name {
        /// The text given.
        got: String,
    },
    /// An instruction set that this machine lacks.
    #[error("`engine` is cpu:{got}, this machine has: {has}; leave the instruction set out for the fastest")]
    Isa {
        /// Name of the requested instruction set.
        got: &'static str,
        /// Names of the available instruction sets.
        has: String,
    },
    /// An invalid number of threads.
    #[error("`threads` is {got}, allowed: 1 to {max}; leave it out for one per core", max = Settings::MAX_THREADS)]
    Threads {
        /// Requested number of threads.
        got: usize,
    },
    /// An invalid rescale policy.
    #[error(transparent)]
    Rescale(#[from] RescaleError),
}

impl FromStr for Choice {
    type Err = ChoiceError;

    fn from_str(text: &str) -> Result<Choice, ChoiceError> {
        let isa = |name: &str| Isa::ALL.into_iter().find(|isa| isa.name() == name).map(Choice::CpuIsa);
        match text {
            "best" => Some(Choice::Best),
            "cpu" => Some(Choice::Cpu),
            "cuda" => Some(Choice::Cuda),
            "cuda:wgmma" => Some(Choice::CudaUnit(TensorUnit::Wgmma)),
            "cuda:mma.sync" => Some(Choice::CudaUnit(TensorUnit::MmaSync)),
            "cuda:tcgen05" => Some(Choice::CudaUnit(TensorUnit::Tcgen05)),
            "sim" => Some(Choice::Sim),
            "oracle" => Some(Choice::Oracle),
            _ => match text.strip_prefix("sim:") {
                Some(name) => Arch::named(name).map(Choice::SimArch),
                None => text.strip_prefix("cpu:").and_then(isa),
            },
        }
        .ok_or_else(|| ChoiceError::Name { got: text.to_string() })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Best => f.write_str("best"),
            Choice::Cpu => f.write_str("cpu"),
            Choice::CpuIsa(isa) => write!(f, "cpu:{}", isa.name()),
            Choice::Cuda => f.write_str("cuda"),
            Choice::CudaUnit(unit) => write!(f, "cuda:{unit}"),
            Choice::Sim => f.write_str("sim"),
            Choice::SimArch(arch) => write!(f, "sim:{arch}"),
            Choice::Oracle => f.write_str("oracle"),
        }
    }
}

/// Settings of an engine. They do not change results beyond rounding.
///
/// ```
/// use fulgurite::{Choice, Engine, Rescale, Settings, engine_with};
/// let settings = Settings::default().threads(1).rescale(Rescale::Always);
/// let engine = engine_with(Choice::Cpu, &settings)?;
/// assert!(engine.describe().ends_with("1 thread, rescale always"));
/// # Ok::<(), fulgurite::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Settings {
    /// Number of threads; `None` means one per core.
    pub threads: Option<usize>,
    /// Rescale policy of the running maximum; `None` means the fastest one measured.
    pub rescale: Option<Rescale>,
    /// Order in which a GPU accumulates gradients; the CPU always has one fixed order.
    pub order: Order,
    /// Source of profiles with a GPU's tile configurations; by default there are none.
    pub profile: ProfileSource,
}

impl Settings {
    /// Largest accepted number of threads.
    pub const MAX_THREADS: usize = 4096;

    /// Sets the number of threads.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Sets the order in which a GPU accumulates gradients.
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Takes a GPU's tile configurations from a profile.
    pub fn profile(mut self, profile: ProfileSource) -> Self {
        self.profile = profile;
        self
    }

    /// Forces a rescale policy.
    pub fn rescale(mut self, rescale: Rescale) -> Self {
        self.rescale = Some(rescale);
        self
    }
}
