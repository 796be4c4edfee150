//! Gradients of attention as launches: a problem and where its tensors lie in, kernels and their arguments out.

mod bands;
mod deal;

use crate::attention::backward::d_q::{exact, ordered};
pub use crate::attention::backward::tensors::Tensors;
use crate::attention::backward::tensors::{named, pairs};
use crate::attention::backward::tiles::STEPS;
use crate::attention::backward::{
    Adds, BackwardConfig, Derived, Features, Order, Share, finish, main, prepare, sinks, zero,
};
use crate::attention::forward::plan::{DeviceAux, DeviceTensor, NoKernel, row_major};
use crate::configs::ConfigTable;
use crate::parts::arguments::{Arguments, Slots};
use crate::parts::block_table::{self, covered};
use crate::parts::mask::Spans;
use crate::parts::repack::{Copies, Copying};
use crate::parts::schedule::Ragged;
use deal::Dealt;
use fulgurite_core::mask::Span as MaskSpan;
use fulgurite_core::{DType, Exp, Layout, Mask, Problem};
use fulgurite_ptx::device::{Launch, Plan, Span, Value};
use fulgurite_ptx::{Arch, BuildError, Half, Kernel, Number, Pair, Target, Word, bf16, f16};
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;

/// Elements that make 16 bytes: the copy engine's unit.
const UNIT: usize = 8;
/// The largest head dimension.
const MOST: usize = 256;
/// Up to so many queries, longer steps waste more at the edges of a mask than they save.
const SHORT: usize = 2048;
/// Words that count the tiles that are handed out, and the parts of the sums that are taken and zeroed: a whole unit of 16 bytes.
const COUNTERS: u64 = 4;
/// Rows before the first of a tensor that nothing is read of: past all that there can be.
const OUTSIDE: u64 = 1 << 30;
/// Bytes to which the parts of the scratch memory are aligned.
const ALIGN: u64 = 256;

/// A backward call on Hopper: what its kernels' text depends on, and its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct BackwardPlan {
    number: Number,
    features: Features,
    config: BackwardConfig,
    /// Tiles that are cut into pieces, on the GPUs it is for. Memory is laid out for so many.
    cut: u64,
    /// Elements of a row of q and k, and of v and o, in whole units of 16 bytes.
    dims: [u64; 2],
    layout: Layout,
    /// Query heads, key/value heads.
    heads: [u64; 2],
    scale: f32,
    /// The GPU it is planned for.
    arch: Arch,
    has_sinks: bool,
    has_blocks: bool,
    /// Of auxiliary tensors; where there is a block mask, the last is its table of blocks.
    aux_shapes: Vec<Vec<usize>>,
}

/// The kernels of a call, in the order in which they run.
#[derive(Clone)]
pub struct Kernels {
    /// Before.
    pub prepare: Arc<Kernel>,
    /// The gradients.
    pub main: Arc<Kernel>,
    /// After, where the main kernel does not round d_q.
    pub finish: Option<Arc<Kernel>>,
    /// The gradients of sinks, where there are some.
    pub sinks: Option<Arc<Kernel>>,
    /// Zeros where gradients of auxiliary tensors are summed.
    pub zero: Option<Arc<Kernel>>,
    /// Their sums, where they are exact.
    pub exact: Option<Arc<Kernel>>,
    /// What each block of a block mask is, where there is one.
    pub cover: Option<Arc<Kernel>>,
}

impl Kernels {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Kernel>> {
        let some = [&self.finish, &self.sinks, &self.zero, &self.exact, &self.cover];
        [&self.prepare, &self.main].into_iter().chain(some.into_iter().flatten())
    }
}

impl BackwardPlan {
    /// How a problem is run; `d_lse` tells whether its LSE has a gradient.
    pub fn new(problem: &Problem, d_lse: bool, order: Order) -> Result<BackwardPlan, NoKernel> {
        BackwardPlan::by_table(problem, d_lse, order, &ConfigTable::default())
    }

