//! Code that forward and backward share: the queries of a tile, the keys that a tile sees, and the parts of a block of
//! scores to compute.
//!
//! Scores are stored as `[key][lane]`, in natural units (Q contains the scale). A lane is a query, so row maxima and
//! sums are vertical vector operations. The query heads of one key/value head are packed into one list of rows, q-major
//! (row p is query p / pack, head p % pack), so that a group reads each key once. A lane's result never depends on its
//! neighbours, so skipping invisible parts changes no bits.

use crate::modify::{Expressions, HullForm};
use crate::simd::{Ahead, ExpKind, GROUP, Kernels, LEAST, MAX_VECTORS, Matrix, Source};
use crate::step::Step;
use crate::unit::{Packer, QueryRows, Unit, Vectors};
use fulgurite_core::expr::Coverage;
use fulgurite_core::format::GroupFormat;
use fulgurite_core::{
    BlockMask, Bound, DType, Data, Exp, Precision, Problem, RowLayout, Sequence, Side, TensorView, stop,
};
use std::ops::Range;
use std::sync::Arc;

/// Keys whose visibility differs inside a vector are computed in steps of this many.
const GRAIN: usize = 8;
/// Tiles that read distant rows of keys faster where they lie than from a copy.
const FEW_TILES: usize = 4;
/// Largest number of lanes of a tile.
pub(crate) const MAX_LANES: usize = 64;

/// Bytes that the lists of a call take for each sequence and key/value head at most, besides those of its tiles.
const PAIR_BYTES: usize = 256;

/// Data that every step of a call needs.
pub(crate) struct Context<'a> {
    pub bound: &'a Bound<'a>,
    pub problem: &'a Problem,
    pub kernels: &'static Kernels,
    /// The unit that computes the products of forward.
    pub unit: &'a dyn Unit,
    /// The unit that packs the problem's tensors, whatever the product unit works on.
    pub packer: &'static dyn Packer,
    /// Dimensions of k and v, and both rounded up to whole vectors.
    pub d: usize,
    pub dv: usize,
    pub d_pad: usize,
    pub dv_pad: usize,
    /// Query heads packed into one tile: the group, or 1 if heads see different blocks.
    pub pack: usize,
    pub exp: ExpKind,
    /// The format to which weights are rounded before the product with V.
    pub rounding: Option<GroupFormat>,
    /// Keys per block, if it is not the unit's usual number: a multiple of 64.
    pub block: Option<usize>,
    /// Modifiers and masks.
    pub expressions: Arc<Expressions<'a>>,
}

impl<'a> Context<'a> {
    pub fn new(bound: &'a Bound<'a>, kernels: &'static Kernels) -> Self {
        Context::with(bound, kernels, kernels.packer(bound.problem().dtype()))
    }

    /// This context with products on vectors.
    pub fn on_vectors(&self) -> Self {
        Context { unit: &Vectors, packer: &Vectors, expressions: self.expressions.clone(), ..*self }
    }

    /// A context in which `pack` query heads share a tile.
    pub fn with_pack(bound: &'a Bound<'a>, kernels: &'static Kernels, pack: usize) -> Self {
        let expressions = Arc::new(Expressions::new(bound.problem(), pack == 1));
        Context { pack, expressions, ..Context::new(bound, kernels) }
    }

    /// A context with the call's own unit.
    pub fn with(bound: &'a Bound<'a>, kernels: &'static Kernels, unit: &'a dyn Unit) -> Self {
        let problem = bound.problem();
        let pairs = bound.sequences().len().saturating_mul(problem.kv_heads());
        stop::ask("lists of sequences and heads", pairs.saturating_mul(PAIR_BYTES));
        let own_blocks = problem.blocks().is_some_and(|spec| spec.heads > 1);
        let exp = exp_kind(problem);
        let (d, dv) = (problem.head_dim(), problem.value_dim());
        let pack = if own_blocks { 1 } else { problem.group() };
        Context {
            bound,
            problem,
            kernels,
            unit,
            packer: kernels.packer(problem.dtype()),
            d,
            dv,
            d_pad: d.next_multiple_of(kernels.lanes),
            dv_pad: dv.next_multiple_of(kernels.lanes),
            pack,
            exp,
            rounding: None,
            block: None,
            expressions: Arc::new(Expressions::new(problem, pack == 1)),
        }
    }

