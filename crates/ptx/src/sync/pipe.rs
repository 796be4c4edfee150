//! Rings of tiles or of short messages, between the thread that fills them and the warps that empty them.
//!
//! A stage of a ring has two mbarriers: `full` signals that it may be read, `empty` counts the warps that are done with
//! it. Each role's cursor (stage and parity) lives in registers that only this module handles.

use crate::build::{Builder, Count, Group, GroupBarrier, Pointer, Scope, Thread, Val, Var, WarpRole, Who, WholeWarps};
use crate::global_tensor::{Receivers, Tensor};
use crate::inst::{Arg, Base, Class, Reg};
use crate::kernel::Stmt;
use crate::product::{Swizzle, TileShape};
use crate::sync::cta_pair::{commit, leads, of_leader};
use crate::sync::stage::stage_layout;
use crate::table::{bytes, mbarrier, memory};
use crate::tcgen05::CtaGroup;
use crate::tile::Tile;
use std::panic::Location;

/// The mbarriers of a ring.
#[derive(Clone, Copy)]
pub(crate) struct Ring<'k> {
    pub(crate) k: &'k Builder,
    id: usize,
    /// The ring whose cursor this one shares, if it moves in step with another.
    leader: Option<usize>,
    depth: u32,
    pub(crate) full: u32,
    empty: u32,
    /// CTAs of the cluster that fill each other's stages.
    blocks: u32,
    /// CTAs whose stages the same products empty. A pair signals its full stages to the leader.
    group: CtaGroup,
}

/// A role's position in a ring: stage and parity.
pub(crate) type Cursor<'k> = [Var<'k, u32>; 2];

impl<'k> Ring<'k> {
    #[track_caller]
    pub(crate) fn new(k: &'k Builder, name: &str, depth: u32, blocks: u32) -> Self {
        Ring::filled_by(k, name, depth, blocks, Count::Fixed(1))
    }

    /// A ring whose stages are full after `arrivals` arrivals.
    #[track_caller]
    pub(crate) fn filled_by(k: &'k Builder, name: &str, depth: u32, blocks: u32, arrivals: Count) -> Self {
        let id = k.new_pipe(name, blocks);
        let full = k.mbarriers(&format!("{name}.full"), depth, arrivals);
        let empty = k.mbarriers(&format!("{name}.empty"), depth, Count::Readers(id));
        Ring { k, id, leader: None, depth, full, empty, blocks, group: CtaGroup::Single }
    }

