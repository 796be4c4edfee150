//! Vectorised sums of products of 16-bit floats, a row at a time, with the rules of [`Adder::hopper`].
//!
//! A product of two 16-bit floats is exact in f32, and so is that product in units of the last bit kept, as long as
//! exponents stay inside [`SAFE`]. So a term costs two multiplications and a conversion to an integer, which truncates.
//! Columns with any other values are marked, and the caller computes them by the definition.
//!
//! The code is simple loops over columns, compiled for the vectors of several machines; the best version is chosen at
//! run time.
//!
//! [`Adder::hopper`]: fulgurite_ptx::model::Adder::hopper

use std::ops::RangeInclusive;

/// Number of 16-bit products that one instruction sums.
pub(crate) const DEPTH: usize = 16;
/// The exponent of zero: below that of every nonzero product, and its double fits the type.
pub(crate) const LOW: i16 = -10_000;
/// Bits kept below the largest exponent.
const KEPT: i32 = 25;
/// Largest exponents for which every term is exact or too small to count: f32 holds 2^(25 - exponent), a product below
/// its normal numbers is less than one unit, and no sum is too large.
const SAFE: RangeInclusive<i16> = -100..=120;

/// A row of the left operand, with the exponents of its elements.
pub(crate) struct OperandRow {
    pub values: [f32; DEPTH],
    pub exponents: [i16; DEPTH],
}

/// The right operand, with the exponents of its elements; the columns of a row are adjacent.
pub(crate) struct Columns<'a> {
    pub values: &'a [f32],
    pub exponents: &'a [i16],
    pub count: usize,
}

/// The sums of a row, and scratch data for each column.
pub(crate) struct Sums {
    /// The accumulators, then the results.
    pub values: Vec<f32>,
    /// Columns that were not computed.
    pub left_out: Vec<bool>,
    /// The largest exponent of each column.
    top: Vec<i16>,
    /// Units of the last kept bit in 1, for each column.
    scale: Vec<f32>,
    /// Terms of the first and of the second half of the factors, in units: each stays below 2^30 + 2^26. Columns that
    /// are not computed may wrap.
    halves: [Vec<i32>; 2],
}

impl Sums {
    pub fn new(count: usize) -> Self {
        Sums {
            values: vec![0.0; count],
            left_out: vec![false; count],
            top: vec![LOW; count],
            scale: vec![0.0; count],
            halves: [vec![0; count], vec![0; count]],
        }
    }

    /// Adds the products of a row with every column. Returns whether a column was not computed.
    pub fn add(&mut self, row: &OperandRow, columns: &Columns<'_>) -> bool {
        #[cfg(target_arch = "x86_64")]
        if let Some(left_out) = x86::add(self, row, columns) {
            return left_out;
        }
        self.add_here(row, columns)
    }

