//! Rows that compute: against wider arithmetic, and by hand where a number is special.

use super::machine::{Given, compute};
use fulgurite_ptx::inst::Inst;
use fulgurite_ptx::table::{convert, float, integer, logic};
use fulgurite_ptx::{bf16, f16};
use proptest::prelude::*;

const FLOATS: [f32; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1.5,
    3.0e38,
    -3.0e38,
    f32::MIN_POSITIVE,
    1.0e-40,
    -1.0e-40,
    1.0e-45,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    0.1,
    16777217.0,
];

#[track_caller]
fn float(inst: &'static Inst, x: &[f32]) -> f32 {
    let bits: Vec<u64> = x.iter().map(|x| x.to_bits().into()).collect();
    f32::from_bits(compute(inst, &bits, &[]) as u32)
}
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}
fn flush(x: f64) -> f64 {
    if x.abs() < f64::from(f32::MIN_POSITIVE) { 0.0f64.copysign(x) } else { x }
}

/// Sums and products of two f32 are right when computed in f64 and rounded: 53 >= 2 * 24 + 2.
#[test]
fn floats_round_to_nearest() {
    for (a, b) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
        let (x, y) = (f64::from(a), f64::from(b));
        for (inst, want) in [(&float::ADD, x + y), (&float::SUB, x - y), (&float::MUL, x * y), (&float::DIV, x / y)] {
            let got = float(inst, &[a, b]);
            assert!(same(got, want as f32), "{} of {a:e} and {b:e} is {got:e}, not {want:e}", inst.name);
        }
    }
}

/// Each half of a register with two floats is computed as one float would be.
#[test]
fn two_floats_are_computed_like_one() {
    let pair = |low: f32, high: f32| u64::from(high.to_bits()) << 32 | u64::from(low.to_bits());
    for (a, b) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
        let (c, d) = (2.5, -0.75);
        for (two, one, terms) in [
            (&float::ADD_F32X2, &float::ADD, 2),
            (&float::MUL_F32X2, &float::MUL, 2),
            (&float::FMA_F32X2, &float::FMA, 3),
        ] {
            let (low, high) = ([a, b, c], [d, a, b]);
            let inputs: Vec<u64> = (0..terms).map(|i| pair(low[i], high[i])).collect();
            let got = compute(two, &inputs, &[]);
            for (got, x) in [(got as u32, low), ((got >> 32) as u32, high)] {
                let want = float(one, &x[..terms]);
                assert!(same(f32::from_bits(got), want), "{} of {x:?} is {got:#x}, not {want:e}", two.name);
            }
        }
        for c in FLOATS {
            let want = float(&float::MAX, &[float(&float::MAX, &[a, b]), c]);
            assert!(same(float(&float::MAX3, &[a, b, c]), want), "{a:e}, {b:e}, {c:e}");
        }
    }
}

#[test]
fn fused_products_round_once() {
    let e = 2f32.powi(-12);
    // (1 + e)^2 - 1 - 2e = e^2 is lost where the product is rounded first.
    assert_eq!(float(&float::FMA, &[1.0 + e, 1.0 + e, -1.0 - 2.0 * e]), e * e);
    assert_eq!(float(&float::FMA, &[3.0e38, 2.0, -3.0e38]), 3.0e38);
    assert!(float(&float::FMA, &[f32::INFINITY, 0.0, 1.0]).is_nan());
    assert!(float(&float::FMA, &[f32::INFINITY, 1.0, f32::NEG_INFINITY]).is_nan());
    assert_eq!(float(&float::FMA, &[1.0e-30, 1.0e-10, 0.0]), (1.0e-30f64 * f64::from(1.0e-10f32)) as f32);
}

#[test]
fn the_larger_and_the_smaller() {
    for (a, b) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
        let (largest, smallest) = (float(&float::MAX, &[a, b]), float(&float::MIN, &[a, b]));
        match (a.is_nan(), b.is_nan()) {
            (true, true) => assert!(largest.is_nan() && smallest.is_nan()),
            (true, false) => assert!(same(largest, b) && same(smallest, b)),
            (false, true) => assert!(same(largest, a) && same(smallest, a)),
            // The order of the bits tells -0 from 0.
            _ => {
                let (low, high) = if a.total_cmp(&b).is_lt() { (a, b) } else { (b, a) };
                assert!(same(largest, high) && same(smallest, low), "{a:e} {b:e}: {largest:e} {smallest:e}");
            }
        }
    }
}

