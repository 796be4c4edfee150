//! Chooses the engine that runs a problem, and explains the choice.

use crate::Error;
use crate::choice::{Choice, Settings};
use crate::cpu::Cpu;
use crate::device::OnDevice;
use crate::engine::{Engine, Run, Unsupported};
use crate::oracle::Oracle;
use crate::profile::Tables;
use fulgurite_core::{GradientOutputs, Inputs, Outputs, Problem, Saved, stop};
use fulgurite_cpu::{Isa, Options, Way};
use fulgurite_cuda::{Cuda, Options as CudaOptions};
use fulgurite_ptx::device::Device;
use fulgurite_ptx::{Target, TensorUnit};
use fulgurite_sim::{Options as SimOptions, Sim};
use std::sync::Arc;

/// Makes an engine with default settings.
///
/// ```
/// use fulgurite::{Choice, Engine, engine};
/// assert_eq!(engine(Choice::Oracle)?.name(), "oracle");
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn engine(choice: Choice) -> Result<Box<dyn Engine>, Error> {
    engine_with(choice, &Settings::default())
}

/// Makes an engine with custom settings.
///
/// ```
/// use fulgurite::{Choice, Settings, engine_with};
/// let refused = engine_with(Choice::Cpu, &Settings::default().threads(0)).err().unwrap();
/// assert_eq!(refused.to_string(), "`threads` is 0, allowed: 1 to 4096; leave it out for one per core");
/// ```
pub fn engine_with(choice: Choice, settings: &Settings) -> Result<Box<dyn Engine>, Error> {
    Ok(match choice {
        Choice::Best => Box::new(Best::new(settings)?),
        Choice::Cpu => Box::new(Cpu::new(None, settings)?),
        Choice::CpuIsa(isa) => Box::new(Cpu::new(Some(isa), settings)?),
        Choice::Cuda => cuda(settings, None)?,
        Choice::CudaUnit(unit) => cuda(settings, Some(unit))?,
        Choice::Sim => simulator(Target::HOPPER, settings),
        Choice::SimArch(arch) => simulator(Target::new(arch), settings),
        Choice::Oracle => Box::new(Oracle),
    })
}

/// The first GPU.
fn cuda(settings: &Settings, unit: Option<TensorUnit>) -> Result<Box<dyn Engine>, Error> {
    let cuda = Cuda::open(0, CudaOptions::default())?;
    let tables = settings.profile.tables(&cuda.name())?;
    Ok(on_device(cuda, tables, settings, unit))
}

/// A simulated GPU, whose launches end where the caller wants an end.
fn simulator(target: Target, settings: &Settings) -> Box<dyn Engine> {
    let sim = Sim::on(target, SimOptions::default()).polling(stop::poll);
    on_device(sim, Tables::default(), settings, None)
}

fn on_device<D: Device + 'static>(
    device: D,
    tables: Tables,
    settings: &Settings,
    unit: Option<TensorUnit>,
) -> Box<dyn Engine> {
    let engine = OnDevice::new(Arc::new(device), settings.rescale, tables);
    Box::new(engine.in_order(settings.order).with_unit(unit))
}

/// Every engine that this machine can run, fastest first; the oracle is last. The simulator runs everywhere but is not
/// in the list: it is found only by its name.
///
/// ```
/// use fulgurite::{Choice, engine, engines};
/// for choice in engines() {
///     println!("{}", engine(choice)?.describe());
/// }
/// assert_eq!(engines().last(), Some(&Choice::Oracle));
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn engines() -> Vec<Choice> {
    let gpu = Cuda::open(0, CudaOptions::default()).is_ok().then_some(Choice::Cuda);
    gpu.into_iter().chain(Isa::available().into_iter().map(Choice::CpuIsa)).chain([Choice::Oracle]).collect()
}

