//! `explain` answers for any problem: with a text, a plan or a typed error, never with a panic.

use fulgurite::gpu::{self, Arch, Target, TensorUnit};
use fulgurite::{Choice, DType, Exp, Int8Attention, Mask, Precision, Problem, ProblemBuilder, explain};
use fulgurite_core::BlockSpec;
use fulgurite_core::cases;
use fulgurite_core::random::Rng;
use fulgurite_kernels::attention::forward::plan::{ConfigTable, TileConfig};

fn pick<T: Clone>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.range(0..from.len())].clone()
}

/// A problem without its sizes: sensible and extreme parts in any mixture.
fn builder(rng: &mut Rng) -> ProblemBuilder {
    let heads = [(1, 1), (2, 1), (71, 1), (6, 3), (3, 2), (0, 0), (usize::MAX, 1)];
    let (heads, kv_heads) = pick(rng, &heads);
    let dims = [0, 1, 7, 16, 64, 72, 96, 128, 192, 256, 257, 512, 513, usize::MAX];
    let builder = Problem::builder().heads(heads, kv_heads).head_dims(pick(rng, &dims), pick(rng, &dims));
    let builder = builder.dtype(pick(rng, &[DType::Bf16, DType::F16, DType::F32, DType::I32]));
    let masks = [Mask::none(), Mask::causal(), Mask::window(3, 0), Mask::window(i64::MAX, i64::MIN), Mask::documents()];
    let builder = builder.mask(pick(rng, &masks));
    match rng.range(0..8) {
        0 => builder.softcap(pick(rng, &[0.0, 30.0, f32::NAN, -1.0])),
        1 => builder.alibi(),
        2 => builder.sinks(),
        3 => builder.bias([1, 1, 64, 64], DType::Bf16, true),
        4 => builder.block_mask(BlockSpec { rows: pick(rng, &[0, 1, 64, 128]), ..BlockSpec::default() }),
        5 => builder.exp(pick(rng, &[Exp::Native, Exp::Sas { threshold: Exp::SAS_THRESHOLD }])),
        6 => builder.precision(pick(rng, &[Precision::Int8(Int8Attention::default()), Precision::Native])),
        _ => builder.scale(pick(rng, &[1.0, 0.0, f32::INFINITY, f32::NAN])),
    }
}

const CHOICES: [Choice; 8] = [
    Choice::Best,
    Choice::Cpu,
    Choice::Cuda,
    Choice::CudaUnit(TensorUnit::MmaSync),
    Choice::CudaUnit(TensorUnit::Tcgen05),
    Choice::Sim,
    Choice::SimArch(Arch::SM_86),
    Choice::Oracle,
];

/// Every problem that can be built is explained for every engine: one line says that it runs, or why it cannot.
#[test]
fn every_engine_is_explained_for_any_problem() {
    let mut rng = Rng::new(34);
    let mut explained = 0;
    for seed in 0..300 {
        let sizes = [0, 1, 2, 65, 4096, 1 << 20, 1 << 33, usize::MAX];
        let [batch, q_len, k_len] = [0; 3].map(|_| pick(&mut rng, &sizes));
        let problem = match builder(&mut rng).dense(batch, q_len, k_len).build() {
            Ok(problem) => problem,
            Err(_) => cases::random(seed, DType::Bf16).problem().clone(),
        };
        let choice = pick(&mut rng, &CHOICES);
        let text = explain(&problem, choice);
        assert!(text.contains("run"), "{choice}: {text}");
        explained += 1;
    }
    assert_eq!(explained, 300);
}

/// A plan on any architecture, or an error with a text, for any sizes.
#[test]
fn any_problem_is_planned_or_refused() {
    let mut rng = Rng::new(35);
    let tables = Default::default();
    let [mut planned, mut refused] = [0; 2];
    for i in 0..60 {
        let (small, large) = ([0, 1, 2, 65, 300], [1 << 33, usize::MAX]);
        let sizes = [0; 3].map(|_| if i % 4 == 0 { pick(&mut rng, &large) } else { pick(&mut rng, &small) });
        let mut builder = builder(&mut rng);
        // Some problems that kernels have, so that plans are seen, too.
        if i % 10 == 1 {
            let dim = pick(&mut rng, &[16, 72, 128]);
            let mask = pick(&mut rng, &[Mask::causal(), Mask::window(3, 0)]);
            builder = Problem::builder().heads(2, 1).head_dim(dim).dtype(DType::Bf16).mask(mask);
        }
        let target = Target::new(pick(&mut rng, &Arch::ALL));
        let found = [gpu::explain, gpu::explain_backward].map(|explain| explain(&builder, sizes, target, &tables));
        for found in found {
            match found {
                Ok(explained) => {
                    assert!(explained.bound_seconds.is_finite() && !explained.why.is_empty());
                    planned += 1;
                }
                Err(e) => {
                    assert!(!e.to_string().is_empty());
                    refused += 1;
                }
            }
        }
    }
    // Sizes whose products exceed 64 bits, and more heads than can be simulated.
    let large = Problem::builder().heads(71, 1).head_dim(64).dtype(DType::Bf16);
    let long = 1 << 28;
    assert!(gpu::explain(&large, [1 << 18, long, long], Target::HOPPER, &tables).unwrap().bound_seconds.is_finite());
    let wide = Problem::builder().heads(1 << 20, 1).head_dim(64).dtype(DType::Bf16);
    assert!(gpu::explain(&wide, [1, 300, 300], Target::HOPPER, &tables).unwrap().bound_seconds.is_finite());
    assert!(planned >= 4 && refused >= 40, "{planned} planned, {refused} refused");
}

