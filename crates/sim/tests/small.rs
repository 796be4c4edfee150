//! One small kernel for each way of being wrong, beside one that is right.

use crate::common::{download, upload};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, LaunchError, Stream, Value};
use fulgurite_ptx::inst::{Arg, Base, Class, Op, Reg};
use fulgurite_ptx::kernel::{Kernel, Param, ParamKind, RoleUse, Stmt, Target};
use fulgurite_ptx::table;
use fulgurite_sim::{Fault, Finding, Line, Options, Sim};
use std::panic::Location;
use std::sync::Arc;

/// A kernel written row by row, on a few registers. B32 0 holds the shared base, B32 1 the thread's number, B32 2 the
/// lane, B32 3 the block; B64 0 and 1 hold the parameters `x` and `y`.
struct Asm {
    body: Vec<Stmt>,
}

fn r(index: u32) -> Arg {
    Arg::Reg(Reg { class: Class::B32, index })
}
fn d(index: u32) -> Arg {
    Arg::Reg(Reg { class: Class::B64, index })
}
fn p(index: u32) -> Arg {
    Arg::Reg(Reg { class: Class::Pred, index })
}
fn list(index: u32) -> Arg {
    Arg::List([Reg { class: Class::B32, index }].into())
}
fn imm(x: u64) -> Arg {
    Arg::Imm(x)
}
fn word(w: &'static str) -> Arg {
    Arg::Word(w)
}
/// Shared memory at B32 `index`, plus bytes.
fn s(index: u32, offset: i32) -> Arg {
    Arg::Address(Base::Reg(Reg { class: Class::B32, index }), offset)
}
/// Global memory at B64 `index`, plus bytes.
fn g(index: u32, offset: i32) -> Arg {
    Arg::Address(Base::Reg(Reg { class: Class::B64, index }), offset)
}

impl Asm {
    fn new() -> Self {
        let mut asm = Asm { body: Vec::new() };
        asm.op("mov.smem", [r(0)]);
        for (i, name) in ["%tid.x", "%laneid", "%ctaid.x"].into_iter().enumerate() {
            asm.op("mov.special", [r(i as u32 + 1), word(name)]);
        }
        for i in 0..2 {
            asm.op("ld.param.b64", [d(i), Arg::Address(Base::Param(i), 0)]);
        }
        asm
    }
    #[track_caller]
    fn op(&mut self, row: &str, args: impl Into<Box<[Arg]>>) -> Line {
        let inst = table::rows().find(|inst| inst.name == row).unwrap_or_else(|| panic!("no row {row}"));
        let at = Location::caller();
        self.body.push(Stmt::Op(Op { inst, args: args.into(), at }));
        at.into()
    }
    /// What `f` adds, where B32 `register` equals a number.
    #[track_caller]
    fn only(&mut self, register: u32, equals: u64, f: impl FnOnce(&mut Asm)) {
        self.op("setp", [p(7), r(register), imm(equals), word("eq"), word("u32")]);
        let mut inner = Asm { body: Vec::new() };
        f(&mut inner);
        let cond = Reg { class: Class::Pred, index: 7 };
        self.body.push(Stmt::If { cond, then: inner.body, otherwise: Vec::new(), cold: false, at: Location::caller() });
    }
    /// Waits for a phase of the mbarrier at a shared offset.
    #[track_caller]
    fn wait(&mut self, offset: i32, parity: u64) {
        let mut inner = Asm { body: Vec::new() };
        inner.op("mbarrier.try_wait", [p(6), s(0, offset), imm(parity)]);
        let cond = Reg { class: Class::Pred, index: 6 };
        let at = Location::caller();
        inner.body.push(Stmt::Break { cond, when: true, at });
        self.body.push(Stmt::Loop { body: inner.body, at });
    }
    fn kernel(self, threads: u32, cluster: u32) -> Kernel {
        let param = |name: &str| Param { name: name.into(), kind: ParamKind::Pointer(16) };
        Kernel {
            name: "small".into(),
            target: Target::HOPPER,
            params: vec![param("x"), param("y")],
            threads,
            cluster,
            most_registers: None,
            shared: Vec::new(),
            shared_bytes: 4096,
            roles: Vec::new(),
            barriers: 16,
            registers: [16; Class::ALL.len()],
            loose_waits: Vec::new(),
            publishes: Vec::new(),
            body: self.body,
        }
    }
}

