//! Entry points of nearest-neighbour search: the best keys of each lane, distances and sums; with their safe interface on [`Kernels`].

use super::Kernels;
use super::algorithms::{AboveArgs, BestArgs, OtherArgs};

/// The entry points of an instruction set.
pub(super) struct BestKeys {
    pub best: unsafe fn(&mut BestArgs<'_>),
    pub other: unsafe fn(&mut OtherArgs<'_>),
    pub above: unsafe fn(&mut AboveArgs<'_>),
    pub frame: unsafe fn(*mut f32, &[f32], f32, *mut f32),
    pub add_wide: unsafe fn(&[f32], &mut [f64]),
    pub distance: unsafe fn(&[f32], &[f32]) -> f64,
    pub dot: unsafe fn(&[f32], &[f32]) -> f64,
}

impl Kernels {
    fn check_lanes(&self, s: &[f32], keys: usize, lanes: &[usize]) {
        assert!(s.len() >= keys * self.tile, "scores too small");
        assert!(lanes.iter().all(|&n| n >= self.tile), "lane arrays too small");
    }

    /// The best and the second best key of each lane.
    pub fn best(&self, args: &mut BestArgs<'_>) {
        self.check_lanes(args.s, args.bias.len(), &[args.best.len(), args.second.len(), args.place.len()]);
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.best_keys.best)(args) }
    }

    /// The best key of another group, for each lane.
    pub fn other(&self, args: &mut OtherArgs<'_>) {
        let lanes = [args.lane_group.len(), args.half_norm.len(), args.best.len(), args.place.len()];
        self.check_lanes(args.s, args.bias.len(), &lanes);
        assert!(args.cap.len() >= args.bias.len() && args.key_group.len() >= args.bias.len(), "key arrays too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.best_keys.other)(args) }
    }

    /// Every key above its lane's bar.
    pub fn above(&self, args: &mut AboveArgs<'_>) {
        self.check_lanes(args.s, args.bias.len(), &[args.bar.len()]);
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.best_keys.above)(args) }
    }

    /// Moves rows of lanes into a frame and takes the squared norm of each lane.
    pub fn frame(&self, x: &mut [f32], shift: &[f32], scale: f32, norms: &mut [f32]) {
        self.check_lanes(x, shift.len(), &[norms.len()]);
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.best_keys.frame)(x.as_mut_ptr(), shift, scale, norms.as_mut_ptr()) }
    }

    /// `sums += x`, in f64.
    pub fn add_wide(&self, x: &[f32], sums: &mut [f64]) {
        // SAFETY: the machine has the instruction set.
        unsafe { (self.best_keys.add_wide)(x, sums) }
    }

    /// Squared distance in f64: the same bits on every instruction set.
    pub fn distance(&self, a: &[f32], b: &[f32]) -> f64 {
        assert_eq!(a.len(), b.len());
        // SAFETY: the machine has the instruction set.
        unsafe { (self.best_keys.distance)(a, b) }
    }

    /// Dot product in f64: the same bits on every instruction set.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f64 {
        assert_eq!(a.len(), b.len());
        // SAFETY: the machine has the instruction set.
        unsafe { (self.best_keys.dot)(a, b) }
    }
}

/// Compiles them for one instruction set.
macro_rules! define_best_keys {
    ($simd:ident, [$($feature:meta)?]) => {{
        use crate::simd::algorithms as alg;
        $(#[$feature])?
        unsafe fn best(args: &mut alg::BestArgs<'_>) {
            // SAFETY: passed on.
            unsafe { alg::best::<$simd>(args) }
        }
        $(#[$feature])?
        unsafe fn other(args: &mut alg::OtherArgs<'_>) {
            // SAFETY: passed on.
            unsafe { alg::other::<$simd>(args) }
        }
        $(#[$feature])?
        unsafe fn above(args: &mut alg::AboveArgs<'_>) {
            // SAFETY: passed on.
            unsafe { alg::above::<$simd>(args) }
        }
        $(#[$feature])?
        unsafe fn frame(x: *mut f32, shift: &[f32], scale: f32, norms: *mut f32) {
            // SAFETY: passed on.
            unsafe { alg::frame::<$simd>(x, shift, scale, norms) }
        }
        $(#[$feature])?
        unsafe fn add_wide(x: &[f32], sums: &mut [f64]) {
            alg::add_wide(x, sums)
        }
        $(#[$feature])?
        unsafe fn distance(a: &[f32], b: &[f32]) -> f64 {
            alg::distance(a, b)
        }
        $(#[$feature])?
        unsafe fn dot(a: &[f32], b: &[f32]) -> f64 {
            alg::dot(a, b)
        }
        $crate::simd::best_keys::BestKeys { best, other, above, frame, add_wide, distance, dot }
    }};
}
pub(super) use define_best_keys;
