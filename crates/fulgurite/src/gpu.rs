//! GPU kernels as values (listed, printed, reported on by NVIDIA's assembler), and sessions that run them.
//!
//! The first part needs no GPU. On a machine with a GPU, [`Gpu::open`] gives a [`Session`] on it; the same sessions run
//! on the simulator.
//!
//! ```
//! use fulgurite::gpu::{Target, kernels};
//!
//! let entry = kernels().iter().find(|entry| entry.name == "vector_add").unwrap();
//! let kernel = (entry.build)(Target::HOPPER)?;
//! assert!(kernel.ptx().contains("add.rn.f32"));
//! # Ok::<(), fulgurite::gpu::BuildError>(())
//! ```

// Opening a GPU, and its options.
pub use fulgurite_cuda::{Cuda, Losses, Options, default_cache_dir};
// Sessions, operators and their options.
pub use crate::device::{CheckedCall, DeviceSpan, Prepared, Session};
pub use fulgurite_kernels::attention::backward::{Adds, BackwardConfig, Order, Pack, Share};
pub use fulgurite_kernels::attention::decode::ROWS as DECODE_ROWS;
pub use fulgurite_kernels::attention::forward::plan::{
    ConfigError, ConfigRow, ConfigTable, ForwardConfig, SyncConfig, TileConfig,
};
pub use fulgurite_kernels::gemm::plan::{Gemm, GemmError, Matrix};
pub use fulgurite_kernels::gemm::product::{Product, ProductOptions};
pub use fulgurite_kernels::gemm::{GemmConfig, Layouts};
pub use fulgurite_kernels::operator::{Backward, BackwardOptions, Forward, ForwardOptions, Operator, Tables};
pub use fulgurite_kernels::parts::results::ResultType;
pub use fulgurite_ptx::device::{DeviceError, Stream};
// Kernels as values.
pub use fulgurite_kernels::registry::{Entry, all as kernels, tensor_operators};
pub use fulgurite_kernels::tensor_operator::TensorOperator;
pub use fulgurite_kernels::tensor_type::{TensorRefusal, TensorType};
pub use fulgurite_ptx::assemble::{
    AssembleError, Assembler, Fault, Hints, Message, MovedWait, Report, RustLine, Severity,
};
pub use fulgurite_ptx::{Arch, BuildError, Kernel, Major, Number, Target, TensorUnit};
// Explanations, profiles and the search for better tile configurations.
pub use crate::cycles::{Board, Predicted, TileCycles};
pub use crate::explained::{Explained, explain, explain_backward, predict, predict_backward};
pub use crate::profile::{Measured, Pass, Profile, ProfileError, ProfileSource, Tried};
pub use crate::ranks::{Link, RankBytes, RankProblem, RankTimes, RanksExplained, StepSeconds, explain_ranks};
pub use crate::tune::{SearchCell, TuneError, tune};

use crate::Error;
use fulgurite_ptx::device::Device as _;
use std::sync::Arc;

/// A session on a GPU of this machine.
pub type Gpu = Session<Cuda>;

impl Session<Cuda> {
    /// Opens a session on the GPU with this index; [`DeviceError::Absent`] says why there is none. Tile configurations
    /// come from the GPU's profile, if `profile` has one.
    ///
    /// ```
    /// use fulgurite::gpu::{Gpu, Options, ProfileSource};
    ///
    /// match Gpu::open(0, Options::default(), &ProfileSource::None) {
    ///     Ok(gpu) => println!("{}", gpu.name()),
    ///     Err(why) => println!("{why}"),
    /// }
    /// ```
    pub fn open(ordinal: u32, options: Options, profile: &ProfileSource) -> Result<Gpu, Error> {
        let cuda = Cuda::open(ordinal, options)?;
        let tables = profile.tables(&cuda.name())?;
        Ok(Session::new(Arc::new(cuda), tables))
    }

    /// Name of the GPU.
    pub fn name(&self) -> String {
        self.device().name()
    }
}
