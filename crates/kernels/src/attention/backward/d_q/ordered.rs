//! A fixed order of additions to d_q: every step of queries takes the tiles of keys in the order in which they are handed
//! out, each when the one before it has added.
//!
//! Nobody who computes looks at memory for that. A message goes from the thread that loads a step to one that looks whether
//! it is the tile's turn, to the warps that add, and to one that tells the next tile when their additions have arrived. Where the
//! copy engine adds, the threads that start it look and tell, each for its warpgroup's part of the step. That takes them longer than
//! a short step: a turn has two steps there. Where blocks work in pairs, one thread of each has all these hands, for its block's
//! part.
//!
//! Tiles wait for tiles that were handed out before, and a block does its tiles in that order: whatever runs beside, the
//! first tile that is not done can go on. Tiles are handed out so that they seldom wait: the last keys go first. Under a
//! causal mask those begin at later steps, and neighbours that start together come to every step one after the other. Tiles
//! that no mask sets apart start together once, and then are as far apart as they had to wait.

use crate::attention::backward::d_q::given;
use crate::attention::backward::main::{Call, Main};
use crate::attention::backward::tiles::{Sequence, Work};
use crate::attention::backward::{Adds, BackwardConfig, Share};
use crate::params::Params;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Group, PeerTiles, Pointer, Scope, Thread, TokenRing, Val, Var};

/// Messages on their way: as many steps as are loaded ahead, and as many as are still arriving.
const DEPTH: u32 = 4;

/// No step: the thread that starts the copy engine has no turn.
const NONE: u32 = u32::MAX;

/// Steps of a turn, from one that is a multiple of it on: a tile looks before its first of them, and tells after its last.
fn turn(config: &BackwardConfig) -> u32 {
    if config.adds == Adds::Engine { config.turn } else { 1 }
}

/// Parts of a step that have an order of their own: what one warpgroup has the copy engine add, or a block of a pair.
pub(crate) fn parts(config: &BackwardConfig) -> u32 {
    match (config.adds, config.share) {
        (Adds::Engine, _) | (_, Share::Pairs) => 2,
        (Adds::Threads, Share::Keys | Share::Columns) => 1,
    }
}

/// Who has a message: the thread that loads, the one that looks at memory, the warps that compute, the one that tells others.
#[derive(Clone, Copy)]
pub(crate) enum Hand {
    Look = 1,
    Compute = 2,
    Tell = 3,
}

/// Where one thread looks and tells, the warps that compute are the next hand.
const NEXT: usize = 1;

/// Arguments of [`Turns`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    pub last: Span,
}

/// Who may add when.
pub(crate) struct Turns<'k> {
    /// For the first step of each turn of each head, or each of its parts: one more than the tile that added last.
    last: Pointer<'k, u32>,
    parts: u32,
    turn: u32,
    messages: TokenRing<'k>,
    /// The hand of the warps that compute.
    compute: usize,
}

impl<'k> Turns<'k> {
    /// Declares the parameter.
    pub fn declare(p: &Params<'k, Call>, config: &BackwardConfig) -> Self {
        let k = p.builder();
        let parts = parts(config);
        let (messages, compute) = match (config.adds, config.share) {
            (Adds::Threads, Share::Pairs) => (k.relay("turns", 1, &[1, 8]), NEXT),
            (Adds::Threads, _) => (k.relay("turns", DEPTH, &[1, 1, 8, 1]), Hand::Compute as usize),
            (Adds::Engine, _) => (k.relay("turns", DEPTH, &[1, parts]), Hand::Compute as usize),
        };
        Turns { last: p.array("turns", |call| given(&call.ordered).last), parts, turn: turn(config), messages, compute }
    }

    /// Warps that compute add a step when they are done with the d_z that it comes from.
    pub fn behind(self, d_z: &PeerTiles<'k>) -> Self {
        Turns { messages: self.messages.behind(self.compute, d_z), ..self }
    }

    /// The thread that loads a step of a tile tells which one; `number` is the step's among all.
    pub fn post(&self, t: &Scope<'k, Thread>, work: &Work<'k>, number: Val<'k, u32>, step: Val<'k, u32>) {
        self.messages.post(t, [number, step, work.tile + 1, work.batch]);
    }

    /// No more steps.
    pub fn post_end(&self, t: &Scope<'k, Thread>) {
        self.messages.post_end(t);
    }

