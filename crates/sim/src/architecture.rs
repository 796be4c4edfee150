//! Rates of the units of an SM, as data with their sources.

use crate::counters::{Counts, warp_product};
use fulgurite_ptx::Arch;
use fulgurite_ptx::inst::{Arg, Class, Effect, Op, Space, Unit};

/// Rates of one SM, per cycle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Architecture {
    /// The architecture, with the name and the SM count of the GPU that the rates are for.
    pub arch: Arch,
    /// Cycles per nanosecond, at the clock for which the peak rates are quoted.
    pub gigahertz: f64,
    /// Floating-point operations of tensor products with 16-bit elements. 8-bit elements have twice the rate, tf32
    /// half.
    pub tensor_flops: f64,
    /// Results of the special-function unit.
    pub specials: f64,
    /// Lanes of f32 arithmetic.
    pub fmas: f64,
    /// Lanes of integers, logic, comparison and selection.
    pub alus: f64,
    /// Lanes of conversions.
    pub converts: f64,
    /// Lanes of warp exchanges.
    pub exchanges: f64,
    /// Bytes of shared memory.
    pub shared_bytes: f64,
    /// Bytes of global memory: the SM's share of the GPU's bandwidth.
    pub global_bytes: f64,
    /// Cycles until a copy from global memory has arrived.
    pub copy_latency: u64,
    /// Cycles until a load of shared memory has arrived.
    pub shared_latency: u64,
    /// Cycles until a load of global memory has arrived.
    pub global_latency: u64,
    /// Cycles from the end of a product's work until its results are available.
    pub tensor_latency: u64,
    /// Part of `tensor_flops` that products of one warp (`mma.sync`) reach.
    pub warp_products: f64,
    /// Cycles until the result of such a product is there.
    pub warp_product_latency: u64,
    /// Cycles until the result of f32 and integer arithmetic is there.
    pub arithmetic_latency: u64,
    /// Cycles until the result of a special function, a conversion or an exchange is there.
    pub special_latency: u64,
    /// Cycles from the last arrival at a barrier until those who wait continue.
    pub barrier_latency: u64,
    /// Cycles until another CTA of the cluster sees a signal, or a copy from shared to shared memory has arrived.
    pub peer_latency: u64,
    /// Bytes that TMA of an SM moves.
    pub copy_bytes: f64,
    /// Cycles by which an instruction may be late before it holds up those after it: what the assembler hides by its order.
    pub window: u64,
}

impl Architecture {
    /// H200: 989 TFLOP/s of bf16 = 132 x 4096 x 1.83 GHz; 16 special functions, 128 f32 lanes and 128 bytes of shared
    /// memory per cycle (published analyses of FlashAttention-4); 64 integer and conversion lanes, 32 exchanges (CUDA
    /// programming guide, throughput of arithmetic instructions, 9.0); 4.8 TB/s (data sheet). Measured by others:
    /// `mma.sync` reaches 63 % of `wgmma`; latencies of arithmetic, special functions, `mma.sync` and shared memory, rounded.
    /// Assumed: latencies of barriers, copies and global memory, `copy_bytes`, `window`. `peer_latency` was measured by others
    /// on a B300. `tensor_latency` is fitted (docs/lab/016-cycle-model.md): beyond the pipeline of the tensor cores it holds
    /// the time until a warpgroup that waited runs at full rate again.
    pub const H200: Architecture = Architecture {
        arch: Arch::SM_90A,
        gigahertz: 1.83,
        tensor_flops: 4096.0,
        specials: 16.0,
        fmas: 128.0,
        alus: 64.0,
        converts: 64.0,
        exchanges: 32.0,
        shared_bytes: 128.0,
        global_bytes: 4800.0 / 132.0 / 1.83,
        copy_latency: 650,
        shared_latency: 30,
        global_latency: 550,
        tensor_latency: 300,
        warp_products: 0.63,
        warp_product_latency: 32,
        arithmetic_latency: 4,
        special_latency: 24,
        barrier_latency: 30,
        peer_latency: 210,
        copy_bytes: 64.0,
        window: 100,
    };

    /// The rates of an architecture's GPU ([`Arch::gpu`]). An architecture outside [`Arch::ALL`] gets those of the
    /// nearest older one.
    pub fn of(arch: &Arch) -> Architecture {
        let rates = |gigahertz: f64, tensor_flops: f64, fmas: f64, gigabytes: f64| Architecture {
            arch: *arch,
            gigahertz,
            tensor_flops,
            fmas,
            global_bytes: gigabytes / f64::from(arch.sms) / gigahertz,
            ..Architecture::H200
        };
        // From data sheets: dense bf16 products with f32 accumulators = SMs x FLOP per cycle x clock; memory in GB/s.
        // f32 lanes are from the CUDA programming guide. All have 16 special functions per SM and cycle, except B300,
        // which has 32. Where `mma.sync` is the fastest unit, it has the whole rate. A product into tensor memory takes 104
        // cycles more than its work, 32 more if both operands are in shared memory (measured by others on a B200).
        let whole = |rates: Architecture| Architecture { warp_products: 1.0, ..rates };
        let blackwell = Architecture { tensor_latency: 104, ..rates(1.856, 8192.0, 128.0, 8000.0) };
        match arch.sm {
            ..=85 => whole(rates(1.41, 2048.0, 64.0, 2039.0)),
            86..=88 => whole(rates(1.80, 1024.0, 128.0, 768.0)),
            89 => whole(rates(2.52, 1024.0, 128.0, 864.0)),
            90..=99 => Architecture { arch: *arch, ..Architecture::H200 },
            100..=102 => blackwell,
            103..=119 => Architecture { specials: 32.0, ..blackwell },
            120 => whole(rates(2.407, 512.0, 128.0, 1792.0)),
            _ => whole(rates(2.5, 512.0, 128.0, 273.0)),
        }
    }

