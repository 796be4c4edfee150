//! The shortest API: pass tensors, and their shapes define the problem.

use crate::Error;
use crate::choice::{Choice, Settings};
use crate::engine::Run;
use crate::select::engine_with;
use crate::view::AsView;
use fulgurite_core::mask::{DOCUMENTS_K, DOCUMENTS_Q, PREFIX_LENGTHS};
use fulgurite_core::problem::{ALIBI_SLOPES, BIAS};
use fulgurite_core::{
    BlockMask, Exp, Expr, Forward, Gradients, Inputs, Mask, Precision, Problem, ProblemBuilder, Saved, TensorView,
};

/// Attention of `q` over `k` and `v`, each `[batch, sequence, heads, head_dim]`, or `[total, heads, head_dim]`
/// with [`Attention::cu_seqlens`].
///
/// The builder methods describe the computation; [`Attention::forward`] runs it. Nothing is checked before that.
///
/// ```
/// use fulgurite::{Tensor, attention};
///
/// let q = Tensor::new(vec![0.1f32; 64], &[1, 4, 2, 8])?;
/// let k = Tensor::new(vec![0.2f32; 32], &[1, 4, 1, 8])?; // two query heads share this head
/// let call = attention(&q, &k, &k).causal().softcap(30.0);
/// let forward = call.forward()?;
/// let gradients = call.backward(&forward.saved(q.view()))?;
/// assert_eq!(gradients.d_k.shape(), k.shape());
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn attention<'a>(
    q: &'a (impl AsView + ?Sized),
    k: &'a (impl AsView + ?Sized),
    v: &'a (impl AsView + ?Sized),
) -> Attention<'a> {
    let views = || -> Result<_, Error> { Ok(Inputs::new(q.as_view()?, k.as_view()?, v.as_view()?)) };
    Attention {
        inputs: views(),
        builder: Problem::builder(),
        bias: None,
        choice: Choice::Best,
        settings: Settings::default(),
    }
}

/// A call of [`attention`] under construction.
#[derive(Debug, Clone)]
#[must_use = "nothing is computed before `forward`"]
pub struct Attention<'a> {
    /// The inputs, or the first error, which is kept until the call runs.
    inputs: Result<Inputs<'a>, Error>,
    builder: ProblemBuilder,
    bias: Option<(TensorView<'a>, bool)>,
    pub(crate) choice: Choice,
    pub(crate) settings: Settings,
}

impl<'a> Attention<'a> {
    /// Views `tensor` and passes it to `set`, unless an earlier step failed.
    fn with(mut self, tensor: &'a (impl AsView + ?Sized), set: impl FnOnce(&mut Inputs<'a>, TensorView<'a>)) -> Self {
        if let Ok(inputs) = &mut self.inputs {
            match tensor.as_view() {
                Ok(view) => set(inputs, view),
                Err(e) => self.inputs = Err(e.into()),
            }
        }
        self
    }

    fn build(mut self, step: impl FnOnce(ProblemBuilder) -> ProblemBuilder) -> Self {
        self.builder = step(self.builder);
        self
    }

    /// A query sees keys up to its own position, aligned to the end: the last query sees all keys.
    pub fn causal(self) -> Self {
        self.mask(Mask::causal())
    }

    /// A query sees `left` keys before and `right` keys after its own position; `None` means no limit on that side.
    pub fn window(self, left: impl Into<Option<i64>>, right: impl Into<Option<i64>>) -> Self {
        self.mask(Mask::window(left, right))
    }

    /// A query sees only keys that `mask` keeps. If several masks are given, all must keep a key.
    pub fn mask(self, mask: Mask) -> Self {
        self.build(|b| b.mask(mask))
    }

    /// Prefix-LM: the first `lengths[batch]` keys (i32) are visible to all, the others causally.
    pub fn prefix(self, lengths: &'a (impl AsView + ?Sized)) -> Self {
        self.mask(Mask::prefix()).with(lengths, |inputs, view| inputs.aux.push((PREFIX_LENGTHS, view)))
    }

    /// Queries see only keys of their own document: i32, `[batch, q_len]` and `[batch, k_len]`.
    pub fn documents(self, q: &'a (impl AsView + ?Sized), k: &'a (impl AsView + ?Sized)) -> Self {
        self.mask(Mask::documents())
            .with(q, |inputs, view| inputs.aux.push((DOCUMENTS_Q, view)))
            .with(k, |inputs, view| inputs.aux.push((DOCUMENTS_K, view)))
    }

