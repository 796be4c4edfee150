//! Rows of `bench` for the systems around attention: each in turn with our own causal attention over the same tensors,
//! every measured result judged by its oracle.

use crate::Failure;
use crate::args::BenchArgs;
use crate::ledger::share;
use crate::terminal;
use crate::variants::args::{Format, System};
use crate::variants::check::judge_cache;
use comfy_table::{CellAlignment, Table};
use fulgurite::cache::{CacheSpec, KvCache, Storage};
use fulgurite::variants::{
    self, DeltaForm, DeltaForward, DeltaInputs, DeltaSegments, GatedDelta, HeadClass, Lighthouse, Parallax,
    ParallaxForward, QkNorm, Skip, SkipProblem,
};
use fulgurite::{Cpu, DType, Engine, Error, Forward, Inputs, Mask, Precision, Problem, Run, Tensor};
use fulgurite_core::compare::{self, Verdict};
use fulgurite_core::format::Bits;
use fulgurite_core::random::Rng;
use fulgurite_core::{gated_delta, lighthouse, parallax};
use serde::Serialize;
use std::time::Instant;

/// The measured times and errors of one system.
#[derive(Debug, Clone, Serialize)]
pub struct Measurement {
    /// The system.
    pub system: System,
    /// Type of the tensors.
    pub dtype: String,
    /// Sizes and settings.
    pub what: String,
    /// Seconds of forward, median.
    pub seconds: f64,
    /// Seconds of causal attention over tensors of the same shape, median, in turn with it.
    pub attention_seconds: f64,
    /// The largest error as a share of the one that the tolerance rule allows.
    pub worst_share: f64,
    /// Whether every tensor is within the rule.
    pub ok: bool,
}

/// Tensors and sizes of a row.
struct Setup<'a> {
    engine: &'a Cpu,
    dtype: DType,
    rng: Rng,
    repeats: usize,
    quick: bool,
}

