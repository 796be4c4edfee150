//! Backward: five products per block of scores, accumulating the gradients of keys and values.
//!
//! Letters as in forward, and D = sum(dO O) - dLSE of each row, dP = dO V^T, dS = P (dP - D). An item owns a run of
//! keys of one key/value head: it keeps their dK and dV and goes through all tiles of queries. dQ is summed over the
//! runs of keys in ascending order, whichever thread gets there first, because the runs take turns on each tile.

mod nonfinite;
mod on_matrix_unit;
mod row_stats;

use crate::evaluate::{KEYS, TileProgram};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::modify::{Modifier, evaluator, in_blocks};
use crate::pool;
use crate::simd::{Ahead, GROUP, GradArgs, Matrix, MatrixMut, Sum};
use crate::step::Step;
use crate::tiles::{Context, KeyRows, Lanes, MAX_LANES, Tile};
use crate::unit::{Keys, Products};
use fulgurite_core::{GradientOutputs, Saved, Tensor, stop};
use row_stats::{RowTable, Stats, sink_gradients};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Keys per block of scores.
const BLOCK: usize = 128;
/// Elements of K (and equally many of V, dK and dV) that an item keeps in the L2 cache.
const ITEM_ELEMENTS: usize = 64 * 1024;

/// Fills `gradients`.
pub(crate) fn run(cx: &Context<'_>, saved: &Saved<'_>, gradients: &mut GradientOutputs<'_>, threads: usize) {
    // The gradient of a sum has stride 0 everywhere, but rows must be contiguous.
    let dense: Tensor;
    let mut saved = *saved;
    if saved.d_o.strides().last() != Some(&1) {
        dense = saved.d_o.to_tensor();
        saved.d_o = dense.view();
    }
    cx.prepare_mask(threads);
    let rows = RowTable::new(cx);
    let stats = Stats::new(cx, &saved, &rows, threads);
    if let Some(d_sinks) = &mut gradients.d_sinks {
        d_sinks.write_f64(&sink_gradients(cx, &stats, &rows));
    }
    if !cx.bound.all_keys_used() {
        gradients.d_k.fill(0.0);
        gradients.d_v.fill(0.0);
    }

    // For f32 the output itself is the accumulator; narrower types need a separate one.
    let in_place = cx.problem.dtype() == fulgurite_core::DType::F32;
    let q_strides = *gradients.d_q.strides();
    if in_place || !cx.bound.all_queries_used() {
        gradients.d_q.fill(0.0);
    }
    let mut wide: Vec<f32> = if in_place { Vec::new() } else { stop::zeros("d_q in f32", rows.len * cx.d) };
    let aux: Mutex<Vec<Vec<f64>>> = Mutex::new(
        cx.problem
            .aux()
            .iter()
            .map(|spec| {
                let n = if spec.grad { spec.shape.iter().product() } else { 0 };
                stop::zeros(format_args!("the gradient of {} in f64", spec.name), n)
            })
            .collect(),
    );
    {
        let (k_strides, v_strides) = (*gradients.d_k.strides(), *gradients.d_v.strides());
        let d_q = if in_place { SharedRows::new(&mut gradients.d_q) } else { SharedRows::over(&mut wide) };
        let items = items(cx);
        let tiles: Vec<Vec<Tile>> = pairs(cx).map(|(s, h)| cx.tiles(s, h).collect()).collect();
        let call = CallData {
            cx,
            saved: &saved,
            rows: &rows,
            stats: &stats,
            turns: tiles.iter().map(|t| t.iter().map(|_| AtomicUsize::new(0)).collect()).collect(),
            tiles,
            d_q,
            q_strides: in_place.then_some(&q_strides),
            d_k: SharedRows::new(&mut gradients.d_k),
            k_strides: &k_strides,
            d_v: SharedRows::new(&mut gradients.d_v),
            v_strides: &v_strides,
            aux: &aux,
        };
        // Several elements of the scores may add to one element of an auxiliary tensor: a single thread keeps their
        // order.
        let threads = if cx.problem.aux_gradients().is_empty() { threads } else { 1 };
        pool::run(threads, items.len(), &|i| match on_matrix_unit::unit(cx) {
            Some(unit) => call.item_on_matrix_unit(&items[i], unit),
            None => call.item(&items[i]),
        });
    }
    if !in_place {
        narrow(cx, &rows, &wide, gradients, &q_strides, threads);
    }
    let aux = aux.into_inner().unwrap_or_else(|e| e.into_inner());
    for (out, sums) in gradients.d_aux.iter_mut().zip(aux) {
        if let Some(out) = out {
            out.write_f64(&sums);
        }
    }
}

