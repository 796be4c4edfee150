//! The launch arguments of forward attention, computed from the facts of a problem and the tensors of a call.

use crate::attention::forward::call::{CommonArgs, ForwardCall, ForwardLaunch, RowTensor, RowTensors};
use crate::attention::forward::facts::{BlockForm, BlockPlan, Facts, row_major};
use crate::no_kernel::NoKernel;
use crate::parts::arguments::{DeviceAux, DeviceTensor, Tensors, rest};
use crate::parts::block_lists::ListArgs;
use crate::parts::merge::ResultArgs;
use crate::parts::modifier::AuxArgs;
use crate::parts::nonfinite::PlainArgs;
use crate::parts::results::check_f32;
use crate::parts::schedule::{BandArgs, Ragged, SequenceArgs};
use crate::parts::sequences::{DenseArgs, Visible};
use fulgurite_core::Layout;
use fulgurite_ptx::Number;
use std::f32::consts::LOG2_E;

/// Bytes of k and v that fit in L2 for the (head, sequence) pairs whose tiles run at the same time: a fraction of L2.
const CACHE_BYTES: u64 = 32 << 20;

impl Facts {
    /// Batch size and lengths, if all sequences have equal lengths.
    fn equal_lengths(&self) -> Option<[u64; 3]> {
        match self.layout {
            Layout::Dense { batch, q_len, k_len } if !self.features.ragged.any() => {
                Some([batch, q_len, k_len].map(|n| n as u64))
            }
            _ => None,
        }
    }

    /// Lengths of equal sequences, and their visible keys.
    pub(crate) fn dense(&self) -> Option<DenseArgs> {
        let [_, q_len, k_len] = self.equal_lengths()?;
        // With block lists, the lists alone decide which keys are visible.
        let visible = match self.features.blocks {
            Some(_) => Visible { first: 0, count: k_len },
            None => Visible::of(&self.features.mask, q_len, k_len),
        };
        Some(DenseArgs { q_len, k_len, visible })
    }

    /// Arguments that both kernels share.
    pub(crate) fn common(&self, tensors: &Tensors) -> Result<CommonArgs, NoKernel> {
        let [heads, kv_heads] = self.heads;
        let [input, _] = self.features.modifiers.factors();
        let scale = match self.features.modifiers.score {
            Some(_) => self.scale * input,
            None => self.scale * LOG2_E,
        };
        let dense = self.dense();
        let ragged = match dense {
            Some(_) => None,
            None => Some(self.ragged(tensors)?),
        };
        Ok(CommonArgs {
            counters: tensors.counters,
            group: heads / kv_heads,
            scale,
            dense,
            ragged,
            aux: self.aux(tensors)?,
            plain: self.features.hides_keys().then(|| self.plain(&tensors.rows)),
        })
    }

    fn ragged(&self, tensors: &Tensors) -> Result<SequenceArgs, NoKernel> {
        let Ragged { packed, used_q, used_k } = self.features.ragged;
        let missing = [
            packed && tensors.cu_seqlens.is_none(),
            used_q && tensors.used[0].is_none(),
            used_k && tensors.used[1].is_none(),
        ];
        if missing.contains(&true) {
            return Err(NoKernel { feature: "ragged sequences without their lengths".into() });
        }
        let mut args = SequenceArgs::new(self.layout, tensors.cu_seqlens, tensors.used);
        args.steps = tensors.rows.iter().map(|tensor| tensor.step().unwrap_or(0) as u32).collect();
        Ok(args)
    }

    /// Auxiliary tensors, and the table of blocks if elements look up their block.
    pub(crate) fn aux(&self, tensors: &Tensors) -> Result<Vec<AuxArgs>, NoKernel> {
        let table = self.coverage().and(tensors.scratch);
        let table = table.map(|span| DeviceAux { span, strides: row_major(self.aux_shapes.last()) });
        let given = tensors.aux.iter().chain(&table).zip(&self.aux_shapes);
        let given = given.filter(|(aux, shape)| aux.strides.len() == shape.len());
        let args: Vec<AuxArgs> = given.map(|(aux, shape)| AuxArgs::new(aux, shape)).collect();
        match args.len() == self.aux_shapes.len() {
            true => Ok(args),
            false => Err(NoKernel { feature: "auxiliary tensors of other shapes than the problem's".into() }),
        }
    }

    /// Rows that the non-finite path reads, starting at the first visible key.
    fn plain(&self, [q, k, v, _]: &[DeviceTensor; 4]) -> PlainArgs {
        let first = match (self.equal_lengths(), self.features.blocks) {
            (Some([_, q_len, k_len]), None) => self.features.mask.keys(0, q_len as usize, k_len as usize).start as u64,
            _ => 0,
        };
        PlainArgs::new([*q, k.rows(first, k.shape[1]), v.rows(first, v.shape[1])])
    }

