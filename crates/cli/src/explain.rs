//! `explain`: the engine that would run a problem or its gradients, the reason, and the bound on a GPU.

use crate::args::ExplainArgs;
use crate::report::page;
use crate::{Failure, json, kernel, say};
use fulgurite::gpu::{self, Cuda, Explained, Options, Tables, Target};
use fulgurite::sim::Device;
use fulgurite::{
    Choice, Inputs, Mask, Precision, Problem, ProblemBuilder, Run, Stopwatch, Tensor, engine_with, explain,
};
use fulgurite_core::random::Rng;
use maud::html;
use serde::Serialize;

#[derive(Serialize)]
struct Results {
    version: &'static str,
    pass: &'static str,
    problem: String,
    /// Each engine and its verdict.
    engines: Vec<String>,
    /// The GPU architecture, and the GPU that stands for it.
    arch: String,
    gpu: &'static str,
    /// How it runs there.
    on_gpu: Option<OnGpu>,
    /// The reason why it does not run there.
    gpu_refused: Option<String>,
}

#[derive(Serialize)]
struct OnGpu {
    kernel: String,
    why: String,
    tile_config: String,
    /// The assembler's report, where there is an assembler.
    assembler: Option<String>,
    tile: [u32; 2],
    blocks: u64,
    units: Vec<Unit>,
    /// The part of the bound that other launches before and after the kernel take.
    other_launches_us: f64,
    bound_us: f64,
    bound_tflops: f64,
    /// By the cycle model, where it covers the problem: decode it does not.
    predicted: Option<Prediction>,
    /// On the GPU of this machine, where there is one.
    measured_us: Option<f64>,
}

/// What the cycle model says.
#[derive(Serialize)]
struct Prediction {
    us: f64,
    tflops: f64,
    /// The clock that the power limit leaves.
    gigahertz: f64,
    /// Cycles of an SM for a block, beside it for the ends of a tile.
    block_cycles: f64,
    tile_cycles: f64,
    bound: String,
}

#[derive(Serialize)]
struct Unit {
    name: &'static str,
    cycles_a_block: f64,
    share: f64,
}

/// Runs `explain`.
pub fn main(args: &ExplainArgs) -> Result<(), Failure> {
    if let Some(skip) = &args.skip {
        return crate::variants::explain::main(args, skip);
    }
    if let Some(ranks) = args.ranks {
        let (target, tables) = machine(args)?;
        return crate::ranks::main(args, ranks, target, &tables);
    }
    let (builder, sizes, problem) = (args.builder(), args.sizes(), args.problem()?);
    let explained = if args.backward { gpu::explain_backward } else { gpu::explain };
    let (target, tables) = machine(args)?;
    let (on_gpu, gpu_refused) = match explained(&builder, sizes, target, &tables) {
        Ok(explained) => {
            let predicted = prediction(args, &problem, target, &tables)?;
            (Some(on_gpu(args, &problem, (&explained, predicted))?), None)
        }
        Err(fulgurite::Error::Unsupported(refused)) => (None, Some(refused.to_string())),
        Err(e) => return Err(e.into()),
    };
    let results = Results {
        version: env!("CARGO_PKG_VERSION"),
        pass: if args.backward { "backward" } else { "forward" },
        problem: args.words(),
        engines: explain(&problem, args.engine.engine).lines().map(String::from).collect(),
        arch: target.name(),
        gpu: target.arch.gpu,
        on_gpu,
        gpu_refused,
    };
    if args.json {
        json::print(&results)?;
    } else {
        say(&text(&results))?;
    }
    if args.open { page::open("explain", &as_page(&results), args.json) } else { Ok(()) }
}

/// The answer as a page.
fn as_page(results: &Results) -> String {
    let title = format!("fulgurite explain: {}", results.pass);
    let units = results.on_gpu.iter().flat_map(|found| &found.units);
    let body = html! {
        p { (results.problem) }
        @if results.on_gpu.is_some() {
            h2 { "Cycles of one SM for a block, by unit" }
            (page::bars(units.map(|unit| (unit.name, format!("{:.0}", unit.cycles_a_block), unit.share))))
        }
        h2 { "The whole answer" }
        pre { (text(results)) }
    };
    page::page(&title, &body)
}

/// The architecture to explain and its tile configurations: the one that the engine names, else that of this machine's GPU,
/// with its profile. Without a GPU it is Hopper, whose tile configurations were measured; the answer names it.
fn machine(args: &ExplainArgs) -> Result<(Target, Tables), fulgurite::Error> {
    match (args.engine.engine, Cuda::open(0, Options::default())) {
        (Choice::SimArch(arch), _) => Ok((Target::new(arch), Tables::default())),
        (_, Ok(gpu)) => Ok((gpu.target(), crate::args::profiles().tables(&gpu.name())?)),
        (_, Err(_)) => Ok((Target::HOPPER, Tables::default())),
    }
}

