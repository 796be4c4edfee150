//! Element-wise work between products of the variants: gates, weights of chunks, small inverses, one token of the gated
//! delta rule, and weights corrected by a probe.

use crate::simd::{MAX_VECTORS, Simd};

/// Decays below this become zero: they would turn subnormal, and a product with a subnormal takes hundreds of cycles.
const GONE: f32 = 1e-30;

/// Rows and columns that [`Stage::Invert`] solves by substitution.
pub(crate) const INVERT: usize = 16;

/// An operation on rows of f32; `width` and every stride are multiples of the lanes.
pub(crate) enum Stage<'a> {
    /// `g[i][j]` = product of `decay[j + 1 ..= i]`, 0 above the diagonal: n x n for n decays.
    Decays { decay: &'a [f32], g: &'a mut [f32] },
    /// `out[i][j] = x[i][j] g[i][j] factor[j]`, n x n.
    Weigh { out: &'a mut [f32], x: &'a [f32], g: &'a [f32], factor: &'a [f32] },
    /// `out[i] = x[i] - factor[i] y[i]`, rows of `width`.
    Residual { out: &'a mut [f32], x: &'a [f32], y: &'a [f32], factor: &'a [f32], width: usize },
    /// `out[i] = factor[i] x[i]`, rows of `width`.
    ScaleRows { out: &'a mut [f32], x: &'a [f32], factor: &'a [f32], width: usize },
    /// `x *= factor`; tiny results become zero.
    Fade { x: &'a mut [f32], factor: f32 },
    /// `out[i] += x[i] . y[i]`, rows of `width`.
    RowDots { out: &'a mut [f32], x: &'a [f32], y: &'a [f32], width: usize },
    /// Divides rows of `width` by `sqrt(eps + their squares)`, as many rows as `inverse` holds; the factors are left
    /// there.
    Normalise { x: &'a mut [f32], inverse: &'a mut [f32], eps: f32, width: usize },
    /// The inverse of 1 + the strict lower triangle of `l`, a square of [`INVERT`] at the same place of both; rows
    /// are `stride` apart.
    Invert { l: &'a [f32], a: &'a mut [f32], stride: usize },
    /// `p = p (1 + mean) - pu`, lane by lane; tiles `[key][lane]`, for each vector of lanes a range.
    Reweigh { p: &'a mut [f32], pu: &'a [f32], mean: &'a [f32], ranges: [(usize, usize); MAX_VECTORS] },
    /// One token of the recurrence; see [`Token`].
    Token(Token<'a>),
}

/// S~ = decay S; S' = S~ + beta k (v - S~^T k)^T; o = scale S'^T q. S is `[key_dim][width]`.
pub(crate) struct Token<'a> {
    pub s: &'a mut [f32],
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub o: &'a mut [f32],
    pub decay: f32,
    pub beta: f32,
    pub scale: f32,
}

impl Stage<'_> {
    /// Whether every slice has the elements that the stage accesses, in whole vectors.
    pub(in crate::simd) fn fits(&self, lanes: usize) -> bool {
        let rows = |n: usize, width: usize, all: &[&[f32]]| {
            width.is_multiple_of(lanes) && all.iter().all(|x| x.len() >= n * width)
        };
        let tile = |stride: usize, ranges: &[(usize, usize)], all: &[&[f32]]| {
            let inside = |&(a, b): &(usize, usize)| a >= b || all.iter().all(|x| x.len() >= b * stride);
            stride.is_multiple_of(lanes) && stride / lanes <= MAX_VECTORS && ranges[..stride / lanes].iter().all(inside)
        };
        match self {
            Stage::Reweigh { p, pu, mean, ranges } => tile(mean.len(), ranges, &[&**p, pu]),
            Stage::Decays { decay, g } => rows(decay.len(), decay.len(), &[&**g]),
            Stage::Weigh { out, x, g, factor } => rows(factor.len(), factor.len(), &[&**out, x, g]),
            Stage::Residual { out, x, y, factor, width } => rows(factor.len(), *width, &[&**out, x, y]),
            Stage::ScaleRows { out, x, factor, width } => rows(factor.len(), *width, &[&**out, x]),
            Stage::Fade { x, .. } => x.len().is_multiple_of(lanes),
            Stage::RowDots { out, x, y, width } => rows(out.len(), *width, &[x, y]),
            Stage::Normalise { x, inverse, width, .. } => rows(inverse.len(), *width, &[&**x]),
            Stage::Invert { l, a, stride } => {
                let need = (INVERT - 1) * stride + INVERT;
                *stride >= INVERT && l.len() >= need && a.len() >= need && INVERT.is_multiple_of(lanes)
            }
            Stage::Token(t) => rows(t.k.len(), t.v.len(), &[&*t.s]) && t.q.len() >= t.k.len() && t.o.len() >= t.v.len(),
        }
    }
}

/// # Safety
/// As for [`Simd`]; the table has called [`Stage::fits`].
#[inline(always)]
pub(in crate::simd) unsafe fn stage<S: Simd>(stage: &mut Stage<'_>) {
    // SAFETY: passed on; `fits` covers every index below.
    unsafe {
        match stage {
            Stage::Decays { decay, g } => decays::<S>(decay, g.as_mut_ptr()),
            Stage::Weigh { out, x, g, factor } => {
                let n = factor.len();
                for i in 0..n {
                    for j in (0..n).step_by(S::LANES) {
                        let at = i * n + j;
                        let product = S::mul(S::load(x.as_ptr().add(at)), S::load(g.as_ptr().add(at)));
                        S::store(out.as_mut_ptr().add(at), S::mul(product, S::load(factor.as_ptr().add(j))));
                    }
                }
            }
            Stage::Residual { out, x, y, factor, width } => {
                for (i, &f) in factor.iter().enumerate() {
                    let f = S::splat(-f);
                    for at in (i * *width..(i + 1) * *width).step_by(S::LANES) {
                        let r = S::fma(f, S::load(y.as_ptr().add(at)), S::load(x.as_ptr().add(at)));
                        S::store(out.as_mut_ptr().add(at), r);
                    }
                }
            }
            Stage::ScaleRows { out, x, factor, width } => {
                for (i, &f) in factor.iter().enumerate() {
                    let f = S::splat(f);
                    for at in (i * *width..(i + 1) * *width).step_by(S::LANES) {
                        S::store(out.as_mut_ptr().add(at), S::mul(f, S::load(x.as_ptr().add(at))));
                    }
                }
            }
            Stage::Fade { x, factor } => {
                for at in (0..x.len()).step_by(S::LANES) {
                    let at = x.as_mut_ptr().add(at);
                    S::store(at, faded::<S>(S::load(at), S::splat(*factor)));
                }
            }
            Stage::RowDots { out, x, y, width } => {
                for (i, out) in out.iter_mut().enumerate() {
                    let mut sum = S::splat(0.0);
                    for at in (i * *width..(i + 1) * *width).step_by(S::LANES) {
                        sum = S::fma(S::load(x.as_ptr().add(at)), S::load(y.as_ptr().add(at)), sum);
                    }
                    let mut lanes = [0.0f32; 16];
                    S::store(lanes.as_mut_ptr(), sum);
                    *out += lanes[..S::LANES].iter().sum::<f32>();
                }
            }
            Stage::Normalise { x, inverse, eps, width } => {
                for (i, inverse) in inverse.iter_mut().enumerate() {
                    let (row, mut sums) = (x.as_mut_ptr().add(i * *width), [S::splat(0.0); 2]);
                    for (n, at) in (0..*width).step_by(S::LANES).enumerate() {
                        let x = S::load(row.add(at));
                        sums[n % 2] = S::fma(x, x, sums[n % 2]);
                    }
                    let mut lanes = [0.0f32; 16];
                    S::store(lanes.as_mut_ptr(), S::add(sums[0], sums[1]));
                    *inverse = 1.0 / (lanes[..S::LANES].iter().sum::<f32>() + *eps).sqrt();
                    for at in (0..*width).step_by(S::LANES) {
                        S::store(row.add(at), S::mul(S::load(row.add(at)), S::splat(*inverse)));
                    }
                }
            }
            Stage::Invert { l, a, stride } => invert::<S>(l.as_ptr(), a.as_mut_ptr(), *stride),
            Stage::Reweigh { p, pu, mean, ranges } => {
                let stride = mean.len();
                for lane in (0..stride).step_by(S::LANES) {
                    let (start, end) = ranges[lane / S::LANES];
                    let one = S::add(S::splat(1.0), S::load(mean.as_ptr().add(lane)));
                    for key in start..end {
                        let at = p.as_mut_ptr().add(key * stride + lane);
                        let product = S::load(pu.as_ptr().add(key * stride + lane));
                        // Subtracting from -0 only changes the sign, which a fused operation does for free.
                        S::store(at, S::fma(S::load(at), one, S::sub(S::splat(-0.0), product)));
                    }
                }
            }
            Stage::Token(t) => token::<S>(t),
        }
    }
}

/// x times a factor; tiny results become zero.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
unsafe fn faded<S: Simd>(x: S::V, factor: S::V) -> S::V {
    // SAFETY: passed on.
    unsafe {
        let (y, zero) = (S::mul(x, factor), S::splat(0.0));
        let tiny = S::lt(S::max(y, S::sub(zero, y)), S::splat(GONE));
        S::select(tiny, zero, y)
    }
}

/// A vector with 1 in one lane. It is written with its row, because a later load of a row with two stores waits for
/// both.
///
/// # Safety
/// As for [`Simd`]; `lane` < LANES.
#[inline(always)]
unsafe fn one_at<S: Simd>(lane: usize) -> S::V {
    const ONE: [f32; 32] = {
        let mut all = [0.0; 32];
        all[16] = 1.0;
        all
    };
    // SAFETY: lanes of a vector are at most 16.
    unsafe { S::load(ONE.as_ptr().add(16 - lane)) }
}

#[inline(always)]
unsafe fn decays<S: Simd>(decay: &[f32], g: *mut f32) {
    let n = decay.len();
    // SAFETY: n x n elements at `g`.
    unsafe {
        for j in (0..n).step_by(S::LANES) {
            let mut row = S::splat(0.0);
            (0..j).for_each(|i| S::store(g.add(i * n + j), row));
            for (i, &d) in decay.iter().enumerate().skip(j) {
                row = S::mul(row, S::splat(d));
                row = S::select(S::lt(row, S::splat(GONE)), S::splat(0.0), row);
                if i < j + S::LANES {
                    row = S::add(row, one_at::<S>(i - j));
                }
                S::store(g.add(i * n + j), row);
            }
        }
    }
}

/// Row i of the inverse is e_i minus the rows before it, weighted by row i of L.
#[inline(always)]
unsafe fn invert<S: Simd>(l: *const f32, a: *mut f32, stride: usize) {
    // SAFETY: INVERT rows of INVERT elements, `stride` apart, on both sides.
    unsafe {
        for c in (0..INVERT).step_by(S::LANES) {
            let mut rows = [S::splat(0.0); INVERT];
            for i in 0..INVERT {
                let own = if (c..c + S::LANES).contains(&i) { one_at::<S>(i - c) } else { S::splat(0.0) };
                let mut sums = [own, S::splat(0.0)];
                for j in 0..i {
                    sums[j % 2] = S::fma(S::splat(-*l.add(i * stride + j)), rows[j], sums[j % 2]);
                }
                rows[i] = S::add(sums[0], sums[1]);
                S::store(a.add(i * stride + c), rows[i]);
            }
        }
    }
}

#[inline(always)]
unsafe fn token<S: Simd>(t: &mut Token<'_>) {
    let width = t.v.len();
    let mut c = 0;
    while c < width {
        // Four vectors of columns of S stay in the L1 cache between the two passes.
        let vectors = ((width - c) / S::LANES).min(4);
        // SAFETY: columns c .. c + vectors lanes are inside the rows.
        unsafe {
            match vectors {
                4 => columns::<S, 4>(t, c, width),
                3 => columns::<S, 3>(t, c, width),
                2 => columns::<S, 2>(t, c, width),
                _ => columns::<S, 1>(t, c, width),
            }
        }
        c += vectors * S::LANES;
    }
}

#[inline(always)]
unsafe fn columns<S: Simd, const V: usize>(t: &mut Token<'_>, c: usize, width: usize) {
    // SAFETY: `t.k.len()` rows of `width` at `t.s`, and V vectors from column c on are inside.
    unsafe {
        let s = t.s.as_mut_ptr().add(c);
        let mut seen = [S::splat(0.0); V];
        for (i, &k) in t.k.iter().enumerate() {
            let k = S::splat(k);
            for (z, seen) in seen.iter_mut().enumerate() {
                *seen = S::fma(S::load(s.add(i * width + z * S::LANES)), k, *seen);
            }
        }
        let (decay, beta) = (S::splat(t.decay), S::splat(t.beta));
        let mut step = [S::splat(0.0); V];
        for z in 0..V {
            let v = S::load(t.v.as_ptr().add(c + z * S::LANES));
            step[z] = S::mul(beta, S::sub(v, S::mul(decay, seen[z])));
        }
        let mut o = [S::splat(0.0); V];
        for (i, &k) in t.k.iter().enumerate() {
            let (k, q) = (S::splat(k), S::splat(t.q[i]));
            for z in 0..V {
                let at = s.add(i * width + z * S::LANES);
                let next = S::fma(k, step[z], S::mul(decay, S::load(at)));
                S::store(at, next);
                o[z] = S::fma(next, q, o[z]);
            }
        }
        for (z, &o) in o.iter().enumerate() {
            S::store(t.o.as_mut_ptr().add(c + z * S::LANES), S::mul(o, S::splat(t.scale)));
        }
    }
}
