//! Masks, modifiers, softmax and epilogue on accumulators with one row per thread, whose products threads compute.
//!
//! Tensor memory has this layout. The test shows that a machine with tensor memory needs no mathematics of its own.

use crate::attention::scoring::{Scoring, ScoringInputs};
use crate::params::{Params, Program};
use crate::parts::epilogue::{Corner, Epilogue, Output};
use crate::parts::mask::{Block, Lengths, Spans};
use crate::parts::modifier::{AuxArgs, Modifiers, Parameters, Tanh, TilePosition};
use crate::parts::row_sums::Added;
use crate::parts::schedule::Work;
use crate::parts::softmax::{Numerators, Softmax};
use fulgurite_core::random::Rng;
use fulgurite_core::{Exp, Mask, Problem, Rescale};
use fulgurite_ptx::device::{Buffer, Device, Span, Stream};
use fulgurite_ptx::{
    Fragment, Group, GroupBarrier, Number, Pointer, RowAcc, RowView, Scope, Target, Tile, TileShape, Val, Warpgroups,
    bf16,
};
use fulgurite_sim::{Options, Sim};
use std::f32::consts::LOG2_E;

const ROWS: u32 = 128;
const QUERIES: u32 = 100;
const KEYS: u32 = 72;
/// Keys of a block, and columns of v.
const COLS: u32 = 24;
const DV: u32 = 16;
const CAP: f64 = 3.0;

struct Call {
    scores: Span,
    v: Span,
    o: Span,
    lse: Span,
    counters: Span,
    aux: Vec<AuxArgs>,
}

/// O by the thread that has the row.
struct RowOutput<'a, 'k> {
    o: Pointer<'k, u32>,
    barrier: &'a GroupBarrier,
}

impl<'k> Output<'k> for RowOutput<'_, 'k> {
    fn reserve(&self, w: &Scope<'k, Group>, _: u32) {
        w.sync_group(self.barrier);
    }

    fn store(&self, w: &Scope<'k, Group>, _: &Work<'k>, staging: Tile<'k>, _: Corner<'k>) {
        w.sync_group(self.barrier);
        // Another row than the thread's own: the staging buffer is what is tested.
        let row = w.thread_in_group() ^ 1;
        w.when(row.lt(QUERIES), |w| {
            for unit in 0..DV / 8 {
                let words = staging.read_unit(w, row, w.constant(unit));
                self.o.store_some(w, row * (DV / 2) + unit * 4, words);
            }
        });
    }
}

/// The kernel's tile: scores from memory, and p v by the thread of the row.
struct OneTile<'k> {
    scores: Pointer<'k, f32>,
    v: Pointer<'k, f32>,
    s: RowAcc<'k>,
    p: Fragment<'k, bf16>,
    o: RowAcc<'k>,
}

impl<'k> OneTile<'k> {
    fn load(&self, w: &Scope<'k, Group>, block: u32) {
        let row = RowAcc::first_row(w) * KEYS + block * COLS;
        (0..COLS).for_each(|col| self.s.set(col as usize, self.scores.load(w, row + col)));
    }

    fn multiply(&self, w: &Scope<'k, Group>, block: u32) {
        for key in 0..COLS {
            let pair = self.p.pair(key as usize / 2);
            let p = if key % 2 == 0 { pair << 16 } else { pair & 0xffff_0000 }.to_f32_bits();
            let sums: Vec<Val<'k, f32>> = self.o.elements().collect();
            for (col, sum) in sums.into_iter().enumerate() {
                let v = self.v.load(w, w.constant((block * COLS + key) * DV + col as u32));
                self.o.set(col, p.mul_add(v, sum));
            }
        }
    }
}

fn build(p: &Params<'_, Call>, mask: &Mask, modifiers: &Modifiers, rescale: Rescale) {
    let parameters = Parameters::declare(p, modifiers, |call: &Call| &call.aux);
    let scores = p.array::<f32>("scores", |call| call.scores);
    let v = p.array::<f32>("v", |call| call.v);
    let o = p.array::<u32>("o", |call| call.o);
    let lse = p.array::<f32>("lse", |call| call.lse);
    let counters = p.array::<u32>("counters", |call| call.counters);
    let staging = p.builder().tile("o", TileShape::new(Number::Bf16, ROWS, DV));
    let spans = Spans::of(mask);
    p.builder().role("compute", Warpgroups(1), |w| {
        let zero = w.constant(0u32);
        let factor = if modifiers.score.is_some() { modifiers.factors()[0] } else { LOG2_E };
        let inputs = ScoringInputs {
            modifiers,
            parameters: &parameters,
            spans: &spans,
            scale: w.constant(factor),
            tanh: Tanh::of(Number::F16),
        };
        let power = inputs.power(w);
        let fold = Softmax::<RowAcc>::of_view(w, power, rescale, Exp::Native, Added::ByThreads, counters);
        let scoring: Scoring<'_, '_, RowAcc> = inputs.scoring(w, power);
        let (q_len, k_len) = (w.constant(QUERIES as i32), w.constant(KEYS as i32));
        scoring.limits.set(
            w,
            w.constant(0i32),
            Lengths { k: k_len, bottom_right: k_len - q_len, top_left: w.constant(0i32) },
        );
        if scoring.modifies {
            let (heads, rows) = (vec![zero], vec![RowAcc::first_row(w).to_i32()]);
            scoring.modify.set(w, &TilePosition { batch: zero, heads, rows, q_len, k_len });
        }
        let (s, p, o_acc) = (w.row_accumulators(COLS), w.row_fragment(COLS), w.row_accumulators(DV));
        let tile = OneTile { scores, v, s, p, o: o_acc };
        (0..DV as usize).for_each(|i| tile.o.set(i, w.constant(0.0f32)));
        for block in 0..KEYS / COLS {
            let first = w.constant((block * COLS) as i32);
            tile.load(w, block);
            let at = Block { first, full: None };
            match block {
                0 => {
                    scoring.settle(w, &tile.s, first, &at);
                    fold.first(w, &tile.s, &Numerators::whole(&tile.p));
                }
                _ => scoring.fold(
                    w,
                    &fold,
                    (&tile.s, &Numerators::whole(&tile.p), &tile.o),
                    (&at, &|| first),
                    Some(&|w| tile.load(w, block)),
                ),
            }
            tile.multiply(w, block);
        }
        let totals = fold.totals(w, &tile.o);
        let barrier = w.group_barrier();
        let epilogue = Epilogue {
            lse,
            lse_rows: w.constant(QUERIES),
            heads: w.constant(1u32),
            q_len: Some(w.constant(QUERIES)),
            packed: false,
            sinks: None,
            own: zero,
            first_column: None,
            scale: power,
            output: &RowOutput { o, barrier: &barrier },
            staging: &[staging],
            part: DV,
        };
        let work = Work { row: zero, head: zero, batch: zero, blocks: [zero, zero], sequence: None, tile: None };
        epilogue.run::<bf16>(w, &work, &tile.o, totals);
    });
}

