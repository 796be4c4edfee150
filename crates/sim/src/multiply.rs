//! The arithmetic of a product: operands from shared memory, and sums in the manner of the tensor cores.
//!
//! Products of 16-bit floats take most of the time of a simulation, so they have a fast path. Tests check that it gives
//! the same bits as [`model::accumulate`], which defines them.

use crate::exact_sums::{self, Bits};
use crate::program::Program;
use crate::sums::{Columns, DEPTH, LOW, OperandRow, Sums};
use crate::world::{SHARED_BASE, Warp};
use fulgurite_ptx::Number;
use fulgurite_ptx::inst::Reg;
use fulgurite_ptx::model;
use fulgurite_ptx::product::{Descriptor, Lanes, Major, Product, accumulator_element, left_element, right_element};
use fulgurite_ptx::tcgen05::ProductKind;
use fulgurite_ptx::{bf16, f16};

/// An operand, `outer` by `inner`; elements of all outer indices are adjacent. Elements of every operand type fit in
/// f32.
pub(crate) struct Matrix {
    values: Vec<f32>,
    outer: usize,
    depth: usize,
}

impl Matrix {
    pub fn new(outer: usize, depth: usize) -> Self {
        Matrix { values: vec![0.0; outer * depth], outer, depth }
    }
    pub fn set(&mut self, outer: usize, inner: usize, x: f64) {
        self.values[inner * self.outer + outer] = x as f32;
    }
    /// The first `each` outer indices of several operands, one after the other.
    pub fn join(parts: &[Matrix], each: usize) -> Self {
        let depth = parts[0].depth;
        let rows = (0..depth).flat_map(|inner| parts.iter().map(move |part| (part, inner * part.outer)));
        let values = rows.flat_map(|(part, start)| part.values[start..start + each].iter().copied()).collect();
        Matrix { values, outer: each * parts.len(), depth }
    }
    pub fn get(&self, outer: usize, inner: usize) -> f32 {
        self.values[inner * self.outer + outer]
    }

    /// Stores the elements of a 16-byte unit that starts at (`outer`, `inner`).
    pub fn set_unit(&mut self, unit: &[u8], number: Number, major: Major, outer: u32, inner: u32) {
        let (start, step) = match major {
            Major::Inner => (inner as usize * self.outer + outer as usize, self.outer),
            Major::Outer => (inner as usize * self.outer + outer as usize, 1),
        };
        let places = self.values[start..].iter_mut().step_by(step);
        let halves = unit.chunks_exact(2).map(|part| u16::from_le_bytes([part[0], part[1]]));
        match number {
            Number::Bf16 => places.zip(halves).for_each(|(x, bits)| *x = bf16::from_bits(bits).to_f32()),
            Number::F16 => places.zip(halves).for_each(|(x, bits)| *x = f16::from_bits(bits).to_f32()),
            // Elements of two numbers are contiguous along the summed dimension.
            Number::E2m1x2 => {
                let places = self.values[2 * inner as usize * self.outer + outer as usize..].iter_mut();
                let numbers = unit.iter().flat_map(|byte| [byte & 15, byte >> 4]);
                places.step_by(step).zip(numbers).for_each(|(x, bits)| *x = model::from_fp4(bits));
            }
            _ => {
                let bytes = number.bytes() as usize;
                for (x, part) in places.zip(unit.chunks_exact(bytes)) {
                    let mut word = [0; 4];
                    word[..bytes].copy_from_slice(part);
                    *x = model::decode(u32::from_le_bytes(word), number) as f32;
                }
            }
        }
    }

    /// The exponent of each element in its type, or [`LOW`] for zeros; `None` if an element is not finite.
    pub fn exponents(&self, number: Number) -> Option<Vec<i16>> {
        let smallest = if number == Number::F16 { -14 } else { -126 };
        let exponent = |x: &f32| {
            let field = (x.to_bits() >> 23 & 0xff) as i16;
            if *x == 0.0 { LOW } else { (field - 127).max(smallest) }
        };
        let finite = self.values.iter().fold(true, |finite, x| finite & x.is_finite());
        finite.then(|| self.values.iter().map(exponent).collect())
    }

    /// The matrix as columns of a right operand.
    pub fn columns<'a>(&'a self, exponents: &'a [i16]) -> Columns<'a> {
        Columns { values: &self.values, exponents, count: self.outer }
    }
}

