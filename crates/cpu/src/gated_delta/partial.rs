//! Gradients to which several parts of a key head add: those of its keys and queries, and of its value heads' gates.
//!
//! A sequence with few heads is split by columns of values, so that there is work for every thread: columns of the state
//! do not know of each other, and gradients of q, k and the gates are sums over them. The split depends on the problem and
//! the sequence's length alone, and parts are added in order, so results do not depend on the number of threads.

use super::backward::Out;
use super::chunk::CHUNK;
use super::segments::{FEW_HEADS, LEAST};
use super::{Context, stride};
use crate::memory::{Arena, with_workspace};
use crate::simd::Stage;
use fulgurite_core::gated_delta::{QkNorm, Tokens};
use fulgurite_core::stop;
use std::ops::Range;

/// Columns of values that go together at least, but for the last.
const COLUMNS: usize = 64;

/// Number of parts of each key head of a sequence. Each part repeats what does not depend on values, an eighth of the
/// work at 128 columns, so there are no more of them than make work for [`FEW_HEADS`] threads.
pub(super) fn parts(cx: &Context<'_>, s: &Tokens) -> usize {
    if s.len.div_ceil(CHUNK) >= LEAST { number(cx.vd, cx.problem.heads()) } else { 1 }
}

fn number(vd: usize, key_heads: usize) -> usize {
    vd.div_ceil(COLUMNS).min(FEW_HEADS / key_heads).max(1)
}

/// The columns of part `i` of `n`. No part is empty: they are at most 64 wide where there are as many parts as that
/// allows, and there are few where they are wider.
fn columns(vd: usize, i: usize, n: usize) -> Range<usize> {
    let width = if n == 1 { vd } else { vd.div_ceil(n).next_multiple_of(16) };
    i * width..((i + 1) * width).min(vd)
}

/// The context of part `i` of `n`.
pub(super) fn part<'a>(cx: &Context<'a>, i: usize, n: usize) -> Context<'a> {
    let own = columns(cx.vd, i, n);
    let vp = own.len().next_multiple_of(cx.kernels.lanes);
    Context { column: own.start, vd: own.len(), vp, vs: stride(vp, cx.kernels.lanes), ..*cx }
}

/// Sums in f32 `[token][kp]`, and those of gates `[value head][token]` in f64.
pub(super) struct Partial {
    pub d_q: Vec<f32>,
    pub d_k: Vec<f32>,
    pub d_g: Vec<f64>,
    pub d_beta: Vec<f64>,
}

impl Partial {
    pub fn new(cx: &Context<'_>, s: &Tokens) -> Partial {
        let tokens = s.len.next_multiple_of(CHUNK);
        let [d_q, d_k] = [(); 2].map(|_| stop::zeros("gradients in f32", tokens * cx.kp));
        let [d_g, d_beta] = [(); 2].map(|_| stop::zeros("gradients of gates", tokens * cx.problem.group()));
        Partial { d_q, d_k, d_g, d_beta }
    }

    pub fn add(&mut self, other: &Partial) {
        fn sum<T: Copy + std::ops::AddAssign>(to: &mut [T], from: &[T]) {
            to.iter_mut().zip(from).for_each(|(to, x)| *to += *x);
        }
        sum(&mut self.d_q, &other.d_q);
        sum(&mut self.d_k, &other.d_k);
        sum(&mut self.d_g, &other.d_g);
        sum(&mut self.d_beta, &other.d_beta);
    }

    /// Writes the gradients of a key head, through the normalisation of its rows if the problem has that.
    pub fn store(mut self, cx: &Context<'_>, s: &Tokens, key_head: usize, out: &Out<'_>) {
        let group = cx.problem.group();
        with_workspace(Arena::room(CHUNK * cx.kp), |normal| {
            let normal = &mut normal[..CHUNK * cx.kp];
            let views = [(cx.bound.q(), &mut self.d_q, &out.d_q), (cx.bound.k(), &mut self.d_k, &out.d_k)];
            for (view, d, (to, strides)) in views {
                let rows = cx.bound.row_layout(strides, s);
                for (chunk, d) in d.chunks_exact_mut(CHUNK * cx.kp).enumerate() {
                    let first = chunk * CHUNK;
                    if cx.problem.qk_norm() == QkNorm::Inside {
                        // y = x / |x|: dx = (dy - y (y . dy)) / |x|
                        let inverse = cx.load_keys(view, s, key_head, first, normal);
                        for ((d, y), inverse) in d.chunks_exact_mut(cx.kp).zip(normal.chunks_exact(cx.kp)).zip(inverse)
                        {
                            let mut along = [0.0];
                            cx.kernels.stage(Stage::RowDots { out: &mut along, x: y, y: d, width: cx.kp });
                            d.iter_mut().zip(y).for_each(|(d, y)| *d = inverse * (*d - y * along[0]));
                        }
                    }
                    for (t, d) in d.chunks_exact(cx.kp).take(s.len - first).enumerate() {
                        // SAFETY: each token of a key head is stored once.
                        unsafe { to.store(cx.kernels, rows.at(first + t, key_head), &d[..cx.kd]) };
                    }
                }
            }
        });
        let tokens = s.len.next_multiple_of(CHUNK);
        for (values, (to, strides)) in [(&self.d_g, &out.d_g), (&self.d_beta, &out.d_beta)] {
            let rows = cx.bound.row_layout(&[strides, &[0][..]].concat(), s);
            for head in 0..group {
                for (t, &value) in values[head * tokens..][..s.len].iter().enumerate() {
                    // SAFETY: each gate belongs to one value head, and that to one key head.
                    unsafe { to.store(cx.kernels, rows.at(t, key_head * group + head), &[value as f32]) };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_every_column_once() {
        for (vd, heads) in (1..=512).flat_map(|vd| (1..20).map(move |heads| (vd, heads))) {
            let n = number(vd, heads);
            assert!(n == 1 || n * heads <= FEW_HEADS, "{vd} columns, {heads} heads: {n} parts");
            let mut end = 0;
            for own in (0..n).map(|i| columns(vd, i, n)) {
                assert!(own.start == end && !own.is_empty(), "{vd} columns, {n} parts: {own:?}");
                end = own.end;
            }
            assert_eq!(end, vd);
        }
    }
}
