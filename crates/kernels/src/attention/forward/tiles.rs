//! The tile scheduler of the forward kernel: maps tickets to query tiles.

use crate::attention::source::{KeyBlocks, TileQueries};
use crate::parts::mask::{Lengths, Spans};
use crate::parts::schedule::{Equal, RaggedTile, RaggedWalk, Sequence, Unequal, Work};
use crate::parts::sequences::{Dense, Sequences};
use fulgurite_ptx::{Divisor, Scope, Val, Who};

/// A tile of queries, found by its index.
pub(super) struct FoundTile<'k> {
    pub index: Val<'k, u32>,
    pub batch: Val<'k, u32>,
    pub head: Val<'k, u32>,
    /// Index among the head's tiles, in row order.
    pub number: Val<'k, u32>,
    /// The sequence of a ragged batch.
    pub sequence: Option<Sequence<'k>>,
    pub lengths: Lengths<'k>,
    /// Queries of the sequence; at least one in a ragged batch.
    pub q_len: Val<'k, u32>,
}

impl<'k> FoundTile<'k> {
    /// The tile of `rows` queries and its key blocks.
    pub fn work<W: Who>(self, t: &Scope<'k, W>, rows: u32, source: &(impl KeyBlocks<'k, W> + ?Sized)) -> Work<'k> {
        let FoundTile { index, batch, head, number, sequence, lengths, q_len } = self;
        let row = number * rows;
        let zero = row.literal(0);
        let work = Work { row, head, batch, blocks: [zero, zero], sequence, tile: Some(index) };
        Work { blocks: source.blocks(t, &work, &TileQueries { rows, q_len, lengths }), ..work }
    }
}

/// The tiles of a batch, ordered by index and found by threads `W`.
pub(super) trait Tiles<'k, W: Who> {
    /// Calls `some` if the CTA has a first tile, else `none`. The first tile has the CTA's index.
    fn first(&self, t: &Scope<'k, W>, some: &dyn Fn(&Scope<'k, W>), none: &dyn Fn(&Scope<'k, W>));

    /// Whether a tile exists. Callers must ask in ascending order.
    fn seek(&self, t: &Scope<'k, W>, tile: Val<'k, u32>) -> Val<'k, bool>;

    /// The tile that was sought last, or a CTA's first tile.
    fn find(&self, t: &Scope<'k, W>, tile: Val<'k, u32>) -> FoundTile<'k>;

    /// Number of tiles, if the host knows it.
    fn total(&self) -> Option<Val<'k, u32>>;

    /// Number of tiles, if it is known only after a seek past the end.
    fn total_at_end(&self) -> Option<Val<'k, u32>>;
}

/// The parameters of a batch's tiles.
pub(super) struct TileParams<'a, 'k> {
    pub sequences: &'a Sequences<'k>,
    /// Tile order of a batch of equal sequences.
    pub bands: Option<&'a Equal<'k>>,
    /// Query heads.
    pub heads: Divisor<'k>,
}

impl<'a, 'k> TileParams<'a, 'k> {
    /// The tiles of the batch, of `rows` queries each. `spans` bound the visible keys of a ragged sequence.
    pub fn tiles<W: Who>(self, t: &Scope<'k, W>, rows: u32, spans: Option<&'a Spans>) -> Box<dyn Tiles<'k, W> + 'a> {
        let heads = self.heads;
        match (self.sequences, self.bands) {
            (Sequences::Dense(dense), Some(bands)) => Box::new(DenseTiles { bands, dense, heads }),
            (Sequences::Ragged(unequal), _) => {
                let walk = unequal.start(t, rows, heads.value());
                Box::new(RaggedTiles { unequal, walk, rows, heads, spans })
            }
            (Sequences::Dense(_), None) => unreachable!("bug in fulgurite: equal sequences without bands"),
        }
    }
}

/// Tiles of equal sequences.
struct DenseTiles<'a, 'k> {
    bands: &'a Equal<'k>,
    dense: &'a Dense<'k>,
    heads: Divisor<'k>,
}

impl<'k, W: Who> Tiles<'k, W> for DenseTiles<'_, 'k> {
    /// The grid has at most one CTA for each tile.
    fn first(&self, t: &Scope<'k, W>, some: &dyn Fn(&Scope<'k, W>), _: &dyn Fn(&Scope<'k, W>)) {
        some(t);
    }

    fn seek(&self, _: &Scope<'k, W>, tile: Val<'k, u32>) -> Val<'k, bool> {
        tile.lt(self.bands.tiles)
    }

    fn find(&self, _: &Scope<'k, W>, tile: Val<'k, u32>) -> FoundTile<'k> {
        let [batch, head, number] = self.bands.find(self.heads, tile);
        let Dense { q_len, lengths, .. } = *self.dense;
        FoundTile { index: tile, batch, head, number, sequence: None, lengths, q_len }
    }

    fn total(&self) -> Option<Val<'k, u32>> {
        Some(self.bands.tiles)
    }

    fn total_at_end(&self) -> Option<Val<'k, u32>> {
        None
    }
}

/// Tiles of a ragged batch. Their number depends on the sequences, so a CTA may find no tile.
struct RaggedTiles<'a, 'k> {
    unequal: &'a Unequal<'k>,
    walk: RaggedWalk<'k>,
    /// Queries per tile.
    rows: u32,
    heads: Divisor<'k>,
    spans: Option<&'a Spans>,
}

impl<'k, W: Who> Tiles<'k, W> for RaggedTiles<'_, 'k> {
    fn first(&self, t: &Scope<'k, W>, some: &dyn Fn(&Scope<'k, W>), none: &dyn Fn(&Scope<'k, W>)) {
        let exists = self.seek(t, t.cta());
        t.choose(exists, |t| some(t), |t| none(t));
    }

    fn seek(&self, t: &Scope<'k, W>, tile: Val<'k, u32>) -> Val<'k, bool> {
        self.unequal.seek(t, &self.walk, tile, self.rows, self.heads.value())
    }

    fn find(&self, t: &Scope<'k, W>, tile: Val<'k, u32>) -> FoundTile<'k> {
        let found = self.unequal.find(t, &self.walk, tile, self.heads, self.spans);
        let RaggedTile { batch, head, number, sequence } = found;
        let lengths = sequence.lengths();
        // Rows past the last query in use are computed as copies of that query.
        let q_len = sequence.q_len.max(1);
        FoundTile { index: tile, batch, head, number, sequence: Some(sequence), lengths, q_len }
    }

    fn total(&self) -> Option<Val<'k, u32>> {
        None
    }

    fn total_at_end(&self) -> Option<Val<'k, u32>> {
        Some(Unequal::total(&self.walk))
    }
}
