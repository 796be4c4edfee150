//! f32 sums that do not depend on the order of additions: they are integer sums.
//!
//! A finite f32 is 24 bits at some binary position, from 2^-149 on. An element has a word of 64 bits for each 32 positions. A
//! term adds, with its sign, at most 32 of its bits to one word and the others to the next. 2^31 terms fit.
//!
//! Bits below 2^-117 are dropped from each term, so terms of at least 2^-94 are exact. Terms that are not finite are added to
//! the f32 element itself: the order does not matter to infinities and NaN.

use crate::attention::backward::d_q::service::{Log, Service};
use crate::params::{Params, Program};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{BuildError, Group, Kernel, Pointer, Scope, Target, Val, Who};
use std::rc::Rc;

/// Threads of a CTA of [`kernel`]. Each has one element.
pub const THREADS: u32 = 256;
/// 64-bit words of an element, for positions from 2^-117 on.
pub const WORDS: u64 = 8;
// The largest f32 ends in the last word.
const _: () = assert!((254 - 1) / 32 < WORDS);

/// Exact sums of a gradient in the main kernel. Threads of the compute role add; nothing waits.
pub(crate) struct ExactSums<'k> {
    words: Pointer<'k, u64>,
    log: Rc<Log>,
}

impl<'k> Service<'k> for ExactSums<'k> {}

impl<'k> ExactSums<'k> {
    /// Declares the words.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        name: &str,
        words: impl Fn(&C) -> Option<Span> + Send + Sync + 'static,
        log: &Rc<Log>,
    ) -> Self {
        let words = p.pointer(name, move |call| words(call).expect("bug in fulgurite: exact sums without words"));
        ExactSums { words, log: log.clone() }
    }

    /// Adds `x` to the element `at` of `to`.
    pub fn add(&self, w: &Scope<'k, Group>, to: Pointer<'k, f32>, at: Val<'k, u64>, x: Val<'k, f32>) {
        self.log.acts("exact");
        add(w, self.words, to, at, x);
    }
}

/// Adds `x` to the element `at`: to its words, or to itself if `x` is not finite.
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
    // Smaller terms have no bits in the words.
    w.when(finite & exponent.gt(8), |w| {
        let mantissa = (bits & 0x7f_ffff) + 0x80_0000;
        let bit = exponent - 1;
        let power = w.constant(1u32) << (bit & 31);
        let sign = bits >> 31;
        let flip = w.constant(0u32) - sign;
        // A negative number in two's complement has all bits flipped, plus 1.
        let signed = |x: Val<'k, u32>| (x ^ flip).to_u64() + flip.to_u64().mul_wide_64(1 << 32) + sign.to_u64();
        let own = words.at_wide(at.mul_wide_64(WORDS) + (bit >> 5).to_u64());
        // The lower bits go to the word before. Positions below the first word are dropped.
        w.when(bit.ge(32), |w| {
            let before = Pointer::<u64>::at_address(own.address() + (-8i64) as u64);
            before.add(w, 0, signed(mantissa * power));
        });
        own.add(w, 0, signed(mantissa.mul_high(power)));
    });
}

/// A launch.
pub(crate) struct ExactCall {
    pub words: Span,
    pub to: Span,
    /// Elements.
    pub count: u32,
}

/// The kernel that rounds exact sums, without the arguments of its launches: words, elements, and their number.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Ok(program(target)?.into_kernel())
}

/// Adds the sums in the words to the elements, which hold 0 or a sum that is not finite.
pub(crate) fn program(target: Target) -> Result<Program<ExactCall>, BuildError> {
    Program::build("attention_backward_exact", target, |p| {
        let words = p.pointer::<u32>("words", |call: &ExactCall| call.words);
        let to = p.array::<f32>("to", |call| call.to);
        let count = p.u32("count", |call| call.count);
        p.builder().threads(THREADS, |w| {
            let i = w.cta().mul_add(THREADS, w.thread());
            w.when(i.lt(count), |w| {
                let words = words.at_wide(i.mul_wide(2 * WORDS as u32));
                // Digits of 32 bits, from the lowest on. The carry has a sign.
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
                    // The carry of the last word exceeds every f32.
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