    /// The same with cuts of the main kernel from a table. They are for equal sequences and scores as they are; whatever keeps
    /// more in registers than that has the built-in ones.
    pub fn by_table(
        problem: &Problem,
        d_lse: bool,
        order: Order,
        table: &ConfigTable<BackwardConfig>,
    ) -> Result<BackwardPlan, NoKernel> {
        let missing = |feature: String| Err(NoKernel { feature });
        let number = match problem.dtype() {
            DType::Bf16 => Number::Bf16,
            DType::F16 => Number::F16,
            other => return missing(format!("dtype {other}")),
        };
        let dims = [problem.head_dim(), problem.value_dim()];
        if let Some(d) = dims.into_iter().find(|d| *d > MOST) {
            return missing(format!("backward of head_dim {d} (it has them up to {MOST})"));
        }
        // Rows that are no multiple of it are copied to where they are.
        let dims = dims.map(|d| d.next_multiple_of(UNIT));
        let precision = problem.precision();
        if precision != fulgurite_core::Precision::Native {
            return missing(format!("backward of precision {precision}"));
        }
        let exp = problem.exp();
        if matches!(exp, Exp::Sas { .. }) {
            return missing(format!("backward of exp {exp}"));
        }
        let layout = problem.layout();
        let heads = [problem.q_heads() as u64, problem.kv_heads() as u64];
        let ragged = Ragged {
            packed: matches!(layout, Layout::Packed(_)),
            used_q: problem.has_used_q(),
            used_k: problem.has_used_k(),
        };
        let (mut mask, mut rest, mut aux) =
            (problem.mask().spans_only(), problem.mask_rest().cloned(), problem.aux().to_vec());
        // Without scores there are none to modify and no blocks, and auxiliary tensors may be empty: none is read.
        let has_scores = problem.batch() > 0 && problem.max_q_len() > 0 && problem.max_k_len() > 0;
        let blocks = problem.blocks().filter(|_| has_scores);
        if let Some(spec) = blocks {
            (mask, rest) = (Mask::none(), Some(covered(problem, spec, &mut aux)));
        }
        let modified = match has_scores {
            true => Derived::of(problem, rest.as_ref(), &aux, order)?,
            false => Derived::zeros(problem),
        };
        let largest = dims[0].max(dims[1]) as u32;
        let mut config = match !ragged.any() && modified.is_empty() {
            true => table.find(largest, problem.max_k_len() as u64),
            false => BackwardConfig::with_room(largest, ragged.any(), modified.room()),
        };
        if !config.has_kernel(largest) {
            return missing(format!("backward of head_dim {largest} cut as `{config}`"));
        }
        // Longer steps, additions by the copy engine at head dims up to 64, and pairs of blocks fit the registers where the mask
        // has one edge at most and exponentials are the unit's own.
        let spans = Spans::of(&mask).transposed();
        let fits = matches!(exp, Exp::Auto | Exp::Native) && !spans.bounded_right();
        if config.adds == Adds::Engine {
            config = match largest {
                ..=64 if !fits => config.of_threads(largest),
                65.. if !fits || (spans.bounded_left() && problem.max_q_len() <= SHORT) => {
                    BackwardConfig { rows: config.rows.min(64), ..config }
                }
                _ => config,
            };
        }
        if config.share == Share::Pairs && !fits {
            config = BackwardConfig::columns();
        }
        let padded = config.padded(dims.map(|d| d as u32));
        let (rounds, pieces, single) = (false, false, false);
        let features = Features { dims: padded, mask, exp, d_lse, order, rounds, pieces, single, ragged, modified };
        let dims = dims.map(|d| d as u64);
        let (scale, has_sinks) = (problem.scale(), problem.has_sinks());
        let aux_shapes = aux.into_iter().map(|spec| spec.shape).collect();
        let has_blocks = blocks.is_some();
        let cut = 0;
        let plan = BackwardPlan {
            number,
            features,
            config,
            cut,
            dims,
            layout,
            heads,
            scale,
            // The main kernel is Hopper's alone.
            arch: Arch::SM_90A,
            has_sinks,
            has_blocks,
            aux_shapes,
        };
        let plan = plan.with_config(config);
        // Of the preparation, threads and parts of rows of eight elements are counted in 32 bits.
        let most = plan.rows() * u64::from(padded[0].max(padded[1]) / 8);
        if most.max(plan.lengths()[1]) >= OUTSIDE {
            return missing(format!("backward of {most} parts of rows or keys (it has less than 2^30)"));
        }
        if let Some(n) = (0..plan.aux_shapes.len()).map(|aux| plan.words(aux)).find(|n| *n >= 1 << 31) {
            return missing(format!(
                "gradients of auxiliary tensors in a fixed order in {n} words (it has less than 2^31)"
            ));
        }
        Ok(plan)
    }