fn pairs(cx: &Context<'_>) -> impl Iterator<Item = (usize, usize)> {
    let heads = cx.problem.kv_heads();
    (0..cx.bound.sequences().len()).flat_map(move |s| (0..heads).map(move |h| (s, h)))
}

/// A run of keys of one sequence and key/value head.
struct Item {
    pair: usize,
    sequence: usize,
    kv_head: usize,
    /// Index of the run in its sequence.
    number: usize,
}

fn run_len(cx: &Context<'_>) -> usize {
    (ITEM_ELEMENTS / cx.d_pad.max(cx.dv_pad) / BLOCK).max(1) * BLOCK
}

fn items(cx: &Context<'_>) -> Vec<Item> {
    let len = run_len(cx);
    let runs = |s: usize| cx.bound.sequences()[s].k_len.div_ceil(len);
    let most = (0..cx.bound.sequences().len()).map(runs).max().unwrap_or(0);
    // Runs are the outermost order: by the time a run needs its predecessor's dQ, that one is long done. Under a causal
    // mask this also puts the long items first.
    let mut items = Vec::new();
    for number in 0..most {
        for (pair, (sequence, kv_head)) in pairs(cx).enumerate() {
            if number < runs(sequence) {
                items.push(Item { pair, sequence, kv_head, number });
            }
        }
    }
    items
}

struct CallData<'a> {
    cx: &'a Context<'a>,
    saved: &'a Saved<'a>,
    rows: &'a RowTable,
    stats: &'a Stats,
    /// For each (sequence, key/value head) and each of their tiles, the number of finished runs of keys.
    tiles: Vec<Vec<Tile>>,
    turns: Vec<Vec<AtomicUsize>>,
    d_q: SharedRows<'a>,
    /// Strides of d_q if it is summed in place.
    q_strides: Option<&'a [usize]>,
    d_k: SharedRows<'a>,
    k_strides: &'a [usize],
    d_v: SharedRows<'a>,
    v_strides: &'a [usize],
    aux: &'a Mutex<Vec<Vec<f64>>>,
}

/// The workspace of an item.
struct Workspace<'w> {
    d_k: &'w mut [f32],
    d_v: &'w mut [f32],
    s: &'w mut [f32],
    dp: &'w mut [f32],
    derivative: &'w mut [f32],
    modifier: Modifier<'w>,
    /// Rows of Q and dO `[lane][width]`, Q in the unit's layout, and dO transposed, `[width][lane]`.
    q: &'w mut [f32],
    d_o: &'w mut [f32],
    q_packed: &'w mut [f32],
    d_o_turned: &'w mut [f32],
    d_q: &'w mut [f32],
}

/// A tile with its row statistics.
struct TileStats {
    tile: Tile,
    lanes: Lanes,
    lse: [f32; MAX_LANES],
    delta: [f32; MAX_LANES],
    max: [f32; MAX_LANES],
    /// Factor of weights relative to `lse`, if it is not 1.
    inverse: Option<[f32; MAX_LANES]>,
}

