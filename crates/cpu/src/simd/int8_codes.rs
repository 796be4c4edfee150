//! Converts rows of f32 to 8-bit codes, and codes to operands of a matrix unit: simple loops that are compiled again
//! for each instruction set's vectors.

use super::matrix::{GROUP, SLOTS};

/// Elements of the summed axis in a tile of bytes.
pub(crate) const BYTES: usize = 64;

/// Entry points; as with [`Kernels`](super::Kernels), holding one tells you that the machine has it.
pub(crate) struct Coding {
    pub(super) add_row: unsafe fn(&mut [f64], &[f32]),
    pub(super) size: unsafe fn(&[f32], &[f32]) -> f32,
    pub(super) encode: unsafe fn(&[f32], &[f32], f32, &mut [i8]),
    pub(super) dot: unsafe fn(&[f32], &[f32]) -> f64,
    pub(super) turn_rows: unsafe fn(&[&[i8]], usize, &mut [f32]),
    pub(super) turn_columns: unsafe fn(&[i8], usize, usize, *mut f32, usize),
}

pub(super) static PLAIN: Coding = Coding {
    add_row: |sums, row| add_row(sums, row),
    size: |x, mean| size(x, mean),
    encode: |x, mean, scale, to| encode(x, mean, scale, to),
    dot: |x, y| dot(x, y),
    turn_rows: plain_turn_rows,
    turn_columns: plain_turn_columns,
};

impl Coding {
    /// Adds a row to sums of columns.
    pub fn add_row(&self, sums: &mut [f64], row: &[f32]) {
        assert_eq!(sums.len(), row.len());
        // SAFETY: the machine has the instruction set; so below.
        unsafe { (self.add_row)(sums, row) }
    }
    /// The largest magnitude of x - mean, at most that of a finite number.
    pub fn size(&self, x: &[f32], mean: &[f32]) -> f32 {
        assert_eq!(x.len(), mean.len());
        // SAFETY: as above.
        unsafe { (self.size)(x, mean) }
    }
    /// Codes of x - mean as [`quantise`](fulgurite_core::format::integer::quantise) makes them, at most 127.
    pub fn encode(&self, x: &[f32], mean: &[f32], scale: f32, to: &mut [i8]) {
        assert!(x.len() == mean.len() && x.len() == to.len());
        // SAFETY: as above.
        unsafe { (self.encode)(x, mean, scale, to) }
    }
    /// The sum of products.
    pub fn dot(&self, x: &[f32], y: &[f32]) -> f64 {
        assert_eq!(x.len(), y.len());
        // SAFETY: as above.
        unsafe { (self.dot)(x, y) }
    }
    /// Up to 16 rows of `tiles` tiles as columns of B, neighbours in a slot; missing rows are zero.
    pub fn turn_rows(&self, rows: &[&[i8]], tiles: usize, to: &mut [f32]) {
        assert!(rows.len() <= GROUP && rows.iter().all(|r| r.len() >= tiles * BYTES) && to.len() >= tiles * SLOTS);
        // SAFETY: as above, and the extents were just checked.
        unsafe { (self.turn_rows)(rows, tiles, to) }
    }
    /// 64 rows of `columns` codes, a multiple of 64 apart and full, as rows of A: groups of 16 columns `pitch` slots
    /// apart, slot j of a column holding rows j, j + 16, j + 32 and j + 48.
    pub fn turn_columns(&self, codes: &[i8], row: usize, columns: usize, to: &mut [f32], pitch: usize) {
        assert!(row.is_multiple_of(BYTES) && columns <= row && codes.len() >= BYTES * row, "codes");
        let groups = columns.div_ceil(GROUP);
        assert!(groups == 0 || to.len() >= (groups - 1) * pitch + SLOTS, "panels too small");
        // SAFETY: as above, and the extents were just checked.
        unsafe { (self.turn_columns)(codes, row, groups, to.as_mut_ptr(), pitch) }
    }
}

#[inline(always)]
pub(super) fn add_row(sums: &mut [f64], row: &[f32]) {
    sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
}

#[inline(always)]
pub(super) fn size(x: &[f32], mean: &[f32]) -> f32 {
    // Bits of magnitudes are in the order of magnitudes.
    let bits = x.iter().zip(mean).fold(0, |m: u32, (x, mean)| m.max((x - mean).abs().to_bits()));
    f32::from_bits(bits).min(f32::MAX)
}

#[inline(always)]
pub(super) fn encode(x: &[f32], mean: &[f32], scale: f32, to: &mut [i8]) {
    // Added, this leaves the rounded number in the lowest bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    if scale == 0.0 {
        return to.fill(0);
    }
    for ((to, &x), &mean) in to.iter_mut().zip(x).zip(mean) {
        let x = (x - mean).clamp(f32::MIN, f32::MAX);
        *to = ((x / scale).clamp(-127.0, 127.0) + ROUND).to_bits() as i8;
    }
}

