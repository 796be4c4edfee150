//! Rows of lanes: scaling, multiplication, transposition, and copies that bypass the caches.

use crate::simd::Simd;

/// Copies past the caches.
///
/// # Safety
/// As for [`Simd`], with `n` elements on both sides, a multiple of the lanes, and `dst` aligned to a vector.
#[inline(always)]
pub(in crate::simd) unsafe fn stream<S: Simd>(src: *const f32, dst: *mut f32, n: usize) {
    for i in (0..n).step_by(S::LANES) {
        // SAFETY: inside the extents.
        unsafe { S::stream(dst.add(i), S::load(src.add(i))) };
    }
}

/// `rows[i][lane] *= factor[lane]`.
///
/// # Safety
/// As for [`Simd`], with `rows * stride` elements at `x` and `stride` at `factor`.
#[inline(always)]
pub(in crate::simd) unsafe fn scale_lanes<S: Simd>(x: *mut f32, rows: usize, stride: usize, factor: *const f32) {
    for i in 0..rows {
        for lane in (0..stride).step_by(S::LANES) {
            // SAFETY: inside the extents.
            unsafe {
                let at = x.add(i * stride + lane);
                S::store(at, S::mul(S::load(at), S::load(factor.add(lane))));
            }
        }
    }
}

/// `out[lane] = sum_i a[i][lane] b[i][lane]`, in the order in which [`micro`] sums a product: where O is a row of
/// V, D equals dP to the bit.
///
/// # Safety
/// As for [`Simd`], with `rows * stride` elements at `a` and `b` and `stride` at `out`.
#[inline(always)]
pub(in crate::simd) unsafe fn lane_dots<S: Simd>(
    a: *const f32,
    b: *const f32,
    rows: usize,
    stride: usize,
    out: *mut f32,
) {
    for lane in (0..stride).step_by(S::LANES) {
        // SAFETY: inside the extents.
        unsafe {
            let mut sum = S::splat(0.0);
            for i in 0..rows {
                let at = i * stride + lane;
                sum = S::fma(S::load(a.add(at)), S::load(b.add(at)), sum);
            }
            S::store(out.add(lane), sum);
        }
    }
}

/// `dst[c][r] = src[r][c]`; both sizes are multiples of the lanes.
///
/// # Safety
/// As for [`Simd`], with valid extents.
#[inline(always)]
pub(in crate::simd) unsafe fn transpose<S: Simd>(
    src: *const f32,
    src_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
    rows: usize,
    cols: usize,
) {
    for r in (0..rows).step_by(S::LANES) {
        for c in (0..cols).step_by(S::LANES) {
            // SAFETY: inside the extents.
            unsafe {
                S::transpose(src.add(r * src_stride + c), src_stride, dst.add(c * dst_stride + r), dst_stride);
            }
        }
    }
}
