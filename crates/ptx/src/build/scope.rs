//! Scopes: the threads that execute a part of a kernel.
//!
//! Operations of a single thread (starting copies), of a warpgroup (products) and of any thread are methods of
//! different scopes, so a wrong call does not compile.

use super::value::{Brand, Half, IntoVal, Pair, Val, Var, Word};
use super::{Builder, WARPGROUP};
use crate::inst::{Arg, Class, Inst, Reg};
use crate::kernel::Stmt;
use crate::table::{convert, sync, tensor, warp};
use std::marker::PhantomData;
use std::panic::Location;

/// The threads that a scope stands for.
pub trait Who: 'static {}
/// All threads of a CTA.
pub enum Cta {}
/// All threads of a role of whole warpgroups.
pub enum Group {}
/// All threads of a role of any number of warps.
pub enum WarpRole {}
/// A single thread.
pub enum Thread {}
impl Who for Cta {}
impl Who for Group {}
impl Who for WarpRole {}
impl Who for Thread {}

/// Scopes in which all lanes of each warp are active.
pub trait WholeWarps: Who {}
impl WholeWarps for Cta {}
impl WholeWarps for Group {}
impl WholeWarps for WarpRole {}

/// A place in the kernel under construction, and the threads that execute it.
pub struct Scope<'k, W: Who> {
    pub(crate) k: &'k Builder,
    who: PhantomData<W>,
    brand: Brand<'k>,
}

impl<'k, W: Who> Scope<'k, W> {
    pub(crate) fn new(k: &'k Builder) -> Self {
        Scope { k, who: PhantomData, brand: PhantomData }
    }

