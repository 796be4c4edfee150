//! A cache as named byte arrays, for files, and back from untrusted data.

use super::side::Side;
use super::{CacheError, CacheSpec, Floats, KvCache, Storage, Store, TILE, floats};
use crate::simd::packed::Axis;
use fulgurite_core::format::{Bits, Stage2};
use fulgurite_core::{DType, bf16, f16};
use std::collections::BTreeMap;

/// The contents of a cache file: a few words, and named byte arrays (little-endian numbers).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheParts {
    /// Sizes and version, as text.
    pub words: BTreeMap<String, String>,
    /// Arrays.
    pub arrays: BTreeMap<String, Vec<u8>>,
}

/// Version of the layout below.
const VERSION: usize = 1;

fn bad(text: impl Into<String>) -> CacheError {
    CacheError::File(text.into())
}

impl KvCache {
    /// The cache as arrays.
    pub fn to_parts(&self) -> CacheParts {
        let mut parts = CacheParts::default();
        let spec = &self.spec;
        let storage = match &spec.storage {
            Storage::Float(dtype) => dtype.name().to_string(),
            Storage::Packed { .. } => "packed".into(),
        };
        let sizes =
            [spec.heads, spec.head_dim, spec.value_dim, spec.capacity, self.len, VERSION].map(|n| n.to_string());
        let names = ["heads", "head_dim", "value_dim", "capacity", "len", "version"];
        parts.words = names.into_iter().map(String::from).zip(sizes).collect();
        parts.words.insert("format".into(), "fulgurite cache".into());
        parts.words.insert("storage".into(), storage);
        let floats = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        match &self.store {
            Store::Float { k, v } => {
                let bytes = |x: &Floats| floats!(x, x => x.iter().flat_map(|v| v.to_le_bytes()).collect());
                parts.arrays.insert("k".into(), bytes(k));
                parts.arrays.insert("v".into(), bytes(v));
            }
            Store::Packed(heads) => {
                for (h, sides) in heads.iter().enumerate() {
                    for (name, side) in ["k", "v"].into_iter().zip(sides) {
                        let mut put =
                            |what: &str, bytes: Vec<u8>| parts.arrays.insert(format!("{name}.{h}.{what}"), bytes);
                        let tiles: Vec<Stage2> = (0..side.tiles()).map(|number| side.stage(number)).collect();
                        let all = |f: fn(&Stage2) -> Vec<u8>| tiles.iter().flat_map(f).collect::<Vec<u8>>();
                        put("bits", vec![side.panel.bits.count() as u8]);
                        put("codes", all(|t| t.codes.clone()));
                        put("steps", all(|t| t.steps.iter().map(|&x| x as u8).collect()));
                        put("zeros", all(|t| t.zeros.iter().map(|&x| x as u8).collect()));
                        let scales: Vec<f32> = side.scales.iter().copied().chain([side.scale]).collect();
                        put("scales", floats(&scales));
                        put("tail", side.tail.iter().map(|&x| x as u8).collect());
                    }
                }
            }
        }
        parts
    }

