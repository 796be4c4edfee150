//! Pairs of CTAs in a kernel of one tile: what a bare arrival of the other CTA tells, and a CTA that ends too early.

use crate::common::mutate::{drop, drop_wait, line};
use crate::common::{Random, download, upload};
use crate::tcgen05::{Bug, check};
use fulgurite_ptx::device::{Device, DeviceError, Stream, TensorSpan, Value};
use fulgurite_ptx::{
    Group, Kernel, Major, Number, Pointer, RowView, Scope, Sum, Target, TensorRing, TileShape, Warpgroups, Warps,
    Which, bf16,
};
use fulgurite_sim::{Fault, Options, Sim, TensorOrder};
use std::sync::Arc;

/// Columns of C, and of k.
const COLS: u32 = 64;

/// What the kernel does beside its product, rightly or not.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Also {
    Nothing,
    /// When all warps have answered, the leader's thread reads what warps of this CTA stored.
    ReadsOfRank(u32),
    /// The second CTA does not wait for its rows.
    EndsEarly,
}

/// Stores the rows of a warpgroup, and answers.
fn take<'k>(w: &Scope<'k, Group>, sums: &TensorRing<'k>, c: Pointer<'k, f32>) {
    let (acc, row) = (sums.await_full(w, Which::Index(0)), w.row_accumulators(COLS));
    w.load_tensor(&row, acc);
    w.wait_tensor_loads();
    let first = w.cta().mul_add(128, w.thread()) * COLS;
    (0..).zip(row.elements()).for_each(|(i, x)| c.store(w, first + i, x));
    sums.give_back(w, Which::Index(0));
}

/// C = A B of one tile of a pair: A [256][64], B [64][64].
fn pair(also: Also) -> Kernel {
    Kernel::build("pair", Target::named("sm_100a").unwrap(), |k| {
        k.cluster(2);
        let pair = k.cta_pair();
        let shapes = [128, COLS / 2].map(|rows| TileShape::new(Number::Bf16, rows, COLS));
        let (a, b) = (k.tensor("a", shapes[0], 2), k.tensor("b", shapes[1], 2));
        let (c, copy) = (k.pointer::<f32>("c"), k.pointer::<f32>("copy"));
        let operands = pair.pipe("operands", 1, &shapes);
        let (sums, which) = (pair.tensor_ring("sums", 1, 1, COLS), Which::Index(0));
        k.role("store", Warpgroups(1), |w| match also {
            Also::EndsEarly => pair.lead(w, |w| take(w, &sums, c)),
            _ => take(w, &sums, c),
        });
        k.role("load", Warps(1), |w| {
            w.one_thread(|t| {
                let (zero, rank) = (t.constant(0u32), t.cluster_rank());
                operands.put(t, |t, stage| {
                    stage.load(t, stage.tile(0), &a, &[zero, rank * 128]);
                    stage.load(t, stage.tile(1), &b, &[zero, rank * (COLS / 2)]);
                });
            });
        });
        k.role("multiply", Warps(1), |w| {
            pair.lead(w, |w| {
                let acc = sums.await_empty(w, which);
                let tiles = operands.wait(w);
                let (left, right) = (tiles[0].operand(Major::Inner), tiles[1].operand(Major::Inner));
                w.elected(|t| t.multiply_tensor(acc, left, right, Sum::Fresh));
                operands.done_with_products(w);
                sums.filled(w, which);
                if let Also::ReadsOfRank(rank) = also {
                    sums.await_empty(w, which);
                    w.elected(|t| {
                        let x = c.load(t, t.constant(rank * 128 * COLS));
                        copy.store(t, t.constant(0u32), x);
                    });
                }
            });
        });
    })
    .unwrap()
}

fn run(sim: &Sim, kernel: Kernel) -> Result<[Vec<f32>; 2], DeviceError> {
    let mut random = Random(5);
    let mut factor =
        |rows: u32| -> Vec<bf16> { (0..rows * COLS).map(|_| bf16::from_f32(random.below(9) as f32 - 4.0)).collect() };
    let (a_data, b_data) = (factor(256), factor(COLS));
    let (a, b) = (upload(sim, &a_data), upload(sim, &b_data));
    let c = upload(sim, &vec![f32::NAN; (256 * COLS) as usize]);
    let copy = upload(sim, &[0.0f32]);
    let tensor = |span, rows: u64| {
        let (extent, strides) = (vec![COLS.into(), rows], vec![u64::from(2 * COLS)]);
        Value::Tensor(TensorSpan { span, number: Number::Bf16, extent, strides, ragged: None })
    };
    let args =
        [tensor(a.span(), 256), tensor(b.span(), COLS.into()), Value::Pointer(c.span()), Value::Pointer(copy.span())];
    let module = sim.load(Arc::new(kernel))?;
    sim.launch(&module, [2, 1, 1], &args, Stream::default())?;
    sim.synchronize(Stream::default())?;
    let got = download(sim, &c).chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
    let row = |data: &[bf16], row: usize| -> Vec<f64> {
        data[row * COLS as usize..][..COLS as usize].iter().map(|x| x.to_f64()).collect()
    };
    let dot = |x: Vec<f64>, y: Vec<f64>| x.iter().zip(&y).map(|(x, y)| x * y).sum::<f64>() as f32;
    let want = (0..256 * COLS as usize).map(|i| dot(row(&a_data, i / COLS as usize), row(&b_data, i % COLS as usize)));
    Ok([got, want.collect()])
}

fn on(seed: u64, tensor: TensorOrder) -> Sim {
    let options = Options { seed, tensor, budget: 1_000_000, ..Options::default() };
    Sim::on(Target::named("sm_100a").unwrap(), options)
}

#[test]
fn one_tile_of_a_pair() {
    for tensor in [TensorOrder::Queue, TensorOrder::Strict] {
        for also in [Also::Nothing, Also::ReadsOfRank(0)] {
            let sim = on(1, tensor);
            let [got, want] = run(&sim, pair(also)).unwrap_or_else(|_| panic!("{also:?}: {:?}", sim.findings()));
            assert_eq!(got, want, "{also:?}");
        }
    }
}

#[test]
fn planted_bugs_of_one_tile() {
    let other = pair(Also::ReadsOfRank(1));
    let [stores, reads] = [line(&other, "st.global.f32", 0), line(&other, "ld.global.f32", 0)];
    let early = pair(Also::EndsEarly);
    let product = line(&early, "tcgen05.mma.ss", 0);
    let mut waits = 0;
    early.each_op(&mut |op| waits += usize::from(op.inst.name == "mbarrier.try_wait"));
    let bugs = [
        Bug {
            name: "stores of the other CTA are read after its bare arrival",
            kernel: other,
            fault: Fault::Race,
            lines: vec![stores, reads],
            or: None,
        },
        Bug {
            name: "a CTA ends before a product that reaches it",
            kernel: drop(drop_wait(early, waits - 1), "tcgen05.dealloc", 0),
            fault: Fault::Exit,
            lines: vec![product],
            or: None,
        },
    ];
    for tensor in [TensorOrder::Queue, TensorOrder::Strict] {
        check(&bugs, |kernel, seed| {
            let sim = on(seed, tensor);
            let _ = run(&sim, kernel);
            sim.findings()
        });
    }
}
