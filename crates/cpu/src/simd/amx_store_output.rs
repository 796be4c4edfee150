//! Writes O^T from the tiles of forward: divided, transposed and rounded to rows of bf16 in one pass. Numbers are
//! rounded before they are transposed, so that a lane's dword carries two columns and half as many dwords need
//! shuffling.

use super::amx::{join, nearest};
use super::amx_bf16::turned;
use super::matrix_bf16::TurnedRows;
use half::bf16;
use std::arch::x86_64::*;

/// # Safety
/// AVX-512 is present; the extents of `rows` are checked by the table, and `to` has room for `n` elements at each start.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn store(rows: &TurnedRows<'_>, to: *mut bf16) {
    let TurnedRows { o, stride, n, factors, m, starts, past } = *rows;
    // Lanes outside: rows may be pages apart, and few pages are written to at a time.
    for (z, starts) in starts.chunks(16).enumerate() {
        // SAFETY: inside the extents (caller); columns past the last are not read and not written.
        unsafe {
            let factor = _mm512_loadu_ps(factors.as_ptr().add(z * 16));
            let m = _mm512_loadu_ps(m.as_ptr().add(z * 16));
            let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(m, _mm512_set1_ps(f32::NEG_INFINITY));
            for column in (0..n).step_by(32) {
                let left = n - column;
                let own = |i: usize| {
                    let at = o.as_ptr().add((column + i.min(left - 1)) * stride + z * 16);
                    nearest(_mm512_maskz_mul_ps(seen, _mm512_loadu_ps(at), factor))
                };
                let mut pairs = [_mm512_setzero_si512(); 16];
                for (i, pair) in pairs.iter_mut().enumerate() {
                    *pair = join(own(2 * i), own(2 * i + 1));
                }
                for (&start, row) in starts.iter().zip(turned(&pairs)) {
                    let at = to.add(start + column);
                    if left < 32 {
                        _mm512_mask_storeu_epi16(at.cast(), (1u32 << left).wrapping_sub(1), row);
                    } else if past && at.cast::<u8>().align_offset(64) == 0 {
                        _mm512_stream_si512(at.cast(), row);
                    } else {
                        _mm512_storeu_si512(at.cast(), row);
                    }
                }
            }
        }
    }
}
