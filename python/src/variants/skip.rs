//! Block skipping: `skip SPEC;` and then the description of an attention call (see `description`). `SPEC` is the text of
//! `fulgurite::variants::Skip`. The tensors are q, k, v and those that the description names.
//!
//! Forward also returns the kept tiles, i32 `[sequences, heads, query tiles, key tiles]` of 0 and 1: backward computes
//! the gradients of attention over them.

use super::{Engine, Operator, Wanted, tensor};
use crate::array::{Array, Claims, refuse, wrong};
use crate::description::{Description, GradientFields, Role};
use crate::dispatch::inputs_of;
use fulgurite::variants::{Skip as Levels, SkipOutcome, SkipProblem, cpu, skip_forward};
use fulgurite::{BlockMask, Engine as _, Forward, Gradients, Inputs, Outputs, Run, Saved};
use fulgurite_core::compare::{self, Verdict};
use fulgurite_core::{DataMut, Layout};
use pyo3::prelude::*;

/// A parsed description.
pub struct Skip {
    levels: Levels,
    description: Description,
    engine: Engine,
}

/// How many tiles each level kept, and a proven bound of the error of the in-kernel level.
#[pyclass(frozen, get_all)]
pub struct SkipCounts {
    /// Tiles that the mask lets some row see.
    visible: u64,
    /// Tiles that the classes keep.
    by_class: u64,
    /// Tiles that the proxy keeps.
    by_proxy: u64,
    /// Tiles that were computed.
    kept: u64,
    /// Bound of the difference between o and its value with every tile that the proxy keeps.
    error_bound: f64,
}

impl From<&SkipOutcome> for SkipCounts {
    fn from(outcome: &SkipOutcome) -> SkipCounts {
        let counts = outcome.counts;
        SkipCounts {
            visible: counts.visible,
            by_class: counts.by_class,
            by_proxy: counts.by_proxy,
            kept: counts.kept,
            error_bound: outcome.error_bound,
        }
    }
}

impl Skip {
    /// Parses the levels, and the description of the attention call.
    pub fn parse(levels: &str, text: &str) -> Result<Skip, String> {
        let levels = levels.parse().map_err(|e: fulgurite::variants::SkipTextError| e.to_string())?;
        let description = Description::parse(text)?;
        let engine = Engine::new(description.choice, &description.settings, "block skipping")?;
        Ok(Skip { levels, description, engine })
    }

    fn problem(&self, arrays: &[Array]) -> PyResult<SkipProblem> {
        let builder = self.description.builder([&arrays[0], &arrays[1], &arrays[2]], &arrays[3..])?;
        SkipProblem::new(builder, self.levels.clone()).map_err(|e| refuse(e.into()))
    }

    fn inputs<'a>(&'a self, arrays: &'a [Array], claims: &mut Claims<'a>) -> PyResult<Inputs<'a>> {
        inputs_of(&self.description, [&arrays[0], &arrays[1], &arrays[2]], &arrays[3..], None, claims)
    }

    fn run(&self, arrays: &[Array], outputs: &[Array]) -> PyResult<SkipOutcome> {
        let (problem, mut claims) = (self.problem(arrays)?, Claims::default());
        let inputs = self.inputs(arrays, &mut claims)?;
        let bound = problem.bind(&inputs).map_err(|e| refuse(e.into()))?;
        let (o, lse) = (outputs[0].view_mut("o", &mut claims)?, outputs[1].view_mut("lse", &mut claims)?);
        let mut own = Outputs { o, lse };
        own.check(problem.base()).map_err(|e| refuse(e.into()))?;
        let outcome = skip_forward(&bound, &mut own, &self.engine.options()?);
        let mut kept = outputs[2].view_mut("kept", &mut claims)?;
        let [sequences, heads, rows, cols] = kept_shape(&problem);
        let DataMut::I32(kept) = kept.data_mut() else { return Err(wrong("`kept` is not of 32-bit integers")) };
        kept.fill(0);
        let used = outcome.kept.blocks()[0];
        for at in (0..sequences * heads * rows).filter(|at| at % rows < used) {
            let (tiles, _) = outcome.kept.lists(at / (heads * rows), at / rows % heads, at % rows);
            tiles.iter().for_each(|&tile| kept[at * cols + tile as usize] = 1);
        }
        Ok(outcome)
    }

    /// The kept tiles of forward as a block mask.
    fn kept(&self, problem: &SkipProblem, kept: &Array) -> PyResult<BlockMask> {
        let [sequences, heads, rows, cols] = kept_shape(problem);
        let values = tensor("kept", kept)?.view().to_f64();
        if kept.shape() != [sequences, heads, rows, cols] {
            return Err(wrong(format!("`kept` has shape {:?}, allowed: that of forward", kept.shape())));
        }
        let spec = problem.meaning().blocks().ok_or_else(|| wrong("the problem has no blocks"))?;
        let [used, keys] = spec.blocks(problem.base().max_q_len(), problem.base().max_k_len());
        let list = |row: &[f64]| (0..keys.min(cols) as i32).filter(|&tile| row[tile as usize] != 0.0).collect();
        let own = values.chunks(cols.max(1)).enumerate().filter(|(at, _)| at % rows < used);
        let lists: Vec<Vec<i32>> = own.map(|(_, row)| list(row)).collect();
        let full = vec![Vec::new(); lists.len()];
        BlockMask::new(spec, [used, keys], lists, full).map_err(|e| wrong(e.to_string()))
    }
}

