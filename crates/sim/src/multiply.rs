//! The arithmetic of a product: operands from shared memory, and sums as the tensor cores make them.
//!
//! Products of 16-bit floats take most of the time of a simulation, so they have a quick path; it gives the bits of
//! [`model::accumulate`], which defines them, and tests hold it to that.

use crate::program::Program;
use crate::world::{SHARED_BASE, Warp};
use fulgurite_ptx::Number;
use fulgurite_ptx::inst::Reg;
use fulgurite_ptx::model;
use fulgurite_ptx::product::{Descriptor, Major, Product, accumulator_element};

/// Elements that one instruction sums, of 16 bits each.
const DEPTH: usize = 16;
/// Bits of the largest term that are kept below its first.
const KEPT: i32 = 25;
/// An operand, `outer` by `inner`.
pub(crate) struct Matrix {
    values: Vec<f64>,
    depth: usize,
    finite: bool,
}

impl Matrix {
    pub fn new(outer: usize, depth: usize) -> Self {
        Matrix { values: vec![0.0; outer * depth], depth, finite: true }
    }
    pub fn set(&mut self, outer: usize, inner: usize, x: f64) {
        self.values[outer * self.depth + inner] = x;
        self.finite &= x.is_finite();
    }
    fn row(&self, outer: usize) -> &[f64] {
        &self.values[outer * self.depth..(outer + 1) * self.depth]
    }

    /// Takes the elements of a 16-byte unit, which begins at (`outer`, `inner`).
    pub fn set_unit(&mut self, unit: &[u8], number: Number, major: Major, outer: u32, inner: u32) {
        if number == Number::Bf16 {
            // Most of what is multiplied: the upper half of an f32.
            let (start, step) = match major {
                Major::Inner => (outer as usize * self.depth + inner as usize, 1),
                Major::Outer => (outer as usize * self.depth + inner as usize, self.depth),
            };
            for (x, part) in self.values[start..].iter_mut().step_by(step).zip(unit.chunks_exact(2)) {
                let bits = u32::from(u16::from_le_bytes([part[0], part[1]]));
                self.finite &= bits & 0x7f80 != 0x7f80;
                *x = f64::from(f32::from_bits(bits << 16));
            }
            return;
        }
        let bytes = number.bytes() as usize;
        for (e, part) in unit.chunks_exact(bytes).enumerate() {
            let mut word = [0; 4];
            word[..bytes].copy_from_slice(part);
            let x = model::decode(u32::from_le_bytes(word), number);
            let (o, i) = match major {
                Major::Inner => (outer as usize, inner as usize + e),
                Major::Outer => (outer as usize + e, inner as usize),
            };
            self.set(o, i, x);
        }
    }
}

/// Offsets in shared memory of the 16-byte units of an operand, with the first element of each. Elements of a unit
/// follow each other along the dimension that is contiguous.
pub(crate) fn units(bits: u64, number: Number, major: Major, outer: u32) -> Vec<(i64, u32, u32)> {
    let d = Descriptor::decode(bits);
    let (unit, depth) = (16 / number.bytes(), number.depth());
    let (outer_step, inner_step) = match major {
        Major::Inner => (1, unit),
        Major::Outer => (unit, 1),
    };
    let mut all = Vec::with_capacity((outer * depth / unit) as usize);
    for o in (0..outer).step_by(outer_step as usize) {
        for i in (0..depth).step_by(inner_step as usize) {
            all.push((i64::from(d.element(number, major, o, i)) - i64::from(SHARED_BASE), o, i));
        }
    }
    all
}

/// The four warps of a warpgroup.
pub(crate) struct Four<'a> {
    pub warps: &'a mut [Warp],
    pub program: &'a Program,
}

