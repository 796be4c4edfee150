//! Block lists made from a mask's expression alone, on the device and for each call.
//!
//! One kernel finds the smallest and largest value of everything that the mask reads from tensors by query or by key, for
//! each block of queries and of keys. Another kernel bounds the mask over each pair of blocks by interval arithmetic. It
//! writes the lists that forward attention walks over, or the table of kinds from which backward attention finds its
//! steps. The host reads no contents, so a captured call makes new lists for new contents.

use crate::params::{Bindings, Params, Program};
use crate::parts::arguments::DeviceBlockLists;
use crate::parts::modifier::{AuxArgs, Bounded, Modifiers, Parameters, RowBounds, TilePosition};
use crate::parts::schedule::{Ragged, SequenceArgs, Sides};
use fulgurite_core::expr::{self, Type, Var};
use fulgurite_core::{BlockSpec, Layout, Problem};
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{BuildError, Divisor, Group, Kernel, Pointer, Scope, Target, Val, Warpgroups};
use std::sync::Arc;

/// Warps of a CTA. Each has a block of rows of its own.
const WARPS: u32 = 4;
/// Queries and keys that a block has at least: those of a block mask by default.
const BLOCK: usize = 128;
/// Queries, keys, and products of both from which on the launches cost little beside attention.
const LEAST: [usize; 3] = [512, 512, 1 << 21];
/// Pairs of blocks for which lists are made: they take 8 bytes each.
const MOST: u64 = 1 << 24;
/// Alignment of a region of the workspace, in bytes.
const ALIGN: u64 = 256;

/// The blocks of a problem whose mask has an expression and no lists.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ExpressionBlocks {
    spec: BlockSpec,
    bounded: Bounded,
    modifiers: Modifiers,
    ragged: Ragged,
    layout: Layout,
}

/// What the kernel of blocks writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Partial and full blocks of each row of blocks.
    Lists,
    /// The kind of each block: hidden 0, partial 1, full 2.
    Table,
}

/// The kernels of a problem, with their bindings.
#[derive(Clone)]
pub struct BlockKernels {
    /// Finds the extremes of steps, if the mask reads tensors by query or by key.
    extremes: Option<Arc<Kernel>>,
    blocks: Arc<Kernel>,
    bindings: Arc<[Bindings<Call>; 2]>,
}

impl BlockKernels {
    /// The kernels, in the order of their launches.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Kernel>> {
        self.extremes.iter().chain([&self.blocks])
    }
}

/// The results of a launch: lists, or a table.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Results {
    Lists(DeviceBlockLists),
    Table(Span),
}

/// Arguments of both kernels.
struct Call {
    aux: Vec<AuxArgs>,
    sequences: SequenceArgs,
    sizes: Sizes,
    extremes: Span,
    results: Results,
}

/// Numbers of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    batch: u64,
    heads: u64,
    /// Blocks of queries and of keys.
    blocks: [u64; 2],
    /// Queries and keys of a block.
    block: [u64; 2],
}

impl Sizes {
    fn pairs(&self) -> u64 {
        self.batch * self.heads
    }
}

struct CallParams<'k> {
    parameters: Parameters<'k>,
    sides: Sides<'k>,
    heads: Divisor<'k>,
    q_blocks: Divisor<'k>,
    k_blocks: Val<'k, u32>,
    /// Blocks of queries and of keys together.
    both: Divisor<'k>,
    pairs: Val<'k, u32>,
    block: [Val<'k, u32>; 2],
    extremes: Pointer<'k, u32>,
}

impl<'k> CallParams<'k> {
    fn declare(p: &Params<'k, Call>, of: &ExpressionBlocks) -> Self {
        CallParams {
            parameters: Parameters::declare(p, &of.modifiers, |call: &Call| &call.aux),
            sides: Sides::declare(p, of.ragged, 0, |call: &Call| &call.sequences),
            heads: p.divisor("heads", |call| call.sizes.heads as u32),
            q_blocks: p.divisor("q_blocks", |call| call.sizes.blocks[0] as u32),
            k_blocks: p.u32("k_blocks", |call| call.sizes.blocks[1] as u32),
            both: p.divisor("both_blocks", |call| (call.sizes.blocks[0] + call.sizes.blocks[1]) as u32),
            pairs: p.u32("pairs", |call| call.sizes.pairs() as u32),
            block: [
                p.u32("block_rows", |call| call.sizes.block[0] as u32),
                p.u32("block_cols", |call| call.sizes.block[1] as u32),
            ],
            extremes: p.array("extremes", |call| call.extremes),
        }
    }

