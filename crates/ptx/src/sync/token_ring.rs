//! A ring of messages that go from hand to hand: each is written by one thread, read and passed on by others in a fixed
//! order, and its place is free again when the last has passed it on.
//!
//! Each hand has an mbarrier for each message, which tells the next one. Where a hand stands in the ring lives in registers
//! that only this module knows, as in the rings of tiles.

use crate::build::{Builder, Count, Group, Scope, Thread, Val, Var, Who};
use crate::inst::{Arg, Base, Class, Reg};
use crate::sync::cluster::PeerTiles;
use crate::sync::pipe::{Ring, wait_phase};
use crate::table::{mbarrier, memory};
use std::panic::Location;

/// Numbers of a message: what one instruction moves.
const WORDS: usize = 4;

/// A ring of messages of four numbers that go through several hands.
pub struct TokenRing<'k> {
    k: &'k Builder,
    id: usize,
    depth: u32,
    messages: u32,
    /// The barriers by which each hand tells the next; the last tells the first.
    told: Vec<u32>,
    /// A hand that stands where it stands in a ring.
    behind: Option<(usize, Ring<'k>)>,
}

/// Names of the hands' places in the ring.
const HANDS: [&str; 4] = ["hand 0", "hand 1", "hand 2", "hand 3"];

impl Builder {
    /// A ring of `depth` messages (a power of two) that go through as many hands as there are numbers: so many warps
    /// have each in hand, 1 also standing for one thread. The first writes them.
    #[track_caller]
    pub fn relay(&self, name: &str, depth: u32, hands: &[u32]) -> TokenRing<'_> {
        if !depth.is_power_of_two() || !(2..=HANDS.len()).contains(&hands.len()) {
            self.refuse(format!(
                "relay `{name}` has {depth} messages and {} hands, allowed: a power of two, and 2 to {}",
                hands.len(),
                HANDS.len()
            ));
        }
        let id = self.new_pipe(name, 1);
        self.pipe_filled(id);
        let messages = self.take_small(name, 4 * WORDS as u32 * depth, 16);
        let bars = |(i, &warps)| self.mbarriers(&format!("{name}.{i}"), depth, Count::Fixed(warps));
        TokenRing { k: self, id, depth, messages, told: hands.iter().enumerate().map(bars).collect(), behind: None }
    }
}

impl<'k> TokenRing<'k> {
    /// In a relay of one message: a hand has one for each place of an exchange of one place, when it is done with the place, and
    /// passes it on before it is done with the next. Where it stands then takes no register.
    #[track_caller]
    pub fn behind(self, hand: usize, leader: &PeerTiles<'k>) -> Self {
        let ring = *leader.ring();
        if self.depth != 1 || ring.depth() != 1 {
            let (own, other) = (self.depth, ring.depth());
            self.k.refuse(format!("a relay of {own} messages behind an exchange of {other} places, allowed: 1 and 1"));
        }
        TokenRing { behind: Some((hand, ring)), ..self }
    }

    /// Where a hand stands: the number of its message, of which the lowest bits are the place and the next is the parity.
    #[track_caller]
    fn number(&self, hand: usize) -> Val<'k, u32> {
        match &self.behind {
            // One less than the places it is done with, of which the parity counts.
            Some((of, ring)) if *of == hand => ring.cursor("take")[1].now() ^ 1,
            _ => self.cursor(hand).now(),
        }
    }

    #[track_caller]
    fn cursor(&self, hand: usize) -> Var<'k, u32> {
        // The first finds all places free: a fresh barrier's phase of parity 1 counts as over.
        let start = if hand == 0 { self.depth } else { 0 };
        self.k.cursor(self.id, HANDS[hand], [start, 0])[0]
    }

    #[track_caller]
    fn barrier(&self, of: usize, number: Val<'k, u32>) -> Val<'k, u32> {
        (number & (self.depth - 1)).mul_add(8, self.k.shared_address(self.told[of]))
    }

    #[track_caller]
    fn place(&self, number: Val<'k, u32>) -> Arg {
        let start = self.k.shared_address(self.messages);
        Arg::Address(Base::Reg((number & (self.depth - 1)).mul_add(4 * WORDS as u32, start).in_register()), 0)
    }

    /// Waits until the next message has come to this hand.
    #[track_caller]
    fn wait_in(&self, hand: usize) {
        let number = self.number(hand);
        let before = (hand + self.told.len() - 1) % self.told.len();
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

    /// The first hand: waits for a free place, before it knows what to write there.
    #[track_caller]
    pub fn wait_free(&self, _: &Scope<'k, Thread>) {
        self.wait_in(0);
    }

    /// The first hand: waits for a free place, and writes a message.
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

    /// The first hand: a message of zeros, by which others know that no more will come.
    #[track_caller]
    pub fn post_end(&self, t: &Scope<'k, Thread>) {
        self.post(t, [0; WORDS].map(|n| t.constant(n)));
    }

    /// Waits until the next message has come to this hand, whose it is until it is passed on.
    #[track_caller]
    pub fn wait<W: Who>(&self, _: &Scope<'k, W>, hand: usize) {
        self.wait_in(hand);
    }

    /// The message that was waited for.
    #[track_caller]
    pub fn read<W: Who>(&self, _: &Scope<'k, W>, hand: usize) -> [Val<'k, u32>; WORDS] {
        let regs: [Reg; WORDS] = std::array::from_fn(|_| self.k.register(Class::B32));
        let place = self.place(self.number(hand));
        self.k.emit(&memory::LD_SHARED_32, [Arg::List(regs.into()), place, Arg::Word(".v4")]);
        regs.map(|reg| Val::reg(self.k, reg))
    }

    /// A hand of one thread passes the message on.
    #[track_caller]
    pub fn pass(&self, _: &Scope<'k, Thread>, hand: usize) {
        self.k.pipe_emptied(self.id);
        self.tell_from(hand);
        self.advance(hand);
    }

    /// A hand of warps passes the message on: what they did before can be seen by the next.
    #[track_caller]
    pub fn pass_together(&self, w: &Scope<'k, Group>, hand: usize) {
        self.k.pipe_emptied(self.id);
        w.sync_warp();
        w.when(w.lane().eq(0), |_| self.tell_from(hand));
        self.advance(hand);
    }
}
