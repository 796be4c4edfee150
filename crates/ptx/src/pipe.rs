//! Rings between the thread that fills them and the warps that empty them: of tiles, or of a few numbers.
//!
//! A stage of a ring has two mbarriers: `full` tells that it may be read, `empty` counts the warps that are done.
//! Where each role stands in the ring, and the parity it waits for, live in registers that only this module knows.

use crate::build::{Builder, Count, Group, GroupBarrier, Scope, Thread, Val, Var};
use crate::inst::{Arg, Base, Class, Reg};
use crate::kernel::Stmt;
use crate::product::{Swizzle, TileShape};
use crate::table::{mbarrier, memory};
use crate::tile::{Tensor, Tile};
use std::panic::Location;

/// The barriers of a ring.
struct Ring<'k> {
    k: &'k Builder,
    id: usize,
    depth: u32,
    full: u32,
    empty: u32,
    /// Blocks of the cluster that fill each other's stages.
    blocks: u32,
}

/// A role's place in a ring.
type Cursor<'k> = [Var<'k, u32>; 2];

impl<'k> Ring<'k> {
    #[track_caller]
    fn new(k: &'k Builder, name: &str, depth: u32, blocks: u32) -> Self {
        let id = k.new_pipe(name, blocks);
        let full = k.mbarriers(&format!("{name}.full"), depth, Count::Fixed(1));
        let empty = k.mbarriers(&format!("{name}.empty"), depth, Count::Readers(id));
        Ring { k, id, depth, full, empty, blocks }
    }

    #[track_caller]
    fn barrier(&self, first: u32, stage: Val<'k, u32>) -> Val<'k, u32> {
        match self.depth {
            1 => self.k.shared_address(first),
            _ => stage.mul_add(8, self.k.shared_address(first)),
        }
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
    fn advance(&self, [stage, parity]: Cursor<'k>) {
        if self.depth > 1 {
            let next = stage.now() + 1;
            let wraps = next.eq(self.depth);
            stage.set(wraps.select(0u32, next));
            parity.set(parity.now() ^ wraps.select::<u32>(1, 0));
        } else {
            parity.set(parity.now() ^ 1);
        }
    }

    /// Waits for an empty stage.
    #[track_caller]
    fn wait_empty(&self) -> Cursor<'k> {
        self.k.pipe_filled(self.id);
        // A fresh barrier's phase of parity 1 counts as over: the first round finds all stages empty.
        let cursor = self.k.cursor(self.id, "put", [0, 1]);
        self.wait(self.barrier(self.empty, cursor[0].now()), cursor[1].now());
        cursor
    }

    /// Waits for a full stage.
    #[track_caller]
    fn wait_full(&self) -> Cursor<'k> {
        let cursor = self.k.cursor(self.id, "take", [0, 0]);
        self.wait(self.barrier(self.full, cursor[0].now()), cursor[1].now());
        cursor
    }

    /// One lane of each warp tells that the stage at `cursor` is no longer read.
    #[track_caller]
    fn tell_empty(&self, w: &Scope<'k, Group>, cursor: Cursor<'k>) {
        self.k.pipe_emptied(self.id);
        let empty = self.barrier(self.empty, cursor[0].now());
        let lane = w.lane();
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
    }
}

/// A ring whose stages hold one tile of each of several shapes.
pub struct Pipe<'k> {
    ring: Ring<'k>,
    /// Shape of each tile, and where in a stage it lies.
    tiles: Vec<(TileShape, u32)>,
    /// Where the first stage begins, and bytes from one to the next.
    first: u32,
    stage: u32,
    /// Where the numbers begin that go with the stages, if any do.
    tags: Option<u32>,
}

impl Builder {
    /// A ring of `depth` stages, each with one tile of each shape.
    #[track_caller]
    pub fn pipe(&self, name: &str, depth: u32, tiles: &[TileShape]) -> Pipe<'_> {
        let mut stage = 0;
        let mut place = |shape: &TileShape| {
            let start = stage;
            stage += shape.bytes().next_multiple_of(shape.swizzle.period());
            (*shape, start)
        };
        let tiles = tiles.iter().map(&mut place).collect();
        // Whole periods of the widest swizzle, so that every stage begins on one.
        let stage = stage.next_multiple_of(Swizzle::B128.period());
        let first = self.take_shared(name, depth * stage, Swizzle::B128.period());
        Pipe { ring: Ring::new(self, name, depth, self.cluster_blocks()), tiles, first, stage, tags: None }
    }

    /// The same, and a number goes with each stage.
    #[track_caller]
    pub fn tagged_pipe(&self, name: &str, depth: u32, tiles: &[TileShape]) -> Pipe<'_> {
        let tags = self.take_small(&format!("{name}.tags"), 4 * depth, 16);
        Pipe { tags: Some(tags), ..self.pipe(name, depth, tiles) }
    }

    /// A ring of `depth` messages of `words` numbers each, a multiple of four.
    #[track_caller]
    pub fn mailbox(&self, name: &str, depth: u32, words: usize) -> Mailbox<'_> {
        if !words.is_multiple_of(4) {
            self.refuse(format!("mailbox `{name}` has messages of {words} numbers, allowed: multiples of 4"));
        }
        let offset = self.take_small(name, 4 * words as u32 * depth, 16);
        Mailbox { ring: Ring::new(self, name, depth, 1), offset, words }
    }
}

