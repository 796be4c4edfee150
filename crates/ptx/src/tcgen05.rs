//! Products of `tcgen05` as values: where the elements of operands and accumulators are, and how descriptors name them.
//!
//! Tensor memory has 128 lanes of 512 columns, each cell 32 bits. An address holds the lane above the column. The
//! builder makes descriptors from tiles, and a simulator reads them back with the functions of this module.

use crate::machine::MemoryAddress;
use crate::product::{Descriptor, Major, Number, Swizzle};

/// Lanes of tensor memory.
pub const LANES: u32 = 128;
/// Columns of tensor memory.
pub const COLUMNS: u32 = 512;
/// Lanes that a warp can access: those of its position among the four warps of its warpgroup.
pub const WARP_LANES: u32 = 32;
/// The bit of a shared-memory descriptor that `tcgen05` requires in addition to those of `wgmma`.
pub(crate) const VERSION: u64 = 1 << 46;

/// Lane and column of an address in tensor memory.
pub const fn lane_and_column(address: u32) -> [u32; 2] {
    [address >> 16, address & 0xffff]
}

/// The CTAs to which an allocation, a product or a commit belongs. A kernel uses one of the two throughout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CtaGroup {
    /// One CTA.
    Single,
    /// Two CTAs of a cluster whose ranks differ in the lowest bit. The one with the even rank leads.
    Pair,
}

impl CtaGroup {
    /// Its words in PTX.
    pub(crate) const WORDS: &'static [&'static str] = &["1", "2"];

    /// Number of CTAs.
    pub const fn ctas(self) -> u32 {
        match self {
            CtaGroup::Single => 1,
            CtaGroup::Pair => 2,
        }
    }
    /// Its word in PTX.
    pub const fn word(self) -> &'static str {
        CtaGroup::WORDS[self.ctas() as usize - 1]
    }
    /// The group with this word in PTX.
    pub(crate) fn named(word: &str) -> Self {
        if word == CtaGroup::Single.word() { CtaGroup::Single } else { CtaGroup::Pair }
    }
    /// Rank in the cluster of each of its CTAs, for a CTA that belongs to it.
    pub fn ranks(self, own: usize) -> std::ops::Range<usize> {
        match self {
            CtaGroup::Single => own..own + 1,
            CtaGroup::Pair => own & !1..(own & !1) + 2,
        }
    }
}

/// Shape, types and layouts of a product: the instruction descriptor of 16-bit operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductShape {
    /// Rows of A and D.
    pub rows: u32,
    /// Columns of B and D.
    pub cols: u32,
    /// Types of D, A and B.
    pub numbers: [Number; 3],
    /// Contiguous dimensions of A and B.
    pub majors: [Major; 2],
}

impl ProductShape {
    /// The 32 bits of the descriptor.
    pub fn encode(&self) -> u32 {
        let [d, a, b] = self.numbers.map(|number| u32::from(!matches!(number, Number::F16)));
        let [turn_a, turn_b] = self.majors.map(|major| u32::from(major == Major::Outer));
        d << 4 | a << 7 | b << 10 | turn_a << 15 | turn_b << 16 | (self.cols >> 3) << 17 | (self.rows >> 4) << 24
    }

