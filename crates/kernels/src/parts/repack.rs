//! Packed copies of tensors that TMA cannot address.
//!
//! TMA needs addresses and strides that are multiples of 16 bytes, head dimensions that are multiples of 8, and,
//! for ragged batches, sequences that begin at whole rows. Other inputs are packed before the launches that read them; other
//! results are unpacked after the launches that write them. Elements of a packed row beyond the tensor's are zeros, which
//! change no score and no result. A call that needs no copy only compares its strides.

use crate::no_kernel::NoKernel;
use crate::params::{Bindings, Params, Program};
use crate::parts::arguments::DeviceTensor;
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{BuildError, Divisor, Kernel, Pair, Pointer, Target, Val, bf16};
use std::sync::{Arc, OnceLock};

/// Threads of a CTA.
const THREADS: u32 = 256;
/// Elements that a thread moves: 16 bytes of the packed tensor.
pub(crate) const UNIT: u64 = 8;
/// Alignment of packed tensors in their memory, in bytes.
const ALIGN: u64 = 256;

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the caller's tensor to the packed one. Elements that the caller's tensor lacks become zeros.
    Pack,
    /// From the packed tensor to the caller's. Elements that the caller's tensor lacks are dropped.
    Unpack,
}

/// A copy between a tensor of any strides and a packed one.
#[derive(Debug, Clone, Copy)]
struct CopyCall {
    strided: DeviceTensor,
    packed: DeviceTensor,
    /// Units of the packed tensor: one for each thread.
    items: u64,
}

impl CopyCall {
    fn new(strided: DeviceTensor, packed: DeviceTensor) -> CopyCall {
        let [b, s, h, d] = packed.shape;
        CopyCall { strided, packed, items: b * s * h * (d / UNIT) }
    }
}

struct CopyParams<'k> {
    strided: Pointer<'k, bf16>,
    packed: Pointer<'k, Pair<bf16>>,
    items: Val<'k, u32>,
    /// Elements of a row of the strided tensor.
    dim: Val<'k, u32>,
    /// Units of a packed row.
    units: Divisor<'k>,
    heads: Divisor<'k>,
    rows: Divisor<'k>,
    /// Strides of batch, row and head, in elements.
    strides: [Val<'k, u64>; 3],
}

impl<'k> CopyParams<'k> {
    fn declare(p: &Params<'k, CopyCall>) -> Self {
        CopyParams {
            strided: p.array("strided", |call| call.strided.span),
            packed: p.pointer("packed", |call| call.packed.span),
            items: p.u32("items", |call| call.items as u32),
            dim: p.u32("dim", |call| call.strided.shape[3] as u32),
            units: p.divisor("units", |call| (call.packed.shape[3] / UNIT) as u32),
            heads: p.divisor("heads", |call| call.packed.shape[2] as u32),
            rows: p.divisor("rows", |call| call.packed.shape[1] as u32),
            strides: [
                p.u64("batch_stride", |call| call.strided.strides[0]),
                p.u64("row_stride", |call| call.strided.strides[1]),
                p.u64("head_stride", |call| call.strided.strides[2]),
            ],
        }
    }
}

/// Copies `[batch, row, head, dim]` elements of 16 bits between a tensor of any strides and a packed one.
pub fn kernel(target: Target, direction: Direction) -> Result<Kernel, BuildError> {
    let name = match direction {
        Direction::Pack => "attention_pack",
        Direction::Unpack => "attention_unpack",
    };
    let program = Program::build(name, target, |p| {
        let CopyParams { strided, packed, items, dim, units, heads, rows, strides } = CopyParams::declare(p);
        p.builder().threads(THREADS, |w| {
            let item = w.cta().mul_add(THREADS, w.thread());
            w.when(item.lt(items), |w| {
                let [place, unit] = units.div_rem(item);
                let [place, head] = heads.div_rem(place);
                let [batch, row] = rows.div_rem(place);
                let offsets = [(batch, strides[0]), (row, strides[1]), (head, strides[2])]
                    .map(|(index, stride)| index.to_u64().mul_wide_64(stride));
                let at = offsets[0] + offsets[1] + offsets[2];
                let (strided, packed) = (strided.at_wide(at), packed.at_wide(item.mul_wide(UNIT as u32 / 2)));
                let first = unit * UNIT as u32;
                match direction {
                    Direction::Pack => {
                        let zero = w.var(bf16::from_bits(0)).get();
                        // Past the end of a row, read its last element and replace it by zero.
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
    });
    Ok(program?.into_kernel())
}

/// Both copy kernels.
#[derive(Clone)]
pub struct Copying {
    /// Runs before a launch.
    pub pack: Arc<Kernel>,
    /// Runs after it.
    pub unpack: Arc<Kernel>,
}

impl Copying {
    /// Builds both kernels.
    pub fn new(target: Target) -> Result<Copying, BuildError> {
        let build = |direction| kernel(target, direction).map(Arc::new);
        Ok(Copying { pack: build(Direction::Pack)?, unpack: build(Direction::Unpack)? })
    }
}

/// A tensor of a call by name, and the direction of its copy if it needs one.
pub(crate) type Named = (&'static str, DeviceTensor, Direction);

/// The tensors of a call that are copied, and the memory for the copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copies {
    copies: Vec<PackedCopy>,
    bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PackedCopy {
    name: &'static str,
    /// Index among the call's tensors.
    index: usize,
    /// Offset in the memory for copies, in bytes.
    begin: u64,
    shape: [u64; 4],
}

impl Copies {
    /// The copies that a call needs, if any. `unequal`: sequence lengths differ.
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

    /// Bytes of memory for the copies. The memory must be aligned to 16 bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Names of the tensors that are copied.
    pub fn names(&self) -> Vec<&'static str> {
        self.copies.iter().map(|copy| copy.name).collect()
    }

    /// The tensors that the kernels read and write instead, and the launches before and after the kernels' own.
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

/// The launch of one copy; `None` if it has no elements.
fn copy(
    kernel: &Arc<Kernel>,
    name: &str,
    strided: &DeviceTensor,
    packed: &DeviceTensor,
) -> Result<Option<Launch>, NoKernel> {
    static BINDINGS: OnceLock<Bindings<CopyCall>> = OnceLock::new();
    let call = CopyCall::new(*strided, *packed);
    if call.items == 0 {
        return Ok(None);
    }
    if !strided.span.address().is_multiple_of(2) {
        return Err(NoKernel { feature: format!("`{name}` at the odd address {:#x}", strided.span.address()) });
    }
    if call.items >= 1 << 31 {
        return Err(NoKernel {
            feature: format!("a copy of `{name}`, which is needed for its strides, of 2^35 bytes or more"),
        });
    }
    let bindings = BINDINGS.get_or_init(|| {
        Bindings::declared(|p| {
            CopyParams::declare(p);
        })
    });
    let grid = [call.items.div_ceil(THREADS.into()) as u32, 1, 1];
    Ok(Some(bindings.launch(kernel.clone(), grid, &call)))
}

/// Whether TMA can address a tensor. It never gets a tensor without elements.
fn is_fine(placed: &DeviceTensor, unequal: bool) -> bool {
    /// Upper limit of TMA's strides, in elements.
    const FAR: u64 = 1 << 39;
    let steps = placed.strides.iter().all(|stride| stride.is_multiple_of(UNIT) && *stride < FAR);
    let whole_rows = !unequal || placed.step().is_some();
    placed.shape.contains(&0) || (placed.span.address().is_multiple_of(16) && steps && whole_rows)
}
