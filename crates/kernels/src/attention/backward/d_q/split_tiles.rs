//! The last tiles, split so that all CTAs finish together.
//!
//! The number of tiles is rarely a multiple of the number of CTAs, and with whole tiles some CTAs would idle at the end. So
//! the tiles that remain after every CTA has had equally many are split: their steps are divided into runs, at most one for each
//! CTA, whose lengths differ by at most one step. A run lies within a tile, or spans the end of one and the start of the next.
//!
//! The pieces of a tile are summed in the order of their steps, so d_k and d_v have the same bits in every run. Each piece
//! loads the sums of the pieces before it from memory and stores its own for the next; the last piece has the results. A run
//! goes backwards through its tiles. The piece that begins a tile waits for nothing, and the run that ends a tile waits only
//! for runs with lower numbers.

use crate::attention::backward::d_q::service::{Flags, Log, Service};
use crate::attention::backward::plan::Deal;
use crate::attention::backward::tiles::Work;
use crate::params::{Lens, Params, given};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Acc, Divisor, Group, GroupBarrier, Pointer, Scope, Val};
use std::rc::Rc;

const NAME: &str = "split_tiles";

/// Warpgroups of a CTA. Each has its own keys of a tile.
const GROUPS: u32 = 2;
/// Keys of a warpgroup.
const KEYS: u32 = 64;

/// Arguments of [`SplitTiles`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    pub deal: Deal,
    /// Steps of a tile, for each query head.
    pub steps: u32,
    pub sums: Span,
    pub summed: Span,
}

/// The splits of the last tiles, and their sums.
pub(crate) struct SplitTiles<'k> {
    /// Tiles that are handed out whole.
    pub whole: Val<'k, u32>,
    /// Runs after them.
    runs: Val<'k, u32>,
    /// Steps of a run; the first `longer` runs have one more.
    run: Val<'k, u32>,
    longer: Val<'k, u32>,
    /// Steps of a tile, for each query head.
    steps: Divisor<'k>,
    /// For each split tile and warpgroup: sums of d_k and d_v.
    sums: Pointer<'k, f32>,
    /// For each split tile and warpgroup: steps in the sums.
    summed: Flags<'k>,
    /// Elements of a row of d_k and of d_v.
    dims: [u32; 2],
}

impl<'k> Service<'k> for SplitTiles<'k> {
    fn waits_for_tiles(&self) -> bool {
        true
    }
}

impl<'k> SplitTiles<'k> {
    /// Declares the parameters.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        args: impl Lens<C, Option<Args>>,
        dims: [u32; 2],
        log: &Rc<Log>,
    ) -> Self {
        let whole = p.u32("whole", move |call| given(args(call)).deal.whole as u32);
        let runs = p.u32("runs", move |call| given(args(call)).deal.runs as u32);
        let run = p.u32("run", move |call| given(args(call)).deal.run as u32);
        let longer = p.u32("longer", move |call| given(args(call)).deal.longer as u32);
        let steps = p.divisor("tile_steps", move |call| given(args(call)).steps);
        let sums = p.pointer("piece_sums", move |call| given(args(call)).sums);
        let summed = p.array("summed", move |call| given(args(call)).summed);
        let summed = Flags::new(summed, NAME, "steps before summed", log);
        SplitTiles { whole, runs, run, longer, steps, sums, summed, dims }
    }

    /// Whether a whole tile or a run has this number.
    pub fn has(&self, number: Val<'k, u32>) -> Val<'k, bool> {
        number.lt(self.whole + self.runs)
    }

    /// The first step and past the last of the tile or run with a number, and the tile that the last step is in. Steps of a run,
    /// and tiles, count from the first split tile; those of a whole tile from that tile.
    fn run(&self, number: Val<'k, u32>) -> ([Val<'k, u32>; 2], Val<'k, u32>) {
        let nth = number - self.whole.min(number);
        let start = nth * self.run + nth.min(self.longer);
        let end = start + self.run + nth.lt(self.longer).select::<u32>(1, 0);
        let cut = number.ge(self.whole);
        let [start, end] = [cut.select::<u32>(start, 0), cut.select::<u32>(end, self.steps.value())];
        ([start, end], self.steps.div_rem(end - 1)[0])
    }

    /// A piece of the tile or run with a number: the one that ends it, or the one before. A run is shorter than a tile and has
    /// no more. `find` finds a tile by its number.
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

    /// Whether a run has a piece before the one that ends it.
    pub fn has_before(&self, number: Val<'k, u32>) -> Val<'k, bool> {
        let ([start, _], nth) = self.run(number);
        start.lt(nth * self.steps.value())
    }

    /// Steps of a piece.
    #[track_caller]
    pub fn length(work: &Work<'k>) -> Val<'k, u32> {
        work.steps[1] - work.steps[0]
    }

    /// Number of steps of this many tiles.
    #[track_caller]
    pub fn all(&self, tiles: Val<'k, u32>) -> Val<'k, u32> {
        tiles * self.steps.value()
    }

    /// Adds the sums of the pieces before to the accumulators, and stores them for the next piece. Returns whether this is the
    /// last piece of its tile, or a whole tile.
    pub fn join(
        &self,
        w: &Scope<'k, Group>,
        work: &Work<'k>,
        results: [&Acc<'k>; 2],
        barrier: &GroupBarrier,
    ) -> Val<'k, bool> {
        let [first, end] = work.steps;
        let nth = work.piece.expect("bug in fulgurite: a tile without its number") * GROUPS + w.group();
        let own_sums =
            self.sums.at_wide(nth.mul_wide(KEYS * (self.dims[0] + self.dims[1]))).at(w.thread_in_group() * 4);
        // In the layout of accumulators, `[four][thread][4]`.
        let fours = || {
            let elements = |acc: &Acc<'k>| (0..acc.elements().count()).step_by(4);
            results.into_iter().flat_map(move |acc| elements(acc).map(move |at| (acc, at))).zip((0..).step_by(512))
        };
        w.when(first.ne(0), |w| {
            w.one_thread_of_group(|t| self.summed.wait_for(t, nth, first));
            w.sync_group(barrier);
            for ((acc, at), four) in fours() {
                let before: [_; 4] = own_sums.load_some(w, four);
                let own: Vec<_> = acc.elements().skip(at).take(4).collect();
                own.into_iter().zip(before).enumerate().for_each(|(i, (own, before))| acc.set(at + i, before + own));
            }
        });
        let last = end.eq(self.steps.value());
        w.when(!last, |w| {
            for ((acc, at), four) in fours() {
                let own: Vec<_> = acc.elements().skip(at).take(4).collect();
                own_sums.store_some::<_, 4>(w, four, std::array::from_fn(|i| own[i]));
            }
            w.sync_group(barrier);
            w.one_thread_of_group(|t| self.summed.add(t, nth, end - first));
        });
        last
    }
}
