//! Products of a warpgroup: they run later, in order, and read registers and shared memory when they run.

use crate::clock::{Clock, Part};
use crate::finding::Fault;
use crate::program::Program;
use crate::shadow::{Access, Proxy, Toucher, Who};
use crate::world::{Block, Cluster, SHARED_BASE, Snapshot, Status, Wait, Warp, World};
use fulgurite_ptx::Number;
use fulgurite_ptx::model;
use fulgurite_ptx::product::{Descriptor, Left, Major, Product, accumulator_element, left_element};
use std::collections::VecDeque;

/// Rows of a product.
const ROWS: usize = 64;

/// A product that has not run.
pub(crate) struct Pending {
    pub what: Product,
    pub pc: u32,
    /// Warps that have started it, as bits.
    pub joined: u8,
    pub starts: [Option<Snapshot>; 4],
    pub issued: Access,
    pub read_done: u32,
}

/// Products of four warps.
#[derive(Default)]
pub(crate) struct Warpgroup {
    /// Those that have not run, and how many have.
    pub pending: VecDeque<Pending>,
    pub done: u32,
    /// Completion of what each product reads in shared memory.
    pub completions: Vec<u32>,
    /// Who started each.
    pub issued: Vec<Access>,
    /// Cycle when the last one ended.
    pub latest: u64,
}

/// An operand, `outer` by `inner`, with which of its rows are finite.
struct Matrix {
    values: Vec<f64>,
    finite: Vec<bool>,
    depth: usize,
}

impl Matrix {
    fn new(outer: usize, depth: usize) -> Self {
        Matrix { values: vec![0.0; outer * depth], finite: vec![true; outer], depth }
    }
    fn set(&mut self, outer: usize, inner: usize, x: f64) {
        self.values[outer * self.depth + inner] = x;
        self.finite[outer] &= x.is_finite();
    }
    fn row(&self, outer: usize) -> &[f64] {
        &self.values[outer * self.depth..(outer + 1) * self.depth]
    }
}

/// Offsets in shared memory of the 16-byte units of an operand, with the first element of each. Elements of a unit
/// follow each other along the dimension that is contiguous.
fn units(bits: u64, number: Number, major: Major, outer: u32) -> Vec<(i64, u32, u32)> {
    let d = Descriptor::decode(bits);
    let unit = 16 / number.bytes();
    let depth = number.depth();
    let at = |o: u32, i: u32| (i64::from(d.element(number, major, o, i)) - i64::from(SHARED_BASE), o, i);
    match major {
        Major::Inner => {
            (0..outer).flat_map(|o| (0..depth / unit).map(move |i| (o, i * unit))).map(|(o, i)| at(o, i)).collect()
        }
        Major::Outer => (0..depth)
            .flat_map(|i| (0..outer.div_ceil(unit)).map(move |o| (o * unit, i)))
            .map(|(o, i)| at(o, i))
            .collect(),
    }
}

/// One step of the tensor core for 16 products of 16-bit floats, all finite: [`model::accumulate`] without its
/// generality. Products of such floats are exact in f64, and what is kept of them fits 31 bits.
fn accumulate_16(old: f32, a: &[f64], b: &[f64]) -> f32 {
    let mut terms = [0.0; 17];
    let mut largest = f64::from(old).abs();
    for i in 0..16 {
        let p = a[i] * b[i];
        terms[i] = p;
        let p = p.abs();
        largest = if p > largest { p } else { largest };
    }
    terms[16] = f64::from(old);
    if largest == 0.0 {
        return 0.0;
    }
    // Bits of the largest term that are kept below its first.
    const KEPT: i64 = 25;
    // Adding and subtracting it rounds to whole numbers.
    const WHOLE: f64 = 6755399441055744.0;
    let top = (largest.to_bits() >> 52) as i64 - 1023;
    let scale = f64::from_bits(((1023 + KEPT - top) as u64) << 52);
    let mut sum = 0.0;
    for x in terms {
        let x = x * scale;
        let near = (x + WHOLE) - WHOLE;
        let over = if near.abs() > x.abs() { 1.0f64.copysign(x) } else { 0.0 };
        sum += near - over;
    }
    let sum = sum * f64::from_bits(((1023 - KEPT + top) as u64) << 52);
    let near = sum as f32;
    if f64::from(near).abs() > sum.abs() {
        return if near > 0.0 { near.next_down() } else { near.next_up() };
    }
    // A sum of 0 has no sign, as in the model.
    near + 0.0
}

/// The four warps of a warpgroup.
struct Four<'a> {
    warps: &'a mut [Warp],
    program: &'a Program,
}

impl Four<'_> {
    fn bits(&self, thread: u32, reg: fulgurite_ptx::inst::Reg) -> u32 {
        self.warps[(thread / 32) as usize].regs[self.program.slot(reg)].values[(thread % 32) as usize] as u32
    }
}

