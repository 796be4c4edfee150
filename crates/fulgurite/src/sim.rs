//! The GPU kernels on a simulator: every kernel runs on any machine, and what is wrong with it is found.
//!
//! ```
//! use fulgurite::sim::{Options, Sizes, simulate};
//!
//! let done = simulate("vector_add", &Sizes { n: 1000, ..Sizes::default() }, &Options::default())?;
//! assert!(done.report.findings.is_empty());
//! assert_eq!(done.report.total().global_bytes, 3 * 4 * 1000);
//! # Ok::<(), fulgurite::sim::SimError>(())
//! ```

pub use fulgurite_sim::{
    Architecture, Counts, Fault, Finding, Line, Options, Order, Report, Side, Sim, Span, Timeline, Track,
};

use fulgurite_core::Mask;
use fulgurite_core::random::Rng;
use fulgurite_kernels::attention::forward::Tuning as ForwardTuning;
use fulgurite_kernels::gemm::{Layouts, Tuning as GemmTuning};
use fulgurite_kernels::gemm_plan::{Gemm, GemmError, Matrix};
use fulgurite_kernels::{add, registry};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Launch, Stream, TensorSpan, Value};
use fulgurite_ptx::{BuildError, Kernel, Major, Number, bf16, divisor_values, f16};
use std::sync::Arc;
use thiserror::Error;

/// How large a problem is; each kernel reads what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of C, or of a matrix.
    pub m: u32,
    /// Columns of C or of a matrix, or elements of a vector.
    pub n: u32,
    /// The summed dimension of a product.
    pub k: u32,
    /// Products, or sequences.
    pub batch: u32,
    /// Queries of a sequence.
    pub q_len: u32,
    /// Keys of a sequence.
    pub k_len: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys; must divide those of queries.
    pub kv_heads: u32,
    /// The most blocks a persistent kernel has; as many as there are multiprocessors if it is 0.
    pub blocks: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Sizes { m: 256, n: 256, k: 256, batch: 1, q_len: 256, k_len: 256, heads: 1, kv_heads: 1, blocks: 0 }
    }
}

/// Why nothing was simulated.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum SimError {
    /// No such kernel.
    #[error("there is no kernel `{0}`; `fulgurite kernel list` names all")]
    Name(String),
    /// A size that makes no sense.
    #[error("`{size}` is {got}, allowed: {allowed}")]
    Size {
        /// Which.
        size: &'static str,
        /// What was given.
        got: u32,
        /// What is allowed.
        allowed: String,
    },
    /// The kernel cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The product is wrong.
    #[error(transparent)]
    Product(#[from] GemmError),
    /// The launch was refused before it started.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// What came of a simulation.
#[derive(Debug, Clone)]
pub struct Simulated {
    /// The problem in words.
    pub problem: String,
    /// What the launch did, and what is wrong with it.
    pub report: Report,
}

/// A launch, with the memory that must outlive it.
struct Prepared {
    launch: Launch,
    problem: String,
    _memory: Vec<Buffer>,
}

/// Runs a kernel of [`kernels`](crate::gpu::kernels) on random inputs. What is wrong with the kernel is in the report;
/// an error says that nothing ran.
pub fn simulate(name: &str, sizes: &Sizes, options: &Options) -> Result<Simulated, SimError> {
    let entry = registry::all().iter().find(|e| e.name == name).ok_or_else(|| SimError::Name(name.into()))?;
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
    if !sizes.heads.is_multiple_of(sizes.kv_heads) {
        let allowed = format!("divisors of the {} heads of queries", sizes.heads);
        return Err(SimError::Size { size: "kv-heads", got: sizes.kv_heads, allowed });
    }
    let sim = Sim::new(options.clone());
    let kernel = Arc::new((entry.build)(sim.target())?);
    let maker = Maker { sim: &sim, sizes: *sizes, rng: Rng::new(options.seed) };
    let prepared = maker.prepare(name, kernel)?;
    let module = sim.load(prepared.launch.kernel.clone())?;
    match sim.launch(&module, prepared.launch.grid, &prepared.launch.args, Stream::default()) {
        // What a kernel did wrong is in the report.
        Err(e) if sim.findings().is_empty() => Err(e.into()),
        _ => Ok(Simulated { problem: prepared.problem, report: sim.report() }),
    }
}

struct Maker<'a> {
    sim: &'a Sim,
    sizes: Sizes,
    rng: Rng,
}

