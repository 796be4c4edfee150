//! The launches of a backward call, with their arguments.

use crate::attention::backward::d_q::zero_fill::ZEROS;
use crate::attention::backward::d_q::{exact, ordered, round, split_tiles, zero_fill};
use crate::attention::backward::finish::{self, ResultArgs};
use crate::attention::backward::marks::MarkArgs;
use crate::attention::backward::modifiers::{AuxGradientArgs, ModifierArgs};
use crate::attention::backward::plan::bands::RoundParts;
use crate::attention::backward::plan::deal::Deal;
use crate::attention::backward::plan::scratch::{SOME_MARKED, Scratch};
use crate::attention::backward::plan::{BackwardPlan, Kernels, OUTSIDE, Tensors, UNIT, seen};
use crate::attention::backward::state::Call;
use crate::attention::backward::step_ranges::{self, RangeArgs};
use crate::attention::backward::tensors::{RowArgs, ThreadRows};
use crate::attention::backward::tiles::{DenseArgs, TileMapArgs};
use crate::attention::backward::{BackwardConfig, Order, heads, prepare, repair, sinks, zero};
use crate::attention::forward::plan::{DeviceAux, DeviceTensor, NoKernel, row_major};
use crate::parts::block_table;
use crate::parts::expression_blocks::Results;
use crate::parts::modifier::AuxArgs;
use crate::parts::schedule::{BandArgs, SequenceArgs};
use fulgurite_core::Layout;
use fulgurite_core::mask::Span as MaskSpan;
use fulgurite_ptx::TensorUnit;
use fulgurite_ptx::device::{Launch, Plan, Span, TensorSpan};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The tensors of rows that TMA moves.
struct CopiedRows {
    q: TensorSpan,
    k: TensorSpan,
    v: TensorSpan,
    d_o: TensorSpan,
    d_k: TensorSpan,
    d_v: TensorSpan,
}

impl BackwardPlan {
    /// The launches of a call, in order; none if there is nothing to compute.
    pub fn plan(
        &self,
        kernels: &Kernels,
        tensors: &Tensors,
        scratch: Span,
        multiprocessors: u32,
    ) -> Result<Plan, NoKernel> {
        self.check_results(tensors)?;
        let scratch = self.schedule.scratch(&self.facts).at(scratch);
        // Without sequences, gradients of sinks and auxiliary tensors, which sequences share, are still written: zeros.
        let nothing = self.facts.batch() == 0;
        let mut launches = Vec::new();
        if !nothing {
            launches.push(self.prepare(kernels, tensors, &scratch));
        }
        let (zeros, rounding) = self.aux_sums(kernels, tensors, scratch.exact_words);
        launches.extend(zeros);
        if let (Some(kernel), Some(lists), 1..) =
            (&kernels.block_table, tensors.lists, self.facts.block_table_elements())
        {
            let shape = self.facts.aux_shapes.last().map_or(&[][..], Vec::as_slice);
            launches.push(block_table::launch(kernel, lists, shape, scratch.block_table));
            launches.extend(self.step_ranges(kernels, &scratch));
        }
        if let Some((kernels_of, blocks)) = kernels.expression.as_ref().zip(self.facts.expression.as_ref()) {
            let table = Results::Table(scratch.block_table);
            let of = (self.aux(tensors, scratch.block_table), tensors.used);
            launches.extend(blocks.launches(kernels_of, of, scratch.extremes, table));
            launches.extend(self.step_ranges(kernels, &scratch));
        }
        launches.extend(self.sinks(kernels, tensors, &scratch));
        if nothing {
            return Ok(Plan { launches });
        }
        let main = self.main(kernels, tensors, &scratch, multiprocessors)?;
        let heads = main.is_some().then(|| self.heads(kernels, tensors, &scratch)).flatten();
        let repair = main.is_some().then(|| self.repair(kernels, tensors, &scratch, multiprocessors));
        launches.extend(main);
        launches.extend(heads);
        launches.extend(self.finish(kernels, tensors, &scratch));
        launches.extend(rounding);
        launches.extend(repair);
        Ok(Plan { launches })
    }