    /// Whether expressions read scores, which are in natural units afterwards.
    pub fn is_modified(&self) -> bool {
        self.problem.score_program().is_some()
    }

    /// Weights of fewer powers of two may be 0. Biases by distance make many weights so small that their products with
    /// values are subnormal, which takes a microcode assist each; values above 2^-30 leave none.
    pub fn least(&self) -> f32 {
        if self.is_modified() { -96.0 } else { LEAST }
    }

    /// Whether expressions change scores: they read or hide them.
    pub fn has_expressions(&self) -> bool {
        self.is_modified() || self.problem.mask_rest().is_some()
    }

    /// Whether scores are processed in tiles of all lanes; otherwise in pairs of vectors, which stay in the L1 cache.
    pub fn whole_tiles(&self) -> bool {
        self.has_expressions() || self.kernels.matrix_for(self.problem.dtype()).is_none()
    }

    /// Whether products use tiles of all lanes, if all lanes see the same keys. Keys in parts are larger than the L1
    /// cache, and are better read once for all lanes than once for each pair.
    pub fn whole_products(&self) -> bool {
        self.whole_tiles() || self.problem.dtype() != DType::Bf16
    }

    /// The factor in softmax that converts a score to natural units.
    pub fn score_scale(&self) -> f32 {
        if self.is_modified() { 1.0 } else { self.unit.score_scale(self) }
    }

    /// Converts the scores of a step from the unit's scale to natural units.
    pub fn scale_scores(&self, step: &Step, stride: usize, s: &mut [f32]) {
        let scale = self.unit.score_scale(self);
        if scale != 1.0 {
            let seen = step.hull();
            self.kernels.scale_lanes(&mut s[seen.start * stride..seen.end * stride], &[scale; MAX_LANES][..stride]);
        }
    }

    /// Rounds the weights of a step, with keys starting at `origin`, in groups of keys; hidden keys count as 0.
    pub fn round_weights(&self, step: &Step, stride: usize, p: &mut [f32]) {
        let Some(format) = self.rounding else { return };
        for (z, &range) in step.ranges[..stride / self.kernels.lanes].iter().enumerate() {
            self.kernels.round_weights(p, stride, z * self.kernels.lanes, range, format);
        }
    }

