//! Memory and streams of other libraries, for which only the caller can vouch.

use crate::Cuda;
use fulgurite_ptx::device::{Span, Stream};

impl Cuda {
    /// Memory of another library on this GPU, such as a PyTorch tensor's.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` are memory of this GPU's primary context. Until the last launch, copy and graph replay
    /// that is given the span, or a part of it, has finished, the memory is not freed, and nothing else uses it in a way that
    /// conflicts with the kernels that do.
    pub unsafe fn memory(&self, address: u64, bytes: u64) -> Span {
        self.token().span(address, bytes)
    }

    /// A stream of another library on this GPU, by its `CUstream` handle; 0 is the default stream.
    ///
    /// # Safety
    /// The handle is a stream of this GPU's primary context, or 0, and the stream is not destroyed before `'a` ends.
    pub unsafe fn stream<'a>(&self, handle: u64) -> Stream<'a> {
        if handle == 0 { Stream::default() } else { self.token().stream(handle) }
    }
}
