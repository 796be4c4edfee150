//! Decode on a matrix unit: reads bf16 keys and values in place, in strips that all rows see.

use super::{FEW, PART, Part, Probe, record, sees_all, tau, tile};
use crate::Counters;
use crate::memory::{Arena, with_workspace};
use crate::simd::{
    GROUP, Prefetch, RowsAt, STRIP, Share, SoftmaxStats, Strided, StripKernels, StripProbe, StripRows, StripSoftmax,
    Strips,
};
use crate::tiles::Context;
use fulgurite_core::{DType, Rescale, Sequence, TensorView};

/// The bits of the largest finite number.
const FINITE: i32 = f32::MAX.to_bits() as i32;

/// The data of a head during a part: its queries, the scores and weights of a strip, and its part of O.
struct Head<'w> {
    q: &'w mut [f32],
    s: &'w mut [f32],
    weights: &'w mut [f32],
    o: &'w mut [f32],
    m: [f32; GROUP],
    l: [f32; GROUP],
    second: Option<Second<'w>>,
}

/// The sums of probes. If probes do not fit next to their queries in one tile, also a second set of head data for them:
/// r, the scores U and weights P U, and O weighted by U.
struct Second<'w> {
    l: [f32; GROUP],
    apart: Option<Apart<'w>>,
}

struct Apart<'w> {
    r: &'w mut [f32],
    u: &'w mut [f32],
    weights: &'w mut [f32],
    o: &'w mut [f32],
}

impl<'w> Head<'w> {
    fn apart(&mut self) -> Option<&mut Apart<'w>> {
        self.second.as_mut()?.apart.as_mut()
    }
}

/// The kernels of a part that the unit supports: bf16 in whole tiles and strips, unmodified scores, and keys that every
/// row of every head sees.
fn kernels(cx: &Context<'_>, part: &Part) -> Option<&'static StripKernels> {
    let unit = cx.kernels.matrix?;
    let sequence = &cx.bound.sequences()[part.sequence];
    let rows = sequence.q_len * cx.pack;
    let plain = cx.problem.dtype() == DType::Bf16 && cx.problem.score_program().is_none() && cx.rounding.is_none();
    let whole = part.keys(sequence).len().is_multiple_of(STRIP);
    let suits = plain && whole && unit.bf16.suits(cx.exp) && StripKernels::suits(rows, cx.d, cx.dv);
    (suits && sees_all(cx, part)).then_some(unit.strips)
}

/// Number of queries of a head in a part, and of queries and probes together in its first tile.
#[derive(Clone, Copy)]
struct Columns {
    queries: usize,
    /// Probes next to their queries cost no extra product.
    all: usize,
}

/// Packs the queries of a key/value head, or its probes (`own` has them as queries), as columns starting at `first`.
fn pack_queries(
    cx: &Context<'_>,
    own: &Context<'_>,
    (sequence, head): (usize, usize),
    columns: Columns,
    first: usize,
    to: &mut [f32],
) -> Option<()> {
    let q = own.bound.q();
    let (data, q_rows) = (q.slice()?, cx.query_layout(q.strides(), &cx.bound.sequences()[sequence]));
    let tile = tile(cx, sequence, head);
    let start = |lane: usize| {
        let (q, head) = cx.query_and_head(&tile, lane);
        q_rows.at(q, head)
    };
    let starts: [usize; FEW] = std::array::from_fn(|lane| start(lane.min(columns.queries - 1)));
    StripKernels::queries(RowsAt { data, starts: &starts[..columns.queries], n: cx.d }, [first, columns.all], to);
    Some(())
}

/// The heads of a part before its first strip.
fn heads<'w>(
    cx: &Context<'_>,
    sequence: usize,
    columns: Columns,
    probe: Option<&Probe<'_>>,
    (sizes, arena): ([usize; 4], &mut Arena<'w>),
) -> Option<Vec<Head<'w>>> {
    let joined = columns.all > columns.queries;
    let mut heads = Vec::with_capacity(cx.problem.kv_heads());
    for h in 0..cx.problem.kv_heads() {
        let [q, s, weights, o] = sizes.map(|n| arena.take(n));
        q.fill(0.0);
        pack_queries(cx, cx, (sequence, h), columns, 0, q)?;
        o.fill(0.0);
        let second = match probe {
            Some(probe) if joined => {
                pack_queries(cx, probe.cx, (sequence, h), columns, columns.queries, q)?;
                Some(Second { l: [0.0; GROUP], apart: None })
            }
            Some(probe) => {
                let [r, u, weights, o] = sizes.map(|n| arena.take(n));
                r.fill(0.0);
                pack_queries(cx, probe.cx, (sequence, h), columns, 0, r)?;
                o.fill(0.0);
                Some(Second { l: [0.0; GROUP], apart: Some(Apart { r, u, weights, o }) })
            }
            None => None,
        };
        heads.push(Head { q, s, weights, o, m: [f32::NEG_INFINITY; GROUP], l: [0.0; GROUP], second });
    }
    Some(heads)
}