    /// Restricts attention to the blocks in these lists. In partial blocks, the mask decides for each key.
    pub fn block_mask(mut self, blocks: &'a BlockMask) -> Self {
        if let Ok(inputs) = &mut self.inputs {
            inputs.block_mask = Some(blocks);
        }
        self.build(|b| b.block_mask(blocks.spec()))
    }

    /// Factor of q . k; the default is 1/sqrt(head_dim).
    pub fn scale(self, scale: f32) -> Self {
        self.build(|b| b.scale(scale))
    }

    /// Applies cap * tanh(score / cap), before every other modifier.
    pub fn softcap(self, cap: f32) -> Self {
        self.build(|b| b.softcap(cap))
    }

    /// Subtracts slope times distance, after the softcap: f32, `[heads]`.
    pub fn alibi(self, slopes: &'a (impl AsView + ?Sized)) -> Self {
        self.build(ProblemBuilder::alibi).with(slopes, |inputs, view| inputs.aux.push((ALIBI_SLOPES, view)))
    }

    /// Adds `[batch, heads, q_len, k_len]` to the scores, after ALiBi; an axis of size 1 is broadcast.
    pub fn bias(mut self, bias: &'a (impl AsView + ?Sized)) -> Self {
        let mut seen = None;
        self = self.with(bias, |_, view| seen = Some(view));
        self.bias = seen.map(|view| (view, false));
        self
    }

    /// Like [`bias`](Self::bias), and backward computes its gradient.
    pub fn bias_with_grad(self, bias: &'a (impl AsView + ?Sized)) -> Self {
        let mut call = self.bias(bias);
        call.bias = call.bias.map(|(view, _)| (view, true));
        call
    }

    /// Adds your own score modifier, after the built-in ones.
    ///
    /// ```
    /// use fulgurite::{Tensor, attention, expr};
    /// let x = Tensor::new(vec![0.1f32; 32], &[1, 4, 1, 8])?;
    /// let decay = expr::score() - 0.5 * (expr::q() - expr::k()).abs().to_float();
    /// attention(&x, &x, &x).score_mod(decay).forward()?;
    /// # Ok::<(), fulgurite::Error>(())
    /// ```
    pub fn score_mod(self, modifier: Expr) -> Self {
        self.build(|b| b.score_mod(modifier))
    }

    /// Adds a tensor that modifiers and masks read by this name.
    pub fn aux(self, name: &'a str, tensor: &'a (impl AsView + ?Sized)) -> Self {
        self.declare(name, tensor, false)
    }

    /// Like [`aux`](Self::aux), and backward computes its gradient.
    pub fn aux_with_grad(self, name: &'a str, tensor: &'a (impl AsView + ?Sized)) -> Self {
        self.declare(name, tensor, true)
    }

    fn declare(self, name: &'a str, tensor: &'a (impl AsView + ?Sized), grad: bool) -> Self {
        let mut seen = None;
        let call = self.with(tensor, |inputs, view| {
            inputs.aux.push((name, view));
            seen = Some(view);
        });
        let Some(view) = seen else { return call };
        call.build(|b| {
            if grad {
                b.aux_with_grad(name, view.dtype(), view.shape())
            } else {
                b.aux(name, view.dtype(), view.shape())
            }
        })
    }

    /// Adds one learnable logit per query head to the denominator: `[heads]`.
    pub fn sinks(self, sinks: &'a (impl AsView + ?Sized)) -> Self {
        self.build(ProblemBuilder::sinks).with(sinks, |inputs, view| inputs.sinks = Some(view))
    }

    /// Packs sequences back to back instead of in a batch: i32, `[batch + 1]` each, cumulative offsets.
    ///
    /// ```
    /// use fulgurite::{Tensor, attention};
    /// let x = Tensor::new(vec![0.1f32; 40], &[5, 1, 8])?;
    /// let cu_seqlens = Tensor::new(vec![0, 2, 5], &[3])?;
    /// let result = attention(&x, &x, &x).cu_seqlens(&cu_seqlens, &cu_seqlens).causal().forward()?;
    /// assert_eq!(result.lse.shape()[..], [1, 5]);
    /// # Ok::<(), fulgurite::Error>(())
    /// ```
    pub fn cu_seqlens(self, q: &'a (impl AsView + ?Sized), k: &'a (impl AsView + ?Sized)) -> Self {
        self.with(q, |inputs, view| inputs.cu_seqlens_q = Some(view))
            .with(k, |inputs, view| inputs.cu_seqlens_k = Some(view))
    }

