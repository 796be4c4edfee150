//! One warp, alone: enough of a machine to execute rows and kernels.
//!
//! What happens later on hardware (copies) happens at once here, so waits never wait. What needs more than a warp
//! (boxes of tensors, other blocks, products of warpgroups) is only written down.

use super::uses::Registers;
use fulgurite_ptx::inst::{Arg, Base, Class, Flow, Inst, Kind, Op, Reg, Space};
use fulgurite_ptx::kernel::{Kernel, Stmt};
use fulgurite_ptx::machine::{
    Done, Fence, Group, Machine, Mbarrier, Meeting, MemoryAddress, MemoryOrder, Queue, Special, Transfer, WARP, lanes,
};
use fulgurite_ptx::model;
use fulgurite_ptx::product::Product;
use fulgurite_ptx::tcgen05::TensorAction;
use std::collections::HashMap;
use std::panic::Location;

/// Where global memory begins.
pub const GLOBAL: u64 = 0x10_0000;
/// Where dynamic shared memory begins.
pub const SHARED: u32 = 1024;

/// A barrier in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counting {
    pub phase: u32,
    pub expected: u32,
    pub pending: u32,
    pub bytes: i64,
}

impl Counting {
    fn step(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.expected;
        }
    }
}

/// A warp with memory of its own.
#[derive(Default)]
pub struct Warp {
    pub active: u32,
    pub global: Vec<u8>,
    pub shared: Vec<u8>,
    pub params: Vec<Vec<u8>>,
    pub barriers: HashMap<u64, Counting>,
    pub fences: Vec<Fence>,
    pub meetings: Vec<Meeting>,
    pub groups: Vec<(Queue, Group)>,
    /// Copies and products that one warp cannot do.
    pub transfers: Vec<Transfer>,
    pub products: Vec<Product>,
    /// What was done with tensor memory, and its cells, by address.
    pub actions: Vec<(u32, TensorAction)>,
    pub tensor: HashMap<u32, u32>,
    pub trapped: u32,
    pub block: u32,
    registers: HashMap<Reg, [Option<u64>; WARP as usize]>,
}

impl Warp {
    /// With so many bytes of global and of shared memory.
    pub fn new(global: usize, shared: usize) -> Self {
        Warp { active: u32::MAX, global: vec![0; global], shared: vec![0; shared], ..Warp::default() }
    }

    /// Executes a kernel's statements.
    pub fn run(&mut self, kernel: &Kernel) {
        self.block(&kernel.body, u32::MAX);
    }

    /// Executes statements for some lanes; those that did not leave the loop around them.
    fn block(&mut self, block: &[Stmt], mut mask: u32) -> u32 {
        for stmt in block {
            if mask == 0 {
                break;
            }
            match stmt {
                Stmt::Op(op) => {
                    op.check().unwrap_or_else(|what| panic!("{}: {} {what}", op.at, op.inst.name));
                    self.active = mask;
                    (op.inst.meaning)(self, op);
                }
                Stmt::If { cond, then, otherwise, .. } => {
                    let holds = self.holds(*cond, mask);
                    mask = self.block(then, holds) | self.block(otherwise, mask & !holds);
                }
                Stmt::Loop { body, .. } => {
                    let mut inside = mask;
                    while inside != 0 {
                        inside = self.block(body, inside);
                    }
                }
                Stmt::Break { cond, when, .. } => {
                    let holds = self.holds(*cond, mask);
                    mask = if *when { mask & !holds } else { holds };
                }
            }
        }
        mask
    }
    fn holds(&mut self, cond: Reg, mask: u32) -> u32 {
        lanes(mask).filter(|&lane| self.get(lane, cond) == 1).fold(0, |bits, lane| bits | 1 << lane)
    }

    fn bytes(&mut self, at: MemoryAddress, count: usize) -> &mut [u8] {
        let (memory, start) = match at.space {
            Space::Global => (&mut self.global, at.address.checked_sub(GLOBAL)),
            _ => (&mut self.shared, at.address.checked_sub(SHARED.into())),
        };
        let start = start.unwrap_or_else(|| panic!("{at:?} lies before the memory")) as usize;
        assert!(
            at.address.is_multiple_of(count.next_power_of_two().min(16) as u64),
            "{at:?} is not aligned to {count}"
        );
        let size = memory.len();
        memory.get_mut(start..start + count).unwrap_or_else(|| panic!("{at:?}: {count} bytes past {size}"))
    }

    fn barrier(&mut self, at: MemoryAddress) -> &mut Counting {
        self.barriers.get_mut(&at.address).unwrap_or_else(|| panic!("no barrier at {at:?}"))
    }
    fn delivered(&mut self, done: Done, bytes: usize) {
        if let Done::Mbarrier(at) = done {
            let barrier = self.barrier(at);
            barrier.bytes -= bytes as i64;
            barrier.step();
        }
    }
}

