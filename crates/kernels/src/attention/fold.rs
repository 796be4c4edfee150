//! Folds: how the scores of a tile's key blocks become numerators.

use crate::parts::softmax::{Numerators, Rescaled, Scores, Softmax, Totals};
use fulgurite_ptx::{Acc, Group, Half, Pair, RowView, Scope, Word};

/// Turns the scores of successive key blocks into numerators p, which the kernel multiplies by v. Scores are accumulators
/// of any tensor unit ([`RowView`]).
pub(crate) trait Fold<'k, T: Half, A = Acc<'k>>
where
    Pair<T>: Word,
{
    /// Prepares for a tile whose scores are all seen before its first p.
    fn forget(&self);

    /// Sees the scores of a block without computing p.
    fn see(&self, w: &Scope<'k, Group>, s: &A);

    /// Computes p of a tile's first block.
    fn first(&self, w: &Scope<'k, Group>, s: &A, p: &Numerators<'_, 'k, T>);

    /// Computes p of a later block. Products into `o` may still run: the fold waits for them and rescales `o`.
    fn next(
        &self,
        w: &Scope<'k, Group>,
        s: &A,
        p: &Numerators<'_, 'k, T>,
        o: &dyn Rescaled<'k>,
        scores: &mut dyn Scores<'k>,
    );

    /// Maximum and sum of each row, after the last block.
    fn totals(&self, w: &Scope<'k, Group>, o: &A) -> Totals<'k>;
}

impl<'k, T: Half, A: RowView<'k>> Fold<'k, T, A> for Softmax<'k, A>
where
    Pair<T>: Word,
{
    fn forget(&self) {
        Softmax::forget(self);
    }

    fn see(&self, w: &Scope<'k, Group>, s: &A) {
        Softmax::see(self, w, s);
    }

    fn first(&self, w: &Scope<'k, Group>, s: &A, p: &Numerators<'_, 'k, T>) {
        Softmax::first(self, w, s, p);
    }

    fn next(
        &self,
        w: &Scope<'k, Group>,
        s: &A,
        p: &Numerators<'_, 'k, T>,
        o: &dyn Rescaled<'k>,
        scores: &mut dyn Scores<'k>,
    ) {
        Softmax::next(self, w, s, p, o, scores);
    }

    fn totals(&self, w: &Scope<'k, Group>, o: &A) -> Totals<'k> {
        Softmax::totals(self, w, o)
    }
}
