//! Eight products per block of keys. An item owns a key/value head of a sequence: it keeps dK and dV of all its keys
//! and goes through the tiles of queries. Each tile holds its data over all keys, so that b = dO . mean of V is known
//! before it is used.
//!
//! With a = dO V^T, t' = dO . O and d = a - b: gl = P (a - t' + (t - U) d), gu = -P d;
//! dQ = scale gl K, dR = gu K, dK = scale gl Q + gu R, dV = W dO.

use crate::memory::{Arena, SharedRows, with_workspace};
use crate::modify::Modifier;
use crate::pool;
use crate::simd::{Ahead, GradArgs, Matrix, MatrixMut, Sum};
use crate::step::Step;
use crate::tiles::{Context, KeyRows, Lanes, MAX_LANES, Tile};
use crate::unit::{Products, Unit, Vectors};
use fulgurite_core::parallax::{ParallaxForward, ParallaxGradients};
use fulgurite_core::{Tensor, TensorView, stop};

/// Keys per block.
const BLOCK: usize = 128;

pub(super) fn run(
    cx: &Context<'_>,
    rx: &Context<'_>,
    forward: &ParallaxForward,
    d_o: &TensorView<'_>,
    gradients: &mut ParallaxGradients,
    threads: usize,
) {
    let dense: Option<Tensor> = (d_o.strides().last() != Some(&1)).then(|| d_o.to_tensor());
    let d_o = dense.as_ref().map_or(*d_o, Tensor::view);
    // f32 products for every type: gradients are differences.
    let (cx, rx) = (&cx.on_vectors(), &rx.on_vectors());
    for tensor in [&mut gradients.d_q, &mut gradients.d_r, &mut gradients.d_k, &mut gradients.d_v] {
        tensor.view_mut().fill(0.0);
    }
    let mut views =
        [&mut gradients.d_q, &mut gradients.d_r, &mut gradients.d_k, &mut gradients.d_v].map(Tensor::view_mut);
    let strides = views.each_ref().map(|view| *view.strides());
    let shared = views.each_mut().map(SharedRows::new);
    let work = CallData { cx, rx, forward, d_o, out: &shared, strides: strides.each_ref().map(|s| &**s) };
    let heads = cx.problem.kv_heads();
    pool::run(threads, cx.bound.sequences().len() * heads, &|i| {
        work.item(i / heads, i % heads);
        cx.kernels.fence();
    });
}

struct CallData<'a> {
    cx: &'a Context<'a>,
    rx: &'a Context<'a>,
    forward: &'a ParallaxForward,
    d_o: TensorView<'a>,
    out: &'a [SharedRows<'a>; 4],
    strides: [&'a [usize]; 4],
}

/// A number of each lane.
type PerLane = [f32; MAX_LANES];

/// The keys and values of an item, and the sums of their gradients.
struct KeySums<'w> {
    k: KeyRows<'w>,
    v: KeyRows<'w>,
    n: usize,
    d_k: &'w mut [f32],
    d_v: &'w mut [f32],
}

impl<'w> KeySums<'w> {
    /// The keys from one on. Whether they are finite is not known.
    fn keys_from(&self, key: usize) -> KeyRows<'w> {
        KeyRows { rows: self.k.rows.at(key, 0), finite: false }
    }
}

/// The data of a tile of queries.
struct Workspace<'w> {
    /// `[key][lane]` of all keys: P, later W; U; P a, later gl.
    p: &'w mut [f32],
    u: &'w mut [f32],
    a: &'w mut [f32],
    /// gu of one block.
    g: &'w mut [f32],
    /// Q times the scale, R and dO in rows; then transposed, Q without the scale.
    q: &'w mut [f32],
    r: &'w mut [f32],
    d_o: &'w mut [f32],
    q_turned: &'w mut [f32],
    r_turned: &'w mut [f32],
    d_o_turned: &'w mut [f32],
    d_q: &'w mut [f32],
    d_r: &'w mut [f32],
    /// A block of keys without those that no lane sees.
    copy: &'w mut [f32],
    ahead: Ahead,
}

