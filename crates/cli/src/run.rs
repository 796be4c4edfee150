//! `run`: attention of the tensors in a file.

use crate::args::RunArgs;
use crate::given::{Given, KNOWN, Shape, shape};
use crate::io::{self, Format};
use crate::variants::args::Op;
use crate::variants::run as variants;
use crate::{Failure, json, say};
use fulgurite::{Counters, DType, Forward, Gradients, Problem, Rescale, Run, Tally, Tensor, engine_with, explain};
use fulgurite_core::inputs::check_like;
use serde::Serialize;
use std::time::Instant;

#[derive(Serialize)]
struct Summary {
    engine: String,
    explain: Vec<String>,
    input: Vec<Shape>,
    ignored: Vec<String>,
    output: Vec<Shape>,
    written_to: String,
    forward_seconds: f64,
    backward_seconds: Option<f64>,
    rescales_possible: u64,
    rescales_done: u64,
    blocks_redone: u64,
}

/// Runs `run`.
pub fn main(args: &RunArgs) -> Result<(), Failure> {
    variants::flags_fit(args)?;
    if args.op != Op::Attention || args.variants.skip.is_some() {
        return variants::main(args);
    }
    let format = Format::of(&args.output)?;
    let tensors = io::read(&args.input)?;
    let given = Given::new(&tensors, args)?;
    format.holds(given.q.dtype())?;
    let mut settings = args.engine.settings();
    settings.rescale = args.tau.map(Rescale::Lazy).or(args.rescale);
    let engine = engine_with(args.engine.engine, &settings)?;
    let call = given.call(args)?;
    let (problem, inputs) = (call.problem()?, call.inputs()?);

    // Refuse bad arguments of backward and of the output before forward runs.
    for (name, given, shape, dtype) in [
        ("d_o", given.d_o, problem.o_shape(), problem.dtype()),
        ("d_lse", given.d_lse, problem.lse_shape(), DType::F32),
    ] {
        if let Some(tensor) = given {
            check_like(name, &tensor.view(), &shape, dtype).map_err(Failure::input)?;
        }
    }
    io::can_write(&args.output, format)?;

    let tally = Tally::default();
    let run = Run::default().tally(&tally);
    let start = Instant::now();
    let forward = engine.forward(&problem, &inputs, &run)?;
    let forward_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let gradients = match given.d_o {
        Some(d_o) => {
            let mut saved = forward.saved(d_o.view());
            saved.d_lse = given.d_lse.map(Tensor::view);
            Some(engine.backward(&problem, &inputs, &saved, &Run::default())?)
        }
        None => None,
    };
    let backward_seconds = gradients.as_ref().map(|_| start.elapsed().as_secs_f64());

    let results = results(&problem, &forward, gradients.as_ref());
    io::write(&args.output, format, &results)?;
    let Counters { rescales_possible, rescales_done, blocks_redone } = tally.counters();
    report(
        args,
        &Summary {
            engine: engine.describe(),
            explain: explain(&problem, args.engine.engine).lines().map(String::from).collect(),
            input: given.shapes(&tensors),
            ignored: tensors.keys().filter(|name| !KNOWN.contains(&name.as_str())).cloned().collect(),
            output: results.iter().map(|(name, tensor)| shape(name, tensor)).collect(),
            written_to: args.output.display().to_string(),
            forward_seconds,
            backward_seconds,
            rescales_possible,
            rescales_done,
            blocks_redone,
        },
    )
}

fn report(args: &RunArgs, summary: &Summary) -> Result<(), Failure> {
    if args.json {
        return json::print(summary);
    }
    let mut lines = Vec::new();
    if !summary.ignored.is_empty() {
        lines.push(format!("not read: {}; `fulgurite run --help` lists what is", summary.ignored.join(", ")));
    }
    lines.push(format!("engine {}", summary.engine));
    lines.push(format!("forward {:.3} ms", summary.forward_seconds * 1e3));
    if let Some(seconds) = summary.backward_seconds {
        lines.push(format!("backward {:.3} ms", seconds * 1e3));
    }
    if summary.rescales_possible > 0 {
        let Summary { rescales_possible, rescales_done, blocks_redone, .. } = summary;
        lines.push(format!("rescales {rescales_done} of {rescales_possible} possible, {blocks_redone} blocks redone"));
    }
    for Shape { name, dtype, shape } in &summary.output {
        lines.push(format!("{name} {dtype} {shape:?}"));
    }
    lines.push(format!("written to {}", summary.written_to));
    say(&lines.join("\n"))
}

fn results<'a>(problem: &Problem, forward: &'a Forward, gradients: Option<&'a Gradients>) -> Vec<(String, &'a Tensor)> {
    let mut all = vec![("o".to_string(), &forward.o), ("lse".to_string(), &forward.lse)];
    if let Some(g) = gradients {
        all.extend([("d_q".to_string(), &g.d_q), ("d_k".to_string(), &g.d_k), ("d_v".to_string(), &g.d_v)]);
        all.extend(g.d_sinks.as_ref().map(|d| ("d_sink".to_string(), d)));
        let aux = problem.aux().iter().zip(&g.d_aux);
        all.extend(aux.filter_map(|(spec, d)| d.as_ref().map(|d| (format!("d_{}", spec.name), d))));
    }
    all
}
