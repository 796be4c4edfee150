//! Few queries against strips of bf16 keys, on tiles.
//!
//! 16 keys in memory order are a tile of A, and 16 values a tile of B. While a strip is read from the L2 cache, the
//! next one is prefetched, with as many lines as are read and between the tile loads. In bursts, or from one page after
//! the other, the same prefetches are slower than none (lab 001).
//!
//! A tile that is not in use is zeroed: the unit has few registers behind the tiles' names, and dead tiles would occupy
//! registers that loads in flight need (lab 001: P V takes 16.5 instead of 18 to 20 cycles).

use super::Simd;
use super::algorithms::{EXP2_NATIVE, SoftmaxStats};
use super::amx::{Shapes, hold_shapes, rounded};
use super::amx_bf16::CUBIC;
use super::avx512::Avx512;
use super::matrix::Hold;
use super::matrix_decode::{StripKernels, StripProbe, StripSoftmax};
use super::prefetch::Prefetch;
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::f32::consts::{LN_2, LOG2_E};

pub(super) static STRIPS: StripKernels = StripKernels { hold, scores, softmax, probe, output };

/// Tile 0 is scores of 16 keys, 1 queries, 2 keys or values, 3 is O, 4 and 5 are weights.
fn hold([rows, columns]: [usize; 2]) -> Hold {
    let (rows, width) = (2 * rows as u8, 4 * columns as u16);
    let mut shapes = Shapes::NONE;
    for (tile, (rows, row_bytes)) in [(16, width), (16, width), (16, 64)].into_iter().enumerate() {
        shapes.set(tile, rows, row_bytes);
    }
    (3..6).for_each(|tile| shapes.set(tile, rows, 64));
    hold_shapes(&shapes)
}

/// Prefetches a line of each stream, this many bytes after the first: `ahead` is the first stream, `last` the fourth.
macro_rules! prefetch {
    ($bytes:literal) => {
        concat!(
            "prefetcht1 [{ahead} + ",
            $bytes,
            "]\n",
            "prefetcht1 [{ahead} + {apart} + ",
            $bytes,
            "]\n",
            "prefetcht1 [{ahead} + 2*{apart} + ",
            $bytes,
            "]\n",
            "prefetcht1 [{last} + ",
            $bytes,
            "]"
        )
    };
}

/// # Safety
/// The tiles have the shapes of [`hold`]; 32 rows of `d` elements at `k`, a multiple of 32; queries and scores have
/// their columns.
unsafe fn scores(q: *const f32, columns: usize, k: *const bf16, row: usize, d: usize, s: *mut f32, prefetch: Prefetch) {
    let (mut ahead, apart) = prefetch.streams();
    // Prefetch four lines of each stream with every tile, if there is something to prefetch.
    let step = if apart > 0 { 256usize } else { 0 };
    for half in 0..2 {
        // SAFETY: inside the extents (caller).
        unsafe {
            asm!(
                "tilezero tmm3",
                "tilezero tmm4",
                "tilezero tmm5",
                "tilezero tmm0",
                "2:",
                "tileloadd tmm1, [{q} + {line}*1]",
                "tileloadd tmm2, [{k} + {row}*1]",
                prefetch!("0"),
                prefetch!("64"),
                prefetch!("128"),
                prefetch!("192"),
                "tdpbf16ps tmm0, tmm2, tmm1",
                "add {q}, {tile}",
                "add {k}, 64",
                "add {ahead}, {step}",
                "add {last}, {step}",
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
                ahead = inout(reg) ahead,
                last = inout(reg) ahead.wrapping_add(3 * apart) => _,
                apart = in(reg) apart,
                step = in(reg) step,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack)
            )
        }
    }
}

/// Vectors of whole keys, `columns` of each, to vectors of 16 keys: of each four columns four vectors, one for each.
///
/// # Safety
/// AVX-512 is present.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn turn([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab, ab2) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (cd, cd2) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    // Lane 4 i + j of the result comes from lane 4 j + i.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let (a, b) = (_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let (c, d) = (_mm512_unpacklo_epi64(ab2, cd2), _mm512_unpackhi_epi64(ab2, cd2));
    [a, b, c, d].map(|x| _mm512_permutexvar_epi32(order, x))
}

