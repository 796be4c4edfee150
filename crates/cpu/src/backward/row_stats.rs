//! Per-row data of backward that are known before the keys: LSE and D, and what follows from them alone.

use super::{on_matrix_unit, pairs};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::pool;
use crate::simd::ExpKind;
use crate::tiles::{Context, MAX_LANES};
use fulgurite_core::oracle::sink_share;
use fulgurite_core::{Saved, Sequence, stop};

/// The index of each (sequence, head, query).
pub(super) struct RowTable {
    starts: Vec<usize>,
    pub len: usize,
}

impl RowTable {
    pub fn new(cx: &Context<'_>) -> Self {
        let mut len = 0;
        let mut start = |s: &Sequence| {
            let at = len;
            len += cx.problem.q_heads() * s.q_len;
            at
        };
        let starts = cx.bound.sequences().iter().map(&mut start).collect();
        RowTable { starts, len }
    }
    pub fn at(&self, cx: &Context<'_>, sequence: usize, head: usize, q: usize) -> usize {
        self.starts[sequence] + head * cx.bound.sequences()[sequence].q_len + q
    }
}

/// One number per row: LSE, D, and (for TurboAttention's function) the maximum.
pub(super) struct Stats {
    pub lse: Vec<f32>,
    pub delta: Vec<f32>,
    pub max: Vec<f32>,
    /// The factor of weights relative to `lse`, if some LSE is so far from 0 that f32 cannot distinguish it from the
    /// maximum; 1 in all other rows. In those rows `lse` is the maximum.
    pub inverse: Vec<f32>,
}

/// An LSE beyond this is off by a hundredth or more: at 1e9, as with additive masks, f32 has a resolution of 64.
const FAR: f32 = 65536.0;

impl Stats {
    pub fn new(cx: &Context<'_>, saved: &Saved<'_>, table: &RowTable, threads: usize) -> Self {
        let [lse, delta, max] = [(); 3].map(|_| stop::zeros("numbers of rows", table.len));
        let mut stats = Stats { lse, delta, max, inverse: Vec::new() };
        stats.fill(cx, saved, table, threads);
        stats.normalise(cx, table, threads);
        stats
    }

    /// Recomputes maximum and sum of rows whose LSE does not determine both.
    fn normalise(&mut self, cx: &Context<'_>, table: &RowTable, threads: usize) {
        let far = |lse: f32| lse.is_finite() && lse.abs() > FAR;
        let relative = matches!(cx.exp, ExpKind::Sas(_)) || cx.rounding.is_some();
        if relative || !self.lse.iter().any(|&lse| far(lse)) {
            return;
        }
        self.inverse = stop::zeros("numbers of rows", self.lse.len());
        self.inverse.fill(1.0);
        let (lse, inverse) = (SharedRows::over(&mut self.lse), SharedRows::over(&mut self.inverse));
        crate::forward::sums(cx, threads, &|tile, lane, [m, l]| {
            let (q, head) = cx.query_and_head(tile, lane);
            let at = table.at(cx, tile.sequence, head, q);
            // SAFETY: each row belongs to one tile.
            let (lse, inverse) = unsafe { (&mut lse.row(at, 1)[0], &mut inverse.row(at, 1)[0]) };
            if far(*lse) {
                let sink = cx.bound.sink(head).unwrap_or(f64::NEG_INFINITY);
                // A sink far above every score: P vanishes in comparison.
                let top = if sink > f64::from(m) { sink as f32 } else { m };
                let total = f64::from(l) * f64::from(m - top).exp() + (sink - f64::from(top)).exp();
                (*lse, *inverse) = (top, (1.0 / total) as f32);
            }
        });
    }

    fn fill(&mut self, cx: &Context<'_>, saved: &Saved<'_>, table: &RowTable, threads: usize) {
        let (lse_out, delta_out) = (SharedRows::over(&mut self.lse), SharedRows::over(&mut self.delta));
        let pairs: Vec<(usize, usize)> = pairs(cx).collect();
        let size = cx.kernels.tile * cx.dv_pad;
        let unit = on_matrix_unit::unit(cx);
        pool::run(threads, pairs.len(), &|i| {
            with_workspace(3 * Arena::room(size), |workspace| {
                let mut arena = Arena::new(workspace);
                let [rows, o, d_o] = [size; 3].map(|n| arena.take(n));
                let s = &cx.bound.sequences()[pairs[i].0];
                let lse_rows = cx.bound.lse_layout(saved.lse.strides(), s);
                let d_lse_rows = saved.d_lse.map(|d| (d, cx.bound.lse_layout(d.strides(), s)));
                for tile in cx.tiles(pairs[i].0, pairs[i].1) {
                    let stride = tile.rows.next_multiple_of(cx.kernels.lanes);
                    let dots = if let Some(unit) = unit {
                        on_matrix_unit::row_dots(cx, unit, &tile, [&saved.o, &saved.d_o])
                    } else {
                        for (view, turned) in [(&saved.o, &mut *o), (&saved.d_o, &mut *d_o)] {
                            let own = &mut rows[..stride * cx.dv_pad];
                            cx.gather(&tile, &view.data(), &cx.query_layout(view.strides(), s), cx.dv, own, cx.dv_pad);
                            cx.kernels.transpose(rows, cx.dv_pad, turned, stride, stride, cx.dv_pad);
                        }
                        let mut dots = [0.0; MAX_LANES];
                        cx.kernels.lane_dots(&o[..cx.dv * stride], &d_o[..cx.dv * stride], &mut dots[..stride]);
                        dots
                    };
                    for (lane, dot) in dots[..tile.rows].iter().enumerate() {
                        let (q, head) = cx.query_and_head(&tile, lane);
                        let at = table.at(cx, tile.sequence, head, q);
                        let d_lse = d_lse_rows.as_ref().map_or(0.0, |(d, rows)| d.at(rows.at(q, head)) as f32);
                        // SAFETY: each row belongs to one tile.
                        unsafe {
                            delta_out.row(at, 1)[0] = dot - d_lse;
                            lse_out.row(at, 1)[0] = saved.lse.at(lse_rows.at(q, head)) as f32;
                        }
                    }
                }
            });
        });
        if matches!(cx.exp, ExpKind::Sas(_)) || cx.rounding.is_some() {
            let max = SharedRows::over(&mut self.max);
            crate::forward::maxima(cx, threads, &|tile, lane, m| {
                let (q, head) = cx.query_and_head(tile, lane);
                // SAFETY: each row belongs to one tile.
                unsafe { max.row(table.at(cx, tile.sequence, head, q), 1)[0] = m };
            });
        }
    }
}

/// d_sink = -sum over rows of exp(sink - LSE) D.
pub(super) fn sink_gradients(cx: &Context<'_>, stats: &Stats, table: &RowTable) -> Vec<f64> {
    let gradient = |head: usize| {
        let Some(sink) = cx.bound.visible_sink(head) else { return 0.0 };
        let mut sum = 0.0;
        for (i, s) in cx.bound.sequences().iter().enumerate() {
            let at = table.at(cx, i, head, 0);
            for at in at..at + s.q_len {
                let share =
                    sink_share(sink, f64::from(stats.lse[at])) * f64::from(*stats.inverse.get(at).unwrap_or(&1.0));
                sum -= share * f64::from(stats.delta[at]);
            }
        }
        sum
    };
    (0..cx.problem.q_heads()).map(gradient).collect()
}
