//! Tensors that the copy engine cannot take, copied to where it can: rows, heads or sequences that are not 16 bytes
//! apart, memory that begins between, head dimensions that are no multiple of 8, and sequences that do not begin at
//! whole rows where their lengths differ.
//!
//! Inputs are packed before the launches that read them, results are unpacked after those that write them. Elements of a packed
//! row that the tensor does not have are zeros, which changes no score and no result. A call that needs no copy pays a
//! few comparisons of its strides.

use crate::attention::forward::plan::NoKernel;
use crate::parts::arguments::{Arguments, DeviceTensor, Slots};
use fulgurite_ptx::device::{Launch, Span, Value};
use fulgurite_ptx::{BuildError, Kernel, Pair, Target, bf16};
use std::sync::Arc;

/// Threads of a block.
const THREADS: u32 = 256;
/// Elements that a thread moves: 16 bytes of the packed tensor.
pub(crate) const UNIT: u64 = 8;
/// What a packed tensor is aligned to in its memory, in bytes.
const ALIGN: u64 = 256;

/// Which way a tensor is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From where it lies to where it is packed; what it does not have is zero there.
    Pack,
    /// Back; what it does not have stays behind.
    Unpack,
}

/// Copies `[batch, row, head, dim]` elements of 16 bits, whatever they are, between a tensor of any strides and a packed one.
pub fn kernel(target: Target, direction: Direction) -> Result<Kernel, BuildError> {
    let name = match direction {
        Direction::Pack => "attention_pack",
        Direction::Unpack => "attention_unpack",
    };
    Kernel::build(name, target, |k| {
        let strided = k.array::<bf16>("strided");
        let packed = k.pointer::<Pair<bf16>>("packed");
        let [items, dim] = ["items", "dim"].map(|name| k.param::<u32>(name));
        let [units, heads, rows] = ["units", "heads", "rows"].map(|name| k.divisor(name));
        let [of_batch, of_row, of_head] =
            ["batch_stride", "row_stride", "head_stride"].map(|name| k.param::<u64>(name));
        k.threads(THREADS, |w| {
            let item = w.block().mul_add(THREADS, w.thread());
            w.when(item.lt(items), |w| {
                let [place, unit] = units.div_rem(item);
                let [place, head] = heads.div_rem(place);
                let [batch, row] = rows.div_rem(place);
                let at = [(batch, of_batch), (row, of_row), (head, of_head)]
                    .map(|(index, stride)| index.to_u64().mul_wide_64(stride))
                    .into_iter()
                    .reduce(|a, b| a + b)
                    .expect("bug in fulgurite: a tensor has axes");
                let (strided, packed) = (strided.at_wide(at), packed.at_wide(item.mul_wide(UNIT as u32 / 2)));
                let first = unit * UNIT as u32;
                match direction {
                    Direction::Pack => {
                        let zero = w.var(bf16::from_bits(0)).get();
                        // Beyond the last element, the last is read and left out.
                        let one = |j: u32| {
                            let here = (first + j).lt(dim);
                            here.select::<bf16>(strided.load(w, (first + j).min(dim - 1)), zero)
                        };
                        packed.store_some(w, 0, [0, 2, 4, 6].map(|j| one(j).join(one(j + 1))));
                    }
                    Direction::Unpack => {
                        let halves = packed.load_some::<_, 4>(w, 0).map(|pair| pair.split());
                        for (j, half) in (0..).zip(halves.into_iter().flatten()) {
                            w.when((first + j).lt(dim), |w| strided.store(w, first + j, half));
                        }
                    }
                }
            });
        });
    })
}

/// The kernels that copy.
#[derive(Clone)]
pub struct Copying {
    /// Before a launch.
    pub pack: Arc<Kernel>,
    /// After it.
    pub unpack: Arc<Kernel>,
}

impl Copying {
    /// Both kernels.
    pub fn new(target: Target) -> Result<Copying, BuildError> {
        let build = |direction| kernel(target, direction).map(Arc::new);
        Ok(Copying { pack: build(Direction::Pack)?, unpack: build(Direction::Unpack)? })
    }
}