/// The rows of 16 keys from the vectors of them as scores lie: the first half of `x`, N of 32 keys; rows past the last are
/// whatever lies there.
///
/// # Safety
/// AVX-512 is present.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn rows_of<const N: usize>(x: &[__m512i; N]) -> [__m512i; 8] {
    // SAFETY: the instruction set is present (caller).
    unsafe {
        if N == 8 {
            let [a, b, c, d] = turn([x[0], x[1], x[2], x[3]]);
            return [a, b, c, d, a, b, c, d];
        }
        // Two keys in a vector: the lower or upper four columns of four keys from two of them.
        let low = |a, b| _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
        let high = |a, b| _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
        let pairs = [(0, 1), (2, 3), (4, 5), (6, 7)].map(|(a, b)| (x[a], x[b]));
        let [a, b, c, d] = turn(pairs.map(|(a, b)| low(a, b)));
        let [e, f, g, h] = turn(pairs.map(|(a, b)| high(a, b)));
        [a, b, c, d, e, f, g, h]
    }
}

/// Writes the weights of 16 keys of a row: for even columns the weight comes first in its pair, for odd ones second.
///
/// # Safety
/// AVX-512 is present; room for a vector at `to`, and for another one `rows` rows behind it.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn store_weights(to: *mut f32, rows: usize, bits: __m512i) {
    // SAFETY: inside the extents (caller).
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
        _mm512_storeu_si512(to.cast(), _mm512_srli_epi32::<16>(bits));
        _mm512_storeu_si512(to.add(rows * 16).cast(), _mm512_and_si512(bits, upper));
    }
}

/// # Safety
/// AVX-512 is present; scores of 32 keys, weights and room for weights of each row.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn probe(args: &mut StripProbe<'_>, [queries, rows, columns]: [usize; 3]) {
    // SAFETY: inside the extents (caller).
    unsafe { if columns == 4 { probe_of::<8>(args, [queries, rows]) } else { probe_of::<16>(args, [queries, rows]) } }
}

/// # Safety
/// As for [`probe`]; N is twice the columns.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn probe_of<const N: usize>(args: &mut StripProbe<'_>, [queries, rows]: [usize; 2]) {
    // SAFETY: inside the extents (caller).
    unsafe {
        let scale = _mm512_set1_ps(args.scale);
        let to = args.weights.as_mut_ptr();
        let from = args.p.map_or(to.cast_const(), <[f32]>::as_ptr);
        // Beside their queries, probes are the rows after them.
        let first = rows - queries;
        for half in 0..2 {
            let mut u = [_mm512_setzero_si512(); N];
            for (i, u) in u.iter_mut().take(N / 2).enumerate() {
                *u = _mm512_loadu_si512(args.u.as_ptr().add(16 * (half * N / 2 + i)).cast());
            }
            let u = rows_of::<N>(&u);
            for row in 0..queries {
                let at = (half * 2 * rows + row) * 16;
                // The weights of odd columns need no conversion.
                let p = _mm512_loadu_ps(from.add(at + rows * 16));
                // A key that weighs nothing may hold anything.
                let seen = _mm512_test_epi32_mask(_mm512_castps_si512(p), _mm512_castps_si512(p));
                let own = _mm512_castsi512_ps(u[first + row]);
                let weighted = _mm512_maskz_mul_ps(seen, p, _mm512_mul_ps(own, scale));
                args.l[row] += _mm512_reduce_add_ps(weighted);
                store_weights(to.add(at + first * 16), rows, rounded(weighted));
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; scores of 32 keys, room for the weights of each row, 16 running values each.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax(args: &mut StripSoftmax<'_>, [queries, rows, columns]: [usize; 3]) -> SoftmaxStats {
    // SAFETY: inside the extents (caller).
    unsafe {
        if columns == 4 { softmax_of::<8>(args, [queries, rows]) } else { softmax_of::<16>(args, [queries, rows]) }
    }
}

/// Lanes have the layout of the scores: N vectors, each of 16 / columns keys.
///
/// # Safety
/// As for [`softmax`]; N is twice the columns.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax_of<const N: usize>(args: &mut StripSoftmax<'_>, [queries, rows]: [usize; 2]) -> SoftmaxStats {
    let columns = N / 2;
    let mut stats = SoftmaxStats::default();
    // SAFETY: inside the extents (caller).
    unsafe {
        let quarter = args.prefetch.lines() / 4;
        let mut prefetch = || args.prefetch.issue::<Avx512>(quarter);
        let (scale, log2_e) = (_mm512_set1_ps(args.scale), _mm512_set1_ps(LOG2_E));
        let mut x = [_mm512_setzero_ps(); N];
        // The second operand where one is NaN: NaN does not raise the maximum.
        let mut tops = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for (i, x) in x.iter_mut().enumerate() {
            *x = _mm512_mul_ps(_mm512_loadu_ps(args.s.as_ptr().add(16 * i)), scale);
            tops[i % 2] = _mm512_max_ps(*x, tops[i % 2]);
        }
        prefetch();
        let mut top = _mm512_max_ps(tops[0], tops[1]);
        top = _mm512_max_ps(top, _mm512_shuffle_f32x4::<0b01_00_11_10>(top, top));
        if columns == 4 {
            top = _mm512_max_ps(top, _mm512_shuffle_f32x4::<0b10_11_00_01>(top, top));
        }
        let mut m = _mm512_loadu_ps(args.m.as_ptr());
        let mut sum = _mm512_loadu_ps(args.l.as_ptr());
        let higher = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(m, top);
        if higher != 0 {
            let bar = _mm512_add_ps(m, _mm512_set1_ps(args.tau * LN_2));
            let raise = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(bar, top);
            let seen = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(m, _mm512_set1_ps(f32::NEG_INFINITY));
            let own = (1u16 << queries) - 1;
            stats.possible = (higher & seen & own).count_ones();
            stats.rescaled = (raise & seen & own).count_ones();
            let raised = _mm512_mask_mov_ps(m, raise, top);
            let factor = Avx512::exp2(_mm512_mul_ps(_mm512_sub_ps(m, raised), log2_e), &EXP2_NATIVE);
            let alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), raise & seen, factor);
            _mm512_storeu_ps(args.alpha.as_mut_ptr(), alpha);
            sum = _mm512_mul_ps(sum, alpha);
            m = raised;
            _mm512_storeu_ps(args.m.as_mut_ptr(), m);
        }
        prefetch();
        // m is -inf in a row that has seen no key: subtract 0 there, not inf - inf.
        let seen = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(m, _mm512_set1_ps(f32::NEG_INFINITY));
        let shift = _mm512_maskz_mov_ps(seen, m);
        for half in 0..2 {
            let mut bits = [_mm512_setzero_si512(); N];
            for i in half * N / 2..(half + 1) * N / 2 {
                let p = Avx512::exp2(_mm512_mul_ps(_mm512_sub_ps(x[i], shift), log2_e), &CUBIC);
                sum = _mm512_add_ps(sum, p);
                bits[i - half * N / 2] = rounded(p);
            }
            prefetch();
            for (row, bits) in (0..queries).zip(rows_of::<N>(&bits)) {
                store_weights(args.weights.as_mut_ptr().add((half * 2 * rows + row) * 16), rows, bits);
            }
        }
        _mm512_storeu_ps(args.l.as_mut_ptr(), sum);
    }
    stats
}

