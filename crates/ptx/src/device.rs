//! The interface to devices that run kernels, and the plans that run on them.
//!
//! The CUDA driver and the simulator both implement [`Device`], so a test or a kernel library depends on neither.

use crate::kernel::{BoxShape, Kernel, ParamKind, Target};
use crate::product::Number;
use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// The identity that owns spans and streams. A device accepts only spans and streams of tokens that it knows. A token
/// cannot be copied, so its owner alone decides which addresses and handles are valid. A [`Span`] or [`Stream`] in safe
/// code therefore comes from a device, or from an `unsafe` block of the device's crate that vouches for it.
#[derive(Debug, PartialEq, Eq)]
pub struct Token(u64);

impl Default for Token {
    fn default() -> Self {
        Token::new()
    }
}

impl Token {
    /// An identity that no other token of the process has.
    pub fn new() -> Token {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Token(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The number carried by spans and streams that this token made.
    pub fn id(&self) -> u64 {
        self.0
    }

    /// Memory that this token vouches for.
    pub fn span(&self, address: u64, bytes: u64) -> Span {
        Span { address, bytes, owner: self.0 }
    }

    /// A stream that this token vouches for, by its handle. `'a` is the stream's lifetime.
    pub fn stream<'a>(&self, handle: u64) -> Stream<'a> {
        Stream { handle, owner: self.0, lives: PhantomData }
    }
}

/// A contiguous range of bytes in a device's memory.
///
/// Devices make spans ([`Device::allocate`]). [`Span::new`] describes memory of no device, for plans that are inspected
/// but not run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Span {
    address: u64,
    bytes: u64,
    /// [`Token::id`] of the allocation, or of the device that vouches for the memory.
    owner: u64,
}

/// Omits the owner, so that a launch prints the same text in every process.
impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Span").field("address", &self.address).field("bytes", &self.bytes).finish()
    }
}

impl Span {
    /// Memory of no device. Devices reject launches with it.
    pub fn new(address: u64, bytes: u64) -> Span {
        Span { address, bytes, owner: 0 }
    }

    /// Address of the first byte.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// [`Token::id`] of the span's owner; 0 for memory of no device.
    pub fn owner(self) -> u64 {
        self.owner
    }

    /// The part that starts at byte `offset`.
    pub fn from(self, offset: u64) -> Span {
        let offset = offset.min(self.bytes);
        Span { address: self.address + offset, bytes: self.bytes - offset, ..self }
    }

    /// The first `bytes` bytes, or the whole span if it is shorter.
    pub fn first(self, bytes: u64) -> Span {
        Span { bytes: bytes.min(self.bytes), ..self }
    }
}

/// Memory of a device, freed on drop.
pub struct Buffer {
    span: Span,
    /// Frees the memory when dropped.
    _owner: Box<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Wraps memory that `owner` frees when it is dropped.
    pub fn new(span: Span, owner: Box<dyn Any + Send + Sync>) -> Self {
        Buffer { span, _owner: owner }
    }
    /// Address and size of the memory.
    pub fn span(&self) -> Span {
        self.span
    }
}

/// A queue of a device: work on one stream runs in order. Every device has the default stream; the device makes the
/// others, and no stream outlives `'a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Stream<'a> {
    handle: u64,
    owner: u64,
    lives: PhantomData<&'a ()>,
}

impl Stream<'_> {
    /// The driver's handle; 0 for the default stream.
    pub fn handle(self) -> u64 {
        self.handle
    }

    /// [`Token::id`] of the stream's owner; 0 for the default stream.
    pub fn owner(self) -> u64 {
        self.owner
    }
}

/// A kernel that a device has loaded.
#[derive(Clone)]
pub struct Module {
    kernel: Arc<Kernel>,
    handle: Arc<dyn Any + Send + Sync>,
}

