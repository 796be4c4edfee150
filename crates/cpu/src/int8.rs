//! INT8 attention as a unit of the tile loop: codes are made once for a call, products are integers.

use crate::memory::Arena;
use crate::pool;
use crate::simd::{BYTES, GROUP, Hold, Int8Kernels, Kernels, Matrix, SLOTS, SoftmaxArgs, SoftmaxStats, slot};
use crate::tiles::{Context, KeyRows, MAX_LANES, Tile};
use crate::unit::{Keys, Products, Room, Scratch, Unit};
use fulgurite_core::precision::INT8_LARGEST;
use fulgurite_core::{Bound, Int8Attention, Problem, Sequence, Side, TensorView};
use std::sync::Mutex;

/// The operands of a call in codes.
pub(crate) struct Int8Unit {
    kernels: &'static Int8Kernels,
    vectors: &'static Kernels,
    hold: Option<fn() -> Hold>,
    block: usize,
    /// Tiles along the head dimension, groups of columns of V.
    d: usize,
    dv: usize,
    /// For each (sequence, query head) the rows of Q; for each (sequence, key/value head) panels of K and V.
    queries: Vec<Queries>,
    keys: Vec<KeyPanels>,
    q_heads: usize,
    kv_heads: usize,
}

/// Queries of one head: rows of codes, `d` tiles long, the scale of each (the problem's included), and what was taken out
/// of its scores.
#[derive(Default)]
struct Queries {
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Vec<f32>,
}

/// Keys and values of one head. A group of 16 keys is its panels and then its scales; a block of values its panels and
/// then its scale.
#[derive(Default)]
struct KeyPanels {
    k: Vec<f32>,
    v: Vec<f32>,
    mean: Vec<f32>,
}

