//! Runs last: computes marked rows of d_q, d_k and d_v again (`marks`), without hidden keys and queries.
//!
//! Without marks a CTA reads one word and ends. Where the GPU can, the launch overlaps the end of the kernel before.
//!
//! A CTA has a marked row at a time. A thread computes p and d_z of one of 128 visible queries or keys; then it adds
//! two columns of all of them. Products are plain multiply-adds in f32, in a fixed order, so results are
//! deterministic. A row that sees NaN is NaN after its first keys or queries, and the CTA leaves it. That is slow, and only
//! data that is not finite pays for it.
//!
//! Masks and modifiers are those of the main kernel: rows are keys, and columns queries. A score of -inf hides its key.

use crate::attention::backward::finish::ResultArgs;
use crate::attention::backward::marks::EIGHT;
use crate::attention::backward::modifiers::ModifierGradients;
use crate::attention::backward::tensors::RowArgs;
use crate::attention::backward::{BackwardConfig, Features, KernelShape};
use crate::params::{Lens, Params, Program};
use crate::parts::mask::{KeyRange, Lengths, Spans};
use crate::parts::modifier::{AuxArgs, Function, Modify, Parameters, Tanh, TilePosition};
use crate::parts::results::ResultType;
use crate::parts::schedule::{SequenceArgs, Sides};
use fulgurite_core::Side;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{
    BuildError, Divisor, Group, GroupBarrier, Half, Kernel, Pair, Pointer, RowAcc, Scope, Shared, Target, Val, Var,
    Warpgroups, Word,
};
use std::marker::PhantomData;

/// Threads of a CTA: one warpgroup. Each has two columns of a result, of which a row has 256 at most.
const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;
/// Elements that a thread loads at a time, as pairs.
const VECTOR: u32 = 8;
/// The first compute capability whose kernels can wait for the kernel before.
const OVERLAPPING: u32 = 90;

/// A launch.
pub(crate) struct RepairCall {
    /// q, k, v, d_o.
    pub rows: [RowArgs; 4],
    /// d_q, d_k, d_v.
    pub results: [ResultArgs; 3],
    pub shift: Span,
    pub delta: Span,
    /// Queries and keys of a sequence, or of the whole batch if it is packed.
    pub lengths: [u32; 2],
    /// Rows of d_q, and of d_k and d_v, in all heads.
    pub result_rows: [u32; 2],
    /// Query heads and key/value heads.
    pub heads: [u32; 2],
    /// Padded rows of a head.
    pub padded_rows: u32,
    pub sequences: SequenceArgs,
    pub aux: Vec<AuxArgs>,
    pub scale_log2: f32,
    pub scale: f32,
}

/// The kernel, without the arguments of its launches, for a problem whose sizes are not known.
pub fn kernel<T: Half>(target: Target, features: &Features, config: BackwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(program::<T>(target, features, &KernelShape::plain(features, config))?.into_kernel())
}

/// Computes marked rows again.
pub(crate) fn program<T: Half>(
    target: Target,
    features: &Features,
    shape: &KernelShape,
) -> Result<Program<RepairCall>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("attention_backward_repair", target, |p| {
        let repair = Repair::<T>::declare(p, features, shape);
        p.builder().prefer_registers();
        p.builder().role("repair", Warpgroups(1), |w| {
            if target.arch.sm >= OVERLAPPING {
                w.wait_for_previous_grid();
            }
            w.when_rarely(repair.some.load(w, 0).ne(0), |w| repair.run(w));
        });
    })
}

/// Index of a side in pairs of queries and keys.
fn index_of(side: Side) -> usize {
    usize::from(side == Side::Key)
}

/// A tensor of rows.
struct Rows<'k> {
    memory: Val<'k, u64>,
    /// Strides of batch, row and head, in words of 32 bits.
    strides: [Val<'k, u32>; 3],
}

/// A gradient, and its marks.
struct Gradient<'k> {
    rows: Rows<'k>,
    /// Elements of a row.
    dim: Val<'k, u32>,
    words: Pointer<'k, u32>,
}

