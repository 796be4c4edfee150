//! Elements of auxiliary tensors: in vectors along the lanes or the keys where they are next to each other.

use super::{Cells, Evaluator, Form, KEYS};
use crate::simd::{Ahead, Plane, Simd, SimdElement, copy, turned};
use crate::tiles::MAX_LANES;
use fulgurite_core::Data;
use fulgurite_core::expr::Step;
use std::ops::Range;

/// Offsets of the elements that a block reads: `starts[lane] + steps[lane] i` at key i.
struct Offsets {
    starts: [i64; MAX_LANES],
    steps: [i64; MAX_LANES],
    /// The step of all lanes, and the distance from lane to lane, if each is the same.
    step: Option<i64>,
    pace: Option<i64>,
}

/// [`Offsets`] that count from the first key of the sequence, and the keys whose elements are inside the tensor.
pub(super) struct Known {
    offsets: Offsets,
    keys: Range<i64>,
}

impl Offsets {
    /// Finds step and pace.
    fn settle(&mut self, lanes: usize) {
        let (starts, steps) = (&self.starts[..lanes], &self.steps[..lanes]);
        self.step = steps.iter().all(|step| *step == steps[0]).then_some(steps[0]);
        let pace = self.starts[1] - self.starts[0];
        self.pace = starts.windows(2).all(|pair| pair[1] - pair[0] == pace).then_some(pace);
    }
}

/// The elements of a block: offsets that count from a key so far before its first.
#[derive(Clone, Copy)]
struct Elements<'a> {
    offsets: &'a Offsets,
    first: i64,
    /// Whether a product prefetches them.
    prefetched: bool,
}

impl Elements<'_> {
    /// The distance from lane to lane; the same at every key if all lanes have the same step.
    fn pace(&self) -> Option<i64> {
        self.offsets.pace
    }
    fn start(&self, lane: usize) -> i64 {
        self.offsets.starts[lane] + self.offsets.steps[lane] * self.first
    }
    fn at(&self, lane: usize, key: usize) -> usize {
        (self.offsets.starts[lane] + self.offsets.steps[lane] * (self.first + key as i64)) as usize
    }
}

/// The keys at which `base + slope key` is between 0 and `last`.
fn inside(base: i64, slope: i64, last: i64) -> Range<i64> {
    match slope {
        0 if (0..=last).contains(&base) => 0..i64::from(i32::MAX),
        0 => 0..0,
        _ => {
            let ends = [-base, last - base];
            let (from, to) = if slope > 0 { (ends[0], ends[1]) } else { (-ends[1], -ends[0]) };
            let slope = slope.abs();
            // Rounded towards the inside.
            -(-from).div_euclid(slope)..to.div_euclid(slope) + 1
        }
    }
}

