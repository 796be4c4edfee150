//! Weights rounded to minifloats in groups of keys, plain Rust that the compiler turns into vectors.

use fulgurite_core::format::{E2m1, E4m3, GroupFormat, Ue8m0};

/// Rounds the weights of `N` lanes from `lane` on, keys `range`; groups are counted from key 0 of the block.
#[inline(always)]
pub(in crate::simd) fn round_weights<const N: usize>(
    p: &mut [f32],
    stride: usize,
    lane: usize,
    (start, end): (usize, usize),
    format: GroupFormat,
) {
    let size = format.group();
    for number in start / size..end.div_ceil(size) {
        let keys = (number * size).max(start)..((number + 1) * size).min(end);
        let mut largest = [0.0f32; N];
        for key in keys.clone() {
            let row = &p[key * stride + lane..][..N];
            for (most, &x) in largest.iter_mut().zip(row) {
                *most = if x > *most { x } else { *most };
            }
        }
        let (mut scale, mut inverse) = ([0.0f32; N], [0.0f32; N]);
        for i in 0..N {
            scale[i] = match format {
                GroupFormat::Mxfp4 => Ue8m0::at_least(largest[i] / E2m1::MAX).to_f32(),
                GroupFormat::Mxfp8 => Ue8m0::at_least(largest[i] / E4m3::MAX).to_f32(),
                _ => E4m3::from_f32(largest[i] / E2m1::MAX).to_f32(),
            };
            inverse[i] = if scale[i] == 0.0 { 0.0 } else { 1.0 / scale[i] };
        }
        for key in keys {
            let row = &mut p[key * stride + lane..][..N];
            if format.bits() == 8 {
                for i in 0..N {
                    row[i] = E4m3::from_f32(row[i] * inverse[i]).to_f32() * scale[i];
                }
                continue;
            }
            for i in 0..N {
                let x = row[i] * inverse[i];
                // Codes of weights, which are never negative: half steps, whole ones and a double one, ties to even.
                let step = |above: bool, by: f32| if above { by } else { 0.0 };
                let low = step(x > 0.25, 0.5) + step(x >= 0.75, 0.5) + step(x > 1.25, 0.5) + step(x >= 1.75, 0.5);
                let rounded = low + step(x > 2.5, 1.0) + step(x >= 3.5, 1.0) + step(x > 5.0, 2.0);
                row[i] = if x.is_nan() { x } else { rounded * scale[i] };
            }
        }
    }
}
