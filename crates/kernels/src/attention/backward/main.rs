//! The main kernel of the gradients: persistent, one thread that loads and two warpgroups that compute.
//!
//! A block has a tile of keys of one head and walks over all queries that see them, a step of some rows at a time, of
//! all heads that share the keys: d_k and d_v stay in registers to the end and have one order of additions. Keys are
//! the rows of the scores. d_q is added to sums in global memory from registers. What the warpgroups do is in
//! `by_keys` and `by_columns`.

use super::modified::Modified;
use super::tiles::{Of, STEPS, Tiles};
use super::turns::Turns;
use super::{Adds, Features, Order, Share, Tuning, by_columns, by_keys, sent};
use crate::attention::span::Spans;
use crate::attention::work::Unequal;
use fulgurite_core::Exp;
use fulgurite_ptx::{
    BuildError, Builder, Divisor, Half, Kernel, Mailbox, Outbox, Pair, Pipe, Pointer, Swizzle, Target, Tensor,
    TileShape, Val, Warpgroups, Word,
};

/// The main kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_backward", target, |k| {
        let main = Main::new::<T>(k, features, tuning);
        main.load();
        k.role("compute", Warpgroups(2).registers(tuning.registers[0]), |w| match tuning.share {
            Share::Keys if main.outbox.is_some() => sent::compute::<T>(w, &main),
            Share::Keys => by_keys::compute::<T>(w, &main),
            Share::Columns => by_columns::compute::<T>(w, &main),
        });
    })
}

/// The kernel under construction: its parameters and its storage.
pub(super) struct Main<'k> {
    pub k: &'k Builder,
    pub tuning: Tuning,
    pub dims: [u32; 2],
    pub exp: Exp,
    /// Of the mask with queries and keys exchanged.
    pub spans: Spans,
    q: Tensor<'k>,
    d_o: Tensor<'k>,
    key: Tensor<'k>,
    value: Tensor<'k>,
    pub d_k: Tensor<'k>,
    pub d_v: Tensor<'k>,
    /// -LSE in powers of two, and delta.
    numbers: [Pointer<'k, f32>; 2],
    /// Where d_q is summed.
    pub sums: Pointer<'k, f32>,
    counters: Pointer<'k, u32>,
    /// In a fixed order: who may add when.
    pub turns: Option<Turns<'k>>,
    /// Steps from one head of queries to the next.
    pub steps: Val<'k, u32>,
    /// Heads of queries for each head of keys.
    pub group: Val<'k, u32>,
    /// Heads of keys.
    pub heads: Divisor<'k>,
    pub tiles: Tiles<'k>,
    pub modified: Option<Modified<'k>>,
    pub scale_log2: Val<'k, f32>,
    pub scale: Val<'k, f32>,
    pub queries: Pipe<'k>,
    /// Stages of d_o, in step with those of q.
    pub outputs: Pipe<'k>,
    pub keys: Pipe<'k>,
    /// Stages of v, in step with those of k.
    pub values: Pipe<'k>,
    pub tickets: Mailbox<'k>,
    /// Where the copy engine adds: what it is to add.
    pub outbox: Option<Outbox<'k>>,
}

impl<'k> Main<'k> {
    fn new<T: Half>(k: &'k Builder, features: &Features, tuning: Tuning) -> Self {
        let ([d, dv], rows, keys) = (features.dims, tuning.rows, tuning.keys());
        let part = |cols| match tuning.share {
            Share::Keys => cols,
            Share::Columns => cols / 2,
        };
        let shape = |rows, cols| tile::<T>(tuning, rows, cols);
        let tensor = |name, shape| match features.ragged.any() {
            true => k.ragged_tensor(name, shape),
            // Axes: element, row, head, batch.
            false => k.tensor(name, shape, 4),
        };
        let result = |cols| TileShape { cols: part(cols), ..shape(64, cols) };
        let [q, d_o] = [("q", d), ("d_o", dv)].map(|(name, cols)| tensor(name, shape(rows, cols)));
        let [key, value] = [("k", d), ("v", dv)].map(|(name, cols)| tensor(name, shape(keys, cols)));
        let [d_k, d_v] = [("d_k", d), ("d_v", dv)].map(|(name, cols)| tensor(name, result(cols)));
        let numbers = ["shift", "delta"].map(|name| k.pointer::<f32>(name));
        let sums = k.pointer::<f32>("sums");
        let counters = k.pointer::<u32>("counters");
        let turns = (features.order == Order::Fixed).then(|| Turns::new(k));
        let [steps, group] = ["steps", "group"].map(|name| k.param::<u32>(name));
        let heads = k.divisor("heads");
        let tiles = match features.ragged.any() {
            true => Tiles::Unequal(Unequal::of(k, features.ragged, 1, &STEPS)),
            false => Tiles::equal(k),
        };
        let modified = Modified::new(k, &features.modified, features.ragged.any());
        let [scale_log2, scale] = ["scale_log2", "scale"].map(|name| k.param::<f32>(name));

        let queries = k.pipe_with_numbers("q", tuning.depth, &[shape(rows, d)], rows);
        // A stage is filled before that of q, and given back before the role goes on.
        let outputs = k.pipe_with_numbers("d_o", tuning.depth, &[shape(rows, dv)], rows).in_step(&queries);
        let [keys, values] =
            [("k", d), ("v", dv)].map(|(name, cols)| k.pipe(name, tuning.key_depth, &[shape(keys, cols)]));
        let values = values.in_step(&keys);
        let tickets = k.mailbox("tiles", tuning.key_depth, tiles.words()).in_step(&keys);
        let outbox = (tuning.adds == Adds::Engine).then(|| k.outbox("d_q", 2, 64 * tuning.cols(d)).in_step(&queries));
        Main {
            k,
            tuning,
            dims: features.dims,
            exp: features.exp,
            spans: Spans::of(&features.mask).transposed(),
            q,
            d_o,
            key,
            value,
            d_k,
            d_v,
            numbers,
            sums,
            counters,
            turns,
            steps,
            group,
            heads,
            tiles,
            modified,
            scale_log2,
            scale,
            queries,
            outputs,
            keys,
            values,
            tickets,
            outbox,
        }
    }

