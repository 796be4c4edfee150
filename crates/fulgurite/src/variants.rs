//! Variants of attention on the CPU: block skipping, Parallax, Lighthouse and the gated delta rule.
//!
//! Block skipping and Parallax extend an attention call ([`Attention::skip`], [`Attention::parallax`]); the others have
//! separate calls ([`lighthouse`], [`gated_delta`]). `fulgurite-core` defines their results.

mod gates;

use crate::attention::Attention;
use crate::choice::{Choice, Settings};
use crate::cpu::Cpu;
use crate::engine::Unsupported;
use crate::error::Error;
use crate::view::AsView;
use fulgurite_core::gated_delta::GatedDeltaBuilder;
use fulgurite_core::lighthouse::TILE;
use fulgurite_core::{Gradients, Saved, TensorView, stop};

pub use fulgurite_core::gated_delta::{
    DeltaForward, DeltaGradientOutputs, DeltaGradients, DeltaInputs, DeltaOutputs, DeltaSaved, GatedDelta, QkNorm,
};
pub use fulgurite_core::lighthouse::Lighthouse;
pub use fulgurite_core::parallax::{Parallax, ParallaxForward, ParallaxGradients};
pub use fulgurite_core::skip::{HeadClass, Lambda, Proxy, Skip, SkipProblem, SkipTextError, TileCounts};
pub use fulgurite_cpu::{
    DeltaCounters, DeltaForm, DeltaSegments, LighthouseForward, LighthouseGradients, Options, SkipOutcome,
    gated_delta_backward, gated_delta_forward, lighthouse_backward, lighthouse_forward, parallax_backward,
    parallax_forward, skip_forward,
};
pub use gates::{DeltaGates, DeltaStep, GateGradients};

/// The CPU engine of a choice, for `feature`, one of these variants; other engines do not support them. Its
/// [`options`](Cpu::options) go to the functions that take tensors bound to a problem, such as [`skip_forward`].
pub fn cpu(choice: Choice, settings: &Settings, feature: &str) -> Result<Cpu, Error> {
    match choice {
        Choice::Best | Choice::Cpu => Cpu::new(None, settings),
        Choice::CpuIsa(isa) => Cpu::new(Some(isa), settings),
        other => {
            let (engine, feature) = (other.to_string(), feature.to_string());
            Err(Unsupported { engine, feature, instead: "use the engine cpu".into() }.into())
        }
    }
}

/// Result of block-skip attention, and the tiles that were skipped.
#[derive(Debug, Clone)]
pub struct Skipped {
    /// Output and LSE.
    pub forward: fulgurite_core::Forward,
    /// The kept tiles, their number at each level, and a proven bound of the error.
    pub outcome: SkipOutcome,
}

