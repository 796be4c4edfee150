//! Scales of products in tensor memory: how the queue of products copies them there, and how products read them.

use crate::clock::Clock;
use crate::clock::Part;
use crate::finding::Fault;
use crate::multiply::Matrix;
use crate::shadow::{Access, Toucher};
use crate::tensor_memory::Work;
use crate::view::View;
use crate::world::{Cluster, SHARED_BASE, World, access_of};
use fulgurite_ptx::Swizzle;
use fulgurite_ptx::tcgen05::{
    CtaGroup, LANES, ProductShape, SCALE_BLOCK_COLUMNS, ScaleKind, WARP_LANES, descriptor, lane_and_column,
};

/// A copy of a block of scales that is to be done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaleCopy {
    /// Address in tensor memory.
    pub to: u32,
    /// Descriptor of the bytes in shared memory.
    pub from: u64,
    pub group: CtaGroup,
}

/// A block of scales in tensor memory.
pub(crate) struct ScaleBlock {
    /// The copy that brought it.
    by: Access,
    /// Mask of the bytes of its cells that products have read, and the last of these products.
    read: u8,
    reader: Option<Access>,
}

/// The mask of all bytes of a cell.
const WHOLE: u8 = 0b1111;

impl View<'_, '_> {
    /// Starts a copy of scales, in the queue of the thread's products.
    pub fn start_scale_copy(&mut self, lane: u32, what: ScaleCopy) {
        let issued = access_of(self.warp, self.block_index(), self.warp.pc, false);
        let Some(ranks) = self.group_ranks(what.group) else { return };
        self.one_issuer(&ranks, issued);
        let (at, completion) = (self.queue(lane), self.world.ledger.completion());
        let start = self.queue_start(at, completion, None);
        self.queue_work(at, &ranks, Work::CopyScales { what, start, completion, issued }, completion, issued);
        self.enqueue(at, None);
    }
}

