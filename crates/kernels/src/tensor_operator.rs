//! Operators over whole tensors: contiguous inputs, one contiguous output, one kernel.
//!
//! A [`TensorOperator`] is a value that holds everything a tool needs: the signature, the kernel, the grid, and the definition
//! in f64. The registry lists these values, so that the simulator, the assembler, the command line and Python run a new operator
//! without code of their own. `crates/kernels/src/row_dot.rs` is the example to copy.

use crate::operator::{Executable, Memory, Needs, Operator, Plan, Refusal, Tables};
use crate::params::{Bindings, Program};
use crate::tensor_type::{MAX_ELEMENTS, TensorRefusal, TensorType};
use fulgurite_core::{Tensor, TensorView};
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{BuildError, Kernel, Target};
use std::sync::Arc;

/// Rounds a number to the type that a definition computes in: the identity for the exact result.
pub type Round = fn(f64) -> f64;

/// A definition: types and shapes of the inputs, their values in row-major order, and the rounding after each operation.
pub type Definition = fn(&[TensorType], &[Vec<f64>], Round) -> Vec<f64>;

/// An operator over whole tensors.
#[derive(Debug, Clone, Copy)]
pub struct TensorOperator {
    /// Name of the operator and of its kernel.
    pub name: &'static str,
    /// The formula, in a line.
    pub summary: &'static str,
    /// Names of the inputs.
    pub inputs: &'static [&'static str],
    /// Type and shape of the output, for inputs whose number is right.
    pub output: fn(&[TensorType]) -> Result<TensorType, TensorRefusal>,
    /// The kernel. Its text does not depend on shapes.
    pub program: fn(Target) -> Result<Program<Call>, BuildError>,
    /// CTAs of a launch that has elements to compute.
    pub grid: fn(&Call) -> [u32; 3],
    /// The definition in f64.
    pub reference: Definition,
    /// Inputs of about `rows` rows and `cols` columns, for the simulator and for tests.
    pub example: fn(rows: usize, cols: usize) -> Vec<TensorType>,
}

impl PartialEq for TensorOperator {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl TensorOperator {
    /// Type and shape of the output; refuses inputs that do not fit.
    pub fn output(&self, inputs: &[TensorType]) -> Result<TensorType, TensorRefusal> {
        if inputs.len() != self.inputs.len() {
            return Err(TensorRefusal::Count { operator: self.name, got: inputs.len(), names: self.inputs });
        }
        let output = (self.output)(inputs)?;
        for (arg, tensor) in self.inputs.iter().copied().zip(inputs).chain([("output", &output)]) {
            if tensor.count().is_none_or(|count| count >= MAX_ELEMENTS) {
                return Err(TensorRefusal::Large { arg, got: tensor.clone() });
            }
        }
        Ok(output)
    }

    /// The definition in f64 over host tensors: each element is rounded once, to the output's type.
    pub fn exact(&self, inputs: &[TensorView<'_>]) -> Result<Tensor, TensorRefusal> {
        let types: Vec<TensorType> = inputs.iter().map(TensorType::of).collect();
        let output = self.output(&types)?;
        let values: Vec<Vec<f64>> = inputs.iter().map(TensorView::to_f64).collect();
        let result = (self.reference)(&types, &values, |x| x);
        Ok(Tensor::from_f64(output.dtype, &result, &output.shape)?)
    }

    /// The kernel alone.
    pub fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        Ok((self.program)(target)?.into_kernel())
    }
}

/// A tensor of a call: its memory and its shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOperand {
    /// Contiguous elements in row-major order.
    pub span: Span,
    /// Size of each axis, from which kernels take their scalar arguments.
    pub shape: Vec<usize>,
}

impl DeviceOperand {
    /// The size of an axis. [`TensorOperator::output`] has checked that it fits 32 bits.
    pub fn size(&self, axis: usize) -> u32 {
        self.shape[axis] as u32
    }
}

/// The tensors of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The inputs, in the operator's order.
    pub inputs: Vec<DeviceOperand>,
    /// The output.
    pub output: DeviceOperand,
}

/// Operators over whole tensors, as a session runs them.
#[derive(Debug, Clone, Copy)]
pub struct WholeTensors;

/// An operator with the types and shapes of its inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorProblem {
    /// The operator.
    pub operator: &'static TensorOperator,
    /// Types and shapes of the inputs.
    pub inputs: Vec<TensorType>,
}

impl Operator for WholeTensors {
    type Problem = TensorProblem;
    type Options = ();
    type Plan = TensorProblem;

    fn plan(problem: &TensorProblem, (): &(), _: Target, _: &Tables) -> Result<TensorProblem, Refusal> {
        problem.operator.output(&problem.inputs)?;
        Ok(problem.clone())
    }
}

/// The kernel of an operator and its launch arguments.
#[derive(Clone)]
pub struct TensorKernel {
    kernel: Arc<Kernel>,
    bindings: Arc<Bindings<Call>>,
}

impl Plan for TensorProblem {
    type Kernels = TensorKernel;
    type Executable = TensorExecutable;

    fn same_kernels(&self, other: &Self) -> bool {
        self.operator == other.operator
    }

    fn build(&self, target: Target) -> Result<TensorKernel, BuildError> {
        let (kernel, bindings) = (self.operator.program)(target)?.split();
        Ok(TensorKernel { kernel, bindings: Arc::new(bindings) })
    }

    fn list(kernels: &TensorKernel) -> Vec<Arc<Kernel>> {
        vec![kernels.kernel.clone()]
    }

    fn with_kernels(self, kernels: TensorKernel) -> TensorExecutable {
        TensorExecutable { operator: self.operator, kernels }
    }
}

/// An operator with its kernel.
pub struct TensorExecutable {
    operator: &'static TensorOperator,
    kernels: TensorKernel,
}

impl Executable for TensorExecutable {
    type Tensors = Call;

    fn needs(&self, _: &Call) -> Needs {
        Needs::default()
    }

    fn launches(&self, call: &Call, _: &Memory, _: u32) -> Result<Vec<Launch>, Refusal> {
        if call.output.shape.contains(&0) {
            return Ok(Vec::new());
        }
        let TensorKernel { kernel, bindings } = &self.kernels;
        Ok(vec![bindings.launch(kernel.clone(), (self.operator.grid)(call), call)])
    }
}
