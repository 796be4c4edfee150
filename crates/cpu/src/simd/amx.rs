//! AMX: eight tiles of 16 rows of 64 bytes, and a unit that multiplies bf16 pairs of two tiles into a third.
//!
//! The instructions are written in assembly, because the language has no stable names for them. One `asm!` holds a
//! whole block of C, from zero or memory to memory, so nothing depends on the contents of a tile between two of them.
//! The shape of the tiles is state of the thread. Setting it takes 200 to 450 cycles, so code with many products holds
//! it over all of them. Afterwards it is released, and the system has no tiles to save.

use super::algorithms::{Ahead, SimdElement};
use super::avx512::{Avx512, TABLE};
use super::matrix::{Hold, MatrixKernels, SLOTS};
use super::{Kernels, Simd, amx_bf16, amx_block_max, amx_decode, amx_delta, amx_pipelined};
use half::f16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::sync::OnceLock;

/// The vectors of AVX-512, with products on tiles.
pub(super) static KERNELS: Kernels = Kernels { matrix: Some(&TILES), ..TABLE };

static TILES: MatrixKernels = TABLE_OF_TILES;

/// All of it but products and strips needs AVX-512 alone.
pub(super) const TABLE_OF_TILES: MatrixKernels = MatrixKernels {
    hold,
    multiply_1_1: multiply::<1, 1, 1>,
    multiply_1_1_of_2: multiply::<1, 1, 2>,
    multiply_1_2: multiply::<1, 2, 2>,
    multiply_2_2: multiply::<2, 2, 2>,
    multiply_3_3: multiply::<3, 3, 3>,
    rows_f32: pack_rows::<f32, 3>,
    rows_f32_short: [pack_rows::<f32, 1>, pack_rows::<f32, 2>],
    rows_f16: pack_rows::<f16, 2>,
    rows_bf16: amx_bf16::copy_rows,
    turned_f32: pack_turned::<f32, 3>,
    turned_f16: pack_turned::<f16, 2>,
    turned_bf16: amx_bf16::turn_columns,
    lanes: [pack_lanes::<1>, pack_lanes::<2>, pack_lanes::<3>],
    lanes_reweighed: [pack_reweighed::<1>, pack_reweighed::<2>, pack_reweighed::<3>],
    bf16: &amx_bf16::BF16,
    pipeline: Some([amx_pipelined::pipeline::<2>, amx_pipelined::pipeline::<4>]),
    block_max: Some([amx_block_max::block_max::<2>, amx_block_max::block_max::<4>]),
    strips: &amx_decode::STRIPS,
    delta: &amx_delta::DELTA,
};

/// Whether the CPU has tiles of bf16, the system saves them, and this process may use them. Asked once.
pub(super) fn available() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        const OSXSAVE: u32 = 1 << 27;
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const XTILE_STATE: u32 = 0b11 << 17;
        // Older toolchains that this crate supports call it unsafe.
        #[allow(unused_unsafe)]
        // SAFETY: CPUID is part of x86-64.
        let leaf = |number| unsafe { __cpuid_count(number, 0) };
        if leaf(0).eax < 7 || leaf(1).ecx & OSXSAVE == 0 {
            return false;
        }
        if leaf(7).edx & (AMX_BF16 | AMX_TILE) != AMX_BF16 | AMX_TILE {
            return false;
        }
        let saved: u32;
        // SAFETY: the system has enabled XGETBV (OSXSAVE above); register 0 always exists.
        unsafe { asm!("xgetbv", in("ecx") 0, out("eax") saved, out("edx") _, options(nomem, nostack)) };
        saved & XTILE_STATE == XTILE_STATE && permitted()
    })
}

/// Whether there are tiles of bytes as well. Ask after [`available`].
pub(super) fn has_int8() -> bool {
    const AMX_INT8: u32 = 1 << 25;
    #[allow(unused_unsafe)]
    // SAFETY: CPUID is part of x86-64, and leaf 7 exists where tiles do.
    let leaf = unsafe { __cpuid_count(7, 0) };
    leaf.edx & AMX_INT8 != 0
}

