//! How the exponential of a score is computed, and when the running maximum is updated.

use crate::precision::Precision;
use thiserror::Error;

/// The exponential that softmax uses.
///
/// `Auto`, `Native` and `Poly` all mean e^x and differ only in rounding. `Sas` and `SasOnline` are other functions, which
/// the oracle evaluates as such.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Exp {
    /// The fastest exponential within the tolerance of the output type.
    #[default]
    Auto,
    /// The most accurate exponential of the machine.
    Native,
    /// 2^x by Cody-Waite range reduction and a polynomial (FlashAttention-4), on a fraction of the elements.
    Poly {
        /// Degree of the polynomial: 3, 4 or 5.
        degree: u8,
        /// Fraction of the elements, 0 to 1; the others use the native exponential.
        share: f32,
    },
    /// A table of e^-n times a cubic, zero below `threshold` (TurboAttention).
    Sas {
        /// Negative threshold, in natural units.
        threshold: f32,
    },
    /// The table of e^-n times a cubic in one walk over the keys: relative to the running maximum, rounded up to a
    /// whole number, and without a threshold. See [`sas_top`].
    SasOnline,
}

/// The reason why an exponential was rejected.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ExpError {
    /// A degree for which there are no coefficients.
    #[error("`exp`: polynomial degree is {got}, allowed: 3, 4, 5; 3 is enough for bf16, 5 for f32")]
    Degree {
        /// The degree given.
        got: u8,
    },
    /// A fraction outside 0 to 1.
    #[error("`exp`: share is {got}, allowed: 0 to 1; 1 uses the polynomial everywhere")]
    Share {
        /// The share given.
        got: f32,
    },
    /// A threshold outside the table.
    #[error("`exp`: threshold is {got}, allowed: -{max} to below 0; the usual value is -10", max = SAS_TABLE - 1)]
    Threshold {
        /// The threshold given.
        got: f32,
    },
    /// An unknown name.
    #[error("`exp` is {got:?}, allowed: auto, native, poly:DEGREE, poly:DEGREE:SHARE, sas, sas:THRESHOLD, sas:online")]
    Name {
        /// The text given.
        got: String,
    },
    /// An exponential that quantised products do not have.
    #[error("`exp` is sas:online, which goes with precision native only, not with {got}; use sas")]
    Precision {
        /// The precision given.
        got: Precision,
    },
}

impl Exp {
    /// The usual threshold of [`Exp::Sas`].
    pub const SAS_THRESHOLD: f32 = -10.0;

    /// Checks the parameters of the exponential.
    pub fn check(self) -> Result<Exp, ExpError> {
        match self {
            Exp::Poly { degree, .. } if !(3..=5).contains(&degree) => Err(ExpError::Degree { got: degree }),
            Exp::Poly { share, .. } if !(0.0..=1.0).contains(&share) => Err(ExpError::Share { got: share }),
            Exp::Sas { threshold } if !(threshold < 0.0 && threshold > -(SAS_TABLE as f32)) => {
                Err(ExpError::Threshold { got: threshold })
            }
            _ => Ok(self),
        }
    }

    /// Checks that the exponential goes with a precision.
    pub(crate) fn check_precision(self, got: Precision) -> Result<(), ExpError> {
        match (self, got) {
            (Exp::SasOnline, Precision::Int8(_) | Precision::Groups(_)) => Err(ExpError::Precision { got }),
            _ => Ok(()),
        }
    }

    /// Whether this is TurboAttention's function, in either form, and not e^x.
    pub fn is_sas(self) -> bool {
        matches!(self, Exp::Sas { .. } | Exp::SasOnline)
    }
}

impl std::str::FromStr for Exp {
    type Err = ExpError;

    /// Parses `auto`, `native`, `poly:3`, `poly:3:0.25`, `sas`, `sas:-6`, `sas:online`.
    fn from_str(text: &str) -> Result<Exp, ExpError> {
        let unknown = || ExpError::Name { got: text.to_string() };
        let mut parts = text.split(':');
        let exp = match parts.next().unwrap_or_default() {
            "auto" => Exp::Auto,
            "native" => Exp::Native,
            "poly" => Exp::Poly {
                degree: parts.next().map_or(Ok(3), str::parse).map_err(|_| unknown())?,
                share: parts.next().map_or(Ok(1.0), str::parse).map_err(|_| unknown())?,
            },
            "sas" => match parts.next() {
                None => Exp::Sas { threshold: Exp::SAS_THRESHOLD },
                Some("online") => Exp::SasOnline,
                Some(threshold) => Exp::Sas { threshold: threshold.parse().map_err(|_| unknown())? },
            },
            _ => return Err(unknown()),
        };
        if parts.next().is_some() { Err(unknown()) } else { exp.check() }
    }
}

