//! Products on a matrix unit that multiplies bf16 and sums in f32.
//!
//! A number is the exact sum of one (bf16), two (f16) or three (f32) bf16 parts; each part is the rounded remainder of
//! the ones before. A product of two numbers in parts is the sum of the products of their parts; those below the
//! rounding of the type are skipped.
//!
//! Operands are stored as panels of tiles. A tile holds 16 rows of A (or columns of B) and 32 elements of the summed
//! axis as 16 slots of two: slot j holds elements j and j + 16, which needs no shuffle. Rows of bf16 are taken in
//! memory order, with elements 2j and 2j + 1. The memory is an f32 workspace: a slot has the size of an f32.

use super::algorithms::Ahead;
use super::delta::DeltaKernels;
use super::kernels::{MatrixMut, Sum, extent};
use super::matrix_bf16::{Bf16Kernels, BlockMaxKernel, PipelineKernel};
use super::matrix_decode::StripKernels;
use fulgurite_core::{DType, Data};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Rows of A, and columns of B, in a tile.
pub(crate) const GROUP: usize = 16;
/// Elements of the summed axis in a tile.
pub(crate) const DEPTH: usize = 32;
/// Slots of a tile.
pub(crate) const SLOTS: usize = GROUP * DEPTH / 2;

/// bf16 whose sum is a number of this type, exactly.
pub(crate) fn parts(dtype: DType) -> usize {
    match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 3,
    }
}

/// An operand: for each group of rows (or columns) the tiles along the summed axis, the parts of each together.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    data: &'a [f32],
    /// Tiles along the summed axis from group to group.
    depth: usize,
    /// Number of parts that are multiplied; `stored`: number of parts in memory.
    parts: usize,
    stored: usize,
}

impl<'a> Panels<'a> {
    pub fn new(data: &'a [f32], depth: usize, parts: usize) -> Self {
        Panels { data, depth, parts, stored: parts }
    }
    /// The first `parts` alone: the same numbers, rounded to fewer digits.
    pub fn first(self, parts: usize) -> Self {
        Panels { parts: parts.min(self.stored), ..self }
    }
    /// The part from a group and a tile of the summed axis on.
    pub fn at(self, group: usize, tile: usize) -> Self {
        Panels { data: &self.data[(group * self.depth + tile) * self.stored * SLOTS..], ..self }
    }
    /// Elements of memory that panels take.
    pub const fn room(groups: usize, depth: usize, parts: usize) -> usize {
        groups * depth * parts * SLOTS
    }
    fn holds(&self, groups: usize, depth: usize) -> bool {
        self.data.len() >= extent(groups, self.depth * self.stored * SLOTS, depth * self.stored * SLOTS)
    }
}

pub(super) type Multiply =
    unsafe fn(*mut f32, usize, *const f32, usize, *const f32, usize, [usize; 3], bool, &mut Ahead);
pub(super) type Pack<T> = unsafe fn(*const T, usize, [usize; 2], *mut f32, usize) -> bool;
pub(super) type PackLanes = unsafe fn(*const f32, usize, [usize; 2], [usize; 2], *mut f32);
pub(super) type PackReweighed = unsafe fn([*const f32; 2], usize, [usize; 2], [usize; 2], *const f32, *mut f32);

/// Entry points of a matrix unit. As with [`Kernels`](super::Kernels), holding one tells you that the machine has it
/// and that the process may use it.
pub(crate) struct MatrixKernels {
    pub(super) hold: fn() -> Hold,
    /// By the parts of A and B.
    pub(super) multiply_1_1: Multiply,
    /// With the first part of a B that has two.
    pub(super) multiply_1_1_of_2: Multiply,
    pub(super) multiply_1_2: Multiply,
    pub(super) multiply_2_2: Multiply,
    pub(super) multiply_3_3: Multiply,
    pub(super) rows_f32: Pack<f32>,
    /// In one part (rounded) and in two (the rest cut off).
    pub(super) rows_f32_short: [Pack<f32>; 2],
    pub(super) rows_f16: Pack<f16>,
    pub(super) rows_bf16: Pack<bf16>,
    pub(super) turned_f32: Pack<f32>,
    pub(super) turned_f16: Pack<f16>,
    pub(super) turned_bf16: Pack<bf16>,
    /// By the number of parts.
    pub(super) lanes: [PackLanes; 3],
    pub(super) lanes_reweighed: [PackReweighed; 3],
    /// Additional entry points for bf16.
    pub bf16: &'static Bf16Kernels,
    /// Blocks of forward in bf16 with softmax and products at once, for 2 and 4 tiles along d.
    pub(super) pipeline: Option<[PipelineKernel; 2]>,
    /// The largest scores of such blocks.
    pub(super) block_max: Option<[BlockMaxKernel; 2]>,
    /// Few queries against many keys, in bf16.
    pub strips: &'static StripKernels,
    /// The gated delta rule, for f32, f16 and bf16.
    pub(super) delta: &'static [DeltaKernels; 3],
}

