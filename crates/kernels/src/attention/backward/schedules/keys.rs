//! The gradients of a tile of 128 keys, 64 for each warpgroup.
//!
//! p^T and d_z^T leave the registers as left operands of d_v and d_k. Only d_q needs d_z of both warpgroups, which goes through
//! shared memory.
//!
//! A step, of which s and d_p are already in flight: p | d_z, written | barrier | start d_q, d_v, d_k | wait for d_q,
//! add a part of it | wait for d_v | start the next s | add the rest | start the next d_p. d_q goes first because additions take
//! long to leave, and the products behind it keep the tensor cores busy meanwhile.

use crate::attention::backward::Pack;
use crate::attention::backward::schedules::{Products, Schedule, TileEnd, run};
use crate::attention::backward::state::{Main, Stages, tile};
use crate::attention::backward::tiles::Work;
use crate::attention::backward::walk::{StepWalk, clear, pack, probabilities, score_gradients};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{
    Acc, Fragment, Group, GroupBarrier, Half, Major, Pair, RoleBarrier, Scope, Sum, Tile, Val, Var, Word,
};

/// A warpgroup's registers and tiles.
struct ByKeys<'a, 'k, T> {
    main: &'a Main<'k>,
    /// d_z of both warpgroups, one tile for each stage of q.
    exchange: Vec<Tile<'k>>,
    s: Acc<'k>,
    d_p: Acc<'k>,
    d_q: Acc<'k>,
    d_k: Acc<'k>,
    d_v: Acc<'k>,
    p: Fragment<'k, T>,
    d_z: Fragment<'k, T>,
    limits: Limits<'k>,
    all: RoleBarrier,
    barrier: GroupBarrier,
    /// Number of the warpgroup.
    own: Val<'k, u32>,
    walk: StepWalk<'a, 'k>,
    /// Whether no step of the tile is done yet.
    fresh: Var<'k, bool>,
}

/// The compute role.
pub(crate) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let schedule = ByKeys::<T>::new(w, main);
    run(w, &schedule);
    schedule.walk.end(w);
    // No wait for the stores: they have read shared memory, and the grid does not end before they are written.
}