    #[track_caller]
    pub(crate) fn in_step(self, leader: &Ring<'k>) -> Self {
        if self.depth != leader.depth {
            self.k.refuse(format!("a ring of {} stages in step with one of {}", self.depth, leader.depth));
        }
        Ring { leader: Some(leader.id), ..self }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// The role's cursor on one side of the ring.
    #[track_caller]
    pub(crate) fn cursor(&self, side: &'static str) -> Cursor<'k> {
        // The phase of parity 1 of a fresh mbarrier counts as complete, so the first round finds all stages empty.
        let parity = u32::from(side == "put");
        self.k.cursor(self.leader.unwrap_or(self.id), side, [0, parity])
    }

    #[track_caller]
    pub(crate) fn barrier(&self, first: u32, stage: Val<'k, u32>) -> Val<'k, u32> {
        match self.depth {
            1 => self.k.shared_address(first),
            _ => stage.mul_add(8, self.k.shared_address(first)),
        }
    }

    /// Advances to the next stage; past the last stage, to the first one with the other parity.
    #[track_caller]
    pub(crate) fn advance(&self, [stage, parity]: Cursor<'k>) {
        if self.leader.is_some() {
            return;
        }
        if self.depth > 1 {
            let next = stage.now() + 1;
            let wraps = next.eq(self.depth);
            stage.set(wraps.select(0u32, next));
            parity.set(parity.now() ^ wraps.select::<u32>(1, 0));
        } else {
            parity.set(parity.now() ^ 1);
        }
    }

    /// Waits until the cursor's stage is empty.
    #[track_caller]
    pub(crate) fn wait_empty(&self) -> Cursor<'k> {
        self.k.pipe_filled(self.id);
        let cursor = self.cursor("put");
        wait_phase(self.k, self.barrier(self.empty, cursor[0].now()), cursor[1].now());
        cursor
    }

    /// Waits until the cursor's stage is full.
    #[track_caller]
    pub(crate) fn wait_full(&self) -> Cursor<'k> {
        let cursor = self.cursor("take");
        wait_phase(self.k, self.barrier(self.full, cursor[0].now()), cursor[1].now());
        cursor
    }

    /// Gives back the stage at this side's cursor, which the role no longer reads, and advances.
    #[track_caller]
    pub(crate) fn give_back<W: WholeWarps>(&self, w: &Scope<'k, W>, side: &'static str) {
        let cursor = self.cursor(side);
        w.sync_warp();
        self.tell_empty(w, cursor[0].now());
        self.advance(cursor);
    }

    /// Gives back the stage at this side's cursor when all products of the warp's thread are complete, and advances.
    #[track_caller]
    fn give_back_with_products(&self, w: &Scope<'k, WarpRole>, side: &'static str) {
        self.k.pipe_emptied(self.id);
        let cursor = self.cursor(side);
        let empty = self.barrier(self.empty, cursor[0].now());
        let (at, both) = (Location::caller(), self.group == CtaGroup::Pair);
        w.elected(|t| t.k.placed(at, || commit(t.k, empty, both)));
        self.advance(cursor);
    }

    /// One lane of each warp signals that the warp no longer reads a stage.
    #[track_caller]
    fn tell_empty<W: WholeWarps>(&self, w: &Scope<'k, W>, stage: Val<'k, u32>) {
        self.k.pipe_emptied(self.id);
        let empty = self.barrier(self.empty, stage);
        let lane = w.lane();
        self.k.placed(Location::caller(), || {
            let here = |w: &Scope<'k, W>| {
                w.k.emit(&mbarrier::ARRIVE, [Arg::Address(Base::Reg(empty.in_register()), 0)]);
            };
            if self.blocks == 1 {
                return w.when(lane.lt(1), here);
            }
            // Lane i signals CTA i, which also fills this CTA's tiles. The signal to other CTAs may be relaxed: they
            // fill tiles, which only products read, and those products are complete. Numbers are filled by the own CTA.
            let there = |w: &Scope<'k, W>| {
                let there: Val<'k, u32> = empty.compute(&memory::MAPA, &[lane.arg()]);
                w.k.emit(&mbarrier::ARRIVE_CLUSTER_RELAXED, [Arg::Address(Base::Reg(there.in_register()), 0)]);
            };
            w.when(lane.lt(self.blocks), |w| w.choose(lane.eq(w.cluster_rank()), here, there));
        });
    }
}

/// Waits until the phase with this parity is complete.
#[track_caller]
pub(crate) fn wait_phase<'k>(k: &'k Builder, barrier: Val<'k, u32>, parity: Val<'k, u32>) {
    let at = Location::caller();
    let place = Arg::Address(Base::Reg(barrier.in_register()), 0);
    let body = k.block(|| {
        let done = k.register(Class::Pred);
        k.placed(at, || k.emit(&mbarrier::TRY_WAIT, [Arg::Reg(done), place, parity.arg()]));
        k.push(Stmt::Break { cond: done, when: true, at });
    });
    k.push(Stmt::Loop { body, at });
}

/// A ring whose stages hold one tile of each of several shapes, and optionally a row of numbers.
pub struct Pipe<'k> {
    ring: Ring<'k>,
    /// Shape of each tile and its byte offset in a stage.
    tiles: Vec<(TileShape, u32)>,
    /// Shared-memory offset of the first stage; `stage` is the size of a stage in bytes.
    first: u32,
    stage: u32,
    /// Numbers per stage, and the shared-memory offset of the first stage's numbers.
    numbers: (u32, u32),
    /// Shared-memory offset of the tags, in a tagged ring.
    tags: Option<u32>,
}

