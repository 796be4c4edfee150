//! The parts of a block of scores that a tile computes, and the rectangles in which they are multiplied.

use crate::simd::{DEPTH, MAX_VECTORS};
use crate::tiles::MAX_LANES;
use std::ops::Range;

/// For each vector of lanes, the first key and one past the last.
pub(crate) type Ranges = [(usize, usize); MAX_VECTORS];

/// The part of a block of scores to compute, relative to its first key.
pub(crate) struct Step {
    /// Keys that each vector of lanes sees.
    pub ranges: Ranges,
    /// Keys that every lane of the vector sees.
    pub inner: Ranges,
    /// Interval of each lane.
    pub lo: [f32; MAX_LANES],
    pub hi: [f32; MAX_LANES],
    /// Whether the rest of the mask must be evaluated.
    pub rest: bool,
}

/// A rectangle to multiply: the keys that a run of vectors sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub keys: (usize, usize),
    pub vectors: (usize, usize),
}

impl Segment {
    /// First key and number of keys.
    pub fn keys(&self) -> (usize, usize) {
        (self.keys.0, self.keys.1 - self.keys.0)
    }
    /// First lane and number of lanes, with vectors of `width`.
    pub fn lanes(&self, width: usize) -> (usize, usize) {
        (self.vectors.0 * width, (self.vectors.1 - self.vectors.0) * width)
    }
}

impl Step {
    /// Restricts the step to some vectors.
    pub fn only(&mut self, vectors: Range<usize>) {
        for z in (0..MAX_VECTORS).filter(|z| !vectors.contains(z)) {
            (self.ranges[z], self.inner[z]) = ((0, 0), (0, 0));
        }
    }

    /// All keys that some vector sees.
    pub fn hull(&self) -> Range<usize> {
        let seen = || self.ranges.iter().filter(|(a, b)| a < b);
        seen().map(|r| r.0).min().unwrap_or(0)..seen().map(|r| r.1).max().unwrap_or(0)
    }

    /// The part of this step inside a range of keys, relative to the range's start.
    pub fn part(&self, keys: &Range<usize>) -> Step {
        let inside = |(a, b): (usize, usize)| {
            let (a, b) = (a.max(keys.start), b.min(keys.end));
            if a < b { (a - keys.start, b - keys.start) } else { (0, 0) }
        };
        Step {
            ranges: self.ranges.map(inside),
            inner: self.inner.map(inside),
            lo: self.lo,
            hi: self.hi,
            rest: self.rest,
        }
    }

    /// Whether a lane sees a key according to its interval, in vectors of `width`.
    pub fn sees(&self, key: usize, lane: usize, width: usize) -> bool {
        let ((start, end), (first, last)) = (self.ranges[lane / width], self.inner[lane / width]);
        let at = key as f32;
        let inside = (first..last).contains(&key) || (self.lo[lane] <= at && at < self.hi[lane]);
        (start..end).contains(&key) && inside
    }

    /// Keys that every lane of every vector in use sees according to its interval.
    pub fn inner_of_all(&self) -> Range<usize> {
        let used = || self.ranges.iter().zip(&self.inner).filter(|((a, b), _)| a < b).map(|(_, inner)| inner);
        let start = used().map(|inner| inner.0).max().unwrap_or(0);
        start..used().map(|inner| inner.1).min().unwrap_or(0)
    }

    /// Whether every lane of every vector in use sees whole tiles of keys, or all up to the last of `keys`, so that a
    /// product computes nothing else.
    pub fn is_whole(&self, keys: usize) -> bool {
        let whole = |(&(a, b), inner): (&(usize, usize), &(usize, usize))| {
            a >= b || ((a, b) == *inner && a.is_multiple_of(DEPTH) && (b.is_multiple_of(DEPTH) || b == keys))
        };
        self.ranges.iter().zip(&self.inner).all(whole)
    }

    /// Whether some lane gives a key a nonzero weight. `weights` is the tile of scores after softmax, in vectors of
    /// `width`.
    pub fn weighs(&self, key: usize, weights: &[f32], stride: usize, width: usize) -> bool {
        self.ranges.iter().enumerate().any(|(z, &(a, b))| {
            let at = key * stride + z * width;
            (a..b).contains(&key) && weights[at..at + width].iter().any(|&w| w != 0.0)
        })
    }

    /// The rectangles that make up the ranges, rounded outwards to `grain` keys, in ascending order of keys.
    pub fn segments(&self, grain: usize) -> impl Iterator<Item = Segment> + use<> {
        let ranges = self.rounded(grain);
        let mut cuts = [0usize; 2 * MAX_VECTORS];
        for (z, &(a, b)) in ranges.iter().enumerate() {
            (cuts[2 * z], cuts[2 * z + 1]) = (a, b);
        }
        cuts.sort_unstable();
        (1..cuts.len()).filter(move |&i| cuts[i - 1] < cuts[i]).flat_map(move |i| {
            let keys = (cuts[i - 1], cuts[i]);
            let active = move |z: usize| z < MAX_VECTORS && ranges[z].0 <= keys.0 && keys.1 <= ranges[z].1;
            (0..MAX_VECTORS).filter(move |&z| active(z) && (z == 0 || !active(z - 1))).map(move |z| {
                let end = (z..=MAX_VECTORS).find(|&e| !active(e)).unwrap_or(MAX_VECTORS);
                Segment { keys, vectors: (z, end) }
            })
        })
    }

