//! The state of a running launch: clusters, blocks, warps, and everything that happens later.

use crate::architecture::Architecture;
use crate::clock::{Clock, Comp, Part};
use crate::copy::{AfterCopies, Copy};
use crate::counters::Counts;
use crate::finding::{Fault, Finding, Side};
use crate::mbarrier::Bar;
use crate::memory::Memory;
use crate::options::{Options, Order};
use crate::program::Program;
use crate::random::Random;
use crate::shadow::{Access, Conflict, Ledger, Proxy, Shadow, Who, Why};
use crate::timeline::Timeline;
use crate::warpgroup::Warpgroup;
use fulgurite_ptx::Arch;
use fulgurite_ptx::device::Value;
use fulgurite_ptx::inst::Class;
use fulgurite_ptx::kernel::Kernel;
use fulgurite_ptx::machine::Queue;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::rc::Rc;

/// Where dynamic shared memory begins: not 0, so that a forgotten base shows.
pub(crate) const SHARED_BASE: u32 = 1024;
/// A block's number in its cluster stands above its shared addresses, from this bit on, as it does on Hopper.
pub(crate) const WINDOW: u32 = 24;
/// Where parameters lie, so that tensor maps have addresses.
pub(crate) const PARAM_BASE: u64 = 0x7000_0000_0000;
/// Bytes between parameters.
pub(crate) const PARAM_STRIDE: u64 = 128;
/// All lanes of a warp.
pub(crate) const FULL: u32 = u32::MAX;
/// Findings that are kept; a kernel that is wrong in one place is often wrong in thousands.
const MOST_FINDINGS: usize = 64;

/// A register of a warp.
#[derive(Clone)]
pub(crate) struct Register {
    /// The low 32 bits of each lane's; what registers of 64 bits have above is in [`Warp::high`].
    pub values: [u32; 32],
    /// Lanes that have written it.
    pub defined: u32,
    /// Count of `wgmma.fence` when it was last touched.
    pub touched: u32,
    /// One past the last product that writes it, and that reads it.
    pub written_by: u32,
    pub read_by: u32,
}

/// What encloses the current step.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Frame {
    If { restore: u32, other: u32 },
    Loop { restore: u32 },
}

/// What a warp waits for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Wait {
    /// A named barrier.
    Named(u32),
    /// The cluster's barrier.
    Cluster,
    /// A phase of an mbarrier of its block. A polite wait: the instruction may also say no.
    Phase { address: u32, phase: u32 },
    /// Groups of a queue, in lanes: until at most so many are left. Whether reading is enough.
    Groups(Vec<(u32, Queue, u32, bool)>),
    /// Products of its warpgroup up to a number.
    Products(u32),
    /// Registers of the block's pool.
    Registers(u32),
    /// That others do something. A polite wait.
    Sleep,
}

/// Whether a warp can go on.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) enum Status {
    #[default]
    Ready,
    Blocked(Wait),
    Done,
}

/// Groups of copies of a lane.
#[derive(Debug, Default)]
pub(crate) struct LaneQueue {
    /// Copies that belong to no group yet.
    pub open: Vec<u32>,
    /// Groups that were not waited for, oldest first.
    pub groups: VecDeque<Vec<u32>>,
}

/// A warp.
#[derive(Default)]
pub(crate) struct Warp {
    pub regs: Vec<Register>,
    /// The upper halves of registers of 64 bits.
    pub high: Vec<[u32; 32]>,
    pub pc: u32,
    pub active: u32,
    pub frames: Vec<Frame>,
    pub status: Status,
    /// Rank of its block in the cluster, and its number there.
    pub rank: usize,
    pub index: u32,
    pub role: usize,
    pub comp: Comp,
    /// Its moment: grows when others may learn of what it did.
    pub time: u32,
    pub clock: Clock,
    /// Count of `wgmma.fence`.
    pub fences: u32,
    /// Products it took part in, ends of its groups of them, and how many it has waited for.
    pub products: u32,
    pub product_groups: VecDeque<u32>,
    pub retired: u32,
    pub queues: HashMap<(u32, u8), LaneQueue>,
    /// Registers of a thread.
    pub registers: u32,
    /// Came to the cluster's barrier in this phase of it and has not waited.
    pub at_cluster: Option<u32>,
    /// What relaxed reads saw, for a fence that follows; what a fence released, for relaxed writes that follow.
    pub seen: Option<Clock>,
    pub released: Option<Clock>,
    /// Progress of the launch when it last looked at what it waits for in vain.
    pub tried: u64,
    /// Cycles, where a timeline is wanted.
    pub now: u64,
    /// Since when it was blocked, and where, until it goes on.
    pub blocked: Option<(u64, u32)>,
    /// The step of the last instruction.
    pub last_pc: u32,
}

impl Warp {
    /// From here on, what the warp does is not covered by what it told before.
    pub fn tick(&mut self) {
        self.time += 1;
        self.clock.raise(&[Part::Memory, Part::Done], self.comp, self.time);
    }
}

