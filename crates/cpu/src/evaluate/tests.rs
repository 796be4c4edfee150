//! Random programs of every kind of step against their definition, element by element, on every instruction set.

use super::*;
use crate::Isa;
use crate::simd::kernels;
use fulgurite_core::expr::{AuxSpec, Env, Expr, Program, Type, batch, head, k, k_len, load, q, q_len, score, select};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Tensor};

const TENSORS: [(&str, DType, [usize; 2]); 5] = [
    ("plane", DType::F32, [90, 130]),
    ("turned", DType::Bf16, [130, 90]),
    ("table", DType::F16, [4, 260]),
    ("ids", DType::I32, [90, 130]),
    ("row", DType::I32, [3, 130]),
];

struct Maker {
    rng: Rng,
}

impl Maker {
    fn pick(&mut self, n: usize) -> usize {
        self.rng.range(0..n)
    }

    fn index(&mut self, most: i32) -> Expr {
        let base = match self.pick(5) {
            0 => k() - q() + 100,
            1 => q() + 2,
            2 => k(),
            3 => (k() - q()).abs(),
            _ => self.int(1),
        };
        // Most indices stay inside; those that leave are clamped.
        if self.pick(3) == 0 { base.max(0).min(most) } else { base }
    }

    fn loaded(&mut self, floats: bool) -> Expr {
        match (floats, self.pick(4)) {
            (true, 0) => load("plane", [q(), k()]),
            (true, 1) => load("turned", [k(), q()]),
            (true, 2) => load("table", [head(), k() - q() + 100]),
            (true, _) => load("plane", [self.index(89), self.index(129)]),
            (false, 0) => load("ids", [q(), k()]),
            (false, 1) => load("row", [batch(), k()]),
            (false, _) => load("ids", [self.index(89), self.index(129)]),
        }
    }

    fn float(&mut self, depth: usize) -> Expr {
        if depth == 0 {
            return match self.pick(4) {
                0 | 1 => score(),
                2 => Expr::from(0.25 * self.pick(9) as f32 - 1.0),
                _ => self.loaded(true),
            };
        }
        let a = self.float(depth - 1);
        match self.pick(16) {
            0 => a + self.float(depth - 1),
            1 => a - self.float(depth - 1),
            2 => a * self.float(depth - 1),
            3 => a / 1.75,
            4 => (a * 0.5).tanh() * 3.0,
            5 => (a.tanh() * 2.0).exp(),
            6 => (a.abs() + 0.5).log(),
            7 => (a.abs() + 0.25).sqrt(),
            8 => select(self.condition(1), a, self.float(0)),
            9 => a.min(self.float(0)),
            10 => a.max(self.float(0)),
            11 => -a,
            12 => a + load("table", [head(), 3.into()]) * (k() - q()).to_float(),
            13 => a - (q() + k_len() - q_len() - k()).abs().to_float() * 0.125,
            14 => a + self.int(depth - 1).to_float() * 0.01,
            _ => a / (load("table", [head(), q()]).abs() + 0.5),
        }
    }

    fn int(&mut self, depth: usize) -> Expr {
        if depth == 0 {
            return [k(), q(), head(), batch(), k_len(), Expr::from(5), self.loaded(false)][self.pick(7)].clone();
        }
        let (a, b) = (self.int(depth - 1), self.int(depth - 1));
        match self.pick(11) {
            0 => a + b,
            1 | 2 => a - b,
            3 => a * 3,
            4 => a / (b.abs() + 1),
            5 => a % 7,
            6 => a.abs(),
            7 => a.min(b),
            8 => a.max(b),
            9 => (score() * 4.0).floor(),
            _ => select(self.condition(depth - 1), a, -b),
        }
    }

    fn condition(&mut self, depth: usize) -> Expr {
        if depth == 0 {
            let (a, b) = (self.int(0), self.int(0));
            return match self.pick(5) {
                0 => a.less(b),
                1 => a.at_most(b),
                2 => a.equals(b),
                3 => self.float(0).less(self.float(0)),
                _ => self.float(0).at_most(0.25),
            };
        }
        let (a, b) = (self.condition(depth - 1), self.condition(depth - 1));
        match self.pick(4) {
            0 => a & b,
            1 => a | b,
            2 => !a,
            _ => self.int(depth).at_least(self.int(0)),
        }
    }
}