impl Builder {
    /// A ring of `depth` stages, each with one tile of each shape.
    #[track_caller]
    pub fn pipe(&self, name: &str, depth: u32, tiles: &[TileShape]) -> Pipe<'_> {
        self.pipe_with_numbers(name, depth, tiles, 0)
    }

    /// A ring of `depth` stages with one tile of each shape and a row of `numbers` floats (a multiple of four) per
    /// stage.
    #[track_caller]
    pub fn pipe_with_numbers(&self, name: &str, depth: u32, tiles: &[TileShape], numbers: u32) -> Pipe<'_> {
        self.pipe_of(name, [depth, 1], tiles, numbers)
    }

    /// A ring whose tiles the CTAs of the cluster load for each other. Each CTA loads its own numbers.
    #[track_caller]
    pub fn pipe_for_all(&self, name: &str, depth: u32, tiles: &[TileShape], numbers: u32) -> Pipe<'_> {
        self.pipe_of(name, [depth, self.cluster_blocks()], tiles, numbers)
    }

    /// A ring whose tiles the products of a pair of CTAs read in both.
    #[track_caller]
    pub(crate) fn pipe_of_pair(&self, name: &str, depth: u32, tiles: &[TileShape]) -> Pipe<'_> {
        let pipe = self.pipe(name, depth, tiles);
        Pipe { ring: Ring { group: CtaGroup::Pair, ..pipe.ring }, ..pipe }
    }

    #[track_caller]
    fn pipe_of(&self, name: &str, [depth, blocks]: [u32; 2], tiles: &[TileShape], numbers: u32) -> Pipe<'_> {
        if !numbers.is_multiple_of(4) {
            self.refuse(format!("ring `{name}` has rows of {numbers} numbers, allowed: multiples of 4"));
        }
        let (tiles, stage) = stage_layout(tiles);
        let first = self.take_shared(name, depth * stage, Swizzle::B128.period());
        // Numbers are stored apart from the tiles: between them they would cost a whole swizzle period.
        let row = if numbers == 0 { 0 } else { self.take_small(&format!("{name}.numbers"), depth * numbers * 4, 16) };
        let ring = Ring::new(self, name, depth, blocks);
        Pipe { ring, tiles, first, stage, numbers: (numbers, row), tags: None }
    }

    /// A ring of `depth` stages with one tile of each shape and a u32 tag per stage.
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

/// A stage of a ring while it is being filled.
pub struct Filling<'k> {
    tiles: Vec<Tile<'k>>,
    /// Address of the stage's row of numbers, and their count.
    numbers: (Val<'k, u32>, u32),
    full: Val<'k, u32>,
    blocks: u32,
    group: CtaGroup,
}

impl<'k> Filling<'k> {
    /// The stage's `i`-th tile.
    pub fn tile(&self, i: usize) -> Tile<'k> {
        self.tiles[i]
    }
    /// Starts loading the tile at coordinates `at` of a tensor into a tile of the stage, or into a part of one.
    #[track_caller]
    pub fn load(&self, t: &Scope<'k, Thread>, to: Tile<'k>, from: &Tensor<'k>, at: &[Val<'k, u32>]) {
        let receivers = if self.group == CtaGroup::Pair { Receivers::Pair } else { Receivers::Own };
        from.load(t, at, to, self.full, receivers);
    }
    /// Starts loading the stage's row of numbers from an array whose address is a multiple of 16 bytes.
    #[track_caller]
    pub fn load_numbers(&self, t: &Scope<'k, Thread>, from: Pointer<'k, f32>) {
        let (to, count) = self.numbers;
        let [to, from] = [Base::Reg(to.in_register()), Base::Reg(from.address().in_register())];
        let bar = Arg::Address(Base::Reg(self.full.in_register()), 0);
        let bytes = Arg::Imm(u64::from(4 * count));
        t.k.emit(&bytes::LOAD_BYTES, [Arg::Address(to, 0), Arg::Address(from, 0), bytes, bar]);
    }
    /// Starts a multicast load into the same place in all CTAs of the cluster: each CTA loads a part, and all receive
    /// everything.
    #[track_caller]
    pub fn load_for_all(&self, t: &Scope<'k, Thread>, to: Tile<'k>, from: &Tensor<'k>, at: &[Val<'k, u32>]) {
        if self.group == CtaGroup::Pair {
            t.k.refuse("a load for all CTAs into a ring of a pair, allowed: each CTA loads its own tiles".into());
        }
        let receivers = match self.blocks {
            1 => Receivers::Own,
            blocks => Receivers::All(((1u32 << blocks) - 1) as u16),
        };
        from.load(t, at, to, self.full, receivers);
    }
}

impl<'k> Pipe<'k> {
    /// Shares the cursor of `leader`, which saves each role two registers. A role must fill, wait for and give back a
    /// stage of this ring before it advances the leader; this ring never advances by itself.
    #[track_caller]
    pub fn in_step(self, leader: &Pipe<'k>) -> Self {
        Pipe { ring: self.ring.in_step(&leader.ring), ..self }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.ring.depth
    }
    pub(crate) fn id(&self) -> usize {
        self.ring.id
    }

