//! The element-wise work of the gated delta rule between products on tiles, with AVX-512.

use super::Simd;
use super::algorithms::{EXP2_NATIVE, SimdElement};
use super::amx::{join, nearest, rounded};
use super::avx512::Avx512;
use super::delta::{DeltaGates, DeltaKernels, DeltaParts, DeltaValues, HALF, SLICE, TOKENS, tile};
use super::matrix::{DEPTH, GROUP, SLOTS};
use fulgurite_core::DType;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::Range;

/// For f32, f16 and bf16.
pub(super) static DELTA: [DeltaKernels; 3] = [
    table::<f32, 3, 3, 3, 3>(DType::F32),
    table::<f16, 2, 2, 2, 2>(DType::F16),
    table::<bf16, 1, 2, 2, 1>(DType::Bf16),
];

const fn table<T: DeltaElement, const KEYS: usize, const STATE: usize, const INVERSE: usize, const WEIGHTS: usize>(
    dtype: DType,
) -> DeltaKernels {
    DeltaKernels {
        dtype,
        parts: DeltaParts { keys: KEYS, state: STATE, inverse: INVERSE, weights: WEIGHTS },
        keys: keys::<T, KEYS>,
        transpose: transpose::<KEYS>,
        gates: gates::<INVERSE, WEIGHTS>,
        fade: fade::<STATE>,
        residual: residual::<T, STATE>,
        corrected: corrected::<STATE, WEIGHTS>,
        outputs: outputs::<T>,
    }
}

/// An element of a tensor, 16 or fewer at a time.
trait DeltaElement: SimdElement {
    /// Elements where the mask holds, and zeros elsewhere.
    ///
    /// # Safety
    /// AVX-512 is present, and the elements are valid.
    unsafe fn load(p: *const Self, mask: __mmask16) -> __m512;

    /// Two vectors side by side, rounded, as far as the masks go.
    ///
    /// # Safety
    /// AVX-512 is present, and the elements are valid.
    unsafe fn store(p: *mut Self, x: [__m512; 2], masks: [__mmask16; 2], stream: bool);
}

impl DeltaElement for f32 {
    #[inline(always)]
    unsafe fn load(p: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_maskz_loadu_ps(mask, p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: [__m512; 2], masks: [__mmask16; 2], stream: bool) {
        // SAFETY: the caller's; a streamed vector is whole and on a line.
        unsafe {
            if stream && masks == [0xffff; 2] && p.addr().is_multiple_of(64) {
                _mm512_stream_ps(p, x[0]);
                return _mm512_stream_ps(p.add(16), x[1]);
            }
            _mm512_mask_storeu_ps(p, masks[0], x[0]);
            _mm512_mask_storeu_ps(p.wrapping_add(16), masks[1], x[1]);
        }
    }
}

/// The low and high halves of a vector as the 32 elements of a slice.
///
/// # Safety
/// AVX-512 is present, and the elements are valid.
#[inline(always)]
unsafe fn store_halves(p: *mut u16, x: __m512i, masks: [__mmask16; 2], stream: bool) {
    // SAFETY: the caller's; a streamed vector is whole and on a line.
    unsafe {
        if stream && masks == [0xffff; 2] && p.addr().is_multiple_of(64) {
            return _mm512_stream_si512(p.cast(), x);
        }
        _mm512_mask_storeu_epi16(p.cast(), u32::from(masks[0]) | u32::from(masks[1]) << 16, x);
    }
}

impl DeltaElement for f16 {
    #[inline(always)]
    unsafe fn load(p: *const f16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f16, x: [__m512; 2], masks: [__mmask16; 2], stream: bool) {
        // SAFETY: the caller's.
        unsafe {
            let low = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]);
            let high = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]);
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            store_halves(p.cast(), both, masks, stream);
        }
    }
}

