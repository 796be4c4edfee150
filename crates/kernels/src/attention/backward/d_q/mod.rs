//! Services around the accumulation of d_q: its order, its conversion to 16 bits, zeros, split tiles, exact sums.

pub mod exact;
pub(crate) mod ordered;
pub(crate) mod round;
pub(crate) mod split_tiles;
pub(crate) mod zero_fill;

/// The arguments of a service that the kernel has.
fn given<A>(args: &Option<A>) -> &A {
    args.as_ref().expect("bug in fulgurite: a service of the kernel has no arguments")
}
