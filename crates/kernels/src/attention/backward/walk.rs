//! The steps of a tile in the compute role: a warpgroup's position, and operations of all schedules on scores and
//! results.

use crate::attention::backward::d_q::bulk_reduce::BulkReduce;
use crate::attention::backward::modifiers::ModifierParams;
use crate::attention::backward::state::Main;
use crate::attention::backward::tiles::{END, FIRST, Of, Work};
use crate::parts::exp::{Element, exp2};
use fulgurite_core::Exp;
use fulgurite_ptx::{
    Acc, Fragment, Group, GroupBarrier, Half, Numbers, Pair, Pointer, RowView, Scope, Thread, Tile, Val, Var, Word,
};

/// A warpgroup's position among the steps of its tile, and the sums to which it adds its part of d_q.
pub(crate) struct StepWalk<'a, 'k> {
    pub main: &'a Main<'k>,
    /// Index of the warpgroup in its CTA.
    own: Val<'k, u32>,
    step: Var<'k, u32>,
    left: Var<'k, u32>,
    /// The query head, for modifiers.
    head: Option<Var<'k, u32>>,
    /// Address of this thread's part of the sums; of its warpgroup's part if TMA adds.
    sums: Var<'k, u64>,
}

impl<'a, 'k> StepWalk<'a, 'k> {
    pub fn new(w: &Scope<'k, Group>, main: &'a Main<'k>) -> Self {
        StepWalk::of(w, main, w.group())
    }

    /// For warpgroups with separate roles; `own` is the warpgroup's index.
    pub fn of(w: &Scope<'k, Group>, main: &'a Main<'k>, own: Val<'k, u32>) -> Self {
        let head = main.modifiers.as_ref().map(|_| w.var(0u32));
        StepWalk { main, own, step: w.var(0u32), left: w.var(0u32), head, sums: w.var(0u64) }
    }

    /// Goes to the first step of a tile. Sums are stored in accumulator order:
    /// `[head][step][warpgroup][eight columns][thread][4]`.
    #[track_caller]
    pub fn start(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let (main, [first, end]) = (self.main, work.steps);
        let (rows, d) = (main.config.rows, main.dims[0]);
        self.left.set(if main.single { end - first } else { (end - first) * main.map.heads_of(work.head) });
        self.step.set(first);
        self.head.iter().for_each(|head| head.set(main.map.first_head(work.head)));
        let step = main.d_q.sums_before(&main.map, work) + first;
        let group = main.quarter(w, self.own) * (64 * main.config.cols(d));
        let own = if main.d_q.bulk.is_some() { group } else { group + w.thread_in_group() * 4 };
        self.sums.set(main.d_q.sums.at_wide(step.mul_wide(rows * d)).at(own).address());
    }

    /// After the last tile: reads the end messages of services.
    #[track_caller]
    pub fn end(&self, w: &Scope<'k, Group>) {
        self.main.d_q.before_add(w);
        self.main.d_q.after_add(w);
    }

