//! Runs GPU kernels on a simulator, on any machine, and reports their errors.
//!
//! ```
//! use fulgurite::sim::{Options, Sizes, simulate};
//!
//! let done = simulate("vector_add", &Sizes { n: 1000, ..Sizes::default() }, &Options::default())?;
//! assert!(done.report.findings.is_empty());
//! assert_eq!(done.report.total().global_bytes, 3 * 4 * 1000);
//! # Ok::<(), fulgurite::sim::SimError>(())
//! ```

pub use crate::adder::{Fit, fit_adders};
pub use fulgurite_ptx::device::Device;
pub use fulgurite_ptx::model::{Adder, Exponent, Rounding};
pub use fulgurite_ptx::product::Number;
pub use fulgurite_sim::{
    Architecture, Counts, Fault, Finding, Interleaving, Line, Options, Party, Period, Report, Sim, TensorOrder,
    Timeline, Track,
};

use crate::device::{CheckedCall, Session, TensorsOf};
use crate::{Error, Unsupported};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Layout, Problem};
use fulgurite_kernels::attention::backward::plan::Tensors as BackwardTensors;
use fulgurite_kernels::attention::decode;
use fulgurite_kernels::attention::forward::plan::{DeviceAux, DeviceBlockLists, DeviceTensor, NoKernel, Tensors};
use fulgurite_kernels::gemm::plan::{Gemm, GemmError, Matrix};
use fulgurite_kernels::gemm::product::{Product, ProductOptions};
use fulgurite_kernels::gemm::{GemmConfig, Layouts};
use fulgurite_kernels::operator::{Backward, BackwardOptions, Forward, ForwardOptions, Operator, Tables};
use fulgurite_kernels::registry::{self, AttentionExample, AttentionPart, BackwardPart, Example};
use fulgurite_kernels::tensor_operator::{Call, DeviceOperand, TensorOperator, TensorProblem, WholeTensors};
use fulgurite_kernels::tensor_type::TensorType;
use fulgurite_ptx::device::{Buffer, DeviceError, Launch, Module, Span as GlobalSpan, Stream};
use fulgurite_ptx::{Arch, BuildError, Major, Target, TensorUnit, bf16, f16};
use std::sync::Arc;
use thiserror::Error;

/// Sizes of a problem; each kernel reads the fields that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of C, or of a matrix.
    pub m: u32,
    /// Columns of C or of a matrix, or elements of a vector.
    pub n: u32,
    /// The summed dimension of a product.
    pub k: u32,
    /// Number of products, or of sequences.
    pub batch: u32,
    /// Queries per sequence.
    pub q_len: u32,
    /// Keys per sequence.
    pub k_len: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key/value heads; must divide the number of query heads.
    pub kv_heads: u32,
    /// Maximum number of CTAs of a persistent kernel; 0 means one per SM.
    pub blocks: u32,
    /// Padding between the rows of matrices, in units of 16 bytes.
    pub padding: u32,
    /// CTAs per cluster of a product, which share tiles of B.
    pub cluster: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        let (m, n, k, q_len, k_len) = (256, 256, 256, 256, 256);
        Sizes { m, n, k, batch: 1, q_len, k_len, heads: 1, kv_heads: 1, blocks: 0, padding: 0, cluster: 1 }
    }
}

