//! Marks of gradients that are not finite, for the kernel that computes them again ([`repair`]).
//!
//! A hidden element of p or d_z is 0, but 0 times NaN or infinity is NaN: a row of q, k, v or d_o that is not finite
//! reaches the gradients of all rows that share a tile with it. Where final sums leave, threads check them. The check costs
//! one instruction for two elements of a sum that many products made. A sum that is not finite is marked: its row has a
//! word with one bit for each eight elements.
//!
//! If results are added to given ones, marked elements are left as they were. All eight elements of a bit are then left.
//!
//! [`repair`]: crate::attention::backward::repair

use crate::params::{Lens, Params};
use crate::parts::nonfinite::some_not_finite;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Group, Pointer, RowView, Scope, Val, Who};

/// Elements of a row that share a bit.
pub(crate) const EIGHT: u32 = 8;

/// Arguments of [`Marks`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct MarkArgs {
    /// A word that is not zero if some row is marked.
    pub some: Span,
    /// A word for each row.
    pub words: Span,
    /// Rows of a head: of one sequence, or of the whole batch if sequences are packed.
    pub rows: u32,
    /// Heads.
    pub heads: u32,
}

/// The marks of a gradient.
pub(crate) struct Marks<'k> {
    some: Pointer<'k, u32>,
    words: Pointer<'k, u32>,
    rows: Val<'k, u32>,
    heads: Val<'k, u32>,
    packed: bool,
}

/// The rows of a head in a sequence. Only a mark needs them, so they should be parameters, or computed from few values.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'k> {
    pub batch: Val<'k, u32>,
    pub head: Val<'k, u32>,
    /// The first row of the sequence, if sequences are packed.
    pub start: Val<'k, u32>,
}

/// The part of a gradient that a warpgroup holds.
#[derive(Clone, Copy)]
pub(crate) struct MarkedPart<'k> {
    pub of: HeadRows<'k>,
    /// The first row and column.
    pub first: [Val<'k, u32>; 2],
    /// Rows of the sequence.
    pub rows: Val<'k, u32>,
}

impl<'k> Marks<'k> {
    /// Declares the parameters of the marks of a gradient with this name.
    pub fn declare<C: 'static>(p: &Params<'k, C>, name: &str, packed: bool, args: impl Lens<C, MarkArgs>) -> Self {
        Marks {
            some: p.array(&format!("{name}_some"), move |call| args(call).some),
            words: p.array(&format!("{name}_marks"), move |call| args(call).words),
            rows: p.u32(&format!("{name}_mark_rows"), move |call| args(call).rows),
            heads: p.u32(&format!("{name}_mark_heads"), move |call| args(call).heads),
            packed,
        }
    }

    /// Marks elements of a row.
    #[track_caller]
    pub fn mark<W: Who>(&self, w: &Scope<'k, W>, of: HeadRows<'k>, row: Val<'k, u32>, bits: Val<'k, u32>) {
        let first_row = match self.packed {
            true => of.head.mul_wide(self.rows) + of.start.to_u64(),
            false => (of.batch * self.heads + of.head).mul_wide(self.rows),
        };
        self.some.set_bits(w, 0, 1);
        self.words.at_wide(first_row + row.to_u64()).set_bits(w, 0, bits);
    }

    /// Marks the eight elements with this number of a row.
    #[track_caller]
    pub fn mark_eight<W: Who>(&self, w: &Scope<'k, W>, of: HeadRows<'k>, row: Val<'k, u32>, eight: Val<'k, u32>) {
        self.mark(w, of, row, w.constant(1u32) << eight);
    }

    /// Marks the rows and columns that a warp has of a result if a sum is not finite, and returns whether it did.
    /// `part` tells where the part of the warpgroup is; it is called where marks are made.
    #[track_caller]
    pub fn check<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        result: &A,
        part: impl FnOnce(&Scope<'k, Group>) -> MarkedPart<'k>,
    ) -> Val<'k, bool> {
        let elements: Vec<_> = result.elements().collect();
        let spoiled = w.any(some_not_finite(&elements));
        w.when_rarely(spoiled, |w| {
            let MarkedPart { of, first: [first, col], rows } = part(w);
            let all = u32::MAX >> (u32::BITS - result.cols().div_ceil(EIGHT));
            let bits = w.constant(all) << (col / EIGHT);
            for i in 0..A::ROWS {
                let row = first + A::first_row(w) + A::row_offset(i);
                w.when(row.lt(rows) & A::is_first_of_row(w), |w| self.mark(w, of, row, bits));
            }
        });
        spoiled
    }
}
