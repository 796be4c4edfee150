//! Checks a kernel before it runs: the target has its instructions; its memory, registers and barriers fit; no
//! warp-wide instruction stands under a branch that depends on the lane.

use crate::error::BuildError;
use crate::inst::{Arg, Effect, Inst, Op, Reg, Together};
use crate::kernel::{Kernel, RoleUse, Stmt};
use crate::table::mbarrier;
use crate::tcgen05::CtaGroup;
use std::collections::HashSet;
use std::panic::Location;

/// Waits on an mbarrier that return before the phase ends.
const TRY_WAITS: [&Inst; 4] =
    [&mbarrier::TRY_WAIT, &mbarrier::TRY_WAIT_CLUSTER, &mbarrier::TRY_WAIT_RELAXED, &mbarrier::TRY_WAIT_FOR];

pub(crate) fn verify(kernel: &Kernel) -> Result<(), BuildError> {
    // Instructions come first: memory and register limits also depend on the target, and a missing instruction is the
    // clearer message.
    needs(kernel)?;
    groups(kernel)?;
    resources(kernel)?;
    convergence(kernel)
}

/// Checks that `setmaxnreg` accepts the register counts that the roles request.
pub(crate) fn register_counts<'a>(
    kernel: &str,
    mut roles: impl Iterator<Item = &'a RoleUse>,
) -> Result<(), BuildError> {
    let wrong = |got: &u32| !(24..=256).contains(got) || !got.is_multiple_of(8);
    let first = roles.find_map(|role| Some((&role.name, role.registers.filter(wrong)?)));
    first
        .map_or(Ok(()), |(role, got)| Err(BuildError::RegisterCount { kernel: kernel.into(), role: role.clone(), got }))
}

fn resources(kernel: &Kernel) -> Result<(), BuildError> {
    let name = || kernel.name.clone();
    if !(32..=1024).contains(&kernel.threads) || !kernel.threads.is_multiple_of(32) {
        return Err(BuildError::Threads { kernel: name(), got: kernel.threads });
    }
    let allowed = kernel.target.shared_bytes();
    if kernel.shared_bytes > allowed {
        let uses: Vec<String> = kernel.shared.iter().map(|u| format!("{} ({})", u.name, u.bytes)).collect();
        let (used, uses, target) = (kernel.shared_bytes, uses.join(", "), kernel.target.name());
        return Err(BuildError::SharedMemory { kernel: name(), used, allowed, uses, target });
    }
    let allowed = kernel.target.arch.named_barriers;
    if kernel.barriers > allowed {
        return Err(BuildError::Barriers { kernel: name(), used: kernel.barriers, allowed });
    }
    let entry = Kernel::entry_registers(kernel.target, kernel.threads);
    let all = |registers: Option<u32>| registers.unwrap_or(entry);
    let used: u32 = kernel.roles.iter().map(|r| r.warps * 32 * all(r.registers)).sum();
    let pool = kernel.threads * entry;
    if kernel.roles.iter().any(|r| r.registers.is_some()) && used > pool {
        // A launch with too few registers would hang in setmaxnreg for ever.
        let one = |r: &RoleUse| format!("{}: {} x {}", r.name, r.warps * 32, all(r.registers));
        let uses = kernel.roles.iter().map(one).collect::<Vec<_>>().join(", ");
        return Err(BuildError::Registers { kernel: name(), used, allowed: pool, threads: kernel.threads, uses });
    }
    Ok(())
}

fn line(at: &Location<'_>) -> String {
    format!("{}:{}", at.file(), at.line())
}

fn needs(kernel: &Kernel) -> Result<(), BuildError> {
    let target = kernel.target;
    let fits = |inst: &Inst| inst.needs.ptx <= target.ptx && inst.needs.runs_on(&target.arch);
    let mut wrong: Option<&Op> = None;
    kernel.each_op(&mut |op| {
        if wrong.is_none() && !fits(op.inst) {
            wrong = Some(op);
        }
    });
    wrong.map_or(Ok(()), |op| {
        let n = op.inst.needs;
        Err(BuildError::Needs {
            kernel: kernel.name.clone(),
            at: line(op.at),
            inst: op.inst.name,
            needs: format!("PTX {}.{} and {}", n.ptx.0, n.ptx.1, n.archs),
            target: format!("{}, PTX up to {}.{}", target.name(), target.ptx.0, target.ptx.1),
        })
    })
}

