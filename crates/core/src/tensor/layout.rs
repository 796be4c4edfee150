//! Shapes and strides, and the checks that every index is inside the memory.

use std::fmt;
use std::ops::Deref;
use thiserror::Error;

/// The largest number of axes a tensor may have.
pub const MAX_RANK: usize = 6;

/// Sizes or strides, one per axis.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    rank: u8,
    pub(super) axes: [usize; MAX_RANK],
}

impl Dims {
    /// Copies up to [`MAX_RANK`] numbers; `None` if there are more.
    pub fn new(axes: &[usize]) -> Option<Dims> {
        let mut all = [0; MAX_RANK];
        all.get_mut(..axes.len())?.copy_from_slice(axes);
        Some(Dims { rank: axes.len() as u8, axes: all })
    }

    /// Row-major strides for this shape; `None` if the element count overflows.
    pub fn contiguous_strides(&self) -> Option<Dims> {
        let mut strides = *self;
        let mut step: usize = 1;
        for axis in (0..self.len()).rev() {
            strides.axes[axis] = step;
            // An empty axis must not hide an overflow of the others: the caller means those sizes.
            step = step.checked_mul(self[axis].max(1))?;
        }
        (step <= isize::MAX as usize / 8).then_some(strides)
    }

    /// The number of elements. Views check at construction that it does not overflow.
    pub fn count(&self) -> usize {
        self.iter().product()
    }
}

impl<const N: usize> From<[usize; N]> for Dims {
    fn from(numbers: [usize; N]) -> Dims {
        const { assert!(N <= MAX_RANK) };
        let mut axes = [0; MAX_RANK];
        axes[..N].copy_from_slice(&numbers);
        Dims { rank: N as u8, axes }
    }
}

impl Deref for Dims {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.axes[..self.rank as usize]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self[..], f)
    }
}

/// The reason why a tensor or view was rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TensorError {
    /// More axes than [`MAX_RANK`].
    #[error("shape has {got} axes, allowed: at most {MAX_RANK}; merge axes before the call")]
    Rank {
        /// Number of axes given.
        got: usize,
    },
    /// The number of strides differs from the number of axes.
    #[error("{strides} strides for {shape} axes; give one stride for each axis, in elements")]
    StrideRank {
        /// Axes of the shape.
        shape: usize,
        /// Number of strides.
        strides: usize,
    },
    /// The shape or the strides exceed the address space.
    #[error("shape {shape:?} with strides {strides:?} overflows the address space; check the sizes")]
    Overflow {
        /// The shape given.
        shape: Vec<usize>,
        /// The strides given.
        strides: Vec<usize>,
    },
    /// The slice is shorter than the shape and strides need.
    #[error(
        "data has {got} elements, shape {shape:?} with strides {strides:?} needs {need}; pass the whole buffer or a smaller shape"
    )]
    TooShort {
        /// Elements in the slice.
        got: usize,
        /// Elements needed.
        need: usize,
        /// The shape given.
        shape: Vec<usize>,
        /// The strides given.
        strides: Vec<usize>,
    },
    /// Device memory that is not aligned for the element type.
    #[error("data begins at address {address:#x}, allowed: multiples of {align}; copy it to an aligned buffer")]
    Alignment {
        /// Address of the first element.
        address: u64,
        /// Required alignment: the size of an element in bytes.
        align: u64,
    },
    /// A writable view in which two indices share an element.
    #[error("strides {strides:?} make elements of shape {shape:?} overlap; write into a tensor without broadcast axes")]
    Overlap {
        /// The shape given.
        shape: Vec<usize>,
        /// The strides given.
        strides: Vec<usize>,
    },
    /// The process cannot have this much memory.
    #[error("{what} needs {bytes} bytes ({gib:.1} GiB), more than this process can have; check the sizes, or split the call", gib = *bytes as f64 / GIB)]
    Memory {
        /// Purpose of the memory.
        what: String,
        /// Requested bytes.
        bytes: usize,
    },
}

const GIB: f64 = (1u64 << 30) as f64;

/// Size in bytes above which memory is probed before use; below, probing would cost more than the memory.
const ASKED: usize = 1 << 20;

