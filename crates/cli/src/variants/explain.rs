//! `explain --skip`: which tiles are left out at which level, and the error that this costs.

use super::picture::{self, Fate, Map};
use crate::args::ExplainArgs;
use crate::given::float;
use crate::{Failure, io, json, say, terminal};
use comfy_table::CellAlignment;
use fulgurite::variants::{self, HeadClass, Skip, SkipOutcome, SkipProblem, TileCounts};
use fulgurite::{Attention, Engine, Forward, Run, Tensor, attention};
use fulgurite_core::random::Rng;
use serde::Serialize;

/// More elements than this are not drawn at random: a typing error should not fill the memory.
const MOST: usize = 1 << 28;

#[derive(Serialize)]
struct Results {
    version: &'static str,
    skip: String,
    tensors: String,
    tile: [usize; 2],
    heads: Vec<Head>,
    all: Counts,
    /// A bound on the difference of any element of o from the result with all admitted tiles.
    error_bound_of_lambda: f64,
    /// The largest difference to attention without skipping.
    measured_error: f64,
    picture: Option<String>,
}

#[derive(Serialize, Clone, Copy, Default)]
struct Counts {
    visible: u64,
    left_by_class: u64,
    left_by_proxy: u64,
    kept: u64,
}

#[derive(Serialize)]
struct Head {
    head: usize,
    class: String,
    #[serde(flatten)]
    counts: Counts,
}

/// Runs `explain --skip`.
pub fn main(args: &ExplainArgs, skip: &Skip) -> Result<(), Failure> {
    let [q, k, v] = tensors(args)?;
    let mut call = attention(&q, &k, &v);
    if args.causal {
        call = call.causal();
    }
    if let Some(window) = args.window {
        call = call.window(window.left, window.right);
    }
    if let Some(cap) = args.softcap {
        call = call.softcap(cap);
    }
    if args.alibi {
        return Err(Failure::input("`--alibi` does not go with --skip; leave one of them out"));
    }
    let call = call.engine(args.engine.engine).settings(args.engine.settings());
    let found = call.skip(skip)?;
    let engine = variants::cpu(args.engine.engine, &args.engine.settings(), "block skipping")?;
    let dense: Forward = engine.forward(&call.problem()?, &call.inputs()?, &Run::default())?;
    let pairs = found.forward.o.view().to_f64().into_iter().zip(dense.o.view().to_f64());
    let (maps, heads, all) = levels(&call, skip, &found.outcome)?;
    if let Some(file) = &args.picture {
        io::write_file(file, picture::draw(&format!("Tiles of scores: {skip}"), &maps).as_bytes())?;
    }
    let results = Results {
        version: env!("CARGO_PKG_VERSION"),
        skip: skip.to_string(),
        tensors: match &args.tensors {
            Some(file) => file.display().to_string(),
            None => format!("{} drawn with seed {}", args.data, args.seed),
        },
        tile: skip.tile,
        heads,
        all,
        error_bound_of_lambda: found.outcome.error_bound,
        measured_error: pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max),
        picture: args.picture.as_ref().map(|file| file.display().to_string()),
    };
    if args.json { json::print(&results) } else { say(&text(&results)) }
}

/// Tokens of a topic, and the length of a query that asks for its topic when a key's is 1: scores of about 12 at head dim 64.
const TOPIC: usize = 100;
const ASKS: f64 = 1.5;

/// Adds to each row of `[batch, len, heads, dim]` the direction of its topic, times `by`. Directions depend on
/// seed and topic alone, so that queries and keys agree.
fn add_topics(values: &mut [f64], shape: &[usize], seed: u64, by: f64) {
    let [len, heads, dim] = [shape[1], shape[2], shape[3]];
    for topic in 0..len.div_ceil(TOPIC) {
        let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9).wrapping_add(topic as u64 + 1));
        let direction: Vec<f64> = (0..dim).map(|_| if rng.chance(0.5) { by } else { -by }).collect();
        for batch in values.chunks_mut(len * heads * dim) {
            let rows = topic * TOPIC * heads * dim..len.min((topic + 1) * TOPIC) * heads * dim;
            for row in batch[rows].chunks_mut(dim) {
                row.iter_mut().zip(&direction).for_each(|(x, d)| *x += d);
            }
        }
    }
}

