//! Every use that a row can have: all words, ends and some of the middle of all constants, all lengths of lists.

use fulgurite_ptx::Target;
use fulgurite_ptx::inst::{Arg, Base, Class, Flow, Inst, Kind, Op, Reg, Space};
use fulgurite_ptx::kernel::{BoxShape, Kernel, Param, ParamKind, RoleUse, Stmt};
use fulgurite_ptx::table::sync;
use fulgurite_ptx::{Number, Swizzle};
use std::panic::Location;

/// Hands out registers.
#[derive(Default)]
pub struct Registers([u32; Class::ALL.len()]);

impl Registers {
    pub fn one(&mut self, class: Class) -> Reg {
        let count = &mut self.0[class as usize];
        *count += 1;
        Reg { class, index: *count - 1 }
    }
    pub fn some(&mut self, class: Class, n: usize) -> Box<[Reg]> {
        (0..n).map(|_| self.one(class)).collect()
    }
}

/// What may stand for an operand, before registers are handed out.
#[derive(Debug, Clone, Copy)]
enum Choice {
    Reg(Class),
    Imm(u64),
    List(Class, usize),
    Address(Class),
    Parameter,
    Word(&'static str),
    Param,
}

fn choices(kind: Kind, flow: Flow) -> Vec<Choice> {
    let lengths: Vec<usize> = match flow {
        // Accumulators of 8, 64, 128 and 256 columns, of 32 and of 16 bits.
        Flow::Both => vec![2, 4, 16, 32, 64, 128],
        _ => (1..=5).collect(),
    };
    let lists = |class| lengths.iter().map(move |&n| Choice::List(class, n));
    match kind {
        Kind::Value(class) | Kind::Register(class) => vec![Choice::Reg(class)],
        Kind::List(class) | Kind::Vector(class) => lists(class).collect(),
        Kind::ListOrTile(class) => lists(class).chain([Choice::Reg(Class::B64)]).collect(),
        Kind::Address(Space::Param) => vec![Choice::Parameter],
        Kind::Address(Space::Global) => vec![Choice::Address(Class::B64)],
        Kind::Address(_) | Kind::TensorAddress => vec![Choice::Address(Class::B32)],
        Kind::Number(allowed) => {
            let some = |n: &u64, first, last| *n == first || *n == last || [64, 128].contains(n);
            let ends = allowed.iter().flat_map(|s| s.all().filter(move |n| some(n, s.first, s.last)));
            ends.map(Choice::Imm).collect()
        }
        Kind::Word(words) => words.iter().map(|&word| Choice::Word(word)).collect(),
        Kind::Param => vec![Choice::Param],
    }
}

#[track_caller]
fn op(inst: &'static Inst, choices: &[Choice]) -> (Op, Registers) {
    let mut registers = Registers::default();
    let args = choices.iter().map(|choice| match *choice {
        Choice::Reg(class) => Arg::Reg(registers.one(class)),
        Choice::Imm(n) => Arg::Imm(n),
        Choice::List(class, n) => Arg::List(registers.some(class, n)),
        Choice::Address(class) => Arg::Address(Base::Reg(registers.one(class)), 16),
        Choice::Parameter => Arg::Address(Base::Param(0), 0),
        Choice::Word(word) => Arg::Word(word),
        Choice::Param => Arg::Param(1),
    });
    let args = args.collect();
    (Op { inst, args, at: Location::caller() }, registers)
}

/// A use, in a kernel of its own.
pub struct Use {
    pub op: Op,
    registers: Registers,
}

impl Use {
    /// The text of a kernel that does only this, without what stands before its entry.
    pub fn entry(&self, name: &str) -> String {
        let plain = |inst: &'static Inst, args: Box<[Arg]>| Stmt::Op(Op { inst, args, at: self.op.at });
        let mut body = vec![Stmt::Op(self.op.clone())];
        if self.op.inst.name.starts_with("wgmma.") {
            body.insert(0, plain(&sync::WGMMA_FENCE, Box::new([])));
            body.push(plain(&sync::WGMMA_COMMIT, Box::new([])));
            body.push(plain(&sync::WGMMA_WAIT, Box::new([Arg::Imm(0)])));
        }
        let map = BoxShape { number: Number::Bf16, extent: vec![64, 64], swizzle: Swizzle::B128 };
        let kernel = Kernel {
            name: name.into(),
            target: Target::HOPPER,
            params: vec![
                Param { name: "x".into(), kind: ParamKind::U64 },
                Param { name: "map".into(), kind: ParamKind::Tensor(map) },
            ],
            threads: 128,
            cluster: 1,
            most_registers: None,
            shared: Vec::new(),
            shared_bytes: 1024,
            // Without a role that changes its registers the entry does not say how many there are.
            roles: vec![RoleUse { name: "all".into(), first_warp: 0, warps: 4, registers: Some(128) }],
            barriers: 1,
            registers: self.registers.0,
            loose_waits: Vec::new(),
            publishes: Vec::new(),
            body,
        };
        let text = kernel.ptx();
        let start = text.find(".visible").expect("a kernel has an entry");
        text[start..].lines().filter(|line| !line.contains(".loc")).map(|line| format!("{line}\n")).collect()
    }
    /// The line of the instruction alone.
    pub fn line(&self) -> String {
        let entry = self.entry("x");
        let lines = || entry.lines().map(str::trim).skip_while(|line| *line != "{");
        let own = lines().find(|line| !line.starts_with(['{', '.']) && !line.starts_with("wgmma.fence"));
        own.or_else(|| lines().find(|line| line.starts_with("{ .reg"))).unwrap_or_default().to_owned()
    }
}

/// All uses of a row: those it allows, and combinations that it does not.
pub fn uses(inst: &'static Inst) -> [Vec<Use>; 2] {
    let mut all: Vec<Vec<Choice>> = vec![Vec::new()];
    for operand in inst.operands {
        let next = choices(operand.kind, operand.flow);
        all = all.iter().flat_map(|done| next.iter().map(|&c| [done.as_slice(), &[c]].concat())).collect();
    }
    let mut uses = [Vec::new(), Vec::new()];
    let mut plain = None;
    for combination in all {
        let (op, registers) = op(inst, &combination);
        let wrong = op.check().is_err();
        uses[usize::from(wrong)].push(Use { op, registers });
        if !wrong {
            plain.get_or_insert(combination);
        }
    }
    // Immediates, one at a time.
    let plain = plain.unwrap_or_else(|| panic!("no use of {} is allowed", inst.name));
    for (i, operand) in inst.operands.iter().enumerate() {
        if let (Kind::Value(class), Flow::In) = (operand.kind, operand.flow) {
            let mut combination = plain.clone();
            combination[i] = Choice::Imm(if class == Class::F32 { 0x3f80_0000 } else { 1 });
            // Sizes of copies are multiples of 16 bytes.
            if operand.name == "bytes" {
                combination[i] = Choice::Imm(16);
            }
            let (op, registers) = op(inst, &combination);
            uses[usize::from(op.check().is_err())].push(Use { op, registers });
        }
    }
    uses
}