impl Module {
    /// Pairs a kernel with the data that its device needs to launch it.
    pub fn new(kernel: Arc<Kernel>, handle: Arc<dyn Any + Send + Sync>) -> Self {
        Module { kernel, handle }
    }
    /// The kernel that was loaded.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }
    /// A shared pointer to the kernel that was loaded.
    pub fn shared_kernel(&self) -> Arc<Kernel> {
        self.kernel.clone()
    }
    /// The device's own data, if they have type `T`.
    pub fn handle<T: 'static>(&self) -> Option<&T> {
        self.handle.downcast_ref()
    }
}

/// A tensor in a device's memory, as TMA sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpan {
    /// Memory of the whole tensor.
    pub span: Span,
    /// Element type.
    pub number: Number,
    /// Elements along each axis, innermost first.
    pub extent: Vec<u64>,
    /// Byte stride of each axis except the innermost one, whose elements are contiguous.
    pub strides: Vec<u64>,
    /// Actual number of rows, if the axes are those of a [ragged](Self::ragged) tensor.
    pub ragged: Option<u64>,
}

/// The number of rows that a ragged tensor claims to have. A slice of n rows that starts at row s is addressed from its
/// end: its rows are 2^30 - n and later, and rows past 2^30 do not exist.
pub(crate) const RAGGED_ROWS: u32 = 1 << 30;
/// Larger than any coordinate.
const RAGGED_FAR: u64 = 0x7fff_0000;
/// 2^30 steps of 2^34 bytes wrap around to the start, because addresses have 64 bits.
const RAGGED_TURN: u64 = 1 << 34;

impl TensorSpan {
    /// A tensor `[row, head, element]` whose tiles end with any chosen slice of rows. Three axes count rows, and their
    /// steps cancel: row r of a slice with n rows from row s is at 2^30 - n + r on the first axis, at s + n on the
    /// second, and at 2^30 on the third, which moves 2^30 rows back.
    pub fn ragged(span: Span, number: Number, [rows, heads, elements]: [u64; 3], [row, head]: [u64; 2]) -> TensorSpan {
        TensorSpan {
            span,
            number,
            extent: vec![elements, RAGGED_ROWS.into(), heads, RAGGED_FAR, RAGGED_FAR],
            strides: vec![row, head, row, RAGGED_TURN.saturating_sub(row)],
            ragged: Some(rows),
        }
    }
}

/// The argument that a launch gives for a parameter.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// An array in device memory.
    Pointer(Span),
    /// A tensor for TMA.
    Tensor(TensorSpan),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Value::U32(_) => "an integer of 32 bits",
            Value::F32(_) => "a float",
            Value::U64(_) => "an integer of 64 bits",
            Value::Pointer(_) => "a pointer",
            Value::Tensor(_) => "a tensor",
        }
    }
}

impl ParamKind {
    fn kind(&self) -> &'static str {
        match self {
            ParamKind::U32 => "an integer of 32 bits",
            ParamKind::F32 => "a float",
            ParamKind::U64 => "an integer of 64 bits",
            ParamKind::Pointer(_) => "a pointer",
            ParamKind::Tensor(_) => "a tensor",
        }
    }
}

/// The reason why a launch was rejected before it started.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Too many or too few arguments.
    #[error("kernel `{kernel}` takes {want} arguments, {got} were given")]
    Count {
        /// Name of the kernel.
        kernel: String,
        /// Number of parameters.
        want: usize,
        /// Number of arguments.
        got: usize,
    },
    /// An argument of the wrong kind.
    #[error("kernel `{kernel}`: `{param}` is {want}, {got} was given")]
    Kind {
        /// Name of the kernel.
        kernel: String,
        /// Name of the parameter.
        param: String,
        /// Kind of the parameter.
        want: &'static str,
        /// Kind of the argument.
        got: &'static str,
    },
    /// An address that is not aligned.
    #[error(
        "kernel `{kernel}`: `{param}` lies at {address:#x}, allowed: multiples of {align} bytes; copy it to an aligned buffer"
    )]
    Alignment {
        /// Name of the kernel.
        kernel: String,
        /// Name of the parameter.
        param: String,
        /// Address of the argument.
        address: u64,
        /// Required alignment in bytes.
        align: u64,
    },
    /// A tensor that TMA does not accept.
    #[error("kernel `{kernel}`: `{param}` {what}")]
    Tensor {
        /// Name of the kernel.
        kernel: String,
        /// Name of the parameter.
        param: String,
        /// The fault, the allowed values and a remedy.
        what: String,
    },
    /// A grid that exceeds the limits or splits a cluster.
    #[error(
        "kernel `{kernel}`: a grid of {got:?} CTAs, allowed: 1 to {most:?}, the first a multiple of the cluster of {cluster}"
    )]
    Grid {
        /// Name of the kernel.
        kernel: String,
        /// Requested CTAs along each axis.
        got: [u32; 3],
        /// Largest number of CTAs along each axis.
        most: [u32; 3],
        /// CTAs per cluster.
        cluster: u32,
    },
}

