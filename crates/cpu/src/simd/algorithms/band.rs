//! Attention over few keys for a vector of rows: a window that moves with the rows, and keys at the start.
//!
//! All scores of the rows are held at once, so there is one maximum and nothing is rescaled. Scores are `[key][row]`;
//! the output is computed row by row in its storage order, each few rows over only the keys that they see.

use super::exponential::{EXP2_NATIVE, ExpKind, Exponential, LEAST, Mixed, Poly, Sas, SasOnline, with_exp};
use super::product::Ahead;
use crate::simd::Simd;
use fulgurite_core::exp::EXP2_POLY;

/// Keys that are packed together, element by element: `[d][PANEL]`. A product broadcasts them from one line.
pub(crate) const PANEL: usize = 16;

/// Vectors of rows that process keys together: each broadcast of a key serves both.
pub(crate) const BAND: usize = 2;
/// Rows of the widest vectors.
pub(crate) const BAND_ROWS: usize = BAND * 16;

/// Elements of a key between two prefetches of rows.
const ASK: usize = 32;

/// The keys that each row sees in one run of keys, relative to its first: small integers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub lo: [f32; BAND_ROWS],
    pub hi: [f32; BAND_ROWS],
    /// For each vector of rows: keys that some row sees, in whole panels, and keys that every row sees.
    pub some: [(usize, usize); BAND],
    pub all: [(usize, usize); BAND],
}

/// Arguments for P of a few vectors of rows.
pub(crate) struct BandWeights<'a> {
    /// Q^T, `[d][row]`.
    pub q: &'a [f32],
    /// Key dimension, a multiple of four.
    pub d: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Keys at the start, then those of the window, in panels.
    pub panels: [&'a [f32]; 2],
    pub seen: &'a [Seen; 2],
    /// P, `[key][row]`, of all keys of all panels.
    pub p: &'a mut [f32],
    /// Maximum and sum of each row.
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
    pub exp: ExpKind,
    pub ahead: &'a mut Ahead,
}

