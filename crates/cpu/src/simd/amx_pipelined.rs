//! Software-pipelined forward in bf16: while the vectors compute the exponentials of 32 keys, the tiles multiply the
//! scores of the next 32 and add an earlier block's weights times values to O.
//!
//! One `asm!` is a stage: 32 keys by 32 lanes of softmax, divided into 32 pairs of vectors, with tile instructions in
//! between. By itself the machine would overlap little of it: its window holds 512 operations, and softmax of such a
//! square has 800. K and V are read once per 32 lanes, so their tiles are loaded with a hint to bypass the L1 cache; Q,
//! O, scores and weights stay there.
//!
//! The last keys that a strip of lanes sees form a block of fewer stages, in which scores beyond a lane's end are
//! hidden first. The next strip overlaps with it: the stages in between compute its first scores, and add the last
//! block's weights to O.
//!
//! Operations and their order are those of the single steps (`amx_bf16::softmax`, `amx::multiply`), and so are the
//! bits.

use super::algorithms::Ahead;
use super::amx::{hold, multiply};
use super::amx_bf16::{CUBIC, FUSED_LIMIT};
use super::avx512::Avx512;
use super::matrix::SLOTS;
use super::matrix_bf16::{BlockPosition, KEY_TILES, Pipelined, PipelinedBlock, STRIP_LANES, Square};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Addresses of a stage's operands.
struct Stage {
    /// Scores of these keys `[32][32]`, and the destination of the next ones.
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

/// The constants of a stage.
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

    // Scores: step n of the summed axis, four products. Lines of O are prefetched in the meantime.
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
    /// Tiles of keys that have weights; those of the others are 0.
    tiles: usize,
}

impl Waiting {
    /// Adds the columns from a stage's share on, alone.
    ///
    /// # Safety
    /// As for [`multiply`].
    unsafe fn finish<const DEPTH: usize>(self, stage: usize, ahead: &mut Ahead) {
        let (v, o) = (self.v.wrapping_add(stage * v_share::<DEPTH>()), self.o.wrapping_add(stage * o_share::<DEPTH>()));
        let size = [(STAGES - stage) * DEPTH / 2, 2, self.tiles];
        // SAFETY: passed on.
        unsafe { multiply::<1, 1, 1>(o, 2 * STRIP_LANES, v, STAGES * SLOTS, self.p, STAGES * SLOTS, size, true, ahead) }
    }
}

/// Stages of a whole block, of 32 keys each; one adds a quarter of the columns of the block that waits.
const STAGES: usize = KEY_TILES;
/// Keys of a stage and of a block.
const KEYS: usize = 32;
const BLOCK: usize = STAGES * KEYS;

/// Elements of V and O between the columns of two stages.
const fn v_share<const DEPTH: usize>() -> usize {
    DEPTH / 2 * STAGES * SLOTS
}
const fn o_share<const DEPTH: usize>() -> usize {
    DEPTH / 2 * 16 * 2 * STRIP_LANES
}

/// 32 lanes and the blocks they see.
struct Strip {
    tile: usize,
    strip: usize,
    q: *const f32,
    o: *mut f32,
    m: *mut f32,
    l: *mut f32,
    hi: *const i32,
    /// Keys up to which every lane sees all, and some lane sees any, from the first block on.
    whole: usize,
    end: usize,
    blocks: Range<usize>,
    hidden: *const [bool],
}

impl Strip {
    /// All that is to be done, in order.
    fn all<const DEPTH: usize>(args: &mut Pipelined<'_, '_>) -> Vec<Strip> {
        let (first, origin, keys) = (args.first, args.origin, args.blocks.len() * BLOCK);
        let inside = |key: i32| (key as usize).saturating_sub(origin).min(keys);
        let mut strips = Vec::with_capacity(2 * args.tiles.len());
        for (tile, own) in args.tiles.iter_mut().enumerate().skip(first.tile) {
            for strip in 0..2 {
                let (here, lanes) = ((tile, strip), strip * STRIP_LANES);
                let begin = match (first.tile, first.strip) {
                    passed if here < passed => continue,
                    start if here == start && first.block.is_some() => first.block,
                    _ => None,
                };
                let hi = &own.hi[lanes..lanes + STRIP_LANES];
                let [whole, end] = [hi.iter().min(), hi.iter().max()].map(|key| key.map_or(0, |&key| inside(key)));
                let blocks = begin.unwrap_or(own.begin)..end.div_ceil(BLOCK);
                if blocks.clone().any(|block| !own.hidden.get(block).is_some_and(|&hidden| hidden)) {
                    strips.push(Strip {
                        tile,
                        strip,
                        q: own.q[2 * strip * DEPTH * SLOTS..].as_ptr(),
                        o: own.o[lanes..].as_mut_ptr(),
                        m: own.m[lanes..].as_mut_ptr(),
                        l: own.l[lanes..].as_mut_ptr(),
                        hi: hi.as_ptr(),
                        whole,
                        end,
                        blocks,
                        hidden: own.hidden,
                    });
                }
            }
        }
        strips
    }

