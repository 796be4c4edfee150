//! Scale factors of products, in tensor memory.
//!
//! A block holds the scales of 128 rows of A, or columns of B, four for each: bytes of a cell, in 32 lanes and four columns,
//! repeated in every quarter of the lanes. In memory, and in shared memory, it is 512 bytes: 16 for each lane. A copy of the
//! tensor core's queue moves it, in order with the products of the same thread.

use crate::build::{Builder, Group, IntoVal, Scope, Thread, Val};
use crate::inst::{Arg, Base, Reg};
use crate::product::{Number, Swizzle, TileShape};
use crate::table::tcgen05 as rows;
use crate::tcgen05::{LANES, SCALE_BLOCK_BYTES, SCALE_BLOCK_COLUMNS, SCALE_DESCRIPTOR};
use crate::tile::Tile;
use std::panic::Location;

/// Scales of a row in a block.
const SCALES: u32 = 4;

/// Scales of the rows of A, or of the columns of B, for one tile of an operand.
#[derive(Clone, Copy)]
pub struct TensorScales<'k> {
    k: &'k Builder,
    /// Blocks of rows, and blocks of scales for each.
    blocks: [u32; 2],
    /// First column among those of the kernel: a constant, and a part that is known at run time.
    column: u32,
    moved: Option<Val<'k, u32>>,
}

/// The shape in shared memory of the scales of `rows` rows of A, or columns of B, `scales` for each: blocks of 512 bytes, those
/// of one range of rows after each other.
pub fn scale_tile(rows: u32, scales: u32) -> TileShape {
    let blocks = rows.div_ceil(LANES) * scales.div_ceil(SCALES);
    TileShape { number: Number::U8, rows: 32 * blocks, cols: SCALE_BLOCK_BYTES / 32, swizzle: Swizzle::None }
}

impl Builder {
    /// Columns of tensor memory for `count` tiles of scales: of `rows` rows of A or columns of B, with `scales` for each, a
    /// multiple of four. The first tile. In a pair of CTAs, each has the scales of its rows of A, and of all columns of B.
    #[track_caller]
    pub fn tensor_scales(&self, name: &str, count: u32, rows: u32, scales: u32) -> TensorScales<'_> {
        if rows == 0 || scales == 0 || !scales.is_multiple_of(SCALES) {
            self.refuse(format!("`{name}` of {rows} rows with {scales} scales, allowed: multiples of {SCALES} scales"));
        }
        self.owns_tensor_memory(self.tensor_group());
        let blocks = [rows.div_ceil(LANES), scales.div_ceil(SCALES)];
        let columns = count * blocks[0] * blocks[1] * SCALE_BLOCK_COLUMNS;
        TensorScales { k: self, blocks, column: self.take_columns(name, columns, Location::caller()), moved: None }
    }
}

impl<'k> TensorScales<'k> {
    /// The `index`-th tile of an array of such tiles.
    #[track_caller]
    pub fn nth(self, index: impl IntoVal<'k, u32>) -> Self {
        let (index, columns) = (index.into_val(self.k), self.blocks[0] * self.blocks[1] * SCALE_BLOCK_COLUMNS);
        match index.known() {
            Some(index) => TensorScales { column: self.column + index * columns, ..self },
            None => TensorScales { moved: Some(index * columns), ..self },
        }
    }

    /// Scales of a row.
    pub(crate) fn count(self) -> u32 {
        SCALES * self.blocks[1]
    }
    /// Rows of A or columns of B, in whole blocks.
    pub(crate) fn rows(self) -> u32 {
        LANES * self.blocks[0]
    }

    /// Address of the cells that hold the `scale`-th scale of every row.
    #[track_caller]
    pub(crate) fn place(self, base: Val<'k, u32>, scale: u32) -> Arg {
        self.at(base, [0, scale / SCALES])
    }

    /// Address of a block. Blocks of the same scales are adjacent, because one product reads them together.
    #[track_caller]
    fn at(self, base: Val<'k, u32>, [row, scale]: [u32; 2]) -> Arg {
        let base = match self.moved {
            Some(moved) => base + moved,
            None => base,
        };
        let offset = SCALE_BLOCK_COLUMNS * (scale * self.blocks[0] + row);
        Arg::Address(Base::Reg(base.in_register()), (self.column + offset) as i32)
    }
}

impl<'k> Scope<'k, Group> {
    /// Starts storing scales that threads computed: a block for each word, of which lane l of every warp gives the cells of
    /// rows l, l + 32, l + 64 and l + 96, four scales each. Every warp of the warpgroup stores the same, because products
    /// read scales in all quarters of the lanes.
    #[track_caller]
    pub fn store_tensor_scales(&self, to: TensorScales<'k>, cells: [Val<'k, u32>; SCALE_BLOCK_COLUMNS as usize]) {
        if to.blocks != [1, 1] {
            let [rows, scales] = to.blocks;
            self.k.refuse(format!("a block of scales stored to {rows}x{scales} blocks, allowed: one block"));
        }
        let (base, at) = (self.k.tensor_lanes(), Location::caller());
        self.k.placed(at, || {
            let cells = Arg::List(cells.map(|cell| cell.in_register()).into());
            self.k.emit(&rows::ST, [to.place(base, 0), cells, Arg::Imm(SCALE_BLOCK_COLUMNS.into())]);
        });
    }
}

impl<'k> Scope<'k, Thread> {
    /// Starts copying a tile of scales from shared memory, before later products of this thread. Both CTAs of a pair copy
    /// their own tiles, at the same address.
    #[track_caller]
    pub fn copy_scales(&self, to: TensorScales<'k>, from: Tile<'k>) {
        let (k, want) = (self.k, scale_tile(to.rows(), to.count()));
        if from.shape() != want {
            k.refuse(format!("scales copied from {:?}, allowed: {want:?}", from.shape()));
            return;
        }
        let (base, group) = (k.tensor_base(), Arg::Word(k.tensor_group().word()));
        let [ranges, scales] = to.blocks;
        for (range, scale) in (0..ranges).flat_map(|range| (0..scales).map(move |scale| (range, scale))) {
            let offset = SCALE_BLOCK_BYTES * (range * scales + scale);
            let from: Reg = from.constant_descriptor(SCALE_DESCRIPTOR, offset);
            k.emit(&rows::COPY_SCALES, [to.at(base, [range, scale]), Arg::Reg(from), group.clone()]);
        }
    }
}
