//! Builds a kernel: a closure runs once, and its operations on values become the kernel.
//!
//! ```
//! use fulgurite_ptx::{Kernel, Target};
//!
//! let kernel = Kernel::build("double", Target::AMPERE, |k| {
//!     let (x, n) = (k.pointer::<f32>("x"), k.param::<u32>("n"));
//!     k.threads(128, |w| {
//!         let i = w.cta().mul_add(128, w.thread());
//!         w.when(i.lt(n), |w| x.store(w, i, x.load(w, i) * 2.0));
//!     });
//! })?;
//! assert!(kernel.ptx().contains("mul.rn.f32"));
//! # Ok::<(), fulgurite_ptx::BuildError>(())
//! ```

mod float_pair;
mod memory;
mod role;
mod scope;
mod value;

pub use memory::{Pointer, Shared};
pub use role::{RoleSize, Warpgroups, Warps};
pub use scope::{Cta, Group, GroupBarrier, Leave, RoleBarrier, Scope, Thread, Turns, WarpRole, Who, WholeWarps};
pub(crate) use value::Src;
pub use value::{F32x2, Half, IntoVal, Pair, Val, Var, Word};

use crate::error::BuildError;
use crate::global_tensor::TensorParam;
use crate::inst::{Arg, Class, Inst, Op, Reg};
use crate::kernel::{BoxShape, Kernel, Param, ParamKind, Publish, RoleUse, SharedUse, Stmt, Target};
use crate::table::{convert, mbarrier, memory as rows, sync, warp};
use crate::tcgen05::CtaGroup;
use crate::verify;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::Location;

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: u32 = 128;

/// A kernel under construction.
pub struct Builder {
    name: String,
    target: Target,
    cluster: Cell<u32>,
    prefers_registers: Cell<bool>,
    /// The Rust line to attribute instructions to, if it is not the caller's.
    place: Cell<Option<&'static Location<'static>>>,
    state: RefCell<State>,
    /// Columns of tensor memory in use, the shared-memory offset of their address, and the Rust line that asked first.
    pub(crate) tensor: Cell<Option<(u32, u32, &'static Location<'static>)>>,
    /// What the columns are for, and how many each takes.
    pub(crate) tensor_uses: RefCell<Vec<(String, u32)>>,
    /// The CTAs that own the kernel's tensor memory, and the Rust line that decided it.
    pub(crate) tensor_owner: Cell<Option<(CtaGroup, &'static Location<'static>)>>,
    /// The offset of the mbarrier of a pair's handshake before it frees tensor memory.
    pub(crate) handshake: Cell<Option<u32>>,
}

