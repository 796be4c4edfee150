//! The GPU kernels as values: listed, printed, and reported on by NVIDIA's assembler.
//!
//! None of that needs a GPU. Where there is one, [`Gpu`] runs them.
//!
//! ```
//! use fulgurite::gpu::{Target, kernels};
//!
//! let entry = kernels().iter().find(|entry| entry.name == "vector_add").unwrap();
//! let kernel = (entry.build)(Target::HOPPER)?;
//! assert!(kernel.ptx().contains("add.rn.f32"));
//! # Ok::<(), fulgurite::gpu::BuildError>(())
//! ```

pub use fulgurite_cuda::{Losses, Options, default_cache_dir};
pub use fulgurite_kernels::attention::plan::{AuxPlaced, BlockForm, ListsPlaced, Placed, Tensors};
pub use fulgurite_kernels::gemm::{Layouts, Tuning as GemmTuning};
pub use fulgurite_kernels::gemm_plan::{Gemm, GemmError, KernelError, Matrix};
pub use fulgurite_kernels::registry::{Entry, all as kernels};
pub use fulgurite_ptx::assemble::{AssembleError, Assembler, Fault, Hints, Message, Report, RustLine, Severity};
pub use fulgurite_ptx::device::{Buffer, DeviceError, Span, Stream};
pub use fulgurite_ptx::{BuildError, Kernel, Major, Number, Target};

use fulgurite_core::{DType, Problem, Rescale};
use fulgurite_cuda::Cuda;
use fulgurite_kernels::attention::plan::{COUNTERS, Forward, Missing, Ready};
use fulgurite_ptx::device::{Device, Module};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// Why something did not run on a GPU.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The product is wrong.
    #[error(transparent)]
    Product(#[from] GemmError),
    /// There is no kernel for it.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No kernel computes it.
    #[error("engine cuda does not have {feature}; the engine `cpu` has it")]
    Missing {
        /// What, in words that follow "does not have".
        feature: String,
    },
    /// The device refused, or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<Missing> for GpuError {
    fn from(missing: Missing) -> Self {
        GpuError::Missing { feature: missing.feature }
    }
}

/// A GPU of this machine, and the kernels that were compiled for it.
pub struct Gpu {
    cuda: Cuda,
    products: Mutex<HashMap<Gemm, Module>>,
    /// Made with the first attention.
    counters: Mutex<Option<Counters>>,
}

/// Forward attention on a problem, compiled for a GPU.
pub struct Attention {
    ready: Ready,
    module: Module,
}

impl Attention {
    /// How a block mask reaches the kernel, if the problem has one.
    pub fn block_form(&self) -> Option<BlockForm> {
        self.ready.plan().block_form()
    }
}

/// Counters of launches that may run at the same time: launches on one stream follow each other and share theirs, a
/// recorded launch may be replayed anywhere and has its own.
struct Counters {
    memory: Buffer,
    taken: u64,
    of_streams: HashMap<Stream, Span>,
}

impl Counters {
    /// Bytes from one launch's counters to the next, which a pointer is aligned to.
    const STEP: u64 = 16;
    const LAUNCHES: u64 = 1 << 16;

    fn new(cuda: &Cuda) -> Result<Counters, DeviceError> {
        let memory = cuda.allocate(Self::STEP * Self::LAUNCHES)?;
        cuda.upload(memory.span(), &vec![0; memory.span().bytes as usize])?;
        Ok(Counters { memory, taken: 0, of_streams: HashMap::new() })
    }

    fn fresh(&mut self) -> Result<Span, DeviceError> {
        if self.taken >= Self::LAUNCHES {
            let what =
                format!("{} launches are recorded or on streams of their own, the most there may be", self.taken);
            return Err(DeviceError::Failed { call: "launch", what });
        }
        self.taken += 1;
        Ok(Span { bytes: COUNTERS, ..self.memory.span().from((self.taken - 1) * Self::STEP) })
    }
}