/// Runs with x = 64 words 0, 1, 2 ... and y not written; the findings, and y.
fn run(kernel: Kernel, blocks: u32, seed: u64) -> (Vec<Finding>, Vec<u8>) {
    let sim = Sim::new(Options { seed, budget: 20_000, ..Options::default() });
    let x: Vec<u32> = (0..64).collect();
    let (x, y) = (upload(&sim, &x), sim.allocate(256).unwrap());
    let pointer = |b: &Buffer| Value::Pointer(b.span());
    let module = sim.load(Arc::new(kernel)).unwrap();
    let _ = sim.launch(&module, [blocks, 1, 1], &[pointer(&x), pointer(&y)], Stream::default());
    (sim.findings(), download(&sim, &y))
}

#[track_caller]
fn clean(make: impl Fn(&mut Asm), threads: u32, cluster: u32, blocks: u32) -> Vec<u8> {
    let mut y = Vec::new();
    for seed in 0..6 {
        let mut asm = Asm::new();
        make(&mut asm);
        let (findings, bytes) = run(asm.kernel(threads, cluster), blocks, seed);
        assert!(findings.is_empty(), "seed {seed}: {}", findings[0]);
        y = bytes;
    }
    y
}

#[track_caller]
fn faulty(fault: Fault, make: impl Fn(&mut Asm) -> Line, threads: u32, cluster: u32, blocks: u32) {
    for seed in 0..6 {
        let mut asm = Asm::new();
        let line = make(&mut asm);
        let (findings, _) = run(asm.kernel(threads, cluster), blocks, seed);
        let found = findings.iter().any(|f| f.fault == fault && f.names(line));
        assert!(found, "seed {seed}: wanted {fault:?} at {line}, got {findings:?}");
    }
}

fn store_own(a: &mut Asm) -> Line {
    a.op("mad.lo", [r(4), r(1), imm(4), r(0), word("u32")]);
    a.op("st.shared.b32", [s(4, 0), list(1), word("")])
}
/// Reads the word of the thread 32 further.
fn load_other(a: &mut Asm) -> Line {
    a.op("bits.b32", [r(5), r(1), imm(32), word("xor")]);
    a.op("mad.lo", [r(6), r(5), imm(4), r(0), word("u32")]);
    a.op("ld.shared.b32", [list(7), s(6, 0), word("")])
}

#[test]
fn warps_share_memory_across_a_barrier() {
    clean(
        |a| {
            store_own(a);
            a.op("bar.sync.all", []);
            load_other(a);
        },
        64,
        1,
        1,
    );
    faulty(
        Fault::Race,
        |a| {
            store_own(a);
            load_other(a)
        },
        64,
        1,
        1,
    );
}

#[test]
fn memory_that_nobody_wrote() {
    faulty(Fault::Uninitialised, load_other, 64, 1, 1);
    faulty(Fault::Uninitialised, |a| a.op("ld.global.b32", [list(4), g(1, 0), word("")]), 32, 1, 1);
    faulty(Fault::UninitialisedRegister, |a| a.op("mov.b32", [r(4), r(5)]), 32, 1, 1);
}

