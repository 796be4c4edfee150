//! Plans a product: checks the matrices and makes the launch of [`gemm`].

use crate::gemm::{self, GemmCall, GemmConfig, GemmParams, Layouts};
use crate::params::Bindings;
use fulgurite_ptx::device::{Launch, Span, TensorSpan};
use fulgurite_ptx::{BuildError, Kernel, Major, Number, Target, bf16, f16};
use std::fmt;
use std::sync::{Arc, OnceLock};
use thiserror::Error;

/// Alignment that TMA needs of addresses and strides, in bytes.
const ALIGN: u64 = 16;
/// Kernels count rows, columns and tiles in 32 bits, and step at most one tile past the end.
const MOST: u64 = 1 << 31;

/// A batch of matrices in device memory, as they are stored: rows of contiguous elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Memory that starts at the first element.
    pub span: Span,
    /// Rows per matrix.
    pub rows: u64,
    /// Elements per row.
    pub cols: u64,
    /// Row stride in elements.
    pub row_stride: u64,
    /// Number of matrices.
    pub batch: u64,
    /// Batch stride in elements; 0 gives every product the same A or B.
    pub batch_stride: u64,
}

impl Matrix {
    /// A contiguous batch of matrices.
    pub fn packed(span: Span, rows: u64, cols: u64, batch: u64) -> Matrix {
        Matrix { span, rows, cols, row_stride: cols, batch, batch_stride: rows * cols }
    }
}

/// One of the two factors, or the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixName {
    /// The left factor.
    A,
    /// The right factor.
    B,
    /// The result.
    C,
}

impl fmt::Display for MatrixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MatrixName::A => "a",
            MatrixName::B => "b",
            MatrixName::C => "c",
        })
    }
}

/// The reason why a product was rejected before any launch.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GemmError {
    /// An element type that the kernel does not multiply.
    #[error("elements are {}, allowed: f16, bf16; convert them", got.name())]
    Number {
        /// Element type of the matrices.
        got: Number,
    },
    /// A dimension of size 0.
    #[error("`{matrix}` has {dimension} = 0, allowed: 1 or more; a product of nothing needs no launch")]
    Empty {
        /// Matrix in question.
        matrix: MatrixName,
        /// `rows`, `cols` or `batch`.
        dimension: &'static str,
    },
    /// A dimension that is too large.
    #[error("`{matrix}` has {dimension} = {got}, allowed: up to 2^31; split the product")]
    Large {
        /// Matrix in question.
        matrix: MatrixName,
        /// `rows`, `cols` or `batch`.
        dimension: &'static str,
        /// Size of the dimension.
        got: u64,
    },
    /// Dimensions that differ and must be equal.
    #[error("{dimension} is {left} in `{of}` and {right} in `{and}`; they must be the same")]
    Mismatch {
        /// `m`, `n`, `k` or `batch`.
        dimension: &'static str,
        /// Its size in the first matrix.
        left: u64,
        /// The first matrix.
        of: MatrixName,
        /// Its size in the second matrix.
        right: u64,
        /// The second matrix.
        and: MatrixName,
    },
    /// Rows or matrices that overlap in memory.
    #[error(
        "`{matrix}` has {stride} = {got}, allowed: {least} or more, so that they do not overlap; check the strides"
    )]
    Overlap {
        /// Matrix in question.
        matrix: MatrixName,
        /// `row_stride` or `batch_stride`.
        stride: &'static str,
        /// The stride, in elements.
        got: u64,
        /// The smallest stride without overlap, in elements.
        least: u64,
    },
    /// A stride that TMA does not support.
    #[error(
        "`{matrix}` has {stride} = {got} elements of {bytes} bytes, allowed: multiples of 16 bytes below 2^40; pad it, or copy it"
    )]
    Stride {
        /// Matrix in question.
        matrix: MatrixName,
        /// `row_stride` or `batch_stride`.
        stride: &'static str,
        /// The stride, in elements.
        got: u64,
        /// Bytes of an element.
        bytes: u64,
    },
    /// An address that TMA does not support.
    #[error("`{matrix}` lies at {address:#x}, allowed: multiples of 16 bytes; copy it to an aligned buffer")]
    Address {
        /// Matrix in question.
        matrix: MatrixName,
        /// The address.
        address: u64,
    },
    /// Memory that is too small.
    #[error("`{matrix}` reaches to byte {end} of memory of {bytes} bytes; check sizes and strides")]
    Memory {
        /// Matrix in question.
        matrix: MatrixName,
        /// Byte offset at which the matrices end.
        end: u64,
        /// Size of the memory in bytes.
        bytes: u64,
    },
    /// Fewer scales than the elements need.
    #[error(
        "`{matrix}` has scales of {got} bytes, allowed: {want} or more, in blocks of 128 rows by 4 scales; pad and reorder them with `ScaleLayout::Tiles128x4`"
    )]
    Scales {
        /// Matrix in question.
        matrix: MatrixName,
        /// Bytes of the memory.
        got: u64,
        /// Bytes of all scales.
        want: u64,
    },
    /// More tiles than the kernel can count.
    #[error("the product has {got} tiles, allowed: up to 2^31; split the batch")]
    Tiles {
        /// Number of tiles of the product.
        got: u64,
    },
}