impl<'a, 'k, T: Half> ByKeys<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, main: &'a Main<'k>) -> Self {
        let (config, [d, dv]) = (main.config, main.dims);
        let (rows, cols) = (config.rows, config.cols(d));
        let exchange = (0..config.depth).map(|_| main.k.tile("d_z", tile::<T>(config, config.keys(), rows))).collect();
        let s = w.accumulators(rows);
        let d_p = w.accumulators(rows);
        // d_q shares the registers of d_p if it has the same number. Sharing a part of them would work too, but the
        // assembler then finds no registers for the products at some masks and head dims (C7511).
        let d_q = if cols == rows { d_p.part(0, cols) } else { w.accumulators(cols) };
        let (d_k, d_v) = (w.accumulators(d), w.accumulators(dv));
        let (p, d_z) = (w.fragment::<T>(rows), w.fragment::<T>(rows));
        let limits = Limits::of_keys(w, &main.map.spans);
        let (all, barrier) = (w.role_barrier(), w.group_barrier());
        let own = w.group();
        let walk = StepWalk::new(w, main);
        let fresh = w.var(true);
        ByKeys { main, exchange, s, d_p, d_q, d_k, d_v, p, d_z, limits, all, barrier, own, walk, fresh }
    }

    /// Starts s of a step.
    fn scores(&self, w: &Scope<'k, Group>) {
        let Stages { queries, keys, .. } = &self.main.stages;
        let (q, key) = (queries.wait(w)[0], keys.current(w)[0].rows(self.own, 64));
        w.multiply(&self.s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
    }

    /// Starts d_p of a step.
    fn products(&self, w: &Scope<'k, Group>) {
        let Stages { outputs, values, .. } = &self.main.stages;
        let (d_o, value) = (outputs.wait(w)[0], values.current(w)[0].rows(self.own, 64));
        w.multiply(&self.d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
    }

    fn onto(&self, w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: Tile<'k>) {
        w.multiply_fragment(acc, left, right.operand(Major::Outer), Sum::Onto, |_| {});
    }

    fn value_sums(&self, w: &Scope<'k, Group>) {
        self.onto(w, &self.d_v, &self.p, self.main.stages.outputs.current(w)[0]);
    }

    fn key_sums(&self, w: &Scope<'k, Group>) {
        self.onto(w, &self.d_k, &self.d_z, self.main.stages.queries.current(w)[0]);
    }

    fn query_sums(&self, w: &Scope<'k, Group>) {
        let Stages { queries, keys, .. } = &self.main.stages;
        let (d_z, key) = (queries.beside(w, self.exchange[0]), keys.current(w)[0]);
        // Warpgroups share the rows of d_q, or its columns.
        let (own, cols) = (self.own, self.d_q.cols());
        let (d_z, key) = if cols == self.main.dims[0] { (d_z.cols(own, 64), key) } else { (d_z, key.cols(own, cols)) };
        w.multiply(&self.d_q, d_z.operand(Major::Outer), key.operand(Major::Outer), Sum::Fresh);
    }
}

impl<'k, T: Half> Schedule<'k> for ByKeys<'_, 'k, T>
where
    Pair<T>: Word,
{
    fn main(&self) -> &Main<'k> {
        self.main
    }

    fn walk(&self) -> &StepWalk<'_, 'k> {
        &self.walk
    }

    fn start(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let (map, Stages { keys, values, .. }) = (&self.main.map, &self.main.stages);
        let first_key = (work.tile * self.main.config.keys() + self.own * 64).to_i32();
        self.limits.set_keys(w, first_key, map.k_len(work.sequence).to_i32(), map.lengths(work.sequence));
        self.walk.start(w, work);
        clear(&self.d_k);
        clear(&self.d_v);
        self.fresh.set(true);
        values.wait(w);
        keys.wait(w);
        self.scores(w);
        self.products(w);
    }

    fn step(&self, w: &Scope<'k, Group>) {
        let (main, Stages { queries, outputs, .. }) = (self.main, &self.main.stages);
        let ByKeys { s, d_p, p, d_z, .. } = self;
        w.wait_products(1); // s of this step and d_k of the one before
        w.when(!self.fresh.get(), |w| queries.release_previous(w));
        self.fresh.set(false);
        self.limits.apply(w, s, &Block { first: self.walk.first_query(), full: None });
        probabilities(w, main, s, queries.numbers(w), |eight| {
            if main.config.pack == Pack::Early {
                pack(p, eight, s);
            }
        });
        // d_p. The assembler waits before most exponentials at head dims 64 and 128; holding it back is not measured.
        w.wait_products_anywhere(0);
        score_gradients(w, [s, d_p], outputs.numbers(w), |eight| {
            if main.config.pack == Pack::Late {
                pack(p, eight, s);
            }
            pack(d_z, eight, d_p);
        });
        w.write_fragment(queries.beside(w, self.exchange[0]).rows(self.own, 64), d_z);
        w.publish_shared();
        // One barrier is enough for two tiles of d_z: a warpgroup that passes it has waited for the d_q before.
        w.sync_role(&self.all);
    }

    fn advance(&self, w: &Scope<'k, Group>) {
        let (config, Stages { queries, outputs, .. }) = (&self.main.config, &self.main.stages);
        let fours = self.d_q.cols() / 8;
        self.query_sums(w);
        self.value_sums(w);
        self.key_sums(w);
        w.wait_products(2); // d_q
        let early = fours * config.early / 8;
        self.walk.add(w, &self.d_q, 0..early);
        w.wait_products(if config.drain { 0 } else { 1 }); // d_v
        outputs.done(w);
        queries.keep(w);
        self.scores(w);
        self.walk.add(w, &self.d_q, early..fours);
        self.walk.forward(w, |_| {});
        self.products(w);
    }

    fn finish(&self, w: &Scope<'k, Group>) {
        let ByKeys { main, walk, d_q, d_k, d_v, all, barrier, own, .. } = self;
        let products: Products<'_, 'k> = [&|w| self.value_sums(w), &|w| self.query_sums(w), &|w| self.key_sums(w)];
        TileEnd { main, walk, d_q, d_k, d_v, all, barrier }.run::<T>(
            w,
            products,
            |_, stage| stage.rows(*own, 64),
            |work, _| [own.literal(0), work.tile * main.config.keys() + *own * 64],
        );
    }
}
