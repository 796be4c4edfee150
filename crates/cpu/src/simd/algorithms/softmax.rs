//! The work on a tile of scores between two products: the online softmax, and its backward.

use super::exponential::{EXP2_NATIVE, ExpKind, Exponential, Mixed, Poly, Sas, with_exp};
use crate::simd::{MAX_VECTORS, Simd};
use fulgurite_core::exp::EXP2_POLY;

/// How a softmax step treats the running maximum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Policy {
    /// Raise it if a score exceeds it by more than this many powers of two, and rescale.
    Raise(f32),
    /// Use it unchanged if it is finite, and report if the sum exceeds the limit.
    Trust(f32),
    /// Raise it and compute nothing else.
    MaxOnly,
    /// Use it unchanged: it is final.
    Final,
}

/// One step of the online softmax over a tile of scores `[keys][lanes]`.
pub(crate) struct SoftmaxArgs<'a> {
    /// Scores in, probabilities out.
    pub s: &'a mut [f32],
    /// Lanes of the tile: distance between keys.
    pub stride: usize,
    /// For each vector of lanes, the keys that it sees; other scores are not touched.
    pub ranges: [(usize, usize); MAX_VECTORS],
    /// For each vector of lanes, the keys that every lane sees.
    pub inner: [(usize, usize); MAX_VECTORS],
    /// First key of each lane, and one past the last, if its vector's `inner` is smaller than its range.
    pub lo: &'a [f32],
    pub hi: &'a [f32],
    /// Running maximum and sum of each lane, and the factor of earlier sums.
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
    pub alpha: &'a mut [f32],
    pub exp: ExpKind,
    pub policy: Policy,
    /// The factor that converts a score, and the maximum, to natural units.
    pub scale: f32,
}

/// Probes that go with the weights of a softmax.
pub(crate) struct LaneProbe<'a> {
    /// U of the tile, `[key][lane]`. A softmax that does not pack its weights leaves P U there, which is 0 where P is
    /// 0.
    pub u: &'a mut [f32],
    /// Output for packed U, in the layout of the weights, if the softmax packs its weights; 0 where the weight is 0.
    pub packed: &'a mut [f32],
    /// Sums of P U of each lane, which are first multiplied by alpha.
    pub sums: &'a mut [f32],
}

/// Counters of a softmax step, in lanes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SoftmaxStats {
    /// Lanes whose maximum could have been raised after their first key.
    pub possible: u32,
    /// Lanes that were rescaled.
    pub rescaled: u32,
    /// Lanes whose trusted maximum was too low: the scores must be computed again.
    pub distrusted: u32,
}

/// # Safety
/// As for [`Simd`]; the extents of `args` are checked by the table.
#[inline(always)]
pub(in crate::simd) unsafe fn softmax<S: Simd>(
    args: &mut SoftmaxArgs<'_>,
    probe: Option<&mut LaneProbe<'_>>,
) -> SoftmaxStats {
    // SAFETY: passed on.
    unsafe {
        // Inlined for both cases: a softmax without probes does not test for them at every key.
        match probe {
            None => with_exp!(args.exp, exp => softmax_with::<S, _>(args, &exp, None)),
            Some(probe) => with_exp!(args.exp, exp => softmax_with::<S, _>(args, &exp, Some(probe))),
        }
    }
}

#[inline(always)]
unsafe fn softmax_with<S: Simd, E: Exponential<S>>(
    args: &mut SoftmaxArgs<'_>,
    exp: &E,
    mut probe: Option<&mut LaneProbe<'_>>,
) -> SoftmaxStats {
    let mut stats = SoftmaxStats::default();
    let log2_e = std::f32::consts::LOG2_E * args.scale;
    // SAFETY: the table checked that ranges lie inside `s` and that lane arrays have `stride` elements.
    unsafe {
        let log2_e = S::splat(log2_e);
        for z in 0..args.stride / S::LANES {
            let Some(begun) = begin::<S>(args, z, &mut stats) else { continue };
            let s = args.s.as_mut_ptr().add(z * S::LANES);
            let (mut sum, mut probed) = (S::splat(0.0), S::splat(0.0));
            for key in args.ranges[z].0..args.ranges[z].1 {
                let at = s.add(key * args.stride);
                // Not one fused operation: the maximum must give exactly 1, however large it is.
                let p = exp.eval(S::mul(S::sub(S::load(at), begun.shift), log2_e), key);
                S::store(at, p);
                sum = S::add(sum, p);
                if let Some(probe) = &mut probe {
                    let at = probe.u.as_mut_ptr().add(key * args.stride + z * S::LANES);
                    // A hidden key may hold anything; a NaN weight stays one.
                    let hidden = S::lt(p, S::splat(f32::MIN_POSITIVE));
                    let product = S::select(hidden, S::splat(0.0), S::mul(p, S::load(at)));
                    S::store(at, product);
                    probed = S::add(probed, product);
                }
            }
            if let Some(probe) = &mut probe {
                let at = probe.sums.as_mut_ptr().add(z * S::LANES);
                S::store(at, S::fma(S::load(at), begun.alpha, probed));
            }
            end::<S>(args, z, begun, sum, &mut stats);
        }
    }
    stats
}

