//! Sessions without a GPU: on the simulator, which computes, and on the driver of the tests, which keeps books.

use fulgurite::gpu::{
    Arch, Backward, BackwardConfig, BackwardOptions, Cuda, DeviceError, DeviceSpan, Forward, ForwardOptions, Gemm,
    GemmConfig, Layouts, Major, Matrix, Number, Options, Product, ProductOptions, ResultType, Session, Share, Stream,
    Tables, Target, TensorUnit,
};
use fulgurite::{
    BlockLists, DType, Error, GradientOutputs, Inputs, Mask, Problem, ProblemBuilder, Saved, Tensor, TensorView,
    TensorViewMut, engine,
};
use fulgurite_core::compare::check_forward;
use fulgurite_core::random::Rng;
use fulgurite_core::{InputError, Packed};
use fulgurite_cuda::fake::{self, books};
use fulgurite_ptx::device::{Buffer, Device};
use fulgurite_sim::Sim;
use std::sync::Arc;

fn problem(q_len: usize, k_len: usize) -> ProblemBuilder {
    Problem::builder().dense(1, q_len, k_len).heads(2, 2).head_dim(64).dtype(DType::Bf16)
}

fn fake_session() -> Session<Cuda> {
    books(|books| books.memory_bytes = 1 << 24);
    Session::new(Arc::new(fake::open(Options::default()).unwrap()), Tables::default())
}

/// Device memory with the buffer that holds it.
struct Held(DeviceSpan, #[allow(dead_code)] Buffer);

fn held<D: Device>(device: &D, bytes: u64) -> Held {
    let buffer = device.zeroed(bytes.max(16)).unwrap();
    Held(DeviceSpan::new(device, buffer.span()), buffer)
}

fn bytes(shape: &[usize], dtype: DType) -> u64 {
    (shape.iter().product::<usize>() * dtype.size_bytes()) as u64
}

/// Everything that a plain call has, on a device.
struct Call {
    problem: Problem,
    rows: [Held; 4],
    lse: Held,
}

impl Call {
    fn new<D: Device>(device: &D, problem: Problem) -> Call {
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
        let rows = shapes.map(|shape| held(device, bytes(&shape, problem.dtype())));
        let lse = held(device, bytes(&problem.lse_shape(), DType::F32));
        Call { problem, rows, lse }
    }

    fn view(&self, i: usize) -> TensorView<'_> {
        let shape = [self.problem.q_shape(), self.problem.k_shape(), self.problem.v_shape(), self.problem.o_shape()];
        TensorView::on_device(&self.rows[i].0, self.problem.dtype(), &shape[i], None).unwrap()
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs::new(self.view(0), self.view(1), self.view(2))
    }

    fn o(&self) -> TensorViewMut<'_> {
        TensorViewMut::on_device(&self.rows[3].0, self.problem.dtype(), &self.problem.o_shape(), None).unwrap()
    }

    fn lse(&self) -> TensorViewMut<'_> {
        TensorViewMut::on_device(&self.lse.0, DType::F32, &self.problem.lse_shape(), None).unwrap()
    }

    fn forward<D: Device>(&self, session: &Session<D>, inputs: &Inputs<'_>, stream: Stream<'_>) -> Result<(), Error> {
        let prepared = session.prepare::<Forward>(&self.problem, &ForwardOptions::default())?;
        session.forward(&prepared, inputs, &mut self.o(), Some(&mut self.lse()), stream)
    }
}

