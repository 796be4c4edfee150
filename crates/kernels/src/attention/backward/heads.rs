//! Query heads of a key/value head, spread over CTAs: parts of d_k and d_v in f32, and the kernel that adds them.
//!
//! A CTA of the main kernel has a tile of keys and walks over the query heads that share them. With few key/value heads there
//! are too few tiles for the GPU, or they take so long that the last ones leave most of it idle. The query heads are then
//! divided into parts, each with tiles of its own. To the schedules of the main kernel a part is a key/value head
//! (`tiles::TileMap`); its results are f32 sums in scratch memory. This kernel runs after the main kernel, adds the parts of a
//! head in the order of their numbers, and converts the sums to 16 bits. So d_k and d_v are deterministic.
//!
//! f32 results of heads that are not spread need no parts: the main kernel stores them, or adds them to those that are given.
//! A CTA has all sums of its keys, so one addition is made to each element, and d_k and d_v are deterministic here, too.
//!
//! Parts of 64 keys lie together, in the layout of accumulators: `[part of a head][64 keys][d_k, d_v][eight columns][thread][4]`.

use crate::attention::backward::finish::{ResultArgs, Results, StepRows, SumLayout};
use crate::attention::backward::marks::{HeadRows, MarkedPart};
use crate::attention::backward::tiles::{Of, TileMap, Work};
use crate::attention::backward::{Features, KernelShape};
use crate::params::{Lens, Params, Program, given};
use crate::parts::results::ResultType;
use crate::parts::schedule::{SequenceArgs, Sides};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{
    Acc, BuildError, Cta, Group, Half, Pair, Pointer, RowView, Scope, Target, TensorUnit, Val, Var, WarpAcc, Word,
};

/// Keys of one contiguous block of parts.
pub(crate) const KEYS: u32 = 64;
/// Elements of eight columns of a block of parts.
const EIGHT_COLUMNS: u32 = 8 * KEYS;
/// Threads of a CTA.
const THREADS: u32 = 256;
/// Items that a thread adds at once: as many as registers allow. For GPUs other than Hopper the assembler keeps more addresses.
fn items_at_once(target: Target) -> u32 {
    if target.arch.tensor == TensorUnit::Wgmma { 4 } else { 1 }
}

/// The memory to which the main kernel writes f32 sums of d_k and d_v.
pub(crate) enum HeadParts<'k> {
    /// Parts of them.
    Parts {
        parts: Pointer<'k, f32>,
        /// Elements of a row of d_k and of d_v.
        dims: [u32; 2],
    },
    /// d_k and d_v themselves, and the factor of d_k.
    Rows { d_k: Box<Results<'k>>, d_v: Box<Results<'k>>, scale: Val<'k, f32> },
}

