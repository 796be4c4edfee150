//! Whether a kernel is one that rows of the table can execute: operands of the right kind and number, registers and
//! parameters that exist. What the builder makes always is; a kernel is a value, though, and anybody can make one.

use fulgurite_ptx::inst::{Arg, Base, Class, Flow, Kind, Op, Operand, Reg, Space};
use fulgurite_ptx::kernel::{Kernel, ParamKind, Stmt};
use fulgurite_ptx::table;

/// The first thing that is wrong, in words.
pub(crate) fn check(kernel: &Kernel) -> Result<(), String> {
    if !(32..=1024).contains(&kernel.threads) || !kernel.threads.is_multiple_of(32) {
        return Err(format!("{} threads a block, allowed: multiples of 32 from 32 to 1024", kernel.threads));
    }
    if !(1..=16).contains(&kernel.cluster) {
        return Err(format!("clusters of {} blocks, allowed: 1 to 16", kernel.cluster));
    }
    if kernel.shared_bytes > kernel.target.shared_bytes() {
        let (used, allowed) = (kernel.shared_bytes, kernel.target.shared_bytes());
        return Err(format!("{used} bytes of shared memory, allowed: {allowed}"));
    }
    for param in &kernel.params {
        if let ParamKind::Tensor(shape) = &param.kind {
            let fits = (1..=5).contains(&shape.extent.len())
                && shape.extent.iter().all(|n| (1..=256).contains(n))
                && u64::from(shape.extent[0] * shape.number.bytes()) % 16 == 0;
            if !fits {
                return Err(format!(
                    "tensor `{}` moves boxes of {:?}, allowed: 1 to 5 axes of 1 to 256 elements, the innermost a multiple of 16 bytes",
                    param.name, shape.extent
                ));
            }
        }
    }
    block(kernel, &kernel.body, false)
}

fn block(kernel: &Kernel, stmts: &[Stmt], in_loop: bool) -> Result<(), String> {
    for stmt in stmts {
        match stmt {
            Stmt::Op(use_) => op(kernel, use_)
                .map_err(|what| format!("{}:{}: `{}`: {what}", use_.at.file(), use_.at.line(), use_.inst.name))?,
            Stmt::If { cond, then, otherwise, .. } => {
                register(kernel, *cond, Class::Pred)?;
                block(kernel, then, in_loop)?;
                block(kernel, otherwise, in_loop)?;
            }
            Stmt::Loop { body, .. } => block(kernel, body, true)?,
            Stmt::Break { cond, at, .. } => {
                register(kernel, *cond, Class::Pred)?;
                if !in_loop {
                    return Err(format!("{}:{}: a break outside a loop", at.file(), at.line()));
                }
            }
        }
    }
    Ok(())
}

fn register(kernel: &Kernel, reg: Reg, class: Class) -> Result<(), String> {
    if reg.class != class {
        return Err(format!("a register of class {:?} where {class:?} is wanted", reg.class));
    }
    if reg.index >= kernel.registers[class as usize] {
        return Err(format!(
            "register {} of class {class:?}, and there are {}",
            reg.index, kernel.registers[class as usize]
        ));
    }
    Ok(())
}

fn op(kernel: &Kernel, op: &Op) -> Result<(), String> {
    if op.args.len() != op.inst.operands.len() {
        return Err(format!("{} operands, allowed: {}", op.args.len(), op.inst.operands.len()));
    }
    for (operand, arg) in op.inst.operands.iter().zip(&op.args) {
        kind(kernel, operand, arg).map_err(|what| format!("operand `{}`: {what}", operand.name))?;
    }
    lengths(op)
}

fn kind(kernel: &Kernel, operand: &Operand, arg: &Arg) -> Result<(), String> {
    match (operand.kind, arg) {
        (Kind::Value(class), Arg::Reg(reg)) => register(kernel, *reg, class),
        (Kind::Value(_), Arg::Imm(_)) if operand.flow == Flow::In => Ok(()),
        (Kind::List(class) | Kind::ListOrTile(class), Arg::List(regs)) => {
            if !(1..=128).contains(&regs.len()) {
                return Err(format!("{} registers, allowed: 1 to 128", regs.len()));
            }
            regs.iter().try_for_each(|reg| register(kernel, *reg, class))
        }
        (Kind::ListOrTile(_), Arg::Reg(reg)) => register(kernel, *reg, Class::B64),
        (Kind::Address(Space::Param), Arg::Address(Base::Param(n), offset)) => match kernel.params.get(*n as usize) {
            Some(_) if *offset >= 0 => Ok(()),
            _ => Err(format!("parameter {n} with offset {offset}, and there are {}", kernel.params.len())),
        },
        (Kind::Address(space), Arg::Address(Base::Reg(reg), _)) if space != Space::Param => {
            register(kernel, *reg, if space == Space::Global { Class::B64 } else { Class::B32 })
        }
        (Kind::Number, Arg::Imm(_)) => Ok(()),
        (Kind::Word(words), Arg::Word(word)) if words.contains(word) => Ok(()),
        (Kind::Param, Arg::Param(n)) => match kernel.params.get(*n as usize) {
            Some(_) => Ok(()),
            None => Err(format!("parameter {n}, and there are {}", kernel.params.len())),
        },
        (kind, arg) => Err(format!("{arg:?} where {kind:?} is wanted")),
    }
}

/// How many registers lists must have: what the text of the instruction says in other operands.
fn lengths(op: &Op) -> Result<(), String> {
    let wants = |i: usize, n: usize| match &op.args[i] {
        Arg::List(regs) if regs.len() != n => Err(format!("{} registers, allowed: {n}", regs.len())),
        _ => Ok(()),
    };
    for (i, arg) in op.args.iter().enumerate() {
        let Arg::Word(word) = arg else { continue };
        let list = || op.args.iter().position(|a| matches!(a, Arg::List(_)));
        match (op.inst.operands[i].name, list()) {
            ("v", Some(list)) => wants(
                list,
                match *word {
                    ".v4" => 4,
                    ".v2" => 2,
                    _ => 1,
                },
            )?,
            ("x", Some(list)) => wants(
                list,
                match *word {
                    "x4" => 4,
                    "x2" => 2,
                    _ => 1,
                },
            )?,
            ("rank", Some(list)) => wants(list, usize::from(word.as_bytes()[0] - b'0'))?,
            _ => {}
        }
    }
    let name = op.inst.name;
    if name.starts_with("wgmma.") && op.inst.operands.iter().any(|o| o.name == "n") && op.args.len() > 4 {
        let n = op.number(4);
        if !n.is_multiple_of(8) || !(8..=256).contains(&n) {
            return Err(format!("{n} columns, allowed: multiples of 8 from 8 to 256"));
        }
        wants(0, n as usize / 2)?;
        return wants(1, 4);
    }
    if name.starts_with("mma.") {
        let b = 2;
        return wants(0, 4).and(wants(1, 4)).and(wants(2, b)).and(wants(3, 4));
    }
    if op.inst == &table::convert::SPLIT_64 || op.inst == &table::convert::SPLIT_32 {
        return wants(0, 2);
    }
    if op.inst == &table::convert::JOIN_64 || op.inst == &table::convert::JOIN_32 {
        return wants(1, 2);
    }
    if matches!(name, "ld.acquire" | "st.release") {
        return wants(0, 1).and(wants(1, 1));
    }
    Ok(())
}