    /// A sequence and head that share lists, by their number.
    fn pair(&self, w: &Scope<'k, Group>, number: Val<'k, u32>) -> Pair<'k> {
        let [batch, head] = self.heads.div_rem(number);
        let lengths = [0, 1].map(|side| {
            let [_, room] = self.sides.room(w, side, batch);
            self.sides.used(w, side, batch, room).to_i32()
        });
        let [q_len, k_len] = lengths;
        Pair { lengths, place: TilePosition { batch, heads: vec![head], rows: Vec::new(), q_len, k_len } }
    }

    /// First and last row of a block; its rows past the end of the sequence count as the last row.
    fn rows(&self, side: usize, block: Val<'k, u32>, pair: &Pair<'k>) -> [Val<'k, i32>; 2] {
        let first = (block * self.block[side]).to_i32();
        let last = (pair.lengths[side] - 1).max(0);
        [first.min(last), (first + self.block[side].to_i32() - 1).min(last)]
    }

    /// The extremes of a block, `words` words long.
    fn extremes_of(&self, pair: Val<'k, u32>, block: Val<'k, u32>, words: u32) -> Pointer<'k, u32> {
        self.extremes.at_wide((pair * self.both.value() + block).mul_wide(words))
    }
}

struct Pair<'k> {
    /// Queries and keys in use.
    lengths: [Val<'k, i32>; 2],
    place: TilePosition<'k>,
}

/// Where the kernel of blocks writes.
enum ResultParams<'k> {
    Lists { counts: [Pointer<'k, u32>; 2], blocks: [Pointer<'k, u32>; 2] },
    Table(Pointer<'k, u32>),
}

impl<'k> ResultParams<'k> {
    fn declare(p: &Params<'k, Call>, form: Form) -> Self {
        let lists = |call: &Call| match call.results {
            Results::Lists(lists) => lists,
            Results::Table(_) => panic!("bug in fulgurite: a table where lists are written"),
        };
        match form {
            Form::Lists => ResultParams::Lists {
                counts: [("partial_counts", 0), ("full_counts", 1)]
                    .map(|(name, i): (&str, usize)| p.array(name, move |call| lists(call).counts[i])),
                blocks: [("partial_blocks", 0), ("full_blocks", 1)]
                    .map(|(name, i): (&str, usize)| p.array(name, move |call| lists(call).blocks[i])),
            },
            Form::Table => ResultParams::Table(p.array("to", |call| match call.results {
                Results::Table(to) => to,
                Results::Lists(_) => panic!("bug in fulgurite: lists where a table is written"),
            })),
        }
    }
}

impl ExpressionBlocks {
    /// The blocks of a problem, if its mask has an expression that can hide some of them and the problem is long enough.
    pub fn new(problem: &Problem) -> Option<ExpressionBlocks> {
        let (q_len, k_len) = (problem.max_q_len(), problem.max_k_len());
        let long = q_len >= LEAST[0] && k_len >= LEAST[1] && q_len.saturating_mul(k_len) >= LEAST[2];
        ExpressionBlocks::of_any_length(problem).filter(|_| long)
    }

    /// As [`new`](Self::new), for problems of any length.
    pub(crate) fn of_any_length(problem: &Problem) -> Option<ExpressionBlocks> {
        // Lists of packed sequences would have to hold sequences that are longer than the caller says.
        let Layout::Dense { batch, q_len, k_len } = problem.layout() else { return None };
        if problem.blocks().is_some() || problem.mask_rest().is_none() || batch == 0 || q_len == 0 || k_len == 0 {
            return None;
        }
        let program = expr::Program::compile(&problem.mask().expr()?, problem.aux(), Type::Bool).ok()?;
        let bounded = Bounded::new(&program)?;
        let modifiers = Modifiers::new(None, Some(&program), problem.aux(), q_len.max(k_len));
        let ragged = Ragged { packed: false, used_q: problem.has_used_q(), used_k: problem.has_used_k() };
        let own = ragged.any() || bounded.reads(Var::Batch);
        let spec = BlockSpec {
            rows: BLOCK,
            cols: BLOCK,
            batch: if own { batch } else { 1 },
            heads: if bounded.reads(Var::Head) { problem.q_heads() } else { 1 },
        };
        let blocks = ExpressionBlocks { spec, bounded, modifiers, ragged, layout: problem.layout() };
        (blocks.pairs() <= MOST).then_some(blocks)
    }

    /// These blocks, of multiples of this many queries and keys.
    pub fn divided_by(mut self, [rows, cols]: [u32; 2]) -> ExpressionBlocks {
        (self.spec.rows, self.spec.cols) =
            (BLOCK.next_multiple_of(rows.max(1) as usize), BLOCK.next_multiple_of(cols.max(1) as usize));
        self
    }

