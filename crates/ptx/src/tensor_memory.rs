//! Tiles in tensor memory: products of one thread write them, and the warps of a warpgroup read and write their lanes.
//!
//! The builder allocates the columns that a kernel asks for in one piece: a warp takes them before any role begins and
//! frees them after all roles have ended. A tile is a range of these columns.

use crate::accumulators::{Fragment, Sum};
use crate::build::{Builder, Group, Half, IntoVal, Pair, Scope, Thread, Val, WholeWarps, Word};
use crate::inst::{Arg, Base, Class, Inst, Reg};
use crate::product::{Major, Number};
use crate::row_acc::RowAcc;
use crate::row_view::RowView;
use crate::table::{memory, sync, tcgen05 as rows};
use crate::tcgen05::{COLUMNS, CtaGroup, LANES, ProductKind, ProductShape, VERSION};
use crate::tensor_scales::TensorScales;
use crate::tile::TileOperand;
use std::ops::Range;
use std::panic::Location;

/// A tile in tensor memory: 128 rows, one to a lane. f32 elements take a column each; two 16-bit elements share one.
#[derive(Clone, Copy)]
pub struct TensorTile<'k> {
    k: &'k Builder,
    number: Number,
    /// Elements per row.
    cols: u32,
    /// First column among those of the kernel: a constant, and a part that is known at run time.
    column: u32,
    moved: Option<Val<'k, u32>>,
    /// The CTAs that have such a tile at the same address.
    group: CtaGroup,
}

/// The first operand of a product into tensor memory.
pub enum TensorOperand<'k> {
    /// A tile in shared memory.
    Shared(TileOperand<'k>),
    /// A tile of 16-bit elements in tensor memory.
    Tensor(TensorTile<'k>),
}

impl<'k> From<TileOperand<'k>> for TensorOperand<'k> {
    fn from(operand: TileOperand<'k>) -> Self {
        TensorOperand::Shared(operand)
    }
}
impl<'k> From<TensorTile<'k>> for TensorOperand<'k> {
    fn from(tile: TensorTile<'k>) -> Self {
        TensorOperand::Tensor(tile)
    }
}