    /// The first query of the step.
    #[track_caller]
    pub fn first_query(&self) -> Val<'k, i32> {
        (self.step.get() * self.main.config.rows).to_i32()
    }

    /// Counts the step as done. Returns whether it was the last.
    #[track_caller]
    pub fn last(&self) -> Val<'k, bool> {
        self.left.set(self.left.get() - 1);
        self.left.get().eq(0)
    }

    /// The head of queries, for modifiers.
    pub fn head(&self) -> Val<'k, u32> {
        self.head.expect("bug in fulgurite: nobody asked for the head").get()
    }

    /// Goes to the next step and its sums. `next` is called when a new query head begins.
    #[track_caller]
    pub fn forward(&self, w: &Scope<'k, Group>, next: impl FnOnce(&Scope<'k, Group>)) {
        self.sums.set(self.sums.get() + u64::from(self.step_bytes()));
        self.forward_step(w, |w, [first, end]| {
            self.skip_sums([first, end]);
            next(w);
        });
    }

    /// Goes to the next step; the sums stay those of the step before. `next` is called when a new query head begins, with its
    /// first step and past its last.
    #[track_caller]
    pub fn forward_step(&self, w: &Scope<'k, Group>, next: impl FnOnce(&Scope<'k, Group>, [Val<'k, u32>; 2])) {
        self.step.set(self.step.get() + 1);
        if self.main.single {
            return;
        }
        let end = self.end_of_head(w);
        w.when(self.step.get().eq(end), |w| {
            let first = self.main.stages.tickets.word(w, FIRST);
            self.step.set(first);
            self.head.iter().for_each(|head| head.set(head.get() + 1));
            next(w, [first, end]);
        });
    }

    /// Goes from the sums of the step before to those of this step.
    #[track_caller]
    pub fn forward_sums(&self, w: &Scope<'k, Group>) {
        self.sums.set(self.sums.get() + u64::from(self.step_bytes()));
        if self.main.single {
            return;
        }
        let first = self.main.stages.tickets.word(w, FIRST);
        w.when(self.step.get().eq(first), |w| self.skip_sums([first, self.end_of_head(w)]));
    }

    /// Skips the sums of steps between two heads that see no key of this tile.
    #[track_caller]
    fn skip_sums(&self, [first, end]: [Val<'k, u32>; 2]) {
        self.sums.set(self.sums.get() + (self.main.map.steps - end + first).mul_wide(self.step_bytes()));
    }

    fn step_bytes(&self) -> u32 {
        self.main.config.rows * self.main.dims[0] * 4
    }

    /// One past the last step of a query head. Read again instead of kept, because registers are short.
    #[track_caller]
    fn end_of_head(&self, w: &Scope<'k, Group>) -> Val<'k, u32> {
        let equal = self.main.map.is_dense() && self.main.d_q.split.is_none();
        let all = !self.main.map.spans.bounded_right() && equal && self.main.map.step_ranges.is_none();
        if all { self.main.map.steps } else { self.main.stages.tickets.word(w, END) }
    }

    /// Has TMA add the d_q of the step before. `last` is the tile after its last step; the additions of the whole
    /// tile are then counted.
    #[track_caller]
    pub fn send(&self, w: &Scope<'k, Group>, bulk: &BulkReduce<'k>, d_q: &Acc<'k>, last: Option<&Work<'k>>) {
        bulk.send(w, &self.main.map, (self.sums, d_q), last);
        if last.is_none() {
            self.forward_sums(w);
        }
    }

    /// Adds a part of d_q, in fours of each thread. Parts come in order.
    #[track_caller]
    pub fn add(&self, w: &Scope<'k, Group>, d_q: &Acc<'k>, part: std::ops::Range<u32>) {
        let whole = d_q.cols() / 8;
        let [begins, ends] = [part.start == 0 && part.end > 0, part.end == whole && part.start < whole];
        if begins {
            self.main.d_q.before_add(w);
        }
        let (to, elements) = (Pointer::<f32>::at_address(self.sums.get()), d_q.elements().collect::<Vec<_>>());
        let add = |w: &Scope<'k, Group>| {
            for four in part.clone() {
                let at = 4 * four as usize;
                to.add_some::<_, 4>(w, four * 512, std::array::from_fn(|i| elements[at + i]));
            }
        };
        // Rows may end before the columns of the last warpgroup, whose d_q is then zero.
        let cols = self.main.config.cols(self.main.dims[0]);
        let [used, all] = [self.main.widths[0], self.main.dims[0]].map(|width| width.div_ceil(cols));
        match used < all {
            true => w.when(self.main.quarter(w, self.own).lt(used), add),
            false => add(w),
        }
        if ends {
            self.main.d_q.after_add(w);
        }
    }
}

/// Replaces the scores in `s` by p. `after` is called after each eight columns.
///
/// With new values instead, the assembler finds no registers for the products (C7511).
pub(crate) fn probabilities<'k>(
    w: &Scope<'k, Group>,
    main: &Main<'k>,
    s: &Acc<'k>,
    shift: Numbers<'k>,
    after: impl Fn(u32),
) {
    let hidden = HiddenElements::of(main.modifiers.as_ref());
    probabilities_of((main.exp, hidden), main.scale_log2, s, |eight| shift.pair(w, eight), after);
}

