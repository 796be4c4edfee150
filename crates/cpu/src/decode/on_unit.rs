//! Few queries on a matrix unit: bf16 keys and values read where they lie, in strips that all rows see.

use super::{FEW, PART, Part, record, sees_all, tau, tile};
use crate::Counters;
use crate::memory::{Arena, with_workspace};
use crate::simd::{Coming, GROUP, RowsAt, STRIP, Share, Strided, StripKernels, StripRows, StripSoftmax};
use crate::tiles::Context;
use fulgurite_core::{DType, Rescale, Sequence, TensorView};

/// The bits of the largest finite number.
const FINITE: i32 = f32::MAX.to_bits() as i32;

/// What a head keeps during a part: its queries, the scores and weights of a strip, and its part of O.
struct Head<'w> {
    q: &'w mut [f32],
    s: &'w mut [f32],
    weights: &'w mut [f32],
    o: &'w mut [f32],
    m: [f32; GROUP],
    l: [f32; GROUP],
}

/// The kernels of a part that the unit can do: bf16 in whole tiles and strips, scores that nobody modifies, and keys that
/// every row of every head sees.
fn kernels(cx: &Context<'_>, part: &Part) -> Option<&'static StripKernels> {
    let unit = cx.kernels.matrix?;
    let sequence = &cx.bound.sequences()[part.sequence];
    let rows = sequence.q_len * cx.pack;
    let plain = cx.problem.dtype() == DType::Bf16 && cx.problem.score_program().is_none() && cx.rounding.is_none();
    let whole = part.keys(sequence).len().is_multiple_of(STRIP);
    let suits = plain && whole && unit.narrow.suits(cx.exp) && StripKernels::suits(rows, cx.d, cx.dv);
    (suits && sees_all(cx, part)).then_some(unit.strips)
}

/// Fills the results of a part; `None` where vectors have to. `next` is where this thread may go on.
pub(super) fn part(
    cx: &Context<'_>,
    part: &Part,
    next: Option<&Part>,
    results: &mut [f32],
    rescale: Rescale,
) -> Option<Counters> {
    let kernels = kernels(cx, part)?;
    let sequence = &cx.bound.sequences()[part.sequence];
    let (rows, heads) = (sequence.q_len * cx.pack, cx.problem.kv_heads());
    let sizes = [
        StripKernels::queries_room(rows, cx.d),
        StripKernels::scores_room(rows),
        StripKernels::weights_room(rows),
        StripKernels::output_room(rows, cx.dv),
    ];
    let room = sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    with_workspace(heads * room, |workspace| {
        let mut arena = Arena::new(workspace);
        let (data, q_rows) = (cx.bound.q().slice()?, cx.query_rows(cx.bound.q().strides(), sequence));
        let mut walk: Vec<Head<'_>> = (0..heads)
            .map(|h| {
                let [q, s, weights, o] = sizes.map(|n| arena.take(n));
                let tile = tile(cx, part.sequence, h);
                let start = |lane: usize| {
                    let (q, head) = cx.row(&tile, lane);
                    q_rows.at(q, head)
                };
                let starts: [usize; FEW] = std::array::from_fn(|lane| start(lane.min(rows - 1)));
                StripKernels::queries(RowsAt { data, starts: &starts[..rows], n: cx.d }, q);
                o.fill(0.0);
                Head { q, s, weights, o, m: [f32::NEG_INFINITY; GROUP], l: [0.0; GROUP] }
            })
            .collect();
        let strips = kernels.hold(rows);
        let mut counters = Counters::default();
        let (k, v) = (cx.bound.k(), cx.bound.v());
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
            let coming = |share: Share, head: usize| {
                let share = |strip| share.of(&Strided::from(strip), [STRIP, cx.d], [head, heads]);
                after.as_ref().map_or(Coming::NOTHING, |strip| share(strip(head)))
            };
            for (h, head) in walk.iter_mut().enumerate() {
                let coming = Share::ALL.of(&own_v(h).into(), [STRIP, cx.dv], [h, heads]);
                strips.scores(head.q, own_k(h), head.s, coming);
            }
            for (h, head) in walk.iter_mut().enumerate() {
                let (mut alpha, coming) = ([1.0; GROUP], coming(Share::FIRST, h));
                let (m, l, scale, tau) = (&mut head.m, &mut head.l, cx.problem.scale(), tau(rescale));
                let (s, weights, alpha) = (&*head.s, &mut *head.weights, &mut alpha);
                let stats = strips.softmax(&mut StripSoftmax { s, weights, m, l, alpha, scale, tau, coming });
                counters.rescales_possible += u64::from(stats.possible);
                counters.rescales_done += u64::from(stats.rescaled);
                if stats.rescaled > 0 {
                    StripKernels::scale(head.o, rows, alpha);
                }
            }
            for (h, head) in walk.iter_mut().enumerate() {
                strips.output(head.weights, own_v(h), head.o, coming(Share::REST, h));
            }
        }
        // A value that is not finite has spoiled its neighbour in the unit's pairs: once more, without.
        let spoiled = |o: &[f32]| o.iter().fold(false, |found, x| found | (x.abs().to_bits() as i32 > FINITE));
        if walk.iter().any(|head| spoiled(head.o)) {
            return None;
        }
        for (head, record) in walk.iter().zip(results.chunks_exact_mut(record(cx, sequence, None))) {
            for row in 0..rows {
                record[row] = head.m[row];
                record[FEW + row] = StripKernels::total(&head.l, rows, row);
            }
            StripKernels::rows_of(head.o, rows, cx.dv, &mut record[2 * FEW..]);
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
    let rows = cx.key_rows(view.strides(), sequence);
    let data = view.slice().expect("bug in fulgurite: strips are bf16");
    move |kv_head| StripRows { data, offset: rows.at(first, kv_head), row: rows.row, n }
}
