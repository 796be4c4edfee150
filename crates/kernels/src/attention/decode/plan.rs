//! The plan of a decode call: the problems that the decode kernel handles, its workspace, and its launch arguments.

use crate::attention::decode::call::{DecodeCall, DecodeLaunch};
use crate::attention::decode::{self, DecodeConfig, ROWS, SplitRule, padded};
use crate::attention::forward::call::RowTensors;
use crate::attention::forward::facts::Facts;
use crate::attention::forward::features::Features;
use crate::no_kernel::NoKernel;
use crate::params::Bindings;
use crate::parts::arguments::{DeviceTensor, Tensors};
use crate::parts::merge::{FIRST_COUNTER, PartialArgs, RUN};
use crate::parts::modifier::Modifiers;
use crate::parts::nonfinite::PlainRows;
use crate::parts::repack;
use crate::parts::sequences::Visible;
use fulgurite_core::{Exp, Layout, Rescale};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{BuildError, Kernel, Number, Target, bf16, f16};

/// The plan of a decode call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DecodePlan {
    number: Number,
    /// The problem's features with the head dimensions of the tensors.
    pub features: Features,
    pub config: DecodeConfig,
    layout: Layout,
    /// Query heads, key/value heads.
    heads: [u64; 2],
}

impl DecodePlan {
    /// Plans a decode call, if all rows of a key/value head fit one tile. The rule depends on the sequence's own lengths (in a
    /// packed batch on the longest), so that results are bitwise the same alone and in a batch.
    pub fn new(facts: &Facts, rescale: Rescale) -> Option<DecodePlan> {
        let Facts { number, features, layout, heads, .. } = facts;
        let (layout, heads) = (*layout, *heads);
        if facts.blocks.is_some() || features.wide() || matches!(features.exp, Exp::Sas { .. }) {
            return None;
        }
        let [q_len, _] = longest(layout);
        let rows = q_len * (heads[0] / heads[1].max(1));
        if rows > u64::from(ROWS) {
            return None;
        }
        let dims = facts.dims.map(|d| d.next_multiple_of(repack::UNIT as usize) as u32);
        let modifiers = Modifiers { mixed_heads: true, ..features.modifiers.clone() };
        let features = Features { dims, modifiers, ..features.clone() };
        let config = DecodeConfig { rescale, ..DecodeConfig::hopper(padded(dims)).with_room(&features) };
        Some(DecodePlan { number: *number, features, config, layout, heads })
    }

