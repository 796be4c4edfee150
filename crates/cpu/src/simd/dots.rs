//! Products on panels with vectors, for machines without tiles: bf16 in pairs (AVX512-BF16), bytes in fours (VNNI).
//!
//! These instructions multiply slots of panels: sixteen adjacent slots of B are a vector, and a slot of A is multiplied
//! with all of them. Eight rows of A and two vectors of B are summed at a time, in sixteen registers.

use super::algorithms::Ahead;
use super::avx512::{Avx512, TABLE};
use super::kernels::Kernels;
use super::matrix::{Hold, MatrixKernels, SLOTS};
use std::arch::x86_64::*;

/// The vectors of AVX-512, with products of bf16 in pairs.
pub(super) static KERNELS: Kernels = Kernels { pairs: Some(&PAIRS), ..TABLE };

static PAIRS: MatrixKernels = MatrixKernels {
    hold: || Hold::new(|| ()),
    multiply_1_1: multiply_pairs::<1, 1, 1>,
    multiply_1_1_of_2: multiply_pairs::<1, 1, 2>,
    multiply_1_2: multiply_pairs::<1, 2, 2>,
    multiply_2_2: multiply_pairs::<2, 2, 2>,
    multiply_3_3: multiply_pairs::<3, 3, 3>,
    pipeline: None,
    block_max: None,
    ..super::amx::TABLE_OF_TILES
};

pub(super) fn has_pairs() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

pub(super) fn has_quads() -> bool {
    is_x86_feature_detected!("avx512vnni")
}

/// Rows of A in a block.
const ROWS: usize = 8;

/// The meaning of a slot, and its multiplication. Sums have 32 bits in both cases.
///
/// # Safety
/// As for [`Simd`](super::Simd).
unsafe trait Dot {
    /// Prepares a vector of B for the instruction.
    unsafe fn prepare(b: __m512i) -> __m512i;
    unsafe fn dot(sum: __m512i, b: __m512i, a: __m512i) -> __m512i;
    /// The initial value of the sums of a row of A of `k` tiles.
    unsafe fn start(a: *const f32, k: usize) -> __m512i;
}

struct Pairs;

// SAFETY: nothing but arithmetic.
unsafe impl Dot for Pairs {
    #[inline(always)]
    unsafe fn prepare(b: __m512i) -> __m512i {
        b
    }
    #[inline(always)]
    unsafe fn dot(sum: __m512i, b: __m512i, a: __m512i) -> __m512i {
        // SAFETY: the machine has the instruction (contract); the types are three names for the same bits.
        unsafe {
            let [a, b] = [a, b].map(|x| std::mem::transmute::<__m512i, __m512bh>(x));
            _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sum), b, a))
        }
    }
    #[inline(always)]
    unsafe fn start(_: *const f32, _: usize) -> __m512i {
        // SAFETY: AVX-512 is present (contract).
        unsafe { _mm512_setzero_si512() }
    }
}

/// The instruction multiplies unsigned by signed bytes: B is moved up by 128, and 128 times the row of A taken off.
struct Quads;

// SAFETY: `start` reads what the contract of `multiply_quads` allows, the rest is arithmetic.
unsafe impl Dot for Quads {
    #[inline(always)]
    unsafe fn prepare(b: __m512i) -> __m512i {
        // SAFETY: AVX-512 is present (contract).
        unsafe { _mm512_xor_si512(b, _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    unsafe fn dot(sum: __m512i, b: __m512i, a: __m512i) -> __m512i {
        // SAFETY: the machine has the instruction (contract).
        unsafe { _mm512_dpbusd_epi32(sum, b, a) }
    }
    #[inline(always)]
    unsafe fn start(a: *const f32, k: usize) -> __m512i {
        // SAFETY: the row lies in `k` tiles (contract).
        unsafe {
            let row = |tile: usize| _mm512_loadu_si512(a.add(tile * SLOTS).cast());
            let sums = (0..k)
                .fold(_mm512_setzero_si512(), |sum, tile| _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), row(tile)));
            _mm512_set1_epi32(-_mm512_reduce_add_epi32(sums))
        }
    }
}

/// Pairs of parts whose products are summed, small ones first.
const fn parts<const A: usize, const B: usize>() -> &'static [[usize; 2]] {
    match (A, B) {
        (1, 1) => &[[0, 0]],
        (1, 2) => &[[0, 1], [0, 0]],
        (2, 2) => &[[1, 0], [0, 1], [0, 0]],
        _ => &[[2, 0], [1, 1], [0, 2], [1, 0], [0, 1], [0, 0]],
    }
}

