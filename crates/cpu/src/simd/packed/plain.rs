//! The definition that the vector code must match bit for bit.

use super::{LEAST, ROUND, Running, SERIES, Scores, TILE, Tile, Weights};

/// Calls `f(token, place, code)` for every code.
fn codes(tile: &Tile<'_>, mut f: impl FnMut(usize, usize, i32)) {
    let (panel, bytes) = (tile.panel, tile.panel.bytes());
    for (token, byte) in (0..TILE).flat_map(|t| (0..bytes).map(move |b| (t, b))) {
        let (line, at) = panel.at(token, byte);
        let all = tile.lines[line].0[at];
        for plane in 0..panel.bits.per_byte() {
            let code = i32::from(all >> (plane * panel.bits.count())) & panel.bits.largest();
            f(token, plane * bytes + byte, code);
        }
    }
}

pub(super) fn dots(tile: &Tile<'_>, queries: &[&[i16]], out: &mut Scores) {
    out.iter_mut().for_each(|row| row.fill(0));
    codes(tile, |token, place, code| {
        let value = code * i32::from(tile.steps[place]) + i32::from(tile.zeros[place]);
        for (q, out) in queries.iter().zip(&mut *out) {
            out[token] += i32::from(q[place]) * value;
        }
    });
}

pub(super) fn sums(tile: &Tile<'_>, weights: &Weights, factor: f32, alpha: &[f32], queries: &mut [Running<'_>]) {
    let mut raw = vec![0i32; tile.panel.width()];
    for ((own, weights), &alpha) in queries.iter_mut().zip(weights).zip(alpha) {
        raw.fill(0);
        codes(tile, |token, place, code| raw[place] += i32::from(weights[token]) * code);
        let total = weights.iter().map(|&w| i32::from(w)).sum::<i32>() as f32;
        for (place, (o, &raw)) in own.o.iter_mut().zip(&raw).enumerate() {
            // Below 2^24: exact.
            let zero = total * f32::from(tile.zeros[place]);
            let sum = (raw as f32).mul_add(f32::from(tile.steps[place]), zero);
            *o = sum.mul_add(factor, *o * alpha);
        }
    }
}

/// e^x for x up to 0: relative error 3e-6, and 0 below [`LEAST`].
fn exp(x: f32) -> f32 {
    let t = if x > LEAST { x } else { LEAST } * std::f32::consts::LOG2_E;
    let whole = t + ROUND;
    let r = t - (whole - ROUND);
    let series = SERIES[..5].iter().rev().fold(SERIES[5], |sum, &c| sum.mul_add(r, c));
    let found = f32::from_bits(series.to_bits().wrapping_add(whole.to_bits() << 23));
    if x < LEAST { 0.0 } else { found }
}

pub(super) fn soften(scores: &[i32; TILE], factor: f32, n: usize, own: &mut Running<'_>, to: &mut [u8; TILE]) -> f32 {
    let mut s = [f32::NEG_INFINITY; TILE];
    s[..n].iter_mut().zip(scores).for_each(|(s, &x)| *s = x as f32 * factor);
    let top = s.iter().fold(own.m, |m, &s| if s > m { s } else { m });
    let alpha = exp(own.m - top);
    // Sixteen sums side by side, then halves onto halves: the order of a vector unit.
    let mut sums = [0.0f32; 16];
    for (k, (&s, to)) in s.iter().zip(to).enumerate() {
        let p = exp(s - top);
        sums[k % 16] += p;
        *to = p.mul_add(127.0, ROUND).to_bits() as u8;
    }
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|i| sums[i] += sums[i + half]);
    }
    own.l = own.l.mul_add(alpha, sums[0]);
    own.m = top;
    alpha
}
