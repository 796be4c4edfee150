//! Rows that start something for the machine to finish: what they hand over. And every row, once.

use super::machine::{Counting, GLOBAL, Given, SHARED, Warp, at, execute, same};
use super::uses::uses;
use fulgurite_ptx::Number;
use fulgurite_ptx::inst::{Arg, Base, Class, Effect, Inst, Reg, Space};
use fulgurite_ptx::machine::{Done, Machine, MemoryAddress, Queue, Reduction, Transfer, answer};
use fulgurite_ptx::product::{Left, Major};
use fulgurite_ptx::table::{self, bulk, bytes, launch, tcgen05, tensor};
use fulgurite_ptx::tcgen05::{CtaGroup, FenceSide, ProductKind, TensorAction, TensorLeft, TensorProduct};

const TILE: u64 = SHARED as u64 + 1024;
const BAR: u64 = SHARED as u64 + 8;
const MAP: u64 = 0x7700;

fn place(space: Space, address: u64) -> MemoryAddress {
    MemoryAddress { space, address }
}
fn started(inst: &'static Inst, given: &[Given]) -> Transfer {
    let mut warp = Warp::new(64, 4096);
    warp.active = 1 << 7;
    execute(&mut warp, inst, given);
    assert_eq!(warp.transfers.len(), 1, "{}", inst.name);
    warp.transfers.remove(0)
}
fn coordinates(all: &[i32]) -> Given {
    Given::List(all.iter().map(|&c| [u64::from(c as u32); 32]).collect())
}

#[test]
fn boxes_of_tensors() {
    let policy = same(99);
    let load_of = |multicast, group| Transfer::Box {
        map: MAP,
        coordinates: vec![64, -8, 3],
        tile: place(Space::Cluster, TILE),
        inward: true,
        reduce: None,
        multicast,
        group,
        done: Done::Mbarrier(place(Space::Cluster, BAR)),
    };
    let load = |multicast| load_of(multicast, CtaGroup::Single);
    let given = [at(TILE), same(MAP), coordinates(&[64, -8, 3]), at(BAR)];
    let with = |rest: &[Given]| [&given[..], rest].concat();
    let (rank, mask) = (Given::Word("3d"), same(0b1011));
    assert_eq!(started(&bulk::LOAD_BOX, &with(std::slice::from_ref(&rank))), load(None));
    assert_eq!(started(&bulk::LOAD_BOX_PAIR, &with(std::slice::from_ref(&rank))), load_of(None, CtaGroup::Pair));
    assert_eq!(started(&bulk::LOAD_BOX_HINT, &with(&[rank.clone(), policy.clone()])), load(None));
    assert_eq!(started(&bulk::LOAD_BOX_MULTICAST, &with(&[mask.clone(), rank.clone()])), load(Some(0b1011)));
    let all = with(&[mask, rank, policy.clone()]);
    assert_eq!(started(&bulk::LOAD_BOX_MULTICAST_HINT, &all), load(Some(0b1011)));

    let store = |reduce| Transfer::Box {
        map: MAP,
        coordinates: vec![0, 5],
        tile: place(Space::Shared, TILE),
        inward: false,
        reduce,
        multicast: None,
        group: CtaGroup::Single,
        done: Done::Group(Queue::Bulk),
    };
    let given = [same(MAP), coordinates(&[0, 5]), at(TILE), Given::Word("2d")];
    let with = |rest: &[Given]| [&given[..], rest].concat();
    assert_eq!(started(&bulk::STORE_BOX, &given), store(None));
    assert_eq!(started(&bulk::STORE_BOX_HINT, &with(std::slice::from_ref(&policy))), store(None));
    for (word, way) in [
        ("add", Reduction::Add),
        ("min", Reduction::Min),
        ("max", Reduction::Max),
        ("and", Reduction::And),
        ("or", Reduction::Or),
        ("xor", Reduction::Xor),
        ("inc", Reduction::Inc),
        ("dec", Reduction::Dec),
    ] {
        assert_eq!(started(&bulk::REDUCE_BOX, &with(&[Given::Word(word)])), store(Some(way)));
        assert_eq!(started(&bulk::REDUCE_BOX_HINT, &with(&[Given::Word(word), policy.clone()])), store(Some(way)));
    }
}

