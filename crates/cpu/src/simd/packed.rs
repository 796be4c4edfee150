//! Codes of four bits as they lie, multiplied by VNNI: 64 unsigned bytes by 64 signed ones into sums of four.

use fulgurite_core::format::{Bits, Stage2};
use std::arch::x86_64::*;

/// Bytes of a vector: codes of 128 channels.
const VECTOR: usize = 64;

/// Whether this machine has the instructions.
pub(crate) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vnni")
}

fn check(tile: &Stage2) -> usize {
    let vectors = tile.channels / (2 * VECTOR);
    assert!(available() && tile.bits == Bits::Four && tile.channels == vectors * 2 * VECTOR, "a tile of whole vectors");
    assert!(tile.codes.len() >= tile.tokens * vectors * VECTOR && tile.tokens.is_multiple_of(4), "codes of the tile");
    vectors
}

/// sum_c q_c (step_c code_c + zero_c) for each token of a tile and each query, `tokens` apart.
pub(crate) fn dots(tile: &Stage2, queries: &[&[i8]], out: &mut [i32]) {
    let vectors = check(tile);
    assert!(queries.iter().all(|q| q.len() == tile.channels) && out.len() >= queries.len() * tile.tokens, "queries");
    let size = vectors * VECTOR;
    // For four queries at a time: q step in two parts, 128 * high + low, for the codes in the lower and the upper halves.
    let mut folded = vec![[0i8; VECTOR]; 4 * 4 * vectors];
    for (first, queries) in queries.chunks(4).enumerate() {
        let mut base = [0i32; 4];
        for (i, query) in queries.iter().enumerate() {
            base[i] = query.iter().zip(&tile.zeros).map(|(&q, &z)| i32::from(q) * i32::from(z)).sum();
            for vector in 0..vectors {
                let channels = vector * 2 * VECTOR..(vector + 1) * 2 * VECTOR;
                let (q, steps) = (&query[channels.clone()], &tile.steps[channels]);
                let mut parts = [[0i8; 2 * VECTOR]; 2];
                for c in 0..2 * VECTOR {
                    let product = i16::from(q[c]) * i16::from(steps[c]);
                    let high = (product + 64) >> 7;
                    (parts[0][c], parts[1][c]) = ((product - 128 * high) as i8, high as i8);
                }
                for (part, values) in parts.iter().enumerate() {
                    for half in 0..2 {
                        let to = &mut folded[((vector * 4 + i) * 2 + half) * 2 + part];
                        to.iter_mut().enumerate().for_each(|(byte, x)| *x = values[2 * byte + half]);
                    }
                }
            }
        }
        let out = &mut out[first * 4 * tile.tokens..];
        // SAFETY: the instructions exist, and the extents were checked above.
        unsafe { dots_of_four(&tile.codes, [tile.tokens, size], &folded, &base[..queries.len()], out) }
    }
}

/// # Safety
/// The machine has VNNI; `codes` has `tokens` rows of `size` bytes, `folded` four vectors for each query and vector.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn dots_of_four(
    codes: &[u8],
    [tokens, size]: [usize; 2],
    folded: &[[i8; VECTOR]],
    base: &[i32],
    out: &mut [i32],
) {
    let nibble = _mm512_set1_epi8(15);
    for token in 0..tokens {
        let (mut low, mut high) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
        for vector in 0..size / VECTOR {
            // SAFETY: inside the extents (contract), so below.
            let both = unsafe { _mm512_loadu_si512(codes.as_ptr().add(token * size + vector * VECTOR).cast()) };
            let halves = [_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble)];
            for i in 0..4 {
                for (half, codes) in halves.into_iter().enumerate() {
                    let at = ((vector * 4 + i) * 2 + half) * 2;
                    // SAFETY: each has a vector of bytes.
                    let part = |at: usize| unsafe { _mm512_loadu_si512(folded[at].as_ptr().cast()) };
                    low[i] = _mm512_dpbusd_epi32(low[i], codes, part(at));
                    high[i] = _mm512_dpbusd_epi32(high[i], codes, part(at + 1));
                }
            }
        }
        for (i, &base) in base.iter().enumerate() {
            let sum = _mm512_add_epi32(low[i], _mm512_slli_epi32::<7>(high[i]));
            out[i * tokens + token] = _mm512_reduce_add_epi32(sum) + base;
        }
    }
}

/// sum_t w_t (step_c code + zero_c) for each channel of a tile; weights and sums lie query after query.
pub(crate) fn sums(tile: &Stage2, weights: &[i8], out: &mut [i32]) {
    let vectors = check(tile);
    let queries = weights.len() / tile.tokens;
    assert!(out.len() >= queries * tile.channels, "sums");
    let size = vectors * VECTOR;
    let mut raw = [0i32; 2 * VECTOR];
    for query in 0..queries {
        let weights = &weights[query * tile.tokens..][..tile.tokens];
        let total: i32 = weights.iter().map(|&w| i32::from(w)).sum();
        for vector in 0..vectors {
            // SAFETY: the instructions exist, and the extents were checked above.
            unsafe { sums_of_vector(&tile.codes[vector * VECTOR..], size, weights, &mut raw) };
            let channels = vector * 2 * VECTOR..(vector + 1) * 2 * VECTOR;
            let out = &mut out[query * tile.channels + channels.start..][..2 * VECTOR];
            let by = tile.steps[channels.clone()].iter().zip(&tile.zeros[channels]);
            for ((out, &raw), (&step, &zero)) in out.iter_mut().zip(&raw).zip(by) {
                *out = raw * i32::from(step) + total * i32::from(zero);
            }
        }
    }
}

