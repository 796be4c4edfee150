//! An instruction is declared once, as a row of the table; a kernel is a list of uses of rows.
//!
//! A row holds the spelling of the instruction, its operands, its requirements, the unit that runs it, its effects on
//! memory and other threads, and its meaning. Printer, verifier, assembler report, counters and simulator all read the
//! row, so none of them keeps a list of its own.

use crate::arch::Arch;
use crate::machine::Machine;
use std::panic::Location;

/// The register classes of PTX that this crate uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A predicate, true or false.
    Pred,
    /// 16 bits.
    B16,
    /// 32 bits: integers and pairs of 16-bit floats.
    B32,
    /// A 32-bit float.
    F32,
    /// 64 bits: integers, addresses and matrix descriptors.
    B64,
}

impl Class {
    /// Every register class.
    pub const ALL: [Class; 5] = [Class::Pred, Class::B16, Class::B32, Class::F32, Class::B64];

    /// PTX type and register prefix for the declaration.
    pub(crate) fn spelling(self) -> (&'static str, &'static str) {
        match self {
            Class::Pred => ("pred", "%p"),
            Class::B16 => ("b16", "%h"),
            Class::B32 => ("b32", "%r"),
            Class::F32 => ("f32", "%f"),
            Class::B64 => ("b64", "%d"),
        }
    }
}

/// A virtual register of a kernel; the assembler assigns the physical register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg {
    /// Register class.
    pub class: Class,
    /// Index among the registers of its class.
    pub index: u32,
}

/// A memory space of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Device memory; addresses have 64 bits.
    Global,
    /// Shared memory of the CTA; addresses have 32 bits.
    Shared,
    /// Shared memory of any CTA of the cluster; addresses have 32 bits.
    Cluster,
    /// Kernel parameters.
    Param,
}

/// Kind of an operand: the arguments that a use may give for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A register of a class; an operand that is read may also be an immediate.
    Value(Class),
    /// A register of a class, never an immediate.
    Register(Class),
    /// A list of registers of a class.
    List(Class),
    /// One register of a class, or a list of several that are adjacent in memory.
    Vector(Class),
    /// A list of registers, or one 64-bit register that holds a matrix descriptor.
    ListOrTile(Class),
    /// An address in a space, with a constant offset in bytes.
    Address(Space),
    /// An address in tensor memory, with a constant offset in columns.
    TensorAddress,
    /// A constant that is part of the text, from one of these ranges.
    Number(&'static [Steps]),
    /// A word that is part of the text, from this list.
    Word(&'static [&'static str]),
    /// A kernel parameter, given by name in the text.
    Param,
}

/// A range of constants with a fixed step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// Smallest constant.
    pub first: u64,
    /// Largest constant.
    pub last: u64,
    /// Difference between neighbours.
    pub step: u64,
}

impl Steps {
    /// Every constant of the range.
    pub fn all(self) -> impl Iterator<Item = u64> {
        (self.first..=self.last).step_by(self.step as usize)
    }
    fn has(self, n: u64) -> bool {
        (self.first..=self.last).contains(&n) && (n - self.first).is_multiple_of(self.step)
    }
}

/// Direction of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// The instruction reads the operand.
    In,
    /// The instruction writes the operand.
    Out,
    /// The instruction reads and writes the operand.
    Both,
}

/// An operand of a row. The row's text contains its name in braces.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// Name in the row's text.
    pub name: &'static str,
    /// Whether the instruction reads or writes it.
    pub flow: Flow,
    /// Arguments that a use may give.
    pub kind: Kind,
}

