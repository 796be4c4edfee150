//! An instruction is declared once, as a row; a kernel is a list of uses of rows.
//!
//! A row says how the instruction is spelled, what its operands are, what it needs, which unit runs it, what
//! others can see of it, and what it does. Printer, verifier, assembler report, counters and simulator read the
//! row and keep no list of their own.

use crate::arch::Arch;
use crate::machine::Machine;
use std::panic::Location;

/// The kinds of register that PTX has and that we use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A truth value.
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
    /// Every class.
    pub const ALL: [Class; 5] = [Class::Pred, Class::B16, Class::B32, Class::F32, Class::B64];

    /// Type and prefix in a declaration.
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

/// A virtual register of a kernel: the assembler maps it to a real one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg {
    /// Which kind.
    pub class: Class,
    /// Its number among those of its kind.
    pub index: u32,
}

/// Memory that an address may point to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Device memory; addresses have 64 bits.
    Global,
    /// The block's shared memory; addresses have 32 bits.
    Shared,
    /// Shared memory of any block of the cluster; addresses have 32 bits.
    Cluster,
    /// The parameters of the kernel.
    Param,
}

/// What an operand may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A register of a class, or an immediate where it is read.
    Value(Class),
    /// A register of a class, and no immediate.
    Register(Class),
    /// A list of registers of a class.
    List(Class),
    /// One register of a class, or a list of several that lie together in memory.
    Vector(Class),
    /// A list of registers, or one register of 64 bits that describes a tile.
    ListOrTile(Class),
    /// An address in a space, with a constant offset in bytes.
    Address(Space),
    /// A constant that is part of the text: one of these.
    Number(&'static [Steps]),
    /// One of a few words that are part of the text.
    Word(&'static [&'static str]),
    /// The name of a parameter.
    Param,
}

/// Constants in equal steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// The smallest.
    pub first: u64,
    /// The largest.
    pub last: u64,
    /// From one to the next.
    pub step: u64,
}

impl Steps {
    /// Every constant.
    pub fn all(self) -> impl Iterator<Item = u64> {
        (self.first..=self.last).step_by(self.step as usize)
    }
    fn has(self, n: u64) -> bool {
        (self.first..=self.last).contains(&n) && (n - self.first).is_multiple_of(self.step)
    }
}

/// Which way an operand flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Read.
    In,
    /// Written.
    Out,
    /// Read and written.
    Both,
}

/// An operand of a row; its name stands in braces in the row's text.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// Name in the text.
    pub name: &'static str,
    /// Direction.
    pub flow: Flow,
    /// What may stand there.
    pub kind: Kind,
}

/// An operand that is written.
pub(crate) const fn out(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Out, kind: Kind::Value(class) }
}
/// An operand that is read.
pub(crate) const fn arg(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::In, kind: Kind::Value(class) }
}
/// An operand that is read from a register only.
pub(crate) const fn reg(name: &'static str, class: Class) -> Operand {
    of(name, Kind::Register(class))
}
/// A list of registers that are written.
pub(crate) const fn outs(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Out, kind: Kind::List(class) }
}
/// A list of registers that are read.
pub(crate) const fn args(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::In, kind: Kind::List(class) }
}
/// One or more registers that are written with what lies together in memory.
pub(crate) const fn loaded(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Out, kind: Kind::Vector(class) }
}
/// One or more registers that are read, for memory where they lie together.
pub(crate) const fn stored(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::In, kind: Kind::Vector(class) }
}
/// A list of registers that are read and written.
pub(crate) const fn both(name: &'static str, class: Class) -> Operand {
    Operand { name, flow: Flow::Both, kind: Kind::List(class) }
}
/// An operand with any kind.
pub(crate) const fn of(name: &'static str, kind: Kind) -> Operand {
    Operand { name, flow: Flow::In, kind }
}
/// An address.
pub(crate) const fn at(name: &'static str, space: Space) -> Operand {
    of(name, Kind::Address(space))
}
/// A constant of the text.
pub(crate) const fn number(name: &'static str, allowed: &'static [Steps]) -> Operand {
    of(name, Kind::Number(allowed))
}
/// Constants in equal steps.
pub(crate) const fn steps(first: u64, last: u64, step: u64) -> Steps {
    Steps { first, last, step }
}
/// A word of the text.
pub(crate) const fn word(name: &'static str, words: &'static [&'static str]) -> Operand {
    of(name, Kind::Word(words))
}

/// Which architectures have an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Archs {
    /// From this compute capability (times ten) on.
    From(u32),
    /// These alone, in the variant with their suffix.
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
    /// Version of the PTX language.
    pub ptx: (u8, u8),
    /// The architectures.
    pub archs: Archs,
}

