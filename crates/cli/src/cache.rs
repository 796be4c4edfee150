//! `fulgurite cache`: prints the contents of a saved cache of keys and values, or makes a cache from tensors.

use crate::args::CacheArgs;
use crate::io::{self, Stored, safetensors as tensors};
use crate::{Failure, json, say};
use fulgurite::Tensor;
use fulgurite::cache::{CacheParts, CacheSpec, KvCache, Storage, choose_bits};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// A cache as the bytes of a safetensors file: every array as bytes, the words as metadata.
///
/// ```
/// use fulgurite::{DType, cache::{CacheSpec, KvCache, Storage}};
/// use fulgurite_cli::cache::{decode, encode};
/// let spec = CacheSpec { heads: 1, head_dim: 2, value_dim: 2, capacity: 8, storage: Storage::Float(DType::Bf16) };
/// let cache = KvCache::new(spec)?;
/// let bytes = encode(&cache)?;
/// assert_eq!(decode(&bytes)?, cache);
/// assert!(decode(&bytes[..bytes.len() - 1]).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn encode(cache: &KvCache) -> Result<Vec<u8>, String> {
    let parts = cache.to_parts();
    let views: Result<Vec<_>, _> = parts
        .arrays
        .iter()
        .map(|(name, bytes)| Ok((name.as_str(), TensorView::new(Dtype::U8, vec![bytes.len()], bytes)?)))
        .collect();
    let words: HashMap<String, String> = parts.words.clone().into_iter().collect();
    let written = views.and_then(|views| safetensors::serialize(views, Some(words)));
    written.map_err(|e| format!("cannot write safetensors: {e}"))
}

/// The cache in the bytes of a file. Bytes that are no cache are an error.
pub fn decode(bytes: &[u8]) -> Result<KvCache, String> {
    let damaged = |e| format!("not a whole safetensors file ({e}); write it again, it may be cut off");
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let file = SafeTensors::deserialize(bytes).map_err(damaged)?;
    let words: BTreeMap<String, String> = header.metadata().clone().unwrap_or_default().into_iter().collect();
    let arrays = file.iter().map(|(name, view)| (name.to_string(), view.data().to_vec())).collect();
    KvCache::from_parts(&CacheParts { words, arrays }).map_err(|e| e.to_string())
}

/// Runs the command.
pub fn main(args: &CacheArgs) -> Result<(), Failure> {
    let name = args.input.display();
    let bytes = std::fs::read(&args.input).map_err(|e| Failure::input(format_args!("`{name}`: {e}")))?;
    let given = tensors::decode(&bytes).ok().and_then(|all| match (all.get("k"), all.get("v")) {
        (Some(Stored::Tensor(k)), Some(Stored::Tensor(v))) if k.shape().len() == 3 => Some((k.clone(), v.clone())),
        _ => None,
    });
    let cache = match &given {
        Some((k, v)) => pack(k, v, args.two_bit_heads)?,
        None => decode(&bytes).map_err(|e| Failure::input(format_args!("`{name}`: {e}")))?,
    };
    if let Some(output) = &args.output {
        let bytes = encode(&cache).map_err(Failure::work)?;
        io::write_file(output, &bytes)?;
    }
    let heads = heads(&cache, given.as_ref());
    if let Some(path) = &args.svg {
        io::write_file(path, picture(&heads).as_bytes())?;
    }
    if args.json { json::print(&Results::new(&cache, &heads)) } else { say(&describe(&cache, &heads)) }
}

/// The results of the command.
#[derive(Serialize)]
struct Results {
    version: &'static str,
    tokens: usize,
    capacity: usize,
    head_dim: usize,
    value_dim: usize,
    bytes: usize,
    bits_per_element: f64,
    heads: Vec<HeadResult>,
}

/// One head; each pair is k and v.
#[derive(Serialize)]
struct HeadResult {
    bits: [u32; 2],
    largest: [f32; 2],
    /// Relative errors in the norm, where the tensors are known.
    errors: Option<[f64; 2]>,
}

