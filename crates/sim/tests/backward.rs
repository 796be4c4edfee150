//! The kernels of the gradients on the simulator: clean, and right by the tolerance rule.

use crate::common::backward::Case;
use crate::common::{Random, sim};
use fulgurite_core::{DType, Mask};
use fulgurite_kernels::attention::backward::d_q::exact;
use fulgurite_kernels::attention::backward::{Adds, BackwardConfig, Order};
use fulgurite_ptx::device::{Device, Stream, Value};
use fulgurite_ptx::{Kernel, Target};
use fulgurite_sim::{Options, Sim};
use std::sync::Arc;

#[test]
fn gradients_are_right() {
    let base = Case::base;
    base().check(&sim(1));
    Case { dims: [128, 128], ..base() }.check(&sim(2));
    Case { dims: [128, 128], mask: Mask::causal(), q_len: 200, k_len: 260, blocks: 2, ..base() }.check(&sim(3));
    Case { mask: Mask::causal(), q_len: 300, k_len: 200, d_lse: true, ..base() }.check(&sim(4));
    // Keys after the last diagonal, and queries after it, see nothing and are seen by nobody.
    Case { mask: Mask::causal_top_left(), q_len: 70, k_len: 300, ..base() }.check(&sim(5));
    Case { mask: Mask::window(Some(40), Some(-8)), q_len: 333, k_len: 290, dims: [128, 64], ..base() }.check(&sim(6));
    Case { mask: Mask::window(Some(20), Some(3)), heads: [6, 2], batch: 2, blocks: 3, ..base() }.check(&sim(7));
    Case { dtype: DType::F16, dims: [96, 40], heads: [3, 3], q_len: 1, k_len: 7, ..base() }.check(&sim(8));
    Case { dims: [8, 16], q_len: 129, k_len: 1, ..base() }.check(&sim(9));
    Case { dims: [48, 64], heads: [1, 1], q_len: 130, ..base() }.check(&sim(10));
    // Nobody sees anything.
    Case { mask: Mask::window(Some(-400), None), ..base() }.check(&sim(15));
    Case { dims: [256, 256], q_len: 150, k_len: 140, ..base() }.check(&sim(11));
    Case { dims: [192, 128], mask: Mask::causal(), q_len: 100, k_len: 200, d_lse: true, ..base() }.check(&sim(12));
    Case { dims: [136, 72], mask: Mask::window(Some(30), Some(9)), blocks: 2, ..base() }.check(&sim(13));
    Case { dims: [64, 256], mask: Mask::causal(), dtype: DType::F16, k_len: 65, ..base() }.check(&sim(14));
}

/// Pairs of blocks: several at once, a last tile whose second half has no keys, heads that share keys, steps that only one of
/// the two tiles sees, tiles of one step.
#[test]
fn pairs_of_blocks_are_right() {
    let base = Case { dims: [256, 256], blocks: 4, ..Case::base() };
    for (case, seed) in [
        Case { mask: Mask::causal(), q_len: 300, k_len: 420, heads: [2, 1], ..base.clone() },
        Case { mask: Mask::causal(), q_len: 70, k_len: 330, heads: [2, 2], dtype: DType::F16, ..base.clone() },
        Case { mask: Mask::causal_top_left(), dims: [200, 136], q_len: 190, k_len: 300, ..base.clone() },
        Case { q_len: 64, k_len: 1100, heads: [1, 1], d_lse: true, ..base },
    ]
    .into_iter()
    .zip(30..)
    {
        assert!(case.plan().config().share.ctas() == 2, "{case:?}");
        case.check(&sim(seed));
    }
}

