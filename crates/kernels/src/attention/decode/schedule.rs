//! The schedule of the decode kernel: which splits of which tile a CTA computes.
//!
//! An item is one split of a tile, one run of splits, or all splits. CTA i computes items i, i + grid, and so on; the order of items
//! puts splits of a tile on neighbouring CTAs.

use crate::attention::decode::config::ROWS;
use crate::parts::mask::{Lengths, Spans};
use crate::parts::merge::{MOST_SPLITS, Slot, UsedQueries};
use crate::parts::schedule::{Sequence, Work};
use crate::parts::sequences::{QueryTile, SequenceOfBatch, Sequences};
use fulgurite_ptx::{Divisor, Group, Scope, Val, Who};

/// How the key blocks of a tile are divided into splits. The rule depends only on the sequence's own lengths, so that
/// results are bitwise the same alone and in a batch.
///
/// A tile has about 8 splits of 512 to 1024 keys. 60 % of the SMs read as fast as memory delivers, so shorter splits cost more
/// to merge than they save. Long sequences have up to 16 longer splits, because the last CTA may read the results of all
/// others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitRule {
    /// Keys of a key block.
    pub cols: u32,
    /// log2 of the most splits of a tile.
    most_log2: u32,
}

impl SplitRule {
    const WANTED_LOG2: u32 = 3;
    const KEYS: [u32; 2] = [512, 1024];
    /// (rows, log2 of the most splits) for tiles up to that many rows. Tiles with more rows have
    /// 2^[`WANTED_LOG2`](Self::WANTED_LOG2) splits at most.
    const MOST: [(u32, u32); 1] = [(ROWS, MOST_SPLITS.ilog2())];

    /// The rule for a sequence of `rows` packed rows.
    pub fn of(cols: u32, rows: u64) -> SplitRule {
        let most = Self::MOST.into_iter().find(|(most, _)| rows <= u64::from(*most));
        SplitRule { cols, most_log2: most.map_or(Self::WANTED_LOG2, |(_, log2)| log2) }
    }

    /// Length of the shortest and of the longest wanted split, in key blocks.
    fn range(cols: u32) -> [u32; 2] {
        Self::KEYS.map(|keys| keys.div_ceil(cols))
    }

    /// Splits of a tile with `blocks` key blocks. `in_kernel` computes the same on the device.
    pub fn splits(self, blocks: u64) -> u64 {
        let [least, middle] = Self::range(self.cols).map(u64::from);
        let eighth = blocks.div_ceil(1 << Self::WANTED_LOG2);
        let each = eighth.clamp(least, middle).max(blocks.div_ceil(1 << self.most_log2));
        blocks.div_ceil(each)
    }

    /// An upper bound of the splits of any tile with up to `blocks` key blocks. More blocks may have fewer, longer splits.
    pub fn most(self, blocks: u64) -> u64 {
        let [least, _] = Self::range(self.cols).map(u64::from);
        blocks.div_ceil(least).min(1 << self.most_log2)
    }

    /// Key blocks of a split, and the number of splits.
    fn in_kernel<'k>(cols: u32, rows: Val<'k, u32>, blocks: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let wanted = rows.literal(Self::WANTED_LOG2);
        let most_log2 = Self::MOST.iter().rev().fold(wanted, |rest, &(most, log2)| rows.le(most).select(log2, rest));
        let [least, middle] = Self::range(cols);
        let eighth = (blocks + ((1 << Self::WANTED_LOG2) - 1)) >> Self::WANTED_LOG2;
        let most = blocks.literal(1) << most_log2;
        let each = eighth.max(least).min(middle).max((blocks + most - 1) >> most_log2);
        [each, (blocks + each - 1) / each]
    }
}

/// Splits of a tile that a CTA computes: one of them, a run, or all.
#[derive(Clone, Copy)]
pub(super) struct Item<'k> {
    pub slot: Slot<'k>,
    /// Queries of the first and the last row.
    pub queries: [Val<'k, u32>; 2],
    /// The tile's key blocks, from the first to past the last.
    tile_blocks: [Val<'k, u32>; 2],
    /// Key blocks of a split.
    each: Val<'k, u32>,
    pub lengths: Lengths<'k>,
    /// The sequence of a ragged batch.
    pub sequence: Option<Sequence<'k>>,
}

impl<'k> Item<'k> {
    /// Key blocks of a split, from the first to past the last.
    pub fn blocks(&self, split: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let first = self.tile_blocks[0] + split * self.each;
        [first, (first + self.each).min(self.tile_blocks[1])]
    }
}

impl<'k> QueryTile<'k> for Item<'k> {
    fn batch(&self) -> Val<'k, u32> {
        self.slot.batch
    }

    fn work(&self) -> Work<'k> {
        let Slot { row, head, batch, ours: [first, end], .. } = self.slot;
        let blocks = [self.blocks(first)[0], self.blocks(end - 1)[1]];
        Work { row, head, batch, blocks, sequence: self.sequence, tile: None }
    }
}

/// The items of a call among the kernel's parameters.
pub(super) struct Schedule<'k> {
    pub items: Val<'k, u32>,
    /// The first items, which are all splits of a tile.
    pub whole: Option<Val<'k, u32>>,
    /// Items that are counted for every other tile.
    pub parts: Divisor<'k>,
    /// Splits of such an item, if it may be a run: 1 or a run.
    pub each: Option<Val<'k, u32>>,
    /// Tiles of a head of k and v.
    pub tiles: Divisor<'k>,
    pub kv_heads: Divisor<'k>,
    /// Query heads per head of k and v.
    pub group: Divisor<'k>,
    pub sequences: Sequences<'k>,
    /// In a ragged batch: the most key blocks that splits are counted for.
    pub most_blocks: Option<Val<'k, u32>>,
    pub spans: Spans,
    /// Keys of a key block.
    pub cols: u32,
}