    fn sequences(&self, tensors: &Tensors) -> SequenceArgs {
        SequenceArgs::new(self.facts.layout, tensors.cu_seqlens, tensors.used)
    }

    /// Padded rows of a head.
    fn head_rows(&self) -> u64 {
        self.schedule.steps * u64::from(self.config().rows)
    }

    fn prepare(&self, kernels: &Kernels, tensors: &Tensors, scratch: &Scratch<Span>) -> Launch {
        let (facts, schedule) = (&self.facts, &self.schedule);
        let call = prepare::PrepareCall {
            o: RowArgs::new(&tensors.o),
            d_o: RowArgs::new(&tensors.d_o),
            lse: tensors.lse,
            d_lse: tensors.d_lse,
            shift: scratch.shift,
            delta: scratch.delta,
            sums: scratch.d_q_sums,
            counters: scratch.counters,
            marks: scratch.marks,
            mark_fours: (facts.mark_words().iter().sum::<u64>() / 4) as u32,
            all_rows: schedule.rows as u32,
            sum_rows: schedule.zeroed_rows() as u32,
            lse_rows: facts.lengths()[0] as u32,
            value_dim: facts.features.dims[1],
            words: schedule.counters(facts.features.order).count as u32,
            heads: facts.heads[0] as u32,
            rows: self.head_rows() as u32,
            sequences: self.sequences(tensors),
        };
        // Parts of heads may have room for more sums than there are rows.
        let rows = schedule.rows.max(schedule.zeroed_rows());
        let ctas = rows.div_ceil(u64::from(prepare::ROWS)).max(1);
        kernels.bindings.prepare.launch(kernels.prepare.clone(), [ctas as u32, 1, 1], &call)
    }

    /// Launches that zero the gradients of auxiliary tensors, and launches that round their exact sums at the end.
    fn aux_sums(&self, kernels: &Kernels, tensors: &Tensors, words: Span) -> (Vec<Launch>, Vec<Launch>) {
        let (mut before, mut after) = (Vec::new(), Vec::new());
        let zeros = |span: Span, count: u64| {
            let (kernel, bindings) = kernels.zero.clone().zip(kernels.bindings.zero.as_ref())?;
            let grid = [count.div_ceil(u64::from(zero::THREADS)) as u32, 1, 1];
            Some(bindings.launch(kernel, grid, &zero::ZeroCall { to: span, count: count as u32 }))
        };
        for (aux, (span, shape)) in tensors.d_aux.iter().zip(&self.facts.aux_shapes).enumerate() {
            let count = shape.iter().product::<usize>() as u64;
            let (Some(span), 1..) = (*span, count) else { continue };
            before.extend(zeros(span, count));
            let exact = kernels.exact.clone().zip(kernels.bindings.exact.as_ref());
            if let (Some(words), Some((kernel, bindings))) = (self.facts.exact_words_at(words, aux), exact) {
                // The kernel writes 32 bits at a time.
                before.extend(zeros(words, words.bytes() / 4));
                let grid = [count.div_ceil(u64::from(exact::THREADS)) as u32, 1, 1];
                after.push(bindings.launch(kernel, grid, &exact::ExactCall { words, to: span, count: count as u32 }));
            }
        }
        (before, after)
    }

    /// The kernel that finds the steps of each key tile under a block mask, if the main kernel asks for them.
    fn step_ranges(&self, kernels: &Kernels, scratch: &Scratch<Span>) -> Option<Launch> {
        let (kernel, sizes) = kernels.step_ranges.as_ref().zip(self.schedule.step_ranges(&self.facts))?;
        let BackwardConfig { rows, .. } = self.config();
        let memory = [scratch.block_table, scratch.step_ranges];
        step_ranges::launch(kernel, sizes, [rows, self.config().keys()], memory)
    }