impl DeltaElement for bf16 {
    #[inline(always)]
    unsafe fn load(p: *const bf16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store(p: *mut bf16, x: [__m512; 2], masks: [__mmask16; 2], stream: bool) {
        // SAFETY: the caller's.
        unsafe {
            let upper = _mm512_loadu_si512(UPPER.as_ptr().cast());
            let both = _mm512_permutex2var_epi16(nearest(x[0]), upper, nearest(x[1]));
            store_halves(p.cast(), both, masks, stream);
        }
    }
}

/// The upper halves of two vectors, in order.
const UPPER: [u16; 32] = {
    let mut words = [0; 32];
    let mut i = 0;
    while i < 32 {
        words[i] = 2 * i as u16 + 1;
        i += 1;
    }
    words
};

/// Two vectors as a row of slots, in parts as [`split`](super::amx) makes them; a single part is rounded. Closures would
/// not be compiled for this instruction set wherever they are not inlined, so there are none.
///
/// # Safety
/// AVX-512 is present, and there is room for the parts at `to`.
#[inline(always)]
unsafe fn put<const PARTS: usize>(to: *mut f32, x: __m512, y: __m512) {
    // SAFETY: the caller's.
    unsafe {
        let (mut x, mut y) = (x, y);
        for part in 0..PARTS {
            let last = part + 1 == PARTS && PARTS > 1;
            let (first, second) =
                if last { (_mm512_castps_si512(x), _mm512_castps_si512(y)) } else { (rounded(x), rounded(y)) };
            _mm512_storeu_si512(to.add(part * SLOTS).cast(), join(first, second));
            if part + 1 < PARTS {
                (x, y) = (rest(x, first), rest(y, second));
            }
        }
    }
}

/// The remainder of a number after a part, exactly.
///
/// # Safety
/// AVX-512 is present.
#[inline(always)]
unsafe fn rest(x: __m512, part: __m512i) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let upper = _mm512_and_si512(part, _mm512_set1_epi32(0xffff_0000u32 as i32));
        _mm512_sub_ps(x, _mm512_castsi512_ps(upper))
    }
}

/// The lanes of a group that are below `n` columns.
#[inline(always)]
fn lanes(n: usize, group: usize) -> __mmask16 {
    let left = n.saturating_sub(group * GROUP).min(GROUP);
    ((1u32 << left) - 1) as __mmask16
}

/// Numbers this small or smaller become zero: their products would be subnormal, which takes hundreds of cycles. One of
/// these exponent bits is set from 2^-95 up.
const LARGE_BITS: i32 = 0x7000_0000;

/// # Safety
/// AVX-512 is present.
#[inline(always)]
unsafe fn large(x: __m512) -> __mmask16 {
    // SAFETY: the caller's.
    unsafe { _mm512_test_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(LARGE_BITS)) }
}

/// # Safety
/// AVX-512 is present; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn keys<T: DeltaElement, const PARTS: usize>(
    src: *const u8,
    row: usize,
    size: [usize; 2],
    eps: Option<f32>,
    dst: *mut f32,
    depth: usize,
) {
    // SAFETY: passed on.
    unsafe {
        if size[0] == TOKENS && size[1] == depth * DEPTH {
            keys_in::<T, PARTS, true>(src.cast(), row, size, eps, dst, depth);
        } else {
            keys_in::<T, PARTS, false>(src.cast(), row, size, eps, dst, depth);
        }
    }
}

