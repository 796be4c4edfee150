//! Rows that read and write memory.

use super::machine::{Counting, GLOBAL, Given, SHARED, Warp, at, execute, same};
use fulgurite_ptx::f16;
use fulgurite_ptx::inst::Inst;
use fulgurite_ptx::machine::Fence;
use fulgurite_ptx::table::{atomic, bytes, cache, mbarrier, memory, sync};

/// An address for each lane.
fn places(start: u64, step: u64) -> Given {
    Given::At(std::array::from_fn(|lane| start + step * lane as u64))
}
fn counted() -> Vec<u8> {
    (0..4096u32).flat_map(|i| (i * 3 + 1).to_le_bytes()).collect()
}
fn word(memory: &[u8], i: usize) -> u32 {
    u32::from_le_bytes(memory[4 * i..4 * i + 4].try_into().expect("four bytes"))
}

#[test]
fn loads_and_stores_of_every_width() {
    type Rows = (&'static Inst, &'static Inst, u64, usize, &'static [&'static str], u64);
    let shared = u64::from(SHARED);
    let rows: [Rows; 10] = [
        (&memory::LD_GLOBAL_16, &memory::ST_GLOBAL_16, GLOBAL, 2, &["", ".v2", ".v4"], GLOBAL),
        (&memory::LD_GLOBAL_32, &memory::ST_GLOBAL_32, GLOBAL, 4, &["", ".v2", ".v4"], GLOBAL),
        (&memory::LD_GLOBAL_F32, &memory::ST_GLOBAL_F32, GLOBAL, 4, &["", ".v2", ".v4"], GLOBAL),
        (&memory::LD_GLOBAL_64, &memory::ST_GLOBAL_64, GLOBAL, 8, &["", ".v2"], GLOBAL),
        (&memory::LD_SHARED_16, &memory::ST_SHARED_16, shared, 2, &["", ".v2", ".v4"], shared),
        (&memory::LD_SHARED_32, &memory::ST_SHARED_32, shared, 4, &["", ".v2", ".v4"], shared),
        (&memory::LD_SHARED_F32, &memory::ST_SHARED_F32, shared, 4, &["", ".v2", ".v4"], shared),
        (&memory::LD_SHARED_64, &memory::ST_SHARED_64, shared, 8, &["", ".v2"], shared),
        (&memory::LD_CLUSTER_32, &memory::ST_CLUSTER_32, shared, 4, &["", ".v2", ".v4"], shared),
        (&memory::LD_CLUSTER_F32, &memory::ST_CLUSTER_F32, shared, 4, &["", ".v2", ".v4"], shared),
    ];
    for (load, store, from, size, vectors, to) in rows {
        for (i, vector) in vectors.iter().enumerate() {
            let count = 1 << i;
            let step = (size * count) as u64;
            let mut warp = Warp::new(16384, 16384);
            warp.global = counted();
            warp.shared = counted();
            let regs = execute(&mut warp, load, &[Given::Room(count), places(from, step), Given::Word(vector)]);
            let bytes = counted();
            for (lane, j) in (0..32).flat_map(|lane| (0..count).map(move |j| (lane, j))) {
                let start = (lane * count + j) * size;
                let mut want = [0; 8];
                want[..size].copy_from_slice(&bytes[start..start + size]);
                assert_eq!(regs[j][lane], u64::from_le_bytes(want), "{} {vector}", load.name);
            }
            // Stored 8192 bytes further on, the memory repeats.
            execute(&mut warp, store, &[places(to + 8192, step), Given::List(regs), Given::Word(vector)]);
            let memory = if to == GLOBAL { &warp.global } else { &warp.shared };
            assert_eq!(memory[8192..8192 + 32 * size * count], bytes[..32 * size * count], "{} {vector}", store.name);
            assert_eq!(
                memory[8192 + 32 * size * count],
                bytes[8192 + 32 * size * count],
                "{} wrote too far",
                store.name
            );
        }
    }
}