impl Attention<'_> {
    /// Computes only the tiles of scores that `skip` keeps.
    ///
    /// ```
    /// use fulgurite::{Tensor, attention, variants::Skip};
    /// let x = Tensor::new(vec![0.1f32; 512 * 8], &[1, 512, 1, 8])?;
    /// let skip: Skip = "window:64:4,tile:64x64".parse().unwrap();
    /// let found = attention(&x, &x, &x).causal().skip(&skip)?;
    /// assert!(found.outcome.counts.kept < found.outcome.counts.visible);
    /// # Ok::<(), fulgurite::Error>(())
    /// ```
    pub fn skip(&self, skip: &Skip) -> Result<Skipped, Error> {
        let engine = cpu(self.choice, &self.settings, "block skipping")?;
        let problem = SkipProblem::new(self.description()?, skip.clone())?;
        let mut forward = fulgurite_core::Forward::zeros(problem.base())?;
        let inputs = self.inputs()?;
        let (bound, options) = (problem.bind(&inputs)?, engine.options());
        let outcome = stop::catch_memory(|| fulgurite_cpu::skip_forward(&bound, &mut forward.outputs(), &options))?;
        Ok(Skipped { forward, outcome })
    }

    /// The gradients of [`skip`](Self::skip), which are exactly those of attention over the kept tiles.
    pub fn skip_backward(&self, skip: &Skip, found: &Skipped, d_o: &TensorView<'_>) -> Result<Gradients, Error> {
        let engine = cpu(self.choice, &self.settings, "block skipping")?;
        let problem = SkipProblem::new(self.description()?, skip.clone())?;
        let saved = Saved { d_lse: None, ..found.forward.saved(*d_o) };
        let inputs = self.inputs()?.block_mask(&found.outcome.kept);
        crate::Engine::backward(&engine, problem.meaning(), &inputs, &saved, &crate::Run::default())
    }

    /// Computes Parallax instead of attention. `r`, shaped like q, probes the covariance of keys and values; r = 0
    /// gives attention.
    ///
    /// ```
    /// use fulgurite::{Tensor, attention};
    /// let x = Tensor::new(vec![0.1f32; 64], &[1, 4, 2, 8])?;
    /// let result = attention(&x, &x, &x).causal().parallax(&x)?;
    /// assert_eq!(result.own.o.shape(), x.shape());
    /// # Ok::<(), fulgurite::Error>(())
    /// ```
    pub fn parallax(&self, r: &(impl AsView + ?Sized)) -> Result<ParallaxForward, Error> {
        let engine = cpu(self.choice, &self.settings, "parallax")?;
        let problem = Parallax::new(self.problem()?)?;
        let inputs = self.inputs()?;
        let mut forward = ParallaxForward::zeros(&problem)?;
        let bound = problem.bind(&inputs, r.as_view()?)?;
        stop::catch_memory(|| {
            fulgurite_cpu::parallax_forward(&bound, &mut forward.outputs(), &engine.options());
        })?;
        Ok(forward)
    }

    /// The gradients of [`parallax`](Self::parallax).
    pub fn parallax_backward(
        &self,
        r: &(impl AsView + ?Sized),
        forward: &ParallaxForward,
        d_o: &TensorView<'_>,
    ) -> Result<ParallaxGradients, Error> {
        let engine = cpu(self.choice, &self.settings, "parallax")?;
        let problem = Parallax::new(self.problem()?)?;
        let inputs = self.inputs()?;
        let bound = problem.bind(&inputs, r.as_view()?)?;
        forward.own.saved(*d_o).check(problem.problem())?;
        let (mean, shape) = (forward.mean.view(), problem.problem().lse_shape());
        fulgurite_core::inputs::check_like("mean", &mean, &shape, fulgurite_core::DType::F32)?;
        let mut gradients = ParallaxGradients::zeros(&problem)?;
        stop::catch_memory(|| {
            fulgurite_cpu::parallax_backward(&bound, forward, d_o, &mut gradients, &engine.options());
        })?;
        Ok(gradients)
    }
}

/// The axes of `[batch, tokens, heads, dim]`.
fn axes(arg: &'static str, view: &TensorView<'_>) -> Result<[usize; 4], Error> {
    let (allowed, hint) = ("[batch, tokens, heads, dim]", "add the missing axes");
    <[usize; 4]>::try_from(&view.shape()[..]).map_err(|_| Error::Rank {
        arg,
        got: view.shape().to_vec(),
        allowed,
        hint,
    })
}

/// Lighthouse attention of `q` over `k` and `v`, each `[batch, tokens, heads, head_dim]`. By default, the pyramid has 3
/// levels that pool by 4, and a 64th of the tokens is picked at each level.
///
/// **The selection sees the future**, so this layer suits early training, not generation.
///
/// ```
/// use fulgurite::{Tensor, variants::lighthouse};
/// let x = Tensor::new(vec![0.1f32; 1024 * 8], &[1, 1024, 1, 8])?;
/// let call = lighthouse(&x, &x, &x).budget(16).tile(8);
/// let forward = call.forward()?;
/// assert_eq!(forward.entries[0].len(), call.problem()?.picked());
/// let gradients = call.backward(&forward, &x.view())?;
/// assert_eq!(gradients.d_q.shape(), x.shape());
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn lighthouse<'a>(
    q: &'a (impl AsView + ?Sized),
    k: &'a (impl AsView + ?Sized),
    v: &'a (impl AsView + ?Sized),
) -> LighthouseCall<'a> {
    let views = || -> Result<_, Error> { Ok([q.as_view()?, k.as_view()?, v.as_view()?]) };
    LighthouseCall {
        views: views(),
        levels: 3,
        pool: 4,
        budget: None,
        tile: TILE,
        choice: Choice::Best,
        settings: Settings::default(),
    }
}

/// A call of [`lighthouse`] under construction.
#[derive(Debug, Clone)]
#[must_use = "nothing is computed before `forward`"]
pub struct LighthouseCall<'a> {
    views: Result<[TensorView<'a>; 3], Error>,
    levels: usize,
    pool: usize,
    budget: Option<usize>,
    tile: usize,
    choice: Choice,
    settings: Settings,
}

