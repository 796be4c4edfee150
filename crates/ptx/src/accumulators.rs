//! Accumulators and fragments in the registers of a warpgroup.

use crate::build::{Builder, Group, Half, IntoVal, Pair, Scope, Val, Word};
use crate::inst::{Arg, Class, Reg};
use crate::mma::AccNumber;
use crate::table::convert;
use std::ops::Range;

/// Accumulators of a warpgroup: 64 rows and `cols` columns of f32, spread over its threads. Thread t of the warpgroup
/// holds elements of rows 16 (t / 32) + t % 32 / 4 and of the row 8 below.
pub struct Acc<'k, N = f32> {
    pub(crate) k: &'k Builder,
    pub(crate) regs: Vec<Reg>,
    pub(crate) cols: u32,
    number: std::marker::PhantomData<N>,
}

impl<'k, N: AccNumber> Acc<'k, N> {
    /// The thread's elements, of any type: see [`elements`](Acc::elements).
    pub fn values(&self) -> impl Iterator<Item = Val<'k, N>> {
        let k = self.k;
        self.regs.iter().map(move |&reg| Val::reg(k, reg))
    }
}

impl<'k> Acc<'k> {
    /// Number of columns.
    pub fn cols(&self) -> u32 {
        self.cols
    }
    /// The `index`-th range of `count` columns, in the same registers.
    #[track_caller]
    pub fn part(&self, index: u32, count: u32) -> Acc<'k> {
        let regs = (index * count / 2) as usize..((index + 1) * count / 2) as usize;
        if !count.is_multiple_of(8) || regs.end > self.regs.len() {
            self.k.refuse(format!("part {index} of {count} columns of {}, allowed: multiples of 8 inside", self.cols));
            return Acc { k: self.k, regs: self.regs.clone(), cols: self.cols, number: self.number };
        }
        Acc { k: self.k, regs: self.regs[regs].to_vec(), cols: count, number: self.number }
    }
    /// The columns from `first` on, `count` of them, in the same registers.
    #[track_caller]
    pub fn columns(&self, first: u32, count: u32) -> Acc<'k> {
        if !first.is_multiple_of(8) || !count.is_multiple_of(8) || first + count > self.cols {
            self.k.refuse(format!("{count} columns from {first} of {}, allowed: multiples of 8 inside", self.cols));
            return Acc { k: self.k, regs: self.regs.clone(), cols: self.cols, number: self.number };
        }
        let regs = (first / 2) as usize..((first + count) / 2) as usize;
        Acc { k: self.k, regs: self.regs[regs].to_vec(), cols: count, number: self.number }
    }
    /// The thread's elements. For each eight columns: two neighbours of the upper row, then two of the lower row. The
    /// values are the accumulator registers themselves, so read them only while no product is pending.
    pub fn elements(&self) -> impl Iterator<Item = Val<'k, f32>> {
        let k = self.k;
        self.regs.iter().map(move |&reg| Val::reg(k, reg))
    }
    /// Index (0 or 1) of the `i`-th element's row among the thread's two rows.
    pub fn row_of(i: usize) -> usize {
        i / 2 % 2
    }
    /// Column of the `i`-th element, relative to the thread's first column ([`Scope::first_col`]).
    pub fn col_of(i: usize) -> u32 {
        (i / 4 * 8 + i % 2) as u32
    }
    /// Replaces the `i`-th element.
    #[track_caller]
    pub fn set(&self, i: usize, x: impl IntoVal<'k, f32>) {
        let x = x.into_val(self.k);
        self.k.emit(&convert::MOV_F32, [Arg::Reg(self.regs[i]), x.arg()]);
    }
}

/// Rows and `cols` columns of 16-bit floats in registers, in the layout of a product's left operand. Accumulators have the
/// same layout. A warpgroup holds 64 rows, or 16 for each block of rows of its warps' [`WarpAcc`](crate::WarpAcc).
pub struct Fragment<'k, T> {
    k: &'k Builder,
    regs: Vec<Reg>,
    cols: u32,
    number: std::marker::PhantomData<T>,
}

