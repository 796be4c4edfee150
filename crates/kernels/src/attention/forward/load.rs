//! The load role of the forward kernel: one thread that fetches tiles of queries, keys and values.
//!
//! The thread draws tickets from a counter, announces each tile to the compute role, and runs ahead as far as the rings
//! allow. Within a tile it loads in the order of use: k of a block before v of the previously loaded block.

use crate::attention::compute::Rings;
use crate::attention::forward::order::TileLoader;
use crate::attention::forward::params::ForwardParams;
use crate::attention::forward::tiles::{TileParams, Tiles};
use crate::attention::forward::tiling::Tiling;
use crate::attention::source::{KeyBlock, KeySource};
use crate::parts::block_lists::Tag;
use crate::parts::mask::Spans;
use crate::parts::schedule::{Equal, Of, Shape, Work, WorkVars};
use crate::parts::sequences::Sequences;
use fulgurite_ptx::{Divisor, Mailbox, Pointer, Scope, Tensor, Thread, Val, Var};

/// The parameters from which a kernel loads.
pub(super) struct LoadParams<'a, 'k> {
    pub counters: Pointer<'k, u32>,
    pub sequences: &'a Sequences<'k>,
    /// Tile order of a batch of equal sequences.
    pub bands: Option<&'a Equal<'k>>,
    pub heads: Divisor<'k>,
    /// Query heads per key/value head.
    pub group: Divisor<'k>,
    pub q: Tensor<'k>,
    pub keys: Tensor<'k>,
    pub values: Tensor<'k>,
}

impl<'a, 'k> LoadParams<'a, 'k> {
    pub fn of<T>(params: &'a ForwardParams<'k, T>) -> Self {
        LoadParams {
            counters: params.counters,
            sequences: &params.sequences,
            bands: params.bands.as_ref(),
            heads: params.heads,
            group: params.group,
            q: params.q,
            keys: params.keys,
            values: params.values,
        }
    }
}

/// What a kernel loads, and where.
pub(super) struct Loading<'a, 'k> {
    pub params: LoadParams<'a, 'k>,
    /// Tiles that the thread announces to the other roles.
    pub announced: &'a Mailbox<'k>,
    pub rings: &'a Rings<'k>,
    pub spans: &'a Spans,
    pub work_shape: Shape,
    pub tiling: Tiling,
    /// Keys per block.
    pub cols: u32,
    /// Whether the tags of blocks pass through the ring of keys.
    pub tags_ride: bool,
}

/// The loading thread.
pub(super) struct Load<'a, 'k> {
    kernel: Loading<'a, 'k>,
    source: &'a dyn KeySource<'k>,
    tiles: Box<dyn Tiles<'k, Thread> + 'a>,
    /// The tile whose keys are being loaded.
    now: WorkVars<'k>,
    /// Key/value head of the tile, kept to avoid repeating the division.
    kv_head: Var<'k, u32>,
    /// The key block whose k was loaded last.
    n: Var<'k, u32>,
    /// The tag of that block, if blocks have tags.
    tag: Option<Var<'k, u32>>,
}

impl<'a, 'k> Load<'a, 'k> {
    pub fn new(t: &Scope<'k, Thread>, kernel: Loading<'a, 'k>, source: &'a dyn KeySource<'k>) -> Self {
        let kv_head = t.var(0u32);
        let now = WorkVars::new(t, kernel.work_shape);
        let spans = (!source.tagged()).then_some(kernel.spans);
        let tiles =
            TileParams { sequences: kernel.params.sequences, bands: kernel.params.bands, heads: kernel.params.heads };
        let tiles = tiles.tiles(t, kernel.tiling.rows, spans);
        let n = t.var(0u32);
        let tag = source.tagged().then(|| t.var(0u32));
        Load { kernel, source, tiles, now, kv_head, n, tag }
    }

    /// Loads all tiles of the CTA.
    pub fn run(&self, t: &Scope<'k, Thread>) {
        self.tiles.first(t, &|t| self.tiles_of_cta(t), &|t| self.kernel.announced.put(t, &[]));
    }

    fn tiles_of_cta(&self, t: &Scope<'k, Thread>) {
        self.first_tile(t);
        t.repeat(|t, leave| {
            // Draw the ticket early to hide its latency: it is needed only after this tile's loads.
            let ticket = self.kernel.params.counters.fetch_add(t, 0, 1);
            let (work, head) = (self.now.get(), self.kv_head.get());
            self.later_blocks(t, &work, head);
            let last = KeyBlock { n: work.blocks[0], tag: self.carried() };
            if let Some(total) = self.tiles.total() {
                self.reset(t, ticket, total);
            }
            let next = ticket + t.ctas();
            let more = self.tiles.seek(t, next);
            self.kernel.tiling.order.between_tiles(
                t,
                |t| self.load_v(t, last, head, &work),
                |t| t.choose(more, |t| self.next_tile(t, next), |t| self.no_tile(t, ticket)),
            );
            leave.when(!more);
        });
    }

    /// Loads queries and the first k of the CTA's first tile.
    fn first_tile(&self, t: &Scope<'k, Thread>) {
        let order = self.kernel.tiling.order;
        self.begin(t, self.find(t, t.cta()));
        order.before_first_keys(t, self);
        let n = self.n.get();
        let tag = self.source.tag(t, &self.now.get(), n);
        self.carry(tag);
        let block = KeyBlock { n: self.n.get(), tag };
        let head = self.kv_head.get();
        self.load_k(t, block, head, &self.now.get());
        order.after_first_keys(t, self);
    }