impl std::fmt::Display for Exp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Exp::Auto => f.write_str("auto"),
            Exp::Native => f.write_str("native"),
            Exp::Poly { degree, share } => write!(f, "poly:{degree}:{share}"),
            Exp::Sas { threshold } => write!(f, "sas:{threshold}"),
            Exp::SasOnline => f.write_str("sas:online"),
        }
    }
}

/// Coefficients of 2^r on [0, 1) for degrees 3, 4 and 5, lowest first. The first is fixed at 1, so that 2^n is exact
/// (FlashAttention-4, fpminimax on relative error).
pub const EXP2_POLY: [[f32; 6]; 3] = [
    [1.0, 0.695_146_14, 0.227_564_4, 0.077_119_09, 0.0, 0.0],
    [1.0, 0.693_042_7, 0.241_291_25, 0.052_225_36, 0.013_434_938, 0.0],
    [1.0, 0.693_151_4, 0.240_163_61, 0.055_802_19, 0.009_014_523, 0.001_868_101_5],
];

/// 2^x by a polynomial of the given degree: clamped to 0 at -127, infinite above 127.
///
/// Panics for a degree that [`Exp::check`] rejects.
pub fn exp2_poly(degree: u8, x: f32) -> f32 {
    if x > 127.0 {
        return f32::INFINITY;
    }
    if x.is_nan() {
        return x;
    }
    let x = x.max(-127.0);
    let floor = x.floor();
    let r = x - floor;
    let c = &EXP2_POLY[usize::from(degree) - 3];
    let p = c[..=usize::from(degree)].iter().rev().fold(0.0f32, |sum, &c| sum.mul_add(r, c));
    // p is in [1, 2): the exponent can be added as an integer; at -127 the result is 0.
    f32::from_bits(((floor as i32) << 23).wrapping_add(p.to_bits() as i32) as u32)
}

/// Entries of the table e^-n; thresholds reach down to minus this number.
pub const SAS_TABLE: usize = 64;

/// Coefficients of e^-f on [0, 1), lowest first (least squares, four digits as published).
pub const SAS_POLY: [f32; 4] = [0.9996, -0.9922, 0.4626, -0.1025];

/// e^x for x <= 0 as TurboAttention computes it: zero below the threshold, else table times cubic.
pub fn sas(x: f64, threshold: f32) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x < f64::from(threshold) {
        return 0.0;
    }
    let n = (-x).floor().max(0.0);
    let f = -x - n;
    let cubic = SAS_POLY.iter().rev().fold(0.0, |sum, &c| sum * f + f64::from(c));
    (-n).exp() * cubic
}

/// e^-n for n = 0 to 30, then 0: the table of [`Exp::SasOnline`]. A weight beyond it is below 1e-13 of the largest.
pub const SAS_ENTRIES: [f32; 32] = [
    1.0,
    0.367_879_45,
    0.135_335_28,
    0.049_787_067,
    0.018_315_64,
    0.006_737_947,
    0.002_478_752_3,
    9.118_82e-4,
    3.354_626_2e-4,
    1.234_098e-4,
    4.539_993e-5,
    1.670_17e-5,
    6.144_212_4e-6,
    2.260_329_4e-6,
    8.315_287e-7,
    3.059_023_2e-7,
    1.125_351_76e-7,
    4.139_937_8e-8,
    1.522_997_9e-8,
    5.602_796_4e-9,
    2.061_153_7e-9,
    7.582_560_7e-10,
    2.789_468e-10,
    1.026_187_95e-10,
    3.775_134_4e-11,
    1.388_794_4e-11,
    5.109_089e-12,
    1.879_528_9e-12,
    6.914_4e-13,
    2.543_665_7e-13,
    9.357_623e-14,
    0.0,
];

/// The whole number relative to which [`Exp::SasOnline`] computes the weights of a row with this maximum.
///
/// It is the maximum rounded up. A step between two whole numbers is a step in the table, which is exact, and the cubic
/// sees only the fraction of the score. So the weight of a key is a function of its own score, times a factor that all
/// keys of the row share: when and how often the running maximum grows does not change the result.
///
/// ```
/// use fulgurite_core::exp::{sas, sas_top};
/// let relative = |score: f64, max: f64| sas(score - sas_top(max), f32::NEG_INFINITY);
/// let (early, late) = (relative(0.3, 0.3), relative(0.3, 5.7));
/// assert!((late - early * (-5.0f64).exp()).abs() < 1e-15);
/// ```
pub fn sas_top(max: f64) -> f64 {
    max.ceil()
}