impl<'k, T: Half> Fragment<'k, T>
where
    Pair<T>: Word,
{
    /// A fragment of `pairs` registers per thread.
    pub(crate) fn new(k: &'k Builder, pairs: usize, cols: u32) -> Self {
        let regs = (0..pairs).map(|_| k.register(Class::B32)).collect();
        Fragment { k, regs, cols, number: std::marker::PhantomData }
    }
    /// The registers of all pairs.
    pub(crate) fn regs(&self) -> &[Reg] {
        &self.regs
    }
    /// Number of columns.
    pub(crate) fn cols(&self) -> u32 {
        self.cols
    }
    /// Rounds elements `2i` and `2i + 1` of the accumulators' order into the `i`-th pair.
    #[track_caller]
    pub fn set_pair(&self, i: usize, low: Val<'k, f32>, high: Val<'k, f32>) {
        let to = Arg::Reg(self.regs[i]);
        self.k.emit(&convert::CVT_PAIR, [to, high.arg(), low.arg(), Arg::Word(<Pair<T> as Word>::NAME)]);
    }
    /// Keeps the elements of the `i`-th pair whose predicate is true; the others become 0, even if they are NaN.
    #[track_caller]
    pub fn keep(&self, i: usize, [low, high]: [Val<'k, bool>; 2]) {
        let mask = low.select::<u32>(0xffff, 0) | high.select::<u32>(0xffff_0000, 0);
        let kept = Val::<u32>::reg(self.k, self.regs[i]) & mask;
        self.k.emit(&convert::MOV_32, [Arg::Reg(self.regs[i]), kept.arg()]);
    }
    /// A range of the columns of a fragment with one row per thread, in the same registers.
    #[track_caller]
    pub fn range(&self, range: Range<u32>) -> Fragment<'k, T> {
        let pairs = [range.start, range.end].map(|col| col as usize / 2);
        let one_row = self.regs.len() as u32 * 2 == self.cols;
        if !one_row || range.start % 2 + range.end % 2 > 0 || range.is_empty() || range.end > self.cols {
            let what = format!("columns {range:?} of {}, allowed: pairs inside rows of one thread", self.cols);
            self.k.refuse(what);
            return Fragment { k: self.k, regs: self.regs.clone(), ..*self };
        }
        let regs = self.regs[pairs[0]..pairs[1]].to_vec();
        Fragment { k: self.k, regs, cols: range.end - range.start, number: self.number }
    }
    /// The `i`-th pair of elements.
    pub fn pair(&self, i: usize) -> Val<'k, u32> {
        Val::reg(self.k, self.regs[i])
    }
    /// Copies another fragment into this one.
    #[track_caller]
    pub fn copy(&self, from: &Fragment<'k, T>) {
        for (&to, &from) in self.regs.iter().zip(&from.regs) {
            self.k.emit(&convert::MOV_32, [Arg::Reg(to), Arg::Reg(from)]);
        }
    }
}

/// Whether a product replaces the accumulators or adds to them.
pub enum Sum<'k> {
    /// Replaces the accumulators.
    Fresh,
    /// Adds to the accumulators.
    Onto,
    /// Adds if the predicate is true, else replaces.
    If(Val<'k, bool>),
}

impl Sum<'_> {
    /// The argument that tells the `step`-th instruction of a product whether to add.
    pub(crate) fn at(&self, step: usize) -> Arg {
        match (self, step) {
            (Sum::Fresh, 0) => Arg::Imm(0),
            (Sum::If(onto), 0) => onto.arg(),
            _ => Arg::Imm(1),
        }
    }
}

impl<'k> Scope<'k, Group> {
    /// Allocates f32 accumulators with 64 rows per warpgroup.
    #[track_caller]
    pub fn accumulators(&self, cols: u32) -> Acc<'k> {
        self.accumulators_of(cols)
    }

    /// Allocates accumulators with 64 rows per warpgroup: f32, or i32 for products of bytes.
    #[track_caller]
    pub fn accumulators_of<N: AccNumber>(&self, cols: u32) -> Acc<'k, N> {
        if !cols.is_multiple_of(8) || !(8..=256).contains(&cols) {
            self.k.refuse(format!("accumulators of {cols} columns, allowed: multiples of 8 up to 256"));
        }
        let regs = (0..cols / 2).map(|_| self.k.register(N::CLASS)).collect();
        Acc { k: self.k, regs, cols, number: std::marker::PhantomData }
    }

    /// Allocates a fragment with 64 rows per warpgroup.
    #[track_caller]
    pub fn fragment<T: Half>(&self, cols: u32) -> Fragment<'k, T>
    where
        Pair<T>: Word,
    {
        if !cols.is_multiple_of(16) {
            self.k.refuse(format!("a fragment of {cols} columns, allowed: multiples of 16"));
        }
        Fragment::new(self.k, cols as usize / 4, cols)
    }

    /// The first of the thread's two rows among the 64 of its warpgroup; the other is 8 below.
    #[track_caller]
    pub fn first_row(&self) -> Val<'k, u32> {
        (self.thread_in_group() / 32).mul_add(16, self.lane() / 4)
    }
    /// The first of the thread's two adjacent columns in each group of eight.
    #[track_caller]
    pub fn first_col(&self) -> Val<'k, u32> {
        (self.lane() & 3) * 2
    }
}
