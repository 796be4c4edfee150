//! Passes over blocks of scores `[key][lane]`: sums and products with cheaper operands, hyperbolic tangents, rows of
//! tensors turned into lanes, and bits that hide scores.
//!
//! Lanes are the outer loop, so that operands of lanes stay in registers from key to key.

use super::SimdElement;
use crate::simd::Simd;

/// Rows of lanes, `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Plane<P> {
    pub data: P,
    pub stride: usize,
}

/// The second operand of a sum or product.
#[derive(Clone, Copy)]
pub(crate) enum Term {
    /// One value per lane.
    Lanes(*const f32),
    /// One value per key.
    Keys(*const f32),
    /// `factor (base + slope i)` at key i, each of the three per lane; with true, the sum without its sign.
    Ramp([*const f32; 3], bool),
    Plane(Plane<*const f32>),
}

/// The operation on a score and a [`Term`].
#[derive(Clone, Copy)]
pub(crate) enum Pass {
    /// `scale a + sign b`
    Sum { scale: f32, sign: f32 },
    /// `(scale a) b`
    Product { scale: f32 },
}

/// A second operand for one kind of [`Term`]. Methods instead of closures: these are inlined into functions that enable
/// the instruction set.
trait Operand<S: Simd>: Copy {
    /// Values that stay in registers for a vector of lanes.
    type Held: Copy;
    unsafe fn hold(self, lane: usize, sign: S::V) -> Self::Held;
    unsafe fn at(self, held: Self::Held, key: usize, lane: usize, sign: S::V) -> S::V;
}

#[derive(Clone, Copy)]
struct Lanes(*const f32);
#[derive(Clone, Copy)]
struct Keys(*const f32);
#[derive(Clone, Copy)]
struct Ramp<const MAGNITUDE: bool>([*const f32; 3]);

impl<S: Simd> Operand<S> for Lanes {
    type Held = S::V;
    #[inline(always)]
    unsafe fn hold(self, lane: usize, sign: S::V) -> S::V {
        // SAFETY: a whole vector of lanes (caller); so for every block below.
        unsafe { S::mul(S::load(self.0.add(lane)), sign) }
    }
    #[inline(always)]
    unsafe fn at(self, held: S::V, _: usize, _: usize, _: S::V) -> S::V {
        held
    }
}

impl<S: Simd> Operand<S> for Keys {
    type Held = ();
    #[inline(always)]
    unsafe fn hold(self, _: usize, _: S::V) {}
    #[inline(always)]
    unsafe fn at(self, _: (), key: usize, _: usize, sign: S::V) -> S::V {
        // SAFETY: as above.
        unsafe { S::mul(S::splat(*self.0.add(key)), sign) }
    }
}

impl<S: Simd, const MAGNITUDE: bool> Operand<S> for Ramp<MAGNITUDE> {
    type Held = [S::V; 3];
    #[inline(always)]
    unsafe fn hold(self, lane: usize, sign: S::V) -> [S::V; 3] {
        // SAFETY: as above.
        unsafe {
            let [base, slope, factor] = self.0;
            [S::load(base.add(lane)), S::load(slope.add(lane)), S::mul(S::load(factor.add(lane)), sign)]
        }
    }
    #[inline(always)]
    unsafe fn at(self, [base, slope, factor]: [S::V; 3], key: usize, _: usize, _: S::V) -> S::V {
        // SAFETY: as above. Base and slope are integers below 2^24, so that the sum is exact.
        unsafe {
            let x = S::fma(slope, S::splat(key as f32), base);
            S::mul(if MAGNITUDE { S::max(x, S::sub(S::splat(0.0), x)) } else { x }, factor)
        }
    }
}

impl<S: Simd> Operand<S> for Plane<*const f32> {
    type Held = ();
    #[inline(always)]
    unsafe fn hold(self, _: usize, _: S::V) {}
    #[inline(always)]
    unsafe fn at(self, _: (), key: usize, lane: usize, sign: S::V) -> S::V {
        // SAFETY: as above.
        unsafe { S::mul(S::load(self.data.add(key * self.stride + lane)), sign) }
    }
}

