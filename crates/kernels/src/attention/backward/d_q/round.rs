//! Conversion of d_q to 16 bits in the main kernel, while its sums are still in the L2 cache.
//!
//! Only some pairs of head and sequence own sums at a time. A pair reuses the sums of a pair whose d_q is already converted. Whenever
//! a CTA takes a tile, it also converts one part of an older pair's d_q. By then all tiles of that pair have been handed out, so
//! CTAs seldom wait for each other, and never in a circle: a part waits for tiles with numbers up to that of its own tile, and a
//! tile waits for parts that came with lower numbers (`plan::bands` says why). Parts that come with no tile are shared among
//! all CTAs at the end.
//!
//! ```text
//! load, warp 0     tile m posted ------------------------------+        waits until the sums are free
//! load, warp 1     waits for the additions to part m - lag ----+----> part summed                 signals sums free
//! compute          tile m, then loads the part, stores d_q, zeroes the sums --------------> part converted
//! load, warp 2, 3  signals that the additions of tile m have arrived
//! ```
//!
//! In this service, compute threads wait for global memory only after the last tile, and never signal other CTAs.

use crate::attention::backward::KernelShape;
use crate::attention::backward::d_q::service::{Flags, Job, Log, Ring, Service};
use crate::attention::backward::d_q::split_tiles::SplitTiles;
use crate::attention::backward::d_q::zero_fill;
use crate::attention::backward::finish::{Item, ResultArgs, Results, StepRows, SumLayout};
use crate::attention::backward::marks::HeadRows;
use crate::attention::backward::tiles::{TileMap, Work};
use crate::params::{Lens, Params, given};
use crate::parts::schedule::Equal;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Divisor, Group, GroupBarrier, Half, Pair, Pointer, Scope, Thread, Val, Var, Word};
use std::rc::Rc;

const NAME: &str = "round";

/// Warpgroups that compute. Each has TMA add for itself, and converts half of every step.
const GROUPS: u32 = 2;
/// Threads of a warpgroup.
const THREADS: u32 = 128;
/// Items that a thread loads at once, and four-element vectors per item: limited by registers.
const ITEMS: usize = 3;
const FOURS: usize = 8;
/// Messages in flight: one for a tile, and one for the next, whose first queries are being loaded.
const DEPTH: u32 = 2;

/// A message passes through the hands of several threads, one after the other. The load thread posts it, as hand 0.
const WAIT: usize = 1;
const COMPUTE: usize = 2;
const SIGNAL: usize = 3;
/// The event that each hand signals.
const EVENTS: &[&str] = &["tile posted", "part summed", "part converted", "message free"];

/// Arguments of [`Round`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    pub d_q: ResultArgs,
    pub added: Span,
    pub rounded: Span,
    /// Distance in tiles between a part's own number and the tile that converts it.
    pub lag: u32,
    /// Steps of a part, and parts of a pair.
    pub part: u32,
    pub parts: u32,
    /// Pairs that own sums at a time.
    pub slots: u32,
    /// Steps of a head.
    pub steps: u32,
}

/// The rounding service. See [`Args`].
pub(crate) struct Round<'k> {
    results: Results<'k>,
    messages: Ring<'k>,
    /// For each pair: tiles whose additions have arrived, counted by each warpgroup. With split tiles: steps of tiles.
    added: Flags<'k>,
    /// For each pair: parts that are converted.
    rounded: Flags<'k>,
    slots: Divisor<'k>,
    lag: Val<'k, u32>,
    part: Val<'k, u32>,
    parts: Val<'k, u32>,
    steps: Divisor<'k>,
    /// f32 sums of d_q.
    sums: Pointer<'k, f32>,
    /// Queries of a step, and elements of a row of sums.
    step: [u32; 2],
    /// The order of tiles.
    bands: Equal<'k>,
    /// The splitting of tiles, if the kernel has it.
    split: Option<Rc<SplitTiles<'k>>>,
}

/// A part of the d_q of a pair.
#[derive(Clone, Copy)]
struct Part<'k> {
    batch: Val<'k, u32>,
    head: Val<'k, u32>,
    pair: Val<'k, u32>,
    /// Its number in the pair.
    nth: Val<'k, u32>,
    /// The first step, and past the last.
    steps: [Val<'k, u32>; 2],
    /// The first of the warpgroup's items.
    from: Val<'k, u32>,
}

