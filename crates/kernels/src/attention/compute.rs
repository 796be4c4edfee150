//! The inner loop of forward attention, shared by the forward and the decode kernel.
//!
//! s = q k^T, p = fold(s), o += p v. A warpgroup goes through the key blocks of a tile from the last to the first, so
//! that masked blocks come first. A step is: start s of this block | start o += p v of the previous block | wait for s
//! | mask and modify s | compute p of this block while p v runs.

use crate::attention::fold::Fold;
use crate::attention::forward::features::Features;
use crate::attention::scoring::{Scoring, ScoringInputs};
use crate::attention::source::KeySource;
use crate::parts::mask::{Block, Spans};
use crate::parts::modifier::{Parameters, Tanh};
use crate::parts::row_sums::Added;
use crate::parts::softmax::{Numerators, Totals};
use fulgurite_core::Rescale;
use fulgurite_ptx::{Acc, Fragment, Group, Half, Major, Pair, Pipe, Pointer, Scope, Sum, Tile, Turns, Val, Var, Word};

/// The rings in shared memory between the roles.
pub(crate) struct Rings<'k> {
    pub queries: Pipe<'k>,
    pub keys: Pipe<'k>,
    pub values: Pipe<'k>,
}

/// A value that is known when a tile starts, or that a register carries from tile to tile.
#[derive(Clone, Copy)]
pub(crate) enum Held<'k, V> {
    Known(Val<'k, V>),
    Carried(Var<'k, V>),
}

impl<'k, V: Word> Held<'k, V> {
    #[track_caller]
    pub fn get(self) -> Val<'k, V> {
        match self {
            Held::Known(value) => value,
            Held::Carried(var) => var.get(),
        }
    }

    /// Sets a carried value for the next tile.
    #[track_caller]
    pub fn set(self, value: Val<'k, V>) {
        if let Held::Carried(var) = self {
            var.set(value);
        }
    }
}

/// Position of a warpgroup among the key blocks of its tile.
pub(crate) struct Cursor<'k> {
    /// Index of the current block.
    pub n: Var<'k, u32>,
    /// Index of the first visible key, from which expressions count, if it may differ from 0.
    pub key_offset: Option<Held<'k, u32>>,
    /// Number of visible keys of the tile's sequence, if the key source needs it.
    pub all_keys: Option<Held<'k, i32>>,
}

