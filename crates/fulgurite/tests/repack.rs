//! Tensors that lie so that TMA cannot take them, on the simulated GPU: copied by launches before and after,
//! against the oracle by the tolerance rule. What lies between elements is NaN, and must neither be read nor written.

use fulgurite_core::expr::{k, q};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Inputs, Mask, Problem, ProblemBuilder, Tensor, compare};
use fulgurite_kernels::attention::forward::plan::{Copying, DeviceTensor, ForwardPlan as Plan, Tensors};
use fulgurite_ptx::device::{Buffer, Device, Span, Stream};
use fulgurite_sim::Sim;
use std::sync::Arc;

/// Where a tensor lies: elements before its first, and that many more than packed along batch, row and head.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Gaps {
    before: u64,
    after: [u64; 3],
}

const NONE: Gaps = Gaps { before: 0, after: [0; 3] };
/// A NaN in both types.
const POISON: u16 = 0x7fff;

/// A tensor on the device, with its gaps.
struct Spread {
    /// Frees the memory.
    _memory: Buffer,
    whole: Span,
    placed: DeviceTensor,
}

impl Spread {
    fn new(device: &Sim, shape: &[usize], gaps: Gaps) -> Spread {
        let [b, s, h, d] = [shape[0], shape[1], shape[2], shape[3]].map(|n| n as u64);
        let head = d + gaps.after[2];
        let row = h * head + gaps.after[1];
        let batch = s * row + gaps.after[0];
        let memory = device.allocate(2 * (gaps.before + b * batch) + 64).unwrap();
        let whole = memory.span();
        let placed =
            DeviceTensor { span: whole.from(2 * gaps.before), shape: [b, s, h, d], strides: [batch, row, head] };
        let spread = Spread { _memory: memory, whole, placed };
        device.upload(whole, &POISON.to_le_bytes().repeat(whole.bytes() as usize / 2)).unwrap();
        spread
    }

    /// Where each element lies among all, in row-major order.
    fn places(&self) -> impl Iterator<Item = usize> + '_ {
        let ([b, s, h, d], [batch, row, head]) = (self.placed.shape, self.placed.strides);
        let first = (self.placed.span.address() - self.whole.address()) / 2;
        let heads = move |b: u64, s: u64| (0..h).map(move |h| first + b * batch + s * row + h * head);
        let rows = (0..b).flat_map(move |b| (0..s).flat_map(move |s| heads(b, s)));
        rows.flat_map(move |at| (0..d).map(move |d| (at + d) as usize))
    }

    fn words(&self, device: &Sim) -> Vec<u16> {
        let mut bytes = vec![0; self.whole.bytes() as usize];
        device.download(self.whole, &mut bytes).unwrap();
        bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
    }

    fn fill(&self, device: &Sim, values: &Tensor) {
        let mut words = self.words(device);
        let values = values.view().to_f64();
        self.places().zip(values).for_each(|(at, x)| words[at] = half::bf16::from_f64(x).to_bits());
        device.upload(self.whole, &words.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
    }

    /// The elements; what lies between them must be as it was.
    fn read(&self, device: &Sim) -> Vec<f64> {
        let words = self.words(device);
        let own: std::collections::HashSet<usize> = self.places().collect();
        let written = (0..words.len()).find(|at| !own.contains(at) && words[*at] != POISON);
        assert_eq!(written, None, "a word between elements was written");
        self.places().map(|at| half::bf16::from_bits(words[at]).to_f64()).collect()
    }
}

/// Runs a problem with q, k, v and o spread like that, checks the result, and says what was copied.
fn check(name: &str, builder: ProblemBuilder, gaps: [Gaps; 4], used_k: Option<&[i32]>) -> Vec<&'static str> {
    let problem = builder.dtype(DType::Bf16).build().unwrap();
    let mut rng = Rng::new(11);
    let mut draw =
        |shape: &[usize]| Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
    let inputs = [draw(&problem.q_shape()), draw(&problem.k_shape()), draw(&problem.v_shape())];
    let device = Sim::default();
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let spread: Vec<Spread> = shapes.iter().zip(gaps).map(|(shape, gaps)| Spread::new(&device, shape, gaps)).collect();
    spread.iter().zip(&inputs).for_each(|(spread, values)| spread.fill(&device, values));
    let plan = Plan::new(&problem, None).unwrap();
    let zeros = |bytes: u64| {
        let memory = device.allocate(bytes.max(64)).unwrap();
        device.upload(memory.span(), &vec![0; memory.span().bytes() as usize]).unwrap();
        memory
    };
    let lse_count: usize = problem.lse_shape().iter().product();
    let (lse, counters, scratch) =
        (zeros(4 * lse_count as u64), zeros(plan.counter_bytes()), zeros(plan.scratch_bytes()));
    let rows = [0, 1, 2, 3].map(|i| spread[i].placed);
    let mut tensors = Tensors::new(rows, lse.span(), counters.span());
    tensors.scratch = Some(scratch.span());
    let used = used_k.map(|used| {
        let memory = zeros(4 * used.len() as u64);
        device.upload(memory.span(), &used.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        memory
    });
    tensors.used[1] = used.as_ref().map(Buffer::span);
    let copying = Copying::new(device.target()).unwrap();
    let copies = plan.copies(&rows);
    let ready = plan.clone().ready(Arc::new(plan.kernel(device.target()).unwrap()));
    let room = zeros(copies.as_ref().map_or(0, |copies| copies.bytes()));
    match &copies {
        Some(copies) => {
            let launches =
                ready.with_copies(copies, &copying, &tensors, room.span(), device.multiprocessors()).unwrap();
            launches.run(&device, Stream::default(), &mut |kernel| device.load(kernel.clone())).unwrap();
        }
        None => {
            let launch = ready.launch(&tensors, device.multiprocessors()).unwrap().unwrap();
            let module = device.load(launch.kernel.clone()).unwrap();
            device.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
        }
    }
    device.synchronize(Stream::default()).unwrap();
    let o = Tensor::from_f64(DType::Bf16, &spread[3].read(&device), &problem.o_shape()).unwrap();
    let mut bytes = vec![0; 4 * lse_count];
    device.download(lse.span(), &mut bytes).unwrap();
    let lse: Vec<f64> =
        bytes.chunks_exact(4).map(|w| f64::from(f32::from_le_bytes([w[0], w[1], w[2], w[3]]))).collect();
    let got = Forward { o, lse: Tensor::from_f64(DType::F32, &lse, &problem.lse_shape()).unwrap() };
    let used = used_k.map(|used| {
        let numbers: Vec<f64> = used.iter().map(|&n| f64::from(n)).collect();
        Tensor::from_f64(DType::I32, &numbers, &[used.len()]).unwrap()
    });
    let [q, k, v] = &inputs;
    let inputs = Inputs::new(q.view(), k.view(), v.view()).used_lengths(None, used.as_ref().map(Tensor::view));
    for (tensor, verdict) in compare::check_forward(&inputs.bind(&problem).unwrap(), &got, 0) {
        assert!(verdict.ok(), "{name}: {tensor}: {verdict}");
    }
    copies.map_or(Vec::new(), |copies| copies.names())
}

