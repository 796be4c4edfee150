//! INT8 attention as a unit of the tile loop: codes are made once per call, and products are integer.

use crate::memory::{Arena, Kept, bytes_of, prefetch};
use crate::pool;
use crate::simd::{BYTES, GROUP, Hold, Int8Kernels, Integers, Kernels, Matrix, SLOTS, SoftmaxArgs, SoftmaxStats};
use crate::tiles::{Context, KeyRows, MAX_LANES, Tile};
use crate::unit::{BufferSizes, Keys, Operands, Products, Scratch, Unit};
use fulgurite_core::format::Granularity;
use fulgurite_core::precision::INT8_LARGEST;
use fulgurite_core::{Bound, Data, Int8Attention, Problem, RowLayout, Sequence, Side, TensorView, stop};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The quantised operands of a call.
pub(crate) struct Int8Unit {
    kernels: &'static Int8Kernels,
    vectors: &'static Kernels,
    hold: Option<fn() -> Hold>,
    block: usize,
    /// Number of tiles along the head dimension, and of column groups of V.
    d: usize,
    dv: usize,
    /// For each (sequence, query head) the rows of Q; for each (sequence, key/value head) panels of K and V.
    queries: Vec<Queries>,
    keys: Vec<KeyPanels>,
    q_heads: usize,
    kv_heads: usize,
    /// Whether all 64 keys of a tile share a scale.
    even: bool,
    /// Whether a row was too large for a scale: an element is not finite, or a difference overflowed.
    suspicious: AtomicBool,
}

/// Column groups of V that are multiplied at a time: their integers stay in the L1 cache.
const COLUMNS: usize = 4;

/// Queries of one head: rows of codes, `d` tiles long, the scale of each (including the problem's), and the term that
/// was subtracted from its scores.
#[derive(Default)]
struct Queries {
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Vec<f32>,
}

/// Keys and values of one head. A group of 16 keys has its panels, then its scales. A block of values has its panels,
/// then its scale, in a separate group: panels start on cache lines, because tiles would otherwise take twice as long
/// to load.
#[derive(Default)]
struct KeyPanels {
    k: Kept,
    v: Kept,
    mean: Vec<f32>,
}

/// Rows of one head of one sequence.
struct HeadRows<'a> {
    unit: &'a Int8Unit,
    view: &'a TensorView<'a>,
    at: RowLayout,
    head: usize,
    n: usize,
    dim: usize,
}

/// Rows of one head are far apart, so they are prefetched this many ahead.
const AHEAD: usize = 8;

impl HeadRows<'_> {
    /// Prefetches a later row.
    fn prefetch(&self, i: usize) {
        if i + AHEAD < self.n {
            let at = self.at.at(i + AHEAD, self.head);
            match self.view.data() {
                Data::F32(x) => prefetch(&x[at..at + self.dim]),
                Data::F16(x) => prefetch(&x[at..at + self.dim]),
                Data::Bf16(x) => prefetch(&x[at..at + self.dim]),
                _ => (),
            }
        }
    }

    /// Converts a row to f32.
    fn widen(&self, i: usize, to: &mut [f32]) {
        self.unit.vectors.widen(&self.view.data(), self.at.at(i, self.head), to);
    }

    /// Calls `f` with every row as f32.
    fn each(&self, mut f: impl FnMut(usize, &[f32])) {
        let mut row = vec![0.0; self.dim];
        for i in 0..self.n {
            self.prefetch(i);
            self.widen(i, &mut row);
            f(i, &row);
        }
    }

    /// Calls `f` with every row and its codes (after subtracting `mean`), padded with zeros to `width`; returns the
    /// scales. These are the codes of [`Int8Attention`], which makes them from contiguous rows.
    fn coded(
        &self,
        granularity: Granularity,
        mean: &[f32],
        width: usize,
        mut f: impl FnMut(usize, &[f32], &[i8]),
    ) -> Vec<f32> {
        // Process the rows that share scales together, so that they are read once.
        let chunk = match granularity {
            Granularity::Block(rows) => rows.min(self.n),
            _ => 64,
        };
        let (coding, dim) = (self.unit.kernels.coding, self.dim);
        let mut scales = vec![0.0f32; granularity.scales(self.n)];
        let (mut row, mut codes) = (vec![0.0f32; dim], vec![0i8; width]);
        for start in (0..self.n).step_by(chunk.max(1)) {
            let rows = start..(start + chunk).min(self.n);
            for i in rows.clone() {
                self.prefetch(i);
                self.widen(i, &mut row);
                let (scale, size) = (&mut scales[granularity.scale_of(i)], coding.size(&row, mean));
                if size == f32::MAX {
                    self.unit.suspicious.store(true, Ordering::Relaxed);
                }
                *scale = scale.max(size);
            }
            // Read from the tensor again: in f32 the rows of a block would evict each other from the cache.
            for i in rows {
                self.widen(i, &mut row);
                let scale = scales[granularity.scale_of(i)] / f32::from(INT8_LARGEST);
                coding.encode(&row, mean, scale, &mut codes[..dim]);
                f(i, &row, &codes);
            }
        }
        scales.iter_mut().for_each(|scale| *scale /= f32::from(INT8_LARGEST));
        scales
    }
}