/// An operand that the instruction writes.
pub(crate) const fn out(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Out, kind: Kind::Value(class) }
}
/// An operand that the instruction reads, from a register or an immediate.
pub(crate) const fn arg(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::In, kind: Kind::Value(class) }
}
/// An operand that the instruction reads from a register only.
pub(crate) const fn reg(name: &'static str, class: Class) -> Operand {
    of(name, Kind::Register(class))
}
/// A list of registers that the instruction writes.
pub(crate) const fn outs(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Out, kind: Kind::List(class) }
}
/// A list of registers that the instruction reads.
pub(crate) const fn args(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::In, kind: Kind::List(class) }
}
/// One or more registers that a load writes from adjacent memory.
pub(crate) const fn loaded(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Out, kind: Kind::Vector(class) }
}
/// One or more registers that a store writes to adjacent memory.
pub(crate) const fn stored(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::In, kind: Kind::Vector(class) }
}
/// A list of registers that the instruction reads and writes, such as an accumulator.
pub(crate) const fn both(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Both, kind: Kind::List(class) }
}
/// An input operand of any kind.
pub(crate) const fn of(name: &'static str, kind: Kind) -> Operand {
    Operand { name, flow: Flow::In, kind }
}
/// An address operand.
pub(crate) const fn at(name: &'static str, space: Space) -> Operand {
    of(name, Kind::Address(space))
}
/// A constant in the instruction's text, such as a shape.
pub(crate) const fn number(name: &'static str, allowed: &'static [Steps]) -> Operand {
    of(name, Kind::Number(allowed))
}
/// A range of constants with a fixed step.
pub(crate) const fn steps(first: u64, last: u64, step: u64) -> Steps {
    Steps { first, last, step }
}
/// A word in the instruction's text, such as a type or a scope.
pub(crate) const fn word(name: &'static str, words: &'static [&'static str]) -> Operand {
    of(name, Kind::Word(words))
}

/// The architectures that have an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Archs {
    /// Every architecture from this compute capability (times ten) on.
    From(u32),
    /// These compute capabilities (times ten) alone, in the variant with a suffix.
    Only(&'static [u32]),
}

impl std::fmt::Display for Archs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Archs::From(sm) => write!(f, "sm_{sm} or later"),
            Archs::Only(all) => {
                let names: Vec<String> = all.iter().map(|sm| format!("sm_{sm}a")).collect();
                write!(f, "{} alone", names.join(", "))
            }
        }
    }
}

/// The PTX version and the architectures that accept an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Oldest PTX version that has the instruction.
    pub ptx: (u8, u8),
    /// Architectures that have the instruction.
    pub archs: Archs,
}

impl Needs {
    /// Available from this PTX version and this compute capability (times ten) on.
    pub const fn from(ptx: (u8, u8), sm: u32) -> Self {
        Needs { ptx, archs: Archs::From(sm) }
    }
    /// Hopper only.
    pub const HOPPER_ONLY: Needs = Needs { ptx: (8, 0), archs: Archs::Only(&[90]) };
    /// Hopper and data-centre Blackwell. For sm_120a the assembler accepts some of these rows too, but replaces the
    /// instruction by a call of a routine.
    pub const DATA_CENTER: Needs = Needs { ptx: (8, 0), archs: Archs::Only(&[90, 100, 103]) };
    /// Hopper and every Blackwell, each in its architecture-specific variant.
    pub const HOPPER_AND_BLACKWELL: Needs = Needs { ptx: (8, 0), archs: Archs::Only(&[90, 100, 103, 120, 121]) };
    /// Every Blackwell, in its architecture-specific variant: arithmetic on two floats in a register.
    pub const BLACKWELL: Needs = Needs { ptx: (8, 6), archs: Archs::Only(&[100, 103, 120, 121]) };
    /// Data-centre Blackwell: tensor memory.
    pub const TCGEN05: Needs = Needs { ptx: (8, 6), archs: Archs::Only(&[100, 103]) };
    /// Ampere and later.
    pub const AMPERE: Needs = Needs::from((7, 0), 80);
    /// Hopper and later.
    pub const HOPPER: Needs = Needs::from((8, 0), 90);

