//! Gradients of attention on Hopper: three kernels.
//!
//! With z = scale s, p = e^(z - LSE) and delta = sum of d_o o over a row, less the gradient of its LSE:
//! d_p = d_o v^T, d_z = p (d_p - delta), d_v = p^T d_o, d_k = scale d_z^T q, d_q = scale d_z k.
//! [`prepare`] computes delta and the LSE in powers of two and zeroes the sum of d_q, [`main`] everything else, and
//! [`finish`] rounds d_q. A row without keys has a gradient of zeros.

pub mod finish;
pub mod main;
pub mod plan;
pub mod prepare;

use fulgurite_core::{Exp, Mask};

/// Keys of a tile: two warpgroups of 64.
pub const KEYS: u32 = 128;

/// When p is rounded to the operand of d_v.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pack {
    /// With the exponentials.
    Early,
    /// With d_z: fewer registers while d_p is waited for.
    Late,
}

/// How the main kernel is cut: measured choices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Queries of a step: 64, and the warpgroups share the columns of d_q, or 128, and they share its rows.
    pub rows: u32,
    /// Stages of Q and of d_o, and tiles of d_z.
    pub depth: u32,
    /// Stages of K and V.
    pub key_depth: u32,
    /// Registers of a thread that computes, and of one that loads.
    pub registers: [u32; 2],
    /// In eighths: how much of d_q is added before the scores of the next step are started.
    pub early: u32,
    /// Whether nothing is in flight when the scores of the next step are started.
    pub drain: bool,
    /// When p is rounded.
    pub pack: Pack,
}

impl Tuning {
    /// What measured best on an H200 for a head dimension.
    pub fn hopper(head_dim: u32) -> Tuning {
        let base = Tuning {
            rows: 64,
            depth: 2,
            key_depth: 1,
            registers: [240, 24],
            early: 4,
            drain: false,
            pack: Pack::Early,
        };
        match head_dim {
            ..=64 => Tuning { rows: 128, drain: true, pack: Pack::Late, ..base },
            _ => base,
        }
    }

    /// Columns of d_q that a warpgroup has, for rows of `dim` elements.
    pub fn cols(&self, dim: u32) -> u32 {
        if self.rows == 64 { dim / 2 } else { dim }
    }
}

/// What of a problem shapes the kernels' text: everything but lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of v and o, as the products see them: multiples of 16, the first of 128 where
    /// warpgroups share the columns of d_q. Rows of tensors may be shorter.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// How p is computed.
    pub exp: Exp,
    /// Whether the LSE has a gradient.
    pub d_lse: bool,
}