fn upload(sim: &Sim, values: &[f64]) -> Buffer {
    let buffer = sim.allocate(4 * values.len() as u64).unwrap();
    let bytes: Vec<u8> = values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
    sim.upload(buffer.span(), &bytes).unwrap();
    buffer
}

/// Largest errors of o and of the LSE.
fn errors(mask: &Mask, softcap: bool, rescale: Rescale) -> [f64; 2] {
    let problem = Problem::builder().dense(1, QUERIES as usize, KEYS as usize).heads(1, 1).head_dim(16);
    let problem = if softcap { problem.softcap(CAP as f32) } else { problem }.build().unwrap();
    let modifiers = Modifiers::new(problem.score_program(), None, problem.aux(), 128);
    let build = |p: &Params<'_, Call>| build(p, mask, &modifiers, rescale);
    let program = Program::build("one_row", Target::HOPPER, build).unwrap();
    let mut rng = Rng::new(7);
    // The maximum of a row rises from block to block, so that sums are rescaled.
    let scores: Vec<f64> = rng.normals((ROWS * KEYS) as usize, 2.0);
    let scores: Vec<f64> = scores.iter().enumerate().map(|(i, x)| x + (i % KEYS as usize) as f64 / 12.0).collect();
    let v = rng.normals((KEYS * DV) as usize, 1.0);
    let sim = Sim::new(Options::default());
    let (scores_at, v_at) = (upload(&sim, &scores), upload(&sim, &v));
    let [o, lse] = [QUERIES * DV / 2, QUERIES].map(|n| sim.allocate(4 * u64::from(n)).unwrap());
    let counters = sim.zeroed(16).unwrap();
    let call = Call {
        scores: scores_at.span(),
        v: v_at.span(),
        o: o.span(),
        lse: lse.span(),
        counters: counters.span(),
        aux: Vec::new(),
    };
    let launch = program.launch([1, 1, 1], &call);
    let module = sim.load(launch.kernel.clone()).unwrap();
    sim.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
    let mut bytes = vec![0; (QUERIES * DV * 2) as usize];
    sim.download(o.span(), &mut bytes).unwrap();
    let got_o: Vec<f64> = bytes.chunks(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f64()).collect();
    let mut bytes = vec![0; (QUERIES * 4) as usize];
    sim.download(lse.span(), &mut bytes).unwrap();
    let got_lse: Vec<f64> = bytes.chunks(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).collect();
    let mut worst = [0.0f64; 2];
    for row in 0..QUERIES as usize {
        let keys = mask.keys(row, QUERIES as usize, KEYS as usize);
        let score = |key: usize| {
            let x = scores[row * KEYS as usize + key];
            if softcap { CAP * (x / CAP).tanh() } else { x }
        };
        let sum: f64 = keys.clone().map(|key| score(key).exp()).sum();
        let expected = if keys.is_empty() { f64::NEG_INFINITY } else { sum.ln() };
        if got_lse[row] != expected {
            worst[1] = worst[1].max((got_lse[row] - expected).abs());
        }
        for col in 0..DV as usize {
            let terms = keys.clone().map(|key| score(key).exp() / sum * v[key * DV as usize + col]);
            worst[0] = worst[0].max((got_o[row * DV as usize + col] - terms.sum::<f64>()).abs());
        }
    }
    worst
}

#[test]
fn rows_are_those_of_f64() {
    let policies = [Rescale::Always, Rescale::Lazy(8.0), Rescale::Optimistic(1.0)];
    for mask in [Mask::none(), Mask::causal(), Mask::window(Some(20), Some(3))] {
        for (softcap, rescale) in [false, true].into_iter().flat_map(|cap| policies.map(|policy| (cap, policy))) {
            let [o, lse] = errors(&mask, softcap, rescale);
            assert!(o < 2e-2 && lse < 1e-3, "{mask:?}, softcap {softcap}, {rescale:?}: o {o:e}, LSE {lse:e}");
        }
    }
}