    /// Reads the bits of a descriptor. The error says which of them no product of 16-bit operands has.
    pub fn decode(bits: u32, group: CtaGroup) -> Result<ProductShape, String> {
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        let to = match field(4, 2) {
            0 => Number::F16,
            1 => Number::F32,
            other => return Err(format!("an accumulator type {other}, allowed: 0 for f16, 1 for f32")),
        };
        let from = |at: u32| match field(at, 3) {
            0 => Ok(Number::F16),
            1 => Ok(Number::Bf16),
            other => Err(format!("an operand type {other}, allowed: 0 for f16, 1 for bf16")),
        };
        let (a, b) = (from(7)?, from(10)?);
        if to == Number::F16 && (a, b) != (Number::F16, Number::F16) {
            return Err("f16 accumulators of bf16 operands, allowed: f32 accumulators".into());
        }
        let other = bits & !(0b11 << 4 | 0b111 << 7 | 0b111 << 10 | 0b11 << 15 | 0x3f << 17 | 0x1f << 24);
        if other != 0 {
            return Err(format!("bits {other:#x}, allowed: types, layouts and sizes alone"));
        }
        let (rows, cols) = (field(24, 5) << 4, field(17, 6) << 3);
        let step = match (group, rows) {
            (CtaGroup::Single, 64) => 8,
            (CtaGroup::Single, 128) | (CtaGroup::Pair, 256) => 16,
            (CtaGroup::Single, _) => return Err(format!("{rows} rows, allowed: 64 or 128")),
            (CtaGroup::Pair, _) => return Err(format!("{rows} rows of a pair, allowed: 256")),
        };
        if cols == 0 || cols > 256 || !cols.is_multiple_of(step) {
            return Err(format!("{cols} columns, allowed: multiples of {step} up to 256"));
        }
        let major = |at| if field(at, 1) == 1 { Major::Outer } else { Major::Inner };
        Ok(ProductShape { rows, cols, numbers: [to, a, b], majors: [major(15), major(16)] })
    }

    /// The lane that holds a row. Of 256 rows, the first CTA of the pair has 128, and the second CTA the others.
    pub const fn lane(&self, row: u32) -> u32 {
        if self.rows == 64 { row % 16 + 32 * (row / 16) } else { row % LANES }
    }
}

/// Reads a shared-memory descriptor of `tcgen05`. The error says which of its bits are wrong.
pub fn descriptor(bits: u64) -> Result<Descriptor, String> {
    let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
    if field(46, 3) != 1 {
        return Err(format!("a descriptor of version {}, allowed: 1 in bits 46 to 48", field(46, 3)));
    }
    if !matches!(field(61, 3), 0 | 2 | 4 | 6) {
        return Err(format!("swizzle {} in bits 61 to 63, allowed: 0, 2, 4, 6", field(61, 3)));
    }
    let others = [(14, 2), (30, 2), (49, 12)].into_iter().find(|&(at, width)| field(at, width) != 0);
    if let Some((at, width)) = others {
        return Err(format!("{:#x} in bits {at} to {}, allowed: 0", field(at, width), at + width - 1));
    }
    let read = Descriptor::decode(bits);
    // The swizzle permutes address bits, so an operand starts in the first line of a period.
    let (within, period) = (read.address % read.swizzle.period(), read.swizzle.period());
    if read.swizzle != Swizzle::None && within >= read.swizzle.line() {
        return Err(format!(
            "a start {within} bytes into a swizzle period of {period}, allowed: inside its first line"
        ));
    }
    Ok(read)
}

/// The first operand of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorLeft {
    /// A tile in shared memory, by its descriptor.
    Tile(u64),
    /// An address in tensor memory: two 16-bit elements to a cell, a row to a lane.
    Memory(u32),
}

/// A product into tensor memory: D = A B, or D += A B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorProduct {
    /// Address of D in tensor memory.
    pub d: u32,
    /// First operand.
    pub a: TensorLeft,
    /// Descriptor of the second operand.
    pub b: u64,
    /// Instruction descriptor, see [`ProductShape`].
    pub shape: u32,
    /// Whether the product adds to D.
    pub onto: bool,
    /// CTAs that hold the operands and D: each CTA of a pair has half of the rows of A and D and half of the columns of
    /// B, at the same addresses.
    pub group: CtaGroup,
}

/// The side of a synchronisation on which a fence of tensor memory stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Before the thread signals.
    Before,
    /// After the thread has waited.
    After,
}

