//! Tensors in global memory, which TMA moves tile by tile.

use crate::build::{Builder, Scope, Thread, Val, Who};
use crate::device::RAGGED_ROWS;
use crate::inst::{Arg, Base, Class, Inst};
use crate::kernel::BoxShape;
use crate::product::TileShape;
use crate::table::{bulk, convert};
use crate::tile::Tile;
use std::panic::Location;

/// A tensor parameter, as TMA sees it.
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

/// The CTAs that receive a tile, and where its bytes are counted.
pub(crate) enum Receivers {
    /// The own CTA, whose mbarrier counts.
    Own,
    /// All CTAs of a mask, each of which counts.
    All(u16),
    /// The own CTA; an mbarrier of either CTA of the pair counts.
    Pair,
}

/// A tensor parameter that moves in tiles of one shape. Coordinates count elements, innermost axis first. Reads outside
/// the tensor give zero, writes outside it are dropped.
#[derive(Clone, Copy)]
pub struct Tensor<'k> {
    param: TensorParam<'k>,
    tile: TileShape,
}

/// A range of rows of a tensor, such as one sequence among others. TMA does not know where it ends.
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
        receivers: Receivers,
    ) {
        for chunk in 0..self.tile.chunks() {
            let (regs, rank) = self.coordinates(at, chunk);
            let tile = Arg::Address(Base::Reg(to.chunk_at(chunk).in_register()), 0);
            let bar = Arg::Address(Base::Reg(bar.in_register()), 0);
            let map = self.param.map().arg();
            match receivers {
                Receivers::Own => w.k.emit(&bulk::LOAD_BOX, [tile, map, regs, bar, Arg::Word(rank)]),
                Receivers::Pair => w.k.emit(&bulk::LOAD_BOX_PAIR, [tile, map, regs, bar, Arg::Word(rank)]),
                Receivers::All(mask) => {
                    let reg = w.k.register(Class::B16);
                    let mov: &'static Inst = &convert::MOV_16;
                    w.k.emit(mov, [Arg::Reg(reg), Arg::Imm(mask.into())]);
                    w.k.emit(&bulk::LOAD_BOX_MULTICAST, [tile, map, regs, bar, Arg::Reg(reg), Arg::Word(rank)]);
                }
            }
        }
    }
}
