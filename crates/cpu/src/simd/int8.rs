//! Products of 8-bit integers, and the work between two of them: tables for a matrix unit and for plain code.
//!
//! Panels are those of [`matrix`](super::matrix) with bytes: a tile has 16 rows of A (or columns of B) and 64 elements
//! of the summed axis, four per slot. Rows in memory order have neighbours in a slot; if keys are summed over, slot j
//! of a tile holds keys j, j + 16, j + 32 and j + 48.

use super::Kernels;
use super::algorithms::{ExpKind, SoftmaxArgs, SoftmaxStats};
use super::int8_codes::{self, BYTES, Coding, slot};
use super::kernels::extent;
use super::matrix::{GROUP, SLOTS};

type ToScores = unsafe fn(&mut [f32], usize, &[f32], &[f32], &[f32]);
pub(super) type Multiply = unsafe fn(*mut f32, usize, *const f32, usize, *const f32, usize, [usize; 3]);

/// Scores that are still integers, and the factors that convert them: `key * lane * integer + bias`.
pub(crate) struct Integers<'a> {
    /// Scales of keys, 16 of them from `at` on in every `pitch`; the same for each 64 keys of a block.
    pub keys: &'a [f32],
    pub pitch: usize,
    pub at: usize,
    pub lane: &'a [f32],
    pub bias: &'a [f32],
}

type Softmax = unsafe fn(&mut SoftmaxArgs<'_>, Option<&Integers<'_>>, *mut f32, usize) -> SoftmaxStats;

/// Entry points; as with [`Kernels`], holding one tells you that the machine has it.
pub(crate) struct Int8Kernels {
    pub(super) multiply: Multiply,
    pub(super) to_scores: ToScores,
    pub(super) softmax: Option<Softmax>,
    pub(super) pack_weights: unsafe fn(&[f32], usize, [usize; 2], &mut [f32]),
    pub(super) add: unsafe fn(&mut [f32], &[f32], f32, &[f32]),
    pub coding: &'static Coding,
}

static PLAIN: Int8Kernels = Int8Kernels {
    multiply: plain::multiply,
    to_scores: plain::to_scores,
    softmax: None,
    pack_weights,
    add: plain::add,
    coding: &int8_codes::PLAIN,
};

impl Kernels {
    /// The integer kernels that go with this instruction set.
    pub fn int8(&self) -> &'static Int8Kernels {
        #[cfg(target_arch = "x86_64")]
        if self.matrix.is_some() && super::amx::has_int8() {
            return &super::vector_int8::TILES;
        }
        #[cfg(target_arch = "x86_64")]
        if self.lanes == GROUP {
            return super::vector_int8::without_tiles();
        }
        &PLAIN
    }
}