    /// All tiles of one sequence and key/value head.
    pub fn tiles(&self, sequence: usize, kv_head: usize) -> impl Iterator<Item = Tile> + use<'_> {
        let s = self.bound.sequences()[sequence];
        let group = self.problem.group();
        let lanes = self.kernels.tile;
        let unit = self.tile_unit(sequence);
        (0..group / self.pack).flat_map(move |h| {
            let total = s.q_len * self.pack;
            (0..total).step_by(unit).flat_map(move |start| {
                let end = (start + unit).min(total);
                (start..end).step_by(lanes).map(move |first| Tile {
                    sequence,
                    head: kv_head * group + h * self.pack,
                    first,
                    rows: lanes.min(end - first),
                })
            })
        })
    }

    /// Packed rows that no tile straddles: those of a sequence, or of one row of blocks.
    pub fn tile_unit(&self, sequence: usize) -> usize {
        let s = &self.bound.sequences()[sequence];
        self.problem.blocks().map_or(s.q_len * self.pack, |spec| spec.rows * self.pack).max(1)
    }

    /// Query, head and interval of each lane of a tile.
    pub fn lanes(&self, tile: &Tile) -> Lanes {
        let Some(hull) = self.hull_of_bits(tile) else {
            return self.lanes_within(tile, |_| 0..usize::MAX);
        };
        let mut lanes = self.lanes_within(tile, |_| hull.keys.clone());
        lanes.decided = hull.form != HullForm::Bits;
        if let HullForm::Intervals(own) = &hull.form {
            lanes.narrow(own, tile.rows, self.kernels.lanes);
        }
        lanes
    }

    /// Like `lanes`, if a query sees only keys of an interval besides the mask. From one query to the next its ends
    /// must move by one key or not at all, as those of spans do.
    pub fn lanes_within(&self, tile: &Tile, limit: impl Fn(usize) -> Range<usize>) -> Lanes {
        let s = &self.bound.sequences()[tile.sequence];
        let grain = if matches!(self.problem.precision(), Precision::Int8(_)) { GROUP } else { self.kernels.lanes };
        let stride = tile.rows.next_multiple_of(grain);
        let mut lanes = Lanes {
            stride,
            q: [0; MAX_LANES],
            head: [0; MAX_LANES],
            lo: [0; MAX_LANES],
            hi: [0; MAX_LANES],
            all: [(0, usize::MAX); MAX_VECTORS],
            some: [(usize::MAX, 0); MAX_VECTORS],
            decided: self.problem.mask_rest().is_none(),
        };
        let span = |q: usize| {
            let (keys, limit) = (self.problem.mask().keys(q, s.q_len, s.k_len), limit(q));
            let start = keys.start.max(limit.start).min(s.k_len);
            start..keys.end.min(limit.end).max(start)
        };
        // An end that moves by one key per query, or not at all, moves evenly.
        let queries = self.queries(tile);
        let (first, last) = (span(queries.start), span(queries.end - 1));
        let pace = |a: usize, b: usize| match b - a {
            0 => Some(0),
            n if n + 1 == queries.len() => Some(1),
            _ => None,
        };
        let paces = pace(first.start, last.start).zip(pace(first.end, last.end));
        for lane in 0..stride {
            // Lanes past the last row repeat it; their results are dropped.
            let (q, head) = self.query_and_head(tile, lane.min(tile.rows - 1));
            let n = q - queries.start;
            let keys = paces.map_or_else(|| span(q), |(a, b)| first.start + a * n..first.end + b * n);
            (lanes.q[lane], lanes.head[lane]) = (q as i32, head as i32);
            (lanes.lo[lane], lanes.hi[lane]) = (keys.start as i32, keys.end as i32);
            let z = lane / self.kernels.lanes;
            let ((a, b), (x, y)) = (lanes.all[z], lanes.some[z]);
            lanes.all[z] = (a.max(keys.start), b.min(keys.end));
            if !keys.is_empty() {
                lanes.some[z] = (x.min(keys.start), y.max(keys.end));
            }
        }
        lanes
    }

    /// Query and head of a lane.
    pub fn query_and_head(&self, tile: &Tile, lane: usize) -> (usize, usize) {
        let p = tile.first + lane;
        // A division takes as long as all other work of a lane.
        if self.pack == 1 { (p, tile.head) } else { (p / self.pack, tile.head + p % self.pack) }
    }

    /// Queries of a tile.
    pub fn queries(&self, tile: &Tile) -> Range<usize> {
        tile.first / self.pack..(tile.first + tile.rows - 1) / self.pack + 1
    }

    /// The parts of a block of keys that the block mask lets a tile see, ascending, and whether the mask still decides
    /// there.
    pub fn pieces(&self, tile: &Tile, keys: Range<usize>) -> impl Iterator<Item = Piece> + use<> {
        let blocks = self.bound.block_mask().map(|mask| self.listed(mask, tile, keys.clone()));
        let whole = blocks.is_none().then_some(Piece { keys, masked: true });
        whole.into_iter().chain(blocks.into_iter().flatten())
    }

    fn listed(&self, mask: &BlockMask, tile: &Tile, keys: Range<usize>) -> Vec<Piece> {
        let s = &self.bound.sequences()[tile.sequence];
        let spec = mask.spec();
        let (partial, full) = mask.lists(s.batch, tile.head, tile.first / self.pack / spec.rows);
        let mut pieces: Vec<Piece> = Vec::new();
        for block in keys.start / spec.cols..keys.end.div_ceil(spec.cols) {
            let id = block as i32;
            let masked = partial.binary_search(&id).is_ok();
            if !masked && full.binary_search(&id).is_err() {
                continue;
            }
            let own = (block * spec.cols).max(keys.start)..((block + 1) * spec.cols).min(keys.end);
            match pieces.last_mut() {
                Some(last) if last.keys.end == own.start && last.masked == masked => last.keys.end = own.end,
                _ => pieces.push(Piece { keys: own, masked }),
            }
        }
        pieces
    }

    /// The part of a piece to compute; `None` if no lane sees any of it. `origin` is the key of row 0 of the block of
    /// scores.
    pub fn step(&self, tile: &Tile, lanes: &Lanes, piece: &Piece, origin: usize) -> Option<Step> {
        let width = self.kernels.lanes;
        let (first, last) = (piece.keys.start - origin, piece.keys.end - origin);
        let mut step = Step {
            ranges: [(0, 0); MAX_VECTORS],
            inner: [(0, 0); MAX_VECTORS],
            lo: [0.0; MAX_LANES],
            hi: [0.0; MAX_LANES],
            rest: false,
        };
        for z in 0..lanes.stride / width {
            let (all, some) = (lanes.all[z], lanes.some[z]);
            if !piece.masked || (all.0 <= piece.keys.start && all.1 >= piece.keys.end) {
                step.ranges[z] = (first, last);
                step.inner[z] = (first, last);
                continue;
            }
            let (start, end) = (some.0.max(piece.keys.start), some.1.min(piece.keys.end));
            if start >= end {
                continue;
            }
            let (start, end) = (start - origin, end - origin);
            // Round, but never include a key that no lane of the tile sees: such a key may hold anything.
            let start = (start - start % GRAIN).max(lanes.reach().0.clamp(piece.keys.start, piece.keys.end) - origin);
            let end = end.next_multiple_of(GRAIN).min(lanes.reach().1.clamp(piece.keys.start, piece.keys.end) - origin);
            step.ranges[z] = (start, end);
            let inside = |key: usize| key.clamp(origin + start, origin + end) - origin;
            step.inner[z] = (inside(all.0), inside(all.1).max(inside(all.0)));
            for lane in z * width..(z + 1) * width {
                // Small integers, exact in f32.
                let relative = |key: i32| (key as usize).clamp(piece.keys.start, piece.keys.end) - origin;
                step.lo[lane] = relative(lanes.lo[lane]) as f32;
                step.hi[lane] = relative(lanes.hi[lane]) as f32;
            }
        }
        if step.ranges.iter().all(|(a, b)| a >= b) {
            return None;
        }
        if piece.masked
            && !lanes.decided
            && let Some(rest) = self.problem.mask_rest()
        {
            match self.coverage(rest, tile, &piece.keys) {
                Coverage::Empty => return None,
                Coverage::Partial => step.rest = true,
                Coverage::Full => {}
            }
        }
        Some(step)
    }

    /// Updates a step for a piece that all lanes see whole, as they did before; false if they do not.
    pub fn step_again(&self, lanes: &Lanes, piece: &Piece, origin: usize, step: &mut Step) -> bool {
        let vectors = lanes.stride / self.kernels.lanes;
        let whole = |&(start, end): &(usize, usize)| start <= piece.keys.start && piece.keys.end <= end;
        if !lanes.decided || !lanes.all[..vectors].iter().all(whole) {
            return false;
        }
        let own = (piece.keys.start - origin, piece.keys.end - origin);
        step.ranges[..vectors].fill(own);
        step.inner[..vectors].fill(own);
        true
    }

    /// Converts rows of queries (or their gradients) of a tile to f32, `[lane][width]`, zero padded. Returns true if
    /// all are finite.
    pub fn gather(
        &self,
        tile: &Tile,
        data: &Data<'_>,
        rows: &RowLayout,
        n: usize,
        out: &mut [f32],
        width: usize,
    ) -> bool {
        let mut finite = true;
        for (lane, row) in out.chunks_exact_mut(width).enumerate() {
            if lane < tile.rows {
                let (q, head) = self.query_and_head(tile, lane);
                finite &= self.kernels.widen(data, rows.at(q, head), &mut row[..n]);
                row[n..].fill(0.0);
            } else {
                row.fill(0.0);
            }
        }
        finite
    }

    /// Computes Q^T of a tile times `scale`, `[d][lane]`; `rows` is scratch of the same size.
    pub fn turned_queries(&self, from: &QueryRows<'_>, stride: usize, scale: f32, rows: &mut [f32], out: &mut [f32]) {
        let whole = from.rows == stride && self.d == self.d_pad;
        match (from.data, from.row) {
            (Data::F32(all), Some(row)) if whole => {
                self.kernels.transpose(&all[from.starts[0]..], row, out, stride, stride, self.d);
            }
            _ => {
                let own = &mut rows[..stride * self.d_pad];
                for (lane, row) in own.chunks_exact_mut(self.d_pad).enumerate() {
                    let n = if lane < from.rows { self.d } else { 0 };
                    self.kernels.widen(&from.data, from.starts[lane.min(from.rows - 1)], &mut row[..n]);
                    row[n..].fill(0.0);
                }
                self.kernels.transpose(own, self.d_pad, out, stride, stride, self.d_pad);
            }
        }
        if scale != 1.0 {
            self.kernels.scale_lanes(out, &[scale; MAX_LANES][..stride]);
        }
    }

    /// Rows of keys or values as f32 with their `n` elements: in place if they are f32 and close together, else
    /// converted into `buffer` (`[key][width]`, zero padded).
    pub fn keys<'b>(
        &self,
        view: &TensorView<'b>,
        sequence: &Sequence,
        head: usize,
        keys: Range<usize>,
        [n, width]: [usize; 2],
        buffer: &'b mut [f32],
    ) -> KeyRows<'b> {
        let rows = self.key_layout(view.strides(), sequence);
        let (offset, count) = (rows.at(keys.start, head), keys.len());
        self.keys_from(Source { data: view.data(), offset, row: rows.row, rows: count, n }, width, buffer)
    }

    /// Whether products read rows where they lie. Rows that are far apart cost a page each, every time; a copy pays
    /// once for all tiles, if there are more than [`FEW_TILES`].
    pub fn reads_in_place(&self, from: &Source<'_>, width: usize) -> bool {
        let few = self.problem.max_q_len() * self.pack <= FEW_TILES * self.kernels.tile;
        matches!(from.data, Data::F32(_)) && (from.row <= 2 * width || few) && from.n == width
    }

    /// Rows from any source as f32, in place or converted.
    pub fn keys_from<'b>(&self, from: Source<'b>, width: usize, buffer: &'b mut [f32]) -> KeyRows<'b> {
        if let (Data::F32(all), true) = (from.data, self.reads_in_place(&from, width)) {
            return KeyRows { rows: Matrix::new(&all[from.offset..], from.row), finite: false };
        }
        let mut finite = true;
        for (key, row) in (0..from.rows).zip(buffer.chunks_exact_mut(width)) {
            finite &= self.kernels.widen(&from.data, from.offset + key * from.row, &mut row[..from.n]);
            row[from.n..].fill(0.0);
        }
        KeyRows { rows: Matrix::new(buffer, width), finite }
    }

    /// The rows themselves if all are finite; else a copy in which keys that no lane sees are 0, because a weight of 0
    /// times an invisible NaN would be NaN. `weights` is the tile of scores after softmax.
    pub fn only_seen<'b>(
        &self,
        rows: KeyRows<'b>,
        width: usize,
        weights: &[f32],
        step: &Step,
        stride: usize,
        copy: &'b mut [f32],
    ) -> KeyRows<'b> {
        // Spans never include a key that no lane sees.
        if rows.finite || !step.rest {
            return rows;
        }
        let seen = step.hull();
        let mut finite = true;
        for key in seen.clone() {
            let row = Data::F32(&rows.rows.at(key, 0).data[..width]);
            finite &= self.kernels.widen(&row, 0, &mut copy[key * width..(key + 1) * width]);
        }
        if finite {
            return rows;
        }
        for key in seen {
            if !step.weighs(key, weights, stride, self.kernels.lanes) {
                copy[key * width..(key + 1) * width].fill(0.0);
            }
        }
        KeyRows { rows: Matrix::new(copy, width), finite: true }
    }

    pub fn key_layout(&self, strides: &[usize], sequence: &Sequence) -> RowLayout {
        self.bound.row_layout(strides, sequence, Side::Key)
    }
    pub fn query_layout(&self, strides: &[usize], sequence: &Sequence) -> RowLayout {
        self.bound.row_layout(strides, sequence, Side::Query)
    }

    /// Prefetches keys and values.
    pub fn prefetch_keys(&self, sequence: &Sequence, kv_head: usize, keys: Range<usize>, ahead: &mut [Ahead; 2]) {
        for ((view, n), ahead) in [(self.bound.k(), self.d), (self.bound.v(), self.dv)].into_iter().zip(ahead) {
            let at = self.key_layout(view.strides(), sequence);
            ahead.push_rows(&view.data(), at.at(keys.start, kv_head), at.row, n, keys.len());
        }
    }

    /// Prefetches queries of one head.
    pub fn prefetch_queries(&self, sequence: &Sequence, head: usize, queries: Range<usize>, ahead: &mut Ahead) {
        let view = self.bound.q();
        let at = self.query_layout(view.strides(), sequence);
        ahead.push_rows(&view.data(), at.at(queries.start, head), at.row, self.d, queries.len());
    }
}

