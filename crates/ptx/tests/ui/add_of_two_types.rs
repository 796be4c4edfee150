//! Numbers of different types are not added: the author converts one of them.

use fulgurite_ptx::{Kernel, Target};

fn main() {
    let _ = Kernel::build("k", Target::HOPPER, |k| {
        let (n, x) = (k.param::<u32>("n"), k.param::<f32>("x"));
        k.threads(32, |_| {
            let _ = n + x;
        });
    });
}