impl Int8Kernels {
    /// C = A B in 32-bit integers, whose bits C holds: groups of rows and columns, tiles of the summed axis, and how far
    /// apart groups are.
    pub fn multiply(&self, c: &mut [f32], ldc: usize, [a, b]: [&[f32]; 2], pitch: [usize; 2], [m, n, k]: [usize; 3]) {
        assert!(c.len() >= extent(m * GROUP, ldc, n * GROUP), "C too small");
        assert!(a.len() >= extent(m, pitch[0], k * SLOTS) && b.len() >= extent(n, pitch[1], k * SLOTS), "operands");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.multiply)(c.as_mut_ptr(), ldc, a.as_ptr(), pitch[0], b.as_ptr(), pitch[1], [m, n, k]) }
    }

    /// Rows of `stride` integers into scores: `key[i] * lane[j] * integer + bias[j]`.
    pub fn to_scores(&self, s: &mut [f32], stride: usize, key: &[f32], lane: &[f32], bias: &[f32]) {
        assert!(s.len() >= key.len() * stride && lane.len() >= stride && bias.len() >= stride, "scores");
        assert!(stride.is_multiple_of(GROUP), "lanes");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.to_scores)(s, stride, key, lane, bias) }
    }

    /// Whether [`softmax`](Self::softmax) computes this exponential.
    pub fn suits(&self, exp: ExpKind) -> bool {
        self.softmax.is_some() && matches!(exp, ExpKind::Poly(_))
    }

    /// One step of the online softmax; codes of P go to `weights`, groups of lanes `tiles` tiles apart.
    pub fn softmax(
        &self,
        args: &mut SoftmaxArgs<'_>,
        integers: Option<&Integers<'_>>,
        weights: &mut [f32],
        tiles: usize,
    ) -> SoftmaxStats {
        let vectors = args.stride / GROUP;
        assert!(args.stride.is_multiple_of(GROUP) && vectors <= args.ranges.len(), "lanes of the tile");
        assert!(args.ranges[..vectors].iter().all(|r| r.0 >= r.1 || r.1 * args.stride <= args.s.len()), "keys");
        assert!(args.ranges[..vectors].iter().all(|r| r.1 <= tiles * BYTES), "keys of the block");
        assert!(weights.len() >= vectors * tiles * SLOTS, "panels too small");
        let lanes = [args.m.len(), args.l.len(), args.alpha.len(), args.lo.len(), args.hi.len()];
        assert!(lanes.iter().all(|&n| n >= args.stride), "lane arrays too small");
        if let Some(Integers { keys, pitch, at, lane, bias }) = integers {
            let last = args.ranges[..vectors].iter().filter(|r| r.0 < r.1).map(|r| r.1).max().unwrap_or(0);
            assert!(keys.len() >= extent(last.div_ceil(GROUP), *pitch, at + GROUP), "scales of keys");
            assert!(lane.len().min(bias.len()) >= args.stride, "scales of lanes");
        }
        let softmax = self.softmax.expect("bug in fulgurite: asked before");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { softmax(args, integers, weights.as_mut_ptr(), tiles * SLOTS) }
    }

    /// Codes of weights of 16 lanes, keys `seen`, zeros around them up to whole tiles.
    pub fn pack_weights(&self, p: &[f32], stride: usize, seen: [usize; 2], to: &mut [f32]) {
        assert!(seen[0] <= seen[1] && p.len() >= extent(seen[1], stride, GROUP), "lanes too small");
        assert!(to.len() >= seen[1].div_ceil(BYTES) * SLOTS, "panels too small");
        // SAFETY: the extents were just checked.
        unsafe { (self.pack_weights)(p, stride, seen, to) }
    }

    /// `o = alpha o + factor integers`, row by row, with one lane per element of alpha.
    pub fn add(&self, o: &mut [f32], integers: &[f32], factor: f32, alpha: &[f32]) {
        assert!(o.len() == integers.len() && o.len().is_multiple_of(alpha.len()), "sizes");
        assert!(alpha.len().is_multiple_of(GROUP), "lanes");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.add)(o, integers, factor, alpha) }
    }
}

fn bytes(slot: f32) -> [i32; 4] {
    slot.to_bits().to_le_bytes().map(|b| i32::from(b as i8))
}

unsafe fn pack_weights(p: &[f32], stride: usize, seen: [usize; 2], to: &mut [f32]) {
    for tile in seen[0] / BYTES..seen[1].div_ceil(BYTES) {
        for j in 0..GROUP {
            for lane in 0..GROUP {
                let code = |i: usize| {
                    let key = tile * BYTES + i * GROUP + j;
                    let seen = (seen[0]..seen[1]).contains(&key);
                    if seen { fulgurite_core::Int8Attention::weight(p[key * stride + lane]) } else { 0 }
                };
                to[tile * SLOTS + j * GROUP + lane] = slot([code(0), code(1), code(2), code(3)]);
            }
        }
    }
}

pub(super) mod plain {
    use super::{GROUP, SLOTS, bytes};

