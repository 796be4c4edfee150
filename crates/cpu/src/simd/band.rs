//! The safe interface of [`band`](super::algorithms) on [`Kernels`].

use super::algorithms::{BAND, BandOutput, BandWeights, PANEL};
use super::kernels::{Kernels, extent};

/// Entry points of an instruction set.
pub(super) struct Bands {
    pub weights: unsafe fn(&mut BandWeights<'_>),
    pub output: unsafe fn(&mut BandOutput<'_>),
}

impl Kernels {
    /// P, maximum and sum of a few vectors of rows over all keys that they see.
    pub fn band_weights(&self, args: &mut BandWeights<'_>) {
        let panel = args.d * PANEL;
        let rows = BAND * self.lanes;
        assert!(args.q.len() >= args.d * rows && args.d > 0 && args.d.is_multiple_of(4), "queries too small");
        assert!(args.panels.iter().all(|panels| panels.len().is_multiple_of(panel)), "whole panels");
        let keys: usize = args.panels.iter().map(|panels| panels.len() / args.d).sum();
        assert!(args.p.len() >= keys * rows, "weights too small");
        assert!(args.m.len() >= rows && args.l.len() >= rows, "lane arrays too small");
        for (panels, seen) in args.panels.iter().zip(args.seen) {
            let whole = |&(start, end): &(usize, usize)| {
                start <= end && end <= panels.len() / args.d && start.is_multiple_of(PANEL) && end.is_multiple_of(PANEL)
            };
            assert!(seen.some.iter().all(whole), "keys of whole panels");
        }
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.bands.weights)(args) }
    }

    /// O of a few vectors of rows, each over the keys that it sees.
    pub fn band_output(&self, args: &mut BandOutput<'_>) {
        assert!(args.rows <= BAND * self.lanes && args.factors.len() >= args.rows, "rows of a vector");
        assert!(args.width.is_multiple_of(self.lanes) && args.o.len() >= args.rows * args.width, "O too small");
        for (&(first, v, stride), seen) in args.runs.iter().zip(args.seen) {
            let end = seen.hull(0..args.rows).1;
            assert!(args.p.len() >= (first + end) * BAND * self.lanes, "weights too small");
            assert!(v.len() >= extent(end, stride, args.width), "values too small");
        }
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.bands.output)(args) }
    }
}

/// Compiles the bands for one instruction set; the list is that of [`define_kernels`](super::define).
macro_rules! define_bands {
    ($simd:ident, [$($feature:meta)?], [$(($vectors:literal, $rows:literal)),*]) => {{
        use crate::simd::algorithms as alg;
        $(#[$feature])?
        unsafe fn weights(args: &mut alg::BandWeights<'_>) {
            // SAFETY: passed on.
            unsafe { alg::band_weights::<$simd>(args) }
        }
        $(#[$feature])?
        unsafe fn output(args: &mut alg::BandOutput<'_>) {
            let mut at = 0;
            while at < args.width {
                let vectors = ((args.width - at) / $simd::LANES).min($simd::VECTORS);
                // SAFETY: columns at .. at + vectors are inside the width.
                unsafe {
                    match vectors {
                        $($vectors => alg::band_output::<$simd, $rows, $vectors>(args, at),)*
                        _ => unreachable!("bug in fulgurite: a block of no width"),
                    }
                }
                at += vectors * $simd::LANES;
            }
        }
        $crate::simd::band::Bands { weights, output }
    }};
}
pub(super) use define_bands;