/// Arguments for O of a few vectors of rows, from their P.
pub(crate) struct BandOutput<'a> {
    pub p: &'a [f32],
    /// For either run of keys: its offset in P, its values and their row distance.
    pub runs: [(usize, &'a [f32], usize); 2],
    pub seen: &'a [Seen; 2],
    /// Factor of each row.
    pub factors: &'a [f32],
    /// O, `[row][width]`.
    pub o: &'a mut [f32],
    pub rows: usize,
    pub width: usize,
    pub ahead: &'a mut Ahead,
}

impl Seen {
    /// The first key that some of these rows see, and one past the last.
    #[inline(always)]
    pub fn hull(&self, rows: std::ops::Range<usize>) -> (usize, usize) {
        let (mut first, mut last) = (f32::MAX, 0.0f32);
        for (&lo, &hi) in self.lo[rows.clone()].iter().zip(&self.hi[rows]) {
            // A row that sees nothing contributes nothing.
            let some = lo < hi;
            first = if some { first.min(lo) } else { first };
            last = if some { last.max(hi) } else { last };
        }
        (first.min(last) as usize, last as usize)
    }
}

/// # Safety
/// As for [`Simd`]; the extents of `args` are checked by the table.
#[inline(always)]
pub(in crate::simd) unsafe fn band_weights<S: Simd>(args: &mut BandWeights<'_>) {
    let (hidden, width) = (f32::NEG_INFINITY, BAND * S::LANES);
    let mut bases = [0; 2];
    bases[1] = args.panels[0].len() / args.d;
    // SAFETY: the table checked that P has room for all panels, and that lane arrays have a vector.
    unsafe {
        for ((panels, seen), base) in args.panels.into_iter().zip(args.seen).zip(bases) {
            let p = args.p.as_mut_ptr().add(base * width);
            for (i, panel) in panels.chunks_exact(args.d * PANEL).enumerate() {
                let (first, k) = (i * PANEL, panel.as_ptr());
                let to = p.add(first * width);
                let sees = |z: usize| seen.some[z].0 <= first && first < seen.some[z].1;
                if sees(0) && sees(1) {
                    let (q, d) = (args.q.as_ptr(), args.d);
                    // Use as many sums as registers allow.
                    if S::LANES == 8 {
                        for part in (0..PANEL).step_by(4) {
                            scores::<S, 4, 2>(to.add(part * width), k.add(part), q, d, args.ahead);
                        }
                    } else {
                        for part in (0..PANEL).step_by(8) {
                            scores::<S, 8, 2>(to.add(part * width), k.add(part), q, d, args.ahead);
                        }
                    }
                } else {
                    for z in 0..BAND {
                        let (to, q) = (to.add(z * S::LANES), args.q.as_ptr().add(z * S::LANES));
                        if !sees(z) {
                            // A few rows of both vectors are multiplied together.
                            (0..PANEL).for_each(|key| S::store(to.add(key * width), S::splat(0.0)));
                            continue;
                        }
                        if S::LANES == 8 {
                            for part in (0..PANEL).step_by(8) {
                                scores::<S, 8, 1>(to.add(part * width), k.add(part), q, args.d, args.ahead);
                            }
                        } else {
                            scores::<S, PANEL, 1>(to, k, q, args.d, args.ahead);
                        }
                    }
                }
            }
            for z in 0..BAND {
                let lane = z * S::LANES;
                let (lo, hi) = (S::load(seen.lo.as_ptr().add(lane)), S::load(seen.hi.as_ptr().add(lane)));
                let ((start, end), (first, last)) = (seen.some[z], seen.all[z]);
                let (first, last) = (first.clamp(start, end), last.clamp(start, end));
                for key in (start..first).chain(last.max(first)..end) {
                    let at = p.add(key * width + lane);
                    // lo <= j as lo < j + 1: both are small integers
                    let own = S::and(S::lt(lo, S::splat(key as f32 + 1.0)), S::lt(S::splat(key as f32), hi));
                    S::store(at, S::select(own, S::load(at), S::splat(hidden)));
                }
            }
        }
        for z in 0..BAND {
            let runs: [(usize, usize); 2] = std::array::from_fn(|i| {
                let (start, end) = args.seen[i].some[z];
                (bases[i] + start, bases[i] + end)
            });
            with_exp!(args.exp, LEAST, exp => settle::<S, _>(args, z, runs, &exp))
        }
    }
}

/// Four steps of `sums += k q`, with elements of k broadcast: four at once, to reduce loop overhead.
///
/// # Safety
/// As for [`band_weights`].
#[inline(always)]
unsafe fn four<S: Simd, const MR: usize, const NV: usize>(
    sums: &mut [[S::V; NV]; MR],
    k: &mut *const f32,
    q: &mut *const f32,
) {
    // SAFETY: passed on.
    unsafe {
        for _ in 0..4 {
            let mut rows = [S::splat(0.0); NV];
            for (z, row) in rows.iter_mut().enumerate() {
                *row = S::load(q.add(z * S::LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let x = S::splat(*k.add(i));
                for z in 0..NV {
                    sums[z] = S::fma(x, rows[z], sums[z]);
                }
            }
            *k = k.add(PANEL);
            *q = q.add(BAND * S::LANES);
        }
    }
}

/// Scores of MR keys of a panel and NV vectors of rows. Rows that will be needed are prefetched a few lines at a time:
/// a core can wait for ten or twelve, and a burst would stall it.
///
/// # Safety
/// As for [`band_weights`].
#[inline(always)]
unsafe fn scores<S: Simd, const MR: usize, const NV: usize>(
    to: *mut f32,
    k: *const f32,
    q: *const f32,
    d: usize,
    ahead: &mut Ahead,
) {
    let width = BAND * S::LANES;
    // SAFETY: as for `band_weights`.
    unsafe {
        let mut sums = [[S::splat(0.0); NV]; MR];
        let (mut k, mut q) = (k, q);
        for first in (0..d).step_by(ASK) {
            ahead.prefetch::<S>();
            for _ in 0..(d.min(first + ASK) - first) / 4 {
                four::<S, MR, NV>(&mut sums, &mut k, &mut q);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (z, &sum) in sums.iter().enumerate() {
                S::store(to.add(i * width + z * S::LANES), sum);
            }
        }
    }
}

/// Maximum, exponentials and sum of a vector of rows over two runs of keys, both multiples of a panel.
#[inline(always)]
unsafe fn settle<S: Simd, E: Exponential<S>>(args: &mut BandWeights<'_>, z: usize, runs: [(usize, usize); 2], exp: &E) {
    let (width, lane) = (BAND * S::LANES, z * S::LANES);
    // SAFETY: as for `band_weights`.
    unsafe {
        let (p, hidden) = (args.p.as_mut_ptr().add(lane), S::splat(f32::NEG_INFINITY));
        // Independent chains hide the latency of the maximum. NaN does not raise it.
        let mut highest = [hidden; 8];
        for (start, end) in runs {
            for key in (start..end).step_by(8) {
                for (i, high) in highest.iter_mut().enumerate() {
                    *high = S::max(S::load(p.add((key + i) * width)), *high);
                }
            }
        }
        let m = highest.into_iter().fold(hidden, |m, high| S::max(high, m));
        let origin = args.exp.origin::<S>(m, args.scale);
        S::store(args.m.as_mut_ptr().add(lane), S::mul(origin, S::splat(args.exp.unit(args.scale))));
        // Rows with m = -inf saw nothing: subtract 0 there, not inf - inf.
        let shift = S::select(S::lt(hidden, origin), origin, S::splat(0.0));
        let factor = S::splat(exp.factor(args.scale));
        let mut sums = [S::splat(0.0); 4];
        for (start, end) in runs {
            for key in (start..end).step_by(4) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let at = p.add((key + i) * width);
                    let x = exp.weight(S::load(at), shift, factor, key + i);
                    S::store(at, x);
                    *sum = S::add(*sum, x);
                }
            }
        }
        let sum = S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
        S::store(args.l.as_mut_ptr().add(lane), sum);
    }
}

/// NV vectors of columns starting at `column`, for all rows: MR at a time, then 4, 2 and 1.
///
/// # Safety
/// As for [`Simd`]; the extents of `args` are checked by the table.
#[inline(always)]
pub(in crate::simd) unsafe fn band_output<S: Simd, const MR: usize, const NV: usize>(
    args: &mut BandOutput<'_>,
    column: usize,
) {
    // A remainder of 2 after sixes is better taken as 4 + 4: both keep the multipliers busy.
    let last = if MR == 6 && args.rows % MR == 2 && args.rows > MR { args.rows - MR } else { args.rows };
    let mut row = 0;
    // SAFETY: rows up to `rows` and NV vectors of columns are inside.
    unsafe {
        while row + MR <= last {
            args.ahead.prefetch::<S>();
            output_rows::<S, MR, NV>(args, row, column);
            row += MR;
        }
        while row + 4 <= args.rows {
            output_rows::<S, 4, NV>(args, row, column);
            row += 4;
        }
        while row + 2 <= args.rows {
            output_rows::<S, 2, NV>(args, row, column);
            row += 2;
        }
        if row < args.rows {
            output_rows::<S, 1, NV>(args, row, column);
        }
    }
}

#[inline(always)]
unsafe fn output_rows<S: Simd, const MR: usize, const NV: usize>(args: &mut BandOutput<'_>, row: usize, column: usize) {
    // SAFETY: as for `band_output`; the table checked that both runs hold the keys that are seen.
    unsafe {
        let mut sums = [[S::splat(0.0); NV]; MR];
        for (&(first, v, stride), seen) in args.runs.iter().zip(args.seen) {
            let (start, end) = seen.hull(row..row + MR);
            let mut p = args.p.as_ptr().add((first + start) * BAND * S::LANES + row);
            let mut v = v.as_ptr().add(start * stride + column);
            for _ in start..end {
                let mut columns = [S::splat(0.0); NV];
                for (z, column) in columns.iter_mut().enumerate() {
                    *column = S::load(v.add(z * S::LANES));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let weight = S::splat(*p.add(i));
                    for z in 0..NV {
                        sums[z] = S::fma(weight, columns[z], sums[z]);
                    }
                }
                p = p.add(BAND * S::LANES);
                v = v.add(stride);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let factor = S::splat(*args.factors.as_ptr().add(row + i));
            for (z, &sum) in sums.iter().enumerate() {
                S::store(args.o.as_mut_ptr().add((row + i) * args.width + column + z * S::LANES), S::mul(sum, factor));
            }
        }
    }
}
