//! Chooses the number of parts into which the query heads of a key/value head are divided.

use crate::attention::backward::plan::facts::Facts;
use crate::attention::backward::plan::steps::tile_steps;
use crate::attention::backward::spread::HeadSpread;
use crate::attention::backward::{BackwardConfig, KernelShape, Share};
use fulgurite_core::Layout;
use fulgurite_ptx::TensorUnit;

/// FLOP/s of an SM in the main kernel by `wgmma`, as measured on an H200 (about 550 TFLOP/s in all).
const FLOPS: f64 = 4.2e12;
/// The same by `mma.sync`.
const SYNC_FLOPS: f64 = 2.1e12;
/// Bytes of parts a second, written by the main kernel and read by the kernel that adds them. Fitted by hand to times on
/// an H200 (docs/lab/006-hopper-backward.md, 113 to 120), as are `DRIFT` and `GAIN`.
const BYTES: f64 = 2.6e12;
/// Share by which the main kernel slows down each time the heads of a part double beyond two. The likely cause is that CTAs
/// drift to different heads and the sums of d_q leave the L2 cache; no counter was read to show it.
const DRIFT: f64 = 0.07;
/// Seconds that one more kernel takes: its launch, and the CTAs of the kernel before that end at different times.
const LAUNCH: f64 = 6e-6;
/// Time of a step by [`Share::Columns`] over that of CTA pairs with as many products, at head dimension 256 (docs/lab/006, 72).
const COLUMNS: f64 = 1.22;
/// Spread heads must take less than this share of the estimated time of CTA pairs to replace them. The estimate is up to 30 %
/// off (docs/lab/006, 124).
const INSTEAD_OF_PAIRS: f64 = 0.8;
/// More parts must take less than this share of the time of fewer.
const GAIN: f64 = 0.98;
/// Bytes that all parts may have.
const MOST_BYTES: f64 = (1u64 << 30) as f64;

/// Whether a configuration has kernels for spread heads. With CTA pairs, the loading thread has no registers left to divide by
/// the number of parts. The kernels by `tcgen05` have no code for parts.
pub(crate) fn can_spread(config: &BackwardConfig) -> bool {
    config.share != Share::Pairs && config.share.unit() != TensorUnit::Tcgen05
}

/// Whether a configuration has kernels for f32 results: the main kernel by `wgmma` stores them where heads are not spread.
pub(crate) fn has_f32_results(config: &BackwardConfig) -> bool {
    can_spread(config) && config.share.unit() == TensorUnit::Wgmma
}

/// Inputs of the choice of parts. Lengths are counted in steps: one step of queries of one query head, for one tile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Load {
    /// Query heads of a key/value head.
    pub group: u64,
    /// CTAs, or pairs of CTAs, that run at a time.
    pub ctas: u64,
    /// Steps of the longest tile, for each of its query heads.
    pub longest: f64,
    /// Steps of all tiles of all key/value heads, for each query head of a group.
    pub all: f64,
    /// Seconds of a step.
    pub step: f64,
    /// Bytes of one f32 d_k and d_v of all keys of all key/value heads.
    pub part_bytes: f64,
    /// Whether the last tiles are split, so that CTAs end together however long a tile is.
    pub splits: bool,
}

impl Load {
    /// This load with steps that take `factor` times as long.
    fn slower(self, factor: f64) -> Load {
        Load { step: self.step * factor, ..self }
    }

    /// Seconds of the main kernel and of the kernel that adds parts, if the query heads of a group are in parts of at most
    /// `most` heads.
    ///
    /// CTAs take tiles from a list, the longest first. No CTA ends before the mean of all, nor before its longest tile. The
    /// last CTA ends about half of a longest tile after the mean.
    fn seconds(&self, parts: u64, most: u64) -> f64 {
        let (tile, mean) = (self.longest * most as f64, self.all * self.group as f64 / self.ctas as f64);
        let drift = 1.0 + DRIFT * (most as f64 / 2.0).log2().max(0.0);
        let main = if self.splits { mean.max(most as f64) } else { tile.max(mean + tile / 2.0) * drift };
        // Every part is written once and read once.
        let join = if parts > 1 { LAUNCH + 2.0 * self.part_bytes * parts as f64 / BYTES } else { 0.0 };
        main * self.step + join
    }

    /// The number of parts with the least estimated time.
    pub fn parts(&self) -> u64 {
        self.best().0
    }