/// Explains which engine would run the problem, and why the others would not, in one line each.
///
/// ```
/// use fulgurite::{Choice, Problem, explain};
/// let problem = Problem::builder().dense(1, 8, 8).heads(1, 1).head_dim(4).build()?;
/// let text = explain(&problem, Choice::Best);
/// assert!(text.starts_with("cpu:"));
/// assert!(text.contains("runs it"));
/// assert!(text.ends_with("oracle: not used, it runs only when asked for by name"));
/// # Ok::<(), fulgurite::Error>(())
/// ```
pub fn explain(problem: &Problem, choice: Choice) -> String {
    explain_with(problem, choice, &Settings::default())
}

/// The unit that computes a problem's products on the CPU and the way that a call takes, as text.
fn unit(choice: Choice, problem: &Problem) -> String {
    match choice {
        Choice::CpuIsa(isa) => {
            let way = Way::of(problem, &Options { isa: Some(isa), ..Options::default() });
            format!("; products on {}; way: {way}", isa.unit_of(problem))
        }
        _ => String::new(),
    }
}

fn explain_with(problem: &Problem, choice: Choice, settings: &Settings) -> String {
    let asked = match choice {
        Choice::Cpu => Isa::available().first().copied().map(Choice::CpuIsa),
        Choice::Best => None,
        other => Some(other),
    };
    let mut lines = Vec::new();
    if let Some(Err(e)) = asked.map(|asked| engine_with(asked, settings).map(|_| ())) {
        lines.push(format!("{choice}: cannot run, {e}"));
    }
    let mut runs = false;
    // The simulator, and a GPU with another instruction than its fastest, are candidates only if they were requested.
    let named = asked.filter(|asked| matches!(asked, Choice::Sim | Choice::SimArch(_) | Choice::CudaUnit(_)));
    for candidate in named.into_iter().chain(engines()) {
        let refusal = match engine_with(candidate, settings) {
            Ok(engine) => engine.supports(problem).err().map(|e| e.to_string()),
            Err(e) => Some(e.to_string()),
        };
        let verdict = match (refusal, asked) {
            (Some(refusal), _) => format!("cannot run it, {refusal}"),
            (None, Some(asked)) if asked == candidate => {
                format!("runs it, it was asked for{}", unit(candidate, problem))
            }
            (None, Some(asked)) => format!("not used, {asked} was asked for"),
            (None, None) if candidate == Choice::Oracle => "not used, it runs only when asked for by name".into(),
            (None, None) if candidate == Choice::Cuda => "not used, tensors would have to be moved to it".into(),
            (None, None) if runs => "not used, slower".into(),
            (None, None) => {
                runs = true;
                format!("runs it, the fastest on this machine that can{}", unit(candidate, problem))
            }
        };
        lines.push(format!("{candidate}: {verdict}"));
    }
    lines.join("\n")
}

/// Chooses the fastest engine that supports each problem.
struct Best {
    /// Engines, fastest first. The oracle is excluded: it would be a silent fallback to very slow execution.
    engines: Vec<Box<dyn Engine>>,
}

impl Best {
    fn new(settings: &Settings) -> Result<Best, Error> {
        Ok(Best { engines: vec![Box::new(Cpu::new(None, settings)?)] })
    }

    fn pick(&self, problem: &Problem) -> Result<&dyn Engine, Unsupported> {
        let mut refusal = None;
        for engine in &self.engines {
            match engine.supports(problem) {
                Ok(()) => return Ok(engine.as_ref()),
                Err(e) => refusal = refusal.or(Some(e)),
            }
        }
        Err(refusal.expect("bug in fulgurite: `best` has no engines"))
    }
}

impl Engine for Best {
    fn name(&self) -> &str {
        "best"
    }

    fn describe(&self) -> String {
        let all: Vec<String> = self.engines.iter().map(|engine| engine.describe()).collect();
        all.join("; or ")
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        self.pick(problem).map(|_| ())
    }

