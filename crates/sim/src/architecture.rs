//! Rates of the units of an SM, as data with their sources.

use crate::counters::Counts;
use fulgurite_ptx::Arch;
use fulgurite_ptx::inst::Unit;

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
}

impl Architecture {
    /// H200: 989 TFLOP/s of bf16 = 132 x 4096 x 1.83 GHz; 16 special functions, 128 f32 lanes and 128 bytes of shared
    /// memory per cycle (published analyses of FlashAttention-4); 64 integer and conversion lanes, 32 exchanges (CUDA
    /// programming guide, throughput of arithmetic instructions, 9.0); 4.8 TB/s. Latencies are rounded from public
    /// microbenchmarks, and are good enough for pictures only.
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
        tensor_latency: 30,
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
        // which has 32.
        match arch.sm {
            ..=85 => rates(1.41, 2048.0, 64.0, 2039.0),
            86..=88 => rates(1.80, 1024.0, 128.0, 768.0),
            89 => rates(2.52, 1024.0, 128.0, 864.0),
            90..=99 => Architecture { arch: *arch, ..Architecture::H200 },
            100..=102 => rates(1.856, 8192.0, 128.0, 8000.0),
            103..=119 => Architecture { specials: 32.0, ..rates(1.856, 8192.0, 128.0, 8000.0) },
            120 => rates(2.407, 512.0, 128.0, 1792.0),
            _ => rates(2.5, 512.0, 128.0, 273.0),
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