/// Every tensor unit is explained on every architecture, with the kernels that the architecture has.
#[test]
fn every_architecture_is_explained() {
    let tables = Default::default();
    for arch in Arch::ALL {
        // One architecture of each tensor unit is asked for more.
        let more = [Arch::SM_86, Arch::SM_90A, Arch::SM_100A].contains(&arch);
        let plain = Problem::builder().heads(1, 1).head_dim(64).dtype(DType::Bf16);
        let softcap =
            Problem::builder().heads(2, 1).head_dim(128).dtype(DType::Bf16).mask(Mask::causal()).softcap(30.0);
        for builder in [plain, softcap].iter().take(if more { 2 } else { 1 }) {
            for explain in [gpu::explain, gpu::explain_backward].iter().take(if more { 2 } else { 1 }) {
                let found = explain(builder, [1, 600, 600], Target::new(arch), &tables);
                let explained = found.unwrap_or_else(|e| panic!("{}: {e}", arch.name()));
                assert!(explained.bound_seconds.is_finite() && explained.bound_seconds > 0.0, "{}", arch.name());
                assert_eq!(explained.kernel.target.arch, arch);
                assert!(!explained.tile_config.is_empty() && !explained.units.is_empty(), "{}", arch.name());
            }
        }
    }
}

/// A configuration whose numbers are replaced by any others, or why its text is none.
fn altered<T: TileConfig>(rng: &mut Rng, config: T) -> Result<T, String> {
    let numbers = ["0", "1", "3", "8", "48", "64", "80", "128", "240", "100000", "4294967295"];
    let number = |rng: &mut Rng, text: &str| match text.parse::<u32>() {
        Ok(_) if rng.range(0..3) == 0 => pick(rng, &numbers).to_owned(),
        _ => text.to_owned(),
    };
    let entry = |rng: &mut Rng, entry: &str| match entry.split_once('=') {
        Some((name, value)) => {
            let values: Vec<String> = value.split(',').map(|value| number(rng, value)).collect();
            format!("{name}={}", values.join(","))
        }
        None => entry.to_owned(),
    };
    let text = config.to_string();
    let entries: Vec<String> = text.split(' ').map(|part| entry(rng, part)).collect();
    entries.join(" ").parse::<T>().map_err(|e| e.to_string())
}

/// Profiles are files that people edit: every configuration in one is planned or refused.
#[test]
fn any_configuration_of_a_profile_is_planned_or_refused() {
    let mut rng = Rng::new(36);
    let [mut planned, mut refused] = [0; 2];
    let [all, least] = if std::env::var_os("FULGURITE_LONG").is_some() { [150, 10] } else { [50, 3] };
    for _ in 0..all {
        let dim = pick(&mut rng, &[64, 128, 256]);
        let problem = Problem::builder().heads(2, 1).head_dim(dim).dtype(DType::Bf16).mask(Mask::causal());
        let tables = gpu::Tables::default();
        let (forward, backward) = (tables.forward.find(dim as u32, 300), tables.backward.find(dim as u32, 300));
        let (forward, backward) = match (altered(&mut rng, forward), altered(&mut rng, backward)) {
            (Ok(forward), Ok(backward)) => (forward, backward),
            (Err(why), _) | (_, Err(why)) => {
                assert!(!why.is_empty());
                refused += 1;
                continue;
            }
        };
        let (forward, backward) = (ConfigTable::of(forward), ConfigTable::of(backward));
        let tables = gpu::Tables { forward, backward, ..gpu::Tables::default() };
        let sizes = [1, 65, 130];
        for found in
            [gpu::explain, gpu::explain_backward].map(|explain| explain(&problem, sizes, Target::HOPPER, &tables))
        {
            match found {
                Ok(explained) => planned += usize::from(explained.bound_seconds.is_finite()),
                Err(e) => refused += usize::from(!e.to_string().is_empty()),
            }
        }
    }
    assert!(planned >= least && refused >= least, "{planned} planned, {refused} refused");
}