impl Results {
    fn new(cache: &KvCache, heads: &[Head]) -> Results {
        let spec = cache.spec();
        let head = |head: &Head| HeadResult { bits: head.bits, largest: head.largest, errors: head.errors };
        Results {
            version: env!("CARGO_PKG_VERSION"),
            tokens: cache.len(),
            capacity: spec.capacity,
            head_dim: spec.head_dim,
            value_dim: spec.value_dim,
            bytes: cache.size_bytes(),
            bits_per_element: cache.bits_per_element(),
            heads: heads.iter().map(head).collect(),
        }
    }
}

/// The contents of one head of a cache: of k, and of v.
struct Head {
    /// Bits of an element, without its scales.
    bits: [u32; 2],
    /// As words.
    kept: String,
    largest: [f32; 2],
    /// Relative errors in the norm, where the tensors are known.
    errors: Option<[f64; 2]>,
}

fn heads(cache: &KvCache, given: Option<&(Tensor, Tensor)>) -> Vec<Head> {
    let spec = cache.spec();
    let of = |head: usize| {
        let (bits, kept) = match &spec.storage {
            Storage::Float(dtype) => ([8 * dtype.size_bytes() as u32; 2], dtype.to_string()),
            Storage::Packed { k, v } => {
                let bits = [k[head].count(), v[head].count()].map(|n| n as u32);
                (bits, format!("k {} bits, v {} bits", bits[0], bits[1]))
            }
        };
        let rows: Vec<[Vec<f32>; 2]> = (0..cache.len()).filter_map(|t| cache.get(t, head)).collect();
        let largest = [0, 1].map(|i| rows.iter().flat_map(|r| &r[i]).fold(0.0f32, |m, x| m.max(x.abs())));
        let error = |i: usize, x: &Tensor| {
            let dim = x.shape()[2];
            let (mut off, mut all) = (0.0f64, 0.0f64);
            for (t, row) in rows.iter().enumerate() {
                for (c, &got) in row[i].iter().enumerate() {
                    let want = x.view().at((t * spec.heads + head) * dim + c);
                    off += (f64::from(got) - want).powi(2);
                    all += want * want;
                }
            }
            (off / all.max(1e-300)).sqrt()
        };
        let errors = given.map(|(k, v)| [error(0, k), error(1, v)]);
        Head { bits, kept, largest, errors }
    };
    (0..spec.heads).map(of).collect()
}

/// Tensors `[tokens, heads, dim]` packed; the heads that lose least get two bits.
fn pack(k: &Tensor, v: &Tensor, two: usize) -> Result<KvCache, Failure> {
    let [heads, head_dim] = [k.shape()[1], k.shape()[2]];
    let value_dim = v.shape().last().copied().unwrap_or(0);
    let values = |x: &Tensor| x.view().to_f64().into_iter().map(|x| x as f32).collect::<Vec<f32>>();
    if two > heads {
        return Err(Failure::input(format_args!("`two_bit_heads` is {two}, allowed: 0 to {heads}")));
    }
    // Sizes are looked at before bits are chosen, which takes memory and time for each head.
    let empty = Storage::Float(k.dtype());
    let spec = CacheSpec { heads, head_dim, value_dim, capacity: 1, storage: empty };
    if k.shape()[0] == 0 {
        return Err(Failure::input("`k` has no tokens, allowed: 1 or more; a cache of nothing needs no file"));
    }
    if v.shape().len() != 3 || v.shape()[..2] != k.shape()[..2] {
        let text = format_args!("`v` has shape {:?}, allowed: {:?} and a value dim", v.shape(), &k.shape()[..2]);
        return Err(Failure::input(text));
    }
    KvCache::new(spec).map_err(Failure::input)?;
    let storage = Storage::Packed {
        k: choose_bits(&values(k), heads, head_dim, two),
        v: choose_bits(&values(v), heads, value_dim, two),
    };
    let spec = CacheSpec { heads, head_dim, value_dim, capacity: k.shape()[0].max(1), storage };
    let mut cache = KvCache::new(spec).map_err(Failure::input)?;
    cache.append(&k.view(), &v.view()).map_err(Failure::input)?;
    Ok(cache)
}

