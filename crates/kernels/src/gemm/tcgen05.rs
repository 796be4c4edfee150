//! C = A B on data-centre Blackwell: products of one thread into tensor memory.
//!
//! One warp fills a ring with tiles of A and B, one warp multiplies them into one of two accumulators in tensor memory,
//! and a warpgroup writes the other accumulator to C meanwhile. Parameters, tile order and launch are those of the Hopper
//! kernel.
//!
//! With clusters of two CTAs, the CTAs are a pair: one product has twice the rows, and each CTA loads and reads half of the
//! columns of B.

use crate::gemm::{GemmCall, GemmConfig, GemmParams, INNER, Layouts, TileCoord, UNIT, tile, tile_coordinates};
use crate::params::{Params, Program};
use fulgurite_ptx::{
    BuildError, Builder, Claims, CtaPair, Filling, Group, Half, Kernel, Pair, Pipe, RowAcc, RowView, Scope, Sum,
    Target, TensorTile, Thread, Tile, TileShape, Val, WarpRole, Warpgroups, Warps, Which, Who, WholeWarps, Word,
};

/// Columns of C that the warpgroup holds in registers at a time.
const PART: u32 = INNER;

/// C = A B for `[batch]` matrices of 16-bit floats, with f32 accumulation.
pub fn kernel<T: Half>(target: Target, layouts: Layouts, config: GemmConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(Program::build("gemm_tensor", target, |p| build::<T>(p, layouts, config, Tiles::Strided))?.into_kernel())
}

/// Like [`kernel`], but its grid has a CTA for each tile of C: a CTA that runs takes tiles from CTAs that have not started. For
/// one CTA, not for pairs.
pub fn claiming_kernel<T: Half>(target: Target, layouts: Layouts, config: GemmConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(Program::build("gemm_claims", target, |p| build::<T>(p, layouts, config, Tiles::Claimed))?.into_kernel())
}

/// How a CTA comes by its tiles of C.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tiles {
    /// In equal steps.
    Strided,
    /// From CTAs that have not started.
    Claimed,
}

fn build<'k, T: Half>(p: &Params<'k, GemmCall>, layouts: Layouts, config: GemmConfig, tiles: Tiles)
where
    Pair<T>: Word,
{
    let k = p.builder();
    let GemmConfig { rows, cols, cluster, .. } = config;
    k.cluster(cluster);
    let params = GemmParams::<T>::declare(p, layouts, config);
    // Of a pair, each CTA has half of the columns of B.
    let stages = Stages::new(k, config, &[tile::<T>(layouts.a, rows), tile::<T>(layouts.b, cols / cluster)]);
    let claims = (tiles == Tiles::Claimed).then(|| k.claims("tiles"));
    let stages = Stages { claims, ..stages };
    roles(
        k,
        &params,
        config,
        &stages,
        |t, stage, [at, own], step| {
            let inner = step * INNER;
            stage.load(t, stage.tile(0), &params.a, &tile_coordinates(layouts.a, own.row, inner, at.batch));
            stage.load(t, stage.tile(1), &params.b, &tile_coordinates(layouts.b, own.col, inner, at.batch));
        },
        |w, acc, tiles, onto| {
            let operands = (tiles[0].operand(layouts.a), tiles[1].operand(layouts.b));
            w.elected(|t| t.multiply_tensor(acc, operands.0, operands.1, Sum::If(onto)));
        },
    );
}

/// The stages of a kernel's operands, of one CTA or of a pair.
pub(super) struct Stages<'k> {
    pub ring: Pipe<'k>,
    pair: Option<CtaPair<'k>>,
    /// Requests for tiles of CTAs that have not started.
    claims: Option<Claims<'k>>,
}

