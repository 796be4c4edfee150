//! Accumulators that a warpgroup of one role gives a warpgroup of another: every thread to the one that has the same elements.

use crate::build::{Builder, Count, Group, Scope, Val};
use crate::inst::{Arg, Base, Class, Reg};
use crate::sync::cluster::PeerTiles;
use crate::sync::pipe::Ring;
use crate::table::{mbarrier, memory};
use crate::tile::Acc;
use std::panic::Location;

/// A place for accumulators between two roles of one warpgroup each.
pub struct AccumulatorChannel<'k> {
    ring: Ring<'k>,
    /// The same for the role that takes.
    taken: Ring<'k>,
    /// Where they lie, `[four][thread][4]`.
    first: u32,
}

/// Warps of a warpgroup.
const WARPS: u32 = 4;
/// Bytes of fours of all its threads.
const FOURS: u32 = 2048;

impl Builder {
    /// A place for accumulators of 64 rows and so many columns.
    #[track_caller]
    pub fn handover(&self, name: &str, cols: u32) -> AccumulatorChannel<'_> {
        let first = self.take_shared(name, 64 * cols * 4, 16);
        let ring = Ring::filled_by(self, name, 1, 1, Count::Fixed(WARPS));
        AccumulatorChannel { ring, taken: ring, first }
    }
}

impl<'k> AccumulatorChannel<'k> {
    /// The role that takes moves with an exchange of one place: of either it is done with one, first of this, before it takes
    /// the next.
    #[track_caller]
    pub fn taken_with(self, leader: &PeerTiles<'k>) -> Self {
        AccumulatorChannel { taken: self.ring.in_step(leader.ring()), ..self }
    }

    #[track_caller]
    fn own(&self, w: &Scope<'k, Group>) -> Reg {
        w.thread_in_group().mul_add(16, self.ring.k.shared_address(self.first)).in_register()
    }

    /// Waits until the place is free, and gives.
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

    /// Waits for what was given.
    #[track_caller]
    pub fn wait(&self, _: &Scope<'k, Group>) {
        self.taken.wait_full();
    }

    /// Of what was waited for, the thread's four elements of the `eight`-th eight columns.
    #[track_caller]
    pub fn four(&self, w: &Scope<'k, Group>, eight: u32) -> [Val<'k, f32>; 4] {
        let (own, k) = (self.own(w), self.ring.k);
        let regs: [Reg; 4] = std::array::from_fn(|_| k.register(Class::F32));
        let place = Arg::Address(Base::Reg(own), (eight * FOURS) as i32);
        k.emit(&memory::LD_SHARED_F32, [Arg::List(regs.into()), place, Arg::Word(".v4")]);
        regs.map(|reg| Val::reg(k, reg))
    }

    /// It is not read any more.
    #[track_caller]
    pub fn done(&self, w: &Scope<'k, Group>) {
        self.taken.give_back(w, "take");
    }
}
