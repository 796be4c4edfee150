//! Multiplies packed codes in place with VNNI: 64 unsigned bytes by 64 signed ones into sums of four.

use super::{LEAST, ROUND, Running, SERIES, Scores, TILE, Tile, Weights};
use crate::memory::Line;
use fulgurite_core::format::Bits;
use std::arch::x86_64::*;

/// Whether this machine has the instructions.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// Channels of the widest head, in planes.
const MOST: usize = 512;

/// Queries with steps folded in, in two parts: 128 * high + low.
#[repr(C, align(64))]
struct Folded([[[i8; MOST]; 2]; 4]);

/// # Safety
/// The machine has VNNI; extents are those that [`Packed::dots`](super::Packed::dots) checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn dots(tile: &Tile<'_>, queries: &[&[i16]], out: &mut Scores) {
    let mut folded = Folded([[[0; MOST]; 2]; 4]);
    let mut base = [0i32; 4];
    for ((q, folded), base) in queries.iter().zip(&mut folded.0).zip(&mut base) {
        // SAFETY: as promised.
        *base = unsafe { fold(tile, q, folded) };
    }
    // SAFETY: as promised.
    unsafe {
        match (tile.panel.bits, queries.len()) {
            (Bits::Four, 1) => dots_of::<4, 2, 1>(tile, &folded, &base, out),
            (Bits::Four, 2) => dots_of::<4, 2, 2>(tile, &folded, &base, out),
            (Bits::Four, _) => dots_of::<4, 2, 4>(tile, &folded, &base, out),
            (Bits::Two, 1) => dots_of::<2, 4, 1>(tile, &folded, &base, out),
            (Bits::Two, 2) => dots_of::<2, 4, 2>(tile, &folded, &base, out),
            (Bits::Two, _) => dots_of::<2, 4, 4>(tile, &folded, &base, out),
        }
    }
}

/// q_c step_c in two parts; gives sum_c q_c zero_c.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn fold(tile: &Tile<'_>, q: &[i16], [low, high]: &mut [[i8; MOST]; 2]) -> i32 {
    let mut sum = _mm512_setzero_si512();
    for c in (0..tile.panel.width()).step_by(32) {
        // SAFETY: `width` is a multiple of 32 and at most `MOST`, and all three are that long.
        unsafe {
            let wide = |from: &[i8]| _mm512_cvtepi8_epi16(_mm256_loadu_si256(from.as_ptr().add(c).cast()));
            let q = _mm512_loadu_si512(q.as_ptr().add(c).cast());
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(q, wide(tile.zeros)));
            let product = _mm512_mullo_epi16(q, wide(tile.steps));
            let upper = _mm512_srai_epi16::<7>(_mm512_add_epi16(product, _mm512_set1_epi16(64)));
            let lower = _mm512_sub_epi16(product, _mm512_slli_epi16::<7>(upper));
            _mm256_storeu_si256(low.as_mut_ptr().add(c).cast(), _mm512_cvtepi16_epi8(lower));
            _mm256_storeu_si256(high.as_mut_ptr().add(c).cast(), _mm512_cvtepi16_epi8(upper));
        }
    }
    _mm512_reduce_add_epi32(sum)
}

/// Prefetches lines of the next tile while those of this one are read; any address is allowed.
#[inline]
fn prefetch(line: *const Line, ahead: usize) {
    // SAFETY: prefetching never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(ahead).cast()) }
}

