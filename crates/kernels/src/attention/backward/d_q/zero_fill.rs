//! Zeros for the sums of d_q, written while the first tiles run.
//!
//! The prepare kernel zeroes the sums of the first pairs of head and sequence. No tile needs the other sums before the first
//! tiles are done, and until then TMA has little to write. So one thread of each CTA has it write zeros, part by
//! part. CTAs take parts from a counter: no CTA waits for one that has not started.

use crate::attention::backward::d_q::service::{Flags, Job, Log, Service};
use crate::attention::backward::tiles::{TileMap, Work};
use crate::params::{Lens, Params, given};
use fulgurite_ptx::{Pointer, Scope, Thread, Val, Var, Zeros};
use std::rc::Rc;

pub(crate) const NAME: &str = "zero_fill";

/// f32 zeros of one copy. The sums of a step are a multiple of them.
pub(crate) const ZEROS: u32 = 128;
/// Copies of a part.
const PART: u32 = 64;
/// Words of the counters: parts taken, and parts zeroed.
const TAKEN: u32 = 1;
const DONE: u32 = 2;

/// Arguments of [`ZeroFill`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    /// The first pair whose sums the prepare kernel does not zero.
    pub pair: u32,
    /// Start of its sums; `count`: number of sums from there on. Both in copies of [`ZEROS`].
    pub first: u32,
    pub count: u32,
}

/// The zero fill. Fields are those of [`Args`].
pub(crate) struct ZeroFill<'k> {
    zeros: Zeros<'k>,
    counters: Pointer<'k, u32>,
    done: Flags<'k>,
    sums: Pointer<'k, f32>,
    pair: Val<'k, u32>,
    first: Val<'k, u32>,
    count: Val<'k, u32>,
}

impl<'k> ZeroFill<'k> {
    /// Declares parameters and shared memory.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        args: impl Lens<C, Option<Args>>,
        (sums, counters): (Pointer<'k, f32>, Pointer<'k, u32>),
        log: &Rc<Log>,
    ) -> Self {
        ZeroFill {
            pair: p.u32("zeroed", move |call| given(args(call)).pair),
            first: p.u32("first_cleared", move |call| given(args(call)).first),
            count: p.u32("cleared", move |call| given(args(call)).count),
            zeros: p.builder().zeros("zeros", ZEROS),
            counters,
            done: Flags::new(counters, NAME, "zeros written", log),
            sums,
        }
    }
}

impl<'k> Service<'k> for ZeroFill<'k> {
    fn jobs(&self) -> Vec<Job> {
        vec![Job::new(NAME, 1)]
    }

    fn on_tile(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, _: Var<'k, u32>, work: &Work<'k>) {
        let pair = map.pair(work);
        t.when(pair.ge(self.pair), |t| self.done.wait_for(t, DONE, (self.count + (PART - 1)) / PART));
    }

    fn on_warp(&self, t: &Scope<'k, Thread>, _: &TileMap<'k>, _: u32) {
        self.zeros.write(t);
        t.repeat(|t, leave| {
            let start = self.counters.fetch_add(t, TAKEN, 1) * PART;
            leave.when(start.ge(self.count));
            let to = self.sums.at_wide((self.first + start).mul_wide(ZEROS));
            self.zeros.copy(t, to, (self.count - start).min(PART));
            t.wait_stores(0);
            // A thread that sees the signal may have TMA add.
            t.publish_global();
            self.done.add(t, DONE, 1);
        });
    }
}
