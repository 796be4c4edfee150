//! Results in f32, and results that are merged with others: what a ring over several machines needs of a kernel.

use crate::common::{Random, download, sim};
use fulgurite_core::{DType, Forward, Gradients, Inputs, Mask, Problem, Saved, Tensor, compare, oracle};
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Tensors as BackwardTensors};
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_kernels::attention::forward::plan::{ConfigTable, DeviceTensor, ForwardPlan, ResultType, Tensors};
use fulgurite_ptx::Target;
use fulgurite_ptx::device::{Buffer, Device, Stream};
use fulgurite_sim::Sim;
use std::ops::Range;
use std::sync::Arc;

/// A problem over one sequence per batch entry, whose keys come in parts.
#[derive(Debug, Clone)]
struct Case {
    batch: usize,
    q_len: usize,
    k_len: usize,
    heads: [usize; 2],
    dims: [usize; 2],
    causal: bool,
    dtype: DType,
    /// Where the keys are divided.
    cuts: Vec<usize>,
    /// `mma.sync` instead of `wgmma`.
    sync: bool,
    order: Order,
    config: Option<BackwardConfig>,
}

fn base() -> Case {
    Case {
        batch: 1,
        q_len: 130,
        k_len: 150,
        heads: [4, 2],
        dims: [64, 64],
        causal: true,
        dtype: DType::Bf16,
        cuts: vec![70],
        sync: false,
        order: Order::Any,
        config: None,
    }
}

struct Data {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    match tensor.dtype() {
        DType::F32 => tensor.as_slice::<f32>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => tensor.as_slice::<half::f16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => tensor.as_slice::<half::bf16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn upload(sim: &Sim, bytes: &[u8]) -> Buffer {
    let buffer = sim.allocate(bytes.len().max(16) as u64).unwrap();
    sim.upload(buffer.span().first(bytes.len() as u64), bytes).unwrap();
    buffer
}

fn floats(sim: &Sim, buffer: &Buffer, count: usize) -> Vec<f64> {
    let bytes = download(sim, buffer);
    bytes.chunks_exact(4).take(count).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).collect()
}

/// Rows `range` of a contiguous tensor `[batch, rows, heads, dim]` whose elements have `bytes` bytes.
fn rows(buffer: &Buffer, shape: [usize; 4], range: &Range<usize>, bytes: usize) -> DeviceTensor {
    let [b, s, h, d] = shape.map(|n| n as u64);
    let from = range.start as u64 * h * d * bytes as u64;
    let shape = [b, range.len() as u64, h, d];
    DeviceTensor { span: buffer.span().from(from), shape, strides: [s * h * d, h * d, d] }
}

impl Case {
    fn problem(&self, k_len: usize, mask: Mask) -> Problem {
        let [heads, kv_heads] = self.heads;
        let problem = Problem::builder().dense(self.batch, self.q_len, k_len).heads(heads, kv_heads);
        problem.head_dims(self.dims[0], self.dims[1]).dtype(self.dtype).mask(mask).build().unwrap()
    }

    fn whole(&self) -> Problem {
        self.problem(self.k_len, if self.causal { Mask::causal() } else { Mask::none() })
    }

    fn data(&self) -> Data {
        let (problem, mut random) = (self.whole(), Random(11));
        let mut draw = |shape: &[usize]| {
            let values: Vec<f64> = (0..shape.iter().product()).map(|_| 2.0 * f64::from(random.unit())).collect();
            Tensor::from_f64(self.dtype, &values, shape).unwrap()
        };
        Data {
            q: draw(&problem.q_shape()),
            k: draw(&problem.k_shape()),
            v: draw(&problem.v_shape()),
            d_o: draw(&problem.o_shape()),
        }
    }

    /// The parts of the keys, each with its problem. The diagonal of a part ends in its last row and column, so the edge of a
    /// causal mask is an offset.
    fn parts(&self) -> Vec<(Range<usize>, Problem)> {
        let ends = self.cuts.iter().copied().chain([self.k_len]);
        let starts = [0].into_iter().chain(self.cuts.iter().copied());
        let parts = starts.zip(ends).map(|(start, end)| start..end);
        let part = |keys: Range<usize>| {
            let after = (self.k_len - keys.end) as i64;
            let mask = if self.causal { Mask::window(None, after) } else { Mask::none() };
            (keys.clone(), self.problem(keys.len(), mask))
        };
        parts.map(part).collect()
    }

    fn target(&self) -> Target {
        if self.sync { Target::AMPERE } else { Target::HOPPER }
    }

