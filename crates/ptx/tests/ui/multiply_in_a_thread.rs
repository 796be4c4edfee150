//! A product belongs to a whole warpgroup, not to a thread of it.

use fulgurite_ptx::{Kernel, Major, Number, Sum, Target, TileShape, Warpgroups};

fn main() {
    let _ = Kernel::build("k", Target::HOPPER, |k| {
        let x = k.tile("x", TileShape::new(Number::Bf16, 64, 64)).operand(Major::Inner);
        k.role("multiply", Warpgroups(1), |w| {
            let acc = w.accumulators(64);
            w.one_thread(|t| t.multiply(&acc, x, x, Sum::Fresh));
        });
    });
}
