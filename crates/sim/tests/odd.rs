//! Odd kernels: the simulator answers with an error or a finding, and never panics.

use crate::common::Random;
use fulgurite_ptx::device::{Device, Stream, TensorSpan, Value};
use fulgurite_ptx::inst::{Arg, Base, Class, Flow, Inst, Kind, Op, Reg, Space};
use fulgurite_ptx::kernel::{BoxShape, Kernel, Param, ParamKind, Stmt, Target};
use fulgurite_ptx::{Number, Swizzle, table};
use fulgurite_sim::{Options, Sim};
use std::panic::Location;
use std::sync::Arc;

/// Registers of each class.
const REGISTERS: u32 = 12;
const SHARED: u32 = 8192;

struct Maker {
    random: Random,
    rows: Vec<&'static Inst>,
}

impl Maker {
    fn reg(&mut self, class: Class) -> Reg {
        Reg { class, index: self.random.below(REGISTERS.into()) as u32 }
    }
    /// Mostly small numbers, sometimes any.
    fn number(&mut self) -> u64 {
        match self.random.below(6) {
            0 => self.random.next() << 32 | self.random.next(),
            1 => [0, 1, 24, 32, 40, 64, 128, 232, 256][self.random.below(9) as usize],
            2 => u64::MAX,
            _ => self.random.below(40),
        }
    }
    /// How long a list must be, more often than not.
    fn length(&mut self, inst: &Inst, i: usize) -> usize {
        if self.random.below(12) == 0 {
            return self.random.below(6) as usize;
        }
        match (inst.name, i) {
            (name, 0) if name.starts_with("wgmma.") => 4,
            (name, _) if name.starts_with("wgmma.") || name.starts_with("mma.") => {
                if i == 2 {
                    2
                } else {
                    4
                }
            }
            (
                "mov.split.b64" | "mov.join.b64" | "mov.split.f32" | "mov.join.f32" | "mov.split.b32" | "mov.join.b32",
                _,
            ) => 2,
            ("ldmatrix" | "stmatrix", _) => 4,
            (name, _) if name.contains("tensor") => 2,
            _ => 1,
        }
    }
    fn arg(&mut self, inst: &'static Inst, i: usize) -> Arg {
        let operand = &inst.operands[i];
        match operand.kind {
            Kind::Value(class) if operand.flow == Flow::In && self.random.below(3) == 0 => {
                let x = self.number();
                Arg::Imm(if class == Class::Pred { x & 1 } else { x })
            }
            Kind::Value(class) => Arg::Reg(self.reg(class)),
            Kind::Register(class) => Arg::Reg(self.reg(class)),
            Kind::List(class) | Kind::Vector(class) | Kind::ListOrTile(class) => {
                let n = self.length(inst, i);
                Arg::List((0..n).map(|_| self.reg(class)).collect())
            }
            Kind::Address(Space::Param) => Arg::Address(Base::Param(self.random.below(4) as u32), 0),
            Kind::Address(space) => {
                let class = if space == Space::Global { Class::B64 } else { Class::B32 };
                let offset = [0, 0, 16, 1024, -8, i32::MAX, i32::MIN][self.random.below(7) as usize];
                // The first registers are likely to be addresses.
                let index = if self.random.below(2) == 0 { 0 } else { self.random.below(REGISTERS.into()) as u32 };
                Arg::Address(Base::Reg(Reg { class, index }), offset)
            }
            Kind::TensorAddress => {
                let offset = [0, 0, 32, 511, -1, i32::MAX, i32::MIN][self.random.below(7) as usize];
                Arg::Address(Base::Reg(self.reg(Class::B32)), offset)
            }
            Kind::Number(_) => {
                let n = if operand.name == "n" && inst.name.starts_with("wgmma.") { 8 } else { self.number() };
                Arg::Imm(n)
            }
            Kind::Word(words) => {
                let last = words.len() - 1;
                let fits = match operand.name {
                    "rank" => 1.min(last),
                    "x" => last,
                    "v" => 0,
                    _ => self.random.below(words.len() as u64) as usize,
                };
                Arg::Word(words[fits])
            }
            Kind::Param => Arg::Param(self.random.below(4) as u32),
        }
    }
    fn op(&mut self) -> Stmt {
        let inst = self.rows[self.random.below(self.rows.len() as u64) as usize];
        let args = (0..inst.operands.len()).map(|i| self.arg(inst, i)).collect();
        Stmt::Op(Op { inst, args, at: Location::caller() })
    }
    fn block(&mut self, depth: u32, in_loop: bool) -> Vec<Stmt> {
        let at = Location::caller();
        let n = self.random.below(8);
        (0..n)
            .map(|_| match self.random.below(12) {
                0 if depth > 0 => {
                    let (cond, cold) = (self.reg(Class::Pred), false);
                    let then = self.block(depth - 1, in_loop);
                    let otherwise = self.block(depth - 1, in_loop);
                    Stmt::If { cond, then, otherwise, cold, at }
                }
                1 if depth > 0 => Stmt::Loop { body: self.block(depth - 1, true), at },
                2 if in_loop => Stmt::Break { cond: self.reg(Class::Pred), when: self.random.below(2) == 0, at },
                _ => self.op(),
            })
            .collect()
    }
    /// Addresses and numbers in some registers, so that accesses sometimes work.
    fn start(&mut self) -> Vec<Stmt> {
        let at = Location::caller();
        let op = |inst: &'static Inst, args: Vec<Arg>| Stmt::Op(Op { inst, args: args.into(), at });
        let reg = |class, index| Arg::Reg(Reg { class, index });
        let mut all = vec![
            op(&table::convert::SHARED_BASE, vec![reg(Class::B32, 0)]),
            op(&table::memory::LD_PARAM_64, vec![reg(Class::B64, 0), Arg::Address(Base::Param(0), 0)]),
            op(&table::convert::PARAM_ADDRESS, vec![reg(Class::B64, 1), Arg::Param(1)]),
            op(&table::convert::SPECIAL, vec![reg(Class::B32, 1), Arg::Word("%tid.x")]),
            op(&table::convert::MOV_PRED, vec![reg(Class::Pred, 0), Arg::Imm(1)]),
        ];
        if self.random.below(2) == 0 {
            let bar = Arg::Address(Base::Reg(Reg { class: Class::B32, index: 0 }), 0);
            all.push(op(&table::mbarrier::INIT, vec![bar, Arg::Imm(1)]));
        }
        for index in 2..REGISTERS {
            all.push(op(&table::convert::MOV_32, vec![reg(Class::B32, index), Arg::Imm(self.number())]));
            all.push(op(&table::convert::MOV_64, vec![reg(Class::B64, index), Arg::Imm(self.number())]));
        }
        all
    }
    fn kernel(&mut self) -> Kernel {
        let shape = BoxShape {
            number: Number::Bf16,
            extent: vec![8 << self.random.below(4), 1 + self.random.below(8) as u32],
            swizzle: [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128][self.random.below(4) as usize],
        };
        let param = |name: &str, kind| Param { name: name.into(), kind };
        let mut body = self.start();
        body.extend(self.block(3, false));
        body.extend(self.block(3, false));
        Kernel {
            name: "odd".into(),
            target: Target::HOPPER,
            params: vec![
                param("pointer", ParamKind::Pointer(16)),
                param("tensor", ParamKind::Tensor(shape)),
                param("number", ParamKind::U32),
                param("float", ParamKind::F32),
            ],
            threads: [32, 64, 128, 256][self.random.below(4) as usize],
            cluster: 1 + self.random.below(2) as u32,
            most_registers: None,
            shared: Vec::new(),
            shared_bytes: if self.random.below(8) == 0 { 0 } else { SHARED },
            roles: Vec::new(),
            barriers: 16,
            registers: [REGISTERS; Class::ALL.len()],
            loose_waits: Vec::new(),
            publishes: Vec::new(),
            body,
        }
    }
}