    fn sinks(&self, kernels: &Kernels, tensors: &Tensors, scratch: &Scratch<Span>) -> Option<Launch> {
        let (kernel, bindings) = kernels.sinks.clone().zip(kernels.bindings.sinks.as_ref())?;
        let [sinks, d_sinks] = tensors.sinks?;
        let heads = self.facts.heads[0];
        let call = sinks::SinksCall {
            shift: scratch.shift,
            delta: scratch.delta,
            sinks,
            d_sinks,
            batch: (self.facts.all_heads() / heads) as u32,
            heads: heads as u32,
            rows: if self.facts.batch() == 0 { 0 } else { self.head_rows() as u32 },
        };
        Some(bindings.launch(kernel, [heads as u32, 1, 1], &call))
    }

    /// The finish kernel, unless the main kernel converts d_q or there are no queries.
    fn finish(&self, kernels: &Kernels, tensors: &Tensors, scratch: &Scratch<Span>) -> Option<Launch> {
        let (kernel, bindings) = kernels.finish.clone().zip(kernels.bindings.finish.as_ref())?;
        let call = finish::FinishCall {
            d_q: self.results(tensors, scratch),
            sums: scratch.d_q_sums,
            steps: self.schedule.steps as u32,
            heads: self.facts.heads[0] as u32,
            scale: self.facts.scale,
            sequences: self.sequences(tensors),
        };
        let grid = [(self.facts.all_heads() * self.schedule.steps) as u32, 1, 1];
        (self.facts.lengths()[0] > 0).then(|| bindings.launch(kernel, grid, &call))
    }

    /// The kernel that adds parts of d_k and d_v, if there are parts.
    fn heads(&self, kernels: &Kernels, tensors: &Tensors, scratch: &Scratch<Span>) -> Option<Launch> {
        let (kernel, bindings) = kernels.heads.clone().zip(kernels.bindings.heads.as_ref())?;
        let [d_k, d_v] = self.key_results(tensors, scratch);
        let blocks = self.schedule.tiles_of_part(&self.facts) * u64::from(self.config().keys() / heads::KEYS);
        let sequences = if self.facts.features.ragged.any() { 1 } else { self.facts.batch() };
        let call = heads::HeadsCall {
            d_k,
            d_v,
            parts: scratch.head_parts,
            count: self.schedule.spread.parts as u32,
            blocks: blocks as u32,
            heads: self.facts.heads[1] as u32,
            scale: self.facts.scale,
            sequences: self.sequences(tensors),
        };
        let grid = [(sequences * self.facts.heads[1] * blocks) as u32, 1, 1];
        Some(bindings.launch(kernel, grid, &call))
    }

    /// The kernel that computes marked rows again.
    fn repair(&self, kernels: &Kernels, tensors: &Tensors, scratch: &Scratch<Span>, multiprocessors: u32) -> Launch {
        let facts = &self.facts;
        let [q_len, k_len] = facts.lengths().map(|n| n as u32);
        let [d_k, d_v] = self.key_results(tensors, scratch);
        let call = repair::RepairCall {
            rows: [&tensors.q, &tensors.k, &tensors.v, &tensors.d_o].map(RowArgs::new),
            results: [self.results(tensors, scratch), d_k, d_v],
            shift: scratch.shift,
            delta: scratch.delta,
            lengths: [q_len, k_len],
            result_rows: facts.result_rows().map(|rows| rows as u32),
            heads: facts.heads.map(|n| n as u32),
            padded_rows: self.head_rows() as u32,
            sequences: self.sequences(tensors),
            aux: self.aux(tensors, scratch.block_table),
            scale_log2: self.scale_log2(),
            scale: facts.scale,
        };
        kernels.bindings.repair.launch(kernels.repair.clone(), [multiprocessors.max(1), 1, 1], &call)
    }

    fn results(&self, tensors: &Tensors, scratch: &Scratch<Span>) -> ResultArgs {
        let marked = (self.facts.results, self.marks(scratch)[0]);
        ResultArgs::new(&tensors.d_q, self.facts.lengths()[0], self.facts.features.dims[0], marked)
    }

