//! Gradients of attention on the simulator, judged by the tolerance rule.

use super::Random;
use fulgurite_core::{DType, Forward, Gradients, Inputs, Mask, Problem, Saved, Tensor, compare, oracle};
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Kernels, Tensors};
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_kernels::attention::forward::plan::DeviceTensor;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Stream};
use fulgurite_ptx::{Target, TensorUnit};
use fulgurite_sim::Sim;

#[derive(Debug, Clone)]
pub struct Case {
    pub q_len: usize,
    pub k_len: usize,
    pub heads: [usize; 2],
    pub batch: usize,
    pub dims: [usize; 2],
    pub mask: Mask,
    pub dtype: DType,
    pub d_lse: bool,
    pub order: Order,
    pub blocks: u32,
    /// Other than the usual.
    pub config: Option<BackwardConfig>,
}

impl Case {
    pub fn base() -> Case {
        Case {
            q_len: 128,
            k_len: 192,
            heads: [2, 1],
            batch: 1,
            dims: [64, 64],
            mask: Mask::none(),
            dtype: DType::Bf16,
            d_lse: false,
            order: Order::Any,
            blocks: 1,
            config: None,
        }
    }

    pub fn problem(&self) -> Problem {
        Problem::builder()
            .dense(self.batch, self.q_len, self.k_len)
            .heads(self.heads[0], self.heads[1])
            .head_dims(self.dims[0], self.dims[1])
            .dtype(self.dtype)
            .mask(self.mask.clone())
            .build()
            .unwrap()
    }

    pub fn plan(&self) -> BackwardPlan {
        self.plan_for(Target::HOPPER)
    }

    /// The plan for a GPU, by its own tensor unit.
    pub fn plan_for(&self, target: Target) -> BackwardPlan {
        let plan = match target.arch.tensor {
            TensorUnit::Wgmma => BackwardPlan::new(&self.problem(), self.d_lse, self.order).unwrap(),
            TensorUnit::Tcgen05 => {
                BackwardPlan::tcgen05(&self.problem(), (self.d_lse, self.order), target.arch).unwrap()
            }
            TensorUnit::MmaSync => {
                BackwardPlan::mma_sync(&self.problem(), (self.d_lse, self.order), target.arch).unwrap()
            }
        };
        self.config.map_or(plan.clone(), |config| plan.with_config(config))
    }

    /// Runs these kernels on random inputs; the gradients, and what is wrong with them.
    pub fn run(&self, sim: &Sim, kernels: &Kernels) -> Result<(Gradients, Vec<String>), DeviceError> {
        let problem = self.problem();
        let mut random = Random(7);
        let mut draw = |dtype: DType, shape: &[usize]| {
            let values: Vec<f64> =
                (0..shape.iter().product()).map(|_| 1.5 * f64::from(random.unit() + random.unit())).collect();
            Tensor::from_f64(dtype, &values, shape).unwrap()
        };
        let (q, k, v) = (
            draw(self.dtype, &problem.q_shape()),
            draw(self.dtype, &problem.k_shape()),
            draw(self.dtype, &problem.v_shape()),
        );
        let (d_o, d_lse) = (draw(self.dtype, &problem.o_shape()), draw(DType::F32, &problem.lse_shape()));
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let bound = inputs.bind(&problem).unwrap();
        let forward: Forward = oracle::forward(&bound).to_forward(&problem).unwrap();
        let saved = Saved { d_lse: self.d_lse.then(|| d_lse.view()), ..forward.saved(d_o.view()) };

        let upload = |tensor: &Tensor| -> Buffer {
            let bytes = tensor_bytes(tensor);
            let buffer = sim.allocate(bytes.len().max(16) as u64).unwrap();
            sim.upload(buffer.span().first(bytes.len() as u64), &bytes).unwrap();
            buffer
        };
        let placed = |buffer: &Buffer, tensor: &Tensor| {
            let shape = std::array::from_fn(|i| tensor.shape()[i] as u64);
            DeviceTensor::packed(buffer.span(), shape)
        };
        let nan = |like: &Tensor| {
            let values = vec![f64::NAN; like.shape().count()];
            Tensor::from_f64(self.dtype, &values, like.shape()).unwrap()
        };
        let tensors = [&q, &k, &v, &forward.o, &d_o].map(|t| (upload(t), t));
        let results = [&q, &k, &v].map(|t| (upload(&nan(t)), t));
        let (lse, d_lse) = (upload(&forward.lse), upload(&d_lse));
        let plan = self.plan_for(sim.target());
        let scratch = sim.allocate(plan.scratch_bytes()).unwrap();
        let [q_at, k_at, v_at, o_at, d_o_at] = std::array::from_fn(|i| placed(&tensors[i].0, tensors[i].1));
        let [d_q, d_k, d_v] = std::array::from_fn(|i| placed(&results[i].0, results[i].1));
        let places = Tensors {
            d_lse: self.d_lse.then(|| d_lse.span()),
            ..Tensors::new([q_at, k_at, v_at, o_at], lse.span(), d_o_at, [d_q, d_k, d_v])
        };
        let plan = plan.plan(kernels, &places, scratch.span(), self.blocks).unwrap();
        plan.run(sim, Stream::default(), &mut |kernel| sim.load(kernel.clone()))?;
        sim.synchronize(Stream::default())?;
        let mut gradients = Gradients::zeros(&problem).unwrap();
        for (tensor, (buffer, _)) in
            [&mut gradients.d_q, &mut gradients.d_k, &mut gradients.d_v].into_iter().zip(&results)
        {
            let bytes = super::download(sim, buffer);
            let values: Vec<f64> = bytes
                .chunks_exact(2)
                .take(tensor.shape().count())
                .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
                .map(|bits| match self.dtype {
                    DType::F16 => half::f16::from_bits(bits).to_f64(),
                    _ => half::bf16::from_bits(bits).to_f64(),
                })
                .collect();
            tensor.view_mut().write_f64(&values);
        }
        let wrong = compare::check_backward(&bound, &saved, &gradients, 0)
            .into_iter()
            .filter(|(_, verdict)| !verdict.ok())
            .map(|(name, verdict)| format!("{name}: {verdict:?}"))
            .collect();
        Ok((gradients, wrong))
    }

    /// Runs the library's kernels for the simulated GPU, which must be right and clean.
    pub fn check(&self, sim: &Sim) -> Gradients {
        let kernels = self.plan_for(sim.target()).kernels(sim.target()).unwrap();
        match self.run(sim, &kernels) {
            Err(e) => {
                let found: String = sim.findings().iter().take(3).map(|f| format!("{f}\n")).collect();
                panic!("{self:?}: {e}\n{found}")
            }
            Ok((gradients, wrong)) => {
                assert!(wrong.is_empty(), "{self:?}: {wrong:#?}");
                assert!(sim.findings().is_empty(), "{self:?}: {:?}", sim.findings());
                gradients
            }
        }
    }
}

fn tensor_bytes(tensor: &Tensor) -> Vec<u8> {
    if let Some(all) = tensor.as_slice::<f32>() {
        return all.iter().flat_map(|x| x.to_le_bytes()).collect();
    }
    if let Some(all) = tensor.as_slice::<half::f16>() {
        return all.iter().flat_map(|x| x.to_le_bytes()).collect();
    }
    tensor.as_slice::<half::bf16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect()
}
