//! What each block of a block mask is, from its lists: hidden 0, partial 1, whole 2.
//!
//! Lists go from queries to keys, and the main kernel walks the other way: it looks blocks up.

use fulgurite_ptx::{BuildError, Kernel, Target};

/// Threads of a block, which has one row of blocks of the mask.
pub const THREADS: u32 = 256;

/// Writes a row of the table. Entries outside of it are passed over: nobody has checked lists in a device's memory.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Kernel::build("attention_backward_cover", target, |k| {
        let to = k.array::<u32>("to");
        let lists = ["partial", "full"].map(|name| {
            let [counts, blocks] = ["counts", "blocks"].map(|of| k.array::<u32>(&format!("{name}_{of}")));
            (counts, blocks, k.param::<u32>(&format!("{name}_width")))
        });
        let columns = k.param::<u32>("columns");
        k.threads(THREADS, |w| {
            let row = w.block();
            let to = to.at_wide(row.mul_wide(columns));
            w.each(w.thread(), columns, THREADS, |w, column| to.store(w, column, 0u32));
            for ((counts, blocks, width), is) in lists.into_iter().zip(1u32..) {
                w.sync();
                let blocks = blocks.at_wide(row.mul_wide(width));
                w.each(w.thread(), counts.load(w, row).min(width), THREADS, |w, i| {
                    let column = blocks.load(w, i);
                    w.when(column.lt(columns), |w| to.store(w, column, is));
                });
            }
        });
    })
}
