//! The oracle against central differences and against laws that attention must obey.

use fulgurite_core::expr::{head, k, k_len, load, q, q_len, score, select};
use fulgurite_core::oracle::{self, At};
use fulgurite_core::random::Rng;
use fulgurite_core::{
    BlockMask, BlockSpec, DType, Inputs, Mask, Problem, ProblemBuilder, Sequence, Tensor, TensorView, cases,
};

/// f32 inputs of a problem that can be moved one element at a time.
#[derive(Clone)]
struct Tiny {
    problem: Problem,
    /// q, k, v, sinks (maybe empty), then the auxiliary tensors.
    tensors: Vec<Vec<f32>>,
    cu_seqlens: Option<[Vec<i32>; 2]>,
    d_o: Vec<f32>,
    d_lse: Vec<f32>,
}

fn base(q_len: usize, k_len: usize) -> ProblemBuilder {
    Problem::builder().dense(2, q_len, k_len).heads(2, 1).head_dims(3, 2)
}

impl Tiny {
    fn new(builder: ProblemBuilder, seed: u64) -> Tiny {
        let problem = builder.build().unwrap();
        let mut rng = Rng::new(seed);
        // Multiples of 2^-8, so that a step of 2^-10 is exact.
        let mut draw =
            |n: usize| -> Vec<f32> { (0..n).map(|_| ((rng.normal() * 256.0).round() / 256.0) as f32).collect() };
        let count = |shape: Vec<usize>| shape.iter().product::<usize>();
        let mut tensors =
            vec![draw(count(problem.q_shape())), draw(count(problem.k_shape())), draw(count(problem.v_shape()))];
        tensors.push(draw(if problem.has_sinks() { problem.q_heads() } else { 0 }));
        for spec in problem.aux() {
            tensors.push(draw(count(spec.shape.clone())));
        }
        let (d_o, d_lse) = (draw(count(problem.o_shape())), draw(count(problem.lse_shape())));
        Tiny { problem, tensors, cu_seqlens: None, d_o, d_lse }
    }