/// Sixteen tokens in lanes, two such groups at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dots_of<const BITS: u32, const PLANES: usize, const Q: usize>(
    tile: &Tile<'_>,
    folded: &Folded,
    base: &[i32; 4],
    out: &mut Scores,
) {
    let (bytes, mask) = (tile.panel.bytes(), _mm512_set1_epi8((1 << BITS) - 1));
    let (rows, next) = (bytes / 4, tile.panel.lines());
    for pair in 0..2 {
        let mut sums = [[[_mm512_setzero_si512(); 2]; 2]; Q];
        for row in 0..rows {
            // SAFETY: a tile has `rows` lines for each group of tokens (contract).
            let mut raw = [0, 1].map(|group| unsafe {
                let line = tile.lines.as_ptr().add((2 * pair + group) * rows + row);
                prefetch(line, next);
                _mm512_load_si512(line.cast())
            });
            for plane in 0..PLANES {
                let codes = raw.map(|raw| _mm512_and_si512(raw, mask));
                for (sums, folded) in sums.iter_mut().zip(&folded.0) {
                    for (part, sums) in sums.iter_mut().enumerate() {
                        // SAFETY: inside the folded query, which is as wide as all planes.
                        let q = unsafe {
                            folded[part].as_ptr().add(plane * bytes + 4 * row).cast::<i32>().read_unaligned()
                        };
                        let q = _mm512_set1_epi32(q);
                        for (sum, codes) in sums.iter_mut().zip(codes) {
                            *sum = _mm512_dpbusd_epi32(*sum, codes, q);
                        }
                    }
                }
                raw = raw.map(|raw| _mm512_srli_epi16::<BITS>(raw));
            }
        }
        for ((sums, out), &base) in sums.iter().zip(&mut *out).zip(base) {
            for group in 0..2 {
                let sum = _mm512_add_epi32(sums[0][group], _mm512_slli_epi32::<7>(sums[1][group]));
                let to = &mut out[(2 * pair + group) * 16..][..16];
                // SAFETY: sixteen elements.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_add_epi32(sum, _mm512_set1_epi32(base))) };
            }
        }
    }
}

/// # Safety
/// The machine has VNNI; extents are those that [`Packed::sums`](super::Packed::sums) checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn sums(tile: &Tile<'_>, weights: &Weights, factor: f32, alpha: &[f32], queries: &mut [Running<'_>]) {
    // SAFETY: as promised.
    unsafe {
        match (tile.panel.bits, queries.len()) {
            (Bits::Four, 1) => sums_of::<4, 2, 1>(tile, weights, factor, alpha, queries),
            (Bits::Four, 2) => sums_of::<4, 2, 2>(tile, weights, factor, alpha, queries),
            (Bits::Four, _) => sums_of::<4, 2, 4>(tile, weights, factor, alpha, queries),
            (Bits::Two, 1) => sums_of::<2, 4, 1>(tile, weights, factor, alpha, queries),
            (Bits::Two, 2) => sums_of::<2, 4, 2>(tile, weights, factor, alpha, queries),
            (Bits::Two, _) => sums_of::<2, 4, 4>(tile, weights, factor, alpha, queries),
        }
    }
}

