//! An NVIDIA GPU as a device.

use crate::cache::{Cache, Entry, Hash128};
use crate::driver::{self, Allocations, Api, Argument, Code, Context, Ended, Entered, Facts, Graph, Grid, OwnStream};
use crate::error::check_age;
use crate::log::Log;
use crate::map::MapArguments;
use fulgurite_ptx::assemble::{Assembler, Hints};
use fulgurite_ptx::device::{
    Buffer, Device, DeviceError, LaunchError, Module, Span, Stream, TensorSpan, Token, Value, check_launch,
};
use fulgurite_ptx::kernel::{BoxShape, ParamKind};
use fulgurite_ptx::{Kernel, Target, table};
use std::any::Any;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What to do with a kernel for which the compiler announces slow code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Losses {
    /// Return an error: a kernel whose products are serialised is correct but runs at half the speed.
    #[default]
    Refuse,
    /// Load the kernel; [`Cuda::log`] reports the messages.
    Allow,
}

/// Options for opening a GPU.
///
/// ```
/// use fulgurite_cuda::{Losses, Options};
///
/// let options = Options { cache: Some("/var/cache/kernels".into()), ..Options::default() };
/// assert_eq!(options.losses, Losses::Refuse);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// Folder for compiled kernels; [`default_cache_dir`](crate::default_cache_dir) gives the usual one. With `None`,
    /// or if the folder cannot be written, nothing is cached.
    pub cache: Option<PathBuf>,
    /// What to do with slow code.
    pub losses: Losses,
    /// An assembler to use instead of the driver's. `cache` can hold only the code of this assembler, and the driver's
    /// code for kernels that do not change their register counts. The driver caches the rest in its own folder.
    pub ptxas: Option<PathBuf>,
}

/// The device's data of a module.
struct Loaded {
    code: Code,
    log: Log,
    /// Whether a launch may start while the previous one ends, because the kernel itself waits for it.
    overlaps: bool,
    last: Mutex<Encoded>,
}

/// A checked launch, as requested and as the driver takes it. Most launches differ little or not at all from the
/// previous one, and encoding a tensor costs a tenth of a launch.
#[derive(Default)]
struct Encoded {
    /// Grid of the launch; `None` before the first one.
    grid: Option<[u32; 3]>,
    values: Vec<Value>,
    arguments: Vec<Argument>,
    /// [`Allocations::frees`] when the memory was last found alive.
    frees: u64,
}

/// The memory to which an argument points.
fn memory(value: &Value) -> Option<Span> {
    match value {
        Value::Pointer(span) => Some(*span),
        Value::Tensor(tensor) => Some(tensor.span),
        _ => None,
    }
}

impl Encoded {
    /// Turns this into another launch of the same kernel, and keeps the parts that are equal. It is empty after an
    /// error.
    fn renew(
        &mut self,
        (entered, live): (&Entered<'_>, &Allocations),
        kernel: &Kernel,
        grid: [u32; 3],
        args: &[Value],
    ) -> Result<(), DeviceError> {
        let (mut old, frees) = (std::mem::take(self), live.frees());
        let same = old.grid == Some(grid) && old.values == args;
        if same && old.frees == frees {
            *self = old;
            return Ok(());
        }
        check_launch(kernel, grid, args)?;
        args.iter().filter_map(memory).try_for_each(|span| live.check(span))?;
        if same {
            old.frees = frees;
            *self = old;
            return Ok(());
        }
        let mut arguments = old.arguments;
        arguments.resize(args.len(), Argument::number(0));
        for (i, (param, value)) in kernel.params.iter().zip(args).enumerate() {
            if old.values.get(i) == Some(value) {
                continue;
            }
            arguments[i] = match (value, &param.kind) {
                (Value::U32(n), _) => Argument::number(u64::from(*n)),
                (Value::F32(x), _) => Argument::number(u64::from(x.to_bits())),
                (Value::U64(n), _) => Argument::number(*n),
                (Value::Pointer(span), _) => Argument::number(span.address()),
                (Value::Tensor(tensor), ParamKind::Tensor(shape)) => {
                    entered.tensor(&map(kernel, &param.name, shape, tensor)?)?
                }
                (Value::Tensor(_), _) => unreachable!("bug in fulgurite: a tensor passed the check of its kind"),
            };
        }
        *self = Encoded { grid: Some(grid), values: args.to_vec(), arguments, frees };
        Ok(())
    }
}

/// A GPU with its driver.
pub struct Cuda {
    pub(crate) context: Arc<Context>,
    ordinal: u32,
    facts: Facts,
    options: Options,
    cache: Option<Cache>,
    /// Hash of everything other than a kernel's text that determines its code.
    compiler: Hash128,
    /// Kernels that are still in use.
    loaded: Mutex<HashMap<Hash128, Weak<Loaded>>>,
    /// Values that destroyed graphs have kept.
    ended: Arc<Ended>,
}

impl Cuda {
    /// Opens the GPU with this index, in the order of `CUDA_VISIBLE_DEVICES`.
    ///
    /// If there is no driver or no such GPU, or one of them is too old, the error is [`DeviceError::Absent`] with the
    /// text of [`Unusable`](crate::Unusable).
    pub fn open(ordinal: u32, options: Options) -> Result<Cuda, DeviceError> {
        Cuda::open_by(driver::api()?, ordinal, options)
    }