#[test]
fn addresses() {
    faulty(Fault::OutOfBounds, |a| a.op("ld.global.b32", [list(4), g(0, 256), word("")]), 32, 1, 1);
    faulty(Fault::OutOfBounds, |a| a.op("ld.shared.b32", [list(4), s(0, 4096), word("")]), 32, 1, 1);
    faulty(Fault::OutOfBounds, |a| a.op("ld.shared.b32", [list(4), s(0, -4), word("")]), 32, 1, 1);
    faulty(Fault::Misaligned, |a| a.op("ld.global.b32", [list(4), g(0, 2), word("")]), 32, 1, 1);
    let four = Arg::List((4..8).map(|index| Reg { class: Class::B32, index }).collect());
    faulty(Fault::Misaligned, |a| a.op("ld.global.b32", [four.clone(), g(0, 4), word(".v4")]), 32, 1, 1);
}

#[test]
fn blocks_meet_in_global_memory() {
    faulty(Fault::Race, |a| a.op("st.global.b32", [g(0, 0), list(3), word("")]), 32, 1, 2);
    clean(
        |a| {
            a.op("atom.global", [r(4), g(0, 0), imm(1), word("add.u32")]);
        },
        32,
        1,
        4,
    );
    // One block writes a word and raises a flag, the other waits for the flag and reads the word.
    let message = |a: &mut Asm, store: &'static str, load: &'static str| -> Line {
        let mut line = None;
        a.op("mov.b32", [r(9), imm(77)]);
        a.op("mov.b32", [r(10), imm(1000)]);
        a.only(3, 0, |a| {
            a.only(2, 0, |a| {
                a.op("st.global.b32", [g(1, 0), list(9), word("")]);
                match store {
                    "st.release" => a.op(store, [g(0, 16), list(10), word("gpu")]),
                    _ => a.op(store, [g(0, 16), list(10), word("")]),
                };
            });
        });
        a.only(3, 1, |a| {
            let mut inner = Asm { body: Vec::new() };
            match load {
                "ld.acquire" => inner.op(load, [list(11), g(0, 16), word("gpu")]),
                _ => inner.op(load, [list(11), g(0, 16), word("")]),
            };
            inner.op("setp", [p(5), r(11), imm(1000), word("eq"), word("u32")]);
            let (cond, at) = (Reg { class: Class::Pred, index: 5 }, Location::caller());
            inner.body.push(Stmt::Break { cond, when: true, at });
            a.body.push(Stmt::Loop { body: inner.body, at });
            line = Some(a.op("ld.global.b32", [list(12), g(1, 0), word("")]));
        });
        line.unwrap()
    };
    clean(
        |a| {
            message(a, "st.release", "ld.acquire");
        },
        32,
        1,
        2,
    );
    faulty(Fault::Race, |a| message(a, "st.global.b32", "ld.acquire"), 32, 1, 2);
}

/// Each thread copies a word, and one reads that of the next warp.
fn copies(a: &mut Asm, waits: bool, meets: bool) -> Line {
    a.op("mad.lo", [r(4), r(1), imm(4), r(0), word("u32")]);
    a.op("mad.wide", [d(4), r(1), imm(4), d(0)]);
    a.op("cp.async", [s(4, 0), g(4, 0), imm(4), imm(4), word("ca")]);
    a.op("cp.async.commit_group", []);
    if waits {
        a.op("cp.async.wait_group", [imm(0)]);
    }
    if meets {
        a.op("bar.sync.all", []);
    }
    load_other(a)
}

#[test]
fn asynchronous_copies() {
    let last = |a: &mut Asm| {
        copies(a, true, true);
        a.op("mad.wide", [d(5), r(1), imm(4), d(1)]);
        a.op("st.global.b32", [g(5, 0), list(7), word("")]);
    };
    let y = clean(last, 64, 1, 1);
    assert_eq!(y[..4], 32u32.to_le_bytes());
    faulty(Fault::Race, |a| copies(a, true, false), 64, 1, 1);
    faulty(Fault::Race, |a| copies(a, false, true), 64, 1, 1);
}