const MOST_CTAS: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// Checks that a kernel can be launched with this grid and these arguments.
pub fn check_launch(kernel: &Kernel, grid: [u32; 3], args: &[Value]) -> Result<(), LaunchError> {
    let name = || kernel.name.clone();
    if args.len() != kernel.params.len() {
        return Err(LaunchError::Count { kernel: name(), want: kernel.params.len(), got: args.len() });
    }
    let inside = grid.iter().zip(MOST_CTAS).all(|(&n, most)| (1..=most).contains(&n));
    if !inside || !grid[0].is_multiple_of(kernel.cluster) {
        return Err(LaunchError::Grid { kernel: name(), got: grid, most: MOST_CTAS, cluster: kernel.cluster });
    }
    for (param, value) in kernel.params.iter().zip(args) {
        let aligned = |address: u64, align: u64| {
            if address.is_multiple_of(align) {
                return Ok(());
            }
            Err(LaunchError::Alignment { kernel: name(), param: param.name.clone(), address, align })
        };
        match (&param.kind, value) {
            (ParamKind::U32, Value::U32(_)) | (ParamKind::F32, Value::F32(_)) | (ParamKind::U64, Value::U64(_)) => {}
            (ParamKind::Pointer(align), Value::Pointer(span)) => aligned(span.address(), u64::from(*align))?,
            (ParamKind::Tensor(shape), Value::Tensor(tensor)) => {
                aligned(tensor.span.address(), 16)?;
                check_tensor(shape, tensor).map_err(|what| LaunchError::Tensor {
                    kernel: name(),
                    param: param.name.clone(),
                    what,
                })?;
            }
            (want, got) => {
                let (want, got) = (want.kind(), got.kind());
                return Err(LaunchError::Kind { kernel: name(), param: param.name.clone(), want, got });
            }
        }
    }
    Ok(())
}

/// Checks a tensor against its box. The error text continues a sentence that starts with the parameter's name.
fn check_tensor(shape: &BoxShape, tensor: &TensorSpan) -> Result<(), String> {
    let rank = shape.extent.len();
    if tensor.number != shape.number {
        return Err(format!("has elements {:?}, the kernel wants {:?}", tensor.number, shape.number));
    }
    if tensor.extent.len() != rank || tensor.strides.len() != rank - 1 {
        let (axes, strides) = (tensor.extent.len(), tensor.strides.len());
        return Err(format!("has {axes} axes and {strides} strides, the kernel wants {rank} and {}", rank - 1));
    }
    if let Some(n) = tensor.extent.iter().find(|n| !(1..=1 << 32).contains(*n)) {
        return Err(format!("has {n} elements along an axis, allowed: 1 to 2^32; an empty tensor needs no launch"));
    }
    if let Some(stride) = tensor.strides.iter().find(|s| **s % 16 != 0 || **s >= 1 << 40) {
        return Err(format!(
            "has a stride of {stride} bytes, allowed: multiples of 16 below 2^40; pad its rows, or copy it"
        ));
    }
    let extent = match tensor.ragged {
        Some(rows) => &[tensor.extent[0], rows.max(1), tensor.extent[2]],
        None => &tensor.extent[..],
    };
    let last: u64 = extent[1..].iter().zip(&tensor.strides).map(|(n, stride)| (n - 1) * stride).sum();
    let end = last + tensor.extent[0] * u64::from(tensor.number.bytes());
    if end > tensor.span.bytes() {
        return Err(format!(
            "reaches to byte {end} of memory of {} bytes; check extents and strides",
            tensor.span.bytes()
        ));
    }
    Ok(())
}

