//! Tile configurations of the `mma.sync` kernel of backward, by head dimension and shared memory.

use crate::attention::backward::{Adds, BackwardConfig, Features, Pack, Share};
use fulgurite_ptx::{Arch, TensorUnit};

/// Bytes of an element.
const BYTES: u32 = 2;

impl BackwardConfig {
    /// A configuration of the `mma.sync` kernel.
    const fn of_warps(share: Share, rows: u32, depth: u32) -> BackwardConfig {
        BackwardConfig {
            share,
            rows,
            adds: Adds::Threads,
            depth,
            key_depth: 1,
            registers: [240, 24],
            early: 8,
            drain: true,
            pack: Pack::Early,
            turn: 1,
            rounds: false,
            pairs: None,
            last: None,
            sums: None,
            zeroed: None,
            head_splits: None,
            join: None,
        }
    }

    /// Whether the kernel multiplies by `mma.sync`.
    pub fn is_sync(&self) -> bool {
        self.share.unit() == TensorUnit::MmaSync
    }

    /// Bytes of shared memory of the `mma.sync` kernel.
    pub fn sync_bytes(&self, dims: [u32; 2]) -> u32 {
        let [d, dv] = self.padded(dims);
        let stages = match self.depth {
            4 => 2 * self.rows * (d + dv),
            depth => depth * self.rows * d.max(dv),
        };
        BYTES * (self.keys() * (d + dv) + stages + 2 * self.keys() * self.rows)
    }

    /// Registers of a thread of the `mma.sync` kernel that hold accumulators (of d_k and d_v, of d_q, of scores and their
    /// gradients), and those that hold addresses of stages after the second.
    fn sync_registers(&self, head_dim: u32) -> u32 {
        let [d, dv] = self.padded([head_dim; 2]);
        let accumulators = self.keys() * (d + dv) + self.rows * d + 2 * self.keys() * self.rows;
        accumulators / THREADS + 8 * (self.depth - 2)
    }

    /// Configurations of the `mma.sync` kernel for a head dimension, the fastest first.
    pub fn sync_choices(head_dim: u32) -> Vec<BackwardConfig> {
        let warps = BackwardConfig::of_warps;
        let [wide, narrow] = [Share::Warps32, Share::Warps16];
        let mut all = Vec::new();
        if head_dim <= 64 {
            all.extend([4, 3].map(|depth| warps(wide, 128, depth)));
        }
        if head_dim <= 128 {
            all.extend([4, 3, 2].map(|depth| warps(wide, 64, depth)));
        }
        all.extend([4, 3, 2].map(|depth| warps(narrow, 64, depth)));
        all
    }

    /// The first of these that fits a GPU's shared memory, and whose accumulators leave registers for the features.
    pub fn sync(features: &Features, arch: Arch) -> Option<BackwardConfig> {
        let (dims, ragged) = (features.dims, features.ragged.any());
        let largest = dims[0].max(dims[1]);
        let modifies = !features.modifiers.is_empty();
        let fits = |config: &BackwardConfig| {
            let crowded = match config.share {
                Share::Warps32 => {
                    let full = config.sync_registers(largest) > most_registers(arch);
                    modifies || full || ragged && (config.rows > 64 || largest > 96)
                }
                // On data-centre Blackwell, the addresses of a fourth stage spill beside a modifier.
                _ => modifies && arch.tensor == TensorUnit::Tcgen05 && config.depth > 3,
            };
            !crowded && config.sync_bytes(dims) + ROOM <= arch.shared_per_cta
        };
        BackwardConfig::sync_choices(largest).into_iter().find(fits)
    }
}

/// Threads of a CTA.
const THREADS: u32 = 256;

/// The most [registers](BackwardConfig::sync_registers) of that kind with which kernels of 32 keys a warp do not spill.
/// Architectures with another tensor unit keep more addresses in registers.
fn most_registers(arch: Arch) -> u32 {
    match arch.tensor {
        TensorUnit::MmaSync => u32::MAX,
        TensorUnit::Wgmma => 224,
        TensorUnit::Tcgen05 => 216,
    }
}

/// Bytes of shared memory that alignment may take.
const ROOM: u32 = 1024;