/// FULL: all rows and columns exist; otherwise each vector has its mask.
///
/// # Safety
/// As for [`keys`].
#[inline(always)]
unsafe fn keys_in<T: DeltaElement, const PARTS: usize, const FULL: bool>(
    src: *const T,
    row: usize,
    [rows, n]: [usize; 2],
    eps: Option<f32>,
    dst: *mut f32,
    depth: usize,
) {
    // SAFETY: inside the extents; rows and columns past the last are not read.
    unsafe {
        for group in 0..TOKENS / GROUP {
            let used = if FULL { GROUP } else { rows.saturating_sub(group * GROUP).min(GROUP) };
            let rows = src.wrapping_add(group * GROUP * row);
            let mut factors = [1.0f32; GROUP];
            if let Some(eps) = eps {
                let mut squares = [_mm512_setzero_ps(); GROUP];
                for (r, squares) in squares.iter_mut().enumerate().take(used) {
                    for column in (0..n).step_by(GROUP) {
                        let mask = if FULL { 0xffff } else { lanes(n - column, 0) };
                        let x = T::load(rows.add(r * row + column), mask);
                        *squares = _mm512_fmadd_ps(x, x, *squares);
                    }
                }
                let lengths = _mm512_sqrt_ps(_mm512_add_ps(Avx512::sums(&squares), _mm512_set1_ps(eps)));
                _mm512_storeu_ps(factors.as_mut_ptr(), _mm512_div_ps(_mm512_set1_ps(1.0), lengths));
            }
            for (r, &factor) in factors.iter().enumerate() {
                let factor = _mm512_set1_ps(factor);
                for k in 0..depth {
                    let from = rows.wrapping_add(r * row + k * DEPTH);
                    let left = if r < used { n - k * DEPTH } else { 0 };
                    let masks = if FULL { [0xffff; 2] } else { [lanes(left, 0), lanes(left, 1)] };
                    let x = _mm512_mul_ps(T::load(from, masks[0]), factor);
                    let y = _mm512_mul_ps(T::load(from.wrapping_add(GROUP), masks[1]), factor);
                    put::<PARTS>(dst.add((group * depth + k) * tile(PARTS) + r * GROUP), x, y);
                }
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn transpose<const PARTS: usize>(
    src: *const f32,
    depth: usize,
    groups: usize,
    columns: *mut f32,
    rows: *mut f32,
) {
    // SAFETY: inside the extents.
    unsafe {
        for at in (0..TOKENS / GROUP * depth * PARTS).map(|i| i * SLOTS) {
            Avx512::transpose(src.add(at), GROUP, columns.add(at), GROUP);
        }
        let mut slots = [[0.0f32; SLOTS]; 2];
        for half in 0..2 {
            for (k, part) in (0..depth * PARTS).map(|i| (i / PARTS, i % PARTS)) {
                let from = src.add((2 * half * depth + k) * tile(PARTS) + part * SLOTS);
                for j in (0..SLOTS).step_by(GROUP) {
                    // Tokens j and j + 16: lower halves are elements of one group of columns, upper halves of the next.
                    let x = _mm512_loadu_si512(from.add(j).cast());
                    let y = _mm512_loadu_si512(from.add(depth * tile(PARTS) + j).cast());
                    let low = _mm512_mask_blend_epi16(0xaaaa_aaaa, x, _mm512_slli_epi32::<16>(y));
                    _mm512_storeu_si512(slots[0].as_mut_ptr().add(j).cast(), low);
                    _mm512_storeu_si512(slots[1].as_mut_ptr().add(j).cast(), join(x, y));
                }
                for (i, slots) in slots.iter().enumerate().take(groups - 2 * k) {
                    let to = rows.add(((2 * k + i) * 2 + half) * tile(PARTS) + part * SLOTS);
                    Avx512::transpose(slots.as_ptr(), GROUP, to, GROUP);
                }
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn gates<const INVERSE: usize, const WEIGHTS: usize>(x: &mut DeltaGates<'_>) {
    // SAFETY: inside the extents.
    unsafe {
        let mut decay = [0.0f32; TOKENS];
        for i in (0..TOKENS).step_by(GROUP) {
            let t = _mm512_mul_ps(_mm512_loadu_ps(x.g.as_ptr().add(i)), _mm512_set1_ps(std::f32::consts::LOG2_E));
            _mm512_storeu_ps(decay.as_mut_ptr().add(i), Avx512::exp2(t, &EXP2_NATIVE));
        }
        let mut head = 1.0f32;
        for (to, decay) in x.head.iter_mut().zip(decay) {
            head *= decay;
            head = if head < 1e-30 { 0.0 } else { head };
            *to = head;
        }
        let mut row = [_mm512_setzero_ps(); 4];
        gate_rows::<INVERSE, WEIGHTS, 0>(x, &decay, &mut row);
        gate_rows::<INVERSE, WEIGHTS, 1>(x, &decay, &mut row);
        gate_rows::<INVERSE, WEIGHTS, 2>(x, &decay, &mut row);
        gate_rows::<INVERSE, WEIGHTS, 3>(x, &decay, &mut row);
        for (c, &row) in row.iter().enumerate() {
            _mm512_storeu_ps(x.tail.as_mut_ptr().add(c * GROUP), row);
        }
        for half in 0..2 {
            let l = x.l.as_ptr().add(half * HALF * (TOKENS + 1));
            let beta = x.beta.as_ptr().add(half * HALF);
            let beta = [_mm512_loadu_ps(beta), _mm512_loadu_ps(beta.add(GROUP))];
            let to = x.inverse.as_mut_ptr().add(half * 2 * tile(INVERSE));
            invert::<INVERSE>(l, beta, to);
        }
    }
}

/// A group of rows of G and of the matrix that it weighs: every column decays, and a new one starts with 1.
///
/// # Safety
/// As for [`gates`].
#[inline(always)]
unsafe fn gate_rows<const INVERSE: usize, const WEIGHTS: usize, const G: usize>(
    x: &mut DeltaGates<'_>,
    decay: &[f32; TOKENS],
    row: &mut [__m512; 4],
) {
    // SAFETY: inside the extents. Above the diagonal G is zero, and the products that were there are finite.
    unsafe {
        let half = G / 2;
        for r in 0..GROUP {
            let i = G * GROUP + r;
            let fade = _mm512_set1_ps(decay[i]);
            for row in row.iter_mut().take(G + 1) {
                *row = _mm512_mul_ps(*row, fade);
                *row = _mm512_maskz_mov_ps(large(*row), *row);
            }
            row[G] = _mm512_mask_mov_ps(row[G], 1 << r, _mm512_set1_ps(1.0));
            let (kk, qk) = (x.kk.as_ptr().add(i * TOKENS), x.qk.as_ptr().add(i * TOKENS));
            let beta = _mm512_set1_ps(x.beta[i]);
            let l = x.l.as_mut_ptr().add(i * TOKENS);
            _mm512_storeu_ps(l.add(2 * half * GROUP), _mm512_mul_ps(times(kk, 2 * half, row), beta));
            if G % 2 == 1 {
                _mm512_storeu_ps(l.add(G * GROUP), _mm512_mul_ps(times(kk, G, row), beta));
            }
            if half == 1 {
                let at = G % 2 * tile(INVERSE) + r * GROUP;
                put::<INVERSE>(x.between.as_mut_ptr().add(at), times(kk, 0, row), times(kk, 1, row));
            }
            let scale = _mm512_set1_ps(x.scale);
            let weights = x.weights.as_mut_ptr().add(G * 2 * tile(WEIGHTS) + r * GROUP);
            for k in 0..=half {
                let (first, second) = (times(qk, 2 * k, row), times(qk, 2 * k + 1, row));
                let to = weights.add(k * tile(WEIGHTS));
                put::<WEIGHTS>(to, _mm512_mul_ps(first, scale), _mm512_mul_ps(second, scale));
            }
        }
    }
}

/// A vector of a row of products, times the decays.
///
/// # Safety
/// AVX-512 is present; a row of [`TOKENS`] at `from`.
#[inline(always)]
unsafe fn times(from: *const f32, c: usize, row: &[__m512; 4]) -> __m512 {
    // SAFETY: inside the extents.
    unsafe { _mm512_mul_ps(_mm512_loadu_ps(from.add(c * GROUP)), row[c]) }
}

/// Solves (1 + L) X = B in place for the rows of X, L strictly lower and [`GROUP`] wide.
///
/// # Safety
/// AVX-512 is present; [`GROUP`] rows of L, [`TOKENS`] apart.
#[inline(always)]
unsafe fn substitute(l: *const f32, rows: &mut [__m512; GROUP]) {
    // SAFETY: inside the extents.
    unsafe {
        for i in 1..GROUP {
            let mut sum = rows[i];
            for (j, &row) in rows.iter().enumerate().take(i) {
                sum = _mm512_fnmadd_ps(_mm512_set1_ps(*l.add(i * TOKENS + j)), row, sum);
            }
            rows[i] = sum;
        }
    }
}

/// The inverse of 1 + L, columns times `beta`, as rows of A: squares on the diagonal, then the one below them.
///
/// # Safety
/// AVX-512 is present; [`HALF`] rows of L, [`TOKENS`] apart, and room for two tiles at `to`.
#[inline(always)]
unsafe fn invert<const PARTS: usize>(l: *const f32, beta: [__m512; 2], to: *mut f32) {
    // SAFETY: inside the extents.
    unsafe {
        let mut unit = [_mm512_setzero_ps(); GROUP];
        for (i, row) in unit.iter_mut().enumerate() {
            *row = _mm512_maskz_mov_ps(1 << i, _mm512_set1_ps(1.0));
        }
        let mut first = unit;
        substitute(l, &mut first);
        let below = l.add(GROUP * TOKENS);
        let mut lower = [_mm512_setzero_ps(); GROUP];
        for (i, lower) in lower.iter_mut().enumerate() {
            for (j, &row) in first.iter().enumerate() {
                *lower = _mm512_fnmadd_ps(_mm512_set1_ps(*below.add(i * TOKENS + j)), row, *lower);
            }
        }
        for (i, &row) in first.iter().enumerate() {
            put::<PARTS>(to.add(i * GROUP), _mm512_mul_ps(row, beta[0]), _mm512_setzero_ps());
        }
        let mut second = unit;
        substitute(below.add(GROUP), &mut second);
        substitute(below.add(GROUP), &mut lower);
        for i in 0..GROUP {
            let (x, y) = (_mm512_mul_ps(lower[i], beta[0]), _mm512_mul_ps(second[i], beta[1]));
            put::<PARTS>(to.add(tile(PARTS) + i * GROUP), x, y);
        }
    }
}

/// # Safety
/// AVX-512 is present; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn fade<const PARTS: usize>(
    s: *mut f32,
    stride: usize,
    rows: usize,
    groups: usize,
    tiles: Range<usize>,
    factor: f32,
    dst: *mut f32,
) {
    let depth = rows.div_ceil(DEPTH);
    // SAFETY: inside the extents; rows past the last are not touched.
    unsafe {
        let factor = _mm512_set1_ps(factor);
        for k in tiles {
            for j in 0..GROUP {
                for group in 0..groups {
                    let mut x = [_mm512_setzero_ps(); 2];
                    for (i, x) in x.iter_mut().enumerate() {
                        let r = k * DEPTH + i * GROUP + j;
                        if r < rows {
                            let at = s.add(r * stride + group * GROUP);
                            *x = _mm512_loadu_ps(at);
                            _mm512_storeu_ps(at, _mm512_maskz_mul_ps(large(*x), *x, factor));
                        }
                    }
                    put::<PARTS>(dst.add((group * depth + k) * tile(PARTS) + j * GROUP), x[0], x[1]);
                }
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn residual<T: DeltaElement, const PARTS: usize>(
    v: *const u8,
    row: usize,
    size: [usize; 2],
    from: [*const f32; 2],
    factor: *const f32,
    groups: usize,
    dst: *mut f32,
) {
    let v = v.cast();
    // SAFETY: passed on.
    unsafe {
        match (size[0] == HALF && size[1] == groups * GROUP, from[1].is_null()) {
            (true, true) => residual_in::<T, PARTS, true, false>(v, row, size, from, factor, groups, dst),
            (true, false) => residual_in::<T, PARTS, true, true>(v, row, size, from, factor, groups, dst),
            (false, true) => residual_in::<T, PARTS, false, false>(v, row, size, from, factor, groups, dst),
            (false, false) => residual_in::<T, PARTS, false, true>(v, row, size, from, factor, groups, dst),
        }
    }
}

/// FULL: all rows and columns exist. LESS: there is something to subtract.
///
/// # Safety
/// As for [`residual`].
#[inline(always)]
unsafe fn residual_in<T: DeltaElement, const PARTS: usize, const FULL: bool, const LESS: bool>(
    v: *const T,
    row: usize,
    [rows, n]: [usize; 2],
    [u, less]: [*const f32; 2],
    factor: *const f32,
    groups: usize,
    dst: *mut f32,
) {
    // SAFETY: inside the extents; rows and columns past the last are not read.
    unsafe {
        for group in 0..groups {
            for j in 0..GROUP {
                let mut x = [_mm512_setzero_ps(); 2];
                for (i, x) in x.iter_mut().enumerate() {
                    let r = i * GROUP + j;
                    let mask = match (FULL, r < rows) {
                        (true, _) => 0xffff,
                        (_, true) => lanes(n, group),
                        _ => 0,
                    };
                    let v = T::load(v.wrapping_add(r * row + group * GROUP), mask);
                    let at = r * SLICE + group * GROUP;
                    *x = _mm512_fnmadd_ps(_mm512_set1_ps(*factor.add(r)), _mm512_loadu_ps(u.add(at)), v);
                    if LESS {
                        *x = _mm512_sub_ps(*x, _mm512_loadu_ps(less.add(at)));
                    }
                }
                put::<PARTS>(dst.add(group * tile(PARTS) + j * GROUP), x[0], x[1]);
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn corrected<const STATE: usize, const WEIGHTS: usize>(v: &mut DeltaValues<'_>) {
    // SAFETY: inside the extents.
    unsafe {
        for j in 0..GROUP {
            for group in 0..v.groups {
                let from = v.values.as_ptr().add(j * SLICE + group * GROUP);
                let (x, y) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(GROUP * SLICE)));
                let (column, line) = (group * 2 + v.half, j * GROUP);
                let to = v.whole.as_mut_ptr().add(column * tile(STATE) + line);
                if v.half == 0 {
                    put::<STATE>(to, x, y);
                } else {
                    put::<WEIGHTS>(to, x, y);
                }
                let tail = v.tail.as_ptr().add(j);
                let x = _mm512_mul_ps(x, _mm512_set1_ps(*tail));
                let y = _mm512_mul_ps(y, _mm512_set1_ps(*tail.add(GROUP)));
                put::<STATE>(v.faded.as_mut_ptr().add(column * tile(STATE) + line), x, y);
            }
        }
    }
}

/// # Safety
/// AVX-512 is present; the extents are checked by the table, those of `to` by the caller.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn outputs<T: DeltaElement>(
    [x, y]: [*const f32; 2],
    factor: *const f32,
    to: *mut u8,
    row: usize,
    [rows, n]: [usize; 2],
    stream: bool,
) {
    let to: *mut T = to.cast();
    // SAFETY: inside the extents; columns past the last are not touched.
    unsafe {
        for r in 0..rows {
            let factor = _mm512_set1_ps(*factor.add(r));
            for column in (0..n).step_by(2 * GROUP) {
                let masks = [lanes(n - column, 0), lanes(n - column, 1)];
                let mut o = [factor; 2];
                for (c, o) in o.iter_mut().enumerate() {
                    let at = r * SLICE + column + c * GROUP;
                    *o = _mm512_fmadd_ps(factor, _mm512_loadu_ps(x.add(at)), _mm512_loadu_ps(y.add(at)));
                }
                T::store(to.add(r * row + column), o, masks, stream);
            }
        }
    }
}