/// What p is where an element is hidden and its row holds NaN: of a row whose LSE is NaN, or of a query past the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HiddenElements {
    /// NaN. It reaches nothing but sums that the last kernel computes again.
    Any,
    /// 0, at three instructions an element. Nothing computes gradients of auxiliary tensors again.
    Zero,
}

impl HiddenElements {
    pub fn of(modifiers: Option<&ModifierParams<'_>>) -> HiddenElements {
        match modifiers.is_some_and(ModifierParams::has_gradients) {
            true => HiddenElements::Zero,
            false => HiddenElements::Any,
        }
    }
}

/// Elements of eight columns that a thread has in a row, and in all its rows.
const fn of_eight<'k, A: RowView<'k>>() -> [usize; 2] {
    let run = A::RUN as usize;
    [run, run * A::ROWS]
}

/// Replaces the scores in `s` by p. `shift` gives -LSE in powers of two of the thread's columns of each eight; `after` is
/// called after each eight columns.
pub(crate) fn probabilities_of<'k, A: RowView<'k>, N: AsRef<[Val<'k, f32>]>>(
    (exp, hidden): (Exp, HiddenElements),
    scale_log2: Val<'k, f32>,
    s: &A,
    shift: impl Fn(u32) -> N,
    after: impl Fn(u32),
) {
    let (elements, [run, each]): (Vec<_>, _) = (s.elements().collect(), of_eight::<A>());
    for eight in 0..s.cols() / 8 {
        let shift = shift(eight);
        for i in 0..each {
            let number = each * eight as usize + i;
            let (x, shift) = (elements[number], shift.as_ref()[i % run]);
            let p = exp2(exp, Element { number, count: elements.len() }, x.mul_add(scale_log2, shift));
            // The smaller one of a number and NaN is the number.
            let hides = || x.min(shift).eq(f32::NEG_INFINITY);
            s.set(number, if hidden == HiddenElements::Zero { hides().select::<f32>(0.0, p) } else { p });
        }
        after(eight);
    }
}

/// Replaces d_p by d_z = p (d_p - delta). `after` is called after each eight columns.
pub(crate) fn score_gradients<'k>(
    w: &Scope<'k, Group>,
    [p, d_p]: [&Acc<'k>; 2],
    delta: Numbers<'k>,
    after: impl Fn(u32),
) {
    score_gradients_of([p, d_p], |eight| delta.pair(w, eight), after);
}

/// Replaces d_p by d_z = p (d_p - delta), where `delta` gives that of the thread's columns of each eight.
pub(crate) fn score_gradients_of<'k, A: RowView<'k>, N: AsRef<[Val<'k, f32>]>>(
    [p, d_p]: [&A; 2],
    delta: impl Fn(u32) -> N,
    after: impl Fn(u32),
) {
    let (p, [_, each]): (Vec<_>, _) = (p.elements().collect(), of_eight::<A>());
    gradients_of(|eight| p[each * eight as usize..][..each].to_vec(), d_p, delta, after);
}

/// Replaces d_p by d_z, where `p` gives the thread's elements of each eight columns.
pub(crate) fn gradients_of<'k, A: RowView<'k>, N: AsRef<[Val<'k, f32>]>>(
    p: impl Fn(u32) -> Vec<Val<'k, f32>>,
    d_p: &A,
    delta: impl Fn(u32) -> N,
    after: impl Fn(u32),
) {
    let (elements, [run, each]): (Vec<_>, _) = (d_p.elements().collect(), of_eight::<A>());
    for eight in 0..d_p.cols() / 8 {
        let (p, delta) = (p(eight), delta(eight));
        for (i, p) in p.into_iter().take(each).enumerate() {
            let at = each * eight as usize + i;
            d_p.set(at, (elements[at] - delta.as_ref()[i % run]) * p);
        }
        after(eight);
    }
}

