//! Forward in bf16 with everything under way at once: while the vectors take the exponentials of 32 keys, the tiles
//! multiply the scores of the next 32 and add an earlier block's weights times values to O.
//!
//! One `asm!` is a stage: 32 keys by 32 lanes of softmax, cut into 32 pairs of vectors, with tile instructions between
//! them. Left to itself the machine overlaps little of it: its window holds 512 operations, and softmax of such a
//! square is 800. K and V come by once for 32 lanes, so their tiles are loaded with the hint that passes the
//! first-level cache by; what stays there is Q, O, scores and weights.
//!
//! Operations and their order are those of the single steps (`amx_bf16::softmax`, `amx::multiply`): so are the bits.

use super::algorithms::Ahead;
use super::amx::{hold, multiply};
use super::amx_bf16::{CUBIC, FUSED_LIMIT};
use super::avx512::Avx512;
use super::matrix::SLOTS;
use super::narrow::{STRIP_LANES, Woven};
use std::arch::asm;
use std::arch::x86_64::*;

/// Where the operands of a stage lie.
struct Stage {
    /// Scores of these keys `[32][32]`, and where the next ones go.
    s: *const f32,
    s_next: *mut f32,
    /// Weights of these keys: a tile for each group of lanes, four tiles apart.
    p: *mut f32,
    /// The next 32 keys, and the queries.
    k: *const f32,
    q: *const f32,
    /// Values, weights and a part of O of the block that waits.
    v: *const f32,
    p_waiting: *const f32,
    o: *mut f32,
}

/// What a stage does not change.
struct Constants {
    /// A score times this, less the lane's `shift`, is the exponent.
    log2_e: __m512,
    shift: [__m512; 2],
    /// Exponents at and below give 0.
    lowest: __m512,
    cubic: [__m512; 4],
    half: __m512i,
}

/// Bytes from row to row of O.
const O_ROW: usize = 4 * 2 * STRIP_LANES;
/// Bytes from row to row of scores.
const S_ROW: usize = 4 * STRIP_LANES;