/// A kind of product: everything that the kernel's text depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Element type of all three matrices.
    pub number: Number,
    /// Memory layouts of A and B.
    pub layouts: Layouts,
    /// The tile configuration.
    pub config: GemmConfig,
}

/// The reason why there is no kernel for a product.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The product cannot be computed.
    #[error(transparent)]
    Gemm(#[from] GemmError),
    /// The kernel cannot be built this way.
    #[error(transparent)]
    Build(#[from] BuildError),
}

impl Gemm {
    /// The kernel for products of this kind.
    pub fn kernel(&self, target: Target) -> Result<Kernel, KernelError> {
        match self.number {
            Number::F16 => Ok(gemm::kernel::<f16>(target, self.layouts, self.config)?),
            Number::Bf16 => Ok(gemm::kernel::<bf16>(target, self.layouts, self.config)?),
            got => Err(GemmError::Number { got }.into()),
        }
    }

    /// The launch of the kernel on a device with this many SMs.
    ///
    /// A is stored as `[m][k]` or `[k][m]` and B as `[n][k]` or `[k][n]`, by the layouts; C as `[m][n]`.
    pub fn launch(
        &self,
        kernel: Arc<Kernel>,
        [a, b, c]: [Matrix; 3],
        multiprocessors: u32,
    ) -> Result<Launch, GemmError> {
        if !matches!(self.number, Number::F16 | Number::Bf16) {
            return Err(GemmError::Number { got: self.number });
        }
        let (m, k) = outer_inner(&a, self.layouts.a);
        let (n, k_of_b) = outer_inner(&b, self.layouts.b);
        same("m", (m, MatrixName::A), (c.rows, MatrixName::C))?;
        same("n", (n, MatrixName::B), (c.cols, MatrixName::C))?;
        same("k", (k, MatrixName::A), (k_of_b, MatrixName::B))?;
        same("batch", (a.batch, MatrixName::A), (b.batch, MatrixName::B))?;
        same("batch", (a.batch, MatrixName::A), (c.batch, MatrixName::C))?;
        let tensors =
            [self.tensor(&a, MatrixName::A)?, self.tensor(&b, MatrixName::B)?, self.tensor(&c, MatrixName::C)?];
        let k_steps = k.div_ceil(u64::from(gemm::INNER)) as u32;
        let (call, blocks) = gemm_call(self, tensors, &c, k_steps, multiprocessors)?;
        Ok(bindings().launch(kernel, [blocks, 1, 1], &call))
    }

    /// A matrix as TMA sees it: `[inner, row, batch]`.
    pub(super) fn tensor(&self, matrix: &Matrix, id: MatrixName) -> Result<TensorSpan, GemmError> {
        let bytes = u64::from(self.number.bytes());
        let Matrix { span, rows, cols, row_stride, batch, batch_stride } = *matrix;
        for (dimension, got) in [("rows", rows), ("cols", cols), ("batch", batch)] {
            match got {
                0 => return Err(GemmError::Empty { matrix: id, dimension }),
                1..=MOST => {}
                _ => return Err(GemmError::Large { matrix: id, dimension, got }),
            }
        }
        if !span.address().is_multiple_of(ALIGN) {
            return Err(GemmError::Address { matrix: id, address: span.address() });
        }
        let stride = |name, count, got: u64, least: u64| {
            // The stride of an axis of size 1 may be anything. TMA still needs a valid one, below 2^40.
            if count == 1 {
                return Ok((least.min(1 << 36) * bytes).next_multiple_of(ALIGN));
            }
            let broadcast = name == BATCH_STRIDE && got == 0 && id != MatrixName::C;
            if got < least && !broadcast {
                return Err(GemmError::Overlap { matrix: id, stride: name, got, least });
            }
            match got.checked_mul(bytes) {
                Some(good) if good.is_multiple_of(ALIGN) && good < 1 << 40 => Ok(good),
                _ => Err(GemmError::Stride { matrix: id, stride: name, got, bytes }),
            }
        };
        // Sums saturate; no memory is large enough for that to matter.
        let row_bytes = stride("row_stride", rows, row_stride, cols)?;
        let matrix_elems = (rows - 1).saturating_mul(row_bytes / bytes).saturating_add(cols);
        let batch_bytes = stride(BATCH_STRIDE, batch, batch_stride, matrix_elems)?;
        let end = (batch - 1).saturating_mul(batch_bytes).saturating_add(matrix_elems.saturating_mul(bytes));
        if end > span.bytes() {
            return Err(GemmError::Memory { matrix: id, end, bytes: span.bytes() });
        }
        Ok(TensorSpan {
            span,
            number: self.number,
            extent: vec![cols, rows, batch],
            strides: vec![row_bytes, batch_bytes],
            ragged: None,
        })
    }
}

/// The call of a product with these operands, and its number of CTAs. `of` tells the type of C and the configuration.
pub(super) fn gemm_call(
    of: &Gemm,
    mut tensors: [TensorSpan; 3],
    c: &Matrix,
    k_steps: u32,
    multiprocessors: u32,
) -> Result<(GemmCall, u32), GemmError> {
    let (GemmConfig { rows, cols, cluster, .. }, m, n) = (of.config, c.rows, c.cols);
    // The CTAs of a cluster take tiles of C above each other.
    let (m_tiles, n_tiles) = (m.div_ceil(u64::from(rows * cluster)), n.div_ceil(u64::from(cols)));
    // Each factor is at most 2^31, and the first two are far smaller.
    let tiles = (m_tiles * n_tiles).saturating_mul(c.batch);
    if tiles > MOST {
        return Err(GemmError::Tiles { got: tiles });
    }
    let bytes = u64::from(of.number.bytes());
    let c_strides = [0, 1].map(|axis: usize| tensors[2].strides[axis] / bytes);
    // TMA writes whole units of 16 bytes, even past the last column: describe only whole units to it.
    let whole = n / u64::from(gemm::UNIT) * u64::from(gemm::UNIT);
    if whole > 0 {
        tensors[2].extent[0] = whole;
    }
    // One CTA per SM, in whole clusters.
    let blocks = (tiles as u32).min(multiprocessors / cluster).max(1) * cluster;
    let [a, b, c_tensor] = tensors;
    let call = GemmCall {
        a,
        b,
        c: c_tensor,
        m_tiles: m_tiles as u32,
        n_tiles: n_tiles as u32,
        k_steps,
        tiles: tiles as u32,
        m: m as u32,
        n: n as u32,
        c_memory: c.span,
        c_strides,
    };
    Ok((call, blocks))
}

/// The bindings of every product. They depend neither on the element type nor on layouts and configuration.
fn bindings() -> &'static Bindings<GemmCall> {
    static BINDINGS: OnceLock<Bindings<GemmCall>> = OnceLock::new();
    let layouts = Layouts { a: Major::Inner, b: Major::Inner };
    BINDINGS.get_or_init(|| {
        Bindings::declared(|p| {
            GemmParams::<bf16>::declare(p, layouts, GemmConfig::default());
        })
    })
}

