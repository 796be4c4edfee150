//! Parts of the kernel language that gradients by `tcgen05` need, in one small kernel: rows of a fragment in shared memory as
//! a transposed operand, 16-bit operands over parts of accumulators, rings that several warpgroups answer, gates, rows of
//! numbers, and sums by bulk reductions.

use crate::common::mutate::{drop, drop_all, drop_waits_at, line};
use crate::common::{Random, download, seeds, upload};
use fulgurite_ptx::device::{Device, DeviceError, Stream, Value};
use fulgurite_ptx::{
    Fragment, Kernel, Major, Number, RowAcc, RowView, Sum, Target, TileShape, Val, Warpgroups, Warps, Which, bf16,
};
use fulgurite_sim::{Fault, Finding, Options, Sim};
use std::sync::Arc;

const ROWS: u32 = 128;
const HALF: u32 = 64;
const COLS: u32 = 48;
/// Rounds, which reuse everything.
const ROUNDS: u32 = 3;

/// X[i][j] f32, B[i][n] in bf16, and number[j] become sums of -X'^T B and -X' B over rounds, where X'[i][j] = X[i][j] + number[j],
/// rounded to bf16. Sums lie as `[four columns][row][4]`.
fn kernel(target: Target) -> Kernel {
    Kernel::build("tensor_sums", target, |k| {
        let x = k.pointer::<f32>("x");
        let b = k.tensor("b", TileShape::new(Number::Bf16, ROWS, COLS), 2);
        let numbers = k.pointer::<f32>("numbers");
        let (turned, plain) = (k.pointer::<f32>("turned"), k.pointer::<f32>("plain"));
        let operand = k.pipe("b", 1, &[TileShape::new(Number::Bf16, ROWS, COLS)]);
        let row = k.pipe_with_numbers("numbers", 1, &[], ROWS);
        let shared = k.tile("x", TileShape::new(Number::Bf16, ROWS, ROWS));
        let staging = k.staged_sums("sums", COLS / 2);
        let gate = k.gate("started", 8);
        let s = k.tensor_accumulators(1, ROWS);
        let sums = [(); 2].map(|()| k.tensor_accumulators(1, COLS));
        // The product in s is not used: what the warpgroups write over it is.
        let written = k.tensor_ring_of("s", s, 2);
        let [first, second] = [k.tensor_ring_of("turned", sums[0], 1), k.tensor_ring_of("plain", sums[1], 1)];
        let only = || Which::Index(0);
        let half = |group: u32| s.part(group, HALF).part(0, HALF / 2).overlay::<bf16>(HALF);

        k.role("sums", Warpgroups(1).registers(128), |w| {
            let (barrier, acc) = (w.group_barrier(), w.row_accumulators(COLS));
            w.each(0, ROUNDS, 1, |w, _| {
                for (ring, to) in [(&first, turned), (&second, plain)] {
                    w.load_tensor(&acc, ring.await_full(w, only()));
                    ring.give_back(w, only());
                    staging.add(w, &barrier, &acc, to);
                }
            });
            staging.end(w);
        });
        k.role("compute", Warpgroups(2).registers(128), |w| {
            let own = w.group();
            // Keys that are not finite are replaced like this, in place, before the first product.
            w.change_words(operand.wait(w)[0], |word| word ^ 0x8000_8000);
            w.publish_shared();
            gate.open(w);
            row.wait(w);
            let numbers = row.row_numbers(w).part(own, HALF);
            w.each(0, ROUNDS, 1, |w, _| {
                let tile = written.await_full(w, only());
                let (acc, halves) = (w.row_accumulators(HALF), w.row_fragment::<bf16>(HALF));
                let from = x.at(w.thread_in_group() * ROWS + own * HALF);
                for eight in 0..HALF / 8 {
                    let number = numbers.eight(w, eight);
                    for i in 0..8 {
                        let at = 8 * eight + i;
                        acc.set(at as usize, from.load(w, at) + number[i as usize]);
                    }
                }
                pack(&halves, &acc);
                let own_part = tile.part(0, HALF).nth(own).part(0, HALF / 2);
                w.store_tensor_fragment(own_part.overlay::<bf16>(HALF), &halves);
                w.write_row_fragment(shared.cols(own, HALF), 0, &halves);
                w.publish_shared();
                written.publish(w, only(), 0);
            });
            row.done(w);
        });
        k.role("load", Warps(1).registers(128), |w| {
            w.one_thread(|t| {
                let zero = || t.constant(0u32);
                operand.put(t, |t, stage| stage.load(t, stage.tile(0), &b, &[zero(), zero()]));
                row.put(t, |t, stage| stage.load_numbers(t, numbers));
            });
        });
        k.role("multiply", Warps(1), |w| {
            gate.pass(w);
            // The role that opens the gate has waited for it.
            let b = operand.current(w)[0];
            w.elected(|t| t.multiply_tensor(s, b.operand(Major::Inner), b.operand(Major::Inner), Sum::Fresh));
            written.filled(w, only());
            w.each(0, ROUNDS, 1, |w, round| {
                written.await_part(w, only(), 0);
                let d = first.await_empty(w, only());
                let (left, right) = (shared.operand(Major::Outer), b.operand(Major::Outer));
                w.elected(|t| t.multiply_tensor(d, left, right, Sum::Fresh));
                first.filled(w, only());
                let d = second.await_empty(w, only());
                w.elected(|t| {
                    for group in 0..2 {
                        let sum = if group == 0 { Sum::Fresh } else { Sum::Onto };
                        t.multiply_tensor(d, half(group), b.rows(group, HALF).operand(Major::Outer), sum);
                    }
                });
                w.when(round.ne(ROUNDS - 1), |w| written.filled(w, only()));
                w.when(round.eq(ROUNDS - 1), |w| operand.done_with_products(w));
                second.filled(w, only());
            });
        });
        k.role("spare", Warps(2), |_| {});
    })
    .unwrap()
}

