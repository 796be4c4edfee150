//! The table of cases.

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

/// Features of cases with NaN and infinities in rows that some other row sees, or that see nothing else.
pub const NONFINITE: &[&str] = &["hidden_nonfinite", "nan_rows"];

/// A bias by relative position, from a table with a gradient and one row per head.
pub(super) fn relative(builder: ProblemBuilder, heads: usize, reach: i32) -> ProblemBuilder {
    let distance = (q() + k_len() - q_len() - k()).max(-reach).min(reach) + reach;
    builder
        .aux_with_grad("relative", DType::F32, &[heads, 2 * reach as usize + 1])
        .score_mod(score() + load("relative", [head(), distance]))
}

/// Hides every fifth diagonal by its score.
pub(super) fn holes() -> Expr {
    select(((q() * 7 + k() * 3) % 5).equals(0), f32::NEG_INFINITY, score() * 1.5)
}

/// A mask with a different pattern for each head.
pub(super) fn comb() -> Mask {
    Mask::custom(((k() + q() * 2 + head()) % 3).differs(0))
}

pub(super) fn sparse(rows: usize, cols: usize, batch: usize, heads: usize) -> BlockSpec {
    BlockSpec { rows, cols, batch, heads }
}

/// Builders of small problems for one type of q, k and v.
#[derive(Clone, Copy)]
struct Builders {
    dtype: DType,
}

impl Builders {
    /// Two query heads over one key/value head of 64 elements.
    fn base(self, batch: usize, q_len: usize, k_len: usize) -> ProblemBuilder {
        Problem::builder().dense(batch, q_len, k_len).heads(2, 1).head_dim(64).dtype(self.dtype)
    }

    /// One sequence of heads with 32 elements.
    fn small(self, q_len: usize, k_len: usize) -> ProblemBuilder {
        self.base(1, q_len, k_len).head_dim(32)
    }

    /// Four query heads over two key/value heads, without lengths yet.
    fn packed(self) -> ProblemBuilder {
        Problem::builder().heads(4, 2).head_dim(32).dtype(self.dtype)
    }
}

/// The logit of a sink that takes no weight.
const NO_SINK: f64 = f64::NEG_INFINITY;