#[test]
fn signs_and_rounding_down() {
    for a in FLOATS {
        assert_eq!(float(&float::NEG, &[a]).to_bits(), a.to_bits() ^ 0x8000_0000);
        assert_eq!(float(&float::ABS, &[a]).to_bits(), a.to_bits() & 0x7fff_ffff);
    }
    let magic = 12582912.0;
    for (x, floor) in [(0.5, 0.0), (-0.5, -1.0), (-7.0, -7.0), (100.99, 100.0), (-100.01, -101.0), (0.0, 0.0)] {
        assert_eq!(float(&float::ADD_DOWN, &[x, magic]) - magic, floor, "{x}");
    }
    for (a, b, zero) in
        [(1.0, -1.0, -0.0f32), (-3.5, 3.5, -0.0), (0.0, -0.0, -0.0), (-0.0, -0.0, -0.0), (0.0, 0.0, 0.0)]
    {
        assert_eq!(float(&float::ADD_DOWN, &[a, b]).to_bits(), zero.to_bits(), "{a} + {b}");
    }
    assert!(float(&float::ADD_DOWN, &[f32::NAN, 1.0]).is_nan());
    assert_eq!(float(&float::ADD_DOWN, &[f32::MAX, 1.0e30]), f32::MAX);
    assert_eq!(float(&float::ADD_DOWN, &[-f32::MAX, -f32::MAX]), f32::NEG_INFINITY);
}