/// Asks Linux for the state of the tiles, for all threads of the process; without it the first use is a signal.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: this call reads and writes no memory of ours; the kernel overwrites rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        )
    };
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
pub(super) struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    pub(super) const NONE: Shapes =
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };

    pub(super) const fn set(&mut self, tile: usize, rows: u8, row_bytes: u16) {
        assert!(rows > 0 && rows <= 16 && row_bytes > 0 && row_bytes <= 64, "a tile is 16 rows of 64 bytes");
        self.row_bytes[tile] = row_bytes;
        self.rows[tile] = rows;
    }
}

/// All eight tiles whole.
static WHOLE: Shapes = {
    let mut shapes = Shapes::NONE;
    let mut tile = 0;
    while tile < 8 {
        shapes.set(tile, 16, 64);
        tile += 1;
    }
    shapes
};

/// Byte offsets of a block of C and its operands.
struct BlockOffsets {
    c: *mut f32,
    c_row: usize,
    /// First and second group of rows of A and of columns of B.
    a: [*const f32; 2],
    b: [*const f32; 2],
    /// Tiles along the summed axis.
    k: usize,
    add: bool,
}

// Tiles 0 to 3 are C (row-major), 4 and 5 the groups of A, 6 and 7 those of B.
#[rustfmt::skip]
macro_rules! tiles {
    (zero 1 1) => { "tilezero tmm0\n" };
    (zero 1 2) => { "tilezero tmm0\n tilezero tmm1\n" };
    (zero 2 1) => { "tilezero tmm0\n tilezero tmm2\n" };
    (zero 2 2) => { "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3\n" };
    (load 1 1) => { "tileloadd tmm0, [{c} + {row}*1]\n" };
    (load 1 2) => { "tileloadd tmm0, [{c} + {row}*1]\n tileloadd tmm1, [{c} + {row}*1 + 64]\n" };
    (load 2 1) => { "tileloadd tmm0, [{c} + {row}*1]\n tileloadd tmm2, [{c1} + {row}*1]\n" };
    (load 2 2) => { "tileloadd tmm0, [{c} + {row}*1]\n tileloadd tmm1, [{c} + {row}*1 + 64]\n
                     tileloadd tmm2, [{c1} + {row}*1]\n tileloadd tmm3, [{c1} + {row}*1 + 64]\n" };
    (store 1 1) => { "tilestored [{c} + {row}*1], tmm0\n" };
    (store 1 2) => { "tilestored [{c} + {row}*1], tmm0\n tilestored [{c} + {row}*1 + 64], tmm1\n" };
    (store 2 1) => { "tilestored [{c} + {row}*1], tmm0\n tilestored [{c1} + {row}*1], tmm2\n" };
    (store 2 2) => { "tilestored [{c} + {row}*1], tmm0\n tilestored [{c} + {row}*1 + 64], tmm1\n
                      tilestored [{c1} + {row}*1], tmm2\n tilestored [{c1} + {row}*1 + 64], tmm3\n" };
    (a 1 $at:literal) => { concat!("tileloadd tmm4, [{a0} + {line}*1 + ", $at, "]\n") };
    (a 2 $at:literal) => { concat!("tileloadd tmm4, [{a0} + {line}*1 + ", $at, "]\n tileloadd tmm5, [{a1} + {line}*1 + ", $at, "]\n") };
    (b 1 $at:literal) => { concat!("tileloadd tmm6, [{b0} + {line}*1 + ", $at, "]\n") };
    (b 2 $at:literal) => { concat!("tileloadd tmm6, [{b0} + {line}*1 + ", $at, "]\n tileloadd tmm7, [{b1} + {line}*1 + ", $at, "]\n") };
    (mul 1 1) => { "tdpbf16ps tmm0, tmm4, tmm6\n" };
    (mul 1 2) => { "tdpbf16ps tmm0, tmm4, tmm6\n tdpbf16ps tmm1, tmm4, tmm7\n" };
    (mul 2 1) => { "tdpbf16ps tmm0, tmm4, tmm6\n tdpbf16ps tmm2, tmm5, tmm6\n" };
    (mul 2 2) => { "tdpbf16ps tmm0, tmm4, tmm6\n tdpbf16ps tmm1, tmm4, tmm7\n
                    tdpbf16ps tmm2, tmm5, tmm6\n tdpbf16ps tmm3, tmm5, tmm7\n" };
    // Pairs of parts, by how many A and B have, in an order in which most differ from the last in one operand.
    (step 1 1 $m:tt $n:tt) => { concat!(tiles!(a $m 0), tiles!(b $n 0), tiles!(mul $m $n)) };
    (step 1 2 $m:tt $n:tt) => { concat!(
        tiles!(a $m 0), tiles!(b $n 1024), tiles!(mul $m $n),
        tiles!(b $n 0), tiles!(mul $m $n)) };
    (step 2 2 $m:tt $n:tt) => { concat!(
        tiles!(a $m 1024), tiles!(b $n 0), tiles!(mul $m $n),
        tiles!(a $m 0), tiles!(mul $m $n),
        tiles!(b $n 1024), tiles!(mul $m $n)) };
    // All but the product of the first parts.
    (step 3 3 $m:tt $n:tt) => { concat!(
        tiles!(a $m 2048), tiles!(b $n 0), tiles!(mul $m $n),
        tiles!(a $m 1024), tiles!(mul $m $n),
        tiles!(b $n 1024), tiles!(mul $m $n),
        tiles!(a $m 0), tiles!(mul $m $n),
        tiles!(b $n 2048), tiles!(mul $m $n)) };
    (next) => { "add {a0}, {a_bytes}\n add {a1}, {a_bytes}\n add {b0}, {b_bytes}\n add {b1}, {b_bytes}\n sub {left}, {a_bytes}\n" };
    // In f32 the first parts have a walk of their own, behind the small products: so the sum is rounded at its full
    // size as seldom as can be.
    (walk 3 3 $m:tt $n:tt) => { concat!(
        "3:\n", tiles!(step 3 3 $m $n), tiles!(next), "jnz 3b\n",
        "mov {left}, {all}\n sub {a0}, {all}\n sub {a1}, {all}\n sub {b0}, {all}\n sub {b1}, {all}\n",
        "4:\n", tiles!(step 1 1 $m $n), tiles!(next), "jnz 4b\n") };
    (walk $a:tt $b:tt $m:tt $n:tt) => { concat!("3:\n", tiles!(step $a $b $m $n), tiles!(next), "jnz 3b\n") };
}

/// One block of C of `$m` by `$n` tiles, A in `$a` parts and B in `$b` of `$stored`.
macro_rules! block {
    ($block:expr, $a:tt $b:tt $stored:tt, $m:tt $n:tt) => {
        asm!(
            "test {add:e}, {add:e}",
            "jnz 2f",
            tiles!(zero $m $n),
            "jmp 3f",
            "2:",
            tiles!(load $m $n),
            tiles!(walk $a $b $m $n),
            tiles!(store $m $n),
            "/* {c1} {all} */",
            add = in(reg) u32::from($block.add),
            c = in(reg) $block.c,
            c1 = in(reg) $block.c.byte_add(if $m == 2 { 16 * $block.c_row } else { 0 }),
            row = in(reg) $block.c_row,
            a0 = inout(reg) $block.a[0] => _,
            a1 = inout(reg) $block.a[1] => _,
            b0 = inout(reg) $block.b[0] => _,
            b1 = inout(reg) $block.b[1] => _,
            left = inout(reg) $block.k * $a * 1024 => _,
            all = in(reg) $block.k * $a * 1024,
            line = in(reg) 64usize,
            a_bytes = const $a * 1024,
            b_bytes = const $stored * 1024,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        )
    };
}

/// C (+)= A B in blocks of two by two tiles.
///
/// # Safety
/// The machine has tiles and the process may use them; the extents are valid, with pitches in slots.
pub(super) unsafe fn multiply<const A: usize, const B: usize, const STORED: usize>(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    a_pitch: usize,
    b: *const f32,
    b_pitch: usize,
    [m, n, k]: [usize; 3],
    add: bool,
    ahead: &mut Ahead,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    // SAFETY: the shape is held over all blocks; each block lies inside the extents.
    unsafe {
        let _shaped = hold();
        for i in (0..m).step_by(2) {
            for j in (0..n).step_by(2) {
                ahead.prefetch::<Avx512>();
                let (rows, columns) = ((m - i).min(2), (n - j).min(2));
                let (a, b) = (a.add(i * a_pitch), b.add(j * b_pitch));
                let block = BlockOffsets {
                    c: c.add(i * 16 * ldc + j * 16),
                    c_row: ldc * 4,
                    a: [a, a.add((rows - 1) * a_pitch)],
                    b: [b, b.add((columns - 1) * b_pitch)],
                    k,
                    add,
                };
                match (A, STORED, rows, columns) {
                    (1, 1, 2, 2) => block!(block, 1 1 1, 2 2),
                    (1, 1, 2, _) => block!(block, 1 1 1, 2 1),
                    (1, 1, _, 2) => block!(block, 1 1 1, 1 2),
                    (1, 1, _, _) => block!(block, 1 1 1, 1 1),
                    (2, 2, 2, 2) => block!(block, 2 2 2, 2 2),
                    (2, 2, 2, _) => block!(block, 2 2 2, 2 1),
                    (2, 2, _, 2) => block!(block, 2 2 2, 1 2),
                    (2, 2, _, _) => block!(block, 2 2 2, 1 1),
                    (1, _, 2, 2) if B == 1 => block!(block, 1 1 2, 2 2),
                    (1, _, 2, _) if B == 1 => block!(block, 1 1 2, 2 1),
                    (1, _, _, 2) if B == 1 => block!(block, 1 1 2, 1 2),
                    (1, _, _, _) if B == 1 => block!(block, 1 1 2, 1 1),
                    (1, _, 2, 2) => block!(block, 1 2 2, 2 2),
                    (1, _, 2, _) => block!(block, 1 2 2, 2 1),
                    (1, _, _, 2) => block!(block, 1 2 2, 1 2),
                    (1, _, _, _) => block!(block, 1 2 2, 1 1),
                    (_, _, 2, 2) => block!(block, 3 3 3, 2 2),
                    (_, _, 2, _) => block!(block, 3 3 3, 2 1),
                    (_, _, _, 2) => block!(block, 3 3 3, 1 2),
                    (_, _, _, _) => block!(block, 3 3 3, 1 1),
                }
            }
        }
    }
}

/// The shape for which a thread's tiles are configured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    Nothing,
    Whole,
    Own,
}

thread_local! {
    static HELD: Cell<Held> = const { Cell::new(Held::Nothing) };
}

fn release() {
    // SAFETY: tiles are shaped before they are released, so the machine has them and the process may use them; no
    // product is under way, because each holds the shape itself.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
    HELD.set(Held::Nothing);
}

/// Gives all tiles of this thread their whole shape, unless they have it.
pub(super) fn hold() -> Hold {
    match HELD.get() {
        Held::Whole => Hold::new(|| ()),
        Held::Own => panic!("bug in fulgurite: a product of whole tiles among others"),
        Held::Nothing => shape(&WHOLE, Held::Whole),
    }
}

/// Gives the tiles of this thread shapes of the caller's own.
pub(super) fn hold_shapes(shapes: &Shapes) -> Hold {
    assert!(HELD.get() == Held::Nothing, "bug in fulgurite: tiles are shaped already");
    shape(shapes, Held::Own)
}

fn shape(shapes: &Shapes, held: Held) -> Hold {
    // SAFETY: kernels of this table alone come here, so the machine has tiles and the process may use them; the shapes
    // are valid, or `Shapes::set` had refused them.
    unsafe { asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, readonly)) };
    HELD.set(held);
    Hold::new(release)
}

