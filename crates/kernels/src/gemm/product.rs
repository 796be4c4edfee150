//! The matrix product as an operator: which tensor unit multiplies, its kernel, and its launch.

use crate::gemm::mma_sync::SyncGemm;
use crate::gemm::plan::{Gemm, GemmError, Matrix};
use crate::gemm::{self, GemmConfig, Layouts};
use crate::no_kernel::NoKernel;
use crate::operator::{Executable, Memory, Needs, Operator, Plan, Refusal, Tables, choose_unit};
use fulgurite_ptx::device::Launch;
use fulgurite_ptx::{BuildError, Half, Kernel, Number, Pair, Target, TensorUnit, Word, bf16, f16};
use std::sync::Arc;

/// The matrix product C = A B.
#[derive(Debug, Clone, Copy)]
pub struct Product;

/// Per-call options of a product.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProductOptions {
    /// The unit that multiplies matrices; `None` means the GPU's own.
    pub unit: Option<TensorUnit>,
}

/// A product by one tensor unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProductPlan {
    gemm: Gemm,
    unit: TensorUnit,
}

impl Operator for Product {
    type Problem = Gemm;
    type Options = ProductOptions;
    type Plan = ProductPlan;

    fn plan(problem: &Gemm, options: &ProductOptions, target: Target, _: &Tables) -> Result<ProductPlan, Refusal> {
        let Gemm { number, config, .. } = *problem;
        if !matches!(number, Number::F16 | Number::Bf16) {
            return Err(GemmError::Number { got: number }.into());
        }
        let unit = choose_unit(target, options.unit)?;
        let has_kernel = match unit {
            TensorUnit::Wgmma => true,
            TensorUnit::Tcgen05 => matches!(config.cluster, 1 | 2),
            // The kernel has one tile configuration, and it is not this type's.
            TensorUnit::MmaSync => config == GemmConfig::default(),
        };
        match has_kernel {
            true => Ok(ProductPlan { gemm: *problem, unit }),
            false => Err(NoKernel { feature: format!("products by {unit} with tile configuration {config:?}") }.into()),
        }
    }
}

/// Builds the kernel of a product of 16-bit floats.
fn kernel<T: Half>(target: Target, layouts: Layouts, config: GemmConfig, unit: TensorUnit) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    match unit {
        TensorUnit::MmaSync => gemm::mma_sync::kernel::<T>(target, layouts),
        TensorUnit::Wgmma => gemm::kernel::<T>(target, layouts, config),
        TensorUnit::Tcgen05 => gemm::tcgen05::kernel::<T>(target, layouts, config),
    }
}

impl ProductPlan {
    /// Builds the kernel of products with the usual tile configuration in clusters of this size. `number` is f16 or bf16.
    pub(crate) fn usual_kernel(
        target: Target,
        (number, layouts): (Number, Layouts),
        (unit, cluster): (TensorUnit, u32),
    ) -> Result<Kernel, BuildError> {
        let config = GemmConfig { cluster, ..GemmConfig::default() };
        ProductPlan { gemm: Gemm { number, layouts, config }, unit }.kernel(target)
    }

    fn kernel(&self, target: Target) -> Result<Kernel, BuildError> {
        let Gemm { number, layouts, config } = self.gemm;
        match number {
            Number::F16 => kernel::<f16>(target, layouts, config, self.unit),
            Number::Bf16 => kernel::<bf16>(target, layouts, config, self.unit),
            got => panic!("bug in fulgurite: a plan of a product of {}", got.name()),
        }
    }
}

impl Plan for ProductPlan {
    type Kernels = Arc<Kernel>;
    type Executable = ProductExecutable;

    fn same_kernels(&self, other: &Self) -> bool {
        self == other
    }

    fn build(&self, target: Target) -> Result<Arc<Kernel>, BuildError> {
        Ok(Arc::new(self.kernel(target)?))
    }

    fn list(kernel: &Arc<Kernel>) -> Vec<Arc<Kernel>> {
        vec![kernel.clone()]
    }

    fn with_kernels(self, kernel: Arc<Kernel>) -> ProductExecutable {
        ProductExecutable { plan: self, kernel }
    }
}

/// A product with its kernel.
pub struct ProductExecutable {
    plan: ProductPlan,
    kernel: Arc<Kernel>,
}

impl Executable for ProductExecutable {
    /// The matrices A, B and C.
    type Tensors = [Matrix; 3];

    fn needs(&self, _: &[Matrix; 3]) -> Needs {
        Needs::default()
    }

    fn launches(&self, matrices: &[Matrix; 3], _: &Memory, multiprocessors: u32) -> Result<Vec<Launch>, Refusal> {
        let ProductPlan { gemm, unit } = self.plan;
        let Gemm { number, layouts, .. } = gemm;
        let launch = match unit {
            TensorUnit::MmaSync => SyncGemm { number, layouts }.launch(self.kernel.clone(), *matrices)?,
            TensorUnit::Wgmma | TensorUnit::Tcgen05 => gemm.launch(self.kernel.clone(), *matrices, multiprocessors)?,
        };
        Ok(vec![launch])
    }
}