/// A vector of lanes whose maximum is settled.
pub(in crate::simd) struct Begun<S: Simd> {
    /// The term to subtract from scores.
    pub shift: S::V,
    alpha: S::V,
    trust: bool,
}

/// Hides keys that lanes of vector `z` do not see, and settles their maximum; `None` if nothing is left to do.
///
/// # Safety
/// As for [`softmax`].
#[inline(always)]
pub(in crate::simd) unsafe fn begin<S: Simd>(
    args: &mut SoftmaxArgs<'_>,
    z: usize,
    stats: &mut SoftmaxStats,
) -> Option<Begun<S>> {
    let (stride, lane) = (args.stride, z * S::LANES);
    let (start, end) = args.ranges[z];
    // SAFETY: as for `softmax`.
    unsafe {
        if start >= end {
            S::store(args.alpha.as_mut_ptr().add(lane), S::splat(1.0));
            return None;
        }
        let hidden = S::splat(f32::NEG_INFINITY);
        let s = args.s.as_mut_ptr().add(lane);
        let (first, last) = args.inner[z];
        if (first, last) != (start, end) {
            let (lo, hi) = (S::load(args.lo.as_ptr().add(lane)), S::load(args.hi.as_ptr().add(lane)));
            for key in (start..first).chain(last..end) {
                let at = s.add(key * stride);
                let j = S::splat(key as f32);
                // lo <= j as lo < j + 1: both are small integers
                let seen = S::and(S::lt(lo, S::splat(key as f32 + 1.0)), S::lt(j, hi));
                S::store(at, S::select(seen, S::load(at), hidden));
            }
        }
        let finite = S::lt(hidden, S::load(args.m.as_ptr().add(lane)));
        let trust = match args.policy {
            Policy::Final => true,
            Policy::Trust(_) => S::count(finite) as usize == S::LANES,
            _ => false,
        };
        let mut found = None;
        if !trust {
            // Eight chains cover the latency of the maximum. NaN scores do not raise it.
            let mut highest = [hidden; 8];
            let mut key = start;
            while key + 8 <= end {
                for (i, high) in highest.iter_mut().enumerate() {
                    *high = S::max(S::load(s.add((key + i) * stride)), *high);
                }
                key += 8;
            }
            while key < end {
                highest[0] = S::max(S::load(s.add(key * stride)), highest[0]);
                key += 1;
            }
            let mut new = highest[0];
            for &high in &highest[1..] {
                new = S::max(high, new);
            }
            found = Some(new);
        }
        settle::<S>(args, z, found, stats)
    }
}

/// Sets the maximum of vector `z`, if the highest score of the step is known or the old maximum is trusted; `None` if
/// nothing else is to be done.
///
/// # Safety
/// As for [`softmax`].
#[inline(always)]
pub(in crate::simd) unsafe fn settle<S: Simd>(
    args: &mut SoftmaxArgs<'_>,
    z: usize,
    highest: Option<S::V>,
    stats: &mut SoftmaxStats,
) -> Option<Begun<S>> {
    // SAFETY: as for `softmax`.
    unsafe {
        let hidden = S::splat(f32::NEG_INFINITY);
        let m_at = args.m.as_mut_ptr().add(z * S::LANES);
        let old = S::load(m_at);
        let finite = S::lt(hidden, old);
        let (mut m, mut alpha) = (old, S::splat(1.0));
        if let Some(new) = highest {
            let tau = match args.policy {
                Policy::Raise(tau) => tau * std::f32::consts::LN_2 / args.scale,
                _ => 0.0,
            };
            let higher = S::lt(old, new);
            // Lanes that have seen nothing take any maximum.
            let raise = S::lt(S::add(old, S::splat(tau)), new);
            m = S::select(raise, new, old);
            S::store(m_at, m);
            if args.policy == Policy::MaxOnly {
                return None;
            }
            stats.possible += S::count(S::and(higher, finite));
            let rescaled = S::and(raise, finite);
            stats.rescaled += S::count(rescaled);
            let log2_e = S::splat(std::f32::consts::LOG2_E * args.scale);
            alpha = S::select(rescaled, S::exp2(S::mul(S::sub(old, m), log2_e), &EXP2_NATIVE), S::splat(1.0));
        }
        // m is -inf in a lane that has seen no key: subtract 0 there, not inf - inf.
        Some(Begun { shift: S::select(S::lt(hidden, m), m, S::splat(0.0)), alpha, trust: highest.is_none() })
    }
}

/// Adds a step's sum to those of the lanes.
///
/// # Safety
/// As for [`softmax`].
#[inline(always)]
pub(in crate::simd) unsafe fn end<S: Simd>(
    args: &mut SoftmaxArgs<'_>,
    z: usize,
    begun: Begun<S>,
    sum: S::V,
    stats: &mut SoftmaxStats,
) {
    // SAFETY: as for `softmax`.
    unsafe {
        if let Policy::Trust(limit) = args.policy {
            // NaN counts as within: it would come out of a repetition as well.
            stats.distrusted += if begun.trust { S::count(S::lt(S::splat(limit), sum)) } else { 0 };
        }
        let l_at = args.l.as_mut_ptr().add(z * S::LANES);
        S::store(l_at, S::fma(S::load(l_at), begun.alpha, sum));
        S::store(args.alpha.as_mut_ptr().add(z * S::LANES), begun.alpha);
    }
}

