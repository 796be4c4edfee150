//! The number formats of the two products of attention.

use crate::format::integer::quantise;
use crate::format::{FormatError, Granularity, GroupFormat, Int8};
use thiserror::Error;

/// The number formats of the products. The meaning of a quantised problem is defined in f64 on the quantised values:
/// the oracle and every engine make the same codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Precision {
    /// The type of the tensors, with f32 sums.
    #[default]
    Native,
    /// 8-bit integers, with 32-bit sums.
    Int8(Int8Attention),
    /// Minifloats in groups, as in quantisation-aware training: values are rounded to the formats, and the products are
    /// those of the rounded values. Gradients pass the rounding unchanged.
    Groups(GroupAttention),
}

/// INT8 attention (TurboAttention, SageAttention): Q, K, V and the weights are quantised.
///
/// Keys are processed in blocks, in ascending order. In each block the running maximum m of a row is raised to that of
/// the block, and P = e^(s - m) becomes round(127 P). V has one scale per block. The sum of P is that of exact weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int8Attention {
    /// The queries that share a scale.
    pub q: Granularity,
    /// The keys that share a scale.
    pub k: Granularity,
    /// Keys per block: a multiple of 64 up to 512.
    pub block: usize,
    /// Whether the mean over tokens is subtracted from K first. It shifts all scores of a row equally, so it is added
    /// back to the scores in full precision: softmax does not change, but the LSE and score modifiers see it.
    pub smooth_k: bool,
}

impl Default for Int8Attention {
    fn default() -> Self {
        Int8Attention { q: Granularity::Block(64), k: Granularity::Block(64), block: 64, smooth_k: true }
    }
}

/// Attention on minifloats (Attn-QAT). Groups of Q and K run along the head dimension; those of V and of the weights
/// run along the keys, counted from the first key of the sequence. Weights are e^(s - m) with the final maximum of the
/// row, rounded, and divided by the exact sum afterwards, so no code depends on the order of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupAttention {
    /// Format of Q and K; `None` leaves them unchanged.
    pub qk: Option<GroupFormat>,
    /// Format of the weights and V; `None` leaves them unchanged.
    pub pv: Option<GroupFormat>,
    /// The output from which backward computes D = sum(dO O).
    pub delta: Delta,
}

/// The output in D of the softmax gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Delta {
    /// The output of exact weights on rounded values: rows of dS sum to 0.
    #[default]
    Exact,
    /// The output of rounded weights, as forward returns it. Rows of dS do not sum to 0; for comparison only.
    Rounded,
}

/// The reason why a precision was rejected.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PrecisionError {
    /// An invalid block size.
    #[error("`precision`: a block of {got} keys, allowed: multiples of 64 up to 512; 64 is TurboAttention's")]
    Block {
        /// The number given.
        got: usize,
    },
    /// A scale for blocks of 0 rows.
    #[error("`precision`: scales for blocks of 0 rows, allowed: at least 1")]
    Rows,
    /// INT8 together with a block mask.
    #[error("`precision`: int8 walks all blocks of keys in order, but a block mask lists some; use a mask, or native")]
    BlockMask,
    /// An unknown name.
    #[error(
        "`precision` is {got:?}, allowed: native, int8, int8:BLOCK, FORMAT or QK/PV with formats nvfp4, mxfp4, mxfp8, native"
    )]
    Name {
        /// The text given.
        got: String,
    },
}

impl Precision {
    /// NVFP4 for all four operands.
    pub const NVFP4: Precision = Precision::groups(Some(GroupFormat::NVFP4), Some(GroupFormat::NVFP4));

    /// Groups with a format for Q and K, and one for P and V.
    pub const fn groups(qk: Option<GroupFormat>, pv: Option<GroupFormat>) -> Precision {
        Precision::Groups(GroupAttention { qk, pv, delta: Delta::Exact })
    }

    /// Checks the parameters of the precision.
    pub fn check(self) -> Result<Precision, PrecisionError> {
        if let Precision::Int8(spec) = self {
            if spec.block == 0 || spec.block > 512 || !spec.block.is_multiple_of(64) {
                return Err(PrecisionError::Block { got: spec.block });
            }
            if [spec.q, spec.k].contains(&Granularity::Block(0)) {
                return Err(PrecisionError::Rows);
            }
        }
        Ok(self)
    }
}

impl std::str::FromStr for Precision {
    type Err = PrecisionError;