/// Applies a pass to `[keys, lanes]` of `a`; `out` may be `a`.
///
/// # Safety
/// As for [`Simd`]; all operands have this number of keys and lanes, and the lanes are whole vectors.
#[inline(always)]
pub(crate) unsafe fn pass<S: Simd>(
    out: Plane<*mut f32>,
    a: Plane<*const f32>,
    size: [usize; 2],
    how: Pass,
    term: Term,
) {
    // SAFETY: passed on.
    unsafe {
        match term {
            Term::Lanes(b) => pass_with::<S, _>(out, a, size, how, Lanes(b)),
            Term::Keys(b) => pass_with::<S, _>(out, a, size, how, Keys(b)),
            Term::Ramp(b, false) => pass_with::<S, _>(out, a, size, how, Ramp::<false>(b)),
            Term::Ramp(b, true) => pass_with::<S, _>(out, a, size, how, Ramp::<true>(b)),
            Term::Plane(b) => pass_with::<S, _>(out, a, size, how, b),
        }
    }
}

#[inline(always)]
unsafe fn pass_with<S: Simd, B: Operand<S>>(
    out: Plane<*mut f32>,
    a: Plane<*const f32>,
    [keys, lanes]: [usize; 2],
    how: Pass,
    b: B,
) {
    // SAFETY: inside the extents (caller).
    unsafe {
        match how {
            Pass::Sum { scale, sign } => {
                let (scale, sign) = (S::splat(scale), S::splat(sign));
                for lane in (0..lanes).step_by(S::LANES) {
                    let held = b.hold(lane, sign);
                    for key in 0..keys {
                        let x = S::load(a.data.add(key * a.stride + lane));
                        let y = b.at(held, key, lane, sign);
                        S::store(out.data.add(key * out.stride + lane), S::fma(x, scale, y));
                    }
                }
            }
            Pass::Product { scale } => {
                let (scale, one) = (S::splat(scale), S::splat(1.0));
                for lane in (0..lanes).step_by(S::LANES) {
                    let held = b.hold(lane, one);
                    for key in 0..keys {
                        let x = S::load(a.data.add(key * a.stride + lane));
                        let y = b.at(held, key, lane, one);
                        S::store(out.data.add(key * out.stride + lane), S::mul(S::mul(x, scale), y));
                    }
                }
            }
        }
    }
}

/// A rational function for tanh, odd: x P(x^2) / Q(x^2), constant beyond `limit`.
struct Tangent<const P: usize, const Q: usize> {
    limit: f32,
    p: [f32; P],
    q: [f32; Q],
}

/// Error of 2e-6 at most, far below the rounding of a weight of 16 bits.
const SHORT: Tangent<4, 4> = Tangent {
    limit: 7.0,
    p: [0.999_995_7, 0.123_021_81, 0.002_276_987, 3.930_000_7e-6],
    q: [1.0, 0.456_340_3, 0.021_072_172, 0.000_142_350_6],
};
/// Error of a few units in the last place (coefficients of Eigen).
const LONG: Tangent<7, 4> = Tangent {
    limit: 7.905_311,
    p: [4.893_524_6e-3, 6.372_619_3e-4, 1.485_722_4e-5, 5.122_297e-8, -8.604_672e-11, 2.000_188e-13, -2.760_768_5e-16],
    q: [4.893_525e-3, 2.268_434_6e-3, 1.185_347e-4, 1.198_258_4e-6],
};

/// Computes `post tanh(pre a)`; `short` selects the function for results of 16 bits.
///
/// # Safety
/// As for [`pass`].
#[inline(always)]
pub(crate) unsafe fn capped<S: Simd>(
    out: Plane<*mut f32>,
    a: Plane<*const f32>,
    size: [usize; 2],
    factors: [f32; 2],
    short: bool,
) {
    // SAFETY: passed on.
    unsafe {
        if short {
            capped_with::<S, 4, 4>(out, a, size, factors, &SHORT)
        } else {
            capped_with::<S, 7, 4>(out, a, size, factors, &LONG)
        }
    }
}

#[inline(always)]
unsafe fn capped_with<S: Simd, const P: usize, const Q: usize>(
    out: Plane<*mut f32>,
    a: Plane<*const f32>,
    [keys, lanes]: [usize; 2],
    [pre, post]: [f32; 2],
    by: &Tangent<P, Q>,
) {
    // SAFETY: inside the extents (caller).
    unsafe {
        let (pre, post) = (S::splat(pre), S::splat(post));
        let (low, high) = (S::splat(-by.limit), S::splat(by.limit));
        for lane in (0..lanes).step_by(S::LANES) {
            for key in 0..keys {
                let x = S::mul(S::load(a.data.add(key * a.stride + lane)), pre);
                // NaN stays: both give their second operand.
                let x = S::min(high, S::max(low, x));
                let z = S::mul(x, x);
                let mut p = S::splat(by.p[P - 1]);
                for i in (0..P - 1).rev() {
                    p = S::fma(p, z, S::splat(by.p[i]));
                }
                let mut q = S::splat(by.q[Q - 1]);
                for i in (0..Q - 1).rev() {
                    q = S::fma(q, z, S::splat(by.q[i]));
                }
                let y = S::mul(S::mul(S::mul(x, p), post), S::reciprocal(q));
                S::store(out.data.add(key * out.stride + lane), y);
            }
        }
    }
}