/// Sums whose places are used again while blocks still add, and parts of d_q that come with tiles: more pairs than places, last
/// bands that are not whole, parts that have no step, parts of more steps than are read at once.
#[test]
fn sums_are_used_again() {
    for (i, dims) in [[64, 64], [128, 128], [48, 16]].into_iter().enumerate() {
        let base = Case { dims, batch: 3, heads: [4, 2], blocks: 4, ..Case::base() };
        for (case, seed) in [
            Case { q_len: 150, k_len: 130, ..base.clone() },
            Case { q_len: 90, k_len: 200, mask: Mask::causal(), heads: [3, 3], ..base.clone() },
            Case { q_len: 30, k_len: 290, dtype: DType::F16, heads: [5, 5], batch: 1, blocks: 3, ..base.clone() },
            Case { q_len: 400, k_len: 60, heads: [4, 1], ..base },
        ]
        .into_iter()
        .zip(40 + 4 * i as u64..)
        {
            let usual = case.plan().config();
            assert!(usual.rounds, "{case:?}");
            let config = BackwardConfig { pairs: Some(1 + i as u32 % 2), sums: Some(2), ..usual };
            Case { config: Some(config), ..case }.check(&sim(seed));
        }
    }
}

/// The last band may have more pairs than the others: as many as there are places for between a part and its tile.
#[test]
fn the_last_band_is_larger() {
    let case = Case { q_len: 150, k_len: 290, mask: Mask::causal(), heads: [11, 11], blocks: 5, ..Case::base() };
    for (sums, seed) in [(4, 70), (8, 71), (10, 72)] {
        let config = BackwardConfig { pairs: Some(2), sums: Some(sums), ..case.plan().config() };
        assert!(config.rounds);
        Case { config: Some(config), ..case.clone() }.check(&sim(seed));
    }
    // In a fixed order where it is asked for: each pair's own order stays.
    let fixed = Case { order: Order::Fixed, ..case };
    let with = |last: u32, seed: u64| {
        let config = BackwardConfig { pairs: Some(2), sums: Some(10), last: Some(last), ..fixed.plan().config() };
        Case { config: Some(config), ..fixed.clone() }.check(&sim(seed)).d_q
    };
    assert_eq!(with(1, 73), with(6, 74));
}

/// Sums that are zeroed while the first tiles run: all but those of one pair, or of two; with places that are used again, and in
/// a fixed order.
#[test]
fn sums_are_zeroed_meanwhile() {
    for (i, (dims, rounds)) in [([128, 128], false), ([128, 96], true), ([64, 64], false)].into_iter().enumerate() {
        let base = Case { dims, q_len: 200, k_len: 150, heads: [6, 6], blocks: 3, ..Case::base() };
        for (case, seed) in [
            base.clone(),
            Case { mask: Mask::causal(), heads: [4, 2], batch: 2, blocks: 5, ..base.clone() },
            Case { order: Order::Fixed, q_len: 90, dtype: DType::F16, ..base.clone() },
            // Without keys nothing runs that could zero anything.
            Case { k_len: 0, ..base },
        ]
        .into_iter()
        .zip(110 + 4 * i as u64..)
        {
            let config =
                BackwardConfig { rounds, zeroed: Some(1 + i as u32 % 2), sums: Some(4), ..case.plan().config() };
            Case { config: Some(config), ..case }.check(&sim(seed));
        }
    }
}

/// Steps that a mask cuts and steps that it does not, where each head of keys has one of queries: many of either, of one and
/// none, keys that end inside of a tile, and a first step that is the only one.
#[test]
fn single_heads_under_masks_are_right() {
    let base = Case { heads: [2, 2], blocks: 3, ..Case::base() };
    for (dims, mut seed) in [([128, 128], 80), ([64, 64], 90)] {
        for (q_len, k_len, mask) in [
            (520, 300, Mask::causal()),
            (300, 520, Mask::causal_top_left()),
            (400, 130, Mask::none()),
            (500, 256, Mask::none()),
            (70, 200, Mask::causal()),
            (450, 400, Mask::window(Some(100), None)),
        ] {
            Case { dims, q_len, k_len, mask, ..base.clone() }.check(&sim(seed));
            seed += 1;
        }
    }
}

