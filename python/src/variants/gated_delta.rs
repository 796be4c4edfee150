//! The gated delta rule under the names and with the shapes of flash-linear-attention.
//!
//! ```text
//! gated_delta chunked | recurrent;   scale X;   l2norm;   state (return it);   v_first (states are [value, key])
//! beta sigmoid | twice-sigmoid;   engine NAME;   threads N
//! with g | beta | initial_state | cu_seqlens | A_log | dt_bias      tensors beside q, k and v, in their order
//! ```
//!
//! Packed sequences have a batch axis of 1. A missing g is no decay, a missing beta is a step of 1.

use super::{Engine, Operator, Wanted, entries, tensor, unknown};
use crate::array::{Array, Claims, refuse, wrong};
use fulgurite::variants::{
    DeltaForm, DeltaForward, DeltaGradientOutputs, DeltaGradients, DeltaOutputs, DeltaSaved, DeltaStep,
    GatedDelta as Problem, GatedDeltaCall,
};
use fulgurite::{Choice, DType, Settings, Tensor, TensorView, TensorViewMut};
use fulgurite_core::compare::Verdict;
use fulgurite_core::gated_delta::{check_backward, check_forward};
use pyo3::prelude::*;

const NAMES: [&str; 6] = ["g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias"];

/// A parsed description.
pub struct GatedDelta {
    form: DeltaForm,
    scale: Option<f32>,
    l2norm: bool,
    final_state: bool,
    v_first: bool,
    step: DeltaStep,
    engine: Engine,
    /// Indices into [`NAMES`].
    roles: Vec<usize>,
}

/// The tensors of a call in the form that the engine takes; those that had to be made are owned.
struct Call<'a> {
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    given: [Option<TensorView<'a>>; 6],
    made_g: Option<Tensor>,
    made_beta: Option<Tensor>,
    made_state: Option<Tensor>,
}

fn swapped(view: &TensorView<'_>) -> PyResult<Tensor> {
    let (mut shape, mut strides) = (view.shape().to_vec(), view.strides().to_vec());
    let rank = shape.len();
    if rank != 4 {
        return Err(wrong(format!(
            "`initial_state` has shape {shape:?}, allowed: [sequences, value_heads, value_dim, key_dim]"
        )));
    }
    shape.swap(rank - 2, rank - 1);
    strides.swap(rank - 2, rank - 1);
    let turned = TensorView::strided(view.data(), &shape, &strides).map_err(|e| refuse(e.into()))?;
    Ok(turned.to_tensor())
}

/// Writes a state whose last two axes are swapped.
fn write_swapped(from: &Tensor, to: &mut TensorViewMut<'_>) -> PyResult<()> {
    to.write_f64(&swapped(&from.view())?.view().to_f64());
    Ok(())
}

impl GatedDelta {
    /// Parses the text.
    pub fn parse(text: &str) -> Result<GatedDelta, String> {
        let (mut form, mut scale, mut step) = (DeltaForm::Chunked, None, DeltaStep::Given);
        let (mut l2norm, mut final_state, mut v_first) = (false, false, false);
        let (mut choice, mut settings, mut roles) = (Choice::Best, Settings::default(), Vec::new());
        for (key, words) in entries(text) {
            match (key, &words[..]) {
                ("gated_delta", ["chunked"]) => form = DeltaForm::Chunked,
                ("gated_delta", ["recurrent"]) => form = DeltaForm::Recurrent,
                ("scale", [x]) => scale = Some(x.parse::<f64>().map_err(|e| format!("`scale` is {x:?}: {e}"))? as f32),
                ("l2norm", []) => l2norm = true,
                ("state", []) => final_state = true,
                ("v_first", []) => v_first = true,
                ("beta", ["sigmoid"]) => step = DeltaStep::Sigmoid,
                ("beta", ["twice-sigmoid"]) => step = DeltaStep::TwiceSigmoid,
                ("engine", [name]) => choice = name.parse().map_err(|e: fulgurite::ChoiceError| e.to_string())?,
                ("threads", [n]) => {
                    let n = n.parse::<i64>().map_err(|e| format!("`threads` is {n:?}: {e}"))?;
                    settings = settings.threads(n.max(0) as usize);
                }
                ("with", [name]) => {
                    let role = NAMES.iter().position(|known| known == name);
                    roles.push(role.ok_or_else(|| unknown(key, &words))?);
                }
                _ => return Err(unknown(key, &words)),
            }
        }
        let engine = Engine::new(choice, &settings, "the gated delta rule")?;
        Ok(GatedDelta { form, scale, l2norm, final_state, v_first, step, engine, roles })
    }

