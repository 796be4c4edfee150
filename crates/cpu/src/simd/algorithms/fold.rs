//! Folds of a tile of scores other than softmax: the best key of each lane, its nearest key of another group, and the
//! keys above a bar.
//!
//! A tile is `[key][lane]`, with the instruction set's tile width. The worth of a key to a lane is `s + bias[key]`;
//! more is better, and the first of equals wins. NaN is never better.

use crate::simd::Simd;

/// Largest number of adjacent vectors that a fold keeps in registers.
const SIDE: usize = 4;

/// Running best of each lane over one block of keys.
pub(crate) struct BestArgs<'a> {
    pub s: &'a [f32],
    pub bias: &'a [f32],
    pub best: &'a mut [f32],
    /// The second best value; equal to the best if two keys have the same worth.
    pub second: &'a mut [f32],
    /// The key's index in this block if this block raised the best, else -1.
    pub place: &'a mut [f32],
}

/// # Safety
/// As for [`Simd`]; `s` holds `bias.len()` rows of a whole tile, the lane arrays a tile's lanes.
#[inline(always)]
pub(in crate::simd) unsafe fn best<S: Simd>(args: &mut BestArgs<'_>) {
    let stride = S::LANES * S::VECTORS;
    for z in (0..S::VECTORS).step_by(SIDE) {
        let side = (S::VECTORS - z).min(SIDE);
        // SAFETY: the table checked the extents.
        unsafe {
            let at = |i: usize| (z + i) * S::LANES;
            let (mut best, mut second) = ([S::splat(0.0); SIDE], [S::splat(0.0); SIDE]);
            let mut place = [S::splat(-1.0); SIDE];
            for i in 0..side {
                best[i] = S::load(args.best.as_ptr().add(at(i)));
                second[i] = S::load(args.second.as_ptr().add(at(i)));
            }
            for (key, &bias) in args.bias.iter().enumerate() {
                let (bias, number) = (S::splat(bias), S::splat(key as f32));
                for i in 0..side {
                    let v = S::add(S::load(args.s.as_ptr().add(key * stride + at(i))), bias);
                    let better = S::lt(best[i], v);
                    // The loser of the two competes with the second best.
                    let loser = S::select(better, best[i], v);
                    second[i] = S::max(loser, second[i]);
                    best[i] = S::select(better, v, best[i]);
                    place[i] = S::select(better, number, place[i]);
                }
            }
            for i in 0..side {
                S::store(args.best.as_mut_ptr().add(at(i)), best[i]);
                S::store(args.second.as_mut_ptr().add(at(i)), second[i]);
                S::store(args.place.as_mut_ptr().add(at(i)), place[i]);
            }
        }
    }
}

/// Arguments for the running best of each lane among keys of other groups. No key is worth more than its cap:
/// `min(s + bias[key], half_norm[lane] - cap[key])`.
pub(crate) struct OtherArgs<'a> {
    pub s: &'a [f32],
    pub bias: &'a [f32],
    pub cap: &'a [f32],
    /// Groups of keys and lanes, as integers below 2^24.
    pub key_group: &'a [f32],
    pub lane_group: &'a [f32],
    pub half_norm: &'a [f32],
    pub best: &'a mut [f32],
    pub place: &'a mut [f32],
}

/// # Safety
/// As for [`best`].
#[inline(always)]
pub(in crate::simd) unsafe fn other<S: Simd>(args: &mut OtherArgs<'_>) {
    let stride = S::LANES * S::VECTORS;
    for z in 0..S::VECTORS {
        let at = z * S::LANES;
        // SAFETY: the table checked the extents.
        unsafe {
            let mut best = S::load(args.best.as_ptr().add(at));
            let mut place = S::splat(-1.0);
            let half = S::load(args.half_norm.as_ptr().add(at));
            let group = S::load(args.lane_group.as_ptr().add(at));
            let zero = S::splat(0.0);
            for key in 0..args.bias.len() {
                let v = S::add(S::load(args.s.as_ptr().add(key * stride + at)), S::splat(args.bias[key]));
                let cap = S::sub(half, S::splat(args.cap[key]));
                let v = S::select(S::lt(cap, v), cap, v);
                let away = S::sub(group, S::splat(args.key_group[key]));
                // Another group: the squared difference of two different integers is at least 1.
                let better = S::and(S::lt(best, v), S::lt(zero, S::mul(away, away)));
                best = S::select(better, v, best);
                place = S::select(better, S::splat(key as f32), place);
            }
            S::store(args.best.as_mut_ptr().add(at), best);
            S::store(args.place.as_mut_ptr().add(at), place);
        }
    }
}

