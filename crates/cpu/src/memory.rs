//! Workspaces, and outputs that several threads write.

use crate::simd::{Ahead, Kernels, TurnedRows};
use fulgurite_core::{DType, DataMut, TensorViewMut, stop};
use half::{bf16, f16};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;
use std::thread::LocalKey;

/// Bytes of a cache line; loads that cross one take twice as long.
const LINE: usize = 64;

/// The name of workspaces in errors.
const WHAT: &str = "a workspace";

/// Size of an f32 output in bytes beyond which rows bypass the caches: reading lines only to overwrite them would cost
/// more than reading the result from memory later.
const LARGE: usize = 8 << 20;

/// The bytes of one cache line, aligned to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; LINE]);

thread_local! {
    static WORKSPACE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static RESULTS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Elements of partial results that a thread keeps for its next call: fresh pages cost a tenth of a 1 ms call.
const KEPT_RESULTS: usize = 256 * 1024;

/// Calls `f` with this thread's workspace of at least `len` elements, aligned to a cache line. Its contents are
/// arbitrary. It is kept for the next call: O(threads x tile).
pub(crate) fn with_workspace<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    with_kept(&WORKSPACE, len, f)
}

/// Like `with_workspace`, for data that several threads write and the caller reads at the end. It is separate from the
/// workspace, because the caller needs both. Large ones are not kept.
pub(crate) fn with_results<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    if len > KEPT_RESULTS { f(&mut stop::zeros(WHAT, len)) } else { with_kept(&RESULTS, len, f) }
}

fn with_kept<R>(kept: &'static LocalKey<RefCell<Vec<f32>>>, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    kept.with(|cell| {
        // A nested call (after an item panicked and was caught) gets its own memory.
        let mut own = Vec::new();
        let mut kept = cell.try_borrow_mut();
        let buffer = match &mut kept {
            Ok(kept) => &mut **kept,
            Err(_) => &mut own,
        };
        let want = len + LINE / 4;
        if buffer.len() < want {
            *buffer = stop::zeros(WHAT, want);
        }
        let start = buffer.as_ptr().align_offset(LINE).min(LINE / 4);
        f(&mut buffer[start..start + len])
    })
}

/// Memory of finished calls, for the next ones: fresh pages and zeroing cost more than the writes themselves.
static SPARE: Mutex<Vec<Vec<f32>>> = Mutex::new(Vec::new());

/// Elements of memory that are kept for later calls: 32 MiB.
const KEPT_SPARE: usize = 8 << 20;

/// Cache-line-aligned elements with arbitrary contents.
#[derive(Default)]
pub(crate) struct Kept {
    buffer: Vec<f32>,
    len: usize,
}

impl Kept {
    pub fn new(len: usize) -> Self {
        let want = len + LINE / 4;
        // Never wait for the lock: in a child of `fork`, a thread that no longer exists may hold it.
        let found = SPARE.try_lock().ok().and_then(|mut spare| {
            let found = spare.iter().position(|buffer| buffer.len() >= want);
            found.map(|i| spare.swap_remove(i))
        });
        Kept { buffer: found.unwrap_or_else(|| stop::zeros(WHAT, want)), len }
    }
    fn start(&self) -> usize {
        self.buffer.as_ptr().align_offset(LINE).min(LINE / 4)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let Ok(mut spare) = SPARE.try_lock() else { return };
        let kept: usize = spare.iter().map(Vec::len).sum();
        if kept + self.buffer.len() <= KEPT_SPARE && !self.buffer.is_empty() {
            spare.push(std::mem::take(&mut self.buffer));
        }
    }
}

impl Deref for Kept {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        let start = self.start();
        &self.buffer[start.min(self.buffer.len())..][..self.len]
    }
}

impl DerefMut for Kept {
    fn deref_mut(&mut self) -> &mut [f32] {
        let start = self.start();
        let start = start.min(self.buffer.len());
        &mut self.buffer[start..][..self.len]
    }
}

/// A workspace as bytes: byte operands are stored in f32 memory.
pub(crate) fn bytes_of(x: &mut [f32]) -> &mut [i8] {
    // SAFETY: both types accept any bits, bytes need no alignment, and the borrow is passed on.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(x)) }
}

