//! A small seeded generator for tests, checks and benchmarks, with equal bits on every machine.

use std::ops::Range;

/// xoshiro256++ (Blackman and Vigna), seeded by splitmix64. Not suitable for cryptography.
///
/// ```
/// use fulgurite_core::random::Rng;
/// let (mut a, mut b) = (Rng::new(7), Rng::new(7));
/// assert_eq!(a.normal(), b.normal());
/// assert!((3..9).contains(&a.range(3..9)));
/// ```
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// A generator with the sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        let mut x = seed;
        // splitmix64 spreads neighbouring seeds over the whole state, which must not be all zero.
        let state = std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Rng { state }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Mean 0, variance 1, never beyond 6: a sum of uniforms, because a logarithm differs between machines.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }

    /// Uniform in a range of integers. Panics if it is empty.
    pub fn range(&mut self, range: Range<usize>) -> usize {
        assert!(!range.is_empty(), "range {range:?} is empty");
        let n = (range.end - range.start) as u128;
        // The bias of the high half of a product is below n / 2^64.
        range.start + ((u128::from(self.bits()) * n) >> 64) as usize
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform() < p
    }

    /// One of the choices. Panics if there are none.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.range(0..choices.len())]
    }

    /// `n` normal numbers times `sigma`.
    pub fn normals(&mut self, n: usize, sigma: f64) -> Vec<f64> {
        (0..n).map(|_| self.normal() * sigma).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_and_bounds() {
        let mut rng = Rng::new(1);
        let n = 100_000;
        let (mut mean, mut square, mut low) = (0.0, 0.0, [0usize; 5]);
        for _ in 0..n {
            let x = rng.normal();
            mean += x / n as f64;
            square += x * x / n as f64;
            low[rng.range(2..7) - 2] += 1;
        }
        assert!(mean.abs() < 0.02 && (square - 1.0).abs() < 0.02, "{mean} {square}");
        assert!(low.iter().all(|&c| c.abs_diff(n / 5) < n / 50), "{low:?}");
        assert!((0..1000).all(|_| (0.0..1.0).contains(&rng.uniform())));
    }

    #[test]
    fn the_sequence_never_changes() {
        let mut rng = Rng::new(0);
        // Published first outputs of xoshiro256++ with the state of splitmix64(0).
        assert_eq!([rng.bits(), rng.bits()], [0x5317_5d61_490b_23df, 0x61da_6f3d_c380_d507]);
        assert_ne!(Rng::new(1).bits(), Rng::new(2).bits());
    }
}
