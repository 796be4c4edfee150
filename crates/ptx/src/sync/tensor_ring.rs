//! Rings of tiles in tensor memory, between the thread that starts products and the warpgroup that reads the results.

use crate::build::{Builder, Group, Scope, Val, Var, WarpRole, WholeWarps};
use crate::inst::{Arg, Base};
use crate::sync::cta_pair::{commit, of_leader};
use crate::sync::pipe::wait_phase;
use crate::table::{mbarrier, tcgen05};
use crate::tcgen05::CtaGroup;
use crate::tensor_memory::TensorTile;
use std::panic::Location;

/// Warps of a warpgroup, each of which signals once.
const WARPS: u32 = 4;

/// One of several like rings.
#[derive(Clone, Copy)]
pub enum Which<'k> {
    /// By its number.
    Index(u32),
    /// The ring of the own warpgroup, in a role with one ring for each.
    Own(Val<'k, u32>),
}

/// Like rings of tiles in tensor memory, one for each warpgroup of the role that empties them. The products of one
/// thread fill a tile; the warpgroup answers when it has read it.
pub struct TensorRing<'k> {
    k: &'k Builder,
    /// The rings' identities, for their cursors.
    ids: Vec<usize>,
    depth: u32,
    /// Offsets of the first ring's mbarriers.
    full: u32,
    empty: u32,
    /// Number of parts in which the warpgroup answers. The mbarriers of a part follow those of the part before it.
    parts: u32,
    /// The first tile of the first ring.
    first: TensorTile<'k>,
}

/// The size of like rings of tiles.
#[derive(Clone, Copy)]
pub(crate) struct RingShape {
    pub rings: u32,
    /// Tiles of a ring.
    pub depth: u32,
    /// Columns of a tile.
    pub cols: u32,
    /// Parts in which the warpgroup answers.
    pub parts: u32,
}

impl Builder {
    /// `rings` rings of `depth` tiles of accumulators with 128 rows and `cols` columns.
    #[track_caller]
    pub fn tensor_ring(&self, name: &str, rings: u32, depth: u32, cols: u32) -> TensorRing<'_> {
        self.tensor_rings(name, RingShape { rings, depth, cols, parts: 1 }, CtaGroup::Single)
    }

    /// `rings` rings of one tile of accumulators with 128 rows and `cols` columns. The warpgroup overwrites a tile in
    /// `parts` parts and [publishes](TensorRing::publish) each.
    #[track_caller]
    pub fn tensor_ring_in_parts(&self, name: &str, rings: u32, cols: u32, parts: u32) -> TensorRing<'_> {
        if parts == 0 {
            self.refuse("a tile answered in 0 parts, allowed: 1 or more".into());
        }
        self.tensor_rings(name, RingShape { rings, depth: 1, cols, parts }, CtaGroup::Single)
    }

    /// Rings of tiles of single CTAs or of a pair.
    #[track_caller]
    pub(crate) fn tensor_rings(&self, name: &str, shape: RingShape, group: CtaGroup) -> TensorRing<'_> {
        let RingShape { rings, depth, cols, parts } = shape;
        let first = self.accumulators_of(name, rings * depth, cols, group);
        let ids = (0..rings).map(|_| {
            let id = self.new_pipe(name, 1);
            self.pipe_filled(id);
            id
        });
        let ids = ids.collect();
        let full = self.mbarriers(&format!("{name}.full"), rings * depth, crate::build::Count::Fixed(1));
        // The warps of both CTAs of a pair answer to the leader.
        let answers = crate::build::Count::Fixed(group.ctas() * WARPS);
        let empty = self.mbarriers(&format!("{name}.empty"), rings * depth * parts, answers);
        TensorRing { k: self, ids, depth, full, empty, parts, first }
    }

    /// A ring of one tile that lies in columns which are already allocated, and that every warp of `groups` warpgroups
    /// empties. Rings over the same columns must take turns by the order of the products into them.
    #[track_caller]
    pub fn tensor_ring_of<'k>(&'k self, name: &str, tile: TensorTile<'k>, groups: u32) -> TensorRing<'k> {
        let id = self.new_pipe(name, 1);
        self.pipe_filled(id);
        let full = self.mbarriers(&format!("{name}.full"), 1, crate::build::Count::Fixed(1));
        let empty = self.mbarriers(&format!("{name}.empty"), 1, crate::build::Count::Fixed(WARPS * groups));
        TensorRing { k: self, ids: vec![id], depth: 1, full, empty, parts: 1, first: tile }
    }
}

impl<'k> TensorRing<'k> {
    #[track_caller]
    fn cursor(&self, which: Which<'k>, side: &'static str) -> [Var<'k, u32>; 2] {
        let id = match which {
            Which::Index(n) => self.ids[n as usize],
            Which::Own(_) => self.ids[0],
        };
        self.k.cursor(id, side, [0, u32::from(side == "put")])
    }

