//! Attention over one tile of packed keys and values for up to four queries, in integers: the definition in plain code,
//! and a VNNI version with equal bits.
//!
//! Codes of two or four bits are stored in lines of 64 bytes, so that sixteen dwords of a line are multiplied with one
//! dword of a query or of the weights. A dword of the keys is four bytes of one token, and lanes are sixteen tokens; a
//! dword of the values is one byte of four tokens, and lanes are sixteen bytes. A byte holds neighbouring channels.
//! Per-channel data (queries, steps, zeros, outputs) are in the order of planes: first the channels in the lowest bits
//! of all bytes, then those in the next.

mod plain;
#[cfg(target_arch = "x86_64")]
mod vnni;

use crate::Isa;
use crate::memory::Line;
use fulgurite_core::format::{Bits, Stage2};

/// Tokens of a tile.
pub(crate) const TILE: usize = 64;

/// Queries that are taken at a time.
pub(crate) const QUERIES: usize = 4;

/// The contents of a line's dwords.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Four bytes of a token.
    Keys,
    /// A byte of four tokens.
    Values,
}

/// The layout of tiles of one head's keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Panel {
    pub axis: Axis,
    pub bits: Bits,
    pub dim: usize,
}

impl Panel {
    /// Bytes of a token, up to whole lines.
    pub fn bytes(self) -> usize {
        Stage2::row_bytes(self.dim, self.bits).next_multiple_of(if self.axis == Axis::Keys { 4 } else { 16 })
    }
    /// Lines of a tile.
    pub fn lines(self) -> usize {
        self.bytes() * TILE / 64
    }
    /// Channels in the order of planes, up to whole vectors.
    pub fn width(self) -> usize {
        (self.bytes() * self.bits.per_byte()).next_multiple_of(32)
    }
    /// The index of a channel in the order of planes.
    pub fn plane_index(self, channel: usize) -> usize {
        let per = self.bits.per_byte();
        channel % per * self.bytes() + channel / per
    }
    /// Line of a tile and byte of the line for a token's byte.
    fn at(self, token: usize, byte: usize) -> (usize, usize) {
        match self.axis {
            Axis::Keys => (token / 16 * (self.bytes() / 4) + byte / 4, token % 16 * 4 + byte % 4),
            Axis::Values => (byte / 16 * 16 + token / 4, byte % 16 * 4 + token % 4),
        }
    }

    /// Appends a tile's codes, steps and zeros.
    pub fn push(self, tile: &Stage2, lines: &mut Vec<Line>, steps: &mut Vec<i8>, zeros: &mut Vec<i8>) {
        let (row, first) = (Stage2::row_bytes(self.dim, self.bits), lines.len());
        lines.resize(first + self.lines(), Line([0; 64]));
        for (token, codes) in tile.codes.chunks_exact(row).enumerate() {
            for (byte, &code) in codes.iter().enumerate() {
                let (line, at) = self.at(token, byte);
                lines[first + line].0[at] = code;
            }
        }
        for (to, from) in [(steps, &tile.steps), (zeros, &tile.zeros)] {
            let first = to.len();
            to.resize(first + self.width(), 0);
            from.iter().enumerate().for_each(|(c, &x)| to[first + self.plane_index(c)] = x);
        }
    }

    /// The tile back, as [`push`](Self::push) had it.
    pub fn tile(self, lines: &[Line], steps: &[i8], zeros: &[i8]) -> Stage2 {
        let row = Stage2::row_bytes(self.dim, self.bits);
        let code = |i: usize| {
            let (line, at) = self.at(i / row, i % row);
            lines[line].0[at]
        };
        let back = |from: &[i8]| (0..self.dim).map(|c| from[self.plane_index(c)]).collect();
        Stage2 {
            bits: self.bits,
            tokens: TILE,
            channels: self.dim,
            codes: (0..TILE * row).map(code).collect(),
            steps: back(steps),
            zeros: back(zeros),
        }
    }
}

/// One tile in its storage layout.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub panel: Panel,
    pub lines: &'a [Line],
    pub steps: &'a [i8],
    pub zeros: &'a [i8],
}

impl Tile<'_> {
    fn check(&self, axis: Axis) {
        let (lines, width) = (self.panel.lines(), self.panel.width());
        assert!(self.panel.axis == axis && self.lines.len() >= lines, "lines of the tile");
        assert!(self.steps.len() >= width && self.zeros.len() >= width, "channels of the tile");
    }
}

