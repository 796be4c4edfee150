//! A key/value cache that grows by tokens: in floating point, or in INT8 packed to INT4 or INT2 (TurboAttention's
//! progressive quantisation).
//!
//! Packed storage has tiles of [`TILE`] tokens. A tile of one head has an f32 scale for K and one for V (INT8, at most
//! 119), and for each channel an INT8 step and zero with codes of four or two bits. Tokens that do not fill a tile wait
//! in an INT8 tail with the scale of the previous tile; larger values are clamped. Attention over packed storage works
//! in integers: the cache is never expanded to floating point.

mod decode;
mod parts;
mod side;

pub use parts::CacheParts;

use crate::Options;
use crate::simd::packed::Axis;
use fulgurite_core::format::Bits;
use fulgurite_core::{DType, Element, Forward, Inputs, Mask, Problem, Tensor, TensorView, bf16, f16};
use side::Side;
use thiserror::Error;

/// Tokens per packed tile.
pub const TILE: usize = crate::simd::packed::TILE;

/// How a cache stores its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Storage {
    /// In floating point, rounded to this type.
    Float(DType),
    /// Packed, with bits of K and of V for each head.
    Packed {
        /// Bits of the keys of each key/value head.
        k: Vec<Bits>,
        /// Bits of the values of each key/value head.
        v: Vec<Bits>,
    },
}

/// Sizes of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheSpec {
    /// Key/value heads.
    pub heads: usize,
    /// Dimension of keys.
    pub head_dim: usize,
    /// Dimension of values.
    pub value_dim: usize,
    /// Largest number of tokens.
    pub capacity: usize,
    /// Storage of the tokens.
    pub storage: Storage,
}

/// The reason why a cache rejected a call; the cache is unchanged.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum CacheError {
    /// An invalid size.
    #[error("`{arg}` is {got}, allowed: {allowed}")]
    Size {
        /// Name of the size.
        arg: &'static str,
        /// Value that was given.
        got: String,
        /// Allowed values.
        allowed: String,
    },
    /// A tensor has the wrong shape.
    #[error("`{arg}` has shape {got:?}, allowed: {want:?}; check heads and dimensions of the cache")]
    Shape {
        /// Name of the tensor.
        arg: &'static str,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// Required shape; 0 stands for any size.
        want: Vec<usize>,
    },
    /// The tokens exceed the capacity.
    #[error(
        "{add} tokens more than the {len} in the cache, allowed: {capacity} in all; truncate it, or make a larger one"
    )]
    Capacity {
        /// Tokens in the cache.
        len: usize,
        /// Tokens to append.
        add: usize,
        /// Tokens that fit.
        capacity: usize,
    },
    /// An element is NaN or infinite.
    #[error("`{arg}`: element {at} is {value}, allowed: finite numbers; look for an overflow where it was made")]
    NotFinite {
        /// Name of the tensor.
        arg: &'static str,
        /// Index of the element.
        at: usize,
        /// Value that was given.
        value: f64,
    },
    /// The tokens to remove are not the last ones.
    #[error(
        "tokens {start}..{end} of {len}, allowed: a range that ends at {len}; a cache forgets its last tokens only"
    )]
    Middle {
        /// First token.
        start: usize,
        /// One past the last token.
        end: usize,
        /// Tokens in the cache.
        len: usize,
    },
    /// A file that is not a cache, or is damaged.
    #[error("not a cache this version reads: {0}")]
    File(String),
}