    /// Parses `native`, `int8`, `int8:256`, `nvfp4`, `mxfp4`, `mxfp8`, `nvfp4/native`, `nvfp4/mxfp8`.
    fn from_str(text: &str) -> Result<Precision, PrecisionError> {
        let bad = || PrecisionError::Name { got: text.into() };
        let format = |name: &str| match name {
            "native" => Ok(None),
            // The second level needs a whole tensor, and the weights never exist as one.
            "nvfp4x2" => Err(bad()),
            _ => name.parse::<GroupFormat>().map(Some).map_err(|_: FormatError| bad()),
        };
        match text.split_once(['/', ':']) {
            None if text == "native" => Ok(Precision::Native),
            None if text == "int8" => Ok(Precision::Int8(Int8Attention::default())),
            None => Ok(Precision::groups(format(text)?, format(text)?)),
            Some(("int8", block)) if text.contains(':') => {
                let block = block.parse().map_err(|_| bad())?;
                Precision::Int8(Int8Attention { block, ..Int8Attention::default() }).check()
            }
            Some((qk, pv)) if text.contains('/') => Ok(Precision::groups(format(qk)?, format(pv)?)),
            Some(_) => Err(bad()),
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |format: Option<GroupFormat>| format.map_or("native", GroupFormat::name);
        match self {
            Precision::Native => f.write_str("native"),
            Precision::Int8(spec) => write!(f, "int8:{}", spec.block),
            Precision::Groups(spec) if spec.qk == spec.pv => f.write_str(name(spec.qk)),
            Precision::Groups(spec) => write!(f, "{}/{}", name(spec.qk), name(spec.pv)),
        }
    }
}

/// Tokens of a packed cache that share a running maximum: parts are computed separately and merged.
pub const CACHE_PART: usize = 2048;

impl Int8Attention {
    /// The precision of queries and weights in attention over a packed cache. Keys and values are those that the cache
    /// holds.
    pub const CACHE: Int8Attention =
        Int8Attention { q: Granularity::Token, k: Granularity::Token, block: 64, smooth_k: false };
}

/// Largest code of K, Q, V and P in [`Int8Attention`].
pub const INT8_LARGEST: i8 = 127;

impl Int8Attention {
    /// The mean of each of `dim` channels over the rows of K, summed in f64 in row order; zeros without smoothing.
    pub fn mean(&self, k: &[f32], dim: usize) -> Vec<f32> {
        let mut sums = vec![0.0f64; dim];
        if self.smooth_k {
            for row in k.chunks_exact(dim) {
                sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
            }
        }
        let rows = (k.len() / dim).max(1) as f64;
        sums.into_iter().map(|sum| (sum / rows) as f32).collect()
    }

    /// Codes of the keys of one head (after subtracting `mean`) with their scales. The elements were checked to be
    /// finite.
    pub fn keys(&self, k: &[f32], dim: usize, mean: &[f32]) -> Int8 {
        let smooth: Vec<f32> = k.chunks_exact(dim).flat_map(|row| row.iter().zip(mean).map(|(x, m)| x - m)).collect();
        Self::codes(&smooth, dim, self.k)
    }

    /// Codes of the queries of one head.
    pub fn queries(&self, q: &[f32], dim: usize) -> Int8 {
        Self::codes(q, dim, self.q)
    }

    /// Codes of the values of one head, with one scale per block.
    pub fn values(&self, v: &[f32], dim: usize) -> Int8 {
        Self::codes(v, dim, Granularity::Block(self.block))
    }

    fn codes(x: &[f32], dim: usize, granularity: Granularity) -> Int8 {
        // Differences from the mean of finite numbers may overflow: such elements become the largest code.
        let over = x.iter().any(|x| !x.is_finite());
        let finite: Vec<f32> = if over { x.iter().map(|x| x.clamp(f32::MIN, f32::MAX)).collect() } else { Vec::new() };
        Int8::new(if over { &finite } else { x }, x.len() / dim, dim, granularity, INT8_LARGEST)
            .expect("bug in fulgurite: checked elements")
    }

    /// The code of a weight between 0 and 1.
    pub fn weight(p: f32) -> i8 {
        quantise(p, 1.0 / f32::from(INT8_LARGEST), INT8_LARGEST)
    }
}

impl GroupFormat {
    /// Replaces `[rows, cols]` by the values of codes whose groups run along columns: in every column, the first 16 (or
    /// 32) rows share a scale, then the next ones.
    pub fn fake_columns(self, x: &mut [f32], cols: usize) {
        let mut group = [0.0f32; 32];
        for block in x.chunks_mut(self.group() * cols.max(1)) {
            let rows = block.len() / cols.max(1);
            for c in 0..cols {
                (0..rows).for_each(|r| group[r] = block[r * cols + c]);
                self.fake_group(&mut group[..rows]);
                (0..rows).for_each(|r| block[r * cols + c] = group[r]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for text in ["native", "int8:64", "int8:256", "nvfp4", "mxfp8", "nvfp4/native", "mxfp4/mxfp8"] {
            assert_eq!(text.parse::<Precision>().unwrap().to_string(), text);
        }
        assert_eq!("int8".parse::<Precision>().unwrap().to_string(), "int8:64");
        for text in ["", "int9", "int8:", "int8:x", "nvfp4/", "nvfp4x2", "int8/nvfp4", "a:b"] {
            let found = text.parse::<Precision>().unwrap_err().to_string();
            assert!(found.starts_with("`precision` is"), "{found}");
        }
        for text in ["int8:63", "int8:0", "int8:1024"] {
            assert!(text.parse::<Precision>().unwrap_err().to_string().contains("multiples of 64 up to 512"));
        }
    }

    #[test]
    fn columns_are_turned_rows() {
        let (rows, cols) = (37, 5);
        let x: Vec<f32> = crate::random::Rng::new(1).normals(rows * cols, 1.0).into_iter().map(|x| x as f32).collect();
        for format in [GroupFormat::NVFP4, GroupFormat::Mxfp4, GroupFormat::Mxfp8] {
            let mut own = x.clone();
            format.fake_columns(&mut own, cols);
            let mut turned: Vec<f32> = (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect();
            format.fake_rows(&mut turned, rows);
            assert!((0..rows * cols).all(|i| own[i] == turned[i % cols * rows + i / cols]), "{format}");
        }
    }
}