fn dense(batch: usize, q_len: usize, k_len: usize) -> ProblemBuilder {
    Problem::builder().dense(batch, q_len, k_len).heads(4, 2).head_dim(64)
}

#[test]
fn any_strides_and_any_even_address() {
    let odd = Gaps { before: 1, after: [5, 3, 1] };
    let between = Gaps { before: 3, after: [0, 0, 0] };
    let rows = Gaps { before: 0, after: [0, 2, 0] };
    let all = ["q", "k", "v", "o"];
    assert_eq!(check("all odd", dense(2, 70, 90).mask(Mask::causal()), [odd; 4], None), all);
    assert_eq!(check("only k", dense(1, 66, 130), [NONE, rows, NONE, NONE], None), ["k"]);
    assert_eq!(check("only o", dense(1, 66, 30), [NONE, NONE, NONE, between], None), ["o"]);
    let head_dims = dense(1, 65, 40).head_dims(96, 32).mask(Mask::window(9, 3));
    assert_eq!(check("two dims", head_dims, [between, rows, odd, odd], None), all);
}

#[test]
fn hidden_elements_and_few_queries() {
    let odd = Gaps { before: 1, after: [5, 3, 1] };
    let comb = Mask::custom(((k() + q() * 2) % 3).differs(0));
    check("comb", dense(1, 70, 80).mask(comb), [odd; 4], None);
    check("few", dense(2, 3, 600).mask(Mask::causal()), [odd; 4], None);
}

#[test]
fn sequences_that_begin_between_rows_where_lengths_differ() {
    // Rows of 2 x 64 elements: 8 more are no whole row.
    let between = Gaps { before: 0, after: [8, 0, 0] };
    let builder = dense(2, 70, 90).used_lengths(false, true);
    assert_eq!(check("used", builder, [NONE, between, NONE, NONE], Some(&[90, 33])), ["k"]);
    // Lengths are the same: TMA takes it.
    assert_eq!(check("equal", dense(2, 70, 90), [NONE, between, NONE, NONE], None), [""; 0]);
}

#[test]
fn what_lies_well_is_not_copied() {
    let wide = Gaps { before: 8, after: [128, 8, 16] };
    assert_eq!(check("wide", dense(2, 70, 90), [wide; 4], None), [""; 0]);
}

#[test]
fn odd_addresses_are_refused() {
    let plan = Plan::new(&dense(1, 70, 90).dtype(DType::Bf16).build().unwrap(), None).unwrap();
    let device = Sim::default();
    let memory = Span::new(4097, 1 << 20);
    let rows = [[70, 4], [90, 2], [90, 2], [70, 4]].map(|[s, h]| DeviceTensor::packed(memory, [1, s, h, 64]));
    let copies = plan.copies(&rows).unwrap();
    let ready = plan.clone().ready(Arc::new(plan.kernel(device.target()).unwrap()));
    let tensors = Tensors::new(rows, memory, memory);
    let refused = ready.with_copies(&copies, &Copying::new(device.target()).unwrap(), &tensors, memory, 132);
    assert_eq!(refused.err().unwrap().to_string(), "`q` at the odd address 0x1001");
}

#[test]
fn head_dims_that_are_no_multiple_of_8() {
    for (d, dv, q_len, mask) in [
        (60, 60, 70, Mask::causal()),
        (1, 3, 66, Mask::none()),
        (33, 130, 65, Mask::none()),
        (7, 20, 2, Mask::causal()),
    ] {
        let problem = Problem::builder().dense(1, q_len, 90).heads(4, 2).head_dims(d, dv).mask(mask);
        crate::common::check(&format!("{d}, {dv}, {q_len} queries"), DType::F16, problem, &Default::default());
    }
}