impl Builder {
    /// Columns of tensor memory for `count` tiles of accumulators with 128 rows and `cols` columns; the first tile.
    #[track_caller]
    pub fn tensor_accumulators(&self, count: u32, cols: u32) -> TensorTile<'_> {
        self.accumulators_of("accumulators", count, cols, CtaGroup::Single)
    }

    /// Columns of tensor memory for `count` tiles of accumulators that belong to one CTA or to a pair.
    #[track_caller]
    pub(crate) fn accumulators_of(&self, name: &str, count: u32, cols: u32, group: CtaGroup) -> TensorTile<'_> {
        self.owns_tensor_memory(group);
        if !cols.is_multiple_of(16) || !(16..=256).contains(&cols) {
            self.refuse(format!("tensor memory of {cols} columns a tile, allowed: multiples of 16 up to 256"));
        }
        let column = self.take_columns(name, count * cols, Location::caller());
        TensorTile { k: self, number: Number::F32, cols, column, moved: None, group }
    }

    /// Decides whether single CTAs or pairs own the kernel's tensor memory. No kernel has both.
    #[track_caller]
    pub(crate) fn owns_tensor_memory(&self, group: CtaGroup) {
        let (first, at) = self.tensor_owner.get().unwrap_or((group, Location::caller()));
        self.tensor_owner.set(Some((first, at)));
        if first != group {
            let name = |group| match group {
                CtaGroup::Single => "single CTAs",
                CtaGroup::Pair => "a pair of CTAs",
            };
            self.refuse(format!(
                "tensor memory of {}, and of {} at {}:{}, allowed: one of the two in a kernel",
                name(group),
                name(first),
                at.file(),
                at.line()
            ));
        }
    }

    /// The CTAs that own the kernel's tensor memory.
    pub(crate) fn tensor_group(&self) -> CtaGroup {
        self.tensor_owner.get().map_or(CtaGroup::Single, |(group, _)| group)
    }

    /// Takes columns of tensor memory, and returns the first.
    #[track_caller]
    pub(crate) fn take_columns(&self, name: &str, columns: u32, at: &'static Location<'static>) -> u32 {
        self.tensor_uses.borrow_mut().push((name.into(), columns));
        let known = self.tensor.get();
        let (used, word, at) = known.unwrap_or_else(|| (0, self.take_small("tensor memory", 4, 4), at));
        let available = self.target().arch.tensor_columns;
        // Without tensor memory, the instructions that allocate it name the architectures that have it.
        if available > 0 && used + columns > available.min(COLUMNS) {
            let uses: Vec<String> =
                self.tensor_uses.borrow().iter().map(|(name, columns)| format!("{name} ({columns})")).collect();
            self.refuse(format!(
                "{} columns of tensor memory: {}, allowed: {available} on {}",
                used + columns,
                uses.join(", "),
                self.target().name()
            ));
        }
        self.tensor.set(Some((used + columns, word, at)));
        used
    }

    /// Columns that the kernel allocates, the shared-memory offset of their address, and the line that asked for them.
    fn tensor_columns(&self) -> Option<(u32, u32, &'static Location<'static>)> {
        let used = self.tensor.get();
        used.map(|(columns, word, at)| (columns.next_power_of_two().clamp(32, COLUMNS), word, at))
    }

    /// One warp allocates the kernel's tensor memory. A barrier of the CTA must follow.
    pub(crate) fn start_tensor_memory(&self) {
        let Some((columns, word, at)) = self.tensor_columns() else { return };
        self.placed(at, || {
            let scope = Scope::<crate::build::Cta>::new(self);
            let first = (scope.thread() / 32).of_first_lane().eq(0);
            let to = self.shared_address(word).in_register();
            let group = Arg::Word(self.tensor_group().word());
            scope.when(first, |_| {
                let place = Arg::Address(Base::Reg(to), 0);
                self.emit(&rows::ALLOC, [place, Arg::Imm(columns.into()), group.clone()]);
                self.emit(&rows::RELINQUISH, [group]);
            });
        });
    }

    /// The barrier of the CTA after an allocation, where none follows anyway.
    pub(crate) fn end_of_allocation(&self) {
        let Some((_, _, at)) = self.tensor_columns() else { return };
        self.placed(at, || self.emit(&sync::BAR_ALL, []));
    }

    /// After all roles have ended, one warp frees the kernel's tensor memory.
    pub(crate) fn end_tensor_memory(&self) {
        let Some((columns, word, at)) = self.tensor_columns() else { return };
        self.placed(at, || {
            let scope = Scope::<crate::build::Cta>::new(self);
            scope.sync_warp();
            self.emit(&rows::FENCE, [Arg::Word("before")]);
            self.emit(&sync::BAR_ALL, []);
            self.emit(&rows::FENCE, [Arg::Word("after")]);
            let first = (scope.thread() / 32).of_first_lane().eq(0);
            let group = self.tensor_group();
            scope.when(first, |w| {
                if let Some(handshake) = self.handshake.get() {
                    self.shake_hands(w, handshake);
                }
                let from = self.load_tensor_address(word);
                let args = [Arg::Reg(from.in_register()), Arg::Imm(columns.into()), Arg::Word(group.word())];
                self.emit(&rows::DEALLOC, args);
            });
        });
    }

    #[track_caller]
    fn load_tensor_address(&self, word: u32) -> Val<'_, u32> {
        let (reg, place) = (self.register(crate::inst::Class::B32), self.shared_address(word));
        let place = Arg::Address(Base::Reg(place.in_register()), 0);
        self.emit(&memory::LD_SHARED_32, [Arg::List([reg].into()), place, Arg::Word("")]);
        Val::reg(self, reg)
    }

    /// Address of the kernel's first column, which each role reads once.
    #[track_caller]
    pub(crate) fn tensor_base(&self) -> Val<'_, u32> {
        let word = self.tensor.get().map_or(0, |(_, word, _)| word);
        self.once("tensor memory", || self.load_tensor_address(word))
    }

    /// Address of the kernel's first column in the lanes of the own warp.
    #[track_caller]
    pub(crate) fn tensor_lanes(&self) -> Val<'_, u32> {
        let word = self.tensor.get().map_or(0, |(_, word, _)| word);
        self.once("tensor lanes", || {
            let warp = (Scope::<Group>::new(self).thread() / 32).of_first_lane() & 3;
            self.load_tensor_address(word) + (warp << 21)
        })
    }
}