impl Four<'_> {
    pub fn bits(&self, thread: u32, reg: Reg) -> u32 {
        self.warps[(thread / 32) as usize].regs[self.program.slot(reg)].values[(thread % 32) as usize]
    }
    fn set(&mut self, thread: u32, reg: Reg, bits: u32) {
        let register = &mut self.warps[(thread / 32) as usize].regs[self.program.slot(reg)];
        register.values[(thread % 32) as usize] = bits;
        register.defined |= 1 << (thread % 32);
    }

    /// Computes a product into the registers.
    pub fn multiply(&mut self, what: &Product, a: &Matrix, b: &Matrix) {
        let [to, number, _] = what.numbers;
        let quick =
            number.bytes() == 2 && to == Number::F32 && a.finite && b.finite && what.negate[0] == what.negate[1];
        if quick {
            return self.multiply_quickly(what, a, b);
        }
        let sign = if what.negate[0] != what.negate[1] { -1.0 } else { 1.0 };
        // Registers of 16-bit accumulators hold two.
        let (per, bits) = (4 / to.bytes(), 8 * to.bytes());
        for thread in 0..128u32 {
            for (i, &reg) in what.d.iter().enumerate() {
                let old = if what.onto { self.bits(thread, reg) } else { 0 };
                let new = (0..per).fold(0, |word, e| {
                    let (row, col) = accumulator_element(thread, per * i as u32 + e);
                    let pairs = a.row(row as usize).iter().zip(b.row(col as usize));
                    let terms: Vec<f64> = pairs.map(|(x, y)| sign * x * y).collect();
                    word | model::accumulate(old >> (bits * e), &terms, to, number, what.saturate) << (bits * e)
                });
                self.set(thread, reg, new);
            }
        }
    }

    fn multiply_quickly(&mut self, what: &Product, a: &Matrix, b: &Matrix) {
        let n = what.n as usize;
        // B with its columns beside each other: long loops over columns are what the compiler makes fast.
        let mut columns = vec![0.0; DEPTH * n];
        for (i, line) in columns.chunks_exact_mut(n).enumerate() {
            line.iter_mut().enumerate().for_each(|(col, y)| *y = b.values[col * DEPTH + i]);
        }
        let slots: Vec<usize> = what.d.iter().map(|&reg| self.program.slot(reg)).collect();
        let mut row = Row::new(n);
        for r in 0..64usize {
            let x = &a.values[r * DEPTH..(r + 1) * DEPTH];
            // Eight columns of a row are two registers of four neighbouring lanes.
            let (lane, half) = (r % 8 * 4, r / 8 % 2);
            let regs = &mut self.warps[r / 16].regs;
            for (old, own) in row.old.chunks_exact_mut(8).zip(slots.chunks_exact(4)) {
                for (side, &slot) in own[2 * half..][..2].iter().enumerate().filter(|_| what.onto) {
                    let values = &regs[slot].values[lane..lane + 4];
                    (0..4).for_each(|j| old[2 * j + side] = f64::from(f32::from_bits(values[j])));
                }
            }
            row.accumulate(x, &columns, what.numbers[1]);
            for (new, own) in row.new.chunks_exact(8).zip(slots.chunks_exact(4)) {
                for (side, &slot) in own[2 * half..][..2].iter().enumerate() {
                    let values = &mut regs[slot].values[lane..lane + 4];
                    (0..4).for_each(|j| values[j] = new[2 * j + side]);
                }
            }
        }
        for warp in &mut *self.warps {
            slots.iter().for_each(|&slot| warp.regs[slot].defined = u32::MAX);
        }
    }
}

/// Bits below the last one kept in which a term is still exact enough to be cut: products of 16-bit floats have at
/// most 22 bits, so that one that is worth half a unit or more is exact, and a smaller one does not reach a unit.
const BELOW: i32 = 23;
/// The exponent of the magic number, above that of the last bit kept: its own last bit lies 52 below.
const MAGIC: i32 = 52 - BELOW;

/// A row of the accumulators, and what its sums need for each column.
struct Row {
    /// What was there, or zeros.
    old: Vec<f64>,
    /// The largest term.
    largest: Vec<f64>,
    /// A number whose last bit is worth 2^-[`BELOW`] of the last bit that is kept.
    magic: Vec<f64>,
    /// Terms cut to the last bit that is kept, and added.
    sums: Vec<f64>,
    /// The bits of what comes out.
    new: Vec<u32>,
}

impl Row {
    fn new(n: usize) -> Self {
        let zeros = || vec![0.0; n];
        Row { old: zeros(), largest: zeros(), magic: zeros(), sums: zeros(), new: vec![0; n] }
    }