/// Bounds of the manual, in units of 2^-22 relative to the result or absolute near zero.
#[test]
fn approximations_are_inside_their_bounds() {
    type Row = (&'static Inst, fn(f64) -> f64, bool);
    let rows: [Row; 6] = [
        (&float::EX2, f64::exp2, true),
        (&float::LG2, f64::log2, true),
        (&float::RCP, |x| 1.0 / x, true),
        (&float::RSQRT, |x| 1.0 / x.sqrt(), true),
        (&float::SQRT, f64::sqrt, true),
        (&float::TANH, f64::tanh, false),
    ];
    let more = [0.5, 2.0, -3.25, 10.0, 127.9, -126.0, -150.0, 0.99, 1.01, 1.0e30, 1.0e-30];
    for (inst, exact, flushes) in rows {
        for x in FLOATS.into_iter().chain(more) {
            let input = if flushes { flush(x.into()) } else { x.into() };
            let want = exact(input);
            let want = if flushes { flush(want) } else { want };
            let got = f64::from(float(inst, &[x]));
            if want.is_nan() || want.is_infinite() || want.abs() > f64::from(f32::MAX) {
                assert!(got.is_nan() == want.is_nan() && !got.is_finite(), "{} of {x:e} is {got:e}", inst.name);
            } else {
                let bound = 2f64.powi(-21) * want.abs() + if inst.name == "lg2.f32" { 2f64.powi(-22) } else { 0.0 };
                assert!((got - want).abs() <= bound, "{} of {x:e} is {got:e}, not {want:e}", inst.name);
                assert!(want != 0.0 || got.is_sign_negative() == want.is_sign_negative(), "{} of {x:e}", inst.name);
            }
        }
    }
}

fn pair(kind: &str, [low, high]: [f32; 2]) -> u64 {
    let bits = |x: f32| {
        u64::from(if kind.ends_with("bf16x2") { bf16::from_f32(x).to_bits() } else { f16::from_f32(x).to_bits() })
    };
    bits(high) << 16 | bits(low)
}
fn halves(kind: &str, bits: u64) -> [f32; 2] {
    [bits as u16, (bits >> 16) as u16]
        .map(|b| if kind.ends_with("bf16x2") { bf16::from_bits(b).to_f32() } else { f16::from_bits(b).to_f32() })
}

#[test]
fn pairs_of_halves() {
    for kind in ["f16x2", "bf16x2"] {
        let word = [Given::Word(kind)];
        let two = |inst, a: [f32; 2], b: [f32; 2]| halves(kind, compute(inst, &[pair(kind, a), pair(kind, b)], &word));
        assert_eq!(two(&float::ADD_PAIR, [1.0, -2.0], [0.5, 2.0]), [1.5, 0.0]);
        assert_eq!(two(&float::SUB_PAIR, [1.0, -2.0], [0.5, 2.0]), [0.5, -4.0]);
        assert_eq!(two(&float::MUL_PAIR, [3.0, -2.0], [0.5, 4.0]), [1.5, -8.0]);
        assert_eq!(two(&float::MAX_PAIR, [f32::NAN, -2.0], [0.5, 4.0]), [0.5, 4.0]);
        assert_eq!(two(&float::MIN_PAIR, [1.0, -2.0], [f32::NAN, 4.0]), [1.0, -2.0]);
        let zeros = two(&float::MAX_PAIR, [-0.0, 0.0], [0.0, -0.0]);
        assert!(zeros.iter().all(|x| x.is_sign_positive()));
        let fma = compute(
            &float::FMA_PAIR,
            &[pair(kind, [3.0, 2.0]), pair(kind, [0.5, 4.0]), pair(kind, [1.0, -8.0])],
            &word,
        );
        assert_eq!(halves(kind, fma), [2.5, 0.0]);
        let tanh = halves(kind, compute(&float::TANH_PAIR, &[pair(kind, [0.0, 30.0])], &word));
        assert_eq!(tanh, [0.0, 1.0]);
    }
    // Half a unit rounds to even; past the largest number is infinity; subnormals stay.
    let two = |kind, a: [f32; 2], b: [f32; 2]| {
        halves(kind, compute(&float::ADD_PAIR, &[pair(kind, a), pair(kind, b)], &[Given::Word(kind)]))
    };
    assert_eq!(two("f16x2", [2048.0, 65504.0], [1.0, 65504.0]), [2048.0, f32::INFINITY]);
    assert_eq!(two("f16x2", [2f32.powi(-24), 0.0], [2f32.powi(-24), 0.0])[0], 2f32.powi(-23));
    assert_eq!(two("bf16x2", [256.0, 258.0], [1.0, 1.0]), [256.0, 260.0]);
    let exp = |kind: &'static str, x| halves(kind, compute(&float::EX2_PAIR, &[pair(kind, x)], &[Given::Word(kind)]));
    assert_eq!(exp("f16x2", [3.0, f32::NEG_INFINITY]), [8.0, 0.0]);
    assert_eq!(exp("ftz.bf16x2", [-1.0, -130.0]), [0.5, 0.0]);
}

const INTEGERS: [u32; 9] = [0, 1, 2, 31, 32, 33, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff];

fn integers() -> impl Strategy<Value = u32> {
    prop_oneof![proptest::sample::select(&INTEGERS[..]), any::<u32>(), 0..100u32]
}

/// The low 32 bits.
fn low(x: i128) -> u64 {
    (x as u32).into()
}

proptest! {
    #[test]
    fn integers_as_in_128_bits(a in integers(), b in integers(), c in integers()) {
        let input = [u64::from(a), u64::from(b)];
        for (t, [x, y, z]) in [
            ("u32", [a, b, c].map(i128::from)),
            ("s32", [a, b, c].map(|x| i128::from(x as i32))),
        ] {
            let two = |inst| compute(inst, &input, &[Given::Word(t)]);
            prop_assert_eq!(two(&integer::ADD), low(x + y));
            prop_assert_eq!(two(&integer::SUB), low(x - y));
            prop_assert_eq!(two(&integer::MUL), low(x * y));
            prop_assert_eq!(two(&integer::MUL_HIGH), low((x * y) >> 32));
            prop_assert_eq!(two(&integer::MUL_WIDE), (x * y) as u64);
            prop_assert_eq!(two(&integer::MIN), low(x.min(y)));
            prop_assert_eq!(two(&integer::MAX), low(x.max(y)));
            let mad = compute(&integer::MAD, &[a.into(), b.into(), c.into()], &[Given::Word(t)]);
            prop_assert_eq!(mad, low(x * y + z));
            if y != 0 {
                prop_assert_eq!(two(&integer::DIV), low(x / y));
                prop_assert_eq!(two(&integer::REM), low(x % y));
            }
            let shift = if b < 64 { (x >> b) as u64 } else if x < 0 { u64::MAX } else { 0 };
            prop_assert_eq!(two(&logic::SHR), shift & 0xffff_ffff);
            for (o, want) in [("eq", x == y), ("ne", x != y), ("lt", x < y), ("le", x <= y), ("gt", x > y), ("ge", x >= y)] {
                let got = compute(&logic::SETP, &input, &[Given::Word(o), Given::Word(t)]);
                prop_assert_eq!(got == 1, want, "{} {} {}", x, o, y);
            }
            let back = f32::from_bits(compute(&convert::CVT_F32_INT, &[a.into()], &[Given::Word(t)]) as u32);
            prop_assert_eq!(back, x as f64 as f32);
            prop_assert_eq!(compute(&convert::CVT_64, &[a.into()], &[Given::Word("s64"), Given::Word(t)]), x as u64);
        }
        prop_assert_eq!(compute(&integer::NEG, &[a.into()], &[]), low(-i128::from(a)));
        prop_assert_eq!(compute(&integer::ABS, &[a.into()], &[]), low(i128::from(a as i32).abs()));
        prop_assert_eq!(compute(&logic::SHL, &input, &[]), if b < 32 { u64::from(a) << b & 0xffff_ffff } else { 0 });
        prop_assert_eq!(compute(&logic::NOT, &[a.into()], &[]), low(-1 - i128::from(a)));
        let ones = (0..32).filter(|i| a >> i & 1 == 1).count() as u64;
        prop_assert_eq!(compute(&integer::POPC, &[a.into()], &[]), ones);
        let zeros = (0..32).rev().take_while(|i| a >> i & 1 == 0).count() as u64;
        prop_assert_eq!(compute(&integer::CLZ, &[a.into()], &[]), zeros);
        let reversed = (0..32).filter(|i| a >> i & 1 == 1).fold(0u64, |d, i| d | 1 << (31 - i));
        prop_assert_eq!(compute(&integer::BREV, &[a.into()], &[]), reversed);
    }

    #[test]
    fn fields_and_funnels(a in integers(), b in integers(), first in 0..40u32, count in 0..40u32) {
        let bit = |x: u32, i: u32| i < 32 && x >> i & 1 == 1;
        let collect = |f: &dyn Fn(u32) -> bool| (0..32).filter(|&i| f(i)).fold(0u64, |d, i| d | 1 << i);
        let field = [u64::from(first), u64::from(count)];
        let ones = compute(&integer::BMSK, &field, &[]);
        prop_assert_eq!(ones, collect(&|i| i >= first && i < first + count));
        let inserted = compute(&integer::BFI, &[a.into(), b.into(), field[0], field[1]], &[]);
        prop_assert_eq!(inserted, collect(&|i| if i >= first && i < first + count { bit(a, i - first) } else { bit(b, i) }));
        // As the manual writes it down: bits beyond the field or the word are the sign, or zero.
        for t in ["u32", "s32"] {
            let sign = t == "s32" && count > 0 && bit(a, (first + count - 1).min(31));
            let want = collect(&|i| if i < count && first + i <= 31 { bit(a, first + i) } else { sign });
            let got = compute(&integer::BFE, &[a.into(), field[0], field[1]], &[Given::Word(t)]);
            prop_assert_eq!(got, want, "{} {:#x} {} {}", t, a, first, count);
        }
        let both = u64::from(b) << 32 | u64::from(a);
        let up = compute(&logic::FUNNEL, &[a.into(), b.into(), first.into()], &[]);
        prop_assert_eq!(up, both << (first & 31) >> 32);
        for (mode, n) in [("wrap", first & 31), ("clamp", first.min(32))] {
            let down = compute(&logic::FUNNEL_DOWN, &[a.into(), b.into(), first.into()], &[Given::Word(mode)]);
            prop_assert_eq!(down, both >> n & 0xffff_ffff);
        }
    }

    #[test]
    fn logic_bit_by_bit(a in any::<u64>(), b in any::<u64>(), c in any::<u32>(), lut in any::<u8>(), n in 0..70u64) {
        for (o, want) in [("and", a & b), ("or", a | b), ("xor", a ^ b)] {
            prop_assert_eq!(compute(&logic::BITS_64, &[a, b], &[Given::Word(o)]), want);
            let narrow = [a & 0xffff_ffff, b & 0xffff_ffff];
            prop_assert_eq!(compute(&logic::BITS_32, &narrow, &[Given::Word(o)]), want & 0xffff_ffff);
            prop_assert_eq!(compute(&logic::BITS_PRED, &[a & 1, b & 1], &[Given::Word(o)]), want & 1);
        }
        let (x, y) = (a as u32, b as u32);
        let table = (0..32).fold(0u64, |d, i| {
            let index = (x >> i & 1) << 2 | (y >> i & 1) << 1 | c >> i & 1;
            d | u64::from(lut >> index & 1) << i
        });
        let got = compute(&logic::LOP3, &[x.into(), y.into(), c.into()], &[Given::Number(lut.into())]);
        prop_assert_eq!(got, table);
        prop_assert_eq!(compute(&logic::SHL_64, &[a, n], &[]), if n < 64 { a << n } else { 0 });
        prop_assert_eq!(compute(&logic::SHR_64, &[a, n], &[]), if n < 64 { a >> n } else { 0 });
        prop_assert_eq!(compute(&integer::ADD_WIDE, &[a, b], &[Given::Word("u64")]), a.wrapping_add(b));
        prop_assert_eq!(compute(&integer::SUB_WIDE, &[a, b], &[Given::Word("s64")]), a.wrapping_sub(b));
        prop_assert_eq!(compute(&integer::MUL_64, &[a, b], &[Given::Word("u64")]), (u128::from(a) * u128::from(b)) as u64);
        let wide = compute(&integer::MAD_WIDE, &[x.into(), y.into(), b], &[]);
        prop_assert_eq!(wide, (u128::from(x) * u128::from(y) + u128::from(b)) as u64);
        for (o, want) in [("eq", a == b), ("lt", a < b), ("ge", a >= b)] {
            prop_assert_eq!(compute(&logic::SETP_64, &[a, b], &[Given::Word(o)]) == 1, want);
        }
        for p in [0, 1] {
            let want = if p == 1 { a } else { b };
            prop_assert_eq!(compute(&logic::SELP_64, &[a, b, p], &[]), want);
            prop_assert_eq!(compute(&logic::SELP_32, &[x.into(), y.into(), p], &[]), want & 0xffff_ffff);
            prop_assert_eq!(compute(&logic::SELP_F32, &[x.into(), y.into(), p], &[]), want & 0xffff_ffff);
            prop_assert_eq!(compute(&logic::SELP_16, &[a & 0xffff, b & 0xffff, p], &[]), want & 0xffff);
        }
        prop_assert_eq!(compute(&logic::NOT_PRED, &[a & 1], &[]), 1 - (a & 1));
        prop_assert_eq!(compute(&convert::CVT_32, &[a], &[]), a & 0xffff_ffff);
    }
}

#[test]
fn division_by_zero_and_its_like() {
    let of = |inst, a: u32, b: u32, t| compute(inst, &[a.into(), b.into()], &[Given::Word(t)]) as u32;
    assert_eq!(of(&integer::DIV, 7, 0, "u32"), u32::MAX);
    assert_eq!(of(&integer::DIV, 7, 0, "s32"), u32::MAX);
    assert_eq!(of(&integer::REM, 7, 0, "u32"), 7);
    assert_eq!(of(&integer::DIV, 0x8000_0000, u32::MAX, "s32"), 0x8000_0000);
    assert_eq!(of(&integer::REM, 0x8000_0000, u32::MAX, "s32"), 0);
}

#[test]
fn comparisons_of_floats() {
    for (a, b) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
        let nan = a.is_nan() || b.is_nan();
        let cases = [
            ("eq", a == b),
            ("ne", !nan && a != b),
            ("lt", a < b),
            ("le", a <= b),
            ("gt", a > b),
            ("ge", a >= b),
            ("equ", nan || a == b),
            ("neu", nan || a != b),
            ("ltu", nan || a < b),
            ("leu", nan || a <= b),
            ("gtu", nan || a > b),
            ("geu", nan || a >= b),
            ("num", !nan),
            ("nan", nan),
        ];
        for (o, want) in cases {
            let got = compute(&logic::SETP_F32, &[a.to_bits().into(), b.to_bits().into()], &[Given::Word(o)]);
            assert_eq!(got == 1, want, "{a:e} {o} {b:e}");
        }
    }
}