impl Int8Unit {
    pub fn new(bound: &Bound<'_>, spec: &Int8Attention, kernels: &'static Kernels, threads: usize) -> Self {
        let problem = bound.problem();
        let (q_heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let mut unit = Int8Unit {
            kernels: kernels.int8(),
            vectors: kernels,
            hold: kernels.matrix.map(|unit| unit.holder()),
            block: spec.block,
            d: problem.head_dim().div_ceil(BYTES),
            dv: problem.value_dim().div_ceil(GROUP),
            queries: Vec::new(),
            keys: Vec::new(),
            q_heads,
            kv_heads,
            even: matches!(spec.k, Granularity::Block(rows) if rows.is_multiple_of(BYTES)),
            suspicious: AtomicBool::new(false),
        };
        let sequences = bound.sequences();
        let keys: Vec<Mutex<KeyPanels>> = (0..sequences.len() * kv_heads).map(|_| Mutex::default()).collect();
        pool::run(threads, keys.len(), &|i| {
            let made = unit.key_panels(bound, spec, &sequences[i / kv_heads], i % kv_heads);
            *keys[i].lock().unwrap_or_else(|e| e.into_inner()) = made;
        });
        unit.keys = keys.into_iter().map(|x| x.into_inner().unwrap_or_else(|e| e.into_inner())).collect();
        let queries: Vec<Mutex<Queries>> = (0..sequences.len() * q_heads).map(|_| Mutex::default()).collect();
        pool::run(threads, queries.len(), &|i| {
            let (sequence, head) = (i / q_heads, i % q_heads);
            let mean = &unit.keys[sequence * kv_heads + head / problem.group()].mean;
            let made = unit.query_rows(bound, spec, &sequences[sequence], head, mean);
            *queries[i].lock().unwrap_or_else(|e| e.into_inner()) = made;
        });
        unit.queries = queries.into_iter().map(|x| x.into_inner().unwrap_or_else(|e| e.into_inner())).collect();
        unit
    }

    /// Whether some element may not be finite; a caller that has not checked must check now.
    pub fn suspicious(&self) -> bool {
        self.suspicious.load(Ordering::Relaxed)
    }

    fn head_rows<'a>(
        &'a self,
        bound: &'a Bound<'_>,
        view: &'a TensorView<'a>,
        s: &Sequence,
        side: Side,
        head: usize,
        dim: usize,
    ) -> HeadRows<'a> {
        let n = if side == Side::Query { s.q_len } else { s.k_len };
        HeadRows { unit: self, view, at: bound.row_layout(view.strides(), s, side), head, n, dim }
    }

    fn query_rows(&self, bound: &Bound<'_>, spec: &Int8Attention, s: &Sequence, head: usize, mean: &[f32]) -> Queries {
        let problem: &Problem = bound.problem();
        let (dim, scale, width) = (problem.head_dim(), problem.scale(), self.d * BYTES);
        let given = self.head_rows(bound, bound.q(), s, Side::Query, head, dim);
        let mut codes: Vec<i8> = stop::zeros("codes of queries", s.q_len * width);
        let mut bias: Vec<f32> = stop::zeros("sums of queries", s.q_len);
        let scales = given.coded(spec.q, &vec![0.0; dim], width, |q, row, own| {
            codes[q * width..(q + 1) * width].copy_from_slice(own);
            if spec.smooth_k {
                bias[q] = (self.kernels.coding.dot(row, mean) * f64::from(scale)) as f32;
            }
        });
        let scales = (0..s.q_len).map(|q| scales[spec.q.scale_of(q)] * scale).collect();
        Queries { codes, scales, bias }
    }

    fn key_pitch(&self) -> usize {
        self.d * SLOTS + GROUP
    }
    fn value_pitch(&self) -> usize {
        self.dv * self.block / BYTES * SLOTS + GROUP
    }

    fn key_panels(&self, bound: &Bound<'_>, spec: &Int8Attention, s: &Sequence, head: usize) -> KeyPanels {
        let problem: &Problem = bound.problem();
        let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
        let given = self.head_rows(bound, bound.k(), s, Side::Key, head, dim);
        let mut sums = vec![0.0f64; dim];
        if spec.smooth_k {
            given.each(|_, row| self.kernels.coding.add_row(&mut sums, row));
        }
        let mean: Vec<f32> = sums.into_iter().map(|sum| (sum / s.k_len.max(1) as f64) as f32).collect();
        // Whole blocks, so that a block never ends inside the last panels.
        let pitch = self.key_pitch();
        let mut k = Kept::new(s.k_len.next_multiple_of(self.block) / GROUP * pitch);
        k[s.k_len / GROUP * pitch..].fill(0.0);
        let scales = given.coded(spec.k, &mean, self.d * BYTES, |key, _, row| {
            let group = bytes_of(&mut k[key / GROUP * pitch..][..self.d * SLOTS]);
            for (tile, piece) in row.chunks_exact(BYTES).enumerate() {
                group[4 * tile * SLOTS + key % GROUP * BYTES..][..BYTES].copy_from_slice(piece);
            }
        });
        for key in 0..s.k_len {
            k[key / GROUP * pitch + self.d * SLOTS + key % GROUP] = scales[spec.k.scale_of(key)];
        }
        let given = self.head_rows(bound, bound.v(), s, Side::Key, head, value_dim);
        let (tiles, pitch, width) = (self.block / BYTES, self.value_pitch(), value_dim.next_multiple_of(BYTES));
        let mut v = Kept::new(s.k_len.div_ceil(self.block) * pitch);
        v[s.k_len / self.block * pitch..].fill(0.0);
        let mut codes = vec![0i8; BYTES * width];
        let scales = given.coded(Granularity::Block(self.block), &vec![0.0; value_dim], width, |key, _, row| {
            codes[key % BYTES * width..][..width].copy_from_slice(row);
            if key % BYTES == BYTES - 1 || key + 1 == s.k_len {
                // Clear the codes past the last key.
                codes[(key % BYTES + 1) * width..].fill(0);
                let to = &mut v[key / self.block * pitch + key % self.block / BYTES * SLOTS..];
                self.kernels.coding.turn_columns(&codes, width, value_dim, to, tiles * SLOTS);
            }
        });
        for (block, scale) in v.chunks_exact_mut(pitch).zip(scales) {
            block[pitch - GROUP] = scale / f32::from(INT8_LARGEST);
        }
        KeyPanels { k, v, mean }
    }

    /// Whether scores stay integers until softmax.
    fn raw(&self, cx: &Context<'_>) -> bool {
        self.even && !cx.has_expressions() && self.kernels.suits(cx.exp)
    }

    fn panels(&self, keys: &Keys<'_>) -> &KeyPanels {
        &self.keys[keys.sequence.batch * self.kv_heads + keys.head]
    }
}

