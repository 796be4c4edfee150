//! The order of loads and steps where one tile ends and the next begins.

use crate::attention::forward::config::{End, ForwardConfig};
use crate::attention::forward::features::Features;
use crate::parts::schedule::Work;
use fulgurite_core::Exp;
use fulgurite_ptx::{Scope, Thread};

/// A thread that loads tiles.
pub(crate) trait TileLoader<'k> {
    /// The tile whose keys are being loaded.
    fn work(&self) -> Work<'k>;

    /// Loads the queries of a tile.
    fn load_q(&self, t: &Scope<'k, Thread>, work: &Work<'k>);

    /// Loads queries and all keys of a tile, for folds that must see all scores first. The keys are loaded again later.
    fn scan(&self, t: &Scope<'k, Thread>, work: &Work<'k>);
}

/// How the end of a tile meets the start of the next one. Roles ask it what to do at each of these points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileOrder {
    /// A tile ends before the next one starts.
    Separate,
    /// The scores of the next tile's first block overlap with the last p v of this tile.
    Joined,
    /// A tile ends before the next one starts, and all scores of a tile are seen before its first p. Its keys are
    /// loaded twice.
    Scanned,
}

impl TileOrder {
    pub fn new(features: &Features, config: &ForwardConfig) -> TileOrder {
        match (features.exp, config.end) {
            (Exp::Sas { .. }, _) => TileOrder::Scanned,
            (_, End::Joined) => TileOrder::Joined,
            (_, End::Parts) => TileOrder::Separate,
        }
    }

    /// Stages of the ring of queries.
    pub fn query_stages(self) -> u32 {
        match self {
            TileOrder::Joined => 2,
            TileOrder::Separate | TileOrder::Scanned => 1,
        }
    }

    /// Loads before the first key block of the CTA's first tile.
    pub fn before_first_keys<'k>(self, t: &Scope<'k, Thread>, load: &impl TileLoader<'k>) {
        if self == TileOrder::Scanned {
            load.scan(t, &load.work());
        }
    }

    /// Loads after the first key block of the CTA's first tile.
    pub fn after_first_keys<'k>(self, t: &Scope<'k, Thread>, load: &impl TileLoader<'k>) {
        if self != TileOrder::Scanned {
            load.load_q(t, &load.work());
        }
    }

    /// Loads before the first key block of a later tile.
    pub fn before_keys<'k>(self, t: &Scope<'k, Thread>, load: &impl TileLoader<'k>, work: &Work<'k>) {
        match self {
            TileOrder::Separate => {}
            // The scores of this tile overlap with the last p v of the previous one, so its queries load first.
            TileOrder::Joined => load.load_q(t, work),
            TileOrder::Scanned => load.scan(t, work),
        }
    }

    /// Loads after the first key block of a later tile.
    pub fn after_keys<'k>(self, t: &Scope<'k, Thread>, load: &impl TileLoader<'k>, work: &Work<'k>) {
        if self == TileOrder::Separate {
            load.load_q(t, work);
        }
    }

    /// Loads the last v of a tile, and what the `next` tile starts with, in the order of use.
    pub fn between_tiles<'k>(
        self,
        t: &Scope<'k, Thread>,
        last_v: impl FnOnce(&Scope<'k, Thread>),
        next: impl FnOnce(&Scope<'k, Thread>),
    ) {
        match self {
            TileOrder::Joined => {
                next(t);
                last_v(t);
            }
            TileOrder::Separate | TileOrder::Scanned => {
                last_v(t);
                next(t);
            }
        }
    }

    /// Computes all tiles of the CTA. `joined` starts the next tile while one ends, `separate` does not.
    pub fn compute(self, joined: impl FnOnce(), separate: impl FnOnce()) {
        match self {
            TileOrder::Joined => joined(),
            TileOrder::Separate | TileOrder::Scanned => separate(),
        }
    }

    /// Before the first p of a tile: `scan` sees all scores on which it depends.
    pub fn before_first_block(self, scan: impl FnOnce()) {
        if self == TileOrder::Scanned {
            scan();
        }
    }
}
