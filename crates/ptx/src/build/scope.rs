//! Who executes: the scope a piece of a kernel is built in.
//!
//! What one thread may start (copies), what a warpgroup does together (products) and what everybody may do are
//! methods of different scopes, so a wrong call does not compile.

use super::value::{Brand, Half, IntoVal, Pair, Val, Var, Word};
use super::{Builder, WARPGROUP};
use crate::inst::{Arg, Class, Inst, Reg};
use crate::kernel::Stmt;
use crate::table::{convert, sync, tensor, warp};
use std::marker::PhantomData;
use std::panic::Location;

/// Whom a scope stands for.
pub trait Who: 'static {}
/// All threads of a block.
pub enum Block {}
/// All threads of a role: whole warpgroups.
pub enum Group {}
/// All threads of a role of any number of warps.
pub enum WarpRole {}
/// One thread.
pub enum Thread {}
impl Who for Block {}
impl Who for Group {}
impl Who for WarpRole {}
impl Who for Thread {}

/// Scopes in which whole warps come.
pub trait WholeWarps: Who {}
impl WholeWarps for Block {}
impl WholeWarps for Group {}
impl WholeWarps for WarpRole {}

/// A place in the kernel under construction, and who executes it.
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
        let row = if name.contains("cluster") { &convert::SPECIAL_CLUSTER } else { &convert::SPECIAL };
        self.k.emit(row, [d, Arg::Word(name)]);
        value
    }
    /// Number of the thread in the block.
    #[track_caller]
    pub fn thread(&self) -> Val<'k, u32> {
        self.special("%tid.x")
    }
    /// Number of the lane in the warp.
    #[track_caller]
    pub fn lane(&self) -> Val<'k, u32> {
        self.thread() & 31
    }
    /// Number of the block.
    #[track_caller]
    pub fn block(&self) -> Val<'k, u32> {
        self.special("%ctaid.x")
    }
    /// Number of blocks.
    #[track_caller]
    pub fn blocks(&self) -> Val<'k, u32> {
        self.special("%nctaid.x")
    }
    /// Number of the block in its cluster.
    #[track_caller]
    pub fn cluster_rank(&self) -> Val<'k, u32> {
        match self.k.cluster_blocks() {
            1 => 0.into_val(self.k),
            _ => self.special("%cluster_ctarank"),
        }
    }
    /// Number of the cluster.
    #[track_caller]
    pub fn cluster(&self) -> Val<'k, u32> {
        match self.k.cluster_blocks() {
            1 => self.block(),
            n => self.block() / n,
        }
    }
    /// Number of clusters.
    #[track_caller]
    pub fn clusters(&self) -> Val<'k, u32> {
        match self.k.cluster_blocks() {
            1 => self.blocks(),
            n => self.blocks() / n,
        }
    }

    /// A constant as a value.
    pub fn constant<T: Word>(&self, x: T) -> Val<'k, T> {
        x.into_val(self.k)
    }
    /// A register that is written more than once.
    #[track_caller]
    pub fn var<T: Word>(&self, start: impl IntoVal<'k, T>) -> Var<'k, T> {
        Var::new(self.k, start)
    }

    /// Where `cond` holds.
    #[track_caller]
    pub fn when(&self, cond: Val<'k, bool>, then: impl FnOnce(&Self)) {
        self.branch(cond, then, |_| {}, false);
    }
    /// Where `cond` holds, which is rare: the code lies out of the way.
    #[track_caller]
    pub fn when_rarely(&self, cond: Val<'k, bool>, then: impl FnOnce(&Self)) {
        self.branch(cond, then, |_| {}, true);
    }
    /// Where `cond` holds, and where it does not.
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

    /// Again and again while what `f` returns holds.
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

    /// For each number from `start`, in steps of `step`, below `end`.
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

    /// Again and again, until the loop is left.
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

    /// What this thread wrote to shared memory so far can be read by the copy engine and the tensor cores, once a
    /// barrier follows.
    #[track_caller]
    pub fn publish_shared(&self) {
        self.k.emit(&sync::FENCE_PROXY, [Arg::Word(".shared::cta")]);
    }

    /// What this thread wrote to global memory so far can be read and added to by the copy engine, once others are told.
    #[track_caller]
    pub fn publish_global(&self) {
        self.k.emit(&sync::FENCE_PROXY, [Arg::Word(".global")]);
    }

    /// The grid before this one is done, and what it wrote is visible.
    #[track_caller]
    pub fn wait_for_previous_grid(&self) {
        self.plain(&sync::GRID_WAIT);
    }
    /// The next grid may start; it waits by [`wait_for_previous_grid`](Self::wait_for_previous_grid).
    #[track_caller]
    pub fn let_next_grid_start(&self) {
        self.plain(&sync::GRID_LAUNCH);
    }
}