    fn with<R>(&self, then: impl FnOnce(&fulgurite_core::Bound<'_>, &TensorView<'_>, &TensorView<'_>) -> R) -> R {
        let p = &self.problem;
        let view = |i: usize, shape: &[usize]| TensorView::new(&self.tensors[i], shape).unwrap();
        let mut inputs = Inputs::new(view(0, &p.q_shape()), view(1, &p.k_shape()), view(2, &p.v_shape()));
        if p.has_sinks() {
            inputs = inputs.sinks(view(3, &[p.q_heads()]));
        }
        for (i, spec) in p.aux().iter().enumerate() {
            inputs = inputs.aux(&spec.name, view(4 + i, &spec.shape));
        }
        if let Some([q, k]) = &self.cu_seqlens {
            let list = |x| TensorView::new(x, &[p.batch() + 1]).unwrap();
            inputs = inputs.cu_seqlens(list(q), list(k));
        }
        let bound = inputs.bind(p).unwrap();
        let d_o = TensorView::new(&self.d_o, &p.o_shape()).unwrap();
        let d_lse = TensorView::new(&self.d_lse, &p.lse_shape()).unwrap();
        then(&bound, &d_o, &d_lse)
    }

    fn loss(&self) -> f64 {
        let answer = self.with(|bound, _, _| oracle::forward(bound));
        let dot = |a: &[f64], b: &[f32]| -> f64 {
            // An empty row has a constant LSE of -inf: no gradient.
            a.iter().zip(b).filter(|(x, _)| x.is_finite()).map(|(x, y)| x * f64::from(*y)).sum()
        };
        dot(&answer.o, &self.d_o) + dot(&answer.lse, &self.d_lse)
    }
}

fn differentiable() -> Vec<(&'static str, Tiny)> {
    let small = || base(4, 5);
    let relative = (q() + k_len() - q_len() - k()).max(-2).min(2) + 2;
    let holes = select(((q() + k() * 3) % 4).equals(0), f32::NEG_INFINITY, score() * 1.5);
    let mut packed = Tiny::new(
        Problem::builder()
            .packed(&[0, 2, 2, 6], &[0, 3, 4, 8])
            .heads(4, 2)
            .head_dims(2, 3)
            .mask(Mask::causal())
            .alibi(),
        9,
    );
    packed.cu_seqlens = Some([vec![0, 2, 2, 6], vec![0, 3, 4, 8]]);
    let own = base(3, 4)
        .aux_with_grad("relative", DType::F32, &[2, 5])
        .aux_with_grad("factor", DType::F32, &[2])
        .score_mod(score() + load("relative", [head(), relative]))
        .score_mod((score() * load("factor", [head()])).tanh() * 2.0);
    vec![
        ("plain", Tiny::new(small(), 1)),
        ("causal with empty rows", Tiny::new(base(5, 3).mask(Mask::causal()), 2)),
        ("sinks", Tiny::new(base(5, 3).mask(Mask::window(1, 0)).sinks(), 3)),
        ("softcap, alibi, bias", Tiny::new(small().softcap(1.5).alibi().bias([2, 1, 4, 5], DType::F32, true), 4)),
        ("bias of keys, softcap", Tiny::new(small().softcap(2.0).bias([1, 2, 1, 5], DType::F32, true).sinks(), 5)),
        ("own modifiers", Tiny::new(own, 6)),
        ("holes", Tiny::new(small().score_mod(holes), 7)),
        ("own mask", Tiny::new(small().mask(Mask::custom(((k() + head()) % 2).equals(0))).scale(2.0), 8)),
        ("packed", packed),
    ]
}

#[test]
fn every_gradient_is_the_slope_of_the_loss() {
    for (name, tiny) in differentiable() {
        let gradients = tiny.with(|bound, d_o, d_lse| oracle::backward(bound, d_o, Some(d_lse)));
        let mut wanted = vec![Some(gradients.d_q), Some(gradients.d_k), Some(gradients.d_v), gradients.d_sinks];
        wanted.extend(gradients.d_aux);
        let step = 2f32.powi(-10);
        for (t, gradient) in wanted.into_iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            assert_eq!(gradient.len(), tiny.tensors[t].len());
            for (i, &derived) in gradient.iter().enumerate() {
                let at = |h: f32| {
                    let mut moved = tiny.clone();
                    moved.tensors[t][i] += h;
                    moved.loss()
                };
                let slope = (at(step) - at(-step)) / (2.0 * f64::from(step));
                let close = (slope - derived).abs() <= 2e-5 * (1.0 + slope.abs());
                assert!(close, "{name}: tensor {t}[{i}] is {derived}, differences say {slope}");
            }
        }
    }
}

/// Forward of one head from plain vectors.
fn attention(q: &[f64], k: &[f64], v: &[f64], dim: usize) -> oracle::Answer {
    let (q_len, k_len) = (q.len() / dim, k.len() / dim);
    let problem = Problem::builder().dense(1, q_len, k_len).heads(1, 1).head_dim(dim).build().unwrap();
    let tensor = |x: &[f64], n: usize| Tensor::from_f64(DType::F32, x, &[1, n, 1, dim]).unwrap();
    let (q, k, v) = (tensor(q, q_len), tensor(k, k_len), tensor(v, k_len));
    oracle::forward(&Inputs::new(q.view(), k.view(), v.view()).bind(&problem).unwrap())
}

fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-12 * (1.0 + b.abs()))
}

#[test]
fn equal_scores_give_the_mean_of_v() {
    let mut rng = Rng::new(1);
    let v: Vec<f64> = (0..12).map(|_| f64::from(rng.normal() as f32)).collect();
    let answer = attention(&[0.0; 2], &rng.normals(12, 1.0), &v, 2);
    let mean: Vec<f64> = (0..2).map(|i| v.iter().skip(i).step_by(2).sum::<f64>() / 6.0).collect();
    assert!(close(&answer.o, &mean) && close(&answer.lse, &[6f64.ln()]));
}