    #[inline(always)]
    fn add_here(&mut self, row: &OperandRow, columns: &Columns<'_>) -> bool {
        let Sums { values, left_out, top, scale, halves } = self;
        for (top, sum) in top.iter_mut().zip(&*values) {
            let exponent = (sum.to_bits() >> 23 & 0xff) as i16 - 127;
            *top = if *sum == 0.0 { LOW } else { exponent.max(-126) };
        }
        // Process four rows at a time, which reduces the reads and writes of per-column data.
        let n = columns.count;
        for (x, lines) in row.exponents.chunks_exact(4).zip(columns.exponents.chunks_exact(4 * n)) {
            let [a, b, c, d] = four(lines, n);
            for ((((top, a), b), c), d) in top.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                *top = (*top).max((x[0] + a).max(x[1] + b)).max((x[2] + c).max(x[3] + d));
            }
        }
        let mut any = false;
        for (((top, scale), left_out), (sum, half)) in
            top.iter_mut().zip(scale.iter_mut()).zip(left_out.iter_mut()).zip(values.iter().zip(&mut halves[0]))
        {
            let exponent = if *top < LOW / 2 { 0 } else { *top }; // all zeros
            *left_out = exponent < *SAFE.start() || exponent > *SAFE.end();
            any |= *left_out;
            *top = exponent.clamp(*SAFE.start(), *SAFE.end());
            *scale = f32::from_bits(((127 + KEPT - i32::from(*top)) as u32) << 23);
            *half = cut(sum * *scale);
        }
        halves[1].fill(0);
        for (i, (x, lines)) in row.values.chunks_exact(4).zip(columns.values.chunks_exact(4 * n)).enumerate() {
            let [a, b, c, d] = four(lines, n);
            let half = &mut halves[4 * i / (DEPTH / 2)];
            for (((((half, scale), a), b), c), d) in half.iter_mut().zip(&*scale).zip(a).zip(b).zip(c).zip(d) {
                let term = |x: f32, y: f32| cut(x * y * scale);
                let (low, high) =
                    (term(x[0], *a).wrapping_add(term(x[1], *b)), term(x[2], *c).wrapping_add(term(x[3], *d)));
                *half = half.wrapping_add(low.wrapping_add(high));
            }
        }
        let [low, high] = halves;
        for (((sum, top), left_out), (low, high)) in
            values.iter_mut().zip(&*top).zip(&*left_out).zip(low.iter().zip(&*high))
        {
            // Truncate to the bits of an f32, and convert back from units.
            let units = f64::from(*low) + f64::from(*high);
            let unit = f64::from_bits(((1023 - KEPT + i32::from(*top)) as u64) << 52);
            let kept = f64::from_bits(units.to_bits() >> 29 << 29) * unit;
            *sum = if *left_out { *sum } else { kept as f32 };
        }
        any
    }
}

/// Truncates toward zero. The results for columns that are not computed do not matter.
#[inline(always)]
#[allow(unsafe_code)] // `as` asks for more than one instruction, and is not done in vectors
fn cut(x: f32) -> i32 {
    const LIMIT: f32 = (1 << 30) as f32;
    let x = if x < LIMIT { x } else { LIMIT };
    let x = if x > -LIMIT { x } else { -LIMIT };
    // SAFETY: no NaN is below the limit, so `x` is a number from -2^30 to 2^30.
    unsafe { x.to_int_unchecked() }
}

/// Four rows of `n` numbers.
#[inline(always)]
fn four<T>(lines: &[T], n: usize) -> [&[T]; 4] {
    std::array::from_fn(|i| &lines[i * n..(i + 1) * n])
}

/// The loops compiled for instruction sets that not every machine has.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // a function for instructions that not every machine has can be called no other way
mod x86 {
    use super::{Columns, OperandRow, Sums};

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn avx512(sums: &mut Sums, row: &OperandRow, columns: &Columns<'_>) -> bool {
        sums.add_here(row, columns)
    }
    #[target_feature(enable = "avx2")]
    fn avx2(sums: &mut Sums, row: &OperandRow, columns: &Columns<'_>) -> bool {
        sums.add_here(row, columns)
    }

    /// Adds with the widest available vectors; `None` if there are none.
    pub fn add(sums: &mut Sums, row: &OperandRow, columns: &Columns<'_>) -> Option<bool> {
        let wide = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if wide {
            // SAFETY: the check above found every feature that `avx512` is compiled for.
            return Some(unsafe { avx512(sums, row, columns) });
        }
        is_x86_feature_detected!("avx2").then(|| add_avx2(sums, row, columns))
    }

