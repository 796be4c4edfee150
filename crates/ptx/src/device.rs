//! What runs kernels: a device, and the plans that run on it.
//!
//! The CUDA driver and the simulator answer the same [`Device`]; a test or a kernel library names neither.

use crate::kernel::{BoxShape, Kernel, ParamKind, Target};
use crate::product::Number;
use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// An identity in whose name spans and streams are made. A device accepts only those made in a name it knows, and a name
/// cannot be copied: its owner alone decides which addresses and handles are good. So a [`Span`] or a [`Stream`] that safe code
/// holds was handed out by a device, or vouched for in an `unsafe` block of the device's crate.
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

    /// The number that spans and streams made in this name carry.
    pub fn id(&self) -> u64 {
        self.0
    }

    /// Memory, in this name.
    pub fn span(&self, address: u64, bytes: u64) -> Span {
        Span { address, bytes, owner: self.0 }
    }

    /// A stream by its handle, in this name. `'a` is how long the stream lives.
    pub fn stream<'a>(&self, handle: u64) -> Stream<'a> {
        Stream { handle, owner: self.0, lives: PhantomData }
    }
}

/// A run of bytes in a device's memory.
///
/// Devices make them ([`Device::allocate`]). [`Span::new`] describes memory of no device, for plans that are only looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Span {
    address: u64,
    bytes: u64,
    /// [`Token::id`] of the allocation, or of the device that vouches for the memory.
    owner: u64,
}

/// Without the owner: a launch prints the same in every process.
impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Span").field("address", &self.address).field("bytes", &self.bytes).finish()
    }
}

impl Span {
    /// Memory of no device: launches with it are refused.
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

    /// [`Token::id`] of whoever made it; 0 for memory of no device.
    pub fn owner(self) -> u64 {
        self.owner
    }

    /// The part from byte `offset` on.
    pub fn from(self, offset: u64) -> Span {
        let offset = offset.min(self.bytes);
        Span { address: self.address + offset, bytes: self.bytes - offset, ..self }
    }

    /// The first `bytes` bytes, or all of them where there are fewer.
    pub fn first(self, bytes: u64) -> Span {
        Span { bytes: bytes.min(self.bytes), ..self }
    }
}

/// Memory of a device, given back when dropped.
pub struct Buffer {
    span: Span,
    /// Frees the memory when it goes.
    _owner: Box<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Memory that `owner` frees when it is dropped.
    pub fn new(span: Span, owner: Box<dyn Any + Send + Sync>) -> Self {
        Buffer { span, _owner: owner }
    }
    /// Where it lies.
    pub fn span(&self) -> Span {
        self.span
    }
}

/// A queue of a device: what is put on one stream runs in order. The default stream exists on every device; others come from
/// the device, and none outlives `'a`.
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

    /// [`Token::id`] of whoever made it; 0 for the default stream.
    pub fn owner(self) -> u64 {
        self.owner
    }
}

/// A kernel that a device has made ready.
#[derive(Clone)]
pub struct Module {
    kernel: Arc<Kernel>,
    handle: Arc<dyn Any + Send + Sync>,
}

impl Module {
    /// A kernel with what the device needs to launch it.
    pub fn new(kernel: Arc<Kernel>, handle: Arc<dyn Any + Send + Sync>) -> Self {
        Module { kernel, handle }
    }
    /// The kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }
    /// The kernel, shared.
    pub fn shared_kernel(&self) -> Arc<Kernel> {
        self.kernel.clone()
    }
    /// What the device put there, if it is of this type.
    pub fn handle<T: 'static>(&self) -> Option<&T> {
        self.handle.downcast_ref()
    }
}

/// A tensor in a device's memory, as the copy engine sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpan {
    /// Its memory.
    pub span: Span,
    /// Element type.
    pub number: Number,
    /// Elements along each axis, innermost first.
    pub extent: Vec<u64>,
    /// Bytes from one element to the next along each axis but the innermost, where elements lie together.
    pub strides: Vec<u64>,
    /// The rows there are, where the axes are those of a [ragged](Self::ragged) tensor.
    pub ragged: Option<u64>,
}