impl LighthouseCall<'_> {
    /// Sets the number of levels of the pyramid; 1 is dense attention.
    pub fn levels(mut self, levels: usize) -> Self {
        self.levels = levels;
        self
    }
    /// Sets the number of nodes that are averaged into a node of the next level.
    pub fn pool(mut self, pool: usize) -> Self {
        self.pool = pool;
        self
    }
    /// Sets the number of nodes picked at each level, a multiple of the tile; the default is a 64th of the tokens.
    pub fn budget(mut self, budget: usize) -> Self {
        self.budget = Some(budget);
        self
    }
    /// Sets the number of nodes picked from each tile of the sequence.
    pub fn tile(mut self, tile: usize) -> Self {
        self.tile = tile;
        self
    }
    /// Sets the engine.
    pub fn engine(mut self, choice: Choice) -> Self {
        self.choice = choice;
        self
    }
    /// Sets the engine's settings, such as the number of threads.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// The problem that the shapes and options describe.
    pub fn problem(&self) -> Result<Lighthouse, Error> {
        let [q, k, v] = self.views.as_ref().map_err(Clone::clone)?;
        let ([batch, len, heads, dim], [.., kv_heads, _], [.., value_dim]) =
            (axes("q", q)?, axes("k", k)?, axes("v", v)?);
        let budget = self.budget.unwrap_or(len / 64);
        let light = Lighthouse::new(
            [batch, len, heads, kv_heads],
            [dim, value_dim],
            self.levels,
            self.pool,
            budget,
            self.tile,
        )?;
        Ok(light.dtype(q.dtype())?)
    }

    /// Computes the output.
    pub fn forward(&self) -> Result<LighthouseForward, Error> {
        let engine = cpu(self.choice, &self.settings, "lighthouse")?;
        let [q, k, v] = self.views.as_ref().map_err(Clone::clone)?;
        let (problem, options) = (self.problem()?, engine.options());
        Ok(stop::catch_memory(|| fulgurite_cpu::lighthouse_forward(&problem, q, k, v, &options))??)
    }

    /// Computes the gradients, using the selection of `forward`.
    pub fn backward(&self, forward: &LighthouseForward, d_o: &TensorView<'_>) -> Result<LighthouseGradients, Error> {
        let engine = cpu(self.choice, &self.settings, "lighthouse")?;
        let (problem, options) = (self.problem()?, engine.options());
        Ok(stop::catch_memory(|| fulgurite_cpu::lighthouse_backward(&problem, forward, d_o, &options))??)
    }
}

/// The gated delta rule. `q` and `k` are `[batch, tokens, heads, key_dim]`, `v` is `[batch, tokens, value_heads,
/// value_dim]`, `g` (log decays) and `beta` (step sizes) are `[batch, tokens, value_heads]`. With
/// [`cu_seqlens`](GatedDeltaCall::cu_seqlens) there is no batch axis.
///
/// ```
/// use fulgurite::{Tensor, variants::{DeltaForm, gated_delta}};
/// let x = Tensor::new(vec![0.1f32; 100 * 8], &[1, 100, 1, 8])?;
/// let g = Tensor::new(vec![-0.1f32; 100], &[1, 100, 1])?;
/// let beta = Tensor::new(vec![0.5f32; 100], &[1, 100, 1])?;
/// let prompt = gated_delta(&x, &x, &x, &g, &beta).l2norm().forward()?;
/// // One more token, from the state that the prompt left.
/// let (t, one) = (Tensor::new(vec![0.1f32; 8], &[1, 1, 1, 8])?, Tensor::new(vec![0.5f32], &[1, 1, 1])?);
/// let gate = Tensor::new(vec![-0.1f32], &[1, 1, 1])?;
/// let next = gated_delta(&t, &t, &t, &gate, &one).l2norm().form(DeltaForm::Recurrent).initial_state(&prompt.final_state);
/// assert_eq!(next.forward()?.o.shape()[..], [1, 1, 1, 8]);
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn gated_delta<'a>(
    q: &'a (impl AsView + ?Sized),
    k: &'a (impl AsView + ?Sized),
    v: &'a (impl AsView + ?Sized),
    g: &'a (impl AsView + ?Sized),
    beta: &'a (impl AsView + ?Sized),
) -> GatedDeltaCall<'a> {
    let views = || -> Result<_, Error> {
        Ok(DeltaInputs::new(q.as_view()?, k.as_view()?, v.as_view()?, g.as_view()?, beta.as_view()?))
    };
    GatedDeltaCall::over(views())
}