#[test]
fn bytes_and_wishes() {
    let mut warp = Warp::new(256, 0);
    warp.global[3] = 0x80;
    let load = |warp: &mut Warp, t| execute(warp, &memory::LD_GLOBAL_8, &[places(GLOBAL, 1), Given::Word(t)])[0][3];
    assert_eq!([load(&mut warp, "u8"), load(&mut warp, "s8")], [0x80, 0xffff_ff80]);
    execute(&mut warp, &memory::ST_GLOBAL_8, &[places(GLOBAL + 64, 1), same(0x1ff)]);
    assert_eq!(warp.global[63..97], [&[0][..], &[0xff; 32], &[0]].concat());
    warp.global = counted();
    let quad = |warp: &mut Warp, inst, rest: &[Given]| {
        let given = [&[Given::Room(4), places(GLOBAL, 16), Given::Word(".v4")], rest].concat();
        execute(warp, inst, &given).iter().map(|reg| reg[2] as u32).collect::<Vec<_>>()
    };
    let want = [25, 28, 31, 34];
    assert_eq!(quad(&mut warp, &cache::LD_GLOBAL_CONST, &[]), want);
    assert_eq!(quad(&mut warp, &cache::LD_GLOBAL_CACHED, &[Given::Word(".cs")]), want);
    let policy = execute(&mut warp, &cache::POLICY, &[same(1.0f32.to_bits().into()), Given::Word("evict_first")])[0];
    assert_eq!(quad(&mut warp, &cache::LD_GLOBAL_HINT, &[Given::Word(".nc"), Given::Lanes(policy)]), want);
    for (inst, rest) in [(&cache::ST_GLOBAL_CACHED, Given::Word(".cs")), (&cache::ST_GLOBAL_HINT, Given::Lanes(policy))]
    {
        execute(&mut warp, inst, &[places(GLOBAL, 4), Given::List(vec![[7; 32]]), Given::Word(""), rest]);
        assert_eq!([word(&warp.global, 31), word(&warp.global, 32)], [7, 97]);
    }
    execute(&mut warp, &cache::PREFETCH, &[at(GLOBAL), Given::Word("L2")]);
}

#[test]
fn words_that_other_blocks_see() {
    let mut warp = Warp::new(256, 0);
    let one = |x| Given::List(vec![[x; 32]]);
    execute(&mut warp, &memory::ST_RELEASE, &[at(GLOBAL), one(5), Given::Word("gpu")]);
    execute(&mut warp, &memory::ST_RELAXED, &[at(GLOBAL + 4), one(6), Given::Word("cta")]);
    let read = |warp: &mut Warp, inst, place, scope| {
        execute(warp, inst, &[Given::Room(1), at(place), Given::Word(scope)])[0][9]
    };
    assert_eq!(read(&mut warp, &memory::LD_ACQUIRE, GLOBAL, "sys"), 5);
    assert_eq!(read(&mut warp, &memory::LD_RELAXED, GLOBAL + 4, "gpu"), 6);
}

