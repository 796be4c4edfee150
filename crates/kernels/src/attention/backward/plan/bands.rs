//! The numbering of tiles, and the pairs of head and sequence that own f32 sums of d_q at a time.
//!
//! CTAs take tiles by number. Numbers run through bands of pairs; within a band, the first tile of every pair comes first,
//! then the second, and so on. The last band may be longer than the others. With the rounding service a pair owns sums only
//! for a while: pair `p` and pair `p + slots` use the same memory. Part `n` of d_q (that of the pair of tile `n`) is
//! converted by the CTA that has tile `n + lag`.
//!
//! A CTA works through its tiles in the order of their numbers, so nothing waits in a circle if
//! - the part that comes with tile `m` waits only for tiles with numbers up to `m`, and
//! - tile `m` waits only for parts that come with tiles below `m`.
//!
//! `properties.rs` checks both for random sizes.

use crate::attention::backward::{BackwardConfig, Order};
use crate::parts::arguments::rest;

/// Pairs of a band under a mask, where tiles differ in length.
const MASKED_BAND: u64 = 16;
/// Tiles of such a band with the rounding service. Longer bands keep sums for longer.
const BAND_TILES: u64 = 32;
/// Pairs of a band in a fixed order, at most.
const FIXED_BAND: u64 = 64;
/// The share of an H200's L2 cache (60 MB) that the sums of a band may take.
const CACHE_BYTES: u64 = 32 << 20;

/// Inputs from which bands are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BandInputs {
    /// Pairs of key/value head and sequence.
    pub pairs: u64,
    /// Key tiles of a pair.
    pub tiles: u64,
    /// Whether a mask makes tiles differ in length.
    pub masked: bool,
    pub order: Order,
    /// Whether the main kernel converts d_q.
    pub rounds: bool,
    /// Bytes that the tiles of a pair read and add to for each query head.
    pub pair_bytes: u64,
    /// Whether rows of d_q have more than 64 elements.
    pub wide: bool,
    pub multiprocessors: u64,
}

/// Bands of tiles of equal sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bands {
    pub pairs: u64,
    /// Key tiles of a pair.
    pub tiles: u64,
    /// Whether the main kernel converts d_q.
    pub rounds: bool,
    /// Pairs of each band but the last.
    pub band: u64,
    /// Pairs of the last band.
    pub last: u64,
    /// Slots for the sums of a pair: pair `p` uses slot `p % slots`. A multiple of `band`, and possibly more than there are
    /// pairs.
    pub slots: u64,
    /// Distance in tiles between a part's own number and the tile that converts it.
    pub lag: u64,
    /// Pairs whose sums are zero before the main kernel starts.
    pub zeroed: u64,
}

impl Bands {
    pub fn new(inputs: &BandInputs, config: &BackwardConfig) -> Bands {
        let &BandInputs { pairs, tiles, rounds, .. } = inputs;
        let band = inputs.band(config);
        let slots = inputs.slots(config, band);
        let last = inputs.last(config, band, slots);
        // A part lags its tile by half of the slots. By then all tiles of its band are handed
        // out, and every CTA has started another tile since. If there are fewer tiles than the lag, all parts are
        // converted at the end.
        let lag = (slots * tiles / 2).min(pairs * tiles);
        let zeroed = inputs.zeroed(config, band, last);
        Bands { pairs, tiles, rounds, band, last, slots, lag, zeroed }
    }

    /// Tiles of all pairs.
    pub fn all_tiles(&self) -> u64 {
        self.pairs * self.tiles
    }

    /// Slots that are used, if the main kernel converts d_q: at most one for each pair.
    pub fn owners(&self) -> u64 {
        self.slots.min(self.pairs)
    }

    /// Whether every slot is free in time if parts come with the first `with_parts` tiles only. The other parts are
    /// converted after all tiles are handed out.
    pub fn slots_come_free(&self, with_parts: u64) -> bool {
        let reused = self.pairs.saturating_sub(self.slots).next_multiple_of(self.band);
        !self.rounds || reused == 0 || reused * self.tiles + self.lag <= with_parts
    }
}

/// The d_q of a pair, divided into parts. Each tile converts one part at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoundParts {
    /// Steps of a part.
    pub steps: u64,
    /// Parts that have steps.
    pub count: u64,
}

impl RoundParts {
    /// Parts of the `steps` of all query heads of a pair that has this many tiles.
    pub fn new(steps: u64, tiles: u64) -> RoundParts {
        let of_part = steps.div_ceil(tiles);
        RoundParts { steps: of_part, count: steps.div_ceil(of_part) }
    }
}

impl BandInputs {
    /// Pairs of a band.
    fn band(&self, config: &BackwardConfig) -> u64 {
        let band = match (config.pairs, self.order) {
            (Some(pairs), _) => u64::from(pairs.max(1)),
            (None, Order::Any) if !self.masked => 1,
            (None, Order::Any) if self.rounds => (BAND_TILES / self.tiles.max(1)).clamp(1, MASKED_BAND),
            (None, Order::Any) => MASKED_BAND,
            (None, Order::Fixed) => self.fixed_band(),
        };
        band.min(self.pairs).max(1)
    }

    /// Pairs of a band in a fixed order. In a longer band, fewer tiles of a pair wait for each other. But tiles of a band are
    /// spread over their pairs, and the L2 cache must hold what they read and add to.
    fn fixed_band(&self) -> u64 {
        // Sums that are not converted yet stay in the cache too, for longer under a mask, whose longest tiles come last. At
        // head dims up to 64 the longer band measured best all the same.
        let times = match (self.rounds, self.wide && self.masked) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => 4,
        };
        (CACHE_BYTES / (self.pair_bytes * times).max(1)).clamp(1, FIXED_BAND)
    }

    /// Pairs of the last band. Under a mask it is long enough that the shortest tiles of many pairs end the launch together.
    fn last(&self, config: &BackwardConfig, band: u64, slots: u64) -> u64 {
        let differ = self.order == Order::Any && self.masked;
        let by_rule = if differ { 2 * self.multiprocessors / self.tiles.max(1) } else { 0 };
        let wanted = config.last.map_or(by_rule, u64::from);
        // A part must come with a tile after all tiles that add to it, and before the tiles that need its slot. Both hold if
        // the last band, with a trailing incomplete band rounded up, has at most `slots / 2` pairs.
        let most = if self.rounds { wanted.min(slots / 2) } else { wanted }.min(self.pairs);
        rest(self.pairs, band) + (most / band).saturating_sub(1) * band
    }

    /// Pairs that own sums at a time, in whole bands.
    fn slots(&self, config: &BackwardConfig, band: u64) -> u64 {
        let between = if self.masked { 2 * self.multiprocessors } else { 5 * self.multiprocessors / 4 };
        let slots = match config.sums {
            Some(sums) => u64::from(sums),
            None => 2 * (band + between.div_ceil(self.tiles.max(1))),
        };
        slots.max(2 * band).next_multiple_of(band)
    }

    /// Pairs whose sums are zero before the main kernel starts: those that the first tile of every CTA adds to.
    fn zeroed(&self, config: &BackwardConfig, band: u64, last: u64) -> u64 {
        // Under a mask some of the first tiles are short.
        let first = if self.masked { 2 * self.multiprocessors } else { self.multiprocessors };
        let bands = first.div_ceil(band * self.tiles.max(1));
        let by_rule = if bands <= (self.pairs - last) / band { bands * band } else { self.pairs };
        config.zeroed.map_or(by_rule, u64::from)
    }
}
