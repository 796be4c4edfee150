//! A fixed order of additions to d_q (deterministic mode): every step of queries accepts key tiles in the order in which they
//! are handed out. A tile adds when the tile before it has added.
//!
//! No compute thread polls memory. The path by which the turn of a step reaches the adding warps depends on the adder:
//! - Threads add: a message goes from the load thread to a thread that waits for the turn, to the warps that add, and to a
//!   thread that signals the next tile when their additions have arrived.
//! - TMA adds: the thread that starts it for a warpgroup waits and signals. Both take longer than a short step, so
//!   a turn has several steps.
//! - CTA pairs: a single thread per CTA waits, lets the warps add, and signals, for its half of the columns.
//!
//! Tiles wait for tiles with lower numbers, and a CTA does its tiles in that order. So the lowest tile that is not done can
//! always go on. Tiles of the last keys go first, so that tiles seldom wait. Under a causal mask they start at later steps, so
//! tiles that start together reach a given step in the required order. Without a mask a tile waits only at its first step;
//! it then stays behind its predecessor.

use crate::attention::backward::d_q::service::{Flags, Job, Log, Ring, Service};
use crate::attention::backward::tiles::{Sequence, Step, TileMap, Work};
use crate::attention::backward::{Adds, BackwardConfig, Share};
use crate::params::{Lens, Params, given};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Group, PeerTiles, Scope, Thread, Val, Var};
use std::rc::Rc;

/// Messages in flight: half for steps that are loaded ahead, half for steps whose additions are still arriving.
const DEPTH: u32 = 4;

/// Marks that the thread that starts TMA has no turn.
const NONE: u32 = u32::MAX;

/// Parts of a step that have turns of their own: one for each warpgroup that has TMA add, or each CTA of a pair.
pub(crate) fn parts(config: &BackwardConfig) -> u32 {
    Adder::of(config).parts
}

/// The unit that adds d_q in turns: the threads that take part, and what they tell each other.
struct Adder {
    /// The service's name in the table.
    service: &'static str,
    /// Parts of a step that have turns of their own.
    parts: u32,
    /// Steps of a turn, a power of two; a turn starts at a multiple of it. A tile waits before its first step of a turn and
    /// signals after its last.
    turn: u32,
    /// Messages in flight.
    depth: u32,
    /// For each hand: the number of threads or warps that share its job. Hands are, in order, the thread that posts, the one
    /// that waits for the turn, the eight warps that compute, and the thread that signals; pairs and TMA have
    /// fewer.
    hands: Vec<u32>,
    /// The event of each hand, for the table.
    events: &'static [&'static str],
    /// The hand of the warps that compute; `None` if they take no part.
    compute: Option<usize>,
    /// Warps of the load role that wait for turns and signal.
    warps: &'static [u32],
    /// Whether the loading thread posts each step. Otherwise the thread that takes turns knows the steps.
    posts: bool,
}

impl Adder {
    fn of(config: &BackwardConfig) -> Adder {
        match (config.adds, config.share) {
            // The threads that start TMA take part in turns (`bulk_reduce`).
            (Adds::CopyEngine, _) => Adder {
                service: "ordered (bulk)",
                parts: 2,
                turn: config.turn,
                depth: DEPTH,
                hands: vec![1, 2],
                events: &["step posted", "message free"],
                compute: None,
                warps: &[],
                posts: true,
            },
            // The thread reads tiles that another finds, so the load role has its job (`load`).
            (Adds::Threads, Share::Pairs) => Adder {
                service: "ordered (pairs)",
                parts: 2,
                turn: 1,
                depth: 1,
                hands: vec![1, 8],
                events: &["turn has come", "step added"],
                compute: Some(PAIR_COMPUTE),
                warps: &[],
                posts: false,
            },
            (Adds::Threads, _) => Adder {
                service: "ordered (threads)",
                parts: 1,
                turn: 1,
                depth: DEPTH,
                hands: vec![1, 1, 8, 1],
                events: &["step posted", "turn has come", "step added", "message free"],
                compute: Some(COMPUTE),
                warps: &[1, 2],
                posts: true,
            },
        }
    }
}

/// A message passes through the hands of several threads, one after the other. Hand 0 posts it: the load thread, except with
/// CTA pairs.
const WAIT: usize = 1;
const COMPUTE: usize = 2;
const SIGNAL: usize = 3;
/// With CTA pairs one thread posts, and the warps that compute are the next hand.
const PAIR_COMPUTE: usize = 1;

/// Arguments of [`Ordered`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Args {
    pub last: Span,
}

/// Turns of tiles.
pub(crate) struct Ordered<'k> {
    adder: Adder,
    /// For the first step of each turn of each head, or each part of it: one more than the tile that added last.
    turns: Flags<'k>,
    messages: Ring<'k>,
}