/// Device tensors give what the oracle gives, also through the engine and with strides that a launch repacks.
#[test]
fn tensors_on_the_simulator_are_used_in_place() {
    let sim = Arc::new(Sim::default());
    let session = Session::new(sim.clone(), Tables::default());
    let problem = problem(40, 50).mask(Mask::causal()).build().unwrap();
    let mut rng = Rng::new(3);
    let mut draw =
        |shape: &[usize]| Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
    let (q, k, v) = (draw(&problem.q_shape()), draw(&problem.k_shape()), draw(&problem.v_shape()));
    let host = Inputs::new(q.view(), k.view(), v.view());
    let call = Call::new(&*sim, problem.clone());
    let words = |tensor: &Tensor| -> Vec<u8> {
        tensor.as_slice::<half::bf16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect()
    };
    for (held, tensor) in call.rows.iter().zip([&q, &k, &v]) {
        sim.upload(held.0.span(), &words(tensor)).unwrap();
    }
    call.forward(&session, &call.inputs(), Stream::default()).unwrap();
    let download = |held: &Held, bytes: u64| {
        let mut all = vec![0; bytes as usize];
        sim.download(held.0.span().first(bytes), &mut all).unwrap();
        all
    };
    let o: Vec<half::bf16> = download(&call.rows[3], bytes(&problem.o_shape(), DType::Bf16))
        .chunks_exact(2)
        .map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]))
        .collect();
    let lse: Vec<f32> = download(&call.lse, bytes(&problem.lse_shape(), DType::F32))
        .chunks_exact(4)
        .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect();
    let got = fulgurite::Forward {
        o: Tensor::new(o, &problem.o_shape()).unwrap(),
        lse: Tensor::new(lse, &problem.lse_shape()).unwrap(),
    };
    for (name, verdict) in check_forward(&host.bind(&problem).unwrap(), &got, 1) {
        assert!(verdict.ok(), "{name}: {verdict}");
    }
    // The same tensors from host memory take the same way: the same bits.
    let copied = engine(fulgurite::Choice::Sim).unwrap().forward(&problem, &host, &fulgurite::Run::default()).unwrap();
    assert_eq!(copied, got);
}

/// A result in the memory of an input is refused, as on the CPU. Slices of one buffer that lie side by side are not.
#[test]
fn results_share_no_memory() {
    let session = fake_session();
    let device = session.device().clone();
    let shape = [1, 5, 2, 64];
    let problem = problem(5, 5).build().unwrap();
    let prepared = session.prepare::<Forward>(&problem, &ForwardOptions::default()).unwrap();
    // q, k, v and o side by side in every row.
    let fused = held(&*device, bytes(&[5, 4, 2, 64], DType::Bf16));
    let strides = [5 * 512, 512, 64, 1];
    let part = |i: u64| DeviceSpan::new(&*device, fused.0.span().from(2 * 128 * i));
    let parts = [0, 1, 2, 3].map(part);
    let view = |i: usize| TensorView::on_device(&parts[i], DType::Bf16, &shape, Some(&strides)).unwrap();
    let inputs = Inputs::new(view(0), view(1), view(2));
    for (i, part) in parts.iter().enumerate() {
        let mut o = TensorViewMut::on_device(part, DType::Bf16, &shape, Some(&strides)).unwrap();
        let got = session.checked_forward(&prepared, &inputs, &mut o, None).map(|_| ()).map_err(|e| e.to_string());
        let shared = |other: &str| Err(format!("`out` shares memory with `{other}`; write into a tensor of its own"));
        assert_eq!(got, ["q", "k", "v"].get(i).map_or(Ok(()), |other| shared(other)));
    }
    let options = BackwardOptions::default();
    let prepared = session.prepare::<Backward>(&problem, &options).unwrap();
    let (rows, lse) = ([(); 4].map(|()| held(&*device, bytes(&shape, DType::Bf16))), held(&*device, 4 * 10));
    let of = |i: usize| TensorView::on_device(&rows[i].0, DType::Bf16, &shape, None).unwrap();
    let lse = TensorView::on_device(&lse.0, DType::F32, &[1, 2, 5], None).unwrap();
    let saved = Saved { o: of(0), lse, d_o: view(3), d_lse: None };
    let backward = |results: [&DeviceSpan; 3]| {
        let [d_q, d_k, d_v] = results.map(|span| TensorViewMut::on_device(span, DType::Bf16, &shape, None).unwrap());
        let mut gradients = GradientOutputs { d_q, d_k, d_v, d_sinks: None, d_aux: Vec::new() };
        session.checked_backward(&prepared, &inputs, &saved, &mut gradients).map(|_| ()).map_err(|e| e.to_string())
    };
    let [_, a, b, c] = [0, 1, 2, 3].map(|i| &rows[i].0);
    assert_eq!(backward([a, b, c]), Ok(()));
    let twice = "`d_v` shares memory with `d_k`; write into a tensor of its own".to_string();
    assert_eq!(backward([a, b, b]), Err(twice));
    let over = "`d_q` shares memory with `o`; write into a tensor of its own".to_string();
    assert_eq!(backward([&rows[0].0, b, c]), Err(over));
}

