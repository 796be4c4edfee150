//! Sums of f32 that are the same in any order: sums of integers, as long as every f32 is an integer.
//!
//! A finite f32 is a whole number of 2^-149, 24 bits of it from some place on. An element has a word of 64 bits for each 32
//! places; a term adds at most 32 of its bits to one word and the rest to the next, with its sign. 2^31 terms fit. Bits below
//! 2^-117 are cut off, of each term: those of 2^-94 and more are whole. What is not finite is added to the element itself,
//! where the order does not matter: infinities and NaN swallow everything.

use fulgurite_ptx::{BuildError, Kernel, Pointer, Scope, Target, Val, Who};

/// Threads of a block of [`kernel`], an element each.
pub const THREADS: u32 = 256;
/// Words of 64 bits of an element: places from 2^-117 on.
pub const WORDS: u64 = 8;
// The largest f32 ends in the last word.
const _: () = assert!((254 - 1) / 32 < WORDS);

/// Adds to the element at this place.
pub fn add<'k, W: Who>(
    w: &Scope<'k, W>,
    words: Pointer<'k, u64>,
    to: Pointer<'k, f32>,
    at: Val<'k, u64>,
    x: Val<'k, f32>,
) {
    let bits = x.to_bits();
    let exponent = (bits >> 23) & 0xff;
    let finite = exponent.lt(0xff);
    w.when(!finite, |w| to.at_wide(at).add(w, 0, x));
    // Below that there is nothing but zeros for the words.
    w.when(finite & exponent.gt(8), |w| {
        let mantissa = (bits & 0x7f_ffff) + 0x80_0000;
        let place = exponent - 1;
        let power = w.constant(1u32) << (place & 31);
        let sign = bits >> 31;
        let flip = w.constant(0u32) - sign;
        // Of two's complement: all bits flipped, plus 1.
        let signed = |x: Val<'k, u32>| (x ^ flip).to_u64() + flip.to_u64().mul_wide_64(1 << 32) + sign.to_u64();
        let own = words.at_wide(at.mul_wide_64(WORDS) + (place >> 5).to_u64());
        // The word before: places below the first word are cut off.
        w.when(place.ge(32), |w| {
            let before = Pointer::<u64>::at_address(own.address() + (-8i64) as u64);
            before.add(w, 0, signed(mantissa * power));
        });
        own.add(w, 0, signed(mantissa.mul_high(power)));
    });
}

/// Adds what the words hold to `count` elements: 0 there, or what is not finite.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Kernel::build("attention_backward_exact", target, |k| {
        let (words, to, count) = (k.pointer::<u32>("words"), k.array::<f32>("to"), k.param::<u32>("count"));
        k.threads(THREADS, |w| {
            let i = w.block().mul_add(THREADS, w.thread());
            w.when(i.lt(count), |w| {
                let words = words.at_wide(i.mul_wide(2 * WORDS as u32));
                // Digits of 32 bits, from the lowest on; a carry is a number with its sign.
                let (mut digits, mut carry) = (Vec::new(), w.constant(0u32));
                for c in 0..WORDS as u32 {
                    let [low, high] = words.load_some::<_, 2>(w, 2 * c);
                    let digit = low + carry;
                    let over = digit.lt(low).select::<u32>(1, 0);
                    carry = high + (carry.to_i32() >> 31).to_u32() + over;
                    digits.push(digit);
                }
                digits.push(carry);
                let negative = (carry >> 31).eq(1);
                let flip = negative.select::<u32>(u32::MAX, 0);
                let mut plus = negative.select::<u32>(1, 0);
                let mut sum = w.constant(0.0f32);
                for (c, digit) in digits.into_iter().enumerate() {
                    let size = (digit ^ flip) + plus;
                    plus = (plus.eq(1) & size.eq(0)).select::<u32>(1, 0);
                    // The carry of the last word lies beyond all f32.
                    let unit = if c < WORDS as usize { 2f32.powi(32 * c as i32 - 117) } else { f32::INFINITY };
                    let part = size.to_f32() * unit;
                    sum = size.eq(0).select::<f32>(sum, sum + part);
                }
                let sum = negative.select::<f32>(-sum, sum);
                to.store(w, i, to.load(w, i) + sum);
            });
        });
    })
}
