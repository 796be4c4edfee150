//! d_q rounded by the blocks that add to it, while its sums are still in the second-level cache.
//!
//! Not all pairs of head and sequence have sums at the same time: there are places for those whose tiles run, and for as many
//! before and after them, and a pair takes the place of one that is rounded. With each tile that a block is handed out comes a
//! part of the d_q of a pair whose tiles were all handed out long before. Blocks seldom wait for each other therefore, and never
//! in a circle: a part waits for tiles that were handed out before the tile it comes with, and a tile for parts that came
//! with tiles before it. The parts that come with no tile are shared out among all blocks at the end.
//!
//! Nobody who computes waits for memory for that, or tells others: a thread that does nothing else looks whether the additions
//! to a part have arrived before it is asked for, and tells what was rounded after; what was added is told by whoever has it
//! added.

use crate::attention::backward::KernelShape;
use crate::attention::backward::d_q::given;
use crate::attention::backward::d_q::ordered::Hand;
use crate::attention::backward::finish::{ResultArgs, Results, Rows};
use crate::attention::backward::main::{Call, Main};
use crate::attention::backward::tiles::{Tiles, Work};
use crate::params::Params;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Divisor, Group, GroupBarrier, Half, Pair, Pointer, Scope, Thread, TokenRing, Val, Var, Word};

/// Warpgroups that compute: each has its own keys, and a half of every step, for itself.
pub(crate) const GROUPS: u32 = 2;
/// Threads of one.
const THREADS: u32 = 128;
/// Items that a thread reads at once, and fours of each: as many as there are registers for.
const ITEMS: usize = 3;
const FOURS: usize = 8;
/// Messages on their way: a tile, and the one whose first queries are loaded.
const DEPTH: u32 = 2;

/// Arguments of [`Rounding`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    pub d_q: ResultArgs,
    pub added: Span,
    pub rounded: Span,
    pub lag: u32,
    /// Steps of a part, and parts of a pair.
    pub part: u32,
    pub parts: u32,
    pub places: u32,
    /// Steps of a head.
    pub steps: u32,
}

/// What of d_q is rounded when.
pub(crate) struct Rounding<'k> {
    results: Results<'k>,
    messages: TokenRing<'k>,
    /// For each pair, how many tiles it was told of that their additions have arrived (steps of tiles, where they are cut into
    /// pieces), and how many parts are rounded.
    added: Pointer<'k, u32>,
    rounded: Pointer<'k, u32>,
    /// Pairs that have sums at the same time.
    places: Divisor<'k>,
    /// How many tiles after the tile with its number a part is rounded.
    lag: Val<'k, u32>,
    /// Steps of a part, and parts of a pair.
    part: Val<'k, u32>,
    parts: Val<'k, u32>,
    /// Steps of a head.
    steps: Divisor<'k>,
}

/// A part of the d_q of a pair: what of it is rounded at once.
#[derive(Clone, Copy)]
struct Part<'k> {
    batch: Val<'k, u32>,
    head: Val<'k, u32>,
    pair: Val<'k, u32>,
    /// The first of its steps, and past the last.
    steps: [Val<'k, u32>; 2],
    /// From which of the warpgroup's items on.
    from: Val<'k, u32>,
}