/// q, k and v of the file, or drawn with the sizes given.
fn tensors(args: &ExplainArgs) -> Result<[Tensor; 3], Failure> {
    if let Some(file) = &args.tensors {
        let all = io::read(file)?;
        let one = |name: &str| {
            let missing =
                || Failure::input(format_args!("{} has no tensor `{name}`; q, k and v are needed", file.display()));
            float(&all, name)?.cloned().ok_or_else(missing)
        };
        return Ok([one("q")?, one("k")?, one("v")?]);
    }
    let problem = args.problem()?;
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape()];
    if let Some(shape) = shapes.iter().find(|shape| shape.iter().product::<usize>() > MOST) {
        let text =
            format_args!("a tensor of {shape:?} is drawn at random, allowed: {MOST} elements; choose smaller sizes");
        return Err(Failure::input(text));
    }
    let mut rng = Rng::new(args.seed);
    let topics = args.data == "topics";
    let mut draw = |shape: &[usize], asks: Option<f64>| {
        let noise = if topics && asks.is_some() { 0.3 } else { 1.0 };
        let mut values = rng.normals(shape.iter().product(), noise);
        if let Some(by) = asks.filter(|_| topics && !values.is_empty()) {
            add_topics(&mut values, shape, args.seed, by);
        }
        Tensor::from_f64(problem.dtype(), &values, shape).map_err(fulgurite::Error::from)
    };
    Ok([draw(&shapes[0], Some(ASKS))?, draw(&shapes[1], Some(1.0))?, draw(&shapes[2], None)?])
}

/// The fate of every tile of the first sequence, by head, and counts over the batch.
fn levels(
    call: &Attention<'_>,
    skip: &Skip,
    outcome: &SkipOutcome,
) -> Result<(Vec<Map>, Vec<Head>, Counts), fulgurite::Error> {
    let inputs = call.inputs()?;
    // The same problem with the later levels taken away says which of them left a tile out.
    let by_mask = Skip { classes: vec![HeadClass::Dense], proxy: None, lambda: None, ..skip.clone() };
    let by_class = Skip { proxy: None, lambda: None, ..skip.clone() };
    let by_proxy = Skip { lambda: None, ..skip.clone() };
    let build = |skip: Skip| SkipProblem::new(call.description()?, skip).map_err(fulgurite::Error::from);
    let problems = [build(by_mask)?, build(by_class)?, build(by_proxy)?];
    let bounds = [problems[0].bind(&inputs)?, problems[1].bind(&inputs)?, problems[2].bind(&inputs)?];
    let base = problems[0].base();
    let columns = base.max_k_len().div_ceil(skip.tile[1]);
    let mut heads: Vec<Head> = (0..base.q_heads())
        .map(|head| Head { head, class: skip.class(head).to_string(), counts: Counts::default() })
        .collect();
    let mut maps: Vec<Map> = Vec::new();
    bounds[0].each(|s, head, tile| {
        let admitted = |i: usize| bounds[i].admitted(s, head, tile, &mut TileCounts::default());
        let [visible, class, proxy] = [admitted(0), admitted(1), admitted(2)];
        let kept = outcome.kept.lists(s.batch, head, tile).0;
        let counts = &mut heads[head].counts;
        counts.visible += visible.len() as u64;
        counts.left_by_class += class.len() as u64;
        counts.left_by_proxy += proxy.len() as u64;
        counts.kept += kept.len() as u64;
        if s.batch == 0 && head < picture::HEADS {
            if tile == 0 {
                maps.push(Map { title: format!("head {head}, {}", skip.class(head)), columns, fates: Vec::new() });
            }
            let fate = |t: usize| match t {
                t if kept.contains(&(t as i32)) => Fate::Kept,
                t if proxy.contains(&t) => Fate::Kernel,
                t if class.contains(&t) => Fate::Proxy,
                t if visible.contains(&t) => Fate::Class,
                _ => Fate::Hidden,
            };
            if let Some(map) = maps.last_mut() {
                map.fates.extend((0..columns).map(fate));
            }
        }
    });
    let mut all = Counts::default();
    for Head { counts, .. } in &heads {
        all.visible += counts.visible;
        all.left_by_class += counts.left_by_class;
        all.left_by_proxy += counts.left_by_proxy;
        all.kept += counts.kept;
    }
    Ok((maps, heads, all))
}

fn text(results: &Results) -> String {
    let mut table =
        terminal::table(["head", "class", "visible", "left by class", "left by proxy", "kept", "kept of visible"]);
    let mut line = |name: String, class: &str, c: Counts| {
        let share = 100.0 * c.kept as f64 / c.visible.max(1) as f64;
        let numbers = [c.visible, c.left_by_class, c.left_by_proxy, c.kept].map(|n| n.to_string());
        let cells = [name, class.to_string()].into_iter().chain(numbers).chain([format!("{share:.1} %")]);
        table.add_row(cells);
    };
    results.heads.iter().for_each(|h| line(h.head.to_string(), &h.class, h.counts));
    line("all".into(), "", results.all);
    for column in 2..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let [rows, keys] = results.tile;
    let mut lines = vec![
        format!("{}, tiles of {rows} rows and {keys} keys, {}", results.skip, results.tensors),
        table.to_string(),
        "class: known beforehand; proxy: by means of tiles; what is left then and not kept was dropped in the kernel,"
            .into(),
        "because every score of the tile is below lambda of the running maximum of its row".into(),
        format!("error: {:.2e} measured against attention without skipping", results.measured_error),
        format!("       {:.2e} is proven for what the kernel dropped", results.error_bound_of_lambda),
    ];
    lines.extend(results.picture.iter().map(|file| format!("picture: {file}")));
    lines.join("\n")
}