/// Rows of one type.
#[derive(Debug, Clone, PartialEq)]
enum Floats {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// Runs `$body` with `$x` bound to the vector.
macro_rules! floats {
    ($rows:expr, $x:ident => $body:expr) => {
        match $rows {
            Floats::F32($x) => $body,
            Floats::F16($x) => $body,
            Floats::Bf16($x) => $body,
        }
    };
}
use floats;

impl Floats {
    fn new(dtype: DType) -> Floats {
        match dtype {
            DType::F16 => Floats::F16(Vec::new()),
            DType::Bf16 => Floats::Bf16(Vec::new()),
            _ => Floats::F32(Vec::new()),
        }
    }
    fn extend(&mut self, values: &[f64]) {
        fn add<T: Element>(x: &mut Vec<T>, values: &[f64]) {
            x.extend(values.iter().map(|&v| T::from_f64(v)));
        }
        floats!(self, x => add(x, values));
    }
    fn truncate(&mut self, len: usize) {
        floats!(self, x => x.truncate(len));
    }
    fn size_bytes(&self) -> usize {
        floats!(self, x => std::mem::size_of_val(&x[..]))
    }
    fn row(&self, at: usize, n: usize) -> Vec<f32> {
        floats!(self, x => x[at..at + n].iter().map(|v| Element::to_f64(*v) as f32).collect())
    }
    fn view(&self, shape: &[usize]) -> TensorView<'_> {
        floats!(self, x => TensorView::new(x, shape)).expect("bug in fulgurite: its own rows")
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Store {
    /// `[token][head][dim]` in one type.
    Float { k: Floats, v: Floats },
    /// Keys and values of each head.
    Packed(Vec<[Side; 2]>),
}

/// Keys and values of one sequence.
///
/// ```
/// use fulgurite_cpu::cache::{CacheSpec, KvCache, Storage};
/// use fulgurite_core::{Tensor, format::Bits};
///
/// let storage = Storage::Packed { k: vec![Bits::Four; 2], v: vec![Bits::Four; 2] };
/// let spec = CacheSpec { heads: 2, head_dim: 8, value_dim: 8, capacity: 1000, storage };
/// let mut cache = KvCache::new(spec)?;
/// let x = Tensor::new((0..70 * 16).map(|i| (i as f32).sin()).collect::<Vec<f32>>(), &[70, 2, 8])?;
/// cache.append(&x.view(), &x.view())?;
/// let q = Tensor::new(vec![0.1f32; 4 * 8], &[1, 4, 8])?;
/// let (o, lse) = cache.attend(&q.view(), 0.35, &Default::default())?;
/// assert_eq!((&o.shape()[..], &lse.shape()[..]), (&[1, 4, 8][..], &[4, 1][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct KvCache {
    spec: CacheSpec,
    len: usize,
    store: Store,
}

impl KvCache {
    /// An empty cache.
    pub fn new(spec: CacheSpec) -> Result<KvCache, CacheError> {
        let sizes =
            [("heads", spec.heads, 1 << 16), ("head_dim", spec.head_dim, 512), ("value_dim", spec.value_dim, 512)];
        for (arg, got, most) in sizes.into_iter().chain([("capacity", spec.capacity, 1 << 30)]) {
            if got == 0 || got > most {
                return Err(CacheError::Size { arg, got: got.to_string(), allowed: format!("1 to {most}") });
            }
        }
        let store = match &spec.storage {
            Storage::Float(dtype) if dtype.is_float() => {
                Store::Float { k: Floats::new(*dtype), v: Floats::new(*dtype) }
            }
            Storage::Float(dtype) => {
                let allowed = "f32, f16, bf16".into();
                return Err(CacheError::Size { arg: "storage", got: dtype.to_string(), allowed });
            }
            Storage::Packed { k, v } => {
                for (arg, bits) in [("k bits", k), ("v bits", v)] {
                    if bits.len() != spec.heads {
                        let (got, allowed) = (format!("{} heads", bits.len()), format!("{}", spec.heads));
                        return Err(CacheError::Size { arg, got, allowed });
                    }
                }
                let side = |(k, v): (&Bits, &Bits)| {
                    [Side::new(Axis::Keys, *k, spec.head_dim), Side::new(Axis::Values, *v, spec.value_dim)]
                };
                Store::Packed(k.iter().zip(v).map(side).collect())
            }
        };
        Ok(KvCache { spec, len: 0, store })
    }