    pub fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        match self.number {
            Number::Bf16 => decode::kernel::<bf16>(target, &self.features, self.config),
            _ => decode::kernel::<f16>(target, &self.features, self.config),
        }
    }

    pub fn bindings(&self) -> Bindings<DecodeCall> {
        decode::bindings(&self.features, self.config)
    }

    pub fn same_kernel(&self, other: &DecodePlan) -> bool {
        (self.number, &self.features, self.config) == (other.number, &other.features, other.config)
    }

    fn counts(&self) -> Counts {
        let [q_len, k_len] = longest(self.layout);
        let batch = match self.layout {
            Layout::Dense { batch, .. } => batch,
            Layout::Packed(p) => p.batch,
        } as u64;
        let group = self.heads[0] / self.heads[1].max(1);
        let rows = q_len * group;
        let tiles = rows.div_ceil(ROWS.into()).max(1);
        // Offsets on the device may give a packed sequence more queries than the caller said, up to a whole tile.
        let most_rows = match self.layout {
            Layout::Packed(p) => p.total_q as u64 * group,
            Layout::Dense { .. } => rows,
        };
        let room = most_rows.min(ROWS.into());
        let ragged = self.features.ragged.any();
        let visible = match ragged {
            true => Visible { first: 0, count: k_len },
            false => Visible::of(&self.features.mask, q_len, k_len),
        };
        let blocks = visible.count.div_ceil(self.config.cols.into()).max(1);
        let rule = |rows| SplitRule::of(self.config.cols, rows);
        let [splits, room] = match ragged {
            // A sequence with fewer rows may have more splits.
            true => {
                let room = [16, 32, room].map(|rows| rows.min(room) * rule(rows.min(room)).most(blocks));
                [rule(1).most(blocks), room.into_iter().max().unwrap_or(0)]
            }
            // A single tile sees all visible keys; each of several tiles may see fewer.
            false => {
                let splits = if tiles == 1 { rule(rows).splits(blocks) } else { rule(rows).most(blocks) };
                [splits, splits * room]
            }
        };
        Counts { rows: rows.min(ROWS.into()), tiles, all: tiles * batch * self.heads[1], splits, room, blocks }
    }

    /// Bytes of counters: one for each tile, after the counters of every launch.
    pub fn counter_bytes(&self) -> u64 {
        4 * (u64::from(FIRST_COUNTER) + self.counts().all)
    }

    /// Bytes of workspace for partial results.
    pub fn scratch_bytes(&self) -> u64 {
        self.parts(&self.counts())[1]
    }

    /// Offset of the sums in the workspace, after o of the splits, and the workspace's end.
    fn parts(&self, counts: &Counts) -> [u64; 2] {
        let rows = if counts.splits > 1 { counts.all * counts.room } else { 0 };
        let sums = rows * 4 * u64::from(self.features.dims[1]);
        [sums, sums + rows * 8]
    }

    /// How tiles are divided among the CTAs: whole rounds of tiles that a CTA computes alone, and the rest by the estimate.
    fn division(&self, counts: &Counts, multiprocessors: u64) -> Division {
        let (rounds, rest) = (counts.all / multiprocessors, counts.all % multiprocessors);
        let enough = self.balancing_rounds();
        let by_splits = Division { whole: 0, each: 1 };
        if !self.config.whole || counts.splits == 1 {
            return by_splits;
        }
        if enough > 1 {
            let whole = match rest * 10 >= multiprocessors * 9 && rounds + 1 >= enough {
                true => counts.all,
                false if rounds >= enough => rounds * multiprocessors,
                false => 0,
            };
            // Three rounds of runs keep SMs busy for about equally long, which pays where partial results are large.
            let runs = (counts.all - whole) * counts.splits.div_ceil(RUN.into());
            let by_runs = counts.rows >= 16 && runs >= 3 * multiprocessors;
            return Division { whole, each: if by_runs { RUN.into() } else { 1 } };
        }
        let whole = rounds * multiprocessors;
        let candidates = [
            Division { whole: counts.all, each: 1 },
            Division { whole, each: RUN.into() },
            Division { whole, each: 1 },
        ];
        let time = |division: &Division| self.estimate(counts, multiprocessors, *division);
        candidates.into_iter().min_by_key(time).unwrap_or(by_splits)
    }

    /// The time of a division, as the number of bytes that one SM reads in it.
    fn estimate(&self, counts: &Counts, multiprocessors: u64, Division { whole, each }: Division) -> u64 {
        /// Of 100 SMs, those that read as fast as memory delivers. An SM of an H200 reads 62 GB/s.
        const SATURATING: u64 = 60;
        /// What an item costs beside its keys; what it costs more if it leaves a partial result, and for each row of that.
        const ITEM: u64 = 60 << 10;
        const PARTIAL: u64 = 75 << 10;
        const ROW: u64 = 8 << 10;
        let row_bytes: u64 = self.features.dims.iter().map(|&d| 2 * u64::from(d)).sum();
        let split = counts.blocks.div_ceil(counts.splits) * u64::from(self.config.cols) * row_bytes;
        let phase = |tiles: u64, splits: u64, item: u64| {
            let items = tiles * counts.splits.div_ceil(splits);
            let round = |items: u64| {
                let memory = items * splits * split * 100 / (SATURATING * multiprocessors);
                if items == 0 { 0 } else { memory.max(splits * split) + item }
            };
            items / multiprocessors * round(multiprocessors) + round(items % multiprocessors)
        };
        let partial = ITEM + PARTIAL + counts.rows * ROW;
        phase(whole, counts.splits, ITEM) + phase(counts.all - whole, each, partial)
    }

    /// Rounds of whole tiles that keep SMs busy for equally long. A sequence that is longer than the mean keeps its CTA busy for
    /// longer, and only many rounds balance that. The offsets are on the device, but the totals bound how unequal they are:
    /// if all sequences together have as many keys as the longest of them times the batch, all are equal.
    fn balancing_rounds(&self) -> u64 {
        /// Measured with lengths between 1 and the longest.
        const UNEQUAL_ROUNDS: u64 = 8;
        match self.layout {
            _ if !self.features.ragged.any() => 1,
            Layout::Packed(p) if !self.features.ragged.used_k => {
                let longest = (p.batch * p.max_k).max(1) as u64;
                let missing = longest.saturating_sub(p.total_k as u64);
                (2 * UNEQUAL_ROUNDS * missing).div_ceil(longest).clamp(1, UNEQUAL_ROUNDS)
            }
            _ => UNEQUAL_ROUNDS,
        }
    }

    /// Number of CTAs in the grid. All heads of a key are adjacent in memory, which reads them faster together. So the
    /// heads of a sequence run together, unless that takes one more round or leaves SMs idle that had work.
    ///
    /// Splits of unequal sequences need an odd grid. The number of splits is a power of two, and only long sequences have the
    /// last ones: in an even grid, a CTA would get splits of few numbers, or always of the same.
    fn together(&self, counts: &Counts, multiprocessors: u64) -> u64 {
        let unequal = self.features.ragged.any() && counts.all / multiprocessors < self.balancing_rounds();
        if unequal && counts.splits > 1 {
            return (multiprocessors - 1) | 1;
        }
        let sequence = counts.tiles * self.heads[1];
        let whole = multiprocessors / sequence.max(1) * sequence;
        let as_soon = whole > 0 && counts.all.div_ceil(whole) == counts.all.div_ceil(multiprocessors);
        if as_soon && counts.all >= whole { whole } else { multiprocessors }
    }

    /// Memory for partial results.
    fn workspace(&self, counts: &Counts, tensors: &Tensors) -> Result<Workspace, NoKernel> {
        let [sums, bytes] = self.parts(counts);
        let scratch = match tensors.scratch {
            Some(scratch) if scratch.bytes() >= bytes => scratch,
            // Without a second split, nothing is written there.
            _ if bytes == 0 => tensors.counters,
            _ => return Err(NoKernel { feature: format!("decode without {bytes} bytes of scratch") }),
        };
        Ok(Workspace { partial: scratch, sums: scratch.from(sums) })
    }

    /// Rows that threads address. Packed sequences share one batch.
    fn plain(&self, tensor: &DeviceTensor) -> PlainRows {
        let rows = PlainRows::new(tensor);
        match self.layout {
            Layout::Packed(_) => PlainRows { batch: 0, ..rows },
            Layout::Dense { .. } => rows,
        }
    }

    /// Grid and arguments of the kernel. The plan was made from `facts`.
    pub fn launch(&self, facts: &Facts, tensors: &Tensors, multiprocessors: u32) -> Result<DecodeLaunch, NoKernel> {
        let counts = self.counts();
        let Workspace { partial, sums } = self.workspace(&counts, tensors)?;
        let [q, _, _, o] = &tensors.rows;
        let [heads, kv_heads] = self.heads;
        let RowTensors { k, v, .. } = facts.row_tensors(&tensors.rows)?;
        let processors = self.together(&counts, multiprocessors.into());
        let Division { whole, each } = self.division(&counts, processors);
        let parts = counts.splits.div_ceil(each);
        let items = whole + (counts.all - whole) * parts;
        let call = DecodeCall {
            k,
            v,
            q: self.plain(q),
            common: facts.common(tensors)?,
            items,
            whole,
            parts,
            each,
            tiles: counts.tiles,
            kv_heads,
            most_blocks: counts.blocks,
            partials: PartialArgs {
                o: self.plain(o),
                results: facts.results(tensors)?,
                partial,
                sums,
                lse_heads: if matches!(self.layout, Layout::Packed(_)) { 0 } else { heads },
                room: counts.room,
            },
        };
        Ok(DecodeLaunch { grid: [items.clamp(1, processors) as u32, 1, 1], call })
    }
}

