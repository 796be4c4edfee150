//! The gradients of a tile of 64 keys whose rows are too long for one warpgroup: each has half of the columns of d_k, d_v and
//! d_q.
//!
//! All of them need p and d_z of all queries of a step. Each warpgroup computes p and d_z for half of the queries, and both read
//! them as tiles from shared memory.
//!
//! A step, of which s and d_p are already in flight: p, d_z, written | barrier | start d_q, d_v, d_k | wait for d_q, add
//! it | start the next s and d_p, whose registers it had | wait for the rest.

use crate::attention::backward::modifiers::ModifierRole;
use crate::attention::backward::schedules::{Products, Schedule, TileEnd, run};
use crate::attention::backward::state::{Main, Stages, tile};
use crate::attention::backward::tiles::Work;
use crate::attention::backward::walk::{StepWalk, clear, pack, probabilities, score_gradients};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{
    Acc, Fragment, Group, GroupBarrier, Half, Major, Pair, RoleBarrier, Scope, Sum, Swizzle, Tile, TileShape, Val, Word,
};

/// A warpgroup's registers and tiles.
struct Columns<'a, 'k, T> {
    main: &'a Main<'k>,
    /// p and d_z of both warpgroups, one tile for each stage of q. Rows are keys.
    p_tiles: Vec<Tile<'k>>,
    d_z_tiles: Vec<Tile<'k>>,
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
    /// Index of the warpgroup.
    own: Val<'k, u32>,
    walk: StepWalk<'a, 'k>,
    modifiers: Option<ModifierRole<'a, 'k>>,
}

/// The compute role.
pub(crate) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let schedule = Columns::<T>::new(w, main);
    run(w, &schedule);
    schedule.walk.end(w);
    // No wait for the stores: they have read shared memory, and the grid does not end before they are written.
}

impl<'a, 'k, T: Half> Columns<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, main: &'a Main<'k>) -> Self {
        let (config, [d, dv]) = (main.config, main.dims);
        let (rows, half, cols) = (config.rows, config.rows / 2, [d / 2, dv / 2]);
        // Chunks of half the columns: each warpgroup writes one.
        let shape = TileShape { swizzle: Swizzle::B64, ..tile::<T>(config, config.keys(), rows) };
        let tiles = |name| -> Vec<Tile<'k>> { (0..config.depth).map(|_| main.k.tile(name, shape)).collect() };
        let (p_tiles, d_z_tiles) = (tiles("p"), tiles("d_z"));
        let (s, d_p) = (w.accumulators(half), w.accumulators(half));
        let d_q = w.accumulators(cols[0]);
        let (d_k, d_v) = (w.accumulators(cols[0]), w.accumulators(cols[1]));
        let (p, d_z) = (w.fragment::<T>(half), w.fragment::<T>(half));
        let limits = Limits::of_keys(w, &main.map.spans);
        let (all, barrier) = (w.role_barrier(), w.group_barrier());
        let own = w.group();
        let walk = StepWalk::new(w, main);
        let modifiers = main.modifiers.as_ref().map(|modifiers| modifiers.in_role(w, main.scale));
        Columns { main, p_tiles, d_z_tiles, s, d_p, d_q, d_k, d_v, p, d_z, limits, all, barrier, own, walk, modifiers }
    }

    /// Number of queries of a step for which the warpgroup computes p and d_z.
    fn half(&self) -> u32 {
        self.s.cols()
    }

    /// Starts s of a step.
    fn scores(&self, w: &Scope<'k, Group>) {
        let Stages { queries, keys, .. } = &self.main.stages;
        let (q, key) = (queries.wait(w)[0].rows(self.own, self.half()), keys.current(w)[0]);
        w.multiply(&self.s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
    }

    /// Starts d_p of a step.
    fn products(&self, w: &Scope<'k, Group>) {
        let Stages { outputs, values, .. } = &self.main.stages;
        let (d_o, value) = (outputs.wait(w)[0].rows(self.own, self.half()), values.current(w)[0]);
        w.multiply(&self.d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
    }

    /// The tile of the current step.
    #[track_caller]
    fn tile_of(&self, w: &Scope<'k, Group>, tiles: &[Tile<'k>]) -> Tile<'k> {
        self.main.stages.queries.beside(w, tiles[0])
    }

    fn query_sums(&self, w: &Scope<'k, Group>) {
        let key = self.main.stages.keys.current(w)[0].cols(self.own, self.d_q.cols()).operand(Major::Outer);
        w.multiply(&self.d_q, self.tile_of(w, &self.d_z_tiles).operand(Major::Outer), key, Sum::Fresh);
    }

    fn value_sums(&self, w: &Scope<'k, Group>) {
        let d_o = self.main.stages.outputs.current(w)[0].cols(self.own, self.d_v.cols()).operand(Major::Outer);
        w.multiply(&self.d_v, self.tile_of(w, &self.p_tiles).operand(Major::Inner), d_o, Sum::Onto);
    }

    fn key_sums(&self, w: &Scope<'k, Group>) {
        let q = self.main.stages.queries.current(w)[0].cols(self.own, self.d_k.cols()).operand(Major::Outer);
        w.multiply(&self.d_k, self.tile_of(w, &self.d_z_tiles).operand(Major::Inner), q, Sum::Onto);
    }

    /// Sets the modifiers for the current query head.
    fn set_head(&self, w: &Scope<'k, Group>) {
        if let Some(modifiers) = &self.modifiers {
            let main = self.main;
            let work = main.map.read(&main.stages.tickets.again(w));
            modifiers.set(w, &main.map, &work, self.walk.head(), work.tile * main.config.keys());
        }
    }
}

