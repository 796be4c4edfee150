//! The role that starts all products: one thread of one warp.
//!
//! First step: s | d_p | d_v. Every further step n: s(n) | d_k(n-1) | d_q(n-1) | d_p(n) | d_v(n). At the end: d_k | d_q.
//! While the compute role turns s into p, the tensor cores multiply d_k and d_q of the step before; while it turns d_p into
//! d_z, they multiply d_v and the next s.
//!
//! Products run in the order in which they start. So s may overwrite p of the step before, whose d_v has started, and d_p or
//! d_q may overwrite d_z, whose d_k has started.

use crate::attention::backward::cursor::Cursor;
use crate::attention::backward::tcgen05::config::GROUPS;
use crate::attention::backward::tcgen05::construction::{HALF, TensorBackward, only};
use crate::attention::backward::tiles::Work;
use fulgurite_ptx::{Half, Major, Pair, Scope, Sum, TensorTile, Tile, Val, WarpRole, Word};

/// Starts the products of the CTA's tile.
pub(super) fn run<'k, T: Half>(w: &Scope<'k, WarpRole>, kernel: &TensorBackward<'k, T>, work: &Work<'k>)
where
    Pair<T>: Word,
{
    let role = Multiply { kernel, key: kernel.stages.keys.wait(w)[0], value: kernel.stages.values.current(w)[0] };
    let left = Cursor::new(w, &kernel.params.map, work).left;
    let onto = w.var(false);
    role.scores(w);
    kernel.stages.values.wait(w);
    role.products(w);
    role.value_sums(w, w.constant(false));
    w.repeat(|w, leave| {
        leave.when(left.get().eq(1));
        left.set(left.get() - 1);
        role.scores(w);
        role.key_sums(w, onto.get());
        role.query_sums(w);
        role.products(w);
        role.value_sums(w, w.constant(true));
        onto.set(true);
    });
    kernel.stages.values.done_with_products(w);
    kernel.d_v.filled(w, only());
    role.key_sums(w, onto.get());
    role.query_sums(w);
    kernel.stages.keys.done_with_products(w);
    // The last commit of all, so that no arrival is pending when the threads that wait for it exit.
    kernel.d_k.filled(w, only());
}

struct Multiply<'a, 'k, T> {
    kernel: &'a TensorBackward<'k, T>,
    key: Tile<'k>,
    value: Tile<'k>,
}

impl<'k, T: Half> Multiply<'_, 'k, T>
where
    Pair<T>: Word,
{
    /// Starts s of the next step. Its p of the step before is in use by d_v.
    fn scores(&self, w: &Scope<'k, WarpRole>) {
        let (scores, q) = (&self.kernel.scores, self.kernel.stages.queries.take(w)[0]);
        let s = scores.next(w, only());
        let (key, q) = (self.key.operand(Major::Inner), q.operand(Major::Inner));
        w.elected(|t| t.multiply_tensor(s, key, q, Sum::Fresh));
        scores.filled(w, only());
    }

    /// Starts d_p of a step.
    fn products(&self, w: &Scope<'k, WarpRole>) {
        let (products, d_o) = (&self.kernel.products, self.kernel.stages.outputs.wait(w)[0]);
        let d_p = products.next(w, only());
        let (value, d_o) = (self.value.operand(Major::Inner), d_o.operand(Major::Inner));
        w.elected(|t| t.multiply_tensor(d_p, value, d_o, Sum::Fresh));
        products.filled(w, only());
    }

    /// Adds the products of what the warpgroups have written, each for its queries, and of the same rows of a tile.
    fn add(
        &self,
        w: &Scope<'k, WarpRole>,
        to: TensorTile<'k>,
        left: impl Fn(u32) -> TensorTile<'k>,
        (right, onto): (Tile<'k>, Val<'k, bool>),
    ) {
        w.elected(|t| {
            for group in 0..GROUPS {
                let sum = if group == 0 { Sum::If(onto) } else { Sum::Onto };
                t.multiply_tensor(to, left(group), right.rows(group, HALF).operand(Major::Outer), sum);
            }
        });
    }

    /// Starts d_v += p^T d_o of a step when p is written.
    fn value_sums(&self, w: &Scope<'k, WarpRole>, onto: Val<'k, bool>) {
        let kernel = self.kernel;
        kernel.scores.await_part(w, only(), 0);
        let (d_v, d_o) = (kernel.d_v.next(w, only()), kernel.stages.outputs.current(w)[0]);
        self.add(w, d_v, |group| kernel.p(group), (d_o, onto));
        kernel.stages.outputs.done_with_products(w);
    }

    /// Starts d_k += d_z^T q of the oldest step whose q is there, when d_z is written.
    fn key_sums(&self, w: &Scope<'k, WarpRole>, onto: Val<'k, bool>) {
        let kernel = self.kernel;
        kernel.products.await_part(w, only(), 0);
        let (d_k, q) = (kernel.d_k.next(w, only()), kernel.stages.queries.held(w, w.constant(0))[0]);
        self.add(w, d_k, |group| kernel.d_z(group), (q, onto));
        kernel.stages.queries.release_with_products(w);
    }

    /// Starts d_q = d_z k of the same step, with d_z from shared memory.
    fn query_sums(&self, w: &Scope<'k, WarpRole>) {
        let kernel = self.kernel;
        if !kernel.sums_over_products {
            kernel.sums.await_empty(w, only());
        }
        let d_q = kernel.sums.next(w, only());
        let (d_z, key) = (kernel.d_z.operand(Major::Outer), self.key.operand(Major::Outer));
        w.elected(|t| t.multiply_tensor(d_q, d_z, key, Sum::Fresh));
        kernel.sums.filled(w, only());
        if kernel.sums_over_products {
            // The next d_p overwrites d_q.
            kernel.sums.await_empty(w, only());
        }
    }
}