#[test]
fn runs_of_bytes() {
    let run = |to, from, reduce, multicast, done| Transfer::Bytes {
        to,
        from,
        bytes: 48,
        padded: 48,
        reduce,
        multicast,
        done,
    };
    let (near, far) = (place(Space::Cluster, TILE), place(Space::Global, GLOBAL + 16));
    let counted = Done::Mbarrier(place(Space::Cluster, BAR));
    let given = [at(TILE), at(GLOBAL + 16), same(48), at(BAR), same(3), same(99)];
    assert_eq!(started(&bytes::LOAD_BYTES_MULTICAST, &given[..5]), run(near, far, None, Some(3), counted));
    assert_eq!(started(&bytes::LOAD_BYTES_MULTICAST_HINT, &given), run(near, far, None, Some(3), counted));
    let own = place(Space::Shared, TILE);
    for (word, reduce) in [
        ("add.f32", (Reduction::Add, "f32")),
        ("add.noftz.bf16", (Reduction::Add, "bf16")),
        ("max.s64", (Reduction::Max, "s64")),
        ("xor.b32", (Reduction::Xor, "b32")),
    ] {
        let given = [at(GLOBAL + 16), at(TILE), same(48), Given::Word(word), same(99)];
        let want = run(far, own, Some(reduce), None, Done::Group(Queue::Bulk));
        assert_eq!(started(&bytes::REDUCE_BYTES, &given[..4]), want);
        assert_eq!(started(&bytes::REDUCE_BYTES_HINT, &given), want);
    }
    let peer = place(Space::Cluster, TILE | 1 << 24);
    let given = [at(TILE | 1 << 24), at(TILE), same(48), at(BAR), Given::Word("min.u32")];
    assert_eq!(started(&bytes::REDUCE_TO_PEER, &given), run(peer, own, Some((Reduction::Min, "u32")), None, counted));
}

#[test]
fn products_of_warpgroups() {
    let d = |n| Given::List(vec![[0; 32]; n]);
    let n = Given::Number;
    let run = |inst, given: &[Given]| {
        let mut warp = Warp::new(0, 0);
        execute(&mut warp, inst, given);
        warp.products.remove(0)
    };
    let got = run(&tensor::WGMMA_SS, &[d(64), same(11), same(22), same(1), n(128), Given::Word("bf16"), n(1), n(0)]);
    assert_eq!((got.a, got.b), (Left::Tile(11, Major::Outer), (22, Major::Inner)));
    assert_eq!((got.n, got.numbers, got.onto), (128, [Number::F32, Number::Bf16, Number::Bf16], true));
    let got = run(&tensor::WGMMA_RS, &[d(4), d(4), same(22), same(0), n(8), Given::Word("f16"), n(1)]);
    assert!(matches!(got.a, Left::Regs(regs) if regs.len() == 4));
    assert_eq!((got.b, got.onto, got.d.len()), ((22, Major::Outer), false, 4));
    let got = run(&tensor::WGMMA_F16_SS, &[d(16), same(11), same(22), same(0), n(64), n(0), n(1)]);
    assert_eq!((got.numbers, got.a, got.b), ([Number::F16; 3], Left::Tile(11, Major::Inner), (22, Major::Outer)));
    let got = run(&tensor::WGMMA_F16_RS, &[d(16), d(4), same(22), same(0), n(64), n(1)]);
    assert_eq!(got.b, (22, Major::Outer));
}

#[test]
fn tensor_memory() {
    let mut warp = Warp::new(0, 4096);
    warp.active = 1 << 7;
    let n = Given::Number;
    let bar = place(Space::Cluster, BAR);
    let [one, two] = ["1", "2"].map(Given::Word);
    let (single, pair) = (CtaGroup::Single, CtaGroup::Pair);
    execute(&mut warp, &tcgen05::ALLOC, &[at(TILE), n(64), one.clone()]);
    execute(&mut warp, &tcgen05::RELINQUISH, std::slice::from_ref(&two));
    let product = [same(22), same(33)];
    let with = |first: &[Given], rest: &[Given]| [first, &product, rest].concat();
    let [shared, memory] = [[at(0x40), same(11)], [at(0x40), at(0x20)]];
    let kind = |kind: ProductKind| Given::Word(kind.word());
    execute(&mut warp, &tcgen05::MMA_SS, &with(&shared, &[same(0), one.clone(), kind(ProductKind::F16)]));
    execute(&mut warp, &tcgen05::MMA_TS, &with(&memory, &[same(1), two.clone(), kind(ProductKind::Tf32)]));
    execute(&mut warp, &tcgen05::MMA_I8_SS, &with(&shared, &[same(1), one.clone()]));
    execute(&mut warp, &tcgen05::MMA_I8_TS, &with(&memory, &[same(1), one.clone()]));
    let scaled = |kind| [at(0x80), at(0x90), same(1), one.clone(), Given::Word(kind)];
    let [mx, nv] = [ProductKind::Mxf8f6f4, ProductKind::Nvf4];
    execute(&mut warp, &tcgen05::MMA_SCALED_SS, &with(&shared, &scaled(mx.word())));
    execute(&mut warp, &tcgen05::MMA_SCALED_TS, &with(&memory, &scaled(nv.word())));
    execute(&mut warp, &tcgen05::COPY_SCALES, &[at(0x80), same(44), two.clone()]);
    execute(&mut warp, &tcgen05::COMMIT, &[at(BAR), one]);
    execute(&mut warp, &tcgen05::COMMIT_MULTICAST, &[at(BAR), same(3), two.clone()]);
    execute(&mut warp, &tcgen05::FENCE, &[Given::Word("after")]);
    execute(&mut warp, &tcgen05::DEALLOC, &[same(0x40), n(64), two]);
    let product = |a, onto, group, kind, scales| {
        TensorAction::Multiply(TensorProduct { d: 0x40, a, b: 22, shape: 33, kind, scales, onto, group })
    };
    let (shared, memory, scales) = (TensorLeft::Tile(11), TensorLeft::Memory(0x20), Some([0x80, 0x90]));
    let want = [
        TensorAction::Allocate { to: place(Space::Shared, TILE), columns: 64, group: single },
        TensorAction::Relinquish(pair),
        product(shared, false, single, ProductKind::F16, None),
        product(memory, true, pair, ProductKind::Tf32, None),
        product(shared, true, single, ProductKind::I8, None),
        product(memory, true, single, ProductKind::I8, None),
        product(shared, true, single, mx, scales),
        product(memory, true, single, nv, scales),
        TensorAction::CopyScales { to: 0x80, from: 44, group: pair },
        TensorAction::Commit { bar, multicast: None, group: single },
        TensorAction::Commit { bar, multicast: Some(3), group: pair },
        TensorAction::Fence(FenceSide::After),
        TensorAction::Free { address: 0x40, columns: 64, group: pair },
    ];
    assert_eq!(warp.actions, want.map(|action| (7, action)));
}

