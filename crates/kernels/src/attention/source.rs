//! Key sources: how the key blocks of a tile are found and loaded.
//!
//! [`Interval`] serves masks that are one interval of keys per query, [`Listed`] serves block lists. Either works on a batch
//! of equal or ragged sequences.

use crate::parts::block_lists::{Lists, Tag};
use crate::parts::mask::{Block, Lengths, Spans};
use crate::parts::schedule::{Of, Work};
use crate::parts::sequences::{QueryTile, Sequences};
use fulgurite_ptx::{Group, Pipe, Scope, Thread, Val, Who};

/// The queries of a tile.
pub(crate) struct TileQueries<'k> {
    /// Rows per tile.
    pub rows: u32,
    /// Queries of the sequence.
    pub q_len: Val<'k, u32>,
    pub lengths: Lengths<'k>,
}

/// A key block of a tile.
#[derive(Clone, Copy)]
pub(crate) struct KeyBlock<'k> {
    /// Index among the tile's key blocks.
    pub n: Val<'k, u32>,
    /// Tag that the block carries through the ring, if its index alone does not determine its keys.
    pub tag: Option<Tag<'k>>,
}

impl<'k> KeyBlock<'k> {
    /// The first key of a block of `cols` keys.
    #[track_caller]
    pub fn first_key(self, cols: u32) -> Val<'k, u32> {
        self.tag.map_or(self.n * cols, |tag| tag.key())
    }

    /// The block for masks. `all_keys` gives the number of visible keys of the tile's sequence.
    #[track_caller]
    pub fn block(self, cols: u32, all_keys: &dyn Fn() -> Val<'k, i32>) -> Block<'k> {
        let first = self.first_key(cols).to_i32();
        Block { first, full: self.tag.map(|tag| (tag.full(), all_keys())) }
    }
}

/// How the key blocks of a tile are found, by threads `W`.
pub(crate) trait KeyBlocks<'k, W: Who> {
    /// First and past-the-last key block of a tile; at least one block.
    fn blocks(&self, t: &Scope<'k, W>, tile: &Work<'k>, queries: &TileQueries<'k>) -> [Val<'k, u32>; 2];

    /// Whether blocks have tags.
    fn tagged(&self) -> bool;

    /// The tag of a tile's `n`-th block.
    fn tag(&self, t: &Scope<'k, W>, tile: &Work<'k>, n: Val<'k, u32>) -> Option<Tag<'k>>;
}

/// Key blocks that TMA loads into a ring.
pub(crate) trait KeySource<'k>: KeyBlocks<'k, Thread> {
    /// Coordinates in k or v of the block that starts at `key`.
    fn coordinates(
        &self,
        tile: &dyn QueryTile<'k>,
        of: Of,
        column: Val<'k, u32>,
        key: Val<'k, u32>,
        head: Val<'k, u32>,
    ) -> Vec<Val<'k, u32>>;

    /// Releases the current stage of the ring of keys. Returns the block that it held, the tile's `n`-th. `all_keys`
    /// gives the number of visible keys of the tile's sequence.
    fn take(
        &self,
        w: &Scope<'k, Group>,
        ring: &Pipe<'k>,
        n: Val<'k, u32>,
        all_keys: &dyn Fn() -> Val<'k, i32>,
    ) -> Block<'k>;
}

/// Where a kernel's key blocks come from: its block lists, or without lists the keys that its mask leaves.
#[derive(Clone, Copy)]
pub(crate) struct KeyBlockParams<'a, 'k> {
    pub spans: &'a Spans,
    pub sequences: &'a Sequences<'k>,
    pub lists: Option<&'a Lists<'k>>,
    /// Keys per block.
    pub cols: u32,
}

impl<'a, 'k> KeyBlockParams<'a, 'k> {
    /// The key blocks, found by threads `W`.
    pub fn blocks<W: Who>(self) -> Box<dyn KeyBlocks<'k, W> + 'a> {
        let KeyBlockParams { spans, sequences, lists, cols } = self;
        match lists {
            Some(lists) => Box::new(Listed { lists, sequences, cols }),
            None => Box::new(Interval { spans, sequences, cols }),
        }
    }

    /// The key blocks, loaded by TMA.
    pub fn source(self) -> Box<dyn KeySource<'k> + 'a> {
        let KeyBlockParams { spans, sequences, lists, cols } = self;
        match lists {
            Some(lists) => Box::new(Listed { lists, sequences, cols }),
            None => Box::new(Interval { spans, sequences, cols }),
        }
    }
}

/// Consecutive key blocks, from the first to the last that some query of the tile sees.
pub(crate) struct Interval<'a, 'k> {
    pub spans: &'a Spans,
    pub sequences: &'a Sequences<'k>,
    /// Keys per block.
    pub cols: u32,
}

impl<'k, W: Who> KeyBlocks<'k, W> for Interval<'_, 'k> {
    fn blocks(&self, _: &Scope<'k, W>, tile: &Work<'k>, queries: &TileQueries<'k>) -> [Val<'k, u32>; 2] {
        let last = (tile.row + (queries.rows - 1)).min(queries.q_len - 1);
        self.spans.blocks(tile.row.to_i32(), last.to_i32(), self.cols, queries.lengths)
    }