/// A known call plans nothing, compiles nothing, allocates nothing and encodes nothing.
#[test]
fn a_known_call_only_launches() {
    let session = fake_session();
    let call = Call::new(&**session.device(), problem(100, 100).build().unwrap());
    call.forward(&session, &call.inputs(), Stream::default()).unwrap();
    let all = || books(|books| (books.compiled + books.modules as u32, books.allocated, books.encoded));
    let before = (all(), books(|books| books.seen.len()));
    call.forward(&session, &call.inputs(), Stream::default()).unwrap();
    assert_eq!((all(), books(|books| books.seen.len())), (before.0, before.1 + 1));
    // Another length shares the kernel.
    let modules = books(|books| books.modules);
    let other = Call::new(&**session.device(), problem(101, 90).build().unwrap());
    other.forward(&session, &other.inputs(), Stream::default()).unwrap();
    assert_eq!(books(|books| books.modules), modules);
    // Other features have their own.
    let causal = Call::new(&**session.device(), problem(100, 100).mask(Mask::causal()).build().unwrap());
    causal.forward(&session, &causal.inputs(), Stream::default()).unwrap();
    assert_eq!(books(|books| books.modules), modules + 1);
}

/// A checked call is enqueued again without checks, also when others ran in between. It is refused if its memory is freed, and
/// by the session of another device.
#[test]
fn checked_calls_are_repeated() {
    let session = fake_session();
    let problem = problem(4, 4096).build().unwrap(); // decode: counters and scratch memory
    let prepared = session.prepare::<Forward>(&problem, &ForwardOptions::default()).unwrap();
    let layers: Vec<Call> = (0..3).map(|_| Call::new(&**session.device(), problem.clone())).collect();
    let checked: Vec<_> = layers
        .iter()
        .map(|call| session.checked_forward(&prepared, &call.inputs(), &mut call.o(), Some(&mut call.lse())).unwrap())
        .collect();
    assert_eq!(books(|books| books.seen.len()), 0, "nothing is enqueued by checks");
    let run = || checked.iter().for_each(|call| session.run_call(call, Stream::default()).unwrap());
    run();
    let addresses = || books(|books| books.seen.iter().map(|launch| launch.args.clone()).collect::<Vec<_>>());
    let first = addresses();
    let allocated = books(|books| books.allocated);
    run();
    let both = addresses();
    assert_eq!(both.len(), 2 * first.len());
    assert_eq!(both[..first.len()], both[first.len()..], "the launches of the first time");
    assert_eq!(books(|books| books.allocated), allocated);
    drop(layers);
    let freed = session.run_call(&checked[0], Stream::default());
    assert!(matches!(freed, Err(Error::Device(_))), "{freed:?}");
    let other = Session::new(Arc::new(fake::open(Options::default()).unwrap()), Tables::default());
    assert!(other.run_call(&checked[1], Stream::default()).is_err());
    assert_eq!(addresses().len(), both.len(), "nothing is launched");
}