const BATCH_STRIDE: &str = "batch_stride";

/// Rows of A or columns of B, and k.
pub(super) fn outer_inner(matrix: &Matrix, major: Major) -> (u64, u64) {
    match major {
        Major::Inner => (matrix.rows, matrix.cols),
        Major::Outer => (matrix.cols, matrix.rows),
    }
}

pub(super) fn same(
    dimension: &'static str,
    (left, of): (u64, MatrixName),
    (right, and): (u64, MatrixName),
) -> Result<(), GemmError> {
    if left == right {
        return Ok(());
    }
    Err(GemmError::Mismatch { dimension, left, of, right, and })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_ptx::device::{Value, check_launch};
    use fulgurite_ptx::kernel::ParamKind;

    const LAYOUTS: [Layouts; 4] = [
        Layouts { a: Major::Inner, b: Major::Inner },
        Layouts { a: Major::Inner, b: Major::Outer },
        Layouts { a: Major::Outer, b: Major::Inner },
        Layouts { a: Major::Outer, b: Major::Outer },
    ];

    fn gemm(layouts: Layouts) -> Gemm {
        Gemm { number: Number::Bf16, layouts, config: GemmConfig::default() }
    }

    fn stored(major: Major, outer: u64, inner: u64) -> (u64, u64) {
        match major {
            Major::Inner => (outer, inner),
            Major::Outer => (inner, outer),
        }
    }

    /// A batch of three matrices with padded rows.
    fn matrices(layouts: Layouts, [m, n, k]: [u64; 3]) -> [Matrix; 3] {
        let shapes = [stored(layouts.a, m, k), stored(layouts.b, n, k), (m, n)];
        shapes.map(|(rows, cols)| {
            let row_stride = cols.next_multiple_of(8) + 8;
            let span = Span::new(0x1000, 3 * rows * row_stride * 2);
            Matrix { span, rows, cols, row_stride, batch: 3, batch_stride: rows * row_stride }
        })
    }

    #[test]
    fn launches_pass_the_devices_check() {
        for layouts in LAYOUTS {
            let gemm = gemm(layouts);
            let kernel = Arc::new(gemm.kernel(Target::HOPPER).unwrap());
            let launch = gemm.launch(kernel, matrices(layouts, [300, 520, 100]), 132).unwrap();
            check_launch(&launch.kernel, launch.grid, &launch.args).unwrap();
            let tiles = 3 * 3 * 3; // 300 rows and 520 columns in tiles of 128 x 256, three times
            assert_eq!(launch.grid, [tiles, 1, 1]);
            assert_eq!(launch.args[3..9], [3, 3, 2, tiles, 300, 520].map(Value::U32));
        }
    }

    /// The step size assumed here is the one that the kernel uses.
    #[test]
    fn the_kernel_takes_such_steps() {
        let kernel = gemm(LAYOUTS[3]).kernel(Target::HOPPER).unwrap();
        for param in &kernel.params[..2] {
            let ParamKind::Tensor(shape) = &param.kind else { panic!("{param:?}") };
            assert_eq!(shape.extent[1], gemm::INNER);
        }
    }

    #[test]
    fn a_large_grid_has_one_block_a_multiprocessor() {
        let gemm = gemm(LAYOUTS[0]);
        let kernel = Arc::new(gemm.kernel(Target::HOPPER).unwrap());
        let launch = gemm.launch(kernel.clone(), matrices(LAYOUTS[0], [4096, 4096, 64]), 132).unwrap();
        assert_eq!(launch.grid, [132, 1, 1]);
        let pairs = Gemm { config: GemmConfig { cluster: 2, ..gemm.config }, ..gemm };
        let grid =
            |multiprocessors| pairs.launch(kernel.clone(), matrices(LAYOUTS[0], [300, 200, 64]), multiprocessors);
        assert_eq!(grid(131).unwrap().grid, [12, 1, 1]);
        assert_eq!(grid(7).unwrap().grid, [6, 1, 1]);
        assert_eq!(grid(1).unwrap().grid, [2, 1, 1]);
    }

    #[test]
    fn strides_that_are_not_taken_may_be_anything() {
        let gemm = gemm(LAYOUTS[0]);
        let kernel = Arc::new(gemm.kernel(Target::HOPPER).unwrap());
        let span = |bytes| Span::new(0, bytes);
        let a = Matrix { span: span(14), rows: 1, cols: 7, row_stride: 3, batch: 1, batch_stride: 0 };
        let b = Matrix { span: span(14), rows: 1, cols: 7, row_stride: 0, batch: 1, batch_stride: 5 };
        let c = Matrix { span: span(2), rows: 1, cols: 1, row_stride: 0, batch: 1, batch_stride: 0 };
        let launch = gemm.launch(kernel, [a, b, c], 132).unwrap();
        check_launch(&launch.kernel, launch.grid, &launch.args).unwrap();
    }

    #[test]
    fn one_factor_for_a_whole_batch() {
        let gemm = gemm(LAYOUTS[0]);
        let kernel = Arc::new(gemm.kernel(Target::HOPPER).unwrap());
        let mut given = matrices(LAYOUTS[0], [64, 64, 64]);
        given[1].batch_stride = 0;
        let launch = gemm.launch(kernel.clone(), given, 132).unwrap();
        check_launch(&launch.kernel, launch.grid, &launch.args).unwrap();
        given[2].batch_stride = 0;
        assert!(matches!(gemm.launch(kernel, given, 132), Err(GemmError::Overlap { matrix: MatrixName::C, .. })));
    }

    /// A change to a valid launch, and the full text of the resulting error.
    type Fault = (fn(&mut Gemm, &mut [Matrix; 3]), &'static str);

    #[test]
    fn refusals_say_how_to_repair_the_call() {
        let faults: &[Fault] = &[
            (|gemm, _| gemm.number = Number::F32, "elements are f32, allowed: f16, bf16; convert them"),
            (|_, [a, ..]| a.rows = 63, "m is 63 in `a` and 64 in `c`; they must be the same"),
            (|_, [_, b, _]| b.rows = 63, "n is 63 in `b` and 64 in `c`; they must be the same"),
            (|_, [_, b, _]| b.cols = 63, "k is 64 in `a` and 63 in `b`; they must be the same"),
            (|_, [_, b, _]| b.batch = 2, "batch is 3 in `a` and 2 in `b`; they must be the same"),
            (|_, [.., c]| c.batch = 2, "batch is 3 in `a` and 2 in `c`; they must be the same"),
            (
                |_, [a, b, _]| [a.cols, b.cols] = [0, 0],
                "`a` has cols = 0, allowed: 1 or more; a product of nothing needs no launch",
            ),
            (
                |_, [a, _, c]| [a.rows, c.rows] = [1 << 32; 2],
                "`a` has rows = 4294967296, allowed: up to 2^31; split the product",
            ),
            (
                |_, [a, ..]| a.row_stride = 60,
                "`a` has row_stride = 60, allowed: 64 or more, so that they do not overlap; check the strides",
            ),
            (
                |_, [.., c]| c.batch_stride = 4000,
                "`c` has batch_stride = 4000, allowed: 4600 or more, so that they do not overlap; check the strides",
            ),
            (
                |_, [_, b, _]| b.row_stride = 68,
                "`b` has row_stride = 68 elements of 2 bytes, allowed: multiples of 16 bytes below 2^40; pad it, or copy it",
            ),
            (
                |_, [a, ..]| a.span = Span::new(0x1008, a.span.bytes()),
                "`a` lies at 0x1008, allowed: multiples of 16 bytes; copy it to an aligned buffer",
            ),
            (
                |_, [_, b, _]| (b.row_stride, b.batch_stride) = (1 << 38, 1 << 63),
                "`b` has batch_stride = 9223372036854775808 elements of 2 bytes, allowed: multiples of 16 bytes below 2^40; \
                 pad it, or copy it",
            ),
            (
                |_, [.., c]| c.span = c.span.first(1000),
                "`c` reaches to byte 27632 of memory of 1000 bytes; check sizes and strides",
            ),
        ];
        for (fault, want) in faults {
            let (mut gemm, mut given) = (gemm(LAYOUTS[0]), matrices(LAYOUTS[0], [64, 64, 64]));
            let kernel = Arc::new(gemm.kernel(Target::HOPPER).unwrap());
            fault(&mut gemm, &mut given);
            assert_eq!(gemm.launch(kernel, given, 132).err().map(|e| e.to_string()).as_deref(), Some(*want));
        }
    }
}