/// A call of [`gated_delta`] under construction.
#[derive(Debug, Clone)]
#[must_use = "nothing is computed before `forward`"]
pub struct GatedDeltaCall<'a> {
    inputs: Result<DeltaInputs<'a>, Error>,
    gates: Result<DeltaGates<'a>, Error>,
    builder: GatedDeltaBuilder,
    form: DeltaForm,
    segments: DeltaSegments,
    choice: Choice,
    settings: Settings,
}

impl<'a> GatedDeltaCall<'a> {
    /// The call of these views: q, k, v, g and beta, as in [`gated_delta`].
    pub fn new([q, k, v, g, beta]: [TensorView<'a>; 5]) -> Self {
        Self::over(Ok(DeltaInputs::new(q, k, v, g, beta)))
    }

    fn over(inputs: Result<DeltaInputs<'a>, Error>) -> Self {
        GatedDeltaCall {
            inputs,
            gates: Ok(DeltaGates::default()),
            builder: GatedDelta::builder(),
            form: DeltaForm::default(),
            segments: DeltaSegments::default(),
            choice: Choice::Best,
            settings: Settings::default(),
        }
    }

    fn with(
        mut self,
        tensor: &'a (impl AsView + ?Sized),
        set: fn(DeltaInputs<'a>, TensorView<'a>) -> DeltaInputs<'a>,
    ) -> Self {
        self.inputs = self.inputs.and_then(|inputs| Ok(set(inputs, tensor.as_view()?)));
        self
    }
    /// Sets the initial states: f32, `[sequences, value_heads, key_dim, value_dim]`.
    pub fn initial_state(mut self, state: &'a (impl AsView + ?Sized)) -> Self {
        self.builder = self.builder.initial_state();
        self.with(state, DeltaInputs::initial_state)
    }
    /// Sets the offsets of packed sequences: i32, `[sequences + 1]`.
    pub fn cu_seqlens(self, offsets: &'a (impl AsView + ?Sized)) -> Self {
        self.with(offsets, DeltaInputs::cu_seqlens)
    }
    /// Takes `g` as raw values: the log decay is -exp(A_log) softplus(g + dt_bias), with one value per value head in
    /// `a_log` and in `dt_bias`.
    pub fn raw_decay(mut self, a_log: &'a (impl AsView + ?Sized), dt_bias: Option<&'a (impl AsView + ?Sized)>) -> Self {
        self.gates = self.gates.and_then(|gates| {
            let dt_bias = dt_bias.map(AsView::as_view).transpose()?;
            Ok(DeltaGates { a_log: Some(a_log.as_view()?), dt_bias, ..gates })
        });
        self
    }
    /// Sets how the step sizes come from `beta`.
    pub fn step(mut self, step: DeltaStep) -> Self {
        self.gates = self.gates.map(|gates| DeltaGates { step, ..gates });
        self
    }
    /// Sets the factor of o; the default is 1/sqrt(key_dim).
    pub fn scale(mut self, scale: f32) -> Self {
        self.builder = self.builder.scale(scale);
        self
    }
    /// Normalises the rows of q and k to length 1 first.
    pub fn l2norm(mut self) -> Self {
        self.builder = self.builder.qk_norm(QkNorm::Inside);
        self
    }
    /// Chooses the chunked form (for many tokens) or the recurrent form (for few).
    pub fn form(mut self, form: DeltaForm) -> Self {
        self.form = form;
        self
    }
    /// Sets how long sequences with few heads are split into segments.
    pub fn segments(mut self, segments: DeltaSegments) -> Self {
        self.segments = segments;
        self
    }
    /// Sets the engine.
    pub fn engine(mut self, choice: Choice) -> Self {
        self.choice = choice;
        self
    }
    /// Sets the engine's settings, such as the number of threads.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// The problem that the shapes and options describe.
    pub fn problem(&self) -> Result<GatedDelta, Error> {
        let inputs = self.inputs.as_ref().map_err(Clone::clone)?;
        let (q, v) = (inputs.q.shape(), inputs.v.shape());
        let builder = match &inputs.cu_seqlens {
            None => {
                let ([batch, len, ..], _, _) = (axes("q", &inputs.q)?, axes("k", &inputs.k)?, axes("v", &inputs.v)?);
                self.builder.clone().dense(batch, len)
            }
            Some(offsets) => {
                for (arg, view) in [("q", &inputs.q), ("k", &inputs.k), ("v", &inputs.v)] {
                    if view.shape().len() != 3 {
                        let (allowed, hint) =
                            ("[total, heads, dim]", "with cu_seqlens, sequences lie one after the other");
                        return Err(Error::Rank { arg, got: view.shape().to_vec(), allowed, hint });
                    }
                }
                // Values that are not lists of integers are rejected when the inputs are bound.
                self.builder.clone().packed(&crate::attention::integers(offsets))
            }
        };
        let [heads, value_heads] = [q, v].map(|shape| shape[shape.len() - 2]);
        let [key_dim, value_dim] = [q, v].map(|shape| shape[shape.len() - 1]);
        Ok(builder.heads(heads, value_heads).head_dims(key_dim, value_dim).dtype(inputs.q.dtype()).build()?)
    }

    /// The tensors of the call.
    pub fn inputs(&self) -> Result<DeltaInputs<'a>, Error> {
        self.inputs.clone()
    }

