//! Runs before the main kernel: delta and the LSE of each row, and zeros where d_q is summed first.
//!
//! A warp has sixteen rows. delta is the diagonal of o d_o^T, computed by the tensor cores sixteen columns at a time, just as
//! the main kernel sums d_p. If one key has all the weight, the two must cancel to the last bit, however large the keys are.
//!
//! Rows are padded to whole steps of the main kernel. In padding, and in rows without keys, the LSE is set so that every
//! probability is 0, and delta is 0 whatever d_o holds.

use crate::attention::backward::tensors::RowArgs;
use crate::attention::backward::{BackwardConfig, Features, KernelShape};
use crate::params::{Params, Program};
use crate::parts::schedule::{SequenceArgs, Sides};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{BuildError, Cta, Divisor, Half, Kernel, Pair, Pointer, Scope, Target, Val, Word};
use std::f32::consts::LOG2_E;

/// Rows of a CTA, which is one warp.
pub const ROWS: u32 = 16;

/// Neighbouring queries of a head in a warp: f32 values of eight rows fill a sector. Steps of the main kernel are multiples of
/// eight.
const EIGHT: u32 = 8;

/// Columns that four lanes load of a row, eight each: two steps of the tensor cores.
const PART: u32 = 32;
/// Parts that are loaded before the first of them is used.
const AHEAD: usize = 2;

/// A launch.
pub(crate) struct PrepareCall {
    pub o: RowArgs,
    pub d_o: RowArgs,
    pub lse: Span,
    pub d_lse: Option<Span>,
    pub shift: Span,
    pub delta: Span,
    pub sums: Span,
    pub counters: Span,
    /// Padded rows of all heads.
    pub all_rows: u32,
    /// Rows whose sums of d_q are zeroed.
    pub sum_rows: u32,
    /// Rows of a head in the LSE.
    pub lse_rows: u32,
    /// Elements of a row of o.
    pub value_dim: u32,
    /// Counters to zero.
    pub words: u32,
    /// Marks to zero: four words each.
    pub marks: Span,
    pub mark_fours: u32,
    pub heads: u32,
    /// Padded rows of a head.
    pub rows: u32,
    pub sequences: SequenceArgs,
}

/// The kernel, without the arguments of its launches, for a problem whose sizes are not known.
pub fn kernel<T: Half>(target: Target, features: &Features, config: BackwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(program::<T>(target, features, &KernelShape::plain(features, config))?.into_kernel())
}

/// Writes delta and -LSE log2(e) of rows in the order batch, eight queries, head, query. Zeroes sums of d_q, counters and
/// marks.
pub(crate) fn program<T: Half>(
    target: Target,
    features: &Features,
    shape: &KernelShape,
) -> Result<Program<PrepareCall>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("attention_backward_prepare", target, |p| {
        let prepare = Prepare::<T>::declare(p, features, shape);
        p.builder().threads(32, |w| {
            let first = prepare.zero(w);
            // As the tensor cores want it: four lanes have a row, and the row eight below.
            let [lane_row, lane_col] = [w.lane() / 4, w.lane() & 3];
            let own = [0, 8].map(|below| prepare.row(w, first + lane_row + below));
            let products = prepare.products(w, &own, lane_col);
            prepare.write(w, own, products, [lane_row, lane_col]);
        });
    })
}

