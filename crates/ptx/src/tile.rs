//! Tiles in shared memory, tensors in global memory that are moved tile by tile, and fragments in registers.
//!
//! Everything about layout (swizzles, descriptors, boxes, which lane holds what) is derived from a
//! [`TileShape`]; a kernel names shapes and coordinates only.

use crate::build::{Builder, Group, Half, IntoVal, Pair, Scope, Thread, Val, Who, Word};
use crate::inst::{Arg, Base, Class, Inst, Reg};
use crate::kernel::BoxShape;
use crate::product::{Major, Number, TileShape};
use crate::table::{bulk, convert, memory, sync, tensor};
use std::panic::Location;

/// A tensor among the parameters, as the copy engine sees it.
#[derive(Clone, Copy)]
pub(crate) struct TensorParam<'k> {
    pub map: Val<'k, u64>,
    pub rank: u32,
}

/// A tensor among the parameters that is moved in tiles of one shape. Coordinates are elements, innermost axis
/// first; what lies outside the tensor is read as zero and not written.
#[derive(Clone, Copy)]
pub struct Tensor<'k> {
    param: TensorParam<'k>,
    tile: TileShape,
}

/// The word for the number of axes. More than there can be were refused with the tensor.
fn rank_word(rank: u32) -> &'static str {
    ["1d", "2d", "3d", "4d", "5d"][rank.clamp(1, 5) as usize - 1]
}

impl Builder {
    /// A tensor of `rank` axes (2 to 5) among the parameters, moved in tiles of this shape along its two innermost.
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

    /// A tile in shared memory.
    #[track_caller]
    pub fn tile(&self, name: &str, shape: TileShape) -> Tile<'_> {
        let offset = self.take_shared(name, shape.bytes(), shape.swizzle.period());
        Tile { shape, rows: shape.rows, address: self.shared_address(offset) }
    }
}

/// A tile in shared memory, or some of its rows.
#[derive(Clone, Copy)]
pub struct Tile<'k> {
    shape: TileShape,
    rows: u32,
    address: Val<'k, u32>,
}

impl<'k> Tile<'k> {
    pub(crate) fn at(shape: TileShape, address: Val<'k, u32>) -> Self {
        Tile { shape, rows: shape.rows, address }
    }

    /// The `index`-th part of `count` rows.
    #[track_caller]
    pub fn rows(self, index: impl IntoVal<'k, u32>, count: u32) -> Self {
        let k = self.address.k;
        if !count.is_multiple_of(8) || count > self.rows {
            k.refuse(format!("{count} rows of a tile of {}, allowed: multiples of 8 up to that", self.rows));
        }
        let offset = index.into_val(k) * (count * self.shape.swizzle.line());
        Tile { rows: count, address: self.address + offset, ..self }
    }

    /// The tile as an operand of a product, the dimension that is summed over along its rows' elements
    /// ([`Major::Inner`]) or across its rows.
    pub fn operand(self, major: Major) -> Operand<'k> {
        let (outer, inner) = match major {
            Major::Inner => (self.rows, self.shape.cols),
            Major::Outer => (self.shape.cols, self.rows),
        };
        Operand { tile: self, major, outer, inner }
    }

    /// Address of the chunk that holds a column, from row `row` on.
    #[track_caller]
    fn chunk_at(self, chunk: u32) -> Val<'k, u32> {
        self.address + chunk * self.shape.chunk_bytes()
    }
}

/// A tile as an operand of a product.
#[derive(Clone, Copy)]
pub struct Operand<'k> {
    tile: Tile<'k>,
    major: Major,
    outer: u32,
    inner: u32,
}

impl<'k> Operand<'k> {
    /// The `index`-th part of `count` rows of A, or columns of B.
    #[track_caller]
    pub fn part(self, index: impl IntoVal<'k, u32>, count: u32) -> Self {
        let shape = self.tile.shape;
        match self.major {
            Major::Inner => Operand { tile: self.tile.rows(index, count), outer: count, ..self },
            Major::Outer => {
                let k = self.tile.address.k;
                if !count.is_multiple_of(shape.chunk()) {
                    k.refuse(format!(
                        "{count} columns of a tile whose chunks are {} wide, allowed: multiples",
                        shape.chunk()
                    ));
                }
                let offset = index.into_val(k) * (count / shape.chunk() * shape.chunk_bytes());
                let tile = Tile { address: self.tile.address + offset, ..self.tile };
                Operand { tile, outer: count, ..self }
            }
        }
    }