impl Unit for Int8Unit {
    fn hold(&self) -> Option<Hold> {
        self.hold.map(|hold| hold())
    }
    fn block(&self, _: &Context<'_>) -> usize {
        self.block
    }
    fn buffer_sizes(&self, cx: &Context<'_>) -> BufferSizes {
        let lanes = cx.kernels.tile / GROUP;
        let weights = lanes * self.block / BYTES * SLOTS;
        // Integers of P V, a few columns at a time, after the weights.
        let sums = COLUMNS * GROUP * cx.kernels.tile;
        BufferSizes {
            queries: lanes * self.d * SLOTS + 2 * MAX_LANES,
            key: 0,
            values: 0,
            weights: Arena::room(weights) + sums,
        }
    }
    fn score_scale(&self, _: &Context<'_>) -> f32 {
        1.0
    }
    fn rescales(&self) -> bool {
        true
    }
    fn queries(&self, cx: &Context<'_>, tile: &Tile, stride: usize, _: &mut [f32], out: &mut [f32]) {
        let (panels, lanes) = out.split_at_mut(stride.div_ceil(GROUP) * self.d * SLOTS);
        lanes[..2 * MAX_LANES].fill(0.0);
        let width = self.d * BYTES;
        let rows: [&[i8]; MAX_LANES] = std::array::from_fn(|lane| {
            if lane >= tile.rows {
                return &[][..];
            }
            let (q, head) = cx.query_and_head(tile, lane);
            let own = &self.queries[tile.sequence * self.q_heads + head];
            (lanes[lane], lanes[MAX_LANES + lane]) = (own.scales[q], own.bias[q]);
            &own.codes[q * width..(q + 1) * width]
        });
        for (group, to) in panels.chunks_exact_mut(self.d * SLOTS).enumerate() {
            let own = group * GROUP..((group + 1) * GROUP).min(tile.rows).max(group * GROUP);
            self.kernels.coding.turn_rows(&rows[own], self.d, to);
        }
    }
    fn keys_of<'b>(&'b self, _: &Context<'b>, keys: &Keys<'_>, _: &'b mut [f32]) -> KeyRows<'b> {
        let k = &self.panels(keys).k[keys.range.start / GROUP * self.key_pitch()..];
        KeyRows { rows: Matrix::new(k, 0), finite: true }
    }
    fn values_of<'b>(&'b self, _: &Context<'b>, keys: &Keys<'_>, _: &'b mut [f32]) -> KeyRows<'b> {
        let v = &self.panels(keys).v[keys.range.start / self.block * self.value_pitch()..][..self.value_pitch()];
        KeyRows { rows: Matrix::new(v, 0), finite: true }
    }
    fn scores(&self, cx: &Context<'_>, products: Products<'_>, k: KeyRows<'_>, q: &[f32], s: &mut [f32]) {
        let Products { step, stride, .. } = products;
        let pitch = self.key_pitch();
        let (panels, lanes) = q.split_at(stride / GROUP * self.d * SLOTS);
        for seg in step.segments(GROUP) {
            // Narrow vectors: use the lane groups that contain them.
            let ((key, keys), (lane, n)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
            let (lane, n) = (lane - lane % GROUP, (lane + n).next_multiple_of(GROUP) - (lane - lane % GROUP));
            let a = &k.rows.data[key / GROUP * pitch..];
            let b = &panels[lane / GROUP * self.d * SLOTS..];
            let size = [keys / GROUP, n / GROUP, self.d];
            self.kernels.multiply(&mut s[key * stride + lane..], stride, [a, b], [pitch, self.d * SLOTS], size);
        }
        if self.raw(cx) {
            return;
        }
        // If a vector sees nothing, old scores are scaled as well, but nothing reads them.
        let seen = step.hull();
        for key in (seen.start - seen.start % GROUP..seen.end).step_by(GROUP) {
            let scales = &k.rows.data[key / GROUP * pitch + self.d * SLOTS..][..GROUP];
            self.kernels.to_scores(&mut s[key * stride..], stride, scales, lanes, &lanes[MAX_LANES..]);
        }
    }
    fn softmax(
        &self,
        cx: &Context<'_>,
        args: &mut SoftmaxArgs<'_>,
        Operands { q, k, .. }: Operands<'_>,
        scratch: &mut Scratch<'_>,
    ) -> SoftmaxStats {
        scratch.packed = self.kernels.suits(args.exp);
        if scratch.packed {
            let lanes = &q[args.stride / GROUP * self.d * SLOTS..];
            let (keys, pitch, at) = (k.rows.data, self.key_pitch(), self.d * SLOTS);
            let integers = Integers { keys, pitch, at, lane: lanes, bias: &lanes[MAX_LANES..] };
            let integers = self.raw(cx).then_some(&integers);
            let stats = self.kernels.softmax(args, integers, scratch.weights, self.block / BYTES);
            scratch.alpha[..args.stride].copy_from_slice(&args.alpha[..args.stride]);
            return stats;
        }
        let stats = cx.kernels.softmax(args, scratch.probe.as_mut());
        scratch.alpha[..args.stride].copy_from_slice(&args.alpha[..args.stride]);
        // If vectors are narrower than a group, clear the weights of keys that one of them does not see.
        let width = cx.kernels.lanes;
        let last = args.ranges.iter().filter(|r| r.0 < r.1).map(|r| r.1).max().unwrap_or(0);
        for (z, &(a, b)) in args.ranges[..args.stride / width].iter().enumerate() {
            for key in (0..last).filter(|key| !(a..b).contains(key)) {
                args.s[key * args.stride + z * width..][..width].fill(0.0);
            }
        }
        stats
    }
    fn output(
        &self,
        cx: &Context<'_>,
        products: Products<'_>,
        v: KeyRows<'_>,
        p: &[f32],
        o: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) {
        let Products { step, stride, .. } = products;
        let tiles = self.block / BYTES;
        let (weights, sums) = scratch.weights.split_at_mut(Arena::room(cx.kernels.tile / GROUP * tiles * SLOTS));
        if !scratch.packed {
            for (z, to) in weights.chunks_exact_mut(tiles * SLOTS).take(stride / GROUP).enumerate() {
                // A vector of lanes may be narrower than a group.
                let ranges = &step.ranges[z * GROUP / cx.kernels.lanes..((z + 1) * GROUP).div_ceil(cx.kernels.lanes)];
                let seen = ranges.iter().filter(|r| r.0 < r.1);
                let (a, b) = (seen.clone().map(|r| r.0).min().unwrap_or(0), seen.map(|r| r.1).max().unwrap_or(0));
                self.kernels.pack_weights(&p[z * GROUP..], stride, [a, b.max(a)], to);
            }
        }
        let factor = v.rows.data[v.rows.data.len() - GROUP];
        // Keys are summed in tiles: those between the first and the last that any lane of a group sees.
        let seen = step.hull();
        let (first, last) = (seen.start / BYTES, seen.end.div_ceil(BYTES));
        if !scratch.packed
            || step.ranges[..stride / GROUP].iter().any(|r| r.0 / BYTES != first || r.1.div_ceil(BYTES) != last)
        {
            clear_around(step, weights, [stride / GROUP, tiles, first, last], cx.kernels.lanes, scratch.packed);
        }
        let pitch = tiles * SLOTS;
        let (a, b) = (&v.rows.data[first * SLOTS..], &weights[first * SLOTS..]);
        for group in (0..self.dv).step_by(COLUMNS) {
            let size = [COLUMNS.min(self.dv - group), stride / GROUP, last - first];
            self.kernels.multiply(sums, stride, [&a[group * pitch..], b], [pitch, pitch], size);
            let columns = group * GROUP..cx.dv.min((group + COLUMNS) * GROUP);
            let n = columns.len() * stride;
            self.kernels.add(&mut o[columns.start * stride..][..n], &sums[..n], factor, &scratch.alpha[..stride]);
        }
    }
}

/// Clears tiles of weights that were not written because their lanes see none of their keys.
fn clear_around(
    step: &crate::step::Step,
    weights: &mut [f32],
    [groups, tiles, first, last]: [usize; 4],
    width: usize,
    packed: bool,
) {
    for z in 0..groups {
        let ranges = &step.ranges[z * GROUP / width..((z + 1) * GROUP).div_ceil(width)];
        let seen = ranges.iter().filter(|r| r.0 < r.1);
        let (a, b) = (seen.clone().map(|r| r.0).min().unwrap_or(0), seen.map(|r| r.1).max().unwrap_or(0));
        let written = if a < b || !packed { a / BYTES..b.div_ceil(BYTES) } else { 0..0 };
        for tile in (first..last).filter(|tile| !written.contains(tile)) {
            weights[(z * tiles + tile) * SLOTS..][..SLOTS].fill(0.0);
        }
    }
}