    /// Like `segments`, for a unit that fills two groups of lanes at a time. If vectors see different keys, each pair
    /// of vectors has its own rectangles over all its keys, and no rectangle is split for a neighbour. With
    /// [`Coverage::Pair`], both vectors of a pair get what one of them sees.
    pub fn paired_segments(&self, grain: usize, coverage: Coverage) -> impl Iterator<Item = Segment> + use<> {
        const NONE: Segment = Segment { keys: (0, 0), vectors: (0, 0) };
        let ranges = self.rounded(grain);
        let mut found = [NONE; 3 * MAX_VECTORS / 2];
        let mut n = 0;
        let mut push = |keys: (usize, usize), vectors: (usize, usize)| {
            if keys.0 < keys.1 {
                found[n] = Segment { keys, vectors };
                n += 1;
            }
        };
        // The usual case: all vectors that see something see the same keys.
        let seen = ranges.iter().take_while(|(a, b)| a < b).count();
        if ranges[..seen].iter().all(|range| *range == ranges[0]) && ranges[seen..].iter().all(|(a, b)| a >= b) {
            push(ranges[0], (0, seen));
        } else {
            for z in (0..MAX_VECTORS).step_by(2) {
                let ((a, b), (c, d)) = (ranges[z], ranges[z + 1]);
                // Join only ranges that overlap: otherwise the union is larger than both.
                let meet = a < b && c < d && a.max(c) < b.min(d);
                if !meet {
                    push((a, b), (z, z + 1));
                    push((c, d), (z + 1, z + 2));
                } else if coverage == Coverage::Pair {
                    push((a.min(c), b.max(d)), (z, z + 2));
                } else {
                    let alone = |first: bool| if first { (z, z + 1) } else { (z + 1, z + 2) };
                    push((a.min(c), a.max(c)), alone(a < c));
                    push((a.max(c), b.min(d)), (z, z + 2));
                    push((b.min(d), b.max(d)), alone(d < b));
                }
            }
        }
        found.into_iter().take(n)
    }

    fn rounded(&self, grain: usize) -> Ranges {
        self.ranges.map(|(a, b)| if a < b { (a - a % grain, b.next_multiple_of(grain)) } else { (0, 0) })
    }
}

/// Ranges of two vectors at a time, among those that see something, so that their scores stay in the L1 cache. With
/// `whole`, all together, for code that looks at the scores of all lanes.
pub(crate) fn in_pairs(ranges: Ranges, whole: bool) -> impl Iterator<Item = Ranges> {
    let size = if whole { MAX_VECTORS } else { 2 };
    let own = move |z: usize| std::array::from_fn(|i| if i / size == z / size { ranges[i] } else { (0, 0) });
    (0..MAX_VECTORS).step_by(size).map(own).filter(|own: &Ranges| own.iter().any(|(a, b)| a < b))
}

/// The keys that [`Step::paired_segments`] covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coverage {
    /// The keys that each vector sees.
    Seen,
    /// The keys that either vector of the pair sees; scores beyond a vector's own keys must not be read.
    Pair,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_tile_the_ranges() {
        let step = |ranges| Step { ranges, inner: ranges, lo: [0.0; 64], hi: [0.0; 64], rest: false };
        let all: [Ranges; 6] = [
            [(0, 32), (16, 48), (32, 64), (48, 64)],
            [(0, 64), (0, 64), (0, 64), (0, 64)],
            [(0, 16), (0, 32), (0, 48), (0, 64)],
            [(8, 40), (24, 56), (40, 64), (0, 0)],
            [(0, 8), (0, 0), (0, 8), (8, 16)],
            [(0, 0); 4],
        ];
        for ranges in all {
            for grain in [1, 16, 32] {
                let rounded =
                    ranges.map(|(a, b)| if a < b { a / grain * grain..b.next_multiple_of(grain) } else { 0..0 });
                let check = |all: &mut dyn Iterator<Item = Segment>, spare: bool| {
                    let mut covered = [[0; 64]; 4];
                    for s in all {
                        for row in &mut covered[s.vectors.0..s.vectors.1] {
                            row[s.keys.0..s.keys.1].iter_mut().for_each(|n| *n += 1);
                        }
                    }
                    for (z, own) in rounded.iter().enumerate() {
                        for (key, &n) in covered[z].iter().enumerate() {
                            // Nothing is covered twice, and beyond its own keys a vector covers only those of its
                            // partner.
                            let allowed = spare && rounded[z ^ 1].contains(&key);
                            let right = n == i32::from(own.contains(&key)) || allowed && n == 1;
                            assert!(right, "{ranges:?} by {grain}, vector {z} key {key}: {n} times");
                        }
                    }
                };
                check(&mut step(ranges).segments(grain), false);
                check(&mut step(ranges).paired_segments(grain, Coverage::Seen), false);
                check(&mut step(ranges).paired_segments(grain, Coverage::Pair), true);
            }
        }
    }
}
