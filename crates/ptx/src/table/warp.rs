//! Exchanges between the lanes of a warp.

use super::any;
use crate::inst::Class::{B32, Pred};
use crate::inst::{Effect, Inst, Needs, Op, Together, Unit, arg, out, reg, word};
use crate::machine::{Machine, WARP, lanes, value};

const SOURCE: &str = "PTX ISA, parallel synchronization and communication instructions; shfl, prmt: data movement";

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

/// d = a of another lane; `b` is the distance to it, its index, or an xor mask. Lanes past `clamp` (below it, for `up`)
/// are out of reach, and the lane then keeps its own value.
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
    allowed: any,
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let (a, b) = (gather(m, op, 1), gather(m, op, 2));
        let clamp = if op.word(4) == "0x1f" { 31 } else { 0 };
        for lane in lanes(m.active()) {
            let n = b[lane as usize] as u32 & 31;
            // A lane keeps its own value if the other lane is past the clamp.
            let (from, inside) = match op.word(3) {
                "up" => (lane.wrapping_sub(n), lane >= clamp + n),
                "down" => (lane + n, lane + n <= clamp),
                "bfly" => (lane ^ n, lane ^ n <= clamp),
                _ => (n, n <= clamp),
            };
            m.set(lane, op.reg(0), a[if inside { from } else { lane } as usize]);
        }
    },
    source: SOURCE,
};

/// d = mask of the lanes where p holds.
pub static BALLOT: Inst = Inst {
    name: "vote.ballot",
    text: "vote.sync.ballot.b32 {d}, {p}, 0xffffffff;",
    operands: &[out("d", B32), arg("p", Pred)],
    allowed: any,
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

/// d = whether p holds in any lane, or in all lanes.
pub static VOTE: Inst = Inst {
    name: "vote",
    text: "vote.sync.{mode}.pred {d}, {p}, 0xffffffff;",
    operands: &[out("d", Pred), arg("p", Pred), word("mode", &["any", "all"])],
    allowed: any,
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

/// p holds in exactly one lane of the warp. The assembler knows that a single thread executes code guarded by p.
pub static ELECT: Inst = Inst {
    name: "elect",
    text: "elect.sync _|{p}, 0xffffffff;",
    operands: &[out("p", Pred)],
    allowed: any,
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

/// d = sum, minimum, maximum or bitwise combination of a over the warp.
pub static REDUX: Inst = Inst {
    name: "redux",
    text: "redux.sync.{o} {d}, {a}, 0xffffffff;",
    operands: &[
        out("d", B32),
        arg("a", B32),
        word("o", &["add.u32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32"]),
    ],
    allowed: any,
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

/// d = mask of the lanes with the same a.
pub static MATCH_ANY: Inst = Inst {
    name: "match.any",
    text: "match.any.sync.b32 {d}, {a}, 0xffffffff;",
    operands: &[out("d", B32), arg("a", B32)],
    allowed: any,
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let all = gather(m, op, 1);
        for lane in lanes(m.active()) {
            let same = lanes(m.active()).filter(|&other| all[other as usize] as u32 == all[lane as usize] as u32);
            let bits = same.fold(0, |bits, other| bits | 1 << other);
            m.set(lane, op.reg(0), bits);
        }
    },
    source: SOURCE,
};

/// p = whether all lanes have the same a; d = mask of all lanes if so, else 0.
pub static MATCH_ALL: Inst = Inst {
    name: "match.all",
    text: "match.all.sync.b32 {d}|{p}, {a}, 0xffffffff;",
    operands: &[out("d", B32), out("p", Pred), arg("a", B32)],
    allowed: any,
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let (all, active) = (gather(m, op, 2), m.active());
        let first = all[active.trailing_zeros() as usize] as u32;
        let same = lanes(active).all(|lane| all[lane as usize] as u32 == first);
        for lane in lanes(active) {
            m.set(lane, op.reg(0), if same { active.into() } else { 0 });
            m.set(lane, op.reg(1), same.into());
        }
    },
    source: SOURCE,
};

/// d = mask of the lanes that execute this now. It does not tell which lanes will be together later.
pub static ACTIVE: Inst = Inst {
    name: "activemask",
    text: "activemask.b32 {d};",
    operands: &[out("d", B32)],
    allowed: any,
    needs: Needs::AMPERE,
    unit: Unit::Warp,
    together: Together::Thread,
    effect: Effect::Volatile,
    meaning: |m, op| {
        let active = m.active().into();
        scatter(m, op, active);
    },
    source: SOURCE,
};

/// d = transposed 8 x 8 matrix of 16-bit elements; a lane holds two neighbours of row lane / 4.
pub static TRANSPOSE: Inst = Inst {
    name: "movmatrix",
    text: "movmatrix.sync.aligned.m8n8.trans.b16 {d}, {a};",
    operands: &[out("d", B32), reg("a", B32)],
    allowed: any,
    needs: Needs::from((7, 8), 80),
    unit: Unit::Warp,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| {
        let all = gather(m, op, 1);
        let element = |row: u32, col: u32| all[(4 * row + col / 2) as usize] >> (16 * (col % 2)) & 0xffff;
        for lane in lanes(m.active()) {
            let (row, col) = (lane / 4, 2 * (lane % 4));
            m.set(lane, op.reg(0), element(col + 1, row) << 16 | element(col, row));
        }
    },
    source: "PTX ISA, warp-level matrix instructions, movmatrix",
};

/// All rows of this family.
pub static ROWS: &[&Inst] = &[&SHFL, &BALLOT, &VOTE, &ELECT, &REDUX, &MATCH_ANY, &MATCH_ALL, &ACTIVE, &TRANSPOSE];