    pub(crate) fn open_by(api: &'static Api, ordinal: u32, options: Options) -> Result<Cuda, DeviceError> {
        let facts = Context::facts(api, ordinal)?;
        check_age(&facts.name, facts.capability, facts.cuda)?;
        let context = Context::retain(api, ordinal)?;
        let cache = options.cache.clone().map(Cache::new);
        let compiler = compiler_key(&facts, &driver_build());
        Ok(Cuda { context, ordinal, facts, options, cache, compiler, loaded: Mutex::default(), ended: Arc::default() })
    }

    /// The token with which this GPU vouches for memory and streams.
    pub(crate) fn token(&self) -> &Token {
        self.context.token()
    }

    /// The compiler's log of a kernel; `None` for another device's module.
    pub fn log<'m>(&self, module: &'m Module) -> Option<&'m Log> {
        module.handle::<Loaded>().map(|loaded| &loaded.log)
    }

    /// Compute capability.
    pub fn capability(&self) -> (u32, u32) {
        self.facts.capability
    }

    /// The newest CUDA version that the driver supports.
    pub fn cuda_version(&self) -> (u32, u32) {
        self.facts.cuda
    }

    /// Milliseconds of GPU time for the work that `work` enqueues on a stream. Waits for it.
    pub fn time(&self, stream: Stream<'_>, work: impl FnOnce() -> Result<(), DeviceError>) -> Result<f32, DeviceError> {
        self.context.enter()?.time(stream, work)
    }

    /// A new stream.
    pub fn own_stream(&self) -> Result<OwnStream, DeviceError> {
        self.context.enter()?.own_stream()
    }

    /// Captures the launches that `work` puts on a stream, without running them. The default stream cannot be captured.
    pub fn capture(
        &self,
        stream: Stream<'_>,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        self.context.enter()?.capture(stream, work)
    }

    /// Replays a graph on a stream; fails if memory of its launches was freed.
    pub fn replay(&self, graph: &Graph, stream: Stream<'_>) -> Result<(), DeviceError> {
        self.context.enter()?.replay(graph, stream)
    }

    /// A kernel ready to launch, from the cache or compiled. Works during a graph capture too.
    fn make(&self, kernel: &Kernel, text: &str, key: Hash128) -> Result<Loaded, DeviceError> {
        let entered = self.context.enter()?;
        entered.relaxed(|| self.load_or_compile(&entered, kernel, text, key))?
    }

    fn load_or_compile(
        &self,
        entered: &Entered<'_>,
        kernel: &Kernel,
        text: &str,
        key: Hash128,
    ) -> Result<Loaded, DeviceError> {
        let (name, parameters) = (kernel.name.as_str(), kernel.params.len());
        let kept = self.cache.as_ref().and_then(|cache| cache.read(key));
        // If the driver rejects the cached code, compile again instead of failing.
        let from_folder = kept.and_then(|entry| {
            let code = entered.load_code(&entry.cubin, name, parameters).ok()?;
            Some((code, entry.log))
        });
        let (code, log) = match from_folder {
            Some(ready) => ready,
            None => self.compile(entered, kernel, text, key)?,
        };
        let log = Log::parse(&log);
        if self.options.losses == Losses::Refuse && !log.losses.is_empty() {
            return Err(DeviceError::Compile { kernel: name.into(), log: log.losses.join("\n") });
        }
        entered.prepare(&code, kernel.shared_bytes, kernel.cluster)?;
        Ok(Loaded { code, log, overlaps: waits_for_grid(kernel), last: Mutex::default() })
    }
}