/// Measures the rows that were asked for; none where the engine has none of the systems.
pub fn measure(args: &BenchArgs, dtypes: &[DType]) -> Result<Vec<Measurement>, Failure> {
    let Ok(engine) = variants::cpu(args.engine.engine, &args.engine.settings(), "bench") else { return Ok(Vec::new()) };
    if args.attention_only {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for &system in &args.around {
        for &dtype in dtypes {
            let rng = Rng::new(args.seed);
            let mut setup = Setup { engine: &engine, dtype, rng, repeats: args.repeats, quick: args.quick };
            rows.push(match system {
                System::Skip => setup.skip()?,
                System::Parallax => setup.parallax()?,
                System::Lighthouse => setup.lighthouse()?,
                System::GatedDelta => setup.gated_delta()?,
                System::In(format) => setup.precision(format)?,
                System::Cache => setup.cache()?,
            });
        }
    }
    Ok(rows)
}

impl Setup<'_> {
    fn normal(&mut self, shape: &[usize]) -> Result<Tensor, Error> {
        Ok(Tensor::from_f64(self.dtype, &self.rng.normals(shape.iter().product(), 1.0), shape)?)
    }

    /// Medians of a system and of causal attention, one call of each in turn.
    fn race(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        mut run: impl FnMut() -> Result<(), Error>,
    ) -> Result<[f64; 2], Error> {
        let mut plain = Forward::zeros(problem)?;
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..=self.repeats {
            let start = Instant::now();
            run()?;
            let middle = Instant::now();
            self.engine.forward_into(problem, inputs, &mut plain.outputs(), &Run::default())?;
            // The first round warms up.
            if round > 0 {
                times[0].push((middle - start).as_secs_f64());
                times[1].push(middle.elapsed().as_secs_f64());
            }
        }
        Ok(times.map(|mut all| {
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        }))
    }

    fn measurement(
        &self,
        system: System,
        what: String,
        [seconds, attention_seconds]: [f64; 2],
        found: &[(String, Verdict)],
    ) -> Measurement {
        Measurement {
            system,
            dtype: self.dtype.to_string(),
            what,
            seconds,
            attention_seconds,
            worst_share: found.iter().map(|(_, verdict)| share(verdict)).fold(0.0, f64::max),
            ok: found.iter().all(|(_, verdict)| verdict.ok()),
        }
    }

    fn skip(&mut self) -> Result<Measurement, Error> {
        let n = if self.quick { 512 } else { 4096 };
        let builder = Problem::builder().dense(1, n, n).heads(2, 2).head_dim(64).dtype(self.dtype).mask(Mask::causal());
        let class = HeadClass::Window { keys: 128, sinks: 16 };
        let problem = SkipProblem::new(builder, Skip { classes: vec![class], ..Skip::default() })?;
        let shape = problem.base().q_shape();
        let (q, k, v) = (self.normal(&shape)?, self.normal(&shape)?, self.normal(&shape)?);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let bound = problem.bind(&inputs)?;
        let mut out = Forward::zeros(problem.base())?;
        let mut kept = None;
        let times = self.race(problem.base(), &inputs, || {
            kept = Some(variants::skip_forward(&bound, &mut out.outputs(), &self.engine.options()).kept);
            Ok(())
        })?;
        let mut inputs = inputs.clone();
        inputs.block_mask = kept.as_ref();
        let found = compare::check_forward(&inputs.bind(problem.meaning())?, &out, 0);
        let what = format!("{n} tokens, 2 heads, d 64, causal, window 128, 16 sinks");
        Ok(self.measurement(System::Skip, what, times, &found))
    }

    fn precision(&mut self, format: Format) -> Result<Measurement, Error> {
        let n = if self.quick { 256 } else { 4096 };
        let builder = Problem::builder().dense(1, n, n).heads(2, 2).head_dim(128).dtype(self.dtype);
        let precision: Precision = format.name().parse().map_err(fulgurite_core::ProblemError::from)?;
        let (plain, problem) = (builder.clone().build()?, builder.precision(precision).build()?);
        let shape = problem.q_shape();
        let (q, k, v) = (self.normal(&shape)?, self.normal(&shape)?, self.normal(&shape)?);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let mut out = Forward::zeros(&problem)?;
        let times = self.race(&plain, &inputs, || {
            self.engine.forward_into(&problem, &inputs, &mut out.outputs(), &Run::default())
        })?;
        let found = compare::check_forward(&inputs.bind(&problem)?, &out, 0);
        Ok(self.measurement(System::In(format), format!("{n} tokens, 2 heads, d 128"), times, &found))
    }

    fn cache(&mut self) -> Result<Measurement, Error> {
        let (n, heads, dim) = (if self.quick { 512 } else { 8192 }, 8, 128);
        let bits = vec![Bits::Four; heads];
        let storage = Storage::Packed { k: bits.clone(), v: bits };
        let mut cache = KvCache::new(CacheSpec { heads, head_dim: dim, value_dim: dim, capacity: n, storage })?;
        let problem = Problem::builder().dense(1, 1, n).heads(4 * heads, heads).head_dim(dim).dtype(self.dtype);
        let problem = problem.mask(Mask::causal()).build()?;
        let (k, v) = (self.normal(&[n, heads, dim])?, self.normal(&[n, heads, dim])?);
        cache.append(&k.view(), &v.view())?;
        let q = self.normal(&[1, 4 * heads, dim])?;
        let shape = problem.k_shape();
        let same = |x: &Tensor, shape: &[usize]| Tensor::from_f64(self.dtype, &x.view().to_f64(), shape);
        let (plain_q, k, v) = (same(&q, &problem.q_shape())?, same(&k, &shape)?, same(&v, &shape)?);
        let inputs = Inputs::new(plain_q.view(), k.view(), v.view());
        let times = self.race(&problem, &inputs, || {
            cache.attend(&q.view(), problem.scale(), &self.engine.options())?;
            Ok(())
        })?;
        let found = judge_cache(self.engine, &cache, &q)?;
        Ok(self.measurement(
            System::Cache,
            format!("1 query over {n} tokens, 32 over 8 heads, d 128, INT4"),
            times,
            &found,
        ))
    }

    fn parallax(&mut self) -> Result<Measurement, Error> {
        let n = if self.quick { 256 } else { 1024 };
        let problem = Problem::builder().dense(1, n, n).heads(2, 2).head_dim(64).dtype(self.dtype).mask(Mask::causal());
        let problem = Parallax::new(problem.build()?)?;
        let shape = problem.problem().q_shape();
        let (q, k, v, r) = (self.normal(&shape)?, self.normal(&shape)?, self.normal(&shape)?, self.normal(&shape)?);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let bound = problem.bind(&inputs, r.view())?;
        let mut out = ParallaxForward::zeros(&problem)?;
        let times = self.race(problem.problem(), &inputs, || {
            variants::parallax_forward(&bound, &mut out.outputs(), &self.engine.options());
            Ok(())
        })?;
        let found = parallax::check(&bound, &out, None);
        Ok(self.measurement(System::Parallax, format!("{n} tokens, 2 heads, d 64, causal"), times, &found))
    }

    fn lighthouse(&mut self) -> Result<Measurement, Error> {
        let n = if self.quick { 512 } else { 4096 };
        let light = Lighthouse::new([1, n, 2, 2], [64, 64], 3, 4, n / 64, 8)?.dtype(self.dtype)?;
        let problem = Problem::builder().dense(1, n, n).heads(2, 2).head_dim(64).dtype(self.dtype).mask(Mask::causal());
        let (problem, shape) = (problem.build()?, light.q_shape());
        let (q, k, v) = (self.normal(&shape)?, self.normal(&shape)?, self.normal(&shape)?);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let mut out = None;
        let times = self.race(&problem, &inputs, || {
            out = Some(variants::lighthouse_forward(&light, &q.view(), &k.view(), &v.view(), &self.engine.options())?);
            Ok(())
        })?;
        let found = out.map_or(Vec::new(), |o| lighthouse::check(&light, &o.entries, [&q, &k, &v], &o.o, None));
        Ok(self.measurement(System::Lighthouse, format!("{n} tokens, 2 heads, d 64, L 3, p 4, k n/64"), times, &found))
    }

    fn gated_delta(&mut self) -> Result<Measurement, Error> {
        let n = if self.quick { 256 } else { 2048 };
        let problem = GatedDelta::builder().dense(1, n).heads(2, 2).head_dim(64).dtype(self.dtype);
        let problem = problem.qk_norm(QkNorm::Inside).build()?;
        let plain = Problem::builder().dense(1, n, n).heads(2, 2).head_dim(64).dtype(self.dtype).mask(Mask::causal());
        let (plain, shape) = (plain.build()?, problem.q_shape());
        let (q, k, v) = (self.normal(&shape)?, self.normal(&shape)?, self.normal(&shape)?);
        let mut gate = |map: fn(f64) -> f64| {
            let values: Vec<f64> = self.rng.normals(2 * n, 1.0).into_iter().map(map).collect();
            Tensor::from_f64(DType::F32, &values, &problem.gate_shape())
        };
        let (g, beta) = (gate(|x| -0.1 * (1.0 + x.exp()).ln())?, gate(|x| 1.0 / (1.0 + (-x).exp()))?);
        let inputs = DeltaInputs::new(q.view(), k.view(), v.view(), g.view(), beta.view());
        let bound = inputs.bind(&problem)?;
        let mut out = DeltaForward::zeros(&problem)?;
        let times = self.race(&plain, &Inputs::new(q.view(), k.view(), v.view()), || {
            let (form, segments) = (DeltaForm::Chunked, DeltaSegments::Auto);
            variants::gated_delta_forward(&bound, &mut out.outputs(), form, segments, &self.engine.options());
            Ok(())
        })?;
        let found = gated_delta::check_forward(&bound, &out, 0);
        Ok(self.measurement(System::GatedDelta, format!("{n} tokens, 2 heads, d 64, chunked"), times, &found))
    }
}

/// The rows as text.
pub fn table(rows: &[Measurement]) -> Table {
    let mut table =
        terminal::table(["forward of", "dtype", "sizes", "ms", "attention ms", "speed-up", "error / allowed", ""]);
    for row in rows {
        table.add_row([
            row.system.name().to_string(),
            row.dtype.clone(),
            row.what.clone(),
            format!("{:.2}", row.seconds * 1e3),
            format!("{:.2}", row.attention_seconds * 1e3),
            format!("{:.2}x", row.attention_seconds / row.seconds),
            format!("{:.2}", row.worst_share),
            if row.ok { "ok".to_string() } else { "WRONG".to_string() },
        ]);
    }
    for column in 3..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