impl ExplainArgs {
    /// The problem that the arguments describe.
    pub(crate) fn problem(&self) -> Result<Problem, fulgurite::Error> {
        let [batch, q_len, k_len] = self.sizes();
        Ok(self.builder().dense(batch, q_len, k_len).build()?)
    }

    fn sizes(&self) -> [usize; 3] {
        [self.batch, self.q_len, self.k_len.unwrap_or(self.q_len)]
    }

    fn builder(&self) -> ProblemBuilder {
        let mut mask = if self.causal { Mask::causal() } else { Mask::none() };
        if let Some(window) = self.window {
            mask = mask.and(Mask::window(window.left, window.right));
        }
        self.unmasked().heads(self.heads, self.kv_heads.unwrap_or(self.heads)).mask(mask)
    }

    /// The problem without heads, mask and sizes.
    pub(crate) fn unmasked(&self) -> ProblemBuilder {
        let mut builder = Problem::builder()
            .head_dims(self.head_dim, self.value_dim.unwrap_or(self.head_dim))
            .dtype(self.dtype)
            .precision(self.precision);
        if let Some(cap) = self.softcap {
            builder = builder.softcap(cap);
        }
        if self.alibi { builder.alibi() } else { builder }
    }

    pub(crate) fn words(&self) -> String {
        let [batch, q_len, k_len] = self.sizes();
        let (heads, kv_heads) = (self.heads, self.kv_heads.unwrap_or(self.heads));
        let (d, dv) = (self.head_dim, self.value_dim.unwrap_or(self.head_dim));
        let precision =
            if self.precision == Precision::Native { String::new() } else { format!(" {}", self.precision) };
        let window = self.window.map(|window| format!("window {window}"));
        let features = [
            self.causal.then(|| "causal".to_owned()),
            window,
            self.softcap.map(|cap| format!("softcap {cap}")),
            self.alibi.then(|| "ALiBi".to_owned()),
        ];
        let features: String = features.into_iter().flatten().map(|feature| format!(", {feature}")).collect();
        format!(
            "{}{precision}, batch {batch}, {q_len} queries, {k_len} keys, heads {heads}/{kv_heads}, dims {d}/{dv}{features}",
            self.dtype
        )
    }

    /// FLOPs by the pairs of queries and keys that see each other.
    fn flops(&self, problem: &Problem) -> f64 {
        let [batch, q_len, k_len] = self.sizes();
        let seen: usize = (0..q_len).map(|q| problem.mask().keys(q, q_len, k_len).len()).sum();
        let pairs = (seen * batch * problem.q_heads()) as f64;
        let (d, dv) = (problem.head_dim(), problem.value_dim());
        // Scores and outputs; scores again, d_k and d_q, d_p and d_v.
        let row = if self.backward { 3 * d + 2 * dv } else { d + dv };
        pairs * 2.0 * row as f64
    }
}