/// The reason why nothing was simulated.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum SimError {
    /// No kernel has this name.
    #[error("there is no kernel `{0}`; `fulgurite kernel list` names all")]
    Name(String),
    /// The kernel needs inputs other than random tensors.
    #[error(
        "`{0}` reads tensors that are not made here; `fulgurite check --engine sim` runs problems with these features"
    )]
    Inputs(String),
    /// An invalid size.
    #[error("`{size}` is {got}, allowed: {allowed}")]
    Size {
        /// Name of the size.
        size: &'static str,
        /// Value that was given.
        got: u32,
        /// Allowed values, as text.
        allowed: String,
    },
    /// A tensor of these sizes has too many elements.
    #[error("{what} is {got}, allowed: up to {MAX_ELEMENTS} elements; a simulator is slow")]
    Elements {
        /// The sizes that are multiplied.
        what: &'static str,
        /// Their product.
        got: u64,
    },
    /// The kernel cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The kernel does not support a problem of these sizes.
    #[error("{0}; change the sizes")]
    Problem(String),
    /// No kernel supports the problem.
    #[error(transparent)]
    NoKernel(#[from] NoKernel),
    /// The matrices of a product do not fit each other or the kernel.
    #[error(transparent)]
    Product(#[from] GemmError),
    /// The launch was rejected before it started.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Elements of a tensor that the simulator takes: it walks them one by one, and keeps their bytes several times.
const MAX_ELEMENTS: u64 = 1 << 28;
/// Extra elements of a row of a matrix, in units of eight.
const MAX_PADDING: u32 = 1 << 10;

impl Sizes {
    /// Refuses sizes whose tensors the simulator could not hold, before it asks for their memory.
    fn check_elements(&self) -> Result<(), SimError> {
        // Head dims are at most 512.
        let rows = |len: u32, heads: u32| [self.batch, len, heads, 512];
        let matrix = |rows: u32, cols: u32| [self.batch, rows, cols, 1];
        for (what, sizes) in [
            ("batch x m x n", matrix(self.m, self.n)),
            ("batch x m x k", matrix(self.m, self.k)),
            ("batch x n x k", matrix(self.n, self.k)),
            ("batch x q-len x heads x 512", rows(self.q_len, self.heads)),
            ("batch x k-len x heads x 512", rows(self.k_len, self.heads.max(self.kv_heads))),
        ] {
            let got = sizes.iter().fold(1u64, |all, &n| all.saturating_mul(u64::from(n)));
            if got > MAX_ELEMENTS {
                return Err(SimError::Elements { what, got });
            }
        }
        Ok(())
    }
}

impl From<Error> for SimError {
    fn from(error: Error) -> SimError {
        match error {
            Error::Unsupported(Unsupported { feature, .. }) => NoKernel { feature }.into(),
            Error::Gemm(e) => e.into(),
            Error::Device(e) => e.into(),
            other => SimError::Problem(other.to_string()),
        }
    }
}

/// The launches of a call, each with its compiled kernel.
type Launches = Vec<(Module, Launch)>;

/// Result of a simulation.
#[derive(Debug, Clone)]
pub struct Simulated {
    /// Description of the problem, as text.
    pub problem: String,
    /// Counters and findings of the launch.
    pub report: Report,
    /// The rates of the simulated GPU.
    pub architecture: Architecture,
}

/// A launch, with the memory that must outlive it.
struct Prepared<'a> {
    /// Launches that produce inputs of the kernel.
    before: Launches,
    launch: (Module, Launch),
    problem: String,
    memory: Vec<Buffer>,
    /// Indices of the buffers that hold results, and their element types.
    results: Vec<(usize, Number)>,
    /// Owns the workspace.
    session: Session<&'a dyn Device>,
}

impl Prepared<'_> {
    /// Runs the launches that produce inputs of the kernel.
    fn lead_in(&self) -> Result<(), DeviceError> {
        self.before.iter().try_for_each(|launch| self.run(launch))
    }

    fn run(&self, (module, launch): &(Module, Launch)) -> Result<(), DeviceError> {
        self.session.device().launch(module, launch.grid, &launch.args, Stream::default())
    }
}

/// Difference between the results of two devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Description of the problem, as text.
    pub problem: String,
    /// Number of elements of all results.
    pub elements: u64,
    /// Number of elements that differ. Two NaN count as equal, and so do 0 and -0.
    pub unequal: u64,
    /// The largest distance between two elements, in representable numbers of the type (1 for neighbours).
    pub steps: u64,
}

