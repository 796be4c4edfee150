//! Rings of tiles between the thread that fills them and the warps that empty them.
//!
//! A stage of a ring has two mbarriers: `full` counts the bytes that were brought, `empty` the warps that are done.
//! Where each role stands in the ring, and the parity it waits for, live in registers that only this module knows.

use crate::build::{Builder, Count, Group, Scope, Thread, Val, Var};
use crate::inst::{Arg, Base, Class};
use crate::kernel::Stmt;
use crate::product::TileShape;
use crate::table::{mbarrier, memory};
use crate::tile::{Tensor, Tile};
use std::panic::Location;

/// A ring whose stages hold one tile of each of several shapes.
pub struct Pipe<'k> {
    k: &'k Builder,
    id: usize,
    depth: u32,
    /// Shape and offset of the first stage of each tile.
    tiles: Vec<(TileShape, u32)>,
    full: u32,
    empty: u32,
    /// Blocks of the cluster that fill each other's stages.
    blocks: u32,
}

impl Builder {
    /// A ring of `depth` stages, each with one tile of each shape.
    #[track_caller]
    pub fn pipe(&self, name: &str, depth: u32, tiles: &[TileShape]) -> Pipe<'_> {
        let blocks = self.cluster_blocks();
        let id = self.new_pipe(name, blocks);
        let place = |shape: &TileShape| {
            let stage = shape.bytes().next_multiple_of(shape.swizzle.period());
            (*shape, self.take_shared(name, depth * stage, shape.swizzle.period()))
        };
        let tiles = tiles.iter().map(place).collect();
        let full = self.mbarriers(&format!("{name}.full"), depth, Count::Fixed(1));
        let empty = self.mbarriers(&format!("{name}.empty"), depth, Count::Readers(id));
        Pipe { k: self, id, depth, tiles, full, empty, blocks }
    }
}

/// A stage of a ring that is being filled.
pub struct Filling<'k> {
    tiles: Vec<Tile<'k>>,
    full: Val<'k, u32>,
    blocks: u32,
}