impl Machine for Warp {
    fn active(&self) -> u32 {
        self.active
    }
    fn get(&mut self, lane: u32, reg: Reg) -> u64 {
        let known = self.registers.get(&reg).and_then(|all| all[lane as usize]);
        known.unwrap_or_else(|| panic!("lane {lane} reads {reg:?}, which nothing wrote"))
    }
    fn set(&mut self, lane: u32, reg: Reg, bits: u64) {
        let limit = match reg.class {
            Class::Pred => 1,
            Class::B16 => 0xffff,
            Class::B32 | Class::F32 => 0xffff_ffff,
            Class::B64 => u64::MAX,
        };
        assert!(bits <= limit, "{bits:#x} does not fit in {reg:?}");
        self.registers.entry(reg).or_default()[lane as usize] = Some(bits);
    }
    fn special(&mut self, lane: u32, which: Special) -> u64 {
        match which {
            Special::Thread | Special::Lane => lane.into(),
            Special::Cta => self.block.into(),
            Special::LanesBelow => (1 << lane) - 1,
            Special::Blocks | Special::Clusters | Special::ClusterSize => 1,
            _ => 0,
        }
    }
    fn parameter(&mut self, number: u32, offset: i32, bytes: &mut [u8]) {
        let all = &self.params[number as usize][offset as usize..];
        bytes.copy_from_slice(&all[..bytes.len()]);
    }
    fn parameter_address(&mut self, number: u32) -> u64 {
        u64::from(number) * 128
    }
    fn shared_base(&mut self) -> u32 {
        SHARED
    }
    fn peer(&mut self, shared: u32, rank: u32) -> u32 {
        shared | rank << 24
    }
    fn load(&mut self, _: u32, at: MemoryAddress, _: MemoryOrder, bytes: &mut [u8]) {
        bytes.copy_from_slice(self.bytes(at, bytes.len()));
    }
    fn store(&mut self, _: u32, at: MemoryAddress, _: MemoryOrder, bytes: &[u8]) {
        self.bytes(at, bytes.len()).copy_from_slice(bytes);
    }
    fn update(
        &mut self,
        _: u32,
        at: MemoryAddress,
        _: MemoryOrder,
        bytes: u32,
        change: &mut dyn FnMut(u64) -> u64,
    ) -> u64 {
        let place = self.bytes(at, bytes as usize);
        let mut word = [0; 8];
        word[..bytes as usize].copy_from_slice(place);
        let old = u64::from_le_bytes(word);
        place.copy_from_slice(&change(old).to_le_bytes()[..bytes as usize]);
        old
    }
    fn mbarrier(&mut self, _: u32, at: MemoryAddress, what: Mbarrier) {
        if let Mbarrier::Init(n) = what {
            self.barriers.insert(at.address, Counting { phase: 0, expected: n, pending: n, bytes: 0 });
            return;
        }
        if what == Mbarrier::Invalidate {
            self.barriers.remove(&at.address);
            return;
        }
        let barrier = self.barrier(at);
        match what {
            Mbarrier::Arrive(n, _) => barrier.pending -= n,
            Mbarrier::ArriveExpect(bytes, _) => {
                barrier.bytes += i64::from(bytes);
                barrier.pending -= 1;
            }
            Mbarrier::Expect(bytes) => barrier.bytes += i64::from(bytes),
            Mbarrier::Complete(bytes) => barrier.bytes -= i64::from(bytes),
            Mbarrier::ArriveDrop(n) => {
                barrier.expected -= n;
                barrier.pending -= n;
            }
            Mbarrier::ArriveAfterCopies(expected) => barrier.pending -= u32::from(expected),
            Mbarrier::Init(_) | Mbarrier::Invalidate => {}
        }
        barrier.step();
    }
    fn mbarrier_done(&mut self, _: u32, at: MemoryAddress, parity: u32, _: MemoryOrder) -> bool {
        self.barrier(at).phase & 1 != parity
    }
    fn transfer(&mut self, _: u32, what: Transfer) {
        match what {
            Transfer::Bytes { to, from, bytes, padded, reduce: None, multicast: None, done } => {
                let mut data = vec![0; padded as usize];
                data[..bytes as usize].copy_from_slice(self.bytes(from, bytes as usize));
                self.bytes(to, data.len()).copy_from_slice(&data);
                self.delivered(done, data.len());
            }
            Transfer::Words { to, data, reduce, done } => {
                for (i, word) in data.chunks_exact(4).enumerate() {
                    let at = MemoryAddress { address: to.address + 4 * i as u64, ..to };
                    let x = u64::from(u32::from_le_bytes(word.try_into().expect("four bytes")));
                    self.update(0, at, MemoryOrder::Weak, 4, &mut |old| match reduce {
                        Some((way, number)) => model::combine(way, number, old, x),
                        None => x,
                    });
                }
                self.delivered(done, data.len());
            }
            Transfer::Prefetch => {}
            other => self.transfers.push(other),
        }
    }
    fn product(&mut self, what: Product) {
        self.products.push(what);
    }
    fn tensor(&mut self, lane: u32, what: TensorAction) {
        self.actions.push((lane, what));
    }
    fn tensor_load(&mut self, from: &[u32; WARP as usize], to: &[Reg]) {
        for (lane, (column, &reg)) in lanes(self.active).flat_map(|lane| (0..).zip(to).map(move |to| (lane, to))) {
            let cell = self.tensor.get(&(from[lane as usize] + column)).copied().unwrap_or(0);
            self.set(lane, reg, cell.into());
        }
    }
    fn tensor_store(&mut self, to: &[u32; WARP as usize], from: &[Reg]) {
        for (lane, (column, &reg)) in lanes(self.active).flat_map(|lane| (0..).zip(from).map(move |from| (lane, from)))
        {
            let bits = self.get(lane, reg) as u32;
            self.tensor.insert(to[lane as usize] + column, bits);
        }
    }
    fn group(&mut self, _: u32, queue: Queue, what: Group) {
        self.groups.push((queue, what));
    }
    fn fence(&mut self, _: u32, what: Fence) {
        self.fences.push(what);
    }
    fn meet(&mut self, what: Meeting) {
        self.meetings.push(what);
    }
    fn registers(&mut self, _: u32, _: bool) {}
    fn grid(&mut self, _: bool) {}
    fn trap(&mut self, lane: u32) {
        self.trapped |= 1 << lane;
    }
}

