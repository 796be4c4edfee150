//! Parallax: `parallax;` and then the description of an attention call (see `description`). The tensors are q, k, v, the
//! probe r, and those that the description names.

use super::{Engine, Operator, Wanted, copy_into, tensor};
use crate::array::{Array, Claims, refuse, wrong};
use crate::description::{Description, Role};
use crate::dispatch::inputs_of;
use fulgurite::variants::{
    Parallax as Problem, ParallaxForward, ParallaxGradients, parallax_backward, parallax_forward,
};
use fulgurite::{Forward, Outputs, Tensor};
use fulgurite_core::compare::Verdict;
use fulgurite_core::parallax::{ParallaxOutputs, check};
use pyo3::prelude::*;

/// A parsed description.
pub struct Parallax {
    description: Description,
    engine: Engine,
}

impl Parallax {
    /// Parses the text after the first entry.
    pub fn parse(text: &str) -> Result<Parallax, String> {
        let description = Description::parse(text)?;
        let engine = Engine::new(description.choice, &description.settings, "parallax")?;
        Ok(Parallax { description, engine })
    }

    fn problem(&self, arrays: &[Array]) -> PyResult<Problem> {
        let problem = self.description.problem([&arrays[0], &arrays[1], &arrays[2]], &arrays[4..])?;
        Problem::new((*problem).clone()).map_err(|e| refuse(e.into()))
    }

    /// Calls `run` with the bound tensors.
    fn bound<'a, T>(
        &'a self,
        problem: &'a Problem,
        arrays: &'a [Array],
        claims: &mut Claims<'a>,
        run: impl FnOnce(&fulgurite_core::parallax::ParallaxBound<'a>, &mut Claims<'a>) -> PyResult<T>,
    ) -> PyResult<T> {
        let [q, k, v, r, extras @ ..] = arrays else { unreachable!("bug in fulgurite: the number was checked") };
        let inputs = inputs_of(&self.description, [q, k, v], extras, None, claims)?;
        let r = r.view("r", claims)?;
        let bound = problem.bind(&inputs, r).map_err(|e| refuse(e.into()))?;
        run(&bound, claims)
    }
}

/// The results of forward as the tensors that backward and the oracle's check read.
fn saved(outputs: &[Array]) -> PyResult<ParallaxForward> {
    let [o, lse, mean] = outputs else { return Err(wrong("`outputs` are not o, lse and mean")) };
    let own = Forward { o: tensor("o", o)?, lse: tensor("lse", lse)? };
    Ok(ParallaxForward { own, mean: tensor("mean", mean)? })
}

impl Operator for Parallax {
    fn names(&self) -> Vec<&str> {
        ["q", "k", "v", "r"].into_iter().chain(self.description.roles.iter().map(Role::name)).collect()
    }

    fn outputs(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let problem = self.problem(arrays)?;
        let problem = problem.problem();
        Ok(vec![
            Wanted::own("o", problem.o_shape()),
            Wanted::f32("lse", problem.lse_shape()),
            Wanted::f32("mean", problem.lse_shape()),
        ])
    }

    fn forward(&self, arrays: &[Array], outputs: &[Array]) -> PyResult<()> {
        let (problem, mut claims) = (self.problem(arrays)?, Claims::default());
        let options = self.engine.options()?;
        self.bound(&problem, arrays, &mut claims, |bound, claims| {
            let own = Outputs { o: outputs[0].view_mut("o", claims)?, lse: outputs[1].view_mut("lse", claims)? };
            let mut outputs = ParallaxOutputs { own, mean: outputs[2].view_mut("mean", claims)? };
            outputs.check(&problem).map_err(|e| refuse(e.into()))?;
            parallax_forward(bound, &mut outputs, &options);
            Ok(())
        })
    }

    fn gradients(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let named = ["d_q", "d_k", "d_v", "d_r"].into_iter().zip(arrays);
        Ok(named.map(|(name, array)| Wanted::own(name, array.shape().to_vec())).collect())
    }

    fn backward(
        &self,
        arrays: &[Array],
        outputs: &[Array],
        d_outputs: &[Option<Array>],
        gradients: &[Array],
    ) -> PyResult<()> {
        let (problem, mut claims) = (self.problem(arrays)?, Claims::default());
        let (options, forward) = (self.engine.options()?, saved(outputs)?);
        let Some(Some(d_o)) = d_outputs.first() else { return Err(wrong("`d_o` is missing")) };
        self.bound(&problem, arrays, &mut claims, |bound, claims| {
            let d_o = d_o.view("d_o", claims)?;
            forward.own.saved(d_o).check(problem.problem()).map_err(|e| refuse(e.into()))?;
            let shape = problem.problem().lse_shape();
            fulgurite_core::inputs::check_like("mean", &forward.mean.view(), &shape, fulgurite::DType::F32)
                .map_err(|e| refuse(e.into()))?;
            let mut found = ParallaxGradients::zeros(&problem).map_err(|e| refuse(e.into()))?;
            parallax_backward(bound, &forward, &d_o, &mut found, &options);
            let found = [("d_q", found.d_q), ("d_k", found.d_k), ("d_v", found.d_v), ("d_r", found.d_r)];
            for ((name, from), to) in found.iter().zip(gradients) {
                copy_into(from, &mut to.view_mut(name, claims)?)?;
            }
            Ok(())
        })
    }

    fn judge(
        &self,
        arrays: &[Array],
        outputs: &[Array],
        gradients: Option<(&[Option<Array>], &[Array])>,
    ) -> PyResult<Vec<(String, Verdict)>> {
        let (problem, mut claims) = (self.problem(arrays)?, Claims::default());
        let forward = saved(outputs)?;
        let given = match gradients {
            None => None,
            Some((d_outputs, found)) => {
                let Some(Some(d_o)) = d_outputs.first() else { return Err(wrong("`d_o` is missing")) };
                let [d_q, d_k, d_v, d_r] = found else { return Err(wrong("a gradient is missing")) };
                let own = |array: &Array| -> PyResult<Tensor> { tensor("gradient", array) };
                let found = ParallaxGradients { d_q: own(d_q)?, d_k: own(d_k)?, d_v: own(d_v)?, d_r: own(d_r)? };
                Some((tensor("d_o", d_o)?, found))
            }
        };
        self.bound(&problem, arrays, &mut claims, |bound, _| {
            let view = given.as_ref().map(|(d_o, found)| (d_o.view(), found));
            Ok(check(bound, &forward, view.as_ref().map(|(d_o, found)| (d_o, *found))))
        })
    }
}