    /// Floating-point operations of tensor products per cycle, by the name of the element type.
    pub fn tensor_rate(&self, number: &str) -> f64 {
        match number {
            "f16" | "bf16" => self.tensor_flops,
            "tf32" => self.tensor_flops / 2.0,
            "e2m1x2" => self.tensor_flops * 4.0,
            _ => self.tensor_flops * 2.0,
        }
    }

    /// Lanes of a unit per cycle, if the unit has its own rate.
    pub fn lanes(&self, unit: Unit) -> Option<f64> {
        match unit {
            Unit::Fma => Some(self.fmas),
            Unit::Alu => Some(self.alus),
            Unit::Special => Some(self.specials),
            Unit::Convert => Some(self.converts),
            Unit::Warp => Some(self.exchanges),
            Unit::Barrier | Unit::Shared | Unit::Global | Unit::Copy | Unit::Tensor | Unit::Control => None,
        }
    }

    /// How an instruction of a warp runs: its unit, the cycles for which it holds its part of that unit, and the cycles
    /// until its results are there.
    pub(crate) fn costs(&self, op: &Op) -> (Unit, u64, u64) {
        let unit = op.inst.unit;
        if let Some((number, flops)) = warp_product(op) {
            let rate = self.tensor_rate(number) * self.warp_products / 4.0;
            return (unit, (flops as f64 / rate).ceil() as u64, self.warp_product_latency);
        }
        // One instruction for two values of each lane.
        let twice = if op.inst.text.contains("f32x2") { 2.0 } else { 1.0 };
        // A quarter of the unit's lanes serves a quarter of the warps. Shared memory moves 32 bits of each lane in a cycle.
        let hold = match unit {
            Unit::Shared => values(op),
            _ => self.lanes(unit).map_or(1, |lanes| (32.0 * twice / (lanes / 4.0)).ceil() as u64),
        };
        let latency = match (op.inst.effect, unit) {
            (Effect::Read(Space::Shared | Space::Cluster), _) => self.shared_latency,
            (Effect::Read(Space::Global) | Effect::Update(_), _) => self.global_latency,
            (Effect::Start, Unit::Tensor) if op.inst.name.starts_with("tcgen05.ld") => self.shared_latency,
            (_, Unit::Special | Unit::Convert | Unit::Warp) => self.special_latency,
            (_, Unit::Fma | Unit::Alu) => self.arithmetic_latency,
            _ => 1,
        };
        (unit, hold, latency)
    }

    /// Cycles that each unit of one SM needs for this work. The largest is a lower bound on the total time.
    pub fn cycles(&self, counts: &Counts) -> Vec<(&'static str, f64)> {
        let tensor =
            counts.tensor_flops.iter().fold(0.0, |sum, (number, &n)| sum + n as f64 / self.tensor_rate(number));
        let lanes = |unit: Unit| {
            let n = counts.lanes.get(&unit).copied().unwrap_or(0) as f64;
            self.lanes(unit).map_or(0.0, |rate| n / rate)
        };
        let bytes = counts.shared_thread_bytes + counts.shared_operand_bytes + counts.shared_copy_bytes;
        vec![
            ("tensor", tensor),
            ("exp and other specials", lanes(Unit::Special)),
            ("fma", lanes(Unit::Fma)),
            ("alu", lanes(Unit::Alu)),
            ("convert", lanes(Unit::Convert)),
            ("exchange", lanes(Unit::Warp)),
            ("shared memory", bytes as f64 / self.shared_bytes + counts.bank_conflicts as f64),
            ("global memory", counts.global_bytes as f64 / self.global_bytes),
        ]
    }
}

/// Number of 32-bit values that an instruction moves for each lane.
fn values(op: &Op) -> u64 {
    let words = |arg: &Arg| match arg {
        Arg::List(regs) => regs.iter().map(|reg| if reg.class == Class::B64 { 2 } else { 1 }).sum(),
        _ => 1,
    };
    op.args.iter().map(words).max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Peak rates as data sheets print them, in TFLOP/s.
    #[test]
    fn rates_multiply_to_the_peaks_of_data_sheets() {
        for (arch, peak) in [
            (Arch::SM_80, 312.0),
            (Arch::SM_86, 154.8),
            (Arch::SM_89, 362.0),
            (Arch::SM_90A, 989.0),
            (Arch::SM_100A, 2250.0),
            (Arch::SM_103A, 2250.0),
            (Arch::SM_120A, 209.5),
        ] {
            let rates = Architecture::of(&arch);
            let got = f64::from(arch.sms) * rates.tensor_flops * rates.gigahertz / 1000.0;
            assert!((got / peak - 1.0).abs() < 0.015, "{arch}: {got} TFLOP/s, not {peak}");
        }
        assert_eq!(Architecture::of(&Arch::SM_90A), Architecture::H200);
    }
}
