//! The five products of backward in bf16 on a matrix unit. The loop is that of [`super`]; this module has the operands.
//!
//! S^T and dP^T are `[key][lane]` as on the vectors. P and dS are rounded into panels: dV += P^T dO and dK += dS^T Q
//! sum over the lanes of a tile, dQ^T += K^T dS^T over the keys of a block.

use super::{BLOCK, CallData, Item, TileStats, nonfinite};
use crate::memory::{Arena, with_workspace};
use crate::modify::Modifier;
use crate::nonfinite::Visible;
use crate::simd::{
    Ahead, DEPTH, GROUP, GradPanels, KEY_TILES, LANE_TILES, Matrix, MatrixKernels, MatrixMut, Panels, RowsAt, Source,
    Sum,
};
use crate::step::Step;
use crate::tiles::{Context, KeyRows, MAX_LANES, Tile};
use crate::unit::{Keys, Products, source};
use fulgurite_core::{DType, TensorView, bf16, stop};
use std::ops::Range;

/// The matrix unit, if it handles a problem's gradients.
pub(super) fn unit(cx: &Context<'_>) -> Option<&'static MatrixKernels> {
    cx.kernels.matrix_for(cx.problem.dtype()).filter(|_| cx.problem.dtype() == DType::Bf16)
}

/// Tiles along the dimensions of k and v, and groups of their columns.
struct Sizes {
    d: usize,
    dv: usize,
    d_groups: usize,
    dv_groups: usize,
}

impl Sizes {
    fn new(cx: &Context<'_>) -> Self {
        let (d, dv) = (cx.d.div_ceil(DEPTH), cx.dv.div_ceil(DEPTH));
        Sizes { d, dv, d_groups: cx.d.div_ceil(GROUP), dv_groups: cx.dv.div_ceil(GROUP) }
    }
}

/// Operands of a run of keys.
struct KeyPanels<'w> {
    /// Rows of K and V, and K transposed, block by block.
    k: &'w [f32],
    v: &'w [f32],
    k_turned: &'w [f32],
    /// Whether K is finite, block by block.
    finite: Vec<bool>,
}

struct Workspace<'w> {
    d_k: &'w mut [f32],
    d_v: &'w mut [f32],
    s: &'w mut [f32],
    dp: &'w mut [f32],
    derivative: &'w mut [f32],
    modifier: Modifier<'w>,
    /// Q and dO as columns (summed over dimensions) and as the summed axis.
    q: &'w mut [f32],
    d_o: &'w mut [f32],
    q_pairs: &'w mut [f32],
    d_o_pairs: &'w mut [f32],
    p_rows: &'w mut [f32],
    ds_rows: &'w mut [f32],
    ds_lanes: &'w mut [f32],
    /// dQ^T, `[d][lane]`.
    d_q: &'w mut [f32],
}