    /// The first block from `from` on of which it sees a key.
    fn next(&self, from: usize) -> Option<usize> {
        // SAFETY: the flags outlive the strips: they are borrowed by the arguments.
        let hidden = unsafe { &*self.hidden };
        (from..self.blocks.end).find(|&block| !hidden.get(block).is_some_and(|&hidden| hidden))
    }

    fn position(&self, block: usize) -> Option<BlockPosition> {
        Some(BlockPosition { tile: self.tile, strip: self.strip, block: Some(block) })
    }
}

/// # Safety
/// The machine has tiles and the process may use them; the extents are checked by the table, DEPTH being the tiles
/// along d and half the groups of columns of V.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn pipeline<const DEPTH: usize>(
    args: &mut Pipelined<'_, '_>,
    ahead: &mut [Ahead; 2],
) -> Option<BlockPosition> {
    let _held = hold();
    let (panel, strips) = (DEPTH * SLOTS, Strip::all::<DEPTH>(args));
    let (s, weights) = (args.s.as_mut_ptr(), args.weights.as_mut_ptr());
    let mut waiting: Option<Waiting> = None;
    // Index of the next half of the scores and weights, and whether its scores are computed.
    let (mut turn, mut half, mut made) = (0, 0, false);
    // SAFETY: inside the extents (contract).
    unsafe {
        for (i, strip) in strips.iter().enumerate() {
            let mut constants_of = None;
            let mut next_block = strip.next(strip.blocks.start);
            while let Some(block) = next_block {
                next_block = strip.next(block + 1);
                let PipelinedBlock { k, v, finite } = args.blocks[block];
                let [k, v] = [k, v].map(<[f32]>::as_ptr);
                let stages = (strip.end - block * BLOCK).min(BLOCK).div_ceil(KEYS);
                let p = weights.add(half * 2 * STAGES * SLOTS);
                let mut sums = [[_mm512_setzero_ps(); 2]; 2];
                for stage in 0..stages {
                    let (own, next) = (s.add(turn * KEYS * STRIP_LANES), s.add((1 - turn) * KEYS * STRIP_LANES));
                    if !made {
                        let size = [2, 2, DEPTH];
                        multiply::<1, 1, 1>(own, STRIP_LANES, k, panel, strip.q, panel, size, false, &mut ahead[0]);
                        made = true;
                    }
                    let key = block * BLOCK + stage * KEYS;
                    if let Some(modify) = &mut args.modify {
                        let s = std::slice::from_raw_parts_mut(own, KEYS * STRIP_LANES);
                        modify(Square { tile: strip.tile, strip: strip.strip, key: args.origin + key, s });
                    }
                    if key + KEYS > strip.whole {
                        hide(own, args.origin + key, strip.hi);
                    }
                    if constants_of.is_none() && finite {
                        settle(own, strip.m);
                        constants_of = constants(strip.m, args.log2_e);
                    }
                    let Some(c) = constants_of.as_ref().filter(|_| finite) else {
                        waiting.inspect(|own| own.finish::<DEPTH>(0, &mut ahead[1]));
                        return strip.position(block);
                    };
                    ahead[stage % 2].prefetch::<Avx512>();
                    // Past the last keys, repeat them: nothing reads their scores.
                    let follower = strips.get(i + 1);
                    let first_of = |block: usize| args.blocks[block].k.as_ptr();
                    let (next_k, q) = if stage + 1 < stages {
                        (k.add((stage + 1) * 2 * panel), strip.q)
                    } else if let Some(next) = next_block {
                        (first_of(next), strip.q)
                    } else {
                        let first = |own: &Strip| own.next(own.blocks.start).map(|block| (first_of(block), own.q));
                        follower.and_then(first).unwrap_or((k, strip.q))
                    };
                    let w = waiting.unwrap_or(Waiting { v, p, o: strip.o, tiles: 0 });
                    let at = Stage {
                        s: own,
                        s_next: next,
                        p: p.add(stage * SLOTS),
                        k: next_k,
                        q,
                        v: w.v.add(stage * v_share::<DEPTH>()),
                        p_waiting: w.p,
                        o: w.o.add(stage * o_share::<DEPTH>()),
                    };
                    match (DEPTH, waiting.is_some()) {
                        (2, false) => scores_2(&at, c, &mut sums),
                        (2, true) => both_2(&at, c, &mut sums),
                        (_, false) => scores_4(&at, c, &mut sums),
                        (_, true) => both_4(&at, c, &mut sums),
                    }
                    turn = 1 - turn;
                }
                if stages < STAGES {
                    waiting.inspect(|own| own.finish::<DEPTH>(stages, &mut ahead[1]));
                }
                let sums = sums.map(|[a, b]| _mm512_add_ps(a, b));
                let limit = _mm512_set1_ps(args.limit);
                // NaN counts as within: it would come out of a repetition as well.
                if sums.iter().any(|&sum| _mm512_cmp_ps_mask::<_CMP_LT_OQ>(limit, sum) != 0) {
                    return strip.position(block);
                }
                for (z, sum) in sums.into_iter().enumerate() {
                    let at = strip.l.add(z * 16);
                    _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sum));
                    p.add((z * STAGES + stages) * SLOTS).write_bytes(0, (STAGES - stages) * SLOTS);
                }
                waiting = Some(Waiting { v, p, o: strip.o, tiles: stages });
                half = 1 - half;
            }
        }
        waiting.inspect(|own| own.finish::<DEPTH>(0, &mut ahead[1]));
    }
    None
}