/// Converts a thread's four elements of the `eight`-th eight columns to 16 bits.
pub(crate) fn pack<'k, T: Half>(to: &Fragment<'k, T>, eight: u32, from: &Acc<'k>)
where
    Pair<T>: Word,
{
    pack_part(to, eight, from, eight);
}

/// Converts elements of a part, whose `eight`-th eight columns are the `whole`-th of the fragment.
pub(crate) fn pack_part<'k, T: Half>(to: &Fragment<'k, T>, whole: u32, from: &Acc<'k>, eight: u32)
where
    Pair<T>: Word,
{
    let from: Vec<_> = from.elements().skip(4 * eight as usize).take(4).collect();
    for pair in 0..2 {
        to.set_pair(2 * whole as usize + pair, from[2 * pair], from[2 * pair + 1]);
    }
}

/// Sets an accumulator to zero.
pub(crate) fn clear(acc: &Acc<'_>) {
    (0..acc.elements().count()).for_each(|i| acc.set(i, 0.0));
}

/// Writes d_k or d_v to a tile that no warpgroup reads any longer. d_k is scaled. Columns of the tile beyond those of the result lie
/// outside the tensor, so TMA does not store them.
pub(crate) fn write_result<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>, of: Of, result: &Acc<'k>, to: Tile<'k>)
where
    Pair<T>: Word,
{
    match of {
        Of::DK => w.write_with::<T>(to.first_cols(result.cols()), result, |_, x| x * main.scale),
        _ => w.write::<T>(to.first_cols(result.cols()), result),
    }
}

/// Starts the copies of results that the warpgroup wrote, each with the first column and key of its part. The same thread always
/// starts them, so it can wait for them later.
pub(crate) fn send_results<'k>(
    w: &Scope<'k, Group>,
    main: &Main<'k>,
    work: &Work<'k>,
    barrier: &GroupBarrier,
    results: impl Fn(&Scope<'k, Thread>) -> Vec<(Of, Tile<'k>, [Val<'k, u32>; 2])>,
) {
    w.publish_shared();
    w.sync_group(barrier);
    w.one_thread_of_group(|t| store_tiles(t, main, work, results(t)));
}

/// Starts the copies of a warpgroup's results, each with its first column and key.
pub(crate) fn store_tiles<'k>(
    t: &Scope<'k, Thread>,
    main: &Main<'k>,
    work: &Work<'k>,
    results: impl IntoIterator<Item = (Of, Tile<'k>, [Val<'k, u32>; 2])>,
) {
    for (of, from, [col, key]) in results {
        t.store_tile(main.result(of), &main.map.at(of, work, [col, key, work.head]), from);
    }
    t.commit_stores();
}

/// Writes d_k and d_v and starts their copies. `at` is the first column and key of the warpgroup's part of d_k (0) or d_v (1).
pub(crate) fn store_results<'k, T: Half>(
    w: &Scope<'k, Group>,
    main: &Main<'k>,
    work: &Work<'k>,
    barrier: &GroupBarrier,
    [(d_k, to_k), (d_v, to_v)]: [(&Acc<'k>, Tile<'k>); 2],
    at: impl Fn(&Scope<'k, Thread>, usize) -> [Val<'k, u32>; 2],
) where
    Pair<T>: Word,
{
    write_result::<T>(w, main, Of::DV, d_v, to_v);
    write_result::<T>(w, main, Of::DK, d_k, to_k);
    send_results(w, main, work, barrier, |t| vec![(Of::DV, to_v, at(t, 1)), (Of::DK, to_k, at(t, 0))]);
}