/// sum(dO O) of each row of a tile, summed in the order of dP: if a row sees one key, dP - D is exactly 0.
pub(super) fn row_dots(
    cx: &Context<'_>,
    unit: &MatrixKernels,
    tile: &Tile,
    [o, d_o]: [&TensorView<'_>; 2],
) -> [f32; MAX_LANES] {
    let Sizes { dv, .. } = Sizes::new(cx);
    let panel = Panels::room(1, dv, 1);
    let mut dots = [0.0; MAX_LANES];
    let lanes = MAX_LANES / GROUP * panel;
    with_workspace(2 * Arena::room(lanes) + GROUP * GROUP, |workspace| {
        let mut arena = Arena::new(workspace);
        let [a, b, c] = [lanes, lanes, GROUP * GROUP].map(|n| arena.take(n));
        let starts = [o, d_o].map(|x| cx.row_starts(tile, x.strides()));
        unit.bf16.copy(rows_at(o, &starts[0][..tile.rows], cx.dv), a, dv);
        unit.bf16.turn(rows_at(d_o, &starts[1][..tile.rows], cx.dv), b, dv);
        let _held = unit.hold();
        for (z, dots) in dots.chunks_exact_mut(GROUP).enumerate().take(tile.rows.div_ceil(GROUP)) {
            let [a, b] = [&*a, &*b].map(|x| Panels::new(x, dv, 1).at(z, 0));
            unit.multiply(MatrixMut::at(c, GROUP, 0, 0), a, b, [1, 1, dv], Sum::Fresh, &mut Ahead::default());
            dots.iter_mut().enumerate().for_each(|(i, dot)| *dot = c[i * GROUP + i]);
        }
    });
    dots
}

fn rows_at<'a>(view: &TensorView<'a>, starts: &'a [usize], n: usize) -> RowsAt<'a> {
    let data = view.slice::<bf16>().expect("bug in fulgurite: rows of a bf16 problem");
    RowsAt { data, starts, n }
}

impl CallData<'_> {
    /// Processes a run of keys for all tiles of queries that see it.
    pub(super) fn item_on_matrix_unit(&self, item: &Item, unit: &MatrixKernels) {
        let cx = self.cx;
        let keys = self.keys(item, item.number);
        let (n, lanes) = (keys.len().next_multiple_of(DEPTH), cx.kernels.tile);
        let Sizes { d, dv, d_groups, dv_groups } = Sizes::new(cx);
        let block_turned = Panels::room(d_groups, KEY_TILES, 1);
        let sizes = [
            Panels::room(n / GROUP, d, 1),
            Panels::room(n / GROUP, dv, 1),
            n.div_ceil(BLOCK) * block_turned,
            n * d_groups * GROUP,
            n * dv_groups * GROUP,
            BLOCK * lanes,
            BLOCK * lanes,
            if cx.has_derivative() { BLOCK * lanes } else { 0 },
            Panels::room(lanes / GROUP, d, 1),
            Panels::room(lanes / GROUP, dv, 1),
            Panels::room(d_groups, LANE_TILES, 1),
            Panels::room(dv_groups, LANE_TILES, 1),
            GradPanels::ROOM,
            GradPanels::ROOM,
            GradPanels::ROOM,
            d_groups * GROUP * lanes,
            // Rows of dQ, `[lane][d]`.
            lanes * d_groups * GROUP,
        ];
        with_workspace(sizes.iter().map(|&n| Arena::room(n)).sum(), |workspace| {
            let mut arena = Arena::new(workspace);
            let parts = sizes.map(|n| arena.take(n));
            let [
                k,
                v,
                k_turned,
                d_k,
                d_v,
                s,
                dp,
                derivative,
                q,
                d_o,
                q_pairs,
                d_o_pairs,
                p_rows,
                ds_rows,
                ds_lanes,
                d_q,
                d_q_rows,
            ] = parts;
            let sequence = &cx.bound.sequences()[item.sequence];
            let own = |range: Range<usize>| Keys { sequence, head: item.kv_head, range };
            unit.pack_rows(&source(cx, cx.bound.k(), &own(keys.clone()), cx.d), k, d);
            unit.pack_rows(&source(cx, cx.bound.v(), &own(keys.clone()), cx.dv), v, dv);
            let mut finite = Vec::new();
            for (start, to) in keys.clone().step_by(BLOCK).zip(k_turned.chunks_exact_mut(block_turned)) {
                // Tiles past the last key are not written.
                to.fill(0.0);
                let from: Source<'_> = source(cx, cx.bound.k(), &own(start..(start + BLOCK).min(keys.end)), cx.d);
                finite.push(unit.pack_turned(&from, to, KEY_TILES));
            }
            let panels = KeyPanels { k, v, k_turned, finite };
            d_k.fill(0.0);
            d_v.fill(0.0);
            let modifier = cx.modifier(cx.unit.score_scale(cx));
            #[rustfmt::skip]
            let mut workspace = Workspace {
                d_k, d_v, s, dp, derivative, modifier, q, d_o, q_pairs, d_o_pairs, p_rows, ds_rows, ds_lanes, d_q,
            };
            let _held = unit.hold();
            for (number, tile) in self.tiles[item.pair].iter().enumerate() {
                stop::poll();
                let stats = self.tile_stats(tile);
                if !cx.sees_any(tile, &stats.lanes, keys.clone(), BLOCK) {
                    continue;
                }
                self.tile_on_matrix_unit(&stats, keys.clone(), &panels, unit, &mut workspace);
                let (stride, width) = (stats.lanes.stride, d_groups * GROUP);
                cx.kernels.transpose(workspace.d_q, stride, d_q_rows, width, width, stride);
                self.add_to_d_q(item, number, &stats, d_q_rows, width);
            }
            let (d, dv) = (d_groups * GROUP, dv_groups * GROUP);
            self.store_keys(item, keys, [workspace.d_k, workspace.d_v], [d, dv]);
        });
    }

    /// Processes all blocks of a run of keys for one tile: adds to dK and dV, and leaves the run's dQ^T in `workspace`.
    fn tile_on_matrix_unit(
        &self,
        stats: &TileStats,
        keys: Range<usize>,
        panels: &KeyPanels<'_>,
        unit: &MatrixKernels,
        workspace: &mut Workspace<'_>,
    ) {
        let cx = self.cx;
        let Sizes { d, dv, d_groups, .. } = Sizes::new(cx);
        let stride = stats.lanes.stride;
        if stats.tile.rows < stride {
            // Lanes past the last row are not written, and an earlier tile may have left NaN there.
            [&mut *workspace.q, &mut *workspace.d_o].into_iter().for_each(|x| x.fill(0.0));
        }
        // A non-finite row of dO has a non-finite D. One of Q has a non-finite LSE, unless a modifier or a sink
        // replaces it.
        let own = |lane: usize| stats.lse[lane].is_finite() && stats.delta[lane].is_finite();
        let plain = cx.problem.score_program().is_none() && !cx.problem.has_sinks();
        let rows_finite = plain && (0..stats.tile.rows).all(own) || self.finite_rows(&stats.tile);
        for (view, n, depth, columns, pairs) in [
            (cx.bound.q(), cx.d, d, &mut *workspace.q, &mut *workspace.q_pairs),
            (&self.saved.d_o, cx.dv, dv, &mut *workspace.d_o, &mut *workspace.d_o_pairs),
        ] {
            let starts = cx.row_starts(&stats.tile, view.strides());
            let rows = rows_at(view, &starts[..stats.tile.rows], n);
            unit.bf16.turn(rows, columns, depth);
            unit.bf16.pair(rows, pairs, LANE_TILES);
        }
        workspace.d_q[..d_groups * GROUP * stride].fill(0.0);
        for (number, start) in keys.clone().step_by(BLOCK).enumerate() {
            for piece in cx.pieces(&stats.tile, start..(start + BLOCK).min(keys.end)) {
                let Some(step) = cx.step(&stats.tile, &stats.lanes, &piece, start) else { continue };
                let finite = rows_finite && panels.finite[number];
                self.block_on_matrix_unit(stats, &step, (start, number, finite), panels, unit, workspace);
            }
        }
    }

    fn block_on_matrix_unit(
        &self,
        stats: &TileStats,
        step: &Step,
        (start, number, finite): (usize, usize, bool),
        panels: &KeyPanels<'_>,
        unit: &MatrixKernels,
        workspace: &mut Workspace<'_>,
    ) {
        let cx = self.cx;
        let Sizes { d, dv, d_groups, dv_groups } = Sizes::new(cx);
        let (stride, width, first) = (stats.lanes.stride, cx.kernels.lanes, number * BLOCK);
        let none = || Ahead::default();
        let k = KeyRows {
            rows: Matrix::new(&panels.k[Panels::room(first / GROUP, d, 1)..], Panels::room(1, d, 1) / GROUP),
            finite: true,
        };
        cx.unit.scores(cx, Products { step, stride, ahead: &mut none() }, k, workspace.q, workspace.s);
        for seg in step.segments(GROUP) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(width));
            let v = Panels::new(panels.v, dv, 1).at((first + key) / GROUP, 0);
            let d_o = Panels::new(workspace.d_o, dv, 1).at(lane / GROUP, 0);
            let to = MatrixMut::at(workspace.dp, stride, key, lane);
            unit.multiply(to, v, d_o, [keys / GROUP, lanes / GROUP, dv], Sum::Fresh, &mut none());
        }
        let first_of = [first * d_groups * GROUP, first * dv_groups * GROUP];
        if !finite && self.weigh_visible(stats, (step, start), workspace, first_of) {
            return;
        }
        self.weigh(stats, (step, start), unit, workspace);
        for seg in step.segments(GROUP) {
            let ((key, keys), (z, end)) = (seg.keys(), seg.vectors);
            let (tile, depth) = (z / 2, end.div_ceil(2) - z / 2);
            for (rows, pairs, groups, to) in [
                (&*workspace.p_rows, &*workspace.d_o_pairs, dv_groups, &mut *workspace.d_v),
                (&*workspace.ds_rows, &*workspace.q_pairs, d_groups, &mut *workspace.d_k),
            ] {
                let a = Panels::new(rows, LANE_TILES, 1).at(key / GROUP, tile);
                let b = Panels::new(pairs, LANE_TILES, 1).at(0, tile);
                let to = MatrixMut::at(to, groups * GROUP, first + key, 0);
                unit.multiply(to, a, b, [keys / GROUP, groups, depth], Sum::Onto, &mut none());
            }
        }
        let block = Panels::room(d_groups, KEY_TILES, 1);
        let turned = &panels.k_turned[number * block..(number + 1) * block];
        for seg in step.segments(DEPTH) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(width));
            let k = Panels::new(turned, KEY_TILES, 1).at(0, key / DEPTH);
            let ds = Panels::new(workspace.ds_lanes, KEY_TILES, 1).at(lane / GROUP, key / DEPTH);
            let to = MatrixMut::at(workspace.d_q, stride, 0, lane);
            unit.multiply(to, k, ds, [d_groups, lanes / GROUP, keys / DEPTH], Sum::Onto, &mut none());
        }
    }

    /// Computes P and dS in panels from S and dP.
    fn weigh(
        &self,
        stats: &TileStats,
        (step, start): (&Step, usize),
        unit: &MatrixKernels,
        workspace: &mut Workspace<'_>,
    ) {
        let cx = self.cx;
        let (stride, modified) = (stats.lanes.stride, cx.is_modified());
        let through = self.goes_through();
        let fused = unit.bf16.suits(cx.exp) && !through && cx.rounding.is_none() && stats.inverse.is_none();
        if !fused && !modified {
            cx.scale_scores(step, stride, workspace.s);
        }
        if step.rest || modified {
            let lanes = (&stats.tile, &stats.lanes);
            cx.modify(&mut workspace.modifier, lanes, (step, start), workspace.s, Some(&mut *workspace.derivative));
        }
        if fused && modified && stats.tile.rows < stride {
            // Lanes past the last row, whose scores a modifier may have changed to anything.
            let (hull, rows) = (step.hull(), u64::MAX >> (64 - stats.tile.rows));
            let s = &mut workspace.s[hull.start * stride..];
            cx.kernels.hide((s, stride), &[rows; BLOCK][..hull.len()], 0);
        }
        let mut args = self.grad_args(stats, step, [workspace.s, workspace.dp], workspace.derivative);
        let mut out = GradPanels { p_rows: workspace.p_rows, ds_rows: workspace.ds_rows, ds_lanes: workspace.ds_lanes };
        if fused {
            let scale = cx.score_scale();
            return unit.bf16.grad(&args, scale, &mut out);
        }
        cx.kernels.grad(&mut args);
        self.normalise(stats, step, [args.s, args.dp]);
        if modified {
            nonfinite::clear_past(&stats.tile, stride, step, [args.s, args.dp]);
        }
        if through {
            self.through_modifier(stats, step, start, (args.dp, workspace.derivative));
        }
        self.round_weights(stats, step, args.s);
        unit.bf16.pack_grad(&args, &mut out);
    }

    /// Computes P, dS and all gradients, if rows of Q, dO or K are not finite and some lane does not see them;
    /// otherwise returns false.
    fn weigh_visible(
        &self,
        stats: &TileStats,
        (step, start): (&Step, usize),
        workspace: &mut Workspace<'_>,
        first: [usize; 2],
    ) -> bool {
        let cx = self.cx;
        let Sizes { d_groups, dv_groups, .. } = Sizes::new(cx);
        let (stride, modified) = (stats.lanes.stride, cx.is_modified());
        let seen = self.partly_seen(stats, step, start, workspace.s);
        if seen.is_none() && !step.rest && !modified {
            return false;
        }
        if !modified {
            cx.scale_scores(step, stride, workspace.s);
        }
        if step.rest || modified {
            let lanes = (&stats.tile, &stats.lanes);
            cx.modify(&mut workspace.modifier, lanes, (step, start), workspace.s, Some(&mut *workspace.derivative));
        }
        let seen = Visible::new(step, [stride, cx.kernels.lanes, stats.tile.rows], workspace.s);
        cx.kernels.grad(&mut self.grad_args(stats, step, [workspace.s, workspace.dp], workspace.derivative));
        self.normalise(stats, step, [workspace.s, workspace.dp]);
        [&mut *workspace.s, &mut *workspace.dp].into_iter().for_each(|x| seen.clear(x));
        if self.goes_through() {
            self.through_modifier(stats, step, start, (workspace.dp, workspace.derivative));
        }
        self.round_weights(stats, step, workspace.s);
        let sums = nonfinite::BlockGradients {
            d_k: (&mut workspace.d_k[first[0]..], d_groups * GROUP),
            d_v: (&mut workspace.d_v[first[1]..], dv_groups * GROUP),
            d_q: (workspace.d_q, [1, stride]),
        };
        self.add_visible(stats, start, &seen, [workspace.s, workspace.dp], sums);
        true
    }
}