/// Each lane changes the same word: the lanes' turns give 32 different old values, or the end says it.
#[test]
fn words_changed_in_one_step() {
    let run = |inst, start: u32, x: u64, o| {
        let mut warp = Warp::new(64, 64);
        warp.global[..4].copy_from_slice(&start.to_le_bytes());
        let old = execute(&mut warp, inst, &[at(GLOBAL), same(x), Given::Word(o)])[0];
        (old, word(&warp.global, 0))
    };
    let (mut old, end) = run(&atomic::ATOM, 7, 3, "add.u32");
    old.sort_unstable();
    assert_eq!(old, std::array::from_fn(|i| 7 + 3 * i as u64));
    assert_eq!(end, 7 + 96);
    let ends = [
        ("exch.b32", 5, 9, 9),
        ("min.u32", 5, 0xffff_fffe, 5),
        ("min.s32", 5, 0xffff_fffe, 0xffff_fffe),
        ("max.u32", 5, 0xffff_fffe, 0xffff_fffe),
        ("max.s32", 5, 0xffff_fffe, 5),
        ("and.b32", 0xff, 0xf0f, 0xf),
        ("or.b32", 0xf0, 0xf, 0xff),
        ("xor.b32", 0xf0, 0xff, 0xf0),
        // 32 steps of 0, 1, ... 9, 0, ...
        ("inc.u32", 0, 9, 2),
        ("inc.u32", 50, 9, 1),
        ("dec.u32", 9, 9, 7),
        ("dec.u32", 50, 9, 8),
    ];
    for (o, start, x, want) in ends {
        assert_eq!(run(&atomic::ATOM, start, x, o).1, want, "{o} of {start} and {x:#x}");
        if o != "exch.b32" {
            let mut warp = Warp::new(64, 64);
            for (inst, place) in
                [(&atomic::RED, GLOBAL), (&atomic::RED_SHARED, SHARED.into()), (&atomic::RED_CLUSTER, SHARED.into())]
            {
                warp.global[..4].copy_from_slice(&start.to_le_bytes());
                warp.shared[..4].copy_from_slice(&start.to_le_bytes());
                execute(&mut warp, inst, &[at(place), same(x), Given::Word(o)]);
                let memory = if place == GLOBAL { &warp.global } else { &warp.shared };
                assert_eq!(word(memory, 0), want, "{} {o}", inst.name);
            }
        }
        let mut warp = Warp::new(64, 64);
        warp.shared[..4].copy_from_slice(&start.to_le_bytes());
        execute(&mut warp, &atomic::ATOM_SHARED, &[at(SHARED.into()), same(x), Given::Word(o)]);
        assert_eq!(word(&warp.shared, 0), want, "shared {o}");
    }
    let mut warp = Warp::new(64, 0);
    let rest = [Given::Word("add.u32"), Given::Word("acq_rel"), Given::Word("gpu")];
    execute(&mut warp, &atomic::ATOM_ORDERED, &[&[at(GLOBAL), same(2)][..], &rest].concat());
    execute(&mut warp, &atomic::RED_RELEASE, &[at(GLOBAL), same(1)]);
    assert_eq!(word(&warp.global, 0), 96);
    execute(&mut warp, &atomic::ATOM_64, &[at(GLOBAL + 8), same(1 << 40), Given::Word("add.u64")]);
    assert_eq!(u64::from_le_bytes(warp.global[8..16].try_into().expect("eight bytes")), 32 << 40);
    execute(&mut warp, &atomic::ATOM_64, &[at(GLOBAL + 8), same(u64::MAX), Given::Word("min.s64")]);
    assert_eq!(warp.global[8..16], [0xff; 8]);
}

#[test]
fn compare_and_swap_lets_one_lane_in() {
    let mut warp = Warp::new(64, 0);
    let given = [at(GLOBAL), same(0), same(1), Given::Word("acquire")];
    let old = execute(&mut warp, &atomic::ATOM_CAS, &given)[0];
    assert_eq!(old.iter().filter(|x| **x == 0).count(), 1);
    assert_eq!(word(&warp.global, 0), 1);
}

