//! Products of single warps: `mma.sync`, with operands that `ldmatrix` loads from swizzled tiles in shared memory.
//!
//! Every tensor core since Ampere supports them. One instruction multiplies 16 rows of A by 8 columns of B over 32
//! bytes of the summed dimension. Accumulators have the same register layout as those of `wgmma`.

use crate::accumulators::Fragment;
use crate::build::{Builder, Group, Half, IntoVal, Pair, Scope, Val, WholeWarps, Word};
use crate::inst::{Arg, Base, Class, Inst, Reg};
use crate::product::{Major, Number, Swizzle};
use crate::row_view::RowView;
use crate::table::{convert, memory, tensor};
use crate::tile::{Tile, TileOperand};
use std::marker::PhantomData;

/// Rows of A, or columns of B, that one `ldmatrix` loads.
const BLOCK: u32 = 16;

/// An element type of accumulators.
pub trait AccNumber: Word {
    /// The type's name for tensor cores.
    const NUMBER: Number;
}
impl AccNumber for f32 {
    const NUMBER: Number = Number::F32;
}
impl AccNumber for i32 {
    const NUMBER: Number = Number::S32;
}

/// The accumulator type for products of these elements.
pub(crate) fn accumulates(number: Number) -> Number {
    match number {
        Number::S8 | Number::U8 => Number::S32,
        _ => Number::F32,
    }
}

/// Accumulators of a warp: 16 `M` rows and `cols` columns. In each block of 16 rows, lane l holds elements of row l / 4
/// and of the row 8 below, two for each group of eight columns.
pub struct WarpAcc<'k, const M: usize, N = f32> {
    k: &'k Builder,
    /// For each eight columns and each block of rows: two neighbours of the upper row, then two of the lower.
    regs: Vec<Reg>,
    cols: u32,
    number: PhantomData<N>,
}

impl<'k, const M: usize, N: AccNumber> WarpAcc<'k, M, N> {
    /// Number of columns.
    pub fn cols(&self) -> u32 {
        self.cols
    }
    /// The thread's elements, in register order.
    pub fn elements(&self) -> impl Iterator<Item = Val<'k, N>> {
        let k = self.k;
        self.regs.iter().map(move |&reg| Val::reg(k, reg))
    }
    /// Replaces the `i`-th element.
    #[track_caller]
    pub fn set(&self, i: usize, x: impl IntoVal<'k, N>) {
        let row: &'static Inst = if N::CLASS == Class::F32 { &convert::MOV_F32 } else { &convert::MOV_32 };
        self.k.emit(row, [Arg::Reg(self.regs[i]), x.into_val(self.k).arg()]);
    }
    /// Sets all elements to 0.
    #[track_caller]
    pub fn clear(&self)
    where
        N: Default + IntoVal<'k, N>,
    {
        for i in 0..self.regs.len() {
            self.set(i, N::default());
        }
    }
    /// The accumulators of the `columns`-th eight columns and the `block`-th 16 rows.
    fn block(&self, columns: u32, block: usize) -> &[Reg] {
        let start = 4 * (columns as usize * M + block);
        &self.regs[start..start + 4]
    }
}

