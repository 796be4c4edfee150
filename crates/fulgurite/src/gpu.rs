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

pub use fulgurite_cuda::{Cuda, Losses, Options, default_cache_dir};
pub use fulgurite_kernels::attention::forward::plan::{
    BlockForm, ConfigError, ConfigRow, ConfigTable, Copies, DeviceAux, DeviceBlockLists, DeviceTensor, ForwardConfig,
    Tensors, TileConfig,
};
pub use fulgurite_kernels::gemm::plan::{Gemm, GemmError, KernelError, Matrix};
pub use fulgurite_kernels::gemm::{GemmConfig, Layouts};
pub use fulgurite_kernels::registry::{Entry, all as kernels};
pub use fulgurite_ptx::assemble::{
    AssembleError, Assembler, Fault, Hints, Message, MovedWait, Report, RustLine, Severity,
};
pub use fulgurite_ptx::device::{Buffer, DeviceError, Span, Stream};
pub use fulgurite_ptx::{Arch, BuildError, Kernel, Major, Number, Target};

pub use crate::explained::{Explained, explain, explain_backward};
pub use crate::profile::{Measured, Pass, Profile, ProfileError, Tables, Tried};
pub use crate::tune::{Place, TuneError, tune};
pub use fulgurite_kernels::attention::backward::plan::Tensors as GradientTensors;
pub use fulgurite_kernels::attention::backward::{Adds, BackwardConfig, Order, Pack, Share};

use crate::compiled::{CompileError, Compiled, check_target, module_of};
use crate::rooms::{Rooms, Turn};
use fulgurite_core::{DType, Problem, Rescale};
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Kernels};
use fulgurite_kernels::attention::forward::plan::{ForwardPlan, NoKernel, Ready};
use fulgurite_ptx::device::{Device, Launch, Module};
use std::collections::HashMap;
use std::fmt::Debug;
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
    NoKernel {
        /// What, in words that follow "does not have".
        feature: String,
    },
    /// The device refused, or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The profile of the GPU cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

impl From<NoKernel> for GpuError {
    fn from(missing: NoKernel) -> Self {
        GpuError::NoKernel { feature: missing.feature }
    }
}

/// A GPU of this machine, and the kernels that were compiled for it.
pub struct Gpu {
    cuda: Cuda,
    products: Mutex<HashMap<Gemm, Module>>,
    /// Cuts of the kernels.
    tables: Tables,
    compiled: Compiled,
    /// Memory that launches need for themselves.
    rooms: Rooms,
}

/// What a caller of forward attention may say beside the problem.
#[derive(Debug, Clone, Copy)]
pub struct Wish {
    /// Type of the sinks, where the problem has them; f32 if not said.
    pub sinks: Option<DType>,
    /// The rescale policy; the fastest one if not said.
    pub rescale: Option<Rescale>,
    /// The cut of the kernel; the fastest one if not said.
    pub config: Option<ForwardConfig>,
    /// Whether the LSE is read. It is written in any case; where nobody reads it, it may be off by as much as p is rounded.
    pub lse: bool,
}

/// Nothing is said, and the LSE is read.
impl Default for Wish {
    fn default() -> Self {
        Wish { sinks: None, rescale: None, config: None, lse: true }
    }
}

/// Forward attention on a problem, compiled for a GPU.
pub struct Attention {
    ready: Ready,
    module: Module,
    /// What makes the table of blocks that elements look up.
    cover: Option<Module>,
    /// The last call and its launch: most calls are like the one before.
    last: Mutex<Option<(Tensors, Option<Launch>)>>,
}

impl Attention {
    /// How a block mask reaches the kernel, if the problem has one.
    pub fn block_form(&self) -> Option<BlockForm> {
        self.ready.plan().block_form()
    }

    /// What of a call's q, k, v and o is copied, by launches before and after the kernel's, because the copy engine cannot
    /// take it as it lies.
    pub fn copies(&self, rows: &[DeviceTensor; 4]) -> Option<Copies> {
        self.ready.plan().copies(rows)
    }
}

