//! Forms of the exponential beside each other, forward and decode.

use super::{Line, race, random};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Exp, Forward, Inputs, Mask, Problem, Rescale};
use fulgurite_cpu::{Options, forward};

/// Name, exponential, and rescale policy if one is forced.
const CONTENDERS: [(&str, Exp, Option<Rescale>); 7] = [
    ("native", Exp::Native, None),
    ("poly5", Exp::Poly { degree: 5, share: 1.0 }, None),
    ("poly3", Exp::Poly { degree: 3, share: 1.0 }, None),
    ("native_always", Exp::Native, Some(Rescale::Always)),
    ("poly3_always", Exp::Poly { degree: 3, share: 1.0 }, Some(Rescale::Always)),
    ("sas_online", Exp::SasOnline, None),
    ("sas_two_passes", Exp::Sas { threshold: Exp::SAS_THRESHOLD }, None),
];

/// Seconds of each contender.
pub fn measure(threads: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for (what, q_len, k_len, heads, dim, rounds) in [
            ("forward, causal", 4096, 4096, 2, 64, 15),
            ("forward, causal", 4096, 4096, 2, 128, 9),
            ("forward", 3001, 3001, 2, 16, 15),
            ("decode", 1, 65536, 8, 128, 15),
            ("decode, cached", 1, 2048, 2, 64, 301),
        ] {
            let of = |exp: Exp| {
                let problem = Problem::builder().dense(1, q_len, k_len).heads(heads, heads).head_dim(dim).dtype(dtype);
                let problem = if what == "forward, causal" { problem.mask(Mask::causal()) } else { problem };
                problem.exp(exp).build().expect("a problem")
            };
            let (problems, rng) = (CONTENDERS.map(|(_, exp, _)| of(exp)), &mut Rng::new(1));
            let mut tensor = |shape: Vec<usize>| random(rng, dtype, &shape, |x| x);
            let (q, k, v) =
                (tensor(problems[0].q_shape()), tensor(problems[0].k_shape()), tensor(problems[0].v_shape()));
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let mut runs: [_; 7] = std::array::from_fn(|i| {
                let bound = inputs.bind(&problems[i]).expect("fits");
                let mut out = Forward::zeros(&problems[i]).expect("outputs");
                let options = Options { threads: Some(threads), rescale: CONTENDERS[i].2, ..Options::default() };
                move || {
                    forward(&bound, &mut out.outputs(), &options);
                }
            });
            let times = race(rounds, runs.each_mut().map(|run| run as &mut dyn FnMut()));
            let mut numbers: Vec<(String, f64)> =
                CONTENDERS.iter().zip(times).map(|((name, ..), time)| (format!("{name}_seconds"), time)).collect();
            numbers.push(("native_over_sas_online".into(), times[0] / times[5]));
            numbers.push(("poly3_over_sas_online".into(), times[2] / times[5]));
            numbers.push(("native_always_over_sas_online".into(), times[3] / times[5]));
            numbers.push(("poly3_always_over_sas_online".into(), times[4] / times[5]));
            lines.push(Line(format!("exp, {what}, {dtype}, {q_len} x {k_len}, {heads} heads, d {dim}"), numbers));
        }
    }
    lines
}
