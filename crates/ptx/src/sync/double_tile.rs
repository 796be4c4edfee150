//! A double-buffered tile that all warpgroups of a role write in parts and read as a whole. One buffer is written while
//! the other is still read, so the warpgroups need no barrier.
//!
//! Each buffer has two mbarriers, like a stage of a ring: `full` counts the warps that have written their part, `empty`
//! counts the warps that are done with the whole tile.

use crate::build::{Builder, Count, Group, Scope, Val};
use crate::inst::{Arg, Base};
use crate::product::TileShape;
use crate::sync::pipe::{Pipe, wait_phase};
use crate::table::{mbarrier, sync};
use crate::tile::Tile;
use std::panic::Location;

/// Number of buffers, equal to the stages of the leading ring.
const TILES: u32 = 2;

/// Two tiles shared by the warpgroups of a role, in step with a ring of two stages.
///
/// At each stage of the ring the role [opens](Self::open) a tile, writes it and [publishes](Self::publish) it. It
/// [waits for](Self::wait_previous) the previous stage's tile, and [gives it back](Self::done_previous) before it goes
/// on to the next stage.
pub struct DoubleTile<'k> {
    k: &'k Builder,
    id: usize,
    /// The ring whose cursor selects the buffer.
    leader: usize,
    first: Tile<'k>,
    full: u32,
    empty: u32,
}

impl Builder {
    /// A double-buffered tile for the current role, which takes the stages of `leader`.
    #[track_caller]
    pub fn double_tile<'k>(&'k self, name: &str, shape: TileShape, leader: &Pipe<'k>) -> DoubleTile<'k> {
        if leader.depth() != TILES {
            self.refuse(format!(
                "double tile `{name}` in step with a ring of {} stages, allowed: {TILES}",
                leader.depth()
            ));
        }
        let id = self.new_pipe(name, 1);
        // Two consecutive allocations, so that `nth` reaches both.
        let [first, _] = [self.tile(name, shape), self.tile(name, shape)];
        let warps = Count::Fixed(self.role_warps().1);
        let [full, empty] = ["full", "empty"].map(|of| self.mbarriers(&format!("{name}.{of}"), TILES, warps));
        DoubleTile { k: self, id, leader: leader.id(), first, full, empty }
    }
}

impl<'k> DoubleTile<'k> {
    /// The buffer that the role writes now, and the parity of the round.
    #[track_caller]
    fn place(&self) -> [Val<'k, u32>; 2] {
        let [stage, parity] = self.k.cursor(self.leader, "take", [0, 0]);
        [stage.now(), parity.now()]
    }

    #[track_caller]
    fn arrive(&self, w: &Scope<'k, Group>, first: u32, tile: Val<'k, u32>) {
        let at = Location::caller();
        w.sync_warp();
        w.when(w.lane().eq(0), |_| {
            self.k.placed(at, || {
                let bar = tile.mul_add(8, self.k.shared_address(first));
                self.k.emit(&mbarrier::ARRIVE, [Arg::Address(Base::Reg(bar.in_register()), 0)]);
            });
        });
    }

    /// Waits until no warpgroup reads this stage's tile any more, and returns it for writing.
    #[track_caller]
    pub fn open(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        self.k.pipe_filled(self.id);
        let [stage, parity] = self.place();
        // The phase of parity 1 of a fresh mbarrier counts as complete.
        wait_phase(self.k, stage.mul_add(8, self.k.shared_address(self.empty)), parity ^ 1);
        self.first.nth(stage)
    }

    /// Publishes the part that this warpgroup wrote.
    #[track_caller]
    pub fn publish(&self, w: &Scope<'k, Group>) {
        self.k.emit(&sync::FENCE_PROXY, [Arg::Word(".shared::cta")]);
        let [stage, _] = self.place();
        self.arrive(w, self.full, stage);
    }

    /// Waits until all warpgroups have written the previous stage's tile, and returns it.
    #[track_caller]
    pub fn wait_previous(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        let [stage, parity] = self.place();
        let before = stage ^ 1;
        // Stage 0 follows stage 1 of the previous round, whose parity differs.
        wait_phase(self.k, before.mul_add(8, self.k.shared_address(self.full)), parity ^ before);
        self.first.nth(before)
    }

    /// Tells that this warpgroup no longer reads the previous stage's tile.
    #[track_caller]
    pub fn done_previous(&self, w: &Scope<'k, Group>) {
        self.k.pipe_emptied(self.id);
        let [stage, _] = self.place();
        self.arrive(w, self.empty, stage ^ 1);
    }
}
