//! Exchange between the lanes of a warp.

use crate::inst::Class::{B32, Pred};
use crate::inst::{Effect, Inst, Needs, Op, Together, Unit, arg, out, word};
use crate::machine::{Machine, WARP, lanes, value};

const SOURCE: &str = "PTX ISA, warp-level instructions";

/// Values of an operand in all active lanes.
fn gather(m: &mut dyn Machine, op: &Op, i: usize) -> [u64; WARP as usize] {
    let mut all = [0; WARP as usize];
    for lane in lanes(m.active()) {
        all[lane as usize] = value(m, lane, op, i);
    }
    all
}
fn scatter(m: &mut dyn Machine, op: &Op, x: u64) {
    for lane in lanes(m.active()) {
        m.set(lane, op.reg(0), x);
    }
}

/// d = a of another lane: `b` is its distance, its number, or what its number is xored with.
pub static SHFL: Inst = Inst {
    name: "shfl",
    text: "shfl.sync.{mode}.b32 {d}, {a}, {b}, {clamp}, 0xffffffff;",
    operands: &[
        out("d", B32),
        arg("a", B32),
        arg("b", B32),
        word("mode", &["bfly", "idx", "up", "down"]),
        word("clamp", &["0x1f", "0x0"]),
    ],
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let (a, b) = (gather(m, op, 1), gather(m, op, 2));
        for lane in lanes(m.active()) {
            let n = b[lane as usize] as u32 & 31;
            let from = match op.word(3) {
                "bfly" => lane ^ n,
                "idx" => n,
                "up" => {
                    if n <= lane {
                        lane - n
                    } else {
                        lane
                    }
                }
                _ => {
                    if lane + n < WARP {
                        lane + n
                    } else {
                        lane
                    }
                }
            };
            m.set(lane, op.reg(0), a[from as usize]);
        }
    },
    source: SOURCE,
};

/// d = the lanes where p holds, as bits.
pub static BALLOT: Inst = Inst {
    name: "vote.ballot",
    text: "vote.sync.ballot.b32 {d}, {p}, 0xffffffff;",
    operands: &[out("d", B32), arg("p", Pred)],
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let votes = gather(m, op, 1);
        scatter(m, op, (0..32).filter(|&i| votes[i] == 1).fold(0, |bits, i| bits | 1 << i));
    },
    source: SOURCE,
};

/// d = whether p holds in any lane, or in all.
pub static VOTE: Inst = Inst {
    name: "vote",
    text: "vote.sync.{mode}.pred {d}, {p}, 0xffffffff;",
    operands: &[out("d", Pred), arg("p", Pred), word("mode", &["any", "all"])],
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let votes = gather(m, op, 1);
        let mut active = lanes(m.active());
        let holds = |lane: u32| votes[lane as usize] == 1;
        let result = if op.word(2) == "any" { active.any(holds) } else { active.all(holds) };
        scatter(m, op, u64::from(result));
    },
    source: SOURCE,
};

/// p holds in one lane of the warp. The assembler knows that one thread alone executes what p guards.
pub static ELECT: Inst = Inst {
    name: "elect",
    text: "elect.sync _|{p}, 0xffffffff;",
    operands: &[out("p", Pred)],
    needs: Needs::HOPPER,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let first = m.active().trailing_zeros();
        for lane in lanes(m.active()) {
            m.set(lane, op.reg(0), u64::from(lane == first));
        }
    },
    source: SOURCE,
};

/// d = sum, smallest, largest or bits of a over the warp.
pub static REDUX: Inst = Inst {
    name: "redux",
    text: "redux.sync.{o} {d}, {a}, 0xffffffff;",
    operands: &[
        out("d", B32),
        arg("a", B32),
        word("o", &["add.u32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32"]),
    ],
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let all = gather(m, op, 1);
        let active: Vec<u32> = lanes(m.active()).map(|lane| all[lane as usize] as u32).collect();
        let result = active.into_iter().reduce(|a, b| match op.word(2) {
            "add.u32" => a.wrapping_add(b),
            "min.u32" => a.min(b),
            "max.u32" => a.max(b),
            "min.s32" => (a as i32).min(b as i32) as u32,
            "max.s32" => (a as i32).max(b as i32) as u32,
            "and.b32" => a & b,
            "or.b32" => a | b,
            _ => a ^ b,
        });
        scatter(m, op, u64::from(result.unwrap_or(0)));
    },
    source: SOURCE,
};

/// The rows of this family.
pub static ROWS: &[&Inst] = &[&SHFL, &BALLOT, &VOTE, &ELECT, &REDUX];