impl CallData<'_> {
    fn keys(&self, item: &Item, number: usize) -> Range<usize> {
        let len = run_len(self.cx);
        number * len..((number + 1) * len).min(self.cx.bound.sequences()[item.sequence].k_len)
    }

    fn item(&self, item: &Item) {
        let cx = self.cx;
        let keys = self.keys(item, item.number);
        let (n, lanes) = (keys.len(), cx.kernels.tile);
        let room = cx.unit.buffer_sizes(cx);
        let sizes = [
            n.next_multiple_of(GROUP) * room.key,
            n * cx.d_pad,
            n * cx.dv_pad,
            n * cx.d_pad,
            n * cx.dv_pad,
            BLOCK * lanes,
            BLOCK * lanes,
            if cx.has_derivative() { BLOCK * lanes } else { 0 },
            2 * Arena::room(lanes * cx.d_pad),
            lanes * cx.dv_pad,
            room.queries,
            lanes * cx.dv_pad,
            lanes * cx.d_pad,
        ];
        with_workspace(sizes.iter().map(|&n| Arena::room(n)).sum(), |workspace| {
            let mut arena = Arena::new(workspace);
            let [k_packed, k, v, d_k, d_v, s, dp, derivative, q, d_o, q_packed, d_o_turned, d_q] =
                sizes.map(|n| arena.take(n));
            let modifier = cx.modifier(cx.unit.score_scale(cx));
            let mut workspace = Workspace { d_k, d_v, s, dp, derivative, modifier, q, d_o, q_packed, d_o_turned, d_q };
            workspace.d_k.fill(0.0);
            workspace.d_v.fill(0.0);
            let sequence = &cx.bound.sequences()[item.sequence];
            let k = cx.keys(cx.bound.k(), sequence, item.kv_head, keys.clone(), [cx.d, cx.d_pad], k);
            let v = cx.keys(cx.bound.v(), sequence, item.kv_head, keys.clone(), [cx.dv, cx.dv_pad], v).rows;
            let finite = nonfinite::finite_blocks(cx, k, keys.len());
            let own = Keys { sequence, head: item.kv_head, range: keys.clone() };
            let packed = cx.packer.keys(cx, &own, k_packed);
            let _held = cx.unit.hold();
            for (number, tile) in self.tiles[item.pair].iter().enumerate() {
                stop::poll();
                let stats = self.tile_stats(tile);
                if !cx.sees_any(tile, &stats.lanes, keys.clone(), BLOCK) {
                    continue;
                }
                self.tile(&stats, keys.clone(), [k, packed], (v, &finite), &mut workspace);
                self.add_to_d_q(item, number, &stats, workspace.d_q, cx.d_pad);
            }
            self.store_keys(item, keys, [workspace.d_k, workspace.d_v], [cx.d_pad, cx.dv_pad]);
        });
    }

    /// Writes a run's dK and dV, whose rows are `widths` apart.
    fn store_keys(&self, item: &Item, keys: Range<usize>, [d_k, d_v]: [&[f32]; 2], widths: [usize; 2]) {
        let cx = self.cx;
        let sequence = &cx.bound.sequences()[item.sequence];
        let (dk_rows, dv_rows) = (cx.key_layout(self.k_strides, sequence), cx.key_layout(self.v_strides, sequence));
        for (i, key) in keys.enumerate() {
            // SAFETY: each key of each key/value head belongs to one item.
            unsafe {
                self.d_k.store(cx.kernels, dk_rows.at(key, item.kv_head), &d_k[i * widths[0]..][..cx.d]);
                self.d_v.store(cx.kernels, dv_rows.at(key, item.kv_head), &d_v[i * widths[1]..][..cx.dv]);
            }
        }
    }

    fn tile_stats(&self, tile: &Tile) -> TileStats {
        let cx = self.cx;
        // Lanes past the last row get probabilities of 0.
        let (mut lse, mut delta, mut max) = ([f32::INFINITY; MAX_LANES], [0.0; MAX_LANES], [0.0; MAX_LANES]);
        let scale = if self.goes_through() { 1.0 } else { cx.problem.scale() };
        let mut inverse = None;
        for lane in 0..tile.rows {
            let (q, head) = cx.query_and_head(tile, lane);
            let at = self.rows.at(cx, tile.sequence, head, q);
            // A row without keys has probabilities of 0: e^(s - inf).
            let own = self.stats.lse[at];
            lse[lane] = if own == f32::NEG_INFINITY { f32::INFINITY } else { own };
            delta[lane] = self.stats.delta[at] * scale;
            max[lane] = self.stats.max[at];
            if let Some(&own) = self.stats.inverse.get(at) {
                inverse.get_or_insert([1.0; MAX_LANES])[lane] = own;
            }
        }
        TileStats { tile: *tile, lanes: cx.lanes(tile), lse, delta, max, inverse }
    }

    /// Processes all blocks of a run of keys for one tile: adds to dK and dV, and leaves the run's dQ in `workspace`.
    fn tile(
        &self,
        stats: &TileStats,
        keys: Range<usize>,
        [k, packed]: [KeyRows<'_>; 2],
        (v, finite): (Matrix<'_>, &[bool]),
        workspace: &mut Workspace<'_>,
    ) {
        let cx = self.cx;
        let stride = stats.lanes.stride;
        let sequence = &cx.bound.sequences()[stats.tile.sequence];
        cx.unit.queries(cx, &stats.tile, stride, workspace.q, workspace.q_packed);
        let mut rows_finite = true;
        for (view, n, width, out) in [
            (cx.bound.q(), cx.d, cx.d_pad, &mut *workspace.q),
            (&self.saved.d_o, cx.dv, cx.dv_pad, &mut *workspace.d_o),
        ] {
            let rows = cx.query_layout(view.strides(), sequence);
            rows_finite &= cx.gather(&stats.tile, &view.data(), &rows, n, &mut out[..stride * width], width);
        }
        cx.kernels.transpose(workspace.d_o, cx.dv_pad, workspace.d_o_turned, stride, stride, cx.dv_pad);
        workspace.d_q[..stride * cx.d_pad].fill(0.0);
        for start in keys.clone().step_by(BLOCK) {
            let first = start - keys.start;
            let [own, packed] = [k, packed].map(|k| KeyRows { rows: k.rows.at(first, 0), ..k });
            for piece in cx.pieces(&stats.tile, start..(start + BLOCK).min(keys.end)) {
                let Some(step) = cx.step(&stats.tile, &stats.lanes, &piece, start) else { continue };
                let all_finite = rows_finite && finite[first / BLOCK];
                if self.block(stats, &step, (start, first, all_finite), packed, v.at(first, 0), workspace) {
                    continue;
                }
                for seg in step.segments(1) {
                    let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
                    let ds = Matrix::new(workspace.dp, stride).at(key, lane);
                    let d_q = MatrixMut::at(workspace.d_q, cx.d_pad, lane, 0);
                    let size = [lanes, cx.d_pad, keys];
                    let own = own.rows.at(key, 0);
                    cx.kernels.gemm_transposed(d_q, ds, own, size, Sum::Onto, &mut Ahead::default());
                }
            }
        }
    }

    /// Computes S, dP, P, dS, and the gradients of keys and values. `first` is the block's position in the run of keys;
    /// `finite` tells whether Q, dO and K are finite. Returns true if everything is done, including dQ.
    fn block(
        &self,
        stats: &TileStats,
        step: &Step,
        (start, first, finite): (usize, usize, bool),
        k: KeyRows<'_>,
        v: Matrix<'_>,
        workspace: &mut Workspace<'_>,
    ) -> bool {
        let cx = self.cx;
        let (stride, width) = (stats.lanes.stride, cx.kernels.lanes);
        let (d, dv) = (cx.d_pad, cx.dv_pad);
        let (mut ahead, modified) = (Ahead::default(), cx.is_modified());
        if modified {
            let lanes = (&stats.tile, &stats.lanes);
            cx.prefetch_modifier(&mut workspace.modifier, lanes, (step, start), &mut ahead);
        }
        let products = Products { step, stride, ahead: &mut ahead };
        cx.unit.scores(cx, products, k, workspace.q_packed, workspace.s);
        if !modified {
            cx.scale_scores(step, stride, workspace.s);
        }
        for seg in step.segments(1) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(width));
            let d_o = Matrix::new(workspace.d_o_turned, stride).at(0, lane);
            let dp = MatrixMut::at(workspace.dp, stride, key, lane);
            cx.kernels.gemm(dp, v.at(key, 0), d_o, [keys, lanes, cx.dv], Sum::Fresh, &mut Ahead::default());
        }
        if step.rest || modified {
            let lanes = (&stats.tile, &stats.lanes);
            cx.modify(&mut workspace.modifier, lanes, (step, start), workspace.s, Some(&mut *workspace.derivative));
        }
        let seen = if finite { None } else { self.partly_seen(stats, step, start, workspace.s) };
        cx.kernels.grad(&mut self.grad_args(stats, step, [workspace.s, workspace.dp], workspace.derivative));
        self.normalise(stats, step, [workspace.s, workspace.dp]);
        if let Some(seen) = &seen {
            [&mut *workspace.s, &mut *workspace.dp].into_iter().for_each(|x| seen.clear(x));
        }
        if modified {
            nonfinite::clear_past(&stats.tile, stride, step, [workspace.s, workspace.dp]);
        }
        if self.goes_through() {
            self.through_modifier(stats, step, start, (workspace.dp, workspace.derivative));
        }
        self.round_weights(stats, step, workspace.s);
        if let Some(seen) = &seen {
            let sums = nonfinite::BlockGradients {
                d_k: (&mut workspace.d_k[first * d..], d),
                d_v: (&mut workspace.d_v[first * dv..], dv),
                d_q: (workspace.d_q, [d, 1]),
            };
            self.add_visible(stats, start, seen, [workspace.s, workspace.dp], sums);
            return true;
        }
        for seg in step.segments(1) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(width));
            let (p, ds) =
                (Matrix::new(workspace.s, stride).at(key, lane), Matrix::new(workspace.dp, stride).at(key, lane));
            let (d_o, q) = (Matrix::new(workspace.d_o, dv).at(lane, 0), Matrix::new(workspace.q, d).at(lane, 0));
            let d_v = MatrixMut::at(workspace.d_v, dv, first + key, 0);
            cx.kernels.gemm(d_v, p, d_o, [keys, dv, lanes], Sum::Onto, &mut Ahead::default());
            let d_k = MatrixMut::at(workspace.d_k, d, first + key, 0);
            cx.kernels.gemm(d_k, ds, q, [keys, d, lanes], Sum::Onto, &mut Ahead::default());
        }
        false
    }

    /// The element-wise part of a block, from S and dP to P and dS.
    fn grad_args<'b>(
        &self,
        stats: &'b TileStats,
        step: &'b Step,
        [s, dp]: [&'b mut [f32]; 2],
        derivative: &'b [f32],
    ) -> GradArgs<'b> {
        GradArgs {
            s,
            dp,
            stride: stats.lanes.stride,
            ranges: step.ranges,
            inner: step.inner,
            lo: &step.lo,
            hi: &step.hi,
            hidden: step.rest || self.cx.is_modified(),
            lse: &stats.lse,
            max: &stats.max,
            delta: &stats.delta,
            scale: if self.goes_through() { 1.0 } else { self.cx.problem.scale() },
            derivative: (self.cx.has_derivative() && !self.goes_through()).then_some(derivative),
            exp: self.cx.exp,
            least: self.cx.least(),
        }
    }

    /// Divides P and dS by the row sums, for rows whose LSE is only their maximum.
    fn normalise(&self, stats: &TileStats, step: &Step, tiles: [&mut [f32]; 2]) {
        let Some(inverse) = &stats.inverse else { return };
        let (stride, seen) = (stats.lanes.stride, step.hull());
        for x in tiles {
            self.cx.kernels.scale_lanes(&mut x[seen.start * stride..seen.end * stride], &inverse[..stride]);
        }
    }

    /// P as forward used it: relative to the maximum of the row, rounded, and divided by the sum.
    fn round_weights(&self, stats: &TileStats, step: &Step, p: &mut [f32]) {
        let cx = self.cx;
        if cx.rounding.is_none() {
            return;
        }
        let (stride, seen) = (stats.lanes.stride, step.hull());
        let (mut sum, mut share) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
        for lane in 0..stride {
            // A row without keys has an infinite LSE here, and weights of 0.
            if stats.lse[lane].is_finite() {
                sum[lane] = (stats.lse[lane] - stats.max[lane]).exp();
                share[lane] = 1.0 / sum[lane];
            }
        }
        let p = &mut p[..seen.end * stride];
        cx.kernels.scale_lanes(&mut p[seen.start * stride..], &sum[..stride]);
        cx.round_weights(step, stride, p);
        cx.kernels.scale_lanes(&mut p[seen.start * stride..], &share[..stride]);
    }

    /// Whether dS of the modified score is wanted, before it becomes that of the product of q and k.
    fn goes_through(&self) -> bool {
        !self.cx.problem.aux_gradients().is_empty()
    }

    /// Converts dS of the modified score to that of the product of q and k; adds to gradients of auxiliary tensors.
    fn through_modifier(&self, stats: &TileStats, step: &Step, start: usize, (dp, derivative): (&mut [f32], &[f32])) {
        let cx = self.cx;
        let stride = stats.lanes.stride;
        let width = cx.kernels.lanes;
        if !cx.problem.aux_gradients().is_empty() {
            self.aux_gradients(stats, step, start, dp);
        }
        let scale = cx.problem.scale();
        if !cx.has_derivative() {
            let seen = step.hull();
            let factors = [scale; MAX_LANES];
            return cx.kernels.scale_lanes(&mut dp[seen.start * stride..seen.end * stride], &factors[..stride]);
        }
        for (z, &(a, b)) in step.ranges.iter().enumerate() {
            for key in a..b {
                let at = key * stride + z * width;
                for (ds, &f) in dp[at..at + width].iter_mut().zip(&derivative[at..at + width]) {
                    // A hidden key has dS = 0, and its derivative may be anything.
                    *ds = if *ds == 0.0 { 0.0 } else { *ds * f * scale };
                }
            }
        }
    }

    fn aux_gradients(&self, stats: &TileStats, step: &Step, start: usize, dp: &[f32]) {
        let cx = self.cx;
        let (stride, width) = (stats.lanes.stride, cx.kernels.lanes);
        let env = cx.env(&stats.tile, &stats.lanes, 0..stride);
        let mut sums = self.aux.lock().unwrap_or_else(|e| e.into_inner());
        let [mut scores, mut made] = [(); 2].map(|_| vec![0.0f32; KEYS * stride]);
        for gradient in cx.problem.aux_gradients() {
            let shape = &cx.problem.aux()[gradient.aux].shape;
            let programs = gradient.at.iter().chain([&gradient.derivative]);
            let plans: Vec<TileProgram<'_>> = programs.map(|program| TileProgram::new(program, cx.pack == 1)).collect();
            let mut all: Vec<_> = plans.iter().map(|plan| evaluator(plan, cx.bound)).collect();
            all.iter_mut().for_each(|own| own.prepare(&env));
            let Some((derivative, at)) = all.split_last_mut() else { continue };
            // If the derivative reads the score, recompute it, because P has replaced it.
            let needs_score = gradient.derivative.reads(fulgurite_core::expr::Var::Score);
            for keys in in_blocks(step.hull()) {
                let (first, n) = ((start + keys.start) as i32, keys.len());
                if needs_score {
                    let rows = keys.clone().zip(scores.chunks_exact_mut(stride));
                    rows.for_each(|(key, scores)| self.scores_again(stats, key, start, scores));
                }
                let mut offsets = vec![0usize; n * stride];
                for (index, &size) in at.iter_mut().zip(shape) {
                    cx.kernels.evaluate(index, first, n, (&scores, stride), &mut made);
                    for (offset, i) in offsets.iter_mut().zip(&made) {
                        *offset = *offset * size + ((i.to_bits() as i32).max(0) as usize).min(size - 1);
                    }
                }
                cx.kernels.evaluate(derivative, first, n, (&scores, stride), &mut made);
                for (i, key) in keys.enumerate() {
                    for lane in 0..stats.tile.rows {
                        let (a, b) = step.ranges[lane / width];
                        let ds = dp[key * stride + lane];
                        if (a..b).contains(&key) && ds != 0.0 {
                            let at = i * stride + lane;
                            sums[gradient.aux][offsets[at]] += f64::from(ds) * f64::from(made[at]);
                        }
                    }
                }
            }
        }
    }

    /// The scaled scores of one key, before any modifier.
    fn scores_again(&self, stats: &TileStats, key: usize, start: usize, out: &mut [f32]) {
        let cx = self.cx;
        let sequence = &cx.bound.sequences()[stats.tile.sequence];
        let k = cx.bound.k();
        let mut values = vec![0.0f32; cx.d];
        let rows = cx.key_layout(k.strides(), sequence);
        cx.kernels.widen(&k.data(), rows.at(start + key, stats.tile.head / cx.problem.group()), &mut values);
        let q = cx.bound.q();
        let (starts, mut query) = (cx.row_starts(&stats.tile, q.strides()), vec![0.0f32; cx.d]);
        for (score, &at) in out.iter_mut().zip(&starts) {
            cx.kernels.widen(&q.data(), at, &mut query);
            *score = query.iter().zip(&values).map(|(q, k)| q * k).sum::<f32>() * cx.problem.scale();
        }
    }

    /// Adds a run's dQ when it is its turn.
    fn add_to_d_q(&self, item: &Item, number: usize, stats: &TileStats, d_q: &[f32], width: usize) {
        let cx = self.cx;
        let turn = &self.turns[item.pair][number];
        let before =
            (0..item.number).rev().find(|&run| cx.sees_any(&stats.tile, &stats.lanes, self.keys(item, run), BLOCK));
        let need = before.map_or(0, |run| run + 1);
        let mut spins = 0u32;
        while turn.load(Ordering::Acquire) < need {
            spins += 1;
            // The predecessor was handed out earlier, so it is running or done, and this loop ends; if it has unwound, by
            // `poll`.
            if spins.is_multiple_of(64) {
                stop::poll();
            }
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let sequence = &cx.bound.sequences()[stats.tile.sequence];
        let in_place = self.q_strides.map(|strides| cx.query_layout(strides, sequence));
        for lane in 0..stats.tile.rows {
            let (q, head) = cx.query_and_head(&stats.tile, lane);
            let at =
                in_place.map_or_else(|| self.rows.at(cx, stats.tile.sequence, head, q) * cx.d, |rows| rows.at(q, head));
            // SAFETY: runs take turns on a tile's rows, and each row belongs to one tile.
            let sum = unsafe { self.d_q.row(at, cx.d) };
            sum.iter_mut().zip(&d_q[lane * width..]).for_each(|(sum, x)| *sum += x);
        }
        turn.store(item.number + 1, Ordering::Release);
    }
}

