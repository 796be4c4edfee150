//! The tile loop with another fold: compares rows with rows, a tile of scores at a time, which is folded and discarded.
//!
//! Queries are lanes, as in attention, and keys are processed in blocks. The worth of a key to a query is `q . k +
//! bias[k]`, so that the nearest key, the largest dot product and the smallest angle are all "the most". Numbers are
//! first moved into a [`Frame`] (relative to the data's mean, near 1), because the error of a score is relative to the
//! norms of its operands. [`Scanner::margin`] bounds that error: code that needs exact answers re-examines, in f64,
//! everything within it.
//!
//! This module is for other crates of this workspace, not a public interface.

use crate::memory::{Arena, with_workspace};
use crate::simd::{
    AboveArgs, Ahead, BestArgs, DEPTH, GROUP, Kernels, Matrix, MatrixKernels, MatrixMut, OtherArgs, Panels, Sum,
};
use crate::{Options, pool};
use fulgurite_core::{Data, stop};
use std::ops::Range;

/// Keys per block.
pub const BLOCK: usize = 128;
/// No instruction set has wider tiles.
pub const MAX_LANES: usize = 64;
/// Tiles of queries that share a block of keys while it is in the L2 cache.
const TILES: usize = 8;

/// The number of bits of the operands that a product keeps. Only matrix units drop any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Digits {
    /// 8 bits: one bf16.
    Eight,
    /// 16 bits: two bf16.
    Sixteen,
    /// All 24 bits.
    All,
}

/// The worth of a key to a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Worth {
    /// Half the query's squared norm minus half their squared distance.
    Near,
    /// The dot product.
    Dot,
    /// The dot product with the key scaled to length 1.
    Cosine,
}

/// The transformation of numbers before they are multiplied: `(x - shift) * scale`.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Shift of each dimension.
    pub shift: Vec<f32>,
    /// A power of two, so that it rounds nothing.
    pub scale: f32,
}

/// Instruction set, digits and threads of a scan.
#[derive(Clone, Copy)]
pub struct Scanner {
    pub(crate) kernels: &'static Kernels,
    unit: Option<(&'static MatrixKernels, usize)>,
    threads: usize,
}

/// f32 memory that starts on a cache line.
struct Lines {
    data: Vec<f32>,
    start: usize,
    len: usize,
}

impl Lines {
    fn new(len: usize) -> Lines {
        let data: Vec<f32> = stop::zeros("packed rows", len + 16);
        let start = data.as_ptr().align_offset(64).min(16);
        Lines { data, start, len }
    }
    fn get(&self) -> &[f32] {
        &self.data[self.start..self.start + self.len]
    }
    fn get_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..self.start + self.len]
    }
}

/// Keys packed for a scanner.
pub struct PackedKeys {
    n: usize,
    d: usize,
    /// Elements per packed block.
    room: usize,
    data: Lines,
    bias: Vec<f32>,
    /// The largest norm of a key in the frame.
    largest: f64,
}

impl PackedKeys {
    /// Number of keys.
    pub fn len(&self) -> usize {
        self.n
    }
    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }
}

/// Query rows: consecutive ones, or those of a list.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// All rows, one after the other.
    pub rows: &'a [f32],
    /// Elements per row.
    pub d: usize,
    /// First row and number of rows; these are positions in `list` if there is one.
    pub range: (usize, usize),
    /// Indices of rows.
    pub list: Option<&'a [u32]>,
    /// The frame of the queries.
    pub frame: &'a Frame,
}

impl<'a> Queries<'a> {
    /// Query `i` of these.
    pub fn row(&self, i: usize) -> &'a [f32] {
        let at = self.list.map_or(self.range.0 + i, |list| list[self.range.0 + i] as usize);
        &self.rows[at * self.d..(at + 1) * self.d]
    }
}

/// A tile of scores, `[key][lane]`.
pub struct Scores<'a> {
    kernels: &'static Kernels,
    s: &'a [f32],
    bias: &'a [f32],
    /// Index of the tile's first query in its group, and the number of lanes that are queries.
    pub lanes: (usize, usize),
    /// Index of the first key.
    pub first_key: usize,
}

