//! Forward attention as a launch: a problem and where its tensors lie in, a kernel and its arguments out.

use super::forward::{self, Features, Tuning};
use fulgurite_core::{DType, Layout, Mask, Problem, Rescale};
use fulgurite_ptx::device::{Launch, Span, TensorSpan, Value};
use fulgurite_ptx::{BuildError, Kernel, Number, Target, bf16, divisor_values, f16};
use std::f32::consts::LOG2_E;
use std::sync::Arc;
use thiserror::Error;

/// Elements that make 16 bytes: the copy engine's unit.
const UNIT: usize = 8;
/// The largest head dimension.
const MOST: usize = 256;
/// Largest sum of a block that f16 probabilities leave room for.
const F16_LIMIT: f32 = 16384.0;
/// Bytes of keys and values of the (head, batch) pairs whose tiles run together: a part of the second-level cache.
const CACHE_BYTES: u64 = 32 << 20;

/// What the kernel does not have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{feature}")]
pub struct Missing {
    /// In words that follow "does not have".
    pub feature: String,
}

/// A tensor `[batch, sequence, heads, dim]` in a device's memory, strides in elements, the last axis contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Its memory, from the first element on.
    pub span: Span,
    /// Sizes.
    pub shape: [u64; 4],
    /// Elements from one to the next along the first three axes.
    pub strides: [u64; 3],
}

impl Placed {
    /// One that lies together.
    pub fn packed(span: Span, shape: [u64; 4]) -> Placed {
        let [_, s, h, d] = shape;
        Placed { span, shape, strides: [s * h * d, h * d, d] }
    }

    /// `count` rows from the `first` on.
    pub(super) fn rows(&self, first: u64, count: u64) -> Placed {
        let [b, _, h, d] = self.shape;
        // Elements are of 16 bits.
        Placed { span: self.span.from(first * self.strides[1] * 2), shape: [b, count, h, d], ..*self }
    }

    /// As the copy engine sees it: element, row, head, batch.
    pub(super) fn tensor(&self, number: Number) -> TensorSpan {
        let ([b, s, h, d], [batch, row, head]) = (self.shape, self.strides);
        let bytes = u64::from(number.bytes());
        TensorSpan {
            span: self.span,
            number,
            extent: vec![d, s, h, b],
            strides: [row, head, batch].map(|stride| stride * bytes).to_vec(),
        }
    }
}

/// A forward call on Hopper: what its kernel's text depends on, and its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    number: Number,
    features: Features,
    tuning: Tuning,
    /// Batch, queries, keys, query heads, key/value heads.
    sizes: [u64; 5],
    scale: f32,
}

impl Forward {
    /// How a problem is run; the rescale policy is the fastest one unless given.
    pub fn new(problem: &Problem, rescale: Option<Rescale>) -> Result<Forward, Missing> {
        let missing = |feature: String| Err(Missing { feature });
        let number = match problem.dtype() {
            DType::Bf16 => Number::Bf16,
            DType::F16 => Number::F16,
            other => return missing(format!("dtype {other}")),
        };
        let Layout::Dense { .. } = problem.layout() else { return missing("packed batches".into()) };
        let dims = [problem.head_dim(), problem.value_dim()];
        if let Some(d) = dims.into_iter().find(|d| !d.is_multiple_of(UNIT) || *d > MOST) {
            return missing(format!("head_dim {d} (it has multiples of {UNIT} up to {MOST})"));
        }
        let others = [
            (problem.mask().rest().is_some(), "mask modifiers"),
            (problem.score_program().is_some(), "score modifiers"),
            (problem.has_sinks(), "sinks"),
            (problem.has_used_q() || problem.has_used_k(), "used lengths"),
            (problem.blocks().is_some(), "block masks"),
        ];
        if let Some((_, name)) = others.into_iter().find(|(has, _)| *has) {
            return missing(name.into());
        }
        let exp = problem.exp();
        if matches!(exp, fulgurite_core::Exp::Sas { .. }) {
            return missing(format!("exp {exp}"));
        }
        let sizes = [problem.batch(), problem.max_q_len(), problem.max_k_len(), problem.q_heads(), problem.kv_heads()];
        if let Some(n) = sizes.into_iter().find(|n| *n >= 1 << 31) {
            return missing(format!("a size of {n} (it has sizes below 2^31)"));
        }
        let mut padded = dims.map(|d| d.next_multiple_of(16) as u32);
        let causal = !problem.mask().spans().is_empty();
        let mut tuning = Tuning::hopper(padded[0].max(padded[1]), sizes[2], causal);
        if !tuning.join {
            padded[0] = padded[0].max(padded[1]);
        }
        let limit = |limit: f32| if number == Number::F16 { limit.min(F16_LIMIT) } else { limit };
        tuning.rescale = match rescale.unwrap_or(tuning.rescale) {
            Rescale::Optimistic(most) => Rescale::Optimistic(limit(most)),
            other => other,
        };
        let mask: Mask = problem.mask().clone();
        let features = Features { dims: padded, mask, exp };
        Ok(Forward { number, features, tuning, sizes: sizes.map(|n| n as u64), scale: problem.scale() })
    }