/// Rounds the f32 sums of dQ to the output type.
fn narrow(
    cx: &Context<'_>,
    table: &RowTable,
    wide: &[f32],
    gradients: &mut GradientOutputs<'_>,
    strides: &[usize],
    threads: usize,
) {
    let out = SharedRows::new(&mut gradients.d_q);
    let heads = cx.problem.q_heads();
    pool::run(threads, cx.bound.sequences().len() * heads, &|i| {
        let (sequence, head) = (i / heads, i % heads);
        let s = &cx.bound.sequences()[sequence];
        let rows = cx.query_layout(strides, s);
        for q in 0..s.q_len {
            let at = table.at(cx, sequence, head, q) * cx.d;
            // SAFETY: each (sequence, head, query) is written once.
            unsafe { out.store(cx.kernels, rows.at(q, head), &wide[at..at + cx.d]) };
        }
    });
}

impl Context<'_> {
    /// Whether a tile sees any key of a run, split into blocks.
    fn sees_any(&self, tile: &Tile, lanes: &Lanes, keys: Range<usize>, block: usize) -> bool {
        keys.clone().step_by(block).any(|start| {
            let own = start..(start + block).min(keys.end);
            self.pieces(tile, own).any(|piece| self.step(tile, lanes, &piece, start).is_some())
        })
    }
}
