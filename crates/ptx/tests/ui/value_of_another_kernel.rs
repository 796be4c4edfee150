//! A value is a register of its own kernel; in another kernel it would name a different one.

use fulgurite_ptx::{Kernel, Target};

fn main() {
    let _ = Kernel::build("outer", Target::HOPPER, |k| {
        let n = k.param::<u32>("n");
        let _ = Kernel::build("inner", Target::HOPPER, |k| {
            let x = k.pointer::<u32>("x");
            k.threads(32, |w| x.store(w, w.thread(), w.thread() + n));
        });
    });
}
