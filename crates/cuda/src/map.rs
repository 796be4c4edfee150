//! The driver's description of a tensor that TMA moves: pure arithmetic, no driver calls.

use fulgurite_ptx::device::TensorSpan;
use fulgurite_ptx::kernel::BoxShape;
use fulgurite_ptx::{Number, Swizzle};

/// Largest number of axes of a tensor map.
const MOST_AXES: usize = 5;
/// Largest number of elements of a box along an axis.
const MOST_BOX: u32 = 256;

/// The arguments of `cuTensorMapEncodeTiled`; entries past the rank are not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MapArguments {
    /// Number of axes.
    pub rank: u32,
    /// Element type, in the driver's enumeration.
    pub type_code: u32,
    /// Swizzle, in the driver's enumeration.
    pub swizzle_code: u32,
    /// Address of the first element.
    pub address: u64,
    /// Elements along each axis, innermost first.
    pub extent: [u64; MOST_AXES],
    /// Byte stride of each axis except the innermost.
    pub stride_bytes: [u64; MOST_AXES],
    /// Elements of a box along each axis.
    pub box_extent: [u32; MOST_AXES],
}

impl MapArguments {
    /// The arguments for boxes of a tensor. The error text says what no tensor map supports and continues a sentence
    /// that starts with the tensor's name. Mistakes that a caller can make were checked with the launch.
    pub fn new(shape: &BoxShape, tensor: &TensorSpan) -> Result<MapArguments, String> {
        let rank = shape.extent.len();
        if !(1..=MOST_AXES).contains(&rank) {
            return Err(format!("has {rank} axes, allowed: 1 to {MOST_AXES}; merge some"));
        }
        if let Some(n) = shape.extent.iter().find(|n| !(1..=MOST_BOX).contains(*n)) {
            return Err(format!("is moved in boxes of {n} elements along an axis, allowed: 1 to {MOST_BOX}"));
        }
        let inner_bytes = shape.extent[0] * shape.number.bytes();
        if !inner_bytes.is_multiple_of(16) {
            return Err(format!("is moved in boxes of {inner_bytes} bytes a row, allowed: multiples of 16"));
        }
        let line = shape.swizzle.line();
        if shape.swizzle != Swizzle::None && inner_bytes > line {
            return Err(format!("is moved in boxes of {inner_bytes} bytes a row, allowed: up to {line} in its layout"));
        }
        let mut map = MapArguments {
            rank: rank as u32,
            type_code: type_code(shape.number),
            swizzle_code: swizzle_code(shape.swizzle),
            address: tensor.span.address(),
            extent: [1; MOST_AXES],
            stride_bytes: [0; MOST_AXES],
            box_extent: [1; MOST_AXES],
        };
        map.extent[..rank].copy_from_slice(&tensor.extent);
        map.stride_bytes[..rank - 1].copy_from_slice(&tensor.strides);
        map.box_extent[..rank].copy_from_slice(&shape.extent);
        Ok(map)
    }
}

/// `CUtensorMapDataType`. A copy moves bits, so types that it lacks are passed as integers of the same width.
fn type_code(number: Number) -> u32 {
    match number {
        Number::U8 | Number::S8 | Number::E4m3 | Number::E5m2 | Number::E2m1x2 => 0,
        Number::S32 => 3,
        Number::F16 => 6,
        Number::F32 => 7,
        Number::Bf16 => 9,
        Number::Tf32 => 11,
    }
}

