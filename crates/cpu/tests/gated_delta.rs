//! The gated delta rule against its oracle: both forms, every instruction set, forward and backward.

use fulgurite_core::cases::variants::{DeltaCase, DeltaSizes};
use fulgurite_core::gated_delta::{DeltaForward, DeltaGradients, GatedDelta, QkNorm, check_backward, check_forward};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Tensor};
use fulgurite_cpu::{DeltaCounters, DeltaForm, DeltaSegments, Isa, Options, gated_delta_backward, gated_delta_forward};

/// What a test does with a case.
trait Runs {
    fn forward(&self, form: DeltaForm, how: DeltaSegments, options: &Options) -> (DeltaForward, DeltaCounters);
    fn backward(&self, options: &Options) -> DeltaGradients;
    fn failures(&self, name: &str, options: &Options) -> Vec<String>;
}

impl Runs for DeltaCase {
    fn forward(&self, form: DeltaForm, how: DeltaSegments, options: &Options) -> (DeltaForward, DeltaCounters) {
        let mut out = DeltaForward::zeros(&self.problem).unwrap();
        out.o.view_mut().fill(f64::NAN);
        out.final_state.view_mut().fill(f64::NAN);
        let inputs = self.inputs();
        let bound = inputs.bind(&self.problem).unwrap();
        let counters = gated_delta_forward(&bound, &mut out.outputs(), form, how, options);
        (out, counters)
    }

    fn backward(&self, options: &Options) -> DeltaGradients {
        let mut out = DeltaGradients::zeros(&self.problem).unwrap();
        let inputs = self.inputs();
        let bound = inputs.bind(&self.problem).unwrap();
        gated_delta_backward(&bound, &self.saved(), &mut out.outputs(), options);
        out
    }

    fn failures(&self, name: &str, options: &Options) -> Vec<String> {
        let inputs = self.inputs();
        let bound = inputs.bind(&self.problem).unwrap();
        let mut failed = Vec::new();
        for form in [DeltaForm::Chunked, DeltaForm::Recurrent] {
            let (out, _) = self.forward(form, DeltaSegments::Auto, options);
            let verdicts = check_forward(&bound, &out, 1).into_iter().filter(|(_, v)| !v.ok());
            failed.extend(verdicts.map(|(t, v)| format!("{name} {form:?} {:?} {t}: {v}", options.isa)));
        }
        let gradients = self.backward(options);
        let verdicts = check_backward(&bound, &self.saved(), &gradients, 1).into_iter().filter(|(_, v)| !v.ok());
        failed.extend(verdicts.map(|(t, v)| format!("{name} {:?} {t}: {v}", options.isa)));
        failed
    }
}

