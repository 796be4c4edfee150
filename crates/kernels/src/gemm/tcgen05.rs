//! C = A B on data-centre Blackwell: products of one thread into tensor memory.
//!
//! One warp fills a ring with tiles of A and B, one warp multiplies them into one of two accumulators in tensor memory,
//! and a warpgroup writes the other accumulator to C meanwhile. Parameters, tile order and launch are those of the Hopper
//! kernel.

use crate::gemm::{GemmCall, GemmConfig, GemmParams, INNER, Layouts, TileCoord, UNIT, place, tile};
use crate::params::{Params, Program};
use fulgurite_ptx::{
    BuildError, Group, Half, Kernel, Pair, RowAcc, RowView, Scope, Sum, Target, Tile, TileShape, Warpgroups, Warps,
    Which, Word,
};

/// Columns of C that the warpgroup holds in registers at a time.
const PART: u32 = INNER;

/// C = A B for `[batch]` matrices of 16-bit floats, with f32 accumulation.
pub fn kernel<T: Half>(target: Target, layouts: Layouts, config: GemmConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let config = GemmConfig { cluster: 1, ..config };
    Ok(Program::build("gemm_tensor", target, |p| build::<T>(p, layouts, config))?.into_kernel())
}

fn build<'k, T: Half>(p: &Params<'k, GemmCall>, layouts: Layouts, config: GemmConfig)
where
    Pair<T>: Word,
{
    let k = p.builder();
    let GemmConfig { rows, cols, depth, .. } = config;
    let params = GemmParams::<T>::declare(p, layouts, config);
    let ring = k.pipe("operands", depth, &[tile::<T>(layouts.a, rows), tile::<T>(layouts.b, cols)]);
    let staging = ["c.0", "c.1"].map(|name| k.tile(name, TileShape::new(T::NUMBER, rows, PART)));
    let accumulators = k.tensor_ring("accumulators", 1, 2, cols);
    let which = Which::Number(0);

    k.role("store", Warpgroups(1).registers(168), |w| {
        let barrier = w.group_barrier();
        let part_acc = w.row_accumulators(PART);
        w.each(w.cta(), params.tiles, w.ctas(), |w, tile| {
            let at = params.find(config, tile, w.constant(0u32));
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
                store_part(w, &params, staging, at);
                store_last_columns(w, &params, &part_acc, at);
            }
        });
        w.one_thread_of_group(|t| t.wait_stores(0));
    });

    k.role("load", Warps(1).registers(72), |w| {
        w.one_thread(|t| {
            t.each(t.cta(), params.tiles, t.ctas(), |t, tile| {
                let at = params.find(config, tile, t.constant(0u32));
                t.each(0, params.k_steps, 1, |t, step| {
                    let inner = step * INNER;
                    ring.put(t, |t, stage| {
                        stage.load(t, stage.tile(0), &params.a, &place(layouts.a, at.row, inner, at.batch));
                        stage.load(t, stage.tile(1), &params.b, &place(layouts.b, at.col, inner, at.batch));
                    });
                });
            });
        });
    });

    k.role("multiply", Warps(1), |w| {
        w.each(w.cta(), params.tiles, w.ctas(), |w, _| {
            let acc = accumulators.await_empty(w, which);
            w.each(0, params.k_steps, 1, |w, step| {
                let stage = ring.wait(w);
                let operands = (stage[0].operand(layouts.a), stage[1].operand(layouts.b));
                let onto = step.ne(0);
                w.elected(|t| t.multiply_tensor(acc, operands.0, operands.1, Sum::If(onto)));
                ring.done_with_products(w);
            });
            accumulators.filled(w, which);
        });
    });

    // `setmaxnreg` changes whole warpgroups.
    k.role("spare", Warps(2), |_| {});
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