    /// The matrix descriptor of its first step.
    #[track_caller]
    fn descriptor(&self) -> Val<'k, u64> {
        let address = (self.tile.address & 0x3_ffff) >> 4;
        address.to_u64() | self.tile.shape.descriptor(self.major)
    }
    /// What to add to the descriptor for a later step.
    fn step(&self, step: u32) -> u64 {
        u64::from(self.tile.shape.step(self.major, step) >> 4)
    }
    fn transposed(&self) -> Arg {
        Arg::Imm(u64::from(self.major == Major::Outer))
    }
}

/// Accumulators of a warpgroup: 64 rows and `cols` columns of f32, spread over its threads. Thread t of the warpgroup
/// holds rows 16 (t / 32) + t % 32 / 4 and the one 8 below.
pub struct Acc<'k> {
    k: &'k Builder,
    regs: Vec<Reg>,
    cols: u32,
}

impl<'k> Acc<'k> {
    /// Columns.
    pub fn cols(&self) -> u32 {
        self.cols
    }
    /// The `index`-th part of `count` columns, in the same registers.
    #[track_caller]
    pub fn part(&self, index: u32, count: u32) -> Acc<'k> {
        let regs = (index * count / 2) as usize..((index + 1) * count / 2) as usize;
        if !count.is_multiple_of(8) || regs.end > self.regs.len() {
            self.k.refuse(format!("part {index} of {count} columns of {}, allowed: multiples of 8 inside", self.cols));
            return Acc { k: self.k, regs: self.regs.clone(), cols: self.cols };
        }
        Acc { k: self.k, regs: self.regs[regs].to_vec(), cols: count }
    }
    /// The thread's elements: two neighbours of the upper row, two of the lower, and so on for each eight columns.
    /// They are the registers themselves: read them only where no product is pending.
    pub fn elements(&self) -> impl Iterator<Item = Val<'k, f32>> {
        let k = self.k;
        self.regs.iter().map(move |&reg| Val::reg(k, reg))
    }
}

/// Whether a product replaces or adds to what is there.
pub enum Sum<'k> {
    /// Replaces.
    Fresh,
    /// Adds.
    Onto,
    /// Adds where it holds.
    If(Val<'k, bool>),
}

