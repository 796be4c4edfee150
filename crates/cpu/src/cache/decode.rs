//! Attention over packed keys and values, in integers.
//!
//! A score of a tile is sQ sK (sum_c (q_c step_c) code_c + sum_c q_c zero_c): steps are folded into the query once for
//! a tile, so that codes of four bits are multiplied as they lie. Weights are round(127 e^(s - m)) against the maximum so
//! far; the output of a channel is sV / 127 (step_c sum_t P_t code + zero_c sum_t P_t).

use super::{CacheError, Side, TILE};
use crate::memory::SharedRows;
use crate::{Options, pool};
use fulgurite_core::format::{Granularity, Int8, Stage2};
use fulgurite_core::precision::INT8_LARGEST;
use fulgurite_core::{DType, Int8Attention, Tensor, TensorView};

/// Tiles in a part: parts are computed apart and merged in order.
const PART: usize = 32;

/// One query head's query in codes.
struct Query {
    codes: Vec<i8>,
    scale: f32,
}

/// What a part found for one query head: maximum, sum, and the output before division.
struct Summary {
    m: f32,
    l: f32,
    o: Vec<f32>,
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
    let (mut o, mut lse) = (vec![0.0f32; rows * q_heads * value_dim], vec![0.0f32; q_heads * rows]);
    let parts = len.div_ceil(PART * TILE);
    let record = 2 + value_dim;
    let mut partial = vec![0.0f32; parts * q_heads * record];
    let kernel = Kernel::new(options);
    for row in 0..rows {
        // The last row sees everything.
        let seen = len - (rows - 1 - row);
        let shared = SharedRows::over(&mut partial);
        pool::run(options.threads(), parts * sides.len(), &|i| {
            let (part, head) = (i / sides.len(), i % sides.len());
            let queries: Vec<Query> = (0..group)
                .map(|g| {
                    let at = row * q_heads + head * group + g;
                    Query { codes: coded.codes()[at * dim..(at + 1) * dim].to_vec(), scale: coded.scales()[at] * scale }
                })
                .collect();
            let found = kernel.part(&sides[head], &queries, part * PART * TILE..seen.min((part + 1) * PART * TILE));
            // SAFETY: each part and head has its own records.
            let to = unsafe { shared.row((part * q_heads + head * group) * record, group * record) };
            for (to, own) in to.chunks_exact_mut(record).zip(found) {
                (to[0], to[1]) = (own.m, own.l);
                to[2..].copy_from_slice(&own.o);
            }
        });
        for h in 0..q_heads {
            let all = || (0..parts).map(|part| &partial[(part * q_heads + h) * record..][..record]);
            let top = all().map(|r| r[0]).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, out) = (0.0f32, &mut o[(row * q_heads + h) * value_dim..][..value_dim]);
            for part in all().filter(|r| r[0] != f32::NEG_INFINITY) {
                let weight = (part[0] - top).exp();
                sum += weight * part[1];
                out.iter_mut().zip(&part[2..]).for_each(|(o, x)| *o += weight * x);
            }
            out.iter_mut().for_each(|o| *o /= sum);
            lse[h * rows + row] = top + sum.ln();
        }
    }
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let o = Tensor::from_f64(q.dtype(), &wide(&o), &[rows, q_heads, value_dim]);
    let lse = Tensor::from_f64(DType::F32, &wide(&lse), &[q_heads, rows]);
    let made = "bug in fulgurite: tensors of known shapes";
    Ok((o.expect(made), lse.expect(made)))
}

struct Kernel {
    #[cfg(target_arch = "x86_64")]
    fast: bool,
}

impl Kernel {
    fn new(_options: &Options) -> Kernel {
        Kernel {
            #[cfg(target_arch = "x86_64")]
            fast: crate::simd::packed::available()
                && !matches!(_options.isa, Some(crate::Isa::Portable | crate::Isa::Avx2)),
        }
    }