#[test]
fn floats_to_integers_and_back() {
    let cut = |x: f32| compute(&convert::CVT_S32_F32, &[x.to_bits().into()], &[]) as u32 as i32;
    assert_eq!(
        [2.9, -2.9, f32::NAN, 3.0e9, -3.0e9, f32::INFINITY, 1.0e-40].map(cut),
        [2, -2, 0, i32::MAX, i32::MIN, i32::MAX, 0]
    );
    let to =
        |x: f32, r, t| compute(&convert::CVT_INT_F32, &[x.to_bits().into()], &[Given::Word(r), Given::Word(t)]) as u32;
    assert_eq!(["rni", "rmi", "rpi", "rzi"].map(|r| to(2.5, r, "s32")), [2, 2, 3, 2]);
    assert_eq!(["rni", "rmi", "rpi", "rzi"].map(|r| to(-2.5, r, "s32") as i32), [-2, -3, -2, -2]);
    assert_eq!(["rni", "rmi", "rpi", "rzi"].map(|r| to(3.5, r, "u32")), [4, 3, 4, 3]);
    assert_eq!([to(-1.0, "rzi", "u32"), to(5.0e9, "rni", "u32"), to(f32::NAN, "rni", "u32")], [0, u32::MAX, 0]);
    let floor = |x: f32| f32::from_bits(compute(&convert::FLOOR, &[x.to_bits().into()], &[]) as u32);
    assert_eq!([1.5, -1.5, 7.0, f32::INFINITY].map(floor), [1.0, -2.0, 7.0, f32::INFINITY]);
    assert!(floor(-0.0).is_sign_negative() && floor(f32::NAN).is_nan());
}