#[rustfmt::skip]
macro_rules! text {
    // 2^(s log2_e - shift) of one key and one vector of lanes, added to a sum, rounded in its upper half.
    (weight $z:literal $key:literal $t:literal $r:literal $p:literal $k:literal $sum:literal) => { concat!(
        "vmovups ", $t, ", [{s} + 128*", $key, " + 64*", $z, "]\n",
        "vfmsub213ps ", $t, ", {log2_e}, {shift", $z, "}\n",
        "vcmpps ", $k, ", ", $t, ", {lowest}, 6\n",
        "vreduceps ", $r, ", ", $t, ", 9\n",
        "vmovaps ", $p, ", {c3}\n",
        "vfmadd213ps ", $p, ", ", $r, ", {c2}\n",
        "vfmadd213ps ", $p, ", ", $r, ", {c1}\n",
        "vfmadd213ps ", $p, ", ", $r, ", {c0}\n",
        "vscalefps ", $p, " {{", $k, "}} {{z}}, ", $p, ", ", $t, "\n",
        "vaddps {sum", $z, $sum, "}, {sum", $z, $sum, "}, ", $p, "\n",
        "vpaddd ", $p, ", ", $p, ", {half}\n") };
    // Keys j and j + 16 make slot j.
    (pair $z:literal $j:literal $other:literal) => { concat!(
        text!(weight $z $j "zmm20" "zmm21" "zmm22" "k1" 0),
        text!(weight $z $other "zmm23" "zmm24" "zmm25" "k2" 1),
        "vpsrld zmm22, zmm22, 16\n",
        "vmovdqu16 zmm22 {{k3}}, zmm25\n",
        "vmovdqu64 [{p} + 4096*", $z, " + 64*", $j, "], zmm22\n") };
    (slot $j:literal $other:literal $first:expr, $second:expr) => {
        concat!($first, text!(pair 0 $j $other), $second, text!(pair 1 $j $other)) };

    // Scores: step n of the summed axis, four products. Lines of O are asked for meanwhile.
    (zero) => { "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3\n" };
    (s00 $n:literal) => { concat!(
        "tileloaddt1 tmm4, [{k} + {line}*1 + 1024*", $n, "]\n tileloadd tmm6, [{q} + {line}*1 + 1024*", $n, "]\n tdpbf16ps tmm0, tmm4, tmm6\n") };
    (s01 $n:literal) => { concat!("tileloadd tmm7, [{q} + {line}*1 + {group} + 1024*", $n, "]\n tdpbf16ps tmm1, tmm4, tmm7\n") };
    (s10 $n:literal) => { concat!("tileloaddt1 tmm5, [{k} + {line}*1 + {group} + 1024*", $n, "]\n tdpbf16ps tmm2, tmm5, tmm6\n") };
    (s11) => { "tdpbf16ps tmm3, tmm5, tmm7\n" };
    (s_out) => { concat!(text!(s_out 0 0), text!(s_out 1 0), text!(s_out 0 1), text!(s_out 1 1)) };
    (s_out 0 0) => { "tilestored [{s_next} + {s_row}*1], tmm0\n" };
    (s_out 0 1) => { "tilestored [{s_next} + {s_row}*1 + 64], tmm1\n" };
    (s_out 1 0) => { "tilestored [{s_next} + {s_row}*1 + 2048], tmm2\n" };
    (s_out 1 1) => { "tilestored [{s_next} + {s_row}*1 + 2112], tmm3\n" };
    // Two rows of O.
    (ask $n:literal) => { concat!(
        "prefetchw [{o} + 512*", $n, "]\n prefetchw [{o} + 512*", $n, " + 64]\n",
        "prefetchw [{o} + 512*", $n, " + 256]\n prefetchw [{o} + 512*", $n, " + 320]\n") };

    // O: 32 of the waiting block's keys.
    (o_in 0 0) => { "tileloadd tmm0, [{o} + {o_row}*1]\n" };
    (o_in 0 1) => { "tileloadd tmm1, [{o} + {o_row}*1 + 64]\n" };
    (o_in 1 0) => { "tileloadd tmm2, [{o} + {o_row}*1 + 4096]\n" };
    (o_in 1 1) => { "tileloadd tmm3, [{o} + {o_row}*1 + 4160]\n" };
    (o00 $n:literal) => { concat!(
        "tileloaddt1 tmm4, [{v} + {line}*1 + 1024*", $n, "]\n tileloadd tmm6, [{p_waiting} + {line}*1 + 1024*", $n, "]\n tdpbf16ps tmm0, tmm4, tmm6\n") };
    (o01 $n:literal) => { concat!("tileloadd tmm7, [{p_waiting} + {line}*1 + 4096 + 1024*", $n, "]\n tdpbf16ps tmm1, tmm4, tmm7\n") };
    (o10 $n:literal) => { concat!("tileloaddt1 tmm5, [{v} + {line}*1 + 4096 + 1024*", $n, "]\n tdpbf16ps tmm2, tmm5, tmm6\n") };
    (o11) => { "tdpbf16ps tmm3, tmm5, tmm7\n" };
    (o_out 1) => { "tilestored [{o} + {o_row}*1], tmm0\n tilestored [{o} + {o_row}*1 + 64], tmm1\n" };
    (o_out 2) => { concat!(text!(o_out 1), "tilestored [{o} + {o_row}*1 + 4096], tmm2\n tilestored [{o} + {o_row}*1 + 4160], tmm3\n") };

    // Head dim 64: two steps of scores, a group of 16 columns of O.
    (stage 2 scores) => { concat!(
        text!(slot 0 16 concat!(text!(zero), text!(s00 0)), ""), text!(slot 1 17 text!(s01 0), ""),
        text!(slot 2 18 text!(s10 0), ""), text!(slot 3 19 text!(s11), ""),
        text!(slot 4 20 text!(s00 1), ""), text!(slot 5 21 text!(s01 1), ""),
        text!(slot 6 22 text!(s10 1), ""), text!(slot 7 23 text!(s11), ""),
        text!(slot 8 24 text!(s_out), ""), text!(slot 9 25 "", ""), text!(slot 10 26 "", ""), text!(slot 11 27 "", ""),
        text!(slot 12 28 "", ""), text!(slot 13 29 "", ""), text!(slot 14 30 "", ""), text!(slot 15 31 "", "")) };
    (stage 2 both) => { concat!(
        text!(slot 0 16 concat!(text!(zero), text!(s00 0)), text!(ask 0)), text!(slot 1 17 text!(s01 0), text!(ask 1)),
        text!(slot 2 18 text!(s10 0), text!(ask 2)), text!(slot 3 19 text!(s11), text!(ask 3)),
        text!(slot 4 20 text!(s00 1), text!(ask 4)), text!(slot 5 21 text!(s01 1), text!(ask 5)),
        text!(slot 6 22 text!(s10 1), text!(ask 6)), text!(slot 7 23 text!(s11), text!(ask 7)),
        text!(slot 8 24 concat!(text!(s_out 0 0), text!(s_out 1 0), text!(o_in 0 0), text!(o00 0)), ""),
        text!(slot 9 25 concat!(text!(s_out 0 1), text!(s_out 1 1), text!(o_in 0 1), text!(o01 0)), ""),
        text!(slot 10 26 text!(o00 1), ""), text!(slot 11 27 text!(o01 1), ""),
        text!(slot 12 28 text!(o00 2), ""), text!(slot 13 29 text!(o01 2), ""),
        text!(slot 14 30 text!(o00 3), ""), text!(slot 15 31 text!(o01 3), ""), text!(o_out 1)) };
    // Head dim 128: four steps of scores, two groups of columns.
    (stage 4 scores) => { concat!(
        text!(slot 0 16 concat!(text!(zero), text!(s00 0)), text!(s01 0)), text!(slot 1 17 text!(s10 0), text!(s11)),
        text!(slot 2 18 text!(s00 1), text!(s01 1)), text!(slot 3 19 text!(s10 1), text!(s11)),
        text!(slot 4 20 text!(s00 2), text!(s01 2)), text!(slot 5 21 text!(s10 2), text!(s11)),
        text!(slot 6 22 text!(s00 3), text!(s01 3)), text!(slot 7 23 text!(s10 3), text!(s11)),
        text!(slot 8 24 text!(s_out), ""), text!(slot 9 25 "", ""), text!(slot 10 26 "", ""), text!(slot 11 27 "", ""),
        text!(slot 12 28 "", ""), text!(slot 13 29 "", ""), text!(slot 14 30 "", ""), text!(slot 15 31 "", "")) };
    (stage 4 both) => { concat!(
        text!(slot 0 16 concat!(text!(zero), text!(s00 0), text!(ask 0)), concat!(text!(s01 0), text!(ask 1))),
        text!(slot 1 17 concat!(text!(s10 0), text!(ask 2)), concat!(text!(s11), text!(ask 3))),
        text!(slot 2 18 concat!(text!(s00 1), text!(ask 4)), concat!(text!(s01 1), text!(ask 5))),
        text!(slot 3 19 concat!(text!(s10 1), text!(ask 6)), concat!(text!(s11), text!(ask 7))),
        text!(slot 4 20 concat!(text!(s00 2), text!(ask 8)), concat!(text!(s01 2), text!(ask 9))),
        text!(slot 5 21 concat!(text!(s10 2), text!(ask 10)), concat!(text!(s11), text!(ask 11))),
        text!(slot 6 22 concat!(text!(s00 3), text!(ask 12)), concat!(text!(s01 3), text!(ask 13))),
        text!(slot 7 23 concat!(text!(s10 3), text!(ask 14)), concat!(text!(s11), text!(ask 15))),
        text!(slot 8 24 concat!(text!(s_out 0 0), text!(o_in 0 0), text!(o00 0)), concat!(text!(s_out 0 1), text!(o_in 0 1), text!(o01 0))),
        text!(slot 9 25 concat!(text!(s_out 1 0), text!(o_in 1 0), text!(o10 0)), concat!(text!(s_out 1 1), text!(o_in 1 1), text!(o11))),
        text!(slot 10 26 text!(o00 1), text!(o01 1)), text!(slot 11 27 text!(o10 1), text!(o11)),
        text!(slot 12 28 text!(o00 2), text!(o01 2)), text!(slot 13 29 text!(o10 2), text!(o11)),
        text!(slot 14 30 text!(o00 3), text!(o01 3)), text!(slot 15 31 text!(o10 3), text!(o11)), text!(o_out 2)) };
}

