//! Kernel parameters, each declared once: its name, its type, and the launch argument that it stands for.
//!
//! A kernel is built from [`Params`]. Every declaration gives the value that the kernel's code uses, and a function
//! from the call to the argument. A [`Program`] keeps the kernel and these functions in the order of declaration, so a
//! launch cannot miss an argument, name one that does not exist, or pass one in another's place.
//!
//! ```
//! use fulgurite_kernels::params::Program;
//! use fulgurite_ptx::Target;
//! use fulgurite_ptx::device::Span;
//!
//! struct Call {
//!     x: Span,
//!     count: u32,
//! }
//! let program = Program::<Call>::build("negate", Target::HOPPER, |p| {
//!     let x = p.pointer::<f32>("x", |call| call.x);
//!     let count = p.u32("count", |call| call.count);
//!     p.builder().threads(128, |w| {
//!         let i = w.cta().mul_add(128, w.thread());
//!         w.when(i.lt(count), |w| x.store(w, i, -x.load(w, i)));
//!     });
//! })?;
//! let call = Call { x: Span::new(4096, 400), count: 100 };
//! assert_eq!(program.launch([1, 1, 1], &call).args.len(), 2);
//! # Ok::<(), fulgurite_ptx::BuildError>(())
//! ```

use fulgurite_ptx::device::{Launch, Span, TensorSpan, Value};
use fulgurite_ptx::{
    BuildError, Builder, Divisor, Kernel, Pointer, Target, Tensor, TileShape, Val, Word, divisor_values,
};
use std::cell::RefCell;
use std::sync::Arc;

/// The argument of one parameter, from a call.
type Argument<C> = Box<dyn Fn(&C) -> Value + Send + Sync>;

/// The parameters of a kernel under construction; `C` is the call from which arguments are taken.
pub struct Params<'k, C> {
    builder: &'k Builder,
    arguments: RefCell<Vec<Argument<C>>>,
}