/// Offsets in shared memory of the 16-byte units of an operand, with the first element of each. Elements of a unit
/// follow each other along the contiguous dimension.
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

    /// Computes a product into the accumulator registers.
    pub fn multiply(&mut self, what: &Product, a: &Matrix, b: &Matrix) {
        let [to, number_a, number_b] = what.numbers;
        let halves = number_a.bytes() == 2 && to == Number::F32 && what.negate[0] == what.negate[1];
        if halves && let (Some(left), Some(right)) = (a.exponents(number_a), b.exponents(number_b)) {
            return self.multiply_quickly(what, a, &left, &b.columns(&right));
        }
        let sign = if what.negate[0] != what.negate[1] { -1.0 } else { 1.0 };
        // A register holds two 16-bit accumulators.
        let (per, bits) = (4 / to.bytes(), 8 * to.bytes());
        for thread in 0..128u32 {
            for (i, &reg) in what.d.iter().enumerate() {
                let old = if what.onto { self.bits(thread, reg) } else { 0 };
                let new = (0..per).fold(0, |word, e| {
                    let (row, col) = accumulator_element(thread, per * i as u32 + e);
                    let pair = |i| [sign * f64::from(a.get(row as usize, i)), f64::from(b.get(col as usize, i))];
                    let factors: Vec<[f64; 2]> = (0..a.depth).map(pair).collect();
                    let from = [number_a, number_b];
                    word | model::accumulate(old >> (bits * e), &factors, to, from, what.saturate) << (bits * e)
                });
                self.set(thread, reg, new);
            }
        }
    }

    fn multiply_quickly(&mut self, what: &Product, a: &Matrix, exponents: &[i16], columns: &Columns<'_>) {
        let slots: Vec<usize> = what.d.iter().map(|&reg| self.program.slot(reg)).collect();
        let mut sums = Sums::new(columns.count);
        for r in 0..64usize {
            let row = OperandRow {
                values: std::array::from_fn(|i| a.get(r, i)),
                exponents: std::array::from_fn(|i| exponents[i * a.outer + r]),
            };
            // Eight columns of a row occupy two registers of four neighbouring lanes.
            let (lane, half) = (r % 8 * 4, r / 8 % 2);
            let own = || slots.chunks_exact(4).map(|four| [four[2 * half], four[2 * half + 1]]);
            let regs = &mut self.warps[r / 16].regs;
            if what.onto {
                for (sums, [even, odd]) in sums.values.chunks_exact_mut(8).zip(own()) {
                    let (even, odd) = (&regs[even].values[lane..lane + 4], &regs[odd].values[lane..lane + 4]);
                    for (pair, (even, odd)) in sums.chunks_exact_mut(2).zip(even.iter().zip(odd)) {
                        pair.copy_from_slice(&[*even, *odd].map(f32::from_bits));
                    }
                }
            } else {
                sums.values.fill(0.0);
            }
            if sums.add(&row, columns) {
                for (j, sum) in sums.values.iter_mut().enumerate().filter(|(j, _)| sums.left_out[*j]) {
                    let y = |i: usize| columns.values[i * columns.count + j];
                    let factors: [[f64; 2]; DEPTH] = std::array::from_fn(|i| [row.values[i], y(i)].map(f64::from));
                    let [to, from @ ..] = what.numbers;
                    *sum = f32::from_bits(model::accumulate(sum.to_bits(), &factors, to, from, false));
                }
            }
            for (sums, [even, odd]) in sums.values.chunks_exact(8).zip(own()) {
                for (side, slot) in [even, odd].into_iter().enumerate() {
                    let values = &mut regs[slot].values[lane..lane + 4];
                    values.iter_mut().zip(sums[side..].iter().step_by(2)).for_each(|(x, sum)| *x = sum.to_bits());
                }
            }
        }
        for warp in &mut *self.warps {
            slots.iter().for_each(|&slot| warp.regs[slot].defined = u32::MAX);
        }
    }
}

/// A product into rows of accumulators that are adjacent in memory, a word to an element.
pub(crate) struct Rows<'a> {
    a: &'a Matrix,
    b: &'a Matrix,
    numbers: [Number; 3],
    /// Elements of both operands in the order of their rows, times their scales; of products other than those of halves.
    wide: Option<[Vec<f64>; 2]>,
    /// The bits that each row and each column of the operands has, if all are finite.
    bits: [Vec<Option<Bits>>; 2],
    scaled: bool,
    sums: Sums,
    /// Exponents of both operands, if all their elements are finite halves that are summed in f32.
    exponents: Option<[Vec<i16>; 2]>,
}

