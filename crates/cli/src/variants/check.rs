//! Rows of `check` for the systems around attention: random problems against their oracles.

use crate::Failure;
use crate::ledger::Ledger;
use fulgurite::cache::{CacheSpec, KvCache, Storage};
use fulgurite::variants::{
    self, DeltaForm, DeltaForward, DeltaGradients, DeltaSegments, ParallaxForward, ParallaxGradients,
};
use fulgurite::{
    Choice, Cpu, DType, Engine, Error, Exp, Forward, Gradients, Inputs, Int8Attention, Mask, Precision, Problem, Saved,
    Settings, Tensor,
};
use fulgurite_core::cases::variants::{DeltaCase, LighthouseCase, ParallaxCase, SkipCase};
use fulgurite_core::compare::{self, Verdict};
use fulgurite_core::format::Bits;
use fulgurite_core::random::Rng;
use fulgurite_core::{gated_delta, lighthouse, parallax};

/// The rows.
pub const FEATURES: [&str; 5] = ["block skipping", "parallax", "lighthouse", "gated delta rule", "cache"];

/// Problems of each system in every run.
pub const CASES: u64 = 6;

type Judge = fn(&Cpu, u64, DType) -> Result<Vec<(String, Verdict)>, Error>;

const JUDGES: [Judge; 5] = [skip, parallax, light, delta, cache];

/// The name of a case.
pub fn name(feature: &str, seed: u64, dtype: DType) -> String {
    format!("{feature}, seed {seed}, {dtype}")
}

/// Enters the oracles' verdicts on every system and engine.
pub(crate) fn compare(
    choices: &[Choice],
    settings: &Settings,
    dtype: DType,
    seeds: impl Iterator<Item = u64>,
    asked: &str,
    ledger: &mut Ledger,
) -> Result<(), Failure> {
    let seeds: Vec<u64> = seeds.collect();
    for &choice in choices {
        for (feature, judge) in FEATURES.into_iter().zip(JUDGES) {
            let named = seeds.iter().map(|&seed| (seed, name(feature, seed, dtype)));
            let cases: Vec<_> = named.filter(|(_, name)| name.contains(asked)).collect();
            ledger.cases += cases.len();
            let Ok(engine) = variants::cpu(choice, settings, feature) else {
                cases.first().iter().for_each(|_| ledger.refused(&choice.to_string(), feature, dtype));
                continue;
            };
            for (seed, name) in cases {
                let verdicts = judge(&engine, seed, dtype)?;
                ledger.enter(engine.name(), &[feature], dtype, &name, &verdicts);
            }
        }
    }
    Ok(())
}

fn skip(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let case = SkipCase::random(seed, dtype);
    let (problem, inputs) = (&case.problem, case.inputs());
    let mut out = Forward::zeros(problem.base())?;
    let outcome = variants::skip_forward(&problem.bind(&inputs)?, &mut out.outputs(), &engine.options());
    let inputs = inputs.block_mask(&outcome.kept);
    let meaning = inputs.bind(problem.meaning())?;
    let mut verdicts = compare::check_forward(&meaning, &out, 0);
    let saved = Saved { d_lse: None, ..out.saved(case.d_o.view()) };
    let gradients: Gradients = engine.backward(problem.meaning(), &inputs, &saved, &Default::default())?;
    verdicts.extend(compare::check_backward(&meaning, &saved, &gradients, 0));
    Ok(verdicts)
}

fn parallax(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let case = ParallaxCase::random(seed, dtype);
    let inputs = case.inputs();
    let bound = case.parallax.bind(&inputs, case.r.view())?;
    let mut out = ParallaxForward::zeros(&case.parallax)?;
    variants::parallax_forward(&bound, &mut out.outputs(), &engine.options());
    let mut gradients = ParallaxGradients::zeros(&case.parallax)?;
    variants::parallax_backward(&bound, &out, &case.d_o.view(), &mut gradients, &engine.options());
    Ok(parallax::check(&bound, &out, Some((&case.d_o.view(), &gradients))))
}

fn light(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let LighthouseCase { light, q, k, v, d_o } = LighthouseCase::random(seed, dtype);
    let out = variants::lighthouse_forward(&light, &q.view(), &k.view(), &v.view(), &engine.options())?;
    let g = variants::lighthouse_backward(&light, &out, &d_o.view(), &engine.options())?;
    Ok(lighthouse::check(&light, &out.entries, [&q, &k, &v], &out.o, Some((&d_o, [&g.d_q, &g.d_k, &g.d_v]))))
}