    pub fn add_avx2(sums: &mut Sums, row: &OperandRow, columns: &Columns<'_>) -> bool {
        assert!(is_x86_feature_detected!("avx2"), "bug in fulgurite: this machine has no AVX2");
        // SAFETY: the check above found the feature that `avx2` is compiled for.
        unsafe { avx2(sums, row, columns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::multiply::Matrix;
    use crate::random::Random;
    use fulgurite_ptx::{Number, bf16, f16, model};

    /// A finite number of a type; `spread` limits the exponents, and `None` allows every bit pattern.
    fn draw(random: &mut Random, number: Number, spread: Option<u64>) -> f32 {
        let bits = random.next();
        let finite = |bits: u16| match number {
            Number::F16 => f16::from_bits(if bits >> 10 & 0x1f == 0x1f { bits ^ 0x400 } else { bits }).to_f32(),
            _ => bf16::from_bits(if bits >> 7 & 0xff == 0xff { bits ^ 0x80 } else { bits }).to_f32(),
        };
        let (fraction, bias, low) = if number == Number::F16 { (10, 15, 0x3ff) } else { (7, 127, 0x7f) };
        match (bits >> 60, spread) {
            (0, _) => 0.0,
            (1, _) => finite((bits & low | bits >> 40 & 0x8000) as u16), // subnormal
            (_, None) => finite(bits as u16),
            (_, Some(spread)) => {
                let exponent = bias + random.below(spread) - spread / 2;
                finite((bits & low | exponent << fraction | bits >> 40 & 0x8000) as u16)
            }
        }
    }

    /// An accumulator, sometimes infinite or NaN.
    fn accumulator(random: &mut Random, spread: Option<u64>) -> f32 {
        let bits = random.next();
        match (bits >> 60, spread) {
            (0, _) => 0.0,
            (1, _) => f32::from_bits(bits as u32 & 0x807f_ffff),
            (2, None) => [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX][bits as usize % 4],
            (_, None) => f32::from_bits(bits as u32),
            (_, Some(spread)) => {
                let exponent = (127 + random.below(2 * spread) - spread) as u32;
                f32::from_bits(bits as u32 & 0x807f_ffff | exponent << 23)
            }
        }
    }

    type Way = fn(&mut Sums, &OperandRow, &Columns<'_>) -> bool;

    /// Every implementation gives the bits of the model, or reports that it did not compute them.
    #[test]
    fn sums_are_those_of_the_model() {
        let mut ways: Vec<Way> = vec![Sums::add, Sums::add_here];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            ways.push(x86::add_avx2);
        }
        const COUNT: usize = 72;
        let mut random = Random::new(11);
        for round in 0..400 {
            let number = [Number::F16, Number::Bf16][round % 2];
            let spread = [Some(2), Some(8), Some(26), None][round / 2 % 4];
            let mut matrix = |outer| {
                let mut matrix = Matrix::new(outer, DEPTH);
                for (o, i) in (0..outer).flat_map(|o| (0..DEPTH).map(move |i| (o, i))) {
                    matrix.set(o, i, draw(&mut random, number, spread).into());
                }
                matrix
            };
            let (mut a, mut b) = (matrix(1), matrix(COUNT));
            if round % 3 == 0 {
                // Terms that cancel, so that only the truncation error remains.
                for (i, col) in (0..DEPTH / 2).flat_map(|i| (0..COUNT).map(move |col| (i, col))) {
                    a.set(0, i + DEPTH / 2, f64::from(-a.get(0, i)));
                    b.set(col, i + DEPTH / 2, b.get(col, i).into());
                }
                a.set(0, DEPTH - 1, draw(&mut random, number, spread).into());
            }
            let (left, right) = (a.exponents(number).unwrap(), b.exponents(number).unwrap());
            let row = OperandRow {
                values: std::array::from_fn(|i| a.get(0, i)),
                exponents: std::array::from_fn(|i| left[i]),
            };
            let columns = b.columns(&right);
            let old: Vec<f32> = (0..COUNT).map(|_| accumulator(&mut random, spread)).collect();
            for way in &ways {
                let mut sums = Sums::new(COUNT);
                sums.values.copy_from_slice(&old);
                let any = way(&mut sums, &row, &columns);
                assert_eq!(any, sums.left_out.contains(&true));
                if spread.is_some() && round % 3 != 0 {
                    assert!(sums.left_out.iter().all(|left_out| !left_out), "the quick path is not taken");
                }
                for (col, old) in old.iter().enumerate() {
                    let factors: [[f64; 2]; DEPTH] =
                        std::array::from_fn(|i| [row.values[i], b.get(col, i)].map(f64::from));
                    let want = model::accumulate(old.to_bits(), &factors, Number::F32, [number; 2], false);
                    let want = if sums.left_out[col] { old.to_bits() } else { want };
                    assert_eq!(sums.values[col].to_bits(), want, "round {round}, column {col}: {} {factors:?}", old);
                }
            }
        }
    }
}
