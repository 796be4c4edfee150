//! INT8 with one scale per set of rows, and INT4 or INT2 per channel on top of it (TurboAttention's storage).

use super::{FormatError, check};

/// The rows that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Granularity {
    /// Blocks of this many rows share a scale.
    Block(usize),
    /// Each row has its own scale.
    Token,
    /// Queries share a scale by the thread of a matrix instruction that holds them: in each 32 rows, those equal modulo
    /// 8.
    ThreadQuery,
    /// Keys share a scale by thread: in each 64 rows, the pairs 8u + 2t and 8u + 2t + 1 for each t of 0 to 3.
    ThreadKey,
}

impl Granularity {
    /// Index of the scale of a row.
    pub fn scale_of(self, row: usize) -> usize {
        match self {
            Granularity::Block(rows) => row / rows,
            Granularity::Token => row,
            Granularity::ThreadQuery => row / 32 * 8 + row % 8,
            Granularity::ThreadKey => row / 64 * 4 + row % 8 / 2,
        }
    }

    /// Number of scales of `rows` rows.
    pub fn scales(self, rows: usize) -> usize {
        match self {
            Granularity::Block(block) => rows.div_ceil(block),
            Granularity::Token => rows,
            Granularity::ThreadQuery => rows.div_ceil(32) * 8,
            Granularity::ThreadKey => rows.div_ceil(64) * 4,
        }
    }
}

/// A matrix in INT8: x = code * scale.
///
/// ```
/// use fulgurite_core::format::{Granularity, Int8};
/// let x = Int8::new(&[1.0, -2.0, 0.5, 0.25], 2, 2, Granularity::Token, 127)?;
/// assert_eq!(x.codes(), [64, -127, 127, 64]);
/// # Ok::<(), fulgurite_core::format::FormatError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Int8 {
    rows: usize,
    cols: usize,
    granularity: Granularity,
    codes: Vec<i8>,
    scales: Vec<f32>,
}

impl Int8 {
    /// The largest code if INT4 or INT2 follows: their rounding then stays within 127.
    pub const PROTECTED: i8 = 119;

    /// Quantises `rows` rows of `cols` elements to codes of at most `largest`, ties to even.
    pub fn new(
        data: &[f32],
        rows: usize,
        cols: usize,
        granularity: Granularity,
        largest: i8,
    ) -> Result<Int8, FormatError> {
        if granularity == Granularity::Block(0) {
            return Err(FormatError::Block { got: 0 });
        }
        check(data, rows, cols)?;
        let mut sizes = vec![0.0f32; granularity.scales(rows)];
        for (row, x) in data.chunks_exact(cols.max(1)).enumerate() {
            let size = &mut sizes[granularity.scale_of(row)];
            *size = x.iter().fold(*size, |m, x| m.max(x.abs()));
        }
        let scales: Vec<f32> = sizes.into_iter().map(|size| size / f32::from(largest)).collect();
        let mut codes = Vec::with_capacity(data.len());
        for (row, x) in data.chunks_exact(cols.max(1)).enumerate() {
            let scale = scales[granularity.scale_of(row)];
            codes.extend(x.iter().map(|&x| quantise(x, scale, largest)));
        }
        Ok(Int8 { rows, cols, granularity, codes, scales })
    }

    /// The values of the codes.
    pub fn decode(&self) -> Vec<f32> {
        let scale = |i: usize| self.scales[self.granularity.scale_of(i / self.cols)];
        self.codes.iter().enumerate().map(|(i, &code)| f32::from(code) * scale(i)).collect()
    }

    /// Number of rows, and elements per row.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }
    /// Codes, row-major.
    pub fn codes(&self) -> &[i8] {
        &self.codes
    }
    /// Scales, indexed by [`Granularity::scale_of`].
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }
}

/// The code of x, at most `largest` in magnitude, ties to even; 0 if the scale is 0.
#[inline]
pub fn quantise(x: f32, scale: f32, largest: i8) -> i8 {
    // Adding and subtracting this number rounds to an integer. Every vector unit can do that, but not every one can
    // round.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    let most = f32::from(largest);
    let y = if scale == 0.0 { 0.0 } else { (x / scale).clamp(-most, most) };
    (((y + ROUND) - ROUND) as i32) as i8
}

/// Bits per code of the second stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bits {
    /// Two bits: values 0 to 3.
    Two = 2,
    /// Four bits: values 0 to 15.
    Four = 4,
}