/// Rows that do not begin at multiples of 16 bytes are copied by launches before and after the kernel.
#[test]
fn strides_that_the_kernel_cannot_take_are_copied() {
    let session = fake_session();
    let call = Call::new(&**session.device(), problem(100, 100).build().unwrap());
    let wide = held(&**session.device(), 2 * 100 * 2 * 65);
    let q = TensorView::on_device(&wide.0, DType::Bf16, &[1, 100, 2, 64], Some(&[13000, 130, 65, 1])).unwrap();
    let inputs = Inputs::new(q, call.view(1), call.view(2));
    call.forward(&session, &inputs, Stream::default()).unwrap();
    assert_eq!(books(|books| books.seen.len()), 2, "the copy, and the kernel");
}

/// Offsets on the device give sequences more queries than the problem says. The decode kernel stays inside its workspace,
/// which the simulator checks, and the rows within the bound are right.
#[test]
fn packed_sequences_longer_than_their_bound_stay_in_the_workspace() {
    for (q_heads, kv_heads) in [(16, 2), (14, 2), (3, 1)] {
        let sim = Arc::new(Sim::default());
        let session = Session::new(sim.clone(), Tables::default());
        let packed = Packed { batch: 3, total_q: 60, total_k: 3000, max_q: 1, max_k: 2900 };
        let problem = Problem::builder().packed_sizes(packed).heads(q_heads, kv_heads).head_dim(64).dtype(DType::Bf16);
        let problem = problem.build().unwrap();
        let mut rng = Rng::new(9);
        let mut draw =
            |shape: &[usize]| Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
        let host = [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(|shape| draw(&shape));
        let words = |tensor: &Tensor| -> Vec<u8> {
            tensor.as_slice::<half::bf16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect()
        };
        let call = Call::new(&*sim, problem.clone());
        for (held, tensor) in call.rows.iter().zip(&host) {
            sim.upload(held.0.span(), &words(tensor)).unwrap();
        }
        // One sequence as promised, one of 58 queries, one of one query.
        let offsets = [[0i32, 1, 59, 60], [0, 50, 2950, 3000]];
        let cu = [held(&*sim, 16), held(&*sim, 16)];
        for (held, offsets) in cu.iter().zip(offsets) {
            let words: Vec<u8> = offsets.iter().flat_map(|x| x.to_le_bytes()).collect();
            sim.upload(held.0.span(), &words).unwrap();
        }
        let view = |i: usize| TensorView::on_device(&cu[i].0, DType::I32, &[4], None).unwrap();
        let mut inputs = call.inputs();
        (inputs.cu_seqlens_q, inputs.cu_seqlens_k) = (Some(view(0)), Some(view(1)));
        let prepared = session.prepare::<Forward>(&problem, &ForwardOptions::default()).unwrap();
        session.forward(&prepared, &inputs, &mut call.o(), None, Stream::default()).unwrap();
        let mut all = vec![0; bytes(&problem.o_shape(), DType::Bf16) as usize];
        sim.download(call.rows[3].0.span().first(all.len() as u64), &mut all).unwrap();
        // The first sequence: one query over 50 keys.
        let alone = Problem::builder().dense(1, 1, 50).heads(q_heads, kv_heads).head_dim(64).dtype(DType::Bf16);
        let alone = alone.build().unwrap();
        let first = |tensor: &Tensor, rows: usize, heads: usize| {
            let values = tensor.as_slice::<half::bf16>().unwrap()[..rows * heads * 64].to_vec();
            Tensor::new(values, &[1, rows, heads, 64]).unwrap()
        };
        let [q, k, v] = [first(&host[0], 1, q_heads), first(&host[1], 50, kv_heads), first(&host[2], 50, kv_heads)];
        let own = Inputs::new(q.view(), k.view(), v.view());
        let o: Vec<half::bf16> =
            all[..q_heads * 64 * 2].chunks_exact(2).map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]])).collect();
        let bound = own.bind(&alone).unwrap();
        let lse = fulgurite_core::oracle::forward(&bound).to_forward(&alone).unwrap().lse;
        let got = fulgurite::Forward { o: Tensor::new(o, &alone.o_shape()).unwrap(), lse };
        for (name, verdict) in check_forward(&bound, &got, 1) {
            assert!(verdict.ok(), "{q_heads}/{kv_heads} {name}: {verdict}");
        }
    }
}

