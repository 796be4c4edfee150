//! `bench`: attention over a grid, every result compared with the oracle.

mod beside;
mod cell;
mod results;

pub use beside::{Beside, Contender};
pub use cell::{Cell, MaskKind, Pass, Worst};
pub use results::Results;

use crate::args::BenchArgs;
use crate::machine::{self, Machine};
use crate::report::{html, svg};
use crate::variants::bench as variants;
use crate::{Failure, io, json, progress, say, terminal};
use cell::{Pool, Spec};
use comfy_table::{CellAlignment, Table};
use fulgurite::{Choice, DType, engine_with};

struct Grid {
    dims: Vec<usize>,
    lens: Vec<usize>,
    dtypes: Vec<DType>,
    tokens: usize,
    width: usize,
}

const LONGEST: usize = 1 << 20;

impl Grid {
    fn of([dims, lens]: [&[usize]; 2], dtypes: &[DType], tokens: usize, width: usize) -> Grid {
        Grid { dims: dims.to_vec(), lens: lens.to_vec(), dtypes: dtypes.to_vec(), tokens, width }
    }

    /// The requested grid; axes that are not given are the usual ones of the engine.
    fn new(args: &BenchArgs) -> Result<Grid, Failure> {
        let usual = match (args.quick, args.engine.engine) {
            (true, Choice::Cuda) => Grid::of([&[128], &[1024, 4096]], &[DType::Bf16], 4096, 1024),
            (true, _) => Grid::of([&[64], &[128, 256]], &[DType::F32, DType::Bf16], 256, 128),
            (false, Choice::Cuda) => {
                Grid::of([&[64, 128, 256], &[512, 1024, 2048, 4096, 8192, 16384]], &[DType::Bf16], 16384, 2048)
            }
            (false, _) => Grid::of([&[64, 128], &[512, 1024, 2048, 4096]], &[DType::F32, DType::Bf16], 4096, 1024),
        };
        let grid = Grid {
            dims: args.dims.clone().unwrap_or(usual.dims),
            lens: args.lens.clone().unwrap_or(usual.lens),
            dtypes: args.dtypes.clone().unwrap_or(usual.dtypes),
            tokens: args.tokens.unwrap_or(usual.tokens),
            width: args.width.unwrap_or(usual.width),
        };
        let within = |flag: &str, got: usize, max: usize| {
            let allowed = 1..=max;
            let text = format_args!("`--{flag}` has {got}, allowed: 1 to {max}");
            if allowed.contains(&got) { Ok(()) } else { Err(Failure::input(text)) }
        };
        grid.dims.iter().try_for_each(|&dim| within("dims", dim, 512))?;
        grid.lens.iter().try_for_each(|&len| within("lens", len, LONGEST))?;
        within("tokens", grid.tokens, LONGEST)?;
        within("width", grid.width, 1 << 16)?;
        within("repeats", args.repeats, 1000)?;
        Ok(grid)
    }

    fn specs(&self) -> Vec<Spec> {
        let mut specs = Vec::new();
        for &dtype in &self.dtypes {
            for &head_dim in &self.dims {
                for mask in [MaskKind::Full, MaskKind::Causal] {
                    for &len in &self.lens {
                        let (batch, heads) = ((self.tokens / len).max(1), (self.width / head_dim).max(1));
                        specs.push(Spec { dtype, head_dim, mask, len, batch, heads });
                    }
                }
            }
        }
        specs
    }
}

