//! Tiles that the two CTAs of a cluster exchange. A role writes its own tile, TMA copies it to the other
//! CTA, and the role in each CTA reads both.
//!
//! A stage is written again only when all warps of both CTAs are done with it. By then it has also been copied.

use crate::build::{Builder, Count, Group, Scope, Thread, Val};
use crate::inst::{Arg, Base, Class};
use crate::product::TileShape;
use crate::sync::pipe::{Ring, wait_phase};
use crate::table::{bytes, mbarrier, memory};
use crate::tile::Tile;
use std::panic::Location;

/// CTAs that exchange tiles.
const BLOCKS: u32 = 2;

/// A ring of stages with two tiles each: the CTA's own and its peer's.
pub struct PeerTiles<'k> {
    ring: Ring<'k>,
    shape: TileShape,
    /// Offset of the first own tile; `other` is that of the first peer tile.
    own: u32,
    other: u32,
}

/// A one-way u32 channel from one thread of CTA 0 to one thread of CTA 1 of a cluster.
pub struct ClusterBroadcast<'k> {
    k: &'k Builder,
    id: usize,
    words: u32,
    full: u32,
    /// mbarriers in CTA 0: CTA 1 has read the number.
    heard: u32,
}

/// Capacity of the channel in numbers.
const WORDS: u32 = 4;

impl Builder {
    /// A channel for a sequence of numbers. The kernel must be launched in [clusters](Self::cluster) of two CTAs.
    #[track_caller]
    pub fn cluster_broadcast(&self, name: &str) -> ClusterBroadcast<'_> {
        let id = self.new_pipe(name, 1);
        self.pipe_filled(id);
        let words = self.take_small(name, 4 * WORDS, 16);
        let [full, heard] = ["full", "heard"].map(|of| self.mbarriers(&format!("{name}.{of}"), WORDS, Count::Fixed(1)));
        ClusterBroadcast { k: self, id, words, full, heard }
    }

    /// A ring of `depth` stages. The kernel must be launched in [clusters](Self::cluster) of two CTAs.
    #[track_caller]
    pub fn peer_tiles(&self, name: &str, depth: u32, shape: TileShape) -> PeerTiles<'_> {
        let (blocks, bytes) = (self.cluster_blocks(), shape.bytes());
        if blocks != BLOCKS {
            self.refuse(format!("peer tiles `{name}` in clusters of {blocks} blocks, allowed: {BLOCKS}"));
        }
        if !bytes.is_multiple_of(shape.swizzle.period()) {
            let period = shape.swizzle.period();
            self.refuse(format!("peer tiles `{name}` of tiles of {bytes} bytes, allowed: multiples of {period}"));
        }
        let tiles = |name: &str| self.take_shared(name, depth * bytes, shape.swizzle.period());
        let (own, other) = (tiles(name), tiles(&format!("{name}.other")));
        PeerTiles { ring: Ring::new(self, name, depth, BLOCKS), shape, own, other }
    }
}