impl<'k> Cursor<'k> {
    /// Index of a block's first key in its sequence.
    #[track_caller]
    fn first_key(&self, block: &Block<'k>) -> Val<'k, i32> {
        match self.key_offset {
            Some(offset) => block.first + offset.get().to_i32(),
            None => block.first,
        }
    }
}

/// Parameters of a warpgroup's accumulators and softmax.
pub(crate) struct Setup<'a, 'k> {
    /// Keys per block.
    pub cols: u32,
    /// Columns of the accumulators of o.
    pub columns: u32,
    pub features: &'a Features,
    pub spans: &'a Spans,
    pub parameters: &'a Parameters<'k>,
    /// Factor of the raw scores.
    pub scale: Val<'k, f32>,
    pub counters: Pointer<'k, u32>,
    pub rescale: Rescale,
    pub added: Added,
}

/// Warpgroups that take turns at the tensor cores.
pub(crate) struct InTurn {
    pub turns: Turns,
    /// Number of p v steps still to start when a warpgroup passes its turn.
    pub early: u32,
}

/// A warpgroup's accumulators and state.
pub(crate) struct Compute<'a, 'k, T>
where
    T: Half,
    Pair<T>: Word,
{
    rings: &'a Rings<'k>,
    source: &'a dyn KeySource<'k>,
    s: Acc<'k>,
    pub o: Acc<'k>,
    /// Two fragments: one is packed while the product of the other runs.
    pub p: [Fragment<'k, T>; 2],
    pub fold: Box<dyn Fold<'k, T> + 'k>,
    pub scoring: Scoring<'a, 'k>,
    /// Index of the warpgroup's tile in a stage of queries, if a stage has several.
    pub q_tile: Option<Val<'k, u32>>,
    /// Index of the warpgroup's tile in a stage of values, if a stage has several.
    pub v_tile: Option<Val<'k, u32>>,
    /// A tile of ones next to v. The resulting column of p v is the row sum of p.
    pub ones: Option<Tile<'k>>,
    pub in_turn: Option<InTurn>,
}

impl<'a, 'k, T: Half> Compute<'a, 'k, T>
where
    Pair<T>: Word,
{
    pub fn new(
        w: &Scope<'k, Group>,
        rings: &'a Rings<'k>,
        source: &'a dyn KeySource<'k>,
        setup: &Setup<'a, 'k>,
    ) -> Self {
        let Setup { cols, columns, rescale, added, counters, .. } = *setup;
        let s = w.accumulators(cols);
        let o = w.accumulators(columns);
        let p = [w.fragment::<T>(cols), w.fragment::<T>(cols)];
        let inputs = ScoringInputs {
            modifiers: &setup.features.modifiers,
            parameters: setup.parameters,
            spans: setup.spans,
            scale: setup.scale,
            tanh: Tanh::of(T::NUMBER),
        };
        let (softmax, scoring) = inputs.rows::<Acc<'k>>(w, (rescale, setup.features.exp, added), counters);
        Compute {
            rings,
            source,
            s,
            o,
            p,
            fold: Box::new(softmax),
            scoring,
            q_tile: None,
            v_tile: None,
            ones: None,
            in_turn: None,
        }
    }

    /// Sets o to zero.
    #[track_caller]
    pub fn zero(&self) {
        (0..self.o.elements().count()).for_each(|i| self.o.set(i, 0.0));
    }

    /// Starts s = q k^T of the next key block.
    pub fn scores(&self, w: &Scope<'k, Group>, in_turn: bool) {
        let q = self.rings.queries.current(w)[0];
        let q = self.q_tile.map_or(q, |n| q.nth(n));
        let key = self.rings.keys.wait(w)[0];
        if let (true, Some(InTurn { turns, .. })) = (in_turn, &self.in_turn) {
            w.await_turn(turns);
        }
        w.multiply(&self.s, q.operand(Major::Inner), key.operand(Major::Inner), Sum::Fresh);
    }

    /// Starts o += p v of the previous block.
    pub fn output(&self, w: &Scope<'k, Group>, p: &Fragment<'k, T>, in_turn: bool) {
        let value = self.rings.values.wait(w)[0];
        let value = self.v_tile.map_or(value, |n| value.nth(n));
        let value = value.operand(Major::Outer);
        let value = self.ones.map_or(value, |ones| value.beside(ones, 8));
        let in_turn = self.in_turn.as_ref().filter(|_| in_turn);
        let pass = |left: u32| {
            if let Some(InTurn { turns, early }) = in_turn
                && *early == left
            {
                w.pass_turn(turns);
            }
        };
        w.multiply_fragment(&self.o, p, value, Sum::Onto, pass);
        pass(0);
    }

    /// Takes the `n`-th block, whose scores are complete. Its keys may be overwritten from here on.
    pub fn take_block(&self, w: &Scope<'k, Group>, cursor: &Cursor<'k>, n: Val<'k, u32>) -> Block<'k> {
        let all_keys = || cursor.all_keys.expect("bug in fulgurite: keys of a tile were not kept").get();
        self.source.take(w, &self.rings.keys, n, &all_keys)
    }

    /// Modifies and masks the scores of a block.
    pub fn settle(&self, w: &Scope<'k, Group>, cursor: &Cursor<'k>, block: &Block<'k>) {
        self.scoring.settle(w, &self.s, cursor.first_key(block), block);
    }

    /// Computes the scores of the `n`-th block, without overlap.
    pub fn see(&self, w: &Scope<'k, Group>, cursor: &Cursor<'k>, n: Val<'k, u32>) {
        self.scores(w, false);
        w.wait_products(0);
        self.settle(w, cursor, &self.take_block(w, cursor, n));
    }

    /// Computes p of a tile's first block, whose scores are settled.
    pub fn first(&self, w: &Scope<'k, Group>, p: &Fragment<'k, T>) {
        self.fold.first(w, &self.s, &Numerators::whole(p));
    }

    /// Sees all scores of a tile, down to block `first`, for folds that need them before the first p.
    pub fn scan(&self, w: &Scope<'k, Group>, cursor: &Cursor<'k>, first: impl Fn() -> Val<'k, u32>) {
        self.fold.forget();
        let n = w.var(cursor.n.get());
        w.repeat(|w, leave| {
            self.see(w, cursor, n.get());
            self.fold.see(w, &self.s);
            leave.when(n.get().eq(first()));
            n.set(n.get() - 1);
        });
    }

    /// Processes one block: its scores overlap with p v of the previous block.
    fn step(&self, w: &Scope<'k, Group>, cursor: &Cursor<'k>, old: &Fragment<'k, T>, new: &Fragment<'k, T>) {
        let n = cursor.n;
        n.set(n.get() - 1);
        self.scores(w, true);
        self.output(w, old, true);
        w.wait_products(1);
        let block = self.take_block(w, cursor, n.get());
        let p = Numerators::whole(new);
        self.scoring.fold(w, &*self.fold, (&self.s, &p, &self.o), (&block, &|| cursor.first_key(&block)), None);
        self.rings.values.done(w);
    }

    /// Processes all blocks after the tile's first, down to block `first`. p of the last one ends up in `p[0]`.
    pub fn blocks(&self, w: &Scope<'k, Group>, cursor: &Cursor<'k>, first: Val<'k, u32>) {
        let [even, odd] = &self.p;
        w.repeat(|w, leave| {
            leave.when(cursor.n.get().eq(first));
            self.step(w, cursor, even, odd);
            let done = cursor.n.get().eq(first);
            w.when(done, |_| even.copy(odd));
            leave.when(done);
            self.step(w, cursor, odd, even);
        });
    }

    /// Computes the last p v of a tile, without overlap. Returns the maximum and sum of each row.
    pub fn last(&self, w: &Scope<'k, Group>) -> Totals<'k> {
        self.output(w, &self.p[0], false);
        let totals = self.fold.totals(w, &self.o);
        w.wait_products(0);
        self.rings.values.done(w);
        totals
    }
}
