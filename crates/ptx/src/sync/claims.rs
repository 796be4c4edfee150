//! Work that a running CTA takes from CTAs which have not started: the scheduler of the hardware as a ring of one answer.

use crate::build::{Builder, Scope, Thread, Val, WholeWarps};
use crate::inst::{Arg, Base};
use crate::sync::pipe::Ring;
use crate::table::{launch, mbarrier, sync};

/// Bytes of an answer.
const BYTES: u32 = 16;

/// Requests for the work of CTAs that have not started. One thread asks, and every warp of every role that works takes each
/// answer. After an answer without work, nobody may ask again.
pub struct Claims<'k> {
    ring: Ring<'k>,
    answer: u32,
}

impl Builder {
    /// Requests for work. The grid has one CTA for each piece of it, and the kernel no clusters.
    #[track_caller]
    pub fn claims(&self, name: &str) -> Claims<'_> {
        let ctas = self.cluster_blocks();
        if ctas != 1 {
            self.refuse(format!("claims `{name}` in clusters of {ctas} CTAs, allowed: 1"));
        }
        let answer = self.take_small(name, BYTES, BYTES);
        Claims { ring: Ring::new(self, name, 1, 1), answer }
    }
}

impl<'k> Claims<'k> {
    #[track_caller]
    fn place(&self) -> Arg {
        Arg::Address(Base::Reg(self.ring.k.shared_address(self.answer).in_register()), 0)
    }

    /// Asks for the work of a CTA that has not started, when all warps have taken the last answer.
    #[track_caller]
    pub fn ask(&self, _: &Scope<'k, Thread>) {
        let (ring, cursor) = (&self.ring, self.ring.wait_empty());
        let full = Arg::Address(Base::Reg(ring.barrier(ring.full, cursor[0].now()).in_register()), 0);
        // Threads have read the last answer, and the hardware writes the next one by another path.
        ring.k.emit(&sync::FENCE_PROXY, [Arg::Word(".shared::cta")]);
        ring.k.emit(&mbarrier::ARRIVE_EXPECT, [full.clone(), Arg::Imm(BYTES.into())]);
        ring.k.emit(&launch::TRY_CANCEL, [self.place(), full]);
        ring.advance(cursor);
    }

    /// Waits for the answer: whether there is work, and the index of the CTA that would have done it.
    #[track_caller]
    pub fn take<W: WholeWarps>(&self, w: &Scope<'k, W>) -> (Val<'k, bool>, Val<'k, u32>) {
        self.ring.wait_full();
        let (more, found) = Val::fresh(self.ring.k);
        let (first, cta) = Val::fresh(self.ring.k);
        self.ring.k.emit(&launch::QUERY_CANCEL, [more, first, self.place()]);
        self.ring.give_back(w, "take");
        (found, cta)
    }
}
