//! One cell of the grid: measured, and compared with the oracle.
//!
//! The oracle is too slow for whole cells. What is compared is a slice that means the same alone: a run of
//! consecutive queries of one head with all its keys. Rows of o, lse and d_q depend on their own query only;
//! d_k and d_v sum over queries, so the compared backward pass gets a d_o that is zero outside the slice.

use crate::Failure;
use fulgurite::{DType, Engine, Forward, Gradients, Inputs, Mask, Problem, Run, Stopwatch, Tensor, bf16, f16};
use fulgurite_core::compare::{self, Verdict};
use fulgurite_core::random::Rng;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Instant;

/// Consecutive queries that are compared.
const ROWS: usize = 64;
/// Multiplications that the comparison of one cell may take, per product: it bounds the number of heads.
const EFFORT: usize = ROWS * 4096 * 64;

/// Forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// o and lse.
    Forward,
    /// d_q, d_k and d_v.
    Backward,
}

impl Pass {
    /// In lower case.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        }
    }
    /// For the beginning of a line.
    pub fn title(self) -> &'static str {
        match self {
            Pass::Forward => "Forward",
            Pass::Backward => "Backward",
        }
    }
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MaskKind {
    /// All.
    Full,
    /// Those up to its own position.
    Causal,
}

impl MaskKind {
    /// In lower case.
    pub fn name(self) -> &'static str {
        match self {
            MaskKind::Full => "full",
            MaskKind::Causal => "causal",
        }
    }
}

/// How far one tensor is from the oracle.
#[derive(Debug, Clone, Serialize)]
pub struct Worst {
    /// Its name.
    pub tensor: String,
    /// The largest difference.
    pub error: f64,
    /// The largest difference allowed.
    pub allowed: f64,
    /// Whether it is within the rule.
    pub ok: bool,
}

/// One result.
#[derive(Debug, Clone, Serialize)]
pub struct Cell {
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
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Median.
    pub seconds: f64,
    /// Every timed run.
    pub all_seconds: Vec<f64>,
    /// Of the median.
    pub gflops: f64,
    /// The comparison, tensor by tensor; of several heads the worst.
    pub checks: Vec<Worst>,
}

impl Cell {
    /// Whether every tensor is within the rule.
    pub fn ok(&self) -> bool {
        self.checks.iter().all(|check| check.ok)
    }

    /// The tensor closest to its limit, or furthest beyond it.
    pub fn worst(&self) -> Option<&Worst> {
        self.checks.iter().max_by(|a, b| share(a).total_cmp(&share(b)))
    }
}

/// Error as a share of the allowed one; above 1 if it is out of the rule.
fn share(worst: &Worst) -> f64 {
    let share = worst.error / worst.allowed.max(f64::MIN_POSITIVE);
    if worst.ok { share.min(1.0) } else { share.max(1.0 + f64::EPSILON) }
}

/// The computation of one cell.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub dtype: DType,
    pub head_dim: usize,
    pub mask: MaskKind,
    pub len: usize,
    pub batch: usize,
    pub heads: usize,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { dtype, head_dim, mask, len, .. } = self;
        write!(f, "{dtype} head dim {head_dim} length {len} {}", mask.name())
    }
}

impl Spec {
    /// Elements of q.
    pub fn elements(&self) -> usize {
        self.batch * self.len * self.heads * self.head_dim
    }

    fn shape(&self) -> [usize; 4] {
        [self.batch, self.len, self.heads, self.head_dim]
    }

    fn problem(&self) -> Result<Problem, Failure> {
        let builder = Problem::builder().dense(self.batch, self.len, self.len).heads(self.heads, self.heads);
        let mask = match self.mask {
            MaskKind::Full => Mask::none(),
            MaskKind::Causal => Mask::causal(),
        };
        built(builder.head_dim(self.head_dim).dtype(self.dtype).mask(mask).build())
    }

    /// The problem of some consecutive queries of one head.
    fn part(&self, first: usize, rows: usize) -> Result<Problem, Failure> {
        let builder = Problem::builder().dense(1, rows, self.len).heads(1, 1).head_dim(self.head_dim);
        let mask = match self.mask {
            MaskKind::Full => Mask::none(),
            // Query i of the part is query first + i; the diagonal of the part ends at the last key.
            MaskKind::Causal => Mask::window(None, (first + rows) as i64 - self.len as i64),
        };
        built(builder.dtype(self.dtype).mask(mask).build())
    }

    /// FLOPs, counted as FlashAttention does: causal is half.
    fn flops(&self, pass: Pass) -> f64 {
        let full = 4.0 * self.elements() as f64 * self.len as f64;
        let seen = if self.mask == MaskKind::Causal { full / 2.0 } else { full };
        if pass == Pass::Backward { seen * 2.5 } else { seen }
    }
}