#[test]
fn floats_added_in_memory() {
    let bits = |x: f32| u64::from(x.to_bits());
    let mut warp = Warp::new(256, 0);
    let old = execute(&mut warp, &atomic::ATOM_F32, &[at(GLOBAL), same(bits(0.5))])[0];
    assert_eq!(old.iter().map(|x| f32::from_bits(*x as u32)).fold(0.0, f32::max), 15.5);
    execute(&mut warp, &atomic::RED_F32_ONE, &[at(GLOBAL), same(bits(0.5))]);
    assert_eq!(word(&warp.global, 0), 32f32.to_bits());
    // Subnormals flush, where they lie and where they come from.
    warp.global[..4].copy_from_slice(&1.0e-40f32.to_le_bytes());
    execute(&mut warp, &atomic::RED_F32_ONE, &[at(GLOBAL), same(bits(1.0e-40))]);
    assert_eq!(word(&warp.global, 0), 0);
    let four = Given::List([1.0, 2.0, 3.0, 4.0].map(|x| [bits(x); 32]).to_vec());
    execute(&mut warp, &atomic::RED_F32, &[at(GLOBAL + 16), four.clone(), Given::Word(".v4")]);
    assert_eq!([4, 5, 6, 7].map(|i| f32::from_bits(word(&warp.global, i))), [32.0, 64.0, 96.0, 128.0]);
    let old =
        execute(&mut warp, &atomic::ATOM_F32_VECTOR, &[Given::Room(4), at(GLOBAL + 16), four, Given::Word(".v4")]);
    assert_eq!(f32::from_bits(old[3][0] as u32), 128.0);
    let pair = u64::from(f16::from_f32(2.0).to_bits()) << 16 | u64::from(f16::from_f32(2f32.powi(-24)).to_bits());
    let given = [at(GLOBAL + 64), Given::List(vec![[pair; 32]]), Given::Word(""), Given::Word("f16x2")];
    execute(&mut warp, &atomic::RED_PAIR, &given);
    // Subnormals of 16 bits are kept.
    assert_eq!(word(&warp.global, 16), u32::from(f16::from_f32(64.0).to_bits()) << 16 | 32);
    let given = [&[Given::Room(1)], &given[..]].concat();
    let old = execute(&mut warp, &atomic::ATOM_PAIR, &given);
    assert_eq!(old[0][0], u64::from(f16::from_f32(64.0).to_bits()) << 16 | 32);
}

/// Matrix j's row r lies at 128 j + 16 r, element c of it holds 64 j + 8 r + c.
#[test]
fn matrices_of_shared_memory() {
    let memory: Vec<u8> = (0..256u16).flat_map(u16::to_le_bytes).collect();
    for (x, count) in [("x1", 1), ("x2", 2), ("x4", 4)] {
        for trans in ["", ".trans"] {
            let mut warp = Warp::new(0, 1024);
            warp.shared[..512].copy_from_slice(&memory);
            let rows = places(SHARED.into(), 16);
            let words = [Given::Word(x), Given::Word(trans)];
            let regs = execute(&mut warp, &memory::LDMATRIX, &[&[Given::Room(count), rows][..], &words].concat());
            for (j, reg) in regs.iter().enumerate() {
                for (lane, pair) in reg.iter().enumerate() {
                    let element = |h: usize| {
                        let (r, c) = (lane / 4, 2 * (lane % 4) + h);
                        let (r, c) = if trans.is_empty() { (r, c) } else { (c, r) };
                        (64 * j + 8 * r + c) as u64
                    };
                    assert_eq!(*pair, element(1) << 16 | element(0), "{x}{trans} {j} {lane}");
                }
            }
            let back = places(u64::from(SHARED) + 512, 16);
            execute(&mut warp, &memory::STMATRIX, &[&[back, Given::List(regs)][..], &words].concat());
            assert_eq!(warp.shared[512..512 + 128 * count], memory[..128 * count], "{x}{trans}");
        }
    }
}

