//! The state of a running launch: clusters, CTAs, warps, and pending events.

use crate::architecture::Architecture;
use crate::clock::{Clock, Comp, Part};
use crate::copy::{AfterCopies, Copy};
use crate::counters::Counts;
use crate::finding::{Fault, Finding, Party};
use crate::mbarrier::Bar;
use crate::memory::Memory;
use crate::options::{Interleaving, Options};
use crate::program::Program;
use crate::random::Random;
use crate::shadow::{Access, Conflict, Ledger, Proxy, Shadow, Who, Why};
use crate::tensor_memory::{TensorMemory, WarpTensor};
use crate::timeline::Timeline;
use crate::warpgroup::Warpgroup;
use fulgurite_ptx::device::Value;
use fulgurite_ptx::inst::Class;
use fulgurite_ptx::kernel::Kernel;
use fulgurite_ptx::machine::Queue;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::rc::Rc;

/// Address of dynamic shared memory: not 0, so that a forgotten base is detected.
pub(crate) const SHARED_BASE: u32 = 1024;
/// The bit above which a shared address holds the CTA's rank in its cluster, as on Hopper.
pub(crate) const WINDOW: u32 = 24;
/// Address of the parameters, so that tensor maps have addresses.
pub(crate) const PARAM_BASE: u64 = 0x7000_0000_0000;
/// Bytes between parameters.
pub(crate) const PARAM_STRIDE: u64 = 128;
/// All lanes of a warp.
pub(crate) const FULL: u32 = u32::MAX;
/// Number of findings that are kept; a kernel that is wrong in one place is often wrong in thousands.
const MOST_FINDINGS: usize = 64;

/// A register of a warp.
#[derive(Clone)]
pub(crate) struct Register {
    /// The low 32 bits in each lane; the upper halves of 64-bit registers are in [`Warp::high`].
    pub values: [u32; 32],
    /// Mask of the lanes that have written it.
    pub defined: u32,
    /// Number of `wgmma.fence` executed when it was last accessed.
    pub touched: u32,
    /// One past the last product that writes it; `read_by`: that reads it.
    pub written_by: u32,
    pub read_by: u32,
    /// Cycle at which its value is there, for a timeline.
    pub ready: u64,
}

/// A control-flow statement around the current step.
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
    /// A phase of an mbarrier of its CTA. The instruction may also return without success.
    Phase { address: u32, phase: u32 },
    /// Groups of queues: for each lane and queue, the number that may remain, and whether completed reads suffice.
    Groups(Vec<(u32, Queue, u32, bool)>),
    /// Products of its warpgroup up to an index.
    Products(u32),
    /// Registers from the CTA's pool.
    Registers(u32),
    /// The other CTA of its pair, for a step that both take together.
    Peer,
    /// A change by other warps, while it polls.
    Sleep,
}

/// Whether a warp can continue.
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
    /// The upper halves of 64-bit registers.
    pub high: Vec<[u32; 32]>,
    pub pc: u32,
    pub active: u32,
    pub frames: Vec<Frame>,
    pub status: Status,
    /// Rank of its CTA in the cluster, and its index in that CTA.
    pub rank: usize,
    pub index: u32,
    pub role: usize,
    pub comp: Comp,
    /// Its logical time, which grows when others may learn of its actions.
    pub time: u32,
    pub clock: Clock,
    /// Number of `wgmma.fence` executed.
    pub fences: u32,
    /// Number of its products, the ends of its product groups, and the number that it has waited for.
    pub products: u32,
    pub product_groups: VecDeque<u32>,
    pub retired: u32,
    pub queues: HashMap<(u32, u8), LaneQueue>,
    /// Registers per thread.
    pub registers: u32,
    /// The phase of the cluster's barrier at which it arrived without waiting yet.
    pub at_cluster: Option<u32>,
    /// Knowledge from relaxed reads, for a later fence; `released`: knowledge of a fence, for later relaxed writes.
    pub seen: Option<Clock>,
    pub released: Option<Clock>,
    /// Progress of the launch when it last polled without success.
    pub tried: u64,
    /// Its time in cycles, for a timeline.
    pub now: u64,
    /// Cycle at which all of its results are there.
    pub due: u64,
    /// Since when and at which step it is blocked.
    pub blocked: Option<(u64, u32)>,
    /// The step of its last instruction.
    pub last_pc: u32,
    /// Its accesses to tensor memory.
    pub tensor: WarpTensor,
}

