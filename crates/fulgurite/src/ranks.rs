//! Predicts attention over several GPUs: a ring and an exchange of heads (Ulysses), from kernel times and link rates.
//!
//! Kernel times are the bounds of [`explain`] and [`explain_backward`], or measured. A message of b bytes takes `latency + b / rate` in
//! each direction, and it takes no SM. A ring has head-tail shards of a causal sequence, so that all ranks compute equally
//! long; its messages are under way while a rank computes. An exchange of heads overlaps with nothing.

use crate::explained::{explain, explain_backward};
use crate::profile::Tables;
use crate::{Error, Unsupported};
use fulgurite_core::{Mask, ProblemBuilder};
use fulgurite_ptx::Target;

/// The way from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes a second, in each direction at the same time.
    pub bytes_per_second: f64,
    /// Seconds until the first byte arrives.
    pub latency_seconds: f64,
}

impl Link {
    /// NVLink 4 in one server of H200: 900 GB/s a GPU in both directions together. The latency is an assumption.
    pub const NVLINK: Link = Link { bytes_per_second: 450e9, latency_seconds: 5e-6 };
    /// One InfiniBand NDR port for each GPU: 400 Gb/s in each direction. The latency is an assumption.
    pub const INFINIBAND: Link = Link { bytes_per_second: 50e9, latency_seconds: 10e-6 };

    fn seconds(&self, bytes: u64) -> f64 {
        if bytes == 0 { 0.0 } else { self.latency_seconds + bytes as f64 / self.bytes_per_second }
    }
}

/// Measured seconds of a rank's steps, in place of the bounds of kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSeconds {
    /// The step over the keys of the rank itself.
    pub first: f64,
    /// A step over those of another rank.
    pub later: f64,
}

/// Self-attention over a sequence whose rows are divided among ranks.
#[derive(Debug, Clone)]
pub struct RankProblem {
    /// The problem without its sizes, heads and mask.
    pub builder: ProblemBuilder,
    /// Sequences, and the rows of each.
    pub sizes: [usize; 2],
    /// Query heads, key/value heads.
    pub heads: [usize; 2],
    /// Whether a query sees keys up to its own position only; otherwise it sees all.
    pub causal: bool,
    /// Whether gradients are computed; otherwise o.
    pub backward: bool,
    /// Number of ranks.
    pub ranks: usize,
    /// Measured times of steps; without them, kernels run at their bounds.
    pub steps: Option<StepSeconds>,
}

/// The bytes that one rank sends, by kind, as `fulgurite.distributed.bytes_sent` of the Python package counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankBytes {
    /// Keys and values on their way around the ring.
    pub keys: u64,
    /// Their f32 gradients.
    pub gradients: u64,
    /// q, k, v and o, or their gradients, whose heads are exchanged.
    pub heads: u64,
}

/// The prediction for one strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankTimes {
    /// Seconds of a rank's kernels.
    pub kernel_seconds: f64,
    /// Seconds of a rank's messages, if nothing overlapped.
    pub message_seconds: f64,
    /// Seconds from start to end.
    pub seconds: f64,
    /// What a rank sends.
    pub bytes: RankBytes,
}

impl RankTimes {
    /// Seconds in which a rank waits for messages.
    pub fn exposed_seconds(&self) -> f64 {
        self.seconds - self.kernel_seconds
    }
}

/// Predictions for a problem.
#[derive(Debug, Clone)]
pub struct RanksExplained {
    /// Seconds on one GPU.
    pub one_seconds: f64,
    /// Keys and values travel.
    pub ring: RankTimes,
    /// Heads are exchanged; the reason if the ranks do not divide them.
    pub ulysses: Result<RankTimes, String>,
}

/// Predicts a problem on several GPUs.
///
/// ```
/// use fulgurite::gpu::{Link, RankProblem, Target, explain_ranks};
/// use fulgurite::{DType, Problem};
///
/// let builder = Problem::builder().head_dim(128).dtype(DType::Bf16);
/// let problem =
///     RankProblem { builder, sizes: [1, 16384], heads: [32, 8], causal: true, backward: false, ranks: 4, steps: None };
/// let found = explain_ranks(&problem, Link::NVLINK, Target::HOPPER, &Default::default())?;
/// // Three hops of 4096 rows, 8 heads of 128 + 128 elements, 2 bytes each.
/// assert_eq!(found.ring.bytes.keys, 3 * 4096 * 8 * 256 * 2);
/// assert!(found.ring.seconds < found.one_seconds / 2.0);
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn explain_ranks(
    problem: &RankProblem,
    link: Link,
    target: Target,
    tables: &Tables,
) -> Result<RanksExplained, Error> {
    let on = (target, tables);
    let RankProblem { sizes: [_, length], heads, causal, .. } = *problem;
    if problem.ranks == 0 || !length.is_multiple_of(2 * problem.ranks) {
        let feature = format!("{length} rows on {} ranks of two equal chunks each", problem.ranks);
        let instead = "choose a length that 2 x ranks divides: other lengths are padded to it".into();
        return Err(Unsupported { engine: "explain --ranks".into(), feature, instead }.into());
    }
    let one_seconds = match problem.measured_seconds() {
        Some(seconds) => seconds * problem.ranks as f64,
        None => problem.kernel(heads, [length, length], causal, on)?,
    };
    Ok(RanksExplained { one_seconds, ring: problem.ring(link, on)?, ulysses: problem.ulysses(link, on)? })
}

