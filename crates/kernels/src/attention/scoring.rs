//! From raw scores to masked and modified ones, for accumulators of any tensor unit.

use crate::attention::fold::Fold;
use crate::parts::mask::{Block, Limits, Spans};
use crate::parts::modifier::{Modifiers, Modify, Parameters, Tanh, TilePosition};
use crate::parts::row_sums::Added;
use crate::parts::schedule::Work;
use crate::parts::sequences::{Counts, Sequences};
use crate::parts::softmax::{Numerators, Rescaled, Scores, Settled, Softmax, scaled};
use fulgurite_core::{Exp, Rescale};
use fulgurite_ptx::{Acc, Group, Half, Pair, Pointer, RowView, Scope, Val, Word};
use std::f32::consts::LOG2_E;

/// Builds a section of the kernel.
pub(crate) type Section<'a, 'k> = &'a dyn Fn(&Scope<'k, Group>);

/// The masks and modifiers of a warpgroup's rows.
pub(crate) struct Scoring<'a, 'k, A = Acc<'k>> {
    pub limits: Limits<'k, A>,
    pub modify: Modify<'a, 'k, A>,
    pub modifies: bool,
    /// Factor that turns a modified score into an exponent of 2.
    pub scale: Val<'k, f32>,
    /// Whether to modify scores inside the exponential pass. Not for modifiers that load per element: the assembler
    /// would hoist all loads and spill.
    pub fuses: bool,
}

/// Inputs of [`Scoring`].
pub(crate) struct ScoringInputs<'a, 'k> {
    pub modifiers: &'a Modifiers,
    pub parameters: &'a Parameters<'k>,
    pub spans: &'a Spans,
    /// Factor of the raw scores.
    pub scale: Val<'k, f32>,
    pub tanh: Tanh,
}

impl<'a, 'k> ScoringInputs<'a, 'k> {
    /// The softmax of a warpgroup's rows, and their masks and modifiers. `added` says which unit adds the row sums.
    pub fn rows<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        (rescale, exp, added): (Rescale, Exp, Added),
        counters: Pointer<'k, u32>,
    ) -> (Softmax<'k, A>, Scoring<'a, 'k, A>) {
        let power = self.power(w);
        let softmax = Softmax::of_view(w, power, rescale, exp, added, counters);
        (softmax, self.scoring(w, power))
    }

    /// Factor from modified scores to powers of two. Modified scores already contain the scale.
    pub fn power(&self, w: &Scope<'k, Group>) -> Val<'k, f32> {
        match self.modifiers.score {
            Some(_) => w.constant(LOG2_E * self.modifiers.factors()[1]),
            None => self.scale,
        }
    }

    /// Masks and modifiers whose scores have the factor `power`.
    pub fn scoring<A: RowView<'k>>(&self, w: &Scope<'k, Group>, power: Val<'k, f32>) -> Scoring<'a, 'k, A> {
        let limits = Limits::of_view(w, self.spans);
        let modify = Modify::of_view(w, self.modifiers, self.parameters, self.scale, self.tanh);
        Scoring { limits, modify, modifies: !self.modifiers.is_empty(), scale: power, fuses: false }
    }
}

impl<'k, A: RowView<'k>> Scoring<'_, 'k, A> {
    /// Prepares modifiers for a tile. `rows` are the thread's queries. `starts` receives the first visible key of the
    /// tile's sequence.
    pub fn prepare_modifiers(
        &self,
        w: &Scope<'k, Group>,
        (sequences, work): (&Sequences<'k>, &Work<'k>),
        rows: impl FnOnce() -> Vec<Val<'k, i32>>,
        starts: impl FnOnce(Val<'k, u32>),
    ) {
        if !self.modifies {
            return;
        }
        let counts = sequences.counts(work.sequence);
        let Counts { q_len, k_len, first_key } = counts.expect("bug in fulgurite: modifiers without lengths");
        starts(first_key);
        let rows = rows();
        let (batch, heads) = (work.batch, vec![work.head; rows.len()]);
        let (q_len, k_len) = (q_len.to_i32(), k_len.to_i32());
        self.modify.set(w, &TilePosition { batch, heads, rows, q_len, k_len });
    }

    /// Modifies and masks the scores of a block, whose first key is `key` of the sequence.
    pub fn settle(&self, w: &Scope<'k, Group>, s: &A, key: Val<'k, i32>, block: &Block<'k>) {
        if self.modifies {
            self.modify.apply(w, s, key, block.is_full());
        }
        self.limits.apply(w, s, block);
    }

    /// Folds the raw scores `s` of a later block into p. Products into `o` may still run. `first_key` gives the index of
    /// the block's first key in its sequence. If the fold needs the raw scores a second time, it calls `again` to recompute
    /// them. With `None`, they stay in registers.
    pub fn fold<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        fold: &dyn Fold<'k, T, A>,
        (s, p, o): (&A, &Numerators<'_, 'k, T>, &dyn Rescaled<'k>),
        (block, first_key): (&Block<'k>, &dyn Fn() -> Val<'k, i32>),
        again: Option<Section<'_, 'k>>,
    ) where
        Pair<T>: Word,
    {
        if self.fuses {
            let settle = |w: &Scope<'k, Group>| {
                if let Some(again) = again {
                    again(w);
                }
                self.settle(w, s, first_key(), block);
            };
            let cut = (self.limits.cuts(block, s.cols()), s.cols());
            let (key, full) = (first_key(), block.is_full());
            let mut quick = self.modify.quick(w, key, full, self.scale, cut, &settle);
            fold.next(w, s, p, o, &mut quick);
        } else {
            self.settle(w, s, first_key(), block);
            match again {
                Some(again) => {
                    let settle = |w: &Scope<'k, Group>| {
                        again(w);
                        self.settle(w, s, first_key(), block);
                    };
                    fold.next(w, s, p, o, &mut Recomputed { scale: self.scale, settle: &settle });
                }
                None => fold.next(w, s, p, o, &mut Settled(self.scale)),
            }
        }
    }
}

/// Scores whose registers may be overwritten after the exponential pass: `settle` recomputes them.
struct Recomputed<'a, 'k> {
    /// Factor from scores to powers of two.
    scale: Val<'k, f32>,
    settle: Section<'a, 'k>,
}

impl<'k> Scores<'k> for Recomputed<'_, 'k> {
    fn exponent(&mut self, _: usize, _: u32, raw: Val<'k, f32>, shift: Val<'k, f32>) -> Val<'k, f32> {
        raw.mul_add(self.scale, shift)
    }

    fn exponents(&mut self, _: usize, _: u32, raw: &[Val<'k, f32>], shift: Val<'k, f32>) -> Vec<Val<'k, f32>> {
        scaled(raw, self.scale, shift)
    }

    fn settle(&self, w: &Scope<'k, Group>) {
        (self.settle)(w);
    }
}