impl<'k, const M: usize> RowView<'k> for WarpAcc<'k, M> {
    const ROWS: usize = 2 * M;
    const LANES: u32 = 4;
    const RUN: u32 = 2;
    const GROUP_ROWS: u32 = 64 * M as u32;

    fn row_of(i: usize) -> usize {
        2 * (i / 4 % M) + i / 2 % 2
    }
    fn col_of(i: usize) -> u32 {
        (i / (4 * M) * 8 + i % 2) as u32
    }
    fn index(row: usize, period: usize, at: usize) -> usize {
        4 * (period * M + row / 2) + 2 * (row % 2) + at
    }
    fn row_offset(row: usize) -> u32 {
        (16 * (row / 2) + 8 * (row % 2)) as u32
    }

    #[track_caller]
    fn first_row(w: &Scope<'k, Group>) -> Val<'k, u32> {
        (w.thread_in_group() / 32).mul_add(BLOCK * M as u32, w.lane() / 4)
    }
    #[track_caller]
    fn first_col<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32> {
        (w.lane() & 3) * 2
    }
    #[track_caller]
    fn lane_in_row<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32> {
        w.lane() & 3
    }

    fn cols(&self) -> u32 {
        self.cols
    }
    fn elements(&self) -> impl Iterator<Item = Val<'k, f32>> {
        WarpAcc::elements(self)
    }
    #[track_caller]
    fn set(&self, i: usize, x: Val<'k, f32>) {
        WarpAcc::set(self, i, x);
    }
    #[track_caller]
    fn part(&self, index: u32, count: u32) -> Self {
        let per = count as usize / 8 * 4 * M;
        let regs = index as usize * per..(index as usize + 1) * per;
        if !count.is_multiple_of(8) || regs.end > self.regs.len() {
            self.k.refuse(format!("part {index} of {count} columns of {}, allowed: multiples of 8 inside", self.cols));
            return WarpAcc { k: self.k, regs: self.regs.clone(), cols: self.cols, number: PhantomData };
        }
        WarpAcc { k: self.k, regs: self.regs[regs].to_vec(), cols: count, number: PhantomData }
    }

    #[track_caller]
    fn write_with<T: Half>(&self, w: &Scope<'k, Group>, tile: Tile<'k>, f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>)
    where
        Pair<T>: Word,
    {
        let (shape, rows) = (tile.shape(), Self::GROUP_ROWS);
        if tile.row_count() != rows || self.cols > shape.cols || shape.number != T::NUMBER {
            self.k.refuse(format!(
                "{rows}x{} {} written to {} rows of {shape:?}, allowed: as many rows and columns, the same type",
                self.cols,
                T::NAME,
                tile.row_count()
            ));
            return;
        }
        let (line, units) = (shape.swizzle.line(), shape.swizzle.line() / 16);
        let linear = Self::first_row(w).mul_add(line, Self::lane_in_row(w) * 4);
        let base = tile.address() + (linear ^ ((linear >> 3) & shape.swizzle.mask()));
        let elements: Vec<Val<'k, f32>> = self.elements().collect();
        for columns in 0..self.cols / 8 {
            // The swizzle only xors the bits that select a 16-byte unit, so xor-ing the unit number moves by whole units.
            let address = (base ^ (columns % units * 16)).in_register();
            let chunk = columns / units * shape.chunk_bytes();
            for row in 0..Self::ROWS {
                let [low, high] = [0, 1].map(|at| f(row, elements[Self::index(row, columns as usize, at)]));
                let pair = low.pair_with::<T>(high).in_register();
                let place = Arg::Address(Base::Reg(address), (chunk + Self::row_offset(row) * line) as i32);
                self.k.emit(&memory::ST_SHARED_32, [place, Arg::List([pair].into()), Arg::Word("")]);
            }
        }
    }

    /// `mma.sync` is synchronous: the next instruction may read its result.
    fn wait(_: &Scope<'k, Group>) {}
    fn wait_after(_: &Scope<'k, Group>, _: &[Val<'k, f32>]) {}
}

/// The two operands of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Factor {
    A,
    B,
}

/// An operand as `ldmatrix` loads it: 16 rows (of A) or columns (of B) and 32 bytes of the summed dimension at a time.
struct Blocks<'k> {
    operand: TileOperand<'k>,
    /// The lane's address for the first step of the first block, if blocks and steps lie at constant distances from it.
    /// Otherwise, its address for the first step of each block.
    lane: LaneAddress<'k>,
}

