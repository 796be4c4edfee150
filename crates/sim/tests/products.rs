//! Products of every element type, by warpgroups and by single warps, against f64; and what they cost.

use crate::common::{Random, download, sim, upload};
use fulgurite_ptx::device::{Device, Stream, Value};
use fulgurite_ptx::inst::{Arg, Class, Op, Reg};
use fulgurite_ptx::kernel::Stmt;
use fulgurite_ptx::model::{Adder, decode};
use fulgurite_ptx::table;
use fulgurite_ptx::{
    Acc, AccNumber, Builder, Kernel, Major, Number, Pointer, RowView, Sum, Swizzle, Target, Tile, TileShape, Val,
    WarpAcc, Warpgroups, Who, bf16, f16,
};
use fulgurite_sim::{Counts, Options, Sim};
use std::sync::Arc;

const ROWS: u32 = 64;
const COLS: u32 = 32;

/// Which unit multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Warpgroup,
    Warps,
}

/// A product of tiles of these types, `bytes` of the summed dimension in a row of either.
#[derive(Debug, Clone, Copy)]
struct Product {
    unit: Unit,
    numbers: [Number; 2],
    bytes: u32,
    majors: [Major; 2],
    swizzle: Option<Swizzle>,
}

/// The tile of an operand with so many rows of A or columns of B.
fn shape(product: &Product, side: usize, outer: u32) -> TileShape {
    let number = product.numbers[side];
    let inner = product.bytes / number.bytes();
    let shape = match product.majors[side] {
        Major::Inner => TileShape::new(number, outer, inner),
        Major::Outer => TileShape::new(number, inner, outer),
    };
    product.swizzle.map_or(shape, |swizzle| TileShape { swizzle, ..shape })
}

/// Fills a tile with rows of words that lie together.
fn fill<'k, W: Who>(
    w: &fulgurite_ptx::Scope<'k, W>,
    own: Val<'k, u32>,
    tile: Tile<'k>,
    shape: TileShape,
    from: Pointer<'k, u32>,
) {
    let units = shape.cols * shape.number.bytes() / 16;
    w.each(own, shape.rows * units, 128, |w, i| {
        tile.write_unit(w, i / units, i % units, from.load_some::<_, 4>(w, i * 4));
    });
}

fn build<N>(k: &Builder, product: Product)
where
    for<'k> N: AccNumber + Default + fulgurite_ptx::Word + fulgurite_ptx::IntoVal<'k, N>,
{
    let (a_shape, b_shape) = (shape(&product, 0, ROWS), shape(&product, 1, COLS));
    let [a, b] = ["a", "b"].map(|name| k.pointer::<u32>(name));
    let c = k.pointer::<N>("c");
    let (a_tile, b_tile) = (k.tile("a", a_shape), k.tile("b", b_shape));
    k.role("all", Warpgroups(1), |w| {
        let barrier = w.role_barrier();
        fill(w, w.thread(), a_tile, a_shape, a);
        fill(w, w.thread(), b_tile, b_shape, b);
        let operands = (a_tile.operand(product.majors[0]), b_tile.operand(product.majors[1]));
        match product.unit {
            Unit::Warpgroup => {
                w.publish_shared();
                w.sync_role(&barrier);
                let acc = w.accumulators_of::<N>(COLS);
                w.multiply(&acc, operands.0, operands.1, Sum::Fresh);
                w.wait_products(0);
                let (row, col) = (w.first_row(), w.first_col());
                for (i, x) in acc.values().enumerate() {
                    let row = row + 8 * Acc::row_of(i) as u32;
                    c.store(w, row * COLS + col + Acc::col_of(i), x);
                }
            }
            Unit::Warps => {
                w.sync_role(&barrier);
                // Two warps have 32 rows each, and the others the same with the other half of the columns.
                type View<'k> = WarpAcc<'k, 2>;
                let acc: WarpAcc<'_, 2, N> = w.warp_accumulators(COLS / 2);
                acc.clear();
                let warp = w.warp_in_role();
                let (row, col) = (warp % 2 * 32, warp / 2 * (COLS / 2));
                w.multiply_warp(&acc, (operands.0, row), (operands.1, col));
                for (i, x) in acc.elements().enumerate() {
                    let row = row + w.lane() / 4 + View::row_offset(View::row_of(i));
                    c.store(w, row * COLS + col + View::first_col(w) + View::col_of(i), x);
                }
            }
        }
    });
}

/// A random element of a type, as bits: floats of about one.
fn random(random: &mut Random, number: Number) -> u32 {
    let x = random.unit();
    match number {
        Number::F16 => u32::from(f16::from_f32(x).to_bits()),
        Number::Bf16 => u32::from(bf16::from_f32(x).to_bits()),
        Number::Tf32 => x.to_bits(),
        // Below the largest exponents, which are infinite or no number.
        Number::E4m3 | Number::E5m2 => (random.next() as u32) & 0xbf,
        _ => (random.next() as u32) & 0xff,
    }
}