impl<'k> Stages<'k> {
    /// Stages with one tile of each shape.
    #[track_caller]
    pub fn new(k: &'k Builder, config: GemmConfig, tiles: &[TileShape]) -> Self {
        let pair = (config.cluster > 1).then(|| k.cta_pair());
        let ring = match pair {
            None => k.pipe("operands", config.depth, tiles),
            Some(pair) => pair.pipe("operands", config.depth, tiles),
        };
        Stages { ring, pair, claims: None }
    }
}

/// The roles of a product. `load` fills a stage for a step of a tile of C, of which the CTA loads other rows and columns;
/// `multiply` adds the tiles of a stage to an accumulator, or replaces it.
pub(super) fn roles<'k, T: Half>(
    k: &'k Builder,
    params: &GemmParams<'k, T>,
    config: GemmConfig,
    stages: &Stages<'k>,
    load: impl Fn(&Scope<'k, Thread>, &Filling<'k>, [TileCoord<'k>; 2], Val<'k, u32>),
    multiply: impl Fn(&Scope<'k, WarpRole>, TensorTile<'k>, &[Tile<'k>], Val<'k, bool>),
) where
    Pair<T>: Word,
{
    let GemmConfig { rows, cols, cluster, .. } = config;
    let Stages { ring, pair, claims } = stages;
    let staging = ["c.0", "c.1"].map(|name| k.tile(name, TileShape::new(T::NUMBER, rows, PART)));
    let accumulators = match pair {
        None => k.tensor_ring("accumulators", 1, 2, cols),
        Some(pair) => pair.tensor_ring("accumulators", 1, 2, cols),
    };
    let which = Which::Index(0);

    k.role("store", Warpgroups(1).registers(168), |w| {
        let barrier = w.group_barrier();
        let part_acc = w.row_accumulators(PART);
        let rank = rank_of(w, cluster);
        each_tile(w, params.tiles, (cluster, claims.as_ref()), |w, tile| {
            let at = params.find(config, tile, rank);
            let acc = accumulators.await_full(w, which);
            for part in 0..cols / PART {
                w.load_tensor(&part_acc, acc.part(part, PART));
                w.wait_tensor_loads();
                if (part + 1) * PART == cols {
                    accumulators.give_back(w, which);
                }
                let staging = staging[part as usize % 2];
                // With an odd number of parts, the first part of a tile reuses the buffer of the previous one's last.
                let pending = if (cols / PART).is_multiple_of(2) { 1 } else { 0 };
                w.one_thread_of_group(|t| t.wait_stores_read(pending));
                w.sync_group(&barrier);
                part_acc.write_with::<T>(w, staging, |_, x| x);
                w.publish_shared();
                w.sync_group(&barrier);
                let at = TileCoord { col: at.col + part * PART, ..at };
                store_part(w, params, staging, at);
                store_last_columns(w, params, &part_acc, at);
            }
        });
        w.one_thread_of_group(|t| t.wait_stores(0));
    });

    k.role("load", Warps(1).registers(72), |w| {
        let load_tile = |t: &Scope<'k, Thread>, tile, rank: Val<'k, u32>| {
            let at = params.find(config, tile, rank);
            let col = if cluster == 1 { at.col } else { rank.mul_add(cols / cluster, at.col) };
            let own = TileCoord { col, ..at };
            t.each(0, params.k_steps, 1, |t, step| ring.put(t, |t, stage| load(t, stage, [at, own], step)));
        };
        match claims {
            None => w.one_thread(|t| {
                let ([first, count], rank) = (tiles_of(t, cluster), rank_of(t, cluster));
                t.each(first, params.tiles, count, |t, tile| load_tile(t, tile, rank));
            }),
            // The whole warp takes the answers; one thread asks, and asks for the next tile before it loads this one.
            Some(claims) => each_tile(w, params.tiles, (cluster, Some(claims)), |w, tile| {
                w.elected(|t| {
                    claims.ask(t);
                    load_tile(t, tile, t.constant(0u32));
                });
            }),
        }
    });

    k.role("multiply", Warps(1), |w| {
        leading(*pair, w, |w| {
            each_tile(w, params.tiles, (cluster, claims.as_ref()), |w, _| {
                let acc = accumulators.await_empty(w, which);
                w.each(0, params.k_steps, 1, |w, step| {
                    let tiles = ring.wait(w);
                    multiply(w, acc, &tiles, step.ne(0));
                    ring.done_with_products(w);
                });
                accumulators.filled(w, which);
            });
        });
    });

    // `setmaxnreg` changes whole warpgroups.
    k.role("spare", Warps(2), |_| {});
}

/// The first tile of C of a CTA or of a pair, and the number of those that share the tiles.
#[track_caller]
fn tiles_of<'k, W: Who>(w: &Scope<'k, W>, cluster: u32) -> [Val<'k, u32>; 2] {
    if cluster == 1 { [w.cta(), w.ctas()] } else { [w.cluster(), w.clusters()] }
}

