//! The interface of a service around d_q: code for the load thread, for the service's own threads and for the compute
//! role, and the signals between them.
//!
//! Every wait and every signal goes through [`Flags`] or [`Ring`], which write it down in the kernel's [`Log`]. The table in
//! the [module's header](crate::attention::backward::d_q) is compared with that log.

use crate::attention::backward::tiles::{Step, TileMap, Work};
use fulgurite_ptx::{Group, IntoVal, Pointer, Scope, Thread, TokenRing, Val, Var, Who};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;

/// A service of the main kernel. Its constructor declares its parameters and shared memory.
pub(crate) trait Service<'k> {
    /// Its one-thread jobs on warps of the load role.
    fn jobs(&self) -> Vec<Job> {
        Vec::new()
    }

    /// Whether a tile may wait for tiles with lower numbers. If so, the load thread draws even its first tile from the counter.
    fn waits_for_tiles(&self) -> bool {
        false
    }

    /// Load thread: before the loads of the tile or run that was handed out as `number`.
    fn on_tile(&self, _: &Scope<'k, Thread>, _: &TileMap<'k>, _number: Var<'k, u32>, _: &Work<'k>) {}

    /// Load thread: after the loads of a step.
    fn on_step(&self, _: &Scope<'k, Thread>, _: &TileMap<'k>, _: &Work<'k>, _: &Step<'k>) {}

    /// Load thread: after the last tile.
    fn on_end(&self, _: &Scope<'k, Thread>) {}

    /// Job thread: runs the job of this service on `warp`.
    fn on_warp(&self, _: &Scope<'k, Thread>, _: &TileMap<'k>, _warp: u32) {}

    /// Compute role: before a warpgroup's threads add the d_q of a step.
    fn before_add(&self, _: &Scope<'k, Group>) {}

    /// Compute role: after a warpgroup's threads have added the d_q of a step.
    fn after_add(&self, _: &Scope<'k, Group>) {}
}

/// A job that one thread of a warp of the load role does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Job {
    pub service: &'static str,
    pub warp: u32,
    /// The service whose job on the same warp ends before this one begins.
    pub after: Option<&'static str>,
}

impl Job {
    pub fn new(service: &'static str, warp: u32) -> Job {
        Job { service, warp, after: None }
    }

    /// This job, to run after another service's job on the same warp.
    pub fn after(self, service: &'static str) -> Job {
        Job { after: Some(service), ..self }
    }
}

/// Jobs in an order in which each comes after the job it waits for. Refuses two jobs on one warp that are not declared to be
/// sequential.
pub(crate) fn in_sequence<T>(jobs: Vec<(Job, T)>) -> Result<Vec<(Job, T)>, String> {
    let mut left = jobs;
    let mut sequence: Vec<(Job, T)> = Vec::new();
    while !left.is_empty() {
        let done = |job: &Job| match job.after {
            Some(after) => sequence.iter().any(|(other, _)| other.service == after && other.warp == job.warp),
            None => true,
        };
        let Some(next) = left.iter().position(|(job, _)| done(job)) else {
            return Err(format!("{:?} comes after a job that does not exist", left[0].0));
        };
        let (job, run) = left.remove(next);
        let before = sequence.iter().rev().find(|(other, _)| other.warp == job.warp);
        if let Some((other, _)) = before
            && job.after != Some(other.service)
        {
            return Err(format!("{} and {} both have warp {}", other.service, job.service, job.warp));
        }
        sequence.push((job, run));
    }
    Ok(sequence)
}

/// A thread of the main kernel, as the log knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    /// One thread of a warp of the load role.
    Load(u32),
    /// The compute role.
    Compute,
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Actor::Load(warp) => write!(f, "load, warp {warp}"),
            Actor::Compute => write!(f, "compute"),
        }
    }
}

/// Events that a thread waits for, and events that it signals.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Signals {
    pub waits: BTreeSet<&'static str>,
    pub signals: BTreeSet<&'static str>,
}

/// The events that the code of a kernel waits for and signals, by service and thread.
pub(crate) type SignalTable = BTreeMap<(&'static str, Actor), Signals>;

/// Waits and signals of a kernel under construction.
#[derive(Debug)]
pub(crate) struct Log {
    actor: Cell<Actor>,
    rows: RefCell<SignalTable>,
}

impl Log {
    pub fn new() -> Rc<Log> {
        Rc::new(Log { actor: Cell::new(Actor::Load(0)), rows: RefCell::default() })
    }

    /// Says which thread executes the code that is built next.
    pub fn enter(&self, actor: Actor) {
        self.actor.set(actor);
    }

    /// Logs that a service has code on the current thread.
    pub fn acts(&self, service: &'static str) {
        self.rows.borrow_mut().entry((service, self.actor.get())).or_default();
    }

    /// Logs that the current thread waits for an event of a service.
    pub fn waits(&self, service: &'static str, event: &'static str) {
        self.rows.borrow_mut().entry((service, self.actor.get())).or_default().waits.insert(event);
    }

    /// Logs that the current thread signals an event of a service.
    pub fn signals(&self, service: &'static str, event: &'static str) {
        self.rows.borrow_mut().entry((service, self.actor.get())).or_default().signals.insert(event);
    }

    /// The complete log.
    #[cfg(test)]
    pub fn rows(&self) -> SignalTable {
        self.rows.borrow().clone()
    }
}

/// Words in global memory by which CTAs signal an event of a service to each other.
#[derive(Clone)]
pub(crate) struct Flags<'k> {
    words: Pointer<'k, u32>,
    service: &'static str,
    event: &'static str,
    log: Rc<Log>,
}

