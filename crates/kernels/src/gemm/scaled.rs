//! C = A B with a scale for every group of elements along k, on data-centre Blackwell: MXFP8 and NVFP4.
//!
//! The kernel is that of [`tcgen05`], with two more tiles in a stage: the scales of A and of B. The thread that starts
//! products copies them to tensor memory first. Each stage has its own columns there, so a copy never overwrites scales that
//! a product may still read.

use crate::gemm::plan::{Gemm, GemmError, Matrix, MatrixName, gemm_call, same};
use crate::gemm::tcgen05::{self, Stages};
use crate::gemm::{GemmCall, GemmConfig, GemmParams, INNER, Layouts};
use crate::params::{Bindings, Params, Program};
use fulgurite_core::format::{GroupFormat, ScaleLayout};
use fulgurite_ptx::device::{Launch, Span, TensorSpan};
use fulgurite_ptx::{
    BuildError, Half, Kernel, Major, Number, Pair, Sum, Target, Tensor, TileShape, Word, bf16, scale_tile,
};
use std::sync::{Arc, OnceLock};

/// Bytes of k in a tile: a line.
const LINE: u32 = 128;
/// Rows whose scales are one block.
const BLOCK: u32 = 128;
/// Bytes of a row of a block of scales.
const SCALE_ROW: u32 = 16;

/// The formats of operands. Each has its own kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaledFormat {
    /// E4M3 with a power of two for every 32 elements.
    Mxfp8,
    /// E2M1 with an E4M3 number for every 16 elements.
    Nvfp4,
}

impl ScaledFormat {
    /// The format of groups of numbers that it is.
    pub const fn group(self) -> GroupFormat {
        match self {
            ScaledFormat::Mxfp8 => GroupFormat::Mxfp8,
            ScaledFormat::Nvfp4 => GroupFormat::NVFP4,
        }
    }
    /// Type of the codes in memory.
    const fn number(self) -> Number {
        match self {
            ScaledFormat::Mxfp8 => Number::E4m3,
            ScaledFormat::Nvfp4 => Number::E2m1x2,
        }
    }
    /// Bytes of codes that share a scale.
    const fn group_bytes(self) -> u32 {
        self.group().group() as u32 * self.group().bits() as u32 / 8
    }
    /// Scales of a row in a stage.
    const fn stage_scales(self) -> u32 {
        LINE / self.group_bytes()
    }
}

/// The usual tile configuration. 256 columns would leave no tensor memory for scales.
pub const CONFIG: GemmConfig = GemmConfig { rows: 128, cols: 128, depth: 4, cluster: 1, band: 16 };

/// A call of the kernel.
struct ScaledCall {
    gemm: GemmCall,
    /// Scales of A and of B.
    scales: [TensorSpan; 2],
}

struct ScaledParams<'k, T> {
    gemm: GemmParams<'k, T>,
    scales: [Tensor<'k>; 2],
}

impl<'k, T: Half> ScaledParams<'k, T> {
    fn declare(p: &Params<'k, ScaledCall>, format: ScaledFormat, config: GemmConfig) -> Self {
        let GemmConfig { rows, cols, cluster, .. } = config;
        let tile = |outer| TileShape::new(format.number(), outer, LINE);
        let block = scale_tile(BLOCK, format.stage_scales());
        let scales = [0, 1].map(|i: usize| {
            let name = ["a_scales", "b_scales"][i];
            p.tensor(name, block, 4, move |call| call.scales[i].clone())
        });
        let gemm = GemmParams::declare_in(p, |call: &ScaledCall| &call.gemm, [tile(rows), tile(cols / cluster)]);
        ScaledParams { gemm, scales }
    }
}

/// C = A B for `[batch]` matrices of scaled elements, with f32 accumulation: C is rounded to 16 bits.
pub fn kernel<T: Half>(target: Target, format: ScaledFormat, config: GemmConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(Program::build("gemm_scaled", target, |p| build::<T>(p, format, config))?.into_kernel())
}

fn build<'k, T: Half>(p: &Params<'k, ScaledCall>, format: ScaledFormat, config: GemmConfig)
where
    Pair<T>: Word,
{
    let k = p.builder();
    let GemmConfig { rows, cols, depth, cluster, .. } = config;
    k.cluster(cluster);
    let ScaledParams { gemm, scales: [a_scales, b_scales] } = ScaledParams::<T>::declare(p, format, config);
    let each = format.stage_scales();
    let tile = |outer| TileShape::new(format.number(), outer, LINE);
    // The scales of B are complete in each CTA of a pair.
    let tiles = [tile(rows), tile(cols / cluster), scale_tile(rows, each), scale_tile(cols, each)];
    let stages = Stages::new(k, config, &tiles);
    let copied = [("scales of A", rows), ("scales of B", cols)].map(|(name, n)| k.tensor_scales(name, depth, n, each));
    let rows_of_block = scale_tile(BLOCK, each).rows;
    tcgen05::roles(
        k,
        &gemm,
        config,
        &stages,
        |t, stage, [at, own], step| {
            let inner = step * LINE;
            stage.load(t, stage.tile(0), &gemm.a, &[inner, own.row, at.batch]);
            stage.load(t, stage.tile(1), &gemm.b, &[inner, own.col, at.batch]);
            let (zero, row) = (t.constant(0u32), step * rows_of_block);
            stage.load(t, stage.tile(2), &a_scales, &[zero, row, own.row / BLOCK, at.batch]);
            for i in 0..cols.div_ceil(BLOCK) {
                let part = stage.tile(3).rows(i, rows_of_block);
                stage.load(t, part, &b_scales, &[zero, row, at.col / BLOCK + i, at.batch]);
            }
        },
        |w, acc, tiles, onto| {
            let stage = stages.ring.stage_index(w);
            let [a, b] = copied.map(|scales| scales.nth(stage));
            w.elected(|t| {
                t.copy_scales(a, tiles[2]);
                t.copy_scales(b, tiles[3]);
                let operands = (tiles[0].operand(Major::Inner), tiles[1].operand(Major::Inner));
                t.multiply_scaled(acc, (operands.0, a), (operands.1, b), Sum::If(onto));
            });
        },
    );
}