    fn tagged(&self) -> bool {
        false
    }

    fn tag(&self, _: &Scope<'k, W>, _: &Work<'k>, _: Val<'k, u32>) -> Option<Tag<'k>> {
        None
    }
}

impl<'k> KeySource<'k> for Interval<'_, 'k> {
    fn coordinates(
        &self,
        tile: &dyn QueryTile<'k>,
        of: Of,
        column: Val<'k, u32>,
        key: Val<'k, u32>,
        head: Val<'k, u32>,
    ) -> Vec<Val<'k, u32>> {
        self.sequences.at(tile, of, column, key, head)
    }

    fn take(
        &self,
        w: &Scope<'k, Group>,
        ring: &Pipe<'k>,
        n: Val<'k, u32>,
        all_keys: &dyn Fn() -> Val<'k, i32>,
    ) -> Block<'k> {
        ring.done(w);
        KeyBlock { n, tag: None }.block(self.cols, all_keys)
    }
}

/// The blocks of [`Interval`] in another order: from the block with the last query's own position down to the first, then
/// from the last down to the one after it.
///
/// Scores that fall with the distance from the query, as those of ALiBi, then reach their maximum at the start of a tile,
/// and later blocks do not raise it.
pub(crate) struct Nearest<'a, 'k> {
    pub interval: Interval<'a, 'k>,
    /// Rows per tile.
    pub rows: u32,
}

impl<'k, W: Who> KeyBlocks<'k, W> for Nearest<'_, 'k> {
    fn blocks(&self, t: &Scope<'k, W>, tile: &Work<'k>, queries: &TileQueries<'k>) -> [Val<'k, u32>; 2] {
        self.interval.blocks(t, tile, queries)
    }

    fn tagged(&self) -> bool {
        true
    }

    fn tag(&self, _: &Scope<'k, W>, tile: &Work<'k>, n: Val<'k, u32>) -> Option<Tag<'k>> {
        let Interval { sequences, cols, .. } = &self.interval;
        let [first, end] = tile.blocks;
        let own = (tile.row + (self.rows - 1)).to_i32() + sequences.lengths(tile.sequence).bottom_right;
        let own = (own.max(0).to_u32() / *cols).max(first).min(end - 1);
        // The last number is the query's own block, and numbers below wrap around at the first block.
        let turned = n + own + 1;
        let block = turned.ge(first + end).select::<u32>(turned - end, turned - first);
        Some(Tag(block * *cols))
    }
}

impl<'k> KeySource<'k> for Nearest<'_, 'k> {
    fn coordinates(
        &self,
        tile: &dyn QueryTile<'k>,
        of: Of,
        column: Val<'k, u32>,
        key: Val<'k, u32>,
        head: Val<'k, u32>,
    ) -> Vec<Val<'k, u32>> {
        self.interval.coordinates(tile, of, column, key, head)
    }

    fn take(&self, w: &Scope<'k, Group>, ring: &Pipe<'k>, _: Val<'k, u32>, _: &dyn Fn() -> Val<'k, i32>) -> Block<'k> {
        let tag = Tag(ring.tag(w));
        ring.done(w);
        Block { first: tag.key().to_i32(), full: None }
    }
}

/// Key blocks from the lists of a block mask.
pub(crate) struct Listed<'a, 'k> {
    pub lists: &'a Lists<'k>,
    pub sequences: &'a Sequences<'k>,
    /// Keys per block.
    pub cols: u32,
}

impl<'k, W: Who> KeyBlocks<'k, W> for Listed<'_, 'k> {
    fn blocks(&self, t: &Scope<'k, W>, tile: &Work<'k>, _: &TileQueries<'k>) -> [Val<'k, u32>; 2] {
        [tile.row.literal(0), self.lists.count(t, tile)]
    }

    fn tagged(&self) -> bool {
        true
    }

    fn tag(&self, t: &Scope<'k, W>, tile: &Work<'k>, n: Val<'k, u32>) -> Option<Tag<'k>> {
        let keys = self.sequences.visible(tile.sequence);
        Some(self.lists.block(t, tile, n, keys.count))
    }
}

impl<'k> KeySource<'k> for Listed<'_, 'k> {
    fn coordinates(
        &self,
        tile: &dyn QueryTile<'k>,
        of: Of,
        column: Val<'k, u32>,
        key: Val<'k, u32>,
        head: Val<'k, u32>,
    ) -> Vec<Val<'k, u32>> {
        self.sequences.at(tile, of, column, key, head)
    }

    fn take(
        &self,
        w: &Scope<'k, Group>,
        ring: &Pipe<'k>,
        n: Val<'k, u32>,
        all_keys: &dyn Fn() -> Val<'k, i32>,
    ) -> Block<'k> {
        let tag = Tag(ring.tag(w));
        ring.done(w);
        KeyBlock { n, tag: Some(tag) }.block(self.cols, all_keys)
    }
}
