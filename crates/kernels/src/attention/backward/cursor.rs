//! A position among the steps of a tile, for kernels with a CTA for each tile.

use crate::attention::backward::tiles::{TileMap, Work};
use fulgurite_ptx::{Scope, Val, Var, Who};

/// A position among the steps of a tile: the query head, and the step of its queries.
pub(crate) struct Cursor<'k> {
    pub head: Var<'k, u32>,
    pub step: Var<'k, u32>,
    /// Steps that are left, of all heads.
    pub left: Var<'k, u32>,
    steps: [Val<'k, u32>; 2],
}

impl<'k> Cursor<'k> {
    /// The first step of a tile.
    pub fn new<W: Who>(w: &Scope<'k, W>, map: &TileMap<'k>, work: &Work<'k>) -> Self {
        let [first, end] = work.steps;
        Cursor {
            head: w.var(map.first_head(work.head)),
            step: w.var(first),
            left: w.var((end - first) * map.heads_of(work.head)),
            steps: work.steps,
        }
    }

    /// Head and step of the next step.
    pub fn next(&self) -> [Val<'k, u32>; 2] {
        let (head, step) = (self.head.get(), self.step.get() + 1);
        let last = step.eq(self.steps[1]);
        [last.select(head + 1, head), last.select(self.steps[0], step)]
    }

    /// Goes to the next step. `next` is called when a new query head begins.
    pub fn forward<W: Who>(&self, w: &Scope<'k, W>, next: impl FnOnce(&Scope<'k, W>)) {
        self.left.set(self.left.get() - 1);
        self.step.set(self.step.get() + 1);
        w.when(self.step.get().eq(self.steps[1]), |w| {
            self.step.set(self.steps[0]);
            self.head.set(self.head.get() + 1);
            next(w);
        });
    }
}
