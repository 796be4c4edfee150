//! The cache: what it keeps, what it gives back, and what it refuses.

use fulgurite_core::format::Bits;
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Tensor};
use fulgurite_cpu::cache::{CacheError, CacheParts, CacheSpec, KvCache, Storage, choose_bits};
use fulgurite_cpu::{Isa, Options};

fn spec(heads: usize, dim: usize, storage: Storage) -> CacheSpec {
    CacheSpec { heads, head_dim: dim, value_dim: dim, capacity: 5000, storage }
}

fn packed(heads: usize, dim: usize, bits: Bits) -> KvCache {
    KvCache::new(spec(heads, dim, Storage::Packed { k: vec![bits; heads], v: vec![bits; heads] })).unwrap()
}

fn random(rng: &mut Rng, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    Tensor::from_f64(DType::F32, &rng.normals(n, 1.0), shape).unwrap()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Attention in f64 over what the cache says it holds, one query row that sees everything.
fn plain(cache: &KvCache, q: &Tensor, scale: f64) -> (Vec<f64>, Vec<f64>) {
    let (heads, dim) = (cache.spec().heads, cache.spec().head_dim);
    let q_heads = q.shape()[1];
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for h in 0..q_heads {
        let query = &q.view().to_f64()[h * dim..(h + 1) * dim];
        let rows: Vec<[Vec<f32>; 2]> = (0..cache.len()).map(|t| cache.get(t, h / (q_heads / heads)).unwrap()).collect();
        let s: Vec<f64> = rows
            .iter()
            .map(|[k, _]| scale * k.iter().zip(query).map(|(&k, q)| f64::from(k) * q).sum::<f64>())
            .collect();
        let max = s.iter().fold(f64::MIN, |m, &s| m.max(s));
        let sum: f64 = s.iter().map(|s| (s - max).exp()).sum();
        lse.push(max + sum.ln());
        for c in 0..cache.spec().value_dim {
            o.push(rows.iter().zip(&s).map(|([_, v], s)| f64::from(v[c]) * (s - max).exp() / sum).sum());
        }
    }
    (o, lse)
}

#[test]
fn decode_over_packed_tokens_is_attention_over_what_they_stand_for() {
    let mut rng = Rng::new(1);
    for (dim, heads, q_heads, tokens, bits) in [
        (128, 2, 8, 700, Bits::Four),
        (128, 1, 4, 64, Bits::Two),
        (40, 2, 2, 130, Bits::Four),
        (256, 1, 6, 63, Bits::Four),
    ] {
        let mut cache = packed(heads, dim, bits);
        let (k, v) = (random(&mut rng, &[tokens, heads, dim]), random(&mut rng, &[tokens, heads, dim]));
        cache.append(&k.view(), &v.view()).unwrap();
        let q = random(&mut rng, &[1, q_heads, dim]);
        let scale = 1.0 / (dim as f64).sqrt();
        let (want, want_lse) = plain(&cache, &q, scale);
        let mut all = Vec::new();
        for isa in [None, Some(Isa::Portable)] {
            for threads in [1, 2] {
                let options = Options { isa, threads: Some(threads), ..Options::default() };
                let (o, lse) = cache.attend(&q.view(), scale as f32, &options).unwrap();
                let found = cosine(&o.view().to_f64(), &want);
                // What is left is the rounding of the query and of the weights to eight bits.
                assert!(found > 0.999, "{dim} {bits:?}: cosine {found}");
                for (a, b) in lse.view().to_f64().iter().zip(&want_lse) {
                    assert!((a - b).abs() < 0.05, "LSE {a} for {b}");
                }
                all.push(o);
            }
        }
        assert!(all.iter().all(|o| *o == all[0]), "integers are the same on every machine and number of threads");
    }
}

#[test]
fn four_bits_are_not_far_from_exact_attention() {
    let mut rng = Rng::new(2);
    let (k, v) = (random(&mut rng, &[1024, 1, 128]), random(&mut rng, &[1024, 1, 128]));
    let q = random(&mut rng, &[1, 128, 128]);
    let mut exact = KvCache::new(spec(1, 128, Storage::Float(DType::F32))).unwrap();
    exact.append(&k.view(), &v.view()).unwrap();
    let want = exact.attend(&q.view(), 0.088, &Options::default()).unwrap().0.view().to_f64();
    let mut cache = packed(1, 128, Bits::Four);
    cache.append(&k.view(), &v.view()).unwrap();
    let found = cosine(&cache.attend(&q.view(), 0.088, &Options::default()).unwrap().0.view().to_f64(), &want);
    assert!(found > 0.99, "cosine {found}");
}

#[test]
fn sizes_are_those_promised() {
    let mut rng = Rng::new(3);
    let (k, v) = (random(&mut rng, &[4096, 2, 128]), random(&mut rng, &[4096, 2, 128]));
    let bits = |bits: [Bits; 2]| {
        let storage = Storage::Packed { k: bits.to_vec(), v: bits.to_vec() };
        let mut cache = KvCache::new(spec(2, 128, storage)).unwrap();
        cache.append(&k.view(), &v.view()).unwrap();
        cache.bits_per_element()
    };
    let (four, mixed) = (bits([Bits::Four; 2]), bits([Bits::Four, Bits::Two]));
    assert!(16.0 / four > 3.7 && 16.0 / mixed > 4.9, "{four} and {mixed} bits an element");
    assert!((mixed - 3.25).abs() < 0.01, "{mixed}");
}

#[test]
fn tokens_by_one_by_chunk_and_after_truncation_are_the_same() {
    let mut rng = Rng::new(4);
    let (k, v) = (random(&mut rng, &[200, 2, 128]), random(&mut rng, &[200, 2, 128]));
    let part = |x: &Tensor, a: usize, b: usize| {
        Tensor::from_f64(DType::F32, &x.view().to_f64()[a * 256..b * 256], &[b - a, 2, 128]).unwrap()
    };
    let mut whole = packed(2, 128, Bits::Four);
    whole.append(&k.view(), &v.view()).unwrap();
    // The same tile boundaries: the first tiles at once, the rest token by token.
    let mut slowly = packed(2, 128, Bits::Four);
    slowly.append(&part(&k, 0, 192).view(), &part(&v, 0, 192).view()).unwrap();
    for t in 192..200 {
        slowly.append(&part(&k, t, t + 1).view(), &part(&v, t, t + 1).view()).unwrap();
    }
    assert_eq!(whole, slowly);
    let q = random(&mut rng, &[3, 4, 128]);
    let all = whole.attend(&q.view(), 0.1, &Options::default()).unwrap().0.view().to_f64();
    // Prefill of three rows, and the last of them alone.
    let last = Tensor::from_f64(DType::F32, &q.view().to_f64()[2 * 512..], &[1, 4, 128]).unwrap();
    let alone = whole.attend(&last.view(), 0.1, &Options::default()).unwrap().0.view().to_f64();
    assert_eq!(all[2 * 512..], alone);
    // A fork goes its own way; truncation inside a tile keeps what tokens stand for.
    let mut fork = whole.fork();
    fork.truncate(150).unwrap();
    assert!((0..150).all(|t| fork.get(t, 1) == whole.get(t, 1)) && fork.len() == 150 && whole.len() == 200);
    fork.append(&part(&k, 150, 200).view(), &part(&v, 150, 200).view()).unwrap();
    assert_eq!(fork.len(), 200);
}

#[test]
fn a_cache_comes_back_from_its_parts_and_damage_is_told() {
    let mut rng = Rng::new(5);
    let (k, v) = (random(&mut rng, &[130, 2, 20]), random(&mut rng, &[130, 2, 20]));
    let storages = [Storage::Packed { k: vec![Bits::Four, Bits::Two], v: vec![Bits::Two, Bits::Four] }];
    for storage in storages.into_iter().chain(DType::FLOATS.map(Storage::Float)) {
        let mut cache = KvCache::new(spec(2, 20, storage)).unwrap();
        cache.append(&k.view(), &v.view()).unwrap();
        let parts = cache.to_parts();
        assert_eq!(KvCache::from_parts(&parts).unwrap(), cache);
        for name in parts.arrays.keys() {
            let mut cut = parts.clone();
            let array = cut.arrays.get_mut(name).unwrap();
            array.pop();
            assert!(matches!(KvCache::from_parts(&cut), Err(CacheError::File(_))), "{name} cut off");
            cut.arrays.remove(name);
            assert!(KvCache::from_parts(&cut).unwrap_err().to_string().contains("is missing"), "{name} gone");
        }
        for (name, value, told) in
            [("version", "2", "version 2, allowed: 1"), ("heads", "3", "missing"), ("len", "9999", "allowed: 5000")]
        {
            let mut other = parts.clone();
            other.words.insert(name.into(), value.into());
            let found = KvCache::from_parts(&other).unwrap_err().to_string();
            assert!(found.contains(told) || name == "heads", "{name}: {found}");
        }
    }
    assert!(KvCache::from_parts(&CacheParts::default()).is_err());
}

#[test]
fn refusals_leave_the_cache_as_it_was() {
    let mut rng = Rng::new(6);
    let mut cache = KvCache::new(CacheSpec { capacity: 70, ..packed(1, 8, Bits::Four).spec().clone() }).unwrap();
    let (k, v) = (random(&mut rng, &[66, 1, 8]), random(&mut rng, &[66, 1, 8]));
    cache.append(&k.view(), &v.view()).unwrap();
    let before = cache.clone();
    assert!(matches!(cache.append(&k.view(), &v.view()), Err(CacheError::Capacity { len: 66, add: 66, capacity: 70 })));
    let mut bad = k.view().to_f64()[..8].to_vec();
    bad[3] = f64::NAN;
    let bad = Tensor::from_f64(DType::F32, &bad, &[1, 1, 8]).unwrap();
    assert!(matches!(cache.append(&bad.view(), &bad.view()), Err(CacheError::NotFinite { arg: "k", at: 3, .. })));
    let wide = random(&mut rng, &[1, 2, 8]);
    assert!(matches!(cache.append(&wide.view(), &wide.view()), Err(CacheError::Shape { .. })));
    let found = cache.remove(3..5).unwrap_err();
    assert_eq!(
        found.to_string(),
        "tokens 3..5 of 66, allowed: a range that ends at 66; a cache forgets its last tokens only"
    );
    assert!(cache.truncate(67).is_err());
    let q = random(&mut rng, &[1, 3, 9]);
    assert!(matches!(cache.attend(&q.view(), 1.0, &Options::default()), Err(CacheError::Shape { arg: "q", .. })));
    assert!(cache.attend(&random(&mut rng, &[1, 3, 8]).view(), f32::NAN, &Options::default()).is_err());
    assert_eq!(cache, before);
    assert!(KvCache::new(CacheSpec { heads: 0, ..cache.spec().clone() }).is_err());
}

#[test]
fn heads_with_small_even_ranges_get_two_bits() {
    // Head 0 has one wide channel, head 1 all alike, head 2 wide and alike.
    let rows: Vec<f32> = (0..40)
        .flat_map(|t| {
            let x = (t as f32).sin();
            [[10.0 * x, x, x, x], [0.1 * x, 0.1 * x, 0.1 * x, 0.12 * x], [5.0 * x, 5.0 * x, 5.0 * x, 6.0 * x]].concat()
        })
        .collect();
    assert_eq!(choose_bits(&rows, 3, 4, 1), [Bits::Four, Bits::Two, Bits::Four]);
    assert_eq!(choose_bits(&rows, 3, 4, 2), [Bits::Four, Bits::Two, Bits::Two]);
}