fn delta(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let case = DeltaCase::random(seed, dtype);
    let inputs = case.inputs();
    let bound = inputs.bind(&case.problem)?;
    let mut verdicts = Vec::new();
    for form in [DeltaForm::Chunked, DeltaForm::Recurrent] {
        let mut out = DeltaForward::zeros(&case.problem)?;
        variants::gated_delta_forward(&bound, &mut out.outputs(), form, DeltaSegments::Auto, &engine.options());
        verdicts.extend(gated_delta::check_forward(&bound, &out, 0));
    }
    let mut gradients = DeltaGradients::zeros(&case.problem)?;
    variants::gated_delta_backward(&bound, &case.saved(), &mut gradients.outputs(), &engine.options());
    verdicts.extend(gated_delta::check_backward(&bound, &case.saved(), &gradients, 0));
    Ok(verdicts)
}

/// Tokens appended in pieces, some taken back, then attended to.
fn cache(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let mut rng = Rng::new(seed);
    let (heads, dim) = (rng.range(1..4), rng.pick(&[20, 64, 128]));
    let bits = |rng: &mut Rng| (0..heads).map(|_| rng.pick(&[Bits::Four, Bits::Two])).collect();
    let storage = match seed % 3 {
        0 => Storage::Float(dtype),
        _ => Storage::Packed { k: bits(&mut rng), v: bits(&mut rng) },
    };
    let spec = CacheSpec { heads, head_dim: dim, value_dim: dim, capacity: 5000, storage };
    let mut cache = KvCache::new(spec)?;
    for tokens in [rng.range(1..300), 1, rng.range(1..100), if seed % 3 == 1 { 2100 } else { 1 }] {
        let mut rows = || Tensor::from_f64(dtype, &rng.normals(tokens * heads * dim, 1.0), &[tokens, heads, dim]);
        let (k, v) = (rows()?, rows()?);
        cache.append(&k.view(), &v.view())?;
        let back = rng.range(0..tokens.min(70));
        cache.truncate(cache.len() - back)?;
    }
    let (rows, q_heads) = (rng.range(1..4).min(cache.len()), heads * rng.range(1..4));
    let q = Tensor::from_f64(dtype, &rng.normals(rows * q_heads * dim, 1.0), &[rows, q_heads, dim])?;
    judge_cache(engine, &cache, &q)
}

/// Attention over a cache, judged against the values that the cache holds.
pub(crate) fn judge_cache(engine: &Cpu, cache: &KvCache, q: &Tensor) -> Result<Vec<(String, Verdict)>, Error> {
    let (spec, len, dtype) = (cache.spec(), cache.len(), q.dtype());
    let [rows, q_heads, dim] = [q.shape()[0], q.shape()[1], q.shape()[2]];
    let (o, lse) = cache.attend(&q.view(), 1.0 / (dim as f32).sqrt(), &engine.options())?;
    let packed = matches!(spec.storage, Storage::Packed { .. });
    let builder = Problem::builder().dense(1, rows, len).heads(q_heads, spec.heads).head_dims(dim, spec.value_dim);
    let builder = builder.mask(Mask::causal());
    let problem = match packed {
        // Its exponential is a series of that quality.
        true => builder.precision(Precision::Int8(Int8Attention::CACHE)).exp(Exp::Poly { degree: 4, share: 1.0 }),
        false => builder.dtype(dtype),
    };
    let problem = problem.build()?;
    let held = |i: usize, shape: &[usize]| {
        let rows = (0..len).flat_map(|t| (0..spec.heads).filter_map(move |h| cache.get(t, h)));
        let values: Vec<f64> = rows.flat_map(|row| row[i].clone()).map(f64::from).collect();
        Tensor::from_f64(problem.dtype(), &values, shape)
    };
    let (k, v) = (held(0, &problem.k_shape())?, held(1, &problem.v_shape())?);
    let queries = Tensor::from_f64(problem.dtype(), &q.view().to_f64(), &problem.q_shape())?;
    let got = Forward {
        o: Tensor::from_f64(dtype, &o.view().to_f64(), &problem.o_shape())?,
        lse: Tensor::from_f64(DType::F32, &lse.view().to_f64(), &problem.lse_shape())?,
    };
    let inputs = Inputs::new(queries.view(), k.view(), v.view());
    let bound = inputs.bind(&problem)?;
    Ok(if packed { compare::check_held(&bound, &got, dtype) } else { compare::check_forward(&bound, &got, 0) })
}
