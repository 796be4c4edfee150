//! Pairs of CTAs whose tensor cores work on one product. Each CTA holds half of the rows of A and of the accumulators, and
//! half of the columns of B, so that each loads and reads B once for twice as many rows.
//!
//! The leader, which has the even rank, starts all products. Copies of both CTAs count their bytes on its mbarriers, commits
//! signal both CTAs, and the warps of both CTAs answer to the leader. The rings of a pair contain all of that: a role
//! fills, waits for and gives back stages as it would alone.

use crate::build::{Builder, Count, Scope, Val, WholeWarps};
use crate::inst::{Arg, Base, Class};
use crate::product::TileShape;
use crate::sync::pipe::{Pipe, wait_phase};
use crate::sync::tensor_ring::{RingShape, TensorRing};
use crate::table::{convert, mbarrier, memory, tcgen05};
use crate::tcgen05::CtaGroup;
use crate::tensor_memory::TensorTile;

/// CTAs of the clusters that the language pairs.
const CTAS: u32 = 2;

/// Rank of the CTA that starts the pair's products.
const LEADER: u32 = 0;

/// The two CTAs of a cluster as a pair.
#[derive(Clone, Copy)]
pub struct CtaPair<'k> {
    k: &'k Builder,
}

impl Builder {
    /// The pair of CTAs that share products. The kernel must be launched in [clusters](Self::cluster) of two CTAs, and
    /// all its tensor memory belongs to the pair.
    #[track_caller]
    pub fn cta_pair(&self) -> CtaPair<'_> {
        let ctas = self.cluster_blocks();
        if ctas != CTAS {
            self.refuse(format!("a pair of CTAs in clusters of {ctas}, allowed: {CTAS}; call `cluster({CTAS})` first"));
        }
        self.owns_tensor_memory(CtaGroup::Pair);
        if self.handshake.get().is_none() {
            self.handshake.set(Some(self.mbarriers("tensor memory.freed", 1, Count::Fixed(1))));
        }
        CtaPair { k: self }
    }

    /// Tells the peer that this CTA no longer accesses tensor memory, and waits for the same from the peer.
    #[track_caller]
    pub(crate) fn shake_hands<W: WholeWarps>(&self, w: &Scope<'_, W>, handshake: u32) {
        let own = self.shared_address(handshake);
        let peer: Val<'_, u32> = own.compute(&memory::MAPA, &[(w.cluster_rank() ^ 1).arg()]);
        w.when(w.lane().lt(1), |_| {
            self.emit(&mbarrier::ARRIVE_PEER, [Arg::Address(Base::Reg(peer.in_register()), 0)]);
        });
        w.sync_warp();
        wait_phase(self, own, own.literal(0));
        self.emit(&tcgen05::FENCE, [Arg::Word("after")]);
    }
}

impl<'k> CtaPair<'k> {
    /// Runs `f` in the CTA that starts the pair's products.
    #[track_caller]
    pub fn lead<W: WholeWarps>(&self, w: &Scope<'k, W>, f: impl FnOnce(&Scope<'k, W>)) {
        w.when(w.cluster_rank().eq(LEADER), f);
    }

    /// A ring of `depth` stages, each with one tile of each shape in each CTA. Each CTA loads its own tiles, and a stage
    /// is full when those of both have come. The leader's products empty it.
    #[track_caller]
    pub fn pipe(&self, name: &str, depth: u32, tiles: &[TileShape]) -> Pipe<'k> {
        self.k.pipe_of_pair(name, depth, tiles)
    }

    /// `rings` rings of `depth` tiles of accumulators with `cols` columns and 128 rows in each CTA.
    #[track_caller]
    pub fn tensor_ring(&self, name: &str, rings: u32, depth: u32, cols: u32) -> TensorRing<'k> {
        self.k.tensor_rings(name, RingShape { rings, depth, cols, parts: 1 }, CtaGroup::Pair)
    }

    /// Columns of tensor memory for `count` tiles of accumulators with `cols` columns and 128 rows in each CTA; the first
    /// tile.
    #[track_caller]
    pub fn tensor_accumulators(&self, count: u32, cols: u32) -> TensorTile<'k> {
        self.k.accumulators_of("accumulators", count, cols, CtaGroup::Pair)
    }
}

/// The address of an mbarrier in the leader of a pair.
#[track_caller]
pub(super) fn of_leader<'k>(barrier: Val<'k, u32>) -> Val<'k, u32> {
    barrier.compute(&memory::MAPA, &[Arg::Imm(LEADER.into())])
}

/// Whether the CTA is the leader of its pair.
#[track_caller]
pub(super) fn leads<'k, W: crate::build::Who>(w: &Scope<'k, W>) -> Val<'k, bool> {
    w.cluster_rank().eq(LEADER)
}

/// Signals an mbarrier when all products of the thread are complete, and with `both` its twin in the other CTA of the pair.
#[track_caller]
pub(super) fn commit<'k>(k: &'k Builder, barrier: Val<'k, u32>, both: bool) {
    let (group, place) = (k.tensor_group(), Arg::Address(Base::Reg(barrier.in_register()), 0));
    let word = Arg::Word(group.word());
    if !both {
        return k.emit(&tcgen05::COMMIT, [place, word]);
    }
    let mask = k.register(Class::B16);
    k.emit(&convert::MOV_16, [Arg::Reg(mask), Arg::Imm((1 << CTAS) - 1)]);
    k.emit(&tcgen05::COMMIT_MULTICAST, [place, Arg::Reg(mask), word]);
}
