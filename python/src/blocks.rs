//! Block masks: from the lists of a call, and from a mask, for callers who want the lists.

use crate::array::{Array, Claims, wrong};
use crate::description::{Description, Role, in_32_bits};
use crate::expression;
use crate::gil::detach;
use fulgurite::{BlockLists, BlockMask, BlockSpec, Inputs, Mask, Problem, TensorView};
use pyo3::prelude::*;

/// Key blocks of each (batch, head, query block).
pub type Lists = Vec<Vec<i32>>;

/// The block mask that the four lists describe.
pub fn from_lists(description: &Description, problem: &Problem, extras: &[Array]) -> PyResult<Option<BlockMask>> {
    let Some(spec) = description.block_spec(extras)? else { return Ok(None) };
    let mut lists: [Lists; 2] = Default::default();
    let blocks = spec.blocks(problem.max_q_len(), problem.max_k_len());
    let rows = spec.batch * spec.heads * blocks[0];
    for (list, [count_name, index_name]) in lists
        .iter_mut()
        .zip([[BlockLists::NAMES[0], BlockLists::NAMES[1]], [BlockLists::NAMES[2], BlockLists::NAMES[3]]])
    {
        let find = |name| {
            description
                .roles
                .iter()
                .map(Role::name)
                .zip(extras)
                .find(|(other, _)| *other == name)
                .map(|(_, array)| array)
        };
        let (Some(counts), Some(indices)) = (find(count_name), find(index_name)) else {
            *list = vec![Vec::new(); rows];
            continue;
        };
        let claims = &mut Claims::default();
        let (counts, indices) = (counts.view(count_name, claims)?, indices.view(index_name, claims)?);
        for (name, view, want) in [
            (count_name, &counts, vec![spec.batch, spec.heads, blocks[0]]),
            (index_name, &indices, vec![spec.batch, spec.heads, blocks[0], blocks[1]]),
        ] {
            if view.shape()[..] != want || view.dtype().is_float() {
                return Err(wrong(format!(
                    "`{name}` is {} of shape {:?}, allowed: i32 of shape {want:?}; make the block mask for these lengths",
                    view.dtype(),
                    view.shape()
                )));
            }
        }
        let indices = indices.to_f64();
        for (row, count) in counts.to_f64().into_iter().enumerate() {
            let count = (count.max(0.0) as usize).min(blocks[1]);
            let mut row: Vec<i32> = indices[row * blocks[1]..][..count].iter().map(|&block| block as i32).collect();
            row.sort_unstable();
            list.push(row);
        }
    }
    let [partial, full] = lists;
    BlockMask::new(spec, blocks, partial, full).map(Some).map_err(|e| wrong(e.to_string()))
}

/// The blocks that `mask` can reach, partial and full, found by interval arithmetic without evaluating elements.
pub fn reached(
    py: Python<'_>,
    mask: &str,
    [batch, heads, q_len, k_len]: [usize; 4],
    [rows, cols]: [usize; 2],
    names: &[String],
    tensors: &[Bound<'_, PyAny>],
) -> PyResult<(Lists, Lists)> {
    let mask = Mask::custom(expression::parse(mask).map_err(wrong)?);
    let mut builder = Problem::builder().dense(batch, q_len, k_len).heads(heads, heads).head_dim(1).mask(mask);
    let arrays = names.iter().zip(tensors).map(|(name, object)| Array::read(name, object));
    let arrays = arrays.collect::<PyResult<Vec<_>>>()?;
    for (name, array) in names.iter().zip(&arrays) {
        builder = builder.aux(name, array.dtype(name)?, array.shape());
    }
    let problem = builder.build().map_err(|e| wrong(e.to_string()))?;
    // Nothing reads q, k and v, so one element represents all of them.
    let nothing = [0.0f32];
    let view = |shape: Vec<usize>| TensorView::strided(&nothing[..], &shape, &[0; 4]).map_err(|e| wrong(e.to_string()));
    let (q, k) = (view(problem.q_shape())?, view(problem.k_shape())?);
    let mut inputs = Inputs::new(q, k, k);
    let claims = &mut Claims::default();
    for (name, array) in names.iter().zip(&arrays) {
        inputs.aux.push((name, array.view(name, claims)?));
    }
    let spec = BlockSpec { rows, cols, batch, heads };
    let bound = inputs.bind(&problem).map_err(|e| wrong(e.to_string()))?;
    in_32_bits(bound.past_32_bits())?;
    let blocks = detach(py, || BlockMask::from_mask(&bound, spec))?.map_err(|e| wrong(e.to_string()))?;
    let (mut partial, mut full) = (Lists::new(), Lists::new());
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..blocks.blocks()[0] {
                let (p, f) = blocks.lists(b, h, i);
                partial.push(p.to_vec());
                full.push(f.to_vec());
            }
        }
    }
    Ok((partial, full))
}