    /// The cache that the arrays describe. Any contents give a cache or an error.
    pub fn from_parts(parts: &CacheParts) -> Result<KvCache, CacheError> {
        let word = |name: &str| parts.words.get(name).ok_or_else(|| bad(format!("`{name}` is missing")));
        let number = |name: &str| {
            let text = word(name)?;
            text.parse::<usize>().map_err(|_| bad(format!("`{name}` is {text:?}, allowed: a number")))
        };
        if word("format")? != "fulgurite cache" {
            return Err(bad("it is something else; `fulgurite cache` reads what caches save"));
        }
        let version = number("version")?;
        if version != VERSION {
            return Err(bad(format!("version {version}, allowed: {VERSION}; use a newer fulgurite")));
        }
        let (heads, len) = (number("heads")?, number("len")?);
        let (head_dim, value_dim, capacity) = (number("head_dim")?, number("value_dim")?, number("capacity")?);
        let array = |name: &str| parts.arrays.get(name).ok_or_else(|| bad(format!("array `{name}` is missing")));
        // Sizes are checked before they are used: a file of a few bytes must not request memory.
        let limits = [("heads", heads, 1 << 16), ("head_dim", head_dim, 512), ("value_dim", value_dim, 512)];
        for (name, got, most) in limits.into_iter().chain([("capacity", capacity, 1 << 30)]) {
            if got == 0 || got > most {
                return Err(bad(format!("`{name}` is {got}, allowed: 1 to {most}")));
            }
        }
        if len > capacity {
            return Err(bad(format!("{len} tokens, allowed: {capacity}")));
        }
        let sized = |name: &str, want: usize| {
            let found = array(name)?;
            if found.len() == want {
                Ok(found)
            } else {
                Err(bad(format!("`{name}` has {} bytes, allowed: {want}", found.len())))
            }
        };
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let storage = word("storage")?.as_str();
        if let Some(dtype) = DType::FLOATS.into_iter().find(|d| d.name() == storage) {
            let read = |name: &str, dim: usize| {
                let bytes = sized(name, len * heads * dim * dtype.size_bytes())?;
                let two = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
                Ok(match dtype {
                    DType::F16 => Floats::F16(two.map(f16::from_le_bytes).collect()),
                    DType::Bf16 => Floats::Bf16(two.map(bf16::from_le_bytes).collect()),
                    _ => Floats::F32(floats(bytes)),
                })
            };
            let (k, v) = (read("k", head_dim)?, read("v", value_dim)?);
            let spec = CacheSpec { heads, head_dim, value_dim, capacity, storage: Storage::Float(dtype) };
            return Ok(KvCache { spec, len, store: Store::Float { k, v } });
        }
        if storage != "packed" {
            return Err(bad(format!("storage {storage:?}, allowed: packed, f32, f16, bf16")));
        }
        let (tiles, tail) = (len / TILE, len % TILE);
        let side = |axis: Axis, h: usize, dim: usize| -> Result<Side, CacheError> {
            let name = if axis == Axis::Keys { "k" } else { "v" };
            let at = |what: &str| format!("{name}.{h}.{what}");
            let bits = match sized(&at("bits"), 1)?[0] {
                2 => Bits::Two,
                4 => Bits::Four,
                got => return Err(bad(format!("`{}` is {got}, allowed: 2, 4", at("bits")))),
            };
            let row = Stage2::row_bytes(dim, bits);
            let codes = sized(&at("codes"), tiles * TILE * row)?;
            let (steps, zeros) = (sized(&at("steps"), tiles * dim)?, sized(&at("zeros"), tiles * dim)?);
            let scales = floats(sized(&at("scales"), (tiles + 1) * 4)?);
            if !scales.iter().all(|s| s.is_finite() && *s >= 0.0) || steps.iter().any(|&s| s as i8 <= 0) {
                return Err(bad(format!("scales or steps of `{name}.{h}` are not above 0")));
            }
            let signed = |bytes: &[u8]| bytes.iter().map(|&b| b as i8).collect::<Vec<i8>>();
            // Kernels compute step * code + zero without a range check.
            let ends = steps.iter().zip(zeros).map(|(&s, &z)| i32::from(s) * bits.largest() + i32::from(z as i8));
            if let Some(end) = ends.into_iter().find(|&end| end > 127) {
                return Err(bad(format!("`{}`: a channel ends at {end}, allowed: 127", at("steps"))));
            }
            let mut side = Side::new(axis, bits, dim);
            for t in 0..tiles {
                let (codes, dims) = (codes[t * TILE * row..(t + 1) * TILE * row].to_vec(), t * dim..(t + 1) * dim);
                let (steps, zeros) = (signed(&steps[dims.clone()]), signed(&zeros[dims]));
                side.push(scales[t], &Stage2 { bits, tokens: TILE, channels: dim, codes, steps, zeros });
            }
            (side.tail, side.scale) = (signed(sized(&at("tail"), tail * dim)?), scales[tiles]);
            Ok(side)
        };
        let both = |h: usize| Ok([side(Axis::Keys, h, head_dim)?, side(Axis::Values, h, value_dim)?]);
        let sides: Vec<[Side; 2]> = (0..heads).map(both).collect::<Result<_, CacheError>>()?;
        let bits = |i: usize| sides.iter().map(|s: &[Side; 2]| s[i].panel.bits).collect();
        let storage = Storage::Packed { k: bits(0), v: bits(1) };
        Ok(KvCache {
            spec: CacheSpec { heads, head_dim, value_dim, capacity, storage },
            len,
            store: Store::Packed(sides),
        })
    }
}
