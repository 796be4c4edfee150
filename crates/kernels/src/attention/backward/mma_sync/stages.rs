//! The stages of q and d_o.
//!
//! A step reads its q and its d_o up to its end. With four stages, one item is both of them, and those of the next step
//! arrive meanwhile. With three, q and d_o are items in turn: the q of the next step arrives during the whole step, its d_o
//! while it multiplies scores. With two, nothing arrives ahead.

use fulgurite_ptx::{Builder, CopyRing, Group, Half, Pair, Scope, Tile, TileShape, Word};
use std::cell::Cell;

/// An operand of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepOperand {
    Queries,
    Outputs,
}

/// The step whose operand is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    Now,
    Next,
}

/// The ring of q and d_o.
pub(super) struct SyncStages<'k> {
    ring: CopyRing<'k>,
    depth: u32,
    /// While a step is built with four stages: its d_o.
    outputs: Cell<Option<Tile<'k>>>,
}

/// Starts the copy of an operand of a step to a tile; past the last step it copies nothing.
pub(super) type Load<'a, 'k> = &'a dyn Fn(&Scope<'k, Group>, (StepOperand, When), Tile<'k>);

impl<'k> SyncStages<'k> {
    /// Stages for `rows` queries of these row lengths.
    pub fn new<T: Half>(k: &'k Builder, depth: u32, rows: u32, dims: [u32; 2]) -> Self
    where
        Pair<T>: Word,
    {
        let shapes = dims.map(|cols| TileShape::new(T::NUMBER, rows, cols));
        let ring = match depth {
            4 => k.copy_ring("q_d_o", 2, &shapes),
            _ => k.copy_ring_of_either("q_d_o", depth, &shapes),
        };
        SyncStages { ring, depth, outputs: Cell::new(None) }
    }

    /// The ring, for copies that belong to no stage.
    pub fn ring(&self) -> &CopyRing<'k> {
        &self.ring
    }

    fn put(&self, w: &Scope<'k, Group>, what: (StepOperand, When), load: Load<'_, 'k>) {
        self.ring.put(w, |w, tiles| load(w, what, tiles[what.0 as usize]));
    }

    fn put_both(&self, w: &Scope<'k, Group>, when: When, load: Load<'_, 'k>) {
        self.ring.put(w, |w, tiles| {
            load(w, (StepOperand::Queries, when), tiles[0]);
            load(w, (StepOperand::Outputs, when), tiles[1]);
        });
    }

    /// Before the first step.
    pub fn start(&self, w: &Scope<'k, Group>, load: Load<'_, 'k>) {
        match self.depth {
            4 => self.put_both(w, When::Now, load),
            3 => self.put(w, (StepOperand::Queries, When::Now), load),
            _ => {}
        }
    }

    /// The q of a step. All threads are then done with the step before.
    pub fn queries(&self, w: &Scope<'k, Group>, load: Load<'_, 'k>) -> Tile<'k> {
        let tiles = match self.depth {
            4 => {
                let tiles = self.ring.wait(w);
                self.outputs.set(Some(tiles[1]));
                self.put_both(w, When::Next, load);
                return tiles[0];
            }
            3 => {
                let tiles = self.ring.wait_but(w, 0);
                self.put(w, (StepOperand::Outputs, When::Now), load);
                self.put(w, (StepOperand::Queries, When::Next), load);
                tiles
            }
            _ => {
                self.ring.meet(w);
                self.put(w, (StepOperand::Queries, When::Now), load);
                self.put(w, (StepOperand::Outputs, When::Now), load);
                self.ring.wait_but(w, 1)
            }
        };
        self.ring.done(w);
        tiles[0]
    }

    /// The d_o of a step, after its q.
    pub fn outputs(&self, w: &Scope<'k, Group>) -> Tile<'k> {
        let tile = match self.outputs.take() {
            Some(tile) => tile,
            None => self.ring.wait_but(w, self.depth - 2)[1],
        };
        self.ring.done(w);
        tile
    }
}
