//! The schedule of a problem: everything that follows from its facts and a configuration, computed in one place.

use crate::attention::backward::d_q::ordered;
use crate::attention::backward::plan::bands::{BandInputs, Bands};
use crate::attention::backward::plan::deal::{Deal, Tiles};
use crate::attention::backward::plan::facts::Facts;
use crate::attention::backward::plan::scratch::{CounterWords, Scratch};
use crate::attention::backward::spread::HeadSpread;
use crate::attention::backward::step_ranges::RangeSizes;
use crate::attention::backward::{BackwardConfig, KernelShape, Order};
use fulgurite_core::Layout;

/// The schedule of a problem with a configuration.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Schedule {
    /// The properties on which the kernels' texts depend.
    pub shape: KernelShape,
    /// Steps of queries of a head. A sequence without queries has one step, which sees nothing; sequences of different
    /// lengths follow each other in a head.
    pub steps: u64,
    /// Rows of all heads, each head padded to whole steps.
    pub rows: u64,
    pub bands: Bands,
    /// Number of tiles that are split on the assumed GPU. The workspace has room for this many.
    pub split_tiles: u64,
    /// How the query heads of a key/value head are spread over CTAs. To bands and deals, a part is a key/value head.
    pub spread: HeadSpread,
}

impl Schedule {
    /// The schedule for a configuration that has a kernel for the problem's head dims.
    ///
    /// Two fields of the configuration may not be kept: with the rounding service and split tiles or a fixed order,
    /// `key_depth` becomes 1, because the loading thread has no registers left for a second stage of keys. With f32 results no
    /// tile is split.
    pub fn new(facts: &Facts, config: BackwardConfig) -> Schedule {
        let in_f32 = facts.results.is_f32();
        // The main kernel has no registers left to join pieces of tiles and to store f32 rows.
        let config = if in_f32 { BackwardConfig { join: None, ..config } } else { config };
        let plain = KernelShape::plain(&facts.features, config);
        let engine = config.has_bulk_reduce();
        let rounds = engine && facts.is_plain() && config.rounds && !in_f32;
        let spread = facts.spread(&config, engine && config.join.is_some() && has_equal_tiles(facts));
        let spread = HeadSpread { keeps_sums: in_f32 && facts.features.ragged.any(), ..spread };
        let single = engine && (facts.heads[0] == facts.heads[1] || spread.most() == 1);
        let step_ranges = facts.features.order == Order::Any && facts.has_step_ranges();
        let shape =
            KernelShape { rounds, single, spread: spread.shape(), step_ranges, results: facts.results, ..plain };
        let steps = steps(facts, u64::from(config.rows));
        let rows = facts.all_heads() * steps * u64::from(config.rows);
        let bands = Bands::new(&tiling(facts, &shape, &spread), &config);
        let schedule = Schedule { shape, steps, rows, bands, split_tiles: 0, spread };
        let split_tiles = schedule.split_tiles(facts);
        let splits = split_tiles > 0;
        let crowded = rounds && (splits || facts.features.order == Order::Fixed);
        let config = if crowded { BackwardConfig { key_depth: 1, ..config } } else { config };
        Schedule { shape: KernelShape { config, splits, ..shape }, split_tiles, ..schedule }
    }

    /// Tiles to split on the assumed GPU. Tiles that differ in length are handed out the longest first, which leaves little
    /// to gain; in a fixed order tiles wait for each other anyway.
    fn split_tiles(&self, facts: &Facts) -> u64 {
        let splits = self.shape.config.has_bulk_reduce() && has_equal_tiles(facts);
        let deal = self.best_deal(facts.arch.sms.into()).filter(|_| splits);
        deal.map_or(0, |deal| self.bands.all_tiles() - deal.whole)
    }

    /// The best split among `ctas`, if it pays and the other services allow it.
    fn best_deal(&self, ctas: u64) -> Option<Deal> {
        let join = u64::from(self.shape.config.join?);
        let count = self.bands.all_tiles();
        let deal = Deal::best(Tiles { count, steps: self.steps, group: self.spread.most(), join }, ctas)?;
        // The prepare kernel has two threads per row, and each zeroes one counter word.
        let fits_prepare = self.words(count - deal.whole, 0).turns <= 2 * self.rows;
        (self.bands.slots_come_free(deal.whole) && fits_prepare).then_some(deal)
    }

    /// How to split the last tiles among `ctas`. `None`: hand out whole tiles, as splitting does not pay or has no scratch memory.
    pub fn deal(&self, ctas: u64) -> Option<Deal> {
        self.best_deal(ctas).filter(|deal| self.bands.all_tiles() - deal.whole <= self.split_tiles)
    }

    /// Rows that have sums of d_q at a time.
    pub fn sum_rows(&self) -> u64 {
        match self.shape.rounds {
            true => self.rows_of_pairs(self.bands.owners()),
            false => self.rows,
        }
    }

    /// Rows of sums of the first `pairs` pairs of head and sequence. With the rounding service each has room for as many query
    /// heads as the longest part.
    fn rows_of_pairs(&self, pairs: u64) -> u64 {
        let heads = if self.shape.rounds { pairs * self.spread.most() } else { self.spread.first(pairs) };
        heads * self.steps * u64::from(self.shape.config.rows)
    }