/// A stage of a ring that is being filled.
pub struct Filling<'k> {
    tiles: Vec<Tile<'k>>,
    full: Val<'k, u32>,
    blocks: u32,
}

impl<'k> Filling<'k> {
    /// The stage's `i`-th tile.
    pub fn tile(&self, i: usize) -> Tile<'k> {
        self.tiles[i]
    }
    /// Starts bringing the tile at `at` of a tensor into a tile of the stage, or a part of one.
    #[track_caller]
    pub fn load(&self, t: &Scope<'k, Thread>, to: Tile<'k>, from: &Tensor<'k>, at: &[Val<'k, u32>]) {
        from.load(t, at, to, self.full, None);
    }
    /// The same into the same place in all blocks of the cluster: each brings a part, and all get everything.
    #[track_caller]
    pub fn load_for_all(&self, t: &Scope<'k, Thread>, to: Tile<'k>, from: &Tensor<'k>, at: &[Val<'k, u32>]) {
        let all = (self.blocks > 1).then_some(((1u32 << self.blocks) - 1) as u16);
        from.load(t, at, to, self.full, all);
    }
}

impl<'k> Pipe<'k> {
    fn bytes(&self) -> u32 {
        self.tiles.iter().map(|(shape, _)| shape.bytes()).sum()
    }

