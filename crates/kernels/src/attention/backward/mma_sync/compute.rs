//! The only role of the `mma.sync` kernel of backward: eight warps that load, multiply and store one tile of keys.
//!
//! A step: s | p, written | d_p | d_z, written | barrier | d_v, d_k, d_q | add d_q. Its first wait for the ring tells all warps
//! that the step before is done with p, d_z and the stages.

use crate::attention::backward::cursor::Cursor;
use crate::attention::backward::marks::{HeadRows, MarkedPart, Marks};
use crate::attention::backward::mma_sync::params::SyncParams;
use crate::attention::backward::mma_sync::stages::{StepOperand, SyncStages, When};
use crate::attention::backward::modifiers::ModifierRole;
use crate::attention::backward::state::Call;
use crate::attention::backward::tiles::{Of, Work};
use crate::attention::backward::walk::{HiddenElements, probabilities_of, score_gradients_of};
use crate::attention::backward::{Features, KernelShape};
use crate::params::Params;
use crate::parts::mask::{Block, Limits};
use crate::parts::nonfinite::some_half_not_finite;
use crate::parts::row_memory::Storers;
use fulgurite_core::Exp;
use fulgurite_ptx::{
    Group, Half, Major, Pair, Pointer, RoleBarrier, RowView, Scope, Shared, Swizzle, Tile, TileOperand, TileShape, Val,
    WarpAcc, Word,
};
use std::marker::PhantomData;

/// Threads of a warpgroup.
const THREADS: u32 = 128;
/// Elements of d_q that a warpgroup's threads have in eight columns.
const EIGHT: u32 = 4 * THREADS;

/// Elements of a row in a chunk of the widest swizzle.
const CHUNK: u32 = 64;

/// The kernel under construction: parameters and shared memory.
pub(super) struct SyncBackward<'k, const M: usize, T> {
    params: SyncParams<'k>,
    exp: Exp,
    /// Queries of a step.
    rows: u32,
    keys: u32,
    /// Elements of a row of q and k, and of a row of v and o, as products see them.
    dims: [u32; 2],
    k: Tile<'k>,
    v: Tile<'k>,
    /// p and d_z of a step. Rows are keys.
    p: Tile<'k>,
    d_z: Tile<'k>,
    stages: SyncStages<'k>,
    /// Where the tile's results and marks go: sequence, head, first row of the sequence, first key. In shared memory, because
    /// registers are short between the tile's begin and its end.
    marked: Shared<'k, u32>,
    number: PhantomData<T>,
}

/// A tile with rows of `cols` elements, whose halves are whole chunks.
fn halved<T: Half>(rows: u32, cols: u32) -> TileShape {
    let whole = TileShape::new(T::NUMBER, rows, cols);
    let swizzles = [Swizzle::B128, Swizzle::B64, Swizzle::B32].map(|swizzle| TileShape { swizzle, ..whole });
    swizzles.into_iter().find(|shape| (cols / 2).is_multiple_of(shape.chunk())).unwrap_or(whole)
}

impl<'k, const M: usize, T: Half> SyncBackward<'k, M, T>
where
    Pair<T>: Word,
{
    pub fn new(p: &Params<'k, Call>, features: &Features, shape: &KernelShape) -> Self {
        let (builder, config, dims) = (p.builder(), shape.config, shape.dims);
        let (keys, rows) = (config.keys(), config.rows);
        let params = SyncParams::declare(p, features, shape);
        let operand = |name, cols| builder.tile(name, TileShape::new(T::NUMBER, keys, cols));
        let result = |name| builder.tile(name, halved::<T>(keys, rows));
        SyncBackward {
            params,
            exp: features.exp,
            rows,
            keys,
            dims,
            k: operand("k", dims[0]),
            v: operand("v", dims[1]),
            p: result("p"),
            d_z: result("d_z"),
            stages: SyncStages::new::<T>(builder, config.depth, rows, dims),
            marked: builder.shared("marked", 4),
            number: PhantomData,
        }
    }

    /// Computes the CTA's tile, if it has one.
    pub fn run(&self, w: &Scope<'k, Group>) {
        let all = w.role_barrier();
        let tiles = self.params.map.tiles(w);
        let some = tiles.seek(w, w.cta());
        w.when(some, |w| {
            let work = tiles.find(w, w.cta());
            SyncTile::new(w, self, work, all).run(w);
        });
    }
}