fn tensors(rng: &mut Rng) -> Vec<Tensor> {
    let make = |(_, dtype, shape): (&str, DType, [usize; 2])| {
        let n = shape[0] * shape[1];
        let values: Vec<f64> = match dtype {
            DType::I32 => (0..n).map(|_| rng.range(0..9) as f64 - 3.0).collect(),
            _ => rng.normals(n, 1.0),
        };
        Tensor::from_f64(dtype, &values, &shape).unwrap()
    };
    TENSORS.into_iter().map(make).collect()
}

#[test]
fn programs_mean_on_tiles_what_they_mean_alone() {
    let isas = Isa::available();
    for seed in 0..400u64 {
        let mut maker = Maker { rng: Rng::new(seed) };
        let tensors = tensors(&mut maker.rng);
        let views: Vec<TensorView<'_>> = tensors.iter().map(Tensor::view).collect();
        let spec = |&(name, dtype, shape): &(&str, DType, [usize; 2])| AuxSpec {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            grad: false,
        };
        let aux: Vec<AuxSpec> = TENSORS.iter().map(spec).collect();
        let depth = 1 + maker.pick(4);
        let (expr, want) = match seed % 4 {
            0 => (maker.int(depth), Type::Int),
            1 => (maker.condition(depth.min(3)), Type::Bool),
            _ => (maker.float(depth), Type::Float),
        };
        let Ok(program) = Program::compile(&expr, &aux, want) else { continue };
        let kernels = kernels(isas[seed as usize % isas.len()]).unwrap();
        let (group, lanes) = (1 + maker.pick(3), kernels.lanes * (1 + maker.pick(kernels.tile / kernels.lanes)));
        let [first_q, first, n] = [maker.pick(20), maker.pick(90), 1 + maker.pick(KEYS)];
        let (one, row) = (group == 1, |lane: usize| (first_q + lane / group, 1 + lane % group));
        let q: Vec<i32> = (0..lanes).map(|lane| row(lane).0 as i32).collect();
        let heads: Vec<i32> = (0..lanes).map(|lane| row(lane).1 as i32).collect();
        let (plan, scale) = (TileProgram::new(&program, one), 0.5f32);
        let mut evaluator = Evaluator::new(&plan, &views, scale, false);
        evaluator.prepare(&LaneEnv { batch: 1, q_len: 88, k_len: 128, q: &q, head: &heads });
        let stride = lanes + kernels.lanes * maker.pick(2);
        let s: Vec<f32> = maker.rng.normals(KEYS * stride, 2.0).into_iter().map(|x| x as f32).collect();
        let mut out = vec![f32::NAN; KEYS * stride];
        kernels.evaluate(&mut evaluator, first as i32, n, (&s, stride), &mut out);
        let mut words = [0; KEYS];
        if want == Type::Bool && !program.reads(Var::Score) {
            kernels.conditions(&mut evaluator, first as i32, &mut words[..n]);
        }
        for (key, lane) in (0..n).flat_map(|key| (0..lanes).map(move |lane| (key, lane))) {
            let ((q, head), at) = (row(lane), key * stride + lane);
            let score = f64::from(s[at] * scale);
            let env = Env { score, batch: 1, head, q, k: first + key, q_len: 88, k_len: 128, aux: &views };
            let (right, got) = (program.eval(&env), out[at]);
            let same = match want {
                Type::Int => right.int() == i64::from(got.to_bits() as i32),
                Type::Bool => right.bool() == (got.to_bits() != 0),
                Type::Float => {
                    let (x, y) = (right.float(), f64::from(got));
                    x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= 1e-4 * (1.0 + x.abs())
                }
            };
            assert!(same, "seed {seed}, {expr}: key {key}, lane {lane}: {right:?}, not {got} ({:#x})", got.to_bits());
            if want == Type::Bool && !program.reads(Var::Score) {
                assert_eq!(words[key] >> lane & 1 == 1, right.bool(), "seed {seed}, {expr}: bit {lane} of key {key}");
            }
        }
        let mut place = s.clone();
        kernels.modify(&mut evaluator, first as i32, n, (&mut place, stride));
        let rows = |x: &[f32]| -> Vec<u32> {
            (0..n).flat_map(|key| x[key * stride..key * stride + lanes].to_vec()).map(f32::to_bits).collect()
        };
        assert!(rows(&place) == rows(&out), "seed {seed}, {expr}: in place");
    }
}
