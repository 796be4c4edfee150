//! Runs after the main kernel: scales the sums of d_q and converts them to 16 bits.
//!
//! Sums have the layout of the main kernel's accumulators, `[warpgroup][eight columns][thread][4]`, so that a warp adds 512
//! contiguous bytes. A four has two neighbouring columns of a row and of the row 8 below. If rows are queries, a thread here
//! takes eight columns of two of them. If the product is transposed (rows are elements of d_q), a thread takes sixteen
//! elements of two queries.

use crate::attention::backward::marks::{EIGHT, HeadRows, MarkArgs, Marks};
use crate::attention::backward::tensors::RowArgs;
use crate::attention::backward::{BackwardConfig, Features, KernelShape};
use crate::params::{Lens, Params, Program};
use crate::parts::arguments::DeviceTensor;
use crate::parts::nonfinite::some_not_finite;
use crate::parts::results::ResultType;
use crate::parts::schedule::{SequenceArgs, Sides};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{
    BuildError, Half, Kernel, Pair, Pointer, Scope, Target, TensorUnit, Val, Var, Who, WholeWarps, Word,
};

/// Eight elements of a row of a result. The row and the number of the eight are each a value plus a constant, which are added only
/// where they are used: their sum would take a register until then.
struct Eight<'k> {
    row: (Val<'k, u32>, u32),
    eight: (Val<'k, u32>, u32),
    sums: [Val<'k, f32>; 8],
}

/// Four elements of a row of an f32 result, which one instruction stores.
pub(crate) struct Four<'k> {
    row: (Val<'k, u32>, u32),
    column: Val<'k, u32>,
    sums: [Val<'k, f32>; 4],
}

/// An item on its way to a result: what a thread stores at once.
pub(crate) enum Item<'k> {
    /// For a 16-bit result: the number of the item, and its sums.
    Half(Val<'k, u32>, Vec<[Val<'k, f32>; 4]>),
    /// For an f32 result; and whether a sum of the thread's warp is not finite.
    Single(Vec<Four<'k>>, Val<'k, bool>),
}

/// The elements of an item that an f32 result has already, by four.
type Given<'k> = Vec<[Var<'k, f32>; 4]>;

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
        let packed = features.ragged.packed;
        if packed {
            p.builder().prefer_registers();
        }
        let results = Results::declare::<T, FinishCall>(
            p,
            "d_q",
            (SumLayout::of_queries(shape), shape.results, packed),
            |call| &call.d_q,
        );
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
            // Where the sequence begins, the sequence, its first row if it is packed, the head, the step in the sequence,
            // and the sequence's number of rows.
            let (of_sequence, batch, start, head, step, q_len) = match &sides {
                Some(sides) => {
                    let batch = sides.of_step(w, step, rows);
                    let [start, room] = sides.room(w, 0, batch);
                    let of =
                        if packed { start.mul_wide(results.row_stride) } else { batch.mul_wide(results.batch_stride) };
                    (of, batch, start, rest, step - sides.first_step(w, batch, rows), room)
                }
                None => {
                    let [batch, head] = heads.div_rem(rest);
                    (batch.mul_wide(results.batch_stride), batch, step.literal(0), head, step, results.rows)
                }
            };
            let to = results.head::<T>(of_sequence, head);
            let rows = StepRows { to, of: HeadRows { batch, head, start }, step, q_len, scale };
            let rounds: Vec<u32> = (0..results.items().div_ceil(threads)).collect();
            // Several loads precede their stores, as many as registers allow.
            for rounds in rounds.chunks(if results.transposed() { 1 } else { 4 }) {
                let items: Vec<_> = rounds.iter().map(|i| w.thread() + i * threads).collect();
                let last = results.items() - 1;
                let loaded: Vec<_> = items.iter().map(|item| results.load(w, sums, item.min(last))).collect();
                let loaded: Vec<_> =
                    items.iter().zip(loaded).map(|(item, fours)| results.item(w, *item, fours)).collect();
                let given: Vec<_> = items
                    .iter()
                    .zip(&loaded)
                    .map(|(number, item)| results.given(w, rows, item, || Some(number.lt(results.items()))))
                    .collect();
                for ((number, item), given) in items.into_iter().zip(&loaded).zip(&given) {
                    w.when(number.lt(results.items()), |w| results.store(w, rows, item, given));
                }
            }
        });
    })
}

/// Arguments of [`Results`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResultArgs {
    pub to: RowArgs,
    /// Rows of a sequence, if all have the same.
    rows: u32,
    /// Elements of a row.
    pub dim: u32,
    /// The marks of elements that are not finite.
    pub marks: MarkArgs,
}

