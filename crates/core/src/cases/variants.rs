//! Random problems of the variants of attention, with all tensors of a forward and a backward call.

use crate::dtype::DType;
use crate::gated_delta::{DeltaInputs, DeltaSaved, GatedDelta, QkNorm};
use crate::inputs::Inputs;
use crate::lighthouse::Lighthouse;
use crate::mask::Mask;
use crate::parallax::Parallax;
use crate::problem::Problem;
use crate::random::Rng;
use crate::skip::{HeadClass, Lambda, Proxy, Skip, SkipProblem};
use crate::tensor::Tensor;

fn normal(rng: &mut Rng, dtype: DType, shape: &[usize], sigma: f64) -> Tensor {
    Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), sigma), shape).expect("a shape with its values")
}

/// A case of block-skip attention.
#[derive(Debug, Clone)]
pub struct SkipCase {
    /// The problem of the case.
    pub problem: SkipProblem,
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// Gradient of the output.
    pub d_o: Tensor,
}

impl SkipCase {
    /// Draws tensors for a problem. Queries are large, so that attention is peaked and tiles can be dropped.
    pub fn new(rng: &mut Rng, problem: SkipProblem) -> SkipCase {
        let base = problem.base();
        let mut tensor = |shape: Vec<usize>, sigma| normal(rng, base.dtype(), &shape, sigma);
        let (q, k) = (tensor(base.q_shape(), 3.0), tensor(base.k_shape(), 1.0));
        let (v, d_o) = (tensor(base.v_shape(), 1.0), tensor(base.o_shape(), 1.0));
        SkipCase { problem, q, k, v, d_o }
    }

    /// A random mixture of classes, proxies and lambdas.
    pub fn random(seed: u64, dtype: DType) -> SkipCase {
        let mut rng = Rng::new(seed);
        let kv = rng.range(1..3);
        let heads = kv * rng.range(1..3);
        let n = rng.pick(&[5, 64, 100, 257, 300]);
        let k_len = n + rng.pick(&[0, 0, 33]);
        let class = |rng: &mut Rng| match rng.range(0..3) {
            0 => HeadClass::Dense,
            1 => HeadClass::Window { keys: rng.pick(&[1, 20, 128, 1000]), sinks: rng.pick(&[0, 4, 100]) },
            _ => HeadClass::Log,
        };
        let classes =
            if rng.chance(0.5) { vec![class(&mut rng)] } else { (0..heads).map(|_| class(&mut rng)).collect() };
        let proxy = match rng.range(0..3) {
            0 => Some(Proxy::Mass { mass: 0.8, similarity: -0.5 }),
            1 => Some(Proxy::Top { share: 0.4, similarity: 0.0 }),
            _ => None,
        };
        let lambda = match rng.range(0..3) {
            0 => None,
            1 => Some(Lambda::Fixed(rng.pick(&[0.0, 1e-3, 0.1]))),
            _ => Some(Lambda::PerKey(5.0)),
        };
        let tile = [rng.pick(&[16, 64, 128, 100]), rng.pick(&[16, 32, 64, 128])];
        let dim = rng.pick(&[8, 16, 40]);
        let builder = Problem::builder().dense(rng.range(1..3), n, k_len).heads(heads, kv).head_dim(dim);
        let skip = Skip { classes, proxy, lambda, tile, first_tile: rng.chance(0.7) };
        let problem = SkipProblem::new(builder.dtype(dtype).mask(Mask::causal()), skip).expect("a problem");
        SkipCase::new(&mut Rng::new(seed + 7), problem)
    }

    /// The tensors of a forward call.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs::new(self.q.view(), self.k.view(), self.v.view())
    }
}

/// A case of Parallax.
#[derive(Debug, Clone)]
pub struct ParallaxCase {
    /// The problem of the case.
    pub parallax: Parallax,
    /// Queries.
    pub q: Tensor,
    /// Probes, one per query.
    pub r: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// Gradient of the output.
    pub d_o: Tensor,
    /// Documents of queries and of keys, if the mask needs them.
    documents: Option<[Tensor; 2]>,
}

