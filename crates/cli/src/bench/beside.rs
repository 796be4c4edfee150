//! `bench --compare` and `bench --against`: the cells of this run beside those of an earlier one, or beside torch.

use crate::bench::cell::{Cell, MaskKind, Pass};
use crate::{Failure, io, terminal};
use comfy_table::{CellAlignment, Table};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs of a cell that differ by more than this share of their median make a machine noisy.
const NOISE: f64 = 0.1;

/// Another program with which cells are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Contender {
    /// `scaled_dot_product_attention` of the torch that `python3` finds, on the CPU.
    Torch,
}

/// The cells of this run beside others.
#[derive(Debug, Clone, Serialize)]
pub struct Beside {
    /// What the others are.
    pub name: String,
    /// Cells that both have.
    pub rows: Vec<Row>,
}

/// One cell of both.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Forward or backward.
    pub pass: Pass,
    /// Type of the tensors.
    pub dtype: String,
    /// Which keys a query sees.
    pub mask: MaskKind,
    /// Dimension of q, k and v.
    pub head_dim: usize,
    /// Queries and keys of a sequence.
    pub len: usize,
    /// Median of this run.
    pub seconds: f64,
    /// Median of the other.
    pub other_seconds: f64,
    /// Above 1 if this run is faster.
    pub ratio: f64,
    /// From the fastest to the slowest run, as a share of the median: of this run, then of the other.
    pub spread: [f64; 2],
    /// Whether the slowest run of one is faster than the fastest of the other.
    pub clear: bool,
}

/// A cell of somebody else: the fields of [`Cell`] that are compared.
#[derive(Debug, Clone, Deserialize)]
struct Other {
    pass: Pass,
    dtype: String,
    mask: MaskKind,
    head_dim: usize,
    len: usize,
    batch: usize,
    heads: usize,
    all_seconds: Vec<f64>,
}

/// Cells of an earlier run, to be compared with later ones.
#[derive(Debug, Clone, Deserialize)]
pub struct Earlier {
    version: String,
    date: String,
    cells: Vec<Other>,
    #[serde(skip)]
    path: String,
}

/// Reads the file that an earlier run wrote.
pub fn earlier(path: &Path) -> Result<Earlier, Failure> {
    let name = path.display();
    let bytes =
        std::fs::read(path).map_err(|e| Failure::input(format_args!("cannot read {name}: {}", io::reason(&e))))?;
    let mut earlier: Earlier = serde_json::from_slice(&bytes).map_err(|e| {
        Failure::input(format_args!("`--compare` is {name}, allowed: a bench.json of this command: {e}"))
    })?;
    earlier.path = name.to_string();
    Ok(earlier)
}

impl Earlier {
    /// These cells beside those of the earlier run.
    pub fn beside(&self, cells: &[Cell]) -> Beside {
        let name = format!("{}, version {}, {}", self.path, self.version, self.date);
        Beside { name, rows: rows(cells, &self.cells) }
    }
}

/// Times a contender on these cells, and puts them side by side.
pub fn against(contender: Contender, cells: &[Cell], threads: Option<usize>) -> Result<Beside, Failure> {
    let Contender::Torch = contender;
    #[derive(Serialize)]
    struct Task<'a> {
        threads: Option<usize>,
        cells: &'a [Cell],
    }
    #[derive(Deserialize)]
    struct Answer {
        version: String,
        cells: Vec<Other>,
    }
    let lacks = |why: &str| {
        Failure::work(format_args!(
            "`--against torch` needs a `python3` that imports torch: {why}; try `pip install torch`"
        ))
    };
    let mut child = Command::new("python3")
        .args(["-c", include_str!("torch.py")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| lacks(&io::reason(&e)))?;
    let task = serde_json::to_vec(&Task { threads, cells }).map_err(Failure::work)?;
    // A child that ended early closes its end; its message says why.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(&task));
    let output = child.wait_with_output().map_err(Failure::work)?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(lacks(text.lines().rfind(|line| !line.is_empty()).unwrap_or("it says nothing")));
    }
    let answer: Answer = serde_json::from_slice(&output.stdout).map_err(Failure::work)?;
    Ok(Beside { name: format!("torch {}", answer.version), rows: rows(cells, &answer.cells) })
}