/// Processes tiles of scores. Blocks of keys come in ascending order.
pub trait Fold {
    /// Called before the first tile, with the squared norms of the queries in the frame.
    fn begin(&mut self, norms: &[f32]);
    /// Processes a tile.
    fn tile(&mut self, scores: &Scores<'_>);
}

/// The best key of each query of a group, and the second best value.
#[derive(Debug, Clone, Default)]
pub struct Best {
    /// Worth of the best key.
    pub best: Vec<f32>,
    /// Worth of the second best key.
    pub second: Vec<f32>,
    /// Index of the best key.
    pub index: Vec<u32>,
}

impl Best {
    /// Resets the state for this many queries.
    pub fn reset(&mut self, queries: usize) {
        let lanes = queries.next_multiple_of(MAX_LANES);
        for values in [&mut self.best, &mut self.second] {
            values.clear();
            values.resize(lanes, f32::NEG_INFINITY);
        }
        self.index.clear();
        self.index.resize(lanes, 0);
    }
}

/// Inputs of the search for a neighbour in another group.
#[derive(Clone, Copy)]
pub struct Others<'a> {
    /// For each key: half its squared cap distance in the frame; the key is never nearer than that.
    pub cap: &'a [f32],
    /// For each key its group, as an integer below 2^24.
    pub key_group: &'a [f32],
    /// For each query its group, in whole tiles.
    pub lane_group: &'a [f32],
    /// For each query half its squared norm in the frame, in whole tiles.
    pub half_norm: &'a [f32],
}

impl Scores<'_> {
    /// Raises the best of each lane.
    pub fn best(&self, state: &mut Best) {
        let tile = self.kernels.tile;
        let own = self.lanes.0..self.lanes.0 + tile;
        let mut place = [0.0; MAX_LANES];
        self.kernels.best(&mut BestArgs {
            s: self.s,
            bias: self.bias,
            best: &mut state.best[own.clone()],
            second: &mut state.second[own.clone()],
            place: &mut place,
        });
        self.raise(&place, &mut state.index[own]);
    }

    /// Raises the best of each lane among keys of other groups.
    pub fn other(&self, others: &Others<'_>, state: &mut Best) {
        let tile = self.kernels.tile;
        let (own, keys) = (self.lanes.0..self.lanes.0 + tile, self.first_key..self.first_key + self.bias.len());
        let mut place = [0.0; MAX_LANES];
        self.kernels.other(&mut OtherArgs {
            s: self.s,
            bias: self.bias,
            cap: &others.cap[keys.clone()],
            key_group: &others.key_group[keys],
            lane_group: &others.lane_group[own.clone()],
            half_norm: &others.half_norm[own.clone()],
            best: &mut state.best[own.clone()],
            place: &mut place,
        });
        self.raise(&place, &mut state.index[own]);
    }

    fn raise(&self, place: &[f32; MAX_LANES], index: &mut [u32]) {
        for (index, &place) in index.iter_mut().zip(place) {
            if place >= 0.0 {
                *index = (self.first_key + place as usize) as u32;
            }
        }
    }

    /// Lane, key's index in the block and worth of every key that reaches its lane's bar. `bar` has the whole group's
    /// bars, in whole tiles; lanes that are not queries must have an infinite one.
    pub fn above(&self, bar: &[f32], found: &mut Vec<(u32, u32, f32)>) {
        let bar = &bar[self.lanes.0..self.lanes.0 + self.kernels.tile];
        self.kernels.above(&mut AboveArgs { s: self.s, bias: self.bias, bar, found });
    }
}

impl Scanner {
    /// A scanner with these options.
    pub fn new(options: &Options, digits: Digits) -> Scanner {
        let kernels = options.kernels();
        let parts = match digits {
            Digits::Eight => 1,
            Digits::Sixteen => 2,
            Digits::All => 3,
        };
        Scanner { kernels, unit: kernels.matrix.map(|unit| (unit, parts)), threads: options.threads() }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether products keep no more than eight bits of their operands: requested, and supported by a unit.
    pub fn keeps_eight(&self) -> bool {
        self.unit.is_some_and(|(_, parts)| parts == 1)
    }

    /// Largest number of queries of one [`walk`](Self::walk).
    pub fn group(&self) -> usize {
        TILES * self.kernels.tile
    }

    /// Squared distance in f64, with equal bits on every machine.
    pub fn distance(&self, a: &[f32], b: &[f32]) -> f64 {
        self.kernels.distance(a, b)
    }

    /// Dot product in f64, with equal bits on every machine.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f64 {
        self.kernels.dot(a, b)
    }

    /// `sums += x` in f64.
    pub fn add_wide(&self, x: &[f32], sums: &mut [f64]) {
        self.kernels.add_wide(x, sums);
    }

