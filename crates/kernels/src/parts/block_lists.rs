//! Block masks as lists on the device.
//!
//! Each row of blocks has two lists of key blocks: partial blocks, in which the element mask decides, and full blocks, in
//! which every key is visible.

use crate::params::{Lens, Params};
use crate::parts::arguments::DeviceBlockLists;
use crate::parts::schedule::Work;
use fulgurite_ptx::{Pointer, Scope, Val, Who};

/// Block size of a block mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Queries per block: a multiple of the kernel's query tile.
    pub rows: u32,
    /// Keys per block: a multiple of the kernel's key block.
    pub cols: u32,
}

/// Names of the two lists among the parameters.
pub const NAMES: [&str; 2] = ["partial", "full"];

/// Launch arguments of [`Lists`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListArgs {
    pub lists: DeviceBlockLists,
    /// Number of lists from one batch to the next.
    pub batch_step: u64,
    /// Number of lists from one head to the next.
    pub head_step: u64,
}

/// The block lists among a kernel's parameters.
pub struct Lists<'k> {
    blocks: Blocks,
    /// Keys per key block of the kernel.
    cols: u32,
    counts: [Pointer<'k, u32>; 2],
    lists: [Pointer<'k, u32>; 2],
    /// Stride from one list to the next, in entries.
    widths: [Val<'k, u32>; 2],
    /// Strides from one batch to the next and from one head to the next, in lists; 0 if all share them.
    steps: [Val<'k, u32>; 2],
}

/// The tag of a key block in the ring: the index of its first key, with the highest bit set if the block is full.
#[derive(Clone, Copy)]
pub struct Tag<'k>(pub Val<'k, u32>);

impl<'k> Tag<'k> {
    pub fn key(self) -> Val<'k, u32> {
        self.0 & 0x7fff_ffff
    }
    pub fn full(self) -> Val<'k, bool> {
        self.0.to_i32().lt(0)
    }
}

impl<'k> Lists<'k> {
    /// Declares the parameters with their arguments.
    pub fn declare<C: 'static>(p: &Params<'k, C>, blocks: Blocks, cols: u32, at: impl Lens<C, ListArgs>) -> Self {
        let name = |list: usize, what: &str| format!("{}_{what}", NAMES[list]);
        let both = [0, 1];
        Lists {
            blocks,
            cols,
            counts: both.map(|i: usize| p.array(&name(i, "counts"), move |call| at(call).lists.counts[i])),
            lists: both.map(|i: usize| p.array(&name(i, "blocks"), move |call| at(call).lists.blocks[i])),
            widths: both.map(|i: usize| p.u32(&name(i, "width"), move |call| at(call).lists.widths[i])),
            steps: [
                p.u32("list_batch", move |call| at(call).batch_step as u32),
                p.u32("list_head", move |call| at(call).head_step as u32),
            ],
        }
    }

    /// Index of a tile's list.
    #[track_caller]
    fn row(&self, work: &Work<'k>) -> Val<'k, u32> {
        let [batch, head] = self.steps;
        work.batch.mul_add(batch, work.head.mul_add(head, work.row / self.blocks.rows))
    }

    /// Number of the kernel's key blocks that a tile has; at least one.
    #[track_caller]
    pub fn count<W: Who>(&self, t: &Scope<'k, W>, work: &Work<'k>) -> Val<'k, u32> {
        let row = self.row(work);
        let [partial, full] = self.counts.map(|counts| counts.load(t, row));
        ((partial + full) * (self.blocks.cols / self.cols)).max(1)
    }

    /// The `i`-th key block of a tile. Full blocks come first. A block past the last one begins at `k_len`, where every
    /// element is masked.
    #[track_caller]
    pub fn block<W: Who>(&self, t: &Scope<'k, W>, work: &Work<'k>, i: Val<'k, u32>, k_len: Val<'k, u32>) -> Tag<'k> {
        let (row, parts) = (self.row(work), self.blocks.cols / self.cols);
        let [partial, full] = self.counts.map(|counts| counts.load(t, row));
        let [number, part] = [i / parts, i % parts];
        let whole = number.lt(full);
        let index = whole.select::<u32>(number, number - full);
        let inside = number.lt(partial + full);
        let width = whole.select::<u32>(self.widths[1], self.widths[0]);
        let place = row.mul_wide(width) + index.to_u64();
        let key = t.var(k_len);
        t.when(inside, |t| {
            let block = t.var(0u32);
            t.choose(
                whole,
                |t| block.set(self.lists[1].at_wide(place).load(t, 0)),
                |t| block.set(self.lists[0].at_wide(place).load(t, 0)),
            );
            // An entry past the last block of keys counts as past the end of the list.
            let first = block.get().min(k_len) * self.blocks.cols + part * self.cols;
            key.set(first.min(k_len));
        });
        Tag(key.get() | (inside & whole).select::<u32>(1 << 31, 0))
    }
}