/// The running summary of one query: maximum, sum, and the output before division in the order of planes.
pub(crate) struct Running<'a> {
    pub m: f32,
    pub l: f32,
    pub o: &'a mut [f32],
}

/// Integers of up to four queries against a tile.
pub(crate) type Scores = [[i32; TILE]; QUERIES];
/// Weights of up to four queries.
pub(crate) type Weights = [[u8; TILE]; QUERIES];

/// The implementation that multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packed {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Packed {
    /// The best that this machine has under an instruction set, if one is forced.
    pub fn new(isa: Option<Isa>) -> Packed {
        #[cfg(target_arch = "x86_64")]
        if vnni::available() && !matches!(isa, Some(Isa::Portable | Isa::Avx2)) {
            return Packed::Vnni;
        }
        let _ = isa;
        Packed::Plain
    }

    /// sum_c q_c (step_c code_c + zero_c) for each token of a tile and each query, given in the order of planes.
    pub fn dots(self, tile: &Tile<'_>, queries: &[&[i16]], out: &mut Scores) {
        tile.check(Axis::Keys);
        let width = tile.panel.width();
        assert!(queries.len() <= QUERIES && queries.iter().all(|q| q.len() == width), "queries of the tile");
        match self {
            Packed::Plain => plain::dots(tile, queries, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has VNNI (`new`), and the extents were just checked.
            Packed::Vnni => unsafe { vnni::dots(tile, queries, out) },
        }
    }

    /// Scores become weights round(127 e^(s - m)); maximum and sum go on. Of the tokens the first `n` count. Gives what
    /// the output so far is to be multiplied with.
    pub fn soften(
        self,
        scores: &[i32; TILE],
        factor: f32,
        n: usize,
        own: &mut Running<'_>,
        to: &mut [u8; TILE],
    ) -> f32 {
        if n == 0 {
            to.fill(0);
            return 1.0;
        }
        match self {
            Packed::Plain => plain::soften(scores, factor, n, own, to),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has VNNI (`new`).
            Packed::Vnni => unsafe { vnni::soften(scores, factor, n, own, to) },
        }
    }

    /// o = alpha o + factor sum_t w_t (step_c code + zero_c) for each query.
    pub fn sums(self, tile: &Tile<'_>, weights: &Weights, factor: f32, alpha: &[f32], queries: &mut [Running<'_>]) {
        tile.check(Axis::Values);
        let width = tile.panel.width();
        assert!(queries.len() <= QUERIES.min(alpha.len()), "queries of the tile");
        assert!(queries.iter().all(|q| q.o.len() == width), "outputs of the tile");
        match self {
            Packed::Plain => plain::sums(tile, weights, factor, alpha, queries),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has VNNI (`new`), and the extents were just checked.
            Packed::Vnni => unsafe { vnni::sums(tile, weights, factor, alpha, queries) },
        }
    }
}

/// Added and taken away, this rounds to a whole number, which is then in the lowest bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// 2^r on [-1/2, 1/2] by its series: ln(2)^i / i!, relative error 2.4e-6.
const SERIES: [f32; 6] = [1.0, std::f32::consts::LN_2, 0.240_226_5, 0.055_504_11, 0.009_618_129, 0.001_333_355_8];