    /// Error bound of a key's worth, for a query of this norm in the frame.
    ///
    /// A product of operands in parts loses the remainder of the parts (2^-8, 2^-16 of each operand; a third part
    /// leaves nothing) and the products of small parts that are skipped (2^-16 with two parts, 2^-24 with three), and
    /// rounds each of its sums once. The frame and the bias round once per operand. Products below the smallest normal
    /// number may be lost.
    pub fn margin(&self, d: usize, keys: &PackedKeys, norm: f64) -> f64 {
        let (lost, sums) = match self.unit {
            None => (0.0, d + 2),
            Some((_, 1)) => (2.1 * 2f64.powi(-8), d + 8),
            Some((_, 2)) => (3.1 * 2f64.powi(-16), 3 * d + 8),
            Some(_) => (2f64.powi(-23), 6 * d + 8),
        };
        let relative = lost + sums as f64 * 2f64.powi(-24);
        relative * norm * keys.largest + 2f64.powi(-21) * (norm + keys.largest).powi(2) + d as f64 * 2f64.powi(-120)
    }

    /// Packs keys: `rows` one after the other, with `d` elements each.
    pub fn keys(&self, rows: &[f32], d: usize, frame: &Frame, worth: Worth) -> PackedKeys {
        let n = rows.len() / d.max(1);
        let depth = d.div_ceil(DEPTH);
        let room = match self.unit {
            None => BLOCK * d,
            Some((_, parts)) => Panels::room(BLOCK / GROUP, depth, parts),
        };
        let blocks = n.div_ceil(BLOCK);
        let mut keys = PackedKeys {
            n,
            d,
            room,
            data: Lines::new(blocks * room),
            bias: stop::zeros("packed rows", n),
            largest: 0.0,
        };
        let mut largest = vec![0.0f64; blocks];
        let parts = keys.data.get_mut().chunks_mut(room.max(1)).zip(keys.bias.chunks_mut(BLOCK)).zip(&mut largest);
        pool::each(self.threads, parts, |block, ((to, bias), largest)| {
            let own = &rows[block * BLOCK * d..(block * BLOCK + bias.len()) * d];
            with_workspace(BLOCK * d, |scratch| {
                for ((row, out), bias) in own.chunks_exact(d).zip(scratch.chunks_exact_mut(d)).zip(bias) {
                    *largest = self.framed(row, frame, worth, out, bias).max(*largest);
                }
                match self.unit {
                    None => to[..own.len()].copy_from_slice(&scratch[..own.len()]),
                    Some((unit, parts)) => unit.pack_rows_in(scratch, [d, own.len() / d, d], to, depth, parts),
                }
            });
        });
        keys.largest = largest.into_iter().fold(0.0, f64::max);
        keys
    }

    /// A key in the frame, its bias and its norm.
    fn framed(&self, row: &[f32], frame: &Frame, worth: Worth, out: &mut [f32], bias: &mut f32) -> f64 {
        for ((x, &value), &shift) in out.iter_mut().zip(row).zip(&frame.shift) {
            *x = (value - shift) * frame.scale;
        }
        let norm = self.kernels.dot(out, out);
        match worth {
            Worth::Near => *bias = (-0.5 * norm) as f32,
            Worth::Dot => {}
            Worth::Cosine => {
                // A key of length 0 is worth 0 to every query.
                let inverse = if norm > 0.0 { 1.0 / norm.sqrt() } else { 0.0 };
                out.iter_mut().for_each(|x| *x = (f64::from(*x) * inverse) as f32);
                return 1.0;
            }
        }
        norm.sqrt()
    }

