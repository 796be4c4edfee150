//! Products against a plain product in f64: small integers, so that every order and rounding gives the same.

use super::machine::{Given, Warp, execute};
use fulgurite_ptx::inst::{Class, Inst, Reg};
use fulgurite_ptx::model;
use fulgurite_ptx::product::{Left, Major, Product};
use fulgurite_ptx::table::tensor;
use fulgurite_ptx::{Number, Swizzle, TileShape, bf16, f16};

/// Small numbers with a pattern that repeats at no size in use; only values that every type holds.
fn element(row: u32, col: u32, seed: u32) -> f64 {
    f64::from((row * 31 + col * 17 + seed * 7 + row * col) % 4)
}
/// The same, with signs where the type has them.
fn signed(number: Number, row: u32, col: u32, seed: u32) -> f64 {
    let x = element(row, col, seed);
    if number != Number::U8 && (row + 2 * col + seed).is_multiple_of(3) { -x } else { x }
}

fn encode(x: f64, number: Number) -> u32 {
    match number {
        Number::F16 => f16::from_f64(x).to_bits().into(),
        Number::Bf16 => bf16::from_f64(x).to_bits().into(),
        Number::Tf32 | Number::F32 => (x as f32).to_bits(),
        Number::E4m3 | Number::E5m2 => model::to_fp8(x as f32, number).into(),
        Number::S8 => (x as i8 as u8).into(),
        Number::U8 => (x as u8).into(),
        Number::S32 => x as i32 as u32,
        Number::E2m1x2 => panic!("warps and warpgroups multiply no 4-bit floats"),
    }
}

/// Elements packed into a register, the first in the low bits.
fn pack(number: Number, elements: impl Iterator<Item = f64>) -> u32 {
    elements.enumerate().fold(0, |word, (e, x)| word | encode(x, number) << (8 * number.bytes() * e as u32))
}

/// Row and column of element `i` of a thread's accumulators, read off the manual's figure: four elements of eight
/// columns, two in row lane / 4 and two in the eighth row below.
fn accumulator(thread: u32, i: u32) -> (u32, u32) {
    let (warp, group, quad) = (thread / 32, thread % 32 / 4, thread % 4);
    let (down, right) = [(0, 0), (0, 1), (8, 0), (8, 1)][i as usize % 4];
    (16 * warp + group + down, 8 * (i / 4) + 2 * quad + right)
}
/// Row and inner index of element `e` of register `i` of a thread's A, likewise; `per` elements fill a register.
fn left_operand(thread: u32, i: u32, e: u32, per: u32) -> (u32, u32) {
    let (warp, group, quad) = (thread / 32, thread % 32 / 4, thread % 4);
    let (down, right) = [(0, 0), (8, 0), (0, 4), (8, 4)][i as usize];
    (16 * warp + group + down, per * (quad + right) + e)
}

struct Case {
    numbers: [Number; 3],
    n: u32,
    swizzle: Swizzle,
    /// How A lies; none: in registers.
    a: Option<Major>,
    b: Major,
    onto: bool,
}

/// Writes an operand with `outer` rows of A or columns of B, and one instruction's depth, as a tile at `base`.
fn tile(
    shared: &mut [u8],
    base: u32,
    number: Number,
    major: Major,
    outer: u32,
    swizzle: Swizzle,
    f: &dyn Fn(u32, u32) -> f64,
) -> u64 {
    let line = swizzle.line() / number.bytes();
    let (rows, cols) = match major {
        Major::Inner => (outer, number.depth().next_multiple_of(line)),
        Major::Outer => (number.depth(), outer.next_multiple_of(line)),
    };
    let shape = TileShape { number, rows, cols, swizzle };
    for (o, i) in (0..outer).flat_map(|o| (0..number.depth()).map(move |i| (o, i))) {
        let (row, col) = if major == Major::Inner { (o, i) } else { (i, o) };
        let at = (base + shape.offset(row, col)) as usize;
        let bytes = number.bytes() as usize;
        shared[at..at + bytes].copy_from_slice(&encode(f(o, i), number).to_le_bytes()[..bytes]);
    }
    shape.descriptor(major) | u64::from(base >> 4)
}

