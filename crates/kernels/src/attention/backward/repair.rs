//! The non-finite path of backward: computes rows of d_q, d_k and d_v again that are infinite or NaN, without what they do
//! not see.
//!
//! The main kernel multiplies whole tiles. A hidden score has a gradient of 0, but 0 times an infinite or NaN element of q,
//! k, v or d_o is NaN. The kernels that write results raise a flag when they meet a sum that is not finite, which costs next
//! to nothing. This kernel runs last. It ends at once if the flag is down. Otherwise it looks for rows that are not finite,
//! and sums them again over the pairs of query and key that see each other. That is slow, and only such data pays for it.

use crate::attention::backward::modifiers::ModifierGradients;
use crate::attention::backward::{Features, KernelShape};
use crate::params::{Lens, Params, Program};
use crate::parts::mask::{Lengths, Limits, Spans};
use crate::parts::modifier::{AuxArgs, Function, Modifiers, Modify, Parameters, Place, Tanh};
use crate::parts::nonfinite::PlainRows;
use crate::parts::schedule::{SequenceArgs, Sides};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{
    Acc, BuildError, Divisor, Group, Half, Pair, Pointer, RowView, Scope, Target, Val, Var, Warpgroups, Word,
};
use std::f32::consts::LOG2_E;

/// The word of the counters that is not 0 if some result is not finite.
pub(crate) const FLAG: u32 = 3;
/// Rows of a tile.
pub(crate) const ROWS: u32 = 64;
/// Columns of a result that are summed at a time.
const CHUNK: u32 = 64;

/// A launch.
pub(crate) struct Call {
    pub counters: Span,
    /// q, k, v, d_o, d_q, d_k and d_v.
    pub rows: [PlainRows; 7],
    pub lse: Span,
    /// delta of padded rows ([`prepare`](crate::attention::backward::prepare)).
    pub delta: Span,
    /// Rows of a head in the LSE.
    pub lse_rows: u32,
    /// Padded rows of a head.
    pub padded: u32,
    pub batch: u32,
    /// Heads of q, and of k and v.
    pub heads: [u32; 2],
    /// Queries and keys of a sequence, at most.
    pub lens: [u32; 2],
    /// Elements of a row of q and k, and of v and o.
    pub dims: [u32; 2],
    pub sequences: SequenceArgs,
    pub aux: Vec<AuxArgs>,
    pub scale_log2: f32,
    pub scale: f32,
}

/// A tensor of rows, with strides in pairs of elements.
#[derive(Clone, Copy)]
struct Rows<'k, T> {
    pointer: Pointer<'k, Pair<T>>,
    row: Val<'k, u64>,
    head: Val<'k, u64>,
    batch: Val<'k, u64>,
}

impl<'k, T: Half> Rows<'k, T>
where
    Pair<T>: Word,
{
    fn declare(p: &Params<'k, Call>, name: &str, at: impl Lens<Call, PlainRows>) -> Self {
        Rows {
            pointer: p.array(name, move |call| at(call).span),
            row: p.u64(&format!("{name}_row"), move |call| at(call).row),
            head: p.u64(&format!("{name}_head"), move |call| at(call).head),
            batch: p.u64(&format!("{name}_batch"), move |call| at(call).batch),
        }
    }
}