    fn has(&self, name: &str) -> bool {
        self.roles.iter().any(|&role| NAMES[role] == name)
    }

    /// A view without the batch axis, which packed sequences do not use.
    fn rows<'a>(&self, name: &'a str, array: &'a Array, claims: &mut Claims<'a>) -> PyResult<TensorView<'a>> {
        let view = array.view(name, claims)?;
        if !self.has("cu_seqlens") {
            return Ok(view);
        }
        let shape = view.shape();
        if shape.len() < 3 || shape[0] != 1 {
            let axes = if matches!(name, "g" | "beta") { "heads" } else { "heads, dim" };
            return Err(wrong(format!(
                "`{name}` has shape {:?}, allowed with `cu_seqlens`: [1, tokens, {axes}]; put the sequences one after \
                 the other",
                &shape[..]
            )));
        }
        TensorView::strided(view.data(), &shape[1..], &view.strides()[1..]).map_err(|e| refuse(e.into()))
    }

    fn rows_mut<'a>(&self, name: &'a str, array: &'a Array, claims: &mut Claims<'a>) -> PyResult<TensorViewMut<'a>> {
        if !self.has("cu_seqlens") {
            return array.view_mut(name, claims);
        }
        array.view_mut_unbatched(name, claims)
    }

    fn call<'a>(&self, arrays: &'a [Array], claims: &mut Claims<'a>) -> PyResult<Call<'a>> {
        let [q, k, v, rest @ ..] = arrays else { unreachable!("bug in fulgurite: the number was checked") };
        let mut given = [const { None }; 6];
        let (q, k, v) = (self.rows("q", q, claims)?, self.rows("k", k, claims)?, self.rows("v", v, claims)?);
        for (&role, array) in self.roles.iter().zip(rest) {
            given[role] = Some(match NAMES[role] {
                name @ ("g" | "beta") => self.rows(name, array, claims)?,
                name => array.view(name, claims)?,
            });
        }
        let gates = &v.shape()[..v.shape().len().saturating_sub(1)];
        let constant = |x: f32| {
            let values = vec![x; gates.iter().product()];
            Tensor::new(values, gates).map_err(|e| refuse(e.into()))
        };
        let made_g = if given[0].is_none() { Some(constant(0.0)?) } else { None };
        let made_beta = if given[1].is_none() { Some(constant(1.0)?) } else { None };
        // The engine reads f32 states with keys first.
        let made_state = match &given[2] {
            Some(state) if self.v_first => Some(swapped(state)?),
            Some(state) if state.dtype().is_float() && state.dtype() != DType::F32 => Some(state.to_tensor()),
            _ => None,
        };
        let made_state = match made_state {
            Some(state) if state.dtype().is_float() && state.dtype() != DType::F32 => {
                let wide = Tensor::from_f64(DType::F32, &state.view().to_f64(), state.shape());
                Some(wide.map_err(|e| refuse(e.into()))?)
            }
            other => other,
        };
        Ok(Call { q, k, v, given, made_g, made_beta, made_state })
    }

    fn prepare<'a>(&self, call: &'a Call<'_>) -> PyResult<GatedDeltaCall<'a>> {
        let missing = || wrong("a gate is missing");
        let own = |made: &'a Option<Tensor>, at: usize| match (made, &call.given[at]) {
            (Some(made), _) => Some(made.view()),
            (None, given) => *given,
        };
        let (g, beta) = (own(&call.made_g, 0).ok_or_else(missing)?, own(&call.made_beta, 1).ok_or_else(missing)?);
        let mut prepared = GatedDeltaCall::new([call.q, call.k, call.v, g, beta])
            .form(self.form)
            .step(self.step)
            .engine(self.engine.choice)
            .settings(self.engine.settings.clone());
        if let Some(scale) = self.scale {
            prepared = prepared.scale(scale);
        }
        if self.l2norm {
            prepared = prepared.l2norm();
        }
        if let Some(state) = &call.made_state {
            prepared = prepared.initial_state(state);
        } else if let Some(state) = &call.given[2] {
            prepared = prepared.initial_state(state);
        }
        if let Some(offsets) = &call.given[3] {
            prepared = prepared.cu_seqlens(offsets);
        }
        if let Some(a_log) = &call.given[4] {
            prepared = prepared.raw_decay(a_log, call.given[5].as_ref());
        }
        Ok(prepared)
    }

    /// Shape of the states, as the caller sees it, from the shapes of the arrays. It is empty if they do not fit, which
    /// the engine then refuses.
    fn state_shape(&self, arrays: &[Array]) -> Vec<usize> {
        let (q, v) = (arrays[0].shape(), arrays[2].shape());
        let offsets = self.roles.iter().zip(&arrays[3..]).find(|(role, _)| NAMES[**role] == "cu_seqlens");
        let sequences = match offsets {
            Some((_, array)) => array.shape().first().copied().unwrap_or(0).saturating_sub(1),
            None => v.first().copied().unwrap_or(0),
        };
        match (q, v) {
            (&[.., key], &[_, _, heads, value]) if key.max(value) <= Problem::MAX_DIM => {
                let [rows, cols] = if self.v_first { [value, key] } else { [key, value] };
                vec![sequences, heads, rows, cols]
            }
            _ => vec![0; 4],
        }
    }

    fn saved<'a>(
        &self,
        d_outputs: &'a [Option<Array>],
        zeros: &'a Tensor,
        turned: &'a mut Option<Tensor>,
        claims: &mut Claims<'a>,
    ) -> PyResult<DeltaSaved<'a>> {
        let d_o = match d_outputs.first() {
            Some(Some(d_o)) => self.rows("d_o", d_o, claims)?,
            _ => zeros.view(),
        };
        let d_state = match d_outputs.get(1) {
            Some(Some(d)) => Some(d.view("d_final_state", claims)?),
            _ => None,
        };
        let d_final_state = match d_state {
            Some(d) if self.v_first => {
                *turned = Some(swapped(&d)?);
                turned.as_ref().map(Tensor::view)
            }
            other => other,
        };
        Ok(DeltaSaved { d_o, d_final_state })
    }

    /// The gradients that the caller gets, as the tensors of the oracle's check.
    fn judged_gradients(&self, prepared: &GatedDeltaCall<'_>, gradients: &[Array]) -> PyResult<DeltaGradients> {
        let problem = prepared.problem().map_err(refuse)?;
        let mut own = DeltaGradients::zeros(&problem).map_err(|e| refuse(e.into()))?;
        let reshaped = |array: &Array, like: &Tensor| -> PyResult<Tensor> {
            let values = tensor("gradient", array)?.view().to_f64();
            Tensor::from_f64(like.dtype(), &values, like.shape()).map_err(|e| refuse(e.into()))
        };
        let [d_q, d_k, d_v, rest @ ..] = gradients else { return Err(wrong("a gradient is missing")) };
        own.d_q = reshaped(d_q, &own.d_q)?;
        own.d_k = reshaped(d_k, &own.d_k)?;
        own.d_v = reshaped(d_v, &own.d_v)?;
        for (name, array) in self.roles.iter().map(|&role| NAMES[role]).filter(|name| *name != "cu_seqlens").zip(rest) {
            match name {
                "g" => own.d_g = reshaped(array, &own.d_g)?,
                "beta" => own.d_beta = reshaped(array, &own.d_beta)?,
                "initial_state" if self.v_first => own.d_initial_state = swapped(&tensor(name, array)?.view())?,
                "initial_state" => own.d_initial_state = reshaped(array, &own.d_initial_state)?,
                _ => {}
            }
        }
        Ok(own)
    }
}