/// The position of a block of C; its old contents are ignored unless `add` is set.
struct BlockAddress {
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    k: usize,
    add: bool,
}

/// Eight rows by N groups of columns.
///
/// # Safety
/// As for [`Simd`](super::Simd), the extents are valid.
#[inline(always)]
unsafe fn block<D: Dot, const A: usize, const B: usize, const STORED: usize, const N: usize>(
    BlockAddress { c, ldc, a, k, add }: &BlockAddress,
    b: [*const f32; N],
    starts: &[__m512i; ROWS],
) {
    // SAFETY: inside the extents (contract).
    unsafe {
        let mut sums = starts.map(|start| [start; N]);
        if *add {
            for (r, row) in sums.iter_mut().enumerate() {
                for (z, sum) in row.iter_mut().enumerate() {
                    *sum = _mm512_loadu_si512(c.add(r * ldc + z * 16).cast());
                }
            }
        }
        for tile in 0..*k {
            for &[i, j] in parts::<A, B>() {
                let a = a.add((tile * A + i) * SLOTS);
                for slot in 0..16 {
                    let at = (tile * STORED + j) * SLOTS + slot * 16;
                    let b = b.map(|b| D::prepare(_mm512_loadu_si512(b.add(at).cast())));
                    for (r, row) in sums.iter_mut().enumerate() {
                        let a = _mm512_set1_epi32((*a.add(r * 16 + slot)).to_bits() as i32);
                        for (sum, b) in row.iter_mut().zip(b) {
                            *sum = D::dot(*sum, b, a);
                        }
                    }
                }
            }
        }
        for (r, row) in sums.iter().enumerate() {
            for (z, sum) in row.iter().enumerate() {
                _mm512_storeu_si512(c.add(r * ldc + z * 16).cast(), *sum);
            }
        }
    }
}

/// C (+)= A B.
///
/// # Safety
/// As for [`Simd`](super::Simd), the extents are valid, with pitches in slots.
#[inline(always)]
unsafe fn multiply<D: Dot, const A: usize, const B: usize, const STORED: usize>(
    (c, ldc): (*mut f32, usize),
    (a, a_pitch): (*const f32, usize),
    (b, b_pitch): (*const f32, usize),
    [m, n, k]: [usize; 3],
    add: bool,
    mut before: impl FnMut(),
) {
    // SAFETY: each block lies inside the extents (contract).
    unsafe {
        for row in (0..m * 16).step_by(ROWS) {
            let a = a.add(row / 16 * a_pitch + row % 16 * 16);
            let starts: [__m512i; ROWS] = std::array::from_fn(|r| D::start(a.add(r * 16), k));
            for j in (0..n).step_by(2) {
                before();
                let own = BlockAddress { c: c.add(row * ldc + j * 16), ldc, a, k, add };
                let b = b.add(j * b_pitch);
                if j + 1 < n {
                    block::<D, A, B, STORED, 2>(&own, [b, b.add(b_pitch)], &starts);
                } else {
                    block::<D, A, B, STORED, 1>(&own, [b], &starts);
                }
            }
        }
    }
}

/// # Safety
/// The machine has AVX512-BF16; the extents are valid, with pitches in slots.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn multiply_pairs<const A: usize, const B: usize, const STORED: usize>(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    a_pitch: usize,
    b: *const f32,
    b_pitch: usize,
    size: [usize; 3],
    add: bool,
    ahead: &mut Ahead,
) {
    // SAFETY: as promised.
    let prefetch = || unsafe { ahead.prefetch::<Avx512>() };
    // SAFETY: as promised.
    unsafe { multiply::<Pairs, A, B, STORED>((c, ldc), (a, a_pitch), (b, b_pitch), size, add, prefetch) }
}

/// # Safety
/// The machine has VNNI; the extents are valid, with pitches in slots.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn multiply_quads(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    a_pitch: usize,
    b: *const f32,
    b_pitch: usize,
    size: [usize; 3],
) {
    // SAFETY: as promised.
    unsafe { multiply::<Quads, 1, 1, 1>((c, ldc), (a, a_pitch), (b, b_pitch), size, false, || ()) }
}
