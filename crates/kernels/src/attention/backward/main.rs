//! The main kernel of the gradients: persistent, one thread that loads and two warpgroups that compute.
//!
//! A block has a tile of keys of one head and walks over all queries that see them, a step of some rows at a time, of
//! all heads that share the keys: d_k and d_v stay in registers to the end and have one order of additions. Keys are
//! the rows of the scores. d_q is added to sums in global memory from registers. What the warpgroups do is in
//! `by_keys` and `by_columns`.

use super::turns::Turns;
use super::{Features, Order, Share, Tuning, by_columns, by_keys};
use crate::attention::span::{Lengths, Spans};
use crate::exp::exp2;
use fulgurite_core::Exp;
use fulgurite_ptx::{
    Acc, BuildError, Builder, Divisor, Fragment, Group, Half, Kernel, Mailbox, Numbers, Pair, Pipe, Pointer, Scope,
    Swizzle, Target, Tensor, TileShape, Val, Var, Warpgroups, Word,
};

/// A tile of keys, as the loading thread hands it out.
#[derive(Clone, Copy)]
pub(super) struct Work<'k> {
    /// Its number in its head.
    pub tile: Val<'k, u32>,
    /// Head of keys.
    pub head: Val<'k, u32>,
    pub batch: Val<'k, u32>,
    /// Steps of queries that see it, from the first to past the last: none means that there are no more tiles.
    pub steps: [Val<'k, u32>; 2],
}