/// A captured call uses memory of its own and holds its kernels, and its graph can be replayed.
#[test]
fn calls_are_captured() {
    let session = fake_session();
    let gpu = session.device().clone();
    let stream = gpu.own_stream().unwrap();
    // Four queries of decode: counters and scratch memory.
    let call = Call::new(&*gpu, problem(4, 4096).build().unwrap());
    call.forward(&session, &call.inputs(), stream.stream()).unwrap();
    let plain = books(|books| books.memory.len());
    let graph = gpu.capture(stream.stream(), || {
        call.forward(&session, &call.inputs(), stream.stream()).map_err(|e| match e {
            Error::Device(e) => e,
            other => panic!("{other}"),
        })
    });
    let graph = graph.unwrap();
    assert!(books(|books| books.seen.last().unwrap().captured));
    assert_eq!(books(|books| books.memory.len()), plain + 1, "scratch memory of the capture");
    gpu.replay(&graph, stream.stream()).unwrap();
    drop(graph);
    call.forward(&session, &call.inputs(), stream.stream()).unwrap();
    assert_eq!(books(|books| books.memory.len()), plain);
}

/// What the host refuses, a device refuses with the same typed errors, and nothing is launched.
#[test]
fn bad_device_tensors_are_refused_before_anything_is_launched() {
    let session = fake_session();
    let gpu = &**session.device();
    let call = Call::new(gpu, problem(100, 100).build().unwrap());
    let (dtype, shape) = (DType::Bf16, call.problem.q_shape());
    let with_q = |q: TensorView<'_>| {
        let inputs = Inputs::new(q, call.view(1), call.view(2));
        call.forward(&session, &inputs, Stream::default()).unwrap_err()
    };
    let q = &call.rows[0].0;
    let short = TensorView::on_device(q, dtype, &[1, 99, 2, 64], None).unwrap();
    assert!(matches!(with_q(short), Error::Input(InputError::Shape { .. })));
    let other = TensorView::on_device(q, DType::F16, &shape, None).unwrap();
    assert!(matches!(with_q(other), Error::Input(InputError::DType { .. })));
    let spread = held(gpu, 2 * 100 * 2 * 64 * 2);
    let spread = TensorView::on_device(&spread.0, dtype, &shape, Some(&[25600, 256, 128, 2])).unwrap();
    assert!(matches!(with_q(spread), Error::Input(InputError::LastStride { .. })));
    let sim = Sim::default();
    let elsewhere = held(&sim, bytes(&shape, dtype));
    let elsewhere = with_q(TensorView::on_device(&elsewhere.0, dtype, &shape, None).unwrap());
    assert_eq!(elsewhere.to_string(), "`q` is on sim:0, allowed: cuda:0; move it there");
    let host = Tensor::zeros(dtype, &shape).unwrap();
    assert_eq!(with_q(host.view()).to_string(), "`q` is on cpu, allowed: cuda:0; move it there");
    // Memory that is too short, or at an odd address, makes no tensor.
    assert!(TensorView::on_device(q, dtype, &[1, 101, 2, 64], None).is_err());
    let odd = DeviceSpan::new(gpu, q.span().from(1));
    let odd = TensorView::on_device(&odd, dtype, &[1, 10, 2, 64], None).unwrap_err();
    assert!(odd.to_string().ends_with("allowed: multiples of 2; copy it to an aligned buffer"), "{odd}");
    // Memory that was freed, and memory of no device.
    let freed = held(gpu, bytes(&shape, dtype)).0;
    let freed = TensorView::on_device(&freed, dtype, &shape, None).unwrap();
    assert!(matches!(with_q(freed), Error::Device(DeviceError::Foreign { .. })));
    let made_up = DeviceSpan::new(gpu, fulgurite_ptx::device::Span::new(4096, 1 << 20));
    let made_up = TensorView::on_device(&made_up, dtype, &shape, None).unwrap();
    assert!(matches!(with_q(made_up), Error::Device(DeviceError::Foreign { .. })));
    // A stream of another device, and an LSE with gaps.
    let other_gpu = fake::open(Options::default()).unwrap();
    let theirs = other_gpu.own_stream().unwrap();
    let refused = call.forward(&session, &call.inputs(), theirs.stream()).unwrap_err();
    assert_eq!(refused, Error::Device(DeviceError::Stream));
    let prepared = session.prepare::<Forward>(&call.problem, &ForwardOptions::default()).unwrap();
    let gaps = held(gpu, 4 * 400);
    let mut gaps = TensorViewMut::on_device(&gaps.0, DType::F32, &[1, 2, 100], Some(&[400, 200, 2])).unwrap();
    let refused =
        session.forward(&prepared, &call.inputs(), &mut call.o(), Some(&mut gaps), Stream::default()).unwrap_err();
    assert!(matches!(refused, Error::Input(InputError::Strides { .. })), "{refused}");
    assert!(books(|books| books.seen.is_empty()));
    // Host engines refuse device tensors.
    let cpu = engine(fulgurite::Choice::Cpu).unwrap();
    let refused = cpu.forward(&call.problem, &call.inputs(), &fulgurite::Run::default()).unwrap_err();
    assert_eq!(refused.to_string(), "`q` is on cuda:0, allowed: cpu; move it there");
}