/// Numbers in parts: the upper halves of the results are bf16, whose sum is the number where PARTS suffice. Each but the
/// last is rounded to nearest: were it cut off, the remainder would be twice as large and of one sign, and the products
/// that are left out would show.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
unsafe fn split<const PARTS: usize>(x: __m512) -> [__m512i; PARTS] {
    // SAFETY: AVX-512 is present (contract); so below.
    unsafe {
        let mut rest = x;
        std::array::from_fn(|part| {
            if part + 1 == PARTS {
                return _mm512_castps_si512(rest);
            }
            let bits = rounded(rest);
            let upper = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000u32 as i32));
            // Exact: the remainder has the number's last digits only. A NaN ends in the last part.
            rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(upper));
            bits
        })
    }
}

/// Bits whose upper halves are the numbers rounded to bf16, half away from zero; infinity stays.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(super) unsafe fn rounded(x: __m512) -> __m512i {
    // SAFETY: AVX-512 is present (contract).
    unsafe { _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)) }
}

/// Bits whose upper halves are the numbers rounded to bf16, half to even, as `narrow_bf16` rounds; NaN stays NaN.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(super) unsafe fn nearest(x: __m512) -> __m512i {
    // SAFETY: AVX-512 is present (contract).
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x0040_0000))
    }
}