    /// # Safety
    /// The extents are valid.
    pub(in super::super) unsafe fn multiply(
        c: *mut f32,
        ldc: usize,
        a: *const f32,
        a_pitch: usize,
        b: *const f32,
        b_pitch: usize,
        [m, n, k]: [usize; 3],
    ) {
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let mut sums = [[0i32; GROUP]; GROUP];
            for tile in 0..k {
                // SAFETY: inside the extents.
                let [a, b] = unsafe {
                    [a.add(i * a_pitch + tile * SLOTS), b.add(j * b_pitch + tile * SLOTS)]
                        .map(|p| std::slice::from_raw_parts(p, SLOTS))
                };
                for (row, sums) in sums.iter_mut().enumerate() {
                    for slot in 0..GROUP {
                        let x = bytes(a[row * GROUP + slot]);
                        for (sum, &y) in sums.iter_mut().zip(&b[slot * GROUP..]) {
                            let y = bytes(y);
                            *sum += x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
                        }
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                for (column, &sum) in sums.iter().enumerate() {
                    // SAFETY: inside the extents.
                    unsafe { *c.add((i * GROUP + row) * ldc + j * GROUP + column) = f32::from_bits(sum as u32) };
                }
            }
        }
    }

    pub(super) unsafe fn to_scores(s: &mut [f32], stride: usize, key: &[f32], lane: &[f32], bias: &[f32]) {
        for (row, &key) in s.chunks_exact_mut(stride).zip(key) {
            for ((s, &lane), &bias) in row.iter_mut().zip(lane).zip(bias) {
                *s = (s.to_bits() as i32 as f32 * key).mul_add(lane, bias);
            }
        }
    }

    pub(super) unsafe fn add(o: &mut [f32], integers: &[f32], factor: f32, alpha: &[f32]) {
        for ((o, x), alpha) in o.iter_mut().zip(integers).zip(alpha.iter().cycle()) {
            *o = (x.to_bits() as i32 as f32).mul_add(factor, *o * alpha);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use fulgurite_core::random::Rng;

    #[test]
    fn products_are_exact() {
        let mut rng = Rng::new(2);
        let tables = [Isa::Portable, Isa::Avx512, Isa::Amx].map(|isa| crate::simd::kernels(isa).map(|k| k.int8()));
        for [m, n, k] in [[1, 1, 1], [2, 2, 1], [3, 2, 3], [5, 4, 2]] {
            let mut random = |groups: usize| -> Vec<i8> {
                (0..groups * k * SLOTS * 4).map(|_| (rng.range(0..255) as i32 - 127) as i8).collect()
            };
            let (a, b) = (random(m), random(n));
            let slots = |x: &[i8]| x.chunks_exact(4).map(|x| slot([x[0], x[1], x[2], x[3]])).collect::<Vec<f32>>();
            let (pa, pb) = (slots(&a), slots(&b));
            for table in tables.into_iter().flatten() {
                let mut c = vec![0.0f32; m * n * GROUP * GROUP];
                table.multiply(&mut c, n * GROUP, [&pa, &pb], [k * SLOTS; 2], [m, n, k]);
                for (at, got) in c.iter().enumerate() {
                    let (row, column) = (at / (n * GROUP), at % (n * GROUP));
                    let byte =
                        |x: &[i8], group: usize, tile: usize, i: usize| i64::from(x[(group * k + tile) * 1024 + i]);
                    let want: i64 = (0..k * BYTES)
                        .map(|p| {
                            let (tile, s, i) = (p / BYTES, p % BYTES / 4, p % 4);
                            byte(&a, row / GROUP, tile, row % GROUP * BYTES + s * 4 + i)
                                * byte(&b, column / GROUP, tile, (s * GROUP + column % GROUP) * 4 + i)
                        })
                        .sum();
                    assert_eq!(i64::from(got.to_bits() as i32), want, "{m}x{n}x{k} at {row}, {column}");
                }
            }
        }
    }
}
