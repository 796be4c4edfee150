//! What the simulator's tests share: problems with their references, and launches.

#![allow(dead_code)] // each test file uses a part

use fulgurite_kernels::gemm::mma_sync::SyncGemm;
use fulgurite_kernels::gemm::plan::{Gemm as Plan, Matrix as Stored};
use fulgurite_kernels::gemm::{GemmConfig, Layouts};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Launch, Stream};
use fulgurite_ptx::{Half, Kernel, Major, Number, Pair, Target, Word, bf16, f16};
use fulgurite_sim::{Options, Sim};
use std::sync::Arc;

/// Numbers that a seed decides.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) ^ self.0 >> 11
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    pub fn unit(&mut self) -> f32 {
        (self.next() % 2001) as f32 / 1000.0 - 1.0
    }
}

/// A 16-bit float that tests can make and read.
pub trait Float: Half {
    fn from_f32(x: f32) -> Self;
    fn from_bits(bits: u16) -> Self;
    fn to_f64(self) -> f64;
}
impl Float for f16 {
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn from_bits(bits: u16) -> Self {
        f16::from_bits(bits)
    }
    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }
}
impl Float for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn from_bits(bits: u16) -> Self {
        bf16::from_bits(bits)
    }
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
}

pub fn upload<T: Word>(sim: &Sim, data: &[T]) -> Buffer {
    let size = std::mem::size_of::<T>();
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.bits().to_le_bytes()[..size].to_vec()).collect();
    let buffer = sim.allocate(bytes.len() as u64).unwrap();
    sim.upload(buffer.span(), &bytes).unwrap();
    buffer
}

pub fn download(sim: &Sim, buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.span().bytes() as usize];
    sim.download(buffer.span(), &mut bytes).unwrap();
    bytes
}

/// C = A B, in batches.
#[derive(Debug, Clone, Copy)]
pub struct Gemm {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub batch: u32,
    pub layouts: Layouts,
    pub config: GemmConfig,
    /// Whether the result is compared with f64: it takes longer than the kernel.
    pub compare: bool,
}

pub mod attention;
pub mod backward;
pub mod decode;
pub mod mutate;
pub mod pipeline;

pub const SMALL: GemmConfig = GemmConfig { rows: 128, cols: 128, depth: 2, cluster: 1, band: 4 };
pub const INNER: Layouts = Layouts { a: Major::Inner, b: Major::Inner };

/// Rows and columns of a matrix as it lies in memory, its rows padded to whole units of 16 bytes.
struct Matrix {
    rows: u32,
    cols: u32,
    stride: u32,
}

impl Matrix {
    fn new(major: Major, outer: u32, inner: u32) -> Self {
        let (rows, cols) = match major {
            Major::Inner => (outer, inner),
            Major::Outer => (inner, outer),
        };
        Matrix { rows, cols, stride: cols.next_multiple_of(8) }
    }
    fn at(&self, batch: u32, row: u32, col: u32) -> usize {
        ((batch * self.rows + row) * self.stride + col) as usize
    }
    fn len(&self, batch: u32) -> usize {
        (batch * self.rows * self.stride) as usize
    }
    fn stored(&self, buffer: &Buffer, batch: u32) -> Stored {
        let [rows, cols, row_stride] = [self.rows, self.cols, self.stride].map(u64::from);
        Stored { span: buffer.span(), rows, cols, row_stride, batch: batch.into(), batch_stride: rows * row_stride }
    }
}

impl Gemm {
    /// Builds the kernel.
    pub fn kernel<T: Float>(&self) -> Kernel
    where
        Pair<T>: Word,
    {
        fulgurite_kernels::gemm::kernel::<T>(Target::HOPPER, self.layouts, self.config).unwrap()
    }

