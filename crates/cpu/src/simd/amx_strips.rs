//! Few queries against strips of bf16 keys, on tiles.
//!
//! 16 keys are a tile of A as they lie in memory, and 16 values a tile of B, so a strip of all heads is read nearly in
//! sequence. Pages begin cold, though, and the prefetcher needs a few accesses to follow each: the first lines of every
//! page of the next strip are asked for, no more. Asking for all lines, or copying keys into a buffer first, was
//! slower than not asking at all (lab 001).

use super::Simd;
use super::algorithms::{EXP2_NATIVE, SoftmaxStats, exp2_scalar};
use super::amx::{Shapes, hold_shapes, rounded};
use super::amx_bf16::CUBIC;
use super::avx512::Avx512;
use super::matrix::Hold;
use super::strips::{SCORES, StripKernels, StripSoftmax};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::f32::consts::{LN_2, LOG2_E};

pub(super) static STRIPS: StripKernels = StripKernels { hold, scores, softmax, probe, output, touch };

/// Of a page of 4 KiB, what is asked for. A quarter was best of 0, 4, 8, 16, 32 and 64 lines, lab 001.
const LINES: usize = 16;

/// Tile 0 is scores of 16 keys, 1 queries, 2 keys or values, 3 is O, 4 to 7 are weights.
fn hold([rows, columns]: [usize; 2]) -> Hold {
    let (rows, width) = (2 * rows as u8, 4 * columns as u16);
    let mut shapes = Shapes::NONE;
    for (tile, (rows, row_bytes)) in [(16, width), (16, width), (16, 64)].into_iter().enumerate() {
        shapes.set(tile, rows, row_bytes);
    }
    (3..8).for_each(|tile| shapes.set(tile, rows, 64));
    hold_shapes(&shapes)
}

/// # Safety
/// The tiles have the shapes of [`hold`]; 32 rows of `d` elements at `k`, a multiple of 32; queries and scores have
/// their columns.
unsafe fn scores(q: *const f32, columns: usize, k: *const bf16, row: usize, d: usize, s: *mut f32) {
    for half in 0..2 {
        // SAFETY: inside the extents (caller).
        unsafe {
            asm!(
                "tilezero tmm0",
                "2:",
                "tileloadd tmm1, [{q} + {line}*1]",
                "tileloadd tmm2, [{k} + {row}*1]",
                "tdpbf16ps tmm0, tmm2, tmm1",
                "add {q}, {tile}",
                "add {k}, 64",
                "dec {left}",
                "jnz 2b",
                "tilestored [{s} + {line}*1], tmm0",
                q = inout(reg) q => _,
                k = inout(reg) k.add(half * 16 * row) => _,
                row = in(reg) 2 * row,
                line = in(reg) 4 * columns,
                tile = in(reg) 64 * columns,
                left = inout(reg) d / 32 => _,
                s = in(reg) s.add(half * 16 * columns),
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                options(nostack)
            )
        }
    }
}

/// Four keys, four columns of each.
///
/// # Safety
/// AVX-512 is present; the keys are valid at `s`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn quad(s: *const f32, columns: usize) -> __m512i {
    // SAFETY: inside the extents (caller).
    unsafe {
        if columns == 4 {
            return _mm512_loadu_si512(s.cast());
        }
        let all = _mm512_castps128_ps512(_mm_loadu_ps(s));
        let all = _mm512_insertf32x4::<1>(all, _mm_loadu_ps(s.add(columns)));
        let all = _mm512_insertf32x4::<2>(all, _mm_loadu_ps(s.add(2 * columns)));
        _mm512_castps_si512(_mm512_insertf32x4::<3>(all, _mm_loadu_ps(s.add(3 * columns))))
    }
}

/// Four columns of 16 keys, `columns` apart: a vector of keys for each column.
///
/// # Safety
/// AVX-512 is present; the keys are valid at `s`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn turn(s: *const f32, columns: usize) -> [__m512; 4] {
    // SAFETY: inside the extents (caller).
    unsafe {
        let (a, b) = (quad(s, columns), quad(s.add(4 * columns), columns));
        let (c, d) = (quad(s.add(8 * columns), columns), quad(s.add(12 * columns), columns));
        let (ab, ab2) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd, cd2) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        // Lane 4 i + j of what follows is key 4 j + i.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let (a, b) = (_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        let (c, d) = (_mm512_unpacklo_epi64(ab2, cd2), _mm512_unpackhi_epi64(ab2, cd2));
        let (a, b) = (_mm512_permutexvar_epi32(order, a), _mm512_permutexvar_epi32(order, b));
        let (c, d) = (_mm512_permutexvar_epi32(order, c), _mm512_permutexvar_epi32(order, d));
        [_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _mm512_castsi512_ps(c), _mm512_castsi512_ps(d)]
    }
}

