//! Symbolic derivatives of expressions, so that backward needs no second function from the user.

use super::{Binary, Expr, Node, Unary, Var, select};

impl Expr {
    /// The derivative with respect to the score.
    ///
    /// ```
    /// # use fulgurite_core::expr::score;
    /// let softcap = 30.0 * (score() / 30.0).tanh();
    /// assert_eq!(
    ///     softcap.derivative().to_string(),
    ///     "(30.0 * ((1.0 - (tanh((score / 30.0)) * tanh((score / 30.0)))) * (1.0 / 30.0)))"
    /// );
    /// ```
    pub fn derivative(&self) -> Expr {
        self.diff(&|node| matches!(node, Node::Var(Var::Score)))
    }

    /// Every element of an auxiliary tensor that this expression reads, with the derivative with respect to it.
    pub(crate) fn load_derivatives(&self, name: &str) -> Vec<(Vec<Expr>, Expr)> {
        let mut loads: Vec<Expr> = Vec::new();
        self.walk(&mut |e| {
            if matches!(&*e.0, Node::Load { name: n, .. } if &**n == name) && !loads.contains(e) {
                loads.push(e.clone());
            }
        });
        let of = |load: Expr| {
            let derivative = self.diff(&|node| *node == *load.0);
            match &*load.0 {
                Node::Load { at, .. } => (at.clone(), derivative),
                _ => unreachable!("only loads were collected"),
            }
        };
        loads.into_iter().map(of).collect()
    }

    /// Derivative with respect to the nodes that `is_variable` selects. Integers and booleans are constants.
    fn diff(&self, is_variable: &dyn Fn(&Node) -> bool) -> Expr {
        if is_variable(&self.0) {
            return Expr::from(1.0);
        }
        match &*self.0 {
            Node::Var(_) | Node::Float(_) | Node::Int(_) | Node::Bool(_) | Node::Load { .. } => zero(),
            Node::TooLarge => self.clone(),
            Node::Unary(op, a) => {
                let da = a.diff(is_variable);
                if is(&da, 0.0) {
                    return zero();
                }
                match op {
                    Unary::Neg => times(Expr::from(-1.0), da),
                    Unary::Abs => {
                        let sign = select(a.clone().less(0.0), -1.0, select(a.clone().more(0.0), 1.0, 0.0));
                        times(sign, da)
                    }
                    Unary::Exp => times(self.clone(), da),
                    Unary::Log => over(da, a.clone()),
                    Unary::Sqrt => over(da, 2.0 * self.clone()),
                    Unary::Tanh => times(1.0 - self.clone() * self.clone(), da),
                    // Constant almost everywhere.
                    Unary::Not | Unary::Floor => zero(),
                    Unary::ToFloat => da,
                }
            }
            Node::Binary(op, a, b) => {
                let (da, db) = (a.diff(is_variable), b.diff(is_variable));
                if is(&da, 0.0) && is(&db, 0.0) {
                    return zero();
                }
                match op {
                    Binary::Add => plus(da, db),
                    Binary::Sub => plus(da, times(Expr::from(-1.0), db)),
                    Binary::Mul => plus(times(a.clone(), db), times(b.clone(), da)),
                    Binary::Div => {
                        // d(a / b) = da / b - (a / b) db / b
                        let second = times(times(Expr::from(-1.0), over(self.clone(), b.clone())), db);
                        plus(over(da, b.clone()), second)
                    }
                    Binary::Min => select(a.clone().at_most(b.clone()), da, db),
                    Binary::Max => select(a.clone().at_least(b.clone()), da, db),
                    Binary::Rem | Binary::Eq | Binary::Lt | Binary::Le | Binary::And | Binary::Or => zero(),
                }
            }
            Node::Select(c, a, b) => {
                let (da, db) = (a.diff(is_variable), b.diff(is_variable));
                if da == db { da } else { select(c.clone(), da, db) }
            }
        }
    }
}

fn zero() -> Expr {
    Expr::from(0.0)
}

fn is(e: &Expr, x: f32) -> bool {
    matches!(*e.0, Node::Float(y) if y == x)
}

fn plus(a: Expr, b: Expr) -> Expr {
    if is(&a, 0.0) {
        b
    } else if is(&b, 0.0) {
        a
    } else {
        a + b
    }
}

fn times(a: Expr, b: Expr) -> Expr {
    if is(&a, 0.0) || is(&b, 0.0) {
        zero()
    } else if is(&a, 1.0) {
        b
    } else if is(&b, 1.0) {
        a
    } else {
        a * b
    }
}

fn over(a: Expr, b: Expr) -> Expr {
    if is(&a, 0.0) { zero() } else { a / b }
}

#[cfg(test)]
mod tests {
    use super::super::{AuxSpec, Env, Program, Type, head, k, load, q, score, select};
    use super::*;
    use crate::{DType, TensorView};

    fn at(e: &Expr, aux: &[AuxSpec], views: &[TensorView<'_>], score: f64) -> f64 {
        let program = Program::compile(e, aux, Type::Float).unwrap();
        program.eval(&Env { score, batch: 0, head: 1, q: 2, k: 3, q_len: 4, k_len: 5, aux: views }).float()
    }

    #[test]
    fn derivatives_match_differences() {
        let slopes = [0.5f32, 0.25];
        let aux = [AuxSpec { name: "slope".into(), dtype: DType::F32, shape: vec![2], grad: true }];
        let views = [TensorView::new(&slopes[..], &[2]).unwrap()];
        let s = score;
        let expressions = [
            20.0 * (s() / 20.0).tanh(),
            s() - load("slope", [head()]) * (q() - k()).abs(),
            (s() * s() + 1.0).sqrt() / (s().abs() + 2.0),
            (s().min(0.7) * 0.3).exp() - (s() * s() + 3.0).log(),
            select(k().less(4), s().max(-0.2), 2.0 * s()),
            (-s()).max(s() * load("slope", [head()])),
        ];
        let h = 1e-5;
        for e in &expressions {
            for x in [-1.3, -0.4, 0.3, 0.9] {
                let differences = (at(e, &aux, &views, x + h) - at(e, &aux, &views, x - h)) / (2.0 * h);
                let derived = at(&e.derivative(), &aux, &views, x);
                assert!((differences - derived).abs() <= 1e-6, "{e} at {x}: {derived}, differences {differences}");
            }
        }
    }

    #[test]
    fn kinks_are_as_published() {
        assert_eq!(at(&score().abs().derivative(), &[], &[], 0.0), 0.0);
        assert_eq!(at(&(2.0 * score()).min(3.0 * score()).derivative(), &[], &[], 0.0), 2.0);
        assert_eq!(at(&(2.0 * score()).max(3.0 * score()).derivative(), &[], &[], 0.0), 2.0);
    }

    #[test]
    fn every_load_has_its_derivative() {
        let e = score() * load("w", [q()]) + load("w", [k()]);
        let loads = e.load_derivatives("w");
        assert_eq!(loads.len(), 2);
        assert_eq!((loads[0].0[0].to_string(), loads[0].1.to_string()), ("q".into(), "score".into()));
        assert_eq!((loads[1].0[0].to_string(), loads[1].1.to_string()), ("k".into(), "1.0".into()));
    }
}
