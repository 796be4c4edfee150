//! Kinds of blocks on the simulator beside every element of the mask, and beside the interval arithmetic of the host.

use super::*;
use crate::parts::arguments::DeviceAux;
use fulgurite_core::expr::{Coverage, Domain, Env, Expr, batch, head, k, k_len, load, q, q_len, select};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Mask, ProblemBuilder, Tensor};
use fulgurite_ptx::device::{Buffer, Device, Stream};
use fulgurite_sim::{Options, Sim};

const BATCH: usize = 2;
const HEADS: usize = 2;

/// Uploads words, and frees nothing: the simulator ends with the test.
fn uploaded(sim: &Sim, words: &[u32]) -> Buffer {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let buffer = sim.allocate(bytes.len().max(16) as u64).unwrap();
    sim.upload(buffer.span(), &bytes).unwrap();
    buffer
}

fn downloaded(sim: &Sim, span: Span) -> Vec<u32> {
    let mut bytes = vec![0; span.bytes() as usize];
    sim.download(span, &mut bytes).unwrap();
    bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// A case: a problem, its auxiliary tensors, and the queries and keys in use.
struct Case {
    problem: Problem,
    aux: Vec<Tensor>,
    used: [Option<Vec<i32>>; 2],
}

impl Case {
    /// The kinds by lists and by table, which must agree; 2 bits each, in the order of the table.
    fn kinds(&self, blocks: &ExpressionBlocks) -> Vec<u32> {
        let sim = Sim::new(Options::default());
        let words = |tensor: &Tensor| -> Vec<u32> {
            let values = tensor.view().to_f64();
            let word = |x: f64| if tensor.dtype() == DType::I32 { x as i32 as u32 } else { (x as f32).to_bits() };
            values.into_iter().map(word).collect()
        };
        let memory: Vec<Buffer> = self.aux.iter().map(|tensor| uploaded(&sim, &words(tensor))).collect();
        let aux = || {
            let all = memory.iter().zip(&self.aux).map(|(buffer, tensor)| {
                let strides = tensor.view().strides().iter().map(|&n| n as u64).collect();
                AuxArgs::new(&DeviceAux { span: buffer.span(), strides }, tensor.shape())
            });
            all.collect::<Vec<_>>()
        };
        let lengths = self
            .used
            .clone()
            .map(|used| used.map(|used| uploaded(&sim, &used.iter().map(|&n| n as u32).collect::<Vec<_>>())));
        let used = [0, 1].map(|side: usize| lengths[side].as_ref().map(Buffer::span));
        let run = |form, extremes, results| {
            let kernels = blocks.kernels(Target::HOPPER, form).unwrap();
            for launch in blocks.launches(&kernels, (aux(), used), extremes, results) {
                let module = sim.load(launch.kernel.clone()).unwrap();
                sim.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
                assert!(sim.findings().is_empty(), "{:?}", sim.findings());
            }
        };
        let of_table = sim.allocate(4 * blocks.pairs()).unwrap();
        let extremes = sim.allocate(blocks.extremes_bytes().max(16)).unwrap();
        run(Form::Table, extremes.span(), Results::Table(of_table.span()));
        let table = downloaded(&sim, of_table.span());

        let workspace = sim.allocate(blocks.list_bytes()).unwrap();
        let (lists, extremes) = blocks.lists(workspace.span());
        run(Form::Lists, extremes, Results::Lists(lists));
        let width = lists.widths[0] as usize;
        let mut listed = vec![0; table.len()];
        for (kind, (counts, blocks)) in (1..).zip(lists.counts.into_iter().zip(lists.blocks)) {
            let (counts, blocks) = (downloaded(&sim, counts), downloaded(&sim, blocks));
            for (row, &count) in counts.iter().enumerate() {
                let list = &blocks[row * width..][..count as usize];
                assert!(list.is_sorted_by(|a, b| a < b), "{list:?}");
                list.iter().for_each(|&column| listed[row * width + column as usize] = kind);
            }
        }
        assert_eq!(listed, table, "lists and table");
        table
    }

    /// Checks every block: hidden and full ones by their elements, and that none is partial that the host decides.
    /// Returns how many were decided.
    fn check(&self, text: &str) -> usize {
        let blocks = ExpressionBlocks::of_any_length(&self.problem).unwrap_or_else(|| panic!("{text} was not planned"));
        let program = &blocks.bounded.program_for_tests();
        let views: Vec<_> = self.aux.iter().map(Tensor::view).collect();
        let (spec, sizes) = (blocks.spec(), blocks.sizes());
        let kinds = self.kinds(&blocks);
        let mut decided = 0;
        for (at, &kind) in kinds.iter().enumerate() {
            let [q_blocks, k_blocks] = sizes.blocks.map(|n| n as usize);
            let (column, row, pair) = (at % k_blocks, at / k_blocks % q_blocks, at / k_blocks / q_blocks);
            let (sequence, head) = (pair / spec.heads, pair % spec.heads);
            let len = |side: usize, most: usize| {
                self.used[side].as_ref().map_or(most, |used| (used[sequence].max(0) as usize).min(most))
            };
            let lengths = [len(0, self.problem.max_q_len()), len(1, self.problem.max_k_len())];
            let rows = (row * spec.rows).min(lengths[0])..((row + 1) * spec.rows).min(lengths[0]);
            let cols = (column * spec.cols).min(lengths[1])..((column + 1) * spec.cols).min(lengths[1]);
            let sees = |i: usize, j: usize| {
                let [q_len, k_len] = lengths;
                program.eval(&Env { score: 0.0, batch: sequence, head, q: i, k: j, q_len, k_len, aux: &views }).bool()
            };
            let of_block = || format!("{text}: sequence {sequence}, head {head}, queries {rows:?}, keys {cols:?}");
            if cols.is_empty() {
                assert_eq!(kind, 0, "{}", of_block());
                continue;
            }
            let mut all = rows.clone().flat_map(|i| cols.clone().map(move |j| (i, j)));
            match kind {
                0 => assert!(!all.any(|(i, j)| sees(i, j)), "{} is not hidden", of_block()),
                2 => assert!(all.all(|(i, j)| sees(i, j)), "{} is not full", of_block()),
                _ if rows.is_empty() => {}
                _ => {
                    let domain = Domain {
                        batch: sequence..sequence + 1,
                        heads: head..head + 1,
                        q: rows.clone(),
                        k: cols.clone(),
                        q_len: (lengths[0], lengths[0]),
                        k_len: (lengths[1], lengths[1]),
                        aux: &views,
                    };
                    assert_eq!(program.coverage(&domain), Coverage::Partial, "{} is partial", of_block());
                }
            }
            decided += usize::from(kind != 1);
        }
        decided
    }
}

fn base(rng: &mut Rng) -> ([usize; 2], ProblemBuilder) {
    let lengths = [rng.range(1..300), rng.range(1..300)];
    let builder = Problem::builder().dense(BATCH, lengths[0], lengths[1]).heads(HEADS, 1).head_dim(64);
    (lengths, builder.dtype(DType::Bf16))
}

/// Auxiliary tensors: ascending ids by sequence and position, small numbers by head, floats by key, flags by query.
fn tensors(rng: &mut Rng, [q_len, k_len]: [usize; 2], wild: bool) -> Vec<(&'static str, Tensor)> {
    let mut ids = |n: usize| -> Vec<i32> {
        let each = rng.range(20..150);
        (0..BATCH * n).map(|i| (i % n / each) as i32 - if wild && rng.chance(0.01) { i32::MAX } else { 0 }).collect()
    };
    let (ids_q, ids_k) = (ids(q_len), ids(k_len));
    let of_head: Vec<i32> = (0..HEADS).map(|_| rng.range(0..200) as i32).collect();
    let mut floats: Vec<f32> = (0..k_len).map(|i| i as f32 + rng.normal() as f32).collect();
    if wild {
        floats[rng.range(0..k_len)] = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    }
    let flags: Vec<i32> = (0..q_len).map(|i| i32::from(i / 100 % 2 == 0)).collect();
    let cells: Vec<i32> = (0..16).map(|_| rng.range(0..2) as i32).collect();
    vec![
        ("ids_q", Tensor::new(ids_q, &[BATCH, q_len]).unwrap()),
        ("ids_k", Tensor::new(ids_k, &[BATCH, k_len]).unwrap()),
        ("of_head", Tensor::new(of_head, &[HEADS]).unwrap()),
        ("floats", Tensor::new(floats, &[k_len]).unwrap()),
        ("flags", Tensor::new(flags, &[q_len]).unwrap()),
        ("cells", Tensor::new(cells, &[4, 4]).unwrap()),
    ]
}

fn integer(rng: &mut Rng, depth: u32) -> Expr {
    if depth == 0 || rng.chance(0.2) {
        return match rng.range(0..10) {
            0..2 => q(),
            2..4 => k(),
            4 => q_len() - k_len(),
            5 => load("ids_q", [batch(), q()]),
            6 => load("ids_k", [batch(), k()]),
            7 => load("of_head", [head()]),
            8 => load("cells", [q() / 128, k() / 128]) * 50,
            _ => Expr::from(rng.range(0..200) as i32 - 50),
        };
    }
    let (a, b) = (integer(rng, depth - 1), integer(rng, depth - 1));
    match rng.range(0..9) {
        0 => a + b,
        1 => a - b,
        2 => a.min(b),
        3 => a.max(b),
        4 => a * (rng.range(0..7) as i32 - 3),
        5 => a / (rng.range(0..260) as i32 - 60),
        6 => a % (rng.range(0..400) as i32),
        7 => a.abs(),
        _ => select(condition(rng, depth - 1), a, b),
    }
}

fn condition(rng: &mut Rng, depth: u32) -> Expr {
    if depth > 1 && rng.chance(0.6) {
        let (a, b) = (condition(rng, depth - 1), condition(rng, depth - 1));
        return match rng.range(0..5) {
            0..2 => a & b,
            2..4 => a | b,
            _ => !a,
        };
    }
    let depth = depth.min(2);
    match rng.range(0..7) {
        0 => integer(rng, depth).equals(integer(rng, depth)),
        1 => integer(rng, depth).less(integer(rng, depth)),
        2 => integer(rng, depth).at_most(integer(rng, depth)),
        3 => load("floats", [k()]).less((q() - 40).to_float()),
        4 => load("flags", [q()]).equals(1),
        5 => (integer(rng, depth).to_float() * 0.5 - 3.0).floor().more(integer(rng, depth)),
        _ => k().at_most(q() + k_len() - q_len()),
    }
}

/// Random masks over tensors, batch, heads and lengths: no block is hidden that has a visible element, none is full that
/// has a hidden one, and all that the host decides are decided.
#[test]
fn blocks_are_those_of_the_host() {
    let (mut planned, mut decided) = (0, 0);
    for seed in 0..24 {
        let mut rng = Rng::new(seed);
        let (lengths, mut builder) = base(&mut rng);
        let all = tensors(&mut rng, lengths, seed % 4 == 3);
        let mask = condition(&mut rng, 3);
        let mask = Mask::custom(mask).and(if rng.chance(0.3) { Mask::causal() } else { Mask::none() });
        let names = mask.expr().unwrap().aux_names();
        let (mut aux, mut text) = (Vec::new(), format!("seed {seed}, {lengths:?}"));
        for (name, tensor) in all.into_iter().filter(|(name, _)| names.iter().any(|own| &**own == *name)) {
            builder = builder.aux(name, tensor.dtype(), tensor.shape());
            aux.push(tensor);
        }
        text += &format!(", {}", mask.expr().unwrap());
        let used = [rng.chance(0.3), rng.chance(0.3)];
        let problem = builder.mask(mask).used_lengths(used[0], used[1]).build().unwrap();
        let used = [0, 1].map(|side: usize| {
            used[side].then(|| (0..BATCH).map(|_| rng.range(0..lengths[side] + 3) as i32 - 1).collect())
        });
        if ExpressionBlocks::of_any_length(&problem).is_none() {
            continue;
        }
        planned += 1;
        decided += Case { problem, aux, used }.check(&text);
    }
    assert!(planned > 12 && decided > 2 * planned, "{planned} planned, {decided} blocks decided");
}

/// Documents under a causal mask: exactly the blocks with a visible element are listed, and tensors are read once.
#[test]
fn documents_are_exact() {
    let (q_len, k_len) = (700, 700);
    let ids: Vec<i32> = (0..q_len as i32).map(|i| i / 150).collect();
    let mask = load("ids", [q()]).equals(load("ids", [k()])) & q().at_least(k());
    let builder = Problem::builder().dense(1, q_len, k_len).heads(4, 4).head_dim(64).dtype(DType::Bf16);
    let problem = builder.aux("ids", DType::I32, &[q_len]).mask(Mask::custom(mask)).build().unwrap();
    let case = Case { problem, aux: vec![Tensor::new(ids, &[q_len]).unwrap()], used: [None, None] };
    let blocks = ExpressionBlocks::of_any_length(&case.problem).unwrap();
    assert_eq!((blocks.spec().batch, blocks.spec().heads), (1, 1));
    let kinds = case.kinds(&blocks);
    let sees = |row: usize, column: usize| {
        let keys = column * 128..(column * 128 + 128).min(k_len);
        keys.into_iter().any(|j| (row * 128..(row * 128 + 128).min(q_len)).any(|i| i >= j && i / 150 == j / 150))
    };
    for (at, &kind) in kinds.iter().enumerate() {
        assert_eq!(kind != 0, sees(at / 6, at % 6), "{}, {}", at / 6, at % 6);
    }
}

/// Masks that no interval can decide, and short problems, get no launches.
#[test]
fn what_cannot_gain_is_not_planned() {
    let planned = |len: usize, mask: Expr| {
        let builder = Problem::builder().dense(1, len, len).heads(1, 1).head_dim(64).dtype(DType::Bf16);
        let builder = builder.aux("pairs", DType::I32, &[len, len]).aux("ids", DType::I32, &[len]);
        ExpressionBlocks::new(&builder.mask(Mask::custom(mask)).build().unwrap()).is_some()
    };
    let documents = || load("ids", [q()]).equals(load("ids", [k()]));
    let pairs = || load("pairs", [q(), k()]).equals(1);
    assert!(planned(2048, documents()) && planned(2048, pairs() & documents()));
    assert!(planned(2048, load("pairs", [q() / 128, k() / 128]).equals(1)));
    assert!(!planned(1024, documents()), "short");
    assert!(!planned(2048, pairs()), "read for each element");
    assert!(!planned(2048, ((q() * 3 + k()) % 5).less(3)), "every block has all remainders");
    assert!(!planned(2048, load("ids", [batch()]).more(3)), "no position");
    assert!(!planned(2048, q().to_float().tanh().less(k().to_float().exp())), "functions without bounds");
}
