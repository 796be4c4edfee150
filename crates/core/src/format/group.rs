//! Groups of minifloats with a shared scale: NVFP4, MXFP4, MXFP8.

use super::minifloat::{E2m1, E4m3, Ue8m0};
use super::{FormatError, check};

/// A format whose groups share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GroupFormat {
    /// E2M1 in groups of 16 with an E4M3 scale.
    Nvfp4 {
        /// Whether an f32 scale for the whole tensor brings the group scales into the range of E4M3.
        second_level: bool,
    },
    /// E2M1 in groups of 32 with a power of two.
    Mxfp4,
    /// E4M3 in groups of 32 with a power of two.
    Mxfp8,
}

impl GroupFormat {
    /// NVFP4 without a second level, as used in training.
    pub const NVFP4: GroupFormat = GroupFormat::Nvfp4 { second_level: false };

    /// Elements per group.
    pub const fn group(self) -> usize {
        match self {
            GroupFormat::Nvfp4 { .. } => 16,
            GroupFormat::Mxfp4 | GroupFormat::Mxfp8 => 32,
        }
    }

    /// Bits per element code.
    pub const fn bits(self) -> usize {
        if matches!(self, GroupFormat::Mxfp8) { 8 } else { 4 }
    }

    /// The lower-case name: `nvfp4`, `nvfp4x2` (with a second level), `mxfp4`, `mxfp8`.
    pub const fn name(self) -> &'static str {
        match self {
            GroupFormat::Nvfp4 { second_level: false } => "nvfp4",
            GroupFormat::Nvfp4 { second_level: true } => "nvfp4x2",
            GroupFormat::Mxfp4 => "mxfp4",
            GroupFormat::Mxfp8 => "mxfp8",
        }
    }

    /// The code of a group's scale, from its largest magnitude; `encode` is the second level.
    fn scale(self, largest: f32, encode: f32) -> u8 {
        match self {
            GroupFormat::Nvfp4 { .. } => E4m3::from_f32(encode * largest / E2m1::MAX).0,
            GroupFormat::Mxfp4 => Ue8m0::at_least(largest / E2m1::MAX).0,
            GroupFormat::Mxfp8 => Ue8m0::at_least(largest / E4m3::MAX).0,
        }
    }

    fn scale_value(self, code: u8) -> f32 {
        match self {
            GroupFormat::Nvfp4 { .. } => E4m3(code).to_f32(),
            GroupFormat::Mxfp4 | GroupFormat::Mxfp8 => Ue8m0(code).to_f32(),
        }
    }

    fn code(self, x: f32) -> u8 {
        if self.bits() == 8 { E4m3::from_f32(x).0 } else { E2m1::from_f32(x).0 }
    }

    /// The scale of a group without a second level, from its largest magnitude, and the factor that replaces a division
    /// by the scale.
    #[inline(always)]
    pub fn scale_of(self, largest: f32) -> [f32; 2] {
        let scale = match self {
            GroupFormat::Nvfp4 { .. } => E4m3::nearest(largest / E2m1::MAX),
            GroupFormat::Mxfp4 => Ue8m0::at_least(largest / E2m1::MAX).to_f32(),
            GroupFormat::Mxfp8 => Ue8m0::at_least(largest / E4m3::MAX).to_f32(),
        };
        // If the scale rounded to zero, all codes are 0.
        [scale, if scale == 0.0 { 0.0 } else { 1.0 / scale }]
    }

    /// The value of the code of a number that was divided by its group's scale.
    #[inline(always)]
    pub fn nearest(self, x: f32) -> f32 {
        if self.bits() == 8 { E4m3::nearest(x) } else { E2m1::nearest(x) }
    }

    /// The second level of a tensor: the factor of scales before rounding, and its inverse.
    fn levels(self, data: &[f32]) -> (f32, f32) {
        if !matches!(self, GroupFormat::Nvfp4 { second_level: true }) {
            return (1.0, 1.0);
        }
        let largest = data.iter().fold(1e-8f32, |m, x| m.max(x.abs()));
        let encode = E2m1::MAX * E4m3::MAX / largest;
        (encode, 1.0 / encode)
    }

    /// Replaces a group by the values of its codes, with one scale for all of `x`. This is the arithmetic of
    /// [`Grouped::new`] without the second level.
    #[inline(always)]
    pub fn fake_group(self, x: &mut [f32]) {
        let [scale, inverse] = self.scale_of(x.iter().fold(0.0f32, |m, x| if x.abs() > m { x.abs() } else { m }));
        x.iter_mut().for_each(|x| *x = self.nearest(*x * inverse) * scale);
    }

    /// Replaces rows of `cols` elements by the values of their codes, without the second level. The last group of a row
    /// may be short.
    #[inline(always)]
    pub fn fake_rows(self, x: &mut [f32], cols: usize) {
        for row in x.chunks_mut(cols.max(1)) {
            row.chunks_mut(self.group()).for_each(|group| self.fake_group(group));
        }
    }
}