/// What stands for an operand in a use under test.
#[derive(Debug, Clone)]
pub enum Given {
    /// A value in each lane.
    Lanes([u64; WARP as usize]),
    /// Registers, each with a value in each lane.
    List(Vec<[u64; WARP as usize]>),
    /// So many registers that are written.
    Room(usize),
    /// An address in each lane.
    At([u64; WARP as usize]),
    Word(&'static str),
    Number(u64),
}

/// The same value in every lane.
pub fn same(x: u64) -> Given {
    Given::Lanes([x; WARP as usize])
}
/// An address in every lane.
pub fn at(x: u64) -> Given {
    Given::At([x; WARP as usize])
}

/// Executes one use of a row: registers that are written are made, the rest is given in order. What was written, by
/// register and lane.
#[track_caller]
pub fn execute(warp: &mut Warp, inst: &'static Inst, given: &[Given]) -> Vec<[u64; WARP as usize]> {
    let mut registers = Registers::default();
    let mut given = given.iter();
    let mut results = Vec::new();
    let fill = |warp: &mut Warp, reg: Reg, values: &[u64; WARP as usize]| {
        (0..WARP).for_each(|lane| warp.set(lane, reg, values[lane as usize]));
    };
    let args = inst.operands.iter().map(|operand| match (operand.kind, operand.flow) {
        (Kind::Value(class), Flow::Out) => {
            let reg = registers.one(class);
            results.push(reg);
            Arg::Reg(reg)
        }
        (kind, _) => match (kind, given.next().unwrap_or_else(|| panic!("nothing is given for {}", operand.name))) {
            (Kind::Value(class) | Kind::Register(class), Given::Lanes(values)) => {
                let reg = registers.one(class);
                fill(warp, reg, values);
                Arg::Reg(reg)
            }
            (Kind::List(class) | Kind::Vector(class), Given::List(all)) => {
                let regs = registers.some(class, all.len());
                regs.iter().zip(all).for_each(|(&reg, values)| fill(warp, reg, values));
                Arg::List(regs)
            }
            (Kind::List(class) | Kind::Vector(class), Given::Room(n)) => {
                let regs = registers.some(class, *n);
                results.extend(&regs);
                Arg::List(regs)
            }
            (Kind::TensorAddress, Given::At(values)) => {
                let reg = registers.one(Class::B32);
                fill(warp, reg, values);
                Arg::Address(Base::Reg(reg), 0)
            }
            (Kind::Address(space), Given::At(values)) => {
                let reg = registers.one(if space == Space::Global { Class::B64 } else { Class::B32 });
                fill(warp, reg, values);
                Arg::Address(Base::Reg(reg), 0)
            }
            (Kind::Word(_), Given::Word(word)) => Arg::Word(word),
            (Kind::Number(_), Given::Number(n)) => Arg::Imm(*n),
            (kind, given) => panic!("{given:?} is no {kind:?}"),
        },
    });
    let op = Op { inst, args: args.collect(), at: Location::caller() };
    assert!(given.next().is_none(), "{} takes less", inst.name);
    op.check().unwrap_or_else(|what| panic!("{} {what}", inst.name));
    (inst.meaning)(warp, &op);
    let active = warp.active;
    let read =
        |reg: Reg| std::array::from_fn(|lane| if active >> lane & 1 == 1 { warp.get(lane as u32, reg) } else { 0 });
    results.into_iter().map(read).collect()
}

/// Executes a row that computes one register from others, all lanes alike.
#[track_caller]
pub fn compute(inst: &'static Inst, inputs: &[u64], rest: &[Given]) -> u64 {
    let given: Vec<Given> = inputs.iter().map(|&x| same(x)).chain(rest.iter().cloned()).collect();
    let all = execute(&mut Warp::new(0, 0), inst, &given);
    assert!(all[0].iter().all(|x| *x == all[0][0]), "lanes differ");
    all[0][0]
}