impl Warp {
    /// Advances the logical time: later actions are not covered by earlier releases.
    pub fn tick(&mut self) {
        self.time += 1;
        self.clock.raise(&[Part::Memory, Part::Done], self.comp, self.time);
    }
}

/// A named barrier.
#[derive(Default)]
pub(crate) struct Named {
    /// Number of threads that meet, as the first one stated, and where.
    pub expected: Option<(u32, Access)>,
    pub arrived: u32,
    pub clock: Clock,
    pub latest: u64,
}

/// State of a CTA.
pub(crate) struct Cta {
    /// Index in the grid; `at`: along each axis.
    pub index: u32,
    pub at: [u32; 3],
    pub shared: Vec<u8>,
    pub shadow: Shadow,
    pub bars: BTreeMap<u32, Bar>,
    pub named: Vec<Named>,
    /// Registers that no warp owns.
    pub pool: u32,
    pub warpgroups: Vec<Warpgroup>,
    pub tensor: TensorMemory,
    /// Copies and products that access its shared memory, by their completions.
    pub reaches: Vec<Access>,
    /// Last accesses by warps of other CTAs.
    pub peers: Vec<Access>,
    /// The read of an answer that there is no more work.
    pub refused: Option<Access>,
    /// Number of warps that are not done.
    pub running: u32,
    /// Knowledge of its warps when they ended.
    pub last: Clock,
}

/// A cluster of CTAs that run at the same time.
#[derive(Default)]
pub(crate) struct Cluster {
    pub id: u32,
    pub blocks: Vec<Cta>,
    pub warps: Vec<Warp>,
    /// Number of components assigned so far.
    pub comps: u32,
    /// The cluster's barrier: its phase, warps that arrived, warps that ended without arriving, the knowledge released
    /// in this phase and in earlier ones, and the time of the last arrival.
    pub phase: u32,
    pub arrived: u32,
    pub absent: u32,
    pub clock: Clock,
    pub past: Clock,
    pub latest: u64,
    /// Number of pending events.
    pub pending: u32,
}

/// A pending event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A copy reads its source.
    Read(u32),
    /// The copy writes its destination.
    Write(u32),
    /// The copy signals its completion.
    Complete(u32),
    /// A warpgroup of a block of a cluster runs its next product.
    Product(u32, u32, u32),
    /// A queue of products into tensor memory, of a block of a cluster, does its next work.
    Tensor(u32, u32, u32),
}

/// Offsets in shared memory and addresses in global memory that an instruction accessed, with their sizes.
pub(crate) type Touches = (Vec<(u32, u32)>, Vec<(u64, u32)>);

/// The state of a running launch.
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
    /// Scheduler steps, or cycles.
    pub now: u64,
    pub copies: HashMap<u32, Copy>,
    pub next_copy: u32,
    /// Arrivals that wait for copies.
    pub after_copies: Vec<AfterCopies>,
    /// Knowledge released at words of global memory.
    pub words: HashMap<u64, Clock>,
    pub findings: Vec<Finding>,
    /// Whether the launch must stop.
    pub fatal: bool,
    /// Grows with every change that other warps can see.
    pub progress: u64,
    /// Steps left in the budget.
    pub budget: u64,
    pub counts: Vec<Counts>,
    pub timeline: Option<Timeline>,
    /// Scratch space for the accesses of an instruction.
    pub touches: Touches,
}