/// The rows that a ragged tensor pretends to have. A slice of n rows that begins at row s is addressed from its end:
/// rows 2^30 - n and on exist, and what follows them does not.
pub(crate) const RAGGED_ROWS: u32 = 1 << 30;
/// More than any coordinate.
const RAGGED_FAR: u64 = 0x7fff_0000;
/// 2^30 steps of 2^34 bytes come back to where they began, for addresses have 64 bits.
const RAGGED_TURN: u64 = 1 << 34;

impl TensorSpan {
    /// A tensor `[row, head, element]` whose tiles end with a slice of rows, whichever it is: rows are counted along three
    /// axes, whose steps cancel. Row r of a slice that begins at s and has n rows lies at row 2^30 - n + r of the first, at
    /// s + n of the second, and at 2^30 of the third, which takes 2^30 rows back.
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

/// What a launch gives for a parameter.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An integer of 32 bits.
    U32(u32),
    /// A float.
    F32(f32),
    /// An integer of 64 bits.
    U64(u64),
    /// An array.
    Pointer(Span),
    /// A tensor.
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

/// Why a launch was refused before anything happened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Too many or too few arguments.
    #[error("kernel `{kernel}` takes {want} arguments, {got} were given")]
    Count {
        /// The kernel.
        kernel: String,
        /// Parameters.
        want: usize,
        /// Arguments.
        got: usize,
    },
    /// An argument of the wrong kind.
    #[error("kernel `{kernel}`: `{param}` is {want}, {got} was given")]
    Kind {
        /// The kernel.
        kernel: String,
        /// The parameter.
        param: String,
        /// What it is.
        want: &'static str,
        /// What was given.
        got: &'static str,
    },
    /// An address that is not aligned.
    #[error(
        "kernel `{kernel}`: `{param}` lies at {address:#x}, allowed: multiples of {align} bytes; copy it to an aligned buffer"
    )]
    Alignment {
        /// The kernel.
        kernel: String,
        /// The parameter.
        param: String,
        /// Its address.
        address: u64,
        /// What is allowed.
        align: u64,
    },
    /// A tensor that the copy engine cannot take.
    #[error("kernel `{kernel}`: `{param}` {what}")]
    Tensor {
        /// The kernel.
        kernel: String,
        /// The parameter.
        param: String,
        /// What is wrong, what is allowed, and a way out.
        what: String,
    },
    /// A grid that cannot be launched.
    #[error(
        "kernel `{kernel}`: a grid of {got:?} blocks, allowed: 1 to {most:?}, the first a multiple of the cluster of {cluster}"
    )]
    Grid {
        /// The kernel.
        kernel: String,
        /// Blocks along each axis.
        got: [u32; 3],
        /// The most there may be.
        most: [u32; 3],
        /// Blocks of a cluster.
        cluster: u32,
    },
}

const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// Whether a kernel can be launched with this grid and these arguments.
pub fn check_launch(kernel: &Kernel, grid: [u32; 3], args: &[Value]) -> Result<(), LaunchError> {
    let name = || kernel.name.clone();
    if args.len() != kernel.params.len() {
        return Err(LaunchError::Count { kernel: name(), want: kernel.params.len(), got: args.len() });
    }
    let inside = grid.iter().zip(MOST_BLOCKS).all(|(&n, most)| (1..=most).contains(&n));
    if !inside || !grid[0].is_multiple_of(kernel.cluster) {
        return Err(LaunchError::Grid { kernel: name(), got: grid, most: MOST_BLOCKS, cluster: kernel.cluster });
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

/// What is wrong with a tensor, in words that follow its name.
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

/// What can go wrong on a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is none.
    #[error("no device: {0}")]
    Absent(String),
    /// It cannot run this kernel.
    #[error("kernel `{kernel}` is printed for {want}, and the device is {got}; build it for the device's target")]
    Target {
        /// The kernel.
        kernel: String,
        /// Its target.
        want: String,
        /// The device's.
        got: String,
    },
    /// The text was not accepted; the log says why.
    #[error("kernel `{kernel}` was not accepted: {log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// What the compiler said.
        log: String,
    },
    /// A launch that is wrong.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Not enough memory.
    #[error("out of device memory: {asked} bytes were asked for, {free} are free; free some, or split the work")]
    Memory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes there are.
        free: u64,
    },
    /// Memory that is not this device's, or was given back.
    #[error(
        "memory at {address:#x} is not this device's or was freed, allowed: buffers of the device that still live; allocate it \
         on this device and keep it until the call"
    )]
    Foreign {
        /// Where it begins.
        address: u64,
    },
    /// A stream that is not this device's.
    #[error(
        "the stream is another device's, allowed: the default stream and streams of this device; make it on this device"
    )]
    Stream,
    /// Bytes outside a buffer.
    #[error("{bytes} bytes at offset {offset} of a buffer of {len}")]
    Bounds {
        /// Where.
        offset: u64,
        /// How many.
        bytes: u64,
        /// What there is.
        len: u64,
    },
    /// Something that the device itself reports.
    #[error("{call}: {what}")]
    Failed {
        /// What was tried.
        call: &'static str,
        /// What it said.
        what: String,
    },
}