#[test]
fn the_order_of_keys_does_not_matter() {
    let (mut rng, dim) = (Rng::new(2), 3);
    let (q, k, v) = (rng.normals(6, 1.0), rng.normals(12, 1.0), rng.normals(12, 1.0));
    let permuted =
        |x: &[f64]| [2, 0, 3, 1].iter().flat_map(|&j| x[j * dim..(j + 1) * dim].to_vec()).collect::<Vec<_>>();
    let (a, b) = (attention(&q, &k, &v, dim), attention(&q, &permuted(&k), &permuted(&v), dim));
    assert!(close(&a.o, &b.o) && close(&a.lse, &b.lse));
}

#[test]
fn parts_merge_by_their_lse() {
    let (mut rng, dim) = (Rng::new(3), 2);
    let (q, k, v) = (rng.normals(2, 1.0), rng.normals(14, 2.0), rng.normals(14, 1.0));
    let whole = attention(&q, &k, &v, dim);
    let (a, b) = (attention(&q, &k[..6], &v[..6], dim), attention(&q, &k[6..], &v[6..], dim));
    let lse = (a.lse[0].exp() + b.lse[0].exp()).ln();
    let (x, y) = ((a.lse[0] - lse).exp(), (b.lse[0] - lse).exp());
    let o: Vec<f64> = a.o.iter().zip(&b.o).map(|(a, b)| x * a + y * b).collect();
    assert!(close(&o, &whole.o) && close(&[lse], &whole.lse));
}

#[test]
fn a_constant_on_all_scores_moves_only_the_lse() {
    let plain = Tiny::new(base(4, 5), 4);
    let mut moved = Tiny::new(base(4, 5).score_mod(score() + 100.0), 4);
    moved.tensors = plain.tensors.clone();
    let forward = |tiny: &Tiny| tiny.with(|bound, _, _| oracle::forward(bound));
    let (a, b) = (forward(&plain), forward(&moved));
    let up: Vec<f64> = a.lse.iter().map(|x| x + 100.0).collect();
    assert!(close(&a.o, &b.o) && close(&up, &b.lse));
}

#[test]
fn rows_without_keys_are_zero() {
    let tiny = Tiny::new(base(5, 2).mask(Mask::causal()).sinks(), 5);
    let answer = tiny.with(|bound, _, _| oracle::forward(bound));
    assert!(answer.o[..2 * 2 * 3].iter().all(|&x| x == 0.0)); // two heads of two, three rows
    assert_eq!(answer.lse[0], f64::from(tiny.tensors[3][0]));
    let bare = Tiny::new(base(5, 2).mask(Mask::causal()), 5).with(|bound, _, _| oracle::forward(bound));
    assert_eq!(bare.lse[0], f64::NEG_INFINITY);
    assert!(bare.o.iter().all(|x| x.is_finite()));
}

#[test]
fn a_sink_far_above_the_scores_stays_finite() {
    let mut tiny = Tiny::new(base(2, 3).sinks(), 6);
    tiny.tensors[3] = vec![2000.0, -2000.0];
    let answer = tiny.with(|bound, _, _| oracle::forward(bound));
    assert_eq!(answer.lse[0], 2000.0);
    assert!(answer.o.iter().all(|x| x.is_finite()) && answer.lse[2].abs() < 100.0);
}

/// A sink of -inf is hidden like a score of -inf: what rows hold does not reach its gradient.
#[test]
fn a_hidden_sink_has_no_gradient() {
    let mut tiny = Tiny::new(base(2, 3).sinks(), 6);
    tiny.tensors[3] = vec![f32::NEG_INFINITY, 0.5];
    let gradients = tiny.with(|bound, d_o, _| {
        let d_o = Tensor::from_f64(DType::F32, &vec![f64::NAN; d_o.to_f64().len()], d_o.shape()).unwrap();
        oracle::backward(bound, &d_o.view(), None)
    });
    let d_sinks = gradients.d_sinks.unwrap();
    assert!(d_sinks[0] == 0.0 && d_sinks[1].is_nan(), "{d_sinks:?}");
}