    /// With another tuning, which must fit the head dimensions.
    pub fn with_config(mut self, mut config: BackwardConfig) -> BackwardPlan {
        let Features { ragged, modified, .. } = &self.features;
        let plain = !ragged.any() && modified.is_empty() && self.lengths()[1] > 0;
        let sent = plain && config.adds == Adds::Engine;
        self.config = config;
        self.features.rounds = sent && config.rounds;
        self.features.dims = config.padded(self.dims.map(|d| d as u32));
        self.cut = if sent { self.cut_tiles() } else { 0 };
        self.features.pieces = self.cut > 0;
        self.features.single = config.adds == Adds::Engine && self.heads[0] == self.heads[1];
        if self.features.rounds && (self.features.pieces || self.features.order == Order::Fixed) {
            // The thread that loads has no registers left for a second stage of keys.
            config.key_depth = 1;
        }
        BackwardPlan { config, ..self }
    }

    /// How the main kernel is cut.
    pub fn config(&self) -> BackwardConfig {
        self.config
    }

    /// Whether the last tiles are cut into pieces, if there are as many blocks as the GPUs have that it is for.
    pub fn cuts_tiles(&self) -> bool {
        self.features.pieces
    }

    /// Its kernels.
    pub fn kernels(&self, target: Target) -> Result<Kernels, BuildError> {
        match self.number {
            Number::Bf16 => self.built::<bf16>(target),
            _ => self.built::<f16>(target),
        }
    }

    fn built<T: Half>(&self, target: Target) -> Result<Kernels, BuildError>
    where
        Pair<T>: Word,
    {
        Ok(Kernels {
            prepare: Arc::new(prepare::kernel::<T>(target, &self.features, self.config)?),
            main: Arc::new(main::kernel::<T>(target, &self.features, self.config)?),
            finish: (!self.features.rounds)
                .then(|| finish::kernel::<T>(target, &self.features, self.config))
                .transpose()?
                .map(Arc::new),
            sinks: self.has_sinks.then(|| sinks::kernel(target)).transpose()?.map(Arc::new),
            zero: (!self.features.modified.aux.is_empty()).then(|| zero::kernel(target)).transpose()?.map(Arc::new),
            exact: self
                .features
                .modified
                .exact
                .contains(&true)
                .then(|| exact::kernel(target))
                .transpose()?
                .map(Arc::new),
            cover: self.has_blocks.then(|| block_table::kernel(target)).transpose()?.map(Arc::new),
        })
    }

    /// Whether another call has the same kernels.
    pub fn same_kernels(&self, other: &BackwardPlan) -> bool {
        (self.number, &self.features, self.config, self.has_sinks, self.has_blocks)
            == (other.number, &other.features, other.config, other.has_sinks, other.has_blocks)
    }