    /// Index of a stage among those of all rings.
    #[track_caller]
    fn index(&self, which: Which<'k>, stage: Val<'k, u32>) -> Val<'k, u32> {
        let first = match which {
            Which::Index(n) => stage.literal(n * self.depth),
            Which::Own(n) => n * self.depth,
        };
        if self.depth == 1 { first } else { first + stage }
    }

    #[track_caller]
    fn barrier(&self, first: u32, which: Which<'k>, stage: Val<'k, u32>) -> Val<'k, u32> {
        self.index(which, stage).mul_add(8, self.k.shared_address(first))
    }

    /// Offset of the first mbarrier of the answers to a part.
    #[track_caller]
    fn answers(&self, part: u32) -> u32 {
        if part >= self.parts {
            self.k.refuse(format!("part {part} of a tile in {} parts, allowed: smaller numbers", self.parts));
        }
        self.empty + 8 * self.ids.len() as u32 * self.depth * part
    }

    /// Advances to the next stage; past the last stage, to the first one with the other parity.
    #[track_caller]
    fn advance(&self, [stage, parity]: [Var<'k, u32>; 2]) {
        if self.depth == 1 {
            return parity.set(parity.now() ^ 1);
        }
        let next = stage.now() + 1;
        let wraps = next.eq(self.depth);
        stage.set(wraps.select(0u32, next));
        parity.set(parity.now() ^ wraps.select::<u32>(1, 0));
    }

    #[track_caller]
    fn wait(&self, first: u32, which: Which<'k>, [stage, parity]: [Var<'k, u32>; 2]) {
        wait_phase(self.k, self.barrier(first, which, stage.now()), parity.now());
        self.k.emit(&tcgen05::FENCE, [Arg::Word("after")]);
    }

    /// The tile of the stage at a side's cursor.
    #[track_caller]
    fn tile(&self, which: Which<'k>, side: &'static str) -> TensorTile<'k> {
        let [stage, _] = self.cursor(which, side);
        self.first.nth(self.index(which, stage.now()))
    }

    /// Waits until the next tile may be overwritten, and returns it.
    #[track_caller]
    pub fn await_empty(&self, _: &Scope<'k, WarpRole>, which: Which<'k>) -> TensorTile<'k> {
        self.wait(self.empty, which, self.cursor(which, "put"));
        self.tile(which, "put")
    }

    /// The next tile to fill, in a ring of one tile that the role itself knows to be empty.
    #[track_caller]
    pub fn next(&self, _: &Scope<'k, WarpRole>, which: Which<'k>) -> TensorTile<'k> {
        self.tile(which, "put")
    }

    /// The tile is full once all products that the role's thread has started are complete.
    #[track_caller]
    pub fn filled(&self, w: &Scope<'k, WarpRole>, which: Which<'k>) {
        let (cursor, at) = (self.cursor(which, "put"), Location::caller());
        let full = self.barrier(self.full, which, cursor[0].now());
        w.elected(|t| {
            t.k.placed(at, || commit(t.k, full, self.first.group() == CtaGroup::Pair));
        });
        self.advance(cursor);
    }

    /// Waits until the warpgroup has published a part of the last tile, in a ring of one tile. The role waits for every
    /// part of a tile, in their order.
    #[track_caller]
    pub fn await_part(&self, _: &Scope<'k, WarpRole>, which: Which<'k>, part: u32) {
        let cursor = self.cursor(which, "answer");
        self.wait(self.answers(part), which, cursor);
        if part + 1 == self.parts {
            self.advance(cursor);
        }
    }

    /// Waits for the next full tile, and returns it.
    #[track_caller]
    pub fn await_full(&self, _: &Scope<'k, Group>, which: Which<'k>) -> TensorTile<'k> {
        self.wait(self.full, which, self.cursor(which, "take"));
        self.tile(which, "take")
    }

    /// The tile that the warpgroup waits for next, while the role knows by other means who accesses it.
    #[track_caller]
    pub fn own(&self, _: &Scope<'k, Group>, which: Which<'k>) -> TensorTile<'k> {
        self.tile(which, "take")
    }

    /// Gives back the tile that was waited for, after the warp's loads and stores of tensor memory are complete.
    #[track_caller]
    pub fn give_back<W: WholeWarps>(&self, w: &Scope<'k, W>, which: Which<'k>) {
        w.wait_tensor_loads();
        self.signal(w, which, self.parts - 1);
    }

    /// Publishes a part of the tile that was waited for, after the warp has stored it. The last part gives the tile
    /// back. After any other part follows a wall, because the assembler would compute the next part before it signals;
    /// the [verdict](crate::assemble::Report::verdict) on a kernel tells whether the wall holds.
    #[track_caller]
    pub fn publish<W: WholeWarps>(&self, w: &Scope<'k, W>, which: Which<'k>, part: u32) {
        w.wait_tensor_stores();
        self.signal(w, which, part);
        if part + 1 < self.parts {
            self.k.keep_publish(Location::caller());
            self.k.wall();
        }
    }

    #[track_caller]
    fn signal<W: WholeWarps>(&self, w: &Scope<'k, W>, which: Which<'k>, part: u32) {
        self.ids.iter().for_each(|&id| self.k.pipe_emptied(id));
        let cursor = self.cursor(which, "take");
        self.k.emit(&tcgen05::FENCE, [Arg::Word("before")]);
        w.sync_warp();
        let empty = self.barrier(self.answers(part), which, cursor[0].now());
        let (lane, at) = (w.lane(), Location::caller());
        self.k.placed(at, || {
            let (empty, arrive) = match self.first.group() {
                CtaGroup::Single => (empty, &mbarrier::ARRIVE),
                CtaGroup::Pair => (of_leader(empty), &mbarrier::ARRIVE_PEER),
            };
            w.when(lane.lt(1), |w| {
                w.k.emit(arrive, [Arg::Address(Base::Reg(empty.in_register()), 0)]);
            });
        });
        if part + 1 == self.parts {
            self.advance(cursor);
        }
    }
}
