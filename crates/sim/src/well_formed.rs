//! Checks that the rows of the instruction table can execute a kernel: operands of the right kind and number, registers
//! and parameters that exist. The builder only makes such kernels, but a kernel is a value that anyone can construct.

use fulgurite_ptx::inst::{Arg, Base, Class, Op, Reg};
use fulgurite_ptx::kernel::{Kernel, ParamKind, Stmt};

/// The first fault, as text.
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
    let mut next = 0;
    for role in &kernel.roles {
        if role.first_warp != next || role.warps == 0 {
            let (name, first, warps) = (&role.name, role.first_warp, role.warps);
            return Err(format!(
                "role `{name}` has {warps} warps from {first} on, allowed: one or more from {next} on"
            ));
        }
        next += role.warps;
    }
    if !kernel.roles.is_empty() && 32 * next != kernel.threads {
        return Err(format!("roles of {next} warps, allowed: all of the block's {}", kernel.threads / 32));
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
                .map_err(|what| format!("{}:{}: `{}` {what}", use_.at.file(), use_.at.line(), use_.inst.name))?,
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
    op.check()?;
    for arg in &op.args {
        match arg {
            Arg::Reg(reg) | Arg::Address(Base::Reg(reg), _) => register(kernel, *reg, reg.class)?,
            Arg::List(regs) => regs.iter().try_for_each(|reg| register(kernel, *reg, reg.class))?,
            Arg::Address(Base::Param(n), _) | Arg::Param(n) if *n as usize >= kernel.params.len() => {
                return Err(format!("parameter {n}, and there are {}", kernel.params.len()));
            }
            _ => {}
        }
    }
    Ok(())
}