/// The rescale policy: when the running row maximum is raised. All three give the same result up to rounding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rescale {
    /// Raise it, and rescale the accumulator, whenever a block has a larger score (the textbook method).
    Always,
    /// Raise it only when the new maximum exceeds the old one by more than this many powers of two.
    Lazy(f32),
    /// Set it from the first keys of a row (the engine decides how many), and use it for later keys without looking. A
    /// block whose sum exceeds this limit is recomputed with its own maximum.
    Optimistic(f32),
}

impl Rescale {
    /// The threshold that FlashAttention-4 uses, in powers of two.
    pub const LAZY_TAU: f32 = 8.0;
    /// The limit that leaves room in an f32 accumulator, and in bf16 probabilities.
    pub const OPTIMISTIC_LIMIT: f32 = (1u32 << 30) as f32;
    /// Thresholds above this could overflow an f32 sum.
    pub const MAX_TAU: f32 = 60.0;

    /// Checks the parameter of the policy.
    pub fn check(self) -> Result<Rescale, RescaleError> {
        match self {
            Rescale::Lazy(tau) if !(0.0..=Rescale::MAX_TAU).contains(&tau) => Err(RescaleError::Tau { got: tau }),
            Rescale::Optimistic(limit) if !(limit >= 1.0 && limit <= 2f32.powi(60)) => {
                Err(RescaleError::Limit { got: limit })
            }
            _ => Ok(self),
        }
    }
}

impl std::str::FromStr for Rescale {
    type Err = RescaleError;

    /// Parses `always`, `lazy`, `lazy:8`, `optimistic`, `optimistic:1e9`.
    fn from_str(text: &str) -> Result<Rescale, RescaleError> {
        let unknown = || RescaleError::Name { got: text.to_string() };
        let (name, value) = text.split_once(':').map_or((text, None), |(n, v)| (n, Some(v)));
        let value = value.map(str::parse::<f32>).transpose().map_err(|_| unknown())?;
        match (name, value) {
            ("always", None) => Ok(Rescale::Always),
            ("lazy", tau) => Rescale::Lazy(tau.unwrap_or(Rescale::LAZY_TAU)).check(),
            ("optimistic", limit) => Rescale::Optimistic(limit.unwrap_or(Rescale::OPTIMISTIC_LIMIT)).check(),
            _ => Err(unknown()),
        }
    }
}

impl std::fmt::Display for Rescale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rescale::Always => f.write_str("always"),
            Rescale::Lazy(tau) => write!(f, "lazy:{tau}"),
            Rescale::Optimistic(limit) => write!(f, "optimistic:{limit}"),
        }
    }
}

