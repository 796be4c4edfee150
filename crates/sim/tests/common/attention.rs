//! Forward attention on the simulator, with a reference in f64.

use super::{Random, download, upload};
use fulgurite_core::{DType, Mask, Problem, Rescale};
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
    /// How the library would run it: head dimensions above 128 do not join tiles, those above 64 pass turns early.
    pub fn plan(&self) -> ForwardPlan {
        let Case { q_len, k_len, heads, batch, dim, .. } = *self;
        let problem = Problem::builder()
            .dense(batch as usize, q_len as usize, k_len as usize)
            .heads(heads[0] as usize, heads[1] as usize)
            .head_dim(dim as usize)
            .dtype(DType::Bf16)
            .mask(if self.causal { Mask::causal() } else { Mask::none() })
            .build()
            .unwrap();
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

    /// Runs the kernel, or one that was made of it; the largest errors of o and of the LSE.
    pub fn run(&self, sim: &Sim, kernel: Kernel) -> Result<[f64; 2], DeviceError> {
        let Case { q_len, k_len, heads: [heads, kv_heads], batch, dim, .. } = *self;
        let mut random = Random(5);
        let mut draw = |n: u32| -> Vec<bf16> { (0..n).map(|_| bf16::from_f32(random.unit())).collect() };
        let (q, k, v) = (
            draw(batch * q_len * heads * dim),
            draw(batch * k_len * kv_heads * dim),
            draw(batch * k_len * kv_heads * dim),
        );
        let [q_buffer, k_buffer, v_buffer] = [&q, &k, &v].map(|x| upload(sim, x));
        let o = sim.allocate(u64::from(batch * q_len * heads * dim * 2)).unwrap();
        let lse = sim.allocate(u64::from(batch * heads * q_len * 4)).unwrap();
        let counters = upload(sim, &[0u32; 2]);
        let scale = 1.0 / (dim as f32).sqrt();
        let sides =
            [(&q_buffer, q_len, heads), (&k_buffer, k_len, kv_heads), (&v_buffer, k_len, kv_heads), (&o, q_len, heads)];
        let tensors =
            sides.map(|(b, len, heads)| DeviceTensor::packed(b.span(), [batch, len, heads, dim].map(u64::from)));
        let tensors = Tensors::new(tensors, lse.span(), counters.span());
        let launch = self.plan().launch(Arc::new(kernel), &tensors, self.blocks).unwrap().unwrap();
        let module = sim.load(launch.kernel.clone())?;
        sim.launch(&module, launch.grid, &launch.args, Stream::default())?;
        let (o, lse) = (download(sim, &o), download(sim, &lse));
        let mut worst = [0.0f64; 2];
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let kv = h / (heads / kv_heads);
            let at = |x: &[bf16], len: u32, heads: u32, row: u32, head: u32, i: u32| {
                x[(((b * len + row) * heads + head) * dim + i) as usize].to_f64()
            };
            for row in 0..q_len {
                let seen = if self.causal { (row + k_len + 1).saturating_sub(q_len).min(k_len) } else { k_len };
                let s: Vec<f64> = (0..seen)
                    .map(|j| {
                        (0..dim)
                            .map(|i| at(&q, q_len, heads, row, h, i) * at(&k, k_len, kv_heads, j, kv, i))
                            .sum::<f64>()
                            * f64::from(scale)
                    })
                    .collect();
                let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let p: Vec<f64> = s.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = p.iter().sum();
                let byte = 4 * ((b * heads + h) * q_len + row) as usize;
                let got = f64::from(f32::from_le_bytes(lse[byte..byte + 4].try_into().unwrap()));
                if seen == 0 {
                    assert_eq!(got, f64::NEG_INFINITY);
                } else {
                    worst[1] = worst[1].max((got - max - sum.ln()).abs());
                }
                for i in 0..dim {
                    let want =
                        p.iter().enumerate().map(|(j, p)| p * at(&v, k_len, kv_heads, j as u32, kv, i)).sum::<f64>()
                            / sum.max(1e-300);
                    let byte = 2 * (((b * q_len + row) * heads + h) * dim + i) as usize;
                    let got = bf16::from_le_bytes([o[byte], o[byte + 1]]).to_f64();
                    assert!(!got.is_nan(), "{self:?}: o[{b}][{row}][{h}][{i}]");
                    worst[0] = worst[0].max((got - want).abs());
                }
            }
        }
        Ok(worst)
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