    /// Whether an architecture has the instruction.
    pub fn runs_on(&self, arch: &Arch) -> bool {
        match self.archs {
            Archs::From(sm) => arch.sm >= sm,
            Archs::Only(all) => arch.suffix == "a" && all.contains(&arch.sm),
        }
    }
}

/// The unit of an SM that runs an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// f32 multiply-add.
    Fma,
    /// Integers, logic, selection, comparison.
    Alu,
    /// Exponential, logarithm, reciprocal, square root.
    Special,
    /// Conversions between formats.
    Convert,
    /// Exchanges between lanes, such as shuffles and votes.
    Warp,
    /// Barriers, fences, mbarriers.
    Barrier,
    /// Loads and stores of shared memory.
    Shared,
    /// Loads and stores of global memory, and of parameters.
    Global,
    /// TMA.
    Copy,
    /// The tensor cores.
    Tensor,
    /// No unit: control flow.
    Control,
}

/// The group of threads that must execute an instruction together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Together {
    /// Each thread executes the instruction independently.
    Thread,
    /// All threads of a warp together.
    Warp,
    /// All threads of a warpgroup together: four consecutive warps.
    Warpgroup,
}

/// Effect of an instruction beyond its registers, as other threads or later instructions see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// No effect beyond the output registers.
    Pure,
    /// No effect, but the result depends on the time of execution (clocks, active lanes).
    Volatile,
    /// Reads memory.
    Read(Space),
    /// Writes memory.
    Write(Space),
    /// Reads and writes memory atomically.
    Update(Space),
    /// Starts an asynchronous operation.
    Start,
    /// Waits for asynchronous operations or for other threads.
    Wait,
    /// Signals other threads, or orders memory accesses.
    Signal,
}

/// A row of the instruction table: everything that the project knows about an instruction.
#[derive(Debug)]
pub struct Inst {
    /// Unique key by which the table is sorted and searched.
    pub name: &'static str,
    /// Assembly text, with operand names in braces.
    pub text: &'static str,
    /// Operands, in the order in which a use gives its arguments.
    pub operands: &'static [Operand],
    /// Whether words, constants and list lengths of a use go together. A use that fails this test is invalid.
    pub allowed: fn(&Op) -> bool,
    /// PTX version and architectures that have it.
    pub needs: Needs,
    /// Unit that it occupies.
    pub unit: Unit,
    /// Group of threads that must execute it together.
    pub together: Together,
    /// Effect that other threads or later instructions can see.
    pub effect: Effect,
    /// Effect on a simulated machine, for all active lanes of a warp.
    pub meaning: fn(&mut dyn Machine, &Op),
    /// Chapter of the PTX manual that describes it.
    pub source: &'static str,
}

impl PartialEq for Inst {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// The argument that a use of a row gives for an operand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arg {
    /// One register.
    Reg(Reg),
    /// An immediate; floats are stored as their bits.
    Imm(u64),
    /// A list of registers.
    List(Box<[Reg]>),
    /// An address: a base plus an offset in bytes.
    Address(Base, i32),
    /// A word of the instruction's text.
    Word(&'static str),
    /// The index of a kernel parameter.
    Param(u32),
}

/// Base of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// A register that holds an address.
    Reg(Reg),
    /// The kernel parameter with this index.
    Param(u32),
}

/// One instruction of a kernel: a row with its arguments.
#[derive(Debug, Clone)]
pub struct Op {
    /// Row of the table.
    pub inst: &'static Inst,
    /// One argument for each operand of the row.
    pub args: Box<[Arg]>,
    /// Rust source line that built the instruction.
    pub at: &'static Location<'static>,
}