impl std::str::FromStr for GroupFormat {
    type Err = FormatError;
    fn from_str(text: &str) -> Result<Self, FormatError> {
        let all =
            [GroupFormat::NVFP4, GroupFormat::Nvfp4 { second_level: true }, GroupFormat::Mxfp4, GroupFormat::Mxfp8];
        let allowed = "nvfp4, nvfp4x2, mxfp4, mxfp8";
        all.into_iter().find(|f| f.name() == text).ok_or(FormatError::Name { got: text.into(), allowed })
    }
}

impl std::fmt::Display for GroupFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A quantised matrix. Rows whose length is not a multiple of the group are padded with zeros.
///
/// ```
/// use fulgurite_core::format::{GroupFormat, Grouped};
/// let x = Grouped::new(GroupFormat::NVFP4, &[3.0; 20], 1, 20)?;
/// assert_eq!((x.codes().len(), x.scales().len()), (16, 2)); // two groups of 16, two codes a byte
/// assert_eq!(x.decode(), [3.0; 20]);
/// # Ok::<(), fulgurite_core::format::FormatError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Grouped {
    format: GroupFormat,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    level: f32,
}

impl Grouped {
    /// Quantises `rows` rows of `cols` elements.
    pub fn new(format: GroupFormat, data: &[f32], rows: usize, cols: usize) -> Result<Grouped, FormatError> {
        check(data, rows, cols)?;
        let (encode, level) = format.levels(data);
        let groups = cols.div_ceil(format.group());
        let (mut codes, mut scales) = (Vec::new(), Vec::with_capacity(rows * groups));
        for row in data.chunks_exact(cols.max(1)) {
            for group in row.chunks(format.group()) {
                let scale = format.scale(group.iter().fold(0.0f32, |m, x| m.max(x.abs())), encode);
                let step = format.scale_value(scale) * level;
                // If the scale rounded to zero, all codes are 0.
                let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
                let at = |i: usize| group.get(i).map_or(0, |x| format.code(x * inverse));
                match format.bits() {
                    8 => codes.extend((0..format.group()).map(at)),
                    // The first of two codes is in the lower half of a byte.
                    _ => codes.extend((0..format.group()).step_by(2).map(|i| at(i) | at(i + 1) << 4)),
                }
                scales.push(scale);
            }
        }
        Ok(Grouped { format, rows, cols, codes, scales, level })
    }

    /// The values of the codes.
    pub fn decode(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        out.chunks_exact_mut(self.cols.max(1)).enumerate().for_each(|(row, out)| self.expand(row, 0, out));
        out
    }

    /// The values of one row's codes, starting at column `first`, which must start a group. Panics outside the matrix.
    #[inline(always)]
    pub fn expand(&self, row: usize, first: usize, out: &mut [f32]) {
        let (size, bits) = (self.format.group(), self.format.bits());
        assert!(
            first.is_multiple_of(size) && row < self.rows && first + out.len() <= self.cols,
            "outside of the matrix"
        );
        let number = row * self.cols.div_ceil(size) + first / size;
        let groups = self.codes[number * size * bits / 8..].chunks_exact(size * bits / 8);
        for ((out, codes), &scale) in out.chunks_mut(size).zip(groups).zip(&self.scales[number..]) {
            let scale = self.format.scale_value(scale);
            let mut all = [0.0f32; 32];
            if bits == 8 {
                all.iter_mut().zip(codes).for_each(|(x, &code)| *x = E4m3(code).to_f32() * scale * self.level);
            } else {
                for (x, &code) in all.chunks_exact_mut(2).zip(codes) {
                    x[0] = E2m1(code).to_f32() * scale * self.level;
                    x[1] = E2m1(code >> 4).to_f32() * scale * self.level;
                }
            }
            out.copy_from_slice(&all[..out.len()]);
        }
    }