    /// The number of parts with the least estimated time, and the seconds it takes. More parts than fewer would do are taken
    /// only for a gain that is beyond the error of the estimate.
    pub fn best(&self) -> (u64, f64) {
        let mut best = (1, self.seconds(1, self.group));
        for parts in 2..=self.group {
            let most = self.group.div_ceil(parts);
            // Fewer parts with as many heads each take as long.
            if most == self.group.div_ceil(parts - 1) {
                continue;
            }
            let seconds = self.seconds(parts, most);
            if seconds < best.1 * GAIN && self.part_bytes * parts as f64 <= MOST_BYTES {
                best = (parts, seconds);
            }
        }
        best
    }
}

impl Facts {
    /// The configuration itself, or for CTA pairs the one without them if spread heads gain more than the pairs do: few
    /// key/value heads do not fill the GPU with pairs of CTAs, which cannot spread heads.
    pub fn pairs_or_spread(&self, config: BackwardConfig) -> BackwardConfig {
        if config.share != Share::Pairs || config.head_splits.is_some() || self.group() <= 1 {
            return config;
        }
        let pairs = self.load(&config, false);
        let columns = BackwardConfig::columns();
        let (_, spread) = self.load(&columns, false).slower(COLUMNS).best();
        if spread < pairs.seconds(1, pairs.group) * INSTEAD_OF_PAIRS { columns } else { config }
    }

    /// How query heads are spread: as a configuration says, or by the rule. `splits`: whether the last tiles would be split.
    pub fn spread(&self, config: &BackwardConfig, splits: bool) -> HeadSpread {
        let parts = match config.head_splits {
            _ if self.group() <= 1 || !can_spread(config) => 1,
            Some(parts) => u64::from(parts),
            None => self.load(config, splits).parts(),
        };
        HeadSpread::new(self.group(), parts)
    }

    /// The work of all CTAs under a configuration.
    pub fn load(&self, config: &BackwardConfig, splits: bool) -> Load {
        let [d, dv] = KernelShape::plain(&self.features, *config).dims.map(f64::from);
        let (keys, rows) = (f64::from(config.keys()), f64::from(config.rows));
        let [longest, all] = self.steps_of_tiles(config);
        let flops = if config.is_sync() { SYNC_FLOPS } else { FLOPS };
        let k_rows = match self.layout {
            Layout::Dense { batch, k_len, .. } => batch * k_len,
            Layout::Packed(p) => p.total_k,
        };
        Load {
            group: self.group(),
            ctas: u64::from(self.arch.sms / config.share.ctas()).max(1),
            longest,
            all: all * self.heads[1] as f64,
            // Three products with rows of d elements, two with rows of dv.
            step: 2.0 * rows * keys * (3.0 * d + 2.0 * dv) / (flops * f64::from(config.share.ctas())),
            part_bytes: self.heads[1] as f64 * k_rows as f64 * (d + dv) * 4.0,
            splits,
        }
    }

