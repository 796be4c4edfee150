//! One head's keys or values in packed storage.

use crate::memory::Line;
use crate::simd::packed::{Axis, Panel, TILE, Tile};
use fulgurite_core::format::integer::quantise;
use fulgurite_core::format::{Bits, Int8, Stage2};

/// Whole tiles one after the other in the kernels' layout, and the tokens that fill none.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Side {
    pub panel: Panel,
    /// Scale of each whole tile.
    pub scales: Vec<f32>,
    lines: Vec<Line>,
    steps: Vec<i8>,
    zeros: Vec<i8>,
    /// Codes of the tokens that fill no tile, row-major, and their scale.
    pub tail: Vec<i8>,
    pub scale: f32,
}

impl Side {
    pub fn new(axis: Axis, bits: Bits, dim: usize) -> Side {
        let panel = Panel { axis, bits, dim };
        let (scales, lines, steps, zeros) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Side { panel, scales, lines, steps, zeros, tail: Vec::new(), scale: 0.0 }
    }

    /// Number of whole tiles.
    pub fn tiles(&self) -> usize {
        self.scales.len()
    }

    /// A whole tile in the kernels' layout.
    pub fn tile(&self, number: usize) -> Tile<'_> {
        let (lines, width) = (self.panel.lines(), self.panel.width());
        Tile {
            panel: self.panel,
            lines: &self.lines[number * lines..(number + 1) * lines],
            steps: &self.steps[number * width..(number + 1) * width],
            zeros: &self.zeros[number * width..(number + 1) * width],
        }
    }

    /// A whole tile in the format's layout.
    pub fn stage(&self, number: usize) -> Stage2 {
        let tile = self.tile(number);
        self.panel.tile(tile.lines, tile.steps, tile.zeros)
    }

    /// Appends a whole tile.
    pub fn push(&mut self, scale: f32, tile: &Stage2) {
        self.panel.push(tile, &mut self.lines, &mut self.steps, &mut self.zeros);
        self.scales.push(scale);
    }

    /// Appends rows, which must be finite.
    pub fn append(&mut self, rows: &[f32]) {
        let (mut left, dim) = (rows, self.panel.dim);
        while !left.is_empty() {
            let room = TILE * dim - self.tail.len();
            let (now, rest) = left.split_at(room.min(left.len()));
            if self.tail.is_empty() {
                // A whole tile has its own scale; a new tail takes that of the last tile, if that scale is usable.
                let last = self.scales.last().copied().unwrap_or(0.0);
                let own = now.iter().fold(0.0f32, |m, x| m.max(x.abs())) / f32::from(Int8::PROTECTED);
                self.scale = if now.len() == TILE * dim || last == 0.0 { own } else { last };
            }
            self.tail.extend(now.iter().map(|&x| quantise(x, self.scale, 127)));
            if self.tail.len() == TILE * dim {
                let codes = std::mem::take(&mut self.tail);
                self.push(self.scale, &Stage2::new(&codes, TILE, dim, self.panel.bits));
            }
            left = rest;
        }
    }

    /// Keeps the first `len` tokens. A truncated tile is reopened as INT8, without further loss.
    pub fn truncate(&mut self, len: usize) {
        let (whole, dim) = (len / TILE, self.panel.dim);
        if whole < self.tiles() {
            self.tail = vec![0; TILE * dim];
            self.stage(whole).expand(&mut self.tail);
            self.scale = self.scales[whole];
            self.scales.truncate(whole);
            self.lines.truncate(whole * self.panel.lines());
            self.steps.truncate(whole * self.panel.width());
            self.zeros.truncate(whole * self.panel.width());
        }
        self.tail.truncate((len - whole * TILE) * dim);
    }

    /// The values of a token.
    pub fn decoded(&self, token: usize) -> Vec<f32> {
        let dim = self.panel.dim;
        let codes = |codes: &[i8], scale: f32| codes.iter().map(|&c| f32::from(c) * scale).collect();
        if token / TILE < self.tiles() {
            let mut all = vec![0; TILE * dim];
            self.stage(token / TILE).expand(&mut all);
            return codes(&all[token % TILE * dim..][..dim], self.scales[token / TILE]);
        }
        codes(&self.tail[token % TILE * dim..][..dim], self.scale)
    }

    /// Bytes of codes, steps, zeros and scales.
    pub fn size_bytes(&self) -> usize {
        size_of_val(&self.lines[..])
            + self.steps.len()
            + self.zeros.len()
            + self.tail.len()
            + 4 * (self.scales.len() + 1)
    }
}