impl Operator for GatedDelta {
    fn names(&self) -> Vec<&str> {
        ["q", "k", "v"].into_iter().chain(self.roles.iter().map(|&role| NAMES[role])).collect()
    }

    fn outputs(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let mut all = vec![Wanted::own("o", arrays[2].shape().to_vec())];
        if self.final_state {
            all.push(Wanted::f32("final_state", self.state_shape(arrays)));
        }
        Ok(all)
    }

    fn forward(&self, arrays: &[Array], outputs: &[Array]) -> PyResult<()> {
        let mut claims = Claims::default();
        let call = self.call(arrays, &mut claims)?;
        let prepared = self.prepare(&call)?;
        let o = self.rows_mut("o", &outputs[0], &mut claims)?;
        let run = |outputs: &mut DeltaOutputs<'_>| prepared.forward_into(outputs).map(|_| ()).map_err(refuse);
        let Some(state) = outputs.get(1) else {
            return run(&mut DeltaOutputs { o, final_state: None });
        };
        let mut state = state.view_mut("final_state", &mut claims)?;
        if !self.v_first {
            return run(&mut DeltaOutputs { o, final_state: Some(state) });
        }
        let shape = prepared.problem().map_err(refuse)?.state_shape();
        let mut own = Tensor::zeros(DType::F32, &shape).map_err(|e| refuse(e.into()))?;
        run(&mut DeltaOutputs { o, final_state: Some(own.view_mut()) })?;
        write_swapped(&own, &mut state)
    }

