//! Tiles in shared memory, tensors in global memory that move tile by tile, and fragments in registers.
//!
//! The whole layout (swizzles, descriptors, boxes, which lane holds which element) is derived from a [`TileShape`]. A
//! kernel names only shapes and coordinates.

use crate::build::{Builder, Group, Half, IntoVal, Pair, Scope, Src, Thread, Val, Who, Word};
use crate::device::RAGGED_ROWS;
use crate::inst::{Arg, Base, Class, Inst, Reg};
use crate::kernel::BoxShape;
use crate::mma::{AccNumber, accumulates};
use crate::product::{Major, Number, TileShape};
use crate::table::{bulk, convert, memory, sync, tensor};
use std::panic::Location;

/// A tensor parameter, as the copy engine sees it.
#[derive(Clone, Copy)]
pub(crate) struct TensorParam<'k> {
    pub k: &'k Builder,
    pub number: u32,
    pub rank: u32,
}

impl<'k> TensorParam<'k> {
    /// Address of the tensor's map. It is recomputed at each use, because keeping it would cost two registers in every
    /// role.
    #[track_caller]
    fn map(&self) -> Val<'k, u64> {
        let (d, map) = Val::fresh(self.k);
        self.k.emit(&convert::PARAM_ADDRESS, [d, Arg::Param(self.number)]);
        map
    }
}

/// A tensor parameter that moves in tiles of one shape. Coordinates count elements, innermost axis first. Reads outside
/// the tensor give zero, writes outside it are dropped.
#[derive(Clone, Copy)]
pub struct Tensor<'k> {
    param: TensorParam<'k>,
    tile: TileShape,
}

/// A range of rows of a tensor, such as one sequence among others. The copy engine does not know where it ends.
#[derive(Clone, Copy)]
pub struct Slice<'k> {
    /// Index of the first row.
    pub start: Val<'k, u32>,
    /// Number of rows.
    pub rows: Val<'k, u32>,
}

impl<'k> Slice<'k> {
    /// Coordinates of a tile in a tensor made by [`Builder::ragged_tensor`], from a column, a row within the slice and
    /// a head.
    #[track_caller]
    pub fn at(self, col: Val<'k, u32>, row: Val<'k, u32>, head: Val<'k, u32>) -> [Val<'k, u32>; 5] {
        let all = self.rows.literal(RAGGED_ROWS);
        self.rows.k.placed(Location::caller(), || [col, all - self.rows + row, head, self.start + self.rows, all])
    }
}

/// The PTX word for the number of axes. The tensor's constructor has already rejected more axes than PTX supports.
fn rank_word(rank: u32) -> &'static str {
    ["1d", "2d", "3d", "4d", "5d"][rank.clamp(1, 5) as usize - 1]
}

impl Builder {
    /// Declares a tensor parameter of `rank` axes (2 to 5) that moves in tiles of this shape along its two innermost
    /// axes.
    #[track_caller]
    pub fn tensor(&self, name: &str, tile: TileShape, rank: u32) -> Tensor<'_> {
        if !(2..=5).contains(&rank) {
            self.refuse(format!("tensor `{name}` has {rank} axes, allowed: 2 to 5"));
        }
        if tile.rows > 256 {
            self.refuse(format!("tensor `{name}` is moved in boxes of {} rows, allowed: up to 256", tile.rows));
        }
        let mut extent = vec![tile.chunk(), tile.rows];
        extent.resize(rank as usize, 1);
        let shape = BoxShape { number: tile.number, extent, swizzle: tile.swizzle };
        Tensor { param: self.tensor_param(name, shape), tile }
    }

    /// Declares a tensor parameter `[row, head, element]` whose tiles are cut off at the end of a [`Slice`] of its
    /// rows. [`TensorSpan::ragged`](crate::device::TensorSpan::ragged) makes the argument.
    #[track_caller]
    pub fn ragged_tensor(&self, name: &str, tile: TileShape) -> Tensor<'_> {
        self.tensor(name, tile, 5)
    }

    /// Allocates a tile in shared memory.
    #[track_caller]
    pub fn tile(&self, name: &str, shape: TileShape) -> Tile<'_> {
        let offset = self.take_shared(name, shape.bytes(), shape.swizzle.period());
        Tile { shape, rows: shape.rows, address: self.shared_address(offset) }
    }
}

