//! Lighthouse attention: builds a pyramid of means, picks nodes by norm, attends causally over them, and scatters back.
//!
//! Level l = 1 .. L has nodes of width c = p^(l-1): node (l, i) is the mean of tokens [i c, (i+1) c) of q, of k and of
//! v. Its scores are the largest |q| and the largest |k| of its span. Selection goes from the coarsest level down, in
//! tiles of the sequence. At each level it picks m candidates per tile: m / 2 with the largest |q|, then m / 2 of the
//! others with the largest |k|. All candidates belong to the result; the children of the picked ones are the candidates
//! of the next level. Ties go to the lower index. These nodes, in sequence order, go through plain causal attention;
//! the output of (l, i) is added to positions [i c + c - 1, i c + 2c - 2].
//!
//! **The selection sees the future**: the picked nodes depend on norms of later tokens of the tile. Given the
//! selection, the layer is causal. It replaces attention in the first part of a training, not in generation.

use crate::compare::{Rule, Verdict};
use crate::dtype::DType;
use crate::error::{InputError, ProblemError};
use crate::fit::{dtype_is, last_stride, shape_is};
use crate::parallax::Arithmetic;
use crate::tensor::{Tensor, TensorView};

/// A validated problem over `[batch, len, heads, dim]`.
///
/// ```
/// use fulgurite_core::lighthouse::Lighthouse;
/// let light = Lighthouse::new([1, 1024, 2, 2], [16, 16], 3, 4, 16, 4)?;
/// assert_eq!(light.picked(), 1024 / 16 + 2 * 4 * 16);
/// let refused = Lighthouse::new([1, 1000, 2, 2], [16, 16], 3, 4, 16, 4).unwrap_err();
/// assert_eq!(refused.to_string(), "`len` is 1000, allowed: a multiple of 64 (pool^levels); pad the sequence");
/// # Ok::<(), fulgurite_core::ProblemError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Lighthouse {
    /// Batch, tokens, query heads, key/value heads.
    batch: usize,
    len: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    value_dim: usize,
    levels: usize,
    pool: usize,
    budget: usize,
    tile: usize,
    scale: f32,
    dtype: DType,
}

/// Default number of nodes that selection takes from each tile and level.
pub const TILE: usize = 128;

/// A picked node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// Sort key in sequence order; all keys are distinct.
    pub key: u64,
    /// Level; 1 is the base.
    pub level: u32,
    /// Index in its level.
    pub index: u32,
}

impl Lighthouse {
    /// A problem with `[batch, len, heads, kv_heads]`, `[head_dim, value_dim]`, levels L, pooling p, budget k and tile
    /// m: there are k / m tiles, and m nodes are picked from each.
    pub fn new(
        [batch, len, heads, kv_heads]: [usize; 4],
        [dim, value_dim]: [usize; 2],
        levels: usize,
        pool: usize,
        budget: usize,
        tile: usize,
    ) -> Result<Lighthouse, ProblemError> {
        let number = |arg, got, allowed: String, hint| Err(ProblemError::Number { arg, got, allowed, hint });
        if heads == 0 || kv_heads == 0 || heads % kv_heads != 0 {
            return Err(ProblemError::Heads { q: heads, kv: kv_heads });
        }
        for (arg, got) in [("head_dim", dim), ("value_dim", value_dim)] {
            if !(1..=crate::problem::MAX_HEAD_DIM).contains(&got) {
                return Err(ProblemError::HeadDim { arg, got });
            }
        }
        if !(1..=8).contains(&levels) {
            return number("levels", levels, "1 to 8".into(), "1 is dense attention");
        }
        if !(pool.is_power_of_two() && (2..=64).contains(&pool)) {
            return number("pool", pool, "2, 4, 8, 16, 32 or 64".into(), "it is the width of a node in children");
        }
        let widest = pool.pow(levels as u32);
        if len == 0 || !len.is_multiple_of(widest) || len >= 1 << 30 {
            let allowed = format!("a multiple of {widest} (pool^levels)");
            return number("len", len, allowed, "pad the sequence");
        }
        if tile < 2 || !tile.is_multiple_of(2) {
            return number("tile", tile, "an even number from 2 on".into(), "128 is usual");
        }
        let coarsest = len / pool.pow(levels as u32 - 1);
        if levels > 1 && (budget == 0 || !budget.is_multiple_of(tile) || budget > coarsest) {
            let allowed = format!("a multiple of {tile} up to the {coarsest} nodes of the coarsest level");
            return number("budget", budget, allowed, "take less, or fewer levels");
        }
        let scale = 1.0 / (dim as f32).sqrt();
        let dtype = DType::F32;
        Ok(Lighthouse { batch, len, heads, kv_heads, dim, value_dim, levels, pool, budget, tile, scale, dtype })
    }