    /// Rows of q, and of k and v: of each sequence, or of all where they are packed.
    fn lengths(&self) -> [u64; 2] {
        let (q, k) = match self.layout {
            Layout::Dense { q_len, k_len, .. } => (q_len, k_len),
            Layout::Packed(p) => (p.total_q, p.total_k),
        };
        [q as u64, k as u64]
    }
    fn batch(&self) -> u64 {
        match self.layout {
            Layout::Dense { batch, .. } => batch as u64,
            Layout::Packed(p) => p.batch as u64,
        }
    }

    /// Steps of queries from one head to the next; a sequence without queries has one, which sees nothing. Sequences with
    /// lengths of their own follow each other in a head.
    fn steps(&self) -> u64 {
        let (rows, [q, _]) = (u64::from(self.config.rows), self.lengths());
        match self.layout {
            Layout::Packed(p) => q / rows + p.batch as u64 + 1,
            Layout::Dense { batch, .. } if self.features.ragged.any() => q.div_ceil(rows).max(1) * batch as u64,
            Layout::Dense { .. } => q.div_ceil(rows).max(1),
        }
    }
    /// Heads of all sequences, where those of a sequence lie together.
    fn all_heads(&self) -> u64 {
        if self.features.ragged.any() { self.heads[0] } else { self.batch() * self.heads[0] }
    }
    /// Rows of all heads, each head's padded to whole steps.
    fn rows(&self) -> u64 {
        self.all_heads() * self.steps() * u64::from(self.config.rows)
    }

    /// Steps of queries of all tiles of keys, where sequences are equal: those in which some query sees a key of the tile.
    pub fn steps_of_tiles(&self) -> u64 {
        let Layout::Dense { batch, q_len, k_len } = self.layout else { return 0 };
        let (keys, rows) = (self.config.keys() as usize, self.config.rows as usize);
        let spans: Vec<MaskSpan> = self.features.mask.spans().iter().map(MaskSpan::transposed).collect();
        let of_tile = |first: usize| {
            let last = (first + keys).min(k_len) - 1;
            let (start, end) =
                (columns(&spans, first, [k_len, q_len]).start, columns(&spans, last, [k_len, q_len]).end);
            (end.max(start).div_ceil(rows) - start / rows).max(1) as u64
        };
        (0..k_len).step_by(keys).map(of_tile).sum::<u64>() * batch as u64 * self.heads[0]
    }

    /// The table of blocks of a block mask: how many elements it has.
    fn cover_elements(&self) -> u64 {
        let shape = self.aux_shapes.last().filter(|_| self.has_blocks);
        shape.map_or(0, |shape| shape.iter().map(|&n| n as u64).product())
    }

    /// Words of 64 bits in which the gradient of an auxiliary tensor is summed exactly.
    fn words(&self, aux: usize) -> u64 {
        let Derived { aux: gradients, exact, .. } = &self.features.modified;
        let exact = gradients.iter().zip(exact).any(|(gradient, exact)| gradient.aux == aux && *exact);
        let elements = || self.aux_shapes[aux].iter().map(|&n| n as u64).product::<u64>();
        if exact { exact::WORDS * elements() } else { 0 }
    }

    /// Where those of an auxiliary tensor lie, of where all of them do.
    fn words_at(&self, all: Span, aux: usize) -> Option<Span> {
        let before: u64 = (0..aux).map(|aux| self.words(aux)).sum();
        let words = self.words(aux);
        (words > 0).then(|| all.from(8 * before).first(8 * words))
    }

    /// Where the parts of the scratch memory begin, and where it ends: sums of d_q, shifts, delta, counters, what blocks are,
    /// exact sums, sums of pieces.
    fn parts(&self) -> [u64; 8] {
        let rows = self.rows();
        let mut end = 0;
        let of_sums = self.sum_rows() * u64::from(self.features.dims[0]) * 4;
        let words: u64 = (0..self.aux_shapes.len()).map(|aux| self.words(aux)).sum();
        let counters = self.counters() * 4;
        let sizes = [of_sums, rows * 4, rows * 4, counters, self.cover_elements() * 4, words * 8, self.piece_bytes()];
        let starts = sizes.map(|bytes| {
            let start = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            start
        });
        let [a, b, c, d, e, f, g] = starts;
        [a, b, c, d, e, f, g, end]
    }

