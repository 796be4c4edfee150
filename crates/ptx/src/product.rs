//! Tensor products: which element each register of each thread holds, where the elements of a tile are in shared
//! memory, and the result of a product.
//!
//! The builder makes descriptors with [`TileShape::descriptor`], and the meaning of `wgmma` reads them back with
//! [`Descriptor::element`]. The two functions are tested against each other.

use crate::inst::Reg;
use crate::model;

/// Element types that tensor cores multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Number {
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// An f32 whose lower 13 bits are ignored.
    Tf32,
    /// 4 bits of exponent, 3 of fraction.
    E4m3,
    /// 5 bits of exponent, 2 of fraction.
    E5m2,
    /// Signed bytes.
    S8,
    /// Unsigned bytes.
    U8,
    /// Bytes of two numbers each, with 2 bits of exponent and 1 of fraction; the first is in the low half.
    E2m1x2,
    /// 32-bit float, for accumulators.
    F32,
    /// 32-bit signed integer, for accumulators of byte products.
    S32,
}

impl Number {
    /// Bytes of an element.
    pub const fn bytes(self) -> u32 {
        match self {
            Number::F16 | Number::Bf16 => 2,
            Number::Tf32 | Number::F32 | Number::S32 => 4,
            Number::E4m3 | Number::E5m2 | Number::S8 | Number::U8 | Number::E2m1x2 => 1,
        }
    }
    /// Name of the type in PTX.
    pub const fn name(self) -> &'static str {
        match self {
            Number::F16 => "f16",
            Number::Bf16 => "bf16",
            Number::Tf32 => "tf32",
            Number::E4m3 => "e4m3",
            Number::E5m2 => "e5m2",
            Number::S8 => "s8",
            Number::U8 => "u8",
            Number::E2m1x2 => "e2m1x2",
            Number::F32 => "f32",
            Number::S32 => "s32",
        }
    }
    /// The type with this PTX name.
    pub fn named(name: &str) -> Option<Number> {
        use Number::*;
        [F16, Bf16, Tf32, E4m3, E5m2, S8, U8, E2m1x2, F32, S32].into_iter().find(|n| n.name() == name)
    }
    /// Elements of the summed dimension that one instruction takes: 32 bytes.
    pub const fn depth(self) -> u32 {
        32 / self.bytes()
    }
    /// Numbers in an element.
    pub const fn packed(self) -> u32 {
        match self {
            Number::E2m1x2 => 2,
            _ => 1,
        }
    }
}

/// Spreads the rows of a tile over the banks of shared memory: 16-byte units within a line of this many bytes are
/// permuted depending on the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Swizzle {
    /// No permutation: rows of 16 bytes.
    None,
    /// Lines of 32 bytes.
    B32,
    /// Lines of 64 bytes.
    B64,
    /// Lines of 128 bytes.
    #[default]
    B128,
}

impl Swizzle {
    /// Bytes per line.
    pub const fn line(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }
    /// Bytes after which the pattern repeats, and to which tiles are aligned.
    pub const fn period(self) -> u32 {
        match self {
            Swizzle::None => 128,
            Swizzle::B32 => 256,
            Swizzle::B64 => 512,
            Swizzle::B128 => 1024,
        }
    }
    /// Address bits that change: `address ^ (address >> 3 & mask)`.
    pub const fn mask(self) -> u32 {
        match self {
            Swizzle::None => 0,
            Swizzle::B32 => 0x10,
            Swizzle::B64 => 0x30,
            Swizzle::B128 => 0x70,
        }
    }
    /// The swizzled address of a byte.
    pub const fn apply(self, address: u32) -> u32 {
        address ^ (address >> 3 & self.mask())
    }
    /// Code of the swizzle in a matrix descriptor.
    const fn code(self) -> u64 {
        match self {
            Swizzle::None => 0,
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            Swizzle::B32 => 3,
        }
    }
}

/// The contiguous dimension of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Major {
    /// The summed dimension.
    Inner,
    /// Rows of A, or columns of B.
    Outer,
}

/// A tile in shared memory: `rows` rows of `cols` elements. It is stored in chunks of one swizzle line's width, each
/// with all rows: `[cols / chunk][rows][chunk]`. TMA writes boxes of one line's width in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Element type.
    pub number: Number,
    /// Number of rows.
    pub rows: u32,
    /// Elements per row.
    pub cols: u32,
    /// Bank swizzle.
    pub swizzle: Swizzle,
}