/// The sequence of a tile.
#[derive(Clone, Copy)]
struct Sequence<'k> {
    batch: Val<'k, u32>,
    /// First rows of q and of k, if sequences are packed.
    starts: Option<[Val<'k, u32>; 2]>,
    /// Queries and keys that there is memory for, and those in use.
    rooms: [Val<'k, u32>; 2],
    lens: [Val<'k, u32>; 2],
    /// Padded rows before its first query in a head, and padded rows of all heads before it.
    first_padded: Val<'k, u32>,
}

/// Which rows a tile has. The other side is walked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Queries,
    Keys,
}

/// The parameters.
struct Repair<'k, T> {
    features: Features,
    step_rows: u32,
    counters: Pointer<'k, u32>,
    q: Rows<'k, T>,
    k: Rows<'k, T>,
    v: Rows<'k, T>,
    d_o: Rows<'k, T>,
    d_q: Rows<'k, T>,
    d_k: Rows<'k, T>,
    d_v: Rows<'k, T>,
    lse: Pointer<'k, f32>,
    delta: Pointer<'k, f32>,
    lse_rows: Val<'k, u32>,
    padded: Val<'k, u32>,
    batch: Val<'k, u32>,
    /// Heads, and tiles of a head, of q and of k.
    heads: [Divisor<'k>; 2],
    tiles: [Divisor<'k>; 2],
    group: Val<'k, u32>,
    lens: [Val<'k, u32>; 2],
    dims: [Val<'k, u32>; 2],
    sides: Option<Sides<'k>>,
    parameters: Option<Parameters<'k>>,
    scale_log2: Val<'k, f32>,
    scale: Val<'k, f32>,
}

/// The kernel.
pub(crate) fn program<T: Half>(
    target: Target,
    features: &Features,
    shape: &KernelShape,
) -> Result<Program<Call>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("attention_backward_repair", target, |p| {
        let repair = Repair::<T>::declare(p, features, shape);
        p.builder().role("repair", Warpgroups(1), |w| {
            w.when(repair.counters.load(w, FLAG).ne(0), |w| {
                SideRole::new(w, &repair, Side::Queries).run(w);
                SideRole::new(w, &repair, Side::Keys).run(w);
            });
        });
    })
}

impl<'k, T: Half> Repair<'k, T>
where
    Pair<T>: Word,
{
    fn declare(p: &Params<'k, Call>, features: &Features, shape: &KernelShape) -> Self {
        let counters = p.pointer("counters", |call: &Call| call.counters);
        let q = Rows::declare(p, "q", |call| &call.rows[0]);
        let k = Rows::declare(p, "k", |call| &call.rows[1]);
        let v = Rows::declare(p, "v", |call| &call.rows[2]);
        let d_o = Rows::declare(p, "d_o", |call| &call.rows[3]);
        let d_q = Rows::declare(p, "d_q", |call| &call.rows[4]);
        let d_k = Rows::declare(p, "d_k", |call| &call.rows[5]);
        let d_v = Rows::declare(p, "d_v", |call| &call.rows[6]);
        let lse = p.pointer("lse", |call| call.lse);
        let delta = p.pointer("delta", |call| call.delta);
        let lse_rows = p.u32("lse_rows", |call| call.lse_rows);
        let padded = p.u32("padded", |call| call.padded);
        let batch = p.u32("sequence_count", |call| call.batch);
        let heads = [p.divisor("heads", |call| call.heads[0]), p.divisor("kv_heads", |call| call.heads[1])];
        let tiles = [
            p.divisor("q_tiles", |call| call.lens[0].div_ceil(ROWS).max(1)),
            p.divisor("k_tiles", |call| call.lens[1].div_ceil(ROWS).max(1)),
        ];
        let group = p.u32("group", |call| call.heads[0] / call.heads[1]);
        let lens = [p.u32("q_len", |call| call.lens[0]), p.u32("k_len", |call| call.lens[1])];
        let dims = [p.u32("dim", |call| call.dims[0]), p.u32("value_dim", |call| call.dims[1])];
        let sides = features.ragged.any().then(|| Sides::declare(p, features.ragged, 0, |call: &Call| &call.sequences));
        let modifiers = &features.modifiers;
        let parameters =
            (!modifiers.is_empty()).then(|| Parameters::declare(p, &modifiers.modifiers, |call: &Call| &call.aux));
        let scale_log2 = p.f32("scale_log2", |call| call.scale_log2);
        let scale = p.f32("scale", |call| call.scale);
        Repair {
            features: features.clone(),
            step_rows: shape.config.rows,
            counters,
            q,
            k,
            v,
            d_o,
            d_q,
            d_k,
            d_v,
            lse,
            delta,
            lse_rows,
            padded,
            batch,
            heads,
            tiles,
            group,
            lens,
            dims,
            sides,
            parameters,
            scale_log2,
            scale,
        }
    }

    fn sequence(&self, w: &Scope<'k, Group>, batch: Val<'k, u32>) -> Sequence<'k> {
        let Some(sides) = &self.sides else {
            let first_padded = batch * self.heads[0].value() * self.padded;
            return Sequence { batch, starts: None, rooms: self.lens, lens: self.lens, first_padded };
        };
        let [[q_start, q_room], [k_start, k_room]] = [0, 1].map(|side| sides.room(w, side, batch));
        let lens = [sides.used(w, 0, batch, q_room), sides.used(w, 1, batch, k_room)];
        let starts = self.features.ragged.packed.then_some([q_start, k_start]);
        let first_padded = sides.first_step(w, batch, self.step_rows) * self.step_rows;
        Sequence { batch, starts, rooms: [q_room, k_room], lens, first_padded }
    }

    /// A row of a tensor of a sequence: `side` 0 for queries, 1 for keys.
    fn at(
        &self,
        rows: &Rows<'k, T>,
        of: &Sequence<'k>,
        side: usize,
        [row, head]: [Val<'k, u32>; 2],
    ) -> Pointer<'k, Pair<T>> {
        let part = |n: Val<'k, u32>, stride: Val<'k, u64>| n.to_u64().mul_wide_64(stride);
        let sequence = match of.starts {
            Some(starts) => part(starts[side], rows.row),
            None => part(of.batch, rows.batch),
        };
        rows.pointer.at_wide(sequence + part(row, rows.row) + part(head, rows.head))
    }

    /// The LSE of a query in powers of two, and its delta.
    fn numbers(&self, w: &Scope<'k, Group>, of: &Sequence<'k>, query: Val<'k, u32>, head: Val<'k, u32>) -> Numbers<'k> {
        let row = match of.starts {
            Some([start, _]) => head.mul_wide(self.lse_rows) + (start + query).to_u64(),
            None => (of.batch * self.heads[0].value() + head).mul_wide(self.lse_rows) + query.to_u64(),
        };
        let padded = head.mul_wide(self.padded) + (of.first_padded + query).to_u64();
        Numbers { lse: self.lse.at_wide(row).load(w, 0) * LOG2_E, delta: self.delta.at_wide(padded).load(w, 0) }
    }
}

/// What every score of a query needs.
#[derive(Clone, Copy)]
struct Numbers<'k> {
    lse: Val<'k, f32>,
    delta: Val<'k, f32>,
}