    /// The marks of d_q, d_k and d_v.
    fn marks(&self, scratch: &Scratch<Span>) -> [MarkArgs; 3] {
        let ([q_rows, k_rows], [q_heads, kv_heads]) = (self.facts.lengths(), self.facts.heads);
        let words = self.facts.mark_words();
        let some = scratch.counters.from(SOME_MARKED * 4);
        let of = |n: usize, rows: u64, heads: u64| {
            let before: u64 = words[..n].iter().sum();
            let words = scratch.marks.from(before * 4).first(words[n] * 4);
            MarkArgs { some, words, rows: rows as u32, heads: heads as u32 }
        };
        [of(0, q_rows, q_heads), of(1, k_rows, kv_heads), of(2, k_rows, kv_heads)]
    }

    /// d_k and d_v.
    fn key_results(&self, tensors: &Tensors, scratch: &Scratch<Span>) -> [ResultArgs; 2] {
        let ([_, rows], [d, dv]) = (self.facts.lengths(), self.facts.features.dims);
        let [_, of_d_k, of_d_v] = self.marks(scratch);
        [(&tensors.d_k, d, of_d_k), (&tensors.d_v, dv, of_d_v)]
            .map(|(to, d, marks)| ResultArgs::new(to, rows, d, (self.facts.results, marks)))
    }

    /// The main kernel, unless there are no keys.
    fn main(
        &self,
        kernels: &Kernels,
        tensors: &Tensors,
        scratch: &Scratch<Span>,
        multiprocessors: u32,
    ) -> Result<Option<Launch>, NoKernel> {
        let (keys, k_rows) = (u64::from(self.config().keys()), self.facts.lengths()[1]);
        // Key tiles of a head, at most.
        let tiles = match self.facts.layout {
            Layout::Dense { batch, .. } => k_rows.div_ceil(keys) * batch as u64,
            Layout::Packed(p) if k_rows > 0 => k_rows / keys + p.batch as u64 + 1,
            Layout::Packed(_) => 0,
        };
        if tiles == 0 {
            return Ok(None);
        }
        let cluster = self.config().share.ctas();
        // Only the `wgmma` kernel is persistent; the others have a CTA for each tile.
        let clusters = match self.config().share.unit() {
            TensorUnit::Wgmma => u64::from(multiprocessors / cluster).max(1),
            TensorUnit::MmaSync | TensorUnit::Tcgen05 => u64::MAX,
        };
        let deal = self.schedule.deal(clusters);
        let works = deal.as_ref().map_or(tiles * self.facts.heads[1] * self.schedule.spread.parts, Deal::works);
        let ctas = works.min(clusters) as u32 * cluster;
        let call = self.main_call(tensors, scratch, deal)?;
        Ok(Some(kernels.bindings.main.launch(kernels.main.clone(), [ctas, 1, 1], &call)))
    }