macro_rules! stage {
    ($name:ident, $depth:tt, $what:tt) => {
        /// # Safety
        /// The machine has tiles, the process may use them and this thread holds their shape; the extents are valid.
        #[inline]
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
        unsafe fn $name(at: &Stage, c: &Constants, sums: &mut [[__m512; 2]; 2]) {
            // SAFETY: the extents are the caller's. Tiles are written before they are read and hold nothing afterwards.
            unsafe {
                asm!(
                    text!(stage $depth $what),
                    "/* {v} {p_waiting} {o} {o_row} */",
                    s = in(reg) at.s,
                    s_next = in(reg) at.s_next,
                    p = in(reg) at.p,
                    k = in(reg) at.k,
                    q = in(reg) at.q,
                    v = in(reg) at.v,
                    p_waiting = in(reg) at.p_waiting,
                    o = in(reg) at.o,
                    line = in(reg) 64usize,
                    s_row = in(reg) S_ROW,
                    o_row = in(reg) O_ROW,
                    group = const $depth * 1024,
                    log2_e = in(zmm_reg) c.log2_e,
                    shift0 = in(zmm_reg) c.shift[0],
                    shift1 = in(zmm_reg) c.shift[1],
                    lowest = in(zmm_reg) c.lowest,
                    c0 = in(zmm_reg) c.cubic[0],
                    c1 = in(zmm_reg) c.cubic[1],
                    c2 = in(zmm_reg) c.cubic[2],
                    c3 = in(zmm_reg) c.cubic[3],
                    half = in(zmm_reg) c.half,
                    sum00 = inout(zmm_reg) sums[0][0],
                    sum01 = inout(zmm_reg) sums[0][1],
                    sum10 = inout(zmm_reg) sums[1][0],
                    sum11 = inout(zmm_reg) sums[1][1],
                    // The upper halves of slots.
                    in("k3") 0xaaaa_aaaau32,
                    out("k1") _, out("k2") _,
                    out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _, out("zmm24") _, out("zmm25") _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                )
            }
        }
    };
}