/// A tile in shared memory, or a range of its rows.
#[derive(Clone, Copy)]
pub struct Tile<'k> {
    shape: TileShape,
    rows: u32,
    address: Val<'k, u32>,
}

impl<'k> Tile<'k> {
    /// A tile of this shape at the address of another tile.
    pub(crate) fn at(shape: TileShape, address: Val<'k, u32>) -> Self {
        Tile { shape, rows: shape.rows, address }
    }
    /// Shape of the tile; for a range of rows, the shape of the whole tile.
    pub(crate) fn shape(self) -> TileShape {
        self.shape
    }
    /// Number of rows.
    pub(crate) fn row_count(self) -> u32 {
        self.rows
    }
    /// Shared-memory address of the first byte.
    pub(crate) fn address(self) -> Val<'k, u32> {
        self.address
    }
    /// The `index`-th tile of an array of tiles of this shape.
    #[track_caller]
    pub fn nth(self, index: Val<'k, u32>) -> Self {
        let bytes = self.shape.bytes().next_multiple_of(self.shape.swizzle.period());
        Tile { address: index.mul_add(bytes, self.address), ..self }
    }

    /// The `index`-th range of `count` rows.
    #[track_caller]
    pub fn rows(self, index: impl IntoVal<'k, u32>, count: u32) -> Self {
        let k = self.address.k;
        if !count.is_multiple_of(8) || count > self.rows {
            k.refuse(format!("{count} rows of a tile of {}, allowed: multiples of 8 up to that", self.rows));
        }
        let offset = index.into_val(k) * (count * self.shape.swizzle.line());
        Tile { rows: count, address: self.address + offset, ..self }
    }

    /// The `index`-th range of `count` columns, which must be whole chunks.
    #[track_caller]
    pub fn cols(self, index: impl IntoVal<'k, u32>, count: u32) -> Self {
        let (k, shape) = (self.address.k, self.shape);
        if !count.is_multiple_of(shape.chunk()) || count > shape.cols {
            let allowed = format!("multiples of {} up to {}", shape.chunk(), shape.cols);
            k.refuse(format!("{count} columns of a tile of {}, allowed: {allowed}", shape.cols));
        }
        let offset = index.into_val(k) * (count / shape.chunk() * shape.chunk_bytes());
        Tile { shape: TileShape { cols: count, ..shape }, address: self.address + offset, ..self }
    }

    /// The first `count` columns, a multiple of 16. Unlike a range of [`cols`](Self::cols), they may end inside a chunk.
    #[track_caller]
    pub fn first_cols(self, count: u32) -> Self {
        let shape = self.shape;
        if !count.is_multiple_of(16) || count > shape.cols {
            let k = self.address.k;
            k.refuse(format!("the first {count} columns of {}, allowed: multiples of 16 up to that", shape.cols));
        }
        Tile { shape: TileShape { cols: count, ..shape }, ..self }
    }

    /// The `index`-th part of a product operand: `count` rows of A or columns of B. `major` tells whether these are
    /// rows or columns of the tile.
    #[track_caller]
    pub fn part(self, major: Major, index: impl IntoVal<'k, u32>, count: u32) -> Self {
        match major {
            Major::Inner => self.rows(index, count),
            Major::Outer => self.cols(index, count),
        }
    }

    /// The tile as a product operand. The summed dimension runs along the elements of a row ([`Major::Inner`]) or
    /// across the rows.
    pub fn operand(self, major: Major) -> Operand<'k> {
        let (outer, inner) = match major {
            Major::Inner => (self.rows, self.shape.cols),
            Major::Outer => (self.shape.cols, self.rows),
        };
        Operand { tile: self, major, outer, inner, beside: None }
    }

    /// Writes the `unit`-th 16 bytes of a row, given as four words.
    #[track_caller]
    pub fn write_unit<W: Who>(self, w: &Scope<'k, W>, row: Val<'k, u32>, unit: Val<'k, u32>, words: [Val<'k, u32>; 4]) {
        let address = self.unit_at(row, unit);
        let words = w.k.placed(Location::caller(), || words.map(|word| word.in_register()));
        let place = Arg::Address(Base::Reg(address), 0);
        w.k.emit(&memory::ST_SHARED_32, [place, Arg::List(words.into()), Arg::Word(".v4")]);
    }

    /// Reads the `unit`-th 16 bytes of a row as four words.
    #[track_caller]
    pub fn read_unit<W: Who>(self, w: &Scope<'k, W>, row: Val<'k, u32>, unit: Val<'k, u32>) -> [Val<'k, u32>; 4] {
        let words: [Reg; 4] = std::array::from_fn(|_| w.k.register(Class::B32));
        let place = Arg::Address(Base::Reg(self.unit_at(row, unit)), 0);
        w.k.emit(&memory::LD_SHARED_32, [Arg::List(words.into()), place, Arg::Word(".v4")]);
        words.map(|word| Val::reg(w.k, word))
    }

    /// Address of the `unit`-th 16 bytes of a row.
    #[track_caller]
    fn unit_at(self, row: Val<'k, u32>, unit: Val<'k, u32>) -> Reg {
        let (swizzle, units) = (self.shape.swizzle, self.shape.swizzle.line() / 16);
        let linear = row.mul_add(swizzle.line(), (unit % units) * 16);
        let spread = linear ^ ((linear >> 3) & swizzle.mask());
        (unit / units).mul_add(self.shape.chunk_bytes(), self.address + spread).in_register()
    }

    /// A tile of another shape in the same memory, for data whose lifetimes do not overlap.
    #[track_caller]
    pub fn overlay(self, shape: TileShape) -> Tile<'k> {
        if shape.bytes() > self.shape.bytes() || shape.swizzle.period() > self.shape.swizzle.period() {
            let (new, own) = (shape, self.shape);
            self.address
                .k
                .refuse(format!("{new:?} over {own:?}, allowed: at most as many bytes and as wide a swizzle"));
        }
        Tile::at(shape, self.address)
    }

    /// Address of a chunk of columns.
    #[track_caller]
    fn chunk_at(self, chunk: u32) -> Val<'k, u32> {
        self.address + chunk * self.shape.chunk_bytes()
    }
}