#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f64 {
    let mut sums = [0.0f64; 16];
    let (x, y) = (x.chunks(16), y.chunks(16));
    for (x, y) in x.zip(y) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += f64::from(x) * f64::from(y);
        }
    }
    sums.iter().sum()
}

/// Four bytes as the bits of a slot.
pub(crate) fn slot(bytes: [i8; 4]) -> f32 {
    f32::from_bits(u32::from_le_bytes(bytes.map(|b| b as u8)))
}

unsafe fn plain_turn_rows(rows: &[&[i8]], tiles: usize, to: &mut [f32]) {
    to[..tiles * SLOTS].fill(0.0);
    for (lane, row) in rows.iter().enumerate() {
        for (i, four) in row[..tiles * BYTES].chunks_exact(4).enumerate() {
            to[i / GROUP * SLOTS + i % GROUP * GROUP + lane] = slot([four[0], four[1], four[2], four[3]]);
        }
    }
}

/// # Safety
/// The extents are checked by [`Coding::turn_columns`].
unsafe fn plain_turn_columns(codes: &[i8], row: usize, groups: usize, to: *mut f32, pitch: usize) {
    for (c, j) in (0..groups * GROUP).flat_map(|c| (0..GROUP).map(move |j| (c, j))) {
        let four = [0, 1, 2, 3].map(|i| codes[(i * GROUP + j) * row + c]);
        // SAFETY: inside the extents (contract).
        unsafe { *to.add(c / GROUP * pitch + c % GROUP * GROUP + j) = slot(four) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use fulgurite_core::format::integer::quantise;
    use fulgurite_core::random::Rng;

    #[test]
    fn every_table_gives_the_codes_of_the_definition() {
        let mut rng = Rng::new(3);
        let fast = crate::simd::kernels(Isa::Avx512).map(|k| k.int8().coding);
        for table in [Some(&PLAIN), fast].into_iter().flatten() {
            for n in [1, 15, 64, 200, 256] {
                let mut row = || rng.normals(n, 3.0).into_iter().map(|x| x as f32).collect::<Vec<f32>>();
                let (x, mean) = (row(), row());
                let largest = x.iter().zip(&mean).fold(0.0f32, |m, (x, y)| m.max((x - y).abs()));
                assert_eq!(table.size(&x, &mean), largest);
                // Halves of a step everywhere in the last but one, up to a rounding; scales without an inverse.
                let ties: Vec<f32> = (0..n).map(|i| mean[i] + 0.125 * (i as f32 + 0.5)).collect();
                let near = |x: &f32| f32::from_bits(x.to_bits() ^ 1);
                let nearly: Vec<f32> = ties.iter().map(near).collect();
                for (x, scale) in [(&ties, 0.125), (&nearly, 0.125), (&ties, 0.1), (&x, 1e-39), (&x, 2e38)] {
                    let mut codes = vec![1i8; n];
                    table.encode(x, &mean, scale, &mut codes);
                    let want = x.iter().zip(&mean).map(|(x, y)| quantise(x - y, scale, 127));
                    assert!(codes.iter().copied().eq(want), "{n} by {scale}");
                }
                for scale in [largest / 127.0, 0.0, largest / 500.0] {
                    let mut codes = vec![1i8; n];
                    table.encode(&x, &mean, scale, &mut codes);
                    let want = x.iter().zip(&mean).map(|(x, y)| quantise(x - y, scale, 127));
                    assert!(codes.iter().copied().eq(want), "{n} by {scale}");
                }
                let want: f64 = x.iter().zip(&mean).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
                assert!((table.dot(&x, &mean) - want).abs() < 1e-9);
            }
            let far = [f32::MAX, -1.0];
            assert_eq!(table.size(&far, &[f32::MIN, 0.0]), f32::MAX);
            let random = |rng: &mut Rng, n: usize| (0..n).map(|_| rng.range(0..256) as u8 as i8).collect::<Vec<i8>>();
            let codes = random(&mut rng, 64 * 128);
            let [mut a, mut b] = [0, 1].map(|_| vec![0.0f32; 7 * SLOTS * 2]);
            table.turn_columns(&codes, 128, 100, &mut a, 2 * SLOTS);
            PLAIN.turn_columns(&codes, 128, 100, &mut b, 2 * SLOTS);
            assert!(a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())));
            let rows: Vec<&[i8]> = codes.chunks_exact(128).take(11).collect();
            table.turn_rows(&rows, 2, &mut a);
            PLAIN.turn_rows(&rows, 2, &mut b);
            assert!(a[..2 * SLOTS].iter().map(|x| x.to_bits()).eq(b[..2 * SLOTS].iter().map(|x| x.to_bits())));
        }
    }
}
