//! A ring of messages that pass through several hands. A hand is one thread or a group of warps. The first hand writes
//! a message, the others read it and pass it on in a fixed order, and its slot is free again when the last hand has
//! passed it on.
//!
//! Each hand has one mbarrier per message, which signals the next hand. The hands' cursors live in registers that only
//! this module handles, as in the rings of tiles.

use crate::build::{Builder, Count, Group, Scope, Thread, Val, Var, Who};
use crate::inst::{Arg, Base, Class, Reg};
use crate::sync::cluster::PeerTiles;
use crate::sync::pipe::{Ring, wait_phase};
use crate::table::{mbarrier, memory};
use std::panic::Location;

/// Words of a message: the width of one shared-memory instruction.
const WORDS: usize = 4;

/// A ring of four-word messages that pass through several hands.
pub struct TokenRing<'k> {
    k: &'k Builder,
    id: usize,
    depth: u32,
    messages: u32,
    /// mbarriers by which each hand signals the next; the last hand signals the first.
    barriers: Vec<u32>,
    /// A hand whose cursor is derived from another ring's.
    behind: Option<(usize, Ring<'k>)>,
}

/// Names of the hands' cursors.
const HANDS: [&str; 4] = ["hand 0", "hand 1", "hand 2", "hand 3"];

impl Builder {
    /// A ring of `depth` messages (a power of two). `hands` gives the number of warps of each hand; 1 also stands for a
    /// single thread. The first hand writes the messages.
    #[track_caller]
    pub fn token_ring(&self, name: &str, depth: u32, hands: &[u32]) -> TokenRing<'_> {
        if !depth.is_power_of_two() || !(2..=HANDS.len()).contains(&hands.len()) {
            self.refuse(format!(
                "token ring `{name}` has {depth} messages and {} hands, allowed: a power of two, and 2 to {}",
                hands.len(),
                HANDS.len()
            ));
        }
        let id = self.new_pipe(name, 1);
        self.pipe_filled(id);
        let messages = self.take_small(name, 4 * WORDS as u32 * depth, 16);
        let bars = |(i, &warps)| self.mbarriers(&format!("{name}.{i}"), depth, Count::Fixed(warps));
        TokenRing { k: self, id, depth, messages, barriers: hands.iter().enumerate().map(bars).collect(), behind: None }
    }
}

impl<'k> TokenRing<'k> {
    /// In a ring of one message: derives the cursor of `hand` from a one-stage `leader`, which saves a register. The
    /// hand handles one message per stage of the leader. It does so after it is done with that stage, and before it is
    /// done with the next one.
    #[track_caller]
    pub fn behind(self, hand: usize, leader: &PeerTiles<'k>) -> Self {
        let ring = *leader.ring();
        if self.depth != 1 || ring.depth() != 1 {
            let (own, other) = (self.depth, ring.depth());
            self.k.refuse(format!(
                "a token ring of {own} messages behind peer tiles of {other} stages, allowed: 1 and 1"
            ));
        }
        TokenRing { behind: Some((hand, ring)), ..self }
    }

    /// The index of the hand's next message. Its low bits select the slot, the next bit is the parity.
    #[track_caller]
    fn number(&self, hand: usize) -> Val<'k, u32> {
        match &self.behind {
            // The index is one less than the number of stages that the hand is done with; only its parity matters.
            Some((of, ring)) if *of == hand => ring.cursor("take")[1].now() ^ 1,
            _ => self.cursor(hand).now(),
        }
    }

    #[track_caller]
    fn cursor(&self, hand: usize) -> Var<'k, u32> {
        // The first hand finds all slots free: the phase of parity 1 of a fresh mbarrier counts as complete.
        let start = if hand == 0 { self.depth } else { 0 };
        self.k.cursor(self.id, HANDS[hand], [start, 0])[0]
    }

    #[track_caller]
    fn barrier(&self, of: usize, number: Val<'k, u32>) -> Val<'k, u32> {
        (number & (self.depth - 1)).mul_add(8, self.k.shared_address(self.barriers[of]))
    }

    #[track_caller]
    fn place(&self, number: Val<'k, u32>) -> Arg {
        let start = self.k.shared_address(self.messages);
        Arg::Address(Base::Reg((number & (self.depth - 1)).mul_add(4 * WORDS as u32, start).in_register()), 0)
    }

    /// Waits until the previous hand has passed on the next message.
    #[track_caller]
    fn wait_in(&self, hand: usize) {
        let number = self.number(hand);
        let before = (hand + self.barriers.len() - 1) % self.barriers.len();
        let parity = (number / self.depth) & 1;
        wait_phase(self.k, self.barrier(before, number), parity);
    }

    #[track_caller]
    fn tell_from(&self, hand: usize) {
        let number = self.number(hand);
        let bar = Arg::Address(Base::Reg(self.barrier(hand, number).in_register()), 0);
        self.k.emit(&mbarrier::ARRIVE, [bar]);
    }

    #[track_caller]
    fn advance(&self, hand: usize) {
        if self.behind.as_ref().is_some_and(|(of, _)| *of == hand) {
            return;
        }
        let number = self.cursor(hand);
        number.set(number.now() + 1);
    }

    /// First hand: waits for a free slot, before the message is known.
    #[track_caller]
    pub fn wait_free(&self, _: &Scope<'k, Thread>) {
        self.wait_in(0);
    }

    /// First hand: waits for a free slot and writes a message.
    #[track_caller]
    pub fn post(&self, _: &Scope<'k, Thread>, message: [Val<'k, u32>; WORDS]) {
        self.wait_in(0);
        let registers = || message.iter().map(|x| x.in_register()).collect::<Vec<Reg>>();
        let regs = self.k.placed(Location::caller(), registers);
        let place = self.place(self.number(0));
        self.k.emit(&memory::ST_SHARED_32, [place, Arg::List(regs.into()), Arg::Word(".v4")]);
        self.tell_from(0);
        self.advance(0);
    }

    /// First hand: posts a message of zeros, which tells the other hands that no more will come.
    #[track_caller]
    pub fn post_end(&self, t: &Scope<'k, Thread>) {
        self.post(t, [0; WORDS].map(|n| t.constant(n)));
    }

    /// Waits until the next message reaches this hand. The hand owns it until it passes it on.
    #[track_caller]
    pub fn wait<W: Who>(&self, _: &Scope<'k, W>, hand: usize) {
        self.wait_in(hand);
    }

    /// Reads the message that was waited for.
    #[track_caller]
    pub fn read<W: Who>(&self, _: &Scope<'k, W>, hand: usize) -> [Val<'k, u32>; WORDS] {
        let regs: [Reg; WORDS] = std::array::from_fn(|_| self.k.register(Class::B32));
        let place = self.place(self.number(hand));
        self.k.emit(&memory::LD_SHARED_32, [Arg::List(regs.into()), place, Arg::Word(".v4")]);
        regs.map(|reg| Val::reg(self.k, reg))
    }

    /// Passes the message on, from a hand of one thread.
    #[track_caller]
    pub fn pass(&self, _: &Scope<'k, Thread>, hand: usize) {
        self.k.pipe_emptied(self.id);
        self.tell_from(hand);
        self.advance(hand);
    }

    /// Passes the message on, from a hand of warps. Their earlier writes are visible to the next hand.
    #[track_caller]
    pub fn pass_together(&self, w: &Scope<'k, Group>, hand: usize) {
        self.k.pipe_emptied(self.id);
        w.sync_warp();
        w.when(w.lane().eq(0), |_| self.tell_from(hand));
        self.advance(hand);
    }
}
