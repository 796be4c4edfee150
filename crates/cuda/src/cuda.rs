//! A GPU as a device.

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

/// What to do with a kernel of which the compiler says that it will be slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Losses {
    /// It is an error: a kernel whose products wait for each other computes the right thing at half the speed.
    #[default]
    Refuse,
    /// It is loaded; [`Cuda::log`] tells.
    Allow,
}

/// How a GPU is used.
///
/// ```
/// use fulgurite_cuda::{Losses, Options};
///
/// let options = Options { cache: Some("/var/cache/kernels".into()), ..Options::default() };
/// assert_eq!(options.losses, Losses::Refuse);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// Where compiled kernels are kept; [`default_cache_dir`](crate::default_cache_dir) gives the usual place. `None`
    /// keeps nothing, and so does a folder that cannot be written.
    pub cache: Option<PathBuf>,
    /// What to do with slow code.
    pub losses: Losses,
    /// An assembler to use instead of the driver's, where there is one. Only its code, and the driver's for kernels
    /// that do not hand out registers, can be kept in `cache`; the driver keeps the rest in a folder of its own.
    pub ptxas: Option<PathBuf>,
}

/// What a module of this device is.
struct Loaded {
    code: Code,
    log: Log,
    /// Whether a launch may start while the one before it ends: the kernel itself waits for it.
    overlaps: bool,
    last: Mutex<Encoded>,
}

/// A launch as it was asked for, checked, and as the driver takes it. Most launches differ from the one before in little
/// or nothing, and a tensor costs the driver a tenth of a launch.
#[derive(Default)]
struct Encoded {
    /// None before the first.
    grid: Option<[u32; 3]>,
    values: Vec<Value>,
    arguments: Vec<Argument>,
    /// [`Allocations::frees`] when the memory was last found alive.
    frees: u64,
}

/// The memory that an argument points to.
fn memory(value: &Value) -> Option<Span> {
    match value {
        Value::Pointer(span) => Some(*span),
        Value::Tensor(tensor) => Some(tensor.span),
        _ => None,
    }
}

impl Encoded {
    /// Becomes another launch of the same kernel: what is the same stays. After an error it is empty.
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

/// A GPU, by its driver.
pub struct Cuda {
    pub(crate) context: Arc<Context>,
    ordinal: u32,
    facts: Facts,
    options: Options,
    cache: Option<Cache>,
    /// Everything but a kernel's text that decides what its code is.
    compiler: Hash128,
    /// Kernels that someone still holds.
    loaded: Mutex<HashMap<Hash128, Weak<Loaded>>>,
    /// What recordings kept that are gone.
    ended: Arc<Ended>,
}

impl Cuda {
    /// The GPU with this number, in the order of `CUDA_VISIBLE_DEVICES`.
    ///
    /// Where there is no driver or no such GPU, or one of them is too old, this is [`DeviceError::Absent`] with the
    /// words of [`Unusable`](crate::Unusable).
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

    /// The name in which this GPU vouches for memory and streams.
    pub(crate) fn token(&self) -> &Token {
        self.context.token()
    }

    /// What the compiler said of a kernel; `None` for another device's module.
    pub fn log<'m>(&self, module: &'m Module) -> Option<&'m Log> {
        module.handle::<Loaded>().map(|loaded| &loaded.log)
    }

    /// Compute capability.
    pub fn capability(&self) -> (u32, u32) {
        self.facts.capability
    }

    /// The newest CUDA version that the driver knows.
    pub fn cuda_version(&self) -> (u32, u32) {
        self.facts.cuda
    }

    /// Milliseconds that the GPU takes for what `work` puts on a stream. Waits for it.
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

    /// Replays a graph on a stream; an error where memory of its launches was freed.
    pub fn replay(&self, graph: &Graph, stream: Stream<'_>) -> Result<(), DeviceError> {
        self.context.enter()?.replay(graph, stream)
    }

    /// A kernel ready to launch: from the folder, or compiled. Also while launches are recorded.
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
        // Code that the driver refuses is no reason to fail: it is compiled again.
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
    /// Compiles a kernel, and keeps its code where that is possible.
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
            // Who calls is waiting: what only a disassembler finds, `kernel assemble` and the tests of kernels look for.
            let found = Assembler::find(&hints).map(Assembler::without_disassembler);
            let report = found.and_then(|found| found.assemble(kernel)).map_err(|e| refused(e.to_string()))?;
            report
                .verdict()
                .map_err(|faults| refused(faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")))?;
            return keep(report.cubin, format!("Used {} registers", report.registers));
        }
        // Only the linker hands its code out, and it compiles for use by others, where registers cannot be handed out:
        // setmaxnreg would be dropped (C7504).
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

/// The compiler's words, or the driver's where it has none.
fn compile_error(kernel: &str, error: DeviceError, log: String) -> DeviceError {
    let log = if log.is_empty() { error.to_string() } else { log };
    DeviceError::Compile { kernel: kernel.into(), log }
}

/// Whether a kernel waits for the grid before it.
fn waits_for_grid(kernel: &Kernel) -> bool {
    let mut waits = false;
    kernel.each_op(&mut |op| waits |= *op.inst == table::sync::GRID_WAIT);
    waits
}

/// The driver's build, where the system tells it: the compiler may change without a new CUDA version.
fn driver_build() -> Vec<u8> {
    std::fs::read("/proc/driver/nvidia/version").unwrap_or_default()
}

fn compiler_key(facts: &Facts, build: &[u8]) -> Hash128 {
    let Facts { name, capability, cuda, multiprocessors: _ } = facts;
    let numbers = [capability.0, capability.1, cuda.0, cuda.1].map(u32::to_le_bytes).concat();
    Hash128::EMPTY.part(name.as_bytes()).part(&numbers).part(build)
}

/// Whether a GPU runs what is printed for a target, and its driver reads the PTX version.
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

    /// As [`allocate`](Device::allocate) it may be called while a graph is captured.
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

    /// Makes a kernel ready; one that is loaded already is shared. The driver unloads a module that is dropped when its
    /// launches are done, and a [`Graph`] holds the modules of its launches.
    fn load(&self, kernel: Arc<Kernel>) -> Result<Module, DeviceError> {
        check_target(&kernel, self.target())?;
        let text = kernel.ptx();
        let key = self.compiler.part(text.as_bytes());
        // Held while compiling: the driver compiles one kernel at a time anyway, and nobody compiles one twice.
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
        // While another thread launches the same kernel, this one encodes for itself.
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

    /// Also drops what graphs have kept that can no longer be replayed.
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
        // The default stream's clock would wait for all others.
        self.time(stream, work).map(|milliseconds| Some(f64::from(milliseconds) / 1e3))
    }
}

fn map(kernel: &Kernel, param: &str, shape: &BoxShape, tensor: &TensorSpan) -> Result<MapArguments, LaunchError> {
    let named = |what| LaunchError::Tensor { kernel: kernel.name.clone(), param: param.into(), what };
    MapArguments::new(shape, tensor).map_err(named)
}

#[cfg(test)]
mod tests;