impl<'k> ClusterBroadcast<'k> {
    /// Returns CTA 0's `x` in both CTAs.
    #[track_caller]
    pub fn share(&self, t: &Scope<'k, Thread>, x: Val<'k, u32>) -> Val<'k, u32> {
        self.k.pipe_emptied(self.id);
        let (number, shared) = (self.k.cursor(self.id, "shared", [0, 0])[0], t.var(x));
        let place = |address: Val<'k, u32>| Arg::Address(Base::Reg(address.in_register()), 0);
        self.k.placed(Location::caller(), || {
            let (at, round) = (number.now() & (WORDS - 1), number.now() / WORDS);
            let word = at.mul_add(4, self.k.shared_address(self.words));
            let full = at.mul_add(8, self.k.shared_address(self.full));
            let heard = at.mul_add(8, self.k.shared_address(self.heard));
            let in_block = |t: &Scope<'k, Thread>, address: Val<'k, u32>, block: u32| -> Val<'k, u32> {
                address.compute(&memory::MAPA, &[t.constant(block).arg()])
            };
            let tell = |t: &Scope<'k, Thread>| {
                // The phase of parity 1 of a fresh mbarrier counts as complete.
                wait_phase(t.k, heard, (round & 1) ^ 1);
                let [word, full] = [word, full].map(|address| in_block(t, address, 1));
                let list = Arg::List([x.in_register()].into());
                t.k.emit(&bytes::STORE_WORDS, [place(word), list, place(full), Arg::Word("")]);
            };
            let hear = |t: &Scope<'k, Thread>| {
                t.k.emit(&mbarrier::ARRIVE_EXPECT, [place(full), Arg::Imm(4)]);
                wait_phase(t.k, full, round & 1);
                let x = t.k.register(Class::B32);
                t.k.emit(&memory::LD_SHARED_32, [Arg::List([x].into()), place(word), Arg::Word("")]);
                shared.set(Val::<u32>::reg(t.k, x));
                t.k.emit(&mbarrier::ARRIVE_CLUSTER, [place(in_block(t, heard, 0))]);
            };
            t.choose(t.cluster_rank().eq(0), tell, hear);
            number.set(number.now() + 1);
        });
        shared.get()
    }
}

impl<'k> PeerTiles<'k> {
    pub(crate) fn ring(&self) -> &Ring<'k> {
        &self.ring
    }

    /// The tile of a stage, in the array of tiles that starts at offset `first`.
    #[track_caller]
    fn tile(&self, first: u32, stage: Val<'k, u32>) -> Tile<'k> {
        Tile::at(self.shape, self.ring.k.shared_address(first)).nth(stage)
    }

    /// Waits until both CTAs are done with the next stage, and returns its own tile for the role to write.
    #[track_caller]
    pub fn open(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        let [stage, _] = self.ring.wait_empty();
        self.tile(self.own, stage.now())
    }

    /// Sends the opened tile to the peer and advances. All threads of the role must have written, published and
    /// synchronised.
    #[track_caller]
    pub fn send(&self, w: &Scope<'k, Group>) {
        let cursor = self.ring.cursor("put");
        let stage = cursor[0].now();
        let first = w.thread_in_group().eq(0) & w.group().eq(0);
        self.ring.k.placed(Location::caller(), || {
            w.when(first, |w| {
                let place = |address: Val<'k, u32>| Arg::Address(Base::Reg(address.in_register()), 0);
                let there = |address: Val<'k, u32>| -> Val<'k, u32> {
                    address.compute(&memory::MAPA, &[(w.cluster_rank() ^ 1).arg()])
                };
                let full = self.ring.barrier(self.ring.full, stage);
                let bytes = w.constant(self.shape.bytes());
                // Expect the peer's tile in this CTA. Its bytes may already have arrived.
                w.k.emit(&mbarrier::ARRIVE_EXPECT, [place(full), Arg::Imm(self.shape.bytes().into())]);
                let [own, other] = [self.own, self.other].map(|first| self.tile(first, stage).address());
                let copy = [place(there(other)), place(own), bytes.arg(), place(there(full))];
                w.k.emit(&bytes::COPY_TO_PEER, copy);
            });
        });
        self.ring.advance(cursor);
    }

    /// The own tile of the oldest stage that the role is not done with.
    #[track_caller]
    pub fn own(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        self.tile(self.own, self.ring.cursor("take")[0].now())
    }

    /// Waits for the peer's tile of the oldest stage that the role is not done with, and returns it.
    #[track_caller]
    pub fn wait(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        let [stage, _] = self.ring.wait_full();
        self.tile(self.other, stage.now())
    }

    /// Gives back the oldest stage: the role no longer reads it.
    #[track_caller]
    pub fn done(&self, w: &Scope<'k, Group>) {
        self.ring.give_back(w, "take");
    }
}