    /// Sets a type of q, k, v and o other than f32.
    pub fn dtype(mut self, dtype: DType) -> Result<Self, ProblemError> {
        if !dtype.is_float() {
            return Err(ProblemError::DType { got: dtype });
        }
        self.dtype = dtype;
        Ok(self)
    }

    /// Shape of q.
    pub fn q_shape(&self) -> Vec<usize> {
        vec![self.batch, self.len, self.heads, self.dim]
    }
    /// Shape of k.
    pub fn k_shape(&self) -> Vec<usize> {
        vec![self.batch, self.len, self.kv_heads, self.dim]
    }
    /// Shape of v.
    pub fn v_shape(&self) -> Vec<usize> {
        vec![self.batch, self.len, self.kv_heads, self.value_dim]
    }
    /// Shape of o.
    pub fn o_shape(&self) -> Vec<usize> {
        vec![self.batch, self.len, self.heads, self.value_dim]
    }
    /// Batch, tokens, query heads, key/value heads.
    pub fn sizes(&self) -> [usize; 4] {
        [self.batch, self.len, self.heads, self.kv_heads]
    }
    /// Dimension of q and k, and that of v.
    pub fn dims(&self) -> [usize; 2] {
        [self.dim, self.value_dim]
    }
    /// Factor of q . k.
    pub fn scale(&self) -> f32 {
        self.scale
    }
    /// Type of the tensors.
    pub fn element(&self) -> DType {
        self.dtype
    }
    /// Tokens per node of a level.
    pub fn width(&self, level: u32) -> usize {
        self.pool.pow(level - 1)
    }
    /// Number of picked nodes per sequence and head: N / p^(L-1) + (L-1) p k.
    pub fn picked(&self) -> usize {
        let below = (self.levels - 1) * self.pool * self.budget;
        self.len / self.width(self.levels as u32) + below
    }

    /// Checks that q, k and v fit.
    pub fn check(&self, q: &TensorView<'_>, k: &TensorView<'_>, v: &TensorView<'_>) -> Result<(), InputError> {
        for (arg, view, want) in [("q", q, self.q_shape()), ("k", k, self.k_shape()), ("v", v, self.v_shape())] {
            shape_is(arg, view.shape(), &want)?;
            dtype_is(arg, view.dtype(), self.dtype)?;
            last_stride(arg, view.shape(), view.strides())?;
        }
        Ok(())
    }