impl<'k> Scope<'k, Group> {
    /// Accumulators of 64 rows a warpgroup.
    #[track_caller]
    pub fn accumulators(&self, cols: u32) -> Acc<'k> {
        if !cols.is_multiple_of(8) || !(8..=256).contains(&cols) {
            self.k.refuse(format!("accumulators of {cols} columns, allowed: multiples of 8 up to 256"));
        }
        Acc { k: self.k, regs: (0..cols / 2).map(|_| self.k.register(Class::F32)).collect(), cols }
    }

    /// Starts acc (+)= a b, for tiles of 16-bit floats, as one group: 64 rows of `a` and all columns of `b`.
    #[track_caller]
    pub fn multiply(&self, acc: &Acc<'k>, a: Operand<'k>, b: Operand<'k>, sum: Sum<'k>) {
        let (k, number) = (self.k, a.tile.shape.number);
        if (a.outer, a.inner, b.outer) != (64, b.inner, acc.cols) || number != b.tile.shape.number {
            let what = format!(
                "{number:?} {}x{} times {:?} {}x{} into 64x{}",
                a.outer, a.inner, b.tile.shape.number, b.inner, b.outer, acc.cols
            );
            k.refuse(format!("a product of {what}, allowed: 64 rows, equal inner sizes and types, matching columns"));
            return;
        }
        if !matches!(number, Number::F16 | Number::Bf16) {
            k.refuse(format!("a product of {number:?}, allowed here: F16, Bf16"));
            return;
        }
        let (a_start, b_start) = (a.descriptor(), b.descriptor());
        let steps = (0..a.inner / number.depth()).map(|j| [a_start + a.step(j), b_start + b.step(j)]);
        let steps: Vec<[Val<'k, u64>; 2]> = k.placed(Location::caller(), || steps.collect());
        self.plain(&sync::WGMMA_FENCE);
        for (j, [a_step, b_step]) in steps.into_iter().enumerate() {
            let onto = match (&sum, j) {
                (Sum::Fresh, 0) => Arg::Imm(0),
                (Sum::If(onto), 0) => onto.arg(),
                _ => Arg::Imm(1),
            };
            let args = [
                Arg::List(acc.regs.as_slice().into()),
                Arg::Reg(a_step.in_register()),
                Arg::Reg(b_step.in_register()),
                onto,
                Arg::Imm(acc.cols.into()),
                Arg::Word(number.name()),
                a.transposed(),
                b.transposed(),
            ];
            k.emit(&tensor::WGMMA_SS, args);
        }
        self.plain(&sync::WGMMA_COMMIT);
    }

    /// Writes accumulators, rounded to 16 bits, to 64 rows of a tile.
    #[track_caller]
    pub fn write<T: Half>(&self, tile: Tile<'k>, acc: &Acc<'k>)
    where
        Pair<T>: Word,
    {
        let shape = tile.shape;
        if tile.rows != 64 || acc.cols > shape.cols || !acc.cols.is_multiple_of(16) || shape.number != T::NUMBER {
            self.k.refuse(format!(
                "64x{} {} written to {} rows of {shape:?}, allowed: 64 rows, the same type, multiples of 16 columns",
                acc.cols,
                T::NAME,
                tile.rows
            ));
            return;
        }
        // Lane l gives the address of row l % 16 of its warp's 16 rows, columns 8 (l / 16) and on.
        let lane = self.lane();
        let row = (self.thread_in_group() / 32).mul_add(16, lane & 15);
        let linear = row.mul_add(shape.swizzle.line(), (lane >> 4) * 16);
        let spread = linear ^ ((linear >> 3) & shape.swizzle.mask());
        let base = tile.address + spread;
        let units = shape.swizzle.line() / 32;
        let elements: Vec<Val<'k, f32>> = acc.elements().collect();
        for (j, part) in elements.chunks_exact(8).enumerate() {
            let j = j as u32;
            let pair = |i: usize| part[i].pair_with::<T>(part[i + 1]).in_register();
            let pairs = self.k.placed(Location::caller(), || [0, 2, 4, 6].map(pair));
            // Whole units of 32 bytes: bits of the address that the row does not reach, so xor is addition under the swizzle.
            let address = if units == 0 { base } else { base ^ (j % units * 32) };
            let chunk = j.checked_div(units).unwrap_or(j) * shape.chunk_bytes();
            let place = Arg::Address(Base::Reg(address.in_register()), chunk as i32);
            self.k.emit(&memory::STMATRIX, [place, Arg::List(pairs.into()), Arg::Word("x4"), Arg::Word("")]);
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
            self.k.emit(&bulk::STORE_BOX, [to.param.map.arg(), regs, tile, Arg::Word(rank)]);
        }
    }
    /// Starts bringing a tile of a tensor near; a hint.
    #[track_caller]
    pub fn prefetch_tile(&self, from: &Tensor<'k>, at: &[Val<'k, u32>]) {
        for chunk in 0..from.tile.chunks() {
            let (regs, rank) = from.coordinates(at, chunk);
            self.k.emit(&bulk::PREFETCH_BOX, [from.param.map.arg(), regs, Arg::Word(rank)]);
        }
    }
}

impl<'k> Tensor<'k> {
    /// Coordinates of a chunk of the tile at `at`.
    #[track_caller]
    fn coordinates(&self, at: &[Val<'k, u32>], chunk: u32) -> (Arg, &'static str) {
        let k = self.param.map.k;
        if at.len() != self.param.rank as usize {
            k.refuse(format!("{} coordinates for a tensor of {} axes", at.len(), self.param.rank));
            return (Arg::List(Box::new([])), rank_word(self.param.rank));
        }
        let first = at[0] + chunk * self.tile.chunk();
        let regs = std::iter::once(first).chain(at[1..].iter().copied()).map(|c| c.in_register());
        let regs = k.placed(Location::caller(), || regs.collect());
        (Arg::List(regs), rank_word(self.param.rank))
    }

    /// Starts copying the tile at `at` into `to`; its bytes are counted on the barrier at `bar`.
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
            let map = self.param.map.arg();
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