/// Small tensors of a call: offsets, used lengths, sinks, block lists.
#[test]
fn small_device_tensors_are_checked() {
    let session = fake_session();
    let gpu = &**session.device();
    let packed = Problem::builder().heads(2, 2).head_dim(64).dtype(DType::Bf16);
    let packed = packed.packed(&[0, 40, 100], &[0, 50, 100]).build().unwrap();
    let call = Call::new(gpu, packed);
    let offsets = held(gpu, 64);
    let list =
        |dtype, n: usize, stride: usize| TensorView::on_device(&offsets.0, dtype, &[n], Some(&[stride])).unwrap();
    let refused = |q: TensorView<'_>| {
        let inputs = call.inputs().cu_seqlens(q, list(DType::I32, 3, 1));
        call.forward(&session, &inputs, Stream::default()).map_err(|e| e.to_string())
    };
    assert_eq!(refused(list(DType::I32, 3, 1)), Ok(()));
    assert!(refused(list(DType::I32, 4, 1)).unwrap_err().starts_with("`cu_seqlens_q` has shape [4], allowed: [3]"));
    assert!(refused(list(DType::F32, 3, 1)).unwrap_err().starts_with("`cu_seqlens_q` is f32, allowed: i32"));
    assert!(refused(list(DType::I32, 3, 2)).unwrap_err().starts_with("`cu_seqlens_q` has strides [2]"));
    let missing = call.forward(&session, &call.inputs(), Stream::default()).unwrap_err();
    assert!(matches!(missing, Error::Input(InputError::Missing { .. })));

    let blocks = problem(256, 256).block_mask(fulgurite::BlockSpec::default()).build().unwrap();
    let call = Call::new(gpu, blocks);
    let (counts, lists) = (held(gpu, 64), held(gpu, 64));
    let view = |held: &'static Held, shape: &[usize]| TensorView::on_device(&held.0, DType::I32, shape, None).unwrap();
    let (counts, lists): (&'static Held, &'static Held) = (Box::leak(Box::new(counts)), Box::leak(Box::new(lists)));
    let with = |width: usize| BlockLists {
        counts: [view(counts, &[1, 1, 2]); 2],
        blocks: [view(lists, &[1, 1, 2, width]); 2],
    };
    let run = |lists| call.forward(&session, &call.inputs().block_lists(lists), Stream::default());
    assert_eq!(run(with(2)), Ok(()));
    assert_eq!(run(with(1)), Ok(()));
    assert!(matches!(run(with(3)), Err(Error::Input(InputError::Shape { .. }))));
}