/// The time by the cycle model, where it covers the problem.
fn prediction(
    args: &ExplainArgs,
    problem: &Problem,
    target: Target,
    tables: &Tables,
) -> Result<Option<Prediction>, Failure> {
    let predict = if args.backward { gpu::predict_backward } else { gpu::predict };
    match predict(&args.builder(), args.sizes(), target, tables, None) {
        Ok(predicted) => Ok(Some(Prediction {
            us: predicted.seconds * 1e6,
            tflops: args.flops(problem) / predicted.seconds.max(1e-12) / 1e12,
            gigahertz: predicted.gigahertz,
            block_cycles: predicted.cycles.block,
            tile_cycles: predicted.cycles.tile,
            bound: predicted.bound,
        })),
        Err(fulgurite::Error::Unsupported(_)) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn on_gpu(
    args: &ExplainArgs,
    problem: &Problem,
    (explained, predicted): (&Explained, Option<Prediction>),
) -> Result<OnGpu, Failure> {
    let busiest = explained.units.first().map_or(1.0, |(_, cycles)| cycles.max(1e-9));
    let units =
        explained.units.iter().map(|&(name, cycles)| Unit { name, cycles_a_block: cycles, share: cycles / busiest });
    // Without an assembler there is nothing to say; with one that was named and is not there, that is said.
    let assembler = match kernel::assembler(&args.tools) {
        Ok(assembler) => Some(assembler),
        Err(e) if args.tools.ptxas.is_some() => return Err(e),
        Err(_) => None,
    };
    let report = assembler.map(|assembler| match assembler.assemble(&explained.kernel) {
        Ok(report) => format!(
            "{} registers a thread at launch, {} bytes spilled, {} bytes of shared memory",
            report.registers,
            report.spill_stores_bytes + report.spill_loads_bytes,
            report.shared_bytes
        ),
        Err(e) => e.to_string(),
    });
    Ok(OnGpu {
        kernel: explained.kernel.name.clone(),
        why: explained.why.clone(),
        tile_config: explained.tile_config.clone(),
        assembler: report,
        tile: explained.tile,
        blocks: explained.blocks,
        units: units.collect(),
        other_launches_us: explained.other_launches_seconds * 1e6,
        bound_us: explained.bound_seconds * 1e6,
        bound_tflops: args.flops(problem) / explained.bound_seconds.max(1e-12) / 1e12,
        predicted,
        measured_us: measure(args, problem)?.map(|seconds| seconds * 1e6),
    })
}

/// The median of a few runs on the GPU of this machine, where there is one and tensors are all that is needed.
fn measure(args: &ExplainArgs, problem: &Problem) -> Result<Option<f64>, Failure> {
    let Ok(engine) = engine_with(Choice::Cuda, &args.engine.settings()) else { return Ok(None) };
    if !problem.aux().is_empty() || engine.supports(problem).is_err() {
        return Ok(None);
    }
    let mut rng = Rng::new(1);
    let mut tensor = |shape: &[usize]| {
        let values = rng.normals(shape.iter().product(), 1.0);
        Tensor::from_f64(problem.dtype(), &values, shape).map_err(fulgurite::Error::from)
    };
    let (q, k, v) = (tensor(&problem.q_shape())?, tensor(&problem.k_shape())?, tensor(&problem.v_shape())?);
    let (inputs, stopwatch) = (Inputs::new(q.view(), k.view(), v.view()), Stopwatch::rounds(5));
    let timed = Run::default().stopwatch(&stopwatch);
    match args.backward {
        false => engine.forward(problem, &inputs, &timed).map(|_| ())?,
        true => {
            let d_o = tensor(&problem.o_shape())?;
            let forward = engine.forward(problem, &inputs, &Run::default())?;
            engine.backward(problem, &inputs, &forward.saved(d_o.view()), &timed)?;
        }
    }
    let mut seconds = stopwatch.seconds();
    seconds.sort_by(f64::total_cmp);
    Ok(seconds.get(seconds.len() / 2).copied())
}

fn text(results: &Results) -> String {
    let mut lines = vec![results.problem.clone(), String::new()];
    lines.extend(results.engines.iter().map(|engine| format!("  {engine}")));
    lines.push(String::new());
    let place = format!("on {} ({})", results.gpu, results.arch);
    lines.extend(results.gpu_refused.iter().map(|refused| format!("{place}: {refused}")));
    match &results.on_gpu {
        None => {}
        Some(found) => {
            let [rows, cols] = found.tile;
            lines.push(format!("{place}: {}, {}", found.kernel, found.why));
            lines.push(format!("  config     {}", found.tile_config));
            let backward = results.pass == "backward";
            let of_tiles = match backward {
                false => format!("{rows} rows of queries, {cols} keys a block, {} key blocks", found.blocks),
                true => format!("{rows} keys, {cols} queries a step, {} steps", found.blocks),
            };
            lines.push(format!("  tiles      {of_tiles}"));
            lines.extend(found.assembler.iter().map(|report| format!("  assembler  {report}")));
            let block = if backward { "step of queries" } else { "block of keys" };
            lines.push(format!("  cycles of an SM for a {block}, counted by the simulator"));
            for Unit { name, cycles_a_block, share } in &found.units {
                lines.push(format!("    {name:<24} {cycles_a_block:>7.0}  {:>4.0} %", share * 100.0));
            }
            let (bound, tflops) = (found.bound_us, found.bound_tflops);
            if found.other_launches_us > 0.0 {
                lines.push(format!(
                    "  around     {:.1} us of memory for the launches before and after it, part of the bound",
                    found.other_launches_us
                ));
            }
            lines.push(format!(
                "  bound      {bound:.1} us, {tflops:.0} TFLOP/s: the busiest unit alone, {} at full clock",
                results.gpu
            ));
            if let Some(Prediction { us, tflops, gigahertz, block_cycles, bound, .. }) = &found.predicted {
                lines.push(format!(
                    "  predicted  {us:.1} us, {tflops:.0} TFLOP/s: {block_cycles:.0} cycles for a {block} at {gigahertz:.2} GHz; bound by {bound}"
                ));
            }
            if let Some(us) = found.measured_us {
                lines.push(format!("  measured   {us:.1} us, {:.0} % of the bound", bound / us * 100.0));
            }
        }
    }
    lines.join("\n")
}