/// Slots from the upper halves of two vectors.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(super) unsafe fn join(first: __m512i, second: __m512i) -> __m512i {
    // SAFETY: AVX-512 is present (contract).
    unsafe { _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(first), second) }
}

/// The next 16 elements of a row, zero past its end.
///
/// # Safety
/// As for [`Simd`], with `left` elements at `p`.
#[inline(always)]
unsafe fn vector<T: SimdElement>(p: *const T, left: usize) -> __m512 {
    // SAFETY: inside the extents.
    unsafe {
        if left >= 16 {
            return T::vector::<Avx512>(p);
        }
        let mut lanes = [0.0f32; 16];
        lanes[..left].iter_mut().enumerate().for_each(|(i, x)| *x = (*p.add(i)).one());
        Avx512::load(lanes.as_ptr())
    }
}

/// # Safety
/// As for [`Simd`]: `rows` rows of `n` elements, `row` apart, and room for their panels of `depth` tiles.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn pack_rows<T: SimdElement, const PARTS: usize>(
    src: *const T,
    row: usize,
    [rows, n]: [usize; 2],
    dst: *mut f32,
    depth: usize,
) -> bool {
    // SAFETY: inside the extents; rows past the last are not read.
    unsafe {
        // x * 0 is 0 for finite x and NaN for the others.
        let mut odd = [Avx512::splat(0.0); 2];
        for r in 0..rows.next_multiple_of(16) {
            for tile in 0..depth {
                let left = if r < rows { n.saturating_sub(tile * 32) } else { 0 };
                let p = src.wrapping_add(r * row + tile * 32);
                let x = [vector(p, left), vector(p.wrapping_add(16), left.saturating_sub(16))];
                odd = std::array::from_fn(|i| Avx512::fma(x[i], Avx512::splat(0.0), odd[i]));
                // A single part of an f32 is rounded, as in `pack_tile`; one of a bf16 is exact.
                let cut = PARTS == 1 && size_of::<T>() == 4;
                let [first, second] = x.map(|x| split::<PARTS>(if cut { _mm512_castsi512_ps(rounded(x)) } else { x }));
                let to = dst.add((r / 16 * depth + tile) * PARTS * SLOTS + r % 16 * 16);
                for part in 0..PARTS {
                    _mm512_storeu_si512(to.add(part * SLOTS).cast(), join(first[part], second[part]));
                }
            }
        }
        Avx512::count(Avx512::lt(Avx512::add(odd[0], odd[1]), Avx512::splat(1.0))) == 16
    }
}