    /// Folds the scores of up to [`group`](Self::group) queries with the given keys, which start at a whole block.
    pub fn walk(&self, queries: &Queries<'_>, keys: &PackedKeys, range: Range<usize>, fold: &mut dyn Fold) {
        let (tile, d, count) = (self.kernels.tile, keys.d, queries.range.1);
        assert!(count <= self.group() && queries.d == d, "queries of a group");
        assert!(range.start.is_multiple_of(BLOCK) && range.end <= keys.n, "keys of a walk");
        let (d_pad, depth, tiles) = (d.next_multiple_of(self.kernels.lanes), d.div_ceil(DEPTH), count.div_ceil(tile));
        let packed = match self.unit {
            None => d_pad * tile,
            Some((_, parts)) => Panels::room(tile / GROUP, depth, parts),
        };
        let sizes = [tiles * packed, tile * d_pad, tile * d_pad, BLOCK * tile, tiles * tile];
        with_workspace(sizes.iter().map(|&n| Arena::room(n)).sum(), |workspace| {
            let mut arena = Arena::new(workspace);
            let [lanes, rows, turned, s, norms] = sizes.map(|n| arena.take(n));
            for (t, norms) in norms.chunks_exact_mut(tile).enumerate() {
                let to = &mut lanes[t * packed..(t + 1) * packed];
                match self.unit {
                    None => self.turned(queries, t * tile, rows, to, norms),
                    Some((unit, parts)) => {
                        self.turned(queries, t * tile, rows, turned, norms);
                        let size = Panels::room(1, depth, parts);
                        for (lane, to) in (0..tile).step_by(GROUP).zip(to.chunks_exact_mut(size)) {
                            unit.pack_lanes(&turned[lane..], tile, [0, d], to, parts);
                        }
                    }
                }
            }
            fold.begin(&norms[..count]);
            let _hold = self.unit.map(|(unit, _)| unit.hold());
            for first_key in range.clone().step_by(BLOCK) {
                stop::poll();
                let count_keys = BLOCK.min(range.end - first_key);
                let block = first_key / BLOCK;
                let own = &keys.data.get()[block * keys.room..(block + 1) * keys.room];
                let mut ahead = Ahead::default();
                if first_key + BLOCK < range.end {
                    // Prefetch lines of the next block, a few at a time.
                    let (offset, line) = ((block + 1) * keys.room, 128.min(keys.room));
                    ahead.push_rows(&Data::F32(keys.data.get()), offset, line, line, keys.room / line);
                }
                for t in 0..tiles {
                    let lanes = &lanes[t * packed..(t + 1) * packed];
                    let to = MatrixMut::at(s, tile, 0, 0);
                    match self.unit {
                        None => {
                            let (a, b) = (Matrix::new(own, d), Matrix::new(lanes, tile));
                            self.kernels.gemm(to, a, b, [count_keys, tile, d], Sum::Fresh, &mut ahead);
                        }
                        Some((unit, parts)) => {
                            let (a, b) = (Panels::new(own, depth, parts), Panels::new(lanes, depth, parts));
                            let size = [count_keys.div_ceil(GROUP), tile / GROUP, depth];
                            unit.multiply(to, a, b, size, Sum::Fresh, &mut ahead);
                        }
                    }
                    fold.tile(&Scores {
                        kernels: self.kernels,
                        s,
                        bias: &keys.bias[first_key..first_key + count_keys],
                        lanes: (t * tile, tile.min(count - t * tile)),
                        first_key,
                    });
                }
            }
        });
    }