    /// Size and number of the blocks.
    pub fn spec(&self) -> BlockSpec {
        self.spec
    }

    fn sizes(&self) -> Sizes {
        let Layout::Dense { q_len, k_len, .. } = self.layout else {
            unreachable!("bug in fulgurite: blocks of packed sequences")
        };
        Sizes {
            batch: self.spec.batch as u64,
            heads: self.spec.heads as u64,
            blocks: self.spec.blocks(q_len, k_len).map(|n| n as u64),
            block: [self.spec.rows as u64, self.spec.cols as u64],
        }
    }

    /// Pairs of blocks.
    fn pairs(&self) -> u64 {
        let Sizes { batch, heads, blocks: [q, k], .. } = self.sizes();
        [batch, heads, q, k].into_iter().fold(1, u64::saturating_mul)
    }

    /// Words of the extremes of a block.
    fn words(&self) -> u32 {
        let [q, k] = self.bounded.scanned();
        2 * q.max(k) as u32
    }

    /// Bytes of workspace for the extremes of blocks.
    pub fn extremes_bytes(&self) -> u64 {
        let sizes = self.sizes();
        sizes.pairs() * (sizes.blocks[0] + sizes.blocks[1]) * u64::from(self.words()) * 4
    }

    /// Bytes of workspace for lists and extremes.
    pub fn list_bytes(&self) -> u64 {
        let rows = self.sizes().pairs() * self.sizes().blocks[0];
        let regions = [rows * 4, rows * 4, self.pairs() * 4, self.pairs() * 4, self.extremes_bytes()];
        regions.iter().map(|bytes| bytes.next_multiple_of(ALIGN)).sum()
    }

    /// The lists in a workspace of [`list_bytes`](Self::list_bytes), and its region for extremes.
    pub fn lists(&self, memory: Span) -> (DeviceBlockLists, Span) {
        let (rows, mut end) = (self.sizes().pairs() * self.sizes().blocks[0], 0);
        let mut region = |bytes: u64| {
            let start = end;
            end += bytes.next_multiple_of(ALIGN);
            memory.from(start).first(bytes)
        };
        let counts = [region(rows * 4), region(rows * 4)];
        let blocks = [region(self.pairs() * 4), region(self.pairs() * 4)];
        let widths = [self.sizes().blocks[1] as u32; 2];
        (DeviceBlockLists { counts, blocks, widths }, region(self.extremes_bytes()))
    }

    /// The kernels that write lists or a table.
    pub fn kernels(&self, target: Target, form: Form) -> Result<BlockKernels, BuildError> {
        let scans = self.bounded.scanned() != [0, 0];
        let (extremes, of_extremes) = match scans {
            true => {
                let (kernel, bindings) = self.extremes_program(target)?.split();
                (Some(kernel), bindings)
            }
            false => (None, Bindings::declared(|_| {})),
        };
        let (blocks, of_blocks) = self.blocks_program(target, form)?.split();
        Ok(BlockKernels { extremes, blocks, bindings: Arc::new([of_extremes, of_blocks]) })
    }

    /// The launches that write the results. `used`: queries and keys in use, if the problem has them.
    pub fn launches(
        &self,
        kernels: &BlockKernels,
        (aux, used): (Vec<AuxArgs>, [Option<Span>; 2]),
        extremes: Span,
        results: Results,
    ) -> Vec<Launch> {
        let (sizes, sequences) = (self.sizes(), SequenceArgs::new(self.layout, None, used));
        let call = Call { aux, sequences, sizes, extremes, results };
        let launch = |kernel: &Arc<Kernel>, bindings: &Bindings<Call>, warps: u64| {
            bindings.launch(kernel.clone(), [warps.div_ceil(WARPS.into()) as u32, 1, 1], &call)
        };
        let [q, k] = sizes.blocks;
        let [of_extremes, of_blocks] = &*kernels.bindings;
        let first = kernels.extremes.as_ref().map(|kernel| launch(kernel, of_extremes, sizes.pairs() * (q + k)));
        first.into_iter().chain([launch(&kernels.blocks, of_blocks, sizes.pairs() * q)]).collect()
    }

