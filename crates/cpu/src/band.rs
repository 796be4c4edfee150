//! Windows with sinks on vectors: two vectors of rows at a time process all their keys at once.
//!
//! Rows of a window share few keys, so no product may be narrow and nothing may be touched twice. Keys are packed once
//! for all rows of an item, in panels from which a product broadcasts. Scores of a vector of rows and their keys stay
//! in the L1 cache. O is computed in rows, over the keys that each few of them see.

use crate::forward::{Out, mark_nan, with_sink};
use crate::memory::{Arena, with_workspace};
use crate::simd::{Ahead, BAND, BAND_ROWS, BandOutput, BandSeen, BandWeights, PANEL};
use crate::skip::{Found, Item};
use crate::tiles::Context;
use crate::window::Spans;
use fulgurite_core::skip::{HeadClass, SkipBound};
use fulgurite_core::{Data, Precision, RowLayout, Sequence, TensorView};
use std::ops::Range;

/// Number of keys per row beyond which scores leave the L1 cache.
const MOST: usize = 320;
/// Rows prefetched at a time: 32 rows prefetch about 45 times, which covers 128 rows of q, k, v and o.
const PACE: usize = 3;

/// Whether this path handles heads of a class. The decision must not depend on an item, whose length depends on the
/// threads.
pub(crate) fn suits(cx: &Context<'_>, class: HeadClass) -> bool {
    let plain = !cx.has_expressions() && cx.rounding.is_none() && !matches!(cx.problem.precision(), Precision::Int8(_));
    let few = matches!(class, HeadClass::Window { keys, sinks } if keys.saturating_add(sinks) <= MOST);
    plain && few && cx.kernels.matrix_for(cx.problem.dtype()).is_none()
}

/// Keys and values of a run of keys, packed as rows need them.
struct Packed<'w, 'a> {
    sequence: &'a Sequence,
    head: usize,
    keys: Range<usize>,
    panels: &'w mut [f32],
    /// Values as f32, if they cannot be read in place.
    values: &'w mut [f32],
    /// Number of panels packed so far.
    done: usize,
}

impl<'a> Packed<'_, 'a> {
    /// Number of keys, rounded up to whole panels.
    fn padded(keys: &Range<usize>) -> usize {
        keys.len().next_multiple_of(PANEL)
    }

    /// Packs panels up to index `panels`; `rows` is scratch.
    fn reach(&mut self, cx: &Context<'a>, panels: usize, rows: &mut [f32]) {
        let in_place = in_place(cx, self.sequence);
        for panel in self.done..panels {
            let first = self.keys.start + panel * PANEL;
            let n = PANEL.min(self.sequence.k_len.saturating_sub(first));
            let to = &mut self.panels[panel * PANEL * cx.d_pad..(panel + 1) * PANEL * cx.d_pad];
            turned(
                cx,
                cx.bound.k(),
                cx.key_layout(cx.bound.k().strides(), self.sequence),
                first..first + n,
                self.head,
                [rows, to],
                PANEL,
            );
            if !in_place {
                let v = cx.bound.v();
                let at = cx.key_layout(v.strides(), self.sequence);
                let to = self.values[panel * PANEL * cx.dv_pad..].chunks_exact_mut(cx.dv_pad);
                for (key, row) in (first..first + n).zip(to) {
                    let start = at.at(key, self.head);
                    match v.data() {
                        Data::F32(all) => row[..cx.dv].copy_from_slice(&all[start..start + cx.dv]),
                        data => {
                            cx.kernels.widen(&data, start, &mut row[..cx.dv]);
                        }
                    }
                    row[cx.dv..].fill(0.0);
                }
            }
        }
        self.done = self.done.max(panels);
    }

    /// The values starting at the first key, and their row distance.
    fn values<'b>(&'b self, cx: &'b Context<'a>) -> (&'b [f32], usize) {
        let v = cx.bound.v();
        match v.data() {
            Data::F32(all) if in_place(cx, self.sequence) => {
                let at = cx.key_layout(v.strides(), self.sequence);
                (&all[at.at(self.keys.start, self.head).min(all.len())..], at.row)
            }
            _ => (self.values, cx.dv_pad),
        }
    }
}

/// Whether values are read in place: rows that are far apart cost a page each, every time.
fn in_place(cx: &Context<'_>, sequence: &Sequence) -> bool {
    let v = cx.bound.v();
    let row = cx.key_layout(v.strides(), sequence).row;
    matches!(v.data(), Data::F32(_)) && cx.dv == cx.dv_pad && row <= 2 * cx.dv
}

