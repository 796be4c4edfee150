//! Cycles of small kernels, against what the rates and latencies of the units say. Each test compares two lengths, so that
//! the start and the end of a kernel cancel.

use crate::common::upload;
use fulgurite_ptx::device::{Device, Stream, Value};
use fulgurite_ptx::{Kernel, Major, Number, Sum, Target, TileShape, Val, Warpgroups};
use fulgurite_sim::{Architecture, Interleaving, Options, Sim};
use std::sync::Arc;

/// What a step does with a value.
#[derive(Debug, Clone, Copy)]
enum Step {
    Exp2,
    MulAdd,
    Max,
}

impl Step {
    fn of<'k>(self, x: Val<'k, f32>) -> Val<'k, f32> {
        match self {
            Step::Exp2 => x.exp2(),
            Step::MulAdd => x.mul_add(x, x),
            Step::Max => x.max(1.0),
        }
    }
}

/// Cycles of a kernel with one pointer, on one SM of an H200.
fn cycles(kernel: Kernel, ctas: u32) -> u64 {
    let mut rates = Architecture::H200;
    rates.arch.sms = 1;
    let options =
        Options { order: Interleaving::Timed, checks: false, arithmetic: false, resident: ctas, ..Options::default() };
    let sim = Sim::with_rates(Target::HOPPER, rates, options);
    let memory = upload(&sim, &[0.0f32; 4096]);
    let (name, module) = (kernel.name.clone(), sim.load(Arc::new(kernel)).unwrap());
    sim.launch(&module, [ctas, 1, 1], &[Value::Pointer(memory.span())], Stream::default()).unwrap();
    sim.cycles_of(&name)
}

/// Cycles that `steps` more steps take: one after the other, or on values of their own.
fn step(step: Step, warps: u32, chained: bool, ctas: u32) -> f64 {
    let of = |steps: usize| {
        let kernel = Kernel::build("steps", Target::HOPPER, |k| {
            let x = k.pointer::<f32>("x");
            k.threads(32 * warps, |w| {
                let first = x.load(w, w.thread());
                let last = match chained {
                    true => (0..steps).fold(first, |x, _| step.of(x)),
                    false => (0..steps).fold(first, |_, _| step.of(first)),
                };
                x.store(w, w.thread(), last);
            });
        });
        cycles(kernel.unwrap(), ctas)
    };
    (of(300) - of(100)) as f64 / 200.0
}

#[test]
fn a_chain_takes_the_latency_of_its_unit() {
    let rates = Architecture::H200;
    assert_eq!(step(Step::Exp2, 1, true, 1), rates.special_latency as f64);
    assert_eq!(step(Step::MulAdd, 1, true, 1), rates.arithmetic_latency as f64);
    assert_eq!(step(Step::Max, 1, true, 1), rates.arithmetic_latency as f64);
}

#[test]
fn independent_steps_take_the_rate_of_their_unit() {
    // 16 exponentials, 64 comparisons and 128 multiply-adds in a cycle; a scheduler issues one instruction.
    for (what, lanes) in [(Step::Exp2, 16.0), (Step::Max, 64.0), (Step::MulAdd, 128.0)] {
        for warps in [4, 16] {
            let expected = f64::from(32 * warps) / lanes;
            let got = step(what, warps, false, 1);
            assert!((got / expected - 1.0).abs() < 0.02, "{what:?}, {warps} warps: {got}, not {expected}");
        }
    }
    // One warp uses one of four parts of the unit.
    assert_eq!(step(Step::Exp2, 1, false, 1), 8.0);
}

/// Many chains hide each other's latency, up to the rate of the unit.
#[test]
fn chains_of_many_warps_share_the_unit() {
    let got = step(Step::Exp2, 32, true, 1);
    assert!((got / 64.0 - 1.0).abs() < 0.02, "{got}");
}

/// CTAs on one SM share its units.
#[test]
fn ctas_of_an_sm_share_its_units() {
    let got = step(Step::Exp2, 4, false, 2);
    assert!((got / 16.0 - 1.0).abs() < 0.02, "{got}");
}

/// A product of 64 x 128 x 64 takes 256 cycles at 4096 operations in a cycle; those of two warpgroups queue.
#[test]
fn products_take_the_rate_of_the_tensor_cores() {
    let of = |products: usize, groups: u32| {
        let kernel = Kernel::build("products", Target::HOPPER, |k| {
            k.pointer::<f32>("x");
            let a = k.tile("a", TileShape::new(Number::Bf16, 64, 64));
            let b = k.tile("b", TileShape::new(Number::Bf16, 128, 64));
            k.role("all", Warpgroups(groups), |w| {
                let sums = w.accumulators(128);
                for _ in 0..products {
                    w.multiply(&sums, a.operand(Major::Inner), b.operand(Major::Inner), Sum::Fresh);
                }
                w.wait_products(0);
            });
        });
        cycles(kernel.unwrap(), 1)
    };
    for groups in [1, 2] {
        let each = (of(30, groups) - of(10, groups)) as f64 / 20.0;
        assert!((each / (256.0 * f64::from(groups)) - 1.0).abs() < 0.02, "{groups} warpgroups: {each}");
    }
}
