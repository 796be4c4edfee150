//! The f64 definition as an engine.

use crate::Error;
use crate::engine::{Engine, Run, Unsupported};
use fulgurite_core::{GradientOutputs, Inputs, Outputs, Problem, Saved};
use fulgurite_core::{oracle, stop};

/// The f64 definition of attention as an engine: exact, simple and slow.
///
/// ```
/// use fulgurite::{Choice, Tensor, attention};
/// let x = Tensor::new(vec![1.0f32; 4], &[1, 2, 1, 2])?;
/// let result = attention(&x, &x, &x).engine(Choice::Oracle).forward()?;
/// assert_eq!(result.o.view().to_f64(), [1.0; 4]);
/// # Ok::<(), fulgurite::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Oracle;

impl Engine for Oracle {
    fn name(&self) -> &str {
        "oracle"
    }

    fn describe(&self) -> String {
        "oracle, the f64 definition, 1 thread".into()
    }

    fn supports(&self, _problem: &Problem) -> Result<(), Unsupported> {
        Ok(())
    }

    fn forward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        _run: &Run<'_>,
    ) -> Result<(), Error> {
        let bound = inputs.bind(problem)?;
        outputs.check(problem)?;
        let answer = stop::catch_memory(|| oracle::forward(&bound))?;
        outputs.o.write_f64(&answer.o);
        outputs.lse.write_f64(&answer.lse);
        Ok(())
    }

    fn backward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        _run: &Run<'_>,
    ) -> Result<(), Error> {
        let bound = inputs.bind(problem)?;
        saved.check(problem)?;
        gradients.check(problem)?;
        let answer = stop::catch_memory(|| oracle::backward(&bound, &saved.d_o, saved.d_lse.as_ref()))?;
        gradients.d_q.write_f64(&answer.d_q);
        gradients.d_k.write_f64(&answer.d_k);
        gradients.d_v.write_f64(&answer.d_v);
        let sinks = gradients.d_sinks.iter_mut().zip(&answer.d_sinks);
        sinks.for_each(|(to, from)| to.write_f64(from));
        for (to, from) in gradients.d_aux.iter_mut().zip(&answer.d_aux) {
            if let (Some(to), Some(from)) = (to, from) {
                to.write_f64(from);
            }
        }
        Ok(())
    }
}