/// Something that runs kernels.
///
/// Every span and stream that a call is given must be this device's ([`Token`]) and alive; others are refused with
/// [`DeviceError::Foreign`] and [`DeviceError::Stream`]. A buffer may be dropped while a launch uses it: the device gives the
/// memory back when the launch is done.
pub trait Device: Send + Sync {
    /// Its name.
    fn name(&self) -> String;
    /// Its kind and its number among those of the kind, such as `("cuda", 0)`.
    fn place(&self) -> (&'static str, u32) {
        ("device", 0)
    }
    /// The target that kernels are printed for.
    fn target(&self) -> Target;
    /// Multiprocessors: the CTAs of a persistent kernel.
    fn multiprocessors(&self) -> u32;
    /// Memory with undefined contents.
    fn allocate(&self, bytes: u64) -> Result<Buffer, DeviceError>;
    /// Memory of zeros.
    fn zeroed(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        let buffer = self.allocate(bytes)?;
        self.upload(buffer.span(), &vec![0; bytes as usize])?;
        Ok(buffer)
    }
    /// Copies to the device's memory, after everything on the default stream.
    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Copies from the device's memory, after everything on the default stream.
    fn download(&self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Refuses memory that is not this device's, or was freed. Launches check this too; a caller of several launches asks
    /// before the first.
    fn check_memory(&self, span: Span) -> Result<(), DeviceError> {
        let _ = span;
        Ok(())
    }
    /// Makes a kernel ready.
    fn load(&self, kernel: Arc<Kernel>) -> Result<Module, DeviceError>;
    /// Starts a kernel, after every argument was checked.
    fn launch(&self, module: &Module, grid: [u32; 3], args: &[Value], stream: Stream<'_>) -> Result<(), DeviceError>;
    /// Waits for everything on a stream, and says what went wrong on it.
    fn synchronize(&self, stream: Stream<'_>) -> Result<(), DeviceError>;
    /// The number of the graph capture that records this stream, whoever began it; `None` where launches run at once. No other
    /// capture of the process has the number.
    fn capture_id(&self, stream: Stream<'_>) -> Result<Option<u64>, DeviceError> {
        let _ = stream;
        Ok(None)
    }
    /// Keeps a value alive as long as the graph that records this stream can be replayed. Where nothing is recorded, it is
    /// dropped at once.
    fn keep_for_replays(&self, stream: Stream<'_>, value: Box<dyn Any + Send>) -> Result<(), DeviceError> {
        let _ = (stream, value);
        Ok(())
    }
    /// Seconds that the work which `work` puts on a stream takes there; `None` for a device without a clock.
    fn timed(
        &self,
        stream: Stream<'_>,
        work: &mut dyn FnMut() -> Result<(), DeviceError>,
    ) -> Result<Option<f64>, DeviceError> {
        work()?;
        self.synchronize(stream).map(|()| None)
    }
}

/// One launch of a plan.
#[derive(Clone)]
pub struct Launch {
    /// What is launched.
    pub kernel: Arc<Kernel>,
    /// Blocks.
    pub grid: [u32; 3],
    /// Arguments.
    pub args: Vec<Value>,
}

/// Launches in order, with the memory they need beside inputs and outputs.
#[derive(Clone, Default)]
pub struct Plan {
    /// Launches.
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