    /// Computes o and the final states.
    pub fn forward(&self) -> Result<DeltaForward, Error> {
        Ok(self.forward_counted()?.0)
    }

    /// Like [`forward`](Self::forward), and also returns how sequences were split.
    pub fn forward_counted(&self) -> Result<(DeltaForward, DeltaCounters), Error> {
        let mut out = DeltaForward::zeros(&self.problem()?)?;
        let counters = self.forward_into(&mut out.outputs())?;
        Ok((out, counters))
    }

    /// Computes o, and the final states if `outputs` has them, into tensors of the caller.
    pub fn forward_into(&self, outputs: &mut DeltaOutputs<'_>) -> Result<DeltaCounters, Error> {
        let engine = cpu(self.choice, &self.settings, "the gated delta rule")?;
        let problem = self.problem()?;
        self.with_gates(|inputs| {
            let bound = inputs.bind(&problem)?;
            outputs.check(&problem)?;
            let (form, segments, options) = (self.form, self.segments, engine.options());
            Ok(stop::catch_memory(|| fulgurite_cpu::gated_delta_forward(&bound, outputs, form, segments, &options))?)
        })
    }

    /// Computes the gradients. Those of g and beta are of the tensors of the call, raw or not.
    pub fn backward(&self, saved: &DeltaSaved<'_>) -> Result<DeltaGradients, Error> {
        let mut gradients = DeltaGradients::zeros(&self.problem()?)?;
        self.backward_into(saved, &mut gradients.outputs())?;
        Ok(gradients)
    }

    /// Computes the gradients into tensors of the caller, and returns those of `A_log` and `dt_bias`.
    pub fn backward_into(
        &self,
        saved: &DeltaSaved<'_>,
        gradients: &mut DeltaGradientOutputs<'_>,
    ) -> Result<GateGradients, Error> {
        let engine = cpu(self.choice, &self.settings, "the gated delta rule")?;
        let problem = self.problem()?;
        self.with_gates(|inputs| {
            let bound = inputs.bind(&problem)?;
            saved.check(&problem)?;
            gradients.check(&problem)?;
            let options = engine.options();
            Ok(stop::catch_memory(|| fulgurite_cpu::gated_delta_backward(&bound, saved, gradients, &options))?)
        })?;
        let (gates, inputs) = (self.gates.as_ref().map_err(Clone::clone)?, self.inputs()?);
        gates.backward([&inputs.g, &inputs.beta], &mut gradients.d_g, &mut gradients.d_beta)
    }