#[test]
fn copies_and_barriers() {
    let mut warp = Warp::new(1024, 1024);
    warp.global = counted();
    warp.active = 1;
    let (bar, to) = (at(u64::from(SHARED) + 512), at(SHARED.into()));
    let state = |warp: &Warp| warp.barriers[&(u64::from(SHARED) + 512)];
    execute(&mut warp, &mbarrier::INIT, &[bar.clone(), same(1)]);
    let done = |warp: &mut Warp, parity| execute(warp, &mbarrier::TRY_WAIT, &[bar.clone(), same(parity)])[0][0];
    assert_eq!([done(&mut warp, 0), done(&mut warp, 1)], [0, 1]);
    execute(&mut warp, &mbarrier::ARRIVE_EXPECT, &[bar.clone(), same(64)]);
    assert_eq!(state(&warp), Counting { phase: 0, expected: 1, pending: 0, bytes: 64 });
    execute(&mut warp, &bytes::LOAD_BYTES, &[to.clone(), at(GLOBAL + 16), same(64), bar.clone()]);
    assert_eq!([done(&mut warp, 0), done(&mut warp, 1)], [1, 0]);
    assert_eq!(warp.shared[..64], warp.global[16..80]);
    // Words count their bytes too; an expectation after the arrival keeps the phase open.
    execute(&mut warp, &mbarrier::EXPECT, &[bar.clone(), same(16)]);
    execute(&mut warp, &mbarrier::ARRIVE, std::slice::from_ref(&bar));
    let words = Given::List(vec![[1; 32], [2; 32], [3; 32], [4; 32]]);
    execute(&mut warp, &bytes::STORE_WORDS, &[to.clone(), words, bar.clone(), Given::Word(".v4")]);
    assert_eq!([done(&mut warp, 1), u64::from(word(&warp.shared, 3))], [1, 4]);
    execute(&mut warp, &mbarrier::ARRIVE_EXPECT, &[bar.clone(), same(4)]);
    execute(&mut warp, &bytes::REDUCE_WORD, &[to, same(10), bar.clone(), Given::Word("add.u32")]);
    assert_eq!([state(&warp).phase, word(&warp.shared, 0)], [3, 11]);
    // Of 16 bytes 4 are read and the rest is zero.
    let given = [at(u64::from(SHARED) + 16), at(GLOBAL), same(4), Given::Number(16), Given::Word("cg")];
    execute(&mut warp, &bytes::COPY, &given);
    assert_eq!([4, 5, 6, 7].map(|i| word(&warp.shared, i)), [1, 0, 0, 0]);
    execute(&mut warp, &bytes::STORE_BYTES, &[at(GLOBAL + 256), at(SHARED.into()), same(16)]);
    assert_eq!(word(&warp.global, 64), 11);
    for (inst, given, phase) in [
        (&mbarrier::ARRIVE_RELAXED, vec![bar.clone(), Given::Word("cta")], 4),
        (&mbarrier::ARRIVE_CLUSTER, vec![bar.clone()], 5),
        (&mbarrier::ARRIVE_CLUSTER_COUNT, vec![bar.clone(), same(1)], 6),
        (&mbarrier::ARRIVE_COUNT, vec![bar.clone(), same(1)], 7),
        (&mbarrier::ARRIVE_CLUSTER_RELAXED, vec![bar.clone()], 8),
    ] {
        execute(&mut warp, inst, &given);
        assert_eq!(state(&warp).phase, phase, "{}", inst.name);
    }
    execute(&mut warp, &mbarrier::INVAL, &[bar]);
    assert!(warp.barriers.is_empty());
}

#[test]
fn fences_say_what_they_order() {
    let mut warp = Warp::new(0, 0);
    warp.active = 1;
    execute(&mut warp, &sync::FENCE_PROXY, &[Given::Word(".shared::cta")]);
    execute(&mut warp, &sync::FENCE_INIT, &[]);
    execute(&mut warp, &sync::FENCE, &[Given::Word("gpu")]);
    execute(&mut warp, &sync::FENCE_ONE_WAY, &[Given::Word("acquire"), Given::Word("cluster")]);
    execute(&mut warp, &sync::FENCE_SC, &[Given::Word("sys")]);
    execute(&mut warp, &sync::FENCE_CLUSTER, &[Given::Word("acq_rel")]);
    use fulgurite_ptx::inst::Space;
    use fulgurite_ptx::machine::{MemoryOrder, Scope};
    let want = [
        Fence::Proxy(Some(Space::Shared)),
        Fence::MbarrierInit,
        Fence::Thread(MemoryOrder::AcquireRelease(Scope::Device)),
        Fence::Thread(MemoryOrder::Acquire(Scope::Cluster)),
        Fence::Thread(MemoryOrder::AcquireRelease(Scope::System)),
        Fence::Thread(MemoryOrder::AcquireRelease(Scope::Cluster)),
    ];
    assert_eq!(warp.fences, want);
}
