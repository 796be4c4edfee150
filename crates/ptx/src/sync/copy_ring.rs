//! Rings of tiles that the threads of a role fill themselves with `cp.async`, for GPUs without TMA.
//!
//! The same threads fill and empty the ring. Each thread copies 16 bytes at a time and can wait only for its own
//! copies, in groups. A stage is therefore readable once every thread has waited for its group and all threads have met
//! at a barrier. That barrier also proves that no thread still reads the previous stage, which is the next one to be
//! filled.

use crate::build::{Builder, Scope, Val, Var, WholeWarps};
use crate::inst::{Arg, Base};
use crate::product::{Swizzle, TileShape};
use crate::sync::stage::stage_layout;
use crate::table::{bytes, sync};
use crate::tile::Tile;
use std::panic::Location;

/// Bytes that one instruction copies.
const UNIT: u32 = 16;

/// A ring whose stages hold one tile of each of several shapes, filled by the threads that read them.
///
/// A role first [`put`](Self::put)s one stage fewer than the ring has. Then it repeats: [`wait`](Self::wait) for a
/// stage, put another, read the first, and be [`done`](Self::done) with it. It must put as often as it waits, even past
/// the last stage that it needs; such a put may copy nothing.
pub struct CopyRing<'k> {
    k: &'k Builder,
    id: usize,
    depth: u32,
    /// Shape of each tile and its byte offset in a stage.
    tiles: Vec<(TileShape, u32)>,
    /// Shared-memory offset of the first stage; `stage` is the size of a stage in bytes.
    first: u32,
    stage: u32,
    /// Named barrier of the role's threads.
    barrier: u32,
}

/// A block of a matrix in global memory: rows of contiguous bytes.
#[derive(Clone, Copy)]
pub struct GlobalRows<'k> {
    /// Address of the first byte, a multiple of 16.
    pub address: Val<'k, u64>,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: Val<'k, u64>,
    /// Number of valid rows; the tile's rows past them become 0.
    pub rows: Val<'k, u32>,
    /// Rows before the first valid one, if there may be some; they become 0, too, and are not read.
    pub skip: Option<Val<'k, u32>>,
    /// Number of valid bytes per row; the tile's bytes past them become 0.
    pub bytes: Val<'k, u32>,
}

impl Builder {
    /// A ring of `depth` stages (two or more) that `cp.async` fills, with one tile of each shape per stage.
    #[track_caller]
    pub fn copy_ring(&self, name: &str, depth: u32, tiles: &[TileShape]) -> CopyRing<'_> {
        let (tiles, stage) = stage_layout(tiles);
        self.copy_ring_of(name, depth, tiles, stage)
    }

    /// A ring of `depth` stages that `cp.async` fills, each with one tile of one of several shapes. The stage's tiles
    /// share its memory: [`put`](CopyRing::put) fills one of them.
    #[track_caller]
    pub fn copy_ring_of_either(&self, name: &str, depth: u32, shapes: &[TileShape]) -> CopyRing<'_> {
        let stage = shapes.iter().map(|shape| stage_layout(&[*shape]).1).max().unwrap_or_default();
        self.copy_ring_of(name, depth, shapes.iter().map(|shape| (*shape, 0)).collect(), stage)
    }

    #[track_caller]
    fn copy_ring_of(&self, name: &str, depth: u32, tiles: Vec<(TileShape, u32)>, stage: u32) -> CopyRing<'_> {
        if depth < 2 {
            self.refuse(format!("ring `{name}` has {depth} stages, allowed: 2 or more"));
        }
        let first = self.take_shared(name, depth * stage, Swizzle::B128.period());
        CopyRing { k: self, id: self.new_pipe(name, 1), depth, tiles, first, stage, barrier: self.named_barriers(1) }
    }
}