/// Scores of 32 keys from `key` on that a lane does not see become -inf.
///
/// # Safety
/// AVX-512 is present; `[32][32]` scores and 32 ends.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn hide(s: *mut f32, key: usize, hi: *const i32) {
    let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
    for z in 0..2 {
        // SAFETY: inside the extents (caller).
        unsafe {
            let hi = _mm512_loadu_si512(hi.add(z * 16).cast());
            for j in 0..KEYS {
                let seen = _mm512_cmpgt_epi32_mask(hi, _mm512_set1_epi32((key + j) as i32));
                let at = s.add(j * STRIP_LANES + z * 16);
                // Use whole vectors: they are read again before they have reached the cache.
                _mm512_storeu_ps(at, _mm512_mask_mov_ps(hidden, seen, _mm512_loadu_ps(at)));
            }
        }
    }
}

/// Gives lanes that have no maximum that of 32 keys. NaN does not raise it.
///
/// # Safety
/// AVX-512 is present; `[32][32]` scores and 32 maxima.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn settle(s: *const f32, m: *mut f32) {
    let none = _mm512_set1_ps(f32::NEG_INFINITY);
    for z in 0..2 {
        // SAFETY: inside the extents (caller).
        unsafe {
            let at = m.add(z * 16);
            let old = _mm512_loadu_ps(at);
            let fresh = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(old, none);
            if fresh != 0 {
                let mut top = [none; 4];
                for j in 0..KEYS {
                    top[j % 4] = _mm512_max_ps(_mm512_loadu_ps(s.add(j * STRIP_LANES + z * 16)), top[j % 4]);
                }
                let top = _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
                _mm512_storeu_ps(at, _mm512_mask_mov_ps(old, fresh, top));
            }
        }
    }
}

/// Parameters of a strip's exponentials; `None` if a fused subtraction would round too much or a lane has no maximum.
///
/// # Safety
/// AVX-512 is present; 32 maxima.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn constants(m: *const f32, log2_e: f32) -> Option<Constants> {
    let log2_e = _mm512_set1_ps(log2_e);
    let mut shift = [log2_e; 2];
    for (z, shift) in shift.iter_mut().enumerate() {
        // SAFETY: inside the extents (caller).
        *shift = _mm512_mul_ps(unsafe { _mm512_loadu_ps(m.add(z * 16)) }, log2_e);
        if _mm512_cmp_ps_mask::<_CMP_LE_OQ>(_mm512_abs_ps(*shift), _mm512_set1_ps(FUSED_LIMIT)) != 0xffff {
            return None;
        }
    }
    let cubic = CUBIC.map(|c| _mm512_set1_ps(c));
    Some(Constants { log2_e, shift, lowest: _mm512_set1_ps(-126.0), cubic, half: _mm512_set1_epi32(0x8000) })
}