impl Evaluator<'_> {
    /// Finds out which elements a load reads, if its indices grow evenly along all keys of a tile.
    pub(super) fn know(&mut self, i: usize, tensor: usize, index: &[usize]) {
        let even = |&step: &usize| !self.plan.axes[step].keys || self.fixed[step];
        self.known[i] = None;
        if !index.iter().all(even) {
            return;
        }
        let lanes = if self.plan.axes[i].lanes { self.lanes } else { 1 };
        let view = &self.aux[tensor];
        let mut offsets = Offsets { starts: [0; MAX_LANES], steps: [0; MAX_LANES], step: None, pace: None };
        let mut keys = 0..i64::from(i32::MAX);
        for (axis, &step) in index.iter().enumerate() {
            let (last, stride) = (view.shape()[axis] as i64 - 1, view.strides()[axis] as i64);
            let rows = &self.rows[step];
            for lane in 0..lanes {
                let base = i64::from(rows.value[lane] as i32);
                let slope = if self.fixed[step] { i64::from(rows.slope[lane] as i32) } else { 0 };
                let own = inside(base, slope, last);
                keys = keys.start.max(own.start)..keys.end.min(own.end);
                offsets.starts[lane] += base * stride;
                offsets.steps[lane] += slope * stride;
            }
        }
        offsets.settle(lanes.max(2));
        self.known[i] = Some(Box::new(Known { offsets, keys }));
    }

    /// Queues prefetches of the elements that these keys of the tile read, if their rows are far apart: the hardware
    /// prefetcher misses such rows. The product that comes before the evaluation runs them, spread over its `blocks`. It has
    /// room for one load; others prefetch while they read.
    pub fn prefetch(&mut self, keys: Range<usize>, ahead: &mut Ahead, blocks: usize) {
        let steps = self.plan.program.steps().iter().zip(&self.known).enumerate();
        let rows = steps.filter_map(|(i, (step, known))| match (step, known.as_deref()) {
            (Step::Load(tensor, _), Some(known)) => Some((i, &self.aux[*tensor], &known.offsets)),
            _ => None,
        });
        for (i, view, offsets) in rows {
            let (Some(pace), Some(step @ (1 | -1))) = (offsets.pace, offsets.step) else { continue };
            if pace.unsigned_abs() <= keys.len() as u64 {
                continue;
            }
            let lowest = if step == 1 { keys.start as i64 } else { 1 - keys.end as i64 };
            let (start, size) = match view.data() {
                Data::F32(x) => (x.as_ptr().cast::<u8>(), 4),
                Data::F16(x) => (x.as_ptr().cast(), 2),
                Data::Bf16(x) => (x.as_ptr().cast(), 2),
                _ => continue,
            };
            let start = start.wrapping_offset(((offsets.starts[0] + lowest) * size) as isize);
            ahead.soon(start, [(pace * size) as usize, keys.len() * size as usize], self.lanes, blocks);
            self.prefetched = Some(i);
            return;
        }
    }

    /// A load that changes from key to key.
    ///
    /// # Safety
    /// As for [`Evaluator::run`].
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(&mut self, i: usize, tensor: usize, index: &[usize], at: &Cells) {
        let lanes = if self.plan.axes[i].lanes { self.lanes } else { 1 };
        // The block is not one that the indices are in; what depends on the key alone has none.
        let place = self.plan.axes[i].lanes.then_some(self.plan.block[i]);
        let mut block = place.map_or(Vec::new(), |place| std::mem::take(&mut self.blocks[place]));
        let (known, first) = (self.known[i].take(), i64::from(at.first));
        let inside = known.as_deref().filter(|own| own.keys.start <= first && first + at.n as i64 <= own.keys.end);
        let own = if inside.is_some() { None } else { self.block_offsets(tensor, index, lanes, at) };
        let elements = match (inside, &own) {
            (Some(known), _) => {
                Some(Elements { offsets: &known.offsets, first, prefetched: self.prefetched == Some(i) })
            }
            (None, Some(offsets)) => Some(Elements { offsets, first: 0, prefetched: false }),
            (None, None) => None,
        };
        if let Some(elements) = elements {
            // SAFETY: passed on.
            unsafe { self.read::<S>(i, tensor, elements, [at.n, lanes], &mut block) };
        }
        let found = elements.is_some();
        self.known[i] = known;
        if let Some(place) = place {
            self.blocks[place] = block;
        }
        if !found {
            self.load_anywhere(i, tensor, index, at);
        }
    }

    /// Reads the elements of a block, into the step's column or `block`.
    ///
    /// # Safety
    /// As for [`Evaluator::run`].
    #[inline(always)]
    unsafe fn read<S: Simd>(
        &mut self,
        i: usize,
        tensor: usize,
        elements: Elements<'_>,
        [n, lanes]: [usize; 2],
        block: &mut [u32],
    ) {
        let view = &self.aux[tensor];
        if lanes == 1 {
            let mut all = [0; KEYS];
            all.iter_mut().enumerate().take(n).for_each(|(key, o)| *o = elements.at(0, key));
            gather(&view.data(), &all[..n], &mut self.columns[i][..n]);
            self.forms[i] = Form::Keys;
            return;
        }
        let scratch = &mut self.scratch[..];
        // SAFETY: passed on; the block has room for all keys of the tile's lanes.
        let done = unsafe {
            match view.data() {
                Data::F32(x) => load_adjacent::<S, f32>(x, elements, [n, lanes], block, scratch),
                Data::F16(x) => load_adjacent::<S, _>(x, elements, [n, lanes], block, scratch),
                Data::Bf16(x) => load_adjacent::<S, _>(x, elements, [n, lanes], block, scratch),
                Data::I32(x) => {
                    // SAFETY: an i32 has the size and alignment of an f32, and only moves.
                    let x = std::slice::from_raw_parts(x.as_ptr().cast::<f32>(), x.len());
                    load_adjacent::<S, f32>(x, elements, [n, lanes], block, scratch)
                }
                _ => false,
            }
        };
        if !done {
            for (key, out) in block.chunks_exact_mut(lanes).enumerate().take(n) {
                let mut all = [0; MAX_LANES];
                all.iter_mut().enumerate().take(lanes).for_each(|(lane, o)| *o = elements.at(lane, key));
                gather(&view.data(), &all[..lanes], out);
            }
        }
        self.forms[i] = Form::Plane;
    }

    /// The offsets of a block whose indices are ramps inside the tensor in this block only, as those that are clamped.
    fn block_offsets(&self, tensor: usize, index: &[usize], lanes: usize, at: &Cells) -> Option<Offsets> {
        let view = &self.aux[tensor];
        let mut all = Offsets { starts: [0; MAX_LANES], steps: [0; MAX_LANES], step: None, pace: None };
        for (axis, &step) in index.iter().enumerate() {
            let (last, stride) = (view.shape()[axis] as i64 - 1, view.strides()[axis] as i64);
            let (rows, steep) = match self.forms[step] {
                Form::Lanes => (step, 0),
                Form::Ramp { rows, magnitude: false, .. } => (rows, 1),
                _ => return None,
            };
            let (rows, n) = (&self.rows[rows], at.n as i64);
            for lane in 0..lanes {
                let slope = steep * i64::from(rows.slope[lane] as i32);
                let first = i64::from(rows.value[lane] as i32) + slope * i64::from(at.first);
                let end = first + slope * (n - 1);
                if first.min(end) < 0 || first.max(end) > last {
                    return None;
                }
                all.starts[lane] += first * stride;
                all.steps[lane] += slope * stride;
            }
        }
        all.settle(lanes.max(2));
        Some(all)
    }

    /// A load with any indices, which are clamped to the tensor.
    pub(super) fn load_anywhere(&mut self, i: usize, tensor: usize, index: &[usize], at: &Cells) {
        let (view, axes) = (&self.aux[tensor], self.plan.axes[i]);
        let place = |offset: &mut usize, axis: usize, x: u32| {
            let last = view.shape()[axis].saturating_sub(1);
            *offset += ((x as i32).max(0) as usize).min(last) * view.strides()[axis];
        };
        if axes.keys && !axes.lanes {
            let mut offsets = [0; KEYS];
            for (axis, &step) in index.iter().enumerate() {
                let column = self.column_of(step, at);
                offsets.iter_mut().zip(&column[..at.n]).for_each(|(o, &x)| place(o, axis, x));
            }
            gather(&view.data(), &offsets[..at.n], &mut self.columns[i][..at.n]);
            self.forms[i] = Form::Keys;
            return;
        }
        // The block is not one that the indices are in.
        let mut block = if axes.keys { std::mem::take(&mut self.blocks[self.plan.block[i]]) } else { Vec::new() };
        let row = |key: usize, out: &mut [u32]| {
            let mut offsets = [0; MAX_LANES];
            for (axis, &step) in index.iter().enumerate() {
                let mut room = [0; MAX_LANES];
                let own = self.row_of(step, key, &mut room, at);
                offsets.iter_mut().zip(own).for_each(|(o, &x)| place(o, axis, x));
            }
            gather(&view.data(), &offsets[..out.len()], out);
        };
        if !axes.keys {
            let mut out = self.rows[i].value;
            row(0, &mut out[..self.lanes]);
            self.rows[i].value = out;
            return;
        }
        block.chunks_exact_mut(self.lanes).enumerate().take(at.n).for_each(|(key, out)| row(key, out));
        self.blocks[self.plan.block[i]] = block;
        self.forms[i] = Form::Plane;
    }
}

