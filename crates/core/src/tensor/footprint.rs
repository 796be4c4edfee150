//! The bytes that a strided tensor covers, and whether two tensors can share one.

use super::layout::{Dims, MAX_RANK};

/// The bytes of a tensor: rows of contiguous bytes whose distances are multiples of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Address of the first byte.
    start: u64,
    /// Bytes of a row.
    row: u64,
    /// Bytes from the first to the last one.
    extent: u64,
    /// Greatest common divisor of the distances between rows; 0 if there is one row.
    step: u64,
}

impl Footprint {
    /// The bytes of a tensor that starts at an address; `None` if it has no elements.
    pub(super) fn new(start: u64, element_bytes: usize, shape: &Dims, strides: &Dims) -> Option<Footprint> {
        if shape.contains(&0) {
            return None;
        }
        let mut axes = [(0u64, 1u64); MAX_RANK];
        for (axis, (&stride, &size)) in axes.iter_mut().zip(strides.iter().zip(shape.iter()).rev()) {
            *axis = (stride as u64 * element_bytes as u64, size as u64);
        }
        // Most tensors are row-major, and already sorted.
        if !axes[..shape.len()].is_sorted() {
            axes[..shape.len()].sort_unstable();
        }
        let (mut row, mut extent, mut step) = (element_bytes as u64, element_bytes as u64, 0);
        for (stride, size) in axes.into_iter().filter(|&(stride, size)| size > 1 && stride > 0) {
            match step == 0 && stride <= row {
                true => row += stride * (size - 1),
                false => step = gcd(step, stride),
            }
            extent += stride * (size - 1);
        }
        Some(Footprint { start, row, extent, step })
    }

    /// Whether two tensors can share a byte. Never false if they do; true for some tensors that lie between each other's
    /// rows in an irregular way.
    pub fn overlaps(&self, other: &Footprint) -> bool {
        if self.start + self.extent <= other.start || other.start + other.extent <= self.start {
            return false;
        }
        let step = gcd(self.step, other.step);
        if step == 0 {
            return true;
        }
        // Rows start at multiples of `step` from the first one. Slices of one buffer lie side by side within a step.
        let offset = (i128::from(other.start) - i128::from(self.start)).rem_euclid(i128::from(step)) as u64;
        offset < self.row || step - offset < other.row
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dims(axes: &[usize]) -> Dims {
        super::super::layout::layout(usize::MAX, axes, None).unwrap().0
    }

    fn footprint(start: u64, shape: &[usize], strides: &[usize]) -> Option<Footprint> {
        Footprint::new(start, 2, &dims(shape), &dims(strides))
    }

    /// Every byte of a tensor of elements of two bytes.
    fn bytes(start: u64, shape: &[usize], strides: &[usize]) -> Vec<u64> {
        let mut all = vec![start];
        for (&size, &stride) in shape.iter().zip(strides) {
            all = all.iter().flat_map(|at| (0..size).map(move |i| at + 2 * (i * stride) as u64)).collect();
        }
        all.into_iter().flat_map(|at| [at, at + 1]).collect()
    }

    proptest! {
        #[test]
        fn tensors_that_share_a_byte_overlap(
            (a, b) in {
                let axes = || proptest::collection::vec((0usize..4, 0usize..9), 0..4);
                let tensor = || (0u64..40, axes());
                (tensor(), tensor())
            },
        ) {
            let split = |(start, axes): (u64, Vec<(usize, usize)>)| {
                let (shape, strides): (Vec<usize>, Vec<usize>) = axes.into_iter().unzip();
                (start, shape, strides)
            };
            let (a, b) = (split(a), split(b));
            let all = |x: &(u64, Vec<usize>, Vec<usize>)| bytes(x.0, &x.1, &x.2);
            let shared = all(&a).iter().any(|byte| all(&b).contains(byte));
            let of = |x: &(u64, Vec<usize>, Vec<usize>)| footprint(x.0, &x.1, &x.2);
            let found = of(&a).zip(of(&b)).is_some_and(|(a, b)| a.overlaps(&b));
            prop_assert!(found || !shared, "{a:?} and {b:?} share a byte");
        }
    }

    #[test]
    fn slices_of_one_buffer_lie_side_by_side() {
        // q and k of `[sequence, 3, heads, dim]`, and of `[sequence, heads, 3 dim]`.
        let fused = |at: u64| footprint(2 * at, &[5, 4, 8], &[96, 8, 1]).unwrap();
        assert!(!fused(0).overlaps(&fused(32)) && !fused(64).overlaps(&fused(32)));
        assert!(fused(0).overlaps(&fused(31)) && fused(0).overlaps(&fused(0)));
        let inner = |at: u64| footprint(2 * at, &[5, 4, 8], &[96, 24, 1]).unwrap();
        assert!(!inner(0).overlaps(&inner(8)) && inner(0).overlaps(&inner(7)));
        // Heads before and after one another in one buffer.
        assert!(!footprint(0, &[2, 3], &[3, 1]).unwrap().overlaps(&footprint(12, &[2, 3], &[3, 1]).unwrap()));
        assert_eq!(footprint(0, &[2, 0], &[3, 1]), None);
    }
}
