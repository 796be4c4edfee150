//! The CPU engine.

use crate::Error;
use crate::choice::{ChoiceError, Settings};
use crate::engine::{Engine, Run, Unsupported};
use fulgurite_core::{GradientOutputs, Inputs, Outputs, Precision, Problem, Rescale, Saved, stop};
use fulgurite_cpu::{Isa, Options};

/// Attention on the CPU: SIMD kernels of one instruction set, with any number of threads.
///
/// The results do not depend on the number of threads.
///
/// ```
/// use fulgurite::{Cpu, Engine, Isa, Settings};
///
/// let cpu = Cpu::new(Some(Isa::Portable), &Settings::default().threads(2))?;
/// assert_eq!(cpu.name(), "cpu:portable");
/// # Ok::<(), fulgurite::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cpu {
    isa: Isa,
    threads: usize,
    rescale: Option<Rescale>,
    name: String,
}

impl Cpu {
    /// The engine with this instruction set, or with the fastest one of this machine.
    pub fn new(isa: Option<Isa>, settings: &Settings) -> Result<Cpu, Error> {
        let available = Isa::available();
        let isa = match isa {
            None => available[0],
            Some(isa) if available.contains(&isa) => isa,
            Some(isa) => {
                let has = available.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ");
                return Err(ChoiceError::Isa { got: isa.name(), has }.into());
            }
        };
        let threads = match settings.threads {
            None => std::thread::available_parallelism().map_or(1, usize::from),
            Some(got) if (1..=Settings::MAX_THREADS).contains(&got) => got,
            Some(got) => return Err(ChoiceError::Threads { got }.into()),
        };
        if let Some(rescale) = settings.rescale {
            rescale.check().map_err(ChoiceError::Rescale)?;
        }
        Ok(Cpu { isa, threads, rescale: settings.rescale, name: format!("cpu:{}", isa.name()) })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of threads in use.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// These settings, for the functions of `fulgurite_cpu`.
    pub fn options(&self) -> Options {
        Options { isa: Some(self.isa), threads: Some(self.threads), rescale: self.rescale }
    }
}

impl Engine for Cpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn describe(&self) -> String {
        let threads = if self.threads == 1 { "1 thread".into() } else { format!("{} threads", self.threads) };
        let rescale = self.rescale.map(|r| format!(", rescale {r}")).unwrap_or_default();
        format!("{}, products on {}, {threads}{rescale}", self.name, self.isa.products())
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        if let (precision @ (Precision::Int8(_) | Precision::Groups(_)), Some(rescale)) =
            (problem.precision(), self.rescale)
        {
            // The precision fixes the maximum to which weight codes refer, so another rescale policy cannot apply.
            return Err(Unsupported {
                engine: self.name.clone(),
                feature: format!("precision {precision} with rescale {rescale}"),
                instead: "leave rescale out".into(),
            });
        }
        // SAS cuts off relative to the final maximum, and its table begins at the running one, so no policy may keep another
        // maximum.
        match (problem.exp(), self.rescale) {
            (exp, Some(rescale)) if exp.is_sas() && rescale != Rescale::Always => Err(Unsupported {
                engine: self.name.clone(),
                feature: format!("exp {exp} with rescale {rescale}"),
                instead: "leave rescale out, or use always; the engine `oracle` takes any".into(),
            }),
            _ => Ok(()),
        }
    }

    fn forward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        self.supports(problem)?;
        outputs.check(problem)?;
        let options = self.options();
        let counters = stop::catch_memory(|| fulgurite_cpu::forward_inputs(problem, inputs, outputs, &options))??;
        if let Some(tally) = run.tally {
            tally.add(counters);
        }
        Ok(())
    }

    fn backward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        _run: &Run<'_>,
    ) -> Result<(), Error> {
        self.supports(problem)?;
        if let precision @ Precision::Int8(_) = problem.precision() {
            return Err(Unsupported {
                engine: self.name.clone(),
                feature: format!("gradients with precision {precision}"),
                instead: "train with nvfp4, mxfp4, mxfp8 or native".into(),
            }
            .into());
        }
        let bound = inputs.bind(problem)?;
        saved.check(problem)?;
        gradients.check(problem)?;
        Ok(stop::catch_memory(|| fulgurite_cpu::backward(&bound, saved, gradients, &self.options()))?)
    }
}

/// GFLOP/s of one large f32 matrix product by the CPU engine's own micro-kernel, as a reference for its speed.
///
/// ```
/// assert!(fulgurite::matrix_product_gflops(2) > 0.0);
/// ```
pub fn matrix_product_gflops(threads: usize) -> f64 {
    fulgurite_cpu::probe::gemm_gflops(&fulgurite_cpu::Options { threads: Some(threads), ..Default::default() })
}
