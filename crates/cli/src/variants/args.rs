//! The operators, and the arguments that only some of them have.

use fulgurite::variants::{DeltaForm, Skip};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// The operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Op {
    /// Attention, with or without skipping.
    #[default]
    Attention,
    /// Attention corrected by probes.
    Parallax,
    /// Attention over a pyramid of means.
    Lighthouse,
    /// Linear attention with gates and deltas.
    GatedDelta,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 4] = [Op::Attention, Op::Parallax, Op::Lighthouse, Op::GatedDelta];

    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            Op::Attention => "attention",
            Op::Parallax => "parallax",
            Op::Lighthouse => "lighthouse",
            Op::GatedDelta => "gated-delta",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Op, String> {
        let found = Op::ALL.into_iter().find(|op| op.name() == text);
        found.ok_or_else(|| format!("allowed: {}", Op::ALL.map(Op::name).join(", ")))
    }
}

/// Arguments that only some of the systems have.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct VariantArgs {
    /// Attention: tiles to leave out, such as window:128:16,tile:64x64 or mass:0.98,lambda:1e-3; a class for each head or
    /// one for all (dense, log, window:KEYS:SINKS), mass:SHARE or top:SHARE, lambda:X or lambda-per-key:X, no-first-tile
    #[arg(long, value_name = "PARTS")]
    pub skip: Option<Skip>,
    /// Lighthouse: levels of the pyramid; default 3
    #[arg(long, value_name = "N")]
    pub levels: Option<usize>,
    /// Lighthouse: nodes pooled into one; default 4
    #[arg(long, value_name = "N")]
    pub pool: Option<usize>,
    /// Lighthouse: nodes picked at each level; default a 64th of the tokens
    #[arg(long, value_name = "N")]
    pub budget: Option<usize>,
    /// Lighthouse: nodes picked of each tile of the sequence; default 128
    #[arg(long, value_name = "N")]
    pub tile: Option<usize>,
    /// Gated delta rule: divide rows of q and k by their lengths first
    #[arg(long)]
    pub l2norm: bool,
    /// Gated delta rule: chunked or recurrent; default chunked
    #[arg(long, value_name = "NAME", value_parser = form)]
    pub form: Option<DeltaForm>,
}

impl VariantArgs {
    /// The arguments that were given, and the only system that has them.
    pub fn given(&self) -> Vec<(&'static str, Op)> {
        let all = [
            ("--skip", Op::Attention, self.skip.is_some()),
            ("--levels", Op::Lighthouse, self.levels.is_some()),
            ("--pool", Op::Lighthouse, self.pool.is_some()),
            ("--budget", Op::Lighthouse, self.budget.is_some()),
            ("--tile", Op::Lighthouse, self.tile.is_some()),
            ("--l2norm", Op::GatedDelta, self.l2norm),
            ("--form", Op::GatedDelta, self.form.is_some()),
        ];
        all.into_iter().filter(|x| x.2).map(|(flag, op, _)| (flag, op)).collect()
    }
}

fn form(text: &str) -> Result<DeltaForm, String> {
    match text {
        "chunked" => Ok(DeltaForm::Chunked),
        "recurrent" => Ok(DeltaForm::Recurrent),
        _ => Err("allowed: chunked, recurrent".into()),
    }
}

/// A system that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// Block skipping.
    Skip,
    /// Attention with a probe.
    Parallax,
    /// Attention over picked nodes of a pyramid.
    Lighthouse,
    /// Linear attention with a state.
    GatedDelta,
    /// Attention in another precision.
    In(Format),
    /// One query over a cache packed to four bits.
    Cache,
}

/// A precision that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Eight-bit integers.
    Int8,
    /// E2M1 in groups of 16.
    Nvfp4,
    /// E2M1 in groups of 32.
    Mxfp4,
    /// E4M3 in groups of 32.
    Mxfp8,
}

impl Format {
    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            Format::Int8 => "int8",
            Format::Nvfp4 => "nvfp4",
            Format::Mxfp4 => "mxfp4",
            Format::Mxfp8 => "mxfp8",
        }
    }
}

impl System {
    const ALL: [System; 9] = [
        System::Skip,
        System::Parallax,
        System::Lighthouse,
        System::GatedDelta,
        System::In(Format::Int8),
        System::In(Format::Nvfp4),
        System::In(Format::Mxfp4),
        System::In(Format::Mxfp8),
        System::Cache,
    ];

    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            System::Skip => "skip",
            System::Parallax => "parallax",
            System::Lighthouse => "lighthouse",
            System::GatedDelta => "gated-delta",
            System::In(format) => format.name(),
            System::Cache => "cache",
        }
    }
}

impl FromStr for System {
    type Err = String;

    fn from_str(text: &str) -> Result<System, String> {
        let found = System::ALL.into_iter().find(|system| system.name() == text);
        found.ok_or_else(|| format!("allowed: {}", System::ALL.map(System::name).join(", ")))
    }
}