impl Head<'_> {
    /// Turns the scores of a strip into weights, and rescales the sums if the maximum rose.
    #[inline]
    fn softmax(
        &mut self,
        strips: &Strips,
        columns: Columns,
        [scale, probe_scale]: [f32; 2],
        tau: f32,
        prefetch: Prefetch,
    ) -> SoftmaxStats {
        let mut alpha = [1.0; GROUP];
        let (m, l) = (&mut self.m, &mut self.l);
        let (s, weights, alpha) = (&*self.s, &mut *self.weights, &mut alpha);
        let stats = strips.softmax(&mut StripSoftmax { s, weights, m, l, alpha, scale, tau, prefetch });
        // A probe's sums are rescaled with its query's.
        let (own, others) = alpha.split_at_mut(columns.queries);
        let probes = columns.all - columns.queries;
        others[..probes].copy_from_slice(&own[..probes]);
        if stats.rescaled > 0 {
            StripKernels::scale(self.o, columns.all, alpha);
        }
        if let Some(second) = &mut self.second {
            if stats.rescaled > 0 {
                second.apart.iter_mut().for_each(|own| StripKernels::scale(own.o, columns.queries, alpha));
                second.l.iter_mut().zip(&*alpha).for_each(|(l, factor)| *l *= factor);
            }
            let (l, scale) = (&mut second.l, probe_scale);
            strips.probe(&mut match &mut second.apart {
                Some(Apart { u, weights, .. }) => StripProbe { p: Some(self.weights), u, weights, l, scale },
                None => StripProbe { p: None, u: self.s, weights: self.weights, l, scale },
            });
        }
        stats
    }

    /// Whether a non-finite value has spoiled its neighbour in the unit's pairs.
    fn is_spoiled(&mut self) -> bool {
        let spoiled = |o: &[f32]| o.iter().fold(false, |found, x| found | (x.abs().to_bits() as i32 > FINITE));
        spoiled(self.o) || self.apart().is_some_and(|own| spoiled(own.o))
    }

    /// Writes maxima, sums and O to the head's record; `natural` is scratch.
    fn write(&self, record: &mut [f32], columns: Columns, dv: usize, natural: &mut [f32]) {
        let Columns { queries, all } = columns;
        let (first, second) = record.split_at_mut(2 * FEW + queries * dv);
        for row in 0..queries {
            first[row] = self.m[row];
            first[FEW + row] = StripKernels::total(&self.l, all, row);
        }
        StripKernels::rows_of(self.o, all, dv, natural);
        let (own, others) = natural.split_at(queries * dv);
        first[2 * FEW..].copy_from_slice(own);
        if let Some(sums) = &self.second {
            second[..FEW].copy_from_slice(&sums.l[..FEW]);
            match &sums.apart {
                Some(apart) => StripKernels::rows_of(apart.o, queries, dv, &mut second[FEW..]),
                None => second[FEW..].copy_from_slice(others),
            }
        }
    }
}

