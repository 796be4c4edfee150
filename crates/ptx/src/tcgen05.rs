//! Products of `tcgen05` as values: where the elements of operands and accumulators are, and how descriptors name them.
//!
//! Tensor memory has 128 lanes of 512 columns, each cell 32 bits. An address holds the lane above the column. The
//! builder makes descriptors from tiles, and a simulator reads them back with the functions of this module.

use crate::machine::MemoryAddress;
use crate::model;
use crate::product::{Descriptor, Major, Number, Swizzle};

/// Lanes of tensor memory.
pub const LANES: u32 = 128;
/// Columns of tensor memory.
pub const COLUMNS: u32 = 512;
/// Lanes that a warp can access: those of its position among the four warps of its warpgroup.
pub const WARP_LANES: u32 = 32;
/// The bit of a shared-memory descriptor that `tcgen05` requires in addition to those of `wgmma`.
pub(crate) const VERSION: u64 = 1 << 46;
/// Bytes of a block of scales: 128 rows, or columns of B, by four.
pub const SCALE_BLOCK_BYTES: u32 = 512;
/// Columns of tensor memory that a block of scales takes.
pub const SCALE_BLOCK_COLUMNS: u32 = 4;
/// The descriptor of a block of scales, without its address: rows of 16 bytes one after the other.
pub(crate) const SCALE_DESCRIPTOR: u64 = VERSION | (128 >> 4) << 32 | (16 >> 4) << 16;

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

/// What a product multiplies, as the instruction says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProductKind {
    /// 16-bit floats.
    F16,
    /// f32 whose lower bits are ignored.
    Tf32,
    /// 8-bit floats, of one type or of two.
    F8f6f4,
    /// Bytes.
    I8,
    /// 8-bit floats with a power of two for every 32 elements of a row (MXFP8).
    Mxf8f6f4,
    /// 4-bit floats with an 8-bit float for every 16 elements of a row (NVFP4).
    Nvf4,
}

/// The scale factors of a kind of product.
#[derive(Debug, Clone, Copy)]
pub struct ScaleKind {
    /// Elements of the summed dimension that share a scale.
    pub elements: u32,
    /// Scales of a row, or of a column, that one instruction reads: bytes of a cell of tensor memory.
    pub bytes: u32,
    /// The value of a scale.
    pub value: fn(u8) -> f32,
}

impl ProductKind {
    /// All kinds.
    pub const ALL: [ProductKind; 6] = [
        ProductKind::F16,
        ProductKind::Tf32,
        ProductKind::F8f6f4,
        ProductKind::I8,
        ProductKind::Mxf8f6f4,
        ProductKind::Nvf4,
    ];

    /// Its spelling in PTX, with the size of blocks.
    pub const fn word(self) -> &'static str {
        match self {
            ProductKind::F16 => "f16",
            ProductKind::Tf32 => "tf32",
            ProductKind::F8f6f4 => "f8f6f4",
            ProductKind::I8 => "i8",
            ProductKind::Mxf8f6f4 => "mxf8f6f4.block_scale.block32",
            ProductKind::Nvf4 => "mxf4nvf4.block_scale.block16",
        }
    }

    /// Types of operands, each with its code in a descriptor.
    pub const fn operands(self) -> &'static [(Number, u32)] {
        match self {
            ProductKind::F16 => &[(Number::F16, 0), (Number::Bf16, 1)],
            ProductKind::Tf32 => &[(Number::Tf32, 2)],
            ProductKind::F8f6f4 | ProductKind::Mxf8f6f4 => &[(Number::E4m3, 0), (Number::E5m2, 1)],
            ProductKind::I8 => &[(Number::U8, 0), (Number::S8, 1)],
            ProductKind::Nvf4 => &[(Number::E2m1x2, 1)],
        }
    }

    /// Type of the accumulators that the language uses.
    pub const fn sums(self) -> Number {
        match self {
            ProductKind::I8 => Number::S32,
            _ => Number::F32,
        }
    }

    /// Its scale factors, if it has some.
    pub const fn scales(self) -> Option<ScaleKind> {
        match self {
            ProductKind::Mxf8f6f4 => Some(ScaleKind { elements: 32, bytes: 1, value: model::from_ue8m0 }),
            ProductKind::Nvf4 => Some(ScaleKind { elements: 16, bytes: 4, value: model::from_ue4m3 }),
            _ => None,
        }
    }

    /// The kind of products of operands of these types, with or without scales.
    pub fn of([a, b]: [Number; 2], scaled: bool) -> Option<ProductKind> {
        let has = |kind: &ProductKind, number| kind.operands().iter().any(|&(known, _)| known == number);
        // Of 16-bit floats, both operands have the same type.
        let mixes = a == b || a.bytes() == 1;
        let fits = |kind: &ProductKind| kind.scales().is_some() == scaled && has(kind, a) && has(kind, b) && mixes;
        ProductKind::ALL.into_iter().find(fits)
    }
}

