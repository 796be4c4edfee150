//! The cold path of products with non-finite operands: 0 times NaN is NaN, so a key that a row does not see must not be
//! multiplied at all. Code that multiplies asks here first; if everything is finite, or everything is visible, the
//! usual path is taken.

use crate::simd::{DEPTH, parts};
use crate::step::Step;
use crate::tiles::{Context, KeyRows, Tile};
use fulgurite_core::TensorView;
use std::ops::Range;

/// Which lanes of a tile see which keys of a step.
pub(crate) struct Visible {
    keys: Range<usize>,
    stride: usize,
    /// `[key][lane]`, starting at the first of `keys`.
    seen: Vec<bool>,
}

impl Visible {
    /// What a step's lanes see, from the scores before softmax; lanes past the last of `rows` see nothing. A score of
    /// -inf means a hidden key, whatever made it so.
    pub fn new(step: &Step, [stride, width, rows]: [usize; 3], s: &[f32]) -> Visible {
        let keys = step.hull();
        let mut seen = vec![false; keys.len() * stride];
        for (key, seen) in keys.clone().zip(seen.chunks_exact_mut(stride)) {
            for (lane, seen) in seen.iter_mut().enumerate().take(rows) {
                *seen = step.sees(key, lane, width) && s[key * stride + lane] != f32::NEG_INFINITY;
            }
        }
        Visible { keys, stride, seen }
    }

    /// The lanes that see a key, as flags.
    pub fn lanes(&self, key: usize) -> &[bool] {
        if !self.keys.contains(&key) {
            return &[];
        }
        let at = (key - self.keys.start) * self.stride;
        &self.seen[at..at + self.stride]
    }

    pub fn keys(&self) -> Range<usize> {
        self.keys.clone()
    }

    /// Writes 0 over elements that lanes do not see.
    pub fn clear(&self, x: &mut [f32]) {
        for key in self.keys() {
            let own = &mut x[key * self.stride..(key + 1) * self.stride];
            own.iter_mut().zip(self.lanes(key)).filter(|(_, seen)| !**seen).for_each(|(x, _)| *x = 0.0);
        }
    }
}

impl Context<'_> {
    /// Calls a function with each row of keys or values as f32; `row` has space for one.
    pub fn each_key(
        &self,
        view: &TensorView<'_>,
        tile: &Tile,
        keys: impl Iterator<Item = usize>,
        row: &mut [f32],
        mut visit: impl FnMut(usize, &[f32], bool),
    ) {
        let rows = self.key_layout(view.strides(), &self.bound.sequences()[tile.sequence]);
        let head = tile.head / self.problem.group();
        for key in keys {
            let finite = self.kernels.widen(&view.data(), rows.at(key, head), row);
            visit(key, row, finite);
        }
    }

    /// What the lanes of a tile see of a step, if its values are not finite and some lane does not see them all, or if
    /// the unit has no infinities; otherwise `None`. `s` holds the scores before softmax, `scratch` has space for a
    /// row.
    pub fn hidden_values(
        &self,
        (tile, stride): (&Tile, usize),
        (step, start): (&Step, usize),
        v: KeyRows<'_>,
        s: &[f32],
        scratch: &mut [f32],
    ) -> Option<Visible> {
        if v.finite {
            return None;
        }
        let k_len = self.bound.sequences()[tile.sequence].k_len;
        let n = self.unit.block(self).min(k_len - start);
        let (width, decided) = (self.kernels.lanes, !step.rest && self.problem.score_program().is_none());
        // A number in parts has no infinity: one of its parts is NaN.
        let in_parts = self.kernels.matrix.is_some() && parts(self.problem.dtype()) > 1;
        if decided && step.is_whole(n) && !in_parts {
            return None;
        }
        // A matrix unit multiplies whole tiles of keys; only tiles that every lane sees need no check.
        let (hull, tiles) = (step.hull(), self.kernels.matrix_for(self.problem.dtype()).is_some());
        let depth = if tiles { DEPTH } else { 1 };
        let keys = hull.start / depth * depth..hull.end.next_multiple_of(depth).min(n);
        let inner = if decided && !in_parts { step.inner_of_all() } else { 0..0 };
        let mut finite = true;
        let looked = keys.filter(|key| !inner.contains(key)).map(|key| start + key);
        self.each_key(self.bound.v(), tile, looked, &mut scratch[..self.dv], |_, _, own| finite &= own);
        (!finite).then(|| Visible::new(step, [stride, width, tile.rows], s))
    }

    /// Computes O += V^T P over visible keys only.
    pub fn add_visible(
        &self,
        tile: &Tile,
        start: usize,
        seen: &Visible,
        p: &[f32],
        o: &mut [f32],
        scratch: &mut [f32],
    ) {
        let keys = seen.keys().map(|key| start + key);
        self.each_key(self.bound.v(), tile, keys, &mut scratch[..self.dv], |key, v, _| {
            let key = key - start;
            let p = &p[key * seen.stride..(key + 1) * seen.stride];
            for (o, &v) in o.chunks_exact_mut(seen.stride).zip(v) {
                for ((o, &p), &seen) in o.iter_mut().zip(p).zip(seen.lanes(key)) {
                    *o += if seen { p * v } else { 0.0 };
                }
            }
        });
    }
}