/// Turns rows into lanes: `out[key][lane]` is element `key` of the row that begins at `starts[lane]`, or, with
/// `descending`, the element so far before it. With `prefetched`, a product has prefetched the rows. `scratch` has room for
/// `LANES` rows of `room` elements.
///
/// # Safety
/// As for [`Simd`]; every row has `keys` elements in `data`, and `out` has rows for `keys` rounded up to `LANES`.
#[inline(always)]
pub(crate) unsafe fn turned<S: Simd, T: SimdElement>(
    data: *const T,
    starts: &[usize],
    (descending, prefetched): (bool, bool),
    out: Plane<*mut f32>,
    keys: usize,
    (scratch, room): (&mut [f32], usize),
) {
    assert!(keys <= room && room.is_multiple_of(S::LANES) && scratch.len() >= S::LANES * room);
    let to = scratch.as_mut_ptr();
    // SAFETY: inside the extents (caller, and the check above).
    unsafe {
        for (z, starts) in starts.chunks_exact(S::LANES).enumerate() {
            for (lane, &start) in starts.iter().enumerate() {
                let row = to.add(lane * room);
                if !prefetched {
                    // The hardware prefetcher misses rows that are far apart: prefetch the block after the next.
                    let far = if descending { -2 } else { 2 } * room as isize;
                    let ahead = data.wrapping_add(start).wrapping_offset(far);
                    S::prefetch(ahead.cast());
                    S::prefetch(ahead.wrapping_add(room / 2).cast());
                }
                if descending {
                    copy::<S, T>(data.add(start + 1 - keys), row, keys);
                    std::slice::from_raw_parts_mut(row, keys).reverse();
                } else {
                    copy::<S, T>(data.add(start), row, keys);
                }
            }
            for key in (0..keys).step_by(S::LANES) {
                S::transpose(to.add(key), room, out.data.add(key * out.stride + z * S::LANES), out.stride);
            }
        }
    }
}

/// Converts `n` elements to f32.
///
/// # Safety
/// As for [`Simd`], with `n` elements on both sides.
#[inline(always)]
pub(crate) unsafe fn copy<S: Simd, T: SimdElement>(src: *const T, dst: *mut f32, n: usize) {
    // SAFETY: inside the extents (caller).
    unsafe {
        let whole = n - n % S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            S::store(dst.add(i), T::vector::<S>(src.add(i)));
        }
        for i in whole..n {
            *dst.add(i) = (*src.add(i)).one();
        }
    }
}

/// Writes -inf where a word has no bit: word i belongs to key i, bit `first + l` to lane l.
///
/// # Safety
/// As for [`Simd`]; as many rows as words, and `lanes` lanes in whole vectors.
#[inline(always)]
pub(crate) unsafe fn hide<S: Simd>(s: Plane<*mut f32>, words: &[u64], first: usize, lanes: usize) {
    // SAFETY: inside the extents (caller).
    unsafe {
        let hidden = S::splat(f32::NEG_INFINITY);
        for (key, &word) in words.iter().enumerate() {
            for lane in (0..lanes).step_by(S::LANES) {
                let at = s.data.add(key * s.stride + lane);
                let seen = S::mask((word >> (first + lane)) as u32);
                S::store(at, S::select(seen, S::load(at), hidden));
            }
        }
    }
}

/// The lanes of a row that are not 0, as bits.
///
/// # Safety
/// As for [`Simd`], with at most 64 lanes in whole vectors, each 0 or 1.
#[inline(always)]
pub(crate) unsafe fn bits<S: Simd>(row: &[u32]) -> u64 {
    // SAFETY: inside the slice.
    unsafe {
        let half = S::splat(0.5);
        let mut word = 0;
        let mut one = [0.0f32; 64];
        for (to, &x) in one.iter_mut().zip(row) {
            *to = x as f32;
        }
        for lane in (0..row.len()).step_by(S::LANES) {
            word |= u64::from(S::bits(S::lt(half, S::load(one.as_ptr().add(lane))))) << lane;
        }
        word
    }
}
