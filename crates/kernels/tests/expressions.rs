//! Attention whose mask or score is an expression, on the simulator: results pass the tolerance rule, and the kernels compute
//! the blocks that the mask shows, no others, and each of them once.

use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::expr::{head, k, k_len, load, q, q_len};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Gradients, Inputs, Mask, Problem, ProblemBuilder, Tensor, oracle};
use fulgurite_kernels::attention::backward::Order;
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Tensors as BackwardTensors};
use fulgurite_kernels::attention::forward::plan::{ConfigTable, DeviceAux, DeviceTensor, ForwardPlan, Tensors};
use fulgurite_kernels::operator::{Executable, Memory, Plan};
use fulgurite_ptx::Target;
use fulgurite_ptx::device::{Buffer, Device, Span, Stream};
use fulgurite_sim::{Options, Sim};
use half::bf16;

/// A problem with the contents of its auxiliary tensors, and keys in use of each sequence.
struct Case {
    problem: Problem,
    aux: Vec<Tensor>,
    used_k: Option<Tensor>,
}

/// Inputs, and memory of the simulator with the same contents.
struct Drawn {
    rows: [Tensor; 4],
    memory: Vec<Buffer>,
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    if let Some(all) = tensor.as_slice::<f32>() {
        return all.iter().flat_map(|x| x.to_le_bytes()).collect();
    }
    match tensor.as_slice::<i32>() {
        Some(all) => all.iter().flat_map(|x| x.to_le_bytes()).collect(),
        None => tensor.as_slice::<bf16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn uploaded(sim: &Sim, tensor: &Tensor) -> Buffer {
    let bytes = bytes(tensor);
    let buffer = sim.allocate(bytes.len().max(16) as u64).unwrap();
    sim.upload(buffer.span().first(bytes.len() as u64), &bytes).unwrap();
    buffer
}

/// Writes the contents of memory into a tensor.
fn download(sim: &Sim, from: Span, to: &mut Tensor) {
    let size = if to.dtype() == DType::F32 { 4 } else { 2 };
    let mut bytes = vec![0; to.shape().iter().product::<usize>() * size];
    sim.download(from.first(bytes.len() as u64), &mut bytes).unwrap();
    let values: Vec<f64> = match size {
        4 => bytes.chunks(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).collect(),
        _ => bytes.chunks(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f64()).collect(),
    };
    to.view_mut().write_f64(&values);
}

fn placed(buffer: &Buffer, shape: &[usize]) -> DeviceTensor {
    DeviceTensor::packed(buffer.span(), std::array::from_fn(|i| shape[i] as u64))
}

impl Case {
    fn inputs<'a>(&'a self, rows: &'a [Tensor; 4]) -> Inputs<'a> {
        let [q, k, v, _] = rows.each_ref().map(Tensor::view);
        let specs = self.problem.aux().iter().zip(&self.aux);
        let inputs = specs.fold(Inputs::new(q, k, v), |inputs, (spec, tensor)| inputs.aux(&spec.name, tensor.view()));
        inputs.used_lengths(None, self.used_k.as_ref().map(Tensor::view))
    }

    /// Random q, k, v and d_o.
    fn drawn(&self, sim: &Sim) -> Drawn {
        let (mut rng, problem) = (Rng::new(5), &self.problem);
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
        let rows = shapes.map(|shape| {
            let values = rng.normals(shape.iter().product(), 1.0);
            Tensor::from_f64(DType::Bf16, &values, &shape).unwrap()
        });
        let memory = rows.iter().chain(&self.aux).chain(&self.used_k).map(|tensor| uploaded(sim, tensor)).collect();
        Drawn { rows, memory }
    }

    fn device_aux(&self, memory: &[Buffer]) -> Vec<DeviceAux> {
        let all = memory[4..].iter().zip(&self.aux).map(|(buffer, tensor)| {
            let strides = tensor.view().strides().iter().map(|&n| n as u64).collect();
            DeviceAux { span: buffer.span(), strides }
        });
        all.collect()
    }

    fn used(&self, memory: &[Buffer]) -> [Option<Span>; 2] {
        [None, self.used_k.as_ref().map(|_| memory[4 + self.aux.len()].span())]
    }

    /// The exponentials of the forward kernel; the result passes the tolerance rule.
    fn forward(&self, plan: ForwardPlan, target: Target, kernel: &str) -> u64 {
        assert_eq!(plan.expression_blocks().is_some(), self.problem.mask_rest().is_some());
        let sim = Sim::on(target, Options::default());
        let Drawn { rows, memory } = self.drawn(&sim);
        let mut result = Forward::zeros(&self.problem).unwrap();
        let [o, lse] = [&result.o, &result.lse].map(|tensor| uploaded(&sim, tensor));
        let [q, k, v] = std::array::from_fn(|i| placed(&memory[i], rows[i].shape()));
        let tensors = Tensors::new([q, k, v, placed(&o, result.o.shape())], lse.span(), lse.span());
        let (aux, used) = (self.device_aux(&memory), self.used(&memory));
        let tensors = Tensors { aux, used, ..tensors };
        let kernels = plan.build(target).unwrap();
        let executable = plan.with_kernels(kernels);
        let needs = executable.needs(&tensors);
        let counters = sim.zeroed(needs.counter_bytes).unwrap();
        let scratch = sim.allocate(needs.scratch_bytes).unwrap();
        let of_call = Memory { counters: counters.span(), scratch: Some(scratch.span()), copies: None };
        for launch in executable.launches(&tensors, &of_call, 2).unwrap() {
            let module = sim.load(launch.kernel.clone()).unwrap();
            sim.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
            assert!(sim.findings().is_empty(), "{:?}", sim.findings());
        }
        download(&sim, o.span(), &mut result.o);
        download(&sim, lse.span(), &mut result.lse);
        for (name, verdict) in check_forward(&self.inputs(&rows).bind(&self.problem).unwrap(), &result, 0) {
            assert!(verdict.ok(), "{:?}, {name}: {verdict}", self.problem.mask());
        }
        sim.counts_of(kernel).exps
    }

    /// The exponentials of the backward kernel; the gradients pass the tolerance rule.
    fn backward(&self) -> u64 {
        let plan = BackwardPlan::new(&self.problem, false, Order::Any).unwrap();
        assert!(plan.expression_blocks().is_some(), "{:?} is not planned", self.problem.mask());
        let sim = Sim::new(Options::default());
        let Drawn { rows, memory } = self.drawn(&sim);
        let inputs = self.inputs(&rows);
        let bound = inputs.bind(&self.problem).unwrap();
        let forward = oracle::forward(&bound).to_forward(&self.problem).unwrap();
        let saved = forward.saved(rows[3].view());
        let [o, lse] = [&forward.o, &forward.lse].map(|tensor| uploaded(&sim, tensor));
        let mut gradients = Gradients::zeros(&self.problem).unwrap();
        let results = [&gradients.d_q, &gradients.d_k, &gradients.d_v].map(|tensor| uploaded(&sim, tensor));
        let [q, k, v, d_o] = std::array::from_fn(|i| placed(&memory[i], rows[i].shape()));
        let [d_q, d_k, d_v] = std::array::from_fn(|i| placed(&results[i], rows[i].shape()));
        let tensors = BackwardTensors::new([q, k, v, placed(&o, rows[3].shape())], lse.span(), d_o, [d_q, d_k, d_v]);
        let (aux, d_aux, used) = (self.device_aux(&memory), vec![None; self.aux.len()], self.used(&memory));
        let tensors = BackwardTensors { aux, d_aux, used, ..tensors };
        let kernels = plan.kernels(Target::HOPPER).unwrap();
        let scratch = sim.allocate(plan.scratch_bytes()).unwrap();
        let launches = plan.plan(&kernels, &tensors, scratch.span(), 2).unwrap();
        launches.run(&sim, Stream::default(), &mut |kernel| sim.load(kernel.clone())).unwrap();
        assert!(sim.findings().is_empty(), "{:?}", sim.findings());
        for (tensor, buffer) in [&mut gradients.d_q, &mut gradients.d_k, &mut gradients.d_v].into_iter().zip(&results) {
            download(&sim, buffer.span(), tensor);
        }
        for (name, verdict) in check_backward(&bound, &saved, &gradients, 0) {
            assert!(verdict.ok(), "{:?}, {name}: {verdict}", self.problem.mask());
        }
        sim.counts_of("attention_backward").exps
    }

    fn hopper(&self) -> u64 {
        self.forward(ForwardPlan::new(&self.problem, None).unwrap(), Target::HOPPER, "attention_forward")
    }
}

fn base(batch: usize, len: usize) -> ProblemBuilder {
    Problem::builder().dense(batch, len, len).heads(2, 1).head_dim(64).dtype(DType::Bf16)
}

/// Documents of `document` tokens under a causal mask.
fn documents(len: usize, document: usize) -> Case {
    let mask = load("ids", [q()]).equals(load("ids", [k()])) & k().at_most(q() + k_len() - q_len());
    let problem = base(1, len).aux("ids", DType::I32, &[len]).mask(Mask::custom(mask)).build().unwrap();
    let ids: Vec<i32> = (0..len).map(|i| (i / document) as i32).collect();
    Case { problem, aux: vec![Tensor::new(ids, &[len]).unwrap()], used_k: None }
}

/// Blocks of 128 queries and 128 keys with a visible element.
fn visible_blocks(len: usize, sees: impl Fn(usize, usize) -> bool) -> u64 {
    let blocks = len.div_ceil(128);
    let range = |block: usize| block * 128..(block * 128 + 128).min(len);
    let seen = |at: &usize| range(at / blocks).any(|i| range(at % blocks).any(|j| sees(i, j)));
    (0..blocks * blocks).filter(seen).count() as u64
}

#[test]
fn an_expression_skips_what_it_hides() {
    let (len, document) = (1500, 200);
    let case = documents(len, document);
    let seen = visible_blocks(len, |i, j| j <= i && i / document == j / document);
    // Two heads. Forward also rescales rows, and computes blocks twice where the maximum grew.
    let of_blocks = 2 * seen * 128 * 128;
    let forward = case.hopper();
    assert!((of_blocks..of_blocks + of_blocks / 4).contains(&forward), "{forward} of {of_blocks}");
    assert_eq!(case.backward(), of_blocks);
    // In a fixed order, all steps below the diagonal are computed.
    let fixed = BackwardPlan::new(&case.problem, false, Order::Fixed).unwrap();
    assert_eq!(fixed.expression_blocks(), None);
}

/// Windows that differ from head to head, sequences with fewer keys in use (one without any), and rows that see no key.
#[test]
fn expressions_differ_by_head_and_sequence() {
    let len = 1450;
    let near = (q() - k()).less(load("widths", [head()])) & q().at_least(k() + 3);
    let problem = base(2, len).aux("widths", DType::I32, &[2]).mask(Mask::custom(near)).used_lengths(false, true);
    let case = Case {
        problem: problem.build().unwrap(),
        aux: vec![Tensor::new(vec![40, 300], &[2]).unwrap()],
        used_k: Some(Tensor::new(vec![0, 1111], &[2]).unwrap()),
    };
    let (all, forward, backward) = (4 * (len * len) as u64, case.hopper(), case.backward());
    assert!(forward < all / 5 && backward < all / 5, "{forward} and {backward} of {all}");
}

/// The kernels of older GPUs read the same lists.
#[test]
fn mma_sync_skips_too() {
    let case = documents(1500, 120);
    let plan = ForwardPlan::mma_sync(&case.problem, None, &ConfigTable::default()).unwrap();
    let seen = visible_blocks(1500, |i, j| j <= i && i / 120 == j / 120);
    let (of_blocks, forward) = (2 * seen * 128 * 128, case.forward(plan, Target::AMPERE, "attention_forward_sync"));
    assert!((of_blocks..of_blocks + of_blocks / 4).contains(&forward), "{forward} of {of_blocks}");
}

/// With ALiBi and no causal mask, tiles start with the keys nearest to their queries: later blocks do not raise the maximum, so
/// none is computed twice. Some sequences have more keys than queries, or fewer.
#[test]
fn alibi_computes_no_block_twice() {
    for (q_len, k_len, mask) in [
        (768, 768, Mask::none()),
        (256, 896, Mask::none()),
        (640, 256, Mask::none()),
        (300, 1000, Mask::window(Some(500), None)),
    ] {
        let builder = Problem::builder().dense(1, q_len, k_len).heads(8, 2).head_dim(64).dtype(DType::Bf16);
        let problem = builder.alibi().mask(mask.clone()).build().unwrap();
        let slopes: Vec<f32> = (1..=8).map(|head| 0.5f32.powi(head)).collect();
        let case = Case { problem, aux: vec![Tensor::new(slopes, &[8]).unwrap()], used_k: None };
        let (scores, exps) = ((8 * q_len.next_multiple_of(128) * k_len.next_multiple_of(128)) as u64, case.hopper());
        assert!(exps < scores + scores / 10, "{q_len} x {k_len}, {mask:?}: {exps} exponentials of {scores} scores");
    }
}