/// Rows of q or k transposed to `[d][lanes]`, with zeros for missing rows. `rows` is scratch for the same number of
/// rows.
fn turned(
    cx: &Context<'_>,
    view: &TensorView<'_>,
    at: RowLayout,
    range: Range<usize>,
    head: usize,
    [rows, to]: [&mut [f32]; 2],
    lanes: usize,
) {
    if let (Data::F32(all), true) = (view.data(), range.len() == lanes && cx.d == cx.d_pad) {
        return cx.kernels.transpose(&all[at.at(range.start, head)..], at.row, to, lanes, lanes, cx.d);
    }
    let own = &mut rows[..lanes * cx.d_pad];
    for (i, row) in own.chunks_exact_mut(cx.d_pad).enumerate() {
        let n = if i < range.len() { cx.d } else { 0 };
        if n > 0 {
            cx.kernels.widen(&view.data(), at.at(range.start + i, head), &mut row[..n]);
        }
        row[n..].fill(0.0);
    }
    cx.kernels.transpose(own, cx.d_pad, to, lanes, lanes, cx.d_pad);
}

/// The keys that rows of one item see.
struct View<'a> {
    class: HeadClass,
    sequence: &'a Sequence,
}

impl View<'_> {
    /// The keys that a query sees at the start, and in its window.
    fn keys(&self, cx: &Context<'_>, q: usize) -> [Range<usize>; 2] {
        let s = self.sequence;
        let span = cx.problem.mask().keys(q, s.q_len, s.k_len);
        self.class.keys(q, s.q_len, s.k_len).map(|own| {
            let start = own.start.max(span.start).min(s.k_len);
            start..own.end.min(span.end).max(start)
        })
    }

    /// The panels that some of these rows see in either run, and what each row sees in them; `origins` are the first
    /// keys of the runs.
    fn seen(&self, cx: &Context<'_>, rows: Range<usize>, origins: [usize; 2]) -> ([Range<usize>; 2], [BandSeen; 2]) {
        let (first, last) = (self.keys(cx, rows.start), self.keys(cx, rows.end - 1));
        let none = [(0, 0); BAND];
        let nothing = BandSeen { lo: [0.0; BAND_ROWS], hi: [0.0; BAND_ROWS], some: none, all: none };
        let (mut panels, mut seen) = ([0..0, 0..0], [nothing; 2]);
        for part in 0..2 {
            let (a, b, own) = (&first[part], &last[part], &mut seen[part]);
            // An end that moves by one key per row, or not at all, moves evenly.
            let pace = |a: usize, b: usize| match b - a {
                0 => Some(0),
                n if n + 1 == rows.len() => Some(1),
                _ => None,
            };
            let paces = pace(a.start, b.start).zip(pace(a.end, b.end)).filter(|_| !a.is_empty() && !b.is_empty());
            // Lanes past the last row repeat it; their results are dropped.
            let past = rows.len() - 1;
            let keys = |i: usize| self.keys(cx, rows.start + i.min(past))[part].clone();
            let (lo, hi) = if paces.is_some() {
                (a.start, b.end)
            } else {
                let some = || (0..rows.len()).map(keys).filter(|keys| !keys.is_empty());
                let (Some(lo), Some(hi)) = (some().map(|k| k.start).min(), some().map(|k| k.end).max()) else {
                    continue;
                };
                (lo, hi)
            };
            let (lo, hi) = ((lo - origins[part]) / PANEL, (hi - origins[part]).div_ceil(PANEL));
            panels[part] = lo..hi;
            let (origin, end) = (origins[part] + lo * PANEL, origins[part] + hi * PANEL);
            let inside = |key: usize| (key.clamp(origin, end) - origin) as u32 as f32;
            if let Some((x, y)) = paces {
                let (start, end) = (inside(a.start), inside(a.end));
                let (x, y) = (x as f32, y as f32);
                for (i, (lo, hi)) in own.lo.iter_mut().zip(&mut own.hi).enumerate() {
                    let i = (i as i32).min(past as i32) as f32;
                    (*lo, *hi) = (start + x * i, end + y * i);
                }
            } else {
                for (i, (lo, hi)) in own.lo.iter_mut().zip(&mut own.hi).enumerate() {
                    (*lo, *hi) = (inside(keys(i).start), inside(keys(i).end));
                }
            }
            let lanes = cx.kernels.lanes;
            for z in (0..BAND).filter(|z| z * lanes < rows.len()) {
                let of = z * lanes..(z + 1) * lanes;
                // Ends never move back.
                let (first, last) = (of.start, of.end - 1);
                let (start, end) =
                    if paces.is_some() { (own.lo[first] as usize, own.hi[last] as usize) } else { own.hull(of) };
                own.some[z] = (start / PANEL * PANEL, end.next_multiple_of(PANEL));
                own.all[z] = (own.lo[last] as usize, own.hi[first] as usize);
            }
        }
        (panels, seen)
    }
}

