//! Attention of few queries, as the library would launch it, on the simulator.

use super::upload;
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Inputs, Mask, Problem, Rescale, Tensor, compare};
use fulgurite_kernels::attention::forward::plan::{self, DeviceTensor, Tensors};
use fulgurite_ptx::device::{Device, DeviceError, Span, Stream, Value};
use fulgurite_ptx::{Kernel, Target, bf16, f16};
use fulgurite_sim::Sim;
use std::sync::Arc;

/// A call, and the blocks that it is run with.
#[derive(Debug, Clone)]
pub struct Case {
    pub q_len: usize,
    pub k_len: usize,
    /// Of queries, and of keys and values.
    pub heads: [usize; 2],
    pub batch: usize,
    pub dims: [usize; 2],
    pub dtype: DType,
    pub mask: Mask,
    pub rescale: Option<Rescale>,
    /// Of the scores, before the softmax.
    pub sigma: f64,
    pub blocks: u32,
}

/// What a launch left: o as words, LSE, and the counters.
#[derive(Debug, Clone, PartialEq)]
pub struct Left {
    pub o: Vec<u16>,
    pub lse: Vec<f32>,
    pub counters: Vec<u32>,
}

impl Case {
    /// Three splits and a bit, two of the heads on each side.
    pub fn base() -> Case {
        Case {
            q_len: 1,
            k_len: 800,
            heads: [4, 2],
            batch: 1,
            dims: [64, 64],
            dtype: DType::Bf16,
            mask: Mask::none(),
            rescale: None,
            sigma: 1.0,
            blocks: 4,
        }
    }

    /// Anything that the kernel takes.
    pub fn random(seed: u64) -> Case {
        let mut rng = Rng::new(seed);
        let group = rng.range(1..9);
        let kv_heads = rng.range(1..3);
        let q_len = rng.range(1..17).min(64 / group);
        let k_len = [rng.range(0..70), rng.range(1..300), rng.range(500..900)][rng.range(0..3)];
        let dim = |rng: &mut Rng| 8 * rng.range(1..17);
        let masks = [
            Mask::none(),
            Mask::causal(),
            Mask::causal_top_left(),
            Mask::window(Some(rng.range(0..600) as i64), Some(rng.range(0..20) as i64)),
        ];
        let rescales = [None, Some(Rescale::Always), Some(Rescale::Lazy(8.0)), Some(Rescale::Optimistic(64.0))];
        let dims = match rng.chance(0.5) {
            true => [dim(&mut rng); 2],
            false => [dim(&mut rng), dim(&mut rng)],
        };
        Case {
            q_len,
            k_len,
            heads: [group * kv_heads, kv_heads],
            batch: rng.range(1..3),
            dims,
            dtype: rng.pick(&[DType::Bf16, DType::F16]),
            mask: masks[rng.range(0..4)].clone(),
            rescale: rng.pick(&rescales),
            sigma: rng.pick(&[1.0, 1.0, 6.0]),
            blocks: rng.range(1..6) as u32,
        }
    }

    pub fn problem(&self) -> Problem {
        let [d, dv] = self.dims;
        Problem::builder()
            .dense(self.batch, self.q_len, self.k_len)
            .heads(self.heads[0], self.heads[1])
            .head_dims(d, dv)
            .dtype(self.dtype)
            .mask(self.mask.clone())
            .build()
            .unwrap()
    }

    pub fn plan(&self) -> plan::ForwardPlan {
        plan::ForwardPlan::new(&self.problem(), self.rescale).unwrap()
    }

    pub fn kernel(&self) -> Kernel {
        self.plan().kernel(Target::HOPPER).unwrap()
    }

    /// Arguments of the launch, by name.
    pub fn launch_words<const N: usize>(&self, names: [&str; N]) -> [u32; N] {
        let (plan, kernel, memory) = (self.plan(), Arc::new(self.kernel()), Span::new(4096, 1 << 30));
        let (batch, [d, dv]) = (self.batch, self.dims);
        let at = |len: usize, heads: usize, dim: usize| {
            DeviceTensor::packed(memory, [batch, len, heads, dim].map(|n| n as u64))
        };
        let [q, k, v] = [(self.q_len, 0, d), (self.k_len, 1, d), (self.k_len, 1, dv)]
            .map(|(len, side, dim)| at(len, self.heads[side], dim));
        let tensors = Tensors::new([q, k, v, at(self.q_len, self.heads[0], dv)], memory, memory);
        let tensors = Tensors { scratch: Some(memory), ..tensors };
        let launch = plan.launch(kernel.clone(), &tensors, self.blocks).expect("a call that the kernel takes");
        let launch = launch.expect("a case with rows");
        names.map(|name| {
            let at = kernel.params.iter().position(|param| param.name == name);
            match &launch.args[at.expect("a parameter of the kernel")] {
                Value::U32(x) => *x,
                other => panic!("{name} is {other:?}"),
            }
        })
    }