/// Computes a product into the registers of four warps.
fn compute(what: &Product, a: &Matrix, b: &Matrix, four: &mut Four<'_>) {
    let [to, number, _] = what.numbers;
    let sign = if what.negate[0] != what.negate[1] { -1.0 } else { 1.0 };
    let fast = number.bytes() == 2 && to == Number::F32 && sign == 1.0;
    for thread in 0..128u32 {
        let (warp, lane) = ((thread / 32) as usize, (thread % 32) as usize);
        for (i, &reg) in what.d.iter().enumerate() {
            let (row, col) = accumulator_element(thread, i as u32);
            let (row, col) = (row as usize, col as usize);
            let slot = four.program.slot(reg);
            let register = &mut four.warps[warp].regs[slot];
            let old = if what.onto { register.values[lane] as u32 } else { 0 };
            let (x, y) = (a.row(row), b.row(col));
            let finite = a.finite[row] && b.finite[col] && f32::from_bits(old).is_finite();
            let new = if fast && finite {
                accumulate_16(f32::from_bits(old), x, y).to_bits()
            } else {
                model::accumulate(old, x.iter().zip(y).map(|(x, y)| sign * x * y), to, number, what.saturate)
            };
            register.values[lane] = u64::from(new);
            register.defined |= 1 << lane;
        }
    }
}

