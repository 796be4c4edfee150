//! Arrays in global and in shared memory.

use super::Builder;
use super::scope::{Scope, Thread, Who};
use super::value::{IntoVal, Val, Word};
use crate::inst::{Arg, Base, Class, Inst, Reg};
use crate::table::memory as rows;
use std::marker::PhantomData;
use std::panic::Location;

/// Size of an element in bytes.
pub(crate) const fn bytes<T: Word>() -> u32 {
    match T::CLASS {
        Class::Pred => 1,
        Class::B16 => 2,
        Class::B32 | Class::F32 => 4,
        Class::B64 => 8,
    }
}

const VECTOR: [&str; 3] = ["", ".v2", ".v4"];

fn vector(n: usize) -> &'static str {
    match n {
        1 => VECTOR[0],
        2 => VECTOR[1],
        _ => VECTOR[2],
    }
}

fn global(class: Class) -> [&'static Inst; 2] {
    match class {
        Class::B16 => [&rows::LD_GLOBAL_16, &rows::ST_GLOBAL_16],
        Class::F32 => [&rows::LD_GLOBAL_F32, &rows::ST_GLOBAL_F32],
        Class::B64 => [&rows::LD_GLOBAL_64, &rows::ST_GLOBAL_64],
        Class::B32 | Class::Pred => [&rows::LD_GLOBAL_32, &rows::ST_GLOBAL_32],
    }
}
fn shared(class: Class) -> [&'static Inst; 2] {
    match class {
        Class::B16 => [&rows::LD_SHARED_16, &rows::ST_SHARED_16],
        Class::F32 => [&rows::LD_SHARED_F32, &rows::ST_SHARED_F32],
        Class::B64 => [&rows::LD_SHARED_64, &rows::ST_SHARED_64],
        Class::B32 | Class::Pred => [&rows::LD_SHARED_32, &rows::ST_SHARED_32],
    }
}

#[track_caller]
fn load<'k, T: Word, const N: usize>(k: &'k Builder, row: &'static Inst, at: Arg) -> [Val<'k, T>; N] {
    let regs: [Reg; N] = std::array::from_fn(|_| k.register(T::CLASS));
    k.emit(row, [Arg::List(regs.into()), at, Arg::Word(vector(N))]);
    regs.map(|reg| Val::reg(k, reg))
}
#[track_caller]
fn store<T: Word, const N: usize>(k: &Builder, row: &'static Inst, at: Arg, x: [Val<'_, T>; N]) {
    let at_line = Location::caller();
    let regs = k.placed(at_line, || x.map(|x| x.in_register()));
    k.emit(row, [at, Arg::List(regs.into()), Arg::Word(vector(N))]);
}

/// Nanoseconds between two polls of a word that another CTA writes.
const PAUSE_NS: u64 = 20;

/// An array in global memory.
pub struct Pointer<'k, T> {
    address: Val<'k, u64>,
    element: PhantomData<T>,
}
impl<T> Clone for Pointer<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Pointer<'_, T> {}

impl<'k, T: Word> Pointer<'k, T> {
    pub(crate) fn new(address: Val<'k, u64>) -> Self {
        Pointer { address, element: PhantomData }
    }
    /// An array at a given address, such as one taken from another array.
    pub fn at_address(address: Val<'k, u64>) -> Self {
        Pointer::new(address)
    }
    /// Byte address of the first element, for loops that carry it.
    pub fn address(self) -> Val<'k, u64> {
        self.address
    }
    /// The array starting at an element.
    #[track_caller]
    pub fn at(self, index: impl IntoVal<'k, u32>) -> Self {
        let index = index.into_val(self.address.k);
        Pointer::new(self.address + index.mul_wide(bytes::<T>()))
    }
    /// The array starting at an element, for arrays of 2^32 elements and more.
    #[track_caller]
    pub fn at_wide(self, index: Val<'k, u64>) -> Self {
        Pointer::new(self.address + index.mul_wide_64(u64::from(bytes::<T>())))
    }
    #[track_caller]
    fn place(self, index: impl IntoVal<'k, u32>) -> Arg {
        let index = index.into_val(self.address.k);
        match index.constant() {
            // A small constant offset fits into the instruction.
            Some(i) if i < 1 << 20 => {
                Arg::Address(Base::Reg(self.address.in_register()), (i as u32 * bytes::<T>()) as i32)
            }
            _ => Arg::Address(Base::Reg(self.at(index).address.in_register()), 0),
        }
    }
    /// Reads an element.
    #[track_caller]
    pub fn load<W: Who>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>) -> Val<'k, T> {
        let [x] = load(w.k, global(T::CLASS)[0], self.place(index));
        x
    }
    /// Reads two or four adjacent elements; `index` must be a multiple of their number.
    #[track_caller]
    pub fn load_some<W: Who, const N: usize>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>) -> [Val<'k, T>; N] {
        load(w.k, global(T::CLASS)[0], self.place(index))
    }
    /// Writes an element.
    #[track_caller]
    pub fn store<W: Who>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>, x: impl IntoVal<'k, T>) {
        let x = x.into_val(w.k);
        store(w.k, global(T::CLASS)[1], self.place(index), [x]);
    }
    /// Writes two or four adjacent elements; `index` must be a multiple of their number.
    #[track_caller]
    pub fn store_some<W: Who, const N: usize>(
        self,
        w: &Scope<'k, W>,
        index: impl IntoVal<'k, u32>,
        x: [Val<'k, T>; N],
    ) {
        store(w.k, global(T::CLASS)[1], self.place(index), x);
    }
}