/// An item, and where its rows are in the tensors.
struct Band<'a> {
    cx: &'a Context<'a>,
    item: &'a Item,
    view: View<'a>,
    out: &'a Out<'a>,
    q_rows: RowLayout,
    o_rows: RowLayout,
    lse_rows: RowLayout,
    /// First keys of the two runs.
    origins: [usize; 2],
}

/// Buffers of a vector of rows.
struct Workspace<'w> {
    rows: &'w mut [f32],
    q: &'w mut [f32],
    p: &'w mut [f32],
    o: &'w mut [f32],
}

impl<'a> Band<'a> {
    /// Computes some rows, at most [`BAND`] vectors of them.
    fn compute_rows(&self, range: Range<usize>, packed: &mut [Packed<'_, 'a>; 2], workspace: &mut Workspace<'_>) {
        let (cx, kernels, head) = (self.cx, self.cx.kernels, self.item.head);
        let (lanes, n) = (BAND * kernels.lanes, range.len());
        let (panels, seen) = self.view.seen(cx, range.clone(), self.origins);
        let Workspace { rows, q, p, o } = workspace;
        for (packed, panels) in packed.iter_mut().zip(&panels) {
            packed.reach(cx, panels.end, rows);
        }
        turned(cx, cx.bound.q(), self.q_rows, range.clone(), head, [&mut **rows, &mut **q], lanes);
        let mut ahead = self.ahead(&range, &packed[1]);
        let (mut m, mut l) = ([0.0; BAND_ROWS], [0.0; BAND_ROWS]);
        let size = PANEL * cx.d_pad;
        let panel = |i: usize| &packed[i].panels[panels[i].start * size..panels[i].end * size];
        kernels.band_weights(&mut BandWeights {
            q,
            d: cx.d_pad,
            scale: cx.problem.scale(),
            panels: [panel(0), panel(1)],
            seen: &seen,
            p,
            m: &mut m,
            l: &mut l,
            exp: cx.exp,
            ahead: &mut ahead,
        });
        let (mut inverse, mut lse) = ([0.0; BAND_ROWS], [0.0; BAND_ROWS]);
        mark_nan(&mut m, &l);
        kernels.finish(&m[..lanes], &l[..lanes], &mut inverse[..lanes], &mut lse[..lanes]);
        if let Some(sink) = cx.bound.sink(head) {
            for lane in 0..n {
                (inverse[lane], lse[lane]) = with_sink(inverse[lane], lse[lane], sink);
            }
        }
        let run = |i: usize| {
            let (v, stride) = packed[i].values(cx);
            let at = if i == 0 { 0 } else { panels[0].len() * PANEL };
            (at, &v[(panels[i].start * PANEL * stride).min(v.len())..], stride)
        };
        // Adjacent rows are written directly to the output.
        let direct = self.out.o.is_f32() && self.o_rows.row == cx.dv && cx.dv == cx.dv_pad;
        let o_at = self.o_rows.at(range.start, head);
        // SAFETY: every (sequence, head, query) belongs to exactly one tile, and each tile to one item.
        let to = if direct { unsafe { self.out.o.row(o_at, n * cx.dv) } } else { &mut **o };
        kernels.band_output(&mut BandOutput {
            p,
            runs: [run(0), run(1)],
            seen: &seen,
            factors: &inverse,
            o: to,
            rows: n,
            width: cx.dv_pad,
            ahead: &mut ahead,
        });
        for (lane, row) in to.chunks_exact_mut(cx.dv_pad).take(n).enumerate() {
            // The row saw no key: clear 0 times whatever the values were.
            if m[lane] == f32::NEG_INFINITY {
                row.fill(0.0);
            }
            if !direct {
                // SAFETY: as above.
                unsafe { self.out.o.store(kernels, self.o_rows.at(range.start + lane, head), &row[..cx.dv]) };
            }
        }
        self.store_lse(range.start, &lse[..n]);
    }