/// Long and short steps: tiles of many steps and of one, heads that share keys, rows that are padded.
#[test]
fn warpgroups_take_turns() {
    for (i, (dims, rows)) in
        [([128, 128], 64), ([128, 96], 80), ([64, 64], 128), ([64, 48], 80)].into_iter().enumerate()
    {
        let base = Case { dims, blocks: 3, ..Case::base() };
        for (case, seed) in [
            Case { q_len: 300, k_len: 260, heads: [2, 1], ..base.clone() },
            Case { mask: Mask::causal(), q_len: 200, k_len: 420, heads: [2, 2], dtype: DType::F16, ..base.clone() },
            Case { q_len: 64, k_len: 400, heads: [1, 1], d_lse: true, ..base },
        ]
        .into_iter()
        .zip(60 + 3 * i as u64..)
        {
            for rounds in [false, true] {
                let config = BackwardConfig { rows, rounds, ..case.plan().config() };
                Case { config: Some(config), ..case.clone() }.check(&sim(seed));
            }
        }
    }
}

/// The last tiles cut into pieces: runs that end one tile and begin the next, tiles of three pieces, whole tiles before them, fewer
/// tiles than blocks, heads that share keys, a last tile that has few keys; with sums that are used again.
#[test]
fn pieces_of_tiles_are_joined() {
    // A tile more than there are blocks to deal out to, of which two have sums at the same time.
    let one_more = Case { heads: [133, 133], q_len: 130, k_len: 100, blocks: 3, ..Case::base() };
    let config = BackwardConfig { rows: 64, pairs: Some(1), sums: Some(2), join: Some(0), ..one_more.plan().config() };
    let one_more = Case { config: Some(config), ..one_more };
    assert!(config.rounds && one_more.plan().cuts_tiles());
    one_more.check(&sim(79));
    for (i, (dims, rows, rounds)) in
        [([128, 128], 64, true), ([128, 96], 80, false), ([64, 64], 128, true)].into_iter().enumerate()
    {
        let base = Case { dims, blocks: 4, ..Case::base() };
        for (case, seed) in [
            Case { q_len: 300, k_len: 700, heads: [1, 1], ..base.clone() },
            Case { q_len: 420, k_len: 260, heads: [4, 2], dtype: DType::F16, ..base.clone() },
            Case { q_len: 600, k_len: 100, heads: [1, 1], blocks: 5, d_lse: true, ..base },
        ]
        .into_iter()
        .zip(80 + 4 * i as u64..)
        {
            let config = BackwardConfig { rows, rounds, join: Some(0), ..case.plan().config() };
            let cut = Case { config: Some(config), ..case };
            assert!(cut.plan().cuts_tiles(), "{cut:?}");
            let [one, other] = [seed, seed + 100].map(|seed| cut.check(&sim(seed)));
            assert_eq!([one.d_k, one.d_v], [other.d_k, other.d_v], "{cut:?}");
        }
    }
}

/// A ring of queries, one of keys, tiles of d_z in step with the first, and sums from many blocks: in any order.
#[test]
fn gradients_are_clean_whatever_the_order() {
    let mut random = Random(11);
    for seed in crate::common::seeds() {
        let mut below = |n: u64| random.below(n) as usize;
        let mask = match below(4) {
            0 => Mask::none(),
            1 => Mask::causal(),
            2 => Mask::causal_top_left(),
            _ => Mask::window(Some(below(90) as i64), Some(below(30) as i64 - 10)),
        };
        let kv_heads = 1 + below(2);
        let case = Case {
            q_len: 1 + below(290),
            k_len: 1 + below(290),
            heads: [kv_heads * (1 + below(2)), kv_heads],
            batch: 1,
            dims: [[64, 64], [128, 128], [192, 128], [256, 256]][seed as usize % 4],
            mask,
            dtype: if below(2) == 0 { DType::Bf16 } else { DType::F16 },
            d_lse: below(3) == 0,
            order: if below(3) == 0 { Order::Fixed } else { Order::Any },
            blocks: 1 + below(3) as u32,
            config: None,
        };
        case.check(&sim(seed));
    }
}