/// A tensor of a call, by name, and which way it is copied if it must be.
pub(crate) type Named = (&'static str, DeviceTensor, Direction);

/// The tensors of a call that are copied, and the memory for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copies {
    copies: Vec<PackedCopy>,
    bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PackedCopy {
    name: &'static str,
    /// Which of the call's tensors it stands for.
    index: usize,
    /// Where it begins in the memory for copies, and its shape.
    begin: u64,
    shape: [u64; 4],
}

impl Copies {
    /// The copies that a call needs, if any; `unequal` tells that sequences have lengths of their own.
    pub(crate) fn of(tensors: &[Named], unequal: bool) -> Option<Copies> {
        let fine = |placed: &DeviceTensor| placed.shape[3].is_multiple_of(UNIT) && is_fine(placed, unequal);
        if tensors.iter().all(|(_, placed, _)| fine(placed)) {
            return None;
        }
        let (mut copies, mut bytes) = (Vec::new(), 0);
        for (index, &(name, placed, _)) in tensors.iter().enumerate().filter(|(_, (_, placed, _))| !fine(placed)) {
            let [b, s, h, d] = placed.shape;
            let shape = [b, s, h, d.next_multiple_of(UNIT)];
            copies.push(PackedCopy { name, index, begin: bytes, shape });
            bytes += (2 * shape.iter().product::<u64>()).next_multiple_of(ALIGN);
        }
        Some(Copies { copies, bytes })
    }

    /// Bytes of memory for them, from a multiple of 16.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Which tensors are copied.
    pub fn names(&self) -> Vec<&'static str> {
        self.copies.iter().map(|copy| copy.name).collect()
    }

    /// The tensors as the kernels get them, and the launches before and after their own.
    pub(crate) fn launches<const N: usize>(
        &self,
        copying: &Copying,
        tensors: &[Named; N],
        room: Span,
    ) -> Result<([DeviceTensor; N], [Vec<Launch>; 2]), NoKernel> {
        let (mut replaced, mut launches) = (tensors.map(|(_, placed, _)| placed), [Vec::new(), Vec::new()]);
        for &PackedCopy { name, index, begin, shape } in &self.copies {
            let span = room.from(begin).first(2 * shape.iter().product::<u64>());
            let (_, strided, direction) = tensors[index];
            replaced[index] = DeviceTensor::packed(span, shape);
            let (to, kernel) = match direction {
                Direction::Pack => (&mut launches[0], &copying.pack),
                Direction::Unpack => (&mut launches[1], &copying.unpack),
            };
            to.extend(copy(kernel, name, &strided, &replaced[index])?);
        }
        Ok((replaced, launches))
    }
}

/// One copy; none where there is nothing in it.
fn copy(
    kernel: &Arc<Kernel>,
    name: &str,
    strided: &DeviceTensor,
    packed: &DeviceTensor,
) -> Result<Option<Launch>, NoKernel> {
    let [b, s, h, d] = packed.shape;
    let items = b * s * h * (d / UNIT);
    if items == 0 {
        return Ok(None);
    }
    if !strided.span.address().is_multiple_of(2) {
        return Err(NoKernel { feature: format!("`{name}` at the odd address {:#x}", strided.span.address()) });
    }
    if items >= 1 << 31 {
        return Err(NoKernel {
            feature: format!("a copy of `{name}`, which is needed for its strides, of 2^35 bytes or more"),
        });
    }
    let slots = Slots::of(kernel);
    let mut args = Arguments::new(&slots);
    args.add("strided", Value::Pointer(strided.span));
    args.add("packed", Value::Pointer(packed.span));
    args.add_u32("items", items);
    args.add_u32("dim", strided.shape[3]);
    args.divisor(["units", "units_magic", "units_shift"], d / UNIT);
    args.divisor(["heads", "heads_magic", "heads_shift"], h);
    args.divisor(["rows", "rows_magic", "rows_shift"], s);
    for (name, stride) in ["batch_stride", "row_stride", "head_stride"].into_iter().zip(strided.strides) {
        args.add(name, Value::U64(stride));
    }
    let grid = [items.div_ceil(THREADS.into()) as u32, 1, 1];
    Ok(Some(Launch { kernel: kernel.clone(), grid, args: args.finish() }))
}

/// Whether the copy engine takes a tensor as it lies. One without elements is never given to it.
fn is_fine(placed: &DeviceTensor, unequal: bool) -> bool {
    /// Elements from one to the next along an axis that the copy engine can still step.
    const FAR: u64 = 1 << 39;
    let steps = placed.strides.iter().all(|stride| stride.is_multiple_of(UNIT) && *stride < FAR);
    let whole_rows = !unequal || placed.step().is_some();
    placed.shape.contains(&0) || (placed.span.address().is_multiple_of(16) && steps && whole_rows)
}
