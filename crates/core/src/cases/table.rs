//! The table of cases, and the endless random draw.

use super::Case;
use super::recipe::{Blocks, Logits, Operand, Poison, Recipe};
use crate::block::BlockSpec;
use crate::dtype::DType;
use crate::exp::Exp;
use crate::expr::{Expr, head, k, k_len, load, q, q_len, score, select};
use crate::format::GroupFormat;
use crate::mask::Mask;
use crate::precision::{Delta, GroupAttention, Precision};
use crate::problem::{Packed, Problem, ProblemBuilder};
use crate::random::Rng;

/// All features that the table covers; each name occurs in at least one case.
pub const FEATURES: &[&str] = &[
    "plain",
    "causal",
    "causal_top_left",
    "window",
    "empty_rows",
    "prefix",
    "documents",
    "alibi",
    "softcap",
    "bias",
    "sinks",
    "gqa",
    "odd_head_dim",
    "value_dim",
    "large_head_dim",
    "packed",
    "used_lengths",
    "block_mask",
    "score_mod",
    "mask_mod",
    "aux_gradient",
    "strided",
    "broadcast_d_o",
    "large_logits",
    "poison",
    "poison_masked",
    "hidden_nonfinite",
    "nan_rows",
    "empty_tensors",
    "exp",
    "d_lse",
    "decode",
    "int8",
    "nvfp4",
    "mxfp4",
    "mxfp8",
];

/// Features of the table that GPU engines do not support in both passes: kernels multiply the value of a hidden key by a weight
/// of 0, which keeps NaN, and gradients treat a row of NaN scores as one without keys. Outputs support `nan_rows`. CPU
/// engines support both.
pub const NOT_ON_GPU: &[&str] = &["hidden_nonfinite", "nan_rows"];

/// Seeds of random cases that failed at some time: long checks start with them.
///
/// 500649 is excluded: in bf16 its d_k of 96 elements is at 1.06 of the allowance on every engine, with equal bits. The
/// single sample of straightforward code that sets the allowance happens to be close to the truth there.
pub const SEEDS: &[u64] = &[386_055, 500_939];

/// A bias by relative position, from a table with a gradient and one row per head.
fn relative(builder: ProblemBuilder, heads: usize, reach: i32) -> ProblemBuilder {
    let distance = (q() + k_len() - q_len() - k()).max(-reach).min(reach) + reach;
    builder
        .aux_with_grad("relative", DType::F32, &[heads, 2 * reach as usize + 1])
        .score_mod(score() + load("relative", [head(), distance]))
}

/// Hides every fifth diagonal by its score.
fn holes() -> Expr {
    select(((q() * 7 + k() * 3) % 5).equals(0), f32::NEG_INFINITY, score() * 1.5)
}

/// A mask with a different pattern for each head.
fn comb() -> Mask {
    Mask::custom(((k() + q() * 2 + head()) % 3).differs(0))
}

fn sparse(rows: usize, cols: usize, batch: usize, heads: usize) -> BlockSpec {
    BlockSpec { rows, cols, batch, heads }
}