/// The exponential of a problem.
pub(crate) fn exp_kind(problem: &Problem) -> ExpKind {
    match problem.exp() {
        // The error of the polynomial stays below the rounding of the output.
        Exp::Auto => ExpKind::Poly(match problem.dtype() {
            DType::Bf16 => 3,
            DType::F16 => 4,
            _ => 5,
        }),
        Exp::Native => ExpKind::Native,
        Exp::Poly { degree, share } if share >= 1.0 => ExpKind::Poly(degree),
        Exp::Poly { degree, share } => ExpKind::Mixed(degree, (share * 16.0).round() as u8),
        Exp::Sas { threshold } => ExpKind::Sas(threshold),
        Exp::SasOnline => ExpKind::SasOnline,
    }
}

/// A tile: up to the vector unit's number of lanes of packed rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile {
    /// Index of the sequence.
    pub sequence: usize,
    /// First query head.
    pub head: usize,
    /// First packed row, and the number of rows.
    pub first: usize,
    pub rows: usize,
}

/// Query, head and visible interval of each lane.
pub(crate) struct Lanes {
    /// Number of lanes in use, in whole vectors.
    pub stride: usize,
    pub q: [i32; MAX_LANES],
    pub head: [i32; MAX_LANES],
    pub lo: [i32; MAX_LANES],
    pub hi: [i32; MAX_LANES],
    /// For each vector: the keys that every lane sees, and the keys that some lane sees.
    all: [(usize, usize); MAX_VECTORS],
    some: [(usize, usize); MAX_VECTORS],
    /// Whether the intervals say all that the mask says, so that its rest need not be asked.
    pub decided: bool,
}