/// Weights of 32 keys of a row in two parts, for even and for odd columns of values.
///
/// # Safety
/// AVX-512 is present; room for weights behind the scores at `s`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn store_weights(s: *mut f32, [rows, row]: [usize; 2], halves: [__m512; 2]) {
    // SAFETY: inside the extents (caller).
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
        for (half, x) in halves.into_iter().enumerate() {
            let first = rounded(x);
            let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(first, upper)));
            for (part, bits) in [first, rounded(rest)].into_iter().enumerate() {
                let to = s.add(SCORES + ((half * 2 + part) * 2 * rows + row) * 16);
                // For even columns the weight comes first in its pair, for odd ones second.
                _mm512_storeu_si512(to.cast(), _mm512_srli_epi32::<16>(bits));
                _mm512_storeu_si512(to.add(rows * 16).cast(), _mm512_and_si512(bits, upper));
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; scores and weights of 32 keys at `s`, scores and room for weights at `u`, and `rows` sums.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn probe(s: *const f32, u: *mut f32, l: &mut [f32], [rows, columns]: [usize; 2]) {
    // SAFETY: inside the extents (caller).
    unsafe {
        for first in (0..rows).step_by(4) {
            let halves = [turn(u.add(first), columns), turn(u.add(first + 16 * columns), columns)];
            for row in first..rows.min(first + 4) {
                let weighted = std::array::from_fn(|half| {
                    // The weights of odd columns are numbers as they lie.
                    let part =
                        |part: usize| Avx512::load(s.add(SCORES + (((half * 2 + part) * 2 + 1) * rows + row) * 16));
                    let p = _mm512_add_ps(part(0), part(1));
                    // A key that weighs nothing may hold anything.
                    let seen = _mm512_test_epi32_mask(_mm512_castps_si512(p), _mm512_castps_si512(p));
                    _mm512_maskz_mul_ps(seen, p, halves[half][row - first])
                });
                l[row] += _mm512_reduce_add_ps(_mm512_add_ps(weighted[0], weighted[1]));
                store_weights(u, [rows, row], weighted);
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; scores of 32 keys, room for two parts of weights of each row, and `rows` running values.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax(args: &mut StripSoftmax<'_>, [rows, columns]: [usize; 2]) -> SoftmaxStats {
    let mut stats = SoftmaxStats::default();
    // SAFETY: inside the extents (caller).
    unsafe {
        let none = _mm512_set1_ps(f32::NEG_INFINITY);
        let (scale, log2_e) = (_mm512_set1_ps(args.scale), _mm512_set1_ps(LOG2_E));
        let s = args.s.as_mut_ptr();
        for first in (0..rows).step_by(4) {
            let (low, high) = (turn(s.add(first), columns), turn(s.add(first + 16 * columns), columns));
            for row in first..rows.min(first + 4) {
                let x = _mm512_mul_ps(low[row - first], scale);
                let y = _mm512_mul_ps(high[row - first], scale);
                // The second operand where one is NaN: NaN does not raise the maximum.
                let top = _mm512_reduce_max_ps(_mm512_max_ps(x, _mm512_max_ps(y, none)));
                let old = args.m[row];
                let seen = old > f32::NEG_INFINITY;
                let raise = old + args.tau * LN_2 < top;
                let m = if raise { top } else { old };
                stats.possible += u32::from(seen && old < top);
                stats.rescaled += u32::from(seen && raise);
                let alpha = if seen && raise { exp2_scalar((old - m) * LOG2_E, &EXP2_NATIVE) } else { 1.0 };
                // m is -inf in a row that has seen no key: subtract 0 there, not inf - inf.
                let shift = _mm512_set1_ps(if m > f32::NEG_INFINITY { m } else { 0.0 });
                let x = Avx512::exp2(_mm512_mul_ps(_mm512_sub_ps(x, shift), log2_e), &CUBIC);
                let y = Avx512::exp2(_mm512_mul_ps(_mm512_sub_ps(y, shift), log2_e), &CUBIC);
                args.m[row] = m;
                args.l[row] = args.l[row] * alpha + _mm512_reduce_add_ps(_mm512_add_ps(x, y));
                args.alpha[row] = alpha;
                store_weights(s, [rows, row], [x, y]);
            }
        }
    }
    stats
}

/// # Safety
/// The tiles have the shapes of [`hold`]; 32 rows of `columns` elements, a multiple of 32, at `v`; the weights of each
/// row at `p`; O of so many rows and columns.
unsafe fn output(p: *const f32, rows: usize, v: *const bf16, row: usize, columns: usize, o: *mut f32) {
    let tile = 2 * rows * 16;
    // SAFETY: inside the extents (caller).
    unsafe {
        asm!(
            "tileloadd tmm4, [{p0} + {line}*1]",
            "tileloadd tmm5, [{p1} + {line}*1]",
            "tileloadd tmm6, [{p2} + {line}*1]",
            "tileloadd tmm7, [{p3} + {line}*1]",
            "2:",
            "tileloadd tmm3, [{o} + {line}*1]",
            "tileloadd tmm2, [{v0} + {row}*1]",
            // The small part first: the sum is rounded at its full size as seldom as can be.
            "tdpbf16ps tmm3, tmm5, tmm2",
            "tdpbf16ps tmm3, tmm4, tmm2",
            "tileloadd tmm2, [{v1} + {row}*1]",
            "tdpbf16ps tmm3, tmm7, tmm2",
            "tdpbf16ps tmm3, tmm6, tmm2",
            "tilestored [{o} + {line}*1], tmm3",
            "add {o}, {tile}",
            "add {v0}, 64",
            "add {v1}, 64",
            "dec {left}",
            "jnz 2b",
            p0 = in(reg) p,
            p1 = in(reg) p.add(tile),
            p2 = in(reg) p.add(2 * tile),
            p3 = in(reg) p.add(3 * tile),
            line = in(reg) 64usize,
            o = inout(reg) o => _,
            tile = in(reg) 4 * tile,
            v0 = inout(reg) v => _,
            v1 = inout(reg) v.add(16 * row) => _,
            row = in(reg) 2 * row,
            left = inout(reg) columns / 32 => _,
            out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        )
    }
}

/// # Safety
/// AVX-512 is present.
unsafe fn touch(p: *const bf16, elements: usize) {
    let bytes = 2 * elements;
    for page in (0..bytes).step_by(4096) {
        for line in (page..bytes.min(page + 64 * LINES)).step_by(64) {
            // SAFETY: any address is allowed.
            unsafe { Avx512::prefetch(p.cast::<u8>().wrapping_add(line)) };
        }
    }
}