fn built(problem: Result<Problem, fulgurite_core::ProblemError>) -> Result<Problem, Failure> {
    Ok(problem.map_err(fulgurite::Error::from)?)
}

/// Random numbers that all cells share: making them anew would take longer than the work.
pub struct Pool(Vec<f32>);

impl Pool {
    /// At least `elements` normal numbers.
    pub fn new(elements: usize, seed: u64) -> Pool {
        let mut rng = Rng::new(seed);
        Pool((0..elements.max(1)).map(|_| rng.normal() as f32).collect())
    }

    /// A tensor that begins somewhere in the pool.
    fn tensor(&self, dtype: DType, shape: &[usize], start: usize) -> Result<Tensor, Failure> {
        let count: usize = shape.iter().product();
        let values = self.0.iter().copied().cycle().skip(start % self.0.len()).take(count);
        let tensor = match dtype {
            DType::F16 => Tensor::new(values.map(f16::from_f32).collect(), shape),
            DType::Bf16 => Tensor::new(values.map(bf16::from_f32).collect(), shape),
            _ => Tensor::new(values.collect::<Vec<f32>>(), shape),
        };
        Ok(tensor.map_err(fulgurite::Error::from)?)
    }
}

/// A head of one sequence.
#[derive(Clone, Copy)]
struct Head {
    batch: usize,
    head: usize,
}

/// Rows of one head, as a tensor of their own.
fn rows(tensor: &Tensor, at: Head, first: usize, count: usize) -> Result<Tensor, Failure> {
    let (view, [_, len, heads, dim]) = (tensor.view(), dims(tensor));
    let start = |row: usize| ((at.batch * len + row) * heads + at.head) * dim;
    let values: Vec<f64> = (first..first + count).flat_map(|r| start(r)..start(r) + dim).map(|i| view.at(i)).collect();
    Ok(Tensor::from_f64(tensor.dtype(), &values, &[1, count, 1, dim]).map_err(fulgurite::Error::from)?)
}

fn dims(tensor: &Tensor) -> [usize; 4] {
    let shape = tensor.shape();
    [shape[0], shape[1], shape[2], shape[3]]
}

/// Measures the given passes of one cell.
pub fn measure(
    engine: &dyn Engine,
    spec: &Spec,
    passes: &[Pass],
    pool: &Pool,
    repeats: usize,
    seed: u64,
    bar: &ProgressBar,
) -> Result<Vec<Cell>, Failure> {
    let problem = spec.problem()?;
    let shape = spec.shape();
    let quarter = pool.0.len() / 4 + 1; // odd distances: no tensor is a shifted row of another
    let tensor = |n: usize| pool.tensor(spec.dtype, &shape, n * quarter + n);
    let data = Data { q: tensor(0)?, k: tensor(1)?, v: tensor(2)?, d_o: tensor(3)? };
    let inputs = Inputs::new(data.q.view(), data.k.view(), data.v.view());
    let check = Check::new(spec, seed);
    let mut cells = Vec::new();

    let mut forward = Forward::zeros(&problem).map_err(fulgurite::Error::from)?;
    engine.forward_into(&problem, &inputs, &mut forward.outputs(), &Run::default())?;
    let checks = check.forward(&data, &forward)?;
    if passes.contains(&Pass::Forward) {
        let times = time(repeats, |run| Ok(engine.forward_into(&problem, &inputs, &mut forward.outputs(), run)?))?;
        cells.push(spec.cell(Pass::Forward, times, checks));
        bar.inc(1);
    }
    if passes.contains(&Pass::Backward) {
        let mut gradients = Gradients::zeros(&problem).map_err(fulgurite::Error::from)?;
        let part = check.only_rows(&data.d_o)?;
        let saved = forward.saved(part.view());
        engine.backward_into(&problem, &inputs, &saved, &mut gradients.outputs(), &Run::default())?;
        let checks = check.backward(&data, &gradients)?;
        let saved = forward.saved(data.d_o.view());
        let times =
            time(repeats, |run| Ok(engine.backward_into(&problem, &inputs, &saved, &mut gradients.outputs(), run)?))?;
        cells.push(spec.cell(Pass::Backward, times, checks));
        bar.inc(1);
    }
    Ok(cells)
}

/// Seconds of each of `repeats` runs, by the engine's own clock where it has one, else by ours.
fn time(repeats: usize, mut work: impl FnMut(&Run<'_>) -> Result<(), Failure>) -> Result<Vec<f64>, Failure> {
    let stopwatch = Stopwatch::rounds(repeats);
    let mut once = |run: &Run<'_>| -> Result<f64, Failure> {
        let start = Instant::now();
        work(run)?;
        Ok(start.elapsed().as_secs_f64())
    };
    let first = once(&Run::default().stopwatch(&stopwatch))?;
    let own = stopwatch.seconds();
    if !own.is_empty() {
        return Ok(own);
    }
    std::iter::once(Ok(first)).chain((1..repeats).map(|_| once(&Run::default()))).collect()
}