impl<'k> Ordered<'k> {
    /// Declares the parameter and shared memory.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        args: impl Lens<C, Option<Args>>,
        config: &BackwardConfig,
        log: &Rc<Log>,
    ) -> Self {
        let adder = Adder::of(config);
        let ring = p.builder().token_ring("turns", adder.depth, &adder.hands);
        let words = p.array("turns", move |call| given(args(call)).last);
        let turns = Flags::new(words, adder.service, "tile before has added", log);
        let messages = Ring::new(ring, adder.service, adder.events, log);
        Ordered { adder, turns, messages }
    }

    /// The service's name in the table.
    pub fn name(&self) -> &'static str {
        self.adder.service
    }

    /// With CTA pairs: warps that compute add a step when they are done with the d_z it comes from.
    pub fn behind(self, d_z: &PeerTiles<'k>) -> Self {
        let compute = self.adder.compute.expect("bug in fulgurite: the warps of a CTA pair add");
        Ordered { messages: self.messages.map(|ring| ring.behind(compute, d_z)), ..self }
    }

    /// CTA pairs, one thread of the load role: waits for the turn of the CTA's part of a step, lets the warps add, and signals.
    pub fn take(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, work: &Work<'k>, step: [Val<'k, u32>; 2]) {
        let ([number, step], tile) = (step, work.tile);
        let own = number.mul_add(self.adder.parts, t.cluster_rank());
        let before = tile_before(map, tile, step, work.sequence);
        t.when(before.ne(0), |t| self.turns.wait_for(t, own, before));
        self.messages.post(t, [own, step, tile + 1, t.constant(0)]);
        self.messages.wait_free(t);
        self.turns.publish(t, own, tile + 1);
    }

    /// Waits for the turn of a part of the next step. Returns one more than its tile, or 0 after the last step. `until` becomes
    /// the last step of the turn.
    fn wait_for_turn(
        &self,
        t: &Scope<'k, Thread>,
        map: &TileMap<'k>,
        part: u32,
        until: Option<Var<'k, u32>>,
    ) -> Val<'k, u32> {
        self.messages.wait(t, WAIT);
        let [number, step, tile_and_1, batch] = self.messages.read(t, WAIT);
        t.when(tile_and_1.ne(0), |t| {
            let (tile, sequence) = (tile_and_1 - 1, map.sequence(t, batch));
            let turn_end = step | (self.adder.turn - 1);
            until.iter().for_each(|until| until.set(turn_end.min(map.steps_of(tile, sequence)[1] - 1)));
            let before = tile_before(map, tile, turn_end, sequence);
            t.when(before.ne(0), |t| self.turns.wait_for(t, self.word([number, step], part), before));
        });
        tile_and_1
    }

    /// The word of a part of a step's turn.
    fn word(&self, [number, step]: [Val<'k, u32>; 2], part: u32) -> Val<'k, u32> {
        let first = if self.adder.turn == 1 { number } else { number - (step & (self.adder.turn - 1)) };
        first * self.adder.parts + part
    }

    /// TMA: a variable for the last step of the current turn. It starts as `NONE`: no turn.
    pub fn no_turn(&self, t: &Scope<'k, Thread>) -> Var<'k, u32> {
        t.var(NONE)
    }

    /// TMA: before the thread starts it, waits for a turn unless it has one.
    pub fn before_bulk(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, part: u32, until: Var<'k, u32>) {
        t.when(until.get().eq(NONE), |t| {
            self.wait_for_turn(t, map, part, Some(until));
            // TMA must see what the thread has seen.
            t.publish_global();
        });
    }

    /// TMA: after the thread has started it, signals the next tile if that was the last step of the turn.
    pub fn after_bulk(&self, t: &Scope<'k, Thread>, part: u32, until: Var<'k, u32>) {
        self.messages.wait(t, WAIT);
        let [number, step, tile_and_1, _] = self.messages.read(t, WAIT);
        t.when(step.eq(until.get()), |t| {
            t.wait_stores(0);
            self.turns.publish(t, self.word([number, step], part), tile_and_1);
            until.set(NONE);
        });
        self.messages.pass(t, WAIT);
    }
}

impl<'k> Service<'k> for Ordered<'k> {
    fn jobs(&self) -> Vec<Job> {
        self.adder.warps.iter().map(|warp| Job::new(self.adder.service, *warp)).collect()
    }

    fn waits_for_tiles(&self) -> bool {
        true
    }

    fn on_step(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, work: &Work<'k>, step: &Step<'k>) {
        if self.adder.posts {
            let number = map.number(work, step);
            self.messages.post(t, [number, step.step, work.tile + 1, work.batch]);
        }
    }

    fn on_end(&self, t: &Scope<'k, Thread>) {
        if self.adder.posts {
            self.messages.post_end(t);
        }
    }

    fn on_warp(&self, t: &Scope<'k, Thread>, map: &TileMap<'k>, warp: u32) {
        // The first thread waits: it has the registers to find the tile before.
        if warp == 1 {
            return t.repeat(|t, leave| {
                let tile_and_1 = self.wait_for_turn(t, map, 0, None);
                self.messages.pass(t, WAIT);
                leave.when(tile_and_1.eq(0));
            });
        }
        t.repeat(|t, leave| {
            self.messages.wait(t, SIGNAL);
            let [number, _, tile_and_1, _] = self.messages.read(t, SIGNAL);
            leave.when(tile_and_1.eq(0));
            self.turns.publish(t, number, tile_and_1);
            self.messages.pass(t, SIGNAL);
        });
    }

    fn before_add(&self, w: &Scope<'k, Group>) {
        if let Some(compute) = self.adder.compute {
            self.messages.wait(w, compute);
        }
    }

    fn after_add(&self, w: &Scope<'k, Group>) {
        if let Some(compute) = self.adder.compute {
            self.messages.pass_together(w, compute);
        }
    }
}

/// One more than the tile that adds before this one to a turn that ends with a step; 0 if there is none.
fn tile_before<'k>(map: &TileMap<'k>, tile: Val<'k, u32>, step: Val<'k, u32>, sequence: Sequence<'k>) -> Val<'k, u32> {
    let (before, last_tile) = (tile + 1, map.tiles_of_head(sequence) - 1);
    // Tiles add in descending order, so `tile + 1` adds just before `tile`, unless a mask lets it start after this turn.
    let has = tile.lt(last_tile) & map.steps_of(before.min(last_tile), sequence)[0].le(step);
    has.select::<u32>(before + 1, 0)
}