impl Builder {
    /// A wall: the assembler moves no instruction over this place. It is a conditional branch that no warp takes, because
    /// no address of tensor memory has all bits set, which the assembler cannot know.
    #[track_caller]
    pub(crate) fn wall(&self) {
        let at = Location::caller();
        self.placed(at, || {
            let never = self.tensor_lanes().eq(u32::MAX);
            Scope::<Group>::new(self).when_rarely(never, |w| w.plain(&sync::TRAP));
        });
    }
}

impl<'k> TensorTile<'k> {
    /// Elements per row.
    pub fn cols(self) -> u32 {
        self.cols
    }

    /// The `index`-th tile of an array of such tiles.
    #[track_caller]
    pub fn nth(self, index: impl IntoVal<'k, u32>) -> Self {
        let (index, columns) = (index.into_val(self.k), self.columns());
        match index.constant() {
            Some(index) => TensorTile { column: self.column + index as u32 * columns, ..self },
            None => {
                let own = index * columns;
                let moved = match self.moved {
                    Some(moved) => moved + own,
                    None => own,
                };
                TensorTile { moved: Some(moved), ..self }
            }
        }
    }

    /// The tile with integer elements, for sums of products of bytes.
    pub fn integers(self) -> Self {
        TensorTile { number: Number::S32, ..self }
    }

    /// The `index`-th range of `count` elements.
    #[track_caller]
    pub fn part(self, index: u32, count: u32) -> Self {
        if !(count * self.number.bytes()).is_multiple_of(4) || (index + 1) * count > self.cols {
            self.k.refuse(format!("part {index} of {count} elements of {}, allowed: whole columns inside", self.cols));
        }
        TensorTile { cols: count, column: self.column + index * count * self.number.bytes() / 4, ..self }
    }

    /// A range of the elements of each row.
    #[track_caller]
    pub fn range(self, range: Range<u32>) -> Self {
        let bytes = |elements: u32| elements * self.number.bytes();
        if !bytes(range.start).is_multiple_of(4) || !bytes(range.end).is_multiple_of(4) || range.end > self.cols {
            self.k.refuse(format!("elements {range:?} of {}, allowed: whole columns inside", self.cols));
            return self;
        }
        TensorTile { cols: range.end - range.start, column: self.column + bytes(range.start) / 4, ..self }
    }

    /// A tile of `cols` 16-bit elements over the last columns of this one, for data whose lifetimes do not overlap.
    #[track_caller]
    pub fn overlay<T: Half>(self, cols: u32) -> Self {
        let (own, columns) = (self.columns(), cols / 2);
        if !cols.is_multiple_of(16) || columns > own {
            self.k.refuse(format!("{cols} elements over {own} columns, allowed: multiples of 16 that fit"));
        }
        TensorTile { number: T::NUMBER, cols, column: self.column + own.saturating_sub(columns), ..self }
    }

    /// The CTAs that have such a tile at the same address.
    pub(crate) fn group(self) -> CtaGroup {
        self.group
    }

    /// Columns of 32 bits.
    fn columns(self) -> u32 {
        self.cols * self.number.bytes() / 4
    }