impl<'w> Workspace<'w> {
    fn sizes(cx: &Context<'_>, n: usize) -> [usize; 13] {
        let tile = cx.kernels.tile;
        let (keys, d, dv) = (n * tile, tile * cx.d_pad, tile * cx.dv_pad);
        [keys, keys, keys, BLOCK * tile, 2 * Arena::room(d), d, dv, d, d, dv, d, d, BLOCK * cx.d_pad]
    }
    fn new(cx: &Context<'_>, n: usize, arena: &mut Arena<'w>) -> Self {
        let [p, u, a, g, q, r, d_o, q_turned, r_turned, d_o_turned, d_q, d_r, copy] =
            Self::sizes(cx, n).map(|n| arena.take(n));
        let ahead = Ahead::default();
        Workspace { p, u, a, g, q, r, d_o, q_turned, r_turned, d_o_turned, d_q, d_r, copy, ahead }
    }
}

/// The weights of a tile: the steps that it sees with their first keys, and b.
struct Weights {
    steps: Vec<(usize, Step)>,
    b: PerLane,
}

impl CallData<'_> {
    fn item(&self, number: usize, kv_head: usize) {
        let cx = self.cx;
        let sequence = &cx.bound.sequences()[number];
        let n = sequence.k_len;
        let sizes = [n * cx.d_pad, n * cx.dv_pad, n * cx.d_pad, n * cx.dv_pad];
        let all = sizes.into_iter().chain(Workspace::sizes(cx, n));
        with_workspace(all.map(Arena::room).sum(), |workspace| {
            let mut arena = Arena::new(workspace);
            let [k, v, d_k, d_v] = sizes.map(|n| arena.take(n));
            let mut workspace = Workspace::new(cx, n, &mut arena);
            d_k.fill(0.0);
            d_v.fill(0.0);
            let k = cx.keys(cx.bound.k(), sequence, kv_head, 0..n, [cx.d, cx.d_pad], k);
            let v = cx.keys(cx.bound.v(), sequence, kv_head, 0..n, [cx.dv, cx.dv_pad], v);
            let mut keys = KeySums { k, v, n, d_k, d_v };
            for tile in cx.tiles(number, kv_head) {
                stop::poll();
                let lanes = cx.lanes(&tile);
                let stats = self.load(&tile, lanes.stride, &mut workspace);
                let weights = self.weigh(&tile, &lanes, &stats, &keys, &mut workspace);
                for (start, step) in &weights.steps {
                    self.add_step((step, *start), lanes.stride, (&stats, &weights.b), &mut keys, &mut workspace);
                }
                self.store_tile(&tile, &mut workspace);
            }
            for (i, from, width, dim) in [(2, &*keys.d_k, cx.d_pad, cx.d), (3, &*keys.d_v, cx.dv_pad, cx.dv)] {
                let rows = cx.key_layout(self.strides[i], sequence);
                for key in 0..n {
                    let row = &from[key * width..key * width + dim];
                    // SAFETY: every key of a key/value head belongs to one item.
                    unsafe { self.out[i].store(cx.kernels, rows.at(key, kv_head), row) };
                }
            }
        });
    }

    /// Loads Q, R and dO of a tile, and clears dQ and dR.
    fn load(&self, tile: &Tile, stride: usize, workspace: &mut Workspace<'_>) -> LaneStats {
        let (cx, sequence) = (self.cx, &self.cx.bound.sequences()[tile.sequence]);
        let Workspace { q, r, d_o, q_turned, r_turned, d_o_turned, d_q, d_r, .. } = workspace;
        Vectors.queries(cx, tile, stride, q, q_turned);
        Vectors.queries(self.rx, tile, stride, r, r_turned);
        for (view, dim, width, to) in [
            (cx.bound.q(), cx.d, cx.d_pad, &mut *q),
            (self.rx.bound.q(), cx.d, cx.d_pad, &mut *r),
            (&self.d_o, cx.dv, cx.dv_pad, &mut *d_o),
        ] {
            let rows = cx.query_layout(view.strides(), sequence);
            cx.gather(tile, &view.data(), &rows, dim, &mut to[..stride * width], width);
        }
        q[..stride * cx.d_pad].iter_mut().for_each(|x| *x *= cx.problem.scale());
        cx.kernels.transpose(d_o, cx.dv_pad, d_o_turned, stride, stride, cx.dv_pad);
        [d_q, d_r].into_iter().for_each(|x| x.fill(0.0));
        self.lane_stats(tile, &d_o[..stride * cx.dv_pad])
    }

    /// P, U and P a of all keys that a tile sees; b on the way.
    fn weigh(
        &self,
        tile: &Tile,
        lanes: &Lanes,
        stats: &LaneStats,
        keys: &KeySums<'_>,
        workspace: &mut Workspace<'_>,
    ) -> Weights {
        let cx = self.cx;
        let mut modifier = cx.modifier(1.0);
        let (mut b, mut steps) = ([0.0f32; MAX_LANES], Vec::new());
        for start in (0..keys.n).step_by(BLOCK) {
            for piece in cx.pieces(tile, start..(start + BLOCK).min(keys.n)) {
                let Some(step) = cx.step(tile, lanes, &piece, start) else { continue };
                self.weigh_step((tile, lanes), (&step, start), stats, keys, (workspace, &mut modifier));
                let (stride, hull) = (lanes.stride, step.hull());
                for row in workspace.a[(start + hull.start) * stride..(start + hull.end) * stride].chunks_exact(stride)
                {
                    b.iter_mut().zip(row).for_each(|(b, x)| *b += x);
                }
                steps.push((start, step));
            }
        }
        Weights { steps, b }
    }

    /// P, U and P a of one step.
    fn weigh_step(
        &self,
        (tile, lanes): (&Tile, &Lanes),
        (step, start): (&Step, usize),
        stats: &LaneStats,
        keys: &KeySums<'_>,
        (workspace, modifier): (&mut Workspace<'_>, &mut Modifier<'_>),
    ) {
        let (cx, stride) = (self.cx, lanes.stride);
        let Workspace { p, u, a, q_turned, r_turned, d_o_turned, ahead, .. } = workspace;
        let [p, u, a] = [p, u, a].map(|x| &mut x[start * stride..]);
        let (hull, from) = (step.hull(), keys.keys_from(start));
        let part = hull.start * stride..hull.end * stride;
        [&mut *p, &mut *u, &mut *a].into_iter().for_each(|x| x[part.clone()].fill(0.0));
        Vectors.scores(cx, Products { step, stride, ahead }, from, q_turned, p);
        if step.rest {
            cx.modify(modifier, (tile, lanes), (step, start), p, None);
        }
        Vectors.scores(self.rx, Products { step, stride, ahead }, from, r_turned, u);
        for seg in step.segments(1) {
            let ((key, count), (lane, width)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
            let right = Matrix::new(d_o_turned, stride).at(0, lane);
            let to = MatrixMut::at(a, stride, key, lane);
            let left = keys.v.rows.at(start + key, 0);
            cx.kernels.gemm(to, left, right, [count, width, cx.dv], Sum::Fresh, ahead);
        }
        cx.kernels.grad(&mut GradArgs {
            s: p,
            dp: a,
            stride,
            ranges: step.ranges,
            inner: step.inner,
            lo: &step.lo,
            hi: &step.hi,
            hidden: step.rest,
            lse: &stats.lse,
            max: &stats.lse,
            delta: &[0.0; MAX_LANES],
            scale: 1.0,
            derivative: None,
            exp: cx.exp,
            least: cx.least(),
        });
        // Scores that a vector does not see were not computed, and must have no weight.
        for (z, &(low, high)) in step.ranges[..stride / cx.kernels.lanes].iter().enumerate() {
            let lane = z * cx.kernels.lanes;
            for key in hull.clone().filter(|key| !(low..high).contains(key)) {
                let own = key * stride + lane..key * stride + lane + cx.kernels.lanes;
                [&mut *p, &mut *a].into_iter().for_each(|x| x[own.clone()].fill(0.0));
            }
        }
    }

    /// Adds a step to dQ and dR of the tile, and to dK and dV of its keys.
    fn add_step(
        &self,
        (step, start): (&Step, usize),
        stride: usize,
        (stats, b): (&LaneStats, &PerLane),
        keys: &mut KeySums<'_>,
        workspace: &mut Workspace<'_>,
    ) {
        let cx = self.cx;
        let from = keys.keys_from(start);
        let Workspace { p, u, a, g, q, r, d_o, d_q, d_r, copy, ahead, .. } = workspace;
        let hull = step.hull();
        let part = (start + hull.start) * stride..(start + hull.end) * stride;
        let seen = cx.only_seen(from, cx.d_pad, &p[start * stride..], step, stride, copy);
        let seen_keys = seen.rows.at(hull.start, 0);
        let (p, u, a) = (&mut p[part.clone()], &mut u[part.clone()], &mut a[part]);
        let g = &mut g[..p.len()];
        form(stats, b, stride, p, u, a, g);
        // p is W now, a is gl, g is gu.
        let size = hull.len();
        let (first, width) = (start + hull.start, cx.d_pad);
        let [gl, gu, w] = [&*a, &*g, &*p].map(|x| Matrix::new(x, stride));
        for (to, left) in [(d_q, gl), (d_r, gu)] {
            let to = MatrixMut::at(to, width, 0, 0);
            cx.kernels.gemm_transposed(to, left, seen_keys, [stride, width, size], Sum::Onto, ahead);
        }
        for (left, right) in [(gl, &*q), (gu, &*r)] {
            let to = MatrixMut::at(keys.d_k, width, first, 0);
            cx.kernels.gemm(to, left, Matrix::new(right, width), [size, width, stride], Sum::Onto, ahead);
        }
        let to = MatrixMut::at(keys.d_v, cx.dv_pad, first, 0);
        let right = Matrix::new(d_o, cx.dv_pad);
        cx.kernels.gemm(to, w, right, [size, cx.dv_pad, stride], Sum::Onto, ahead);
    }

    /// Writes dQ and dR of a tile.
    fn store_tile(&self, tile: &Tile, workspace: &mut Workspace<'_>) {
        let (cx, sequence) = (self.cx, &self.cx.bound.sequences()[tile.sequence]);
        workspace.d_q.iter_mut().for_each(|x| *x *= cx.problem.scale());
        for (i, sums) in [(0, &*workspace.d_q), (1, &*workspace.d_r)] {
            let rows = cx.query_layout(self.strides[i], sequence);
            for lane in 0..tile.rows {
                let (q, head) = cx.query_and_head(tile, lane);
                let row = &sums[lane * cx.d_pad..lane * cx.d_pad + cx.d];
                // SAFETY: every (sequence, head, query) belongs to one tile, and that to one item.
                unsafe { self.out[i].store(cx.kernels, rows.at(q, head), row) };
            }
        }
    }

    /// LSE, t and t' of a tile's lanes; lanes past the last row have no weight.
    fn lane_stats(&self, tile: &Tile, d_o: &[f32]) -> LaneStats {
        let cx = self.cx;
        let sequence = &cx.bound.sequences()[tile.sequence];
        let mut stats = LaneStats { lse: [f32::INFINITY; MAX_LANES], mean: [0.0; MAX_LANES], dot: [0.0; MAX_LANES] };
        let (o, lse, mean) = (self.forward.own.o.view(), self.forward.own.lse.view(), self.forward.mean.view());
        let o_rows = cx.query_layout(o.strides(), sequence);
        let lse_rows = cx.bound.lse_layout(lse.strides(), sequence);
        for lane in 0..tile.rows {
            let (q, head) = cx.query_and_head(tile, lane);
            let own = lse.at(lse_rows.at(q, head)) as f32;
            stats.lse[lane] = if own == f32::NEG_INFINITY { f32::INFINITY } else { own };
            stats.mean[lane] = mean.at(lse_rows.at(q, head)) as f32;
            let at = o_rows.at(q, head);
            let own = &d_o[lane * cx.dv_pad..lane * cx.dv_pad + cx.dv];
            stats.dot[lane] = own.iter().enumerate().map(|(i, d)| d * o.at(at + i) as f32).sum();
        }
        stats
    }
}

/// LSE, t and t' of each lane.
struct LaneStats {
    lse: PerLane,
    mean: PerLane,
    dot: PerLane,
}

/// Computes from P, U and P a: W into `p`, gl into `a`, gu into `g`.
fn form(stats: &LaneStats, b: &PerLane, stride: usize, p: &mut [f32], u: &[f32], a: &mut [f32], g: &mut [f32]) {
    let all = p.chunks_exact_mut(stride).zip(u.chunks_exact(stride)).zip(a.chunks_exact_mut(stride));
    for (((p, u), a), g) in all.zip(g.chunks_exact_mut(stride)) {
        for lane in 0..stride {
            let weight = p[lane];
            // A key that this row does not see may hold anything, so its u is replaced, not multiplied by 0.
            let off = if weight == 0.0 { 0.0 } else { stats.mean[lane] - u[lane] };
            let pull = a[lane] - weight * b[lane];
            a[lane] = a[lane] - weight * stats.dot[lane] + off * pull;
            g[lane] = -pull;
            p[lane] = weight * (1.0 + off);
        }
    }
}
