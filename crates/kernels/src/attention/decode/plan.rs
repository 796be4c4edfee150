//! The launch of the kernel for few queries: which calls it takes, and the memory it wants beside inputs and outputs.

use crate::attention::decode::{self, Cut, DecodeConfig, ROWS, padded};
use crate::attention::forward::Features;
use crate::attention::forward::plan::{NoKernel, Visible};
use crate::parts::arguments::{Arguments, DeviceTensor, Tensors};
use crate::parts::merge::FIRST_COUNTER;
use crate::parts::modifier::Modifiers;
use fulgurite_core::{Layout, Rescale};
use fulgurite_ptx::device::Value;
use fulgurite_ptx::{BuildError, Kernel, Number, Target, bf16, f16};

/// A call with few queries: what its kernel's text depends on, and its sizes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DecodePlan {
    number: Number,
    /// With the head dimensions of the tensors.
    pub features: Features,
    pub config: DecodeConfig,
    layout: Layout,
    /// Query heads, key/value heads.
    heads: [u64; 2],
}

impl DecodePlan {
    /// The call as one with few queries, if it is: all rows of a key/value head make one tile. A rule of the sequence's own
    /// lengths (or the longest of a batch that is packed), so that a row's bits are the same alone and in a batch.
    pub fn new(
        number: Number,
        features: &Features,
        dims: [usize; 2],
        layout: Layout,
        heads: [u64; 2],
        rescale: Rescale,
    ) -> Option<DecodePlan> {
        let [q_len, _] = longest(layout);
        let rows = q_len * (heads[0] / heads[1].max(1));
        if rows > u64::from(ROWS) || features.blocks.is_some() {
            return None;
        }
        let dims = dims.map(|d| d as u32);
        let modifiers = Modifiers { mixed_heads: true, ..features.modifiers.clone() };
        let features = Features { dims, modifiers, ..features.clone() };
        let config = DecodeConfig { rescale, ..DecodeConfig::hopper(padded(dims)).with_room(&features) };
        Some(DecodePlan { number, features, config, layout, heads })
    }

