//! An allocator that refuses: a request above a limit fails, as it does in a process that may have no more memory.
//!
//! Code that allocates without asking first ends the process then, which the fuzzer reports.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest request that is granted, in bytes.
static LARGEST: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The system's allocator below a limit.
pub struct Limited;

// SAFETY: every call goes to the system's allocator with the same arguments, or returns null, which means failure.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > LARGEST.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `work` while requests above `bytes` fail.
pub fn with_at_most<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            LARGEST.store(usize::MAX, Ordering::Relaxed);
        }
    }
    LARGEST.store(bytes, Ordering::Relaxed);
    let _restore = Restore;
    work()
}