impl<'k> HeadParts<'k> {
    /// Declares the parameter of parts.
    pub fn declare<C: 'static>(p: &Params<'k, C>, args: impl Lens<C, Span>, dims: [u32; 2]) -> Self {
        HeadParts::Parts { parts: p.pointer("head_parts", move |call| *args(call)), dims }
    }

    /// Declares the parameters of d_k and d_v, for sequences of equal length.
    pub fn declare_rows<T: Half, C: 'static>(
        p: &Params<'k, C>,
        args: impl Lens<C, Option<[ResultArgs; 2]>>,
        shape: &KernelShape,
        scale: Val<'k, f32>,
    ) -> Self
    where
        Pair<T>: Word,
    {
        let to = |d| (SumLayout::of_keys(d), shape.results, false);
        let d_k = Results::declare::<T, C>(p, "d_k", to(shape.dims[0]), move |call| &given(args(call))[0]);
        let d_v = Results::declare::<T, C>(p, "d_v", to(shape.dims[1]), move |call| &given(args(call))[1]);
        HeadParts::Rows { d_k: Box::new(d_k), d_v: Box::new(d_v), scale }
    }

    /// Stores a warpgroup's part of a result, which begins at a column and a key.
    #[track_caller]
    pub fn store(
        &self,
        w: &Scope<'k, Group>,
        map: &TileMap<'k>,
        work: &Work<'k>,
        (of, result): (Of, &Acc<'k>),
        [col, key]: [Val<'k, u32>; 2],
    ) {
        let (parts, [d, dv], keys) = match self {
            HeadParts::Parts { parts, dims } => (parts, dims, map.keys()),
            HeadParts::Rows { d_k, d_v, scale } => {
                let (to, scale) = if of == Of::DK { (d_k, Some(*scale)) } else { (d_v, None) };
                return to.keep(w, work, (result, scale), [col, key]);
            }
        };
        let tile = parts.at_wide(map.number_of(work).mul_wide(keys * (d + dv)));
        let before = if of == Of::DV { KEYS * d } else { 0 };
        let own = (key - work.tile * keys) * (d + dv) + col * KEYS + w.thread_in_group() * 4 + before;
        let (to, elements) = (tile.at(own), result.elements().collect::<Vec<_>>());
        for (four, elements) in (0..).step_by(EIGHT_COLUMNS as usize).zip(elements.chunks_exact(4)) {
            to.store_some::<_, 4>(w, four, std::array::from_fn(|i| elements[i]));
        }
    }

    /// Stores a warp's part of a result, which begins at a column. The warps of a warpgroup have all keys of the tile.
    #[track_caller]
    pub fn store_warp<const M: usize>(
        &self,
        w: &Scope<'k, Group>,
        map: &TileMap<'k>,
        work: &Work<'k>,
        (of, result): (Of, &WarpAcc<'k, M>),
        col: Val<'k, u32>,
    ) {
        let HeadParts::Parts { parts, dims: [d, dv] } = self else {
            unreachable!("bug in fulgurite: f32 results by mma.sync")
        };
        let tile = parts.at_wide(map.number_of(work).mul_wide(map.keys() * (d + dv)));
        let before = if of == Of::DV { KEYS * d } else { 0 };
        let (warp, lane) = (w.thread_in_group() / 32, w.thread_in_group() % 32);
        let elements = result.elements().collect::<Vec<_>>();
        for below in 0..M {
            // 16 keys of the tile, and their place among 64.
            let sixteen = warp * M as u32 + below as u32;
            let own = sixteen / 4 * (KEYS * (d + dv)) + sixteen % 4 * 128 + lane * 4;
            let to = tile.at(own + col * KEYS + before);
            for (four, elements) in (0..).step_by(EIGHT_COLUMNS as usize).zip(elements.chunks_exact(4 * M)) {
                to.store_some::<_, 4>(w, four, std::array::from_fn(|i| elements[4 * below + i]));
            }
        }
    }
}

impl<'k> Results<'k> {
    /// Stores a warpgroup's part of a result, or adds it to what is there: four lanes of a row fill whole sectors.
    #[track_caller]
    fn keep(
        &self,
        w: &Scope<'k, Group>,
        work: &Work<'k>,
        (result, scale): (&Acc<'k>, Option<Val<'k, f32>>),
        [col, key]: [Val<'k, u32>; 2],
    ) {
        let elements = result.elements().collect::<Vec<_>>();
        let first = col + Acc::first_col(w);
        let spoiled = self.marks.check(w, result, |_| {
            let of = HeadRows { batch: work.batch, head: work.head, start: key.literal(0) };
            MarkedPart { of, first: [key, col], rows: self.rows }
        });
        for below in 0..Acc::ROWS {
            let row = key + w.first_row() + Acc::row_offset(below);
            let to = self.f32_row(work.batch, work.head, row).at(first);
            let inside = row.lt(self.rows);
            let stored = if self.results == ResultType::Added { inside & !spoiled } else { inside };
            w.when(stored, |w| {
                for (period, column) in (0..result.cols()).step_by(Acc::PERIOD as usize).enumerate() {
                    w.when((first + column).lt(self.head_dim), |w| {
                        let pair = [0, 1].map(|at| {
                            let x = elements[Acc::index(below, period, at)];
                            scale.map_or(x, |scale| x * scale)
                        });
                        match self.results {
                            ResultType::Added => to.add_some(w, column, pair),
                            _ => to.store_some(w, column, pair),
                        }
                    });
                }
            });
        }
    }
}

/// A launch: one CTA for each 64 keys of each key/value head.
pub(crate) struct HeadsCall {
    pub d_k: ResultArgs,
    pub d_v: ResultArgs,
    pub parts: Span,
    /// Parts of a key/value head.
    pub count: u32,
    /// Blocks of 64 keys from one part to the next.
    pub blocks: u32,
    /// Key/value heads.
    pub heads: u32,
    /// The factor of d_k.
    pub scale: f32,
    pub sequences: SequenceArgs,
}

/// Adds the parts of d_k and d_v of 64 keys in each CTA.
pub(crate) fn program<T: Half>(
    target: Target,
    features: &Features,
    shape: &KernelShape,
) -> Result<Program<HeadsCall>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("attention_backward_heads", target, |p| {
        let ([d, dv], tile_keys) = (shape.widths, shape.config.keys());
        let layout = |d| (SumLayout::of_keys(d), shape.results, features.ragged.packed);
        let d_k = Results::declare::<T, HeadsCall>(p, "d_k", layout(d), |call| &call.d_k);
        let d_v = Results::declare::<T, HeadsCall>(p, "d_v", layout(dv), |call| &call.d_v);
        let parts = p.pointer::<f32>("head_parts", |call| call.parts);
        let count = p.u32("count", |call| call.count);
        let (blocks, heads) = (p.divisor("blocks", |call| call.blocks), p.divisor("heads", |call| call.heads));
        let scale = p.f32("scale", |call| call.scale);
        let sides =
            features.ragged.any().then(|| Sides::declare(p, features.ragged, 1, |call: &HeadsCall| &call.sequences));
        p.builder().threads(THREADS, |w| {
            let [pair, block] = blocks.div_rem(w.cta());
            // The sequence, its first row if it is packed, its rows, the head, and the number of these keys in the sequence.
            let (batch, start, rows, head, nth) = match &sides {
                Some(sides) => {
                    let of_tile = tile_keys / KEYS;
                    let batch = sides.of_block(w, 1, block / of_tile, tile_keys);
                    let [start, room] = sides.room(w, 1, batch);
                    (batch, start, room, pair, block - sides.first_block(w, 1, batch, tile_keys) * of_tile)
                }
                None => {
                    let [batch, head] = heads.div_rem(pair);
                    (batch, block.literal(0), d_k.rows, head, block)
                }
            };
            let row = KEYS * (d + dv);
            let first = parts.at_wide((pair * count * blocks.value() + block).mul_wide(row));
            let part = blocks.value().mul_wide(row * 4);
            let one = scale.literal(1.0);
            w.when((nth * KEYS).lt(rows), |w| {
                for (results, scale, before) in [(&d_k, scale, 0), (&d_v, one, KEYS * d)] {
                    let of_sequence = match features.ragged.packed {
                        true => start.mul_wide(results.row_stride),
                        false => batch.mul_wide(results.batch_stride),
                    };
                    let (to, of) = (results.head::<T>(of_sequence, head), HeadRows { batch, head, start });
                    let rows = StepRows { to, of, step: nth, q_len: rows, scale };
                    let at_once = items_at_once(target);
                    let parts = ResultParts { first: first.at(w.constant(before)), part, count, at_once };
                    for from in (0..results.items()).step_by((at_once * THREADS) as usize) {
                        parts.add_items(w, results, rows, from);
                    }
                }
            });
        });
    })
}

/// The parts of a result of 64 keys.
struct ResultParts<'k> {
    /// The first part.
    first: Pointer<'k, f32>,
    /// Bytes from one part to the next.
    part: Val<'k, u64>,
    count: Val<'k, u32>,
    /// Items that a thread adds at once.
    at_once: u32,
}

impl<'k> ResultParts<'k> {
    /// Adds items of all parts and stores the results: those of the thread, from an item on.
    fn add_items<T: Half>(&self, w: &Scope<'k, Cta>, results: &Results<'k>, rows: StepRows<'k, T>, from: u32)
    where
        Pair<T>: Word,
    {
        let all = results.items();
        let items: Vec<_> = (0..self.at_once)
            .map(|i| from + i * THREADS)
            .filter(|first| *first < all)
            .map(|first| (w.thread() + first, first + THREADS > all))
            .collect();
        let at = w.var(self.first.address());
        let load = |w: &Scope<'k, Cta>| {
            let from = Pointer::<f32>::at_address(at.get());
            let load = |(item, _): &(Val<'k, u32>, bool)| results.load(w, from, item.min(all - 1));
            items.iter().map(load).collect::<Vec<_>>()
        };
        // The first part, then one after the other: the order of additions is fixed.
        let sums: Vec<Vec<[Var<'k, f32>; 4]>> =
            load(w).into_iter().map(|item| item.into_iter().map(|four| four.map(|x| w.var(x))).collect()).collect();
        w.each(1, self.count, 1, |w, _| {
            at.set(at.get() + self.part);
            let next = load(w);
            for (sum, next) in sums.iter().flatten().flatten().zip(next.into_iter().flatten().flatten()) {
                sum.set(sum.get() + next);
            }
        });
        let ready: Vec<_> = (items.into_iter().zip(sums))
            .map(|((number, beyond), sums)| {
                let fours: Vec<_> = sums.iter().map(|four| four.map(|sum| sum.get())).collect();
                let item = results.item(w, number, fours);
                let given = results.given(w, rows, &item, || beyond.then(|| number.lt(all)));
                (number, beyond, item, given)
            })
            .collect();
        for (number, beyond, item, given) in ready {
            match beyond {
                true => w.when(number.lt(all), |w| results.store(w, rows, &item, &given)),
                false => results.store(w, rows, &item, &given),
            }
        }
    }
}