    /// Loads queries and the first k of a later tile.
    fn next_tile(&self, t: &Scope<'k, Thread>, tile: Val<'k, u32>) {
        let order = self.kernel.tiling.order;
        let next = self.find(t, tile);
        self.begin(t, next);
        let tag = self.source.tag(t, &next, self.n.get());
        self.carry(tag);
        order.before_keys(t, self, &next);
        let block = KeyBlock { n: self.n.get(), tag };
        self.load_k(t, block, self.kv_head.get(), &next);
        order.after_keys(t, self, &next);
    }

    /// Loads k of each block after the first, and v of the block before it.
    fn later_blocks(&self, t: &Scope<'k, Thread>, work: &Work<'k>, head: Val<'k, u32>) {
        t.repeat(|t, leave| {
            leave.when(self.n.get().eq(work.blocks[0]));
            let n = self.n.get();
            let this = KeyBlock { n, tag: self.carried() };
            let tag = self.source.tag(t, work, n - 1);
            self.load_k(t, KeyBlock { n: n - 1, tag }, head, work);
            self.load_v(t, this, head, work);
            self.n.set(n - 1);
            self.carry(tag);
        });
    }

    /// Tells the compute role that there are no more tiles.
    fn no_tile(&self, t: &Scope<'k, Thread>, ticket: Val<'k, u32>) {
        if let Some(total) = self.tiles.total_at_end() {
            self.reset(t, ticket, total);
        }
        self.kernel.announced.put(t, &[]);
    }

    /// The CTA that draws the last ticket resets the counter. Each CTA draws one ticket per tile: its first tile is its
    /// own index, and its last ticket finds no tile.
    fn reset(&self, t: &Scope<'k, Thread>, ticket: Val<'k, u32>, total: Val<'k, u32>) {
        t.when(ticket.eq(total - 1), |t| self.kernel.params.counters.store(t, 0, 0));
    }

    /// A tile and its key blocks.
    fn find(&self, t: &Scope<'k, Thread>, tile: Val<'k, u32>) -> Work<'k> {
        self.tiles.find(t, tile).work(t, self.kernel.tiling.rows, self.source)
    }

    /// Announces a tile to the compute role.
    fn begin(&self, t: &Scope<'k, Thread>, work: Work<'k>) {
        self.now.set(work);
        self.kv_head.set(self.kernel.params.group.div_rem(work.head)[0]);
        self.kernel.announced.put(t, &work.message(self.kernel.work_shape));
        self.n.set(work.blocks[1] - 1);
    }

    fn load_k(&self, t: &Scope<'k, Thread>, block: KeyBlock<'k>, head: Val<'k, u32>, work: &Work<'k>) {
        let key = block.first_key(self.kernel.cols);
        let at = self.source.coordinates(work, Of::K, t.constant(0u32), key, head);
        let (ring, keys) = (&self.kernel.rings.keys, &self.kernel.params.keys);
        match block.tag.filter(|_| self.kernel.tags_ride) {
            Some(tag) => ring.put_tagged(t, tag.0, |t, stage| stage.load(t, stage.tile(0), keys, &at)),
            None => ring.put(t, |t, stage| stage.load(t, stage.tile(0), keys, &at)),
        }
    }

    fn load_v(&self, t: &Scope<'k, Thread>, block: KeyBlock<'k>, head: Val<'k, u32>, work: &Work<'k>) {
        let key = block.first_key(self.kernel.cols);
        let tiling = &self.kernel.tiling;
        self.kernel.rings.values.put(t, |t, stage| {
            for g in 0..tiling.v_tiles {
                let column = t.constant(tiling.columns * g);
                let at = self.source.coordinates(work, Of::V, column, key, head);
                stage.load(t, stage.tile(g as usize), &self.kernel.params.values, &at);
            }
        });
    }

    /// Remembers the tag of the block whose k was loaded last.
    fn carry(&self, tag: Option<Tag<'k>>) {
        if let (Some(var), Some(tag)) = (self.tag, tag) {
            var.set(tag.0);
        }
    }

    fn carried(&self) -> Option<Tag<'k>> {
        self.tag.map(|var| Tag(var.get()))
    }
}

impl<'k> TileLoader<'k> for Load<'_, 'k> {
    fn work(&self) -> Work<'k> {
        self.now.get()
    }

    fn scan(&self, t: &Scope<'k, Thread>, work: &Work<'k>) {
        self.load_q(t, work);
        let n = t.var(self.n.get());
        t.repeat(|t, leave| {
            let block = KeyBlock { n: n.get(), tag: self.source.tag(t, work, n.get()) };
            self.load_k(t, block, self.kv_head.get(), work);
            leave.when(n.get().eq(work.blocks[0]));
            n.set(n.get() - 1);
        });
    }

    fn load_q(&self, t: &Scope<'k, Thread>, work: &Work<'k>) {
        self.kernel.rings.queries.put(t, |t, stage| {
            for g in 0..self.kernel.tiling.q_tiles {
                let (zero, row) = (t.constant(0u32), work.row + self.kernel.tiling.q_rows * g);
                let at = self.kernel.params.sequences.at(work, Of::Q, zero, row, work.head);
                stage.load(t, stage.tile(g as usize), &self.kernel.params.q, &at);
            }
        });
    }
}