impl Cuda {
    /// Compiles a kernel, and caches its code if possible.
    fn compile(
        &self,
        entered: &Entered<'_>,
        kernel: &Kernel,
        text: &str,
        key: Hash128,
    ) -> Result<(Code, String), DeviceError> {
        let (name, parameters) = (kernel.name.as_str(), kernel.params.len());
        let keep = |cubin: Vec<u8>, log: String| {
            let code = entered.load_code(&cubin, name, parameters)?;
            let entry = Entry { log, cubin };
            if let Some(cache) = &self.cache {
                cache.write(key, &entry);
            }
            Ok((code, entry.log))
        };
        if let Some(ptxas) = &self.options.ptxas {
            let refused = |what: String| DeviceError::Compile { kernel: name.into(), log: what };
            let hints = Hints { ptxas: Some(ptxas.clone()), ..Hints::default() };
            // The caller is waiting, so skip the disassembler: `kernel assemble` and the kernels' tests look for what
            // only it finds.
            let found = Assembler::find(&hints).map(Assembler::without_disassembler);
            let report = found.and_then(|found| found.assemble(kernel)).map_err(|e| refused(e.to_string()))?;
            report
                .verdict()
                .map_err(|faults| refused(faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")))?;
            return keep(report.cubin, format!("Used {} registers", report.registers));
        }
        // Only the linker returns its code, but it compiles for separate linking, where register counts cannot be
        // changed: setmaxnreg would be dropped (C7504).
        let hands_out = kernel.roles.iter().any(|role| role.registers.is_some());
        let linked = match hands_out {
            true => Err("the linker would drop setmaxnreg; the driver keeps it".to_string()),
            false => entered.compile(text).map_err(|(refused, _)| refused.to_string()),
        };
        match linked {
            Ok((cubin, log)) => keep(cubin, log),
            Err(why) => match entered.load_text(text, name, parameters) {
                Ok((code, log)) => Ok((code, format!("{log}\nnot kept: {why}"))),
                Err((error, log)) => Err(compile_error(name, error, log)),
            },
        }
    }
}

/// The compiler's log, or the driver's error if the log is empty.
fn compile_error(kernel: &str, error: DeviceError, log: String) -> DeviceError {
    let log = if log.is_empty() { error.to_string() } else { log };
    DeviceError::Compile { kernel: kernel.into(), log }
}

/// Whether a kernel waits for the previous grid.
fn waits_for_grid(kernel: &Kernel) -> bool {
    let mut waits = false;
    kernel.each_op(&mut |op| waits |= *op.inst == table::sync::GRID_WAIT);
    waits
}

/// The driver's build, if the system tells it: the compiler may change without a new CUDA version.
fn driver_build() -> Vec<u8> {
    std::fs::read("/proc/driver/nvidia/version").unwrap_or_default()
}

fn compiler_key(facts: &Facts, build: &[u8]) -> Hash128 {
    let Facts { name, capability, cuda, multiprocessors: _ } = facts;
    let numbers = [capability.0, capability.1, cuda.0, cuda.1].map(u32::to_le_bytes).concat();
    Hash128::EMPTY.part(name.as_bytes()).part(&numbers).part(build)
}

/// Checks that a GPU runs code for the kernel's target, and that its driver reads the PTX version.
fn check_target(kernel: &Kernel, device: Target) -> Result<(), DeviceError> {
    let (own, version) = (kernel.target, kernel.ptx_version());
    if own.runs_on(&device.arch) && version <= device.ptx {
        return Ok(());
    }
    let words = |target: Target, (major, minor): (u8, u8)| format!("{} with PTX {major}.{minor}", target.name());
    let (want, got) = (words(own, version), words(device, device.ptx));
    Err(DeviceError::Target { kernel: kernel.name.clone(), want, got })
}

impl Device for Cuda {
    fn name(&self) -> String {
        self.facts.name.clone()
    }

    fn place(&self) -> (&'static str, u32) {
        ("cuda", self.ordinal)
    }

    fn target(&self) -> Target {
        Target::of(self.facts.capability, self.facts.cuda)
    }

    fn multiprocessors(&self) -> u32 {
        self.facts.multiprocessors
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        let (span, owner) = self.context.enter()?.allocate(bytes)?;
        Ok(Buffer::new(span, Box::new(owner)))
    }

    /// Like [`allocate`](Device::allocate), this may be called during a graph capture.
    fn zeroed(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        let (span, owner) = self.context.enter()?.zeroed(bytes)?;
        Ok(Buffer::new(span, Box::new(owner)))
    }

    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), DeviceError> {
        self.context.enter()?.upload(to, bytes)
    }

    fn download(&self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.context.enter()?.download(from, bytes)
    }

    fn check_memory(&self, span: Span) -> Result<(), DeviceError> {
        self.context.live().read().check(span)
    }

    /// Loads a kernel, or shares one that is already loaded. When a module is dropped, the driver unloads it after its
    /// launches; a [`Graph`] holds the modules of its launches.
    fn load(&self, kernel: Arc<Kernel>) -> Result<Module, DeviceError> {
        check_target(&kernel, self.target())?;
        let text = kernel.ptx();
        let key = self.compiler.part(text.as_bytes());
        // Hold the lock while compiling: the driver compiles one kernel at a time anyway, and no kernel is compiled
        // twice.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ready) = loaded.get(&key).and_then(Weak::upgrade) {
            return Ok(Module::new(kernel, ready));
        }
        let ready = Arc::new(self.make(&kernel, &text, key)?);
        loaded.retain(|_, module| module.strong_count() > 0);
        loaded.insert(key, Arc::downgrade(&ready));
        Ok(Module::new(kernel, ready))
    }