    /// The queries of a tile as `[d][lane]` in their frame; lanes past the last query are zero.
    fn turned(&self, queries: &Queries<'_>, first: usize, rows: &mut [f32], out: &mut [f32], norms: &mut [f32]) {
        let (tile, d) = (self.kernels.tile, queries.d);
        let d_pad = d.next_multiple_of(self.kernels.lanes);
        let count = tile.min(queries.range.1 - first);
        if queries.list.is_none() && count == tile && d == d_pad {
            let at = (queries.range.0 + first) * d;
            self.kernels.transpose(&queries.rows[at..at + tile * d], d, out, tile, tile, d);
        } else {
            for (lane, row) in rows[..tile * d_pad].chunks_exact_mut(d_pad).enumerate() {
                if lane < count {
                    row[..d].copy_from_slice(queries.row(first + lane));
                    row[d..].fill(0.0);
                } else {
                    row.fill(0.0);
                }
            }
            self.kernels.transpose(rows, d_pad, out, tile, tile, d_pad);
        }
        self.kernels.frame(out, &queries.frame.shift, queries.frame.scale, norms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use fulgurite_core::random::Rng;

    /// The best key by f64, lowest first, with its worth and the second best.
    fn oracle(q: &[f32], keys: &[f32], d: usize, frame: &Frame, worth: Worth) -> Vec<f64> {
        let framed = |row: &[f32]| -> Vec<f64> {
            row.iter().zip(&frame.shift).map(|(&x, &s)| f64::from((x - s) * frame.scale)).collect()
        };
        let q = framed(q);
        let value = |row: &[f32]| {
            let k = framed(row);
            let (dot, norm) = (q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>(), k.iter().map(|x| x * x).sum::<f64>());
            match worth {
                Worth::Near => dot - 0.5 * norm,
                Worth::Dot => dot,
                Worth::Cosine => dot / norm.sqrt(),
            }
        };
        keys.chunks_exact(d).map(value).collect()
    }

    struct All(Best, Vec<(u32, u32, f32)>, Vec<f32>);
    impl Fold for All {
        fn begin(&mut self, norms: &[f32]) {
            self.0.reset(norms.len());
            self.2 = vec![f32::NEG_INFINITY; norms.len()];
            self.2.resize(norms.len().next_multiple_of(MAX_LANES), f32::INFINITY);
        }
        fn tile(&mut self, scores: &Scores<'_>) {
            scores.best(&mut self.0);
            let mut found = Vec::new();
            scores.above(&self.2, &mut found);
            self.1.extend(found.iter().map(|f| (f.0 + scores.lanes.0 as u32, f.1 + scores.first_key as u32, f.2)));
        }
    }

    #[test]
    fn values_are_within_the_margin_on_every_instruction_set() {
        let mut rng = Rng::new(3);
        for isa in Isa::available() {
            for digits in [Digits::Eight, Digits::Sixteen, Digits::All] {
                for worth in [Worth::Near, Worth::Dot, Worth::Cosine] {
                    for [n, m, d] in [[1, 1, 1], [70, 130, 7], [9, 300, 33], [65, 17, 64]] {
                        let scanner =
                            Scanner::new(&Options { isa: Some(isa), threads: Some(2), rescale: None }, digits);
                        let mut random =
                            |n: usize| -> Vec<f32> { rng.normals(n, 1.5).iter().map(|&x| x as f32 + 2.0).collect() };
                        let (q, k) = (random(n * d), random(m * d));
                        let shift = if worth == Worth::Near { vec![2.0; d] } else { vec![0.0; d] };
                        let frame = Frame { shift, scale: 0.5 };
                        let keys = scanner.keys(&k, d, &frame, worth);
                        let queries = Queries { rows: &q, d, range: (0, n), list: None, frame: &frame };
                        let mut fold = All(Best::default(), Vec::new(), Vec::new());
                        scanner.walk(&queries, &keys, 0..m, &mut fold);
                        assert_eq!(fold.1.len(), n * m, "{isa:?} every pair once");
                        for (i, row) in q.chunks_exact(d).enumerate() {
                            let want = oracle(row, &k, d, &frame, worth);
                            let norm = row.iter().zip(&frame.shift).map(|(&x, &s)| f64::from((x - s) * 0.5).powi(2));
                            let margin = scanner.margin(d, &keys, norm.sum::<f64>().sqrt());
                            for &(_, key, v) in fold.1.iter().filter(|f| f.0 as usize == i) {
                                let diff = (f64::from(v) - want[key as usize]).abs();
                                assert!(diff <= margin, "{isa:?} {digits:?} {worth:?} {d}: {diff} > {margin}");
                            }
                            let mut seen: Vec<f32> = fold.1.iter().filter(|f| f.0 as usize == i).map(|f| f.2).collect();
                            let at = fold.0.index[i] as usize;
                            let first = fold.1.iter().filter(|f| f.0 as usize == i && f.2 == fold.0.best[i]);
                            assert_eq!(first.map(|f| f.1 as usize).min(), Some(at), "the first of equals");
                            seen.sort_by(|a, b| b.total_cmp(a));
                            assert_eq!(fold.0.best[i], seen[0]);
                            assert_eq!(fold.0.second[i], seen.get(1).copied().unwrap_or(f32::NEG_INFINITY));
                        }
                    }
                }
            }
        }
    }

    /// Numbers that lose as many bits as possible, all with one sign, so that nothing cancels.
    #[test]
    fn the_worst_numbers_are_within_the_margin() {
        let worst = [1.0 + 2f32.powi(-8) - 2f32.powi(-23), 1.0 + 2f32.powi(-8), 1.0 + 2f32.powi(-16) - 2f32.powi(-23)];
        for isa in Isa::available() {
            for digits in [Digits::Eight, Digits::Sixteen, Digits::All] {
                let scanner = Scanner::new(&Options { isa: Some(isa), threads: Some(1), rescale: None }, digits);
                for (d, x) in [1, 2, 33, 200].into_iter().flat_map(|d| worst.map(|x| (d, x))) {
                    let (row, frame) = (vec![x; d], Frame { shift: vec![0.0; d], scale: 1.0 });
                    let keys = scanner.keys(&row, d, &frame, Worth::Dot);
                    let queries = Queries { rows: &row, d, range: (0, 1), list: None, frame: &frame };
                    let mut fold = All(Best::default(), Vec::new(), Vec::new());
                    scanner.walk(&queries, &keys, 0..1, &mut fold);
                    let want = d as f64 * f64::from(x) * f64::from(x);
                    let (off, allowed) =
                        ((f64::from(fold.0.best[0]) - want).abs(), scanner.margin(d, &keys, want.sqrt()));
                    assert!(off <= allowed, "{isa:?} {digits:?} {d} times {x}: {off:e} > {allowed:e}");
                }
            }
        }
    }
}
