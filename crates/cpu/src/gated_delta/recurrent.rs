//! Token by token: each value head separately, with its state in the nearest cache that holds it.

use super::{Context, Out, ValueHead};
use crate::memory::{Arena, with_workspace};
use crate::pool;
use crate::simd::{Stage, Token};
use fulgurite_core::stop;

pub(super) fn run(cx: &Context<'_>, out: &Out<'_>, threads: usize) {
    let heads = cx.problem.value_heads();
    pool::run(threads, cx.bound.sequences().len() * heads, &|i| {
        let at = ValueHead { sequence: &cx.bound.sequences()[i / heads], head: i % heads };
        let room = Arena::room(cx.kp * cx.vp) + 2 * Arena::room(cx.kp) + 2 * Arena::room(cx.vp);
        with_workspace(room, |workspace| {
            let mut arena = Arena::new(workspace);
            let [s, q, k] = [cx.kp * cx.vp, cx.kp, cx.kp].map(|n| arena.take(n));
            let [v, o] = [cx.vp; 2].map(|n| arena.take(n));
            // Columns past the values are multiplied too.
            v.fill(0.0);
            cx.load_state(at.sequence.number, at.head, cx.bound.initial_state(), s, cx.vp);
            let v_rows = cx.bound.row_layout(cx.bound.v().strides(), at.sequence);
            for t in 0..at.sequence.len {
                stop::poll();
                cx.load_keys(cx.bound.q(), at.sequence, at.head / cx.problem.group(), t, q);
                cx.load_keys(cx.bound.k(), at.sequence, at.head / cx.problem.group(), t, k);
                cx.load_values(cx.bound.v(), &v_rows, &at, t, v, cx.vp);
                let gate = cx.bound.gate(at.sequence, t, at.head);
                let (decay, beta) = (cx.bound.g()[gate].exp(), cx.bound.beta()[gate]);
                let scale = cx.problem.scale();
                cx.kernels.stage(Stage::Token(Token { s, q, k: &k[..cx.kd], v, o, decay, beta, scale }));
                let rows = cx.bound.row_layout(out.o_strides, at.sequence);
                // SAFETY: every token of a value head is written once.
                unsafe { out.o.store(cx.kernels, rows.at(t, at.head), &o[..cx.vd]) };
            }
            out.state(cx, &at, s, cx.vp);
        });
        cx.kernels.fence();
    });
}
