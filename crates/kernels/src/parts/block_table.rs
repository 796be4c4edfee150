//! The table of a block mask: the kind of each block (hidden 0, partial 1, full 2), made from the lists.
//!
//! Forward attention looks up the block of each element if its tile sizes do not divide the blocks. Backward attention
//! iterates from keys to queries while the lists go from queries to keys: it looks up the block of each step, or of each
//! element if blocks are not whole steps.

use crate::params::{Bindings, Params, Program};
use crate::parts::arguments::DeviceBlockLists;
use crate::parts::block_lists::NAMES;
use fulgurite_core::expr::{self, AuxSpec, Expr, Type, batch, head, k, load, q};
use fulgurite_core::{BlockSpec, DType, Problem};
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{BuildError, Kernel, Pointer, Target, Val};
use std::sync::{Arc, OnceLock};

/// Threads of a CTA, which writes one row of the table.
const THREADS: u32 = 256;
/// Name of the table among a problem's auxiliary tensors.
const COVERAGE: &str = "block coverage";

/// The lists, and the table to write.
#[derive(Debug, Clone, Copy)]
struct TableCall {
    to: Span,
    lists: DeviceBlockLists,
    /// Entries per row of the table.
    columns: u32,
}

/// The parameters of one list.
#[derive(Clone, Copy)]
struct ListParams<'k> {
    counts: Pointer<'k, u32>,
    blocks: Pointer<'k, u32>,
    /// Stride from one list to the next, in entries.
    width: Val<'k, u32>,
}

struct TableParams<'k> {
    to: Pointer<'k, u32>,
    lists: [ListParams<'k>; 2],
    columns: Val<'k, u32>,
}

impl<'k> TableParams<'k> {
    fn declare(p: &Params<'k, TableCall>) -> Self {
        let to = p.array("to", |call| call.to);
        let lists = [0, 1].map(|i: usize| ListParams {
            counts: p.array(&format!("{}_counts", NAMES[i]), move |call| call.lists.counts[i]),
            blocks: p.array(&format!("{}_blocks", NAMES[i]), move |call| call.lists.blocks[i]),
            width: p.u32(&format!("{}_width", NAMES[i]), move |call| call.lists.widths[i]),
        });
        TableParams { to, lists, columns: p.u32("columns", |call| call.columns) }
    }
}

/// Writes one row of the table. Lists in device memory are not validated, so entries outside the table are ignored.
pub fn kernel(target: Target) -> Result<Kernel, BuildError> {
    let program = Program::build("attention_block_table", target, |p| {
        let TableParams { to, lists, columns } = TableParams::declare(p);
        p.builder().threads(THREADS, |w| {
            let row = w.cta();
            let to = to.at_wide(row.mul_wide(columns));
            w.each(w.thread(), columns, THREADS, |w, column| to.store(w, column, 0u32));
            for (ListParams { counts, blocks, width }, is) in lists.into_iter().zip(1u32..) {
                w.sync();
                let blocks = blocks.at_wide(row.mul_wide(width));
                w.each(w.thread(), counts.load(w, row).min(width), THREADS, |w, i| {
                    let column = blocks.load(w, i);
                    w.when(column.lt(columns), |w| to.store(w, column, is));
                });
            }
        });
    });
    Ok(program?.into_kernel())
}

/// The launch that writes a table of this shape from the lists.
pub(crate) fn launch(kernel: &Arc<Kernel>, lists: DeviceBlockLists, shape: &[usize], to: Span) -> Launch {
    static BINDINGS: OnceLock<Bindings<TableCall>> = OnceLock::new();
    let bindings = BINDINGS.get_or_init(|| {
        Bindings::declared(|p| {
            TableParams::declare(p);
        })
    });
    let columns = shape.last().map_or(1, |&n| n as u64).max(1);
    let rows = shape.iter().map(|&n| n as u64).product::<u64>() / columns;
    bindings.launch(kernel.clone(), [rows as u32, 1, 1], &TableCall { to, lists, columns: columns as u32 })
}

/// The kind of a block as an expression over the table, which joins the auxiliary tensors.
fn kind(problem: &Problem, spec: BlockSpec, aux: &mut Vec<AuxSpec>) -> Expr {
    let [q_blocks, k_blocks] = spec.blocks(problem.max_q_len(), problem.max_k_len());
    let shape = vec![spec.batch, spec.heads, q_blocks, k_blocks];
    aux.push(AuxSpec { name: COVERAGE.into(), dtype: DType::I32, shape, grad: false });
    let shared = |n: usize, index: Expr| if n == 1 { 0.into() } else { index };
    let at = [shared(spec.batch, batch()), shared(spec.heads, head()), q() / spec.rows as i32, k() / spec.cols as i32];
    load(COVERAGE, at)
}

fn compiled(expr: &Expr, aux: &[AuxSpec], ty: Type) -> expr::Program {
    expr::Program::compile(expr, aux, ty).unwrap_or_else(|e| panic!("bug in fulgurite: the mask of blocks: {e}"))
}

/// The mask of a problem whose blocks no tile size divides: a program that looks up the block of each element. Adds the
/// table to the auxiliary tensors.
pub(crate) fn covered(problem: &Problem, spec: BlockSpec, aux: &mut Vec<AuxSpec>) -> expr::Program {
    let kind = kind(problem, spec, aux);
    let partial = kind.clone().equals(1);
    let partial = problem.mask().expr().map_or(partial.clone(), |mask| partial & mask);
    compiled(&(kind.equals(2) | partial), aux, Type::Bool)
}

/// A block mask in two programs, for tiles that lie in one block each: the kind of the block, and the mask of partial blocks
/// if there is one. Adds the table to the auxiliary tensors.
pub(crate) fn by_block(
    problem: &Problem,
    spec: BlockSpec,
    aux: &mut Vec<AuxSpec>,
) -> (expr::Program, Option<expr::Program>) {
    let kind = kind(problem, spec, aux);
    (compiled(&kind, aux, Type::Int), problem.mask().expr().map(|mask| compiled(&mask, aux, Type::Bool)))
}