/// Fills the results of a part; `None` if the vectors must do it. `next` is this thread's probable next part.
pub(super) fn part(
    cx: &Context<'_>,
    part: &Part,
    next: Option<&Part>,
    results: &mut [f32],
    rescale: Rescale,
    probe: Option<&Probe<'_>>,
) -> Option<Counters> {
    let kernels = kernels(cx, part)?;
    let sequence = &cx.bound.sequences()[part.sequence];
    let (queries, kv_heads) = (sequence.q_len * cx.pack, cx.problem.kv_heads());
    let joined = probe.is_some() && StripKernels::joins(queries);
    let columns = Columns { queries, all: if joined { 2 * queries } else { queries } };
    let sizes = [
        StripKernels::queries_room(columns.all, cx.d),
        StripKernels::scores_room(columns.all),
        StripKernels::weights_room(columns.all),
        StripKernels::output_room(columns.all, cx.dv),
    ];
    let room = sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    with_workspace(kv_heads * room * if probe.is_some() { 2 } else { 1 }, |workspace| {
        let mut heads = heads(cx, part.sequence, columns, probe, (sizes, &mut Arena::new(workspace)))?;
        let strips = kernels.hold(queries, columns.all);
        let mut counters = Counters::default();
        let (k, v) = (cx.bound.k(), cx.bound.v());
        let scales = [cx, probe.map_or(cx, |probe| probe.cx)].map(|cx| cx.problem.scale());
        let keys = part.keys(sequence);
        for first in keys.clone().step_by(STRIP) {
            let [own_k, own_v] = [(k, cx.d), (v, cx.dv)].map(|(view, n)| at(cx, view, sequence, first, n));
            // The strip of keys after this one.
            let after = match next {
                _ if first + STRIP < keys.end => Some((sequence, first + STRIP)),
                Some(next) => Some((&cx.bound.sequences()[next.sequence], next.number * PART)),
                None => None,
            };
            let after = after.filter(|(s, first)| first + STRIP <= s.k_len);
            let after = after.map(|(s, first)| at(cx, k, s, first, cx.d));
            let prefetch = |share: Share, head: usize| {
                let share = |strip| share.of(&Strided::from(strip), [STRIP, cx.d], [head, kv_heads]);
                after.as_ref().map_or(Prefetch::NOTHING, |strip| share(strip(head)))
            };
            for (h, head) in heads.iter_mut().enumerate() {
                let prefetch = Share::ALL.of(&own_v(h).into(), [STRIP, cx.dv], [h, kv_heads]);
                strips.scores(head.q, own_k(h), head.s, prefetch);
                if let Some(own) = head.apart() {
                    strips.scores(own.r, own_k(h), own.u, Prefetch::NOTHING);
                }
            }
            for (h, head) in heads.iter_mut().enumerate() {
                let stats = head.softmax(&strips, columns, scales, tau(cx.exp, rescale), prefetch(Share::FIRST, h));
                counters.rescales_possible += u64::from(stats.possible);
                counters.rescales_done += u64::from(stats.rescaled);
            }
            for (h, head) in heads.iter_mut().enumerate() {
                strips.output(head.weights, own_v(h), head.o, prefetch(Share::REST, h));
                if let Some(own) = head.apart() {
                    strips.output(own.weights, own_v(h), own.o, Prefetch::NOTHING);
                }
            }
        }
        // The vectors recompute without non-finite values that a row does not see.
        if heads.iter_mut().any(Head::is_spoiled) {
            return None;
        }
        let mut natural = vec![0.0; columns.all * cx.dv];
        for (head, record) in heads.iter().zip(results.chunks_exact_mut(record(cx, sequence, probe))) {
            head.write(record, columns, cx.dv, &mut natural);
        }
        Some(counters)
    })
}

/// The rows of a strip from a key on, of `n` elements each, by head.
fn at<'b>(
    cx: &Context<'b>,
    view: &TensorView<'b>,
    sequence: &Sequence,
    first: usize,
    n: usize,
) -> impl Fn(usize) -> StripRows<'b> + use<'b> {
    let rows = cx.key_layout(view.strides(), sequence);
    let data = view.slice().expect("bug in fulgurite: strips are bf16");
    move |kv_head| StripRows { data, offset: rows.at(first, kv_head), row: rows.row, n }
}