    /// The tile's address, from that of the kernel's first column; `offset` counts columns.
    #[track_caller]
    fn place(self, base: Val<'k, u32>, offset: u32) -> Arg {
        let base = match self.moved {
            Some(moved) => base + moved,
            None => base,
        };
        Arg::Address(Base::Reg(base.in_register()), (self.column + offset) as i32)
    }
}

/// The sizes of which one load or store moves columns, largest first.
const SIZES: [u32; 3] = [32, 16, 8];

/// Calls `f(start, size)` for runs that cover `columns`.
fn runs(columns: u32, mut f: impl FnMut(u32, u32)) {
    let mut start = 0;
    while start < columns {
        let size = SIZES.into_iter().find(|size| start + size <= columns).unwrap_or(SIZES[2]);
        f(start, size);
        start += size;
    }
}

/// Accesses of a warpgroup, a row to a thread.
impl<'k> Scope<'k, Group> {
    /// Starts loading the thread's row of accumulators. [`wait_tensor_loads`](Self::wait_tensor_loads) must precede any
    /// signal that the tile may change.
    #[track_caller]
    pub fn load_tensor(&self, to: &RowAcc<'k>, from: TensorTile<'k>) {
        if to.cols() != from.cols || from.number != Number::F32 {
            self.k.refuse(format!("{} columns loaded from {} of {:?}", to.cols(), from.cols, from.number));
            return;
        }
        let (base, regs) = (self.k.tensor_lanes(), to.regs());
        let at = Location::caller();
        runs(from.cols, |start, size| {
            self.k.placed(at, || {
                let list = Arg::List(regs[start as usize..(start + size) as usize].into());
                self.k.emit(&rows::LD, [list, from.place(base, start), Arg::Imm(size.into())]);
            });
        });
    }

    /// Starts loading the thread's row of integer accumulators, and waits until the warp's loads are complete.
    #[track_caller]
    pub fn load_tensor_integers(&self, from: TensorTile<'k>) -> Vec<Val<'k, i32>> {
        if from.number != Number::S32 {
            self.k.refuse(format!("integers loaded from {:?}, allowed: S32", from.number));
        }
        let (base, at) = (self.k.tensor_lanes(), Location::caller());
        let regs: Vec<Reg> = (0..from.cols).map(|_| self.k.register(Class::B32)).collect();
        runs(from.cols, |start, size| {
            self.k.placed(at, || {
                let list = Arg::List(regs[start as usize..(start + size) as usize].into());
                self.k.emit(&rows::LD_B32, [list, from.place(base, start), Arg::Imm(size.into())]);
            });
        });
        self.wait_tensor_loads();
        regs.into_iter().map(|reg| Val::reg(self.k, reg)).collect()
    }

    /// Starts storing the thread's row of accumulators.
    #[track_caller]
    pub fn store_tensor(&self, to: TensorTile<'k>, from: &RowAcc<'k>) {
        if from.cols() != to.cols || to.number != Number::F32 {
            self.k.refuse(format!("{} columns stored to {} of {:?}", from.cols(), to.cols, to.number));
            return;
        }
        self.store_columns(&rows::ST_F32, to, from.regs());
    }

    /// Starts storing the thread's row of a fragment.
    #[track_caller]
    pub fn store_tensor_fragment<T: Half>(&self, to: TensorTile<'k>, from: &Fragment<'k, T>)
    where
        Pair<T>: Word,
    {
        if from.cols() != to.cols || to.number != T::NUMBER {
            self.k.refuse(format!("{} columns stored to {} of {:?}", from.cols(), to.cols, to.number));
            return;
        }
        self.store_columns(&rows::ST, to, from.regs());
    }

    #[track_caller]
    fn store_columns(&self, row: &'static Inst, to: TensorTile<'k>, regs: &[Reg]) {
        let (base, at) = (self.k.tensor_lanes(), Location::caller());
        runs(to.columns(), |start, size| {
            self.k.placed(at, || {
                let list = Arg::List(regs[start as usize..(start + size) as usize].into());
                self.k.emit(row, [to.place(base, start), list, Arg::Imm(size.into())]);
            });
        });
    }
}

impl<'k, W: WholeWarps> Scope<'k, W> {
    /// Waits until the warp's loads of tensor memory are complete.
    #[track_caller]
    pub fn wait_tensor_loads(&self) {
        self.plain(&rows::WAIT_LD);
    }
    /// Waits until the warp's stores to tensor memory are complete.
    #[track_caller]
    pub fn wait_tensor_stores(&self) {
        self.plain(&rows::WAIT_ST);
    }
    /// Orders the warp's accesses to tensor memory before a signal that follows. The signals of a
    /// [`TensorRing`](crate::TensorRing) contain it.
    #[track_caller]
    pub fn fence_tensor_before(&self) {
        self.k.emit(&rows::FENCE, [Arg::Word("before")]);
    }
    /// Orders the warp's accesses to tensor memory after a wait that precedes. The waits of a
    /// [`TensorRing`](crate::TensorRing) contain it.
    #[track_caller]
    pub fn fence_tensor_after(&self) {
        self.k.emit(&rows::FENCE, [Arg::Word("after")]);
    }
}

impl<'k> Scope<'k, Thread> {
    /// Starts d (+)= a b, 128 rows of `a` and all columns of `b`. Products of a thread run in the order in which it starts
    /// them. If `d` belongs to a pair of CTAs, each of them has 128 rows of `a` and half of the columns of `b`, at the same
    /// addresses, and the leader's thread starts the product of both.
    ///
    /// Elements are 16-bit floats, tf32, 8-bit floats of one type or of two, or bytes, whose sums are
    /// [integers](TensorTile::integers). Operands of all but 16-bit floats are contiguous along the summed dimension.
    #[track_caller]
    pub fn multiply_tensor(
        &self,
        d: TensorTile<'k>,
        a: impl Into<TensorOperand<'k>>,
        b: TileOperand<'k>,
        sum: Sum<'k>,
    ) {
        self.start_product(d, a.into(), b, None, sum);
    }

