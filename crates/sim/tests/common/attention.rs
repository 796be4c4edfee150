//! Forward attention on the simulator, judged by the oracle.

use super::{Random, download, upload};
use fulgurite_core::compare::{self, Verdict};
use fulgurite_core::{DType, Forward, Inputs, Mask, Problem, Rescale, Tensor};
use fulgurite_kernels::attention::forward::plan::{
    ConfigTable, DeviceTensor, ForwardConfig, ForwardPlan, SyncConfig, TensorConfig, Tensors,
};
use fulgurite_ptx::device::{Device, DeviceError, Stream};
use fulgurite_ptx::{Arch, Kernel, Target, TensorUnit, bf16};
use fulgurite_sim::Sim;
use std::sync::Arc;

/// A problem of forward attention.
#[derive(Debug, Clone)]
pub struct Case {
    pub q_len: u32,
    pub k_len: u32,
    pub heads: [u32; 2],
    pub batch: u32,
    pub dim: u32,
    pub causal: bool,
    pub rescale: Rescale,
    pub blocks: u32,
    /// Another tile configuration than the library's.
    pub config: Option<&'static str>,
    /// The unit that multiplies: `mma.sync` as on an A100, `wgmma` as on an H200, or `tcgen05` as on a B200.
    pub unit: TensorUnit,
}

impl Case {
    pub fn problem(&self) -> Problem {
        let Case { q_len, k_len, heads, batch, dim, .. } = *self;
        Problem::builder()
            .dense(batch as usize, q_len as usize, k_len as usize)
            .heads(heads[0] as usize, heads[1] as usize)
            .head_dim(dim as usize)
            .dtype(DType::Bf16)
            .mask(if self.causal { Mask::causal() } else { Mask::none() })
            .build()
            .unwrap()
    }

    /// How the library would run it: head dimensions above 128 do not join tiles, those above 64 pass turns early.
    pub fn plan(&self) -> ForwardPlan {
        let problem = self.problem();
        if self.unit == TensorUnit::Tcgen05 {
            let table = match self.config {
                Some(text) => ConfigTable::of(text.parse::<TensorConfig>().unwrap()),
                None => ConfigTable::default(),
            };
            return ForwardPlan::tcgen05(&problem, Some(self.rescale), &table).unwrap();
        }
        if self.unit == TensorUnit::MmaSync {
            let plan = ForwardPlan::mma_sync(&problem, Some(self.rescale), &ConfigTable::default()).unwrap();
            return plan.with_sync_config(|usual| match self.config {
                Some(text) => SyncConfig { rescale: usual.rescale, ..text.parse().unwrap() },
                None => usual,
            });
        }
        ForwardPlan::new(&problem, Some(self.rescale)).unwrap().with_config(|usual| match self.config {
            Some(text) => ForwardConfig { rescale: usual.rescale, ..text.parse().unwrap() },
            None => usual,
        })
    }

    /// Its kernel.
    pub fn kernel(&self) -> Kernel {
        let target = match self.unit {
            TensorUnit::MmaSync => Target::AMPERE,
            TensorUnit::Wgmma => Target::HOPPER,
            TensorUnit::Tcgen05 => Target::new(Arch::SM_100A),
        };
        self.plan().kernel(target).unwrap()
    }

    /// Runs the kernel, or one that was made of it; the verdicts on o and on the LSE.
    pub fn run(&self, sim: &Sim, kernel: Kernel) -> Result<Vec<(String, Verdict)>, DeviceError> {
        let problem = self.problem();
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
        let mut random = Random(5);
        let mut draw = |shape: &Vec<usize>| -> Vec<bf16> {
            (0..shape.iter().product()).map(|_| bf16::from_f32(random.unit())).collect()
        };
        let [q, k, v] = [draw(&shapes[0]), draw(&shapes[1]), draw(&shapes[2])];
        let [q_buffer, k_buffer, v_buffer] = [&q, &k, &v].map(|x| upload(sim, x));
        let o = sim.allocate(2 * shapes[3].iter().product::<usize>() as u64).unwrap();
        let lse = sim.allocate(4 * problem.lse_shape().iter().product::<usize>() as u64).unwrap();
        let counters = upload(sim, &[0u32; 2]);
        let buffers = [&q_buffer, &k_buffer, &v_buffer, &o];
        let rows = std::array::from_fn(|i| {
            DeviceTensor::packed(buffers[i].span(), std::array::from_fn(|axis| shapes[i][axis] as u64))
        });
        let tensors = Tensors::new(rows, lse.span(), counters.span());
        let launch = self.plan().launch(Arc::new(kernel), &tensors, self.blocks).unwrap().unwrap();
        let module = sim.load(launch.kernel.clone())?;
        sim.launch(&module, launch.grid, &launch.args, Stream::default())?;
        let tensor = |dtype, values: Vec<f64>, shape: &[usize]| Tensor::from_f64(dtype, &values, shape).unwrap();
        let given = |x: &[bf16], shape| tensor(DType::Bf16, x.iter().map(|x| x.to_f64()).collect(), shape);
        let [q, k, v] = [given(&q, &shapes[0]), given(&k, &shapes[1]), given(&v, &shapes[2])];
        let halves = download(sim, &o);
        let halves = halves.as_chunks().0.iter().map(|half| bf16::from_le_bytes(*half).to_f64()).collect();
        let words = download(sim, &lse);
        let words = words.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word).into()).collect();
        let got = Forward {
            o: tensor(DType::Bf16, halves, &shapes[3]),
            lse: tensor(DType::F32, words, &problem.lse_shape()),
        };
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        Ok(compare::check_forward(&inputs.bind(&problem).unwrap(), &got, 0))
    }
}

/// A small one.
pub const BASE: Case = Case {
    q_len: 128,
    k_len: 192,
    heads: [2, 1],
    batch: 1,
    dim: 64,
    causal: false,
    rescale: Rescale::Always,
    blocks: 1,
    config: None,
    unit: TensorUnit::Wgmma,
};