/// # Safety
/// As for [`Simd`]: `rows` rows of `n` elements, `row` apart, and room for panels of `n` rows and `depth` tiles.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn pack_turned<T: SimdElement, const PARTS: usize>(
    src: *const T,
    row: usize,
    [rows, n]: [usize; 2],
    dst: *mut f32,
    depth: usize,
) -> bool {
    // SAFETY: inside the extents; rows and columns past the last are not read.
    unsafe {
        // x * 0 is 0 for finite x and NaN for the others.
        let mut odd = Avx512::splat(0.0);
        let mut slots = [[0.0f32; SLOTS]; PARTS];
        for tile in 0..rows.div_ceil(32) {
            for column in (0..n).step_by(16) {
                for j in 0..16 {
                    let mut load = |r: usize| {
                        let left = if r < rows { n - column } else { 0 };
                        let x = vector(src.wrapping_add(r * row + column), left);
                        odd = Avx512::fma(x, Avx512::splat(0.0), odd);
                        split::<PARTS>(x)
                    };
                    let (first, second) = (load(tile * 32 + j), load(tile * 32 + 16 + j));
                    for part in 0..PARTS {
                        let to = slots[part].as_mut_ptr().add(j * 16);
                        _mm512_storeu_si512(to.cast(), join(first[part], second[part]));
                    }
                }
                for (part, slots) in slots.iter().enumerate() {
                    let to = dst.add(((column / 16 * depth + tile) * PARTS + part) * SLOTS);
                    Avx512::transpose(slots.as_ptr(), 16, to, 16);
                }
            }
        }
        Avx512::count(Avx512::lt(odd, Avx512::splat(1.0))) == 16
    }
}

