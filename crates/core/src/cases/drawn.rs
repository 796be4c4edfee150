//! Random cases, as many as wanted: mixtures of shapes and features.

use super::Case;
use super::recipe::{Blocks, Operand, Poison, Recipe};
use super::table::{comb, holes, relative, sparse};
use crate::dtype::DType;
use crate::mask::Mask;
use crate::problem::Problem;
use crate::random::Rng;

/// Seeds of random cases that failed at some time: long checks start with them.
///
/// 500649 is excluded: in bf16 its d_k of 96 elements is at 1.06 of the allowance on every engine, with equal bits. The
/// single sample of straightforward code that sets the allowance happens to be close to the truth there.
pub const SEEDS: &[u64] = &[386_055, 500_939];

/// The sizes that a mixture draws from.
struct Sizes {
    dims: &'static [usize],
    groups: &'static [usize],
    /// One more than the longest sequence, by the seed's last bits.
    ends: [usize; 8],
}

const USUAL: Sizes =
    Sizes { dims: &[1, 7, 8, 16, 40, 64, 72, 80, 96, 128, 192, 256], groups: &[1, 1, 2, 3, 5, 8], ends: [301; 8] };

/// A hundredth of the work: one case in eight still fills more than a tile of queries and a block of keys.
const SHORT: Sizes = Sizes { dims: &[1, 7, 8, 16, 24], groups: &[1, 1, 2, 3], ends: [181, 49, 33, 49, 33, 49, 33, 49] };

/// A random mixture of shapes and features, determined by `seed`.
pub fn random(seed: u64, dtype: DType) -> Case {
    let rng = &mut Rng::new(seed);
    mixture(seed, dtype, &USUAL, rng).build(rng)
}

/// Like [`random`], with short sequences and narrow heads: for tens of thousands of them.
///
/// ```
/// use fulgurite_core::{DType, cases};
/// let case = cases::random_short(7, DType::F32);
/// assert!(case.problem().max_q_len() <= 180 && case.problem().head_dim() <= 24);
/// ```
pub fn random_short(seed: u64, dtype: DType) -> Case {
    let rng = &mut Rng::new(seed);
    mixture(seed, dtype, &SHORT, rng).build(rng)
}

/// A random mixture with NaN and infinities in rows that are partly hidden, or in rows of q.
pub fn random_nonfinite(seed: u64, dtype: DType) -> Case {
    nonfinite(seed, dtype, &USUAL)
}

/// Like [`random_nonfinite`], with short sequences and narrow heads: for tens of thousands of them.
///
/// ```
/// use fulgurite_core::{DType, cases};
/// let planted = (0..20).filter(|&seed| cases::random_nonfinite_short(seed, DType::F32).is_nonfinite()).count();
/// assert!(planted > 10, "{planted}");
/// ```
pub fn random_nonfinite_short(seed: u64, dtype: DType) -> Case {
    nonfinite(seed, dtype, &SHORT)
}

fn nonfinite(seed: u64, dtype: DType, sizes: &Sizes) -> Case {
    let rng = &mut Rng::new(seed);
    let mut recipe = mixture(seed, dtype, sizes, rng);
    let choice = rng.range(0..5);
    let (poison, feature) = match Operand::ALL.get(choice) {
        Some(&operand) => (Poison::Denied(operand), "hidden_nonfinite"),
        None => (Poison::Rows, "nan_rows"),
    };
    recipe.name = format!("random non-finite {seed}");
    recipe.features.push(feature);
    recipe.poison(poison).build(rng)
}

fn mixture(seed: u64, dtype: DType, sizes: &Sizes, rng: &mut Rng) -> Recipe {
    let mut features = Vec::new();
    let (kv_heads, group) = (rng.range(1..3), rng.pick(sizes.groups));
    let heads = kv_heads * group;
    let head_dim = rng.pick(sizes.dims);
    let value_dim = if rng.chance(0.2) { rng.pick(sizes.dims) } else { head_dim };
    let end = sizes.ends[(seed % 8) as usize];
    let length = |rng: &mut Rng| if rng.chance(0.2) { rng.range(1..9) } else { rng.range(1..end) };
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