    /// The nodes picked by the norms of the queries and keys of one head, in sequence order.
    pub fn select(&self, q_norms: &[f32], k_norms: &[f32]) -> Vec<Entry> {
        let top = self.levels as u32;
        let pyramid = |base: &[f32]| {
            let mut all = vec![base.to_vec()];
            for _ in 1..self.levels {
                let last = &all[all.len() - 1];
                all.push(last.chunks_exact(self.pool).map(|c| c.iter().copied().fold(0.0, f32::max)).collect());
            }
            all
        };
        let (a, b) = (pyramid(q_norms), pyramid(k_norms));
        let nodes = self.len / self.width(top);
        let tiles = if self.levels == 1 { 1 } else { self.budget / self.tile };
        let mut entries = Vec::with_capacity(self.picked());
        for t in 0..tiles {
            let mut candidates: Vec<u32> = ((t * nodes / tiles) as u32..((t + 1) * nodes / tiles) as u32).collect();
            for level in (2..=top).rev() {
                let (a, b) = (&a[level as usize - 1], &b[level as usize - 1]);
                // Largest first; ties by index, NaN last.
                let best = |scores: &[f32], from: &mut [u32], n: usize| {
                    let order = |x: &u32, y: &u32| {
                        let value = |i: &u32| Some(scores[*i as usize]).filter(|s| !s.is_nan()).unwrap_or(-1.0);
                        value(y).total_cmp(&value(x)).then(x.cmp(y))
                    };
                    if n < from.len() {
                        from.select_nth_unstable_by(n, order);
                    }
                };
                let half = self.tile / 2;
                best(a, &mut candidates, half);
                best(b, &mut candidates[half..], half);
                let (picked, rejected) = candidates.split_at_mut(self.tile);
                entries.extend(rejected.iter().map(|&index| self.entry(level, index, false)));
                entries.extend(picked.iter().map(|&index| self.entry(level, index, true)));
                picked.sort_unstable();
                let pool = self.pool as u32;
                candidates = picked.iter().flat_map(|&i| i * pool..(i + 1) * pool).collect();
            }
            entries.extend(candidates.iter().map(|&index| self.entry(1, index, false)));
        }
        entries.sort_unstable();
        entries
    }

    /// In units of 2^(1-L) of a token: the start of a node, or (with children) the position right after its last
    /// descendant.
    fn entry(&self, level: u32, index: u32, parent: bool) -> Entry {
        let (c, unit) = (self.width(level) as u64, 1u64 << (self.levels - 1));
        let i = u64::from(index);
        let key = if parent { c * (i + 1) * unit - (1 << (self.levels as u32 - level)) } else { c * i * unit };
        Entry { key, level, index }
    }

    /// The tokens that a node averages.
    pub fn span(&self, entry: &Entry) -> std::ops::Range<usize> {
        let c = self.width(entry.level);
        entry.index as usize * c..(entry.index as usize + 1) * c
    }

    /// The positions to which its output is added.
    pub fn reach(&self, entry: &Entry) -> std::ops::Range<usize> {
        let c = self.width(entry.level);
        let start = entry.index as usize * c + c - 1;
        start.min(self.len)..(start + c).min(self.len)
    }
}

/// The definition for one head with a given selection, in f64: o, and the gradients of q, k and v if d_o is given.
/// Everything is `[token][dim]`. `rounded` selects the straightforward implementation in a type.
pub fn oracle(
    light: &Lighthouse,
    entries: &[Entry],
    [q, k, v]: [&[f64]; 3],
    d_o: Option<&[f64]>,
    rounded: Option<DType>,
) -> [Vec<f64>; 4] {
    let a = Arithmetic(rounded);
    let [d, vd] = light.dims();
    let scale = f64::from(light.scale);
    let mean = |x: &[f64], dim: usize, e: &Entry| -> Vec<f64> {
        let span = light.span(e);
        let n = span.len() as f64;
        (0..dim).map(|c| a.operand(span.clone().map(|t| x[t * dim + c]).sum::<f64>() / n)).collect()
    };
    let pooled = |x: &[f64], dim: usize| entries.iter().map(|e| mean(x, dim, e)).collect::<Vec<_>>();
    let (qs, ks, vs) = (pooled(q, d), pooled(k, d), pooled(v, vd));
    let mut o = vec![0.0; light.len * vd];
    let n = |dim: usize| vec![0.0; light.len * dim];
    let (mut d_q, mut d_k, mut d_v) = (n(d), n(d), n(vd));
    for (i, e) in entries.iter().enumerate() {
        let s: Vec<f64> = (0..=i).map(|j| a.operand(scale * a.dot(&qs[i], &ks[j]))).collect();
        let max = s.iter().fold(f64::NEG_INFINITY, |m, &s| m.max(s));
        let p: Vec<f64> = s.iter().map(|s| a.sum((s - max).exp())).collect();
        let total = p.iter().fold(0.0, |t, p| a.sum(t + p));
        let p: Vec<f64> = p.iter().map(|p| a.operand(p / total)).collect();
        let mut row = vec![0.0; vd];
        for (p, v) in p.iter().zip(&vs) {
            row.iter_mut().zip(v).for_each(|(o, v)| *o = a.sum(*o + a.sum(p * v)));
        }
        for t in light.reach(e) {
            o[t * vd..(t + 1) * vd].iter_mut().zip(&row).for_each(|(o, x)| *o = a.sum(*o + a.operand(*x)));
        }
        let Some(d_o) = d_o else { continue };
        let g: Vec<f64> = (0..vd).map(|c| light.reach(e).map(|t| d_o[t * vd + c]).sum()).collect();
        let delta = a.dot(&g, &row);
        let spread = |to: &mut [f64], dim: usize, e: &Entry, weight: f64, x: &[f64]| {
            let span = light.span(e);
            let share = weight / span.len() as f64;
            for t in span {
                to[t * dim..(t + 1) * dim].iter_mut().zip(x).for_each(|(to, x)| *to = a.sum(*to + a.sum(share * x)));
            }
        };
        for (j, other) in entries[..=i].iter().enumerate() {
            let d_s = a.operand(scale * p[j] * (a.dot(&g, &vs[j]) - delta));
            spread(&mut d_q, d, e, d_s, &ks[j]);
            spread(&mut d_k, d, other, d_s, &qs[i]);
            spread(&mut d_v, vd, other, p[j], &g);
        }
    }
    [o, d_q, d_k, d_v].map(|mut x| {
        x.iter_mut().for_each(|x| *x = a.operand(*x));
        x
    })
}