    /// Words that are zero at the beginning: the tiles handed out; where d_q is rounded while they run, for each pair of head
    /// and sequence the tiles that have added and the parts that are rounded; for each warpgroup of a tile that is cut, the
    /// steps that are summed; in a fixed order for each step of each head, or
    /// each part of it that is added by itself, the tile that added last.
    fn counters(&self) -> u64 {
        let parts = u64::from(ordered::parts(&self.config));
        match self.features.order {
            Order::Any => self.first_turn(),
            Order::Fixed => self.first_turn() + self.rows() / u64::from(self.config.rows) * parts,
        }
    }
    /// Words before those that keep the order.
    fn first_turn(&self) -> u64 {
        self.first_piece() + 2 * self.cut
    }
    /// Words before those of pieces.
    fn first_piece(&self) -> u64 {
        COUNTERS + if self.features.rounds { 2 * self.pairs() } else { 0 }
    }

    /// The copies of tensors that a call needs before and after its kernels, if any.
    pub fn copies(&self, tensors: &Tensors) -> Option<Copies> {
        Copies::of(&named(tensors), self.features.ragged.any())
    }

    /// The launches of a call whose tensors must be copied, in order; `room` is memory for the copies.
    pub fn with_copies(
        &self,
        (copies, copying, room): (&Copies, &Copying, Span),
        kernels: &Kernels,
        tensors: &Tensors,
        scratch: Span,
        multiprocessors: u32,
    ) -> Result<Plan, NoKernel> {
        let (rows, [mut launches, after]) = copies.launches(copying, &named(tensors), room)?;
        let [q, k, v, o, d_o, d_q, d_k, d_v] = rows;
        let copied = Tensors { q, k, v, o, d_o, d_q, d_k, d_v, ..tensors.clone() };
        launches.extend(self.plan(kernels, &copied, scratch, multiprocessors)?.launches);
        launches.extend(after);
        Ok(Plan { launches })
    }

    /// Bytes of scratch memory that a run needs; what they hold does not matter.
    pub fn scratch_bytes(&self) -> u64 {
        self.parts()[7]
    }