/// A tile as a product operand.
#[derive(Clone, Copy)]
pub struct Operand<'k> {
    tile: Tile<'k>,
    major: Major,
    outer: u32,
    inner: u32,
    /// Address of the columns after the first chunk, if they are in another tile.
    beside: Option<Val<'k, u32>>,
}

impl<'k> Operand<'k> {
    /// The tile that holds the operand.
    pub(crate) fn tile(&self) -> Tile<'k> {
        self.tile
    }
    /// The contiguous dimension.
    pub(crate) fn major(&self) -> Major {
        self.major
    }
    /// Rows of A or columns of B.
    pub(crate) fn outer(&self) -> u32 {
        self.outer
    }
    /// Elements of the summed dimension.
    pub(crate) fn inner(&self) -> u32 {
        self.inner
    }

    /// Appends the first `count` columns of another tile. Both tiles have one chunk and equally many rows, and the
    /// other tile must follow this one in shared memory.
    #[track_caller]
    pub fn beside(self, other: Tile<'k>, count: u32) -> Self {
        let (own, k) = (self.tile.shape, self.tile.address.k);
        let whole = |tile: &Tile<'k>| tile.shape.cols == tile.shape.chunk() && tile.rows == tile.shape.rows;
        if self.major != Major::Outer || !whole(&self.tile) || !whole(&other) || other.shape != own || count > own.cols
        {
            k.refuse(format!(
                "{count} columns of {:?} beside {own:?}, allowed: one chunk each, across rows",
                other.shape
            ));
            return self;
        }
        Operand { outer: self.outer + count, beside: Some(other.address), ..self }
    }

    /// Matrix descriptors of the steps of a product over the operand.
    #[track_caller]
    fn descriptors(&self) -> Vec<Reg> {
        self.descriptors_with(0)
    }

    /// Matrix descriptors with more bits set, above those of the address.
    #[track_caller]
    pub(crate) fn descriptors_with(&self, more: u64) -> Vec<Reg> {
        let (k, shape) = (self.tile.address.k, self.tile.shape);
        let mut bits = shape.descriptor(self.major) | more;
        // Shared memory ends below the 18 bits of the address field. So everything but the address is constant, and a
        // step adds to the low half without a carry into other fields. In a cluster, the CTA's rank stands above the
        // address.
        let start = match k.cluster_blocks() {
            1 => self.tile.address >> 4,
            _ => (self.tile.address & 0x3_ffff) >> 4,
        };
        let high = Val::<u32>::new(k, Src::Imm(bits >> 32));
        let start = match self.beside {
            // The distance between the two tiles is known only at run time.
            Some(other) => {
                bits &= 0xffff;
                start + ((((other & 0x3_ffff) >> 4) - start) << 16)
            }
            None => start,
        };
        let step = |j| {
            let low = start + (bits as u32 + (shape.step(self.major, j) >> 4));
            let (d, whole) = Val::<u64>::fresh(k);
            k.emit(&convert::JOIN_64, [d, Arg::List([low.in_register(), high.in_register()].into())]);
            whole.in_register()
        };
        let steps = (0..self.inner / shape.number.depth()).map(step);
        self.tile.address.k.placed(Location::caller(), || steps.collect())
    }
    fn transposed(&self) -> Arg {
        Arg::Imm(u64::from(self.major == Major::Outer))
    }
}