/// The way out of a loop.
pub struct Leave<'k> {
    k: &'k Builder,
    depth: usize,
}

impl<'k> Leave<'k> {
    /// Leaves the loop where `cond` holds. Not from inside a branch of the loop's body.
    #[track_caller]
    pub fn when(&self, cond: Val<'k, bool>) {
        if self.k.depth() != self.depth {
            self.k.refuse("a loop is left from inside a branch or another loop; leave it from its own body".into());
        }
        let cond = cond.in_register();
        self.k.push(Stmt::Break { cond, when: true, at: Location::caller() });
    }
}

/// What lanes of a warp do together.
impl<'k, W: WholeWarps> Scope<'k, W> {
    /// The value of the lane whose number differs in these bits.
    #[track_caller]
    pub fn exchange(&self, x: Val<'k, f32>, bits: u32) -> Val<'k, f32> {
        let raw: Val<'k, u32> = x.to_bits();
        raw.compute::<u32>(&warp::SHFL, &[Arg::Imm(bits.into()), Arg::Word("bfly"), Arg::Word("0x1f")]).to_f32_bits()
    }
    /// The same of two 16-bit floats.
    #[track_caller]
    pub fn exchange_pair<T: Half>(&self, x: Val<'k, Pair<T>>, bits: u32) -> Val<'k, Pair<T>>
    where
        Pair<T>: Word,
    {
        x.compute(&warp::SHFL, &[Arg::Imm(bits.into()), Arg::Word("bfly"), Arg::Word("0x1f")])
    }
    /// `f` over groups of `lanes` neighbouring lanes, the result in each: a power of two.
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
    /// Whether it holds in any lane of the warp.
    #[track_caller]
    pub fn any(&self, p: Val<'k, bool>) -> Val<'k, bool> {
        p.compute(&warp::VOTE, &[Arg::Word("any")])
    }
    /// a b + c, 16 x 16 by 16 x 8, of each warp by itself: pairs of rows and of columns lie in lanes as PTX says of
    /// `mma.m16n8k16`.
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
    /// The lanes of each warp meet, and see each other's memory.
    #[track_caller]
    pub fn sync_warp(&self) {
        self.plain(&sync::BAR_WARP);
    }
    /// One thread of the first warp.
    #[track_caller]
    pub fn one_thread(&self, f: impl FnOnce(&Scope<'k, Thread>)) {
        self.one_thread_of_warp(0, f);
    }
    /// One thread of the `n`-th warp.
    #[track_caller]
    pub fn one_thread_of_warp(&self, n: u32, f: impl FnOnce(&Scope<'k, Thread>)) {
        let ((first, warps), at) = (self.k.role_warps(), Location::caller());
        if n >= warps {
            self.k.refuse(format!("a thread of warp {n}, allowed: below {warps}"));
        }
        // The warp's number must be known to be the same in all lanes, and the thread be elected: only then the
        // assembler starts copies without a loop over lanes.
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
    /// Number of the thread among those of the scope: its role's, or its block's.
    #[track_caller]
    pub fn thread_in_role(&self) -> Val<'k, u32> {
        match self.k.role_warps().0 {
            0 => self.thread(),
            first => self.thread() - 32 * first,
        }
    }
    /// Number of the warp among those of the scope.
    #[track_caller]
    pub fn warp_in_role(&self) -> Val<'k, u32> {
        let (first, warps) = self.k.role_warps();
        if warps == 1 {
            return 0.into_val(self.k);
        }
        self.k.once("warp in role", || (self.thread() / 32).of_first_lane() - first)
    }
    /// A barrier for all threads of the role.
    pub fn role_barrier(&self) -> RoleBarrier {
        RoleBarrier { id: self.k.named_barriers(1) }
    }
    /// All threads of the role meet.
    #[track_caller]
    pub fn sync_role(&self, barrier: &RoleBarrier) {
        let threads = self.k.role_warps().1 * 32;
        self.k.emit(&sync::BAR, [Arg::Imm(barrier.id.into()), Arg::Imm(threads.into())]);
    }
}

impl<'k> Scope<'k, Block> {
    /// All threads of the block meet.
    #[track_caller]
    pub fn sync(&self) {
        self.plain(&sync::BAR_ALL);
    }
}

impl<'k> Scope<'k, Group> {
    /// Number of the warpgroup in its role.
    #[track_caller]
    pub fn group(&self) -> Val<'k, u32> {
        let (first, warps) = self.k.role_warps();
        if warps <= 4 {
            return 0.into_val(self.k);
        }
        self.k.once("group", || (self.thread() / WARPGROUP).of_first_lane() - first / 4)
    }
    /// Number of the thread in its warpgroup.
    #[track_caller]
    pub fn thread_in_group(&self) -> Val<'k, u32> {
        self.thread() & (WARPGROUP - 1)
    }

    /// A barrier for each warpgroup of the role.
    pub fn group_barrier(&self) -> GroupBarrier {
        let groups = self.k.role_warps().1 / 4;
        GroupBarrier { first: self.k.named_barriers(groups) }
    }
    /// The threads of each warpgroup meet.
    #[track_caller]
    pub fn sync_group(&self, barrier: &GroupBarrier) {
        let id = self.group() + barrier.first;
        self.k.emit(&sync::BAR, [id.arg(), Arg::Imm(WARPGROUP.into())]);
    }
    /// One thread of each warpgroup.
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

    /// Waits until at most `pending` groups of products run. Exponentials that come before it and do not after the
    /// assembler is done are a fault of the kernel, which [`Report::verdict`](crate::assemble::Report::verdict) tells.
    #[track_caller]
    pub fn wait_products(&self, pending: u32) {
        self.k.emit(&sync::WGMMA_WAIT, [Arg::Imm(pending.into())]);
    }

    /// The same where the assembler may put exponentials after it that come before. Why that does no harm is said beside it.
    #[track_caller]
    pub fn wait_products_anywhere(&self, pending: u32) {
        self.k.allow_moved_wait(Location::caller());
        self.wait_products(pending);
    }

    /// The same, and not before all of `results` are computed, none of which is ever negative. The assembler moves waits
    /// up over arithmetic that does not need them, which would leave nothing to run beside the products; it does not
    /// move them over a branch that depends on the arithmetic.
    #[track_caller]
    pub fn wait_products_after(&self, pending: u32, results: &[Val<'k, f32>]) {
        if let Some(&first) = results.first() {
            self.k.placed(Location::caller(), || {
                let least = results[1..].iter().fold(first, |least, &x| least.min(x));
                self.when_rarely(self.any(least.lt(0.0)), |w| {
                    // Never taken; the assembler wants no product pending where it could be.
                    w.wait_products(0);
                    w.plain(&sync::TRAP);
                });
            });
        }
        self.wait_products(pending);
    }

    /// All threads of the cluster meet: no block ends while another may still reach into it.
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

/// Warpgroups of a role that take turns, in order, again and again.
pub struct Turns {
    first: u32,
    groups: u32,
}

impl<'k> Scope<'k, Group> {
    /// Turns among the warpgroups of the role; the first one begins.
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
    /// Waits for the turn of this warpgroup.
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
    /// The copies started so far become one group.
    #[track_caller]
    pub fn commit_stores(&self) {
        self.plain(&sync::BULK_COMMIT);
    }
    /// Waits until at most `pending` groups have still to read shared memory.
    #[track_caller]
    pub fn wait_stores_read(&self, pending: u32) {
        self.k.emit(&sync::BULK_WAIT_READ, [Arg::Imm(pending.into())]);
    }
    /// Waits until at most `pending` groups have still to be written.
    #[track_caller]
    pub fn wait_stores(&self, pending: u32) {
        self.k.emit(&sync::BULK_WAIT, [Arg::Imm(pending.into())]);
    }
}
