//! A small attention-like pipeline: S = Q K^T, P = 2^S, O = P V, and the sums of P's rows.

use super::{Random, download, upload};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Stream, TensorSpan, Value};
use fulgurite_ptx::{Kernel, Major, Number, Sum, Target, TileShape, Warpgroups, bf16};
use fulgurite_sim::Sim;
use std::sync::Arc;

pub const ROWS: u32 = 128;
pub const KEYS: u32 = 64;
pub const DIM: u32 = 64;

/// The kernel: one block for each 128 queries.
pub fn kernel() -> Kernel {
    Kernel::build("pipeline", Target::HOPPER, |k| {
        let shape = |rows| TileShape::new(Number::Bf16, rows, DIM);
        let (q, o) = (k.tensor("q", shape(ROWS), 2), k.tensor("o", shape(64), 2));
        let (keys, values) = (k.tensor("k", shape(KEYS), 2), k.tensor("v", shape(KEYS), 2));
        let sums = k.pointer::<f32>("sums");
        let steps = k.param::<u32>("steps");
        let queries = k.pipe("q", 1, &[shape(ROWS)]);
        let k_ring = k.pipe("k", 2, &[shape(KEYS)]);
        let v_ring = k.pipe("v", 2, &[shape(KEYS)]);
        let p_tile = k.tile("p", TileShape::new(Number::Bf16, ROWS, KEYS));
        let o_tile = k.tile("o", shape(ROWS));

        k.role("load", Warpgroups(1).registers(40), |w| {
            w.one_thread(|t| {
                let zero = t.constant(0u32);
                queries.put(t, |t, s| s.load(t, s.tile(0), &q, &[zero, t.cta() * ROWS]));
                t.each(0, steps, 1, |t, j| {
                    k_ring.put(t, |t, s| s.load(t, s.tile(0), &keys, &[zero, j * KEYS]));
                    v_ring.put(t, |t, s| s.load(t, s.tile(0), &values, &[zero, j * KEYS]));
                });
            });
        });

        k.role("compute", Warpgroups(2).registers(232), |w| {
            let (s, out) = (w.accumulators(KEYS), w.accumulators(DIM));
            let own = w.group();
            let barrier = w.group_barrier();
            let total = [w.var(0.0f32), w.var(0.0f32)];
            let own_p = p_tile.rows(own, 64);
            let own_q = queries.wait(w)[0].rows(own, 64);
            w.each(0, steps, 1, |w, j| {
                let key = k_ring.wait(w)[0];
                w.multiply(&s, own_q.operand(Major::Inner), key.operand(Major::Inner), Sum::Fresh);
                w.wait_products(0);
                k_ring.done(w);
                for (i, x) in s.elements().enumerate() {
                    let p = x.exp2();
                    let row = fulgurite_ptx::Acc::row_of(i);
                    total[row].set(total[row].get() + p);
                    s.set(i, p);
                }
                w.write::<bf16>(own_p, &s);
                w.publish_shared();
                w.sync_group(&barrier);
                let value = v_ring.wait(w)[0];
                w.multiply(&out, own_p.operand(Major::Inner), value.operand(Major::Outer), Sum::If(j.ne(0)));
                w.wait_products(0);
                v_ring.done(w);
            });
            queries.done(w);
            let row = w.cta() * ROWS + own * 64 + w.first_row();
            for (i, total) in total.into_iter().enumerate() {
                let sum = w.reduce(total.get(), 4, |a, b| a + b);
                w.when(w.first_col().eq(0), |w| sums.store(w, row + 8 * i as u32, sum));
            }
            let own_o = o_tile.rows(own, 64);
            w.write::<bf16>(own_o, &out);
            w.publish_shared();
            w.sync_group(&barrier);
            w.one_thread_of_group(|t| {
                t.store_tile(&o, &[t.constant(0u32), t.cta() * ROWS + own * 64], own_o);
                t.commit_stores();
                t.wait_stores(0);
            });
        });
    })
    .unwrap()
}

fn tensor(buffer: &Buffer, rows: u32) -> Value {
    let extent = vec![u64::from(DIM), u64::from(rows)];
    Value::Tensor(TensorSpan {
        span: buffer.span(),
        number: Number::Bf16,
        extent,
        strides: vec![u64::from(2 * DIM)],
        ragged: None,
    })
}

/// Runs the kernel on random inputs; the largest error of O and of the sums, relative to their size.
pub fn run(sim: &Sim, kernel: Kernel, blocks: u32, steps: u32) -> Result<f64, DeviceError> {
    let mut random = Random(11);
    let mut draw =
        |rows: u32, size: f32| -> Vec<bf16> { (0..rows * DIM).map(|_| bf16::from_f32(random.unit() * size)).collect() };
    let (rows, cols) = (blocks * ROWS, steps * KEYS);
    let (q, k, v) = (draw(rows, 0.5), draw(cols, 0.5), draw(cols, 1.0));
    let [q_buffer, k_buffer, v_buffer] = [&q, &k, &v].map(|x| upload(sim, x));
    let (o, sums) = (sim.allocate(u64::from(2 * rows * DIM))?, sim.allocate(u64::from(4 * rows))?);
    let args = [
        tensor(&q_buffer, rows),
        tensor(&o, rows),
        tensor(&k_buffer, cols),
        tensor(&v_buffer, cols),
        Value::Pointer(sums.span()),
        Value::U32(steps),
    ];
    let module = sim.load(Arc::new(kernel))?;
    sim.launch(&module, [blocks, 1, 1], &args, Stream::default())?;
    sim.synchronize(Stream::default())?;
    let (o, sums) = (download(sim, &o), download(sim, &sums));
    let mut worst = 0.0f64;
    let at = |x: &[bf16], row: u32, i: u32| x[(row * DIM + i) as usize].to_f64();
    for row in 0..rows {
        let mut p = Vec::new();
        for key in 0..cols {
            p.push((0..DIM).map(|i| at(&q, row, i) * at(&k, key, i)).sum::<f64>().exp2());
        }
        let sum: f64 = p.iter().sum();
        let got = &sums[4 * row as usize..4 * row as usize + 4];
        let got = f64::from(f32::from_le_bytes(got.try_into().unwrap()));
        worst = worst.max((got - sum).abs() / sum * 1e4);
        for i in 0..DIM {
            let want: f64 = p.iter().enumerate().map(|(key, p)| p * at(&v, key as u32, i)).sum();
            let byte = 2 * (row * DIM + i) as usize;
            let got = bf16::from_le_bytes([o[byte], o[byte + 1]]).to_f64();
            assert!(!got.is_nan(), "o[{row}][{i}] is {got}");
            worst = worst.max((got - want).abs() / (sum * 0.01));
        }
    }
    Ok(worst)
}