#[derive(Default)]
struct State {
    registers: [u32; Class::ALL.len()],
    /// Open blocks of statements; new instructions go into the last.
    blocks: Vec<Vec<Stmt>>,
    params: Vec<Param>,
    shared: Vec<SharedUse>,
    shared_bytes: u32,
    /// Unused ranges (start, end) of the areas for small allocations.
    small: Vec<(u32, u32)>,
    /// Number of named barriers in use; barrier 0 is the whole CTA's.
    barriers: u32,
    mbarriers: Vec<MbarrierUse>,
    roles: Vec<(RoleUse, Vec<Stmt>)>,
    /// Rust line of each role.
    role_places: Vec<&'static Location<'static>>,
    /// Index of the role under construction, and the depth of its outermost block of statements.
    role: Option<(usize, usize)>,
    /// Registers of the roles' ring cursors.
    cursors: HashMap<(Hand, usize, &'static str), [Reg; 2]>,
    /// Values that a role computes once, at its start.
    once: HashMap<(Hand, &'static str), Reg>,
    /// In the role under construction: index of the warp whose single thread has its own ring cursors and values.
    alone: u32,
    pipes: Vec<PipeUse>,
    threads: u32,
    /// Waits that the assembler may move.
    loose_waits: Vec<&'static Location<'static>>,
    /// Signals that later exponentials must not overtake.
    publishes: Vec<Publish>,
    errors: Vec<BuildError>,
}

/// An mbarrier in shared memory, initialised at the start of the kernel.
struct MbarrierUse {
    offset: u32,
    /// Arrivals per phase; resolved once all roles are known.
    count: Count,
    /// Rust line that requested the mbarrier.
    at: &'static Location<'static>,
}

/// Owner of registers: a role, or a single thread in a later warp of the role.
type Hand = (usize, u32);

/// Number of arrivals that complete a phase.
#[derive(Clone, Copy)]
pub(crate) enum Count {
    /// A fixed number of arrivals.
    Fixed(u32),
    /// One arrival per warp that empties the pipe, in each CTA of the cluster that shares it.
    Readers(usize),
}

/// Uses of a ring, complete once all roles are built.
#[derive(Default)]
pub(crate) struct PipeUse {
    name: String,
    filled: bool,
    /// Warps that empty the ring, counted once for each role.
    readers: HashMap<usize, u32>,
    /// Number of CTAs whose readers must all be done.
    blocks: u32,
}

/// The most registers per thread of a CTA with this number of threads, in the units of their allocation.
fn most_registers(threads: u32) -> u32 {
    /// Registers of an SM, and of a thread.
    const OF_SM: u32 = 64 << 10;
    const OF_THREAD: u32 = 255;
    (OF_SM / threads / 8 * 8).min(OF_THREAD)
}

impl Kernel {
    /// Runs `f` to build a kernel, then checks that it fits its target.
    pub fn build(name: &str, target: Target, f: impl FnOnce(&Builder)) -> Result<Kernel, BuildError> {
        let k = Builder {
            name: name.into(),
            target,
            cluster: Cell::new(1),
            prefers_registers: Cell::new(false),
            place: Cell::new(None),
            state: RefCell::new(State { blocks: vec![Vec::new()], barriers: 1, ..State::default() }),
            tensor: Cell::new(None),
            tensor_uses: RefCell::default(),
            tensor_owner: Cell::new(None),
            handshake: Cell::new(None),
        };
        f(&k);
        k.finish()
    }
}

impl Builder {
    /// The target that the kernel is built for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Sets the cluster size in CTAs.
    pub fn cluster(&self, blocks: u32) {
        self.cluster.set(blocks);
    }
    /// Lets the assembler use as many registers as a CTA can have. By default it prefers more CTAs per SM, and spills some
    /// registers for them. Kernels whose roles set their registers do not need it.
    pub fn prefer_registers(&self) {
        self.prefers_registers.set(true);
    }
    pub(crate) fn cluster_blocks(&self) -> u32 {
        self.cluster.get()
    }

    pub(crate) fn register(&self, class: Class) -> Reg {
        let count = &mut self.state.borrow_mut().registers[class as usize];
        *count += 1;
        Reg { class, index: *count - 1 }
    }

    /// Appends an instruction.
    #[track_caller]
    pub(crate) fn emit(&self, inst: &'static Inst, args: impl Into<Box<[Arg]>>) {
        let args = args.into();
        assert_eq!(args.len(), inst.operands.len(), "bug in fulgurite: operands of {}", inst.name);
        let at = self.place.get().unwrap_or(Location::caller());
        let op = Op { inst, args, at };
        if let Err(what) = op.check() {
            self.refuse(format!("`{}` {what}", inst.name));
        }
        self.push(Stmt::Op(op));
    }

    /// Attributes the instructions that `f` builds to the Rust line `at`. For closures of this crate, which do not know
    /// their caller's line. Never wrap a closure of the kernel's author.
    pub(crate) fn placed<R>(&self, at: &'static Location<'static>, f: impl FnOnce() -> R) -> R {
        let outer = self.place.get();
        self.place.set(outer.or(Some(at)));
        let result = f();
        self.place.set(outer);
        result
    }

    /// Allows the assembler to move the wait built at this line.
    pub(crate) fn allow_moved_wait(&self, at: &'static Location<'static>) {
        self.state.borrow_mut().loose_waits.push(self.place.get().unwrap_or(at));
    }

    /// Forbids the assembler to move later exponentials above the signal built at this line.
    pub(crate) fn keep_publish(&self, at: &'static Location<'static>) {
        let mut state = self.state.borrow_mut();
        let role = state.role.map_or_else(|| self.name.clone(), |(n, _)| state.roles[n].0.name.clone());
        let publish = Publish { role, at: self.place.get().unwrap_or(at) };
        if !state.publishes.contains(&publish) {
            state.publishes.push(publish);
        }
    }

    pub(crate) fn push(&self, stmt: Stmt) {
        self.state.borrow_mut().blocks.last_mut().expect("bug in fulgurite: no open block").push(stmt);
    }

    /// Builds `f` into a separate block of statements.
    pub(crate) fn block(&self, f: impl FnOnce()) -> Vec<Stmt> {
        self.state.borrow_mut().blocks.push(Vec::new());
        f();
        self.state.borrow_mut().blocks.pop().expect("bug in fulgurite: blocks are nested")
    }

    /// Number of open blocks of statements.
    pub(crate) fn depth(&self) -> usize {
        self.state.borrow().blocks.len()
    }

    /// Inserts what `f` builds at the start of the current role.
    fn at_role_start(&self, f: impl FnOnce()) {
        let built = self.block(f);
        let mut state = self.state.borrow_mut();
        let depth = state.role.map_or(0, |(_, depth)| depth);
        state.blocks[depth].extend(built);
    }

    /// Records an error. The first one is reported when the kernel is finished.
    #[track_caller]
    pub(crate) fn refuse(&self, what: String) {
        let at = self.place.get().unwrap_or(Location::caller());
        let at = format!("{}:{}", at.file(), at.line());
        self.state.borrow_mut().errors.push(BuildError::Shape { kernel: self.name.clone(), at, what });
    }

    fn add_param(&self, name: &str, kind: ParamKind) -> u32 {
        let mut state = self.state.borrow_mut();
        state.params.push(Param { name: name.into(), kind });
        state.params.len() as u32 - 1
    }

    /// Declares a scalar parameter.
    #[track_caller]
    pub fn param<T: ParamNumber>(&self, name: &str) -> Val<'_, T> {
        let number = self.add_param(name, T::KIND);
        let (d, value) = Val::fresh(self);
        self.emit(T::LOAD, [d, Arg::Address(crate::inst::Base::Param(number), 0)]);
        value
    }

    /// Declares an array parameter in global memory, aligned to 16 bytes.
    #[track_caller]
    pub fn pointer<T: Word>(&self, name: &str) -> Pointer<'_, T> {
        self.pointer_aligned(name, 16)
    }