/// Regions of the workspace.
struct Workspace {
    /// o of each row of each split.
    partial: Span,
    /// m and l of each row of each split.
    sums: Span,
}

/// Largest number of queries and of keys of a sequence.
fn longest(layout: Layout) -> [u64; 2] {
    match layout {
        Layout::Dense { q_len, k_len, .. } => [q_len, k_len],
        Layout::Packed(p) => [p.max_q, p.max_k],
    }
    .map(|n| n as u64)
}

/// How tiles are divided among CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Division {
    /// Tiles that a CTA computes alone.
    whole: u64,
    /// Splits of the other tiles that a CTA computes: 1, or a run.
    each: u64,
}

/// Sizes of a call's schedule.
struct Counts {
    /// Rows of a tile.
    rows: u64,
    /// Tiles of a key/value head.
    tiles: u64,
    /// Tiles of all heads and sequences.
    all: u64,
    /// Splits that items count for every tile.
    splits: u64,
    /// Rows of all splits of a tile that the workspace has memory for.
    room: u64,
    /// Key blocks of the longest tile.
    blocks: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::forward::plan::ForwardPlan;
    use fulgurite_core::{DType, Mask, Problem};
    use fulgurite_ptx::device::Span;
    use std::sync::Arc;

    fn plan(sizes: [usize; 3], heads: [usize; 2], dims: [usize; 2], mask: Mask) -> ForwardPlan {
        let [batch, q_len, k_len] = sizes;
        let problem = Problem::builder().dense(batch, q_len, k_len).heads(heads[0], heads[1]);
        let problem = problem.head_dims(dims[0], dims[1]).dtype(DType::Bf16).mask(mask);
        ForwardPlan::new(&problem.build().unwrap(), None).unwrap()
    }