/// Steps of 80 queries under masks, which short sequences take 64 for.
#[test]
fn long_steps_under_masks_are_right() {
    let base = Case { dims: [128, 128], config: Some(BackwardConfig::hopper(128)), ..Case::base() };
    for (case, seed) in [
        Case { mask: Mask::causal(), q_len: 350, k_len: 300, blocks: 2, ..base.clone() },
        Case { mask: Mask::window(Some(50), Some(7)), q_len: 170, k_len: 260, dtype: DType::F16, ..base.clone() },
        Case { mask: Mask::causal_top_left(), q_len: 90, k_len: 400, d_lse: true, dims: [128, 80], ..base },
    ]
    .into_iter()
    .zip(20..)
    {
        case.check(&sim(seed));
    }
}

/// d_k and d_v have one order of additions; d_q only where one block adds.
#[test]
fn gradients_of_keys_do_not_depend_on_the_order() {
    let case = Case { q_len: 260, k_len: 300, mask: Mask::causal(), heads: [4, 2], blocks: 4, ..Case::base() };
    let [one, other] = [1, 2].map(|seed| case.check(&sim(seed)));
    assert_eq!((one.d_k, one.d_v), (other.d_k, other.d_v));
}

/// In a fixed order all gradients have the same bits, whoever comes first.
#[test]
fn a_fixed_order_gives_the_same_bits() {
    let base = Case { heads: [2, 1], blocks: 5, order: Order::Fixed, ..Case::base() };
    for case in [
        Case { q_len: 200, k_len: 520, ..base.clone() },
        Case { q_len: 400, k_len: 520, dims: [128, 128], mask: Mask::causal(), ..base.clone() },
        Case { q_len: 500, k_len: 560, mask: Mask::causal(), ..base.clone() },
        Case { q_len: 300, k_len: 300, dims: [192, 128], mask: Mask::window(Some(70), Some(4)), ..base.clone() },
        // In pairs of blocks: more tiles than pairs, of which some begin at later steps.
        Case { q_len: 200, k_len: 520, dims: [256, 256], mask: Mask::causal(), blocks: 6, ..base },
    ] {
        // All blocks at once: of two, it does not matter who comes first.
        let run = |seed| case.check(&Sim::new(Options { seed, resident: case.blocks, ..Options::default() }));
        let first = run(1);
        assert!((2..5).all(|seed| run(seed) == first), "{case:?}");
    }
}

/// However many steps a turn has, each step takes the tiles in the same order: also where tiles begin and end inside a turn.
#[test]
fn turns_of_any_length_give_the_same_bits() {
    // f16: of bf16 too few bits are left to show the order.
    let base = Case { heads: [2, 1], blocks: 5, order: Order::Fixed, dtype: DType::F16, ..Case::base() };
    for case in [
        Case { q_len: 400, k_len: 520, dims: [128, 128], mask: Mask::causal(), ..base.clone() },
        Case { q_len: 600, k_len: 390, dims: [128, 128], mask: Mask::window(Some(70), Some(4)), ..base.clone() },
        Case { q_len: 700, k_len: 560, mask: Mask::causal(), ..base },
    ] {
        let with = |turn: u32| {
            let config = BackwardConfig { turn, ..case.plan().config() };
            assert_eq!(config.adds, Adds::CopyEngine);
            let options = Options { seed: turn.into(), resident: case.blocks, ..Options::default() };
            Case { config: Some(config), ..case.clone() }.check(&Sim::new(options)).d_q
        };
        let one = with(1);
        assert!([2, 4].iter().all(|turn| with(*turn) == one), "{case:?}");
    }
}