/// Masks and modifiers of one side, and sums of some columns.
struct SideRole<'a, 'k, T> {
    repair: &'a Repair<'k, T>,
    side: Side,
    limits: Limits<'k>,
    modify: Option<Modify<'a, 'k>>,
    derivative: Option<Function<'a, 'k>>,
    sums: Acc<'k>,
}

/// A tile of rows, and the head that the other side is read from.
#[derive(Clone, Copy)]
struct Tile<'k> {
    sequence: Sequence<'k>,
    /// Head of the rows' own tensors.
    head: Val<'k, u32>,
    /// The thread's rows.
    rows: [Val<'k, u32>; 2],
}

/// A result and what its terms are multiplied by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    DQ,
    DK,
    DV,
}

impl<'a, 'k, T: Half> SideRole<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, repair: &'a Repair<'k, T>, side: Side) -> Self {
        let spans = Spans::of(&repair.features.mask);
        let limits = match side {
            Side::Queries => Limits::new(w, &spans),
            Side::Keys => Limits::of_keys(w, &spans.transposed()),
        };
        let ModifierGradients { modifiers, derivative, .. } = &repair.features.modifiers;
        let modifiers = Modifiers { transposed: side == Side::Keys, ..modifiers.clone() };
        let (scale, parameters) = (repair.scale, repair.parameters.as_ref());
        let modify = parameters.map(|parameters| Modify::unfolded(w, &modifiers, parameters, scale, Tanh::Polynomial));
        let derivative = derivative.as_ref().zip(parameters);
        let derivative =
            derivative.map(|(program, parameters)| Function::new(w, program, &modifiers, parameters, scale));
        SideRole { repair, side, limits, modify, derivative, sums: w.accumulators(CHUNK) }
    }

    /// The number of the side: 0 for queries, 1 for keys.
    fn number(&self) -> usize {
        self.side as usize
    }

    fn run(&self, w: &Scope<'k, Group>) {
        let (repair, side) = (self.repair, self.number());
        let items = repair.batch * repair.heads[side].value() * repair.tiles[side].value();
        w.each(w.block(), items, w.blocks(), |w, item| {
            let [rest, tile] = repair.tiles[side].div_rem(item);
            let [batch, head] = repair.heads[side].div_rem(rest);
            let sequence = repair.sequence(w, batch);
            let first = tile * ROWS;
            let rows = [0, 1].map(|i| first + Acc::first_row(w) + Acc::row_offset(i));
            let tile = Tile { sequence, head, rows };
            let results: &[Of] = if self.side == Side::Queries { &[Of::DQ] } else { &[Of::DK, Of::DV] };
            w.when(first.lt(sequence.rooms[side]), |w| {
                self.set_limits(w, &sequence, first);
                results.iter().for_each(|of| self.result(w, &tile, *of));
            });
        });
    }

    fn set_limits(&self, w: &Scope<'k, Group>, of: &Sequence<'k>, first: Val<'k, u32>) {
        let [q, k] = of.lens.map(|n| n.to_i32());
        let lengths = Lengths { k, bottom_right: k - q, top_left: q.literal(0) };
        match self.side {
            Side::Queries => self.limits.set(w, first.to_i32(), lengths),
            Side::Keys => self.limits.set_keys(w, first.to_i32(), k, lengths.transposed(q)),
        }
    }

    fn set_head(&self, w: &Scope<'k, Group>, tile: &Tile<'k>, q_head: Val<'k, u32>) {
        let [q_len, k_len] = tile.sequence.lens.map(|n| n.to_i32());
        let rows = tile.rows.map(|row| row.to_i32());
        let place = Place { batch: tile.sequence.batch, heads: [q_head; 2], rows, q_len, k_len };
        self.modify.iter().for_each(|modify| modify.set(w, place));
        self.derivative.iter().for_each(|function| function.set(w, place));
    }

    /// Computes the tile's rows of a result again that are not finite.
    fn result(&self, w: &Scope<'k, Group>, tile: &Tile<'k>, of: Of) {
        let (repair, side) = (self.repair, self.number());
        let (to, dim) = match of {
            Of::DQ => (&repair.d_q, repair.dims[0]),
            Of::DK => (&repair.d_k, repair.dims[0]),
            Of::DV => (&repair.d_v, repair.dims[1]),
        };
        let room = tile.sequence.rooms[side];
        let inside = tile.rows.map(|row| row.lt(room));
        let to = tile.rows.map(|row| repair.at(to, &tile.sequence, side, [row.min(room - 1), tile.head]));
        let total = [w.var(0.0f32), w.var(0.0f32)];
        w.each(Acc::first_col(w), dim, Acc::PERIOD, |w, col| {
            for (i, to) in to.iter().enumerate() {
                // Not past the last row: another warp may write the row that is read instead.
                w.when(inside[i], |w| {
                    let [a, b] = to.load(w, col / 2).split().map(|x| x.widen());
                    total[i].set(total[i].get() + a + b);
                });
            }
        });
        let bad = [0, 1].map(|i: usize| {
            let own = !(total[i].get() * 0.0).eq(0.0) & inside[i];
            Acc::reduce_row(w, own.select::<f32>(1.0, 0.0), |a, b| a + b).gt(0.0)
        });
        let some = w.any(bad[0] | bad[1]);
        w.when(some, |w| {
            w.each(0u32, dim, CHUNK, |w, first_col| {
                (0..self.sums.elements().count()).for_each(|i| self.sums.set(i, 0.0));
                self.sum(w, tile, of, (first_col, dim));
                let sums: Vec<_> = self.sums.elements().collect();
                let scale = if of == Of::DV { w.constant(1.0f32) } else { repair.scale };
                for (i, to) in to.iter().enumerate() {
                    for period in 0..CHUNK / Acc::PERIOD {
                        let col = first_col + Acc::first_col(w) + Acc::PERIOD * period;
                        let [a, b] = [0, 1].map(|half| sums[Acc::index(i, period as usize, half)] * scale);
                        w.when(bad[i] & col.lt(dim), |w| to.store(w, col / 2, a.pair_with::<T>(b)));
                    }
                }
            });
        });
    }

    /// Sums some columns of a result over everything that the rows see.
    fn sum(&self, w: &Scope<'k, Group>, tile: &Tile<'k>, of: Of, columns: (Val<'k, u32>, Val<'k, u32>)) {
        let (repair, len) = (self.repair, tile.sequence.lens[self.number()]);
        match self.side {
            Side::Queries => {
                let rows = tile.rows.map(|row| row.min(len.max(1) - 1));
                let numbers = rows.map(|row| repair.numbers(w, &tile.sequence, row, tile.head));
                let other = tile.head / repair.group;
                self.set_head(w, tile, tile.head);
                w.each(0u32, tile.sequence.lens[1], Acc::LANES, |w, first| {
                    self.four(w, tile, of, (first, other, Some(numbers)), columns);
                });
            }
            Side::Keys => w.each(0u32, repair.group, 1u32, |w, member| {
                let other = tile.head * repair.group + member;
                self.set_head(w, tile, other);
                w.each(0u32, tile.sequence.lens[0], Acc::LANES, |w, first| {
                    self.four(w, tile, of, (first, other, None), columns);
                });
            }),
        }
    }

    /// Adds the terms of as many rows of the other side as lanes share rows: each lane computes the weights of one.
    fn four(
        &self,
        w: &Scope<'k, Group>,
        tile: &Tile<'k>,
        of: Of,
        (first, head, numbers): (Val<'k, u32>, Val<'k, u32>, Option<[Numbers<'k>; 2]>),
        (first_col, dim): (Val<'k, u32>, Val<'k, u32>),
    ) {
        let (repair, side) = (self.repair, 1 - self.number());
        let len = tile.sequence.lens[side];
        let own = Acc::lane_in_row(w);
        let inside = |n: Val<'k, u32>| n.min(len - 1);
        let weights = self.weights(w, tile, of, ((first + own).lt(len), inside(first + own), head), numbers);
        let from = match of {
            Of::DQ => &repair.k,
            Of::DK => &repair.q,
            Of::DV => &repair.d_o,
        };
        for other in 0..Acc::LANES {
            let weights: Vec<_> = weights
                .iter()
                .map(|weight| weight.map(|x| if other == 0 { x.get() } else { w.exchange(x.get(), other) }))
                .collect();
            let from = repair.at(from, &tile.sequence, side, [inside(first + (own ^ other)), head]);
            let seen: Vec<_> = weights.iter().map(|[seen, _]| seen.gt(0.0)).collect();
            w.when(seen[0] | seen[1], |w| {
                for period in 0..CHUNK / Acc::PERIOD {
                    let col = first_col + Acc::first_col(w) + Acc::PERIOD * period;
                    // Columns past the end of a row are not stored: read the last ones instead.
                    let halves = from.load(w, col.min(dim - 2) / 2).split();
                    for (i, [_, weight]) in weights.iter().enumerate() {
                        for (half, x) in halves.into_iter().enumerate() {
                            let at = Acc::index(i, period as usize, half);
                            let sum = self.sums.elements().nth(at).expect("bug in fulgurite: counted above");
                            let more = weight.mul_add(x.widen(), sum);
                            self.sums.set(at, seen[i].select::<f32>(more, sum));
                        }
                    }
                }
            });
        }
    }

    /// For each of the thread's rows and the lane's `other` row: 1 if they see each other, else 0, and what the other row is
    /// multiplied by.
    fn weights(
        &self,
        w: &Scope<'k, Group>,
        tile: &Tile<'k>,
        of: Of,
        (exists, other, head): (Val<'k, bool>, Val<'k, u32>, Val<'k, u32>),
        numbers: Option<[Numbers<'k>; 2]>,
    ) -> Vec<[Var<'k, f32>; 2]> {
        let repair = self.repair;
        let result: Vec<_> = (0..Acc::ROWS).map(|_| [w.var(0.0f32), w.var(0.0f32)]).collect();
        for (i, [seen_var, weight]) in result.iter().enumerate() {
            // Rows that are not in use see nothing.
            let used = tile.rows[i].lt(tile.sequence.lens[self.number()]);
            let seen = self.limits.sees(w, i, other.to_i32(), None) & exists & used;
            w.when(seen, |w| {
                let [query, key] = match self.side {
                    Side::Queries => [[tile.rows[i], tile.head], [other, head]],
                    Side::Keys => [[other, head], [tile.rows[i], tile.head]],
                };
                let numbers = match numbers {
                    Some(numbers) => numbers[i],
                    None => repair.numbers(w, &tile.sequence, other, head),
                };
                let at = |rows: &Rows<'k, T>, side: usize| {
                    repair.at(rows, &tile.sequence, side, if side == 0 { query } else { key })
                };
                if self.modify.is_none() {
                    // Without modifiers, every pair that intervals let see each other has a probability.
                    let mut known = numbers.lse.eq(numbers.lse);
                    if of != Of::DV {
                        known = known & numbers.delta.eq(numbers.delta);
                    }
                    seen_var.set(1.0);
                    weight.set(f32::NAN);
                    return w.when(known, |w| {
                        let [seen, value] = self.weight(w, (i, other), of, numbers, &at);
                        seen_var.set(seen);
                        weight.set(value);
                    });
                }
                let [seen, value] = self.weight(w, (i, other), of, numbers, &at);
                seen_var.set(seen);
                weight.set(value);
            });
        }
        result
    }

    /// The same for the thread's `i`-th row and a row that intervals let it see; `at` finds their rows in a tensor.
    fn weight(
        &self,
        w: &Scope<'k, Group>,
        (i, other): (usize, Val<'k, u32>),
        of: Of,
        numbers: Numbers<'k>,
        at: &dyn Fn(&Rows<'k, T>, usize) -> Pointer<'k, Pair<T>>,
    ) -> [Val<'k, f32>; 2] {
        let (repair, column) = (self.repair, other.to_i32());
        let raw = dot(w, [at(&repair.q, 0), at(&repair.k, 1)], repair.dims[0]);
        let score = self.modify.as_ref().map_or(raw, |modify| modify.one(w, raw, i, column, None));
        // A score of -inf hides its key.
        let seen = score.eq(f32::NEG_INFINITY).select::<f32>(0.0, 1.0);
        let p = (score.mul_add(repair.scale_log2, -numbers.lse)).exp2();
        if of == Of::DV {
            return [seen, p];
        }
        let d_p = dot(w, [at(&repair.d_o, 0), at(&repair.v, 1)], repair.dims[1]);
        let d_m = (d_p - numbers.delta) * p;
        let slope = self.derivative.as_ref().map(|function| function.one(w, raw, i, column));
        [seen, slope.map_or(d_m, |slope| d_m * slope)]
    }
}

/// The product of two rows of `dim` elements.
fn dot<'k, T: Half>(w: &Scope<'k, Group>, rows: [Pointer<'k, Pair<T>>; 2], dim: Val<'k, u32>) -> Val<'k, f32>
where
    Pair<T>: Word,
{
    let sum = w.var(0.0f32);
    w.each(0u32, dim / 2, 4u32, |w, first| {
        let [a, b] = rows.map(|row| row.load_some::<_, 4>(w, first));
        for (a, b) in a.into_iter().zip(b) {
            for (a, b) in a.split().into_iter().zip(b.split()) {
                sum.set(a.widen().mul_add(b.widen(), sum.get()));
            }
        }
    });
    sum.get()
}