impl<'k, T: Half> Schedule<'k> for Columns<'_, 'k, T>
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
        let (main, map, Stages { keys, values, .. }) = (self.main, &self.main.map, &self.main.stages);
        let first_key = (work.tile * main.config.keys()).to_i32();
        self.limits.set_keys(w, first_key, map.k_len(work.sequence).to_i32(), map.lengths(work.sequence));
        self.walk.start(w, work);
        clear(&self.d_k);
        clear(&self.d_v);
        self.set_head(w);
        values.wait(w);
        keys.wait(w);
        self.scores(w);
        self.products(w);
    }

    fn step(&self, w: &Scope<'k, Group>) {
        let (main, Stages { queries, outputs, .. }) = (self.main, &self.main.stages);
        let (Columns { s, d_p, p, d_z, own, .. }, half) = (self, self.half());
        w.wait_products(1); // s
        let first = self.walk.first_query() + (*own * half).to_i32();
        let slopes =
            self.modifiers.as_ref().map(|modifiers| modifiers.apply(w, s, first, modifiers.block_kind(w, first)));
        self.limits.apply(w, s, &Block { first, full: None });
        probabilities(w, main, s, queries.numbers(w).part(*own, half), |eight| pack(p, eight, s));
        w.write_fragment(self.tile_of(w, &self.p_tiles).cols(*own, half), p);
        w.wait_products(0); // d_p
        let delta = outputs.numbers(w).part(*own, half);
        match (&self.modifiers, &slopes) {
            (Some(modifiers), Some(slopes)) => {
                modifiers.gradients(w, [s, d_p], |eight| delta.pair(w, eight), slopes, |eight| pack(d_z, eight, d_p));
            }
            _ => score_gradients(w, [s, d_p], delta, |eight| pack(d_z, eight, d_p)),
        }
        w.write_fragment(self.tile_of(w, &self.d_z_tiles).cols(*own, half), d_z);
        w.publish_shared();
        // One barrier is enough for two tiles of each: a warpgroup that passes it has waited for all products of the step before.
        w.sync_role(&self.all);
    }

    fn advance(&self, w: &Scope<'k, Group>) {
        let Stages { queries, outputs, .. } = &self.main.stages;
        self.query_sums(w);
        self.value_sums(w);
        self.key_sums(w);
        w.wait_products(2); // d_q
        self.walk.add(w, &self.d_q, 0..self.d_q.cols() / 8);
        w.wait_products(0);
        outputs.done(w);
        queries.keep(w);
        queries.release_previous(w);
        self.scores(w);
        self.walk.forward(w, |w| self.set_head(w));
        self.products(w);
    }

    fn finish(&self, w: &Scope<'k, Group>) {
        let Columns { main, walk, d_q, d_k, d_v, all, barrier, own, .. } = self;
        let products: Products<'_, 'k> = [&|w| self.value_sums(w), &|w| self.query_sums(w), &|w| self.key_sums(w)];
        let cols = [d_k.cols(), d_v.cols()];
        TileEnd { main, walk, d_q, d_k, d_v, all, barrier }.run::<T>(
            w,
            products,
            |of, stage| stage.cols(*own, cols[of]),
            |work, of| [*own * cols[of], work.tile * main.config.keys()],
        );
    }
}
