//! Zero-fills global memory with TMA: one thread starts the copies and continues, without registers or
//! stores for the data.

use crate::build::{Builder, Pointer, Scope, Thread, Val};
use crate::inst::{Arg, Base};
use crate::table::{bytes, memory};
use std::panic::Location;

/// A run of zeros in shared memory, which TMA writes to global memory any number of times.
pub struct Zeros<'k> {
    k: &'k Builder,
    first: u32,
    count: u32,
}

/// Bytes that one instruction writes.
const UNIT: u32 = 16;

impl Builder {
    /// Reserves shared memory for `count` zeros, a multiple of four.
    #[track_caller]
    pub fn zeros(&self, name: &str, count: u32) -> Zeros<'_> {
        if !count.is_multiple_of(UNIT / 4) {
            self.refuse(format!("`{name}` has {count} zeros, allowed: multiples of 4"));
        }
        Zeros { k: self, first: self.take_small(name, 4 * count, UNIT), count }
    }
}

impl<'k> Zeros<'k> {
    /// Writes the zeros to shared memory. The thread that copies them must do this first.
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

    /// Starts copying the zeros `times` times to consecutive addresses, as one group of stores.
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