impl RankProblem {
    /// The bound of one call of the kernel.
    fn kernel(
        &self,
        [heads, kv_heads]: [usize; 2],
        [q_len, k_len]: [usize; 2],
        causal: bool,
        (target, tables): (Target, &Tables),
    ) -> Result<f64, Error> {
        let mask = if causal { Mask::causal() } else { Mask::none() };
        let builder = self.builder.clone().heads(heads, kv_heads).mask(mask);
        let explained = if self.backward { explain_backward } else { explain };
        Ok(explained(&builder, [self.sizes[0], q_len, k_len], target, tables)?.bound_seconds)
    }

    /// Measured seconds of all steps of a rank.
    fn measured_seconds(&self) -> Option<f64> {
        self.steps.map(|steps| steps.first + steps.later * (self.ranks - 1) as f64)
    }

    /// Seconds of a rank's step over its own keys, and of one over the keys of another rank, if there is one.
    fn steps(&self, on: (Target, &Tables)) -> Result<StepSeconds, Error> {
        if let Some(steps) = self.steps {
            return Ok(steps);
        }
        // The own keys first: half of the scores of a square. Later blocks are all rows and half of the keys, or half of the
        // rows and all keys, without a mask.
        let own = self.sizes[1] / self.ranks;
        let first = self.kernel(self.heads, [own, own], self.causal, on)?;
        let other = if self.causal { [own, own / 2] } else { [own, own] };
        let later = if self.ranks > 1 { self.kernel(self.heads, other, false, on)? } else { 0.0 };
        Ok(StepSeconds { first, later })
    }

    /// Rows of all sequences on a rank, elements of a row of q and o (or their gradients) for each head, and bytes of one.
    fn row(&self) -> Result<[u64; 3], Error> {
        let [batch, length] = self.sizes;
        let one = self.builder.clone().heads(1, 1).dense(1, 1, 1).build()?;
        let rows = (batch * length / self.ranks) as u64;
        Ok([rows, (one.head_dim() + one.value_dim()) as u64, one.dtype().size_bytes() as u64])
    }

    fn ring(&self, link: Link, on: (Target, &Tables)) -> Result<RankTimes, Error> {
        let hops = self.ranks as u64 - 1;
        let [rows, dims, element] = self.row()?;
        let keys = rows * self.heads[1] as u64 * dims * element;
        let gradients = if self.backward && hops > 0 { rows * self.heads[1] as u64 * dims * 4 } else { 0 };
        let StepSeconds { first, later } = self.steps(on)?;
        let (mut seconds, mut kernel_seconds) = (0.0, 0.0);
        for step in 0..=hops {
            let compute = if step == 0 { first } else { later };
            // The next keys come, and the gradients of the keys before go on, while a block is computed.
            let coming = if step < hops { link.seconds(keys) } else { 0.0 };
            let going = if step > 0 { link.seconds(gradients) } else { 0.0 };
            seconds += f64::max(compute, coming + going);
            kernel_seconds += compute;
        }
        // The last gradients go home.
        seconds += link.seconds(gradients);
        let bytes = RankBytes { keys: hops * keys, gradients: gradients * (hops + 1), heads: 0 };
        let message_seconds = hops as f64 * link.seconds(keys) + self.ranks as f64 * link.seconds(gradients);
        Ok(RankTimes { kernel_seconds, message_seconds, seconds, bytes })
    }

