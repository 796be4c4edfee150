//! Additions to d_q by TMA: a warpgroup writes the d_q of a step to shared memory, and a thread that does nothing
//! else has TMA add it to the sums. No compute thread waits for additions.

use crate::attention::backward::d_q::ordered::Ordered;
use crate::attention::backward::d_q::round::Round;
use crate::attention::backward::d_q::service::{Job, Log, Service};
use crate::attention::backward::d_q::split_tiles::SplitTiles;
use crate::attention::backward::tiles::{TileMap, Work};
use fulgurite_ptx::{Acc, BulkReducer, Group, Scope, Thread, Tile, TileShape, Var};
use std::rc::Rc;

const NAME: &str = "bulk_reduce";

/// Warpgroups that compute.
const GROUPS: u32 = 2;
/// The warp of the load role that starts TMA for the first warpgroup.
const FIRST_WARP: u32 = 2;

/// Copy-engine reduction, and the services that take part in it.
pub(crate) struct BulkReduce<'k> {
    pub reducer: BulkReducer<'k>,
    pub round: Option<Rc<Round<'k>>>,
    pub split: Option<Rc<SplitTiles<'k>>>,
    pub ordered: Option<Rc<Ordered<'k>>>,
    pub log: Rc<Log>,
}

impl<'k> BulkReduce<'k> {
    /// Compute role: has d_q added to the sums at the address `to`. On a tile's last step, `last` is the tile: when that step's
    /// additions have arrived, the reducer adds the tile to the rounding service's counter.
    #[track_caller]
    pub fn send(
        &self,
        w: &Scope<'k, Group>,
        map: &TileMap<'k>,
        (to, d_q): (Var<'k, u64>, &Acc<'k>),
        last: Option<&Work<'k>>,
    ) {
        self.log.waits(NAME, "buffer free");
        self.log.signals(NAME, "d_q written");
        let elements: Vec<_> = d_q.elements().collect();
        self.reducer.open(w, to.get());
        if let (Some(work), Some(round)) = (last, &self.round) {
            let by = self.split.as_ref().map_or(w.constant(1), |_| SplitTiles::length(work));
            self.reducer.tell(w, round.added(map.pair(work)).words(), by);
        }
        self.reducer.write(w, elements.chunks_exact(4).map(|four| std::array::from_fn(|i| four[i])));
        self.reducer.send(w);
    }

    /// Compute role: the warpgroup's place as a tile, when TMA has read it.
    #[track_caller]
    pub fn as_tile(&self, w: &Scope<'k, Group>, shape: TileShape) -> Tile<'k> {
        self.reducer.as_tile(w, shape)
    }

    /// Compute role: after the last tile.
    #[track_caller]
    pub fn end(&self, w: &Scope<'k, Group>) {
        self.reducer.end(w);
    }
}

impl<'k> Service<'k> for BulkReduce<'k> {
    fn jobs(&self) -> Vec<Job> {
        (0..GROUPS).map(|group| Job::new(NAME, FIRST_WARP + group)).collect()
    }

    fn on_warp(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, warp: u32) {
        self.log.waits(NAME, "d_q written");
        self.log.signals(NAME, "buffer free");
        if let Some(round) = &self.round {
            round.log_added();
        }
        let group = warp - FIRST_WARP;
        match &self.ordered {
            Some(ordered) => {
                let until = ordered.no_turn(t);
                let before = |t: &Scope<'k, Thread>| ordered.before_bulk(t, map, group, until);
                self.reducer.keep(t, group, before, |t| ordered.after_bulk(t, group, until));
            }
            None => self.reducer.keep(t, group, |_| {}, |_| {}),
        }
    }
}
