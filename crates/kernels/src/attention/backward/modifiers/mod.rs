//! Score and mask modifiers in backward. Let m be the modified score, z the scaled score and a an element of an auxiliary
//! tensor. Then d_m = p (d_p - delta), d_z = d_m dm/dz, and d_a is the sum of d_m dm/da over all scores that read a.

mod data;
mod role;

pub(crate) use data::is_one;
pub use data::{ModifierGradients, RegisterPressure};
pub(crate) use role::{AuxGradientArgs, ModifierArgs, ModifierParams, ModifierRole};