#[test]
fn floats_to_halves_and_back() {
    // 1 + 2^-8 is halfway between bf16 neighbours, 1 + 2^-11 between f16 neighbours; both go to the even one.
    let to = |x: f32, t| compute(&convert::CVT_HALF, &[x.to_bits().into()], &[Given::Word(t)]);
    assert_eq!([to(1.0 + 2f32.powi(-8), "bf16"), to(1.0 + 3.0 * 2f32.powi(-8), "bf16")], [0x3f80, 0x3f82]);
    assert_eq!([to(1.0 + 2f32.powi(-11), "f16"), to(1.0 + 3.0 * 2f32.powi(-11), "f16")], [0x3c00, 0x3c02]);
    assert_eq!([to(65520.0, "f16"), to(65519.0, "f16"), to(-1.0e-8, "f16")], [0x7c00, 0x7bff, 0x8000]);
    assert_eq!(to(f32::MAX, "bf16"), 0x7f80);
    let two =
        |inst, high: f32, low: f32, t| compute(inst, &[high.to_bits().into(), low.to_bits().into()], &[Given::Word(t)]);
    assert_eq!(two(&convert::CVT_PAIR, 1.0, -2.0, "bf16x2"), 0x3f80_c000);
    assert_eq!(two(&convert::CVT_PAIR, 1.0, -2.0, "f16x2"), 0x3c00_c000);
    // Cut, not rounded: the largest number instead of infinity, and 1.999... stays below 2.
    assert_eq!(two(&convert::CVT_PAIR_CUT, f32::MAX, -1.999_999, "bf16x2"), 0x7f7f_bfff);
    assert_eq!(two(&convert::CVT_PAIR_CUT, 70000.0, 1.0e-9, "f16x2"), 0x7bff_0000);
    assert_eq!(two(&convert::CVT_PAIR_CUT, f32::INFINITY, 0.5, "f16x2"), 0x7c00_3800);
    for bits in (0..=0xffffu64).step_by(7) {
        for t in ["f16", "bf16"] {
            let wide = f32::from_bits(compute(&convert::CVT_WIDEN, &[bits], &[Given::Word(t)]) as u32);
            assert!(wide.is_nan() || to(wide, t) == bits, "{t} {bits:#x}");
        }
    }
}

