//! The steps of queries that a block mask leaves to each key tile: from the first query block that sees a key of the tile to
//! the last one. The main kernel skips all other steps.
//!
//! Hidden blocks between the two are computed and masked. Documents, windows and causal masks have none in between.

use crate::params::{Bindings, Lens, Params, Program};
use fulgurite_core::BlockSpec;
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{BuildError, Divisor, Kernel, Pointer, Scope, Target, Val, Who};
use std::sync::{Arc, OnceLock};

/// Ranges that a CTA computes, one for each warp.
const WARPS: u32 = 4;
/// Words of a range: the first step, and one past the last step.
const WORDS: u64 = 2;

/// Sizes of the ranges of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeSizes {
    /// Sequences and key/value heads that have ranges of their own: 1 if all share them.
    pub batch: u64,
    pub heads: u64,
    /// Key tiles of a head.
    pub tiles: u64,
    /// Query heads of a key/value head, if each has blocks of its own; else 1.
    group: u64,
    /// Query blocks and key blocks of a head.
    blocks: [u64; 2],
    /// Queries and keys of a block.
    block: [u64; 2],
}

impl RangeSizes {
    /// The sizes for a mask with this many `blocks` of queries and keys, `kv_heads` and `tiles` of a head.
    pub fn new(spec: BlockSpec, blocks: [usize; 2], kv_heads: u64, tiles: u64) -> RangeSizes {
        let own = spec.heads > 1;
        RangeSizes {
            batch: spec.batch as u64,
            heads: if own { kv_heads } else { 1 },
            tiles,
            group: if own { spec.heads as u64 / kv_heads.max(1) } else { 1 },
            blocks: blocks.map(|n| n as u64),
            block: [spec.rows, spec.cols].map(|n| n as u64),
        }
    }

    fn count(&self) -> u64 {
        self.batch * self.heads * self.tiles
    }

    /// Bytes of all ranges.
    pub fn bytes(&self) -> u64 {
        self.count() * WORDS * 4
    }
}

/// A launch: the table of blocks, and the ranges to write.
#[derive(Debug, Clone, Copy)]
struct RangesCall {
    table: Span,
    to: Span,
    sizes: RangeSizes,
    /// Queries of a step and keys of a tile.
    step: u32,
    keys: u32,
}

struct CallParams<'k> {
    table: Pointer<'k, u32>,
    to: Pointer<'k, u32>,
    /// Ranges in all, and tiles of a head.
    count: Val<'k, u32>,
    tiles: Divisor<'k>,
    group: Val<'k, u32>,
    blocks: [Val<'k, u32>; 2],
    /// Queries and keys of a block.
    rows: Val<'k, u32>,
    cols: Divisor<'k>,
    step: Divisor<'k>,
    keys: Val<'k, u32>,
}

impl<'k> CallParams<'k> {
    fn declare(p: &Params<'k, RangesCall>) -> Self {
        CallParams {
            table: p.array("table", |call| call.table),
            to: p.array("to", |call| call.to),
            count: p.u32("count", |call| call.sizes.count() as u32),
            tiles: p.divisor("tiles", |call| call.sizes.tiles as u32),
            group: p.u32("group", |call| call.sizes.group as u32),
            blocks: [
                p.u32("q_blocks", |call| call.sizes.blocks[0] as u32),
                p.u32("k_blocks", |call| call.sizes.blocks[1] as u32),
            ],
            rows: p.u32("block_rows", |call| call.sizes.block[0] as u32),
            cols: p.divisor("block_cols", |call| call.sizes.block[1] as u32),
            step: p.divisor("step", |call| call.step),
            keys: p.u32("keys", |call| call.keys),
        }
    }
}