    /// f32 o and LSE after all parts, the first of which meets garbage and an LSE of -inf if `merged` is set.
    fn forward(&self, sim: &Sim, merged: bool) -> [Vec<f64>; 2] {
        let (data, whole) = (self.data(), self.whole());
        let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| upload(sim, &bytes_of(x)));
        let [o_count, lse_count] = [whole.o_shape(), whole.lse_shape()].map(|shape| shape.iter().product::<usize>());
        let o = upload(sim, &f32::NAN.to_le_bytes().repeat(o_count));
        let given = if merged { f32::NEG_INFINITY } else { f32::NAN };
        let lse = upload(sim, &given.to_le_bytes().repeat(lse_count));
        let four = |shape: &[usize]| <[usize; 4]>::try_from(shape).unwrap();
        for (at, (keys, problem)) in self.parts().into_iter().enumerate() {
            let results = if at == 0 && !merged { ResultType::F32 } else { ResultType::Added };
            let plan = match self.sync {
                true => ForwardPlan::mma_sync(&problem, None, &ConfigTable::default()),
                false => ForwardPlan::new(&problem, None),
            };
            let plan = plan.unwrap().with_results(results).unwrap();
            let kernel = Arc::new(plan.kernel(self.target()).unwrap());
            let all = 0..self.q_len;
            let tensors = [
                rows(&q, four(&whole.q_shape()), &all, 2),
                rows(&k, four(&whole.k_shape()), &keys, 2),
                rows(&v, four(&whole.v_shape()), &keys, 2),
                rows(&o, four(&whole.o_shape()), &all, 4),
            ];
            let counters = upload(sim, &[0; 8]);
            let tensors = Tensors::new(tensors, lse.span(), counters.span());
            let launch = plan.launch(kernel, &tensors, 2).unwrap().unwrap();
            let module = sim.load(launch.kernel.clone()).unwrap();
            sim.launch(&module, launch.grid, &launch.args, Stream::default())
                .unwrap_or_else(|e| panic!("{self:?}: {e}\n{:?}", sim.findings().first()));
        }
        assert!(sim.findings().is_empty(), "{self:?}: {:?}", sim.findings());
        [floats(sim, &o, o_count), floats(sim, &lse, lse_count)]
    }

    fn judge_forward(&self, [o, lse]: &[Vec<f64>; 2]) -> Vec<String> {
        let (data, whole) = (self.data(), self.whole());
        let inputs = Inputs::new(data.q.view(), data.k.view(), data.v.view());
        let found = Forward {
            o: Tensor::from_f64(self.dtype, o, &whole.o_shape()).unwrap(),
            lse: Tensor::from_f64(DType::F32, lse, &whole.lse_shape()).unwrap(),
        };
        let verdicts = compare::check_forward(&inputs.bind(&whole).unwrap(), &found, 0);
        verdicts.into_iter().filter(|(_, v)| !v.ok()).map(|(name, v)| format!("{name}: {v:?}")).collect()
    }

    fn check_forward(&self, seed: u64) -> [Vec<f64>; 2] {
        let found = self.forward(&sim(seed), seed.is_multiple_of(2));
        assert_eq!(self.judge_forward(&found), Vec::<String>::new(), "{self:?}");
        // Results are not rounded to 16 bits on the way.
        let some: Vec<f64> = found[0].iter().copied().filter(|x| *x != 0.0).collect();
        let rounded = some.iter().filter(|x| half::bf16::from_f64(**x).to_f64() == **x).count();
        assert!(rounded * 4 < some.len(), "{rounded} of {} are 16-bit", some.len());
        found
    }

