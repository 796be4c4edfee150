//! A score modifier of one's own: a learned bias for each head and each bucket of distances, as in T5, with its
//! gradient, which nobody had to write. Checked against the oracle.

use fulgurite::expr::{head, k, load, q, score, select};
use fulgurite::{Choice, DType, Inputs, Mask, Problem, Run, Tensor, engine};
use std::error::Error;

const HEADS: usize = 4;
const BUCKETS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    // Distances 0 to 3 have a bucket each, larger ones share buckets by powers of two.
    let distance = (q() - k()).max(0);
    // 0.001 keeps the f32 engines and the f64 oracle on the same side of a whole number before `floor`.
    let logarithm = (distance.clone().max(1).to_float().log() / 2.0f32.ln() + 0.001).floor();
    let bucket = select(distance.clone().less(4), distance, logarithm + 2);
    // Each call checks by ranges that no index leaves its tensor; `min` states the range.
    let bucket = bucket.min(BUCKETS as i32 - 1);
    let problem = Problem::builder()
        .dense(2, 96, 96)
        .heads(HEADS, 2)
        .head_dim(32)
        .mask(Mask::causal())
        .aux_with_grad("table", DType::F32, &[HEADS, BUCKETS])
        .score_mod(score() + load("table", [head(), bucket]))
        .build()?;
    println!("score <- {}", problem.score_mod().expect("one was given"));

    let wave = |shape: Vec<usize>, step: f32| {
        Tensor::new((0..shape.iter().product()).map(|i: usize| (step * i as f32).sin()).collect(), &shape)
    };
    let (q, k, v) = (wave(problem.q_shape(), 0.37)?, wave(problem.k_shape(), 0.53)?, wave(problem.v_shape(), 0.71)?);
    let table = wave(vec![HEADS, BUCKETS], 1.3)?;
    let d_o = wave(problem.o_shape(), 0.19)?;
    let inputs = Inputs::new(q.view(), k.view(), v.view()).aux("table", table.view());

    let run = |choice: Choice| -> Result<[Tensor; 5], Box<dyn Error>> {
        let engine = engine(choice)?;
        let forward = engine.forward(&problem, &inputs, &Run::default())?;
        let mut gradients = engine.backward(&problem, &inputs, &forward.saved(d_o.view()), &Run::default())?;
        let d_table = gradients.d_aux[0].take().expect("the table asked for a gradient");
        println!("{}", engine.describe());
        Ok([forward.o, gradients.d_q, gradients.d_k, gradients.d_v, d_table])
    };
    let (got, want) = (run(Choice::Best)?, run(Choice::Oracle)?);
    for (name, (got, want)) in ["o", "d_q", "d_k", "d_v", "d_table"].iter().zip(got.iter().zip(&want)) {
        let (got, want) = (got.view().to_f64(), want.view().to_f64());
        let size = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        // Written so that a NaN becomes the error.
        let error = got.iter().zip(&want).fold(0.0f64, |m, (g, w)| if (g - w).abs() <= m { m } else { (g - w).abs() });
        println!("{name:>8}: largest {size:.3}, worst error {error:.1e}");
        // Sums of up to 96 x 96 products in f32: some hundred units in the last place.
        assert!(error <= 1e-5 * (1.0 + size), "{name} is wrong");
    }
    println!("gradient of the table, head 0: {:.4?}", &want[4].view().to_f64()[..BUCKETS]);
    Ok(())
}
