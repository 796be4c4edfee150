//! A signal that all warps of one role give once and other roles wait for.

use crate::build::{Builder, Count, Scope, WholeWarps};
use crate::inst::{Arg, Base};
use crate::sync::pipe::wait_phase;
use crate::table::mbarrier;
use std::panic::Location;

/// A gate that opens once, when every warp of a role has opened it.
pub struct Gate<'k> {
    k: &'k Builder,
    /// Shared-memory offset of the mbarrier.
    bar: u32,
}

impl Builder {
    /// A gate that opens when each of `warps` warps has opened it.
    #[track_caller]
    pub fn gate(&self, name: &str, warps: u32) -> Gate<'_> {
        Gate { k: self, bar: self.mbarriers(name, 1, Count::Fixed(warps)) }
    }
}

impl<'k> Gate<'k> {
    /// The warp opens its part of the gate.
    #[track_caller]
    pub fn open<W: WholeWarps>(&self, w: &Scope<'k, W>) {
        let at = Location::caller();
        w.sync_warp();
        w.when(w.lane().lt(1), |_| {
            self.k.placed(at, || {
                let bar = self.k.shared_address(self.bar).in_register();
                self.k.emit(&mbarrier::ARRIVE, [Arg::Address(Base::Reg(bar), 0)]);
            });
        });
    }

    /// Waits until the gate is open.
    #[track_caller]
    pub fn pass<W: WholeWarps>(&self, w: &Scope<'k, W>) {
        wait_phase(self.k, self.k.shared_address(self.bar), w.constant(0));
    }
}