/// Runs a kernel on two devices with the same random inputs, and compares the results.
///
/// Of the kernels of gradients only the main one has results that can be compared (d_k and d_v); for others `elements` is 0.
/// Sizes that the kernel does not take are [`SimError::Size`].
///
/// ```
/// use fulgurite::sim::{Options, Sim, Sizes, compare};
///
/// // Products do not depend on the order in which warps run.
/// let [one, other] = [1, 2].map(|seed| Sim::new(Options { seed, ..Options::default() }));
/// let difference = compare("gemm-bf16-nt", &Sizes::default(), 5, &one, &other)?;
/// assert_eq!((difference.elements, difference.unequal), (256 * 256, 0));
/// # Ok::<(), fulgurite::sim::SimError>(())
/// ```
pub fn compare(
    name: &str,
    sizes: &Sizes,
    seed: u64,
    one: &dyn Device,
    other: &dyn Device,
) -> Result<Difference, SimError> {
    fn run<'a>(
        device: &'a dyn Device,
        (name, sizes, seed): (&str, &Sizes, u64),
    ) -> Result<(Prepared<'a>, Vec<Vec<u8>>), SimError> {
        let prepared = prepare(device, name, sizes, seed)?;
        prepared.lead_in()?;
        prepared.run(&prepared.launch)?;
        device.synchronize(Stream::default())?;
        let mut results = Vec::new();
        for &(i, _) in &prepared.results {
            let span = prepared.memory[i].span();
            let mut bytes = vec![0; span.bytes() as usize];
            device.download(span, &mut bytes)?;
            results.push(bytes);
        }
        Ok((prepared, results))
    }
    let what = (name, sizes, seed);
    let ((prepared, a), (_, b)) = (run(one, what)?, run(other, what)?);
    let mut difference = Difference { problem: prepared.problem, elements: 0, unequal: 0, steps: 0 };
    for ((&(_, number), a), b) in prepared.results.iter().zip(&a).zip(&b) {
        let size = number.bytes() as usize;
        for (a, b) in a.chunks_exact(size).zip(b.chunks_exact(size)) {
            let steps = steps_between(number, a, b);
            difference.elements += 1;
            difference.unequal += u64::from(steps > 0);
            difference.steps = difference.steps.max(steps);
        }
    }
    Ok(difference)
}

/// Distance between two numbers in representable numbers of the type; 0 if they are equal or both NaN.
fn steps_between(number: Number, a: &[u8], b: &[u8]) -> u64 {
    let bits = number.bytes() * 8;
    // Maps floats to integers in order: negative ones count down from zero.
    let place = |bytes: &[u8]| {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        let x = i64::from(u32::from_le_bytes(word));
        let size = x & ((1 << (bits - 1)) - 1);
        if x >> (bits - 1) == 1 { -size } else { size }
    };
    let infinity = match number {
        Number::F16 => 0x7c00,
        Number::Bf16 => 0x7f80,
        _ => 0x7f80_0000,
    };
    let (a, b) = (place(a), place(b));
    if a.abs() > infinity && b.abs() > infinity { 0 } else { a.abs_diff(b) }
}

/// Runs a kernel of [`kernels`](crate::gpu::kernels) on random inputs. The report is that of the named kernel and contains its
/// errors. An `Err` means that it did not run; launches before it may have.
pub fn simulate(name: &str, sizes: &Sizes, options: &Options) -> Result<Simulated, SimError> {
    let sim = Sim::on(target_of(name), options.clone());
    let prepared = prepare(&sim, name, sizes, options.seed)?;
    prepared.lead_in()?;
    match prepared.run(&prepared.launch) {
        // The report already contains the kernel's own errors.
        Err(e) if sim.findings().is_empty() => Err(e.into()),
        _ => Ok(Simulated { problem: prepared.problem, report: sim.report(), architecture: sim.architecture() }),
    }
}

/// The GPU on which a kernel is simulated: an H200, unless its instructions need another one.
fn target_of(name: &str) -> Target {
    match unit_of(name) {
        Some(TensorUnit::Tcgen05) => Target::new(Arch::SM_100A),
        Some(TensorUnit::Wgmma | TensorUnit::MmaSync) | None => Target::HOPPER,
    }
}

/// The tensor unit that a kernel needs; `None` if it needs none, or has no example.
fn unit_of(name: &str) -> Option<TensorUnit> {
    let entry = registry::all().iter().find(|entry| entry.name == name)?;
    entry.example.as_ref()?.unit()
}

/// Whether a kernel can run on random tensors alone, on a GPU of this target.
pub fn takes(name: &str, target: Target) -> bool {
    let has_example = registry::all().iter().any(|entry| entry.name == name && entry.example.is_some());
    has_example && unit_of(name).is_none_or(|unit| unit == TensorUnit::MmaSync || unit == target.arch.tensor)
}

