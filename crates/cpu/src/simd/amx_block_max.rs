//! The largest score of each lane over a block of 128 keys, in bf16: block skipping needs it before anything else is
//! computed. Scores leave the tiles for a ring in the L1 cache, and their maxima are taken two groups of keys later,
//! between the tile instructions.

use super::amx::hold;
use super::matrix::SLOTS;
use super::matrix_bf16::{BLOCK_MAX_ROOM, STRIP_LANES, Seen};
use std::arch::asm;
use std::arch::x86_64::*;

/// Groups of 16 keys in a block.
const GROUPS: usize = 8;
/// Scores of one group of keys and a strip of lanes: two tiles.
const STEP: usize = 2 * SLOTS;
/// Groups of keys between a score and its maximum; the ring holds twice as many. Scores of the group in between are 2
/// KiB apart from both: a load waits for earlier stores whose addresses have the same low 12 bits.
const BEHIND: usize = 2;
const _: () = assert!(2 * BEHIND * STEP == BLOCK_MAX_ROOM);

#[rustfmt::skip]
macro_rules! text {
    // One row of 16 lanes; NaN is no maximum, so the row is the first operand.
    (max $row:literal $t:literal $to:literal) => { concat!(
        "vmovups ", $t, ", [{from} + 64*", $row, "]\n vmaxps {", $to, "}, ", $t, ", {", $to, "}\n") };
    (max4 $r0:literal $r1:literal $r2:literal $r3:literal $a:literal $b:literal) => { concat!(
        text!(max $r0 "zmm16" $a), text!(max $r1 "zmm17" $b), text!(max $r2 "zmm18" $a), text!(max $r3 "zmm19" $b)) };
    (maxima 0) => { concat!(text!(max4 0 1 2 3 "a0" "a1"), text!(max4 4 5 6 7 "a0" "a1")) };
    (maxima 1) => { concat!(text!(max4 8 9 10 11 "a0" "a1"), text!(max4 12 13 14 15 "a0" "a1")) };
    (maxima 2) => { concat!(text!(max4 16 17 18 19 "b0" "b1"), text!(max4 20 21 22 23 "b0" "b1")) };
    (maxima 3) => { concat!(text!(max4 24 25 26 27 "b0" "b1"), text!(max4 28 29 30 31 "b0" "b1")) };
    (maxima none) => { "" };

    // Two tiles along d: the queries stay in tiles.
    (queries 2) => { "tileloadd tmm4, [{q} + {line}*1]\n tileloadd tmm5, [{q} + {line}*1 + 1024]\n
                      tileloadd tmm6, [{q} + {line}*1 + 2048]\n tileloadd tmm7, [{q} + {line}*1 + 3072]\n" };
    (queries 4) => { "" };
    (group 2 $m0:tt $m1:tt $m2:tt $m3:tt) => { concat!("tilezero tmm0\n tilezero tmm1\n",
        "tileloadd tmm2, [{k} + {line}*1]\n tdpbf16ps tmm0, tmm2, tmm4\n", text!(maxima $m0),
        "tdpbf16ps tmm1, tmm2, tmm6\n tileloadd tmm3, [{k} + {line}*1 + 1024]\n", text!(maxima $m1),
        "tdpbf16ps tmm0, tmm3, tmm5\n", text!(maxima $m2), "tdpbf16ps tmm1, tmm3, tmm7\n", text!(maxima $m3), text!(stores)) };
    (step $n:literal) => { concat!(
        "tileloadd tmm2, [{k} + {line}*1 + 1024*", $n, "]\n tileloadd tmm4, [{q} + {line}*1 + 1024*", $n, "]\n tdpbf16ps tmm0, tmm2, tmm4\n",
        "tileloadd tmm5, [{q} + {line}*1 + 4096 + 1024*", $n, "]\n tdpbf16ps tmm1, tmm2, tmm5\n") };
    (group 4 $m0:tt $m1:tt $m2:tt $m3:tt) => { concat!("tilezero tmm0\n tilezero tmm1\n",
        text!(step 0), text!(maxima $m0), text!(step 1), text!(maxima $m1),
        text!(step 2), text!(maxima $m2), text!(step 3), text!(maxima $m3), text!(stores)) };
    (stores) => { "tilestored [{to} + {line}*1], tmm0\n tilestored [{to} + {line}*1 + 1024], tmm1\n add {k}, {panel}\n" };
}

macro_rules! scores {
    ($name:ident, $depth:tt) => {
        /// The scores of a block and a strip of lanes, and the maxima of all but the last [`BEHIND`] groups of keys, which lie
        /// in the second half of the ring.
        ///
        /// # Safety
        /// The machine has tiles, the process may use them and this thread holds their shape; panels of a block of keys
        /// and of a strip of queries, and [`BLOCK_MAX_ROOM`] at `s`.
        #[inline]
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
        unsafe fn $name(k: *const f32, q: *const f32, s: *mut f32, top: &mut [[__m512; 2]; 2]) {
            // SAFETY: the extents are the caller's. Tiles are written before they are read and hold nothing afterwards.
            unsafe {
                asm!(
                    text!(queries $depth),
                    text!(group $depth none none none none), "add {to}, 2048",
                    text!(group $depth none none none none), "add {to}, 2048",
                    // Scores are written to a half of the ring and their maxima read from the other, in turn.
                    "2:",
                    text!(group $depth 0 1 2 3),
                    "add {to}, 2048\n add {from}, 2048",
                    text!(group $depth 0 1 2 3),
                    "lea {spare}, [{from} - 2048]\n lea {from}, [{to} - 2048]\n mov {to}, {spare}",
                    "dec {left}",
                    "jnz 2b",
                    "/* {q} */",
                    to = inout(reg) s => _,
                    from = inout(reg) s => _,
                    spare = out(reg) _,
                    k = inout(reg) k => _,
                    q = in(reg) q,
                    left = inout(reg) GROUPS / 2 - 1 => _,
                    line = in(reg) 64usize,
                    panel = const $depth * 1024,
                    a0 = inout(zmm_reg) top[0][0],
                    a1 = inout(zmm_reg) top[0][1],
                    b0 = inout(zmm_reg) top[1][0],
                    b1 = inout(zmm_reg) top[1][1],
                    out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                )
            }
        }
    };
}

scores!(scores_2, 2);
scores!(scores_4, 4);

/// Whether a block of 128 keys may weigh something in 64 lanes, DEPTH tiles along d.
///
/// # Safety
/// The machine has tiles and the process may use them; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn block_max<const DEPTH: usize>(
    [k, q]: [*const f32; 2],
    s: *mut f32,
    seen: &mut Seen<'_>,
) -> [bool; 2] {
    let _held = hold();
    let (limit, near) = (_mm512_set1_ps(seen.limit), _mm512_set1_ps(seen.near));
    let (mut high, mut far) = (0, 0);
    for strip in 0..2 {
        let mut own = [[_mm512_set1_ps(f32::NEG_INFINITY); 2]; 2];
        // SAFETY: inside the extents (contract).
        unsafe {
            let q = q.add(strip * 2 * DEPTH * SLOTS);
            if DEPTH == 2 {
                scores_2(k, q, s, &mut own)
            } else {
                scores_4(k, q, s, &mut own)
            }
            let last = s.add(BEHIND * STEP);
            for (z, mut own) in own.into_iter().enumerate() {
                for row in 0..BEHIND * 16 {
                    let scores = _mm512_loadu_ps(last.add(row / 16 * STEP + z * SLOTS + row % 16 * 16));
                    own[row % 2] = _mm512_max_ps(scores, own[row % 2]);
                }
                let (own, lane) = (_mm512_max_ps(own[0], own[1]), strip * STRIP_LANES + z * 16);
                let (top, m) = (seen.top.as_mut_ptr().add(lane), _mm512_loadu_ps(seen.m.as_ptr().add(lane)));
                let next = _mm512_max_ps(own, _mm512_loadu_ps(top));
                _mm512_storeu_ps(top, next);
                // This also ignores lanes that saw no key: -inf - -inf is NaN.
                high |= _mm512_cmp_ps_mask::<_CMP_GE_OQ>(_mm512_sub_ps(own, next), limit);
                far |= _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(_mm512_sub_ps(own, m), near);
            }
        }
    }
    [high != 0, far == 0]
}