    /// Sizes and storage.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }
    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether the cache has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// An independent copy of the cache.
    pub fn fork(&self) -> KvCache {
        self.clone()
    }

    /// Size of the tokens in bytes, with scales, steps and zeros.
    pub fn size_bytes(&self) -> usize {
        match &self.store {
            Store::Float { k, v } => k.size_bytes() + v.size_bytes(),
            Store::Packed(heads) => heads.iter().flatten().map(Side::size_bytes).sum(),
        }
    }

    /// Bits per element, with scales, steps and zeros.
    pub fn bits_per_element(&self) -> f64 {
        let elements = self.len * self.spec.heads * (self.spec.head_dim + self.spec.value_dim);
        8.0 * self.size_bytes() as f64 / elements.max(1) as f64
    }

    /// Appends tokens: k `[tokens, heads, head_dim]`, v `[tokens, heads, value_dim]`.
    pub fn append(&mut self, k: &TensorView<'_>, v: &TensorView<'_>) -> Result<(), CacheError> {
        let tokens = k.shape().first().copied().unwrap_or(0);
        let heads = self.spec.heads;
        for (arg, view, dim) in [("k", k, self.spec.head_dim), ("v", v, self.spec.value_dim)] {
            if view.shape()[..] != [tokens, heads, dim] {
                return Err(CacheError::Shape { arg, got: view.shape().to_vec(), want: vec![tokens, heads, dim] });
            }
        }
        if tokens > self.spec.capacity - self.len {
            return Err(CacheError::Capacity { len: self.len, add: tokens, capacity: self.spec.capacity });
        }
        let (k_values, v_values) = (k.to_f64(), v.to_f64());
        if matches!(self.store, Store::Packed(_)) {
            for (arg, values) in [("k", &k_values), ("v", &v_values)] {
                if let Some(at) = values.iter().position(|x| !(*x as f32).is_finite()) {
                    return Err(CacheError::NotFinite { arg, at, value: values[at] });
                }
            }
        }
        match &mut self.store {
            Store::Float { k, v } => {
                k.extend(&k_values);
                v.extend(&v_values);
            }
            Store::Packed(sides) => {
                for (h, [own_k, own_v]) in sides.iter_mut().enumerate() {
                    for (side, values) in [(own_k, &k_values), (own_v, &v_values)] {
                        let dim = side.panel.dim;
                        let rows = (0..tokens).flat_map(|t| &values[(t * heads + h) * dim..][..dim]);
                        side.append(&rows.map(|&x| x as f32).collect::<Vec<f32>>());
                    }
                }
            }
        }
        self.len += tokens;
        Ok(())
    }

    /// Removes all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) -> Result<(), CacheError> {
        self.remove(len..self.len)
    }

    /// Removes tokens, which must be the last ones.
    pub fn remove(&mut self, tokens: std::ops::Range<usize>) -> Result<(), CacheError> {
        let std::ops::Range { start, end } = tokens;
        if start > end || end != self.len {
            return Err(CacheError::Middle { start, end, len: self.len });
        }
        match &mut self.store {
            Store::Float { k, v } => {
                k.truncate(start * self.spec.heads * self.spec.head_dim);
                v.truncate(start * self.spec.heads * self.spec.value_dim);
            }
            Store::Packed(sides) => sides.iter_mut().flatten().for_each(|side| side.truncate(start)),
        }
        self.len = start;
        Ok(())
    }

    /// The key and value of a token in one head; `None` past the end.
    pub fn get(&self, token: usize, head: usize) -> Option<[Vec<f32>; 2]> {
        if token >= self.len || head >= self.spec.heads {
            return None;
        }
        Some(match &self.store {
            Store::Float { k, v } => {
                let row = |x: &Floats, dim: usize| x.row((token * self.spec.heads + head) * dim, dim);
                [row(k, self.spec.head_dim), row(v, self.spec.value_dim)]
            }
            Store::Packed(sides) => [0, 1].map(|i| sides[head][i].decoded(token)),
        })
    }

