//! Counters of a launch, for each role and in total.

use fulgurite_ptx::Number;
use fulgurite_ptx::inst::{Op, Unit};
use fulgurite_ptx::table::float;
use std::collections::BTreeMap;

/// The bytes that a copy moves.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Traffic {
    pub global_bytes: u64,
    pub sectors: u64,
    pub shared_bytes: u64,
}

/// Work of some warps. Instructions are counted once for each lane that executes them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of lanes, by the unit that runs them. One on two floats occupies its unit twice as long and counts as
    /// two.
    pub lanes: BTreeMap<Unit, u64>,
    /// Instructions executed by warps.
    pub instructions: u64,
    /// Floating-point operations of tensor products (a multiplication and an addition are two), by element type.
    pub tensor_flops: BTreeMap<&'static str, u64>,
    /// Exponentials on the special-function unit.
    pub exps: u64,
    /// Additions, multiplications and fused multiply-adds of f32.
    pub fmas: u64,
    /// Bytes of shared memory that threads read and write.
    pub shared_thread_bytes: u64,
    /// Bytes of shared memory that products read.
    pub shared_operand_bytes: u64,
    /// Bytes of shared memory that products read as their second operand; part of the ones above.
    pub shared_right_bytes: u64,
    /// Bytes of shared memory that copies read and write, in each CTA that they reach.
    pub shared_copy_bytes: u64,
    /// Bytes of tensor memory that threads read and write.
    pub tensor_memory_bytes: u64,
    /// Extra passes over the banks of shared memory, beyond those that the bytes need.
    pub bank_conflicts: u64,
    /// Bytes of global memory that threads and copies read and write.
    pub global_bytes: u64,
    /// Sectors of 32 bytes that contain these bytes, for each instruction or row of a box.
    pub global_sectors: u64,
    /// Number of times that a warp reached a barrier or a wait.
    pub waits: u64,
    /// Number of those times at which the warp had to wait.
    pub waits_blocked: u64,
}

/// Element type and floating-point operations of a product of one warp.
pub(crate) fn warp_product(op: &Op) -> Option<(&'static str, u64)> {
    let number = match op.inst.name {
        "mma.half" | "mma.fp8" | "mma.int8" => Number::named(op.word(4))?,
        "mma.f16" => Number::F16,
        "mma.tf32" => Number::Tf32,
        "mma.int8.mixed" => Number::named(op.word(4).split('.').next()?)?,
        _ => return None,
    };
    Some((number.name(), 2 * 16 * 8 * u64::from(number.depth())))
}

impl Counts {
    pub(crate) fn executed(&mut self, op: &Op, active: u32) {
        let pairs = [&float::ADD_F32X2, &float::MUL_F32X2, &float::FMA_F32X2];
        let lanes = u64::from(active.count_ones()) * if pairs.contains(&op.inst) { 2 } else { 1 };
        self.instructions += 1;
        *self.lanes.entry(op.inst.unit).or_default() += lanes;
        match op.inst.unit {
            Unit::Special if [&float::EX2, &float::EX2_PAIR].contains(&op.inst) => self.exps += lanes,
            Unit::Fma => self.fmas += lanes,
            _ => {}
        }
        if let Some((number, flops)) = warp_product(op) {
            *self.tensor_flops.entry(number).or_default() += flops;
        }
    }

    pub(crate) fn copied(&mut self, traffic: &Traffic) {
        self.global_bytes += traffic.global_bytes;
        self.global_sectors += traffic.sectors;
        self.shared_copy_bytes += traffic.shared_bytes;
    }

    /// Counts a product, with the bytes of shared memory that it reads as its two operands.
    pub(crate) fn multiplied(&mut self, number: Number, flops: u64, [left_bytes, right_bytes]: [u64; 2]) {
        *self.tensor_flops.entry(number.name()).or_default() += flops;
        self.shared_operand_bytes += left_bytes + right_bytes;
        self.shared_right_bytes += right_bytes;
    }

    /// Counts the accesses of one instruction to shared memory: offset and bytes of each lane.
    pub(crate) fn shared(&mut self, touches: &mut Vec<(u32, u32)>) {
        let bytes: u64 = touches.iter().map(|&(_, n)| u64::from(n)).sum();
        self.shared_thread_bytes += bytes;
        let mut words: Vec<u32> = touches.iter().flat_map(|&(at, n)| at / 4..(at + n).div_ceil(4)).collect();
        words.sort_unstable();
        words.dedup();
        let mut banks = [0u64; 32];
        words.iter().for_each(|word| banks[(word % 32) as usize] += 1);
        let passes = banks.into_iter().max().unwrap_or(0);
        self.bank_conflicts += passes.saturating_sub((words.len() as u64).div_ceil(32));
        touches.clear();
    }

    /// Counts the accesses of one instruction to global memory.
    pub(crate) fn global(&mut self, touches: &mut Vec<(u64, u32)>) {
        self.global_bytes += touches.iter().map(|&(_, n)| u64::from(n)).sum::<u64>();
        let mut sectors: Vec<u64> =
            touches.iter().flat_map(|&(at, n)| at / 32..(at + u64::from(n)).div_ceil(32)).collect();
        sectors.sort_unstable();
        sectors.dedup();
        self.global_sectors += sectors.len() as u64;
        touches.clear();
    }

    /// Adds the counters of other work.
    pub fn add(&mut self, other: &Counts) {
        for (&unit, &n) in &other.lanes {
            *self.lanes.entry(unit).or_default() += n;
        }
        for (&number, &n) in &other.tensor_flops {
            *self.tensor_flops.entry(number).or_default() += n;
        }
        self.instructions += other.instructions;
        self.exps += other.exps;
        self.fmas += other.fmas;
        self.shared_thread_bytes += other.shared_thread_bytes;
        self.shared_operand_bytes += other.shared_operand_bytes;
        self.shared_right_bytes += other.shared_right_bytes;
        self.shared_copy_bytes += other.shared_copy_bytes;
        self.tensor_memory_bytes += other.tensor_memory_bytes;
        self.bank_conflicts += other.bank_conflicts;
        self.global_bytes += other.global_bytes;
        self.global_sectors += other.global_sectors;
        self.waits += other.waits;
        self.waits_blocked += other.waits_blocked;
    }
}
