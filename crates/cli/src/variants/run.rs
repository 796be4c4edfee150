//! `run --op parallax|lighthouse|gated-delta` and `run --skip`.

use super::args::Op;
use crate::args::RunArgs;
use crate::given::{Given, Shape, float, get, needed, shape};
use crate::io::{self, Format, Tensors};
use crate::{Failure, json, say};
use fulgurite::variants::{DeltaSaved, gated_delta, lighthouse};
use fulgurite::{DType, Exp, Precision, Settings, Tensor};
use serde::Serialize;
use std::time::Instant;

/// The printed summary of a run.
#[derive(Serialize)]
struct Summary {
    op: String,
    engine: String,
    output: Vec<Shape>,
    written_to: String,
    forward_seconds: f64,
    backward_seconds: Option<f64>,
    /// Counters of the system, by name.
    facts: Vec<(&'static str, f64)>,
}

/// The result of a system.
struct Done {
    tensors: Vec<(&'static str, Tensor)>,
    forward_seconds: f64,
    backward_seconds: Option<f64>,
    facts: Vec<(&'static str, f64)>,
}

/// Refuses flags that the system does not have.
pub fn flags_fit(args: &RunArgs) -> Result<(), Failure> {
    let op = args.op;
    if let Some((flag, own)) = args.variants.given().into_iter().find(|(_, own)| *own != op) {
        let text = format_args!("`{flag}` belongs to --op {own}, this is --op {op}; leave it out");
        return Err(Failure::input(text));
    }
    let masks = [("--causal", args.causal), ("--window", args.window.is_some()), ("--alibi", args.alibi)];
    let scores = [
        ("--softcap", args.softcap.is_some()),
        ("--exp", args.exp != Exp::default()),
        ("--precision", args.precision != Precision::default()),
    ];
    let rescale = [("--tau", args.tau.is_some()), ("--rescale", args.rescale.is_some())];
    let scale = [("--scale", args.scale.is_some())];
    let refused: Vec<(&str, bool)> = match op {
        // The problem refuses features of attention that Parallax or skipping does not have.
        Op::Attention if args.variants.skip.is_none() => Vec::new(),
        Op::Attention | Op::Parallax => rescale.to_vec(),
        Op::Lighthouse => [&masks[..], &scores, &rescale, &scale].concat(),
        Op::GatedDelta => [&masks[..], &scores, &rescale].concat(),
    };
    match refused.into_iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((flag, _)) if op == Op::Attention => {
            Err(Failure::input(format_args!("`{flag}` does not go with --skip; leave one of them out")))
        }
        Some((flag, _)) => Err(Failure::input(format_args!("`{flag}` does not go with --op {op}; leave it out"))),
    }
}

/// Runs `run` for everything but plain attention.
pub fn main(args: &RunArgs) -> Result<(), Failure> {
    let format = Format::of(&args.output)?;
    let tensors = io::read(&args.input)?;
    format.holds(needed(&tensors, args, "q")?.dtype())?;
    let settings = args.engine.settings();
    let done = match args.op {
        Op::Attention => skip(args, &tensors)?,
        Op::Parallax => parallax(args, &tensors)?,
        Op::Lighthouse => light(args, &tensors, settings.clone())?,
        Op::GatedDelta => delta(args, &tensors, settings.clone())?,
    };
    let results: Vec<(String, &Tensor)> = done.tensors.iter().map(|(name, t)| (name.to_string(), t)).collect();
    io::write(&args.output, format, &results)?;
    let summary = Summary {
        op: args.op.to_string(),
        engine: fulgurite::engine_with(args.engine.engine, &settings)?.describe(),
        output: results.iter().map(|(name, tensor)| shape(name, tensor)).collect(),
        written_to: args.output.display().to_string(),
        forward_seconds: done.forward_seconds,
        backward_seconds: done.backward_seconds,
        facts: done.facts,
    };
    if args.json {
        return json::print(&summary);
    }
    let mut lines = vec![format!("{} by {}", summary.op, summary.engine)];
    lines.push(format!("forward {:.3} ms", summary.forward_seconds * 1e3));
    lines.extend(summary.backward_seconds.map(|seconds| format!("backward {:.3} ms", seconds * 1e3)));
    lines.extend(summary.facts.iter().map(|(name, value)| format!("{name} {value}")));
    lines.extend(summary.output.iter().map(|Shape { name, dtype, shape }| format!("{name} {dtype} {shape:?}")));
    lines.push(format!("written to {}", summary.written_to));
    say(&lines.join("\n"))
}

/// The seconds that something took, and its result.
pub(crate) fn timed<T>(work: impl FnOnce() -> Result<T, fulgurite::Error>) -> Result<(f64, T), Failure> {
    let start = Instant::now();
    let result = work()?;
    Ok((start.elapsed().as_secs_f64(), result))
}

fn skip(args: &RunArgs, tensors: &Tensors) -> Result<Done, Failure> {
    let given = Given::new(tensors, args)?;
    given.no_d_lse()?;
    let call = given.call(args)?.engine(args.engine.engine).settings(args.engine.settings());
    let Some(skip) = &args.variants.skip else { return Err(Failure::work("bug in fulgurite: nothing to skip")) };
    let (forward_seconds, found) = timed(|| call.skip(skip))?;
    let gradients = given.d_o.map(|d_o| timed(|| call.skip_backward(skip, &found, &d_o.view()))).transpose()?;
    let counts = found.outcome.counts;
    let facts = vec![
        ("tiles visible", counts.visible as f64),
        ("tiles left by class", counts.by_class as f64),
        ("tiles left by proxy", counts.by_proxy as f64),
        ("tiles kept", counts.kept as f64),
        ("error bound of lambda", found.outcome.error_bound),
    ];
    let mut tensors = vec![("o", found.forward.o), ("lse", found.forward.lse)];
    let backward_seconds = gradients.as_ref().map(|g| g.0);
    tensors.extend(gradients.into_iter().flat_map(|(_, g)| [("d_q", g.d_q), ("d_k", g.d_k), ("d_v", g.d_v)]));
    Ok(Done { tensors, forward_seconds, backward_seconds, facts })
}

fn parallax(args: &RunArgs, tensors: &Tensors) -> Result<Done, Failure> {
    let given = Given::new(tensors, args)?;
    given.no_d_lse()?;
    let r = needed(tensors, args, "r")?;
    let call = given.call(args)?.engine(args.engine.engine).settings(args.engine.settings());
    let (forward_seconds, found) = timed(|| call.parallax(r))?;
    let gradients = given.d_o.map(|d_o| timed(|| call.parallax_backward(r, &found, &d_o.view()))).transpose()?;
    let backward_seconds = gradients.as_ref().map(|g| g.0);
    let mut tensors = vec![("o", found.own.o), ("lse", found.own.lse)];
    let all = gradients.map(|(_, g)| [("d_q", g.d_q), ("d_r", g.d_r), ("d_k", g.d_k), ("d_v", g.d_v)]);
    tensors.extend(all.into_iter().flatten());
    Ok(Done { tensors, forward_seconds, backward_seconds, facts: Vec::new() })
}

fn light(args: &RunArgs, tensors: &Tensors, settings: Settings) -> Result<Done, Failure> {
    let [q, k, v] = ["q", "k", "v"].map(|name| needed(tensors, args, name));
    let mut call = lighthouse(q?, k?, v?).engine(args.engine.engine).settings(settings);
    let own = &args.variants;
    call = own.levels.map_or(call.clone(), |n| call.levels(n));
    call = own.pool.map_or(call.clone(), |n| call.pool(n));
    call = own.budget.map_or(call.clone(), |n| call.budget(n));
    call = own.tile.map_or(call.clone(), |n| call.tile(n));
    let (forward_seconds, found) = timed(|| call.forward())?;
    let d_o = float(tensors, "d_o")?;
    let gradients = d_o.map(|d_o| timed(|| call.backward(&found, &d_o.view()))).transpose()?;
    let backward_seconds = gradients.as_ref().map(|g| g.0);
    let facts = vec![("nodes picked of a sequence and head", call.problem()?.picked() as f64)];
    let mut tensors = vec![("o", found.o)];
    tensors.extend(gradients.into_iter().flat_map(|(_, g)| [("d_q", g.d_q), ("d_k", g.d_k), ("d_v", g.d_v)]));
    Ok(Done { tensors, forward_seconds, backward_seconds, facts })
}

fn delta(args: &RunArgs, tensors: &Tensors, settings: Settings) -> Result<Done, Failure> {
    let [q, k, v, g, beta] = ["q", "k", "v", "g", "beta"].map(|name| needed(tensors, args, name));
    let offsets = get(tensors, "cu_seqlens", "i32, i64", |dtype| dtype == DType::I32)?;
    let state = float(tensors, "initial_state")?;
    let mut call = gated_delta(q?, k?, v?, g?, beta?).engine(args.engine.engine).settings(settings);
    call = call.form(args.variants.form.unwrap_or_default());
    call = if args.variants.l2norm { call.l2norm() } else { call };
    call = args.scale.map_or(call.clone(), |scale| call.scale(scale));
    call = offsets.map_or(call.clone(), |offsets| call.cu_seqlens(offsets));
    call = state.map_or(call.clone(), |state| call.initial_state(state));
    let (forward_seconds, (found, counters)) = timed(|| call.forward_counted())?;
    let (d_o, d_state) = (float(tensors, "d_o")?, float(tensors, "d_final_state")?);
    if d_o.is_none() && d_state.is_some() {
        let file = args.input.display();
        return Err(Failure::input(format_args!("{file} has `d_final_state` without `d_o`; give zeros for `d_o`")));
    }
    let saved = d_o.map(|d_o| DeltaSaved { d_o: d_o.view(), d_final_state: d_state.map(Tensor::view) });
    let gradients = saved.map(|saved| timed(|| call.backward(&saved))).transpose()?;
    let backward_seconds = gradients.as_ref().map(|g| g.0);
    let facts = vec![
        ("segments", counters.segments as f64),
        ("segments warmed up", counters.warmed_up as f64),
        ("chunks computed to find starts", counters.extra_chunks as f64),
    ];
    let mut tensors = vec![("o", found.o), ("final_state", found.final_state)];
    if let Some((_, g)) = gradients {
        tensors.extend([("d_q", g.d_q), ("d_k", g.d_k), ("d_v", g.d_v), ("d_g", g.d_g), ("d_beta", g.d_beta)]);
        tensors.extend(state.map(|_| ("d_initial_state", g.d_initial_state)));
    }
    Ok(Done { tensors, forward_seconds, backward_seconds, facts })
}