impl<'k> Work<'k> {
    fn message(self) -> [Val<'k, u32>; 5] {
        [self.tile, self.head, self.batch, self.steps[0], self.steps[1]]
    }
    pub fn read(message: &[Val<'k, u32>]) -> Self {
        let [tile, head, batch, first, end, ..] = *message else {
            panic!("bug in fulgurite: a message of {} numbers", message.len())
        };
        Work { tile, head, batch, steps: [first, end] }
    }
}

/// The main kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_backward", target, |k| {
        let main = Main::new::<T>(k, features, tuning);
        main.load();
        k.role("compute", Warpgroups(2).registers(tuning.registers[0]), |w| match tuning.share {
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
    sums: Pointer<'k, f32>,
    counters: Pointer<'k, u32>,
    /// In a fixed order: who may add when.
    pub turns: Option<Turns<'k>>,
    /// Steps of a head.
    steps: Val<'k, u32>,
    pub k_len: Val<'k, u32>,
    tiles: Val<'k, u32>,
    pairs: Val<'k, u32>,
    /// The first key, and the first query, that the copy engine is told of: others are read as zeros.
    first_key: Val<'k, u32>,
    first_query: Val<'k, u32>,
    /// Heads of queries for each head of keys.
    group: Val<'k, u32>,
    /// Heads of keys; tiles of a band, pairs in it, and in the last.
    heads: Divisor<'k>,
    band: Divisor<'k>,
    order: Divisor<'k>,
    rest: Divisor<'k>,
    pub scale_log2: Val<'k, f32>,
    pub scale: Val<'k, f32>,
    diagonals: [Val<'k, i32>; 2],
    pub queries: Pipe<'k>,
    /// Stages of d_o, in step with those of q.
    pub outputs: Pipe<'k>,
    pub keys: Pipe<'k>,
    pub tickets: Mailbox<'k>,
}

impl<'k> Main<'k> {
    fn new<T: Half>(k: &'k Builder, features: &Features, tuning: Tuning) -> Self {
        let ([d, dv], rows, keys) = (features.dims, tuning.rows, tuning.keys());
        let part = |cols| match tuning.share {
            Share::Keys => cols,
            Share::Columns => cols / 2,
        };
        let shape = |rows, cols| tile::<T>(tuning, rows, cols);
        // Axes: element, row, head, batch.
        let tensor = |name, shape| k.tensor(name, shape, 4);
        let result = |cols| TileShape { cols: part(cols), ..shape(64, cols) };
        let [q, d_o] = [("q", d), ("d_o", dv)].map(|(name, cols)| tensor(name, shape(rows, cols)));
        let [key, value] = [("k", d), ("v", dv)].map(|(name, cols)| tensor(name, shape(keys, cols)));
        let [d_k, d_v] = [("d_k", d), ("d_v", dv)].map(|(name, cols)| tensor(name, result(cols)));
        let numbers = ["shift", "delta"].map(|name| k.pointer::<f32>(name));
        let sums = k.pointer::<f32>("sums");
        let counters = k.pointer::<u32>("counters");
        let turns = (features.order == Order::Fixed).then(|| Turns::new(k));
        let [steps, k_len, tiles, pairs] = ["steps", "k_len", "tiles", "pairs"].map(|name| k.param::<u32>(name));
        let [first_key, first_query] = ["first_key", "first_query"].map(|name| k.param::<u32>(name));
        let group = k.param::<u32>("group");
        let [heads, band, order, rest] = ["heads", "band", "order", "rest"].map(|name| k.divisor(name));
        let [scale_log2, scale] = ["scale_log2", "scale"].map(|name| k.param::<f32>(name));
        let diagonals = ["bottom_right", "top_left"].map(|name| k.param::<i32>(name));

        let queries = k.pipe_with_numbers("q", tuning.depth, &[shape(rows, d)], rows);
        // A stage is filled before that of q, and given back before the role goes on.
        let outputs = k.pipe_with_numbers("d_o", tuning.depth, &[shape(rows, dv)], rows).in_step(&queries);
        let keys = k.pipe("kv", tuning.key_depth, &[shape(keys, d), shape(keys, dv)]);
        let tickets = k.mailbox("tiles", tuning.key_depth, 8).in_step(&keys);
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
            k_len,
            tiles,
            pairs,
            first_key,
            first_query,
            group,
            heads,
            band,
            order,
            rest,
            scale_log2,
            scale,
            diagonals,
            queries,
            outputs,
            keys,
            tickets,
        }
    }

    /// Lengths of the exchanged mask: all rows of the steps are queries.
    #[track_caller]
    pub fn lengths(&self) -> Lengths<'k> {
        let [bottom_right, top_left] = self.diagonals;
        let queries = (self.steps * self.tuning.rows).to_i32();
        Lengths { k: self.k_len.to_i32(), bottom_right, top_left }.transposed(queries)
    }

    /// Tiles in bands of `order` (head, batch) pairs (`rest` in the last band); in a band the first keys, which under a
    /// causal mask most queries see, go first. In a fixed order neighbours go the other way round.
    fn find(&self, tile: Val<'k, u32>) -> Work<'k> {
        let [number, tile] = self.band.div_rem(tile);
        let first = number * self.order.value();
        let count = Divisor::select((first + self.order.value()).le(self.pairs), self.order, self.rest);
        let [place, across] = count.div_rem(tile);
        let [batch, head] = self.heads.div_rem(first + across);
        let tile = if self.turns.is_some() { self.in_turn(place) } else { place };
        Work { tile, head, batch, steps: self.steps_of(tile) }
    }

    /// Steps of queries that see a tile.
    pub fn steps_of(&self, tile: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let keys = self.tuning.keys();
        let start = tile * keys;
        let last = (start + (keys - 1)).min(self.k_len - 1);
        self.spans.blocks(start.to_i32(), last.to_i32(), self.tuning.rows, self.lengths())
    }

    /// The first head of queries of a tile among all sequences.
    #[track_caller]
    fn first_head(&self, work: &Work<'k>) -> Val<'k, u32> {
        (work.batch * self.heads.value() + work.head) * self.group
    }

    /// The role that loads.
    fn load(&self) {
        let (tuning, rows) = (self.tuning, self.tuning.rows);
        self.k.role("load", Warpgroups(1).registers(tuning.registers[1]), |w| {
            // First, so that where they stand takes no registers of the thread that loads.
            self.turns.iter().for_each(|turns| turns.keep(w, self));
            w.one_thread(|t| {
                let zero = t.constant(0u32);
                // In a fixed order a tile waits for those before it: none belongs to a block that may not have begun.
                let tile = match &self.turns {
                    Some(_) => t.var(self.counters.fetch_add(t, 0, 1)),
                    None => t.var(t.block()),
                };
                t.repeat(|t, leave| {
                    let more = tile.get().lt(self.tiles);
                    leave.when(!more);
                    let work = self.find(tile.get());
                    // Asked for early: the answer is used after this tile's loads.
                    let ticket = self.turns.is_none().then(|| self.counters.fetch_add(t, 0, 1));
                    let [first, end] = work.steps;
                    let step = t.var(first);
                    let left = t.var((end - first) * self.group);
                    let head = t.var(work.head * self.group);
                    // Where the rows of this head begin in the LSE and delta.
                    let row = t.var(self.first_head(&work) * (self.steps * rows));
                    let started = t.var(false);
                    t.repeat(|t, leave| {
                        let first_row = step.get() * rows;
                        let at = [zero, first_row - self.first_query, head.get(), work.batch];
                        let number = row.get() + first_row;
                        let [shift, delta] = self.numbers.map(|numbers| numbers.at(number));
                        self.outputs.put(t, |t, stage| {
                            stage.load(t, stage.tile(0), &self.d_o, &at);
                            stage.load_numbers(t, delta);
                        });
                        self.queries.put(t, |t, stage| {
                            stage.load(t, stage.tile(0), &self.q, &at);
                            stage.load_numbers(t, shift);
                        });
                        // After the first queries, which need not wait until the tile before has left.
                        t.when(!started.get(), |t| {
                            self.tickets.put(t, &work.message());
                            self.keys.put(t, |t, stage| {
                                let at = [zero, work.tile * tuning.keys() - self.first_key, work.head, work.batch];
                                stage.load(t, stage.tile(0), &self.key, &at);
                                stage.load(t, stage.tile(1), &self.value, &at);
                            });
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
                    // As many tickets as tiles are drawn (each block's first tile is its number): the last resets the counter.
                    match ticket {
                        Some(ticket) => {
                            t.when(ticket.eq(self.tiles - 1), |t| self.counters.store(t, 0, 0));
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

/// Where a warpgroup stands among the steps of its tile, and where it adds its part of d_q.
pub(super) struct Walk<'a, 'k> {
    main: &'a Main<'k>,
    step: Var<'k, u32>,
    left: Var<'k, u32>,
    /// Address of this thread's part of the sums.
    place: Var<'k, u64>,
}

impl<'a, 'k> Walk<'a, 'k> {
    pub fn new(w: &Scope<'k, Group>, main: &'a Main<'k>) -> Self {
        Walk { main, step: w.var(0u32), left: w.var(0u32), place: w.var(0u64) }
    }

    /// To the first step of a tile. Sums lie as accumulators do: [head][step][warpgroup][eight columns][thread][4].
    #[track_caller]
    pub fn start(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let (main, [first, end]) = (self.main, work.steps);
        let (rows, d) = (main.tuning.rows, main.dims[0]);
        self.left.set((end - first) * main.group);
        self.step.set(first);
        let step = main.first_head(work) * main.steps + first;
        let thread = w.group() * (64 * main.tuning.cols(d)) + w.thread_in_group() * 4;
        self.place.set(main.sums.at_wide(step.mul_wide(rows * d)).at(thread).address());
    }

    /// After the last tile.
    #[track_caller]
    pub fn end(&self, w: &Scope<'k, Group>) {
        if let Some(turns) = &self.main.turns {
            turns.wait(w);
            turns.pass(w);
        }
    }

    /// The first query of the step.
    #[track_caller]
    pub fn first_query(&self) -> Val<'k, i32> {
        (self.step.get() * self.main.tuning.rows).to_i32()
    }

    /// One step less to come; whether it was the last.
    #[track_caller]
    pub fn last(&self) -> Val<'k, bool> {
        self.left.set(self.left.get() - 1);
        self.left.get().eq(0)
    }

    /// To the next step; after the last of a head to the first of the next head.
    #[track_caller]
    pub fn forward(&self, w: &Scope<'k, Group>) {
        let main = self.main;
        let step_bytes = main.tuning.rows * main.dims[0] * 4;
        self.step.set(self.step.get() + 1);
        self.place.set(self.place.get() + u64::from(step_bytes));
        // Read again, not kept: registers are short.
        let steps = || Work::read(&main.tickets.again(w)).steps;
        let end = if main.spans.bounded_right() { steps()[1] } else { main.steps };
        w.when(self.step.get().eq(end), |_| {
            let [first, _] = steps();
            self.step.set(first);
            // Over the steps that see no key of this tile.
            self.place.set(self.place.get() + (main.steps - end + first).mul_wide(step_bytes));
        });
    }

    /// Adds a part of d_q, counted in fours of each thread; parts come in order.
    #[track_caller]
    pub fn add(&self, w: &Scope<'k, Group>, d_q: &Acc<'k>, part: std::ops::Range<u32>) {
        let elements: Vec<_> = d_q.elements().collect();
        let whole = elements.len() as u32 / 4;
        let [begins, ends] = [part.start == 0 && part.end > 0, part.end == whole && part.start < whole];
        if let (true, Some(turns)) = (begins, &self.main.turns) {
            turns.wait(w);
        }
        let to = Pointer::<f32>::at_address(self.place.get());
        for four in part {
            let at = 4 * four as usize;
            to.add_four(w, four * 512, std::array::from_fn(|i| elements[at + i]));
        }
        if let (true, Some(turns)) = (ends, &self.main.turns) {
            turns.pass(w);
        }
    }
}

/// p of the scores in `s`, where they were; `after` is called after each eight columns.
///
/// They are replaced in place: values of their own would be as good, but the assembler then finds no registers for the
/// products (C7511).
pub(super) fn probabilities<'k>(
    w: &Scope<'k, Group>,
    main: &Main<'k>,
    s: &Acc<'k>,
    shift: Numbers<'k>,
    after: impl Fn(u32),
) {
    let elements: Vec<_> = s.elements().collect();
    for eight in 0..s.cols() / 8 {
        let shift = shift.pair(w, eight);
        for i in 0..4 {
            let at = 4 * eight as usize + i;
            s.set(at, exp2(main.exp, Acc::col_of(at), elements[at].mul_add(main.scale_log2, shift[i % 2])));
        }
        after(eight);
    }
}

/// d_z = p (d_p - delta), where d_p was; `after` is called after each eight columns.
pub(super) fn score_gradients<'k>(
    w: &Scope<'k, Group>,
    [p, d_p]: [&Acc<'k>; 2],
    delta: Numbers<'k>,
    after: impl Fn(u32),
) {
    let (p, elements): (Vec<_>, Vec<_>) = (p.elements().collect(), d_p.elements().collect());
    for eight in 0..d_p.cols() / 8 {
        let delta = delta.pair(w, eight);
        for i in 0..4 {
            let at = 4 * eight as usize + i;
            d_p.set(at, (elements[at] - delta[i % 2]) * p[at]);
        }
        after(eight);
    }
}

/// Rounds a thread's four elements of the `eight`-th eight columns.
pub(super) fn pack<'k, T: Half>(to: &Fragment<'k, T>, eight: u32, from: &Acc<'k>)
where
    Pair<T>: Word,
{
    let from: Vec<_> = from.elements().collect();
    for pair in [2 * eight as usize, 2 * eight as usize + 1] {
        to.set_pair(pair, from[2 * pair], from[2 * pair + 1]);
    }
}

/// Zeros.
pub(super) fn clear(acc: &Acc<'_>) {
    (0..acc.elements().count()).for_each(|i| acc.set(i, 0.0));
}
