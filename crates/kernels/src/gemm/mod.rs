//! C = A B on Hopper: a persistent kernel whose TMA runs ahead of its tensor cores.
//!
//! One thread fills a ring with tiles of A and B; two warpgroups multiply them, 64 rows each, and write their part
//! of C while the ring fills for the next tile. CTAs take tiles of C in bands of a few rows of tiles, so that CTAs
//! running at the same time share tiles of A and B in L2.

pub mod mma_sync;
pub mod plan;
pub mod product;
pub mod scaled;
pub mod tcgen05;

use crate::params::{Lens, Params, Program};
use fulgurite_ptx::device::{Span, TensorSpan};
use fulgurite_ptx::{
    Acc, BuildError, Group, Half, Kernel, Major, Pair, Pointer, Scope, Sum, Target, Tensor, TileShape, Val, Warpgroups,
    Word,
};

/// The tile configuration, chosen by measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmConfig {
    /// Rows per tile of C: 64 for each of the two warpgroups.
    pub rows: u32,
    /// Columns per tile of C.
    pub cols: u32,
    /// Stages of the ring.
    pub depth: u32,
    /// CTAs per cluster; they share their tiles of B.
    pub cluster: u32,
    /// Rows of tiles per band.
    pub band: u32,
}

impl Default for GemmConfig {
    fn default() -> Self {
        GemmConfig { rows: 128, cols: 256, depth: 4, cluster: 1, band: 16 }
    }
}

/// Memory layout of the operands: for A `[m][k]` ([`Major::Inner`]) or `[k][m]`, for B `[n][k]` or `[k][n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layouts {
    /// Layout of A.
    pub a: Major,
    /// Layout of B.
    pub b: Major,
}

/// Elements of k in a tile: a line of 128 bytes.
pub(crate) const INNER: u32 = 64;

/// Elements in 16 bytes.
pub(crate) const UNIT: u32 = 8;

/// The tile of an operand with `outer` rows (A) or columns (B).
fn tile<T: Half>(major: Major, outer: u32) -> TileShape {
    match major {
        Major::Inner => TileShape::new(T::NUMBER, outer, INNER),
        Major::Outer => TileShape::new(T::NUMBER, INNER, outer),
    }
}

/// Coordinates of an operand's tile: `outer` and `inner` elements, in a batch.
fn tile_coordinates<'k>(
    major: Major,
    outer: Val<'k, u32>,
    inner: Val<'k, u32>,
    batch: Val<'k, u32>,
) -> [Val<'k, u32>; 3] {
    match major {
        Major::Inner => [inner, outer, batch],
        Major::Outer => [outer, inner, batch],
    }
}

/// The first row and column of a tile of C, and its batch.
#[derive(Clone, Copy)]
struct TileCoord<'k> {
    row: Val<'k, u32>,
    col: Val<'k, u32>,
    batch: Val<'k, u32>,
}

/// A product: operands and sizes.
#[derive(Debug, Clone)]
pub(crate) struct GemmCall {
    pub a: TensorSpan,
    pub b: TensorSpan,
    pub c: TensorSpan,
    /// Tiles of C per column and per row; a cluster counts as one tile.
    pub m_tiles: u32,
    pub n_tiles: u32,
    /// Tiles of A and B that are multiplied for one tile of C.
    pub k_steps: u32,
    /// Number of tiles of C in all batches.
    pub tiles: u32,
    pub m: u32,
    pub n: u32,
    /// Address of C for threads, which write the columns past the last whole 16 bytes.
    pub c_memory: Span,
    /// Row stride and batch stride of C, in elements.
    pub c_strides: [u64; 2],
}

#[derive(Clone, Copy)]
struct GemmParams<'k, T> {
    a: Tensor<'k>,
    b: Tensor<'k>,
    c: Tensor<'k>,
    m_tiles: Val<'k, u32>,
    n_tiles: Val<'k, u32>,
    k_steps: Val<'k, u32>,
    tiles: Val<'k, u32>,
    m: Val<'k, u32>,
    n: Val<'k, u32>,
    c_memory: Pointer<'k, T>,
    c_row: Val<'k, u64>,
    c_batch: Val<'k, u64>,
}

impl<'k, T: Half> GemmParams<'k, T> {
    fn declare(p: &Params<'k, GemmCall>, layouts: Layouts, config: GemmConfig) -> Self {
        let GemmConfig { rows, cols, cluster, .. } = config;
        // All CTAs of a cluster have the same columns of C: each loads its part of B's tile for all of them.
        let tiles = [tile::<T>(layouts.a, rows), tile::<T>(layouts.b, cols / cluster)];
        Self::declare_in(p, |call| call, tiles)
    }

    /// The parameters of a product within those of a kernel, with the shapes in which A and B are loaded.
    fn declare_in<C: 'static>(p: &Params<'k, C>, at: impl Lens<C, GemmCall>, [a, b]: [TileShape; 2]) -> Self {
        GemmParams {
            a: p.tensor("a", a, 3, move |call| at(call).a.clone()),
            b: p.tensor("b", b, 3, move |call| at(call).b.clone()),
            c: p.tensor("c", TileShape::new(T::NUMBER, 64, INNER), 3, move |call| at(call).c.clone()),
            m_tiles: p.u32("m_tiles", move |call| at(call).m_tiles),
            n_tiles: p.u32("n_tiles", move |call| at(call).n_tiles),
            k_steps: p.u32("k_steps", move |call| at(call).k_steps),
            tiles: p.u32("tiles", move |call| at(call).tiles),
            m: p.u32("m", move |call| at(call).m),
            n: p.u32("n", move |call| at(call).n),
            c_memory: p.pointer("c_memory", move |call| at(call).c_memory),
            c_row: p.u64("c_row", move |call| at(call).c_strides[0]),
            c_batch: p.u64("c_batch", move |call| at(call).c_strides[1]),
        }
    }
}

