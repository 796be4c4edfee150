//! Tiles in shared memory: their parts, their use as operands, and how registers are written to them.
//!
//! The whole layout (swizzles, descriptors, chunks, which lane writes which element) is derived from a [`TileShape`]. A
//! kernel names only shapes and coordinates.

use crate::accumulators::{Acc, Fragment};
use crate::build::{Builder, Group, Half, IntoVal, Pair, Scope, Src, Val, Who, Word};
use crate::inst::{Arg, Base, Class, Reg};
use crate::product::{Major, TileShape};
use crate::table::{convert, memory};
use std::ops::Range;
use std::panic::Location;

impl Builder {
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
    pub fn operand(self, major: Major) -> TileOperand<'k> {
        let (outer, inner) = match major {
            Major::Inner => (self.rows, self.shape.cols),
            Major::Outer => (self.shape.cols, self.rows),
        };
        TileOperand { tile: self, major, outer, first: 0, inner, beside: None }
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

    /// A descriptor with these constant bits of the memory `offset` bytes into the tile.
    #[track_caller]
    pub(crate) fn constant_descriptor(self, bits: u64, offset: u32) -> Reg {
        let k = self.address.k;
        let start = match k.cluster_blocks() {
            1 => self.address >> 4,
            _ => (self.address & 0x3_ffff) >> 4,
        };
        let low = start + (bits as u32 + (offset >> 4));
        let high = Val::<u32>::new(k, Src::Imm(bits >> 32));
        let (d, whole) = Val::<u64>::fresh(k);
        k.placed(Location::caller(), || {
            k.emit(&convert::JOIN_64, [d, Arg::List([low.in_register(), high.in_register()].into())]);
            whole.in_register()
        })
    }

    /// Address of a chunk of columns.
    #[track_caller]
    pub(crate) fn chunk_at(self, chunk: u32) -> Val<'k, u32> {
        self.address + chunk * self.shape.chunk_bytes()
    }
}

/// A tile as a product operand.
#[derive(Clone, Copy)]
pub struct TileOperand<'k> {
    tile: Tile<'k>,
    major: Major,
    outer: u32,
    /// First element of the summed dimension, and their number.
    first: u32,
    inner: u32,
    /// Address of the columns after the first chunk, if they are in another tile.
    beside: Option<Val<'k, u32>>,
}

impl<'k> TileOperand<'k> {
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

    /// The operand of a product over a range of the summed dimension.
    #[track_caller]
    pub fn summed(self, range: Range<u32>) -> Self {
        let depth = self.tile.shape.number.depth();
        if !range.start.is_multiple_of(depth) || !range.end.is_multiple_of(depth) || range.end > self.inner {
            let what = format!("{range:?} of {} summed elements, allowed: multiples of {depth} inside", self.inner);
            self.tile.address.k.refuse(what);
            return self;
        }
        TileOperand { first: self.first + range.start, inner: range.end - range.start, ..self }
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
        TileOperand { outer: self.outer + count, beside: Some(other.address), ..self }
    }

    /// Matrix descriptors of the steps of a product over the operand.
    #[track_caller]
    pub(crate) fn descriptors(&self) -> Vec<Reg> {
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
        let [first, count] = [self.first, self.inner].map(|elements| elements / shape.number.depth());
        let steps = (first..first + count).map(step);
        self.tile.address.k.placed(Location::caller(), || steps.collect())
    }
    pub(crate) fn transposed(&self) -> Arg {
        Arg::Imm(u64::from(self.major == Major::Outer))
    }
}

impl<'k> Scope<'k, Group> {
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
        self.write_parts::<T>(tile, acc.cols(), |j| {
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
        self.write_parts::<T>(tile, fragment.cols(), |j| std::array::from_fn(|i| fragment.regs()[4 * j + i]));
    }

    /// Writes a fragment transposed: its rows become 64 columns of a tile, which must be in one chunk.
    #[track_caller]
    pub fn write_fragment_turned<T: Half>(&self, tile: Tile<'k>, fragment: &Fragment<'k, T>)
    where
        Pair<T>: Word,
    {
        let (shape, rows) = (tile.shape, fragment.cols());
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
        for (j, regs) in fragment.regs().chunks_exact(4).enumerate() {
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
