//! 8-bit integers on tiles: signed bytes, four per slot, summed in 32 bits.

use super::amx::hold;
use std::arch::asm;

/// Asks for one tile of A, line by line.
macro_rules! asks {
    () => {
        "prefetcht0 [{ask}]\n prefetcht0 [{ask} + 64]\n prefetcht0 [{ask} + 128]\n prefetcht0 [{ask} + 192]\n
         prefetcht0 [{ask} + 256]\n prefetcht0 [{ask} + 320]\n prefetcht0 [{ask} + 384]\n prefetcht0 [{ask} + 448]\n
         prefetcht0 [{ask} + 512]\n prefetcht0 [{ask} + 576]\n prefetcht0 [{ask} + 640]\n prefetcht0 [{ask} + 704]\n
         prefetcht0 [{ask} + 768]\n prefetcht0 [{ask} + 832]\n prefetcht0 [{ask} + 896]\n prefetcht0 [{ask} + 960]"
    };
}

/// One block of C of `$m` by `$n` tiles; tiles 0 to 3 are C, 4 and 5 of A, 6 and 7 of B.
macro_rules! block {
    ($zero:literal, $loads:literal, $products:literal, $stores:literal, $c:expr, $row:expr, $a:expr, $b:expr, $k:expr, $ask:expr) => {
        asm!(
            $zero,
            "2:",
            $loads,
            $products,
            asks!(),
            "add {ask}, 1024",
            "add {a0}, 1024", "add {a1}, 1024", "add {b0}, 1024", "add {b1}, 1024",
            "dec {k}",
            "jnz 2b",
            $stores,
            "/* {c1} */",
            c = in(reg) $c,
            c1 = in(reg) $c.byte_add(16 * $row),
            row = in(reg) $row,
            a0 = inout(reg) $a[0] => _,
            a1 = inout(reg) $a[1] => _,
            b0 = inout(reg) $b[0] => _,
            b1 = inout(reg) $b[1] => _,
            k = inout(reg) $k => _,
            ask = inout(reg) $ask => _,
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        )
    };
}

/// # Safety
/// The machine has tiles of bytes and the process may use them; the extents are valid, with pitches in slots.
pub(super) unsafe fn multiply(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    a_pitch: usize,
    b: *const f32,
    b_pitch: usize,
    [m, n, k]: [usize; 3],
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    // SAFETY: the shape is held over all blocks; each block lies inside the extents.
    unsafe {
        let _shaped = hold();
        for i in (0..m).step_by(2) {
            for j in (0..n).step_by(2) {
                let (rows, columns) = ((m - i).min(2), (n - j).min(2));
                let (a, b) = (a.add(i * a_pitch), b.add(j * b_pitch));
                let (a, b) = ([a, a.add((rows - 1) * a_pitch)], [b, b.add((columns - 1) * b_pitch)]);
                let (c, row) = (c.add(i * 16 * ldc + j * 16), ldc * 4);
                // Groups of the next two rows, one for each of the first two columns; any address is allowed.
                let ask = a[0].wrapping_add((2 + j / 2 % 2) * a_pitch);
                match (rows, columns) {
                    (2, 2) => block!(
                        "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]\n tileloadd tmm7, [{b1} + {line}*1]\n tileloadd tmm5, [{a1} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6\n tdpbssd tmm1, tmm4, tmm7\n tdpbssd tmm2, tmm5, tmm6\n tdpbssd tmm3, tmm5, tmm7",
                        "tilestored [{c} + {row}*1], tmm0\n tilestored [{c} + {row}*1 + 64], tmm1\n tilestored [{c1} + {row}*1], tmm2\n tilestored [{c1} + {row}*1 + 64], tmm3",
                        c,
                        row,
                        a,
                        b,
                        k,
                        ask
                    ),
                    (2, _) => block!(
                        "tilezero tmm0\n tilezero tmm2",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]\n tileloadd tmm5, [{a1} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6\n tdpbssd tmm2, tmm5, tmm6",
                        "tilestored [{c} + {row}*1], tmm0\n tilestored [{c1} + {row}*1], tmm2",
                        c,
                        row,
                        a,
                        b,
                        k,
                        ask
                    ),
                    (_, 2) => block!(
                        "tilezero tmm0\n tilezero tmm1",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]\n tileloadd tmm7, [{b1} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6\n tdpbssd tmm1, tmm4, tmm7",
                        "tilestored [{c} + {row}*1], tmm0\n tilestored [{c} + {row}*1 + 64], tmm1",
                        c,
                        row,
                        a,
                        b,
                        k,
                        ask
                    ),
                    (_, _) => block!(
                        "tilezero tmm0",
                        "tileloadd tmm4, [{a0} + {line}*1]\n tileloadd tmm6, [{b0} + {line}*1]",
                        "tdpbssd tmm0, tmm4, tmm6",
                        "tilestored [{c} + {row}*1], tmm0",
                        c,
                        row,
                        a,
                        b,
                        k,
                        ask
                    ),
                }
            }
        }
    }
}