impl<'k> Round<'k> {
    /// Declares parameters and shared memory. The returned function makes the service, when the order of tiles and their
    /// splitting are declared too.
    pub fn declare<T: Half, C: 'static>(
        p: &Params<'k, C>,
        args: impl Lens<C, Option<Args>>,
        (shape, sums): (&KernelShape, Pointer<'k, f32>),
        log: &Rc<Log>,
    ) -> impl FnOnce(Equal<'k>, Option<Rc<SplitTiles<'k>>>) -> Self
    where
        Pair<T>: Word,
    {
        let layout = (SumLayout::of_queries(shape), shape.results, false);
        let results = Results::declare::<T, C>(p, "d_q", layout, move |call| &given(args(call)).d_q);
        let messages = Ring::new(p.builder().token_ring("rounding", DEPTH, &[1, 1, 4 * GROUPS, 1]), NAME, EVENTS, log);
        let added = p.array("added", move |call| given(args(call)).added);
        let rounded = p.array("rounded", move |call| given(args(call)).rounded);
        let lag = p.u32("lag", move |call| given(args(call)).lag);
        let part = p.u32("part", move |call| given(args(call)).part);
        let parts = p.u32("parts", move |call| given(args(call)).parts);
        let slots = p.divisor("slots", move |call| given(args(call)).slots);
        let steps = p.divisor("head_steps", move |call| given(args(call)).steps);
        let added = Flags::new(added, NAME, "additions arrived", log);
        let rounded = Flags::new(rounded, NAME, "sums free", log);
        let step = [shape.config.rows, shape.dims[0]];
        move |bands, split| Round {
            results,
            messages,
            added,
            rounded,
            slots,
            lag,
            part,
            parts,
            steps,
            sums,
            step,
            bands,
            split,
        }
    }

    /// Items of the warpgroup's half of a step.
    fn items(&self) -> u32 {
        self.results.items() / GROUPS
    }

    /// Index of the sums that a pair owns.
    #[track_caller]
    pub fn slot(&self, pair: Val<'k, u32>) -> Val<'k, u32> {
        self.slots.div_rem(pair)[1]
    }

    /// The counter of additions to the d_q of a pair.
    #[track_caller]
    pub fn added(&self, pair: Val<'k, u32>) -> Flags<'k> {
        self.added.at(pair)
    }

    /// Logs that the current thread counts additions when they have arrived.
    pub fn log_added(&self) {
        self.added.log_signal();
    }

    /// Compute role, before a tile's results leave: loads what it can of the part that comes with the tile.
    pub fn read_part(&self, w: &Scope<'k, Group>, map: &TileMap<'k>) -> Sums<'k> {
        let sums = Sums::new(w);
        self.messages.wait(w, COMPUTE);
        let [after, ..] = self.messages.read(w, COMPUTE);
        w.when(after.gt(self.lag), |w| {
            let part = self.part_of(map, after - 1 - self.lag);
            self.read_items(w, map, &part, &sums);
        });
        sums
    }

    /// Compute role, after the results have left: converts the part.
    pub fn round<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        map: &TileMap<'k>,
        (barrier, scale): (&GroupBarrier, Val<'k, f32>),
        sums: &Sums<'k>,
    ) where
        Pair<T>: Word,
    {
        let [after, ..] = self.messages.read(w, COMPUTE);
        w.when(after.gt(self.lag), |w| {
            let part = self.part_of(map, after - 1 - self.lag);
            self.write_items::<T>(w, (map, scale), &part, sums);
            self.round_items::<T>(w, (map, scale), &part, ITEMS as u32 * THREADS);
            w.when(self.is_reused(part.pair), |w| {
                w.sync_group(barrier);
                self.clear(w, map, &part);
            });
        });
        w.publish_global();
        self.messages.pass_together(w, COMPUTE);
    }

    /// Compute role, after the last tile: converts the parts that came with no tile.
    pub fn round_rest<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        map: &TileMap<'k>,
        (barrier, scale): (&GroupBarrier, Val<'k, f32>),
    ) where
        Pair<T>: Word,
    {
        let tiles = self.bands.tiles;
        let with_parts = self.split.as_ref().map_or(tiles, |split| split.whole);
        let first = with_parts - with_parts.min(self.lag);
        w.each(first + w.cluster(), tiles, w.clusters(), |w, number| {
            w.one_thread_of_group(|t| self.wait_for_part(t, map, number));
            w.sync_group(barrier);
            // No later pair takes these sums: parts of pairs whose sums are taken over came with tiles.
            self.round_items::<T>(w, (map, scale), &self.part_of(map, number), 0);
        });
    }

    /// The part with a number.
    fn part_of(&self, map: &TileMap<'k>, number: Val<'k, u32>) -> Part<'k> {
        let [batch, head, nth] = self.bands.position(map.heads, number);
        let all = map.heads_of(head) * map.steps;
        let first = nth * self.part;
        let pair = batch * map.heads.value() + head;
        let steps = [first.min(all), (first + self.part).min(all)];
        Part { batch, head, pair, nth, steps, from: first.literal(0) }
    }