impl Gpu {
    /// The GPU with this number; [`DeviceError::Absent`] says why there is none.
    ///
    /// ```
    /// use fulgurite::gpu::{Gpu, Options};
    ///
    /// match Gpu::open(0, Options::default()) {
    ///     Ok(gpu) => println!("{}", gpu.name()),
    ///     Err(why) => println!("{why}"),
    /// }
    /// ```
    pub fn open(ordinal: u32, options: Options) -> Result<Gpu, GpuError> {
        Ok(Gpu { cuda: Cuda::open(ordinal, options)?, products: Mutex::default(), counters: Mutex::default() })
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.cuda.name()
    }

    /// What runs kernels on it.
    pub fn device(&self) -> &dyn Device {
        &self.cuda
    }

    /// C = A B on a stream, without waiting. Everything is checked before anything is launched; what the matrices lie
    /// in must stay alive until the stream has come past it.
    pub fn product(&self, gemm: &Gemm, matrices: [Matrix; 3], stream: Stream) -> Result<(), GpuError> {
        let module = self.loaded(gemm)?;
        let launch = gemm.launch(module.shared_kernel(), matrices, self.cuda.multiprocessors())?;
        Ok(self.cuda.launch(&module, launch.grid, &launch.args, stream)?)
    }

    /// Forward attention on a problem: planned, built and compiled. `sinks` is the type of the sinks where the problem has
    /// them, f32 if not said; the rescale policy is the fastest one unless given.
    pub fn attention(
        &self,
        problem: &Problem,
        sinks: Option<DType>,
        rescale: Option<Rescale>,
    ) -> Result<Attention, GpuError> {
        let mut plan = Forward::new(problem, rescale)?;
        if problem.has_sinks() {
            plan = plan.with_sinks(sinks.unwrap_or(DType::F32));
        }
        let target = self.cuda.target();
        if target.sm != 90 {
            return Err(GpuError::Missing { feature: format!("kernels for sm_{} (it has them for sm_90)", target.sm) });
        }
        let kernel = plan.kernel(target).unwrap_or_else(|e| panic!("bug in fulgurite: {e}\n{plan:?}"));
        let module = self.cuda.load(Arc::new(kernel))?;
        // Not while launches are recorded, when nothing may be allocated.
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        if counters.is_none() {
            *counters = Some(Counters::new(&self.cuda)?);
        }
        Ok(Attention { ready: plan.ready(module.shared_kernel()), module })
    }

    /// Computes o and LSE on a stream, without waiting. The counters of `tensors` are set here. What the tensors lie in
    /// must stay alive until the stream has come past it.
    pub fn forward(&self, attention: &Attention, tensors: &mut Tensors, stream: Stream) -> Result<(), GpuError> {
        tensors.counters = self.launch_counters(stream)?;
        match attention.ready.launch(tensors, self.cuda.multiprocessors())? {
            Some(launch) => Ok(self.cuda.launch(&attention.module, launch.grid, &launch.args, stream)?),
            None => Ok(()),
        }
    }

    fn launch_counters(&self, stream: Stream) -> Result<Span, DeviceError> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let counters = counters.as_mut().expect("bug in fulgurite: attention is prepared before it runs");
        if self.cuda.is_capturing(stream)? {
            return counters.fresh();
        }
        match counters.of_streams.get(&stream) {
            Some(&known) => Ok(known),
            None => {
                let fresh = counters.fresh()?;
                counters.of_streams.insert(stream, fresh);
                Ok(fresh)
            }
        }
    }

    fn loaded(&self, gemm: &Gemm) -> Result<Module, GpuError> {
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = products.get(gemm) {
            return Ok(module.clone());
        }
        let module = self.cuda.load(Arc::new(gemm.kernel(self.cuda.target())?))?;
        products.insert(*gemm, module.clone());
        Ok(module)
    }
}