    /// The threads that look and tell. What the first finds out about the order, it has the registers for.
    pub fn keep(&self, w: &Scope<'k, Group>, main: &Main<'k>) {
        w.one_thread_of_warp(1, |t| {
            t.repeat(|t, leave| {
                let after = self.look(t, main, 0, None);
                self.messages.pass(t, Hand::Look as usize);
                leave.when(after.eq(0));
            });
        });
        w.one_thread_of_warp(2, |t| {
            t.repeat(|t, leave| {
                self.messages.wait(t, Hand::Tell as usize);
                let [number, _, after, _] = self.messages.read(t, Hand::Tell as usize);
                leave.when(after.eq(0));
                self.last.publish(t, number, after);
                self.messages.pass(t, Hand::Tell as usize);
            });
        });
    }

    /// One thread that looks and tells: waits for the turn of the block's part of a step, lets the warps add, and tells when they
    /// have.
    pub fn take(&self, t: &Scope<'k, Thread>, main: &Main<'k>, tile: Val<'k, u32>, step: [Val<'k, u32>; 2]) {
        let [number, step] = step;
        let own = number.mul_add(self.parts, t.cluster_rank());
        let before = main.before(tile, step, None);
        t.when(before.ne(0), |t| self.last.wait_for(t, own, before));
        self.messages.post(t, [own, step, tile + 1, t.constant(0)]);
        self.messages.wait_free(t);
        self.last.publish(t, own, tile + 1);
    }

    /// Waits for the turn of a part of the next step; one more than its tile, 0 where there are no more. `until` becomes the
    /// last step of the turn.
    fn look(&self, t: &Scope<'k, Thread>, main: &Main<'k>, part: u32, until: Option<Var<'k, u32>>) -> Val<'k, u32> {
        self.messages.wait(t, Hand::Look as usize);
        let [number, step, after, batch] = self.messages.read(t, Hand::Look as usize);
        t.when(after.ne(0), |t| {
            let (tile, sequence) = (after - 1, main.sequence(t, batch));
            let last = step | (self.turn - 1);
            until.iter().for_each(|until| until.set(last.min(main.steps_of(tile, sequence)[1] - 1)));
            let before = main.before(tile, last, sequence);
            t.when(before.ne(0), |t| self.last.wait_for(t, self.word([number, step], part), before));
        });
        after
    }

    /// Where it stands who has added a part of a step's turn.
    fn word(&self, [number, step]: [Val<'k, u32>; 2], part: u32) -> Val<'k, u32> {
        let first = if self.turn == 1 { number } else { number - (step & (self.turn - 1)) };
        first * self.parts + part
    }

    /// The thread that starts the copy engine: until which step it has a turn.
    pub fn none(&self, t: &Scope<'k, Thread>) -> Var<'k, u32> {
        t.var(NONE)
    }

    /// The same, before it starts it.
    pub fn look_once(&self, t: &Scope<'k, Thread>, main: &Main<'k>, part: u32, until: Var<'k, u32>) {
        t.when(until.get().eq(NONE), |t| {
            self.look(t, main, part, Some(until));
            // What the thread has seen comes before what it has the copy engine do.
            t.publish_global();
        });
    }

    /// The same, after that: with the last step of a turn, the next tile is told.
    pub fn tell(&self, t: &Scope<'k, Thread>, part: u32, until: Var<'k, u32>) {
        self.messages.wait(t, Hand::Look as usize);
        let [number, step, after, _] = self.messages.read(t, Hand::Look as usize);
        t.when(step.eq(until.get()), |t| {
            t.wait_stores(0);
            self.last.publish(t, self.word([number, step], part), after);
            until.set(NONE);
        });
        self.messages.pass(t, Hand::Look as usize);
    }

    /// Before the additions of a step.
    pub fn wait(&self, w: &Scope<'k, Group>) {
        self.messages.wait(w, self.compute);
    }

    /// After them.
    pub fn pass(&self, w: &Scope<'k, Group>) {
        self.messages.pass_together(w, self.compute);
    }
}

impl<'k> Main<'k> {
    /// The tile at a place in the order of its head: the last goes first.
    pub(crate) fn in_turn(&self, place: Val<'k, u32>, sequence: Option<Sequence<'k>>) -> Val<'k, u32> {
        self.tiles_of_head(sequence) - 1 - place
    }

    /// One more than the tile that adds before this one, to a turn that ends with a step; 0 if there is none.
    fn before(&self, tile: Val<'k, u32>, step: Val<'k, u32>, sequence: Option<Sequence<'k>>) -> Val<'k, u32> {
        let (next, last) = (tile + 1, self.tiles_of_head(sequence) - 1);
        // Steps only move on with the tile: the next one has some of them, unless it begins later.
        let has = tile.lt(last) & self.steps_of(next.min(last), sequence)[0].le(step);
        has.select::<u32>(next + 1, 0)
    }
}