fn run(seed: u64) {
    let mut maker = Maker { random: Random(seed), rows: table::rows().collect() };
    let kernel = maker.kernel();
    let sim = Sim::new(Options { seed, budget: 4000, ..Options::default() });
    let buffer = sim.allocate(4096).unwrap();
    if seed.is_multiple_of(2) {
        sim.upload(buffer.span(), &[1; 4096]).unwrap();
    }
    let tensor = TensorSpan {
        span: buffer.span(),
        number: Number::Bf16,
        extent: vec![64, 16],
        strides: vec![128],
        ragged: None,
    };
    let args = [Value::Pointer(buffer.span()), Value::Tensor(tensor), Value::U32(7), Value::F32(1.5)];
    let grid = [kernel.cluster * 2, 1, 1];
    if let Ok(module) = sim.load(Arc::new(kernel)) {
        let _ = sim.launch(&module, grid, &args, Stream::default());
        for finding in sim.findings() {
            assert!(!finding.to_string().is_empty());
        }
    }
}

#[test]
fn random_kernels_never_panic() {
    let rounds = if std::env::var_os("FULGURITE_LONG").is_some() { 60_000 } else { 3000 };
    for seed in 0..rounds {
        if let Err(e) = std::panic::catch_unwind(|| run(seed)) {
            let text = e.downcast_ref::<String>().cloned().or(e.downcast_ref::<&str>().map(|s| s.to_string()));
            panic!("seed {seed}: {text:?}");
        }
    }
}