/// Below this e^x is 0: its power of two would leave the normal numbers.
const LEAST: f32 = -87.0;

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::random::Rng;

    fn bytes(rng: &mut Rng, n: usize, most: i32) -> Vec<i8> {
        (0..n).map(|_| (rng.range(0..2 * most as usize + 1) as i32 - most) as i8).collect()
    }

    #[test]
    fn tiles_come_back_and_integers_are_those_of_expanded_codes() {
        let mut rng = Rng::new(8);
        for (dim, n, bits) in [
            (128, 4, Bits::Four),
            (128, 3, Bits::Two),
            (1, 1, Bits::Four),
            (40, 2, Bits::Four),
            (33, 4, Bits::Two),
            (256, 1, Bits::Four),
        ] {
            let stage = Stage2::new(&bytes(&mut rng, TILE * dim, 127), TILE, dim, bits);
            let mut codes = vec![0i8; TILE * dim];
            stage.expand(&mut codes);
            let made = |axis: Axis| {
                let panel = Panel { axis, bits, dim };
                let (mut lines, mut steps, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
                panel.push(&stage, &mut lines, &mut steps, &mut zeros);
                assert_eq!(panel.tile(&lines, &steps, &zeros), stage, "{axis:?} of {dim}");
                (panel, lines, steps, zeros)
            };
            let (panel, lines, steps, zeros) = made(Axis::Keys);
            let keys = Tile { panel, lines: &lines, steps: &steps, zeros: &zeros };
            let q: Vec<Vec<i8>> = (0..n).map(|_| bytes(&mut rng, dim, 127)).collect();
            let in_planes = |q: &Vec<i8>| {
                let mut out = vec![0i16; panel.width()];
                q.iter().enumerate().for_each(|(c, &x)| out[panel.plane_index(c)] = i16::from(x));
                out
            };
            let planes: Vec<Vec<i16>> = q.iter().map(in_planes).collect();
            let planes: Vec<&[i16]> = planes.iter().map(|q| &q[..]).collect();
            let (panel, lines, steps, zeros) = made(Axis::Values);
            let values = Tile { panel, lines: &lines, steps: &steps, zeros: &zeros };
            let mut weights = [[0u8; TILE]; QUERIES];
            weights.iter_mut().flatten().for_each(|w| *w = rng.range(0..128) as u8);
            for own in [Packed::Plain, Packed::new(None)] {
                let mut scores = [[0; TILE]; QUERIES];
                own.dots(&keys, &planes, &mut scores);
                for (i, t) in (0..n).flat_map(|i| (0..TILE).map(move |t| (i, t))) {
                    let row = codes[t * dim..(t + 1) * dim].iter().zip(&q[i]);
                    let want: i32 = row.map(|(&k, &q)| i32::from(k) * i32::from(q)).sum();
                    assert_eq!(scores[i][t], want, "{own:?} {bits:?} {dim}: query {i} token {t}");
                }
                let mut o = vec![vec![2.0f32; panel.width()]; n];
                let mut queries: Vec<Running<'_>> = o.iter_mut().map(|o| Running { m: 0.0, l: 0.0, o }).collect();
                own.sums(&values, &weights, 1.0, &[0.5; QUERIES], &mut queries);
                for (i, c) in (0..n).flat_map(|i| (0..dim).map(move |c| (i, c))) {
                    let products = (0..TILE).map(|t| i32::from(codes[t * dim + c]) * i32::from(weights[i][t]));
                    let want = 1 + products.sum::<i32>();
                    assert_eq!(
                        o[i][panel.plane_index(c)],
                        want as f32,
                        "{own:?} {bits:?} {dim}: query {i} channel {c}"
                    );
                }
            }
        }
    }

    #[test]
    fn weights_are_exponentials_and_the_same_bits_everywhere() {
        let mut rng = Rng::new(9);
        for n in [1, 15, 16, 40, 64, 64, 64] {
            let scores: [i32; TILE] = std::array::from_fn(|_| rng.range(0..2_000_000) as i32 - 1_000_000);
            let factor = 1e-5 * (1.0 + rng.uniform() as f32);
            let mut found = Vec::new();
            for own in [Packed::Plain, Packed::new(None)] {
                for m in [f32::NEG_INFINITY, -3.0, 20.0] {
                    let (mut o, mut weights) = ([0.0; 1], [1u8; TILE]);
                    let mut state = Running { m, l: 1.0, o: &mut o };
                    let alpha = own.soften(&scores, factor, n, &mut state, &mut weights);
                    let top = scores[..n].iter().fold(m, |m, &s| m.max(s as f32 * factor));
                    assert_eq!(state.m, top);
                    let p = |s: i32| f64::from(s as f32 * factor - top).exp();
                    let want = f64::from(alpha) + scores[..n].iter().map(|&s| p(s)).sum::<f64>();
                    assert!((f64::from(state.l) - want).abs() < 1e-5 * want, "{} for {want}", state.l);
                    assert!((f64::from(alpha) - f64::from(m - top).exp()).abs() < 1e-5);
                    for (k, &w) in weights.iter().enumerate() {
                        let want = if k < n { 127.0 * p(scores[k]) } else { 0.0 };
                        assert!((f64::from(w) - want).abs() < 0.501, "{w} for {want}");
                    }
                    found.push((weights, state.l.to_bits(), alpha.to_bits()));
                }
            }
            let (a, b) = found.split_at(3);
            assert_eq!(a, b);
        }
    }
}