/// Shape, types and layouts of a product: the instruction descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductShape {
    /// What is multiplied.
    pub kind: ProductKind,
    /// Rows of A and D.
    pub rows: u32,
    /// Columns of B and D.
    pub cols: u32,
    /// Types of D, A and B.
    pub numbers: [Number; 3],
    /// Contiguous dimensions of A and B.
    pub majors: [Major; 2],
    /// The byte of a cell at which the scales of A and of B begin; 0 without scales.
    pub scale_bytes: [u32; 2],
}

/// Codes of the types of D.
const SUMS: [(Number, u32); 3] = [(Number::F16, 0), (Number::F32, 1), (Number::S32, 2)];

impl ProductShape {
    /// The 32 bits of the descriptor.
    pub fn encode(&self) -> u32 {
        let [d, a, b] = self.numbers;
        let code =
            |all: &[(Number, u32)], number| all.iter().find(|(known, _)| *known == number).map_or(7, |found| found.1);
        let [a, b] = [a, b].map(|number| code(self.kind.operands(), number));
        let [turn_a, turn_b] = self.majors.map(|major| u32::from(major == Major::Outer));
        let common = a << 7 | b << 10 | turn_a << 15 | turn_b << 16 | (self.cols >> 3) << 17;
        let [id_a, id_b] = self.scale_bytes;
        match self.kind.scales() {
            None => common | code(&SUMS, d) << 4 | (self.rows >> 4) << 24,
            Some(_) => {
                let powers = u32::from(self.kind == ProductKind::Mxf8f6f4);
                common | id_b << 4 | powers << 23 | (self.rows >> 7) << 27 | id_a << 29
            }
        }
    }

    /// Reads the bits of the descriptor of a product. The error says which of them no product of this kind has.
    pub fn decode(bits: u32, kind: ProductKind, group: CtaGroup) -> Result<ProductShape, String> {
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        let from = |at: u32| {
            let known = kind.operands().iter().find(|(_, code)| *code == field(at, 3));
            known.map(|found| found.0).ok_or_else(|| {
                let names = kind.operands().iter().map(|(number, code)| format!("{code} for {}", number.name()));
                format!("an operand type {}, allowed: {}", field(at, 3), names.collect::<Vec<_>>().join(", "))
            })
        };
        let (a, b) = (from(7)?, from(10)?);
        let types = 0b111 << 7 | 0b111 << 10;
        let sizes = 0b11 << 15 | 0x3f << 17;
        let (to, rows, scale_bytes, known) = match kind.scales() {
            None => {
                let to = SUMS.iter().find(|(_, code)| *code == field(4, 2)).map(|found| found.0);
                let halves = kind == ProductKind::F16 && [a, b] == [Number::F16; 2] || kind == ProductKind::F8f6f4;
                let to = match to {
                    Some(Number::F16) if kind == ProductKind::F16 && !halves => {
                        return Err("f16 accumulators of bf16 operands, allowed: f32 accumulators".into());
                    }
                    Some(to) if to == kind.sums() || to == Number::F16 && halves => to,
                    _ => {
                        let (sums, got) = (kind.sums().name(), field(4, 2));
                        return Err(format!("an accumulator type {got}, allowed: that of {sums}"));
                    }
                };
                (to, field(24, 5) << 4, [0; 2], types | sizes | 0b11 << 4 | 0x1f << 24)
            }
            Some(scales) => {
                let (ids, powers) = ([field(29, 2), field(4, 2)], field(23, 1) == 1);
                if powers != (kind == ProductKind::Mxf8f6f4) {
                    return Err("scales of the other type in bit 23".into());
                }
                if let Some(id) = ids.iter().find(|&&id| id + scales.bytes > 4) {
                    return Err(format!("scales from byte {id} of a cell, allowed: up to {}", 4 - scales.bytes));
                }
                (kind.sums(), field(27, 2) << 7, ids, types | sizes | 0b11 << 4 | 1 << 23 | 0b1111 << 27)
            }
        };
        if bits & !known != 0 {
            return Err(format!("bits {:#x}, allowed: types, layouts and sizes alone", bits & !known));
        }
        let cols = field(17, 6) << 3;
        if kind.scales().is_some() && group == CtaGroup::Single && rows != LANES {
            return Err(format!("{rows} rows with scales, allowed: {LANES}"));
        }
        let step = match (group, rows) {
            (CtaGroup::Pair, 256) if kind == ProductKind::I8 => 32,
            (CtaGroup::Single, 64) if kind != ProductKind::I8 => 8,
            (CtaGroup::Single, 64 | 128) | (CtaGroup::Pair, 256) => 16,
            (CtaGroup::Single, _) => return Err(format!("{rows} rows, allowed: 64 or 128")),
            (CtaGroup::Pair, _) => return Err(format!("{rows} rows of a pair, allowed: 256")),
        };
        if cols == 0 || cols > 256 || !cols.is_multiple_of(step) {
            return Err(format!("{cols} columns, allowed: multiples of {step} up to 256"));
        }
        let major = |at| if field(at, 1) == 1 { Major::Outer } else { Major::Inner };
        let majors = [major(15), major(16)];
        if majors.contains(&Major::Outer) && kind != ProductKind::F16 {
            return Err(format!("operands of {} across their rows, allowed: along them", kind.word()));
        }
        Ok(ProductShape { kind, rows, cols, numbers: [to, a, b], majors, scale_bytes })
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
    /// What is multiplied.
    pub kind: ProductKind,
    /// Addresses in tensor memory of the scales of A and of B.
    pub scales: Option<[u32; 2]>,
    /// Whether the product adds to D.
    pub onto: bool,
    /// CTAs that hold the operands and D: each CTA of a pair has half of the rows of A and D and half of the columns of
    /// B, at the same addresses.
    pub group: CtaGroup,
}

/// The side of a synchronisation on which a fence of tensor memory stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceSide {
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
    /// Starts a copy of 512 bytes of shared memory, the scales of 128 rows in four columns of 32 lanes, into every quarter of
    /// the lanes.
    CopyScales {
        /// Address of the first column.
        to: u32,
        /// Descriptor of the bytes in shared memory.
        from: u64,
        /// CTAs that each copy their own bytes.
        group: CtaGroup,
    },
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
    Fence(FenceSide),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::TileShape;

