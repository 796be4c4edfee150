//! A product belongs to a role, whose warpgroups are whole; a block may have any number of warps.

use fulgurite_ptx::{Kernel, Target};

fn main() {
    let _ = Kernel::build("k", Target::HOPPER, |k| {
        k.threads(128, |w| {
            let _ = w.accumulators(64);
            w.multiply();
        });
    });
}