    /// The role that loads.
    fn load(&self) {
        let (tuning, rows) = (self.tuning, self.tuning.rows);
        self.k.role("load", Warpgroups(1).registers(tuning.registers[1]), |w| {
            // First, so that where they stand takes no registers of the thread that loads.
            self.turns.iter().for_each(|turns| turns.keep(w, self));
            if let Some(outbox) = &self.outbox {
                (0..2).for_each(|group| w.one_thread_of_warp(2 + group, |t| outbox.keep(t, group)));
            }
            w.one_thread(|t| {
                let zero = t.constant(0u32);
                // In a fixed order a tile waits for those before it: none belongs to a block that may not have begun.
                let tile = match &self.turns {
                    Some(_) => t.var(self.counters.fetch_add(t, 0, 1)),
                    None => t.var(t.block()),
                };
                let walk = self.start_walk(t);
                t.repeat(|t, leave| {
                    let more = self.seek(t, walk.as_ref(), tile.get());
                    leave.when(!more);
                    let work = self.find(t, walk.as_ref(), tile.get());
                    // Asked for early: the answer is used after this tile's loads.
                    let ticket = self.turns.is_none().then(|| self.counters.fetch_add(t, 0, 1));
                    let [first, end] = work.steps;
                    let step = t.var(first);
                    let left = t.var((end - first) * self.group);
                    let head = t.var(work.head * self.group);
                    // Where the rows of this head begin in the LSE and delta.
                    let row = t.var(self.steps_before(&work) * rows);
                    let started = t.var(false);
                    t.repeat(|t, leave| {
                        let first_row = step.get() * rows;
                        let at = |of| self.at(of, &work, [zero, first_row, head.get()]);
                        let number = row.get() + first_row;
                        let [shift, delta] = self.numbers.map(|numbers| numbers.at(number));
                        self.outputs.put(t, |t, stage| {
                            stage.load(t, stage.tile(0), &self.d_o, &at(Of::DO));
                            stage.load_numbers(t, delta);
                        });
                        self.queries.put(t, |t, stage| {
                            stage.load(t, stage.tile(0), &self.q, &at(Of::Q));
                            stage.load_numbers(t, shift);
                        });
                        // After the first queries, which need not wait until the tile before has left.
                        t.when(!started.get(), |t| {
                            self.tickets.put(t, &work.message());
                            let at = |of| self.at(of, &work, [zero, work.tile * tuning.keys(), work.head]);
                            self.values.put(t, |t, stage| stage.load(t, stage.tile(0), &self.value, &at(Of::V)));
                            self.keys.put(t, |t, stage| stage.load(t, stage.tile(0), &self.key, &at(Of::K)));
                        });
                        started.set(true);
                        if let Some(turns) = &self.turns {
                            turns.post(t, &work, row.get() / rows + step.get(), step.get());
                        }
                        left.set(left.get() - 1);
                        step.set(step.get() + 1);
                        t.when(step.get().eq(end), |_| {
                            step.set(first);
                            head.set(head.get() + 1);
                            row.set(row.get() + self.steps * rows);
                        });
                        leave.when(left.get().eq(0));
                    });
                    match ticket {
                        Some(ticket) => {
                            // As many tickets as tiles are drawn, for each block's first tile is its number: the last resets
                            // the counter.
                            if let Tiles::Equal { tiles, .. } = &self.tiles {
                                t.when(ticket.eq(tiles.tiles - 1), |t| self.counters.store(t, 0, 0));
                            }
                            tile.set(ticket + t.blocks());
                        }
                        // Late: whoever comes first goes on first, and nobody waits for a tile that somebody keeps.
                        None => tile.set(self.counters.fetch_add(t, 0, 1)),
                    }
                });
                self.tickets.put(t, &[]);
                self.turns.iter().for_each(|turns| turns.post_end(t));
            });
        });
    }
}

/// A tile of q, k, v or d_o: where warpgroups share columns, half a row must be whole chunks.
pub(super) fn tile<T: Half>(tuning: Tuning, rows: u32, cols: u32) -> TileShape {
    let shape = TileShape::new(T::NUMBER, rows, cols);
    match tuning.share {
        Share::Columns if !(cols / 2).is_multiple_of(shape.chunk()) => TileShape { swizzle: Swizzle::B64, ..shape },
        _ => shape,
    }
}