/// Checks o and, if given with d_o, the gradients of q, k and v, with the tolerance rule: each sequence and head with
/// the nodes that were picked for it. The verdict of a tensor is that of its worst head.
///
/// Panics if the tensors do not have the shapes of the problem.
pub fn check(
    light: &Lighthouse,
    entries: &[Vec<Entry>],
    [q, k, v]: [&Tensor; 3],
    o: &Tensor,
    gradients: Option<(&Tensor, [&Tensor; 3])>,
) -> Vec<(String, Verdict)> {
    let head = |t: &Tensor, batch: usize, head: usize| -> Vec<f64> {
        let (view, shape) = (t.view(), t.shape());
        let places = (0..shape[1]).flat_map(|i| (0..shape[3]).map(move |c| [batch, i, head, c]));
        places.map(|at| view.get(&at)).collect()
    };
    let rule = Rule { dtype: light.dtype, softcap: false, gradient: false, terms: None };
    let mut all: Vec<(String, Verdict)> = Vec::new();
    let mut enter = |name: &str, verdict: Verdict| {
        let share = |v: &Verdict| if v.ok() { v.worst / v.allowed } else { f64::INFINITY };
        match all.iter_mut().find(|(known, _)| known == name) {
            None => all.push((name.to_string(), verdict)),
            Some((_, worst)) if share(worst) >= share(&verdict) => {}
            Some((_, worst)) => *worst = verdict,
        }
    };
    let group = light.heads / light.kv_heads;
    for (b, key_head) in (0..light.batch).flat_map(|b| (0..light.kv_heads).map(move |h| (b, h))) {
        // Exact and straightforward d_k and d_v: sums over the heads of the group.
        let mut sums = [const { Vec::new() }; 4];
        for h in key_head * group..(key_head + 1) * group {
            let own = [head(q, b, h), head(k, b, key_head), head(v, b, key_head)];
            let given = gradients.map(|(d_o, _)| head(d_o, b, h));
            let entries = &entries[b * light.heads + h];
            let run = |rounded| oracle(light, entries, own.each_ref().map(Vec::as_slice), given.as_deref(), rounded);
            let (want, plain) = (run(None), run(Some(light.dtype)));
            enter("o", rule.judge(&head(o, b, h), &want[0], &plain[0]));
            if let Some((_, [d_q, ..])) = gradients {
                enter("d_q", rule.judge(&head(d_q, b, h), &want[1], &plain[1]));
            }
            for (sum, from) in sums.iter_mut().zip([&want[2], &plain[2], &want[3], &plain[3]]) {
                sum.resize(from.len(), 0.0);
                sum.iter_mut().zip(from).for_each(|(s, x)| *s += x);
            }
        }
        if let Some((_, [_, d_k, d_v])) = gradients {
            enter("d_k", rule.judge(&head(d_k, b, key_head), &sums[0], &sums[1]));
            enter("d_v", rule.judge(&head(d_v, b, key_head), &sums[2], &sums[3]));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    fn small() -> Lighthouse {
        Lighthouse::new([1, 64, 1, 1], [3, 2], 3, 2, 8, 4).unwrap()
    }

    fn norms(rng: &mut Rng, n: usize) -> Vec<f32> {
        // Few distinct values, so that ties are common.
        (0..n).map(|_| rng.range(0..6) as f32).collect()
    }

    /// The definition, by sorting everything at every level.
    fn brute(light: &Lighthouse, a: &[f32], b: &[f32]) -> Vec<Entry> {
        let score = |x: &[f32], level: u32, i: u32| {
            let c = light.width(level);
            x[i as usize * c..(i as usize + 1) * c].iter().copied().fold(0.0, f32::max)
        };
        let nodes = (light.len / light.width(light.levels as u32)) as u32;
        let tiles = (light.budget / light.tile) as u32;
        let mut all = Vec::new();
        for t in 0..tiles {
            let mut cand: Vec<u32> = (t * nodes / tiles..(t + 1) * nodes / tiles).collect();
            for level in (2..=light.levels as u32).rev() {
                let pick = |x: &[f32], from: &[u32]| {
                    let mut order = from.to_vec();
                    order.sort_by(|&i, &j| score(x, level, j).total_cmp(&score(x, level, i)).then(i.cmp(&j)));
                    order[..light.tile / 2].to_vec()
                };
                let first = pick(a, &cand);
                let rest: Vec<u32> = cand.iter().copied().filter(|i| !first.contains(i)).collect();
                let second = pick(b, &rest);
                let chosen = |i: &u32| first.contains(i) || second.contains(i);
                all.extend(cand.iter().map(|i| light.entry(level, *i, chosen(i))));
                cand = cand.iter().filter(|i| chosen(i)).flat_map(|i| [2 * i, 2 * i + 1]).collect();
            }
            all.extend(cand.iter().map(|&i| light.entry(1, i, false)));
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn selection_is_the_definition() {
        let light = small();
        for seed in 0..200 {
            let rng = &mut Rng::new(seed);
            let (a, b) = (norms(rng, 64), norms(rng, 64));
            let found = light.select(&a, &b);
            assert_eq!(found, brute(&light, &a, &b), "seed {seed}");
            assert_eq!(found.len(), light.picked());
            assert!(found.windows(2).all(|w| w[0].key < w[1].key), "keys are distinct");
        }
    }

    #[test]
    fn frozen_selection_is_causal_and_gradients_are_differences() {
        let light = small();
        let rng = &mut Rng::new(5);
        let entries = light.select(&norms(rng, 64), &norms(rng, 64));
        let raw = [rng.normals(64 * 3, 1.0), rng.normals(64 * 3, 1.0), rng.normals(64 * 2, 1.0)];
        let d_o = rng.normals(64 * 2, 1.0);
        let run = |raw: &[Vec<f64>; 3]| oracle(&light, &entries, [&raw[0], &raw[1], &raw[2]], None, None)[0].clone();
        let before = run(&raw);
        let [_, d_q, d_k, d_v] = oracle(&light, &entries, [&raw[0], &raw[1], &raw[2]], Some(&d_o), None);
        for (which, found) in [d_q, d_k, d_v].iter().enumerate() {
            for i in (0..found.len()).step_by(5) {
                let dim = found.len() / 64;
                let at = |x: f64| {
                    let mut raw = raw.clone();
                    raw[which][i] += x;
                    run(&raw)
                };
                let moved = at(1.0);
                let first = before.iter().zip(&moved).position(|(x, y)| x != y).map_or(64, |at| at / 2);
                assert!(first >= i / dim, "token {} changed the output at {first}", i / dim);
                let (up, down) = (at(1e-5), at(-1e-5));
                let want: f64 = d_o.iter().zip(up.iter().zip(&down)).map(|(g, (u, d))| g * (u - d) / 2e-5).sum();
                assert!((found[i] - want).abs() <= 1e-7 * want.abs().max(1.0), "{which} {i}: {} {want}", found[i]);
            }
        }
    }

    /// Twelve roundings of the largest element (for f32, which has an absolute allowance too, a ten-thousandth) are an error.
    #[test]
    fn planted_errors_are_found_in_every_type() {
        for (dtype, unit) in [(DType::F32, 2f64.powi(-17)), (DType::F16, 2f64.powi(-11)), (DType::Bf16, 2f64.powi(-8))]
        {
            let light = small().dtype(dtype).unwrap();
            let rng = &mut Rng::new(9);
            let entries = light.select(&norms(rng, 64), &norms(rng, 64));
            let mut of =
                |shape: &[usize]| Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
            let [q, k, v] = [of(&light.q_shape()), of(&light.k_shape()), of(&light.v_shape())];
            let d_o = of(&light.o_shape());
            let given = [&q, &k, &v, &d_o].map(|x| x.view().to_f64());
            let want = oracle(&light, &entries, [&given[0], &given[1], &given[2]], Some(&given[3]), None);
            let shapes = [light.o_shape(), light.q_shape(), light.k_shape(), light.v_shape()];
            let judge = |values: &[Vec<f64>; 4]| {
                let [o, d_q, d_k, d_v] = [0, 1, 2, 3].map(|i| Tensor::from_f64(dtype, &values[i], &shapes[i]).unwrap());
                let entries = std::slice::from_ref(&entries);
                check(&light, entries, [&q, &k, &v], &o, Some((&d_o, [&d_q, &d_k, &d_v])))
            };
            assert!(judge(&want).iter().all(|(_, verdict)| verdict.ok()), "{dtype}");
            for which in 0..4 {
                let mut values = want.clone();
                let largest = values[which].iter_mut().max_by(|x, y| x.abs().total_cmp(&y.abs())).unwrap();
                *largest *= 1.0 + 12.0 * unit;
                let wrong: Vec<usize> =
                    judge(&values).iter().enumerate().filter(|(_, (_, v))| !v.ok()).map(|(i, _)| i).collect();
                assert_eq!(wrong, [which], "{dtype}: {:?}", judge(&values));
            }
        }
    }

    #[test]
    fn one_level_is_dense() {
        let light = Lighthouse::new([1, 8, 1, 1], [2, 2], 1, 2, 0, 2).unwrap();
        let entries = light.select(&[1.0; 8], &[1.0; 8]);
        assert_eq!(entries.len(), 8);
        assert!(entries.iter().enumerate().all(|(i, e)| light.span(e) == (i..i + 1) && light.reach(e) == (i..i + 1)));
    }

    #[test]
    fn bad_problems_say_what_is_allowed() {
        let refused = |n: [usize; 4], levels, pool, budget, tile| {
            Lighthouse::new(n, [4, 4], levels, pool, budget, tile).unwrap_err().to_string()
        };
        assert_eq!(
            refused([1, 64, 1, 1], 3, 2, 32, 4),
            "`budget` is 32, allowed: a multiple of 4 up to the 16 nodes of the coarsest level; take less, or fewer levels"
        );
        assert!(refused([1, 64, 1, 1], 3, 2, 6, 4).starts_with("`budget` is 6, allowed: a multiple of 4"));
        assert!(refused([1, 60, 1, 1], 3, 2, 8, 4).starts_with("`len` is 60, allowed: a multiple of 8"));
        assert!(refused([1, 64, 1, 1], 3, 3, 8, 4).starts_with("`pool` is 3"));
        assert!(refused([1, 64, 1, 1], 9, 2, 8, 4).starts_with("`levels` is 9"));
        assert!(refused([1, 64, 1, 1], 3, 2, 9, 3).starts_with("`tile` is 3"));
        assert!(refused([1, 64, 3, 2], 3, 2, 8, 4).starts_with("`heads`"));
    }
}
