//! An approximate clock.

use crate::copy::Copy;
use crate::world::{Cluster, Warp, World};
use fulgurite_ptx::Kernel;
use fulgurite_ptx::inst::Op;

/// What happened when.
#[derive(Debug, Clone, Default)]
pub struct Timeline {}

impl Timeline {
    pub(crate) fn new(_kernel: &Kernel) -> Self {
        Timeline::default()
    }
}

impl World<'_> {
    pub(crate) fn issue(&mut self, _cluster: &Cluster, warp: &mut Warp, _op: &Op) {
        warp.now += 1;
    }
    pub(crate) fn product_time(&mut self, _block: u32, _role: usize, _group: u32, n: u32, now: u64, _pc: u32) -> u64 {
        now + u64::from(n) / 2
    }
    pub(crate) fn copy_time(&mut self, _copy: &Copy) -> u64 {
        self.now + 500
    }
}
