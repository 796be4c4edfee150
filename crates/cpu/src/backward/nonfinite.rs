//! The cold path of backward: rows of Q, dO or K that are not finite, and lanes that do not see them. Products are
//! computed element by element over visible keys, in f32.

use super::{BLOCK, CallData, TileStats};
use crate::nonfinite::Visible;
use crate::step::Step;
use crate::tiles::{Context, KeyRows, Tile};
use fulgurite_core::{Data, TensorView};

/// The sums of a block's gradients: rows of keys with their width, and dQ with its strides between lanes and columns.
pub(super) struct BlockGradients<'a> {
    pub d_k: (&'a mut [f32], usize),
    pub d_v: (&'a mut [f32], usize),
    pub d_q: (&'a mut [f32], [usize; 2]),
}

/// Whether the first `n` rows of keys are finite, block by block.
pub(super) fn finite_blocks(cx: &Context<'_>, k: KeyRows<'_>, n: usize) -> Vec<bool> {
    let mut row = vec![0.0; cx.d];
    let mut finite = |key: usize| cx.kernels.widen(&Data::F32(&k.rows.at(key, 0).data[..cx.d]), 0, &mut row);
    let mut block = |start: usize| k.finite || (start..(start + BLOCK).min(n)).all(&mut finite);
    (0..n).step_by(BLOCK).map(&mut block).collect()
}

/// Excludes lanes past the last row, whose values a modifier may have changed to anything.
pub(super) fn clear_past(tile: &Tile, stride: usize, step: &Step, tiles: [&mut [f32]; 2]) {
    if tile.rows == stride {
        return;
    }
    for x in tiles {
        for key in step.hull() {
            x[key * stride + tile.rows..(key + 1) * stride].fill(0.0);
        }
    }
}

/// Rows of a tile, one after the other, as f32.
fn rows_of(cx: &Context<'_>, tile: &Tile, view: &TensorView<'_>, n: usize) -> Vec<Vec<f32>> {
    let starts = cx.row_starts(tile, view.strides());
    let row = |&start: &usize| {
        let mut row = vec![0.0; n];
        cx.kernels.widen(&view.data(), start, &mut row);
        row
    };
    starts[..tile.rows].iter().map(row).collect()
}

impl CallData<'_> {
    /// Whether the rows of Q and dO of a tile are finite.
    pub(super) fn finite_rows(&self, tile: &Tile) -> bool {
        let cx = self.cx;
        let mut room = vec![0.0; cx.d.max(cx.dv)];
        [(cx.bound.q(), cx.d), (&self.saved.d_o, cx.dv)].into_iter().all(|(view, n)| {
            let starts = cx.row_starts(tile, view.strides());
            starts[..tile.rows].iter().all(|&start| cx.kernels.widen(&view.data(), start, &mut room[..n]))
        })
    }

    /// What the rows of a tile see of a step, from its scores; `None` if they see everything that is multiplied.
    pub(super) fn partly_seen(&self, stats: &TileStats, step: &Step, start: usize, s: &[f32]) -> Option<Visible> {
        let cx = self.cx;
        let (stride, rows) = (stats.lanes.stride, stats.tile.rows);
        let n = BLOCK.min(cx.bound.sequences()[stats.tile.sequence].k_len - start);
        let seen = Visible::new(step, [stride, cx.kernels.lanes, rows], s);
        let all = step.is_whole(n) && seen.keys().all(|key| seen.lanes(key)[..rows].iter().all(|&seen| seen));
        let same = step.ranges[..stride / cx.kernels.lanes].iter().all(|range| *range == step.ranges[0]);
        (!all || !same).then_some(seen)
    }

    /// Computes dV += P^T dO, dK += dS^T Q and dQ += dS K over visible keys only.
    pub(super) fn add_visible(
        &self,
        stats: &TileStats,
        start: usize,
        seen: &Visible,
        [p, ds]: [&[f32]; 2],
        sums: BlockGradients<'_>,
    ) {
        let cx = self.cx;
        let (stride, tile) = (stats.lanes.stride, &stats.tile);
        let (q, d_o) = (rows_of(cx, tile, cx.bound.q(), cx.d), rows_of(cx, tile, &self.saved.d_o, cx.dv));
        let ((d_k, k_width), (d_v, v_width), (d_q, [lane_step, column_step])) = (sums.d_k, sums.d_v, sums.d_q);
        let mut room = vec![0.0; cx.d];
        cx.each_key(cx.bound.k(), tile, seen.keys().map(|key| start + key), &mut room, |key, k, _| {
            let key = key - start;
            let (d_k, d_v) = (&mut d_k[key * k_width..], &mut d_v[key * v_width..]);
            for (lane, _) in seen.lanes(key).iter().enumerate().filter(|(_, seen)| **seen) {
                let (p, ds) = (p[key * stride + lane], ds[key * stride + lane]);
                d_v.iter_mut().zip(&d_o[lane]).for_each(|(sum, x)| *sum += p * x);
                d_k.iter_mut().zip(&q[lane]).for_each(|(sum, x)| *sum += ds * x);
                let d_q = d_q[lane * lane_step..].iter_mut().step_by(column_step);
                d_q.zip(k).for_each(|(sum, x)| *sum += ds * x);
            }
        });
    }
}