fn check(case: &Case) {
    let [to, number_a, number_b] = case.numbers;
    let a = |row, i| signed(number_a, row, i, 1);
    let b = |col, i| signed(number_b, col, i, 2);
    let c = |row, col| signed(to, row, col, 3);
    let mut shared = vec![0; 1 << 17];
    let count = case.n * to.bytes() / 8;
    let d: Box<[Reg]> = (0..count).map(|index| Reg { class: Class::B32, index }).collect();
    let left: Box<[Reg]> = (0..4).map(|i| Reg { class: Class::B32, index: 1000 + i }).collect();
    let product = Product {
        a: match case.a {
            Some(major) => Left::Tile(tile(&mut shared, 1024, number_a, major, 64, case.swizzle, &a), major),
            None => Left::Regs(left),
        },
        b: (tile(&mut shared, 1 << 16, number_b, case.b, case.n, case.swizzle, &b), case.b),
        d,
        n: case.n,
        numbers: case.numbers,
        onto: case.onto,
        negate: [false; 2],
        saturate: false,
    };
    let per = 4 / to.bytes();
    let elements = |thread: u32, reg: u32| (0..per).map(move |e| accumulator(thread, per * reg + e));
    let mut register = |thread: u32, reg: Reg| match reg.index {
        i if i >= 1000 => {
            let per = 4 / number_a.bytes();
            let parts = (0..per).map(|e| left_operand(thread, i - 1000, e, per));
            pack(number_a, parts.map(|(row, inner)| a(row, inner)))
        }
        i => pack(to, elements(thread, i).map(|(row, col)| c(row, col))),
    };
    let mut memory = |at: u32, bytes: &mut [u8]| bytes.copy_from_slice(&shared[at as usize..at as usize + bytes.len()]);
    let got = product.run(&mut register, &mut memory);
    assert_eq!(got.len(), 128);
    for (thread, regs) in got.iter().enumerate() {
        for (i, &bits) in regs.iter().enumerate() {
            let want = elements(thread as u32, i as u32).map(|(row, col)| {
                let sum: f64 = (0..number_a.depth()).map(|k| a(row, k) * b(col, k)).sum();
                sum + if case.onto { c(row, col) } else { 0.0 }
            });
            let want = pack(to, want);
            assert_eq!(bits, want, "{:?} n {} {:?} {:?} {:?}", case.numbers, case.n, case.a, case.b, case.swizzle);
        }
    }
}

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

#[test]
fn warpgroup_products_are_plain_products() {
    use Number::*;
    let types = [
        [F32, F16, F16],
        [F32, Bf16, Bf16],
        [F16, F16, F16],
        [F32, Tf32, Tf32],
        [F32, E4m3, E4m3],
        [F32, E4m3, E5m2],
        [F32, E5m2, E4m3],
        [F32, E5m2, E5m2],
        [F16, E4m3, E5m2],
        [S32, S8, S8],
        [S32, U8, U8],
        [S32, U8, S8],
        [S32, S8, U8],
    ];
    for numbers in types {
        let majors: &[Major] = if numbers[1].bytes() == 2 { &[Major::Inner, Major::Outer] } else { &[Major::Inner] };
        for (n, swizzle) in [(8, Swizzle::B128), (64, Swizzle::None), (64, Swizzle::B128), (256, Swizzle::B128)] {
            for &b in majors {
                for a in majors.iter().map(|&m| Some(m)).chain([None]) {
                    check(&Case { numbers, n, swizzle, a, b, onto: n != 64 });
                }
            }
        }
    }
}

#[test]
fn every_swizzle_and_odd_widths() {
    for swizzle in SWIZZLES {
        for n in [24, 96, 200] {
            for (a, b) in
                [Major::Inner, Major::Outer].into_iter().flat_map(|a| [Major::Inner, Major::Outer].map(|b| (a, b)))
            {
                check(&Case {
                    numbers: [Number::F32, Number::Bf16, Number::Bf16],
                    n,
                    swizzle,
                    a: Some(a),
                    b,
                    onto: true,
                });
            }
        }
    }
}

#[test]
fn negated_operands() {
    let regs = |n: u32| (0..n).map(|index| Reg { class: Class::B32, index }).collect();
    let mut shared = vec![0; 1 << 17];
    let b = tile(&mut shared, 4096, Number::Bf16, Major::Inner, 8, Swizzle::B128, &|_, _| 1.0);
    for (negate, want) in
        [([false, false], 16.0f32), ([true, false], -16.0), ([false, true], -16.0), ([true, true], 16.0)]
    {
        let product = Product {
            d: regs(4),
            a: Left::Regs(regs(4)),
            b: (b, Major::Inner),
            n: 8,
            numbers: [Number::F32, Number::Bf16, Number::Bf16],
            onto: false,
            negate,
            saturate: false,
        };
        let got = product.run(&mut |_, _| 0x3f80_3f80, &mut |at, bytes| {
            bytes.copy_from_slice(&shared[at as usize..at as usize + bytes.len()])
        });
        assert!(got.iter().flatten().all(|bits| *bits == want.to_bits()), "{negate:?}");
    }
}

