//! C = A B on every GPU since Ampere: `mma.sync` of single warps, and a ring that the same warps fill with `cp.async`.
//!
//! A CTA computes one tile of C. Its eight warps share the tile, 64 rows and 32 columns each. All warps copy the tiles
//! of A and B for a later step while they multiply those of the current step.

use crate::gemm::plan::{Gemm, GemmError, Matrix, MatrixName, outer_inner, same};
use crate::gemm::{GemmConfig, INNER, Layouts, tile};
use crate::params::{Bindings, Params, Program};
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{
    BuildError, CopyRing, GlobalRows, Half, Kernel, Major, Number, Pair, Pointer, RowView, Scope, Target, Tile, Val,
    WarpAcc, WarpRole, Warps, Word, bf16, f16,
};
use std::sync::{Arc, OnceLock};

/// Rows and columns of a tile of C.
const ROWS: u32 = 128;
const COLS: u32 = 128;
/// Stages of the ring: as many as fit in 99 KB of shared memory per CTA.
const DEPTH: u32 = 3;
/// Grid of warps in a CTA: two vertically, four horizontally.
const WARPS: [u32; 2] = [2, 4];
/// Number of 16-row blocks per warp, and its columns.
const BLOCKS: usize = (ROWS / WARPS[0] / 16) as usize;
const WARP_COLS: u32 = COLS / WARPS[1];

/// A matrix among the arguments; strides are in bytes.
#[derive(Debug, Clone, Copy)]
struct Stored {
    span: Span,
    row: u64,
    batch: u64,
}

/// A product: operands and sizes.
#[derive(Debug, Clone)]
struct SyncGemmCall {
    matrices: [Stored; 3],
    m: u32,
    n: u32,
    k: u32,
    m_tiles: u32,
    n_tiles: u32,
}

/// A matrix among the parameters.
#[derive(Clone, Copy)]
struct MatrixParam<'k> {
    memory: Pointer<'k, u32>,
    row: Val<'k, u64>,
    batch: Val<'k, u64>,
}

impl<'k> MatrixParam<'k> {
    fn declare(p: &Params<'k, SyncGemmCall>, name: &str, i: usize) -> Self {
        MatrixParam {
            memory: p.pointer(name, move |call| call.matrices[i].span),
            row: p.u64(&format!("{name}_row"), move |call| call.matrices[i].row),
            batch: p.u64(&format!("{name}_batch"), move |call| call.matrices[i].batch),
        }
    }

    /// Address of a 2-byte element.
    fn at(&self, batch: Val<'k, u32>, row: Val<'k, u32>, col: Val<'k, u32>) -> Val<'k, u64> {
        let start = self.memory.address() + batch.to_u64().mul_wide_64(self.batch);
        start + row.to_u64().mul_wide_64(self.row) + col.mul_wide(2)
    }
}

struct CallParams<'k> {
    a: MatrixParam<'k>,
    b: MatrixParam<'k>,
    c: MatrixParam<'k>,
    m: Val<'k, u32>,
    n: Val<'k, u32>,
    k: Val<'k, u32>,
    m_tiles: Val<'k, u32>,
    n_tiles: Val<'k, u32>,
}

impl<'k> CallParams<'k> {
    fn declare(p: &Params<'k, SyncGemmCall>) -> Self {
        CallParams {
            a: MatrixParam::declare(p, "a", 0),
            b: MatrixParam::declare(p, "b", 1),
            c: MatrixParam::declare(p, "c", 2),
            m: p.u32("m", |call| call.m),
            n: p.u32("n", |call| call.n),
            k: p.u32("k", |call| call.k),
            m_tiles: p.u32("m_tiles", |call| call.m_tiles),
            n_tiles: p.u32("n_tiles", |call| call.n_tiles),
        }
    }
}

/// An operand that is copied to shared memory tile by tile along the summed dimension.
struct Source<'k> {
    matrix: MatrixParam<'k>,
    major: Major,
    batch: Val<'k, u32>,
    /// First row of A or column of B in the tile; `outer` is their number in the matrix.
    first: Val<'k, u32>,
    outer: Val<'k, u32>,
    inner: Val<'k, u32>,
}

