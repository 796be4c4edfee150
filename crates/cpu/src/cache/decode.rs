//! Attention over packed keys and values, in integers.
//!
//! A score of a tile is sQ sK (sum_c (q_c step_c) code_c + sum_c q_c zero_c): steps are folded into the query once per
//! tile, so that codes are multiplied in place. Weights are round(127 e^(s - m)) relative to the maximum so far; the
//! output of a channel is sV / 127 (step_c sum_t P_t code + zero_c sum_t P_t).

use super::side::Side;
use super::{CacheError, TILE};
use crate::memory::SharedRows;
use crate::simd::packed::{Packed, QUERIES, Running};
use crate::{Options, pool};
use fulgurite_core::format::{Granularity, Int8};
use fulgurite_core::precision::{CACHE_PART, INT8_LARGEST};
use fulgurite_core::{DType, Tensor, TensorView, stop};
use std::ops::Range;

/// Tiles per part: parts are computed separately and merged in order.
const PART: usize = CACHE_PART / TILE;

/// Rows of queries that process the cache together; their summaries are kept until the last part.
const ROWS: usize = 8;

/// The query of one query head: its codes in order, and in the order of the keys' planes.
struct Query<'a> {
    codes: &'a [i8],
    planes: Vec<i16>,
    scale: f32,
    /// Number of tokens that it sees.
    seen: usize,
}

pub(super) fn attend(
    sides: &[[Side; 2]],
    value_dim: usize,
    len: usize,
    q: &TensorView<'_>,
    scale: f32,
    options: &Options,
) -> Result<(Tensor, Tensor), CacheError> {
    let [rows, q_heads, dim] = [q.shape()[0], q.shape()[1], q.shape()[2]];
    let group = q_heads / sides.len();
    let values: Vec<f32> = q.to_f64().into_iter().map(|x| x as f32).collect();
    let coded = Int8::new(&values, rows * q_heads, dim, Granularity::Token, INT8_LARGEST).map_err(|_| {
        let at = values.iter().position(|x| !x.is_finite()).unwrap_or(0);
        CacheError::NotFinite { arg: "q", at, value: f64::from(values[at]) }
    })?;
    let query = |row: usize, head: usize| {
        let at = row * q_heads + head;
        let (codes, panel) = (&coded.codes()[at * dim..(at + 1) * dim], sides[head / group][0].panel);
        let mut planes = vec![0i16; panel.width()];
        codes.iter().enumerate().for_each(|(c, &x)| planes[panel.plane_index(c)] = i16::from(x));
        // The last row sees all tokens.
        Query { codes, planes, scale: coded.scales()[at] * scale, seen: len - (rows - 1 - row) }
    };
    let [mut o, mut lse] =
        [rows * q_heads * value_dim, q_heads * rows].map(|n| -> Vec<f32> { stop::zeros("a result", n) });
    let parts = len.div_ceil(PART * TILE);
    let width = sides.iter().map(|[_, v]| v.panel.width()).max().unwrap_or(0);
    let record = 2 + width;
    let packed = Packed::new(options.isa);
    let mut partial: Vec<f32> = stop::zeros("results of parts", parts * q_heads * rows.min(ROWS) * record);
    for first in (0..rows).step_by(ROWS) {
        let n = ROWS.min(rows - first);
        // By head: its rows, and the query heads of each.
        let queries: Vec<Query<'_>> = (0..sides.len())
            .flat_map(|head| (0..n * group).map(move |i| (first + i / group, head * group + i % group)))
            .map(|(row, head)| query(row, head))
            .collect();
        let shared = SharedRows::over(&mut partial);
        pool::run(options.threads(), parts * sides.len(), &|i| {
            let (part, head) = (i / sides.len(), i % sides.len());
            // SAFETY: each part and head has its own records.
            let to = unsafe { shared.row((part * queries.len() + head * n * group) * record, n * group * record) };
            let mut found: Vec<Running<'_>> = to
                .chunks_exact_mut(record)
                .map(|to| {
                    let o = &mut to[2..2 + sides[head][1].panel.width()];
                    o.fill(0.0);
                    Running { m: f32::NEG_INFINITY, l: 0.0, o }
                })
                .collect();
            let tokens = part * PART * TILE..len.min((part + 1) * PART * TILE);
            walk(packed, &sides[head], &queries[head * n * group..][..n * group], tokens, &mut found);
            let ends: Vec<[f32; 2]> = found.into_iter().map(|own| [own.m, own.l]).collect();
            to.chunks_exact_mut(record).zip(ends).for_each(|(to, end)| to[..2].copy_from_slice(&end));
        });
        for (i, h) in (0..n).flat_map(|i| (0..q_heads).map(move |h| (i, h))) {
            let own = (h / group * n + i) * group + h % group;
            let all = || (0..parts).map(|part| &partial[(part * queries.len() + own) * record..][..record]);
            let top = all().map(|r| r[0]).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, mut out) = (0.0f32, vec![0.0f32; width]);
            for part in all().filter(|r| r[0] != f32::NEG_INFINITY) {
                let weight = (part[0] - top).exp();
                sum += weight * part[1];
                out.iter_mut().zip(&part[2..]).for_each(|(o, x)| *o += weight * x);
            }
            let panel = sides[h / group][1].panel;
            let to = &mut o[((first + i) * q_heads + h) * value_dim..][..value_dim];
            to.iter_mut().enumerate().for_each(|(c, to)| *to = out[panel.plane_index(c)] / sum);
            lse[h * rows + first + i] = top + sum.ln();
        }
    }
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let o = Tensor::from_f64(q.dtype(), &wide(&o), &[rows, q_heads, value_dim]);
    let lse = Tensor::from_f64(DType::F32, &wide(&lse), &[q_heads, rows]);
    let made = "bug in fulgurite: tensors of known shapes";
    Ok((o.expect(made), lse.expect(made)))
}