    /// f32 gradients that all parts have added to, starting from `given` everywhere.
    fn backward(&self, sim: &Sim, given: Option<f32>) -> [Vec<f64>; 3] {
        let (data, whole) = (self.data(), self.whole());
        let inputs = Inputs::new(data.q.view(), data.k.view(), data.v.view());
        let forward: Forward = oracle::forward(&inputs.bind(&whole).unwrap()).to_forward(&whole).unwrap();
        let [q, k, v, o, d_o] = [&data.q, &data.k, &data.v, &forward.o, &data.d_o].map(|x| upload(sim, &bytes_of(x)));
        let lse = upload(sim, &bytes_of(&forward.lse));
        let shapes = [whole.q_shape(), whole.k_shape(), whole.v_shape(), whole.o_shape()]
            .map(|shape| <[usize; 4]>::try_from(&shape[..]).unwrap());
        let [q_shape, k_shape, v_shape, o_shape] = shapes;
        let counts = [q_shape, k_shape, v_shape].map(|shape| shape.iter().product::<usize>());
        let start = given.unwrap_or(f32::NAN).to_le_bytes();
        let gradients = counts.map(|count| upload(sim, &start.repeat(count)));
        for (at, (keys, problem)) in self.parts().into_iter().enumerate() {
            // d_q is added to from the second part on; every part has keys of its own.
            let results = if at == 0 && given.is_none() { ResultType::F32 } else { ResultType::Added };
            if at > 0 && given.is_none() {
                let zeros = |buffer: &Buffer, shape: [usize; 4]| {
                    for b in 0..shape[0] {
                        let row = shape[2] * shape[3] * 4;
                        let from = (b * shape[1] + keys.start) * row;
                        let bytes = vec![0; keys.len() * row];
                        sim.upload(buffer.span().from(from as u64).first(bytes.len() as u64), &bytes).unwrap();
                    }
                };
                zeros(&gradients[1], k_shape);
                zeros(&gradients[2], v_shape);
            }
            let table = ConfigTable::default();
            let plan = BackwardPlan::new(&problem, false, self.order).unwrap();
            let plan = plan.with_results(&problem, &table, results).unwrap();
            let plan = self.config.map_or(plan.clone(), |config| plan.with_config(config));
            let kernels = plan.kernels(Target::HOPPER).unwrap();
            let all = 0..self.q_len;
            let tensors = BackwardTensors::new(
                [
                    rows(&q, q_shape, &all, 2),
                    rows(&k, k_shape, &keys, 2),
                    rows(&v, v_shape, &keys, 2),
                    rows(&o, o_shape, &all, 2),
                ],
                lse.span(),
                rows(&d_o, o_shape, &all, 2),
                [
                    rows(&gradients[0], q_shape, &all, 4),
                    rows(&gradients[1], k_shape, &keys, 4),
                    rows(&gradients[2], v_shape, &keys, 4),
                ],
            );
            let scratch = sim.allocate(plan.scratch_bytes()).unwrap();
            let launches = plan.plan(&kernels, &tensors, scratch.span(), 3).unwrap();
            launches
                .run(sim, Stream::default(), &mut |kernel| sim.load(kernel.clone()))
                .unwrap_or_else(|e| panic!("{self:?}: {e}\n{:?}", sim.findings().first()));
        }
        assert!(sim.findings().is_empty(), "{self:?}: {:?}", sim.findings());
        std::array::from_fn(|i| floats(sim, &gradients[i], counts[i]))
    }

    fn check_backward(&self, seed: u64) -> [Vec<f64>; 3] {
        let (data, whole) = (self.data(), self.whole());
        let inputs = Inputs::new(data.q.view(), data.k.view(), data.v.view());
        let bound = inputs.bind(&whole).unwrap();
        let forward: Forward = oracle::forward(&bound).to_forward(&whole).unwrap();
        let saved: Saved<'_> = forward.saved(data.d_o.view());
        let found = self.backward(&sim(seed), None);
        let tensor = |values: &[f64], shape: &[usize]| Tensor::from_f64(self.dtype, values, shape).unwrap();
        let [d_q, d_k, d_v] = &found;
        let gradients = Gradients {
            d_q: tensor(d_q, &whole.q_shape()),
            d_k: tensor(d_k, &whole.k_shape()),
            d_v: tensor(d_v, &whole.v_shape()),
            ..Gradients::zeros(&whole).unwrap()
        };
        let verdicts = compare::check_backward(&bound, &saved, &gradients, 0);
        let wrong: Vec<_> = verdicts.into_iter().filter(|(_, v)| !v.ok()).collect();
        assert!(wrong.is_empty(), "{self:?}: {wrong:?}");
        found
    }
}

#[test]
fn parts_of_the_keys_merge_to_the_whole() {
    let f16 = DType::F16;
    let cases = [
        base(),
        Case { dims: [128, 128], heads: [4, 1], k_len: 200, cuts: vec![64, 150], ..base() },
        // A padded head dimension, another one of v, and a batch.
        Case { dims: [24, 40], batch: 2, q_len: 33, k_len: 61, cuts: vec![7], dtype: f16, causal: false, ..base() },
        // The last part is before every query of the first rows, and after none.
        Case { dims: [256, 256], heads: [1, 1], q_len: 70, k_len: 70, cuts: vec![1, 69], ..base() },
        Case { sync: true, ..base() },
        Case { sync: true, dims: [128, 72], q_len: 61, k_len: 100, cuts: vec![50], dtype: f16, ..base() },
    ];
    for (seed, case) in (1..).zip(cases) {
        case.check_forward(seed);
    }
}

