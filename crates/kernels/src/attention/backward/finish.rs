//! After the gradients: the sums of d_q, scaled and rounded.
//!
//! Sums lie as the accumulators of the main kernel's warpgroups did, `[warpgroup][eight columns][thread][4]`, so that a
//! warp adds 512 bytes that lie together. A four has two neighbours of a row and two of the row 8 below. Rows are queries,
//! and a thread here takes two of them, eight columns each; or rows are elements of d_q (turned), and a thread takes sixteen
//! of two queries.

use crate::attention::backward::{Adds, BackwardConfig, Features};
use crate::parts::schedule::Sides;
use fulgurite_ptx::{BuildError, Builder, Half, Kernel, Pair, Pointer, Scope, Target, Val, Who, Word};

/// Eight elements of a row of d_q: which row, and which eight of it, each as a number and what is added to it. They are added
/// where they are used: until then they would take registers.
struct Eight<'k> {
    row: (Val<'k, u32>, u32),
    eight: (Val<'k, u32>, u32),
    sums: [Val<'k, f32>; 8],
}

/// d_q of `rows` queries of a head, one block each.
pub fn kernel<T: Half>(target: Target, features: &Features, config: BackwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_backward_finish", target, |k| {
        let (d, rows) = (features.dims[0], config.rows);
        let results = Results::new::<T>(k, features, config);
        // With lengths of their own, blocks of as many threads as there are items spill.
        let threads = match results.turned() {
            true if features.ragged.any() => results.items() / 2,
            true => results.items(),
            false => 256,
        };
        let sums = k.pointer::<f32>("sums");
        let (steps, heads) = (k.divisor("steps"), k.divisor("heads"));
        let scale = k.param::<f32>("scale");
        let sides = features.ragged.any().then(|| Sides::new(k, features.ragged, 0));
        k.threads(threads, |w| {
            // The last sums first, which are still in the second-level cache.
            let number = w.blocks() - 1 - w.block();
            let [rest, step] = steps.div_rem(number);
            let sums = sums.at_wide(number.mul_wide(rows * d));
            // Where its sequence begins, its number, the step of the sequence, and rows of it.
            let (of_sequence, head, step, q_len) = match &sides {
                Some(sides) => {
                    let batch = sides.of_step(w, step, rows);
                    let [start, room] = sides.room(w, 0, batch);
                    let packed = features.ragged.packed;
                    let of =
                        if packed { start.mul_wide(results.row_stride) } else { batch.mul_wide(results.batch_stride) };
                    (of, rest, step - sides.first_step(w, batch, rows), room)
                }
                None => {
                    let [batch, head] = heads.div_rem(rest);
                    (batch.mul_wide(results.batch_stride), head, step, results.rows)
                }
            };
            let to = results.head::<T>(of_sequence, head);
            let rows = Rows { to, step, q_len, scale };
            let rounds: Vec<u32> = (0..results.items().div_ceil(threads)).collect();
            // Some loads before their stores: as many as there are registers for.
            for rounds in rounds.chunks(if results.turned() { 1 } else { 4 }) {
                let items: Vec<_> = rounds.iter().map(|i| w.thread() + i * threads).collect();
                let last = results.items() - 1;
                let loaded: Vec<_> = items.iter().map(|item| results.load(w, sums, item.min(last))).collect();
                for (item, fours) in items.into_iter().zip(loaded) {
                    w.when(item.lt(results.items()), |w| results.store(w, rows, item, &fours));
                }
            }
        });
    })
}

/// Where d_q goes, and how its sums lie.
pub(crate) struct Results<'k> {
    d: u32,
    config: BackwardConfig,
    d_q: Val<'k, u64>,
    /// Of a sequence, where they are equal, and elements of a row.
    pub rows: Val<'k, u32>,
    head_dim: Val<'k, u32>,
    /// In pairs.
    pub batch_stride: Val<'k, u32>,
    pub row_stride: Val<'k, u32>,
    head_stride: Val<'k, u32>,
}

/// Rows of d_q of a step: where those of its head lie, which step of the head it is, how many rows the head has, and by
/// what the sums are scaled.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'k, T> {
    pub to: Pointer<'k, Pair<T>>,
    pub step: Val<'k, u32>,
    pub q_len: Val<'k, u32>,
    pub scale: Val<'k, f32>,
}