    /// Tokens of one part against the queries of one key/value head.
    fn part(&self, [k, v]: &[Side; 2], queries: &[Query], tokens: std::ops::Range<usize>) -> Vec<Summary> {
        let none = || Summary { m: f32::NEG_INFINITY, l: 0.0, o: vec![0.0; v.dim] };
        let mut found: Vec<Summary> = queries.iter().map(|_| none()).collect();
        let mut scores = vec![0i32; queries.len() * TILE];
        let mut weights = vec![0i8; queries.len() * TILE];
        let mut sums = vec![0i32; queries.len() * v.dim];
        for start in tokens.clone().step_by(TILE) {
            let (number, n) = (start / TILE, TILE.min(tokens.end - start));
            let (k_scale, v_scale) = match (k.tiles.get(number), v.tiles.get(number)) {
                (Some(k), Some(v)) => (k.0, v.0),
                _ => (k.scale, v.scale),
            };
            match k.tiles.get(number) {
                Some((_, tile)) => self.dots(tile, queries, &mut scores),
                None => plain_dots(&k.tail, k.dim, queries, &mut scores),
            }
            for (i, (query, own)) in queries.iter().zip(&mut found).enumerate() {
                let factor = query.scale * k_scale;
                let (scores, weights) = (&scores[i * TILE..][..n], &mut weights[i * TILE..(i + 1) * TILE]);
                let top = scores.iter().fold(own.m, |m, &s| m.max(s as f32 * factor));
                let alpha = if own.m == f32::NEG_INFINITY { 0.0 } else { (own.m - top).exp() };
                let mut p = [0.0f32; TILE];
                p.iter_mut().zip(scores).for_each(|(p, &s)| *p = exp(s as f32 * factor - top));
                weights.iter_mut().zip(&p).for_each(|(w, &p)| *w = Int8Attention::weight(p));
                (own.m, own.l) = (top, own.l * alpha + p.iter().sum::<f32>());
                if alpha != 1.0 {
                    own.o.iter_mut().for_each(|o| *o *= alpha);
                }
            }
            match v.tiles.get(number) {
                Some((_, tile)) => self.sums(tile, &weights, &mut sums),
                None => plain_sums(&v.tail, v.dim, &weights, &mut sums),
            }
            let factor = v_scale / f32::from(INT8_LARGEST);
            for (own, sums) in found.iter_mut().zip(sums.chunks_exact(v.dim)) {
                own.o.iter_mut().zip(sums).for_each(|(o, &x)| *o = (x as f32).mul_add(factor, *o));
            }
        }
        found
    }

    /// Integer scores of a tile: sum_c q_c (step_c code_c + zero_c).
    fn dots(&self, tile: &Stage2, queries: &[Query], out: &mut [i32]) {
        #[cfg(target_arch = "x86_64")]
        if self.fast && tile.bits == fulgurite_core::format::Bits::Four && tile.channels.is_multiple_of(128) {
            let codes: Vec<&[i8]> = queries.iter().map(|q| &q.codes[..]).collect();
            return crate::simd::packed::dots(tile, &codes, out);
        }
        let mut codes = vec![0i8; tile.tokens * tile.channels];
        tile.expand(&mut codes);
        plain_dots(&codes, tile.channels, queries, out);
    }

    /// Integer sums of a tile: sum_t w_t (step_c code + zero_c).
    fn sums(&self, tile: &Stage2, weights: &[i8], out: &mut [i32]) {
        #[cfg(target_arch = "x86_64")]
        if self.fast && tile.bits == fulgurite_core::format::Bits::Four && tile.channels.is_multiple_of(128) {
            return crate::simd::packed::sums(tile, weights, out);
        }
        let mut codes = vec![0i8; tile.tokens * tile.channels];
        tile.expand(&mut codes);
        plain_sums(&codes, tile.channels, weights, out);
    }
}

/// e^x for x up to 0, in steps that every vector unit has: relative error 2e-7, and 0 below -87.
#[inline]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    let t = x.max(-87.0) * std::f32::consts::LOG2_E;
    let n = (t + ROUND) - ROUND;
    // 2^r on [-1/2, 1/2] by its series.
    let r = (t - n) * std::f32::consts::LN_2;
    let series = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r / 720.0)))));
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    if x < -87.0 { 0.0 } else { series * power }
}

fn plain_dots(codes: &[i8], dim: usize, queries: &[Query], out: &mut [i32]) {
    for (query, out) in queries.iter().zip(out.chunks_exact_mut(TILE)) {
        for (row, out) in codes.chunks_exact(dim).zip(out) {
            *out = row.iter().zip(&query.codes).map(|(&k, &q)| i32::from(k) * i32::from(q)).sum();
        }
    }
}

fn plain_sums(codes: &[i8], dim: usize, weights: &[i8], out: &mut [i32]) {
    for (weights, out) in weights.chunks_exact(TILE).zip(out.chunks_exact_mut(dim)) {
        out.fill(0);
        for (row, &w) in codes.chunks_exact(dim).zip(weights) {
            out.iter_mut().zip(row).for_each(|(o, &v)| *o += i32::from(w) * i32::from(v));
        }
    }
}