/// A tile of keys, and a warp's part of it.
struct SyncTile<'a, 'k, const M: usize, T> {
    kernel: &'a SyncBackward<'k, M, T>,
    work: Work<'k>,
    /// Index of the warpgroup.
    own: Val<'k, u32>,
    /// Index of the warp in its warpgroup.
    warp: Val<'k, u32>,
    all: RoleBarrier,
    s: WarpAcc<'k, M>,
    d_p: WarpAcc<'k, M>,
    d_k: WarpAcc<'k, M>,
    d_v: WarpAcc<'k, M>,
    d_q: WarpAcc<'k, 1>,
    limits: Limits<'k, WarpAcc<'k, M>>,
    modifiers: Option<ModifierRole<'a, 'k, WarpAcc<'k, M>>>,
    here: Cursor<'k>,
}

impl<'a, 'k, const M: usize, T: Half> SyncTile<'a, 'k, M, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, kernel: &'a SyncBackward<'k, M, T>, work: Work<'k>, all: RoleBarrier) -> Self {
        let (params, [d, dv], half) = (&kernel.params, kernel.dims, kernel.rows / 2);
        SyncTile {
            own: w.group(),
            warp: w.thread_in_group() / 32,
            all,
            s: w.warp_accumulators(half),
            d_p: w.warp_accumulators(half),
            d_k: w.warp_accumulators(d / 2),
            d_v: w.warp_accumulators(dv / 2),
            // Warpgroups share the columns of d_q, or its rows, of which a warp has 16.
            d_q: w.warp_accumulators(if half < 64 { d / 2 } else { d }),
            limits: Limits::of_keys(w, &params.map.spans),
            modifiers: params.modifiers.as_ref().map(|modifiers| modifiers.in_role(w, params.scale)),
            here: Cursor::new(w, &params.map, &work),
            kernel,
            work,
        }
    }

    /// Queries of which a warpgroup computes p and d_z.
    fn half(&self) -> u32 {
        self.kernel.rows / 2
    }

    /// The first key of the tile.
    fn first_key(&self) -> Val<'k, u32> {
        self.work.tile * self.kernel.keys
    }

    /// Starts the copy of q or d_o of this step, or of the next one if there is one.
    fn load(&self, w: &Scope<'k, Group>, (side, when): (StepOperand, When), to: Tile<'k>) {
        let (params, here) = (&self.kernel.params, &self.here);
        let copy = |w: &Scope<'k, Group>, [head, step]: [Val<'k, u32>; 2]| {
            let of = if side == StepOperand::Queries { Of::Q } else { Of::DO };
            let rows = params.rows(of, &self.work, head, step * self.kernel.rows);
            self.kernel.stages.ring().copy(w, to, rows);
        };
        match when {
            When::Now => copy(w, [here.head.get(), here.step.get()]),
            When::Next => w.when(here.left.get().gt(1), |w| copy(w, here.next())),
        }
    }

    /// Sets the modifiers for the current query head.
    fn set_head(&self, w: &Scope<'k, Group>) {
        if let Some(modifiers) = &self.modifiers {
            modifiers.set(w, &self.kernel.params.map, &self.work, self.here.head.get(), self.first_key());
        }
    }

    /// Sets the limits of the tile's keys.
    fn set_limits(&self, w: &Scope<'k, Group>) {
        let (map, first) = (&self.kernel.params.map, self.first_key().to_i32());
        let (k_len, lengths) = (map.k_len(self.work.sequence), map.lengths(self.work.sequence));
        self.limits.set_keys(w, first, k_len.to_i32(), lengths);
    }

    /// A warpgroup's half of the columns of a tile that is summed over its rows.
    fn columns(&self, tile: Tile<'k>, all: u32, zero: Val<'k, u32>) -> (TileOperand<'k>, Val<'k, u32>) {
        let half = all / 2;
        match half.is_multiple_of(CHUNK) {
            // Whole chunks lie at constant distances, which take no registers.
            true => (tile.cols(self.own, half).operand(Major::Outer), zero),
            false => (tile.operand(Major::Outer), self.own * half),
        }
    }

    /// Starts the copies of keys and values, and of the first stages.
    fn start(&self, w: &Scope<'k, Group>) {
        let SyncBackward { params, stages, k, v, .. } = self.kernel;
        let (map, first) = (&params.map, self.first_key());
        let head = map.kv_head(self.work.head);
        // These copies belong to the group of the first stage.
        stages.ring().copy(w, *k, params.rows(Of::K, &self.work, head, first));
        stages.ring().copy(w, *v, params.rows(Of::V, &self.work, head, first));
        stages.start(w, &|w, what, to| self.load(w, what, to));
        if params.parts.is_none() {
            let MarkedPart { of, first: [first, _], .. } = map.marked(&self.work, [w.constant(0u32), first]);
            w.when(self.own.eq(0) & w.thread_in_group().eq(0), |w| {
                for (i, word) in [of.batch, of.head, of.start, first].into_iter().enumerate() {
                    self.kernel.marked.store(w, i as u32, word);
                }
            });
        }
        self.set_limits(w);
        self.set_head(w);
        self.d_k.clear();
        self.d_v.clear();
    }

    /// Numbers of the thread's columns of a step, from the padded rows of all heads.
    fn numbers(&self, w: &Scope<'k, Group>, of: Pointer<'k, f32>) -> Vec<[Val<'k, f32>; 2]> {
        let (map, here, rows) = (&self.kernel.params.map, &self.here, self.kernel.rows);
        let number = map.steps_before_head(&self.work, here.head.get()) + here.step.get();
        let own = self.own * self.half() + WarpAcc::<'k, M>::first_col(w);
        let from = of.at_wide(number.mul_wide(rows)).at(own);
        (0..self.half() / 8).map(|eight| from.load_some(w, 8 * eight)).collect()
    }

    fn step(&self, w: &Scope<'k, Group>) {
        let SyncBackward { params, exp, rows, dims, k, v, p, d_z, stages, .. } = self.kernel;
        let SyncTile { own, warp, s, d_p, d_k, d_v, d_q, here, .. } = self;
        let (half, keys) = (self.half(), *warp * (16 * M as u32));
        let (inner, zero) = (|tile: Tile<'k>| tile.operand(Major::Inner), w.constant(0u32));
        let outer = |tile: Tile<'k>| tile.operand(Major::Outer);

        let shift = self.numbers(w, params.shift);
        let q = stages.queries(w, &|w, what, to| self.load(w, what, to));
        s.clear();
        w.multiply_warp(s, (inner(*k), keys), (inner(q), *own * half));
        let first = (here.step.get() * *rows + *own * half).to_i32();
        let modifiers = self.modifiers.as_ref();
        let slopes = modifiers.map(|modifiers| modifiers.apply(w, s, first, modifiers.block_kind(w, first)));
        // Limits of single rows take no registers outside of blocks that need a mask.
        self.limits.apply_set(w, s, &Block { first, full: None }, |w| self.set_limits(w));
        let hidden = HiddenElements::of(params.modifiers.as_ref());
        probabilities_of((*exp, hidden), params.scale_log2, s, |eight| shift[eight as usize], |_| {});
        s.write_with::<T>(w, p.cols(*own, half), |_, x| x);

        let delta = self.numbers(w, params.delta);
        let d_o = stages.outputs(w);
        d_p.clear();
        w.multiply_warp(d_p, (inner(*v), keys), (inner(d_o), *own * half));
        let delta = |eight: u32| delta[eight as usize];
        match modifiers.zip(slopes.as_ref()) {
            Some((modifiers, slopes)) => modifiers.gradients(w, [s, d_p], delta, slopes, |_| {}),
            None => score_gradients_of([s, d_p], delta, |_| {}),
        }
        d_p.write_with::<T>(w, d_z.cols(*own, half), |_, x| x);
        w.sync_role(&self.all);

        w.multiply_warp(d_v, (inner(*p), keys), self.columns(d_o, dims[1], zero));
        w.multiply_warp(d_k, (inner(*d_z), keys), self.columns(q, dims[0], zero));
        d_q.clear();
        let (row, key) = match d_q.cols() == dims[0] {
            true => (*own * 64 + *warp * 16, (outer(*k), zero)),
            false => (*warp * 16, self.columns(*k, dims[0], zero)),
        };
        w.multiply_warp(d_q, (outer(*d_z), row), key);
        self.add(w);
    }

    /// Adds d_q to its sums, which have the order of accumulators: `[head][step][warpgroup][eight columns][4][thread]`.
    /// Neighbouring threads add to neighbouring words.
    fn add(&self, w: &Scope<'k, Group>) {
        let (params, here) = (&self.kernel.params, &self.here);
        let number = params.map.steps_before_head(&self.work, here.head.get()) + here.step.get();
        let sums = params.sums.at_wide(number.mul_wide(self.kernel.rows * self.kernel.dims[0]));
        let sums = sums.at(self.own * (64 * self.d_q.cols()) + w.thread_in_group());
        for (i, x) in self.d_q.elements().enumerate() {
            let (eight, plane) = (i as u32 / 4, i as u32 % 4);
            sums.add(w, eight * EIGHT + plane * THREADS, x);
        }
    }

    /// Stores d_k and d_v, or this CTA's parts of them.
    fn finish(&self, w: &Scope<'k, Group>) {
        let SyncBackward { params, dims: [d, dv], .. } = self.kernel;
        match (&params.parts, &params.marks) {
            (Some(parts), _) => {
                for (of, result, cols) in [(Of::DK, &self.d_k, d / 2), (Of::DV, &self.d_v, dv / 2)] {
                    parts.store_warp(w, &params.map, &self.work, (of, result), self.own * cols);
                }
            }
            (None, Some(marks)) => self.store(w, marks),
            (None, None) => unreachable!("bug in fulgurite: d_k and d_v have marks or parts"),
        }
    }

    /// Stores d_k and d_v through the memory of k and v, which no warp reads any longer.
    fn store(&self, w: &Scope<'k, Group>, marks: &[Marks<'k>; 2]) {
        let SyncBackward { params, keys, dims: [d, dv], k, v, .. } = self.kernel;
        let [to_k, to_v] = [(k, *d), (v, *dv)].map(|(tile, cols)| tile.overlay(halved::<T>(*keys, cols)));
        w.sync_role(&self.all);
        self.d_k.write_with::<T>(w, to_k.cols(self.own, d / 2), |_, x| x * params.scale);
        self.d_v.write_with::<T>(w, to_v.cols(self.own, dv / 2), |_, x| x);
        w.sync_role(&self.all);
        let threads = Storers { own: self.own * THREADS + w.thread_in_group(), count: 2 * THREADS };
        let first = self.kernel.marked.load(w, 3);
        for ((of, tile, cols), marks) in [(Of::DK, to_k, *d), (Of::DV, to_v, *dv)].into_iter().zip(marks) {
            let to = params.rows(of, &self.work, self.work.head, first);
            // Marks are made from what is stored: sums in registers leave no room for the numbers of their rows.
            threads.store_and(w, tile, [*keys, cols * 2 / 16], to, |w, row, unit, words| {
                w.when_rarely(some_half_not_finite::<T>(&words), |w| {
                    let [batch, head, start] = [0u32, 1, 2].map(|i| self.kernel.marked.load(w, i));
                    marks.mark_eight(w, HeadRows { batch, head, start }, first + row, unit);
                });
            });
        }
    }

    fn run(&self, w: &Scope<'k, Group>) {
        self.start(w);
        w.repeat(|w, leave| {
            self.step(w);
            leave.when(self.here.left.get().eq(1));
            self.here.forward(w, |w| self.set_head(w));
        });
        self.finish(w);
    }
}