impl<'k> Source<'k> {
    /// Starts copying the tile at `start` of the summed dimension, which is inside the matrix.
    fn copy(&self, w: &Scope<'k, WarpRole>, ring: &CopyRing<'k>, to: Tile<'k>, start: Val<'k, u32>) {
        let (outer, inner) = (self.outer - self.first, self.inner - start);
        let (row, col, rows, cols) = match self.major {
            Major::Inner => (self.first, start, outer, inner),
            Major::Outer => (start, self.first, inner, outer),
        };
        let address = self.matrix.at(self.batch, row, col);
        ring.copy(w, to, GlobalRows { address, stride: self.matrix.row, rows, skip: None, bytes: cols * 2 });
    }
}

/// C = A B for `[batch]` matrices of 16-bit floats, with f32 accumulation.
pub fn kernel<T: Half>(target: Target, layouts: Layouts) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(Program::build("gemm_sync", target, |p| build::<T>(p, layouts))?.into_kernel())
}

fn build<'k, T: Half>(p: &Params<'k, SyncGemmCall>, layouts: Layouts)
where
    Pair<T>: Word,
{
    let builder = p.builder();
    let CallParams { a, b, c, m, n, k, m_tiles, n_tiles } = CallParams::declare(p);
    let ring = builder.copy_ring("operands", DEPTH, &[tile::<T>(layouts.a, ROWS), tile::<T>(layouts.b, COLS)]);

    builder.role("multiply", Warps(WARPS[0] * WARPS[1]), |w| {
        // Go down a column of tiles first, so that concurrent CTAs share tiles of B.
        let per_batch = m_tiles * n_tiles;
        let (batch, at) = (w.cta() / per_batch, w.cta() % per_batch);
        let (row, col) = (at % m_tiles * ROWS, at / m_tiles * COLS);
        let a = Source { matrix: a, major: layouts.a, batch, first: row, outer: m, inner: k };
        let b = Source { matrix: b, major: layouts.b, batch, first: col, outer: n, inner: k };
        let fill = |w: &Scope<'k, WarpRole>, step: Val<'k, u32>| {
            let start = step * INNER;
            ring.put(w, |w, tiles| {
                w.when(start.lt(k), |w| {
                    a.copy(w, &ring, tiles[0], start);
                    b.copy(w, &ring, tiles[1], start);
                });
            });
        };
        let acc: WarpAcc<'k, BLOCKS> = w.warp_accumulators(WARP_COLS);
        acc.clear();
        let warp = w.warp_in_role();
        let own_row = warp % WARPS[0] * (ROWS / WARPS[0]);
        let own_col = warp / WARPS[0] * WARP_COLS;

        (0..DEPTH - 1).for_each(|step| fill(w, w.constant(step)));
        w.each(0, (k + (INNER - 1)) / INNER, 1, |w, step| {
            let tiles = ring.wait(w);
            fill(w, step + (DEPTH - 1));
            w.multiply_warp(&acc, (tiles[0].operand(layouts.a), own_row), (tiles[1].operand(layouts.b), own_col));
            ring.done(w);
        });
        store::<T>(w, &acc, c, [batch, row + own_row, col + own_col], [m, n]);
    });
}