impl TileShape {
    /// A tile with the widest swizzle that divides its row.
    pub fn new(number: Number, rows: u32, cols: u32) -> Self {
        let bytes = cols * number.bytes();
        let swizzle = [Swizzle::B128, Swizzle::B64, Swizzle::B32].into_iter().find(|s| bytes.is_multiple_of(s.line()));
        TileShape { number, rows, cols, swizzle: swizzle.unwrap_or(Swizzle::None) }
    }
    /// Elements per row of a chunk.
    pub const fn chunk(&self) -> u32 {
        self.swizzle.line() / self.number.bytes()
    }
    /// Number of chunks.
    pub const fn chunks(&self) -> u32 {
        self.cols.div_ceil(self.chunk())
    }
    /// Size of one chunk in bytes.
    pub const fn chunk_bytes(&self) -> u32 {
        self.rows * self.swizzle.line()
    }
    /// Size of the tile in bytes.
    pub const fn bytes(&self) -> u32 {
        self.chunks() * self.chunk_bytes()
    }
    /// Byte offset of an element from the start of the tile.
    pub const fn offset(&self, row: u32, col: u32) -> u32 {
        let (chunk, rest) = (col / self.chunk(), col % self.chunk());
        self.swizzle.apply(chunk * self.chunk_bytes() + row * self.swizzle.line() + rest * self.number.bytes())
    }

    /// The matrix descriptor of the tile as an operand, without its address.
    pub const fn descriptor(&self, major: Major) -> u64 {
        let (line, rows) = (self.swizzle.line() as u64, self.rows as u64);
        let (leading, stride) = match (self.swizzle, major) {
            // (distance to the next 8 of the inner dimension, distance to the next 8 of the outer), in bytes
            (Swizzle::None, Major::Inner) => (rows * 16, 128),
            (Swizzle::None, Major::Outer) => (128, rows * 16),
            // The leading distance of a swizzled tile is the distance between chunks; it is unused within a chunk.
            (_, Major::Inner) => (16, 8 * line),
            (_, Major::Outer) => (rows * line, 8 * line),
        };
        (leading >> 4) << 16 | (stride >> 4) << 32 | self.swizzle.code() << 62
    }

    /// Byte offset of the `step`-th part of the inner dimension that one instruction takes.
    pub const fn step(&self, major: Major, step: u32) -> u32 {
        match (self.swizzle, major) {
            (Swizzle::None, Major::Inner) => step * 2 * self.rows * 16,
            (Swizzle::None, Major::Outer) => step * 2 * 128,
            (swizzle, Major::Inner) => {
                let per_chunk = swizzle.line() / 32;
                step / per_chunk * self.chunk_bytes() + step % per_chunk * 32
            }
            (swizzle, Major::Outer) => step * self.number.depth() * swizzle.line(),
        }
    }
}

/// The fields of a matrix descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Byte address.
    pub address: u32,
    /// Leading distance in bytes.
    pub leading: u32,
    /// Distance between groups of eight, in bytes.
    pub stride: u32,
    /// Bank swizzle.
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes the 64 bits of a descriptor.
    pub fn decode(bits: u64) -> Self {
        let field = |at: u32| ((bits >> at & 0x3fff) as u32) << 4;
        let swizzle = [Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32][(bits >> 62) as usize];
        Descriptor { address: field(0), leading: field(16), stride: field(32), swizzle }
    }

    /// The shared-memory address of an operand's element. `outer` counts rows of A or columns of B; `inner` counts
    /// along the summed dimension of one instruction.
    pub fn element(&self, number: Number, major: Major, outer: u32, inner: u32) -> u32 {
        let bytes = number.bytes();
        let unit = 16 / bytes;
        let line = self.swizzle.line() / bytes;
        let linear = match (self.swizzle, major) {
            (Swizzle::None, Major::Inner) => {
                inner / unit * self.leading + outer / 8 * self.stride + outer % 8 * 16 + inner % unit * bytes
            }
            (Swizzle::None, Major::Outer) => {
                inner / 8 * self.leading + outer / unit * self.stride + inner % 8 * 16 + outer % unit * bytes
            }
            (swizzle, Major::Inner) => outer / 8 * self.stride + outer % 8 * swizzle.line() + inner * bytes,
            (swizzle, Major::Outer) => {
                outer / line * self.leading
                    + inner / 8 * self.stride
                    + inner % 8 * swizzle.line()
                    + outer % line * bytes
            }
        };
        self.swizzle.apply(self.address + linear)
    }
}