/// Exact sums on the simulator: rows of 32 terms, a lane each, one element a row.
fn exact_sums(rows: &[[f32; 32]], seed: u64) -> Vec<f32> {
    let sim = Sim::new(Options { seed, ..Options::default() });
    let add = Kernel::build("terms", Target::HOPPER, |k| {
        let (terms, words, to) = (k.pointer::<f32>("terms"), k.pointer::<u64>("words"), k.pointer::<f32>("to"));
        k.threads(32, |w| {
            let x = terms.load(w, w.cta() * 32 + w.thread());
            exact::add(w, words, to, w.cta().to_u64(), x);
        });
    });
    let count = rows.len();
    let words = 8 * exact::WORDS as usize * count;
    let memory = [128 * count, words, 4 * count].map(|bytes| sim.allocate(bytes as u64).unwrap());
    let bytes: Vec<u8> = rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
    sim.upload(memory[0].span(), &bytes).unwrap();
    sim.upload(memory[1].span(), &vec![0; words]).unwrap();
    sim.upload(memory[2].span(), &vec![0; 4 * count]).unwrap();
    let [terms, words, to] = [0, 1, 2].map(|i| Value::Pointer(memory[i].span()));
    let run = |kernel: Kernel, grid: usize, args: &[Value]| {
        sim.launch(&sim.load(Arc::new(kernel)).unwrap(), [grid as u32, 1, 1], args, Stream::default()).unwrap();
    };
    run(add.unwrap(), count, &[terms, words.clone(), to.clone()]);
    let grid = count.div_ceil(exact::THREADS as usize);
    run(exact::kernel(Target::HOPPER).unwrap(), grid, &[words, to, Value::U32(count as u32)]);
    let bytes = crate::common::download(&sim, &memory[2]);
    bytes.chunks_exact(4).take(count).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
}

/// Terms of all sizes, also such that cancel, are summed to the last place but one, and alike in any order.
#[test]
fn exact_sums_are_exact() {
    let mut random = Random(5);
    let mut rows: Vec<[f32; 32]> = (0..40)
        .map(|row| {
            std::array::from_fn(|_| {
                let exponent = random.below(2 + 2 * row) as i32 - row as i32;
                (random.unit() - 0.5) * 2f32.powi(exponent)
            })
        })
        .collect();
    // What is left when all but a little cancels.
    rows.push(std::array::from_fn(|i| [1.5e30, 3.0e-20, -1.5e30, 2.0e-20][i % 4]));
    rows.push(std::array::from_fn(|i| [f32::MAX, -f32::MAX][i % 2]));
    rows.push(std::array::from_fn(|i| if i == 7 { -1e-28 } else { 0.0 }));
    rows.push([f32::MAX; 32]);
    rows.push([-f32::MAX; 32]);
    rows.push(std::array::from_fn(|i| if i == 3 { f32::NEG_INFINITY } else { 1.0 }));
    rows.push(std::array::from_fn(|i| if i == 30 { f32::NAN } else { 1.0 }));
    let got = exact_sums(&rows, 1);
    for (row, got) in rows.iter().zip(&got) {
        // Large and small apart: no f64 holds both.
        let sum = |pick: &dyn Fn(f32) -> bool| row.iter().filter(|x| pick(**x)).map(|&x| f64::from(x)).sum::<f64>();
        let want = (sum(&|x| x.abs() >= 1e10) + sum(&|x| x.abs() < 1e10 || x.is_nan())) as f32;
        let near = (f64::from(*got) - f64::from(want)).abs() <= 2f64.powi(-22) * f64::from(want.abs());
        assert!(near || *got == want || (got.is_nan() && want.is_nan()), "{got} of {want}: {row:?}");
    }
    // The same terms the other way round, and other seeds.
    let turned: Vec<[f32; 32]> = rows.iter().map(|row| std::array::from_fn(|i| row[31 - i])).collect();
    let bits = |sums: &[f32]| sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&exact_sums(&turned, 2)));
}