#[test]
fn nan_propagates_to_the_rows_that_see_it_only() {
    let mut tiny = Tiny::new(base(3, 3).mask(Mask::causal()), 7);
    tiny.tensors[1][3] = f32::NAN; // key 1 of sequence 0
    let answer = tiny.with(|bound, _, _| oracle::forward(bound));
    let nan: Vec<bool> = answer.lse.iter().map(|x| x.is_nan()).collect();
    assert_eq!(nan[..6], [false, true, true, false, true, true]);
    assert!(nan[6..].iter().all(|n| !n));
}

#[test]
fn chosen_rows_and_keys_are_those_of_the_whole() {
    for case in ["packed, used lengths", "relative position, causal, 4 over 1", "used lengths, causal, sinks"] {
        let case = cases::cases(DType::F32).into_iter().find(|c| c.name == case).unwrap();
        let (bound, d_o) = (case.bound(), case.d_o());
        let (p, answer) = (case.problem(), oracle::forward(&bound));
        let gradients = oracle::backward(&bound, &d_o, None);
        let strides =
            |shape: &[usize]| (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect::<Vec<usize>>();
        let at = |s: &Sequence, shape: &[usize], side, h, i| bound.row_layout(&strides(shape), s, side).at(i, h);
        for s in bound.sequences() {
            for h in 0..p.q_heads() {
                let rows: Vec<At> = (0..s.q_len).map(|row| At { batch: s.batch, head: h, row }).collect();
                let (found, d_q) =
                    (oracle::forward_rows(&bound, &rows), oracle::backward_rows(&bound, &d_o, None, &rows));
                for (i, (row, d_q)) in found.iter().zip(&d_q).enumerate() {
                    let side = fulgurite_core::Side::Query;
                    assert_eq!(row.o, answer.o[at(s, &p.o_shape(), side, h, i)..][..row.o.len()]);
                    assert_eq!(d_q[..], gradients.d_q[at(s, &p.q_shape(), side, h, i)..][..d_q.len()]);
                }
            }
            for h in 0..p.kv_heads() {
                let keys: Vec<At> = (0..s.k_len).map(|row| At { batch: s.batch, head: h, row }).collect();
                for (i, key) in oracle::backward_keys(&bound, &d_o, None, &keys).iter().enumerate() {
                    let side = fulgurite_core::Side::Key;
                    assert_eq!(key.d_k, gradients.d_k[at(s, &p.k_shape(), side, h, i)..][..key.d_k.len()]);
                    assert_eq!(key.d_v, gradients.d_v[at(s, &p.v_shape(), side, h, i)..][..key.d_v.len()]);
                }
            }
        }
        let past = At { batch: 0, head: 0, row: p.max_q_len() + 1 };
        assert_eq!(oracle::forward_rows(&bound, &[past])[0].lse, f64::NEG_INFINITY);
    }
}

#[test]
fn blocks_from_a_mask_change_nothing() {
    let builder = || base(30, 50).mask(Mask::causal()).mask(Mask::window(20, None));
    let bare = Tiny::new(builder(), 8);
    let spec = BlockSpec { rows: 7, cols: 9, batch: 1, heads: 1 };
    let (mask, want) = bare.with(|bound, _, _| (BlockMask::from_mask(bound, spec).unwrap(), oracle::forward(bound)));
    let problem = builder().block_mask(spec).build().unwrap();
    let view = |i: usize, shape: &[usize]| TensorView::new(&bare.tensors[i], shape).unwrap();
    let inputs = Inputs::new(view(0, &problem.q_shape()), view(1, &problem.k_shape()), view(2, &problem.v_shape()));
    assert_eq!(oracle::forward(&inputs.block_mask(&mask).bind(&problem).unwrap()), want);
}
