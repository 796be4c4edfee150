//! Eight-bit integers on tiles: signed bytes, four to a slot, summed in 32 bits.

use super::Simd;
use super::algorithms::{ExpKind, SoftmaxArgs, SoftmaxStats, begin, end};
use super::amx::hold;
use super::avx512::Avx512;
use super::int8::{BYTES, Int8Kernels};
use super::matrix::SLOTS;
use fulgurite_core::exp::EXP2_POLY;
use std::arch::asm;
use std::arch::x86_64::*;

pub(super) static KERNELS: Int8Kernels = Int8Kernels { multiply, to_scores, softmax: Some(softmax), pack_weights, add };

/// One block of C of `$m` by `$n` tiles; tiles 0 to 3 are C, 4 and 5 of A, 6 and 7 of B.
macro_rules! block {
    ($zero:literal, $loads:literal, $products:literal, $stores:literal, $c:expr, $row:expr, $a:expr, $b:expr, $k:expr) => {
        asm!(
            $zero,
            "2:",
            $loads,
            $products,
            "add {a0}, 1024", "add {a1}, 1024", "add {b0}, 1024", "add {b1}, 1024",
            "dec {k}",
            "jnz 2b",
            $stores,
            "/* {c1} */",
            c = in(reg) $c,
            c1 = in(reg) $c.byte_add(16 * $row),
            row = in(reg) $row,
            a0 = inout(reg) $a[0] => _,
            a1 = inout(reg) $a[1] => _,
            b0 = inout(reg) $b[0] => _,
            b1 = inout(reg) $b[1] => _,
            k = inout(reg) $k => _,
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        )
    };
}

