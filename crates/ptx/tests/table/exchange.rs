//! Rows that exchange between lanes, and the products of a warp.

use super::machine::{Given, Warp, execute, same};
use fulgurite_ptx::table::warp;

fn lanes(f: impl Fn(u64) -> u64) -> Given {
    Given::Lanes(std::array::from_fn(|lane| f(lane as u64)))
}

#[test]
fn values_of_other_lanes() {
    let shuffle = |mode, b: u64, clamp| {
        let given = [lanes(|lane| 100 + lane), same(b), Given::Word(mode), Given::Word(clamp)];
        execute(&mut Warp::new(0, 0), &warp::SHFL, &given)[0].map(|x| x - 100)
    };
    let want = |f: fn(u64) -> u64| std::array::from_fn::<u64, 32, _>(|lane| f(lane as u64));
    assert_eq!(shuffle("bfly", 5, "0x1f"), want(|lane| lane ^ 5));
    assert_eq!(shuffle("idx", 9, "0x1f"), want(|_| 9));
    assert_eq!(shuffle("idx", 33, "0x1f"), want(|_| 1));
    assert_eq!(shuffle("down", 4, "0x1f"), want(|lane| if lane < 28 { lane + 4 } else { lane }));
    assert_eq!(shuffle("up", 4, "0x0"), want(|lane| if lane >= 4 { lane - 4 } else { lane }));
    // With a clamp for the other direction nothing is in reach but the end itself.
    assert_eq!(shuffle("up", 4, "0x1f"), want(|lane| lane));
    assert_eq!(shuffle("down", 4, "0x0"), want(|lane| lane));
    assert_eq!(shuffle("idx", 0, "0x0"), want(|_| 0));
}

#[test]
fn votes() {
    let odd = || lanes(|lane| lane % 2);
    let mut all = Warp::new(0, 0);
    assert_eq!(execute(&mut all, &warp::BALLOT, &[odd()])[0], [0xaaaa_aaaa; 32]);
    let vote = |warp: &mut Warp, p: Given, mode| execute(warp, &warp::VOTE, &[p, Given::Word(mode)])[0];
    assert_eq!(vote(&mut all, odd(), "any"), [1; 32]);
    assert_eq!(vote(&mut all, odd(), "all"), [0; 32]);
    assert_eq!(vote(&mut all, same(1), "all"), [1; 32]);
    assert_eq!(vote(&mut all, same(0), "any"), [0; 32]);
    assert_eq!(execute(&mut all, &warp::ELECT, &[])[0].iter().sum::<u64>(), 1);
    let mut some = Warp::new(0, 0);
    some.active = 0xff0;
    assert_eq!(execute(&mut some, &warp::ACTIVE, &[])[0][4], 0xff0);
}

#[test]
fn reductions_over_the_warp() {
    let of = |f: fn(u64) -> u64, o| execute(&mut Warp::new(0, 0), &warp::REDUX, &[lanes(f), Given::Word(o)])[0][17];
    assert_eq!(of(|lane| lane + 1, "add.u32"), 528);
    assert_eq!(of(|_| 0x8000_0001, "add.u32"), 32);
    assert_eq!(of(|lane| (lane + 0xffff_fff0) & 0xffff_ffff, "min.s32"), 0xffff_fff0);
    assert_eq!(of(|lane| (lane + 0xffff_fff0) & 0xffff_ffff, "max.s32"), 15);
    assert_eq!(of(|lane| (lane + 0xffff_fff0) & 0xffff_ffff, "min.u32"), 0);
    assert_eq!(of(|lane| (lane + 0xffff_fff0) & 0xffff_ffff, "max.u32"), 0xffff_ffff);
    assert_eq!(of(|lane| 1 << lane, "or.b32"), 0xffff_ffff);
    assert_eq!(of(|lane| !(1 << lane) & 0xffff_ffff, "and.b32"), 0);
    assert_eq!(of(|lane| lane, "xor.b32"), 0);
}

#[test]
fn lanes_with_equal_values() {
    let any = execute(&mut Warp::new(0, 0), &warp::MATCH_ANY, &[lanes(|lane| lane % 4)])[0];
    assert_eq!([any[0], any[5], any[31]], [0x1111_1111, 0x2222_2222, 0x8888_8888]);
    let all = |f: fn(u64) -> u64| {
        let both = execute(&mut Warp::new(0, 0), &warp::MATCH_ALL, &[lanes(f)]);
        [both[0][3], both[1][3]]
    };
    assert_eq!(all(|_| 7), [0xffff_ffff, 1]);
    assert_eq!(all(|lane| lane / 31), [0, 0]);
}

#[test]
fn a_matrix_is_transposed() {
    // Element (row, col) holds 8 row + col; lane l holds row l / 4, columns 2 (l % 4) and the next.
    let pair = |row: u64, col: u64, transposed: bool| {
        let element = |row: u64, col: u64| if transposed { 8 * col + row } else { 8 * row + col };
        element(row, col + 1) << 16 | element(row, col)
    };
    let got = execute(&mut Warp::new(0, 0), &warp::TRANSPOSE, &[lanes(|l| pair(l / 4, 2 * (l % 4), false))])[0];
    assert_eq!(got, std::array::from_fn(|l| pair(l as u64 / 4, 2 * (l as u64 % 4), true)));
}