/// More queries than keys: the first rows see no key in any part.
#[test]
fn rows_without_keys_stay_empty() {
    let [o, lse] = Case { q_len: 90, k_len: 40, cuts: vec![10], ..base() }.check_forward(2);
    assert!(o[..50 * 4 * 64].iter().all(|x| *x == 0.0) && lse[..50].iter().all(|x| *x == f64::NEG_INFINITY));
}

/// A part that no query sees changes no bit.
#[test]
fn an_unseen_part_changes_nothing() {
    let one = Case { q_len: 64, k_len: 64, cuts: vec![], ..base() };
    let [o, lse] = one.forward(&sim(1), false);
    // Keys after the last query: the mask of the second part hides them all.
    let device = sim(1);
    let data = one.data();
    let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| upload(&device, &bytes_of(x)));
    let as_f32 = |x: &[f64]| x.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect::<Vec<u8>>();
    let (o_buffer, lse_buffer) = (upload(&device, &as_f32(&o)), upload(&device, &as_f32(&lse)));
    let problem = one.problem(64, Mask::window(None, -64));
    let plan = ForwardPlan::new(&problem, None).unwrap().with_results(ResultType::Added).unwrap();
    let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
    let counters = upload(&device, &[0; 8]);
    let shape = |heads| [1, 64, heads, 64];
    let all = 0..64;
    let tensors = [rows(&q, shape(4), &all, 2), rows(&k, shape(2), &all, 2), rows(&v, shape(2), &all, 2)];
    let [q, k, v] = tensors;
    let tensors = Tensors::new([q, k, v, rows(&o_buffer, shape(4), &all, 4)], lse_buffer.span(), counters.span());
    let launch = plan.launch(kernel, &tensors, 2).unwrap().unwrap();
    device.launch(&device.load(launch.kernel.clone()).unwrap(), launch.grid, &launch.args, Stream::default()).unwrap();
    assert!(floats(&device, &o_buffer, o.len()) == o && floats(&device, &lse_buffer, lse.len()) == lse);
}

#[test]
fn a_planted_merge_is_found() {
    let case = base();
    let [o, lse] = case.forward(&sim(1), false);
    // A part that is missing, as if it had not been merged.
    let first = Case { k_len: 70, cuts: vec![], causal: false, ..case.clone() };
    let [partial, _] = first.forward(&sim(1), false);
    assert!(case.judge_forward(&[partial, lse.clone()]).iter().any(|wrong| wrong.starts_with("o:")));
    let shifted = lse.iter().map(|x| x + 0.01).collect();
    assert!(case.judge_forward(&[o, shifted]).iter().any(|wrong| wrong.starts_with("lse")));
}

/// Results in f32 are refused where no kernel has them.
#[test]
fn what_has_no_kernel_is_refused() {
    let problem = Problem::builder().dense(1, 64, 64).heads(1, 1).dtype(DType::Bf16);
    let wide = problem.clone().head_dim(512).build().unwrap();
    let refused = ForwardPlan::new(&wide, None).unwrap().with_results(ResultType::F32).unwrap_err();
    assert_eq!(refused.feature, "f32 results of forward attention with head dims above 256");
    let sinks = problem.head_dim(64).sinks().build().unwrap();
    let plan = ForwardPlan::new(&sinks, None).unwrap();
    let refused = plan.with_results(ResultType::Added).unwrap_err();
    assert_eq!(refused.feature, "f32 results of forward attention with sinks that are merged with others");
}

#[test]
fn gradients_of_parts_add_up() {
    let wide = BackwardConfig::hopper(128);
    let cases = [
        base(),
        Case { dims: [128, 128], heads: [4, 1], k_len: 200, cuts: vec![130], ..base() },
        Case { dims: [128, 128], heads: [2, 2], causal: false, order: Order::Fixed, ..base() },
        Case { dims: [24, 40], batch: 2, q_len: 33, k_len: 61, cuts: vec![7], dtype: DType::F16, ..base() },
        // In parts of query heads, which a kernel adds: even ones and uneven ones.
        Case { config: Some(BackwardConfig { head_splits: Some(2), ..BackwardConfig::hopper(64) }), ..base() },
        Case {
            config: Some(BackwardConfig { head_splits: Some(2), ..wide }),
            heads: [3, 1],
            dims: [128, 128],
            ..base()
        },
        // Tiles that 16-bit results would split among CTAs.
        Case { causal: false, k_len: 700, cuts: vec![], heads: [2, 2], dims: [128, 128], ..base() },
        // An odd number of sixteens of columns: neighbouring threads do not share rows.
        Case { dims: [112, 80], q_len: 61, ..base() },
        // Usually in pairs of CTAs, which leave no parts.
        Case { dims: [256, 256], heads: [2, 1], q_len: 70, k_len: 80, cuts: vec![30], ..base() },
        Case { config: Some(BackwardConfig::hopper(64).of_threads(64)), heads: [3, 1], ..base() },
    ];
    for (seed, case) in (1..).zip(cases) {
        case.check_backward(seed);
    }
}