    /// Constants that the assembler and published kernels agree on.
    #[test]
    fn descriptors_that_others_print() {
        let shape = |cols, b| ProductShape {
            kind: ProductKind::F16,
            scale_bytes: [0; 2],
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
        let majors = [Major::Outer, Major::Inner];
        let f16 = ProductShape { rows: 64, cols: 72, numbers: [Number::F16; 3], majors, ..shape(8, Major::Inner) };
        for shape in [shape(96, Major::Outer), shape(256, Major::Inner), f16] {
            assert_eq!(ProductShape::decode(shape.encode(), shape.kind, CtaGroup::Single), Ok(shape));
        }
        let pair = |b| ProductShape { rows: 256, ..shape(128, b) };
        assert_eq!([Major::Inner, Major::Outer].map(|b| pair(b).encode()), [0x1020_0490, 0x1021_0490]);
        let pair = pair(Major::Outer);
        assert_eq!(ProductShape::decode(pair.encode(), pair.kind, CtaGroup::Pair), Ok(pair));
        assert_eq!([0, 127, 128, 255].map(|row| pair.lane(row)), [0, 127, 0, 127]);
    }

    /// Descriptors of the other kinds, with constants that the assembler's probes use where there are some.
    #[test]
    fn descriptors_of_every_kind() {
        let mut golden = 0;
        for kind in ProductKind::ALL {
            let types: Vec<Number> = kind.operands().iter().map(|(number, _)| *number).collect();
            for (&a, &b) in types.iter().flat_map(|a| types.iter().map(move |b| (a, b))) {
                for scale_bytes in [[0, 0], [1, 1], [3, 2]] {
                    let shape = ProductShape {
                        kind,
                        rows: 128,
                        cols: 128,
                        numbers: [kind.sums(), a, b],
                        majors: [Major::Inner; 2],
                        scale_bytes,
                    };
                    let (bits, read) = (shape.encode(), |bits| ProductShape::decode(bits, kind, CtaGroup::Single));
                    match kind.scales() {
                        None if scale_bytes != [0; 2] => continue,
                        Some(scales) if scale_bytes != [0; 2] && scales.bytes > 1 => {
                            assert!(read(bits).unwrap_err().contains("of a cell, allowed: up to 0"));
                            continue;
                        }
                        _ => {}
                    }
                    assert_eq!(read(bits), Ok(shape));
                    let known = match (kind, a, b, scale_bytes) {
                        (ProductKind::Mxf8f6f4, Number::E4m3, Number::E4m3, [0, 0]) => 0x08a0_0000,
                        (ProductKind::Mxf8f6f4, Number::E4m3, Number::E4m3, [1, 1]) => 0x28a0_0010,
                        (ProductKind::Nvf4, ..) => 0x0820_0480,
                        _ => continue,
                    };
                    assert_eq!(bits, known);
                    golden += 1;
                }
            }
        }
        assert_eq!(golden, 3);
        assert_eq!(ProductKind::of([Number::F16, Number::Bf16], false), None);
        assert_eq!(ProductKind::of([Number::E4m3, Number::E5m2], false), Some(ProductKind::F8f6f4));
        assert_eq!(ProductKind::of([Number::E4m3; 2], true), Some(ProductKind::Mxf8f6f4));
        assert_eq!(ProductKind::of([Number::U8, Number::S8], true), None);
        assert_eq!(SCALE_DESCRIPTOR, 0x0000_4008_0001_0000);
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
            let refused = ProductShape::decode(bits, ProductKind::F16, CtaGroup::Single).unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
        let pair = ProductShape::decode(good, ProductKind::F16, CtaGroup::Pair);
        assert_eq!(pair.unwrap_err(), "128 rows of a pair, allowed: 256");
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