    #[test]
    fn every_pair_of_head_dims_has_a_kernel() {
        for (d, dv) in (8..=256).step_by(8).flat_map(|d| [8, 64, 72, 128, 136, 256].map(|dv| (d, dv))) {
            let kernel = plan([1, 2, 500], [4, 1], [d, dv], Mask::causal()).kernel(Target::HOPPER);
            let kernel = kernel.unwrap_or_else(|e| panic!("{d}, {dv}: {e}"));
            assert_eq!(kernel.name, "attention_decode", "{d}, {dv}");
        }
    }

    #[test]
    fn launches_pass_the_devices_check() {
        for (mask, k_len) in [(Mask::none(), 8192), (Mask::causal(), 8192), (Mask::none(), 5), (Mask::none(), 0)] {
            let plan = plan([2, 3, k_len], [8, 2], [64, 128], mask);
            let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
            let at = |s: u64, h: u64, d: u64| {
                DeviceTensor::packed(Span::new(4096, (2 * s * h * d * 2).max(64)), [2, s, h, d])
            };
            let (k, v) = (at(k_len as u64, 2, 64), at(k_len as u64, 2, 128));
            let memory = Span::new(4096, 1 << 20);
            let scratch = Some(Span::new(4096, plan.scratch_bytes()));
            let tensors = Tensors { scratch, ..Tensors::new([at(3, 8, 64), k, v, at(3, 8, 128)], memory, memory) };
            let launch = plan.launch(kernel.clone(), &tensors, 132).unwrap().unwrap();
            fulgurite_ptx::device::check_launch(&kernel, launch.grid, &launch.args).unwrap();
            let splits = if k_len == 8192 { 8 } else { 1 };
            assert_eq!(launch.grid, [4 * splits, 1, 1]); // four heads of keys in all
        }
    }

