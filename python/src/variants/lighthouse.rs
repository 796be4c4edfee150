//! Lighthouse: `lighthouse;levels N;pool N;budget N;tile N;engine NAME;threads N`. The tensors are q, k and v.
//!
//! Backward selects again, so that nothing but the tensors is kept between the two.

use super::{Engine, Operator, Wanted, copy_into, entries, tensor, unknown};
use crate::array::{Array, Claims, refuse, wrong};
use fulgurite::variants::{LighthouseCall, lighthouse};
use fulgurite::{Choice, Settings, TensorView};
use fulgurite_core::compare::Verdict;
use fulgurite_core::lighthouse::{Entry, check};
use pyo3::prelude::*;

/// A parsed description.
pub struct Lighthouse {
    levels: Option<usize>,
    pool: Option<usize>,
    budget: Option<usize>,
    tile: Option<usize>,
    engine: Engine,
}

impl Lighthouse {
    /// Parses the text.
    pub fn parse(text: &str) -> Result<Lighthouse, String> {
        let (mut levels, mut pool, mut budget, mut tile) = (None, None, None, None);
        let (mut choice, mut settings) = (Choice::Best, Settings::default());
        for (key, words) in entries(text) {
            let [word] = words[..] else {
                match key {
                    "lighthouse" => continue,
                    _ => return Err(unknown(key, &words)),
                }
            };
            // A negative number is as wrong as 0, and gets the same message.
            let number = || match word.parse::<i64>() {
                Ok(n) => Ok(n.max(0) as usize),
                Err(e) => Err(format!("`{key}` is {word:?}: {e}")),
            };
            match key {
                "levels" => levels = Some(number()?),
                "pool" => pool = Some(number()?),
                "budget" => budget = Some(number()?),
                "tile" => tile = Some(number()?),
                "threads" => settings = settings.threads(number()?),
                "engine" => choice = word.parse().map_err(|e: fulgurite::ChoiceError| e.to_string())?,
                _ => return Err(unknown(key, &words)),
            }
        }
        let engine = Engine::new(choice, &settings, "lighthouse")?;
        Ok(Lighthouse { levels, pool, budget, tile, engine })
    }

    fn call<'a>(&self, [q, k, v]: [&'a TensorView<'a>; 3]) -> LighthouseCall<'a> {
        let mut call = lighthouse(q, k, v).engine(self.engine.choice).settings(self.engine.settings.clone());
        if let Some(levels) = self.levels {
            call = call.levels(levels);
        }
        if let Some(pool) = self.pool {
            call = call.pool(pool);
        }
        if let Some(budget) = self.budget {
            call = call.budget(budget);
        }
        if let Some(tile) = self.tile {
            call = call.tile(tile);
        }
        call
    }
}

fn views<'a>(arrays: &'a [Array], claims: &mut Claims<'a>) -> PyResult<[TensorView<'a>; 3]> {
    Ok([arrays[0].view("q", claims)?, arrays[1].view("k", claims)?, arrays[2].view("v", claims)?])
}

/// The lengths of the rows of a head, as the definition of the selection has them.
fn norms(view: &TensorView<'_>, batch: usize, head: usize) -> Vec<f32> {
    let [_, tokens, _, dim] = view.shape()[..] else { unreachable!("bug in fulgurite: the rank was checked") };
    let squares = |t: usize| (0..dim).map(|c| view.get(&[batch, t, head, c]).powi(2)).sum::<f64>();
    (0..tokens).map(|t| squares(t).sqrt() as f32).collect()
}

impl Operator for Lighthouse {
    fn names(&self) -> Vec<&str> {
        vec!["q", "k", "v"]
    }

    fn outputs(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let mut claims = Claims::default();
        let [q, k, v] = views(arrays, &mut claims)?;
        let problem = self.call([&q, &k, &v]).problem().map_err(refuse)?;
        Ok(vec![Wanted::own("o", problem.o_shape())])
    }

    fn forward(&self, arrays: &[Array], outputs: &[Array]) -> PyResult<()> {
        let mut claims = Claims::default();
        let [q, k, v] = views(arrays, &mut claims)?;
        let found = self.call([&q, &k, &v]).forward().map_err(refuse)?;
        copy_into(&found.o, &mut outputs[0].view_mut("o", &mut claims)?)
    }

    fn gradients(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>> {
        let named = ["d_q", "d_k", "d_v"].into_iter().zip(arrays);
        Ok(named.map(|(name, array)| Wanted::own(name, array.shape().to_vec())).collect())
    }

    fn backward(
        &self,
        arrays: &[Array],
        _outputs: &[Array],
        d_outputs: &[Option<Array>],
        gradients: &[Array],
    ) -> PyResult<()> {
        let Some(Some(d_o)) = d_outputs.first() else { return Err(wrong("`d_o` is missing")) };
        let mut claims = Claims::default();
        let [q, k, v] = views(arrays, &mut claims)?;
        let d_o = d_o.view("d_o", &mut claims)?;
        let call = self.call([&q, &k, &v]);
        let found = call.forward().and_then(|forward| call.backward(&forward, &d_o)).map_err(refuse)?;
        for ((name, from), to) in [("d_q", found.d_q), ("d_k", found.d_k), ("d_v", found.d_v)].iter().zip(gradients) {
            copy_into(from, &mut to.view_mut(name, &mut claims)?)?;
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
        let [q, k, v] = views(arrays, &mut claims)?;
        let problem = self.call([&q, &k, &v]).problem().map_err(refuse)?;
        problem.check(&q, &k, &v).map_err(|e| refuse(e.into()))?;
        let [batch, _, heads, kv_heads] = problem.sizes();
        let select = |b: usize, h: usize| -> Vec<Entry> {
            problem.select(&norms(&q, b, h), &norms(&k, b, h / (heads / kv_heads)))
        };
        let entries: Vec<_> = (0..batch * heads).map(|i| select(i / heads, i % heads)).collect();
        let own = [q.to_tensor(), k.to_tensor(), v.to_tensor()];
        let zeros = || fulgurite::Tensor::zeros(problem.element(), &problem.o_shape()).map_err(|e| refuse(e.into()));
        let o = match outputs.first() {
            Some(o) => tensor("o", o)?,
            None => zeros()?,
        };
        let given = match gradients {
            Some(([Some(d_o), ..], [d_q, d_k, d_v])) => {
                let found = [tensor("d_q", d_q)?, tensor("d_k", d_k)?, tensor("d_v", d_v)?];
                Some((tensor("d_o", d_o)?, found))
            }
            Some(_) => return Err(wrong("a gradient is missing")),
            None => None,
        };
        let view = given.as_ref().map(|(d_o, found)| (d_o, found.each_ref()));
        let judged = check(&problem, &entries, own.each_ref(), &o, view);
        // Backward does not get the output of forward.
        Ok(judged.into_iter().filter(|(name, _)| name != "o" || !outputs.is_empty()).collect())
    }
}