#[test]
fn columns_of_tensor_memory() {
    let mut warp = Warp::new(0, 0);
    let row = |first: u64| std::array::from_fn(|lane| first + lane as u64);
    execute(&mut warp, &tcgen05::ST, &[at(0x10), Given::List(vec![row(100), row(200)]), Given::Number(2)]);
    execute(&mut warp, &tcgen05::WAIT_ST, &[]);
    let got = execute(&mut warp, &tcgen05::LD, &[Given::Room(2), at(0x10), Given::Number(2)]);
    // The test's machine has one lane for all.
    assert_eq!(got, [[131; 32], [231; 32]]);
    assert_eq!(warp.actions, [(0, TensorAction::WaitStores)]);
}

fn fill(warp: &mut Warp, reg: Reg, f: impl Fn(u32) -> u64) {
    (0..32).for_each(|lane| warp.set(lane, reg, f(lane)));
}

/// Every use of every row runs, on special values, and what it writes fits its registers.
#[test]
fn every_meaning_runs() {
    let special: [u32; 8] = [0, 1, 31, 32, 0x7fff_ffff, 0x8000_0000, 0x7fc0_0000, 0xffff_ffff];
    for inst in table::rows() {
        let [allowed, _] = uses(inst);
        for one in &allowed {
            let mut warp = Warp::new(4096, 4096);
            warp.params = vec![vec![7; 8], vec![0; 128]];
            let pure = inst.effect == Effect::Pure;
            let registers: Vec<Reg> = one.op.reads().collect();
            for reg in registers {
                fill(&mut warp, reg, |lane| {
                    let x = u64::from(if pure { special[lane as usize % 8] } else { 4 });
                    match reg.class {
                        Class::Pred => x & 1,
                        Class::B16 => x & 0xffff,
                        Class::B64 => x << 32 | x,
                        Class::B32 | Class::F32 => x,
                    }
                });
            }
            for (operand, arg) in inst.operands.iter().zip(&one.op.args) {
                let Arg::Address(Base::Reg(reg), offset) = arg else { continue };
                let start = if reg.class == Class::B64 { GLOBAL } else { SHARED.into() };
                fill(&mut warp, *reg, |lane| start + 16 * u64::from(lane));
                if operand.name == "bar" {
                    for lane in 0..32 {
                        let barrier = Counting { phase: 0, expected: 100, pending: 100, bytes: 0 };
                        warp.barriers.insert(start + 16 * lane + *offset as u64, barrier);
                    }
                }
            }
            (inst.meaning)(&mut warp, &one.op);
            if !warp.products.is_empty() {
                continue;
            }
            for reg in one.op.writes() {
                (0..32).for_each(|lane| _ = warp.get(lane, reg));
            }
        }
    }
}

#[test]
fn answers_to_claims() {
    let mut warp = Warp::new(0, 4096);
    warp.shared[1024..1040].copy_from_slice(&answer(Some(77)));
    assert_eq!(execute(&mut warp, &launch::QUERY_CANCEL, &[at(TILE)]), [[1; 32], [77; 32]]);
    warp.shared[1024..1040].copy_from_slice(&answer(None));
    assert_eq!(execute(&mut warp, &launch::QUERY_CANCEL, &[at(TILE)]), [[0; 32], [0; 32]]);
}
