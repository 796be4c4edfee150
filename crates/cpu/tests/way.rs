//! What `Way` tells of a call.

use fulgurite_core::expr::{batch, head, k, load, q};
use fulgurite_core::{DType, Mask, Problem, ProblemBuilder};
use fulgurite_cpu::{Isa, MaskForm, Options, Path, Way};

fn builder(tokens: usize) -> ProblemBuilder {
    Problem::builder().dense(2, tokens, tokens).heads(4, 2).head_dim(64)
}

fn way(builder: ProblemBuilder) -> Way {
    Way::of(&builder.build().unwrap(), &Options { isa: Some(Isa::Portable), ..Options::default() })
}

#[test]
fn paths_follow_the_number_of_queries() {
    // Two query heads share a key/value head: eight queries are sixteen rows.
    let queries = |n: usize| way(Problem::builder().dense(1, n, 600).heads(4, 2).head_dim(64)).path;
    assert_eq!([1, 8, 9].map(queries), [Path::Decode, Path::Decode, Path::Blocks]);
}

#[test]
fn masks_become_intervals_bits_or_nothing() {
    let keep = || load("keep", [batch(), k()]).differs(0);
    let padding = builder(300).mask(Mask::custom(keep())).aux("keep", DType::I32, &[2, 300]);
    let of_heads = builder(300).mask(Mask::custom((k() + head() - q()).at_most(3)));
    // 16384 tiles of queries and as many words as keys each, for two sequences.
    let large = builder(1 << 18).mask(Mask::custom(keep() | k().equals(q()))).aux("keep", DType::I32, &[2, 1 << 18]);
    assert_eq!(way(builder(300).mask(Mask::causal())).mask, MaskForm::Intervals);
    assert_eq!(way(padding).mask, MaskForm::Bits);
    assert_eq!(way(of_heads).mask, MaskForm::Evaluated);
    assert_eq!(way(large).mask, MaskForm::Evaluated);
}

#[test]
fn work_counts_what_intervals_keep() {
    let (full, causal) = (way(builder(100)), way(builder(100).mask(Mask::causal())));
    assert_eq!(full.scores, 2.0 * 4.0 * 100.0 * 100.0);
    assert_eq!(causal.scores, 2.0 * 4.0 * 100.0 * 101.0 / 2.0);
    assert_eq!(full.flops, 4.0 * 64.0 * full.scores);
    assert_eq!((full.cost(), causal.cost()), (1.0, 1.0));
}

#[test]
fn modifiers_cost_by_their_operations() {
    let row = builder(300).score_mod(fulgurite_core::expr::score() + load("row", [k()])).aux("row", DType::F32, &[300]);
    let [row, alibi, capped] =
        [way(row), way(builder(300).alibi()), way(builder(300).softcap(30.0))].map(|way| way.cost());
    assert!(1.0 < row && row <= alibi && alibi < capped && capped < 1.3, "{row} {alibi} {capped}");
    let text = way(builder(300).softcap(30.0)).to_string();
    assert!(text.contains("GFLOP in products; modifiers add") && text.contains(" of plain"), "{text}");
}