/// The element-wise part of backward over a tile `[keys][lanes]`:
/// P = e^(s - lse), dS = P (scale dP - scale D), times the derivative of a modifier.
pub(crate) struct GradArgs<'a> {
    /// Scores in, probabilities out.
    pub s: &'a mut [f32],
    /// dP in, dS out.
    pub dp: &'a mut [f32],
    /// Lanes of the tile: distance between keys.
    pub stride: usize,
    /// For each vector of lanes the keys it sees; others are not touched.
    pub ranges: [(usize, usize); MAX_VECTORS],
    /// Keys that every lane of the vector sees.
    pub inner: [(usize, usize); MAX_VECTORS],
    pub lo: &'a [f32],
    pub hi: &'a [f32],
    /// Whether scores of hidden keys were set to -inf.
    pub hidden: bool,
    /// LSE of each lane; +inf for a row without keys.
    pub lse: &'a [f32],
    /// Maximum of each lane, for [`ExpKind::Sas`].
    pub max: &'a [f32],
    /// `scale` times D of each lane.
    pub delta: &'a [f32],
    /// The problem's scale; 1 if dS of modified scores is wanted.
    pub scale: f32,
    /// The factor of each element of dS, laid out like it.
    pub derivative: Option<&'a [f32]>,
    pub exp: ExpKind,
}

impl GradArgs<'_> {
    /// Elements that all tiles have.
    pub fn len(&self) -> usize {
        self.s.len().min(self.dp.len()).min(self.derivative.map_or(usize::MAX, <[f32]>::len))
    }
}

/// # Safety
/// As for [`Simd`]; the extents of `args` are checked by the table.
#[inline(always)]
pub(in crate::simd) unsafe fn grad<S: Simd>(args: &mut GradArgs<'_>) {
    // SAFETY: passed on.
    unsafe { with_exp!(args.exp, exp => grad_with::<S, _>(args, &exp)) }
}

#[inline(always)]
unsafe fn grad_with<S: Simd, E: Exponential<S>>(args: &mut GradArgs<'_>, exp: &E) {
    let stride = args.stride;
    let sas = matches!(args.exp, ExpKind::Sas(_));
    // SAFETY: the table checked that ranges lie inside the tiles and that lane arrays have `stride` elements.
    unsafe {
        let zero = S::splat(0.0);
        let (log2_e, scale) = (S::splat(std::f32::consts::LOG2_E), S::splat(args.scale));
        for z in 0..S::VECTORS {
            let lane = z * S::LANES;
            if lane >= stride {
                break;
            }
            let (start, end) = args.ranges[z];
            let s = args.s.as_mut_ptr().add(lane);
            let dp = args.dp.as_mut_ptr().add(lane);
            let lse = S::load(args.lse.as_ptr().add(lane));
            let delta = S::sub(zero, S::load(args.delta.as_ptr().add(lane)));
            // The function of TurboAttention is taken against the maximum; the sum divides afterwards.
            let top = if sas { S::load(args.max.as_ptr().add(lane)) } else { lse };
            let factor = if sas { S::exp2(S::mul(S::sub(top, lse), log2_e), &EXP2_NATIVE) } else { S::splat(1.0) };
            let (first, last) = args.inner[z];
            let (lo, hi) = (S::load(args.lo.as_ptr().add(lane)), S::load(args.hi.as_ptr().add(lane)));
            for key in start..end {
                let (s_at, dp_at) = (s.add(key * stride), dp.add(key * stride));
                let score = S::load(s_at);
                let mut p = exp.eval(S::mul(S::sub(score, top), log2_e), key);
                if sas {
                    p = S::mul(p, factor);
                }
                let mut ds = S::mul(p, S::fma(S::load(dp_at), scale, delta));
                if let Some(derivative) = args.derivative {
                    // Where dS is 0, the derivative may be anything.
                    let through = S::mul(ds, S::load(derivative.as_ptr().add(key * stride + lane)));
                    let below = S::select(S::lt(ds, zero), through, ds);
                    ds = S::select(S::lt(zero, ds), through, below);
                }
                // A hidden key may hold anything: its dP is not multiplied away but replaced.
                if key < first || key >= last {
                    let seen = S::and(S::lt(lo, S::splat(key as f32 + 1.0)), S::lt(S::splat(key as f32), hi));
                    p = S::select(seen, p, zero);
                    ds = S::select(seen, ds, zero);
                }
                if args.hidden {
                    let gone = S::lt(score, S::splat(f32::MIN));
                    p = S::select(gone, zero, p);
                    ds = S::select(gone, zero, ds);
                }
                S::store(s_at, p);
                S::store(dp_at, ds);
            }
        }
    }
}