    /// The tiles of a stage.
    #[track_caller]
    fn stage(&self, stage: Val<'k, u32>) -> Vec<Tile<'k>> {
        let start = self.ring.k.shared_address(self.first);
        let start = if self.ring.depth == 1 { start } else { stage.mul_add(self.stage, start) };
        let tiles = self.tiles.iter().map(|&(shape, offset)| Tile::at(shape, start + offset));
        self.ring.k.placed(Location::caller(), || tiles.collect())
    }

    /// Waits for an empty stage, has it filled, and goes on. The bytes of all its tiles must be brought.
    #[track_caller]
    pub fn put(&self, t: &Scope<'k, Thread>, f: impl FnOnce(&Scope<'k, Thread>, &Filling<'k>)) {
        self.put_with(t, None, f);
    }

    /// The same, with the number that goes with the stage of a [tagged](Builder::tagged_pipe) ring.
    #[track_caller]
    pub fn put_tagged(
        &self,
        t: &Scope<'k, Thread>,
        tag: Val<'k, u32>,
        f: impl FnOnce(&Scope<'k, Thread>, &Filling<'k>),
    ) {
        self.put_with(t, Some(tag), f);
    }

    /// The number that goes with the stage that was waited for last.
    #[track_caller]
    pub fn tag(&self, _: &Scope<'k, Group>) -> Val<'k, u32> {
        let [stage, _] = self.ring.k.cursor(self.ring.id, "take", [0, 0]);
        let (d, tag) = (self.ring.k.register(Class::B32), self.tag_place(stage.now()));
        self.ring.k.emit(&memory::LD_SHARED_32, [Arg::List([d].into()), tag, Arg::Word("")]);
        Val::reg(self.ring.k, d)
    }

    #[track_caller]
    fn tag_place(&self, stage: Val<'k, u32>) -> Arg {
        let k = self.ring.k;
        if self.tags.is_none() {
            k.refuse("no number goes with the stages of this ring; make it with tagged_pipe".into());
        }
        let first = k.shared_address(self.tags.unwrap_or(0));
        Arg::Address(Base::Reg(stage.mul_add(4, first).in_register()), 0)
    }

    #[track_caller]
    fn put_with(
        &self,
        t: &Scope<'k, Thread>,
        tag: Option<Val<'k, u32>>,
        f: impl FnOnce(&Scope<'k, Thread>, &Filling<'k>),
    ) {
        let ring = &self.ring;
        let cursor = ring.wait_empty();
        if let Some(tag) = tag {
            let (place, tag) = (self.tag_place(cursor[0].now()), tag.in_register());
            ring.k.emit(&memory::ST_SHARED_32, [place, Arg::List([tag].into()), Arg::Word("")]);
        }
        let full = ring.barrier(ring.full, cursor[0].now());
        let place = Arg::Address(Base::Reg(full.in_register()), 0);
        ring.k.emit(&mbarrier::ARRIVE_EXPECT, [place, Arg::Imm(self.bytes().into())]);
        f(t, &Filling { tiles: self.stage(cursor[0].now()), full, blocks: ring.blocks });
        ring.advance(cursor);
    }

    /// Waits for an empty stage, has a role of one warpgroup write its tiles, and goes on. For what the copy engine cannot
    /// bring.
    #[track_caller]
    pub fn fill(&self, w: &Scope<'k, Group>, barrier: &GroupBarrier, f: impl FnOnce(&Scope<'k, Group>, &[Tile<'k>])) {
        let (ring, at) = (&self.ring, Location::caller());
        let warps = ring.k.role_warps().1;
        if warps != 4 || ring.blocks > 1 {
            let blocks = ring.blocks;
            ring.k
                .refuse(format!("{warps} warps fill a ring of {blocks} blocks, allowed: one warpgroup and one block"));
        }
        let cursor = ring.wait_empty();
        f(w, &self.stage(cursor[0].now()));
        w.publish_shared();
        w.sync_group(barrier);
        ring.k.placed(at, || {
            w.one_thread_of_group(|t| {
                let full = ring.barrier(ring.full, cursor[0].now());
                t.k.emit(&mbarrier::ARRIVE, [Arg::Address(Base::Reg(full.in_register()), 0)]);
            });
        });
        ring.advance(cursor);
    }

    /// Waits for the next full stage, which is the role's until it is [`done`](Self::done) with it: one at a time.
    #[track_caller]
    pub fn wait(&self, w: &Scope<'k, Group>) -> Vec<Tile<'k>> {
        self.ring.wait_full();
        self.current(w)
    }

    /// The stage that was waited for last.
    #[track_caller]
    pub fn current(&self, _: &Scope<'k, Group>) -> Vec<Tile<'k>> {
        let [stage, _] = self.ring.k.cursor(self.ring.id, "take", [0, 0]);
        self.stage(stage.now())
    }

    /// Gives the stage back that was waited for: nothing of it is read any more.
    #[track_caller]
    pub fn done(&self, w: &Scope<'k, Group>) {
        let cursor = self.ring.k.cursor(self.ring.id, "take", [0, 0]);
        w.sync_warp();
        self.ring.tell_empty(w, cursor);
        self.ring.advance(cursor);
    }

    /// Waits for the next full stage, of which the role may have several: they are [`release`](Self::release)d in order.
    #[track_caller]
    pub fn take(&self, _: &Scope<'k, Group>) -> Vec<Tile<'k>> {
        let cursor = self.ring.wait_full();
        let tiles = self.stage(cursor[0].now());
        self.ring.advance(cursor);
        tiles
    }

    /// Gives the oldest stage back that was taken and not given back: nothing of it is read any more.
    #[track_caller]
    pub fn release(&self, w: &Scope<'k, Group>) {
        let cursor = self.ring.k.cursor(self.ring.id, "release", [0, 0]);
        w.sync_warp();
        self.ring.tell_empty(w, cursor);
        self.ring.advance(cursor);
    }
}

/// A ring of messages of a few numbers.
pub struct Mailbox<'k> {
    ring: Ring<'k>,
    offset: u32,
    words: usize,
}

impl<'k> Mailbox<'k> {
    /// Bytes that one instruction moves.
    const PART: usize = 16;

    #[track_caller]
    fn place(&self, cursor: Cursor<'k>) -> Reg {
        let start = self.ring.k.shared_address(self.offset);
        cursor[0].now().mul_add(4 * self.words as u32, start).in_register()
    }

    /// Waits for room and writes a message; what it leaves out is 0.
    #[track_caller]
    pub fn put(&self, t: &Scope<'k, Thread>, message: &[Val<'k, u32>]) {
        let (ring, k) = (&self.ring, self.ring.k);
        if message.len() > self.words {
            k.refuse(format!("a message of {} numbers, allowed: up to {}", message.len(), self.words));
        }
        let cursor = ring.wait_empty();
        let zero = t.constant(0u32);
        let all = message.iter().copied().chain(std::iter::repeat(zero)).take(self.words);
        let registers = || all.map(|x| x.in_register()).collect::<Vec<Reg>>();
        let (base, regs) = (self.place(cursor), k.placed(Location::caller(), registers));
        for (i, part) in regs.chunks(Self::PART / 4).enumerate() {
            let place = Arg::Address(Base::Reg(base), (i * Self::PART) as i32);
            k.emit(&memory::ST_SHARED_32, [place, Arg::List(part.into()), Arg::Word(".v4")]);
        }
        let full = ring.barrier(ring.full, cursor[0].now());
        k.emit(&mbarrier::ARRIVE, [Arg::Address(Base::Reg(full.in_register()), 0)]);
        ring.advance(cursor);
    }

    /// Waits for a message and reads it, in every thread of the role.
    #[track_caller]
    pub fn take(&self, w: &Scope<'k, Group>) -> Vec<Val<'k, u32>> {
        let (ring, k) = (&self.ring, self.ring.k);
        let cursor = ring.wait_full();
        let (base, regs) = (self.place(cursor), (0..self.words).map(|_| k.register(Class::B32)).collect::<Vec<_>>());
        for (i, part) in regs.chunks(Self::PART / 4).enumerate() {
            let place = Arg::Address(Base::Reg(base), (i * Self::PART) as i32);
            k.emit(&memory::LD_SHARED_32, [Arg::List(part.into()), place, Arg::Word(".v4")]);
        }
        w.sync_warp();
        ring.tell_empty(w, cursor);
        ring.advance(cursor);
        regs.into_iter().map(|reg| Val::reg(k, reg)).collect()
    }
}