/// The table for one type of q, k and v; small enough for every test run.
pub fn cases(dtype: DType) -> Vec<Case> {
    let base =
        |batch, q_len, k_len| Problem::builder().dense(batch, q_len, k_len).heads(2, 1).head_dim(64).dtype(dtype);
    let small = |q_len, k_len| base(1, q_len, k_len).head_dim(32);
    let packed = || Problem::builder().heads(4, 2).head_dim(32).dtype(dtype);
    let case = |name: &str, features: &[&'static str], builder| Recipe::new(name, features, builder);
    let ninf = f64::NEG_INFINITY;
    let mut table = vec![
        case("one by one", &["plain"], base(1, 1, 1)),
        case("square", &["plain"], base(2, 64, 64)),
        case("tall", &["plain"], base(1, 113, 3)),
        case("wide", &["plain"], base(1, 67, 203)),
        case("beyond a tile", &["plain"], base(1, 130, 257)),
        case("causal", &["causal"], base(2, 129, 129).mask(Mask::causal())),
        case("causal, more keys", &["causal"], base(1, 65, 130).mask(Mask::causal())),
        case("causal, more queries", &["causal", "empty_rows"], base(1, 140, 60).mask(Mask::causal())),
        case("causal top-left", &["causal_top_left"], small(70, 100).mask(Mask::causal_top_left())),
        case("causal top-left, more queries", &["causal_top_left"], small(100, 33).mask(Mask::causal_top_left())),
        case("window 20, 10", &["window"], small(150, 150).mask(Mask::window(20, 10))),
        case("window left", &["window", "causal"], small(120, 200).mask(Mask::causal()).mask(Mask::window(33, None))),
        case("window right", &["window"], small(90, 140).mask(Mask::window(None, 17))),
        case("window left of the diagonal", &["window", "empty_rows"], small(100, 100).mask(Mask::window(None, -9))),
        case("window right of the diagonal", &["window", "empty_rows"], small(100, 100).mask(Mask::window(-9, 40))),
        case("window of nothing", &["window", "empty_rows"], small(20, 70).mask(Mask::window(-9, -20))),
        case("prefix", &["prefix"], base(3, 80, 90).head_dim(16).mask(Mask::prefix())),
        case("documents", &["documents"], base(2, 100, 100).head_dim(16).mask(Mask::documents())),
        case(
            "documents, causal",
            &["documents", "causal"],
            small(130, 130).mask(Mask::documents()).mask(Mask::causal()),
        ),
        case("alibi", &["alibi"], small(70, 90).heads(4, 2).alibi()),
        case("alibi, causal", &["alibi", "causal"], small(70, 70).heads(4, 4).alibi().mask(Mask::causal())),
        case("softcap", &["softcap"], base(1, 70, 90).softcap(15.0)).q_sigma(15.0 / 4.0),
        // Rows that take most of a GPU's registers, and more keys than a tile has.
        case(
            "softcap, causal, long rows",
            &["softcap", "causal"],
            base(1, 90, 150).heads(2, 1).head_dim(128).softcap(9.0).mask(Mask::causal()),
        )
        .q_sigma(2.0),
        case(
            "softcap, alibi, window, long rows",
            &["softcap", "alibi", "window"],
            base(1, 70, 140).heads(2, 2).head_dim(104).softcap(5.0).alibi().mask(Mask::window(60, 5)),
        ),
        case(
            "documents, long rows",
            &["documents"],
            base(2, 66, 131).heads(1, 1).head_dims(96, 128).mask(Mask::documents()),
        ),
        case(
            "softcap, alibi, causal",
            &["softcap", "alibi", "causal"],
            small(90, 90).softcap(5.0).alibi().mask(Mask::causal()),
        )
        .q_sigma(2.0),
        case(
            "bias, full",
            &["bias", "aux_gradient"],
            base(2, 30, 40).head_dim(16).bias([2, 2, 30, 40], DType::F32, true),
        ),
        case("bias, shared", &["bias", "aux_gradient"], base(2, 30, 40).head_dim(16).bias([1, 1, 30, 40], dtype, true)),
        case(
            "bias of keys",
            &["bias", "aux_gradient"],
            base(2, 30, 40).head_dim(16).bias([2, 1, 1, 40], DType::F32, true),
        ),
        case(
            "bias of heads",
            &["bias", "aux_gradient"],
            base(2, 30, 40).head_dim(16).bias([1, 2, 30, 1], DType::F32, true),
        ),
        case("bias without gradient", &["bias"], base(1, 65, 66).bias([1, 2, 65, 66], dtype, false)),
        case("sinks", &["sinks"], base(2, 66, 65).heads(4, 2).head_dim(32)).sinks(&[0.5, -1.0, 3.0, ninf]),
        case("large sink", &["sinks"], small(20, 70)).sinks(&[60.0, -60.0]),
        case("sinks, empty rows", &["sinks", "empty_rows"], small(90, 30).mask(Mask::causal())).sinks(&[0.7, ninf]),
        case(
            "sinks, window, softcap",
            &["sinks", "window", "softcap"],
            small(80, 80).softcap(8.0).mask(Mask::window(9, 0)),
        )
        .sinks(&[1.0, 2.0])
        .q_sigma(2.0),
        case("8 over 2", &["gqa"], base(1, 66, 70).heads(8, 2).head_dim(16)),
        case("5 over 1", &["gqa", "causal"], base(2, 40, 40).heads(5, 1).head_dim(16).mask(Mask::causal())),
        case("6 over 2", &["gqa"], base(1, 33, 47).heads(6, 2).head_dim(24)),
        case("head dim 1", &["odd_head_dim"], base(1, 30, 50).head_dim(1)),
        case("head dim 7", &["odd_head_dim"], base(1, 30, 50).head_dim(7)),
        case("head dim 40", &["odd_head_dim"], base(1, 30, 50).head_dim(40)),
        case("head dim 72", &["odd_head_dim"], base(1, 65, 70).head_dim(72).mask(Mask::causal())),
        case("head dim 96", &["odd_head_dim"], base(1, 65, 70).head_dim(96)),
        case("head dim 100", &["odd_head_dim"], base(1, 30, 70).head_dim(100)),
        case("head dim 128", &["plain"], base(1, 70, 130).head_dim(128)),
        case("head dims 192, 128", &["value_dim", "large_head_dim"], base(1, 66, 70).head_dims(192, 128)),
        case("head dims 64, 13", &["value_dim", "odd_head_dim"], base(1, 40, 50).head_dims(64, 13)),
        case("head dims 16, 256", &["value_dim", "large_head_dim"], base(1, 40, 50).head_dims(16, 256)),
        case("head dim 256", &["large_head_dim"], base(1, 50, 66).head_dim(256)),
        case("head dim 512", &["large_head_dim"], base(1, 20, 40).heads(1, 1).head_dim(512)),
        case("packed", &["packed", "gqa"], packed()).packed(&[30, 1, 65], &[30, 70, 20]),
        case("packed, causal, zero lengths", &["packed", "causal", "empty_rows"], packed().mask(Mask::causal()))
            .packed(&[0, 40, 0, 33, 5, 0], &[7, 40, 0, 60, 0, 0]),
        case(
            "packed, window, alibi, sinks",
            &["packed", "window", "alibi", "sinks"],
            packed().alibi().mask(Mask::window(15, 3)),
        )
        .packed(&[64, 0, 50], &[64, 9, 70])
        .sinks(&[0.1, 0.2, ninf, 1.5]),
        case(
            "packed, documents, bias",
            &["packed", "documents", "bias", "aux_gradient"],
            packed().mask(Mask::documents()).bias([3, 1, 1, 40], DType::F32, true),
        )
        .packed(&[20, 40, 7], &[40, 20, 11]),
        case("packed, used lengths", &["packed", "used_lengths", "poison"], packed().mask(Mask::causal()))
            .packed(&[30, 20, 40], &[35, 20, 66])
            .used(Some(&[30, 0, 33]), Some(&[20, 5, 0]))
            .poison(Poison::Padding),
        case("used keys", &["used_lengths", "poison"], base(4, 20, 70).head_dim(16))
            .used(None, Some(&[70, 0, 1, 33]))
            .poison(Poison::Padding),
        case("used queries", &["used_lengths", "poison"], base(3, 70, 40).head_dim(16))
            .used(Some(&[70, 0, 33]), None)
            .poison(Poison::Padding)
            .d_lse(),
        case(
            "used lengths, causal, sinks",
            &["used_lengths", "causal", "sinks", "poison"],
            base(3, 66, 80).head_dim(16).mask(Mask::causal()),
        )
        .used(Some(&[66, 1, 40]), Some(&[50, 80, 0]))
        .sinks(&[0.3, -0.4])
        .poison(Poison::Padding),
        case("blocks from causal", &["block_mask", "causal"], small(200, 250).mask(Mask::causal()))
            .blocks(Blocks::FromMask(sparse(48, 80, 1, 1))),
        case("blocks from a window", &["block_mask", "window"], small(200, 200).mask(Mask::window(40, 3)))
            .blocks(Blocks::FromMask(sparse(64, 32, 1, 2))),
        case(
            "blocks from documents",
            &["block_mask", "documents"],
            base(2, 100, 130).head_dim(16).mask(Mask::documents()),
        )
        .blocks(Blocks::FromMask(sparse(16, 16, 2, 1))),
        case("given blocks", &["block_mask"], small(150, 210)).blocks(Blocks::Drawn(sparse(32, 64, 1, 1))),
        case(
            "given blocks for each head, mask inside",
            &["block_mask", "mask_mod"],
            base(2, 90, 120).head_dim(16).mask(comb()),
        )
        .blocks(Blocks::Drawn(sparse(17, 23, 2, 2))),
        case("given blocks, packed, sinks", &["block_mask", "packed", "sinks"], packed().mask(Mask::causal()))
            .packed(&[50, 0, 70], &[60, 20, 90])
            .blocks(Blocks::Drawn(sparse(16, 32, 3, 4)))
            .sinks(&[0.0, 1.0, -1.0, ninf]),
        case("relative position", &["score_mod", "aux_gradient"], relative(small(60, 70), 2, 9)),
        case(
            "relative position, causal, 4 over 1",
            &["score_mod", "aux_gradient", "causal", "gqa"],
            relative(base(2, 50, 50).heads(4, 1).head_dim(8).mask(Mask::causal()), 4, 20),
        ),
        case(
            "score times a learnt factor",
            &["score_mod", "aux_gradient"],
            small(40, 50).aux_with_grad("factor", DType::F32, &[2]).score_mod(score() * load("factor", [head()])),
        ),
        case("holes by score", &["score_mod"], small(70, 66).score_mod(holes())),
        case(
            "holes by score, sinks, softcap",
            &["score_mod", "sinks", "softcap"],
            small(40, 66).softcap(4.0).score_mod(holes()),
        )
        .sinks(&[0.5, ninf]),
        case("mask of one's own", &["mask_mod"], base(1, 70, 80).heads(4, 2).head_dim(16).mask(comb())),
        case("mask of one's own, causal", &["mask_mod", "causal"], small(90, 90).mask(comb()).mask(Mask::causal())),
        case(
            "mask by a table",
            &["mask_mod"],
            small(40, 60).aux("keep", DType::I32, &[60]).mask(Mask::custom(load("keep", [k()]).more(0))),
        ),
        case("heads outside", &["strided"], base(2, 40, 50).heads(4, 2).head_dim(32)).heads_outside(),
        case(
            "heads outside, causal, 72",
            &["strided", "causal", "odd_head_dim"],
            base(2, 66, 66).head_dim(72).mask(Mask::causal()),
        )
        .heads_outside(),
        case("heads outside, packed", &["strided", "packed"], packed()).packed(&[20, 33], &[40, 9]).heads_outside(),
        case("flat d_o", &["broadcast_d_o"], base(2, 40, 50)).flat_d_o(),
        case("flat d_o, packed", &["broadcast_d_o", "packed"], packed()).packed(&[20, 33], &[40, 9]).flat_d_o(),
        case("a logit of 1000", &["large_logits"], base(1, 40, 200)).logits(Logits::Spike),
        case("graded logits", &["large_logits"], base(1, 40, 300)).logits(Logits::Slope(0.05)),
        case("maximum rises", &["large_logits"], base(1, 66, 300)).logits(Logits::Slope(0.8)),
        case("maximum rises, causal", &["large_logits", "causal"], base(1, 130, 130).mask(Mask::causal()))
            .logits(Logits::Slope(3.0)),
        case("maximum falls", &["large_logits"], base(1, 66, 300)).logits(Logits::Slope(-0.8)),
        case(
            "hidden keys hold NaN",
            &["poison_masked", "mask_mod"],
            base(1, 40, 60).head_dim(16).mask(Mask::custom((k() % 4).differs(1))),
        )
        .poison(Poison::Hidden),
        case(
            "keys past the diagonal hold NaN",
            &["poison_masked", "causal_top_left"],
            base(1, 40, 150).head_dim(16).mask(Mask::causal_top_left()),
        )
        .poison(Poison::Hidden),
        case("no sequences", &["empty_tensors"], base(0, 10, 10)),
        case("no queries", &["empty_tensors"], base(2, 0, 10)).sinks(&[0.5, 0.5]),
        case("no keys", &["empty_tensors", "empty_rows"], base(2, 10, 0)),
        case("no queries, bias", &["empty_tensors", "bias"], small(0, 10).bias([1, 2, 0, 10], dtype, true)),
        case("no queries, bias of keys", &["empty_tensors", "bias"], small(0, 10).bias([1, 2, 1, 10], dtype, true)),
        case("no queries, blocks", &["empty_tensors", "block_mask"], small(0, 70))
            .blocks(Blocks::Drawn(sparse(48, 80, 1, 1))),
        case(
            "no sequences, bias, sinks",
            &["empty_tensors", "bias", "sinks"],
            base(0, 5, 5).bias([1, 2, 5, 5], dtype, true),
        )
        .sinks(&[0.5, 0.5]),
        case(
            "nothing, bias of heads, sinks",
            &["empty_tensors", "bias", "sinks"],
            base(2, 0, 0).bias([1, 2, 1, 1], dtype, true),
        )
        .sinks(&[0.5, 0.5]),
        case("no keys, bias", &["empty_tensors", "empty_rows", "bias"], small(10, 0).bias([1, 2, 10, 0], dtype, true)),
        case("no keys, alibi", &["empty_tensors", "empty_rows", "alibi"], small(10, 0).alibi()),
        case("no keys, blocks", &["empty_tensors", "empty_rows", "block_mask"], small(70, 0))
            .blocks(Blocks::Drawn(sparse(64, 128, 1, 1))),
        case("no keys, odd blocks", &["empty_tensors", "empty_rows", "block_mask"], small(70, 0).mask(Mask::causal()))
            .blocks(Blocks::FromMask(sparse(48, 80, 1, 1))),
        case("no keys, sinks", &["empty_tensors", "empty_rows", "sinks"], base(2, 10, 0)).sinks(&[0.5, ninf]).d_lse(),
        case("d_lse", &["d_lse"], base(2, 50, 60)).d_lse(),
        case("d_lse, causal, sinks", &["d_lse", "causal", "sinks", "empty_rows"], small(66, 50).mask(Mask::causal()))
            .d_lse()
            .sinks(&[0.2, ninf]),
        case("decode, 8 over 2", &["decode", "gqa"], base(1, 1, 1500).heads(8, 2).mask(Mask::causal())),
        case("decode, 3 queries", &["decode", "gqa"], base(2, 3, 700).heads(8, 2).head_dim(32).mask(Mask::causal())),
        case(
            "decode, used keys",
            &["decode", "used_lengths", "gqa", "poison"],
            base(3, 1, 400).heads(4, 1).head_dim(32),
        )
        .used(None, Some(&[400, 1, 177]))
        .poison(Poison::Padding),
    ];
    for exp in ["native", "poly:3", "poly:3:0.25", "poly:4:0.5", "poly:5", "sas"] {
        let exp: Exp = exp.parse().expect("a name of an exponential");
        table.push(case(&format!("exp {exp}"), &["exp"], small(70, 140).exp(exp)));
        table.push(case(
            &format!("exp {exp}, causal"),
            &["exp", "causal"],
            small(66, 66).exp(exp).mask(Mask::causal()),
        ));
    }
    table.extend(quantised(dtype));
    table.extend(nonfinite(dtype));
    let rows_behind = Packed { batch: 2, total_q: 60, total_k: 70, max_q: 32, max_k: 40 };
    let mut behind = case("packed, rows behind the last", &["packed", "poison"], packed().packed_sizes(rows_behind))
        .poison(Poison::Padding);
    behind.cu_seqlens = Some([vec![0, 20, 50], vec![0, 33, 60]]);
    table.push(behind);
    // Each case has its own seed, so that adding one to the table changes no other.
    let build = |recipe: Recipe| {
        let seed = recipe.name.bytes().fold(0u64, |sum, b| sum.wrapping_mul(131).wrapping_add(u64::from(b)));
        recipe.build(&mut Rng::new(seed))
    };
    table.into_iter().map(build).collect()
}

/// Cases with quantised products: keys that end inside a block and a group, dimensions that no group divides.
fn quantised(dtype: DType) -> Vec<Recipe> {
    let with = |name: &str, features: &[&'static str], text: &str, builder: ProblemBuilder| {
        let precision = text.parse().expect("a name of a precision");
        Recipe::new(format!("{text}{name}"), features, builder.precision(precision).dtype(dtype))
    };
    let small = |q_len, k_len| Problem::builder().dense(1, q_len, k_len).heads(2, 1).head_dim(32);
    let rounded = GroupAttention { qk: None, pv: Some(GroupFormat::NVFP4), delta: Delta::Rounded };
    let packed = Problem::builder().heads(4, 2).head_dim(40);
    let sas: Exp = "sas".parse().expect("a name of an exponential");
    vec![
        with(", one by one", &["int8"], "int8", small(1, 1)),
        with(", 2 over 1", &["int8", "gqa"], "int8", small(70, 140)),
        with(
            ", causal, 72",
            &["int8", "causal", "odd_head_dim"],
            "int8:128",
            small(130, 300).head_dim(72).mask(Mask::causal()),
        ),
        with(", sas, window", &["int8", "exp", "window"], "int8", small(66, 90).exp(sas).mask(Mask::window(30, 9))),
        with(", softcap, sinks", &["int8", "softcap", "sinks"], "int8", small(40, 70).softcap(5.0)).sinks(&[0.5, -1.0]),
        with(", packed", &["int8", "packed"], "int8", packed.clone()).packed(&[30, 0, 65], &[30, 7, 80]),
        with(", used keys", &["int8", "used_lengths", "poison"], "int8", small(20, 100).dense(2, 20, 100))
            .used(None, Some(&[70, 100]))
            .poison(Poison::Padding),
        with(", causal", &["nvfp4", "causal"], "nvfp4", small(70, 70).mask(Mask::causal())),
        with(", packed, 40", &["nvfp4", "packed", "odd_head_dim"], "nvfp4", packed).packed(&[30, 0, 65], &[30, 7, 80]),
        with(
            ", window, heads outside",
            &["nvfp4", "window", "strided"],
            "nvfp4",
            small(60, 90).mask(Mask::window(20, 10)),
        )
        .heads_outside(),
        with(", d_lse", &["nvfp4", "d_lse"], "nvfp4/native", small(50, 60)).d_lse(),
        Recipe::new(
            "native/nvfp4, D of rounded weights",
            &["nvfp4"],
            small(50, 77).dtype(dtype).precision(Precision::Groups(rounded)),
        ),
        with(", 13", &["mxfp4", "value_dim"], "mxfp4", small(66, 140).head_dims(64, 13)),
        with(", causal", &["mxfp8", "causal"], "mxfp8", small(66, 130).mask(Mask::causal())),
        with(", alibi", &["mxfp8", "nvfp4", "alibi"], "nvfp4/mxfp8", small(40, 80).alibi()),
    ]
}

/// Cases with NaN and infinities in rows that are partly hidden, and in rows of q: each tensor under each way to hide a
/// key.
fn nonfinite(dtype: DType) -> Vec<Recipe> {
    let small = |q_len, k_len| Problem::builder().dense(1, q_len, k_len).heads(2, 1).head_dim(32).dtype(dtype);
    let packed = || Problem::builder().heads(4, 2).head_dim(32).dtype(dtype);
    let recipe = |name: &str, builder: ProblemBuilder| Recipe::new(name, &[], builder);
    let masks = || {
        vec![
            recipe("causal", small(150, 150).mask(Mask::causal())),
            recipe("causal, more queries", small(90, 50).mask(Mask::causal())).sinks(&[0.5, f64::NEG_INFINITY]),
            recipe("window", small(150, 300).mask(Mask::window(40, 7))),
            recipe("prefix", small(90, 90).dense(2, 90, 90).mask(Mask::prefix())),
            recipe("documents", small(140, 140).mask(Mask::documents())),
            recipe("used lengths", small(70, 80).dense(2, 70, 80).mask(Mask::causal()))
                .used(Some(&[70, 33]), Some(&[50, 80])),
            recipe("packed", packed().mask(Mask::causal())).packed(&[30, 0, 65, 1], &[30, 7, 80, 40]),
            recipe("blocks", small(150, 210)).blocks(Blocks::Drawn(sparse(32, 64, 1, 2))),
            recipe("mask of one's own", small(70, 80).heads(4, 2).mask(comb())),
            recipe("holes by score", small(70, 66).score_mod(holes())),
            recipe("softcap", small(70, 90).softcap(9.0).mask(Mask::causal())),
            recipe("few queries", small(3, 700).heads(8, 2).mask(Mask::causal())),
            recipe("few queries, mask of one's own", small(2, 90).heads(8, 2).mask(comb())),
        ]
    };
    let mut table = Vec::new();
    for operand in Operand::ALL {
        for mut recipe in masks() {
            recipe.name = format!("non-finite {}, {}", operand.name(), recipe.name);
            recipe.features = vec!["hidden_nonfinite"];
            table.push(recipe.poison(Poison::Denied(operand)));
        }
    }
    for mut recipe in masks().into_iter().chain([recipe("plain", small(70, 90)), recipe("one query", small(1, 90))]) {
        recipe.name = format!("NaN rows, {}", recipe.name);
        recipe.features = vec!["nan_rows"];
        table.push(recipe.poison(Poison::Rows));
    }
    table
}

/// A random mixture of shapes and features, determined by `seed`.
pub fn random(seed: u64, dtype: DType) -> Case {
    let rng = &mut Rng::new(seed);
    mixture(seed, dtype, rng).build(rng)
}

/// A random mixture with NaN and infinities in rows that are partly hidden, or in rows of q.
pub fn random_nonfinite(seed: u64, dtype: DType) -> Case {
    let rng = &mut Rng::new(seed);
    let mut recipe = mixture(seed, dtype, rng);
    let choice = rng.range(0..5);
    let (poison, feature) = match Operand::ALL.get(choice) {
        Some(&operand) => (Poison::Denied(operand), "hidden_nonfinite"),
        None => (Poison::Rows, "nan_rows"),
    };
    recipe.name = format!("random non-finite {seed}");
    recipe.features.push(feature);
    recipe.poison(poison).build(rng)
}

fn mixture(seed: u64, dtype: DType, rng: &mut Rng) -> Recipe {
    let mut features = Vec::new();
    let dims = [1, 7, 8, 16, 40, 64, 72, 80, 96, 128, 192, 256];
    let (kv_heads, group) = (rng.range(1..3), rng.pick(&[1, 1, 2, 3, 5, 8]));
    let heads = kv_heads * group;
    let head_dim = rng.pick(&dims);
    let value_dim = if rng.chance(0.2) { rng.pick(&dims) } else { head_dim };
    let length = |rng: &mut Rng| if rng.chance(0.2) { rng.range(1..9) } else { rng.range(1..301) };
    let batch = rng.range(1..4);
    let mut builder = Problem::builder().heads(heads, kv_heads).head_dims(head_dim, value_dim).dtype(dtype);
    if group > 1 {
        features.push("gqa");
    }
    if value_dim != head_dim {
        features.push("value_dim");
    }
    let is_packed = rng.chance(0.3);
    let lens = |rng: &mut Rng, zero: f64| -> Vec<usize> {
        let one = length(rng);
        (0..batch)
            .map(|_| {
                if !is_packed {
                    one
                } else if rng.chance(zero) {
                    0
                } else {
                    length(rng)
                }
            })
            .collect()
    };
    let (q_lens, k_lens) = (lens(rng, 0.15), lens(rng, 0.15));
    let (max_q, max_k) = (q_lens.iter().max().map_or(0, |&n| n), k_lens.iter().max().map_or(0, |&n| n));
    for _ in 0..rng.range(0..3) {
        let side = |rng: &mut Rng| rng.chance(0.7).then(|| rng.range(0..120) as i64 - 10);
        let (feature, mask) = match rng.range(0..6) {
            0 | 1 => ("causal", Mask::causal()),
            2 => ("causal_top_left", Mask::causal_top_left()),
            3 => ("window", Mask::window(side(rng), side(rng))),
            4 if !features.contains(&"prefix") => ("prefix", Mask::prefix()),
            5 if max_q > 0 && max_k > 0 => ("documents", Mask::documents()),
            _ => ("mask_mod", comb()),
        };
        builder = builder.mask(mask);
        features.push(feature);
    }
    let mut q_sigma = rng.pick(&[0.5, 1.0, 1.0, 2.0]);
    if rng.chance(0.2) {
        builder = builder.softcap(10.0);
        q_sigma = 10.0 / 4.0;
        features.push("softcap");
    }
    if rng.chance(0.2) {
        builder = builder.alibi();
        features.push("alibi");
    }
    if rng.chance(0.2) {
        let mut axis = |full: usize| if rng.chance(0.5) { 1 } else { full };
        let shape = [axis(batch), axis(heads), axis(max_q), axis(max_k)];
        if shape.iter().all(|&n| n > 0) {
            builder = builder.bias(shape, rng.pick(&[DType::F32, dtype]), rng.chance(0.7));
            features.push("bias");
        }
    }
    match rng.range(0..10) {
        0 => builder = relative(builder, heads, 12),
        1 => builder = builder.score_mod(holes()),
        _ => {}
    }
    let forced = ["native", "poly:3:0.5", "poly:4", "poly:5"];
    if rng.chance(0.2) {
        builder = builder.exp(rng.pick(&forced).parse().expect("a name of an exponential"));
        features.push("exp");
    }
    if !is_packed {
        builder = builder.dense(batch, q_lens[0], k_lens[0]);
    }
    let mut recipe = Recipe::new(format!("random {seed}"), &features, builder).q_sigma(q_sigma);
    if is_packed {
        recipe = recipe.packed(&q_lens, &k_lens);
        recipe.features.push("packed");
    }
    if rng.chance(0.2) {
        let mut used = |lens: &[usize]| -> Option<Vec<i32>> {
            rng.chance(0.7).then(|| lens.iter().map(|&n| rng.range(0..n + 1) as i32).collect())
        };
        let (used_q, used_k) = (used(&q_lens), used(&k_lens));
        recipe = recipe.used(used_q.as_deref(), used_k.as_deref()).poison(Poison::Padding);
        recipe.features.extend(["used_lengths", "poison"]);
    }
    if rng.chance(0.2) {
        let sinks: Vec<f64> =
            (0..heads).map(|_| if rng.chance(0.2) { f64::NEG_INFINITY } else { rng.normal() * 2.0 }).collect();
        recipe = recipe.sinks(&sinks);
        recipe.features.push("sinks");
    }
    if rng.chance(0.2) {
        let spec = sparse(rng.range(8..100), rng.range(8..100), rng.pick(&[1, batch]), rng.pick(&[1, heads]));
        recipe = recipe.blocks(if rng.chance(0.5) { Blocks::FromMask(spec) } else { Blocks::Drawn(spec) });
        recipe.features.push("block_mask");
    }
    if rng.chance(0.15) {
        recipe = recipe.heads_outside();
        recipe.features.push("strided");
    }
    if rng.chance(0.1) {
        recipe = recipe.flat_d_o();
        recipe.features.push("broadcast_d_o");
    }
    if rng.chance(0.2) {
        recipe = recipe.d_lse();
        recipe.features.push("d_lse");
    }
    recipe
}