    fn ulysses(&self, link: Link, on: (Target, &Tables)) -> Result<Result<RankTimes, String>, Error> {
        let ([_, length], [heads, kv_heads]) = (self.sizes, self.heads);
        if !heads.is_multiple_of(self.ranks) {
            return Ok(Err(format!("{heads} query heads, allowed: a multiple of {} ranks", self.ranks)));
        }
        // Few key heads are repeated until the ranks divide them.
        let repeated = lcm(kv_heads, self.ranks);
        let kernel_seconds = match self.measured_seconds() {
            // One piece has as many scores as all steps of a ring together.
            Some(seconds) => seconds,
            None => self.kernel([heads / self.ranks, repeated / self.ranks], [length, length], self.causal, on)?,
        };
        let [rows, dims, element] = self.row()?;
        let others = |heads: usize| rows * heads as u64 * dims * element / self.ranks as u64 * (self.ranks as u64 - 1);
        // q and o, k and v: four exchanges.
        let sent = others(heads) + others(repeated);
        let exchanges = if self.ranks > 1 { 4.0 } else { 0.0 };
        let message_seconds = exchanges * link.latency_seconds + sent as f64 / link.bytes_per_second;
        let bytes = RankBytes { heads: sent, ..RankBytes::default() };
        Ok(Ok(RankTimes { kernel_seconds, message_seconds, seconds: kernel_seconds + message_seconds, bytes }))
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::{DType, Problem};

    fn found(ranks: usize, link: Link, backward: bool, causal: bool) -> RanksExplained {
        let builder = Problem::builder().head_dim(64).dtype(DType::Bf16);
        let problem = RankProblem { builder, sizes: [2, 8192], heads: [8, 2], causal, backward, ranks, steps: None };
        explain_ranks(&problem, link, Target::HOPPER, &Tables::default()).unwrap()
    }

    #[test]
    fn one_rank_is_one_gpu() {
        let found = found(1, Link::NVLINK, false, true);
        let ulysses = found.ulysses.unwrap();
        assert_eq!((found.ring.seconds, ulysses.seconds), (found.one_seconds, found.one_seconds));
        assert_eq!((found.ring.bytes, ulysses.bytes), (RankBytes::default(), RankBytes::default()));
    }

    #[test]
    fn bytes_are_those_of_the_closed_form() {
        // 2 sequences of 2048 rows a rank, 2 heads of keys with 64 + 64 elements; few key heads are repeated to 4.
        let (found, back) = (found(4, Link::NVLINK, false, true), found(4, Link::NVLINK, true, true));
        let kv = 2 * 2048 * 2 * 128;
        assert_eq!(found.ring.bytes, RankBytes { keys: 3 * kv * 2, gradients: 0, heads: 0 });
        assert_eq!(back.ring.bytes, RankBytes { keys: 3 * kv * 2, gradients: 4 * kv * 4, heads: 0 });
        assert_eq!(found.ulysses.unwrap().bytes.heads, 2 * 2048 * (8 + 4) * 128 * 2 / 4 * 3);
    }

    #[test]
    fn a_slow_link_is_waited_for() {
        let slow = Link { bytes_per_second: 1e9, latency_seconds: 0.0 };
        let free = Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 };
        for (causal, backward) in [(true, false), (false, true)] {
            let (slow, free) = (found(4, slow, backward, causal), found(4, free, backward, causal));
            assert!(free.ring.exposed_seconds().abs() < 1e-12 && free.ring.message_seconds == 0.0);
            assert!(slow.ring.exposed_seconds() > 0.0 && slow.ring.seconds >= slow.ring.message_seconds * 0.99);
            // Ranks compute a quarter each, and a little more at the edges of tiles.
            let share = free.ring.seconds / free.one_seconds;
            assert!((0.24..0.33).contains(&share), "{share}");
        }
    }

    /// With measured steps, times are the formulas of the guide.
    #[test]
    fn measured_steps_replace_bounds() {
        let builder = Problem::builder().head_dim(64).dtype(DType::Bf16);
        let steps = Some(StepSeconds { first: 3e-3, later: 4e-3 });
        let link = Link { bytes_per_second: 1e9, latency_seconds: 1e-3 };
        for backward in [false, true] {
            let problem = RankProblem {
                builder: builder.clone(),
                sizes: [1, 8192],
                heads: [8, 8],
                causal: true,
                backward,
                ranks: 4,
                steps,
            };
            let found = explain_ranks(&problem, link, Target::HOPPER, &Tables::default()).unwrap();
            // 2048 rows of 8 heads of 64 + 64 elements of 2 bytes, and f32 gradients.
            let [keys, gradients] = [5.194304e-3, 9.388608e-3];
            let want = match backward {
                // Keys come for longer than any step takes; the last step waits for nothing.
                false => 3.0 * keys + 4e-3,
                true => keys + 2.0 * (keys + gradients) + gradients + gradients,
            };
            assert!((found.ring.seconds - want).abs() < 1e-9, "{} {want}", found.ring.seconds);
            assert_eq!((found.ring.kernel_seconds, found.one_seconds), (15e-3, 60e-3));
            assert!((found.ulysses.unwrap().kernel_seconds - 15e-3).abs() < 1e-12);
        }
    }

    #[test]
    fn what_ranks_do_not_divide_is_refused() {
        let builder = Problem::builder().head_dim(64).dtype(DType::Bf16);
        let problem = RankProblem {
            builder,
            sizes: [1, 1024],
            heads: [6, 2],
            causal: true,
            backward: false,
            ranks: 4,
            steps: None,
        };
        let found = explain_ranks(&problem, Link::NVLINK, Target::HOPPER, &Tables::default()).unwrap();
        assert_eq!(found.ulysses.unwrap_err(), "6 query heads, allowed: a multiple of 4 ranks");
        let odd = RankProblem { sizes: [1, 1001], ..problem.clone() };
        assert!(explain_ranks(&odd, Link::NVLINK, Target::HOPPER, &Tables::default()).is_err());
        assert!(
            explain_ranks(&RankProblem { ranks: 0, ..problem }, Link::NVLINK, Target::HOPPER, &Tables::default())
                .is_err()
        );
    }
}