    fn gradients(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let own = ["d_q", "d_k", "d_v"].into_iter().zip(arrays);
        let mut all: Vec<Wanted> = own.map(|(name, array)| Wanted::own(name, array.shape().to_vec())).collect();
        let d_names = ["d_g", "d_beta", "d_initial_state", "", "d_A_log", "d_dt_bias"];
        for (&role, array) in self.roles.iter().zip(&arrays[3..]) {
            if NAMES[role] != "cu_seqlens" {
                all.push(Wanted::f32(d_names[role], array.shape().to_vec()));
            }
        }
        Ok(all)
    }

    fn backward(
        &self,
        arrays: &[Array],
        _outputs: &[Array],
        d_outputs: &[Option<Array>],
        gradients: &[Array],
    ) -> PyResult<()> {
        let mut claims = Claims::default();
        let call = self.call(arrays, &mut claims)?;
        let prepared = self.prepare(&call)?;
        let problem = prepared.problem().map_err(refuse)?;
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).map_err(|e| refuse(e.into()));
        let (no_o, mut turned) = (zeros(problem.dtype(), &problem.v_shape())?, None);
        let saved = self.saved(d_outputs, &no_o, &mut turned, &mut claims)?;
        // Gradients of tensors that the call does not have, and of states in the other order.
        let mut spare = [problem.gate_shape(), problem.gate_shape(), problem.state_shape()]
            .map(|shape| Tensor::zeros(DType::F32, &shape));
        let [spare_g, spare_beta, spare_state] = &mut spare;
        let spare_error = |e: &mut fulgurite_core::TensorError| refuse(e.clone().into());
        let mut d_g = spare_g.as_mut().map_err(spare_error)?.view_mut();
        let mut d_beta = spare_beta.as_mut().map_err(spare_error)?.view_mut();
        let mut d_initial_state = spare_state.as_mut().map_err(spare_error)?.view_mut();
        let (mut turned_state, mut d_a_log, mut d_dt_bias) = (None, None, None);
        let with_gradients = self.roles.iter().map(|&role| NAMES[role]).filter(|name| *name != "cu_seqlens");
        for (name, array) in with_gradients.zip(&gradients[3..]) {
            match name {
                "g" => d_g = self.rows_mut("d_g", array, &mut claims)?,
                "beta" => d_beta = self.rows_mut("d_beta", array, &mut claims)?,
                "initial_state" => {
                    let view = array.view_mut("d_initial_state", &mut claims)?;
                    if self.v_first { turned_state = Some(view) } else { d_initial_state = view }
                }
                "A_log" => d_a_log = Some(array.view_mut("d_A_log", &mut claims)?),
                _ => d_dt_bias = Some(array.view_mut("d_dt_bias", &mut claims)?),
            }
        }
        let mut results = DeltaGradientOutputs {
            d_q: self.rows_mut("d_q", &gradients[0], &mut claims)?,
            d_k: self.rows_mut("d_k", &gradients[1], &mut claims)?,
            d_v: self.rows_mut("d_v", &gradients[2], &mut claims)?,
            d_g,
            d_beta,
            d_initial_state,
        };
        let gates = prepared.backward_into(&saved, &mut results).map_err(refuse)?;
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
        if let Some(mut to) = turned_state {
            let own = results.d_initial_state.as_view().to_tensor();
            write_swapped(&own, &mut to)?;
        }
        for (to, values) in [(d_a_log, gates.d_a_log), (d_dt_bias, gates.d_dt_bias)] {
            if let (Some(mut to), Some(values)) = (to, values) {
                to.write_f64(&wide(values));
            }
        }
        Ok(())
    }

    fn judge(
        &self,
        arrays: &[Array],
        outputs: &[Array],
        gradients: Option<(&[Option<Array>], &[Array])>,
    ) -> PyResult<Vec<(String, Verdict)>> {
        let mut claims = Claims::default();
        let call = self.call(arrays, &mut claims)?;
        let prepared = self.prepare(&call)?;
        let problem = prepared.problem().map_err(refuse)?;
        let mut own = DeltaForward::zeros(&problem).map_err(|e| refuse(e.into()))?;
        if gradients.is_none() {
            own.o.view_mut().write_f64(&tensor("o", &outputs[0])?.view().to_f64());
            if let Some(state) = outputs.get(1) {
                let state = tensor("final_state", state)?;
                own.final_state = if self.v_first { swapped(&state.view())? } else { state };
            }
        }
        let no_o = Tensor::zeros(problem.dtype(), &problem.v_shape()).map_err(|e| refuse(e.into()))?;
        let mut turned = None;
        let given = match gradients {
            None => None,
            Some((d_outputs, gradients)) => Some((
                self.saved(d_outputs, &no_o, &mut turned, &mut claims)?,
                self.judged_gradients(&prepared, gradients)?,
            )),
        };
        // Gradients of raw gates are not the oracle's, and a state that was not asked for is not judged.
        let has = |name: &str| match name {
            "final_state" => outputs.len() > 1,
            "d_g" => self.has("g") && !self.has("A_log"),
            "d_beta" => self.has("beta") && self.step == DeltaStep::Given,
            "d_initial_state" => self.has("initial_state"),
            _ => true,
        };
        let verdicts = prepared.with_gates(|inputs| {
            let bound = inputs.bind(&problem)?;
            Ok(match &given {
                None => check_forward(&bound, &own, 0),
                Some((saved, gradients)) => check_backward(&bound, saved, gradients, 0),
            })
        });
        Ok(verdicts.map_err(refuse)?.into_iter().filter(|(name, _)| has(name)).collect())
    }
}
