//! Planted bugs: functions from a kernel to one that is wrong in one place.

use fulgurite_ptx::inst::{Arg, Op, Reg};
use fulgurite_ptx::kernel::{Kernel, Stmt};
use fulgurite_sim::Line;

/// What becomes of a statement.
pub enum Fate {
    Keep,
    Drop,
}

/// Calls `f` with every statement, in order; what it says to drop is dropped.
fn each_mut(block: &mut Vec<Stmt>, f: &mut dyn FnMut(&mut Stmt) -> Fate) {
    block.retain_mut(|stmt| {
        if let Fate::Drop = f(stmt) {
            return false;
        }
        match stmt {
            Stmt::If { then, otherwise, .. } => {
                each_mut(then, f);
                each_mut(otherwise, f);
            }
            Stmt::Loop { body, .. } => each_mut(body, f),
            _ => {}
        }
        true
    });
}

/// Changes the `n`-th use of a row.
fn nth(mut kernel: Kernel, row: &str, n: usize, mut f: impl FnMut(&mut Op) -> Fate) -> Kernel {
    let (mut seen, mut found) = (0, false);
    each_mut(&mut kernel.body, &mut |stmt| match stmt {
        Stmt::Op(op) if op.inst.name == row => {
            seen += 1;
            if seen == n + 1 {
                found = true;
                return f(op);
            }
            Fate::Keep
        }
        _ => Fate::Keep,
    });
    assert!(found, "{} has no use {n} of {row}, only {seen}", kernel.name);
    kernel
}

/// Changes every use of a row that a Rust line made: code that is expanded several times is wrong everywhere.
fn made_at(mut kernel: Kernel, row: &str, at: Line, mut f: impl FnMut(&mut Op) -> Fate) -> Kernel {
    let mut found = false;
    each_mut(&mut kernel.body, &mut |stmt| match stmt {
        Stmt::Op(op) if op.inst.name == row && Line::from(op.at) == at => {
            found = true;
            f(op)
        }
        _ => Fate::Keep,
    });
    assert!(found, "{} has no {row} at {at}", kernel.name);
    kernel
}

/// Without the uses of a row that a line made.
pub fn drop_at(kernel: Kernel, row: &str, at: Line) -> Kernel {
    made_at(kernel, row, at, |_| Fate::Drop)
}

/// With another constant at operand `i` of the uses of a row that a line made.
pub fn change_at(kernel: Kernel, row: &str, at: Line, i: usize, f: impl Fn(u64) -> u64) -> Kernel {
    made_at(kernel, row, at, |op| {
        match &mut op.args[i] {
            Arg::Imm(x) => *x = f(*x),
            other => panic!("{row} has no constant at {i}, but {other:?}"),
        }
        Fate::Keep
    })
}

/// Without the loops that wait by an `mbarrier.try_wait` that a line made.
pub fn drop_waits_at(kernel: Kernel, at: Line) -> Kernel {
    drop_loops_at(kernel, "mbarrier.try_wait", at)
}

/// Without the loops that wait by a use of a row that a line made.
pub fn drop_loops_at(mut kernel: Kernel, row: &str, at: Line) -> Kernel {
    let mut found = false;
    let waits = |s: &Stmt| matches!(s, Stmt::Op(op) if op.inst.name == row && Line::from(op.at) == at);
    each_mut(&mut kernel.body, &mut |stmt| match stmt {
        Stmt::Loop { body, .. } if body.iter().any(waits) => {
            found = true;
            Fate::Drop
        }
        _ => Fate::Keep,
    });
    assert!(found, "{} waits nowhere at {at}", kernel.name);
    kernel
}

/// Without the `n`-th use of a row.
pub fn drop(kernel: Kernel, row: &str, n: usize) -> Kernel {
    nth(kernel, row, n, |_| Fate::Drop)
}

/// Without any use of a row.
pub fn drop_all(mut kernel: Kernel, row: &str) -> Kernel {
    each_mut(&mut kernel.body, &mut |stmt| match stmt {
        Stmt::Op(op) if op.inst.name == row => Fate::Drop,
        _ => Fate::Keep,
    });
    kernel
}

/// With another constant, or another offset of an address, at operand `i` of the `n`-th use of a row.
pub fn change(kernel: Kernel, row: &str, n: usize, i: usize, f: impl Fn(u64) -> u64) -> Kernel {
    nth(kernel, row, n, |op| {
        match &mut op.args[i] {
            Arg::Imm(x) => *x = f(*x),
            Arg::Address(_, offset) => *offset = f(*offset as u64) as i32,
            other => panic!("{row} has no constant at {i}, but {other:?}"),
        }
        Fate::Keep
    })
}