    /// Its kernel.
    pub fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        match self.number {
            Number::Bf16 => forward::kernel::<bf16>(target, &self.features, self.tuning),
            _ => forward::kernel::<f16>(target, &self.features, self.tuning),
        }
    }

    /// Whether another call has the same kernel.
    pub fn same_kernel(&self, other: &Forward) -> bool {
        (self.number, &self.features, self.tuning) == (other.number, &other.features, other.tuning)
    }

    /// Its launch, `None` where there is nothing to compute. `lse` is f32, `[batch, heads, queries]`, packed; `counters`
    /// are two u32, the first of them 0 (as every launch leaves it) and the second a count of blocks done again.
    pub fn launch(
        &self,
        kernel: Arc<Kernel>,
        [q, k, v, o]: [Placed; 4],
        lse: Span,
        counters: Span,
        multiprocessors: u32,
    ) -> Option<Launch> {
        let [batch, q_len, k_len, heads, kv_heads] = self.sizes;
        let rows = u64::from(64 * self.tuning.groups);
        let (m_tiles, pairs) = (q_len.div_ceil(rows), heads * batch);
        let tiles = m_tiles * pairs;
        if tiles == 0 || o.shape.contains(&0) {
            return None;
        }
        // Keys that no query sees are left out: whatever they hold, times a probability of 0, must not show.
        let mask = &self.features.mask;
        let [q_count, k_count] = [q_len, k_len].map(|n| n as usize);
        let seen = mask.keys(0, q_count, k_count).start..mask.keys(q_count - 1, q_count, k_count).end;
        let count = seen.end.saturating_sub(seen.start) as u64;
        // Without keys every element is masked: any memory does.
        let some = |placed: &Placed| match count == 0 || placed.shape.contains(&0) {
            true => Placed { shape: [1, 1, 1, q.shape[3]], ..q },
            false => placed.rows(seen.start as u64, count),
        };
        let tensors = [q, some(&k), some(&v), o].map(|placed| Value::Tensor(placed.tensor(self.number)));
        // Enough pairs to balance rows of different lengths, few enough for the second-level cache.
        let pair_bytes = (k_len * u64::from(self.features.dims[0] + self.features.dims[1]) * 2).max(1);
        let order = match self.features.mask.spans().is_empty() {
            true => 1,
            false => (CACHE_BYTES / pair_bytes).clamp(16, 32),
        };
        let order = order.min(pairs);
        let numbers = [q_len, count, m_tiles, tiles, pairs].map(|n| Value::U32(n as u32));
        let first = seen.start as i64;
        let diagonals = [k_len as i64 - q_len as i64 - first, -first].map(|n| Value::U32(n as i32 as u32));
        let rest = match pairs % order {
            0 => 1, // never used
            rest => rest,
        };
        let divisors = [heads, heads / kv_heads, order * m_tiles, order, rest].map(|d| divisor_values(d as u32));
        let mut args: Vec<Value> = tensors.into();
        args.extend([Value::Pointer(lse), Value::Pointer(counters)]);
        args.extend(numbers);
        args.extend(divisors.into_iter().flatten());
        args.push(Value::F32(self.scale * LOG2_E));
        args.extend(diagonals);
        let blocks = tiles.min(u64::from(multiprocessors)) as u32;
        Some(Launch { kernel, grid: [blocks, 1, 1], args })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::Exp;

    fn problem(d: usize, dv: usize, dtype: DType) -> fulgurite_core::ProblemBuilder {
        Problem::builder().dense(2, 300, 500).heads(4, 2).head_dims(d, dv).dtype(dtype)
    }

    #[test]
    fn every_pair_of_head_dims_has_a_kernel() {
        for (d, dv) in (8..=256).step_by(8).flat_map(|d| [8, 64, 72, 128, 136, 256].map(|dv| (d, dv))) {
            for (k_len, mask) in [(500, Mask::none()), (2100, Mask::none()), (5000, Mask::causal())] {
                let problem =
                    Problem::builder().dense(1, 64, k_len).heads(2, 1).head_dims(d, dv).dtype(DType::Bf16).mask(mask);
                let plan = Forward::new(&problem.build().unwrap(), None).unwrap();
                plan.kernel(Target::HOPPER).unwrap_or_else(|e| panic!("{d}, {dv}, {k_len}: {e}"));
            }
        }
    }

    #[test]
    fn launches_pass_the_devices_check() {
        let plan = Forward::new(&problem(64, 128, DType::F16).mask(Mask::causal()).build().unwrap(), None).unwrap();
        let kernel = Arc::new(plan.kernel(Target::HOPPER).unwrap());
        let at = |b, s, h, d| Placed::packed(Span { address: 4096, bytes: b * s * h * d * 2 }, [b, s, h, d]);
        let tensors = [at(2, 300, 4, 64), at(2, 500, 2, 64), at(2, 500, 2, 128), at(2, 300, 4, 128)];
        let memory = Span { address: 4096, bytes: 1 << 20 };
        let launch = plan.launch(kernel.clone(), tensors, memory, memory, 132).unwrap();
        fulgurite_ptx::device::check_launch(&kernel, launch.grid, &launch.args).unwrap();
        assert_eq!(launch.grid, [3 * 4 * 2, 1, 1]); // three tiles of 128 rows for 8 pairs
    }

    #[test]
    fn what_is_missing_is_named() {
        let refused = |problem: fulgurite_core::ProblemBuilder| {
            Forward::new(&problem.build().unwrap(), None).unwrap_err().to_string()
        };
        assert_eq!(refused(problem(64, 64, DType::F32)), "dtype f32");
        assert_eq!(refused(problem(60, 64, DType::Bf16)), "head_dim 60 (it has multiples of 8 up to 256)");
        assert_eq!(refused(problem(64, 64, DType::Bf16).softcap(30.0)), "score modifiers");
        assert_eq!(refused(problem(64, 64, DType::Bf16).sinks()), "sinks");
        assert_eq!(
            refused(
                problem(64, 64, DType::Bf16).mask(Mask::documents()).aux("documents_q", DType::I32, &[2, 300]).aux(
                    "documents_k",
                    DType::I32,
                    &[2, 500]
                )
            ),
            "mask modifiers"
        );
        assert_eq!(refused(problem(64, 64, DType::Bf16).exp(Exp::Sas { threshold: -10.0 })), "exp sas:-10");
    }
}