impl<'a> World<'a> {
    pub fn new(
        program: &'a Program,
        options: &'a Options,
        architecture: Architecture,
        memory: &'a mut Memory,
        args: &'a [Value],
        grid: [u32; 3],
    ) -> Self {
        let timed = options.order == Interleaving::Timed;
        World {
            program,
            options,
            architecture,
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

    /// Number of clusters in the grid.
    pub fn cluster_count(&self) -> u32 {
        let blocks: u64 = self.grid.iter().map(|&n| u64::from(n)).product();
        (blocks / u64::from(self.program.kernel.cluster)) as u32
    }

    /// The initial state of a cluster.
    pub fn new_cluster(&self, id: u32) -> Cluster {
        let kernel = &self.program.kernel;
        let (size, warps) = (kernel.cluster, kernel.threads / 32);
        let entry = Kernel::entry_registers(kernel.target, kernel.threads);
        let blocks = (0..size).map(|rank| {
            let index = id * size + rank;
            let at = [index % self.grid[0], index / self.grid[0] % self.grid[1], index / self.grid[0] / self.grid[1]];
            let bytes = u64::from(kernel.shared_bytes);
            Cta {
                index,
                at,
                shared: vec![0xff; bytes as usize],
                shadow: Shadow::new(bytes),
                bars: BTreeMap::new(),
                named: (0..kernel.target.arch.named_barriers).map(|_| Named::default()).collect(),
                pool: 0,
                warpgroups: (0..warps.div_ceil(4)).map(|_| Warpgroup::default()).collect(),
                tensor: TensorMemory::default(),
                reaches: Vec::new(),
                peers: Vec::new(),
                refused: None,
                running: warps,
                last: Clock::new(id),
            }
        });
        let register = Register { values: [0; 32], defined: 0, touched: 0, written_by: 0, read_by: 0, ready: 0 };
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

    /// Schedules an event at a time.
    pub fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    /// Schedules an event with a random delay: soon, later, or when nothing can continue without it.
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

    /// The participant of a fault, for a report.
    pub fn side(&self, block: u32, warp: u32, lane: Option<u32>, pc: u32) -> Party {
        let kernel = &self.program.kernel;
        let role = kernel.roles.iter().find(|r| (r.first_warp..r.first_warp + r.warps).contains(&warp));
        let inst = match self.program.steps.get(pc as usize) {
            Some(crate::program::Step::Op(i)) => self.program.ops[*i as usize].inst.name,
            _ => "branch",
        };
        let line = self.program.lines[(pc as usize).min(self.program.lines.len() - 1)].into();
        Party { block, role: role.map_or(String::new(), |r| r.name.clone()), warp, lane, inst, line }
    }

    pub fn side_of(&self, access: &Access) -> Party {
        self.side(access.block, access.warp, None, access.pc)
    }

    /// Records a finding, once for each pair of lines.
    pub fn report(&mut self, fault: Fault, what: String, address: Option<u64>, here: Party, other: Option<Party>) {
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

    /// Reports two conflicting accesses.
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
    /// A new component.
    pub fn component(&mut self) -> Comp {
        self.comps += 1;
        Comp { cluster: self.id, index: self.comps - 1 }
    }

    /// Index of a warp of a CTA.
    pub fn warp_at(&self, rank: usize, warp: u32) -> usize {
        rank * (self.warps.len() / self.blocks.len().max(1)) + warp as usize
    }
}

/// An access of a warp, for the records.
pub(crate) fn access_of(warp: &Warp, block: u32, pc: u32, strong: bool) -> Access {
    let who = Who::Warp { comp: warp.comp, time: warp.time };
    Access { who, pc, block, warp: warp.index, proxy: Proxy::Generic, strong, mask: 0, swizzle: None }
}

/// A snapshot of an issuer's knowledge.
pub(crate) type Snapshot = Rc<Clock>;