    pub fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        match self.number {
            Number::Bf16 => decode::kernel::<bf16>(target, &self.features, self.config),
            _ => decode::kernel::<f16>(target, &self.features, self.config),
        }
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
        let rows = q_len * (self.heads[0] / self.heads[1].max(1));
        let tiles = rows.div_ceil(ROWS.into()).max(1);
        let room = rows.min(ROWS.into());
        let ragged = self.features.ragged.any();
        let visible = match ragged {
            true => Visible { first: 0, count: k_len },
            false => Visible::of(&self.features.mask, q_len, k_len),
        };
        let blocks = visible.count.div_ceil(self.config.cols.into()).max(1);
        let cut = |rows| Cut::of(self.config.cols, rows);
        let [splits, room] = match ragged {
            // Some may have fewer rows, and more splits for it.
            true => {
                let room = [16, 32, room].map(|rows| rows.min(room) * cut(rows.min(room)).most(blocks));
                [cut(1).most(blocks), room.into_iter().max().unwrap_or(0)]
            }
            // One tile sees what the call sees; several see less each.
            false => {
                let splits = if tiles == 1 { cut(rows).splits(blocks) } else { cut(rows).most(blocks) };
                [splits, splits * room]
            }
        };
        Counts { tiles, all: tiles * batch * self.heads[1], splits, room, blocks, visible }
    }

    /// Bytes of counters: one for each tile behind those that every launch has.
    pub fn counter_bytes(&self) -> u64 {
        4 * (u64::from(FIRST_COUNTER) + self.counts().all)
    }

    /// Bytes for results of splits.
    pub fn scratch_bytes(&self) -> u64 {
        self.parts(&self.counts())[1]
    }

    /// Where sums of splits begin behind their o, and where they end.
    fn parts(&self, counts: &Counts) -> [u64; 2] {
        let rows = if counts.splits > 1 { counts.all * counts.room } else { 0 };
        let sums = rows * 4 * u64::from(self.features.dims[1]);
        [sums, sums + rows * 8]
    }

    /// Tiles of which a block takes all splits: as many as keep all multiprocessors busy for the same time. The rest is
    /// handed out by splits, unless it is about as many as there are multiprocessors.
    fn whole(&self, counts: &Counts, multiprocessors: u64) -> u64 {
        /// A longer sequence than the others keeps its block busy for longer: there must be many.
        const UNEQUAL_ROUNDS: u64 = 8;
        let (rounds, rest) = (counts.all / multiprocessors, counts.all % multiprocessors);
        let enough = if self.features.ragged.any() { UNEQUAL_ROUNDS } else { 1 };
        match self.config.whole && counts.splits > 1 {
            true if rest * 10 >= multiprocessors * 9 && rounds + 1 >= enough => counts.all,
            true if rounds >= enough => rounds * multiprocessors,
            _ => 0,
        }
    }

    /// Blocks that run at the same time. The rows of all key/value heads of a key lie side by side, and memory reads them
    /// faster together: heads of a sequence start and go on together where that leaves no more than a few multiprocessors
    /// without work.
    fn together(&self, counts: &Counts, multiprocessors: u64) -> u64 {
        let sequence = counts.tiles * self.heads[1];
        let whole = multiprocessors / sequence.max(1) * sequence;
        let as_soon = whole > 0 && counts.all.div_ceil(whole) == counts.all.div_ceil(multiprocessors);
        if as_soon && counts.all >= whole { whole } else { multiprocessors }
    }

    /// Its arguments beside those that every launch has; the grid.
    pub fn arguments(
        &self,
        args: &mut Arguments<'_>,
        tensors: &Tensors,
        multiprocessors: u32,
    ) -> Result<[u32; 3], NoKernel> {
        let counts = self.counts();
        let [q, k, v, o] = &tensors.rows;
        let [heads, kv_heads] = self.heads;
        let [sums, bytes] = self.parts(&counts);
        let scratch = match tensors.scratch {
            Some(scratch) if scratch.bytes() >= bytes => scratch,
            // Without other splits nothing is left there.
            _ if bytes == 0 => tensors.counters,
            _ => return Err(NoKernel { feature: format!("few queries without {bytes} bytes of scratch") }),
        };
        if let Layout::Dense { q_len, k_len, .. } = self.layout
            && !self.features.ragged.any()
        {
            counts.visible.lengths(args, q_len as u64, k_len as u64);
            for (name, placed) in [("k", k), ("v", v)] {
                args.add(name, Value::Tensor(counts.visible.part(placed, q).tensor(self.number)));
            }
        }
        // Packed sequences share one batch.
        let packed = matches!(self.layout, Layout::Packed(_));
        for (names, placed) in [(["q", "q_batch", "q_row", "q_head"], q), (["o", "o_batch", "o_row", "o_head"], o)] {
            let DeviceTensor { span, strides: [batch, row, head], .. } = *placed;
            args.add(names[0], Value::Pointer(span));
            let batch = if packed { 0 } else { batch };
            // In pairs of elements.
            names[1..].iter().zip([batch, row, head]).for_each(|(name, n)| args.add(name, Value::U64(n / 2)));
        }
        args.add("partial", Value::Pointer(scratch));
        args.add("sums", Value::Pointer(scratch.from(sums)));
        let processors = self.together(&counts, multiprocessors.into());
        let whole = self.whole(&counts, processors);
        let items = whole + (counts.all - whole) * counts.splits;
        for (name, n) in [
            ("items", items),
            ("whole", whole),
            ("room", counts.room),
            ("most_blocks", counts.blocks),
            ("lse_heads", if packed { 0 } else { heads }),
        ] {
            args.add_u32(name, n);
        }
        args.divisor(["splits", "splits_magic", "splits_shift"], counts.splits);
        args.divisor(["tiles", "tiles_magic", "tiles_shift"], counts.tiles);
        args.divisor(["kv_heads", "kv_heads_magic", "kv_heads_shift"], kv_heads);
        Ok([items.clamp(1, processors) as u32, 1, 1])
    }
}

/// The most queries and keys of a sequence.
fn longest(layout: Layout) -> [u64; 2] {
    match layout {
        Layout::Dense { q_len, k_len, .. } => [q_len, k_len],
        Layout::Packed(p) => [p.max_q, p.max_k],
    }
    .map(|n| n as u64)
}

/// How a call is divided.
struct Counts {
    /// Tiles of a key/value head.
    tiles: u64,
    /// Tiles of all.
    all: u64,
    /// Splits that items count for every tile.
    splits: u64,
    /// Rows of all splits that every tile has room for.
    room: u64,
    /// Blocks of keys of the longest tile.
    blocks: u64,
    visible: Visible,
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
            let few = plan.decode.as_ref().unwrap();
            few.together(&few.counts(), 132)
        };
        // Two rounds of 16 sequences; of 132 blocks the second round would have a few less.
        assert_eq!(blocks(32, 8), 128);
        // Three rounds of 16 sequences, or of 130 tiles; 33 sequences of 4 heads are one round of all.
        assert_eq!([blocks(48, 8), blocks(33, 4)], [128, 132]);
        // One round more than with all multiprocessors, fewer tiles than blocks, more heads than multiprocessors.
        assert_eq!([blocks(33, 8), blocks(4, 8), blocks(3, 200)], [132; 3]);
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
        assert_eq!(refused, "few queries without 2112 bytes of scratch");
    }
}