/// Arguments for the keys that reach a lane's bar.
pub(crate) struct AboveArgs<'a> {
    pub s: &'a [f32],
    pub bias: &'a [f32],
    pub bar: &'a [f32],
    /// Lane, key's index in this block, value; by ascending keys within each vector of lanes.
    pub found: &'a mut Vec<(u32, u32, f32)>,
}

/// # Safety
/// As for [`best`].
#[inline(always)]
pub(in crate::simd) unsafe fn above<S: Simd>(args: &mut AboveArgs<'_>) {
    let stride = S::LANES * S::VECTORS;
    for (key, &bias) in args.bias.iter().enumerate() {
        for z in 0..S::VECTORS {
            let at = z * S::LANES;
            // SAFETY: the table checked the extents.
            let some = unsafe {
                let v = S::add(S::load(args.s.as_ptr().add(key * stride + at)), S::splat(bias));
                // Nothing happens below the bar; the test "not below" would include NaN.
                S::count(S::lt(v, S::load(args.bar.as_ptr().add(at)))) as usize != S::LANES
            };
            if some {
                for lane in at..at + S::LANES {
                    let v = args.s[key * stride + lane] + bias;
                    if v >= args.bar[lane] {
                        args.found.push((lane as u32, key as u32, v));
                    }
                }
            }
        }
    }
}

/// Moves `x` (`[row][lane]`, rows of a whole tile) into a frame: `(x - shift[row]) * scale`. Squared norms of the lanes
/// go to `norms`.
///
/// # Safety
/// As for [`best`], with `shift.len()` rows at `x`.
#[inline(always)]
pub(in crate::simd) unsafe fn frame<S: Simd>(x: *mut f32, shift: &[f32], scale: f32, norms: *mut f32) {
    let stride = S::LANES * S::VECTORS;
    for z in 0..S::VECTORS {
        // SAFETY: the table checked the extents.
        unsafe {
            let (mut norm, scale) = (S::splat(0.0), S::splat(scale));
            for (row, &shift) in shift.iter().enumerate() {
                let at = x.add(row * stride + z * S::LANES);
                let v = S::mul(S::sub(S::load(at), S::splat(shift)), scale);
                norm = S::fma(v, v, norm);
                S::store(at, v);
            }
            S::store(norms.add(z * S::LANES), norm);
        }
    }
}

/// `sums[i] += x[i]` in f64: plain code, compiled for the instruction set.
#[inline(always)]
pub(in crate::simd) fn add_wide(x: &[f32], sums: &mut [f64]) {
    for (sum, &x) in sums.iter_mut().zip(x) {
        *sum += f64::from(x);
    }
}

/// Squared distance in f64, in eight partial sums whose order never changes.
#[inline(always)]
pub(in crate::simd) fn distance(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0f64; 8];
    let whole = a.len() / 8 * 8;
    for (a, b) in a[..whole].chunks_exact(8).zip(b[..whole].chunks_exact(8)) {
        for i in 0..8 {
            let d = f64::from(a[i]) - f64::from(b[i]);
            sums[i] += d * d;
        }
    }
    for (i, (&a, &b)) in a[whole..].iter().zip(&b[whole..]).enumerate() {
        let d = f64::from(a) - f64::from(b);
        sums[i] += d * d;
    }
    ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
}

/// Dot product in f64, summed as [`distance`] is.
#[inline(always)]
pub(in crate::simd) fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0f64; 8];
    let whole = a.len() / 8 * 8;
    for (a, b) in a[..whole].chunks_exact(8).zip(b[..whole].chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    for (i, (&a, &b)) in a[whole..].iter().zip(&b[whole..]).enumerate() {
        sums[i] += f64::from(a) * f64::from(b);
    }
    ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
}
