//! Element types of tensors.

use half::{bf16, f16};
use std::fmt;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// 32-bit signed integers: lengths, offsets, document ids.
    I32,
}

impl DType {
    /// The types that q, k and v may have.
    pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// Whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::I32)
    }

    /// The lower-case name used on the command line, in reports and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
        }
    }

    /// The nearest value of this type, as an f64. Integers round toward zero.
    ///
    /// ```
    /// # use fulgurite_core::DType;
    /// assert_eq!(DType::Bf16.round(1.001), 1.0);
    /// ```
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F32 => f64::from(x as f32),
            DType::F16 => f16::from_f64(x).to_f64(),
            DType::Bf16 => bf16::from_f64(x).to_f64(),
            DType::I32 => f64::from(x as i32),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for i32 {}
}

/// A Rust type that tensors can hold.
pub trait Element: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// The `DType` of this type.
    const DTYPE: DType;
    /// Converts to f64, exactly.
    fn to_f64(self) -> f64;
    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn from_f64(x: f64) -> Self {
        x as f32
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }
    fn from_f64(x: f64) -> Self {
        f16::from_f64(x)
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
    fn from_f64(x: f64) -> Self {
        bf16::from_f64(x)
    }
}

impl Element for i32 {
    const DTYPE: DType = DType::I32;
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn from_f64(x: f64) -> Self {
        x as i32
    }
}
