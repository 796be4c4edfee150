//! Passes accumulators from a warpgroup of one role to a warpgroup of another. Each thread passes its elements to the
//! thread with the same position in the other warpgroup.

use crate::accumulators::Acc;
use crate::build::{Builder, Count, Group, Scope, Val};
use crate::inst::{Arg, Base, Class, Reg};
use crate::sync::cluster::PeerTiles;
use crate::sync::pipe::Ring;
use crate::table::{mbarrier, memory};
use std::panic::Location;

/// A one-stage channel for accumulators between two roles of one warpgroup each.
pub struct AccumulatorChannel<'k> {
    ring: Ring<'k>,
    /// The receiver's view of `ring`; it may share its cursor with another ring.
    taken: Ring<'k>,
    /// Shared-memory offset of the data, `[four][thread][4]` f32.
    first: u32,
}

/// Warps of a warpgroup.
const WARPS: u32 = 4;
/// Bytes of one four-element vector for each thread of a warpgroup.
const FOURS: u32 = 2048;

impl Builder {
    /// A channel for accumulators of 64 rows and `cols` columns.
    #[track_caller]
    pub fn accumulator_channel(&self, name: &str, cols: u32) -> AccumulatorChannel<'_> {
        let first = self.take_shared(name, 64 * cols * 4, 16);
        let ring = Ring::filled_by(self, name, 1, 1, Count::Fixed(WARPS));
        AccumulatorChannel { ring, taken: ring, first }
    }
}

impl<'k> AccumulatorChannel<'k> {
    /// Shares the receiver's cursor with a one-stage `leader`, which saves registers. In each step the receiver must be
    /// done with this channel first, then with the leader, before it takes the next step.
    #[track_caller]
    pub fn taken_with(self, leader: &PeerTiles<'k>) -> Self {
        AccumulatorChannel { taken: self.ring.in_step(leader.ring()), ..self }
    }

    #[track_caller]
    fn own(&self, w: &Scope<'k, Group>) -> Reg {
        w.thread_in_group().mul_add(16, self.ring.k.shared_address(self.first)).in_register()
    }

    /// Waits until the channel is empty, then writes the accumulators to it.
    #[track_caller]
    pub fn give(&self, w: &Scope<'k, Group>, acc: &Acc<'k>) {
        let (cursor, k) = (self.ring.wait_empty(), self.ring.k);
        let own = self.own(w);
        let registers = || acc.elements().map(|x| x.in_register()).collect::<Vec<Reg>>();
        let regs = k.placed(Location::caller(), registers);
        for (i, four) in regs.chunks_exact(4).enumerate() {
            let place = Arg::Address(Base::Reg(own), (i as u32 * FOURS) as i32);
            k.emit(&memory::ST_SHARED_F32, [place, Arg::List(four.into()), Arg::Word(".v4")]);
        }
        w.sync_warp();
        let full = self.ring.barrier(self.ring.full, cursor[0].now());
        let (first, at) = (w.lane().eq(0), Location::caller());
        w.when(first, |_| {
            k.placed(at, || k.emit(&mbarrier::ARRIVE, [Arg::Address(Base::Reg(full.in_register()), 0)]));
        });
        self.ring.advance(cursor);
    }

    /// Waits until the channel is full.
    #[track_caller]
    pub fn wait(&self, _: &Scope<'k, Group>) {
        self.taken.wait_full();
    }

    /// The thread's four elements of columns `8 * eight .. 8 * eight + 8`, after [`wait`](Self::wait).
    #[track_caller]
    pub fn four(&self, w: &Scope<'k, Group>, eight: u32) -> [Val<'k, f32>; 4] {
        let (own, k) = (self.own(w), self.ring.k);
        let regs: [Reg; 4] = std::array::from_fn(|_| k.register(Class::F32));
        let place = Arg::Address(Base::Reg(own), (eight * FOURS) as i32);
        k.emit(&memory::LD_SHARED_F32, [Arg::List(regs.into()), place, Arg::Word(".v4")]);
        regs.map(|reg| Val::reg(k, reg))
    }

    /// Marks the channel as empty: the receiver has read everything.
    #[track_caller]
    pub fn done(&self, w: &Scope<'k, Group>) {
        self.taken.give_back(w, "take");
    }
}