    /// Computes attention of the last queries over the cache. q is `[queries, query heads, head_dim]`; its last row
    /// sees all tokens, and each earlier row one token fewer. Returns o `[queries, query heads, value_dim]` in the type
    /// of q, and the LSE `[query heads, queries]`.
    pub fn attend(&self, q: &TensorView<'_>, scale: f32, options: &Options) -> Result<(Tensor, Tensor), CacheError> {
        let (heads, dim) = (self.spec.heads, self.spec.head_dim);
        let shape = q.shape().to_vec();
        let fits = shape.len() == 3 && shape[2] == dim && shape[1] > 0 && shape[1].is_multiple_of(heads);
        if !fits || shape[0] > self.len {
            let want = vec![shape.first().copied().unwrap_or(1).min(self.len), heads, dim];
            return Err(CacheError::Shape { arg: "q", got: shape, want });
        }
        let bad = |e: &dyn std::fmt::Display| CacheError::Size {
            arg: "scale",
            got: scale.to_string(),
            allowed: format!("finite and above 0 ({e})"),
        };
        if !(scale.is_finite() && scale > 0.0) {
            return Err(bad(&"it is none"));
        }
        match &self.store {
            Store::Packed(sides) => decode::attend(sides, self.spec.value_dim, self.len, q, scale, options),
            Store::Float { k, v } => {
                let (len, value_dim) = (self.len, self.spec.value_dim);
                let (k, v) = (k.view(&[1, len, heads, dim]), v.view(&[1, len, heads, value_dim]));
                let dtype = k.dtype();
                let queries =
                    Tensor::from_f64(dtype, &q.to_f64(), &[1, shape[0], shape[1], dim]).map_err(|e| bad(&e))?;
                let builder =
                    Problem::builder().dense(1, shape[0], len).heads(shape[1], heads).head_dims(dim, value_dim);
                let problem = builder.dtype(dtype).scale(scale).mask(Mask::causal()).build().map_err(|e| bad(&e))?;
                let inputs = Inputs::new(queries.view(), k, v);
                let mut result = Forward::zeros(&problem).map_err(|e| bad(&e))?;
                crate::forward(&inputs.bind(&problem).map_err(|e| bad(&e))?, &mut result.outputs(), options);
                let o = Tensor::from_f64(q.dtype(), &result.o.view().to_f64(), &[shape[0], shape[1], value_dim]);
                let lse = Tensor::from_f64(DType::F32, &result.lse.view().to_f64(), &[shape[1], shape[0]]);
                Ok((o.map_err(|e| bad(&e))?, lse.map_err(|e| bad(&e))?))
            }
        }
    }
}

/// Chooses the heads with two bits: those of the lowest priority, which is the widest channel's range times the
/// standard deviation of the channels' ranges over calibration rows `[tokens, heads, dim]`. `two` heads get two bits.
pub fn choose_bits(rows: &[f32], heads: usize, dim: usize, two: usize) -> Vec<Bits> {
    let mut order: Vec<(f64, usize)> = (0..heads)
        .map(|h| {
            let range = |c: usize| {
                let column = rows.chunks_exact(heads * dim).map(|row| f64::from(row[h * dim + c]));
                let (lo, hi) = column.fold((f64::MAX, f64::MIN), |(lo, hi), x| (lo.min(x), hi.max(x)));
                (hi - lo).max(0.0)
            };
            let ranges: Vec<f64> = (0..dim).map(range).collect();
            let mean = ranges.iter().sum::<f64>() / dim as f64;
            let deviation = (ranges.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / dim as f64).sqrt();
            (ranges.iter().fold(0.0f64, |m, &r| m.max(r)) * deviation, h)
        })
        .collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut bits = vec![Bits::Four; heads];
    order.iter().take(two).for_each(|&(_, h)| bits[h] = Bits::Two);
    bits
}
