//! Before the gradients: delta and the LSE of each row, and zeros where d_q will be summed.
//!
//! Some lanes share a row, eight elements each. Rows are padded to whole steps of the main kernel; in padding and in
//! rows without keys the LSE is set so that every probability is 0, and delta is 0 whatever d_o holds there.

use super::{Features, Tuning};
use crate::attention::work::Sides;
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Word};
use std::f32::consts::LOG2_E;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Lanes that share a row.
pub fn lanes(features: &Features) -> u32 {
    (features.dims[0].max(features.dims[1]) / 8).next_power_of_two()
}

/// delta and -LSE log2(e) of rows in the order batch, query, head; the accumulators of d_q and the counters are zeroed.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let (lanes, [d, _]) = (lanes(features), features.dims);
    Kernel::build("attention_backward_prepare", target, |k| {
        let [o, d_o] = ["o", "d_o"].map(|name| k.pointer::<Pair<T>>(name));
        let lse = k.pointer::<f32>("lse");
        let d_lse = features.d_lse.then(|| k.pointer::<f32>("d_lse"));
        let [shift, delta, sums] = ["shift", "delta", "sums"].map(|name| k.pointer::<f32>(name));
        let counters = k.pointer::<u32>("counters");
        // Rows of a head in the LSE, and among the padded ones.
        let [items, lse_rows, value_dim, words] =
            ["items", "lse_rows", "value_dim", "words"].map(|name| k.param::<u32>(name));
        let (heads, rows) = (k.divisor("heads"), k.divisor("rows"));
        let sides = features.ragged.any().then(|| Sides::new(k, features.ragged, 0));
        let strides = ["o", "d_o"].map(|t| ["batch", "row", "head"].map(|axis| k.param::<u32>(&format!("{t}_{axis}"))));
        k.threads(THREADS, |w| {
            let item = w.block().mul_add(THREADS, w.thread());
            // There are fewer words than items: two for each step, which has at least 64 rows.
            w.when(item.lt(words), |w| counters.store(w, item, 0));
            let (row, part) = (item / lanes, item & (lanes - 1));
            let here = item.lt(items);
            let zero = w.constant(0.0f32);
            // Rows lie in another order among the sums; for zeros it does not matter.
            w.when(here & part.lt(d / 8), |w| {
                let to = sums.at_wide(row.mul_wide(d)).at(part * 8);
                to.store_some(w, 0, [zero; 4]);
                to.store_some(w, 4, [zero; 4]);
            });
            let [rest, head] = heads.div_rem(row);
            // A sequence, its first row, a query of it and how many it has; where the padded rows of its head begin.
            let (batch, start, query, q_len, padded) = match &sides {
                Some(sides) => {
                    let batch = sides.of_step(w, rest / tuning.rows, tuning.rows);
                    let [start, room] = sides.room(w, 0, batch);
                    let query = rest - sides.first_step(w, batch, tuning.rows) * tuning.rows;
                    (batch, start, query, sides.used(w, 0, batch, room), head.mul_wide(rows.value()))
                }
                None => {
                    let [batch, query] = rows.div_rem(rest);
                    let padded = (batch * heads.value() + head).mul_wide(rows.value());
                    (batch, w.constant(0u32), query, lse_rows, padded)
                }
            };
            let packed = features.ragged.packed;
            let inside = here & query.lt(q_len);
            let sum = w.var(0.0f32);
            w.when(inside & (part * 8).lt(value_dim), |w| {
                let [a, b] = [(o, strides[0]), (d_o, strides[1])].map(|(from, [of_batch, of_row, of_head])| {
                    // Strides are in pairs.
                    let of_sequence = if packed { start.mul_wide(of_row) } else { batch.mul_wide(of_batch) };
                    let first = of_sequence + query.mul_wide(of_row) + head.mul_wide(of_head);
                    from.at_wide(first).load_some::<_, 4>(w, part * 4)
                });
                for (a, b) in a.into_iter().zip(b) {
                    for (a, b) in a.split().into_iter().zip(b.split()) {
                        sum.set(a.widen().mul_add(b.widen(), sum.get()));
                    }
                }
            });
            let total = w.reduce(sum.get(), lanes, |a, b| a + b);
            w.when(here & part.eq(0), |w| {
                let place = if packed { head } else { batch * heads.value() + head };
                let log = w.var(f32::NEG_INFINITY);
                let own = w.var(total);
                let at = place.mul_wide(lse_rows) + start.to_u64();
                w.when(inside, |w| {
                    log.set(lse.at_wide(at).load(w, query));
                    if let Some(d_lse) = d_lse {
                        own.set(own.get() - d_lse.at_wide(at).load(w, query));
                    }
                });
                let empty = log.get().eq(f32::NEG_INFINITY);
                let power = log.get() * -LOG2_E;
                // Among the padded rows of its head.
                let number = if sides.is_some() { rest } else { query };
                shift.at_wide(padded).store(w, number, empty.select::<f32>(f32::NEG_INFINITY, power));
                delta.at_wide(padded).store(w, number, empty.select::<f32>(0.0, own.get()));
            });
        });
    })
}