/// A tensor in memory, and its strides of batch, row and head, in pairs of elements.
type Strided<'k, T> = (Pointer<'k, Pair<T>>, [Val<'k, u32>; 3]);

/// The parameters.
struct Prepare<'k, T> {
    /// Elements of a row of d_q, and of o, as the products see them.
    dims: [u32; 2],
    /// Queries of a step of the main kernel.
    step_rows: u32,
    packed: bool,
    /// o and d_o.
    tensors: [Strided<'k, T>; 2],
    lse: Pointer<'k, f32>,
    d_lse: Option<Pointer<'k, f32>>,
    shift: Pointer<'k, f32>,
    delta: Pointer<'k, f32>,
    sums: Pointer<'k, f32>,
    counters: Pointer<'k, u32>,
    all_rows: Val<'k, u32>,
    sum_rows: Val<'k, u32>,
    lse_rows: Val<'k, u32>,
    value_dim: Val<'k, u32>,
    words: Val<'k, u32>,
    marks: Pointer<'k, u32>,
    mark_fours: Val<'k, u32>,
    heads: Divisor<'k>,
    rows: Divisor<'k>,
    sides: Option<Sides<'k>>,
}

impl<'k, T: Half> Prepare<'k, T>
where
    Pair<T>: Word,
{
    fn declare(p: &Params<'k, PrepareCall>, features: &Features, shape: &KernelShape) -> Self {
        let o = p.pointer("o", |call| call.o.span);
        let d_o = p.pointer("d_o", |call| call.d_o.span);
        let lse = p.pointer("lse", |call| call.lse);
        let d_lse = features.d_lse.then(|| {
            p.pointer("d_lse", |call| call.d_lse.expect("bug in fulgurite: the gradient of the LSE is not given"))
        });
        let shift = p.pointer("shift", |call| call.shift);
        let delta = p.pointer("delta", |call| call.delta);
        let sums = p.pointer("sums", |call| call.sums);
        let counters = p.pointer("counters", |call| call.counters);
        let all_rows = p.u32("all_rows", |call| call.all_rows);
        let sum_rows = p.u32("sum_rows", |call| call.sum_rows);
        let lse_rows = p.u32("lse_rows", |call| call.lse_rows);
        let value_dim = p.u32("value_dim", |call| call.value_dim);
        let words = p.u32("words", |call| call.words);
        let marks = p.pointer("marks", |call| call.marks);
        let mark_fours = p.u32("mark_fours", |call| call.mark_fours);
        let heads = p.divisor("heads", |call| call.heads);
        let rows = p.divisor("rows", |call| call.rows);
        let sides =
            features.ragged.any().then(|| Sides::declare(p, features.ragged, 0, |call: &PrepareCall| &call.sequences));
        let o_strides = RowArgs::declare_strides(p, "o", |call: &PrepareCall| &call.o);
        let d_o_strides = RowArgs::declare_strides(p, "d_o", |call: &PrepareCall| &call.d_o);
        Prepare {
            dims: shape.dims,
            step_rows: shape.config.rows,
            packed: features.ragged.packed,
            tensors: [(o, o_strides), (d_o, d_o_strides)],
            lse,
            d_lse,
            shift,
            delta,
            sums,
            counters,
            all_rows,
            sum_rows,
            lse_rows,
            value_dim,
            words,
            marks,
            mark_fours,
            heads,
            rows,
            sides,
        }
    }

    /// Zeroes counters, marks and the sums of the warp's rows. Returns the first row.
    fn zero(&self, w: &Scope<'k, Cta>) -> Val<'k, u32> {
        let d = self.dims[0];
        // There are fewer words than threads (`plan::properties` checks it).
        let thread = w.cta().mul_add(32, w.thread());
        w.when(thread.lt(self.words), |w| self.counters.store(w, thread, 0));
        let none = w.constant(0u32);
        w.each(thread, self.mark_fours, w.ctas() * 32, |w, four| self.marks.store_some(w, four * 4, [none; 4]));
        // The last rows go first: the first rows, which the main kernel needs first, are then still in the L2 cache.
        let first = (w.ctas() - 1 - w.cta()) * ROWS;
        let zero = w.constant(0.0f32);
        // Rows have another order among the sums, which does not matter to zeros.
        let to = self.sums.at_wide(first.mul_wide(d));
        let summed = (self.sum_rows - first.min(self.sum_rows)).min(ROWS) * d;
        w.each(w.lane() * 4, summed, 4 * 32, |w, i| to.store_some(w, i, [zero; 4]));
        first
    }

    /// A row by its number among the padded rows of all heads.
    fn row(&self, w: &Scope<'k, Cta>, row: Val<'k, u32>) -> LaneRow<'k, T> {
        let Prepare { heads, rows, step_rows, packed, .. } = *self;
        let [eight, head] = heads.div_rem(row / EIGHT);
        let rest = eight * EIGHT + row % EIGHT;
        // The sequence and its first row, the query and the number of queries in the sequence, and where the padded rows of the
        // head begin.
        let (batch, start, query, q_len, padded) = match &self.sides {
            Some(sides) => {
                let batch = sides.of_step(w, rest / step_rows, step_rows);
                let [start, room] = sides.room(w, 0, batch);
                let query = rest - sides.first_step(w, batch, step_rows) * step_rows;
                (batch, start, query, sides.used(w, 0, batch, room), head.mul_wide(rows.value()))
            }
            None => {
                let [batch, query] = rows.div_rem(rest);
                let padded = (batch * heads.value() + head).mul_wide(rows.value());
                (batch, w.constant(0u32), query, self.lse_rows, padded)
            }
        };
        let memory = self.tensors.map(|(from, [of_batch, of_row, of_head])| {
            let of_sequence = if packed { start.mul_wide(of_row) } else { batch.mul_wide(of_batch) };
            from.at_wide(of_sequence + query.mul_wide(of_row) + head.mul_wide(of_head))
        });
        let here = row.lt(self.all_rows);
        let head_row = if packed { head } else { batch * heads.value() + head };
        LaneRow {
            here,
            inside: here & query.lt(q_len),
            memory,
            query,
            lse: head_row.mul_wide(self.lse_rows) + start.to_u64(),
            padded: padded + if self.sides.is_some() { rest } else { query }.to_u64(),
        }
    }

    /// The products of o with d_o of the upper rows, and with d_o of the lower rows.
    fn products(
        &self,
        w: &Scope<'k, Cta>,
        own: &[LaneRow<'k, T>; 2],
        lane_col: Val<'k, u32>,
    ) -> [[Val<'k, f32>; 4]; 2] {
        let mut products = [[w.constant(0.0f32); 4]; 2];
        let parts: Vec<u32> = (0..self.dims[1].div_ceil(PART)).collect();
        let first_lanes = lane_col.lt(2);
        for ahead in parts.chunks(AHEAD) {
            let four = || [(); 4].map(|()| w.var(Pair::<T>::from_bits(0)));
            // By part and row, of o and of d_o.
            let words: Vec<_> = ahead.iter().map(|_| [[four(), four()], [four(), four()]]).collect();
            for (r, row) in own.iter().enumerate() {
                for (part, words) in ahead.iter().zip(&words) {
                    let col = lane_col * 8 + *part * PART;
                    w.when(row.inside & col.lt(self.value_dim), |w| {
                        for (from, to) in row.memory.iter().zip(&words[r]) {
                            let words = from.load_some::<_, 4>(w, col / 2);
                            to.iter().zip(words).for_each(|(to, word)| to.set(word));
                        }
                    });
                }
            }
            for words in words {
                // The first two lanes have the first step of a part, the others the second: each exchanges half of its
                // columns. The assignment of columns to lanes is arbitrary as long as o and d_o use the same.
                let [[upper, d_upper], [lower, d_lower]] = words.map(|row| {
                    row.map(|words| {
                        let [a, b, c, d] = words.map(|word| word.get());
                        let [x, y] = [(c, a), (d, b)].map(|(c, a)| w.exchange_pair(first_lanes.select(c, a), 2));
                        let own = |ours, theirs| first_lanes.select::<Pair<T>>(ours, theirs);
                        [[own(a, x), own(b, y)], [own(x, c), own(y, d)]]
                    })
                });
                for step in 0..2 {
                    let left = [upper[step][0], lower[step][0], upper[step][1], lower[step][1]];
                    for (sum, right) in products.iter_mut().zip([d_upper[step], d_lower[step]]) {
                        *sum = w.warp_product::<T>(left, right, *sum);
                    }
                }
            }
        }
        products
    }

    /// Writes delta and the LSE of the rows whose diagonal element the lane has.
    fn write(
        &self,
        w: &Scope<'k, Cta>,
        own: [LaneRow<'k, T>; 2],
        products: [[Val<'k, f32>; 4]; 2],
        [lane_row, lane_col]: [Val<'k, u32>; 2],
    ) {
        // A lane has two neighbouring columns of a product.
        w.when(lane_col.eq(lane_row / 2), |w| {
            let odd = (lane_row & 1).eq(1);
            for (r, row) in own.into_iter().enumerate() {
                w.when(row.here, |w| {
                    let log = w.var(f32::NEG_INFINITY);
                    let total = w.var(odd.select(products[r][2 * r + 1], products[r][2 * r]));
                    w.when(row.inside, |w| {
                        log.set(self.lse.at_wide(row.lse).load(w, row.query));
                        if let Some(d_lse) = self.d_lse {
                            total.set(total.get() - d_lse.at_wide(row.lse).load(w, row.query));
                        }
                    });
                    let empty = log.get().eq(f32::NEG_INFINITY);
                    let power = log.get() * -LOG2_E;
                    self.shift.at_wide(row.padded).store(w, 0, empty.select::<f32>(f32::NEG_INFINITY, power));
                    self.delta.at_wide(row.padded).store(w, 0, empty.select::<f32>(0.0, total.get()));
                });
            }
        });
    }
}

/// A row of a lane.
struct LaneRow<'k, T> {
    /// Whether there is a row.
    here: Val<'k, bool>,
    /// Whether the row is a query, not padding.
    inside: Val<'k, bool>,
    /// The row's elements in o and in d_o.
    memory: [Pointer<'k, Pair<T>>; 2],
    query: Val<'k, u32>,
    /// Offset of its head's rows in the LSE.
    lse: Val<'k, u64>,
    /// Index among the padded rows of all heads.
    padded: Val<'k, u64>,
}