    /// Like [`multiply_tensor`](Self::multiply_tensor), with a scale for every 32 elements of 8-bit floats, or for every 16
    /// of 4-bit floats, along the summed dimension. The scales must have been [copied](Self::copy_scales) by this thread, or
    /// written before the thread waited.
    #[track_caller]
    pub fn multiply_scaled(
        &self,
        d: TensorTile<'k>,
        (a, a_scales): (impl Into<TensorOperand<'k>>, TensorScales<'k>),
        (b, b_scales): (TileOperand<'k>, TensorScales<'k>),
        sum: Sum<'k>,
    ) {
        self.start_product(d, a.into(), b, Some([a_scales, b_scales]), sum);
    }

    #[track_caller]
    fn start_product(
        &self,
        d: TensorTile<'k>,
        a: TensorOperand<'k>,
        b: TileOperand<'k>,
        scales: Option<[TensorScales<'k>; 2]>,
        sum: Sum<'k>,
    ) {
        let k = self.k;
        let (rows_of_a, inner, number, major) = match &a {
            TensorOperand::Shared(a) => (a.outer(), a.inner(), a.tile().shape().number, a.major()),
            TensorOperand::Tensor(a) => (LANES, a.cols, a.number, Major::Inner),
        };
        let number_b = b.tile().shape().number;
        let kind = ProductKind::of([number, number_b], scales.is_some()).filter(|kind| d.number == kind.sums());
        let ctas = d.group.ctas();
        let fits = (rows_of_a, inner, ctas * b.outer()) == (LANES, b.inner(), d.cols);
        let (Some(kind), true) = (kind, fits) else {
            let columns = if ctas == 1 { "matching columns" } else { "half of the columns in each CTA" };
            k.refuse(format!(
                "a product of {number:?} {rows_of_a}x{inner} times {number_b:?} {}x{} into {:?} {LANES}x{}, allowed: 128 rows, equal inner sizes, types of one kind into F32 or bytes into S32, {columns}",
                b.inner(), b.outer(), d.number, d.cols
            ));
            return;
        };
        if [major, b.major()].contains(&Major::Outer) && kind != ProductKind::F16 {
            k.refuse(format!("operands of {number:?} across their rows, allowed: along them; 16-bit floats in both"));
        }
        if let (Some([a_scales, b_scales]), Some(of)) = (scales, kind.scales()) {
            let want = inner * number.packed() / of.elements;
            if [a_scales, b_scales].iter().any(|s| s.count() != want)
                || a_scales.rows() != LANES
                || b_scales.rows() < d.cols
            {
                k.refuse(format!(
                    "scales of {} rows with {} each, and of {} columns with {} each, allowed: {LANES} rows, {} columns or more, {want} each",
                    a_scales.rows(),
                    a_scales.count(),
                    b_scales.rows(),
                    b_scales.count(),
                    d.cols
                ));
            }
        }
        if ctas > 1 && matches!(a, TensorOperand::Tensor(_)) && !d.cols.is_multiple_of(32) {
            k.refuse(format!("{} columns of a pair's product of tensor memory, allowed: multiples of 32", d.cols));
        }
        let shape = ProductShape {
            kind,
            rows: ctas * LANES,
            cols: d.cols,
            numbers: [kind.sums(), number, number_b],
            majors: [major, b.major()],
            scale_bytes: [0; 2],
        };
        let (base, group) = (k.tensor_base(), d.group);
        // Instructions that read different bytes of the cells of scales have descriptors of their own.
        let each = kind.scales().map_or(0, |scales| scales.bytes);
        let variants = 4u32.checked_div(each).unwrap_or(1) as usize;
        let shapes = (0..variants as u32).map(|i| ProductShape { scale_bytes: [i * each; 2], ..shape });
        let shapes: Vec<Reg> =
            k.placed(Location::caller(), || shapes.map(|shape| self.constant(shape.encode()).in_register()).collect());
        let d = d.place(base, 0);
        let b_steps = b.descriptors_with(VERSION);
        let (row, a_steps): (&'static Inst, Vec<Arg>) = match a {
            TensorOperand::Shared(a) => {
                (kind.row(true), a.descriptors_with(VERSION).into_iter().map(Arg::Reg).collect())
            }
            TensorOperand::Tensor(a) => {
                let columns = number.depth() * number.bytes() / 4;
                let steps = || (0..b_steps.len()).map(|j| a.place(base, columns * j as u32)).collect();
                (kind.row(false), k.placed(Location::caller(), steps))
            }
        };
        let (group, at) = (Arg::Word(group.word()), Location::caller());
        for (j, (a, b)) in a_steps.into_iter().zip(b_steps).enumerate() {
            let mut args = vec![d.clone(), a, Arg::Reg(b), Arg::Reg(shapes[j % variants])];
            if let Some(scales) = scales {
                // A closure has a line of its own, and the kernel's line is the one to tell.
                args.extend(k.placed(at, || scales.map(|scales| scales.place(base, j as u32 * each))));
            }
            args.extend([sum.at(j), group.clone()]);
            if kind != ProductKind::I8 {
                args.push(Arg::Word(kind.word()));
            }
            k.emit(row, args);
        }
    }
}

impl ProductKind {
    /// The instruction of products of this kind, by the place of A: in shared or in tensor memory.
    fn row(self, shared: bool) -> &'static Inst {
        match (self, shared) {
            (ProductKind::I8, true) => &rows::MMA_I8_SS,
            (ProductKind::I8, false) => &rows::MMA_I8_TS,
            (ProductKind::Mxf8f6f4 | ProductKind::Nvf4, true) => &rows::MMA_SCALED_SS,
            (ProductKind::Mxf8f6f4 | ProductKind::Nvf4, false) => &rows::MMA_SCALED_TS,
            (_, true) => &rows::MMA_SS,
            (_, false) => &rows::MMA_TS,
        }
    }
}