fn long() -> bool {
    std::env::var_os("FULGURITE_LONG").is_some()
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    for seed in 0..if long() { 1000 } else { 200 } {
        let case = DeltaCase::random(seed, DType::FLOATS[seed as usize % 3]);
        let isa = Isa::available()[(seed / 3) as usize % Isa::available().len()];
        let options = Options { isa: Some(isa), ..Options::default() };
        failed.extend(case.failures(&format!("{seed} {:?}", case.problem), &options));
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

fn one_head(len: usize, decay: f64, dtype: DType) -> DeltaCase {
    one_wide_head(len, decay, dtype, 32)
}

fn one_wide_head(len: usize, decay: f64, dtype: DType, values: usize) -> DeltaCase {
    let sizes = DeltaSizes {
        lengths: vec![len],
        packed: false,
        heads: [1, 2],
        dims: [32, values],
        decay,
        norm: QkNorm::Inside,
        initial: true,
    };
    DeltaCase::new(&mut Rng::new(9), dtype, &sizes)
}

/// Relative distance in the Euclidean norm.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.view().to_f64(), b.view().to_f64());
    let square = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    (square(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / square(&mut b.iter().copied())).sqrt()
}

#[test]
fn segments_agree_with_the_whole() {
    for dtype in DType::FLOATS {
        // Strong decay: warm-ups. Weak decay, and exact by request: maps.
        for (decay, how) in [(1.0, DeltaSegments::Auto), (0.001, DeltaSegments::Auto), (1.0, DeltaSegments::Exact)] {
            let case = one_head(2500, decay, dtype);
            let (whole, none) = case.forward(DeltaForm::Chunked, DeltaSegments::Whole, &Options::default());
            let (cut, counters) = case.forward(DeltaForm::Chunked, how, &Options::default());
            assert_eq!(none.segments, 2);
            assert!(counters.segments > 2, "{counters:?}");
            let warm = counters.warmed_up > 0;
            assert_eq!(warm, decay == 1.0 && how == DeltaSegments::Auto, "{counters:?}");
            // In bf16 the two differ as any two roundings do; there the tolerance rule alone judges.
            let bar = [1e-5, 5e-4, 1.0][DType::FLOATS.iter().position(|&d| d == dtype).unwrap()];
            assert!(distance(&cut.o, &whole.o) <= bar, "{dtype} {decay} {how:?}: {}", distance(&cut.o, &whole.o));
            assert!(distance(&cut.final_state, &whole.final_state) <= bar);
            let inputs = case.inputs();
            let verdicts = check_forward(&inputs.bind(&case.problem).unwrap(), &cut, 1);
            assert!(verdicts.iter().all(|(_, v)| v.ok()), "{dtype} {decay} {how:?}: {verdicts:?}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let bits = |t: &Tensor| t.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>();
    let wide = one_wide_head(1100, 0.5, DType::F32, 150);
    let small = [one_head(2000, 1.0, DType::F32), one_head(1500, 0.0, DType::Bf16), DeltaCase::random(4, DType::F32)];
    for case in small.into_iter().chain([wide]) {
        let run = |threads| {
            let options = Options { threads: Some(threads), ..Options::default() };
            let (out, _) = case.forward(DeltaForm::Chunked, DeltaSegments::Auto, &options);
            let g = case.backward(&options);
            [&out.o, &out.final_state, &g.d_q, &g.d_k, &g.d_v, &g.d_g, &g.d_beta].map(bits)
        };
        let one = run(1);
        assert!([2, 3, 5].into_iter().all(|threads| run(threads) == one));
    }
}

/// Few heads and wide values: gradients are split by columns. One sequence is too short for that.
#[test]
fn gradients_by_columns_agree_with_the_oracle() {
    for (n, dtype) in DType::FLOATS.into_iter().enumerate() {
        for isa in Isa::available() {
            let sizes = DeltaSizes {
                lengths: vec![1030, 70, 0],
                packed: true,
                heads: [1, 3 - n],
                dims: [[9, 40, 20][n], [65, 128, 130][n]],
                decay: 0.3,
                norm: QkNorm::Inside,
                initial: true,
            };
            let case = DeltaCase::new(&mut Rng::new(n as u64), dtype, &sizes);
            let inputs = case.inputs();
            let bound = inputs.bind(&case.problem).unwrap();
            let gradients = case.backward(&Options { isa: Some(isa), ..Options::default() });
            for (name, verdict) in check_backward(&bound, &case.saved(), &gradients, 1) {
                assert!(verdict.ok(), "{dtype} {isa:?} {name}: {verdict}");
            }
        }
    }
}

/// A saved state continues where it was left, in either form.
#[test]
fn two_halves_are_the_whole() {
    for form in [DeltaForm::Chunked, DeltaForm::Recurrent] {
        let (n, cut, d) = (150, 77, 16);
        let case = DeltaCase::new(
            &mut Rng::new(3),
            DType::F32,
            &DeltaSizes {
                lengths: vec![n],
                packed: false,
                heads: [1, 1],
                dims: [d, d],
                decay: 1.0,
                norm: QkNorm::Given,
                initial: true,
            },
        );
        let (whole, _) = case.forward(form, DeltaSegments::Auto, &Options::default());
        let part = |from: usize, to: usize, state: &Tensor| {
            let mut tensors = case.tensors.clone();
            for (i, tensor) in tensors.iter_mut().enumerate().take(5) {
                let (values, width) = (tensor.view().to_f64(), if i < 3 { d } else { 1 });
                let shape: &[usize] = if i < 3 { &[1, to - from, 1, d] } else { &[1, to - from, 1] };
                *tensor = Tensor::from_f64(DType::F32, &values[from * width..to * width], shape).unwrap();
            }
            tensors[5] = state.clone();
            let problem = GatedDelta::builder().dense(1, to - from).heads(1, 1).head_dim(d).initial_state().build();
            DeltaCase { problem: problem.unwrap(), tensors, offsets: None }
                .forward(form, DeltaSegments::Auto, &Options::default())
                .0
        };
        let first = part(0, cut, &case.tensors[5]);
        let second = part(cut, n, &first.final_state);
        let both: Vec<f64> = [&first.o, &second.o].into_iter().flat_map(|o| o.view().to_f64()).collect();
        let both = Tensor::from_f64(DType::F32, &both, &[1, n, 1, d]).unwrap();
        assert!(distance(&both, &whole.o) <= 1e-6);
        assert!(distance(&second.final_state, &whole.final_state) <= 1e-6);
    }
}