impl<'a> Rows<'a> {
    pub fn new(
        [a, b]: [&'a Matrix; 2],
        numbers: [Number; 3],
        cols: usize,
        scales: Option<(&'a [Matrix; 2], ProductKind)>,
    ) -> Self {
        let [to, number_a, number_b] = numbers;
        let quick = number_a.bytes() == 2 && to == Number::F32 && b.outer == cols;
        let exponents = quick.then(|| a.exponents(number_a).zip(b.exponents(number_b))).flatten();
        let each = scales.and_then(|(_, kind)| kind.scales()).map_or(1, |scales| scales.elements as usize);
        let wide = |matrix: &Matrix, scales: Option<&Matrix>| -> Vec<f64> {
            let element = |outer, i| {
                let scale =
                    scales.filter(|scales| outer < scales.outer).map_or(1.0, |scales| scales.get(outer, i / each));
                f64::from(matrix.get(outer, i)) * f64::from(scale)
            };
            (0..matrix.outer)
                .flat_map(|outer| (0..matrix.depth).map(move |i| (outer, i)))
                .map(|(o, i)| element(o, i))
                .collect()
        };
        let wide = (number_a.bytes() != 2).then(|| {
            let of = |i: usize| scales.map(|(scales, _)| &scales[i]);
            [wide(a, of(0)), wide(b, of(1))]
        });
        let bits = [0, 1].map(|i: usize| {
            let all = wide.as_ref().map_or(&[][..], |wide: &[Vec<f64>; 2]| &wide[i]);
            all.chunks_exact(a.depth).map(Bits::of).collect()
        });
        let (scaled, exponents) = (scales.is_some(), exponents.map(|(a, b)| [a, b]));
        Rows { a, b, numbers, wide, bits, scaled, sums: Sums::new(cols), exponents }
    }

    fn element(&self, old: u32, row: usize, col: usize) -> u32 {
        let [to, from @ ..] = self.numbers;
        let Some([a, b]) = &self.wide else {
            let pair = |i| [self.a.get(row, i), self.b.get(col, i)].map(f64::from);
            let factors: [[f64; 2]; DEPTH] = std::array::from_fn(pair);
            return model::accumulate(old, &factors, to, from, false);
        };
        let depth = self.a.depth;
        let (a, b) = (&a[row * depth..(row + 1) * depth], &b[col * depth..(col + 1) * depth]);
        if to == Number::F32
            && let (Some(bits_a), Some(bits_b)) = (self.bits[0][row], self.bits[1][col])
            && let Some(sum) = exact_sums::sum(old, [a, b], [bits_a, bits_b])
        {
            return sum;
        }
        let factors: Vec<[f64; 2]> = a.iter().zip(b).map(|(&x, &y)| [x, y]).collect();
        match to {
            Number::S32 => model::accumulate(old, &factors, to, from, false),
            _ => model::Adder::blackwell(depth, self.scaled).add(old, &factors, to, from),
        }
    }

    /// Computes a row of D into its cells.
    pub fn multiply(&mut self, row: usize, onto: bool, cells: &mut [u32]) {
        if !onto {
            cells.fill(0);
        }
        let Some([left, right]) = &self.exponents else {
            for (col, cell) in cells.iter_mut().enumerate() {
                *cell = self.element(*cell, row, col);
            }
            return;
        };
        let own = OperandRow {
            values: std::array::from_fn(|i| self.a.get(row, i)),
            exponents: std::array::from_fn(|i| left[i * self.a.outer + row]),
        };
        self.sums.values.iter_mut().zip(&*cells).for_each(|(sum, cell)| *sum = f32::from_bits(*cell));
        let some = self.sums.add(&own, &self.b.columns(right));
        for (col, cell) in cells.iter_mut().enumerate() {
            *cell = match some && self.sums.left_out[col] {
                true => self.element(*cell, row, col),
                false => self.sums.values[col].to_bits(),
            };
        }
    }
}

/// The product of a warp by the fast path; `None` if its types have none. [`mma_sync`](fulgurite_ptx::product::mma_sync)
/// defines it and says how operands are indexed.
pub(crate) fn of_warp(numbers: [Number; 3], [a, b, c]: [&[Lanes]; 3]) -> Option<Vec<Lanes>> {
    let [to, number_a, number_b] = numbers;
    if number_a.bytes() != 2 || number_b != number_a || to != Number::F32 {
        return None;
    }
    // Transposed: a sum works on all columns of its right operand at once, and A has more rows than B has columns.
    let (mut left, mut right) = (Matrix::new(8, DEPTH), Matrix::new(16, DEPTH));
    for (lane, e) in (0..32).flat_map(|lane| [(lane, 0), (lane, 1)]) {
        let element = |words: &Lanes| model::decode(words[lane as usize] >> (16 * e), number_a);
        for (i, words) in a.iter().enumerate() {
            let (row, inner) = left_element(lane, i as u32, e, 2);
            right.set(row as usize, inner as usize, element(words));
        }
        for (i, words) in b.iter().enumerate() {
            let (inner, col) = right_element(lane, i as u32, e, 2);
            left.set(col as usize, inner as usize, element(words));
        }
    }
    let mut cells = [[0; 16]; 8];
    let places = || (0..32).flat_map(|lane| (0..c.len()).map(move |i| (lane, i)));
    for (lane, i) in places() {
        let (row, col) = accumulator_element(lane, i as u32);
        cells[col as usize][row as usize] = c[i][lane as usize];
    }
    let mut rows = Rows::new([&left, &right], [to, number_b, number_a], 16, None);
    cells.iter_mut().enumerate().for_each(|(col, cells)| rows.multiply(col, true, cells));
    let mut d = c.to_vec();
    for (lane, i) in places() {
        let (row, col) = accumulator_element(lane, i as u32);
        d[i][lane as usize] = cells[col as usize][row as usize];
    }
    Some(d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::world::Register;
    use fulgurite_ptx::inst::Class;
    use fulgurite_ptx::kernel::{Kernel, Target};
    use fulgurite_ptx::product::{Left, TileShape, mma_sync};
    use std::sync::Arc;

    fn draw(random: &mut Random, number: Number, spread: f64) -> u16 {
        let bits = random.next();
        let scale = ((bits >> 8 & 0xff) as f64 % spread - spread / 2.0).exp2();
        let x = ((bits & 0xff) as f64 + 1.0) / 64.0 * scale * if bits >> 59 & 1 == 1 { -1.0 } else { 1.0 };
        let x = if bits >> 60 == 0 { 0.0 } else { x };
        if number == Number::F16 { f16::from_f64(x).to_bits() } else { bf16::from_f64(x).to_bits() }
    }

    /// Products of a warp, with special values, equal the definition bit for bit.
    #[test]
    fn products_of_a_warp_equal_their_definition() {
        let mut random = Random::new(5);
        for round in 0..200 {
            let number = [Number::F16, Number::Bf16][round % 2];
            let spread = [4.0, 20.0, 60.0][round % 3];
            let mut half = |i: usize| match (round % 7, i) {
                (0, 17) => 0x7f80,
                (0, 40) => 0x7fff,
                (1, 3) => 0x0001,
                _ => draw(&mut random, number, spread),
            };
            let mut operand = |registers: usize| -> Vec<Lanes> {
                (0..registers)
                    .map(|i| std::array::from_fn(|lane| u32::from(half(i + lane)) | u32::from(half(lane)) << 16))
                    .collect()
            };
            let (a, b) = (operand(4), operand(2));
            let c: Vec<Lanes> = (0..4)
                .map(|_| std::array::from_fn(|_| u32::from(draw(&mut random, Number::Bf16, spread)) << 16))
                .collect();
            let numbers = [Number::F32, number, number];
            let got = of_warp(numbers, [&a, &b, &c]).unwrap();
            for (i, (got, want)) in got.iter().zip(mma_sync(numbers, &a, &b, &c)).enumerate() {
                for (lane, (got, want)) in got.iter().zip(want).enumerate() {
                    let (x, y) = (f32::from_bits(*got), f32::from_bits(want));
                    assert!(*got == want || x.is_nan() && y.is_nan(), "round {round}, {i} {lane}: {x} and {y}");
                }
            }
        }
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
            let register = Register { values: [0; 32], defined: 0, touched: 0, written_by: 0, read_by: 0, ready: 0 };
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