/// # Safety
/// The tiles have the shapes of [`hold`]; 32 rows of `columns` elements, a multiple of 32, at `v`; the weights of each
/// row at `p`; O has `rows` rows and `columns` columns.
unsafe fn output(
    p: *const f32,
    rows: usize,
    v: *const bf16,
    row: usize,
    columns: usize,
    o: *mut f32,
    prefetch: Prefetch,
) {
    let tile = 2 * rows * 64;
    let (ahead, apart) = prefetch.streams();
    // Prefetch three lines of each stream with every tile; softmax has prefetched the rest.
    let step = if apart > 0 { 192usize } else { 0 };
    // SAFETY: inside the extents (caller).
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tileloadd tmm4, [{p} + {line}*1]",
            "add {p}, {tile}",
            "tileloadd tmm5, [{p} + {line}*1]",
            "2:",
            "tileloadd tmm3, [{o} + {line}*1]",
            "tileloadd tmm2, [{v0} + {row}*1]",
            prefetch!("0"),
            prefetch!("64"),
            prefetch!("128"),
            "add {ahead}, {step}",
            "add {last}, {step}",
            "tdpbf16ps tmm3, tmm4, tmm2",
            "tileloadd tmm2, [{v1} + {row}*1]",
            prefetch!("0"),
            prefetch!("64"),
            prefetch!("128"),
            "add {ahead}, {step}",
            "add {last}, {step}",
            "tdpbf16ps tmm3, tmm5, tmm2",
            "tilestored [{o} + {line}*1], tmm3",
            "add {o}, {tile}",
            "add {v0}, 64",
            "add {v1}, 64",
            "dec {left}",
            "jnz 2b",
            p = inout(reg) p => _,
            line = in(reg) 64usize,
            o = inout(reg) o => _,
            tile = in(reg) tile,
            v0 = inout(reg) v => _,
            v1 = inout(reg) v.add(16 * row) => _,
            row = in(reg) 2 * row,
            left = inout(reg) columns / 32 => _,
            ahead = inout(reg) ahead => _,
            last = inout(reg) ahead.wrapping_add(3 * apart) => _,
            apart = in(reg) apart,
            step = in(reg) step,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            options(nostack)
        )
    }
}