/// # Safety
/// The machine has VNNI; `codes` has a row of 64 bytes for each weight, `row` apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn sums_of_vector(codes: &[u8], row: usize, weights: &[i8], out: &mut [i32; 2 * VECTOR]) {
    let nibble = _mm512_set1_epi8(15);
    let mut sums = [_mm512_setzero_si512(); 8];
    for (four, weights) in weights.chunks_exact(4).enumerate() {
        let w = _mm512_set1_epi32(i32::from_le_bytes([
            weights[0] as u8,
            weights[1] as u8,
            weights[2] as u8,
            weights[3] as u8,
        ]));
        // SAFETY: inside the extents (contract).
        let t: [__m512i; 4] =
            std::array::from_fn(|i| unsafe { _mm512_loadu_si512(codes.as_ptr().add((four * 4 + i) * row).cast()) });
        // Bytes of four tokens side by side: dword m of block L of the k-th result is byte 16 L + 4 k + m.
        let (a, b) = (_mm512_unpacklo_epi8(t[0], t[1]), _mm512_unpackhi_epi8(t[0], t[1]));
        let (c, d) = (_mm512_unpacklo_epi8(t[2], t[3]), _mm512_unpackhi_epi8(t[2], t[3]));
        let z = [
            _mm512_unpacklo_epi16(a, c),
            _mm512_unpackhi_epi16(a, c),
            _mm512_unpacklo_epi16(b, d),
            _mm512_unpackhi_epi16(b, d),
        ];
        for (k, z) in z.into_iter().enumerate() {
            sums[2 * k] = _mm512_dpbusd_epi32(sums[2 * k], _mm512_and_si512(z, nibble), w);
            let upper = _mm512_and_si512(_mm512_srli_epi16::<4>(z), nibble);
            sums[2 * k + 1] = _mm512_dpbusd_epi32(sums[2 * k + 1], upper, w);
        }
    }
    for k in 0..4 {
        let (even, odd) = (sums[2 * k], sums[2 * k + 1]);
        // Channels 2 (16 L + 4 k + m) and the next, for the four m of each block.
        let (low, high) = (_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd));
        let mut lanes = [[0i32; 16]; 2];
        // SAFETY: both hold a vector.
        unsafe {
            _mm512_storeu_si512(lanes[0].as_mut_ptr().cast(), low);
            _mm512_storeu_si512(lanes[1].as_mut_ptr().cast(), high);
        }
        for block in 0..4 {
            let at = 2 * (16 * block + 4 * k);
            out[at..at + 4].copy_from_slice(&lanes[0][4 * block..][..4]);
            out[at + 4..at + 8].copy_from_slice(&lanes[1][4 * block..][..4]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::random::Rng;

    #[test]
    fn codes_as_they_lie_give_the_integers_of_expanded_ones() {
        if !available() {
            eprintln!("skipped: this machine has no VNNI");
            return;
        }
        let mut rng = Rng::new(8);
        for (channels, queries) in [(128, 1), (128, 4), (256, 5)] {
            let mut bytes = |n: usize, most: usize| -> Vec<i8> {
                (0..n).map(|_| (rng.range(0..2 * most + 1) as i32 - most as i32) as i8).collect()
            };
            let tile = Stage2::new(&bytes(64 * channels, 119), 64, channels, Bits::Four);
            let q: Vec<Vec<i8>> = (0..queries).map(|_| bytes(channels, 127)).collect();
            let w: Vec<i8> = bytes(queries * 64, 127).iter().map(|x| x.saturating_abs()).collect();
            let mut codes = vec![0i8; 64 * channels];
            tile.expand(&mut codes);
            let (mut got, mut sum) = (vec![0; queries * 64], vec![0; queries * channels]);
            dots(&tile, &q.iter().map(|q| &q[..]).collect::<Vec<_>>(), &mut got);
            sums(&tile, &w, &mut sum);
            for (i, q) in q.iter().enumerate() {
                for t in 0..64 {
                    let row = &codes[t * channels..(t + 1) * channels];
                    let want: i32 = row.iter().zip(q).map(|(&k, &q)| i32::from(k) * i32::from(q)).sum();
                    assert_eq!(got[i * 64 + t], want, "query {i} token {t}");
                }
                for c in 0..channels {
                    let want: i32 =
                        (0..64).map(|t| i32::from(codes[t * channels + c]) * i32::from(w[i * 64 + t])).sum();
                    assert_eq!(sum[i * channels + c], want, "query {i} channel {c}");
                }
            }
        }
    }
}
