//! The work between products of 8-bit integers, on AVX-512 vectors; tiles, VNNI or plain code multiply.

use super::Simd;
use super::algorithms::{ExpKind, SoftmaxArgs, SoftmaxStats, begin, end, settle};
use super::amx_bf16::turned;
use super::avx512::Avx512;
use super::int8::{Int8Kernels, Integers, Multiply, plain};
use super::int8_codes::{self, BYTES, Coding};
use super::matrix::SLOTS;
use super::{amx_int8, dots};
use fulgurite_core::exp::EXP2_POLY;
use std::arch::x86_64::*;

pub(super) static TILES: Int8Kernels = table(amx_int8::multiply);
static QUADS: Int8Kernels = table(dots::multiply_quads);
static PLAIN: Int8Kernels = table(plain::multiply);

const fn table(multiply: Multiply) -> Int8Kernels {
    Int8Kernels { multiply, to_scores, softmax: Some(softmax), pack_weights, add, coding: &CODING }
}

/// The table of this machine without tiles.
pub(super) fn without_tiles() -> &'static Int8Kernels {
    if dots::has_quads() { &QUADS } else { &PLAIN }
}

static CODING: Coding = Coding { add_row, size, encode, dot, turn_rows, turn_columns };

/// A loop of [`coding`] compiled for these vectors.
macro_rules! compiled {
    ($name:ident, ($($arg:ident: $type:ty),*) $(-> $result:ty)?) => {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
        unsafe fn $name($($arg: $type),*) $(-> $result)? {
            int8_codes::$name($($arg),*)
        }
    };
}
compiled!(add_row, (sums: &mut [f64], row: &[f32]));
compiled!(size, (x: &[f32], mean: &[f32]) -> f32);
compiled!(dot, (x: &[f32], y: &[f32]) -> f64);

/// Like [`int8_codes::encode`], but multiplies by the inverse of the scale: a division takes ten times as long. The
/// division decides only if the product, whose error is at most 127 2^-22, is so near to a half that both could round
/// differently.
///
/// # Safety
/// The extents are checked by [`Coding`].
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn encode(x: &[f32], mean: &[f32], scale: f32, to: &mut [i8]) {
    const NEAR: f32 = 0.5 - 1e-4;
    let inverse = 1.0 / scale;
    // A subnormal scale, or one whose inverse is.
    if !(scale.is_normal() && inverse.is_normal()) {
        return int8_codes::encode(x, mean, scale, to);
    }
    let (by, inverse) = (_mm512_set1_ps(scale), _mm512_set1_ps(inverse));
    let (most, near) = (_mm512_set1_ps(127.0), _mm512_set1_ps(NEAR));
    // Packing leaves dword 4 v + l of the result in dword 4 l + v.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for at in (0..x.len()).step_by(BYTES) {
        let mut codes = [_mm512_setzero_si512(); 4];
        for (v, codes) in codes.iter_mut().enumerate() {
            let left = (x.len() - at).saturating_sub(16 * v).min(16);
            let mask = (1u32 << left).wrapping_sub(1) as __mmask16;
            let (x, mean) = (x.as_ptr().wrapping_add(at + 16 * v), mean.as_ptr().wrapping_add(at + 16 * v));
            // SAFETY: the mask keeps to the extents.
            let own = unsafe { _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x), _mm512_maskz_loadu_ps(mask, mean)) };
            // If the difference overflowed, it is the largest of all: 127 either way.
            let mut q = _mm512_mul_ps(own, inverse);
            let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(q);
            let off = _mm512_abs_ps(_mm512_sub_ps(q, whole));
            if _mm512_cmp_ps_mask::<_CMP_GT_OQ>(off, near) != 0 {
                q = _mm512_div_ps(own, by);
            }
            let q = _mm512_max_ps(_mm512_min_ps(q, most), _mm512_sub_ps(_mm512_setzero_ps(), most));
            *codes = _mm512_cvtps_epi32(q);
        }
        let halves = [_mm512_packs_epi32(codes[0], codes[1]), _mm512_packs_epi32(codes[2], codes[3])];
        let bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(halves[0], halves[1]));
        let left = (x.len() - at).min(BYTES) as u32;
        // SAFETY: the mask keeps to the extents.
        unsafe { _mm512_mask_storeu_epi8(to.as_mut_ptr().add(at), u64::MAX >> (BYTES as u32 - left), bytes) };
    }
}