    /// One step of the tensor core: the old sums plus the products of `x` with each column, which are finite. Products
    /// of 16-bit floats are exact in f64, and so are sums of what is kept of them.
    fn accumulate(&mut self, x: &[f64], columns: &[f64], number: Number) {
        let Row { old, largest, magic, sums, new } = self;
        let n = old.len();
        largest.iter_mut().zip(&*old).for_each(|(largest, old)| *largest = old.abs());
        // Four terms at a time: what is kept for each column is read and written that much less.
        for (x, lines) in x.chunks_exact(4).zip(columns.chunks_exact(4 * n)) {
            let [a, b, c, d] = four(lines, n);
            for (((largest, a), b), (c, d)) in largest.iter_mut().zip(a).zip(b).zip(c.iter().zip(d)) {
                let larger = |a: f64, b: f64| if b > a { b } else { a };
                let (low, high) =
                    (larger((x[0] * a).abs(), (x[1] * b).abs()), larger((x[2] * c).abs(), (x[3] * d).abs()));
                *largest = larger(*largest, larger(low, high));
            }
        }
        for ((magic, largest), (sum, old)) in magic.iter_mut().zip(&*largest).zip(sums.iter_mut().zip(&*old)) {
            *magic = f64::from_bits(((largest.to_bits() >> 52) + (MAGIC - KEPT) as u64) << 52 | 1 << 51);
            *sum = cut(*old, *magic);
        }
        for (x, lines) in x.chunks_exact(4).zip(columns.chunks_exact(4 * n)) {
            let [a, b, c, d] = four(lines, n);
            for ((((sum, &magic), a), b), (c, d)) in sums.iter_mut().zip(&*magic).zip(a).zip(b).zip(c.iter().zip(d)) {
                *sum += (cut(x[0] * a, magic) + cut(x[1] * b, magic)) + (cut(x[2] * c, magic) + cut(x[3] * d, magic));
            }
        }
        for (new, sum) in new.iter_mut().zip(&*sums) {
            // Cut toward zero to f32: what was rounded up goes one number back. A sum of 0 has no sign.
            let near = *sum as f32 + 0.0;
            let over = f64::from(near).abs() > sum.abs();
            *new = near.to_bits().wrapping_sub(u32::from(over));
        }
        if old.iter().any(|x| !x.is_finite()) {
            for (col, (new, old)) in new.iter_mut().zip(&*old).enumerate().filter(|(_, (_, old))| !old.is_finite()) {
                let terms: Vec<f64> = (0..DEPTH).map(|i| x[i] * columns[i * n + col]).collect();
                *new = model::accumulate((*old as f32).to_bits(), &terms, Number::F32, number, false);
            }
        }
    }
}

/// Four lines of `n` numbers.
fn four(lines: &[f64], n: usize) -> [&[f64]; 4] {
    std::array::from_fn(|i| &lines[i * n..(i + 1) * n])
}

