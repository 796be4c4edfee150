//! C = A B on Hopper: a persistent kernel whose copy engine runs ahead of its tensor cores.
//!
//! One thread fills a ring with tiles of A and B; two warpgroups multiply them, 64 rows each, and write their part
//! of C while the ring fills up for the next tile. Tiles of C are walked in bands of a few rows of tiles, so that
//! blocks that run at the same time share tiles of A and B in the second-level cache.

pub mod plan;

use fulgurite_ptx::{
    Acc, BuildError, Builder, Group, Half, Kernel, Major, Pair, Scope, Sum, Target, TileShape, Val, Warpgroups, Word,
};

/// How the kernel is cut: measured choices, one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmConfig {
    /// Rows of C of a tile: 64 for each of the two warpgroups.
    pub rows: u32,
    /// Columns of C of a tile.
    pub cols: u32,
    /// Stages of the ring.
    pub depth: u32,
    /// Blocks of a cluster, which share their tiles of B.
    pub cluster: u32,
    /// Rows of tiles in a band.
    pub band: u32,
}

impl Default for GemmConfig {
    fn default() -> Self {
        GemmConfig { rows: 128, cols: 256, depth: 4, cluster: 1, band: 16 }
    }
}

/// Which way operands lie in memory: for A `[m][k]` ([`Major::Inner`]) or `[k][m]`, for B `[n][k]` or `[k][n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layouts {
    /// Of A.
    pub a: Major,
    /// Of B.
    pub b: Major,
}

/// Elements of the summed dimension in a tile: a line of 128 bytes.
pub(crate) const INNER: u32 = 64;

/// Elements of 16 bytes.
pub(crate) const UNIT: u32 = 8;

/// The tile of an operand with `outer` rows (A) or columns (B).
fn tile<T: Half>(major: Major, outer: u32) -> TileShape {
    match major {
        Major::Inner => TileShape::new(T::NUMBER, outer, INNER),
        Major::Outer => TileShape::new(T::NUMBER, INNER, outer),
    }
}

/// Coordinates of an operand's tile: `outer` and `inner` elements, in a batch.
fn place<'k>(major: Major, outer: Val<'k, u32>, inner: Val<'k, u32>, batch: Val<'k, u32>) -> [Val<'k, u32>; 3] {
    match major {
        Major::Inner => [inner, outer, batch],
        Major::Outer => [outer, inner, batch],
    }
}

/// Where a tile of C begins, and in which batch.
#[derive(Clone, Copy)]
struct Place<'k> {
    row: Val<'k, u32>,
    col: Val<'k, u32>,
    batch: Val<'k, u32>,
}

/// C = A B for `[batch]` matrices of 16-bit floats, with f32 accumulation.
pub fn kernel<T: Half>(target: Target, layouts: Layouts, config: GemmConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("gemm", target, |k| build::<T>(k, layouts, config))
}

fn build<'k, T: Half>(k: &'k Builder, layouts: Layouts, config: GemmConfig)
where
    Pair<T>: Word,
{
    let GemmConfig { rows, cols, depth, cluster, band } = config;
    k.cluster(cluster);
    let (a_tile, b_tile) = (tile::<T>(layouts.a, rows), tile::<T>(layouts.b, cols));
    let c_tile = TileShape::new(T::NUMBER, 64, INNER);
    // Blocks of a cluster have the same columns of C: each brings its part of B's tile, for all.
    let b_part = tile::<T>(layouts.b, cols / cluster);
    let (a, b, c) = (k.tensor("a", a_tile, 3), k.tensor("b", b_part, 3), k.tensor("c", c_tile, 3));
    let [m_tiles, n_tiles, steps, tiles, m, n] =
        ["m_tiles", "n_tiles", "k_steps", "tiles", "m", "n"].map(|name| k.param::<u32>(name));
    // The copy engine writes units of 16 bytes: the columns of C past the last whole one are written by threads.
    let (memory, row_stride, batch_stride) =
        (k.pointer::<T>("c_memory"), k.param::<u64>("c_row"), k.param::<u64>("c_batch"));
    let whole = n & !(UNIT - 1);
    let ring = k.pipe_for_all("operands", depth, &[a_tile, b_tile], 0);
    // C leaves through two small tiles a warpgroup: one is written while the copy engine reads the other.
    let staging = ["c.0", "c.1"].map(|name| k.tile(name, TileShape::new(T::NUMBER, rows, INNER)));

    // Tiles of C in the order in which blocks take them: down a band of `band` rows of tiles, then to the next column.
    // A cluster takes neighbouring rows of tiles: `m_tiles` counts its tiles, which are as many times higher.
    let find = move |t: Val<'k, u32>, rank: Val<'k, u32>| {
        let per_batch = m_tiles * n_tiles;
        let (batch, t) = (t / per_batch, t % per_batch);
        let per_band = n_tiles * band;
        let first = t / per_band * band;
        let height = (m_tiles - first).min(band);
        let t = t % per_band;
        let row = (first + t % height).mul_add(cluster, rank) * rows;
        Place { row, col: t / height * cols, batch }
    };

    k.role("load", Warpgroups(1).registers(40), |w| {
        w.one_thread(|t| {
            let rank = t.cluster_rank();
            t.each(t.cluster(), tiles, t.clusters(), |t, tile| {
                let at = find(tile, rank);
                t.each(0, steps, 1, |t, step| {
                    let inner = step * INNER;
                    ring.put(t, |t, stage| {
                        stage.load(t, stage.tile(0), &a, &place(layouts.a, at.row, inner, at.batch));
                        let part = stage.tile(1).part(layouts.b, rank, cols / cluster);
                        let col = rank.mul_add(cols / cluster, at.col);
                        stage.load_for_all(t, part, &b, &place(layouts.b, col, inner, at.batch));
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
            // The product of a step runs while the next one is started; a stage goes back when the one after it runs.
            multiply(Sum::Fresh);
            w.each(1, steps, 1, |w, _| {
                multiply(Sum::Onto);
                w.wait_products(1);
                ring.release(w);
            });
            w.wait_products(0);
            ring.release(w);

            let at = find(tile, rank);
            // With an odd number of parts, the first of a tile takes the buffer that the last of the tile before left.
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
                    let start = at.batch.to_u64().mul_wide_64(batch_stride);
                    memory.at_wide(start + row.to_u64().mul_wide_64(row_stride))
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