/// `CUtensorMapSwizzle`.
fn swizzle_code(swizzle: Swizzle) -> u32 {
    match swizzle {
        Swizzle::None => 0,
        Swizzle::B32 => 1,
        Swizzle::B64 => 2,
        Swizzle::B128 => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_ptx::device::Span;

    fn shape(number: Number, extent: &[u32], swizzle: Swizzle) -> BoxShape {
        BoxShape { number, extent: extent.into(), swizzle }
    }

    fn tensor(number: Number, extent: &[u64], strides: &[u64]) -> TensorSpan {
        let span = Span::new(0x7f00_0000_0100, 1 << 30);
        TensorSpan { span, number, extent: extent.into(), strides: strides.into(), ragged: None }
    }

    #[test]
    fn a_matrix_of_a_batch() {
        let shape = shape(Number::Bf16, &[64, 128, 1], Swizzle::B128);
        let map = MapArguments::new(&shape, &tensor(Number::Bf16, &[300, 200, 3], &[640, 640 * 201])).unwrap();
        let want = MapArguments {
            rank: 3,
            type_code: 9,
            swizzle_code: 3,
            address: 0x7f00_0000_0100,
            extent: [300, 200, 3, 1, 1],
            stride_bytes: [640, 128_640, 0, 0, 0],
            box_extent: [64, 128, 1, 1, 1],
        };
        assert_eq!(map, want);
    }

    #[test]
    fn one_axis_has_no_strides() {
        let shape = shape(Number::F32, &[256], Swizzle::None);
        let map = MapArguments::new(&shape, &tensor(Number::F32, &[1 << 32], &[])).unwrap();
        assert_eq!((map.rank, map.extent[0], map.stride_bytes, map.box_extent[0]), (1, 1 << 32, [0; 5], 256));
    }

    /// The codes equal those of the bindings' enumerations.
    #[test]
    fn codes_are_the_drivers() {
        use cudarc::driver::sys::{CUtensorMapDataType as T, CUtensorMapSwizzle as S};
        let types = [
            (Number::U8, T::CU_TENSOR_MAP_DATA_TYPE_UINT8),
            (Number::S8, T::CU_TENSOR_MAP_DATA_TYPE_UINT8),
            (Number::E4m3, T::CU_TENSOR_MAP_DATA_TYPE_UINT8),
            (Number::E5m2, T::CU_TENSOR_MAP_DATA_TYPE_UINT8),
            (Number::E2m1x2, T::CU_TENSOR_MAP_DATA_TYPE_UINT8),
            (Number::S32, T::CU_TENSOR_MAP_DATA_TYPE_INT32),
            (Number::F16, T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
            (Number::F32, T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32),
            (Number::Bf16, T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
            (Number::Tf32, T::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32),
        ];
        for (number, code) in types {
            assert_eq!(type_code(number), code as u32, "{number:?}");
        }
        let swizzles = [
            (Swizzle::None, S::CU_TENSOR_MAP_SWIZZLE_NONE),
            (Swizzle::B32, S::CU_TENSOR_MAP_SWIZZLE_32B),
            (Swizzle::B64, S::CU_TENSOR_MAP_SWIZZLE_64B),
            (Swizzle::B128, S::CU_TENSOR_MAP_SWIZZLE_128B),
        ];
        for (swizzle, code) in swizzles {
            assert_eq!(swizzle_code(swizzle), code as u32, "{swizzle:?}");
        }
    }

    #[test]
    fn what_no_map_can_have() {
        let b128 = Swizzle::B128;
        let cases = [
            (vec![64, 1, 1, 1, 1, 1], b128, "has 6 axes, allowed: 1 to 5; merge some"),
            (vec![64, 257], b128, "is moved in boxes of 257 elements along an axis, allowed: 1 to 256"),
            (vec![64, 0], b128, "is moved in boxes of 0 elements along an axis, allowed: 1 to 256"),
            (vec![12, 8], b128, "is moved in boxes of 24 bytes a row, allowed: multiples of 16"),
            (vec![128, 8], b128, "is moved in boxes of 256 bytes a row, allowed: up to 128 in its layout"),
            (vec![32, 8], Swizzle::B32, "is moved in boxes of 64 bytes a row, allowed: up to 32 in its layout"),
        ];
        for (extent, swizzle, want) in cases {
            let rank = extent.len();
            let tensor = tensor(Number::Bf16, &vec![512; rank], &vec![1024; rank - 1]);
            assert_eq!(MapArguments::new(&shape(Number::Bf16, &extent, swizzle), &tensor).unwrap_err(), want);
        }
    }
}
