//! The basic matrix product, which also prefetches memory while it runs.

use crate::simd::Simd;
use fulgurite_core::Data;

/// Returns `x` through a barrier, so that the compiler knows nothing about its value.
#[inline(always)]
fn opaque(x: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let mut x = x;
        // SAFETY: no instruction at all.
        unsafe { std::arch::asm!("/* {0} */", inout(reg) x, options(pure, nomem, nostack, preserves_flags)) };
        x
    }
    #[cfg(not(target_arch = "x86_64"))]
    x
}

/// One block of MR rows and NV vectors of C (+)= A B. A is read element by element and broadcast:
/// `a[i * lda + p]`, or `a[p * lda + i]` if it is transposed.
///
/// # Safety
/// All extents must be valid, and as for [`Simd`].
#[inline(always)]
unsafe fn micro<S: Simd, const MR: usize, const NV: usize, const TRANSPOSED: bool>(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    lda: usize,
    b: *const f32,
    ldb: usize,
    k: usize,
    add: bool,
) {
    // SAFETY: the caller's extents cover MR rows and NV vectors.
    unsafe {
        let mut sums = [[S::splat(0.0); NV]; MR];
        let mut b = b;
        let mut a = a;
        let step = if TRANSPOSED { lda } else { 1 };
        // Known to the compiler, they would be added up anew in every step.
        let rows: [usize; MR] = std::array::from_fn(|i| if TRANSPOSED { i } else { opaque(i * lda) });
        for _ in 0..k {
            let mut columns = [S::splat(0.0); NV];
            for (z, column) in columns.iter_mut().enumerate() {
                *column = S::load(b.add(z * S::LANES));
            }
            for (i, row) in sums.iter_mut().enumerate() {
                let x = S::splat(*a.add(rows[i]));
                for z in 0..NV {
                    row[z] = S::fma(x, columns[z], row[z]);
                }
            }
            b = b.add(ldb);
            a = a.add(step);
        }
        for (i, row) in sums.iter().enumerate() {
            for (z, &sum) in row.iter().enumerate() {
                let at = c.add(i * ldc + z * S::LANES);
                S::store(at, if add { S::add(S::load(at), sum) } else { sum });
            }
        }
    }
}

/// Rows that will be read soon: a product asks for a few after each of its blocks, so that memory works while the
/// multipliers do, and no burst of requests stops them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    streams: [Stream; 4],
    /// Rows prefetched after each block.
    pace: usize,
    /// Rows that are read right after this product, and their pace: asked for beside the others.
    soon: Stream,
    soon_pace: usize,
}

impl Default for Ahead {
    fn default() -> Self {
        Ahead::paced(3)
    }
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    start: *const u8,
    row_bytes: usize,
    bytes: usize,
    rows: usize,
}

impl Default for Stream {
    fn default() -> Self {
        Stream { start: std::ptr::null(), row_bytes: 0, bytes: 0, rows: 0 }
    }
}

impl Ahead {
    /// With a pace of its own, in rows for each block of a product.
    pub fn paced(pace: usize) -> Self {
        Ahead { streams: [Stream::default(); 4], pace, soon: Stream::default(), soon_pace: 0 }
    }

    /// Spreads the rows over this many blocks of products, so that all are asked for by then. A block asks for a few lines
    /// at most: more would wait for each other.
    pub fn within(&mut self, blocks: usize) {
        const LINES: usize = 24;
        let rows: usize = self.streams.iter().map(|stream| stream.rows).sum();
        let lines = self.streams.iter().map(|stream| stream.bytes.div_ceil(64)).max().unwrap_or(0).max(1);
        let usual = Ahead::default().pace;
        self.pace = rows.div_ceil(blocks.max(1)).min(LINES / lines).max(usual);
    }

    /// Adds `rows` rows of `n` elements, `row` apart, from `offset` on. Nothing is read: any address will do.
    pub fn push_rows(&mut self, data: &Data<'_>, offset: usize, row: usize, n: usize, rows: usize) {
        let (start, size) = match data {
            Data::F32(s) => (s.as_ptr().cast::<u8>(), 4),
            Data::F16(s) => (s.as_ptr().cast(), 2),
            Data::Bf16(s) => (s.as_ptr().cast(), 2),
            _ => return,
        };
        self.push(start.wrapping_add(offset * size), [row, n].map(|n| n * size), rows);
    }

    /// Adds rows by their address, the bytes from one to the next and those of one.
    pub fn push(&mut self, start: *const u8, [row_bytes, bytes]: [usize; 2], rows: usize) {
        if let Some(free) = self.streams.iter_mut().find(|s| s.rows == 0) {
            *free = Stream { start, row_bytes, bytes, rows };
        }
    }

    /// Rows by their address, the bytes from one to the next and those of one, that are read right after a product of so
    /// many blocks. They replace those of the product before.
    pub fn soon(&mut self, start: *const u8, [row_bytes, bytes]: [usize; 2], rows: usize, blocks: usize) {
        self.soon = Stream { start, row_bytes, bytes, rows };
        self.soon_pace = rows.div_ceil(blocks.max(1));
    }

    /// Asks for the next `rows` rows now.
    pub fn take(&mut self, rows: usize) {
        for _ in 0..rows {
            let Some(stream) = self.streams.iter_mut().find(|s| s.rows > 0) else { return };
            crate::memory::prefetch_bytes(stream.start, stream.bytes);
            stream.start = stream.start.wrapping_add(stream.row_bytes);
            stream.rows -= 1;
        }
    }

    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    pub(in crate::simd) unsafe fn prefetch<S: Simd>(&mut self) {
        // SAFETY: passed on.
        unsafe {
            if self.soon.rows > 0 {
                self.soon.prefetch::<S>(self.soon_pace);
            }
            if let Some(stream) = self.streams.iter_mut().find(|stream| stream.rows > 0) {
                stream.prefetch::<S>(self.pace);
            }
        }
    }
}

impl Stream {
    /// Asks for the next rows.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn prefetch<S: Simd>(&mut self, rows: usize) {
        for _ in 0..rows.min(self.rows) {
            for line in (0..self.bytes).step_by(64) {
                // SAFETY: passed on; a prefetch may name any address.
                unsafe { S::prefetch(self.start.wrapping_add(line)) };
            }
            self.start = self.start.wrapping_add(self.row_bytes);
        }
        self.rows = self.rows.saturating_sub(rows);
    }
}

/// NV vectors wide, any number of rows: blocks of MR, then of 4, 2 and 1.
///
/// # Safety
/// As for [`micro`].
#[inline(always)]
pub(in crate::simd) unsafe fn block<S: Simd, const MR: usize, const NV: usize, const TRANSPOSED: bool>(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    lda: usize,
    b: *const f32,
    ldb: usize,
    m: usize,
    k: usize,
    add: bool,
    ahead: &mut Ahead,
) {
    // A remainder of 2 after sixes is better taken as 4 + 4: both keep the multipliers busy.
    let blocks = if MR == 6 && m % MR == 2 && m > MR { m / MR - 1 } else { m / MR };
    // SAFETY: rows 0..m are valid, and each block stays inside.
    unsafe {
        let row = |i: usize| if TRANSPOSED { a.add(i) } else { a.add(i * lda) };
        let mut i = 0;
        for _ in 0..blocks {
            ahead.prefetch::<S>();
            micro::<S, MR, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
            i += MR;
        }
        while i + 4 <= m {
            micro::<S, 4, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
            i += 4;
        }
        while i + 2 <= m {
            micro::<S, 2, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
            i += 2;
        }
        if i < m {
            micro::<S, 1, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
        }
    }
}