/// Runs `bench`.
pub fn main(args: &BenchArgs) -> Result<(), Failure> {
    let grid = Grid::new(args)?;
    let earlier = args.compare.as_deref().map(beside::earlier).transpose()?;
    let engine = engine_with(args.engine.engine, &args.engine.settings())?;
    let machine = Machine::look();
    let specs = grid.specs();
    let elements = specs.iter().map(Spec::elements).max().unwrap_or(0);
    // q, k, v, o, their gradients and the copies of the check, in f32.
    if let Some(room) = machine.memory_bytes.filter(|&room| elements as u64 * 4 * 12 > room) {
        let text = format_args!(
            "the largest cell needs {}, this machine has {}; choose shorter `--lens` or a smaller `--width`",
            machine::gibibytes(elements as u64 * 4 * 12),
            machine::gibibytes(room)
        );
        return Err(Failure::input(text));
    }
    let pool = Pool::new(elements, args.seed);
    let passes: &[Pass] = if args.forward_only { &[Pass::Forward] } else { &[Pass::Forward, Pass::Backward] };
    let bar = progress(specs.len() * passes.len());
    let mut cells = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        bar.set_message(spec.to_string());
        cells.extend(cell::measure(engine.as_ref(), spec, passes, &pool, args.repeats, args.seed + i as u64, &bar)?);
    }
    bar.finish_and_clear();
    cells.sort_by_key(|cell| cell.pass != Pass::Forward); // stable: the grid's order within a pass
    let mut beside: Vec<Beside> = earlier.iter().map(|earlier| earlier.beside(&cells)).collect();
    if let Some(contender) = args.against {
        beside.push(beside::against(contender, &cells, args.engine.threads)?);
    }
    let results = Results {
        version: env!("CARGO_PKG_VERSION"),
        date: machine::now(),
        command: command(),
        machine,
        engine: engine.describe(),
        seed: args.seed,
        repeats: args.repeats,
        cells,
        around: variants::measure(args, &grid.dtypes)?,
        beside,
    };
    let picture = svg::draw(&chart(&results));
    for (name, text) in [
        ("bench.html", html::page(&results, &picture)),
        ("bench.svg", picture.clone()),
        ("bench.json", json::text(&results)?),
    ] {
        io::write_file(&args.out.join(name), text.as_bytes())?;
    }
    if args.json {
        json::print(&results)?;
    } else {
        let out = args.out.display();
        say(&format!("{}\n{}\n{}\n", results.engine, results.machine.line(), table(&results)))?;
        if !results.around.is_empty() {
            say(&format!("{}\n", variants::table(&results.around)))?;
        }
        for beside in &results.beside {
            say(&format!("{}\n", beside.text()))?;
        }
        say(&format!("report: {out}/bench.html, {out}/bench.svg, {out}/bench.json"))?;
    }
    let wrong = results.cells.iter().filter(|cell| !cell.ok()).count();
    let wrong = wrong + results.around.iter().filter(|row| !row.ok).count();
    match wrong {
        0 => Ok(()),
        n => Err(Failure::work(format_args!(
            "{n} of {} results are outside the tolerance; `fulgurite check` narrows it down",
            results.cells.len() + results.around.len()
        ))),
    }
}

/// The command as typed, without the path of the program.
fn command() -> String {
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once("fulgurite".to_string()).chain(args).collect::<Vec<_>>().join(" ")
}

fn table(results: &Results) -> Table {
    let mut table =
        terminal::table(["pass", "dtype", "mask", "head dim", "length", "ms", "GFLOP/s", "error", "allowed", ""]);
    for cell in &results.cells {
        let worst = cell.worst();
        let shown = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.1e}"));
        table.add_row([
            cell.pass.name().to_string(),
            cell.dtype.clone(),
            cell.mask.name().to_string(),
            cell.head_dim.to_string(),
            cell.len.to_string(),
            format!("{:.2}", cell.seconds * 1e3),
            format!("{:.1}", cell.gflops),
            shown(worst.map(|w| w.error)),
            shown(worst.map(|w| w.allowed)),
            if cell.ok() { "ok".into() } else { format!("WRONG {}", worst.map_or("", |w| &w.tensor)) },
        ]);
    }
    for column in 3..9 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn chart(results: &Results) -> svg::Chart {
    fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
        let mut all = Vec::new();
        values.for_each(|v| {
            if !all.contains(&v) {
                all.push(v);
            }
        });
        all
    }
    let cells = &results.cells;
    let kinds = distinct(cells.iter().map(|c| (c.dtype.as_str(), c.mask)));
    let color = |dtype: &str, mask: MaskKind| match (dtype, mask) {
        ("f32", MaskKind::Full) => "#1f5fa8",
        ("f32", MaskKind::Causal) => "#8fbbe9",
        ("bf16", MaskKind::Full) => "#c2570c",
        ("bf16", MaskKind::Causal) => "#f4b680",
        (_, MaskKind::Full) => "#2f7d4f",
        (_, MaskKind::Causal) => "#9bd3b1",
    };
    let series = kinds
        .iter()
        .map(|&(dtype, mask)| svg::Series { name: format!("{dtype} {}", mask.name()), color: color(dtype, mask) });
    let lens = distinct(cells.iter().map(|c| c.len));
    let panel = |pass: Pass, dim: usize| {
        let bar = |len: usize, dtype: &str, mask: MaskKind| {
            let mut all = cells.iter();
            let key = (pass, dim, len, dtype, mask);
            all.find(|c| (c.pass, c.head_dim, c.len, c.dtype.as_str(), c.mask) == key).map(|c| c.gflops)
        };
        let bars = |&len: &usize| (len.to_string(), kinds.iter().map(|&(dtype, mask)| bar(len, dtype, mask)).collect());
        svg::Panel { title: format!("{}, head dim {dim}", pass.title()), groups: lens.iter().map(bars).collect() }
    };
    let dims = distinct(cells.iter().map(|c| c.head_dim));
    let passes = distinct(cells.iter().map(|c| c.pass));
    svg::Chart {
        title: "Attention speed by sequence length".into(),
        subtitle: format!("{} on {}, {}", results.engine, results.machine.line(), results.date),
        x_label: "sequence length".into(),
        y_label: "GFLOP/s".into(),
        series: series.collect(),
        rows: passes.iter().map(|&pass| dims.iter().map(|&dim| panel(pass, dim)).collect()).collect(),
    }
}