impl<'k> Results<'k> {
    /// Declares the parameters.
    pub fn new<T: Half>(k: &'k Builder, features: &Features, config: BackwardConfig) -> Self
    where
        Pair<T>: Word,
    {
        let d_q = k.pointer::<Pair<T>>("d_q").address();
        let [rows, head_dim] = ["d_q_rows", "d_q_dim"].map(|name| k.param::<u32>(name));
        let [batch_stride, row_stride, head_stride] =
            ["d_q_batch", "d_q_row", "d_q_head"].map(|name| k.param::<u32>(name));
        Results { d: features.dims[0], config, d_q, rows, head_dim, batch_stride, row_stride, head_stride }
    }

    /// Whether rows of the sums are elements.
    pub fn turned(&self) -> bool {
        self.config.adds == Adds::Engine
    }

    /// What of a step one thread takes at once is an item: so many there are.
    pub fn items(&self) -> u32 {
        self.config.rows / 2 * self.d / if self.turned() { 16 } else { 8 }
    }

    /// Of a step's items those of half its sums, the first or the second, counted from 0.
    pub fn item_of(&self, half: Val<'k, u32>, nth: Val<'k, u32>) -> Val<'k, u32> {
        let whole = self.d / 16;
        match self.config.cols(self.d) == self.config.rows {
            // Half the elements of all queries.
            true => (nth / (whole / 2)) * whole + half * (whole / 2) + nth % (whole / 2),
            false => half * (self.items() / 2) + nth,
        }
    }

    /// Fours of an item: where the first is, of those of a step, how far apart they are, and how many.
    fn fours(&self, item: Val<'k, u32>) -> (Val<'k, u32>, u32, u32) {
        let (cols, d) = (self.config.cols(self.d), self.d);
        match self.turned() {
            // Sixteen elements of two neighbouring queries.
            true => {
                let (sixteen, pair) = (item % (d / 16), item / (d / 16));
                let (group, warp) = (sixteen / 4, sixteen & 3);
                (group * (64 * cols) + (pair / 4) * 512 + warp * 128 + (pair & 3) * 4, 16, 8)
            }
            // Eight columns of two rows, 8 apart.
            false => {
                let (eight, pair) = (item % (d / 8), item / (d / 8));
                let (sixteen, row) = (pair / 8, pair & 7);
                let (group, eight_of_group, warp) = match cols == d {
                    true => (sixteen / 4, eight, sixteen & 3),
                    false => (eight / (cols / 8), eight % (cols / 8), sixteen),
                };
                (group * (64 * cols) + eight_of_group * 512 + warp * 128 + row * 16, 4, 4)
            }
        }
    }

    /// The rows that an item's fours belong to.
    fn eights(&self, item: Val<'k, u32>, fours: &[[Val<'k, f32>; 4]]) -> Vec<Eight<'k>> {
        match self.turned() {
            true => {
                let (sixteen, pair) = (item % (self.d / 16), item / (self.d / 16));
                let of = |query: usize, half: usize| Eight {
                    row: (pair * 2, query as u32),
                    eight: (sixteen * 2, half as u32),
                    sums: std::array::from_fn(|i| fours[i][2 * half + query]),
                };
                vec![of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
            }
            false => {
                let (eight, pair) = (item % (self.d / 8), item / (self.d / 8));
                let of = |half: usize| Eight {
                    row: ((pair / 8) * 16 + (pair & 7), 8 * half as u32),
                    eight: (eight, 0),
                    sums: std::array::from_fn(|i| fours[i / 2][2 * half + i % 2]),
                };
                vec![of(0), of(1)]
            }
        }
    }

    /// The rows of a head of a sequence.
    pub fn head<T: Half>(&self, of_sequence: Val<'k, u64>, head: Val<'k, u32>) -> Pointer<'k, Pair<T>>
    where
        Pair<T>: Word,
    {
        Pointer::at_address(self.d_q).at_wide(of_sequence + head.mul_wide(self.head_stride))
    }

    /// Reads the sums of an item of a step.
    pub fn load<W: Who>(&self, w: &Scope<'k, W>, sums: Pointer<'k, f32>, item: Val<'k, u32>) -> Vec<[Val<'k, f32>; 4]> {
        let (first, apart, count) = self.fours(item);
        let from = sums.at(first);
        (0..count).map(|i| from.load_some(w, apart * i)).collect()
    }

    /// Scales and rounds them.
    pub fn store<T: Half, W: Who>(
        &self,
        w: &Scope<'k, W>,
        Rows { to, step, q_len, scale }: Rows<'k, T>,
        item: Val<'k, u32>,
        fours: &[[Val<'k, f32>; 4]],
    ) where
        Pair<T>: Word,
    {
        for Eight { row, eight, sums } in self.eights(item, fours) {
            let (row, eight) = (step * self.config.rows + row.0 + row.1, eight.0 + eight.1);
            let pairs: [_; 4] = std::array::from_fn(|i| (sums[2 * i] * scale).pair_with::<T>(sums[2 * i + 1] * scale));
            w.when(row.lt(q_len) & (eight * 8).lt(self.head_dim), |w| {
                to.at_wide(row.mul_wide(self.row_stride)).store_some(w, eight * 4, pairs);
            });
        }
    }
}
