//! Runs after the main kernel: scales the sums of d_q and converts them to 16 bits.
//!
//! Sums have the layout of the main kernel's accumulators, `[warpgroup][eight columns][thread][4]`, so that a warp adds 512
//! contiguous bytes. A four has two neighbouring columns of a row and of the row 8 below. If rows are queries, a thread here
//! takes eight columns of two of them. If the product is transposed (rows are elements of d_q), a thread takes sixteen
//! elements of two queries.

use crate::attention::backward::tensors::RowArgs;
use crate::attention::backward::{BackwardConfig, Features, KernelShape};
use crate::params::{Lens, Params, Program};
use crate::parts::arguments::DeviceTensor;
use crate::parts::results::ResultType;
use crate::parts::schedule::{SequenceArgs, Sides};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Pointer, Scope, Target, Val, Who, Word};

/// Eight elements of a row of a result. The row and the number of the eight are each a value plus a constant, which are added only
/// where they are used: their sum would take a register until then.
struct Eight<'k> {
    row: (Val<'k, u32>, u32),
    eight: (Val<'k, u32>, u32),
    sums: [Val<'k, f32>; 8],
}

/// A launch: one CTA for each step of each head.
pub(crate) struct FinishCall {
    pub d_q: ResultArgs,
    pub sums: Span,
    /// Steps of a head.
    pub steps: u32,
    pub heads: u32,
    pub scale: f32,
    pub sequences: SequenceArgs,
}

/// The kernel, without the arguments of its launches, for a problem whose sizes are not known.
pub fn kernel<T: Half>(target: Target, features: &Features, config: BackwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(program::<T>(target, features, &KernelShape::plain(features, config))?.into_kernel())
}

/// Converts the d_q of a step of a head in each CTA.
pub(crate) fn program<T: Half>(
    target: Target,
    features: &Features,
    shape: &KernelShape,
) -> Result<Program<FinishCall>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("attention_backward_finish", target, |p| {
        let (d, rows) = (shape.dims[0], shape.config.rows);
        let results =
            Results::declare::<T, FinishCall>(p, "d_q", (SumLayout::of_queries(shape), shape.results), |call| {
                &call.d_q
            });
        // For sequences of different lengths, a CTA with a thread for each item would spill.
        let threads = match results.transposed() {
            true if features.ragged.any() => results.items() / 2,
            true => results.items(),
            false => 256,
        };
        let sums = p.pointer::<f32>("sums", |call| call.sums);
        let (steps, heads) = (p.divisor("steps", |call| call.steps), p.divisor("heads", |call| call.heads));
        let scale = p.f32("scale", |call| call.scale);
        let sides =
            features.ragged.any().then(|| Sides::declare(p, features.ragged, 0, |call: &FinishCall| &call.sequences));
        p.builder().threads(threads, |w| {
            // The last sums go first: they are still in the L2 cache.
            let number = w.ctas() - 1 - w.cta();
            let [rest, step] = steps.div_rem(number);
            let sums = sums.at_wide(number.mul_wide(rows * d));
            // The sequence's first row, the head, the step in the sequence, and the sequence's number of rows.
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
            let rows = StepRows { to, step, q_len, scale };
            let rounds: Vec<u32> = (0..results.items().div_ceil(threads)).collect();
            // Several loads precede their stores, as many as registers allow.
            for rounds in rounds.chunks(if results.transposed() { 1 } else { 4 }) {
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

/// Arguments of [`Results`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResultArgs {
    to: RowArgs,
    /// Rows of a sequence, if all have the same.
    rows: u32,
    /// Elements of a row.
    dim: u32,
}

impl ResultArgs {
    /// `dim`: elements of a row of a 16-bit result, padded to whole eights.
    pub fn new(to: &DeviceTensor, rows: u64, dim: u32, results: ResultType) -> ResultArgs {
        let rows = rows as u32;
        match results.is_f32() {
            true => ResultArgs { to: RowArgs::of_words(to), rows, dim: to.shape[3] as u32 },
            false => ResultArgs { to: RowArgs::new(to), rows, dim },
        }
    }
}

/// The position of the sums of some rows, which have the layout of accumulators.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SumLayout {
    /// Rows whose sums lie together.
    rows: u32,
    /// Elements of a row.
    d: u32,
    /// Columns of a warpgroup's part, as a product.
    cols: u32,
    /// Whether rows of the product are elements of the result, and columns its rows.
    transposed: bool,
    /// Whether each of a thread's four elements of eight columns lies beside the same one of the other threads, so that
    /// threads that add single elements add to neighbouring words.
    planes: bool,
}

impl SumLayout {
    /// Layout of one step's d_q sums.
    pub fn of_queries(shape: &KernelShape) -> SumLayout {
        let (d, config) = (shape.dims[0], shape.config);
        let (cols, transposed) = (config.cols(d), config.has_bulk_reduce());
        SumLayout { rows: config.rows, d, cols, transposed, planes: config.is_sync() }
    }

    /// Layout of the d_k or d_v of 64 keys with `d` elements each.
    pub fn of_keys(d: u32) -> SumLayout {
        SumLayout { rows: 64, d, cols: d, transposed: false, planes: false }
    }
}

/// The tensor of a result, and the layout of its sums.
pub(crate) struct Results<'k> {
    layout: SumLayout,
    to: Val<'k, u64>,
    /// Rows of a sequence, if all have the same.
    pub rows: Val<'k, u32>,
    /// Elements of a row.
    head_dim: Val<'k, u32>,
    results: ResultType,
    /// Strides in words of 32 bits: pairs of 16-bit elements, or f32 elements.
    pub batch_stride: Val<'k, u32>,
    pub row_stride: Val<'k, u32>,
    head_stride: Val<'k, u32>,
}

/// Rows of a result that belong to a step: the rows of its head, the step's number in the head, the head's number of rows,
/// and the factor for the sums.
#[derive(Clone, Copy)]
pub(crate) struct StepRows<'k, T> {
    pub to: Pointer<'k, Pair<T>>,
    pub step: Val<'k, u32>,
    pub q_len: Val<'k, u32>,
    pub scale: Val<'k, f32>,
}

impl<'k> Results<'k> {
    /// Declares the parameters of the result with a name; `args` finds their arguments in a call.
    pub fn declare<T: Half, C: 'static>(
        p: &Params<'k, C>,
        name: &str,
        (layout, results): (SumLayout, ResultType),
        args: impl Lens<C, ResultArgs>,
    ) -> Self
    where
        Pair<T>: Word,
    {
        let to = p.pointer::<Pair<T>>(name, move |call| args(call).to.span).address();
        let rows = p.u32(&format!("{name}_rows"), move |call| args(call).rows);
        let head_dim = p.u32(&format!("{name}_dim"), move |call| args(call).dim);
        let [batch_stride, row_stride, head_stride] = RowArgs::declare_strides(p, name, move |call| &args(call).to);
        Results { layout, to, rows, head_dim, results, batch_stride, row_stride, head_stride }
    }

    /// Whether rows of the sums are elements of the result, and columns its rows.
    pub fn transposed(&self) -> bool {
        self.layout.transposed
    }

    /// Items of a step. An item is what one thread loads and stores at once.
    pub fn items(&self) -> u32 {
        self.layout.rows / 2 * self.layout.d / if self.transposed() { 16 } else { 8 }
    }

    /// The number of the `nth` item of one half of a step's sums.
    pub fn item_of(&self, half: Val<'k, u32>, nth: Val<'k, u32>) -> Val<'k, u32> {
        let whole = self.layout.d / 16;
        match self.layout.cols == self.layout.rows {
            // A half has half of the elements of every query.
            true => (nth / (whole / 2)) * whole + half * (whole / 2) + nth % (whole / 2),
            false => half * (self.items() / 2) + nth,
        }
    }

    /// Fours of an item: the offset of the first in the sums of a step, the distance from one to the next, and their number.
    fn fours(&self, item: Val<'k, u32>) -> (Val<'k, u32>, u32, u32) {
        let SumLayout { cols, d, .. } = self.layout;
        match self.transposed() {
            // An item has sixteen elements of two neighbouring queries.
            true => {
                let (sixteen, pair) = (item % (d / 16), item / (d / 16));
                let (group, warp) = (sixteen / 4, sixteen & 3);
                (group * (64 * cols) + (pair / 4) * 512 + warp * 128 + (pair & 3) * 4, 16, 8)
            }
            // An item has eight columns of two rows, 8 apart.
            false => {
                let (eight, pair) = (item % (d / 8), item / (d / 8));
                let (sixteen, row) = (pair / 8, pair & 7);
                let (group, eight_of_group, warp) = match cols == d {
                    true => (sixteen / 4, eight, sixteen & 3),
                    false => (eight / (cols / 8), eight % (cols / 8), sixteen),
                };
                let start = group * (64 * cols) + eight_of_group * 512;
                match self.layout.planes {
                    true => (start + warp * 32 + row * 4, 128, 4),
                    false => (start + warp * 128 + row * 16, 4, 4),
                }
            }
        }
    }

    /// The fours of an item as eights of rows.
    fn eights(&self, item: Val<'k, u32>, fours: &[[Val<'k, f32>; 4]]) -> Vec<Eight<'k>> {
        match self.transposed() {
            true => {
                let (sixteen, pair) = (item % (self.layout.d / 16), item / (self.layout.d / 16));
                let of = |query: usize, half: usize| Eight {
                    row: (pair * 2, query as u32),
                    eight: (sixteen * 2, half as u32),
                    sums: std::array::from_fn(|i| fours[i][2 * half + query]),
                };
                vec![of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
            }
            false => {
                let (eight, pair) = (item % (self.layout.d / 8), item / (self.layout.d / 8));
                let planes = self.layout.planes;
                let of = |half: usize| Eight {
                    row: ((pair / 8) * 16 + (pair & 7), 8 * half as u32),
                    eight: (eight, 0),
                    sums: std::array::from_fn(|i| {
                        // A four is that of one thread, or an element of four threads.
                        let (thread, element) = (i / 2, 2 * half + i % 2);
                        if planes { fours[element][thread] } else { fours[thread][element] }
                    }),
                };
                vec![of(0), of(1)]
            }
        }
    }

    /// The rows of a head, from where its sequence begins.
    pub fn head<T: Half>(&self, of_sequence: Val<'k, u64>, head: Val<'k, u32>) -> Pointer<'k, Pair<T>>
    where
        Pair<T>: Word,
    {
        Pointer::at_address(self.to).at_wide(of_sequence + head.mul_wide(self.head_stride))
    }

    /// Loads the sums of an item of a step.
    pub fn load<W: Who>(&self, w: &Scope<'k, W>, sums: Pointer<'k, f32>, item: Val<'k, u32>) -> Vec<[Val<'k, f32>; 4]> {
        let (first, apart, count) = self.fours(item);
        let from = sums.at(first);
        (0..count).map(|i| from.load_some(w, apart * i)).collect()
    }

    /// Stores eight elements of an f32 row from a column on, or adds them to those that are there. Rows are whole fours.
    fn store_f32<W: Who>(&self, w: &Scope<'k, W>, to: Pointer<'k, f32>, column: Val<'k, u32>, sums: [Val<'k, f32>; 8]) {
        for (half, sums) in (0..).step_by(4).zip(sums.chunks_exact(4)) {
            let column = column + half;
            w.when(column.lt(self.head_dim), |w| {
                let given = match self.results {
                    ResultType::Added => Some(to.load_some::<_, 4>(w, column)),
                    _ => None,
                };
                let four = std::array::from_fn::<_, 4, _>(|i| given.map_or(sums[i], |given| given[i] + sums[i]));
                to.store_some(w, column, four);
            });
        }
    }

    /// Scales the sums of an item, converts them and stores them.
    pub fn store<T: Half, W: Who>(
        &self,
        w: &Scope<'k, W>,
        StepRows { to, step, q_len, scale }: StepRows<'k, T>,
        item: Val<'k, u32>,
        fours: &[[Val<'k, f32>; 4]],
    ) where
        Pair<T>: Word,
    {
        for Eight { row, eight, sums } in self.eights(item, fours) {
            let (row, eight) = (step * self.layout.rows + row.0 + row.1, eight.0 + eight.1);
            if self.results.is_f32() {
                let to = Pointer::<f32>::at_address(to.at_wide(row.mul_wide(self.row_stride)).address());
                w.when(row.lt(q_len), |w| self.store_f32(w, to, eight * 8, sums.map(|sum| sum * scale)));
                continue;
            }
            let pairs: [_; 4] = std::array::from_fn(|i| (sums[2 * i] * scale).pair_with::<T>(sums[2 * i + 1] * scale));
            w.when(row.lt(q_len) & (eight * 8).lt(self.head_dim), |w| {
                to.at_wide(row.mul_wide(self.row_stride)).store_some(w, eight * 4, pairs);
            });
        }
    }
}