    /// Arguments of the epilogue.
    pub(crate) fn results(&self, tensors: &Tensors) -> Result<ResultArgs, NoKernel> {
        let lse_rows = match self.layout {
            Layout::Dense { q_len, .. } => q_len as u64,
            Layout::Packed(p) => p.total_q as u64,
        };
        if self.features.sinks.is_some() && tensors.sinks.is_none() {
            return Err(NoKernel { feature: "sinks without their logits".into() });
        }
        Ok(ResultArgs::new(tensors.lse, lse_rows, tensors.sinks))
    }

    /// q, k, v and o for TMA: visible keys only for equal sequences, one axis of rows for ragged ones.
    pub(crate) fn row_tensors(&self, rows: &[DeviceTensor; 4]) -> Result<RowTensors, NoKernel> {
        let [q, k, v, o] = rows;
        let number = self.number;
        let o_number = if self.features.results.is_f32() { Number::F32 } else { number };
        if let Some(DenseArgs { visible, .. }) = self.dense() {
            let [q, k, v, o] = [*q, visible.part(k, q), visible.part(v, q), *o].map(|tensor| RowTensor {
                tensor,
                number,
                ragged: false,
            });
            return Ok(RowTensors { q, k, v, o: RowTensor { number: o_number, ..o } });
        }
        let tensor = |name: &str, tensor: &DeviceTensor| {
            let tensor = tensor.or(q);
            match tensor.step() {
                Some(_) => Ok(RowTensor { tensor, number, ragged: true }),
                None => Err(NoKernel {
                    feature: format!("`{name}` whose sequences do not begin at whole rows, where lengths differ"),
                }),
            }
        };
        Ok(RowTensors {
            q: tensor("q", q)?,
            k: tensor("k", k)?,
            v: tensor("v", v)?,
            o: RowTensor { number: o_number, ..tensor("o", o)? },
        })
    }

    /// Grid and arguments of the forward kernel.
    pub(crate) fn forward_launch(
        &self,
        tensors: &Tensors,
        tile_rows: u32,
        multiprocessors: u32,
    ) -> Result<ForwardLaunch, NoKernel> {
        if self.features.results.is_f32() {
            check_f32("o", &tensors.rows[3], 4)?;
        }
        let RowTensors { q, k, v, o } = self.row_tensors(&tensors.rows)?;
        let call = ForwardCall {
            q,
            k,
            v,
            o,
            common: self.common(tensors)?,
            results: self.results(tensors)?,
            heads: self.heads[0],
            bands: self.bands(tile_rows),
            lists: self.lists(tensors)?,
        };
        Ok(ForwardLaunch { grid: [self.most_tiles(tile_rows).min(u64::from(multiprocessors)) as u32, 1, 1], call })
    }

    /// The order of tiles of equal sequences.
    fn bands(&self, tile_rows: u32) -> Option<BandArgs> {
        let [batch, q_len, k_len] = self.equal_lengths()?;
        let pairs = self.heads[0] * batch;
        // Enough pairs per band to balance rows of different lengths, few enough to fit in L2.
        let pair_bytes = (k_len * u64::from(self.features.dims[0] + self.features.dims[1]) * 2).max(1);
        let order = match self.features.mask.spans().is_empty() {
            true => 1,
            false => (CACHE_BYTES / pair_bytes).clamp(16, 32),
        };
        let order = order.min(pairs);
        let tiles = q_len.div_ceil(u64::from(tile_rows));
        Some(BandArgs::new([tiles, pairs], [order, rest(pairs, order)]))
    }

    /// Number of tiles of the batch; an upper bound for a ragged batch.
    fn most_tiles(&self, tile_rows: u32) -> u64 {
        let tile = u64::from(tile_rows);
        let tiles = match self.layout {
            Layout::Dense { batch, q_len, .. } => batch as u64 * (q_len as u64).div_ceil(tile),
            Layout::Packed(p) => p.total_q as u64 / tile + p.batch as u64 + 1,
        };
        tiles * self.heads[0]
    }

    fn lists(&self, tensors: &Tensors) -> Result<Option<ListArgs>, NoKernel> {
        let missing = || NoKernel { feature: "a block mask without its lists".into() };
        let (spec, lists) = match (self.blocks, &self.expression) {
            (Some(BlockPlan { spec, form: BlockForm::Lists }), _) => (spec, tensors.lists.ok_or_else(missing)?),
            (Some(BlockPlan { spec, form: BlockForm::Expression }), Some(expression)) => {
                (spec, expression.lists(tensors.scratch.ok_or_else(missing)?).0)
            }
            _ => return Ok(None),
        };
        let q_len = match self.layout {
            Layout::Dense { q_len, .. } => q_len,
            Layout::Packed(p) => p.max_q,
        };
        let q_blocks = q_len.div_ceil(spec.rows) as u64;
        let batch_step = if spec.batch == 1 { 0 } else { spec.heads as u64 * q_blocks };
        let head_step = if spec.heads == 1 { 0 } else { q_blocks };
        Ok(Some(ListArgs { lists, batch_step, head_step }))
    }
}