/// Rows of a tensor to pack: `rows` of `n` elements, `row` apart, from `offset` on.
pub(crate) struct Source<'a> {
    pub data: Data<'a>,
    pub offset: usize,
    pub row: usize,
    pub rows: usize,
    pub n: usize,
}

/// The unit as one thread has configured it. Products configure it themselves if no `Hold` exists, which costs as much
/// as dozens of tiles.
pub(crate) struct Hold {
    release: fn(),
    /// The state is the thread's.
    stays: PhantomData<*const ()>,
}

impl Hold {
    pub(super) fn new(release: fn()) -> Self {
        Hold { release, stays: PhantomData }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        (self.release)();
    }
}

impl MatrixKernels {
    /// Sets the unit up for all products of this thread until the result is dropped.
    pub fn hold(&self) -> Hold {
        (self.hold)()
    }

    /// The function behind [`hold`](Self::hold).
    pub fn holder(&self) -> fn() -> Hold {
        self.hold
    }

    /// The element-wise work of the gated delta rule between products, for tensors of a type.
    pub fn delta(&self, dtype: DType) -> &'static DeltaKernels {
        self.delta.iter().find(|x| x.dtype == dtype).expect("bug in fulgurite: a type that GatedDelta refuses")
    }

    /// C (+)= A B, in groups of rows and columns and tiles of the summed axis.
    pub fn multiply(
        &self,
        c: MatrixMut<'_>,
        a: Panels<'_>,
        b: Panels<'_>,
        [m, n, k]: [usize; 3],
        sum: Sum,
        ahead: &mut Ahead,
    ) {
        assert!(c.data.len() >= extent(m * GROUP, c.stride, n * GROUP), "C too small");
        assert!(a.holds(m, k) && b.holds(n, k), "operands too small");
        let multiply = match (a.parts, b.parts, b.stored) {
            _ if a.parts != a.stored => unreachable!("bug in fulgurite: some parts of a left operand"),
            (1, 1, 1) => self.multiply_1_1,
            (1, 1, 2) => self.multiply_1_1_of_2,
            (1, 2, 2) => self.multiply_1_2,
            (2, 2, 2) => self.multiply_2_2,
            (3, 3, 3) => self.multiply_3_3,
            parts => unreachable!("bug in fulgurite: operands in {parts:?} parts"),
        };
        let pitch = |x: &Panels<'_>| x.depth * x.stored * SLOTS;
        let (to, onto) = (c.data.as_mut_ptr(), sum == Sum::Onto);
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe {
            multiply(to, c.stride, a.data.as_ptr(), pitch(&a), b.data.as_ptr(), pitch(&b), [m, n, k], onto, ahead);
        }
    }

    /// Rows as rows of A, `depth` tiles a group; missing elements of the last group and tile are zero. In bf16 they
    /// want columns from [`Bf16Kernels::turn`]. True if all elements are finite.
    pub fn pack_rows(&self, from: &Source<'_>, to: &mut [f32], depth: usize) -> bool {
        assert!(from.n <= depth * DEPTH, "rows too long");
        let (row, size, range) = self.packed(from, to, [from.rows, depth]);
        // SAFETY: the machine has the unit, and the extents were just checked (the source by slicing).
        unsafe {
            match from.data {
                Data::F32(x) => (self.rows_f32)(x[range].as_ptr(), row, size, to.as_mut_ptr(), depth),
                Data::F16(x) => (self.rows_f16)(x[range].as_ptr(), row, size, to.as_mut_ptr(), depth),
                Data::Bf16(x) => (self.rows_bf16)(x[range].as_ptr(), row, size, to.as_mut_ptr(), depth),
                _ => unreachable!("bug in fulgurite: rows of a type that Problem refuses"),
            }
        }
    }

    /// Rows of f32 as rows of A in one or two parts, which lose their last digits, or in three.
    pub fn pack_rows_in(&self, rows: &[f32], [row, count, n]: [usize; 3], to: &mut [f32], depth: usize, parts: usize) {
        assert!(n <= depth * DEPTH && rows.len() >= extent(count, row, n), "rows too long");
        assert!(to.len() >= Panels::room(count.div_ceil(GROUP), depth, parts), "panels too small");
        let pack = if parts == 3 { self.rows_f32 } else { self.rows_f32_short[parts - 1] };
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { pack(rows.as_ptr(), row, [count, n], to.as_mut_ptr(), depth) };
    }

    /// Packs rows as columns of A: the rows are the summed axis, with space for `depth` tiles of it. Returns true if
    /// all elements are finite.
    pub fn pack_turned(&self, from: &Source<'_>, to: &mut [f32], depth: usize) -> bool {
        assert!(from.rows <= depth * DEPTH, "too many rows");
        let (row, size, range) = self.packed(from, to, [from.n, depth]);
        // SAFETY: the machine has the unit, and the extents were just checked (the source by slicing).
        unsafe {
            match from.data {
                Data::F32(x) => (self.turned_f32)(x[range].as_ptr(), row, size, to.as_mut_ptr(), depth),
                Data::F16(x) => (self.turned_f16)(x[range].as_ptr(), row, size, to.as_mut_ptr(), depth),
                Data::Bf16(x) => (self.turned_bf16)(x[range].as_ptr(), row, size, to.as_mut_ptr(), depth),
                _ => unreachable!("bug in fulgurite: rows of a type that Problem refuses"),
            }
        }
    }

    fn packed(
        &self,
        from: &Source<'_>,
        to: &[f32],
        [rows, depth]: [usize; 2],
    ) -> (usize, [usize; 2], std::ops::Range<usize>) {
        let parts = parts(from.data.dtype());
        assert!(to.len() >= Panels::room(rows.div_ceil(GROUP), depth, parts), "panels too small");
        (from.row, [from.rows, from.n], from.offset..from.offset + extent(from.rows, from.row, from.n))
    }

    /// Rows of lanes `[k][stride]` as one group of columns of B: rows `seen` from the first lane of `x` on, zeros
    /// around them up to whole tiles. Numbers that need more parts lose their last digits; a single part is rounded.
    pub fn pack_lanes(&self, x: &[f32], stride: usize, seen: [usize; 2], to: &mut [f32], parts: usize) {
        let tiles = [seen[0] / DEPTH, seen[1].div_ceil(DEPTH)];
        assert!(seen[0] <= seen[1] && x.len() >= extent(seen[1], stride, GROUP), "lanes too small");
        assert!(to.len() >= Panels::room(1, tiles[1], parts), "panels too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.lanes[parts - 1])(x.as_ptr(), stride, seen, tiles, to.as_mut_ptr()) }
    }

    /// As [`pack_lanes`](Self::pack_lanes) of P (1 + mean) - P U, lane by lane.
    pub fn pack_reweighed(
        &self,
        [p, pu]: [&[f32]; 2],
        stride: usize,
        seen: [usize; 2],
        mean: &[f32],
        to: &mut [f32],
        parts: usize,
    ) {
        let tiles = [seen[0] / DEPTH, seen[1].div_ceil(DEPTH)];
        let fits = p.len().min(pu.len()) >= extent(seen[1], stride, GROUP) && mean.len() >= GROUP;
        assert!(seen[0] <= seen[1] && fits, "lanes too small");
        assert!(to.len() >= Panels::room(1, tiles[1], parts), "panels too small");
        let (operands, to) = ([p.as_ptr(), pu.as_ptr()], to.as_mut_ptr());
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.lanes_reweighed[parts - 1])(operands, stride, seen, tiles, mean.as_ptr(), to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::simd::RowsAt;
    use fulgurite_core::random::Rng;

    fn units() -> Vec<&'static MatrixKernels> {
        let unit = |isa| crate::simd::kernels(isa).and_then(|kernels| kernels.matrix_for(DType::Bf16));
        let found: Vec<_> = [Isa::Amx, Isa::Avx512Bf16].into_iter().filter_map(unit).collect();
        if found.is_empty() {
            eprintln!("skipped: this machine has no matrix unit, or the process may not use it");
        }
        found
    }

    /// Products of every size up to three by three tiles, one tile and more deep, rows as rows and as columns of A.
    #[test]
    fn products_are_exact_to_the_rounding_of_sums() {
        let mut rng = Rng::new(5);
        for (unit, dtype) in units().into_iter().flat_map(|unit| DType::FLOATS.map(|dtype| (unit, dtype))) {
            for [m, n, k] in [[1, 16, 1], [16, 16, 32], [17, 32, 33], [40, 48, 70], [33, 16, 100]] {
                let mut random =
                    |n: usize| -> Vec<f32> { rng.normals(n, 1.0).into_iter().map(|x| dtype.round(x) as f32).collect() };
                let (a, b) = (random(m * k), random(k * n));
                let (depth, parts, groups) = (k.div_ceil(DEPTH), parts(dtype), m.div_ceil(GROUP));
                let mut b_packed = vec![f32::NAN; Panels::room(n / GROUP, depth, parts)];
                for (z, to) in b_packed.chunks_exact_mut(Panels::room(1, depth, parts)).enumerate() {
                    unit.pack_lanes(&b[z * GROUP..], n, [0, k], to, parts);
                }
                let turned: Vec<f32> = (0..m * k).map(|i| a[i % m * k + i / m]).collect();
                for (values, rows, row, by_rows) in [(&a, m, k, true), (&turned, k, m, false)] {
                    let wide: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
                    let tensor = fulgurite_core::Tensor::from_f64(dtype, &wide, &[m * k]).unwrap();
                    let from = Source { data: tensor.view().data(), offset: 0, row, rows, n: row };
                    let mut a_packed = vec![f32::NAN; Panels::room(groups, depth, parts)];
                    let mut b_packed = b_packed.clone();
                    if by_rows {
                        unit.pack_rows(&from, &mut a_packed, depth);
                        if dtype == DType::Bf16 {
                            let columns: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32(b[i % k * n + i / k])).collect();
                            let starts: Vec<usize> = (0..n).map(|j| j * k).collect();
                            let rows = RowsAt { data: &columns, starts: &starts, n: k };
                            unit.bf16.turn(rows, &mut b_packed, depth);
                        }
                    } else {
                        // Tiles that no row reaches are not written.
                        a_packed.fill(0.0);
                        assert!(unit.pack_turned(&from, &mut a_packed, depth));
                    }
                    let mut c = vec![1.0f32; groups * GROUP * n];
                    let (pa, pb) = (Panels::new(&a_packed, depth, parts), Panels::new(&b_packed, depth, parts));
                    let size = [groups, n / GROUP, depth];
                    unit.multiply(MatrixMut::at(&mut c, n, 0, 0), pa, pb, size, Sum::Onto, &mut Ahead::default());
                    for (i, row) in c.chunks_exact(n).take(m).enumerate() {
                        for (j, &got) in row.iter().enumerate() {
                            let terms = (0..k).map(|p| f64::from(a[i * k + p]) * f64::from(b[p * n + j]));
                            let (want, size) = terms.fold((1.0, 1.0), |(s, t), x| (s + x, t + x.abs()));
                            // f16 leaves out the products of second parts.
                            let allowed = size * if dtype == DType::F16 { 1e-5 } else { 1e-6 };
                            let diff = (f64::from(got) - want).abs();
                            assert!(diff <= allowed, "{dtype} {m}x{n}x{k} at {i}, {j}: {got} for {want}");
                        }
                    }
                }
            }
        }
    }
}
