//! After the gradients: the sums of d_q, scaled and rounded.
//!
//! Sums lie as the accumulators of the main kernel's warpgroups did, `[warpgroup][eight columns][thread][4]`, so that a
//! warp adds 512 bytes that lie together. A four has two neighbours of a row and two of the row 8 below. Rows are queries,
//! and a thread here takes two of them, eight columns each; or rows are elements of d_q (turned), and a thread takes sixteen
//! of two queries.

use super::{Adds, Features, Tuning};
use crate::attention::work::Sides;
use fulgurite_ptx::{BuildError, Builder, Half, Kernel, Pair, Target, Val, Word};

/// Eight elements of a row of d_q: which row, and which eight of it, each as a number and what is added to it. They are added
/// where they are used: until then they would take registers.
struct Eight<'k> {
    row: (Val<'k, u32>, u32),
    eight: (Val<'k, u32>, u32),
    sums: [Val<'k, f32>; 8],
}

/// d_q of `rows` queries of a head, one block each.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_backward_finish", target, |k| build::<T>(k, features, tuning))
}

fn build<'k, T: Half>(k: &'k Builder, features: &Features, tuning: Tuning)
where
    Pair<T>: Word,
{
    let (d, rows, turned) = (features.dims[0], tuning.rows, tuning.adds == Adds::Engine);
    let items = rows / 2 * d / if turned { 16 } else { 8 };
    // With lengths of their own, blocks of twice as many threads spill.
    let threads = match turned {
        true if features.ragged.any() => items / 2,
        true => items,
        false => 256,
    };
    let sums = k.pointer::<f32>("sums");
    let d_q = k.pointer::<Pair<T>>("d_q");
    let [q_len, head_dim] = ["q_len", "head_dim"].map(|name| k.param::<u32>(name));
    let (steps, heads) = (k.divisor("steps"), k.divisor("heads"));
    let [batch_stride, row_stride, head_stride] =
        ["batch_stride", "row_stride", "head_stride"].map(|name| k.param::<u32>(name));
    let scale = k.param::<f32>("scale");
    let sides = features.ragged.any().then(|| Sides::new(k, features.ragged, 0));
    k.threads(threads, |w| {
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
        // Some loads before their stores: as many as there are registers for.
        let rounds: Vec<u32> = (0..items.div_ceil(threads)).collect();
        for rounds in rounds.chunks(if turned { 1 } else { 4 }) {
            let parts: Vec<_> = rounds
                .iter()
                .map(|i| {
                    let item = w.thread() + i * threads;
                    // The last round of a block need not be whole.
                    let here = item.lt(items);
                    let load = |at: Val<'k, u32>, apart: u32, count: usize| -> Vec<[Val<'k, f32>; 4]> {
                        let from = sums.at(here.select::<u32>(at, 0));
                        (0..count as u32).map(|j| from.load_some(w, apart * j)).collect()
                    };
                    let eights = match turned {
                        true => of_elements(d, tuning.cols(d), item, load),
                        false => of_queries(d, tuning.cols(d), item, load),
                    };
                    (here, eights)
                })
                .collect();
            for (here, eights) in parts {
                for Eight { row, eight, sums } in eights {
                    let (row, eight) = (step * rows + row.0 + row.1, eight.0 + eight.1);
                    let pairs: [_; 4] =
                        std::array::from_fn(|i| (sums[2 * i] * scale).pair_with::<T>(sums[2 * i + 1] * scale));
                    w.when(here & row.lt(q_len) & (eight * 8).lt(head_dim), |w| {
                        d_q.at_wide(row.mul_wide(row_stride)).store_some(w, eight * 4, pairs);
                    });
                }
            }
        }
    });
}

/// What a thread takes where rows of the sums are queries: of two rows, 8 apart, eight columns.
fn of_queries<'k>(
    d: u32,
    cols: u32,
    item: Val<'k, u32>,
    load: impl Fn(Val<'k, u32>, u32, usize) -> Vec<[Val<'k, f32>; 4]>,
) -> Vec<Eight<'k>> {
    let eights = d / 8;
    let (eight, pair) = (item % eights, item / eights);
    let (sixteen, row) = (pair / 8, pair & 7);
    let (group, eight_of_group, warp) = match cols == d {
        true => (sixteen / 4, eight, sixteen & 3),
        false => (eight / (cols / 8), eight % (cols / 8), sixteen),
    };
    let fours = load(group * (64 * cols) + eight_of_group * 512 + warp * 128 + row * 16, 4, 4);
    let first = sixteen * 16 + row;
    let of = |half: usize| Eight {
        row: (first, 8 * half as u32),
        eight: (eight, 0),
        sums: std::array::from_fn(|i| fours[i / 2][2 * half + i % 2]),
    };
    vec![of(0), of(1)]
}

/// What a thread takes where rows of the sums are elements: sixteen of two neighbouring queries.
fn of_elements<'k>(
    d: u32,
    cols: u32,
    item: Val<'k, u32>,
    load: impl Fn(Val<'k, u32>, u32, usize) -> Vec<[Val<'k, f32>; 4]>,
) -> Vec<Eight<'k>> {
    let sixteens = d / 16;
    let (sixteen, pair) = (item % sixteens, item / sixteens);
    let (group, warp) = (sixteen / 4, sixteen & 3);
    let fours = load(group * (64 * cols) + (pair / 4) * 512 + warp * 128 + (pair & 3) * 4, 16, 8);
    let (first, eight) = (pair * 2, sixteen * 2);
    let of = |query: usize, half: usize| Eight {
        row: (first, query as u32),
        eight: (eight, half as u32),
        sums: std::array::from_fn(|i| fours[i][2 * half + query]),
    };
    vec![of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
}
