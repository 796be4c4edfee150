//! One thread starts a copy: a whole group would start it 128 times.

use fulgurite_ptx::{Kernel, Number, Target, TileShape, Warpgroups};

fn main() {
    let _ = Kernel::build("k", Target::HOPPER, |k| {
        let shape = TileShape::new(Number::Bf16, 64, 64);
        let (x, ring) = (k.tensor("x", shape, 2), k.pipe("ring", 2, &[shape]));
        k.role("load", Warpgroups(1), |w| {
            let at = [w.constant(0), w.constant(0)];
            w.one_thread(|t| ring.put(t, |_, stage| stage.load(w, stage.tile(0), &x, &at)));
        });
    });
}