/// With another row in place of the `n`-th use of one, and only the first `operands` of its operands.
pub fn replace(kernel: Kernel, row: &str, n: usize, by: &str, operands: usize) -> Kernel {
    let inst = fulgurite_ptx::table::rows().find(|inst| inst.name == by).unwrap();
    nth(kernel, row, n, |op| {
        op.inst = inst;
        op.args = op.args.iter().take(operands).cloned().collect();
        Fate::Keep
    })
}

/// With operand `i` of the first use of a row in all uses.
pub fn repeat(mut kernel: Kernel, row: &str, i: usize) -> Kernel {
    let first = find(&kernel, row, 0).args[i].clone();
    each_mut(&mut kernel.body, &mut |stmt| {
        if let Stmt::Op(op) = stmt
            && op.inst.name == row
        {
            op.args[i] = first.clone();
        }
        Fate::Keep
    });
    kernel
}

/// The `n`-th use of a row.
pub fn find<'a>(kernel: &'a Kernel, row: &str, n: usize) -> &'a Op {
    let mut all = Vec::new();
    kernel.each_op(&mut |op| {
        if op.inst.name == row {
            all.push(op);
        }
    });
    all.get(n).unwrap_or_else(|| panic!("{} has no use {n} of {row}, only {}", kernel.name, all.len()))
}

/// The Rust line of the `n`-th use of a row.
pub fn line(kernel: &Kernel, row: &str, n: usize) -> Line {
    find(kernel, row, n).at.into()
}

/// Without the loop that waits by the `n`-th `mbarrier.try_wait`.
pub fn drop_wait(kernel: Kernel, n: usize) -> Kernel {
    drop_loop(kernel, "mbarrier.try_wait", n)
}

/// Without the loop that waits by the `n`-th use of a row.
fn drop_loop(mut kernel: Kernel, row: &str, n: usize) -> Kernel {
    let mut seen = 0;
    each_mut(&mut kernel.body, &mut |stmt| {
        let Stmt::Loop { body, .. } = stmt else { return Fate::Keep };
        if !body.iter().any(|s| matches!(s, Stmt::Op(op) if op.inst.name == row)) {
            return Fate::Keep;
        }
        seen += 1;
        if seen == n + 1 { Fate::Drop } else { Fate::Keep }
    });
    assert!(seen > n);
    kernel
}

fn parity(kernel: &Kernel, n: usize) -> Reg {
    match find(kernel, "mbarrier.try_wait", n).args[2] {
        Arg::Reg(reg) => reg,
        ref other => panic!("a parity that is {other:?}"),
    }
}

/// The `n`-th `mbarrier.try_wait` begins with the other parity.
pub fn flip_parity(mut kernel: Kernel, n: usize) -> Kernel {
    let reg = parity(&kernel, n);
    let mut found = false;
    each_mut(&mut kernel.body, &mut |stmt| {
        if let Stmt::Op(op) = stmt
            && op.inst.name == "mov.b32"
            && op.args[0] == Arg::Reg(reg)
            && let Arg::Imm(x) = &mut op.args[1]
        {
            *x ^= 1;
            found = true;
        }
        Fate::Keep
    });
    assert!(found);
    kernel
}

/// The parity of the `n`-th `mbarrier.try_wait` never changes.
pub fn freeze_parity(mut kernel: Kernel, n: usize) -> Kernel {
    let reg = parity(&kernel, n);
    let mut found = false;
    each_mut(&mut kernel.body, &mut |stmt| {
        let changes = matches!(stmt, Stmt::Op(op) if op.inst.name == "mov.b32"
            && op.args[0] == Arg::Reg(reg) && matches!(op.args[1], Arg::Reg(_)));
        found |= changes;
        if changes { Fate::Drop } else { Fate::Keep }
    });
    assert!(found);
    kernel
}