/// The launch of a kernel on a device, with random inputs in its memory.
fn prepare<'a>(device: &'a dyn Device, name: &str, sizes: &Sizes, seed: u64) -> Result<Prepared<'a>, SimError> {
    let entry = registry::all().iter().find(|e| e.name == name).ok_or_else(|| SimError::Name(name.into()))?;
    let example = entry.example.ok_or_else(|| SimError::Inputs(name.into()))?;
    for (size, got) in [
        ("m", sizes.m),
        ("n", sizes.n),
        ("k", sizes.k),
        ("batch", sizes.batch),
        ("q-len", sizes.q_len),
        ("k-len", sizes.k_len),
        ("heads", sizes.heads),
        ("kv-heads", sizes.kv_heads),
    ] {
        if !(1..=1 << 20).contains(&got) {
            return Err(SimError::Size { size, got, allowed: "1 to 2^20".into() });
        }
    }
    if sizes.padding > MAX_PADDING {
        return Err(SimError::Size { size: "padding", got: sizes.padding, allowed: format!("0 to {MAX_PADDING}") });
    }
    if !matches!(sizes.cluster, 1 | 2) {
        return Err(SimError::Size { size: "cluster", got: sizes.cluster, allowed: "1, 2".into() });
    }
    if !sizes.heads.is_multiple_of(sizes.kv_heads) {
        let allowed = format!("divisors of the {} heads of queries", sizes.heads);
        return Err(SimError::Size { size: "kv-heads", got: sizes.kv_heads, allowed });
    }
    sizes.check_elements()?;
    let session = Session::new(Arc::new(device), Tables::default());
    if sizes.blocks > 0 {
        session.set_sm_margin(device.multiprocessors().saturating_sub(sizes.blocks));
    }
    let mut maker = Maker { session, sizes: *sizes, rng: Rng::new(seed) };
    let found = match example {
        Example::Tensors(operator) => maker.tensors(operator),
        Example::Product { number, layouts, unit, cluster } => maker.gemm(number, layouts, (unit, cluster)),
        Example::Attention { problem, part } => match part {
            AttentionPart::Backward(kernel) => maker.backward(problem, kernel, example.unit()),
            AttentionPart::BackwardSync | AttentionPart::BackwardTensor => {
                maker.backward(problem, BackwardPart::Main, example.unit())
            }
            _ => maker.forward(problem, part, example.unit()),
        },
    }?;
    let Found { before, launch, problem, memory, results } = found;
    Ok(Prepared { before, launch, problem, memory, results, session: maker.session })
}

/// A kernel's launch, before the session joins it.
struct Found {
    before: Launches,
    launch: (Module, Launch),
    problem: String,
    memory: Vec<Buffer>,
    results: Vec<(usize, Number)>,
}

/// The tensors that a feature reads beside q, k, v and o.
#[derive(Default)]
struct FeatureTensors {
    sinks: Option<GlobalSpan>,
    cu_seqlens: Option<[GlobalSpan; 2]>,
    aux: Vec<DeviceAux>,
    lists: Option<DeviceBlockLists>,
}

struct Maker<'a> {
    session: Session<&'a dyn Device>,
    sizes: Sizes,
    rng: Rng,
}