impl Bits {
    /// Number of bits.
    pub const fn count(self) -> usize {
        self as usize
    }
    /// The largest code.
    pub const fn largest(self) -> i32 {
        (1 << self as i32) - 1
    }
    /// Codes per byte.
    pub const fn per_byte(self) -> usize {
        8 / self as usize
    }
}

/// A tile of INT8 codes `[tokens, channels]` in INT4 or INT2, with an integer step and zero per channel.
///
/// The codes of a token's neighbouring channels share a byte: token after token, the first channel in the lowest bits.
///
/// ```
/// use fulgurite_core::format::{Bits, Stage2};
/// let codes: Vec<i8> = vec![-119, 0, 10, 5, 119, 7, -3, 2];
/// let packed = Stage2::new(&codes, 4, 2, Bits::Four);
/// let mut back = vec![0; 8];
/// packed.expand(&mut back);
/// assert!(codes.iter().zip(&back).all(|(a, b)| (i32::from(*a) - i32::from(*b)).abs() <= 8));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage2 {
    /// Bits per code.
    pub bits: Bits,
    /// Number of rows.
    pub tokens: usize,
    /// Codes per row.
    pub channels: usize,
    /// Packed codes, rows of whole bytes.
    pub codes: Vec<u8>,
    /// Step of each channel, 1 to 85.
    pub steps: Vec<i8>,
    /// Value of code 0 of each channel: the smallest code, or lower, so that step * the largest code + zero is at most
    /// 127.
    pub zeros: Vec<i8>,
}

impl Stage2 {
    /// Packs a tile. Panics if there are not `tokens * channels` codes.
    pub fn new(codes: &[i8], tokens: usize, channels: usize, bits: Bits) -> Stage2 {
        assert_eq!(codes.len(), tokens * channels, "codes of the tile");
        let column = |c: usize| codes.iter().skip(c).step_by(channels.max(1)).map(|&x| i32::from(x));
        let mut packed = Stage2 {
            bits,
            tokens,
            channels,
            codes: vec![0; tokens * Stage2::row_bytes(channels, bits)],
            steps: Vec::with_capacity(channels),
            zeros: Vec::with_capacity(channels),
        };
        for c in 0..channels {
            let (lo, hi) = (column(c).min().unwrap_or(0), column(c).max().unwrap_or(0));
            let step = ((hi - lo + bits.largest() - 1) / bits.largest()).max(1);
            packed.steps.push(step as i8);
            packed.zeros.push(lo.min(127 - step * bits.largest()) as i8);
        }
        let (row, per) = (Stage2::row_bytes(channels, bits), bits.per_byte());
        for (i, &code) in codes.iter().enumerate() {
            let (token, c) = (i / channels, i % channels);
            let (step, above) = (i32::from(packed.steps[c]), i32::from(code) - i32::from(packed.zeros[c]));
            // Ties to even. If all halves rounded up, the mean of every channel with an even step would shift by part
            // of a step; over many tokens that outweighs the rounding itself. Never exceed the last code.
            let (whole, rest) = (above / step, 2 * (above % step));
            let small = whole + i32::from(rest > step || rest == step && whole % 2 == 1);
            packed.codes[token * row + c / per] |= (small as u8) << (c % per * bits.count());
        }
        packed
    }

    /// Bytes per row of codes.
    pub const fn row_bytes(channels: usize, bits: Bits) -> usize {
        channels.div_ceil(bits.per_byte())
    }

    /// The INT8 codes that this represents, computed in integers: step * code + zero. Panics if `out` is too small.
    pub fn expand(&self, out: &mut [i8]) {
        let (row, per) = (Stage2::row_bytes(self.channels, self.bits), self.bits.per_byte());
        for (token, out) in out.chunks_exact_mut(self.channels.max(1)).take(self.tokens).enumerate() {
            for (c, out) in out.iter_mut().enumerate() {
                let small =
                    i32::from(self.codes[token * row + c / per] >> (c % per * self.bits.count())) & self.bits.largest();
                *out = (small * i32::from(self.steps[c]) + i32::from(self.zeros[c])) as i8;
            }
        }
    }