/// 256 bytes into shared memory, counted on a barrier, and out again.
fn bulk(a: &mut Asm, out: &'static str) {
    a.only(1, 0, |a| {
        a.op("mbarrier.init", [s(0, 0), imm(1)]);
        a.op("fence.mbarrier_init", []);
        a.op("mbarrier.arrive.expect_tx", [s(0, 0), imm(256)]);
        a.op("cp.async.bulk.load", [s(0, 1024), g(0, 0), imm(256), s(0, 0)]);
        a.wait(0, 0);
        match out {
            "add" => a.op("cp.reduce.async.bulk", [g(0, 0), s(0, 1024), imm(256), word("add.u32")]),
            _ => a.op("cp.async.bulk.store", [g(1, 0), s(0, 1024), imm(256)]),
        };
        a.op("cp.async.bulk.commit_group", []);
        a.op("cp.async.bulk.wait_group", [imm(0)]);
    });
}

#[test]
fn bulk_copies() {
    let y = clean(|a| bulk(a, "store"), 32, 1, 1);
    let want: Vec<u8> = (0..64u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(y, want);
    let doubled = |a: &mut Asm| {
        bulk(a, "add");
        a.only(1, 0, |a| {
            a.op("ld.global.b32", [list(4), g(0, 12), word("")]);
            a.op("st.global.b32", [g(1, 0), list(4), word("")]);
        });
    };
    assert_eq!(clean(doubled, 32, 1, 1)[..4], 6u32.to_le_bytes());
}

#[test]
fn misused_mbarriers() {
    faulty(Fault::NotABarrier, |a| a.op("mbarrier.arrive", [s(0, 8)]), 32, 1, 1);
    let twice = |a: &mut Asm| {
        let mut line = None;
        a.only(1, 0, |a| {
            a.op("mbarrier.init", [s(0, 0), imm(1)]);
            line = Some(a.op("mbarrier.init", [s(0, 0), imm(1)]));
        });
        line.unwrap()
    };
    faulty(Fault::NotABarrier, twice, 32, 1, 1);
    let plain = |a: &mut Asm| {
        a.only(1, 0, |a| {
            a.op("mbarrier.init", [s(0, 0), imm(1)]);
        });
        a.op("bar.sync.all", []);
        a.op("st.shared.b32", [s(0, 4), list(1), word("")])
    };
    faulty(Fault::NotABarrier, plain, 32, 1, 1);
    let overflow = |a: &mut Asm| {
        let mut line = None;
        a.only(1, 0, |a| {
            a.op("mbarrier.init", [s(0, 0), imm(1)]);
            line = Some(a.op("mbarrier.expect_tx", [s(0, 0), imm(1 << 20)]));
        });
        line.unwrap()
    };
    faulty(Fault::ByteOverflow, overflow, 32, 1, 1);
    let crowd = |a: &mut Asm| {
        a.only(1, 0, |a| {
            a.op("mbarrier.init", [s(0, 0), imm(33)]);
        });
        a.op("bar.sync.all", []);
        a.op("mbarrier.arrive.count", [s(0, 0), imm(2)])
    };
    faulty(Fault::TooManyArrivals, crowd, 32, 1, 1);
}

#[test]
fn misused_barriers_of_threads() {
    let counts = |a: &mut Asm| {
        a.op("shr", [r(4), r(1), imm(5), word("u32")]);
        let mut line = None;
        a.only(4, 0, |a| {
            a.op("bar.sync", [imm(1), imm(64)]);
        });
        a.only(4, 1, |a| line = Some(a.op("bar.sync", [imm(1), imm(96)])));
        line.unwrap()
    };
    faulty(Fault::BarrierCount, counts, 96, 1, 1);
    let early = |a: &mut Asm| {
        a.op("shr", [r(4), r(1), imm(5), word("u32")]);
        let mut line = None;
        a.only(4, 0, |a| line = Some(a.op("bar.sync.all", [])));
        line.unwrap()
    };
    faulty(Fault::Deadlock, early, 64, 1, 1);
    let lanes = |a: &mut Asm| {
        let mut line = None;
        a.only(2, 3, |a| line = Some(a.op("bar.sync.all", [])));
        line.unwrap()
    };
    faulty(Fault::Collective, lanes, 32, 1, 1);
}

/// A block writes to the other block of its cluster.
fn reaches(a: &mut Asm, meets: bool) -> Line {
    a.op("mapa", [r(4), r(0), imm(1)]);
    let mut line = None;
    a.only(3, 0, |a| a.only(2, 0, |a| line = Some(a.op("st.cluster.b32", [s(4, 0), list(1), word("")]))));
    if meets {
        a.op("barrier.cluster.arrive", [word("release")]);
        a.op("barrier.cluster.wait", []);
        a.only(3, 1, |a| {
            a.op("ld.shared.b32", [list(5), s(0, 0), word("")]);
        });
    }
    line.unwrap()
}

#[test]
fn blocks_outlive_what_reaches_them() {
    clean(
        |a| {
            reaches(a, true);
        },
        32,
        2,
        2,
    );
    faulty(Fault::Exit, |a| reaches(a, false), 32, 2, 2);
}

#[test]
fn kernels_that_do_not_end() {
    faulty(Fault::Trap, |a| a.op("trap", []), 32, 1, 1);
    let forever = |a: &mut Asm| {
        let mut inner = Asm { body: Vec::new() };
        let line = inner.op("mov.b32", [r(4), imm(1)]);
        a.body.push(Stmt::Loop { body: inner.body, at: Location::caller() });
        line
    };
    for seed in 0..3 {
        let mut asm = Asm::new();
        let line = forever(&mut asm);
        let (findings, _) = run(asm.kernel(32, 1), 1, seed);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].fault, findings[0].here.line.file), (Fault::Endless, line.file));
    }
}