    /// The kernel in which a warp finds the extremes of one block of queries or of keys.
    fn extremes_program(&self, target: Target) -> Result<Program<Call>, BuildError> {
        Program::build("attention_mask_extremes", target, |p| {
            let c = CallParams::declare(p, self);
            p.builder().role("blocks", Warpgroups(1), |w| {
                let own = w.cta().mul_add(WARPS, w.warp_in_role());
                // A warp past the end repeats the last block: reductions need all lanes.
                let number = own.min(c.pairs * c.both.value() - 1);
                let [pair_number, at] = c.both.div_rem(number);
                let pair = c.pair(w, pair_number);
                let to = (c.extremes_of(pair_number, at, self.words()), own.eq(number));
                let q_blocks = c.q_blocks.value();
                w.choose(
                    at.lt(q_blocks),
                    |w| self.write_extremes(w, &c, &pair, (0, at), to),
                    |w| self.write_extremes(w, &c, &pair, (1, at - q_blocks), to),
                );
            });
        })
    }

    /// Writes the extremes of a block of one side, if its warp `writes`.
    fn write_extremes<'k>(
        &self,
        w: &Scope<'k, Group>,
        c: &CallParams<'k>,
        pair: &Pair<'k>,
        (side, block): (usize, Val<'k, u32>),
        (to, writes): (Pointer<'k, u32>, Val<'k, bool>),
    ) {
        let [first, last] = c.rows(side, block, pair);
        let per_lane = [self.spec.rows, self.spec.cols][side].div_ceil(32) as i32;
        let own = first + w.lane().to_i32();
        let rows: Vec<Val<'k, i32>> = (0..per_lane).map(|n| (own + 32 * n).min(last)).collect();
        let all = self.bounded.extremes(w, (side, &rows), (&self.modifiers, &c.parameters, &pair.place));
        w.when(w.lane().eq(0) & writes, |w| {
            for (slot, [low, high]) in (0u32..).zip(all) {
                to.store(w, 2 * slot, low);
                to.store(w, 2 * slot + 1, high);
            }
        });
    }

    /// The kernel in which a warp bounds the mask over one row of blocks, a key block for each lane.
    fn blocks_program(&self, target: Target, form: Form) -> Result<Program<Call>, BuildError> {
        Program::build("attention_mask_blocks", target, |p| {
            let c = CallParams::declare(p, self);
            let to = ResultParams::declare(p, form);
            p.builder().role("blocks", Warpgroups(1), |w| {
                let own = w.cta().mul_add(WARPS, w.warp_in_role());
                let number = own.min(c.pairs * c.q_blocks.value() - 1);
                let exists = own.eq(number);
                let [pair_number, row] = c.q_blocks.div_rem(number);
                let pair = c.pair(w, pair_number);
                let queries = (c.rows(0, row, &pair), c.extremes_of(pair_number, row, self.words()));
                let of = (&self.modifiers, &c.parameters);
                let bounds = RowBounds::new(w, &self.bounded, of, pair.place.clone(), queries);
                let counts = [w.var(0u32), w.var(0u32)];
                w.each(w.constant(0u32), c.k_blocks, 32, |w, first| {
                    let own_column = first + w.lane();
                    let column = own_column.min(c.k_blocks - 1);
                    let keys = c.rows(1, column, &pair);
                    let extremes = c.extremes_of(pair_number, c.q_blocks.value() + column, self.words());
                    let [hides, shows] = bounds.over(w, keys, extremes);
                    let inside = own_column.lt(c.k_blocks) & exists;
                    let shows = shows & (column * c.block[1]).to_i32().lt(pair.lengths[1]);
                    let kinds = [shows & hides, shows & !hides];
                    match &to {
                        ResultParams::Table(to) => {
                            let kind = kinds[1].select::<u32>(2, kinds[0].select::<u32>(1, 0));
                            let to = to.at_wide(number.mul_wide(c.k_blocks));
                            w.when(inside, |w| to.store(w, own_column, kind));
                        }
                        ResultParams::Lists { blocks, .. } => {
                            for (i, blocks) in blocks.iter().enumerate() {
                                let listed = kinds[i] & inside;
                                let lanes = w.ballot(listed);
                                let before = lanes & ((w.constant(1u32) << w.lane()) - 1);
                                let place = counts[i].get() + before.count_ones();
                                let to = blocks.at_wide(number.mul_wide(c.k_blocks));
                                w.when(listed, |w| to.store(w, place, own_column));
                                counts[i].set(counts[i].get() + lanes.count_ones());
                            }
                        }
                    }
                });
                if let ResultParams::Lists { counts: to, .. } = &to {
                    w.when(w.lane().eq(0) & exists, |w| {
                        to.iter().zip(counts).for_each(|(to, count)| to.store(w, number, count.get()));
                    });
                }
            });
        })
    }
}

#[cfg(test)]
mod tests;