    /// Number of queries in use in each sequence: i32, `[batch]`. The rows after them give zeros.
    pub fn used_q(self, lengths: &'a (impl AsView + ?Sized)) -> Self {
        self.with(lengths, |inputs, view| inputs.used_q = Some(view))
    }

    /// Number of keys in use in each sequence: i32, `[batch]`. The keys after them are invisible.
    pub fn used_k(self, lengths: &'a (impl AsView + ?Sized)) -> Self {
        self.with(lengths, |inputs, view| inputs.used_k = Some(view))
    }

    /// Sets the exponential.
    pub fn exp(self, exp: Exp) -> Self {
        self.build(|b| b.exp(exp))
    }

    /// Sets the number format of the products; the default is that of the tensors.
    pub fn precision(self, precision: Precision) -> Self {
        self.build(|b| b.precision(precision))
    }

    /// Sets the engine; the default is [`Choice::Best`], the CPU. [`Choice::Cuda`] copies the tensors to the GPU and back;
    /// [`gpu::Session`](crate::gpu::Session) takes tensors that are there.
    pub fn engine(mut self, choice: Choice) -> Self {
        self.choice = choice;
        self
    }

    /// Sets threads, rescale policy, order of gradients and profile.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// The problem that the shapes and options describe.
    ///
    /// ```
    /// use fulgurite::{Tensor, attention};
    /// let q = Tensor::new(vec![0.0f32; 64], &[1, 4, 2, 8])?;
    /// let k = Tensor::new(vec![0.0f32; 48], &[1, 6, 1, 8])?;
    /// let problem = attention(&q, &k, &k).problem()?;
    /// assert_eq!((problem.q_heads(), problem.kv_heads(), problem.max_k_len()), (2, 1, 6));
    /// # Ok::<(), fulgurite::Error>(())
    /// ```
    pub fn problem(&self) -> Result<Problem, Error> {
        Ok(self.description()?.build()?)
    }

    /// The problem builder that the shapes complete, to build or to change further.
    pub fn description(&self) -> Result<ProblemBuilder, Error> {
        let inputs = self.inputs.as_ref().map_err(Clone::clone)?;
        let packed = inputs.cu_seqlens_q.is_some();
        let rank = |arg: &'static str, view: &TensorView<'_>| {
            let (allowed, hint) = if packed {
                ("[total, heads, head_dim]", "with cu_seqlens, sequences lie one after the other")
            } else {
                ("[batch, sequence, heads, head_dim]", "add the missing axes, or give cu_seqlens")
            };
            let fits = view.shape().len() == if packed { 3 } else { 4 };
            if fits { Ok(()) } else { Err(Error::Rank { arg, got: view.shape().to_vec(), allowed, hint }) }
        };
        rank("q", &inputs.q)?;
        rank("k", &inputs.k)?;
        rank("v", &inputs.v)?;
        let (q, k, v) = (inputs.q.shape(), inputs.k.shape(), inputs.v.shape());
        let axes = q.len();
        let mut builder = self.builder.clone();
        builder = match (&inputs.cu_seqlens_q, &inputs.cu_seqlens_k) {
            // Values that are not lists of integers are rejected when the inputs are bound.
            (Some(cu_q), Some(cu_k)) => builder.packed(&integers(cu_q), &integers(cu_k)),
            _ => builder.dense(q[0], q[1], k[1]),
        };
        if let Some((view, grad)) = &self.bias {
            let Ok(shape) = <[usize; 4]>::try_from(&view.shape()[..]) else {
                let (got, hint) = (view.shape().to_vec(), "an axis may have size 1, it is repeated");
                return Err(Error::Rank { arg: "bias", got, allowed: "[batch, heads, q_len, k_len]", hint });
            };
            builder = builder.bias(shape, view.dtype(), *grad);
        }
        Ok(builder
            .heads(q[axes - 2], k[axes - 2])
            .head_dims(q[axes - 1], v[axes - 1])
            .dtype(inputs.q.dtype())
            .used_lengths(inputs.used_q.is_some(), inputs.used_k.is_some()))
    }

    /// The tensors of the call.
    pub fn inputs(&self) -> Result<Inputs<'a>, Error> {
        let mut inputs = self.inputs.clone()?;
        if let Some((view, _)) = &self.bias {
            inputs.aux.push((BIAS, *view));
        }
        Ok(inputs)
    }

    /// Computes the output and the log of the softmax denominator.
    pub fn forward(&self) -> Result<Forward, Error> {
        let engine = engine_with(self.choice, &self.settings)?;
        engine.forward(&self.problem()?, &self.inputs()?, &Run::default())
    }

    /// Computes the gradients. [`Forward::saved`] prepares its input from the result of [`forward`](Self::forward).
    pub fn backward(&self, saved: &Saved<'_>) -> Result<Gradients, Error> {
        let engine = engine_with(self.choice, &self.settings)?;
        engine.backward(&self.problem()?, &self.inputs()?, saved, &Run::default())
    }
}

