//! Adds results to f32 sums in global memory with bulk reductions. Warpgroups write results to shared memory, and a
//! dedicated thread has TMA add them (`cp.reduce.async.bulk`).
//!
//! The computing warpgroups never wait for the additions themselves, only for their buffer in shared memory to be free.

use crate::build::{Builder, Count, Group, Pointer, Scope, Thread, Val, Var};
use crate::inst::{Arg, Base, Class};
use crate::product::{Swizzle, TileShape};
use crate::sync::pipe::{Pipe, wait_phase};
use crate::table::{bytes, mbarrier, memory, sync};
use crate::tile::Tile;
use std::panic::Location;

/// One buffer in shared memory for each warpgroup of a role. TMA adds its contents to global memory.
pub struct BulkReducer<'k> {
    k: &'k Builder,
    id: usize,
    /// Numbers of one buffer; `first` is the shared-memory offset of the first buffer.
    count: u32,
    first: u32,
    /// Offset of one record per warpgroup: the destination, the counter to raise, and the amount.
    to: u32,
    full: u32,
    empty: u32,
    /// A ring of two stages whose cursor this reducer shares.
    leader: Option<usize>,
}

/// Warps of a warpgroup.
const WARPS: u32 = 4;
/// Bytes of a record: two addresses and a number, in whole units of 16.
const PLACE: u32 = 32;
/// Byte offsets of the counter's address and of the amount in a record.
const WHOM: i32 = 8;
const BY: i32 = 16;

impl Builder {
    /// Buffers of `count` numbers (a multiple of 512) for each of `groups` warpgroups.
    #[track_caller]
    pub fn bulk_reducer(&self, name: &str, groups: u32, count: u32) -> BulkReducer<'_> {
        let id = self.new_pipe(name, 1);
        self.pipe_filled(id);
        if !count.is_multiple_of(512) {
            self.refuse(format!("bulk reducer `{name}` has places for {count} numbers, allowed: multiples of 512"));
        }
        // A buffer can also hold a tile (`as_tile`), so it has a tile's alignment.
        let first = self.take_shared(name, 4 * groups * count, Swizzle::B128.period());
        let to = self.take_small(&format!("{name}.to"), PLACE * groups, 16);
        let full = self.mbarriers(&format!("{name}.full"), groups, Count::Fixed(WARPS));
        let empty = self.mbarriers(&format!("{name}.empty"), groups, Count::Fixed(1));
        BulkReducer { k: self, id, count, first, to, full, empty, leader: None }
    }
}

impl<'k> BulkReducer<'k> {
    #[track_caller]
    fn parity(&self, side: &'static str, start: u32) -> Var<'k, u32> {
        self.k.cursor(self.id, side, [start, 0])[0]
    }

    #[track_caller]
    fn arrive(&self, bar: Val<'k, u32>) {
        self.k.emit(&mbarrier::ARRIVE, [Arg::Address(Base::Reg(bar.in_register()), 0)]);
    }

    /// Derives the buffer's parity from a ring of two stages, which saves one register. The role sends exactly once per
    /// stage, after it has moved on to the next stage. It may use the buffer [as a tile](Self::as_tile) only after
    /// that.
    #[track_caller]
    pub fn in_step(self, leader: &Pipe<'k>) -> Self {
        if leader.depth() != 2 {
            self.k.refuse(format!("a bulk reducer in step with a ring of {} stages, allowed: 2", leader.depth()));
        }
        BulkReducer { leader: Some(leader.id()), ..self }
    }

    /// Waits until the buffer is free. `sent`: the role has already sent the previous stage's numbers.
    #[track_caller]
    fn wait_empty(&self, w: &Scope<'k, Group>, sent: bool) {
        // The phase of parity 1 of a fresh mbarrier counts as complete.
        let parity = match self.leader {
            Some(ring) => self.k.cursor(ring, "take", [0, 0])[0].now() ^ u32::from(sent),
            None => self.parity("write", 1).now(),
        };
        wait_phase(self.k, w.group().mul_add(8, self.k.shared_address(self.empty)), parity);
    }

    /// Waits until the buffer is free, and sets the address of the sums for the next send.
    #[track_caller]
    pub fn open(&self, w: &Scope<'k, Group>, to: Val<'k, u64>) {
        self.open_place(w, to, false);
    }

    #[track_caller]
    fn open_place(&self, w: &Scope<'k, Group>, to: Val<'k, u64>, sent: bool) {
        let group = w.group();
        self.wait_empty(w, sent);
        if self.leader.is_none() {
            let parity = self.parity("write", 1);
            parity.set(parity.now() ^ 1);
        }
        let (first, at) = (w.thread_in_group().eq(0), Location::caller());
        w.when(first, |_| {
            self.k.placed(at, || {
                let place = group.mul_add(PLACE, self.k.shared_address(self.to)).in_register();
                let pair = Arg::List([to, w.constant(0u64)].map(|to| to.in_register()).into());
                self.k.emit(&memory::ST_SHARED_64, [Arg::Address(Base::Reg(place), 0), pair, Arg::Word(".v2")]);
            });
        });
    }

    /// Between [`open`](Self::open) and [`send`](Self::send): requests that the counter `whom` be raised by `by` when
    /// this send and all earlier ones have been added.
    #[track_caller]
    pub fn tell(&self, w: &Scope<'k, Group>, whom: Pointer<'k, u32>, by: Val<'k, u32>) {
        let (first, at) = (w.thread_in_group().eq(0), Location::caller());
        w.when(first, |w| {
            self.k.placed(at, || {
                let place = w.group().mul_add(PLACE, self.k.shared_address(self.to)).in_register();
                let [whom, by] = [whom.address().in_register(), by.in_register()].map(|reg| Arg::List([reg].into()));
                self.k.emit(&memory::ST_SHARED_64, [Arg::Address(Base::Reg(place), WHOM), whom, Arg::Word("")]);
                self.k.emit(&memory::ST_SHARED_32, [Arg::Address(Base::Reg(place), BY), by, Arg::Word("")]);
            });
        });
    }

    /// Writes four-element vectors of each thread to the buffer, as `[four][thread][4]`.
    #[track_caller]
    pub fn write(&self, w: &Scope<'k, Group>, fours: impl IntoIterator<Item = [Val<'k, f32>; 4]>) {
        let start = w.group().mul_add(4 * self.count, self.k.shared_address(self.first));
        let own = w.thread_in_group().mul_add(16, start).in_register();
        for (i, four) in fours.into_iter().enumerate() {
            let regs: Vec<_> = four.iter().map(|x| x.in_register()).collect();
            let place = Arg::Address(Base::Reg(own), i as i32 * 2048);
            self.k.emit(&memory::ST_SHARED_F32, [place, Arg::List(regs.into()), Arg::Word(".v4")]);
        }
    }