impl Spec {
    fn cell(&self, pass: Pass, all_seconds: Vec<f64>, checks: Vec<Worst>) -> Cell {
        let mut sorted = all_seconds.clone();
        sorted.sort_by(f64::total_cmp);
        // The clock may be too coarse for an empty cell.
        let seconds = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0).max(1e-9);
        Cell {
            pass,
            dtype: self.dtype.to_string(),
            mask: self.mask,
            head_dim: self.head_dim,
            len: self.len,
            batch: self.batch,
            heads: self.heads,
            seconds,
            all_seconds,
            gflops: self.flops(pass) / seconds / 1e9,
            checks,
        }
    }
}

/// The tensors of a cell.
struct Data {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
}

/// Which part of a cell is compared.
struct Check<'a> {
    spec: &'a Spec,
    first: usize,
    count: usize,
    heads: Vec<Head>,
}

impl Check<'_> {
    fn new(spec: &Spec, seed: u64) -> Check<'_> {
        let mut rng = Rng::new(seed);
        let count = ROWS.min(spec.len);
        let first = rng.range(0..spec.len - count + 1);
        let heads = (EFFORT / (count * spec.len * spec.head_dim)).clamp(1, 8);
        let heads = (0..heads).map(|_| Head { batch: rng.range(0..spec.batch), head: rng.range(0..spec.heads) });
        Check { spec, first, count, heads: heads.collect() }
    }

    /// `d_o` with zeros outside the rows that are compared, in all heads.
    fn only_rows(&self, d_o: &Tensor) -> Result<Tensor, Failure> {
        let [batch, len, heads, dim] = dims(d_o);
        let mut part = Tensor::zeros(d_o.dtype(), d_o.shape()).map_err(fulgurite::Error::from)?;
        let from = d_o.view();
        for b in 0..batch {
            let start = (b * len + self.first) * heads * dim;
            for at in start..start + self.count * heads * dim {
                part.view_mut().set_at(at, from.at(at));
            }
        }
        Ok(part)
    }

    /// Calls `judge` for each chosen head with its own problem and inputs; keeps the worst of each tensor.
    fn each(
        &self,
        data: &Data,
        judge: impl Fn(&fulgurite_core::Bound<'_>, Head) -> Result<Vec<(String, Verdict)>, Failure>,
    ) -> Result<Vec<Worst>, Failure> {
        let problem = self.spec.part(self.first, self.count)?;
        let mut all: Vec<Worst> = Vec::new();
        for &at in &self.heads {
            let q = rows(&data.q, at, self.first, self.count)?;
            let (k, v) = (rows(&data.k, at, 0, self.spec.len)?, rows(&data.v, at, 0, self.spec.len)?);
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let bound = inputs.bind(&problem).map_err(fulgurite::Error::from)?;
            for (tensor, verdict) in judge(&bound, at)? {
                let new = Worst { tensor, error: verdict.worst, allowed: verdict.allowed, ok: verdict.ok() };
                match all.iter_mut().find(|old| old.tensor == new.tensor) {
                    Some(old) if share(old) < share(&new) => *old = new,
                    Some(_) => {}
                    None => all.push(new),
                }
            }
        }
        Ok(all)
    }

    fn forward(&self, data: &Data, got: &Forward) -> Result<Vec<Worst>, Failure> {
        self.each(data, |bound, at| {
            let lse = got.lse.view();
            let row = (at.batch * self.spec.heads + at.head) * self.spec.len + self.first;
            let values: Vec<f64> = (row..row + self.count).map(|i| lse.at(i)).collect();
            let part = Forward {
                o: rows(&got.o, at, self.first, self.count)?,
                lse: Tensor::from_f64(DType::F32, &values, &[1, 1, self.count]).map_err(fulgurite::Error::from)?,
            };
            Ok(compare::check_forward(bound, &part, 0))
        })
    }

    fn backward(&self, data: &Data, got: &Gradients) -> Result<Vec<Worst>, Failure> {
        self.each(data, |bound, at| {
            let part = Gradients {
                d_q: rows(&got.d_q, at, self.first, self.count)?,
                d_k: rows(&got.d_k, at, 0, self.spec.len)?,
                d_v: rows(&got.d_v, at, 0, self.spec.len)?,
                d_sinks: None,
                d_aux: Vec::new(),
            };
            let d_o = rows(&data.d_o, at, self.first, self.count)?;
            // The comparison computes its own forward; of the saved tensors it reads only the gradients.
            let zeros = Forward::zeros(bound.problem()).map_err(fulgurite::Error::from)?;
            Ok(compare::check_backward(bound, &zeros.saved(d_o.view()), &part, 0))
        })
    }
}