impl Maker<'_> {
    /// Random elements of a type, in the device's memory.
    fn random(&mut self, number: Number, count: u64) -> Result<Buffer, DeviceError> {
        let element = |x: f64| match number {
            Number::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            Number::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
            _ => (x as f32).to_le_bytes().to_vec(),
        };
        let bytes: Vec<u8> = self.rng.normals(count as usize, 1.0).into_iter().flat_map(element).collect();
        self.uploaded(&bytes)
    }

    /// Memory with these bytes.
    fn uploaded(&self, bytes: &[u8]) -> Result<Buffer, DeviceError> {
        let buffer = self.session.device().allocate(bytes.len().max(4) as u64)?;
        self.session.device().upload(buffer.span().first(bytes.len() as u64), bytes)?;
        Ok(buffer)
    }

    /// A call, and its launches.
    fn launches<O: Operator>(
        &self,
        (problem, options): (&O::Problem, &O::Options),
        tensors: TensorsOf<O>,
    ) -> Result<(CheckedCall<O>, Launches), SimError>
    where
        O::Plan: Clone,
    {
        let call = CheckedCall::trusted(self.session.prepare::<O>(problem, options)?, tensors);
        if call.copies() {
            return Err(SimError::Problem("the tensors of these sizes have to be copied first".into()));
        }
        let launches = self.session.planned(&call)?;
        Ok((call, launches))
    }

    fn tensors(&mut self, operator: &'static TensorOperator) -> Result<Found, SimError> {
        let inputs = (operator.example)(self.sizes.m as usize, self.sizes.n as usize);
        let output = operator.output(&inputs).map_err(|e| SimError::Problem(e.to_string()))?;
        let problem = TensorProblem { operator, inputs };
        let number = |tensor: &TensorType| match tensor.dtype {
            DType::F16 => Number::F16,
            DType::Bf16 => Number::Bf16,
            _ => Number::F32,
        };
        let mut memory = Vec::new();
        for input in &problem.inputs {
            memory.push(self.random(number(input), input.shape.iter().product::<usize>() as u64)?);
        }
        let bytes = output.dtype.size_bytes() * output.shape.iter().product::<usize>();
        memory.push(self.session.device().allocate(bytes as u64)?);
        let operand = |(buffer, tensor): (&Buffer, &TensorType)| DeviceOperand {
            span: buffer.span(),
            shape: tensor.shape.clone(),
        };
        let inputs = memory.iter().zip(&problem.inputs).map(operand).collect();
        let call = Call { inputs, output: operand((&memory[problem.inputs.len()], &output)) };
        let named = operator.inputs.iter().zip(&problem.inputs).map(|(name, input)| format!("{name} {input}"));
        let words = named.collect::<Vec<_>>().join(", ");
        let results = vec![(problem.inputs.len(), number(&output))];
        let (_, mut launches) = self.launches::<WholeTensors>((&problem, &()), call)?;
        let launch = launches.pop().ok_or_else(|| SimError::Problem("there is nothing to compute".into()))?;
        Ok(Found { before: launches, launch, problem: words, memory, results })
    }

    fn gemm(&mut self, number: Number, layouts: Layouts, (unit, least): (TensorUnit, u32)) -> Result<Found, SimError> {
        let Sizes { m, n, k, batch, padding, cluster, .. } = self.sizes;
        let cluster = cluster.max(least);
        if unit == TensorUnit::MmaSync && cluster > 1 {
            return Err(SimError::Size { size: "cluster", got: cluster, allowed: format!("1 by {unit}") });
        }
        let gemm = Gemm { number, layouts, config: GemmConfig { cluster, ..GemmConfig::default() } };
        let stride = |cols: u32| u64::from(cols.next_multiple_of(8) + 8 * padding);
        let mut memory = Vec::new();
        let stored = |major, outer, inner| match major {
            Major::Inner => (outer, inner),
            Major::Outer => (inner, outer),
        };
        let shapes = [stored(layouts.a, m, k), stored(layouts.b, n, k), (m, n)];
        for (rows, cols) in shapes {
            let count = u64::from(batch) * u64::from(rows) * stride(cols);
            memory.push(self.random(number, count)?);
        }
        let matrix = |i: usize| {
            let (rows, cols, row_stride) = (u64::from(shapes[i].0), u64::from(shapes[i].1), stride(shapes[i].1));
            let batch_stride = rows * row_stride;
            Matrix { span: memory[i].span(), rows, cols, row_stride, batch: batch.into(), batch_stride }
        };
        let matrices = [matrix(0), matrix(1), matrix(2)];
        let call = (&gemm, &ProductOptions { unit: Some(unit) });
        let (_, mut launches) = self.launches::<Product>(call, matrices)?;
        let launch = launches.pop().ok_or_else(|| SimError::Problem("there is nothing to compute".into()))?;
        let mut problem = format!("{batch} x {m} x {n} x {k}");
        if (padding, cluster) != (0, 1) {
            problem += &format!(" (padding {padding}, clusters of {cluster})");
        }
        Ok(Found { before: Vec::new(), launch, problem, memory, results: vec![(2, number)] })
    }

    /// The problem of an attention kernel with the requested sizes, and the sizes as text.
    fn problem(&self, example: &AttentionExample) -> Result<(Problem, String), SimError> {
        let Sizes { batch, q_len, k_len, heads, kv_heads, .. } = self.sizes;
        let problem = example
            .problem([batch, q_len, k_len].map(|n| n as usize), [heads, kv_heads].map(|n| n as usize))
            .map_err(|e| SimError::Problem(e.to_string()))?;
        let words = format!("{batch} x {q_len} queries x {k_len} keys, {heads} heads ({kv_heads} of keys)");
        Ok((problem, words))
    }

    /// Shapes of q, k, v and o. The rows of packed sequences form one axis.
    fn shapes(&self, problem: &Problem) -> [[u64; 4]; 4] {
        let (batch, q_len, k_len) = match problem.layout() {
            Layout::Dense { batch, q_len, k_len } => (batch, q_len, k_len),
            Layout::Packed(packed) => (1, packed.total_q, packed.total_k),
        };
        let (of_q, of_k) = ((q_len, problem.q_heads()), (k_len, problem.kv_heads()));
        [of_q, of_k, of_k, of_q].map(|(len, heads)| [batch, len, heads, problem.head_dim()].map(|n| n as u64))
    }

    /// Numbers of 32 bits in the device's memory.
    fn words(&self, words: &[i32]) -> Result<Buffer, DeviceError> {
        self.uploaded(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// The tensors beside q, k, v and o that a problem reads. Their memory is added to `memory`.
    fn features(&mut self, problem: &Problem, memory: &mut Vec<Buffer>) -> Result<FeatureTensors, DeviceError> {
        let mut keep = |buffer: Buffer| {
            let span = buffer.span();
            memory.push(buffer);
            span
        };
        let mut of = FeatureTensors::default();
        if problem.has_sinks() {
            of.sinks = Some(keep(self.random(Number::F32, problem.q_heads() as u64)?));
        }
        if let Layout::Packed(packed) = problem.layout() {
            // The lengths of `Feature::Packed`.
            let offsets = |total: usize| [0, total / 4, total].map(|at| at as i32);
            of.cu_seqlens =
                Some([keep(self.words(&offsets(packed.total_q))?), keep(self.words(&offsets(packed.total_k))?)]);
        }
        for spec in problem.aux() {
            let count: usize = spec.shape.iter().product();
            let tensor = match spec.dtype {
                // Documents of 64 tokens.
                DType::I32 => {
                    let len = spec.shape.last().copied().unwrap_or(1);
                    self.words(&(0..count).map(|i| (i % len / 64) as i32).collect::<Vec<_>>())?
                }
                DType::Bf16 => self.random(Number::Bf16, count as u64)?,
                DType::F16 => self.random(Number::F16, count as u64)?,
                _ => self.random(Number::F32, count as u64)?,
            };
            let strides = (0..spec.shape.len()).map(|axis| spec.shape[axis + 1..].iter().product::<usize>() as u64);
            of.aux.push(DeviceAux { span: keep(tensor), strides: strides.collect() });
        }
        if let Some(spec) = problem.blocks() {
            // Every block is partial, so the mask beside the lists decides alone.
            let rows = spec.batch * spec.heads * problem.max_q_len().div_ceil(spec.rows);
            let width = problem.max_k_len().div_ceil(spec.cols);
            let counts = [keep(self.words(&vec![width as i32; rows])?), keep(self.words(&vec![0; rows])?)];
            let listed: Vec<i32> = (0..rows * width).map(|i| (i % width) as i32).collect();
            let blocks = [keep(self.words(&listed)?), keep(self.words(&vec![0; rows])?)];
            of.lists = Some(DeviceBlockLists { counts, blocks, widths: [width as u32, 1] });
        }
        Ok(of)
    }

    /// One of the kernels of the gradients, after those before it have run. o and the LSE are random too: the values of
    /// the gradients do not matter here, as long as they are finite.
    fn backward(
        &mut self,
        example: AttentionExample,
        part: BackwardPart,
        unit: Option<TensorUnit>,
    ) -> Result<Found, SimError> {
        let Sizes { batch, q_len, k_len, heads, .. } = self.sizes;
        let number = example.number;
        let (problem, words) = self.problem(&example)?;
        let [of_q, of_k, ..] = self.shapes(&problem);
        // q, k, v, o, d_o, d_q, d_k, d_v.
        let shapes = [of_q, of_k, of_k, of_q, of_q, of_q, of_k, of_k];
        let mut memory = Vec::new();
        for shape in shapes {
            memory.push(self.random(number, shape.iter().product())?);
        }
        let lse_rows = [batch, heads, q_len].map(|n| n as usize).into_iter().product();
        let lse = vec![f32::to_le_bytes(6.0 + (k_len as f32).ln()); lse_rows].concat();
        let lse_buffer = self.uploaded(&lse)?;
        let [q, k, v, o, d_o, d_q, d_k, d_v] =
            std::array::from_fn(|i| DeviceTensor::packed(memory[i].span(), shapes[i]));
        let mut tensors = BackwardTensors::new([q, k, v, o], lse_buffer.span(), d_o, [d_q, d_k, d_v]);
        let mut others = vec![lse_buffer];
        let FeatureTensors { cu_seqlens, aux, lists, .. } = self.features(&problem, &mut others)?;
        (tensors.cu_seqlens, tensors.aux, tensors.lists) = (cu_seqlens, aux, lists);
        let call = (&problem, &BackwardOptions { unit, ..BackwardOptions::default() });
        let (call, mut before) = self.launches::<Backward>(call, tensors)?;
        // Only the main kernel's d_k and d_v are compared: the sum of d_q has no defined order, and the workspace is
        // not a result.
        let results = if part == BackwardPart::Main { vec![(6, number), (7, number)] } else { Vec::new() };
        let kernel = part.of(call.prepared().executable().kernels());
        let at = before.iter().position(|(_, launch)| kernel.is_some_and(|kernel| Arc::ptr_eq(&launch.kernel, kernel)));
        let Some(at) = at else {
            return Err(SimError::Problem(
                "gradients of these sizes do not launch this kernel; try other lengths".into(),
            ));
        };
        before.truncate(at + 1);
        let launch = before.pop().ok_or_else(|| SimError::Problem("there is nothing to compute".into()))?;
        memory.extend(others);
        Ok(Found { before, launch, problem: words, memory, results })
    }

    /// The plan that a call of the library would use for these sizes, because the tile configuration depends on them.
    fn forward(
        &mut self,
        example: AttentionExample,
        part: AttentionPart,
        unit: Option<TensorUnit>,
    ) -> Result<Found, SimError> {
        let Sizes { batch, q_len, heads, kv_heads, .. } = self.sizes;
        let number = example.number;
        let group = heads / kv_heads;
        let decodes = u64::from(q_len) * u64::from(group) <= u64::from(decode::ROWS);
        if part == AttentionPart::Decode && group > decode::ROWS {
            let allowed = format!("up to {} per key/value head", decode::ROWS);
            return Err(SimError::Size { size: "heads", got: heads, allowed });
        }
        if part == AttentionPart::Decode && !decodes {
            let allowed = format!("up to {} for {group} query heads per key/value head", decode::ROWS / group);
            return Err(SimError::Size { size: "q-len", got: q_len, allowed });
        }
        let (problem, words) = self.problem(&example)?;
        let shapes = self.shapes(&problem);
        let mut memory = Vec::new();
        for shape in shapes {
            memory.push(self.random(number, shape.iter().product())?);
        }
        let tensors = std::array::from_fn(|i| DeviceTensor::packed(memory[i].span(), shapes[i]));
        let lse = self.session.device().allocate(4 * u64::from(batch) * u64::from(heads) * u64::from(q_len))?;
        let lse_span = lse.span();
        memory.push(lse);
        let FeatureTensors { sinks, cu_seqlens, aux, lists } = self.features(&problem, &mut memory)?;
        let none = GlobalSpan::new(0, 0);
        let tensors = Tensors { sinks, cu_seqlens, aux, lists, ..Tensors::new(tensors, lse_span, none) };
        let options =
            ForwardOptions { sinks: problem.has_sinks().then_some(DType::F32), unit, ..ForwardOptions::default() };
        let (_, mut before) = self.launches::<Forward>((&problem, &options), tensors)?;
        let launch = before.pop().ok_or_else(|| SimError::Problem("there is nothing to compute".into()))?;
        Ok(Found { before, launch, problem: words, memory, results: vec![(3, number), (4, Number::F32)] })
    }
}