/// Checks that the kernel's tensor memory belongs to single CTAs or to pairs, not to both, and that pairs are in clusters
/// of an even size.
fn groups(kernel: &Kernel) -> Result<(), BuildError> {
    let mut uses: Vec<(&str, &Op)> = Vec::new();
    kernel.each_op(&mut |op| {
        let group = op.inst.operands.iter().zip(&op.args).find(|(operand, _)| operand.name == "group");
        if let Some((_, Arg::Word(word))) = group
            && uses.iter().all(|(known, _)| known != word)
        {
            uses.push((word, op));
        }
    });
    let wrong = |op: &Op, what: String| {
        Err(BuildError::Shape {
            kernel: kernel.name.clone(),
            at: line(op.at),
            what: format!("`{}` {what}", op.inst.name),
        })
    };
    match uses[..] {
        [(one, first), (other, second), ..] => wrong(
            second,
            format!(
                "of cta_group::{other} beside one of cta_group::{one} at {}, allowed: one of the two in a kernel",
                line(first.at)
            ),
        ),
        [(group, op)] if group == CtaGroup::Pair.word() && !kernel.cluster.is_multiple_of(2) => {
            wrong(op, format!("of CTA pairs in clusters of {}, allowed: even sizes", kernel.cluster))
        }
        _ => Ok(()),
    }
}

/// Registers whose value may differ between the lanes of a warp.
pub fn varying(kernel: &Kernel) -> HashSet<Reg> {
    let mut varying = HashSet::new();
    loop {
        let before = varying.len();
        spread(&kernel.body, false, &mut varying);
        if varying.len() == before {
            return varying;
        }
    }
}

/// One pass of the data flow: a register varies if it is computed from a varying value or under a varying branch.
fn spread(block: &[Stmt], divergent: bool, varying: &mut HashSet<Reg>) {
    for stmt in block {
        match stmt {
            Stmt::Op(op) => {
                let same = same_in_warp(op);
                let source = matches!(op.inst.name, "mov.special")
                    && matches!(op.word(1), "%tid.x" | "%laneid" | "%lanemask_lt");
                // Lanes that update the same word see different old values.
                let source = source || matches!(op.inst.effect, Effect::Update(_));
                let source = source
                    || matches!(op.inst.name, "elect" | "ldmatrix" | "tcgen05.ld" | "tcgen05.ld.b32")
                    || op.inst.together == Together::Warpgroup;
                if divergent || source || (!same && op.reads().any(|r| varying.contains(&r))) {
                    varying.extend(op.writes());
                }
            }
            Stmt::If { cond, then, otherwise, .. } => {
                let inside = divergent || varying.contains(cond);
                spread(then, inside, varying);
                spread(otherwise, inside, varying);
            }
            Stmt::Loop { body, .. } => {
                let leaves = body.iter().any(|s| matches!(s, Stmt::Break { cond, .. } if varying.contains(cond)));
                spread(body, divergent || leaves, varying);
            }
            Stmt::Break { .. } => {}
        }
    }
}

/// Whether all lanes get the same result, whatever they read.
fn same_in_warp(op: &Op) -> bool {
    let to_one = op.inst.name == "shfl" && op.word(3) == "idx" && matches!(op.args[2], crate::inst::Arg::Imm(_));
    to_one || matches!(op.inst.name, "vote" | "vote.ballot" | "redux")
}

fn convergence(kernel: &Kernel) -> Result<(), BuildError> {
    let varying = varying(kernel);
    check(kernel, &kernel.body, None, &varying)
}

fn check(
    kernel: &Kernel,
    block: &[Stmt],
    branch: Option<&'static Location<'static>>,
    varying: &HashSet<Reg>,
) -> Result<(), BuildError> {
    for stmt in block {
        match stmt {
            Stmt::Op(op) => {
                if let (Some(branch), true) = (branch, op.inst.together != Together::Thread) {
                    let (kernel, at) = (kernel.name.clone(), line(op.at));
                    return Err(BuildError::Divergent { kernel, at, inst: op.inst.name, branch: line(branch) });
                }
            }
            Stmt::If { cond, then, otherwise, at, .. } => {
                let inside = branch.or(varying.contains(cond).then_some(*at));
                check(kernel, then, inside, varying)?;
                check(kernel, otherwise, inside, varying)?;
            }
            Stmt::Loop { body, at } => {
                let leaves = body.iter().any(|s| matches!(s, Stmt::Break { cond, .. } if varying.contains(cond)));
                // A wait on an mbarrier is a loop that each lane leaves at the end of the phase. All lanes see the same
                // phase.
                let waits = body.iter().any(|s| matches!(s, Stmt::Op(op) if TRY_WAITS.contains(&op.inst)));
                check(kernel, body, branch.or((leaves && !waits).then_some(*at)), varying)?;
            }
            Stmt::Break { .. } => {}
        }
    }
    Ok(())
}