/// A named barrier.
#[derive(Default)]
pub(crate) struct Named {
    /// Threads that meet, as the first one said, and where it said so.
    pub expected: Option<(u32, Access)>,
    pub arrived: u32,
    pub clock: Clock,
    pub latest: u64,
}

/// A block.
pub(crate) struct Block {
    /// Number in the grid, and along each axis.
    pub index: u32,
    pub at: [u32; 3],
    pub shared: Vec<u8>,
    pub shadow: Shadow,
    pub bars: BTreeMap<u32, Bar>,
    pub named: Vec<Named>,
    /// Registers that nobody has.
    pub pool: u32,
    pub warpgroups: Vec<Warpgroup>,
    /// Copies and products that read or write its shared memory: by their completions.
    pub reaches: Vec<Access>,
    /// Last accesses of warps of other blocks.
    pub peers: Vec<Access>,
    /// Warps that are not done.
    pub running: u32,
    /// What its warps knew when they were done.
    pub last: Clock,
}

/// A cluster of blocks that run at the same time.
#[derive(Default)]
pub(crate) struct Cluster {
    pub id: u32,
    pub blocks: Vec<Block>,
    pub warps: Vec<Warp>,
    /// Components handed out.
    pub comps: u32,
    /// The cluster's barrier: its phase, warps that came, warps that ended before they came, what was told in this
    /// phase and in those before, and when the last came.
    pub phase: u32,
    pub arrived: u32,
    pub absent: u32,
    pub clock: Clock,
    pub past: Clock,
    pub latest: u64,
    /// Things that will still happen.
    pub pending: u32,
}

/// Something that happens later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A copy reads its source.
    Read(u32),
    /// It writes its destination.
    Write(u32),
    /// It tells that it is done.
    Complete(u32),
    /// A warpgroup of a block of a cluster runs its next product.
    Product(u32, u32, u32),
}

/// Offsets in shared memory and addresses in global memory that an instruction touched, with their bytes.
pub(crate) type Touches = (Vec<(u32, u32)>, Vec<(u64, u32)>);

/// A running launch.
pub(crate) struct World<'a> {
    pub program: &'a Program,
    pub options: &'a Options,
    /// Rates and limits of the simulated GPU.
    pub architecture: Architecture,
    pub memory: &'a mut Memory,
    pub args: &'a [Value],
    pub grid: [u32; 3],
    pub clusters: Vec<Cluster>,
    pub next_cluster: u32,
    pub ledger: Ledger,
    pub random: Random,
    pub events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pub sequence: u64,
    /// Picks of a warp, or cycles.
    pub now: u64,
    pub copies: HashMap<u32, Copy>,
    pub next_copy: u32,
    /// Arrivals that wait for copies.
    pub after_copies: Vec<AfterCopies>,
    /// Release clocks of words of global memory.
    pub words: HashMap<u64, Clock>,
    pub findings: Vec<Finding>,
    /// Stops the launch.
    pub fatal: bool,
    /// Grows with everything that others can see.
    pub progress: u64,
    /// Steps that are left.
    pub budget: u64,
    pub counts: Vec<Counts>,
    pub timeline: Option<Timeline>,
    /// Room for what an instruction touches.
    pub touches: Touches,
}

impl<'a> World<'a> {
    pub fn new(
        program: &'a Program,
        options: &'a Options,
        arch: &Arch,
        memory: &'a mut Memory,
        args: &'a [Value],
        grid: [u32; 3],
    ) -> Self {
        let timed = options.order == Order::Timed;
        World {
            program,
            options,
            architecture: Architecture::of(arch),
            memory,
            args,
            grid,
            clusters: Vec::new(),
            next_cluster: 0,
            ledger: Ledger::new(),
            random: Random::new(options.seed),
            events: BinaryHeap::new(),
            sequence: 0,
            now: 0,
            copies: HashMap::new(),
            next_copy: 0,
            after_copies: Vec::new(),
            words: HashMap::new(),
            findings: Vec::new(),
            fatal: false,
            progress: 1,
            budget: options.budget,
            counts: vec![Counts::default(); program.kernel.roles.len().max(1)],
            timeline: timed.then(Timeline::default),
            touches: (Vec::new(), Vec::new()),
        }
    }

    /// Clusters of the grid.
    pub fn cluster_count(&self) -> u32 {
        let blocks: u64 = self.grid.iter().map(|&n| u64::from(n)).product();
        (blocks / u64::from(self.program.kernel.cluster)) as u32
    }

