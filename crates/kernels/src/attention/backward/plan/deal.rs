//! How the last tiles are split, so that all CTAs finish together.

#[cfg(test)]
use std::ops::Range;

/// Tiles and runs of steps, as they are handed out: first whole tiles, then runs. The tiles after the whole ones are split;
/// their steps, one tile after the other, are divided into runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deal {
    /// Tiles that are handed out whole.
    pub whole: u64,
    /// Runs after them.
    pub runs: u64,
    /// Steps of a run.
    pub run: u64,
    /// Runs, from the first on, that have one step more.
    pub longer: u64,
}

/// Properties of the tiles to deal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Tiles of all pairs.
    pub count: u64,
    /// Steps of a tile, for each query head.
    pub steps: u64,
    /// Query heads of a key/value head: a step of a run is one step of each.
    pub group: u64,
    /// Assumed cost of joining the pieces of a tile, in steps for each piece.
    pub join: u64,
}

impl Deal {
    /// No tile is split.
    pub fn whole(tiles: u64) -> Deal {
        Deal { whole: tiles, runs: 0, run: 0, longer: 0 }
    }

    /// The split among `ctas` that takes the least time, if it takes less than whole tiles. The remainder, tiles modulo CTAs,
    /// is split. With more runs each is shorter, but more pieces must be joined.
    pub fn best(tiles: Tiles, ctas: u64) -> Option<Deal> {
        let Tiles { count, steps, group, join } = tiles;
        let left = count.checked_rem(ctas)?;
        let time = |runs: u64| {
            let run = (left * steps).div_ceil(runs);
            group * run + join * (1 + steps.div_ceil(run))
        };
        let runs = (left + 1..=ctas.min(left * steps)).filter(|_| left > 0).min_by_key(|runs| time(*runs))?;
        let deal = Deal { whole: count - left, runs, run: left * steps / runs, longer: left * steps % runs };
        (time(runs) < group * steps).then_some(deal)
    }

    /// Whole tiles and runs.
    pub fn works(&self) -> u64 {
        self.whole + self.runs
    }

    /// Steps of a run, counted from the first step of the first split tile.
    #[cfg(test)]
    pub fn steps_of(&self, run: u64) -> Range<u64> {
        let start = run * self.run + run.min(self.longer);
        start..start + self.run + u64::from(run < self.longer)
    }
}
