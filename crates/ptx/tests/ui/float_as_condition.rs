//! A number is no truth value.

use fulgurite_ptx::{Kernel, Target};

fn main() {
    let _ = Kernel::build("k", Target::HOPPER, |k| {
        let x = k.param::<f32>("x");
        k.threads(32, |w| w.when(x, |_| {}));
    });
}