    /// Random q, k and v.
    pub fn tensors(&self) -> [Tensor; 3] {
        let mut rng = Rng::new(7);
        let [d, dv] = self.dims;
        let mut draw = |len: usize, heads: usize, dim: usize, sigma: f64| {
            let shape = [self.batch, len, heads, dim];
            Tensor::from_f64(self.dtype, &rng.normals(shape.iter().product(), sigma), &shape).unwrap()
        };
        [
            draw(self.q_len, self.heads[0], d, self.sigma),
            draw(self.k_len, self.heads[1], d, 1.0),
            draw(self.k_len, self.heads[1], dv, 1.0),
        ]
    }

    /// Runs a kernel on these tensors.
    pub fn run(&self, sim: &Sim, kernel: Kernel, [q, k, v]: &[Tensor; 3]) -> Result<Left, DeviceError> {
        let plan = self.plan();
        let [q, k, v] = [q, k, v].map(|x| (self.put(sim, x), x.shape()));
        let [batch, q_len, heads, dv] = [self.batch, self.q_len, self.heads[0], self.dims[1]];
        let (o_count, lse_count) = (batch * q_len * heads * dv, batch * q_len * heads);
        // Not a number, so that what is not written shows.
        let o = upload(sim, &vec![bf16::from_bits(0x7fff); o_count.max(32)]);
        let lse = upload(sim, &vec![f32::NAN; lse_count.max(16)]);
        let counters = upload(sim, &vec![0u32; plan.counter_bytes() as usize / 4]);
        let scratch = sim.allocate(plan.scratch_bytes().max(16))?;
        let placed = |(buffer, shape): &(fulgurite_ptx::device::Buffer, &fulgurite_core::tensor::Dims)| {
            DeviceTensor::packed(buffer.span(), [0, 1, 2, 3].map(|axis| shape[axis] as u64))
        };
        let out = DeviceTensor::packed(o.span(), [batch, q_len, heads, dv].map(|n| n as u64));
        let tensors = Tensors::new([placed(&q), placed(&k), placed(&v), out], lse.span(), counters.span());
        let tensors = Tensors { scratch: Some(scratch.span()), ..tensors };
        let launch = plan.launch(Arc::new(kernel), &tensors, self.blocks).expect("a call that the kernel takes");
        let launch = launch.expect("a case without rows");
        let module = sim.load(launch.kernel.clone())?;
        sim.launch(&module, launch.grid, &launch.args, Stream::default())?;
        sim.synchronize(Stream::default())?;
        let read = |span: Span, bytes: usize| -> Result<Vec<u8>, DeviceError> {
            let mut all = vec![0; bytes];
            sim.download(span.first(bytes as u64), &mut all)?;
            Ok(all)
        };
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
        };
        Ok(Left {
            o: read(o.span(), 2 * o_count)?.chunks_exact(2).map(|w| u16::from_le_bytes([w[0], w[1]])).collect(),
            lse: words(&read(lse.span(), 4 * lse_count)?).into_iter().map(f32::from_bits).collect(),
            counters: words(&read(counters.span(), plan.counter_bytes() as usize)?),
        })
    }

    fn put(&self, sim: &Sim, tensor: &Tensor) -> fulgurite_ptx::device::Buffer {
        // An empty tensor has an address too.
        let mut words: Vec<f32> = tensor.view().to_f64().into_iter().map(|x| x as f32).collect();
        words.resize(words.len().max(32), 0.0);
        match self.dtype {
            DType::F16 => upload(sim, &words.into_iter().map(f16::from_f32).collect::<Vec<_>>()),
            _ => upload(sim, &words.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
        }
    }

    /// Compares a result with the oracle, by the tolerance rule; the counters must be as they were.
    pub fn check(&self, [q, k, v]: &[Tensor; 3], left: &Left) {
        let problem = self.problem();
        let number = |&bits: &u16| match self.dtype {
            DType::F16 => f16::from_bits(bits).to_f64(),
            _ => bf16::from_bits(bits).to_f64(),
        };
        let o: Vec<f64> = left.o.iter().map(number).collect();
        let lse: Vec<f64> = left.lse.iter().map(|&x| f64::from(x)).collect();
        let got = Forward {
            o: Tensor::from_f64(self.dtype, &o, &problem.o_shape()).unwrap(),
            lse: Tensor::from_f64(DType::F32, &lse, &problem.lse_shape()).unwrap(),
        };
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let bound = inputs.bind(&problem).unwrap();
        for (name, verdict) in compare::check_forward(&bound, &got, 0) {
            assert!(verdict.ok(), "{self:?}: {name}: {verdict}");
        }
        let mut counters = left.counters.clone();
        counters[1] = 0; // blocks done again
        assert!(counters.iter().all(|&n| n == 0), "{self:?}: counters {:?}", left.counters);
    }
}