impl ResultArgs {
    /// `dim`: elements of a row of a 16-bit result, padded to whole eights.
    pub fn new(to: &DeviceTensor, rows: u64, dim: u32, (results, marks): (ResultType, MarkArgs)) -> ResultArgs {
        let rows = rows as u32;
        match results.is_f32() {
            true => ResultArgs { to: RowArgs::of_words(to), rows, dim: to.shape[3] as u32, marks },
            false => ResultArgs { to: RowArgs::new(to), rows, dim, marks },
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
    order: SumOrder,
}

/// The order of the sums of some rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SumOrder {
    /// `[warpgroup][eight columns][thread][4]`.
    Fours,
    /// `[warpgroup][eight columns][thread][4]` of the transposed product: rows of the product are elements of the result, and columns its rows.
    Transposed,
    /// `[warpgroup][eight columns][4][thread]`: threads that add single elements add to neighbouring words.
    Planes,
    /// `[four columns][row][4]`: a thread has a row.
    Rows,
}

impl SumLayout {
    /// Layout of one step's d_q sums.
    pub fn of_queries(shape: &KernelShape) -> SumLayout {
        let (d, config) = (shape.dims[0], shape.config);
        let order = match config.share.unit() {
            TensorUnit::MmaSync => SumOrder::Planes,
            TensorUnit::Tcgen05 => SumOrder::Rows,
            TensorUnit::Wgmma if config.has_bulk_reduce() => SumOrder::Transposed,
            TensorUnit::Wgmma => SumOrder::Fours,
        };
        SumLayout { rows: config.rows, d, cols: config.cols(d), order }
    }

    /// Layout of the d_k or d_v of 64 keys with `d` elements each.
    pub fn of_keys(d: u32) -> SumLayout {
        SumLayout { rows: 64, d, cols: d, order: SumOrder::Fours }
    }
}

/// The tensor of a result, and the layout of its sums.
pub(crate) struct Results<'k> {
    layout: SumLayout,
    to: Val<'k, u64>,
    /// Rows of a sequence, if all have the same.
    pub rows: Val<'k, u32>,
    /// Elements of a row.
    pub head_dim: Val<'k, u32>,
    pub results: ResultType,
    /// Strides in words of 32 bits: pairs of 16-bit elements, or f32 elements.
    pub batch_stride: Val<'k, u32>,
    pub row_stride: Val<'k, u32>,
    head_stride: Val<'k, u32>,
    pub marks: Marks<'k>,
}

/// Rows of a result that belong to a step: the rows of its head, the step's number in the head, the head's number of rows,
/// and the factor for the sums.
#[derive(Clone, Copy)]
pub(crate) struct StepRows<'k, T> {
    pub to: Pointer<'k, Pair<T>>,
    /// The head, for marks.
    pub of: HeadRows<'k>,
    pub step: Val<'k, u32>,
    pub q_len: Val<'k, u32>,
    pub scale: Val<'k, f32>,
}

