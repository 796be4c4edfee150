//! Zeros that the copy engine writes: a thread starts them and goes on, and nobody's registers or stores are in the way.

use crate::build::{Builder, Pointer, Scope, Thread, Val};
use crate::inst::{Arg, Base};
use crate::table::{bytes, memory};
use std::panic::Location;

/// A few zeros in shared memory, from which any number of them are copied to global memory.
pub struct Zeros<'k> {
    k: &'k Builder,
    first: u32,
    count: u32,
}

/// Bytes that one instruction writes.
const UNIT: u32 = 16;

impl Builder {
    /// Room for `count` zeros, a multiple of four.
    #[track_caller]
    pub fn zeros(&self, name: &str, count: u32) -> Zeros<'_> {
        if !count.is_multiple_of(UNIT / 4) {
            self.refuse(format!("`{name}` has {count} zeros, allowed: multiples of 4"));
        }
        Zeros { k: self, first: self.take_small(name, 4 * count, UNIT), count }
    }
}

impl<'k> Zeros<'k> {
    /// The thread that will have them copied writes them, before that.
    #[track_caller]
    pub fn write(&self, t: &Scope<'k, Thread>) {
        let (zero, at) = (t.constant(0.0f32), Location::caller());
        t.each(0, self.count / 4, 1, |t, four| {
            self.k.placed(at, || {
                let place = four.mul_add(UNIT, self.k.shared_address(self.first)).in_register();
                let zeros = Arg::List([zero.in_register(); 4].into());
                t.k.emit(&memory::ST_SHARED_F32, [Arg::Address(Base::Reg(place), 0), zeros, Arg::Word(".v4")]);
            });
        });
        t.publish_shared();
    }

    /// Starts to copy them so many times, one after the other, as a group of stores.
    #[track_caller]
    pub fn copy(&self, t: &Scope<'k, Thread>, to: Pointer<'k, f32>, times: Val<'k, u32>) {
        let at = Location::caller();
        t.each(0, times, 1, |t, time| {
            self.k.placed(at, || {
                let to = to.at(time * self.count).address().in_register();
                let from = self.k.shared_address(self.first).in_register();
                let [to, from] = [to, from].map(|reg| Arg::Address(Base::Reg(reg), 0));
                t.k.emit(&bytes::STORE_BYTES, [to, from, Arg::Imm(u64::from(4 * self.count))]);
            });
        });
        t.commit_stores();
    }
}