/// Sizes, then a line for each head: bits, the range of its values, and the error where the tensors are known.
fn describe(cache: &KvCache, heads: &[Head]) -> String {
    let spec = cache.spec();
    let (bits, bytes) = (cache.bits_per_element(), cache.size_bytes());
    let mut text = format!(
        "{} of {} tokens, {} heads, dims {} and {}: {bytes} bytes, {bits:.3} bits an element, {:.2} times less than 16\n",
        cache.len(),
        spec.capacity,
        spec.heads,
        spec.head_dim,
        spec.value_dim,
        16.0 / bits
    );
    for (number, Head { kept, largest: [k, v], errors, .. }) in heads.iter().enumerate() {
        text += &format!("head {number:3}  {kept}  largest k {k:.3}, v {v:.3}");
        if let Some([k, v]) = errors.map(|errors| errors.map(|e| 100.0 * e)) {
            // Twenty strokes are an error of 20 %.
            text += &format!("  error k {k:4.1} % v {v:4.1} %  {}", "#".repeat((k.max(v) as usize).min(60)));
        }
        text.push('\n');
    }
    text
}

/// A pair of bars for each head, k in blue and v in orange: as high as the error, or as the largest element where no error is
/// known, and as dark as the bits are many.
fn picture(heads: &[Head]) -> String {
    let [wide, high_most, left, top_edge] = [14.0, 180.0, 64.0, 58.0];
    let known = heads.iter().all(|head| head.errors.is_some());
    let heights = |head: &Head| head.errors.unwrap_or(head.largest.map(f64::from));
    let most = heads.iter().flat_map(heights).filter(|x| x.is_finite()).fold(0.0, f64::max).max(1e-30);
    let (what, top) = match known {
        true => ("relative error", format!("{:.1} %", 100.0 * most)),
        false => ("largest element", format!("{most:.3}")),
    };
    // The title needs 430 units.
    let width = (left + 3.0 * wide * heads.len() as f64 + 2.0 * wide).max(430.0);
    let (base, height) = (top_edge + high_most, top_edge + high_most + 40.0);
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{what} by head" font-family="Helvetica, Arial, sans-serif" font-size="11"><rect width="{width}" height="{height}" fill="#ffffff"/><text x="8" y="18" font-size="14">{what} of k and v by head; numbers: bits of an element</text><rect x="8" y="26" width="10" height="10" fill="#4292c6"/><text x="22" y="35">k</text><rect x="38" y="26" width="10" height="10" fill="#f16913"/><text x="52" y="35">v</text><text x="8" y="{top_edge}">{top}</text><text x="8" y="{base}">0</text>"##
    );
    for (number, head) in heads.iter().enumerate() {
        let x = left + 3.0 * wide * number as f64;
        for (i, (value, bits)) in heights(head).into_iter().zip(head.bits).enumerate() {
            let high = high_most * if value.is_finite() { value / most } else { 1.0 };
            let (x, y) = (x + wide * i as f64, base - high);
            let shades = [["#9ecae1", "#4292c6", "#08519c"], ["#fdae6b", "#f16913", "#a63603"]][i];
            let color = match bits {
                ..=2 => shades[0],
                3..=4 => shades[1],
                _ => shades[2],
            };
            svg += &format!(r#"<rect x="{x}" y="{y:.1}" width="{wide}" height="{high:.1}" fill="{color}"/>"#);
            let middle = x + wide / 2.0;
            svg += &format!(r#"<text x="{middle}" y="{:.1}" text-anchor="middle">{bits}</text>"#, y - 3.0);
        }
        let middle = x + wide;
        svg += &format!(r#"<text x="{middle}" y="{}" text-anchor="middle">{number}</text>"#, base + 14.0);
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_for_each_side_of_each_head() {
        let head = |errors| Head { bits: [4, 2], kept: String::new(), largest: [1.0, f32::INFINITY], errors };
        let known = picture(&[head(Some([0.05, 0.1])), head(Some([0.2, 0.0]))]);
        assert_eq!(known.matches("<rect").count(), 3 + 4);
        assert!(known.contains("relative error") && known.contains("20.0 %") && known.contains("height=\"180.0\""));
        let unknown = picture(&[head(None)]);
        assert!(unknown.contains("largest element") && !unknown.contains("inf") && !unknown.contains("NaN"));
        assert!(picture(&[]).ends_with("</svg>\n"));
    }
}