impl<'k> Rounding<'k> {
    /// Declares the parameters.
    pub fn declare<T: Half>(p: &Params<'k, Call>, shape: &KernelShape) -> Self
    where
        Pair<T>: Word,
    {
        let results = Results::declare::<T, Call>(p, shape, |call| &given(&call.round).d_q);
        let messages = p.builder().relay("rounding", DEPTH, &[1, 1, 4 * GROUPS, 1]);
        let added = p.array("added", |call| given(&call.round).added);
        let rounded = p.array("rounded", |call| given(&call.round).rounded);
        let lag = p.u32("lag", |call| given(&call.round).lag);
        let part = p.u32("part", |call| given(&call.round).part);
        let parts = p.u32("parts", |call| given(&call.round).parts);
        let places = p.divisor("places", |call| given(&call.round).places);
        let steps = p.divisor("head_steps", |call| given(&call.round).steps);
        Rounding { results, messages, added, rounded, places, lag, part, parts, steps }
    }

    /// Items of the warpgroup's half of a step.
    fn items(&self) -> u32 {
        self.results.items() / GROUPS
    }

    /// The place that a pair has.
    #[track_caller]
    pub fn place(&self, pair: Val<'k, u32>) -> Val<'k, u32> {
        self.places.div_rem(pair)[1]
    }

    /// Where it is told that the additions of a tile have arrived.
    #[track_caller]
    pub fn teller(&self, pair: Val<'k, u32>) -> Pointer<'k, u32> {
        self.added.at(pair)
    }

    /// The thread that loads a tile: its pair has a place when the one that had it is rounded.
    pub fn post(&self, t: &Scope<'k, Thread>, main: &Main<'k>, number: Val<'k, u32>, pair: Val<'k, u32>) {
        let (places, zero) = (self.places.value(), t.constant(0u32));
        // No part comes with a piece: what it waits for might be handed out later.
        let after = match &main.pieces {
            Some(pieces) => number.lt(pieces.whole).select::<u32>(number + 1, 1),
            None => number + 1,
        };
        self.messages.post(t, [after, zero, zero, zero]);
        t.when(pair.ge(places), |t| self.rounded.wait_for(t, pair - places, self.parts));
    }

    /// No more tiles.
    pub fn post_end(&self, t: &Scope<'k, Thread>) {
        self.messages.post_end(t);
    }

    /// The thread that looks and tells, of one tile after the other.
    pub fn keep(&self, w: &Scope<'k, Group>, main: &Main<'k>) {
        w.one_thread_of_warp(1, |t| {
            t.repeat(|t, leave| {
                self.messages.wait(t, Hand::Look as usize);
                let [after, ..] = self.messages.read(t, Hand::Look as usize);
                let comes = after.gt(self.lag);
                t.when(comes, |t| main.wait_for_part(t, self, after - 1 - self.lag));
                self.messages.pass(t, Hand::Look as usize);
                leave.when(after.eq(0));
                self.messages.wait(t, Hand::Tell as usize);
                t.when(comes, |t| {
                    let part = main.part(self, after - 1 - self.lag);
                    let told = part.steps[0].lt(part.steps[1]) & main.used_again(self, part.pair);
                    t.when(told, |t| {
                        self.rounded.at(part.pair).fetch_add_in_order(t, 0, 1);
                    });
                });
                self.messages.pass(t, Hand::Tell as usize);
            });
        });
    }
}

impl<'k> Main<'k> {
    /// A tile's pair of head and sequence.
    #[track_caller]
    pub(crate) fn pair(&self, work: &Work<'k>) -> Val<'k, u32> {
        work.batch * self.heads.value() + work.head
    }

    /// Before a tile's results leave: reads what it can of the part that comes with it.
    pub(crate) fn read_part(&self, w: &Scope<'k, Group>) -> Option<Sums<'k>> {
        let rounding = self.rounding.as_ref()?;
        let sums = Sums::new(w);
        rounding.messages.wait(w, Hand::Compute as usize);
        let [after, ..] = rounding.messages.read(w, Hand::Compute as usize);
        w.when(after.gt(rounding.lag), |w| {
            let part = self.part(rounding, after - 1 - rounding.lag);
            self.read_items(w, rounding, &part, &sums);
        });
        Some(sums)
    }

    /// After that: rounds what was read, and what could not be read before.
    pub(crate) fn round<T: Half>(&self, w: &Scope<'k, Group>, barrier: &GroupBarrier, sums: Option<Sums<'k>>)
    where
        Pair<T>: Word,
    {
        let (Some(rounding), Some(sums)) = (&self.rounding, sums) else { return };
        let [after, ..] = rounding.messages.read(w, Hand::Compute as usize);
        w.when(after.gt(rounding.lag), |w| {
            let part = self.part(rounding, after - 1 - rounding.lag);
            self.write_items::<T>(w, rounding, &part, &sums);
            self.round_items::<T>(w, rounding, &part, ITEMS as u32 * THREADS);
            w.when(self.used_again(rounding, part.pair), |w| {
                w.sync_group(barrier);
                self.clear(w, rounding, &part);
            });
        });
        w.publish_global();
        rounding.messages.pass_together(w, Hand::Compute as usize);
    }

    /// After the last tile: the parts that came with none.
    pub(crate) fn round_rest<T: Half>(&self, w: &Scope<'k, Group>, barrier: &GroupBarrier)
    where
        Pair<T>: Word,
    {
        if let (Some(rounding), Tiles::Equal { tiles, .. }) = (&self.rounding, &self.tiles) {
            let with_parts = self.pieces.as_ref().map_or(tiles.tiles, |pieces| pieces.whole);
            let first = with_parts - with_parts.min(rounding.lag);
            w.each(first + w.cluster(), tiles.tiles, w.clusters(), |w, number| {
                w.one_thread_of_group(|t| self.wait_for_part(t, rounding, number));
                w.sync_group(barrier);
                // No pair will have its place: there are as many as it takes for the numbers that come with no tile.
                self.round_items::<T>(w, rounding, &self.part(rounding, number), 0);
            });
        }
    }

    /// The part with a number.
    fn part(&self, rounding: &Rounding<'k>, number: Val<'k, u32>) -> Part<'k> {
        let Tiles::Equal { tiles, .. } = &self.tiles else {
            unreachable!("bug in fulgurite: parts of unequal sequences")
        };
        let [batch, head, nth] = tiles.place(self.heads, number);
        let all = self.group * self.steps;
        let first = nth * rounding.part;
        let pair = batch * self.heads.value() + head;
        Part { batch, head, pair, steps: [first.min(all), (first + rounding.part).min(all)], from: first.literal(0) }
    }

    /// Whether another pair will have the place of this one.
    fn used_again(&self, rounding: &Rounding<'k>, pair: Val<'k, u32>) -> Val<'k, bool> {
        let Tiles::Equal { tiles, .. } = &self.tiles else {
            unreachable!("bug in fulgurite: parts of unequal sequences")
        };
        (pair + rounding.places.value()).lt(tiles.pairs)
    }

    /// Waits until all additions to a part have arrived.
    fn wait_for_part(&self, t: &Scope<'k, Thread>, rounding: &Rounding<'k>, number: Val<'k, u32>) {
        let part = self.part(rounding, number);
        // The copy engine adds for each warpgroup.
        let tiles = self.tiles_of_head(None);
        let told = self.pieces.as_ref().map_or(tiles, |pieces| pieces.all(tiles));
        rounding.teller(part.pair).wait_for(t, 0, told * GROUPS);
    }

    /// Where the sums of a step of a pair are.
    fn sums_of(&self, rounding: &Rounding<'k>, pair: Val<'k, u32>, step: Val<'k, u32>) -> Pointer<'k, f32> {
        let step = rounding.place(pair) * self.group * self.steps + step;
        self.sums.at_wide(step.mul_wide(self.config.rows * self.dims[0]))
    }

    /// What a thread does at once with the warpgroup's items of a part: with each, which of `sums` it is,
    /// its step among those of the pair, and its number in the step.
    fn each_item(
        &self,
        w: &Scope<'k, Group>,
        rounding: &Rounding<'k>,
        part: &Part<'k>,
        sums: &Sums<'k>,
        f: impl Fn(&Scope<'k, Group>, &[[Var<'k, f32>; 4]], [Val<'k, u32>; 2]),
    ) {
        let (own, items) = (w.thread_in_group() + part.from, rounding.items());
        let ([first, end], results) = (part.steps, &rounding.results);
        for (i, sums) in sums.0.iter().enumerate() {
            let item = own + i as u32 * THREADS;
            w.when(item.lt((end - first) * items), |w| {
                let step = item / items;
                f(w, sums, [first + step, results.item_of(w.group(), item - step * items)]);
            });
        }
    }

    /// Reads items of a part.
    fn read_items(&self, w: &Scope<'k, Group>, rounding: &Rounding<'k>, part: &Part<'k>, sums: &Sums<'k>) {
        self.each_item(w, rounding, part, sums, |w, to, [step, item]| {
            let fours = rounding.results.load(w, self.sums_of(rounding, part.pair, step), item);
            to.iter().zip(fours).for_each(|(to, four)| to.iter().zip(four).for_each(|(to, x)| to.set(x)));
        });
    }

    /// Rounds what was read.
    fn write_items<T: Half>(&self, w: &Scope<'k, Group>, rounding: &Rounding<'k>, part: &Part<'k>, sums: &Sums<'k>)
    where
        Pair<T>: Word,
    {
        let results = &rounding.results;
        self.each_item(w, rounding, part, sums, |w, from, [step, item]| {
            let [nth, step] = rounding.steps.div_rem(step);
            let of_sequence = part.batch.mul_wide(results.batch_stride);
            let to = results.head::<T>(of_sequence, part.head * self.group + nth);
            let fours: Vec<_> = from.iter().map(|four| four.map(|x| x.get())).collect();
            results.store(w, Rows { to, step, q_len: results.rows, scale: self.scale }, item, &fours);
        });
    }

    /// Rounds the warpgroup's half of a part, from an item on.
    fn round_items<T: Half>(&self, w: &Scope<'k, Group>, rounding: &Rounding<'k>, part: &Part<'k>, first: u32)
    where
        Pair<T>: Word,
    {
        let items = (part.steps[1] - part.steps[0]) * rounding.items();
        w.each(w.constant(first), items, ITEMS as u32 * THREADS, |w, from| {
            let (part, sums) = (Part { from, ..*part }, Sums::new(w));
            self.read_items(w, rounding, &part, &sums);
            self.write_items::<T>(w, rounding, &part, &sums);
        });
    }

    /// Zeros where the sums of the warpgroup's half of a part were; the copy engine, as in `clearing`, was no faster here. In the order in which they lie, unlike they are read: to
    /// write less than a sector at a time takes ten times as long.
    fn clear(&self, w: &Scope<'k, Group>, rounding: &Rounding<'k>, part: &Part<'k>) {
        let (half, zero) = (self.config.rows * self.dims[0] / GROUPS, w.constant(0.0f32));
        let own = w.group() * half + w.thread_in_group() * 4;
        w.each(part.steps[0], part.steps[1], 1, |w, step| {
            let sums = self.sums_of(rounding, part.pair, step).at(own);
            for i in 0..half / (4 * THREADS) {
                sums.store_some(w, i * 4 * THREADS, [zero; 4]);
            }
        });
    }
}

/// Sums that a thread has read, by item and four.
pub(crate) struct Sums<'k>(Vec<Vec<[Var<'k, f32>; 4]>>);

impl<'k> Sums<'k> {
    fn new(w: &Scope<'k, Group>) -> Self {
        Sums((0..ITEMS).map(|_| (0..FOURS).map(|_| [(); 4].map(|()| w.var(0.0f32))).collect()).collect())
    }
}