    fn forward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        self.pick(problem)?.forward_into(problem, inputs, outputs, run)
    }

    fn backward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        self.pick(problem)?.backward_into(problem, inputs, saved, gradients, run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::{Exp, Rescale};

    #[test]
    fn names_round_trip() {
        for name in [
            "best",
            "cpu",
            "cpu:amx",
            "cpu:avx512",
            "cpu:avx512bf16",
            "cpu:avx2",
            "cpu:neon",
            "cpu:portable",
            "cuda",
            "sim",
            "oracle",
        ] {
            assert_eq!(name.parse::<Choice>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn bad_choices_say_what_is_allowed() {
        assert_eq!(
            "gpu".parse::<Choice>().unwrap_err().to_string(),
            "`engine` is \"gpu\", allowed: best, cpu, cpu:amx, cpu:avx512, cpu:avx512bf16, cpu:avx2, cpu:neon, cpu:portable, cuda, cuda:wgmma, cuda:mma.sync, cuda:tcgen05, sim, sim:ARCH with one of sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a, sm_121a, oracle"
        );
        assert!("cpu:".parse::<Choice>().is_err());
        let missing = Isa::ALL.into_iter().find(|isa| !Isa::available().contains(isa)).expect("no machine has all");
        let has = Isa::available().iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ");
        assert_eq!(
            engine(Choice::CpuIsa(missing)).err().unwrap().to_string(),
            format!(
                "`engine` is cpu:{}, this machine has: {has}; leave the instruction set out for the fastest",
                missing.name()
            )
        );
        assert_eq!(
            engine_with(Choice::Best, &Settings::default().rescale(Rescale::Lazy(99.0))).err().unwrap().to_string(),
            "`tau` is 99, allowed: 0 to 60; the usual value is 8, 0 rescales always"
        );
        assert_eq!(
            engine_with(Choice::Best, &Settings::default().threads(0)).err().unwrap().to_string(),
            "`threads` is 0, allowed: 1 to 4096; leave it out for one per core"
        );
    }

    #[test]
    fn sas_goes_with_always_only() {
        let problem = || Problem::builder().dense(1, 1, 1).heads(1, 1).head_dim(4);
        let lazy = Settings::default().rescale(Rescale::Lazy(8.0));
        let portable = engine_with(Choice::CpuIsa(Isa::Portable), &lazy).unwrap();
        assert_eq!(portable.supports(&problem().build().unwrap()), Ok(()));
        for (exp, name) in [(Exp::Sas { threshold: -10.0 }, "sas:-10"), (Exp::SasOnline, "sas:online")] {
            let sas = problem().exp(exp).build().unwrap();
            assert_eq!(
                portable.supports(&sas).unwrap_err().to_string(),
                format!(
                    "engine cpu:portable does not have exp {name} with rescale lazy:8; leave rescale out, or use always; the engine `oracle` takes any"
                )
            );
            for rescale in [None, Some(Rescale::Always)] {
                let settings = Settings { rescale, ..Settings::default() };
                assert_eq!(engine_with(Choice::Best, &settings).unwrap().supports(&sas), Ok(()));
            }
            let text = explain_with(&sas, Choice::Best, &lazy);
            assert!(text.lines().rev().skip(1).all(|line| line.contains("cannot run it")), "{text}");
        }
    }

    #[test]
    fn explanations_name_every_engine() {
        let problem = Problem::builder().dense(1, 1, 1).heads(1, 1).head_dim(4).build().unwrap();
        let lines = |choice| explain(&problem, choice).lines().map(String::from).collect::<Vec<_>>();
        let oracle = lines(Choice::Oracle);
        assert_eq!(oracle.len(), engines().len());
        assert_eq!(oracle.last().unwrap(), "oracle: runs it, it was asked for");
        assert!(oracle[0].ends_with("not used, oracle was asked for"));
        assert!(lines(Choice::Cpu)[0].contains(": runs it, it was asked for; products on "));
        assert!(lines(Choice::Cpu)[0].contains("; way: "));
        let missing = Isa::ALL.into_iter().find(|isa| !Isa::available().contains(isa)).expect("no machine has all");
        assert!(lines(Choice::CpuIsa(missing))[0].contains("cannot run, `engine` is"));
    }
}