impl<'k> Flags<'k> {
    pub fn new(words: Pointer<'k, u32>, service: &'static str, event: &'static str, log: &Rc<Log>) -> Self {
        Flags { words, service, event, log: log.clone() }
    }

    /// The words that start at an index.
    #[track_caller]
    pub fn at(&self, index: Val<'k, u32>) -> Self {
        Flags { words: self.words.at(index), ..self.clone() }
    }

    /// Waits until a word has this value.
    #[track_caller]
    pub fn wait_for(&self, t: &Scope<'k, Thread>, index: impl IntoVal<'k, u32>, value: Val<'k, u32>) {
        self.log.waits(self.service, self.event);
        self.words.wait_for(t, index, value);
    }

    /// Sets a word after all that the thread has done before.
    #[track_caller]
    pub fn publish(&self, t: &Scope<'k, Thread>, index: impl IntoVal<'k, u32>, value: Val<'k, u32>) {
        self.log.signals(self.service, self.event);
        self.words.publish(t, index, value);
    }

    /// Adds to a word after all that the thread has done before.
    #[track_caller]
    pub fn add(&self, t: &Scope<'k, Thread>, index: impl IntoVal<'k, u32>, by: impl IntoVal<'k, u32>) {
        self.log.signals(self.service, self.event);
        self.words.fetch_add_in_order(t, index, by);
    }

    /// Logs that the current thread adds to words that another thread gave it.
    pub fn log_signal(&self) {
        self.log.signals(self.service, self.event);
    }

    /// The words, for a thread that adds to them later.
    pub fn words(&self) -> Pointer<'k, u32> {
        self.words
    }
}

/// A ring of messages in shared memory. Each visits a fixed list of participants (hands); each hand signals the next when done.
pub(crate) struct Ring<'k> {
    ring: TokenRing<'k>,
    service: &'static str,
    /// The event that each hand signals.
    events: &'static [&'static str],
    log: Rc<Log>,
}

impl<'k> Ring<'k> {
    pub fn new(ring: TokenRing<'k>, service: &'static str, events: &'static [&'static str], log: &Rc<Log>) -> Self {
        Ring { ring, service, events, log: log.clone() }
    }

    /// Another ring with the same log.
    pub fn map(self, f: impl FnOnce(TokenRing<'k>) -> TokenRing<'k>) -> Self {
        Ring { ring: f(self.ring), ..self }
    }

    fn log_wait(&self, hand: usize) {
        let before = (hand + self.events.len() - 1) % self.events.len();
        self.log.waits(self.service, self.events[before]);
    }

    fn log_signal(&self, hand: usize) {
        self.log.signals(self.service, self.events[hand]);
    }

    /// The first hand: waits for a free place.
    #[track_caller]
    pub fn wait_free(&self, t: &Scope<'k, Thread>) {
        self.log_wait(0);
        self.ring.wait_free(t);
    }

    /// The first hand: waits for a free place and writes a message.
    #[track_caller]
    pub fn post(&self, t: &Scope<'k, Thread>, message: [Val<'k, u32>; 4]) {
        self.log_wait(0);
        self.log_signal(0);
        self.ring.post(t, message);
    }

    /// The first hand: says that no more messages come.
    #[track_caller]
    pub fn post_end(&self, t: &Scope<'k, Thread>) {
        self.log_wait(0);
        self.log_signal(0);
        self.ring.post_end(t);
    }

    /// Waits until the next message has come to a hand.
    #[track_caller]
    pub fn wait<W: Who>(&self, w: &Scope<'k, W>, hand: usize) {
        self.log_wait(hand);
        self.ring.wait(w, hand);
    }

    /// The message that a hand has waited for.
    #[track_caller]
    pub fn read<W: Who>(&self, w: &Scope<'k, W>, hand: usize) -> [Val<'k, u32>; 4] {
        self.ring.read(w, hand)
    }

    /// A hand of one thread passes the message on.
    #[track_caller]
    pub fn pass(&self, t: &Scope<'k, Thread>, hand: usize) {
        self.log_signal(hand);
        self.ring.pass(t, hand);
    }

    /// A hand of several warps passes the message on.
    #[track_caller]
    pub fn pass_together(&self, w: &Scope<'k, Group>, hand: usize) {
        self.log_signal(hand);
        self.ring.pass_together(w, hand);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(jobs: &[Job]) -> Result<Vec<&'static str>, String> {
        let jobs = jobs.iter().map(|job| (*job, ())).collect();
        in_sequence(jobs).map(|jobs| jobs.into_iter().map(|(job, ())| job.service).collect())
    }

    #[test]
    fn jobs_on_one_warp_must_be_declared_sequential() {
        let (load, zeros, round) = (Job::new("load", 0), Job::new("zeros", 1), Job::new("round", 1));
        assert_eq!(sequence(&[load, round.after("zeros"), zeros]), Ok(vec!["load", "zeros", "round"]));
        assert_eq!(sequence(&[load, zeros, round]), Err("zeros and round both have warp 1".into()));
        assert!(sequence(&[load, round.after("zeros")]).unwrap_err().contains("does not exist"));
        assert!(sequence(&[round.after("round")]).is_err());
        let third = Job::new("third", 1).after("zeros");
        assert_eq!(sequence(&[zeros, round.after("zeros"), third]), Err("round and third both have warp 1".into()));
    }
}