/// # Safety
/// The extents are checked by [`Coding`].
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn turn_rows(rows: &[&[i8]], tiles: usize, to: &mut [f32]) {
    for tile in 0..tiles {
        let mut lines = [_mm512_setzero_si512(); 16];
        for (line, row) in lines.iter_mut().zip(rows) {
            // SAFETY: rows have `tiles` times 64 bytes (contract).
            *line = unsafe { _mm512_loadu_si512(row.as_ptr().add(tile * BYTES).cast()) };
        }
        // SAFETY: AVX-512 is present; `to` has room for the tile (contract).
        unsafe {
            for (i, x) in turned(&lines).into_iter().enumerate() {
                _mm512_storeu_si512(to.as_mut_ptr().add(tile * SLOTS + i * 16).cast(), x);
            }
        }
    }
}

/// # Safety
/// The extents are checked by [`Coding`].
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn turn_columns(codes: &[i8], row: usize, groups: usize, to: *mut f32, pitch: usize) {
    for column in (0..groups).step_by(4) {
        let mut joined = [[_mm512_setzero_si512(); 16]; 4];
        #[allow(clippy::needless_range_loop)] // a column of four squares
        for j in 0..16 {
            // SAFETY: rows are a multiple of 64 long, so 64 columns can be read (contract).
            let [a, b, c, d] = [0, 1, 2, 3]
                .map(|i| unsafe { _mm512_loadu_si512(codes.as_ptr().add((i * 16 + j) * row + column * 16).cast()) });
            let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
            joined[0][j] = _mm512_unpacklo_epi16(ab, cd);
            joined[1][j] = _mm512_unpackhi_epi16(ab, cd);
            let (ab, cd) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
            joined[2][j] = _mm512_unpacklo_epi16(ab, cd);
            joined[3][j] = _mm512_unpackhi_epi16(ab, cd);
        }
        // Dword m of block L of the k-th: column 16 L + 4 k + m.
        for (k, square) in joined.iter().enumerate() {
            // SAFETY: groups below `groups` have room (contract).
            unsafe {
                for (i, x) in turned(square).into_iter().enumerate().take((groups - column) * 4) {
                    let at = (column + i / 4) * pitch + (4 * k + i % 4) * 16;
                    _mm512_storeu_si512(to.add(at).cast(), x);
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
unsafe fn add(o: &mut [f32], integers: &[f32], factor: f32, alpha: &[f32]) {
    let factor = _mm512_set1_ps(factor);
    for (o, x) in o.chunks_exact_mut(alpha.len()).zip(integers.chunks_exact(alpha.len())) {
        for at in (0..alpha.len()).step_by(16) {
            // SAFETY: all have whole vectors.
            unsafe {
                let x = _mm512_cvtepi32_ps(_mm512_loadu_si512(x.as_ptr().add(at).cast()));
                let to = o.as_mut_ptr().add(at);
                let before = _mm512_mul_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(alpha.as_ptr().add(at)));
                _mm512_storeu_ps(to, _mm512_fmadd_ps(x, factor, before));
            }
        }
    }
}

/// Codes of weights, 0 to 127.
#[inline(always)]
unsafe fn code(p: __m512) -> __m512i {
    // SAFETY: AVX-512 is present (contract of the callers).
    unsafe { _mm512_cvtps_epi32(_mm512_mul_ps(p, _mm512_set1_ps(127.0))) }
}

/// Four vectors of codes in the bytes of one: the first has them in the lowest bytes, the others are moved there.
#[inline(always)]
unsafe fn join(c: [__m512i; 4]) -> __m512i {
    // SAFETY: AVX-512 is present (contract of the callers).
    unsafe {
        // Byte 0 of each dword, to wherever the mask lets it.
        let lowest = _mm512_set_epi32(12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0);
        let lowest = _mm512_mullo_epi32(lowest, _mm512_set1_epi32(0x0101_0101));
        let two = _mm512_mask_shuffle_epi8(c[0], 0x2222_2222_2222_2222, c[1], lowest);
        let three = _mm512_mask_shuffle_epi8(two, 0x4444_4444_4444_4444, c[2], lowest);
        _mm512_mask_shuffle_epi8(three, 0x8888_8888_8888_8888, c[3], lowest)
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

/// Coefficients of 2^r: the error of degree 3 stays below the rounding to codes.
const CUBIC: [f32; 4] = [EXP2_POLY[0][0], EXP2_POLY[0][1], EXP2_POLY[0][2], EXP2_POLY[0][3]];
/// Coefficients of 127 2^r.
const CODES: [f32; 4] = [127.0 * CUBIC[0], 127.0 * CUBIC[1], 127.0 * CUBIC[2], 127.0 * CUBIC[3]];
/// Above this many powers of two, the error of a fused subtraction would be visible next to the rounding to codes: 2^12
/// 2^-24 ln 2.
const FUSED_LIMIT: f32 = 4096.0;

/// One step of the online softmax, with P in codes packed as the columns of the second product.
///
/// # Safety
/// The extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax(
    args: &mut SoftmaxArgs<'_>,
    integers: Option<&Integers<'_>>,
    out: *mut f32,
    pitch: usize,
) -> SoftmaxStats {
    let mut stats = SoftmaxStats::default();
    // SAFETY: keys of the ranges are inside.
    unsafe {
        if let Some(integers) = integers
            && args.stride == 64
            && softmax_of_all(args, integers, out, pitch, &mut stats)
        {
            return stats;
        }
        for z in 0..args.stride / 16 {
            let to = out.add(z * pitch);
            if let Some(integers) = integers {
                let (start, stop) = args.ranges[z];
                for key in start..stop.max(start) {
                    let at = args.s.as_mut_ptr().add(key * args.stride + z * 16);
                    let x = _mm512_cvtepi32_ps(_mm512_loadu_si512(at.cast()));
                    _mm512_storeu_ps(at, integers.number(x, key, z));
                }
            }
            let Some(begun) = begin::<Avx512>(args, z, &mut stats) else { continue };
            let sum = match args.exp {
                ExpKind::Poly(3) => weigh(args, z, begun.shift, &CUBIC, to),
                _ => weigh(args, z, begun.shift, &EXP2_POLY[2], to),
            };
            end::<Avx512>(args, z, begun, sum, &mut stats);
        }
    }
    stats
}

impl Integers<'_> {
    /// # Safety
    /// AVX-512 is present; the key is inside.
    #[inline(always)]
    unsafe fn key(&self, key: usize) -> __m512 {
        // SAFETY: as promised.
        unsafe { _mm512_set1_ps(*self.keys.as_ptr().add(key / 16 * self.pitch + self.at + key % 16)) }
    }
    /// # Safety
    /// As for `key`; lanes of vector `z` are inside.
    #[inline(always)]
    unsafe fn number(&self, x: __m512, key: usize, z: usize) -> __m512 {
        // SAFETY: as promised.
        unsafe {
            let lane = _mm512_loadu_ps(self.lane.as_ptr().add(z * 16));
            _mm512_fmadd_ps(_mm512_mul_ps(x, self.key(key)), lane, _mm512_loadu_ps(self.bias.as_ptr().add(z * 16)))
        }
    }
}

/// Four vectors of lanes whose scores are integers and which see the same whole tiles of keys, key by key: rows of scores
/// are then read as they lie. The maximum is that of integers in each 64 keys, which share a scale; scale, maximum and
/// logarithm are one multiplication and addition. False, and nothing done, where lanes see different keys, or scores are
/// too large to be taken apart so.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax_of_all(
    args: &mut SoftmaxArgs<'_>,
    integers: &Integers<'_>,
    out: *mut f32,
    pitch: usize,
    stats: &mut SoftmaxStats,
) -> bool {
    const ALL: usize = 4;
    let (start, stop) = args.ranges[0];
    let whole = start < stop && start.is_multiple_of(BYTES) && stop.is_multiple_of(BYTES);
    let alike = args.ranges[..ALL].iter().chain(&args.inner[..ALL]).all(|&r| r == (start, stop));
    if !whole || !alike || args.exp != ExpKind::Poly(3) {
        return false;
    }
    // SAFETY: keys of the range are inside (caller).
    unsafe {
        let s = args.s.as_ptr();
        let mut highest = [_mm512_set1_ps(f32::NEG_INFINITY); ALL];
        for tile in start / BYTES..stop / BYTES {
            let mut top = [[_mm512_set1_epi32(i32::MIN); 2]; ALL];
            for key in (tile * BYTES..(tile + 1) * BYTES).step_by(2) {
                for (z, top) in top.iter_mut().enumerate() {
                    for (i, top) in top.iter_mut().enumerate() {
                        let at = s.add((key + i) * 64 + z * 16);
                        *top = _mm512_max_epi32(*top, _mm512_loadu_si512(at.cast()));
                    }
                }
            }
            for (z, highest) in highest.iter_mut().enumerate() {
                let top = _mm512_cvtepi32_ps(_mm512_max_epi32(top[z][0], top[z][1]));
                *highest = _mm512_max_ps(*highest, integers.number(top, tile * BYTES, z));
            }
        }
        let log2_e = _mm512_set1_ps(std::f32::consts::LOG2_E * args.scale);
        let limit = _mm512_set1_ps(FUSED_LIMIT);
        let near = |x| _mm512_cmp_ps_mask::<_CMP_LE_OQ>(_mm512_abs_ps(_mm512_mul_ps(x, log2_e)), limit) == 0xffff;
        let bias = |z: usize| _mm512_loadu_ps(integers.bias.as_ptr().add(z * 16));
        let top = |z: usize| _mm512_max_ps(_mm512_loadu_ps(args.m.as_ptr().add(z * 16)), highest[z]);
        if !(0..ALL).all(|z| near(bias(z)) && near(top(z))) {
            return false;
        }
        let mut begun = [None, None, None, None];
        let (mut shift, mut lane) = ([_mm512_setzero_ps(); ALL], [_mm512_setzero_ps(); ALL]);
        for z in 0..ALL {
            begun[z] = settle::<Avx512>(args, z, Some(highest[z]), stats);
            let Some(begun) = &begun[z] else { continue };
            shift[z] = _mm512_mul_ps(_mm512_sub_ps(bias(z), begun.shift), log2_e);
            lane[z] = _mm512_mul_ps(_mm512_loadu_ps(integers.lane.as_ptr().add(z * 16)), log2_e);
        }
        let mut sums = [_mm512_setzero_ps(); ALL];
        for tile in start / BYTES..stop / BYTES {
            let key = integers.key(tile * BYTES);
            let factor = lane.map(|lane| _mm512_mul_ps(lane, key));
            for j in 0..16 {
                for z in 0..ALL {
                    let mut codes = [_mm512_setzero_si512(); 4];
                    for (i, code) in codes.iter_mut().enumerate() {
                        let at = s.add((tile * BYTES + i * 16 + j) * 64 + z * 16);
                        let x = _mm512_cvtepi32_ps(_mm512_loadu_si512(at.cast()));
                        let p = Avx512::exp2(_mm512_fmadd_ps(x, factor[z], shift[z]), &CODES);
                        sums[z] = _mm512_add_ps(sums[z], p);
                        *code = _mm512_cvtps_epi32(p);
                    }
                    _mm512_storeu_si512(out.add(z * pitch + tile * SLOTS + j * 16).cast(), join(codes));
                }
            }
        }
        for (z, begun) in begun.into_iter().enumerate() {
            if let Some(begun) = begun {
                end::<Avx512>(args, z, begun, _mm512_mul_ps(sums[z], _mm512_set1_ps(1.0 / 127.0)), stats);
            }
        }
    }
    true
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
