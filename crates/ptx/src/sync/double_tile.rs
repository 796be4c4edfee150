//! Tiles of which every warpgroup of a role writes a part, and that all of them read: two, so that nobody meets anybody. One is
//! written while the one before is still read.
//!
//! A tile has two mbarriers, as a stage of a ring: `full` counts the warps that have written their part, `empty` those that are
//! done with the whole.

use crate::build::{Builder, Count, Group, Scope, Val};
use crate::inst::{Arg, Base};
use crate::product::TileShape;
use crate::sync::pipe::{Pipe, wait_phase};
use crate::table::{mbarrier, sync};
use crate::tile::Tile;
use std::panic::Location;

/// Tiles: as many as the ring has stages.
const TILES: u32 = 2;

/// Two tiles between the warpgroups of a role, in step with a ring of two stages.
///
/// At each stage of the ring the role [opens](Self::open) a tile, writes and [publishes](Self::publish) it. The tile of the stage
/// before is [waited for](Self::wait_previous), and [given back](Self::done_previous) before the role goes on to the next stage.
pub struct DoubleTile<'k> {
    k: &'k Builder,
    id: usize,
    /// The ring whose place it has.
    leader: usize,
    first: Tile<'k>,
    full: u32,
    empty: u32,
}

impl Builder {
    /// For the current role, which takes the stages of `leader`.
    #[track_caller]
    pub fn swap<'k>(&'k self, name: &str, shape: TileShape, leader: &Pipe<'k>) -> DoubleTile<'k> {
        if leader.depth() != TILES {
            self.refuse(format!("swap `{name}` in step with a ring of {} stages, allowed: {TILES}", leader.depth()));
        }
        let id = self.new_pipe(name, 1);
        // One after the other.
        let [first, _] = [self.tile(name, shape), self.tile(name, shape)];
        let warps = Count::Fixed(self.role_warps().1);
        let [full, empty] = ["full", "empty"].map(|of| self.mbarriers(&format!("{name}.{of}"), TILES, warps));
        DoubleTile { k: self, id, leader: leader.id(), first, full, empty }
    }
}

impl<'k> DoubleTile<'k> {
    /// Where the role stands: the tile that it writes, and the parity of the round.
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

    /// Waits until nobody reads the tile any more that is written at this stage.
    #[track_caller]
    pub fn open(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        self.k.pipe_filled(self.id);
        let [stage, parity] = self.place();
        // A fresh barrier's phase of parity 1 counts as over.
        wait_phase(self.k, stage.mul_add(8, self.k.shared_address(self.empty)), parity ^ 1);
        self.first.nth(stage)
    }

    /// What the warpgroup wrote may be read.
    #[track_caller]
    pub fn publish(&self, w: &Scope<'k, Group>) {
        self.k.emit(&sync::FENCE_PROXY, [Arg::Word(".shared::cta")]);
        let [stage, _] = self.place();
        self.arrive(w, self.full, stage);
    }

    /// Waits until all have written the tile of the stage before.
    #[track_caller]
    pub fn wait_previous(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        let [stage, parity] = self.place();
        let before = stage ^ 1;
        // Before the first stage comes the last of the round before.
        wait_phase(self.k, before.mul_add(8, self.k.shared_address(self.full)), parity ^ before);
        self.first.nth(before)
    }

    /// This warpgroup does not read the tile of the stage before any more.
    #[track_caller]
    pub fn done_previous(&self, w: &Scope<'k, Group>) {
        self.k.pipe_emptied(self.id);
        let [stage, _] = self.place();
        self.arrive(w, self.empty, stage ^ 1);
    }
}
