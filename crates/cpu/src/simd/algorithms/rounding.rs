//! Rounds numbers to minifloats in groups: plain Rust that the compiler vectorises.

use fulgurite_core::format::{GroupFormat, Grouped};

/// Rounds `N` columns from `lane` on in groups along the rows `range`, counted from row 0.
#[inline(always)]
pub(in crate::simd) fn round_weights<const N: usize>(
    p: &mut [f32],
    stride: usize,
    lane: usize,
    (start, end): (usize, usize),
    format: GroupFormat,
) {
    // Each format has its own loop.
    match format {
        GroupFormat::Mxfp8 => round::<N>(p, stride, lane, (start, end), GroupFormat::Mxfp8),
        GroupFormat::Mxfp4 => round::<N>(p, stride, lane, (start, end), GroupFormat::Mxfp4),
        _ => round::<N>(p, stride, lane, (start, end), GroupFormat::NVFP4),
    }
}

#[inline(always)]
fn round<const N: usize>(p: &mut [f32], stride: usize, lane: usize, (start, end): (usize, usize), format: GroupFormat) {
    let size = format.group();
    for number in start / size..end.div_ceil(size) {
        let keys = (number * size).max(start)..((number + 1) * size).min(end);
        let mut largest = [0.0f32; N];
        for key in keys.clone() {
            let row = &p[key * stride + lane..][..N];
            for (most, &x) in largest.iter_mut().zip(row) {
                *most = if x.abs() > *most { x.abs() } else { *most };
            }
        }
        let (mut scale, mut inverse) = ([0.0f32; N], [0.0f32; N]);
        for i in 0..N {
            [scale[i], inverse[i]] = format.scale_of(largest[i]);
        }
        for key in keys {
            let row = &mut p[key * stride + lane..][..N];
            for i in 0..N {
                row[i] = format.nearest(row[i] * inverse[i]) * scale[i];
            }
        }
    }
}

/// Rounds rows of `cols` elements in groups along each row.
#[inline(always)]
pub(in crate::simd) fn round_rows(x: &mut [f32], cols: usize, format: GroupFormat) {
    match format {
        GroupFormat::Mxfp8 => GroupFormat::Mxfp8.fake_rows(x, cols),
        GroupFormat::Mxfp4 => GroupFormat::Mxfp4.fake_rows(x, cols),
        _ => GroupFormat::NVFP4.fake_rows(x, cols),
    }
}

/// The values of one row's codes, starting at a column that starts a group.
#[inline(always)]
pub(in crate::simd) fn expand(from: &Grouped, row: usize, first: usize, out: &mut [f32]) {
    from.expand(row, first, out);
}