enum LaneAddress<'k> {
    /// The address for each 32 bytes of a line of the swizzle, and the number of the first block.
    Lines(Vec<Val<'k, u32>>, u32),
    Blocks(Vec<Val<'k, u32>>),
}

impl<'k> Blocks<'k> {
    /// `count` blocks, starting at row (of A) or column (of B) `first`.
    #[track_caller]
    fn new<W: WholeWarps>(
        w: &Scope<'k, W>,
        operand: TileOperand<'k>,
        first: Val<'k, u32>,
        count: u32,
        side: Factor,
    ) -> Self {
        let shape = operand.tile().shape();
        let (line, units) = (shape.swizzle.line(), shape.swizzle.line() / 32);
        let lane = w.lane();
        // `ldmatrix` loads four matrices of 8 x 16 bytes. For A the first two differ in rows, for B in the summed
        // dimension. Tiles that are contiguous along the other dimension are loaded transposed, which swaps the two.
        let rows_first = (side == Factor::A) == (operand.major() == Major::Inner);
        let (row, unit) = match rows_first {
            true => (lane & 15, lane >> 4),
            false => ((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1),
        };
        let row = if operand.major() == Major::Inner { row + first } else { row };
        let linear = row.mul_add(line, unit * 16);
        let base = operand.tile().address() + (linear ^ ((linear >> 3) & shape.swizzle.mask()));
        let number = match operand.major() {
            Major::Inner => Some(0),
            Major::Outer => first.known().map(|first| first / BLOCK),
        };
        // A closure would record this file as the source of its instructions, not the caller's line.
        let mut addresses = Vec::new();
        if let Some(number) = number {
            // The bits that select 32 bytes of a line do not carry, so they can be flipped before constants are added.
            for line in 0..units {
                addresses.push(if line == 0 { base } else { base ^ (line * 32) });
            }
            return Blocks { operand, lane: LaneAddress::Lines(addresses, number) };
        }
        for i in 0..count {
            let at = first / BLOCK + i;
            addresses.push((at / units).mul_add(shape.chunk_bytes(), base ^ ((at % units) * 32)));
        }
        Blocks { operand, lane: LaneAddress::Blocks(addresses) }
    }

    /// Loads a block at a step of the summed dimension.
    #[track_caller]
    fn load(&self, k: &'k Builder, block: u32, step: u32) -> [Reg; 4] {
        let shape = self.operand.tile().shape();
        let (line, units) = (shape.swizzle.line(), shape.swizzle.line() / 32);
        let down = step * shape.number.depth() * line;
        let (address, offset, way) = match (self.operand.major(), &self.lane) {
            (Major::Inner, LaneAddress::Lines(lines, _)) => {
                let offset = step / units * shape.chunk_bytes() + block * BLOCK * line;
                (lines[(step % units) as usize], offset, "")
            }
            (Major::Outer, LaneAddress::Lines(lines, first)) => {
                let at = first + block;
                (lines[(at % units) as usize], at / units * shape.chunk_bytes() + down, ".trans")
            }
            (_, LaneAddress::Blocks(blocks)) => (blocks[block as usize], down, ".trans"),
        };
        let regs: [Reg; 4] = std::array::from_fn(|_| k.register(Class::B32));
        let place = Arg::Address(Base::Reg(address.in_register()), offset as i32);
        k.emit(&memory::LDMATRIX, [Arg::List(regs.into()), place, Arg::Word("x4"), Arg::Word(way)]);
        regs
    }
}

/// The row of the instruction table that multiplies these elements, and its words.
fn row(a: Number, b: Number) -> Option<(&'static Inst, Vec<&'static str>)> {
    use Number::{Bf16, E4m3, E5m2, F16, S8, Tf32, U8};
    match (a, b) {
        (F16, F16) | (Bf16, Bf16) => Some((&tensor::MMA_HALF, vec![a.name()])),
        (Tf32, Tf32) => Some((&tensor::MMA_TF32, vec![])),
        (E4m3 | E5m2, E4m3 | E5m2) => Some((&tensor::MMA_FP8, vec![a.name(), b.name()])),
        (S8, S8) | (U8, U8) => Some((&tensor::MMA_INT8, vec![a.name()])),
        (S8, U8) => Some((&tensor::MMA_INT8_MIXED, vec!["s8.u8"])),
        (U8, S8) => Some((&tensor::MMA_INT8_MIXED, vec!["u8.s8"])),
        _ => None,
    }
}

/// Multiplies the row blocks of A by the `columns`-th 16 columns of B, for one step of the summed dimension.
#[track_caller]
fn multiply_blocks<const M: usize, N: AccNumber>(
    k: &Builder,
    acc: &WarpAcc<'_, M, N>,
    (lefts, both): (&[[Reg; 4]], &[Reg; 4]),
    columns: u32,
    (inst, words): (&'static Inst, &[&'static str]),
) {
    for half in 0..2 {
        for (block, a) in lefts.iter().enumerate() {
            let d = acc.block(2 * columns + half, block);
            let b = &both[2 * half as usize..2 * half as usize + 2];
            let lists = [d, a, b, d].map(|regs| Arg::List(regs.into()));
            let args: Vec<Arg> = lists.into_iter().chain(words.iter().map(|w| Arg::Word(w))).collect();
            k.emit(inst, args);
        }
    }
}

impl<'k, W: WholeWarps> Scope<'k, W> {
    /// Allocates accumulators of 16 `M` rows and `cols` columns per warp: f32, or i32 for products of bytes.
    #[track_caller]
    pub fn warp_accumulators<const M: usize, N: AccNumber>(&self, cols: u32) -> WarpAcc<'k, M, N> {
        if M == 0 || !cols.is_multiple_of(BLOCK) || cols == 0 {
            self.k.refuse(format!(
                "accumulators of {M} blocks of rows and {cols} columns, allowed: 1 block or more, multiples of 16 columns"
            ));
        }
        let regs = (0..M * cols as usize / 2).map(|_| self.k.register(N::CLASS)).collect();
        WarpAcc { k: self.k, regs, cols, number: PhantomData }
    }

    /// Allocates a left operand with the rows of [`WarpAcc`]s of `M` blocks.
    #[track_caller]
    pub fn warp_fragment<const M: usize, T: Half>(&self, cols: u32) -> Fragment<'k, T>
    where
        Pair<T>: Word,
    {
        if !cols.is_multiple_of(BLOCK) {
            self.k.refuse(format!("a fragment of {cols} columns, allowed: multiples of {BLOCK}"));
        }
        Fragment::new(self.k, M * cols as usize / 4, cols)
    }

    /// Computes acc += a b in each warp: a fragment of 16 `M` rows, and the accumulators' columns of `b` starting at
    /// `b_first`, a multiple of 16.
    #[track_caller]
    pub fn multiply_warp_fragment<const M: usize, T: Half>(
        &self,
        acc: &WarpAcc<'k, M>,
        a: &Fragment<'k, T>,
        (b, b_first): (TileOperand<'k>, Val<'k, u32>),
    ) where
        Pair<T>: Word,
    {
        let (k, shape) = (self.k, b.tile().shape());
        let fits = (a.cols(), shape.number) == (b.inner(), T::NUMBER) && b.outer() >= acc.cols;
        if !fits || a.regs().len() != M * a.cols() as usize / 4 || shape.swizzle == Swizzle::None {
            k.refuse(format!(
                "a product of {}x{} {} in registers and {}x{} {shape:?} into {} columns, allowed: equal inner sizes and types, as many columns, swizzled tiles",
                BLOCK * M as u32,
                a.cols(),
                T::NAME,
                b.inner(),
                b.outer(),
                acc.cols
            ));
            return;
        }
        let right = Blocks::new(self, b, b_first, acc.cols / BLOCK, Factor::B);
        for step in 0..a.cols() / BLOCK {
            // Four pairs of each block: two rows of the step's first eight columns, then of its last eight.
            let pair = |columns: u32, block: usize, row: usize| a.regs()[2 * (columns as usize * M + block) + row];
            let lefts: Vec<[Reg; 4]> = (0..M)
                .map(|block| [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(half, row)| pair(2 * step + half, block, row)))
                .collect();
            for columns in 0..acc.cols / BLOCK {
                let both = right.load(k, columns, step);
                multiply_blocks(k, acc, (&lefts, &both), columns, (&tensor::MMA_HALF, &[T::NUMBER.name()]));
            }
        }
    }

    /// Computes acc += a b in each warp: 16 `M` rows of `a` starting at `a_first`, and the accumulators' columns of `b`
    /// starting at `b_first`. Both starts are multiples of 16.
    #[track_caller]
    pub fn multiply_warp<const M: usize, N: AccNumber>(
        &self,
        acc: &WarpAcc<'k, M, N>,
        (a, a_first): (TileOperand<'k>, Val<'k, u32>),
        (b, b_first): (TileOperand<'k>, Val<'k, u32>),
    ) {
        let k = self.k;
        let numbers = [a, b].map(|operand| operand.tile().shape().number);
        let Some((inst, words)) = row(numbers[0], numbers[1]).filter(|_| accumulates(numbers[0]) == N::NUMBER) else {
            let [a, b, to] = [numbers[0], numbers[1], N::NUMBER].map(Number::name);
            k.refuse(format!(
                "a product of {a} and {b} into {to}, allowed: f16, bf16, tf32, e4m3 and e5m2 into f32, s8 and u8 into s32"
            ));
            return;
        };
        let fits = |operand: TileOperand<'k>, outer: u32| {
            let shape = operand.tile().shape();
            let across = operand.major() == Major::Inner || shape.number.bytes() == 2;
            operand.outer() >= outer && across && shape.swizzle != Swizzle::None
        };
        let inner = a.inner();
        if !fits(a, BLOCK * M as u32)
            || !fits(b, acc.cols)
            || inner != b.inner()
            || !inner.is_multiple_of(numbers[0].depth())
        {
            k.refuse(format!(
                "a product of {}x{} {:?} and {}x{} {:?} into {}x{}, allowed: equal inner sizes, as many rows and columns, swizzled tiles, 16-bit elements where rows are summed over",
                a.outer(),
                a.inner(),
                a.tile().shape(),
                b.inner(),
                b.outer(),
                b.tile().shape(),
                BLOCK * M as u32,
                acc.cols
            ));
            return;
        }
        let left = Blocks::new(self, a, a_first, M as u32, Factor::A);
        let right = Blocks::new(self, b, b_first, acc.cols / BLOCK, Factor::B);
        for step in 0..inner / numbers[0].depth() {
            let mut lefts = Vec::new();
            for block in 0..M {
                lefts.push(left.load(k, block as u32, step));
            }
            for columns in 0..acc.cols / BLOCK {
                let both = right.load(k, columns, step);
                multiply_blocks(k, acc, (&lefts, &both), columns, (inst, &words));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::accumulator_element;

    fn check<const M: usize>() {
        type View<'k, const M: usize> = WarpAcc<'k, M>;
        for (lane, i) in (0..32u32).flat_map(|lane| (0..16 * M).map(move |i| (lane, i))) {
            // A block of 16 rows and 8 columns has the layout of `accumulator_element`.
            let (block, columns, e) = (i / 4 % M, i / (4 * M), i % 4);
            let (row, col) = accumulator_element(lane, e as u32);
            let own = View::<M>::row_of(i);
            assert_eq!(lane / 4 + View::<M>::row_offset(own), row + 16 * block as u32);
            assert_eq!(2 * (lane % 4) + View::<M>::col_of(i), col + 8 * columns as u32);
            assert_eq!(View::<M>::index(own, columns, i % 2), i);
            assert!(own < View::<M>::ROWS);
        }
    }

    #[test]
    fn the_view_of_warp_accumulators() {
        check::<1>();
        check::<2>();
        check::<4>();
    }
}
