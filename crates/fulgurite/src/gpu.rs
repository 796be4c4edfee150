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
pub use fulgurite_kernels::gemm::{Layouts, Tuning as GemmTuning};
pub use fulgurite_kernels::gemm_plan::{Gemm, GemmError, KernelError, Matrix};
pub use fulgurite_kernels::registry::{Entry, all as kernels};
pub use fulgurite_ptx::assemble::{AssembleError, Assembler, Fault, Hints, Message, Report, RustLine, Severity};
pub use fulgurite_ptx::device::{DeviceError, Span, Stream};
pub use fulgurite_ptx::{BuildError, Kernel, Major, Number, Target};

use fulgurite_cuda::Cuda;
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
    /// The device refused, or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A GPU of this machine, and the kernels that were compiled for it.
pub struct Gpu {
    cuda: Cuda,
    products: Mutex<HashMap<Gemm, Module>>,
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
        Ok(Gpu { cuda: Cuda::open(ordinal, options)?, products: Mutex::default() })
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
