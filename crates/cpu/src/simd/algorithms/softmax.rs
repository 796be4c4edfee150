//! The work on a tile of scores between two products: the online softmax, and its backward.

use super::exponential::{EXP2_NATIVE, ExpKind, Exponential, Mixed, Poly, Sas, SasOnline, ceil, with_exp};
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
    /// Weights of fewer powers of two may be 0.
    pub least: f32,
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
    /// Lanes whose weights are all 0.
    pub idle: u32,
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
            None => with_exp!(args.exp, args.least, exp => softmax_with::<S, _>(args, &exp, None)),
            Some(probe) => with_exp!(args.exp, args.least, exp => softmax_with::<S, _>(args, &exp, Some(probe))),
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
    // SAFETY: the table checked that ranges lie inside `s` and that lane arrays have `stride` elements.
    unsafe {
        let factor = S::splat(exp.factor(args.scale));
        for z in 0..args.stride / S::LANES {
            let Some(begun) = begin::<S>(args, z, &mut stats) else { continue };
            let s = args.s.as_mut_ptr().add(z * S::LANES);
            let (mut sum, mut probed) = (S::splat(0.0), S::splat(0.0));
            for key in args.ranges[z].0..args.ranges[z].1 {
                let at = s.add(key * args.stride);
                let p = exp.weight(S::load(at), begun.shift, factor, key);
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
    /// What weights are relative to.
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
            stats.idle += S::LANES as u32;
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
        let (mut origin, mut alpha) = (args.exp.origin::<S>(old, args.scale), S::splat(1.0));
        if let Some(new) = highest {
            let tau = match args.policy {
                Policy::Raise(tau) => tau * std::f32::consts::LN_2 / args.scale,
                _ => 0.0,
            };
            let higher = S::lt(old, new);
            // Lanes that have seen nothing take any maximum.
            let m = S::select(S::lt(S::add(old, S::splat(tau)), new), new, old);
            S::store(m_at, m);
            if args.policy == Policy::MaxOnly {
                return None;
            }
            let before = origin;
            origin = args.exp.origin::<S>(m, args.scale);
            stats.possible += S::count(S::and(higher, finite));
            let rescaled = S::and(S::lt(before, origin), finite);
            stats.rescaled += S::count(rescaled);
            let log2_e = S::splat(std::f32::consts::LOG2_E * args.exp.unit(args.scale));
            alpha = S::select(rescaled, S::exp2(S::mul(S::sub(before, origin), log2_e), &EXP2_NATIVE), S::splat(1.0));
        }
        // It is -inf in a lane that has seen no key: subtract 0 there, not inf - inf.
        let shift = S::select(S::lt(hidden, origin), origin, S::splat(0.0));
        Some(Begun { shift, alpha, trust: highest.is_none() })
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
        // No weight is subnormal, and NaN is not less.
        stats.idle += S::count(S::lt(sum, S::splat(f32::MIN_POSITIVE)));
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
    /// Probabilities of fewer powers of two are 0.
    pub least: f32,
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
    unsafe { with_exp!(args.exp, args.least, exp => grad_with::<S, _>(args, &exp)) }
}

#[inline(always)]
unsafe fn grad_with<S: Simd, E: Exponential<S>>(args: &mut GradArgs<'_>, exp: &E) {
    let stride = args.stride;
    // TurboAttention's function is taken against the maximum, or a whole number; the sum divides afterwards.
    let (sas, online) = (matches!(args.exp, ExpKind::Sas(_)), args.exp == ExpKind::SasOnline);
    // SAFETY: the table checked that ranges lie inside the tiles and that lane arrays have `stride` elements.
    unsafe {
        let zero = S::splat(0.0);
        let (log2_e, scale) = (S::splat(std::f32::consts::LOG2_E), S::splat(args.scale));
        let unit = S::splat(exp.factor(1.0));
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
            let top = match (sas, online) {
                (true, _) => S::load(args.max.as_ptr().add(lane)),
                // No score lies above it, since each is at most the LSE but for rounding.
                (_, true) => S::add(ceil::<S>(lse), S::splat(1.0)),
                _ => lse,
            };
            let mut factor = S::splat(1.0);
            if sas || online {
                factor = S::exp2(S::mul(S::sub(top, lse), log2_e), &EXP2_NATIVE);
                // A row without keys has an infinite LSE, and no weights.
                factor = S::select(S::lt(lse, S::splat(f32::INFINITY)), factor, zero);
            }
            let (first, last) = args.inner[z];
            let (lo, hi) = (S::load(args.lo.as_ptr().add(lane)), S::load(args.hi.as_ptr().add(lane)));
            for key in start..end {
                let (s_at, dp_at) = (s.add(key * stride), dp.add(key * stride));
                let score = S::load(s_at);
                let mut p = exp.weight(score, top, unit, key);
                if sas || online {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::simd::{LEAST, kernels};

    const KEYS: usize = 32;

    fn kinds() -> [ExpKind; 5] {
        [ExpKind::Poly(3), ExpKind::Poly(4), ExpKind::Poly(5), ExpKind::Native, ExpKind::Mixed(4, 8)]
    }

    /// The powers of two of key `key` for lane `lane`: from 1 to below the least normal number, and an end beside them.
    fn power(key: usize, lane: usize) -> f32 {
        if key == KEYS - 1 { f32::NEG_INFINITY } else { -(4.3 * key as f32) - 0.06 * lane as f32 }
    }

    /// Weights, sums and counters of a tile whose lanes from `silent` on have only keys far below the maximum.
    fn weigh(isa: Isa, exp: ExpKind, least: f32, silent: usize) -> (Vec<f32>, Vec<f32>, SoftmaxStats) {
        let kernels = kernels(isa).expect("an available instruction set");
        let n = kernels.tile;
        let score = |key: usize, lane: usize| {
            (power(key, lane) - if lane < silent { 0.0 } else { 110.0 }) * std::f32::consts::LN_2
        };
        let mut s: Vec<f32> = (0..KEYS * n).map(|i| score(i / n, i % n)).collect();
        let (mut l, mut alpha) = (vec![0.0; n], vec![0.0; n]);
        let stats = kernels.softmax(
            &mut SoftmaxArgs {
                s: &mut s,
                stride: n,
                ranges: [(0, KEYS); MAX_VECTORS],
                inner: [(0, KEYS); MAX_VECTORS],
                lo: &vec![0.0; n],
                hi: &vec![KEYS as f32; n],
                m: &mut vec![0.0; n],
                l: &mut l,
                alpha: &mut alpha,
                exp,
                least,
                policy: Policy::Final,
                scale: 1.0,
            },
            None,
        );
        (s, l, stats)
    }

    /// Above `least` all bits are those of the smallest `least`; below it a weight is exactly 0.
    #[test]
    fn powers_below_the_least_are_zero_on_every_instruction_set() {
        for isa in Isa::available() {
            for exp in kinds() {
                let n = kernels(isa).expect("an available instruction set").tile;
                let (all, above) = (weigh(isa, exp, LEAST, n).0, weigh(isa, exp, -96.0, n).0);
                for (i, (all, above)) in all.iter().zip(&above).enumerate() {
                    let (key, lane) = (i / n, i % n);
                    let t = power(key, lane);
                    // Logarithms in f32 move a power of 100 by some 1e-5.
                    let want = if t < -96.001 { 0.0 } else { *all };
                    if (t + 96.0).abs() > 0.001 {
                        assert_eq!(above.to_bits(), f32::to_bits(want), "{isa:?} {exp:?} key {key} lane {lane}");
                    }
                    assert!(*all == 0.0 || all.is_normal(), "{isa:?} {exp:?} key {key} lane {lane}: {all:e}");
                    assert!((*all == 0.0) == (t < -126.0) || (t + 126.0).abs() < 0.001, "{isa:?} {exp:?} {t}");
                }
            }
        }
    }

    /// A lane is idle if all of its weights are 0.
    #[test]
    fn lanes_without_weights_are_idle() {
        for isa in Isa::available() {
            let n = kernels(isa).expect("an available instruction set").tile;
            for silent in [0, 1, n - 1, n] {
                let (_, l, stats) = weigh(isa, ExpKind::Poly(4), -96.0, silent);
                assert_eq!(stats.idle as usize, n - silent, "{isa:?}");
                assert!(l.iter().enumerate().all(|(lane, &l)| (l > 0.0) == (lane < silent)), "{isa:?}");
            }
        }
    }

    /// Probabilities of backward follow the same rule, and their gradients with them.
    #[test]
    fn gradients_of_powers_below_the_least_are_zero() {
        for isa in Isa::available() {
            let kernels = kernels(isa).expect("an available instruction set");
            let n = kernels.tile;
            let mut s: Vec<f32> = (0..KEYS * n).map(|i| power(i / n, i % n) * std::f32::consts::LN_2).collect();
            let (mut dp, zeros) = (vec![1.0; KEYS * n], vec![0.0; n]);
            kernels.grad(&mut GradArgs {
                s: &mut s,
                dp: &mut dp,
                stride: n,
                ranges: [(0, KEYS); MAX_VECTORS],
                inner: [(0, KEYS); MAX_VECTORS],
                lo: &zeros,
                hi: &vec![KEYS as f32; n],
                hidden: true,
                lse: &zeros,
                max: &zeros,
                delta: &zeros,
                scale: 1.0,
                derivative: None,
                exp: ExpKind::Poly(5),
                least: -96.0,
            });
            for (i, (p, ds)) in s.iter().zip(&dp).enumerate() {
                let t = power(i / n, i % n);
                assert!(p == ds && ((*p == 0.0) == (t < -96.0) || (t + 96.0).abs() < 0.001), "{isa:?} {t}: {p:e}");
            }
        }
    }
}