impl World<'_> {
    fn product_fault(&mut self, pending: &Pending, fault: Fault, what: String, address: Option<u64>) {
        let here = self.side_of(&pending.issued);
        self.report(fault, what, address, here, None);
    }

    /// Reads an operand from shared memory.
    fn operand(
        &mut self,
        block: &mut Block,
        pending: &Pending,
        bits: u64,
        number: Number,
        major: Major,
        outer: u32,
    ) -> Matrix {
        let mut matrix = Matrix::new(outer.next_multiple_of(16) as usize, number.depth() as usize);
        let access = Access { who: Who::Async(pending.read_done), proxy: Proxy::Async, ..pending.issued };
        let clocks: Vec<&Clock> = pending.starts.iter().flatten().map(|c| &**c).collect();
        let mut t = Toucher::new(&clocks, access, Part::AsyncShared);
        let (mut found, mut outside, mut unwritten) = (None, None, None);
        let bytes = number.bytes() as usize;
        for (at, o, i) in units(bits, number, major, outer) {
            let (Ok(start), true) = (usize::try_from(at), at + 16 <= block.shared.len() as i64) else {
                outside = outside.or(Some(at));
                continue;
            };
            if self.options.checks {
                let conflict = block.shadow.read(&mut self.ledger, &mut t, start as u64, 16);
                found = found.or(conflict);
                unwritten = unwritten.or_else(|| block.shadow.unwritten(start as u64, 16));
            }
            for (e, part) in block.shared[start..start + 16].chunks_exact(bytes).enumerate() {
                let mut word = [0; 4];
                word[..bytes].copy_from_slice(part);
                let x = model::decode(u32::from_le_bytes(word), number);
                let (o, i) = match major {
                    Major::Inner => (o as usize, i as usize + e),
                    Major::Outer => (o as usize + e, i as usize),
                };
                matrix.set(o, i, x);
            }
        }
        let base = u64::from(SHARED_BASE);
        if let Some(at) = outside {
            let what = "a product reads outside the block's shared memory".to_owned();
            self.product_fault(pending, Fault::OutOfBounds, what, Some((at + i64::from(SHARED_BASE)) as u64));
        }
        if let Some(conflict) = found {
            self.conflict(conflict, conflict.offset + base, &access, None, false);
        }
        if let Some(at) = unwritten {
            let what = "a product reads shared memory that nobody wrote".to_owned();
            self.product_fault(pending, Fault::Uninitialised, what, Some(at + base));
        }
        matrix
    }

    /// Runs the oldest product of a warpgroup.
    pub fn run_product(&mut self, cluster: &mut Cluster, rank: usize, group: usize) {
        let block = &mut cluster.blocks[rank];
        let ready = block.warpgroups[group].pending.front().is_some_and(|p| p.joined == 0xf);
        let Some(pending) = ready.then(|| block.warpgroups[group].pending.pop_front()).flatten() else { return };
        cluster.pending = cluster.pending.saturating_sub(1);
        self.progress += 1;
        let what = &pending.what;
        let [_, number_a, number_b] = what.numbers;
        let b = self.operand(block, &pending, what.b.0, number_b, what.b.1, what.n);
        let first = rank * (cluster.warps.len() / cluster.blocks.len()) + 4 * group;
        let program = self.program;
        let a = match &what.a {
            Left::Tile(bits, major) => {
                let block = &mut cluster.blocks[rank];
                self.operand(block, &pending, *bits, number_a, *major, ROWS as u32)
            }
            Left::Regs(regs) => {
                let four = Four { warps: &mut cluster.warps[first..first + 4], program };
                let bytes = number_a.bytes();
                let mut a = Matrix::new(ROWS, number_a.depth() as usize);
                for thread in 0..128 {
                    for (i, &reg) in regs.iter().enumerate() {
                        let word = four.bits(thread, reg);
                        for e in 0..4 / bytes {
                            let (row, inner) = left_element(thread, i as u32, e, bytes);
                            a.set(row as usize, inner as usize, model::decode(word >> (8 * bytes * e), number_a));
                        }
                    }
                }
                a
            }
        };
        let read: Vec<usize> = match &what.a {
            Left::Regs(regs) => regs.iter().map(|&r| program.slot(r)).collect(),
            Left::Tile(..) => Vec::new(),
        };
        let added = what.d.iter().filter(|_| what.onto).map(|&r| program.slot(r));
        let undefined = read
            .into_iter()
            .chain(added)
            .any(|slot| cluster.warps[first..first + 4].iter().any(|w| w.regs[slot].defined != u32::MAX));
        if undefined && self.options.checks {
            let text = "a product reads registers that nobody wrote".to_owned();
            self.product_fault(&pending, Fault::UninitialisedRegister, text, None);
        }
        compute(what, &a, &b, &mut Four { warps: &mut cluster.warps[first..first + 4], program });
        let flops = 2 * ROWS as u64 * u64::from(what.n) * u64::from(number_a.depth());
        let operand_bytes =
            u64::from(what.n) * 32 + if matches!(what.a, Left::Tile(..)) { 32 * ROWS as u64 } else { 0 };
        let role = cluster.warps[first].role;
        self.counts[role].multiplied(number_a, flops, operand_bytes);
        let group = &mut cluster.blocks[rank].warpgroups[group];
        group.done += 1;
        group.latest = self.now;
        let (done, now) = (group.done, self.now);
        for slot in first..first + 4 {
            let Status::Blocked(Wait::Products(target)) = cluster.warps[slot].status else { continue };
            if target <= done {
                let mut warp = std::mem::take(&mut cluster.warps[slot]);
                warp.status = Status::Ready;
                warp.now = warp.now.max(now);
                self.retire_products(&cluster.blocks[rank], &mut warp, target);
                cluster.warps[slot] = warp;
            }
        }
    }

    /// The warp knows that its products up to `target` are done.
    pub fn retire_products(&mut self, block: &Block, warp: &mut Warp, target: u32) {
        warp.tick();
        let completions = &block.warpgroups[(warp.index / 4) as usize].completions;
        for product in warp.retired..target {
            if let Some(&completion) = completions.get(product as usize) {
                self.ledger.completed(completion, warp.comp.0, warp.time);
            }
        }
        warp.retired = warp.retired.max(target);
        while warp.product_groups.front().is_some_and(|&end| end <= target) {
            warp.product_groups.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// The quick path gives the bits of the documented model.
    #[test]
    fn quick_sums_equal_the_model() {
        let mut random = Random::new(7);
        for round in 0..20_000 {
            // Exponents spread further and further, with zeros and cancellation.
            let spread = 1 + round % 40;
            let mut draw = |number: Number| {
                let bits = random.next();
                let x = ((bits & 0xff) as f64 + 1.0)
                    * ((bits >> 8 & 0xff) as f64 % f64::from(spread as u32) - f64::from(spread as u32) / 2.0).exp2();
                let x = if bits >> 60 == 0 {
                    0.0
                } else if bits >> 59 & 1 == 1 {
                    -x
                } else {
                    x
                };
                match number {
                    Number::F16 => half_of(x),
                    _ => bf16_of(x),
                }
            };
            let number = if round % 2 == 0 { Number::F16 } else { Number::Bf16 };
            let a: Vec<f64> = (0..16).map(|_| draw(number)).collect();
            let mut b: Vec<f64> = (0..16).map(|_| draw(number)).collect();
            if round % 5 == 0 {
                b[3] = -b[2];
            }
            let old = (draw(number) * draw(number)) as f32;
            if !a.iter().chain(&b).all(|x| x.is_finite()) || !old.is_finite() {
                continue;
            }
            let want =
                model::accumulate(old.to_bits(), a.iter().zip(&b).map(|(x, y)| x * y), Number::F32, number, false);
            assert_eq!(accumulate_16(old, &a, &b).to_bits(), want, "{old} {a:?} {b:?}");
        }
    }

    fn half_of(x: f64) -> f64 {
        fulgurite_ptx::f16::from_f64(x).to_f64()
    }
    fn bf16_of(x: f64) -> f64 {
        fulgurite_ptx::bf16::from_f64(x).to_f64()
    }
}
