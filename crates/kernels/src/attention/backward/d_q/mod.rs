//! Services around the accumulation of d_q.
//!
//! A CTA of the main kernel adds the d_q of every step to f32 sums in global memory. The services decide which unit
//! adds, when, and what happens before and after:
//! - `zero_fill` writes zeros where no tile adds yet,
//! - `bulk_reduce` has TMA add,
//! - `ordered` makes tiles take turns (deterministic mode), in three ways that depend on the unit that adds,
//! - `round` converts d_q to 16 bits and lets pairs of head and sequence share the memory of sums,
//! - `split_tiles` splits the last tiles,
//! - [`exact`] sums gradients of auxiliary tensors in integers.
//!
//! Each one-thread job has a warp of the load role. Warp 0 loads tiles; with CTA pairs, warps 1 and 2 also load. Two services
//! share a warp only if one is declared to come after the other ends.
//!
//! | service | thread | waits for | signals |
//! |---|---|---|---|
//! | bulk_reduce | load, warp 2 | d_q written | buffer free |
//! | bulk_reduce | load, warp 3 | d_q written | buffer free |
//! | bulk_reduce | compute | buffer free | d_q written |
//! | exact | compute |  |  |
//! | load | load, warp 0 | tile found | tile loaded |
//! | load | load, warp 1 | tile found | tile loaded |
//! | load | load, warp 2 | tile loaded | tile found |
//! | load | load, warp 3 | tile found | tile loaded |
//! | ordered (bulk) | load, warp 0 | message free | step posted |
//! | ordered (bulk) | load, warp 2 | step posted, tile before has added | message free, tile before has added |
//! | ordered (bulk) | load, warp 3 | step posted, tile before has added | message free, tile before has added |
//! | ordered (pairs) | load, warp 3 | step added, tile before has added | tile before has added, turn has come |
//! | ordered (pairs) | compute | turn has come | step added |
//! | ordered (threads) | load, warp 0 | message free | step posted |
//! | ordered (threads) | load, warp 1 | step posted, tile before has added | turn has come |
//! | ordered (threads) | load, warp 2 | step added | message free, tile before has added |
//! | ordered (threads) | compute | turn has come | step added |
//! | round | load, warp 0 | message free, sums free | tile posted |
//! | round | load, warp 1 | additions arrived, part converted, tile posted | message free, part summed, sums free |
//! | round | load, warp 2 |  | additions arrived |
//! | round | load, warp 3 |  | additions arrived |
//! | round | compute | additions arrived, part summed | part converted |
//! | split_tiles | compute | steps before summed | steps before summed |
//! | zero_fill | load, warp 0 | zeros written |  |
//! | zero_fill | load, warp 1 |  | zeros written |
//!
//! The rows of `load` are those of CTA pairs, where one thread finds tiles for the others. A test compares the table with the
//! waits and signals of the kernels' code. Events within a CTA are mbarriers of a ring. Events between CTAs are words in
//! global memory: `zeros written`, `sums free` and `additions arrived` of `round`, `tile before has added`, and `steps before
//! summed`.
//!
//! Nothing waits in a circle. A tile waits only for tiles with lower numbers (`plan::bands`, `plan::deal`). The part of d_q that
//! comes with a tile is converted after that tile, so it may wait for that tile too. A CTA does its tiles in the order of their
//! numbers, and every number belongs to a CTA that runs. So the lowest number that is not done can go on.

pub(crate) mod bulk_reduce;
pub mod exact;
pub(crate) mod ordered;
pub(crate) mod round;
pub(crate) mod service;
pub(crate) mod split_tiles;
pub(crate) mod zero_fill;

use crate::attention::backward::tiles::{TileMap, Work};
use bulk_reduce::BulkReduce;
use fulgurite_ptx::{Group, Pointer, Scope, Val};
use ordered::Ordered;
use round::Round;
use service::{Log, Service};
use split_tiles::SplitTiles;
use std::rc::Rc;
use zero_fill::ZeroFill;

/// The sums of d_q, and the services that a kernel has.
pub(crate) struct Services<'k> {
    /// f32 sums of d_q.
    pub sums: Pointer<'k, f32>,
    pub zero_fill: Option<ZeroFill<'k>>,
    pub round: Option<Rc<Round<'k>>>,
    pub split: Option<Rc<SplitTiles<'k>>>,
    pub ordered: Option<Rc<Ordered<'k>>>,
    pub bulk: Option<BulkReduce<'k>>,
    pub log: Rc<Log>,
}

impl<'k> Services<'k> {
    /// All services, in the order in which the load thread calls them.
    pub fn all(&self) -> Vec<&dyn Service<'k>> {
        let ordered = self.ordered.as_deref().map(|service| service as &dyn Service<'k>);
        let round = self.round.as_deref().map(|service| service as &dyn Service<'k>);
        let zero_fill = self.zero_fill.as_ref().map(|service| service as &dyn Service<'k>);
        let split = self.split.as_deref().map(|service| service as &dyn Service<'k>);
        let bulk = self.bulk.as_ref().map(|service| service as &dyn Service<'k>);
        [ordered, round, zero_fill, split, bulk].into_iter().flatten().collect()
    }

    /// Whether a tile may wait for tiles with lower numbers.
    pub fn wait_for_tiles(&self) -> bool {
        self.all().iter().any(|service| service.waits_for_tiles())
    }

    /// Compute role: before threads add the d_q of a step.
    #[track_caller]
    pub fn before_add(&self, w: &Scope<'k, Group>) {
        self.all().iter().for_each(|service| service.before_add(w));
    }

    /// Compute role: after threads have added the d_q of a step.
    #[track_caller]
    pub fn after_add(&self, w: &Scope<'k, Group>) {
        self.all().iter().for_each(|service| service.after_add(w));
    }

    /// Steps of sums before those of a tile's first query head.
    #[track_caller]
    pub fn sums_before(&self, map: &TileMap<'k>, work: &Work<'k>) -> Val<'k, u32> {
        match &self.round {
            Some(round) => round.slot(map.pair(work)) * map.most_heads() * map.steps,
            None => map.steps_before(work),
        }
    }
}

#[cfg(test)]
mod tests;