impl ParallaxCase {
    /// A random mixture of lengths, groups and masks.
    pub fn random(seed: u64, dtype: DType) -> ParallaxCase {
        let mut rng = Rng::new(seed);
        // If every row sees one key, all gradients except d_v are exactly 0 and the rule would allow no rounding.
        let (q_len, k_len) = (rng.pick(&[1, 2, 5, 17, 64, 70, 130]), rng.pick(&[5, 16, 65, 128, 140, 700]));
        let kv_heads = rng.range(1..3);
        let batch = rng.range(1..3);
        let masked = rng.chance(0.3);
        let mask = match rng.range(0..3) {
            0 => Mask::none(),
            1 => Mask::causal(),
            _ => Mask::window(Some(30), Some(3)),
        };
        let mask = if masked { mask.and(Mask::documents()) } else { mask };
        let builder = Problem::builder().dense(batch, q_len, k_len).heads(kv_heads * rng.range(1..4), kv_heads);
        let (d, dv) = (rng.pick(&[4, 16, 33, 64]), rng.pick(&[4, 16, 40]));
        let problem = builder.head_dims(d, dv).dtype(dtype).mask(mask).build().expect("a problem");
        let mut tensor = |shape: &[usize], sigma: f64| normal(&mut rng, dtype, shape, sigma);
        let (q, r) = (tensor(&problem.q_shape(), 1.0), tensor(&problem.q_shape(), 0.3));
        let (k, v) = (tensor(&problem.k_shape(), 1.0), tensor(&problem.v_shape(), 1.0));
        let d_o = tensor(&problem.o_shape(), 1.0);
        let documents = masked.then(|| {
            [q_len, k_len].map(|n| {
                let ids: Vec<i32> = (0..batch * n).map(|i| (i % n * 2 / n) as i32).collect();
                Tensor::new(ids, &[batch, n]).expect("as many as positions")
            })
        });
        ParallaxCase { parallax: Parallax::new(problem).expect("a problem"), q, r, k, v, d_o, documents }
    }

    /// The tensors of a forward call, except r.
    pub fn inputs(&self) -> Inputs<'_> {
        let inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        match &self.documents {
            None => inputs,
            Some([q, k]) => inputs.aux("documents_q", q.view()).aux("documents_k", k.view()),
        }
    }
}

/// A case of Lighthouse.
#[derive(Debug, Clone)]
pub struct LighthouseCase {
    /// The problem of the case.
    pub light: Lighthouse,
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// Gradient of the output.
    pub d_o: Tensor,
}

impl LighthouseCase {
    /// A random mixture of levels, pools and budgets.
    pub fn random(seed: u64, dtype: DType) -> LighthouseCase {
        let mut rng = Rng::new(seed);
        let (levels, pool, tile) = (rng.range(1..4), rng.pick(&[2, 4]), rng.pick(&[2, 4]));
        let coarsest = pool * tile * rng.range(1..3);
        let budget = tile * rng.range(1..coarsest / tile + 1);
        let len = coarsest * pool.pow(levels as u32 - 1);
        let (batch, kv, group) = (rng.range(1..3), rng.range(1..3), rng.range(1..3));
        let dims = [rng.pick(&[3, 8, 17]), rng.pick(&[2, 16])];
        let light = Lighthouse::new([batch, len, kv * group, kv], dims, levels, pool, budget, tile);
        let light = light.and_then(|light| light.dtype(dtype)).expect("a problem");
        let mut tensor = |shape: &[usize]| normal(&mut rng, dtype, shape, 1.0);
        let (q, k, v) = (tensor(&light.q_shape()), tensor(&light.k_shape()), tensor(&light.v_shape()));
        let d_o = tensor(&light.o_shape());
        LighthouseCase { light, q, k, v, d_o }
    }
}

/// Sizes and gates of a problem of the gated delta rule.
#[derive(Debug, Clone)]
pub struct DeltaSizes {
    /// Tokens of each sequence; a single length if they are not packed.
    pub lengths: Vec<usize>,
    /// Whether sequences are packed, with offsets.
    pub packed: bool,
    /// Number of heads of q and k, and of v.
    pub heads: [usize; 2],
    /// Dimension of q and k, and of v.
    pub dims: [usize; 2],
    /// Decay of the last head, as a power of e per token; the first head has none.
    pub decay: f64,
    /// Where q and k are normalised.
    pub norm: QkNorm,
    /// Whether sequences start from given states.
    pub initial: bool,
}

/// A case of the gated delta rule with realistic gates and keys: keys of length 1, steps below 1.
#[derive(Debug, Clone)]
pub struct DeltaCase {
    /// The problem.
    pub problem: GatedDelta,
    /// q, k, v, g, beta, initial state, d_o, gradient of the final state.
    pub tensors: [Tensor; 8],
    /// Offsets of packed sequences.
    pub offsets: Option<Tensor>,
}