/// # Safety
/// As for [`Simd`]: rows `seen` of 16 lanes, `stride` apart, and room for `tiles`, which contain them.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn pack_lanes<const PARTS: usize>(
    src: *const f32,
    stride: usize,
    seen: [usize; 2],
    tiles: [usize; 2],
    dst: *mut f32,
) {
    // SAFETY: inside the extents; rows that are not seen are not read.
    unsafe { pack_seen::<PARTS>(seen, tiles, dst, |r| Avx512::load(src.add(r * stride))) }
}

/// P (1 + mean) - P U of 16 lanes, lane by lane.
///
/// # Safety
/// As for [`pack_lanes`], with as many rows of P U and 16 means.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn pack_reweighed<const PARTS: usize>(
    [p, pu]: [*const f32; 2],
    stride: usize,
    seen: [usize; 2],
    tiles: [usize; 2],
    mean: *const f32,
    dst: *mut f32,
) {
    // SAFETY: inside the extents; rows that are not seen are not read.
    unsafe {
        let one = Avx512::add(Avx512::splat(1.0), Avx512::load(mean));
        pack_seen::<PARTS>(seen, tiles, dst, |r| {
            _mm512_fmsub_ps(Avx512::load(p.add(r * stride)), one, Avx512::load(pu.add(r * stride)))
        });
    }
}

/// Whole tiles of rows of 16 lanes; rows that are not seen are 0 and are not read.
///
/// # Safety
/// As for [`pack_tile`], for every tile.
#[inline(always)]
unsafe fn pack_seen<const PARTS: usize>(
    seen: [usize; 2],
    tiles: [usize; 2],
    dst: *mut f32,
    row: impl Fn(usize) -> __m512,
) {
    for tile in tiles[0]..tiles[1] {
        // SAFETY: inside the extents (caller).
        unsafe {
            let (first, to) = (tile * 32, dst.add(tile * PARTS * SLOTS));
            if seen[0] <= first && first + 32 <= seen[1] {
                pack_tile::<PARTS>(to, |r| row(first + r));
            } else {
                pack_tile::<PARTS>(to, |r| {
                    if (seen[0]..seen[1]).contains(&(first + r)) { row(first + r) } else { Avx512::splat(0.0) }
                });
            }
        }
    }
}

/// One tile of B from its 32 rows of lanes.
///
/// # Safety
/// As for [`Simd`], with room for a tile in parts at `to`.
#[inline(always)]
unsafe fn pack_tile<const PARTS: usize>(to: *mut f32, row: impl Fn(usize) -> __m512) {
    for j in 0..16 {
        // SAFETY: inside the extents.
        unsafe {
            let parts = |x| split::<PARTS>(if PARTS == 1 { _mm512_castsi512_ps(rounded(x)) } else { x });
            let (first, second) = (parts(row(j)), parts(row(j + 16)));
            for part in 0..PARTS {
                _mm512_storeu_si512(to.add(part * SLOTS + j * 16).cast(), join(first[part], second[part]));
            }
        }
    }
}