/// A tile that is merged waits for memory once: the LSE and all of its elements are loaded before any is stored. Rows are
/// asked for before that.
#[test]
fn merging_waits_for_memory_once() {
    let case = Case { dims: [128, 128], ..base() };
    let text = |results| {
        let plan = ForwardPlan::new(&case.problem(150, Mask::none()), None).unwrap().with_results(results).unwrap();
        plan.kernel(Target::HOPPER).unwrap().ptx()
    };
    let merging = text(ResultType::Added);
    let places = |what: &str| merging.match_indices(what).map(|(at, _)| at).collect::<Vec<_>>();
    let (asked, loads) = (places("cp.async.bulk.prefetch.L2.global"), places("ld.global.v4.f32"));
    let stores = places("st.global.v4.f32");
    // Two tiles in the text: the one that overlaps with the next, and the last. 2 x 16 fours of 64 elements.
    assert_eq!((loads.len(), stores.len()), (32, 32));
    assert!(loads[15] < stores[0] && stores[15] < loads[16] && loads[31] < stores[16]);
    assert!(!asked.is_empty() && asked[0] < loads[0]);
    assert!(!text(ResultType::F32).contains("prefetch.L2"));
}

/// Without spread heads, the main kernel adds to d_k and d_v, and no kernel adds parts.
#[test]
fn gradients_of_keys_need_no_parts() {
    for (config, has_parts) in [
        (BackwardConfig::hopper(128), false),
        (BackwardConfig { head_splits: Some(2), ..BackwardConfig::hopper(128) }, true),
    ] {
        let case = Case { dims: [128, 128], ..base() };
        let problem = case.problem(150, Mask::none());
        let plan = BackwardPlan::new(&problem, false, Order::Any).unwrap();
        let plan = plan.with_results(&problem, &ConfigTable::default(), ResultType::Added).unwrap().with_config(config);
        let kernels = plan.kernels(Target::HOPPER).unwrap();
        assert_eq!(kernels.heads.is_some(), has_parts);
        assert_eq!(kernels.main.ptx().contains("red.global.add.v2.f32"), !has_parts);
        assert_eq!(plan.head_part_bytes() > 0, has_parts);
    }
}

/// The kernel that adds d_q to what is there fills whole sectors of 32 bytes in each access.
#[test]
fn gradients_fill_whole_sectors() {
    for dims in [[64, 64], [128, 128]] {
        let case = Case { dims, q_len: 160, k_len: 64, cuts: vec![], causal: false, ..base() };
        let device = sim(1);
        case.backward(&device, Some(0.5));
        let total = device.counts_of("attention_backward_finish");
        // Sums, which may be of more rows, and given elements are read, results are written.
        assert!(total.global_bytes >= 3 * 4 * 160 * 4 * dims[0] as u64);
        assert_eq!(total.global_sectors, total.global_bytes / 32);
    }
}

/// Gradients are added to what is there.
#[test]
fn given_gradients_are_added_to() {
    let case = Case { cuts: vec![], heads: [2, 1], ..base() };
    let (fresh, added) = (case.backward(&sim(3), None), case.backward(&sim(3), Some(0.5)));
    for (fresh, added) in fresh.iter().flatten().zip(added.iter().flatten()) {
        assert!((fresh + 0.5 - added).abs() <= 1e-5 * (1.0 + fresh.abs()), "{fresh} and {added}");
    }
}

#[test]
fn tensors_that_threads_cannot_address_are_refused() {
    let device = sim(1);
    let problem = base().problem(150, Mask::none());
    let plan = ForwardPlan::new(&problem, None).unwrap().with_results(ResultType::F32).unwrap();
    let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
    let memory = device.allocate(1 << 20).unwrap();
    let packed = |len: u64, heads: u64| DeviceTensor::packed(memory.span(), [1, len, heads, 64]);
    let odd = DeviceTensor { strides: [0, 258, 64], ..packed(130, 4) };
    let tensors = Tensors::new([packed(130, 4), packed(150, 2), packed(150, 2), odd], memory.span(), memory.span());
    let refused = plan.launch(kernel, &tensors, 1).err().unwrap();
    let message = "`o` in f32 with 64 elements a row and strides [0, 258, 64] (it has multiples of 4)";
    assert_eq!(refused.feature, message);
}