    /// Whether a pair that has the most query heads has steps in this part. Then every pair counts the part, even if it has
    /// none of its steps: all pairs wait for the same number of parts.
    fn is_part(&self, map: &TileMap<'k>, part: &Part<'k>) -> Val<'k, bool> {
        match map.is_uneven() {
            true => (part.nth * self.part).lt(map.most_heads() * map.steps),
            false => part.steps[0].lt(part.steps[1]),
        }
    }

    /// Whether another pair will take over a pair's sums.
    fn is_reused(&self, pair: Val<'k, u32>) -> Val<'k, bool> {
        (pair + self.slots.value()).lt(self.bands.pairs)
    }

    /// Waits until all additions to a part have arrived.
    fn wait_for_part(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, number: Val<'k, u32>) {
        let part = self.part_of(map, number);
        let tiles = self.bands.tiles_of_head();
        let added = self.split.as_ref().map_or(tiles, |split| split.all(tiles));
        self.added(part.pair).wait_for(t, 0, added * GROUPS);
    }

    /// The sums of a step of a pair.
    fn sums_of(&self, map: &TileMap<'k>, pair: Val<'k, u32>, step: Val<'k, u32>) -> Pointer<'k, f32> {
        let step = self.slot(pair) * map.most_heads() * map.steps + step;
        self.sums.at_wide(step.mul_wide(self.step[0] * self.step[1]))
    }

    /// Calls `f` for each item that the thread has in registers at a time, [`ITEMS`] at most: with the item's `sums`, its step
    /// in the pair, and its number in the step.
    fn each_item(
        &self,
        w: &Scope<'k, Group>,
        part: &Part<'k>,
        sums: &Sums<'k>,
        f: impl Fn(&Scope<'k, Group>, &[[Var<'k, f32>; 4]], [Val<'k, u32>; 2]),
    ) {
        let (own, items) = (w.thread_in_group() + part.from, self.items());
        let ([first, end], results) = (part.steps, &self.results);
        for (i, sums) in sums.0.iter().enumerate() {
            let item = own + i as u32 * THREADS;
            w.when(item.lt((end - first) * items), |w| {
                let step = item / items;
                f(w, sums, [first + step, results.item_of(w.group(), item - step * items)]);
            });
        }
    }

    /// Loads items of a part.
    fn read_items(&self, w: &Scope<'k, Group>, map: &TileMap<'k>, part: &Part<'k>, sums: &Sums<'k>) {
        self.each_item(w, part, sums, |w, to, [step, item]| {
            let fours = self.results.load(w, self.sums_of(map, part.pair, step), item);
            to.iter().zip(fours).for_each(|(to, four)| to.iter().zip(four).for_each(|(to, x)| to.set(x)));
        });
    }

    /// Converts items that were loaded.
    fn write_items<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        (map, scale): (&TileMap<'k>, Val<'k, f32>),
        part: &Part<'k>,
        sums: &Sums<'k>,
    ) where
        Pair<T>: Word,
    {
        let results = &self.results;
        self.each_item(w, part, sums, |w, from, [step, item]| {
            let [nth, step] = self.steps.div_rem(step);
            let of_sequence = part.batch.mul_wide(results.batch_stride);
            let head = map.first_head(part.head) + nth;
            let to = results.head::<T>(of_sequence, head);
            let of = HeadRows { batch: part.batch, head, start: head.literal(0) };
            let fours: Vec<_> = from.iter().map(|four| four.map(|x| x.get())).collect();
            let rows = StepRows { to, of, step, q_len: results.rows, scale };
            results.store(w, rows, &Item::Half(item, fours), &Vec::new());
        });
    }

    /// Loads and converts the warpgroup's half of a part, from item `first` on.
    fn round_items<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        (map, scale): (&TileMap<'k>, Val<'k, f32>),
        part: &Part<'k>,
        first: u32,
    ) where
        Pair<T>: Word,
    {
        let items = (part.steps[1] - part.steps[0]) * self.items();
        w.each(w.constant(first), items, ITEMS as u32 * THREADS, |w, from| {
            let (part, sums) = (Part { from, ..*part }, Sums::new(w));
            self.read_items(w, map, &part, &sums);
            self.write_items::<T>(w, (map, scale), &part, &sums);
        });
    }

    /// Zeroes the sums of the warpgroup's half of a part. Written in memory order, not in the order of loads: partial-sector
    /// writes are 10x slower. TMA was no faster.
    fn clear(&self, w: &Scope<'k, Group>, map: &TileMap<'k>, part: &Part<'k>) {
        let (half, zero) = (self.step[0] * self.step[1] / GROUPS, w.constant(0.0f32));
        let own = w.group() * half + w.thread_in_group() * 4;
        w.each(part.steps[0], part.steps[1], 1, |w, step| {
            let sums = self.sums_of(map, part.pair, step).at(own);
            for i in 0..half / (4 * THREADS) {
                sums.store_some(w, i * 4 * THREADS, [zero; 4]);
            }
        });
    }
}

