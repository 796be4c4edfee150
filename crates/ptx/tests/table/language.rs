//! Kernels built with the language, executed: its operators compute what Rust's do, folded or not.

use super::machine::{GLOBAL, Warp};
use fulgurite_ptx::{Kernel, Target, Val, Word};
use proptest::prelude::*;

/// A word of 32 bits as bytes of memory.
trait Bits: Word + Copy + PartialEq + std::fmt::Debug {
    fn to_word(self) -> u32;
}
impl Bits for u32 {
    fn to_word(self) -> u32 {
        self
    }
}
impl Bits for i32 {
    fn to_word(self) -> u32 {
        self as u32
    }
}
impl Bits for f32 {
    fn to_word(self) -> u32 {
        self.to_bits()
    }
}

/// What a kernel writes to the first words of its array, which begins as `start`.
fn run(kernel: &Kernel, start: &[u32]) -> Vec<u32> {
    let mut warp = Warp::new(4096, kernel.shared_bytes as usize);
    for (i, x) in start.iter().enumerate() {
        warp.global[4 * i..4 * i + 4].copy_from_slice(&x.to_le_bytes());
    }
    warp.params = vec![GLOBAL.to_le_bytes().to_vec(), (start.len() as u32).to_le_bytes().to_vec()];
    warp.run(kernel);
    warp.global.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

/// One function of two values, of registers and of constants in all four ways; each way's result.
fn all_ways<T: Bits, R: Bits>([a, b]: [T; 2], f: impl for<'k> Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, R>) -> [u32; 4] {
    let kernel = Kernel::build("ways", Target::HOPPER, |k| {
        let (x, y) = (k.pointer::<T>("x"), k.pointer::<R>("y"));
        k.threads(32, |w| {
            let (ra, rb) = (x.load(w, 0), x.load(w, 1));
            let (ca, cb) = (w.constant(a), w.constant(b));
            for (i, (a, b)) in [(ra, rb), (ra, cb), (ca, rb), (ca, cb)].into_iter().enumerate() {
                y.store(w, i as u32, f(a, b));
            }
        });
    })
    .expect("the kernel is fine");
    let mut warp = Warp::new(256, 0);
    warp.params = vec![GLOBAL.to_le_bytes().to_vec(), (GLOBAL + 128).to_le_bytes().to_vec()];
    warp.global[..4].copy_from_slice(&a.to_word().to_le_bytes());
    warp.global[4..8].copy_from_slice(&b.to_word().to_le_bytes());
    warp.run(&kernel);
    std::array::from_fn(|i| {
        let start = 128 + 4 * i;
        u32::from_le_bytes(warp.global[start..start + 4].try_into().expect("four bytes"))
    })
}

fn edges() -> impl Strategy<Value = u32> {
    prop_oneof![
        proptest::sample::select(&[0, 1, 2, 5, 31, 32, 33, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff][..]),
        any::<u32>()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn integers_compute_as_in_rust(a in edges(), b in edges()) {
        macro_rules! agree {
            ($t:ty: $($f:expr => $want:expr;)*) => {
                $(prop_assert_eq!(all_ways::<$t, $t>([a as $t, b as $t], $f), [$want as u32; 4], "{}", stringify!($f));)*
            };
        }
        agree! { u32:
            |x, y| x + y => a.wrapping_add(b);
            |x, y| x - y => a.wrapping_sub(b);
            |x, y| x * y => a.wrapping_mul(b);
            |x, y| x & y => a & b;
            |x, y| x | y => a | b;
            |x, y| x ^ y => a ^ b;
            |x, y| x << y => a.checked_shl(b).unwrap_or(0);
            |x, y| x >> y => a.checked_shr(b).unwrap_or(0);
            |x, y| x.min(y) => a.min(b);
            |x, y| x.max(y) => a.max(b);
            |x, y| x.mul_add(y, 7) => a.wrapping_mul(b).wrapping_add(7);
            |x, y| x.lt(y).select(x, y) => a.min(b);
            |x, y| x.ne(y).select(3u32, 4u32) => if a == b { 4 } else { 3 };
            |x, y| x.mul_wide(y).to_u32() => a.wrapping_mul(b);
            |x, y| (x.to_u64() + y.to_u64()).to_u32() => a.wrapping_add(b);
            |x, y| x.lop3(y, 0, 0x3c) => a ^ b;
            |x, y| x.permute(y, 0x5410) => b << 16 | a & 0xffff;
        }
        let (i, j) = (a as i32, b as i32);
        agree! { i32:
            |x, y| x + y => i.wrapping_add(j);
            |x, y| x - y => i.wrapping_sub(j);
            |x, y| x * y => i.wrapping_mul(j);
            |x, y| x >> y => if b < 32 { i >> b } else { i >> 31 };
            |x, y| x << y => if b < 32 { i << b } else { 0 };
            |x, y| x.min(y) => i.min(j);
            |x, y| x.max(y) => i.max(j);
            |x, y| x.ge(y).select(x, y) => i.max(j);
        }
        if b != 0 {
            agree! { u32: |x, y| x / y => a.wrapping_div(b); |x, y| x % y => a.wrapping_rem(b); }
            agree! { i32: |x, y| x / y => i.wrapping_div(j); |x, y| x % y => i.wrapping_rem(j); }
        } else {
            // What it is worth is the machine's choice; folded or executed, it is the same.
            for ways in [all_ways::<u32, u32>([a, b], |x, y| x / y), all_ways::<i32, i32>([i, j], |x, y| x % y)] {
                prop_assert_eq!(ways, [ways[0]; 4]);
            }
        }
    }

    #[test]
    fn floats_compute_as_in_rust(a in any::<f32>(), b in any::<f32>()) {
        macro_rules! agree {
            ($($f:expr => $want:expr;)*) => {
                $(
                    let want: f32 = $want;
                    for got in all_ways::<f32, f32>([a, b], $f).map(f32::from_bits) {
                        prop_assert!(got == want || got.is_nan() && want.is_nan(), "{}: {} {}", stringify!($f), got, want);
                    }
                )*
            };
        }
        agree! {
            |x, y| x + y => a + b;
            |x, y| x - y => a - b;
            |x, y| x * y => a * b;
            |x, y| x / y => a / b;
            |x, y| -x + y => -a + b;
            |x, y| x.mul_add(y, 1.0) => a.mul_add(b, 1.0);
            |x, y| x.max(y) => a.max(b);
            |x, y| x.min(y.abs()) => a.min(b.abs());
            |x, y| x.gt(y).select(x, y) => if a > b { a } else { b };
            |x, y| (x.to_bits() ^ y.to_bits()).to_f32_bits() => f32::from_bits(a.to_bits() ^ b.to_bits());
            |x, y| x.to_i32().to_f32() + y => (a as i32) as f32 + b;
            |x, _| x.floor() => a.floor();
        }
    }
}

#[test]
fn a_vector_is_doubled_where_it_is_long_enough() {
    let kernel = Kernel::build("double", Target::AMPERE, |k| {
        let (x, n) = (k.pointer::<f32>("x"), k.param::<u32>("n"));
        k.threads(32, |w| {
            let i = w.cta().mul_add(32, w.thread());
            w.when(i.lt(n), |w| x.store(w, i, x.load(w, i) * 2.0));
        });
    })
    .expect("the kernel is fine");
    let start: Vec<u32> = (0..20).map(|i| (i as f32).to_bits()).collect();
    let got = run(&kernel, &start);
    assert_eq!(got[..20], (0..20).map(|i| (2.0 * i as f32).to_bits()).collect::<Vec<_>>());
    assert_eq!(got[20], 0);
}

/// Lanes leave a loop one by one and meet behind it; inside, they part and meet again.
#[test]
fn lanes_leave_loops_at_their_own_time() {
    let kernel = Kernel::build("steps", Target::HOPPER, |k| {
        let x = k.pointer::<u32>("x");
        k.threads(32, |w| {
            let lane = w.lane();
            let (n, steps, odd) = (w.var::<u32>(lane + 1), w.var::<u32>(0), w.var::<u32>(0));
            w.repeat_while(|w| {
                let now = n.get();
                let is_odd = (now & 1).eq(1);
                w.choose(
                    is_odd,
                    |_| {
                        n.set(now * 3 + 1);
                        odd.set(odd.get() + 1);
                    },
                    |_| n.set(now >> 1),
                );
                steps.set(steps.get() + 1);
                n.get().ne(1)
            });
            x.store(w, lane, steps.get() * 1000 + odd.get());
        });
    })
    .expect("the kernel is fine");
    let want = (1..=32u32).map(|start| {
        let (mut n, mut steps, mut odd) = (start, 0, 0);
        loop {
            if n % 2 == 1 {
                (n, odd) = (3 * n + 1, odd + 1);
            } else {
                n /= 2;
            }
            steps += 1;
            if n == 1 {
                break 1000 * steps + odd;
            }
        }
    });
    assert_eq!(run(&kernel, &[])[..32], want.collect::<Vec<_>>());
}

#[test]
fn a_sum_over_lanes_and_over_a_loop() {
    let kernel = Kernel::build("sums", Target::HOPPER, |k| {
        let x = k.pointer::<f32>("x");
        let s = k.shared::<f32>("partial", 32);
        k.threads(32, |w| {
            let lane = w.lane();
            let sum = w.var::<f32>(0.0);
            w.each(lane, 256, 32, |w, i| sum.set(sum.get() + x.load(w, i)));
            s.store(w, lane, sum.get());
            w.sync();
            let other = s.load(w, lane ^ 31);
            let total = w.reduce(other, 32, |a, b| a + b);
            x.store(w, lane, total);
        });
    })
    .expect("the kernel is fine");
    let start: Vec<u32> = (0..256).map(|i| (i as f32).to_bits()).collect();
    assert_eq!(run(&kernel, &start)[..32], [32640f32.to_bits(); 32]);
}