    fn main_call(&self, tensors: &Tensors, scratch: &Scratch<Span>, deal: Option<Deal>) -> Result<Call, NoKernel> {
        let (facts, schedule) = (&self.facts, &self.schedule);
        let words = schedule.counters(facts.features.order);
        let counters = |word: u64| scratch.counters.from(word * 4);
        let (rows, dense, ragged) = match (facts.layout, facts.features.ragged.any()) {
            (Layout::Dense { q_len, k_len, .. }, false) => {
                let (rows, dense) = self.dense(tensors, [q_len, k_len]);
                (rows, Some(dense), None)
            }
            _ => {
                let (rows, ragged) = self.ragged(tensors)?;
                (rows, None, Some(ragged))
            }
        };
        let split = schedule.shape.splits.then(|| split_tiles::Args {
            deal: deal.unwrap_or(Deal::whole(schedule.bands.all_tiles())),
            steps: schedule.steps as u32,
            sums: scratch.split_sums,
            summed: counters(words.summed),
        });
        let [_, marked_keys, marked_values] = self.marks(scratch);
        Ok(Call {
            q: rows.q,
            k: rows.k,
            v: rows.v,
            d_o: rows.d_o,
            d_k: rows.d_k,
            d_v: rows.d_v,
            shift: scratch.shift,
            delta: scratch.delta,
            sums: scratch.d_q_sums,
            head_parts: scratch.head_parts,
            marks: [marked_keys, marked_values],
            key_rows: (facts.results.is_f32() && !schedule.spread.is_spread())
                .then(|| self.key_results(tensors, scratch)),
            counters: scratch.counters,
            zero_fill: schedule.shape.zero_fills.then(|| self.zero_fill()),
            round: schedule.shape.rounds.then(|| self.round(tensors, scratch)),
            split,
            ordered: (facts.features.order == Order::Fixed).then(|| ordered::Args { last: counters(words.turns) }),
            map: TileMapArgs {
                steps: schedule.steps as u32,
                spread: schedule.spread,
                heads: facts.heads[1] as u32,
                part_tiles: schedule.tiles_of_part(facts) as u32,
                step_ranges: schedule.step_ranges(facts).map(|sizes| RangeArgs { ranges: scratch.step_ranges, sizes }),
                dense,
                ragged,
            },
            modifiers: ModifierArgs {
                aux: self.aux(tensors, scratch.block_table),
                d_aux: self.aux_gradients(tensors, scratch.exact_words),
                q_len: facts.lengths()[0] as u32,
            },
            threads: self.config().is_sync().then(|| self.thread_rows(tensors)),
            scale_log2: self.scale_log2(),
            scale: facts.scale,
        })
    }

    /// The factor of scores in powers of two. Modified scores already include the scale.
    fn scale_log2(&self) -> f32 {
        let is_modified = self.facts.features.modifiers.modifiers.score.is_some();
        if is_modified { LOG2_E } else { self.facts.scale * LOG2_E }
    }

    fn zero_fill(&self) -> zero_fill::Args {
        let copies = |rows: u64| rows * u64::from(self.schedule.shape.dims[0]) / u64::from(ZEROS);
        let before = copies(self.schedule.zeroed_rows());
        zero_fill::Args {
            pair: self.schedule.bands.zeroed as u32,
            first: before as u32,
            count: (copies(self.schedule.sum_rows()) - before) as u32,
        }
    }

    fn round(&self, tensors: &Tensors, scratch: &Scratch<Span>) -> round::Args {
        let words = self.schedule.counters(self.facts.features.order);
        let [added, rounded] = [words.added, words.rounded].map(|word| scratch.counters.from(word * 4));
        let (bands, steps) = (&self.schedule.bands, self.schedule.steps);
        let parts = RoundParts::new(self.schedule.spread.most() * steps, bands.tiles);
        round::Args {
            d_q: self.results(tensors, scratch),
            added,
            rounded,
            lag: bands.lag as u32,
            part: parts.steps as u32,
            parts: parts.count as u32,
            slots: bands.slots as u32,
            steps: steps as u32,
        }
    }

    fn aux(&self, tensors: &Tensors, block_table: Span) -> Vec<AuxArgs> {
        let shapes = &self.facts.aux_shapes;
        let table = DeviceAux { span: block_table, strides: row_major(shapes.last()) };
        let all = tensors.aux.iter().chain(self.facts.blocks.map(|_| &table));
        all.zip(shapes).map(|(aux, shape)| AuxArgs::new(aux, shape)).collect()
    }

    fn aux_gradients(&self, tensors: &Tensors, words: Span) -> Vec<AuxGradientArgs> {
        let modifiers = &self.facts.features.modifiers;
        let gradient = |(of, exact): (&fulgurite_core::AuxGradient, &bool)| {
            let shape = self.facts.aux_shapes.get(of.aux);
            let axes = shape.into_iter().flatten().zip(row_major(shape));
            AuxGradientArgs {
                to: tensors.d_aux.get(of.aux).copied().flatten().expect("bug in fulgurite: a gradient without memory"),
                words: self.facts.exact_words_at(words, of.aux).filter(|_| *exact),
                axes: axes.map(|(n, stride)| [(*n as u64).saturating_sub(1) as u32, stride as u32]).collect(),
            }
        };
        if modifiers.is_empty() {
            return Vec::new();
        }
        modifiers.aux.iter().zip(&modifiers.exact).map(gradient).collect()
    }

