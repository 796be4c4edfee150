//! Block masks on the device: for each row of blocks the blocks of keys in which the mask decides, and those that are seen
//! whole.

use crate::parts::schedule::Work;
use fulgurite_ptx::{Builder, Pointer, Scope, Thread, Val, Who};

/// Sizes of a block mask's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Queries, a multiple of a tile's.
    pub rows: u32,
    /// Keys, a multiple of a block's.
    pub cols: u32,
}

/// Names of the two lists among the parameters.
pub const NAMES: [&str; 2] = ["partial", "full"];

/// The lists among a kernel's parameters.
pub struct Lists<'k> {
    blocks: Blocks,
    /// Keys of a block of the kernel.
    cols: u32,
    counts: [Pointer<'k, u32>; 2],
    lists: [Pointer<'k, u32>; 2],
    /// Entries from one list to the next.
    widths: [Val<'k, u32>; 2],
    /// Lists from one sequence to the next, and from one head to the next: 0 where they share.
    steps: [Val<'k, u32>; 2],
}

/// What goes with a block of keys: its first key, and whether it is seen whole in the highest bit.
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
    /// Declares the parameters.
    pub fn new(k: &'k Builder, blocks: Blocks, cols: u32) -> Self {
        let array = |name: &str| k.array(name);
        let [counts, lists] = ["counts", "blocks"].map(|what| NAMES.map(|list| array(&format!("{list}_{what}"))));
        Lists {
            blocks,
            cols,
            counts,
            lists,
            widths: NAMES.map(|list| k.param(&format!("{list}_width"))),
            steps: ["list_batch", "list_head"].map(|name| k.param(name)),
        }
    }

    /// Number of a tile's list.
    #[track_caller]
    fn row(&self, work: &Work<'k>) -> Val<'k, u32> {
        let [batch, head] = self.steps;
        work.batch.mul_add(batch, work.head.mul_add(head, work.row / self.blocks.rows))
    }

    /// How many blocks of the kernel a tile has; at least one.
    #[track_caller]
    pub fn count(&self, t: &Scope<'k, Thread>, work: &Work<'k>) -> Val<'k, u32> {
        let row = self.row(work);
        let [partial, full] = self.counts.map(|counts| counts.load(t, row));
        ((partial + full) * (self.blocks.cols / self.cols)).max(1)
    }

    /// The `i`-th of a tile's blocks. Those seen whole come first; a block past the last begins at the last key, where
    /// everything is masked.
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
            // A block that does not exist is no block.
            let first = block.get().min(k_len) * self.blocks.cols + part * self.cols;
            key.set(first.min(k_len));
        });
        Tag(key.get() | (inside & whole).select::<u32>(1 << 31, 0))
    }
}