impl<'k, C: 'static> Params<'k, C> {
    /// The kernel under construction.
    pub fn builder(&self) -> &'k Builder {
        self.builder
    }

    fn argument(&self, value: impl Fn(&C) -> Value + Send + Sync + 'static) {
        self.arguments.borrow_mut().push(Box::new(value));
    }

    /// An unsigned integer.
    #[track_caller]
    pub fn u32(&self, name: &str, value: impl Fn(&C) -> u32 + Send + Sync + 'static) -> Val<'k, u32> {
        self.argument(move |call| Value::U32(value(call)));
        self.builder.param(name)
    }

    /// A signed integer.
    #[track_caller]
    pub fn i32(&self, name: &str, value: impl Fn(&C) -> i32 + Send + Sync + 'static) -> Val<'k, i32> {
        self.argument(move |call| Value::U32(value(call) as u32));
        self.builder.param(name)
    }

    /// An unsigned integer of 64 bits.
    #[track_caller]
    pub fn u64(&self, name: &str, value: impl Fn(&C) -> u64 + Send + Sync + 'static) -> Val<'k, u64> {
        self.argument(move |call| Value::U64(value(call)));
        self.builder.param(name)
    }

    /// A float.
    #[track_caller]
    pub fn f32(&self, name: &str, value: impl Fn(&C) -> f32 + Send + Sync + 'static) -> Val<'k, f32> {
        self.argument(move |call| Value::F32(value(call)));
        self.builder.param(name)
    }

    /// An array in global memory, aligned to 16 bytes.
    #[track_caller]
    pub fn pointer<T: Word>(&self, name: &str, span: impl Fn(&C) -> Span + Send + Sync + 'static) -> Pointer<'k, T> {
        self.argument(move |call| Value::Pointer(span(call)));
        self.builder.pointer(name)
    }

    /// An array in global memory, aligned to its elements only.
    #[track_caller]
    pub fn array<T: Word>(&self, name: &str, span: impl Fn(&C) -> Span + Send + Sync + 'static) -> Pointer<'k, T> {
        self.argument(move |call| Value::Pointer(span(call)));
        self.builder.array(name)
    }

    /// A tensor of `rank` axes that TMA moves in tiles of this shape.
    #[track_caller]
    pub fn tensor(
        &self,
        name: &str,
        tile: TileShape,
        rank: u32,
        span: impl Fn(&C) -> TensorSpan + Send + Sync + 'static,
    ) -> Tensor<'k> {
        self.argument(move |call| Value::Tensor(span(call)));
        self.builder.tensor(name, tile, rank)
    }

    /// A divisor for the kernel, which takes three parameters.
    #[track_caller]
    pub fn divisor(&self, name: &str, value: impl Fn(&C) -> u32 + Clone + Send + Sync + 'static) -> Divisor<'k> {
        for part in 0..3 {
            let value = value.clone();
            self.argument(move |call| divisor_values(value(call))[part].clone());
        }
        self.builder.divisor(name)
    }
}

/// The part of a call from which one part of a kernel takes its arguments.
///
/// Parts that several kernels share declare their parameters through a lens, because each kernel has its own call type.
pub trait Lens<C, A>: Fn(&C) -> &A + Copy + Send + Sync + 'static {}
impl<C, A, F: Fn(&C) -> &A + Copy + Send + Sync + 'static> Lens<C, A> for F {}

/// The arguments of a part that the kernel has. A plan fills exactly the parts that its kernel declares; the fingerprints of
/// launches hold every combination of parts to it.
pub(crate) fn given<A>(part: &Option<A>) -> &A {
    part.as_ref().expect("bug in fulgurite: a call without arguments that its kernel has")
}

/// The launch arguments of a kernel in the order of its parameters.
///
/// A kernel's text and its arguments are often needed at different times: text is compiled and cached, while arguments are
/// made for each launch. Both come from the same declarations.
pub struct Bindings<C> {
    arguments: Vec<Argument<C>>,
}

impl<C: 'static> Bindings<C> {
    /// Runs a kernel's declarations without its body.
    pub fn declared(declare: impl FnOnce(&Params<'_, C>)) -> Bindings<C> {
        let mut arguments = Vec::new();
        // Declarations need a builder. The kernel that it builds has no body, so errors about it do not matter.
        let _ = Kernel::build("declarations", Target::HOPPER, |builder| {
            let params = Params { builder, arguments: RefCell::default() };
            declare(&params);
            arguments = params.arguments.into_inner();
        });
        Bindings { arguments }
    }

    /// A launch of `grid` CTAs for a call. The kernel must come from these declarations.
    pub fn launch(&self, kernel: Arc<Kernel>, grid: [u32; 3], call: &C) -> Launch {
        let (declared, bound) = (kernel.params.len(), self.arguments.len());
        assert_eq!(declared, bound, "bug in fulgurite: arguments of another kernel than `{}`", kernel.name);
        Launch { kernel, grid, args: self.arguments.iter().map(|argument| argument(call)).collect() }
    }
}

/// A kernel with the arguments of its launches.
pub struct Program<C> {
    kernel: Arc<Kernel>,
    bindings: Bindings<C>,
}

impl<C: 'static> Program<C> {
    /// Builds a kernel from its parameters.
    pub fn build(name: &str, target: Target, build: impl FnOnce(&Params<'_, C>)) -> Result<Program<C>, BuildError> {
        let mut arguments = Vec::new();
        let kernel = Kernel::build(name, target, |builder| {
            let params = Params { builder, arguments: RefCell::default() };
            build(&params);
            arguments = params.arguments.into_inner();
        })?;
        let (declared, bound) = (kernel.params.len(), arguments.len());
        assert_eq!(
            declared, bound,
            "bug in fulgurite: kernel `{name}` has parameters that were not declared by `Params`"
        );
        Ok(Program { kernel: Arc::new(kernel), bindings: Bindings { arguments } })
    }

    /// The kernel to launch.
    pub fn kernel(&self) -> &Arc<Kernel> {
        &self.kernel
    }

    /// The kernel, without the arguments of its launches.
    pub fn into_kernel(self) -> Kernel {
        Arc::unwrap_or_clone(self.kernel)
    }

    /// The kernel and its bindings, separately.
    pub fn split(self) -> (Arc<Kernel>, Bindings<C>) {
        (self.kernel, self.bindings)
    }

    /// A launch of `grid` CTAs for a call.
    pub fn launch(&self, grid: [u32; 3], call: &C) -> Launch {
        self.bindings.launch(self.kernel.clone(), grid, call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Call {
        n: u32,
        part: Part,
    }

    struct Part {
        x: Span,
        scale: f32,
    }

    fn declare<'k>(p: &Params<'k, Call>) -> (Val<'k, u32>, Divisor<'k>, Val<'k, f32>) {
        let n = p.u32("n", |call| call.n);
        declare_part(p, |call| &call.part);
        (n, p.divisor("by", |call| call.n + 1), p.f32("scale", |call| call.part.scale))
    }

    /// As parts of several kernels do it.
    fn declare_part<'k, C: 'static>(p: &Params<'k, C>, at: impl Lens<C, Part>) -> Pointer<'k, f32> {
        p.pointer("x", move |call| at(call).x)
    }

    fn call() -> Call {
        Call { n: 6, part: Part { x: Span::new(4096, 16), scale: 0.5 } }
    }

    fn kernel(params: u32) -> Arc<Kernel> {
        let build = |k: &Builder| {
            (0..params).for_each(|i| {
                k.param::<u32>(&format!("p{i}"));
            });
            k.threads(32, |_| {});
        };
        Arc::new(Kernel::build("another", Target::HOPPER, build).unwrap())
    }

    #[test]
    fn arguments_come_in_the_order_of_declaration() {
        let program = Program::<Call>::build("some", Target::HOPPER, |p| {
            declare(p);
            p.builder().threads(32, |_| {});
        });
        let launch = program.unwrap().launch([2, 1, 1], &call());
        let names: Vec<&str> = launch.kernel.params.iter().map(|param| param.name.as_str()).collect();
        assert_eq!(names, ["n", "x", "by", "by_magic", "by_shift", "scale"]);
        let [seven, magic, shift] = divisor_values(7);
        let pointer = Value::Pointer(call().part.x);
        assert_eq!(launch.args, [Value::U32(6), pointer, seven, magic, shift, Value::F32(0.5)]);
        // The declarations alone give the same arguments.
        let bindings = Bindings::<Call>::declared(|p| {
            declare(p);
        });
        assert_eq!(bindings.launch(launch.kernel.clone(), [2, 1, 1], &call()).args, launch.args);
    }

    #[test]
    #[should_panic(expected = "arguments of another kernel than `another`")]
    fn arguments_of_another_kernel_are_refused() {
        let bindings = Bindings::<Call>::declared(|p| {
            declare(p);
        });
        bindings.launch(kernel(5), [1, 1, 1], &call());
    }
}