    /// A cluster that begins.
    pub fn new_cluster(&self, id: u32) -> Cluster {
        let kernel = &self.program.kernel;
        let (size, warps) = (kernel.cluster, kernel.threads / 32);
        let entry = Kernel::entry_registers(kernel.target, kernel.threads);
        let blocks = (0..size).map(|rank| {
            let index = id * size + rank;
            let at = [index % self.grid[0], index / self.grid[0] % self.grid[1], index / self.grid[0] / self.grid[1]];
            let bytes = u64::from(kernel.shared_bytes);
            Block {
                index,
                at,
                shared: vec![0xff; bytes as usize],
                shadow: Shadow::new(bytes),
                bars: BTreeMap::new(),
                named: (0..kernel.target.arch.named_barriers).map(|_| Named::default()).collect(),
                pool: 0,
                warpgroups: (0..warps.div_ceil(4)).map(|_| Warpgroup::default()).collect(),
                reaches: Vec::new(),
                peers: Vec::new(),
                running: warps,
                last: Clock::new(id),
            }
        });
        let register = Register { values: [0; 32], defined: 0, touched: 0, written_by: 0, read_by: 0 };
        let all = (0..size * warps).map(|n| {
            let index = n % warps;
            let in_role = |role: &fulgurite_ptx::kernel::RoleUse| {
                (role.first_warp..role.first_warp + role.warps).contains(&index)
            };
            let comp = Comp { cluster: id, index: n };
            let mut warp = Warp {
                regs: vec![register.clone(); self.program.registers],
                high: vec![[0; 32]; kernel.registers[Class::B64 as usize] as usize],
                active: FULL,
                rank: (n / warps) as usize,
                index,
                role: kernel.roles.iter().position(in_role).unwrap_or(0),
                comp,
                clock: Clock::new(id),
                registers: entry,
                now: self.now,
                ..Warp::default()
            };
            warp.tick();
            warp
        });
        Cluster {
            id,
            blocks: blocks.collect(),
            warps: all.collect(),
            comps: size * warps,
            clock: Clock::new(id),
            past: Clock::new(id),
            ..Cluster::default()
        }
    }

    /// Has something happen at a time.
    pub fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    /// Has something happen after a while: soon, later, or when nobody can go on without it.
    pub fn later(&mut self, event: Event) {
        let delay = match self.random.below(8) {
            0 | 1 => 0,
            2 => self.random.below(8),
            3 | 4 => self.random.below(64),
            5 | 6 => self.random.below(1024),
            _ => 1 << 40,
        };
        self.at(self.now + delay, event);
    }

    /// Who does something, for a report.
    pub fn side(&self, block: u32, warp: u32, lane: Option<u32>, pc: u32) -> Side {
        let kernel = &self.program.kernel;
        let role = kernel.roles.iter().find(|r| (r.first_warp..r.first_warp + r.warps).contains(&warp));
        let inst = match self.program.steps.get(pc as usize) {
            Some(crate::program::Step::Op(i)) => self.program.ops[*i as usize].inst.name,
            _ => "branch",
        };
        let line = self.program.lines[(pc as usize).min(self.program.lines.len() - 1)].into();
        Side { block, role: role.map_or(String::new(), |r| r.name.clone()), warp, lane, inst, line }
    }

    pub fn side_of(&self, access: &Access) -> Side {
        self.side(access.block, access.warp, None, access.pc)
    }

    /// Keeps a finding, once for each pair of lines.
    pub fn report(&mut self, fault: Fault, what: String, address: Option<u64>, here: Side, other: Option<Side>) {
        let same = |f: &Finding| {
            f.fault == fault
                && f.here.line == here.line
                && f.other.as_ref().map(|o| o.line) == other.as_ref().map(|o| o.line)
        };
        if self.findings.len() < MOST_FINDINGS && !self.findings.iter().any(same) {
            let kernel = self.program.kernel.name.clone();
            self.findings.push(Finding { fault, kernel, what, address, here, other });
        }
        if self.findings.len() >= MOST_FINDINGS || matches!(fault, Fault::Trap | Fault::Deadlock | Fault::Endless) {
            self.fatal = true;
        }
    }

    /// Reports two accesses that may not meet.
    pub fn conflict(&mut self, conflict: Conflict, address: u64, access: &Access, lane: Option<u32>, writes: bool) {
        let here = self.side(access.block, access.warp, lane, access.pc);
        let other = self.side_of(&conflict.other);
        let (fault, why) = match conflict.why {
            Why::Unordered => (Fault::Race, "nothing orders it with the other access"),
            Why::NoProxyFence => (Fault::ProxyRace, "no proxy fence of the writer lies between it and the write"),
        };
        let verb = if writes { "write" } else { "read" };
        self.report(fault, format!("a {verb}, and {why}"), Some(address), here, Some(other));
    }
}

impl Cluster {
    /// A fresh component.
    pub fn component(&mut self) -> Comp {
        self.comps += 1;
        Comp { cluster: self.id, index: self.comps - 1 }
    }

    /// Where a warp of a block is.
    pub fn warp_at(&self, rank: usize, warp: u32) -> usize {
        rank * (self.warps.len() / self.blocks.len().max(1)) + warp as usize
    }
}

/// An access of a warp, as it is remembered.
pub(crate) fn access_of(warp: &Warp, block: u32, pc: u32, strong: bool) -> Access {
    let who = Who::Warp { comp: warp.comp, time: warp.time };
    Access { who, pc, block, warp: warp.index, proxy: Proxy::Generic, strong, mask: 0, swizzle: None }
}

/// A snapshot of what an issuer knows.
pub(crate) type Snapshot = Rc<Clock>;
