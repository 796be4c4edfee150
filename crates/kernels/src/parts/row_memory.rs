//! Tensors of rows that threads address themselves, on GPUs without TMA or beside it.

use crate::params::{Lens, Params};
use crate::parts::arguments::DeviceTensor;
use fulgurite_ptx::{GlobalRows, Group, Pointer, Scope, Tile, Val};

/// Bytes that a thread stores at a time.
const UNIT: u32 = 16;

/// A tensor of rows that threads address themselves. Strides are in bytes.
pub(crate) struct RowMemory<'k> {
    memory: Pointer<'k, u32>,
    batch: Val<'k, u64>,
    row: Val<'k, u64>,
    head: Val<'k, u64>,
    /// Bytes per row.
    bytes: Val<'k, u32>,
}

/// The sequence of a block of rows.
#[derive(Clone, Copy)]
pub(crate) enum RowsOf<'k> {
    /// A sequence of a batch of equal sequences, by its index.
    Sequence(Val<'k, u32>),
    /// The sequence that begins at this row of all rows.
    Start(Val<'k, u32>),
}

impl<'k> RowMemory<'k> {
    /// Declares the parameters; `at` finds the tensor in a call, and `bytes` the size of its elements.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        name: &str,
        at: impl Lens<C, DeviceTensor>,
        bytes: impl Fn(&C) -> u32 + Copy + Send + Sync + 'static,
    ) -> Self {
        let stride = |axis: usize| move |call: &C| at(call).strides[axis] * u64::from(bytes(call));
        RowMemory {
            memory: p.pointer(name, move |call| at(call).span),
            batch: p.u64(&format!("{name}_batch"), stride(0)),
            row: p.u64(&format!("{name}_row"), stride(1)),
            head: p.u64(&format!("{name}_head"), stride(2)),
            bytes: p.u32(&format!("{name}_bytes"), move |call| at(call).shape[3] as u32 * bytes(call)),
        }
    }

    /// The rows of a head in a sequence, from row `first` on; `count` is the number of the sequence's rows. `of` is asked for the
    /// sequence after the head's address is known.
    #[track_caller]
    pub fn rows(
        &self,
        of: impl FnOnce() -> RowsOf<'k>,
        head: Val<'k, u32>,
        [first, count]: [Val<'k, u32>; 2],
    ) -> GlobalRows<'k> {
        let part = |n: Val<'k, u32>, stride: Val<'k, u64>| n.to_u64().mul_wide_64(stride);
        let start = self.memory.address() + part(head, self.head);
        let address = match of() {
            RowsOf::Start(row) => start + part(row + first, self.row),
            RowsOf::Sequence(batch) => start + part(batch, self.batch) + part(first, self.row),
        };
        GlobalRows { address, stride: self.row, rows: count - first.min(count), skip: None, bytes: self.bytes }
    }
}

/// Threads that store rows together: the calling thread's index among them, and their number.
pub(crate) struct Storers<'k> {
    pub own: Val<'k, u32>,
    pub count: u32,
}

impl<'k> Storers<'k> {
    /// Stores `rows` rows of a tile, each of `units` units of 16 bytes, as far as they exist in memory.
    pub fn store(&self, w: &Scope<'k, Group>, from: Tile<'k>, shape: [u32; 2], to: GlobalRows<'k>) {
        self.store_and(w, from, shape, to, |_, _, _, _| {});
    }

    /// Like [`store`](Self::store), and passes the row, number and words of each unit that is stored to `also`.
    pub fn store_and(
        &self,
        w: &Scope<'k, Group>,
        from: Tile<'k>,
        [rows, units]: [u32; 2],
        to: GlobalRows<'k>,
        also: impl Fn(&Scope<'k, Group>, Val<'k, u32>, Val<'k, u32>, [Val<'k, u32>; 4]),
    ) {
        let all = rows * units;
        for step in 0..all.div_ceil(self.count) {
            let index = self.own + step * self.count;
            let (row, unit) = (index / units, index % units);
            let column = unit * UNIT;
            let inside = row.lt(to.rows.min(rows)) & column.lt(to.bytes);
            w.when(inside, |w| {
                let words = from.read_unit(w, row, unit);
                let address = to.address + row.to_u64().mul_wide_64(to.stride) + column.to_u64();
                Pointer::<u32>::at_address(address).store_some(w, 0, words);
                also(w, row, unit, words);
            });
        }
    }
}