/// Accumulators of a warpgroup: 64 rows and `cols` columns of f32, spread over its threads. Thread t of the warpgroup
/// holds elements of rows 16 (t / 32) + t % 32 / 4 and of the row 8 below.
pub struct Acc<'k, N = f32> {
    k: &'k Builder,
    regs: Vec<Reg>,
    cols: u32,
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

    /// Starts acc (+)= a b as one group, with `a` in registers. `between` is called before each step of the product,
    /// with the number of remaining steps.
    #[track_caller]
    pub fn multiply_fragment<T: Half>(
        &self,
        acc: &Acc<'k>,
        a: &Fragment<'k, T>,
        b: Operand<'k>,
        sum: Sum<'k>,
        between: impl Fn(u32),
    ) where
        Pair<T>: Word,
    {
        let (k, number) = (self.k, T::NUMBER);
        if (a.cols, acc.cols) != (b.inner, b.outer) || b.tile.shape.number != number {
            let what = format!(
                "{} 64x{} times {:?} {}x{} into 64x{}",
                T::NAME,
                a.cols,
                b.tile.shape.number,
                b.inner,
                b.outer,
                acc.cols
            );
            k.refuse(format!("a product of {what}, allowed: equal inner sizes and types, matching columns"));
            return;
        }
        let steps = b.descriptors();
        self.plain(&sync::WGMMA_FENCE);
        let count = steps.len() as u32;
        for (j, b_step) in steps.into_iter().enumerate() {
            between(count - j as u32);
            let args = [
                Arg::List(acc.regs.as_slice().into()),
                Arg::List(a.regs[4 * j..4 * j + 4].into()),
                Arg::Reg(b_step),
                sum.at(j),
                Arg::Imm(acc.cols.into()),
                Arg::Word(number.name()),
                b.transposed(),
            ];
            k.emit(&tensor::WGMMA_RS, args);
        }
        self.plain(&sync::WGMMA_COMMIT);
    }

    /// Starts acc (+)= a b as one group: 64 rows of `a` and all columns of `b`. Elements are f16, bf16, tf32, e4m3 or
    /// e5m2 with f32 accumulators, or s8 or u8 with i32. Only 16-bit elements may have the summed dimension across the
    /// rows of a tile.
    #[track_caller]
    pub fn multiply<N: AccNumber>(&self, acc: &Acc<'k, N>, a: Operand<'k>, b: Operand<'k>, sum: Sum<'k>) {
        let (k, number) = (self.k, a.tile.shape.number);
        let floats = [Number::E4m3, Number::E5m2];
        let pairs = number == b.tile.shape.number || [number, b.tile.shape.number].iter().all(|n| floats.contains(n));
        if (a.outer, a.inner, b.outer) != (64, b.inner, acc.cols) || !pairs {
            let what = format!(
                "{number:?} {}x{} times {:?} {}x{} into 64x{}",
                a.outer, a.inner, b.tile.shape.number, b.inner, b.outer, acc.cols
            );
            k.refuse(format!("a product of {what}, allowed: 64 rows, equal inner sizes and types, matching columns"));
            return;
        }
        if matches!(number, Number::F32 | Number::S32) || accumulates(number) != N::NUMBER {
            k.refuse(format!(
                "a product of {number:?} into {:?}, allowed: F16, Bf16, Tf32, E4m3 and E5m2 into F32, S8 and U8 into S32",
                N::NUMBER
            ));
            return;
        }
        let inner = [a, b].iter().all(|operand| operand.major == Major::Inner);
        if number.bytes() != 2 && !inner {
            k.refuse(format!(
                "a product of {number:?} summed over rows of a tile, allowed: along them ([k] contiguous)"
            ));
            return;
        }
        let (inst, end): (&'static Inst, Vec<Arg>) = match number {
            Number::Tf32 => (&tensor::WGMMA_TF32, vec![]),
            Number::E4m3 | Number::E5m2 => {
                (&tensor::WGMMA_FP8, [a, b].map(|operand| Arg::Word(operand.tile.shape.number.name())).to_vec())
            }
            Number::S8 | Number::U8 => (&tensor::WGMMA_INT8, vec![Arg::Word(number.name()), Arg::Word("")]),
            _ => (&tensor::WGMMA_SS, vec![Arg::Word(number.name()), a.transposed(), b.transposed()]),
        };
        let steps = a.descriptors().into_iter().zip(b.descriptors());
        self.plain(&sync::WGMMA_FENCE);
        for (j, (a_step, b_step)) in steps.enumerate() {
            let (a_step, b_step) = (Arg::Reg(a_step), Arg::Reg(b_step));
            let all = [Arg::List(acc.regs.as_slice().into()), a_step, b_step, sum.at(j), Arg::Imm(acc.cols.into())];
            k.emit(inst, all.into_iter().chain(end.iter().cloned()).collect::<Vec<Arg>>());
        }
        self.plain(&sync::WGMMA_COMMIT);
    }

    /// Writes accumulators to 64 rows of a tile, rounded to 16 bits.
    #[track_caller]
    pub fn write<T: Half>(&self, tile: Tile<'k>, acc: &Acc<'k>)
    where
        Pair<T>: Word,
    {
        self.write_with::<T>(tile, acc, |_, x| x);
    }

    /// Writes `f(row, x)` of each accumulator `x`, rounded to 16 bits. `row` is the index of the element's row in the
    /// thread.
    #[track_caller]
    pub fn write_with<T: Half>(&self, tile: Tile<'k>, acc: &Acc<'k>, f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>)
    where
        Pair<T>: Word,
    {
        let (at, elements) = (Location::caller(), acc.elements().collect::<Vec<Val<'k, f32>>>());
        self.write_parts::<T>(tile, acc.cols, |j| {
            let part = &elements[8 * j..8 * j + 8];
            [0, 2, 4, 6].map(|i| {
                let (low, high) = (f(Acc::row_of(i), part[i]), f(Acc::row_of(i + 1), part[i + 1]));
                self.k.placed(at, || low.pair_with::<T>(high).in_register())
            })
        });
    }

    /// Fills a tile with one value; the threads of the role share the work.
    #[track_caller]
    pub fn fill<T: Half>(&self, tile: Tile<'k>, x: T) {
        let (first, warps) = self.k.role_warps();
        let own = self.thread() - 32 * first;
        let half = x.bits() as u32;
        let words = [self.constant(half << 16 | half).in_register(); 4];
        self.each(own * 16, tile.shape.bytes(), warps * 32 * 16, |w, offset| {
            let place = Arg::Address(Base::Reg((tile.address + offset).in_register()), 0);
            w.k.emit(&memory::ST_SHARED_32, [place, Arg::List(words.into()), Arg::Word(".v4")]);
        });
    }

    /// Applies `f` to every word of a tile; the threads of the role share the work.
    #[track_caller]
    pub fn change_words(&self, tile: Tile<'k>, f: impl Fn(Val<'k, u32>) -> Val<'k, u32>) {
        let (at, (first, warps)) = (Location::caller(), self.k.role_warps());
        let (own, bytes) = (self.thread() - 32 * first, tile.shape.bytes());
        self.each(own * 16, bytes, warps * 32 * 16, |w, offset| {
            w.k.placed(at, || {
                let place = Arg::Address(Base::Reg((tile.address + offset).in_register()), 0);
                let regs: [Reg; 4] = std::array::from_fn(|_| w.k.register(Class::B32));
                w.k.emit(&memory::LD_SHARED_32, [Arg::List(regs.into()), place.clone(), Arg::Word(".v4")]);
                let changed = regs.map(|reg| f(Val::reg(w.k, reg)).in_register());
                w.k.emit(&memory::ST_SHARED_32, [place, Arg::List(changed.into()), Arg::Word(".v4")]);
            });
        });
    }

    /// Writes a fragment to 64 rows of a tile.
    #[track_caller]
    pub fn write_fragment<T: Half>(&self, tile: Tile<'k>, fragment: &Fragment<'k, T>)
    where
        Pair<T>: Word,
    {
        self.write_parts::<T>(tile, fragment.cols, |j| std::array::from_fn(|i| fragment.regs[4 * j + i]));
    }

    /// Writes a fragment transposed: its rows become 64 columns of a tile, which must be in one chunk.
    #[track_caller]
    pub fn write_fragment_turned<T: Half>(&self, tile: Tile<'k>, fragment: &Fragment<'k, T>)
    where
        Pair<T>: Word,
    {
        let (shape, rows) = (tile.shape, fragment.cols);
        if tile.rows < rows || shape.cols < 64 || shape.chunk() != 64 || shape.number != T::NUMBER {
            self.k.refuse(format!(
                "64x{rows} {} written to columns of {} rows of {shape:?}, allowed: as many rows, the same type, chunks of 64 columns",
                T::NAME,
                tile.rows
            ));
            return;
        }
        // Lane l supplies the address of row l % 8 + 8 (l / 16) of 16, starting at column 8 (l / 8 % 2) of its warp's
        // 16.
        let lane = self.lane();
        let row = (lane & 7) + ((lane >> 4) << 3);
        let col = (self.thread_in_group() / 32).mul_add(32, (lane & 8) * 2);
        let linear = row.mul_add(shape.swizzle.line(), col);
        let spread = linear ^ ((linear >> 3) & shape.swizzle.mask());
        let base = (tile.address + spread).in_register();
        for (j, regs) in fragment.regs.chunks_exact(4).enumerate() {
            let place = Arg::Address(Base::Reg(base), (j as u32 * 16 * shape.swizzle.line()) as i32);
            self.k.emit(&memory::STMATRIX, [place, Arg::List(regs.into()), Arg::Word("x4"), Arg::Word(".trans")]);
        }
    }

    /// Writes 16 columns at a time to 64 rows of a tile; `pairs(j)` gives the registers of the `j`-th 16 columns.
    #[track_caller]
    fn write_parts<T: Half>(&self, tile: Tile<'k>, cols: u32, pairs: impl Fn(usize) -> [Reg; 4])
    where
        Pair<T>: Word,
    {
        let shape = tile.shape;
        if tile.rows != 64 || cols > shape.cols || !cols.is_multiple_of(16) || shape.number != T::NUMBER {
            self.k.refuse(format!(
                "64x{cols} {} written to {} rows of {shape:?}, allowed: 64 rows, the same type, multiples of 16 columns",
                T::NAME,
                tile.rows
            ));
            return;
        }
        // Lane l supplies the address of row l % 16 of its warp's 16 rows, starting at column 8 (l / 16).
        let lane = self.lane();
        let row = (self.thread_in_group() / 32).mul_add(16, lane & 15);
        let linear = row.mul_add(shape.swizzle.line(), (lane >> 4) * 16);
        let spread = linear ^ ((linear >> 3) & shape.swizzle.mask());
        let base = tile.address + spread;
        let units = shape.swizzle.line() / 32;
        for j in 0..cols / 16 {
            let regs = pairs(j as usize);
            // Offsets of whole 32-byte units use address bits that the row does not reach, so xor adds them under the
            // swizzle.
            let address = if units == 0 { base } else { base ^ (j % units * 32) };
            let chunk = j.checked_div(units).unwrap_or(j) * shape.chunk_bytes();
            let place = Arg::Address(Base::Reg(address.in_register()), chunk as i32);
            self.k.emit(&memory::STMATRIX, [place, Arg::List(regs.into()), Arg::Word("x4"), Arg::Word("")]);
        }
    }
}