impl<'k, T> GemmParams<'k, T> {
    /// The `t`-th tile of C in the order in which CTAs take them: down a band of rows of tiles, then to the next column.
    /// A cluster takes neighbouring rows of tiles, and `m_tiles` counts them as one.
    fn find(&self, config: GemmConfig, t: Val<'k, u32>, rank: Val<'k, u32>) -> TileCoord<'k> {
        let (m_tiles, n_tiles) = (self.m_tiles, self.n_tiles);
        let GemmConfig { rows, cols, cluster, band, .. } = config;
        let per_batch = m_tiles * n_tiles;
        let (batch, t) = (t / per_batch, t % per_batch);
        let per_band = n_tiles * band;
        let first = t / per_band * band;
        let height = (m_tiles - first).min(band);
        let t = t % per_band;
        let row = (first + t % height).mul_add(cluster, rank) * rows;
        TileCoord { row, col: t / height * cols, batch }
    }
}

/// C = A B for `[batch]` matrices of 16-bit floats, with f32 accumulation.
pub fn kernel<T: Half>(target: Target, layouts: Layouts, config: GemmConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(Program::build("gemm", target, |p| build::<T>(p, layouts, config))?.into_kernel())
}

fn build<'k, T: Half>(p: &Params<'k, GemmCall>, layouts: Layouts, config: GemmConfig)
where
    Pair<T>: Word,
{
    let k = p.builder();
    let GemmConfig { rows, cols, depth, cluster, .. } = config;
    k.cluster(cluster);
    let (a_tile, b_tile) = (tile::<T>(layouts.a, rows), tile::<T>(layouts.b, cols));
    let params = GemmParams::<T>::declare(p, layouts, config);
    let GemmParams { a, b, c, k_steps: steps, tiles, m, n, c_memory: memory, c_row, c_batch, .. } = params;
    // TMA writes units of 16 bytes: threads write the columns of C past the last whole unit.
    let whole = n & !(UNIT - 1);
    let ring = k.pipe_for_all("operands", depth, &[a_tile, b_tile], 0);
    // Each warpgroup stores C through two small tiles: it writes one while TMA reads the other.
    let staging = ["c.0", "c.1"].map(|name| k.tile(name, TileShape::new(T::NUMBER, rows, INNER)));

    k.role("load", Warpgroups(1).registers(40), |w| {
        w.one_thread(|t| {
            let rank = t.cluster_rank();
            t.each(t.cluster(), tiles, t.clusters(), |t, tile| {
                let at = params.find(config, tile, rank);
                t.each(0, steps, 1, |t, step| {
                    let inner = step * INNER;
                    ring.put(t, |t, stage| {
                        stage.load(t, stage.tile(0), &a, &tile_coordinates(layouts.a, at.row, inner, at.batch));
                        let part = stage.tile(1).part(layouts.b, rank, cols / cluster);
                        let col = rank.mul_add(cols / cluster, at.col);
                        stage.load_for_all(t, part, &b, &tile_coordinates(layouts.b, col, inner, at.batch));
                    });
                });
            });
        });
        w.sync_cluster();
    });

    k.role("multiply", Warpgroups(2).registers(232), |w: &Scope<'k, Group>| {
        let acc = w.accumulators(cols);
        let own = w.group();
        let barrier = w.group_barrier();
        let multiply = |sum| {
            let stage = ring.take(w);
            w.multiply(&acc, stage[0].part(layouts.a, own, 64).operand(layouts.a), stage[1].operand(layouts.b), sum);
        };
        let rank = w.cluster_rank();
        w.each(w.cluster(), tiles, w.clusters(), |w, tile| {
            // One product runs while the next one starts. A stage is released once the product after it has started.
            multiply(Sum::Fresh);
            w.each(1, steps, 1, |w, _| {
                multiply(Sum::Onto);
                w.wait_products(1);
                ring.release(w);
            });
            w.wait_products(0);
            ring.release(w);

            let at = params.find(config, tile, rank);
            // With an odd number of parts, the first part of a tile reuses the buffer of the previous tile's last part.
            let pending = if (cols / INNER).is_multiple_of(2) { 1 } else { 0 };
            for part in 0..cols / INNER {
                let tile = staging[part as usize % 2].rows(own, 64);
                w.one_thread_of_group(|t| t.wait_stores_read(pending));
                w.sync_group(&barrier);
                w.write::<T>(tile, &acc.part(part, INNER));
                w.publish_shared();
                w.sync_group(&barrier);
                w.one_thread_of_group(|t| {
                    let col = at.col + part * INNER;
                    t.when(col.lt(whole), |t| t.store_tile(&c, &[col, at.row + own * 64, at.batch], tile));
                    t.commit_stores();
                });
            }
            w.when_rarely((at.col + cols).gt(whole) & whole.lt(n), |w| {
                let row = at.row + own * 64 + w.first_row();
                let row_at = [row, row + 8].map(|row| {
                    let start = at.batch.to_u64().mul_wide_64(c_batch);
                    memory.at_wide(start + row.to_u64().mul_wide_64(c_row))
                });
                for (i, x) in acc.elements().enumerate() {
                    let (row, col) = (row + 8 * Acc::row_of(i) as u32, at.col + Acc::col_of(i) + w.first_col());
                    let inside = col.ge(whole) & col.lt(n) & row.lt(m);
                    w.when(inside, |w| row_at[Acc::row_of(i)].store(w, col, x.to_half::<T>()));
                }
            });
        });
        w.one_thread_of_group(|t| t.wait_stores(0));
        w.sync_cluster();
    });
}