/// Rows of one head of one sequence as f32.
fn rows(
    kernels: &Kernels,
    bound: &Bound<'_>,
    view: &TensorView<'_>,
    s: &Sequence,
    side: Side,
    head: usize,
    [n, dim]: [usize; 2],
) -> Vec<f32> {
    let at = bound.rows(view.strides(), s, side);
    let mut out = vec![0.0; n * dim];
    for (i, row) in out.chunks_exact_mut(dim).enumerate() {
        kernels.widen(&view.data(), at.at(i, head), row);
    }
    out
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

    fn query_rows(&self, bound: &Bound<'_>, spec: &Int8Attention, s: &Sequence, head: usize, mean: &[f32]) -> Queries {
        let problem: &Problem = bound.problem();
        let (dim, scale) = (problem.head_dim(), problem.scale());
        let given = rows(self.vectors, bound, bound.q(), s, Side::Query, head, [s.q_len, dim]);
        let coded = spec.queries(&given, dim);
        let mut codes = vec![0i8; s.q_len * self.d * BYTES];
        for (to, from) in codes.chunks_exact_mut(self.d * BYTES).zip(coded.codes().chunks_exact(dim)) {
            to[..dim].copy_from_slice(from);
        }
        let scales = (0..s.q_len).map(|q| coded.scales()[spec.q.scale_of(q)] * scale).collect();
        let taken = |row: &[f32]| row.iter().zip(mean).map(|(&x, &m)| f64::from(x) * f64::from(m)).sum::<f64>();
        let bias = given.chunks_exact(dim).map(|row| (taken(row) * f64::from(scale)) as f32).collect();
        Queries { codes, scales, bias }
    }

    fn key_pitch(&self) -> usize {
        self.d * SLOTS + GROUP
    }
    fn value_pitch(&self) -> usize {
        self.dv * self.block / BYTES * SLOTS + 1
    }

    fn key_panels(&self, bound: &Bound<'_>, spec: &Int8Attention, s: &Sequence, head: usize) -> KeyPanels {
        let problem: &Problem = bound.problem();
        let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
        let given = rows(self.vectors, bound, bound.k(), s, Side::Key, head, [s.k_len, dim]);
        let mean = spec.mean(&given, dim);
        let keys = spec.keys(&given, dim, &mean);
        // Whole blocks, so that a block never ends inside the last panels.
        let pitch = self.key_pitch();
        let mut k = vec![0.0f32; s.k_len.next_multiple_of(self.block) / GROUP * pitch];
        for (key, row) in keys.codes().chunks_exact(dim).enumerate() {
            let group = &mut k[key / GROUP * pitch..][..pitch];
            for (i, four) in row.chunks(4).enumerate() {
                let mut bytes = [0i8; 4];
                bytes[..four.len()].copy_from_slice(four);
                group[i / GROUP * SLOTS + key % GROUP * GROUP + i % GROUP] = slot(bytes);
            }
            group[self.d * SLOTS + key % GROUP] = keys.scales()[spec.k.scale_of(key)];
        }
        let given = rows(self.vectors, bound, bound.v(), s, Side::Key, head, [s.k_len, value_dim]);
        let values = spec.values(&given, value_dim);
        let (tiles, pitch) = (self.block / BYTES, self.value_pitch());
        let mut v = vec![0.0f32; s.k_len.div_ceil(self.block) * pitch];
        for (number, block) in v.chunks_exact_mut(pitch).enumerate() {
            for (tile, j) in (0..tiles).flat_map(|tile| (0..GROUP).map(move |j| (tile, j))) {
                // The four keys of a slot; past the last key there is nothing.
                let rows = [0, 1, 2, 3].map(|i| {
                    let key = number * self.block + tile * BYTES + i * GROUP + j;
                    if key < s.k_len { &values.codes()[key * value_dim..(key + 1) * value_dim] } else { &[] }
                });
                if rows[0].is_empty() {
                    continue;
                }
                for c in 0..value_dim {
                    let at = (c / GROUP * tiles + tile) * SLOTS + c % GROUP * GROUP + j;
                    block[at] = slot(rows.map(|row| row.get(c).copied().unwrap_or(0)));
                }
            }
            block[pitch - 1] = values.scales()[number] / f32::from(INT8_LARGEST);
        }
        KeyPanels { k, v, mean }
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
    fn room(&self, cx: &Context<'_>) -> Room {
        let lanes = cx.kernels.tile / GROUP;
        let weights = lanes * self.block / BYTES * SLOTS;
        // Integers of P V, one vector of lanes at a time, behind the weights.
        let sums = self.dv * GROUP * cx.kernels.tile;
        Room {
            queries: lanes * self.d * SLOTS + 2 * MAX_LANES,
            key: 0,
            values: 0,
            weights: Arena::room(weights) + sums,
        }
    }
    fn score_scale(&self, _: &Context<'_>) -> f32 {
        1.0
    }
    fn queries(&self, cx: &Context<'_>, tile: &Tile, stride: usize, _: &mut [f32], out: &mut [f32]) {
        let (panels, lanes) = out.split_at_mut(stride.div_ceil(GROUP) * self.d * SLOTS);
        panels.fill(0.0);
        lanes[..2 * MAX_LANES].fill(0.0);
        for lane in 0..tile.rows {
            let (q, head) = cx.row(tile, lane);
            let own = &self.queries[tile.sequence * self.q_heads + head];
            let row = &own.codes[q * self.d * BYTES..(q + 1) * self.d * BYTES];
            for (i, four) in row.chunks_exact(4).enumerate() {
                let at = (lane / GROUP * self.d + i / GROUP) * SLOTS + i % GROUP * GROUP + lane % GROUP;
                panels[at] = slot([four[0], four[1], four[2], four[3]]);
            }
            (lanes[lane], lanes[MAX_LANES + lane]) = (own.scales[q], own.bias[q]);
        }
    }
    fn keys<'b>(&self, _: &Context<'b>, _: &Keys<'_>, _: &'b mut [f32]) -> KeyRows<'b> {
        unreachable!("bug in fulgurite: blocks of codes are borrowed")
    }
    fn values<'b>(&self, _: &Context<'b>, _: &Keys<'_>, _: &'b mut [f32]) -> KeyRows<'b> {
        unreachable!("bug in fulgurite: blocks of codes are borrowed")
    }
    fn block_of<'b>(&'b self, _: &Context<'b>, keys: &Keys<'_>, _: [&'b mut [f32]; 2]) -> [KeyRows<'b>; 2] {
        let (own, first) = (self.panels(keys), keys.range.start);
        let k = &own.k[first / GROUP * self.key_pitch()..];
        let v = &own.v[first / self.block * self.value_pitch()..][..self.value_pitch()];
        [k, v].map(|x| KeyRows { rows: Matrix::new(x, 0), finite: true })
    }
    fn scores(&self, cx: &Context<'_>, products: Products<'_>, k: KeyRows<'_>, q: &[f32], s: &mut [f32]) {
        let Products { step, stride, .. } = products;
        let pitch = self.key_pitch();
        let (panels, lanes) = q.split_at(stride / GROUP * self.d * SLOTS);
        for seg in step.segments(GROUP) {
            // Narrow vectors: the groups of lanes around them.
            let ((key, keys), (lane, n)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
            let (lane, n) = (lane - lane % GROUP, (lane + n).next_multiple_of(GROUP) - (lane - lane % GROUP));
            let a = &k.rows.data[key / GROUP * pitch..];
            let b = &panels[lane / GROUP * self.d * SLOTS..];
            let size = [keys / GROUP, n / GROUP, self.d];
            self.kernels.multiply(&mut s[key * stride + lane..], stride, [a, b], [pitch, self.d * SLOTS], size);
        }
        // Where a vector sees nothing, old scores are scaled as well, and nobody reads them.
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
        _: KeyRows<'_>,
        scratch: &mut Scratch<'_>,
    ) -> SoftmaxStats {
        scratch.packed = self.kernels.suits(args.exp);
        if scratch.packed {
            return self.kernels.softmax(args, scratch.weights, self.block / BYTES);
        }
        let stats = cx.kernels.softmax(args);
        // Vectors narrower than a group: what one of them does not see is no weight of the group.
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
        let factor = v.rows.data[v.rows.data.len() - 1];
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
        let size = [self.dv, stride / GROUP, last - first];
        self.kernels.multiply(sums, stride, [a, b], [pitch, pitch], size);
        let n = cx.dv * stride;
        self.kernels.add(&mut o[..n.next_multiple_of(GROUP)], &sums[..n.next_multiple_of(GROUP)], factor);
    }
}

/// Zeros in tiles of weights that were not written because their lanes see none of their keys.
fn clear_around(
    step: &crate::tiles::Step,
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