    /// Hands the buffer to the thread that reduces it.
    #[track_caller]
    pub fn send(&self, w: &Scope<'k, Group>) {
        self.k.emit(&sync::FENCE_PROXY, [Arg::Word(".shared::cta")]);
        w.sync_warp();
        let (first, at) = (w.lane().eq(0), Location::caller());
        w.when(first, |w| {
            self.k.placed(at, || self.arrive(w.group().mul_add(8, self.k.shared_address(self.full))));
        });
    }

    /// The warpgroup's buffer as a tile, once TMA has read it. The tile must be consumed before the next
    /// numbers are written.
    #[track_caller]
    pub fn as_tile(&self, w: &Scope<'k, Group>, shape: TileShape) -> Tile<'k> {
        if shape.bytes() > 4 * self.count {
            self.k.refuse(format!("a tile of {} bytes in a place of {}", shape.bytes(), 4 * self.count));
        }
        self.wait_empty(w, true);
        Tile::at(shape, w.group().mul_add(4 * self.count, self.k.shared_address(self.first)))
    }

    /// Tells the reducing thread that no more numbers follow.
    #[track_caller]
    pub fn end(&self, w: &Scope<'k, Group>) {
        self.open_place(w, w.constant(0u64), true);
        self.send(w);
    }

    /// The loop of the thread that reduces the buffers of warpgroup `group`. It calls `before` before it waits for each
    /// send, including the end. It calls `after` when the buffer is free again; the addition itself has completed only
    /// after a wait for the thread's stores.
    #[track_caller]
    pub fn keep(
        &self,
        t: &Scope<'k, Thread>,
        group: u32,
        before: impl Fn(&Scope<'k, Thread>),
        after: impl Fn(&Scope<'k, Thread>),
    ) {
        self.k.pipe_emptied(self.id);
        let (parity, at) = (self.parity("keep", 0), Location::caller());
        t.repeat(|t, leave| {
            before(t);
            let [to, whom] = self.k.placed(at, || {
                wait_phase(self.k, self.k.shared_address(self.full + 8 * group), parity.now());
                parity.set(parity.now() ^ 1);
                let sent = [(); 2].map(|()| self.k.register(Class::B64));
                let place = Arg::Address(Base::Reg(self.k.shared_address(self.to + PLACE * group).in_register()), 0);
                self.k.emit(&memory::LD_SHARED_64, [Arg::List(sent.into()), place, Arg::Word(".v2")]);
                leave.when(Val::<u64>::reg(self.k, sent[0]).eq(0));
                sent
            });
            let whom = Val::<u64>::reg(self.k, whom);
            // Read the amount before the buffer is freed: the next send overwrites it.
            let by = self.k.placed(at, || {
                let by = t.var(0u32);
                t.when(whom.ne(0), |_| {
                    let place = self.k.shared_address(self.to + PLACE * group).in_register();
                    let word = self.k.register(Class::B32);
                    let args = [Arg::List([word].into()), Arg::Address(Base::Reg(place), BY), Arg::Word("")];
                    self.k.emit(&memory::LD_SHARED_32, args);
                    by.set(Val::<u32>::reg(self.k, word));
                });
                by
            });
            self.k.placed(at, || {
                let from = self.k.shared_address(self.first + 4 * self.count * group).in_register();
                let [to, from] = [to, from].map(|reg| Arg::Address(Base::Reg(reg), 0));
                let bytes = t.constant(4 * self.count);
                self.k.emit(&bytes::REDUCE_BYTES, [to, from, bytes.arg(), Arg::Word("add.f32")]);
                t.commit_stores();
                t.wait_stores_read(0);
                self.arrive(self.k.shared_address(self.empty + 8 * group));
            });
            after(t);
            self.k.placed(at, || {
                t.when(whom.ne(0), |t| {
                    t.wait_stores(0);
                    Pointer::<u32>::at_address(whom).fetch_add_in_order(t, 0, by.get());
                });
            });
        });
    }
}