    /// Bytes of codes, steps and zeros.
    pub fn size_bytes(&self) -> usize {
        self.codes.len() + self.steps.len() + self.zeros.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    #[test]
    fn codes_are_within_half_a_step() {
        let mut rng = Rng::new(6);
        for granularity in [
            Granularity::Block(64),
            Granularity::Block(7),
            Granularity::Token,
            Granularity::ThreadQuery,
            Granularity::ThreadKey,
        ] {
            let (rows, cols) = (rng.range(1..150), rng.range(1..40));
            let x: Vec<f32> = rng.normals(rows * cols, 2.0).into_iter().map(|x| x as f32).collect();
            for largest in [127, Int8::PROTECTED] {
                let coded = Int8::new(&x, rows, cols, granularity, largest).unwrap();
                assert!(coded.codes().iter().all(|c| c.unsigned_abs() <= largest as u8));
                for (i, (x, y)) in x.iter().zip(coded.decode()).enumerate() {
                    let scale = coded.scales()[granularity.scale_of(i / cols)];
                    assert!((x - y).abs() <= 0.5001 * scale, "{granularity:?} at {i}: {y} for {x}, scale {scale}");
                }
            }
        }
        let zeros = Int8::new(&[0.0; 12], 3, 4, Granularity::Block(2), 127).unwrap();
        assert_eq!(zeros.decode(), [0.0; 12]);
    }

    #[test]
    fn thread_groups_are_those_of_the_matrix_instruction() {
        let of = |g: Granularity, scale, rows| (0..rows).filter(|&r| g.scale_of(r) == scale).collect::<Vec<usize>>();
        assert_eq!(of(Granularity::ThreadQuery, 3, 32), [3, 11, 19, 27]);
        assert_eq!(of(Granularity::ThreadKey, 1, 32), [2, 3, 10, 11, 18, 19, 26, 27]);
        assert_eq!(of(Granularity::ThreadKey, 4, 96), [64, 65, 72, 73, 80, 81, 88, 89]);
    }

    #[test]
    fn the_second_stage_is_within_half_a_step_and_needs_no_clamp_at_four_bits() {
        let mut rng = Rng::new(7);
        for bits in [Bits::Two, Bits::Four] {
            for _ in 0..200 {
                let (tokens, channels) = (rng.range(1..80), rng.range(1..20));
                let wide = rng.range(1..120) as f64;
                let codes: Vec<i8> =
                    (0..tokens * channels).map(|_| ((rng.uniform() * 2.0 - 1.0) * wide) as i8).collect();
                let packed = Stage2::new(&codes, tokens, channels, bits);
                let mut back = vec![0i8; codes.len()];
                packed.expand(&mut back);
                for (i, (&a, &b)) in codes.iter().zip(&back).enumerate() {
                    let step = i32::from(packed.steps[i % channels]);
                    let off = (i32::from(a) - i32::from(b)).abs();
                    assert!(2 * off <= step + 1, "{bits:?}: {b} for {a}, step {step}");
                }
            }
        }
        // Two bits: from -119 to 119 the step is 80, and the last value -119 + 3 * 80 = 121.
        let packed = Stage2::new(&[-119, 119, 40], 3, 1, Bits::Two);
        assert_eq!((packed.steps[0], packed.zeros[0]), (80, -119));
        let mut back = [0; 3];
        packed.expand(&mut back);
        assert_eq!(back, [-119, 121, 41]);
        // From -127 to 127 the last value would be 128, so the zero is lowered.
        for (bits, step) in [(Bits::Two, 85), (Bits::Four, 17)] {
            let packed = Stage2::new(&[-127, 127], 2, 1, bits);
            assert_eq!((packed.steps[0], packed.zeros[0]), (step, -128));
            packed.expand(&mut back[..2]);
            assert_eq!(back[..2], [-128, 127]);
        }
    }

    #[test]
    fn halves_of_a_step_leave_the_mean_where_it_was() {
        // 0 to 150 in steps of 10: ten thousand codes, with every remainder equally often.
        let codes: Vec<i8> = (0..151).cycle().take(151 * 66).map(|x| (x - 75) as i8).collect();
        let packed = Stage2::new(&codes, codes.len(), 1, Bits::Four);
        assert_eq!(packed.steps[0], 10);
        let mut back = vec![0; codes.len()];
        packed.expand(&mut back);
        let off: i32 = codes.iter().zip(&back).map(|(&a, &b)| i32::from(b) - i32::from(a)).sum();
        assert!(off.abs() <= 66 * 5, "{off} over {} codes", codes.len());
    }

    #[test]
    fn bad_input_is_told() {
        let found = Int8::new(&[1.0, f32::NAN], 1, 2, Granularity::Token, 127).unwrap_err();
        assert!(found.to_string().starts_with("element 1 is NaN, allowed: finite numbers"), "{found}");
        assert_eq!(Int8::new(&[], 0, 2, Granularity::Block(0), 127).unwrap_err(), FormatError::Block { got: 0 });
    }
}