/// Writes ranges. A warp scans the blocks of one key tile, a query block for each lane.
pub(crate) fn kernel(target: Target) -> Result<Kernel, BuildError> {
    let program = Program::build("attention_step_ranges", target, |p| {
        let c = CallParams::declare(p);
        let [q_blocks, k_blocks] = c.blocks;
        p.builder().threads(32 * WARPS, |w| {
            let own = w.cta().mul_add(WARPS, w.thread() / 32);
            // A warp past the end repeats the last range: shuffles need all lanes.
            let number = own.min(c.count - 1);
            let [pair, tile] = c.tiles.div_rem(number);
            let first_key = tile * c.keys;
            let first = c.cols.div_rem(first_key)[0];
            let end = (c.cols.div_rem(first_key + c.keys - 1)[0] + 1).min(k_blocks);
            // Block numbers are far below 2^24, so f32 holds them exactly.
            let (low, high) = (w.var(f32::INFINITY), w.var(0.0f32));
            w.each(w.constant(0u32), c.group, 1, |w, head| {
                let rows = (pair * c.group + head) * q_blocks;
                w.each(w.lane(), q_blocks, 32, |w, row| {
                    let blocks = c.table.at_wide((rows + row).mul_wide(k_blocks));
                    w.each(first, end, 1, |w, column| {
                        w.when(blocks.load(w, column).gt(0u32), |_| {
                            low.set(low.get().min(row.to_f32()));
                            high.set(high.get().max((row + 1).to_f32()));
                        });
                    });
                });
            });
            let low = w.reduce(low.get(), 32, |a, b| a.min(b));
            let high = w.reduce(high.get(), 32, |a, b| a.max(b));
            // Without a block the range is empty: 0 to 0.
            let low = low.min(high).to_i32().to_u32();
            let first = c.step.div_rem(low * c.rows)[0];
            let high = high.to_i32().to_u32();
            let end = c.step.div_rem(high * c.rows + c.step.value() - 1)[0];
            // The last block also has the rows of a packed sequence that is longer than its caller said.
            let end = high.eq(q_blocks).select::<u32>(u32::MAX, end);
            w.when(w.lane().eq(0) & own.lt(c.count), |w| {
                c.to.store(w, own * 2, first);
                c.to.store(w, own * 2 + 1, end);
            });
        });
    });
    Ok(program?.into_kernel())
}

/// The launch that writes the ranges of a table of blocks, for steps of `step` queries and tiles of `keys` keys.
pub(crate) fn launch(
    kernel: &Arc<Kernel>,
    sizes: RangeSizes,
    [step, keys]: [u32; 2],
    [table, to]: [Span; 2],
) -> Option<Launch> {
    static BINDINGS: OnceLock<Bindings<RangesCall>> = OnceLock::new();
    let bindings = BINDINGS.get_or_init(|| {
        Bindings::declared(|p| {
            CallParams::declare(p);
        })
    });
    let grid = [sizes.count().div_ceil(u64::from(WARPS)) as u32, 1, 1];
    let call = RangesCall { table, to, sizes, step, keys };
    (grid[0] > 0).then(|| bindings.launch(kernel.clone(), grid, &call))
}

/// Arguments of [`StepRanges`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct RangeArgs {
    pub ranges: Span,
    pub sizes: RangeSizes,
}

impl RangeArgs {
    /// Ranges from one sequence, and from one key/value head, to the next.
    fn strides(&self) -> [u32; 2] {
        let RangeSizes { batch, heads, tiles, .. } = self.sizes;
        let stride = |own: u64, n: u64| if own > 1 { n as u32 } else { 0 };
        [stride(batch, heads * tiles), stride(heads, tiles)]
    }
}

/// The ranges, as the main kernel reads them.
pub(crate) struct StepRanges<'k> {
    ranges: Pointer<'k, u32>,
    batch: Val<'k, u32>,
    head: Val<'k, u32>,
    last: Val<'k, u32>,
}

impl<'k> StepRanges<'k> {
    pub fn declare<C: 'static>(p: &Params<'k, C>, args: impl Lens<C, RangeArgs>) -> Self {
        StepRanges {
            ranges: p.array("step_ranges", move |call| args(call).ranges),
            batch: p.u32("range_batch", move |call| args(call).strides()[0]),
            head: p.u32("range_head", move |call| args(call).strides()[1]),
            last: p.u32("range_last", move |call| args(call).sizes.tiles.max(1) as u32 - 1),
        }
    }

    /// The steps of a tile that are also in its range; at least one, because every tile has a step.
    pub fn within<W: Who>(
        &self,
        t: &Scope<'k, W>,
        [batch, kv_head, tile]: [Val<'k, u32>; 3],
        [first, end]: [Val<'k, u32>; 2],
    ) -> [Val<'k, u32>; 2] {
        // A packed sequence may be longer than its caller said.
        let tile = tile.min(self.last);
        let at = (batch * self.batch + kv_head * self.head + tile) * 2;
        let end = end.min(self.ranges.load(t, at + 1)).max(1);
        [first.max(self.ranges.load(t, at)).min(end - 1), end]
    }
}