/// Whether the process can have this much memory now. Code that allocates a size from a caller or a file calls this
/// first, because a failed allocation aborts the process.
///
/// ```
/// use fulgurite_core::tensor::ask_memory;
/// assert!(ask_memory("a result", 1 << 20).is_ok());
/// let refused = ask_memory("a result", usize::MAX / 2).unwrap_err().to_string();
/// assert!(refused.starts_with("a result needs 9223372036854775807 bytes"), "{refused}");
/// ```
pub fn ask_memory(what: impl std::fmt::Display, bytes: usize) -> Result<(), TensorError> {
    let free = bytes < ASKED || Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
    if free { Ok(()) } else { Err(TensorError::Memory { what: what.to_string(), bytes }) }
}

/// Checks shape and strides against the number of elements in the buffer.
///
/// One pass without early exits: every call on a GPU makes several views, and their cost is part of the call's.
pub(super) fn layout(len: usize, shape: &[usize], strides: Option<&[usize]>) -> Result<(Dims, Dims), TensorError> {
    let rank = shape.len();
    if rank > MAX_RANK {
        return Err(TensorError::Rank { got: rank });
    }
    if let Some(given) = strides.filter(|given| given.len() != rank) {
        return Err(TensorError::StrideRank { shape: rank, strides: given.len() });
    }
    let mut dims = Dims { rank: rank as u8, axes: [0; MAX_RANK] };
    let (mut steps, mut count, mut last) = (dims, 1usize, 0usize);
    let (mut empty, mut too_many, mut too_far) = (false, false, false);
    for axis in (0..rank).rev() {
        let size = shape[axis];
        let stride = strides.map_or(count, |given| given[axis]);
        (dims.axes[axis], steps.axes[axis]) = (size, stride);
        empty |= size == 0;
        // An empty axis must not hide an overflow of the others: the caller means those sizes.
        let (product, overflow) = count.overflowing_mul(size.max(1));
        (count, too_many) = (product, too_many | overflow);
        let (reach, overflow) = size.saturating_sub(1).overflowing_mul(stride);
        too_far |= overflow;
        let (sum, overflow) = last.overflowing_add(reach);
        (last, too_far) = (sum, too_far | overflow);
    }
    too_many |= count > isize::MAX as usize / 8;
    too_far |= last == usize::MAX;
    if too_many || (too_far && !empty) {
        let strides = strides.unwrap_or(&[]).to_vec();
        return Err(TensorError::Overflow { shape: shape.to_vec(), strides });
    }
    let need = if empty { 0 } else { last + 1 };
    if need > len {
        return Err(TensorError::TooShort { got: len, need, shape: shape.to_vec(), strides: steps.to_vec() });
    }
    Ok((dims, steps))
}

/// Calls `visit` with the memory offset of every index, in row-major order.
pub(super) fn for_each_offset(shape: &Dims, strides: &Dims, mut visit: impl FnMut(usize)) {
    if shape.contains(&0) {
        return;
    }
    let mut index = [0usize; MAX_RANK];
    let mut offset = 0;
    loop {
        visit(offset);
        let mut axis = shape.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            offset += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            offset -= strides[axis] * shape[axis];
            index[axis] = 0;
        }
    }
}

/// Rejects strides with which two indices share an element.
pub(super) fn no_overlap(shape: &Dims, strides: &Dims) -> Result<(), TensorError> {
    if shape.contains(&0) {
        return Ok(());
    }
    // Sorted by stride, each axis must step over everything that the smaller ones can reach.
    let mut axes = [(0, 1); MAX_RANK];
    for (axis, (&stride, &size)) in axes.iter_mut().zip(strides.iter().zip(shape.iter()).rev()) {
        *axis = (stride, size);
    }
    // Most tensors are row-major, and already sorted.
    if !axes[..shape.len()].is_sorted() {
        axes[..shape.len()].sort_unstable();
    }
    let mut reach = 0;
    for (stride, size) in axes.into_iter().filter(|&(_, size)| size > 1) {
        if stride <= reach {
            return Err(TensorError::Overlap { shape: shape.to_vec(), strides: strides.to_vec() });
        }
        reach += stride * (size - 1);
    }
    Ok(())
}