    #[track_caller]
    fn special(&self, name: &'static str) -> Val<'k, u32> {
        let (d, value) = Val::fresh(self.k);
        self.k.emit(&convert::SPECIAL, [d, Arg::Word(name)]);
        value
    }
    /// Index of the thread in the CTA.
    #[track_caller]
    pub fn thread(&self) -> Val<'k, u32> {
        self.special("%tid.x")
    }
    /// Index of the lane in the warp.
    #[track_caller]
    pub fn lane(&self) -> Val<'k, u32> {
        self.thread() & 31
    }
    /// Index of the CTA in the grid.
    #[track_caller]
    pub fn cta(&self) -> Val<'k, u32> {
        self.special("%ctaid.x")
    }
    /// Number of CTAs in the grid.
    #[track_caller]
    pub fn ctas(&self) -> Val<'k, u32> {
        self.special("%nctaid.x")
    }
    /// Index of the CTA in its cluster.
    #[track_caller]
    pub fn cluster_rank(&self) -> Val<'k, u32> {
        match self.k.cluster_blocks() {
            1 => 0.into_val(self.k),
            _ => {
                let (d, value) = Val::fresh(self.k);
                self.k.emit(&convert::SPECIAL_CLUSTER, [d, Arg::Word("%cluster_ctarank")]);
                value
            }
        }
    }
    /// Index of the cluster in the grid.
    #[track_caller]
    pub fn cluster(&self) -> Val<'k, u32> {
        match self.k.cluster_blocks() {
            1 => self.cta(),
            n => self.cta() / n,
        }
    }
    /// Number of clusters in the grid.
    #[track_caller]
    pub fn clusters(&self) -> Val<'k, u32> {
        match self.k.cluster_blocks() {
            1 => self.ctas(),
            n => self.ctas() / n,
        }
    }

    /// A constant as a value.
    pub fn constant<T: Word>(&self, x: T) -> Val<'k, T> {
        x.into_val(self.k)
    }
    /// A mutable register, initialised with `start`.
    #[track_caller]
    pub fn var<T: Word>(&self, start: impl IntoVal<'k, T>) -> Var<'k, T> {
        Var::new(self.k, start)
    }

    /// Executes `then` where `cond` holds.
    #[track_caller]
    pub fn when(&self, cond: Val<'k, bool>, then: impl FnOnce(&Self)) {
        self.branch(cond, then, |_| {}, false);
    }
    /// Executes `then` where `cond` holds, and places the code out of line because that is rare.
    #[track_caller]
    pub fn when_rarely(&self, cond: Val<'k, bool>, then: impl FnOnce(&Self)) {
        self.branch(cond, then, |_| {}, true);
    }
    /// Executes `then` where `cond` holds, and `otherwise` elsewhere.
    #[track_caller]
    pub fn choose(&self, cond: Val<'k, bool>, then: impl FnOnce(&Self), otherwise: impl FnOnce(&Self)) {
        self.branch(cond, then, otherwise, false);
    }
    #[track_caller]
    fn branch(&self, cond: Val<'k, bool>, then: impl FnOnce(&Self), otherwise: impl FnOnce(&Self), cold: bool) {
        let at = Location::caller();
        match cond.constant() {
            Some(1) => then(self),
            Some(_) => otherwise(self),
            None => {
                let cond = cond.in_register();
                let then = self.k.block(|| then(self));
                let otherwise = self.k.block(|| otherwise(self));
                self.k.push(Stmt::If { cond, then, otherwise, cold, at });
            }
        }
    }

    /// Repeats `f` while the predicate that it returns holds.
    #[track_caller]
    pub fn repeat_while(&self, f: impl FnOnce(&Self) -> Val<'k, bool>) {
        let at = Location::caller();
        let body = self.k.block(|| {
            let cond = f(self);
            let cond = self.k.placed(at, || cond.in_register());
            self.k.push(Stmt::Break { cond, when: false, at });
        });
        self.k.push(Stmt::Loop { body, at });
    }

    /// Runs the loop body for each number from `start` to below `end`, in steps of `step`.
    #[track_caller]
    pub fn each(
        &self,
        start: impl IntoVal<'k, u32>,
        end: impl IntoVal<'k, u32>,
        step: impl IntoVal<'k, u32>,
        f: impl FnOnce(&Self, Val<'k, u32>),
    ) {
        let at = Location::caller();
        let (end, step) = (end.into_val(self.k), step.into_val(self.k));
        let i = self.var::<u32>(start);
        let body = self.k.block(|| {
            let done = self.k.placed(at, || i.now().ge(end).in_register());
            self.k.push(Stmt::Break { cond: done, when: true, at });
            let now = self.k.placed(at, || i.get());
            f(self, now);
            self.k.placed(at, || i.set(now + step));
        });
        self.k.push(Stmt::Loop { body, at });
    }

    /// Repeats `f` until it leaves the loop.
    #[track_caller]
    pub fn repeat(&self, f: impl FnOnce(&Self, &Leave<'k>)) {
        let at = Location::caller();
        let body = self.k.block(|| f(self, &Leave { k: self.k, depth: self.k.depth() }));
        self.k.push(Stmt::Loop { body, at });
    }

    #[track_caller]
    pub(crate) fn plain(&self, inst: &'static Inst) {
        self.k.emit(inst, []);
    }

    /// Makes this thread's writes to shared memory visible to TMA and the tensor cores. A barrier must
    /// follow.
    #[track_caller]
    pub fn publish_shared(&self) {
        self.k.emit(&sync::FENCE_PROXY, [Arg::Word(".shared::cta")]);
    }

    /// Makes this thread's writes to global memory visible to TMA. A signal to the other threads must
    /// follow.
    #[track_caller]
    pub fn publish_global(&self) {
        self.k.emit(&sync::FENCE_PROXY, [Arg::Word(".global")]);
    }

    /// Waits until the previous grid is complete and its writes are visible.
    #[track_caller]
    pub fn wait_for_previous_grid(&self) {
        self.plain(&sync::GRID_WAIT);
    }
    /// Lets the next grid start. That grid waits with [`wait_for_previous_grid`](Self::wait_for_previous_grid).
    #[track_caller]
    pub fn let_next_grid_start(&self) {
        self.plain(&sync::GRID_LAUNCH);
    }
}

/// The exit of a loop.
pub struct Leave<'k> {
    k: &'k Builder,
    depth: usize,
}

impl<'k> Leave<'k> {
    /// Leaves the loop where `cond` holds. Must not be called from inside a branch of the loop's body.
    #[track_caller]
    pub fn when(&self, cond: Val<'k, bool>) {
        if self.k.depth() != self.depth {
            self.k.refuse("a loop is left from inside a branch or another loop; leave it from its own body".into());
        }
        let cond = cond.in_register();
        self.k.push(Stmt::Break { cond, when: true, at: Location::caller() });
    }
}

/// Operations that the lanes of a warp execute together.
impl<'k, W: WholeWarps> Scope<'k, W> {
    /// The value of the lane whose index differs in these bits (a butterfly shuffle).
    #[track_caller]
    pub fn exchange(&self, x: Val<'k, f32>, bits: u32) -> Val<'k, f32> {
        let raw: Val<'k, u32> = x.to_bits();
        raw.compute::<u32>(&warp::SHFL, &[Arg::Imm(bits.into()), Arg::Word("bfly"), Arg::Word("0x1f")]).to_f32_bits()
    }
    /// The pair of 16-bit floats of the lane whose index differs in these bits.
    #[track_caller]
    pub fn exchange_pair<T: Half>(&self, x: Val<'k, Pair<T>>, bits: u32) -> Val<'k, Pair<T>>
    where
        Pair<T>: Word,
    {
        x.compute(&warp::SHFL, &[Arg::Imm(bits.into()), Arg::Word("bfly"), Arg::Word("0x1f")])
    }
    /// Reduces groups of `lanes` neighbouring lanes (a power of two) with `f`; every lane gets the result.
    #[track_caller]
    pub fn reduce(
        &self,
        x: Val<'k, f32>,
        lanes: u32,
        f: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>,
    ) -> Val<'k, f32> {
        let mut x = x;
        let mut bits = lanes / 2;
        while bits > 0 {
            x = f(x, self.exchange(x, bits));
            bits /= 2;
        }
        x
    }
    /// Whether the predicate holds in any lane of the warp.
    #[track_caller]
    pub fn any(&self, p: Val<'k, bool>) -> Val<'k, bool> {
        p.compute(&warp::VOTE, &[Arg::Word("any")])
    }
    /// The lanes of the warp in which the predicate holds, one bit for each.
    #[track_caller]
    pub fn ballot(&self, p: Val<'k, bool>) -> Val<'k, u32> {
        p.compute(&warp::BALLOT, &[])
    }
    /// The smallest of the lanes' integers; every lane gets it.
    #[track_caller]
    pub fn smallest(&self, x: Val<'k, i32>) -> Val<'k, i32> {
        x.compute(&warp::REDUX, &[Arg::Word("min.s32")])
    }
    /// The largest of the lanes' integers; every lane gets it.
    #[track_caller]
    pub fn largest(&self, x: Val<'k, i32>) -> Val<'k, i32> {
        x.compute(&warp::REDUX, &[Arg::Word("max.s32")])
    }
    /// Computes a b + c in each warp separately, 16 x 16 by 16 x 8. Operands have the lane layout of `mma.m16n8k16`.
    #[track_caller]
    pub fn warp_product<T: Half>(
        &self,
        a: [Val<'k, Pair<T>>; 4],
        b: [Val<'k, Pair<T>>; 2],
        c: [Val<'k, f32>; 4],
    ) -> [Val<'k, f32>; 4]
    where
        Pair<T>: Word,
    {
        let to: [Reg; 4] = std::array::from_fn(|_| self.k.register(Class::F32));
        self.k.placed(Location::caller(), || {
            let args = [
                Arg::List(to.into()),
                Arg::List(a.map(|x| x.in_register()).into()),
                Arg::List(b.map(|x| x.in_register()).into()),
                Arg::List(c.map(|x| x.in_register()).into()),
                Arg::Word(T::NUMBER.name()),
            ];
            self.k.emit(&tensor::MMA_HALF, args);
        });
        to.map(|reg| Val::reg(self.k, reg))
    }
    /// Synchronises the lanes of each warp and their memory.
    #[track_caller]
    pub fn sync_warp(&self) {
        self.plain(&sync::BAR_WARP);
    }
    /// Runs `f` in one thread of the first warp.
    #[track_caller]
    pub fn one_thread(&self, f: impl FnOnce(&Scope<'k, Thread>)) {
        self.one_thread_of_warp(0, f);
    }
    /// Runs `f` in one thread of the `n`-th warp.
    #[track_caller]
    pub fn one_thread_of_warp(&self, n: u32, f: impl FnOnce(&Scope<'k, Thread>)) {
        let ((first, warps), at) = (self.k.role_warps(), Location::caller());
        if n >= warps {
            self.k.refuse(format!("a thread of warp {n}, allowed: below {warps}"));
        }
        // The assembler must see that the warp's index is equal in all lanes and that the thread is elected. Otherwise
        // it starts copies in a loop over lanes.
        let warp = (self.thread() / 32).of_first_lane();
        self.when(warp.eq(first + n), |w| {
            let (d, elected) = Val::<bool>::fresh(self.k);
            w.k.placed(at, || w.k.emit(&warp::ELECT, [d]));
            w.when(elected, |_| match n {
                0 => f(&Scope::new(self.k)),
                _ => self.k.alone(n, || f(&Scope::new(self.k))),
            });
        });
    }
}

impl<'k, W: WholeWarps> Scope<'k, W> {
    /// Index of the thread in its role, or in the CTA if there are no roles.
    #[track_caller]
    pub fn thread_in_role(&self) -> Val<'k, u32> {
        match self.k.role_warps().0 {
            0 => self.thread(),
            first => self.thread() - 32 * first,
        }
    }
    /// Index of the warp in its role, or in the CTA if there are no roles.
    #[track_caller]
    pub fn warp_in_role(&self) -> Val<'k, u32> {
        let (first, warps) = self.k.role_warps();
        if warps == 1 {
            return 0.into_val(self.k);
        }
        self.k.once("warp in role", || (self.thread() / 32).of_first_lane() - first)
    }
    /// Allocates a barrier for all threads of the role.
    pub fn role_barrier(&self) -> RoleBarrier {
        RoleBarrier { id: self.k.named_barriers(1) }
    }
    /// Synchronises all threads of the role.
    #[track_caller]
    pub fn sync_role(&self, barrier: &RoleBarrier) {
        let threads = self.k.role_warps().1 * 32;
        self.k.emit(&sync::BAR, [Arg::Imm(barrier.id.into()), Arg::Imm(threads.into())]);
    }
}

impl<'k> Scope<'k, WarpRole> {
    /// Runs `f` in one thread of a role of one warp, the same each time. Registers that `f` changes are not changed in
    /// the other threads.
    #[track_caller]
    pub fn elected(&self, f: impl FnOnce(&Scope<'k, Thread>)) {
        let at = Location::caller();
        let warps = self.k.role_warps().1;
        if warps != 1 {
            self.k.refuse(format!("one thread of a role of {warps} warps, allowed: 1; use one_thread"));
        }
        let (d, elected) = Val::<bool>::fresh(self.k);
        self.k.placed(at, || self.k.emit(&warp::ELECT, [d]));
        self.when(elected, |_| f(&Scope::new(self.k)));
    }
}

impl<'k> Scope<'k, Cta> {
    /// Synchronises all threads of the CTA.
    #[track_caller]
    pub fn sync(&self) {
        self.plain(&sync::BAR_ALL);
    }
}

impl<'k> Scope<'k, Group> {
    /// Index of the warpgroup in its role.
    #[track_caller]
    pub fn group(&self) -> Val<'k, u32> {
        let (first, warps) = self.k.role_warps();
        if warps <= 4 {
            return 0.into_val(self.k);
        }
        self.k.once("group", || (self.thread() / WARPGROUP).of_first_lane() - first / 4)
    }
    /// Index of the thread in its warpgroup.
    #[track_caller]
    pub fn thread_in_group(&self) -> Val<'k, u32> {
        self.thread() & (WARPGROUP - 1)
    }

    /// Allocates a barrier for each warpgroup of the role.
    pub fn group_barrier(&self) -> GroupBarrier {
        let groups = self.k.role_warps().1 / 4;
        GroupBarrier { first: self.k.named_barriers(groups) }
    }
    /// Synchronises the threads of each warpgroup.
    #[track_caller]
    pub fn sync_group(&self, barrier: &GroupBarrier) {
        let id = self.group() + barrier.first;
        self.k.emit(&sync::BAR, [id.arg(), Arg::Imm(WARPGROUP.into())]);
    }
    /// Runs `f` in one thread of each warpgroup.
    #[track_caller]
    pub fn one_thread_of_group(&self, f: impl FnOnce(&Scope<'k, Thread>)) {
        let at = Location::caller();
        let warp = self.k.once("warp", || (self.thread_in_group() / 32).of_first_lane());
        self.when(warp.eq(0), |w| {
            let (d, elected) = Val::<bool>::fresh(self.k);
            w.k.placed(at, || w.k.emit(&warp::ELECT, [d]));
            w.when(elected, |_| f(&Scope::new(self.k)));
        });
    }

    /// Waits until at most `pending` groups of products are in flight. If the assembler moves this wait up over
    /// exponentials that precede it, [`Report::verdict`](crate::assemble::Report::verdict) reports a fault.
    #[track_caller]
    pub fn wait_products(&self, pending: u32) {
        self.k.emit(&sync::WGMMA_WAIT, [Arg::Imm(pending.into())]);
    }

    /// Waits until at most `pending` groups of products are in flight, where the assembler may hoist the wait above
    /// exponentials. The call site must say why that is harmless.
    #[track_caller]
    pub fn wait_products_anywhere(&self, pending: u32) {
        self.k.allow_moved_wait(Location::caller());
        self.wait_products(pending);
    }

    /// Waits until at most `pending` groups of products are in flight, but not before all `results` are computed. No
    /// result may be negative. The assembler hoists waits above arithmetic that does not depend on them, which would
    /// leave nothing to overlap with the products. It does not hoist them above a branch that depends on the
    /// arithmetic.
    #[track_caller]
    pub fn wait_products_after(&self, pending: u32, results: &[Val<'k, f32>]) {
        if let Some(&first) = results.first() {
            self.k.placed(Location::caller(), || {
                let least = results[1..].iter().fold(first, |least, &x| least.min(x));
                self.when_rarely(self.any(least.lt(0.0)), |w| {
                    // Never taken. The assembler requires that no product is pending where the branch could be taken.
                    w.wait_products(0);
                    w.plain(&sync::TRAP);
                });
            });
        }
        self.wait_products(pending);
    }

    /// Synchronises all threads of the cluster, so that no CTA ends while another may still access its shared memory.
    #[track_caller]
    pub fn sync_cluster(&self) {
        if self.k.cluster_blocks() > 1 {
            self.sync_warp();
            self.k.emit(&sync::CLUSTER_ARRIVE, [Arg::Word("release")]);
            self.plain(&sync::CLUSTER_WAIT);
        }
    }
}

/// A named barrier for each warpgroup of a role.
pub struct GroupBarrier {
    first: u32,
}

/// A named barrier for all threads of a role.
pub struct RoleBarrier {
    id: u32,
}

/// Warpgroups of a role that take turns in a fixed cyclic order.
pub struct Turns {
    first: u32,
    groups: u32,
}

impl<'k> Scope<'k, Group> {
    /// Turns among the warpgroups of the role; the first warpgroup starts.
    #[track_caller]
    pub fn turns(&self) -> Turns {
        let groups = self.k.role_warps().1 / 4;
        let turns = Turns { first: if groups > 1 { self.k.named_barriers(groups) } else { 0 }, groups };
        if groups > 1 {
            let at = Location::caller();
            self.k.placed(at, || self.when(self.group().eq(groups - 1), |w| w.pass_turn(&turns)));
        }
        turns
    }
    /// Waits until it is this warpgroup's turn.
    #[track_caller]
    pub fn await_turn(&self, turns: &Turns) {
        if turns.groups > 1 {
            let id = self.group() + turns.first;
            self.k.emit(&sync::BAR, [id.arg(), Arg::Imm((2 * WARPGROUP).into())]);
        }
    }
    /// Passes the turn to the next warpgroup.
    #[track_caller]
    pub fn pass_turn(&self, turns: &Turns) {
        if turns.groups > 1 {
            let own = self.group();
            let next = own.eq(turns.groups - 1).select::<u32>(0, own + 1) + turns.first;
            self.k.emit(&sync::BAR_ARRIVE, [next.arg(), Arg::Imm((2 * WARPGROUP).into())]);
        }
    }
}

impl<'k> Scope<'k, Thread> {
    /// Closes a group: all copies that the thread has started since the last commit.
    #[track_caller]
    pub fn commit_stores(&self) {
        self.plain(&sync::BULK_COMMIT);
    }
    /// Waits until at most `pending` groups have yet to read shared memory.
    #[track_caller]
    pub fn wait_stores_read(&self, pending: u32) {
        self.k.emit(&sync::BULK_WAIT_READ, [Arg::Imm(pending.into())]);
    }
    /// Waits until at most `pending` groups have yet to be written.
    #[track_caller]
    pub fn wait_stores(&self, pending: u32) {
        self.k.emit(&sync::BULK_WAIT, [Arg::Imm(pending.into())]);
    }
}