    /// Declares an array parameter in global memory, aligned to its elements only, so accesses move one element at a
    /// time.
    #[track_caller]
    pub fn array<T: Word>(&self, name: &str) -> Pointer<'_, T> {
        self.pointer_aligned(name, memory::bytes::<T>())
    }

    #[track_caller]
    fn pointer_aligned<T: Word>(&self, name: &str, align: u32) -> Pointer<'_, T> {
        let number = self.add_param(name, ParamKind::Pointer(align));
        let (d, value) = Val::fresh(self);
        self.emit(&rows::LD_PARAM_64, [d, Arg::Address(crate::inst::Base::Param(number), 0)]);
        Pointer::new(value)
    }

    /// Declares a tensor parameter that moves in boxes.
    #[track_caller]
    pub(crate) fn tensor_param(&self, name: &str, shape: BoxShape) -> TensorParam<'_> {
        let rank = shape.extent.len() as u32;
        let number = self.add_param(name, ParamKind::Tensor(shape));
        TensorParam { k: self, number, rank }
    }

    /// Allocates shared memory and returns its offset.
    pub(crate) fn take_shared(&self, name: &str, bytes: u32, align: u32) -> u32 {
        let mut state = self.state.borrow_mut();
        let offset = state.shared_bytes.next_multiple_of(align);
        state.shared.push(SharedUse { name: name.into(), offset, bytes });
        state.shared_bytes = offset + bytes;
        offset
    }

    /// Allocates a few bytes for barriers and messages. They are grouped, because each one between tiles would cost a
    /// whole swizzle period.
    pub(crate) fn take_small(&self, name: &str, bytes: u32, align: u32) -> u32 {
        const AREA: u32 = 1024;
        let mut state = self.state.borrow_mut();
        let fits = |&(next, end): &(u32, u32)| next.next_multiple_of(align) + bytes <= end;
        let area = state.small.iter().position(fits).unwrap_or_else(|| {
            let start = state.shared_bytes.next_multiple_of(align.max(16));
            state.shared_bytes = start + bytes.next_multiple_of(AREA);
            let area = (start, state.shared_bytes);
            state.small.push(area);
            state.small.len() - 1
        });
        let (next, end) = state.small[area];
        let offset = next.next_multiple_of(align);
        state.small[area] = (offset + bytes, end);
        state.shared.push(SharedUse { name: name.into(), offset, bytes });
        offset
    }

    /// The shared-memory address of an offset.
    #[track_caller]
    pub(crate) fn shared_address(&self, offset: u32) -> Val<'_, u32> {
        let (d, base) = Val::fresh(self);
        self.emit(&convert::SHARED_BASE, [d]);
        base + offset
    }

    /// Allocates an array of `count` values in shared memory.
    pub fn shared<T: Word>(&self, name: &str, count: u32) -> Shared<'_, T> {
        let offset = self.take_shared(name, count * memory::bytes::<T>(), 16);
        Shared::new(self, offset)
    }

    /// Allocates named barriers for a subset of the CTA's warps, and returns the first.
    pub(crate) fn named_barriers(&self, count: u32) -> u32 {
        let mut state = self.state.borrow_mut();
        state.barriers += count;
        state.barriers - count
    }

    /// Allocates `n` consecutive mbarriers, and returns the offset of the first.
    #[track_caller]
    pub(crate) fn mbarriers(&self, name: &str, n: u32, count: Count) -> u32 {
        let (first, at) = (self.take_small(name, 8 * n, 8), Location::caller());
        let uses = (0..n).map(|i| MbarrierUse { offset: first + 8 * i, count, at });
        self.state.borrow_mut().mbarriers.extend(uses);
        first
    }

    pub(crate) fn new_pipe(&self, name: &str, blocks: u32) -> usize {
        let mut state = self.state.borrow_mut();
        state.pipes.push(PipeUse { name: name.into(), blocks, ..PipeUse::default() });
        state.pipes.len() - 1
    }

    pub(crate) fn pipe_filled(&self, pipe: usize) {
        self.state.borrow_mut().pipes[pipe].filled = true;
    }

    /// Records that the current role empties a pipe.
    pub(crate) fn pipe_emptied(&self, pipe: usize) {
        let mut state = self.state.borrow_mut();
        let role = state.role.map_or(0, |(role, _)| role);
        let warps = state.roles.get(role).map_or(state.threads / 32, |(role, _)| role.warps);
        state.pipes[pipe].readers.insert(role, warps);
    }

    fn hand(&self) -> Hand {
        let state = self.state.borrow();
        (state.role.map_or(0, |(role, _)| role), state.alone)
    }

    /// Builds `f` for a single thread of a later warp of the current role. Its ring cursors then take no registers in
    /// the other threads.
    pub(crate) fn alone(&self, warp: u32, f: impl FnOnce()) {
        let outer = {
            let mut state = self.state.borrow_mut();
            let (outer, depth) = ((state.role, state.alone), state.blocks.len());
            if let Some((role, _)) = state.role {
                (state.role, state.alone) = (Some((role, depth)), warp);
            }
            outer
        };
        let body = self.block(|| {
            let inner = self.block(f);
            self.state.borrow_mut().blocks.last_mut().expect("bug in fulgurite: no open block").extend(inner);
        });
        let mut state = self.state.borrow_mut();
        (state.role, state.alone) = outer;
        state.blocks.last_mut().expect("bug in fulgurite: no open block").extend(body);
    }

    /// The current role's cursor in a ring: stage and parity, initialised with `start`.
    #[track_caller]
    pub(crate) fn cursor(&self, pipe: usize, side: &'static str, start: [u32; 2]) -> [Var<'_, u32>; 2] {
        let at = Location::caller();
        let hand = self.hand();
        let known = self.state.borrow().cursors.get(&(hand, pipe, side)).copied();
        let regs = known.unwrap_or_else(|| {
            let regs = [self.register(Class::B32), self.register(Class::B32)];
            self.placed(at, || self.at_role_start(|| (0..2).for_each(|i| Var::of(self, regs[i]).set(start[i]))));
            self.state.borrow_mut().cursors.insert((hand, pipe, side), regs);
            regs
        });
        regs.map(|reg| Var::of(self, reg))
    }

    /// A value that the current role computes once, at its start.
    #[track_caller]
    pub(crate) fn once<'k>(&'k self, name: &'static str, f: impl FnOnce() -> Val<'k, u32>) -> Val<'k, u32> {
        let (hand, at) = (self.hand(), Location::caller());
        let known = self.state.borrow().once.get(&(hand, name)).copied();
        let reg = known.unwrap_or_else(|| {
            let mut reg = None;
            self.placed(at, || self.at_role_start(|| reg = Some(f().in_register())));
            let reg = reg.expect("bug in fulgurite: a value was just computed");
            self.state.borrow_mut().once.insert((hand, name), reg);
            reg
        });
        Val::reg(self, reg)
    }

    /// Builds a kernel without roles: all `count` threads of a CTA run the same code.
    pub fn threads<'k>(&'k self, count: u32, f: impl FnOnce(&Scope<'k, Cta>)) {
        self.state.borrow_mut().threads = count;
        f(&Scope::new(self));
    }

    fn finish(self) -> Result<Kernel, BuildError> {
        let roles = std::mem::take(&mut self.state.borrow_mut().roles);
        let threads = match roles.is_empty() {
            true => self.state.borrow().threads,
            false => roles.iter().map(|(role, _)| role.warps * 32).sum(),
        };
        // mbarriers are initialised first; parameters and addresses that the builder put there may precede them.
        let start = self.block(|| self.start_barriers());
        let body = {
            let mut state = self.state.borrow_mut();
            let all = std::mem::take(&mut state.blocks[0]);
            start.into_iter().chain(all).collect::<Vec<_>>()
        };
        self.state.borrow_mut().blocks[0] = body;
        let entry = Kernel::entry_registers(self.target, threads);
        verify::register_counts(&self.name, roles.iter().map(|(role, _)| role))?;
        let roles = self.share_registers(roles);
        let uses: Vec<RoleUse> = roles.iter().map(|(role, _)| role.clone()).collect();
        if !roles.is_empty() {
            self.dispatch(roles, entry);
        }
        self.end_tensor_memory();
        let state = self.state.into_inner();
        if let Some(error) = state.errors.into_iter().next() {
            return Err(error);
        }
        for pipe in &state.pipes {
            let missing = match (pipe.filled, pipe.readers.is_empty()) {
                (false, _) => "never filled",
                (_, true) => "never emptied",
                _ => continue,
            };
            return Err(BuildError::Pipe { kernel: self.name, pipe: pipe.name.clone(), missing });
        }
        let kernel = Kernel {
            name: self.name,
            target: self.target,
            params: state.params,
            threads,
            cluster: self.cluster.get(),
            most_registers: self.prefers_registers.get().then(|| most_registers(threads)),
            shared: state.shared,
            shared_bytes: state.shared_bytes,
            roles: uses,
            barriers: state.barriers,
            registers: state.registers,
            loose_waits: state.loose_waits,
            publishes: state.publishes,
            body: state.blocks.into_iter().next().unwrap_or_default(),
        };
        verify::verify(&kernel)?;
        Ok(kernel)
    }

    /// One thread initialises the mbarriers, then all threads of the CTA or the cluster synchronise.
    fn start_barriers(&self) {
        let inits: Vec<(u32, u32, &'static Location<'static>)> = {
            let state = self.state.borrow();
            let count = |count: Count| match count {
                Count::Fixed(n) => n,
                Count::Readers(pipe) => {
                    let pipe = &state.pipes[pipe];
                    pipe.blocks * pipe.readers.values().sum::<u32>()
                }
            };
            state.mbarriers.iter().map(|bar| (bar.offset, count(bar.count), bar.at)).collect()
        };
        let pair = self.tensor_group() == CtaGroup::Pair;
        if !pair {
            self.start_tensor_memory();
        }
        if let Some(&(_, _, at)) = inits.first() {
            self.placed(at, || self.start_these(&inits));
        }
        // A pair allocates after the barrier of the cluster, when both CTAs are known to run.
        if pair {
            self.start_tensor_memory();
            self.end_of_allocation();
        }
    }

    fn start_these(&self, inits: &[(u32, u32, &'static Location<'static>)]) {
        let scope = Scope::<Cta>::new(self);
        scope.when(scope.thread().eq(0), |_| {
            let base = self.shared_address(0).in_register();
            for &(offset, count, _) in inits {
                let bar = Arg::Address(crate::inst::Base::Reg(base), offset as i32);
                self.emit(&mbarrier::INIT, [bar, Arg::Imm(count.max(1).into())]);
            }
            self.emit(&sync::FENCE_INIT, []);
        });
        if self.cluster.get() > 1 {
            self.emit(&sync::CLUSTER_ARRIVE, [Arg::Word("release")]);
            self.emit(&sync::CLUSTER_WAIT, []);
        } else {
            self.emit(&sync::BAR_ALL, []);
        }
    }
}

impl<'k> Val<'k, u32> {
    /// The value of lane 0, which the assembler then knows to be equal in the whole warp.
    #[track_caller]
    pub(crate) fn of_first_lane(self) -> Val<'k, u32> {
        self.compute(&warp::SHFL, &[Arg::Imm(0), Arg::Word("idx"), Arg::Word("0x1f")])
    }
}

/// A number type of kernel parameters.
pub trait ParamNumber: Word {
    /// Kind of the parameter.
    const KIND: ParamKind;
    /// Instruction that loads it.
    const LOAD: &'static Inst;
}
impl ParamNumber for u32 {
    const KIND: ParamKind = ParamKind::U32;
    const LOAD: &'static Inst = &rows::LD_PARAM_32;
}
impl ParamNumber for i32 {
    const KIND: ParamKind = ParamKind::U32;
    const LOAD: &'static Inst = &rows::LD_PARAM_32;
}
impl ParamNumber for f32 {
    const KIND: ParamKind = ParamKind::F32;
    const LOAD: &'static Inst = &rows::LD_PARAM_F32;
}
impl ParamNumber for u64 {
    const KIND: ParamKind = ParamKind::U64;
    const LOAD: &'static Inst = &rows::LD_PARAM_64;
}