/// 16-bit types that accept any bits.
pub(crate) trait Half: Copy {}
impl Half for f16 {}
impl Half for bf16 {}

/// A workspace as 16-bit numbers, two per f32.
pub(crate) fn halves_of<T: Half>(x: &mut [f32]) -> &mut [T] {
    // SAFETY: both types accept any bits, an f32 is aligned for them, and the borrow is passed on.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), 2 * x.len()) }
}

/// Prefetches memory that will be read soon.
pub(crate) fn prefetch<T>(x: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(x)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().cast::<i8>().wrapping_add(line)) }
    }
    let _ = x;
}

/// Prefetches memory that will be used later, into the L2 cache. Any address is allowed.
#[cfg(target_arch = "x86_64")]
pub(crate) fn prefetch_bytes(start: *const u8, bytes: usize) {
    // One more line if the first byte is inside one.
    for line in (0..bytes + start.addr() % LINE).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(start.cast::<i8>().wrapping_add(line)) }
    }
}

/// Other machines detect sequential lines by themselves.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn prefetch_bytes(_: *const u8, _: usize) {}

/// Divides a workspace into parts that start on cache lines.
pub(crate) struct Arena<'a>(&'a mut [f32]);

impl<'a> Arena<'a> {
    pub fn new(workspace: &'a mut [f32]) -> Self {
        Arena(workspace)
    }
    /// The space that `take(len)` needs.
    pub fn room(len: usize) -> usize {
        len.next_multiple_of(LINE / 4)
    }
    pub fn take(&mut self, len: usize) -> &'a mut [f32] {
        let all = std::mem::take(&mut self.0);
        let (part, rest) = all.split_at_mut(Self::room(len));
        self.0 = rest;
        &mut part[..len]
    }
}

#[derive(Clone, Copy)]
enum Start {
    F32(*mut f32),
    F16(*mut f16),
    Bf16(*mut bf16),
}

/// An output tensor that several threads write, each its own rows.
pub(crate) struct SharedRows<'a> {
    start: Start,
    len: usize,
    /// Whether the tensor is too large to stay in a cache until it is read.
    large: bool,
    borrowed: PhantomData<&'a mut f32>,
}

// SAFETY: all access goes through unsafe methods whose callers guarantee disjoint rows.
unsafe impl Sync for SharedRows<'_> {}

impl<'a> SharedRows<'a> {
    pub fn new(view: &'a mut TensorViewMut<'_>) -> Self {
        let (start, len) = match view.data_mut() {
            DataMut::F32(s) => (Start::F32(s.as_mut_ptr()), s.len()),
            DataMut::F16(s) => (Start::F16(s.as_mut_ptr()), s.len()),
            DataMut::Bf16(s) => (Start::Bf16(s.as_mut_ptr()), s.len()),
            _ => unreachable!("bug in fulgurite: an output of a type that Problem refuses"),
        };
        SharedRows { start, len, large: len * 4 > LARGE, borrowed: PhantomData }
    }

    /// Over a plain slice.
    pub fn over(slice: &'a mut [f32]) -> Self {
        SharedRows { start: Start::F32(slice.as_mut_ptr()), len: slice.len(), large: false, borrowed: PhantomData }
    }

    /// Rounds a row to the element type and writes it. Call [`Kernels::fence`] before other threads read it.
    ///
    /// # Safety
    /// No other thread may touch these elements at the same time.
    pub unsafe fn store(&self, kernels: &Kernels, offset: usize, row: &[f32]) {
        assert!(offset.checked_add(row.len()).is_some_and(|end| end <= self.len), "row outside the tensor");
        // SAFETY: inside the borrowed tensor (just checked), and the caller guarantees that there is no other access.
        unsafe {
            match self.start {
                Start::F32(p) => {
                    let to = std::slice::from_raw_parts_mut(p.add(offset), row.len());
                    if self.large { kernels.stream(row, to) } else { to.copy_from_slice(row) }
                }
                Start::F16(p) => kernels.narrow_f16(row, std::slice::from_raw_parts_mut(p.add(offset), row.len())),
                Start::Bf16(p) => kernels.narrow_bf16(row, std::slice::from_raw_parts_mut(p.add(offset), row.len())),
            }
        }
    }

