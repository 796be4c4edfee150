//! The launch of the kernel for few queries: which calls it takes, and the memory it wants beside inputs and outputs.

use super::few::{self, Cut, Features, ROWS, Tuning};
use super::partial::FIRST_COUNTER;
use super::plan::{Placed, Visible, Workspace};
use fulgurite_ptx::device::{Launch, Span, Value};
use fulgurite_ptx::{BuildError, Kernel, Number, Target, bf16, divisor_values, f16};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// A call with few queries: what its kernel's text depends on, and its sizes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Few {
    pub number: Number,
    pub features: Features,
    pub tuning: Tuning,
    /// Batch, queries, keys, query heads, key/value heads.
    pub sizes: [u64; 5],
    pub scale: f32,
}

impl Few {
    /// Whether a call with these sizes is one: all its rows for a key/value head make one tile. A rule of the sequence's
    /// own lengths, so that a row's bits are the same alone and in a batch.
    pub fn takes([_, q_len, _, heads, kv_heads]: [u64; 5]) -> bool {
        q_len * (heads / kv_heads.max(1)) <= u64::from(ROWS)
    }

    pub fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        match self.number {
            Number::Bf16 => few::kernel::<bf16>(target, &self.features, self.tuning),
            _ => few::kernel::<f16>(target, &self.features, self.tuning),
        }
    }

    pub fn same_kernel(&self, other: &Few) -> bool {
        (self.number, &self.features, self.tuning) == (other.number, &other.features, other.tuning)
    }

    /// Query heads of a key/value head, and packed rows.
    fn rows(&self) -> [u64; 2] {
        let [_, q_len, _, heads, kv_heads] = self.sizes;
        let group = heads / kv_heads.max(1);
        [group, q_len * group]
    }

    fn counts(&self) -> Counts {
        let [batch, q_len, k_len, _, kv_heads] = self.sizes;
        let [_, rows] = self.rows();
        let cut = Cut::of(self.tuning.cols, rows.min(ROWS.into()));
        let tiles = rows.div_ceil(ROWS.into());
        let visible = Visible::of(&self.features.mask, q_len, k_len);
        let blocks = visible.count.div_ceil(self.tuning.cols.into()).max(1);
        // One tile sees what the call sees; several see less each.
        let most = if tiles == 1 { cut.splits(blocks) } else { cut.most(blocks) };
        Counts { tiles, all: tiles * batch * kv_heads, most, room: rows.min(ROWS.into()), cut, visible }
    }

    /// First the counters, then o and the sums of each split where there are several.
    pub fn workspace(&self) -> Workspace {
        let [zeroed_bytes, _, _, bytes] = self.ends(&self.counts());
        Workspace { bytes, zeroed_bytes }
    }

    /// Where the counters end, o of the splits and their sums begin, and these end.
    fn ends(&self, counts: &Counts) -> [u64; 4] {
        let zeroed = 4 * (u64::from(FIRST_COUNTER) + counts.all);
        let rows = if counts.most > 1 { counts.all * counts.most * counts.room } else { 0 };
        let first = zeroed.next_multiple_of(16);
        let sums = first + rows * 4 * u64::from(self.features.dims[1]);
        [zeroed, first, sums, sums + (rows * 8).next_multiple_of(16)]
    }

    pub fn launch(
        &self,
        kernel: Arc<Kernel>,
        [q, k, v, o]: [Placed; 4],
        lse: Span,
        workspace: Span,
        multiprocessors: u32,
    ) -> Option<Launch> {
        let [_, q_len, k_len, _, kv_heads] = self.sizes;
        let counts = self.counts();
        let Counts { tiles, all, most, room, cut, visible } = counts;
        let items = all * most;
        if items == 0 || o.shape.contains(&0) {
            return None;
        }
        let [group, rows] = self.rows();
        let [_, partial, sums, _] = self.ends(&counts);
        let pointer = |span| Value::Pointer(span);
        let u32s = |n: u64| Value::U32(n as u32);
        // Strides of pairs of elements.
        let strides = |placed: &Placed| placed.strides.map(|stride| Value::U64(stride / 2));
        let mut args: Vec<Value> =
            [k, v].map(|placed| Value::Tensor(visible.part(&placed, &q).tensor(self.number))).into();
        args.push(pointer(q.span));
        args.extend(strides(&q));
        args.push(pointer(workspace));
        args.extend([items, rows, u64::from(cut.most_log2), visible.count].map(u32s));
        args.extend([most, tiles, kv_heads, group].map(|d| divisor_values(d as u32)).into_iter().flatten());
        args.push(Value::F32(self.scale * LOG2_E));
        args.extend(visible.diagonals(q_len, k_len));
        args.push(pointer(o.span));
        args.extend(strides(&o));
        args.extend([lse, workspace.from(partial), workspace.from(sums)].map(pointer));
        args.extend([q_len, room].map(u32s));
        let blocks = items.min(multiprocessors.into()) as u32;
        Some(Launch { kernel, grid: [blocks, 1, 1], args })
    }
}