impl Op {
    /// The register list given for operand `i`.
    ///
    /// # Panics
    /// If the operand is not a list; the meaning of a row knows its operands.
    pub fn list(&self, i: usize) -> &[Reg] {
        match &self.args[i] {
            Arg::List(regs) => regs,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a list", self.inst.name),
        }
    }
    /// The register given for operand `i`.
    ///
    /// # Panics
    /// If the operand is not a register.
    pub fn reg(&self, i: usize) -> Reg {
        match &self.args[i] {
            Arg::Reg(reg) => *reg,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a register", self.inst.name),
        }
    }
    /// The constant given for operand `i`.
    ///
    /// # Panics
    /// If the operand is not a constant.
    pub fn number(&self, i: usize) -> u64 {
        match &self.args[i] {
            Arg::Imm(n) => *n,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a constant", self.inst.name),
        }
    }
    /// The word given for operand `i`.
    ///
    /// # Panics
    /// If the operand is not a word.
    pub fn word(&self, i: usize) -> &'static str {
        match &self.args[i] {
            Arg::Word(w) => w,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a word", self.inst.name),
        }
    }

    /// Checks a use against its row. The error text continues a sentence that starts with the row's name.
    pub fn check(&self) -> Result<(), String> {
        if self.args.len() != self.inst.operands.len() {
            return Err(format!("has {} operands, {} were given", self.inst.operands.len(), self.args.len()));
        }
        for (operand, arg) in self.inst.operands.iter().zip(&self.args) {
            let class = |reg: &Reg, class: Class| reg.class == class;
            let fits = match (operand.kind, arg) {
                (Kind::Value(c) | Kind::Register(c), Arg::Reg(reg)) => class(reg, c),
                (Kind::Value(_), Arg::Imm(_)) => operand.flow == Flow::In,
                (Kind::List(c) | Kind::Vector(c) | Kind::ListOrTile(c), Arg::List(regs)) => {
                    !regs.is_empty() && regs.iter().all(|reg| class(reg, c))
                }
                (Kind::ListOrTile(_), Arg::Reg(reg)) => class(reg, Class::B64),
                (Kind::Address(Space::Param), Arg::Address(Base::Param(_), _)) => true,
                (Kind::Address(Space::Param), _) => false,
                (Kind::Address(Space::Global), Arg::Address(Base::Reg(reg), _)) => class(reg, Class::B64),
                (Kind::Address(_) | Kind::TensorAddress, Arg::Address(Base::Reg(reg), _)) => class(reg, Class::B32),
                (Kind::Number(allowed), Arg::Imm(n)) => allowed.iter().any(|steps| steps.has(*n)),
                (Kind::Word(words), Arg::Word(word)) => words.contains(word),
                (Kind::Param, Arg::Param(_)) => true,
                _ => false,
            };
            if !fits {
                return Err(format!("does not take {arg:?} as `{}`, allowed: {:?}", operand.name, operand.kind));
            }
        }
        if (self.inst.allowed)(self) { Ok(()) } else { Err(format!("does not exist with {:?}", self.args)) }
    }

    /// Whether the length of a list equals the digit in a word: ".v2", "x2" and "2d" mean two, "" means one.
    pub(crate) fn counts(&self, list: usize, word: usize) -> bool {
        let digit = self.word(word).chars().find_map(|c| c.to_digit(10)).unwrap_or(1);
        self.list(list).len() == digit as usize
    }

    /// Registers that the instruction reads.
    pub fn reads(&self) -> impl Iterator<Item = Reg> {
        self.flowing(|flow| flow != Flow::Out)
    }
    /// Registers that the instruction writes.
    pub fn writes(&self) -> impl Iterator<Item = Reg> {
        self.flowing(|flow| flow != Flow::In)
    }
    fn flowing(&self, wanted: fn(Flow) -> bool) -> impl Iterator<Item = Reg> {
        self.inst.operands.iter().zip(&self.args).filter(move |(o, _)| wanted(o.flow)).flat_map(|(_, arg)| {
            let regs: Vec<Reg> = match arg {
                Arg::Reg(r) | Arg::Address(Base::Reg(r), _) => vec![*r],
                Arg::List(regs) => regs.to_vec(),
                _ => Vec::new(),
            };
            regs
        })
    }
}
