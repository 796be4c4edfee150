//! Loads and stores with cache hints, policies of the L2 cache, and prefetches.
//!
//! A hint has no visible effect: the meanings are those of plain loads and stores.

use super::memory::{VECTOR, load, reading, store, writing};
use crate::inst::Class::{B32, B64, F32};
use crate::inst::{Effect, Inst, Needs, Space, Unit, arg, at, loaded, out, stored, word};
use crate::machine::{MemoryOrder, each};

const POLICIES: &[&str] = &["evict_first", "evict_normal", "evict_last", "evict_unchanged"];

/// Reads global memory that nothing writes while the kernel runs (`.nc`).
pub static LD_GLOBAL_CONST: Inst = Inst {
    allowed: |op| op.counts(0, 2),
    ..reading(
        "ld.global.nc",
        "ld.global.nc.L1::no_allocate.L2::128B{v}.b32 {d}, {a};",
        &[loaded("d", B32), at("a", Space::Global), word("v", VECTOR)],
        Space::Global,
        Needs::from((7, 4), 80),
        |m, op| load(m, op, Space::Global, MemoryOrder::Weak),
    )
};

/// Reads through all caches (`.ca`), through L2 only (`.cg`), or as data that is read once (`.cs`).
pub static LD_GLOBAL_CACHED: Inst = Inst {
    allowed: |op| op.counts(0, 2),
    ..reading(
        "ld.global.cached",
        "ld.global{cache}{v}.b32 {d}, {a};",
        &[loaded("d", B32), at("a", Space::Global), word("v", VECTOR), word("cache", &[".ca", ".cg", ".cs", ".lu"])],
        Space::Global,
        Needs::AMPERE,
        |m, op| load(m, op, Space::Global, MemoryOrder::Weak),
    )
};

/// Writes with write-back (`.wb`), to L2 only (`.cg`), as data that is not read again (`.cs`), or with write-through
/// (`.wt`).
pub static ST_GLOBAL_CACHED: Inst = Inst {
    allowed: |op| op.counts(1, 2),
    ..writing(
        "st.global.cached",
        "st.global{cache}{v}.b32 {a}, {x};",
        &[at("a", Space::Global), stored("x", B32), word("v", VECTOR), word("cache", &[".wb", ".cg", ".cs", ".wt"])],
        Space::Global,
        Needs::AMPERE,
        |m, op| store(m, op, Space::Global, MemoryOrder::Weak),
    )
};

/// Reads with an L2 policy; `.nc` if nothing writes that memory while the kernel runs.
pub static LD_GLOBAL_HINT: Inst = Inst {
    allowed: |op| op.counts(0, 2),
    ..reading(
        "ld.global.hint",
        "ld.global{nc}.L2::cache_hint{v}.b32 {d}, {a}, {policy};",
        &[
            loaded("d", B32),
            at("a", Space::Global),
            word("v", VECTOR),
            word("nc", &["", ".nc", ".nc.L1::no_allocate"]),
            arg("policy", B64),
        ],
        Space::Global,
        Needs::from((7, 4), 80),
        |m, op| load(m, op, Space::Global, MemoryOrder::Weak),
    )
};

/// Writes with an L2 policy.
pub static ST_GLOBAL_HINT: Inst = Inst {
    allowed: |op| op.counts(1, 2),
    ..writing(
        "st.global.hint",
        "st.global.L2::cache_hint{v}.b32 {a}, {x}, {policy};",
        &[at("a", Space::Global), stored("x", B32), word("v", VECTOR), arg("policy", B64)],
        Space::Global,
        Needs::from((7, 4), 80),
        |m, op| store(m, op, Space::Global, MemoryOrder::Weak),
    )
};

/// d = a policy for this fraction of the accesses. PTX does not define its encoding; here it is the fraction's bits
/// above the index of the policy.
pub static POLICY: Inst = Inst {
    effect: Effect::Pure,
    unit: Unit::Alu,
    ..reading(
        "createpolicy",
        "createpolicy.fractional.L2::{p}.b64 {d}, {fraction};",
        &[out("d", B64), arg("fraction", F32), word("p", POLICIES)],
        Space::Global,
        Needs::from((7, 4), 80),
        |m, op| {
            let number = POLICIES.iter().position(|p| *p == op.word(2)).unwrap_or(0) as u64;
            each(m, op, |x| x[0] << 32 | number);
        },
    )
};

/// Prefetches a cache line.
pub static PREFETCH: Inst = Inst {
    effect: Effect::Pure,
    ..reading(
        "prefetch.global",
        "prefetch.global.{level} {a};",
        &[at("a", Space::Global), word("level", &["L1", "L2", "L2::evict_last", "L2::evict_normal"])],
        Space::Global,
        Needs::from((7, 4), 80),
        |_, _| {},
    )
};

/// All rows of this family.
pub static ROWS: &[&Inst] =
    &[&LD_GLOBAL_CONST, &LD_GLOBAL_CACHED, &ST_GLOBAL_CACHED, &LD_GLOBAL_HINT, &ST_GLOBAL_HINT, &POLICY, &PREFETCH];