stage!(scores_2, 2, scores);
stage!(both_2, 2, both);
stage!(scores_4, 4, scores);
stage!(both_4, 4, both);

/// A block whose weights are made and not yet in O.
#[derive(Clone, Copy)]
struct Waiting {
    v: *const f32,
    p: *const f32,
    o: *mut f32,
}

/// # Safety
/// The machine has tiles and the process may use them; the extents are checked by the table, DEPTH being the tiles
/// along d and half the groups of columns of V.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn weave<const DEPTH: usize>(args: &mut Woven<'_>, ahead: &mut [Ahead; 2]) -> usize {
    let _held = hold();
    let (n, panel) = (args.blocks.len(), DEPTH * SLOTS);
    let mut waiting: Option<Waiting> = None;
    let (s, weights) = (args.s.as_mut_ptr(), args.weights.as_mut_ptr());
    let mut unit = args.first;
    // SAFETY: inside the extents (contract).
    unsafe {
        while unit < 2 * n {
            let (strip, block) = (unit / n, unit % n);
            let lanes = strip * STRIP_LANES;
            let q = args.q.as_ptr().add(2 * strip * panel);
            let Some(c) = constants(&args.m[lanes..], args.log2_e) else { break };
            let [k, v] = [0, 1].map(|i| args.blocks[block][i].as_ptr());
            if block == 0 || unit == args.first {
                multiply::<1, 1, 1>(s, STRIP_LANES, k, panel, q, panel, [2, 2, DEPTH], false, &mut ahead[0]);
            }
            let p = weights.add(unit % 2 * 8 * SLOTS);
            let mut sums = [[_mm512_setzero_ps(); 2]; 2];
            for i in 0..4 {
                ahead[i % 2].ask::<Avx512>();
                // Past the last keys of a strip these again: nobody reads their scores.
                let next = match args.blocks.get(block + 1) {
                    _ if i < 3 => k.add((i + 1) * 2 * panel),
                    Some(next) => next[0].as_ptr(),
                    None => k,
                };
                let w = waiting.unwrap_or(Waiting { v, p, o: args.o.as_mut_ptr() });
                let at = Stage {
                    s: s.add(i % 2 * 1024),
                    s_next: s.add((i + 1) % 2 * 1024),
                    p: p.add(i * SLOTS),
                    k: next,
                    q,
                    v: w.v.add(i * DEPTH / 2 * 4 * SLOTS),
                    p_waiting: w.p,
                    o: w.o.add(i * DEPTH / 2 * 16 * 2 * STRIP_LANES),
                };
                match (DEPTH, waiting.is_some()) {
                    (2, false) => scores_2(&at, &c, &mut sums),
                    (2, true) => both_2(&at, &c, &mut sums),
                    (_, false) => scores_4(&at, &c, &mut sums),
                    (_, true) => both_4(&at, &c, &mut sums),
                }
            }
            waiting = None;
            let sums = sums.map(|[a, b]| _mm512_add_ps(a, b));
            let limit = _mm512_set1_ps(args.limit);
            // NaN counts as within: it would come out of a repetition as well.
            if sums.iter().any(|&sum| _mm512_cmp_ps_mask::<_CMP_LT_OQ>(limit, sum) != 0) {
                break;
            }
            for (z, sum) in sums.into_iter().enumerate() {
                let at = args.l.as_mut_ptr().add(lanes + z * 16);
                _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sum));
            }
            waiting = Some(Waiting { v, p, o: args.o.as_mut_ptr().add(lanes) });
            unit += 1;
        }
        if let Some(Waiting { v, p, o }) = waiting {
            multiply::<1, 1, 1>(o, 2 * STRIP_LANES, v, 4 * SLOTS, p, 4 * SLOTS, [2 * DEPTH, 2, 4], true, &mut ahead[1]);
        }
    }
    unit
}

/// What the exponentials of a strip need; `None` where a fused subtraction would round too much or a lane has no
/// maximum.
///
/// # Safety
/// AVX-512 is present.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn constants(m: &[f32], log2_e: f32) -> Option<Constants> {
    let log2_e = _mm512_set1_ps(log2_e);
    let mut shift = [log2_e; 2];
    for (shift, m) in shift.iter_mut().zip(m.chunks_exact(16)) {
        // SAFETY: a chunk has 16 elements.
        *shift = _mm512_mul_ps(unsafe { _mm512_loadu_ps(m.as_ptr()) }, log2_e);
        if _mm512_cmp_ps_mask::<_CMP_LE_OQ>(_mm512_abs_ps(*shift), _mm512_set1_ps(FUSED_LIMIT)) != 0xffff {
            return None;
        }
    }
    let cubic = CUBIC.map(|c| _mm512_set1_ps(c));
    Some(Constants { log2_e, shift, lowest: _mm512_set1_ps(-126.0), cubic, half: _mm512_set1_epi32(0x8000) })
}