impl Maker<'_> {
    /// Random elements of a type, in the simulator's memory.
    fn random(&mut self, number: Number, count: u64) -> Result<Buffer, DeviceError> {
        let element = |x: f64| match number {
            Number::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            Number::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
            _ => (x as f32).to_le_bytes().to_vec(),
        };
        let bytes: Vec<u8> = self.rng.normals(count as usize, 1.0).into_iter().flat_map(element).collect();
        let buffer = self.sim.allocate(bytes.len() as u64)?;
        self.sim.upload(buffer.span(), &bytes)?;
        Ok(buffer)
    }

    fn blocks(&self) -> u32 {
        match self.sizes.blocks {
            0 => self.sim.multiprocessors(),
            n => n.min(self.sim.multiprocessors()),
        }
    }

    fn prepare(mut self, name: &str, kernel: Arc<Kernel>) -> Result<Prepared, SimError> {
        let number = if name.contains("bf16") { Number::Bf16 } else { Number::F16 };
        match name.split('-').next() {
            Some("vector_add") => self.vector_add(kernel),
            Some("row_softmax") => self.row_softmax(kernel),
            Some("gemm") => self.gemm(name, kernel, number),
            Some("attention") => self.attention(name, kernel, number),
            _ => Err(SimError::Name(name.into())),
        }
    }

    fn vector_add(&mut self, kernel: Arc<Kernel>) -> Result<Prepared, SimError> {
        let n = self.sizes.n;
        let (x, y) = (self.random(Number::F32, n.into())?, self.random(Number::F32, n.into())?);
        let memory = vec![x, y, self.sim.allocate(4 * u64::from(n))?];
        let pointers = memory.iter().map(|b| Value::Pointer(b.span()));
        let args = pointers.chain([Value::U32(n)]).collect();
        let launch = Launch { kernel, grid: [n.div_ceil(add::THREADS), 1, 1], args };
        Ok(Prepared { launch, problem: format!("{n} elements"), _memory: memory })
    }

    fn row_softmax(&mut self, kernel: Arc<Kernel>) -> Result<Prepared, SimError> {
        let Sizes { m, n, .. } = self.sizes;
        let count = u64::from(m) * u64::from(n);
        let memory = vec![self.random(Number::F32, count)?, self.sim.allocate(4 * count)?];
        let pointers = memory.iter().map(|b| Value::Pointer(b.span()));
        let args = pointers.chain([Value::U32(n), Value::U32(n)]).collect();
        let launch = Launch { kernel, grid: [m, 1, 1], args };
        Ok(Prepared { launch, problem: format!("{m} rows of {n}"), _memory: memory })
    }

    fn gemm(&mut self, name: &str, kernel: Arc<Kernel>, number: Number) -> Result<Prepared, SimError> {
        let Sizes { m, n, k, batch, .. } = self.sizes;
        // The letters of BLAS for matrices stored by rows: `t` is transposed.
        let major = |transposed: bool| if transposed { Major::Outer } else { Major::Inner };
        let letters = name.rsplit('-').next().unwrap_or_default();
        let layouts = Layouts { a: major(letters.starts_with('t')), b: major(letters.ends_with('n')) };
        let plan = Gemm { number, layouts, tuning: GemmTuning::default() };
        let mut memory = Vec::new();
        let stored = |major, outer, inner| match major {
            Major::Inner => (outer, inner),
            Major::Outer => (inner, outer),
        };
        let shapes = [stored(layouts.a, m, k), stored(layouts.b, n, k), (m, n)];
        for (rows, cols) in shapes {
            let count = u64::from(batch) * u64::from(rows) * u64::from(cols.next_multiple_of(8));
            memory.push(self.random(number, count)?);
        }
        let matrix = |i: usize| {
            let (rows, cols) = (u64::from(shapes[i].0), u64::from(shapes[i].1));
            let row_stride = cols.next_multiple_of(8);
            let batch_stride = rows * row_stride;
            Matrix { span: memory[i].span(), rows, cols, row_stride, batch: batch.into(), batch_stride }
        };
        let launch = plan.launch(kernel, [matrix(0), matrix(1), matrix(2)], self.blocks())?;
        Ok(Prepared { launch, problem: format!("{batch} x {m} x {n} x {k}"), _memory: memory })
    }

    fn attention(&mut self, name: &str, kernel: Arc<Kernel>, number: Number) -> Result<Prepared, SimError> {
        let Sizes { batch, q_len, k_len, heads, kv_heads, .. } = self.sizes;
        let dim = if name.contains("d128") { 128 } else { 64 };
        let causal = name.ends_with("causal");
        let mask = if causal { Mask::causal() } else { Mask::none() };
        // The registry builds for as many keys.
        let tuning = ForwardTuning::hopper(dim, 8192, mask != Mask::none());
        let sides = [(q_len, heads), (k_len, kv_heads), (k_len, kv_heads), (q_len, heads)];
        let mut memory = Vec::new();
        for (len, heads) in sides {
            memory.push(self.random(number, [batch, len, heads, dim].into_iter().map(u64::from).product())?);
        }
        let tensor = |i: usize| {
            let (len, heads) = sides[i];
            let row = u64::from(heads * dim * number.bytes());
            let extent = vec![dim.into(), len.into(), heads.into(), batch.into()];
            let strides = vec![row, u64::from(dim * number.bytes()), row * u64::from(len)];
            Value::Tensor(TensorSpan { span: memory[i].span(), number, extent, strides })
        };
        let mut args: Vec<Value> = (0..4).map(tensor).collect();
        let lse = self.sim.allocate(4 * u64::from(batch) * u64::from(heads) * u64::from(q_len))?;
        let counters = self.sim.allocate(8)?;
        self.sim.upload(counters.span(), &[0; 8])?;
        args.extend([&lse, &counters].map(|b| Value::Pointer(b.span())));
        let (m_tiles, pairs) = (q_len.div_ceil(64 * tuning.groups), heads * batch);
        args.extend([q_len, k_len, m_tiles, m_tiles * pairs, pairs].map(Value::U32));
        for d in [heads, heads / kv_heads, pairs * m_tiles, pairs, pairs] {
            args.extend(divisor_values(d));
        }
        args.push(Value::F32(std::f32::consts::LOG2_E / (dim as f32).sqrt()));
        memory.extend([lse, counters]);
        let launch = Launch { kernel, grid: [self.blocks().min(m_tiles * pairs), 1, 1], args };
        let problem = format!("{batch} x {q_len} queries x {k_len} keys, {heads} heads ({kv_heads} of keys)");
        Ok(Prepared { launch, problem, _memory: memory })
    }
}