    /// Whether rows should bypass the caches.
    pub fn is_large(&self) -> bool {
        self.large
    }

    /// The address of `rows` rows of `n` elements, `row` apart, for a kernel that writes them.
    pub fn rows_mut_ptr(&self, offset: usize, [row, rows, n]: [usize; 3]) -> *mut u8 {
        let extent = rows.saturating_sub(1).checked_mul(row).and_then(|x| x.checked_add(n));
        let end = extent.and_then(|x| x.checked_add(offset));
        assert!(end.is_some_and(|end| end <= self.len), "rows outside the tensor");
        match self.start {
            Start::F32(p) => p.wrapping_add(offset).cast(),
            Start::F16(p) => p.wrapping_add(offset).cast(),
            Start::Bf16(p) => p.wrapping_add(offset).cast(),
        }
    }

    /// Rounds and writes rows of O^T at once, if the tensor is bf16 and the machine supports it; otherwise does nothing
    /// and returns false. Call [`Kernels::fence`] before other threads read them.
    ///
    /// # Safety
    /// As for [`store`](Self::store), for each row.
    pub unsafe fn store_turned(&self, kernels: &Kernels, mut rows: TurnedRows<'_>) -> bool {
        let (Start::Bf16(to), Some(unit)) = (self.start, kernels.matrix_for(DType::Bf16)) else { return false };
        let inside = |&start: &usize| start.checked_add(rows.n).is_some_and(|end| end <= self.len);
        assert!(rows.starts.iter().all(inside), "row outside the tensor");
        rows.past = self.large;
        // SAFETY: inside the borrowed tensor (just checked), and the caller guarantees that there is no other access.
        unsafe { unit.bf16.store(&rows, to) };
        true
    }

    /// Writes the rows of O^T, `[column][lane]` with `lanes` lanes, if the tensor is f32 and small enough to stay in the
    /// caches; otherwise does nothing and returns false. The first row begins at `offset`, they are `row` apart.
    ///
    /// # Safety
    /// As for [`store`](Self::store), for each row.
    pub unsafe fn store_transposed(
        &self,
        kernels: &Kernels,
        offset: usize,
        row: usize,
        (turned, lanes): (&[f32], usize),
    ) -> bool {
        let (Start::F32(_), false) = (self.start, self.large) else { return false };
        let n = turned.len() / lanes;
        let to = self.rows_mut_ptr(offset, [row, lanes, n]).cast();
        // SAFETY: inside the borrowed tensor (just checked), and the caller guarantees that there is no other access.
        unsafe { kernels.transpose_to(turned, lanes, to, row, [n, lanes]) };
        true
    }

    /// Prefetches `rows` rows of `n` elements, `row` apart, that will be written soon.
    pub fn prefetch(&self, ahead: &mut Ahead, offset: usize, row: usize, n: usize, rows: usize) {
        let (start, size) = match self.start {
            Start::F32(p) => (p.cast::<u8>(), 4),
            Start::F16(p) => (p.cast(), 2),
            Start::Bf16(p) => (p.cast(), 2),
        };
        ahead.push(start.wrapping_add(offset * size), [row, n].map(|n| n * size), rows);
    }

    /// Whether elements are f32, as [`row`](Self::row) requires.
    pub fn is_f32(&self) -> bool {
        matches!(self.start, Start::F32(_))
    }

    /// A row of an f32 tensor, for reading and writing.
    ///
    /// # Safety
    /// No other thread may touch these elements while the result lives.
    #[allow(clippy::mut_from_ref)] // disjoint by the caller's promise
    pub unsafe fn row(&self, offset: usize, len: usize) -> &mut [f32] {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "row outside the tensor");
        match self.start {
            // SAFETY: inside the borrowed tensor (just checked), and the caller guarantees that there is no other
            // access.
            Start::F32(p) => unsafe { std::slice::from_raw_parts_mut(p.add(offset), len) },
            _ => unreachable!("bug in fulgurite: rows in place are f32"),
        }
    }
}