    /// Prefetches the inputs of the next rows, and the outputs of these.
    fn ahead(&self, range: &Range<usize>, near: &Packed<'_, 'a>) -> Ahead {
        let (cx, lanes, sequence) = (self.cx, BAND * self.cx.kernels.lanes, self.view.sequence);
        let mut ahead = Ahead::paced(PACE);
        let o_at = self.o_rows.at(range.start, self.item.head);
        self.out.o.prefetch(&mut ahead, o_at, self.o_rows.row, cx.dv, range.len());
        let next_key = near.keys.start + near.done * PANEL;
        for (view, n) in [(cx.bound.k(), cx.d), (cx.bound.v(), cx.dv)] {
            let at = cx.key_layout(view.strides(), sequence);
            ahead.push_rows(&view.data(), at.at(next_key, near.head), at.row, n, lanes);
        }
        cx.prefetch_queries(sequence, self.item.head, range.end..range.end + lanes, &mut ahead);
        ahead
    }

    /// Writes the LSE of adjacent queries.
    fn store_lse(&self, first: usize, lse: &[f32]) {
        let (to, at) = (&self.out.lse, |i: usize| self.lse_rows.at(first + i, self.item.head));
        if self.lse_rows.row == 1 {
            // SAFETY: every (sequence, head, query) belongs to exactly one tile, and each tile to one item.
            return unsafe { to.store(self.cx.kernels, at(0), lse) };
        }
        for (lane, lse) in lse.iter().enumerate() {
            // SAFETY: as above.
            unsafe { to.store(self.cx.kernels, at(lane), std::slice::from_ref(lse)) };
        }
    }
}

/// Computes an item.
pub(crate) fn walk(
    cx: &Context<'_>,
    skip: &SkipBound<'_>,
    item: &Item,
    spans: &Spans,
    out: &Out<'_>,
    done: &dyn Fn(usize, Found),
) {
    let sequence = &cx.bound.sequences()[item.sequence];
    let view = View { class: skip.problem().skip().class(item.head), sequence };
    let lanes = BAND * cx.kernels.lanes;
    let runs = [spans.sinks.clone(), spans.window.start / PANEL * PANEL..spans.window.end];
    let most = runs[0].len().next_multiple_of(PANEL) + runs[1].len().next_multiple_of(PANEL);
    let values = if in_place(cx, sequence) { 0 } else { cx.dv_pad };
    let wide = lanes.max(PANEL);
    let padded = runs.each_ref().map(Packed::padded);
    let sizes = [
        padded[0] * cx.d_pad,
        padded[1] * cx.d_pad,
        padded[0] * values,
        padded[1] * values,
        wide * cx.d_pad,
        lanes * cx.d_pad,
        most * lanes,
        lanes * cx.dv_pad,
    ];
    let all = sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    with_workspace(all, |workspace| {
        let mut arena = Arena::new(workspace);
        let [far_k, near_k, far_v, near_v, rows, q, p, o] = sizes.map(|n| arena.take(n));
        let mut workspace = Workspace { rows, q, p, o };
        let head = item.head / cx.problem.group();
        let [far, near] = runs;
        let band = Band {
            cx,
            item,
            view,
            out,
            q_rows: cx.query_layout(cx.bound.q().strides(), sequence),
            o_rows: cx.query_layout(out.o_strides, sequence),
            lse_rows: cx.bound.lse_layout(out.lse_strides, sequence),
            origins: [far.start, near.start],
        };
        let mut packed = [
            Packed { sequence, head, keys: far, panels: far_k, values: far_v, done: 0 },
            Packed { sequence, head, keys: near, panels: near_k, values: near_v, done: 0 },
        ];
        for number in item.tiles.clone() {
            let own = skip.tile_rows(sequence, number);
            let mut found = Found::default();
            let admitted = skip.admitted(sequence, item.head, number, &mut found.counts);
            found.kept = admitted.into_iter().map(|t| t as i32).collect();
            for first in own.clone().step_by(lanes) {
                band.compute_rows(first..(first + lanes).min(own.end), &mut packed, &mut workspace);
            }
            done(number, found);
        }
    });
}
