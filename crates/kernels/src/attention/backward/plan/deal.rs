//! Which tiles are cut into pieces, so that all blocks end at the same time.

use crate::attention::backward::Order;
use crate::attention::backward::plan::{Arguments, BackwardPlan, Span, Value};

/// How the last tiles are dealt out.
pub(crate) struct Dealt {
    /// Tiles that go whole, and runs of steps after them.
    whole: u64,
    runs: u64,
    /// Steps of a run, and how many runs have one more.
    run: u64,
    longer: u64,
}

impl Dealt {
    /// How much there is to hand out.
    pub fn works(&self) -> u64 {
        self.whole + self.runs
    }
}

impl BackwardPlan {
    /// How so many blocks share the tiles that are left when each has had as many as the others, where that takes less time than
    /// whole tiles: the more runs there are, the shorter they are, and the longer it takes to join the pieces of a tile.
    fn dealt(&self, blocks: u64) -> Option<Dealt> {
        let join = self.config.join?;
        let (tiles, steps, join) = (self.key_tiles() * self.pairs(), self.steps(), u64::from(join));
        let (left, group) = (tiles.checked_rem(blocks)?, self.heads[0].checked_div(self.heads[1])?);
        let whole = tiles - left;
        let time = |runs: u64| {
            let run = (left * steps).div_ceil(runs);
            group * run + join * (1 + steps.div_ceil(run))
        };
        let runs = (left + 1..=blocks.min(left * steps)).filter(|_| left > 0).min_by_key(|runs| time(*runs))?;
        let dealt = Dealt { whole, runs, run: left * steps / runs, longer: left * steps % runs };
        // The kernel before zeroes a word with each thread, and has 32 of them for 16 rows.
        let zeroed = self.first_piece() + 2 * left <= 2 * self.rows();
        (time(runs) < group * steps && self.comes_round(whole) && zeroed).then_some(dealt)
    }

    /// How many tiles are cut, as far as can be known before it is known how many blocks there will be. Tiles that differ in
    /// length are handed out the longest first, which leaves little to gain; in a fixed order they wait for each other as it is.
    pub(crate) fn cut_tiles(&self) -> u64 {
        let equal = self.features.order == Order::Any && self.features.mask.spans().is_empty();
        let dealt = self.dealt(self.sms()).filter(|_| equal);
        dealt.map_or(0, |dealt| self.key_tiles() * self.pairs() - dealt.whole)
    }

    /// Bytes for the sums of pieces.
    pub(crate) fn piece_bytes(&self) -> u64 {
        let row = u64::from(self.features.dims[0] + self.features.dims[1]) * 4;
        self.cut * u64::from(self.config.keys()) * row
    }

    /// How so many blocks share the last tiles; not at all if there is no memory for it.
    pub(crate) fn dealt_in_room(&self, blocks: u64) -> Option<Dealt> {
        let tiles = self.key_tiles() * self.pairs();
        self.dealt(blocks).filter(|dealt| tiles - dealt.whole <= self.cut)
    }

    /// What is dealt out, and where pieces have their sums, and the numbers of steps in them.
    pub(crate) fn deal(&self, args: &mut Arguments<'_>, dealt: Option<Dealt>, [sums, summed]: [Span; 2]) {
        let none = Dealt { whole: self.key_tiles() * self.pairs(), runs: 0, run: 0, longer: 0 };
        let Dealt { whole, runs, run, longer } = dealt.unwrap_or(none);
        for (name, n) in [("whole", whole), ("runs", runs), ("run", run), ("longer", longer)] {
            args.add_u32(name, n);
        }
        args.divisor(["tile_steps", "tile_steps_magic", "tile_steps_shift"], self.steps());
        args.add("piece_sums", Value::Pointer(sums));
        args.add("summed", Value::Pointer(summed));
    }
}