/// The first operand of a product.
#[derive(Debug, Clone, PartialEq)]
pub enum Left {
    /// A tile in shared memory: one descriptor, equal in all threads.
    Tile(u64, Major),
    /// Registers of each thread.
    Regs(Box<[Reg]>),
}

/// A product of a warpgroup with 64 rows: D = A B, or D += A B.
#[derive(Debug, Clone, PartialEq)]
pub struct Product {
    /// Accumulator registers.
    pub d: Box<[Reg]>,
    /// First operand, 64 x depth.
    pub a: Left,
    /// Second operand, depth x `n`.
    pub b: (u64, Major),
    /// Number of columns.
    pub n: u32,
    /// Types of D, A and B.
    pub numbers: [Number; 3],
    /// Whether the product adds to D.
    pub onto: bool,
    /// Whether A and B are negated.
    pub negate: [bool; 2],
    /// Whether integer sums saturate.
    pub saturate: bool,
}

/// Row and column of accumulator register `i` of a thread (0..128). For 16-bit accumulators, `i` counts halves.
pub const fn accumulator_element(thread: u32, i: u32) -> (u32, u32) {
    let (warp, lane) = (thread / 32, thread % 32);
    (16 * warp + lane / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane % 4) + i % 2)
}

/// Row and inner index of element `e` of register `i` of a thread's left operand (threads 0..128), for elements of
/// `bytes` bytes.
pub const fn left_element(thread: u32, i: u32, e: u32, bytes: u32) -> (u32, u32) {
    let (warp, lane) = (thread / 32, thread % 32);
    let per = 4 / bytes;
    (16 * warp + lane / 4 + 8 * (i % 2), per * (lane % 4) + e + 4 * per * (i / 2))
}

impl Product {
    /// The bits of every accumulator after the product, for each thread of the warpgroup, in the order of `d`.
    /// `register` reads a register of a thread, `shared` reads bytes of shared memory.
    pub fn run(
        &self,
        register: &mut dyn FnMut(u32, Reg) -> u32,
        shared: &mut dyn FnMut(u32, &mut [u8]),
    ) -> Vec<Vec<u32>> {
        let [_, number_a, number_b] = self.numbers;
        let depth = number_a.depth();
        let mut element = |bits: u64, number: Number, major: Major, outer: u32, inner: u32| {
            let mut word = [0; 4];
            let at = Descriptor::decode(bits).element(number, major, outer, inner);
            shared(at, &mut word[..number.bytes() as usize]);
            model::decode(u32::from_le_bytes(word), number)
        };
        let b: Vec<Vec<f64>> = (0..self.n)
            .map(|col| (0..depth).map(|i| element(self.b.0, number_b, self.b.1, col, i)).collect())
            .collect();
        let mut a = vec![vec![0.0; depth as usize]; 64];
        match &self.a {
            Left::Tile(bits, major) => {
                for (row, i) in (0..64).flat_map(|r| (0..depth).map(move |i| (r, i))) {
                    a[row as usize][i as usize] = element(*bits, number_a, *major, row, i);
                }
            }
            Left::Regs(regs) => {
                let bytes = number_a.bytes();
                for (thread, (i, &reg)) in (0..128).flat_map(|t| regs.iter().enumerate().map(move |r| (t, r))) {
                    let word = register(thread, reg);
                    for e in 0..4 / bytes {
                        let (row, inner) = left_element(thread, i as u32, e, bytes);
                        a[row as usize][inner as usize] = model::decode(word >> (8 * bytes * e), number_a);
                    }
                }
            }
        }
        let sign = if self.negate[0] != self.negate[1] { -1.0 } else { 1.0 };
        let factors = |row: u32, col: u32| -> Vec<[f64; 2]> {
            a[row as usize].iter().zip(&b[col as usize]).map(|(&x, &y)| [sign * x, y]).collect()
        };
        (0..128)
            .map(|thread| {
                let add = |(i, &reg): (usize, &Reg)| {
                    let old = if self.onto { register(thread, reg) } else { 0 };
                    accumulate(old, self.numbers, self.saturate, thread, i as u32, &factors)
                };
                self.d.iter().enumerate().map(add).collect()
            })
            .collect()
    }
}