impl<'k> Filling<'k> {
    /// Starts bringing the tile at `at` of a tensor into the stage's `i`-th tile.
    #[track_caller]
    pub fn load(&self, t: &Scope<'k, Thread>, i: usize, from: &Tensor<'k>, at: &[Val<'k, u32>]) {
        from.load(t, at, self.tiles[i], self.full, None);
    }
    /// The same into all blocks of the cluster, from a tensor whose tiles are the `part`-th of as many row parts as
    /// there are blocks; each block brings its part.
    #[track_caller]
    pub fn load_rows_for_all(
        &self,
        t: &Scope<'k, Thread>,
        i: usize,
        part: Val<'k, u32>,
        rows: u32,
        from: &Tensor<'k>,
        at: &[Val<'k, u32>],
    ) {
        let all = if self.blocks > 1 { Some(((1u32 << self.blocks) - 1) as u16) } else { None };
        from.load(t, at, self.tiles[i].rows(part, rows), self.full, all);
    }
}

impl<'k> Pipe<'k> {
    fn bytes(&self) -> u32 {
        self.tiles.iter().map(|(shape, _)| shape.bytes()).sum()
    }

    /// The tiles of a stage.
    #[track_caller]
    fn stage(&self, stage: Val<'k, u32>) -> Vec<Tile<'k>> {
        let tile = |(shape, offset): &(TileShape, u32)| {
            let bytes = shape.bytes().next_multiple_of(shape.swizzle.period());
            Tile::at(*shape, stage.mul_add(bytes, self.k.shared_address(*offset)))
        };
        self.k.placed(Location::caller(), || self.tiles.iter().map(tile).collect())
    }
    #[track_caller]
    fn barrier(&self, first: u32, stage: Val<'k, u32>) -> Val<'k, u32> {
        stage.mul_add(8, self.k.shared_address(first))
    }

    /// Waits until the phase of this parity is over.
    #[track_caller]
    fn wait(&self, barrier: Val<'k, u32>, parity: Val<'k, u32>) {
        let (at, k) = (Location::caller(), self.k);
        let place = Arg::Address(Base::Reg(barrier.in_register()), 0);
        let body = k.block(|| {
            let done = k.register(Class::Pred);
            k.placed(at, || k.emit(&mbarrier::TRY_WAIT, [Arg::Reg(done), place, parity.arg()]));
            k.push(Stmt::Break { cond: done, when: true, at });
        });
        k.push(Stmt::Loop { body, at });
    }

    /// To the next stage; past the last, to the first with the other parity.
    #[track_caller]
    fn advance(&self, [stage, parity]: [Var<'k, u32>; 2]) {
        if self.depth > 1 {
            let next = stage.now() + 1;
            let wraps = next.eq(self.depth);
            stage.set(wraps.select(0u32, next));
            parity.set(parity.now() ^ wraps.select::<u32>(1, 0));
        } else {
            parity.set(parity.now() ^ 1);
        }
    }

    /// Waits for an empty stage, has it filled, and goes on. The bytes of all its tiles must be brought.
    #[track_caller]
    pub fn put(&self, t: &Scope<'k, Thread>, f: impl FnOnce(&Scope<'k, Thread>, &Filling<'k>)) {
        self.k.pipe_filled(self.id);
        // A fresh barrier's phase of parity 1 counts as over: the first round finds all stages empty.
        let [stage, parity] = self.k.cursor(self.id, "put", [0, 1]);
        self.wait(self.barrier(self.empty, stage.now()), parity.now());
        let full = self.barrier(self.full, stage.now());
        let place = Arg::Address(Base::Reg(full.in_register()), 0);
        self.k.emit(&mbarrier::ARRIVE_EXPECT, [place, Arg::Imm(self.bytes().into())]);
        f(t, &Filling { tiles: self.stage(stage.now()), full, blocks: self.blocks });
        self.advance([stage, parity]);
    }

    /// Waits for the next full stage.
    #[track_caller]
    pub fn take(&self, _: &Scope<'k, Group>) -> Vec<Tile<'k>> {
        let [stage, parity] = self.k.cursor(self.id, "take", [0, 0]);
        self.wait(self.barrier(self.full, stage.now()), parity.now());
        let tiles = self.stage(stage.now());
        self.advance([stage, parity]);
        tiles
    }

    /// Gives the oldest stage back that was taken and not given back: nothing of it is read any more.
    #[track_caller]
    pub fn release(&self, w: &Scope<'k, Group>) {
        self.k.pipe_emptied(self.id);
        let [stage, parity] = self.k.cursor(self.id, "release", [0, 0]);
        let empty = self.barrier(self.empty, stage.now());
        let lane = w.lane();
        w.sync_warp();
        self.k.placed(Location::caller(), || {
            w.when(lane.lt(self.blocks), |w| {
                if self.blocks > 1 {
                    // Lane i tells block i, which fills this block's stages too.
                    let there: Val<'k, u32> = empty.compute(&memory::MAPA, &[lane.arg()]);
                    let place = Arg::Address(Base::Reg(there.in_register()), 0);
                    w.k.emit(&mbarrier::ARRIVE_CLUSTER_RELAXED, [place]);
                } else {
                    let place = Arg::Address(Base::Reg(empty.in_register()), 0);
                    w.k.emit(&mbarrier::ARRIVE, [place]);
                }
            });
        });
        self.advance([stage, parity]);
    }

    /// Waits until every stage has been given back, in the thread that fills: before a block of a cluster ends.
    #[track_caller]
    pub fn drain(&self, t: &Scope<'k, Thread>) {
        let [stage, parity] = self.k.cursor(self.id, "put", [0, 1]);
        self.k.placed(Location::caller(), || {
            t.each(0, self.depth, 1, |_, _| {
                self.wait(self.barrier(self.empty, stage.now()), parity.now());
                self.advance([stage, parity]);
            });
        });
    }
}
