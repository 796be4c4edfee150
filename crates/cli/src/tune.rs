//! `tune`: faster tile configurations for the GPU that is present.

use crate::args::TuneArgs;
use crate::{Failure, json, progress, say};
use fulgurite::gpu::{
    BackwardConfig, Cuda, ForwardConfig, Measured, Options, Pass, SearchCell, Tried, TuneError, tune,
};
use fulgurite::sim::Device;
use serde::Serialize;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Head dimensions that have tile configurations of their own.
const DIMS: [u32; 5] = [64, 96, 128, 192, 256];

#[derive(Serialize)]
struct Results {
    version: &'static str,
    pass: &'static str,
    gpu: String,
    profile: String,
    used: Vec<Used>,
    tried: usize,
    finished: bool,
}

#[derive(Serialize)]
struct Used {
    head_dims: [u32; 2],
    keys: [u64; 2],
    tuning: String,
}

/// Runs `tune`.
pub fn main(args: &TuneArgs) -> Result<(), Failure> {
    if let Some(got) = args.dims.iter().find(|dim| !DIMS.contains(dim)) {
        return Err(Failure::input(format_args!("`--dims` has {got}, allowed: 64, 96, 128, 192, 256")));
    }
    let mut places = SearchCell::usual(&args.dims);
    if let Some(lens) = &args.lens {
        let usual: Vec<u64> = places.iter().map(|place| place.len).collect();
        if let Some(got) = lens.iter().find(|len| !usual.contains(len)) {
            return Err(Failure::input(format_args!("`--lens` has {got}, allowed: 512, 1024, 2048, 8192")));
        }
        places.retain(|place| lens.contains(&place.len));
    }
    let device = Arc::new(Cuda::open(0, Options::default()).map_err(fulgurite::Error::from)?);
    let path = args.profile.clone().or_else(|| crate::args::profiles().path(&device.name())).ok_or_else(|| {
        Failure::input("there is no folder for the profile; name one with `--profile FILE` or FULGURITE_PROFILE")
    })?;
    let (start, limit) = (Instant::now(), args.seconds.map(Duration::from_secs));
    let bar = progress(places.len());
    let mut finished = true;
    let mut report = |place: &SearchCell, gain: f64, tuning: &dyn std::fmt::Display| {
        let done = places.iter().position(|other| other == place).unwrap_or(0);
        bar.set_position(done as u64);
        bar.set_message(format!("head_dim {} length {}: {gain:.3} {tuning}", place.head_dim, place.len));
        if limit.is_some_and(|limit| start.elapsed() >= limit) {
            finished = false;
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    };
    let gpu = device.name();
    let (used, tried) = match args.backward {
        false => {
            let mut report =
                |place: &SearchCell, tried: &Tried<ForwardConfig>| report(place, tried.gain, &tried.config);
            used(&tune(device, &places, &path, &mut report).map_err(failure)?.forward)
        }
        true => {
            let mut report =
                |place: &SearchCell, tried: &Tried<BackwardConfig>| report(place, tried.gain, &tried.config);
            used(&tune(device, &places, &path, &mut report).map_err(failure)?.backward)
        }
    };
    bar.finish_and_clear();
    let pass = if args.backward { "backward" } else { "forward" };
    let (version, profile) = (env!("CARGO_PKG_VERSION"), path.display().to_string());
    let results = Results { version, pass, gpu, profile, used, tried, finished };
    if args.json { json::print(&results) } else { say(&text(&results)) }
}

/// The chosen tile configurations, and the number of measured ones.
fn used<T: Pass>(measured: &Measured<T>) -> (Vec<Used>, usize) {
    let rows = measured.rows.iter().map(|row| Used {
        head_dims: [*row.head_dims.start(), *row.head_dims.end()],
        keys: [row.keys.start, row.keys.end],
        tuning: row.config.to_string(),
    });
    (rows.collect(), measured.tried.len())
}

fn text(results: &Results) -> String {
    let mut lines = vec![format!(
        "{}, {}: {} tile configurations measured, {}",
        results.gpu, results.pass, results.tried, results.profile
    )];
    for Used { head_dims: [first, last], keys: [from, to], tuning } in &results.used {
        let to = if *to == u64::MAX { String::new() } else { to.to_string() };
        lines.push(format!("  head_dim {first} to {last}, keys {from}..{to}: {tuning}"));
    }
    if results.used.is_empty() {
        lines.push("  nothing is faster than what is built in".into());
    }
    if !results.finished {
        lines.push("stopped before the end; the same call goes on from here".into());
    }
    lines.join("\n")
}

fn failure(e: TuneError) -> Failure {
    match e {
        TuneError::Profile(_) => Failure::Input(e.into()),
        _ => Failure::Work(e.into()),
    }
}