/// Gradients and products take the same way.
#[test]
fn backward_and_products_run() {
    let session = fake_session();
    let gpu = &**session.device();
    let call = Call::new(gpu, problem(100, 100).build().unwrap());
    let results = [0, 1, 2].map(|_| held(gpu, bytes(&call.problem.q_shape(), DType::Bf16)));
    let d_o = call.view(3);
    let lse = call.lse();
    let saved = Saved { o: call.view(3), lse: lse.as_view(), d_o, d_lse: None };
    let shape = call.problem.q_shape();
    let result = |i: usize| TensorViewMut::on_device(&results[i].0, DType::Bf16, &shape, None).unwrap();
    let mut gradients =
        GradientOutputs { d_q: result(0), d_k: result(1), d_v: result(2), d_sinks: None, d_aux: Vec::new() };
    let prepared = session.prepare::<Backward>(&call.problem, &BackwardOptions::default()).unwrap();
    session.backward(&prepared, &call.inputs(), &saved, &mut gradients, Stream::default()).unwrap();
    let launches = books(|books| books.seen.len());
    assert!(launches >= 2, "{launches}");

    let layouts = Layouts { a: Major::Inner, b: Major::Inner };
    let gemm = Gemm { number: Number::Bf16, layouts, config: GemmConfig::default() };
    let matrices = [0, 1, 2].map(|i| Matrix::packed(call.rows[i].0.span(), 64, 64, 1));
    session.product(&gemm, matrices, Stream::default()).unwrap();
    assert_eq!(books(|books| books.seen.len()), launches + 1);
    let wrong = session.product(&Gemm { number: Number::F32, ..gemm }, matrices, Stream::default()).unwrap_err();
    assert_eq!(wrong.to_string(), "elements are f32, allowed: f16, bf16; convert them");
}

/// A product takes the tensor unit of its GPU, or the one that the caller names.
#[test]
fn products_run_on_every_tensor_unit() {
    let (m, n, k) = (130u64, 72u64, 80u64);
    // Small integers: every sum is exact in bf16.
    let a = |i: u64, j: u64| ((i + 2 * j) % 3) as f32 - 1.0;
    let b = |i: u64, j: u64| ((2 * i + j) % 5) as f32 - 2.0;
    let words = |rows: u64, f: &dyn Fn(u64, u64) -> f32| -> Vec<u8> {
        let elements = (0..rows).flat_map(|i| (0..k).map(move |j| (i, j)));
        elements.flat_map(|(i, j)| half::bf16::from_f32(f(i, j)).to_le_bytes()).collect()
    };
    let layouts = Layouts { a: Major::Inner, b: Major::Inner };
    let gemm = Gemm { number: Number::Bf16, layouts, config: GemmConfig::default() };
    for arch in [Arch::SM_86, Arch::SM_90A, Arch::SM_100A] {
        let sim = Arc::new(Sim::on(Target::new(arch), fulgurite_sim::Options::default()));
        let session = Session::new(sim.clone(), Tables::default());
        let buffers = [(m, k), (n, k), (m, n)].map(|(rows, cols)| sim.zeroed(2 * rows * cols).unwrap());
        sim.upload(buffers[0].span(), &words(m, &a)).unwrap();
        sim.upload(buffers[1].span(), &words(n, &b)).unwrap();
        let [rows, cols, out] = [(0, m, k), (1, n, k), (2, m, n)]
            .map(|(at, rows, cols): (usize, u64, u64)| Matrix::packed(buffers[at].span(), rows, cols, 1));
        session.product(&gemm, [rows, cols, out], Stream::default()).unwrap();
        assert!(sim.findings().is_empty(), "{}: {:?}", arch.name(), sim.findings());
        let mut bytes = vec![0; 2 * (m * n) as usize];
        sim.download(buffers[2].span(), &mut bytes).unwrap();
        for (at, got) in bytes.chunks_exact(2).enumerate() {
            let (i, j) = (at as u64 / n, at as u64 % n);
            let want: f32 = (0..k).map(|l| a(i, l) * b(j, l)).sum();
            let got = half::bf16::from_le_bytes([got[0], got[1]]).to_f32();
            assert_eq!(got, want, "{}: row {i}, column {j}", arch.name());
        }
        // A unit that the GPU does not have, and a configuration that the kernel does not have, are refused.
        let other = if arch == Arch::SM_100A { TensorUnit::Wgmma } else { TensorUnit::Tcgen05 };
        let asked = ProductOptions { unit: Some(other) };
        let refused = session.prepare::<Product>(&gemm, &asked).err().unwrap().to_string();
        assert!(refused.contains(&other.to_string()) && refused.contains(&arch.name()), "{refused}");
        let pairs = Gemm { config: GemmConfig { cluster: 2, ..gemm.config }, ..gemm };
        let is_refused = session.prepare::<Product>(&pairs, &ProductOptions::default()).is_err();
        assert_eq!(is_refused, arch == Arch::SM_86, "{}", arch.name());
    }
}