impl DeltaCase {
    /// Draws tensors for these sizes.
    pub fn new(rng: &mut Rng, dtype: DType, sizes: &DeltaSizes) -> DeltaCase {
        let DeltaSizes { lengths, packed, heads: [h, hv], dims: [kd, vd], decay, norm, initial } = sizes;
        let mut offsets = vec![0i32];
        lengths.iter().for_each(|n| offsets.push(offsets[offsets.len() - 1] + *n as i32));
        let mut builder = GatedDelta::builder().heads(*h, *hv).head_dims(*kd, *vd).dtype(dtype).qk_norm(*norm);
        builder = if *packed { builder.packed(&offsets) } else { builder.dense(lengths.len(), lengths[0]) };
        if *initial {
            builder = builder.initial_state();
        }
        let problem = builder.build().expect("a problem");
        let mut random = |shape: &[usize], dtype, map: &dyn Fn(usize, f64) -> f64| {
            let n = shape.iter().product();
            let values: Vec<f64> = rng.normals(n, 1.0).into_iter().enumerate().map(|(i, x)| map(i, x)).collect();
            Tensor::from_f64(dtype, &values, shape).expect("a shape with its values")
        };
        let same = |_: usize, x: f64| x;
        let softplus = |x: f64| (1.0 + x.exp()).ln();
        // Decays as in published tests: from none in the first head to the strongest in the last.
        let gate = |i: usize, x: f64| -decay * (i % hv) as f64 / (*hv as f64) * softplus(0.5 * x + 1.0);
        let (q, v, gates) = (problem.q_shape(), problem.v_shape(), problem.gate_shape());
        let state = problem.state_shape();
        // Keys longer than 1 make the rule overshoot, so that states grow without bound.
        let unit = |rows: Tensor| {
            let mut values = rows.view().to_f64();
            for row in values.chunks_exact_mut(*kd).filter(|_| *norm == QkNorm::Given) {
                let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
                row.iter_mut().for_each(|x| *x /= length);
            }
            Tensor::from_f64(dtype, &values, rows.shape()).expect("the same shape")
        };
        let tensors = [
            unit(random(&q, DType::F32, &same)),
            unit(random(&q, DType::F32, &same)),
            random(&v, dtype, &same),
            random(&gates, DType::F32, &gate),
            random(&gates, DType::F32, &|_, x| 1.0 / (1.0 + (-x).exp())),
            random(&state, DType::F32, &same),
            random(&v, dtype, &same),
            random(&state, DType::F32, &|_, x| x / 8.0),
        ];
        let offsets = packed.then(|| Tensor::new(offsets.clone(), &[offsets.len()]).expect("a list"));
        DeltaCase { problem, tensors, offsets }
    }

    /// A random mixture of lengths, heads, dimensions and gates.
    pub fn random(seed: u64, dtype: DType) -> DeltaCase {
        let mut rng = Rng::new(seed);
        let heads = rng.range(1..4);
        let dims = [5, 8, 16, 20, 33, 48, 64];
        let packed = rng.chance(0.5);
        let lengths = [0, 1, 2, 17, 63, 64, 65, 100, 128, 200];
        let count = rng.range(1..4);
        let one = rng.pick(&lengths);
        let lengths = (0..count).map(|_| if packed { rng.pick(&lengths) } else { one }).collect();
        let sizes = DeltaSizes {
            lengths,
            packed,
            heads: [heads, heads * rng.range(1..4)],
            dims: [rng.pick(&dims), rng.pick(&[1, 3, 8, 33, 64])],
            decay: rng.pick(&[0.0, 0.1, 1.0, 16.0]),
            norm: rng.pick(&[QkNorm::Given, QkNorm::Inside]),
            initial: rng.chance(0.5),
        };
        DeltaCase::new(&mut rng, dtype, &sizes)
    }

    /// The tensors of a forward call.
    pub fn inputs(&self) -> DeltaInputs<'_> {
        let [q, k, v, g, beta, state, ..] = self.tensors.each_ref().map(Tensor::view);
        let mut inputs = DeltaInputs::new(q, k, v, g, beta);
        if self.problem.has_initial_state() {
            inputs = inputs.initial_state(state);
        }
        if let Some(offsets) = &self.offsets {
            inputs = inputs.cu_seqlens(offsets.view());
        }
        inputs
    }

    /// The inputs of backward.
    pub fn saved(&self) -> DeltaSaved<'_> {
        DeltaSaved { d_o: self.tensors[6].view(), d_final_state: Some(self.tensors[7].view()) }
    }
}