/// Sequences, heads, and tiles of queries and of keys. A compiler must know the shape without reading offsets, so packed
/// sequences have room for one of the whole length.
fn kept_shape(problem: &SkipProblem) -> [usize; 4] {
    let (base, [rows, cols]) = (problem.base(), problem.skip().tile);
    let (q_len, k_len) = match base.layout() {
        Layout::Dense { q_len, k_len, .. } => (q_len, k_len),
        Layout::Packed(packed) => (packed.total_q, packed.total_k),
    };
    [base.batch(), base.q_heads(), q_len.div_ceil(rows), k_len.div_ceil(cols)]
}

fn saved_of<'a>(outputs: &'a [Array], d_outputs: &'a [Option<Array>], claims: &mut Claims<'a>) -> PyResult<Saved<'a>> {
    let [o, lse, ..] = outputs else { return Err(wrong("`o` or `lse` is missing")) };
    let Some(Some(d_o)) = d_outputs.first() else { return Err(wrong("`d_o` is missing")) };
    let d_lse = match d_outputs.get(1) {
        Some(Some(d_lse)) => Some(d_lse.view("d_lse", claims)?),
        _ => None,
    };
    Ok(Saved { o: o.view("o", claims)?, lse: lse.view("lse", claims)?, d_o: d_o.view("d_o", claims)?, d_lse })
}

impl Operator for Skip {
    fn names(&self) -> Vec<&str> {
        ["q", "k", "v"].into_iter().chain(self.description.roles.iter().map(Role::name)).collect()
    }

    fn outputs(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let problem = self.problem(arrays)?;
        let base = problem.base();
        Ok(vec![
            Wanted::own("o", base.o_shape()),
            Wanted::f32("lse", base.lse_shape()),
            Wanted::i32("kept", kept_shape(&problem).to_vec()),
        ])
    }

    fn forward(&self, arrays: &[Array], outputs: &[Array]) -> PyResult<()> {
        self.run(arrays, outputs).map(|_| ())
    }

    fn counts(&self, arrays: &[Array], outputs: &[Array]) -> PyResult<SkipCounts> {
        self.run(arrays, outputs).map(|outcome| SkipCounts::from(&outcome))
    }

    fn gradients(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let named = ["d_q", "d_k", "d_v"].into_iter().zip(arrays);
        let mut all: Vec<Wanted> = named.map(|(name, array)| Wanted::own(name, array.shape().to_vec())).collect();
        for (role, array) in self.description.roles.iter().zip(&arrays[3..]) {
            if matches!(role, Role::Sinks | Role::Aux { grad: true, .. }) {
                all.push(Wanted::f32("d_extra", array.shape().to_vec()));
            }
        }
        Ok(all)
    }

    fn backward(
        &self,
        arrays: &[Array],
        outputs: &[Array],
        d_outputs: &[Option<Array>],
        gradients: &[Array],
    ) -> PyResult<()> {
        let (problem, mut claims) = (self.problem(arrays)?, Claims::default());
        let kept = outputs.get(2).ok_or_else(|| wrong("`kept` is missing"))?;
        let kept = self.kept(&problem, kept)?;
        let inputs = self.inputs(arrays, &mut claims)?.block_mask(&kept);
        let saved = saved_of(outputs, d_outputs, &mut claims)?;
        let names = ["d_q", "d_k", "d_v"].into_iter().chain(std::iter::repeat("d_extra"));
        let views = names.zip(gradients).map(|(name, array)| array.view_mut(name, &mut claims));
        let mut results = self.description.gradient_outputs(problem.meaning(), views)?;
        let engine = cpu(self.engine.choice, &self.engine.settings, "block skipping").map_err(refuse)?;
        engine.backward_into(problem.meaning(), &inputs, &saved, &mut results, &Run::default()).map_err(refuse)
    }

    fn judge(
        &self,
        arrays: &[Array],
        outputs: &[Array],
        gradients: Option<(&[Option<Array>], &[Array])>,
    ) -> PyResult<Vec<(String, Verdict)>> {
        let (problem, mut claims) = (self.problem(arrays)?, Claims::default());
        let [o, lse, kept] = outputs else { return Err(wrong("`outputs` are not o, lse and kept")) };
        let kept = self.kept(&problem, kept)?;
        let inputs = self.inputs(arrays, &mut claims)?.block_mask(&kept);
        let bound = inputs.bind(problem.meaning()).map_err(|e| refuse(e.into()))?;
        let Some((d_outputs, found)) = gradients else {
            let got = Forward { o: tensor("o", o)?, lse: tensor("lse", lse)? };
            return Ok(compare::check_forward(&bound, &got, 0));
        };
        let saved = saved_of(outputs, d_outputs, &mut claims)?;
        let tensors = found.iter().map(|array| tensor("gradient", array));
        let fields = self.description.gradient_fields(problem.meaning(), tensors)?;
        let GradientFields { rows: [d_q, d_k, d_v], d_sinks, d_aux } = fields;
        Ok(compare::check_backward(&bound, &saved, &Gradients { d_q, d_k, d_v, d_sinks, d_aux }, 0))
    }
}
