//! What each block of a block mask is, from its lists: hidden 0, partial 1, whole 2.
//!
//! For kernels that look up the block of each element: forward where no tile divides the blocks, and backward, which walks from
//! keys to queries where lists go from queries to keys.

use crate::parts::arguments::{Arguments, DeviceBlockLists, Slots};
use crate::parts::block_lists::NAMES;
use fulgurite_core::expr::{AuxSpec, Expr, Program, Type, batch, head, k, load, q};
use fulgurite_core::{BlockSpec, DType, Problem};
use fulgurite_ptx::device::{Launch, Span, Value};
use fulgurite_ptx::{BuildError, Kernel, Target};
use std::sync::Arc;

/// Threads of a block, which has one row of blocks of the mask.
const THREADS: u32 = 256;
/// Name of the table.
const COVERAGE: &str = "block coverage";

/// Writes a row of the table. Entries outside of it are passed over: nobody has checked lists in a device's memory.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    Kernel::build("attention_cover", target, |k| {
        let to = k.array::<u32>("to");
        let lists = NAMES.map(|name| {
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

/// Writes the table, of this shape, from lists.
pub(crate) fn launch(kernel: &Arc<Kernel>, lists: DeviceBlockLists, shape: &[usize], to: Span) -> Launch {
    let columns = shape.last().map_or(1, |&n| n as u64).max(1);
    let DeviceBlockLists { counts, blocks, widths } = lists;
    let slots = Slots::of(kernel);
    let mut args = Arguments::new(&slots);
    args.add("to", Value::Pointer(to));
    args.add_u32("columns", columns);
    for (i, name) in NAMES.into_iter().enumerate() {
        args.add(&format!("{name}_counts"), Value::Pointer(counts[i]));
        args.add(&format!("{name}_blocks"), Value::Pointer(blocks[i]));
        args.add_u32(&format!("{name}_width"), widths[i].into());
    }
    let rows = shape.iter().map(|&n| n as u64).product::<u64>() / columns;
    Launch { kernel: kernel.clone(), grid: [rows as u32, 1, 1], args: args.finish() }
}

/// The mask of a problem with a block mask whose blocks no tile divides: each element looks its block up.
pub(crate) fn covered(problem: &Problem, spec: BlockSpec, aux: &mut Vec<AuxSpec>) -> Program {
    let [q_blocks, k_blocks] = spec.blocks(problem.max_q_len(), problem.max_k_len());
    let shape = vec![spec.batch, spec.heads, q_blocks, k_blocks];
    aux.push(AuxSpec { name: COVERAGE.into(), dtype: DType::I32, shape, grad: false });
    let shared = |n: usize, index: Expr| if n == 1 { 0.into() } else { index };
    let at = [shared(spec.batch, batch()), shared(spec.heads, head()), q() / spec.rows as i32, k() / spec.cols as i32];
    let coverage = load(COVERAGE, at);
    let partial = coverage.clone().equals(1);
    let partial = problem.mask().expr().map_or(partial.clone(), |mask| partial & mask);
    Program::compile(&(coverage.equals(2) | partial), aux, Type::Bool)
        .unwrap_or_else(|e| panic!("bug in fulgurite: the mask of blocks: {e}"))
}