    /// Rows whose sums are zero before the main kernel starts: all of them if it does not zero any, or does not run for want
    /// of keys.
    pub fn zeroed_rows(&self) -> u64 {
        let all = self.sum_rows();
        let zero_fills = self.shape.zero_fills && self.bands.tiles > 0;
        if zero_fills { self.rows_of_pairs(self.bands.zeroed).min(all) } else { all }
    }

    fn words(&self, split_tiles: u64, turns: u64) -> CounterWords {
        CounterWords::new(if self.shape.rounds { self.bands.pairs } else { 0 }, split_tiles, turns)
    }

    /// Offset of each counter.
    pub fn counters(&self, order: Order) -> CounterWords {
        let config = &self.shape.config;
        let turns = match order {
            Order::Any => 0,
            Order::Fixed => self.rows / u64::from(config.rows) * u64::from(ordered::parts(config)),
        };
        self.words(self.split_tiles, turns)
    }

    /// Tiles from one part of a head to the next, as its results lie in scratch memory: of one sequence if all are equally
    /// long, else of all sequences, each of which begins with a tile of its own.
    pub fn tiles_of_part(&self, facts: &Facts) -> u64 {
        let (keys, [_, rows]) = (u64::from(self.shape.config.keys()), facts.lengths());
        match facts.layout {
            Layout::Packed(p) => rows / keys + p.batch as u64 + 1,
            Layout::Dense { batch, .. } if facts.features.ragged.any() => rows.div_ceil(keys).max(1) * batch as u64,
            Layout::Dense { .. } => rows.div_ceil(keys),
        }
    }

    /// Sizes of the table of step ranges, if the main kernel reads one.
    pub fn step_ranges(&self, facts: &Facts) -> Option<RangeSizes> {
        let spec = facts.blocks.filter(|_| self.shape.step_ranges)?;
        let &[.., q_blocks, k_blocks] = facts.aux_shapes.last()?.as_slice() else { return None };
        let keys = match facts.layout {
            Layout::Dense { k_len, .. } => k_len,
            Layout::Packed(p) => p.max_k,
        };
        let tiles = (keys as u64).div_ceil(u64::from(self.shape.config.keys()));
        Some(RangeSizes::new(spec, [q_blocks, k_blocks], facts.heads[1], tiles))
    }

    /// Tiles of all parts.
    fn part_tiles(&self, facts: &Facts) -> u64 {
        let sequences = if facts.features.ragged.any() { 1 } else { facts.batch() };
        self.tiles_of_part(facts) * facts.heads[1] * self.spread.parts * sequences
    }

    /// Bytes of each region of the scratch memory.
    pub fn scratch(&self, facts: &Facts) -> Scratch<u64> {
        let KernelShape { config, dims, widths, .. } = &self.shape;
        let split_row = u64::from(widths[0] + widths[1]) * 4;
        Scratch {
            d_q_sums: self.sum_rows() * u64::from(dims[0]) * 4,
            shift: self.rows * 4,
            delta: self.rows * 4,
            counters: self.counters(facts.features.order).count * 4,
            marks: facts.mark_words().iter().sum::<u64>() * 4,
            block_table: facts.block_table_elements() * 4,
            extremes: facts.expression.as_ref().map_or(0, |blocks| blocks.extremes_bytes()),
            step_ranges: self.step_ranges(facts).map_or(0, |sizes| sizes.bytes()),
            exact_words: facts.all_exact_words() * 8,
            split_sums: self.split_tiles * u64::from(config.keys()) * split_row,
            head_parts: if self.spread.is_spread() {
                self.part_tiles(facts) * u64::from(config.keys()) * split_row
            } else {
                0
            },
        }
    }
}

/// Whether tiles of equal sequences take equally long, and need not wait for each other.
fn has_equal_tiles(facts: &Facts) -> bool {
    let equal = facts.features.order == Order::Any && facts.features.mask.spans().is_empty();
    facts.is_plain() && equal
}

/// Steps of queries from one head to the next.
fn steps(facts: &Facts, rows: u64) -> u64 {
    let [q, _] = facts.lengths();
    match facts.layout {
        Layout::Packed(p) => q / rows + p.batch as u64 + 1,
        Layout::Dense { batch, .. } if facts.features.ragged.any() => q.div_ceil(rows).max(1) * batch as u64,
        Layout::Dense { .. } => q.div_ceil(rows).max(1),
    }
}

fn tiling(facts: &Facts, shape: &KernelShape, spread: &HeadSpread) -> BandInputs {
    let [d, dv] = shape.dims.map(u64::from);
    let [q_len, k_len] = facts.lengths();
    BandInputs {
        pairs: facts.pairs() * spread.parts,
        tiles: k_len.div_ceil(u64::from(shape.config.keys())),
        masked: !facts.features.mask.spans().is_empty(),
        order: facts.features.order,
        rounds: shape.rounds,
        // The sums of d_q in f32, and q and d_o in 16 bits.
        pair_bytes: q_len * (4 * d + 2 * (d + dv)),
        wide: d > 64,
        multiprocessors: facts.arch.sms.into(),
    }
}