#[test]
fn wrong_launches_are_refused_before_they_start() {
    let sim = Sim::default();
    let kernel = || Arc::new(Asm::new().kernel(32, 2));
    let module = sim.load(kernel()).unwrap();
    let few = sim.launch(&module, [2, 1, 1], &[], Stream::default());
    assert!(matches!(few, Err(DeviceError::Launch(LaunchError::Count { want: 2, got: 0, .. }))));
    let x = sim.allocate(16).unwrap();
    let pointer = Value::Pointer(x.span());
    let odd = sim.launch(&module, [1, 1, 1], &[pointer.clone(), pointer.clone()], Stream::default());
    assert!(matches!(odd, Err(DeviceError::Launch(LaunchError::Grid { .. }))));
    let far = fulgurite_ptx::device::Span::new(4096, 64);
    let foreign = sim.launch(&module, [2, 1, 1], &[pointer, Value::Pointer(far)], Stream::default());
    assert!(foreign.unwrap_err().to_string().contains("`y` is no memory of this device"));
    let mut broken = Asm::new();
    broken.op("mov.b32", [r(99), imm(0)]);
    let refused = sim.load(Arc::new(broken.kernel(32, 1)));
    assert!(refused.err().unwrap().to_string().contains("register 99 of class B32, and there are 16"));
    // A warp has one role.
    let role = |name: &str, first_warp, warps| RoleUse { name: name.into(), first_warp, warps, registers: None };
    for (roles, want) in [
        (vec![role("a", 0, 3), role("b", 2, 2)], "role `b` has 2 warps from 2 on, allowed: one or more from 3 on"),
        (vec![role("a", 0, 1), role("b", 2, 2)], "role `b` has 2 warps from 2 on, allowed: one or more from 1 on"),
        (vec![role("a", 0, 2), role("b", 2, 0)], "role `b` has 0 warps from 2 on, allowed: one or more from 2 on"),
        (vec![role("a", 0, 3)], "roles of 3 warps, allowed: all of the block's 4"),
    ] {
        let kernel = Kernel { roles, ..Asm::new().kernel(128, 1) };
        let refused = sim.load(Arc::new(kernel)).err().unwrap().to_string();
        assert!(refused.contains(want), "{refused}");
    }
}