impl Lanes {
    /// Lanes that all see the first `keys` keys.
    pub fn whole(stride: usize, keys: usize) -> Self {
        Lanes {
            stride,
            q: [0; MAX_LANES],
            head: [0; MAX_LANES],
            lo: [0; MAX_LANES],
            hi: [keys as i32; MAX_LANES],
            all: [(0, keys); MAX_VECTORS],
            some: [(0, keys); MAX_VECTORS],
            decided: true,
        }
    }

    /// Restricts each of the first `rows` lanes to an interval, its first key and one past its last, in vectors of `width`.
    fn narrow(&mut self, [lo, hi]: &[[i32; MAX_LANES]; 2], rows: usize, width: usize) {
        (self.all, self.some) = ([(0, usize::MAX); MAX_VECTORS], [(usize::MAX, 0); MAX_VECTORS]);
        for lane in 0..self.stride {
            let own = lane.min(rows - 1);
            let start = self.lo[lane].max(lo[own]);
            let end = self.hi[lane].min(hi[own]).max(start);
            (self.lo[lane], self.hi[lane]) = (start, end);
            let (start, end, z) = (start as usize, end as usize, lane / width);
            self.all[z] = (self.all[z].0.max(start), self.all[z].1.min(end));
            if start < end {
                self.some[z] = (self.some[z].0.min(start), self.some[z].1.max(end));
            }
        }
    }

    /// Whether every lane sees all of these keys, according to the intervals.
    pub fn see(&self, keys: &Range<usize>) -> bool {
        // Vectors past the last one answer yes.
        self.all.iter().all(|all| all.0 <= keys.start && keys.end <= all.1)
    }

    /// The first key that some lane sees, and one past the last.
    pub fn reach(&self) -> (usize, usize) {
        let first = self.some.iter().map(|keys| keys.0).min().unwrap_or(0);
        (first, self.some.iter().map(|keys| keys.1).max().unwrap_or(0))
    }
}

/// A run of keys, in which the mask decides or not.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub keys: Range<usize>,
    pub masked: bool,
}

/// Rows of keys or values as f32: in place, or converted.
#[derive(Clone, Copy)]
pub(crate) struct KeyRows<'a> {
    pub rows: Matrix<'a>,
    /// Whether all are known to be finite.
    pub finite: bool,
}
