//! After the gradients: the sums of d_q, scaled and rounded.
//!
//! Sums lie as the accumulators of the main kernel's warpgroups did, `[warpgroup][eight columns][thread][4]`, so that a
//! warp adds 512 bytes that lie together. A thread here takes two rows, 8 apart, of eight columns: 64 bytes in a row.

use super::{Features, Tuning};
use crate::attention::work::Sides;
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Word};

/// Threads of a block, which has the rows of one step of the main kernel.
pub const THREADS: u32 = 256;

/// d_q of `rows` queries of a head, one block each.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let (d, rows) = (features.dims[0], tuning.rows);
    let cols = tuning.cols(d);
    Kernel::build("attention_backward_finish", target, |k| {
        let sums = k.pointer::<f32>("sums");
        let d_q = k.pointer::<Pair<T>>("d_q");
        let [q_len, head_dim] = ["q_len", "head_dim"].map(|name| k.param::<u32>(name));
        let (steps, heads) = (k.divisor("steps"), k.divisor("heads"));
        let [batch_stride, row_stride, head_stride] =
            ["batch_stride", "row_stride", "head_stride"].map(|name| k.param::<u32>(name));
        let scale = k.param::<f32>("scale");
        let sides = features.ragged.any().then(|| Sides::new(k, features.ragged, 0));
        k.threads(THREADS, |w| {
            let [rest, step] = steps.div_rem(w.block());
            let sums = sums.at_wide(w.block().mul_wide(rows * d));
            // Where its sequence begins, its number, the step of the sequence, and rows of it.
            let (of_sequence, head, step, q_len) = match &sides {
                Some(sides) => {
                    let batch = sides.of_step(w, step, rows);
                    let [start, room] = sides.room(w, 0, batch);
                    let packed = features.ragged.packed;
                    let of = if packed { start.mul_wide(row_stride) } else { batch.mul_wide(batch_stride) };
                    (of, rest, step - sides.first_step(w, batch, rows), room)
                }
                None => {
                    let [batch, head] = heads.div_rem(rest);
                    (batch.mul_wide(batch_stride), head, step, q_len)
                }
            };
            let d_q = d_q.at_wide(of_sequence + head.mul_wide(head_stride));
            let eights = d / 8;
            // All loads before all stores.
            let items = rows / 2 * eights;
            let parts: Vec<_> = (0..items.div_ceil(THREADS))
                .map(|i| {
                    let item = w.thread() + i * THREADS;
                    // Rows in sixteens, of which a thread has one of the first eight and the one 8 below.
                    let (eight, pair) = (item % eights, item / eights);
                    let (sixteen, row) = (pair / 8, pair & 7);
                    let (group, eight_of_group, warp) = match cols == d {
                        true => (sixteen / 4, eight, sixteen & 3),
                        false => (eight / (cols / 8), eight % (cols / 8), sixteen),
                    };
                    let at = group * (64 * cols) + eight_of_group * 512 + warp * 128 + row * 16;
                    // The last round of a block need not be whole.
                    let here = item.lt(items);
                    let at = here.select::<u32>(at, 0);
                    let loaded: [_; 4] = std::array::from_fn(|j| sums.at(at).load_some::<_, 4>(w, 4 * j as u32));
                    (here, step * rows + sixteen * 16 + row, eight, loaded)
                })
                .collect();
            for (here, first, eight, loaded) in parts {
                for half in 0..2 {
                    let row = first + 8 * half as u32;
                    let pairs = loaded.map(|four| (four[2 * half] * scale).pair_with::<T>(four[2 * half + 1] * scale));
                    w.when(here & row.lt(q_len) & (eight * 8).lt(head_dim), |w| {
                        d_q.at_wide(row.mul_wide(row_stride)).store_some(w, eight * 4, pairs);
                    });
                }
            }
        });
    })
}