/// # Safety
/// The machine has tiles of bytes and the process may use them; the extents are valid, with pitches in slots.
unsafe fn multiply(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    a_pitch: usize,
    b: *const f32,
    b_pitch: usize,
    [m, n, k]: [usize; 3],
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    // SAFETY: the shape is held over all blocks; each block lies inside the extents.
    unsafe {
        let _shaped = hold();
        for i in (0..m).step_by(2) {
            for j in (0..n).step_by(2) {
                let (rows, columns) = ((m - i).min(2), (n - j).min(2));
                let (a, b) = (a.add(i * a_pitch), b.add(j * b_pitch));
                let (a, b) = ([a, a.add((rows - 1) * a_pitch)], [b, b.add((columns - 1) * b_pitch)]);
                let (c, row) = (c.add(i * 16 * ldc + j * 16), ldc * 4);
                match (rows, columns) {
                    (2, 2) => block!(
                        "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]\n tileloadd tmm7, [{b1} + {line}*1]\n tileloadd tmm5, [{a1} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6\n tdpbssd tmm1, tmm4, tmm7\n tdpbssd tmm2, tmm5, tmm6\n tdpbssd tmm3, tmm5, tmm7",
                        "tilestored [{c} + {row}*1], tmm0\n tilestored [{c} + {row}*1 + 64], tmm1\n tilestored [{c1} + {row}*1], tmm2\n tilestored [{c1} + {row}*1 + 64], tmm3",
                        c,
                        row,
                        a,
                        b,
                        k
                    ),
                    (2, _) => block!(
                        "tilezero tmm0\n tilezero tmm2",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]\n tileloadd tmm5, [{a1} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6\n tdpbssd tmm2, tmm5, tmm6",
                        "tilestored [{c} + {row}*1], tmm0\n tilestored [{c1} + {row}*1], tmm2",
                        c,
                        row,
                        a,
                        b,
                        k
                    ),
                    (_, 2) => block!(
                        "tilezero tmm0\n tilezero tmm1",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]\n tileloadd tmm7, [{b1} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6\n tdpbssd tmm1, tmm4, tmm7",
                        "tilestored [{c} + {row}*1], tmm0\n tilestored [{c} + {row}*1 + 64], tmm1",
                        c,
                        row,
                        a,
                        b,
                        k
                    ),
                    (_, _) => block!(
                        "tilezero tmm0",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6",
                        "tilestored [{c} + {row}*1], tmm0",
                        c,
                        row,
                        a,
                        b,
                        k
                    ),
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn to_scores(s: &mut [f32], stride: usize, key: &[f32], lane: &[f32], bias: &[f32]) {
    for (row, &key) in s.chunks_exact_mut(stride).zip(key) {
        // SAFETY: rows and lane arrays have `stride` elements, whole vectors.
        unsafe {
            for at in (0..stride).step_by(16) {
                let x = _mm512_cvtepi32_ps(_mm512_loadu_si512(row.as_ptr().add(at).cast()));
                let x = _mm512_mul_ps(x, _mm512_set1_ps(key));
                let (lane, bias) = (_mm512_loadu_ps(lane.as_ptr().add(at)), _mm512_loadu_ps(bias.as_ptr().add(at)));
                _mm512_storeu_ps(row.as_mut_ptr().add(at), _mm512_fmadd_ps(x, lane, bias));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn add(o: &mut [f32], integers: &[f32], factor: f32) {
    for (o, x) in o.chunks_exact_mut(16).zip(integers.chunks_exact(16)) {
        // SAFETY: both have 16 elements.
        unsafe {
            let x = _mm512_cvtepi32_ps(_mm512_loadu_si512(x.as_ptr().cast()));
            _mm512_storeu_ps(o.as_mut_ptr(), _mm512_fmadd_ps(x, _mm512_set1_ps(factor), _mm512_loadu_ps(o.as_ptr())));
        }
    }
}

/// Codes of weights, 0 to 127.
#[inline(always)]
unsafe fn code(p: __m512) -> __m512i {
    // SAFETY: AVX-512 is present (contract of the callers).
    unsafe { _mm512_cvtps_epi32(_mm512_mul_ps(p, _mm512_set1_ps(127.0))) }
}

/// Four vectors of codes in the bytes of one.
#[inline(always)]
unsafe fn join(c: [__m512i; 4]) -> __m512i {
    // SAFETY: AVX-512 is present (contract of the callers). Codes are not negative: their upper bytes are 0.
    unsafe {
        let low = _mm512_or_si512(c[0], _mm512_slli_epi32::<8>(c[1]));
        let high = _mm512_or_si512(_mm512_slli_epi32::<16>(c[2]), _mm512_slli_epi32::<24>(c[3]));
        _mm512_or_si512(low, high)
    }
}

/// # Safety
/// The extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn pack_weights(p: &[f32], stride: usize, seen: [usize; 2], to: &mut [f32]) {
    for tile in seen[0] / BYTES..seen[1].div_ceil(BYTES) {
        for j in 0..16 {
            // SAFETY: keys of the range are inside.
            unsafe {
                let mut c = [_mm512_setzero_si512(); 4];
                for (i, c) in c.iter_mut().enumerate() {
                    let key = tile * BYTES + i * 16 + j;
                    if seen[0] <= key && key < seen[1] {
                        *c = code(_mm512_loadu_ps(p.as_ptr().add(key * stride)));
                    }
                }
                _mm512_storeu_si512(to.as_mut_ptr().add(tile * SLOTS + j * 16).cast(), join(c));
            }
        }
    }
}

/// One step of the online softmax, with P in codes packed as the columns of the second product.
///
/// # Safety
/// The extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax(args: &mut SoftmaxArgs<'_>, out: *mut f32, pitch: usize) -> SoftmaxStats {
    const CUBIC: [f32; 4] = [EXP2_POLY[0][0], EXP2_POLY[0][1], EXP2_POLY[0][2], EXP2_POLY[0][3]];
    let mut stats = SoftmaxStats::default();
    // SAFETY: keys of the ranges are inside.
    unsafe {
        for z in 0..args.stride / 16 {
            let Some(begun) = begin::<Avx512>(args, z, &mut stats) else { continue };
            let sum = match args.exp {
                ExpKind::Poly(3) => weigh(args, z, begun.shift, &CUBIC, out.add(z * pitch)),
                _ => weigh(args, z, begun.shift, &EXP2_POLY[2], out.add(z * pitch)),
            };
            end::<Avx512>(args, z, begun, sum, &mut stats);
        }
    }
    stats
}

/// P of one vector of lanes in codes; the sum of P itself.
#[inline(always)]
unsafe fn weigh<const N: usize>(
    args: &SoftmaxArgs<'_>,
    z: usize,
    shift: __m512,
    polynomial: &[f32; N],
    out: *mut f32,
) -> __m512 {
    // SAFETY: keys of the range are inside (caller).
    unsafe {
        let (start, stop) = args.ranges[z];
        let log2_e = _mm512_set1_ps(std::f32::consts::LOG2_E * args.scale);
        let s = args.s.as_ptr().add(z * 16);
        let mut sums = [_mm512_setzero_ps(); 2];
        for tile in start / BYTES..stop.div_ceil(BYTES) {
            let whole = start <= tile * BYTES && (tile + 1) * BYTES <= stop;
            for j in 0..16 {
                let mut c = [_mm512_setzero_si512(); 4];
                for i in 0..4 {
                    let key = tile * BYTES + i * 16 + j;
                    if whole || (start <= key && key < stop) {
                        let x = _mm512_loadu_ps(s.add(key * args.stride));
                        let p = Avx512::exp2(_mm512_mul_ps(_mm512_sub_ps(x, shift), log2_e), polynomial);
                        sums[i % 2] = _mm512_add_ps(sums[i % 2], p);
                        c[i] = code(p);
                    }
                }
                _mm512_storeu_si512(out.add(tile * SLOTS + j * 16).cast(), join(c));
            }
        }
        _mm512_add_ps(sums[0], sums[1])
    }
}