#[test]
fn eight_bit_floats_and_tf32() {
    for t in ["e4m3x2", "e5m2x2"] {
        for low in 0..=255u64 {
            let pair = compute(&convert::CVT_E4M3_PAIR, &[low], &[Given::Word(t)]);
            let back = compute(&convert::CVT_PAIR_E4M3, &[pair], &[Given::Word(t)]);
            let x = f16::from_bits(pair as u16);
            // Infinity of e5m2 saturates on the way back.
            assert!(!x.is_finite() || back == low, "{t} {low:#x} is {x}, back {back:#x}");
        }
        let f = |high: f32, low: f32| {
            compute(&convert::CVT_E4M3, &[high.to_bits().into(), low.to_bits().into()], &[Given::Word(t)])
        };
        let (largest, one) = if t == "e4m3x2" { (0x7e, 0x38) } else { (0x7b, 0x3c) };
        assert_eq!(f(1.0e9, 1.0), largest << 8 | one);
        assert_eq!(f(-1.0e9, f32::NAN), (largest | 0x80) << 8 | 0x7f);
        assert_eq!(f(f32::INFINITY, -0.0), largest << 8 | 0x80);
    }
    // 13 bits go: half of the last kept unit, and a tie to the odd side.
    let cases = [
        (0x3f80_1000, 0x3f80_2000, 0x3f80_0000),
        (0x3f80_3000, 0x3f80_4000, 0x3f80_4000),
        (0x3f80_0fff, 0x3f80_0000, 0x3f80_0000),
    ];
    for (bits, away, even) in cases {
        assert_eq!(compute(&convert::CVT_TF32, &[bits], &[]), away);
        assert_eq!(compute(&convert::CVT_TF32_EVEN, &[bits], &[]), even);
    }
    assert_eq!(compute(&convert::CVT_TF32, &[f32::INFINITY.to_bits().into()], &[]), u64::from(f32::INFINITY.to_bits()));
}