/// A term cut toward zero to the last bit that is kept: adding the magic number lines its bits up.
#[inline(always)]
fn cut(x: f64, magic: f64) -> f64 {
    let lined_up = (x.abs() + magic).to_bits() & !((1 << BELOW) - 1);
    let size = f64::from_bits(lined_up) - magic;
    f64::from_bits(size.to_bits() | x.to_bits() & 1 << 63)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::world::Register;
    use fulgurite_ptx::inst::Class;
    use fulgurite_ptx::kernel::{Kernel, Target};
    use fulgurite_ptx::product::{Left, TileShape};
    use fulgurite_ptx::{bf16, f16};
    use std::sync::Arc;

    fn draw(random: &mut Random, number: Number, spread: f64) -> u16 {
        let bits = random.next();
        let scale = ((bits >> 8 & 0xff) as f64 % spread - spread / 2.0).exp2();
        let x = ((bits & 0xff) as f64 + 1.0) / 64.0 * scale * if bits >> 59 & 1 == 1 { -1.0 } else { 1.0 };
        let x = if bits >> 60 == 0 { 0.0 } else { x };
        if number == Number::F16 { f16::from_f64(x).to_bits() } else { bf16::from_f64(x).to_bits() }
    }

    /// Whole products, of both layouts and with special values, equal `Product::run` bit for bit.
    #[test]
    fn products_equal_their_definition() {
        let mut random = Random::new(3);
        for round in 0..60u32 {
            let number = [Number::F16, Number::Bf16][round as usize % 2];
            let majors = [
                [Major::Inner, Major::Outer][round as usize / 2 % 2],
                [Major::Inner, Major::Outer][round as usize / 4 % 2],
            ];
            let n = 8 * (1 + random.below(6)) as u32;
            // Outer-major operands are whole chunks.
            let n = if majors[1] == Major::Outer { n.next_multiple_of(64) } else { n };
            let shape = |major, outer| match major {
                Major::Inner => TileShape::new(number, outer, 64),
                Major::Outer => TileShape::new(number, 16, outer),
            };
            let (a, b) = (shape(majors[0], 64), shape(majors[1], n));
            let b_at = (SHARED_BASE + a.bytes()).next_multiple_of(1024);
            let spread = [4.0, 20.0, 60.0][round as usize % 3];
            let halves = (b_at - SHARED_BASE + b.bytes()) / 2;
            let mut shared: Vec<u8> =
                (0..halves).flat_map(|_| draw(&mut random, number, spread).to_le_bytes()).collect();
            if round % 7 == 0 {
                // An infinity and a NaN.
                shared[100..102].copy_from_slice(&0x7c00u16.to_le_bytes());
                shared[300..302].copy_from_slice(&0x7fffu16.to_le_bytes());
            }
            let d: Vec<Reg> = (0..n / 2).map(|index| Reg { class: Class::F32, index }).collect();
            let what = Product {
                d: d.into(),
                a: Left::Tile(a.descriptor(majors[0]) | u64::from(SHARED_BASE >> 4), majors[0]),
                b: (b.descriptor(majors[1]) | u64::from(b_at >> 4), majors[1]),
                n,
                numbers: [Number::F32, number, number],
                onto: round % 4 != 0,
                negate: [false; 2],
                saturate: false,
            };
            let mut kernel = Kernel::build("empty", Target::HOPPER, |k| k.threads(128, |_| {})).unwrap();
            kernel.registers[Class::F32 as usize] = n / 2;
            let program = Program::new(Arc::new(kernel)).unwrap();
            let register = Register { values: [0; 32], defined: 0, touched: 0, written_by: 0, read_by: 0 };
            let mut warps: Vec<Warp> =
                (0..4).map(|_| Warp { regs: vec![register.clone(); program.registers], ..Warp::default() }).collect();
            for register in warps.iter_mut().flat_map(|w| &mut w.regs) {
                let sum = |random: &mut Random| {
                    let [x, y] = [0; 2].map(|_| f64::from(bf16::from_bits(draw(random, Number::Bf16, spread))));
                    ((x * y) as f32).to_bits()
                };
                register.values = std::array::from_fn(|_| sum(&mut random));
            }
            let read = |bits, major, outer| {
                let mut matrix = Matrix::new(outer as usize, 16);
                for (at, o, i) in units(bits, number, major, outer) {
                    matrix.set_unit(&shared[at as usize..at as usize + 16], number, major, o, i);
                }
                matrix
            };
            let Left::Tile(bits, major) = what.a else { unreachable!() };
            let (left, right) = (read(bits, major, 64), read(what.b.0, what.b.1, n));
            let mut four = Four { warps: &mut warps, program: &program };
            let want = what.run(&mut |thread, reg| four.bits(thread, reg), &mut |at, out| {
                let at = (at - SHARED_BASE) as usize;
                out.copy_from_slice(&shared[at..at + out.len()]);
            });
            four.multiply(&what, &left, &right);
            for (thread, want) in want.into_iter().enumerate() {
                for (i, want) in want.into_iter().enumerate() {
                    let got = four.bits(thread as u32, what.d[i]);
                    let (x, y) = (f32::from_bits(got), f32::from_bits(want));
                    assert!(got == want || x.is_nan() && y.is_nan(), "round {round}, {thread} {i}: {x} and {y}");
                }
            }
        }
    }
}
