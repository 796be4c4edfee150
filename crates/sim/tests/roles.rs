//! Roles of single warps: each warp does its own job, and rings, barriers and registers work between them.

use fulgurite_ptx::device::{Device, Stream, Value};
use fulgurite_ptx::{Kernel, Target, Warpgroups, Warps};
use fulgurite_sim::{Options, Sim};
use std::sync::Arc;

/// Runs a kernel with one array of so many words; what it holds then.
fn run(kernel: Kernel, words: usize, seed: u64) -> Vec<u32> {
    let sim = Sim::on(kernel.target, Options { seed, ..Options::default() });
    let buffer = sim.allocate(4 * words as u64).unwrap();
    sim.upload(buffer.span(), &vec![0; 4 * words]).unwrap();
    let module = sim.load(Arc::new(kernel)).unwrap();
    let done = sim.launch(&module, [1, 1, 1], &[Value::Pointer(buffer.span())], Stream::default());
    assert!(done.is_ok(), "seed {seed}: {:?}", sim.findings().iter().map(|f| f.to_string()).collect::<Vec<_>>());
    let mut bytes = vec![0; 4 * words];
    sim.download(buffer.span(), &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Every warp writes the number of its role, its number in the role, and its thread's number in the role.
#[test]
fn each_warp_has_one_role() {
    for name in ["sm_80", "sm_90a", "sm_120a"] {
        let target = Target::named(name).unwrap();
        let registers = target.arch.setmaxnreg;
        let kernel = Kernel::build("roles", target, |k| {
            let x = k.pointer::<u32>("x");
            let mut number = 0;
            for warps in [4, 1, 2, 1, 5, 3] {
                number += 1;
                // Warps 4 to 7 share a warpgroup, and so do 8 to 15.
                let size = match warps {
                    1 | 2 if registers => Warps(warps).registers(40),
                    _ => Warps(warps),
                };
                k.role(&format!("role {number}"), size, |w| {
                    let own = w.warp_in_role().mul_add(1000, w.thread_in_role());
                    x.store(w, w.thread(), own + 100_000 * number);
                });
            }
        })
        .unwrap();
        assert_eq!(kernel.ptx().contains("setmaxnreg"), registers);
        let got = run(kernel, 512, 1);
        let mut at = 0;
        for (number, warps) in (1..).zip([4u32, 1, 2, 1, 5, 3]) {
            for thread in 0..32 * warps {
                assert_eq!(got[at], 100_000 * number + 1000 * (thread / 32) + thread, "{name}, role {number}");
                at += 1;
            }
        }
    }
}

/// A mailbox from one warp to two, whose threads meet at a barrier of their own.
#[test]
fn rings_between_single_warps() {
    const ROUNDS: u32 = 6;
    for seed in 0..20 {
        let kernel = Kernel::build("rings", Target::HOPPER, |k| {
            let x = k.pointer::<u32>("x");
            let ring = k.mailbox("numbers", 2, 4);
            let swap = k.shared::<u32>("swap", 64);
            k.role("idle", Warpgroups(1), |_| {});
            k.role("send", Warps(1), |w| {
                w.one_thread(|t| t.each(0, ROUNDS, 1, |t, i| ring.put(t, &[i * 10])));
            });
            k.role("receive", Warps(2), |w| {
                let (sum, barrier) = (w.var(0u32), w.role_barrier());
                w.each(0, ROUNDS, 1, |w, _| {
                    let got = ring.take(w)[0];
                    let own = w.thread_in_role();
                    swap.store(w, own, got + w.warp_in_role());
                    w.sync_role(&barrier);
                    sum.set(sum.get() + swap.load(w, own ^ 32));
                    w.sync_role(&barrier);
                });
                x.store(w, w.thread_in_role(), sum.get());
            });
            k.role("rest", Warps(1), |_| {});
        })
        .unwrap();
        let all = 10 * (0..ROUNDS).sum::<u32>();
        let want: Vec<u32> = (0..64).map(|thread| all + if thread < 32 { ROUNDS } else { 0 }).collect();
        assert_eq!(run(kernel, 64, seed), want, "seed {seed}");
    }
}