/// Errors of a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No device is present.
    #[error("no device: {0}")]
    Absent(String),
    /// The device cannot run code for the kernel's target.
    #[error("kernel `{kernel}` is printed for {want}, and the device is {got}; build it for the device's target")]
    Target {
        /// Name of the kernel.
        kernel: String,
        /// Target of the kernel.
        want: String,
        /// Target of the device.
        got: String,
    },
    /// The text was not accepted; the log says why.
    #[error("kernel `{kernel}` was not accepted: {log}")]
    Compile {
        /// Name of the kernel.
        kernel: String,
        /// Log of the compiler.
        log: String,
    },
    /// The launch was rejected before it started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The device is out of memory.
    #[error("out of device memory: {asked} bytes were asked for, {free} are free; free some, or split the work")]
    Memory {
        /// Bytes asked for.
        asked: u64,
        /// Free bytes.
        free: u64,
    },
    /// The process cannot have this much memory of the host.
    #[error("{what} needs {bytes} bytes, more than this process can have; check the sizes, or split the call")]
    Host {
        /// Purpose of the memory.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The memory belongs to another device or was freed.
    #[error(
        "memory at {address:#x} is not this device's or was freed, allowed: buffers of the device that still live; allocate it \
         on this device and keep it until the call"
    )]
    Foreign {
        /// Address of the memory.
        address: u64,
    },
    /// The stream belongs to another device.
    #[error(
        "the stream is another device's, allowed: the default stream and streams of this device; make it on this device"
    )]
    Stream,
    /// The bytes lie outside the buffer.
    #[error("{bytes} bytes at offset {offset} of a buffer of {len}")]
    Bounds {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
        /// Size of the buffer in bytes.
        len: u64,
    },
    /// An error that the driver or the simulator reports.
    #[error("{call}: {what}")]
    Failed {
        /// The call that failed.
        call: &'static str,
        /// The reported message.
        what: String,
    },
}

