//! The last tiles, cut into pieces.
//!
//! Equal tiles seldom go up in the number of blocks, and blocks without one would wait for the others at the end. So as many
//! tiles as every block gets go whole; the steps of the others are dealt out in runs of equal length, one for each block. A run
//! ends one tile, or begins the next, or both.
//!
//! Pieces of a tile are summed in the order of their steps: the same bits every time. Each takes the sums of those before it
//! from memory, and leaves them there for the next; the last has the results. So a piece waits for others that were handed
//! out before it, if it ends before they do. A run goes backwards through its tiles: the piece that begins a tile waits for
//! nobody, and the others of that tile for it.

use crate::attention::backward::d_q::given;
use crate::attention::backward::d_q::round::GROUPS;
use crate::attention::backward::main::Call;
use crate::attention::backward::plan::Deal;
use crate::attention::backward::tiles::Work;
use crate::params::Params;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Acc, Divisor, Group, GroupBarrier, Pointer, Scope, Val};

/// Keys of a warpgroup.
const KEYS: u32 = 64;

/// Arguments of [`Pieces`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    pub deal: Deal,
    /// Steps of a tile, for each query head.
    pub steps: u32,
    pub sums: Span,
    pub summed: Span,
}

/// How the last tiles are cut, and where sums are left.
pub(crate) struct Pieces<'k> {
    /// Tiles that go whole, and runs after them.
    pub whole: Val<'k, u32>,
    runs: Val<'k, u32>,
    /// Steps of a run; so many of the first have one more.
    run: Val<'k, u32>,
    longer: Val<'k, u32>,
    /// Steps of a tile, of each head of queries.
    steps: Divisor<'k>,
    /// For each tile that is cut and each warpgroup: sums of d_k and d_v, and how many steps are in them.
    sums: Pointer<'k, f32>,
    summed: Pointer<'k, u32>,
    /// Elements of a row of d_k and of d_v.
    dims: [u32; 2],
}

impl<'k> Pieces<'k> {
    /// Declares the parameters.
    pub fn declare(p: &Params<'k, Call>, dims: [u32; 2]) -> Self {
        let whole = p.u32("whole", |call| given(&call.split).deal.whole as u32);
        let runs = p.u32("runs", |call| given(&call.split).deal.runs as u32);
        let run = p.u32("run", |call| given(&call.split).deal.run as u32);
        let longer = p.u32("longer", |call| given(&call.split).deal.longer as u32);
        let steps = p.divisor("tile_steps", |call| given(&call.split).steps);
        let sums = p.pointer("piece_sums", |call| given(&call.split).sums);
        let summed = p.array("summed", |call| given(&call.split).summed);
        Pieces { whole, runs, run, longer, steps, sums, summed, dims }
    }

    /// Whether there is something with this number to hand out: a whole tile, or a run.
    pub fn has(&self, number: Val<'k, u32>) -> Val<'k, bool> {
        number.lt(self.whole + self.runs)
    }

    /// Of what has this number, the first step and past the last, counted from the first of its tile, or of the tiles that are cut;
    /// and which of these tiles it ends in.
    fn run(&self, number: Val<'k, u32>) -> ([Val<'k, u32>; 2], Val<'k, u32>) {
        let nth = number - self.whole.min(number);
        let start = nth * self.run + nth.min(self.longer);
        let end = start + self.run + nth.lt(self.longer).select::<u32>(1, 0);
        let cut = number.ge(self.whole);
        let [start, end] = [cut.select::<u32>(start, 0), cut.select::<u32>(end, self.steps.value())];
        ([start, end], self.steps.div_rem(end - 1)[0])
    }

    /// A piece of what has this number: the one that ends it, or the one before. A run is shorter than a tile: it has no more.
    /// `find` is the tile with a number.
    pub fn find(
        &self,
        number: Val<'k, u32>,
        before: Val<'k, bool>,
        find: impl FnOnce(Val<'k, u32>) -> Work<'k>,
    ) -> Work<'k> {
        let ([start, end], nth) = self.run(number);
        let begin = nth * self.steps.value();
        let nth = nth - before.select::<u32>(1, 0);
        let end = before.select::<u32>(begin, end);
        let begin = nth * self.steps.value();
        let tile = find(number.min(self.whole) + nth);
        Work { steps: [start.max(begin) - begin, end - begin], piece: Some(nth), ..tile }
    }

    /// Whether there is a piece before the one that ends it.
    pub fn has_before(&self, number: Val<'k, u32>) -> Val<'k, bool> {
        let ([start, _], nth) = self.run(number);
        start.lt(nth * self.steps.value())
    }

    /// How many steps of its tile a piece has.
    #[track_caller]
    pub fn length(work: &Work<'k>) -> Val<'k, u32> {
        work.steps[1] - work.steps[0]
    }

    /// Of all tiles of a pair of head and sequence, the steps.
    #[track_caller]
    pub fn all(&self, tiles: Val<'k, u32>) -> Val<'k, u32> {
        tiles * self.steps.value()
    }

    /// Adds the sums of the pieces before to those of this one, and leaves them for the next; true of the piece that ends
    /// its tile, and of a whole tile.
    pub fn join(
        &self,
        w: &Scope<'k, Group>,
        work: &Work<'k>,
        results: [&Acc<'k>; 2],
        barrier: &GroupBarrier,
    ) -> Val<'k, bool> {
        let [first, end] = work.steps;
        let nth = work.piece.expect("bug in fulgurite: a tile without its number") * GROUPS + w.group();
        let place = self.sums.at_wide(nth.mul_wide(KEYS * (self.dims[0] + self.dims[1]))).at(w.thread_in_group() * 4);
        // As the accumulators have them: `[four][thread][4]`.
        let fours = || {
            let elements = |acc: &Acc<'k>| (0..acc.elements().count()).step_by(4);
            results.into_iter().flat_map(move |acc| elements(acc).map(move |at| (acc, at))).zip((0..).step_by(512))
        };
        w.when(first.ne(0), |w| {
            w.one_thread_of_group(|t| self.summed.wait_for(t, nth, first));
            w.sync_group(barrier);
            for ((acc, at), four) in fours() {
                let before: [_; 4] = place.load_some(w, four);
                let own: Vec<_> = acc.elements().skip(at).take(4).collect();
                own.into_iter().zip(before).enumerate().for_each(|(i, (own, before))| acc.set(at + i, before + own));
            }
        });
        let last = end.eq(self.steps.value());
        w.when(!last, |w| {
            for ((acc, at), four) in fours() {
                let own: Vec<_> = acc.elements().skip(at).take(4).collect();
                place.store_some::<_, 4>(w, four, std::array::from_fn(|i| own[i]));
            }
            w.sync_group(barrier);
            w.one_thread_of_group(|t| {
                self.summed.fetch_add_in_order(t, nth, end - first);
            });
        });
        last
    }
}