fn case(name: &str, features: &[&'static str], builder: ProblemBuilder) -> Recipe {
    Recipe::new(name, features, builder)
}

/// The table for one type of q, k and v; small enough for every test run.
pub fn cases(dtype: DType) -> Vec<Case> {
    let given = Builders { dtype };
    let groups: [fn(Builders) -> Vec<Recipe>; 8] = [
        lengths_and_masks,
        score_terms,
        heads_and_dims,
        lengths_of_sequences,
        blocks_and_expressions,
        strides_and_values,
        empty_tensors,
        lse_gradients_and_decode,
    ];
    let mut table: Vec<Recipe> = groups.into_iter().flat_map(|group| group(given)).collect();
    for exp in ["native", "poly:3", "poly:3:0.25", "poly:4:0.5", "poly:5", "sas", "sas:online"] {
        let exp: Exp = exp.parse().expect("a name of an exponential");
        table.push(case(&format!("exp {exp}"), &["exp"], given.small(70, 140).exp(exp)));
        table.push(case(
            &format!("exp {exp}, causal"),
            &["exp", "causal"],
            given.small(66, 66).exp(exp).mask(Mask::causal()),
        ));
    }
    table.extend(quantised(dtype));
    table.extend(nonfinite(dtype));
    let rows_behind = Packed { batch: 2, total_q: 60, total_k: 70, max_q: 32, max_k: 40 };
    let mut behind =
        case("packed, rows behind the last", &["packed", "poison"], given.packed().packed_sizes(rows_behind))
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

/// Lengths around the tiles, and each kind of mask.
fn lengths_and_masks(given: Builders) -> Vec<Recipe> {
    vec![
        case("one by one", &["plain"], given.base(1, 1, 1)),
        case("square", &["plain"], given.base(2, 64, 64)),
        case("tall", &["plain"], given.base(1, 113, 3)),
        case("wide", &["plain"], given.base(1, 67, 203)),
        case("beyond a tile", &["plain"], given.base(1, 130, 257)),
        case("causal", &["causal"], given.base(2, 129, 129).mask(Mask::causal())),
        case("causal, more keys", &["causal"], given.base(1, 65, 130).mask(Mask::causal())),
        case("causal, more queries", &["causal", "empty_rows"], given.base(1, 140, 60).mask(Mask::causal())),
        case("causal top-left", &["causal_top_left"], given.small(70, 100).mask(Mask::causal_top_left())),
        case("causal top-left, more queries", &["causal_top_left"], given.small(100, 33).mask(Mask::causal_top_left())),
        case("window 20, 10", &["window"], given.small(150, 150).mask(Mask::window(20, 10))),
        case(
            "window left",
            &["window", "causal"],
            given.small(120, 200).mask(Mask::causal()).mask(Mask::window(33, None)),
        ),
        case("window right", &["window"], given.small(90, 140).mask(Mask::window(None, 17))),
        case(
            "window left of the diagonal",
            &["window", "empty_rows"],
            given.small(100, 100).mask(Mask::window(None, -9)),
        ),
        case(
            "window right of the diagonal",
            &["window", "empty_rows"],
            given.small(100, 100).mask(Mask::window(-9, 40)),
        ),
        case("window of nothing", &["window", "empty_rows"], given.small(20, 70).mask(Mask::window(-9, -20))),
        case("prefix", &["prefix"], given.base(3, 80, 90).head_dim(16).mask(Mask::prefix())),
        case("documents", &["documents"], given.base(2, 100, 100).head_dim(16).mask(Mask::documents())),
        case(
            "documents, causal",
            &["documents", "causal"],
            given.small(130, 130).mask(Mask::documents()).mask(Mask::causal()),
        ),
    ]
}

/// Terms of a score: ALiBi, softcap, biases; and sinks.
fn score_terms(given: Builders) -> Vec<Recipe> {
    vec![
        case("alibi", &["alibi"], given.small(70, 90).heads(4, 2).alibi()),
        case("alibi, causal", &["alibi", "causal"], given.small(70, 70).heads(4, 4).alibi().mask(Mask::causal())),
        case("softcap", &["softcap"], given.base(1, 70, 90).softcap(15.0)).q_sigma(15.0 / 4.0),
        // Rows that take most of a GPU's registers, and more keys than a tile has.
        case(
            "softcap, causal, long rows",
            &["softcap", "causal"],
            given.base(1, 90, 150).heads(2, 1).head_dim(128).softcap(9.0).mask(Mask::causal()),
        )
        .q_sigma(2.0),
        case(
            "softcap, alibi, window, long rows",
            &["softcap", "alibi", "window"],
            given.base(1, 70, 140).heads(2, 2).head_dim(104).softcap(5.0).alibi().mask(Mask::window(60, 5)),
        ),
        case(
            "documents, long rows",
            &["documents"],
            given.base(2, 66, 131).heads(1, 1).head_dims(96, 128).mask(Mask::documents()),
        ),
        case(
            "softcap, alibi, causal",
            &["softcap", "alibi", "causal"],
            given.small(90, 90).softcap(5.0).alibi().mask(Mask::causal()),
        )
        .q_sigma(2.0),
        case(
            "bias, full",
            &["bias", "aux_gradient"],
            given.base(2, 30, 40).head_dim(16).bias([2, 2, 30, 40], DType::F32, true),
        ),
        case(
            "bias, shared",
            &["bias", "aux_gradient"],
            given.base(2, 30, 40).head_dim(16).bias([1, 1, 30, 40], given.dtype, true),
        ),
        case(
            "bias of keys",
            &["bias", "aux_gradient"],
            given.base(2, 30, 40).head_dim(16).bias([2, 1, 1, 40], DType::F32, true),
        ),
        case(
            "bias of heads",
            &["bias", "aux_gradient"],
            given.base(2, 30, 40).head_dim(16).bias([1, 2, 30, 1], DType::F32, true),
        ),
        case("bias without gradient", &["bias"], given.base(1, 65, 66).bias([1, 2, 65, 66], given.dtype, false)),
        case("sinks", &["sinks"], given.base(2, 66, 65).heads(4, 2).head_dim(32)).sinks(&[0.5, -1.0, 3.0, NO_SINK]),
        case("large sink", &["sinks"], given.small(20, 70)).sinks(&[60.0, -60.0]),
        case("sinks, empty rows", &["sinks", "empty_rows"], given.small(90, 30).mask(Mask::causal()))
            .sinks(&[0.7, NO_SINK]),
        case(
            "sinks, window, softcap",
            &["sinks", "window", "softcap"],
            given.small(80, 80).softcap(8.0).mask(Mask::window(9, 0)),
        )
        .sinks(&[1.0, 2.0])
        .q_sigma(2.0),
    ]
}

/// Grouped heads, and head dimensions.
fn heads_and_dims(given: Builders) -> Vec<Recipe> {
    vec![
        case("8 over 2", &["gqa"], given.base(1, 66, 70).heads(8, 2).head_dim(16)),
        case("5 over 1", &["gqa", "causal"], given.base(2, 40, 40).heads(5, 1).head_dim(16).mask(Mask::causal())),
        case("6 over 2", &["gqa"], given.base(1, 33, 47).heads(6, 2).head_dim(24)),
        case("head dim 1", &["odd_head_dim"], given.base(1, 30, 50).head_dim(1)),
        case("head dim 7", &["odd_head_dim"], given.base(1, 30, 50).head_dim(7)),
        case("head dim 40", &["odd_head_dim"], given.base(1, 30, 50).head_dim(40)),
        case("head dim 72", &["odd_head_dim"], given.base(1, 65, 70).head_dim(72).mask(Mask::causal())),
        case("head dim 96", &["odd_head_dim"], given.base(1, 65, 70).head_dim(96)),
        case("head dim 100", &["odd_head_dim"], given.base(1, 30, 70).head_dim(100)),
        case("head dim 128", &["plain"], given.base(1, 70, 130).head_dim(128)),
        case("head dims 192, 128", &["value_dim", "large_head_dim"], given.base(1, 66, 70).head_dims(192, 128)),
        case("head dims 64, 13", &["value_dim", "odd_head_dim"], given.base(1, 40, 50).head_dims(64, 13)),
        case("head dims 16, 256", &["value_dim", "large_head_dim"], given.base(1, 40, 50).head_dims(16, 256)),
        case("head dim 256", &["large_head_dim"], given.base(1, 50, 66).head_dim(256)),
        case("head dim 512", &["large_head_dim"], given.base(1, 20, 40).heads(1, 1).head_dim(512)),
    ]
}

/// Packed sequences, and lengths that are used of padded ones.
fn lengths_of_sequences(given: Builders) -> Vec<Recipe> {
    vec![
        case("packed", &["packed", "gqa"], given.packed()).packed(&[30, 1, 65], &[30, 70, 20]),
        case("packed, causal, zero lengths", &["packed", "causal", "empty_rows"], given.packed().mask(Mask::causal()))
            .packed(&[0, 40, 0, 33, 5, 0], &[7, 40, 0, 60, 0, 0]),
        case(
            "packed, window, alibi, sinks",
            &["packed", "window", "alibi", "sinks"],
            given.packed().alibi().mask(Mask::window(15, 3)),
        )
        .packed(&[64, 0, 50], &[64, 9, 70])
        .sinks(&[0.1, 0.2, NO_SINK, 1.5]),
        case(
            "packed, documents, bias",
            &["packed", "documents", "bias", "aux_gradient"],
            given.packed().mask(Mask::documents()).bias([3, 1, 1, 40], DType::F32, true),
        )
        .packed(&[20, 40, 7], &[40, 20, 11]),
        case("packed, used lengths", &["packed", "used_lengths", "poison"], given.packed().mask(Mask::causal()))
            .packed(&[30, 20, 40], &[35, 20, 66])
            .used(Some(&[30, 0, 33]), Some(&[20, 5, 0]))
            .poison(Poison::Padding),
        case("used keys", &["used_lengths", "poison"], given.base(4, 20, 70).head_dim(16))
            .used(None, Some(&[70, 0, 1, 33]))
            .poison(Poison::Padding),
        case("used queries", &["used_lengths", "poison"], given.base(3, 70, 40).head_dim(16))
            .used(Some(&[70, 0, 33]), None)
            .poison(Poison::Padding)
            .d_lse(),
        case(
            "used lengths, causal, sinks",
            &["used_lengths", "causal", "sinks", "poison"],
            given.base(3, 66, 80).head_dim(16).mask(Mask::causal()),
        )
        .used(Some(&[66, 1, 40]), Some(&[50, 80, 0]))
        .sinks(&[0.3, -0.4])
        .poison(Poison::Padding),
    ]
}

/// Block masks, and scores and masks by expressions.
fn blocks_and_expressions(given: Builders) -> Vec<Recipe> {
    vec![
        case("blocks from causal", &["block_mask", "causal"], given.small(200, 250).mask(Mask::causal()))
            .blocks(Blocks::FromMask(sparse(48, 80, 1, 1))),
        case("blocks from a window", &["block_mask", "window"], given.small(200, 200).mask(Mask::window(40, 3)))
            .blocks(Blocks::FromMask(sparse(64, 32, 1, 2))),
        case(
            "blocks from documents",
            &["block_mask", "documents"],
            given.base(2, 100, 130).head_dim(16).mask(Mask::documents()),
        )
        .blocks(Blocks::FromMask(sparse(16, 16, 2, 1))),
        case("given blocks", &["block_mask"], given.small(150, 210)).blocks(Blocks::Drawn(sparse(32, 64, 1, 1))),
        case(
            "given blocks for each head, mask inside",
            &["block_mask", "mask_mod"],
            given.base(2, 90, 120).head_dim(16).mask(comb()),
        )
        .blocks(Blocks::Drawn(sparse(17, 23, 2, 2))),
        case("given blocks, packed, sinks", &["block_mask", "packed", "sinks"], given.packed().mask(Mask::causal()))
            .packed(&[50, 0, 70], &[60, 20, 90])
            .blocks(Blocks::Drawn(sparse(16, 32, 3, 4)))
            .sinks(&[0.0, 1.0, -1.0, NO_SINK]),
        case("relative position", &["score_mod", "aux_gradient"], relative(given.small(60, 70), 2, 9)),
        case(
            "relative position, causal, 4 over 1",
            &["score_mod", "aux_gradient", "causal", "gqa"],
            relative(given.base(2, 50, 50).heads(4, 1).head_dim(8).mask(Mask::causal()), 4, 20),
        ),
        case(
            "score times a learnt factor",
            &["score_mod", "aux_gradient"],
            given.small(40, 50).aux_with_grad("factor", DType::F32, &[2]).score_mod(score() * load("factor", [head()])),
        ),
        case("holes by score", &["score_mod"], given.small(70, 66).score_mod(holes())),
        case(
            "holes by score, sinks, softcap",
            &["score_mod", "sinks", "softcap"],
            given.small(40, 66).softcap(4.0).score_mod(holes()),
        )
        .sinks(&[0.5, NO_SINK]),
        case("mask of one's own", &["mask_mod"], given.base(1, 70, 80).heads(4, 2).head_dim(16).mask(comb())),
        case(
            "mask of one's own, causal",
            &["mask_mod", "causal"],
            given.small(90, 90).mask(comb()).mask(Mask::causal()),
        ),
        case(
            "mask by a table",
            &["mask_mod"],
            given.small(40, 60).aux("keep", DType::I32, &[60]).mask(Mask::custom(load("keep", [k()]).more(0))),
        ),
    ]
}

/// Strides, large logits, and NaN where nothing may read it.
fn strides_and_values(given: Builders) -> Vec<Recipe> {
    vec![
        case("heads outside", &["strided"], given.base(2, 40, 50).heads(4, 2).head_dim(32)).heads_outside(),
        case(
            "heads outside, causal, 72",
            &["strided", "causal", "odd_head_dim"],
            given.base(2, 66, 66).head_dim(72).mask(Mask::causal()),
        )
        .heads_outside(),
        case("heads outside, packed", &["strided", "packed"], given.packed())
            .packed(&[20, 33], &[40, 9])
            .heads_outside(),
        case("flat d_o", &["broadcast_d_o"], given.base(2, 40, 50)).flat_d_o(),
        case("flat d_o, packed", &["broadcast_d_o", "packed"], given.packed()).packed(&[20, 33], &[40, 9]).flat_d_o(),
        case("a logit of 1000", &["large_logits"], given.base(1, 40, 200)).logits(Logits::Spike),
        case("graded logits", &["large_logits"], given.base(1, 40, 300)).logits(Logits::Slope(0.05)),
        case("maximum rises", &["large_logits"], given.base(1, 66, 300)).logits(Logits::Slope(0.8)),
        case("maximum rises, causal", &["large_logits", "causal"], given.base(1, 130, 130).mask(Mask::causal()))
            .logits(Logits::Slope(3.0)),
        case("maximum falls", &["large_logits"], given.base(1, 66, 300)).logits(Logits::Slope(-0.8)),
        case(
            "hidden keys hold NaN",
            &["poison_masked", "mask_mod"],
            given.base(1, 40, 60).head_dim(16).mask(Mask::custom((k() % 4).differs(1))),
        )
        .poison(Poison::Hidden),
        case(
            "keys past the diagonal hold NaN",
            &["poison_masked", "causal_top_left"],
            given.base(1, 40, 150).head_dim(16).mask(Mask::causal_top_left()),
        )
        .poison(Poison::Hidden),
    ]
}

/// No sequences, no queries, no keys.
fn empty_tensors(given: Builders) -> Vec<Recipe> {
    vec![
        case("no sequences", &["empty_tensors"], given.base(0, 10, 10)),
        case("no queries", &["empty_tensors"], given.base(2, 0, 10)).sinks(&[0.5, 0.5]),
        case("no keys", &["empty_tensors", "empty_rows"], given.base(2, 10, 0)),
        case("no queries, bias", &["empty_tensors", "bias"], given.small(0, 10).bias([1, 2, 0, 10], given.dtype, true)),
        case(
            "no queries, bias of keys",
            &["empty_tensors", "bias"],
            given.small(0, 10).bias([1, 2, 1, 10], given.dtype, true),
        ),
        case("no queries, blocks", &["empty_tensors", "block_mask"], given.small(0, 70))
            .blocks(Blocks::Drawn(sparse(48, 80, 1, 1))),
        case(
            "no sequences, bias, sinks",
            &["empty_tensors", "bias", "sinks"],
            given.base(0, 5, 5).bias([1, 2, 5, 5], given.dtype, true),
        )
        .sinks(&[0.5, 0.5]),
        case(
            "nothing, bias of heads, sinks",
            &["empty_tensors", "bias", "sinks"],
            given.base(2, 0, 0).bias([1, 2, 1, 1], given.dtype, true),
        )
        .sinks(&[0.5, 0.5]),
        case(
            "no keys, bias",
            &["empty_tensors", "empty_rows", "bias"],
            given.small(10, 0).bias([1, 2, 10, 0], given.dtype, true),
        ),
        case("no keys, alibi", &["empty_tensors", "empty_rows", "alibi"], given.small(10, 0).alibi()),
        case("no keys, blocks", &["empty_tensors", "empty_rows", "block_mask"], given.small(70, 0))
            .blocks(Blocks::Drawn(sparse(64, 128, 1, 1))),
        case(
            "no keys, odd blocks",
            &["empty_tensors", "empty_rows", "block_mask"],
            given.small(70, 0).mask(Mask::causal()),
        )
        .blocks(Blocks::FromMask(sparse(48, 80, 1, 1))),
        case("no keys, sinks", &["empty_tensors", "empty_rows", "sinks"], given.base(2, 10, 0))
            .sinks(&[0.5, NO_SINK])
            .d_lse(),
    ]
}

/// Gradients of the LSE, and few queries over many keys.
fn lse_gradients_and_decode(given: Builders) -> Vec<Recipe> {
    vec![
        case("d_lse", &["d_lse"], given.base(2, 50, 60)).d_lse(),
        case(
            "d_lse, causal, sinks",
            &["d_lse", "causal", "sinks", "empty_rows"],
            given.small(66, 50).mask(Mask::causal()),
        )
        .d_lse()
        .sinks(&[0.2, NO_SINK]),
        case("decode, 8 over 2", &["decode", "gqa"], given.base(1, 1, 1500).heads(8, 2).mask(Mask::causal())),
        case(
            "decode, 3 queries",
            &["decode", "gqa"],
            given.base(2, 3, 700).heads(8, 2).head_dim(32).mask(Mask::causal()),
        ),
        case(
            "decode, used keys",
            &["decode", "used_lengths", "gqa", "poison"],
            given.base(3, 1, 400).heads(4, 1).head_dim(32),
        )
        .used(None, Some(&[400, 1, 177]))
        .poison(Poison::Padding),
    ]
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