/// Runs `f` for each tile of C of a CTA or of a pair: at a stride of all CTAs, or for its own tile and those that it claims.
#[track_caller]
fn each_tile<'k, W: WholeWarps>(
    w: &Scope<'k, W>,
    tiles: Val<'k, u32>,
    (cluster, claims): (u32, Option<&Claims<'k>>),
    f: impl FnOnce(&Scope<'k, W>, Val<'k, u32>),
) {
    let Some(claims) = claims else {
        let [first, count] = tiles_of(w, cluster);
        return w.each(first, tiles, count, f);
    };
    let tile = w.var(w.cta());
    w.repeat(|w, leave| {
        f(w, tile.get());
        let (more, next) = claims.take(w);
        leave.when(!more);
        tile.set(next);
    });
}

/// Rank of the CTA in its pair.
#[track_caller]
fn rank_of<'k, W: Who>(w: &Scope<'k, W>, cluster: u32) -> Val<'k, u32> {
    if cluster == 1 { w.constant(0u32) } else { w.cluster_rank() }
}

/// Runs `f` in the CTA that starts products.
#[track_caller]
fn leading<'k>(pair: Option<CtaPair<'k>>, w: &Scope<'k, WarpRole>, f: impl FnOnce(&Scope<'k, WarpRole>)) {
    match pair {
        None => f(w),
        Some(pair) => pair.lead(w, f),
    }
}

/// Starts the stores of a staged part of C, by boxes of 64 rows.
fn store_part<'k, T: Half>(w: &Scope<'k, Group>, params: &GemmParams<'k, T>, staging: Tile<'k>, at: TileCoord<'k>) {
    const BOX: u32 = 64;
    let whole = params.n & !(UNIT - 1);
    w.one_thread_of_group(|t| {
        t.when(at.col.lt(whole), |t| {
            for half in 0..RowAcc::GROUP_ROWS / BOX {
                t.store_tile(&params.c, &[at.col, at.row + half * BOX, at.batch], staging.rows(half, BOX));
            }
        });
        t.commit_stores();
    });
}

/// Writes the columns of C past the last whole unit of 16 bytes, if this part has any.
fn store_last_columns<'k, T: Half>(
    w: &Scope<'k, Group>,
    params: &GemmParams<'k, T>,
    part: &RowAcc<'k>,
    at: TileCoord<'k>,
) {
    let (n, whole) = (params.n, params.n & !(UNIT - 1));
    w.when_rarely((at.col + PART).gt(whole) & whole.lt(n), |w| {
        let row = at.row + RowAcc::first_row(w);
        let start = at.batch.to_u64().mul_wide_64(params.c_batch) + row.to_u64().mul_wide_64(params.c_row);
        let row_at = params.c_memory.at_wide(start);
        for (i, x) in (0..).zip(part.elements()) {
            let col = at.col + i;
            let inside = col.ge(whole) & col.lt(n) & row.lt(params.m);
            w.when(inside, |w| row_at.store(w, col, x.to_half::<T>()));
        }
    });
}