#[test]
fn moves_and_halves_of_registers() {
    use super::machine::{Warp, execute, same};
    for (inst, x) in [
        (&convert::MOV_16, 0xbeef),
        (&convert::MOV_32, 0xdead_beef),
        (&convert::MOV_64, u64::MAX - 1),
        (&convert::MOV_PRED, 1),
        (&convert::MOV_F32, 0x7fc0_0001),
        (&convert::BITS_OF_F32, 0x7f80_0001),
        (&convert::F32_OF_BITS, 0xffff_ffff),
    ] {
        assert_eq!(compute(inst, &[x], &[]), x, "{}", inst.name);
    }
    let mut warp = Warp::new(0, 0);
    let split = execute(&mut warp, &convert::SPLIT_64, &[Given::Room(2), same(0x1122_3344_5566_7788)]);
    assert_eq!([split[0][5], split[1][5]], [0x5566_7788, 0x1122_3344]);
    let split = execute(&mut warp, &convert::SPLIT_32, &[Given::Room(2), same(0x1122_3344)]);
    assert_eq!([split[0][5], split[1][5]], [0x3344, 0x1122]);
    let split = execute(&mut warp, &convert::SPLIT_F32, &[Given::Room(2), same(0x1122_3344_5566_7788)]);
    assert_eq!([split[0][0], split[1][0]], [0x5566_7788, 0x1122_3344]);
    let joined = execute(&mut warp, &convert::JOIN_F32, &[Given::List(vec![[1; 32], [2; 32]])]);
    assert_eq!(joined[0][0], 2 << 32 | 1);
    let joined = execute(&mut warp, &convert::JOIN_64, &[Given::List(vec![[1; 32], [2; 32]])]);
    assert_eq!(joined[0][31], 2 << 32 | 1);
    let joined = execute(&mut warp, &convert::JOIN_32, &[Given::List(vec![[1; 32], [2; 32]])]);
    assert_eq!(joined[0][0], 2 << 16 | 1);
}
