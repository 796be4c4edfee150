//! Instruction sets: one trait of vector primitives, four implementations, and the kernels on top, written once.
//!
//! Nothing here knows attention's shapes. A kernel is generic over [`Simd`] and inlined into an entry point that
//! enables the instruction set. [`Kernels`] is the table of these entry points, and its safe methods check every extent
//! before they pass a pointer on.

// Kernels take pointers, strides and sizes, as BLAS does; a struct would only rename them.
#![allow(clippy::too_many_arguments)]

mod algorithms;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_bf16;
#[cfg(target_arch = "x86_64")]
mod amx_block_max;
#[cfg(target_arch = "x86_64")]
mod amx_decode;
#[cfg(target_arch = "x86_64")]
mod amx_delta;
#[cfg(target_arch = "x86_64")]
mod amx_int8;
#[cfg(target_arch = "x86_64")]
mod amx_pipelined;
#[cfg(target_arch = "x86_64")]
mod amx_store_output;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod band;
mod int8_codes;
// Matrix units exist on x86-64 only: elsewhere their safe interfaces are compiled, but never used.
mod best_keys;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // as for `prefetch`
mod delta;
#[cfg(target_arch = "x86_64")]
mod dots;
mod instantiate;
mod int8;
mod kernels;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // as for `prefetch`
mod matrix;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // as for `prefetch`
mod matrix_bf16;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // as for `prefetch`
mod matrix_decode;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod packed;
mod portable;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod prefetch;
#[cfg(target_arch = "x86_64")]
mod vector_int8;

pub(crate) use algorithms::{AboveArgs, BestArgs, OtherArgs};
pub(crate) use algorithms::{
    Ahead, ExpKind, GradArgs, INVERT, LEAST, LaneProbe, Policy, SoftmaxArgs, SoftmaxStats, Stage, Token,
};
pub(crate) use algorithms::{BAND, BAND_ROWS, BandOutput, BandSeen, BandWeights, PANEL};
pub(crate) use algorithms::{Pass, Plane, SimdElement, Term, bits, capped, copy, pass, turned};
pub(crate) use delta::{DeltaGates, DeltaKernels, DeltaValues, HALF, SLICE, TOKENS};
pub(crate) use int8::{Int8Kernels, Integers};
pub(crate) use int8_codes::BYTES;
pub(crate) use kernels::{Kernels, MAX_VECTORS, Matrix, MatrixMut, Strided, Sum, kernels};
pub(crate) use matrix::{DEPTH, GROUP, Hold, MatrixKernels, Panels, SLOTS, Source, parts};
pub(crate) use matrix_bf16::{
    BlockPosition, GradPanels, KEY_TILES, LANE_TILES, Pipelined, PipelinedBlock, PipelinedTile, RowsAt, STRIP_LANES,
    Seen, Square, TurnedRows,
};
pub(crate) use matrix_decode::{STRIP, StripKernels, StripProbe, StripRows, StripSoftmax, Strips};
pub(crate) use prefetch::{Prefetch, Share};

/// Whether vectors multiply bytes in fours.
pub(crate) fn has_quads() -> bool {
    #[cfg(target_arch = "x86_64")]
    return dots::has_quads();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// A vector of f32, and the operations that the kernels need.
///
/// # Safety
/// Every method may only be called where the CPU has the instruction set of the implementing type, and with
/// pointers that are valid for [`LANES`](Simd::LANES) elements. The kernel tables see to both: they are
/// handed out after detection, and their safe methods check extents.
pub(crate) unsafe trait Simd: Copy {
    /// The register.
    type V: Copy;
    /// A truth value for each lane.
    type M: Copy;
    /// Lanes of a register.
    const LANES: usize;
    /// Registers side by side in a tile: a tile is `LANES * VECTORS` queries wide.
    const VECTORS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Stores past the caches; `p` is aligned to the vector.
    unsafe fn stream(p: *mut f32, v: Self::V);
    /// Orders streamed stores before whatever follows.
    unsafe fn fence();
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; the second operand where one is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; the second operand where one is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// 1 / a for normal a, with an error of about one unit in the last place.
    unsafe fn reciprocal(a: Self::V) -> Self::V;
    unsafe fn floor(a: Self::V) -> Self::V;
    /// a < b, false where one is NaN.
    unsafe fn lt(a: Self::V, b: Self::V) -> Self::M;
    unsafe fn and(a: Self::M, b: Self::M) -> Self::M;
    /// Lanes where the mask holds.
    unsafe fn count(m: Self::M) -> u32;
    /// One bit per lane, the first lane lowest; [`mask`](Self::mask) is the reverse and ignores further bits.
    unsafe fn bits(m: Self::M) -> u32;
    unsafe fn mask(bits: u32) -> Self::M;
    /// a where the mask holds, else b.
    unsafe fn select(m: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// 2^t with the given coefficients of 2^r on [0, 1), lowest first: 0 below `least`, infinite above 128. `least` is
    /// at least [`LEAST`].
    unsafe fn exp2_above<const N: usize>(t: Self::V, coefficients: &[f32; N], least: f32) -> Self::V;
    /// 2^t as [`exp2_above`](Self::exp2_above) computes it, 0 only where the result would be subnormal.
    #[inline(always)]
    unsafe fn exp2<const N: usize>(t: Self::V, coefficients: &[f32; N]) -> Self::V {
        // SAFETY: passed on.
        unsafe { Self::exp2_above(t, coefficients, LEAST) }
    }
    /// For x >= 0 its fraction, and e^-floor(x) from [`SAS_ENTRIES`](fulgurite_core::exp::SAS_ENTRIES). Beyond the
    /// table it is 0, with any fraction in \[0, 1). The fraction of NaN is NaN.
    unsafe fn table(x: Self::V) -> (Self::V, Self::V);
    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn store_f16(p: *mut u16, v: Self::V);
    /// `LANES` consecutive pairs of bf16: the first of each pair, and the second.
    unsafe fn load_bf16_pairs(p: *const u16) -> (Self::V, Self::V);
    /// The sum of the lanes of each of `LANES` vectors.
    unsafe fn sums(vectors: &[Self::V]) -> Self::V;
    /// dst\[c\]\[r\] = src\[r\]\[c\] for a square of `LANES`.
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize);
    /// Brings the line at `p` near; any address is allowed.
    unsafe fn prefetch(p: *const u8);
}
