//! Makes slices from pointers: the only place that accesses the elements of arrays.
//!
//! The contract of the whole extension, which no code here can check: a pointer that comes with a dtype, a shape and
//! strides points to memory of which every described element may be accessed until the call returns, and nothing writes
//! to it in the meantime. `foreign` takes all four from one object, which the caller holds during the call.

use fulgurite_core::{DType, Data, DataMut, bf16, f16};
use std::fmt;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// A run of elements in memory. A value of this type is not null, is aligned for its type, and ends inside the address
/// space.
#[derive(Debug, Clone, Copy)]
pub struct HostSpan {
    address: usize,
    dtype: DType,
    len: usize,
}

/// The reason why an address was rejected.
#[derive(Debug, Clone, PartialEq)]
pub enum SpanError {
    /// Elements at address 0.
    Null,
    /// An address that is not aligned for the type.
    Unaligned {
        /// Address of the first element.
        address: usize,
        /// Required alignment in bytes.
        align: usize,
    },
    /// More bytes than the address space has.
    TooLong {
        /// Number of elements.
        len: usize,
    },
}

impl fmt::Display for SpanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpanError::Null => write!(f, "has a null pointer, allowed: only where it has no elements"),
            SpanError::Unaligned { address, align } => {
                write!(f, "begins at address {address:#x}, allowed: multiples of {align}; copy it")
            }
            SpanError::TooLong { len } => write!(f, "reaches over {len} elements, which overflows the address space"),
        }
    }
}

impl HostSpan {
    /// `len` elements of `dtype`, starting at `address`.
    pub fn new(address: usize, dtype: DType, len: usize) -> Result<HostSpan, SpanError> {
        let align = dtype.size_bytes(); // as large as the alignment of each of these types
        let bytes = len.checked_mul(align).filter(|&bytes| bytes <= isize::MAX as usize);
        let end = bytes.and_then(|bytes| address.checked_add(bytes));
        match (len, address) {
            (0, _) => Ok(HostSpan { address: align, dtype, len }), // dangling, as an empty slice is
            (_, 0) => Err(SpanError::Null),
            _ if end.is_none() => Err(SpanError::TooLong { len }),
            _ if !address.is_multiple_of(align) => Err(SpanError::Unaligned { address, align }),
            _ => Ok(HostSpan { address, dtype, len }),
        }
    }

    /// Number of bytes from the first element to the end of the last.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size_bytes()
    }

    /// Whether two spans share a byte.
    pub fn overlaps(&self, other: &HostSpan) -> bool {
        let end = |s: &HostSpan| s.address + s.len * s.dtype.size_bytes();
        self.len > 0 && other.len > 0 && self.address < end(other) && other.address < end(self)
    }

    /// The memory as a read-only slice.
    ///
    /// # Safety
    /// The contract of this module holds for the span until `'a` ends.
    pub unsafe fn read<'a>(self) -> Data<'a> {
        let (address, len) = (self.address, self.len);
        // SAFETY: `HostSpan::new` checked null, alignment and size; every bit pattern is a value of these types; the caller
        // guarantees that the memory exists and does not change.
        unsafe {
            match self.dtype {
                DType::F32 => from_raw_parts(address as *const f32, len).into(),
                DType::F16 => from_raw_parts(address as *const f16, len).into(),
                DType::Bf16 => from_raw_parts(address as *const bf16, len).into(),
                DType::I32 => from_raw_parts(address as *const i32, len).into(),
                other => unreachable!("{other} is not among the names that dtypes are parsed from"),
            }
        }
    }

    /// The memory as a writable slice.
    ///
    /// # Safety
    /// The contract of this module holds for the span until `'a` ends, and nothing else refers to its memory.
    pub unsafe fn write<'a>(self) -> DataMut<'a> {
        let (address, len) = (self.address, self.len);
        // SAFETY: as for `read`; the caller guarantees that nothing else refers to this memory.
        unsafe {
            match self.dtype {
                DType::F32 => from_raw_parts_mut(address as *mut f32, len).into(),
                DType::F16 => from_raw_parts_mut(address as *mut f16, len).into(),
                DType::Bf16 => from_raw_parts_mut(address as *mut bf16, len).into(),
                DType::I32 => from_raw_parts_mut(address as *mut i32, len).into(),
                other => unreachable!("{other} is not among the names that dtypes are parsed from"),
            }
        }
    }

    /// The whole 8-byte words of the memory.
    ///
    /// # Safety
    /// The contract of this module holds for the span until `'a` ends.
    pub unsafe fn words<'a>(self) -> Result<&'a [u64], SpanError> {
        let (align, words) = (align_of::<u64>(), self.bytes() / size_of::<u64>());
        match self.address {
            _ if words == 0 => Ok(&[]),
            address if !address.is_multiple_of(align) => Err(SpanError::Unaligned { address, align }),
            // SAFETY: `HostSpan::new` checked null and size, the line above alignment; every bit pattern is a value; the
            // caller guarantees that the memory exists and does not change.
            address => Ok(unsafe { from_raw_parts(address as *const u64, words) }),
        }
    }
}

/// Sums words with the widest vectors of this machine.
pub fn sum_words(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(words: &[u64]) -> u64 {
            crate::read::sum(words)
        }
        #[target_feature(enable = "avx2")]
        fn avx2(words: &[u64]) -> u64 {
            crate::read::sum(words)
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the line above detected the feature.
            return unsafe { avx512(words) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the line above detected the feature.
            return unsafe { avx2(words) };
        }
    }
    crate::read::sum(words)
}