impl Needs {
    /// From a PTX version and an architecture on.
    pub const fn from(ptx: (u8, u8), sm: u32) -> Self {
        Needs { ptx, archs: Archs::From(sm) }
    }
    /// Hopper alone.
    pub const HOPPER_ONLY: Needs = Needs { ptx: (8, 0), archs: Archs::Only(&[90]) };
    /// Hopper and Blackwell of data centres. The assembler takes some of these rows for sm_120a too, and calls a routine.
    pub const DATA_CENTER: Needs = Needs { ptx: (8, 0), archs: Archs::Only(&[90, 100, 103]) };
    /// Hopper and every Blackwell, each in its own variant.
    pub const HOPPER_AND_BLACKWELL: Needs = Needs { ptx: (8, 0), archs: Archs::Only(&[90, 100, 103, 120, 121]) };
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

/// Which part of a multiprocessor runs an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// Multiply-add of f32.
    Fma,
    /// Integers, logic, selection, comparison.
    Alu,
    /// Exponential, logarithm, reciprocal, square root.
    Special,
    /// Conversions between formats.
    Convert,
    /// PeerTiles between lanes.
    Warp,
    /// Barriers, fences, mbarriers.
    Barrier,
    /// Loads and stores of shared memory.
    Shared,
    /// Loads and stores of global memory, and of parameters.
    Global,
    /// The copy engine.
    Copy,
    /// The tensor cores.
    Tensor,
    /// Nothing: it only steers.
    Control,
}

/// Who must execute an instruction together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Together {
    /// Each thread for itself.
    Thread,
    /// All threads of a warp.
    Warp,
    /// All threads of four consecutive warps.
    Warpgroup,
}

/// What another thread, or the same one later, can see of an instruction beside its registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    Pure,
    /// It depends on when it is executed (clocks, active lanes).
    Volatile,
    /// Reads memory.
    Read(Space),
    /// Writes memory.
    Write(Space),
    /// Reads and writes memory in one step.
    Update(Space),
    /// Starts something that ends later.
    Start,
    /// Waits for what was started, or for other threads.
    Wait,
    /// Tells other threads, or orders memory.
    Signal,
}

/// A row of the table: everything there is to know about an instruction.
#[derive(Debug)]
pub struct Inst {
    /// What the table is sorted and looked up by; unique.
    pub name: &'static str,
    /// What the assembler reads, operands by name in braces.
    pub text: &'static str,
    /// Operands, in the order in which uses give them.
    pub operands: &'static [Operand],
    /// Which of the words, constants and lengths of lists go together; a use for which it is false does not exist.
    pub allowed: fn(&Op) -> bool,
    /// First version and target that accept it.
    pub needs: Needs,
    /// Which unit it occupies.
    pub unit: Unit,
    /// Who executes it together.
    pub together: Together,
    /// What others can see.
    pub effect: Effect,
    /// What it does to a machine, for all active lanes of a warp.
    pub meaning: fn(&mut dyn Machine, &Op),
    /// The chapter of the PTX manual it was read from.
    pub source: &'static str,
}

impl PartialEq for Inst {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// What a use of a row gives for an operand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arg {
    /// A register.
    Reg(Reg),
    /// An immediate; floats as their bits.
    Imm(u64),
    /// Registers.
    List(Box<[Reg]>),
    /// An address: a register or constant, plus bytes.
    Address(Base, i32),
    /// A word of the text.
    Word(&'static str),
    /// The number of a parameter.
    Param(u32),
}

/// What an address starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// A register.
    Reg(Reg),
    /// A parameter.
    Param(u32),
}

/// A use of a row in a kernel.
#[derive(Debug, Clone)]
pub struct Op {
    /// The row.
    pub inst: &'static Inst,
    /// One for each operand of the row.
    pub args: Box<[Arg]>,
    /// The Rust line that built it.
    pub at: &'static Location<'static>,
}

impl Op {
    /// The list of registers that an operand gives.
    ///
    /// # Panics
    /// If the operand is no list; a row's meaning knows which of its operands are.
    pub fn list(&self, i: usize) -> &[Reg] {
        match &self.args[i] {
            Arg::List(regs) => regs,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a list", self.inst.name),
        }
    }
    /// The register that an operand gives.
    ///
    /// # Panics
    /// If the operand is no register.
    pub fn reg(&self, i: usize) -> Reg {
        match &self.args[i] {
            Arg::Reg(reg) => *reg,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a register", self.inst.name),
        }
    }
    /// The constant that an operand gives.
    ///
    /// # Panics
    /// If the operand is no constant.
    pub fn number(&self, i: usize) -> u64 {
        match &self.args[i] {
            Arg::Imm(n) => *n,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a constant", self.inst.name),
        }
    }
    /// The word that an operand gives.
    ///
    /// # Panics
    /// If the operand is no word.
    pub fn word(&self, i: usize) -> &'static str {
        match &self.args[i] {
            Arg::Word(w) => w,
            other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a word", self.inst.name),
        }
    }

    /// What is wrong with the use as an instance of its row, in words that follow the row's name.
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
                (Kind::Address(_), Arg::Address(Base::Reg(reg), _)) => class(reg, Class::B32),
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

    /// Whether a list has as many registers as the number in a word says: ".v2", "x2" and "2d" say two, "" says one.
    pub(crate) fn counts(&self, list: usize, word: usize) -> bool {
        let digit = self.word(word).chars().find_map(|c| c.to_digit(10)).unwrap_or(1);
        self.list(list).len() == digit as usize
    }

    /// Registers that it reads.
    pub fn reads(&self) -> impl Iterator<Item = Reg> {
        self.flowing(|flow| flow != Flow::Out)
    }
    /// Registers that it writes.
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