    /// Its launches; none where there is nothing to compute.
    pub fn plan(
        &self,
        kernels: &Kernels,
        tensors: &Tensors,
        scratch: Span,
        multiprocessors: u32,
    ) -> Result<Plan, NoKernel> {
        let ([q_rows, k_rows], [heads, kv_heads]) = (self.lengths(), self.heads);
        let parts = self.parts().map(|at| scratch.from(at));
        let [sums, shift, delta, _, blocks, words, ..] = parts;
        // Without sequences there are still gradients of what they share: zeros.
        let nothing = self.batch() == 0;
        let mut launches = if nothing { Vec::new() } else { vec![self.prepare(kernels, tensors, parts)] };
        let zeros = |span: Span, count: u64| {
            let (kernel, args) = (kernels.zero.clone()?, vec![Value::Pointer(span), Value::U32(count as u32)]);
            Some(Launch { kernel, grid: [count.div_ceil(u64::from(zero::THREADS)) as u32, 1, 1], args })
        };
        let mut after = Vec::new();
        for (aux, (span, shape)) in tensors.d_aux.iter().zip(&self.aux_shapes).enumerate() {
            let count = shape.iter().product::<usize>() as u64;
            let (Some(span), 1..) = (*span, count) else { continue };
            launches.extend(zeros(span, count));
            if let (Some(words), Some(kernel)) = (self.words_at(words, aux), kernels.exact.clone()) {
                // In halves.
                launches.extend(zeros(words, words.bytes() / 4));
                let args = vec![Value::Pointer(words), Value::Pointer(span), Value::U32(count as u32)];
                after.push(Launch { kernel, grid: [count.div_ceil(u64::from(exact::THREADS)) as u32, 1, 1], args });
            }
        }
        if let (Some(kernel), Some(lists), 1..) = (&kernels.cover, tensors.lists, self.cover_elements()) {
            let shape = self.aux_shapes.last().map_or(&[][..], Vec::as_slice);
            launches.push(block_table::launch(kernel, lists, shape, blocks));
        }
        if let (Some(kernel), Some([sinks, d_sinks])) = (&kernels.sinks, tensors.sinks) {
            let mut args: Vec<Value> = [shift, delta, sinks, d_sinks].map(Value::Pointer).into();
            let rows = if nothing { 0 } else { self.steps() * u64::from(self.config.rows) };
            args.extend([self.all_heads() / heads, heads, rows].map(|n| Value::U32(n as u32)));
            launches.push(Launch { kernel: kernel.clone(), grid: [heads as u32, 1, 1], args });
        }
        if nothing {
            return Ok(Plan { launches });
        }
        // The most tiles of keys that there can be.
        let keys = u64::from(self.config.keys());
        let tiles = match self.layout {
            Layout::Dense { batch, .. } => k_rows.div_ceil(keys) * batch as u64,
            Layout::Packed(p) if k_rows > 0 => k_rows / keys + p.batch as u64 + 1,
            Layout::Packed(_) => 0,
        };
        if tiles > 0 {
            let together = self.config.blocks();
            let clusters = u64::from(multiprocessors / together).max(1);
            let dealt = self.dealt_in_room(clusters);
            let works = dealt.as_ref().map_or(tiles * kv_heads, Dealt::works);
            let blocks = works.min(clusters) as u32 * together;
            let args = self.main(kernels, tensors, parts, dealt)?;
            launches.push(Launch { kernel: kernels.main.clone(), grid: [blocks, 1, 1], args });
        }
        if let (Some(kernel), 1..) = (&kernels.finish, q_rows) {
            let slots = Slots::of(kernel);
            let mut args = Arguments::new(&slots);
            args.add("sums", Value::Pointer(sums));
            self.results(&mut args, tensors);
            args.divisor(["steps", "steps_magic", "steps_shift"], self.steps());
            args.divisor(["heads", "heads_magic", "heads_shift"], heads);
            args.add("scale", Value::F32(self.scale));
            args.sequences(self.layout, tensors.cu_seqlens, tensors.used);
            let grid = [(self.all_heads() * self.steps()) as u32, 1, 1];
            launches.push(Launch { kernel: kernel.clone(), grid, args: args.finish() });
        }
        launches.extend(after);
        Ok(Plan { launches })
    }

    fn prepare(&self, kernels: &Kernels, tensors: &Tensors, [sums, shift, delta, counters, ..]: [Span; 8]) -> Launch {
        let slots = Slots::of(&kernels.prepare);
        let mut args = Arguments::new(&slots);
        for (name, placed) in [("o", &tensors.o), ("d_o", &tensors.d_o)] {
            args.add(name, Value::Pointer(placed.span));
            for (axis, stride) in ["batch", "row", "head"].into_iter().zip(pairs(placed)) {
                args.add_u32(&format!("{name}_{axis}"), stride);
            }
        }
        for (name, span) in
            [("lse", tensors.lse), ("shift", shift), ("delta", delta), ("sums", sums), ("counters", counters)]
        {
            args.add(name, Value::Pointer(span));
        }
        tensors.d_lse.into_iter().for_each(|span| args.add("d_lse", Value::Pointer(span)));
        let numbers = [
            ("all_rows", self.rows()),
            ("sum_rows", self.zeroed_rows()),
            ("lse_rows", self.lengths()[0]),
            ("value_dim", self.dims[1]),
            ("words", self.counters()),
        ];
        numbers.into_iter().for_each(|(name, n)| args.add_u32(name, n));
        args.divisor(["heads", "heads_magic", "heads_shift"], self.heads[0]);
        args.divisor(["rows", "rows_magic", "rows_shift"], self.steps() * u64::from(self.config.rows));
        args.sequences(self.layout, tensors.cu_seqlens, tensors.used);
        let blocks = self.rows().div_ceil(u64::from(prepare::ROWS)).max(1);
        Launch { kernel: kernels.prepare.clone(), grid: [blocks as u32, 1, 1], args: args.finish() }
    }

