//! Selection by tile means beside dense attention: what the tiles cost that it keeps, and what it costs to find them.

use super::{Line, race, random};
use fulgurite_core::random::Rng;
use fulgurite_core::skip::{Proxy, Skip, SkipProblem};
use fulgurite_core::{DType, Forward, Inputs, Mask, Problem};
use fulgurite_cpu::{Options, forward, skip_forward};

/// Seconds of dense attention and of the tenth of tiles that the proxy keeps.
pub fn measure(threads: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    let options = Options { threads: Some(threads), ..Options::default() };
    for dtype in [DType::F32, DType::Bf16] {
        for (n, heads, d, tile) in [
            (16384, 2, 64, [128, 64]),
            (16384, 2, 128, [128, 64]),
            (16001, 2, 64, [128, 64]),
            (15777, 2, 128, [128, 64]),
            (16384, 2, 64, [64, 128]),
        ] {
            let builder =
                || Problem::builder().dense(1, n, n).heads(heads, heads).head_dim(d).dtype(dtype).mask(Mask::causal());
            let dense = builder().build().expect("a problem");
            // Any tile is represented by its mean, so that the share alone decides.
            let proxy = Some(Proxy::Top { share: 0.1, similarity: -1.0 });
            let problem = SkipProblem::new(builder(), Skip { proxy, tile, ..Skip::default() }).expect("a problem");
            let rng = &mut Rng::new(1);
            let mut of = || random(rng, dtype, &dense.q_shape(), |x| x);
            let (q, k, v) = (of(), of(), of());
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let bound = inputs.bind(&dense).expect("fits");
            let mut outs: [Forward; 2] = std::array::from_fn(|_| Forward::zeros(&dense).expect("outputs"));
            let [a, b] = &mut outs;
            let mut counts = None;
            let [all, some, selection] = race(
                5,
                [
                    &mut || {
                        forward(&bound, &mut a.outputs(), &options);
                    },
                    &mut || {
                        // Binding makes room for the means, which belong to the time.
                        let bound = problem.bind(&inputs).expect("fits");
                        counts = Some(skip_forward(&bound, &mut b.outputs(), &options).counts);
                    },
                    &mut || {
                        let bound = problem.bind(&inputs).expect("fits");
                        bound.mean_tiles().into_iter().for_each(|tile| bound.mean(tile));
                        let mut counts = Default::default();
                        bound.each(|s, head, tile| {
                            std::hint::black_box(bound.admitted(s, head, tile, &mut counts));
                        });
                    },
                ],
            );
            let counts = counts.expect("a run");
            lines.push(Line(
                format!("top:0.1, {dtype}, {n} tokens, causal, {heads} heads, d {d}, tiles of {tile:?}"),
                vec![
                    ("dense_seconds".into(), all),
                    ("top_seconds".into(), some),
                    ("selection_on_one_thread_seconds".into(), selection),
                    ("top_over_dense".into(), some / all),
                    ("kept_share".into(), counts.kept as f64 / counts.visible as f64),
                ],
            ));
        }
    }
    lines
}