/// Sixteen bytes of channels in lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn sums_of<const BITS: u32, const PLANES: usize, const Q: usize>(
    tile: &Tile<'_>,
    weights: &Weights,
    factor: f32,
    alpha: &[f32],
    queries: &mut [Running<'_>],
) {
    let (bytes, mask) = (tile.panel.bytes(), _mm512_set1_epi8((1 << BITS) - 1));
    let next = tile.panel.lines();
    let mut total = [0.0f32; Q];
    for (total, weights) in total.iter_mut().zip(weights) {
        // SAFETY: 64 weights.
        let all = unsafe { _mm512_loadu_si512(weights.as_ptr().cast()) };
        let sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), all, _mm512_set1_epi8(1));
        *total = _mm512_reduce_add_epi32(sum) as f32;
    }
    for block in 0..bytes / 16 {
        // Tokens even and odd by fours: a sum is added to again only after its latency.
        let mut sums = [[[_mm512_setzero_si512(); PLANES]; Q]; 2];
        for four in 0..TILE / 4 {
            // SAFETY: a block of a tile has 16 lines (contract).
            let mut raw = unsafe {
                let line = tile.lines.as_ptr().add(block * 16 + four);
                prefetch(line, next);
                _mm512_load_si512(line.cast())
            };
            for plane in 0..PLANES {
                let codes = _mm512_and_si512(raw, mask);
                for (sums, weights) in sums[four % 2].iter_mut().zip(weights) {
                    let w = i32::from_le_bytes([0, 1, 2, 3].map(|i| weights[4 * four + i]));
                    sums[plane] = _mm512_dpbusd_epi32(sums[plane], codes, _mm512_set1_epi32(w));
                }
                raw = _mm512_srli_epi16::<BITS>(raw);
            }
        }
        #[allow(clippy::needless_range_loop)] // planes of both sums
        for plane in 0..PLANES {
            let place = plane * bytes + block * 16;
            // SAFETY: sixteen channels from here on (contract).
            let wide = |x: &[i8]| unsafe {
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().add(place).cast())))
            };
            let (steps, zeros) = (wide(tile.steps), wide(tile.zeros));
            for (i, own) in queries.iter_mut().enumerate() {
                let raw = _mm512_cvtepi32_ps(_mm512_add_epi32(sums[0][i][plane], sums[1][i][plane]));
                let sum = _mm512_fmadd_ps(raw, steps, _mm512_mul_ps(_mm512_set1_ps(total[i]), zeros));
                // SAFETY: as above.
                unsafe {
                    let at = own.o.as_mut_ptr().add(place);
                    let before = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(alpha[i]));
                    _mm512_storeu_ps(at, _mm512_fmadd_ps(sum, _mm512_set1_ps(factor), before));
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn exp(x: __m512) -> __m512 {
    let (round, least) = (_mm512_set1_ps(ROUND), _mm512_set1_ps(LEAST));
    let t = _mm512_mul_ps(_mm512_max_ps(x, least), _mm512_set1_ps(std::f32::consts::LOG2_E));
    let whole = _mm512_add_ps(t, round);
    let r = _mm512_sub_ps(t, _mm512_sub_ps(whole, round));
    let add = |sum, &c: &f32| _mm512_fmadd_ps(sum, r, _mm512_set1_ps(c));
    let series = SERIES[..5].iter().rev().fold(_mm512_set1_ps(SERIES[5]), add);
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(whole));
    let found = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(series), power));
    _mm512_mask_mov_ps(found, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, least), _mm512_setzero_ps())
}

/// # Safety
/// The machine has VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn soften(
    scores: &[i32; TILE],
    factor: f32,
    n: usize,
    own: &mut Running<'_>,
    to: &mut [u8; TILE],
) -> f32 {
    let seen = u64::MAX >> (TILE - n.min(TILE));
    let mut s = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
    for (i, s) in s.iter_mut().enumerate() {
        // SAFETY: four times sixteen scores.
        let x = unsafe { _mm512_loadu_si512(scores.as_ptr().add(16 * i).cast()) };
        *s = _mm512_mask_mul_ps(*s, (seen >> (16 * i)) as u16, _mm512_cvtepi32_ps(x), _mm512_set1_ps(factor));
    }
    let top = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
    let top = _mm512_reduce_max_ps(top);
    let top = if top > own.m { top } else { own.m };
    let alpha = _mm512_cvtss_f32(exp(_mm512_set1_ps(own.m - top)));
    let mut sum = _mm512_setzero_ps();
    for (i, s) in s.into_iter().enumerate() {
        let p = exp(_mm512_sub_ps(s, _mm512_set1_ps(top)));
        sum = _mm512_add_ps(sum, p);
        let codes = _mm512_fmadd_ps(p, _mm512_set1_ps(127.0), _mm512_set1_ps(ROUND));
        // SAFETY: four times sixteen weights.
        unsafe {
            _mm_storeu_si128(to.as_mut_ptr().add(16 * i).cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(codes)))
        };
    }
    let mut sums = [0.0f32; 16];
    // SAFETY: sixteen sums.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), sum) };
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|i| sums[i] += sums[i + half]);
    }
    own.l = own.l.mul_add(alpha, sums[0]);
    own.m = top;
    alpha
}