/// Adds the products of its elements to accumulator register `i` of a thread: one element, or two of 16 bits.
fn accumulate(
    old: u32,
    [to, a, b]: [Number; 3],
    saturate: bool,
    thread: u32,
    i: u32,
    factors: &dyn Fn(u32, u32) -> Vec<[f64; 2]>,
) -> u32 {
    let per = 4 / to.bytes();
    (0..per).fold(0, |word, e| {
        let (row, col) = accumulator_element(thread, per * i + e);
        let sum = model::accumulate(old >> (8 * to.bytes() * e), &factors(row, col), to, [a, b], saturate);
        word | sum << (8 * to.bytes() * e)
    })
}

/// Inner index and column of element `e` of register `i` of a lane's right operand of `mma.sync`.
pub const fn right_element(lane: u32, i: u32, e: u32, bytes: u32) -> (u32, u32) {
    (4 / bytes * (lane % 4) + e + 16 / bytes * i, lane / 4)
}

/// A register of every lane of a warp.
pub type Lanes = [u32; 32];

/// D = A B + C of one warp, 16 rows and 8 columns: the definition. Operands and result are indexed by register and lane.
/// `numbers` are the types of D and C, of A, and of B.
pub fn mma_sync(numbers: [Number; 3], a: &[Lanes], b: &[Lanes], c: &[Lanes]) -> Vec<Lanes> {
    let [_, number_a, number_b] = numbers;
    let (bytes, depth) = (number_a.bytes(), number_a.depth());
    let (mut left, mut right) = (vec![vec![0.0; depth as usize]; 16], vec![vec![0.0; depth as usize]; 8]);
    for (lane, e) in (0..32).flat_map(|lane| (0..4 / bytes).map(move |e| (lane, e))) {
        for (i, words) in a.iter().enumerate() {
            let (row, inner) = left_element(lane, i as u32, e, bytes);
            left[row as usize][inner as usize] = model::decode(words[lane as usize] >> (8 * bytes * e), number_a);
        }
        for (i, words) in b.iter().enumerate() {
            let (inner, col) = right_element(lane, i as u32, e, bytes);
            right[col as usize][inner as usize] = model::decode(words[lane as usize] >> (8 * bytes * e), number_b);
        }
    }
    let factors = |row: u32, col: u32| -> Vec<[f64; 2]> {
        left[row as usize].iter().zip(&right[col as usize]).map(|(&x, &y)| [x, y]).collect()
    };
    let add = |lane: usize, i: usize| accumulate(c[i][lane], numbers, false, lane as u32, i as u32, &factors);
    (0..c.len()).map(|i| std::array::from_fn(|lane| add(lane, i))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TMA, the builder and the tensor core must agree on the address of every element.
    #[test]
    fn descriptors_find_what_tiles_hold() {
        for number in [Number::Bf16, Number::E4m3, Number::Tf32] {
            for swizzle in [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128] {
                let line = swizzle.line() / number.bytes();
                let tile = TileShape { number, rows: 64, cols: 2 * number.depth().max(line), swizzle };
                let depth = number.depth();
                for step in 0..tile.cols / depth {
                    let base = 4096 + tile.step(Major::Inner, step);
                    let d = Descriptor::decode(tile.descriptor(Major::Inner) | u64::from(base >> 4));
                    for (outer, inner) in (0..64).flat_map(|o| (0..depth).map(move |i| (o, i))) {
                        let want = 4096 + tile.offset(outer, step * depth + inner);
                        assert_eq!(d.element(number, Major::Inner, outer, inner), want, "{tile:?} {outer} {inner}");
                    }
                }
                if number.bytes() != 2 {
                    continue; // only 16-bit operands can be read across
                }
                for step in 0..tile.rows / depth {
                    let base = 4096 + tile.step(Major::Outer, step);
                    let d = Descriptor::decode(tile.descriptor(Major::Outer) | u64::from(base >> 4));
                    for (outer, inner) in (0..tile.cols).flat_map(|o| (0..depth).map(move |i| (o, i))) {
                        let want = 4096 + tile.offset(step * depth + inner, outer);
                        assert_eq!(d.element(number, Major::Outer, outer, inner), want, "{tile:?} {outer} {inner}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_descriptor_that_ran_on_hardware() {
        let tile = TileShape::new(Number::Bf16, 64, 64);
        assert_eq!(tile.descriptor(Major::Inner), 0x4000_0040_0001_0000);
    }
}