    /// Tensors as threads address them.
    fn thread_rows(&self, tensors: &Tensors) -> ThreadRows {
        let (Tensors { q, k, v, d_o, d_k, d_v, .. }, [q_len, k_len]) = (tensors, self.facts.lengths());
        let [keys, queries] = self.seen([q_len, k_len].map(|n| n as usize));
        ThreadRows {
            tensors: [q, k, v, d_o, d_k, d_v].map(|placed| placed.or(k)),
            seen: [keys, queries].map(|seen| [seen.start as u32, seen.end as u32]),
            keys: k_len as u32,
        }
    }

    /// Keys that some query sees, and queries that see a key, of equal sequences.
    fn seen(&self, [q_len, k_len]: [usize; 2]) -> [Range<usize>; 2] {
        let spans = self.facts.features.mask.spans();
        let transposed: Vec<MaskSpan> = spans.iter().map(MaskSpan::transposed).collect();
        [seen(spans, [q_len, k_len]), seen(&transposed, [k_len, q_len])]
    }

    /// Tensors and tiles of sequences of equal length.
    fn dense(&self, tensors: &Tensors, [q_len, k_len]: [usize; 2]) -> (CopiedRows, DenseArgs) {
        // Keys that no query sees, and queries that see no key, are read as zeros: their values, multiplied by a probability
        // of 0, must not show.
        let [seen_keys, seen_queries] = self.seen([q_len, k_len]);
        let number = self.facts.number;
        // If none is seen, every coordinate lies outside the tensor, so any valid address will do.
        let some = |placed: &DeviceTensor, seen: &Range<usize>| match seen.is_empty() {
            true => DeviceTensor { shape: [1, 1, 1, UNIT as u64], ..tensors.k }.tensor(number),
            false => placed.rows(seen.start as u64, seen.len() as u64).tensor(number),
        };
        let rows = CopiedRows {
            q: some(&tensors.q, &seen_queries),
            k: some(&tensors.k, &seen_keys),
            v: some(&tensors.v, &seen_keys),
            d_o: some(&tensors.d_o, &seen_queries),
            d_k: tensors.d_k.tensor(number),
            d_v: tensors.d_v.tensor(number),
        };
        let first = |seen: &Range<usize>| if seen.is_empty() { OUTSIDE as u32 } else { seen.start as u32 };
        let bands = &self.schedule.bands;
        let args = DenseArgs {
            bands: BandArgs::new([bands.tiles, bands.pairs], [bands.band, bands.last]),
            k_len: k_len as u32,
            first_key: first(&seen_keys),
            first_query: first(&seen_queries),
            bottom_right: (k_len as i64 - q_len as i64) as i32,
        };
        (rows, args)
    }

    /// Tensors and tiles of sequences of different lengths.
    fn ragged(&self, tensors: &Tensors) -> Result<(CopiedRows, SequenceArgs), NoKernel> {
        let Tensors { q, k, v, d_o, d_k, d_v, .. } = tensors;
        let ragged = |name: &str, placed: &DeviceTensor| {
            placed.or(k).ragged(self.facts.number).ok_or_else(|| NoKernel {
                feature: format!("`{name}` whose sequences do not begin at whole rows, where lengths differ"),
            })
        };
        let rows = CopiedRows {
            q: ragged("q", q)?,
            k: ragged("k", k)?,
            v: ragged("v", v)?,
            d_o: ragged("d_o", d_o)?,
            d_k: ragged("d_k", d_k)?,
            d_v: ragged("d_v", d_v)?,
        };
        let mut sequences = self.sequences(tensors);
        // In the order of `tiles::STEPS`.
        sequences.steps = [q, k, v, d_o, d_k, d_v].map(|placed| placed.step().unwrap_or(0) as u32).to_vec();
        Ok((rows, sequences))
    }
}
