//! Few queries against strips of bf16 keys, on tiles.
//!
//! 16 keys are a tile of A as they lie in memory, so a strip of all heads is read nearly in sequence, which is what the
//! hardware's prefetcher needs: asking for lines in advance, or copying keys into a buffer first, was slower (lab 011).
//! Values are paired through 4 KiB that never leave the first-level cache.

use super::Simd;
use super::algorithms::{EXP2_NATIVE, SoftmaxStats, exp2_scalar};
use super::amx::{Shapes, hold_shapes, rounded};
use super::amx_bf16::CUBIC;
use super::avx512::Avx512;
use super::matrix::{Hold, SLOTS};
use super::strips::{SCORES, StripKernels, StripSoftmax};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::f32::consts::{LN_2, LOG2_E};
use std::mem::MaybeUninit;

pub(super) static STRIPS: StripKernels = StripKernels { hold, scores, softmax, output };

/// Tiles 0 and 1 are scores of 16 keys, 2 and 3 are O, 4 keys or paired values, 5 queries, 6 weights, 7 paired values.
fn hold([rows, columns]: [usize; 2]) -> Hold {
    let (rows, width) = (rows as u8, 4 * columns as u16);
    let mut shapes = Shapes::NONE;
    let tiles = [(16, width), (16, width), (rows, 64), (rows, 64), (16, 64), (16, width), (rows, 64), (16, 64)];
    for (tile, (rows, row_bytes)) in tiles.into_iter().enumerate() {
        shapes.set(tile, rows, row_bytes);
    }
    hold_shapes(&shapes)
}

/// # Safety
/// The tiles have the shapes of [`hold`]; 32 rows of `d` elements at `k`, a multiple of 32; queries and scores have
/// their columns.
unsafe fn scores(q: *const f32, columns: usize, k: *const bf16, row: usize, d: usize, s: *mut f32) {
    // SAFETY: inside the extents (caller).
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "2:",
            "tileloadd tmm5, [{q} + {line}*1]",
            "tileloadd tmm4, [{k0} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm4, [{k1} + {row}*1]",
            "tdpbf16ps tmm1, tmm4, tmm5",
            "add {q}, {tile}",
            "add {k0}, 64",
            "add {k1}, 64",
            "dec {left}",
            "jnz 2b",
            "tilestored [{s} + {line}*1], tmm0",
            "add {s}, {tile}",
            "tilestored [{s} + {line}*1], tmm1",
            q = inout(reg) q => _,
            k0 = inout(reg) k => _,
            k1 = inout(reg) k.add(16 * row) => _,
            row = in(reg) 2 * row,
            line = in(reg) 4 * columns,
            tile = in(reg) 64 * columns,
            left = inout(reg) d / 32 => _,
            s = inout(reg) s => _,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _,
            options(nostack)
        )
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

/// # Safety
/// AVX-512 is present; scores of 32 keys, room for two parts of weights of each row, and `rows` running values.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax(args: &mut StripSoftmax<'_>, [rows, columns]: [usize; 2]) -> SoftmaxStats {
    let mut stats = SoftmaxStats::default();
    // SAFETY: inside the extents (caller).
    unsafe {
        let none = _mm512_set1_ps(f32::NEG_INFINITY);
        let (scale, log2_e) = (_mm512_set1_ps(args.scale), _mm512_set1_ps(LOG2_E));
        // Upper halves of 16 dwords of one vector, then of another.
        let halves: [i16; 32] = std::array::from_fn(|i| 2 * i as i16 + 1);
        let halves = _mm512_loadu_si512(halves.as_ptr().cast());
        let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
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
                let (x0, y0) = (rounded(x), rounded(y));
                let x1 = rounded(_mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(x0, upper))));
                let y1 = rounded(_mm512_sub_ps(y, _mm512_castsi512_ps(_mm512_and_si512(y0, upper))));
                let weights = s.add(SCORES + row * 16);
                _mm512_storeu_si512(weights.cast(), _mm512_permutex2var_epi16(x0, halves, y0));
                _mm512_storeu_si512(weights.add(rows * 16).cast(), _mm512_permutex2var_epi16(x1, halves, y1));
            }
        }
    }
    stats
}

/// Two pairs of tiles, so that one is made while the other is loaded.
#[repr(C, align(64))]
struct Ring([[MaybeUninit<f32>; 2 * SLOTS]; 2]);

/// # Safety
/// The tiles have the shapes of [`hold`]; 32 rows of `columns` elements, a multiple of 32, at `v`; two parts of
/// weights of each row at `p`; `rows` rows of O, `ldo` apart.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn output(p: *const f32, rows: usize, v: *const bf16, row: usize, columns: usize, o: *mut f32, ldo: usize) {
    let mut ring = Ring([[MaybeUninit::uninit(); 2 * SLOTS]; 2]);
    for (step, column) in (0..columns).step_by(32).enumerate() {
        let paired = ring.0[step % 2].as_mut_ptr().cast::<f32>();
        // SAFETY: inside the extents (caller).
        unsafe {
            for j in 0..16 {
                let at = v.add(2 * j * row + column);
                let (a, b) = (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(row).cast()));
                // Pair order: even columns in one tile, odd ones in the other.
                let even = _mm512_mask_blend_epi16(0xaaaa_aaaa, a, _mm512_slli_epi32::<16>(b));
                let odd = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(a), b);
                _mm512_store_si512(paired.add(16 * j).cast(), even);
                _mm512_store_si512(paired.add(SLOTS + 16 * j).cast(), odd);
            }
            asm!(
                "tileloadd tmm2, [{o} + {ldo}*1]",
                "tileloadd tmm3, [{o} + {ldo}*1 + 64]",
                "tileloadd tmm6, [{p1} + {line}*1]",
                "tileloadd tmm7, [{v} + {line}*1]",
                "tdpbf16ps tmm2, tmm6, tmm7",
                "tileloadd tmm4, [{v} + {line}*1 + 1024]",
                "tdpbf16ps tmm3, tmm6, tmm4",
                "tileloadd tmm6, [{p0} + {line}*1]",
                "tdpbf16ps tmm2, tmm6, tmm7",
                "tdpbf16ps tmm3, tmm6, tmm4",
                "tilestored [{o} + {ldo}*1], tmm2",
                "tilestored [{o} + {ldo}*1 + 64], tmm3",
                o = in(reg) o.add(column),
                ldo = in(reg) 4 * ldo,
                // The small part first: the sum is rounded at its full size as seldom as can be.
                p0 = in(reg) p,
                p1 = in(reg) p.add(16 * rows),
                v = in(reg) paired,
                line = in(reg) 64usize,
                out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            )
        }
    }
}