/// The tile and part of an item.
struct ItemNumber<'k> {
    tile: Val<'k, u32>,
    part: Val<'k, u32>,
    /// Whether the item is all splits of the tile.
    all: Option<Val<'k, bool>>,
}

impl<'k> Schedule<'k> {
    /// Items come in this order: whole tiles, then parts of a tile; tiles of a head, heads, batches.
    fn number(&self, item: Val<'k, u32>) -> ItemNumber<'k> {
        match self.whole {
            Some(whole) => {
                let all = item.lt(whole);
                let [tile, part] = self.parts.div_rem(item - whole);
                let tile = all.select::<u32>(item, whole + tile);
                ItemNumber { tile, part: all.select::<u32>(0, part), all: Some(all) }
            }
            None => {
                let [tile, part] = self.parts.div_rem(item);
                ItemNumber { tile, part, all: None }
            }
        }
    }

    /// An item by its number.
    fn find<W: Who>(&self, w: &Scope<'k, W>, item: Val<'k, u32>) -> Item<'k> {
        let ItemNumber { tile, part, all: takes_all } = self.number(item);
        let [pair, up] = self.tiles.div_rem(tile);
        let [batch, head] = self.kv_heads.div_rem(pair);
        let row = up * ROWS;
        let SequenceOfBatch { sequence, q_rows, q_len, lengths } = self.sequences.of_batch(w, batch, &self.spans);
        let group = self.group.value();
        let all = q_rows * group;
        let rows = match sequence {
            Some(_) => (all.max(row) - row).min(ROWS),
            None => (all - row).min(ROWS),
        };
        let queries = [row, row + rows - 1].map(|row| {
            let query = self.group.div_rem(row)[0];
            if sequence.is_some() { query.min(q_len - 1) } else { query }
        });
        let [first, last] = queries.map(|query| query.to_i32());
        let [start, mut end] = self.spans.blocks(first, last, self.cols, lengths);
        if let Some(most) = self.most_blocks {
            // Splits beyond those that the host counted would never be computed: a sequence on the device may be longer
            // than the longest length that the call gave.
            end = end.min(start + most);
        }
        let [each, count] = SplitRule::in_kernel(self.cols, q_len * group, end - start);
        let used = sequence.map(|s| UsedQueries { start: s.q_start, count: s.q_len });
        let each_part = self.each.unwrap_or(part.literal(1));
        let split = part * each_part;
        let past = self.each.map_or(split + 1, |each| (split + each).min(count));
        let ours = [split, takes_all.map_or(past, |all| all.select::<u32>(count, past))];
        let slot = Slot { tile, ours, splits: count, each: each_part, batch, head, row, rows, used };
        Item { slot, queries, tile_blocks: [start, end], each, lengths, sequence }
    }

    /// Runs `f` for each of the CTA's items that has key blocks. Items count the splits of the longest tile, so that shorter
    /// tiles have empty ones.
    #[track_caller]
    pub fn each<W: Who>(&self, w: &Scope<'k, W>, f: impl FnOnce(&Scope<'k, W>, Item<'k>)) {
        w.each(w.cta(), self.items, w.ctas(), |w, number| {
            let item = self.find(w, number);
            // Compare blocks rather than the number of splits: that is a division that only merging needs.
            let [first, end] = item.blocks(item.slot.ours[0]);
            let mut some = first.lt(end);
            if item.sequence.is_some() {
                some = some & item.slot.rows.gt(0);
            }
            w.when(some, |w| f(w, item));
        });
    }

    /// Runs `f` for each split of an item.
    #[track_caller]
    pub fn each_split<W: Who>(&self, w: &Scope<'k, W>, item: &Item<'k>, f: impl FnOnce(&Scope<'k, W>, Val<'k, u32>)) {
        let [first, end] = item.slot.ours;
        match self.whole {
            Some(_) => w.each(first, end, 1, f),
            None => f(w, first),
        }
    }

    /// Query and head of each of the thread's rows. Rows past the tile's last repeat it.
    pub fn own_rows(&self, w: &Scope<'k, Group>, slot: &Slot<'k>) -> [OwnRow<'k>; 2] {
        [0, 8].map(|below| {
            let [query, own] = self.group.div_rem(slot.row + (w.first_row() + below).min(slot.rows - 1));
            OwnRow { query, head: slot.head * self.group.value() + own }
        })
    }
}

/// A row of a thread.
#[derive(Clone, Copy)]
pub(super) struct OwnRow<'k> {
    pub query: Val<'k, u32>,
    pub head: Val<'k, u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_follow_from_the_length() {
        let splits = |rows: u64, keys: u64| SplitRule::of(64, rows).splits(keys.div_ceil(64));
        assert_eq!([1, 512, 513, 4096, 8192].map(|keys| splits(4, keys)), [1, 1, 2, 8, 8]);
        // Merging is expensive, so the number of splits is bounded.
        assert_eq!([4, 32, 64].map(|rows| splits(rows, 65536)), [16, 16, 16]);
    }

    #[test]
    fn no_length_has_more_splits_than_its_bound() {
        for rule in [SplitRule::of(64, 1), SplitRule::of(64, 64), SplitRule::of(128, 20)] {
            let mut most = 0;
            for blocks in 1..5000 {
                most = most.max(rule.splits(blocks));
                assert!(most <= rule.most(blocks), "{rule:?}, {blocks} blocks");
            }
        }
    }
}