    /// Runs a kernel on random inputs; the bits of C, and the largest error against f64 in units of its bound.
    pub fn run<T: Float>(&self, sim: &Sim, kernel: Kernel, blocks: u32) -> Result<(Vec<u8>, f64), DeviceError> {
        let Gemm { layouts, config, .. } = *self;
        let plan = Plan { number: T::NUMBER, layouts, config };
        self.run_by::<T>(sim, |matrices| plan.launch(Arc::new(kernel), matrices, blocks * config.cluster).unwrap())
    }

    /// The same with the kernel of single warps.
    pub fn run_sync<T: Float>(&self, sim: &Sim, kernel: Kernel) -> Result<(Vec<u8>, f64), DeviceError> {
        let plan = SyncGemm { number: T::NUMBER, layouts: self.layouts };
        self.run_by::<T>(sim, |matrices| plan.launch(Arc::new(kernel), matrices).unwrap())
    }

    fn run_by<T: Float>(
        &self,
        sim: &Sim,
        launch: impl FnOnce([Stored; 3]) -> Launch,
    ) -> Result<(Vec<u8>, f64), DeviceError> {
        let Gemm { m, n, k, batch, layouts, .. } = *self;
        let mut random = Random(u64::from(m * 31 + n * 7 + k));
        let (a, b) = (Matrix::new(layouts.a, m, k), Matrix::new(layouts.b, n, k));
        let c = Matrix::new(Major::Inner, m, n);
        let a_data: Vec<T> = (0..a.len(batch)).map(|_| T::from_f32(random.unit())).collect();
        let b_data: Vec<T> = (0..b.len(batch)).map(|_| T::from_f32(random.unit())).collect();
        let (a_buffer, b_buffer) = (upload(sim, &a_data), upload(sim, &b_data));
        let c_buffer = upload(sim, &vec![T::from_f32(f32::NAN); c.len(batch)]);
        let matrices = [a.stored(&a_buffer, batch), b.stored(&b_buffer, batch), c.stored(&c_buffer, batch)];
        let launch = launch(matrices);
        let module = sim.load(launch.kernel)?;
        sim.launch(&module, launch.grid, &launch.args, Stream::default())?;
        sim.synchronize(Stream::default())?;
        let bits = download(sim, &c_buffer);
        if !self.compare {
            return Ok((bits, 0.0));
        }
        let mut worst = 0.0f64;
        for (batch, row) in (0..batch).flat_map(|batch| (0..m).map(move |row| (batch, row))) {
            for col in 0..n {
                let element = |matrix: &Matrix, data: &[T], major, outer, inner| {
                    let at = match major {
                        Major::Inner => matrix.at(batch, outer, inner),
                        Major::Outer => matrix.at(batch, inner, outer),
                    };
                    data[at].to_f64()
                };
                let terms =
                    (0..k).map(|i| element(&a, &a_data, layouts.a, row, i) * element(&b, &b_data, layouts.b, col, i));
                let (sum, size) = terms.fold((0.0, 0.0f64), |(sum, size), x| (sum + x, size + x.abs()));
                let at = 2 * c.at(batch, row, col);
                let got = T::from_bits(u16::from_le_bytes([bits[at], bits[at + 1]])).to_f64();
                // Half a unit of the last place of the result, and what f32 sums cut toward zero may lose.
                let unit = if T::NUMBER == Number::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
                let bound = unit * f64::from(sum.abs() as f32) * 1.01 + size * 2f64.powi(-20) + 1e-7;
                let error = (got - sum).abs() / bound;
                assert!(!error.is_nan(), "{self:?}: c[{batch}][{row}][{col}] is {got}, expected {sum}");
                worst = worst.max(error);
            }
        }
        Ok((bits, worst))
    }
}

pub fn sim(seed: u64) -> Sim {
    Sim::new(Options { seed, ..Options::default() })
}

/// Seeds that every run tries, and those that `cargo xtask test --long` tries.
pub fn seeds() -> std::ops::Range<u64> {
    0..if std::env::var_os("FULGURITE_LONG").is_some() { 200 } else { 20 }
}
