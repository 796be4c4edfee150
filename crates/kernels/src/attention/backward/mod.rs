//! Gradients of attention: three to five kernels, and small ones for sinks, auxiliary gradients and block masks.
//!
//! With z = scale s, p = e^(z - LSE) and delta = sum of d_o o over a row, less the gradient of its LSE:
//! d_p = d_o v^T, d_z = p (d_p - delta), d_v = p^T d_o, d_k = scale d_z^T q, d_q = scale d_z k.
//!
//! 1. [`prepare`] computes delta and the LSE in powers of two. It zeroes the f32 sums of d_q that the first tiles need.
//! 2. [`main`] (on Hopper), [`tcgen05`] (on data-centre Blackwell) or [`mma_sync`] (on every GPU since Ampere) computes d_k, d_v and the sums of d_q. With the [rounding service](d_q) it also converts d_q to 16 bits.
//! 3. [`finish`] converts d_q otherwise.
//! 4. [`heads`] adds the parts of d_k and d_v, if the query heads of a key/value head are spread over CTAs.
//! 5. [`repair`] computes rows again that hidden rows made NaN (`marks`); usually there are none.
//!
//! A row without keys has a gradient of zeros.
//!
//! Three types say what is computed and how. [`Features`] holds facts of the problem. [`BackwardConfig`] is a measured
//! choice of tiles, stages and registers. [`KernelShape`] is derived from both
//! and from the problem's sizes ([`plan`]), and decides which services the main kernel has.

pub mod config;
mod cursor;
pub mod d_q;
mod features;
pub mod finish;
pub mod heads;
mod load;
pub mod main;
mod marks;
pub mod mma_sync;
mod modifiers;
mod order;
pub mod plan;
pub mod prepare;
pub mod repair;
mod schedules;
mod shape;
mod share;
pub mod sinks;
mod spread;
mod state;
mod step_ranges;
pub mod tcgen05;
mod tensors;
mod tiles;
mod walk;
pub mod zero;

pub use config::{BackwardConfig, Pack};
pub use features::Features;
pub use modifiers::{ModifierGradients, RegisterPressure};
pub use order::Order;
pub use shape::{KernelShape, Spread};
pub use share::{Adds, Share};