/// Runs it on random tiles; what it cost.
fn check(target: Target, product: Product) -> Counts {
    let Product { unit, numbers, .. } = product;
    let integers = matches!(numbers[0], Number::S8 | Number::U8);
    let kernel = Kernel::build("product", target, |k| match integers {
        true => build::<i32>(k, product),
        false => build::<f32>(k, product),
    });
    let kernel = kernel.unwrap_or_else(|e| panic!("{product:?}: {e}"));
    let sim = Sim::on(target, Options::default());
    let mut rng = Random(7);
    let mut bits: [Vec<u32>; 2] = [Vec::new(), Vec::new()];
    let mut words: [Vec<u32>; 2] = [Vec::new(), Vec::new()];
    for side in 0..2 {
        let shape = shape(&product, side, [ROWS, COLS][side]);
        let per = 4 / shape.number.bytes();
        bits[side] = (0..shape.rows * shape.cols).map(|_| random(&mut rng, shape.number)).collect();
        let word = |chunk: &[u32]| (0..).zip(chunk).fold(0, |word, (i, x)| word | x << (32 / per * i));
        words[side] = bits[side].chunks(per as usize).map(word).collect();
    }
    let buffers = [upload(&sim, &words[0]), upload(&sim, &words[1]), upload(&sim, &vec![0u32; (ROWS * COLS) as usize])];
    let args: Vec<Value> = buffers.iter().map(|buffer| Value::Pointer(buffer.span())).collect();
    let module = sim.load(Arc::new(kernel)).unwrap();
    let done = sim.launch(&module, [1, 1, 1], &args, Stream::default());
    assert!(done.is_ok(), "{product:?}: {}", done.unwrap_err());
    let c = download(&sim, &buffers[2]);
    let inner = product.bytes / numbers[0].bytes();
    let element = |side: usize, outer: u32, i: u32| {
        let shape = shape(&product, side, [ROWS, COLS][side]);
        let at = match product.majors[side] {
            Major::Inner => outer * shape.cols + i,
            Major::Outer => i * shape.cols + outer,
        };
        decode(bits[side][at as usize], numbers[side])
    };
    for (row, col) in (0..ROWS).flat_map(|row| (0..COLS).map(move |col| (row, col))) {
        let terms = (0..inner).map(|i| element(0, row, i) * element(1, col, i));
        let (sum, size, largest) = terms.fold((0.0, 0.0f64, 0.0f64), |(sum, size, largest), x| {
            (sum + x, size + x.abs(), largest.max(x.abs()).max((sum + x).abs()))
        });
        let at = 4 * (row * COLS + col) as usize;
        let got = u32::from_le_bytes(c[at..at + 4].try_into().unwrap());
        match integers {
            true => assert_eq!(f64::from(got as i32), sum, "{product:?}: c[{row}][{col}]"),
            // What sums cut toward zero may lose: of 8-bit floats the adder keeps fewer bits below the largest term.
            false => {
                let adder = Adder::hopper(numbers[0]);
                let cuts = f64::from(inner + inner / numbers[0].depth());
                let lost = cuts * largest * f64::from(1 - adder.kept_bits).exp2();
                let bound = size * 2f64.powi(-20) + 1e-7 + if numbers[0].bytes() == 1 { lost } else { 0.0 };
                let error = (f64::from(f32::from_bits(got)) - sum).abs();
                assert!(error <= bound, "{product:?}: c[{row}][{col}] is off by {error}, allowed: {bound}");
            }
        }
    }
    let flops = 2 * u64::from(ROWS * COLS * inner);
    let counts = sim.report().total();
    assert_eq!(counts.tensor_flops.get(numbers[0].name()), Some(&flops), "{product:?}, {unit:?}");
    counts
}

const INNER: [Major; 2] = [Major::Inner; 2];

fn types() -> Vec<[Number; 2]> {
    use Number::{Bf16, E4m3, E5m2, F16, S8, Tf32, U8};
    vec![[F16; 2], [Bf16; 2], [Tf32; 2], [E4m3; 2], [E5m2; 2], [E4m3, E5m2], [E5m2, E4m3], [S8; 2], [U8; 2]]
}

#[test]
fn by_warpgroups() {
    for (numbers, bytes) in types().into_iter().flat_map(|n| [64, 128, 256].map(|bytes| (n, bytes))) {
        let product = Product { unit: Unit::Warpgroup, numbers, bytes, majors: INNER, swizzle: None };
        check(Target::HOPPER, product);
    }
}