    /// Steps of the longest tile, and of all tiles of a head of all sequences. Only the device knows how long packed
    /// sequences are: one counts as the longest, the others as long as their mean.
    fn steps_of_tiles(&self, config: &BackwardConfig) -> [f64; 2] {
        let steps = |lengths: [usize; 2]| tile_steps(&self.features.mask, lengths, *config);
        let sums = |lengths: [usize; 2]| {
            steps(lengths).fold([0.0f64, 0.0], |[most, all], n| [most.max(n as f64), all + n as f64])
        };
        match self.layout {
            Layout::Dense { batch, q_len, k_len } => {
                let [longest, all] = sums([q_len, k_len]);
                [longest, all * batch as f64]
            }
            Layout::Packed(p) => {
                let (others, [longest, first]) = (p.batch.saturating_sub(1), sums([p.max_q, p.max_k]));
                let mean = |total: usize, most: usize| total.saturating_sub(most).div_ceil(others.max(1));
                let [_, rest] = sums([mean(p.total_q, p.max_q), mean(p.total_k, p.max_k)]);
                [longest, first + rest * others as f64]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::backward::Order;
    use crate::attention::backward::plan::BackwardPlan;
    use fulgurite_core::{DType, Mask, Problem};
    use proptest::prelude::*;

    /// Parts by the rule of a causal problem of a model.
    fn parts([batch, len]: [usize; 2], [heads, kv_heads]: [usize; 2], head_dim: usize, mask: Mask) -> u64 {
        let problem = Problem::builder().dense(batch, len, len).heads(heads, kv_heads).head_dim(head_dim).mask(mask);
        let problem = problem.dtype(DType::Bf16).build().unwrap();
        BackwardPlan::new(&problem, false, Order::Any).unwrap().head_splits()
    }

    #[test]
    fn heads_are_spread_where_the_gpu_is_not_full() {
        let causal = |sizes, heads, head_dim| parts(sizes, heads, head_dim, Mask::causal());
        // Falcon-7B, Llama-3-70B, Qwen2.5-7B.
        assert!(causal([4, 2048], [71, 1], 64) >= 8);
        assert_eq!(causal([2, 4096], [64, 8], 128), 4);
        assert_eq!(causal([2, 4096], [28, 4], 128), 4);
        // Mistral: windows of 4096 keys.
        assert_eq!(parts([1, 16384], [32, 8], 128, Mask::window(4095, 0)), 2);
        // CTA pairs give way where few key/value heads would leave most of the GPU idle (Gemma-2B has one), and only there.
        assert!(causal([1, 8192], [8, 1], 256) >= 2);
        assert!(causal([3, 285], [71, 1], 256) >= 8);
        assert_eq!(causal([1, 8192], [16, 8], 256), 1);
        // Many tiles, single heads, and tiles that are split anyway.
        assert_eq!(causal([16, 4096], [64, 32], 128), 1);
        assert_eq!(causal([2, 4096], [16, 16], 128), 1);
        assert_eq!(causal([2, 4096], [16, 2], 256), 1);
        assert_eq!(parts([2, 4096], [64, 8], 128, Mask::none()), 1);
        // One more kernel takes longer than the few steps it would save.
        assert_eq!(causal([1, 128], [2, 1], 64), 1);
    }

    prop_compose! {
        fn loads()(
            group in 1u64..100,
            ctas in 1u64..200,
            longest in 1u32..500,
            tiles in 1u32..5000,
            step in 1u32..50,
            bytes in 0u32..1 << 30,
            splits: bool,
        ) -> Load {
            let (longest, step) = (f64::from(longest), f64::from(step) * 1e-7);
            let all = longest * (1.0 + f64::from(tiles) / 2.0);
            Load { group, ctas, longest, all, step, part_bytes: f64::from(bytes), splits }
        }
    }

    proptest! {
        /// All heads of a group are in one part each, in order; parts differ by one head at most.
        #[test]
        fn every_head_is_in_one_part(group in 1u64..200, wanted in 0u64..300, kv_heads in 1u64..9) {
            let spread = HeadSpread::new(group, wanted);
            prop_assert!(spread.parts >= 1 && spread.parts <= group);
            let firsts: Vec<u64> = (0..=spread.parts * kv_heads).map(|part| spread.first(part)).collect();
            prop_assert_eq!((firsts[0], firsts[firsts.len() - 1]), (0, group * kv_heads));
            for pair in firsts.windows(2) {
                let heads = pair[1] - pair[0];
                prop_assert!(heads >= 1 && heads <= spread.most() && heads + 1 >= spread.most());
            }
            // Parts of a key/value head begin with its first query head.
            for head in 0..kv_heads {
                prop_assert_eq!(spread.first(head * spread.parts), head * group);
            }
        }

        /// The rule takes a number of parts that exists, never loses by its own estimate, and stays within its memory.
        #[test]
        fn the_rule_never_loses(load in loads()) {
            let parts = load.parts();
            prop_assert!(parts >= 1 && parts <= load.group);
            let most = load.group.div_ceil(parts);
            prop_assert!(load.seconds(parts, most) <= load.seconds(1, load.group));
            prop_assert!(parts == 1 || load.part_bytes * parts as f64 <= MOST_BYTES);
        }

        /// Slower memory for parts, or a GPU with fewer SMs, never leads to more parts.
        #[test]
        fn dearer_parts_are_fewer(load in loads()) {
            let dearer = Load { part_bytes: 4.0 * load.part_bytes + 1e6, ..load };
            prop_assert!(dearer.parts() <= load.parts(), "{} {}", dearer.parts(), load.parts());
            let single = Load { ctas: 1, splits: true, ..load };
            prop_assert_eq!(single.parts(), 1);
        }
    }
}
