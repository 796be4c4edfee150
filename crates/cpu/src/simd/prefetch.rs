//! Prefetches memory while kernels work on earlier data.

use super::{Simd, Strided};
use fulgurite_core::Data;

/// Number of parallel prefetch streams: the hardware follows a page only after a few lines, and a sum that reads four
/// pages at once is 1.3 times as fast as one that reads page after page (lab 001).
pub(super) const STREAMS: usize = 4;
pub(super) const LINE: usize = 64;

/// Memory that will be read soon: equal streams at a fixed distance. Kernels prefetch a line of each in turn, about as
/// many as they read themselves, so that bursts do not stall them and memory stays busy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefetch {
    at: *const u8,
    apart: usize,
    turn: usize,
    lines: usize,
}

impl Prefetch {
    /// Nothing worth asking for: a line that is near already.
    pub const NOTHING: Prefetch = {
        static NEAR: [u8; LINE] = [0; LINE];
        Prefetch { at: NEAR.as_ptr(), apart: 0, turn: 0, lines: 0 }
    };

    /// The first line, and the distance between streams in bytes; 0 if there is nothing.
    pub(super) fn streams(&self) -> (*const u8, usize) {
        (self.at, self.apart)
    }

    /// Number of lines still to prefetch.
    pub(super) fn lines(&self) -> usize {
        self.lines
    }

    /// Prefetches this many lines, if any are left.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    pub(super) unsafe fn issue<S: Simd>(&mut self, lines: usize) {
        let (at, apart) = (self.at, self.apart);
        // SAFETY: passed on; a prefetch may name any address.
        let prefetch = |at: *const u8, stream: usize| unsafe { S::prefetch(at.wrapping_add(stream * apart)) };
        if self.lines == 0 {
            return;
        }
        if lines.is_multiple_of(STREAMS) {
            // The usual case, known where this is inlined: no turns to remember.
            for round in 0..lines / STREAMS {
                (0..STREAMS).for_each(|stream| prefetch(at.wrapping_add(round * LINE), stream));
            }
            self.at = at.wrapping_add(lines / STREAMS * LINE);
        } else {
            for _ in 0..lines {
                prefetch(self.at, self.turn);
                self.turn = (self.turn + 1) % STREAMS;
                self.at = self.at.wrapping_add(if self.turn == 0 { LINE } else { 0 });
            }
        }
        self.lines = self.lines.saturating_sub(lines);
    }
}

/// A share, in sixteenths, of the lines of a few keys of one head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    from: usize,
    to: usize,
}

impl Share {
    pub const ALL: Share = Share { from: 0, to: 16 };
    /// The share for softmax, which reads nothing itself.
    pub const FIRST: Share = Share { from: 0, to: 4 };
    /// The share for everything else.
    pub const REST: Share = Share { from: 4, to: 16 };

    /// This share of the rows of `[keys, n]` elements, for `[head, heads]`. If all heads of a key are adjacent, a
    /// stream is a quarter of the keys of all heads, and every head prefetches what earlier heads left; otherwise each
    /// prefetches its own.
    pub fn of(self, rows: &Strided<'_>, [keys, n]: [usize; 2], [head, heads]: [usize; 2]) -> Prefetch {
        let (data, size) = match rows.data {
            Data::F32(x) => (x.as_ptr().cast::<u8>(), 4),
            Data::F16(x) => (x.as_ptr().cast(), 2),
            Data::Bf16(x) => (x.as_ptr().cast(), 2),
            _ => return Prefetch::NOTHING,
        };
        let stream = keys * n * size / STREAMS;
        let (before, own) = (self.from * stream / 16, (self.to - self.from) * stream / 16);
        let start = data.wrapping_add(rows.offset * size);
        let lines = STREAMS * own.div_ceil(LINE);
        if rows.row == heads * n {
            let at = start.wrapping_sub(head * n * size).wrapping_add(heads * before + head * own);
            return Prefetch { at, apart: heads * stream, turn: 0, lines };
        }
        Prefetch { at: start.wrapping_add(before), apart: stream, turn: 0, lines }
    }
}