    /// The format of the matrix.
    pub fn format(&self) -> GroupFormat {
        self.format
    }
    /// Number of rows, and elements per row.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }
    /// Codes, row after row of whole groups.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }
    /// Codes of the groups' scales, row-major.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }
    /// The scale of the whole tensor: 1 without a second level.
    pub fn level(&self) -> f32 {
        self.level
    }
    /// Bytes of codes and scales.
    pub fn size_bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + if self.level == 1.0 { 0 } else { 4 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    const ALL: [GroupFormat; 4] =
        [GroupFormat::NVFP4, GroupFormat::Nvfp4 { second_level: true }, GroupFormat::Mxfp4, GroupFormat::Mxfp8];

    fn error(a: &[f32], b: &[f32]) -> (f64, f64) {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (a, b) = (wide(a), wide(b));
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let d: Vec<f64> = a.iter().zip(&b).map(|(x, y)| x - y).collect();
        ((dot(&d, &d) / dot(&a, &a)).sqrt(), dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt())
    }

    #[test]
    fn normal_numbers_lose_what_the_format_predicts() {
        let x: Vec<f32> = Rng::new(3).normals(1 << 17, 1.0).into_iter().map(|x| x as f32).collect();
        let (rms, cosine) = error(&x, &Grouped::new(GroupFormat::NVFP4, &x, 1 << 10, 1 << 7).unwrap().decode());
        assert!((rms - 0.0953).abs() < 0.002, "relative rms error {rms}");
        assert!((cosine - 0.99546).abs() < 0.0005, "cosine {cosine}");
        let (fp8, _) = error(&x, &Grouped::new(GroupFormat::Mxfp8, &x, 1 << 10, 1 << 7).unwrap().decode());
        assert!(fp8 < 0.03, "MXFP8 {fp8}");
        let (fp4, _) = error(&x, &Grouped::new(GroupFormat::Mxfp4, &x, 1 << 10, 1 << 7).unwrap().decode());
        assert!((0.1..0.16).contains(&fp4), "MXFP4 {fp4}");
    }

    #[test]
    fn decoding_is_what_fake_quantisation_gives_and_a_fixed_point() {
        let mut rng = Rng::new(4);
        for format in ALL {
            for (rows, cols) in [(1, 1), (3, 16), (2, 33), (5, 64), (1, 100)] {
                let x: Vec<f32> = rng.normals(rows * cols, 3.0).into_iter().map(|x| x as f32).collect();
                let coded = Grouped::new(format, &x, rows, cols).unwrap();
                let meant = coded.decode();
                assert_eq!(coded.codes().len() * 8, rows * cols.next_multiple_of(format.group()) * format.bits());
                if format != (GroupFormat::Nvfp4 { second_level: true }) {
                    let mut faked = x.clone();
                    format.fake_rows(&mut faked, cols);
                    assert_eq!(faked, meant, "{format} {rows}x{cols}");
                }
                // Powers of two reproduce themselves; an E4M3 scale may change if the largest element is not 6.
                if matches!(format, GroupFormat::Mxfp4 | GroupFormat::Mxfp8) {
                    let again = Grouped::new(format, &meant, rows, cols).unwrap().decode();
                    assert_eq!(again, meant, "{format}");
                }
            }
        }
    }

    #[test]
    fn small_groups_meet_the_end_of_the_scale() {
        let decode = |x: f32, format| Grouped::new(format, &[x; 16], 1, 16).unwrap().decode()[0];
        // Without a second level the scale is rounded up to the smallest E4M3, and elements saturate or vanish.
        assert_eq!(decode(1.0 / 64.0, GroupFormat::NVFP4), 0.011_718_75);
        assert_eq!(decode(0.005_859_375, GroupFormat::NVFP4), 0.0);
        let two = decode(1.0 / 64.0, GroupFormat::Nvfp4 { second_level: true });
        assert!((two - 1.0 / 64.0).abs() < 1e-8, "{two}");
        assert_eq!(decode(0.0, GroupFormat::Mxfp4), 0.0);
    }

    #[test]
    fn what_no_scale_fits_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0f32; 32];
            x[17] = bad;
            for format in ALL {
                let found = Grouped::new(format, &x, 2, 16).unwrap_err();
                assert!(matches!(found, FormatError::NotFinite { at: 17, .. }), "{found}");
            }
        }
        let found = Grouped::new(GroupFormat::Mxfp4, &[0.0; 31], 1, 32).unwrap_err();
        assert_eq!(found.to_string(), "31 elements for 1 rows of 32, allowed: 32; check the shape");
        assert!("fp5".parse::<GroupFormat>().is_err());
    }
}