/// Writes a warp's part of C, which starts at this batch, row and column. Elements outside C are not written.
fn store<'k, T: Half>(
    w: &Scope<'k, WarpRole>,
    acc: &WarpAcc<'k, BLOCKS>,
    c: MatrixParam<'k>,
    [batch, row, col]: [Val<'k, u32>; 3],
    [m, n]: [Val<'k, u32>; 2],
) where
    Pair<T>: Word,
{
    type View<'k> = WarpAcc<'k, BLOCKS>;
    let elements: Vec<Val<'k, f32>> = acc.elements().collect();
    for i in 0..View::ROWS {
        let row = row + w.lane() / View::LANES + View::row_offset(i);
        w.when(row.lt(m), |w| {
            let col = col + View::first_col(w);
            let line = c.at(batch, row, col);
            for period in 0..acc.cols() / View::PERIOD {
                let [low, high] = [0, 1].map(|at| elements[View::index(i, period as usize, at)]);
                let (own, offset) = (col + period * View::PERIOD, period * View::PERIOD);
                // With an odd number of columns, the last one is stored alone.
                w.choose(
                    (own + 1).lt(n),
                    |w| Pointer::<Pair<T>>::at_address(line).store(w, offset / 2, low.pair_with::<T>(high)),
                    |w| {
                        w.when(own.lt(n), |w| Pointer::<T>::at_address(line).store(w, offset, low.to_half::<T>()));
                    },
                );
            }
        });
    }
}

/// The kind of product: everything that the kernel's text depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SyncGemm {
    /// Element type of all three matrices.
    pub number: Number,
    /// Memory layouts of A and B.
    pub layouts: Layouts,
}

impl SyncGemm {
    /// Builds the kernel.
    pub fn kernel(&self, target: Target) -> Result<Kernel, crate::gemm::plan::KernelError> {
        match self.number {
            Number::F16 => Ok(kernel::<f16>(target, self.layouts)?),
            Number::Bf16 => Ok(kernel::<bf16>(target, self.layouts)?),
            got => Err(GemmError::Number { got }.into()),
        }
    }

    /// The launch of its kernel: one CTA for each tile of C.
    ///
    /// A is stored as `[m][k]` or `[k][m]` and B as `[n][k]` or `[k][n]`, by the layouts; C as `[m][n]`.
    pub fn launch(&self, kernel: Arc<Kernel>, [a, b, c]: [Matrix; 3]) -> Result<Launch, GemmError> {
        let SyncGemm { number, layouts } = *self;
        let checks = Gemm { number, layouts, config: GemmConfig::default() };
        let (m, k) = outer_inner(&a, layouts.a);
        let (n, k_of_b) = outer_inner(&b, layouts.b);
        same("m", (m, MatrixName::A), (c.rows, MatrixName::C))?;
        same("n", (n, MatrixName::B), (c.cols, MatrixName::C))?;
        same("k", (k, MatrixName::A), (k_of_b, MatrixName::B))?;
        same("batch", (a.batch, MatrixName::A), (b.batch, MatrixName::B))?;
        same("batch", (a.batch, MatrixName::A), (c.batch, MatrixName::C))?;
        let mut matrices = Vec::new();
        for (matrix, id) in [(&a, MatrixName::A), (&b, MatrixName::B), (&c, MatrixName::C)] {
            let tensor = checks.tensor(matrix, id)?;
            matrices.push(Stored { span: matrix.span, row: tensor.strides[0], batch: tensor.strides[1] });
        }
        let (m_tiles, n_tiles) = (m.div_ceil(u64::from(ROWS)), n.div_ceil(u64::from(COLS)));
        let tiles = (m_tiles * n_tiles).saturating_mul(a.batch);
        // Limit of a grid's first axis, in CTAs.
        if tiles >= 1 << 31 {
            return Err(GemmError::Tiles { got: tiles });
        }
        let matrices = [matrices[0], matrices[1], matrices[2]];
        let (m_tiles, n_tiles) = (m_tiles as u32, n_tiles as u32);
        let call = SyncGemmCall { matrices, m: m as u32, n: n as u32, k: k as u32, m_tiles, n_tiles };
        Ok(bindings().launch(kernel, [tiles as u32, 1, 1], &call))
    }
}

/// The bindings of every product. They depend neither on the element type nor on layouts.
fn bindings() -> &'static Bindings<SyncGemmCall> {
    static BINDINGS: OnceLock<Bindings<SyncGemmCall>> = OnceLock::new();
    BINDINGS.get_or_init(|| {
        Bindings::declared(|p| {
            CallParams::declare(p);
        })
    })
}