/// A factor in a scaled format: rows of A, or columns of B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaledMatrix {
    /// The codes, whose elements are bytes: `[rows][k]` of whole groups.
    pub codes: Matrix,
    /// The scales of all matrices of the batch, each in [`ScaleLayout::Tiles128x4`].
    pub scales: Span,
}

/// A kind of product of scaled factors: everything that the kernel's text depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaledGemm {
    /// Format of A and B.
    pub format: ScaledFormat,
    /// Element type of C: f16 or bf16.
    pub number: Number,
    /// The tile configuration.
    pub config: GemmConfig,
}

impl ScaledGemm {
    /// The launch of the kernel on a device with this many SMs. C is `[m][n]`.
    pub fn launch(
        &self,
        kernel: Arc<Kernel>,
        [a, b]: [ScaledMatrix; 2],
        c: Matrix,
        multiprocessors: u32,
    ) -> Result<Launch, GemmError> {
        let ScaledGemm { format, number, config } = *self;
        if !matches!(number, Number::F16 | Number::Bf16) {
            return Err(GemmError::Number { got: number });
        }
        same("m", (a.codes.rows, MatrixName::A), (c.rows, MatrixName::C))?;
        same("n", (b.codes.rows, MatrixName::B), (c.cols, MatrixName::C))?;
        same("k", (a.codes.cols, MatrixName::A), (b.codes.cols, MatrixName::B))?;
        same("batch", (a.codes.batch, MatrixName::A), (b.codes.batch, MatrixName::B))?;
        same("batch", (a.codes.batch, MatrixName::A), (c.batch, MatrixName::C))?;
        let layouts = Layouts { a: Major::Inner, b: Major::Inner };
        let of = |number| Gemm { number, layouts, config };
        let codes = of(format.number());
        let tensors = [
            codes.tensor(&a.codes, MatrixName::A)?,
            codes.tensor(&b.codes, MatrixName::B)?,
            of(number).tensor(&c, MatrixName::C)?,
        ];
        let scales = [scale_tensor(format, &a, MatrixName::A)?, scale_tensor(format, &b, MatrixName::B)?];
        let k_steps = a.codes.cols.div_ceil(u64::from(LINE)) as u32;
        let (gemm, blocks) = gemm_call(&of(number), tensors, &c, k_steps, multiprocessors)?;
        Ok(bindings().launch(kernel, [blocks, 1, 1], &ScaledCall { gemm, scales }))
    }
}

/// Scales as TMA sees them: `[byte, row of a block, range of 128 rows, batch]`.
fn scale_tensor(format: ScaledFormat, matrix: &ScaledMatrix, id: MatrixName) -> Result<TensorSpan, GemmError> {
    let (span, group) = (matrix.scales, u64::from(format.group_bytes()));
    let [rows, groups] = [matrix.codes.rows, matrix.codes.cols.div_ceil(group)];
    let bytes = ScaleLayout::Tiles128x4.size_bytes(rows as usize, groups as usize) as u64;
    let want = bytes * matrix.codes.batch;
    if span.bytes() < want {
        return Err(GemmError::Scales { matrix: id, got: span.bytes(), want });
    }
    if !span.address().is_multiple_of(u64::from(SCALE_ROW)) {
        return Err(GemmError::Address { matrix: id, address: span.address() });
    }
    let ranges = rows.div_ceil(u64::from(BLOCK));
    let lanes = bytes / ranges / u64::from(SCALE_ROW);
    Ok(TensorSpan {
        span,
        number: Number::U8,
        extent: vec![SCALE_ROW.into(), lanes, ranges, matrix.codes.batch],
        strides: vec![SCALE_ROW.into(), bytes / ranges, bytes],
        ragged: None,
    })
}

/// The bindings of every product of scaled factors.
fn bindings() -> &'static Bindings<ScaledCall> {
    static BINDINGS: OnceLock<Bindings<ScaledCall>> = OnceLock::new();
    BINDINGS.get_or_init(|| {
        Bindings::declared(|p| {
            ScaledParams::<bf16>::declare(p, ScaledFormat::Mxfp8, CONFIG);
        })
    })
}

const _: () = assert!(INNER * 2 == LINE);