/// The bits of elements at any offsets, as f32 or i32; 0 where the tensor has no elements, which only a load that no visible
/// score needs can ask for.
fn gather(data: &Data<'_>, offsets: &[usize], out: &mut [u32]) {
    if data.len() == 0 {
        return out.fill(0);
    }
    let pairs = out.iter_mut().zip(offsets);
    match data {
        Data::F32(x) => pairs.for_each(|(o, &i)| *o = x[i].to_bits()),
        Data::F16(x) => pairs.for_each(|(o, &i)| *o = x[i].to_f32().to_bits()),
        Data::Bf16(x) => pairs.for_each(|(o, &i)| *o = u32::from(x[i].to_bits()) << 16),
        Data::I32(x) => pairs.for_each(|(o, &i)| *o = x[i] as u32),
        _ => unreachable!("bug in fulgurite: a type that Problem refuses"),
    }
}

/// Reads a block whose elements are next to each other along the lanes or along the keys; false if they are not.
///
/// # Safety
/// As for [`Simd`]; lanes in whole vectors.
#[inline(always)]
unsafe fn load_adjacent<S: Simd, T: SimdElement>(
    data: &[T],
    elements: Elements<'_>,
    [n, lanes]: [usize; 2],
    block: &mut [u32],
    scratch: &mut [f32],
) -> bool {
    let Some(step) = elements.offsets.step else { return false };
    // Offsets are linear, so the ends are at corners.
    let (mut least, mut most) = (i64::MAX, 0);
    for lane in 0..lanes {
        (least, most) = (least.min(elements.start(lane)), most.max(elements.start(lane)));
    }
    let far = step * (n as i64 - 1);
    let (least, most) = (least + far.min(0), most + far.max(0));
    assert!(least >= 0 && most < data.len() as i64 && block.len() >= KEYS * lanes, "elements inside the tensor");
    let out = block.as_mut_ptr().cast::<f32>();
    // SAFETY: all elements are inside the tensor, as just checked, and the block holds the keys of its lanes.
    unsafe {
        match (elements.pace(), step) {
            (Some(pace @ (1 | -1)), _) => {
                let first = if pace == 1 { 0 } else { lanes - 1 };
                for key in 0..n {
                    let row = out.add(key * lanes);
                    copy::<S, T>(data.as_ptr().add(elements.at(first, key)), row, lanes);
                    if pace == -1 {
                        std::slice::from_raw_parts_mut(row, lanes).reverse();
                    }
                }
                true
            }
            (_, 1 | -1) => {
                let (to, mut starts) = (Plane { data: out, stride: lanes }, [0; MAX_LANES]);
                starts.iter_mut().enumerate().take(lanes).for_each(|(lane, o)| *o = elements.start(lane) as usize);
                turned::<S, T>(
                    data.as_ptr(),
                    &starts[..lanes],
                    (step == -1, elements.prefetched),
                    to,
                    n,
                    (scratch, KEYS),
                );
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_tensor_gives_zeros() {
        let mut out = [7; 3];
        gather(&Data::F32(&[]), &[0, 0, 0], &mut out);
        assert_eq!(out, [0; 3]);
    }
}
