//! Which tiles run together, and how many pairs of head and sequence have sums of d_q at the same time.

use crate::attention::backward::Order;
use crate::attention::backward::d_q::zero_fill::ZEROS;
use crate::attention::backward::plan::{Arguments, BackwardPlan, COUNTERS, Span, Tensors, Value};
use crate::parts::arguments::rest;

/// Pairs of head and sequence whose tiles run together where tiles differ in length.
const ORDER: u64 = 16;
/// Tiles of such a band where d_q is rounded while they run: the more, the longer its sums are kept.
const BAND_TILES: u64 = 32;
/// A part of the second-level cache.
const CACHE_BYTES: u64 = 32 << 20;

impl BackwardPlan {
    /// SMs that the plan assumes. A GPU with another number stays correct: sums are kept longer than they need be, or waited for.
    pub(crate) fn sms(&self) -> u64 {
        u64::from(self.arch.sms)
    }

    /// Pairs of head of keys and sequence, and tiles of each.
    pub(crate) fn pairs(&self) -> u64 {
        self.batch() * self.heads[1]
    }
    pub(crate) fn key_tiles(&self) -> u64 {
        self.lengths()[1].div_ceil(u64::from(self.config.keys()))
    }

    /// Pairs whose tiles run together, of equal sequences.
    pub(crate) fn order(&self) -> u64 {
        let order = match (self.config.pairs, self.features.order) {
            (Some(pairs), _) => u64::from(pairs.max(1)),
            (None, Order::Any) if self.features.mask.spans().is_empty() => 1,
            (None, Order::Any) if self.features.rounds => (BAND_TILES / self.key_tiles().max(1)).clamp(1, ORDER),
            (None, Order::Any) => ORDER,
            (None, Order::Fixed) => self.fixed_order(),
        };
        order.min(self.pairs()).max(1)
    }

    /// Pairs of the last band. Where tiles differ in length, it has so many that the shortest go last, of all that run at the end:
    /// blocks whose last tile is a short one end together.
    pub(crate) fn last_band(&self) -> u64 {
        let (order, pairs) = (self.order(), self.pairs());
        let differ = self.features.order == Order::Any && !self.features.mask.spans().is_empty();
        let by_rule = if differ { 2 * self.sms() / self.key_tiles().max(1) } else { 0 };
        let wanted = self.config.last.map_or(by_rule, u64::from);
        // Where d_q is rounded meanwhile: a part comes with a tile after all that add to it, and before those that need its place.
        // Both hold if the last band, its rest counted as a whole band, has no more pairs than half the places.
        let most = if self.features.rounds { wanted.min(self.places() / 2) } else { wanted }.min(pairs);
        rest(pairs, order) + (most / order).saturating_sub(1) * order
    }

    /// Pairs that would have sums at the same time if there were enough, whole bands of them. Half of them are between a part's
    /// tile and the one it is rounded after: by then all tiles of its band are handed out, and all that run have been
    /// replaced, the longest too.
    fn places(&self) -> u64 {
        let between = if self.features.mask.spans().is_empty() { 5 * self.sms() / 4 } else { 2 * self.sms() };
        let places = match self.config.sums {
            Some(sums) => u64::from(sums),
            None => 2 * (self.order() + between.div_ceil(self.key_tiles().max(1))),
        };
        places.max(2 * self.order()).next_multiple_of(self.order())
    }

    /// How many tiles after the tile with its number a part is rounded. Where there are fewer tiles, all parts are left for the end.
    fn lag(&self) -> u64 {
        (self.places() * self.key_tiles() / 2).min(self.pairs() * self.key_tiles())
    }

    /// Whether every pair whose place is used again is rounded in time, if parts come with the first so many tiles only: the others
    /// are rounded when all tiles are handed out.
    pub(crate) fn comes_round(&self, tiles: u64) -> bool {
        let again = self.pairs().saturating_sub(self.places()).next_multiple_of(self.order());
        !self.features.rounds || again == 0 || again * self.key_tiles() + self.lag() <= tiles
    }

    /// Rows that have sums at the same time.
    pub(crate) fn sum_rows(&self) -> u64 {
        match self.features.rounds {
            true => self.rows() / self.pairs().max(1) * self.places().min(self.pairs()),
            false => self.rows(),
        }
    }

    /// Pairs whose sums are zero before the main kernel begins: those that the first tiles of all blocks add to.
    fn zeroed(&self) -> u64 {
        let (order, tiles) = (self.order(), self.key_tiles().max(1));
        // Under a mask some tiles are short.
        let first = if self.features.mask.spans().is_empty() { self.sms() } else { 2 * self.sms() };
        let bands = first.div_ceil(order * tiles);
        let by_rule = match bands <= (self.pairs() - self.last_band()) / order {
            true => bands * order,
            false => self.pairs(),
        };
        self.config.zeroed.map_or(by_rule, u64::from)
    }

    /// Rows whose sums are zero before the main kernel begins; all of them where it does not run, for want of keys.
    pub(crate) fn zeroed_rows(&self) -> u64 {
        let (all, of_pair) = (self.sum_rows(), self.rows() / self.pairs().max(1));
        let meanwhile = self.features.clears(&self.config) && self.key_tiles() > 0;
        if meanwhile { (of_pair * self.zeroed()).min(all) } else { all }
    }

    /// What of the sums is zeroed meanwhile.
    pub(crate) fn clearing(&self, args: &mut Arguments<'_>) {
        let copies = |rows: u64| rows * u64::from(self.features.dims[0]) / u64::from(ZEROS);
        let before = copies(self.zeroed_rows());
        let numbers =
            [("zeroed", self.zeroed()), ("first_cleared", before), ("cleared", copies(self.sum_rows()) - before)];
        numbers.into_iter().for_each(|(name, n)| args.add_u32(name, n));
    }

    /// Pairs whose tiles run together in a fixed order: the more, the fewer tiles of one pair wait for each other. But these
    /// tiles are spread over the whole of their pair, and what they read and add to must stay in the second-level cache.
    fn fixed_order(&self) -> u64 {
        let row_bytes = u64::from(4 * self.features.dims[0] + 2 * (self.features.dims[0] + self.features.dims[1]));
        // Sums that wait to be rounded stay there too, under a mask for longer: its longest tiles go last. Of short rows the full
        // number measured best all the same.
        let times = match (self.features.rounds, self.features.dims[0] > 64 && !self.features.mask.spans().is_empty()) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => 4,
        };
        let row_bytes = times * row_bytes;
        (CACHE_BYTES / (self.lengths()[0] * row_bytes).max(1)).clamp(1, 64)
    }

    /// Who rounds what of d_q.
    pub(crate) fn rounding(&self, args: &mut Arguments<'_>, tensors: &Tensors, counters: Span) {
        self.results(args, tensors);
        let (pairs, tiles, steps) = (self.pairs(), self.key_tiles(), self.steps());
        let all = self.heads[0] / self.heads[1] * steps;
        let part = all.div_ceil(tiles);
        args.add("added", Value::Pointer(counters.from(COUNTERS * 4)));
        args.add("rounded", Value::Pointer(counters.from((COUNTERS + pairs) * 4)));
        args.divisor(["places", "places_magic", "places_shift"], self.places());
        args.divisor(["head_steps", "head_steps_magic", "head_steps_shift"], steps);
        for (name, n) in [("lag", self.lag()), ("part", part), ("parts", all.div_ceil(part))] {
            args.add_u32(name, n);
        }
    }
}