impl<'k> Scope<'k, Thread> {
    /// Starts copying a tile to a tensor.
    #[track_caller]
    pub fn store_tile(&self, to: &Tensor<'k>, at: &[Val<'k, u32>], from: Tile<'k>) {
        for chunk in 0..to.tile.chunks() {
            let (regs, rank) = to.coordinates(at, chunk);
            let tile = Arg::Address(Base::Reg(from.chunk_at(chunk).in_register()), 0);
            self.k.emit(&bulk::STORE_BOX, [to.param.map().arg(), regs, tile, Arg::Word(rank)]);
        }
    }
    /// Starts prefetching a tile of a tensor into the L2 cache; only a hint.
    #[track_caller]
    pub fn prefetch_tile(&self, from: &Tensor<'k>, at: &[Val<'k, u32>]) {
        for chunk in 0..from.tile.chunks() {
            let (regs, rank) = from.coordinates(at, chunk);
            self.k.emit(&bulk::PREFETCH_BOX, [from.param.map().arg(), regs, Arg::Word(rank)]);
        }
    }
}

impl<'k> Tensor<'k> {
    /// Shape of the tiles in which the tensor moves.
    pub fn tile(&self) -> TileShape {
        self.tile
    }

    /// Coordinates of a chunk of the tile at `at`.
    #[track_caller]
    fn coordinates(&self, at: &[Val<'k, u32>], chunk: u32) -> (Arg, &'static str) {
        let k = self.param.k;
        if at.len() != self.param.rank as usize {
            k.refuse(format!("{} coordinates for a tensor of {} axes", at.len(), self.param.rank));
            return (Arg::List(Box::new([])), rank_word(self.param.rank));
        }
        let first = at[0] + chunk * self.tile.chunk();
        let regs = std::iter::once(first).chain(at[1..].iter().copied()).map(|c| c.in_register());
        let regs = k.placed(Location::caller(), || regs.collect());
        (Arg::List(regs), rank_word(self.param.rank))
    }

    /// Starts copying the tile at `at` into `to`; the mbarrier at `bar` counts its bytes.
    #[track_caller]
    pub(crate) fn load<W: Who>(
        &self,
        w: &Scope<'k, W>,
        at: &[Val<'k, u32>],
        to: Tile<'k>,
        bar: Val<'k, u32>,
        multicast: Option<u16>,
    ) {
        for chunk in 0..self.tile.chunks() {
            let (regs, rank) = self.coordinates(at, chunk);
            let tile = Arg::Address(Base::Reg(to.chunk_at(chunk).in_register()), 0);
            let bar = Arg::Address(Base::Reg(bar.in_register()), 0);
            let map = self.param.map().arg();
            match multicast {
                None => w.k.emit(&bulk::LOAD_BOX, [tile, map, regs, bar, Arg::Word(rank)]),
                Some(mask) => {
                    let reg = w.k.register(Class::B16);
                    let mov: &'static Inst = &convert::MOV_16;
                    w.k.emit(mov, [Arg::Reg(reg), Arg::Imm(mask.into())]);
                    w.k.emit(&bulk::LOAD_BOX_MULTICAST, [tile, map, regs, bar, Arg::Reg(reg), Arg::Word(rank)]);
                }
            }
        }
    }
}