impl<'k> Service<'k> for Round<'k> {
    fn jobs(&self) -> Vec<Job> {
        vec![Job::new(NAME, 1).after(zero_fill::NAME)]
    }

    fn waits_for_tiles(&self) -> bool {
        true
    }

    fn on_tile(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, number: Var<'k, u32>, work: &Work<'k>) {
        let (number, pair) = (number.get(), map.pair(work));
        let (slots, zero) = (self.slots.value(), t.constant(0u32));
        // No part comes with a run: the part might wait for runs with higher numbers.
        let after = match &self.split {
            Some(split) => number.lt(split.whole).select::<u32>(number + 1, 1),
            None => number + 1,
        };
        self.messages.post(t, [after, zero, zero, zero]);
        t.when(pair.ge(slots), |t| self.rounded.wait_for(t, pair - slots, self.parts));
    }

    fn on_end(&self, t: &Scope<'k, Thread>) {
        self.messages.post_end(t);
    }

    fn on_warp(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, _: u32) {
        t.repeat(|t, leave| {
            self.messages.wait(t, WAIT);
            let [after, ..] = self.messages.read(t, WAIT);
            let comes = after.gt(self.lag);
            t.when(comes, |t| self.wait_for_part(t, map, after - 1 - self.lag));
            self.messages.pass(t, WAIT);
            leave.when(after.eq(0));
            self.messages.wait(t, SIGNAL);
            t.when(comes, |t| {
                let part = self.part_of(map, after - 1 - self.lag);
                let is_waited_for = self.is_part(map, &part) & self.is_reused(part.pair);
                t.when(is_waited_for, |t| self.rounded.at(part.pair).add(t, 0, 1));
            });
            self.messages.pass(t, SIGNAL);
        });
    }
}

/// Sums that a thread has loaded, by item and four.
pub(crate) struct Sums<'k>(Vec<Vec<[Var<'k, f32>; 4]>>);

impl<'k> Sums<'k> {
    fn new(w: &Scope<'k, Group>) -> Self {
        Sums((0..ITEMS).map(|_| (0..FOURS).map(|_| [(); 4].map(|()| w.var(0.0f32))).collect()).collect())
    }
}
