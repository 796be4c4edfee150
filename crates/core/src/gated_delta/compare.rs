//! Checks results of the gated delta rule against the oracle, with the tolerance rule.

use super::oracle::{Pair, all_pairs, backward_of, forward_of, honest, state_at};
use super::recurrence::Arithmetic;
use super::{DeltaBound, DeltaForward, DeltaGradients, DeltaSaved};
use crate::compare::{Rule, Verdict};
use crate::dtype::DType;
use crate::random::Rng;
use crate::tensor::{Dims, Tensor};

/// With more updates of state elements than this, checks look at one key head with its value heads.
const MAX_UPDATES: usize = 1 << 28;

fn chosen(bound: &DeltaBound<'_>, seed: u64) -> Vec<Pair> {
    let problem = bound.problem();
    let tokens: usize = bound.sequences().iter().map(|s| s.len).sum();
    let updates = tokens * problem.value_heads() * problem.key_dim() * problem.value_dim();
    let all = all_pairs(bound);
    if updates <= MAX_UPDATES || all.is_empty() { all } else { vec![Rng::new(seed).pick(&all)] }
}

/// The flat indices of the chosen heads in a tensor of the shape of q, v or g.
fn owned(bound: &DeltaBound<'_>, pairs: &[Pair], shape: &[usize], heads: usize) -> Vec<usize> {
    let problem = bound.problem();
    let gates = shape.len() == problem.gate_shape().len();
    let dim = if gates { 1 } else { shape[shape.len() - 1] };
    let strides = Dims::new(shape).and_then(|d| d.contiguous_strides()).expect("a shape of the problem");
    let mut index = Vec::new();
    for &(sequence, key_head) in pairs {
        let s = &bound.sequences()[sequence];
        let rows = bound.row_layout(&strides, s);
        let per = heads / problem.heads();
        for h in key_head * per..(key_head + 1) * per {
            for t in 0..s.len {
                let at = if gates { bound.gate(s, t, h) } else { rows.at(t, h) };
                index.extend(at..at + dim);
            }
        }
    }
    index
}

fn owned_states(bound: &DeltaBound<'_>, pairs: &[Pair]) -> Vec<usize> {
    let problem = bound.problem();
    let size = problem.key_dim() * problem.value_dim();
    let heads = pairs.iter().flat_map(|&(s, k)| (k * problem.group()..(k + 1) * problem.group()).map(move |h| (s, h)));
    heads.flat_map(|(s, h)| state_at(bound, s, h)..state_at(bound, s, h) + size).collect()
}

fn judge(name: &str, rule: Rule, got: &Tensor, want: &[f64], plain: &[f64], index: &[usize]) -> (String, Verdict) {
    let view = got.view();
    let pick = |values: &[f64]| index.iter().map(|&i| values[i]).collect::<Vec<f64>>();
    let got: Vec<f64> = index.iter().map(|&i| view.at(i)).collect();
    let verdict = rule.judge(&got, &pick(want), &pick(plain));
    (name.to_string(), Verdict { at: index.get(verdict.at).copied().unwrap_or(0), ..verdict })
}

/// Rules for tensors of the problem's type, and for f32 sums of terms in it.
fn rules(bound: &DeltaBound<'_>, gradient: bool) -> [Rule; 2] {
    let dtype = bound.problem().dtype();
    let own = Rule { dtype, softcap: false, gradient, terms: None };
    [own, Rule { dtype: DType::F32, terms: Some(dtype), ..own }]
}

/// Checks `o` and `final_state`. For large problems, only one key head with its value heads is checked; `seed` picks
/// it.
///
/// Panics if the tensors do not have the shapes of the problem.
pub fn check_forward(bound: &DeltaBound<'_>, got: &DeltaForward, seed: u64) -> Vec<(String, Verdict)> {
    let pairs = chosen(bound, seed);
    let want = forward_of(bound, Arithmetic { rounded: None }, &pairs);
    let plain = forward_of(bound, honest(bound), &pairs);
    let problem = bound.problem();
    let [own, sums] = rules(bound, false);
    let rows = owned(bound, &pairs, &problem.v_shape(), problem.value_heads());
    let states = owned_states(bound, &pairs);
    vec![
        judge("o", own, &got.o, &want.o, &plain.o, &rows),
        judge("final_state", sums, &got.final_state, &want.final_state, &plain.final_state, &states),
    ]
}

/// Checks all gradients.
///
/// Panics if the tensors do not have the shapes of the problem.
pub fn check_backward(
    bound: &DeltaBound<'_>,
    saved: &DeltaSaved<'_>,
    got: &DeltaGradients,
    seed: u64,
) -> Vec<(String, Verdict)> {
    let pairs = chosen(bound, seed);
    let answer = |arithmetic| backward_of(bound, arithmetic, &saved.d_o, saved.d_final_state.as_ref(), &pairs);
    let (want, plain) = (answer(Arithmetic { rounded: None }), answer(honest(bound)));
    let problem = bound.problem();
    let [own, sums] = rules(bound, true);
    let q_rows = owned(bound, &pairs, &problem.q_shape(), problem.heads());
    let v_rows = owned(bound, &pairs, &problem.v_shape(), problem.value_heads());
    let gates = owned(bound, &pairs, &problem.gate_shape(), problem.value_heads());
    let states = owned_states(bound, &pairs);
    vec![
        judge("d_q", own, &got.d_q, &want.d_q, &plain.d_q, &q_rows),
        judge("d_k", own, &got.d_k, &want.d_k, &plain.d_k, &q_rows),
        judge("d_v", own, &got.d_v, &want.d_v, &plain.d_v, &v_rows),
        judge("d_g", sums, &got.d_g, &want.d_g, &plain.d_g, &gates),
        judge("d_beta", sums, &got.d_beta, &want.d_beta, &plain.d_beta, &gates),
        judge("d_initial_state", sums, &got.d_initial_state, &want.d_initial_state, &plain.d_initial_state, &states),
    ]
}
