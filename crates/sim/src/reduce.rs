//! Reductions in memory: each element is combined with the old value.

use fulgurite_ptx::machine::Reduction;
use fulgurite_ptx::{bf16, f16, model};

fn integer(way: Reduction, old: u32, new: u32) -> u32 {
    match way {
        Reduction::Add => old.wrapping_add(new),
        Reduction::Min => old.min(new),
        Reduction::Max => old.max(new),
        Reduction::And => old & new,
        Reduction::Or => old | new,
        Reduction::Xor => old ^ new,
        Reduction::Inc => {
            if old >= new {
                0
            } else {
                old + 1
            }
        }
        Reduction::Dec => {
            if old == 0 || old > new {
                new
            } else {
                old - 1
            }
        }
    }
}

fn float(way: Reduction, old: f32, new: f32) -> f32 {
    match way {
        Reduction::Min => model::min(old, new),
        Reduction::Max => model::max(old, new),
        _ => old + new,
    }
}

/// Combines elements of a type, given by its PTX name; bytes past the last whole element do not change.
pub(crate) fn combine(way: Reduction, number: &str, old: &mut [u8], new: &[u8]) {
    match number {
        "f16" => {
            for (old, new) in old.chunks_exact_mut(2).zip(new.chunks_exact(2)) {
                let [a, b] = [[old[0], old[1]], [new[0], new[1]]].map(|x| f16::from_le_bytes(x).to_f32());
                old.copy_from_slice(&f16::from_f32(float(way, a, b)).to_le_bytes());
            }
        }
        "bf16" => {
            for (old, new) in old.chunks_exact_mut(2).zip(new.chunks_exact(2)) {
                let [a, b] = [[old[0], old[1]], [new[0], new[1]]].map(|x| bf16::from_le_bytes(x).to_f32());
                old.copy_from_slice(&bf16::from_f32(float(way, a, b)).to_le_bytes());
            }
        }
        _ => {
            let is_float = matches!(number, "f32" | "tf32");
            for (old, new) in old.chunks_exact_mut(4).zip(new.chunks_exact(4)) {
                let [a, b] = [&*old, new].map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]]));
                let bits = match (is_float, way) {
                    (true, Reduction::Add) => model::add_flush(f32::from_bits(a), f32::from_bits(b)).to_bits(),
                    (true, Reduction::Min | Reduction::Max) => {
                        float(way, f32::from_bits(a), f32::from_bits(b)).to_bits()
                    }
                    _ => integer(way, a, b),
                };
                old.copy_from_slice(&bits.to_le_bytes());
            }
        }
    }
}