/// An operation on tensor memory or on the queue of its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorAction {
    /// Allocates columns and writes their address to shared memory.
    Allocate {
        /// Where the address goes.
        to: MemoryAddress,
        /// Number of columns.
        columns: u32,
        /// CTAs that allocate together.
        group: CtaGroup,
    },
    /// The CTAs allocate no more.
    Relinquish(CtaGroup),
    /// Frees columns.
    Free {
        /// Address of the first one.
        address: u32,
        /// Number of columns.
        columns: u32,
        /// CTAs that free together.
        group: CtaGroup,
    },
    /// Starts a product.
    Multiply(TensorProduct),
    /// Arrives at mbarriers when all earlier products of the thread are complete.
    Commit {
        /// The mbarrier, or its offset in several CTAs.
        bar: MemoryAddress,
        /// Mask of the CTAs of the cluster whose mbarriers are signalled; `None`: the CTA that `bar` is in.
        multicast: Option<u16>,
        /// CTAs of the products.
        group: CtaGroup,
    },
    /// Waits for the warp's loads.
    WaitLoads,
    /// Waits for the warp's stores.
    WaitStores,
    /// Orders the thread's accesses with a synchronisation of threads.
    Fence(Side),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::TileShape;

    /// Constants that the assembler and published kernels agree on.
    #[test]
    fn descriptors_that_others_print() {
        let shape = |cols, b| ProductShape {
            rows: 128,
            cols,
            numbers: [Number::F32, Number::Bf16, Number::Bf16],
            majors: [Major::Inner, b],
        };
        assert_eq!(shape(128, Major::Inner).encode(), 0x0820_0490);
        assert_eq!(shape(128, Major::Outer).encode(), 0x0821_0490);
        let tile = TileShape::new(Number::Bf16, 128, 128);
        assert_eq!(tile.descriptor(Major::Inner) | VERSION, 0x4000_4040_0001_0000);
        assert_eq!(tile.descriptor(Major::Outer) | VERSION, 0x4000_4040_0400_0000);
        let f16 = ProductShape { rows: 64, cols: 72, numbers: [Number::F16; 3], majors: [Major::Outer, Major::Inner] };
        for shape in [shape(96, Major::Outer), shape(256, Major::Inner), f16] {
            assert_eq!(ProductShape::decode(shape.encode(), CtaGroup::Single), Ok(shape));
        }
        let pair = |b| ProductShape { rows: 256, ..shape(128, b) };
        assert_eq!([Major::Inner, Major::Outer].map(|b| pair(b).encode()), [0x1020_0490, 0x1021_0490]);
        let pair = pair(Major::Outer);
        assert_eq!(ProductShape::decode(pair.encode(), CtaGroup::Pair), Ok(pair));
        assert_eq!([0, 127, 128, 255].map(|row| pair.lane(row)), [0, 127, 0, 127]);
    }

    #[test]
    fn wrong_descriptors_are_named() {
        let good = 0x0820_0490u32;
        for (bits, part) in [
            (good ^ 0x10, "f16 accumulators of bf16"),
            (good | 2 << 4, "accumulator type 3"),
            (good + (1 << 24), "144 rows"),
            (good + (1 << 17), "136 columns"),
            (good | 1 << 2, "bits 0x4"),
            (good | 3 << 7, "operand type 3"),
        ] {
            let refused = ProductShape::decode(bits, CtaGroup::Single).unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
        assert_eq!(ProductShape::decode(good, CtaGroup::Pair).unwrap_err(), "128 rows of a pair, allowed: 256");
        let good = TileShape::new(Number::Bf16, 128, 64).descriptor(Major::Inner) | VERSION | 64;
        assert_eq!(descriptor(good).map(|d| (d.address, d.swizzle)), Ok((1024, Swizzle::B128)));
        for (bits, part) in [
            (good & !VERSION, "version 0"),
            (good | 1 << 61, "swizzle 3"),
            (good + (128 >> 4), "128 bytes into a swizzle period"),
            (good | 1 << 49, "bits 49 to 60"),
        ] {
            let refused = descriptor(bits).unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
    }
}