/// How a call is divided.
struct Counts {
    /// Tiles of a key/value head.
    tiles: u64,
    /// Tiles of all.
    all: u64,
    /// Splits that every tile has room for.
    most: u64,
    /// Rows that every split has room for.
    room: u64,
    cut: Cut,
    visible: Visible,
}

#[cfg(test)]
mod tests {
    use super::super::plan::Forward;
    use super::*;
    use fulgurite_core::{DType, Mask, Problem};

    fn plan(sizes: [usize; 3], heads: [usize; 2], dims: [usize; 2], mask: Mask) -> Forward {
        let [batch, q_len, k_len] = sizes;
        let problem = Problem::builder().dense(batch, q_len, k_len).heads(heads[0], heads[1]);
        let problem = problem.head_dims(dims[0], dims[1]).dtype(DType::Bf16).mask(mask);
        Forward::new(&problem.build().unwrap(), None).unwrap()
    }

    #[test]
    fn every_pair_of_head_dims_has_a_kernel() {
        for (d, dv) in (8..=256).step_by(8).flat_map(|d| [8, 64, 72, 128, 136, 256].map(|dv| (d, dv))) {
            let kernel = plan([1, 2, 500], [4, 1], [d, dv], Mask::causal()).kernel(Target::HOPPER);
            let kernel = kernel.unwrap_or_else(|e| panic!("{d}, {dv}: {e}"));
            assert_eq!(kernel.name, "attention_few", "{d}, {dv}");
        }
    }

    #[test]
    fn launches_pass_the_devices_check() {
        for (mask, k_len) in [(Mask::none(), 8192), (Mask::causal(), 8192), (Mask::none(), 5), (Mask::none(), 0)] {
            let plan = plan([2, 3, k_len], [8, 2], [64, 128], mask);
            let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
            let at = |s: u64, h: u64, d: u64| {
                Placed::packed(Span { address: 4096, bytes: (2 * s * h * d * 2).max(64) }, [2, s, h, d])
            };
            let (k, v) = (at(k_len as u64, 2, 64), at(k_len as u64, 2, 128));
            let memory = Span { address: 4096, bytes: 1 << 20 };
            let workspace = Span { bytes: plan.workspace().bytes, ..memory };
            let tensors = [at(3, 8, 64), k, v, at(3, 8, 128)];
            let launch = plan.launch(kernel.clone(), tensors, memory, workspace, 132).unwrap();
            fulgurite_ptx::device::check_launch(&kernel, launch.grid, &launch.args).unwrap();
            let splits = if k_len == 8192 { 16 } else { 1 };
            assert_eq!(launch.grid, [4 * splits, 1, 1]); // four heads of keys in all
        }
    }

    #[test]
    fn memory_for_partial_results_is_wanted_where_there_are_any() {
        let bytes = |k_len| plan([1, 1, k_len], [4, 1], [64, 128], Mask::none()).workspace();
        assert_eq!(bytes(256), Workspace { bytes: 16, zeroed_bytes: 12 });
        // Two splits of four rows, 128 elements and two numbers each.
        assert_eq!(bytes(512), Workspace { bytes: 16 + 2 * 4 * (128 + 2) * 4, zeroed_bytes: 12 });
        // A window leaves less to split.
        let window = plan([1, 1, 8192], [4, 1], [64, 128], Mask::window(Some(99), Some(0)));
        assert_eq!(window.workspace(), bytes(256));
    }
}