    #[test]
    fn heads_of_a_sequence_run_together_where_that_costs_no_round() {
        let blocks = |batch: usize, kv_heads: usize| {
            let plan = plan([batch, 1, 8192], [4 * kv_heads, kv_heads], [128; 2], Mask::none());
            let decode = plan.decode().unwrap();
            decode.together(&decode.counts(), 132)
        };
        // Two rounds of 16 sequences; of 132 blocks the second round would have a few less.
        assert_eq!(blocks(32, 8), 128);
        // Three rounds of 16 sequences, or of 130 tiles; 33 sequences of 4 heads are one round of all.
        assert_eq!([blocks(48, 8), blocks(33, 4)], [128, 132]);
        // One round more than with all multiprocessors, fewer tiles than blocks, more heads than multiprocessors.
        assert_eq!([blocks(33, 8), blocks(4, 8), blocks(3, 200)], [132; 3]);
    }

    /// Divisions that an H200 was measured to be fastest with (lab 004, experiments 52 and 53).
    #[test]
    fn tiles_are_divided_as_measured() {
        let division = |sizes: [usize; 3], heads: [usize; 2], dim: usize| {
            let plan = plan(sizes, heads, [dim; 2], Mask::none());
            let decode = plan.decode().unwrap();
            let counts = decode.counts();
            let Division { whole, each } = decode.division(&counts, decode.together(&counts, 132));
            (whole, if whole == counts.all { 0 } else { each })
        };
        let run = u64::from(RUN);
        for (batch, want) in [(1, (0, 1)), (2, (0, 1)), (6, (0, run)), (8, (0, run)), (12, (96, 0)), (16, (128, 0))] {
            for queries in [1, 4, 16] {
                assert_eq!(division([batch, queries, 8192], [32, 8], 128), want, "{batch} x {queries}");
            }
        }
        // Large partial results are worth half as many of them.
        assert_eq!([1, 16].map(|queries| division([4, queries, 8192], [32, 8], 128)), [(0, 1), (0, run)]);
        // A last round of a few whole tiles would take as long as a full one.
        assert_eq!(division([17, 1, 5000], [64, 8], 64), (128, 1));
        assert_eq!(division([5, 1, 5000], [32, 32], 128), (128, 1));
    }

    #[test]
    fn memory_for_partial_results_is_wanted_where_there_are_any() {
        let plan = |k_len, mask| plan([1, 1, k_len], [4, 1], [64, 128], mask);
        let bytes = |k_len, mask| {
            let plan = plan(k_len, mask);
            (plan.counter_bytes(), plan.scratch_bytes())
        };
        assert_eq!(bytes(512, Mask::none()), (12, 0));
        // Two splits of four rows, 128 elements and two numbers each.
        assert_eq!(bytes(1024, Mask::none()), (12, 2 * 4 * (128 + 2) * 4));
        // A window leaves less to split.
        assert_eq!(bytes(8192, Mask::window(Some(99), Some(0))), (12, 0));
    }

    #[test]
    fn results_of_splits_without_room_are_refused() {
        let plan = plan([1, 1, 1024], [4, 1], [64, 64], Mask::none());
        let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
        let memory = Span::new(4096, 1 << 20);
        let at = |s, h| DeviceTensor::packed(memory, [1, s, h, 64]);
        let tensors = Tensors::new([at(1, 4), at(1024, 1), at(1024, 1), at(1, 4)], memory, memory);
        let refused = plan.launch(kernel, &tensors, 132).err().unwrap().to_string();
        assert_eq!(refused, "decode without 2112 bytes of scratch");
    }
}