/// A sequence, by its first rows of packed tensors and its lengths in use.
struct Sequence<'k> {
    batch: Val<'k, u32>,
    starts: [Val<'k, u32>; 2],
    lengths: [Val<'k, u32>; 2],
    /// First of its padded rows of a head.
    padded: Val<'k, u32>,
}

/// A marked row: its head, and its number in its sequence.
struct MarkedRow<'k> {
    sequence: Sequence<'k>,
    head: Val<'k, u32>,
    number: Val<'k, u32>,
}

/// Arrays in shared memory, one element for each thread if not said otherwise.
struct Exchange<'k> {
    /// Marks of d_q, or of d_k and of d_v.
    words: [Shared<'k, u32>; 2],
    /// d_z and p of an element.
    weights: [Shared<'k, f32>; 2],
    /// Whether it is visible.
    seen: Shared<'k, u32>,
    /// By warp, whether some marked sum is not NaN.
    alive: Shared<'k, u32>,
}

/// The parameters and shared memory.
struct Repair<'k, T> {
    features: Features,
    results: ResultType,
    /// Queries of a step of the main kernel.
    step_rows: u32,
    some: Pointer<'k, u32>,
    /// q, k, v, d_o.
    inputs: [Rows<'k>; 4],
    /// d_q, d_k, d_v.
    gradients: [Gradient<'k>; 3],
    shift: Pointer<'k, f32>,
    delta: Pointer<'k, f32>,
    lengths: [Divisor<'k>; 2],
    result_rows: [Val<'k, u32>; 2],
    heads: [Divisor<'k>; 2],
    /// Query heads of each key/value head.
    group: Divisor<'k>,
    padded_rows: Val<'k, u32>,
    sides: Option<Sides<'k>>,
    parameters: Parameters<'k>,
    scale_log2: Val<'k, f32>,
    scale: Val<'k, f32>,
    exchange: Exchange<'k>,
    number: PhantomData<T>,
}

/// The modifiers of single elements.
struct Element<'a, 'k> {
    modify: Modify<'a, 'k, RowAcc<'k>>,
    derivative: Option<Function<'a, 'k>>,
}

impl<'k> Rows<'k> {
    fn declare<C: 'static>(p: &Params<'k, C>, name: &str, args: impl Lens<C, RowArgs>) -> Self {
        let memory = p.pointer::<u32>(name, move |call| args(call).span).address();
        Rows { memory, strides: RowArgs::declare_strides(p, name, args) }
    }

    /// A row of a sequence.
    fn at<E: Word>(
        &self,
        packed: bool,
        (sequence, side): (&Sequence<'k>, Side),
        [head, row]: [Val<'k, u32>; 2],
    ) -> Pointer<'k, E> {
        let [of_batch, of_row, of_head] = self.strides;
        let before = match packed {
            true => sequence.starts[index_of(side)].mul_wide(of_row),
            false => sequence.batch.mul_wide(of_batch),
        };
        let words = Pointer::<u32>::at_address(self.memory);
        Pointer::at_address(words.at_wide(before + head.mul_wide(of_head) + row.mul_wide(of_row)).address())
    }
}

impl<'k, T: Half> Repair<'k, T>
where
    Pair<T>: Word,
{
    fn declare(p: &Params<'k, RepairCall>, features: &Features, shape: &KernelShape) -> Self {
        let input = |(name, i): (&str, usize)| Rows::declare(p, name, move |call: &RepairCall| &call.rows[i]);
        let inputs = [("q", 0), ("k", 1), ("v", 2), ("d_o", 3)].map(input);
        let some = p.array("some_marked", |call| call.results[0].marks.some);
        let gradient = |(name, i): (&str, usize)| Gradient {
            rows: Rows::declare(p, name, move |call: &RepairCall| &call.results[i].to),
            dim: p.u32(&format!("{name}_dim"), move |call| call.results[i].dim),
            words: p.array(&format!("{name}_marks"), move |call| call.results[i].marks.words),
        };
        let gradients = [("d_q", 0), ("d_k", 1), ("d_v", 2)].map(gradient);
        let shift = p.pointer("shift", |call| call.shift);
        let delta = p.pointer("delta", |call| call.delta);
        let lengths = [("q_len", 0), ("k_len", 1)].map(|(name, i)| p.divisor(name, move |call| call.lengths[i]));
        let result_rows =
            [("all_q_rows", 0), ("all_k_rows", 1)].map(|(name, i)| p.u32(name, move |call| call.result_rows[i]));
        let heads = [("q_heads", 0), ("kv_heads", 1)].map(|(name, i)| p.divisor(name, move |call| call.heads[i]));
        let group = p.divisor("group", |call| call.heads[0] / call.heads[1].max(1));
        let padded_rows = p.u32("padded_rows", |call| call.padded_rows);
        let sides =
            features.ragged.any().then(|| Sides::declare(p, features.ragged, 0, |call: &RepairCall| &call.sequences));
        let parameters = Parameters::declare(p, &features.modifiers.modifiers, |call: &RepairCall| &call.aux);
        let scale_log2 = p.f32("scale_log2", |call| call.scale_log2);
        let scale = p.f32("scale", |call| call.scale);
        let k = p.builder();
        let exchange = Exchange {
            words: ["words", "more_words"].map(|name| k.shared(name, THREADS)),
            weights: ["d_z", "p"].map(|name| k.shared(name, THREADS)),
            seen: k.shared("seen", THREADS),
            alive: k.shared("alive", WARPS),
        };
        Repair {
            features: features.clone(),
            results: shape.results,
            step_rows: shape.config.rows,
            some,
            inputs,
            gradients,
            shift,
            delta,
            lengths,
            result_rows,
            heads,
            group,
            padded_rows,
            sides,
            parameters,
            scale_log2,
            scale,
            exchange,
            number: PhantomData,
        }
    }

    fn packed(&self) -> bool {
        self.features.ragged.packed
    }

    /// The gradients of a side.
    fn of_side(&self, side: Side) -> &[Gradient<'k>] {
        if side == Side::Query { &self.gradients[..1] } else { &self.gradients[1..] }
    }

    fn run(&self, w: &Scope<'k, Group>) {
        let barrier = w.group_barrier();
        for side in [Side::Query, Side::Key] {
            let element = (side, &self.element(w));
            let (all, apart, thread) = (self.result_rows[index_of(side)], w.ctas(), w.thread_in_group());
            // Marked rows are often neighbours, so neighbours go to different CTAs.
            w.each(w.cta(), all, apart * THREADS, |w, first| {
                let own = first + thread * apart;
                for (gradient, words) in self.of_side(side).iter().zip(self.exchange.words) {
                    let word = w.var(0u32);
                    w.when(own.lt(all), |w| word.set(gradient.words.load(w, own)));
                    words.store(w, thread, word.get());
                }
                w.sync_group(&barrier);
                w.each(0u32, THREADS, 1u32, |w, n| {
                    let words: Vec<_> = (self.of_side(side).iter().zip(self.exchange.words))
                        .map(|(_, words)| words.load(w, n))
                        .collect();
                    let marked = words.iter().copied().reduce(|a, b| a | b).unwrap_or(w.constant(0u32));
                    w.when(marked.ne(0), |w| self.row(w, element, (first + n * apart, &words), &barrier));
                });
                w.sync_group(&barrier);
            });
        }
    }

    fn element(&self, w: &Scope<'k, Group>) -> Element<'_, 'k> {
        let ModifierGradients { modifiers, derivative, .. } = &self.features.modifiers;
        let function = |program| Function::of_view::<RowAcc<'k>>(w, program, modifiers, &self.parameters, self.scale);
        Element {
            modify: Modify::of_view(w, modifiers, &self.parameters, self.scale, Tanh::Polynomial),
            derivative: derivative.as_ref().map(function),
        }
    }

    /// The sequence, the head and the number of a row among those of all heads.
    fn marked_row(&self, w: &Scope<'k, Group>, side: Side, index: Val<'k, u32>) -> MarkedRow<'k> {
        let of = index_of(side);
        let [rest, row] = self.lengths[of].div_rem(index);
        let zero = w.constant(0u32);
        let whole = self.lengths.map(Divisor::value);
        let Some(sides) = &self.sides else {
            let [batch, head] = self.heads[of].div_rem(rest);
            let sequence = Sequence { batch, starts: [zero; 2], lengths: whole, padded: zero };
            return MarkedRow { sequence, head, number: row };
        };
        let (batch, head, number) = match self.packed() {
            true => {
                // Rows of no sequence are in one that has no queries and keys in use.
                let (found, first) = (w.var(sides.count() - 1), w.var(row));
                w.each(0u32, sides.count(), 1u32, |w, sequence| {
                    let [start, room] = sides.room(w, of, sequence);
                    let inside = start.le(row) & row.lt(start + room);
                    found.set(inside.select::<u32>(sequence, found.get()));
                    first.set(inside.select::<u32>(start, first.get()));
                });
                (found.get(), rest, row - first.get())
            }
            false => {
                let [batch, head] = self.heads[of].div_rem(rest);
                (batch, head, row)
            }
        };
        let rooms = [0, 1].map(|side| sides.room(w, side, batch));
        let lengths = [0, 1].map(|side| sides.used(w, side, batch, rooms[side][1]));
        let padded = sides.first_step(w, batch, self.step_rows) * self.step_rows;
        let starts = if self.packed() { rooms.map(|room| room[0]) } else { [zero; 2] };
        MarkedRow { sequence: Sequence { batch, starts, lengths, padded }, head, number }
    }

    /// The visible rows of the other side.
    fn visible(&self, side: Side, row: &MarkedRow<'k>) -> [Val<'k, u32>; 2] {
        let [q, k] = row.sequence.lengths.map(|n| n.to_i32());
        let (spans, lengths) =
            (Spans::of(&self.features.mask), Lengths { k, bottom_right: k - q, top_left: q.literal(0) });
        let number = row.number.to_i32();
        let (KeyRange { start, end }, [own, other]) = match side {
            Side::Query => (spans.keys(number, lengths), [q, k]),
            Side::Key => (spans.transposed().keys(number, lengths.transposed(q)), [k, q]),
        };
        let end = number.lt(own).select::<i32>(end.min(other), 0);
        [start, end].map(|bound| bound.max(0).to_u32())
    }

    /// Computes a row again: the elements whose bits are set in `words`, for each gradient of the side.
    fn row(
        &self,
        w: &Scope<'k, Group>,
        (side, element): (Side, &Element<'_, 'k>),
        (index, words): (Val<'k, u32>, &[Val<'k, u32>]),
        barrier: &GroupBarrier,
    ) {
        let row = self.marked_row(w, side, index);
        let group = self.group.value();
        let heads = match side {
            Side::Query => [row.head, row.head + 1],
            Side::Key => [row.head * group, row.head * group + group],
        };
        let column = w.thread_in_group() * 2;
        let sums: Vec<Sum<'k>> = (self.of_side(side).iter().zip(words))
            .map(|(gradient, word)| Sum {
                wanted: column.lt(gradient.dim) & ((*word >> (column / EIGHT)) & 1).ne(0),
                pair: [(); 2].map(|()| w.var(0.0f32)),
            })
            .collect();
        let ([start, end], alive) = (self.visible(side, &row), w.var(1u32));
        w.each(heads[0], heads[1], 1u32, |w, head| {
            let kv_head = if side == Side::Query { self.group.div_rem(head)[0] } else { row.head };
            let at = w.var(start);
            w.repeat(|w, leave| {
                leave.when(at.get().ge(end) | alive.get().eq(0));
                let part = Part { side, row: &row, heads: [head, kv_head], first: at.get(), end };
                self.weigh(w, element, &part);
                w.sync_group(barrier);
                self.add(w, &part, &sums);
                let lives = w.any(sums.iter().map(Sum::lives).fold(w.constant(false), |a, b| a | b));
                w.when(w.lane().eq(0), |w| {
                    self.exchange.alive.store(w, w.thread_in_group() / 32, lives.select::<u32>(1, 0));
                });
                w.sync_group(barrier);
                let all = (0..WARPS).map(|warp| self.exchange.alive.load(w, warp));
                alive.set(all.fold(w.constant(0u32), |a, b| a | b));
                at.set(at.get() + THREADS);
            });
        });
        for (of, (gradient, sum)) in self.of_side(side).iter().zip(&sums).enumerate() {
            // Only d_v has no factor.
            let is_scaled = side == Side::Query || of == 0;
            let pair = sum.pair.map(|x| if is_scaled { x.get() * self.scale } else { x.get() });
            w.when(sum.wanted, |w| self.store(w, gradient, (side, &row), (column, pair)));
        }
    }

    /// Writes d_z and p of the thread's element of a part to shared memory, and whether it is visible.
    fn weigh(&self, w: &Scope<'k, Group>, element: &Element<'_, 'k>, part: &Part<'_, 'k>) {
        let (thread, other) = (w.thread_in_group(), part.first + w.thread_in_group());
        let (seen, weights) = (w.var(0u32), [(); 2].map(|()| w.var(0.0f32)));
        w.when(other.lt(part.end), |w| {
            let (sequence, [head, kv_head]) = (&part.row.sequence, part.heads);
            let [query, key] = match part.side {
                Side::Query => [part.row.number, other],
                Side::Key => [other, part.row.number],
            };
            let padded = match &self.sides {
                Some(_) => head.mul_wide(self.padded_rows) + (sequence.padded + query).to_u64(),
                None => (sequence.batch * self.heads[0].value() + head).mul_wide(self.padded_rows) + query.to_u64(),
            };
            let [shift, delta] = [self.shift, self.delta].map(|of| of.at_wide(padded).load(w, 0));
            let [q, k, v, d_o] = &self.inputs;
            let of_query = |rows: &Rows<'k>| rows.at(self.packed(), (sequence, Side::Query), [head, query]);
            let of_key = |rows: &Rows<'k>| rows.at(self.packed(), (sequence, Side::Key), [kv_head, key]);
            let [d, dv] = self.features.dims;
            let raw = dot::<T>(w, [of_query(q), of_key(k)], d);
            let d_p = dot::<T>(w, [of_query(d_o), of_key(v)], dv);
            let (score, slope) = element.score(w, raw, (sequence, head), [query, key].map(|n| n.to_i32()));
            let p = score.mul_add(self.scale_log2, shift).exp2();
            let d_m = (d_p - delta) * p;
            let d_z = slope.map_or(d_m, |slope| p.eq(0.0).select::<f32>(d_m, d_m * slope));
            weights[0].set(d_z);
            weights[1].set(p);
            // The shift of a query without keys is -inf.
            let hidden = score.eq(f32::NEG_INFINITY) | shift.eq(f32::NEG_INFINITY);
            seen.set(hidden.select::<u32>(0, 1));
        });
        self.exchange.seen.store(w, thread, seen.get());
        self.exchange.weights.iter().zip(weights).for_each(|(to, x)| to.store(w, thread, x.get()));
    }

    /// Adds the thread's columns of the visible rows of a part, each with its weight.
    fn add(&self, w: &Scope<'k, Group>, part: &Part<'_, 'k>, sums: &[Sum<'k>]) {
        let [q, k, _, d_o] = &self.inputs;
        let [head, kv_head] = part.heads;
        let from: Vec<(&Rows<'k>, Side, Val<'k, u32>)> = match part.side {
            Side::Query => vec![(k, Side::Key, kv_head)],
            Side::Key => vec![(q, Side::Query, head), (d_o, Side::Query, head)],
        };
        let wanted = sums.iter().map(|sum| sum.wanted).fold(w.constant(false), |a, b| a | b);
        // Most warps have no columns of short rows.
        w.when(w.any(wanted), |w| {
            // The thread's columns of the next row, and the distance to the one after it.
            let from: Vec<(Var<'k, u64>, Val<'k, u64>)> = (from.into_iter())
                .map(|(rows, side, head)| {
                    let of = (&part.row.sequence, side);
                    let first = rows.at::<Pair<T>>(self.packed(), of, [head, part.first]).at(w.thread_in_group());
                    (w.var(first.address()), rows.strides[1].mul_wide(4))
                })
                .collect();
            w.each(0u32, (part.end - part.first).min(THREADS), 1u32, |w, n| {
                w.when(self.exchange.seen.load(w, n).ne(0), |w| {
                    for ((sum, (from, _)), weight) in sums.iter().zip(&from).zip(self.exchange.weights) {
                        let weight = weight.load(w, n);
                        w.when(sum.wanted, |w| {
                            let pair = Pointer::<Pair<T>>::at_address(from.get()).load(w, 0).split();
                            for (sum, x) in sum.pair.iter().zip(pair) {
                                sum.set(weight.mul_add(x.widen(), sum.get()));
                            }
                        });
                    }
                });
                from.iter().for_each(|(from, row)| from.set(from.get() + *row));
            });
        });
    }

    /// Stores two neighbouring elements of a row, or adds them to those that are given.
    fn store(
        &self,
        w: &Scope<'k, Group>,
        gradient: &Gradient<'k>,
        (side, row): (Side, &MarkedRow<'k>),
        (column, [a, b]): (Val<'k, u32>, [Val<'k, f32>; 2]),
    ) {
        let (of, position) = ((&row.sequence, side), [row.head, row.number]);
        if !self.results.is_f32() {
            let to = gradient.rows.at::<Pair<T>>(self.packed(), of, position);
            return to.store(w, column / 2, a.pair_with::<T>(b));
        }
        let to = gradient.rows.at::<f32>(self.packed(), of, position);
        let pair = match self.results {
            ResultType::Added => {
                let [x, y] = to.load_some(w, column);
                [x + a, y + b]
            }
            _ => [a, b],
        };
        to.store_some(w, column, pair);
    }
}

/// Two columns of a gradient, and whether they are marked.
struct Sum<'k> {
    wanted: Val<'k, bool>,
    pair: [Var<'k, f32>; 2],
}

impl<'k> Sum<'k> {
    /// Whether a marked sum is not NaN, and may depend on more rows.
    fn lives(&self) -> Val<'k, bool> {
        let [a, b] = self.pair.map(|x| x.get());
        self.wanted & (a.eq(a) | b.eq(b))
    }
}

/// Up to 128 elements of the scores of a marked row, from row `first` of the other side on.
struct Part<'a, 'k> {
    side: Side,
    row: &'a MarkedRow<'k>,
    /// Query head and key/value head.
    heads: [Val<'k, u32>; 2],
    first: Val<'k, u32>,
    /// Past the last visible row.
    end: Val<'k, u32>,
}

impl<'k> Element<'_, 'k> {
    /// The modified score of an element, and its derivative if that is not 1.
    fn score(
        &self,
        w: &Scope<'k, Group>,
        raw: Val<'k, f32>,
        (sequence, head): (&Sequence<'k>, Val<'k, u32>),
        [query, key]: [Val<'k, i32>; 2],
    ) -> (Val<'k, f32>, Option<Val<'k, f32>>) {
        let [q_len, k_len] = sequence.lengths.map(|n| n.to_i32());
        let position = TilePosition { batch: sequence.batch, heads: vec![head], rows: vec![key], q_len, k_len };
        self.modify.set(w, &position);
        self.derivative.iter().for_each(|function| function.set(w, &position));
        let slope = self.derivative.as_ref().map(|function| function.one(w, raw, 0, query));
        (self.modify.one_in_block(w, raw, 0, query, self.modify.block_kind(w, query)), slope)
    }
}

/// The dot product of two rows.
fn dot<'k, T: Half>(w: &Scope<'k, Group>, [a, b]: [Pointer<'k, Pair<T>>; 2], elements: u32) -> Val<'k, f32>
where
    Pair<T>: Word,
{
    let sum = w.var(0.0f32);
    w.each(0u32, elements / 2, VECTOR / 2, |w, at| {
        let [a, b] = [a, b].map(|row| row.load_some::<_, 4>(w, at));
        for (a, b) in a.into_iter().zip(b) {
            for (a, b) in a.split().into_iter().zip(b.split()) {
                sum.set(a.widen().mul_add(b.widen(), sum.get()));
            }
        }
    });
    sum.get()
}