impl World<'_> {
    /// Copies a block of scales in each CTA of the group.
    pub fn copy_scales(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        what: &ScaleCopy,
        (access, start): (&Access, &Clock),
    ) {
        let ([lane, column], columns) = (lane_and_column(what.to), SCALE_BLOCK_COLUMNS);
        let from = match descriptor(what.from) {
            Ok(from) if from.swizzle == Swizzle::None => from,
            Ok(from) => {
                let text = format!("a copy of scales with swizzle {:?}, allowed: None", from.swizzle);
                return self.wrong_product(access, Fault::Operand, text, None);
            }
            Err(why) => {
                return self.wrong_product(access, Fault::Operand, format!("a copy of scales has {why}"), None);
            }
        };
        for rank in what.group.ranks(rank) {
            let block = &mut cluster.blocks[rank];
            if block.running == 0 {
                let text = "a copy of scales reaches a CTA that has ended".to_owned();
                return self.wrong_product(access, Fault::Exit, text, None);
            }
            if lane != 0 || !block.tensor.holds(column, columns) {
                let text = format!("scales of {columns} columns from {column}, lane {lane}, which were not allocated");
                return self.wrong_product(access, Fault::OutOfBounds, text, Some(what.to.into()));
            }
            let clocks = [start];
            let mut t = Toucher::new(&clocks, *access, Part::AsyncShared);
            let (mut found, mut unwritten) = (None, None);
            let mut cells = [[0; SCALE_BLOCK_COLUMNS as usize]; WARP_LANES as usize];
            for (row, cells) in (0..).zip(&mut cells) {
                let at = i64::from(from.address + row / 8 * from.stride + row % 8 * 16) - i64::from(SHARED_BASE);
                let (Ok(start), true) = (usize::try_from(at), at + 16 <= block.shared.len() as i64) else {
                    let text = "a copy of scales reads outside the block's shared memory".to_owned();
                    return self.wrong_product(access, Fault::OutOfBounds, text, None);
                };
                if self.options.checks {
                    unwritten = unwritten.or(block.shadow.unwritten(start as u64, 16));
                    let conflict = block.shadow.read(&mut self.ledger, &mut t, start as u64, 16);
                    found = found.or(conflict);
                }
                for (cell, bytes) in cells.iter_mut().zip(block.shared[start..start + 16].chunks_exact(4)) {
                    *cell = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
            let base = u64::from(SHARED_BASE);
            if let Some(conflict) = found {
                self.conflict(conflict, conflict.offset + base, access, None, false);
            }
            if let Some(at) = unwritten {
                let text = "a copy of scales reads shared memory that nobody wrote".to_owned();
                self.wrong_product(access, Fault::Uninitialised, text, Some(at + base));
            }
            self.touch_columns(cluster, rank, (column, columns), (access, start), true);
            self.unread_scales(cluster, rank, (column, columns));
            cluster.blocks[rank].tensor.scales.insert(column, ScaleBlock { by: *access, read: 0, reader: None });
            for lane in 0..LANES {
                let row = cluster.blocks[rank].tensor.row(lane, column, columns);
                row.copy_from_slice(&cells[(lane % WARP_LANES) as usize]);
            }
        }
    }

    /// The scales of `count` rows of A or columns of B that a product reads: one row of the matrix for each, with the scales
    /// of one instruction.
    pub fn scales(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        (address, first, count): (u32, u32, u32),
        of: ScaleKind,
        (access, start): (&Access, &Clock),
    ) -> Option<Matrix> {
        let ([lane, column], columns) = (lane_and_column(address), count.div_ceil(WARP_LANES));
        if lane != 0 || !cluster.blocks[rank].tensor.holds(column, columns) {
            let text = format!("scales of {columns} columns from {column}, lane {lane}, which were not allocated");
            self.wrong_product(access, Fault::OutOfBounds, text, Some(address.into()));
            return None;
        }
        self.touch_columns(cluster, rank, (column, columns), (access, start), false);
        let mut scales = Matrix::new(count as usize, of.bytes as usize);
        let mut differs = None;
        let tensor = &mut cluster.blocks[rank].tensor;
        let last = column + columns;
        for (_, block) in tensor.scales.range_mut((column + 1).saturating_sub(SCALE_BLOCK_COLUMNS)..last) {
            block.read |= ((1 << of.bytes) - 1) << first;
            block.reader = Some(*access);
        }
        for row in 0..count {
            let column = column + row / WARP_LANES;
            let cells: [u32; (LANES / WARP_LANES) as usize] =
                std::array::from_fn(|quarter| tensor.row(row % WARP_LANES + WARP_LANES * quarter as u32, column, 1)[0]);
            for i in 0..of.bytes {
                let bytes = cells.map(|cell| (cell >> (8 * (first + i))) as u8);
                differs = differs.or(bytes.iter().any(|byte| *byte != bytes[0]).then_some(column));
                scales.set(row as usize, i as usize, (of.value)(bytes[0]).into());
            }
        }
        if let Some(column) = differs {
            let text = format!("the scales in column {column} differ between the quarters of the lanes");
            self.wrong_product(access, Fault::TensorMemory, text, Some(column.into()));
        }
        Some(scales)
    }

    /// Reports blocks of scales of which products read some and left out others. Columns that are freed or overwritten lose
    /// their blocks.
    pub fn unread_scales(&mut self, cluster: &mut Cluster, rank: usize, (column, columns): (u32, u32)) {
        let tensor = &mut cluster.blocks[rank].tensor;
        let mut later = tensor.scales.split_off(&column);
        tensor.scales.append(&mut later.split_off(&(column + columns)));
        if !self.options.whole_scales {
            return;
        }
        for (column, block) in later {
            let bytes = |mask: u8| (0..4).filter(move |i| mask >> i & 1 == 1);
            let differ = |cell: u32| {
                let byte = |i: u32| (cell >> (8 * i)) as u8;
                bytes(WHOLE & !block.read).any(|i| bytes(block.read).any(|read| byte(i) != byte(read)))
            };
            let cells: Vec<u32> = (0..WARP_LANES).flat_map(|lane| tensor_cells(cluster, rank, lane, column)).collect();
            if block.read == 0 || block.read == WHOLE || !cells.into_iter().any(differ) {
                continue;
            }
            let left_out: Vec<String> = bytes(WHOLE & !block.read).map(|i| i.to_string()).collect();
            let what = format!(
                "scales {} of four in column {column} were copied, differ from the others, and no product reads them",
                left_out.join(", ")
            );
            let (here, other) = (self.side_of(&block.by), block.reader.map(|reader| self.side_of(&reader)));
            self.report(Fault::TensorMemory, what, Some(column.into()), here, other);
        }
    }

    /// The scales of both operands of a product: those of A in each CTA, those of B complete in every CTA.
    pub fn operand_scales(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        (addresses, shape, group): ([u32; 2], &ProductShape, CtaGroup),
        by: (&Access, &Clock),
    ) -> Option<Vec<[Matrix; 2]>> {
        let of = shape.kind.scales()?;
        let [first_a, first_b] = shape.scale_bytes;
        let mut all = Vec::new();
        for rank in group.ranks(rank) {
            let rows = shape.rows / group.ctas();
            let a = self.scales(cluster, rank, (addresses[0], first_a, rows), of, by)?;
            let b = self.scales(cluster, rank, (addresses[1], first_b, shape.cols), of, by)?;
            all.push([a, b]);
        }
        Some(all)
    }
}

/// The cells of a block of scales in a lane.
fn tensor_cells(cluster: &mut Cluster, rank: usize, lane: u32, column: u32) -> Vec<u32> {
    cluster.blocks[rank].tensor.row(lane, column, SCALE_BLOCK_COLUMNS).to_vec()
}
