//! A value does not outlive the kernel it belongs to.

use fulgurite_ptx::{Kernel, Target};

fn main() {
    let mut kept = None;
    let _ = Kernel::build("k", Target::HOPPER, |k| {
        kept = Some(k.param::<u32>("n"));
    });
}