impl<'k> Pointer<'k, f32> {
    /// Starts to bring bytes into the L2 cache; only a hint. The address and the number of bytes are multiples of 16.
    #[track_caller]
    pub fn prefetch<W: Who>(self, w: &Scope<'k, W>, bytes: Val<'k, u32>) {
        w.k.emit(&crate::table::bytes::PREFETCH_BYTES, [self.place(0), bytes.arg()]);
    }

    /// Adds to two or four adjacent elements; `index` must be a multiple of their number. Each addition is atomic by
    /// itself, and the order of threads is not fixed.
    #[track_caller]
    pub fn add_some<W: Who, const N: usize>(
        self,
        w: &Scope<'k, W>,
        index: impl IntoVal<'k, u32>,
        x: [Val<'k, f32>; N],
    ) {
        store(w.k, &crate::table::atomic::RED_F32, self.place(index), x);
    }
}

impl<'k> Pointer<'k, f32> {
    /// Adds to an element atomically; the order of threads is not fixed.
    #[track_caller]
    pub fn add<W: Who>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>, x: Val<'k, f32>) {
        w.k.emit(&crate::table::atomic::RED_F32_ONE, [self.place(index), x.arg()]);
    }
}

impl<'k> Pointer<'k, u64> {
    /// Adds to an element atomically, modulo 2^64, so the sum does not depend on the order of threads.
    #[track_caller]
    pub fn add<W: Who>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>, x: Val<'k, u64>) {
        // The assembler turns this into a reduction, because nothing reads the old value.
        let (d, _) = Val::<u64>::fresh(w.k);
        w.k.emit(&crate::table::atomic::ATOM_64, [d, self.place(index), x.arg(), Arg::Word("add.u64")]);
    }
}

impl<'k> Pointer<'k, u32> {
    /// Waits until an element has this value. Everything that its writer [`publish`](Self::publish)ed before is then
    /// visible.
    #[track_caller]
    pub fn wait_for(self, t: &Scope<'k, Thread>, index: impl IntoVal<'k, u32>, x: Val<'k, u32>) {
        let place = self.place(index);
        let at = Location::caller();
        t.repeat(|t, leave| {
            let reg = t.k.register(Class::B32);
            t.k.placed(at, || {
                t.k.emit(&rows::LD_ACQUIRE, [Arg::List([reg].into()), place, Arg::Word("gpu")]);
                leave.when(Val::<u32>::reg(t.k, reg).eq(x));
                t.k.emit(&crate::table::sync::SLEEP, [Arg::Imm(PAUSE_NS)]);
            });
        });
    }
    /// Writes an element after all earlier writes (release), including those of threads that this one met at a barrier.
    #[track_caller]
    pub fn publish(self, t: &Scope<'k, Thread>, index: impl IntoVal<'k, u32>, x: Val<'k, u32>) {
        let x = Arg::List([x.in_register()].into());
        t.k.emit(&rows::ST_RELEASE, [self.place(index), x, Arg::Word("gpu")]);
    }
    /// Sets bits of an element atomically; the order of threads does not matter.
    #[track_caller]
    pub fn set_bits<W: Who>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>, bits: impl IntoVal<'k, u32>) {
        let bits = bits.into_val(w.k).arg();
        w.k.emit(&crate::table::atomic::RED, [self.place(index), bits, Arg::Word("or.b32")]);
    }
    /// Adds to an element atomically and returns its old value.
    #[track_caller]
    pub fn fetch_add<W: Who>(
        self,
        w: &Scope<'k, W>,
        index: impl IntoVal<'k, u32>,
        x: impl IntoVal<'k, u32>,
    ) -> Val<'k, u32> {
        let (d, old) = Val::fresh(w.k);
        let x = x.into_val(w.k);
        w.k.emit(&crate::table::atomic::ATOM, [d, self.place(index), x.arg(), Arg::Word("add.u32")]);
        old
    }
    /// Adds to an element atomically, ordered with other memory (acquire and release). A later adder sees earlier
    /// writes of this thread and of the threads that it met at a barrier.
    #[track_caller]
    pub fn fetch_add_in_order<W: Who>(
        self,
        w: &Scope<'k, W>,
        index: impl IntoVal<'k, u32>,
        x: impl IntoVal<'k, u32>,
    ) -> Val<'k, u32> {
        let (d, old) = Val::fresh(w.k);
        let (at, x) = (self.place(index), x.into_val(w.k).arg());
        let [operation, order, scope] = ["add.u32", "acq_rel", "gpu"].map(Arg::Word);
        w.k.emit(&crate::table::atomic::ATOM_ORDERED, [d, at, x, operation, order, scope]);
        old
    }
}

/// An array in shared memory.
pub struct Shared<'k, T> {
    k: &'k Builder,
    offset: u32,
    element: PhantomData<T>,
}
impl<T> Clone for Shared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<'_, T> {}

impl<'k, T: Word> Shared<'k, T> {
    pub(crate) fn new(k: &'k Builder, offset: u32) -> Self {
        Shared { k, offset, element: PhantomData }
    }
    #[track_caller]
    fn place(self, index: impl IntoVal<'k, u32>) -> Arg {
        let address = index.into_val(self.k).mul_add(bytes::<T>(), self.k.shared_address(self.offset));
        Arg::Address(Base::Reg(address.in_register()), 0)
    }
    /// Reads an element.
    #[track_caller]
    pub fn load<W: Who>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>) -> Val<'k, T> {
        let [x] = load(w.k, shared(T::CLASS)[0], self.place(index));
        x
    }
    /// Writes an element.
    #[track_caller]
    pub fn store<W: Who>(self, w: &Scope<'k, W>, index: impl IntoVal<'k, u32>, x: impl IntoVal<'k, T>) {
        let x = x.into_val(w.k);
        store(w.k, shared(T::CLASS)[1], self.place(index), [x]);
    }
}