    /// Calls `run` with the tensors of the call, in which g and beta are what the rule reads.
    pub fn with_gates<T>(&self, run: impl FnOnce(&DeltaInputs<'_>) -> Result<T, Error>) -> Result<T, Error> {
        let (gates, inputs) = (self.gates.as_ref().map_err(Clone::clone)?, self.inputs()?);
        let (g, beta) = (gates.g(&inputs.g)?, gates.beta(&inputs.beta)?);
        let mut inputs: DeltaInputs<'_> = inputs;
        if let Some(g) = &g {
            inputs.g = g.view();
        }
        if let Some(beta) = &beta {
            inputs.beta = beta.view();
        }
        run(&inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention;
    use fulgurite_core::{DType, Tensor};

    fn zeros(shape: &[usize]) -> Tensor {
        Tensor::zeros(DType::F32, shape).unwrap()
    }

    #[test]
    fn bad_calls_say_what_is_allowed() {
        let (x, gate, flat) = (zeros(&[1, 64, 2, 8]), zeros(&[1, 64, 2]), zeros(&[64, 2, 8]));
        let text = |e: Error| e.to_string();
        let delta = |q, g| gated_delta(q, &x, &x, g, &gate).forward().map_err(text).unwrap_err();
        assert_eq!(
            delta(&flat, &gate),
            "`q` has shape [64, 2, 8], allowed: [batch, tokens, heads, dim]; add the missing axes"
        );
        assert!(delta(&x, &flat).starts_with("`g` has shape [64, 2, 8], allowed: [1, 64, 2]"));
        let grow = Tensor::new(vec![0.5f32; 128], &[1, 64, 2]).unwrap();
        assert!(
            delta(&x, &grow).starts_with("`g` holds 0.5 at element 0, allowed: finite and at most 0"),
            "{}",
            delta(&x, &grow)
        );
        let state = gated_delta(&x, &x, &x, &gate, &gate).initial_state(&x).forward().map_err(text).unwrap_err();
        assert!(state.starts_with("`initial_state` has shape [1, 64, 2, 8], allowed: [1, 2, 8, 8]"), "{state}");
        let packed = gated_delta(&x, &x, &x, &gate, &gate).cu_seqlens(&flat).forward().map_err(text).unwrap_err();
        assert!(packed.starts_with("`q` has shape [1, 64, 2, 8], allowed: [total, heads, dim]"), "{packed}");
        let light = lighthouse(&x, &flat, &x).forward().map_err(text).unwrap_err();
        assert!(light.starts_with("`k` has shape [64, 2, 8], allowed: [batch, tokens, heads, dim]"), "{light}");
        let large = lighthouse(&x, &x, &x).budget(64).tile(2).forward().map_err(text).unwrap_err();
        assert!(large.starts_with("`budget` is 64, allowed: a multiple of 2 up to the 4 nodes"), "{large}");
        let probe = attention(&x, &x, &x).parallax(&flat).map_err(text).unwrap_err();
        assert!(probe.starts_with("`r` has shape [64, 2, 8], allowed: [1, 64, 2, 8]"), "{probe}");
        let oracle = attention(&x, &x, &x).engine(Choice::Oracle).skip(&Skip::default()).map_err(text).unwrap_err();
        assert!(oracle.contains("oracle") && oracle.contains("block skipping"), "{oracle}");
        let int8 = attention(&x, &x, &x).precision("int8".parse().unwrap());
        let refused = int8.skip(&Skip::default()).map_err(text).unwrap_err();
        assert_eq!(refused, "block skipping has no quantised products; use precision native");
        assert_eq!(
            int8.parallax(&x).map_err(text).unwrap_err(),
            "parallax has no quantised products; use precision native"
        );
    }

    #[test]
    fn calls_give_what_the_rooms_below_give() {
        let rng = &mut fulgurite_core::random::Rng::new(3);
        let mut normal =
            |shape: &[usize]| Tensor::from_f64(DType::F32, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
        let (q, k, v, d_o) =
            (normal(&[1, 90, 2, 8]), normal(&[1, 90, 1, 8]), normal(&[1, 90, 1, 8]), normal(&[1, 90, 2, 8]));
        let call = attention(&q, &k, &v).causal();
        // Skipping nothing, or probing with zeros, gives plain attention.
        let plain = call.forward().unwrap();
        let close = |a: &Tensor, b: &Tensor| {
            let pairs = a.view().to_f64().into_iter().zip(b.view().to_f64());
            pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max) <= 1e-5
        };
        let all = call.skip(&Skip::default()).unwrap();
        let zero = zeros(&[1, 90, 2, 8]);
        let probed = call.parallax(&zero).unwrap();
        assert!(close(&all.forward.o, &plain.o) && close(&probed.own.o, &plain.o));
        let want = call.backward(&plain.saved(d_o.view())).unwrap();
        let kept = call.skip_backward(&Skip::default(), &all, &d_o.view()).unwrap();
        let probed = call.parallax_backward(&zero, &probed, &d_o.view()).unwrap();
        assert!(close(&kept.d_q, &want.d_q) && close(&probed.d_q, &want.d_q) && close(&probed.d_k, &want.d_k));
    }
}