#[test]
fn warp_products_are_plain_products() {
    use Number::*;
    let w = Given::Word;
    let rows: [(&'static Inst, [Number; 3], Vec<Given>); 11] = [
        (&tensor::MMA_HALF, [F32, F16, F16], vec![w("f16")]),
        (&tensor::MMA_HALF, [F32, Bf16, Bf16], vec![w("bf16")]),
        (&tensor::MMA_F16, [F16, F16, F16], vec![]),
        (&tensor::MMA_TF32, [F32, Tf32, Tf32], vec![]),
        (&tensor::MMA_FP8, [F32, E4m3, E4m3], vec![w("e4m3"), w("e4m3")]),
        (&tensor::MMA_FP8, [F32, E5m2, E4m3], vec![w("e5m2"), w("e4m3")]),
        (&tensor::MMA_FP8, [F32, E4m3, E5m2], vec![w("e4m3"), w("e5m2")]),
        (&tensor::MMA_INT8, [S32, S8, S8], vec![w("s8")]),
        (&tensor::MMA_INT8, [S32, U8, U8], vec![w("u8")]),
        (&tensor::MMA_INT8_MIXED, [S32, U8, S8], vec![w("u8.s8")]),
        (&tensor::MMA_INT8_MIXED, [S32, S8, U8], vec![w("s8.u8")]),
    ];
    for (inst, [to, number_a, number_b], words) in rows {
        let bytes = number_a.bytes();
        let per = 4 / bytes;
        let a = |row, k| signed(number_a, row, k, 4);
        let b = |k, col| signed(number_b, k, col, 5);
        let c = |row, col| signed(to, row, col, 6);
        // By hand, from the figures of the manual: group g and thread t of a lane.
        let lanes =
            |f: &dyn Fn(u32, u32) -> u32| std::array::from_fn::<u64, 32, _>(|l| f(l as u32 / 4, l as u32 % 4).into());
        let left = |i: u32| {
            lanes(&|g, t| pack(number_a, (0..per).map(|e| a(g + 8 * (i % 2), per * t + e + 4 * per * (i / 2)))))
        };
        let right = |i: u32| lanes(&|g, t| pack(number_b, (0..per).map(|e| b(per * t + e + 4 * per * i, g))));
        let wide = to.bytes() == 4;
        let count = if wide { 4 } else { 2 };
        let places = |g: u32, t: u32, i: u32| match wide {
            true => vec![(g + 8 * (i / 2), 2 * t + i % 2)],
            false => vec![(g + 8 * i, 2 * t), (g + 8 * i, 2 * t + 1)],
        };
        let start = |i: u32| lanes(&|g, t| pack(to, places(g, t, i).into_iter().map(|(row, col)| c(row, col))));
        let lists = [(0..4).map(left).collect(), (0..2).map(right).collect(), (0..count).map(start).collect()];
        let given = [vec![Given::Room(count as usize)], lists.map(Given::List).to_vec(), words].concat();
        let got = execute(&mut Warp::new(0, 0), inst, &given);
        for (i, reg) in got.iter().enumerate() {
            let want = lanes(&|g, t| {
                let sums = places(g, t, i as u32)
                    .into_iter()
                    .map(|(row, col)| c(row, col) + (0..number_a.depth()).map(|k| a(row, k) * b(k, col)).sum::<f64>());
                pack(to, sums)
            });
            assert_eq!(*reg, want, "{} {number_a:?} {number_b:?} register {i}", inst.name);
        }
    }
}

/// The documented model: terms aligned to the largest, cut toward zero, the sum cut (f32) or rounded (f16).
#[test]
fn sums_are_cut_as_the_model_says() {
    let ones = |terms: &[f64]| -> Vec<[f64; 2]> { terms.iter().map(|&x| [x, 1.0]).collect() };
    let f32_of = |old: f32, terms: &[f64], from| {
        f32::from_bits(model::accumulate(old.to_bits(), &ones(terms), Number::F32, [from; 2], false))
    };
    let two = |n: i32| f64::from(n).exp2();
    for sign in [1.0, -1.0] {
        // 1 + 2^-23 + 2^-24 is cut, where rounding to nearest would go up.
        let want = sign as f32 * (1.0 + two(-23) as f32);
        assert_eq!(f32_of(sign as f32, &[sign * (two(-23) + two(-24))], Number::Bf16), want);
    }
    // Two terms that are half a unit each make a whole one: they are kept to 25 bits before they are added.
    assert_eq!(f32_of(1.0, &[two(-24), two(-24)], Number::F16), 1.0 + two(-23) as f32);
    // A term below the last kept bit is lost even if there are many of them.
    assert_eq!(f32_of(1.0, &[two(-26); 16], Number::F16), 1.0);
    // 8-bit floats keep 13 bits, before and after.
    assert_eq!(f32_of(1.0, &[two(-13)], Number::E4m3), 1.0 + two(-13) as f32);
    assert_eq!(f32_of(1.0, &[two(-14); 32], Number::E4m3), 1.0);
    assert_eq!(f32_of(1.0, &[1.0, two(-13)], Number::E4m3), 2.0);
    // f16 accumulators round to nearest, ties to even, and overflow.
    let f16_of = |old: f32, terms: &[f64]| {
        let old = f16::from_f32(old).to_bits().into();
        let bits = model::accumulate(old, &ones(terms), Number::F16, [Number::F16; 2], false);
        f16::from_bits(bits as u16).to_f32()
    };
    assert_eq!([f16_of(2048.0, &[1.0]), f16_of(2050.0, &[1.0]), f16_of(2048.0, &[1.0, 0.5])], [2048.0, 2052.0, 2050.0]);
    assert_eq!(f16_of(65504.0, &[65504.0]), f32::INFINITY);
}
