//! Zeros where d_q will be summed, written while the first tiles run.
//!
//! The sums of the first pairs of head and sequence are zero before the main kernel begins. Those of the others are nobody's
//! until its first tiles are done, and the copy engine has little to write until then: a thread of each block has it zero one
//! part after the other, as long as there are some that nobody has taken. So no block waits for one that has not begun.

use crate::attention::backward::d_q::given;
use crate::attention::backward::main::Call;
use crate::attention::backward::main::Main;
use crate::params::Params;
use fulgurite_ptx::{Group, Scope, Thread, Val, Zeros};

/// Zeros that are copied at once; the sums of a step are a multiple of them.
pub(crate) const ZEROS: u32 = 128;
/// Copies of a part.
const PART: u32 = 64;
/// Words of the counters: parts that were taken, and those that are zero.
const TAKEN: u32 = 1;
const DONE: u32 = 2;

/// Arguments of [`Clearing`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    /// The first pair whose sums are not zero before.
    pub pair: u32,
    /// Where its sums begin, and how much there is from there on, in copies of [`ZEROS`].
    pub first: u32,
    pub count: u32,
}

/// What of the sums is zeroed.
pub(crate) struct Clearing<'k> {
    zeros: Zeros<'k>,
    /// The first pair whose sums are not zero before.
    pair: Val<'k, u32>,
    /// Where its sums begin, and how much there is from there on, in copies.
    first: Val<'k, u32>,
    count: Val<'k, u32>,
}

impl<'k> Clearing<'k> {
    /// Declares the parameters.
    pub fn declare(p: &Params<'k, Call>) -> Self {
        let pair = p.u32("zeroed", |call| given(&call.zero_fill).pair);
        let first = p.u32("first_cleared", |call| given(&call.zero_fill).first);
        let count = p.u32("cleared", |call| given(&call.zero_fill).count);
        Clearing { zeros: p.builder().zeros("zeros", ZEROS), pair, first, count }
    }

    /// The thread that loads a tile: it may be added to the sums of its pair.
    pub fn wait(&self, t: &Scope<'k, Thread>, main: &Main<'k>, pair: Val<'k, u32>) {
        t.when(pair.ge(self.pair), |t| main.counters.wait_for(t, DONE, (self.count + (PART - 1)) / PART));
    }

    /// The thread that has the copy engine write.
    pub fn keep(&self, w: &Scope<'k, Group>, main: &Main<'k>) {
        w.one_thread_of_warp(1, |t| {
            self.zeros.write(t);
            t.repeat(|t, leave| {
                let start = main.counters.fetch_add(t, TAKEN, 1) * PART;
                leave.when(start.ge(self.count));
                let to = main.sums.at_wide((self.first + start).mul_wide(ZEROS));
                self.zeros.copy(t, to, (self.count - start).min(PART));
                t.wait_stores(0);
                // Whoever is told of it may have the copy engine add.
                t.publish_global();
                main.counters.fetch_add_in_order(t, DONE, 1);
            });
        });
    }
}