impl<'k> CopyRing<'k> {
    #[track_caller]
    fn cursor(&self, side: &'static str) -> Var<'k, u32> {
        let [stage, _] = self.k.cursor(self.id, side, [0, 0]);
        stage
    }

    #[track_caller]
    fn advance(&self, stage: Var<'k, u32>) {
        let next = stage.now() + 1;
        stage.set(next.eq(self.depth).select(0u32, next));
    }

    #[track_caller]
    fn tiles(&self, stage: Val<'k, u32>) -> Vec<Tile<'k>> {
        let start = stage.mul_add(self.stage, self.k.shared_address(self.first));
        let tiles = self.tiles.iter().map(|&(shape, offset)| Tile::at(shape, start + offset));
        self.k.placed(Location::caller(), || tiles.collect())
    }

    /// Starts filling the next stage with [`copy`](Self::copy), and advances. No thread may still wait for that stage
    /// or read it.
    #[track_caller]
    pub fn put<W: WholeWarps>(&self, w: &Scope<'k, W>, f: impl FnOnce(&Scope<'k, W>, &[Tile<'k>])) {
        self.k.pipe_filled(self.id);
        let stage = self.cursor("put");
        f(w, &self.tiles(stage.now()));
        self.k.emit(&sync::COPY_COMMIT, []);
        self.advance(stage);
    }

    /// Starts copying rows into a tile; the threads share the work.
    #[track_caller]
    pub fn copy<W: WholeWarps>(&self, w: &Scope<'k, W>, to: Tile<'k>, from: GlobalRows<'k>) {
        let (k, at) = (self.k, Location::caller());
        let (shape, threads) = (to.shape(), 32 * self.k.role_warps().1);
        let (line, per_row) = (shape.swizzle.line(), shape.cols * shape.number.bytes() / UNIT);
        let per_line = line / UNIT;
        // All units of a thread must have the same swizzle: a power of two of them across, and multiples of 8 rows at a
        // time. Where whole rows do not fit that, threads copy one chunk of columns after the other.
        let fits = |across: u32| across.is_power_of_two() && threads.is_multiple_of(8 * across);
        let Some(across) = [per_row, per_line].into_iter().find(|&across| fits(across)) else {
            k.refuse(format!(
                "{threads} threads copy rows of {per_row} units of 16 bytes, allowed: 8 threads or a multiple for each unit of a chunk"
            ));
            return;
        };
        let copies = Copies { k, at, shape, to, from, across, rows: threads / across };
        // Copies of whole tiles need neither bounds nor sizes.
        let full = from.rows.ge(shape.rows) & from.bytes.ge(per_row * UNIT);
        // Not by a closure, which would record this file as the source of its instructions.
        let full = match from.skip {
            Some(skip) => full & skip.eq(0),
            None => full,
        };
        w.choose(full, |w| copies.run(w, true), |w| copies.run(w, false));
    }

    /// Waits until the oldest stage that was put is readable by all threads. The role owns the stage until it is
    /// [`done`](Self::done) with it.
    #[track_caller]
    pub fn wait<W: WholeWarps>(&self, w: &Scope<'k, W>) -> Vec<Tile<'k>> {
        // The role is `depth - 1` puts ahead of the stages it is done with; all but the oldest may stay in flight.
        self.wait_but(w, self.depth.saturating_sub(2))
    }

    /// Like [`wait`](Self::wait), for a role that does not always put the same number of stages ahead: waits until all
    /// but the newest `newest` stages that were put are readable.
    #[track_caller]
    pub fn wait_but<W: WholeWarps>(&self, w: &Scope<'k, W>, newest: u32) -> Vec<Tile<'k>> {
        self.k.pipe_emptied(self.id);
        self.k.emit(&sync::COPY_WAIT, [Arg::Imm(u64::from(newest))]);
        self.meet(w);
        self.tiles(self.cursor("take").now())
    }

    /// Waits until all threads of the role have come here. Nobody then reads a stage that the role is done with.
    #[track_caller]
    pub fn meet<W: WholeWarps>(&self, _: &Scope<'k, W>) {
        let threads = 32 * self.k.role_warps().1;
        self.k.emit(&sync::BAR, [Arg::Imm(self.barrier.into()), Arg::Imm(threads.into())]);
    }

    /// Waits until everything that was copied so far, into stages or elsewhere, is readable by all threads.
    #[track_caller]
    pub fn settle<W: WholeWarps>(&self, w: &Scope<'k, W>) {
        self.k.emit(&sync::COPY_COMMIT, []);
        self.k.emit(&sync::COPY_WAIT, [Arg::Imm(0)]);
        self.meet(w);
    }

    /// Gives back the stage that was waited for. Its contents stay until the role waits for the ring again.
    #[track_caller]
    pub fn done<W: WholeWarps>(&self, _: &Scope<'k, W>) {
        self.advance(self.cursor("take"));
    }
}

/// The copies of one tile.
struct Copies<'k> {
    k: &'k Builder,
    at: &'static Location<'static>,
    shape: TileShape,
    to: Tile<'k>,
    from: GlobalRows<'k>,
    /// Units that neighbouring threads copy side by side, and rows that all threads copy at a time.
    across: u32,
    rows: u32,
}

impl<'k> Copies<'k> {
    /// Starts the copies. `full`: all rows and bytes of the tile are valid.
    fn run<W: WholeWarps>(&self, w: &Scope<'k, W>, full: bool) {
        let Copies { k, at, shape, to, from, across, rows } = *self;
        k.placed(at, || {
            let (line, per_row) = (shape.swizzle.line(), shape.cols * shape.number.bytes() / UNIT);
            let (own, per_line) = (w.thread_in_role(), line / UNIT);
            let (row, first) = (own / across, own % across);
            let linear = row.mul_add(line, (first % per_line) * UNIT);
            let spread = linear ^ ((linear >> 3) & shape.swizzle.mask());
            let place = (first / per_line).mul_add(shape.chunk_bytes(), to.address() + spread).in_register();
            let step = from.stride.mul_wide_64(u64::from(rows));
            for group in 0..per_row / across {
                let there = if group == 0 { first * UNIT } else { (first + group * across) * UNIT };
                let used = there.lt(from.bytes).select((from.bytes - there).min(UNIT), 0u32);
                let mut address = from.address + row.to_u64().mul_wide_64(from.stride) + there.to_u64();
                let chunks = group * across / per_line * shape.chunk_bytes();
                for i in 0..shape.rows.div_ceil(rows) {
                    let bytes = match full {
                        true => Arg::Imm(UNIT.into()),
                        false => {
                            let own = row + i * rows;
                            let valid = own.lt(from.rows);
                            from.skip.map_or(valid, |skip| valid & own.ge(skip)).select(used, 0u32).arg()
                        }
                    };
                    let place = Arg::Address(Base::Reg(place), (chunks + i * rows * line) as i32);
                    let source = Arg::Address(Base::Reg(address.in_register()), 0);
                    let copy = || {
                        k.emit(
                            &bytes::COPY,
                            [place.clone(), source.clone(), bytes.clone(), Arg::Imm(UNIT.into()), Arg::Word("cg")],
                        )
                    };
                    match shape.rows.is_multiple_of(rows) || (i + 1) * rows <= shape.rows {
                        true => copy(),
                        false => w.when((row + i * rows).lt(shape.rows), |_| copy()),
                    }
                    address = address + step;
                }
            }
        });
    }
}