fn pack<'k>(to: &Fragment<'k, bf16>, from: &RowAcc<'k>) {
    let from: Vec<Val<'k, f32>> = from.elements().collect();
    for (i, pair) in from.chunks_exact(2).enumerate() {
        to.set_pair(i, pair[0], pair[1]);
    }
}

/// The findings, or the largest difference from f64.
fn run(kernel: Kernel, seed: u64) -> (Vec<Finding>, Result<f64, DeviceError>) {
    let sim = Sim::on(Target::named("sm_100a").unwrap(), Options { seed, budget: 2_000_000, ..Options::default() });
    let mut random = Random(3);
    let mut draw = |n: u32| (0..n).map(|_| (random.unit() * 64.0).round() / 32.0).collect::<Vec<f32>>();
    let (x, b, numbers) = (draw(ROWS * ROWS), draw(ROWS * COLS), draw(ROWS));
    let halves: Vec<bf16> = b.iter().map(|&x| bf16::from_f32(x)).collect();
    let zeros = vec![0f32; (ROWS * COLS) as usize];
    let [x_at, numbers_at] = [&x, &numbers].map(|data| upload(&sim, data));
    let (b_at, sums) = (upload(&sim, &halves), [(); 2].map(|()| upload(&sim, &zeros)));
    let tensor = fulgurite_ptx::device::TensorSpan {
        span: b_at.span(),
        number: Number::Bf16,
        extent: vec![COLS.into(), ROWS.into()],
        strides: vec![(2 * COLS).into()],
        ragged: None,
    };
    let pointer = |b: &fulgurite_ptx::device::Buffer| Value::Pointer(b.span());
    let args = [pointer(&x_at), Value::Tensor(tensor), pointer(&numbers_at), pointer(&sums[0]), pointer(&sums[1])];
    let module = sim.load(Arc::new(kernel)).unwrap();
    let ran = sim.launch(&module, [1, 1, 1], &args, Stream::default());
    if let Err(e) = ran.and_then(|_| sim.synchronize(Stream::default())) {
        return (sim.findings(), Err(e));
    }
    let left = |i: u32, j: u32| bf16::from_f32(x[(i * ROWS + j) as usize] + numbers[j as usize]).to_f64();
    let mut worst = 0.0f64;
    for (turned, sums) in [true, false].into_iter().zip(&sums) {
        let bytes = download(&sim, sums);
        for (row, col) in (0..ROWS).flat_map(|row| (0..COLS).map(move |col| (row, col))) {
            let at = 4 * ((col / 4 * ROWS + row) * 4 + col % 4) as usize;
            let got = f64::from(f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
            let term = |i: u32| {
                let a = if turned { left(i, row) } else { left(row, i) };
                a * f64::from(b[(i * COLS + col) as usize])
            };
            let want = -f64::from(ROUNDS) * (0..ROWS).map(term).sum::<f64>();
            worst = worst.max((got - want).abs() / want.abs().max(1.0));
        }
    }
    (sim.findings(), Ok(worst))
}

#[test]
fn right_and_clean_in_every_order() {
    let target = Target::named("sm_100a").unwrap();
    for seed in seeds().step_by(4) {
        let (found, worst) = run(kernel(target), seed);
        assert!(found.is_empty(), "{seed}: {found:?}");
        assert!(worst.unwrap() < 1e-4, "{seed}");
    }
}

#[test]
fn planted_bugs() {
    let good = || kernel(Target::named("sm_100a").unwrap());
    let races = &[Fault::Race, Fault::ProxyRace, Fault::Uninitialised][..];
    let count = |row: &str| {
        let mut n = 0;
        good().each_op(&mut |op| n += usize::from(op.inst.name == row));
        n
    };
    let mut bugs = vec![
        ("what threads wrote is not published".to_owned(), drop_all(good(), "fence.proxy.async"), races),
        ("stores of operands not waited for".into(), drop_all(good(), "tcgen05.wait.st"), races),
        ("loads of results not waited for".into(), drop_all(good(), "tcgen05.wait.ld"), races),
        ("buffers are overwritten".into(), drop_all(good(), "cp.async.bulk.wait_group.read"), races),
    ];
    let mut waits: Vec<_> = (0..count("mbarrier.try_wait")).map(|n| line(&good(), "mbarrier.try_wait", n)).collect();
    waits.sort_unstable();
    waits.dedup();
    // The stages of the load role are filled once, so they are empty.
    let loads: Vec<_> = ["cp.async.bulk.tensor.load", "cp.async.bulk.load"].map(|row| line(&good(), row, 0)).into();
    for &wait in waits.iter().filter(|wait| !loads.contains(wait)) {
        bugs.push((format!("no wait at {wait}"), drop_waits_at(good(), wait), &[]));
    }
    // The last arrival gives back numbers that nobody replaces.
    for n in 0..count("mbarrier.arrive") - 1 {
        bugs.push((format!("no arrival {n}"), drop(good(), "mbarrier.arrive", n), &[Fault::Deadlock]));
    }
    let mut missed = Vec::new();
    assert!(bugs.len() >= 15, "{}", bugs.len());
    for (name, kernel, faults) in bugs {
        let found = run(kernel, 1).0;
        match found.iter().find(|f| faults.is_empty() || faults.contains(&f.fault)) {
            Some(f) => println!("{name}: {f}"),
            None => missed.push(format!("{name}: {found:?}")),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