/// A device that runs kernels.
///
/// Every span and stream passed to a call must belong to this device ([`Token`]) and be alive. The device rejects
/// others with [`DeviceError::Foreign`] and [`DeviceError::Stream`]. A buffer may be dropped while a launch uses it:
/// the device frees the memory after the launch.
pub trait Device: Send + Sync {
    /// Name of the device, for messages.
    fn name(&self) -> String;
    /// Kind of the device and its index among devices of that kind, such as `("cuda", 0)`.
    fn place(&self) -> (&'static str, u32) {
        ("device", 0)
    }
    /// The target that kernels are printed for.
    fn target(&self) -> Target;
    /// Number of SMs, which is the CTA count of a persistent kernel.
    fn multiprocessors(&self) -> u32;
    /// Allocates memory with undefined contents.
    fn allocate(&self, bytes: u64) -> Result<Buffer, DeviceError>;
    /// Allocates memory filled with zeros.
    fn zeroed(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        let buffer = self.allocate(bytes)?;
        self.upload(buffer.span(), &vec![0; bytes as usize])?;
        Ok(buffer)
    }
    /// Copies to device memory, after all earlier work on the default stream.
    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Copies from device memory, after all earlier work on the default stream.
    fn download(&self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Rejects memory that belongs to another device or was freed. Launches check this too; a caller that makes several
    /// launches checks before the first.
    fn check_memory(&self, span: Span) -> Result<(), DeviceError> {
        let _ = span;
        Ok(())
    }
    /// Loads a kernel.
    fn load(&self, kernel: Arc<Kernel>) -> Result<Module, DeviceError>;
    /// Checks every argument, then starts a kernel.
    fn launch(&self, module: &Module, grid: [u32; 3], args: &[Value], stream: Stream<'_>) -> Result<(), DeviceError>;
    /// Waits for all work on a stream, and returns its errors.
    fn synchronize(&self, stream: Stream<'_>) -> Result<(), DeviceError>;
    /// The id of the graph capture that records this stream, whoever began it; `None` if launches run at once. Ids are
    /// unique within the process.
    fn capture_id(&self, stream: Stream<'_>) -> Result<Option<u64>, DeviceError> {
        let _ = stream;
        Ok(None)
    }
    /// Keeps a value alive as long as the graph that records this stream can be replayed. Drops the value at once if
    /// nothing is being recorded.
    fn keep_for_replays(&self, stream: Stream<'_>, value: Box<dyn Any + Send>) -> Result<(), DeviceError> {
        let _ = (stream, value);
        Ok(())
    }
    /// Runs `work`, which enqueues work on a stream, and returns the seconds it takes there; `None` for a device
    /// without a clock.
    fn timed(
        &self,
        stream: Stream<'_>,
        work: &mut dyn FnMut() -> Result<(), DeviceError>,
    ) -> Result<Option<f64>, DeviceError> {
        work()?;
        self.synchronize(stream).map(|()| None)
    }
}

/// A borrowed device.
impl<D: Device + ?Sized> Device for &D {
    fn name(&self) -> String {
        (**self).name()
    }

    fn place(&self) -> (&'static str, u32) {
        (**self).place()
    }

    fn target(&self) -> Target {
        (**self).target()
    }

    fn multiprocessors(&self) -> u32 {
        (**self).multiprocessors()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        (**self).allocate(bytes)
    }

    fn zeroed(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        (**self).zeroed(bytes)
    }

    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), DeviceError> {
        (**self).upload(to, bytes)
    }

    fn download(&self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError> {
        (**self).download(from, bytes)
    }

    fn check_memory(&self, span: Span) -> Result<(), DeviceError> {
        (**self).check_memory(span)
    }

    fn load(&self, kernel: Arc<Kernel>) -> Result<Module, DeviceError> {
        (**self).load(kernel)
    }

    fn launch(&self, module: &Module, grid: [u32; 3], args: &[Value], stream: Stream<'_>) -> Result<(), DeviceError> {
        (**self).launch(module, grid, args, stream)
    }

    fn synchronize(&self, stream: Stream<'_>) -> Result<(), DeviceError> {
        (**self).synchronize(stream)
    }

    fn capture_id(&self, stream: Stream<'_>) -> Result<Option<u64>, DeviceError> {
        (**self).capture_id(stream)
    }

    fn keep_for_replays(&self, stream: Stream<'_>, value: Box<dyn Any + Send>) -> Result<(), DeviceError> {
        (**self).keep_for_replays(stream, value)
    }

    fn timed(
        &self,
        stream: Stream<'_>,
        work: &mut dyn FnMut() -> Result<(), DeviceError>,
    ) -> Result<Option<f64>, DeviceError> {
        (**self).timed(stream, work)
    }
}

/// One launch of a plan.
#[derive(Clone)]
pub struct Launch {
    /// Kernel to launch.
    pub kernel: Arc<Kernel>,
    /// Number of CTAs along each axis.
    pub grid: [u32; 3],
    /// One argument for each parameter.
    pub args: Vec<Value>,
}

/// A list of launches that run in order.
#[derive(Clone, Default)]
pub struct Plan {
    /// The launches, in order.
    pub launches: Vec<Launch>,
}

impl Plan {
    /// Runs every launch in order, on one stream, with modules from `load`.
    pub fn run(
        &self,
        device: &dyn Device,
        stream: Stream<'_>,
        load: &mut dyn FnMut(&Arc<Kernel>) -> Result<Module, DeviceError>,
    ) -> Result<(), DeviceError> {
        self.launches.iter().try_for_each(|l| device.launch(&load(&l.kernel)?, l.grid, &l.args, stream))
    }
}
