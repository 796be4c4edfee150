//! Few queries against many keys, read in place: vectors run along the head dimension.

use super::elements::SimdElement;
use crate::simd::Simd;
use crate::simd::prefetch::{LINE, Prefetch};

/// Elements that [`dots`] and [`combine`] read in pair order: whole groups of four vectors.
pub(in crate::simd) const fn paired(d: usize, lanes: usize) -> usize {
    d / (4 * lanes) * (4 * lanes)
}

/// Outputs and factors of a few rows: one set, or two sets that share the same keys.
#[derive(Clone, Copy)]
pub(in crate::simd) struct RowSets {
    pub out: [*mut f32; 2],
    pub by: [*const f32; 2],
    pub both: bool,
}

impl RowSets {
    pub fn new(rows: &mut [(&mut [f32], &[f32])]) -> Self {
        assert!((1..=2).contains(&rows.len()), "one set of rows, or two");
        let last = rows.len() - 1;
        let (out, by) = ([0, last].map(|i| rows[i].0.as_mut_ptr()), [0, last].map(|i| rows[i].1.as_ptr()));
        RowSets { out, by, both: last > 0 }
    }
}

/// Scores of R rows against K keys, read in place: `s[r][j * stride] = q[r] . k[j]`. Vectors run along the head
/// dimension, with q in pair order; R * K is the number of lanes, or K is 1.
///
/// # Safety
/// As for [`Simd`]: K rows of `d` elements, `row` apart, at `k`; `d` elements at each of `q`.
#[inline(always)]
pub(in crate::simd) unsafe fn dots<S: Simd, T: SimdElement, const R: usize, const K: usize>(
    s: [*mut f32; R],
    stride: usize,
    q: [*const f32; R],
    k: *const T,
    row: usize,
    d: usize,
    prefetch: &mut Prefetch,
) {
    // SAFETY: inside the extents.
    unsafe {
        let mut sums = [[S::splat(0.0); R]; K];
        let mut i = 0;
        while i < paired(d, S::LANES) {
            let mut rows = [(S::splat(0.0), S::splat(0.0)); R];
            for (r, x) in rows.iter_mut().enumerate() {
                let at = q[r].add(i);
                *x = (S::load(at), S::load(at.add(S::LANES)));
            }
            // Prefetch as many lines as are read.
            prefetch.issue::<S>((K * 2 * S::LANES * size_of::<T>()).div_ceil(LINE));
            for (j, sum) in sums.iter_mut().enumerate() {
                let (a, b) = T::pair::<S>(k.add(j * row + i));
                for r in 0..R {
                    sum[r] = S::fma(b, rows[r].1, S::fma(a, rows[r].0, sum[r]));
                }
            }
            i += 2 * S::LANES;
        }
        while i + S::LANES <= d {
            for (j, sum) in sums.iter_mut().enumerate() {
                let key = T::vector::<S>(k.add(j * row + i));
                for (r, sum) in sum.iter_mut().enumerate() {
                    *sum = S::fma(key, S::load(q[r].add(i)), *sum);
                }
            }
            i += S::LANES;
        }
        let mut totals = [0.0f32; 16];
        if R * K == S::LANES {
            S::store(totals.as_mut_ptr(), S::sums(sums.as_flattened()));
        } else {
            let mut lanes = [0.0f32; 16];
            for (total, &vector) in totals.iter_mut().zip(sums.as_flattened()) {
                S::store(lanes.as_mut_ptr(), vector);
                *total = lanes[..S::LANES].iter().sum();
            }
        }
        for j in 0..K {
            for r in 0..R {
                let mut score = totals[j * R + r];
                for x in i..d {
                    score += *q[r].add(x) * (*k.add(j * row + x)).one();
                }
                *s[r].add(j * stride) = score;
            }
        }
    }
}

/// `o[r][..] += sum_j p[r][j * stride] v[j][..]` for R rows and V vectors of columns: one, or an even number
/// in pair order.
///
/// # Safety
/// As for [`Simd`]: `keys` rows of at least `V * LANES` elements, `row` apart, at `v`.
#[inline(always)]
pub(in crate::simd) unsafe fn combine<S: Simd, T: SimdElement, const R: usize, const V: usize>(
    o: [*mut f32; R],
    p: [*const f32; R],
    stride: usize,
    v: *const T,
    row: usize,
    keys: usize,
    prefetch: &mut Prefetch,
) {
    // SAFETY: inside the extents.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; R];
        for (r, sum) in sums.iter_mut().enumerate() {
            for (z, x) in sum.iter_mut().enumerate() {
                *x = S::load(o[r].add(z * S::LANES));
            }
        }
        for j in 0..keys {
            let mut values = [S::splat(0.0); V];
            if V == 1 {
                values[0] = T::vector::<S>(v.add(j * row));
            } else {
                prefetch.issue::<S>((V * S::LANES * size_of::<T>()).div_ceil(LINE));
                for z in 0..V / 2 {
                    (values[2 * z], values[2 * z + 1]) = T::pair::<S>(v.add(j * row + 2 * z * S::LANES));
                }
            }
            for (r, sum) in sums.iter_mut().enumerate() {
                let weight = S::splat(*p[r].add(j * stride));
                for z in 0..V {
                    sum[z] = S::fma(weight, values[z], sum[z]);
                }
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            for (z, &x) in sum.iter().enumerate() {
                S::store(o[r].add(z * S::LANES), x);
            }
        }
    }
}