    /// Arguments of the main kernel.
    fn main(
        &self,
        kernels: &Kernels,
        tensors: &Tensors,
        [sums, shift, delta, counters, blocks, words, pieces, _]: [Span; 8],
        dealt: Option<Dealt>,
    ) -> Result<Vec<Value>, NoKernel> {
        let [heads, kv_heads] = self.heads;
        let slots = Slots::of(&kernels.main);
        let mut args = Arguments::new(&slots);
        let turns = counters.from(self.first_turn() * 4);
        for (name, span) in
            [("shift", shift), ("delta", delta), ("sums", sums), ("counters", counters), ("turns", turns)]
        {
            args.add(name, Value::Pointer(span));
        }
        args.add_u32("steps", self.steps());
        args.add_u32("group", heads / kv_heads);
        args.divisor(["heads", "heads_magic", "heads_shift"], kv_heads);
        // Modified scores come with the scale in them.
        let scale_log2 = if self.features.modified.modifiers.score.is_some() { LOG2_E } else { self.scale * LOG2_E };
        args.add("scale_log2", Value::F32(scale_log2));
        self.modified(&mut args, tensors, [blocks, words]);
        args.add("scale", Value::F32(self.scale));
        if self.features.clears(&self.config) {
            self.clearing(&mut args);
        }
        if self.features.rounds {
            self.rounding(&mut args, tensors, counters);
        }
        if self.features.pieces {
            self.deal(&mut args, dealt, [pieces, counters.from(self.first_piece() * 4)]);
        }
        match (self.layout, self.features.ragged.any()) {
            (Layout::Dense { q_len, k_len, .. }, false) => self.equal(&mut args, tensors, [q_len, k_len]),
            _ => self.unequal(&mut args, tensors)?,
        }
        Ok(args.finish())
    }

    /// Where d_q goes.
    fn results(&self, args: &mut Arguments<'_>, tensors: &Tensors) {
        args.add("d_q", Value::Pointer(tensors.d_q.span));
        args.add_u32("d_q_rows", self.lengths()[0]);
        args.add_u32("d_q_dim", self.dims[0]);
        for (name, stride) in ["d_q_batch", "d_q_row", "d_q_head"].into_iter().zip(pairs(&tensors.d_q)) {
            args.add_u32(name, stride);
        }
    }

    /// Arguments of modifiers.
    fn modified(&self, args: &mut Arguments<'_>, tensors: &Tensors, [blocks, words]: [Span; 2]) {
        let blocks = DeviceAux { span: blocks, strides: row_major(self.aux_shapes.last()) };
        args.aux(tensors.aux.iter().chain(self.has_blocks.then_some(&blocks)), &self.aux_shapes);
        for (i, gradient) in self.features.modified.aux.iter().enumerate() {
            let shape = self.aux_shapes.get(gradient.aux);
            if let Some(Some(span)) = tensors.d_aux.get(gradient.aux) {
                args.add(&format!("d_aux{i}"), Value::Pointer(*span));
            }
            if let (true, Some(words)) = (self.features.modified.exact[i], self.words_at(words, gradient.aux)) {
                args.add(&format!("d_aux{i}_words"), Value::Pointer(words));
            }
            for (axis, (n, stride)) in shape.into_iter().flatten().zip(row_major(shape)).enumerate() {
                args.add_u32(&format!("d_aux{i}_last{axis}"), (*n as u64).saturating_sub(1));
                args.add_u32(&format!("d_aux{i}_stride{axis}"), stride);
            }
        }
    }