    fn launch(&self, module: &Module, grid: [u32; 3], args: &[Value], stream: Stream<'_>) -> Result<(), DeviceError> {
        let kernel = module.kernel();
        let ours = module.handle::<Loaded>().filter(|loaded| loaded.code.belongs_to(&self.context));
        let loaded = ours.ok_or_else(|| DeviceError::Failed {
            call: "launch",
            what: format!("the module of `{}` is another device's; load the kernel on this one", kernel.name),
        })?;
        let entered = self.context.enter()?;
        // If another thread launches the same kernel, this one encodes its arguments separately.
        let (mut kept, mut own) = (loaded.last.try_lock().ok(), Encoded::default());
        let encoded = kept.as_deref_mut().unwrap_or(&mut own);
        let live = self.context.live().read();
        encoded.renew((&entered, &live), kernel, grid, args)?;
        let grid = Grid {
            blocks: grid,
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
            cluster: kernel.cluster,
            overlaps: loaded.overlaps,
        };
        entered.launch(&loaded.code, grid, &encoded.arguments, stream)?;
        driver::note_launch(module, args.iter().filter_map(memory));
        Ok(())
    }

    fn synchronize(&self, stream: Stream<'_>) -> Result<(), DeviceError> {
        self.context.enter()?.synchronize(stream)
    }

    /// Also drops values kept by graphs that can no longer be replayed.
    fn capture_id(&self, stream: Stream<'_>) -> Result<Option<u64>, DeviceError> {
        let entered = self.context.enter()?;
        self.ended.clear();
        entered.capture_id(stream)
    }

    fn keep_for_replays(&self, stream: Stream<'_>, value: Box<dyn Any + Send>) -> Result<(), DeviceError> {
        self.context.enter()?.keep(stream, value, &self.ended)
    }

    fn timed(
        &self,
        stream: Stream<'_>,
        work: &mut dyn FnMut() -> Result<(), DeviceError>,
    ) -> Result<Option<f64>, DeviceError> {
        // Events on the default stream would wait for all other streams.
        self.time(stream, work).map(|milliseconds| Some(f64::from(milliseconds) / 1e3))
    }
}

fn map(kernel: &Kernel, param: &str, shape: &BoxShape, tensor: &TensorSpan) -> Result<MapArguments, LaunchError> {
    let named = |what| LaunchError::Tensor { kernel: kernel.name.clone(), param: param.into(), what };
    MapArguments::new(shape, tensor).map_err(named)
}

#[cfg(test)]
mod tests;