pub(crate) fn integers(view: &TensorView<'_>) -> Vec<i32> {
    view.to_f64().into_iter().map(|x| x as i32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::{DType, Tensor};

    fn tensor(shape: &[usize]) -> Tensor {
        Tensor::zeros(DType::F32, shape).unwrap()
    }

    fn refused(call: Attention<'_>) -> String {
        call.forward().expect_err("must be refused").to_string()
    }

    #[test]
    fn bad_calls_say_what_is_allowed() {
        let (q, k) = (tensor(&[1, 4, 2, 8]), tensor(&[1, 4, 2, 4]));
        assert_eq!(
            refused(attention(&q, &k, &q)),
            "`k` has shape [1, 4, 2, 4], allowed: [1, 4, 2, 8]; check the sizes given to the problem"
        );
        let flat = tensor(&[4, 2, 8]);
        assert_eq!(
            refused(attention(&flat, &q, &q)),
            "`q` has shape [4, 2, 8], allowed: [batch, sequence, heads, head_dim]; add the missing axes, or give cu_seqlens"
        );
        let cu = Tensor::new(vec![0, 4], &[2]).unwrap();
        assert_eq!(
            refused(attention(&flat, &flat, &q).cu_seqlens(&cu, &cu)),
            "`v` has shape [1, 4, 2, 8], allowed: [total, heads, head_dim]; with cu_seqlens, sequences lie one after the other"
        );
        let short = Tensor::new(vec![0, 3], &[2]).unwrap();
        assert_eq!(
            refused(attention(&flat, &flat, &flat).cu_seqlens(&short, &cu)),
            "`q` has shape [4, 2, 8], allowed: [3, 2, 8]; check the sizes given to the problem"
        );
        let floats = Tensor::new(vec![0.0f32, 4.0], &[2]).unwrap();
        assert_eq!(
            refused(attention(&flat, &flat, &flat).cu_seqlens(&floats, &cu)),
            "`cu_seqlens_q` is f32, allowed: i32; convert it or change the problem"
        );
        assert_eq!(
            refused(attention(&q, &q, &q).bias(&flat)),
            "`bias` has shape [4, 2, 8], allowed: [batch, heads, q_len, k_len]; an axis may have size 1, it is repeated"
        );
        assert_eq!(
            refused(attention(&q, &q, &q).scale(f32::NAN)),
            "`scale` is NaN, allowed: finite and above 0; leave it out for 1/sqrt(head_dim)"
        );
        let integers = Tensor::zeros(DType::I32, &[1, 4, 2, 8]).unwrap();
        assert_eq!(
            refused(attention(&integers, &integers, &integers)),
            "`dtype` is i32, allowed: f32, f16, bf16; convert q, k and v"
        );
    }

    #[test]
    fn nothing_in_nothing_out() {
        let (q, k) = (tensor(&[0, 4, 2, 8]), tensor(&[0, 0, 1, 8]));
        let result = attention(&q, &k, &k).causal().forward().unwrap();
        assert_eq!(result.o.shape()[..], [0, 4, 2, 8]);
    }

    #[test]
    fn the_problem_carries_what_was_said() {
        let (q, k, v) = (tensor(&[2, 4, 4, 8]), tensor(&[2, 6, 2, 8]), tensor(&[2, 6, 2, 3]));
        let (slopes, sinks, bias) = (tensor(&[4]), tensor(&[4]), tensor(&[1, 4, 1, 6]));
        let used = Tensor::new(vec![6, 2], &[2]).unwrap();
        let call =
            attention(&q, &k, &v).window(2, None).alibi(&slopes).sinks(&sinks).bias_with_grad(&bias).used_k(&used);
        let problem = call.problem().unwrap();
        assert_eq!(problem.o_shape(), [2, 4, 4, 3]);
        assert!(problem.has_sinks() && problem.has_used_k() && !problem.has_used_q());
        assert_eq!(
            problem.aux().iter().map(|a| (&*a.name, a.grad)).collect::<Vec<_>>(),
            [("alibi_slopes", false), ("bias", true)]
        );
        call.inputs().unwrap().check(&problem).unwrap();
    }
}