    fn bytes(&self) -> u32 {
        self.tiles.iter().map(|(shape, _)| shape.bytes()).sum::<u32>() + 4 * self.numbers.0
    }

    /// Address of a stage's row of numbers, starting at column `col`.
    #[track_caller]
    fn row(&self, stage: Val<'k, u32>, col: Val<'k, u32>) -> Val<'k, u32> {
        let (count, first) = self.numbers;
        let start = col.mul_add(4, self.ring.k.shared_address(first));
        if self.ring.depth == 1 { start } else { stage.mul_add(4 * count, start) }
    }

    /// The tiles of a stage.
    #[track_caller]
    fn stage(&self, stage: Val<'k, u32>) -> Vec<Tile<'k>> {
        let start = self.ring.k.shared_address(self.first);
        let start = if self.ring.depth == 1 { start } else { stage.mul_add(self.stage, start) };
        let tiles = self.tiles.iter().map(|&(shape, offset)| Tile::at(shape, start + offset));
        self.ring.k.placed(Location::caller(), || tiles.collect())
    }

    /// Waits for an empty stage, calls `f` to start its loads, and advances. `f` must load all bytes of the stage.
    #[track_caller]
    pub fn put(&self, t: &Scope<'k, Thread>, f: impl FnOnce(&Scope<'k, Thread>, &Filling<'k>)) {
        self.put_with(t, None, f);
    }

    /// Like [`put`](Self::put), and sets the tag of the stage of a [tagged](Builder::tagged_pipe) ring.
    #[track_caller]
    pub fn put_tagged(
        &self,
        t: &Scope<'k, Thread>,
        tag: Val<'k, u32>,
        f: impl FnOnce(&Scope<'k, Thread>, &Filling<'k>),
    ) {
        self.put_with(t, Some(tag), f);
    }

    /// The tag of the stage that was waited for last.
    #[track_caller]
    pub fn tag<W: WholeWarps>(&self, _: &Scope<'k, W>) -> Val<'k, u32> {
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
        let bytes = Arg::Imm(u64::from(ring.group.ctas() * self.bytes()));
        let expect = || ring.k.emit(&mbarrier::ARRIVE_EXPECT, [Arg::Address(Base::Reg(full.in_register()), 0), bytes]);
        let full = ring.k.placed(Location::caller(), || match ring.group {
            CtaGroup::Single => {
                expect();
                full
            }
            // The leader alone expects bytes: those of both CTAs.
            CtaGroup::Pair => {
                t.when(leads(t), |_| expect());
                of_leader(full)
            }
        });
        let numbers = (self.row(cursor[0].now(), t.constant(0)), self.numbers.0);
        let (blocks, group) = (ring.blocks, ring.group);
        f(t, &Filling { tiles: self.stage(cursor[0].now()), numbers, full, blocks, group });
        ring.advance(cursor);
    }

    /// Waits for an empty stage, has one warpgroup write its tiles, and advances. For data that TMA cannot
    /// load.
    #[track_caller]
    pub fn fill(&self, w: &Scope<'k, Group>, barrier: &GroupBarrier, f: impl FnOnce(&Scope<'k, Group>, &[Tile<'k>])) {
        let (ring, at) = (&self.ring, Location::caller());
        let warps = ring.k.role_warps().1;
        if warps != 4 || ring.blocks > 1 || ring.group == CtaGroup::Pair {
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

    /// Waits for the next full stage. The role owns it until it is [`done`](Self::done) with it, one stage at a time.
    #[track_caller]
    pub fn wait<W: WholeWarps>(&self, w: &Scope<'k, W>) -> Vec<Tile<'k>> {
        self.ring.wait_full();
        self.current(w)
    }

    /// The tiles of the stage that was waited for last.
    #[track_caller]
    pub fn current<W: WholeWarps>(&self, _: &Scope<'k, W>) -> Vec<Tile<'k>> {
        let [stage, _] = self.ring.cursor("take");
        self.stage(stage.now())
    }

    /// The numbers of the stage that was waited for last, one for each accumulator column.
    #[track_caller]
    pub fn numbers(&self, w: &Scope<'k, Group>) -> Numbers<'k> {
        let [stage, _] = self.ring.cursor("take");
        Numbers { address: self.row(stage.now(), w.first_col()) }
    }

    /// The numbers of the stage that was waited for last, for threads that hold whole rows.
    #[track_caller]
    pub fn row_numbers(&self, w: &Scope<'k, Group>) -> Numbers<'k> {
        let [stage, _] = self.ring.cursor("take");
        Numbers { address: self.row(stage.now(), w.constant(0)) }
    }

    /// Selects from an array of tiles, one per stage of this ring, the tile of the stage that was waited for last. For
    /// tiles that are written and read in step with the ring.
    #[track_caller]
    pub fn beside<W: WholeWarps>(&self, _: &Scope<'k, W>, first: Tile<'k>) -> Tile<'k> {
        let [stage, _] = self.ring.cursor("take");
        if self.ring.depth == 1 { first } else { first.nth(stage.now()) }
    }

    /// Index of the stage that was waited for last, for what is kept beside the ring.
    #[track_caller]
    pub fn stage_index<W: WholeWarps>(&self, w: &Scope<'k, W>) -> Val<'k, u32> {
        if self.ring.depth == 1 { w.constant(0u32) } else { self.ring.cursor("take")[0].now() }
    }

    /// Advances to the next stage, but keeps the current one until [`release_previous`](Self::release_previous).
    #[track_caller]
    pub fn keep<W: WholeWarps>(&self, _: &Scope<'k, W>) {
        self.ring.advance(self.ring.cursor("take"));
    }

    /// Gives back the stage before the current one: the role no longer reads it.
    #[track_caller]
    pub fn release_previous<W: WholeWarps>(&self, w: &Scope<'k, W>) {
        let (stage, depth) = (self.ring.cursor("take")[0].now(), self.ring.depth);
        let previous = match depth {
            1 => stage,
            2 => stage ^ 1,
            _ => stage.eq(0).select::<u32>(depth - 1, stage - 1),
        };
        w.sync_warp();
        self.ring.tell_empty(w, previous);
    }

    /// Gives back the stage that was waited for: the role no longer reads it.
    #[track_caller]
    pub fn done<W: WholeWarps>(&self, w: &Scope<'k, W>) {
        self.ring.give_back(w, "take");
    }

    /// Waits for the next full stage. The role may hold several stages and [`release`](Self::release)s them in order.
    #[track_caller]
    pub fn take<W: WholeWarps>(&self, _: &Scope<'k, W>) -> Vec<Tile<'k>> {
        let cursor = self.ring.wait_full();
        let tiles = self.stage(cursor[0].now());
        self.ring.advance(cursor);
        tiles
    }

    /// The tiles of the `index`-th stage that the role holds, oldest first. The role holds at most as many stages as
    /// the ring has.
    #[track_caller]
    pub fn held<W: WholeWarps>(&self, _: &Scope<'k, W>, index: Val<'k, u32>) -> Vec<Tile<'k>> {
        let stage = self.ring.cursor("release")[0].now() + index;
        let wraps = stage.ge(self.ring.depth);
        self.stage(wraps.select(stage - self.ring.depth, stage))
    }

    /// The numbers of the oldest stage that the role holds.
    #[track_caller]
    pub fn held_numbers(&self, w: &Scope<'k, Group>) -> Numbers<'k> {
        Numbers { address: self.row(self.ring.cursor("release")[0].now(), w.first_col()) }
    }

    /// Gives back the oldest stage that the role holds: the role no longer reads it.
    #[track_caller]
    pub fn release<W: WholeWarps>(&self, w: &Scope<'k, W>) {
        self.ring.give_back(w, "release");
    }
}

impl<'k> Pipe<'k> {
    /// Gives back the stage that was waited for, once the products that one thread of the warp has started are complete.
    #[track_caller]
    pub fn done_with_products(&self, w: &Scope<'k, WarpRole>) {
        self.ring.give_back_with_products(w, "take");
    }

    /// Gives back the oldest stage that the role holds, once the products that one thread of the warp has started are
    /// complete.
    #[track_caller]
    pub fn release_with_products(&self, w: &Scope<'k, WarpRole>) {
        self.ring.give_back_with_products(w, "release");
    }
}

/// A row of numbers in shared memory, one for each column of accumulators.
#[derive(Clone, Copy)]
pub struct Numbers<'k> {
    /// Address of the number for the thread's first column.
    address: Val<'k, u32>,
}

impl<'k> Numbers<'k> {
    /// The `index`-th part of the row, in parts of `count` numbers.
    #[track_caller]
    pub fn part(self, index: Val<'k, u32>, count: u32) -> Self {
        Numbers { address: index.mul_add(4 * count, self.address) }
    }
    /// The numbers for the thread's two columns among columns `8 * eight .. 8 * eight + 8`.
    #[track_caller]
    pub fn pair(&self, w: &Scope<'k, Group>, eight: u32) -> [Val<'k, f32>; 2] {
        let regs = [0; 2].map(|_| w.k.register(Class::F32));
        let place = Arg::Address(Base::Reg(self.address.in_register()), (eight * 32) as i32);
        w.k.emit(&memory::LD_SHARED_F32, [Arg::List(regs.into()), place, Arg::Word(".v2")]);
        regs.map(|reg| Val::reg(w.k, reg))
    }

    /// The numbers for columns `8 * eight .. 8 * eight + 8`, for threads that hold whole rows.
    #[track_caller]
    pub fn eight(&self, w: &Scope<'k, Group>, eight: u32) -> [Val<'k, f32>; 8] {
        let regs = [0; 8].map(|_| w.k.register(Class::F32));
        for (i, four) in regs.chunks_exact(4).enumerate() {
            let place = Arg::Address(Base::Reg(self.address.in_register()), (eight * 32) as i32 + 16 * i as i32);
            w.k.emit(&memory::LD_SHARED_F32, [Arg::List(four.into()), place, Arg::Word(".v4")]);
        }
        regs.map(|reg| Val::reg(w.k, reg))
    }
}

/// A ring of short messages.
pub struct Mailbox<'k> {
    ring: Ring<'k>,
    offset: u32,
    words: usize,
}

impl<'k> Mailbox<'k> {
    /// Bytes that one instruction moves.
    const PART: usize = 16;

    /// Shares the cursor of a ring of tiles, as [`Pipe::in_step`] does.
    #[track_caller]
    pub fn in_step(self, leader: &Pipe<'k>) -> Self {
        Mailbox { ring: self.ring.in_step(&leader.ring), ..self }
    }

    #[track_caller]
    fn place(&self, cursor: Cursor<'k>) -> Reg {
        let start = self.ring.k.shared_address(self.offset);
        cursor[0].now().mul_add(4 * self.words as u32, start).in_register()
    }

    /// Waits for an empty slot and writes a message; missing words are 0.
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

    /// Waits for a message, reads it in every thread of the role, and frees its slot.
    #[track_caller]
    pub fn take<W: WholeWarps>(&self, w: &Scope<'k, W>) -> Vec<Val<'k, u32>> {
        let message = self.wait(w);
        self.done(w);
        message
    }

    /// Waits for a message and reads it. The message stays readable until the role is [`done`](Self::done) with it.
    #[track_caller]
    pub fn wait<W: WholeWarps>(&self, w: &Scope<'k, W>) -> Vec<Val<'k, u32>> {
        self.ring.wait_full();
        self.again(w)
    }

    /// Reads the last message again, which is cheaper than holding it in registers.
    #[track_caller]
    pub fn again<W: Who>(&self, _: &Scope<'k, W>) -> Vec<Val<'k, u32>> {
        let (ring, k) = (&self.ring, self.ring.k);
        let cursor = ring.cursor("take");
        let (base, regs) = (self.place(cursor), (0..self.words).map(|_| k.register(Class::B32)).collect::<Vec<_>>());
        for (i, part) in regs.chunks(Self::PART / 4).enumerate() {
            let place = Arg::Address(Base::Reg(base), (i * Self::PART) as i32);
            k.emit(&memory::LD_SHARED_32, [Arg::List(part.into()), place, Arg::Word(".v4")]);
        }
        regs.into_iter().map(|reg| Val::reg(k, reg)).collect()
    }

    /// Reads one word of the last message, into one register instead of four.
    #[track_caller]
    pub fn word<W: Who>(&self, _: &Scope<'k, W>, i: usize) -> Val<'k, u32> {
        let (ring, k) = (&self.ring, self.ring.k);
        if i >= self.words {
            k.refuse(format!("number {i} of a message, allowed: below {}", self.words));
        }
        let (base, d) = (self.place(ring.cursor("take")), k.register(Class::B32));
        let place = Arg::Address(Base::Reg(base), 4 * i as i32);
        k.emit(&memory::LD_SHARED_32, [Arg::List([d].into()), place, Arg::Word("")]);
        Val::reg(k, d)
    }

    /// Frees the slot of the last message: the role no longer reads it.
    #[track_caller]
    pub fn done<W: WholeWarps>(&self, w: &Scope<'k, W>) {
        self.ring.give_back(w, "take");
    }
}