/// The `n`-th use of a row only where the first `elect` before it holds.
pub fn only_one_lane(mut kernel: Kernel, row: &str, n: usize) -> Kernel {
    let elected = match find(&kernel, "elect", 0).args[0] {
        Arg::Reg(reg) => reg,
        ref other => panic!("an election into {other:?}"),
    };
    let elect = find(&kernel, "elect", 0).clone();
    fn walk(block: &mut Vec<Stmt>, row: &str, left: &mut usize, cond: Reg, elect: &Op) {
        let mut i = 0;
        while i < block.len() {
            match &mut block[i] {
                Stmt::Op(op) if op.inst.name == row => {
                    *left = left.wrapping_sub(1);
                    if *left == usize::MAX {
                        let (at, op) = (op.at, op.clone());
                        let then = vec![Stmt::Op(op)];
                        block[i] = Stmt::If { cond, then, otherwise: Vec::new(), cold: false, at };
                        block.insert(i, Stmt::Op(elect.clone()));
                        i += 1;
                    }
                }
                Stmt::If { then, otherwise, .. } => {
                    walk(then, row, left, cond, elect);
                    walk(otherwise, row, left, cond, elect);
                }
                Stmt::Loop { body, .. } => walk(body, row, left, cond, elect),
                _ => {}
            }
            i += 1;
        }
    }
    let mut left = n;
    walk(&mut kernel.body, row, &mut left, elected, &elect);
    kernel
}

/// Predicates that tell whether the CTA leads its pair.
fn leads(kernel: &Kernel) -> Vec<Reg> {
    let (mut ranks, mut leads) = (Vec::new(), Vec::new());
    kernel.each_op(&mut |op| {
        let reads = |regs: &[Reg]| op.reads().any(|reg| regs.contains(&reg));
        if op.inst.name == "mov.special.cluster" && op.word(1) == "%cluster_ctarank" {
            ranks.extend(op.writes());
        } else if op.inst.name == "setp" && reads(&ranks) {
            leads.extend(op.writes());
        }
    });
    leads
}

/// What both CTAs of a pair do in the original, done by the leader alone: the `n`-th use of a row, which follows something in
/// the same block that only the leader does.
pub fn guarded(mut kernel: Kernel, row: &str, n: usize) -> Kernel {
    fn walk(block: &mut [Stmt], row: &str, left: &mut usize, leads: &[Reg]) -> bool {
        let own = |stmt: &Stmt| match stmt {
            Stmt::If { cond, .. } if leads.contains(cond) => Some(*cond),
            _ => None,
        };
        let cond = block.iter().find_map(own);
        block.iter_mut().any(|stmt| match stmt {
            Stmt::Op(op) if op.inst.name == row => {
                *left = left.wrapping_sub(1);
                let found = *left == usize::MAX;
                if let (true, Some(cond)) = (found, cond) {
                    let (at, then) = (op.at, vec![Stmt::Op(op.clone())]);
                    *stmt = Stmt::If { cond, then, otherwise: Vec::new(), cold: false, at };
                }
                found && cond.is_some()
            }
            Stmt::If { then, otherwise, .. } => walk(then, row, left, leads) || walk(otherwise, row, left, leads),
            Stmt::Loop { body, .. } => walk(body, row, left, leads),
            _ => false,
        })
    }
    let (mut left, leads) = (n, leads(&kernel));
    assert!(walk(&mut kernel.body, row, &mut left, &leads), "{} has no {row} beside what leaders do", kernel.name);
    kernel
}

/// What the leader of a pair alone does in the original, done by both CTAs: the branch on the CTA's rank around the first
/// use of a row is gone.
pub fn unguarded(mut kernel: Kernel, row: &str) -> Kernel {
    let leads = leads(&kernel);
    fn has(block: &[Stmt], row: &str) -> bool {
        block.iter().any(|stmt| match stmt {
            Stmt::Op(op) => op.inst.name == row,
            Stmt::If { then, otherwise, .. } => has(then, row) || has(otherwise, row),
            Stmt::Loop { body, .. } => has(body, row),
            Stmt::Break { .. } => false,
        })
    }
    fn walk(block: &mut Vec<Stmt>, row: &str, leads: &[Reg]) -> bool {
        for i in 0..block.len() {
            let found = match &mut block[i] {
                Stmt::If { cond, then, .. } if leads.contains(cond) && has(then, row) => {
                    let then = std::mem::take(then);
                    block.splice(i..=i, then);
                    true
                }
                Stmt::If { then, otherwise, .. } => walk(then, row, leads) || walk(otherwise, row, leads),
                Stmt::Loop { body, .. } => walk(body, row, leads),
                _ => false,
            };
            if found {
                return true;
            }
        }
        false
    }
    assert!(walk(&mut kernel.body, row, &leads), "{} has no {row} of the leader alone", kernel.name);
    kernel
}