    /// Arguments of equal sequences.
    fn equal(&self, args: &mut Arguments<'_>, tensors: &Tensors, [q_len, k_len]: [usize; 2]) {
        // Keys that no query sees, and queries that see no key, are read as zeros: whatever they hold, times a
        // probability of 0, must not show.
        let spans = self.features.mask.spans();
        let seen_keys = seen(spans, [q_len, k_len]);
        let transposed: Vec<MaskSpan> = spans.iter().map(MaskSpan::transposed).collect();
        let seen_queries = seen(&transposed, [k_len, q_len]);
        // Without any, every coordinate lies outside: any memory does.
        let some = |placed: &DeviceTensor, seen: &Range<usize>| match seen.is_empty() {
            true => DeviceTensor { shape: [1, 1, 1, UNIT as u64], ..tensors.k },
            false => placed.rows(seen.start as u64, seen.len() as u64),
        };
        let Tensors { q, k, v, d_o, d_k, d_v, .. } = tensors;
        for (name, placed) in [
            ("q", some(q, &seen_queries)),
            ("d_o", some(d_o, &seen_queries)),
            ("k", some(k, &seen_keys)),
            ("k_other", some(k, &seen_keys)),
            ("v", some(v, &seen_keys)),
            ("d_k", *d_k),
            ("d_v", *d_v),
        ] {
            args.add(name, Value::Tensor(placed.tensor(self.number)));
        }
        args.bands([self.key_tiles(), self.pairs()], [self.order(), self.last_band()]);
        let first = |seen: &Range<usize>| if seen.is_empty() { OUTSIDE } else { seen.start as u64 };
        let numbers = [
            ("k_len", k_len as u64),
            ("q_len", q_len as u64),
            ("first_key", first(&seen_keys)),
            ("first_query", first(&seen_queries)),
        ];
        numbers.into_iter().for_each(|(name, n)| args.add_u32(name, n));
        args.add("bottom_right", Value::U32((k_len as i64 - q_len as i64) as i32 as u32));
        args.add("top_left", Value::U32(0));
    }

    /// Arguments of sequences with lengths of their own.
    fn unequal(&self, args: &mut Arguments<'_>, tensors: &Tensors) -> Result<(), NoKernel> {
        let Tensors { q, k, v, d_o, d_k, d_v, .. } = tensors;
        for ((name, placed), step) in
            [("q", q), ("k", k), ("v", v), ("d_o", d_o), ("d_k", d_k), ("d_v", d_v)].into_iter().zip(STEPS)
        {
            let tensor = placed.or(k).ragged(self.number).ok_or_else(|| NoKernel {
                feature: format!("`{name}` whose sequences do not begin at whole rows, where lengths differ"),
            })?;
            args.add(name, Value::Tensor(tensor));
            args.add_u32(step, placed.step().unwrap_or(0));
        }
        args.sequences(self.layout, tensors.cu_seqlens, tensors.used);
        Ok(())
    }
}

/// The columns that some row of a mask sees. Intervals only move right with the row.
fn seen(spans: &[MaskSpan], [rows, cols]: [usize; 2]) -> Range<usize> {
    if rows == 0 {
        return 0..0;
    }
    columns(spans, 0, [rows, cols]).start..columns(spans, rows - 1, [rows, cols]).end
}

/// The columns that a row of a mask sees.
fn columns(spans: &[MaskSpan], row: usize, [rows, cols]: [usize; 2]) -> Range<usize> {
    spans.iter().map(|span| span.keys(row, rows, cols)).fold(0..cols, |a, b| a.start.max(b.start)..a.end.min(b.end))
}