/// Processes the tokens of one part for the queries of one key/value head.
fn walk(packed: Packed, [k, v]: &[Side; 2], queries: &[Query<'_>], tokens: Range<usize>, found: &mut [Running<'_>]) {
    let (mut scores, mut weights) = ([[0i32; TILE]; QUERIES], [[0u8; TILE]; QUERIES]);
    for start in tokens.clone().step_by(TILE) {
        let number = start / TILE;
        let whole = number < k.tiles();
        let (k_scale, v_scale) = if whole { (k.scales[number], v.scales[number]) } else { (k.scale, v.scale) };
        let factor = v_scale / f32::from(INT8_LARGEST);
        for (queries, found) in queries.chunks(QUERIES).zip(found.chunks_mut(QUERIES)) {
            let mut alpha = [1.0f32; QUERIES];
            if whole {
                let mut planes = [&queries[0].planes[..]; QUERIES];
                planes.iter_mut().zip(queries).for_each(|(to, q)| *to = &q.planes);
                packed.dots(&k.tile(number), &planes[..queries.len()], &mut scores);
            } else {
                tail_dots(&k.tail, queries, &mut scores);
            }
            for (i, (query, own)) in queries.iter().zip(&mut *found).enumerate() {
                let n = query.seen.clamp(start, tokens.end.min(start + TILE)) - start;
                alpha[i] = packed.soften(&scores[i], query.scale * k_scale, n, own, &mut weights[i]);
            }
            if whole {
                packed.sums(&v.tile(number), &weights, factor, &alpha, found);
            } else {
                tail_sums(v, &weights, factor, &alpha, found);
            }
        }
    }
}

/// Scores of the tail tokens, which fill no tile and have 8-bit codes.
fn tail_dots(codes: &[i8], queries: &[Query<'_>], out: &mut [[i32; TILE]]) {
    for (query, out) in queries.iter().zip(out) {
        for (row, out) in codes.chunks_exact(query.codes.len()).zip(out) {
            *out = row.iter().zip(query.codes).map(|(&k, &q)| i32::from(k) * i32::from(q)).sum();
        }
    }
}

/// The tail tokens' contribution to the output.
fn tail_sums(v: &Side, weights: &[[u8; TILE]], factor: f32, alpha: &[f32], found: &mut [Running<'_>]) {
    let mut sums = vec![0i32; v.panel.dim];
    for ((own, weights), &alpha) in found.iter_mut().zip(weights).zip(alpha) {
        sums.fill(0);
        for (row, &w) in v.tail.chunks_exact(v.panel.dim).zip(weights) {
            sums.iter_mut().zip(row).for_each(|(sum, &v)| *sum += i32::from(w) * i32::from(v));
        }
        for (c, &sum) in sums.iter().enumerate() {
            let o = &mut own.o[v.panel.plane_index(c)];
            *o = (sum as f32).mul_add(factor, *o * alpha);
        }
    }
}