/// A tile configuration without a kernel is an error of the call, not a panic.
#[test]
fn a_configuration_without_a_kernel_is_refused() {
    let session = fake_session();
    let problem = problem(100, 100).build().unwrap();
    let config = fulgurite::gpu::ForwardConfig { depth: 99, ..fulgurite::gpu::ForwardConfig::hopper(64, 100) };
    let options = ForwardOptions { config: Some(config), ..ForwardOptions::default() };
    let refused = session.prepare::<Forward>(&problem, &options).err().unwrap();
    assert!(refused.to_string().starts_with("engine cuda does not have a kernel with this tile configuration: "));
    assert!(matches!(refused, Error::Unsupported(_)));
}

/// Tiles that do not divide the blocks of a block mask would read the wrong lists.
#[test]
fn tiles_that_do_not_divide_the_blocks_are_refused() {
    let session = fake_session();
    let blocks = fulgurite::BlockSpec { rows: 128, cols: 128, batch: 1, heads: 1 };
    let problem = problem(256, 256).block_mask(blocks).build().unwrap();
    let usual = fulgurite::gpu::ForwardConfig::hopper(64, 256);
    let prepare = |cols: u32| {
        let config = fulgurite::gpu::ForwardConfig { groups: 2, cols, ..usual };
        let options = ForwardOptions { config: Some(config), ..ForwardOptions::default() };
        session.prepare::<Forward>(&problem, &options).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(prepare(64), Ok(()));
    for cols in [80, 96] {
        let refused = prepare(cols).unwrap_err();
        assert!(refused.contains(&format!("blocks of 128 x 128 with tiles of 128 x {cols}")), "{refused}");
    }
}

/// A given configuration changes neither the results nor the tensor unit of gradients whose mask is an expression.
#[test]
fn a_given_configuration_of_gradients_keeps_results_and_unit() {
    let session = fake_session();
    let documents = (fulgurite::expr::q() / 100).equals(fulgurite::expr::k() / 100);
    let problem = problem(4096, 4096).mask(Mask::custom(documents)).build().unwrap();
    let plan = |config: BackwardConfig, results: ResultType| {
        let options = BackwardOptions { config: Some(config), results, ..BackwardOptions::default() };
        session.plan::<Backward>(&problem, &options)
    };
    let own = session.plan::<Backward>(&problem, &BackwardOptions::default()).unwrap();
    assert!(own.expression_blocks().is_some());
    // Steps of 48 queries lie in no block, so the blocks are given up.
    let odd = plan(BackwardConfig { rows: 48, ..BackwardConfig::columns() }, ResultType::F32).unwrap();
    assert_eq!((odd.expression_blocks(), odd.result_type()), (None, ResultType::F32));
    let sync = BackwardConfig { share: Share::Warps16, ..BackwardConfig::columns() };
    let refused = plan(sync, ResultType::Input).unwrap_err().to_string();
    assert!(refused.contains("a tile configuration of mma.sync for wgmma"), "{refused}");
}