fn rows(cells: &[Cell], others: &[Other]) -> Vec<Row> {
    let of = |cell: &Cell| {
        let found = others.iter().find(|other| {
            (other.pass, other.mask, other.head_dim, other.len) == (cell.pass, cell.mask, cell.head_dim, cell.len)
                && (other.batch, other.heads) == (cell.batch, cell.heads)
                && other.dtype == cell.dtype
        })?;
        let (ours, theirs) = (Times::of(&cell.all_seconds)?, Times::of(&found.all_seconds)?);
        Some(Row {
            pass: cell.pass,
            dtype: cell.dtype.clone(),
            mask: cell.mask,
            head_dim: cell.head_dim,
            len: cell.len,
            seconds: ours.median,
            other_seconds: theirs.median,
            ratio: theirs.median / ours.median,
            spread: [ours.spread(), theirs.spread()],
            clear: ours.max < theirs.min || theirs.max < ours.min,
        })
    };
    cells.iter().filter_map(of).collect()
}

/// Fastest, median and slowest run.
struct Times {
    min: f64,
    median: f64,
    max: f64,
}

impl Times {
    fn of(seconds: &[f64]) -> Option<Times> {
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        // The clock may be too coarse for an empty cell.
        let at = |index: usize| sorted.get(index).map(|seconds| seconds.max(1e-9));
        Some(Times { min: at(0)?, median: at(sorted.len() / 2)?, max: at(sorted.len() - 1)? })
    }

    fn spread(&self) -> f64 {
        (self.max - self.min) / self.median
    }
}

impl Beside {
    /// The comparison as a table, and what to know about it.
    pub fn text(&self) -> String {
        if self.rows.is_empty() {
            return format!(
                "beside {}: no cell in common; give the same --dims, --lens, --dtypes and sizes",
                self.name
            );
        }
        let mut table = self.table();
        for column in 3..9 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let logarithms: f64 = self.rows.iter().map(|row| row.ratio.ln()).sum();
        let mean = (logarithms / self.rows.len() as f64).exp();
        let mut lines = vec![format!("beside {}; above 1 is faster now", self.name), table.to_string()];
        lines.push(format!("geometric mean {mean:.2} over {} cells", self.rows.len()));
        let noisy = self.rows.iter().flat_map(|row| row.spread).fold(0.0, f64::max);
        if noisy > NOISE {
            lines.push(format!(
                "noisy: runs of one cell differ by up to {:.0} %; close other programs, or raise --repeats",
                noisy * 100.0
            ));
        }
        lines.join("\n")
    }

    fn table(&self) -> Table {
        let mut table =
            terminal::table(["pass", "dtype", "mask", "dim", "length", "ms", "other ms", "ratio", "spread", ""]);
        for row in &self.rows {
            table.add_row([
                row.pass.name().to_string(),
                row.dtype.clone(),
                row.mask.name().to_string(),
                row.head_dim.to_string(),
                row.len.to_string(),
                format!("{:.2}", row.seconds * 1e3),
                format!("{:.2}", row.other_seconds * 1e3),
                format!("{:.2}", row.ratio),
                format!("{:.0} %", row.spread[0].max(row.spread[1]) * 100.0),
                match (row.clear, row.ratio > 1.0) {
                    (false, _) => "within the spread".into(),
                    (true, true) => "faster".to_string(),
                    (true, false) => "slower".into(),
                },
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(seconds: &[f64]) -> Cell {
        Cell {
            pass: Pass::Forward,
            dtype: "f32".into(),
            mask: MaskKind::Causal,
            head_dim: 64,
            len: 128,
            batch: 2,
            heads: 4,
            seconds: seconds[0],
            all_seconds: seconds.to_vec(),
            gflops: 1.0,
            checks: Vec::new(),
        }
    }

    fn beside(ours: &[f64], theirs: &[f64]) -> Beside {
        let cells = serde_json::to_value([cell(theirs)]).unwrap();
        let old = serde_json::json!({"version": "0.0.9", "date": "yesterday", "cells": cells});
        let old: Earlier = serde_json::from_value(old).unwrap();
        old.beside(&[cell(ours)])
    }

    #[test]
    fn a_difference_counts_if_no_run_contradicts_it() {
        let faster = beside(&[1.0, 1.02, 1.04], &[2.0, 2.02, 2.04]);
        assert!(faster.rows[0].clear && faster.rows[0].ratio > 1.9);
        assert!(faster.text().contains("faster") && !faster.text().contains("noisy"), "{}", faster.text());
        let unclear = beside(&[1.0, 1.5, 2.1], &[2.0, 2.02, 2.04]);
        assert!(!unclear.rows[0].clear);
        assert!(unclear.text().contains("within the spread") && unclear.text().contains("noisy"), "{}", unclear.text());
    }

    #[test]
    fn other_cells_are_no_comparison() {
        let old = Earlier { version: "1".into(), date: "now".into(), cells: Vec::new(), path: "old.json".into() };
        assert!(old.beside(&[cell(&[1.0])]).text().contains("no cell in common"));
    }
}