/// The reason why a rescale policy was rejected.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum RescaleError {
    /// A threshold that loses accuracy or overflows.
    #[error("`tau` is {got}, allowed: 0 to {max}; the usual value is 8, 0 rescales always", max = Rescale::MAX_TAU)]
    Tau {
        /// The threshold given.
        got: f32,
    },
    /// A limit that loses accuracy or overflows.
    #[error("`limit` is {got}, allowed: 1 to 2^60; the usual value is 2^30")]
    Limit {
        /// The limit given.
        got: f32,
    },
    /// An unknown name.
    #[error("`rescale` is {got:?}, allowed: always, lazy, lazy:TAU, optimistic, optimistic:LIMIT")]
    Name {
        /// The text given.
        got: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Problem;

    /// Largest relative error against f64 over a fine grid of one octave and a coarse one of the whole range.
    fn worst(f: impl Fn(f32) -> f32) -> f64 {
        let points = (0..200_000).map(|i| i as f32 * -5e-6).chain((0..1000).map(|i| i as f32 * -0.12));
        points.fold(0.0, |worst: f64, x| {
            let want = f64::from(x).exp2();
            worst.max((f64::from(f(x)) - want).abs() / want)
        })
    }

    #[test]
    fn polynomial_errors_are_as_published() {
        for (degree, published) in [(3, 8.77e-5), (4, 3.05e-6), (5, 1.44e-7)] {
            let error = worst(|x| exp2_poly(degree, x));
            assert!(error <= published * 1.25 && error >= published * 0.5, "degree {degree}: {error:e}");
        }
    }

    #[test]
    fn polynomial_ends() {
        for degree in 3..=5 {
            assert_eq!(exp2_poly(degree, f32::NEG_INFINITY), 0.0);
            assert_eq!(exp2_poly(degree, -127.0), 0.0);
            assert_eq!(exp2_poly(degree, 0.0), 1.0);
            assert_eq!(exp2_poly(degree, 8.0), 256.0);
            assert_eq!(exp2_poly(degree, 128.0), f32::INFINITY);
            assert!(exp2_poly(degree, f32::NAN).is_nan());
        }
    }

    #[test]
    fn sas_errors_are_as_published() {
        let (mut absolute, mut relative) = (0.0f64, 0.0f64);
        for i in 0..=60_000 {
            let x = f64::from(i) * -1e-4;
            let error = (sas(x, -6.0) - x.exp()).abs();
            absolute = absolute.max(error);
            relative = relative.max(error / x.exp());
        }
        assert!((3.5e-4..=4.1e-4).contains(&absolute), "{absolute:e}");
        assert!((9e-4..=1.05e-3).contains(&relative), "{relative:e}");
        assert_eq!(sas(-6.001, -6.0), 0.0);
        assert_eq!(sas(f64::NEG_INFINITY, -6.0), 0.0);
    }

    #[test]
    fn entries_are_the_nearest_numbers() {
        for (n, &entry) in SAS_ENTRIES[..31].iter().enumerate() {
            assert_eq!(entry, (-(n as f64)).exp() as f32, "{n}");
        }
        assert_eq!(SAS_ENTRIES[31], 0.0);
    }

    /// A walk with any sequence of maxima gives the weights that the last maximum gives. With the maximum itself, every
    /// raise costs four parts in ten thousand of the weight of earlier keys.
    #[test]
    fn whole_maxima_do_not_change_weights() {
        let scores = [0.3, -2.7, 0.30001, 1.0, 4.2, 4.1, 9.99];
        let walk = |top: &dyn Fn(f64) -> f64, step: &dyn Fn(f64) -> f64| {
            let (mut max, mut weights) = (f64::NEG_INFINITY, Vec::new());
            for &score in &scores {
                let new = if score > max { score } else { max };
                weights.iter_mut().for_each(|w| *w *= step(top(max) - top(new)));
                weights.push(sas(score - top(new), f32::NEG_INFINITY));
                max = new;
            }
            let last = |&score: &f64| sas(score - top(max), f32::NEG_INFINITY);
            weights.iter().zip(&scores).map(|(w, s)| (w / last(s) - 1.0).abs()).fold(0.0, f64::max)
        };
        assert!(walk(&sas_top, &f64::exp) < 1e-14);
        assert!(walk(&|max| max, &|x| sas(x, f32::NEG_INFINITY)) > 1e-3);
    }

    #[test]
    fn the_online_table_goes_with_native_products() {
        let problem = |precision: &str| {
            let builder = Problem::builder().dense(1, 4, 4).heads(1, 1).head_dim(16).exp(Exp::SasOnline);
            builder.precision(precision.parse().unwrap()).build()
        };
        assert!(problem("native").is_ok());
        assert_eq!(
            problem("int8").unwrap_err().to_string(),
            "`exp` is sas:online, which goes with precision native only, not with int8:64; use sas"
        );
        assert!(problem("nvfp4").unwrap_err().to_string().contains("not with nvfp4"));
    }

    #[test]
    fn names_round_trip_and_bad_ones_are_explained() {
        for text in ["auto", "native", "poly:3:0.25", "sas:-10", "sas:online"] {
            assert_eq!(text.parse::<Exp>().unwrap().to_string(), text);
        }
        for text in ["always", "lazy:8", "optimistic:1024"] {
            assert_eq!(text.parse::<Rescale>().unwrap().to_string(), text);
        }
        let refused = |text: &str| text.parse::<Exp>().unwrap_err().to_string();
        assert!(refused("poly:7").contains("allowed: 3, 4, 5"));
        assert!(refused("poly:3:NaN").contains("0 to 1"));
        assert!(refused("sas:3").contains("-63 to below 0"));
        assert!(refused("sas:offline").contains("sas:online"));
        assert!(refused("sas:online:-6").contains("\"sas:online:-6\""));
        assert!(refused("fast").contains("\"fast\""));
        assert!("lazy:NaN".parse::<Rescale>().is_err());
        assert!("lazy:-1".parse::<Rescale>().is_err());
    }
}