#[test]
fn by_single_warps() {
    for name in ["sm_89", "sm_90a", "sm_120a"] {
        for (numbers, bytes) in types().into_iter().flat_map(|n| [32, 64, 128, 256].map(|bytes| (n, bytes))) {
            let product = Product { unit: Unit::Warps, numbers, bytes, majors: INNER, swizzle: None };
            let counts = check(Target::named(name).unwrap(), product);
            assert_eq!(counts.bank_conflicts, 0, "{product:?}");
        }
    }
    // Bytes of either sign.
    for numbers in [[Number::S8, Number::U8], [Number::U8, Number::S8]] {
        check(Target::AMPERE, Product { unit: Unit::Warps, numbers, bytes: 64, majors: INNER, swizzle: None });
    }
}

/// Operands that are contiguous along rows of A or columns of B.
#[test]
fn across_rows() {
    for unit in [Unit::Warpgroup, Unit::Warps] {
        for majors in [[Major::Inner, Major::Outer], [Major::Outer, Major::Inner], [Major::Outer; 2]] {
            for (number, bytes) in [(Number::Bf16, 64), (Number::F16, 128)] {
                let product = Product { unit, numbers: [number; 2], bytes, majors, swizzle: None };
                let counts = check(Target::HOPPER, product);
                assert_eq!(counts.bank_conflicts, 0, "{product:?}");
            }
        }
    }
}

/// Every swizzle spreads the eight rows that `ldmatrix` reads at a time over all banks.
#[test]
fn no_swizzle_has_bank_conflicts() {
    for (swizzle, bytes) in [(Swizzle::B32, 64), (Swizzle::B64, 128), (Swizzle::B128, 256)] {
        let numbers = [Number::Bf16; 2];
        let product = Product { unit: Unit::Warps, numbers, bytes, majors: INNER, swizzle: Some(swizzle) };
        assert_eq!(check(Target::AMPERE, product).bank_conflicts, 0, "{swizzle:?}");
    }
}

/// The passes of `ldmatrix` over the banks are counted for each matrix by itself. Without a swizzle the eight rows of each
/// lie in the same banks, and it takes eight passes.
#[test]
fn bank_conflicts_of_ldmatrix() {
    let conflicts = |x: &'static str, matrices: u64, swizzled: bool| {
        let mut kernel = Kernel::build("matrices", Target::AMPERE, |k| {
            let shared = k.shared::<u32>("x", 1024);
            k.threads(32, |w| {
                w.each(w.lane(), 1024, 32, |w, i| shared.store(w, i, i));
                w.sync_warp();
                let row = w.lane() & 7;
                let unit = w.lane() >> 3;
                let unit = if swizzled { unit ^ row } else { unit };
                let _ = shared.load(w, row * 32 + unit * 4);
            });
        })
        .unwrap();
        // The last load becomes `ldmatrix`: lanes give addresses, and each register is a matrix.
        let (mut loads, mut seen) = (0, 0);
        kernel.each_op(&mut |op| loads += u32::from(op.inst.name == "ld.shared.b32"));
        each_op_mut(&mut kernel.body, &mut |op| {
            seen += u32::from(op.inst.name == "ld.shared.b32");
            if op.inst.name == "ld.shared.b32" && seen == loads {
                let first = kernel.registers[Class::B32 as usize];
                let regs = (0..matrices as u32).map(|i| Reg { class: Class::B32, index: first + i });
                op.inst = table::rows().find(|inst| inst.name == "ldmatrix").unwrap();
                op.args = [Arg::List(regs.collect()), op.args[1].clone(), Arg::Word(x), Arg::Word("")].into();
            }
        });
        kernel.registers[Class::B32 as usize] += matrices as u32;
        let sim = sim(0);
        let module = sim.load(Arc::new(kernel)).unwrap();
        sim.launch(&module, [1, 1, 1], &[], Stream::default()).unwrap();
        sim.report().total().bank_conflicts
    };
    for (x, matrices) in [("x1", 1), ("x2", 2), ("x4", 4)] {
        assert_eq!(conflicts(x, matrices, true), 0, "{x}");
        assert_eq!(conflicts(x, matrices, false), 7 * matrices, "{x}");
    }
}

fn each_op_mut(block: &mut [Stmt], f: &mut dyn FnMut(&mut Op)) {
    for stmt in block {
        match stmt {
            Stmt::Op(op) => f(op),
            Stmt::If { then, otherwise, .. } => {
                each_op_mut(then, f);
                each_op_mut(otherwise, f);
            }
            Stmt::Loop { body, .. } => each_op_mut(body, f),
            Stmt::Break { .. } => {}
        }
    }
}
