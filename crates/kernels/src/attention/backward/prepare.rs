//! Before the gradients: delta and the LSE of each row, and zeros where d_q will be summed first.
//!
//! A warp has sixteen rows. delta is the diagonal of o d_o^T by the tensor cores, sixteen columns at a time, as d_p is
//! summed: where one key has all the weight the two must cancel to the last bit, whatever the size of the keys they are
//! multiplied with. Rows are padded to whole steps of the main kernel; in padding and in rows without keys the LSE is
//! set so that every probability is 0, and delta is 0 whatever d_o holds there.

use crate::attention::backward::{BackwardConfig, Features};
use crate::parts::schedule::Sides;
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Pointer, Target, Val, Word};
use std::f32::consts::LOG2_E;

/// Rows of a block, which is one warp: what few read and write together lies together.
pub const ROWS: u32 = 16;

/// Neighbouring queries of a head that a warp has at once, a whole sector of f32. Steps of the main kernel are multiples of it.
const EIGHT: u32 = 8;

/// Columns that four lanes bring of a row, eight each: two steps of the tensor cores. And how many such parts are asked for
/// at once.
const PART: u32 = 32;
const AHEAD: usize = 2;

/// delta and -LSE log2(e) of rows in the order batch, eight queries, head, query; the accumulators of d_q and the counters are
/// zeroed.
pub fn kernel<T: Half>(target: Target, features: &Features, config: BackwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let [d, dv] = features.dims;
    Kernel::build("attention_backward_prepare", target, |k| {
        let [o, d_o] = ["o", "d_o"].map(|name| k.pointer::<Pair<T>>(name));
        let lse = k.pointer::<f32>("lse");
        let d_lse = features.d_lse.then(|| k.pointer::<f32>("d_lse"));
        let [shift, delta, sums] = ["shift", "delta", "sums"].map(|name| k.pointer::<f32>(name));
        let counters = k.pointer::<u32>("counters");
        // Rows of all heads with their padding, those whose sums are zeroed, rows of a head in the LSE.
        let [all_rows, sum_rows, lse_rows, value_dim, words] =
            ["all_rows", "sum_rows", "lse_rows", "value_dim", "words"].map(|name| k.param::<u32>(name));
        let (heads, rows) = (k.divisor("heads"), k.divisor("rows"));
        let sides = features.ragged.any().then(|| Sides::new(k, features.ragged, 0));
        let strides = ["o", "d_o"].map(|t| ["batch", "row", "head"].map(|axis| k.param::<u32>(&format!("{t}_{axis}"))));
        k.threads(32, |w| {
            // There are fewer words than threads: two for each step, which has at least 64 rows, and for each tile that is cut no more
            // than are left.
            let thread = w.block().mul_add(32, w.thread());
            w.when(thread.lt(words), |w| counters.store(w, thread, 0));
            // The last rows first: what the main kernel asks for first is then still in the second-level cache.
            let first = (w.blocks() - 1 - w.block()) * ROWS;
            let zero = w.constant(0.0f32);
            // Rows lie in another order among the sums; for zeros it does not matter.
            let to = sums.at_wide(first.mul_wide(d));
            let summed = (sum_rows - first.min(sum_rows)).min(ROWS) * d;
            w.each(w.lane() * 4, summed, 4 * 32, |w, i| to.store_some(w, i, [zero; 4]));

            // As the tensor cores have it: four lanes for a row and for the one eight below.
            let [lane_row, lane_col] = [w.lane() / 4, w.lane() & 3];
            let packed = features.ragged.packed;
            let own = [0, 8].map(|below| {
                let row = first + lane_row + below;
                let [eight, head] = heads.div_rem(row / EIGHT);
                let rest = eight * EIGHT + row % EIGHT;
                // A sequence, its first row, a query of it and how many it has; where the padded rows of its head begin.
                let (batch, start, query, q_len, padded) = match &sides {
                    Some(sides) => {
                        let batch = sides.of_step(w, rest / config.rows, config.rows);
                        let [start, room] = sides.room(w, 0, batch);
                        let query = rest - sides.first_step(w, batch, config.rows) * config.rows;
                        (batch, start, query, sides.used(w, 0, batch, room), head.mul_wide(rows.value()))
                    }
                    None => {
                        let [batch, query] = rows.div_rem(rest);
                        let padded = (batch * heads.value() + head).mul_wide(rows.value());
                        (batch, w.constant(0u32), query, lse_rows, padded)
                    }
                };
                let memory = [(o, strides[0]), (d_o, strides[1])].map(|(from, [of_batch, of_row, of_head])| {
                    // Strides are in pairs.
                    let of_sequence = if packed { start.mul_wide(of_row) } else { batch.mul_wide(of_batch) };
                    from.at_wide(of_sequence + query.mul_wide(of_row) + head.mul_wide(of_head))
                });
                let here = row.lt(all_rows);
                let place = if packed { head } else { batch * heads.value() + head };
                Row {
                    here,
                    inside: here & query.lt(q_len),
                    memory,
                    query,
                    lse: place.mul_wide(lse_rows) + start.to_u64(),
                    // Among the padded rows of its head.
                    padded: padded + if sides.is_some() { rest } else { query }.to_u64(),
                }
            });

            // Of o with d_o of the upper rows, and of the lower.
            let mut products = [[zero; 4]; 2];
            let parts: Vec<u32> = (0..dv.div_ceil(PART)).collect();
            let first_lanes = lane_col.lt(2);
            for ahead in parts.chunks(AHEAD) {
                let four = || [(); 4].map(|()| w.var(Pair::<T>::from_bits(0)));
                // By part and row, of o and of d_o.
                let words: Vec<_> = ahead.iter().map(|_| [[four(), four()], [four(), four()]]).collect();
                for (r, row) in own.iter().enumerate() {
                    for (part, words) in ahead.iter().zip(&words) {
                        let col = lane_col * 8 + *part * PART;
                        w.when(row.inside & col.lt(value_dim), |w| {
                            for (from, to) in row.memory.iter().zip(&words[r]) {
                                let words = from.load_some::<_, 4>(w, col / 2);
                                to.iter().zip(words).for_each(|(to, word)| to.set(word));
                            }
                        });
                    }
                }
                for words in words {
                    // The first two lanes have the first step of a part, the others the second: each gives half of what it has for
                    // half of the other's. Which of the sixteen a lane has is its own affair, if o and d_o agree.
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
            // Columns of a product are in pairs too.
            w.when(lane_col.eq(lane_row / 2), |w| {
                let odd = (lane_row & 1).eq(1);
                for (r, row) in own.into_iter().enumerate() {
                    w.when(row.here, |w| {
                        let log = w.var(f32::NEG_INFINITY);
                        let total = w.var(odd.select(products[r][2 * r + 1], products[r][2 * r]));
                        w.when(row.inside, |w| {
                            log.set(lse.at_wide(row.lse).load(w, row.query));
                            if let Some(d_lse) = d_lse {
                                total.set(total.get() - d_lse.at_wide(row.lse).load(w, row.query));
                            }
                        });
                        let empty = log.get().eq(f32::NEG_INFINITY);
                        let power = log.get() * -LOG2_E;
                        shift.at_wide(row.padded).store(w, 0, empty.select::<f32>(f32::NEG_INFINITY, power));
                        delta.at_wide(row.padded).store(w, 0, empty.select::<f32>(0.0, total.get()));
                    });
                }
            });
        });
    })
}

/// A row of a lane.
struct Row<'k, T> {
    /// Whether there is one, and whether it is no padding.
    here: Val<'k, bool>,
    inside: Val<'k, bool>,
    /// Its elements in o and in d_o.
    memory: [Pointer<'k, Pair<T>>; 2],
    query: Val<'k, u32>,
    /// Where the rows of its head begin in the LSE.
    lse: Val<'k, u64>,
    /// Where it is among the padded rows.
    padded: Val<'k, u64>,
}
