//! Schedules: how warpgroups share the work of a key tile. All schedules compute the same gradients; they differ in
//! which warpgroup owns which rows and columns.
//!
//! A tile has the same outline in each of them ([`run`]): start it, go from step to step, finish it. A schedule says which
//! products it starts and waits for in between; its header has the order of a step.

pub(crate) mod bulk;
pub(crate) mod columns;
pub(crate) mod keys;
pub(crate) mod pairs;
pub(crate) mod roles;

use crate::attention::backward::state::Main;
use crate::attention::backward::tiles::{Of, Work};
use crate::attention::backward::walk::{StepWalk, store_results};
use fulgurite_ptx::{Acc, Group, GroupBarrier, Half, Pair, RoleBarrier, Scope, Tile, Val, Word};

/// The operations of a warpgroup on a tile.
pub(crate) trait Schedule<'k> {
    fn main(&self) -> &Main<'k>;

    /// The warpgroup's place among the steps of its tile.
    fn walk(&self) -> &StepWalk<'_, 'k>;

    /// Starts a tile: waits for its keys and values, and starts the first products.
    fn start(&self, w: &Scope<'k, Group>, work: &Work<'k>);

    /// The part of a step that every step has.
    fn step(&self, _: &Scope<'k, Group>) {}

    /// The rest of a step that another step follows, up to the first products of that step.
    fn advance(&self, w: &Scope<'k, Group>);

    /// The rest of the last step, and the results.
    fn finish(&self, w: &Scope<'k, Group>);
}

/// Runs a schedule for every tile of the CTA.
pub(crate) fn run<'k>(w: &Scope<'k, Group>, schedule: &impl Schedule<'k>) {
    let main = schedule.main();
    w.repeat(|w, leave| {
        let work = main.map.read(&main.stages.tickets.wait(w));
        leave.when(work.steps[1].eq(0));
        schedule.start(w, &work);
        w.repeat(|w, leave| {
            schedule.step(w);
            // Before products whose results are read in the loop: the assembler serialises them otherwise (C7514).
            leave.when(schedule.walk().last());
            schedule.advance(w);
        });
        schedule.finish(w);
    });
}

/// The end of a tile for schedules whose warpgroups meet at a barrier in each step.
struct TileEnd<'a, 'k> {
    main: &'a Main<'k>,
    walk: &'a StepWalk<'a, 'k>,
    /// The warpgroup's accumulators.
    d_q: &'a Acc<'k>,
    d_k: &'a Acc<'k>,
    d_v: &'a Acc<'k>,
    all: &'a RoleBarrier,
    barrier: &'a GroupBarrier,
}

/// The tensor of a result, d_k or d_v, as an index.
const D_K: usize = 0;
const D_V: usize = 1;

/// The last products of a tile, each started by a call: d_v, d_q, d_k.
type Products<'a, 'k> = [&'a dyn Fn(&Scope<'k, Group>); 3];

impl<'k> TileEnd<'_, 'k> {
    /// Starts the last `products` (d_v, d_q, d_k), adds d_q, and lets d_k and d_v leave through the stages of K and V. `part`
    /// is the warpgroup's part of such a stage, `at` the first column and key of its part of a result.
    fn run<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        products: Products<'_, 'k>,
        part: impl Fn(usize, Tile<'k>) -> Tile<'k>,
        at: impl Fn(&Work<'k>, usize) -> [Val<'k, u32>; 2],
    ) where
        Pair<T>: Word,
    {
        let stages = &self.main.stages;
        products.iter().for_each(|start| start(w));
        w.wait_products(0);
        stages.outputs.done(w);
        stages.queries.keep(w);
        stages.queries.release_previous(w);
        self.walk.add(w, self.d_q, 0..self.d_q.cols() / 8);
        // Read the tile again: keeping it over the loop would take registers.
        let work = self.main.map.read(&stages.tickets.again(w));
        stages.tickets.done(w);
        if let Some(parts) = &self.main.parts {
            // Parts of results leave from registers: the next keys may come meanwhile.
            stages.values.done(w);
            stages.keys.done(w);
            let map = &self.main.map;
            parts.store(w, map, &work, (Of::DV, self.d_v), at(&work, D_V));
            parts.store(w, map, &work, (Of::DK, self.d_k), at(&work, D_K));
            return;
        }
        for (of, result, index) in [(Of::DV, self.d_v, D_V), (Of::DK, self.d_k, D_K)] {
            self.main.check(w, &work, (of, result), at(&work, index));
        }
        // Both warpgroups are done with K and V.
        w.sync_role(self.all);
        let [to_k, to_v] = [(&stages.keys, D_K), (&stages.values, D_V)].map(|(ring, of)| part(of, ring.current(w)[0]));
        let results = [(self.d_k, to_k), (self.d_v, to_v)];
        store_results::<T>(w, self.main, &work, self.barrier, results, |_, of| at(&work, of));
        w.one_thread_of_group(|t| t.wait_stores_read(0));
        stages.values.done(w);
        stages.keys.done(w);
    }
}