impl<'k> Results<'k> {
    /// Declares the parameters of the result with a name; `args` finds their arguments in a call.
    pub fn declare<T: Half, C: 'static>(
        p: &Params<'k, C>,
        name: &str,
        (layout, results, packed): (SumLayout, ResultType, bool),
        args: impl Lens<C, ResultArgs>,
    ) -> Self
    where
        Pair<T>: Word,
    {
        let to = p.pointer::<Pair<T>>(name, move |call| args(call).to.span).address();
        let rows = p.u32(&format!("{name}_rows"), move |call| args(call).rows);
        let head_dim = p.u32(&format!("{name}_dim"), move |call| args(call).dim);
        let [batch_stride, row_stride, head_stride] = RowArgs::declare_strides(p, name, move |call| &args(call).to);
        let marks = Marks::declare(p, name, packed, move |call| &args(call).marks);
        Results { layout, to, rows, head_dim, results, batch_stride, row_stride, head_stride, marks }
    }

    /// Whether rows of the sums are elements of the result, and columns its rows.
    pub fn transposed(&self) -> bool {
        self.layout.order == SumOrder::Transposed
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

    /// Fours of an item: the offset of the first in the sums of a step, and their distances from it.
    fn fours(&self, item: Val<'k, u32>) -> (Val<'k, u32>, Vec<u32>) {
        let SumLayout { rows, cols, d, order } = self.layout;
        let apart = |apart: u32, count: u32| (0..count).map(|i| apart * i).collect();
        match order {
            // An item has sixteen elements of two neighbouring queries.
            SumOrder::Transposed => {
                let (sixteen, pair) = (item % (d / 16), item / (d / 16));
                let (group, warp) = (sixteen / 4, sixteen & 3);
                let start = group * (64 * cols) + (pair / 4) * 512 + warp * 128 + (pair & 3) * 4;
                (start, apart(16, 8))
            }
            // An item has eight columns of two rows, 8 apart.
            SumOrder::Fours | SumOrder::Planes => {
                let (eight, pair) = (item % (d / 8), item / (d / 8));
                let (sixteen, row) = (pair / 8, pair & 7);
                let (group, eight_of_group, warp) = match cols == d {
                    true => (sixteen / 4, eight, sixteen & 3),
                    false => (eight / (cols / 8), eight % (cols / 8), sixteen),
                };
                let start = group * (64 * cols) + eight_of_group * 512;
                match order == SumOrder::Planes {
                    true => (start + warp * 32 + row * 4, apart(128, 4)),
                    false => (start + warp * 128 + row * 16, apart(4, 4)),
                }
            }
            // An item has eight columns of two neighbouring rows: the fours of both fill sectors of 32 bytes.
            SumOrder::Rows => {
                let (eight, pair) = (item % (d / 8), item / (d / 8));
                (eight * (8 * rows) + pair * 8, vec![0, 4, 4 * rows, 4 * rows + 4])
            }
        }
    }

    /// The fours of an item as eights of rows.
    fn eights(&self, item: Val<'k, u32>, fours: &[[Val<'k, f32>; 4]]) -> Vec<Eight<'k>> {
        let by_eight = || (item % (self.layout.d / 8), item / (self.layout.d / 8));
        match self.layout.order {
            SumOrder::Transposed => {
                let (sixteen, pair) = (item % (self.layout.d / 16), item / (self.layout.d / 16));
                let of = |query: usize, half: usize| Eight {
                    row: (pair * 2, query as u32),
                    eight: (sixteen * 2, half as u32),
                    sums: std::array::from_fn(|i| fours[i][2 * half + query]),
                };
                vec![of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
            }
            SumOrder::Fours | SumOrder::Planes => {
                let (eight, pair) = by_eight();
                let planes = self.layout.order == SumOrder::Planes;
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
            SumOrder::Rows => {
                let (eight, pair) = by_eight();
                let of = |row: usize| Eight {
                    row: (pair * 2, row as u32),
                    eight: (eight, 0),
                    sums: std::array::from_fn(|i| fours[2 * (i / 4) + row][i % 4]),
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

    /// A row of an f32 result, of a sequence among those of equal length.
    #[track_caller]
    pub fn f32_row(&self, batch: Val<'k, u32>, head: Val<'k, u32>, row: Val<'k, u32>) -> Pointer<'k, f32> {
        let before = batch.mul_wide(self.batch_stride) + head.mul_wide(self.head_stride);
        Pointer::at_address(self.to).at_wide(before + row.mul_wide(self.row_stride))
    }

    /// Loads the sums of an item of a step.
    pub fn load<W: Who>(&self, w: &Scope<'k, W>, sums: Pointer<'k, f32>, item: Val<'k, u32>) -> Vec<[Val<'k, f32>; 4]> {
        let (first, offsets) = self.fours(item);
        let from = sums.at(first);
        offsets.into_iter().map(|offset| from.load_some(w, offset)).collect()
    }

    /// An item whose sums are loaded, ready to be stored. All threads of a warp call this together.
    ///
    /// A thread has 32 neighbouring bytes of an f32 row, and stores 16 at a time. So neighbouring threads swap halves: each
    /// instruction then fills whole sectors of 32 bytes, where it would leave the other half of each to the next instruction.
    pub fn item<W: WholeWarps>(&self, w: &Scope<'k, W>, item: Val<'k, u32>, fours: Vec<[Val<'k, f32>; 4]>) -> Item<'k> {
        if !self.results.is_f32() {
            return Item::Half(item, fours);
        }
        // Neighbours have halves of each other's eights, so they must agree on what is marked.
        let spoiled = w.any(some_not_finite(fours.as_flattened()));
        // Neighbouring threads have neighbouring items. Both are in one row if a row has an even number of them.
        let of_row = self.layout.d / if self.transposed() { 16 } else { 8 };
        let swap = of_row.is_multiple_of(2).then(|| (w.lane() & 1).ne(0));
        let apart = if self.transposed() { 2 } else { 1 };
        let mut made = Vec::new();
        for Eight { row, eight: (eight, half), sums } in self.eights(item, &fours) {
            let [low, high]: [[Val<'k, f32>; 4]; 2] = [0, 4].map(|from| std::array::from_fn(|i| sums[from + i]));
            let column = (eight + half) * 8;
            let Some(odd) = swap else {
                made.push(Four { row, column, sums: low });
                made.push(Four { row, column: column + 4, sums: high });
                continue;
            };
            let came: [_; 4] = std::array::from_fn(|i| w.exchange(odd.select::<f32>(low[i], high[i]), 1));
            let pick =
                |a: [Val<'k, f32>; 4], b: [Val<'k, f32>; 4]| std::array::from_fn(|i| odd.select::<f32>(a[i], b[i]));
            // The eight of the even thread, then that of the odd one.
            let first = odd.select::<u32>(column + 4 - 8 * apart, column);
            made.push(Four { row, column: first, sums: pick(came, low) });
            made.push(Four { row, column: first + 8 * apart, sums: pick(high, came) });
        }
        Item::Single(made, spoiled)
    }

    /// Loads the elements of an item that the result has already, if the sums are added to them, unless the item is not
    /// `wanted`. Nothing waits for them until they are stored.
    pub fn given<T: Half, W: Who>(
        &self,
        w: &Scope<'k, W>,
        rows: StepRows<'k, T>,
        item: &Item<'k>,
        wanted: impl Fn() -> Option<Val<'k, bool>>,
    ) -> Given<'k>
    where
        Pair<T>: Word,
    {
        let (Item::Single(fours, _), ResultType::Added) = (item, self.results) else { return Vec::new() };
        let wanted = wanted();
        let load = |four: &Four<'k>| {
            let given = [(); 4].map(|()| w.var(0.0f32));
            let (to, inside) = self.address_of(rows, four);
            w.when(wanted.map_or(inside, |wanted| wanted & inside), |w| {
                let elements = to.load_some::<_, 4>(w, four.column);
                given.iter().zip(elements).for_each(|(given, x)| given.set(x));
            });
            given
        };
        fours.iter().map(load).collect()
    }

    /// The row of four elements of an f32 result, and whether they are inside it. Rows are whole fours.
    fn address_of<T: Half>(&self, rows: StepRows<'k, T>, four: &Four<'k>) -> (Pointer<'k, f32>, Val<'k, bool>)
    where
        Pair<T>: Word,
    {
        let row = rows.step * self.layout.rows + four.row.0 + four.row.1;
        let to = Pointer::<f32>::at_address(rows.to.at_wide(row.mul_wide(self.row_stride)).address());
        (to, row.lt(rows.q_len) & four.column.lt(self.head_dim))
    }

    /// Scales the sums of an item, converts them or adds them to the elements that are `given`, and stores them. Sums that are
    /// not finite are marked; they are not added.
    pub fn store<T: Half, W: Who>(&self, w: &Scope<'k, W>, rows: StepRows<'k, T>, item: &Item<'k>, given: &Given<'k>)
    where
        Pair<T>: Word,
    {
        let StepRows { to, of, step, q_len, scale } = rows;
        let row_of = |(row, below): (Val<'k, u32>, u32)| step * self.layout.rows + row + below;
        let (item, sums) = match item {
            Item::Half(item, sums) => (*item, sums),
            Item::Single(fours, spoiled) => {
                for (i, four) in fours.iter().enumerate() {
                    let sums = four.sums.map(|sum| sum * scale);
                    let all = given.get(i).map_or(sums, |given| std::array::from_fn(|i| given[i].get() + sums[i]));
                    let (to, inside) = self.address_of(rows, four);
                    let stored = if self.results == ResultType::Added { inside & !*spoiled } else { inside };
                    w.when(stored, |w| to.store_some(w, four.column, all));
                    w.when_rarely(inside & *spoiled, |w| {
                        self.marks.mark_eight(w, of, row_of(four.row), four.column / EIGHT);
                    });
                }
                return;
            }
        };
        w.when_rarely(some_not_finite(sums.as_flattened()), |w| {
            for Eight { row, eight, .. } in self.eights(item, sums) {
                let row = row_of(row);
                w.when(row.lt(q_len), |w| self.marks.mark_eight(w, of, row, eight.0 + eight.1));
            }
        });
        for Eight { row, eight, sums } in self.eights(item, sums) {
            let (row, eight) = (row_of(row), eight.0 + eight.1);
            let pairs: [_; 4] = std::array::from_fn(|i| (sums[2 * i] * scale).pair_with::<T>(sums[2 * i + 1] * scale));
            w.when(row.lt(q_len) & (eight * 8).lt(self.head_dim), |w| {
                to.at_wide(row.mul_wide(self.row_stride)).store_some(w, eight * 4, pairs);
            });
        }
    }
}
