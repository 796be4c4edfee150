//! Tiles that the two blocks of a cluster give each other: a role writes its own, the copy engine brings it to the other
//! block, and the role of either reads both.
//!
//! A place is written again when all warps of both blocks are done with it: then it has also been copied.

use crate::build::{Builder, Count, Group, Scope, Thread, Val};
use crate::inst::{Arg, Base, Class};
use crate::product::TileShape;
use crate::sync::pipe::{Ring, wait_phase};
use crate::table::{bytes, mbarrier, memory};
use crate::tile::Tile;
use std::panic::Location;

/// Blocks that exchange tiles.
const BLOCKS: u32 = 2;

/// A ring of places for two tiles, the block's own and the other's.
pub struct PeerTiles<'k> {
    ring: Ring<'k>,
    shape: TileShape,
    /// Where the first of the own tiles begins, and of the other's.
    own: u32,
    other: u32,
}

/// Numbers that one thread of the first block tells one of the second.
pub struct ClusterBroadcast<'k> {
    k: &'k Builder,
    id: usize,
    words: u32,
    full: u32,
    /// In the first block: what it told was heard.
    heard: u32,
}

/// Numbers on their way.
const WORDS: u32 = 4;

impl Builder {
    /// For one number after the other, in a kernel that is launched in [clusters](Self::cluster) of two blocks.
    #[track_caller]
    pub fn told(&self, name: &str) -> ClusterBroadcast<'_> {
        let id = self.new_pipe(name, 1);
        self.pipe_filled(id);
        let words = self.take_small(name, 4 * WORDS, 16);
        let [full, heard] = ["full", "heard"].map(|of| self.mbarriers(&format!("{name}.{of}"), WORDS, Count::Fixed(1)));
        ClusterBroadcast { k: self, id, words, full, heard }
    }

    /// A ring of `depth` places in a kernel that is launched in [clusters](Self::cluster) of two blocks.
    #[track_caller]
    pub fn exchange(&self, name: &str, depth: u32, shape: TileShape) -> PeerTiles<'_> {
        let (blocks, bytes) = (self.cluster_blocks(), shape.bytes());
        if blocks != BLOCKS {
            self.refuse(format!("exchange `{name}` in clusters of {blocks} blocks, allowed: {BLOCKS}"));
        }
        if !bytes.is_multiple_of(shape.swizzle.period()) {
            let period = shape.swizzle.period();
            self.refuse(format!("exchange `{name}` of tiles of {bytes} bytes, allowed: multiples of {period}"));
        }
        let tiles = |name: &str| self.take_shared(name, depth * bytes, shape.swizzle.period());
        let (own, other) = (tiles(name), tiles(&format!("{name}.other")));
        PeerTiles { ring: Ring::new(self, name, depth, BLOCKS), shape, own, other }
    }
}

impl<'k> ClusterBroadcast<'k> {
    /// The first block's number, in both.
    #[track_caller]
    pub fn share(&self, t: &Scope<'k, Thread>, x: Val<'k, u32>) -> Val<'k, u32> {
        self.k.pipe_emptied(self.id);
        let (number, told) = (self.k.cursor(self.id, "told", [0, 0])[0], t.var(x));
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
                // A fresh barrier's phase of parity 1 counts as over.
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
                told.set(Val::<u32>::reg(t.k, x));
                t.k.emit(&mbarrier::ARRIVE_CLUSTER, [place(in_block(t, heard, 0))]);
            };
            t.choose(t.cluster_rank().eq(0), tell, hear);
            number.set(number.now() + 1);
        });
        told.get()
    }
}

impl<'k> PeerTiles<'k> {
    pub(crate) fn ring(&self) -> &Ring<'k> {
        &self.ring
    }

    /// One of the tiles that begin at `first`.
    #[track_caller]
    fn tile(&self, first: u32, stage: Val<'k, u32>) -> Tile<'k> {
        Tile::at(self.shape, self.ring.k.shared_address(first)).nth(stage)
    }

    /// Waits until nobody reads the next place any more, and returns its own tile, for the role to write.
    #[track_caller]
    pub fn open(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        let [stage, _] = self.ring.wait_empty();
        self.tile(self.own, stage.now())
    }

    /// Sends the tile that was opened, and goes on. All threads of the role have written, published and met.
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
                // For what the other block sends here, which may come before.
                w.k.emit(&mbarrier::ARRIVE_EXPECT, [place(full), Arg::Imm(self.shape.bytes().into())]);
                let [own, other] = [self.own, self.other].map(|first| self.tile(first, stage).address());
                let copy = [place(there(other)), place(own), bytes.arg(), place(there(full))];
                w.k.emit(&bytes::COPY_TO_PEER, copy);
            });
        });
        self.ring.advance(cursor);
    }

    /// The own tile of the oldest place that the role is not done with.
    #[track_caller]
    pub fn own(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        self.tile(self.own, self.ring.cursor("take")[0].now())
    }

    /// Waits for the tile that the other block has sent for the oldest place that the role is not done with.
    #[track_caller]
    pub fn wait(&self, _: &Scope<'k, Group>) -> Tile<'k> {
        let [stage, _] = self.ring.wait_full();
        self.tile(self.other, stage.now())
    }

    /// Nothing of the oldest place is read any more.
    #[track_caller]
    pub fn done(&self, w: &Scope<'k, Group>) {
        self.ring.give_back(w, "take");
    }
}