/// The gradients of attention on a problem, compiled for a GPU.
pub struct Gradient {
    plan: BackwardPlan,
    kernels: Kernels,
    modules: Vec<Module>,
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
        let cuda = Cuda::open(ordinal, options)?;
        let tables = Profile::tables_for(&cuda.name())?;
        Ok(Gpu::new(cuda, tables))
    }

    /// A GPU that was opened already, with these cuts of the kernels.
    pub fn new(cuda: Cuda, tables: Tables) -> Gpu {
        let (products, compiled, rooms) = Default::default();
        Gpu { cuda, tables, products, compiled, rooms }
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.cuda.name()
    }

    /// The driver's side of it: where memory and streams of other libraries are vouched for.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// What runs kernels on it.
    pub fn device(&self) -> &dyn Device {
        &self.cuda
    }

    /// C = A B on a stream, without waiting. Everything is checked before anything is launched; what the matrices lie
    /// in must stay alive until the stream has come past it.
    pub fn product(&self, gemm: &Gemm, matrices: [Matrix; 3], stream: Stream<'_>) -> Result<(), GpuError> {
        let module = self.loaded(gemm)?;
        let launch = gemm.launch(module.shared_kernel(), matrices, self.cuda.multiprocessors())?;
        Ok(self.cuda.launch(&module, launch.grid, &launch.args, stream)?)
    }

    /// Forward attention on a problem: planned, built and compiled.
    pub fn attention(&self, problem: &Problem, wish: &Wish) -> Result<Attention, GpuError> {
        let Wish { sinks, rescale, config, lse } = *wish;
        let mut plan = ForwardPlan::by_table(problem, rescale, &self.tables.forward)?;
        if !lse {
            plan = plan.without_lse();
        }
        if let Some(config) = config {
            plan = plan.with_config(|usual| ForwardConfig { rescale: usual.rescale, ..config });
        }
        if problem.has_sinks() {
            plan = plan.with_sinks(sinks.unwrap_or(DType::F32));
        }
        check_target(&self.cuda)?;
        let modules = self.compiled.forward(&self.cuda, &plan).map_err(|e| match (e, config) {
            (CompileError::Build(e), Some(_)) => {
                GpuError::NoKernel { feature: format!("a kernel of this tuning: {e}") }
            }
            (e, _) => self.uncompiled(e, &plan),
        })?;
        let mut modules = modules.into_iter();
        let module = modules.next().expect("bug in fulgurite: a plan has a kernel");
        Ok(Attention {
            ready: plan.ready(module.shared_kernel()),
            module,
            cover: modules.next(),
            last: Mutex::default(),
        })
    }

    /// Computes o and LSE on a stream, without waiting. Counters and scratch of `tensors` are set here. What the tensors lie
    /// in must stay alive until the stream has come past it.
    pub fn forward(&self, attention: &Attention, tensors: &mut Tensors, stream: Stream<'_>) -> Result<(), GpuError> {
        let (plan, room) = (attention.ready.plan(), self.rooms.of(&self.cuda, stream)?);
        let mut turn = room.turn();
        turn.hold(attention.cover.iter().chain([&attention.module]));
        tensors.counters = turn.counters(&self.cuda, plan.counter_bytes())?;
        tensors.scratch = match plan.scratch_bytes() {
            0 => None,
            bytes => Some(turn.scratch(&self.cuda, bytes)?),
        };
        if let Some(module) = &attention.cover
            && let Some(launch) = plan.cover(&module.shared_kernel(), tensors)
        {
            self.cuda.launch(module, launch.grid, &launch.args, stream)?;
        }
        if let Some(copies) = plan.copies(&tensors.rows) {
            return self.forward_copied(attention, &copies, tensors, stream, &mut turn);
        }
        // While another thread calls, this one computes for itself.
        let (mut kept, mut own) = (attention.last.try_lock().ok(), None);
        let last = kept.as_deref_mut().unwrap_or(&mut own);
        if last.as_ref().is_none_or(|(known, _)| known != tensors) {
            let launch = attention.ready.launch(tensors, self.cuda.multiprocessors())?;
            *last = Some((tensors.clone(), launch));
        }
        match last {
            Some((_, Some(launch))) => Ok(self.cuda.launch(&attention.module, launch.grid, &launch.args, stream)?),
            _ => Ok(()),
        }
    }

    /// The same where tensors lie so that the kernel cannot take them: copies go before and after it.
    fn forward_copied(
        &self,
        attention: &Attention,
        copies: &Copies,
        tensors: &Tensors,
        stream: Stream<'_>,
        turn: &mut Turn<'_>,
    ) -> Result<(), GpuError> {
        let copied = turn.copies(&self.cuda, copies.bytes())?;
        let (kernels, [pack, unpack]) = self.compiled.copying(&self.cuda)?;
        turn.hold([&pack, &unpack]);
        let plan = attention.ready.with_copies(copies, &kernels, tensors, copied, self.cuda.multiprocessors())?;
        let all = [&attention.module, &pack, &unpack];
        Ok(plan.run(&self.cuda, stream, &mut |kernel| Ok(module_of(all, kernel)))?)
    }

    /// The gradients of attention on a problem: planned, built and compiled. `d_lse` tells whether the LSE has a gradient.
    pub fn gradient(&self, problem: &Problem, d_lse: bool, order: Order) -> Result<Gradient, GpuError> {
        let plan = BackwardPlan::by_table(problem, d_lse, order, &self.tables.backward)?;
        check_target(&self.cuda)?;
        let compiled = self.compiled.backward(&self.cuda, &plan);
        let (kernels, modules) = compiled.map_err(|e| self.uncompiled(e, &plan))?;
        Ok(Gradient { plan, kernels, modules })
    }

    /// Computes d_q, d_k and d_v on a stream, without waiting. What the tensors lie in must stay alive until the stream has
    /// come past it.
    pub fn backward(&self, gradient: &Gradient, tensors: &GradientTensors, stream: Stream<'_>) -> Result<(), GpuError> {
        let Gradient { plan, kernels, modules } = gradient;
        let room = self.rooms.of(&self.cuda, stream)?;
        let mut turn = room.turn();
        turn.hold(modules);
        let scratch = turn.scratch(&self.cuda, plan.scratch_bytes().max(16))?;
        let (multiprocessors, mut copying) = (self.cuda.multiprocessors(), None);
        let launches = match plan.copies(tensors) {
            None => plan.plan(kernels, tensors, scratch, multiprocessors)?,
            Some(copies) => {
                let copied = turn.copies(&self.cuda, copies.bytes())?;
                let (copy_kernels, loaded) = self.compiled.copying(&self.cuda)?;
                turn.hold(&loaded);
                copying = Some(loaded);
                plan.with_copies((&copies, &copy_kernels, copied), kernels, tensors, scratch, multiprocessors)?
            }
        };
        let all = || modules.iter().chain(copying.iter().flatten());
        Ok(launches.run(&self.cuda, stream, &mut |kernel| Ok(module_of(all(), kernel)))?)
    }

    /// A plan that has no kernel.
    fn uncompiled(&self, e: CompileError, plan: &dyn Debug) -> GpuError {
        e.missing(&self.tables, &self.cuda, plan).map_or_else(GpuError::from, GpuError::from)
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
